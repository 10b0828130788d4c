"""Figures by matplotlib (``pip install tl_localize[plots]``): each takes an axis, returns the figure, and reads well in black and white."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.evals.del_benchmark import DelResults
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
            label=_short(name),
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
        ax.errorbar(share, mean, yerr=error, marker=marker, markerfacecolor="white", color="black", linewidth=1, label=_short(name))
    ax.set_xlabel("top share of each layer (%)")
    ax.set_ylabel("recall of the injected rows (%)")
    ax.set_title("INJ: recall over the share of neurons looked at")
    ax.set_ylim(0, 104)
    if ax.get_legend_handles_labels()[0]:  # none where no injection converged
        ax.legend(fontsize=8, frameon=False)
    return ax.figure


def del_figures(results: DelResults, single_layers: Sequence[pd.DataFrame] = ()) -> dict[str, Any]:
    """The DEL figures by file name: the trade-off, each method's confusion matrix at the largest ratio, each single-layer run."""
    figures = {"del_forgetting": forgetting(results)}
    largest = max(results.frame["ratio"])
    figures |= {f"del_confusion_{name}": confusion(results, name, ratio) for name, ratio in results.confusion if ratio == largest}
    return figures | {f"del_single_layer_{frame['method'].iloc[0]}": single_layer(frame) for frame in single_layers}


def forgetting(results: DelResults, ax: Any = None) -> Any:
    """DEL: accuracy that the target loses (Self) against what the other sequences lose (Neg), mean and standard error over targets.

    One line per method from the smallest ratio (white) to the largest (black). Left and up is better; on the diagonal nothing is localized.
    """
    ax = _axis(ax)
    frame = results.frame
    ratios = sorted(set(frame["ratio"]))
    reach = 0.0
    for marker, ((name,), part) in zip(MARKERS, frame.groupby(["method"], sort=False), strict=False):
        points: list[tuple[float, float]] = []
        for i, ratio in enumerate(ratios):
            rows = part[part["ratio"] == ratio]
            own, own_error = mean_and_error(-100 * rows["delta_self_accuracy"])
            others, others_error = mean_and_error(-100 * rows["delta_neg_accuracy"])
            shade = "white" if len(ratios) > 1 and i == 0 else "black" if i == len(ratios) - 1 else "0.6"
            label = _short(name) if i == len(ratios) - 1 else None
            style = {"marker": marker, "markerfacecolor": shade, "color": "black", "linestyle": "none", "linewidth": 0.8}
            ax.errorbar(others, own, xerr=others_error, yerr=own_error, label=label, zorder=2, **style)
            points.append((others, own))
        ax.plot(*zip(*points, strict=True), color="0.6", linewidth=0.8, zorder=1)
        reach = max(reach, *(x for x, _ in points))
    ax.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0)
    shares = " to ".join(f"{100 * ratio:g} %" for ratio in sorted({ratios[0], ratios[-1]}))
    ax.set_xlim(left=min(-0.05 * reach, ax.get_xlim()[0]))
    ax.set_xlabel("accuracy lost on the other sequences, Neg (percentage points)")
    ax.set_ylabel("accuracy lost on the target, Self (percentage points)")
    ax.set_title(f"DEL: {shares} of each layer silenced" + (" (white to black)" if len(ratios) > 1 else ""))
    ax.legend(fontsize=8, frameon=False)
    return ax.figure


def confusion(results: DelResults, method: str, ratio: float, ax: Any = None) -> Any:
    """DEL: change of accuracy of each target (column) when another's neurons are silenced (row), grouped by category.

    The darker, the more is forgotten; a method that finds neurons of the target alone darkens the diagonal alone. What rises is white.

    Raises:
        ValueError: the results do not hold this method and ratio.
    """
    matrix = results.confusion_by_category(method, ratio)
    matrix = 100 * matrix.loc[:, matrix.index]
    ax = _axis(ax, (6.5, 5.5))
    image = ax.imshow(matrix.to_numpy(), cmap="gray", vmin=-100, vmax=0, interpolation="nearest")
    groups = matrix.index.get_level_values("category")
    starts = [i for i in range(len(groups)) if i == 0 or groups[i] != groups[i - 1]]
    ends = [*starts[1:], len(groups)]
    for start in starts[1:]:
        ax.axhline(start - 0.5, color="0.5", linewidth=0.6)
        ax.axvline(start - 0.5, color="0.5", linewidth=0.6)
    centres = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    names = [str(groups[start]).replace("_", " ") for start in starts]
    ax.set_xticks(centres, names, rotation=45, ha="right", fontsize=8)
    ax.set_yticks(centres, names, fontsize=8)
    ax.set_xlabel(f"measured sequence ({len(groups)}, by category)")
    ax.set_ylabel("sequence whose neurons are silenced")
    ax.set_title(f"{_short(method)}: top {100 * ratio:g} % of each layer silenced")
    ax.figure.colorbar(image, ax=ax, label="change of accuracy (percentage points)")
    return ax.figure


def single_layer(frame: pd.DataFrame, ax: Any = None) -> Any:
    """DEL: the whole budget of neurons in one layer against a share in every layer, from ``DelBenchmark.run_single_layer``.

    Black is the target (Self), grey the others (Neg); horizontal lines are all layers together. Mean and standard error over targets.
    """
    ax = _axis(ax)
    whole, single = frame[frame["layer"].isna()], frame[frame["layer"].notna()]
    ratio, method = float(frame["ratio"].iloc[0]), str(frame["method"].iloc[0])
    for column, name, color in (("delta_self_accuracy", "Self", "black"), ("delta_neg_accuracy", "Neg", "0.55")):
        mean, error = mean_and_error(100 * whole[column])
        ax.axhline(mean, color=color, linestyle="--", linewidth=1.5, label=f"{name}, all layers")
        ax.axhspan(mean - error, mean + error, color=color, alpha=0.12, linewidth=0)
        for marker, ((multiple,), part) in zip("os^v", single.groupby(["multiple"]), strict=False):
            rows = [(int(str(layer)), *mean_and_error(100 * of_layer[column])) for (layer,), of_layer in part.groupby(["layer"])]
            layers, means, errors = zip(*rows, strict=True)
            style = {"marker": marker, "markerfacecolor": "white" if multiple == 1 else color, "color": color, "linewidth": 1}
            ax.errorbar(layers, means, yerr=errors, label=f"{name}, one layer, {multiple} x the budget", **style)
    budget = round(float(whole["n_neurons"].mean()))
    ax.set_xticks(sorted({int(str(layer)) for layer in single["layer"]}))
    ax.set_xlabel("layer whose neurons are silenced")
    ax.set_ylabel("change of accuracy (percentage points)")
    ax.set_title(f"{_short(method)}: {budget} neurons, {100 * ratio:g} % of each layer, or all of them in one")
    ax.legend(fontsize=8, frameon=False)
    return ax.figure


def save_figure(figure: Any, folder: str | Path, name: str) -> None:
    """Write NAME.png and NAME.svg, each whole or not at all."""
    path = prepare_folder(folder)
    for suffix in ("png", "svg"):
        temporary = path / f".{name}.{os.getpid()}.{suffix}"
        try:
            figure.savefig(temporary, dpi=150, bbox_inches="tight")
            os.replace(temporary, path / f"{name}.{suffix}")
        finally:
            temporary.unlink(missing_ok=True)


def _short(method: object) -> str:
    return TITLES.get(str(method), str(method)).split(" (")[0]


def _axis(ax: Any, size: tuple[float, float] = (6, 4.5)) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'tl_localize[plots]'.") from error
    return Figure(figsize=size, layout="constrained").add_subplot()
