"""Tables of the controls of DEL: what of its numbers is memory, and what is the seed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from cells import TITLES, markdown, mean_with_interval, with_interval  # noqa: E402

from tl_localize.stats import N_RESAMPLES, expanded_tail  # noqa: E402

WHOSE = ("self", "neg")
CONTROLS = {
    name: TITLES[name]
    for name in (
        "iterative_attribution",
        "attribution",
        "hard_concrete",
        "activations",
        "random",
    )
}
CONTROL_COLUMNS = {
    "self_zero": "Self",
    "neg_zero": "Neg",
    "self_mean": "Self, mean ablation",
    "self_resample": "Self, resample",
    "short": "Self after half of the prefix",
    "same_half": "a half by its own neurons",
    "other_half": "a half by the other's neurons",
    "extracted": "extracted",
}


def read_controls(model: str) -> pd.DataFrame:
    """Controls of DEL, changes in points, the distance in characters."""
    frame = pd.read_csv(ROOT / f"docs/results/{model}/memory.csv")
    frame = frame.set_index(["kind", "method", "id"]).sort_index()
    return (100 * frame).assign(distance=frame["distance"])


def memory_table(model: str) -> str:
    """What neurons do to memorized texts, and to texts that the model writes."""
    found = read_controls(model)
    rows = []
    for method, title in CONTROLS.items():
        for kind in found.index.unique("kind"):
            part = found.loc[(kind, method)]
            cells = [mean_with_interval(part[column]) for column in CONTROL_COLUMNS]
            rows.append([title, f"{kind} ({len(part)})", *cells])
    return markdown(["method", "texts", *CONTROL_COLUMNS.values()], rows)


def memory_difference_table(model: str) -> str:
    """Do texts that were never memorized lose as much as memorized ones?"""
    found = read_controls(model)["self_zero"].unstack("method")
    beyond_random = found.sub(found["random"], axis=0)
    rows = [
        [title, *(written_minus_memorized(losses[method]) for losses in (found, beyond_random))]
        for method, title in CONTROLS.items()
        if method != "random"
    ]
    rows.append([TITLES["random"], written_minus_memorized(found["random"]), ""])
    return markdown(["method", "written minus memorized", "the same beyond Random"], rows)


def written_minus_memorized(losses: pd.Series) -> str:
    """The difference of two means over different texts: each kind is resampled by itself."""

    def difference(written: np.ndarray, memorized: np.ndarray, axis: int = -1) -> np.ndarray:
        return written.mean(axis) - memorized.mean(axis)

    values = [losses[kind].to_numpy(dtype=float) for kind in ("written", "memorized")]
    drawn = stats.bootstrap(
        values,
        difference,
        method="percentile",
        confidence_level=1 - 2 * expanded_tail(min(map(len, values))),
        n_resamples=N_RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return with_interval(float(difference(*values)), drawn.confidence_interval)


def contrast_table(model: str) -> str:
    """Text / others, with and without the contrast, on memorized texts, and what it changes."""
    known = read_controls(model).loc["memorized"]
    own = "iterative_attribution"
    named = {own: (f"{own}_contrast_0", own)}
    for method in ("attribution", "hard_concrete", "activations"):
        named[method] = method, f"{method}_contrast_1"
    rows = []
    for method, (without, contrasted) in named.items():
        parts = [
            [losses[without], losses[contrasted], losses[contrasted] - losses[without]]
            for losses in (known[f"{whose}_zero"] for whose in WHOSE)
        ]
        cells = [" / ".join(map(mean_with_interval, both)) for both in zip(*parts, strict=True)]
        rows.append([TITLES[method], *cells])
    names = ["without the contrast", "times 1 / (1 + G ** 3)", "change, text by text"]
    return markdown(["method", *names], rows)


def seeds_table(model: str) -> str:
    """Means of each seed of the texts that the model writes; what seeds and texts add to the error
    of such a mean.
    """
    frame = pd.read_csv(ROOT / f"docs/results/{model}/seeds.csv")
    rows = []
    for ratio, of_share in frame.groupby("ratio"):
        for column, title in (("delta_self_accuracy", "Self"), ("delta_neg_accuracy", "Neg")):
            points = 100 * of_share.pivot(index="sequence_id", columns="seed", values=column)
            means = points.mean()
            cells = [f"{number:.2f}" for number in (*means, means.std(), points.mean(axis=1).sem())]
            rows.append([f"{100 * float(str(ratio)):g} %", title, *cells])
    seeds = [f"seed {seed}" for seed in sorted(frame["seed"].unique())]
    errors = ["deviation over seeds", "error over texts"]
    return markdown(["share", "mean of", *seeds, *errors], rows)
