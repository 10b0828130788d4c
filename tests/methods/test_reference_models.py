"""The methods against their plain forms on the shipped models and a text that they recite, where
tests elsewhere take random weights.
"""

from functools import partial

import pytest
import torch
from oracles import loss_of, plain_integrated_gradients, plain_zero_out

from tl_localize import (
    Attribution,
    IntegratedGradients,
    MemorizedSequence,
    Slimming,
    ZeroOut,
)
from tl_localize.texts.reference import reference_sequences


@pytest.fixture(scope="module", params=["reference-gpt2", "reference-pythia"])
def model(request, shipped_model):
    return shipped_model(request.param)


@pytest.fixture(scope="module")
def text(model):
    """The first 40 tokens of a memorized sequence, the last 8 of them to be recited."""
    return MemorizedSequence(reference_sequences(model)[3].tokens[:40], 32)


def multiplied(act, hook, *, gate):
    return act * gate


def gated_loss(model, text, gates):
    hooks = [
        (f"blocks.{layer}.mlp.hook_post", partial(multiplied, gate=gate))
        for layer, gate in enumerate(gates)
    ]
    with model.hooks(fwd_hooks=hooks):
        return loss_of(model, text.tokens, text.n_prefix)


def agree(scores, expected, tolerance=1e-6):
    assert expected.abs().max() > 1e-3, "a test on zeros shows nothing"
    assert (scores.values - expected).abs().max() < tolerance


def test_integrated_gradients_equals_definition(model, text):
    method = IntegratedGradients(steps=2)
    text = MemorizedSequence(text.tokens[:35], 32)
    agree(method(model, text), plain_integrated_gradients(model, text, *method.quadrature()))


def test_zero_out_equals_definition(model, text):
    """Of the neurons that a screen scores exactly: all of them take half a minute."""
    scores = ZeroOut(screen=0.002, screen_sample=2)(model, text)
    assert len(scores.exact) == 6 * (3 + 2)
    expected = plain_zero_out(model, text, among=scores.exact.mask)
    assert expected.nan_to_num().abs().max() > 1e-3, "a test on zeros shows nothing"
    assert (scores.values - expected)[scores.exact.mask].abs().max() < 1e-6


def test_attribution_equals_gradient_of_gates(model, text):
    gates = torch.ones(model.cfg.n_layers, model.cfg.d_mlp, requires_grad=True)
    (gradient,) = torch.autograd.grad(gated_loss(model, text, gates), gates)
    agree(Attribution()(model, text), -gradient)


def test_slimming_follows_torchs_adam(model, text):
    method = Slimming(steps=5, learning_rate=0.01, sparsity_weight=1.0, first_layer=0)
    masks = torch.ones(model.cfg.n_layers, model.cfg.d_mlp, requires_grad=True)
    adam = torch.optim.Adam([masks], lr=0.01)
    for _ in range(5):
        adam.zero_grad()
        (gated_loss(model, text, masks.clamp(0, 1)) + 1.0 * masks.abs().mean()).backward()
        adam.step()
    expected = masks.detach().clamp(0, 1)
    apart = (method(model, text).values - expected).abs()
    assert expected.min() < 0.96 and expected.std() > 1e-3
    # A float32 softmax subtracts the logarithm of the sum, which is rounded at the size of the
    # logits; the gradient at a logit is 1 - p, which is small in a recited text. The method's
    # gradient has this relative error, and Adam's steps of 0.01 at most the same.
    with torch.no_grad():
        logits = model(text.tokens[None])[0, text.n_prefix - 1 : -1].double()
    chance = logits.softmax(-1).gather(-1, text.suffix[:, None])
    error = torch.finfo(torch.float32).eps * logits.amax() / (1 - chance).mean()
    assert apart.mean() < 5 * 0.01 * error < 1e-5
    # Where the two terms nearly cancel, Adam's step has the sign of a rounding error.
    assert (apart > 1e-4).float().mean() < 1e-3
