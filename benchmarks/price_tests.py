"""Does one method of DEL take more of the target than the others at the same loss of the others?

Paired tests in results folders of ``tl-localize del`` or of ``real/test_own_texts.py``:

    python benchmarks/price_tests.py FOLDER ...

Self where Neg is -0.5, -1, -3 and -5 is read from the curve of means, as ``DelResults.at_price``
does, over the n targets that both methods have. The error of the difference is its standard
deviation over resamples of the targets, and p that of a two-tailed t with n - 1 degrees of freedom,
times the number of tests that are made together: prices, methods and folders. Where one
in forty of the resamples never costs the price, or begins beyond it, there is no test.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from tl_localize import DelResults
from tl_localize.evals.deletion.results import PRICES
from tl_localize.execution import Store
from tl_localize.report.saving import to_markdown
from tl_localize.stats import bootstrap_error, gains_at, mean_text, means_of

TESTED = "iterative_attribution"


def difference_at(
    price: float, own: pd.DataFrame, other: pd.DataFrame
) -> Callable[[np.ndarray], np.ndarray]:
    """How much more of the target one method takes at a price than another (points; less than 0:
    more), by the places of the targets, [resample target].
    """
    curves = [(-part["neg"].to_numpy(), part["self"].to_numpy()) for part in (own, other)]

    def difference(drawn: np.ndarray) -> np.ndarray:
        mine, theirs = (gains_at(price, *means_of(drawn, *curve)) for curve in curves)
        return mine - theirs

    return difference


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
                more = difference_at(price, own.loc[common], other.loc[common])
                (found,) = more(np.arange(len(common))[None])
                error = bootstrap_error(len(common), more)
                if math.isnan(found) or math.isnan(error):
                    continue
                p = (
                    2 * stats.t.sf(abs(found) / error, len(common) - 1)
                    if error
                    else float(found == 0)
                )
                row = {"model": model, "method": method, "price": price, "n": len(common)}
                row |= {"difference": found, "standard_error": error, "p": p}
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
