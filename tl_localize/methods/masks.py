"""Training of masks over neurons, shared by Slimming and Hard Concrete."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.batching import Advance, minimize
from tl_localize.losses import loss_scale, memorization_loss
from tl_localize.methods.base import Localizer, Report
from tl_localize.neurons import NeuronView, Real, check_between, check_count, check_positive
from tl_localize.sequences import MemorizedSequence, SequenceBatch

CHECK_EVERY = 10  # steps between two tests of the early stop
Trained = Tensor | ValueError  # parameters [layer neuron], or why there are none


@dataclass(frozen=True, kw_only=True)
class MaskLearner(Localizer):
    """A method that trains masks by ``train_masks``."""

    by_layer: ClassVar[bool] = False  # the masks of all layers are trained together
    chunk: ClassVar[int] = 16
    learning_rate: Real
    sparsity_weight: Real
    steps: int
    stop_sparsity: Real

    @property
    def passes(self) -> float:
        return 1.5 * self.steps

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(learning_rate=self.learning_rate, sparsity_weight=self.sparsity_weight)
        check_count(steps=self.steps)
        check_between(0, 1, stop_sparsity=self.stop_sparsity)


def train_masks(
    neurons: NeuronView,
    sequences: Sequence[MemorizedSequence],
    start: Float[Tensor, "layer neuron"],
    gates: Callable[[Tensor, torch.Generator], Mapping[int, Tensor]],
    sparsity: Callable[[Tensor], Tensor],
    *,
    method: MaskLearner,
    size: int,
    report: Report,
    seed: int = 0,
) -> Iterator[Trained]:
    """Minimize memorization loss + sparsity_weight * sparsity by Adam, one independent mask per
    sequence, up to ``size`` in one batch.

    At every 10th step, before the update, a mask is finished whose sparsity term is below
    ``stop_sparsity``, or whose loss is not finite.

    Args:
        start: first values of the parameters of the tuned layers, the same for every sequence.
        gates: parameters and a generator -> gate of each masked layer, [#batch neuron]; called once
            a step.
        sparsity: parameters -> sparsity term, [batch].
        seed: of the generator (on the CPU), which begins anew for each batch.

    Returns:
        the trained parameters of each sequence, [layer neuron]; an error where the loss is not
        finite.
    """
    scale = loss_scale(neurons.model)

    @lru_cache(maxsize=1)
    def together(numbers: tuple[int, ...]) -> SequenceBatch:
        return SequenceBatch.of([sequences[number] for number in numbers], neurons.device)

    def begin(batch: list[int]) -> tuple[list[Tensor], Advance[Trained]]:
        generator = torch.Generator().manual_seed(seed)

        def advance(
            numbers: tuple[int, ...], parameters: list[Tensor], step: int
        ) -> tuple[Sequence[Tensor], Mapping[int, Trained]]:
            (values,) = parameters
            if step == method.steps:
                return [], dict(zip(numbers, values.detach().unbind(), strict=True))
            with neurons.scaled(gates(values, generator)):
                loss = memorization_loss(neurons.model, together(numbers))
            term = sparsity(values)
            finished: dict[int, Trained] = {}
            if (step + 1) % CHECK_EVERY == 0:
                below = (term < method.stop_sparsity).tolist()
                for i, (number, value) in enumerate(zip(numbers, loss.tolist(), strict=True)):
                    if not math.isfinite(value):
                        where = f"{value} at step {step + 1} of {sequences[number]!r}"
                        finished[number] = ValueError(
                            f"loss must be finite, got {where}. Lower learning_rate or use float32."
                        )
                    elif below[i]:
                        finished[number] = values[i].detach().clone()
                if len(finished) == len(numbers):
                    return [], finished
            (gradient,) = torch.autograd.grad(
                scale * (loss + method.sparsity_weight * term).sum(), values
            )
            return [gradient / scale], finished

        return [start.expand(len(batch), *start.shape).clone()], advance

    rate, steps = method.learning_rate, method.steps
    return minimize(
        neurons, len(sequences), size, begin, learning_rate=rate, max_steps=steps, report=report
    )


def tuned_layers(neurons: NeuronView, first_layer: int) -> range:
    """The layers whose masks are learned; ValueError if no layer is left."""
    if first_layer >= neurons.n_layers:
        raise ValueError(
            f"first_layer must be below the model's {neurons.n_layers} layers, got {first_layer}. "
            "Use 0 or 1."
        )
    return range(first_layer, neurons.n_layers)
