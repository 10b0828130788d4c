"""A results folder: what is written is read back to the bit, what is damaged is named, and plans
that contradict do not both stay.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from folders import records, spoil

from tl_localize.evals import InjResults
from tl_localize.execution import Plan, Record, Store, Task, status
from tl_localize.execution.store import Damaged, pack, unpack
from tl_localize.files import Saved

ROOT = Path(__file__).parents[2]
TASK = Task("scores", {"sequence": "s0"})


def plan_of(rate: float, *labels: str) -> Plan:
    tasks = [
        Task("inj", {"rate": rate, "label": label}, (), label, "s0") for label in labels or ("m",)
    ]
    return Plan("inj", {"rate": rate}, ["s0"], dict.fromkeys(labels, "M()"), tasks)


# ---- records


@dataclass(frozen=True)
class Tensors(Saved):
    tensors: dict[str, torch.Tensor]
    required: ClassVar[tuple[str, ...]] = ()

    def packed(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        return self.tensors, {}

    @classmethod
    def unpacked(cls, tensors: Any, metadata: Any) -> Any:
        return cls(tensors)


def test_record_is_read_back_to_the_bit(tmp_path: Path) -> None:
    value = {
        "nan": float("nan"),
        "inf": [float("inf"), -float("inf")],
        "tiny": 5e-324,
        "text": "Δ \ud800 \u2028 \0",
        "nested": {"a": [[]]},
    }
    tensors = {
        "a": torch.randn(3, 5)[:, ::2],
        "b": torch.tensor([torch.nan, torch.inf]),
        "c": torch.zeros(0, 3),
        "d": torch.ones(2) > 0,
    }
    for given in (value, Tensors(tensors)):
        Store(tmp_path).write(TASK, Record(given, {"seconds": 0.1}))
        record = Store(tmp_path).read(TASK)
        assert record and record.about == {"seconds": 0.1}
        assert Store(tmp_path).seconds(TASK) == 0.1
        if given is value:
            assert repr(record.value) == repr(value)
        else:
            found = record.value.tensors
            assert all(torch.equal(found[name], tensors[name]) for name in ("a", "c", "d"))
            assert found["b"].isnan().tolist() == [True, False] and found["b"][1].isinf()


def test_every_flipped_bit_is_noticed() -> None:
    body = {"key": TASK.key, "value": {"recall": [0.5, 0.25]}, "about": {"seconds": 1.5}}
    for tensors in ({}, {"values": torch.arange(12.0).reshape(3, 4)}):
        data = pack(body, tensors)
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            try:
                found, others = unpack(bytes(flipped))
            except Damaged:
                continue
            assert found == body, f"byte {at}"
            assert all(torch.equal(tensors[name], others[name]) for name in tensors)


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
    ],
    ids=["empty", "8 bytes", "64 bytes", "list", "nothing", "number", "nested"],
)
def test_what_is_no_record_is_set_aside(tmp_path: Path, data: bytes, caplog: Any) -> None:
    store, path = Store(tmp_path), tmp_path / TASK.file
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert store.seconds(TASK) is None
    assert store.read(TASK) is None
    assert not path.exists()
    assert f"{TASK.file} was set aside as set_aside/{TASK.key}" in caplog.text


def something_else(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    if what == "folder":
        (path / "inside").mkdir(parents=True)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if what == "loop" else "nowhere")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("what", ["folder", "pipe", "loop", "dangling"])
@pytest.mark.parametrize("kind", ["records/inj", "records/scores", "plans", "failures"])
def test_what_is_no_file_is_set_aside(
    run_inj: Any, finished: Any, inj_numbers: Any, tmp_path: Path, what: str, kind: str, caplog: Any
) -> None:
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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("what", ["folder", "pipe", "loop"])
def test_marker_that_is_no_file_is_named(tmp_path: Path, what: str) -> None:
    Store(tmp_path)
    something_else(tmp_path / "tl-localize.json", what)
    with pytest.raises(ValueError, match=r"folder must hold a whole tl-localize.json"):
        Store(tmp_path, read_only=True)


@pytest.mark.parametrize("reason", [None, {}, "", 3])
def test_failure_without_a_reason_is_damage(tmp_path: Path, reason: Any, caplog: Any) -> None:
    store = Store(tmp_path)
    store.fail(TASK, ValueError("x"))
    path = tmp_path / "failures" / f"{TASK.key}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "reason": reason}))
    assert Store(tmp_path).failures() == {}
    assert "it says of no task why it failed" in caplog.text


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**62, 2**64 - 1])
def test_record_with_a_wrong_length_is_damage(tmp_path: Path, length: int, caplog: Any) -> None:
    store, path = Store(tmp_path), tmp_path / TASK.file
    store.write(TASK, Record({"a": 1}, {"seconds": 1.0}))
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    fresh = Store(tmp_path)
    assert fresh.seconds(TASK) is None and fresh.read(TASK) is None
    assert "was set aside" in caplog.text


def test_full_disk_stops_with_a_message_and_loses_nothing(
    run_inj: Any, inj_numbers: Any, leftovers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 15:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("tl_localize.files.os.fsync", full)
        with pytest.raises(OSError, match=r"folder must have room.*what is done is kept"):
            run_inj()
    assert leftovers() == []
    run_inj()
    run_inj("whole")
    assert inj_numbers() == inj_numbers("whole")


def test_full_tmpfs_for_real(tmp_path: Path) -> None:
    """A file system of 64 KiB in a namespace of its own: half a file is never left."""
    script = """
import pathlib, sys
from tl_localize import NeuronScores
from tl_localize.execution import Record, Store, Task
import torch
store = Store(pathlib.Path(sys.argv[1]))
done = 0
try:
    for i in range(100):
        store.write(Task("scores", {"i": i}), Record(NeuronScores(torch.ones(50, 20))))
        done += 1
except OSError as error:
    assert "folder must have room" in str(error), error
assert 3 < done < 100, done
assert list(pathlib.Path(sys.argv[1], "tmp").iterdir()) == []
again = Store(pathlib.Path(sys.argv[1]))
assert sum(again.read(Task("scores", {"i": i})) is not None for i in range(100)) == done
print("ok", done)
"""
    mount = f'mount -t tmpfs -o size=64k none {tmp_path} && "$0" -c "$1" {tmp_path}'
    probe = (
        subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
        if sys.platform == "linux"
        else None
    )
    if probe is None or probe.returncode:
        pytest.skip("mount namespaces are not allowed here")
    command = ["unshare", "-rm", "bash", "-c", mount, sys.executable, script]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ok")


# ---- read-only


def test_read_only_folder_can_be_read_and_is_not_changed(
    run_inj: Any, tmp_path: Path, caplog: Any
) -> None:
    run_inj()
    spoil(records(tmp_path / "run", "inj")[0], "empty")
    (tmp_path / "run" / "failures" / "x.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    store = Store(tmp_path / "run", read_only=True)
    assert status(store).frame["missing"].sum() == 1
    assert len(InjResults.of(store).missing) == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert "is not read: it is empty" in caplog.text
    with pytest.raises(ValueError, match=r"folder must be open for writing, got .* as read-only"):
        store.write(TASK, Record({}))


def test_read_only_store_rejects_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder must hold the results of a run"):
        Store(tmp_path / "nothing", read_only=True)


# ---- plans


def test_plans_stand_in_the_order_in_which_they_were_last_asked_for(tmp_path: Path) -> None:
    first, second, third = plan_of(0.1, "a"), plan_of(0.1, "a", "b"), plan_of(0.1, "c")
    for plan in (first, first, second, third, first, second, first, second, second):
        Store(tmp_path).add_plan(plan, {"host": "h"})
    plans = Store(tmp_path).plans()
    assert [len(one.plan.tasks) for one in plans] == [1, 2, 1, 1, 2]
    assert [list(one.plan.methods) for one in plans] == [
        ["a"],
        ["a", "b"],
        ["c"],
        ["a"],
        ["a", "b"],
    ]
    assert plans[0].environment == {"host": "h"}


def test_of_contradicting_plans_that_are_written_at_one_moment_one_stays(tmp_path: Path) -> None:
    """Twenty rounds of four threads that pass the check together."""
    for i in range(20):
        start = threading.Barrier(4)
        refused: list[str] = []

        def add(
            rate: float,
            folder: Path = tmp_path / str(i),
            start: Any = start,
            refused: list[str] = refused,
        ) -> None:
            store = Store(folder)
            plan = plan_of(rate)
            start.wait()
            try:
                store.add_plan(plan, {})
            except ValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=add, args=(rate,)) for rate in (0.1, 0.2, 0.3, 0.3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (kept,) = Store(tmp_path / str(i)).plans()
        assert len(refused) == (2 if kept.plan.settings["rate"] == 0.3 else 3)
        assert "settings must agree with those of" in refused[0]


def test_plan_that_was_written_between_check_and_writing_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, other = Store._write, Store(tmp_path)

    def overtaken(self: Store, *arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(Store, "_write", right)
        other.add_plan(plan_of(0.2), {})
        right(self, *arguments, **options)

    monkeypatch.setattr(Store, "_write", overtaken)
    with pytest.raises(ValueError, match=r"rate: 0.2 in the folder, 0.1 now"):
        Store(tmp_path).add_plan(plan_of(0.1), {})
    assert [one.plan.settings for one in Store(tmp_path).plans()] == [{"rate": 0.2}]


@pytest.mark.parametrize("change", ["environment", "plan", "sha256"])
def test_changed_plan_is_set_aside(tmp_path: Path, change: str, caplog: Any) -> None:
    Store(tmp_path).add_plan(plan_of(0.1), {})
    (path,) = (tmp_path / "plans").iterdir()
    head, plan = map(json.loads, path.read_text().splitlines())
    body = {**head, "plan": plan}
    body[change] = {"environment": {"x": 1}, "plan": {**plan, "settings": {}}, "sha256": "0"}[
        change
    ]
    plan = body.pop("plan")
    path.write_text(f"{json.dumps(body)}\n{json.dumps(plan)}")
    assert Store(tmp_path).plans() == []
    assert "plans/0001.json was set aside" in caplog.text
    Store(tmp_path).add_plan(plan_of(0.1), {})
    assert len(Store(tmp_path).plans()) == 1


def test_names_that_are_no_file_names_are_kept(run_inj: Any, inj: Any, tmp_path: Path) -> None:
    sequences = [
        replace(sequence, id=f"s{i}/../\0\n\u2028\U0010ffff")
        for i, sequence in enumerate(inj.sequences[:2])
    ]
    assert not [outcome for outcome in run_inj(sequences=sequences) if outcome.reason]
    assert run_inj(sequences=sequences) == []
    assert set(InjResults.of(Store(tmp_path / "run")).frame["sequence_id"]) == {
        sequence.id for sequence in sequences
    }
    assert len(status(Store(tmp_path / "run")).frame) == 4 + 2


def test_names_with_half_characters_are_refused_before_the_work(
    run_inj: Any, run_del: Any, inj: Any, deletion: Any, tmp_path: Path
) -> None:
    for run, benchmark in ((run_inj, inj), (run_del, deletion)):
        sequences = [*benchmark.sequences[:-1], replace(benchmark.sequences[-1], id="s\udc80")]
        with pytest.raises(
            ValueError, match=r"names must be text that can be written as UTF-8, got 's\\udc80'"
        ):
            run(sequences=sequences)
    assert not records(tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"{}", b"[" * 100_000, b"\xff"])
@pytest.mark.parametrize("read_only", [True, False])
def test_damaged_marker_is_named_with_its_remedy(
    tmp_path: Path, content: bytes, read_only: bool
) -> None:
    Store(tmp_path)
    (tmp_path / "tl-localize.json").write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"folder must hold a whole tl-localize.json, got .* without. Write",
    ):
        Store(tmp_path, read_only)


def test_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    Store(tmp_path)
    (tmp_path / "tl-localize.json").write_text('{"format": 1}')
    with pytest.raises(
        ValueError, match=r"folder must be of format \d, got 1 in .*Another version wrote it"
    ):
        Store(tmp_path)
