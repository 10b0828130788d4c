"""The page of each model, made anew of frames alone: no model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison import VALUES
from frames import bands_of, differences, read_frames
from kept import ARCHIVE, EXPECTED, bring, write_archive
from page import write_page

# (model, frame) -> methods of which a row is of another training: PLAN.md, Tests
ANOTHER_TRAINING = {("SmolLM2-135M-Instruct.Q4_1", "distractors"): ["hard_concrete"]}


def folders(root: Path, below: str) -> list[Path]:
    return sorted(path for path in root.glob(f"*/{below}") if any(path.glob("*.csv")))


def test_page(request: pytest.FixtureRequest) -> None:
    """Of all that was measured into the results folder, and what differs from what is committed."""
    results = Path(request.config.getoption("--results"))
    if request.config.getoption("--rehearse"):
        for frames in folders(results, "rehearsal/frames"):
            write_page(frames, frames.parent, frames.parents[1].name)
        return
    wrong = {}
    for frames in folders(results, "real/frames"):
        title = frames.parents[1].name
        write_page(frames, frames.parent, title)
        committed = read_frames(EXPECTED / title)
        measured = read_frames(frames)
        if request.config.getoption("--update-expected"):
            for name in committed.keys() & measured.keys():
                rows, n_rows = len(measured[name]), len(committed[name])
                assert rows >= n_rows, f"{title}, {name}: {rows} rows here, {n_rows} are committed"
            (EXPECTED / title).mkdir(parents=True, exist_ok=True)
            for path in frames.glob("*.csv"):
                (EXPECTED / title / path.name).write_bytes(path.read_bytes())
            bring(EXPECTED / title / ARCHIVE, frames.parent)  # what other machines have measured
            write_archive(frames.parent, EXPECTED / title / ARCHIVE)
        for name in committed.keys() & measured.keys():
            off = differences(measured[name], committed[name])
            if len(off):
                wrong[title, name] = off.to_string()
    assert not wrong, "\n".join(f"{key}\n{text}" for key, text in wrong.items())


@pytest.mark.smoke
@pytest.mark.parametrize("frames", folders(EXPECTED, ""), ids=lambda folder: folder.name)
def test_smoke_a_frame_does_not_differ_from_itself(frames: Path) -> None:
    for name, frame in read_frames(frames).items():
        assert not len(differences(frame, frame)), name


@pytest.mark.smoke
@pytest.mark.parametrize("frames", folders(EXPECTED, ""), ids=lambda folder: folder.name)
def test_smoke_a_column_of_zeros_is_named(frames: Path) -> None:
    """Of each method and column that tests compare, where it is beyond its band."""
    for name, frame in read_frames(frames).items():
        for column in {*VALUES} & {*frame.columns}:
            if "method" not in frame:
                assert len(differences(frame.assign(**{column: 0.0}), frame)), (name, column)
                continue
            for method, part in frame.groupby("method"):
                bands = bands_of(method, frame)
                band = bands.get(column, 1.0 if bands else 0.001)
                if part[column].abs().max() > band and (column in bands or not bands):
                    zeros = frame[column].where(frame["method"] != method, 0.0)
                    off = differences(frame.assign(**{column: zeros}), frame)
                    assert len(off), (name, method, column)


@pytest.mark.smoke
@pytest.mark.parametrize("frames", folders(EXPECTED, ""), ids=lambda folder: folder.name)
def test_smoke_all_methods_read_one_training(frames: Path) -> None:
    """A run that goes on from rows of another machine trains their injection once more, and what
    two methods find would then be of two models.
    """
    for name, frame in read_frames(frames).items():
        if "loss" in frame:
            known = frame["method"].isin(ANOTHER_TRAINING.get((frames.name, name), ()))
            trained = frame[~known].groupby(["injection_ratio", "seed", "group", "sequence_id"])
            spread = trained["loss"].max() / trained["loss"].min()
            assert (spread < 1.001).all(), (name, spread[spread >= 1.001])


@pytest.mark.smoke
@pytest.mark.parametrize("path", sorted(EXPECTED.glob("*/*.csv")), ids=lambda path: path.stem)
def test_smoke_one_frame_alone_makes_a_page(path: Path, tmp_path: Path) -> None:
    """As where a machine has measured one part."""
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / path.name).write_bytes(path.read_bytes())
    write_page(tmp_path / "frames", tmp_path, path.parent.name, draw=False)


@pytest.mark.smoke
def test_smoke_committed_frames_make_a_page(tmp_path: Path) -> None:
    for frames in folders(EXPECTED, ""):
        page = write_page(frames, tmp_path / frames.name, frames.name)
        assert page.read_text(encoding="utf-8").startswith(f"# {frames.name}")
