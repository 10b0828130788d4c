"""A clean forward pass, partial runs that start above a changed layer, and the first-order estimate
of ablation.

A change in layer l leaves everything below it unchanged. So the residual stream that enters each
layer is recorded once, and a changed run starts at layer l. Where the MLP output is additive,
neuron i adds h_i v_i to the residual stream, with no norm after W_out and no hook: a change of the
neurons by d changes the input of layer l + 1 by d W_out, and the run starts there. Both are
measured on each clean run, layer by layer, because configurations do not tell. Where a check fails,
the longer way is taken.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from tl_localize.methods.base import BatchValues
from tl_localize.metrics import batch_loss, loss_scale, mean_log_odds
from tl_localize.model.forward import recorded_streams, residual, resume
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.sequences import SequenceBatch

Objective = Callable[[LanguageModel, SequenceBatch], Tensor]  # one number for each sequence
# what a check allows: this share of the change, and so many roundings of the residual stream
MISFIT, ROUNDINGS = 1e-3, 16.0
# and this share of the change as a whole, which in bfloat16 is less than its roundings
SLOPE = 0.05


@dataclass(frozen=True, eq=False)
class CleanRun:
    """What one forward pass of the unchanged model computed.

    Args:
        entering: residual stream that enters each layer, before its hooks, [1 pos d_model];
            ``n_layers``: the one after the last layer.
        acts: neurons of each layer, [pos neuron *width], after the user's hooks.
        additive: the layers whose MLP output is simply added, and above which a run can start. None
            for units that write elsewhere.
        restarts: whether a run can start at any layer: nothing but the residual stream goes from
            one layer to the next.
    """

    neurons: NeuronView
    tokens: Int[Tensor, "1 pos"]
    entering: dict[int, Tensor]
    acts: dict[int, Tensor]
    additive: frozenset[int]
    restarts: bool

    @classmethod
    @torch.no_grad()
    def of(cls, neurons: NeuronView, tokens: Int[Tensor, "1 pos"]) -> "CleanRun":
        with recorded_streams(neurons.model) as streams, neurons.recorded() as acts:
            streams[neurons.n_layers] = residual(neurons.model, tokens)
        acts = {layer: act[0] for layer, act in acts.items()}
        halves = torch.tensor([1.0, 0.5], device=tokens.device)[:, None]
        halves = halves.expand(2, neurons.n_neurons)
        checked: list[Tensor] = []  # of each layer: restarts, is additive
        for layer, act in acts.items():
            before, after = streams[layer], streams[layer + 1]
            with neurons.scaled({layer: halves}), neurons.recorded() as seen:
                whole, half = resume(neurons.model, layer, before.expand(2, -1, -1), layer + 1)
            restarts = fits(after[0] - before[0], whole - before[0], whole)
            if layer not in seen:  # the units lie below the layer
                restarts = torch.zeros_like(restarts)
            additive = torch.zeros_like(restarts)
            if neurons.units.additive and act.ndim == 2:
                written = 0.5 * (act.float() @ neurons.rows(layer).float())
                additive = fits(written, whole - half, whole)
            checked.append(torch.stack([restarts, additive]))
        restarting, adding = torch.stack(checked, 1).tolist()
        if not all(restarting):
            warnings.warn(
                "Every run starts from the tokens, the slow way, because layer "
                f"{restarting.index(False)} gets more than the residual stream from the layers "
                "below it, or its units lie there.",
                stacklevel=2,
            )
            return cls(neurons, tokens, streams, acts, frozenset(), False)
        additives = frozenset(layer for layer, adds in zip(acts, adding, strict=True) if adds)
        return cls(neurons, tokens, streams, acts, additives, True)

    def again(self, layer: int, n: int) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream after the last layer of n runs side by side in which hooks change a
        layer, and nothing below it.
        """
        if self.restarts:
            return resume(self.neurons.model, layer, self.entering[layer].expand(n, -1, -1))
        return residual(self.neurons.model, self.tokens.expand(n, -1))


def fits(
    expected: Float[Tensor, "*shape"],
    measured: Float[Tensor, "*shape"],
    carrier: Float[Tensor, "*shape"],
) -> Bool[Tensor, ""]:
    """Whether a change of the residual stream ``carrier`` is the expected one, up to the roundings
    of the stream.
    """
    expected, measured = expected.float(), measured.float()
    misfit = (measured - expected).norm()
    # of the regression of measured on expected, times its square
    slope_misfit = ((measured - expected) * expected).sum().abs()
    rounding = ROUNDINGS * torch.finfo(carrier.dtype).eps * carrier.float().norm()
    # Numbers that are not finite are no misfit: they make scores that are not finite, which are
    # refused by name.
    large = misfit > MISFIT * expected.norm() + rounding
    return ~(large | (slope_misfit > SLOPE * expected.square().sum()))


@torch.no_grad()
def activations(
    neurons: NeuronView, tokens: Integer[Tensor, "batch pos"]
) -> dict[int, Float[Tensor, "batch pos neuron *width"]]:
    """The neurons of each layer."""
    with neurons.recorded() as acts:
        residual(neurons.model, tokens.long().to(neurons.device))
    return acts


def ablation_estimate(neurons: NeuronView, batch: SequenceBatch) -> BatchValues:
    """First-order rise of each sequence's memorization loss when a neuron is ablated: minus the
    gradient of a gate of one on the neuron.
    """
    return -gate_gradients(neurons, batch, batch_loss)[0].cpu()


def gate_gradients(
    neurons: NeuronView,
    batch: SequenceBatch,
    objective: Objective,
    gates: BatchValues | None = None,
    outputs: Mapping[int, Float[Tensor, "sequence pos d_model"]] | None = None,
) -> list[Float[Tensor, "sequence ..."]]:
    """Gradient of each sequence's objective for gates on the neurons, which are one unless given,
    then for ``neurons.outputs()``.
    """
    shape = (len(batch), *neurons.size)
    gates = torch.ones(shape, device=neurons.device) if gates is None else gates.detach()
    gates.requires_grad_()
    scale = loss_scale(neurons.model)
    with torch.enable_grad(), neurons.lean(), neurons.scaled(dict(enumerate(gates.unbind(1)))):
        total = scale * objective(neurons.model, batch).sum()
        gradients = torch.autograd.grad(total, [gates, *(outputs or {}).values()])
    return [gradient.float() / scale for gradient in gradients]


def alignments(
    neurons: NeuronView, batch: SequenceBatch, gates: BatchValues | None = None
) -> BatchValues:
    """Cosine of each output row and the gradient of a text's mean log-odds for it, with gates on
    the neurons; 0 where one of them is 0.
    """
    effects, lengths = row_gradients(neurons, batch, mean_log_odds, gates)
    both = lengths * neurons.row_norms()
    return torch.where(both == 0, 0, effects / both).clamp(-1, 1)


def row_gradients(
    neurons: NeuronView,
    batch: SequenceBatch,
    objective: Objective,
    gates: BatchValues | None = None,
) -> tuple[BatchValues, BatchValues]:
    """Gradient of each text's objective for gates on the neurons, and the norm of its gradient for
    each output row, without the gate.
    """
    with neurons.recorded() as acts, neurons.outputs() as outputs:
        effects, *gradients = gate_gradients(neurons, batch, objective, gates, outputs)
    lengths: list[Tensor] = []  # of the gradients, without the gate
    for layer, gradient in zip(outputs, gradients, strict=True):
        act = acts[layer].detach().float().flatten(2)
        gradient = gradient.reshape(*act.shape[:2], -1)  # OPT has all positions in one axis
        products = einsum(gradient, gradient, "b pos d, b other d -> b pos other")
        squares = einsum(act, products @ act, "b pos entry, b pos entry -> b entry")
        by_unit = neurons.by_unit(squares.view(len(batch), *neurons.shape))
        lengths.append(by_unit.clamp(min=0).sqrt())
    return effects, torch.stack(lengths, dim=1)
