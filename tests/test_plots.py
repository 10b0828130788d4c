"""Figures show what the frame holds."""

import math

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
        for method, own, foreign in (("activations", 0.3, 0.2), ("row_norm", 0.25, 0.25), ("true_rows", 1.0, 0.0))
        for multiple in (1, 2)
    ]
    return InjResults(pd.DataFrame(rows), truth=pd.DataFrame({"sequence_id": ["s00"]}))


def points(figure):
    """Centre of each labelled point or line of a figure, by its label."""
    (ax,) = figure.axes
    handles, labels = ax.get_legend_handles_labels()
    return {label: handle[0].get_xydata().tolist() for handle, label in zip(handles, labels, strict=True)}


def test_own_against_foreign_draws_each_method_at_its_means(results):
    from tl_localize.plots import own_against_foreign

    assert points(own_against_foreign(results)) == {"Activations": [[20.0, 30.0]], "RowNorm": [[25.0, 25.0]]}


def test_own_against_foreign_draws_the_three_levels(results):
    from tl_localize.plots import own_against_foreign

    (ax,) = own_against_foreign(results).axes
    assert [text.get_text() for text in ax.texts] == ["knows nothing", "knows what was altered", "the true rows"]
    assert [text.xy for text in ax.texts] == [(3.0, 3.0), (25.0, 25.0), (0.0, 100.0)]


def test_own_against_foreign_needs_distractors(results):
    from tl_localize.evals.inj_benchmark import InjResults
    from tl_localize.plots import own_against_foreign

    with pytest.raises(ValueError, match="results must be of INJ with distractors"):
        own_against_foreign(InjResults(results.frame))


def test_recall_curve_leaves_out_the_true_rows(results):
    from tl_localize.plots import recall_curve

    drawn = points(recall_curve(results))
    assert set(drawn) == {"Activations", "RowNorm"}
    assert all(math.isclose(a, b) for a, b in zip((x for point in drawn["Activations"] for x in point), [3, 30, 6, 30], strict=True))


def test_save_figure_writes_png_and_svg(results, tmp_path):
    from tl_localize.plots import recall_curve, save_figure

    save_figure(recall_curve(results), tmp_path / "figures", "curve")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"curve.png", "curve.svg"}


def test_figures_take_an_axis(results):
    from matplotlib.figure import Figure

    from tl_localize.plots import recall_curve

    ax = Figure().add_subplot()
    assert recall_curve(results, ax) is ax.figure
