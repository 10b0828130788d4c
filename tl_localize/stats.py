"""Means with their errors, paired tests, and HTML of tables: arrays and frames only, no model."""

import math
from collections.abc import Sequence
from html import escape
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats

from tl_localize.checks import check_choice

Numbers = Sequence[float] | np.ndarray | pd.Series
ALPHA = 0.05  # level of a test


def quantity(count: int, thing: str) -> str:
    """A number and what is counted.

    >>> quantity(1, "group"), quantity(3, "group")
    ('1 group', '3 groups')
    """
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


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

    Equal pairs are no evidence: p = 1. For a single pair it is nan.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if len(a) < 2:
        return math.nan
    difference = a - b
    rounding = 1e-12 * max(1.0, float(np.abs(a).max()))
    if np.ptp(difference) <= rounding:  # no spread: the statistic is infinite or undefined
        rise = float(difference[0])
        evidence = {"two-sided": abs(rise), "less": -rise, "greater": rise}[alternative]
        return 0.0 if evidence > rounding else 1.0
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
        own, on=[*by, "sequence_id"], suffixes=("", "_reference")
    )
    n_tests = own.groupby(list(by)).ngroups
    rows: list[list[object]] = []
    for key, setting in pairs.groupby(list(by), sort=False):
        for method, group in setting.groupby("method", sort=False):
            pair = group[[value, f"{value}_reference"]].dropna().to_numpy(dtype=float)
            p = paired_test(pair[:, 0], pair[:, 1], better)
            difference = float((pair[:, 0] - pair[:, 1]).mean())
            level = ALPHA / n_tests
            rows.append([method, *key, difference, p, len(pair), n_tests, level, p < level])
    return pd.DataFrame(rows, columns=columns)  # also where there is one method


def gain_at(price: float, costs: Numbers, gains: Numbers) -> float:
    """The gain where a broken line from (0, 0) through the points first costs this much; nan where
    it never does.

    >>> gain_at(1.0, costs=[0.5, 1.5], gains=[10.0, 20.0])
    15.0
    """
    cost, gain = np.append(0.0, costs), np.append(0.0, gains)
    reached = np.flatnonzero(cost >= price)
    if not len(reached):
        return math.nan
    i = int(reached[0])
    return float(np.interp(price, cost[i - 1 : i + 1], gain[i - 1 : i + 1]))


def jackknife(without: Numbers) -> float:
    """Standard error of a number, from the same number without each of the observations; of a mean
    it is its standard error.
    """
    array = np.asarray(without, dtype=float)
    n = len(array)
    return float(array.std() * math.sqrt(n - 1)) if n > 1 else math.nan


def at_cost(price: float, costs: np.ndarray, gains: np.ndarray) -> str:
    """The mean gain where the mean cost is first so high, both [observation point], with its
    jackknife error over observations, as text; ``-`` where the cost never is.
    """
    found = gain_at(price, costs.mean(0), gains.mean(0))
    if math.isnan(found):
        return "-"
    without = [
        gain_at(price, np.delete(costs, i, 0).mean(0), np.delete(gains, i, 0).mean(0))
        for i in (range(len(costs)) if len(costs) > 1 else ())
    ]
    return mean_text(found, jackknife(without))


def html_table(table: pd.DataFrame, caption: str) -> str:
    """A table as HTML for notebooks: a plain index is hidden, floats have five digits."""
    named = not isinstance(table.index, pd.RangeIndex)
    body = table.to_html(index=named, float_format="{:.5g}".format)
    return f"<div>{escape(caption)}</div>{body}"
