"""What the comparison with the committed numbers lets pass: only what is committed. Each mutation
of each committed frame fails, method by method. No model is loaded.

Frames without texts (``MEANS``) hold means of an earlier run, whose rows were not kept. A mean says
less, so some mutations of them pass; that is what they are marked for.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from comparison import (
    EXACT,
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
MEANS = [name for name, frame in FRAMES.items() if "sequence_id" not in frame.index.names]
TARGET_BY_TARGET = pytest.mark.parametrize("name", [name for name in FRAMES if name not in MEANS])
EVERY_FRAME = pytest.mark.parametrize("name", FRAMES)


def wrong(measured: pd.DataFrame, name: str) -> pd.DataFrame:
    return differences(measured, FRAMES[name], read_bands(name))


def rows_of(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Which rows are of each method."""
    methods = frame.index.get_level_values("method")
    return {str(method): methods == method for method in methods.unique()}


def settings_of(frame: pd.DataFrame) -> list[str]:
    """The levels of the index that are no texts."""
    return [name for name in frame.index.names if name not in ("sequence_id", "group")]


@EVERY_FRAME
def test_a_frame_agrees_with_itself_and_within_its_bands(name):
    frame = FRAMES[name]
    assert wrong(frame, name).empty
    assert wrong(frame + 0.99 * allowed(frame, read_bands(name)), name).empty


@EVERY_FRAME
def test_each_number_beyond_its_band_is_named(name):
    frame = FRAMES[name]
    assert len(wrong(frame + 1.01 * allowed(frame, read_bands(name)), name)) == frame.count().sum()


@EVERY_FRAME
def test_what_was_not_measured_is_named(name):
    frame = FRAMES[name]
    for rows in rows_of(frame).values():
        assert len(wrong(frame[~rows], name)) == frame[rows].count().sum()


def test_bands_are_of_frames_and_methods_that_there_are():
    bands = pd.concat([read_bands(name) for name in FRAMES])
    for band in bands.itertuples():
        assert band.method in rows_of(FRAMES[band.frame]), band
        assert band.column in VALUES and band.band > 0 and band.measured


@TARGET_BY_TARGET
def test_zeros_fail(name):
    frame = FRAMES[name]
    for method, rows in rows_of(frame).items():
        zeros = frame.mask(np.repeat(rows[:, None], frame.shape[1], 1), 0.0)
        assert len(wrong(zeros, name)), method


@TARGET_BY_TARGET
def test_swapped_methods_fail(name):
    """Of each pair, on the texts and settings that both have; equal numbers can't be told apart."""
    frame = FRAMES[name]
    parts = {method: frame[rows].droplevel("method") for method, rows in rows_of(frame).items()}
    for first, second in combinations(parts, 2):
        common = parts[first].index.intersection(parts[second].index)
        a, b = parts[first].loc[common], parts[second].loc[common]
        if not len(common) or ((a - b).abs() < EXACT).all(axis=None):
            continue
        swapped = {first: b, second: a}
        measured = pd.concat(swapped, names=["method"]).reorder_levels(frame.index.names)
        kept = frame.drop(measured.index)
        assert len(wrong(pd.concat([kept, measured]), name)), (first, second)


@TARGET_BY_TARGET
def test_numbers_of_other_texts_fail(name):
    """Each text has those of the next one: means stay as they are."""
    frame = FRAMES[name]
    for method, rows in rows_of(frame).items():
        moved = frame.copy()
        for _, part in frame[rows].groupby(settings_of(frame)):
            moved.loc[part.index] = np.roll(part.to_numpy(), 1, axis=0)
        assert len(wrong(moved, name)), method


@TARGET_BY_TARGET
def test_numbers_of_another_setting_fail(name):
    """Each share has those of the next one."""
    frame = FRAMES[name]
    (setting,) = (level for level in frame.index.names if level in SETTINGS)
    others = [level for level in frame.index.names if level != setting]
    for method, rows in rows_of(frame).items():
        moved = frame.copy()
        for _, part in frame[rows].groupby(others):
            moved.loc[part.index] = np.roll(part.to_numpy(), 1, axis=0)
        assert len(wrong(moved, name)), method
