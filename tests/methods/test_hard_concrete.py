"""Hard Concrete."""

import math

import pytest
import torch
from oracles import loss_of

from tl_localize import HardConcrete
from tl_localize.methods.hard_concrete import hard_concrete as sample
from tl_localize.model.neurons import NeuronView

QUICK = HardConcrete(steps=12, learning_rate=0.05, sparsity_weight=3.0)


def test_sample_formula():
    u, location, temperature = 0.3, 0.4, 0.33
    s = 1 / (1 + math.exp(-(math.log(u / (1 - u)) + location) / temperature))
    found = sample(torch.tensor([location]), torch.tensor([u]), temperature)
    assert float(found) == pytest.approx(s * 1.2 - 0.1, abs=1e-6)


def test_sample_survives_noise_at_the_ends():
    assert sample(torch.zeros(2), torch.tensor([0.0, 1.0]), 0.33).tolist() == [0.0, 1.0]


def test_sample_has_a_gradient_where_it_is_not_clipped():
    location = torch.zeros(3, requires_grad=True)
    sample(location, torch.tensor([0.5, 1e-4, 0.9999]), 0.33).sum().backward()
    assert location.grad is not None and (location.grad > 0).tolist() == [True, False, False]


@pytest.mark.parametrize(("initial", "wanted"), [(0.5, 0.5), (0.9, 1 / 1.2), (0.2, 0.3 / 1.2)])
def test_scores_start_at_the_initial_mask(gpt2_like, sequence, initial, wanted):
    values = HardConcrete(steps=1, learning_rate=1e-9, initial_mask=initial)(
        gpt2_like, sequence
    ).values
    torch.testing.assert_close(values, torch.full_like(values, wanted))


def test_first_masks_leave_the_loss_where_it_is(gpt2_like, sequences):
    with torch.no_grad():
        gpt2_like.blocks[0].mlp.W_out.mul_(20)
        gpt2_like.unembed.W_U.mul_(8)
        for sequence in sequences:  # as the model continues them
            for i in range(sequence.n_prefix, len(sequence)):
                sequence.tokens[i] = gpt2_like(sequence.tokens[None, :i])[0, -1].argmax()
    noise = torch.rand(10, 2, 48, generator=torch.Generator().manual_seed(0))[0]
    still = HardConcrete(steps=1, learning_rate=1e-9)
    starts = []
    for scores, sequence in zip(still.map(gpt2_like, sequences), sequences, strict=True):

        def loss(gates, sequence=sequence):
            hooks = [
                (f"blocks.{i}.mlp.hook_post", lambda act, hook, gate=gate: act * gate)
                for i, gate in enumerate(gates)
            ]
            with torch.no_grad(), gpt2_like.hooks(fwd_hooks=hooks):
                return float(loss_of(gpt2_like, sequence.tokens, sequence.n_prefix))

        start = math.log(1.15 / 0.05)
        while loss(sample(torch.full((2, 48), start), noise, 1.0)) > loss(torch.ones(2, 48)) + 0.1:
            start += 1
        wanted = torch.full((2, 48), start).sigmoid()
        torch.testing.assert_close(scores.values, wanted)
        starts.append(start)
    assert len(set(starts)) > 1
    given = HardConcrete(steps=1, learning_rate=1e-9, initial_mask=1.05)
    for scores in given.map(gpt2_like, sequences):
        torch.testing.assert_close(scores.values, torch.full((2, 48), 1.15 / 1.2))


def test_untuned_layers_keep_their_start(neox_like, sequence):
    values = HardConcrete(
        steps=12, first_layer=1, initial_mask=0.9, learning_rate=0.01, sparsity_weight=300.0
    )(neox_like, sequence).values
    torch.testing.assert_close(values[0], torch.full_like(values[0], 1 / 1.2))
    assert (values[1:] - 1 / 1.2).abs().min() > 1e-4


def test_untuned_layers_are_masked_at_random(gpt2_like, sequence, monkeypatch):
    masks = spied(monkeypatch)
    HardConcrete(steps=2, first_layer=1, initial_mask=0.5, temperature=0.33)(gpt2_like, sequence)
    assert all(0.3 < float(m[:, 0].mean()) < 0.7 and m[:, 0].std() > 0.1 for m in masks)


def spied(monkeypatch):
    """The masks of each forward pass, [batch layer neuron]."""
    masks = []
    scaled = NeuronView.scaled

    def spy(view, gates):
        masks.append(torch.stack(list(gates.values()), dim=1).detach())
        return scaled(view, gates)

    monkeypatch.setattr(NeuronView, "scaled", spy)
    return masks


def test_noise_is_drawn_layer_by_layer(gpt2_like, sequence, monkeypatch):
    NeuronView(gpt2_like)  # whose proof scales too
    masks = spied(monkeypatch)
    HardConcrete(steps=13, seed=7, learning_rate=1e-9, initial_mask=0.5, temperature=0.33)(
        gpt2_like, sequence
    )
    generator = torch.Generator().manual_seed(7)
    for mask in masks:
        for layer in range(2):
            noise = torch.rand(48, generator=generator)
            torch.testing.assert_close(mask[0, layer], sample(torch.zeros(48), noise, 0.33))


def test_noise_is_the_same_for_every_sequence_of_a_batch(gpt2_like, sequences, monkeypatch):
    NeuronView(gpt2_like)  # whose proof scales too
    masks = spied(monkeypatch)
    list(HardConcrete(steps=1, initial_mask=0.5).map(gpt2_like, sequences))
    assert len(masks) == 1 and all(torch.equal(masks[0][0], row) for row in masks[0])


def test_penalty_by_hand():
    found = HardConcrete(temperature=0.5).sparsity(torch.full((1, 2, 3), 0.7))
    assert float(found) == pytest.approx(1 / (1 + math.exp(-(0.7 - 0.5 * math.log(0.1 / 1.1)))))
