"""Tables as Markdown, LaTeX and CSV, and the paper's published numbers beside ours."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.evals.del_benchmark import METRICS, DelResults
from tl_localize.evals.inj_benchmark import InjResults
from tl_localize.report.paper import TITLES, published
from tl_localize.stats import mean_text, with_error
from tl_localize.execution.store import prepare_folder, write_text

DEL_CAPTIONS = {  # by file name
    "del_memorization": "How well the test sequences are memorized; accuracy teacher-forced, perplexity of general text",
    "del": "DEL: change when the located neurons are silenced, mean ± standard error over targets",
    "del_tests": "DEL, Δ Self-Acc: one-tailed paired t-tests against Integrated Gradients, Bonferroni",
    "del_categories": "The test sequences by category",
    "del_related": "DEL: are sequences of the target's category hurt more than others? One-tailed paired t-tests",
    "del_single_layer": "DEL, one layer against all at equal budget: change of accuracy (points), mean ± standard error over targets",
    "del_examples": "Examples, and the change of their accuracy (points) by each method at the largest ratio",
}


def inj_tables(results: InjResults, model: str) -> dict[str, pd.DataFrame]:
    """The INJ tables by file name: per layer, across layers, tests, and the paper's numbers where it has this model.

    With distractors also what silencing the found rows does, and whether the ground truth holds.

    >>> from tl_localize import Attribution, InjBenchmark, MemorizedSequence, load_model
    >>> from tl_localize.report.tables import inj_tables
    >>> model = load_model("reference")
    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02)
    >>> tables = inj_tables(benchmark.run([Attribution()]), "gpt2")
    >>> list(tables), sorted(set(tables["inj"].index.get_level_values(0)))
    (['inj', 'inj_across_layers'], ['ours', 'paper'])
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


def del_tables(results: DelResults, model: str) -> dict[str, pd.DataFrame]:
    """The DEL tables by file name, with the paper's numbers beside ours where it has this model.

    ``del_memorization`` (accuracy, distance, perplexity, length), ``del``, ``del_tests`` (where Integrated Gradients ran),
    ``del_categories`` and ``del_related`` (where the sequences have categories), ``del_examples``.

    >>> from tl_localize import Attribution, DelBenchmark, load_model
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> from tl_localize.report.tables import del_tables
    >>> model = load_model("reference")
    >>> two, text = reference_sequences(model)[:2], held_out_tokens()[:1]
    >>> benchmark = DelBenchmark(model, two, text, ratios=(0.05,), n_dev=0)
    >>> tables = del_tables(benchmark.run([Attribution()]), "reference-gpt2")
    >>> list(tables)
    ['del_memorization', 'del', 'del_categories', 'del_examples']
    """
    tables = {"del_memorization": results.before_table(), "del": results.table()}
    theirs = published("memorization", model)
    if len(theirs):
        tables["del_memorization"] = pd.concat([tables["del_memorization"], _memorization_layout(theirs)])
    theirs = published("del", model)
    if len(theirs):
        tables["del"] = pd.concat({"ours": tables["del"], "paper": _del_layout(theirs)})
    if results.frame["method"].eq("integrated_gradients").any():
        tables["del_tests"] = _del_tests(results, model)
    if results.before["category"].ne("").any():
        tables["del_categories"] = _categories(results, model)
        related = results.related()
        if len(related):
            tables["del_related"] = _related(related)
    tables["del_examples"] = _examples(results)
    return {name: table.rename(index=TITLES) for name, table in tables.items()}


def single_layer_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One layer against all layers at equal budget: change of accuracy in points, mean ± standard error over targets, as text.

    Args:
        frame: of ``DelBenchmark.run_single_layer``.
    Returns: a row for all layers together and one for each layer; columns for each multiple of the budget, Self and Neg.

    >>> from tl_localize import Attribution, DelBenchmark, load_model
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> from tl_localize.report.tables import single_layer_table
    >>> model = load_model("reference")
    >>> two, text = reference_sequences(model)[:2], held_out_tokens()[:1]
    >>> frame = DelBenchmark(model, two, text, ratios=(0.02,), n_dev=0).run_single_layer(Attribution(), 0.02)
    >>> list(single_layer_table(frame).index[:2])
    ['all layers', 'layer 0']
    """
    rows: dict[str, dict[str, str]] = {}
    for (layer, multiple), part in frame.assign(layer=frame["layer"].fillna(-1)).groupby(["layer", "multiple"]):
        row = rows.setdefault("all layers" if layer == -1 else f"layer {layer}", {})
        for name, column in (("Self", "delta_self_accuracy"), ("Neg", "delta_neg_accuracy")):
            row[f"{multiple} x budget, {name}"] = with_error(100 * part[column])
    return pd.DataFrame(rows).T.fillna("").rename_axis("silenced")


def _memorization_layout(frame: pd.DataFrame) -> pd.DataFrame:
    value = dict(zip(frame["metric"], frame["value"], strict=True))
    row = {
        "Acc (%)": f"{100 * value['accuracy']:.1f}",
        "Dist (characters)": f"{value['levenshtein']:.2f}",
        "PPL": "",
        "PPL (2 ** nats)": f"{value['perplexity_base2']:.2f}",
        "Len (characters)": f"{value['suffix_length']:.0f}",
        "Sequences": "",
    }
    return pd.DataFrame({f"{frame['model'].iloc[0]}, published": row}).T


def _del_layout(frame: pd.DataFrame) -> pd.DataFrame:
    blocks: dict[str, pd.DataFrame] = {}
    for setting, block in frame.groupby("setting", sort=False):
        rows: dict[str, dict[str, str]] = {}
        for row in block.to_dict("records"):
            title, factor, decimals = METRICS[str(row["metric"]).replace("delta_random_", "delta_")]
            rows.setdefault(str(row["method"]), {})[title] = f"{factor * row['value']:.{decimals}f}"
        blocks[f"{100 * float(str(setting)):g} % of each layer, published"] = pd.DataFrame(rows).T
    titles = [title for title, _, _ in METRICS.values()]
    return pd.concat(blocks).reindex(columns=titles, fill_value="")


def _del_tests(results: DelResults, model: str) -> pd.DataFrame:
    tests = results.tests()
    theirs: dict[tuple[str, float], float] = {
        (row["method"], float(row["setting"])): row["value"] for row in published("del_pvalues", model).to_dict("records")
    }
    if theirs:
        tests["published_p_value"] = [theirs.get(key, math.nan) for key in zip(tests["method"], tests["ratio"], strict=True)]
    tests["difference"] = (100 * tests["difference"]).round(6)  # equal means differ in the last bit
    several = [name for name in ("model", "intervention") if tests[name].nunique() > 1]
    shown = tests.drop(columns=[name for name in ("model", "intervention") if name not in several])
    return shown.rename(columns={"difference": "difference of Δ Self-Acc (points)"}).set_index([*several, "ratio", "method"])


def _categories(results: DelResults, model: str) -> pd.DataFrame:
    before: Any = results.before.drop_duplicates(["model", "sequence_id"])
    rows = {
        category or "(none)": {
            "sequences": f"{len(part)}",
            "Acc (%)": f"{100 * part['accuracy'].mean():.1f}",
            "example": _one_line(part, 60),
        }
        for category, part in before.groupby("category", sort=False)
    }
    table = pd.DataFrame(rows).T
    theirs = published("categories", model)
    if len(theirs):
        counts = pd.DataFrame({row["note"]: {"sequences": f"{row['value']:.0f}"} for row in theirs.to_dict("records")}).T
        table = pd.concat({"ours": table, "paper": counts}).fillna("")
    return table.rename_axis(index=["source", "category"] if len(theirs) else ["category"])


def _related(related: pd.DataFrame) -> pd.DataFrame:
    rows = [
        {
            "ratio": row["ratio"],
            "method": row["method"],
            "Δ Acc of the same category (points)": mean_text(100 * row["related"], 100 * row["related_error"], 2),
            "Δ Acc of other categories (points)": mean_text(100 * row["unrelated"], 100 * row["unrelated_error"], 2),
            "p_value": row["p_value"],
            "n": row["n"],
        }
        for row in related.to_dict("records")
    ]
    return pd.DataFrame(rows).sort_values("ratio", kind="stable").set_index(["ratio", "method"])


def _examples(results: DelResults, n: int = 8) -> pd.DataFrame:
    """The first sequence of each category, then the next ones, with the change that each method makes at the largest ratio."""
    before: Any = results.before.drop_duplicates("sequence_id")
    frame: Any = results.frame[results.frame["ratio"] == results.frame["ratio"].max()].drop_duplicates(["sequence_id", "method"])
    before = before[before["sequence_id"].isin(frame["sequence_id"])]
    turn = before.groupby("category").cumcount()
    rows: dict[str, dict[str, str]] = {}
    for _, row in before.loc[turn.sort_values(kind="stable").index].head(n).iterrows():
        prefix, suffix = (text.replace("\n", r"\n") for text in (row["prefix"], row["suffix"]))
        rows[row["sequence_id"]] = {
            "category": row["category"],
            "Acc (%)": f"{100 * row['accuracy']:.0f}",
            "prefix": prefix,
            "suffix": suffix,
        }
        for part in frame[frame["sequence_id"] == row["sequence_id"]].to_dict("records"):
            name = TITLES.get(str(part["method"]), str(part["method"])).split(" (")[0]
            rows[row["sequence_id"]][name] = f"{100 * part['delta_self_accuracy']:.0f}"
    return pd.DataFrame(rows).T.rename_axis(index="sequence")


def _one_line(before: Any, length: int) -> str:
    """The beginning of the first row's text, on one line."""
    text = f"{before['prefix'].iloc[0]}{before['suffix'].iloc[0]}".replace("\n", r"\n")
    return text if len(text) <= length else text[: length - 1] + "…"


def _paper_layout(frame: pd.DataFrame) -> pd.DataFrame:
    blocks: dict[str, pd.DataFrame] = {}
    for setting, block in frame.groupby("setting", sort=False):
        ratio = float(str(setting))
        rows: dict[str, dict[str, str]] = {}
        for row in block.to_dict("records"):
            multiple = float(str(row["metric"]).removeprefix("recall@")) / ratio
            text = mean_text(100 * row["value"], 100 * row["standard_error"])
            rows.setdefault(str(row["method"]), {})[f"R@{round(multiple, 6):g}x"] = text
        blocks[f"ratio {100 * ratio:g} %, published"] = pd.DataFrame(rows).T
    return pd.concat(blocks)


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub table; the levels of the index become columns.

    >>> import pandas as pd
    >>> from tl_localize.report.tables import to_markdown
    >>> print(to_markdown(pd.DataFrame({"R@1x": [87.2, 3.4]}, index=["Hard Concrete", "Random"])))
    | method        |   R@1x |
    |:--------------|-------:|
    | Hard Concrete |   87.2 |
    | Random        |    3.4 |
    """
    flat = table.reset_index(names=_level_names(table)).map(lambda cell: cell.replace("|", r"\|") if isinstance(cell, str) else cell)
    return flat.to_markdown(index=False, floatfmt=".3g")


def _level_names(table: pd.DataFrame) -> list[str]:
    named = {1: ["method"], 2: ["setting", "method"], 3: ["source", "setting", "method"]}
    given = [str(name) for name in table.index.names if name is not None]
    return given if len(given) == table.index.nlevels else named[table.index.nlevels]


def save_table(table: pd.DataFrame, folder: str | Path, name: str, caption: str = "") -> None:
    """Write NAME.md, NAME.tex and NAME.csv, each whole or not at all.

    Raises:
        ValueError: the folder can't be written.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import pandas as pd
    >>> from tl_localize.report.tables import save_table
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_table(pd.DataFrame({"R@1x": [87.2]}, index=["Hard Concrete"]), folder, "inj", "Recall in percent")
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['inj.csv', 'inj.md', 'inj.tex']
    """
    path = prepare_folder(folder)
    flat = table.reset_index(names=_level_names(table))
    write_text(path / f"{name}.md", (f"{caption}\n\n" if caption else "") + to_markdown(table) + "\n")
    write_text(path / f"{name}.tex", flat.to_latex(index=False, caption=caption or None, escape=True, float_format="%.3g"))
    write_text(path / f"{name}.csv", flat.to_csv(index=False))
