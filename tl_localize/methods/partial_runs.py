"""A clean forward pass, partial runs that start above a changed layer, and the first-order estimate of ablation.

A change in layer l leaves everything below it unchanged. So the residual stream that enters each layer is recorded once, and a changed run
starts at layer l. Where the MLP output is additive (``NeuronView.adds_output``), a change of the neurons by d changes the input of layer
l + 1 by d W_out, and the run starts there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.losses import loss_scale, memorization_loss, residual
from tl_localize.neurons import LayerInputs, NeuronView
from tl_localize.sequences import SequenceBatch


@dataclass(frozen=True, eq=False)
class CleanRun:
    """What one forward pass of the unchanged model computed.

    Args:
        inputs: residual stream entering each layer, [1 pos d_model]; under ``n_layers`` the one after the last layer.
        acts: neurons of each layer, [pos neuron], after the user's hooks.
    """

    neurons: NeuronView
    inputs: LayerInputs
    acts: dict[int, Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, neurons: NeuronView, tokens: Int[Tensor, "1 pos"]) -> CleanRun:
        with neurons.inputs_recorded() as inputs, neurons.recorded() as acts:
            inputs.residual[neurons.n_layers] = residual(neurons.model, tokens)
        return cls(neurons, inputs, {layer: act[0] for layer, act in acts.items()})

    def above(self, layer: int, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream after the last layer when ``resid`` enters the given one."""
        return self.neurons.model(
            resid.contiguous(),  # TransformerLens views it as [batch * pos, d_model]
            start_at_layer=layer,
            stop_at_layer=self.neurons.n_layers,
            shortformer_pos_embed=self.inputs.shortformer,
            padding_side="right",
        )


def ablation_estimate(neurons: NeuronView, batch: SequenceBatch) -> Float[Tensor, "sequence layer neuron"]:
    """First-order rise of each sequence's memorization loss when a neuron is ablated, for all neurons by one forward and backward pass.

    Each neuron is multiplied by a gate of one. The gate's gradient is the sum over positions of h dloss/dh, and ablation moves the gate
    by -1.
    """
    gates = torch.ones(neurons.n_layers, len(batch), neurons.n_neurons, device=neurons.device).requires_grad_()
    scale = loss_scale(neurons.model)
    with torch.enable_grad(), neurons.lean(), neurons.scaled(dict(enumerate(gates.unbind()))):
        (gradient,) = torch.autograd.grad(scale * memorization_loss(neurons.model, batch).sum(), gates)
    return -gradient.transpose(0, 1).float().cpu() / scale
