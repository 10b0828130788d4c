"""Training of masks over neurons, shared by Slimming and Hard Concrete."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.batching import Report
from tl_localize.losses import batch_loss, loss_scale
from tl_localize.methods.base import Found, Localizer, Values
from tl_localize.neurons import NeuronView, Real, check_between, check_count, check_positive
from tl_localize.sequences import MemorizedSequence, SequenceBatch

CHECK_EVERY = 10  # steps between two tests of the early stop
Parameters = Float[Tensor, "batch layer neuron"]
Draw = Float[Tensor, "layer neuron"]  # random numbers of one step


@dataclass(frozen=True, kw_only=True)
class MaskLearner(Localizer):
    """A method that trains masks: Adam minimizes memorization loss + sparsity_weight * sparsity.

    One independent mask per sequence; the masks of a batch are trained side by side. Adam works
    entry by entry, so a mask does not depend on the others, up to rounding. At every 10th step,
    before the update, a mask is finished whose sparsity is below ``stop_sparsity``, or whose loss
    is not finite; finished masks take no part in later passes. Layers below ``first_layer`` keep
    their start.
    """

    by_layer: ClassVar[bool] = False  # the masks of all layers are trained together
    chunk: ClassVar[int] = 16
    learning_rate: Real
    sparsity_weight: Real
    steps: int
    stop_sparsity: Real
    first_layer: int = 0

    @property
    def passes(self) -> float:
        return 1.5 * self.steps

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(learning_rate=self.learning_rate, sparsity_weight=self.sparsity_weight)
        check_count(steps=self.steps)
        check_between(0, 1, stop_sparsity=self.stop_sparsity)
        check_count(0, first_layer=self.first_layer)

    def chosen_from(self, neurons: NeuronView) -> int:
        return check_first_layer(neurons, self.first_layer)

    @property
    @abstractmethod
    def start(self) -> float:
        """The first value of every parameter."""

    def noise(self, neurons: NeuronView) -> Iterator[Draw]:
        """The random numbers of each step, the same for every sequence; none by default."""
        return repeat(torch.zeros(neurons.n_layers, neurons.n_neurons))

    @abstractmethod
    def gates(self, parameters: Parameters, noise: Draw) -> Parameters:
        """What the neurons are multiplied by."""

    @abstractmethod
    def sparsity(self, parameters: Parameters) -> Float[Tensor, " batch"]:
        """The term that makes each mask sparse."""

    @abstractmethod
    def scores(self, parameters: Values) -> Values:
        """The scores that trained parameters are."""

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report
    ) -> list[Found]:
        with neurons.lean():
            return self._train(neurons, sequences, report)

    def _train(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report
    ) -> list[Found]:
        n, scale, draws = len(sequences), loss_scale(neurons.model), self.noise(neurons)
        shape = (n, neurons.n_layers, neurons.n_neurons)
        parameters = torch.full(shape, self.start, device=neurons.device)
        parameters.grad = torch.zeros_like(parameters)
        adam = torch.optim.Adam([parameters], lr=float(self.learning_rate))
        found: dict[int, Found] = {}
        left, batch = list(range(n)), SequenceBatch.of(sequences, neurons.device)
        for step in range(self.steps):
            values = parameters[left]
            untuned, tuned = values[:, : self.first_layer], values[:, self.first_layer :]
            tuned.requires_grad_()
            loss, sparsity = self._terms(neurons, batch, untuned, tuned, next(draws))
            if (step + 1) % CHECK_EVERY == 0:
                sparse = (sparsity < self.stop_sparsity).tolist()
                for row, nats in enumerate(loss.tolist()):
                    if not math.isfinite(nats):
                        found[left[row]] = ValueError(
                            f"loss must be finite, got {nats} at step {step + 1} of "
                            f"{sequences[left[row]]!r}. Lower learning_rate or use float32."
                        )
                    elif sparse[row]:
                        found[left[row]] = self.scores(values[row])
                if len(found) == n:
                    break
            total = scale * (loss + self.sparsity_weight * sparsity).sum()
            (gradient,) = torch.autograd.grad(total, tuned)
            parameters.grad[left, self.first_layer :] = gradient / scale
            adam.step()
            unfinished = [i for i in left if i not in found]
            if len(unfinished) < len(left):
                left = unfinished
                batch = SequenceBatch.of([sequences[i] for i in left], neurons.device)
            report(1 - len(left) / n * (1 - (step + 1) / self.steps))
        return [found.get(i, self.scores(parameters[i])) for i in range(n)]

    def _terms(
        self,
        neurons: NeuronView,
        batch: SequenceBatch,
        untuned: Float[Tensor, "batch untuned neuron"],
        tuned: Float[Tensor, "batch tuned neuron"],
        noise: Draw,
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Memorization loss and sparsity of each mask."""
        gates = [
            *self.gates(untuned, noise[: self.first_layer]).unbind(1),
            *self.gates(tuned, noise[self.first_layer :]).unbind(1),
        ]
        with neurons.scaled(dict(enumerate(gates))):
            return batch_loss(neurons.model, batch), self.sparsity(tuned)


def check_first_layer(neurons: NeuronView, first_layer: int) -> int:
    """The layer itself; ValueError where no layer of the model is left."""
    if first_layer >= neurons.n_layers:
        raise ValueError(
            f"first_layer must be below the model's {neurons.n_layers} layers, got {first_layer}. "
            "Use 0 or 1."
        )
    return first_layer
