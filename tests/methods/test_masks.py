"""Mask training: many masks in one batch are trained as each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_localize import HardConcrete, Slimming
from tl_localize.methods import gates
from tl_localize.methods.masks import train_masks
from tl_localize.neurons import NeuronView
from tl_localize.sequences import SequenceBatch

# The sparsity falls by about the learning rate a step: from these starts, four masks pass the stop at different tenth steps.
SETTINGS: dict[str, Any] = {"learning_rate": 0.02, "sparsity_weight": 30.0, "steps": 40}
ALL_OPEN, STARTS, STOP = torch.ones(1), torch.tensor([0.8, 0.35, 1.0, 0.6]), 0.3


def train(
    model: Any, sequences: Any, stop_sparsity: float = 0.0, starts: torch.Tensor = ALL_OPEN, size: int = 9, **settings: Any
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Masks over all neurons, and the steps that the masks of each forward pass were at."""
    view = NeuronView(model)
    steps: list[list[int]] = []

    def gate(m: torch.Tensor, at: list[int]) -> dict[int, torch.Tensor]:
        steps.append(at)
        return dict(enumerate(m.clamp(0, 1).unbind(1)))

    masks = train_masks(
        view,
        sequences,
        starts[:, None, None].repeat(len(sequences) // len(starts), view.n_layers, view.n_neurons),
        gate,
        lambda m: m.abs().mean((1, 2)),
        size=size,
        stop_sparsity=stop_sparsity,
        report=lambda fraction: None,
        **{**SETTINGS, **settings},
    )
    return list(masks), steps


def test_masks_in_one_batch_stop_one_by_one(gpt2_like: Any, sequences: Any) -> None:
    _, steps = train(gpt2_like, sequences, STOP, STARTS)
    assert {len(at) for at in steps} == {1, 2, 3, 4}


def test_masks_that_wait_enter_where_others_finish(gpt2_like: Any, sequences: Any) -> None:
    _, alone = zip(*(train(gpt2_like, sequences[i : i + 1], STOP, STARTS[i : i + 1]) for i in range(4)), strict=True)
    _, steps = train(gpt2_like, sequences, STOP, STARTS, size=2)
    first = alone[1][-1][0]  # the second of four finishes first
    assert len(alone[0]) > first and steps[first - 1 : first + 1] == [[first, first], [first + 1, 1]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_masks_that_enter_late_equal_each_alone(neox_like: Any, sequences: Any, size: int) -> None:
    together, _ = train(neox_like, sequences, STOP, STARTS, size=size)
    for i, mask in enumerate(together):
        torch.testing.assert_close(mask, train(neox_like, sequences[i : i + 1], STOP, STARTS[i : i + 1])[0][0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("i", range(4))
def test_masks_in_one_batch_equal_each_alone(gpt2_like: Any, sequences: Any, i: int) -> None:
    together, _ = train(gpt2_like, sequences, STOP, STARTS)
    torch.testing.assert_close(together[i], train(gpt2_like, sequences[i : i + 1], STOP, STARTS[i : i + 1])[0][0], atol=1e-3, rtol=1e-3)


def test_masks_stop_at_a_tenth_step_before_its_update(gpt2_like: Any, sequence: Any) -> None:
    (stopped,), steps = train(gpt2_like, [sequence], stop_sparsity=2.0)
    (wanted,), _ = train(gpt2_like, [sequence], steps=9)
    assert len(steps) == 10 and torch.equal(stopped, wanted)


def test_masks_train_all_steps_without_early_stop(gpt2_like: Any, sequence: Any) -> None:
    assert len(train(gpt2_like, [sequence], steps=23)[1]) == 23


def test_masks_that_stop_at_the_last_step_miss_its_update(gpt2_like: Any, sequence: Any) -> None:
    assert torch.equal(train(gpt2_like, [sequence], stop_sparsity=2.0, steps=10)[0][0], train(gpt2_like, [sequence], steps=9)[0][0])


def test_masks_follow_torchs_adam(gpt2_like: Any, sequence: Any) -> None:
    view, batch = NeuronView(gpt2_like), SequenceBatch.of([sequence])
    m = torch.ones(1, view.n_layers, view.n_neurons, requires_grad=True)
    adam = torch.optim.Adam([m], lr=SETTINGS["learning_rate"])
    for _ in range(15):
        with view.frozen(), view.scaled(dict(enumerate(m.clamp(0, 1).unbind(1)))):
            loss = gates.memorization_loss(gpt2_like, batch) + SETTINGS["sparsity_weight"] * m.abs().mean()
        adam.zero_grad()
        loss.sum().backward()
        adam.step()
    torch.testing.assert_close(train(gpt2_like, [sequence], steps=15)[0][0], m.detach()[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", [Slimming(steps=10), HardConcrete(steps=10)])
def test_mask_training_refuses_a_loss_that_is_not_finite(gpt2_like: Any, sequence: Any, unchanged: Any, method: Any) -> None:
    gpt2_like.W_U.data[0, 0] = torch.nan
    hooks = {name: len(point._forward_hooks) for name, point in gpt2_like.hook_dict.items()}
    with pytest.raises(ValueError, match=r"loss must be finite, got .*nan.* at step 10. Lower learning_rate or use float32"):
        method(gpt2_like, sequence)
    assert {name: len(point._forward_hooks) for name, point in gpt2_like.hook_dict.items()} == hooks
