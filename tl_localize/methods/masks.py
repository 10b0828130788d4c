"""Training of masks over neurons, shared by Slimming and Hard Concrete."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.checks import Real, check_between, check_count, check_positive
from tl_localize.methods.base import Found, Localizer, Values
from tl_localize.metrics import batch_loss, loss_scale
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch

CHECK_EVERY = 10  # steps between two tests of the early stop
Parameters = Float[Tensor, "batch layer neuron"]
Draw = Float[Tensor, "layer neuron"]  # random numbers of one step


@dataclass(frozen=True, kw_only=True)
class MaskLearner(Localizer):
    """A method that trains masks: Adam minimizes memorization loss + sparsity_weight * sparsity.

    One independent mask per sequence; the masks of a batch are trained side by side. Adam works
    entry by entry, so a mask does not depend on the others, up to rounding. At every 10th step,
    before the update, a mask is finished whose sparsity is below ``stop_sparsity``; finished masks
    take no part in later passes. Layers below ``first_layer`` keep their start.
    """

    learning_rate: Real
    sparsity_weight: Real
    steps: int
    stop_sparsity: Real
    first_layer: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(learning_rate=self.learning_rate, sparsity_weight=self.sparsity_weight)
        check_count(steps=self.steps)
        check_between(0, 1, stop_sparsity=self.stop_sparsity)
        check_count(0, first_layer=self.first_layer)

    def chosen_from(self, neurons: NeuronView) -> int:
        return check_first_layer(neurons, self.first_layer)

    @abstractmethod
    def start(self, neurons: NeuronView, batch: SequenceBatch) -> Float[Tensor, " batch"]:
        """The first value of the parameters of each mask."""

    def noise(self, neurons: NeuronView) -> Iterator[Draw]:
        """The random numbers of each step, the same for every sequence; none by default."""
        return repeat(torch.zeros(neurons.size))

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
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> list[Found]:
        with neurons.lean():
            return self._train(neurons, sequences, report)

    def _train(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> list[Found]:
        n = len(sequences)
        scale = loss_scale(neurons.model)
        draws = self.noise(neurons)
        shape = neurons.size
        left = list(range(n))
        batch = SequenceBatch.of(sequences, neurons.device)
        rows = torch.arange(n, device=neurons.device)  # those that are left, on the device
        parameters = self.start(neurons, batch)[:, None, None].repeat(1, *shape)
        parameters.grad = torch.zeros_like(parameters)
        adam = torch.optim.Adam([parameters], lr=float(self.learning_rate))
        found: dict[int, Found] = {}
        for step in range(self.steps):
            values = parameters[rows].requires_grad_()
            loss, sparsity = self._terms(neurons, batch, values, next(draws))
            if (step + 1) % CHECK_EVERY == 0:
                sparse = sparsity < self.stop_sparsity
                for row, (nats, is_sparse) in enumerate(torch.stack([loss, sparse], 1).tolist()):
                    if not math.isfinite(nats):
                        raise ValueError(
                            f"loss must be finite, got {nats} at step {step + 1} of "
                            f"{sequences[left[row]]!r}. Lower learning_rate or use float32."
                        )
                    if is_sparse:
                        found[left[row]] = self.scores(values[row].detach())
                if len(found) == n:
                    break
            total = scale * (loss + self.sparsity_weight * sparsity).sum()
            (gradient,) = torch.autograd.grad(total, values)
            gradient[:, : self.first_layer] = 0
            parameters.grad[rows] = gradient / scale
            adam.step()
            if len(found) + len(left) > n:
                left = [i for i in left if i not in found]
                rows = torch.tensor(left, device=neurons.device)
                batch = SequenceBatch.of([sequences[i] for i in left], neurons.device)
            report(1 - len(left) / n * (1 - (step + 1) / self.steps))
        return [found.get(i, self.scores(parameters[i])) for i in range(n)]

    def _terms(
        self, neurons: NeuronView, batch: SequenceBatch, values: Parameters, noise: Draw
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Memorization loss and sparsity of each mask."""
        gates = self.gates(values, noise)
        with neurons.scaled(dict(enumerate(gates.unbind(1)))):
            return batch_loss(neurons.model, batch), self.sparsity(values[:, self.first_layer :])


def check_first_layer(neurons: NeuronView, first_layer: int) -> int:
    """The layer itself; ValueError where no layer of the model is left."""
    if first_layer >= neurons.n_layers:
        raise ValueError(
            f"first_layer must be below {neurons.n_layers}, the number of the model's layers, got "
            f"{first_layer}. Give a lower one; 0 leaves none out."
        )
    return first_layer
