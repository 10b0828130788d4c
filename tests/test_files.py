"""Files are written whole or not at all, and folders are checked before the work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tl_localize.files import prepare_folder, remove_abandoned, write_text, write_whole


def test_prepare_folder_makes_missing_parents(tmp_path: Path) -> None:
    assert list(prepare_folder(tmp_path / "a" / "b").iterdir()) == []


def test_prepare_folder_rejects_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder must be writable, got .*file.*Choose another one with --out"):
        prepare_folder(tmp_path / "file")


def test_write_text_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("links", [True, False])
def test_new_file_does_not_replace_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def none(*_: object) -> None:
        raise PermissionError("this file system has no links")

    if not links:
        monkeypatch.setattr(os, "link", none)
    write_whole(tmp_path / "a", b"1", new=True)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a", b"2", new=True)
    assert (tmp_path / "a").read_bytes() == b"1"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_abandoned_temporary_files_are_removed_and_those_in_use_stay(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = tmp_path / f".a.json.{socket.gethostname()}.{child.pid}.0a0a0a0a.tmp"
    living = tmp_path / f".a.json.{socket.gethostname()}.{os.getppid()}.0a0a0a0a.tmp"
    elsewhere = tmp_path / ".a.json.elsewhere.1.0a0a0a0a.tmp"
    for path in (dead, living, elsewhere):
        path.touch()
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living, elsewhere])
    os.utime(elsewhere, (0, 0))
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [living]
