"""Do other random rows change the recall of INJ?"""

from typing import Any

import pandas as pd

from tl_localize.stats import paired_test


def compare_seeds(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Paired two-tailed t-tests of recall, sentence by sentence, where both injections converged.

    Source: Chang et al. (2024), arXiv:2311.09060, A.6.

    Args:
        first: ``InjResults.frame`` of some sentences.
        second: the same of the same sentences with another seed.

    Returns:
        one row per method, injection ratio and ratio: recall, recall_other_seed, p_value and n.

    Raises:
        ValueError: INJ with distractors, whose sentences share a model with others for each seed.

    >>> frame = inj_results.frame.assign(foreign_recall=float("nan"))  # as without distractors
    >>> compare_seeds(frame, frame)["p_value"].unique().tolist()
    [1.0]
    """
    for name, frame in (("first", first), ("second", second)):
        if "foreign_recall" in frame and frame["foreign_recall"].notna().any():
            raise ValueError(
                f"{name} must be of INJ without distractors, got sentences that share a model. "
                "With another seed they share it with others, so that none is a pair. Run INJ "
                "without distractors."
            )
    keys = ["sequence_id", "method", "injection_ratio", "ratio"]
    both = first.merge(second, on=keys, suffixes=("", "_other_seed"), validate="one_to_one")
    both = both[both["converged"] & both["converged_other_seed"]]
    rows: list[list[Any]] = []
    for key, group in both.groupby(keys[1:], sort=False):
        pair = group["recall"], group["recall_other_seed"]
        rows.append([*key, pair[0].mean(), pair[1].mean(), paired_test(*pair), len(group)])
    return pd.DataFrame(rows, columns=[*keys[1:], "recall", "recall_other_seed", "p_value", "n"])
