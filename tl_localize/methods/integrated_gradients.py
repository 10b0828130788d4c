"""Integrated Gradients of the probability of the true next token."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.batching import Report, halving, rows_that_fit
from tl_localize.forward import residual, resume, unembed
from tl_localize.methods.base import Found, Localizer, Values, one_by_one
from tl_localize.methods.partial_runs import CleanRun
from tl_localize.methods.position_parallel import PositionParallelModel, why_not_parallel
from tl_localize.neurons import NeuronView, check_count
from tl_localize.sequences import MemorizedSequence, SequenceBatch

Steps = Float[Tensor, " step"]
# layer, its neurons [target neuron *width], weighted sum of the gradients, of the same shape
LayerTotals = tuple[int, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class IntegratedGradients(Localizer):
    """How much each neuron adds to the probability of the true next token, on the path of its layer
    from zero to its activations.

        IG_t(l, i) = h_{i,t} * integral over a in [0, 1] of  d P(s_t | p, s_<t, a h_t) / d (a h_{i,t})
        A(l, i) = 1/T sum over t of IG_t(l, i)

    One layer is changed at a time, at the one position that predicts s_t. The sum of IG_t over the
    neurons of a layer is P(h_t) - P(0), up to the error of the quadrature. Of a head: the sum over
    the entries of its vector. All positions of a layer run in one pass (``position_parallel.py``),
    or one by one, with a warning.

    Source: Chang et al. (2024), arXiv:2311.09060, appendix A.2.

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

    name: ClassVar[str] = "integrated_gradients"
    title: ClassVar[str] = "Integrated Gradients"
    steps: int = 20
    rule: Literal["endpoints", "midpoint", "gauss-legendre"] = "endpoints"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(steps=self.steps)
        if self.rule not in ("endpoints", "midpoint", "gauss-legendre"):
            raise ValueError(
                f"rule must be 'endpoints', 'midpoint' or 'gauss-legendre', got {self.rule!r}. The "
                "authors use 'endpoints'."
            )

    def quadrature(self) -> tuple[Steps, Steps]:
        """Points in [0, 1] and their weights, which sum to 1."""
        if self.rule == "gauss-legendre":
            points, weights = np.polynomial.legendre.leggauss(self.steps)
            return torch.tensor((points + 1) / 2, dtype=torch.float32), torch.tensor(
                weights / 2, dtype=torch.float32
            )
        middles = (torch.arange(self.steps) + 0.5) / self.steps
        return middles if self.rule == "midpoint" else torch.linspace(0, 1, self.steps), torch.full(
            (self.steps,), 1 / self.steps
        )

    @property
    def passes(self) -> float:
        return 4.0 * self.steps

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report
    ) -> list[Found]:
        return one_by_one(partial(self._scores, neurons), sequences, report)

    def _scores(self, neurons: NeuronView, sequence: MemorizedSequence, report: Report) -> Values:
        batch = SequenceBatch.of([sequence], neurons.device)
        parallel, clean, reason = None, None, why_not_parallel(neurons, len(sequence))
        scores = torch.zeros(neurons.n_layers, neurons.n_neurons)
        with neurons.lean():
            if reason is None:
                clean = CleanRun.of(neurons, batch.tokens)
                parallel = PositionParallelModel.of(neurons, batch.tokens)
                reason = parallel.why_not(clean)
            if parallel is None or clean is None or reason:
                warnings.warn(
                    "Integrated Gradients takes one position at a time, the slow way, because "
                    f"{reason}.",
                    stacklevel=2,
                )
                totals = self._position_by_position(neurons, batch)
            else:
                totals = self._position_parallel(parallel, clean, batch)
            for layer, act, total in totals:
                scores[layer] = neurons.by_unit((act.float() * total).mean(0)).cpu()
                report((layer + 1) / neurons.n_layers)
        return scores

    def _position_parallel(
        self, parallel: PositionParallelModel, clean: CleanRun, batch: SequenceBatch
    ) -> Iterator[LayerTotals]:
        """All positions at once, and as many points of the path in one batch as fit."""
        for layer in range(clean.neurons.n_layers):
            total = self._over_points(
                clean.neurons,
                batch.tokens.shape[1],
                partial(parallel_gradients, parallel, clean, batch, layer),
            )
            yield layer, clean.acts[layer][batch.positions], total

    def _position_by_position(
        self, neurons: NeuronView, batch: SequenceBatch
    ) -> Iterator[LayerTotals]:
        """The definition: for each position a run of the sequence up to it. Correct for every
        model, and slow.
        """
        with torch.no_grad(), neurons.recorded() as recorded:
            residual(neurons.model, batch.tokens)
        for layer in range(neurons.n_layers):
            act = recorded[layer][0, batch.positions]
            gradients = [
                partial(position_gradients, neurons, batch, layer, act[i], i)
                for i in range(len(act))
            ]
            totals = [
                self._over_points(neurons, n + 1, one)
                for n, one in zip(batch.positions.tolist(), gradients, strict=True)
            ]
            yield layer, act, torch.stack(totals)

    def _over_points(
        self, neurons: NeuronView, length: int, gradients: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Sum of ``gradients(points, weights)`` over batches of points of the path that fit into
        memory.
        """
        points, weights = (part.to(neurons.device) for part in self.quadrature())
        size = rows_that_fit(neurons, length, batch_tokens=self.batch_tokens)
        parts = halving(
            lambda chunk: gradients(points[chunk], weights[chunk]), range(self.steps), size
        )
        return torch.stack([total for _, total in parts]).sum(0)


def parallel_gradients(
    parallel: PositionParallelModel,
    clean: CleanRun,
    batch: SequenceBatch,
    layer: int,
    points: Steps,
    weights: Steps,
) -> Float[Tensor, "target neuron *width"]:
    """Weighted sum over some points of the path of the probability's gradient with respect to a
    layer's neurons, at all targets.
    """
    neurons, act = clean.neurons, clean.acts[layer]
    share = points[(..., *(None,) * act.ndim)].to(act.device)
    if layer in clean.additive:
        # A run from the next layer: with a share of the neurons' output, and with d/d(a h) = W_out
        # d/d(residual stream).
        entering = clean.entering[layer + 1]
        written = (act @ neurons.rows(layer).detach()).float()
        changed = (
            (entering - (1 - share) * written.to(entering.device))
            .to(entering.dtype)
            .requires_grad_()
        )
        with parallel.from_layer(layer + 1):
            resid = resume(neurons.model, layer + 1, changed)[:, batch.positions]
            gradient, scale = probability_gradient(neurons, resid, batch.targets, changed)
    else:
        changed = (share * act.float()).to(act.dtype).requires_grad_()
        with parallel.from_layer(layer + 1), neurons.patched(layer, changed):
            resid = clean.again(layer, len(points))[:, batch.positions]
            gradient, scale = probability_gradient(neurons, resid, batch.targets, changed)
    # A position is changed by its own target alone.
    of_targets = gradient[:, batch.positions].float().flatten(2) * scale.to(gradient.device)
    total = einsum(
        weights.to(gradient.device), of_targets, "step, step target entry -> target entry"
    )
    return (
        total @ neurons.rows(layer).detach().float().T
        if layer in clean.additive
        else total.view(-1, *neurons.shape)
    )


def position_gradients(
    neurons: NeuronView,
    batch: SequenceBatch,
    layer: int,
    act: Float[Tensor, " neuron *width"],
    target: int,
    points: Steps,
    weights: Steps,
) -> Float[Tensor, " neuron *width"]:
    """The same at one target, by runs of the sequence up to its position."""
    position = int(batch.positions[target])
    values = (
        (points[(..., *(None,) * act.ndim)].to(act.device) * act.float())
        .to(act.dtype)
        .requires_grad_()
    )
    with neurons.patched_at(layer, position, values):
        resid = residual(neurons.model, batch.tokens[:, : position + 1].expand(len(points), -1))[
            :, -1:
        ]
        gradient, scale = probability_gradient(neurons, resid, batch.targets[target][None], values)
    return (
        weights.to(gradient.device)
        @ (gradient.float().flatten(1) * scale[:, 0].to(gradient.device))
    ).view(act.shape)


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
        where = targets.to(logits.device).expand(len(resid), -1)[..., None]
        chosen = upstream.gather(-1, where)
        # p_y (1 - p_y), without the rounding of 1 - p_y
        largest = chosen * upstream.scatter_(-1, where, 0.0).sum(-1, keepdim=True)
        scale = 2.0 ** largest.clamp_min(torch.finfo(torch.float32).tiny).log2().round()
        upstream.mul_(-chosen / scale).scatter_(-1, where, largest / scale)
    (gradient,) = torch.autograd.grad(logits, leaf, upstream)
    return gradient, scale.float()
