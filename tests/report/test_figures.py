"""Figures show what the frame holds."""

import io
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib")
from tl_localize import InjResults, drawing
from tl_localize.evals.deletion import confusion, del_figures, forgetting
from tl_localize.evals.inj import recall_curve, target_against_distractors
from tl_localize.report.looks import looks


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
    assert points(target_against_distractors(results)) == {
        "Activations": [(20.0, 30.0)],
        "RowNorm": [(25.0, 25.0)],
        "knows nothing": [(3.0, 3.0)],
        "knows what was altered": [(25.0, 25.0)],
        "the true rows": [(0, 100)],
    }


def test_recall_curve_draws_the_mean_recalls(results):
    drawn = points(recall_curve(results))
    assert set(drawn) == {"Activations", "RowNorm"}
    assert np.ravel(drawn["Activations"]) == pytest.approx([3, 30, 6, 30])


def test_a_method_has_one_look_in_all_panels(results):
    frame = results.frame.replace({"method": {"activations": "mine", "row_norm": "yours"}})
    both = frame.assign(injection_ratio=0.05)
    figure = recall_curve(InjResults(pd.concat([frame[frame["method"] == "yours"], both])))
    colours = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            colours.setdefault(label, set()).add(handle[0].get_color())
    assert sorted(map(len, colours.values())) == [1, 1]
    assert len(set.union(*colours.values())) == 2


@pytest.mark.parametrize("n", [1, 5, 6, 7])
def test_there_are_as_many_axes_as_asked_for(n):
    assert len(drawing.axes(n)) == n


def test_own_methods_have_looks_of_their_own():
    assert len(set(looks("abcdefghijkl").values())) == 12
    found = looks(["mine", "random", "yours", "mine"])
    assert found == looks(["mine", "yours", "random"]) and found["mine"] != found["yours"]


def test_legend_covers_nothing_and_names_every_method(del_results):
    figure = forgetting(del_results)
    figure.draw_without_rendering()
    (legend,) = [ax.get_legend() for ax in figure.axes if ax.get_legend()]
    box = legend.get_window_extent()
    assert not any(ax.get_window_extent().overlaps(box) for ax in figure.axes)
    assert {text.get_text() for text in legend.get_texts()} == set(points(figure))


def test_forgetting_draws_what_was_measured_and_no_line_from_nothing_to_it(del_results):
    (ax,) = forgetting(del_results).axes
    columns = ["delta_neg_accuracy", "delta_self_accuracy"]
    groups = del_results.frame.groupby(["method", "ratio"])[columns]
    means, errors = -100 * groups.mean(), 100 * groups.sem()
    drawn = {bars.get_label(): bars for bars in ax.containers}
    for label, name in (("Hard Concrete", "hard_concrete"), ("Random", "random")):
        line, _, bars = drawn[label]
        wanted = means.loc[name].to_numpy().ravel()
        assert line.get_xydata().ravel() == pytest.approx(wanted)
        for axis, column in enumerate(columns):
            ends = np.array(bars[axis].get_segments())[:, :, axis]
            assert np.ptp(ends, 1) / 2 == pytest.approx(errors.loc[name, column])


def test_forgetting_reaches_as_far_as_the_data(del_results):
    (ax,) = forgetting(del_results).axes
    furthest = -100 * del_results.frame["delta_neg_accuracy"].min()
    assert ax.get_xlim()[1] < 1.5 * furthest + 1
    few = replace(del_results, frame=del_results.frame.assign(delta_neg_accuracy=-0.002))
    (ax,) = forgetting(few).axes
    assert 1 <= ax.get_xlim()[1] < 1.2


def test_figures_of_one_text_alone_are_not_drawn(del_results):
    frame = del_results.frame.assign(delta_neg_accuracy=float("nan"))
    assert del_figures(replace(del_results, frame=frame)) == {}


@pytest.mark.parametrize(
    ("per", "said"), [({}, "of each layer"), ({"per": "model"}, "of the model")]
)
def test_confusion_says_of_what_the_share_is(del_results, per, said):
    of_share = replace(del_results, frame=del_results.frame.assign(**per))
    assert said in confusion(of_share).get_suptitle()


def test_nothing_of_a_confusion_figure_is_cut_off_in_a_notebook(del_results):
    import matplotlib.image

    matrix = next(iter(del_results.confusion.values()))
    names = "hard_concrete", "attribution", "activations", "random"
    matrices = {(name, 0.005): matrix for name in names}
    shown = confusion(replace(del_results, confusion=matrices))._repr_png_()
    pixels = matplotlib.image.imread(io.BytesIO(shown), format="png")[..., :3]
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 1).all()


def test_figure_shows_itself_in_a_notebook():
    (panel,) = drawing.axes(1)
    assert panel.figure._repr_png_().startswith(b"\x89PNG")
