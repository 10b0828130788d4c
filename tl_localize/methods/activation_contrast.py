"""Activation Contrast: did training put this text into a neuron's row?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from torch import Tensor

from tl_localize.checks import Real, check_between
from tl_localize.methods.base import BatchValues
from tl_localize.methods.general_text import WithGeneralText
from tl_localize.methods.partial_runs import activations, alignments
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch

LEAST = 1e-30  # strength on other texts by which another one is divided


@dataclass(frozen=True, kw_only=True)
class ActivationContrast(WithGeneralText):
    """How strongly a neuron fires on this text, relative to other texts, and more so where its row
    points along the text's gradient.

        A(l, i) = R(l, i; x) / mean over other texts y of R(l, i; y) * (1 + alignment z(l, i))
        R(l, i; x) = root mean square of h_{i,t} over the positions that predict a suffix token
        z(l, i) = sqrt(n) cos(v_i, g_i),    n the number of entries of v_i

    A text moves the rows of the neurons that fire on it, along its gradient. What fires on it and
    not on others has rows in which training stored this text and not the others (REV). g_i is the
    gradient of the text's mean log-odds for the row v_i, as in ``GradientAlignment``; between
    random directions z would have mean 0 and variance 1. For a head h is the norm of what it
    writes, and v_i is the matrix of its rows of W_O.

    Two forward passes and one backward pass; one forward pass with an alignment of 0.

    Source: the ratio of activations on two sets of texts is known: with ``alignment=0`` this is
    close to selective pruning (Pochinkov and Schoots (2024), arXiv:2403.01267; here
    ``SelectivePruning``), and Tang et al. (2024), arXiv:2402.16438, find neurons of a language by
    activations. Ours is the factor of the row's direction, and that the other texts are of the same
    kind.

    Args:
        alignment: weight of the direction of the row, from 0 to 1.
        texts: the token ids of other texts; the text that is scored is left out. Some tens of the
            same kind (other poems, other news) serve best; the model need not know them. By
            default 48 that the model writes itself, once for a model (``Attribution``'s contrast).
        seed: of the texts that the model writes.

    Returns:
        [layer neuron], a ratio.

    >>> len(ActivationContrast()(model, sequence).top_k(0.1))
    924
    """

    name = "activation_contrast"
    title = "Activation Contrast (not the paper's)"
    version = 4
    n_drawn = 1
    alignment: Real = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between(0, 1, alignment=self.alignment)

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues:
        of_others = self.general_mean(neurons, sequences, strengths)
        ratios = strengths(neurons, sequences).cpu() / of_others.clamp_min(LEAST)
        if not self.alignment:
            return ratios
        cosines = alignments(neurons, SequenceBatch.of(sequences, neurons.device)).cpu()
        entries = neurons.rows(0)[0].numel()
        return ratios * (1 + self.alignment * math.sqrt(entries) * cosines)


@torch.no_grad()
def strengths(neurons: NeuronView, sequences: Sequence[MemorizedSequence]) -> BatchValues:
    """Root mean square of each neuron over the positions that predict a suffix token."""
    batch = SequenceBatch.of(sequences, neurons.device)
    means: list[Tensor] = []
    for layer, act in activations(neurons, batch.tokens).items():
        squares = neurons.strengths(layer, act.float()).square()
        means.append(einsum(squares, batch.weights, "b pos neuron, b pos -> b neuron"))
    return torch.stack(means, dim=1).sqrt()
