"""Results on disk: files written whole or not at all, and what they were made with."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tl_localize.neurons import LanguageModel

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
    probe = path / f".writable.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"folder must be writable, got {str(folder)!r} ({error.strerror}). Choose another one with --out.") from error
    return path


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
        "model": getattr(model.cfg, "model_name", type(model).__name__),
        "fingerprint": fingerprint(model),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.device.type == "cuda" else device,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


def fingerprint(model: LanguageModel) -> str:
    """Hash of all weights and their names: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    named: Any = model
    for name, tensor in sorted(named.named_parameters()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
