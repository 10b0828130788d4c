"""Does one method of DEL take more of the target than the others at the same loss of the others?

Paired tests in results folders of ``tl-localize del`` or of ``test_real_model.py -k forgetting``:

    python benchmarks/price_tests.py FOLDER ...

Self where Neg is -0.5, -1, -3 and -5 is read from the curve of means, as ``DelResults.at_price``
does, over the n targets that both methods have. The values that are paired are the number of all
targets plus n - 1 times what it loses without one of them: their mean is the number itself, and
their standard error its jackknife error. p is that of the one-tailed paired t-test.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd

from tl_localize import DelResults
from tl_localize.evals.deletion.results import PRICES
from tl_localize.execution import Store
from tl_localize.report.saving import to_markdown
from tl_localize.stats import gain_at, paired_test, with_error

TESTED = "iterative_attribution"


def pseudo_values(points: pd.DataFrame, price: float) -> np.ndarray:
    """Of Self at a price, one for each target (jackknife); nan where the curve ends before."""
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


def compared(first: pd.DataFrame, second: pd.DataFrame, price: float) -> str:
    """Difference of Self (points) and p that the first takes more; ``-`` without both curves."""
    common = first.index.intersection(second.index)
    if len(common) < 2:
        return "-"
    a, b = (pseudo_values(points.loc[common], price) for points in (first, second))
    if np.isnan(a - b).any():
        return "-"
    return f"{with_error(a - b)} (p = {paired_test(a, b, 'less'):.1g})"


def table(results: DelResults) -> pd.DataFrame:
    """One row per method, one column per price, and the number of targets."""
    rows = {}
    points = results.points()
    tested = points.pop(TESTED)
    for method, other in points.items():
        row = {f"Neg = -{price:g}": compared(tested, other, price) for price in PRICES}
        rows[method] = row | {"targets": len(tested.index.intersection(other.index))}
    return pd.DataFrame(rows).T


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        found = DelResults.of(Store(folder, read_only=True))
        print(found.at_price().to_string())
        print(to_markdown(table(found)))
