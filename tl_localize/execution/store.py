"""Results on disk: a folder in which each record is one immutable file, named by the hash of
everything its numbers depend on.

    records/KIND/KEY.safetensors    a record: an injection, scores, a measurement
    plans/NUMBER.json               what runs were asked for, in their order: settings, parts, methods, tasks
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from tl_localize.execution.tasks import FORMAT, Plan, Record, Task, canonical, digest_of
from tl_localize.files import TEMPORARY, prepare_folder, remove_abandoned, write_whole

LOG = logging.getLogger(__name__)
MARKER = "tl-localize.json"  # of a results folder: its format
Content = TypeVar("Content")


@dataclass(frozen=True, eq=False)
class StoredPlan:
    """A plan, and what it came from.

    Args:
        about: ``environment``, and ``command`` (name and options of the command line, empty from
            Python).
        number: of its file.
        digest: of the plan.
    """

    plan: Plan
    about: dict[str, Any]
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
        self.kept.append(StoredPlan(plan, {"environment": environment, "command": {}}))
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
        command: name and options of the command line that fills it, for ``tl-localize trace``.

    Raises:
        ValueError: the folder can't be written; with ``read_only``, it is not a results folder.

    >>> task = Task("scores", {"sequence": "s0", "method": "Activations()"})
    >>> Store(folder).write(task, Record({"scores": [0.5, 0.25]}))
    >>> Store(folder).has(task), Store(folder).read(task).value
    (True, {'scores': [0.5, 0.25]})
    """

    folder: Path
    read_only: bool = False
    command: Mapping[str, Any] = field(default_factory=dict)
    # those without tensors that were read or written
    records: dict[str, Record] = field(default_factory=dict, init=False, repr=False)
    # plans by their files
    known: dict[tuple[Any, ...], StoredPlan] = field(default_factory=dict, init=False, repr=False)
    # plans by their digest
    parsed: dict[str, Plan] = field(default_factory=dict, init=False, repr=False)

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
            found = json.loads((self.folder / MARKER).read_bytes())["format"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"folder must hold a whole {MARKER}, got {str(self.folder)!r} without. Write "
                f"{json.dumps({'format': FORMAT})} into it, if "
                "this version made the folder."
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
        return task.key in self.records or os.path.exists(f"{self.folder}/{task.file}")

    def read(self, task: Task) -> Record | None:
        """The record of a task; None if there is none, also where a damaged file was in its place,
        which is now set aside.
        """
        if task.key in self.records:
            return self.records[task.key]
        try:
            with open(f"{self.folder}/{task.file}", "rb", buffering=0) as file:
                data = file.read()
        except FileNotFoundError:
            return None
        try:
            body, tensors = unpack(data)
            if body["key"] != task.key:
                raise Damaged("it belongs to another task")
        except Damaged as error:
            self.set_aside(self.folder / task.file, str(error))
            return None
        record = Record(body["value"], tensors, body["about"])
        if not tensors:
            self.records[task.key] = record
        return record

    def seconds(self, task: Task) -> float | None:
        """What the task took, from the head of its file; None if there is no record."""
        if task.key in self.records:
            return self.records[task.key].about["seconds"]
        try:
            with open(f"{self.folder}/{task.file}", "rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            return json.loads(header["__metadata__"]["record"])["about"]["seconds"]
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            MemoryError,
            RecursionError,
        ):
            return None

    def write(self, task: Task, record: Record) -> None:
        """Write the record of a task, and forget that it ever failed.

        Raises:
            OSError: there is no room, or the folder can't be written; what is done is kept.
        """
        body = {
            "key": task.key,
            "kind": task.kind,
            "inputs": task.inputs,
            "value": record.value,
            "about": record.about,
        }
        self._write(self.folder / task.file, pack(body, record.tensors))
        if not record.tensors:
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

        def read(path: Path) -> tuple[str, dict[str, Any]]:
            value = json.loads(path.read_bytes())
            if value.get("key") != path.stem or not {"task", "reason"} <= value.keys():
                raise Damaged("it says of no task why it failed")
            return path.stem, value

        return dict(self._each("failures", read))

    # Plans

    def add_plan(self, plan: Plan, environment: dict[str, Any]) -> None:
        """Remember what a run was asked for, as the last plan. Of two runs that start at a time,
        the later one sees the other's plan.

        Raises:
            ValueError: it contradicts a plan that is there.
        """
        text, about = (
            json.dumps(plan.packed(), default=str),
            {"environment": environment, "command": self.command},
        )
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.parsed[digest] = plan
        while True:
            plans = self.plans()
            for other in plans:
                if wrong := plan.contradictions(other.plan):
                    raise ValueError(
                        f"settings must agree with those of {str(self.folder)!r}, got\n  "
                        + "\n  ".join(wrong[:5])
                        + "\n"
                        f"Give the same settings, to which {plan.grows} may be added, or another "
                        "folder with --out."
                    )
            if plans and plans[-1].digest == digest:
                return
            number = 1 + (plans[-1].number if plans else 0)
            head = json.dumps({"sha256": digest_of([digest, about]), "about": about}, default=str)
            try:
                self._write(
                    self.folder / "plans" / f"{number:04d}.json",
                    f"{head}\n{text}".encode(),
                    new=True,
                )
            except FileExistsError:
                continue
            # the first says where it stands in tables
            for older in [one for one in plans if one.digest == digest][1:]:
                (self.folder / "plans" / f"{older.number:04d}.json").unlink(missing_ok=True)
            return

    def plans(self) -> list[StoredPlan]:
        return sorted(self._each("plans", self._plan), key=lambda one: one.number)

    def _plan(self, path: Path) -> StoredPlan:
        status = path.stat()
        file = (path.name, status.st_ino, status.st_mtime_ns, status.st_size)
        if file not in self.known:
            head, _, text = path.read_bytes().partition(b"\n")
            body, digest = json.loads(head), hashlib.sha256(text).hexdigest()
            if digest_of([digest, body["about"]]) != body["sha256"]:
                raise Damaged("its content is not what its checksum says")
            plan = self.parsed[digest] = self.parsed.get(digest) or Plan.unpacked(json.loads(text))
            self.known[file] = StoredPlan(plan, body["about"], int(path.stem), digest)
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
            except (
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                IndexError,
                RecursionError,
                IsADirectoryError,
            ) as error:
                self.set_aside(
                    path, str(error) if isinstance(error, Damaged) else "it is not whole"
                )
        return found

    def _write(self, path: Path, data: bytes, *, new: bool = False) -> None:
        if self.read_only:
            raise ValueError(
                f"folder must be open for writing, got {str(self.folder)!r} as read-only."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(
            path, data, None if path.parent == self.folder else self.folder / "tmp", new=new
        )

    def set_aside(self, path: Path, why: str) -> None:
        """Move a damaged file out of the way, and say so."""
        name = f"{path.name}.{secrets.token_hex(4)}"
        if not self.read_only:
            try:
                os.replace(path, self.folder / "set_aside" / name)
            except FileNotFoundError:  # another run was faster
                return
        where = (
            "is not read"
            if self.read_only
            else f"was set aside as set_aside/{name}, and is made again if it is needed"
        )
        LOG.error("%s %s: %s.", path.relative_to(self.folder), where, why)


def pack(body: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """The bytes of a safetensors file that holds JSON and tensors, sealed by a checksum of both."""
    # in ASCII: a file name on a disk may hold half a character
    text = json.dumps(body, default=str)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    seal = _seal(text, *_split(safetensors.torch.save(whole)))
    return safetensors.torch.save(whole, {"record": text, "sha256": seal})


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """JSON and tensors from the bytes of a file.

    Raises:
        Damaged: it is not a file that ``pack`` made, to the last bit.
    """
    try:
        header, numbers = _split(data)
        metadata = header.pop("__metadata__")
        if metadata["sha256"] != _seal(metadata["record"], header, numbers):
            raise Damaged("its checksum is wrong")
        return json.loads(metadata["record"]), safetensors.torch.load(data) if header else {}
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
        safetensors.SafetensorError,
    ) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged("it is not whole" if data else "it is empty") from error


def _split(data: bytes) -> tuple[dict[str, Any], memoryview]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), memoryview(data)[end:]


def _seal(text: str, header: dict[str, Any], numbers: memoryview) -> str:
    digest = hashlib.sha256(canonical([text, header]).encode(errors="surrogatepass"))
    digest.update(numbers)
    return digest.hexdigest()
