"""Attribution: the first order of Zero-Out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import loss_of, times_neuron

from tl_localize import Attribution, MemorizedSequence, ZeroOut


def test_attribution_equals_slope_of_ablation(any_model: Any, sequence: Any) -> None:
    """Shrinking a neuron by 1 % either way moves the loss by 2 % of the score."""
    model, eps = any_model, 1e-2
    scores = Attribution()(model, sequence).values
    model.to(torch.float64)
    with torch.no_grad():
        for layer, neuron in [(0, 3), (0, 40), (1, 11), (1, 47)]:
            losses: list[float] = []
            for factor in (1 - eps, 1 + eps):
                with model.hooks(fwd_hooks=[times_neuron(layer, neuron, factor)]):
                    losses.append(float(loss_of(model, sequence.tokens, sequence.n_prefix)))
            assert float(scores[layer, neuron]) == pytest.approx(
                (losses[0] - losses[1]) / (2 * eps), rel=1e-3, abs=1e-6
            )


def test_attribution_nears_zero_out_as_neurons_write_less(gpt2_like: Any, sequence: Any) -> None:
    errors: list[float] = []
    for _ in range(2):
        exact, estimate = (
            ZeroOut()(gpt2_like, sequence).values[1],
            Attribution()(gpt2_like, sequence).values[1],
        )
        errors.append(float((exact - estimate).norm() / exact.norm()))
        with torch.no_grad():
            gpt2_like.blocks[1].mlp.W_out.mul_(0.1)
    assert errors[1] < 0.3 * errors[0]


def test_attribution_ranks_like_zero_out(any_model: Any, sequence: Any) -> None:
    exact, estimate = (
        ZeroOut()(any_model, sequence).values,
        Attribution()(any_model, sequence).values,
    )
    assert torch.corrcoef(torch.stack([exact.flatten(), estimate.flatten()]))[0, 1] > 0.9


def test_attribution_of_many_equals_one_by_one(any_model: Any, sequences: Any) -> None:
    """Up to rounding: of the largest score, either way is up to 12 float32 roundings off the scores
    of the model in float64, and the two are up to 7 apart.
    """
    together = list(Attribution().map(any_model, sequences))
    for sequence, scores in zip(sequences, together, strict=True):
        alone = Attribution()(any_model, sequence).values
        rounding = torch.finfo(torch.float32).eps * alone.abs().max()
        assert (alone - scores.values).abs().max() < 16 * rounding


def test_attribution_leaves_model_as_it_was(any_model: Any, sequences: Any, unchanged: Any) -> None:
    check = unchanged(any_model)
    list(Attribution().map(any_model, sequences))
    check()


def test_attribution_in_float16_of_a_text_recited_almost_surely(
    gpt2_like: Any, sequence: Any
) -> None:
    """Of a loss of a few millionths of a nat, the gradient at the logits would be below the
    smallest numbers.
    """
    with torch.no_grad():
        gpt2_like.unembed.b_U[sequence.suffix[0]] += 18
    sure = MemorizedSequence(sequence.tokens[: sequence.n_prefix + 1], sequence.n_prefix)
    wanted = Attribution()(gpt2_like, sure).values
    gpt2_like.to(torch.float16)
    gpt2_like.cfg.dtype = torch.float16
    found = Attribution()(gpt2_like, sure).values
    assert 0 < wanted.abs().max() < 1e-5
    assert torch.corrcoef(torch.stack([found.flatten(), wanted.flatten()]))[0, 1] > 0.999
