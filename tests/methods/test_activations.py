"""Activations by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_localize import Activations


@pytest.mark.parametrize("absolute", ["token", "mean"])
@torch.no_grad()
def test_activations_by_hand(any_model: Any, sequences: Any, absolute: Any) -> None:
    for sequence, scores in zip(
        sequences, Activations(absolute=absolute).map(any_model, sequences), strict=True
    ):
        _, cache = any_model.run_with_cache(sequence.tokens[None])
        for layer in range(any_model.cfg.n_layers):
            act = cache[f"blocks.{layer}.mlp.hook_post"][0, sequence.n_prefix - 1 : -1]
            mean = act.abs().mean(0) if absolute == "token" else act.mean(0).abs()
            torch.testing.assert_close(
                scores.values[layer], mean * any_model.W_out[layer].norm(dim=-1)
            )


def test_activations_of_the_mean_never_exceed_those_of_the_token(
    any_model: Any, sequence: Any
) -> None:
    token, mean = (
        Activations(absolute=absolute)(any_model, sequence).values for absolute in ("token", "mean")
    )
    assert (mean <= token + 1e-6).all()


def test_activations_score_a_neuron_that_writes_nothing_zero(any_model: Any, sequence: Any) -> None:
    any_model.blocks[1].mlp.W_out.data[7] = 0
    assert Activations()(any_model, sequence).values[1, 7] == 0


def test_activations_default_is_the_papers_equation() -> None:
    assert Activations().absolute == "token"
