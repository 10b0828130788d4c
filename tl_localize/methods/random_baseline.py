"""Random: the score of chance."""

from dataclasses import dataclass

import numpy as np
import torch

from tl_localize.checks import check_seed
from tl_localize.methods.base import Localizer, Values
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence


@dataclass(frozen=True, kw_only=True)
class RandomBaseline(Localizer):
    """Uniform noise: a method at chance.

    The noise depends on the seed and on the sequence's tokens, so that an average over sequences is
    an average over independent draws.

    Source: Chang et al. (2024), arXiv:2311.09060, section 5.

    Returns:
        [layer neuron] in [0, 1).

    >>> first, again = (RandomBaseline(seed=7)(model, sequence) for _ in range(2))
    >>> bool((first.values == again.values).all())
    True
    """

    name = "random"
    title = "Random"
    version = 2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)

    def attribute(self, neurons: NeuronView, sequence: MemorizedSequence) -> Values:
        seed = np.random.SeedSequence([self.seed, *sequence.tokens.tolist()])
        numbers = np.random.default_rng(seed).random(neurons.size, dtype=np.float32)
        return torch.from_numpy(numbers)
