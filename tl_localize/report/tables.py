"""Tables as Markdown, LaTeX and CSV, and the paper's published numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.evals.del_results import METRICS, DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.files import prepare_folder, write_text
from tl_localize.report.paper import TITLES, published, short_title
from tl_localize.stats import mean_text, with_error

DEL_CAPTIONS = {  # by file name
    "del_memorization": "How well the test sequences are memorized; accuracy teacher-forced, perplexity of general text",
    "del": "DEL: change when the located neurons are ablated, mean ± standard error over targets",
    "del_tests": "DEL, Δ Self-Acc: one-tailed paired t-tests against Integrated Gradients, Bonferroni",
    "del_categories": "The test sequences by category",
    "del_related": "DEL: are sequences of the target's category hurt more than others? One-tailed paired t-tests",
    "del_single_layer": "DEL, one layer against all at equal budget: change of accuracy (points), mean ± standard error over targets",
    "del_examples": "Examples, and the change of their accuracy (points) by each method at the largest ratio",
}
INDEX_NAMES = ("source", "setting", "method")  # of a table's last levels where they have no names


def inj_tables(results: InjResults, model: str) -> dict[str, pd.DataFrame]:
    """The INJ tables by file name: per layer, across layers, tests, and the paper's numbers where it has this model.

    With distractors there are two more: what ablating the found rows does, and whether the ground truth holds.

    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> results = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02).run([Attribution()])
    >>> list(inj_tables(results, "gpt2")["inj"].index.unique(0))
    ['ours', 'paper']
    """
    tables = {"inj": results.table(), "inj_across_layers": results.table(across_layers=True)}
    if results.distractors:
        tables |= {"inj_ablation": results.ablation_table(), "inj_truth": results.truth_table()}
    else:
        tables["inj"] = _with_paper(tables["inj"], "inj", model, _inj_layout)
        tables["inj_across_layers"] = _with_paper(tables["inj_across_layers"], "inj_global", model, _inj_layout)
    used = results.frame[results.frame["converged"]]
    if "integrated_gradients" in set(used["method"]) and used["group"].nunique() > 1:
        tables["inj_tests"] = results.tests().set_index(["injection_ratio", "ratio", "method"])
    return {name: table.rename(index=TITLES) for name, table in tables.items()}


def del_tables(results: DelResults, model: str) -> dict[str, pd.DataFrame]:
    """The DEL tables by file name (``DEL_CAPTIONS``), with the paper's numbers beside ours where it has this model.

    ``del_tests`` is there if Integrated Gradients ran, ``del_categories`` and ``del_related`` if the sequences have categories.

    >>> results = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> list(del_tables(results, "reference-gpt2"))
    ['del_memorization', 'del', 'del_categories', 'del_examples']
    """
    tables = {"del_memorization": results.before_table(), "del": _with_paper(results.table(), "del", model, _del_layout)}
    if len(theirs := published("memorization", model)):
        tables["del_memorization"] = pd.concat([tables["del_memorization"], _memorization_layout(theirs)])
    if results.frame["method"].eq("integrated_gradients").any():
        tables["del_tests"] = _del_tests(results, model)
    if results.before["category"].ne("").any():
        tables["del_categories"] = _with_paper(_categories(results), "categories", model, _categories_layout).fillna("")
        if len(related := results.related()):
            tables["del_related"] = _related(related)
    tables["del_examples"] = _examples(results)
    return {name: table.rename(index=TITLES) for name, table in tables.items()}


def single_layer_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One layer against all layers at equal budget, from a frame of ``DelBenchmark.run_single_layer``: change of accuracy in points, text.

    There is a row for all layers together and one for each layer; columns for each factor of the budget, Self and Neg.

    >>> frame = DelBenchmark(model, few[:2], text, ratios=(0.02,), n_dev=0).run_single_layer(Attribution(), 0.02)
    >>> list(single_layer_table(frame).index[:2])
    ['all layers', 'layer 0']
    """
    rows: dict[str, dict[str, str]] = {}
    for (layer, factor), part in frame.assign(layer=frame["layer"].fillna(-1)).groupby(["layer", "multiple"]):
        row = rows.setdefault("all layers" if layer == -1 else f"layer {layer}", {})
        for name, column in (("Self", "delta_self_accuracy"), ("Neg", "delta_neg_accuracy")):
            row[f"{factor} x budget, {name}"] = with_error(100 * part[column])
    return pd.DataFrame(rows).T.fillna("").rename_axis("ablated")


def _with_paper(ours: pd.DataFrame, table: str, model: str, layout: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """Our table above the paper's, where the paper has this model."""
    theirs = published(table, model)
    return pd.concat({"ours": ours, "paper": layout(theirs)}, names=["source"]) if len(theirs) else ours


def _blocks(frame: pd.DataFrame, cell: Callable[[Any], tuple[str, str, str]]) -> pd.DataFrame:
    """A table of cells (setting, column, text), one for each published number, in the order of first appearance."""
    cells = [(row["method"], *cell(row)) for row in frame.to_dict("records")]
    table = pd.DataFrame(cells, columns=["method", "setting", "column", "text"])
    return table.pivot_table(index=["setting", "method"], columns="column", values="text", aggfunc="first", sort=False)


def _inj_layout(frame: pd.DataFrame) -> pd.DataFrame:
    def cell(row: Any) -> tuple[str, str, str]:
        ratio, top = float(row["setting"]), float(row["metric"].removeprefix("recall@"))
        text = mean_text(100 * row["value"], 100 * row["standard_error"])
        return f"ratio {100 * ratio:g} %, published", f"R@{round(top / ratio, 6):g}x", text

    return _blocks(frame, cell)


def _del_layout(frame: pd.DataFrame) -> pd.DataFrame:
    def cell(row: Any) -> tuple[str, str, str]:
        title, factor, decimals = METRICS[row["metric"].replace("delta_random_", "delta_")]
        return f"{100 * float(row['setting']):g} % of each layer, published", title, f"{factor * row['value']:.{decimals}f}"

    return _blocks(frame, cell).reindex(columns=[title for title, _, _ in METRICS.values()], fill_value="")


def _memorization_layout(frame: pd.DataFrame) -> pd.DataFrame:
    value: Any = frame.set_index("metric")["value"]
    row = {
        "Acc (%)": f"{100 * value['accuracy']:.1f}",
        "Dist (characters)": f"{value['levenshtein']:.2f}",
        "PPL": "",
        "PPL (2 ** nats)": f"{value['perplexity_base2']:.2f}",
        "Len (characters)": f"{value['suffix_length']:.0f}",
        "Sequences": "",
    }
    return pd.DataFrame({f"{frame['model'].iloc[0]}, published": row}).T


def _categories_layout(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"sequences": [f"{count:.0f}" for count in frame["value"]]}, index=frame["note"].rename("category"))


def _del_tests(results: DelResults, model: str) -> pd.DataFrame:
    tests = results.tests()
    theirs = {(row["method"], float(row["setting"])): row["value"] for row in published("del_pvalues", model).to_dict("records")}
    if theirs:
        tests["published_p_value"] = [theirs.get(key, math.nan) for key in zip(tests["method"], tests["ratio"], strict=True)]
    tests["difference"] = (100 * tests["difference"]).round(6)  # equal means differ in the last bit
    same = [name for name in ("model", "ablation") if tests[name].nunique() == 1]
    keys = [name for name in ("model", "ablation", "ratio", "method") if name not in same]
    return tests.drop(columns=same).rename(columns={"difference": "difference of Δ Self-Acc (points)"}).set_index(keys)


def _categories(results: DelResults) -> pd.DataFrame:
    before: Any = results.before.drop_duplicates(["model", "sequence_id"])
    rows: dict[str, dict[str, str]] = {}
    for category, part in before.groupby("category", sort=False):
        text = _on_one_line(part["prefix"].iloc[0] + part["suffix"].iloc[0])
        example = text if len(text) <= 60 else text[:59] + "…"
        rows[category or "(none)"] = {"sequences": f"{len(part)}", "Acc (%)": f"{100 * part['accuracy'].mean():.1f}", "example": example}
    return pd.DataFrame(rows).T.rename_axis(index="category")


def _related(related: pd.DataFrame) -> pd.DataFrame:
    related = related.sort_values("ratio", kind="stable").set_index(["ratio", "method"])
    means: dict[str, list[str]] = {}
    for name, whose in (("related", "the same category"), ("unrelated", "other categories")):
        pairs = zip(100 * related[name], 100 * related[f"{name}_error"], strict=True)
        means[f"Δ Acc of {whose} (points)"] = [mean_text(mean, error, 2) for mean, error in pairs]
    return pd.DataFrame(means, index=related.index).join(related[["p_value", "n"]])


def _examples(results: DelResults, n: int = 8) -> pd.DataFrame:
    """The first sequence of each category, then the next ones, with the change that each method makes at the largest ratio."""
    before: Any = results.before.drop_duplicates("sequence_id")
    frame: Any = results.frame[results.frame["ratio"] == results.frame["ratio"].max()].drop_duplicates(["sequence_id", "method"])
    before = before[before["sequence_id"].isin(frame["sequence_id"])]
    turn = before.groupby("category").cumcount()
    rows: dict[str, dict[str, str]] = {}
    for _, row in before.loc[turn.sort_values(kind="stable").index].head(n).iterrows():
        changes = frame[frame["sequence_id"] == row["sequence_id"]]
        rows[row["sequence_id"]] = {
            "category": row["category"],
            "Acc (%)": f"{100 * row['accuracy']:.0f}",
            "prefix": _on_one_line(row["prefix"]),
            "suffix": _on_one_line(row["suffix"]),
            **{short_title(part["method"]): f"{100 * part['delta_self_accuracy']:.0f}" for part in changes.to_dict("records")},
        }
    return pd.DataFrame(rows).T.rename_axis(index="sequence")


def _on_one_line(text: str) -> str:
    return text.replace("\n", r"\n")


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub table; the levels of the index become columns.

    >>> print(to_markdown(pd.DataFrame({"R@1x": [87.2, 3.4]}, index=["Hard Concrete", "Random"])))
    | method        |   R@1x |
    |:--------------|-------:|
    | Hard Concrete |   87.2 |
    | Random        |    3.4 |
    """
    escaped = _flat(table).map(lambda cell: cell.replace("|", r"\|") if isinstance(cell, str) else cell)
    return escaped.to_markdown(index=False, floatfmt=".3g")


def _flat(table: pd.DataFrame) -> pd.DataFrame:
    names = zip(table.index.names, ("", *INDEX_NAMES)[-table.index.nlevels :], strict=True)
    return table.reset_index(names=[str(given or name) for given, name in names])


def save_table(table: pd.DataFrame, folder: str | Path, name: str, caption: str = "") -> None:
    """Write NAME.md, NAME.tex and NAME.csv, each whole or not at all.

    >>> save_table(pd.DataFrame({"R@1x": [87.2]}, index=["Hard Concrete"]), folder, "inj", "Recall in percent")
    >>> sorted(path.name for path in folder.iterdir())
    ['inj.csv', 'inj.md', 'inj.tex']
    """
    path, flat = prepare_folder(folder), _flat(table)
    write_text(path / f"{name}.md", (f"{caption}\n\n" if caption else "") + to_markdown(table) + "\n")
    write_text(path / f"{name}.tex", flat.to_latex(index=False, caption=caption or None, escape=True, float_format="%.3g"))
    write_text(path / f"{name}.csv", flat.to_csv(index=False))
