"""Files and data sets as rows: opened by what is in them, read a part at a time, never unpickled.

A row is a text (str), a vector of token ids (Tensor) or named columns (Mapping). A place says where
it is, for messages.
"""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from tl_localize.files import load_tensors, reading

Row = str | Tensor | Mapping[str, Any]

# how files begin
MAGIC = {b"\x93NUMPY": ".npy", b"PK\x03\x04": ".pt", b"\x80": ".pt", b"PAR1": ".parquet"}
SAMPLE = 4096  # bytes of a range that are part of its key
ROWS_AT_ONCE = 256  # of a table, in memory
INSTALL = 'Run pip install "tl_localize[data]".'


class Source(ABC):
    """Rows of a file or a data set; ``size`` counts them, or bytes where ``in_bytes``."""

    in_bytes = False
    size: int

    @abstractmethod
    def rows(self, first: int = 0, end: int | None = None) -> Iterator[tuple[object, Row]]:
        """Place and row of each row of a range; in bytes, of each line that begins in the range."""

    def sample(self, first: int, end: int) -> bytes:
        """What stands for the content of a range in a key: its first row or 4 KiB; of rows that are
        given, all.
        """
        return repr([row for _, row in self.rows(first, min(first + 1, end))]).encode(
            errors="surrogatepass"
        )


@dataclass(frozen=True)
class Line:
    """A line by the byte where it begins; its number is counted when a message shows it."""

    path: Path
    start: int

    def __str__(self) -> str:
        with self.path.open("rb") as file:
            before = takewhile(lambda end: end <= self.start, accumulate(map(len, file)))
            return f"{self.path}, line {1 + sum(1 for _ in before)}"


class Lines(Source):
    """A text file: one JSON object a line, or one text a line."""

    in_bytes = True

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self.objects = path.suffix == ".jsonl" or _is_object(
            next((line for _, line in self._lines(0, None) if line.strip()), "")
        )

    def rows(self, first: int = 0, end: int | None = None) -> Iterator[tuple[object, Row]]:
        for place, text in self._lines(first, end):
            if not self.objects:
                yield place, text.rstrip("\r\n")
            elif text.strip():
                yield place, _object(text, place)

    def sample(self, first: int, end: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(first)
            return file.read(min(SAMPLE, end - first))

    def _lines(self, first: int, end: int | None) -> Iterator[tuple[Line, str]]:
        with self.path.open("rb") as file:
            if first:
                file.seek(first - 1)
                file.readline()
            start = file.tell()
            for raw in file:
                if end is not None and start >= end:
                    return
                place = Line(self.path, start)
                try:
                    yield place, raw.decode("utf-8-sig" if not start else "utf-8")
                except UnicodeDecodeError as error:
                    bad = raw[error.start : error.start + 4]
                    raise ValueError(
                        f"path must be UTF-8 text, got the bytes {bad!r} at {place}. Convert it to "
                        "UTF-8."
                    ) from error
                start += len(raw)


class Tokens(Source):
    """Token ids that are given, or mapped from files: [row pos], those of some files side by side."""

    def __init__(self, *parts: Integer[Tensor, "row _"], files: Sequence[str | Path] = ()) -> None:
        self.parts, self.name, self.size = parts, " + ".join(map(str, files)), len(parts[0])
        self.files = {
            path: path.stat().st_size for path in (Path(path).absolute() for path in files)
        }

    def rows(self, first: int = 0, end: int | None = None) -> Iterator[tuple[object, Row]]:
        for i in range(first, self.size if end is None else min(end, self.size)):
            yield f"row {i} of {self.name or 'the tokens'}", self.block(i, i + 1)[0]

    def sample(self, first: int, end: int) -> bytes:
        shown = (
            end
            if not self.files
            else min(end, first + 1 + SAMPLE // sum(part[0].nbytes for part in self.parts))
        )
        return bytes_of(self.block(first, shown))

    def block(self, first: int, end: int) -> Integer[Tensor, "row pos"]:
        """Some rows; of a single file without a copy. ValueError where a file has become shorter:
        its pages are gone, and a touch kills.
        """
        for path, size in self.files.items():
            if (now := path.stat().st_size) < size:
                rule = "path must stay as it is while it is read"
                raise ValueError(
                    f"{rule}, got {str(path)!r} with {now} bytes of {size}. Restore it, and give "
                    "the same command."
                )
        blocks = [part[first:end] for part in self.parts]
        return blocks[0] if len(blocks) == 1 else torch.cat([block.long() for block in blocks], 1)


class Parquet(Source):
    """Parquet files one after the other. The batch in hand is kept, for a search goes forward
    within row groups that may be large.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.groups: list[tuple[Path, int, bytes]] = []
        self.starts = [0]  # of the row groups, and the end
        parquet = _imported("pyarrow.parquet")
        for path in paths:
            with reading("path must be a whole parquet file", path):
                about: Any = parquet.read_metadata(path)
            for i in range(about.num_row_groups):
                self.groups.append((path, i, repr(about.row_group(i).to_dict()).encode()))
                self.starts.append(self.starts[-1] + about.row_group(i).num_rows)
        self.size, self.group, self.start = self.starts[-1], -1, 0

    def sample(self, first: int, end: int) -> bytes:
        """What the file says of the row group, for to read a row is to decode all before it."""
        return self.groups[bisect_right(self.starts, first) - 1][-1]

    def rows(self, first: int = 0, end: int | None = None) -> Iterator[tuple[object, Row]]:
        end = self.size if end is None else min(end, self.size)
        while first < end:
            batch, path = self._batch_with(first)
            part = batch.slice(first - self.start, end - first).to_pylist()
            yield from ((f"row {i} of {path}", row) for i, row in enumerate(part, first))
            first += len(part)

    def _batch_with(self, row: int) -> tuple[Any, Path]:
        group = bisect_right(self.starts, row) - 1
        path, number, _ = self.groups[group]
        if group != self.group or row < self.start:
            self.group, self.start, self.batches = group, self.starts[group], _batches(path, number)
            self.batch = next(self.batches)
        while row >= self.start + len(self.batch):
            self.start += len(self.batch)
            self.batch = next(self.batches)
        return self.batch, path


def _batches(path: Path, group: int) -> Iterator[Any]:
    parquet = _imported("pyarrow.parquet")
    with reading("path must be a whole parquet file", path), parquet.ParquetFile(path) as file:
        yield from file.iter_batches(ROWS_AT_ONCE, row_groups=[group])


class Table(Source):
    """A ``datasets.Dataset``, which maps its rows from the disk."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.size = dataset.with_format(None), len(dataset)

    def rows(self, first: int = 0, end: int | None = None) -> Iterator[tuple[object, Row]]:
        end = self.size if end is None else min(end, self.size)
        for start in range(first, end, ROWS_AT_ONCE):
            part: dict[str, list[Any]] = self.dataset[start : min(start + ROWS_AT_ONCE, end)]
            for i, values in enumerate(zip(*part.values(), strict=True), start):
                yield f"row {i} of the data set", dict(zip(part, values, strict=True))


class Stream(Source):
    """Rows that come one after the other and are not counted, such as those of a
    ``datasets.IterableDataset``.
    """

    def __init__(self, rows: Iterable[Any]) -> None:
        self.given, self.size = rows, sys.maxsize

    def rows(self, first: int = 0, end: int | None = None) -> Iterator[tuple[object, Row]]:
        for i, row in enumerate(islice(self.given, first, end), first):
            yield (
                f"row {i} of the data",
                row
                if isinstance(row, str | Mapping)
                else as_token_ids(row, f"row {i} of the data"),
            )


def open_source(data: Any) -> Source:
    """The rows of a path, token ids [row pos], a data set, or an iterable of rows; a file is told
    by its first bytes.

    Raises:
        FileNotFoundError; ValueError: something else, or a damaged file; ImportError: what reads it
            is not installed.
    """
    if isinstance(data, str | Path):
        return _open_path(Path(data))
    if isinstance(data, Tensor):
        return Tokens(data)
    if isinstance(data, Mapping):
        raise ValueError(
            f"data must be one split of a data set, got a {type(data).__name__} of "
            f"{', '.join(data)}. Pass data[SPLIT]."
        )
    return (
        Table(data) if hasattr(data, "with_format") and hasattr(data, "__len__") else Stream(data)
    )


def _open_path(path: Path) -> Source:
    if path.is_dir():
        if (path / "state.json").is_file():
            datasets = _imported("datasets")
            with reading("path must be a whole saved data set", path):
                return Table(datasets.load_from_disk(str(path)))
        if files := sorted(path.glob("*.parquet")):
            return Parquet(files)
        splits = [file.parent.name for file in sorted(path.glob("*/state.json"))]
        found = (
            f"one with the splits {', '.join(splits)}. Name a split's folder"
            if splits
            else "another folder. Name a file"
        )
        raise ValueError(
            f"data must be a saved data set or a folder of parquet files, got {str(path)!r}, "
            f"{found}."
        )
    kind = kind_of(path)
    if kind == ".csv":
        raise ValueError(
            f"data must be texts or tokens, got the table {str(path)!r}. A CSV of index and score "
            "goes to scores (--scores)."
        )
    if kind == ".parquet":
        return Parquet([path])
    return Tokens(read_tokens(path), files=[path]) if kind in READERS else Lines(path)


def holds_data(folder: Path) -> bool:
    """Whether a folder holds a saved data set, or the splits of one, or parquet files."""
    return any(
        next(folder.glob(pattern), None) for pattern in ("state.json", "*/state.json", "*.parquet")
    )


def kind_of(path: Path) -> str:
    """What is in a file, as the suffix that it should have: by its first bytes, or by its suffix
    where they say nothing.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"path must be an existing file, got {str(path)!r}. Check the spelling."
        )
    with path.open("rb") as file:
        start = file.read(9)
    # the length of a safetensors header, and the header
    if start[8:] == b"{" and start[7:8] == b"\0":
        return ".safetensors"
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), path.suffix)


def read_tokens(path: str | Path) -> Integer[Tensor, "sequence pos"]:
    """Token ids from a ``.npy``, ``.pt`` or ``.safetensors`` file, mapped into memory: a corpus may
    be larger than memory.

    A ``.pt`` file is read with ``weights_only=True``, so it can't run code; torch's old format
    can't be mapped and is read whole. A safetensors file holds one tensor, or one named ``tokens``.
    Changes of the result never reach the file.

    Returns:
        [sequence pos] in the file's own integer type.

    Raises:
        FileNotFoundError; ValueError: a file of another kind, a damaged one, or no batch of token
            ids inside.

    >>> np.save(folder / "tokens.npy", np.array([[5, 6, 7]], dtype=np.uint16))
    >>> read_tokens(folder / "tokens.npy")
    tensor([[5, 6, 7]], dtype=torch.uint16)
    """
    path = Path(path)
    if (kind := kind_of(path)) not in READERS:
        raise ValueError(
            f"path must be a file of tokens ({', '.join(READERS)}), got {str(path)!r}. Read other "
            "files with read_sequences."
        )
    tokens = READERS[kind](path)
    if (
        tokens.is_floating_point()
        or tokens.is_complex()
        or tokens.dtype == torch.bool
        or tokens.ndim != 2
        or not tokens.numel()
    ):
        raise ValueError(
            f"tokens must be integers of shape [sequence pos], got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)} in {str(path)!r}. "
            "Save a batch of token ids (one sequence is tokens[None])."
        )
    return tokens


def as_token_ids(value: Any, place: object) -> Integer[Tensor, " pos"]:
    """A row of token ids as int64; ValueError where it is something else."""
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of different lengths inside
        ids = np.empty((0, 0), dtype=object)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        got = (
            f"{value!r:.40}"
            if ids.ndim != 1 or not len(ids)
            else f"{ids.dtype} such as {ids[0]!r:.20}"
        )
        raise ValueError(
            f"tokens must be a list of whole numbers, got {got} at {place}. Save the ids that the "
            "tokenizer gives."
        )
    return torch.from_numpy(ids.astype(np.int64))


def bytes_of(rows: Integer[Tensor, "row pos"]) -> bytes:
    return rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _object(text: str, place: object) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python's limits
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(
            f"line must be a JSON object, got {text.strip()[:40]!r} at {place} ({why}). Correct "
            "the line."
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"line must be a JSON object, got a {type(row).__name__} at {place}. Write {{...}} on "
            "each line."
        )
    return row


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _imported(name: str) -> Any:
    """A module that only some kinds of files need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name.partition('.')[0]} must be installed to read this file, got: {error}. {INSTALL}"
        ) from error


def _read_npy(path: Path) -> Tensor:
    with reading("path must be a whole .npy file of integers", path):
        # "c": pages are read when touched, and a write would go to memory, not to the file. Torch
        # asks for arrays that can be written.
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))


def _read_pt(path: Path) -> Tensor:
    advice = "Nothing else is unpickled: save the tensor alone with torch.save."
    with reading("path must be a whole .pt file of one plain tensor", path, advice):
        tokens: Any = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    if (
        not isinstance(tokens, Tensor)
        or tokens.is_nested
        or tokens.is_sparse
        or tokens.is_quantized
        or tokens.is_meta
    ):
        what = (
            "special Tensor (nested, sparse, quantized or meta)"
            if isinstance(tokens, Tensor)
            else type(tokens).__name__
        )
        raise ValueError(
            f"path must be a .pt file of one plain tensor, got a {what} in {str(path)!r}. Save it "
            "alone."
        )
    return tokens


def _read_safetensors(path: Path) -> Tensor:
    tensors, _ = load_tensors(path)
    if len(tensors) != 1 and "tokens" not in tensors:
        raise ValueError(
            f"path must hold one tensor or one named 'tokens', got {sorted(tensors)} in "
            f"{str(path)!r}. Save the tokens alone."
        )
    return tensors["tokens"] if "tokens" in tensors else next(iter(tensors.values()))


READERS = {".npy": _read_npy, ".pt": _read_pt, ".safetensors": _read_safetensors}
