"""Integrated Gradients of the probability of the true next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.losses import residual, unembed
from tl_localize.memory import halving
from tl_localize.methods.base import Localizer, Report
from tl_localize.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class IntegratedGradients(Localizer):
    """How much each neuron of a layer adds to the probability of the true next token, on the way from silence to its activation.

        IG_t(l, i) = h_{i,t} * integral over a in [0, 1] of  d P(s_t | p, s_<t, a h_t) / d (a h_{i,t})
        A(l, i) = 1/T sum over t of IG_t(l, i)

    One layer is changed at a time, at the one position that predicts s_t. Summed over the neurons of a layer IG_t is
    P(h_t) - P(0), up to the quadrature.

    Source: Chang et al. (2024), arXiv:2311.09060, appendix A.2.
    Args:    steps: points on the path.
             rule: ``"endpoints"`` is linspace(0, 1, steps) with equal weights 1 / steps (the authors' rule, which does not converge to
                 the integral faster than 1 / steps), ``"midpoint"`` and ``"gauss-legendre"`` need fewer points for the same accuracy.
    Returns: [layer neuron], probability.
    """

    name: ClassVar[str] = "integrated_gradients"
    steps: int = 20
    rule: Literal["endpoints", "midpoint", "gauss-legendre"] = "endpoints"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in ("endpoints", "midpoint", "gauss-legendre"):
            raise ValueError(f"rule must be 'endpoints', 'midpoint' or 'gauss-legendre', got {self.rule!r}.")

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
        device = neurons.device
        points, weights = (part.to(device) for part in self.quadrature())
        tokens = sequence.tokens.to(device)
        batch = SequenceBatch.of([sequence], device)
        with torch.no_grad(), neurons.recorded() as recorded:
            residual(neurons.model, batch.tokens)
        clean = {layer: act[0, batch.positions] for layer, act in recorded.items()}
        scores = torch.zeros(neurons.n_layers, neurons.n_neurons)
        n = len(batch.targets)
        for layer in range(neurons.n_layers):
            for i, position in enumerate(batch.positions.tolist()):
                size = max(1, self._tokens(neurons) // (position + 1))

                def gradients(chunk: list[int], layer: int = layer, i: int = i, position: int = position) -> Tensor:
                    values = (points[chunk, None] * clean[layer][i].float()).to(clean[layer].dtype).requires_grad_()
                    where = torch.full((len(chunk),), position, device=device)
                    with neurons.frozen(), neurons.replaced(layer, where, values):
                        resid = residual(neurons.model, tokens[: position + 1].expand(len(chunk), -1))[:, -1]
                        probability = unembed(neurons.model, resid).softmax(-1)[:, batch.targets[i]]
                    (gradient,) = torch.autograd.grad(probability.sum(), values)
                    return weights[chunk] @ gradient.float()

                total = sum(gradient for _, gradient in halving(gradients, range(self.steps), size))
                scores[layer] += (clean[layer][i].float() * total).cpu() / n
            report((layer + 1) / neurons.n_layers)
        return scores
