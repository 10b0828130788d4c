"""What the comparison with the committed numbers lets pass: only what is committed. Each mutation
of each committed frame fails, method by method. No model is loaded. What was drawn by an earlier
version of Random is not compared.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from comparison import (
    BANDS,
    EVERY,
    EXACT,
    EXPECTED,
    SETTINGS,
    VALUES,
    allowed,
    differences,
    names,
    read_bands,
    read_frame,
)

pytestmark = pytest.mark.smoke
FRAMES = {name: read_frame(name) for name in names()}
BANDS_OF = {name: read_bands(name) for name in FRAMES}
NOT_MEASURED = "not measured: the tolerance of earlier versions, of a mean"
EVERY_FRAME = pytest.mark.parametrize("name", FRAMES)


def wrong(measured: pd.DataFrame, name: str) -> pd.DataFrame:
    return differences(measured, FRAMES[name], BANDS_OF[name])


def wrong_rows(changed: pd.DataFrame, name: str) -> pd.DataFrame:
    """Of some rows alone, where the others are as they were."""
    return differences(changed, FRAMES[name].loc[changed.index], BANDS_OF[name])


def rows_of(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Which rows are of each method."""
    methods = frame.index.get_level_values("method")
    return {str(method): methods == method for method in methods.unique()}


def settings_of(frame: pd.DataFrame) -> list[str]:
    """The levels of the index that are no texts."""
    return [str(name) for name in frame.index.names if name not in ("sequence_id", "group")]


@EVERY_FRAME
def test_a_frame_agrees_with_itself_and_within_its_bands(name):
    frame = FRAMES[name]
    assert wrong(frame, name).empty
    assert wrong(frame + 0.99 * allowed(frame, BANDS_OF[name]).clip(upper=1.0), name).empty


@EVERY_FRAME
def test_each_number_beyond_its_band_is_named(name):
    frame = FRAMES[name]
    limits = allowed(frame, BANDS_OF[name])
    compared = frame.notna() & np.isfinite(limits)
    assert len(wrong(frame + 1.01 * limits.where(compared, 0.0), name)) == compared.sum().sum()


@EVERY_FRAME
def test_what_was_not_measured_is_named(name):
    frame = FRAMES[name]
    for rows in rows_of(frame).values():
        assert len(wrong(frame[~rows], name)) == frame[rows].count().sum()


def test_bands_are_of_frames_and_methods_that_there_are():
    bands = pd.read_csv(EXPECTED / f"{BANDS}.csv")
    for band in bands.to_dict("records"):
        assert band["method"] in {EVERY, *rows_of(FRAMES[band["frame"]])}, band
        assert band["column"] in VALUES and band["band"] > 0 and band["measured"], band


def compared_rows(name: str) -> dict[str, np.ndarray]:
    """``rows_of`` without the methods that are not compared: their bands are infinite."""
    frame = FRAMES[name]
    finite = np.isfinite(allowed(frame, BANDS_OF[name]).to_numpy()).any(axis=1)
    return {method: rows for method, rows in rows_of(frame).items() if finite[rows].all()}


@EVERY_FRAME
def test_zeros_fail(name):
    frame = FRAMES[name]
    for method, rows in compared_rows(name).items():
        zeros = pd.DataFrame(0.0, frame[rows].index, frame.columns)
        assert len(wrong_rows(zeros, name)), method


@EVERY_FRAME
def test_swapped_methods_fail(name):
    """Of each pair, on the texts and settings that both have. Equal numbers can't be told apart,
    nor some of two methods whose bands were not measured yet.
    """
    frame = FRAMES[name]
    bands = BANDS_OF[name]
    too_wide = set(bands[bands["measured"] == NOT_MEASURED]["method"])
    compared = compared_rows(name)
    parts = {method: frame[rows].droplevel("method") for method, rows in compared.items()}
    for first, second in combinations(parts, 2):
        common = parts[first].index.intersection(parts[second].index)
        a, b = parts[first].loc[common], parts[second].loc[common]
        equal = not len(common) or ((a - b).abs() < EXACT).all(axis=None)
        if equal or {first, second} <= too_wide:
            continue
        swapped = {first: b, second: a}
        measured = pd.concat(swapped, names=["method"]).reorder_levels(frame.index.names)
        assert len(wrong_rows(measured, name)), (first, second)


@EVERY_FRAME
def test_numbers_of_other_texts_fail(name):
    """Each text has those of the next one."""
    frame = FRAMES[name]
    for method, rows in compared_rows(name).items():
        moved = frame[rows].copy()
        for _, part in frame[rows].groupby(settings_of(frame)):
            moved.loc[part.index] = np.roll(part.to_numpy(), 1, axis=0)
        assert len(wrong_rows(moved, name)), method


def varied(frame: pd.DataFrame) -> str | None:
    """The setting of which a frame has several."""
    levels = [name for name in frame.index.names if name in (*SETTINGS, "layer")]
    return next((name for name in levels if len(frame.index.unique(name)) > 1), None)


@pytest.mark.parametrize("name", [name for name, frame in FRAMES.items() if varied(frame)])
def test_numbers_of_another_setting_fail(name):
    """Each share, or layer, has those of the next one."""
    frame = FRAMES[name]
    setting = varied(frame)
    others = [level for level in frame.index.names if level != setting]
    for method, rows in compared_rows(name).items():
        moved = frame[rows].copy()
        for _, part in frame[rows].groupby(others):
            moved.loc[part.index] = np.roll(part.to_numpy(), 1, axis=0)
        assert len(wrong_rows(moved, name)), method
