"""Iterative Attribution: which neurons must be ablated together for a text to be forgotten?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tl_localize.losses import mean_probability
from tl_localize.methods.base import BatchValues, Localizer, Report
from tl_localize.methods.masks import tuned_layers
from tl_localize.methods.partial_runs import gate_gradients
from tl_localize.neurons import NeuronView, Real, check_count, check_ratio
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class IterativeAttribution(Localizer):
    """Order in which neurons are ablated, in rounds, by their effect on the probability of the text: what is *needed for* it?

        E(l, i) = d O / d gate of neuron i,     O = mean probability of the true suffix tokens, the neurons of earlier rounds ablated
        A(l, i) = 1 - (place in the order of its layer) / (number ablated) + m      of those that are ablated, m the highest E of the others
        A(l, i) = E(l, i) of the first round                                        of the others

    In each round the neurons with the largest effect leave, 1 / rounds of the share of each layer: what takes over from those that are
    already gone is measured while they are gone. O is bounded, so that tokens that are already lost stop pulling. The sets of all smaller
    ratios are nested in one run.

    Source: ours, not of the paper; one round is ``Attribution`` with the probability in place of the loss.
    Args:    rounds: forward and backward passes.
             share: of the neurons of each layer that are ablated in all rounds together; the largest ratio that is to be looked at.
             first_layer: layers below it are not ablated, and score their first effect.
    Returns: [layer neuron]; at most 1 + m, without a unit.

    >>> len(IterativeAttribution()(model, sequence).top_k(0.01))
    90
    """

    name: ClassVar[str] = "iterative_attribution"
    title: ClassVar[str] = "Iterative Attribution (not the paper's)"
    by_layer: ClassVar[bool] = False  # all layers are ablated together
    chunk: ClassVar[int] = 16
    rounds: int = 10
    share: Real = 0.1
    first_layer: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(rounds=self.rounds)
        check_ratio("share", self.share)
        check_count(0, first_layer=self.first_layer)

    @property
    def passes(self) -> float:
        return 3.0 * self.rounds

    def _attribute_batch(self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report) -> BatchValues:
        batch, tuned = SequenceBatch.of(sequences, neurons.device), slice(tuned_layers(neurons, self.first_layer).start, None)
        gates = torch.ones(len(batch), neurons.n_layers, neurons.n_neurons, device=neurons.device)
        places = torch.zeros_like(gates)  # from 1 on for the first to leave down to above 0 for the last; 0: stays
        count = max(1, round(self.share * neurons.n_neurons))
        ends = [round(count * (n + 1) / self.rounds) for n in range(self.rounds)]
        first = gates
        for n, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if n and start == end:
                continue
            (effects,) = gate_gradients(neurons, batch, mean_probability, gates)
            first = first if n else effects
            leaving = effects.masked_fill(gates == 0, -torch.inf)[:, tuned].topk(end - start).indices
            order = 1 - torch.arange(start, end, device=neurons.device) / count
            places[:, tuned] = places[:, tuned].scatter(-1, leaving, order.expand(leaving.shape))
            gates = (places == 0).to(gates)
            report((n + 1) / self.rounds)
        highest = first.masked_fill(places > 0, 0).clamp(min=0).amax((1, 2), keepdim=True)
        return torch.where(places > 0, highest + places, first).cpu()
