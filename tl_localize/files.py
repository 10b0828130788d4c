"""Files are written whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any


def write_whole(path: str | Path, data: bytes, temporary_folder: Path | None = None, *, new: bool = False) -> None:
    """Write under a temporary name, force it to the disk, rename: after a crash at any moment there is the whole file or none.

    Args:
        temporary_folder: where the temporary file lies, on the same file system; beside the file by default.
        new: raise FileExistsError where there is a file of this name; of several processes that write it at a time, one succeeds.
    """
    path = Path(path)
    temporary = (temporary_folder or path.parent) / f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            _link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _force(path.parent)


def _link(temporary: Path, path: Path) -> None:
    """Give a file a name that no file has; where the file system has no links, two processes at once could both succeed."""
    try:
        os.link(temporary, path)
    except OSError:
        if path.exists():
            raise FileExistsError(f"path must be new, got {str(path)!r}, which is there. Choose another name.") from None
        os.replace(temporary, path)


def _force(folder: Path) -> None:
    """The rename itself reaches the disk, where folders can be synchronized (not on Windows)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Delete temporary files of ``write_whole`` whose writer is dead: a process of this machine that is gone, or of another after a day.

    Age is measured on the file system's own clock, by a file that is written now.
    """
    probe = folder / f".probe.{secrets.token_hex(4)}"
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    for path in folder.glob(".*.tmp"):
        writer = path.name.split(".")[-3]
        ours = writer.isdigit() and f".{socket.gethostname()}.{writer}." in path.name
        try:
            if (ours and not alive(int(writer))) or (not ours and now - path.stat().st_mtime > 24 * 3600):
                path.unlink()
        except FileNotFoundError:  # its writer, or another cleaner, was faster
            pass


def alive(pid: int) -> bool:
    """Whether another process of this machine has this number; what bears our own number is of one before us."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
