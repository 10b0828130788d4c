"""Gradient Alignment: was a row of W_out written by this text?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tl_localize.checks import Real, check_count, check_ratio
from tl_localize.methods.base import BatchValues, Localizer
from tl_localize.methods.partial_runs import alignments
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class GradientAlignment(Localizer):
    """Cosine between a neuron's output row and the gradient of the text's log-odds on that row: was
    the row *written by* this text?

        A(l, i) = mean over r = 0 .. points - 1 of  cos(v_i, g_i)
        g_i = d O / d v_i = sum over t of h_{i,t} d O / d (MLP output)_t

    O is the mean log-odds of the true suffix tokens, v_i the row of W_out of neuron i; t runs over
    all positions. Gradient
    descent moves a row along its own gradient, so the rows that a text has written point there,
    whatever their length. At point r the neurons with the highest sum so far, a share of each
    layer, stand at 1 - r / points of their activation; at the first point the model is intact. One
    forward and one backward pass a point. |g_i| comes from the matrix of products of two positions'
    gradients, so that no [neuron d_model] gradient is ever held. For a head, v_i is the matrix of
    its rows of W_O, g_i is its gradient, and the cosine is that of all their entries.

    Source: the cosine of a row with the text's gradient, along a path, is ours. Its numerator is
    the gradient of a gate on the neuron, as in ``Attribution``; it is divided by |v_i| |g_i|.

    Args:
        points: of the path.
        share: of the neurons of each layer that are scaled down along the path; about as many as
            the text may have written.

    Returns:
        [layer neuron] in [-1, 1].

    >>> len(GradientAlignment()(model, sequence).top_k(0.01))
    90
    """

    name = "gradient_alignment"
    title = "Gradient Alignment (not the paper's)"
    points: int = 4
    share: Real = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(points=self.points)
        check_ratio("share", self.share)

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues:
        batch = SequenceBatch.of(sequences, neurons.device)
        total = torch.zeros(len(batch), *neurons.size, device=neurons.device)
        count = max(1, round(self.share * neurons.n_neurons))
        for point in range(self.points):
            highest = total.topk(count).indices
            gates = torch.ones_like(total).scatter(-1, highest, 1 - point / self.points)
            total += alignments(neurons, batch, gates)
            report((point + 1) / self.points)
        return (total / self.points).cpu()
