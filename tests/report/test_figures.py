"""Figures show what the frame holds."""

import math

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib")


@pytest.fixture
def results():
    from tl_localize.evals.inj_benchmark import InjResults

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
            "seed": group,
        }
        for group in range(2)
        for s in range(4)
        for method, own, foreign in (
            ("activations", 0.3, 0.2),
            ("row_norm", 0.25, 0.25),
            ("true_rows", 1.0, 0.0),
        )
        for multiple in (1, 2)
    ]
    return InjResults(pd.DataFrame(rows), truth=pd.DataFrame({"sequence_id": ["s00"]}))


def points(figure):
    """Centre of each labelled point or line of a figure, by its label."""
    (ax,) = figure.axes
    handles, labels = ax.get_legend_handles_labels()
    lines = {
        label: handle[0] if isinstance(handle, tuple) else handle
        for handle, label in zip(handles, labels, strict=True)
    }
    return {
        label: [list(point) for point in zip(*line.get_data(), strict=True)]
        for label, line in lines.items()
    }


def test_target_against_distractors_draws_each_method_at_its_means(results):
    from tl_localize.report.figures import target_against_distractors

    assert points(target_against_distractors(results)) == {
        "Activations": [[20.0, 30.0]],
        "RowNorm": [[25.0, 25.0]],
    }


def test_target_against_distractors_draws_the_three_levels(results):
    from tl_localize.report.figures import target_against_distractors

    (ax,) = target_against_distractors(results).axes
    assert [text.get_text() for text in ax.texts[:3]] == [
        "knows nothing",
        "knows what was altered",
        "the true rows",
    ]
    assert [text.xy for text in ax.texts[:3]] == [(3.0, 3.0), (25.0, 25.0), (0.0, 100.0)]


def test_target_against_distractors_needs_distractors(results):
    from tl_localize.evals.inj_benchmark import InjResults
    from tl_localize.report.figures import target_against_distractors

    with pytest.raises(ValueError, match="results must be of INJ with distractors"):
        target_against_distractors(InjResults(results.frame))


def with_groups_of(results, size):
    from dataclasses import replace

    return replace(
        results, frame=results.frame[results.frame["sequence_id"].str[-1].astype(int) < size]
    )


def test_target_against_distractors_counts_the_other_sentences(results):
    from tl_localize.report.figures import target_against_distractors

    words = {
        size: target_against_distractors(with_groups_of(results, size)).axes[0] for size in (2, 4)
    }
    assert {size: (ax.get_title(), ax.get_xlabel()) for size, ax in words.items()} == {
        2: ("INJ with 1 distractor, top 3 % of each layer", "recall of the distractor's rows (%)"),
        4: (
            "INJ with 3 distractors, top 3 % of each layer",
            "recall of the 3 distractors' rows (%)",
        ),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_target_against_distractors_keeps_its_words_inside(results, size):
    from matplotlib.text import Text

    from tl_localize.report.figures import target_against_distractors

    figure = target_against_distractors(with_groups_of(results, size))
    figure.draw_without_rendering()
    (ax,) = figure.axes
    box = ax.get_window_extent()
    for text in ax.texts:
        extent = Text.get_window_extent(text)  # without its line
        assert (
            box.x0 < extent.x0 and extent.x1 < box.x1 and box.y0 < extent.y0 and extent.y1 < box.y1
        ), text.get_text()


def test_recall_curve_draws_injection_ratios_apart(results):
    import pandas as pd

    from tl_localize.evals.inj_benchmark import InjResults
    from tl_localize.report.figures import recall_curve

    small = results.frame.assign(
        injection_ratio=0.003, ratio=results.frame["ratio"] / 10, recall=0.1
    )
    panels = recall_curve(InjResults(pd.concat([results.frame, small]))).axes
    assert [ax.get_title() for ax in panels] == [
        "INJ: 0.3 % of all rows trained",
        "INJ: 3 % of all rows trained",
    ]
    lines = [[line.lines[0].get_xdata().tolist() for line in ax.containers] for ax in panels]
    assert lines == [[pytest.approx([0.3, 0.6])] * 2, [pytest.approx([3, 6])] * 2]


def test_each_method_has_one_colour_and_marker_and_its_name_beside_it(results, del_results):
    from tl_localize.report.figures import forgetting, recall_curve, target_against_distractors
    from tl_localize.report.looks import LOOKS

    assert (
        len({look.colour for look in LOOKS.values()})
        == len({look.marker for look in LOOKS.values()})
        == len(LOOKS)
    )
    for figure, names in (
        (recall_curve(results), {"Activations": "activations", "RowNorm": "row_norm"}),
        (
            target_against_distractors(results),
            {"Activations": "activations", "RowNorm": "row_norm"},
        ),
        (forgetting(del_results), {"Hard Concrete": "hard_concrete", "Random": "random"}),
    ):
        for ax in figure.axes:
            handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
            written = {text.get_text(): text for text in ax.texts}
            for title, name in names.items():
                line = handles[title].lines[0]
                assert (line.get_color(), line.get_marker()) == LOOKS[name] and written[
                    title
                ].get_color() == LOOKS[name].colour


def test_names_do_not_cover_each_other(results):
    from dataclasses import replace

    from matplotlib.text import Text

    from tl_localize.report.figures import recall_curve
    from tl_localize.report.looks import LOOKS

    activations = results.frame[results.frame["method"] == "activations"]
    nine = [
        activations.assign(method=name, recall=0.9 + 0.01 * i)
        for i, name in enumerate(LOOKS)
        if name != "true_rows"
    ]
    figure = recall_curve(replace(results, frame=pd.concat(nine)))
    figure.draw_without_rendering()
    boxes = [
        Text.get_window_extent(text)
        for text in figure.axes[0].texts
        if text.get_text() != "higher is better"
    ]
    assert len(boxes) == len(LOOKS) - 1
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


@pytest.mark.parametrize("name", ["recall_curve", "target_against_distractors"])
def test_inj_figures_without_a_converged_injection_say_so(results, name):
    from dataclasses import replace

    from tl_localize.report import figures

    (ax,) = getattr(figures, name)(
        replace(results, frame=results.frame.assign(converged=False))
    ).axes
    assert ax.get_title() == "INJ: no injection converged"


def test_recall_curve_leaves_out_the_true_rows(results):
    from tl_localize.report.figures import recall_curve

    drawn = points(recall_curve(results))
    assert set(drawn) == {"Activations", "RowNorm"}
    assert all(
        math.isclose(a, b)
        for a, b in zip(
            (x for point in drawn["Activations"] for x in point), [3, 30, 6, 30], strict=True
        )
    )


def test_save_figure_writes_png_and_svg(results, tmp_path):
    from tl_localize.report.figures import recall_curve, save_figure

    save_figure(recall_curve(results), tmp_path / "figures", "curve")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"curve.png", "curve.svg"}


def test_figures_take_an_axis(results):
    from matplotlib.figure import Figure

    from tl_localize.report.figures import recall_curve

    ax = Figure().add_subplot()
    assert recall_curve(results, ax) is ax.figure


def test_forgetting_draws_each_method_at_its_means(del_results):
    from matplotlib.figure import Figure

    from tl_localize.report.figures import forgetting

    panels = forgetting(del_results).axes
    assert [ax.get_title() for ax in panels] == [
        f"DEL: top {share} % of each layer ablated" for share in (0.1, 0.5)
    ]
    drawn = points(forgetting(del_results, Figure().add_subplot()))  # the largest ratio
    assert set(drawn) == {"Hard Concrete", "Integrated Gradients", "Random"}
    ((others, own),) = drawn["Hard Concrete"]
    frame = del_results.frame[
        (del_results.frame["method"] == "hard_concrete") & (del_results.frame["ratio"] == 0.005)
    ]
    assert own == pytest.approx(35)
    assert others == pytest.approx(-100 * frame["delta_neg_accuracy"].mean())


def test_prices_draws_each_method_from_nothing_through_all_ratios_with_errors(del_results):
    from tl_localize.report.figures import prices

    (ax,) = prices(del_results).axes
    frame = (
        -100
        * del_results.frame.groupby(["method", "ratio"])[
            ["delta_neg_accuracy", "delta_self_accuracy"]
        ].mean()
    )
    errors = (
        100
        * del_results.frame.groupby(["method", "ratio"])[
            ["delta_neg_accuracy", "delta_self_accuracy"]
        ].sem()
    )
    drawn = {bars.get_label(): bars for bars in ax.containers}
    for label, name in (("Hard Concrete", "hard_concrete"), ("Random", "random")):
        line, _, (across, up) = drawn[label]
        assert line.get_xydata().ravel() == pytest.approx(
            [0, 0, *frame.loc[name].to_numpy().ravel()]
        )
        for bars, axis, column in (
            (across, 0, "delta_neg_accuracy"),
            (up, 1, "delta_self_accuracy"),
        ):
            halves = [float(abs(ends[1, axis] - ends[0, axis])) / 2 for ends in bars.get_segments()]
            assert halves == pytest.approx([0, *errors.loc[name, column]])
    assert [
        line.get_xdata()[0]
        for line in ax.lines
        if line.get_label().startswith("_") and len(line.get_xdata()) == 2
    ] == [0.5, 1, 3]


def test_prices_has_a_panel_for_each_model(del_results):
    from dataclasses import replace

    from tl_localize.report.figures import prices

    both = pd.concat([del_results.frame, del_results.frame.assign(model="other")])
    titles = [ax.get_title() for ax in prices(replace(del_results, frame=both)).axes]
    assert titles == [
        f"DEL: what is forgotten at which price, {model}, zero" for model in ("m", "other")
    ]


def test_confusion_groups_categories_and_has_targets_on_both_axes(del_results):
    from tl_localize.report.figures import confusion

    panels = confusion(del_results, 0.005).axes
    assert [ax.get_title() for ax in panels[:3]] == [
        "Hard Concrete",
        "Integrated Gradients",
        "Random",
    ]
    drawn = panels[0].images[0].get_array()
    assert drawn.shape == (4, 4)
    assert drawn.diagonal().tolist() == pytest.approx([-40, -40, -20, -40])  # a, c, b, d
    assert drawn[0].tolist() == pytest.approx([-40, -10, -1, -1])
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["poems", "code"]
    assert panels[0].get_yticks().tolist() == [0.5, 2.5]


def test_confusion_of_some_targets_is_square(del_results):
    from dataclasses import replace

    from tl_localize.report.figures import confusion

    some = {key: matrix.iloc[:2] for key, matrix in del_results.confusion.items()}
    assert confusion(replace(del_results, confusion=some)).axes[2].images[0].get_array().shape == (
        2,
        2,
    )


def test_confusion_leaves_empty_what_a_method_of_fewer_targets_did_not_measure(del_results):
    """As Zero-Out's in the committed tables: the panels keep one order."""
    from dataclasses import replace

    from tl_localize.report.figures import confusion

    fewer = {
        key: matrix.iloc[:2, :2] if key[0] == "integrated_gradients" else matrix
        for key, matrix in del_results.confusion.items()
    }
    panels = confusion(replace(del_results, confusion=fewer), 0.005).axes
    whole = confusion(del_results, 0.005).axes
    drawn, wanted = (ax[1].images[0].get_array().filled(np.nan) for ax in (panels, whole))
    measured = ~np.isnan(drawn)
    assert measured.sum() == 4 and drawn[measured].tolist() == wanted[measured].tolist()
    assert panels[0].images[0].get_array().tolist() == whole[0].images[0].get_array().tolist()


def test_confusion_matrices_share_a_scale_around_zero(del_results):
    from tl_localize.report.figures import confusion

    drawn = [ax.images[0] for ax in confusion(del_results, 0.005).axes[:3]]
    assert [image.get_clim() for image in drawn] == [pytest.approx((-40, 40))] * 3


def test_confusion_knows_the_ratios(del_results):
    from tl_localize.report.figures import confusion

    with pytest.raises(ValueError, match=r"ratio must be one of \[0.001, 0.005\], got 0.3"):
        confusion(del_results, 0.3)


@pytest.fixture
def layers():
    rows = [
        {
            "method": "activations",
            "ratio": 0.005,
            "layer": layer,
            "multiple": multiple,
            "n_neurons": 14 + (layer is not None),
            "sequence_id": s,
        }
        | {
            "delta_self_accuracy": -0.1 * (layer is None)
            - 0.01 * multiple * (layer or 0)
            - 0.02 * s,
            "delta_neg_accuracy": 0.0,
        }
        for layer, multiple in ((None, 1), (0, 1), (0, 5), (1, 1), (1, 5))
        for s in range(3)
    ]
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def test_single_layer_draws_layers_and_all_layers_together(layers):
    from tl_localize.report.figures import single_layer

    figure = single_layer(layers)
    drawn = points(figure)
    assert [y for _, y in drawn["Self, one layer, 5 x the budget"]] == pytest.approx([-2, -7])
    assert [x for x, _ in drawn["Self, one layer, 1 x the budget"]] == [0, 1]
    assert [y for _, y in drawn["Self, 0.5 % of each layer"]] == pytest.approx([-12, -12])
    assert "15 neurons of one layer, 14 of all" in figure.axes[0].get_title()


def test_single_layer_names_the_layer_that_destroys_everything(layers):
    from tl_localize.report.figures import single_layer

    layers.loc[layers["layer"] == 0, ["delta_self_accuracy", "delta_neg_accuracy"]] = [-0.94, -0.86]
    figure = single_layer(layers)
    assert [x for x, _ in points(figure)["Self, one layer, 1 x the budget"]] == [1]
    assert "layer 0, 1 x: Self -94, Neg -86" in figure.axes[0].get_xlabel()


def test_single_layer_leaves_out_the_layers_below_the_first(layers):
    from tl_localize.report.figures import single_layer

    drawn = points(single_layer(layers, first_layer=1))
    assert [x for x, _ in drawn["Self, one layer, 5 x the budget"]] == [1]
    assert [y for _, y in drawn["Self, 0.5 % of each layer"]] == pytest.approx([-12, -12])


def test_del_figures_are_named_and_have_titles_and_units(del_results, layers):
    from dataclasses import replace

    from tl_localize.report.figures import del_figures

    figures = del_figures(replace(del_results, single_layer={"activations": layers}))
    assert set(figures) == {
        "del_forgetting",
        "del_prices",
        "del_confusion",
        "del_single_layer_activations",
    }
    for figure in figures.values():
        assert any(ax.get_title() and ax.get_ylabel() for ax in figure.axes) and any(
            ax.get_xlabel() for ax in figure.axes
        )
        assert any("percentage points" in axis.get_ylabel() for axis in figure.axes)


def test_del_figures_of_one_ratio(del_results):
    from dataclasses import replace

    from tl_localize.report.figures import forgetting

    frame = del_results.frame[del_results.frame["ratio"] == 0.005]
    assert set(points(forgetting(replace(del_results, frame=frame)))) == {
        "Hard Concrete",
        "Integrated Gradients",
        "Random",
    }


# ---- scores, sets and the reference models
# -------------------------------------------------------------------------------


@pytest.fixture
def scores():
    import torch

    from tl_localize import NeuronScores

    values = torch.zeros(3, 400)
    values[0, 7], values[1, 399], values[2, 5] = 2.0, 4.0, -1.0
    return NeuronScores(values, "attribution", "a poem")


def images(figure):
    return [image.get_array() for ax in figure.axes for image in ax.images]


def test_score_map_shows_the_largest_score_of_neighbours(scores):
    from tl_localize.report.figures import score_map

    (image,) = images(score_map(scores))
    assert image.shape == (3, 134)  # 400 neurons, three a column
    assert (image[0, 2], image[1, 133], image.max(), image[2].max()) == (2, 4, 4, 0)


def test_score_map_per_layer_compares_within_layers(scores):
    from tl_localize.report.figures import score_map

    (image,) = images(score_map(scores, per="layer"))
    assert image.max(1).tolist() == [1, 1, 0]


def test_score_map_names_method_sequence_and_axes(scores):
    from tl_localize.report.figures import score_map

    ax = score_map(scores).axes[0]
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == (
        "Attribution: a poem",
        "neuron",
        "layer",
    )


def test_score_map_rejects_an_unknown_choice(scores, unchecked):
    from tl_localize.report.figures import score_map

    with pytest.raises(ValueError, match="per must be 'layer' or 'model', got 'neuron'"):
        score_map(scores, per="neuron")


def test_neurons_by_layer_counts_found_and_hits(scores):
    from tl_localize.report.figures import neurons_by_layer

    # two of every layer: the best one and, among ties at zero, the lowest
    found = scores.top_k(0.005)
    (ax,) = neurons_by_layer({"ours": found}, scores.top_k(0.0025)).axes
    assert [line.get_ydata().tolist() for line in ax.lines] == [[2, 2, 2], [1, 1, 1]]
    assert [patch.get_height() for patch in ax.patches] == [1, 1, 1]
    assert [text.get_text() for text in neurons_by_layer({"zero_out": found}).axes[0].texts] == [
        "Zero-Out"
    ]
    assert "ours, true (100 % recall)" in [text.get_text() for text in ax.texts]


def test_neurons_by_layer_rejects_sets_of_two_models(scores):
    import torch

    from tl_localize import NeuronSet
    from tl_localize.report.figures import neurons_by_layer

    with pytest.raises(ValueError, match="found must hold sets of one model"):
        neurons_by_layer({"a": scores.top_k(0.01), "b": NeuronSet(torch.ones(2, 3) > 0)})
    with pytest.raises(ValueError, match="found must hold at least one set"):
        neurons_by_layer({})


def test_neurons_by_layer_rejects_scores(scores, unchecked):
    from tl_localize.report.figures import neurons_by_layer

    with pytest.raises(TypeError, match="found must hold sets of neurons, got NeuronScores"):
        neurons_by_layer({"ours": scores})


def test_memorization_by_repetition_rises_to_all(scores):
    from tl_localize.report.figures import memorization_by_repetition

    (ax,) = memorization_by_repetition(["reference-gpt2"]).axes
    memorized = ax.lines[0].get_ydata()
    assert memorized[0] < 10 and memorized[-1] == 100


def test_memorization_by_repetition_knows_only_shipped_models():
    from tl_localize.report.figures import memorization_by_repetition

    with pytest.raises(ValueError, match=r"models must be among .* got 'gpt2'"):
        memorization_by_repetition(["gpt2"])


def test_figure_shows_itself_in_a_notebook(scores):
    from tl_localize.report.figures import score_map

    png, shown = score_map(scores)._repr_png_()  # with twice the pixels that are shown
    assert png.startswith(b"\x89PNG") and shown == {"width": 512, "height": 368}
