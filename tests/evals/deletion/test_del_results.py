"""The tables that are made of what DEL measured."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from noise import Noise, letters
from scipy.stats import ttest_rel

from tl_localize import DelResults, accuracy, levenshtein, perplexity
from tl_localize.evals.deletion import del_tables
from tl_localize.evals.deletion.results import self_and_others
from tl_localize.execution import Steps
from tl_localize.stats import with_error


def test_before_says_how_well_the_model_memorizes(measured):
    benchmark, results = measured
    model = benchmark.model
    sequences = benchmark.test_sequences
    before = results.before
    assert before["accuracy"].tolist() == pytest.approx(accuracy(model, sequences).tolist())
    assert before["levenshtein"].tolist() == levenshtein(model, sequences, letters).tolist()
    assert before["length"].tolist() == [len(letters(s.suffix.tolist())) for s in sequences]
    whole = perplexity(model, benchmark.general_tokens)
    assert before["perplexity"].unique() == pytest.approx(whole)
    assert results.before_table().loc["gpt2-like", "Sequences"] == "5"


def test_confusion_holds_every_pair(measured):
    _, results = measured
    matrix = results.confusion["noise", 0.5]
    rows = results.frame.query("method == 'noise' and ratio == 0.5")
    assert list(matrix.index) == list(matrix.columns) == list(rows["sequence_id"])
    assert np.diag(matrix) == pytest.approx(rows["delta_self_accuracy"])
    others = (matrix.to_numpy().sum(1) - np.diag(matrix)) / 4
    assert others == pytest.approx(rows["delta_neg_accuracy"])


def test_table_has_the_paper_s_rows_and_errors(measured):
    _, results = measured
    table = results.table()
    values = 100 * results.frame.query("method == 'noise' and ratio == 0.5")["delta_self_accuracy"]
    expected = f"{values.mean():.1f} ± {values.std() / np.sqrt(5):.1f}"
    assert (
        table.loc[("50 % of each layer, 5 sequences", "noise"), "Δ Self-Acc (points)"] == expected
    )
    summary = results.summary().set_index(["method", "ratio", "metric"])
    assert summary.loc[("noise", 0.5, "delta_self_accuracy"), "mean"] == pytest.approx(
        values.mean() / 100
    )


def test_a_ratio_that_is_so_many_units_is_called_so(gpt2_like, benchmark_of):
    """1 / 48 of a layer is one neuron, not 2.08333 %."""
    from tl_localize import RandomBaseline

    results = benchmark_of(gpt2_like, n_targets=1, ratios=(1 / 48, 2 / 48)).run([RandomBaseline()])
    assert results.frame["n_layers"].tolist() == [1, 1]
    assert list(results.table().index.unique(0)) == [
        "1 neuron of each layer (2.1 %), 1 sequence",
        "2 neurons of each layer (4.2 %), 1 sequence",
    ]


def test_tests_ask_whether_self_accuracy_falls_more(measured):
    _, results = measured
    tests = results.tests().set_index(["method", "ratio"])
    wide = results.frame.query("ratio == 0.5").pivot(
        index="sequence_id", columns="method", values="delta_self_accuracy"
    )
    expected = ttest_rel(wide["noise"], wide["integrated_gradients"], alternative="less").pvalue
    assert tests.loc[("noise", 0.5), "p_value"] == pytest.approx(expected)
    assert (tests["level"] == 0.05 / 2).all()
    with pytest.raises(ValueError, match=r"reference must be one of .*got 'slimming'"):
        results.tests("slimming")


def test_save_writes_every_number(gpt2_like, benchmark_of, tmp_path):
    benchmark = benchmark_of(gpt2_like, n_dev=6)  # one test sequence: Neg is nan
    results = benchmark.run([Noise()])
    assert results.frame["delta_neg_accuracy"].isna().all()
    lacking = pd.DataFrame(
        [{"method": "noise", "part": "7", "scope": "0.5", "reason": "out of memory"}]
    )
    replace(results, missing=lacking).save(tmp_path)
    assert pd.read_csv(tmp_path / "missing.csv")["reason"].tolist() == ["out of memory"]
    results.save(tmp_path)
    assert not (tmp_path / "missing.csv").exists()
    written = pd.read_csv(tmp_path / "frame.csv")
    assert written["delta_perplexity"].tolist() == pytest.approx(
        results.frame["delta_perplexity"].tolist()
    )


def test_runs_with_different_targets_say_how_many(gpt2_like, benchmark_of):
    steps = Steps()
    benchmark_of(gpt2_like, n_targets=4).run([Noise()], steps)
    both = benchmark_of(gpt2_like, n_targets=2).run([Noise("other", 9)], steps)
    assert both.table()["targets"].tolist() == ["4", "4", "2"] * 2
    assert {key[0]: len(matrix) for key, matrix in both.confusion.items()} == {
        "noise": 4,
        "random": 4,
        "other": 2,
    }


@pytest.fixture
def priced(del_results):
    """Hard Concrete by hand, three targets at 0.1 and 0.5 %, in points: Neg -0.4 and -2; Self -8,
    -10, -12 and -20, -30, -40.

    Integrated Gradients has the fourth target at 0.1 % only, and its Neg is the smaller at the
    larger ratio.
    """
    own = {0.001: {"a": -8, "b": -10, "c": -12}, 0.005: {"a": -20, "b": -30, "c": -40}}
    negs = {
        "hard_concrete": {0.001: -0.4, 0.005: -2.0},
        "integrated_gradients": {0.001: -0.8, 0.005: -0.2},
    }
    rows = [
        {"model": "m", "ablation": "zero", "sequence_id": name, "method": method, "ratio": ratio}
        | {"delta_self_accuracy": value / 100, "delta_neg_accuracy": neg[ratio] / 100}
        for method, neg in negs.items()
        for ratio, values in own.items()
        for name, value in values.items()
    ]
    rows.append(rows[-1] | {"sequence_id": "d", "ratio": 0.001, "delta_self_accuracy": -1.0})
    return replace(del_results, frame=pd.DataFrame(rows))


def test_points_are_of_the_targets_that_have_all_ratios(priced):
    points = priced.points()
    assert points["hard_concrete"]["self", 0.005].tolist() == pytest.approx([-20, -30, -40])
    found = points["integrated_gradients"][["self", "neg"]].xs(0.001, axis=1, level="ratio")
    assert len(found) == 3 and found.mean().tolist() == pytest.approx([-10, -0.8])


def test_at_price_interpolates_between_the_ratios_and_says_where_the_curve_ends(
    priced,
):
    """At Neg -0.5 the share s = 0.1 / 1.6 of the way is gone: each target by itself has (1 - s)
    Self(0.1 %) + s Self(0.5 %).
    """
    cells = {}
    for price in (0.5, 1):
        s = (price - 0.4) / 1.6
        each = np.array([(1 - s) * -8 + s * -20, (1 - s) * -10 + s * -30, (1 - s) * -12 + s * -40])
        cells[f"Self at Neg = -{price:g}"] = (
            f"{each.mean():.1f} ± {each.std(ddof=1) / np.sqrt(3):.1f}"
        )
    table = priced.at_price()
    assert table.loc["hard_concrete"].to_dict() == cells | {
        "Self at Neg = -3": "-",
        "Self at Neg = -5": "-",
        "the curve ends at": "-30.0 ± 5.8 / -2.0 ± 0.0 (0.5 %)",
        "targets": "3",
    }
    # its first ratio costs more
    assert table.loc["integrated_gradients", "Self at Neg = -0.5"] == "costs at least 0.8"
    assert table.loc["integrated_gradients", "Self at Neg = -1"] == "-"


def test_at_price_has_no_error_where_the_curve_without_a_target_ends_before(priced):
    frame = priced.frame[priced.frame["method"] == "hard_concrete"]
    one_costs_more = frame["delta_neg_accuracy"].mask(
        (frame["sequence_id"] == "c") & (frame["ratio"] == 0.005), -0.08
    )
    found = replace(priced, frame=frame.assign(delta_neg_accuracy=one_costs_more)).at_price()
    assert found.loc["hard_concrete", "Self at Neg = -3"] == f"{-10 - 20 * 2.6 / 3.6:.1f}"


def test_ratios_that_take_as_many_units_of_the_model_have_a_block_each(measured):
    _, results = measured
    frame = results.frame.assign(per="model", n_neurons=7)
    both = DelResults(frame, {}, pd.DataFrame())
    assert len(both.table()) == len(frame.groupby(["ratio", "method"]))


def test_what_was_before_leaves_the_target_out_of_the_others():
    levels = {"perplexity": 20.0, "perplexity_base2": 8.0}
    before = [
        {"accuracy": accuracy, "levenshtein": distance, **levels}
        for accuracy, distance in ((1.0, 0), (0.9, 2), (0.8, 4))
    ]
    change = {"accuracy": [-0.5, 0, -0.1], "levenshtein": [9, 1, 2], **levels}
    row = self_and_others(0, change, before)
    assert (row["self_accuracy_before"], row["self_levenshtein_before"]) == (1.0, 0)
    assert row["neg_accuracy_before"] == pytest.approx(0.85) and row["neg_levenshtein_before"] == 3
    assert row["delta_neg_accuracy"] == pytest.approx(-0.05)


def test_the_table_has_accuracies_in_points_and_distances_as_they_are(measured):
    _, results = measured
    rows = results.frame.query("method == 'noise' and ratio == 0.5")
    found = results.table().loc[("50 % of each layer, 5 sequences", "noise")]
    assert found.to_dict() == {
        "Δ Self-Acc (points)": with_error(100 * rows["delta_self_accuracy"]),
        "Δ Self-Dist (characters)": with_error(rows["delta_self_levenshtein"]),
        "Δ Neg-Acc (points)": with_error(100 * rows["delta_neg_accuracy"]),
        "Δ Neg-Dist (characters)": with_error(rows["delta_neg_levenshtein"]),
        "Δ Rand-PPL": with_error(rows["delta_perplexity"], 2),
        "Δ Rand-PPL (2 ** nats)": with_error(rows["delta_perplexity_base2"], 2),
        "targets": "5",
    }


def test_the_table_of_single_layers_counts_them(gpt2_like, benchmark_of):
    results = benchmark_of(gpt2_like, layers="each", ratios=(0.1,)).run([Noise()])
    frame = results.single_layers
    frame["layer"] = frame["layer"].replace({0: 10, 1: 2})
    table = del_tables(results, "gpt2-like")["del_single_layer"].loc["noise"]
    assert list(table.index) == ["all layers", "layer 2", "layer 10"]


def test_the_table_of_single_layers_has_the_largest_ratio_in_points(gpt2_like, benchmark_of):
    how = {"layers": "each", "ratios": (0.1, 0.2), "multiples": (1, 2), "n_targets": 3}
    results = benchmark_of(gpt2_like, **how).run([Noise()])
    table = del_tables(results, "gpt2-like")["del_single_layer"].loc["noise"]
    frame = results.single_layers.query("method == 'noise' and ratio == 0.2")
    for layer, name in ((None, "all layers"), (0, "layer 0"), (1, "layer 1")):
        of_layer = frame[frame["layer"].isna() if layer is None else frame["layer"] == layer]
        for multiple, part in of_layer.groupby("multiple"):
            about = f"{multiple} x budget, "
            row = table.loc[name].to_dict()
            assert row[f"{about}neurons"] == f"{part['n_neurons'].mean():.0f}"
            assert row[f"{about}Self"] == with_error(100 * part["delta_self_accuracy"])
            assert row[f"{about}Neg"] == with_error(100 * part["delta_neg_accuracy"])


def test_the_table_of_memorization_has_percentages_and_means(measured):
    _, results = measured
    before = results.before
    assert results.before_table().loc["gpt2-like"].to_dict() == {
        "Acc (%)": with_error(100 * before["accuracy"]),
        "Dist (characters)": with_error(before["levenshtein"], 2),
        "PPL": f"{before['perplexity'].mean():.2f}",
        "PPL (2 ** nats)": f"{before['perplexity_base2'].mean():.2f}",
        "Len (characters)": f"{before['length'].mean():.0f}",
        "Sequences": "5",
    }
