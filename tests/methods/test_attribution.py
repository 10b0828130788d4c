"""Attribution: the first order of Zero-Out."""

import pytest
import torch
from oracles import loss_of, times_neuron

from tl_localize import Attribution, MemorizedSequence


def test_attribution_equals_slope_of_ablation(any_model, sequence):
    """Scaling a neuron by 0.8 and 1.2 moves the loss by 0.4 times the score, but for higher orders,
    which two larger steps tell (Richardson). transformers computes RMS norms in float32, so that
    the differences of small steps would be rounding.
    """
    model = any_model
    scores = Attribution()(model, sequence).values
    model.to(torch.float64)

    def slope(layer, neuron, eps):
        losses = []
        for factor in (1 - eps, 1 + eps):
            with model.hooks(fwd_hooks=[times_neuron(layer, neuron, factor)]):
                losses.append(float(loss_of(model, sequence.tokens, sequence.n_prefix)))
        return (losses[0] - losses[1]) / (2 * eps)

    with torch.no_grad():
        for place in [(0, 3), (0, 40), (1, 11), (1, 47)]:
            small, middle, large = (slope(*place, eps) for eps in (0.2, 0.4, 0.8))
            wanted = (64 * small - 20 * middle + large) / 45
            assert float(scores[place]) == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_attribution_in_float16_of_a_text_recited_almost_surely(gpt2_like, sequence):
    """Of a loss of a few millionths of a nat, the gradient at the logits would be below the
    smallest numbers.
    """
    with torch.no_grad():
        gpt2_like.unembed.b_U[sequence.suffix[0]] += 19
    sure = MemorizedSequence(sequence.tokens[: sequence.n_prefix + 1], sequence.n_prefix)
    wanted = Attribution()(gpt2_like, sure).values
    gpt2_like.to(torch.float16)
    gpt2_like.cfg.dtype = torch.float16
    found = Attribution()(gpt2_like, sure).values
    assert 0 < wanted.abs().max() < 1e-5
    assert torch.corrcoef(torch.stack([found.flatten(), wanted.flatten()]))[0, 1] > 0.999
