"""Tables of DEL: what ablation takes from a text, and from others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from cells import (  # noqa: E402
    COLUMNS,
    GEMMA,
    GPT2,
    PYTHIA,
    RIVALS,
    SHIPPED,
    SMOLLM2,
    TITLES,
    markdown,
    mean_with_interval,
    power,
    short,
    with_interval,
)
from comparison import read_frame  # noqa: E402
from price_tests import difference_at, tests_at_prices  # noqa: E402

from tl_localize import DelResults  # noqa: E402
from tl_localize.evals.deletion import layers_against_all  # noqa: E402
from tl_localize.stats import bootstrap, gains_at, means_of  # noqa: E402

LOSSES = ("delta_self_accuracy", "delta_neg_accuracy")
THIRD = (
    *("iterative_attribution", "iterative_attribution_contrast_3", "refined_attribution"),
    *("hard_concrete", "attribution", "gradient_alignment", "integrated_gradients"),
    *("slimming", "activations", "random"),
)


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


@cache
def points_of(model: str, kind: str) -> dict[str, pd.DataFrame]:
    """Self and Neg of each method, as ``DelResults.points`` has them."""
    return deletion(model, kind).points()


def price_table(model: str, kind: str, methods: Sequence[str], prices: Sequence[float]) -> str:
    """Self where the others have lost so many points, with intervals."""
    return prices_of(points_of(model, kind), methods, prices)


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
        return gains_at(price, *means_of(drawn, costs, own))

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
    points = points_of(model, "forgetting")
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
    """Text / others in points, by neurons of all layers, or of one of them: as many, or a
    multiple.
    """
    compared = layers_against_all(frame).sort_values(["ratio", "multiple", "all"])

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
        if "n_neurons" in frame:
            n_all = part[part["layer"].isna()]["n_neurons"].max()
            share = f"{n_all} neurons, or {in_one['n_neurons'].max()} of one layer"
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
