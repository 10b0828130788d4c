"""The data that users have: files of token ids and rows of named columns, as sequences of a model.

Tables are read by ``datasets``, JSON and token files by their own readers. Nothing is downloaded,
nothing is unpickled.
"""

import codecs
import glob
import json
import shutil
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int, Integer
from safetensors.torch import load_file
from torch import Tensor

from tl_localize.checks import check_count, nearest
from tl_localize.files import check_file, refuse_unreadable
from tl_localize.model.neurons import LanguageModel
from tl_localize.sequences import (
    MemorizedSequence,
    check_tokens,
    encode,
    tokenizer_of,
    with_bos,
    with_text,
)

MANUAL = ("prompt", "all")  # the authors' format, where "all" is the prompt and what follows
TOKENS = ("tokens", "token_ids", "input_ids")
PAIRS = (MANUAL, ("prefix", "suffix"), ("prompt", "completion"))
COLUMNS = (*PAIRS, *((name,) for name in (*TOKENS, "text", "definition")))
# What reads a file with rows.
KINDS = {".csv": "csv", ".parquet": "parquet", ".txt": "text"}
JSON = (".json", ".jsonl")
WHOLE_FILE = "path must be a whole {} file in UTF-8 with at least one row"
COLLECTED = "sequences.jsonl"  # in a folder of tl-localize collect
COLLECTED_COLUMNS = ("tokens", "prompt_len", "bos")  # of its rows, which hold the texts as well
TOKEN_FILES = (".npy", ".pt", ".safetensors")
N_PREFIX = 32  # the paper's
SHORT = 48  # tokens; a shorter text may be divided after its first third


@dataclass(frozen=True, eq=False)
class Entry:
    """A row: token ids, or a text and the part of it that prompts the model where that is known."""

    place: str  # as messages show it
    id: str
    category: str
    n_prefix: Any  # as the data or the row say
    tokens: Int[Tensor, " pos"] | None = None
    bos: str = ""  # the beginning-of-text token that the ids start with; n_prefix leaves it out
    text: str = ""
    prompt: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Rows of tokens or texts, with what tells a prefix from a suffix.

    A file holds token ids (``.npy``, ``.pt``, ``.safetensors``) or rows (JSON lines, CSV, parquet,
    one text a line). A row has a prefix and a suffix (columns ``prefix`` and ``suffix``, ``prompt``
    and ``completion``, or ``prompt`` and ``all``), or one column (``tokens``, ``token_ids``,
    ``input_ids``, ``text`` or ``definition``). Each column holds text or token ids.

    Args:
        source: Path of a file, of a folder of ``tl-localize collect``, of a saved data set or of a
            folder of parquet files; token ids [row pos]; a ``datasets.Dataset``; any iterable of
            texts, token ids or named columns.
        key: Column of the tokens or of the text, where it has another name.
        n_prefix: Tokens that prompt the model, or the column that has their number. By default
            what the rows say (a pair of columns, or a column ``n_prefix``), else 32.
        n_suffix: At most so many tokens that follow; by default all.
        id: Column of the sequences' ids, where it is not called ``id``.
        category: Column of their categories, where it is not called ``category``.
        name: Of the data in ids and records; by default the file's.

    Raises:
        ValueError: A count below 1.

    >>> row = '{"prompt": "Return the", "completion": " value of x.", "author": "me"}'
    >>> _ = (folder / "rows.jsonl").write_text(row)
    >>> list(Data(source=folder / "rows.jsonl", id="author").sequences(model))
    [MemorizedSequence('me', 2 prefix + 4 suffix tokens: 'Return the' | ' value of x.')]
    """

    source: Any
    key: str = ""
    n_prefix: int | str | None = None
    n_suffix: int | None = None
    id: str = ""
    category: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.n_prefix, str | None):
            check_count(n_prefix=self.n_prefix)
        if self.n_suffix is not None:
            check_count(n_suffix=self.n_suffix)
        if isinstance(self.source, str | Path):
            object.__setattr__(self, "source", Path(self.source).absolute())
        if not self.name:
            object.__setattr__(self, "name", self.path.name if self.path else "data")

    def __getstate__(self) -> dict[str, Any]:
        """On another machine the files are opened again, by their whole paths."""
        return {name: value for name, value in vars(self).items() if name != "opened"}

    @property
    def path(self) -> Path | None:
        return self.source if isinstance(self.source, Path) else None

    @cached_property
    def opened(self) -> Any:
        """Rows by their number, or an iterable whose rows are not counted."""
        if self.path is None:
            if isinstance(self.source, Mapping):
                raise ValueError(
                    f"source must be one split of a data set, got {', '.join(self.source)}. Pass "
                    "data[SPLIT]."
                )
            if hasattr(self.source, "with_format"):
                return self.source.with_format(None)
            return plain_rows(self.source)
        if self.path.is_dir():
            return self._folder(self.path)
        suffix = check_file(self.path).suffix
        if suffix in JSON:
            return read_json(self.path)
        if suffix in KINDS:
            return self._table(KINDS[suffix], [self.path])
        if suffix not in TOKEN_FILES:
            raise ValueError(
                f"path must end in one of {', '.join([*JSON, *KINDS, *TOKEN_FILES])}, got "
                f"{str(self.path)!r}. Save the texts as .txt, one a line, or as .jsonl, one row "
                'such as {"text": "..."} a line.'
            )
        return read_tokens(self.path)

    def _folder(self, path: Path) -> Any:
        import datasets

        if (path / COLLECTED).is_file():
            return read_json(check_file(path / COLLECTED))
        if (path / "state.json").is_file():
            with refuse_unreadable("path must be a whole saved data set", path):
                return datasets.load_from_disk(str(path))
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise ValueError(
                "data must be a folder of tl-localize collect, a saved data set or a folder of "
                f"parquet files, got {str(path)!r}. Name one split, or a file."
            )
        return self._table("parquet", files)

    def _table(self, kind: str, paths: list[Path]) -> Any:
        """A ``datasets.Dataset`` of local files.

        Its cache is a temporary folder that goes with these data, so no old copy is ever read.
        """
        import datasets

        cache = mkdtemp(prefix="tl-localize-")
        weakref.finalize(self, shutil.rmtree, cache, ignore_errors=True)
        names = [glob.escape(str(check_file(path))) for path in paths]
        how: dict[str, Any] = {}
        with refuse_unreadable(WHOLE_FILE.format(kind), paths[0], "Mend it."):
            if kind == "csv":  # an id 001 is no number, and a text None is a text
                first = pd.read_csv(paths[0], nrows=1, dtype=str, keep_default_na=False)
                if not isinstance(first.index, pd.RangeIndex):  # pandas drops what is too much
                    raise ValueError(
                        "a row has more fields than the header: texts that hold commas need quotes"
                    )
                as_text = dict.fromkeys(first.columns, datasets.Value("string"))
                how["features"] = datasets.Features(as_text)
                how["keep_default_na"] = False
            if kind == "text":
                how["encoding"] = "utf-8-sig"  # without the mark that some editors put first
            return getattr(datasets.Dataset, f"from_{kind}")(names, cache_dir=cache, **how)

    @property
    def size(self) -> int | None:
        """The number of rows; None of a stream."""
        return len(self.opened) if hasattr(self.opened, "__len__") else None

    def entries(self, first: int = 0, end: int | None = None) -> Iterator[Entry]:
        """The rows of a range."""
        for i, row in enumerate(self._rows(first, end), first):
            yield self._entry(row, f"row {i} of {str(self.path or self.name)!r}")

    def _rows(self, first: int, end: int | None) -> Iterator[Any]:
        if self.size is None:
            yield from islice(self.opened, first, end)
            return
        with refuse_unreadable("data must be whole, and in UTF-8", self.path or Path(self.name)):
            for i in range(self.size)[first:end]:
                yield self.opened[i]

    def _entry(self, row: Any, place: str) -> Entry:
        if not isinstance(row, Mapping):
            row = {"text" if isinstance(row, str) else "tokens": row}
        row = {name: value for name, value in row.items() if not _is_missing(value)}
        if not self.key and row.keys() >= set(COLLECTED_COLUMNS):  # its texts are not read again
            kept = ("id", "category", "tokens", "bos")
            row = {name: row[name] for name in kept if name in row} | {
                "n_prefix": row["prompt_len"]
            }
        names = self._columns(row, place)
        id = _column(row, self.id, place) if self.id else row.get("id", "")
        named = _column(row, self.category, place) if self.category else row.get("category", "")
        # of the manual set it is a list
        category = next(iter(named), "") if isinstance(named, list) else named
        n_prefix = self.n_prefix
        if n_prefix is None:
            n_prefix = _count(row.get("n_prefix"), "n_prefix", place)
        elif isinstance(n_prefix, str):
            n_prefix = _count(_column(row, n_prefix, place), f"n_prefix (column {n_prefix})", place)
        parts = [row[name] for name in names]
        for name, part in zip(names, parts, strict=True):
            if not hasattr(part, "__len__"):
                _token_ids(name, part, place)  # says what it must be
        if names == MANUAL:
            parts[1] = _after_prompt(parts[0], parts[1], place)
        if len(parts) == 2 and not len(parts[0]):
            raise ValueError(f"{names[0]} must prompt the model, got nothing at {place}.")
        if names[0] in TOKENS or not all(isinstance(part, str) for part in parts):
            ids = [_token_ids(name, part, place) for name, part in zip(names, parts, strict=True)]
            if len(ids) == 2 and n_prefix is None:
                n_prefix = len(ids[0])
            bos = row.get("bos")
            bos = bos if isinstance(bos, str) else ""  # a column of that name may be another thing
            return Entry(place, str(id), str(category), n_prefix, torch.cat(ids), bos)
        prompt = parts[0] if len(parts) == 2 else ""
        return Entry(place, str(id), str(category), n_prefix, text="".join(parts), prompt=prompt)

    def _columns(self, row: Mapping[str, Any], place: str) -> tuple[str, ...]:
        """The column that is named, or those of the known ones that the row has."""
        if self.key:
            _column(row, self.key, place)
            return (self.key,)
        found = [names for names in COLUMNS if row.keys() >= set(names)]
        if not found or (len(found) > 1 and found[0] != MANUAL):
            known = "; ".join(" and ".join(names) for names in COLUMNS)
            raise ValueError(
                f"row must have columns of tokens or text once ({known}), got only {sorted(row)} "
                f"at {place}. Name the column that counts with key."
            )
        return found[0]

    def sequences(
        self, model: LanguageModel, *, third_of_short: bool = False
    ) -> Iterator[MemorizedSequence]:
        """A sequence for each row, as the model's tokenizer reads it: texts with the
        beginning-of-text token where it puts one first, which no count includes.

        Where no column has ids they are ``sequence-0000`` and so on.

        Args:
            third_of_short: The prefix of a text of less than 48 tokens is its first third, where
                neither the data nor the row say what it is.

        Raises:
            ValueError: A row is broken or too short, or holds tokens outside the vocabulary.
        """
        rows = (entry for entry in self.entries() if entry.tokens is not None or entry.text.strip())
        for i, entry in enumerate(rows):
            try:
                yield self._sequence(model, entry, i, third_of_short)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{error} (at {entry.place})") from error

    def _sequence(
        self, model: LanguageModel, entry: Entry, number: int, third_of_short: bool
    ) -> MemorizedSequence:
        tokens, n_prefix = entry.tokens, entry.n_prefix
        if entry.prompt and n_prefix is None:
            parts = entry.prompt, entry.text[len(entry.prompt) :]
            pair = MemorizedSequence.from_text(model, *parts, prepend_bos=False)
            tokens, n_prefix = pair.tokens, pair.n_prefix
        elif tokens is None:
            tokens = torch.tensor(encode(tokenizer_of(model), entry.text), dtype=torch.long)
        if n_prefix is None and third_of_short and len(tokens) < SHORT:
            n_prefix = max(1, len(tokens) // 3)
        id = entry.id or numbered(number)
        length = N_PREFIX if n_prefix is None else n_prefix
        if entry.bos:
            length += 1
        if n_prefix is None and len(tokens) <= length:
            raise ValueError(
                f"text must be longer than its prefix, {N_PREFIX} tokens where nothing else is "
                f"said, got {len(tokens)}. Give n_prefix (--n-prefix), or rows with a prefix and a "
                "suffix."
            )
        sequence = MemorizedSequence(tokens, length, id, entry.category, bos=entry.bos)
        check_tokens(model, sequence.tokens)
        if self.n_suffix is not None:
            end = sequence.n_prefix + self.n_suffix
            sequence = replace(sequence, tokens=sequence.tokens[:end])
        sequence = with_text(model, sequence)
        return sequence if entry.tokens is not None else with_bos(model, sequence)


def plain_rows(source: Any) -> Any:
    """Rows by their number where they are all at hand, else the iterable as it is."""
    if isinstance(source, pd.DataFrame):
        return source.to_dict("records")
    at_hand = hasattr(source, "__len__")
    if isinstance(source, pd.Series) or (at_hand and not hasattr(source, "__getitem__")):
        return list(source)
    return source


class JsonLines:
    """The rows of a file of JSON lines by their number: each line is read when it is asked for, so
    that a file may be larger than the memory, and rows may have different columns.

    Args:
        path: each line of it is parsed once, so that a broken one is found before any row is used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        starts: list[int] = []
        with path.open("rb") as file:
            for line in iter(file.readline, b""):
                if line.strip().removeprefix(codecs.BOM_UTF8):
                    _json_row(line)
                    starts.append(file.tell() - len(line))
        self.starts = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self.starts[index])
            return _json_row(file.readline())


def _json_row(line: bytes) -> dict[str, Any]:
    row = json.loads(line.decode("utf-8-sig"))
    if not isinstance(row, dict):
        raise ValueError(f"a row must have named columns, got {str(row)[:40]}")
    return cast(dict[str, Any], row)


def read_json(path: Path) -> JsonLines | list[Any]:
    """The rows of a file of JSON lines, or of one list."""
    with refuse_unreadable(WHOLE_FILE.format("json"), path, "Mend it."):
        with path.open("rb") as file:
            start = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
        if start.startswith(b"["):
            rows = json.loads(path.read_text(encoding="utf-8-sig"))
        else:
            rows = JsonLines(path)
        if not len(rows):
            raise ValueError("it has no row")
        return rows


def numbered(number: int) -> str:
    """The id of a row that has none."""
    return f"sequence-{number:04d}"


def read_sequences(
    source: Any, model: LanguageModel, **options: Any
) -> Iterator[MemorizedSequence]:
    """The memorized sequences of a file or data set, one at a time: ``Data(source=source,
    **options).sequences(model)``.

    >>> tokens = torch.stack([sequence.tokens for sequence in few])
    >>> np.save(folder / "tokens.npy", tokens.numpy())
    >>> next(read_sequences(folder / "tokens.npy", model, n_prefix=40))
    MemorizedSequence('sequence-0000', 40 prefix + 8 suffix tokens: ...)
    """
    return Data(source=source, **options).sequences(model)


def read_tokens(path: str | Path) -> Integer[Tensor, "sequence pos"]:
    """Token ids from a ``.npy``, ``.pt`` or ``.safetensors`` file, mapped into memory.

    A corpus may be larger than memory. A ``.pt`` file is read with ``weights_only=True``, so it
    can't run code. A safetensors file holds one tensor, or one named ``tokens``. Changes of the
    result never reach the file.

    Returns:
        [sequence pos] in the file's own integer type.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file of another kind, a damaged one, or no batch of token ids inside.

    >>> np.save(folder / "tokens.npy", np.array([[5, 6, 7]], dtype=np.uint16))
    >>> read_tokens(folder / "tokens.npy")
    tensor([[5, 6, 7]], dtype=torch.uint16)
    """
    path = check_file(path)
    with refuse_unreadable(
        "path must be a whole .npy file of one tensor, or .pt or .safetensors", path
    ):
        if path.suffix == ".npy":
            # "c": pages are read when they are touched, and a write goes to memory, not to the
            # file. Torch asks for arrays that can be written.
            tokens = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        elif path.suffix == ".pt":
            tokens = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            tensors = load_file(path)
            tokens = tensors["tokens"] if len(tensors) > 1 else next(iter(tensors.values()))
        whole = torch.can_cast(tokens.dtype, torch.long) and tokens.dtype != torch.bool
        if not whole or tokens.ndim != 2 or not tokens.numel():
            raise ValueError(
                f"tokens must be integers of shape [sequence pos], got {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}; one sequence is tokens[None]"
            )
    return tokens


def _is_missing(value: Any) -> bool:
    """Whether a table has nothing in a cell: pandas has several values for it."""
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))


def _after_prompt(prompt: Any, whole: Any, place: str) -> Any:
    """What follows the prompt in a text, or in a row of ids, that begins with it."""
    if list(whole[: len(prompt)]) != list(prompt):
        raise ValueError(
            f"all must begin with the prompt, got {whole!r:.40} after {prompt!r:.40} at {place}. "
            "Name the columns prefix and suffix where the second one does not repeat the first."
        )
    return whole[len(prompt) :]


def _token_ids(name: str, value: Any, place: str) -> Int[Tensor, " pos"]:
    """A row of token ids as int64."""
    ids = np.asarray(value)
    if ids.shape == (0,):  # numpy has it of floats
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        kind = "" if name in TOKENS else "text or "
        raise ValueError(
            f"{name} must be {kind}a list of whole numbers, got {value!r:.40} at {place}. Save "
            "the ids that the tokenizer gives, as lists in .jsonl or .parquet."
        )
    return torch.from_numpy(ids.astype(np.int64))


def _count(value: Any, name: str, place: str) -> Any:
    """A number that a table may hold as text, or as 3.0 where other cells are empty; None where
    the cell is empty.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    try:
        return int(text.removesuffix(".0")) if text else None
    except ValueError as error:
        raise ValueError(
            f"{name} must be a number of tokens, got {value!r:.40} at {place}. Mend the row, or "
            "name another column."
        ) from error


def _column(row: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in row:
        raise ValueError(
            f"row must have the column {name!r}, got only {sorted(row)} at "
            f"{place}.{nearest(name, row)}"
        )
    return row[name]
