"""The steps of a run and what they gave: in memory, or in a results folder.

A step is known by its inputs: everything that its numbers depend on. What it gave is remembered
under the hash of them, so it is computed once, whoever asks. A results folder holds

    settings.json                   what all its runs agree on, and which cells they were asked for
    steps/KIND/KEY.safetensors      what a step gave; KEY is the hash of its inputs
    failures/KEY.json               why the rows of a cell could not be computed
    damaged/                        files that were not whole; they are never read again
    tmp/                            files that are being written; a later run removes those of a
                                    run that was killed, when they are a day old

A file is written whole or not at all, and never changed afterwards, so many runs may share a folder
without a lock (settings.json alone has one).
"""

import errno
import json
import logging
import os
import secrets
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tl_localize.checks import out_of_memory
from tl_localize.files import (
    Saved,
    digest,
    from_json,
    identity,
    prepare_folder,
    remove_leftovers,
    separated,
    to_json,
    write_json,
    write_whole,
)

LOG = logging.getLogger(__name__)
FORMAT = 7  # of the files of a results folder
SETTINGS = "settings.json"
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
COUNTS = ["asked", "done", "failed", "missing", "not_converged"]
Json = dict[str, Any]
Row = dict[str, Any]  # of a table; it says itself of what it is
Value = TypeVar("Value")
Progress = Callable[[float, str], None]  # the fraction that is done, and what is being done


@dataclass(frozen=True)
class Cell:
    """A place in the tables of a benchmark.

    Args:
        method: its label in tables.
        part: what the method is asked about: a sentence, a group or a target.
        scope: settings that other cells of the folder may have differently, such as a ratio.

    >>> Cell("activations", "s0", "0.01").part
    's0'
    """

    method: str
    part: str = ""
    scope: str = ""


@dataclass(frozen=True, eq=False)
class Scope:
    """What was asked for under one scope, such as one ratio.

    Args:
        settings: the same in all runs of this scope.
        methods: label -> what the method is, and how many of the first parts it was asked about.
    """

    settings: Json
    methods: Mapping[str, tuple[Any, int]]


@dataclass(frozen=True, eq=False)
class Settings:
    """What the runs of a folder agree on, and the cells that they were asked for.

    Args:
        benchmark: ``"inj"``, ``"del"``, ``"rev"`` or ``"collect"``.
        settings: the same in all runs.
        parts: [name, fingerprint] of each sentence, group, target or chunk; runs agree on those
            that both have.
        scopes: by name; runs of different scopes may differ in their settings and methods.
        environments: versions and machines that took part.
        commands: command lines that asked, if any did.

    >>> scopes = {"0.01": Scope({}, {"random": ({}, 1)})}
    >>> Settings("inj", {"seed": 0}, [["s0", "ab"]], scopes).cells()
    [Cell(method='random', part='s0', scope='0.01')]
    """

    benchmark: str
    settings: Json
    parts: Sequence[Sequence[str]]
    scopes: Mapping[str, Scope]
    environments: Sequence[Json] = ()
    commands: Sequence[str] = ()

    def cells(self) -> list[Cell]:
        """All cells, in the order of tables: by scope, part and method."""
        found: list[Cell] = []
        for name, scope in self.scopes.items():
            for i, part in enumerate(self.parts):
                for label, (_, n_parts) in scope.methods.items():
                    if i < n_parts:
                        found.append(Cell(label, part[0], name))
        return found

    def contradictions(self, other: "Settings") -> list[str]:
        """What differs from the settings of a folder, ``other``, and may not."""
        pairs: list[tuple[str, Any, Any]] = [("benchmark", other.benchmark, self.benchmark)]
        for name in other.settings | self.settings:
            pairs.append((name, other.settings.get(name), self.settings.get(name)))
        for i, both in enumerate(zip(other.parts, self.parts, strict=False)):
            pairs.append((f"part {i}", *both))
        for name in other.scopes.keys() & self.scopes:
            old, new = other.scopes[name], self.scopes[name]
            for setting in old.settings | new.settings:
                pairs.append((setting, old.settings.get(setting), new.settings.get(setting)))
            for label in old.methods.keys() & new.methods:
                pairs.append((label, old.methods[label][0], new.methods[label][0]))
        return [
            f"{name}: {old} in the folder, {new} now"
            for name, old, new in pairs
            if not (same_numbers(old, new) if name == "probe" else digest(old) == digest(new))
        ]

    def join(self, other: "Settings") -> "Settings":
        """These settings, added to those of a folder, ``other``."""
        scopes = dict(other.scopes)
        for name, scope in self.scopes.items():
            methods = dict(scopes[name].methods) if name in scopes else {}
            for label, (what, n_parts) in scope.methods.items():
                methods[label] = (what, max(n_parts, methods.get(label, (None, 0))[1]))
            scopes[name] = Scope(scope.settings, methods)
        environments = [*other.environments]
        environments += [new for new in self.environments if new not in environments]
        commands = list(dict.fromkeys([*other.commands, *self.commands]))
        parts = max(other.parts, self.parts, key=len)
        return Settings(self.benchmark, other.settings, parts, scopes, environments, commands)

    @classmethod
    def from_json(cls, found: Json) -> "Settings":
        """What was written as JSON."""
        scopes: dict[str, Scope] = {}
        for name, scope in found["scopes"].items():
            methods = {label: tuple(asked) for label, asked in scope["methods"].items()}
            scopes[name] = Scope(scope["settings"], methods)
        settings = found["benchmark"], found["settings"], found["parts"]
        commands = found.get("commands", ())  # older folders have none
        return cls(*settings, scopes, found["environments"], commands)


def same_numbers(old: Any, new: Any) -> bool:
    """Whether two lists of numbers agree as far as machines do; the last one is the tolerance."""
    try:
        return torch.allclose(
            torch.tensor(old[:-1]), torch.tensor(new[:-1]), rtol=0, atol=float(new[-1])
        )
    except (TypeError, RuntimeError):  # one of them is missing or of another length
        return False


NAMELESS: dict[int, Any] = {}  # kept, as a later object could get the id of one that is gone


def describe(value: Any) -> Any:
    """A setting, a method, units, as JSON takes it: its ``identity``. What has none, such as a
    function, is described in a way that holds in this process alone.
    """
    try:
        return identity(value)
    except ValueError:
        NAMELESS[id(value)] = value
        return {"only here": [repr(value), id(value)]}


def check_lasting(settings: Settings) -> None:
    """Raise ValueError where a setting or a method has no plain form under which its results can be
    kept.
    """
    everything = dict(settings.settings)
    for scope in settings.scopes.values():
        everything |= scope.settings
        everything |= {label: what for label, (what, _) in scope.methods.items()}
    for name, what in everything.items():
        if isinstance(what, dict) and "only here" in what:
            raise ValueError(
                f"{name} must be a frozen dataclass of plain settings where results are kept, got "
                f"{what['only here'][0]}. Write one, or run without a store."
            )


def refuse(wrong: Sequence[str], where: str) -> None:
    """Raise ValueError where settings contradict those that are there."""
    if wrong:
        raise ValueError(
            f"settings must agree with those of {where!r}, got\n  "
            + "\n  ".join(wrong[:5])
            + "\nGive the same settings, to which parts, methods and ratios may be added, or "
            "another folder with --out."
        )


class Steps:
    """What the steps of a run gave, in memory: what a run without a results folder uses. A step
    that fails ends the run. Tensors are not kept, as they are large: who needs scores twice holds
    them.

    >>> steps = Steps()
    >>> steps.get({"step": "sum", "of": [1, 2]}, lambda: sum([1, 2]))
    3
    """

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.environment: Json = {}
        self.command = ""  # the command line that asks, if one does
        self.values: dict[str, Any] = {}  # by key, without those that hold tensors
        self.cells: dict[Cell, list[Row]] = {}
        self.keys: set[str] = set()  # of the steps whose rows are in ``cells``
        self.report: Callable[[float, str], None] = _ignore  # within a cell
        self.finish_cell: Callable[[bool], None] = _ignore  # whether it was there before

    def agree(self, settings: Settings) -> None:
        """Remember what a run is asked for; ValueError where it contradicts an earlier one."""
        if self.settings:
            refuse(settings.contradictions(self.settings), "memory")
            settings = settings.join(self.settings)
        self.settings = settings

    @property
    def agreed(self) -> Json:
        """What all runs agree on: the model, its fingerprint, and the settings of a benchmark."""
        return self.settings.settings if self.settings else {}

    def get(self, inputs: Json, compute: Callable[[], Value]) -> Value:
        """What a step gave, or gives now.

        Args:
            inputs: everything that the numbers depend on, as JSON takes it. ``inputs["step"]`` is
                its kind, such as ``"inject"``.
            compute: gives JSON, or an object that can be saved, such as an injection.
        """
        key = digest(inputs)
        found = self._read(key, inputs)
        if found is None:
            self._check_writable()
            found = compute()
            self._write(key, inputs, found)
        return found

    def find(self, inputs: Json) -> Any:
        """What a step gave; None where it is not computed yet."""
        return self._read(digest(inputs), inputs)

    def keep(self, inputs: Json, value: Any) -> None:
        """Keep something in place of what a step gave before, such as a training that is not
        finished; in memory no tensors.
        """
        self._write(digest(inputs), inputs, value)

    def drop(self, inputs: Json) -> None:
        """Forget what ``keep`` kept."""
        self.values.pop(f"{inputs['step']}/{digest(inputs)}", None)

    def get_many(
        self,
        inputs: Sequence[Json],
        compute: Callable[[list[int]], Iterable[Value | Exception]],
    ) -> list[Value | Exception]:
        """What several steps gave, of which those that are missing are computed side by side.

        Args:
            compute: gives a value, or the reason why there is none, for each of the numbers of the
                missing ones.
        """
        keys = [digest(step) for step in inputs]
        found = [self._read(key, step) for key, step in zip(keys, inputs, strict=True)]
        missing = [i for i, value in enumerate(found) if value is None]
        if missing:
            self._check_writable()
            for i, value in zip(missing, compute(missing), strict=True):
                found[i] = value
                if not isinstance(value, Exception):
                    self._write(keys[i], inputs[i], value)
        return found

    def rows(self, cell: Cell, inputs: Json, compute: Callable[[], list[Row]]) -> list[Row]:
        """The rows of a cell of the tables. In a results folder an error is recorded and told; then
        there are none, and the others go on.
        """
        key = digest(inputs)
        rows = self._read(key, inputs)
        was_there = rows is not None
        if rows is None:
            self._check_writable()
            try:
                self.report(0.0, f"{cell.method} on {cell.part}")
                rows = compute()
            except Exception as error:
                if ends_the_run(error):
                    raise
                self.fail(key, cell, error)
                self.finish_cell(False)
                return []
            self._write(key, inputs, rows, cell)
            LOG.info("%s on %s", cell.method, cell.part)
        self.cells[cell] = rows
        self.keys.add(key)
        self.finish_cell(was_there)
        return rows

    def fail(self, key: str, cell: Cell, error: Exception) -> None:
        """Record why a cell has no rows. In memory the error is raised."""
        raise error

    def failures(self) -> dict[Cell, str]:
        """Why cells have no rows. In memory no run goes on after a failure."""
        return {}

    def done(self) -> dict[Cell, list[Row]]:
        """The rows of each cell that is done, in the order of tables."""
        if self.settings is None:
            return {}
        return {cell: self.cells[cell] for cell in self.settings.cells() if cell in self.cells}

    def given(self, kind: str) -> list[Any]:
        """What the steps of a kind gave, without those that hold tensors."""
        return [value for key, value in self.values.items() if key.startswith(f"{kind}/")]

    def _check_writable(self) -> None:
        """Raise ValueError, before a step is computed, where it can't be kept."""

    def _read(self, key: str, inputs: Json) -> Any:
        return self.values.get(f"{inputs['step']}/{key}")

    def _write(self, key: str, inputs: Json, value: Any, cell: Cell | None = None) -> None:
        if not isinstance(value, Saved):
            self.values[f"{inputs['step']}/{key}"] = value


def _ignore(*arguments: object) -> None: ...


class Damaged(ValueError):
    """A file whose content is not what its name and its checksum say."""


class Store(Steps):
    """A results folder. Many runs, on many machines, may write to one folder at a time.

    Args:
        folder: made if it is not there, unless ``read_only``.
        read_only: nothing is written, and damaged files are named and left where they are.

    Raises:
        ValueError: the folder can't be written, or is of another format; with ``read_only``, it is
            not a results folder.

    >>> Store(folder).get({"step": "sum", "of": [1, 2]}, lambda: 3)
    3
    >>> Store(folder).get({"step": "sum", "of": [1, 2]}, lambda: 4)  # it is there already
    3
    """

    def __init__(self, folder: str | Path, read_only: bool = False) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.read_only = read_only
        if not read_only:
            self._prepare()
        self._read_settings()
        if read_only and self.settings is None:
            found = f"no {SETTINGS}" if self.folder.is_dir() else "no such folder"
            raise ValueError(
                f"folder must hold the results of a run, got {found} at {str(self.folder)!r}. Name "
                "a folder that a command such as tl-localize inj has written."
            )

    def _prepare(self) -> None:
        """Make the folder, where it is not there; remove what killed runs left in it."""
        prepare_folder(self.folder)
        # hidden ones are temporary files, or what a file manager leaves
        names = {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}
        if names and not names & {SETTINGS, f"{SETTINGS}.lock", "steps"}:
            raise ValueError(
                f"folder must be new, empty or a results folder, got {str(self.folder)!r} with "
                "other files. Choose another."
            )
        for name in ("steps", "failures", "damaged", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        for folder in (self.folder, self.folder / "tmp"):
            remove_leftovers(folder)

    # Settings

    def _read_settings(self) -> None:
        """The settings as they are now; another run may have added to them."""
        path = self.folder / SETTINGS
        if not path.exists():
            return
        try:
            found = json.loads(path.read_bytes())
            if found["format"] != FORMAT:
                raise Damaged(f"format {found['format']!r}")
            self.settings = Settings.from_json(found)
        except DAMAGE as error:
            why = str(error) if isinstance(error, Damaged) else f"no whole {SETTINGS}"
            raise ValueError(
                f"folder must hold the results of a run in format {FORMAT}, got {why} in "
                f"{str(self.folder)!r}. Use the version that wrote it, or another folder."
            ) from error

    def agree(self, settings: Settings) -> None:
        """Remember what a run is asked for, beside what the folder holds.

        Raises:
            ValueError: it contradicts an earlier run of the folder, whose settings may be lost, or
                a setting has no plain form under which results can be kept.
        """
        check_lasting(settings)
        if self.command:
            settings = replace(settings, commands=[self.command])
        with self._locked():
            self._read_settings()
            if self.settings is None and any(self._files(settings.benchmark)):
                raise ValueError(
                    f"folder must hold {SETTINGS} beside its results, which may be of another "
                    f"model, got none in {str(self.folder)!r}. Put it back, or give another folder."
                )
            if self.settings:
                refuse(settings.contradictions(self.settings), str(self.folder))
                settings = settings.join(self.settings)
            if self.settings is None or digest(asdict(settings)) != digest(asdict(self.settings)):
                self._check_writable()
                write_json(self.folder / SETTINGS, {"format": FORMAT, **asdict(settings)})
        self.settings = settings

    def _locked(self) -> AbstractContextManager[Any]:
        """One run at a time reads and writes the settings; the lock ends with its process."""
        if self.read_only:
            return nullcontext()
        from filelock import FileLock

        return FileLock(f"{self.folder / SETTINGS}.lock")

    # Steps

    def _file(self, key: str, kind: str) -> Path:
        return self.folder / "steps" / kind / f"{key}.safetensors"

    def _files(self, kind: str) -> Iterator[Path]:
        """Those of all steps of a kind."""
        return (self.folder / "steps" / kind).glob("[!.]*")

    def _read(self, key: str, inputs: Json) -> Any:
        name = f"{inputs['step']}/{key}"
        if name not in self.values:
            body = self._load(self._file(key, inputs["step"]))
            if body is None:
                return None
            if isinstance(body["value"], Saved):
                return body["value"]
            self.values[name] = body["value"]
        return self.values[name]

    def _write(self, key: str, inputs: Json, value: Any, cell: Cell | None = None) -> None:
        body: Json = {"key": key, "inputs": inputs, "value": value, "made": self.environment}
        body["cell"] = asdict(cell) if cell else None
        self._save(self._file(key, inputs["step"]), pack(body))
        super()._write(key, inputs, value)  # what no file has is not there
        (self.folder / "failures" / f"{key}.json").unlink(missing_ok=True)

    def drop(self, inputs: Json) -> None:
        super().drop(inputs)
        self._file(digest(inputs), inputs["step"]).unlink(missing_ok=True)

    def done(self) -> dict[Cell, list[Row]]:
        self._read_settings()  # another run may have asked for more
        if self.settings is None:
            return {}
        for body in self._each(self.settings.benchmark, self.keys):
            if body["cell"]:
                self.cells.setdefault(Cell(**body["cell"]), body["value"])
                self.keys.add(body["key"])
        return super().done()

    def given(self, kind: str) -> list[Any]:
        return [body["value"] for body in self._each(kind)]

    def _each(self, kind: str, known: Set[str] = frozenset()) -> Iterator[Json]:
        """What the files of all steps of a kind hold, without the known ones; the newest first,
        because data that have grown give a cell a second file.
        """
        ages: dict[Path, int] = {}
        for path in self._files(kind):
            with suppress(FileNotFoundError):  # another run has just put it aside
                ages[path] = -path.lstat().st_mtime_ns
        for path in sorted(ages, key=ages.__getitem__):
            body = None if path.stem in known else self._load(path)
            if body is not None:
                yield body

    def _load(self, path: Path) -> Json | None:
        """What a file of a step holds. None where there is none (another run may just have replaced
        it), or where it was damaged; then it is moved out of the way.
        """
        try:
            body = unpack(content_of(path))
            if body["key"] != path.stem:
                raise Damaged("it belongs to another step")
            return body
        except FileNotFoundError:
            return None
        except DAMAGE as error:
            why = str(error) if isinstance(error, Damaged) else "it is not whole"
        where = "is not read"
        if not self.read_only:
            name = f"damaged/{path.name}.{secrets.token_hex(4)}"
            where = f"was moved to {name}, and is computed again if it is needed"
            with suppress(FileNotFoundError):  # another run was faster
                os.replace(path, self.folder / name)
        LOG.error("%s %s: %s.", path.relative_to(self.folder), where, why)
        return None

    def _check_writable(self) -> None:
        if self.read_only:
            raise ValueError(
                f"folder must be open for writing, got {str(self.folder)!r} as read-only. Open it "
                "by Store(folder)."
            )

    def _save(self, path: Path, data: bytes) -> None:
        self._check_writable()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, self.folder / "tmp")

    # Failures

    def fail(self, key: str, cell: Cell, error: Exception) -> None:
        """Record why a cell has no rows; the next run tries it again."""
        reason = f"{type(error).__name__}: {error}"
        lines = "".join(traceback.format_exception(error))
        value = {"cell": asdict(cell), "reason": reason, "traceback": lines}
        text = json.dumps(value, indent=1)  # in ASCII: a name may hold half a character
        self._save(self.folder / "failures" / f"{key}.json", text.encode())
        LOG.warning("FAILED %s on %s: %s", cell.method, cell.part, reason.splitlines()[0])

    def failures(self) -> dict[Cell, str]:
        found: dict[Cell, str] = {}
        for path in sorted((self.folder / "failures").glob("[!.]*.json")):
            try:
                value = json.loads(path.read_bytes())
                found[Cell(**value["cell"])] = str(value["reason"])
            except (OSError, *DAMAGE):
                LOG.error("failures/%s is not read: it is not whole.", path.name)
        return found


class Lazy(Generic[Value]):
    """A value that is computed when it is first asked for; so is an error, which is raised again.

    >>> injection = Lazy(lambda: print("injects"))
    >>> injection()
    injects
    >>> injection()
    """

    def __init__(self, compute: Callable[[], Value]) -> None:
        self.compute = compute
        self.found: tuple[Value] | None = None
        self.error: Exception | None = None

    def __call__(self) -> Value:
        if self.error:
            raise self.error.with_traceback(None)
        if self.found is None:
            try:
                self.found = (self.compute(),)
            except Exception as error:
                self.error = error
                traceback.clear_frames(error.__traceback__)  # they hold tensors
                raise
        return self.found[0]


class ProgressError(RuntimeError):
    """What a user gave to be called with the progress has failed."""


NO_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def ends_the_run(error: Exception) -> bool:
    """Whether nothing else can be computed or kept after an error, or it is no method's: a disk
    that is full, a device that is lost, a progress that can't be told.
    """
    lost = isinstance(error, getattr(torch, "AcceleratorError", ())) and not out_of_memory(error)
    no_disk = isinstance(error, OSError) and error.errno in NO_DISK
    return lost or no_disk or isinstance(error, ProgressError)


# Files of steps


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
    tensors: dict[str, Tensor] = {}
    # in ASCII: a file name on a disk may hold half a character
    text = to_json(body, tensors)
    whole = separated(tensors)
    return safetensors.torch.save(whole, {"step": text, "digest": digest(text, whole)})


def unpack(data: bytes) -> Json:
    """What ``pack`` was given, from the bytes of a file; raises one of ``DAMAGE`` unless ``pack``
    made it, to the last bit.
    """
    tensors = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    if header["digest"] != digest(header["step"], tensors):
        raise Damaged("its checksum is wrong")
    return from_json(header["step"], tensors)


# How far a folder is


@dataclass(frozen=True)
class Status:
    """How far a folder is.

    Args:
        frame: one row per method: counts of cells (asked, done, failed, missing) and of those that
            are done but did not converge.
        failures: what failed and why.

    >>> counts = {"asked": [3], "done": [3], "failed": [0], "missing": [0], "not_converged": [1]}
    >>> Status(pd.DataFrame(counts), {}).clean
    False
    """

    frame: pd.DataFrame
    failures: dict[Cell, str]

    @property
    def clean(self) -> bool:
        """Nothing failed, and everything converged."""
        return not (self.failures or self.frame["not_converged"].any())


def status(steps: Steps) -> Status:
    """Which of the cells that were asked for are done, failed and missing.

    >>> benchmark = InjBenchmark(model=model, sequences=few[:1], ratio=0.02, max_steps=2)
    >>> _ = benchmark.run([Activations()], Store(folder))
    >>> status(Store(folder)).frame.loc["activations", ["asked", "done"]].tolist()
    [1, 1]
    """
    done, failures = steps.done(), steps.failures()
    cells = steps.settings.cells() if steps.settings else []
    rows: dict[str, dict[str, int]] = {}
    for cell in cells:
        row = rows.setdefault(cell.method, dict.fromkeys(COUNTS, 0))
        row["asked"] += 1
        state = "done" if cell in done else "failed" if cell in failures else "missing"
        row[state] += 1
        row["not_converged"] += any(found.get("converged") is False for found in done.get(cell, []))
    failed = {cell: failures[cell] for cell in cells if cell in failures and cell not in done}
    return Status(pd.DataFrame.from_dict(rows, orient="index", columns=COUNTS), failed)
