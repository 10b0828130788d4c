"""Training of masks over neurons, shared by Slimming and Hard Concrete."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.losses import memorization_loss
from tl_localize.methods.base import Report
from tl_localize.neurons import NeuronView, Real
from tl_localize.optim import BatchAdam
from tl_localize.sequences import SequenceBatch

CHECK_EVERY = 10  # steps between two tests of the early stop


def train_masks(
    neurons: NeuronView,
    batch: SequenceBatch,
    start: Float[Tensor, "batch layer neuron"],
    gates: Callable[[Tensor], Mapping[int, Tensor]],
    sparsity: Callable[[Tensor], Tensor],
    *,
    learning_rate: Real,
    sparsity_weight: Real,
    steps: int,
    stop_sparsity: Real,
    report: Report,
) -> Float[Tensor, "batch layer neuron"]:
    """Minimize memorization loss + sparsity_weight * sparsity by Adam, one independent mask per sequence of the batch.

    Every 10th step, before the update, a mask whose sparsity term is below stop_sparsity is finished and leaves the batch.

    Args:
        start: the parameters' first values, of the tuned layers only.
        gates: parameters -> gate of each masked layer, [#batch neuron]; called once a step.
        sparsity: parameters -> sparsity term, [batch].
    Returns: the trained parameters.
    Raises:
        ValueError: a loss is not finite.
    """
    parameters = start.clone().requires_grad_()
    adam = BatchAdam([parameters], learning_rate)
    trained = torch.empty_like(start)
    open_rows = torch.arange(len(batch), device=start.device)
    with neurons.frozen():
        for step in range(1, steps + 1):
            with torch.enable_grad(), neurons.scaled(gates(parameters)):
                loss = memorization_loss(neurons.model, batch)
                term = sparsity(parameters)
            finished = torch.zeros_like(term, dtype=torch.bool)
            if step % CHECK_EVERY == 0:
                if not loss.isfinite().all():
                    raise ValueError(f"loss must be finite, got {loss.tolist()} at step {step}. Lower learning_rate or use float32.")
                finished = term.detach() < stop_sparsity
                if finished.any():
                    trained[open_rows[finished]] = parameters.detach()[finished]
                    open_rows = open_rows[~finished]
                    if not len(open_rows):
                        return trained
            # The finished rows take part in this one backward, whose results for them are dropped: rows do not mix.
            (gradient,) = torch.autograd.grad((loss + sparsity_weight * term).sum(), parameters)
            adam.step([gradient])
            if len(open_rows) < len(batch):
                still = (~finished).nonzero().flatten()
                (parameters,), batch = adam.keep(still), batch.take(still)
            report(step / steps)
    trained[open_rows] = parameters.detach()
    return trained


def tuned_layers(neurons: NeuronView, first_layer: int) -> range:
    """The layers whose masks are learned.

    Raises:
        ValueError: no layer is left.
    """
    if first_layer >= neurons.n_layers:
        raise ValueError(f"first_layer must be below the model's {neurons.n_layers} layers, got {first_layer}. Use 0 or 1.")
    return range(first_layer, neurons.n_layers)
