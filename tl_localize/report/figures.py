"""Figures by matplotlib (``pip install matplotlib``): each returns the figure, and draws
into an axis that it is given.

A method has one colour and one marker in all of them (``report.looks``). A legend stands to the
right, where it covers nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tl_localize.evals.del_results import PRICES, DelResults
from tl_localize.evals.inj_results import TRUE_ROWS, InjResults, by_group
from tl_localize.files import prepare_folder, write_whole
from tl_localize.models import REFERENCE_MODELS
from tl_localize.neurons import Real
from tl_localize.reference import DATA
from tl_localize.report.looks import LOOKS, Look, axes, drawn, finish, looks, with_legend
from tl_localize.report.paper import short_title
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.stats import mean_and_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SELF = "Self: accuracy lost on the target (percentage points)"
NEG = "Neg: accuracy lost on the other sequences\n(percentage points; better: up and left)"
NAMED = 3  # neurons of each layer that a score map names
TOP = 0.01  # share of a layer's neurons that a score map draws apart
GONE = -50  # points of Neg: a layer that costs so much destroys the model, and is named, not drawn


def target_against_distractors(results: InjResults, ax: Axes | None = None) -> Figure:
    """INJ with distractors: recall of the target's rows against recall of the distractors' rows,
    among the top 1x of each layer.

    There is one point per method, with standard errors over groups (none for a single group), and
    three levels: knows nothing, knows what was altered but not by which sentence, the true rows.
    Left and up is better. Of several injection ratios the largest is drawn.

    Raises:
        ValueError: the results have no distractors.

    >>> texts = ("The", " blue list"), ("One", " module waits")
    >>> two = [MemorizedSequence.from_text(model, *text, id=text[0]) for text in texts]
    >>> benchmark = InjBenchmark(model=model, sequences=two, ratio=0.02, distractors=1)
    >>> target_against_distractors(benchmark.run([Activations()])).axes[0].get_xlabel()
    "recall of the distractor's rows (%)"
    """
    if not results.distractors:
        raise ValueError(
            "results must be of INJ with distractors, got the form without. Run InjBenchmark(..., "
            "distractors=3)."
        )
    (panel,) = axes(1, ax)
    used = results.frame[results.frame["converged"]]
    if not len(used):
        finish(panel, "", "", "INJ: no injection converged")
        return with_legend([panel])
    ratio = float(used["injection_ratio"].max())
    used = used[(used["injection_ratio"] == ratio) & (used["multiple"] == used["multiple"].min())]
    size = int(used.groupby("group")["sequence_id"].nunique().max())
    for method, look, part in _methods(used):
        foreign, own = 100 * by_group(part, "foreign_recall"), 100 * by_group(part, "recall")
        _point(panel, foreign, own, label=method, **look.style())
    panel.plot([0, 100], [0, 100], color="0.8", linewidth=1, zorder=0)
    levels = {"knows nothing": (ratio, ratio), "knows what was altered": (1 / size, 1 / size)}
    levels["the true rows"] = (0, 1)
    for (name, (x, y)), marker in zip(levels.items(), "123", strict=True):
        panel.plot(100 * x, 100 * y, f"k{marker}", markersize=10, label=name, zorder=0)
    panel.set(xlim=(-4, max(60, 100 / size + 30)), ylim=(-4, 104))
    others = "the distractor's rows" if size == 2 else f"the {size - 1} distractors' rows"
    finish(
        panel,
        f"recall of {others} (%)",
        "recall of the target's rows (%)",
        f"INJ with distractors, top {100 * ratio:g} % of each layer",
    )
    return with_legend([panel])


def recall_curve(results: InjResults, ax: Axes | None = None) -> Figure:
    """INJ: mean recall of each method against the share of each layer looked at, with standard
    errors over sentences.

    Several injection ratios are panels side by side; into a given axis the largest is drawn.

    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.03)
    >>> recall_curve(benchmark.run([Activations()])).axes[0].get_title()
    'INJ: 3 % of all rows trained'
    """
    used: Any = results.frame[results.frame["converged"]]
    injected = sorted(used["injection_ratio"].unique())
    panels = axes(max(1, len(injected)), ax)
    if not injected:
        finish(panels[0], "", "", "INJ: no injection converged")
    for panel, injection_ratio in zip(panels, injected[-len(panels) :], strict=False):
        some = used[used["injection_ratio"] == injection_ratio]
        for method, look, part in _methods(some):
            recalls = {
                100 * ratio: 100 * by_group(rows, "recall") for ratio, rows in part.groupby("ratio")
            }
            _line(panel, recalls, label=method, **look.style("-"))
        shares = sorted(100 * some["ratio"].unique())
        panel.set_xticks(shares, [f"{share:g}" for share in shares])
        panel.set_ylim(0, 104)
        finish(
            panel,
            "top share of each layer (%)",
            "recall of the injected rows (%)",
            f"INJ: {100 * injection_ratio:g} % of all rows trained",
        )
    return with_legend(panels)


def del_figures(results: DelResults, layers: pd.DataFrame | None = None) -> dict[str, Figure]:
    """The DEL figures by file name: what is forgotten, at which price, the confusion matrices at
    the largest ratio, each method of a ``SingleLayerStudy``, whose frame ``layers`` is.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> sorted(del_figures(results))
    ['del_confusion', 'del_forgetting', 'del_prices']
    """
    figures = {
        "del_forgetting": forgetting(results),
        "del_prices": prices(results),
        "del_confusion": confusion(results),
    }
    if layers is not None and len(layers):
        for name, frame in layers.groupby("method"):
            figures[f"del_single_layer_{name}"] = single_layer(frame)
    return figures


def forgetting(results: DelResults, ax: Axes | None = None) -> Figure:
    """DEL: accuracy that the target loses (Self) against what the other sequences lose (Neg), mean
    and standard error over targets.

    One panel per ratio; into a given axis the largest is drawn. Left and up is better. Both axes
    are in percentage points and reach from zero to one at least; on the grey line the target loses
    what others lose, so nothing is localized.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> forgetting(results).axes[0].get_title()
    'DEL: top 5 % of each layer ablated'
    """
    ratios = sorted(set(results.frame["ratio"]))
    panels = axes(len(ratios), ax)
    for panel, ratio in zip(panels, ratios[-len(panels) :], strict=True):
        for method, look, rows in _methods(results.frame[results.frame["ratio"] == ratio]):
            others, target = -100 * rows["delta_neg_accuracy"], -100 * rows["delta_self_accuracy"]
            _point(panel, others, target, label=method, **look.style())
        panel.update_datalim([(0, 0), (1, 1)])  # less than a point is not drawn as if it were much
        panel.margins(0.1)
        panel.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0, label="Self = Neg")
        finish(panel, NEG, SELF, f"DEL: top {100 * ratio:g} % of each layer ablated")
    return with_legend(panels)


def prices(results: DelResults, ax: Axes | None = None) -> Figure:
    """DEL: Self against Neg of each method as more is ablated, from nothing through all ratios; at
    one Neg, higher is better.

    Means over the targets that a method has at all ratios, with standard errors; grey lines are the
    prices of ``DelResults.at_price``. Several models or ablations are panels side by side; into a
    given axis the last is drawn.

    >>> results = DelBenchmark(model, few, text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> prices(results).axes[0].get_title()
    'DEL: what is forgotten at which price'
    """
    curves = list(results.curve().groupby(["model", "ablation"], sort=False))
    panels = axes(len(curves), ax, (5.4, 4.6))
    for panel, (key, curve) in zip(panels, curves[-len(panels) :], strict=True):
        for method, look, rows in _methods(curve):
            others, target = np.append(0, -rows["neg"]), np.append(0, -rows["self"])
            across, up = np.append(0, rows["neg_error"]), np.append(0, rows["self_error"])
            style = look.style("-")
            panel.errorbar(others, target, up, across, elinewidth=0.6, label=method, **style)
        for price in PRICES:
            if price < panel.get_xlim()[1]:
                panel.axvline(price, color="0.85", linewidth=1, zorder=0)
        title = "DEL: what is forgotten at which price"
        for name in key if len(curves) > 1 else ():
            title += f", {name}"
        finish(panel, NEG, SELF, title)
    return with_legend(panels)


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
    reach = max(1.0, *(float(matrix.abs().max().max()) for matrix in matrices.values()))
    order = max((matrix.index for matrix in matrices.values()), key=len)
    panels = axes(len(matrices), size=(3.0, 3.9))
    for panel, (name, matrix) in zip(panels, matrices.items(), strict=True):
        image = matrix.reindex(index=order, columns=order).to_numpy()
        panel.imshow(image, "PuOr", vmin=-reach, vmax=reach, interpolation="nearest")
        finish(panel, "", "", short_title(name))
        _mark_categories(panel, order.get_level_values("category"))
        panel.label_outer()
    figure: Any = panels[0].figure
    label = "change of accuracy (percentage points)"
    figure.colorbar(panels[0].images[0], ax=panels, label=label)
    figure.supxlabel("measured sequence", fontsize=10)
    figure.supylabel("sequence whose neurons are ablated", fontsize=10)
    figure.suptitle(f"DEL: top {100 * ratio:g} % of each layer ablated; {len(order)} sequences")
    return figure


def _mark_categories(panel: Axes, categories: pd.Index) -> None:
    """Lines between the categories of a matrix, and their names at the middle of each."""
    middles: dict[str, float] = {}
    for name in categories.unique():
        places = np.flatnonzero(categories == name)
        middles[str(name).replace("_", " ")] = places.mean()
        if places[0]:
            panel.axhline(places[0] - 0.5, color="0.8", linewidth=0.5)
            panel.axvline(places[0] - 0.5, color="0.8", linewidth=0.5)
    panel.set_xticks(list(middles.values()), list(middles), rotation=90, fontsize=9)
    panel.set_yticks(list(middles.values()), list(middles), fontsize=9)


def single_layer(frame: pd.DataFrame, ax: Axes | None = None, *, first_layer: int = 0) -> Figure:
    """DEL: the whole budget of neurons in one layer against a share in every layer, from
    ``SingleLayerStudy``.

    The method's colour is the target (Self), grey the others (Neg); bands are the largest share of
    every layer. Mean and standard error over targets. A layer that costs the others more than half
    their accuracy is named below instead of drawn, since its scale would hide all others.

    Args:
        first_layer: layers below it are left out.

    >>> frame = SingleLayerStudy(model, few, text, ratios=(0.02,), n_dev=0).run([Attribution()])
    >>> single_layer(frame, first_layer=1).axes[0].get_title()
    'Attribution: 153 neurons of one layer, 150 of all'
    """
    (panel,) = axes(1, ax, (6.0, 4.6))
    frame = frame[frame["ratio"] == frame["ratio"].max()]
    whole: Any = frame[frame["layer"].isna()]
    single: Any = frame[frame["layer"].ge(first_layer).fillna(False)]
    columns = ["delta_self_accuracy", "delta_neg_accuracy"]
    means = 100 * single.groupby(["layer", "multiple"])[columns].mean()
    gone = means[means["delta_neg_accuracy"] < GONE]
    if len(gone) == len(means):  # nothing would be left to draw
        gone = means.iloc[:0]
    ratio, method = float(frame["ratio"].iloc[0]), str(frame["method"].iloc[0])
    colours = {"Self": looks([method])[method].colour, "Neg": "0.55"}
    for (name, colour), column in zip(colours.items(), columns, strict=True):
        mean, error = mean_and_error(100 * whole[column])
        label = f"{name}, {100 * ratio:g} % of each layer"
        panel.axhline(mean, color=colour, linestyle="--", linewidth=1.2, label=label)
        panel.axhspan(mean - error, mean + error, color=colour, alpha=0.12, linewidth=0)
        for marker, (factor, part) in zip("os^vD", single.groupby("multiple"), strict=False):
            changes = {
                layer: 100 * rows[column]
                for layer, rows in part.groupby("layer")
                if (layer, factor) not in gone.index
            }
            style = Look(colour, marker).style("-", filled=factor != 1)
            _line(panel, changes, label=f"{name}, one layer, {factor} x the budget", **style)
    panel.set_xticks(sorted(single["layer"].unique()))
    x = "layer whose neurons are ablated"
    for (layer, factor), (own, neg) in gone.iterrows():
        x += f"\nbelow the scale: layer {layer}, {factor} x: Self {own:.0f}, Neg {neg:.0f}"
    one, all_layers = (
        round(part["n_neurons"].mean()) for part in (single[single["multiple"] == 1], whole)
    )
    title = f"{short_title(method)}: {one} neurons of one layer, {all_layers} of all"
    finish(panel, x, "change of accuracy (percentage points)", title)
    return with_legend([panel])


def score_map(scores: NeuronScores, ax: Axes | None = None) -> Figure:
    """In which layers the scores lie: each layer's share of the total of all positive scores, the
    part that its top 1 % of neurons has, and the names of its best neurons. Layers in which the
    method did not choose are left out.

    >>> score_map(Attribution()(model, sequence)).axes[0].get_ylabel()
    'layer'
    """
    if not isinstance(scores, NeuronScores):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"scores must be NeuronScores, got {type(scores).__name__}. Draw sets with "
            "neurons_by_layer."
        )
    start = scores.first_layer or 0
    values, best = scores.values[start:].clamp(min=0).sort(descending=True, stable=True)
    n_layers, n_neurons = values.shape
    (panel,) = axes(1, ax, (5.4, max(2.6, 0.24 * n_layers + 1.2)))
    shares = 100 * values.numpy() / max(float(values.sum()), np.finfo(np.float32).tiny)
    n_top = max(1, round(TOP * n_neurons))
    top, rest = shares[:, :n_top].sum(1), shares[:, n_top:].sum(1)
    colour, one = looks([scores.method])[scores.method].colour, scores.units.one
    layers, many = range(start, start + n_layers), scores.units.name
    panel.barh(layers, top, color=colour, label=f"its best {n_top} {many if n_top > 1 else one}")
    panel.barh(layers, rest, left=top, color=colour, alpha=0.35, label=f"its other {many}")
    for layer, end, neurons in zip(layers, top + rest, best[:, :NAMED].tolist(), strict=True):
        panel.annotate(
            ", ".join(map(str, neurons)),
            (end, layer),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    panel.margins(x=0.35)
    panel.invert_yaxis()
    panel.set_yticks(layers[:: n_layers // 13 + 1])
    title = ": ".join(filter(None, (short_title(scores.method), scores.sequence_id))) or "Scores"
    finish(panel, f"share of all scores (%), and the best {many}", "layer", title)
    return with_legend([panel])


def neurons_by_layer(
    found: Mapping[str, NeuronSet], truth: NeuronSet | None = None, ax: Axes | None = None
) -> Figure:
    """How many neurons of each set lie in each layer; with a truth also how many of them are true.

    Args:
        truth: the true neurons, for example those of an injection: grey bars.

    Raises:
        ValueError: no set, or sets of different models or units.

    >>> top = Attribution()(model, sequence).top_k(0.05, per="model")
    >>> neurons_by_layer({"attribution": top}).axes[0].get_title()
    'Where the found neurons lie'
    """
    if not found:
        raise ValueError(
            "found must hold at least one set, got none. Pass for example {'Hard Concrete': "
            "scores.top_k(0.01)}."
        )
    (panel,) = axes(1, ax)
    union = next(iter(found.values()))
    for one in [*found.values(), *([truth] if truth else [])]:
        if not isinstance(one, NeuronSet):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"found must hold sets of neurons, got {type(one).__name__}. Take some, as "
                "scores.top_k(0.01) does."
            )
        union = union | one  # raises where they are not of one model
    units, layers = union.units.name, np.arange(len(union.mask))
    if truth:
        counts = truth.mask.sum(1).numpy()
        panel.bar(layers, counts, color="0.85", edgecolor="0.5", label="true", zorder=0)
    for (name, one), look in zip(found.items(), looks(found).values(), strict=True):
        label = short_title(name)
        panel.plot(layers, one.mask.sum(1).numpy(), label=label, **look.style("-"))
        if truth:
            hits = (one.mask & truth.mask).sum(1).numpy()
            label += f", true ({100 * one.recall_of(truth):.0f} % recall)"
            panel.plot(layers, hits, label=label, **look.style(":", filled=False))
    panel.set_xticks(layers[:: len(layers) // 13 + 1])
    panel.set_ylim(bottom=0)
    which = "true and the found" if truth else "found"
    finish(panel, "layer", units, f"Where the {which} {units} lie")
    return with_legend([panel])


def memorization_by_repetition(
    models: Sequence[str] = REFERENCE_MODELS, ax: Axes | None = None
) -> Figure:
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
    (panel,) = axes(1, ax)
    for name, look in zip(models, (LOOKS["hard_concrete"], LOOKS["zero_out"]), strict=False):
        record = json.loads((DATA / name / "memorized.json").read_text(encoding="utf-8"))
        groups: Any = pd.DataFrame(record["sequences"]).groupby("repetitions")
        passed = 100 * groups["passed"].mean()
        panel.plot(passed.index, passed, label=f"{name}: texts memorized", **look.style("-"))
        accuracy = {n: 100 * values for n, values in groups["accuracy"]}
        style = look.style(":", filled=False)
        _line(panel, accuracy, label=f"{name}: suffix tokens right", **style)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_ylim(-3, 104)
    y = "sequences memorized, suffix tokens right (%)"
    finish(panel, "repetitions in training", y, "Memorization against repetition")
    return with_legend([panel])


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
    """The short title, the look and the rows of each method; the true rows are no method."""
    names = [name for name in frame["method"].unique() if name != TRUE_ROWS]
    for name, look in looks(names).items():
        yield short_title(name), look, frame[frame["method"] == name]


def _point(ax: Axes, across: pd.Series, up: pd.Series, **style: Any) -> None:
    """Draw the means of two columns with their standard errors."""
    (x, x_error), (y, y_error) = mean_and_error(across), mean_and_error(up)
    ax.errorbar(x, y, xerr=x_error, yerr=y_error, **style)


def _line(ax: Axes, values: Mapping[Any, pd.Series], **style: Any) -> None:
    """Draw the means of some columns with their errors, each over its place on the axis."""
    means, errors = zip(*map(mean_and_error, values.values()), strict=True)
    ax.errorbar(list(values), means, yerr=errors, **style)
