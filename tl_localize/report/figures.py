"""Figures by matplotlib (``pip install tl_localize[plots]``): each returns the figure, and draws
into an axis that it is given.

A method has one colour and one marker in all of them (``report.looks``), and stands beside what it
names where there is room.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from tl_localize.evals.del_results import PRICES, DelResults
from tl_localize.evals.inj_results import TRUE_ROWS, InjResults, by_group
from tl_localize.files import prepare_folder, write_whole
from tl_localize.models import REFERENCE_MODELS
from tl_localize.neurons import Real
from tl_localize.reference import DATA
from tl_localize.report.looks import (
    AT_END,
    LOOKS,
    Look,
    Named,
    axis,
    drawn,
    finished,
    looks,
    panels,
    say_better,
    shades,
    style_of,
)
from tl_localize.report.paper import short_title
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.stats import mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 192  # of a score map; more neurons than that share a column
POINTS = "percentage points"
# points of Neg: a layer that costs the other sequences so much destroys the model, and is named
# instead of drawn
GONE = -50


def target_against_distractors(results: InjResults, ax: Any = None) -> Figure:
    """INJ with distractors: recall of the target's rows against recall of the distractors' rows,
    among the top 1x of each layer.

    There is one point per method, with standard errors over groups (none for a single group), and
    three levels: knows nothing, knows what was altered but not by which sentence, the true rows.
    Left and up is better. Of several injection ratios the largest is drawn.

    Raises:
        ValueError: the results have no distractors.

    >>> two = [MemorizedSequence.from_text(model, *text, id=text[0]) for text in (("The", " blue list"), ("One", " module waits"))]
    >>> results = InjBenchmark(model=model, sequences=two, ratio=0.02, distractors=1).run([Activations()])
    >>> target_against_distractors(results).axes[0].get_xlabel()
    "recall of the distractor's rows (%)"
    """
    if not results.distractors:
        raise ValueError(
            "results must be of INJ with distractors, got the form without. Run InjBenchmark(..., "
            "distractors=3)."
        )
    ax = axis(ax)
    used = results.frame[results.frame["converged"]]
    if not len(used):
        return finished(ax, title="INJ: no injection converged")
    ratio = float(used["injection_ratio"].max())
    used = used[(used["injection_ratio"] == ratio) & (used["multiple"] == used["multiple"].min())]
    size = int(used.groupby("group")["sequence_id"].nunique().max())
    ax.plot([0, 100], [0, 100], color="0.8", linewidth=1, zorder=0)
    for level, other, text, place in (
        (ratio, ratio, "knows nothing", {"xytext": (22, -3)}),
        (1 / size, 1 / size, "knows what was altered", {"xytext": (0, -20), "ha": "center"}),
        (1.0, 0.0, "the true rows", {"xytext": (12, -3)}),
    ):
        ax.plot(100 * other, 100 * level, marker="+", markersize=14, color="black", zorder=1)
        ax.annotate(
            text,
            (100 * other, 100 * level),
            textcoords="offset points",
            fontsize=8,
            color="0.3",
            **place,
        )
    points: Named = {}
    for method, look, part in _methods(used):
        foreign, own = 100 * by_group(part, "foreign_recall"), 100 * by_group(part, "recall")
        points[method] = *_point(ax, foreign, own, label=method, **style_of(look)), look.colour
    ax.set(xlim=(-4, max(60, 100 / size + 30)), ylim=(-4, 104))
    say_better(ax, 0.5, 0.96, "better: up and left")
    rows = "the distractor's rows" if size == 2 else f"the {size - 1} distractors' rows"
    title = (
        f"INJ with {size - 1} distractor{'s' if size > 2 else ''}, top {100 * ratio:g} % of each "
        "layer"
    )
    return finished(
        ax, f"recall of {rows} (%)", "recall of the target's rows (%)", title, named=points
    )


def recall_curve(results: InjResults, ax: Any = None) -> Figure:
    """INJ: mean recall of each method against the share of each layer looked at, with standard
    errors over sentences.

    Several injection ratios are panels side by side; into a given axis the largest is drawn.

    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> results = InjBenchmark(model=model, sequences=[sentence], ratio=0.03).run([Activations()])
    >>> recall_curve(results).axes[0].get_title()
    'INJ: 3 % of all rows trained'
    """
    used: Any = results.frame[results.frame["converged"] & (results.frame["method"] != TRUE_ROWS)]
    injected = sorted(used["injection_ratio"].unique())
    if not injected:
        return finished(axis(ax), title="INJ: no injection converged")
    for panel, injection_ratio in panels(injected, ax, sharey=True):
        ends: Named = {}
        some = used[used["injection_ratio"] == injection_ratio]
        for method, look, part in _methods(some):
            recalls = {
                100 * ratio: 100 * by_group(rows, "recall") for ratio, rows in part.groupby("ratio")
            }
            ends[method] = (
                *_line(panel, recalls, label=method, **style_of(look, line="-")),
                look.colour,
            )
        shares = sorted(100 * some["ratio"].unique())
        panel.set_xticks(shares, [f"{share:g}" for share in shares])
        panel.set_ylim(0, 104)
        say_better(panel, 0.98, 0.03, "higher is better", ha="right")
        title = f"INJ: {100 * injection_ratio:g} % of all rows trained"
        ax = finished(
            panel,
            "top share of each layer (%)",
            "recall of the injected rows (%)",
            title,
            named=ends,
            places=AT_END,
        ).axes[0]
    return ax.figure


def del_figures(results: DelResults) -> dict[str, Figure]:
    """The DEL figures by file name: the trade-off, the confusion matrices at the largest ratio,
    each single-layer run.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> sorted(del_figures(results))
    ['del_confusion', 'del_forgetting', 'del_prices']
    """
    layers = {
        f"del_single_layer_{name}": single_layer(frame)
        for name, frame in results.single_layer.items()
    }
    return {
        "del_forgetting": forgetting(results),
        "del_prices": prices(results),
        "del_confusion": confusion(results),
        **layers,
    }


def forgetting(results: DelResults, ax: Any = None) -> Figure:
    """DEL: accuracy that the target loses (Self) against what the other sequences lose (Neg), mean
    and standard error over targets.

    One panel per ratio; into a given axis the largest is drawn. Left and up is better; on the grey
    line nothing is localized. Neg has a scale of its own, which its label names: in equal scales
    all points would lie on one line.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> forgetting(results).axes[0].get_title()
    'DEL: top 5 % of each layer ablated'
    """
    for panel, ratio in panels(sorted(set(results.frame["ratio"])), ax):
        points: Named = {}
        for method, look, rows in _methods(results.frame[results.frame["ratio"] == ratio]):
            others, target = -100 * rows["delta_neg_accuracy"], -100 * rows["delta_self_accuracy"]
            points[method] = (
                *_point(panel, others, target, label=method, **style_of(look)),
                look.colour,
            )
        panel.margins(0.14)
        panel.autoscale_view()
        panel.axline((0, 0), slope=1, color="0.75", linewidth=1, zorder=0)
        say_better(panel, 0.02, 0.96, "better: up and left", ha="left")
        box, (left, right), (low, high) = (
            panel.get_window_extent(),
            panel.get_xlim(),
            panel.get_ylim(),
        )
        stretched = (box.width / (right - left)) / (box.height / (high - low))
        x = (
            f"accuracy lost on the other sequences, Neg\n({POINTS}, drawn {stretched:.2g} times as "
            "large as Self)"
        )
        y = f"accuracy lost on the target, Self ({POINTS})"
        ax = finished(
            panel, x, y, f"DEL: top {100 * ratio:g} % of each layer ablated", named=points
        ).axes[0]
    return ax.figure


def prices(results: DelResults, ax: Any = None) -> Figure:
    """DEL: Self against Neg of each method as more is ablated, from nothing through all ratios; at
    one Neg, higher is better.

    Means over the targets that a method has at all ratios, with standard errors; grey lines are the
    prices of ``DelResults.at_price``. Several models or ablations are panels side by side; into a
    given axis the last is drawn.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> prices(results).axes[0].get_title()
    'DEL: what is forgotten at which price'
    """
    curves = dict(list(results.curve().groupby(["model", "ablation"], sort=False)))
    for panel, key in panels(list(curves), ax):
        ends: Named = {}
        for method, look, rows in _methods(curves[key]):
            others, target = (np.append(0.0, -rows[column]) for column in ("neg", "self"))
            errors = {
                f"{axis}err": np.append(0.0, rows[f"{column}_error"])
                for axis, column in (("x", "neg"), ("y", "self"))
            }
            panel.errorbar(
                others, target, **errors, elinewidth=0.6, label=method, **style_of(look, line="-")
            )
            ends[method] = others[-1], target[-1], look.colour
        for price in (price for price in PRICES if price < panel.get_xlim()[1]):
            panel.axvline(price, color="0.85", linewidth=1, zorder=0)
        say_better(panel, 0.02, 0.96, "better: up and left", ha="left")
        x, y = (
            f"accuracy lost on the other sequences, Neg ({POINTS})",
            f"accuracy lost on the target, Self ({POINTS})",
        )
        title = "DEL: what is forgotten at which price" + (
            f", {', '.join(key)}" if len(curves) > 1 else ""
        )
        ax = finished(panel, x, y, title, named=ends).axes[0]
    return ax.figure


def confusion(results: DelResults, ratio: Real | None = None) -> Figure:
    """DEL: change of accuracy of each sequence (column) when another's neurons are ablated (row),
    one panel per method.

    All panels have one order, grouped by category, and one scale: orange is lost, purple gained. A
    method that finds neurons of the target alone colours the diagonal alone. What was not measured,
    because a method had fewer targets, stays empty.

    Args:
        ratio: by default the largest.

    Raises:
        ValueError: the results do not hold this ratio.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> [ax.get_title() for ax in confusion(results, 0.05).axes[:2]]
    ['Attribution', 'Random']
    """
    ratios = sorted({held for _, held in results.confusion})
    ratio = ratios[-1] if ratio is None else ratio
    matrices = {
        name: 100 * results.confusion_by_category(name, ratio)
        for name, held in results.confusion
        if held == ratio
    }
    if not matrices:
        raise ValueError(f"ratio must be one of {ratios}, got {ratio!r}. Ablate that share too.")
    reach = max(
        1.0, *(float(np.abs(matrix.to_numpy(dtype=float)).max()) for matrix in matrices.values())
    )
    order = max((matrix.index for matrix in matrices.values()), key=len)
    groups = order.get_level_values("category")
    starts = [k for k in range(len(groups)) if k == 0 or groups[k] != groups[k - 1]]
    centres = [
        (start + end - 1) / 2 for start, end in zip(starts, [*starts[1:], len(groups)], strict=True)
    ]
    names = [str(groups[start]).replace("_", " ") for start in starts]
    columns = min(4, len(matrices))
    rows = math.ceil(len(matrices) / columns)
    figure = axis(None, (3.4 * columns + 1.6, 3.1 * rows + 1)).figure
    figure.clear()
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(len(matrices))]
    for i, (panel, (name, matrix)) in enumerate(zip(panels, matrices.items(), strict=True)):
        panel.imshow(
            matrix.reindex(index=order, columns=order).to_numpy(),
            cmap="PuOr",
            vmin=-reach,
            vmax=reach,
            interpolation="nearest",
        )
        for start in starts[1:]:
            panel.axhline(start - 0.5, color="0.8", linewidth=0.5)
            panel.axvline(start - 0.5, color="0.8", linewidth=0.5)
        below, left = i + columns >= len(matrices), i % columns == 0
        panel.set_xticks(
            centres,
            names if below else [],
            rotation=60,
            ha="right",
            rotation_mode="anchor",
            fontsize=7,
        )
        panel.set_yticks(centres, names if left else [], fontsize=7)
        finished(
            panel,
            "measured sequence" if below else "",
            "sequence whose neurons are ablated" if left else "",
            short_title(name),
        )
    figure.colorbar(
        panels[0].images[0], ax=panels, label=f"change of accuracy ({POINTS})", shrink=0.8
    )
    figure.suptitle(
        f"DEL: top {100 * ratio:g} % of each layer ablated; {len(groups)} sequences by category"
    )
    return figure


def single_layer(frame: pd.DataFrame, ax: Any = None, *, first_layer: int = 0) -> Figure:
    """DEL: the whole budget of neurons in one layer against a share in every layer, from
    ``DelBenchmark.run_single_layer``.

    The method's colour is the target (Self), grey the others (Neg); bands are the largest share of
    every layer. Mean and standard error over targets. A layer that costs the others more than half
    their accuracy is named below instead of drawn, since its scale would hide all others.

    Args:
        first_layer: layers below it are left out.

    >>> frame = DelBenchmark(model, few, text, ratios=(0.02,), n_dev=0).run_single_layer(Attribution(), 0.02)
    >>> single_layer(frame, first_layer=1).axes[0].get_title()
    'Attribution: 153 neurons of one layer, 150 of all'
    """
    ax = axis(ax)
    frame = frame[frame["ratio"] == frame["ratio"].max()]
    whole: Any = frame[frame["layer"].isna()]
    single: Any = frame[frame["layer"].ge(first_layer).fillna(False)]
    ratio, method = float(frame["ratio"].iloc[0]), str(frame["method"].iloc[0])
    costs = (
        100
        * single.groupby(["layer", "multiple"])[
            ["delta_self_accuracy", "delta_neg_accuracy"]
        ].mean()
    )
    gone = (
        costs[costs["delta_neg_accuracy"] < GONE]
        if (costs["delta_neg_accuracy"] >= GONE).any()
        else costs.iloc[:0]
    )
    colour = looks([method])[method].colour
    for column, name, own in (
        ("delta_self_accuracy", "Self", colour),
        ("delta_neg_accuracy", "Neg", "0.55"),
    ):
        mean, error = mean_and_error(100 * whole[column])
        ax.axhline(
            mean,
            color=own,
            linestyle="--",
            linewidth=1.2,
            label=f"{name}, {100 * ratio:g} % of each layer",
        )
        ax.axhspan(mean - error, mean + error, color=own, alpha=0.12, linewidth=0)
        for marker, (factor, part) in zip("os^vD", single.groupby("multiple"), strict=False):
            changes = {
                layer: 100 * rows[column]
                for layer, rows in part.groupby("layer")
                if (layer, factor) not in gone.index
            }
            style = style_of(Look(own, marker), line="-", fill="white" if factor == 1 else own)
            _line(ax, changes, label=f"{name}, one layer, {factor} x the budget", **style)
    ax.set_xticks(sorted(single["layer"].unique()))
    said = [
        f"layer {layer}, {factor} x: Self {row['delta_self_accuracy']:.0f}, Neg "
        f"{row['delta_neg_accuracy']:.0f}"
        for (layer, factor), row in gone.iterrows()
    ]
    counts = [round(part["n_neurons"].mean()) for part in (whole, single[single["multiple"] == 1])]
    title = f"{short_title(method)}: {counts[1]} neurons of one layer, {counts[0]} of all"
    x = "layer whose neurons are ablated" + (
        "\nbelow the scale: " + "; ".join(said) if said else ""
    )
    return finished(ax, x, f"change of accuracy ({POINTS})", title, legend="best")


def score_map(
    scores: NeuronScores, ax: Any = None, *, per: Literal["layer", "model"] = "model"
) -> Figure:
    """Scores over layers and neurons, the darker the more responsible; neighbours share a column,
    which shows the largest score among them.

    Args:
        per: what black means: the largest score of the whole model, or of each layer by itself.
            Scores below zero are white.

    >>> score_map(Attribution()(model, sequence), per="layer").axes[0].get_ylabel()
    'layer'
    """
    if not isinstance(scores, NeuronScores):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"scores must be NeuronScores, got {type(scores).__name__}. Draw sets with "
            "neurons_by_layer."
        )
    if per not in ("layer", "model"):
        raise ValueError(
            f"per must be 'layer' or 'model', got {per!r}. 'model' compares the layers with each "
            "other."
        )
    ax = axis(ax)
    n_layers, n_neurons = scores.values.shape
    width = math.ceil(n_neurons / COLUMNS)
    padded = np.pad(
        scores.values.numpy(), ((0, 0), (0, -n_neurons % width)), constant_values=-np.inf
    )
    image = padded.reshape(n_layers, -1, width).max(-1)
    if per == "layer":
        image = image / np.maximum(image.max(1, keepdims=True), np.finfo(np.float32).tiny)
    top = float(image.max()) if image.max() > 0 else 1
    extent = (0, width * image.shape[1], -0.5, n_layers - 0.5)
    colours = shades(looks([scores.method])[scores.method].colour)
    grid = ax.imshow(
        image,
        colours,
        vmin=0,
        vmax=top,
        extent=extent,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
    )
    shown = "score / the layer's largest" if per == "layer" else "score"
    bar = ax.figure.colorbar(
        grid, ax=ax, label=shown + (f"\n(largest of {width} neighbours)" if width > 1 else "")
    )
    bar.formatter.set_powerlimits((-2, 3))
    ax.set_yticks(range(0, n_layers, math.ceil(n_layers / 12)))
    title = ": ".join(filter(None, (short_title(scores.method), scores.sequence_id))) or "Scores"
    return finished(ax, scores.units.one, "layer", title)


def neurons_by_layer(
    found: Mapping[str, NeuronSet], truth: NeuronSet | None = None, ax: Any = None
) -> Figure:
    """How many neurons of each set lie in each layer; with a truth also how many of them are true.

    Args:
        truth: the true neurons, for example those of an injection: grey bars.

    Raises:
        ValueError: no set, or sets of different shapes.

    >>> top = Attribution()(model, sequence).top_k(0.05, per="model")
    >>> neurons_by_layer({"attribution": top}).axes[0].get_title()
    'Where the found neurons lie'
    """
    if not found:
        raise ValueError(
            "found must hold at least one set, got none. Pass for example {'Hard Concrete': "
            "scores.top_k(0.01)}."
        )
    for one in found.values():
        if not isinstance(one, NeuronSet):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"found must hold sets of neurons, got {type(one).__name__}. Take some, as "
                "scores.top_k(0.01) does."
            )
    sets = [*found.values(), *([truth] if truth else [])]
    shapes, (units, *others) = (
        {tuple(one.mask.shape) for one in sets},
        sorted({one.units.name for one in sets}),
    )
    if len(shapes) > 1 or others:
        what = f"the shapes {sorted(shapes)} of {', '.join([units, *others])}"
        raise ValueError(f"found must hold sets of one model, got {what}. Localize in one model.")
    ax = axis(ax)
    layers = np.arange(next(iter(shapes))[0])
    if truth:
        ax.bar(
            layers, truth.mask.sum(1).numpy(), color="0.85", edgecolor="0.5", label="true", zorder=0
        )
        ax.text(0.01, 0.98, "bars: true", transform=ax.transAxes, va="top", fontsize=8, color="0.4")
    ends: Named = {}
    for (name, one), look in zip(found.items(), looks(found).values(), strict=True):
        counts = one.mask.sum(1).numpy()
        ax.plot(layers, counts, label=short_title(name), **style_of(look, line="-"))
        ends[short_title(name)] = float(layers[-1]), float(counts[-1]), look.colour
        if truth:
            hits = (one.mask & truth.mask).sum(1).numpy()
            ax.plot(
                layers,
                hits,
                label=f"{short_title(name)}, true",
                **style_of(look, line=":", fill="white"),
            )
            said = f"{short_title(name)}, true ({100 * one.recall_of(truth):.0f} % recall)"
            ends[said] = float(layers[-1]), float(hits[-1]), look.colour
    ax.set_xticks(layers[:: math.ceil(len(layers) / 12)])
    ax.set_ylim(bottom=0)
    title = f"Where the true and the found {units} lie" if truth else f"Where the found {units} lie"
    return finished(ax, "layer", units, title, named=ends, places=AT_END)


def memorization_by_repetition(models: Sequence[str] = REFERENCE_MODELS, ax: Any = None) -> Figure:
    """How well the reference models know the planted sequences, against how often they saw them in
    training.

    Filled: share of the sequences that count as memorized by the paper's criteria. Open: mean
    teacher-forced accuracy on the 48 suffix tokens, with standard errors over sequences.

    Raises:
        ValueError: a model that is not a shipped one.

    >>> memorization_by_repetition(["reference-gpt2"]).axes[0].get_xlabel()
    'repetitions in training'
    """
    for name in models:
        if name not in REFERENCE_MODELS:
            raise ValueError(
                f"models must be among {REFERENCE_MODELS}, got {name!r}. Only of these it is known "
                "what they saw."
            )
    ax = axis(ax)
    for name, look in zip(models, (LOOKS["hard_concrete"], LOOKS["zero_out"]), strict=False):
        record = json.loads((DATA / name / "memorized.json").read_text(encoding="utf-8"))
        groups: Any = pd.DataFrame(record["sequences"]).groupby("repetitions")
        passed = 100 * groups["passed"].mean()
        ax.plot(passed.index, passed, label=f"{name}: texts memorized", **style_of(look, line="-"))
        accuracy = {n: 100 * values for n, values in groups["accuracy"]}
        _line(
            ax,
            accuracy,
            label=f"{name}: suffix tokens right",
            **style_of(look, line=":", fill="white"),
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_ylim(-3, 104)
    title, y = "Memorization against repetition", "sequences memorized, suffix tokens right (%)"
    return finished(ax, "repetitions in training", y, title, legend="upper left")


def save_figure(figure: Figure, folder: str | Path, name: str) -> None:
    """Write NAME.png, for screens of high resolution, and NAME.svg, each whole or not at all.

    >>> save_figure(memorization_by_repetition(), folder, "memorization")
    >>> sorted(path.name for path in folder.iterdir())
    ['memorization.png', 'memorization.svg']
    """
    path = prepare_folder(folder)
    for suffix in ("png", "svg"):
        write_whole(path / f"{name}.{suffix}", drawn(figure, suffix, dpi=200, bbox_inches="tight"))


def _methods(frame: pd.DataFrame) -> Iterator[tuple[str, Look, Any]]:
    """The short title, the look and the rows of each method; the true rows are none."""
    methods = {
        str(name): part
        for name, part in frame[frame["method"] != TRUE_ROWS].groupby("method", sort=False)
    }
    return zip(map(short_title, methods), looks(methods).values(), methods.values(), strict=True)


def _point(ax: Any, across: pd.Series, up: pd.Series, **style: Any) -> tuple[float, float]:
    """Draw the means of two columns with their standard errors."""
    (x, x_error), (y, y_error) = mean_and_error(across), mean_and_error(up)
    ax.errorbar(x, y, xerr=x_error, yerr=y_error, **style)
    return x, y


def _line(ax: Any, values: Mapping[Any, pd.Series], **style: Any) -> tuple[float, float]:
    """Draw the means of some columns with their standard errors, each over its place on the axis;
    gives the last point.
    """
    means, errors = zip(*map(mean_and_error, values.values()), strict=True)
    ax.errorbar(list(values), means, yerr=errors, **style)
    return float(list(values)[-1]), means[-1]
