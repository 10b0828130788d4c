"""How methods are drawn in every figure and in the explorer: one colour and one marker each,
controls in grey, names beside points.

The colours are those of Okabe and Ito, without their yellow, which is too light for lines, and a
few of Paul Tol's; each can be told from the others with any colour vision. In grey print the
markers tell the methods apart.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tl_localize.evals.inj_results import TRUE_ROWS
from tl_localize.neurons import Real

Named = dict[str, tuple[float, float, str]]  # a name, where its point is, and its colour
Places = Sequence[tuple[Real, Real]]  # of a name beside its point, in points of print
BESIDE: Places = [
    (5, 7),
    (-5, 7),
    (5, -7),
    (-5, -7),
    (9, 0),
    (-9, 0),
    *((x, y) for r in (15, 24, 33, 45, 60, 80) for x in (12, -12) for y in (r, -r)),
]
AT_END: Places = [(8, sign * 9.5 * i) for i in range(9) for sign in (1, -1)]


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
FURTHER = (
    Look("#332288", "h"),
    Look("#44AA99", "<"),
    Look("#999933", ">"),
    Look("#AA4499", "p"),
    Look("#661100", "d"),
)


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """The look of each method; of a user's own methods, in the order given, those that are left.

    >>> looks(["hard_concrete", "mine"])["mine"].marker
    'h'
    """
    names = list(dict.fromkeys(methods))
    own = [name for name in names if name not in LOOKS]
    return {name: LOOKS.get(name) or FURTHER[own.index(name) % len(FURTHER)] for name in names}


def axis(ax: Any, size: tuple[float, float] = (6.4, 4.6)) -> Any:
    """The given axis, or the axis of a new figure that a notebook shows."""
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'tl_localize[plots]'.") from error

    class Shown(Figure):
        """A figure that a notebook shows: IPython draws matplotlib's own figures only where pyplot
        was imported.
        """

        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            width, height = (round(80 * inches) for inches in self.get_size_inches())
            return drawn(self, "png", dpi=160), {"width": width, "height": height}

    return Shown(figsize=size, layout="constrained").add_subplot()


def panels(values: Sequence[Any], ax: Any, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """An axis for each value, two side by side in one figure; of a given axis, that axis and the
    last value.
    """
    if ax is not None or len(values) == 1:
        return iter([(axis(ax), values[-1])])
    rows = math.ceil(len(values) / 2)
    figure = axis(None, (10.8, 4.8 * rows)).figure
    figure.clear()
    drawn_on = figure.subplots(rows, 2, squeeze=False, **settings).flat
    for spare in drawn_on[len(values) :]:
        spare.remove()
    return zip(drawn_on[: len(values)], values, strict=True)


def style_of(look: Look, *, line: str = "none", fill: str | None = None) -> dict[str, Any]:
    colours = {
        "color": look.colour,
        "markerfacecolor": fill or look.colour,
        "markeredgecolor": look.colour,
    }
    return {"marker": look.marker, "markersize": 6, "linestyle": line, "linewidth": 1.2, **colours}


def shades(colour: str) -> Any:
    """Colours from white to this one."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(
        colour, ["white", colour, "black"] if colour != "#000000" else ["white", colour]
    )


def _name(ax: Any, points: Named, places: Places) -> None:
    """Write each name beside its point, at the first place where it covers no point and no other
    name; a line leads to a distant one.
    """
    from matplotlib.text import Text

    ax.figure.draw_without_rendering()
    centres = {name: ax.transData.transform(point[:2]) for name, point in points.items()}
    taken = [text.get_window_extent() for text in ax.texts]
    for name, (x, y, colour) in sorted(points.items(), key=lambda item: -item[1][1]):
        for right, up in places:
            side = "left" if right > 0 else "right"
            line = {
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "shrinkA": 0,
                "shrinkB": 4,
                "relpos": (float(right < 0), 0.5),
            }
            style = {
                "ha": side,
                "va": "center",
                "fontsize": 8,
                "color": colour,
                "arrowprops": line if abs(up) > 10 else None,
            }
            text = ax.annotate(
                name,
                (x, y),
                xytext=(right, up),
                textcoords="offset points",
                annotation_clip=False,
                **style,
            )
            text.get_window_extent()  # places it
            box = Text.get_window_extent(text)  # without its line
            inside = places is AT_END or (
                ax.bbox.x0 < box.x0
                and box.x1 < ax.bbox.x1
                and ax.bbox.y0 < box.y0
                and box.y1 < ax.bbox.y1
            )
            covers = any(
                box.padded(3).contains(*centre)
                for other, centre in centres.items()
                if other != name
            )
            if (inside and not covers and not any(box.overlaps(other) for other in taken)) or (
                right,
                up,
            ) == places[-1]:
                taken.append(box)
                break
            text.remove()


def say_better(ax: Any, x: float, y: float, text: str, ha: str = "center") -> None:
    """Say where better is, at a place given as a share of the axis."""
    ax.text(
        x,
        y,
        text,
        transform=ax.transAxes,
        ha=ha,
        va="center",
        fontsize=8,
        color="0.4",
        style="italic",
    )


def finished(
    ax: Any,
    x: str = "",
    y: str = "",
    title: str = "",
    legend: str = "",
    named: Named | None = None,
    places: Places = BESIDE,
) -> Any:
    """The axis' figure, with labels, a title, and a legend at a place of matplotlib's or names
    beside points.
    """
    ax.set(xlabel=x, ylabel=y)
    ax.set_title(title, fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    if legend:
        ax.legend(loc=legend, fontsize=8, frameon=False)
    _name(ax, named or {}, places)
    return ax.figure


def drawn(figure: Any, suffix: str, **settings: Any) -> bytes:
    """A figure as the content of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, **settings)
    return buffer.getvalue()
