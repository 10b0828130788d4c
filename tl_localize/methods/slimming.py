"""Slimming: a sparse mask learned by an L1 penalty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tl_localize.methods.base import Localizer, Report
from tl_localize.methods.masks import train_masks, tuned_layers
from tl_localize.neurons import NeuronView, Real
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence


@dataclass(frozen=True, kw_only=True)
class Slimming(Localizer):
    """Mask value that a neuron keeps when as many neurons as possible are to be silent and the sequence still recited.

        minimize over m   loss(x | h * clip(m, 0, 1)) + sparsity_weight * mean |m|,        m = 1 at the start
        A(l, i) = clip(m_i, 0, 1)

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (7). Differs: the paper sums |m|, this is the mean over the tuned neurons, so
    that one weight serves every model size (the authors' code does the same).
    Args:    sparsity_weight: weight of the mean.
             steps: at most so many; training ends earlier when, at a 10th step, mean |m| is below ``stop_sparsity``.
             first_layer: layers below it are not masked and score 1.
    Memory:  4 (B L (5 f + 10 d + 4 h n) + 4 T V + 16 L f B / n) bytes beyond the weights; letters in ``memory.peak_bytes``.
    Returns: [layer neuron] in [0, 1], many of them tied at 0 and at 1.

    >>> from tl_localize import Slimming, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> scores = Slimming(steps=5)(model, sequence)  # so few steps show the form only
    >>> bool(((scores.values >= 0) & (scores.values <= 1)).all())
    True
    """

    name: ClassVar[str] = "slimming"
    by_layer: ClassVar[bool] = False  # the masks of all layers are learned together
    learning_rate: Real = 1e-2
    sparsity_weight: Real = 1000.0
    steps: int = 60
    stop_sparsity: Real = 0.1
    first_layer: int = 0

    def _attribute_many(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], size: int, report: Report
    ) -> Iterator[Tensor | NeuronScores]:
        tuned = tuned_layers(neurons, self.first_layer)
        masks = train_masks(
            neurons,
            sequences,
            torch.ones(1, 1, 1, device=neurons.device).expand(len(sequences), len(tuned), neurons.n_neurons),
            lambda m, steps: dict(zip(tuned, m.clamp(0, 1).unbind(1), strict=True)),
            lambda m: m.abs().mean((1, 2)),
            size=size,
            learning_rate=self.learning_rate,
            sparsity_weight=self.sparsity_weight,
            steps=self.steps,
            stop_sparsity=self.stop_sparsity,
            report=report,
        )
        untuned = torch.ones(self.first_layer, neurons.n_neurons)
        return (torch.cat([untuned, mask.clamp(0, 1).cpu()]) for mask in masks)
