"""The comparison with the committed numbers finds each that is off, and no other."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

EXPECTED = sorted((Path(__file__).parent / "expected").glob("*.csv"))
INDEX = {
    "inj": ["method"],
    "del": ["method", "ratio"],
    "distractors": ["method", "multiple"],
    "heads": ["units", "method", "ratio"],
    "rev": ["method", "ratio"],
    "rivals": ["method", "ratio"],
}
INDEX["forgetting"] = ["method", "ratio", "sequence_id"]
INDEX["erase"] = ["edit", "text"]
INDEX |= {"real": ["method", "injection_ratio", "sequence_id"], "together": ["method", "multiple"]}


@pytest.mark.smoke
@pytest.mark.parametrize("path", EXPECTED, ids=lambda path: path.stem)
def test_committed_numbers_are_compared_one_by_one(path, committed, request):
    if request.config.getoption("--update-expected"):
        pytest.skip("numbers are written, not compared")
    measured = pd.read_csv(path, index_col=INDEX[path.stem.split("-")[0]])
    if path.stem.startswith(("inj", "real")):
        measured = measured.rename(columns=float)  # multiples
    expected = measured.to_numpy()[1, 0]
    committed(measured, path.stem, 0.05)
    committed(measured + 0.04, path.stem, 0.05)
    measured.iloc[1, 0] = expected + 0.06
    with pytest.raises(
        AssertionError,
        match=(
            rf"\b{measured.index[1] if len(measured.index.names) == 1 else measured.index[1][0]}\b"
        ),
    ):
        committed(measured, path.stem, 0.05)
    measured.iloc[1, 0] = float("nan")
    with pytest.raises(AssertionError):
        committed(measured, path.stem, 0.05)
