"""The hard concrete distribution: random masks that are nearly 0 or 1, and have a gradient.

Source: Louizos et al. (2018), arXiv:1712.01312.
"""

import math

from jaxtyping import Float
from torch import Tensor

from tl_localize.checks import Real

# the paper's gamma and zeta: the interval to which the concrete variable is stretched
GATE_LOW, GATE_HIGH = -0.1, 1.1
NOISE_MARGIN = 1e-4  # the uniform noise is kept this far from 0 and 1


def hard_concrete(
    location: Float[Tensor, "*shape"], noise: Float[Tensor, "*noise"], temperature: Real
) -> Float[Tensor, "*shape"]:
    """A sample of the hard concrete distribution, differentiable in its location."""
    noise = noise.clamp(NOISE_MARGIN, 1 - NOISE_MARGIN)
    concrete = ((noise.log() - (1 - noise).log() + location) / temperature).sigmoid()
    return (concrete * (GATE_HIGH - GATE_LOW) + GATE_LOW).clamp(0, 1)


def location_of(mask: Real) -> float:
    """The location whose sample, without noise and at temperature 1, is this mask."""
    return math.log((mask - GATE_LOW) / (GATE_HIGH - mask))


def open_probability(
    location: Float[Tensor, "*shape"], temperature: Real
) -> Float[Tensor, "*shape"]:
    """How probable a mask is that is not 0."""
    return (location - temperature * math.log(-GATE_LOW / GATE_HIGH)).sigmoid()
