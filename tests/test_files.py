"""Files are written whole or not at all, and folders are checked before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tl_localize.files import prepare_folder, reading, remove_abandoned, write_text, write_whole


def test_prepare_folder_makes_missing_parents(tmp_path: Path) -> None:
    assert list(prepare_folder(tmp_path / "a" / "b").iterdir()) == []


def test_prepare_folder_rejects_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"folder must be writable, got .*file.*Choose another one with --out"
    ):
        prepare_folder(tmp_path / "file")


def no_room(*_: object) -> None:
    raise OSError(28, "no room on the disk")


def test_write_text_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(
        OSError, match=r"folder must have room for new files, got 'no room on the disk'.*a\.txt"
    ):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("links", [True, False])
def test_new_file_does_not_replace_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def none(*_: object) -> None:
        raise PermissionError("this file system has no links")

    if not links:
        monkeypatch.setattr(os, "link", none)
    write_whole(tmp_path / "a", b"1", new=True)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a", b"2", new=True)
    assert (tmp_path / "a").read_bytes() == b"1"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_temporary_files_are_removed_after_an_hour_and_others_stay(tmp_path: Path) -> None:
    old, new, foreign = (
        tmp_path / name
        for name in (".a.json.0123456789abcdef.tmp", ".b.json.0123456789abcdef.tmp", ".mine.tmp")
    )
    for path in (old, new, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (0, 0))
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == [new, foreign]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_only_regular_files_are_replaced_and_links_are_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ValueError, match="path must be a regular file or new, got"):
            write_whole(path, b"1")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_whole(tmp_path / "link", b"1")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_bytes() == b"1"


@pytest.mark.parametrize(
    "error",
    [ImportError("no module named flash_attn"), OSError("cut off"), RecursionError("too deep")],
)
def test_reading_names_the_file_whatever_a_library_raises(tmp_path: Path, error: Exception) -> None:
    """Also ImportError: a config may ask for a package that nobody has."""
    said = (
        rf"path must be whole, got '.*a.json' \({type(error).__name__}: {error}\)\. Copy it again\."
    )
    with (
        pytest.raises(ValueError, match=said),
        reading("path must be whole", tmp_path / "a.json", "Copy it again."),
    ):
        raise error
