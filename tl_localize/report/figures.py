"""Figures by matplotlib (the extra ``plots``).

A method has one colour and one marker in all of them (``report.looks``). A legend stands to the
right, where it covers nothing.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tl_localize.evals.del_results import PRICES, DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.rev_results import DIRECTIONS, PRICE, RevResults
from tl_localize.files import prepare_folder, write_whole
from tl_localize.neurons import Real, check_choice
from tl_localize.report.looks import Look, axes, drawn, finish, looks, with_legend
from tl_localize.report.paper import short_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SELF = "Self: accuracy lost on the target (percentage points)"
NEG = "Neg: accuracy lost on the other sequences\n(percentage points; better: up and left)"


def inj_figures(results: InjResults) -> "dict[str, Figure]":
    """The INJ figures by file name; none where no injection converged.

    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model, [sentence], ratio=0.03, stop_loss=9.0)
    >>> list(inj_figures(benchmark.run([Activations()])))
    ['inj_recall_curve']
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

    >>> texts = ("The", " blue list"), ("One", " module waits")
    >>> two = [MemorizedSequence.from_text(model, *text, id=text[0]) for text in texts]
    >>> how = {"ratio": 0.02, "distractors": 1, "stop_loss": 9.0}
    >>> benchmark = InjBenchmark(model, two, **how)
    >>> target_against_distractors(benchmark.run([Activations()])).axes[0].get_xlabel()
    "recall of the distractors' rows (%)"
    """
    used = _with_rows(results.frame.query("converged"))
    (panel,) = axes(1)
    ratio = used["injection_ratio"].max()
    used = used[(used["injection_ratio"] == ratio) & (used["multiple"] == used["multiple"].min())]
    for method, look, part in _methods(used):
        groups = 100 * part.groupby("group")[["foreign_recall", "recall"]].mean()
        (x, y), (x_error, y_error) = groups.mean(), groups.sem()
        panel.errorbar(x, y, y_error, x_error, label=method, **look.style())
    known = 1 / used.groupby("group")["sequence_id"].nunique().max()
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

    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model, [sentence], ratio=0.03, stop_loss=9.0)
    >>> recall_curve(benchmark.run([Activations()])).axes[0].get_title()
    'INJ: 3 % of all rows trained'
    """
    used = _with_rows(results.frame.query("converged")).assign(
        share=lambda rows: 100 * rows["ratio"]
    )
    injected = sorted(used["injection_ratio"].unique())
    panels = axes(len(injected))
    for panel, ratio in zip(panels, injected, strict=True):
        some = used[used["injection_ratio"] == ratio]
        for method, look, part in _methods(some):
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


def del_figures(results: DelResults) -> "dict[str, Figure]":
    """The DEL figures by file name: what is forgotten, and the confusion matrices at the largest
    ratio; none where nothing is measured.

    >>> results = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> sorted(del_figures(results))
    ['del_confusion', 'del_forgetting']
    """
    if not len(results.frame):
        return {}
    return {"del_forgetting": forgetting(results), "del_confusion": confusion(results)}


def forgetting(results: DelResults) -> "Figure":
    """DEL: accuracy that the target loses (Self) against what the other sequences lose (Neg), from
    nothing ablated through all ratios. At one Neg, higher is better.

    Means over the targets that a method has at all ratios, with standard errors. Both axes are in
    percentage points, as far as the data go, and reach from zero to one at least. On the grey line
    the target loses what others lose, so nothing is localized; upright lines are those prices of
    ``DelResults.at_price`` that some method reaches.

    >>> results = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> forgetting(results).axes[0].get_title()
    'DEL, reference-gpt2, zero ablation'
    """
    _with_rows(results.frame)
    (panel,) = axes(1, (5.4, 4.6))
    curves = results.points()
    for method, look in looks(curves).items():
        lost: Any = -curves[method]
        neg, own = lost["neg"], lost["self"]
        _curve(panel, (neg.mean(), own.mean(), own.sem(), neg.sem()), method, look)
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


def rev_figures(results: RevResults) -> "dict[str, Figure]":
    """REV by file name: own against others as more units are put back, and as more are given to the
    model before, side by side; means over sentences with standard errors, with the signs of the
    table: what is forgotten is negative.

    >>> how = {"n_sequences": 1, "ratios": (0.1,), "recipe": Recipe(max_steps=2, stop_loss=9.0)}
    >>> benchmark = RevBenchmark(model, [sequence], text, **how)
    >>> list(rev_figures(benchmark.run()))
    ['rev_curves']
    """
    curves = list(results.summary().groupby("direction", sort=False))
    if not curves:  # no training converged
        return {}
    panels = axes(len(curves), (5.4, 4.6))
    for panel, (direction, curve) in zip(panels, curves, strict=True):
        for method, look, rows in _methods(curve.sort_values("ratio")):
            errors = rows["own_error"], rows["others_error"]
            _curve(panel, (rows["others"], rows["own"], *errors), method, look)
        lost = direction == "put_back"
        panel.axvline(-PRICE if lost else PRICE, color="0.85", linewidth=1, zorder=0)
        better = "down and right" if lost else "up and left"
        x = f"change of accuracy on the other sentences\n(percentage points; better: {better})"
        y = "change of accuracy on the sentence\n(percentage points)"
        finish(panel, x, y, f"Units {DIRECTIONS[str(direction)]}")
    return {"rev_curves": with_legend(panels)}


def confusion(results: DelResults, ratio: Real | None = None) -> "Figure":
    """DEL: change of accuracy of each sequence (column) when another's neurons are ablated (row),
    one panel per method.

    All panels have one order, by category, and one scale: orange is lost, purple gained. A method
    that finds neurons of the target alone colours the diagonal alone. What was not measured,
    because a method had fewer targets, stays empty.

    Args:
        ratio: by default the largest.

    Raises:
        ValueError: the results do not hold this ratio.

    >>> results = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> [ax.get_title() for ax in confusion(results, 0.05).axes[:2]]
    ['Attribution', 'Random']
    """
    _with_rows(results.frame)
    ratios = sorted({held for _, held in results.confusion})
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
        finish(panel, "measured sequence", "sequence whose neurons are ablated", short_title(name))
        panel.label_outer()
    figure: Any = panels[0].figure
    label = "change of accuracy (percentage points)"
    figure.colorbar(panels[0].images[0], ax=panels, label=label)
    figure.suptitle(f"DEL: top {100 * ratio:g} % of each layer ablated; {len(targets)} sequences")
    return figure


def save_figure(figure: "Figure", folder: str | Path, name: str) -> None:
    """Write NAME.png, for screens of high resolution, and NAME.svg, each whole or not at all.

    >>> results = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> save_figure(forgetting(results), folder, "forgetting")
    >>> sorted(path.name for path in folder.iterdir())
    ['forgetting.png', 'forgetting.svg']
    """
    path = prepare_folder(folder)
    for suffix in ("png", "svg"):
        write_whole(path / f"{name}.{suffix}", drawn(figure, suffix, dpi=200, bbox_inches="tight"))


def _with_rows(frame: Any) -> Any:
    """The rows that a figure is drawn of; ValueError where there are none."""
    if not len(frame):
        raise ValueError(
            "results must hold measurements to be drawn, got none (of INJ, none that converged). "
            "Run the benchmark first."
        )
    return frame


def _methods(frame: Any) -> Iterator[tuple[str, Look, Any]]:
    """The short title, the look and the rows of each method."""
    for name, look in looks(frame["method"].unique()).items():
        yield short_title(name), look, frame[frame["method"] == name]


def _curve(ax: "Axes", columns: Sequence[Any], method: str, look: Look) -> None:
    """Draw a line from nothing ablated on: numbers across and up, and errors up and across."""
    x, y, y_error, x_error = (np.append(0, column) for column in columns)
    how = look.style("-")
    ax.errorbar(x, y, y_error, x_error, elinewidth=0.6, label=short_title(method), **how)
