"""Slimming."""

from __future__ import annotations

from typing import Any

import pytest

from tl_localize import Slimming
from tl_localize.neurons import NeuronView

QUICK = Slimming(steps=30, learning_rate=0.05, sparsity_weight=3.0)


def test_slimming_scores_are_masks(any_model: Any, sequence: Any) -> None:
    values = QUICK(any_model, sequence).values
    assert values.min() >= 0 and values.max() <= 1


def test_slimming_leaves_untuned_layers_open(neox_like: Any, sequence: Any) -> None:
    values = Slimming(steps=12, first_layer=2)(neox_like, sequence).values
    assert (values[:2] == 1).all() and (values[2] < 1).any()


def test_slimming_does_not_mask_untuned_layers(
    gpt2_like: Any, sequence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled, untouched = NeuronView.scaled, []

    def recording(self: Any, gates: Any) -> Any:
        untouched.append(bool((gates[0] == 1).all()))
        return scaled(self, gates)

    monkeypatch.setattr(NeuronView, "scaled", recording)
    Slimming(steps=2, first_layer=1)(gpt2_like, sequence)
    assert untouched == [True, True]


def test_slimming_without_pressure_keeps_everything_open(gpt2_like: Any, sequence: Any) -> None:
    closed = (Slimming(steps=20, sparsity_weight=1e-6)(gpt2_like, sequence).values < 0.5).sum()
    assert (
        closed
        < (
            Slimming(steps=60, learning_rate=0.05, sparsity_weight=1e4)(gpt2_like, sequence).values
            < 0.5
        ).sum()
    )


def test_slimming_drops_a_neuron_that_does_nothing(gpt2_like: Any, sequence: Any) -> None:
    gpt2_like.blocks[1].mlp.W_out.data[7] = 0
    values = QUICK(gpt2_like, sequence).values
    assert values[1, 7] == values.min() == 0


def test_slimming_after_no_update_is_all_open(gpt2_like: Any, sequence: Any) -> None:
    assert (Slimming(steps=10, learning_rate=1e-12)(gpt2_like, sequence).values > 0.999).all()
