"""Figures of INJ, by matplotlib (the extra ``plots``)."""

from typing import TYPE_CHECKING

from tl_localize.drawing import axes, finish
from tl_localize.evals.inj.results import InjResults
from tl_localize.report.looks import check_rows, each_method, with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def inj_figures(results: InjResults) -> "dict[str, Figure]":
    """The INJ figures by file name; none where no injection converged.

    >>> list(inj_figures(inj_results))
    ['inj_recall_curve', 'inj_target_against_distractors']
    """
    if not results.frame["converged"].any():
        return {}
    figures = {"inj_recall_curve": recall_curve(results)}
    if results.distractors:
        figures["inj_target_against_distractors"] = target_against_distractors(results)
    return figures


def target_against_distractors(results: InjResults) -> "Figure":
    """INJ with distractors: recall of the target's rows against recall of the distractors' rows,
    among the top 1x of each layer.

    There is one point per method, with standard errors over groups (none for a single group), and
    three levels: knows nothing, knows what was altered but not by which sentence, the true rows.
    Left and up is better. Of several injection ratios the largest is drawn.

    >>> target_against_distractors(inj_results).axes[0].get_xlabel()
    "recall of the distractors' rows (%)"
    """
    used = check_rows(results.frame.query("converged"))
    (panel,) = axes(1)
    ratio = used["injection_ratio"].max()
    used = used[(used["injection_ratio"] == ratio) & (used["multiple"] == used["multiple"].min())]
    for method, look, part in each_method(used):
        groups = 100 * part.groupby("group")[["foreign_recall", "recall"]].mean()
        (x, y), (x_error, y_error) = groups.mean(), groups.sem()
        panel.errorbar(x, y, y_error, x_error, label=method, **look.style())
    trained = results.frame[results.frame["injection_ratio"] == ratio]  # also what did not converge
    known = 1 / trained.groupby("group")["sequence_id"].nunique().max()
    levels = {"knows nothing": (ratio, ratio), "knows what was altered": (known, known)}
    levels["the true rows"] = (0, 1)
    for (name, (x, y)), marker in zip(levels.items(), "123", strict=True):
        panel.plot(100 * x, 100 * y, f"k{marker}", markersize=10, label=name)
    panel.set(xlim=(-4, 104), ylim=(-4, 104))
    panel.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0)
    title = f"INJ with distractors, top {100 * ratio:g} % of each layer"
    finish(panel, "recall of the distractors' rows (%)", "recall of the target's rows (%)", title)
    return with_legend([panel])


def recall_curve(results: InjResults) -> "Figure":
    """INJ: mean recall of each method against the share of each layer looked at, with standard
    errors over sentences.

    Several injection ratios are panels side by side.

    >>> recall_curve(inj_results).axes[0].get_title()
    'INJ: 2 % of all rows trained'
    """
    used = check_rows(results.frame.query("converged")).assign(
        share=lambda rows: 100 * rows["ratio"]
    )
    injected = sorted(used["injection_ratio"].unique())
    panels = axes(len(injected))
    for panel, ratio in zip(panels, injected, strict=True):
        some = used[used["injection_ratio"] == ratio]
        for method, look, whole in each_method(used):  # one look in all panels
            part = whole[whole["injection_ratio"] == ratio]
            if not len(part):
                continue
            groups = part.groupby(["share", "group"])["recall"].mean()
            found = 100 * groups.groupby(level="share").agg(["mean", "sem"])
            panel.errorbar(
                found.index, found["mean"], found["sem"], label=method, **look.style("-")
            )
        shares = some["share"].unique()
        panel.set_xticks(shares, [f"{share:g}" for share in shares])
        panel.set_ylim(0, 104)
        title = f"INJ: {100 * ratio:g} % of all rows trained"
        finish(panel, "top share of each layer (%)", "recall of the injected rows (%)", title)
    return with_legend(panels)
