"""Integrated Gradients of the probability of the true next token."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.losses import residual, unembed
from tl_localize.batching import halving
from tl_localize.methods.base import Localizer, Report
from tl_localize.methods.one_pass import CleanRun, OwnAttentions, obstacle
from tl_localize.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch

LayerTotals = tuple[int, Tensor, Tensor]  # layer, its neurons [target neuron], weighted sum of the gradients [target neuron]


@dataclass(frozen=True, kw_only=True)
class IntegratedGradients(Localizer):
    """How much each neuron of a layer adds to the probability of the true next token, on the way from silence to its activation.

        IG_t(l, i) = h_{i,t} * integral over a in [0, 1] of  d P(s_t | p, s_<t, a h_t) / d (a h_{i,t})
        A(l, i) = 1/T sum over t of IG_t(l, i)

    One layer is changed at a time, at the one position that predicts s_t. Summed over the neurons of a layer IG_t is
    P(h_t) - P(0), up to the quadrature.

    All positions of a layer run in one pass (``one_pass.py``); a model whose attention does not allow it takes them one by one, and a
    warning says so.

    Source: Chang et al. (2024), arXiv:2311.09060, appendix A.2.
    Args:    steps: points on the path.
             rule: ``"endpoints"`` is linspace(0, 1, steps) with equal weights 1 / steps (the authors' rule, which does not converge to
                 the integral faster than 1 / steps). ``"midpoint"`` and ``"gauss-legendre"`` rank as well with half of the points
                 (errors: benchmarks/test_quadrature.py).
    Memory:  4 (B L (5 f + 10 d + 4 h n) + 4 T V) bytes beyond the weights; letters in ``memory.peak_bytes``. B counts the points
             of the path that run side by side, each with all positions.
    Returns: [layer neuron], probability.
    Raises:  ValueError: an unknown rule.

    >>> from tl_localize import IntegratedGradients, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> IntegratedGradients(steps=2, rule="gauss-legendre")(model, sequence).values.shape
    torch.Size([6, 1536])
    """

    name: ClassVar[str] = "integrated_gradients"
    steps: int = 20
    rule: Literal["endpoints", "midpoint", "gauss-legendre"] = "endpoints"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in ("endpoints", "midpoint", "gauss-legendre"):
            raise ValueError(f"rule must be 'endpoints', 'midpoint' or 'gauss-legendre', got {self.rule!r}. The authors use 'endpoints'.")

    def quadrature(self) -> tuple[Float[Tensor, " step"], Float[Tensor, " step"]]:
        """Points in [0, 1] and their weights, which sum to 1."""
        if self.rule == "gauss-legendre":
            points, weights = np.polynomial.legendre.leggauss(self.steps)
            return torch.tensor((points + 1) / 2, dtype=torch.float32), torch.tensor(weights / 2, dtype=torch.float32)
        if self.rule == "midpoint":
            points = (torch.arange(self.steps) + 0.5) / self.steps
        else:
            points = torch.linspace(0, 1, self.steps)
        return points, torch.full((self.steps,), 1 / self.steps)

    def _attribute(self, neurons: NeuronView, sequence: MemorizedSequence, report: Report) -> Float[Tensor, "layer neuron"]:
        batch = SequenceBatch.of([sequence], neurons.device)
        if reason := obstacle(neurons, len(sequence)):
            warnings.warn(f"Integrated Gradients takes one position at a time, the slow way, because {reason}.", stacklevel=2)
            totals = self._position_by_position(neurons, batch)
        else:
            totals = self._in_one_pass(neurons, batch)
        scores = torch.zeros(neurons.n_layers, neurons.n_neurons)
        with neurons.lean():
            for layer, act, total in totals:
                scores[layer] = (act.float() * total).mean(0).cpu()
                report((layer + 1) / neurons.n_layers)
        return scores

    def _in_one_pass(self, neurons: NeuronView, batch: SequenceBatch) -> Iterator[LayerTotals]:
        """All positions at once, and as many points of the path side by side as fit; see ``one_pass`` for why this is exact."""
        points, weights = (part.to(neurons.device) for part in self.quadrature())
        attentions = OwnAttentions.of(neurons)
        with attentions.recorded():
            clean = CleanRun.of(neurons, batch.tokens)
        size = max(1, self._tokens(neurons) // batch.tokens.shape[1])
        for layer in range(neurons.n_layers):
            act, rows = clean.acts[layer], neurons.rows(layer).detach()

            def gradients(chunk: list[int], layer: int = layer, act: Tensor = act, rows: Tensor = rows) -> Tensor:
                share = points[chunk, None, None].to(act.device)
                if neurons.adds_output(layer):
                    # A run from the next layer: the neurons write a share of what they wrote, and d/d(a h) = W_out d/d(residual stream).
                    entering = clean.inputs.residual[layer + 1]
                    changed = (entering - (1 - share) * (act @ rows).float().to(entering.device)).to(entering.dtype).requires_grad_()
                    with attentions.from_layer(layer + 1):
                        gradient = probability_gradient(neurons, clean.above(layer + 1, changed), batch, changed)
                    total = torch.einsum("s,spd->pd", weights[chunk].to(gradient.device), gradient.float())[batch.positions]
                    return (total.to(rows) @ rows.T).float()
                changed = (share * act.float()).to(act.dtype).requires_grad_()
                entering = clean.inputs.residual[layer].expand(len(chunk), -1, -1)
                with attentions.from_layer(layer + 1), neurons.patched(layer, changed):
                    gradient = probability_gradient(neurons, clean.above(layer, entering), batch, changed)
                return torch.einsum("s,spn->pn", weights[chunk].to(gradient.device), gradient.float())[batch.positions]

            yield layer, act[batch.positions], torch.stack([total for _, total in halving(gradients, range(self.steps), size)]).sum(0)

    def _position_by_position(self, neurons: NeuronView, batch: SequenceBatch) -> Iterator[LayerTotals]:
        """The definition as it stands: for each position a run of the sequence up to it. Right for every model, and slow."""
        points, weights = (part.to(neurons.device) for part in self.quadrature())
        with torch.no_grad(), neurons.recorded() as recorded:
            residual(neurons.model, batch.tokens)
        for layer in range(neurons.n_layers):
            act = recorded[layer][0, batch.positions]
            totals: list[Tensor] = []
            for i, position in enumerate(batch.positions.tolist()):

                def gradients(chunk: list[int], layer: int = layer, act: Tensor = act[i], i: int = i, position: int = position) -> Tensor:
                    values = (points[chunk, None].to(act.device) * act.float()).to(act.dtype).requires_grad_()
                    with neurons.patched_at(layer, torch.full((len(chunk),), position), values):
                        resid = residual(neurons.model, batch.tokens[:, : position + 1].expand(len(chunk), -1))[:, -1]
                        probability = unembed(neurons.model, resid).softmax(-1)[:, batch.targets[i]]
                    (gradient,) = torch.autograd.grad(probability.sum(), values)
                    return weights[chunk].to(gradient.device) @ gradient.float()

                size = max(1, self._tokens(neurons) // (position + 1))
                totals.append(torch.stack([total for _, total in halving(gradients, range(self.steps), size)]).sum(0))
            yield layer, act, torch.stack(totals)


def probability_gradient(
    neurons: NeuronView, resid: Float[Tensor, "step pos d_model"], batch: SequenceBatch, leaf: Float[Tensor, "step pos axis"]
) -> Float[Tensor, "step pos axis"]:
    """Gradient with respect to ``leaf`` of the probabilities of the true next tokens, summed over the batch's targets and the steps.

    With p the softmax, dp_y / d logits = p_y (onehot_y - p): handed to autograd as it is, it spares the graph of the softmax.
    """
    logits = unembed(neurons.model, resid[:, batch.positions])
    with torch.no_grad():
        upstream = logits.softmax(-1)
        where = batch.targets.to(logits.device).expand(len(resid), -1)[..., None]
        chosen = upstream.gather(-1, where)
        upstream.mul_(-chosen).scatter_add_(-1, where, chosen)
    (gradient,) = torch.autograd.grad(logits, leaf, upstream)
    return gradient
