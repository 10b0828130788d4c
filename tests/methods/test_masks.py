"""Mask training: many masks in one batch are trained as each alone."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tl_localize import HardConcrete, Slimming
from tl_localize.metrics import batch_loss
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import SequenceBatch

SETTINGS = {"learning_rate": 0.02, "sparsity_weight": 30.0, "steps": 40}


@dataclass(frozen=True, kw_only=True)
class Watched(Slimming):
    """Keeps the sparsity of each mask at each step."""

    seen: list[list[float]] = field(default_factory=list, compare=False)

    def sparsity(self, parameters):
        term = super().sparsity(parameters)
        self.seen.append(term.tolist())
        return term


def train(model, sequences, stop_sparsity=0.0, size=9, **settings):
    """Masks, and the sparsities of those that are in each forward pass."""
    method = Watched(stop_sparsity=stop_sparsity, **{**SETTINGS, **settings})
    masks = [scores.values for scores in method.map(model, sequences, batch_size=size)]
    return masks, method.seen


@pytest.fixture
def stop(gpt2_like, sequences):
    """A stop that the four masks pass at different steps: between their sparsities at step 20."""
    return float(np.median(train(gpt2_like, sequences, steps=20)[1][-1]))


def test_masks_in_one_batch_stop_one_by_one(gpt2_like, sequences, stop):
    assert len(set(map(len, train(gpt2_like, sequences, stop)[1]))) > 1


def test_masks_in_batches_equal_each_alone(gpt2_like, sequences, stop):
    alone = [train(gpt2_like, [sequence], stop)[0][0] for sequence in sequences]
    for size in (2, 3):
        together, _ = train(gpt2_like, sequences, stop, size=size)
        for mask, wanted in zip(together, alone, strict=True):
            torch.testing.assert_close(mask, wanted, atol=1e-3, rtol=1e-3)


def test_masks_stop_at_a_tenth_step_before_its_update(gpt2_like, sequence):
    (stopped,), seen = train(gpt2_like, [sequence], stop_sparsity=1.0)
    (wanted,), _ = train(gpt2_like, [sequence], steps=9)
    assert len(seen) == 10 and torch.equal(stopped, wanted)


def test_masks_follow_torchs_adam(gpt2_like, sequence):
    view = NeuronView(gpt2_like)
    batch = SequenceBatch.of([sequence])
    m = torch.ones(1, view.n_layers, view.n_neurons, requires_grad=True)
    adam = torch.optim.Adam([m], lr=SETTINGS["learning_rate"])
    for _ in range(15):
        with view.lean(), view.scaled(dict(enumerate(m.clamp(0, 1).unbind(1)))):
            loss = batch_loss(gpt2_like, batch) + SETTINGS["sparsity_weight"] * m.abs().mean()
        adam.zero_grad()
        loss.sum().backward()
        adam.step()
    torch.testing.assert_close(
        train(gpt2_like, [sequence], steps=15)[0][0],
        m.detach()[0].clamp(0, 1),
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize("method", [Slimming(steps=10), HardConcrete(steps=10)])
def test_mask_training_refuses_a_loss_that_is_not_finite(gpt2_like, sequence, unchanged, method):
    gpt2_like.W_U.data[0, 0] = torch.nan
    hooks = {name: len(point._forward_hooks) for name, point in gpt2_like.hook_dict.items()}
    with pytest.raises(
        ValueError,
        match=(
            r"loss must be finite, got nan at step 10 of .*'s0'.*. Lower learning_rate or use "
            r"float32"
        ),
    ):
        next(method.map(gpt2_like, [sequence], check=False))
    assert {name: len(point._forward_hooks) for name, point in gpt2_like.hook_dict.items()} == hooks
