"""Position-parallel attention holds nothing of a run that is over."""

import pytest
import torch

from tl_localize import IntegratedGradients
from tl_localize.methods import integrated_gradients
from tl_localize.methods.position_parallel import PositionParallelModel


def spied(monkeypatch):
    made = []

    def of(*args):
        made.append(PositionParallelModel.of(*args))
        return made[-1]

    monkeypatch.setattr(
        integrated_gradients, "PositionParallelModel", type("Spy", (), {"of": staticmethod(of)})
    )
    return made


def test_tensors_are_there_during_a_run_and_gone_after_it(gpt2_like, sequence, monkeypatch):
    made = spied(monkeypatch)
    held = []
    gradient = integrated_gradients.probability_gradient

    def looking(*args):
        held.append(sum(len(attention.changed) for attention in made[0].layers.values()))
        return gradient(*args)

    monkeypatch.setattr(integrated_gradients, "probability_gradient", looking)
    IntegratedGradients(steps=3)(gpt2_like, sequence)
    assert held[0] == 4  # of the layer above the changed one
    assert not any(attention.changed for attention in made[0].layers.values())


def test_tensors_are_gone_after_an_exception(gpt2_like, sequence, monkeypatch):
    """So the graph of a batch that ran out of memory is freed before half of the batch runs."""
    made = spied(monkeypatch)
    held = []
    gradient = integrated_gradients.probability_gradient

    def failing(*args):
        if not held:
            held.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient(*args)

    monkeypatch.setattr(integrated_gradients, "probability_gradient", failing)
    parallel = PositionParallelModel.from_layer

    def checked(self, layer):
        assert not any(attention.changed for attention in self.layers.values())
        return parallel(self, layer)

    monkeypatch.setattr(PositionParallelModel, "from_layer", checked)
    with pytest.warns(RuntimeWarning, match="Out of memory"):
        IntegratedGradients(steps=3)(gpt2_like, sequence)
    assert len(made) == 1 and not any(attention.changed for attention in made[0].layers.values())
