"""The data users have, as sequences for DEL and INJ and as rows for a search."""

from __future__ import annotations

import hashlib
import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from tl_localize.files import nearest
from tl_localize.neurons import LanguageModel, check_count
from tl_localize.readers.sources import (
    Lines,
    Row,
    Source,
    Tokens,
    as_token_ids,
    open_source,
    read_tokens,
)
from tl_localize.sequences import MemorizedSequence, check_tokens, encode, text_parts, tokenizer_of

MANUAL = ("prompt", "all")  # the authors' format; all is prompt and suffix
# that are known
COLUMNS = (
    MANUAL,
    ("tokens",),
    ("token_ids",),
    ("input_ids",),
    ("prompt", "completion"),
    ("text",),
    ("definition",),
)
N_PREFIX = 32  # the paper's
CSV_ROWS = 100_000  # in memory
CHECKED = 32  # first rows whose tokens are decoded and encoded again
CHECKED_TOKENS = 256  # of each
MIN_JUDGED = 4  # of these rows, else nothing is said
# share of them that comes back: 0.998 of a model's own tokens, 0.83 to 0.88 of another tokenizer's
# (GPT-2's and Pythia's)
MIN_SAME = 0.95


@dataclass(frozen=True, eq=False)
class Entry:
    """A row: token ids, or a text with the part that prompts the model where that is known."""

    place: object  # as messages show it
    tokens: Int[Tensor, " pos"] | None = None
    text: str = ""
    prompt: str | None = None
    n_prefix: int | None = None
    id: str = ""
    category: str = ""
    manual: bool = False  # of the authors' manual sets
    claimed: int | None = None  # tokens of the prompt, as such a set says

    @property
    def content(self) -> Any:
        """As JSON takes it."""
        content = self.text if self.tokens is None else self.tokens.tolist()
        return [content, self.id, self.category] if self.id or self.category else content


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Rows of tokens or texts, read a part at a time, with what tells a prefix from a suffix.

    What is in a file is told by its content: token ids (``.npy``, ``.pt``, ``.safetensors``),
    parquet, JSON lines, one text a line; a folder of parquet files or a saved data set; a
    ``datasets.Dataset`` or any iterable of rows. A row of named columns has ``tokens``
    (``token_ids``, ``input_ids``), or ``text``, ``definition``, ``prompt`` and ``completion``, or
    ``prompt`` and ``all``.

    Args:
        source: path, data set, token ids [row pos], or iterable of rows.
        key: column of the tokens or of the text, where it has another name.
        n_prefix: tokens that prompt the model, or the column that has their number. By default what
            the rows say, else 32.
        n_suffix: tokens that follow; by default all.
        suffix: token file whose rows follow those of ``source``, which then holds prefixes alone.
        pre_prefix: token file whose rows stand before them.
        id: column of the sequences' ids.
        category: column of their categories.
        scores: CSV file of ``index`` and ``score``: the rows to read, counted from 0.
        min_score: least score of a row.
        any_tokens: also tokens that the model's tokenizer would not make of their text, such as
            random ones.
        name: of the data in ids and records; by default the file's.

    >>> _ = (folder / "rows.jsonl").write_text('{"prompt": "Return the", "completion": " value of x.", "author": "me"}')
    >>> list(Data(source=folder / "rows.jsonl", id="author").sequences(model))
    [MemorizedSequence('me', 2 prefix + 4 suffix tokens: 'Return the' | ' value of x.')]
    """

    source: Any
    key: str = ""
    n_prefix: int | str | None = None
    n_suffix: int | None = None
    suffix: str | Path | None = None
    pre_prefix: str | Path | None = None
    id: str = ""
    category: str = ""
    scores: str | Path | None = None
    min_score: float = 1.0
    any_tokens: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("n_prefix", "n_suffix"):
            if not isinstance(given := getattr(self, name), str | None):
                check_count(**{name: given})
        if self.pre_prefix is not None and self.suffix is None:
            raise ValueError(
                f"suffix must be given with pre_prefix, got only {str(self.pre_prefix)!r}. Name "
                "the file of the suffixes."
            )
        for name in ("source", "suffix", "pre_prefix", "scores"):
            if isinstance(path := getattr(self, name), str):
                object.__setattr__(self, name, Path(path))
        object.__setattr__(self, "name", self.name or (self.path.name if self.path else "data"))

    def __getstate__(self) -> dict[str, Any]:
        """On another machine the files are opened again, by their whole paths."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: value.absolute() if isinstance(value, Path) else value
            for name, value in values.items()
        }

    @property
    def path(self) -> Path | None:
        return self.source if isinstance(self.source, Path) else None

    @property
    def choices(self) -> dict[str, Any]:
        """What else the rows and ids of a search depend on, as JSON takes it."""
        chosen = {name: getattr(self, name) for name in ("id", "category") if getattr(self, name)}
        return (
            chosen
            if self.scores is None
            else {**chosen, "kept": hashlib.sha256(str(self.kept).encode()).hexdigest()[:32]}
        )

    @cached_property
    def opened(self) -> Source:
        """The rows, of which none is read yet."""
        if self.suffix is None:
            return open_source(self.source)
        files = [path for path in (self.pre_prefix, self.source, self.suffix) if path is not None]
        parts = [read_tokens(path) for path in files]
        if len({len(part) for part in parts}) > 1:
            counts = ", ".join(
                f"{len(part)} in {str(path)!r}" for part, path in zip(parts, files, strict=True)
            )
            raise ValueError(
                f"prefix and suffix files must have as many rows, got {counts}. They must be of "
                "one data set."
            )
        return Tokens(*parts, files=files)

    @cached_property
    def kept(self) -> list[int]:
        """Indices of the rows that the scores keep, in order."""
        return kept_by(Path(str(self.scores)), self.min_score)

    def entries(self, first: int = 0, end: int | None = None) -> Iterator[Entry]:
        """The rows of a range of ``opened``; of what scores keep, the ids have the index."""
        if self.scores is None:
            return (self._entry(place, row) for place, row in self.opened.rows(first, end))
        return self._scored(first, end)

    def _scored(self, first: int, end: int | None) -> Iterator[Entry]:
        source, kept, n = self.opened, self.kept, 0
        if isinstance(source, Tokens):
            wanted = kept[
                bisect_left(kept, first) : bisect_left(kept, source.size if end is None else end)
            ]
            numbered = ((i, row) for i in wanted for row in source.rows(i, i + 1))
        else:
            numbered = (
                (_index(row, i), (place, row))
                for i, (place, row) in enumerate(source.rows(first, end), first)
            )
        for i, (place, row) in numbered:
            at = bisect_left(kept, i)
            if at < len(kept) and kept[at] == i:
                n += 1
                yield self._entry(place, row, f"row-{i}")
        if (first, end) == (0, None) and n < len(kept):
            raise ValueError(
                f"scores must be of rows in {self.name!r}, got {len(kept)} indices, of which it "
                f"has {n}. Check both files."
            )

    def _entry(self, place: object, row: Row, id: str = "") -> Entry:
        if isinstance(row, Tensor):
            return Entry(place, row.long(), id=id)
        if isinstance(row, str):
            return Entry(place, text=row, id=id)
        columns = self._columns(row, place)
        manual, values = columns == MANUAL, [row[name] for name in columns]
        id = str(_column(row, self.id, place)) if self.id else id
        groups = (
            _column(row, self.category, place)
            if self.category
            else row.get("category")
            if manual
            else None
        )
        n_prefix = _column(row, self.n_prefix, place) if isinstance(self.n_prefix, str) else None
        if isinstance(self.n_prefix, str) and (
            isinstance(n_prefix, bool) or not isinstance(n_prefix, int)
        ):
            raise ValueError(
                f"{self.n_prefix} must be a whole number, got {n_prefix!r} at {place}. It counts "
                "the tokens of the prefix."
            )
        about: dict[str, Any] = {
            "n_prefix": n_prefix,
            "id": id,
            "category": _first_name(groups, place),
        }
        if len(columns) == 1 and not isinstance(values[0], str):
            return Entry(place, as_token_ids(values[0], place), **about)
        for name, value in zip(columns, values, strict=True):
            if not isinstance(value, str):
                raise ValueError(
                    f"{name} must be text, got {value!r:.40} at {place}. Correct or remove the row."
                )
        prompt, text = values if len(values) == 2 else (None, *values)
        if manual and not text.startswith(values[0]):
            wrong = f"got {text[:20]!r} after the prompt {values[0][:20]!r} at {place}"
            raise ValueError(f"all must begin with prompt, {wrong}. Correct the row.")
        about |= {"manual": manual, "claimed": row.get("prompt_len") if manual else None}
        return Entry(
            place, None, text if manual or prompt is None else prompt + text, prompt, **about
        )

    def _columns(self, row: Mapping[str, Any], place: object) -> tuple[str, ...]:
        """The columns of the tokens or texts: the one that is named, or what the row has of the
        known ones.
        """
        if self.key:
            _column(row, self.key, place)
            return (self.key,)
        found = [names for names in COLUMNS if all(name in row for name in names)]
        known = "; ".join(" and ".join(names) for names in COLUMNS)
        if not found:
            near = [
                name for name in row if nearest(name, [name for names in COLUMNS for name in names])
            ]
            meant = f"Did you mean {' or '.join(near)}? Name it" if near else "Name one"
            raise ValueError(
                f"row must have columns of tokens or text ({known}), got only {sorted(row)} at "
                f"{place}. {meant} with key."
            )
        if len(found) > 1 and found[0] != MANUAL:
            names = ", ".join(name for names in found for name in names)
            raise ValueError(
                f"row must have the tokens or the text once, got {names} at {place}. Name the one "
                "that counts with key."
            )
        return found[0]

    def sequences(
        self, model: LanguageModel, named: Callable[[int, Entry], str] | None = None
    ) -> Iterator[MemorizedSequence]:
        """A sequence for each row, as the model's tokenizer reads it.

        Where no column has ids they are ``sequence-0000`` and so on (``manual-000`` in the authors'
        manual format), or as ``named`` says.

        Raises:
            ImportError: what reads the file is not installed.
            ValueError: a row is broken, has another length than the first (unless ``n_suffix`` or a
                column of ``n_prefix`` is given), or holds tokens of another tokenizer; there are no
                rows.
        """
        length, differing, i = None, list[str](), -1
        for i, entry in enumerate(self.checked(model)):
            if (
                entry.tokens is not None
                and self.n_suffix is None
                and not isinstance(self.n_prefix, str)
            ):
                length = length or len(entry.tokens)
                if len(entry.tokens) != length:
                    wrong = (
                        f"rows must have {length} tokens, as the first one, got "
                        f"{len(entry.tokens)} at {entry.place}."
                    )
                    raise ValueError(
                        f"{wrong} Cut them with n_suffix, or name the column of each row's prefix "
                        "length with n_prefix."
                    )
            default = f"manual-{i:03d}" if entry.manual else f"sequence-{i:04d}"
            try:
                sequence = self._sequence(
                    model, entry, entry.id or (named(i, entry) if named else default)
                )
            except ValueError as error:
                raise ValueError(f"{error} (at {entry.place})") from error
            if entry.claimed not in (None, sequence.n_prefix):
                differing.append(f"{entry.place}: {entry.claimed}, not {sequence.n_prefix}")
            yield sequence
        if i < 0:
            raise ValueError(
                f"data must hold at least one row, got none in {self.name!r}. Check how it was "
                "made."
            )
        if differing:
            warnings.warn(
                "prompt_len should be the prompt's number of tokens, got another in "
                f"{len(differing)} of {i + 1} rows of {self.name} "
                f"({differing[0]}). The tokens of the prompt's text are used; was the file made "
                "for another tokenizer?",
                stacklevel=2,
            )

    def _sequence(self, model: LanguageModel, entry: Entry, id: str) -> MemorizedSequence:
        if entry.tokens is None and not entry.text.strip():
            raise ValueError(
                f"text must hold words, got {entry.text!r}. Correct or remove the row."
            )
        if entry.prompt is not None and not isinstance(self.n_prefix, int):
            rest = entry.text[len(entry.prompt) :]
            one = MemorizedSequence.from_text(
                model, entry.prompt, rest, id=id, category=entry.category
            )
        else:
            tokens = (
                entry.tokens
                if entry.tokens is not None
                else torch.tensor(encode(tokenizer_of(model), entry.text))
            )
            n_prefix = (
                entry.n_prefix
                or (self.n_prefix if isinstance(self.n_prefix, int) else self._width)
                or N_PREFIX
            )
            one = MemorizedSequence(
                tokens,
                n_prefix,
                id,
                entry.category,
                text_parts(model, tokens.tolist(), n_prefix, entry.text),
            )
        if self.n_suffix is None:
            return one
        if len(one) < one.n_prefix + self.n_suffix:
            raise ValueError(
                f"row must have n_prefix + n_suffix = {one.n_prefix + self.n_suffix} tokens, got "
                f"{len(one)}. Lower n_suffix."
            )
        tokens = one.tokens[: one.n_prefix + self.n_suffix]
        return replace(one, tokens=tokens, text=text_parts(model, tokens.tolist(), one.n_prefix))

    @property
    def _width(self) -> int:
        """Tokens of the prefix files."""
        return (
            sum(part.shape[1] for part in self.opened.parts[:-1])
            if isinstance(self.opened, Tokens)
            else 0
        )

    def checked(self, model: LanguageModel) -> Iterator[Entry]:
        """The rows; ValueError at the first tokens that are not of the model's tokenizer. Blank
        lines of texts are left out.
        """
        texts = isinstance(self.opened, Lines) and not self.opened.objects
        entries = map(
            partial(_in_vocabulary, model),
            (one for one in self.entries() if not texts or one.text.strip()),
        )
        first = list(islice(entries, CHECKED))
        if not self.any_tokens:
            _check_tokenizer(
                model,
                [one.tokens[:CHECKED_TOKENS].tolist() for one in first if one.tokens is not None],
            )
        return chain(first, entries)


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


def read_texts(source: Any, key: str = "") -> Iterator[str]:
    """The texts of a corpus, one at a time; empty ones are empty strings, so that the caller can
    count them.

    >>> _ = (folder / "corpus.txt").write_text("one text a line")
    >>> list(read_texts(folder / "corpus.txt"))
    ['one text a line']
    """
    return (one.text for one in Data(source=source, key=key).entries())


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
        return data.opened.block(0, data.opened.size)
    rows = [one.tokens for one in islice(data.checked(model), n_max) if one.tokens is not None]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(
            f"data must hold rows of tokens of one length, got {len(rows)} of other lengths in "
            f"{data.name!r}. Cut them first."
        )
    return torch.stack(rows)


def kept_by(path: Path, min_score: float = 1.0) -> list[int]:
    """Indices with at least this score in a CSV file of ``index`` and ``score``, in order.

    >>> _ = (folder / "scores.csv").write_text("index,score\\n7,0.5\\n3,1.0")
    >>> kept_by(folder / "scores.csv")
    [3]
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"scores must be an existing file, got {str(path)!r}. Check the spelling."
        )
    kept, highest = set[int](), -math.inf
    try:
        with pd.read_csv(path, chunksize=CSV_ROWS) as parts:
            for part in parts:
                for name, kinds in (("index", "iu"), ("score", "iuf")):
                    if _column(part, name, path).dtype.kind not in kinds:
                        raise ValueError(
                            f"{name} must be a number in every row, got {part[name].dtype}"
                        )
                kept.update(part.loc[part["score"] >= min_score, "index"].tolist())
                highest = max(highest, float(part["score"].max()))
    except ValueError as error:  # also pandas' own
        raise ValueError(
            f"scores must be a CSV file of index and score, got {str(path)!r} ({error}). Check how "
            "it was made."
        ) from error
    if not kept:
        raise ValueError(
            f"min_score must be at most {highest:g}, the highest score in {str(path)!r}, got "
            f"{min_score:g}. Lower it."
        )
    return sorted(kept)


def _index(row: Row, i: int) -> int:
    """The row's number in the file, or what its column ``index`` says."""
    return int(row.get("index", i)) if isinstance(row, Mapping) else i


def _column(row: Any, name: str, place: object) -> Any:
    if name not in row:
        raise ValueError(
            f"row must have the column {name!r}, got only {sorted(row)} at "
            f"{place}.{nearest(name, row)}"
        )
    return row[name]


def _first_name(groups: Any, place: object) -> str:
    """A category, or the first of a list of them."""
    names: Any = [] if groups is None else [groups] if isinstance(groups, str) else groups
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"category must be a name or a list of names, got {groups!r} at {place}. Write [] "
            "where there is none."
        )
    return next(iter(names), "")


def _in_vocabulary(model: LanguageModel, entry: Entry) -> Entry:
    """The row; ValueError at tokens outside the vocabulary, with what the model reads in the
    others.
    """
    if (
        entry.tokens is not None
        and not (known := (entry.tokens >= 0) & (entry.tokens < model.cfg.d_vocab)).all()
    ):
        check_tokens(
            model, entry.tokens, f" at {entry.place}{_decoded(model, entry.tokens[known].tolist())}"
        )
    return entry


def _decoded(model: LanguageModel, tokens: list[int]) -> str:
    """What the model reads in some tokens, for a message."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    return (
        f", which begins {tokenizer.decode(tokens[:20], clean_up_tokenization_spaces=False)!r}"
        if tokenizer
        else ""
    )


def _check_tokenizer(model: LanguageModel, rows: Sequence[list[int]]) -> None:
    """Raise ValueError where the text of some rows would be tokenized otherwise: then another
    tokenizer made them.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    same: list[float] = []
    for row in rows if tokenizer else ():
        again = encode(tokenizer, tokenizer.decode(row, clean_up_tokenization_spaces=False))
        same.append((Counter(row) & Counter(again)).total() / max(len(row), len(again)))
    if len(same) >= MIN_JUDGED and (share := sum(same) / len(same)) < MIN_SAME:
        raise ValueError(
            f"tokens must be those that the model's tokenizer makes, got {share:.0%} of them in "
            f"the first {len(rows)} rows, the first of "
            f"{_decoded(model, rows[0])[2:]}. Tokenize the text with this model's tokenizer, or "
            "set any_tokens where they are meant so."
        )
