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

CAPTIONS = {  # by file name
    "inj": "INJ: recall (%) among the top 1x, 2x, 5x as many rows of each layer as were altered, mean ± standard error; "
    "with distractors of the target's / the distractors' rows",
    "inj_across_layers": "INJ: the same among the top rows of the whole model",
    "inj_ablation": "INJ with distractors: change of accuracy (points) when the found rows are ablated",
    "inj_truth": "INJ with distractors: does the ground truth hold? Accuracy (%) / loss (nats per token)",
    "inj_tests": "INJ: one-tailed paired t-tests of recall against Integrated Gradients, Bonferroni",
    "inj_pairs": "INJ, recall (%) at 1x: row minus column, and p of the one-tailed paired t-test that the row is larger",
    "inj_pairs_foreign": "INJ with distractors, recall (%) of the distractors' rows at 1x: the same, p that the row is smaller",
    "del_memorization": "How well the test sequences are memorized; accuracy teacher-forced, perplexity of general text",
    "del": "DEL: change when the located neurons are ablated, mean ± standard error over targets",
    "del_at_price": "DEL: Δ Self-Acc (points) at the same Δ Neg-Acc (points), interpolated between the ratios; -: the curve ends before",
    "del_tests": "DEL, Δ Self-Acc: one-tailed paired t-tests against Integrated Gradients, Bonferroni",
    "del_pairs": "DEL, Δ Self-Acc (points), largest ratio: row minus column, and p of the one-tailed paired t-test that the row is lower",
    "del_categories": "The test sequences by category",
    "del_related": "DEL: are sequences of the target's category hurt more than others? One-tailed paired t-tests",
    "del_single_layer": "DEL, one layer against all at equal budget: change of accuracy (points), mean ± standard error over targets",
    "del_examples": "Examples, and the change of their accuracy (points) by each method at the largest ratio",
}
INDEX_NAMES = ("source", "setting", "method")  # of a table's last levels where they have no names


def inj_tables(results: InjResults, model: str) -> dict[str, pd.DataFrame]:
    """The INJ tables by file name (``CAPTIONS``): per layer, across layers, tests, and the paper's
    numbers where it has this model.

    With distractors there are two more: what ablating the found rows does, and whether the ground
    truth holds.

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
        tables["inj_across_layers"] = _with_paper(
            tables["inj_across_layers"], "inj_global", model, _inj_layout
        )
    used = results.frame[results.frame["converged"]]
    if used["group"].nunique() > 1:
        if used["method"].eq("integrated_gradients").any():
            tables["inj_tests"] = results.tests().set_index(["injection_ratio", "ratio", "method"])
        tables["inj_pairs"] = results.pairs().rename(columns=short_title)
        if results.distractors:
            tables["inj_pairs_foreign"] = results.pairs("foreign_recall").rename(
                columns=short_title
            )
    return {name: table.rename(index=TITLES) for name, table in tables.items()}


def del_tables(results: DelResults, model: str) -> dict[str, pd.DataFrame]:
    """The DEL tables by file name (``CAPTIONS``), with the paper's numbers beside ours where it has
    this model.

    ``del_tests`` is there if Integrated Gradients ran, ``del_categories`` and ``del_related`` if
    the sequences have categories, ``del_single_layer`` if a method was run in single layers.

    >>> results = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> list(del_tables(results, "reference-gpt2"))
    ['del_memorization', 'del', 'del_at_price', 'del_pairs', 'del_categories', 'del_examples']
    """
    tables = {
        "del_memorization": results.before_table(),
        "del": _with_paper(results.table(), "del", model, _del_layout),
    }
    if len(theirs := published("memorization", model)):
        tables["del_memorization"] = pd.concat(
            [tables["del_memorization"], _memorization_layout(theirs)]
        ).fillna("")
    tables["del_at_price"] = results.at_price()
    if results.frame["method"].eq("integrated_gradients").any():
        tables["del_tests"] = _del_tests(results, model)
    if results.frame["sequence_id"].nunique() > 1:
        tables["del_pairs"] = results.pairs().rename(columns=short_title)
    if results.before["category"].ne("").any():
        tables["del_categories"] = _with_paper(
            _categories(results), "categories", model, _categories_layout
        ).fillna("")
        if len(related := results.related()):
            tables["del_related"] = _related(related)
    tables["del_examples"] = _examples(results)
    if results.single_layer:
        parts = {
            method: single_layer_table(frame) for method, frame in results.single_layer.items()
        }
        tables["del_single_layer"] = pd.concat(parts, names=["method"])
    return {name: table.rename(index=TITLES) for name, table in tables.items()}


def single_layer_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One layer against all layers at equal budget, from a frame of
    ``DelBenchmark.run_single_layer``: change of accuracy in points, text.

    There is a row for all layers together and one for each, at the largest ratio; columns for each
    factor of the budget, Self and Neg. The numbers of neurons differ a little: all layers together
    round down layer by layer, one layer takes the whole budget.

    >>> frame = DelBenchmark(model, few[:2], text, ratios=(0.02,), n_dev=0).run_single_layer(Attribution(), 0.02)
    >>> list(single_layer_table(frame).index[:2])
    ['all layers', 'layer 0']
    """
    rows: dict[str, dict[str, str]] = {}
    frame = frame[frame["ratio"] == frame["ratio"].max()]
    for (layer, factor), part in frame.assign(layer=frame["layer"].fillna(-1)).groupby(
        ["layer", "multiple"]
    ):
        row = rows.setdefault("all layers" if layer == -1 else f"layer {layer}", {"neurons": ""})
        row["neurons"] += f"{', ' * bool(row['neurons'])}{part['n_neurons'].mean():.0f}"
        for name, column in (("Self", "delta_self_accuracy"), ("Neg", "delta_neg_accuracy")):
            row[f"{factor} x budget, {name}"] = with_error(100 * part[column])
    return pd.DataFrame(rows).T.fillna("").rename_axis("ablated")


def _with_paper(
    ours: pd.DataFrame, table: str, model: str, layout: Callable[[pd.DataFrame], pd.DataFrame]
) -> pd.DataFrame:
    """Our table above the paper's, where the paper has this model."""
    theirs = published(table, model)
    return (
        pd.concat({"ours": ours, "paper": layout(theirs)}, names=["source"])
        if len(theirs)
        else ours
    )


def _blocks(frame: pd.DataFrame) -> pd.DataFrame:
    """A table of published numbers: from a text for each setting, method and metric, in the order
    of first appearance.
    """
    return frame.pivot_table(
        index=["setting", "method"], columns="metric", values="text", aggfunc="first", sort=False
    )


def _inj_layout(frame: pd.DataFrame) -> pd.DataFrame:
    ratios, tops = (
        frame["setting"].astype(float),
        frame["metric"].str.removeprefix("recall@").astype(float),
    )
    percents = zip(100 * frame["value"], 100 * frame["standard_error"], strict=True)
    named = frame.assign(
        setting=[f"ratio {100 * ratio:g} %, published" for ratio in ratios],
        metric=[f"R@{multiple:g}x" for multiple in (tops / ratios).round(6)],
        text=[mean_text(mean, error) for mean, error in percents],
    )
    return _blocks(named)


def _del_layout(frame: pd.DataFrame) -> pd.DataFrame:
    metrics = [METRICS[name.replace("delta_random_", "delta_")] for name in frame["metric"]]
    named = frame.assign(
        setting=[
            f"{100 * float(ratio):g} % of each layer, published" for ratio in frame["setting"]
        ],
        metric=[title for title, _, _ in metrics],
        text=[
            f"{factor * value:.{decimals}f}"
            for value, (_, factor, decimals) in zip(frame["value"], metrics, strict=True)
        ],
    )
    return _blocks(named).reindex(
        columns=[title for title, _, _ in METRICS.values()], fill_value=""
    )


def _memorization_layout(frame: pd.DataFrame) -> pd.DataFrame:
    value: Any = frame.set_index("metric")["value"]
    row = {
        "Acc (%)": f"{100 * value['accuracy']:.1f}",
        "Dist (characters)": f"{value['levenshtein']:.2f}",
        "PPL (2 ** nats)": f"{value['perplexity_base2']:.2f}",
        "Len (characters)": f"{value['suffix_length']:.0f}",
    }
    return pd.DataFrame({f"{frame['model'].iloc[0]}, published": row}).T


def _categories_layout(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {"sequences": [f"{count:.0f}" for count in frame["value"]]},
        index=frame["note"].rename("category"),
    )


def _del_tests(results: DelResults, model: str) -> pd.DataFrame:
    tests = results.tests()
    theirs = {
        (row["method"], float(row["setting"])): row["value"]
        for row in published("del_pvalues", model).to_dict("records")
    }
    if theirs:
        tests["published_p_value"] = [
            theirs.get(key, math.nan) for key in zip(tests["method"], tests["ratio"], strict=True)
        ]
    tests["difference"] = (100 * tests["difference"]).round(6)  # equal means differ in the last bit
    same = [name for name in ("model", "ablation") if tests[name].nunique() == 1]
    keys = [name for name in ("model", "ablation", "ratio", "method") if name not in same]
    return (
        tests.drop(columns=same)
        .rename(columns={"difference": "difference of Δ Self-Acc (points)"})
        .set_index(keys)
    )


def _categories(results: DelResults) -> pd.DataFrame:
    """Of each category: how many sequences, their accuracy, and the beginning of the first one."""
    groups: Any = results.before.drop_duplicates(["model", "sequence_id"]).groupby(
        "category", sort=False
    )
    text = (groups["prefix"].first() + groups["suffix"].first()).str.replace(
        "\n", r"\n", regex=False
    )
    example = text.where(text.str.len() <= 60, text.str[:59] + "…")
    accuracy = (100 * groups["accuracy"].mean()).map("{:.1f}".format)
    return pd.DataFrame(
        {"sequences": groups.size().map(str), "Acc (%)": accuracy, "example": example}
    ).rename(index={"": "(none)"})


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
    frame: Any = results.frame[
        results.frame["ratio"] == results.frame["ratio"].max()
    ].drop_duplicates(["sequence_id", "method"])
    before: Any = (
        results.before.drop_duplicates("sequence_id")
        .set_index("sequence_id")
        .rename_axis("sequence")
    )
    before = before[before.index.isin(frame["sequence_id"])]
    first = before.groupby("category").cumcount().sort_values(kind="stable").index[:n]
    chosen = before.loc[first, ["category", "accuracy", "prefix", "suffix"]]
    changes = frame.pivot(index="sequence_id", columns="method", values="delta_self_accuracy").loc[
        first, frame["method"].unique()
    ]
    points = (100 * changes).map("{:.0f}".format, na_action="ignore").rename(columns=short_title)
    texts = {
        name: chosen[name].str.replace("\n", r"\n", regex=False) for name in ("prefix", "suffix")
    }
    accuracy = (100 * chosen["accuracy"]).map("{:.0f}".format)
    return (
        chosen.assign(**texts, accuracy=accuracy)
        .rename(columns={"accuracy": "Acc (%)"})
        .join(points)
    )


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub table; the levels of the index become columns.

    >>> print(to_markdown(pd.DataFrame({"R@1x": [87.2, 3.4]}, index=["Hard Concrete", "Random"])))
    | method        |   R@1x |
    |:--------------|-------:|
    | Hard Concrete |   87.2 |
    | Random        |    3.4 |
    """
    escaped = flat(table).map(
        lambda cell: cell.replace("|", r"\|") if isinstance(cell, str) else cell
    )
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

    >>> save_table(pd.DataFrame({"R@1x": [87.2]}, index=["Hard Concrete"]), folder, "inj", "Recall in percent")
    >>> sorted(path.name for path in folder.iterdir())
    ['inj.csv', 'inj.md', 'inj.tex']
    """
    path, whole = prepare_folder(folder), flat(table)
    write_text(
        path / f"{name}.md", (f"{caption}\n\n" if caption else "") + to_markdown(table) + "\n"
    )
    write_text(
        path / f"{name}.tex",
        whole.to_latex(index=False, caption=caption or None, escape=True, float_format="%.3g"),
    )
    write_text(path / f"{name}.csv", whole.to_csv(index=False))
