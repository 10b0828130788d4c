"""A results folder: what is written is read back to the bit, what is damaged is named, and plans
that contradict do not both stay.
"""

import errno
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from folders import records, spoil

from tl_localize.evals import InjResults
from tl_localize.execution import Plan, Record, Store, Task, status
from tl_localize.execution.store import DAMAGE, pack, unpack
from tl_localize.files import Saved

ROOT = Path(__file__).parents[2]
TASK = Task("scores", {"sequence": "s0"})


WHOLE = pack({"key": TASK.key, "value": {"a": 1}, "about": {"seconds": 1.0}})


def plan_of(rate, *labels):
    tasks = [
        Task("inj", {"rate": rate, "label": label}, (), label, "s0") for label in labels or ("m",)
    ]
    return Plan("inj", {"rate": rate}, ["s0"], dict.fromkeys(labels, "M()"), tasks)


# ---- records


@dataclass(frozen=True)
class Tensors(Saved):
    tensors: dict[str, torch.Tensor]


def test_record_is_read_back_to_the_bit(tmp_path):
    floats = [float("nan"), float("inf"), -float("inf"), 5e-324]
    value = {"floats": floats, "text": "Δ \ud800 \u2028 \0", "nested": {"a": [[]]}}
    Store(tmp_path).write(TASK, Record(value, {"seconds": 0.1}))
    record = Store(tmp_path).read(TASK)
    assert repr(record.value) == repr(value) and record.about == {"seconds": 0.1}
    tensors = {
        "strided": torch.randn(3, 5)[:, ::2],
        "odd": torch.tensor([torch.nan, torch.inf]),
        "none": torch.zeros(0, 3),
        "bool": torch.ones(2) > 0,
    }
    Store(tmp_path).write(TASK, Record(Tensors(tensors)))
    found = Store(tmp_path).read(TASK).value.tensors
    torch.testing.assert_close(found, tensors, rtol=0, atol=0, equal_nan=True)


def test_every_flipped_bit_is_noticed():
    values = torch.arange(4.0).reshape(2, 2)
    data = pack({"key": TASK.key, "value": values})
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        try:
            found = unpack(bytes(flipped))
        except DAMAGE:
            continue
        assert found["key"] == TASK.key, f"byte {at}"
        assert torch.equal(found["value"], values)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (20).to_bytes(8, "little") + b'{"__metadata__": 12}',
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        *(length.to_bytes(8, "little") + WHOLE[8:] for length in (0, 1, 2**20, 2**62, 2**64 - 1)),
    ],
    ids=range(12),
)
def test_what_is_no_record_is_set_aside(tmp_path, data, caplog):
    store, path = Store(tmp_path), tmp_path / TASK.file
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert store.read(TASK) is None
    assert not path.exists()
    assert f"{TASK.file} was set aside as set_aside/{TASK.key}" in caplog.text


def something_else(path, what):
    path.unlink(missing_ok=True)
    if what == "folder":
        (path / "inside").mkdir(parents=True)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if what == "loop" else "nowhere")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("folder", "records/inj"),
        ("pipe", "records/scores"),
        ("loop", "plans"),
        ("dangling", "failures"),
    ],
)
def test_what_is_no_file_is_set_aside(run_inj, finished, inj_numbers, tmp_path, what, kind, caplog):
    finished("inj")
    before = inj_numbers()
    path = next(iter(sorted((tmp_path / "run" / kind).iterdir())), None)
    path = path or tmp_path / "run" / "failures" / "x.json"
    something_else(path, what)
    assert status(Store(tmp_path / "run", read_only=True)) if kind != "plans" else True
    run_inj()
    assert inj_numbers() == before
    assert f"{kind}/{path.name} was set aside" in caplog.text
    assert "it is no file" in caplog.text


@pytest.mark.parametrize("reason", [None, {}, "", 3])
def test_failure_without_a_reason_is_damage(tmp_path, reason, caplog):
    store = Store(tmp_path)
    store.fail(TASK, ValueError("x"))
    path = tmp_path / "failures" / f"{TASK.key}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "reason": reason}))
    assert Store(tmp_path).failures() == {}
    assert "it says of no task why it failed" in caplog.text


def test_full_disk_stops_with_a_message_and_loses_nothing(
    run_inj, inj_numbers, leftovers, monkeypatch
):
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 15:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("tl_localize.files.os.fsync", full)
        with pytest.raises(OSError, match=r"have room.*what is done is kept"):
            run_inj()
    assert leftovers() == []
    run_inj()
    run_inj("whole")
    assert inj_numbers() == inj_numbers("whole")


# ---- read-only


def test_read_only_folder_can_be_read_and_is_not_changed(run_inj, tmp_path, caplog):
    run_inj()
    spoil(records(tmp_path / "run", "inj")[0], "empty")
    (tmp_path / "run" / "failures" / "x.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    store = Store(tmp_path / "run", read_only=True)
    assert status(store).frame["missing"].sum() == 1
    assert len(InjResults.of(store).missing) == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert "is not read: it is not whole" in caplog.text
    with pytest.raises(ValueError, match=r"folder must be open for writing, got .* as read-only"):
        store.write(TASK, Record({}))


def test_read_only_store_rejects_a_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="folder must hold the results of a run"):
        Store(tmp_path / "nothing", read_only=True)


# ---- plans


def test_plans_stand_in_the_order_in_which_they_were_last_asked_for(tmp_path):
    first, second, third = plan_of(0.1, "a"), plan_of(0.1, "a", "b"), plan_of(0.1, "c")
    for plan in (first, first, second, third, first, second, first, second, second):
        Store(tmp_path).add_plan(plan, {"x": "y"})
    plans = Store(tmp_path).plans()
    assert ["".join(one.plan.methods) for one in plans] == ["a", "ab", "c", "a", "ab", "a", "ab"]
    assert plans[0].environment == {"x": "y"}


def test_plan_that_was_written_between_check_and_writing_is_seen(tmp_path, monkeypatch):
    right, other = Store._write, Store(tmp_path)

    def overtaken(self, *arguments, **options):
        monkeypatch.setattr(Store, "_write", right)
        other.add_plan(plan_of(0.2), {})
        right(self, *arguments, **options)

    monkeypatch.setattr(Store, "_write", overtaken)
    with pytest.raises(ValueError, match=r"rate: 0.2 in the folder, 0.1 now"):
        Store(tmp_path).add_plan(plan_of(0.1), {})
    assert [one.plan.settings for one in Store(tmp_path).plans()] == [{"rate": 0.2}]


@pytest.mark.parametrize("change", ["environment", "plan", "sha256"])
def test_changed_plan_is_set_aside(tmp_path, change, caplog):
    Store(tmp_path).add_plan(plan_of(0.1), {})
    (path,) = (tmp_path / "plans").iterdir()
    body = json.loads(path.read_text())
    changes = {"environment": {"x": 1}, "plan": {**body["plan"], "settings": {}}, "sha256": "0"}
    path.write_text(json.dumps({**body, change: changes[change]}))
    assert Store(tmp_path).plans() == []
    assert "plans/000001.json was set aside" in caplog.text
    Store(tmp_path).add_plan(plan_of(0.1), {})
    assert len(Store(tmp_path).plans()) == 1


def test_names_that_are_no_file_names_are_kept(run_inj, inj, tmp_path):
    name = "../\0\n\u2028\U0010ffff"
    sequences = [replace(one, id=one.id + name) for one in inj.sequences[:2]]
    assert not [outcome for outcome in run_inj(sequences=sequences) if outcome.reason]
    assert run_inj(sequences=sequences) == []
    found = InjResults.of(Store(tmp_path / "run")).frame["sequence_id"]
    assert set(found) == {one.id for one in sequences}


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"[" * 100_000, b"\xff", "folder", "pipe"])
def test_damaged_marker_is_named_with_its_remedy(tmp_path, content):
    Store(tmp_path)
    if isinstance(content, str):
        something_else(tmp_path / "tl-localize.json", content)
    else:
        (tmp_path / "tl-localize.json").write_bytes(content)
    for read_only in (True, False):
        with pytest.raises(ValueError, match=r"no whole tl-localize.json .* write"):
            Store(tmp_path, read_only)


def test_folder_of_another_format_is_refused(tmp_path):
    Store(tmp_path)
    (tmp_path / "tl-localize.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"got format 1 in .*use the version"):
        Store(tmp_path)
