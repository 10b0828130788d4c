"""A clean forward pass, partial runs that start above a changed layer, and the first-order estimate of ablation.

A change in layer l leaves everything below it unchanged. So the residual stream that enters each layer is recorded once, and a changed run
starts at layer l. Where the MLP output is additive (``NeuronView.adds_output``), a change of the neurons by d changes the input of layer
l + 1 by d W_out, and the run starts there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.changes import uninterrupted
from tl_localize.losses import loss_scale, memorization_loss, residual
from tl_localize.neurons import NeuronView
from tl_localize.sequences import SequenceBatch


@dataclass(frozen=True, eq=False)
class CleanRun:
    """What one forward pass of the unchanged model computed.

    Args:
        entering: residual stream that enters each layer, before its hooks, [1 pos d_model]; ``n_layers``: the one after the last layer.
        acts: neurons of each layer, [pos neuron], after the user's hooks.
        shortformer: the position vectors that a shortformer adds in each layer.
    """

    neurons: NeuronView
    entering: dict[int, Tensor]
    acts: dict[int, Tensor]
    shortformer: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, neurons: NeuronView, tokens: Int[Tensor, "1 pos"]) -> CleanRun:
        with entering_recorded(neurons) as (entering, options), neurons.recorded() as acts:
            entering[neurons.n_layers] = residual(neurons.model, tokens)
        return cls(neurons, entering, {layer: act[0] for layer, act in acts.items()}, options.get("shortformer_pos_embed"))

    def above(self, layer: int, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream after the last layer when ``resid`` enters the given one."""
        return self.neurons.model(
            resid.contiguous(),  # TransformerLens views it as [batch * pos, d_model]
            start_at_layer=layer,
            stop_at_layer=self.neurons.n_layers,
            shortformer_pos_embed=self.shortformer,
            padding_side="right",
        )


@uninterrupted
def entering_recorded(neurons: NeuronView) -> Iterator[tuple[dict[int, Tensor], dict[str, Any]]]:
    """The residual stream that enters each layer in the last forward pass, and with what options the blocks were called."""
    entering: dict[int, Tensor] = {}
    options: dict[str, Any] = {}

    def record(module: object, inputs: tuple[Tensor, ...], given: dict[str, Any], *, layer: int) -> None:
        entering[layer] = inputs[0]
        options.update(given)

    with ExitStack() as stack:
        for layer, block in enumerate(neurons.model.blocks):
            stack.enter_context(block.register_forward_pre_hook(partial(record, layer=layer), prepend=True, with_kwargs=True))
        yield entering, options


def ablation_estimate(neurons: NeuronView, batch: SequenceBatch) -> Float[Tensor, "sequence layer neuron"]:
    """First-order rise of each sequence's memorization loss when a neuron is ablated: minus the gradient of a gate of one on the neuron."""
    gates = torch.ones(neurons.n_layers, len(batch), neurons.n_neurons, device=neurons.device).requires_grad_()
    scale = loss_scale(neurons.model)
    with torch.enable_grad(), neurons.lean(), neurons.scaled(dict(enumerate(gates.unbind()))):
        (gradient,) = torch.autograd.grad(scale * memorization_loss(neurons.model, batch).sum(), gates)
    return -gradient.transpose(0, 1).float().cpu() / scale
