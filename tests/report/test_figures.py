"""Figures show what the frame holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from tl_localize import InjResults, NeuronScores, NeuronSet
from tl_localize.report import figures
from tl_localize.report.looks import LOOKS, axes


@pytest.fixture
def results() -> InjResults:
    """Four sentences in each of two groups, at 1x and 2x."""
    methods = {"activations": (0.3, 0.2), "row_norm": (0.25, 0.25), "true_rows": (1.0, 0.0)}
    rows = [
        {
            "sequence_id": f"s{group}{s}",
            "group": f"g{group}",
            "method": method,
            "injection_ratio": 0.03,
            "ratio": 0.03 * multiple,
            "multiple": multiple,
            "recall": own,
            "foreign_recall": foreign,
            "converged": True,
        }
        for group in range(2)
        for s in range(4)
        for method, (own, foreign) in methods.items()
        for multiple in (1, 2)
    ]
    return InjResults(pd.DataFrame(rows), truth=pd.DataFrame({"sequence_id": ["s00"]}))


def points(figure: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of each line of a figure, by its label."""
    found: dict[str, list[tuple[float, float]]] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            line = handle[0] if isinstance(handle, tuple) else handle
            found[label] = list(zip(*line.get_data(), strict=True))
    return found


def test_target_against_distractors_draws_methods_at_their_means_and_the_levels(
    results: InjResults,
) -> None:
    assert points(figures.target_against_distractors(results)) == {
        "Activations": [(20.0, 30.0)],
        "RowNorm": [(25.0, 25.0)],
        "knows nothing": [(3.0, 3.0)],
        "knows what was altered": [(25.0, 25.0)],
        "the true rows": [(0, 100)],
    }


def test_target_against_distractors_needs_distractors(results: InjResults) -> None:
    with pytest.raises(ValueError, match="results must be of INJ with distractors"):
        figures.target_against_distractors(InjResults(results.frame))


@pytest.mark.parametrize(("size", "whose"), [(2, "the distractor's"), (4, "the 3 distractors'")])
def test_target_against_distractors_counts_the_other_sentences(
    results: InjResults, size: int, whose: str
) -> None:
    frame = results.frame[results.frame["sequence_id"].str[-1].astype(int) < size]
    (ax,) = figures.target_against_distractors(replace(results, frame=frame)).axes
    assert ax.get_xlabel() == f"recall of {whose} rows (%)"


def test_recall_curve_draws_injection_ratios_apart(results: InjResults) -> None:
    small = results.frame.assign(
        injection_ratio=0.003, ratio=results.frame["ratio"] / 10, recall=0.1
    )
    panels = figures.recall_curve(InjResults(pd.concat([results.frame, small]))).axes
    lines = [[line.lines[0].get_xdata().tolist() for line in ax.containers] for ax in panels]
    assert lines[0] == [pytest.approx([0.3, 0.6])] * 2 and lines[1] == [pytest.approx([3, 6])] * 2
    assert [ax.get_title()[:9] for ax in panels] == ["INJ: 0.3 ", "INJ: 3 % "]


def test_recall_curve_leaves_out_the_true_rows(results: InjResults) -> None:
    drawn = points(figures.recall_curve(results))
    assert set(drawn) == {"Activations", "RowNorm"}
    assert np.ravel(drawn["Activations"]) == pytest.approx([3, 30, 6, 30])


@pytest.mark.parametrize("draw", [figures.recall_curve, figures.target_against_distractors])
def test_inj_figures_without_a_converged_injection_say_so(results: InjResults, draw: Any) -> None:
    (ax,) = draw(replace(results, frame=results.frame.assign(converged=False))).axes
    assert ax.get_title() == "INJ: no injection converged"


def test_each_method_has_one_colour_and_marker(results: InjResults, del_results: Any) -> None:
    assert len({look.colour for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.marker for look in LOOKS.values()}) == len(LOOKS)
    inj = {"Activations": "activations", "RowNorm": "row_norm"}
    for figure, names in (
        (figures.recall_curve(results), inj),
        (figures.target_against_distractors(results), inj),
        (figures.forgetting(del_results), {"Hard Concrete": "hard_concrete", "Random": "random"}),
    ):
        for ax in figure.axes:
            handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
            for title, name in names.items():
                line = handles[title].lines[0]
                assert (line.get_color(), line.get_marker()) == LOOKS[name]


def test_legend_covers_nothing_and_names_every_method(
    results: InjResults, del_results: Any
) -> None:
    some = figures.prices(del_results), figures.forgetting(del_results)
    for figure in (*some, figures.recall_curve(results)):
        figure.draw_without_rendering()
        (legend,) = [ax.get_legend() for ax in figure.axes if ax.get_legend()]
        box = legend.get_window_extent()
        assert not any(ax.get_window_extent().overlaps(box) for ax in figure.axes)
        assert {text.get_text() for text in legend.get_texts()} == set(points(figure))


@pytest.mark.parametrize("n", range(1, 11))
def test_panels_fill_their_grid(n: int) -> None:
    panels = axes(n)
    shape = panels[0].get_gridspec().get_geometry()
    assert len(panels) == n == shape[0] * shape[1]


def test_save_figure_writes_png_and_svg(results: InjResults, tmp_path: Path) -> None:
    figures.save_figure(figures.recall_curve(results), tmp_path / "figures", "curve")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"curve.png", "curve.svg"}


def test_figures_take_an_axis(results: InjResults) -> None:
    ax = Figure().add_subplot()
    assert figures.recall_curve(results, ax) is ax.figure


def test_forgetting_draws_each_method_at_its_means(del_results: Any) -> None:
    assert len(figures.forgetting(del_results).axes) == 2
    drawn = points(figures.forgetting(del_results, Figure().add_subplot()))  # the largest ratio
    methods = {"Hard Concrete", "Integrated Gradients", "Random"}
    assert set(drawn) == {*methods, "Self = Neg"}
    ((others, own),) = drawn["Hard Concrete"]
    frame = del_results.frame.set_index(["method", "ratio"]).loc[("hard_concrete", 0.005)]
    assert own == pytest.approx(35)
    assert others == pytest.approx(-100 * frame["delta_neg_accuracy"].mean())


def test_forgetting_shows_less_than_a_point_as_little(del_results: Any) -> None:
    """A difference far below a percentage point never fills an axis."""
    losses = ["delta_neg_accuracy", "delta_self_accuracy"]
    frame = del_results.frame.assign(**{name: del_results.frame[name] / 1e4 for name in losses})
    for ax in figures.forgetting(replace(del_results, frame=frame)).axes:
        for low, high in (ax.get_xlim(), ax.get_ylim()):
            assert low < 0 and high > 1
        assert "times as" not in ax.get_xlabel() + ax.get_ylabel()


def test_prices_draws_each_method_from_nothing_through_all_ratios_with_errors(
    del_results: Any,
) -> None:
    (ax,) = figures.prices(del_results).axes
    columns = ["delta_neg_accuracy", "delta_self_accuracy"]
    groups = del_results.frame.groupby(["method", "ratio"])[columns]
    means, errors = -100 * groups.mean(), 100 * groups.sem()
    drawn = {bars.get_label(): bars for bars in ax.containers}
    for label, name in (("Hard Concrete", "hard_concrete"), ("Random", "random")):
        line, _, bars = drawn[label]
        wanted = [0, 0, *means.loc[name].to_numpy().ravel()]
        assert line.get_xydata().ravel() == pytest.approx(wanted)
        for axis, column in enumerate(columns):
            ends = np.array(bars[axis].get_segments())[:, :, axis]
            halves = np.abs(ends[:, 1] - ends[:, 0]) / 2
            assert halves == pytest.approx([0, *errors.loc[name, column]])
    unlabelled = [line.get_xdata() for line in ax.lines if line.get_label().startswith("_")]
    assert [x[0] for x in unlabelled if len(x) == 2] == [0.5, 1, 3]


def test_prices_has_a_panel_for_each_model(del_results: Any) -> None:
    both = pd.concat([del_results.frame, del_results.frame.assign(model="other")])
    titles = [ax.get_title() for ax in figures.prices(replace(del_results, frame=both)).axes]
    assert [title.rpartition("price")[2] for title in titles] == [", m, zero", ", other, zero"]


def images(figure: Any) -> list[Any]:
    return [ax.images[0].get_array() for ax in figure.axes if ax.images]


def test_confusion_groups_categories_and_has_targets_on_both_axes(del_results: Any) -> None:
    figure = figures.confusion(del_results, 0.005)
    names = ["Hard Concrete", "Integrated Gradients", "Random"]
    assert [ax.get_title() for ax in figure.axes[:3]] == names
    scales = [ax.images[0].get_clim() for ax in figure.axes[:3]]
    assert scales == [pytest.approx((-40, 40))] * 3  # one for all, around zero
    drawn = images(figure)[0]
    assert drawn.shape == (4, 4)
    assert drawn.diagonal().tolist() == pytest.approx([-40, -40, -20, -40])  # a, c, b, d
    assert drawn[0].tolist() == pytest.approx([-40, -10, -1, -1])
    panel = figure.axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["poems", "code"]
    assert panel.get_yticks().tolist() == panel.get_xticks().tolist() == [0.5, 2.5]


def test_confusion_leaves_empty_what_a_method_of_fewer_targets_did_not_measure(
    del_results: Any,
) -> None:
    """As Zero-Out's in the committed tables: the panels keep one order."""
    fewer = {
        key: matrix.iloc[:2, :2] if key[0] == "integrated_gradients" else matrix
        for key, matrix in del_results.confusion.items()
    }
    panels = images(figures.confusion(replace(del_results, confusion=fewer), 0.005))
    whole = images(figures.confusion(del_results, 0.005))
    drawn = panels[1].filled(np.nan)
    measured = ~np.isnan(drawn)
    assert measured.sum() == 4 and drawn[measured].tolist() == whole[1][measured].tolist()
    assert panels[0].tolist() == whole[0].tolist()
    some = {key: matrix.iloc[:2] for key, matrix in del_results.confusion.items()}
    assert images(figures.confusion(replace(del_results, confusion=some)))[2].shape == (2, 2)


def test_confusion_knows_the_ratios(del_results: Any) -> None:
    with pytest.raises(ValueError, match=r"ratio must be one of \[0.001, 0.005\], got 0.3"):
        figures.confusion(del_results, 0.3)


@pytest.fixture
def layers() -> pd.DataFrame:
    rows = [
        {
            "method": "activations",
            "ratio": 0.005,
            "layer": layer,
            "multiple": multiple,
            "n_neurons": 14 + (layer is not None),
            "delta_self_accuracy": -0.02 * s - (0.1 if layer is None else 0.01 * multiple * layer),
            "delta_neg_accuracy": 0.0,
        }
        for layer, multiple in ((None, 1), (0, 1), (0, 5), (1, 1), (1, 5))
        for s in range(3)
    ]
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def test_single_layer_draws_layers_and_all_layers_together(layers: pd.DataFrame) -> None:
    figure = figures.single_layer(layers)
    drawn = points(figure)
    assert np.ravel(drawn["Self, one layer, 5 x the budget"]) == pytest.approx([0, -2, 1, -7])
    assert [x for x, _ in drawn["Self, one layer, 1 x the budget"]] == [0, 1]
    assert [y for _, y in drawn["Self, 0.5 % of each layer"]] == pytest.approx([-12, -12])
    assert "15 neurons of one layer, 14 of all" in figure.axes[0].get_title()
    (one,) = points(figures.single_layer(layers, first_layer=1))["Self, one layer, 5 x the budget"]
    assert one == pytest.approx((1, -7))


def test_single_layer_names_the_layer_that_destroys_everything(layers: pd.DataFrame) -> None:
    layers.loc[layers["layer"] == 0, ["delta_self_accuracy", "delta_neg_accuracy"]] = [-0.94, -0.86]
    figure = figures.single_layer(layers)
    assert [x for x, _ in points(figure)["Self, one layer, 1 x the budget"]] == [1]
    assert "layer 0, 1 x: Self -94, Neg -86" in figure.axes[0].get_xlabel()


def test_del_figures_are_named_and_have_titles_and_units(
    del_results: Any, layers: pd.DataFrame
) -> None:
    drawn = figures.del_figures(del_results, layers)
    names = ["forgetting", "prices", "confusion", "single_layer_activations"]
    assert list(drawn) == [f"del_{name}" for name in names]
    for figure in drawn.values():
        assert all(ax.get_title() for ax in figure.axes if ax.get_label() != "<colorbar>")
        assert any("percentage points" in ax.get_ylabel() for ax in figure.axes)


# ---- scores, sets and the reference models


@pytest.fixture
def scores() -> NeuronScores:
    values = torch.zeros(3, 400)
    values[0, 7], values[1, 399], values[1, 1], values[1, :5] = 2.0, 4.0, 1.0, 0.2
    values[2, 5] = -1.0
    return NeuronScores(values, "attribution", "a poem")


def test_score_map_shows_the_share_of_each_layer_and_names_its_best_neurons(
    scores: NeuronScores,
) -> None:
    """The sum of the positive scores is 7: 2 in layer 0, 5 in layer 1, none in layer 2."""
    (ax,) = figures.score_map(scores).axes
    best, others = ([bar.get_width() for bar in bars] for bars in ax.containers)
    assert best == pytest.approx([100 * 2 / 7, 100 * 4.6 / 7, 0])  # four of 400 neurons
    assert others == pytest.approx([0, 100 * 0.4 / 7, 0], abs=1e-4)
    assert [text.get_text() for text in ax.texts][:2] == ["7, 0, 1", "399, 0, 1"]
    assert ax.get_title() == "Attribution: a poem" and ax.yaxis_inverted()


def test_score_map_leaves_out_layers_in_which_the_method_did_not_choose(
    scores: NeuronScores,
) -> None:
    """Masks give the layers that they spare the highest score, 1."""
    spared = torch.cat([torch.ones(1, 400), scores.values])
    (ax,) = figures.score_map(NeuronScores(spared, first_layer=1)).axes
    widths = np.sum([[bar.get_width() for bar in bars] for bars in ax.containers], 0)
    assert widths == pytest.approx([100 * 2 / 7, 100 * 5 / 7, 0], abs=1e-4)
    assert ax.get_yticks().tolist() == [1, 2, 3]


def test_score_map_of_no_positive_score_can_be_drawn() -> None:
    (ax,) = figures.score_map(NeuronScores(-torch.ones(2, 3))).axes
    assert all(bar.get_width() == 0 for bars in ax.containers for bar in bars)


def test_neurons_by_layer_counts_found_and_hits(scores: NeuronScores) -> None:
    # two of every layer: the best one and, among ties at zero, the lowest
    found = scores.top_k(0.005)
    (ax,) = figures.neurons_by_layer({"ours": found}, scores.top_k(0.0025)).axes
    assert [line.get_ydata().tolist() for line in ax.lines] == [[2, 2, 2], [1, 1, 1]]
    assert [patch.get_height() for patch in ax.patches] == [1, 1, 1]
    assert {"ours", "ours, true (100 % recall)", "true"} <= {
        text.get_text() for text in ax.get_legend().get_texts()
    }


def test_neurons_by_layer_rejects_what_is_no_set_of_one_model(
    scores: NeuronScores, unchecked: None
) -> None:
    found: Any = {"a": scores.top_k(0.01), "b": NeuronSet(torch.ones(2, 3) > 0)}
    with pytest.raises(ValueError, match="Both sets must belong to one model"):
        figures.neurons_by_layer(found)
    with pytest.raises(ValueError, match="found must hold at least one set"):
        figures.neurons_by_layer({})
    with pytest.raises(TypeError, match="found must hold sets of neurons, got NeuronScores"):
        figures.neurons_by_layer({"ours": scores})  # pyright: ignore[reportArgumentType] - a mistake


def test_memorization_by_repetition_rises_to_all() -> None:
    (ax,) = figures.memorization_by_repetition(["reference-gpt2"]).axes
    memorized = ax.lines[0].get_ydata()
    assert memorized[0] < 10 and memorized[-1] == 100
    with pytest.raises(ValueError, match=r"models must be among .* got 'gpt2'"):
        figures.memorization_by_repetition(["gpt2"])


def test_figure_shows_itself_in_a_notebook(scores: NeuronScores) -> None:
    figure: Any = figures.score_map(scores)
    png, shown = figure._repr_png_()
    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == pytest.approx((2 * shown["width"], 2 * shown["height"]), abs=2)
