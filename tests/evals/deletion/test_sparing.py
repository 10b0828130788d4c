"""Shares that are chosen by what other text loses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tl_localize import NeuronScores, perplexity
from tl_localize.evals.deletion import sparing
from tl_localize.evals.deletion.results import DelResults
from tl_localize.evals.deletion.sparing import (
    counts,
    describe_general_text,
    largest_set,
    sparing_runs,
)
from tl_localize.execution import Steps
from tl_localize.methods import Activations, Attribution, RandomBaseline


def test_counts_double_up_to_the_whole_layer() -> None:
    assert list(counts(12)) == [1, 2, 4, 8]


def test_largest_set_is_the_last_before_general_text_suffers(
    gpt2_like: Any, general: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = gpt2_like.cfg.n_layers, gpt2_like.cfg.d_mlp
    scores = NeuronScores(torch.rand(shape, generator=torch.Generator().manual_seed(0)))
    was = perplexity(gpt2_like, general)
    rises = {}
    for count in counts(gpt2_like.cfg.d_mlp):
        chosen = scores.top_k(count=count, first_layer=1)
        with chosen.dropped_out(gpt2_like):
            rises[len(chosen)] = 100 * (perplexity(gpt2_like, general) / was - 1)
    bound = list(rises.values())[2]
    expected = next(i for i, rise in enumerate([*rises.values(), 1e9]) if rise > bound)
    found = largest_set(gpt2_like, scores, general, bound + 1e-4, 1)
    assert len(found) == list(rises)[max(0, expected - 1)]
    assert len(largest_set(gpt2_like, scores, general, 1e6, 1)) == max(rises)
    found = iter([was, math.nan])  # the whole model, then the smallest set
    monkeypatch.setattr(sparing, "perplexity", lambda model, text: next(found))
    assert len(largest_set(gpt2_like, scores, general, 1e6, 1)) == min(rises)


def test_a_method_goes_on_while_the_others_lose_little(
    gpt2_like: Any, benchmark_of: Any, monkeypatch: Any
) -> None:
    """Activations loses 3 points at two units, Attribution nothing."""
    steps = Steps()
    ratios = []
    benchmark = benchmark_of(gpt2_like, n_targets=1)
    methods = [Activations(), Attribution(), RandomBaseline()]
    right = DelResults.of

    def made_up(steps: Steps) -> Any:
        results = right(steps)
        two = results.frame["ratio"] == 2 / gpt2_like.cfg.d_mlp
        costs = two & (results.frame["method"] == "activations")
        results.frame["delta_neg_accuracy"] = costs * -0.03
        return results

    monkeypatch.setattr(DelResults, "of", made_up)
    for of_ratio, left in sparing_runs(benchmark, methods, steps, 1):
        of_ratio.run(left, steps)
        ratios.append((of_ratio.ratios[0] * gpt2_like.cfg.d_mlp, [method.name for method in left]))
    both = ["activations", "attribution"]
    assert ratios[:3] == [(1, both), (2, both), (4, ["attribution"])]
    assert len(ratios) == len(list(counts(gpt2_like.cfg.d_mlp)))


@pytest.mark.parametrize(("rise", "named"), [(0.1, ""), (3.0, "broken")])
def test_a_broken_model_is_named(
    gpt2_like: Any, benchmark_of: Any, rise: float, named: str
) -> None:
    results = benchmark_of(gpt2_like, n_targets=1).run([Activations()])
    frame = results.frame
    frame["delta_perplexity"] = rise * frame["perplexity_before"]
    text = describe_general_text(results)
    assert f"at most {1 + rise:.3g} times" in text
    assert ("broken" in text and "activations from 20 %" in text) == bool(named)


def test_settings_of_one_method_go_on_together(gpt2_like: Any, benchmark_of: Any) -> None:
    methods = [Activations(), Activations(absolute="mean")]
    steps = Steps()
    benchmark = benchmark_of(gpt2_like, n_targets=1)
    rounds = 0
    for of_ratio, left in sparing_runs(benchmark, methods, steps, 100):
        of_ratio.run(left, store=steps)
        rounds += 1
    assert rounds == len(counts(gpt2_like.cfg.d_mlp))
    frame = DelResults.of(steps).frame
    assert set(frame["method"]) == {*map(repr, methods), "random"}


def test_without_another_text_no_loss_ends_a_run(gpt2_like: Any, benchmark_of: Any) -> None:
    benchmark = benchmark_of(gpt2_like)
    alone = replace(benchmark, sequences=benchmark.sequences[-1:], n_dev=0)
    with pytest.raises(ValueError, match="sequences must hold at least 2 for the test"):
        next(sparing_runs(alone, [Activations()], Steps(), 1))


def test_a_shard_goes_on_only_where_all_targets_are_measured(
    gpt2_like: Any, benchmark_of: Any
) -> None:
    """The mean of some targets could end a method that the mean of all lets go on."""
    steps = Steps()
    benchmark = benchmark_of(gpt2_like, n_targets=2)
    rounds = []
    for part in (1, 2):
        ratios = []
        for of_ratio, left in sparing_runs(benchmark, [Activations()], steps, 100, is_shard=True):
            of_ratio.run(left, steps, progress=False, shard=(part, 2))
            ratios += of_ratio.ratios
        rounds.append([ratio * gpt2_like.cfg.d_mlp for ratio in ratios])
    assert rounds == [[1], [1, 2]]


def test_random_alone_ends_no_run(gpt2_like: Any, benchmark_of: Any) -> None:
    benchmark = benchmark_of(gpt2_like, n_targets=1)
    with pytest.raises(ValueError, match=r"hold one beside Random .* got \['random'\]. Name one"):
        next(sparing_runs(benchmark, [RandomBaseline()], Steps(), 1))


def test_a_method_goes_on_where_the_others_lose_just_as_much_as_they_may(
    gpt2_like: Any, benchmark_of: Any, monkeypatch: Any
) -> None:
    """Seven points, which are a little more in the numbers of a machine."""
    assert -100 * 0.07 < -7
    right = DelResults.of
    n_rounds = 0

    def made_up(steps: Steps) -> Any:
        results = right(steps)
        results.frame["delta_neg_accuracy"] = -0.07
        return results

    monkeypatch.setattr(DelResults, "of", made_up)
    steps = Steps()
    benchmark = benchmark_of(gpt2_like, n_targets=1)
    for of_ratio, left in sparing_runs(benchmark, [Activations()], steps, 7):
        of_ratio.run(left, steps)
        n_rounds += 1
    assert n_rounds == len(counts(gpt2_like.cfg.d_mlp))
