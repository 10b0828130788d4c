"""Files are written whole or not at all, and folders are checked before the work; a dataclass is
its class and its fields.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from tl_localize import files
from tl_localize.files import (
    check_out_file,
    digest,
    identity,
    identity_text,
    prepare_folder,
    refuse_unreadable,
    remove_leftovers,
    write_json,
    write_text,
    write_whole,
)


def test_prepare_folder_makes_missing_parents_and_rejects_a_file_in_the_way(tmp_path):
    assert list(prepare_folder(tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder must be writable, got .*file"):
        prepare_folder(tmp_path / "file")


def test_prepare_folder_tries_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TemporaryFile", lambda **_: no_room())
    with pytest.raises(ValueError, match=r"folder must be writable, got .*no room on the disk"):
        prepare_folder(tmp_path)


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


def test_a_text_that_is_no_unicode_is_written_as_it_came(tmp_path):
    write_text(tmp_path / "a.txt", "\ud800")
    assert (tmp_path / "a.txt").read_bytes().decode(errors="surrogatepass") == "\ud800"


def test_only_leftovers_of_a_day_are_removed(tmp_path):
    names = [".a.0123456789abcdef.tmp", ".live.fedcba9876543210.tmp", "a.tmp", ".mine.tmp", "a"]
    for name in names:
        (tmp_path / name).write_text("")
        if "live" not in name:
            os.utime(tmp_path / name, (0, 0))
    folder = tmp_path / ".edited.0123456789abcdef.tmp"  # of a killed erase
    folder.mkdir()
    (folder / "model.safetensors").write_text("")
    os.utime(folder, (0, 0))
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])


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
    rule = refuse_unreadable("path must be whole", tmp_path / "a.json", "Copy it.")
    with pytest.raises(ValueError, match=said), rule:
        raise OSError("cut off")
    rule = refuse_unreadable("path must be whole", tmp_path / "a.json", "Copy it.")
    with pytest.raises(ValueError, match=said), rule:
        raise RuntimeError("something is wrong") from OSError("cut off")


# What a value is


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    steps: tuple[int, ...] = (1, 2)
    speed: int = field(default=3, compare=False)


def test_identity_names_class_and_compared_fields():
    expected = {"class": "Outer", "inner": {"class": "Inner", "rate": 0.1}, "steps": [1, 2]}
    assert identity(Outer(speed=7)) == expected
    assert json.loads(identity_text(Outer())) == expected


def test_identity_of_numbers_of_numpy_is_that_of_plain_ones():
    found = identity(Inner(rate=np.int64(7)))
    assert found == identity(Inner(rate=7)) and type(found["rate"]) is int
    assert identity(np.float32(0.5)) == 0.5


def test_identity_of_tensors_follows_their_numbers():
    numbers, same, other = torch.arange(3), torch.arange(3), torch.tensor([0, 1, 3])
    assert identity(numbers) == identity(same) != identity(other)


@pytest.mark.parametrize("value", [object(), {"f": len}])
def test_identity_refuses_what_it_cannot_tell_apart(value):
    with pytest.raises(ValueError, match="settings must be"):
        identity(value)


def test_digest_follows_every_bit_and_no_order_of_names():
    numbers = torch.arange(6.0)
    same = [numbers.clone(), numbers.reshape(2, 3).flatten(), numbers.repeat_interleave(2)[::2]]
    assert {digest(tensor) for tensor in same} == {digest(numbers)}
    flipped = numbers.clone()
    flipped.view(torch.int32)[3] ^= 1
    others = [
        flipped,
        numbers.reshape(2, 3),
        numbers.double(),
        numbers.view(torch.int32),
        numbers.flip(0),
        [*range(6)],
        "",
        b"x",
    ]
    others += [{"a": numbers}, {"b": numbers}, {"a": 1}, {"a": 1.5}, {"a": [1]}]
    assert len({digest(value) for value in [numbers, *others]}) == 1 + len(others)
    assert digest({"a": 1, "b": [2]}) == digest({"b": (2,), "a": 1})
    assert digest("a", "b") != digest("ab")


def test_truth_values_of_numpy_stay_truth_values(tmp_path):
    write_json(tmp_path / "a.json", {"yes": np.bool_(True), "no": np.bool_(False)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"yes": True, "no": False}


@pytest.mark.parametrize("path", [".", "/", "a.csv", "a"])
def test_what_is_no_file_of_its_kind_is_refused(path):
    with pytest.raises(ValueError, match=r"out must be a \.jsonl file, got"):
        check_out_file(path, ".jsonl")


def test_a_folder_named_as_a_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"out must be a \.jsonl file, got"):
        check_out_file(tmp_path / "a.jsonl", ".jsonl")


def test_memory_that_runs_out_is_no_damaged_file():
    with pytest.raises(torch.OutOfMemoryError), refuse_unreadable("path must be whole", "a.pt"):
        raise torch.OutOfMemoryError("CUDA out of memory")
