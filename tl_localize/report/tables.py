"""Tables as Markdown, LaTeX and CSV, and the paper's published numbers beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.files import prepare_folder, write_text
from tl_localize.reference import DATA
from tl_localize.report.paper import TITLES, published, short_title
from tl_localize.stats import mean_text, with_error

CAPTIONS: dict[str, str] = json.loads((DATA / "captions.json").read_text(encoding="utf-8"))
INDEX_NAMES = ("source", "setting", "method")  # of a table's last levels where they have no names


def inj_tables(results: InjResults, model: str) -> dict[str, pd.DataFrame]:
    """The INJ tables by file name (``CAPTIONS``): per layer, across layers, tests, and the paper's
    numbers where it has this model.

    With distractors there are two more: what ablating the found rows does, and whether the ground
    truth holds.

    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02)
    >>> list(inj_tables(benchmark.run([Attribution()]), "gpt2")["inj"].index.unique(0))
    ['ours', 'paper']
    """
    tables = {"inj": results.table(), "inj_across_layers": results.table(across_layers=True)}
    if results.distractors:
        tables |= {"inj_ablation": results.ablation_table(), "inj_truth": results.truth_table()}
    else:
        for name, theirs in (("inj", "inj"), ("inj_across_layers", "inj_global")):
            tables[name] = _with_paper(tables[name], theirs, model)
    used = results.frame[results.frame["converged"]]
    if used["group"].nunique() > 1:
        if used["method"].eq("integrated_gradients").any():
            tables["inj_tests"] = results.tests().set_index(["injection_ratio", "ratio", "method"])
        tables["inj_pairs"] = results.pairs()
        if results.distractors:
            tables["inj_pairs_foreign"] = results.pairs("foreign_recall")
    return {name: _with_titles(table) for name, table in tables.items()}


def del_tables(
    results: DelResults, model: str, layers: pd.DataFrame | None = None
) -> dict[str, pd.DataFrame]:
    """The DEL tables by file name (``CAPTIONS``), with the paper's numbers beside ours where it has
    this model; ``layers`` is what ``SingleLayerStudy`` measured.

    ``del_tests`` is there if Integrated Gradients ran, ``del_categories`` and ``del_related`` if
    the sequences have categories, ``del_single_layer`` if a method was run in single layers.

    >>> results = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> list(del_tables(results, "reference-gpt2"))
    ['del_memorization', 'del', 'del_at_price', 'del_pairs', 'del_categories', 'del_examples']
    """
    tables = {
        "del_memorization": _with_paper(results.before_table(), "memorization", model),
        "del": _with_paper(results.table(), "del", model),
        "del_at_price": results.at_price(),
    }
    if results.frame["method"].eq("integrated_gradients").any():
        tables["del_tests"] = _del_tests(results, model)
    if results.frame["sequence_id"].nunique() > 1:
        tables["del_pairs"] = results.pairs()
    if results.before["category"].ne("").any():
        tables["del_categories"] = _with_paper(_categories(results), "categories", model)
        if len(related := results.related()):
            tables["del_related"] = _related(related)
    tables["del_examples"] = _examples(results)
    if layers is not None and len(layers):
        parts = {method: single_layer_table(part) for method, part in layers.groupby("method")}
        tables["del_single_layer"] = pd.concat(parts, names=["method"])
    return {name: _with_titles(table) for name, table in tables.items()}


def single_layer_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One layer against all layers at equal budget, from the frame of ``SingleLayerStudy`` for one
    method: change of accuracy in points, text.

    There is a row for all layers together and one for each, at the largest ratio; columns for each
    factor of the budget, Self and Neg. The numbers of neurons differ a little: all layers together
    round down layer by layer, one layer takes the whole budget.

    >>> frame = SingleLayerStudy(model, few[:2], text, ratios=(0.02,), n_dev=0).run([Attribution()])
    >>> list(single_layer_table(frame).index[:2])
    ['all layers', 'layer 0']
    """
    rows: dict[str, dict[str, str]] = {}
    largest = frame[frame["ratio"] == frame["ratio"].max()]
    named = largest["layer"].map("layer {}".format, na_action="ignore").fillna("all layers")
    for (layer, factor), part in largest.groupby([named, "multiple"]):
        row = rows.setdefault(layer, {"neurons": ""})
        count = f"{part['n_neurons'].mean():.0f}"
        row["neurons"] += f", {count}" if row["neurons"] else count
        for name, column in (("Self", "delta_self_accuracy"), ("Neg", "delta_neg_accuracy")):
            row[f"{factor} x budget, {name}"] = with_error(100 * part[column])
    return pd.DataFrame(rows).T.fillna("").rename_axis("ablated")


def _with_paper(ours: pd.DataFrame, table: str, model: str) -> pd.DataFrame:
    """Our table above the paper's, where the paper has this model."""
    theirs = published(table, model)
    if not len(theirs):
        return ours
    rows = ["row", "method"] if theirs["method"].notna().all() else ["row"]
    texts = theirs.pivot_table("text", rows, "column", aggfunc="first", sort=False)
    return pd.concat({"ours": ours, "paper": texts}, names=["source"]).fillna("")


def _with_titles(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(index=TITLES, columns={name: short_title(name) for name in TITLES})


def _del_tests(results: DelResults, model: str) -> pd.DataFrame:
    tests = results.tests()
    theirs = published("del_pvalues", model).rename(columns={"value": "published_p_value"})
    if len(theirs):
        theirs["ratio"] = theirs["setting"].astype(float)
        tests = tests.merge(theirs[["method", "ratio", "published_p_value"]], how="left")
    tests["difference"] = (100 * tests["difference"]).round(6)  # equal means differ in the last bit
    tests = tests.rename(columns={"difference": "difference of Δ Self-Acc (points)"})
    several = [name for name in ("model", "ablation") if tests[name].nunique() > 1]
    indexed = tests.set_index([*several, "ratio", "method"])
    return indexed.drop(columns=["model", "ablation"], errors="ignore")


def _one_line(text: pd.Series) -> pd.Series:
    return text.str.replace("\n", r"\n", regex=False)


def _categories(results: DelResults) -> pd.DataFrame:
    """Of each category: how many sequences, their accuracy, and the beginning of the first one."""
    unique = results.before.drop_duplicates(["model", "sequence_id"])
    groups: Any = unique.groupby("category", sort=False)
    text = _one_line(groups["prefix"].first() + groups["suffix"].first())
    columns = {
        "sequences": groups.size().map(str),
        "Acc (%)": (100 * groups["accuracy"].mean()).map("{:.1f}".format),
        "example": text.where(text.str.len() <= 60, text.str[:59] + "…"),
    }
    return pd.DataFrame(columns).rename(index={"": "(none)"})


def _related(related: pd.DataFrame) -> pd.DataFrame:
    related = related.sort_values("ratio", kind="stable").set_index(["ratio", "method"])
    means: dict[str, list[str]] = {}
    for name, whose in (("related", "the same category"), ("unrelated", "other categories")):
        pairs = zip(100 * related[name], 100 * related[f"{name}_error"], strict=True)
        means[f"Δ Acc of {whose} (points)"] = [mean_text(mean, error, 2) for mean, error in pairs]
    return pd.DataFrame(means, index=related.index).join(related[["p_value", "n"]])


def _examples(results: DelResults, n: int = 8) -> pd.DataFrame:
    """The first sequence of each category, then the next ones, with the change that each method
    makes at the largest ratio.
    """
    frame: Any = results.frame[results.frame["ratio"] == results.frame["ratio"].max()]
    frame = frame.drop_duplicates(["sequence_id", "method"])
    before: Any = results.before.drop_duplicates("sequence_id").set_index("sequence_id")
    before = before[before.index.isin(frame["sequence_id"])].rename_axis("sequence")
    first = before.groupby("category").cumcount().sort_values(kind="stable").index[:n]
    before = before.loc[first]
    columns = {
        "category": before["category"],
        "Acc (%)": (100 * before["accuracy"]).map("{:.0f}".format),
        "prefix": _one_line(before["prefix"]),
        "suffix": _one_line(before["suffix"]),
    }
    changes = frame.pivot(index="sequence_id", columns="method", values="delta_self_accuracy")
    points = (100 * changes).map("{:.0f}".format, na_action="ignore")[frame["method"].unique()]
    return pd.DataFrame(columns).join(points)


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub table; the levels of the index become columns.

    >>> print(to_markdown(pd.DataFrame({"R@1x": [87.2, 3.4]}, index=["Hard Concrete", "Random"])))
    | method        |   R@1x |
    |:--------------|-------:|
    | Hard Concrete |   87.2 |
    | Random        |    3.4 |
    """
    escaped = flat(table).replace(r"\|", r"\\|", regex=True)  # a bar would end the cell
    return escaped.to_markdown(index=False, floatfmt=".3g")


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
    latex = whole.to_latex(index=False, caption=caption or None, escape=True, float_format="%.3g")
    texts = {
        "md": f"{caption}\n\n{to_markdown(table)}\n".lstrip(),
        "tex": latex,
        "csv": whole.to_csv(index=False),
    }
    path = prepare_folder(folder)
    for suffix, text in texts.items():
        write_text(path / f"{name}.{suffix}", text)
