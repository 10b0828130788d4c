"""The per-target frames of a model as CSV: what its page is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comparison
import pandas as pd

from tl_localize.files import prepare_folder, write_text

TEXTS = ["prefix", "suffix"]  # columns that hold the paper's data
# how far apart two machines may be: after training, by texts that the model writes, which differ
# with the last bits of a machine, and where neurons nearly tie (twice the most that two CPUs, and a
# CPU and an H200, differed on four texts of SmolLM2; of recalls nothing was measured). What has no
# band is not compared there
TRAINED = ("hard_concrete", "slimming", "hard_concrete_tuned", "slimming_tuned")
WRITTEN = ("attribution_contrast_1", "iterative_attribution")
TRAINED_BANDS = {
    "accuracy": 0.05,
    "converged": 0.0,
    "recall": 0.05,
    "recall_across_layers": 0.05,
    "foreign_recall": 0.05,
    "foreign_recall_across_layers": 0.05,
    "delta_self_accuracy": 0.05,
    "delta_neg_accuracy": 0.01,
    "delta_own_accuracy": 0.05,
    "delta_others_accuracy": 0.05,
}
WRITTEN_BANDS = TRAINED_BANDS | {"delta_self_accuracy": 0.23, "delta_neg_accuracy": 0.036}
TIED_BANDS = {"delta_self_accuracy": 0.23, "delta_neg_accuracy": 0.003}
# by method; others agree to 1e-4
METHOD_BANDS = {
    **dict.fromkeys(TRAINED, TRAINED_BANDS),
    **dict.fromkeys(WRITTEN, WRITTEN_BANDS),
    "gradient_alignment": TIED_BANDS,
}


def write_frame(folder: Path, name: str, frame: pd.DataFrame) -> None:
    """Write NAME.csv, without the paper's texts; nothing of a frame without rows."""
    if len(frame):
        plain = frame.drop(columns=TEXTS, errors="ignore")
        write_text(prepare_folder(folder) / f"{name}.csv", plain.to_csv(index=False))


def read_frames(folder: Path) -> dict[str, pd.DataFrame]:
    """The frames of a folder by name."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.csv"))}


def _read(path: Path) -> pd.DataFrame:
    frame = pd.read_csv(path, dtype={"category": str})
    if "category" in frame:
        frame["category"] = frame["category"].fillna("")
    return frame.astype({"layer": "Int64"}) if "layer" in frame else frame


def long_confusion(matrices: Any) -> pd.DataFrame:
    """Confusion matrices, one row per pair: method, ratio, ablated, measured, change."""
    parts = [
        matrix.stack().rename("change").reset_index().assign(method=method, ratio=ratio)
        for (method, ratio), matrix in matrices.items()
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def confusion_matrices(frame: pd.DataFrame) -> Any:
    """``long_confusion`` turned back, with targets and texts in the order of the frame."""
    found: Any = {}
    for key, part in frame.groupby(["method", "ratio"], sort=False):
        matrix = part.pivot(index="ablated", columns="measured", values="change")
        order = part["ablated"].unique(), part["measured"].unique()
        found[key] = matrix.reindex(index=order[0], columns=order[1])
    return found


def differences(measured: pd.DataFrame, committed: pd.DataFrame) -> pd.DataFrame:
    """The numbers of a committed frame that are not those measured now, or are missing: those of
    ``comparison``, of methods that train or write texts those that have a band.
    """
    expected = comparison.indexed(as_rows(committed))
    if not len(expected.columns):
        return pd.DataFrame()
    same = comparison.by_levels(comparison.indexed(as_rows(measured)), expected)
    if "method" in expected.index.names:
        methods = expected.index.get_level_values("method")
        for method in methods.unique():
            of_column = bands_of(method, committed)
            if of_column:
                without = [name for name in expected if name not in of_column]
                expected.loc[methods == method, without] = float("nan")
    return comparison.differences(same, expected, bands(committed, list(expected.columns)))


def as_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """A confusion matrix by the names that a row has elsewhere."""
    return frame.rename(columns={"ablated": "id", "measured": "sequence_id"})


def bands_of(method: str, frame: pd.DataFrame) -> dict[str, float]:
    """The bands of a method in a frame; none where it must agree."""
    in_trained_rows = "recall" in frame or "delta_own_accuracy" in frame
    return TRAINED_BANDS if in_trained_rows else METHOD_BANDS.get(method, {})


def bands(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The bands of a frame, as ``comparison`` takes them; of all methods where rows are trained."""
    rows: list[dict[str, Any]] = []
    for method in frame["method"].unique() if "method" in frame else ():
        of_column = bands_of(method, frame)
        rows += [
            {"method": method, "column": name, "band": of_column[name]}
            for name in columns
            if name in of_column
        ]
    return pd.DataFrame(rows, columns=["method", "setting", "column", "band"])
