"""Tables of what benchmarks/real measured with the paper's data, beside the paper's numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks/real")]
from cells import (  # noqa: E402
    COLUMNS,
    MULTIPLES,
    TITLES,
    markdown,
    mean_with_interval,
    number,
    power,
)
from frames import confusion_matrices, read_frames  # noqa: E402
from paper_texts import CATEGORIES, OTHERS  # noqa: E402

from tl_localize import DelResults  # noqa: E402
from tl_localize.evals.deletion import confusion_by_category  # noqa: E402
from tl_localize.evals.inj import compare_seeds  # noqa: E402
from tl_localize.evals.rev import rev_by_model  # noqa: E402
from tl_localize.evals.rev.results import PRICE, RevResults  # noqa: E402
from tl_localize.paper import published  # noqa: E402
from tl_localize.stats import gains_at, paired_test  # noqa: E402

RECITES = "gpt2-xl"  # the paper's model that recites these texts
SMALL = "gpt2"  # the paper's model of about this size
UNTESTED = ("integrated_gradients", "row_norm", "random")  # all others are tested against the first


@cache
def frames_of(model: str) -> dict[str, pd.DataFrame]:
    return read_frames(ROOT / "benchmarks/expected/real" / model)


# DEL


def recited_table(model: str) -> str:
    """The paper's table 1: how many texts of each category are recited."""
    texts = frames_of(model)["recited"]
    kinds = texts["category"].where(~texts["category"].str.startswith(OTHERS), OTHERS)
    recited = texts[texts["role"] != "not recited"].groupby(kinds).size()
    counts = published("categories").set_index("row")["value"].astype(int)
    rows = [[kind, f"{counts[kind]}", f"{recited.get(kind, 0)}"] for kind in (*CATEGORIES, OTHERS)]
    total = ["all", f"{counts.sum()}", f"{recited.sum()}"]
    return markdown(["category", "texts, which GPT-2-XL recites", "recited here"], [*rows, total])


def before_table(model: str) -> str:
    """How well the targets are memorized before anything is ablated."""
    here = frames_of(model)["deletion_before"]
    paper = published("memorization", RECITES).set_index("metric")["value"]
    means = {
        "accuracy": ("accuracy (%)", 100 * here["accuracy"], 100 * paper["accuracy"]),
        "levenshtein": ("distance (characters)", here["levenshtein"], paper["levenshtein"]),
        "length": ("length (characters)", here["length"], paper["suffix_length"]),
    }
    rows = [
        [name, mean_with_interval(ours), number(theirs)] for name, ours, theirs in means.values()
    ]
    perplexity = here["perplexity_base2"].iloc[0], paper["perplexity_base2"]
    rows.append(["perplexity of the Pile (2 ** nats)", *map(number, perplexity)])
    return markdown(["", f"measured here ({len(here)} texts)", "the paper, GPT-2-XL"], rows)


def texts_table(model: str, methods: Sequence[str]) -> str:
    """The paper's table 3: one row for each share and method; texts of each."""
    frame = frames_of(model)["deletion"]
    rows: list[list[str]] = []
    for ratio, of_ratio in frame.groupby("ratio"):
        for method in methods:
            found = of_ratio[of_ratio["method"] == method].set_index("sequence_id")
            if len(found):
                cells = [mean_with_interval(factor(name) * found[name]) for name in COLUMNS]
                p = against_gradients(of_ratio, method, "delta_self_accuracy", "less")
                named = f"{TITLES[method]} ({len(found)})"
                rows.append([f"{100 * ratio:g} %", named, *cells, p, of_paper(ratio, method)])
    names = [*COLUMNS.values(), "p", "the paper, GPT-2-XL: Self / Neg"]
    return markdown(["share", "method (texts)", *names], rows)


def factor(column: str) -> int:
    """Accuracies are shown in points."""
    return 100 if "accuracy" in column else 1


def of_paper(ratio: float, method: str) -> str:
    """Self / Neg in points, as the paper has them."""
    paper = published("del", RECITES)
    found = paper[(paper["setting"] == f"{ratio:g}") & (paper["method"] == method)]
    values = found.set_index("metric")["value"]
    pair = [values.get(name) for name in ("delta_self_accuracy", "delta_neg_accuracy")]
    return " / ".join(number(100 * value) for value in pair if value is not None)


def counts_points(model: str) -> dict[str, pd.DataFrame]:
    """Self and Neg of each method by the neurons of the whole model that are ablated."""
    frames = frames_of(model)
    return DelResults(frames["counts"], before=frames["counts_before"]).points()


def ablations_table(model: str, methods: Sequence[str]) -> str:
    """Self / Neg by each kind of ablation, of the texts that have all of them."""
    frame = frames_of(model)["ablations"]
    kinds = sorted(frame["ablation"].unique(), reverse=True)
    wide = frame.set_index(["method", "ablation", "sequence_id"])
    rows = []
    for method in methods:
        if method in wide.index:
            of_method = wide.loc[method]
            parts = {kind: of_method.loc[kind] for kind in kinds}
            same = sorted(set.intersection(*(set(part.index) for part in parts.values())))
            cells = [
                " / ".join(
                    mean_with_interval(100 * part.loc[same, name])
                    for name in ("delta_self_accuracy", "delta_neg_accuracy")
                )
                for part in parts.values()
            ]
            rows.append([f"{TITLES[method]} ({len(same)})", *cells])
    return markdown(["method (texts)", *kinds], rows)


def categories_table(model: str, methods: Sequence[str]) -> str:
    """Figures 2, 5 and 6 as numbers: what texts of the same category lose, and others."""
    frames = frames_of(model)
    matrices = confusion_matrices(frames["deletion_confusion"])
    results = DelResults(frames["deletion"], before=frames["deletion_before"], confusion=matrices)
    found = confusion_by_category(results).set_index(["ratio", "method"])
    rows: list[list[str]] = []
    for ratio in sorted(found.index.unique("ratio")):
        for method in methods:
            line = found.loc[(ratio, method)]
            points = [number(line[name]) for name in ("within", "between", "difference")]
            named = f"{TITLES[method]} ({line['n']:.0f})"
            rows.append([f"{100 * ratio:g} %", named, *points, power(line["p_value"])])
    names = ["of the same category", "of others", "difference", "p"]
    return markdown(["share", "method (texts)", *names], rows)


# INJ


def sentences_table(model: str, methods: Sequence[str]) -> str:
    """The paper's table 2: recall in percent, sentences of each method."""
    frame = converged(frames_of(model)["injection"])
    rows: list[list[str]] = []
    for ratio, of_ratio in frame.groupby("injection_ratio"):
        for method in methods:
            wide = recalls(of_ratio, method)
            if len(wide):
                cells = [mean_with_interval(wide[multiple]) for multiple in MULTIPLES]
                tested = [
                    against_gradients(part, method, "recall", "greater")
                    for _, part in of_ratio.groupby("multiple")
                ]
                p = ", ".join(filter(None, tested))
                named = f"{TITLES[method]} ({len(wide)})"
                rows.append(
                    [f"{100 * ratio:g} %", named, *cells, p, paper_recall("inj", method, ratio)]
                )
    names = [*(f"R@{m}x" for m in MULTIPLES), "p, at each multiple", "the paper, GPT-2"]
    return markdown(["rows", "method (sentences)", *names], rows)


def across_layers_table(model: str, methods: Sequence[str]) -> str:
    """A.11: the top of the whole model, not of each layer."""
    frame = converged(frames_of(model)["injection"])
    rows: list[list[str]] = []
    for ratio, of_ratio in frame.groupby("injection_ratio"):
        for method in methods:
            wide = recalls(of_ratio, method, "recall_across_layers")
            cells = [mean_with_interval(wide[multiple]) for multiple in MULTIPLES]
            theirs = paper_recall("inj_global", method, ratio)
            rows.append([f"{100 * ratio:g} %", f"{TITLES[method]} ({len(wide)})", *cells, theirs])
    names = [*(f"R@{m}x" for m in MULTIPLES), "the paper, GPT-2"]
    return markdown(["rows", "method (sentences)", *names], rows)


def expanded_table(model: str, methods: Sequence[str]) -> str:
    """A.5: sentences of later years."""
    frame = converged(frames_of(model)["expanded"])
    (ratio,) = frame["injection_ratio"].unique()
    rows = []
    for method in methods:
        wide = recalls(frame, method)
        cells = [mean_with_interval(wide[multiple]) for multiple in MULTIPLES]
        theirs = paper_recall("inj_expanded", method, ratio)
        rows.append([f"{TITLES[method]} ({len(wide)})", *cells, theirs])
    names = [*(f"R@{m}x" for m in MULTIPLES), "the paper, GPT-2"]
    return markdown(["method (sentences)", *names], rows)


def seeds_table(model: str, methods: Sequence[str]) -> str:
    """A.6: the same sentences in other rows, against the first ones."""
    frames = frames_of(model)
    rows = []
    for seed, part in frames["seeds"].groupby("first_seed"):
        found = compare_seeds(frames["injection"], part).set_index("method")
        for method in methods:
            lines = found.loc[[method]].sort_values("ratio")
            pairs = [
                f"{number(100 * line['recall'])} / {number(100 * line['recall_other_seed'])}"
                for _, line in lines.iterrows()
            ]
            tested = lines["p_value"].notna().all()  # not of one sentence
            p = ", ".join(map(power, lines["p_value"])) if tested else "-"
            rows.append([f"{seed}", f"{TITLES[method]} ({lines['n'].iloc[0]})", *pairs, p])
    names = [*(f"R@{m}x: first rows / these" for m in MULTIPLES), "p, at each multiple"]
    return markdown(["seed of the rows", "method (sentences)", *names], rows)


def converged(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["converged"]]


def recalls(frame: pd.DataFrame, method: str, column: str = "recall") -> pd.DataFrame:
    """In percent: a row for each sentence, a column for each multiple."""
    found = frame[frame["method"] == method]
    return 100 * found.pivot(index="sequence_id", columns="multiple", values=column)


def paper_recall(table: str, method: str, ratio: float) -> str:
    """The paper's recall at each multiple, in percent."""
    paper = published(table, SMALL).set_index(["setting", "method", "metric"])["value"]
    keys = [(f"{ratio:g}", method, f"recall@{ratio * multiple:g}") for multiple in MULTIPLES]
    return ", ".join(number(100 * paper[key]) for key in keys if key in paper.index)


def against_gradients(
    frame: pd.DataFrame, method: str, column: str, better: Literal["less", "greater"]
) -> str:
    """p of the paper's one-tailed paired t-test: is a method better than Integrated Gradients? Only
    what reads the text is tested, and nothing before that one is measured.
    """
    wide = frame.pivot(index="sequence_id", columns="method", values=column)
    if method in UNTESTED or "integrated_gradients" not in wide:
        return ""
    both = wide[[method, "integrated_gradients"]].dropna()
    p = paired_test(both[method], both["integrated_gradients"], better)
    return power(p) if p < 0.5 else f"{p:.1f}"


# REV


def rev_table(model: str, methods: Sequence[str], ratios: Sequence[float]) -> str:
    """Own / others at each share, means over models, and in how many of them own minus others is
    lower than that of Activations; empty where not every model is measured. Then own where the
    others have lost 5 points, and in how many of them that is more than by Activations.
    """
    results = RevResults(frames_of(model)["rev"])
    at_price = results.table(errors=False).iloc[:, 0].to_dict()
    each = {name: gains_at(PRICE, -others, own) for name, (own, others) in results.points().items()}
    for method in methods:
        both = np.array([each[method], each["activations"]])
        if method != "activations" and not np.isnan(both).any():
            at_price[method] += f" ({(each[method] < each['activations']).sum()})"
    found = rev_by_model(results)
    n_models = found["n"].max()
    lines = found[(found["direction"] == "put_back") & (found["n"] == n_models)]
    texts = {
        (line["method"], line["ratio"]): f"{number(line['own'])} / {number(line['others'])}"
        + ("" if line["method"] == "activations" else f" ({line['models_ahead']:.0f})")
        for line in lines.to_dict("records")
    }
    rows = [
        [TITLES[method], *(texts.get((method, ratio), "") for ratio in ratios), at_price[method]]
        for method in methods
    ]
    shares = [f"{100 * ratio:g} %" for ratio in ratios]
    last = "own where others lost 5"
    return markdown([f"rows put back by ({n_models} models)", *shares, last], rows)


# Costs


def costs_table(model: str, titles: Mapping[str, str]) -> str:
    """A.2: seconds of one text here, and by the plain loop of the formula."""
    frame = frames_of(model)["costs"].set_index("method")
    paper = published("cost").set_index("method")["value"]
    rows = []
    for method, title in titles.items():
        line = frame.loc[method]
        theirs = paper.get(method.partition(",")[0])
        names = ("seconds", "by the formula", "formula / here")
        seconds, loop, times = (f"{float(f'{line[name]:.2g}'):g}" for name in names)
        rows.append([title, seconds, loop, times, "" if theirs is None else f"{theirs:g}"])
    names = ["seconds", "by the formula", "times as long"]
    return markdown(["method", *names, "the paper, Pythia-6.9B on an A6000, seconds"], rows)


# Do the benchmarks agree?


def agreement_frames(model: str) -> tuple[pd.Series, pd.Series]:
    """Recalls of INJ and losses of DEL, as docs/tables.py has them of other frames."""
    frames = frames_of(model)
    recall = converged(frames["injection"]).set_index(
        ["method", "injection_ratio", "multiple", "sequence_id"]
    )
    lost = frames["deletion"].set_index(["method", "ratio", "sequence_id"])
    return recall["recall"], lost["delta_self_accuracy"]
