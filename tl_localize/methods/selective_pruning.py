"""Selective Pruning: does a neuron fire more on this text than on general text?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from einops import einsum
from torch import Tensor

from tl_localize.checks import check_choice
from tl_localize.methods.base import BatchValues
from tl_localize.methods.general_text import WithGeneralText
from tl_localize.methods.partial_runs import activations
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch

EPSILON = 1e-6  # the authors'


@dataclass(frozen=True, kw_only=True)
class SelectivePruning(WithGeneralText):
    """How strongly a neuron fires on this text, over how strongly it fires on general text.

        A(l, i) = I(l, i; x) / (mean over general texts y of I(l, i; y) + 1e-6)
        I(l, i; x) = mean over t of |h_{i,t}|             importance="abs"
        I(l, i; x) = sqrt(mean over t of h_{i,t} ** 2)    importance="rms"

    t runs over the positions that predict a suffix token. The mean over general text is taken
    before the root. For a head h is the norm of what it writes, over that of its rows.

    One forward pass; of general text one for each text, once for a model.

    Source: Pochinkov and Schoots (2024), arXiv:2403.01267; the offset is that of their code
    (github.com/nickypro/selective-pruning). Differs: one text is what is to be lost, where they
    have a data set; of their four measures, the two that they use most; they prune some neurons,
    measure again and go on, this is the order of the first round. In ``ActivationContrast`` the
    root is taken text by text, and the direction of the row counts too.

    Args:
        importance: the measure of a neuron's activation.
        texts: token ids of general text; by default 48 texts that the model writes.
        seed: of the texts that the model writes.

    Returns:
        [layer neuron], a ratio.

    Raises:
        ValueError: importance is neither ``"rms"`` nor ``"abs"``.

    >>> len(SelectivePruning()(model, sequence).top_k(0.01))
    90
    """

    name = "selective_pruning"
    title = "Selective Pruning (not the paper's)"
    importance: Literal["rms", "abs"] = "rms"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("importance", self.importance, ("rms", "abs"))

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues:
        measure = mean_squares if self.importance == "rms" else mean_sizes
        own = measure(neurons, sequences).cpu()
        general = self.general_mean(neurons, sequences, measure)
        if self.importance == "rms":
            own = own.sqrt()
            general = general.sqrt()
        return own / (general + EPSILON)


def mean_squares(neurons: NeuronView, sequences: Sequence[MemorizedSequence]) -> BatchValues:
    """Mean square of each neuron over the positions that predict a suffix token."""
    return _means(neurons, sequences, 2)


def mean_sizes(neurons: NeuronView, sequences: Sequence[MemorizedSequence]) -> BatchValues:
    """Mean absolute value of each neuron over the positions that predict a suffix token."""
    return _means(neurons, sequences, 1)


@torch.no_grad()
def _means(neurons: NeuronView, sequences: Sequence[MemorizedSequence], power: int) -> BatchValues:
    batch = SequenceBatch.of(sequences, neurons.device)
    means: list[Tensor] = []
    for layer, act in activations(neurons, batch.tokens).items():
        sizes = neurons.strengths(layer, act.float()) ** power
        means.append(einsum(sizes, batch.weights, "b pos neuron, b pos -> b neuron"))
    return torch.stack(means, dim=1)
