"""Figures of matplotlib, which is an extra: it is imported when something is drawn."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES_NEED = "Figures need matplotlib, which the extra 'plots' brings: pip install matplotlib."


def has_matplotlib() -> bool:
    """Whether figures can be drawn."""
    return find_spec("matplotlib") is not None


def axes(n: int, size: tuple[float, float] = (4.8, 4.2)) -> "list[Axes]":
    """``n`` axes of a new figure, in one row, or in two where there are many.

    Args:
        size: of one of them, in inches.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(FIGURES_NEED) from error

    class Shown(Figure):
        """A figure that a notebook shows: IPython draws matplotlib's own figures only where pyplot
        was imported.
        """

        def _repr_png_(self) -> bytes:
            # tight: the layout of many panels with one colour bar is not exact
            return image_bytes(self, "png", dpi=100, bbox_inches="tight")

    rows = 2 if n > 5 and n % 2 == 0 else 1
    width, height = size[0] * n / rows + 2.4, size[1] * rows
    figure = Shown(figsize=(width, height), layout="constrained")
    return list(figure.subplots(rows, n // rows, squeeze=False).flat)


def finish(ax: "Axes", x: str, y: str, title: str) -> None:
    """Labels, a title, and no lines above and to the right."""
    ax.set(xlabel=x, ylabel=y)
    ax.set_title(title, fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)


def mark_layers(ax: "Axes", layers: Sequence[int]) -> None:
    """Whole numbers on the axis of layers, at most about a dozen."""
    ax.set_xticks(layers[:: 1 + len(layers) // 13])


def image_bytes(figure: "Figure", suffix: str, **settings: Any) -> bytes:
    """A figure as the content of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, **settings)
    return buffer.getvalue()
