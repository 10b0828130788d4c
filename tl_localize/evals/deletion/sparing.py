"""Shares of a layer that are chosen by what is lost: how many neurons can be ablated before other
text suffers?
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tl_localize.checks import Real, check_between
from tl_localize.evals.deletion.benchmark import DelBenchmark
from tl_localize.evals.deletion.results import DelResults
from tl_localize.execution.store import Steps
from tl_localize.methods import Localizer, RandomBaseline
from tl_localize.metrics import perplexity
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.stats import in_percent

BROKEN = 2.0  # of a model whose perplexity of general text grows to so many times what it was


def counts(n_units: int) -> list[int]:
    """1, 2, 4, ... units of a layer."""
    return [2**power for power in range(n_units.bit_length())]


def check_max_rise(max_perplexity_rise: Real) -> None:
    """Raise ValueError unless it is a percentage from 0 on."""
    check_between(0, 1e6, max_perplexity_rise=max_perplexity_rise)


def check_max_lost(max_others_lost: Real) -> None:
    """Raise ValueError unless it is a number of points of accuracy."""
    check_between(0, 100, max_others_lost=max_others_lost)


def largest_set(
    model: LanguageModel,
    scores: NeuronScores,
    text: torch.Tensor,
    max_perplexity_rise: Real,
    first_layer: int,
) -> NeuronSet:
    """The best 1, 2, 4, ... units of each layer: as many as raise the perplexity of general text by
    at most ``max_perplexity_rise`` percent, and at least one.

    >>> scores = Activations()(model, sequence)
    >>> len(largest_set(model, scores, text, max_perplexity_rise=5, first_layer=1)) >= 5
    True
    """
    check_max_rise(max_perplexity_rise)
    bound = (1 + max_perplexity_rise / 100) * perplexity(model, text)
    best = scores.top_k(count=1, first_layer=first_layer)
    for count in counts(scores.values.shape[1]):
        chosen = scores.top_k(count=count, first_layer=first_layer)
        with chosen.dropped_out(model):
            if not perplexity(model, text) <= bound:  # also where it is nan
                break
        best = chosen
    return best


def sparing_runs(
    benchmark: DelBenchmark,
    methods: Sequence[Localizer],
    steps: Steps,
    max_others_lost: Real,
    *,
    is_shard: bool = False,
) -> Iterator[tuple[DelBenchmark, list[Localizer]]]:
    """DEL at 1, 2, 4, ... units of each layer, to be run one after the other with these steps. A
    method goes on while the other sequences lose at most ``max_others_lost`` points of accuracy
    (Neg); one with several settings while one of them does.

    Args:
        is_shard: of a shard a method goes on only where all targets are measured, as the mean of
            some may say something else; what is left is for a run of all.

    Raises:
        ValueError: there is no other sequence.

    >>> benchmark = DelBenchmark(model, few, text, ratios=(0.5,), n_dev=1)
    >>> runs = sparing_runs(benchmark, [Activations()], Steps(), max_others_lost=1)
    >>> next(runs)[0].ratios == (1 / model.cfg.d_mlp,)
    True
    """
    check_max_lost(max_others_lost)
    if len(benchmark.test_sequences) < 2:
        raise ValueError(
            "sequences must hold at least 2 for the test where the loss of others ends the run, "
            "got 1. Give more, or fixed shares (--ratio)."
        )
    left = [method for method in methods if method.name != RandomBaseline.name]
    if not left:
        raise ValueError(
            "methods must hold one beside Random where the loss of others ends the run, got "
            f"{[method.name for method in methods]}. Name one, or give fixed shares (--ratio)."
        )
    n_units = NeuronView(benchmark.model, benchmark.units).n_neurons
    for count in counts(n_units):
        if not left:
            return
        ratio = count / n_units
        yield replace(benchmark, ratios=(ratio,)), left
        frame = DelResults.of(steps).frame
        changes = frame[frame["ratio"] == ratio].groupby("method")["delta_neg_accuracy"]
        lost = changes.mean()
        if is_shard:
            lost[changes.size() < len(benchmark.targets)] = -math.inf
        # a label is the name, or tells settings apart as long as there are several
        going_on = {
            getattr(method, "name", label)
            for label, method in benchmark.label(left).items()
            if round(100 * lost.get(label, -math.inf), 6) >= -max_others_lost
        }
        left = [method for method in left if method.name in going_on]


def describe_general_text(results: DelResults) -> str:
    """What happened to the perplexity of general text, and which methods broke the model; empty
    where only single layers were measured.
    """
    frame = results.frame
    if not len(frame):
        return ""
    rises = 1 + frame["delta_perplexity"] / frame["perplexity_before"]
    means = rises.groupby([frame["method"], frame["ratio"]], sort=False).mean()
    text = f"Perplexity of general text: at most {means.max():.3g} times what it was."
    first = means[means >= BROKEN].reset_index().groupby("method", sort=False)["ratio"].min()
    if len(first):
        named = ", ".join(f"{method} from {in_percent(ratio)}" for method, ratio in first.items())
        text += f" The model is broken rather than the text forgotten by {named}."
    return text
