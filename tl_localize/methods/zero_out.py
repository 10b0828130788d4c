"""Zero-Out: silence one neuron at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tl_localize.losses import memorization_loss
from tl_localize.memory import halving
from tl_localize.methods.base import Localizer, Report
from tl_localize.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class ZeroOut(Localizer):
    """Rise of the memorization loss when one neuron is zero at every position, prefix included.

        A(l, i) = loss(x | neuron i of layer l silenced) - loss(x)

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (5).
    Returns: [layer neuron], nats per suffix token.
    """

    name: ClassVar[str] = "zero_out"

    @torch.no_grad()
    def _attribute(self, neurons: NeuronView, sequence: MemorizedSequence, report: Report) -> Float[Tensor, "layer neuron"]:
        one = SequenceBatch.of([sequence], neurons.device)
        baseline = memorization_loss(neurons.model, one)
        scores = torch.empty(neurons.n_layers, neurons.n_neurons)
        size = max(1, self._tokens(neurons) // len(sequence))
        for layer in range(neurons.n_layers):

            def losses(chunk: list[int], layer: int = layer) -> Tensor:
                gates = 1 - F.one_hot(torch.tensor(chunk, device=neurons.device), neurons.n_neurons)
                with neurons.scaled({layer: gates}):
                    return memorization_loss(neurons.model, one.repeat(len(chunk)))

            for chunk, loss in halving(losses, range(neurons.n_neurons), size):
                scores[layer, chunk] = (loss - baseline).cpu()
                report((layer + (chunk[-1] + 1) / neurons.n_neurons) / neurons.n_layers)
        return scores
