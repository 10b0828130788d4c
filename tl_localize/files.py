"""Files are written whole or not at all, and nothing but a regular file is ever replaced."""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import safetensors
from safetensors.torch import save as serialize
from torch import Tensor

Loaded = TypeVar("Loaded", bound="Saved")

ABANDONED = 3600  # seconds after which a temporary file has no living writer: a write takes seconds
TEMPORARY = re.compile(r"\..*[0-9a-f]{16}\.tmp")


@contextmanager
def reading(rule: str, path: Path, advice: str = "Make it again.") -> Iterator[None]:
    """Whatever a library raises for a damaged file becomes one ValueError: the rule, the path, what
    was said, the advice.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # each library and each architecture fails in its own way
        cause = error.__cause__ or error
        said = " ".join(str(cause).split())[:200]
        raise ValueError(
            f"{rule}, got {str(path)!r} ({type(cause).__name__}: {said}). {advice}"
        ) from error


def write_whole(
    path: str | Path, data: bytes, temporary_folder: Path | None = None, *, new: bool = False
) -> None:
    """Write under a temporary name, force it to the disk, rename: after a crash at any moment there
    is the whole file or none.

    Args:
        path: a link is followed.
        temporary_folder: on the same file system; by default the file's own.
        new: of several processes that write this name at a time, one succeeds.

    Raises:
        FileExistsError: with ``new``, there is a file of this name.
        OSError: there is no room, or the folder can't be written.
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
        (_link if new else os.replace)(temporary, path)
        # the rename itself reaches the disk, where folders can be synchronized (not on Windows)
        if os.name == "posix":
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except FileExistsError:
        raise
    except OSError as error:
        rule = f"folder must have room for new files, got {error.strerror or str(error)!r}"
        raise OSError(
            error.errno,
            f"{rule}. Mend that and give the same command: what is done is kept",
            str(path),
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> None:
    """Give a file a name that no file has; where the file system has no links, two processes at
    once could both succeed.
    """
    try:
        os.link(temporary, path)
    except OSError:
        if path.exists():
            raise FileExistsError(
                f"path must be new, got {str(path)!r}, which is there. Choose another name."
            ) from None
        os.replace(temporary, path)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_whole(path, text.encode(errors="surrogatepass"))


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def save_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        FileNotFoundError: The folder is not there.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"path must be in an existing folder, got {str(path)!r}. Make {str(path.parent)!r} "
            "first."
        )
    write_whole(
        path, serialize({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    )


def load_tensors(path: str | Path, *required: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; ValueError where it is damaged, or lacks a
    required tensor.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"path must be an existing safetensors file, got {str(path)!r}. Check the spelling."
        )
    with (
        reading("path must be a whole safetensors file", Path(path)),
        safetensors.safe_open(path, framework="pt") as file,
    ):
        opened: Any = file
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        metadata = dict(opened.metadata() or {})
    if missing := [name for name in required if name not in tensors]:
        raise ValueError(
            f"path must hold the tensors {list(required)}, got {str(path)!r} without {missing}. Is "
            "it another kind of file?"
        )
    return tensors, metadata


class Saved(ABC):
    """Data that is saved as a safetensors file: ``packed`` gives its tensors and texts,
    ``unpacked`` makes it from them.
    """

    required: ClassVar[tuple[str, ...]]  # tensors that a file of it must hold

    @abstractmethod
    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]: ...

    @classmethod
    @abstractmethod
    def unpacked(
        cls: type[Loaded], tensors: dict[str, Tensor], metadata: dict[str, str]
    ) -> Loaded: ...

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all."""
        save_tensors(path, *self.packed())

    @classmethod
    def load(cls: type[Loaded], path: str | Path) -> Loaded:
        """Read what ``save`` wrote."""
        return cls.unpacked(*load_tensors(path, *cls.required))


def remove_abandoned(folder: Path) -> None:
    """Delete our temporary files that killed writers left, an hour after they were written, by the
    file system's own clock.
    """
    now = _probe(folder)
    for path in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):  # its writer, or another cleaner, was faster
            if TEMPORARY.fullmatch(path.name) and now - path.stat().st_mtime > ABANDONED:
                path.unlink()


def prepare_folder(folder: str | Path) -> Path:
    """Make a folder for results; ValueError, before any work is done, where files can't be written
    there.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _probe(path)
    except OSError as error:
        raise ValueError(
            f"folder must be writable, got {str(folder)!r} ({error.strerror}). Choose another one "
            "with --out."
        ) from error
    return path


def _probe(folder: Path) -> float:
    """Write and delete a file; returns its time."""
    probe = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' or nothing."""
    near = difflib.get_close_matches(name, list(known), n=2)
    return f" Did you mean {' or '.join(near)}?" if near else ""
