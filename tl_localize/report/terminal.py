"""Tables for a terminal, by rich: the best method first, controls below a rule. A pipe gets them as
plain text.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import TRUE_ROWS, InjResults
from tl_localize.files import write_text
from tl_localize.methods import RandomBaseline, RowNorm
from tl_localize.report.paper import TITLES, short_title
from tl_localize.report.tables import flat

NO_METHODS = [RowNorm.name, RandomBaseline.name, TRUE_ROWS]  # the row of a table that is no method
CONTROLS = [TITLES[name] for name in NO_METHODS]
BLOCKS = " ▁▂▃▄▅▆▇█"


def console(*, record: bool = False) -> Console:
    """Standard output; in a pipe nothing is wrapped. ``record`` keeps what is printed for
    ``save_svg``.
    """
    width = 110 if record else None if sys.stdout.isatty() else 200
    return Console(width=width, highlight=False, record=record)


def save_svg(out: Console, path: Path) -> None:
    """Write what a recording console printed as a picture that needs no font from elsewhere."""
    fonts = re.compile(r"@font-face {.*?}", re.DOTALL)
    write_text(
        path, fonts.sub("", out.export_svg(title="tl-localize demo", theme=SVG_EXPORT_THEME))
    )


def ranked(table: pd.DataFrame, *, lowest_first: bool = False) -> Iterator[tuple[str, Table]]:
    """Each setting of a results table and its table: sorted by the first column, the best in bold,
    without columns that are all equal.

    Args:
        table: texts such as ``87.2 ± 0.9`` with the method as the last level of the index.
        lowest_first: the smallest number of the first column is the best.

    >>> table = pd.DataFrame({"R@1x": ["3.4 ± 0.2", "58.9 ± 1.4", "87.2 ± 0.9"]}, index=["Random", "Slimming", "Hard Concrete"])
    >>> ((_, shown),) = ranked(table)
    >>> [str(cell) for cell in shown.columns[0].cells]
    ['Hard Concrete', 'Slimming', 'Random']
    """
    above = list(range(table.index.nlevels - 1))
    for setting, part in table.groupby(level=above, sort=False) if above else [((), table)]:
        part = part.set_axis(part.index.get_level_values(-1))
        first = [number(cell) if lowest_first else -number(cell) for cell in part.iloc[:, 0]]
        part = part.iloc[
            sorted(
                range(len(part)),
                key=lambda i: (part.index[i] in CONTROLS, math.isnan(first[i]), first[i]),
            )
        ]
        kept = [
            column for i, column in enumerate(part.columns) if i == 0 or part[column].nunique() > 1
        ]
        shown = Table(box=box.SIMPLE_HEAD, header_style="")
        shown.add_column("method")
        for column in kept:
            shown.add_column(str(column), justify="right")
        for place, (name, row) in enumerate(part.iterrows()):
            if place and name in CONTROLS and part.index[place - 1] not in CONTROLS:
                shown.add_section()
            style = "dim" if name in CONTROLS else ""
            styles = ["bold" if place == 0 and not style else style, *[style] * (len(kept) - 1)]
            cells = [Text(str(cell), one) for cell, one in zip(row[kept], styles, strict=True)]
            shown.add_row(Text(short_title(str(name)), styles[0]), *cells)
        yield ", ".join(map(str, setting)), shown


def plain(table: pd.DataFrame) -> Table:
    """A table as it is; the levels of its index become columns, and numbers stand to the right.

    >>> plain(pd.DataFrame({"done": [3]}, index=pd.Index(["slimming"], name="method"))).row_count
    1
    """
    whole, shown = flat(table), Table(box=box.SIMPLE_HEAD, header_style="")
    for name in whole.columns:
        shown.add_column(
            escape(str(name)),
            justify="right" if pd.api.types.is_numeric_dtype(whole[name]) else "left",
        )
    for row in whole.itertuples(index=False):
        shown.add_row(
            *(f"{cell:.3g}" if isinstance(cell, float) else escape(str(cell)) for cell in row)
        )
    return shown


def number(cell: object) -> float:
    """The number that a cell begins with; what has none comes last.

    >>> number("-20.4 ± 2.4"), number("")
    (-20.4, nan)
    """
    try:
        return float(str(cell).split()[0])
    except (ValueError, IndexError):
        return math.nan


def bars(counts: list[int]) -> str:
    """A bar for each count, the highest one full.

    >>> bars([0, 4, 8])
    ' ▄█'
    """
    most = max([*counts, 1])
    return "".join(BLOCKS[math.ceil(count / most * (len(BLOCKS) - 1))] for count in counts)


def reading(results: InjResults | DelResults) -> str:
    """What the main table says, in a sentence: of the largest ratio, and of INJ for as many neurons
    as were injected.
    """
    inj = isinstance(results, InjResults)
    ratios = results.frame["injection_ratio" if inj else "ratio"]
    frame = results.frame[ratios == ratios.max()]
    if inj:
        frame = frame[frame["converged"] & (frame["multiple"] == frame["multiple"].min())]
    means = 100 * frame.groupby("method").mean(numeric_only=True)
    methods = means.drop(NO_METHODS, errors="ignore")
    if not len(methods):
        return ""
    if not inj:
        best = methods["delta_self_accuracy"].idxmin()
        pairs = means.reindex([best, RandomBaseline.name])[
            ["delta_self_accuracy", "delta_neg_accuracy"]
        ].to_numpy()
        own, by_chance = (
            f"{target:+.1f} points on the target and {others:+.1f} on others"
            for target, others in pairs
        )
        top = f"the top {100 * frame['ratio'].iloc[0]:g} % of each layer by {short_title(best)}"
        return f"Accuracy without {top}: {own}; without as many at random: {by_chance}."
    best, control = methods["recall"].idxmax(), means["recall"].get(RowNorm.name, math.nan)
    found = f"{short_title(best)} finds {methods['recall'].max():.0f} % of"
    if results.distractors:
        other = f"{means.loc[best, 'foreign_recall']:.0f} % of the distractors'"
        return f"{found} the target's rows and {other}. A method that does not read the sentence finds as many of both."
    if control < methods["recall"].max():
        return f"{found} the injected rows; RowNorm, which never reads the sentence, finds {control:.0f} %."
    return (
        f"No method beats RowNorm ({control:.0f} %), which never reads the sentence: what is found "
        "here is altered rows, not the text. "
        "Try --distractors 3."
    )
