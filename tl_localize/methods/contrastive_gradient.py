"""Contrastive Gradient: does the likelihood of this text depend on a neuron's row?"""

from collections.abc import Sequence
from dataclasses import dataclass

from tl_localize.methods.base import BatchValues, Localizer
from tl_localize.methods.partial_runs import row_gradients
from tl_localize.metrics import batch_loss
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class ContrastiveGradient(Localizer):
    """How steeply the contrastive objective of a text depends on a neuron's row of W_out.

        A(l, i) = || d C(x) / d v_i || = || d loss(x) / d v_i ||
        C(x) = mean over general texts y of KL(model(y) || as it was(y)) - loss(x)

    v_i is the row of W_out of neuron i; of a head the matrix of its rows of W_O. The model is
    compared with itself, where the divergence is at its minimum: its gradient is 0 there, so no
    general text is read and there is none to be given. It would count from a second step on.

    One forward and one backward pass.

    Source: Stoehr et al. (2024), arXiv:2403.19851, and its code
    (github.com/googleinterns/localizing-paragraph-memorization), where the weights are chosen at
    the first step. Differs: they choose single weights of all kinds by the absolute value of the
    gradient and fine-tune them; this is its norm over a row.

    Returns:
        [layer neuron], nats per suffix token for each unit of length of a row.

    >>> len(ContrastiveGradient()(model, sequence).top_k(0.01))
    90
    """

    name = "contrastive_gradient"
    title = "Contrastive Gradient (not the paper's)"

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues:
        batch = SequenceBatch.of(sequences, neurons.device)
        _, norms = row_gradients(neurons, batch, batch_loss)
        return norms.cpu()
