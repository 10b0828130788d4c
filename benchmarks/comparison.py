"""The one comparison with committed numbers: row by row, column by column.

``expected/NAME.csv`` is a frame, one row for each target (or sentence), method and setting. Two
runs must agree to 1e-4 where nothing is trained and the model writes nothing. What else they may
differ by stands beside the frames in ``expected/bands.csv``, one row for each frame, method,
setting (a ratio or a multiple; empty: all of them) and column, with how it was measured.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

EXPECTED = Path(__file__).parent / "expected"
BANDS = "bands"
EVERY = "every"  # in place of a method: a band of all of them
MEASURED = "measured"  # the folder of a run's frames, in its results
EXACT = 1e-4  # of a number; of one above 1 relative to it
# columns of frames that say what a row is of
KEYS = (
    *("kind", "units", "ablation", "per", "direction", "method", "injection_ratio", "first_seed"),
    *("ratio", "layer", "multiple", "group", "sequence_id", "id"),
)
SAME = {"ablation": "zero"}  # what is not said where all rows have it
SETTINGS = ("ratio", "multiple")
# columns that are compared
VALUES = (
    *("accuracy", "recall", "recall_across_layers", "converged"),
    *("levenshtein", "perplexity", "perplexity_base2", "length"),  # before anything is ablated
    *("foreign_recall", "foreign_recall_across_layers"),
    *("delta_self_accuracy", "delta_self_levenshtein"),
    *("delta_neg_accuracy", "delta_neg_levenshtein"),
    *("delta_perplexity", "delta_perplexity_base2"),
    *("delta_own_accuracy", "delta_others_accuracy", "delta_general_loss"),
    # of edits, at a price
    *("self_0.3", "self_1", "self_3", "self_1_line", "extracted_1", "kl_1", "precision"),
    *(f"{kind}_{step}" for kind in ("half", "others") for step in (0, 1, 5, 20, 50)),  # trained
    # of controls, by ablation
    *(f"{whose}_{kind}" for whose in ("self", "neg") for kind in ("zero", "mean", "resample")),
    *("short", "same_half", "other_half", "extracted", "distance"),
    "change",  # of a text, where another one's neurons are ablated
)
DECIMALS = 6


def names(folder: Path = EXPECTED) -> list[str]:
    """The committed frames."""
    return sorted(path.stem for path in folder.glob("*.csv") if path.stem != BANDS)


def indexed(frame: pd.DataFrame) -> pd.DataFrame:
    """The compared columns of a frame, by what its rows are of."""
    said = [name for name in KEYS if name in frame and not (frame[name] == SAME.get(name)).all()]
    # of INJ the multiple says it, of the ratio that was injected
    keys = [name for name in said if name != "ratio" or "injection_ratio" not in frame]
    values = [name for name in VALUES if name in frame]
    return frame[[*keys, *values]].set_index(keys).astype(float).sort_index()


def read_frame(name: str, folder: Path = EXPECTED) -> pd.DataFrame:
    return indexed(pd.read_csv(folder / f"{name}.csv", dtype={"group": str, "sequence_id": str}))


def write_frame(measured: pd.DataFrame, name: str, folder: Path = EXPECTED) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    measured.round(DECIMALS).to_csv(folder / f"{name}.csv")


def read_bands(name: str, folder: Path = EXPECTED) -> pd.DataFrame:
    """The rows of the bands of one frame."""
    bands = pd.read_csv(folder / f"{BANDS}.csv")
    return bands[bands["frame"] == name]


def allowed(committed: pd.DataFrame, bands: pd.DataFrame) -> pd.DataFrame:
    """How far each committed number may be from a measured one, in the committed frame's shape."""
    found = EXACT * committed.abs().clip(lower=1).to_numpy(dtype=float)
    if not len(bands):
        return pd.DataFrame(found, committed.index, committed.columns)
    setting = next((name for name in SETTINGS if name in committed.index.names), None)
    methods = committed.index.get_level_values("method")
    settings = committed.index.get_level_values(setting) if setting else None
    for band in bands.to_dict("records"):
        rows = (methods == band["method"]) | (band["method"] == EVERY)
        if settings is not None and not math.isnan(band["setting"]):
            rows &= settings == band["setting"]
        column = committed.columns.get_loc(band["column"])
        found[rows, column] = np.maximum(found[rows, column], band["band"])
    return pd.DataFrame(found, committed.index, committed.columns)


def by_levels(frame: pd.DataFrame, like: pd.DataFrame) -> pd.DataFrame:
    """A measured frame by the levels of a committed one."""
    return frame.groupby(list(like.index.names), dropna=False).mean()


def rows_measured(committed: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """The rows of a committed frame whose method, ratio and text were measured."""
    rows = pd.Series(True, committed.index)
    for level in {"method", "ratio", "group", "sequence_id", "id"}.intersection(
        committed.index.names
    ):
        rows &= committed.index.isin(measured.index.unique(level), level)
    return committed[rows]


def differences(
    measured: pd.DataFrame, committed: pd.DataFrame, bands: pd.DataFrame
) -> pd.DataFrame:
    """The committed numbers that were not measured, or measured as something else.

    Returns:
        one row per number: measured (nan where it is missing), committed and allowed.
    """
    same = measured.reindex(index=committed.index, columns=committed.columns)
    parts = {"measured": same, "committed": committed, "allowed": allowed(committed, bands)}
    long = pd.DataFrame({name: part.stack(future_stack=True) for name, part in parts.items()})
    known = long["committed"].notna()
    near = (long["measured"] - long["committed"]).abs() <= long["allowed"]
    return long[known & ~near]
