"""Means, errors and tests against numbers known by hand or from scipy."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from tl_localize.stats import (
    at_cost,
    bootstrap,
    bootstrap_error,
    compare_with_reference,
    gain_at,
    html_table,
    paired_test,
    rank_agreement,
    with_error,
)

ALTERNATIVES = pytest.mark.parametrize("alternative", ["two-sided", "less", "greater"])


def frame_of(values):
    """One row for each number of each (method, ratio)."""
    return pd.DataFrame(
        [
            {"sequence_id": i, "method": method, "ratio": ratio, "x": x}
            for (method, ratio), some in values.items()
            for i, x in enumerate(some)
        ]
    )


def test_text_leaves_out_an_error_that_is_not_known_and_the_sign_of_zero():
    assert with_error([1.0, 2.0], 2) == "1.50 ± 0.50"
    assert with_error([-0.001]) == "0.0"


@ALTERNATIVES
def test_paired_test_equals_one_sample_test_of_differences(alternative):
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 20), rng.normal(0, 1, 20)
    expected = scipy_stats.ttest_1samp(a - b, 0, alternative=alternative).pvalue
    assert paired_test(a, b, alternative) == pytest.approx(expected)


@ALTERNATIVES
def test_paired_test_of_differences_below_rounding_gives_no_evidence(alternative):
    assert paired_test([0.1 + 0.2] * 3, [0.3] * 3, alternative) == 1.0


@ALTERNATIVES
def test_a_constant_difference_has_no_spread_to_test_it_by(alternative):
    assert math.isnan(paired_test([2.0, 3.0], [1.0, 2.0], alternative))


def test_pairs_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="second must have a number for each of the 3"):
        paired_test([1, 2, 3], [1])


def test_compare_with_reference_divides_the_level_by_the_settings_that_have_it():
    rng = np.random.default_rng(1)
    values = {(m, r): rng.uniform(size=10) + (m == "good") for m in ("good", "ref") for r in (1, 2)}
    values |= {("good", 3): [1], ("once", 1): values["good", 1]}
    tests = compare_with_reference(frame_of(values), "ref", "x", ["ratio"])
    assert tests[["method", "ratio", "n", "tests", "level"]].to_numpy().tolist() == [
        ["good", 1, 10, 2, 0.025],
        ["once", 1, 10, 1, 0.05],
        ["good", 2, 10, 2, 0.025],
    ]
    assert tests["significant"].all()


def test_compare_with_reference_names_a_missing_reference():
    with pytest.raises(ValueError, match="reference must be one of 'a', got 'b'"):
        compare_with_reference(frame_of({("a", 1): [1]}), "b", "x", ["ratio"])


def test_gain_at_takes_the_first_place_that_costs_so_much():
    costs, gains = [2.0, 1.0, 4.0], [10.0, 20.0, 50.0]
    assert [gain_at(price, costs, gains) for price in (2.0, 3.0, 4.0)] == [10.0, 40.0, 50.0]
    assert math.isnan(gain_at(4.5, costs, gains))
    assert gain_at(1.0, [-1.0, 1.0], [4.0, 8.0]) == 8.0


def test_gain_at_reads_nothing_off_a_line_from_nothing():
    assert math.isnan(gain_at(1.0, costs=[2.0, 4.0], gains=[10.0, 20.0]))


def test_at_cost_says_what_the_first_point_costs():
    costs, gains = np.array([[13.0, 20.0], [14.8, 22.0]]), np.array([[30.0, 40.0], [32.0, 44.0]])
    assert at_cost(5.0, costs, gains) == "costs at least 13.9"
    assert at_cost(30.0, costs, gains) == "-"


@pytest.mark.parametrize("n", [6, 12, 60])
def test_bootstrap_of_a_mean_is_near_its_interval_of_student(n):
    values = scipy_stats.norm.ppf((np.arange(n) + 0.5) / n, 5, 2)
    found = bootstrap(n, lambda drawn: values[drawn].mean(1))
    width = scipy_stats.t.ppf(0.975, n - 1) * scipy_stats.sem(values)
    wanted = values.mean() - width, values.mean() + width
    assert found == pytest.approx(wanted, abs=0.1 * width)
    plain = 1.96 * values.std() / math.sqrt(n)  # what percentiles of 2.5 % would give
    assert n > 12 or plain < 0.9 * width


def test_bootstrap_is_nan_where_the_number_often_does_not_exist():
    ends = np.array([1.0, 1.0, 1.0, 9.0])
    found = bootstrap(4, lambda drawn: np.where(ends[drawn].mean(1) < 2, math.nan, 0.0))
    assert np.isnan(found).all() and np.isnan(bootstrap(1, lambda drawn: ends[drawn])).all()


def test_a_resample_without_the_number_counts_against_both_ends():
    values = np.random.default_rng(5).normal(size=40)

    def known(drawn):  # missing in about 1 % of the resamples, those with the lowest means
        means = values[drawn].mean(1)
        return np.where(means < np.quantile(means, 0.01), math.nan, means)

    low, high = bootstrap(40, known)
    wanted = bootstrap(40, lambda drawn: values[drawn].mean(1))
    assert low == wanted[0] and high > wanted[1]

    def often_missing(drawn):
        means = values[drawn].mean(1)
        return np.where(means < np.quantile(means, 0.03), math.nan, means)

    assert np.isnan(bootstrap(40, often_missing)).all()
    assert math.isnan(bootstrap_error(40, often_missing))


def test_means_that_are_equal_but_for_their_last_bit_are_a_tie():
    other = [1.0, 3.0, 2.0, 4.0]
    tied = rank_agreement([0.1, 0.3, 0.3, 0.4], other)
    assert rank_agreement([0.1, 0.1 + 0.2, 0.3, 0.4], other) == tied


def test_a_text_that_stands_twice_is_not_compared_twice():
    rows = [("a", "x", 1.0), ("a", "y", 2.0), ("b", "x", 2.0), ("b", "y", 4.0), ("b", "y", 5.0)]
    frame = pd.DataFrame(rows, columns=["method", "sequence_id", "recall"]).assign(ratio=0.1)
    with pytest.raises(pd.errors.MergeError):
        compare_with_reference(frame, "b", "recall", ["ratio"])


def test_bootstrap_error_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(1).normal(size=50)
    found = bootstrap_error(50, lambda drawn: values[drawn].mean(1))
    assert found == pytest.approx(scipy_stats.sem(values), rel=0.05)
    few = np.where(np.arange(50) < 25, math.nan, values)
    assert math.isnan(bootstrap_error(50, lambda drawn: few[drawn].mean(1)))
    assert math.isnan(bootstrap_error(1, lambda drawn: values[drawn].mean(1)))


def test_styled_tables_escape_text_and_shorten_numbers():
    html = html_table(pd.DataFrame({"<name>": ["<a>"], "score": [0.960942]}), "<caption>")
    for text in ("&lt;name&gt;", "&lt;a&gt;", "&lt;caption&gt;", ">0.96094<"):
        assert text in html


def test_what_was_not_measured_is_no_pair():
    values = {("a", 1): [1.0, 2.0, math.nan, 4.0], ("ref", 1): [0.5, math.nan, 9.0, 1.0]}
    (row,) = compare_with_reference(frame_of(values), "ref", "x", ["ratio"]).to_dict("records")
    assert (row["n"], row["difference"]) == (2, 1.75)
    assert row["p_value"] == pytest.approx(paired_test([1.0, 4.0], [0.5, 1.0], "greater"))
