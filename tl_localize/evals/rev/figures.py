"""Figures of REV, by matplotlib (the extra ``plots``)."""

from typing import TYPE_CHECKING

from tl_localize.drawing import axes, finish
from tl_localize.evals.rev.results import DIRECTIONS, PRICE, RevResults
from tl_localize.report.looks import draw_curve, each_method, with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rev_figures(results: RevResults) -> "dict[str, Figure]":
    """REV by file name: own against others as more units are put back, and as more are given to the
    model before, side by side; means over models with standard errors, with the signs of the
    table: what is forgotten is negative.

    >>> list(rev_figures(rev_results))
    ['rev_curves']
    """
    curves = list(results.summary().groupby("direction", sort=False))
    if not curves:  # no training converged
        return {}
    panels = axes(len(curves), (5.4, 4.6))
    for panel, (direction, curve) in zip(panels, curves, strict=True):
        for method, look, rows in each_method(curve.sort_values("ratio")):
            errors = rows["own_error"], rows["others_error"]
            draw_curve(panel, (rows["others"], rows["own"], *errors), method, look)
        panel.update_datalim([(0, 0)])  # a small change is not drawn as if it were much
        panel.autoscale_view()
        lost = direction == "put_back"
        panel.axvline(-PRICE if lost else PRICE, color="0.85", linewidth=1, zorder=0)
        better = "down and right" if lost else "up and left"
        x = f"change of accuracy on the other sentences\n(percentage points; better: {better})"
        y = "change of accuracy on the sentence\n(percentage points)"
        finish(panel, x, y, f"Units {DIRECTIONS[str(direction)]}")
    return {"rev_curves": with_legend(panels)}
