"""Refined Attribution: which set of a given size must be ablated for a text to be forgotten?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tl_localize.checks import Real, check_choice, check_count, check_ratio
from tl_localize.methods.base import BatchValues
from tl_localize.methods.contrast import Contrasted
from tl_localize.methods.masks import check_first_layer
from tl_localize.methods.partial_runs import gate_gradients
from tl_localize.metrics import mean_probability
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.scores import rounded_down
from tl_localize.sequences import MemorizedSequence, SequenceBatch

MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class RefinedAttribution(Contrasted):
    """What a set of a given size loses and gains while it is refined: which neurons must be ablated
    *together*? ``IterativeAttribution`` never gives a neuron back; here each step may.

        E(l, i) = d O / d gate of neuron i,   while the present set is ablated
        m <- 0.9 m + E / (1 + contrast G ** 3)
        A <- A + (1 - step / steps) m,   step = 0, 1, ...
        the next set: the highest A, ``share`` of each layer or of the model; at first it is empty

    O is the mean probability of the true suffix tokens; G is what general text needs of the neuron
    (``Contrasted``). A set is found for its own size: smaller shares of the same scores erase less
    than ``IterativeAttribution`` does, so set ``share`` to the share that is ablated.

    Source: ours, not of the paper. It is straight-through training of a mask of fixed size (as in
    BalancedSubnet, arXiv:2410.02159) by momentum, with an objective that is bounded and a contrast.

    Args:
        share: of the neurons that are ablated, rounded down as in DEL; one at least.
        per: whether the share is taken of each layer, or of all layers from ``first_layer`` on
            together.
        steps: each is a forward and a backward pass.
        first_layer: layers below it are not ablated; by default that of the benchmark, and without
            one 1, or 0 in a model of one layer.
        contrast: 0 erases most, from the target and from other texts; 1, the default, spares what
            other texts need.
        seed: of the texts that the model writes.

    Returns:
        [layer neuron]; the final set is ``top_k(share, per=per, rounding="floor")``, or where the
        share selects none ``top_k(count=1, per=per)``.

    Raises:
        ValueError: contrast is not in [0, 100], or first_layer leaves no layer of the model.

    >>> scores = RefinedAttribution(share=0.002, per="model", steps=2)(model, sequence)
    >>> len(scores.top_k(0.002, per="model"))  # not of layer 0
    15
    """

    name = "refined_attribution"
    title = "Refined Attribution (not the paper's)"
    share: Real = 0.1
    per: Literal["layer", "model"] = "layer"
    steps: int = 20
    first_layer: int | None = None
    contrast: Real = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio("share", self.share)
        check_choice("per", self.per, ("layer", "model"))
        check_count(steps=self.steps)
        if self.first_layer is not None:
            check_count(0, first_layer=self.first_layer)

    def chosen_from(self, neurons: NeuronView) -> int:
        if self.first_layer is None:
            return min(1, neurons.n_layers - 1)
        return check_first_layer(neurons, self.first_layer)

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues:
        batch = SequenceBatch.of(sequences, neurons.device)
        spared = self.spared(neurons)
        gates = torch.ones(len(batch), *neurons.size, device=neurons.device)
        speed = torch.zeros_like(gates)
        scores = torch.zeros_like(gates)
        for step in range(self.steps):
            (effects,) = gate_gradients(neurons, batch, mean_probability, gates)
            speed = MOMENTUM * speed + effects * spared
            scores = scores + (1 - step / self.steps) * speed
            gates = self._gates(scores, self.chosen_from(neurons))
            report((step + 1) / self.steps)
        return scores.cpu()

    def _gates(self, scores: BatchValues, first_layer: int) -> BatchValues:
        """0 for the highest scores of each sequence, 1 for the others."""
        gates = torch.ones_like(scores)
        pool = scores[:, first_layer:]
        if self.per == "model":
            pool = pool.flatten(1)
        count = max(1, rounded_down(self.share, pool.shape[-1]))
        chosen: Tensor = pool.topk(count).indices
        kept = torch.ones_like(pool).scatter(-1, chosen, 0)
        gates[:, first_layer:] = kept.view(gates[:, first_layer:].shape)
        return gates
