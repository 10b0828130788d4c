"""Tables as Markdown, LaTeX and CSV, and the paper's published numbers beside ours."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from tl_localize.evals.inj_benchmark import InjResults
from tl_localize.paper import TITLES, published
from tl_localize.store import prepare_folder, write_text


def inj_tables(results: InjResults, model: str) -> dict[str, pd.DataFrame]:
    """The INJ tables by file name: per layer, across layers, tests, and the paper's numbers where it has this model.

    With distractors also what silencing the found rows does, and whether the ground truth holds.
    """
    tables = {"inj": results.table(), "inj_across_layers": results.table(across_layers=True)}
    if results.distractors:
        tables |= {"inj_silencing": results.silencing_table(), "inj_truth": results.truth_table()}
    used = results.frame[results.frame["converged"]]
    if "integrated_gradients" in set(used["method"]) and used["group"].nunique() > 1:
        tables["inj_tests"] = results.tests().set_index(["injection_ratio", "ratio", "method"])
    for name, source in (("inj", "inj"), ("inj_across_layers", "inj_global")):
        theirs = published(source, model)
        if len(theirs) and not results.distractors:
            tables[name] = pd.concat({"ours": tables[name], "paper": _paper_layout(theirs)}, axis=0)
    return {name: table.rename(index=TITLES) for name, table in tables.items()}


def _paper_layout(frame: pd.DataFrame) -> pd.DataFrame:
    blocks: dict[str, pd.DataFrame] = {}
    for setting, block in frame.groupby("setting", sort=False):
        ratio = float(str(setting))
        rows: dict[str, dict[str, str]] = {}
        for row in block.to_dict("records"):
            multiple = float(str(row["metric"]).removeprefix("recall@")) / ratio
            error = "" if pd.isna(row["standard_error"]) else f" ± {100 * row['standard_error']:.1f}"
            rows.setdefault(str(row["method"]), {})[f"R@{round(multiple, 6):g}x"] = f"{100 * row['value']:.1f}{error}"
        blocks[f"ratio {100 * ratio:g} %, published"] = pd.DataFrame(rows).T
    return pd.concat(blocks)


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub table; the levels of the index become columns."""
    return table.reset_index(names=_level_names(table)).to_markdown(index=False, floatfmt=".3g")


def _level_names(table: pd.DataFrame) -> list[str]:
    named = {1: ["method"], 2: ["setting", "method"], 3: ["source", "setting", "method"]}
    given = [str(name) for name in table.index.names if name is not None]
    return given if len(given) == table.index.nlevels else named[table.index.nlevels]


def save_table(table: pd.DataFrame, folder: str | Path, name: str, caption: str = "") -> None:
    """Write NAME.md, NAME.tex and NAME.csv, each whole or not at all."""
    path = prepare_folder(folder)
    flat = table.reset_index(names=_level_names(table))
    write_text(path / f"{name}.md", (f"{caption}\n\n" if caption else "") + to_markdown(table) + "\n")
    write_text(path / f"{name}.tex", flat.to_latex(index=False, caption=caption or None, escape=True, float_format="%.3g"))
    write_text(path / f"{name}.csv", flat.to_csv(index=False))
