"""Selective Synaptic Dampening: is a row more important to this text than to general text?"""

from collections.abc import Sequence
from dataclasses import dataclass

from tl_localize.methods.base import BatchValues
from tl_localize.methods.general_text import WithGeneralText
from tl_localize.methods.partial_runs import row_gradients
from tl_localize.metrics import batch_loss
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch

LEAST = 1e-30  # importance to general text by which another one is divided


@dataclass(frozen=True, kw_only=True)
class SelectiveSynapticDampening(WithGeneralText):
    """How important a neuron's row of W_out is to this text, over how important it is to general
    text.

        A(l, i) = F(l, i; x) / mean over general texts y of F(l, i; y)
        F(l, i; x) = || d loss(x) / d v_i || ** 2

    v_i is the row of W_out of neuron i. F is the diagonal of the empirical Fisher information,
    summed over the entries of the row; a neuron whose row has no gradient scores 0. For a head, v_i
    is the matrix of its rows of W_O.

    One forward and one backward pass; of general text one for each text, once for a model.

    Source: Foster et al. (2024), arXiv:2308.07707 (SSD), eq. (5) to (7). Differs: single weights
    become rows of W_out, other weights of the neuron take no part. Where the ratio is above alpha
    (10), the paper multiplies a weight by min(1 / ratio, 1); here the ratio orders neurons,
    which are ablated.

    Args:
        texts: token ids of general text; by default 48 texts that the model writes.
        seed: of the texts that the model writes.

    Returns:
        [layer neuron], a ratio.

    >>> len(SelectiveSynapticDampening()(model, sequence).top_k(0.01))
    90
    """

    name = "selective_synaptic_dampening"
    title = "Selective Synaptic Dampening (not the paper's)"

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues:
        own = row_importances(neurons, sequences).cpu()
        general = self.general_mean(neurons, sequences, row_importances)
        return own / general.clamp_min(LEAST)


def row_importances(neurons: NeuronView, sequences: Sequence[MemorizedSequence]) -> BatchValues:
    """Squared norm of the gradient of each text's loss for each output row."""
    batch = SequenceBatch.of(sequences, neurons.device)
    _, norms = row_gradients(neurons, batch, batch_loss)
    return norms.square()
