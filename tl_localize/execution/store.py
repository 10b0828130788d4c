"""Results on disk: a folder in which each finished unit of work is one immutable file, and what it was made with.

    units/KIND/KEY.json or KEY.safetensors     a unit: an injection, the scores of one sequence, a measurement
    plans/KEY.json                             what a run was asked for: settings, sequences, methods
    failures/KEY.json                          why a unit could not be made
    set_aside/                                 files that were damaged or not ours, never read again

A unit's name is the hash of everything its numbers depend on, so that the folder is its own index, a unit that is there is done, and two
runs that make the same unit write the same file. Nothing is locked and nothing is changed after it is written.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import platform
import reprlib
import secrets
import socket
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tl_localize.files import remove_abandoned, write_whole
from tl_localize.neurons import LanguageModel, model_name

LOG = logging.getLogger(__name__)
FORMAT = 1  # of the records; part of every key
BRIEF = reprlib.Repr()
BRIEF.maxlevel = 1
PACKAGES = ("tl_localize", "torch", "transformer-lens", "transformers", "numpy", "scipy", "pandas")


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' or nothing."""
    near = difflib.get_close_matches(name, list(known), n=2)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def prepare_folder(folder: str | Path) -> Path:
    """Make a folder for results and check that files can be written there, before any work is done.

    Raises:
        ValueError: it can't be made or written.
    """
    path = Path(folder)
    probe = path / f".writable.{secrets.token_hex(4)}"  # not the process number: containers share one
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"folder must be writable, got {str(folder)!r} ({error.strerror}). Choose another one with --out.") from error
    return path


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_whole(path, text.encode())


def write_json(path: str | Path, record: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n")


def environment(model: LanguageModel) -> dict[str, Any]:
    """What a result depends on beside its settings: versions, device, dtype, and which weights."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    parameter = next(iter(model.parameters()))
    device = str(parameter.device)
    return {
        "model": model_name(model),
        "fingerprint": fingerprint(model),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.device.type == "cuda" else device,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


def fingerprint(model: LanguageModel) -> str:
    """Hash of all weights, their names and the config: 16 hexadecimal digits.

    It is remembered for as long as the sum of every row of every weight (float64), which is faster to take, stays the same.
    """
    named: Any = model
    parameters: list[tuple[str, Tensor]] = sorted(named.named_parameters())
    sums = [tensor.detach().sum(-1, dtype=torch.float64).flatten().cpu() for _, tensor in parameters]
    sums = hashlib.sha256(torch.cat(sums).numpy().data).digest()
    cached = model.__dict__.get("_tl_localize_fingerprint")
    if cached is None or cached[0] != sums:
        digest = hashlib.sha256(canonical(_architecture(model)).encode())
        for name, tensor in parameters:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        cached = (sums, digest.hexdigest()[:16])
        model.__dict__["_tl_localize_fingerprint"] = cached
    return cached[1]


def _architecture(model: LanguageModel) -> dict[str, Any]:
    """The plain entries of the config that change what the model computes."""
    elsewhere = ("device", "n_devices", "seed", "model_name", "original_architecture", "from_checkpoint", "checkpoint", "init", "tokenizer")
    plain = {name: value for name, value in vars(model.cfg).items() if isinstance(value, str | int | float | bool)}
    return {name: value for name, value in plain.items() if not name.startswith(elsewhere)}


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def canonical(record: Any) -> str:
    """JSON that is the same for the same content."""
    return _canonical.encode(record)


def digest_of(record: Any) -> str:
    """A hash of content, 32 hexadecimal digits."""
    return hashlib.sha256(canonical(record).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Unit:
    """A piece of work whose result is one file.

    Args:
        kind: what it is, such as ``"scores"``; the name of its folder.
        identity: everything its numbers depend on, as JSON takes it.
        suffix: ``".safetensors"`` where it holds tensors.

    >>> from tl_localize.execution.store import Unit
    >>> unit = Unit("scores", {"sequence": "s0", "method": "Activations()"})
    >>> unit.key == Unit("scores", {"method": "Activations()", "sequence": "s0"}).key, len(unit.key)
    (True, 32)
    """

    kind: str
    identity: Mapping[str, Any]
    suffix: str = ".json"

    def __repr__(self) -> str:
        return f"Unit({self.file!r})"

    @cached_property
    def key(self) -> str:
        return digest_of({"format": FORMAT, "kind": self.kind, **self.identity})

    @property
    def file(self) -> str:
        """Its name in the results folder."""
        return f"units/{self.kind}/{self.key}{self.suffix}"


@dataclass(frozen=True, eq=False)
class Record:
    """What a unit's file holds.

    Args:
        value: the result.
        about: what it was made with: versions, device, dtype, seconds, peak memory.
        tensors: the tensors of the result.

    >>> import torch
    >>> from tl_localize.execution.store import Record
    >>> Record({"sequence_id": "s0"}, {"seconds": 1.5}, {"values": torch.zeros(6, 1536)})
    Record({'sequence_id': 's0'}, values [6, 1536])
    """

    value: Any
    about: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        shapes = "".join(f", {name} {list(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"Record({BRIEF.repr(self.value)}{shapes})"


class Damaged(ValueError):
    """A file whose content is not what its name and its checksum say."""


@dataclass(frozen=True, eq=False)
class Store:
    """A results folder. Many runs, on many machines, may write to one folder at a time.

    Args:
        folder: it is made if it is not there, unless ``read_only``.
        read_only: nothing is written, and damaged files are named and left where they are.
    Raises:
        ValueError: the folder can't be written; with ``read_only``, it is not a results folder.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize.execution.store import Record, Store, Unit
    >>> unit = Unit("scores", {"sequence": "s0", "method": "Activations()"})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Store(Path(folder)).write(unit, Record([0.5, 0.25]))
    ...     again = Store(Path(folder))
    ...     again.has(unit), again.read(unit).value
    (True, [0.5, 0.25])
    """

    folder: Path
    read_only: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if self.read_only:
            if not (self.folder / "plans").is_dir():
                raise ValueError(f"folder must hold the results of a run, got {str(self.folder)!r} without plans. Check the path.")
            return
        for name in ("plans", "failures", "set_aside", "tmp"):
            prepare_folder(self.folder / name)
        remove_abandoned(self.folder / "tmp")

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r}{', read-only' if self.read_only else ''})"

    # Units

    @cached_property
    def names(self) -> set[str]:
        """Files of all units that were there when the folder was opened, or have been written since."""
        found: set[str] = set()
        for kind in _folders(self.folder / "units"):
            for entry in os.scandir(kind):
                stem, _, suffix = entry.name.partition(".")
                if len(stem) == 32 and suffix in ("json", "safetensors") and entry.is_file():
                    found.add(f"units/{kind.name}/{entry.name}")
                elif stem:  # a name that begins with a point is the system's
                    self.set_aside(Path(entry.path), "it is not a unit")
        return found

    def has(self, unit: Unit) -> bool:
        """Whether the unit is done, by this run or another one; ``sound`` says whether its file can be trusted."""
        return unit.file in self.names or (self.folder / unit.file).exists()

    def sound(self, unit: Unit) -> bool:
        """Whether the unit is done and its file is what was written, to the last bit: ``read`` without the cost of the numbers."""
        return self._read(unit) is not None

    def read(self, unit: Unit) -> Record | None:
        """The unit's record; None if there is none, also where a file in its place was damaged and is now set aside."""
        found = self._read(unit)
        if found is None:
            return None
        data, text = found
        record = json.loads(text)
        return Record(record["value"], record["about"], _tensors(data, unit.suffix))

    def _read(self, unit: Unit) -> tuple[bytes, str] | None:
        """A file and the text of its record, both checked; it is set aside if it is damaged."""
        try:
            with open(f"{self.folder}/{unit.file}", "rb", buffering=0) as file:  # no Path: for 100,000 units that is a second
                data = file.read()
        except FileNotFoundError:
            self.names.discard(unit.file)
            return None
        try:
            text = checked(data, unit.suffix)
            if not text.startswith(f'{{"key":"{unit.key}"'):
                raise Damaged("it belongs to another unit")
        except Damaged as error:
            self.set_aside(self.folder / unit.file, str(error))
            self.names.discard(unit.file)
            return None
        self.names.add(unit.file)
        return data, text

    def write(self, unit: Unit, record: Record) -> None:
        """Write a finished unit, and forget that it ever failed.

        Raises:
            OSError: there is no room, or the folder can't be written; what is finished is kept.
        """
        body = {"key": unit.key, "identity": unit.identity, "value": record.value, "about": record.about}
        self._write(self.folder / unit.file, pack(body, record.tensors, unit.suffix))
        self.names.add(unit.file)
        (self.folder / "failures" / f"{unit.key}.json").unlink(missing_ok=True)

    # Failures

    def fail(self, unit: Unit, error: BaseException) -> dict[str, Any]:
        """Record why a unit could not be made."""
        reason = f"{type(error).__name__}: {error}"
        value = {"unit": unit.file, "reason": reason, "traceback": "".join(traceback.format_exception(error))}
        record = {"key": unit.key, "identity": unit.identity, "value": value, "about": {"host": socket.gethostname()}}
        self._write(self.folder / "failures" / f"{unit.key}.json", pack(record, {}, ".json"))
        return value

    def failures(self) -> dict[str, dict[str, Any]]:
        """What failed, by the unit's key: unit, reason, traceback."""
        return {str(record["key"]): record["value"] for record in self._records("failures")}

    # Plans

    def plan(self, value: dict[str, Any], about: dict[str, Any]) -> None:
        """Remember what a run was asked for: what it takes to list its units, without the model. The same plan is kept once."""
        key = digest_of(value)
        path = self.folder / "plans" / f"{key}.json"
        if not path.exists():
            body = {"key": key, "value": value, "about": about, "after": sum(1 for _ in path.parent.glob("*.json"))}
            self._write(path, pack(body, {}, ".json"))

    def plans(self) -> list[dict[str, Any]]:
        """Plans (``value``, and ``about`` what they came from) in the order in which they were made."""
        return sorted(self._records("plans"), key=lambda record: (record["after"], record["key"]))

    def _records(self, name: str) -> Iterator[dict[str, Any]]:
        for path in sorted((self.folder / name).glob("[!.]*")):
            try:
                record, _ = unpack(path.read_bytes(), ".json")
                if record.get("key") != path.stem:
                    raise Damaged("it belongs to another name")
            except FileNotFoundError:  # a unit that was made in the meantime is no failure
                continue
            except (Damaged, IsADirectoryError) as error:
                self.set_aside(path, str(error))
                continue
            yield record

    # Files

    def _write(self, path: Path, data: bytes) -> None:
        if self.read_only:
            raise ValueError(f"folder must be open for writing, got {str(self.folder)!r} as read-only.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data, self.folder / "tmp")
        except OSError as error:
            raise OSError(
                error.errno,
                f"folder must have room for new files, got {error.strerror!r}. Mend that and give the same command: what is done is kept",
                str(self.folder),
            ) from error

    def set_aside(self, path: Path, why: str) -> None:
        """Move a file that can't be trusted out of the way, and say so."""
        name = f"{path.name}.{secrets.token_hex(4)}"
        if not self.read_only:
            try:
                os.replace(path, self.folder / "set_aside" / name)
            except FileNotFoundError:  # another run was faster
                return
        where = "is not read" if self.read_only else f"was set aside as set_aside/{name}, and is made again if it is needed"
        LOG.warning("%s %s: %s.", path.relative_to(self.folder), where, why)


def pack(record: dict[str, Any], tensors: dict[str, Tensor], suffix: str) -> bytes:
    """A record and its tensors as the bytes of a file, with a checksum of all of it."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, default=str)  # in order: columns stay where they are
    if suffix == ".json":
        return _sealed(text.encode())
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # The checksum stands in the header, whose size must not change with it.
    blank = safetensors.torch.save(whole, {"record": text, "sha256": "0" * 64})
    return safetensors.torch.save(whole, {"record": text, "sha256": _checksum(blank)})


def unpack(data: bytes, suffix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Record and tensors from the bytes of a file.

    Raises:
        Damaged: it is not a file that ``pack`` made, to the last bit.
    """
    return json.loads(checked(data, suffix)), _tensors(data, suffix)


def checked(data: bytes, suffix: str) -> str:
    """The text of the record in the bytes of a file, whose checksum is right; that costs a fraction of ``unpack``.

    Raises:
        Damaged: it is not a file that ``pack`` made, to the last bit.
    """
    try:
        if suffix == ".json":
            if not data:
                raise Damaged("it is empty")
            start = len('{"sha256":"') + 64 + len('","record":')
            text = data[start:-2]
            if data != _sealed(text):
                raise Damaged("its checksum is wrong")
            return text.decode()
        metadata = _header(data)["__metadata__"]
        if metadata["sha256"] != _checksum(data):
            raise Damaged("its checksum is wrong")
        return metadata["record"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged("it is not whole" if len(data) else "it is empty") from error


def _tensors(data: bytes, suffix: str) -> dict[str, Tensor]:
    return {} if suffix == ".json" else safetensors.torch.load(data)


def _sealed(text: bytes) -> bytes:
    """The bytes of a JSON file: a record and its checksum."""
    return b'{"sha256":"%b","record":%b}\n' % (hashlib.sha256(text).hexdigest().encode(), text)


def _header(data: bytes) -> dict[str, Any]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _checksum(data: bytes) -> str:
    """Of the record, the description of the tensors and their bytes."""
    header = _header(data)
    record = header.pop("__metadata__")["record"]
    digest = hashlib.sha256(canonical([record, header]).encode())
    digest.update(memoryview(data)[8 + int.from_bytes(data[:8], "little") :])
    return digest.hexdigest()


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []
