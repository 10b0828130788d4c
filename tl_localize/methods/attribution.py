"""Attribution: a first-order estimate of Zero-Out for all neurons at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from tl_localize.methods.base import BatchValues
from tl_localize.methods.contrast import Contrasted
from tl_localize.methods.partial_runs import ablation_estimate
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class Attribution(Contrasted):
    """First-order estimate of the rise of the memorization loss when one neuron is ablated (zero)
    at every position, prefix included.

        A(l, i) = - sum over t of h_{i,t} d loss(x) / d h_{i,t}

    t runs over all positions of the text, also those of the prefix. For a head the product is that
    of two vectors.
    One forward and one backward pass score every neuron; Zero-Out's exact score takes a pass per
    neuron. Being first-order, it misses nonlinear effects: a neuron whose output matters only when
    all of it is gone scores too low.

    With a contrast it is divided by what general text needs of the neuron (``Contrasted``), 1 +
    contrast G(l, i) ** 3, with G from 48 texts that the model itself writes.

    Source: gradient times activation, by which Molchanov et al. (2017), arXiv:1611.06440, prune
    channels. As an estimate of ablations it is attribution patching with a baseline of zero (Nanda
    2023; Kramár et al. (2024), arXiv:2403.00745, with what it misses). Here it estimates eq. (7) of
    Chang et al. (2024), arXiv:2311.09060. Ours is only the contrast.

    Args:
        contrast: 0 for the estimate itself; with 1 the ablated neurons are those that other texts
            do without.
        seed: of the texts that the model writes.

    Returns:
        [layer neuron], nats per suffix token.

    >>> len(Attribution()(model, sequence).top_k(0.01))
    90
    """

    name = "attribution"
    title = "Attribution (not the paper's)"
    version = 2

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues:
        estimate = ablation_estimate(neurons, SequenceBatch.of(sequences, neurons.device))
        return estimate * self.spared(neurons).cpu()
