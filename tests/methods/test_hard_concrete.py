"""Hard Concrete."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tl_localize import HardConcrete
from tl_localize.methods.hard_concrete import hard_concrete as sample
from tl_localize.neurons import NeuronView

QUICK = HardConcrete(steps=12, learning_rate=0.05, sparsity_weight=3.0)


def test_sample_by_hand() -> None:
    found = sample(torch.tensor([0.0, 9.0, -9.0]), torch.tensor([0.5, 0.5, 0.5]), 2 / 3)
    torch.testing.assert_close(found, torch.tensor([0.5, 1.0, 0.0]))


def test_sample_formula() -> None:
    u, location, temperature = 0.3, 0.4, 0.33
    s = 1 / (1 + math.exp(-(math.log(u / (1 - u)) + location) / temperature))
    found = sample(torch.tensor([location]), torch.tensor([u]), temperature)
    assert float(found) == pytest.approx(s * 1.2 - 0.1, abs=1e-6)


def test_sample_survives_noise_at_the_ends() -> None:
    assert sample(torch.zeros(2), torch.tensor([0.0, 1.0]), 0.33).tolist() == [0.0, 1.0]


def test_sample_has_a_gradient_where_it_is_not_clipped() -> None:
    location = torch.zeros(3, requires_grad=True)
    sample(location, torch.tensor([0.5, 1e-4, 0.9999]), 0.33).sum().backward()
    assert location.grad is not None and (location.grad > 0).tolist() == [True, False, False]


def test_scores_are_strictly_between_zero_and_one(any_model: Any, sequence: Any) -> None:
    values = QUICK(any_model, sequence).values
    assert values.min() > 0 and values.max() < 1


@pytest.mark.parametrize(("initial", "wanted"), [(0.5, 0.5), (0.9, 1 / 1.2), (0.2, 0.3 / 1.2)])
def test_scores_start_at_the_initial_mask(
    gpt2_like: Any, sequence: Any, initial: float, wanted: float
) -> None:
    values = HardConcrete(steps=1, learning_rate=1e-9, initial_mask=initial)(
        gpt2_like, sequence
    ).values
    torch.testing.assert_close(values, torch.full_like(values, wanted))


def test_untuned_layers_keep_their_start(neox_like: Any, sequence: Any) -> None:
    values = HardConcrete(
        steps=12, first_layer=1, initial_mask=0.9, learning_rate=0.01, sparsity_weight=300.0
    )(neox_like, sequence).values
    torch.testing.assert_close(values[0], torch.full_like(values[0], 1 / 1.2))
    assert (values[1:] - 1 / 1.2).abs().min() > 1e-4


def test_untuned_layers_are_masked_at_random(
    gpt2_like: Any, sequence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = spied(monkeypatch)
    HardConcrete(steps=2, first_layer=1, initial_mask=0.5, temperature=0.33)(gpt2_like, sequence)
    assert all(0.3 < float(m[:, 0].mean()) < 0.7 and m[:, 0].std() > 0.1 for m in masks)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The masks of each forward pass, [batch layer neuron]."""
    masks: list[torch.Tensor] = []
    scaled = NeuronView.scaled

    def spy(view: Any, gates: Any) -> Any:
        masks.append(torch.stack(list(gates.values()), dim=1).detach())
        return scaled(view, gates)

    monkeypatch.setattr(NeuronView, "scaled", spy)
    return masks


def test_noise_is_drawn_layer_by_layer(
    gpt2_like: Any, sequence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = spied(monkeypatch)
    HardConcrete(steps=13, seed=7, learning_rate=1e-9, initial_mask=0.5, temperature=0.33)(
        gpt2_like, sequence
    )
    generator = torch.Generator().manual_seed(7)
    for mask in masks:
        for layer in range(2):
            noise = torch.rand(48, generator=generator)
            torch.testing.assert_close(mask[0, layer], sample(torch.zeros(48), noise, 0.33))


def test_noise_is_the_same_for_every_sequence_of_a_batch(
    gpt2_like: Any, sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = spied(monkeypatch)
    list(HardConcrete(steps=1).map(gpt2_like, sequences))
    assert len(masks) == 1 and all(torch.equal(masks[0][0], row) for row in masks[0])


@pytest.mark.parametrize("size", [2, 3])
def test_masks_in_batches_equal_each_alone(
    gpt2_like: Any, sequences: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """From these settings the four stop after 40, 30, 50 and 30 steps."""
    method = HardConcrete(
        steps=60,
        learning_rate=0.1,
        sparsity_weight=3.0,
        stop_sparsity=0.36,
        initial_mask=0.5,
        temperature=0.33,
    )
    wanted = [method(gpt2_like, sequence).values for sequence in sequences]
    masks = spied(monkeypatch)
    found = list(method.map(gpt2_like, sequences, batch_size=size))
    assert len(masks) == {2: 90, 3: 80}[size] and sum(map(len, masks)) == 150
    for scores, values in zip(found, wanted, strict=True):
        torch.testing.assert_close(scores.values, values, atol=2e-3, rtol=1e-3)


def test_penalty_by_hand() -> None:
    found = HardConcrete(temperature=0.5).sparsity(torch.full((1, 2, 3), 0.7))
    assert float(found) == pytest.approx(1 / (1 + math.exp(-(0.7 - 0.5 * math.log(0.1 / 1.1)))))
