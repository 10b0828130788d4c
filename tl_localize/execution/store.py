"""Results on disk: a folder in which each record is one immutable file, named by the hash of
everything its numbers depend on.

    records/KIND/KEY.safetensors    a record: an injection, scores, a measurement
    plans/NUMBER.json               what runs were asked for, in their order: settings and tasks
    failures/KEY.json               why a task could not be computed
    tl-localize.json                marks the folder as ours, with the format of its files
    set_aside/                      files that were damaged; they are never read again

The folder is its own index: a task whose file is there is done, and two runs that compute the same
task write the same file. Nothing is locked, and nothing is changed after it is written.
"""

import hashlib
import json
import logging
import os
import secrets
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import safetensors.torch
from torch import Tensor

from tl_localize.execution.environment import conflicts
from tl_localize.execution.tasks import (
    FORMAT,
    Json,
    Plan,
    Record,
    Task,
    closure,
    digest_of,
    hash_tensors,
    tasks_of,
)
from tl_localize.files import (
    TEMPORARY,
    Saved,
    from_json,
    prepare_folder,
    to_json,
    write_json,
    write_whole,
)

LOG = logging.getLogger(__name__)
MARKER = "tl-localize.json"  # of a results folder: its format
# what reading a damaged file raises
DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    safetensors.SafetensorError,
)
Tensors = dict[str, Tensor]
COUNTS = ("planned", "done", "failed", "missing", "not_converged")


@dataclass(frozen=True, eq=False)
class StoredPlan:
    """A plan, and what it was made with.

    Args:
        number: of its file.
        digest: of the plan.
    """

    plan: Plan
    environment: Json
    number: int = 0
    digest: str = ""


class Cache:
    """Plans and records in memory: what a run without a store uses. It keeps only the records that
    make tables.

    >>> Cache().read(Task("scores", {"sequence": "s0"})) is None
    True
    """

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.kept: list[StoredPlan] = []
        self.wanted: set[str] = set()  # keys of the tasks whose records make tables

    def plans(self) -> list[StoredPlan]:
        """In the order in which they were made."""
        return self.kept

    def add_plan(self, plan: Plan, environment: Json) -> None:
        """Remember what a run was asked for; ValueError where it contradicts an earlier plan."""
        check_agreement(plan, environment, self.kept, "memory")
        self.kept.append(StoredPlan(plan, environment))
        self.wanted.update(task.key for task in plan.tasks)

    def has(self, task: Task) -> bool:
        return task.key in self.records

    def read(self, task: Task) -> Record | None:
        """The record of a task; None if there is none."""
        return self.records.get(task.key)

    def write(self, task: Task, record: Record) -> None:
        if task.key in self.wanted:
            self.records[task.key] = record

    def failures(self) -> dict[str, Json]:
        """What failed, by the key of its task. In memory nothing does: the error is raised."""
        return {}

    def fail(self, task: Task, error: BaseException) -> str:
        """Record why a task could not be computed; returns the reason. In memory the error is
        raised instead.
        """
        raise error


class Damaged(ValueError):
    """A file whose content is not what its name and its checksum say."""


class Store(Cache):
    """A results folder. Many runs, on many machines, may write to one folder at a time.

    Args:
        folder: made if it is not there, unless ``read_only``.
        read_only: nothing is written, and damaged files are named and left where they are.

    Raises:
        ValueError: the folder can't be written; with ``read_only``, it is not a results folder.

    >>> task = Task("scores", {"sequence": "s0", "method": "activations"})
    >>> Store(folder).write(task, Record({"scores": [0.5, 0.25]}))
    >>> Store(folder).has(task), Store(folder).read(task).value
    (True, {'scores': [0.5, 0.25]})
    """

    def __init__(self, folder: str | Path, read_only: bool = False) -> None:
        super().__init__()  # records here are those without tensors that were read or written
        self.folder, self.read_only = Path(folder), read_only
        if not read_only:
            self._prepare()
        self._check_format()

    def _check_format(self) -> None:
        """Raise ValueError unless this version wrote the folder."""
        rule = f"folder must hold the results of a run in format {FORMAT}"
        if not os.path.lexists(self.folder / MARKER) and not (self.folder / "plans").is_dir():
            found = "no such folder" if not self.folder.is_dir() else "other files or none"
            raise ValueError(
                f"{rule}, got {found} at {str(self.folder)!r}. Name a folder that a command such "
                "as tl-localize inj has written."
            )
        try:
            found = f"format {json.loads(content_of(self.folder / MARKER))['format']}"
        except (OSError, *DAMAGE):
            found = f"no whole {MARKER}"
        if found != f"format {FORMAT}":
            raise ValueError(
                f"{rule}, got {found} in {str(self.folder)!r}. Use the version that wrote the "
                f"folder, or write {json.dumps({'format': FORMAT})} into {MARKER} if this version "
                "did."
            )

    def _prepare(self) -> None:
        """Make the folder, where it is not there."""
        prepare_folder(self.folder)
        marker = self.folder / MARKER
        if not os.path.lexists(marker):
            others = [path for path in self.folder.iterdir() if not TEMPORARY.fullmatch(path.name)]
            if others and not marker.exists():  # another run may just have written it
                raise ValueError(
                    f"folder must be new, empty or a results folder, got {str(self.folder)!r} with "
                    "other files. Choose another."
                )
            write_json(marker, {"format": FORMAT})
        for name in ("plans", "failures", "set_aside", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)

    # Records

    def has(self, task: Task) -> bool:
        """Whether there is a record; ``read`` says whether it can be trusted."""
        # no Path: for 100,000 records that is a second
        return task.key in self.records or os.path.lexists(f"{self.folder}/{task.file}")

    def read(self, task: Task) -> Record | None:
        """The record of a task; None if there is none, also where a damaged file was in its place,
        which is now set aside.
        """
        if task.key in self.records:
            return self.records[task.key]
        record = self._load(Path(f"{self.folder}/{task.file}"), partial(_record, task.key))
        if record and not isinstance(record.value, Saved):
            self.records[task.key] = record
        return record

    def write(self, task: Task, record: Record) -> None:
        """Write the record of a task, and forget that it ever failed.

        Raises:
            OSError: there is no room, or the folder can't be written; what is done is kept.
        """
        body = {"key": task.key, "kind": task.kind, "inputs": task.inputs, "about": record.about}
        self._write(task.file, pack({**body, "value": record.value}))
        if not isinstance(record.value, Saved):
            self.records[task.key] = record
        (self.folder / "failures" / f"{task.key}.json").unlink(missing_ok=True)

    # Failures

    def fail(self, task: Task, error: BaseException) -> str:
        reason = f"{type(error).__name__}: {error}"
        value = {"key": task.key, "task": task.file, "reason": reason}
        value["traceback"] = "".join(traceback.format_exception(error))
        text = json.dumps(value, indent=1, ensure_ascii=False)
        self._write(f"failures/{task.key}.json", text.encode(errors="replace"))
        return reason

    def failures(self) -> dict[str, Json]:
        """What failed, by the key of its task: task (its file), reason, traceback."""
        return {
            failure["key"]: failure
            for failure in self._each("failures", _failure)
            # another run may have computed it meanwhile
            if not os.path.lexists(self.folder / failure["task"])
        }

    # Plans

    def add_plan(self, plan: Plan, environment: Json) -> None:
        """Remember what a run was asked for, as the last plan. Of two runs that start at a time,
        the later one sees the other's plan.

        Raises:
            ValueError: it contradicts a plan that is there.
        """
        body = {"plan": plan.to_json(), "environment": environment}
        digest = digest_of(body["plan"])
        text = json.dumps({**body, "sha256": digest_of([digest, environment])}, default=str)
        while True:
            plans = self.plans()
            check_agreement(plan, environment, plans, str(self.folder))
            if plans and plans[-1].digest == digest:
                return
            number = plans[-1].number + 1 if plans else 1
            with suppress(FileExistsError):
                self._write(f"plans/{number:06d}.json", text.encode(), new=True)
                return

    def plans(self) -> list[StoredPlan]:
        return self._each("plans", lambda path: _plan(path, path.lstat().st_mtime_ns))

    # Files

    def _load(self, path: Path, parse: Callable[[Path], Any]) -> Any:
        """What a file holds. None where there is none (also where another run has just replaced
        it), or where it was damaged; then it is moved out of the way.
        """
        try:
            return parse(path)
        except FileNotFoundError:
            return None
        except DAMAGE as error:
            why = str(error) if isinstance(error, Damaged) else "it is not whole"
        where = "is not read"
        if not self.read_only:
            name = f"set_aside/{path.name}.{secrets.token_hex(4)}"
            where = f"was set aside as {name}, and is made again if it is needed"
            with suppress(FileNotFoundError):  # another run was faster
                os.replace(path, self.folder / name)
        LOG.error("%s %s: %s.", path.relative_to(self.folder), where, why)
        return None

    def _each(self, name: str, parse: Callable[[Path], Any]) -> list[Any]:
        """What the files of a subfolder hold, in the order of their names."""
        paths = sorted((self.folder / name).glob("[!.]*"))
        return [one for one in (self._load(path, parse) for path in paths) if one]

    def _write(self, name: str, data: bytes, *, new: bool = False) -> None:
        if self.read_only:
            raise ValueError(
                f"folder must be open for writing, got {str(self.folder)!r} as read-only."
            )
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, self.folder / "tmp", new=new)


def check_agreement(
    plan: Plan, environment: Json, others: Sequence[StoredPlan], where: str
) -> None:
    """Raise ValueError where a plan or what it is computed with contradicts an earlier one."""
    for other in others:
        wrong = plan.contradictions(other.plan) or conflicts(environment, other.environment)
        if wrong:
            raise ValueError(
                f"settings must agree with those of {where!r}, got\n  "
                + "\n  ".join(wrong[:5])
                + f"\nGive the same settings, to which {plan.grows} may be added, or another "
                "folder with --out."
            )


def _record(key: str, path: Path) -> Record:
    body = unpack(content_of(path))
    if body["key"] != key:
        raise Damaged("it belongs to another task")
    return Record(body["value"], body["about"])


@lru_cache
def _plan(path: Path, written: int) -> StoredPlan:
    body = json.loads(content_of(path))
    digest, environment = digest_of(body["plan"]), body["environment"]
    if digest_of([digest, environment]) != body["sha256"]:
        raise Damaged("its content is not what its checksum says")
    return StoredPlan(Plan.from_json(body["plan"]), environment, int(path.stem), digest)


def _failure(path: Path) -> Json:
    value = json.loads(content_of(path))
    texts = value["task"], value["reason"]
    if value["key"] != path.stem or not all(isinstance(text, str) and text for text in texts):
        raise Damaged("it says of no task why it failed")
    return value


def content_of(path: Path) -> bytes:
    """The bytes of a file; FileNotFoundError where nothing is there, Damaged where something else
    is, such as a folder, a pipe, or a link that leads nowhere.
    """
    if os.path.lexists(path) and not path.is_file():
        raise Damaged("it is no file")
    return path.read_bytes()


def pack(body: Json) -> bytes:
    """The bytes of a safetensors file that holds JSON and its tensors, sealed by a checksum of
    both.
    """
    tensors: Tensors = {}
    # in ASCII: a file name on a disk may hold half a character
    text = to_json(body, tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(whole, {"record": text, "sha256": _seal(text, whole)})


def unpack(data: bytes) -> Json:
    """What ``pack`` was given, from the bytes of a file; raises one of ``DAMAGE`` unless ``pack``
    made it, to the last bit.
    """
    tensors = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    if header["sha256"] != _seal(header["record"], tensors):
        raise Damaged("its checksum is wrong")
    return from_json(header["record"], tensors)


def _seal(text: str, tensors: Tensors) -> str:
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    hash_tensors(digest, tensors)
    return digest.hexdigest()


# How far a folder is


@dataclass(frozen=True)
class Status:
    """How far a folder is.

    Args:
        frame: one row per label: counts of tasks (planned, done, failed, missing,
            not_converged). Rows of what measurements need, such as injections, come last.
        reasons: what failed and why, by the task's file.

    >>> counts = {"planned": [3], "done": [3], "failed": [0], "missing": [0], "not_converged": [1]}
    >>> frame = pd.DataFrame(counts)
    >>> Status(frame, {}).clean
    False
    """

    frame: pd.DataFrame
    reasons: dict[str, str]

    @property
    def clean(self) -> bool:
        """Nothing failed: no task, and no injection that did not converge."""
        return not (self.reasons or self.frame[["failed", "not_converged"]].to_numpy().any())


def planned(store: Store) -> list[Task]:
    """The tasks whose records make the tables of a folder, in the order of tables.

    Of a collection the last plan alone counts: data that have grown or changed make another one.

    Raises:
        ValueError: the folder holds no plan.
    """
    plans = [one.plan for one in store.plans()]
    if not plans:
        raise ValueError(
            f"folder must hold the plan of a run, got none in {str(store.folder)!r}. Give the "
            "run's own command again."
        )
    return tasks_of(plans[-1:] if plans[-1].benchmark == "collect" else plans)


def status(store: Store) -> Status:
    """Counts, and the reasons of failures.

    >>> benchmark = InjBenchmark(model=model, sequences=few[:1], ratio=0.02, max_steps=2)
    >>> _ = benchmark.run([Activations()], Store(folder))
    >>> status(Store(folder)).frame.loc["activations", ["planned", "done"]].tolist()
    [1, 1]
    """
    tasks, failures = planned(store), store.failures()
    counted: list[tuple[str, Task, Any]] = []
    for task in tasks:
        counted.append((task.label, task, store.read(task)))
    known = {task.key for task in tasks}
    for need in closure((need for task in tasks for need in task.needs), known):
        counted.append((f"({need.kind})", need, store.has(need)))
    rows: dict[str, dict[str, int]] = {}
    for label, task, found in counted:
        row = rows.setdefault(label, dict.fromkeys(COUNTS, 0))
        row["planned"] += 1
        row["done" if found else "failed" if blocked(task, failures) else "missing"] += 1
        value = getattr(found, "value", None)
        row["not_converged"] += isinstance(value, dict) and value.get("converged") is False
    reasons = {one["task"]: one["reason"] for key, one in failures.items() if key in known}
    return Status(pd.DataFrame.from_dict(rows, orient="index"), reasons)


def blocked(task: Task, failed: Collection[str]) -> bool:
    """Whether a failure is in the way: of the task, or of one that it needs."""
    return bool(failed) and any(one.key in failed for one in closure([task]))


def reason_of(task: Task, failures: dict[str, Json]) -> str:
    """Why a task has no record."""
    return next(
        (failures[one.key]["reason"] for one in closure([task]) if one.key in failures),
        "not done yet",
    )
