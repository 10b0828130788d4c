"""Gradient Alignment against gradients of the rows themselves."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from architectures import config_of, save
from oracles import row_gradients, times_neuron

from tl_localize import GradientAlignment, inject, load_model


def mean_log_odds(model, tokens, n_prefix):
    p = model(tokens[None], return_type="logits", padding_side="right")[0].double().softmax(-1)
    positions = torch.arange(n_prefix - 1, len(tokens) - 1)
    true = p[positions, tokens[positions + 1]]
    return (true / (1 - true)).log().mean()


def plain_gradient_alignment(model, sequence, points, share):
    """[layer neuron]: cosines of rows and their gradients by autograd of W_out; on the path
    activations are scaled by hooks.
    """
    weights = [block.mlp.W_out for block in model.blocks]
    n = weights[0].shape[0]
    total = torch.zeros(len(weights), n)
    for point in range(points):
        gates = torch.ones_like(total)
        for layer in range(len(weights)):
            for neuron in sorted(range(n), key=lambda i: -float(total[layer, i]))[
                : round(share * n)
            ]:
                gates[layer, neuron] = 1 - point / points
        hooks = [
            (f"blocks.{layer}.mlp.hook_post", lambda act, hook, gate=gate: act * gate.to(act))
            for layer, gate in enumerate(gates)
        ]
        with model.hooks(fwd_hooks=hooks):
            odds = mean_log_odds(model, sequence.tokens, sequence.n_prefix)
            gradients = row_gradients(model, odds)
        total += torch.stack(
            [
                F.cosine_similarity(w, g, dim=1, eps=0)
                for w, g in zip(weights, gradients, strict=True)
            ]
        ).detach()
    return total / points


@pytest.mark.parametrize("points", [1, 3])
def test_gradient_alignment_equals_cosines_of_rows_and_their_gradients(any_model, sequence, points):
    wanted = plain_gradient_alignment(any_model, sequence, points, 0.1)
    torch.testing.assert_close(
        GradientAlignment(points=points, share=0.1)(any_model, sequence).values,
        wanted,
        rtol=1e-3,
        atol=1e-4,
    )


def test_gradient_alignment_does_not_see_the_length_of_a_row(gpt2_like, sequence):
    """A row ten times as long, whose neuron fires a tenth as strongly, writes the same."""
    before = GradientAlignment()(gpt2_like, sequence).values
    with torch.no_grad():
        gpt2_like.blocks[1].mlp.W_out[7] *= 10
    with gpt2_like.hooks(fwd_hooks=[times_neuron(1, 7, 0.1)]):
        after = GradientAlignment()(gpt2_like, sequence).values
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)


def test_a_row_of_zeros_and_a_neuron_that_never_fires_score_zero(any_model, sequence):
    with torch.no_grad():
        any_model.blocks[0].mlp.W_out[3] = 0
    hook = ("blocks.1.mlp.hook_post", lambda act, hook: act.index_fill(-1, torch.tensor([4]), 0.0))
    with any_model.hooks(fwd_hooks=[hook]):
        values = GradientAlignment()(any_model, sequence).values
    assert values[0, 3] == 0 and values[1, 4] == 0


def test_gradient_alignment_finds_the_rows_that_were_written(make_model, make_sequences):
    model = make_model(1, d_model=64, d_mlp=256, n_heads=4)
    (sequence,) = (replace(s, n_prefix=1) for s in make_sequences((14, 1)))
    injection = inject(model, sequence, ratio=0.1, seed=0, learning_rate=0.003, max_steps=400)
    with injection.applied(model):
        found = (
            GradientAlignment(share=0.1)(model, sequence).top_k(0.1).recall_of(injection.neurons)
        )
    assert injection.converged and found > 0.8


def test_gradient_alignment_where_a_layer_writes_all_positions_in_one_axis(tmp_path, sequence):
    save(config_of("OPT"), tmp_path)
    model = load_model(tmp_path, device="cpu", bridge=True)
    wanted = plain_gradient_alignment(model, sequence, 1, 0.1).nan_to_num()  # of silent neurons
    assert (wanted != 0).float().mean() > 0.5
    found = GradientAlignment(points=1)(model, sequence).values
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
