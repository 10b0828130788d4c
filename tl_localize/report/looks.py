"""How methods are drawn in every figure and in the explorer: one colour and one marker each,
controls in grey.

The colours are those of Okabe and Ito, without their yellow, which is too light for lines, and a
few of Paul Tol's; each can be told from the others with any colour vision. In grey print the
markers tell the methods apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from tl_localize.paper import short_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Look(NamedTuple):
    """A colour and a marker of matplotlib's.

    >>> LOOKS["random"]
    Look(colour='#999999', marker='x')
    """

    colour: str
    marker: str

    def style(self, line: str = "none") -> dict[str, Any]:
        """Keyword arguments of matplotlib's ``plot`` and ``errorbar``."""
        return {"color": self.colour, "marker": self.marker, "linestyle": line, "linewidth": 1.2}


LOOKS = {
    "hard_concrete": Look("#0072B2", "o"),
    "slimming": Look("#56B4E9", "s"),
    "zero_out": Look("#D55E00", "^"),
    "integrated_gradients": Look("#009E73", "D"),
    "activations": Look("#E69F00", "v"),
    "attribution": Look("#CC79A7", "P"),
    "gradient_alignment": Look("#000000", "*"),
    "iterative_attribution": Look("#882255", "X"),
    "refined_attribution": Look("#CC3311", "h"),
    "activation_contrast": Look("#332288", "p"),
    "activation_contrast_same_kind": Look("#44AA99", "p"),
    "balanced_subnet": Look("#AA4499", "d"),
    "adversarial_hard_concrete": Look("#117733", "H"),
    "selective_synaptic_dampening": Look("#661100", "8"),
    "selective_pruning": Look("#6699CC", "3"),
    "contrastive_gradient": Look("#CC6677", "4"),
    "oracle_first_order": Look("#555555", "1"),
    "oracle_rounds": Look("#555555", "2"),
    "oracle_mask": Look("#555555", "s"),
    "random": Look("#999999", "x"),
    "row_norm": Look("#777777", "+"),
}
FURTHER = tuple(
    Look(colour, marker)
    for markers in ("h<>", "^Ds", "pXP", "ov*")
    for colour, marker in zip(("#332288", "#44AA99", "#999933"), markers, strict=True)
)


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """The look of each method; of a user's own methods, in the order given, those that are left.

    >>> looks(["hard_concrete", "mine"])["mine"].marker
    'h'
    """
    further = cycle(FURTHER)
    return {name: LOOKS.get(name) or next(further) for name in dict.fromkeys(methods)}


def with_legend(panels: "Sequence[Axes]") -> "Figure":
    """The figure of some axes, with one legend beside the last, where it covers nothing."""
    handles: dict[str, Any] = {}
    for panel in panels:
        drawn_here, labels = panel.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn_here, strict=True))
    if handles:
        panels[-1].legend(
            handles.values(),
            handles.keys(),
            loc="upper left",
            bbox_to_anchor=(1, 1),
            frameon=False,
            fontsize=9,
        )
    figure: Any = panels[-1].figure
    return figure


def check_rows(frame: Any) -> Any:
    """The rows that a figure is drawn of; ValueError where there are none."""
    if not len(frame):
        raise ValueError(
            "results must hold measurements to be drawn, got none (of INJ, none that converged). "
            "Run the benchmark first."
        )
    return frame


def each_method(frame: Any) -> Iterator[tuple[str, Look, Any]]:
    """The short title, the look and the rows of each method."""
    for name, look in looks(frame["method"].unique()).items():
        yield short_title(name), look, frame[frame["method"] == name]


def draw_curve(ax: "Axes", columns: Sequence[Any], method: str, look: Look) -> None:
    """Draw a line between measured marks, and none from nothing ablated to the first: numbers
    across and up, and errors up and across.
    """
    x, y, y_error, x_error = columns
    how = look.style("-")
    ax.errorbar(x, y, y_error, x_error, elinewidth=0.6, label=short_title(method), **how)
