"""A corpus searched in chunks, none of which knows of the others; the last step needs them all."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from tl_localize.checks import check_count
from tl_localize.collect.collection import Collection, check_draw, without_copies
from tl_localize.collect.criteria import CRITERIA, SURPLUS, Criteria
from tl_localize.collect.filter import CHUNK_WINDOWS, Candidate, Filter, Filtered, Row, merge_chunks
from tl_localize.execution.run import Benchmark, Methods
from tl_localize.execution.store import Cell, Json, Scope, Settings, Steps
from tl_localize.files import digest
from tl_localize.metrics import Decode
from tl_localize.model.environment import about_model, environment
from tl_localize.model.neurons import LanguageModel
from tl_localize.sequences import (
    decoder_or_ids,
    divide_text,
    encode,
    first_tokens,
    tokenizer_of,
)
from tl_localize.texts.readers import Data, Entry

N_READ = 16  # windows of a chunk that its key holds as tokens and as text
N_HEADS = 64  # rows whose length says how many make a chunk; text may be added behind them


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some rows of the data, which are searched as a whole.

    On another machine the data are opened again, by their path.
    """

    data: Data
    prefix: str  # of the ids
    first: int
    end: int

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What its key holds of the data: the range, and a digest of all its rows."""
        digest = hashlib.sha256()
        for entry in self.data.entries(self.first, self.end):
            row = repr((entry.text, entry.id, entry.category))
            digest.update(row.encode(errors="surrogatepass"))
            if entry.tokens is not None:
                digest.update(entry.tokens.numpy().tobytes())
        about = {"prefix": self.prefix, "first": self.first, "end": self.end}
        return {**about, "content": digest.hexdigest()[:32]}

    def windows(
        self, model: LanguageModel, length: int, stride: int | None = None
    ) -> Iterator[Candidate]:
        """The first tokens of each row, or windows of it, one every ``stride`` tokens; of a text
        after the beginning-of-text token, where the tokenizer puts one first. Ids count the rows of
        the data. What is too short comes out as it is, to be counted.
        """
        for i, entry in enumerate(self.data.entries(self.first, self.end), self.first):
            tokens = entry.tokens
            name = f"row-{i}"
            first: list[int] = []
            bos = entry.bos
            if tokens is not None and bos:
                first, tokens = tokens[:1].tolist(), tokens[1:]
            elif tokens is None:
                name = f"text-{i}"
                tokenizer = tokenizer_of(model)
                first = first_tokens(tokenizer)
                bos = tokenizer.bos_token if first else ""
                try:
                    tokens = encode(tokenizer, entry.text) if entry.text else []
                except ValueError as error:
                    raise ValueError(f"{error} (at {entry.place})") from error
            row = np.asarray(tokens, dtype=np.int64)
            name = self.prefix + (entry.id or name)
            starts = [0] if stride is None else range(0, max(1, len(row) - length + 1), stride)
            for start in starts:
                window = np.concatenate([np.array(first, np.int64), row[start : start + length]])
                id = name if stride is None else f"{name}+{start}"
                yield Candidate(window, id, entry.category, bos)


def chunks_of(
    data: Sequence[Data], stride: int | None = None, length: int = Criteria().length
) -> list[Chunk]:
    """The chunks of some data, for the first window of each row or one every ``stride`` tokens.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Two files of one name, no rows or of another kind, or a stream.

    >>> [chunk.end for chunk in chunks_of([Data(source=text.repeat(3000, 1))])]
    [2048, 3000]
    """
    names = [Path(corpus.name).stem for corpus in data]
    if len(set(names)) < len(data):
        names = [corpus.name for corpus in data]
    if len(set(names)) < len(data):
        given = ", ".join(str(corpus.path or corpus.name) for corpus in data)
        raise ValueError(
            f"data must be files of different names, got {given}. The ids are made of these names."
        )
    if stride is not None:
        check_count(stride=stride)
    found: list[Chunk] = []
    for name, corpus in zip(names, data, strict=True):
        if corpus.size is None:
            raise ValueError(
                f"data must be rows that can be counted, got the stream {corpus.name!r}. Give a "
                "list of its first rows."
            )
        heads = list(corpus.entries(0, N_HEADS))
        if not heads:
            raise ValueError(
                f"data must hold at least one row, got none in {corpus.name!r}. Check the file."
            )
        size = CHUNK_WINDOWS
        if stride is not None:
            n_windows = sum(_count_windows(head, length, stride) for head in heads)
            size = max(1, CHUNK_WINDOWS * len(heads) // n_windows)
        prefix = f"{name}/" if len(data) > 1 else ""
        for first in range(0, corpus.size, size):
            found.append(Chunk(corpus, prefix, first, min(first + size, corpus.size)))
    return found


def _count_windows(entry: Entry, length: int, stride: int) -> int:
    """About how many windows a row has: a token of text has about four characters."""
    n_tokens = len(entry.text) // 4 if entry.tokens is None else len(entry.tokens)
    return 1 + max(0, n_tokens - length) // stride


@dataclass(frozen=True, eq=False)
class Search(Benchmark[list[Filtered | None]]):
    """The search of a corpus for memorized sequences: ``run`` filters the chunks and gives what is
    left of each, None where it is missing; ``collection`` makes the last step.

    >>> data = Data(source=torch.stack([sequence.tokens for sequence in few]))
    >>> criteria = Criteria(n_suffix=16)
    >>> search = Search(model, chunks_of([data], length=criteria.length), criteria)
    >>> search.collection(search.run(), n_dev=1)
    Collection(2 of 3 sequences memorized, 1 for development)
    """

    model: LanguageModel
    chunks: Sequence[Chunk]  # as ``chunks_of`` gives them, for this stride
    criteria: Criteria
    stride: int | None = None  # tokens between the windows of a row; None is its first window
    decode: Decode | None = None  # the model's tokenizer unless given
    filter: Filter = field(init=False, repr=False)

    def __post_init__(self) -> None:
        decode = self.decode or decoder_or_ids(self.model)
        object.__setattr__(self, "filter", Filter(self.model, self.criteria, decode))

    def groups(self, parts: int = 1) -> Sequence[Chunk]:
        return self.chunks

    def settings(self, methods: Methods) -> Settings:
        names = list(dict.fromkeys(chunk.data.name for chunk in self.chunks))
        about: Json = {**about_model(self.model), "data": names, **asdict(self.criteria)}
        about["stride"] = self.stride
        # without their content: text may be added at the end of the data
        parts = [[self._name(chunk), ""] for chunk in self.chunks]
        scope = Scope({}, {"collect": ({}, len(parts))})
        return Settings("collect", about, parts, {"": scope}, [environment(self.model)])

    @staticmethod
    def _name(chunk: Chunk) -> str:
        return f"{chunk.prefix}{chunk.first}"

    def rows(self, group: Chunk, methods: Methods, steps: Steps) -> Iterator[Row]:
        """What is left of a chunk: one row, with the counts and the recited sequences."""
        cell = Cell("collect", self._name(group))
        yield from steps.rows(cell, self._inputs(group, steps), lambda: [self._filter(group)])

    def _inputs(self, chunk: Chunk, steps: Steps) -> Json:
        # of version 1 no text began with a beginning-of-text token; 2 said nothing of the tokens
        inputs: Json = {"step": "collect", "version": 3, **steps.agreed, "chunk": chunk.inputs}
        # what the tokenizer makes of the first windows, and they of text
        windows = chunk.windows(self.model, self.criteria.length, self.stride)
        ids = [window.tokens.tolist() for window in islice(windows, N_READ)]
        vocabulary = range(self.model.cfg.d_vocab)  # what is outside is refused by the filter
        known = [some for some in ids if all(token in vocabulary for token in some)]
        return inputs | {"tokens": digest(ids, [self.filter.decode(some) for some in known])}

    def _filter(self, chunk: Chunk) -> Row:
        windows = chunk.windows(self.model, self.criteria.length, self.stride)
        return {**self.filter.filter(windows)}

    def results(self, steps: Steps) -> list[Filtered | None]:
        found: list[Filtered | None] = []
        for chunk in self.chunks:  # by inputs: a cell may have rows of data that have changed
            rows = steps.find(self._inputs(chunk, steps))
            found.append(rows[0] if rows else None)
        return found

    def collection(
        self,
        found: Sequence[Filtered | None],
        *,
        n_dev: int = 5,
        n_max: int | None = None,
        seed: int = 0,
    ) -> Collection:
        """The last step, which needs all chunks; arguments and errors of ``collect_memorized``."""
        check_draw(n_dev, n_max, seed)
        chunks = [chunk for chunk in found if chunk]
        if len(chunks) < len(found):
            raise ValueError(
                f"chunks must all be searched, got {len(found) - len(chunks)} of {len(found)} "
                "missing. Run the search again."
            )
        criteria = self.criteria
        report, left = merge_chunks(chunks)
        if not left:
            last = [criterion for criterion in CRITERIA if report.removed[criterion]][-1]
            raise ValueError(
                f"data must hold a memorized sequence, got none: {report}. DEL has nothing to "
                f"ablate here. The last ones failed by {last!r}. Give more text, or loosen that "
                "criterion."
            )
        left = with_different_ids(without_copies(left, criteria, report))
        if len(left) <= n_dev:
            raise ValueError(
                f"n_dev must leave at least one of the {len(left)} memorized sequences for the "
                f"test, got {n_dev} ({report}). Give more text, loosen a criterion, or use a "
                "smaller dev set."
            )
        order = np.random.default_rng(seed).permutation(len(left)).tolist()
        drawn = order[:n_dev] + sorted(order[n_dev:n_max])
        report.removed[SURPLUS] = len(left) - len(drawn)
        rows: list[Row] = []
        for i in drawn:
            first = int(bool(left[i]["bos"]))
            tokens = left[i]["tokens"][first:]
            row = {**left[i], "prefix": "", "suffix": ""}
            if self.filter.decode is not list:  # a model without a tokenizer has ids alone
                text = divide_text(self.filter.decode, tokens, criteria.n_prefix)
                row["prefix"], row["suffix"] = text
            rows.append({**row, "split": "dev" if len(rows) < n_dev else "test"})
        settings = {"seed": seed, "n_max": n_max, "environment": environment(self.model)}
        return Collection.of(rows, criteria, report=report, settings=settings)


def with_different_ids(rows: list[Row]) -> list[Row]:
    """The rows, those of an id that is repeated with ``#1``, ``#2`` and so on behind it: paragraphs
    may have the id of their document.

    >>> [row["id"] for row in with_different_ids([{"id": "page"}, {"id": "page"}, {"id": "end"}])]
    ['page#1', 'page#2', 'end']
    """
    counts = Counter(row["id"] for row in rows)
    taken = set(counts)
    numbers: dict[str, Iterator[int]] = {}
    found: list[Row] = []
    for row in rows:
        id = row["id"]
        if counts[id] > 1:
            for number in numbers.setdefault(id, count(1)):
                if f"{id}#{number}" not in taken:
                    id = f"{id}#{number}"
                    break
        found.append({**row, "id": id})
    return found


def collect_memorized(
    model: LanguageModel,
    data: Any,
    criteria: Criteria | None = None,
    *,
    stride: int | None = None,
    n_dev: int = 5,
    n_max: int | None = None,
    seed: int = 0,
    decode: Decode | None = None,
) -> Collection:
    """The sequences of some rows that the model has memorized, near-duplicates removed, dev
    sequences first.

    Args:
        data: ``readers.Data``, or a source of it, such as a list of vectors of token ids. Of a row
            that is longer than prefix and suffix the first tokens are taken.
        stride: windows of the rows in place of their first tokens, one every so many tokens.
        n_dev: how many of the found ones are drawn for the choice of hyperparameters.
        n_max: draw at most so many, dev ones included (the authors keep 505).
        decode: token ids -> text; the model's tokenizer unless given.

    Raises:
        ValueError: a token that the model does not know, or too few sequences left (with the
            criterion that removed the last ones).

    >>> windows = [*text, *(sequence.tokens for sequence in few)]
    >>> print(collect_memorized(model, windows, Criteria(n_suffix=16), n_dev=1).report)
    4 came in, 2 removed: few distinct tokens in the true suffix, 2 left
    """
    check_draw(n_dev, n_max, seed)
    criteria = criteria or Criteria()
    data = data if isinstance(data, Data) else Data(source=data)
    search = Search(model, chunks_of([data], stride, criteria.length), criteria, stride, decode)
    return search.collection(search.run(), n_dev=n_dev, n_max=n_max, seed=seed)
