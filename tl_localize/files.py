"""Files are written whole or not at all, and nothing but a regular file is ever replaced."""

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar, TypeVar

import numpy as np
import safetensors
import torch
from safetensors.torch import save as serialize
from torch import Tensor

from tl_localize.checks import out_of_memory

Loaded = TypeVar("Loaded", bound="Saved")

# what JSON holds in place of a tensor and of a class; in the fields of a class also of a tuple and
# of a mapping whose keys are no text
TENSOR, CLASS, TUPLE, PAIRS = "$tensor", "$class", "$tuple", "$pairs"
TEMPORARY = re.compile(r"\..*[0-9a-f]{16}\.tmp")
A_DAY = 24 * 60 * 60  # seconds


def check_file(path: str | Path) -> Path:
    """The path; FileNotFoundError where there is no such file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"path must be an existing file, got {str(path)!r}. Check the spelling."
        )
    return path


@contextmanager
def refuse_unreadable(
    rule: str, path: str | Path, advice: str = "Make it again."
) -> Iterator[None]:
    """Whatever a library raises for a damaged file becomes one ValueError: the rule, the path, what
    was said, the advice.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # each library and each architecture fails in its own way
        if out_of_memory(error):
            raise
        cause = error.__cause__ or error
        said = " ".join(str(cause).split())[:200]
        raise ValueError(
            f"{rule}, got {str(path)!r} ({type(cause).__name__}: {said}). {advice}"
        ) from error


def write_whole(path: str | Path, data: bytes, temporary_folder: Path | None = None) -> None:
    """Write under a temporary name, force it to the disk, rename: after a crash at any moment there
    is the whole file or none.

    Args:
        path: a link is followed.
        temporary_folder: on the same file system; by default the file's own.

    Raises:
        OSError: there is no room, or no such folder, or it can't be written.
        ValueError: something else than a regular file is there.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise ValueError(
            f"path must be a regular file or new, got {str(path)!r}, which is something else. "
            "Choose another name."
        )
    temporary = (temporary_folder or path.parent) / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"folder must be there and have room for new files, got {error.strerror!r}. Mend that "
            "and try again: what a results folder holds is kept",
            str(path),
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders of processes that were killed while they wrote: those
    of which nothing was written for a day.
    """
    for path in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):  # another process was faster
            if TEMPORARY.fullmatch(path.name) and time.time() - path.stat().st_mtime > A_DAY:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_whole(path, text.encode(errors="surrogatepass"))


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n")


def save_tensors(path: str | Path, tensors: dict[str, Tensor], text: str = "") -> None:
    """Write a safetensors file, and a text in it, whole or not at all."""
    write_whole(path, serialize(separated(tensors), {"value": text}))


def separated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: contiguous, and no two in the same memory."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in taken else tensor
        taken.add(memory)
    return found


class Storable:
    """A dataclass that is stored by the name of its class and its fields."""

    kinds: ClassVar[dict[str, type[Any]]] = {}  # every class that is defined, by its name

    def __init_subclass__(cls) -> None:
        Storable.kinds[cls.__name__] = cls


class Saved(Storable):
    """A dataclass that has a safetensors file: its tensors, and all else as JSON."""

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors: dict[str, Tensor] = {}
        text = to_json(self, tensors)
        save_tensors(path, tensors, text)

    @classmethod
    def load(cls: type[Loaded], path: str | Path) -> Loaded:
        """Read what ``save`` wrote; ValueError where the file is damaged, or of another kind."""
        with (
            refuse_unreadable(f"path must be a whole file of {cls.__name__}", check_file(path)),
            safetensors.safe_open(path, framework="pt") as file,
        ):
            opened: Any = file
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
            found = from_json(opened.metadata()["value"], tensors)
            if not isinstance(found, cls):
                raise ValueError(f"it holds {type(found).__name__}")
        return found


def to_json(value: Any, tensors: dict[str, Tensor]) -> str:
    """A value as JSON. Its tensors are put into ``tensors`` under their numbers; what else JSON
    cannot hold becomes its text.
    """

    def to_plain(part: Any) -> Any:
        if isinstance(part, Tensor):
            name = str(len(tensors))
            tensors[name] = part
            return {TENSOR: name}
        if isinstance(part, Storable):
            names = (
                list(vars(part))
                if not is_dataclass(part)
                else [field.name for field in fields(part) if field.init]
            )
            own = {name: _tagged(getattr(part, name)) for name in names}
            return {CLASS: type(part).__name__} | own
        if isinstance(part, np.ndarray):
            return to_plain(torch.from_numpy(part))
        return _plain(part)

    return json.dumps(value, default=to_plain)


def from_json(text: str, tensors: dict[str, Tensor]) -> Any:
    """The value of such JSON: with lists for tuples but in the fields of a class, and tensors for
    arrays.
    """

    def restore(found: dict[str, Any]) -> Any:
        if TENSOR in found:
            return tensors[found[TENSOR]]
        if TUPLE in found:
            return tuple(found[TUPLE])
        if PAIRS in found:
            return dict(map(tuple, found[PAIRS]))
        kind = found.pop(CLASS, None)
        if kind is None:
            return found
        if kind not in Storable.kinds:
            raise ValueError(f"class {kind} must be imported first")
        return Storable.kinds[kind](**found)

    return json.loads(text, object_hook=restore)


def _tagged(value: Any) -> Any:
    """The field of a class, with tags for what JSON would turn into something else.

    Raises:
        ValueError: a dataclass in it could not be read again.
    """
    if is_dataclass(value) and not isinstance(value, Storable):
        raise ValueError(
            f"fields must be plain values, tensors or classes of this package where they are "
            f"stored, got {value!r}. Make it such, or give its own fields to the class."
        )
    if isinstance(value, tuple):
        return {TUPLE: [_tagged(part) for part in value]}
    if isinstance(value, list):
        return [_tagged(part) for part in value]
    if isinstance(value, Mapping):
        pairs = [[key, _tagged(part)] for key, part in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else {PAIRS: pairs}
    return value


def prepare_folder(folder: str | Path) -> Path:
    """Make a folder for results; ValueError, before any work is done, where files can't be written
    there.
    """
    path = Path(folder)
    with _writing_in(folder):
        path.mkdir(parents=True, exist_ok=True)
        write_probe(path)
    return path


def check_writable(folder: str | Path) -> None:
    """Raise ValueError where ``prepare_folder`` could not make a folder; nothing is made."""
    path = Path(folder)
    with _writing_in(folder):
        there = next(place for place in (path, *path.parents) if place.exists())
        write_probe(there)


def write_probe(folder: Path) -> None:
    """Write and remove a file, which other processes know as a temporary one."""
    TemporaryFile(dir=folder, prefix=".", suffix=f".{secrets.token_hex(8)}.tmp").close()


def check_out_file(path: str | Path, suffix: str) -> None:
    """Raise ValueError where a file of a kind can't be written; nothing is made."""
    path = Path(path)
    if path.suffix != suffix or path.is_dir():
        raise ValueError(f"out must be a {suffix} file, got {str(path)!r}. Choose another name.")
    page = path.with_suffix(".html")
    if page.is_dir():
        raise ValueError(
            f"out must leave room for its page, got {str(path)!r} beside a folder {page.name}. "
            "Choose another name."
        )
    check_writable(path.parent)


@contextmanager
def _writing_in(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"folder must be writable, got {str(folder)!r} ({error.strerror}). Choose another one."
        ) from error


# What a value is, as JSON


def identity(value: Any) -> Any:
    """A setting, a method, units or an ablation, as JSON takes it.

    A dataclass is its class name and those of its fields that it compares; a tensor is its shape
    and a hash of its numbers. A repr is for people, and nothing reads it.

    Raises:
        ValueError: a part of it is neither a dataclass nor a plain value, so two different ones
            could not be told apart.

    >>> identity(IntegratedGradients(steps=5, units=AttentionHeads()))["steps"]
    5
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.compare]
        own = {name: identity(getattr(value, name)) for name in names}
        return {"class": type(value).__name__, **own}
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "digest": digest(value)}
    if isinstance(value, Mapping):
        return {str(name): identity(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [identity(part) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Integral):  # of numpy
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ValueError(
        f"settings must be plain values or dataclasses, got {value!r}. Write a frozen dataclass "
        "with its settings as fields."
    )


def identity_text(value: Any) -> str:
    """``identity`` as one line of JSON, the same for the same content."""
    return json.dumps(identity(value), sort_keys=True)


# A hash of values


def digest(*values: Any) -> str:
    """A hash of values: 32 hexadecimal digits.

    A tensor counts with its shape, dtype and all its bits, so do the tensors of a mapping with
    their names; bytes and text count as they are, everything else as JSON.

    >>> digest({"seed": 0, "ratio": 0.1}) == digest({"ratio": 0.1, "seed": 0})
    True
    """
    total = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            _add_tensor(total, "", value)
        elif isinstance(value, Mapping) and any(
            isinstance(part, Tensor) for part in value.values()
        ):
            for name, tensor in sorted(value.items()):
                _add_tensor(total, name, tensor)
        elif isinstance(value, bytes):
            total.update(value)
        else:
            text = value if isinstance(value, str) else canonical_json(value)
            total.update(text.encode(errors="surrogatepass"))
        total.update(b"\0")
    return total.hexdigest()[:32]


def canonical_json(value: Any) -> str:
    """JSON that is the same for the same content."""
    compact: Any = {"separators": (",", ":"), "ensure_ascii": False}
    return json.dumps(value, sort_keys=True, default=_plain, **compact)


def _plain(value: Any) -> Any:
    """What stands in JSON for a value that it cannot hold: of numpy's numbers the number, else the
    text.
    """
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, np.bool_):
        return bool(value)
    return float(value) if isinstance(value, Real) else str(value)


def _add_tensor(total: Any, name: str, tensor: Tensor) -> None:
    total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().flatten()
    total.update(flat.view(torch.uint8).numpy())
