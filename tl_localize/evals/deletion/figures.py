"""Figures of DEL, by matplotlib (the extra ``plots``)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tl_localize.checks import Real, check_choice
from tl_localize.drawing import axes, finish
from tl_localize.evals.deletion.results import PRICES, DelResults, share_in_words
from tl_localize.paper import short_title
from tl_localize.report.looks import Look, check_rows, draw_curve, looks, with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SELF = "Self: accuracy lost on the target (percentage points)"

NEG = "Neg: accuracy lost on the other sequences\n(percentage points; better: up and left)"


def del_figures(results: DelResults) -> "dict[str, Figure]":
    """The DEL figures by file name: what is forgotten, and the confusion matrices at the largest
    ratio, where there are any; none where nothing is measured, or a single text, which has no
    others to compare with.

    >>> sorted(del_figures(del_results))
    ['del_confusion', 'del_forgetting']
    """
    if not results.frame["delta_neg_accuracy"].notna().any():
        return {}
    figures = {"del_forgetting": forgetting(results)}
    if results.confusion:
        figures["del_confusion"] = confusion(results)
    return figures


def forgetting(results: DelResults) -> "Figure":
    """DEL: accuracy that the target loses (Self) against what the other sequences lose (Neg), a
    mark for each ratio and a line between them. At one Neg, higher is better.

    Means over the targets that a method has at all ratios, with standard errors. Both axes are in
    percentage points, as far as the data go, and reach from zero to one at least. On the grey line
    the target loses what others lose, so nothing is localized; upright lines are those prices of
    ``DelResults.at_price`` that some method reaches.

    >>> forgetting(del_results).axes[0].get_title()
    'DEL, reference-gpt2, zero ablation'
    """
    check_rows(results.frame)
    (panel,) = axes(1, (5.4, 4.6))
    curves = results.points()
    for method, look in looks(curves).items():
        lost: Any = -curves[method]
        neg, own = lost["neg"], lost["self"]
        draw_curve(panel, (neg.mean(), own.mean(), own.sem(), neg.sem()), method, look)
    panel.update_datalim([(0, 0), (1, 1)])  # less than a point is not drawn as if it were much
    panel.autoscale_view()
    reached = panel.get_xlim()[1]
    for price in PRICES:
        if price <= reached:  # a line beyond would stretch the axis
            panel.axvline(price, color="0.85", linewidth=1, zorder=0)
    panel.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0, label="Self = Neg")
    model, ablation = results.frame.iloc[0][["model", "ablation"]]
    finish(panel, NEG, SELF, f"DEL, {model}, {ablation} ablation")
    return with_legend([panel])


def confusion(results: DelResults, ratio: Real | None = None) -> "Figure":
    """DEL: change of accuracy of each sequence (column) when the units of another one (row) are
    ablated, one panel per method.

    All panels have one order, by category, and one scale: orange is lost, purple gained. A method
    that finds neurons of the target alone colours the diagonal alone. What was not measured,
    because a method had fewer targets, stays empty.

    Args:
        ratio: by default the largest.

    Raises:
        ValueError: the results do not hold this ratio.

    >>> [ax.get_title() for ax in confusion(del_results, 0.05).axes[:2]]
    ['Attribution', 'Random']
    """
    check_rows(results.frame)
    ratios = sorted({held for _, held in results.confusion})
    if not ratios:
        raise ValueError(
            "results must hold confusion matrices, got none. Read them from a results folder, and "
            "run its command again where a file of it is damaged."
        )
    ratio = ratios[-1] if ratio is None else ratio
    check_choice("ratio", ratio, ratios)
    matrices = {name: 100 * m for (name, held), m in results.confusion.items() if held == ratio}
    reach = max(1.0, *(matrix.abs().max().max() for matrix in matrices.values()))
    targets = max((matrix.index for matrix in matrices.values()), key=len)
    categories = results.before.set_index("sequence_id")["category"]
    category = categories[targets].sort_values(kind="stable")
    names, starts = np.unique(category.to_numpy(str), return_index=True)
    panels = axes(len(matrices), size=(3.0, 4.4))
    for panel, (name, matrix) in zip(panels, matrices.items(), strict=True):
        image = matrix.reindex(index=category.index, columns=category.index)
        panel.imshow(image, "PuOr", vmin=-reach, vmax=reach, interpolation="nearest")
        panel.set_xticks(starts - 0.5, names, rotation=90, ha="left")
        panel.set_yticks(starts - 0.5, names, va="top")
        panel.grid(color="0.8", linewidth=0.5)
        ablated = f"sequence whose {results.units.name} are ablated"
        finish(panel, "measured sequence", ablated, short_title(name))
        panel.label_outer()
    figure: Any = panels[0].figure
    label = "change of accuracy (percentage points)"
    figure.colorbar(panels[0].images[0], ax=panels, label=label)
    drawn = results.frame[results.frame["ratio"] == ratio]
    share = share_in_words(drawn, float(ratio), results.units)
    figure.suptitle(f"DEL: top {share} ablated; {len(targets)} sequences")
    return figure


def single_layer_figure(frame: Any) -> "Figure":
    """DEL: the whole budget of neurons in one layer against a share in every layer, at the largest
    ratio. Layer 0, which every text needs, would hide the others by its scale and is left out.

    The method's colour is the target (Self), grey the others (Neg); dashed lines are the share of
    every layer. Mean and standard error over targets.

    Args:
        frame: the rows of one method of ``DelResults.single_layers``.

    >>> single_layer_figure(single_layers.query("method == 'attribution'")).axes[0].get_xlabel()
    'layer whose neurons are ablated'
    """
    (panel,) = axes(1, (6.0, 4.6))
    ratio = frame["ratio"].max()
    method = frame["method"].iloc[0]
    largest = frame[frame["ratio"] == ratio]
    whole, single = largest[largest["layer"].isna()], largest[largest["layer"] > 0]
    for name, colour, column in (
        ("Self", looks([method])[method].colour, "delta_self_accuracy"),
        ("Neg", "0.55", "delta_neg_accuracy"),
    ):
        mean = 100 * whole[column].mean()
        panel.axhline(mean, color=colour, linestyle="--", label=f"{name}, all layers")
        for marker, (factor, part) in zip("os^vD", single.groupby("multiple"), strict=False):
            label = f"{name}, one layer, {factor} x the budget"
            found = 100 * part.groupby("layer")[column].agg(["mean", "sem"])
            style = Look(colour, marker).style("-")
            panel.errorbar(found.index, found["mean"], found["sem"], label=label, **style)
    panel.set_xticks(single["layer"].unique())
    title = f"{short_title(method)}: {100 * ratio:g} % of the neurons, in one layer or in all"
    change = "change of accuracy (percentage points)"
    finish(panel, "layer whose neurons are ablated", change, title)
    return with_legend([panel])
