"""Means, errors and tests against numbers known by hand or from scipy."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats


def test_mean_and_error_of_known_values():
    from tl_localize.stats import mean_and_error

    mean, error = mean_and_error([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert error == pytest.approx(math.sqrt(5 / 3) / 2)


def test_mean_and_error_of_one_value_has_no_error():
    from tl_localize.stats import mean_and_error

    assert math.isnan(mean_and_error([1.0])[1])


def test_text_leaves_out_an_error_that_is_not_known_and_the_sign_of_zero():
    from tl_localize.stats import with_error

    assert with_error([1.0, 2.0], 2) == "1.50 ± 0.50"
    assert with_error([-0.001]) == "0.0"


def test_mean_and_error_rejects_nothing():
    from tl_localize.stats import mean_and_error

    with pytest.raises(ValueError, match="values must hold at least one number"):
        mean_and_error([])


@pytest.mark.parametrize("alternative", ["two-sided", "less", "greater"])
def test_paired_test_equals_one_sample_test_of_differences(alternative):
    from tl_localize.stats import paired_test

    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 20), rng.normal(0, 1, 20)
    expected = scipy_stats.ttest_1samp(a - b, 0, alternative=alternative).pvalue
    assert paired_test(a, b, alternative) == pytest.approx(expected)


def test_paired_test_of_equal_values_gives_no_evidence():
    from tl_localize.stats import paired_test

    assert paired_test([1.0, 2.0], [1.0, 2.0]) == 1.0


def test_paired_test_of_constant_difference_is_certain():
    from tl_localize.stats import paired_test

    assert paired_test([2.0, 3.0], [1.0, 2.0], "greater") == 0.0
    assert paired_test([2.0, 3.0], [1.0, 2.0], "less") == 1.0


def test_paired_test_rejects_unpaired_values():
    from tl_localize.stats import paired_test

    with pytest.raises(ValueError, match="second must pair with first"):
        paired_test([1.0, 2.0], [1.0])


def test_compare_with_reference_divides_the_level_by_the_settings():
    from tl_localize.stats import compare_with_reference

    rng = np.random.default_rng(1)
    frame = pd.DataFrame(
        [
            {"sequence_id": s, "method": m, "ratio": r, "recall": rng.uniform() + (m == "good")}
            for s in range(10)
            for m in ("good", "reference")
            for r in (0.01, 0.02)
        ]
    )
    tests = compare_with_reference(frame, "reference", "recall", ["ratio"])
    assert list(tests["method"]) == ["good", "good"]
    assert tests["tests"].tolist() == [2, 2] and tests["level"].tolist() == [0.025, 0.025]
    assert tests["significant"].all()


def test_compare_with_reference_names_a_missing_reference():
    from tl_localize.stats import compare_with_reference

    frame = pd.DataFrame({"sequence_id": [1], "method": ["a"], "ratio": [0.1], "recall": [0.5]})
    with pytest.raises(ValueError, match="reference must be one of the methods"):
        compare_with_reference(frame, "b", "recall", ["ratio"])


def test_settings_without_the_reference_are_left_out():
    import pandas as pd

    from tl_localize.stats import compare_with_reference

    rows = [
        {"sequence_id": i, "method": m, "ratio": r, "x": i + len(m)}
        for i in range(3)
        for m, r in (("a", 1), ("ref", 1), ("a", 2))
    ]
    tests = compare_with_reference(pd.DataFrame(rows), "ref", "x", ["ratio"])
    assert tests[["method", "ratio", "n"]].to_numpy().tolist() == [["a", 1, 3]]


@pytest.mark.parametrize("alternative", ["two-sided", "less", "greater"])
def test_paired_test_of_differences_below_rounding_gives_no_evidence(alternative):
    from tl_localize.stats import paired_test

    assert paired_test([0.1 + 0.2] * 3, [0.3] * 3, alternative) == 1.0


def test_compare_all_says_both_ways_in_every_setting():
    from tl_localize.stats import compare_all

    values = {("a", 1): [1, 2, 3], ("b", 1): [0, 2, 1], ("a", 2): [4, 4, 4], ("b", 2): [0, 1, 2]}
    rows = [
        {"sequence_id": i, "method": m, "ratio": r, "x": x}
        for (m, r), some in values.items()
        for i, x in enumerate(some)
    ]
    table = compare_all(pd.DataFrame(rows), "x", ["ratio"])
    assert list(table.index) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    for ratio, method, other in ((1, "a", "b"), (1, "b", "a"), (2, "b", "a")):
        x, y = values[method, ratio], values[other, ratio]
        p = scipy_stats.ttest_rel(x, y, alternative="greater").pvalue
        assert (
            table.loc[(ratio, method), other]
            == f"{100 * (np.mean(x) - np.mean(y)):.1f} (p = {p:.1g})"
        )
        assert table.loc[(ratio, method), method] == ""


def test_compare_all_of_one_pair_has_no_p():
    from tl_localize.stats import compare_all

    frame = pd.DataFrame({"sequence_id": 1, "method": ["a", "b"], "ratio": 0.1, "x": [0.5, 0.2]})
    assert compare_all(frame, "x", ["ratio"]).to_numpy().tolist() == [["", "30.0"], ["-30.0", ""]]


def test_interpolated_at_takes_the_first_place_that_costs_so_much():
    from tl_localize.stats import interpolated_at

    costs, gains = [2.0, 1.0, 4.0], [10.0, 20.0, 50.0]
    assert [interpolated_at(price, costs, gains) for price in (1.0, 2.0, 3.0, 4.0)] == [
        5.0,
        10.0,
        40.0,
        50.0,
    ]
    assert math.isnan(interpolated_at(4.5, costs, gains))
    assert interpolated_at(1.0, [-1.0, 1.0], [4.0, 8.0]) == 8.0


def test_jackknife_of_a_mean_is_its_standard_error():
    from tl_localize.stats import jackknife, mean_and_error

    values = np.array([1.0, 2.0, 4.0, 9.0])
    assert jackknife([np.delete(values, i).mean() for i in range(4)]) == pytest.approx(
        mean_and_error(values)[1]
    )
    assert math.isnan(jackknife([3.0])) and math.isnan(jackknife([3.0, math.nan]))
