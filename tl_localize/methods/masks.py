"""Training of masks over neurons, shared by Slimming and Hard Concrete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.losses import loss_scale, memorization_loss
from tl_localize.methods.base import Report
from tl_localize.neurons import NeuronView, Real
from tl_localize.optim import BatchAdam
from tl_localize.sequences import MemorizedSequence, SequenceBatch
from tl_localize.side_by_side import side_by_side

CHECK_EVERY = 10  # steps between two tests of the early stop


def train_masks(
    neurons: NeuronView,
    sequences: Sequence[MemorizedSequence],
    start: Float[Tensor, "sequence layer neuron"],
    gates: Callable[[Tensor, list[int]], Mapping[int, Tensor]],
    sparsity: Callable[[Tensor], Tensor],
    *,
    size: int,
    learning_rate: Real,
    sparsity_weight: Real,
    steps: int,
    stop_sparsity: Real,
    report: Report,
) -> Iterator[Tensor]:
    """Minimize memorization loss + sparsity_weight * sparsity by Adam, one independent mask per sequence, up to ``size`` side by side.

    At every 10th step of its own, before the update, a mask whose sparsity term is below stop_sparsity is finished.

    Args:
        start: the parameters' first values, of the tuned layers only.
        gates: parameters, and the step that each is at (from 1) -> gate of each masked layer, [#batch neuron]; called once a step.
        sparsity: parameters -> sparsity term, [batch].
    Returns: the trained parameters of each sequence, [layer neuron].
    Raises:
        ValueError: a loss is not finite.
    """

    scale = loss_scale(neurons.model)

    @lru_cache(maxsize=1)
    def together(numbers: tuple[int, ...]) -> SequenceBatch:
        return SequenceBatch.of([sequences[number] for number in numbers], neurons.device)

    def advance(numbers: tuple[int, ...], adam: BatchAdam) -> dict[int, Tensor]:
        (parameters,), at = adam.parameters, [done + 1 for done in adam.n_steps.tolist()]
        with neurons.scaled(gates(parameters, at)):
            loss = memorization_loss(neurons.model, together(numbers))
        term = sparsity(parameters)
        finished: dict[int, Tensor] = {}
        if checked := [i for i, step in enumerate(at) if step % CHECK_EVERY == 0]:
            values, terms = loss.detach().cpu(), term.tolist()
            if not values[checked].isfinite().all():
                raise ValueError(
                    f"loss must be finite, got {values[checked].tolist()} at step {at[checked[0]]}. Lower learning_rate or use float32."
                )
            finished = {numbers[i]: parameters[i].detach().clone() for i in checked if terms[i] < stop_sparsity}
        if len(finished) < len(numbers):
            # The finished ones take part in this one backward, whose results for them are dropped: rows do not mix.
            (gradient,) = torch.autograd.grad(scale * (loss + sparsity_weight * term).sum(), parameters)
            adam.step([gradient / scale])
            ended = (i for i, step in enumerate(at) if step == steps and numbers[i] not in finished)
            finished |= {numbers[i]: parameters[i].detach().clone() for i in ended}
        return finished

    return side_by_side(
        neurons,
        len(sequences),
        size,
        lambda numbers: [start[numbers].clone()],
        advance,
        learning_rate=learning_rate,
        max_steps=steps,
        report=report,
    )


def tuned_layers(neurons: NeuronView, first_layer: int) -> range:
    """The layers whose masks are learned.

    Raises:
        ValueError: no layer is left.
    """
    if first_layer >= neurons.n_layers:
        raise ValueError(f"first_layer must be below the model's {neurons.n_layers} layers, got {first_layer}. Use 0 or 1.")
    return range(first_layer, neurons.n_layers)
