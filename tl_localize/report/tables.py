"""Tables as Markdown, LaTeX and CSV, and the paper's published numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.evals.del_results import METRICS, DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.files import prepare_folder, write_text
from tl_localize.reference import DATA
from tl_localize.report.paper import TITLES, published, short_title
from tl_localize.stats import mean_text, with_error

CAPTIONS: dict[str, str] = json.loads((DATA / "captions.json").read_text(encoding="utf-8"))
INDEX_NAMES = ("source", "setting", "method")  # of a table's last levels where they have no names
MEMORIZATION = {  # the paper's metrics: title, factor, decimals
    "accuracy": ("Acc (%)", 100, 1),
    "levenshtein": ("Dist (characters)", 1, 2),
    "perplexity_base2": ("PPL (2 ** nats)", 1, 2),
    "suffix_length": ("Len (characters)", 1, 0),
}


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
            tables[name] = _with_paper(tables[name], published(theirs, model), _inj_layout)
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
    theirs = published("memorization", model)
    before = _published_texts(theirs, MEMORIZATION, theirs["model"] + ", published")
    tables = {
        "del_memorization": pd.concat([results.before_table(), before]).fillna(""),
        "del": _with_paper(results.table(), published("del", model), _del_layout),
        "del_at_price": results.at_price(),
    }
    if results.frame["method"].eq("integrated_gradients").any():
        tables["del_tests"] = _del_tests(results, model)
    if results.frame["sequence_id"].nunique() > 1:
        tables["del_pairs"] = results.pairs()
    if results.before["category"].ne("").any():
        counts = published("categories", model)
        categories = _with_paper(_categories(results), counts, _categories_layout)
        tables["del_categories"] = categories.fillna("")
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


def _with_paper(
    ours: pd.DataFrame, theirs: pd.DataFrame, layout: Callable[[pd.DataFrame], pd.DataFrame]
) -> pd.DataFrame:
    """Our table above the paper's, where the paper has this model."""
    if not len(theirs):
        return ours
    return pd.concat({"ours": ours, "paper": layout(theirs)}, names=["source"])


def _with_titles(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(index=TITLES, columns={name: short_title(name) for name in TITLES})


def _published_texts(
    frame: pd.DataFrame, metrics: Mapping[str, tuple[str, int, int]], rows: Iterable[Any]
) -> pd.DataFrame:
    """Published numbers as a table of texts.

    Args:
        metrics: metric -> title of its column, factor, decimals.
        rows: the row of the table in which each number stands.
    """
    cells: dict[Any, dict[str, str]] = {}
    for row, number in zip(rows, frame.to_dict("records"), strict=True):
        title, factor, decimals = metrics[number["metric"]]
        mean, error = factor * number["value"], factor * number["standard_error"]
        cells.setdefault(row, {})[title] = mean_text(mean, error, decimals)
    return pd.DataFrame(cells).T


def _inj_layout(frame: pd.DataFrame) -> pd.DataFrame:
    ratios = frame["setting"].astype(float)
    tops = frame["metric"].str.removeprefix("recall@").astype(float)
    frame = frame.assign(metric=(tops / ratios).map("R@{:.6g}x".format))
    settings = (100 * ratios).map("ratio {:g} %, published".format)
    metrics = {name: (name, 100, 1) for name in frame["metric"]}
    return _published_texts(frame, metrics, zip(settings, frame["method"], strict=True))


def _del_layout(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.assign(metric=frame["metric"].str.replace("delta_random_", "delta_"))
    shares = 100 * frame["setting"].astype(float)
    settings = shares.map("{:g} % of each layer, published".format)
    table = _published_texts(frame, METRICS, zip(settings, frame["method"], strict=True))
    return table.reindex(columns=[title for title, _, _ in METRICS.values()], fill_value="")


def _categories_layout(frame: pd.DataFrame) -> pd.DataFrame:
    counts = frame.set_index(frame["note"].rename("category"))["value"]
    return counts.map("{:.0f}".format).to_frame("sequences")


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
