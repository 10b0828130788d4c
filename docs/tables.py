"""Writes the tables of README.md and docs/ from committed numbers.

    python docs/tables.py            # writes each table that is marked
    python docs/tables.py --check    # names those that differ, and writes nothing

A table stands on its page between two comments, and this script writes what is between them:

    <!-- table: NAME -->
    <!-- end -->

Numbers come from the frames in benchmarks/expected, one row for each text, and are means with a
95 % interval over texts (bootstrap). Where an earlier run kept no frame they come from the tables
in docs/results that the commands wrote.

The tables of DEL and INJ in docs/results, as the commands write them, are made of the same frames.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import paper_tables  # noqa: E402
from cells import (  # noqa: E402
    COLUMNS,
    GEMMA,
    GPT2,
    MULTIPLES,
    PYTHIA,
    SMOLLM2,
    TITLES,
    markdown,
    mean_with_interval,
    number,
    power,
    with_interval,
    with_t_interval,
)
from comparison import read_frame  # noqa: E402
from price_tests import difference_at, tests_at_prices  # noqa: E402

from tl_localize import METHODS, DelResults, InjResults  # noqa: E402
from tl_localize.evals.agreement import METHODS as PAPER_RANKED  # noqa: E402
from tl_localize.evals.agreement import agreement, published_agreement  # noqa: E402
from tl_localize.evals.deletion import layers_against_all  # noqa: E402
from tl_localize.evals.deletion.tables import del_tables  # noqa: E402
from tl_localize.evals.inj import compare_seeds  # noqa: E402
from tl_localize.evals.inj.tables import inj_tables  # noqa: E402
from tl_localize.evals.rev.results import ORACLES  # noqa: E402
from tl_localize.evals.settings import default_settings  # noqa: E402
from tl_localize.paper import published, with_titles  # noqa: E402
from tl_localize.report.saving import flat  # noqa: E402
from tl_localize.stats import N_RESAMPLES, bootstrap, gain_at, gains_at, paired_test  # noqa: E402

PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.S)
LOSSES = ("delta_self_accuracy", "delta_neg_accuracy")
REV_PRICE = 5.0  # points that the others lose
REV_SHARES = (0.2, 0.3, 0.4)


# DEL


@cache
def losses(model: str, kind: str = "del") -> pd.DataFrame:
    """A frame of DEL; accuracies in points."""
    frame = read_frame(f"{kind}-{model}")
    factors = {name: 100 if "accuracy" in name else 1 for name in map(str, frame)}
    return frame * pd.Series(factors)


def measured(model: str, kind: str, method: str, ratio: float) -> pd.DataFrame:
    """The rows of a method at a share."""
    frame = losses(model, kind)
    ratios = frame.index.get_level_values("ratio").to_numpy(dtype=float)
    return frame[(frame.index.get_level_values("method") == method) & np.isclose(ratios, ratio)]


def pair(model: str, kind: str, method: str, ratio: float) -> str:
    """Self / Neg of a method at a share."""
    rows = measured(model, kind, method, ratio)
    return " / ".join(mean_with_interval(rows[name]) for name in LOSSES) if len(rows) else ""


def n_texts(model: str, kind: str, method: str) -> int:
    """How many targets a method has."""
    frame = losses(model, kind)
    rows = frame[frame.index.get_level_values("method") == method]
    return len(rows.index.unique("sequence_id"))


Column = tuple[str, str, str, float]  # heading, model, kind of frame, share


def del_table(methods: Sequence[str], columns: Sequence[Column], counted: bool = False) -> str:
    """Self / Neg, one row for each method; the number of texts where it is asked for."""
    rows: list[list[str]] = []
    for method in methods:
        count = n_texts(columns[0][1], columns[0][2], method) if counted else 0
        cells = [pair(model, kind, method, ratio) for _, model, kind, ratio in columns]
        rows.append([TITLES[method] + (f" ({count})" if count else ""), *cells])
    heading = "method (texts)" if counted else "method"
    return markdown([heading, *(name for name, *_ in columns)], rows)


def all_columns(model: str, methods: Sequence[str], ratios: Sequence[float]) -> str:
    """One row for each share and method: all that DEL measures."""
    known = [name for name in COLUMNS if name in losses(model)]
    rows: list[list[str]] = []
    for ratio in ratios:
        for method in methods:
            found = measured(model, "del", method, ratio)
            cells = [
                mean_with_interval(found[name], 2 if "perplexity" in name else 1) for name in known
            ]
            if len(found):
                rows.append([f"{100 * ratio:g} %", TITLES[method], *cells])
    return markdown(["share", "method", *(COLUMNS[name] for name in known)], rows)


def shares(model: str, named: dict[str, float]) -> list[Column]:
    return [(heading, model, "forgetting", ratio) for heading, ratio in named.items()]


@cache
def deletion(model: str, kind: str) -> DelResults:
    frame = read_frame(f"{kind}-{model}").reset_index()
    return DelResults(frame.assign(model=model, ablation="zero", category=""))


def price_table(model: str, kind: str, methods: Sequence[str], prices: Sequence[float]) -> str:
    """Self where the others have lost so many points, with intervals."""
    return prices_of(deletion(model, kind).points(), methods, prices)


def prices_of(
    points: dict[str, pd.DataFrame], methods: Sequence[str], prices: Sequence[float]
) -> str:
    """The same of Self and Neg of each method, as ``DelResults.points`` has them."""
    rows = []
    for method in methods:
        own = points[method]["self"].to_numpy()
        costs = -points[method]["neg"].to_numpy()
        cells = [at_price(own, costs, price) for price in prices]
        rows.append([f"{TITLES[method]} ({len(own)})", *cells])
    return markdown(["method (texts)", *(f"Neg = -{price:g}" for price in prices)], rows)


def few_neurons_table(model: str) -> str:
    """Sets of Refined Attribution of a few neurons of the whole model, and Self at a price."""
    method = "refined_attribution"
    found = losses(model, "few_neurons").xs(method, level="method")
    smallest = found.index.unique("ratio").min()  # one neuron
    rows = [
        [f"{ratio / smallest:.0f}", *(mean_with_interval(part[name]) for name in LOSSES)]
        for ratio, part in found.groupby("ratio")
    ]
    table = markdown(["neurons of the model", "the text", "the others"], rows)
    return f"{table}\n\n{price_table(model, 'few_neurons', [method], (0.5, 1, 3))}"


def at_price(own: np.ndarray, costs: np.ndarray, price: float) -> str:
    if costs[:, 0].mean() > price:
        return f"costs at least {costs[:, 0].mean():.1f}"

    def gain(drawn: np.ndarray) -> np.ndarray:
        return gains_at(price, costs[drawn].mean(1), own[drawn].mean(1))

    (found,) = gain(np.arange(len(own))[None])
    return "-" if np.isnan(found) else with_interval(found, bootstrap(len(own), gain))


@cache
def corrected_tests() -> pd.DataFrame:
    """Of both pretrained models together, which is what p is corrected for."""
    return tests_at_prices({model: deletion(model, "forgetting") for model in (SMOLLM2, GEMMA)})


def against_table(
    model: str, methods: Sequence[str], prices: Sequence[float], added: bool = False
) -> str:
    """The differences from each method that has such a set, with 95 % intervals over the texts that
    both have, and corrected p.
    """
    rows_of_model = corrected_tests().query("model == @model").to_dict("records")
    tests = {(row["method"], row["price"]): row for row in rows_of_model}
    rows = []
    for method in methods:
        cells = []
        for price in prices:
            test = tests.get((method, price))
            if test is None:
                cells.append("-")
                continue
            cells.append(f"{difference(model, method, price)} (p = {power(test['p'])})")
        if set(cells) != {"-"}:
            rows.append([TITLES[method], *cells])
    if added:
        cells = [difference(model, "hard_concrete", price, added=True) for price in prices]
        rows.append(["Hard Concrete, on the texts that were added later", *cells])
    return markdown(["against", *(f"Neg = -{price:g}" for price in prices)], rows)


def difference(model: str, method: str, price: float, added: bool = False) -> str:
    """How much more Iterative Attribution takes at a price, on the texts that both have, or on
    those of them that Slimming has not. Without an interval there is no number.
    """
    points = deletion(model, "forgetting").points()
    ours, other = points["iterative_attribution"], points[method]
    texts = ours.index.intersection(other.index)
    if added:
        texts = texts.difference(points["slimming"].index)
    return gap_at(price, ours.loc[texts], other.loc[texts])


def gap_at(price: float, own: pd.DataFrame, other: pd.DataFrame) -> str:
    """How much more one method takes at a price than another, of the same texts."""
    more = difference_at(price, own, other)
    (found,) = more(np.arange(len(own))[None])
    return "-" if np.isnan(found) else with_interval(found, bootstrap(len(own), more))


def single_layers(model: str) -> pd.DataFrame:
    """The committed rows of one layer against all, as ``DelResults.single_layers`` has them."""
    frame = read_frame(f"single_layers-{model}").reset_index()
    layers = pd.to_numeric(frame["layer"], errors="coerce").astype("Int64")  # "all": missing
    return frame.assign(layer=layers, multiple=1)


def layers_of_shipped(model: str) -> str:
    return single_layers_table(single_layers(model))


def single_layers_table(frame: pd.DataFrame) -> str:
    """Text / others in points, by as many neurons in all layers or in one of them, or by a multiple
    of them in one.
    """
    compared = layers_against_all(frame).sort_values(["ratio", "multiple", "all"])
    with_multiple = frame["multiple"].max() > 1

    def pair(rows: pd.DataFrame) -> str:
        return " / ".join(mean_with_interval(100 * rows[column]) for column in LOSSES)

    rows: list[list[str]] = []
    for line in compared.to_dict("records"):
        part = frame[(frame["method"] == line["method"]) & (frame["ratio"] == line["ratio"])]
        in_one = part[part["multiple"] == line["multiple"]]
        upper = in_one[in_one["layer"] > 0].groupby("sequence_id")[list(LOSSES)].mean()
        best = line["best_layer"]
        cells = [pair(part[part["layer"].isna()]), pair(in_one[in_one["layer"] == 0]), pair(upper)]
        cells += [f"{pair(in_one[in_one['layer'] == best])} (layer {best})"]
        ahead = f"{line['layers_ahead']} of {line['n_layers']}"
        share = f"{100 * line['ratio']:g} %"
        if with_multiple:
            share += f", {line['multiple']} times as many in one"
        rows.append([share, f"{TITLES[line['method']]} ({line['n']})", *cells, ahead])
        rows[-1].append(power(line["p_value"]))
    of_one = ("layer 0", "mean of the others", "the best of them")
    last = ("erase as much as all", "p")
    return markdown(["share", "method (texts)", "all layers", *of_one, *last], rows)


def third_table() -> str:
    """Self at a price on the third model, and how much more Iterative Attribution takes."""
    frame = pd.read_csv(ROOT / "docs/results/third/targets.csv")
    results = DelResults(frame.assign(model="third", ablation="zero", category=""))
    points = results.points()
    prices = (0.5, 1, 3, 5)
    ours = points["iterative_attribution"]
    rows = [
        [short(TITLES[method]), *(gap_at(price, ours, points[method]) for price in prices)]
        for method in ("hard_concrete", "attribution", "refined_attribution")
    ]
    names = ["Iterative Attribution minus", *(f"Neg = -{price:g}" for price in prices)]
    return f"{prices_of(points, THIRD, prices)}\n\n{markdown(names, rows)}"


# INJ


def recall_pair(name: str, method: str, multiple: int = 1) -> str:
    """Recall of the target's / of the others' rows in percent; the sentences of a group share a
    model, so intervals are over groups.
    """
    frame = read_frame(name)
    index = frame.index
    rows = (index.get_level_values("method") == method) & (
        index.get_level_values("multiple") == multiple
    )
    found = frame.loc[rows, ["recall", "foreign_recall"]]
    if "group" in index.names:
        found = found.groupby(level="group").mean()
    return " / ".join(mean_with_interval(100 * found[column]) for column in found)


def recall_table(
    methods: Sequence[str], frames: dict[str, str], titles: dict[str, str] = TITLES
) -> str:
    rows = [
        [titles[method], *(recall_pair(name, method) for name in frames.values())]
        for method in methods
    ]
    return markdown(["method", *frames], rows)


def recall_multiples(name: str, methods: Sequence[str]) -> str:
    """Recall of the target's / of the others' rows among one, two and five times as many."""
    rows = [
        [TITLES[method], *(recall_pair(name, method, multiple) for multiple in MULTIPLES)]
        for method in methods
    ]
    return markdown(["method", *(f"R@{multiple}x" for multiple in MULTIPLES)], rows)


def inj_table(methods: Sequence[str]) -> str:
    """Recall of INJ as published, one sentence at a time."""
    frames = {f"{name}, 3 %": read_frame(f"inj-{model}") for name, model in SHIPPED.items()}
    of_share = read_frame(f"real-{SMOLLM2}").xs(0.01, level="injection_ratio")
    frames |= {"SmolLM2, 1 %": of_share}
    rows = []
    for method in methods:
        found = [
            frame.xs((method, 1), level=("method", "multiple"))["recall"]
            for frame in frames.values()
        ]
        rows.append([TITLES[method], *(mean_with_interval(100 * recall) for recall in found)])
    return markdown(["method", *frames], rows)


def alone_table(ratio: float) -> str:
    """INJ of one sentence at a time in SmolLM2, beside the paper's recall on GPT-2."""
    frame = 100 * read_frame(f"real-{SMOLLM2}").xs(ratio, level="injection_ratio")
    paper = published("inj", "gpt2").set_index(["setting", "method", "metric"])["value"]
    headings = [f"R@{multiple}x" for multiple in MULTIPLES]
    rows = []
    for method in ALONE:
        found = frame.xs(method, level="method")["recall"]
        count = len(found.index.unique("sequence_id"))
        cells = [mean_with_interval(found.xs(multiple, level="multiple")) for multiple in MULTIPLES]
        keys = [(f"{ratio:g}", method, f"recall@{ratio * multiple:g}") for multiple in MULTIPLES]
        theirs = [number(100 * paper[key]) if key in paper.index else "" for key in keys]
        rows.append([f"{TITLES[method]} ({count})", *cells, *theirs])
    theirs = [f"GPT-2 124M (the paper), {headings[0]}", *headings[1:]]
    return markdown(["method (sentences)", *headings, *theirs], rows)


def rivals_table() -> str:
    """Text / others in points where the largest share is ablated."""
    frames = [losses(model, "rivals") for model in (GPT2, PYTHIA)]
    ratio = max(frames[0].index.unique("ratio"))
    largest = [frame.xs(ratio, level="ratio") for frame in frames]
    rows = [
        [
            RIVALS[method],
            *(
                " / ".join(mean_with_interval(frame.loc[method, name]) for name in LOSSES)
                for frame in largest
            ),
        ]
        for method in RIVALS
    ]
    named = [
        f"{name}, {100 * ratio:g} %, {len(frame.index.unique('sequence_id'))} texts"
        for name, frame in zip(SHIPPED, largest, strict=True)
    ]
    return markdown(["method", *named], rows)


def read_controls(model: str) -> pd.DataFrame:
    """Controls of DEL, changes in points, the distance in characters."""
    frame = pd.read_csv(ROOT / f"docs/results/{model}/memory.csv")
    frame = frame.set_index(["kind", "method", "id"]).sort_index()
    return (100 * frame).assign(distance=frame["distance"])


def memory_table(model: str) -> str:
    """What neurons do to memorized texts, and to texts that the model writes."""
    found = read_controls(model)
    rows = []
    for method, title in CONTROLS.items():
        for kind in found.index.unique("kind"):
            part = found.loc[(kind, method)]
            cells = [mean_with_interval(part[column]) for column in CONTROL_COLUMNS]
            rows.append([title, f"{kind} ({len(part)})", *cells])
    return markdown(["method", "texts", *CONTROL_COLUMNS.values()], rows)


def memory_difference_table(model: str) -> str:
    """Do texts that were never memorized lose as much as memorized ones?"""
    found = read_controls(model)["self_zero"].unstack("method")
    beyond_random = found.sub(found["random"], axis=0)
    rows = [
        [title, *(written_minus_memorized(losses[method]) for losses in (found, beyond_random))]
        for method, title in CONTROLS.items()
        if method != "random"
    ]
    rows.append([TITLES["random"], written_minus_memorized(found["random"]), ""])
    return markdown(["method", "written minus memorized", "the same beyond Random"], rows)


def written_minus_memorized(losses: pd.Series) -> str:
    """The difference of two means over different texts: each kind is resampled by itself."""

    def difference(written: np.ndarray, memorized: np.ndarray, axis: int = -1) -> np.ndarray:
        return written.mean(axis) - memorized.mean(axis)

    values = [losses[kind].to_numpy(dtype=float) for kind in ("written", "memorized")]
    drawn = stats.bootstrap(
        values,
        difference,
        method="percentile",
        n_resamples=N_RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return with_interval(float(difference(*values)), drawn.confidence_interval)


def contrast_table(model: str) -> str:
    """Text / others, with and without the contrast, on memorized texts, and what it changes."""
    known = read_controls(model).loc["memorized"]
    own = "iterative_attribution"
    named = {own: (f"{own}_contrast_0", own)}
    for method in ("attribution", "hard_concrete", "activations"):
        named[method] = method, f"{method}_contrast_1"
    rows = []
    for method, (without, contrasted) in named.items():
        parts = [
            [losses[without], losses[contrasted], losses[contrasted] - losses[without]]
            for losses in (known[f"{whose}_zero"] for whose in WHOSE)
        ]
        cells = [" / ".join(map(mean_with_interval, both)) for both in zip(*parts, strict=True)]
        rows.append([TITLES[method], *cells])
    names = ["without the contrast", "times 1 / (1 + G ** 3)", "change, text by text"]
    return markdown(["method", *names], rows)


def seeds_table(model: str) -> str:
    """Means of each seed of the texts that the model writes; what seeds and texts add to the error
    of such a mean.
    """
    frame = pd.read_csv(ROOT / f"docs/results/{model}/seeds.csv")
    rows = []
    for ratio, of_share in frame.groupby("ratio"):
        for column, title in (("delta_self_accuracy", "Self"), ("delta_neg_accuracy", "Neg")):
            points = 100 * of_share.pivot(index="sequence_id", columns="seed", values=column)
            means = points.mean()
            cells = [f"{number:.2f}" for number in (*means, means.std(), points.mean(axis=1).sem())]
            rows.append([f"{100 * float(str(ratio)):g} %", title, *cells])
    seeds = [f"seed {seed}" for seed in sorted(frame["seed"].unique())]
    errors = ["deviation over seeds", "error over texts"]
    return markdown(["share", "mean of", *seeds, *errors], rows)


def alignment_share_table() -> str:
    """Recall of Gradient Alignment by its share; the interval is over what was trained apart."""
    columns: dict[str, pd.DataFrame] = {}
    for name, model in SHIPPED.items():
        frame = pd.read_csv(ROOT / f"docs/results/{model}/alignment_share.csv")
        for distractors, part in frame.groupby("distractors"):
            kind = f"with {distractors} distractors" if distractors else "alone"
            columns[f"{name}, {kind}"] = part
    shares = next(iter(columns.values()))["share"].unique()
    rows = []
    for share in shares:
        cells = []
        for part in columns.values():
            recalls = part[part["share"] == share].groupby("group")[["recall", "foreign_recall"]]
            kinds = [mean_with_interval(100 * values) for _, values in recalls.mean().items()]
            cells.append(" / ".join(filter(None, kinds)))
        named = "Attribution, which has none" if share == "none" else f"{100 * float(share):g} %"
        rows.append([named, *cells])
    return markdown(["share", *columns], rows)


def short(title: str) -> str:
    """A title without what is said about the method."""
    return title.replace("**", "").split(" (")[0]


# Do the benchmarks agree?


LEAST_METHODS = 4  # in a pair of settings whose tau is shown


def agreement_table() -> str:
    """Kendall's tau of INJ's recall against DEL's Self, over the paper's methods."""
    rows = []
    kinds = {
        "gpt2": ("inj-reference-gpt2", "del-reference-gpt2"),
        "pythia": ("inj-reference-pythia", "del-reference-pythia"),
        "SmolLM2": (f"real-{SMOLLM2}", f"forgetting-{SMOLLM2}"),
    }
    measured = {
        model: (read_frame(inj)["recall"], read_frame(lost)["delta_self_accuracy"])
        for model, (inj, lost) in kinds.items()
    }
    measured["SmolLM2, the paper's texts"] = paper_tables.agreement_frames(SMOLLM2)
    for model, (recall, lost) in measured.items():
        recalls = means(recall)
        rows.append([f"{model}, measured here", *tau_cells(agreement(recalls, means(lost)))])
        compared = lost[lost.index.isin(PAPER_RANKED, "method")]
        texts = [set(part.index.unique("sequence_id")) for _, part in compared.groupby("method")]
        few = set.intersection(*texts)
        if len(few) < len(set.union(*texts)):
            same = lost[lost.index.isin(few, "sequence_id")]
            title = f"{model}, DEL of the {len(few)} texts that all methods have"
            rows.append([title, *tau_cells(agreement(recalls, means(same)))])
    paper = published_agreement()
    for name, found in paper.groupby("model", sort=False):
        rows.append([f"{name}, the paper's numbers", *tau_cells(found)])
    return markdown(["model", "tau, mean", "least", "most", "pairs", "methods"], rows)


def tau_cells(found: pd.DataFrame) -> list[str]:
    """Of pairs with enough methods: of two the tau is +1 or -1."""
    used = found[found["n"] >= LEAST_METHODS]
    tau = used["tau"]
    cells = [f"{value:+.2f}" for value in (tau.mean(), tau.min(), tau.max())]
    (n_methods,) = used["n"].unique()
    return [*cells, f"{len(used)}", f"{n_methods}"]


def means(frame: pd.Series) -> pd.DataFrame:
    """As ``agreement`` takes them: of each method and setting."""
    settings = [level for level in frame.index.names if level not in ("sequence_id", "group")]
    table = frame.groupby(settings).mean().rename("value").reset_index()
    levels = [level for level in settings if level != "method"]
    table["setting"] = table[levels].astype(str).agg(" ".join, axis=1)
    return table


# REV


@cache
def rev_put_back(model: str) -> pd.DataFrame:
    """Own and others in points, rows put back, by method, share, model (group) and text."""
    frame = 100 * read_frame(f"rev-{model}")
    return pd.DataFrame(frame.xs("put_back", level="direction"))


def rev_curves(model: str, group: str | None = None) -> dict[str, pd.DataFrame]:
    """Own and others in points by share, of each method; means over all models, or of one."""
    frame = rev_put_back(model)
    if group is not None:
        frame = frame.xs(group, level="group")
    curves = frame.groupby(["method", "ratio"]).mean()
    curves = curves.reset_index("method")
    return {
        method: curves[curves["method"] == method].drop(columns="method")
        for method in curves["method"].unique()
    }


def rev_at_price(curve: pd.DataFrame) -> float:
    """Own at the price, or at the largest share where the others have lost less."""
    own, others = curve["delta_own_accuracy"], -curve["delta_others_accuracy"]
    return own.iloc[-1] if others.max() < REV_PRICE else gain_at(REV_PRICE, others, own)


def rev_cell(curve: pd.DataFrame) -> str:
    """The same as text, which says what the largest share costs where that is less, and the first
    where that is more.
    """
    found, costs = number(rev_at_price(curve)), -curve["delta_others_accuracy"]
    if costs.iloc[0] > REV_PRICE:
        return f"costs at least {number(costs.iloc[0])}"
    return f"{found} at {number(-costs.iloc[-1])}" if costs.max() < REV_PRICE else found


def rev_at_most(curve: pd.DataFrame) -> float:
    """Own at the price; or more, at the first share, where that costs others more already."""
    found = rev_at_price(curve)
    return float(curve["delta_own_accuracy"].iloc[0]) if math.isnan(found) else found


def rev_table(model: str, methods: Sequence[str]) -> str:
    """Own / others by share; own at the price; and own minus others."""
    curves = rev_curves(model)
    rows = []
    for method in methods:
        curve = curves[method]
        own, others = curve["delta_own_accuracy"], curve["delta_others_accuracy"]
        cells = [f"{number(own[ratio])} / {number(others[ratio])}" for ratio in REV_SHARES]
        last = [rev_cell(curve), number((own - others).min())]
        rows.append([TITLES[method], *cells, *last])
    headings = [f"{100 * ratio:g} %" for ratio in REV_SHARES]
    last = ["own where others lost 5", "own minus others, at most"]
    return markdown(["rows put back by", *headings, *last], rows)


def rev_price_table(
    methods: Sequence[str], models: Mapping[str, str], titles: Mapping[str, str]
) -> str:
    """Own where the others have lost 5 points, its share of the best oracle's, and in how many
    models it is more than that of Activations.
    """
    columns = ["method"]
    cells: dict[str, list[str]] = {method: [titles[method]] for method in methods}
    for title, model in models.items():
        groups = rev_put_back(model).index.unique("group")
        by_model = [rev_curves(model, group) for group in groups]
        columns += [title, "of the best oracle", f"ahead of Activations, of {len(groups)} models"]
        curves = rev_curves(model)
        best = np.nanmin([rev_at_price(curves[name]) for name in ORACLES])
        for method in methods:
            found = rev_at_price(curves[method])
            ahead = sum(
                rev_at_price(curve[method]) < rev_at_most(curve["activations"])
                for curve in by_model
            )
            count = "" if method == "activations" else str(ahead)
            share = "" if math.isnan(found) else f"{100 * found / best:.0f} %"
            cells[method] += [rev_cell(curves[method]), share, count]
    return markdown(columns, list(cells.values()))


# How long the benchmarks take


def minutes_table() -> str:
    """Minutes of processor time by file and model."""
    minutes = pd.read_csv(ROOT / "benchmarks" / "minutes.csv", dtype=str).fillna("")
    return markdown(list(minutes), minutes.to_numpy().tolist())


# README


def front_table() -> str:
    """One row for each test: ours, the best of the paper's methods, and a control."""
    prices = deletion(SMOLLM2, "forgetting").points()

    def lost(method: str) -> str:
        own, neg = prices[method]["self"].to_numpy(), prices[method]["neg"].to_numpy()
        return at_price(own, -neg, 3)

    def found(method: str) -> str:
        return recall_pair(SMOLLM2_GROUPS, method)

    tests = {
        "DEL, SmolLM2: change of the text where others lose 3 points": (
            lost,
            list(prices),
            ("iterative_attribution", "random"),
        ),
        "INJ with distractors, SmolLM2, 1 %: the text's rows found / the other texts' rows": (
            found,
            read_frame(SMOLLM2_GROUPS).index.unique("method"),
            ("gradient_alignment", "row_norm"),
        ),
    }
    rows = []
    for test, (cell, measured, (ours, control)) in tests.items():
        known = {name: cell(name) for name in PAPER_RANKED if name in measured}
        best = max(known, key=lambda name: leading(known[name]))
        named = {ours: cell(ours), best: known[best], control: cell(control)}
        rows.append([test, *(f"{text} ({plain(name)})" for name, text in named.items())])
    return markdown(["test, and model", "ours", "the best of the paper's", "control"], rows)


def leading(cell: str) -> float:
    """The size of the number that a cell begins with; minus infinity where it has none."""
    begins = re.match(r"-?\d+\.\d+", cell)
    return abs(float(begins[0])) if begins else -math.inf


def plain(method: str) -> str:
    return method.removesuffix("_same_kind").replace("_", " ").title()


# Heads


def heads_table() -> str:
    rows = []
    for units, ratio, what, methods in (
        ("heads", 0.17, "one head", ("zero_out", "iterative_attribution", "random")),
        ("neurons", 0.0209, "32 neurons, as many rows", ("iterative_attribution",)),
        ("neurons", 0.0417, "64 neurons, as many parameters", ("iterative_attribution",)),
        ("heads", 0.34, "two heads", ("zero_out", "iterative_attribution", "random")),
        ("neurons", 0.0417, "64 neurons, as many rows", ("iterative_attribution",)),
        ("neurons", 0.0834, "128 neurons, as many parameters", ("iterative_attribution",)),
        ("neurons", 0.0834, "128 neurons", ("random",)),
    ):
        for method in methods:
            cells = []
            for model in (GPT2, PYTHIA):
                frame = losses(model, "heads").xs(units, level="units")
                rows_of = frame.xs((method, ratio), level=("method", "ratio"))
                cells.append(" / ".join(mean_with_interval(rows_of[name]) for name in LOSSES))
            rows.append([what, short(TITLES[method]), *cells])
    return markdown(["ablated in each layer", "method", GPT2, PYTHIA], rows)


# Erase

EDITS = {
    "default of erase": "the default of `erase`",
    "activation_contrast": "Activation Contrast",
    "refined_attribution": "Refined Attribution",
    "iterative_attribution": "Iterative Attribution",
    "gradient_alignment": "Gradient Alignment",
    "activations": "Activations",
    "random": "random rows",
    "true": "the true rows",
    "all rows": "all rows",
    "difference on": "gradient difference,",
    "npo on": "NPO,",
    "never injected": "a model that never saw it",
}
TESTED_EDIT = "activation_contrast 2 %"
COMPARED_EDITS = (
    *((TESTED_EDIT, other) for other in ("random 2 %", "all rows", "activations 2 %")),
    *(("default of erase", other) for other in (TESTED_EDIT, "random 2 %", "all rows")),
)
N_COMPARED = 17  # edits that are compared with it on each model, also where some are still to come
TRAINING = {
    **{f"others_{step}": f"others, {step} steps" for step in (0, 50)},
    **{f"half_{step}": f"half of it, {step} steps" for step in (0, 5, 50)},
}


def edit_title(edit: str) -> str:
    name = next(name for name in EDITS if edit.startswith(name))
    return EDITS[name] + edit.removeprefix(name)


def edits_of(name: str) -> dict[str, pd.DataFrame]:
    """The rows of each edit by text, fractions in percent or points."""
    frame = read_frame(name)
    factors = {column: 1 if column == "kl_1" else 100 for column in map(str, frame)}
    frame = frame * pd.Series(factors)
    parts = frame.groupby(level="method", sort=False)
    return {str(edit): part.droplevel("method") for edit, part in parts}


def erase_table(model: str) -> str:
    """What each edit leaves of a text at a price, and how much less than the one that is tested."""
    edits = edits_of(f"erase-{model}")
    tested = edits[TESTED_EDIT]["self_1"]
    rows = []
    of_all = ("all rows", "difference on", "npo on")  # they stand at the end
    for edit in sorted(edits, key=lambda edit: (edit.startswith(of_all), edit)):
        rows_of = edits[edit]
        prices = [mean_with_interval(rows_of[f"self_{price}"]) for price in ("0.3", "1", "3")]
        also = [mean_with_interval(rows_of["extracted_1"]), mean_with_interval(rows_of["kl_1"], 3)]
        gap = ""
        if edit != TESTED_EDIT:
            both = pd.concat([tested, rows_of["self_1"]], axis=1, keys=["tested", "other"]).dropna()
            p = np.minimum(1.0, paired_test(both["tested"], both["other"]) * N_COMPARED)
            gap = f"{mean_with_interval(both['tested'] - both['other'])} (p = {power(p)})"
        rows.append([edit_title(edit), *prices, *also, gap])
    prices = [f"Self at Neg = -{price}" for price in ("0.3", "1", "3")]
    also = ["extracted at -1 (%)", "KL at -1", f"{edit_title(TESTED_EDIT)} minus it at -1"]
    return markdown([f"edit ({len(tested)} texts)", *prices, *also], rows)


def erase_pairs_table() -> str:
    """Differences of two edits at each price, of the same texts, with intervals of Student's t."""
    rows = []
    for title, model in {**SHIPPED, "SmolLM2": SMOLLM2}.items():
        edits = edits_of(f"erase-{model}")
        for first, second in COMPARED_EDITS:
            gaps = edits[first] - edits[second].loc[edits[first].index]
            cells = [with_t_interval(gaps[f"self_{price}"]) for price in ("0.3", "1", "3")]
            n_texts = f"{title} ({len(gaps)} texts)"
            rows.append([n_texts, f"{edit_title(first)} minus {edit_title(second)}", *cells])
    prices = [f"Self at Neg = -{price}" for price in ("0.3", "1", "3")]
    return markdown(["model", "edits", *prices], rows)


def return_table(model: str) -> str:
    """What training brings back, of the texts that an edit erased."""
    rows = []
    for edit, rows_of in edits_of(f"erase-{model}").items():
        erased = rows_of["half_0"].dropna()
        if len(erased):
            cells = [mean_with_interval(rows_of[column]) for column in TRAINING]
            rows.append([f"{edit_title(edit)} ({len(erased)})", *cells])
    return markdown(["edit (texts that it erased)", *TRAINING.values()], rows)


def truth_table(model: str) -> str:
    """Edits of injected sentences, whose rows are known."""
    rows = []
    frame = pd.read_csv(ROOT / f"docs/results/{model}/erase_truth.csv")
    columns = ("precision", "neg_erased", "half_0", "half_5", "half_50")
    for edit, rows_of in frame.groupby("method", sort=False):
        erased = int(rows_of["half_0"].notna().sum())
        points = 100 * rows_of[[*columns]].assign(neg_erased=rows_of["neg_erased"] / 100)
        cells = [mean_with_interval(points[name]) for name in columns]
        rows.append([f"{edit_title(str(edit))} ({erased})", *cells])
    half = [f"half of it, {step} steps" for step in (0, 5, 50)]
    names = ["edit (sentences that it erased)", "precision (%)", "Neg where it is erased", *half]
    return markdown(names, rows)


def erasures_table() -> str:
    """Edits of 1, 5 and 20 texts at once: means over the texts."""
    frame = pd.read_csv(ROOT / "docs/results/erasures.csv")
    rows = []
    for line in frame.sort_values(["model", "max_others_lost", "texts"]).to_dict("records"):
        now = [
            f"{number(100 * line[f'{name}_before'])} → {number(100 * line[f'{name}_after'])}"
            for name in ("accuracy", "extracted", "half_extracted")
        ]
        price = [number(line["others_lost"]), number(line["perplexity_rise"])]
        erased = f"{line['texts_erased']} of {line['texts']}"
        asked = f"{line['max_others_lost']:g}"
        rows.append([str(line["model"]), asked, erased, *now, *price, number(line["kl"], 4)])
    names = ["recited (%)", "written from the prefix (%)", "from half of it (%)"]
    price_names = ["others lose (points)", "perplexity rises (%)", "KL"]
    return markdown(["model", "price (points)", "texts erased", *names, *price_names], rows)


# Cost, and the shipped models


def cost_table() -> str:
    """Seconds of one text, how many times the loop of the paper's algorithm, and memory."""
    frames = {
        name: pd.read_csv(ROOT / f"docs/results/{model}/cost.csv").set_index("method")
        for name, model in SHIPPED.items()
    }
    rows: list[list[str]] = []
    for method, title in COSTS.items():
        cells: list[str] = []
        for frame in frames.values():
            line = frame.loc[method]
            cells += [f"{line['seconds']:.2g}", f"{line['ratio']:.2g}"]
        gpt2 = frames["gpt2"].loc[method]
        paper = gpt2["A6000, pythia-6.9b (paper)"]
        rows.append([title, *cells, f"{gpt2['MiB']:.0f}", "" if np.isnan(paper) else f"{paper:g}"])
    measured = ["gpt2, seconds", "times faster", "pythia, seconds", "times faster", "gpt2, MiB"]
    return markdown(["method", *measured, "the paper, Pythia-6.9B on an A6000, seconds"], rows)


def gpu_table() -> str:
    """Seconds of one text on a GPU, how many times as long the plain loop takes, and the paper's
    seconds.
    """
    frame = pd.read_csv(ROOT / "docs/results/gpu/cost.csv")
    parts = {shape: part.set_index("method") for shape, part in frame.groupby("shape")}
    pythia, xl = parts["pythia-6.9b"], parts["gpt2-xl"]
    paper = published("cost").set_index("method")["value"]
    bare = [
        f"{x['seconds'] * x['loop']:.3g}"
        for x in (pythia.loc["attribution"], xl.loc["attribution"])
    ]
    rows = [["one bare pass forward and backward", bare[0], "", "", bare[1]]]
    for method, title in GPU_COSTS.items():
        line = pythia.loc[method]
        theirs = paper.get(method.partition(",")[0])
        own = [f"{line['seconds']:g}", f"{line['loop']:g}", f"{theirs:g}" if theirs else ""]
        other = xl.loc[method] if method in xl.index else None
        rows.append([title, *own, "" if other is None else f"{other['seconds']:g}"])
    names = ["Pythia-6.9B, seconds", "its loop, times as long", "the paper, an A6000"]
    return markdown(["method", *names, "GPT-2-XL, seconds"], rows)


def times_table() -> str:
    """Seconds of each task on each model and device."""
    frame = pd.read_csv(ROOT / "docs/results/times.csv")
    seconds = frame.set_index(["task", "model", "device"])["seconds"].unstack([1, 2])
    columns = [f"{SHORT_NAMES.get(model, model)}, {device}" for model, device in seconds.columns]
    rows = [
        [title, *(f"{found:.2g}" if found < 100 else f"{found:.0f}" for found in seconds.loc[task])]
        for task, title in TASKS.items()
        if task in seconds.index
    ]
    return markdown(["task", *columns], rows).replace(" nan ", "  ")


def settings_table() -> str:
    """The settings of each method, with their defaults."""
    rows: list[list[str]] = []
    for name in METHODS:
        settings = {key: v for key, v in default_settings(name).items() if key != "batch_tokens"}
        shown = ", ".join(f"`{key}` {setting_text(value)}" for key, value in settings.items())
        rows.append([name, shown or "none"])
    return markdown(["method", "settings, and their defaults"], rows)


def setting_text(value: object) -> str:
    if value is None or value == ():
        return "none"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def planted_table() -> str:
    """How many planted texts are memorized by the paper's criteria, by repetitions."""
    frames = {
        model: pd.read_csv(ROOT / f"docs/results/{model}/planted.csv").set_index("repetitions")
        for model in SHIPPED.values()
    }
    found = pd.DataFrame({model: frame["found"] for model, frame in frames.items()})
    found.insert(0, "texts", frames[GPT2]["planted"])
    rows = [[f"{times}", *map(str, line)] for times, *line in found.itertuples()]
    return markdown(["repetitions", "texts", *frames], rows)


# Which tables there are

SHIPPED = {"gpt2": GPT2, "pythia": PYTHIA}
COSTS = {
    "activations": "Activations",
    "attribution": "Attribution",
    "integrated_gradients": "Integrated Gradients, 20 points",
    "slimming, 16 in map": "Slimming, 60 steps, 16 in `map`",
    "hard_concrete, 16 in map": "Hard Concrete, 200 steps, 16 in `map`",
    "zero_out, screen=0.05": "Zero-Out, `screen=0.05`",
    "zero_out": "Zero-Out",
}

SMOLLM2_METHODS = (
    *("iterative_attribution", "attribution_contrast_1", "attribution", "hard_concrete"),
    *("hard_concrete_tuned", "slimming", "slimming_tuned", "activations"),
    *("integrated_gradients", "random"),
)
GENERAL_RIVALS = ("selective_pruning", "selective_synaptic_dampening", "contrastive_gradient")
FORGETTING = (
    *("iterative_attribution", "refined_attribution", *SMOLLM2_METHODS[1:-1]),
    *(*GENERAL_RIVALS, "random"),
)
GEMMA_METHODS = (
    *("iterative_attribution", "attribution_contrast_1", "attribution", "hard_concrete"),
    *("slimming", "activations", "integrated_gradients", *GENERAL_RIVALS, "random"),
)
SHIPPED_METHODS = (
    *("iterative_attribution", "iterative_attribution_contrast_0", "slimming"),
    *("integrated_gradients", "hard_concrete", "attribution", "zero_out"),
    *("gradient_alignment", "activations", "random"),
)
THIRD = (
    *("iterative_attribution", "iterative_attribution_contrast_3", "refined_attribution"),
    *("hard_concrete", "attribution", "gradient_alignment", "integrated_gradients"),
    *("slimming", "activations", "random"),
)
FEW = ("iterative_attribution", "attribution_contrast_1", "attribution", "slimming")
REV_METHODS = (
    *("oracle_mask", "oracle_rounds", "oracle_first_order", "activation_contrast_same_kind"),
    *("activation_contrast", "activations", "iterative_attribution", "hard_concrete", "slimming"),
    *("attribution", "gradient_alignment", "row_norm", "random"),
)
REV_OF_PAPER_TEXTS = tuple(
    name for name in REV_METHODS if name not in ("hard_concrete", "slimming")
)
SHARES_OF_PAPER_TEXTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ALONE = (
    *("hard_concrete", "slimming", "zero_out", "integrated_gradients", "activations"),
    *("attribution", "gradient_alignment", "iterative_attribution", "row_norm", "random"),
)
MODELS: list[Column] = [
    ("SmolLM2, 0.2 %", SMOLLM2, "forgetting", 0.002),
    ("Gemma 3, 0.2 %", GEMMA, "forgetting", 0.002),
    ("gpt2, 10 %", GPT2, "del", 0.1),
    ("pythia, 10 %", PYTHIA, "del", 0.1),
]
SMOLLM2_SHARES = {"0.2 %": 0.002, "0.5 %": 0.005, "1 %": 0.01, "3 %": 0.03}
SMOLLM2_FEW = {"1 neuron (0.07 %)": 0.0007, "2 neurons (0.14 %)": 0.0014}
GEMMA_SHARES = {
    "1 neuron of each layer": 0.0007,
    "4 (0.2 %)": 0.002,
    "10 (0.5 %)": 0.005,
    "61 (3 %)": 0.03,
}
SMOLLM2_GROUPS = f"real/{SMOLLM2}/distractors"
IN_GROUPS = (
    *("gradient_alignment", "attribution", "slimming", "hard_concrete", "iterative_attribution"),
    *("integrated_gradients", "activations", "row_norm", "random"),
)
SENTENCES = (
    *("gradient_alignment", "iterative_attribution", "integrated_gradients", "hard_concrete"),
    *("zero_out", "slimming", "activations", "attribution", "row_norm", "random"),
)
PAPER_TEXTS = ("gradient_alignment", *SMOLLM2_METHODS[:-1], "zero_out", "random")
BY_CATEGORY = (
    *("hard_concrete", "slimming", "integrated_gradients", "activations"),
    *("iterative_attribution", "attribution_contrast_1", "attribution", "gradient_alignment"),
    "random",
)
OTHER_ABLATIONS = ("slimming", "activations", "random")
IN_OTHER_ROWS = (
    *("hard_concrete", "slimming", "integrated_gradients", "activations", "row_norm"),
    "random",
)
RECALLS = {
    "SmolLM2, 1 %": SMOLLM2_GROUPS,
    "gpt2, 3 %": f"distractors-{GPT2}",
    "pythia, 3 %": f"distractors-{PYTHIA}",
}
WHOSE = ("self", "neg")
CONTROLS = {
    name: TITLES[name]
    for name in (
        "iterative_attribution",
        "attribution",
        "hard_concrete",
        "activations",
        "random",
    )
}
CONTROL_COLUMNS = {
    "self_zero": "Self",
    "neg_zero": "Neg",
    "self_mean": "Self, mean ablation",
    "self_resample": "Self, resample",
    "short": "Self after half of the prefix",
    "same_half": "a half by its own neurons",
    "other_half": "a half by the other's neurons",
    "extracted": "extracted",
}
SHORT_NAMES = {SMOLLM2: "SmolLM2-135M", GPT2: "shipped gpt2"}
TASKS = {
    "demo": "`tl-localize demo`",
    "known": "`tl-localize known`",
    "localize": "`tl-localize localize`, one text",
    "erase": "`tl-localize erase`, one text",
    "inj --limit 1": "`tl-localize inj --limit 1`, all methods",
    "inj --limit 1, three methods": "`tl-localize inj --limit 1 --ratio 0.01`, three quick methods",
    "del --targets 1": "`tl-localize del --targets 1`, all methods",
    "del --targets 1, three methods": "`tl-localize del --targets 1`, three quick methods",
    "rev --groups 1": "`tl-localize rev --groups 1`, all methods, without the learned mask",
    "activations": "Activations, one text",
    "attribution": "Attribution, one text",
    "gradient_alignment": "Gradient Alignment, one text",
    "iterative_attribution": "Iterative Attribution, the first text of a model",
    "iterative_attribution, another text": "Iterative Attribution, another text",
    "slimming": "Slimming, one text",
    "hard_concrete": "Hard Concrete, one text",
    "integrated_gradients": "Integrated Gradients, one text",
    "zero_out, screen=0.05": "Zero-Out with `screen=0.05`, one text",
}
RIVALS = {
    "refined_attribution": TITLES["refined_attribution"],
    "iterative_attribution": TITLES["iterative_attribution"],
    "adversarial_hard_concrete": "AdversarialHardConcrete",
    "hard_concrete": "Hard Concrete, searched",
    "attribution": TITLES["attribution"],
    "balanced_subnet": "BalancedSubnet",
    **{name: TITLES[name] for name in ("contrastive_gradient", *GENERAL_RIVALS[:2])},
    "random": "Random",
}
RIVALS_IN_REV = {
    name: TITLES[name]
    for name in ("activation_contrast_same_kind", "activation_contrast", "activations")
} | {
    "selective_pruning_same_kind": "SelectivePruning, with texts of the same kind",
    "selective_synaptic_dampening_same_kind": "SelectiveSynapticDampening, likewise",
    **(RIVALS | {"hard_concrete": TITLES["hard_concrete"]}),
}
RIVALS_IN_INJ = [method for method in RIVALS if method != "random"]
GPU_COSTS = {
    "activations": "Activations",
    "attribution": "Attribution",
    "gradient_alignment": "Gradient Alignment, 4 points",
    "iterative_attribution": "Iterative Attribution, another text than the first",
    "integrated_gradients": "Integrated Gradients, 20 points",
    "slimming": "Slimming, 60 steps, alone",
    "slimming, 16 in map": "Slimming, 60 steps, 16 in `map`",
    "hard_concrete": "Hard Concrete, 150 steps, alone",
    "zero_out, screen=0.05": "Zero-Out, `screen=0.05`",
    "zero_out": "Zero-Out",
    "zero_out, loop batched": "Zero-Out, against a loop over 64 at a time",
}
PAPER_COSTS = {name: GPU_COSTS[name] for name in GPU_COSTS if name != "zero_out, loop batched"}
TABLES: dict[str, Callable[[], str]] = {
    "agreement": agreement_table,
    "paper-recited-smollm2": lambda: paper_tables.recited_table(SMOLLM2),
    "paper-recited-gemma": lambda: paper_tables.recited_table(GEMMA),
    "paper-before-gemma": lambda: paper_tables.before_table(GEMMA),
    "paper-texts-gemma": lambda: paper_tables.texts_table(GEMMA, PAPER_TEXTS),
    "paper-before-smollm2": lambda: paper_tables.before_table(SMOLLM2),
    "paper-texts-smollm2": lambda: paper_tables.texts_table(SMOLLM2, PAPER_TEXTS),
    "paper-counts-smollm2": lambda: prices_of(
        paper_tables.counts_points(SMOLLM2), (*BY_CATEGORY, "zero_out"), (0.5, 1, 3, 5)
    ),
    "paper-ablations-smollm2": lambda: paper_tables.ablations_table(SMOLLM2, OTHER_ABLATIONS),
    "paper-costs-smollm2": lambda: paper_tables.costs_table(SMOLLM2, PAPER_COSTS),
    "paper-single-smollm2": lambda: single_layers_table(
        paper_tables.frames_of(SMOLLM2)["single_layers"].query("method != 'random'")
    ),
    "paper-expanded-smollm2": lambda: paper_tables.expanded_table(SMOLLM2, IN_OTHER_ROWS),
    "paper-rev-smollm2": lambda: paper_tables.rev_table(
        SMOLLM2, REV_OF_PAPER_TEXTS, SHARES_OF_PAPER_TEXTS
    ),
    "paper-categories-smollm2": lambda: paper_tables.categories_table(SMOLLM2, BY_CATEGORY),
    "paper-distractors-smollm2": lambda: recall_multiples(SMOLLM2_GROUPS, IN_GROUPS),
    "paper-seeds-smollm2": lambda: paper_tables.seeds_table(SMOLLM2, IN_OTHER_ROWS),
    "paper-across-smollm2": lambda: paper_tables.across_layers_table(SMOLLM2, SENTENCES),
    "paper-sentences-smollm2": lambda: paper_tables.sentences_table(SMOLLM2, SENTENCES),
    "cost": cost_table,
    "gpu": gpu_table,
    "settings": settings_table,
    "times": times_table,
    "front": front_table,
    "heads": heads_table,
    "inj": lambda: inj_table(SENTENCES),
    "inj-smollm2": lambda: alone_table(0.01),
    "inj-smollm2-small": lambda: alone_table(0.001),
    "planted": planted_table,
    "third": third_table,
    "distractors": lambda: recall_table(
        ("gradient_alignment", "attribution", "slimming", "hard_concrete", "row_norm", "random"),
        RECALLS,
    ),
    "benchmark-minutes": minutes_table,
    "rivals": rivals_table,
    "rivals-inj": lambda: recall_table(
        ("gradient_alignment", *RIVALS_IN_INJ, "activations", "row_norm", "random"),
        {f"{name}, 3 %": f"distractors-{model}" for name, model in SHIPPED.items()},
        TITLES | RIVALS,
    ),
    "rivals-rev": lambda: rev_price_table(tuple(RIVALS_IN_REV), SHIPPED, RIVALS_IN_REV),
    "rev": lambda: rev_price_table(
        REV_METHODS[:9] + REV_METHODS[10:11] + REV_METHODS[-1:], SHIPPED, TITLES
    ),
    "del": lambda: del_table(
        ("iterative_attribution", "slimming", "hard_concrete", "activations", "random"), MODELS
    ),
    "del-smollm2": lambda: del_table(FORGETTING, shares(SMOLLM2, SMOLLM2_SHARES), counted=True),
    "del-smollm2-few": lambda: del_table(
        ("refined_attribution", *FEW, "activations", *GENERAL_RIVALS, "random"),
        shares(SMOLLM2, SMOLLM2_FEW),
        counted=True,
    ),
    "few-smollm2": lambda: few_neurons_table(SMOLLM2),
    "del-gemma": lambda: del_table(GEMMA_METHODS, shares(GEMMA, GEMMA_SHARES), counted=True),
    "prices-smollm2": lambda: price_table(SMOLLM2, "forgetting", FORGETTING, (1, 3, 5)),
    "prices-gemma": lambda: price_table(GEMMA, "forgetting", GEMMA_METHODS, (1, 3, 5)),
    "tests-smollm2": lambda: against_table(SMOLLM2, FORGETTING[1:], (1, 3, 5)),
    "tests-gemma": lambda: against_table(GEMMA, GEMMA_METHODS[1:], (1, 3, 5), added=True),
}
TABLES["alignment-share"] = alignment_share_table
for shipped in (GPT2, PYTHIA):
    TABLES[f"memory-{shipped}"] = partial(memory_table, shipped)
    TABLES[f"memory-difference-{shipped}"] = partial(memory_difference_table, shipped)
    TABLES[f"memory-contrast-{shipped}"] = partial(contrast_table, shipped)
    TABLES[f"seeds-{shipped}"] = partial(seeds_table, shipped)
    TABLES[f"erase-{shipped}"] = partial(erase_table, shipped)
    TABLES[f"erase_returned-{shipped}"] = partial(return_table, shipped)
    TABLES[f"erase_truth-{shipped}"] = partial(truth_table, shipped)
    TABLES[f"single-layers-{shipped}"] = partial(layers_of_shipped, shipped)
TABLES["erasures"] = erasures_table
TABLES["erase-pairs"] = erase_pairs_table
TABLES["erase-smollm2"] = partial(erase_table, SMOLLM2)
TABLES["erase_returned-smollm2"] = partial(return_table, SMOLLM2)
TABLES["erase-gemma"] = partial(erase_table, GEMMA)
TABLES["erase_returned-gemma"] = partial(return_table, GEMMA)
for shipped in SHIPPED.values():
    TABLES[f"del-{shipped}"] = partial(all_columns, shipped, SHIPPED_METHODS, (0.02, 0.1))
    TABLES[f"rev-{shipped}"] = partial(rev_table, shipped, REV_METHODS)


# Files in docs/results: the tables of tl-localize del and inj

FILES = {  # name of the file: the benchmark and the name of its table
    "del": ("del", "del"),
    "del_at_price": ("del", "del_at_price"),
    "del_tests": ("del", "del_tests"),
    "del_curve": ("curve", "del"),
    "del_curve_at_price": ("curve", "del_at_price"),
    "units_heads": ("heads", "del"),
    "units_neurons": ("neurons", "del"),
    "inj": ("inj", "inj"),
    "inj_whole_model": ("inj", "inj_across_layers"),
    "inj_tests": ("inj", "inj_tests"),
    "inj_more_sentences": ("seeds", "inj"),
    "inj_other_rows": ("seeds", "other_rows"),
    "distractors3_recall": ("distractors", "inj"),
    "distractors3_whole_model": ("distractors", "inj_across_layers"),
    "distractors3_tests": ("distractors", "inj_tests"),
}


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame with the methods in the package's order."""
    places = {name: place for place, name in enumerate(METHODS)}
    return frame.sort_values("method", key=lambda names: names.map(places), kind="stable")


def injection(model: str, kind: str = "inj") -> InjResults:
    frame = in_order(read_frame(f"{kind}-{model}").reset_index())
    ratio = (frame["injection_ratio"] * frame["multiple"]).round(6)
    about = {"model": model, "seed": 0, "ratio": ratio, "converged": True}  # others have no row
    return InjResults(frame.assign(**about), {}, pd.DataFrame())


def seeds_of_injection(model: str) -> dict[str, pd.DataFrame]:
    """INJ of more sentences, and the same in other rows."""
    results = injection(model, "inj_seeds")
    first, other = (part for _, part in results.frame.groupby("first_seed"))
    table = compare_seeds(first, other).set_index(["injection_ratio", "ratio", "method"])
    alone = replace(results, frame=first).table()
    return {"inj": with_titles(alone), "other_rows": with_titles(table)}


def stored_files(model: str) -> dict[Path, str]:
    """The texts of the files of a model."""

    def ablations(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return del_tables(DelResults(in_order(frame), {}, pd.DataFrame()), model)

    of_units = deletion(model, "heads").frame.groupby("units")
    tables = {
        **{kind: ablations(deletion(model, kind).frame) for kind in ("del", "curve")},
        **{str(units): ablations(part.drop(columns="units")) for units, part in of_units},
        "inj": inj_tables(injection(model), model),
        "distractors": inj_tables(injection(model, "distractors"), model),
        "seeds": seeds_of_injection(model),
    }
    found: dict[Path, str] = {}
    for name, (benchmark, table) in FILES.items():
        whole = flat(tables[benchmark][table])
        text = whole.to_csv(index=False, float_format="%.3g")
        found[ROOT / f"docs/results/{model}/{name}.csv"] = text
    return found


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(text: str) -> str:
    """The text of a page with its tables as they should be."""

    def replaced(place: re.Match[str]) -> str:
        make = TABLES.get(place["name"])
        return f"{place[1]}\n{make()}\n\n{place[3]}" if make else place[0]

    return PLACE.sub(replaced, text)


def complaints(write: bool) -> list[str]:
    """Pages and files whose tables differ, which are none where they are written; and tables on no
    page.
    """
    found = []
    used = set()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        used |= {place["name"] for place in PLACE.finditer(text)}
        expected = with_tables(text)
        if write:
            page.write_text(expected, encoding="utf-8")
        elif expected != text:
            found.append(f"{page.relative_to(ROOT)}: a table differs. Run python docs/tables.py")
    for path, text in (stored_files(GPT2) | stored_files(PYTHIA)).items():
        if write:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"{path.relative_to(ROOT)} differs. Run python docs/tables.py")
    unknown = [f"{name}: docs/tables.py has no such table" for name in sorted(used - {*TABLES})]
    return found + unknown + [f"{name}: no page shows it" for name in TABLES if name not in used]


if __name__ == "__main__":
    found = complaints(write="--check" not in sys.argv[1:])
    print("\n".join(found) or "every table is that of its numbers")
    sys.exit(bool(found))
