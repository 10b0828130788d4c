"""Figures show what the frame holds."""

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("matplotlib")
from tl_localize import InjResults, NeuronScores
from tl_localize.report import figures


@pytest.fixture
def results():
    """Four sentences in each of two groups, at 1x and 2x."""
    methods = {"activations": (0.3, 0.2), "row_norm": (0.25, 0.25)}
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
    return InjResults(pd.DataFrame(rows))


def points(figure):
    """The points of each line of a figure, by its label."""
    found = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            line = handle[0] if isinstance(handle, tuple) else handle
            found[label] = list(zip(*line.get_data(), strict=True))
    return found


def test_target_against_distractors_draws_methods_at_their_means_and_the_levels(
    results,
):
    assert points(figures.target_against_distractors(results)) == {
        "Activations": [(20.0, 30.0)],
        "RowNorm": [(25.0, 25.0)],
        "knows nothing": [(3.0, 3.0)],
        "knows what was altered": [(25.0, 25.0)],
        "the true rows": [(0, 100)],
    }


def test_recall_curve_draws_the_mean_recalls(results):
    drawn = points(figures.recall_curve(results))
    assert set(drawn) == {"Activations", "RowNorm"}
    assert np.ravel(drawn["Activations"]) == pytest.approx([3, 30, 6, 30])


def test_legend_covers_nothing_and_names_every_method(del_results):
    figure = figures.forgetting(del_results)
    figure.draw_without_rendering()
    (legend,) = [ax.get_legend() for ax in figure.axes if ax.get_legend()]
    box = legend.get_window_extent()
    assert not any(ax.get_window_extent().overlaps(box) for ax in figure.axes)
    assert {text.get_text() for text in legend.get_texts()} == set(points(figure))


def test_forgetting_draws_each_method_from_nothing_through_all_ratios_with_errors(
    del_results,
):
    (ax,) = figures.forgetting(del_results).axes
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
            assert np.ptp(ends, 1) / 2 == pytest.approx([0, *errors.loc[name, column]])


# ---- scores and sets


@pytest.fixture
def scores():
    values = torch.zeros(3, 400)
    values[0, 7], values[1, 399], values[1, 1], values[1, :5] = 2.0, 4.0, 1.0, 0.2
    values[2, 5] = -1.0
    return NeuronScores(values, "attribution", "a poem")


@pytest.mark.parametrize("spared", [0, 1])
def test_score_map_shows_the_share_of_each_layer_and_names_its_best_neurons(scores, spared):
    """The sum of the positive scores is 7. Masks give the layers that they spare the score 1."""
    values = torch.cat([torch.ones(spared, 400), scores.values])
    (ax,) = figures.score_map(NeuronScores(values, first_layer=spared)).axes
    widths = [bar.get_width() for bar in ax.containers[0]]
    assert widths == pytest.approx([100 * 2 / 7, 100 * 5 / 7, 0])
    assert [text.get_text() for text in ax.texts][:2] == ["7, 0, 1", "399, 0, 1"]
    assert ax.get_yticks().tolist() == [spared, spared + 1, spared + 2]


def test_score_map_of_no_positive_score_can_be_drawn():
    (ax,) = figures.score_map(NeuronScores(-torch.ones(2, 3))).axes
    assert [bar.get_width() for bar in ax.containers[0]] == [0, 0]


def test_figure_shows_itself_in_a_notebook(scores):
    figure = figures.score_map(scores)
    assert figure._repr_png_().startswith(b"\x89PNG")
