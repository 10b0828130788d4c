"""Means with their errors, paired tests, and HTML of tables: arrays and frames only, no model."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from html import escape
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats

from tl_localize.checks import check_choice

Numbers = Sequence[float] | np.ndarray | pd.Series
ALPHA = 0.05  # level of a test
N_RESAMPLES = 10_000
UNKNOWN = 0.025  # share of the resamples without a number, at which there is no interval


def quantity(count: int, thing: str) -> str:
    """A number and what is counted.

    >>> quantity(1, "group"), quantity(3, "group")
    ('1 group', '3 groups')
    """
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def in_percent(share: float) -> str:
    """A share with two digits.

    >>> in_percent(0.0026), in_percent(1.0)
    ('0.26 %', '100 %')
    """
    return f"{float(f'{100 * share:.2g}'):g} %"


def with_error(values: Numbers, decimals: int = 1) -> str:
    """Mean and standard error (sample deviation / sqrt(n)) as text, such as ``"87.2 ± 0.9"``; a
    single value has no error.
    """
    array = np.asarray(values, dtype=float)
    error = stats.sem(array) if len(array) > 1 else math.nan
    return mean_text(float(array.mean()), float(error), decimals)


def mean_text(mean: float, error: float, decimals: int = 1) -> str:
    """A mean and its error as text; the error is left out where it is nan, and zero has no sign."""
    text = f"{round(mean, decimals) + 0.0:.{decimals}f}"
    return text if math.isnan(error) else f"{text} ± {error:.{decimals}f}"


def paired_test(
    first: Numbers,
    second: Numbers,
    alternative: Literal["two-sided", "less", "greater"] = "two-sided",
) -> float:
    """p-value of Student's paired t-test; ``"greater"`` tests whether the first is larger on
    average.

    Equal pairs are no evidence: p = 1. It is nan for a single pair, and where all pairs differ by
    the same, as there is no spread to test that by.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if len(a) != len(b):
        raise ValueError(
            f"second must have a number for each of the {len(a)} in first, got {len(b)}. Take the "
            "same texts of both."
        )
    if len(a) < 2:
        return math.nan
    difference = a - b
    rounding = 1e-12 * max(1.0, float(np.abs(a).max()))
    if np.ptp(difference) <= rounding:  # no spread: the statistic is infinite or undefined
        return 1.0 if abs(float(difference[0])) <= rounding else math.nan
    return float(stats.ttest_rel(a, b, alternative=alternative).pvalue)


def compare_with_reference(
    frame: pd.DataFrame,
    reference: str,
    value: str,
    by: Sequence[str],
    *,
    larger_is_better: bool = True,
) -> pd.DataFrame:
    """One-tailed paired t-tests of each method against a reference method, with Bonferroni's
    correction.

    As in the paper, the level is 0.05 over the number of settings in which one method is compared.

    Args:
        frame: one row per sequence_id x method x setting.
        by: the columns that make a setting.

    Returns:
        one row per method and setting: difference of the means, p_value, n (pairs), tests (by how
        many 0.05 is divided), level (0.05 / tests), significant; no row of an empty frame.

    Raises:
        ValueError: the reference is not in the frame.
    """
    names = ["difference", "p_value", "n", "tests", "level", "significant"]
    columns = ["method", *by, *names]
    if not len(frame):
        return pd.DataFrame(columns=columns)
    check_choice("reference", reference, frame["method"].unique())
    better = "greater" if larger_is_better else "less"
    own = frame[frame["method"] == reference]
    pairs = frame[frame["method"] != reference].merge(
        own, on=[*by, "sequence_id"], suffixes=("", "_reference"), validate="many_to_one"
    )
    n_settings = pairs.drop_duplicates(["method", *by])["method"].value_counts()
    rows: list[list[object]] = []
    for key, setting in pairs.groupby(list(by), sort=False):
        for method, group in setting.groupby("method", sort=False):
            pair = group[[value, f"{value}_reference"]].dropna().to_numpy(dtype=float)
            p = paired_test(pair[:, 0], pair[:, 1], better)
            difference = float((pair[:, 0] - pair[:, 1]).mean())
            n_tests = int(n_settings[method])
            level = ALPHA / n_tests
            rows.append([method, *key, difference, p, len(pair), n_tests, level, p < level])
    return pd.DataFrame(rows, columns=columns)  # also where there is one method


def gain_at(price: float, costs: Numbers, gains: Numbers) -> float:
    """The gain where a broken line through the points first costs this much; nan where it never
    does, or where its first point costs more: what lies before it was not measured.

    >>> gain_at(1.0, costs=[0.5, 1.5], gains=[10.0, 20.0])
    15.0
    """
    (gain,) = gains_at(price, np.asarray([costs], dtype=float), np.asarray([gains], dtype=float))
    return float(gain)


def gains_at(price: float, costs: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """``gain_at`` of many lines, both [line point].

    >>> gains_at(1.0, np.array([[0.5, 1.5], [2.0, 3.0]]), np.array([[10.0, 20.0], [10.0, 20.0]]))
    array([15., nan])
    """
    reached = costs >= price
    lines = np.arange(len(costs))
    ends = reached.argmax(-1)
    starts = np.maximum(ends - 1, 0)
    cost, gain = costs[lines, starts], gains[lines, starts]
    rises = np.where(ends > 0, costs[lines, ends] - cost, 1.0)
    found = gain + (gains[lines, ends] - gain) / rises * (price - cost)
    return np.where(reached.any(-1) & (costs[:, 0] <= price), found, math.nan)


def at_cost(price: float, costs: np.ndarray, gains: np.ndarray) -> str:
    """The mean gain where the mean cost is first so high, both [observation point], with its
    bootstrap error over observations, as text; ``-`` where the cost never is, and what the first
    point costs where that is more.

    >>> at_cost(1.0, costs=np.array([[13.9, 20.0]]), gains=np.array([[30.8, 44.7]]))
    'costs at least 13.9'
    """
    first = float(costs[:, 0].mean())
    if first > price:
        return f"costs at least {first:.3g}"
    found = gain_at(price, costs.mean(0), gains.mean(0))
    if math.isnan(found):
        return "-"

    def gain(drawn: np.ndarray) -> np.ndarray:
        return gains_at(price, *means_of(drawn, costs, gains))

    return mean_text(found, bootstrap_error(len(costs), gain))


def means_of(drawn: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
    """Means over the observations that were drawn, [resample n], of values [n point]: as
    ``values[drawn].mean(1)``, in little memory.

    >>> means_of(np.array([[0, 0], [0, 1]]), np.array([[1.0], [3.0]]))[0].tolist()
    [[1.0], [2.0]]
    """
    n_resamples, n = len(drawn), len(values[0])
    places = drawn + n * np.arange(n_resamples)[:, None]
    counts = np.bincount(places.ravel(), minlength=n_resamples * n).reshape(n_resamples, n)
    return [counts @ each / drawn.shape[1] for each in values]


def bootstrap(
    n: int,
    statistic: Callable[[np.ndarray], np.ndarray],
    n_resamples: int = N_RESAMPLES,
) -> tuple[float, float]:
    """95 % interval of a number by resampling n observations with replacement; nan where n is
    below 2. Its ends are the percentiles that make the interval of a normal mean as wide as
    Student's (the expanded percentiles of Hesterberg 2015, arXiv:1411.5279): plain ones are too
    narrow for few observations. A resample in which the number does not exist counts as lower than
    all others at the lower end, and as higher at the upper one; nan where as many are such as lie
    beyond an end (``expanded_tail``).

    Args:
        statistic: the number of each resample, given the places of the observations that were
            drawn, [resample n].

    >>> values = np.array([1.0, 2.0, 2.0, 4.0, 6.0, 9.0])
    >>> low, high = bootstrap(6, lambda drawn: values[drawn].mean(1))
    >>> 1 < low < 4 < high < 9
    True
    """
    found = _resampled(n, statistic, n_resamples)
    if found is None:
        return math.nan, math.nan
    tail = expanded_tail(n)
    low, high = (
        float(np.quantile(np.nan_to_num(found, nan=worst), q, method="nearest"))
        for worst, q in ((-math.inf, tail), (math.inf, 1 - tail))
    )
    return (low, high) if math.isfinite(high - low) else (math.nan, math.nan)


def expanded_tail(n: int) -> float:
    """The share of the resamples of n observations that lies beyond each end of ``bootstrap``'s
    interval: below 0.025, which it tends to for many.

    >>> [round(expanded_tail(n), 4) for n in (4, 12, 1000)]
    [0.0001, 0.0108, 0.0248]
    """
    width = math.sqrt(n / (n - 1)) * stats.t.ppf(1 - ALPHA / 2, n - 1)
    return float(stats.norm.sf(width))


def bootstrap_error(n: int, statistic: Callable[[np.ndarray], np.ndarray]) -> float:
    """Standard error of a number by resampling, as ``bootstrap`` does; nan where that is. It is the
    deviation over resamples in which the number exists, times sqrt(n / (n - 1)), so that of a mean
    it is the usual one.

    >>> values = np.array([1.0, 2.0, 4.0, 9.0])
    >>> round(bootstrap_error(4, lambda drawn: values[drawn].mean(1)), 1)  # the usual one
    1.8
    """
    found = _resampled(n, statistic, N_RESAMPLES)
    return math.nan if found is None else float(np.nanstd(found) * math.sqrt(n / (n - 1)))


def _resampled(
    n: int, statistic: Callable[[np.ndarray], np.ndarray], n_resamples: int
) -> np.ndarray | None:
    """The number in each resample, nan where it does not exist; None where one in forty is nan."""
    if n < 2:
        return None
    found = np.asarray(statistic(_draws(n, n_resamples)), dtype=float)
    found = np.where(np.isfinite(found), found, math.nan)
    return None if np.isnan(found).mean() >= UNKNOWN else found


@lru_cache(maxsize=8)
def _draws(n: int, n_resamples: int) -> np.ndarray:
    """The places of the observations of each resample, [resample n], which many numbers share."""
    draws = np.random.default_rng(0).integers(n, size=(n_resamples, n))
    draws.flags.writeable = False
    return draws


def rank_agreement(first: Numbers, second: Numbers) -> tuple[float, float]:
    """Kendall's tau-b of two rankings of the same things, and its two-sided p-value; nan for less
    than two things, or where one ranking has ties alone.

    >>> round(rank_agreement([1, 2, 3, 4], [10, 20, 40, 30])[0], 2)
    0.67
    """
    if len(first) < 2:
        return math.nan, math.nan
    # means that are equal differ in their last bit
    pair = (np.round(np.asarray(values, float), 9) for values in (first, second))
    found: Any = stats.kendalltau(*pair)
    return float(found.statistic), float(found.pvalue)


def within_and_between(values: np.ndarray, groups: Sequence[str]) -> tuple[float, float]:
    """Mean of the entries of a square matrix whose row and column belong to one group, and of those
    that belong to two; the diagonal and what is nan count in neither. nan where there is none.

    >>> within_and_between(np.array([[9, 1, 2], [3, 9, 4], [6, 8, 9]]), ["a", "a", "b"])
    (2.0, 5.0)
    """
    names = np.asarray(groups)
    same = names[:, None] == names
    counted = np.isfinite(values) & ~np.eye(len(values), dtype=bool)
    parts = [values[counted & pairs] for pairs in (same, ~same)]
    within, between = (float(part.mean()) if len(part) else math.nan for part in parts)
    return within, between


def group_test(values: np.ndarray, groups: Sequence[str], n_shuffles: int, seed: int = 0) -> float:
    """p-value of a permutation test, one-tailed: are the entries within groups lower than those
    between? Group names are shuffled among the rows, columns with them; the true names count as one
    of the shuffles. nan where there is nothing within, or nothing between.

    >>> lost = np.array([[0, -1, 0], [-1, 0, 0], [0, 0, 0]])
    >>> round(group_test(lost, ["a", "a", "b"], n_shuffles=2000), 1)  # one of three pairs
    0.3
    """
    within, between = within_and_between(values, groups)
    if math.isnan(within - between):
        return math.nan
    generator = np.random.default_rng(seed)
    numbers = np.unique(np.asarray(groups), return_inverse=True)[1]
    counted = np.isfinite(values) & ~np.eye(len(values), dtype=bool)
    known = np.where(counted, values, 0.0)
    limit = within - between + 1e-12  # equal differences differ in the last bit
    n_lower = 0
    for some in np.array_split(np.arange(n_shuffles), 1 + n_shuffles * values.size // 10**6):
        shuffled = generator.permuted(np.tile(numbers, (len(some), 1)), axis=1)
        same = shuffled[:, :, None] == shuffled[:, None, :]
        n_within = (same & counted).sum((1, 2))
        total_within = (same * known).sum((1, 2))
        with np.errstate(invalid="ignore"):  # where nan leaves a shuffle without pairs of a kind
            inside = total_within / n_within
            outside = (known.sum() - total_within) / (counted.sum() - n_within)
        n_lower += int((inside - outside <= limit).sum())
    return (n_lower + 1) / (n_shuffles + 1)


def html_table(table: pd.DataFrame, caption: str) -> str:
    """A table as HTML for notebooks and pages: all of it, a plain index is hidden, floats have five
    digits, and what cells hold is escaped.
    """
    named = not isinstance(table.index, pd.RangeIndex)
    with pd.option_context("display.max_colwidth", None):
        body = table.to_html(index=named, float_format="{:.5g}".format, na_rep="")
    return f"<div>{escape(caption)}</div>{body}"
