"""Does one method of DEL take more of the target than the others at the same loss of the others?

Paired tests in results folders of ``tl-localize del`` or of ``real/test_own_texts.py``:

    python benchmarks/price_tests.py FOLDER ...

Self where Neg is -0.5, -1, -3 and -5 is read from the curve of means, as ``DelResults.at_price``
does, over the n targets that both methods have. The values that are paired are the number of all
targets plus n - 1 times what it loses without one of them: their mean is the number itself, and
their standard error its jackknife error. p is that of the two-tailed paired t-test, times the
number of tests that are made together: prices, methods and folders.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from tl_localize import DelResults
from tl_localize.evals.deletion.results import PRICES
from tl_localize.execution import Store
from tl_localize.report.saving import to_markdown
from tl_localize.stats import gain_at, mean_text, paired_test

TESTED = "iterative_attribution"


def pseudo_values(points: pd.DataFrame, price: float) -> np.ndarray:
    """Of Self at a price, one for each target (jackknife); nan where the curve is not there."""
    own, neg = points["self"].to_numpy(), points["neg"].to_numpy()
    n = len(own)
    whole = gain_at(price, -neg.mean(0), own.mean(0))
    without = np.array(
        [
            gain_at(price, -np.delete(neg, i, 0).mean(0), np.delete(own, i, 0).mean(0))
            for i in range(n)
        ]
    )
    return whole + (n - 1) * (without.mean() - without)


def tests_at_prices(results: Mapping[str, DelResults], tested: str = TESTED) -> pd.DataFrame:
    """Of several models: does the tested method take more than each other one at each price?

    Returns:
        one row per model, method and price at which both curves are: difference of Self (points),
        standard_error, p (two-tailed, corrected by the number of rows) and n (targets).
    """
    rows: list[dict[str, Any]] = []
    for model, found in results.items():
        points = found.points()
        own = points.pop(tested)
        for method, other in points.items():
            common = own.index.intersection(other.index)
            for price in PRICES:
                pair = [pseudo_values(part.loc[common], price) for part in (own, other)]
                gap = pair[0] - pair[1]
                if len(common) < 2 or np.isnan(gap).any():
                    continue
                row = {"model": model, "method": method, "price": price, "n": len(common)}
                row |= {"difference": gap.mean(), "p": paired_test(*pair)}
                row["standard_error"] = gap.std(ddof=1) / math.sqrt(len(common))
                rows.append(row)
    names = ["model", "method", "price", "n", "difference", "standard_error", "p"]
    table = pd.DataFrame(rows, columns=names)
    return table.assign(p=np.minimum(1, len(table) * table["p"]))


def shown(tests: pd.DataFrame) -> pd.DataFrame:
    """One row per model and method, one column per price, as text; ``-`` where there is no test."""
    cells = [
        f"{mean_text(row.difference, row.standard_error)} (p = {row.p:.1g})"
        for row in tests.itertuples()
    ]
    columns = tests["price"].map("Neg = -{:g}".format)
    wide = tests.assign(cell=cells, column=columns).pivot_table(
        "cell", ["model", "method", "n"], "column", aggfunc="first", sort=False
    )
    return wide.fillna("-")


if __name__ == "__main__":
    folders = {folder: DelResults.of(Store(folder, read_only=True)) for folder in sys.argv[1:]}
    for folder, found in folders.items():
        print(folder)
        print(found.at_price().to_string())
    tests = tests_at_prices(folders)
    print(f"{len(tests)} tests together, p corrected by their number")
    print(to_markdown(shown(tests)))
