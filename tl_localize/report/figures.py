"""Figures by matplotlib (``pip install tl_localize[plots]``): each takes an axis, returns the figure, and reads well in black and white."""

from __future__ import annotations

import io
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from tl_localize.evals.del_benchmark import DelResults
from tl_localize.evals.inj_benchmark import TRUE_ROWS, InjResults, by_group
from tl_localize.models import REFERENCE_MODELS
from tl_localize.report.paper import TITLES
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.stats import mean_and_error
from tl_localize.execution.store import prepare_folder

MARKERS = "osD^vP*X<>hp"
LINES = ("-", "--", ":", "-.")


def own_against_foreign(results: InjResults, ax: Any = None) -> Any:
    """INJ with distractors: recall of the own rows against recall of the other sentences' rows, among the top 1x of each layer.

    One point per method with standard errors over groups (none for a single group), between three levels: knows nothing, knows what was
    altered but not by which sentence, the true rows. Left and up is better. Of several injection ratios the largest is drawn.

    Raises:
        ValueError: the results have no distractors.

    >>> from tl_localize import Activations, InjBenchmark, MemorizedSequence, load_model
    >>> from tl_localize.report.figures import own_against_foreign
    >>> model = load_model("reference")
    >>> texts = {"The": " blue list returns", "One": " module waits"}
    >>> two = [MemorizedSequence.from_text(model, *text, id=text[0]) for text in texts.items()]
    >>> results = InjBenchmark(model=model, sequences=two, ratio=0.02, distractors=1).run([Activations()])
    >>> own_against_foreign(results).axes[0].get_xlabel()
    "recall of the other sentence's rows (%)"
    """
    if not results.distractors:
        raise ValueError("results must be of INJ with distractors, got the form without. Run InjBenchmark(..., distractors=3).")
    ax = _axis(ax)
    used = results.frame[results.frame["converged"]]
    if not len(used):
        ax.set_title("INJ: no injection converged")
        return ax.figure
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
    groups = ((name, part) for (name,), part in used.groupby(["method"], sort=False) if name != TRUE_ROWS)
    for marker, (name, part) in zip(cycle(MARKERS), groups, strict=False):
        own, own_error = mean_and_error(100 * by_group(part, "recall"))
        foreign, foreign_error = mean_and_error(100 * by_group(part, "foreign_recall"))
        style = {"marker": marker, "markerfacecolor": "white", "color": "black", "linewidth": 1, "linestyle": "none"}
        ax.errorbar(foreign, own, xerr=foreign_error, yerr=own_error, label=_short(name), **style)
    others, distractors = ("sentence's", "1 distractor") if size == 2 else (f"{size - 1} sentences'", f"{size - 1} distractors")
    ax.set_xlabel(f"recall of the other {others} rows (%)")
    ax.set_ylabel("recall of the own rows (%)")
    ax.set_title(f"INJ with {distractors}, top {100 * ratio:g} % of each layer")
    ax.set_xlim(-4, max(60, 100 / size + 30))
    ax.set_ylim(-4, 104)
    ax.legend(loc="upper right", fontsize=8, frameon=False)
    return ax.figure


def recall_curve(results: InjResults, ax: Any = None) -> Any:
    """INJ: mean recall of each method against the share of each layer looked at, with standard errors over sentences.

    Several injection ratios are several lines of each method, solid, dashed and dotted from the smallest on, over a logarithmic axis.

    >>> from tl_localize import Activations, InjBenchmark, MemorizedSequence, load_model
    >>> from tl_localize.report.figures import recall_curve
    >>> model = load_model("reference")
    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> results = InjBenchmark(model=model, sequences=[sentence], ratio=0.03).run([Activations()])
    >>> recall_curve(results).axes[0].get_title()
    'INJ: 3 % of all rows trained'
    """
    ax = _axis(ax)
    used = results.frame[results.frame["converged"] & (results.frame["method"] != TRUE_ROWS)]
    injected = sorted(used["injection_ratio"].unique())
    for line, injection_ratio in zip(cycle(LINES), injected, strict=False):
        block = used[used["injection_ratio"] == injection_ratio]
        for marker, ((name,), part) in zip(cycle(MARKERS), block.groupby(["method"], sort=False), strict=False):
            points = [(100 * float(str(r)), *mean_and_error(100 * by_group(rows, "recall"))) for (r,), rows in part.groupby(["ratio"])]
            share, mean, error = zip(*points, strict=True)
            style = {"marker": marker, "markerfacecolor": "white", "color": "black", "linewidth": 1, "linestyle": line}
            ax.errorbar(share, mean, yerr=error, label=_short(name) if injection_ratio == injected[0] else None, **style)
    if len(injected) > 1:
        ax.set_xscale("log")
        ax.xaxis.minorticks_off()
    shares = sorted({100 * float(ratio) for ratio in used["ratio"].unique()})
    ax.set_xticks(shares, [f"{share:g}" for share in shares])
    ax.set_xlabel("top share of each layer (%)")
    ax.set_ylabel("recall of the injected rows (%)")
    trained = " and ".join(f"{100 * float(ratio):g} %" for ratio in injected)
    ax.set_title(f"INJ: {trained} of all rows trained" if injected else "INJ: no injection converged")
    ax.set_ylim(0, 104)
    if ax.get_legend_handles_labels()[0]:  # none where no injection converged
        ax.legend(fontsize=8, frameon=False)
    return ax.figure


def del_figures(results: DelResults, single_layers: Sequence[pd.DataFrame] = ()) -> dict[str, Any]:
    """The DEL figures by file name: the trade-off, each method's confusion matrix at the largest ratio, each single-layer run.

    >>> from tl_localize import Attribution, DelBenchmark, load_model
    >>> from tl_localize.report.figures import del_figures
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> model = load_model("reference")
    >>> few, text = reference_sequences(model)[:3], held_out_tokens()[:1]
    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> sorted(del_figures(results))
    ['del_confusion_attribution', 'del_confusion_random', 'del_forgetting']
    """
    figures = {"del_forgetting": forgetting(results)}
    largest = max(results.frame["ratio"])
    figures |= {f"del_confusion_{name}": confusion(results, name, ratio) for name, ratio in results.confusion if ratio == largest}
    return figures | {f"del_single_layer_{frame['method'].iloc[0]}": single_layer(frame) for frame in single_layers}


def forgetting(results: DelResults, ax: Any = None) -> Any:
    """DEL: accuracy that the target loses (Self) against what the other sequences lose (Neg), mean and standard error over targets.

    One line per method from the smallest ratio (white) to the largest (black). Left and up is better; on the diagonal nothing is localized.

    >>> from tl_localize import Attribution, DelBenchmark, load_model
    >>> from tl_localize.report.figures import forgetting
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> model = load_model("reference")
    >>> few, text = reference_sequences(model)[:3], held_out_tokens()[:1]
    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> forgetting(results).axes[0].get_title()
    'DEL: 5 % of each layer silenced'
    """
    ax = _axis(ax)
    frame = results.frame
    ratios = sorted(set(frame["ratio"]))
    reach = 0.0
    for marker, ((name,), part) in zip(cycle(MARKERS), frame.groupby(["method"], sort=False), strict=False):
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
    Black is the largest loss of any method and ratio in these results, so that their matrices can be compared.

    Raises:
        ValueError: the results do not hold this method and ratio.

    >>> from tl_localize import Attribution, DelBenchmark, load_model
    >>> from tl_localize.report.figures import confusion
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> model = load_model("reference")
    >>> few, text = reference_sequences(model)[:3], held_out_tokens()[:1]
    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> confusion(results, "attribution", 0.05).axes[0].get_title()
    'Attribution: top 5 % of each layer silenced'
    """
    matrix = results.confusion_by_category(method, ratio)
    matrix = 100 * matrix.loc[:, matrix.index]
    ax = _axis(ax, (6.5, 5.5))
    lowest = min(float(one.to_numpy(dtype=float).min()) for one in results.confusion.values())
    image = ax.imshow(matrix.to_numpy(), cmap="gray", vmin=min(100 * lowest, -1), vmax=0, interpolation="nearest")
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


def single_layer(frame: pd.DataFrame, ax: Any = None, *, first_layer: int = 0) -> Any:
    """DEL: the whole budget of neurons in one layer against a share in every layer, from ``DelBenchmark.run_single_layer``.

    Black is the target (Self), grey the others (Neg); horizontal lines are the share of every layer. Mean and standard error over targets.

    Args:
        first_layer: layers below it are not drawn; layer 0 often needs a scale on which nothing else can be read.

    >>> from tl_localize import Attribution, DelBenchmark, load_model
    >>> from tl_localize.report.figures import single_layer
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> model = load_model("reference")
    >>> few, text = reference_sequences(model)[:3], held_out_tokens()[:1]
    >>> frame = DelBenchmark(model, few, text, ratios=(0.02,), n_dev=0).run_single_layer(Attribution(), 0.02)
    >>> single_layer(frame, first_layer=1).axes[0].get_title()
    'Attribution: one layer against all, 150 neurons'
    """
    ax = _axis(ax)
    whole, single = frame[frame["layer"].isna()], frame[frame["layer"].ge(first_layer).fillna(False)]
    ratio, method = float(frame["ratio"].iloc[0]), str(frame["method"].iloc[0])
    for column, name, color in (("delta_self_accuracy", "Self", "black"), ("delta_neg_accuracy", "Neg", "0.55")):
        mean, error = mean_and_error(100 * whole[column])
        ax.axhline(mean, color=color, linestyle="--", linewidth=1.5, label=f"{name}, {100 * ratio:g} % of each layer")
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
    ax.set_title(f"{_short(method)}: one layer against all, {budget} neurons")
    ax.legend(fontsize=8, frameon=False)
    return ax.figure


def save_figure(figure: Any, folder: str | Path, name: str) -> None:
    """Write NAME.png and NAME.svg, each whole or not at all.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize.report.figures import memorization_by_repetition, save_figure
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_figure(memorization_by_repetition(), folder, "memorization")
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['memorization.png', 'memorization.svg']
    """
    path = prepare_folder(folder)
    for suffix in ("png", "svg"):
        temporary = path / f".{name}.{secrets.token_hex(4)}.{suffix}"
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

    class Shown(Figure):
        """Shows itself in a notebook; IPython draws matplotlib's own only where pyplot was imported."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=80)
            return buffer.getvalue()

    return Shown(figsize=size, layout="constrained").add_subplot()


# ---- scores, sets and the reference models -------------------------------------------------------------------------------

COLUMNS = 192  # of a score map; more neurons than that share a column


def score_map(scores: NeuronScores, ax: Any = None, *, per: Literal["layer", "model"] = "model") -> Any:
    """Scores over layers and neurons, dark is responsible; neighbours share a column, which shows the largest score among them.

    Args:
        per: what black means: the largest score of the whole model, or of each layer by itself. Scores below zero are white.

    Raises:
        ValueError: an unknown choice.

    >>> from tl_localize import Attribution, load_model
    >>> from tl_localize.report.figures import score_map
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> scores = Attribution()(model, reference_sequences(model)[0])
    >>> score_map(scores, per="layer").axes[0].get_ylabel()
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
    top = float(image.max())
    drawn = ax.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        cmap="Greys",
        vmin=0,
        vmax=top if top > 0 else 1,
        origin="lower",
        extent=(0, width * image.shape[1], -0.5, n_layers - 0.5),
    )
    shown = "score / the layer's largest" if per == "layer" else "score"
    bar = ax.figure.colorbar(drawn, ax=ax, label=shown + (f"\n(largest of {width} neighbours)" if width > 1 else ""))
    bar.formatter.set_powerlimits((-2, 3))
    _layer_ticks(ax.yaxis, n_layers)
    ax.set_xlabel("neuron")
    ax.set_ylabel("layer")
    ax.set_title(_about(scores))
    return ax.figure


def neurons_by_layer(found: Mapping[str, NeuronSet], truth: NeuronSet | None = None, ax: Any = None) -> Any:
    """How many neurons of each set lie in each layer; with a truth also how many of them are true.

    Args:
        found: sets by the names in the legend.
        truth: the true neurons, for example those of an injection: grey bars.

    Raises:
        ValueError: no set, or sets of different shapes.
        TypeError: scores in place of a set.

    >>> from tl_localize import Attribution, load_model
    >>> from tl_localize.report.figures import neurons_by_layer
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> scores = Attribution()(model, reference_sequences(model)[0])
    >>> neurons_by_layer({"attribution": scores.top_k(0.05, per="model")}).axes[0].get_title()
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
        line = {"color": "black", "marker": marker, "linewidth": 1}
        ax.plot(layers, one.mask.sum(1).numpy(), **line, markerfacecolor="white", label=_short(name))
        if truth:
            hits = (one.mask & truth.mask).sum(1).numpy()
            ax.plot(layers, hits, **line, linestyle=":", label=f"{_short(name)}, true ({100 * one.recall_of(truth):.0f} % recall)")
    _layer_ticks(ax.xaxis, len(layers))
    ax.set_xlabel("layer")
    ax.set_ylabel("neurons")
    ax.set_ylim(bottom=0)
    ax.set_title("Where the true and the found neurons lie" if truth else "Where the found neurons lie")
    ax.legend(fontsize=8, frameon=False)
    return ax.figure


def memorization_by_repetition(models: Sequence[str] = REFERENCE_MODELS, ax: Any = None) -> Any:
    """How well the reference models know the planted sequences, against how often they saw them in training.

    Filled: share of the sequences that count as memorized by the paper's criteria. Open: mean teacher-forced accuracy on the 48 suffix
    tokens, with standard errors over sequences.

    Raises:
        ValueError: a model that is not a shipped one.

    >>> from tl_localize.report.figures import memorization_by_repetition
    >>> memorization_by_repetition(["reference-gpt2"]).axes[0].get_xlabel()
    'repetitions in training'
    """
    for name in models:
        if name not in REFERENCE_MODELS:
            raise ValueError(f"models must be among {REFERENCE_MODELS}, got {name!r}. Only of these it is known what they saw.")
    ax = _axis(ax)
    for name, marker, style in zip(models, MARKERS, ("-", "--"), strict=False):
        record = json.loads((files("tl_localize") / "data" / name / "memorized.json").read_text(encoding="utf-8"))
        frame = pd.DataFrame(record["sequences"])
        groups = [(int(str(n)), part) for (n,), part in frame.groupby(["repetitions"])]
        counts = [n for n, _ in groups]
        line = {"color": "black", "marker": marker, "linestyle": style, "linewidth": 1}
        ax.plot(counts, [100 * part["passed"].mean() for _, part in groups], **line, label=f"{name}: memorized")
        mean, error = zip(*(mean_and_error(100 * part["accuracy"]) for _, part in groups), strict=True)
        ax.errorbar(counts, mean, yerr=error, **{**line, "color": "0.55"}, markerfacecolor="white", label=f"{name}: accuracy")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("repetitions in training")
    ax.set_ylabel("sequences memorized, suffix tokens right (%)")
    ax.set_ylim(-3, 104)
    ax.set_title("Memorization against repetition")
    ax.legend(loc="upper left", fontsize=8, frameon=False)
    return ax.figure


def _about(scores: NeuronScores) -> str:
    """Method and sequence, as a title."""
    method = TITLES.get(scores.method, scores.method).split(" (")[0]
    return ": ".join(filter(None, (method, scores.sequence_id))) or "Scores"


def _layer_ticks(axis: Any, n_layers: int) -> None:
    """Whole numbers, at most some ten of them."""
    axis.set_ticks(range(0, n_layers, math.ceil(n_layers / 12)))
