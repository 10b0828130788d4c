"""Random: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.methods.base import Localizer, Report
from tl_localize.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence


@dataclass(frozen=True, kw_only=True)
class RandomBaseline(Localizer):
    """Uniform noise: what a method scores that knows nothing.

    The noise depends on the seed and on the sequence's tokens, so that an average over sequences is one over independent draws.

    Source: Chang et al. (2024), arXiv:2311.09060, section 5.
    Args:    seed: of the noise.
    Returns: [layer neuron] in [0, 1).

    >>> from tl_localize import RandomBaseline, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> first, again = (RandomBaseline(seed=7)(model, sequence) for _ in range(2))
    >>> bool((first.values == again.values).all())
    True
    """

    name: ClassVar[str] = "random"
    seed: int = 0

    def _attribute(self, neurons: NeuronView, sequence: MemorizedSequence, report: Report) -> Float[Tensor, "layer neuron"]:
        mixed = hash((self.seed, *sequence.tokens.tolist())) % 2**63  # of integers, so the same in every process
        generator = torch.Generator().manual_seed(mixed)
        return torch.rand(neurons.n_layers, neurons.n_neurons, generator=generator)
