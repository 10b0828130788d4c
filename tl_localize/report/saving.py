"""Tables as Markdown, LaTeX and CSV, and figures as PNG and SVG, on disk."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from pandas.api.types import is_numeric_dtype

from tl_localize.drawing import image_bytes
from tl_localize.files import prepare_folder, write_text, write_whole
from tl_localize.texts.reference import DATA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS: dict[str, str] = json.loads((DATA / "captions.json").read_text(encoding="utf-8"))
INDEX_NAMES = ("source", "setting", "method")  # of a table's last levels where they have no names


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub table; the levels of the index become columns.

    >>> print(to_markdown(pd.DataFrame({"R@1x": [87.2, 3.4]}, index=["Hard Concrete", "Random"])))
    | method        |   R@1x |
    |:--------------|-------:|
    | Hard Concrete |   87.2 |
    | Random        |    3.4 |
    """
    # a bar would end the cell, a new line the row
    named = flat(table).rename(
        columns=lambda name: str(name).replace("|", r"\|").replace("\n", " ")
    )
    escaped = named.replace({r"\|": r"\\|", r"\n": " "}, regex=True)
    texts = [i for i, kind in enumerate(escaped.dtypes) if not is_numeric_dtype(kind)]
    as_they_are = texts if len(escaped) else False
    return escaped.to_markdown(index=False, floatfmt=".3g", disable_numparse=as_they_are)


def flat(table: pd.DataFrame) -> pd.DataFrame:
    """A table whose index became columns, with names.

    >>> list(flat(pd.DataFrame({"R@1x": [87.2]}, index=["Hard Concrete"])).columns)
    ['method', 'R@1x']
    """
    names = zip(table.index.names, ("", *INDEX_NAMES)[-table.index.nlevels :], strict=True)
    return table.reset_index(names=[str(given or name) for given, name in names])


def save_table(table: pd.DataFrame, folder: str | Path, name: str, caption: str = "") -> None:
    """Write NAME.md, NAME.tex and NAME.csv, each whole or not at all.

    >>> save_table(pd.DataFrame({"R@1x": [87.2]}, index=["Hard Concrete"]), folder, "inj", "Recall")
    >>> sorted(path.name for path in folder.iterdir())
    ['inj.csv', 'inj.md', 'inj.tex']
    """
    whole = flat(table)
    escaped = re.sub(r"([%&#_$])", r"\\\1", caption)  # of the cells pandas takes care
    latex = whole.to_latex(index=False, caption=escaped or None, escape=True, float_format="%.3g")
    texts = {
        "md": f"{caption}\n\n{to_markdown(table)}\n".lstrip(),
        "tex": latex,
        "csv": whole.to_csv(index=False),
    }
    path = prepare_folder(folder)
    for suffix, text in texts.items():
        write_text(path / f"{name}.{suffix}", text)


def save_figure(figure: "Figure", folder: str | Path, name: str) -> None:
    """Write NAME.png, for screens of high resolution, and NAME.svg, each whole or not at all.

    >>> from matplotlib.figure import Figure
    >>> save_figure(Figure(), folder, "empty")
    >>> sorted(path.name for path in folder.iterdir())
    ['empty.png', 'empty.svg']
    """
    path = prepare_folder(folder)
    for suffix in ("png", "svg"):
        write_whole(
            path / f"{name}.{suffix}", image_bytes(figure, suffix, dpi=200, bbox_inches="tight")
        )
