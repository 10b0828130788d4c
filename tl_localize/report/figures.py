"""Figures by matplotlib (``pip install tl_localize[plots]``): each takes an axis, returns the figure, and reads well in black and white."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import TRUE_ROWS, InjResults, by_group
from tl_localize.files import prepare_folder, write_whole
from tl_localize.models import REFERENCE_MODELS
from tl_localize.report.paper import short_title
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.stats import mean_and_error

MARKERS = "osD^vP*X<>hp"
LINES = ("-", "--", ":", "-.")
COLUMNS = 192  # of a score map; more neurons than that share a column
POINTS = "percentage points"


def target_against_distractors(results: InjResults, ax: Any = None) -> Any:
    """INJ with distractors: recall of the target's rows against recall of the distractors' rows, among the top 1x of each layer.

    There is one point per method, with standard errors over groups (none for a single group), and three levels: knows nothing, knows what
    was altered but not by which sentence, the true rows. Left and up is better. Of several injection ratios the largest is drawn.

    Raises:  ValueError: the results have no distractors.

    >>> two = [MemorizedSequence.from_text(model, *text, id=text[0]) for text in (("The", " blue list"), ("One", " module waits"))]
    >>> results = InjBenchmark(model=model, sequences=two, ratio=0.02, distractors=1).run([Activations()])
    >>> target_against_distractors(results).axes[0].get_xlabel()
    "recall of the distractor's rows (%)"
    """
    if not results.distractors:
        raise ValueError("results must be of INJ with distractors, got the form without. Run InjBenchmark(..., distractors=3).")
    ax = _axis(ax)
    used = results.frame[results.frame["converged"]]
    if not len(used):
        return _finished(ax, title="INJ: no injection converged")
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
        ax.annotate(text, (100 * other, 100 * level), textcoords="offset points", fontsize=8, color="0.3", **place)
    for marker, name, part in _methods(used):
        foreign, own = 100 * by_group(part, "foreign_recall"), 100 * by_group(part, "recall")
        _point(ax, foreign, own, label=short_title(name), **_style(marker, line="none"))
    ax.set(xlim=(-4, max(60, 100 / size + 30)), ylim=(-4, 104))
    rows = "the distractor's rows" if size == 2 else f"the {size - 1} distractors' rows"
    title = f"INJ with {size - 1} distractor{'s' if size > 2 else ''}, top {100 * ratio:g} % of each layer"
    return _finished(ax, f"recall of {rows} (%)", "recall of the target's rows (%)", title, legend="upper right")


def recall_curve(results: InjResults, ax: Any = None) -> Any:
    """INJ: mean recall of each method against the share of each layer looked at, with standard errors over sentences.

    Several injection ratios are several lines of each method, solid, dashed and dotted from the smallest on, over a logarithmic axis.

    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> results = InjBenchmark(model=model, sequences=[sentence], ratio=0.03).run([Activations()])
    >>> recall_curve(results).axes[0].get_title()
    'INJ: 3 % of all rows trained'
    """
    ax = _axis(ax)
    used: Any = results.frame[results.frame["converged"] & (results.frame["method"] != TRUE_ROWS)]
    injected = sorted(used["injection_ratio"].unique())
    for line, injection_ratio in zip(cycle(LINES), injected, strict=False):
        for marker, name, part in _methods(used[used["injection_ratio"] == injection_ratio]):
            recalls = {100 * ratio: 100 * by_group(rows, "recall") for ratio, rows in part.groupby("ratio")}
            label = short_title(name) if injection_ratio == injected[0] else None
            _line(ax, recalls, label=label, **_style(marker, line=line))
    if len(injected) > 1:
        ax.set_xscale("log")
        ax.xaxis.minorticks_off()
    shares = sorted(100 * used["ratio"].unique())
    ax.set_xticks(shares, [f"{share:g}" for share in shares])
    ax.set_ylim(0, 104)
    trained = " and ".join(f"{100 * ratio:g} %" for ratio in injected)
    title = f"INJ: {trained} of all rows trained" if injected else "INJ: no injection converged"
    return _finished(ax, "top share of each layer (%)", "recall of the injected rows (%)", title, legend="best" if injected else None)


def del_figures(results: DelResults) -> dict[str, Any]:
    """The DEL figures by file name: the trade-off, each method's confusion matrix at the largest ratio, each single-layer run.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> sorted(del_figures(results))
    ['del_confusion_attribution', 'del_confusion_random', 'del_forgetting']
    """
    largest = max(results.frame["ratio"])
    confusions = {f"del_confusion_{name}": confusion(results, name, ratio) for name, ratio in results.confusion if ratio == largest}
    layers = {f"del_single_layer_{name}": single_layer(frame) for name, frame in results.single_layer.items()}
    return {"del_forgetting": forgetting(results), **confusions, **layers}


def forgetting(results: DelResults, ax: Any = None) -> Any:
    """DEL: accuracy that the target loses (Self) against what the other sequences lose (Neg), mean and standard error over targets.

    One line per method from the smallest ratio (white) to the largest (black). Left and up is better; on the diagonal nothing is localized.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> forgetting(results).axes[0].get_title()
    'DEL: 5 % of each layer ablated'
    """
    ax = _axis(ax)
    ratios = sorted(set(results.frame["ratio"]))
    fills = [*(["white"] if len(ratios) > 1 else []), *["0.6"] * (len(ratios) - 2), "black"]
    reach = 0.0
    for marker, name, part in _methods(results.frame):
        points: list[tuple[float, float]] = []
        for ratio, fill in zip(ratios, fills, strict=True):
            rows = part[part["ratio"] == ratio]
            style = _style(marker, line="none", fill=fill, width=0.8) | {"zorder": 2}
            label = short_title(name) if ratio == ratios[-1] else None
            others, target = -100 * rows["delta_neg_accuracy"], -100 * rows["delta_self_accuracy"]
            points.append(_point(ax, others, target, label=label, **style))
        ax.plot(*zip(*points, strict=True), color="0.6", linewidth=0.8, zorder=1)
        reach = max(reach, *(x for x, _ in points))
    ax.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0)
    ax.set_xlim(left=min(-0.05 * reach, ax.get_xlim()[0]))
    shares = " to ".join(f"{100 * ratio:g} %" for ratio in sorted({ratios[0], ratios[-1]}))
    title = f"DEL: {shares} of each layer ablated" + (" (white to black)" if len(ratios) > 1 else "")
    others, target = f"accuracy lost on the other sequences, Neg ({POINTS})", f"accuracy lost on the target, Self ({POINTS})"
    return _finished(ax, others, target, title, legend="best")


def confusion(results: DelResults, method: str, ratio: float, ax: Any = None) -> Any:
    """DEL: change of accuracy of each target (column) when another's neurons are ablated (row), grouped by category.

    The darker, the more is forgotten; a method that finds neurons of the target alone darkens the diagonal alone. What rises is white.
    Black is the largest loss of any method and ratio in these results, so that their matrices can be compared.

    Raises:  ValueError: the results do not hold this method and ratio.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> confusion(results, "attribution", 0.05).axes[0].get_title()
    'Attribution: top 5 % of each layer ablated'
    """
    matrix = results.confusion_by_category(method, ratio)
    matrix = 100 * matrix.loc[:, matrix.index]
    ax = _axis(ax, (6.5, 5.5))
    lowest = min(float(one.to_numpy(dtype=float).min()) for one in results.confusion.values())
    image = ax.imshow(matrix.to_numpy(), cmap="gray", vmin=min(100 * lowest, -1), vmax=0, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=f"change of accuracy ({POINTS})")
    groups = matrix.index.get_level_values("category")
    starts = [i for i in range(len(groups)) if i == 0 or groups[i] != groups[i - 1]]
    for start in starts[1:]:
        ax.axhline(start - 0.5, color="0.5", linewidth=0.6)
        ax.axvline(start - 0.5, color="0.5", linewidth=0.6)
    centres = [(start + end - 1) / 2 for start, end in zip(starts, [*starts[1:], len(groups)], strict=True)]
    names = [str(groups[start]).replace("_", " ") for start in starts]
    ax.set_xticks(centres, names, rotation=45, ha="right", fontsize=8)
    ax.set_yticks(centres, names, fontsize=8)
    title = f"{short_title(method)}: top {100 * ratio:g} % of each layer ablated"
    return _finished(ax, f"measured sequence ({len(groups)}, by category)", "sequence whose neurons are ablated", title)


def single_layer(frame: pd.DataFrame, ax: Any = None, *, first_layer: int = 0) -> Any:
    """DEL: the whole budget of neurons in one layer against a share in every layer, from ``DelBenchmark.run_single_layer``.

    Black is the target (Self), grey the others (Neg); horizontal lines are the largest share of every layer. Mean and standard error over
    targets.

    Args:  first_layer: layers below it are not drawn; layer 0 often needs a scale on which nothing else can be read.

    >>> frame = DelBenchmark(model, few, text, ratios=(0.02,), n_dev=0).run_single_layer(Attribution(), 0.02)
    >>> single_layer(frame, first_layer=1).axes[0].get_title()
    'Attribution: 153 neurons of one layer, 150 of all'
    """
    ax = _axis(ax)
    frame = frame[frame["ratio"] == frame["ratio"].max()]
    whole: Any = frame[frame["layer"].isna()]
    single: Any = frame[frame["layer"].ge(first_layer).fillna(False)]
    ratio, method = float(frame["ratio"].iloc[0]), str(frame["method"].iloc[0])
    for column, name, color in (("delta_self_accuracy", "Self", "black"), ("delta_neg_accuracy", "Neg", "0.55")):
        mean, error = mean_and_error(100 * whole[column])
        ax.axhline(mean, color=color, linestyle="--", linewidth=1.5, label=f"{name}, {100 * ratio:g} % of each layer")
        ax.axhspan(mean - error, mean + error, color=color, alpha=0.12, linewidth=0)
        for marker, (factor, part) in zip("os^v", single.groupby("multiple"), strict=False):
            changes = {layer: 100 * rows[column] for layer, rows in part.groupby("layer")}
            style = _style(marker, color=color, fill="white" if factor == 1 else color)
            _line(ax, changes, label=f"{name}, one layer, {factor} x the budget", **style)
    ax.set_xticks(sorted(single["layer"].unique()))
    counts = [round(part["n_neurons"].mean()) for part in (whole, single[single["multiple"] == 1])]
    title = f"{short_title(method)}: {counts[1]} neurons of one layer, {counts[0]} of all"
    return _finished(ax, "layer whose neurons are ablated", f"change of accuracy ({POINTS})", title, legend="best")


def score_map(scores: NeuronScores, ax: Any = None, *, per: Literal["layer", "model"] = "model") -> Any:
    """Scores over layers and neurons, dark is responsible; neighbours share a column, which shows the largest score among them.

    Args:  per: what black means: the largest score of the whole model, or of each layer by itself. Scores below zero are white.

    >>> score_map(Attribution()(model, sequence), per="layer").axes[0].get_ylabel()
    'layer'
    """
    if not isinstance(scores, NeuronScores):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"scores must be NeuronScores, got {type(scores).__name__}. Draw sets with neurons_by_layer.")
    if per not in ("layer", "model"):
        raise ValueError(f"per must be 'layer' or 'model', got {per!r}. 'model' compares the layers with each other.")
    ax = _axis(ax)
    n_layers, n_neurons = scores.values.shape
    width = math.ceil(n_neurons / COLUMNS)
    padded = np.pad(scores.values.numpy(), ((0, 0), (0, -n_neurons % width)), constant_values=-np.inf)
    image = padded.reshape(n_layers, -1, width).max(-1)
    if per == "layer":
        image = image / np.maximum(image.max(1, keepdims=True), np.finfo(np.float32).tiny)
    top, extent = float(image.max()), (0, width * image.shape[1], -0.5, n_layers - 0.5)
    style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "lower", "cmap": "Greys"}
    drawn = ax.imshow(image, vmin=0, vmax=top if top > 0 else 1, extent=extent, **style)
    shown = "score / the layer's largest" if per == "layer" else "score"
    bar = ax.figure.colorbar(drawn, ax=ax, label=shown + (f"\n(largest of {width} neighbours)" if width > 1 else ""))
    bar.formatter.set_powerlimits((-2, 3))
    ax.set_yticks(range(0, n_layers, math.ceil(n_layers / 12)))
    title = ": ".join(filter(None, (short_title(scores.method), scores.sequence_id))) or "Scores"
    return _finished(ax, "neuron", "layer", title)


def neurons_by_layer(found: Mapping[str, NeuronSet], truth: NeuronSet | None = None, ax: Any = None) -> Any:
    """How many neurons of each set lie in each layer; with a truth also how many of them are true.

    Args:    truth: the true neurons, for example those of an injection: grey bars.
    Raises:  ValueError: no set, or sets of different shapes.

    >>> top = Attribution()(model, sequence).top_k(0.05, per="model")
    >>> neurons_by_layer({"attribution": top}).axes[0].get_title()
    'Where the found neurons lie'
    """
    if not found:
        raise ValueError("found must hold at least one set, got none. Pass for example {'Hard Concrete': scores.top_k(0.01)}.")
    for one in found.values():
        if not isinstance(one, NeuronSet):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"found must hold sets of neurons, got {type(one).__name__}. Take some, as scores.top_k(0.01) does.")
    shapes = {tuple(one.mask.shape) for one in (*found.values(), *([truth] if truth else []))}
    if len(shapes) > 1:
        raise ValueError(f"found must hold sets of one model, got the shapes {sorted(shapes)}. Localize in one model.")
    ax = _axis(ax)
    layers = np.arange(next(iter(shapes))[0])
    if truth:
        ax.bar(layers, truth.mask.sum(1).numpy(), color="0.85", edgecolor="0.5", label="true", zorder=0)
    for marker, (name, one) in zip(cycle(MARKERS), found.items(), strict=False):
        ax.plot(layers, one.mask.sum(1).numpy(), label=short_title(name), **_style(marker))
        if truth:
            label = f"{short_title(name)}, true ({100 * one.recall_of(truth):.0f} % recall)"
            ax.plot(layers, (one.mask & truth.mask).sum(1).numpy(), label=label, **_style(marker, line=":", fill="black"))
    ax.set_xticks(layers[:: math.ceil(len(layers) / 12)])
    ax.set_ylim(bottom=0)
    title = "Where the true and the found neurons lie" if truth else "Where the found neurons lie"
    return _finished(ax, "layer", "neurons", title, legend="best")


def memorization_by_repetition(models: Sequence[str] = REFERENCE_MODELS, ax: Any = None) -> Any:
    """How well the reference models know the planted sequences, against how often they saw them in training.

    Filled: share of the sequences that count as memorized by the paper's criteria. Open: mean teacher-forced accuracy on the 48 suffix
    tokens, with standard errors over sequences.

    Raises:  ValueError: a model that is not a shipped one.

    >>> memorization_by_repetition(["reference-gpt2"]).axes[0].get_xlabel()
    'repetitions in training'
    """
    for name in models:
        if name not in REFERENCE_MODELS:
            raise ValueError(f"models must be among {REFERENCE_MODELS}, got {name!r}. Only of these it is known what they saw.")
    ax = _axis(ax)
    for name, marker, line in zip(models, MARKERS, LINES, strict=False):
        record = json.loads((files("tl_localize") / "data" / name / "memorized.json").read_text(encoding="utf-8"))
        groups: Any = pd.DataFrame(record["sequences"]).groupby("repetitions")
        passed = 100 * groups["passed"].mean()
        ax.plot(passed.index, passed, label=f"{name}: memorized", **_style(marker, line=line, fill="black"))
        accuracy = {n: 100 * values for n, values in groups["accuracy"]}
        _line(ax, accuracy, label=f"{name}: accuracy", **_style(marker, line=line, color="0.55"))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_ylim(-3, 104)
    title, y = "Memorization against repetition", "sequences memorized, suffix tokens right (%)"
    return _finished(ax, "repetitions in training", y, title, legend="upper left")


def save_figure(figure: Any, folder: str | Path, name: str) -> None:
    """Write NAME.png and NAME.svg, each whole or not at all.

    >>> save_figure(memorization_by_repetition(), folder, "memorization")
    >>> sorted(path.name for path in folder.iterdir())
    ['memorization.png', 'memorization.svg']
    """
    path = prepare_folder(folder)
    for suffix in ("png", "svg"):
        write_whole(path / f"{name}.{suffix}", _drawn(figure, suffix, dpi=150, bbox_inches="tight"))


def _drawn(figure: Any, suffix: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, **settings)
    return buffer.getvalue()


def _axis(ax: Any, size: tuple[float, float] = (6, 4.5)) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'tl_localize[plots]'.") from error

    class Shown(Figure):
        """A figure that a notebook shows: IPython draws matplotlib's own figures only where pyplot was imported."""

        def _repr_png_(self) -> bytes:
            return _drawn(self, "png", dpi=80)

    return Shown(figsize=size, layout="constrained").add_subplot()


def _methods(frame: pd.DataFrame) -> Iterator[tuple[str, str, Any]]:
    """A marker, the name and the rows of each method; the true rows are none."""
    methods = frame[frame["method"] != TRUE_ROWS].groupby("method", sort=False)
    return ((marker, str(name), part) for marker, (name, part) in zip(cycle(MARKERS), methods, strict=False))


def _point(ax: Any, across: pd.Series, up: pd.Series, **style: Any) -> tuple[float, float]:
    """Draw the means of two columns with their standard errors."""
    (x, x_error), (y, y_error) = mean_and_error(across), mean_and_error(up)
    ax.errorbar(x, y, xerr=x_error, yerr=y_error, **style)
    return x, y


def _line(ax: Any, values: Mapping[Any, pd.Series], **style: Any) -> None:
    """Draw the means of some columns with their standard errors, each over its place on the axis."""
    means, errors = zip(*map(mean_and_error, values.values()), strict=True)
    ax.errorbar(list(values), means, yerr=errors, **style)


def _style(marker: str, *, line: str = "-", color: str = "black", fill: str = "white", width: float = 1) -> dict[str, Any]:
    return {"marker": marker, "markerfacecolor": fill, "color": color, "linestyle": line, "linewidth": width}


def _finished(ax: Any, x: str = "", y: str = "", title: str = "", legend: str | None = None) -> Any:
    """The axis' figure, with labels, a title and a legend at a place of matplotlib's."""
    ax.set(xlabel=x, ylabel=y, title=title)
    if legend:
        ax.legend(loc=legend, fontsize=8, frameon=False)
    return ax.figure
