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

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from tl_localize.execution.environment import conflicts
from tl_localize.execution.tasks import FORMAT, Plan, Record, Task, digest_of, hash_tensors
from tl_localize.files import TEMPORARY, Saved, prepare_folder, remove_abandoned, write_whole

LOG = logging.getLogger(__name__)
MARKER = "tl-localize.json"  # of a results folder: its format
# what reading a damaged file raises
DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    safetensors.SafetensorError,
)
Content = TypeVar("Content")


@dataclass(frozen=True, eq=False)
class StoredPlan:
    """A plan, and what it was made with.

    Args:
        number: of its file.
        digest: of the plan.
    """

    plan: Plan
    environment: dict[str, Any]
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

    def add_plan(self, plan: Plan, environment: dict[str, Any]) -> None:
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

    def failures(self) -> dict[str, dict[str, Any]]:
        """What failed, by the key of its task. In memory nothing does: the error is raised."""
        return {}

    def fail(self, task: Task, error: BaseException) -> str:
        """Record why a task could not be computed; returns the reason. In memory the error is
        raised instead.
        """
        raise error


class Damaged(ValueError):
    """A file whose content is not what its name and its checksum say."""


@dataclass(frozen=True, eq=False)
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

    folder: Path
    read_only: bool = False
    # those without tensors that were read or written
    records: dict[str, Record] = field(default_factory=dict, init=False, repr=False)
    # plans by name and time of their files
    known: dict[tuple[str, int], StoredPlan] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if not self.read_only:
            self._prepare()
        elif not (self.folder / "plans").is_dir():
            raise ValueError(
                f"folder must hold the results of a run, got {str(self.folder)!r} without plans. "
                "Check the path."
            )
        try:
            found = json.loads(content_of(self.folder / MARKER))["format"]
        except (OSError, *DAMAGE) as error:
            raise ValueError(
                f"folder must hold a whole {MARKER}, got {str(self.folder)!r} without. Write "
                f"{json.dumps({'format': FORMAT})} into it, if this version made the folder."
            ) from error
        if found != FORMAT:
            raise ValueError(
                f"folder must be of format {FORMAT}, got {found} in {str(self.folder)!r}. Another "
                "version wrote it: use that one."
            )

    def _prepare(self) -> None:
        """Make the folder, where it is not there."""
        prepare_folder(self.folder)
        marker = self.folder / MARKER
        if not marker.exists():
            others = [path for path in self.folder.iterdir() if not TEMPORARY.fullmatch(path.name)]
            if others and not marker.exists():  # another run may just have written it
                raise ValueError(
                    f"folder must be new, empty or a results folder, got {str(self.folder)!r} with "
                    "other files. Choose another."
                )
            self._write(marker, json.dumps({"format": FORMAT}).encode())
        for name in ("plans", "failures", "set_aside", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        for folder in (self.folder, self.folder / "tmp"):
            remove_abandoned(folder)

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
        try:
            body, tensors = unpack(content_of(f"{self.folder}/{task.file}"))
            if body["key"] != task.key:
                raise Damaged("it belongs to another task")
            record = Record(_value(body, tensors), body["about"])
        except FileNotFoundError:
            return None
        except DAMAGE as error:
            self.set_aside(self.folder / task.file, error)
            return None
        if not tensors:
            self.records[task.key] = record
        return record

    def seconds(self, task: Task) -> float | None:
        """What the task took, from the head of its file; None if there is no record."""
        if task.key in self.records:
            return self.records[task.key].about["seconds"]
        if not os.path.isfile(f"{self.folder}/{task.file}"):
            return None
        try:
            with safetensors.safe_open(f"{self.folder}/{task.file}", framework="pt") as file:
                return json.loads(file.metadata()["record"])["about"]["seconds"]
        except (OSError, *DAMAGE):
            return None

    def write(self, task: Task, record: Record) -> None:
        """Write the record of a task, and forget that it ever failed.

        Raises:
            OSError: there is no room, or the folder can't be written; what is done is kept.
        """
        tensors: dict[str, Tensor] = {}
        value = record.value
        body = {"key": task.key, "kind": task.kind, "inputs": task.inputs, "about": record.about}
        if isinstance(value, Saved):
            body["class"] = type(value).__name__
            tensors, value = value.packed()
        self._write(self.folder / task.file, pack({**body, "value": value}, tensors))
        if not tensors:
            self.records[task.key] = record
        (self.folder / "failures" / f"{task.key}.json").unlink(missing_ok=True)

    # Failures

    def fail(self, task: Task, error: BaseException) -> str:
        reason = f"{type(error).__name__}: {error}"
        value = {"key": task.key, "task": task.file, "reason": reason, "host": socket.gethostname()}
        value["traceback"] = "".join(traceback.format_exception(error))
        self._write(
            self.folder / "failures" / f"{task.key}.json",
            json.dumps(value, indent=1, ensure_ascii=False).encode(errors="replace"),
        )
        return reason

    def failures(self) -> dict[str, dict[str, Any]]:
        """What failed, by the key of its task: task (its file), reason, traceback."""
        found: dict[str, dict[str, Any]] = {}
        for failure in self._each("failures", _failure):
            # another run may have computed it meanwhile
            if not os.path.lexists(self.folder / failure["task"]):
                found[failure["key"]] = failure
        return found

    # Plans

    def add_plan(self, plan: Plan, environment: dict[str, Any]) -> None:
        """Remember what a run was asked for, as the last plan. Of two runs that start at a time,
        the later one sees the other's plan.

        Raises:
            ValueError: it contradicts a plan that is there.
        """
        text = json.dumps(plan.to_json(), default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        head = json.dumps(
            {"sha256": digest_of([digest, environment]), "environment": environment}, default=str
        )
        while True:
            plans = self.plans()
            check_agreement(plan, environment, plans, str(self.folder))
            if plans and plans[-1].digest == digest:
                return
            number = 1 + (plans[-1].number if plans else 0)
            path = self.folder / "plans" / f"{number:04d}.json"
            try:
                self._write(path, f"{head}\n{text}".encode(), new=True)
            except FileExistsError:
                continue
            # the first says where it stands in tables
            for older in [one for one in plans if one.digest == digest][1:]:
                path.with_name(f"{older.number:04d}.json").unlink(missing_ok=True)
            return

    def plans(self) -> list[StoredPlan]:
        return sorted(self._each("plans", self._plan), key=lambda one: one.number)

    def _plan(self, path: Path) -> StoredPlan:
        file = (path.name, path.lstat().st_mtime_ns)
        if file not in self.known:
            head, _, text = content_of(path).partition(b"\n")
            body, digest = json.loads(head), hashlib.sha256(text).hexdigest()
            if digest_of([digest, body["environment"]]) != body["sha256"]:
                raise Damaged("its content is not what its checksum says")
            plan = Plan.from_json(json.loads(text))
            self.known[file] = StoredPlan(plan, body["environment"], int(path.stem), digest)
        return self.known[file]

    # Files

    def _each(self, name: str, read: Callable[[Path], Content]) -> list[Content]:
        """What the files of a subfolder hold; damaged ones are set aside."""
        found: list[Content] = []
        for path in sorted((self.folder / name).glob("[!.]*")):
            try:
                found.append(read(path))
            # another run has just put a newer plan in its place, or computed the task that failed
            except FileNotFoundError:
                continue
            except DAMAGE as error:
                self.set_aside(path, error)
        return found

    def _write(self, path: Path, data: bytes, *, new: bool = False) -> None:
        if self.read_only:
            raise ValueError(
                f"folder must be open for writing, got {str(self.folder)!r} as read-only."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = None if path.parent == self.folder else self.folder / "tmp"
        write_whole(path, data, temporary, new=new)

    def set_aside(self, path: Path, error: Exception) -> None:
        """Move a damaged file out of the way, and say so."""
        why = str(error) if isinstance(error, Damaged) else "it is not whole"
        name = f"{path.name}.{secrets.token_hex(4)}"
        where = "is not read"
        if not self.read_only:
            try:
                os.replace(path, self.folder / "set_aside" / name)
            except FileNotFoundError:  # another run was faster
                return
            where = f"was set aside as set_aside/{name}, and is made again if it is needed"
        LOG.error("%s %s: %s.", path.relative_to(self.folder), where, why)


def check_agreement(
    plan: Plan, environment: dict[str, Any], others: Sequence[StoredPlan], where: str
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


def _value(body: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """What a record holds, from its file."""
    if "class" not in body:
        return body["value"]
    kinds = {kind.__name__: kind for kind in Saved.__subclasses__()}
    return kinds[body["class"]].unpacked(tensors, body["value"])


def _failure(path: Path) -> dict[str, Any]:
    value = json.loads(content_of(path))
    texts = [value[name] for name in ("key", "task", "reason")]
    if value["key"] != path.stem or not all(isinstance(text, str) and text for text in texts):
        raise Damaged("it says of no task why it failed")
    return value


def content_of(path: str | Path) -> bytes:
    """The bytes of a file; FileNotFoundError where nothing is there, Damaged where something else
    is, such as a folder, a pipe, or a link that leads nowhere.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(path)
    if not os.path.isfile(path):
        raise Damaged("it is no file")
    with open(path, "rb", buffering=0) as file:
        return file.read()


def pack(body: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """The bytes of a safetensors file that holds JSON and tensors, sealed by a checksum of both."""
    # in ASCII: a file name on a disk may hold half a character
    text = json.dumps(body, default=str)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(whole, {"record": text, "sha256": _seal(text, whole)})


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """JSON and tensors from the bytes of a file.

    Raises:
        Damaged: it is not a file that ``pack`` made, to the last bit.
    """
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        text, seal = header["__metadata__"]["record"], header["__metadata__"]["sha256"]
        if seal != _seal(text, tensors):
            raise Damaged("its checksum is wrong")
        return json.loads(text), tensors
    except Damaged:
        raise
    except DAMAGE as error:
        raise Damaged("it is not whole" if data else "it is empty") from error


def _seal(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    hash_tensors(digest, tensors)
    return digest.hexdigest()
