"""Random: the score of chance."""

from dataclasses import dataclass

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

    >>> one, again = (RandomBaseline(seed=7)(model, sequence) for _ in range(2))
    >>> bool((one.values == again.values).all())
    True
    """

    name = "random"
    title = "Random"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)

    def attribute(self, neurons: NeuronView, sequence: MemorizedSequence) -> Values:
        generator = torch.Generator().manual_seed(mixed(self.seed, *sequence.tokens.tolist()))
        return torch.rand(neurons.size, generator=generator)


def mixed(*integers: int) -> int:
    """A seed from 0 to 2**63 - 1 of some integers, the same in every process and version of Python.

    It is xxHash of 64-bit words, as CPython 3.8 to 3.14 hash a tuple of integers below 2**61 - 1.

    >>> from tl_localize.methods.random_baseline import mixed
    >>> mixed(0, 1, 2)
    2187946392326065592
    """
    total = 2870177450012600261
    for integer in integers:
        total = (total + integer * 14029467366897019727) % 2**64
        total = (total << 31 | total >> 33) % 2**64
        total = total * 11400714785074694791 % 2**64
    total += len(integers) ^ 2870177450012600261 ^ 3527539
    return total % 2**63
