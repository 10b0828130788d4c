"""What was measured on other machines, beside the committed frames: a run goes on from it.

Days of computing rarely fit one machine. The archive of a model holds the rows of each part of the
plan, and the settings that its results folders agree on; no scores, no trained rows, which are
large, and no texts: of what a model recites the words are left out, and so are the rows of a method
that was given texts, which stand in their inputs.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from tl_localize.execution.store import SETTINGS, pack, unpack
from tl_localize.files import prepare_folder, write_whole

EXPECTED = Path(__file__).parent / "expected" / "real"
ARCHIVE = "rows.zip"
EDITS = "edits.zip"  # of test_erase.py
SEARCHED = "settings-*.json"  # of the masks
BEFORE = "before"  # a step of DEL, beside its rows


def kept(folder: Path) -> list[Path]:
    """The files of a model's results that an archive holds."""
    found = list(folder.glob(SEARCHED))
    for settings in folder.glob(f"runs/*/{SETTINGS}"):
        benchmark = json.loads(settings.read_bytes())["benchmark"]
        steps = settings.parent / "steps"
        found += [settings, *steps.glob(f"{benchmark}/[!.]*"), *steps.glob(f"{BEFORE}/[!.]*")]
    return sorted(found)


def without_texts(file: Path) -> bytes | None:
    """What an archive holds of a file; None of one that is left out."""
    data = file.read_bytes()
    if file.name == SETTINGS:
        settings: Any = json.loads(data)
        for scope in settings["scopes"].values():
            methods = scope["methods"].items()
            scope["methods"] = {label: how for label, how in methods if not has_texts(how[0])}
        return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    if file.suffix == ".json":
        return data
    body: Any = unpack(data)
    asked = body["inputs"]
    if has_texts(asked.get("what")) or has_texts(asked.get("method")):  # DEL has a label, and what
        return None
    if file.parent.name == BEFORE and any(row["suffix"] for row in body["value"]):
        body["value"] = [row | {"prefix": "", "suffix": ""} for row in body["value"]]
        return pack(body)
    return data


def has_texts(method: Any) -> bool:
    """Whether a method, as JSON has it, was given texts."""
    return isinstance(method, dict) and bool(method.get("texts"))


def write_archive(folder: Path, path: Path) -> None:
    """Write the archive of a model's results; of one that was brought the same bytes again."""
    parts = {file: without_texts(file) for file in kept(folder)}
    write_parts({file: data for file, data in parts.items() if data is not None}, folder, path)


def write_files(files: list[Path], folder: Path, path: Path) -> None:
    """Write an archive of files of a folder."""
    write_parts({file: file.read_bytes() for file in files}, folder, path)


def write_parts(parts: dict[Path, bytes], folder: Path, path: Path) -> None:
    """Write an archive of files of a folder with these contents."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in parts.items():
            name = file.relative_to(folder).as_posix()
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    write_whole(path, buffer.getvalue())


def bring(path: Path, folder: Path) -> None:
    """Put what an archive holds into a model's results, where it is not there yet."""
    if not path.is_file():
        return
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            target = folder / name
            if not target.exists():
                prepare_folder(target.parent)
                write_whole(target, archive.read(name))
