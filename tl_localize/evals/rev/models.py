"""REV with the model as the unit: the sentences of one model share its training, and are each
other's others.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from tl_localize.evals.rev.results import RevResults, model_test


def rev_by_model(results: RevResults, reference: str = "activations") -> pd.DataFrame:
    """Own and others in points, means over models of the means over their sentences, and a
    two-sided paired t-test over models of own minus others against the reference.

    A gap is better where it is lower, if units are put back, and where it is higher, if they are
    given to the model before ("graft").

    Returns:
        one row per direction, method and ratio: own, others, gap (own minus others) with their
        standard errors over models, models_ahead (in how many the gap is better than the
        reference's), p_value (nan below 8 models) and n (models).

    >>> rev_by_model(rev_results)["n"].unique().tolist()
    [1]
    """
    used = results.frame[results.frame["converged"].astype(bool)]
    columns = ["delta_own_accuracy", "delta_others_accuracy"]
    by_group = (
        100 * used.groupby(["direction", "method", "ratio", "group"], sort=False)[columns].mean()
    )
    by_group.columns = ["own", "others"]
    by_group["gap"] = by_group["own"] - by_group["others"]
    names = [f"{name}{end}" for name in by_group.columns for end in ("", "_error")]
    rows: list[dict[str, Any]] = []
    for (direction, ratio), block in by_group.groupby(["direction", "ratio"], sort=False):
        gaps = block["gap"].droplevel(["direction", "ratio"]).unstack("method")
        better = np.less if direction == "put_back" else np.greater
        for method, part in block.groupby("method", sort=False):
            row: dict[str, Any] = {"direction": direction, "method": method, "ratio": ratio}
            for name in by_group.columns:
                row[name] = part[name].mean()
                row[f"{name}_error"] = part[name].sem()
            row |= {"models_ahead": math.nan, "p_value": math.nan, "n": len(part)}
            if reference in gaps and method != reference:
                pair = gaps[[method, reference]].dropna().to_numpy()
                row["models_ahead"] = int(better(pair[:, 0], pair[:, 1]).sum())
                row["p_value"] = model_test(pair[:, 0], pair[:, 1])
            rows.append(row)
    keys = ["direction", "method", "ratio"]
    return pd.DataFrame(rows, columns=[*keys, *names, "models_ahead", "p_value", "n"])
