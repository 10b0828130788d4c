"""Random: the score of chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tl_localize.methods.base import Localizer, Values
from tl_localize.neurons import NeuronView, check_seed
from tl_localize.sequences import MemorizedSequence


@dataclass(frozen=True, kw_only=True)
class RandomBaseline(Localizer):
    """Uniform noise: a method at chance.

    The noise depends on the seed and on the sequence's tokens, so that an average over sequences is
    an average over independent draws.

    Source: Chang et al. (2024), arXiv:2311.09060, section 5.

    Returns:
        [layer neuron] in [0, 1).

    >>> bool((RandomBaseline(seed=7)(model, sequence).values == RandomBaseline(seed=7)(model, sequence).values).all())
    True
    """

    name: ClassVar[str] = "random"
    title: ClassVar[str] = "Random"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)

    def attribute(self, neurons: NeuronView, sequence: MemorizedSequence) -> Values:
        # of integers, so the same in every process
        mixed = hash((self.seed, *sequence.tokens.tolist())) % 2**63
        return torch.rand(
            neurons.n_layers, neurons.n_neurons, generator=torch.Generator().manual_seed(mixed)
        )
