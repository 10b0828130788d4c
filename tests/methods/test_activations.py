"""Activations by hand."""

import pytest
import torch

from tl_localize import Activations


@pytest.mark.parametrize("absolute", ["token", "mean"])
@torch.no_grad()
def test_activations_by_hand(any_model, sequences, absolute):
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


def test_activations_default_is_the_papers_equation():
    assert Activations().absolute == "token"
