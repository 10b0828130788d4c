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
    assert tests["level"].tolist() == [0.025, 0.025]
    assert tests["significant"].all()


def test_compare_with_reference_names_a_missing_reference():
    from tl_localize.stats import compare_with_reference

    frame = pd.DataFrame({"sequence_id": [1], "method": ["a"], "ratio": [0.1], "recall": [0.5]})
    with pytest.raises(ValueError, match="reference must be one of the methods"):
        compare_with_reference(frame, "b", "recall", ["ratio"])


def test_settings_without_the_reference_are_left_out():
    import pandas as pd

    from tl_localize.stats import compare_with_reference

    rows = [{"sequence_id": i, "method": m, "ratio": r, "x": i + len(m)} for i in range(3) for m, r in (("a", 1), ("ref", 1), ("a", 2))]
    tests = compare_with_reference(pd.DataFrame(rows), "ref", "x", ["ratio"])
    assert tests[["method", "ratio", "n"]].to_numpy().tolist() == [["a", 1, 3]]


@pytest.mark.parametrize("alternative", ["two-sided", "less", "greater"])
def test_paired_test_of_differences_below_rounding_gives_no_evidence(alternative):
    from tl_localize.stats import paired_test

    assert paired_test([0.1 + 0.2] * 3, [0.3] * 3, alternative) == 1.0
