"""The data that users have: files of token ids and rows of named columns, as sequences of a model.

Rows are read by ``datasets``, token files by their own readers. Nothing is downloaded, nothing is
unpickled.
"""

from __future__ import annotations

import glob
import weakref
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Integer
from safetensors.torch import load_file
from torch import Tensor

from tl_localize.files import nearest, reading
from tl_localize.neurons import LanguageModel, check_count
from tl_localize.sequences import (
    MemorizedSequence,
    check_tokens,
    encode,
    text_parts,
    tokenizer_of,
    with_bos,
)

MANUAL = ("prompt", "all")  # the authors' format, where "all" is the prompt and what follows
PAIRS = (MANUAL, ("prefix", "suffix"), ("prompt", "completion"))
TOKENS = ("tokens", "token_ids", "input_ids")
COLUMNS = (*PAIRS, *((name,) for name in (*TOKENS, "text", "definition")))
# What reads a file with rows.
KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
N_PREFIX = 32  # the paper's
CHECKED = 32  # first rows whose tokens are decoded and encoded again
CHECKED_TOKENS = 256  # of each
MIN_JUDGED = 4  # of these rows, else nothing is said
# share of them that comes back: 0.998 of a model's own tokens, 0.83 to 0.88 of another tokenizer's
# (GPT-2's and Pythia's)
MIN_SAME = 0.95


@dataclass(frozen=True, eq=False)
class Entry:
    """A row: token ids, or a text and the part of it that prompts the model where that is known."""

    place: str  # as messages show it
    tokens: Int[Tensor, " pos"] | None = None
    text: str = ""
    prompt: str | None = None
    n_prefix: Any = None  # as the row says
    id: str = ""
    category: str = ""


class Tokens:
    """Rows of token ids in memory or mapped from files; two parts are prefixes and suffixes."""

    def __init__(self, *parts: Integer[Tensor, "_ _"], files: Sequence[Path] = ()) -> None:
        self.parts = parts
        self.sizes = {path: path.stat().st_size for path in files}
        if len({len(part) for part in parts}) > 1:
            counts = " and ".join(str(len(part)) for part in parts)
            raise ValueError(
                f"prefix and suffix files must have as many rows, got {counts}. They must be of "
                "one data set."
            )

    def __len__(self) -> int:
        return len(self.parts[0])

    def select(self, indices: range) -> Iterator[Mapping[str, Tensor]]:
        """Some rows, as a ``datasets.Dataset`` gives them.

        Raises:
            ValueError: A file has become shorter. To touch its missing pages would end the process.
        """
        names = ("tokens",) if len(self.parts) == 1 else ("prefix", "suffix")
        for i in indices:
            if any(path.stat().st_size < size for path, size in self.sizes.items()):
                raise ValueError("a file that has become shorter")
            yield {name: part[i] for name, part in zip(names, self.parts, strict=True)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Rows of tokens or texts, with what tells a prefix from a suffix.

    A file holds token ids (``.npy``, ``.pt``, ``.safetensors``) or rows (JSON lines, CSV, parquet,
    one text a line). A row has a prefix and a suffix (columns ``prefix`` and ``suffix``, ``prompt``
    and ``completion``, or ``prompt`` and ``all``), or one column (``tokens``, ``token_ids``,
    ``input_ids``, ``text`` or ``definition``). Each column holds text or token ids.

    Args:
        source: Path of a file, of a saved data set or of a folder of parquet files; token ids
            [row pos]; a ``datasets.Dataset``; any iterable of texts, token ids or named columns.
        key: Column of the tokens or of the text, where it has another name.
        n_prefix: Tokens that prompt the model, or the column that has their number. By default
            what the rows say, else 32.
        n_suffix: Tokens that follow; by default all.
        suffix: Token file whose rows follow those of ``source``, which then holds prefixes alone.
        id: Column of the sequences' ids.
        category: Column of their categories.
        any_tokens: Also tokens that the model's tokenizer would not make of their text, such as
            random ones.
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
    suffix: str | Path | None = None
    id: str = ""
    category: str = ""
    any_tokens: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("n_prefix", "n_suffix"):
            count = getattr(self, name)
            if not isinstance(count, str | None):
                check_count(**{name: count})
        for name in ("source", "suffix"):
            path = getattr(self, name)
            if isinstance(path, str | Path):
                object.__setattr__(self, name, Path(path).absolute())
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
        """Rows of tokens, a ``datasets.Dataset``, or an iterable whose rows are not counted."""
        if self.suffix is not None:
            files = [Path(self.source), Path(self.suffix)]
            return Tokens(*map(read_tokens, files), files=files)
        if self.path is not None:
            return _open(self.path)
        if isinstance(self.source, Tensor):
            return Tokens(self.source)
        if isinstance(self.source, Mapping):
            raise ValueError(
                "source must be one split of a data set, got a "
                f"{type(self.source).__name__} of {', '.join(self.source)}. Pass data[SPLIT]."
            )
        return self.source.with_format(None) if hasattr(self.source, "select") else self.source

    @property
    def size(self) -> int | None:
        """The number of rows; None of a stream."""
        return len(self.opened) if hasattr(self.opened, "select") else None

    def entries(self, first: int = 0, end: int | None = None) -> Iterator[Entry]:
        """The rows of a range."""
        for i, row in enumerate(self._rows(first, end), first):
            yield self._entry(row, f"row {i} of {str(self.path or self.name)!r}")

    def _rows(self, first: int, end: int | None) -> Iterator[Any]:
        if self.size is None:
            yield from islice(self.opened, first, end)
        else:
            last = self.size if end is None else min(end, self.size)
            with reading("data must be whole, and in UTF-8", self.path or Path(self.name)):
                yield from self.opened.select(range(first, last))

    def _entry(self, row: Any, place: str) -> Entry:
        if not isinstance(row, Mapping):
            row = {"text" if isinstance(row, str) else "tokens": row}
        row = {name: value for name, value in row.items() if value is not None}
        names = self._columns(row, place)
        about: dict[str, Any] = {"category": row.get("category", "") if names == MANUAL else ""}
        for field in ("id", "category", "n_prefix"):
            column = getattr(self, field)
            if column and isinstance(column, str):
                about[field] = _column(row, column, place)
        about |= {"id": str(about.get("id", "")), "category": _first(about["category"])}
        if names[0] in TOKENS or not isinstance(row[names[0]], str):
            parts = [_token_ids(name, row[name], place) for name in names]
            if len(parts) == 2:
                about.setdefault("n_prefix", len(parts[0]))
            return Entry(place, torch.cat(parts), **about)
        texts = [_text(name, row[name], place) for name in names]
        if names == MANUAL:
            prompt, text = texts
            if not text.startswith(prompt):
                raise ValueError(
                    f"all must begin with prompt, got {text[:20]!r} after the prompt "
                    f"{prompt[:20]!r} at {place}. Correct the row."
                )
            texts[1] = text[len(prompt) :]
        prompt = texts[0] if len(texts) == 2 else None
        return Entry(place, None, "".join(texts), prompt, **about)

    def _columns(self, row: Mapping[str, Any], place: str) -> tuple[str, ...]:
        """The column that is named, or those of the known ones that the row has."""
        if self.key:
            _column(row, self.key, place)
            return (self.key,)
        found = [names for names in COLUMNS if all(name in row for name in names)]
        if not found:
            known = [" and ".join(names) for names in COLUMNS]
            raise ValueError(
                f"row must have columns of tokens or text ({'; '.join(known)}), got only "
                f"{sorted(row)} at {place}. Name one with key."
            )
        if len(found) > 1 and found[0] != MANUAL:
            names = ", ".join(name for names in found for name in names)
            raise ValueError(
                f"row must have the tokens or the text once, got {names} at {place}. Name the one "
                "that counts with key."
            )
        return found[0]

    def sequences(self, model: LanguageModel) -> Iterator[MemorizedSequence]:
        """A sequence for each row, as the model's tokenizer reads it: texts with the
        beginning-of-text token where it puts one first, which no count includes.

        Where no column has ids they are ``sequence-0000`` and so on.

        Raises:
            ValueError: A row is broken, has another length than the first (unless ``n_suffix`` or a
                column of ``n_prefix`` is given), or holds tokens of another tokenizer; there are no
                rows.
        """
        length: int | None = None
        n = 0
        for n, entry in enumerate(self.checked(model), 1):
            if entry.tokens is not None and entry.n_prefix is None and self.n_suffix is None:
                length = length or len(entry.tokens)
                if len(entry.tokens) != length:
                    raise ValueError(
                        f"rows must have {length} tokens, as the first one, got "
                        f"{len(entry.tokens)} at {entry.place}. Cut them with n_suffix, or name "
                        "the column of each row's prefix length with n_prefix."
                    )
            try:
                yield self._sequence(model, entry, entry.id or f"sequence-{n - 1:04d}")
            except (TypeError, ValueError) as error:
                raise ValueError(f"{error} (at {entry.place})") from error
        if n == 0:
            raise ValueError(
                f"data must hold at least one row, got none in {self.name!r}. Check how it was "
                "made."
            )

    def _sequence(self, model: LanguageModel, entry: Entry, id: str) -> MemorizedSequence:
        n_prefix = self.n_prefix if isinstance(self.n_prefix, int) else entry.n_prefix
        text, tokens = entry.text, entry.tokens
        if entry.prompt is not None and n_prefix is None:
            rest = text[len(entry.prompt) :]
            one = MemorizedSequence.from_text(model, entry.prompt, rest, prepend_bos=False)
            tokens, n_prefix = one.tokens, one.n_prefix
        elif tokens is None:
            tokens = torch.tensor(encode(tokenizer_of(model), text), dtype=torch.long)
        one = MemorizedSequence(tokens, n_prefix or N_PREFIX, id, entry.category)
        if self.n_suffix is not None:
            length = one.n_prefix + self.n_suffix
            if len(one) < length:
                raise ValueError(
                    f"row must have n_prefix + n_suffix = {length} tokens, got {len(one)}. Lower "
                    "n_suffix."
                )
            one, text = replace(one, tokens=one.tokens[:length]), ""
        one = replace(one, text=text_parts(model, one.tokens.tolist(), one.n_prefix, text))
        return one if entry.tokens is not None else with_bos(model, one)

    def checked(self, model: LanguageModel) -> Iterator[Entry]:
        """The rows without the blank lines of a text file.

        Raises:
            ValueError: Tokens outside the vocabulary, or of another tokenizer.
        """
        lines = self.path is not None and self.path.suffix == ".txt"
        entries = (one for one in self.entries() if not lines or one.text.strip())
        known = (_in_vocabulary(model, one) for one in entries)
        first = list(islice(known, CHECKED))
        if not self.any_tokens:
            rows = [one.tokens[:CHECKED_TOKENS].tolist() for one in first if one.tokens is not None]
            _check_tokenizer(model, rows)
        return chain(first, known)


def read_sequences(
    source: Any, model: LanguageModel, **options: Any
) -> Iterator[MemorizedSequence]:
    """The memorized sequences of a file or data set, one at a time: ``Data(source=source,
    **options).sequences(model)``.

    >>> np.save(folder / "tokens.npy", torch.stack([one.tokens for one in few]).numpy())
    >>> next(read_sequences(folder / "tokens.npy", model, n_prefix=50))
    MemorizedSequence('sequence-0000', 50 prefix + 30 suffix tokens: ...)
    """
    return Data(source=source, **options).sequences(model)


def stacked_tokens(
    source: Any, model: LanguageModel, n_max: int = 2048
) -> Integer[Tensor, "sequence pos"]:
    """Rows of tokens as one tensor: all of a token file, mapped; of other data at most ``n_max``
    rows, which must have one length.

    >>> stacked_tokens([[5, 6, 7], [8, 9, 10]], model).shape
    torch.Size([2, 3])
    """
    data = Data(source=source, any_tokens=True)
    if isinstance(data.opened, Tokens):
        return data.opened.parts[0]
    rows = [one.tokens for one in islice(data.checked(model), n_max) if one.tokens is not None]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(
            f"data must hold rows of tokens of one length, got {len(rows)} of other lengths in "
            f"{data.name!r}. Cut them first."
        )
    return torch.stack(rows)


def read_tokens(path: str | Path) -> Integer[Tensor, "sequence pos"]:
    """Token ids from a ``.npy``, ``.pt`` or ``.safetensors`` file, mapped into memory.

    A corpus may be larger than memory. A ``.pt`` file is read with ``weights_only=True``, so it
    can't run code; torch's old format can't be mapped and is read whole. A safetensors file holds
    one tensor, or one named ``tokens``. Changes of the result never reach the file.

    Returns:
        [sequence pos] in the file's own integer type.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file of another kind, a damaged one, or no batch of token ids inside.

    >>> np.save(folder / "tokens.npy", np.array([[5, 6, 7]], dtype=np.uint16))
    >>> read_tokens(folder / "tokens.npy")
    tensor([[5, 6, 7]], dtype=torch.uint16)
    """
    path = Path(path)
    _check_file(path)
    kind = path.suffix
    if kind not in READERS:
        raise ValueError(
            f"path must end in {', '.join(READERS)} (token ids) or {', '.join(KINDS)} (rows), got "
            f"{str(path)!r}. Name the file after what it holds; .txt is one text a line."
        )
    with reading(f"path must be a whole {kind} file of one tensor", path):
        tokens = READERS[kind](path)
        if tokens.layout != torch.strided or tokens.is_meta or tokens.is_quantized:
            raise ValueError("a tensor that is not plain")
        number = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
        if number or tokens.ndim != 2 or not tokens.numel():
            raise ValueError(
                f"tokens must be integers of shape [sequence pos], got {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}; one sequence is tokens[None]"
            )
    return tokens


def _read_npy(path: Path) -> Tensor:
    # "c": pages are read when they are touched, and a write goes to memory, not to the file. Torch
    # asks for arrays that can be written.
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))


def _read_pt(path: Path) -> Any:
    mapped = zipfile.is_zipfile(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _read_safetensors(path: Path) -> Tensor:
    tensors = load_file(path)
    return tensors["tokens"] if len(tensors) > 1 else next(iter(tensors.values()))


READERS: dict[str, Callable[[Path], Any]] = {
    ".npy": _read_npy,
    ".pt": _read_pt,
    ".safetensors": _read_safetensors,
}


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(
            f"path must be an existing file, got {str(path)!r}. Check the spelling."
        )


def _open(path: Path) -> Any:
    if not path.is_dir():
        if path.suffix in KINDS:
            _check_file(path)
            return _table(KINDS[path.suffix], [path])
        return Tokens(read_tokens(path), files=[path])
    if (path / "state.json").is_file():
        import datasets

        with reading("path must be a whole saved data set", path):
            return datasets.load_from_disk(str(path))
    files = sorted(path.glob("*.parquet"))
    if files:
        return _table("parquet", files)
    splits = ", ".join(file.parent.name for file in sorted(path.glob("*/state.json")))
    found = f"with the splits {splits}. Name one" if splits else "with neither. Name a file"
    raise ValueError(
        f"data must be a saved data set or a folder of parquet files, got {str(path)!r} {found}, "
        "or a folder of tl-localize collect."
    )


def _table(kind: str, paths: Sequence[Path]) -> Any:
    """A ``datasets.Dataset`` of local files.

    Its cache is a temporary folder that goes with it, so no old copy of a file is ever read.
    """
    import datasets

    if not any(path.stat().st_size for path in paths):
        raise ValueError(
            f"data must hold at least one row, got none in {str(paths[0])!r}. Check the file."
        )
    cache = TemporaryDirectory(prefix="tl-localize-", ignore_cleanup_errors=True)
    read = getattr(datasets.Dataset, f"from_{kind}")
    try:
        with _quiet(), reading(f"path must be a whole {kind} file in UTF-8", paths[0], "Mend it."):
            table = read([glob.escape(str(path)) for path in paths], cache_dir=cache.name)
    except ValueError:
        cache.cleanup()
        raise
    weakref.finalize(table, cache.cleanup)
    return table


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and log lines of ``datasets``."""
    from datasets.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    disabled, verbosity = are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if not disabled:
            enable_progress_bars()


def _text(name: str, value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{name} must be text, got {value!r:.40} at {place}. Correct or remove the row."
        )
    return value


def _token_ids(name: str, value: Any, place: str) -> Int[Tensor, " pos"]:
    """A row of token ids as int64."""
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of different lengths inside
        ids = np.empty(0)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise ValueError(
            f"{name} must be a list of whole numbers, got {value!r:.40} at {place}. Save the ids "
            "that the tokenizer gives."
        )
    return torch.from_numpy(ids.astype(np.int64))


def _column(row: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in row:
        raise ValueError(
            f"row must have the column {name!r}, got only {sorted(row)} at "
            f"{place}.{nearest(name, row)}"
        )
    return row[name]


def _first(names: Any) -> str:
    """A category, or the first of a list of them."""
    if isinstance(names, list):
        names = names[0] if names else ""
    return str(names)


def _in_vocabulary(model: LanguageModel, entry: Entry) -> Entry:
    if entry.tokens is not None:
        check_tokens(model, entry.tokens, f" at {entry.place}")
    return entry


def _check_tokenizer(model: LanguageModel, rows: Sequence[list[int]]) -> None:
    """Raise ValueError where the text of some rows would be tokenized otherwise: then another
    tokenizer made them.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None or len(rows) < MIN_JUDGED:
        return
    same: list[float] = []
    for row in rows:
        again = encode(tokenizer, tokenizer.decode(row, clean_up_tokenization_spaces=False))
        same.append((Counter(row) & Counter(again)).total() / max(len(row), len(again)))
    share = sum(same) / len(same)
    if share < MIN_SAME:
        start = tokenizer.decode(rows[0][:20], clean_up_tokenization_spaces=False)
        raise ValueError(
            f"tokens must be those that the model's tokenizer makes, got {share:.0%} of them in "
            f"the first {len(rows)} rows, the first of which begins {start!r}. Tokenize the "
            "text with this model's tokenizer, or set any_tokens where they are meant so."
        )
