"""Figures by matplotlib (``pip install tl_localize[plots]``): each takes an axis, returns the figure, and reads well in black and white."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tl_localize.evals.inj_benchmark import TRUE_ROWS, InjResults, by_group
from tl_localize.paper import TITLES
from tl_localize.stats import mean_and_error
from tl_localize.store import prepare_folder

MARKERS = "osD^vP*X<>hp"


def own_against_foreign(results: InjResults, ax: Any = None) -> Any:
    """INJ with distractors: recall of the own rows against recall of the other sentences' rows, among the top 1x of each layer.

    One point per method with standard errors over groups, between three levels: knows nothing, knows what was altered but not by which
    sentence, the true rows. Left and up is better.

    Raises:
        ValueError: the results have no distractors.
    """
    if not results.distractors:
        raise ValueError("results must be of INJ with distractors, got the form without. Run InjBenchmark(..., distractors=3).")
    ax = _axis(ax)
    used = results.frame[results.frame["converged"]]
    used = used[used["multiple"] == used["multiple"].min()]
    ratio = float(used["injection_ratio"].iloc[0])
    size = int(used.groupby("group")["sequence_id"].nunique().max())
    ax.plot([0, 100], [0, 100], color="0.8", linewidth=1, zorder=0)
    for own, foreign, text in (
        (ratio, ratio, "knows nothing"),
        (1 / size, 1 / size, "knows what was altered"),
        (1.0, 0.0, "the true rows"),
    ):
        ax.plot(100 * foreign, 100 * own, marker="+", markersize=14, color="black", zorder=1)
        ax.annotate(text, (100 * foreign, 100 * own), xytext=(8, -12), textcoords="offset points", fontsize=8, color="0.3")
    groups = ((name, part) for (name,), part in used.groupby(["method"], sort=False) if name != TRUE_ROWS)
    for marker, (name, part) in zip(MARKERS, groups, strict=False):
        own, own_error = mean_and_error(100 * by_group(part, "recall"))
        foreign, foreign_error = mean_and_error(100 * by_group(part, "foreign_recall"))
        ax.errorbar(
            foreign,
            own,
            xerr=foreign_error,
            yerr=own_error,
            marker=marker,
            markerfacecolor="white",
            color="black",
            linewidth=1,
            linestyle="none",
            label=TITLES.get(str(name), str(name)).split(" (")[0],
        )
    ax.set_xlabel(f"recall of the other {size - 1} sentences' rows (%)")
    ax.set_ylabel("recall of the own rows (%)")
    ax.set_title(f"INJ with {size - 1} distractors, top {100 * ratio:g} % of each layer")
    ax.set_xlim(-3, max(60, 100 / size + 20))
    ax.set_ylim(0, 104)
    ax.legend(loc="upper right", fontsize=8, frameon=False)
    return ax.figure


def recall_curve(results: InjResults, ax: Any = None) -> Any:
    """INJ: mean recall of each method against the share of each layer looked at, with standard errors over sentences."""
    ax = _axis(ax)
    used = results.frame[results.frame["converged"] & (results.frame["method"] != TRUE_ROWS)]
    for marker, ((name,), part) in zip(MARKERS, used.groupby(["method"], sort=False), strict=False):
        points = [(100 * float(str(r)), *mean_and_error(100 * by_group(rows, "recall"))) for (r,), rows in part.groupby(["ratio"])]
        share, mean, error = zip(*points, strict=True)
        label = TITLES.get(str(name), str(name)).split(" (")[0]
        ax.errorbar(share, mean, yerr=error, marker=marker, markerfacecolor="white", color="black", linewidth=1, label=label)
    ax.set_xlabel("top share of each layer (%)")
    ax.set_ylabel("recall of the injected rows (%)")
    ax.set_title("INJ: recall over the share of neurons looked at")
    ax.set_ylim(0, 104)
    if ax.get_legend_handles_labels()[0]:  # none where no injection converged
        ax.legend(fontsize=8, frameon=False)
    return ax.figure


def save_figure(figure: Any, folder: str | Path, name: str) -> None:
    """Write NAME.png and NAME.svg."""
    path = prepare_folder(folder)
    for suffix in ("png", "svg"):
        figure.savefig(path / f"{name}.{suffix}", dpi=150, bbox_inches="tight")


def _axis(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'tl_localize[plots]'.") from error
    return Figure(figsize=(6, 4.5), layout="constrained").add_subplot()
