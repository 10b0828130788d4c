"""Means with their errors, paired tests, and HTML of tables: arrays and frames only, no model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats

Numbers = Sequence[float] | np.ndarray | pd.Series


def mean_and_error(values: Numbers) -> tuple[float, float]:
    """Mean and standard error (sample deviation / sqrt(n)); the error of a single value is nan."""
    array = np.asarray(values, dtype=float)
    if not len(array):
        raise ValueError("values must hold at least one number, got none.")
    return float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array))) if len(
        array
    ) > 1 else math.nan


def with_error(values: Numbers, decimals: int = 1) -> str:
    """Mean and standard error as text, such as ``"87.2 ± 0.9"``; a single value has no error."""
    return mean_text(*mean_and_error(values), decimals)


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
    if a.shape != b.shape:
        raise ValueError(
            f"second must pair with first, got {b.shape} values for {a.shape}. Both must be "
            "measured on the same sequences."
        )
    if len(a) < 2:
        return math.nan
    difference = a - b
    rounding = 1e-12 * max(1.0, float(np.abs(a).max()))
    if np.ptp(difference) <= rounding:  # no spread: the statistic is infinite or undefined
        larger, smaller = difference[0] > rounding, difference[0] < -rounding
        certain = {"two-sided": larger or smaller, "less": smaller, "greater": larger}
        return 0.0 if certain[alternative] else 1.0
    return float(stats.ttest_rel(a, b, alternative=alternative).pvalue)


def compare_with_reference(
    frame: pd.DataFrame,
    reference: str,
    value: str,
    by: Sequence[str],
    *,
    larger_is_better: bool = True,
    alpha: float = 0.05,
) -> pd.DataFrame:
    """One-tailed paired t-tests of each method against a reference method, with Bonferroni's
    correction.

    As in the paper, the level is alpha over the number of settings in which one method is compared.

    Args:
        frame: one row per sequence_id x method x setting.
        by: the columns that make a setting.

    Returns:
        one row per method and setting: difference of the means, p_value, n (pairs), tests (by how
        many alpha is divided), level (alpha / tests), significant.

    Raises:
        ValueError: the reference is not in the frame.
    """
    if reference not in set(frame["method"]):
        raise ValueError(
            f"reference must be one of the methods {sorted(set(frame['method']))}, got "
            f"{reference!r}. Run it too."
        )
    settings = [
        (key, group)
        for key, group in frame.groupby(list(by), sort=False)
        if reference in set(group["method"])
    ]
    level = alpha / max(1, len(settings))
    rows: list[dict[str, object]] = []
    for key, group in settings:
        wide = group.pivot(index="sequence_id", columns="method", values=value)
        for method in [name for name in group["method"].unique() if name != reference]:
            pair = wide[[method, reference]].dropna()
            p = paired_test(
                pair[method], pair[reference], "greater" if larger_is_better else "less"
            )
            difference = float((pair[method] - pair[reference]).mean())
            numbers = {
                "difference": difference,
                "p_value": p,
                "n": len(pair),
                "tests": len(settings),
                "level": level,
                "significant": bool(p < level),
            }
            rows.append({"method": method, **dict(zip(by, key, strict=True)), **numbers})
    names = ["difference", "p_value", "n", "tests", "level", "significant"]
    return pd.DataFrame(rows, columns=["method", *by, *names])  # also where there is one method


def compare_all(
    frame: pd.DataFrame, value: str, by: Sequence[str], *, larger_is_better: bool = True
) -> pd.DataFrame:
    """Each method against every other, as text: mean difference in percent, row minus column, and p
    of the one-tailed paired t-test.

    The p is that of the row being better, without a correction; it is left out where there is one
    pair only.

    Args:
        frame, by: as ``compare_with_reference``; a column of ``by`` that has one value is no level
            of the index.
    """
    methods = list(dict.fromkeys(frame["method"]))
    index = [*(name for name in by if frame[name].nunique() > 1), "method"]
    tests: Any = pd.concat(
        [
            compare_with_reference(
                frame, reference, value, by, larger_is_better=larger_is_better
            ).assign(reference=reference)
            for reference in methods
        ]
    )
    tests["text"] = [
        mean_text(100 * test.difference, math.nan)
        + ("" if math.isnan(test.p_value) else f" (p = {test.p_value:.1g})")
        for test in tests.itertuples()
    ]
    order = frame.sort_values(index[:-1], kind="stable")[index].drop_duplicates()
    table = tests.pivot(index=index, columns="reference", values="text")
    table = table.reindex(index=order.set_index(index).index, columns=pd.Index(methods))
    return table.fillna("")


def interpolated_at(price: float, costs: Numbers, gains: Numbers) -> float:
    """The gain where a broken line from (0, 0) through the points first costs this much; nan where
    it never does.

    >>> interpolated_at(1.0, costs=[0.5, 1.5], gains=[10.0, 20.0])
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


def styled(
    table: pd.DataFrame | Mapping[str, Any], caption: str = "", bars: Sequence[str] = ()
) -> str:
    """A table as HTML for notebooks: text escaped, floats with five digits, bars in the columns
    ``bars`` (counts); a plain index hidden.
    """
    frame = pd.DataFrame(table)
    styler: Any = (
        frame.style.format(_short, escape="html")
        .format_index(escape="html", axis=1)
        .set_caption(escape(caption))
    )
    styler = (
        styler.hide(axis="index")
        if isinstance(frame.index, pd.RangeIndex)
        else styler.format_index(escape="html")
    )
    if bars:
        styler = styler.bar(
            subset=list(bars),
            vmin=0,
            vmax=frame[list(bars)].to_numpy().max(initial=1),
            color="#bbb",
        )
    return styler.to_html()


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
