"""Figures of REV, by matplotlib (the extra ``plots``)."""

from typing import TYPE_CHECKING

import pandas as pd

from tl_localize.drawing import axes, finish
from tl_localize.evals.rev.results import DIRECTIONS, PRICE, RevResults
from tl_localize.report.looks import draw_curve, looks, with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rev_figures(results: RevResults) -> "dict[str, Figure]":
    """REV by file name: own against others as more units are put back, and as more are given to the
    model before, side by side; means over models with standard errors, at the shares that are
    measured on all of a method's models, with the signs of the table: what is forgotten is
    negative.

    >>> list(rev_figures(rev_results))
    ['rev_curves']
    """
    directions = [name for name in DIRECTIONS if results.points(name)]
    if not directions:  # no training converged
        return {}
    panels = axes(len(directions), (5.4, 4.6))
    for panel, direction in zip(panels, directions, strict=True):
        points = results.points(direction)
        for method, look in looks(points).items():
            own, others = map(pd.DataFrame, points[method])  # [model, ratio]
            columns = others.mean(), own.mean(), own.sem(), others.sem()
            draw_curve(panel, columns, method, look)
        panel.update_datalim([(0, 0)])  # a small change is not drawn as if it were much
        panel.autoscale_view()
        lost = direction == "put_back"
        panel.axvline(-PRICE if lost else PRICE, color="0.85", linewidth=1, zorder=0)
        better = "down and right" if lost else "up and left"
        x = f"change of accuracy on the other sentences\n(percentage points; better: {better})"
        y = "change of accuracy on the sentence\n(percentage points)"
        finish(panel, x, y, f"Units {DIRECTIONS[direction]}")
    return {"rev_curves": with_legend(panels)}
