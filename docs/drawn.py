"""Draws the figures of README.md and docs/ from committed numbers. `python docs/shown.py` writes
them, and with `--check` compares the numbers in them.

A mark is a mean, with a 95 % interval over what was drawn independently: texts in DEL, groups of
texts in INJ with distractors, models in REV (by Student's t). A mark without one is of a run that
kept the mean alone. Each method has the same colour and marker everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from scipy import stats

from tl_localize.drawing import axes, finish
from tl_localize.methods import NAMED
from tl_localize.paper import short_title
from tl_localize.report.looks import LOOKS, draw_curve, looks, with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from cells import GEMMA, GENERAL_RIVALS, MASK_RIVALS, SMOLLM2  # noqa: E402
from comparison import read_frame  # noqa: E402
from deletion_tables import single_layers  # noqa: E402
from injection_tables import SMOLLM2_GROUPS  # noqa: E402

SHIPPED = ("gpt2", "pythia")
TUNED = {"hard_concrete_tuned": "Hard Concrete, tuned", "slimming_tuned": "Slimming, tuned"}
TUNED_LOOKS = {
    "Hard Concrete, tuned": LOOKS["hard_concrete"]._replace(marker="*"),
    "Slimming, tuned": LOOKS["slimming"]._replace(marker="*"),
}
# Of pretrained models: Integrated Gradients has four texts alone, the one-pass form is on a model's
# own page, and rivals are in its tables.
NOT_DRAWN = (
    "integrated_gradients",
    "attribution_contrast_1",
    *MASK_RIVALS,
    *GENERAL_RIVALS,
)
LOSSES = ["delta_neg_accuracy", "delta_self_accuracy"]  # of others, across; of the text, up


def means_with_intervals(frame: pd.DataFrame, unit: str, columns: list[str]) -> pd.DataFrame:
    """Mean and half the width of its 95 % interval of some columns, in points, by method and what
    else the index says; the width is nan where there is one mean alone.

    Args:
        unit: the level of the index that holds what was drawn independently.
    """
    levels = [name for name in frame.index.names if name not in ("sequence_id", "group")]
    by_unit = 100 * frame.groupby([*levels, unit])[columns].mean()
    of_setting = by_unit.groupby(levels)
    n = of_setting.size()
    width = of_setting.sem().mul(stats.t.ppf(0.975, (n - 1).clip(lower=1)), axis=0)
    return of_setting.mean().join(width.add_suffix("_width"))


def draw_methods(panel: Any, table: pd.DataFrame, columns: list[str]) -> None:
    """A line for each method, or a mark where it has one setting."""
    across, up = columns
    found = table.reset_index()
    for method, look in (looks(found["method"]) | TUNED_LOOKS).items():
        part = found[found["method"] == method]
        if not len(part):
            continue
        drawn = [part[name] for name in (across, up, f"{up}_width", f"{across}_width")]
        draw_curve(panel, drawn, method, look)


def of_models(titles: dict[str, str], size: tuple[float, float] = (3.3, 3.6)) -> dict[str, Any]:
    """Panels side by side, by the model's name; ``titles`` says what stands above each."""
    return dict(zip(titles, axes(len(titles), size), strict=True))


# DEL


def losses(frame_name: str) -> pd.DataFrame:
    """What the text and others lose by method and share of a frame of DEL, in points."""
    frame = -read_frame(frame_name)[LOSSES].rename(index=TUNED)
    return means_with_intervals(frame, "sequence_id", LOSSES)


def n_texts(frame_name: str, without: Sequence[str]) -> str:
    """The texts of a method of a frame, as text; the least and the most where methods differ."""
    rows = read_frame(frame_name)
    rows = rows[~rows.index.isin(without, "method")]
    texts = rows.reset_index().groupby("method")["sequence_id"].nunique()
    return f"{texts.min()}" if texts.min() == texts.max() else f"{texts.min()} to {texts.max()}"


def draw_losses(panel: Any, table: pd.DataFrame, reach: float, title: str) -> None:
    """The text's loss over that of others, as far as others lose ``reach`` points."""
    draw_methods(panel, table, LOSSES)
    least = table[LOSSES[0]].groupby("method").min()
    if beyond := [TUNED.get(name, short_title(name)) for name in least[least > reach].index]:
        said = "further right: " + ", ".join(beyond)
        panel.text(0.98, 0.02, said, transform=panel.transAxes, ha="right", size="x-small")
    panel.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0)
    panel.set(xlim=(-reach / 40, reach), ylim=(-5, 100))
    finish(panel, "others lose (points of accuracy)", "the text loses (points)", title)


def pretrained_figure() -> Figure:
    """DEL of SmolLM2: the whole range on the left, and on the right where others lose
    little.
    """
    table = losses(f"forgetting-{SMOLLM2}").drop(list(NOT_DRAWN), level="method")
    panels = axes(2, (4.2, 4.2))
    draw_losses(panels[0], table, 80, "all shares")
    draw_losses(panels[1], table, 15, "where others lose little")
    return with_legend(panels)


def del_figure() -> Figure:
    """DEL of four models, where others lose little; of the shipped ones, whose other texts lose
    less, on a wider scale.
    """
    titles = {
        f"forgetting-{SMOLLM2}": "SmolLM2",
        f"forgetting-{GEMMA}": "Gemma 3",
        "del-reference-gpt2": "gpt2, shipped",
        "del-reference-pythia": "pythia, shipped",
    }
    panels = of_models(titles)
    for name, panel in panels.items():
        table = losses(name)
        apart = NOT_DRAWN if "forget" in name else ()
        here = table.index.get_level_values("method").isin(apart)
        title = f"{titles[name]} ({n_texts(name, apart)} texts)"
        draw_losses(panel, table[~here], 15 if "forget" in name else 4, title)
    return with_legend(list(panels.values()))


def forgetting_figure(model: str) -> Figure:
    """DEL of a shipped model, as ``tl-localize del`` draws it."""
    from tl_localize import DelResults
    from tl_localize.evals.deletion import forgetting

    frame = read_table(f"benchmarks/expected/del-reference-{model}.csv")
    named = frame.assign(model=f"reference-{model}", ablation="zero")
    return forgetting(DelResults(named, {}, pd.DataFrame()))


def other_texts_figure() -> Figure:
    """What other texts of SmolLM2 lose without the four neurons of each layer from 1 on that
    Iterative Attribution names for the warranty of the MIT licence, by tl-localize localize.
    """
    from tl_localize.report.text_losses import TextLosses

    frame = read_table("docs/results/smollm2/others.csv")
    return TextLosses(frame.assign(lost=frame["before"] - frame["after"]), 4 * 29).plot()


def single_layer_figure(model: str) -> Figure:
    """One layer against all of a shipped model, by Integrated Gradients."""
    from tl_localize.evals.deletion import single_layer_figure as draw

    rows = single_layers(f"reference-{model}")
    return draw(rows[(rows["method"] == "integrated_gradients") & (rows["ratio"] == 0.1)])


def read_table(path: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / path)


# INJ, REV, cost


def distractors_figure() -> Figure:
    """INJ with distractors: recall of the text's rows over that of other texts' rows, among as many
    of each layer as were trained.
    """
    titles = {
        SMOLLM2_GROUPS: "SmolLM2, 1 %",
        "distractors-reference-gpt2": "gpt2, shipped, 3 %",
        "distractors-reference-pythia": "pythia, shipped, 3 %",
    }
    panels = of_models(titles)
    columns = ["foreign_recall", "recall"]
    for name, panel in panels.items():
        frame = without_rivals(read_frame(name).xs(1, level="multiple"))
        unit = "group" if "group" in frame.index.names else "sequence_id"
        draw_methods(panel, means_with_intervals(frame, unit, columns), columns)
        panel.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0)
        panel.set(xlim=(-1, 40), ylim=(-4, 104))
        finish(panel, "other texts' rows found (%)", "the text's rows found (%)", titles[name])
    return with_legend(list(panels.values()))


def without_rivals(frame: pd.DataFrame) -> pd.DataFrame:
    """Without the methods that stand in a table of their own (docs/methods.md)."""
    left_out = {method.name for method in NAMED}
    base = frame.index.get_level_values("method").str.removesuffix("_same_kind")
    return frame[~base.isin(left_out)]


def rev_figure() -> Figure:
    """REV: what the text loses over what others lose as more of the named rows are put back."""
    titles = {"rev-reference-gpt2": "gpt2, shipped", "rev-reference-pythia": "pythia, shipped"}
    panels = of_models(titles, (4.2, 4.2))
    columns = ["delta_others_accuracy", "delta_own_accuracy"]
    for name, panel in panels.items():
        frame = without_rivals(-read_frame(name).xs("put_back", level="direction")[columns])
        unit = "group" if "group" in frame.index.names else "sequence_id"
        draw_methods(panel, means_with_intervals(frame, unit, columns), columns)
        panel.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0)
        panel.set(xlim=(-1, 30), ylim=(-5, 100))
        finish(panel, "others lose (points of accuracy)", "the text loses (points)", titles[name])
    return with_legend(list(panels.values()))


def cost_figure() -> Figure:
    """Seconds of each method on one text of 80 tokens, measured once, on a logarithmic scale."""
    seconds = {
        model: read_table(f"docs/results/reference-{model}/cost.csv").set_index("method")["seconds"]
        for model in SHIPPED
    }
    (panel,) = axes(1, (5.6, 3.0))
    named = [name for name in seconds["gpt2"].sort_values().index if "," not in name]
    for method, look in looks(named).items():
        y = named.index(method)
        for model, fill in zip(SHIPPED, ("full", "none"), strict=True):
            label = model if not y else None
            panel.plot(seconds[model][method], y, fillstyle=fill, label=label, **look.style())
    panel.set(xscale="log", yticks=range(len(named)))
    panel.set_yticklabels([short_title(name) for name in named])
    finish(panel, "seconds, one thread of a CPU (logarithmic)", "", "Cost of one text")
    return with_legend([panel])


def figures() -> dict[str, Callable[[], Figure]]:
    """The pictures that are drawn from committed numbers, each with what draws it."""
    found: dict[str, Callable[[], Figure]] = {
        "docs/figures/smollm2.png": pretrained_figure,
        "docs/figures/others-smollm2.png": other_texts_figure,
        "docs/figures/del.png": del_figure,
        "docs/figures/distractors.png": distractors_figure,
        "docs/figures/rev.png": rev_figure,
        "docs/figures/cost.png": cost_figure,
    }
    for model in SHIPPED:
        folder = f"docs/results/reference-{model}"
        found[f"{folder}/del_forgetting.png"] = partial(forgetting_figure, model)
        single = f"{folder}/del_single_layer_integrated_gradients.png"
        found[single] = partial(single_layer_figure, model)
    return found
