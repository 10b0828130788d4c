"""Iterative Attribution: which neurons must be ablated together for a text to be forgotten?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tl_localize.checks import Real, check_count, check_ratio
from tl_localize.methods.base import BatchValues
from tl_localize.methods.contrast import Contrasted
from tl_localize.methods.masks import check_first_layer
from tl_localize.methods.partial_runs import gate_gradients
from tl_localize.metrics import mean_probability
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class IterativeAttribution(Contrasted):
    """Order in which neurons are ablated, in rounds, by their effect on the probability of the
    text: what is *needed for* it, and not for other text?

        E(l, i) = d O / d gate of neuron i
        S(l, i) = E(l, i) / (1 + contrast G(l, i) ** 3)
        A(l, i) = 1 - (place in the order of its layer) / (number ablated) + m      if ablated
        A(l, i) = S(l, i) of the first round                                        else

    O is the mean probability of the true suffix tokens while the neurons of earlier rounds are
    ablated; m is the highest S of those that are never ablated, or 0 where none is positive. Each
    round ablates the neurons with the largest S, so that what takes over from ablated neurons is
    measured while they are ablated: 1, 2, 4, ... of each layer up to 1 / rounds of the share, then
    1 / rounds in each. So one run serves small and large ratios: the sets of all ratios are nested.
    O is bounded, so tokens that are already lost have no gradient. G is what general text needs of
    the neuron: root mean square over 48 texts that the model itself writes of d O / d gate, with a
    mean of 1 (``Contrasted``).

    Source: pruning in rounds by gradient times gate is iterative SNIP and FORCE (de Jorge et al.
    (2021), arXiv:2006.09081). With ``contrast=0`` this is their rule, turned round: they remove
    what changes the loss least, and this ablates what carries the probability of one text. Ours are
    that objective and the contrast with texts that the model writes.

    Args:
        rounds: of the same size; the first of them is taken in smaller ones.
        share: of the neurons of each layer that are ablated in all rounds together; the largest
            ratio that is to be looked at.
        first_layer: layers below it are not ablated, and score their first effect; by default that
            of the benchmark, and without one 1, or 0 in a model of one layer.
        contrast: 0 erases most at a fixed share, from the target and from other texts; 1, the
            default, spares what other texts need.
        seed: of the texts that the model writes.

    Returns:
        [layer neuron]; at most 1 + m, without a unit.

    Raises:
        ValueError: contrast is not in [0, 100], or first_layer leaves no layer of the model.

    >>> len(IterativeAttribution(rounds=3)(model, sequence).top_k(0.01))  # not of layer 0
    75
    """

    name = "iterative_attribution"
    title = "Iterative Attribution (not the paper's)"
    version = 3
    rounds: int = 10
    share: Real = 0.1
    first_layer: int | None = None
    contrast: Real = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(rounds=self.rounds)
        check_ratio("share", self.share)
        if self.first_layer is not None:
            check_count(0, first_layer=self.first_layer)

    def chosen_from(self, neurons: NeuronView) -> int:
        if self.first_layer is None:
            return min(1, neurons.n_layers - 1)
        return check_first_layer(neurons, self.first_layer)

    def _ends(self, count: int) -> list[int]:
        """How many neurons of a layer are ablated after each round, ``count`` after the last."""
        equal = [round(count * (n + 1) / self.rounds) for n in range(self.rounds)]
        doubling = [2**n - 1 for n in range(1, count.bit_length()) if 2**n - 1 < equal[0]]
        return sorted({*doubling, *equal} - {0})

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues:
        batch = SequenceBatch.of(sequences, neurons.device)
        tuned = slice(self.chosen_from(neurons), None)
        gates = torch.ones(len(batch), *neurons.size, device=neurons.device)
        # 1 for the first that is ablated, down to above 0 for the last; 0 for those that never are
        places = torch.zeros_like(gates)
        spared = self.spared(neurons)
        count = max(1, round(self.share * neurons.n_neurons))
        start = 0
        first = gates
        broken = torch.zeros(len(batch), 1, 1, dtype=torch.bool, device=neurons.device)
        for end in self._ends(count):
            (effects,) = gate_gradients(neurons, batch, mean_probability, gates)
            effects *= spared
            broken |= ~effects.isfinite().all((1, 2), keepdim=True)
            first = first if start else effects
            left = effects.masked_fill(gates == 0, -torch.inf)[:, tuned]
            leaving = left.topk(end - start).indices
            order = 1 - torch.arange(start, end, device=neurons.device) / count
            places[:, tuned] = places[:, tuned].scatter(-1, leaving, order.expand(leaving.shape))
            gates = (places == 0).to(gates)
            start = end
            report(end / count)
        highest = first.masked_fill(places > 0, 0).clamp(min=0).amax((1, 2), keepdim=True)
        scores = torch.where(places > 0, highest + places, first)
        return scores.masked_fill(broken, torch.nan).cpu()  # which no scores may hold
