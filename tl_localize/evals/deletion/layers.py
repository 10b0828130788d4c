"""Does the same number of neurons erase more of a text in all layers than in one?"""

from typing import Any

import pandas as pd

from tl_localize.stats import paired_test


def layers_against_all(single_layers: pd.DataFrame) -> pd.DataFrame:
    """All layers together against single layers at equal budget: change of accuracy of the target
    in points, means over targets. The bottom layer, which every text needs, is left out.

    Source: Chang et al. (2024), arXiv:2311.09060, sections 5.4 and A.10.

    Args:
        single_layers: ``DelResults.single_layers``.

    Returns:
        one row per method, ratio and multiple of the budget: all, mean_layer, best_layer (the one
        that erases most on average), best, layers_ahead (single layers that erase at least as much
        as all), n_layers, p_value and n. The test is a one-tailed paired t-test over targets that
        all layers erase more than the mean single layer.

    >>> layers_against_all(single_layers)["n_layers"].tolist()
    [5, 5]
    """
    keys = ["method", "ratio", "multiple"]
    names = ["all", "mean_layer", "best_layer", "best", "layers_ahead", "n_layers", "p_value", "n"]
    rows: list[list[Any]] = []
    if not len(single_layers):
        return pd.DataFrame(rows, columns=[*keys, *names])
    whole = single_layers[single_layers["layer"].isna()]
    everywhere = {
        key: part.set_index("sequence_id")["delta_self_accuracy"]
        for key, part in whole.groupby(keys[:2])
    }
    single = single_layers[single_layers["layer"] > 0]
    for key, part in single.groupby(keys, sort=False):
        method, ratio, _ = key
        by_layer = part.pivot_table("delta_self_accuracy", "sequence_id", "layer")
        of_all = everywhere[method, ratio]
        texts = by_layer.dropna().index.intersection(of_all.index)
        by_layer, of_all = by_layer.loc[texts], of_all.loc[texts]
        means = 100 * by_layer.mean()
        p = paired_test(of_all, by_layer.mean(axis=1), "less")
        mean = 100 * of_all.mean()
        best: Any = means.idxmin()
        ahead = int((means <= mean).sum())
        found = [mean, means.mean(), best, means.min(), ahead, len(means), p, len(of_all)]
        rows.append([*key, *found])
    return pd.DataFrame(rows, columns=[*keys, *names])
