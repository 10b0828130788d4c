"""Attribution: what Zero-Out would find, to first order, for all neurons at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from tl_localize.methods.base import Localizer, Report
from tl_localize.methods.one_pass import ablation_estimate
from tl_localize.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class Attribution(Localizer):
    """First-order estimate of the rise of the memorization loss when one neuron is silenced at every position, prefix included.

        A(l, i) = - sum over t of h_{i,t} d loss(x) / d h_{i,t}

    One forward and one backward pass score every neuron, so it stands in for Zero-Out, whose exact number takes a pass per neuron. It
    misses what bends: a neuron whose output matters only when all of it is gone.

    Source: ours, not of the paper: gradient times activation, as a first-order form of Chang et al. (2024), arXiv:2311.09060, eq. (5).
    Memory:  4 (B L (5 f + 10 d + 4 h n) + 4 T V) bytes beyond the weights; letters in ``memory.peak_bytes``.
    Returns: [layer neuron], nats per suffix token.

    >>> from tl_localize import Attribution, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> len(Attribution()(model, sequence).top_k(0.01))
    90
    """

    name: ClassVar[str] = "attribution"

    def _attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report
    ) -> Float[Tensor, "sequence layer neuron"]:
        return ablation_estimate(neurons, SequenceBatch.of(sequences, neurons.device))
