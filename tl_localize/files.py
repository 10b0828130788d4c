"""Files are written whole or not at all, and nothing but a regular file is ever replaced."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

ABANDONED = 3600  # seconds after which a temporary file has no living writer: a write takes seconds
TEMPORARY = re.compile(r"\..*[0-9a-f]{16}\.tmp")


def write_whole(path: str | Path, data: bytes, temporary_folder: Path | None = None, *, new: bool = False) -> None:
    """Write under a temporary name, force it to the disk, rename: after a crash at any moment there is the whole file or none.

    Args:
        path: a link is followed.
        temporary_folder: where the temporary file lies, on the same file system; beside the file by default.
        new: of several processes that write this name at a time, one succeeds.
    Raises:
        FileExistsError: with ``new``, there is a file of this name.
        ValueError: something else than a regular file is there, such as a folder, a device or a pipe.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"path must be a regular file or new, got {str(path)!r}, which is something else. Choose another name.")
    temporary = (temporary_folder or path.parent) / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            _link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself reaches the disk, where folders can be synchronized (not on Windows)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _link(temporary: Path, path: Path) -> None:
    """Give a file a name that no file has; where the file system has no links, two processes at once could both succeed."""
    try:
        os.link(temporary, path)
    except OSError:
        if path.exists():
            raise FileExistsError(f"path must be new, got {str(path)!r}, which is there. Choose another name.") from None
        os.replace(temporary, path)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_whole(path, text.encode(errors="surrogatepass"))


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def remove_abandoned(folder: Path) -> None:
    """Delete our temporary files that killed writers left, an hour after they were written, by the file system's own clock."""
    now = _probe(folder)
    for path in folder.glob(".*.tmp"):
        try:
            if TEMPORARY.fullmatch(path.name) and now - path.stat().st_mtime > ABANDONED:
                path.unlink()
        except FileNotFoundError:  # its writer, or another cleaner, was faster
            pass


def prepare_folder(folder: str | Path) -> Path:
    """Make a folder for results and check that files can be written there, before any work is done.

    Raises:
        ValueError: it can't be made or written.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _probe(path)
    except OSError as error:
        raise ValueError(f"folder must be writable, got {str(folder)!r} ({error.strerror}). Choose another one with --out.") from error
    return path


def _probe(folder: Path) -> float:
    """Write and delete a file; returns its time."""
    probe = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
