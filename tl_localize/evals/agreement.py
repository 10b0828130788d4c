"""Do INJ and DEL rank the methods alike?"""

from typing import Any

import pandas as pd

from tl_localize.paper import published
from tl_localize.stats import rank_agreement

# of the paper; Random is no method
METHODS = ("hard_concrete", "slimming", "zero_out", "integrated_gradients", "activations")


def agreement(recalls: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """Kendall's tau of the methods' recall in INJ against the accuracy that the target loses in
    DEL, for each pair of settings, over the paper's methods that both have.

    Source: Chang et al. (2024), arXiv:2311.09060, section 5.3, which compares the rankings in
    words.

    Args:
        recalls: columns method, setting and value, the mean recall.
        losses: the same, of the mean change of Self accuracy, which is negative where it is lost.

    Returns:
        one row per pair of settings: inj, del, tau, p_value (two-sided), n (methods).

    >>> names = ["hard_concrete", "slimming", "activations"]
    >>> recalls = pd.DataFrame({"method": names, "setting": "1 %", "value": [0.5, 0.4, 0.1]})
    >>> losses = pd.DataFrame({"method": names, "setting": "0.1 %", "value": [-0.3, -0.2, -0.1]})
    >>> agreement(recalls, losses)["tau"].tolist()
    [1.0]
    """
    rows: list[dict[str, Any]] = []
    used = [frame[frame["method"].isin(METHODS)] for frame in (recalls, losses)]
    for first, own in used[0].groupby("setting", sort=False):
        for second, lost in used[1].groupby("setting", sort=False):
            both = own.merge(lost, on="method", suffixes=("", "_lost"))
            tau, p = rank_agreement(both["value"], -both["value_lost"])
            rows.append({"inj": first, "del": second, "tau": tau, "p_value": p, "n": len(both)})
    return pd.DataFrame(rows, columns=["inj", "del", "tau", "p_value", "n"])


def published_agreement() -> pd.DataFrame:
    """``agreement`` of the paper's own numbers, with a column ``model``, for the models that are in
    both of its tables.

    >>> published_agreement().groupby("model")["tau"].mean().round(2).to_dict()
    {'gpt2-xl': 0.82, 'pythia-2.8b-deduped': 0.67, 'pythia-6.9b-deduped': 0.65}
    """
    inj, deletion = published("inj"), published("del")
    lost = deletion[deletion["metric"] == "delta_self_accuracy"]
    parts: list[pd.DataFrame] = []
    for model in sorted(set(inj["model"]) & set(lost["model"])):
        recalls = inj[inj["model"] == model].assign(setting=lambda rows: rows["metric"])
        found = agreement(recalls, lost[lost["model"] == model])
        parts.append(found.assign(model=model))
    return pd.concat(parts, ignore_index=True)
