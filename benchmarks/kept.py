"""What was measured on other machines, beside the committed frames: a run goes on from it.

Days of computing rarely fit one machine. The archive of a model holds the rows of each part of the
plan, and the settings that its results folders agree on; no scores, no trained rows, which are
large, and no texts.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

from tl_localize.execution.store import SETTINGS
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


def write_archive(folder: Path, path: Path) -> None:
    """Write the archive of a model's results, the same bytes for the same files."""
    write_files(kept(folder), folder, path)


def write_files(files: list[Path], folder: Path, path: Path) -> None:
    """Write an archive of files of a folder."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            name = file.relative_to(folder).as_posix()
            archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)
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
