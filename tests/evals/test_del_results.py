"""The tables that are made of what DEL measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from noise import Noise, letters
from scipy.stats import ttest_rel

from tl_localize import accuracy, levenshtein, perplexity
from tl_localize.execution.store import Cache


def test_before_says_how_well_the_model_memorizes(gpt2_like: Any, benchmark_of: Any) -> None:
    benchmark = benchmark_of(gpt2_like)
    results, sequences = benchmark.run([Noise()]), benchmark.test_sequences
    before = results.before
    assert before["accuracy"].tolist() == pytest.approx(accuracy(gpt2_like, sequences).tolist())
    assert before["levenshtein"].tolist() == levenshtein(gpt2_like, sequences, letters).tolist()
    assert before["length"].tolist() == [len(letters(s.suffix.tolist())) for s in sequences]
    whole = perplexity(gpt2_like, benchmark.general_tokens)
    assert before["perplexity"].unique() == pytest.approx(whole)
    assert results.before_table().loc["gpt2-like", "Sequences"] == "5"


def test_confusion_holds_every_pair(gpt2_like: Any, benchmark_of: Any) -> None:
    results = benchmark_of(gpt2_like).run([Noise()])
    matrix = results.confusion["noise", 0.5]
    rows = results.frame.query("method == 'noise' and ratio == 0.5")
    assert list(matrix.index) == list(matrix.columns) == list(rows["sequence_id"])
    assert np.diag(matrix) == pytest.approx(rows["delta_self_accuracy"])
    others = (matrix.to_numpy().sum(1) - np.diag(matrix)) / 4
    assert others == pytest.approx(rows["delta_neg_accuracy"])
    grouped = results.confusion_by_category("noise", 0.5)
    assert [category for category, _ in grouped.index] == ["b", "b", "b", "a", "a"]
    assert grouped.loc[("b", "s5"), ("a", "s4")] == matrix.loc["s5", "s4"]
    with pytest.raises(ValueError, match="method and ratio must be one of"):
        results.confusion_by_category("noise", 0.3)


def test_table_has_the_paper_s_rows_and_errors(gpt2_like: Any, benchmark_of: Any) -> None:
    results = benchmark_of(gpt2_like).run([Noise()])
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


def test_tests_ask_whether_self_accuracy_falls_more(gpt2_like: Any, benchmark_of: Any) -> None:
    results = benchmark_of(gpt2_like).run([Noise(), Noise("integrated_gradients", 5)])
    tests = results.tests().set_index(["method", "ratio"])
    wide = results.frame.query("ratio == 0.5").pivot(
        index="sequence_id", columns="method", values="delta_self_accuracy"
    )
    expected = ttest_rel(wide["noise"], wide["integrated_gradients"], alternative="less").pvalue
    assert tests.loc[("noise", 0.5), "p_value"] == pytest.approx(expected)
    assert (tests["level"] == 0.05 / 2).all()
    with pytest.raises(ValueError, match=r"reference must be one of the methods .*got 'slimming'"):
        results.tests("slimming")


def test_save_writes_every_number(gpt2_like: Any, benchmark_of: Any, tmp_path: Path) -> None:
    benchmark = benchmark_of(gpt2_like, n_dev=6)  # one test sequence: Neg is nan
    results = benchmark.run([Noise()])
    assert results.frame["delta_neg_accuracy"].isna().all()
    lacking = pd.DataFrame(
        [{"ratio": 0.5, "sequence_id": "7", "method": "noise", "reason": "out of memory"}]
    )
    replace(results, missing=lacking).save(tmp_path)
    assert pd.read_csv(tmp_path / "missing.csv")["reason"].tolist() == ["out of memory"]
    results.save(tmp_path)
    assert not (tmp_path / "missing.csv").exists()
    written = pd.read_csv(tmp_path / "frame.csv")
    assert written["delta_perplexity"].tolist() == pytest.approx(
        results.frame["delta_perplexity"].tolist()
    )
    confusion = pd.read_csv(tmp_path / "confusion.csv")
    assert len(confusion) == 2 * len(results.confusion) and set(confusion["change of"]) == {
        "accuracy",
        "levenshtein",
    }


def test_related_compares_the_category_with_all_others(gpt2_like: Any, benchmark_of: Any) -> None:
    results = benchmark_of(gpt2_like).run([Noise()])  # test sequences: b b a b a
    row = results.related().set_index(["method", "ratio"]).loc[("noise", 0.5)]
    matrix = results.confusion["noise", 0.5].to_numpy()
    own = [[1, 3], [0, 3], [4], [0, 1], [2]]
    related = [matrix[i, others].mean() for i, others in enumerate(own)]
    unrelated = [np.delete(matrix[i], [i, *others]).mean() for i, others in enumerate(own)]
    assert row["related"] == pytest.approx(np.mean(related))
    assert row["unrelated"] == pytest.approx(np.mean(unrelated))
    assert row["n"] == 5
    nameless = replace(results, before=results.before.assign(category=""))
    assert len(nameless.related()) == 0


def test_runs_into_one_cache_with_different_targets_say_how_many(
    gpt2_like: Any, benchmark_of: Any
) -> None:
    cache = Cache()
    many = benchmark_of(gpt2_like, n_targets=4).run([Noise()], cache)
    both = benchmark_of(gpt2_like, n_targets=2).run([Noise("other", 9)], cache)
    assert both.table()["targets"].tolist() == ["4", "4", "2"] * 2
    assert {key[0]: len(matrix) for key, matrix in both.confusion.items()} == {
        "noise": 4,
        "random": 4,
        "other": 2,
    }
    assert "targets" not in many.table()


@pytest.fixture
def priced(del_results: Any) -> Any:
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


def test_curve_holds_means_and_errors_over_the_targets_of_all_ratios(priced: Any) -> None:
    curve = priced.curve().set_index(["method", "ratio"])
    assert curve.loc[
        ("hard_concrete", 0.005), ["self", "self_error", "neg", "neg_error", "n"]
    ].tolist() == pytest.approx([-30, 10 / np.sqrt(3), -2, 0, 3])
    assert curve.loc[
        ("integrated_gradients", 0.001), ["self", "neg", "n"]
    ].tolist() == pytest.approx([-10, -0.8, 3])


def test_at_price_interpolates_between_the_ratios_and_says_where_the_curve_ends(
    priced: Any,
) -> None:
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
        "the curve ends at": "-30.0 ± 5.8 / -2.0 ± 0.0 (0.5 %)",
    }
    # 5/8 of the way to the first ratio, -10 ± 1.15
    assert table.loc["integrated_gradients", "Self at Neg = -0.5"] == "-6.2 ± 0.7"
    assert table.loc["integrated_gradients", "Self at Neg = -1"] == "-"


def test_at_price_has_no_error_where_the_curve_without_a_target_ends_before(priced: Any) -> None:
    frame = priced.frame[priced.frame["method"] == "hard_concrete"]
    one_costs_more = frame["delta_neg_accuracy"].mask(
        (frame["sequence_id"] == "c") & (frame["ratio"] == 0.005), -0.08
    )
    found = replace(priced, frame=frame.assign(delta_neg_accuracy=one_costs_more)).at_price()
    assert found.loc["hard_concrete", "Self at Neg = -3"] == f"{-10 - 20 * 2.6 / 3.6:.1f}"


def test_pairs_compare_each_method_with_every_other_at_the_largest_ratio(
    gpt2_like: Any, benchmark_of: Any
) -> None:
    results = benchmark_of(gpt2_like).run([Noise(), Noise("other", 5)])
    pairs = results.pairs()
    assert list(pairs.index) == list(pairs.columns) == ["noise", "other", "random"]
    wide = results.frame.query("ratio == 0.5").pivot(
        index="sequence_id", columns="method", values="delta_self_accuracy"
    )
    for row, column in (("noise", "other"), ("other", "noise"), ("random", "noise")):
        p = ttest_rel(wide[row], wide[column], alternative="less").pvalue
        assert (
            pairs.loc[row, column]
            == f"{100 * (wide[row] - wide[column]).mean() + 0.0:.1f} (p = {p:.1g})"
        )
    assert (np.diag(pairs) == "").all()


def test_at_price_keeps_models_apart(del_results: Any) -> None:
    two = [del_results.frame, del_results.frame.assign(model="other")]
    assert set(replace(del_results, frame=pd.concat(two)).at_price().index) == {
        (m, n) for m in ("m", "other") for n in ("hard_concrete", "integrated_gradients", "random")
    }
