"""Are texts of one category confused more than texts of different ones?"""

from typing import Any

import pandas as pd

from tl_localize.checks import check_count
from tl_localize.evals.deletion.results import DelResults
from tl_localize.stats import group_test, within_and_between

N_SHUFFLES = 2000


def confusion_by_category(
    results: DelResults, n_shuffles: int = N_SHUFFLES, seed: int = 0
) -> pd.DataFrame:
    """What other texts lose when a text's neurons are ablated: of its own category (within) and of
    others (between), and a permutation test, one-tailed, that it is more within. Only texts that
    were targets count, so that every one is ablated and measured; a text without a category has one
    of its own.

    Source: the numbers of figures 2, 5 and 6 of Chang et al. (2024), arXiv:2311.09060, which has
    figures alone.

    Returns:
        one row per method and ratio: within and between, mean changes of accuracy in points,
        difference, p_value, n_within and n_between (ordered pairs), n (texts).

    >>> confusion_by_category(del_results).columns.tolist()[:4]
    ['method', 'ratio', 'within', 'between']
    """
    check_count(n_shuffles=n_shuffles)
    names = ["method", "ratio", "within", "between", "difference", "p_value"]
    rows: list[list[Any]] = []
    for (method, ratio), matrix in results.confusion.items():
        categories = results.before.set_index("sequence_id")["category"]
        of_text = categories.reindex(matrix.index).items()
        groups = [category or f"alone: {text}" for text, category in of_text]
        values = 100 * matrix.reindex(columns=matrix.index).to_numpy(dtype=float)
        within, between = within_and_between(values, groups)
        p = group_test(values, groups, n_shuffles, seed)
        n = len(groups)
        n_within = sum(groups.count(name) ** 2 for name in set(groups)) - n
        counts = [n_within, n * (n - 1) - n_within, n]
        rows.append([method, ratio, within, between, within - between, p, *counts])
    return pd.DataFrame(rows, columns=[*names, "n_within", "n_between", "n"])
