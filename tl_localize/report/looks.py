"""How each method is drawn in every figure and in the explorer: one colour and one marker, controls in grey.

The colours are those of Okabe and Ito, without their yellow, which is too light for lines, and a few of Paul Tol's; each can be told from
the others with any colour vision. In grey print the markers tell the methods apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tl_localize.evals.inj_results import TRUE_ROWS


class Look(NamedTuple):
    """A colour and a marker of matplotlib's.

    >>> LOOKS["random"]
    Look(colour='#999999', marker='x')
    """

    colour: str
    marker: str


LOOKS = {
    "hard_concrete": Look("#0072B2", "o"),
    "slimming": Look("#56B4E9", "s"),
    "zero_out": Look("#D55E00", "^"),
    "integrated_gradients": Look("#009E73", "D"),
    "activations": Look("#E69F00", "v"),
    "attribution": Look("#CC79A7", "P"),
    "gradient_alignment": Look("#000000", "*"),
    "iterative_attribution": Look("#882255", "X"),
    "random": Look("#999999", "x"),
    "row_norm": Look("#777777", "+"),
    TRUE_ROWS: Look("#555555", "_"),
}
FURTHER = (Look("#332288", "h"), Look("#44AA99", "<"), Look("#999933", ">"), Look("#AA4499", "p"), Look("#661100", "d"))


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """The look of each method; of a user's own methods, in the order given, those that are left.

    >>> looks(["hard_concrete", "mine"])["mine"].marker
    'h'
    """
    names = list(dict.fromkeys(methods))
    own = [name for name in names if name not in LOOKS]
    return {name: LOOKS.get(name) or FURTHER[own.index(name) % len(FURTHER)] for name in names}
