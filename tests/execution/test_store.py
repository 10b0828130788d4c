"""What is written is read back to the bit, what is damaged is named, and settings of one folder
agree.
"""

import errno
import json
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from folders import Counted, files_of, spoil
from kill import forked

from tl_localize import Activations, files
from tl_localize.evals import InjResults
from tl_localize.execution import Cell, Lazy, Settings, Steps, Store, status
from tl_localize.execution.store import DAMAGE, Scope, describe, pack, same_numbers, unpack
from tl_localize.files import Saved

INPUTS = {"step": "sum", "of": [1, 2]}


@dataclass(frozen=True, eq=False)
class Tensors(Saved):
    tensors: dict[str, torch.Tensor]


def never():
    pytest.fail("it is there already")


@pytest.fixture(params=["memory", "folder"])
def make_steps(request, tmp_path):
    """The steps of a run; in a folder each time a new store."""
    in_memory = Steps()
    return lambda: in_memory if request.param == "memory" else Store(tmp_path)


# ---- steps


def test_step_is_computed_once(make_steps):
    assert make_steps().get(INPUTS, lambda: [3]) == [3]
    assert make_steps().get(dict(reversed(INPUTS.items())), never) == [3]
    assert make_steps().get({**INPUTS, "of": [1, 3]}, lambda: [4]) == [4]
    assert sorted(make_steps().given("sum")) == [[3], [4]]


def test_get_many_computes_the_missing_ones_and_keeps_no_failure(make_steps):
    inputs = [{"step": "square", "of": i} for i in range(4)]
    asked = []

    def compute(missing):
        asked.append(missing)
        return [ValueError("two") if i == 2 else i * i for i in missing]

    make_steps().get(inputs[1], lambda: 1)
    found = make_steps().get_many(inputs, compute)
    assert found[:2] == [0, 1] and found[3] == 9 and str(found[2]) == "two"
    make_steps().get_many(inputs, compute)
    assert asked == [[0, 2, 3], [2]]
    assert make_steps().get_many(inputs[:2], compute) == [0, 1] and len(asked) == 2


def test_failed_step_is_not_remembered(make_steps):
    with pytest.raises(ZeroDivisionError):
        make_steps().get(INPUTS, lambda: 1 / 0)
    assert make_steps().get(INPUTS, lambda: 3) == 3


def test_values_are_read_back_to_the_bit(tmp_path):
    floats = [float("nan"), float("inf"), -float("inf"), 5e-324]
    value = {"floats": floats, "text": "Δ \ud800 \u2028 \0", "nested": {"a": [[]]}}
    Store(tmp_path).get(INPUTS, lambda: value)
    assert repr(Store(tmp_path).get(INPUTS, never)) == repr(value)
    tensors = {
        "strided": torch.randn(3, 5)[:, ::2],
        "odd": torch.tensor([torch.nan, torch.inf]),
        "none": torch.zeros(0, 3),
        "bool": torch.ones(2) > 0,
    }
    Store(tmp_path).get({"step": "tensors"}, lambda: Tensors(tensors))
    found = Store(tmp_path).get({"step": "tensors"}, never).tensors
    torch.testing.assert_close(found, tensors, rtol=0, atol=0, equal_nan=True)


def test_lazy_value_and_lazy_error_are_computed_once():
    calls = []

    def fails():
        calls.append("fails")
        raise ValueError("no room")

    value, error = Lazy(lambda: calls.append("value")), Lazy(fails)
    for _ in range(2):
        assert value() is None
        with pytest.raises(ValueError, match="no room"):
            error()
    assert calls == ["value", "fails"]


# ---- cells


def settings_of(n_parts=2, labels=("m",), **changes):
    parts = [[f"s{i}", "ab"] for i in range(n_parts)]
    scope = Scope({"rate": 1}, {label: ({"class": "M"}, n_parts) for label in labels})
    return replace(Settings("inj", {"a": 1}, parts, {"1 %": scope}), **changes)


def test_rows_of_a_cell_with_two_files_are_the_newest(tmp_path):
    cell = Cell("m", "s0", "1 %")
    store = Store(tmp_path)
    store.agree(settings_of())
    for i, version in enumerate(("new", "old")):
        inputs = {"step": "inj", "data": version}
        assert store.rows(cell, inputs, lambda version=version: [{"data": version}])
        file = max(files_of(tmp_path, "inj"), key=lambda path: path.stat().st_mtime_ns)
        os.utime(file, (0, 10**9 - i))
    assert store.done() == {cell: [{"data": "old"}]}  # what this run computed
    assert Store(tmp_path).done() == {cell: [{"data": "new"}]}


def test_cells_stand_in_the_order_of_tables():
    first = settings_of(1, ("a", "b"))
    grown = settings_of(2, ("b", "c")).join(first)
    assert [(cell.part, cell.method) for cell in grown.cells()] == [
        ("s0", "a"),
        ("s0", "b"),
        ("s0", "c"),
        ("s1", "b"),
        ("s1", "c"),
    ]
    assert grown.join(grown).cells() == grown.cells()


def test_failure_of_a_cell_is_kept_until_it_is_done(tmp_path, caplog):
    cell = Cell("m", "s0", "1 %")
    store = Store(tmp_path)
    store.agree(settings_of())
    assert store.rows(cell, INPUTS, lambda: 1 / 0) == []
    assert Store(tmp_path).failures() == {cell: DIVISION}
    assert f"FAILED m on s0: {DIVISION}" in caplog.messages
    assert store.rows(cell, INPUTS, lambda: [{"a": 1}]) == [{"a": 1}]
    assert Store(tmp_path).failures() == {}


DIVISION = "ZeroDivisionError: division by zero"


def test_failure_keeps_a_name_that_is_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr("tl_localize.execution.store.LOG.disabled", True)  # pytest can't send it
    cell = Cell("m", "\ud800", "1 %")
    Store(tmp_path).fail("x", cell, ValueError("\ud801"))
    assert Store(tmp_path).failures() == {cell: "ValueError: \ud801"}


@pytest.mark.parametrize("how", ["truncated", "nested", "foreign"])
def test_damaged_failure_is_named_and_not_read(tmp_path, how, caplog):
    Store(tmp_path).fail("x", Cell("m"), ValueError("no"))
    spoil(tmp_path / "failures" / "x.json", how)
    assert Store(tmp_path).failures() == {}
    assert "failures/x.json is not read: it is not whole." in caplog.messages


# ---- files


def test_every_flipped_bit_is_noticed():
    values = torch.arange(4.0).reshape(2, 2)
    data = pack({"key": "abc", "value": values})
    noticed = 0
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        try:
            found = unpack(bytes(flipped))
        except DAMAGE:
            noticed += 1
            continue
        assert found["key"] == "abc", f"byte {at}"
        assert torch.equal(found["value"], values)
    assert noticed > 0.9 * len(data)


WHOLE = pack({"key": "abc", "value": {"a": 1}})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 64,
        b'{"a": 1}\n',
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (20).to_bytes(8, "little") + b'{"__metadata__": 12}',
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        WHOLE[: len(WHOLE) // 2],
        *(length.to_bytes(8, "little") + WHOLE[8:] for length in (0, 1, 2**20, 2**62, 2**64 - 1)),
    ],
    ids=range(14),
)
def test_what_is_no_file_of_a_step_is_put_aside(tmp_path, data, caplog):
    Store(tmp_path).get(INPUTS, lambda: 3)
    (path,) = files_of(tmp_path)
    path.write_bytes(data)
    assert Store(tmp_path).get(INPUTS, lambda: 3) == 3
    (message,) = caplog.messages
    assert message.startswith(f"steps/sum/{path.name} was moved to damaged/{path.name}.")
    assert Store(tmp_path).get(INPUTS, never) == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("what", ["pipe", "loop", "dangling", "folder"])
def test_what_is_no_file_is_put_aside(tmp_path, what, caplog):
    Store(tmp_path).get(INPUTS, lambda: 3)
    (path,) = files_of(tmp_path)
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        (path / "inside").mkdir(parents=True)
    else:
        path.symlink_to(path if what == "loop" else "nowhere")
    assert Store(tmp_path).get(INPUTS, lambda: 3) == 3
    assert "it is no file" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_leftovers_of_a_killed_run_are_removed_a_day_later(tmp_path, monkeypatch):
    def killed(_):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(os, "fsync", killed)  # after the content, before the name
    step = forked(lambda: Store(tmp_path).get(INPUTS, lambda: 3))
    settings = forked(lambda: Store(tmp_path).agree(settings_of()))
    for child in (step, settings):
        os.waitpid(child, 0)
    monkeypatch.undo()
    left = list(tmp_path.rglob(".*.tmp"))
    assert {path.parent for path in left} == {tmp_path, tmp_path / "tmp"}
    Store(tmp_path)
    assert all(path.exists() for path in left)  # their run could be alive
    for path in left:
        os.utime(path, (0, time.time() - 25 * 60 * 60))
    Store(tmp_path)
    assert not any(path.exists() for path in left)


def test_full_disk_leaves_the_settings_as_they_were(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    Store(tmp_path).agree(settings_of(1))
    before = (tmp_path / "settings.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"have room.*what a results folder holds is kept"):
            Store(tmp_path).agree(settings_of(2))
    assert (tmp_path / "settings.json").read_bytes() == before


# ---- settings


SCOPE = Scope({"rate": 2}, {"m": ({"class": "M"}, 2)})


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"parts": [["s0", "ab"]]}, []),
        ({"parts": [["s0", "ab"], ["s1", "ab"], ["s2", "ab"]]}, []),
        ({"scopes": {"2 %": SCOPE}}, []),
        ({"environments": [{"threads": 2}]}, []),
        ({"benchmark": "del"}, ["benchmark: inj in the folder, del now"]),
        ({"settings": {"a": 2}}, ["a: 1 in the folder, 2 now"]),
        ({"settings": {"a": 1, "b": 2}}, ["b: None in the folder, 2 now"]),
        ({"settings": {}}, ["a: 1 in the folder, None now"]),
        ({"parts": [["s1", "ab"]]}, ["part 0: ['s0', 'ab'] in the folder, ['s1', 'ab'] now"]),
        ({"parts": [["s0", "cd"]]}, ["part 0: ['s0', 'ab'] in the folder, ['s0', 'cd'] now"]),
        ({"scopes": {"1 %": SCOPE}}, ["rate: 1 in the folder, 2 now"]),
        (
            {"scopes": {"1 %": Scope({"rate": 1}, {"m": ({"class": "N"}, 2)})}},
            ["m: {'class': 'M'} in the folder, {'class': 'N'} now"],
        ),
    ],
)
def test_settings_contradict_each_other(tmp_path, changes, wrong):
    changed = settings_of(**changes)
    assert changed.contradictions(settings_of()) == wrong
    for steps in (Steps(), Store(tmp_path)):
        steps.agree(settings_of())
        if wrong:
            with pytest.raises(ValueError, match="settings must agree with those of") as error:
                steps.agree(changed)
            assert wrong[0] in str(error.value)
        else:
            steps.agree(changed)
    if not wrong:
        assert Store(tmp_path).settings.cells() == changed.join(settings_of()).cells()


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ([1.0, 2.0, 0.1], [1.05, 2.0, 0.1], True),
        ([1.0, 2.0, 0.1], [1.2, 2.0, 0.1], False),
        ([1.0, 2.0, 0.1], [1.0, 0.1], False),
        ([1.0, 2.0, 0.1], None, False),
    ],
)
def test_logits_on_fixed_tokens_agree_within_their_tolerance(old, new, same):
    found = settings_of(settings={"probe": new}).contradictions(
        settings_of(settings={"probe": old})
    )
    assert bool(found) != same


def test_settings_of_runs_that_start_at_once_are_joined(tmp_path):
    threads = [
        threading.Thread(target=Store(tmp_path).agree, args=[settings_of(i + 1, (f"m{i}",))])
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = Store(tmp_path).settings
    assert set(found.scopes["1 %"].methods) == {f"m{i}" for i in range(8)}
    assert len(found.parts) == 8


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"[" * 100_000, b"\xff"])
def test_damaged_settings_are_named(tmp_path, content):
    Store(tmp_path).agree(settings_of())
    (tmp_path / "settings.json").write_bytes(content)
    for read_only in (True, False):
        with pytest.raises(ValueError, match=r"in format \d+, got no whole settings.json in"):
            Store(tmp_path, read_only)


def test_results_without_settings_are_refused_as_they_may_be_of_another_model(tmp_path):
    cell = Cell("m0", "s0", "1 %")
    store = Store(tmp_path)
    store.agree(settings_of())
    store.rows(cell, {"step": "inj", "of": 1}, lambda: [{"recall": 1.0}])
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"must hold settings.json beside its results.*Put it"):
        Store(tmp_path).agree(settings_of())


def test_a_function_that_is_gone_lends_its_id_to_no_other():
    described = {json.dumps(describe(lambda: None)) for _ in range(20)}
    assert len(described) == 20


def test_folder_of_another_format_is_refused(tmp_path):
    Store(tmp_path)
    (tmp_path / "settings.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"got format 1 in .*Use the version that wrote it"):
        Store(tmp_path)


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "tmp").mkdir()
    with pytest.raises(ValueError, match="folder must be new, empty or a results folder"):
        Store(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.tex", "tmp"}


def test_what_a_file_manager_leaves_is_no_file_of_others(tmp_path):
    (tmp_path / ".DS_Store").write_bytes(b"")
    assert Store(tmp_path).settings is None


def test_what_another_process_tries_a_new_folder_with_is_no_file_of_others(tmp_path, monkeypatch):
    def seen(**named):  # on file systems where a file without a name can't be
        return tempfile.NamedTemporaryFile(**named, delete=False)

    monkeypatch.setattr(files, "TemporaryFile", seen)
    files.prepare_folder(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert Store(tmp_path).settings is None


# ---- read-only


def test_read_only_folder_can_be_read_and_is_not_changed(inj, run, tmp_path, caplog):
    run(inj, [Activations()])
    spoil(files_of(tmp_path / "run", "inj")[0], "empty")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    store = Store(tmp_path / "run", read_only=True)
    assert status(store).frame["missing"].sum() == 1
    assert len(InjResults.of(store).missing) == 1
    assert "is not read: it is not whole" in caplog.text
    for methods in ([Activations()], [Activations(), Counted()]):  # the rows, the settings
        with pytest.raises(ValueError, match=r"open for writing, got .* read-only"):
            inj.run(methods, store, progress=False)
    with pytest.raises(ValueError, match="open for writing"):
        store.get({"step": "sum"}, lambda: pytest.fail("it was computed"))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_read_only_store_rejects_a_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="folder must hold the results of a run"):
        Store(tmp_path / "nothing", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_file_names_are_kept(inj, run, tmp_path):
    name = "../\0\n\u2028\U0010ffff"
    sequences = [replace(sequence, id=sequence.id + name) for sequence in inj.sequences[:2]]
    results = run(replace(inj, sequences=sequences), [Activations()])
    assert set(results.frame["sequence_id"]) == {sequence.id for sequence in sequences}
    assert not len(results.missing)


def test_what_could_not_be_written_is_written_when_it_is_asked_for_again(tmp_path, monkeypatch):
    store = Store(tmp_path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            store.get(INPUTS, lambda: [3])
    assert store.get(INPUTS, lambda: [4]) == [4]
    assert Store(tmp_path).get(INPUTS, never) == [4]


def test_a_file_that_another_run_has_just_put_aside_is_left_out(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.get(INPUTS, lambda: [3])
    (path,) = files_of(tmp_path, "sum")
    gone = path.with_name("gone.safetensors")
    monkeypatch.setattr(Store, "_files", lambda self, kind: [gone, path])
    assert store.given("sum") == [[3]]


def test_fewer_parts_take_nothing_from_what_was_asked_for(make_steps):
    cells = [Cell("m", f"s{i}", "1 %") for i in range(3)]
    make_steps().agree(settings_of(3))
    steps = make_steps()
    steps.agree(settings_of(3))
    for cell in cells:
        steps.rows(cell, {"step": "inj", "of": cell.part}, lambda: [{"a": 1}])
    scope = Scope({"rate": 1}, {"m": ({"class": "M"}, 1)})
    steps.agree(settings_of(3, scopes={"1 %": scope}))
    assert list(steps.done()) == steps.settings.cells() == cells


def test_the_tolerance_of_logits_does_not_grow_with_them():
    assert same_numbers([100.0, 2.0, 0.1], [100.05, 2.0, 0.1])
    assert not same_numbers([100.0, 2.0, 0.1], [100.5, 2.0, 0.1])
