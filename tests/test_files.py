"""Files are written whole or not at all, and folders are checked before the work."""

import os
from pathlib import Path

import pytest

from tl_localize.files import prepare_folder, reading, write_text, write_whole


def test_prepare_folder_makes_missing_parents_and_rejects_a_file_in_the_way(tmp_path):
    assert list(prepare_folder(tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder must be writable, got .*file"):
        prepare_folder(tmp_path / "file")


def no_room(*_):
    raise OSError(28, "no room on the disk")


def test_write_text_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match=r"room for new files, got 'no room on the disk'.*a\.txt"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("links", [True, False])
def test_new_file_does_not_replace_one(tmp_path, monkeypatch, links):
    def none(*_):
        raise PermissionError("this file system has no links")

    if not links:
        monkeypatch.setattr(os, "link", none)
    write_whole(tmp_path / "a", b"1", new=True)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a", b"2", new=True)
    assert (tmp_path / "a").read_bytes() == b"1"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_only_regular_files_are_replaced_and_links_are_followed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ValueError, match="path must be a regular file or new, got"):
            write_whole(path, b"1")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_whole(tmp_path / "link", b"1")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_bytes() == b"1"


def test_reading_names_the_file_whatever_a_library_raises(tmp_path):
    said = r"a.json' \(OSError: cut off\)\. Copy it\."
    rule = reading("path must be whole", tmp_path / "a.json", "Copy it.")
    with pytest.raises(ValueError, match=said), rule:
        raise OSError("cut off")
