"""Integrated Gradients of the probability of the true next token."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.checks import check_choice, check_count
from tl_localize.methods.base import Found, Localizer, Values, one_by_one
from tl_localize.methods.partial_runs import CleanRun
from tl_localize.methods.position_parallel import NotParallel, PositionParallelModel
from tl_localize.model.forward import residual, resume, unembed
from tl_localize.model.memory import FractionReport, part_at, rows_that_fit, work_in_batches
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch

Points = Float[Tensor, " point"]


@dataclass(frozen=True, kw_only=True)
class IntegratedGradients(Localizer):
    """How much each neuron adds to the probability of the true next token, on the path of its layer
    from zero to its activations.

        IG_t(l, i) = h_{i,t} integral over a in [0, 1] of dP(s_t | p, s_<t, a h_t) / d(a h_{i,t})
        A(l, i) = 1/T sum over t of IG_t(l, i)

    One layer is changed at a time, at the one position that predicts s_t. The sum of IG_t over the
    neurons of a layer is P(h_t) - P(0), up to the error of the quadrature. The score of a head is
    the sum over the entries of its vector. All positions of a layer run in one pass
    (``position_parallel.py``), or one by one, with a warning.

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (14) to (16) in A.2.

    Args:
        steps: points on the path.
        rule: ``"endpoints"`` is linspace(0, 1, steps) with equal weights 1 / steps (the authors'
            rule; its error falls as 1 / steps). ``"midpoint"`` and ``"gauss-legendre"`` rank as
            well with half of the points (benchmarks/test_quadrature.py).

    Returns:
        [layer neuron], probability.

    Raises:
        ValueError: an unknown rule.

    >>> IntegratedGradients(steps=2, rule="gauss-legendre")(model, sequence).values.shape
    torch.Size([6, 1536])
    """

    name = "integrated_gradients"
    title = "Integrated Gradients"
    batched = False
    steps: int = 20
    rule: Literal["endpoints", "midpoint", "gauss-legendre"] = "endpoints"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(steps=self.steps)
        check_choice("rule", self.rule, ("endpoints", "midpoint", "gauss-legendre"))

    def quadrature(self) -> tuple[Points, Points]:
        """Points in [0, 1] and their weights, which sum to 1."""
        if self.rule == "gauss-legendre":
            nodes, weights = np.polynomial.legendre.leggauss(self.steps)
            return torch.tensor((nodes + 1) / 2).float(), torch.tensor(weights / 2).float()
        points = torch.linspace(0, 1, self.steps)
        if self.rule == "midpoint":
            points = (torch.arange(self.steps) + 0.5) / self.steps
        return points, torch.full((self.steps,), 1 / self.steps)

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> list[Found]:
        return one_by_one(partial(self._score, neurons), sequences, report)

    def _score(
        self, neurons: NeuronView, sequence: MemorizedSequence, report: FractionReport
    ) -> Values:
        batch = SequenceBatch.of([sequence], neurons.device)
        scores: list[Tensor] = []
        points, weights = (part.to(neurons.device) for part in self.quadrature())
        size = rows_that_fit(neurons, len(sequence), batch_tokens=self.batch_tokens)
        with neurons.lean():
            clean = CleanRun.of(neurons, batch.tokens)
            try:
                gradients = partial(parallel_gradients, PositionParallelModel.of(clean), batch)
            except NotParallel as reason:
                gradients = partial(position_gradients, clean, batch)
                warnings.warn(
                    "Integrated Gradients takes one position at a time, the slow way, because "
                    f"{reason}.",
                    stacklevel=2,
                )
            for layer, act in clean.acts.items():
                work = partial(gradients, layer, points, weights)
                total = torch.stack(
                    [part for _, part in work_in_batches(work, range(self.steps), size)]
                )
                product = act[batch.positions].float() * total.sum(0)
                scores.append(neurons.by_unit(product.mean(0)).float())
                report((layer + 1) / neurons.n_layers)
        return torch.stack(scores).cpu()


def parallel_gradients(
    parallel: PositionParallelModel,
    batch: SequenceBatch,
    layer: int,
    points: Points,
    weights: Points,
    chunk: list[int],
) -> Float[Tensor, "target neuron *width"]:
    """Weighted sum over a chunk of the points of the path of the probability's gradient with
    respect to a layer's neurons, at all targets: one pass changes all positions.
    """
    clean = parallel.clean
    neurons = clean.neurons
    act = clean.acts[layer]
    share = part_at(points, chunk).view(-1, *[1] * act.ndim)
    additive = layer in clean.additive
    with parallel.from_layer(layer + 1):
        if additive:
            # A run from the next layer: with a share of the neurons' output, and with
            # d/d(a h) = W_out d/d(residual stream).
            entering = clean.entering[layer + 1]
            written = (act @ neurons.rows(layer).detach()).float()
            leaf = (entering - (1 - share) * written).to(entering.dtype).requires_grad_()
            resid = resume(neurons.model, layer + 1, leaf)
        else:
            leaf = (share * act.float()).to(act.dtype).requires_grad_()
            with neurons.patched(layer, leaf):
                resid = clean.again(layer, len(chunk))
        resid = resid[:, batch.positions]
        gradient, scale = probability_gradient(neurons, resid, batch.targets, leaf)
    # A position is changed by its own target alone.
    of_targets = gradient[:, batch.positions].float().flatten(2) * scale
    total = einsum(part_at(weights, chunk), of_targets, "step, step target entry -> target entry")
    if additive:
        return total @ neurons.rows(layer).detach().float().T
    return total.view(-1, *neurons.shape)


def position_gradients(
    clean: CleanRun,
    batch: SequenceBatch,
    layer: int,
    points: Points,
    weights: Points,
    chunk: list[int],
) -> Float[Tensor, "target neuron *width"]:
    """The same by the definition, for each target by runs of the sequence up to its position.
    Correct for every model, and slow.
    """
    neurons = clean.neurons
    totals: list[Tensor] = []
    for position, target in zip(batch.positions.tolist(), batch.targets, strict=True):
        act = clean.acts[layer][position]
        share = part_at(points, chunk).view(-1, *[1] * act.ndim)
        leaf = (share * act.float()).to(act.dtype).requires_grad_()
        tokens = batch.tokens[:, : position + 1].expand(len(chunk), -1)
        with neurons.patched(layer, leaf, position):
            resid = residual(neurons.model, tokens)[:, -1:]
            gradient, scale = probability_gradient(neurons, resid, target[None], leaf)
        total = part_at(weights, chunk) @ (gradient.float().flatten(1) * scale[:, 0])
        totals.append(total.view(act.shape))
    return torch.stack(totals)


def probability_gradient(
    neurons: NeuronView,
    resid: Float[Tensor, "step target d_model"],
    targets: Int[Tensor, " target"],
    leaf: Float[Tensor, "step ..."],
) -> tuple[Float[Tensor, "step ..."], Float[Tensor, "step target 1"]]:
    """Gradient with respect to ``leaf`` of the probabilities of the true next tokens, each divided
    by its scale; and the scales.

    With p the softmax, dp_y / d logits = p_y (onehot_y - p). Autograd gets it directly, which saves
    the graph of the softmax. Where a text is recited almost surely it is so small that float16
    makes it zero, so it is divided by a power of two that is near its largest entry.
    """
    logits = unembed(neurons.model, resid)
    with torch.no_grad():
        upstream = logits.softmax(-1)
        where = targets.expand(len(resid), -1)[..., None]
        chosen = upstream.gather(-1, where)
        # p_y (1 - p_y), without the rounding of 1 - p_y
        largest = chosen * upstream.scatter_(-1, where, 0.0).sum(-1, keepdim=True)
        scale = 2.0 ** largest.clamp_min(torch.finfo(torch.float32).tiny).log2().round()
        upstream.mul_(-chosen / scale).scatter_(-1, where, largest / scale)
    (gradient,) = torch.autograd.grad(logits, leaf, upstream)
    return gradient, scale.float()
