"""A corpus searched in chunks, none of which knows of the others; the last step needs them all."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Int, Integer
from torch import Tensor

from tl_localize.collect.collection import Collection, assemble
from tl_localize.collect.criteria import Criteria, Report
from tl_localize.collect.filter import Filter, FilteredChunk, merged
from tl_localize.collect.general_text import perplexity_split
from tl_localize.collect.windows import (
    Candidate,
    entry_windows,
    likely_windows,
    named_windows,
    token_windows,
)
from tl_localize.execution.engine import Benchmark
from tl_localize.execution.environment import fingerprint
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import Plan, Task, digest_of
from tl_localize.files import Saved
from tl_localize.metrics import Decode
from tl_localize.neurons import LanguageModel, model_name
from tl_localize.readers.data import Data, Entry
from tl_localize.readers.sources import Stream, Tokens, bytes_of
from tl_localize.sequences import MemorizedSequence

CHUNK_BYTES = 2**20  # of text
# of token rows, about: half a minute of a small model on a processor, seconds on a GPU
CHUNK_WINDOWS = 2048

Part = Integer[Tensor, "row pos"] | list[Entry]
# of a row: one every so many tokens, its first one, wherever it may be memorized
Windows = int | Literal["first", "any"]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of the data that is searched as a whole: some rows, or what begins in some bytes of a
    text file.

    On another machine the data are opened again, by their path.
    """

    data: Data
    prefix: str  # of the ids
    first: int
    end: int

    def __repr__(self) -> str:
        return f"Chunk({self.data.name!r}, {self.first} to {self.end})"

    @property
    def inputs(self) -> dict[str, Any]:
        """What its key holds of the data: the range, and a digest of its first 4 KiB, for no more
        is read before the work begins.

        A change further inside a chunk leaves its key, so the last step compares the whole content
        with what was searched.
        """
        start = hashlib.sha256(self.data.opened.sample(self.first, self.end)).hexdigest()[:32]
        about = {
            "prefix": self.prefix,
            "key": self.data.key or "text",
            "first": self.first,
            "end": self.end,
            "start": start,
        }
        return {**about, **self.data.choices}

    def read(self) -> tuple[Part, dict[str, Any]]:
        """Its rows, how many there are, and a hash of all of them."""
        source = self.data.opened
        if isinstance(source, Tokens) and self.data.scores is None:
            part = source.block(self.first, self.end)
            return part, {"n": len(part), "content": hashlib.sha256(bytes_of(part)).hexdigest()}
        entries = list(self.data.entries(self.first, self.end))
        return entries, {"n": len(entries), "content": digest_of([one.content for one in entries])}


def chunks_of(
    data: Sequence[Data], windows: Windows = "first", length: int = Criteria().length
) -> list[Chunk]:
    """The chunks of some data, of which no more than the size and the first row is read.

    Raises:
        FileNotFoundError; ValueError: two files of one name, no rows or of another kind, a stream,
            or windows="any" of text.

    >>> chunks_of([Data(source=text.repeat(3000, 1), name="rows")])
    [Chunk('rows', 0 to 2048), Chunk('rows', 2048 to 3000)]
    """
    if len({Path(one.name).stem for one in data}) < len(data):
        given = ", ".join(str(one.source) for one in data)
        raise ValueError(
            f"data must be files of different names, got {given}. The ids are made of these names."
        )
    found: list[Chunk] = []
    for one in data:
        source, shown = one.opened, str(one.path or one.name)
        if isinstance(source, Stream):
            raise ValueError(
                f"data must be rows that can be counted, got the stream {shown!r}. Give "
                "collect_memorized its token_windows."
            )
        if source.in_bytes and one.scores is not None:
            raise ValueError(
                f"data must have numbered rows where there are scores, got lines in {shown!r}. "
                "Save them as parquet or .npy."
            )
        if (head := next(one.entries(), None)) is None:
            raise ValueError(
                f"data must hold at least one row, got none in {shown!r}. Check the file."
            )
        if head.tokens is None and windows == "any":
            raise ValueError(
                f"windows must be first or a number for text, got any for {shown!r}. Give rows of "
                "tokens."
            )
        size = CHUNK_BYTES if source.in_bytes else CHUNK_WINDOWS
        if windows != "first" and head.tokens is not None and not source.in_bytes:
            size = max(1, CHUNK_WINDOWS * length // len(head.tokens))
        prefix = f"{Path(one.name).stem}/" if len(data) > 1 else ""
        found += [
            Chunk(one, prefix, first, min(first + size, source.size))
            for first in range(0, source.size, size)
        ]
    return found


def parse_windows(text: str) -> Windows:
    """``first``, ``any`` or the tokens between windows, from a command line."""
    if text == "first" or text == "any":
        return text
    if not text.isdecimal() or not int(text):
        raise ValueError(
            f"windows must be first, any or a number of tokens from 1 on, got {text!r}. Use first, "
            "as the paper does."
        )
    return int(text)


@dataclass(frozen=True, eq=False)
class SearchedChunk(Saved):
    """What the criteria say of a chunk, and what the chunk was."""

    required: ClassVar[tuple[str, ...]] = ("tokens",)
    chunk: FilteredChunk
    content: dict[str, Any]  # how many texts or rows there were, and their hash
    of_texts: bool

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        value, tensors = self.chunk.packed()
        return tensors, {"chunk": json.dumps([value, self.content, self.of_texts])}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> SearchedChunk:
        value, content, of_texts = json.loads(metadata["chunk"])
        return cls(FilteredChunk.unpacked(value, tensors), content, of_texts)


@dataclass(frozen=True, eq=False)
class SearchResults:
    """What the chunks of a search gave, as far as they are searched.

    >>> SearchResults([None], [{}], {"0": ""}).report.n_in
    0
    """

    chunks: list[FilteredChunk | None]  # None where it is missing
    contents: list[dict[str, Any]]  # how many texts or rows there were, and their hash
    # chunk -> why it could not be searched; empty where it was not tried yet
    missing: dict[str, str]

    @property
    def report(self) -> Report:
        """What was removed so far; near-duplicates and the draw come when all chunks are there."""
        return merged(chunk for chunk in self.chunks if chunk)[0]

    @classmethod
    def of(cls, cache: Cache) -> SearchResults:
        """From the records of the last plan of a cache: data that have grown or changed make
        another plan.

        Ids count texts over all chunks of a file; where an earlier chunk is missing, from the chunk
        on, whose name they bear.
        """
        found = cls([], [], {})
        failures, counted = cache.failures(), dict[str, int | None]()
        for task in cache.plans()[-1].plan.tasks:
            record, prefix = cache.read(task), task.inputs["chunk"]["prefix"]
            if record is None:
                found.missing[task.name] = failures.get(task.key, {"reason": ""})["reason"]
                chunk, content, counted[prefix] = None, {}, None
            else:
                about = task.inputs["chunk"]
                searched: SearchedChunk = record.value
                first = counted.get(prefix, 0) if searched.of_texts else about["first"]
                # ids that do not count from the beginning of the chunk
                own = "id" in about or "kept" in about
                rename = partial(
                    _numbered,
                    prefix=prefix if first is not None else f"{task.name}: ",
                    first=None if own else first or 0,
                )
                chunk, content = searched.chunk.renamed(rename), searched.content
                counted[prefix] = None if first is None else first + content["n"]
            found.chunks.append(chunk)
            found.contents.append(content)
        return found


@dataclass(frozen=True, eq=False)
class Search(Benchmark[SearchResults]):
    """The search of a corpus for memorized sequences: ``run`` filters the chunks, ``collection``
    makes the last step.

    >>> search = Search(model, chunks_of([Data(source=torch.stack([one.tokens for one in few]))]), Criteria())
    >>> search.collection(search.run(), n_dev=1)
    Collection(3 of 3 sequences memorized, 1 for development)
    """

    model: LanguageModel
    chunks: Sequence[Chunk]  # as ``chunks_of`` gives them, for these windows
    criteria: Criteria
    windows: Windows = "first"
    decode: Decode | None = None  # the model's tokenizer unless given

    def __repr__(self) -> str:
        return f"Search({model_name(self.model)!r}, {len(self.chunks)} chunks, {self.criteria!r})"

    def plan(self, methods: Sequence[Any] = ()) -> Plan:
        made_of = fingerprint(self.model)
        probe = range(0, self.model.cfg.d_vocab, 1 + self.model.cfg.d_vocab // 256)
        # distances depend on how tokens are spelled
        spelling = digest_of([self._filter.decode([token]) for token in probe])
        about = {**asdict(self.criteria), "windows": self.windows, "spelling": spelling}
        tasks: list[Task] = []
        for i, chunk in enumerate(self.chunks):
            inputs = {"model": made_of, **about, "chunk": chunk.inputs}
            tasks.append(
                Task(
                    "collect",
                    inputs,
                    label="collect",
                    name=f"{chunk.prefix}{chunk.first}",
                    index=i,
                    ratio=1.0,
                )
            )
        settings = {
            "model": model_name(self.model),
            "fingerprint": made_of,
            "dtype": str(next(iter(self.model.parameters())).dtype),
        }
        settings |= {"data": list(dict.fromkeys(chunk.data.name for chunk in self.chunks)), **about}
        return Plan(
            "collect",
            settings,
            [],
            {},
            tasks,
            grows="text at the end of the data (and another n_dev, n_max and seed)",
        )

    def compute(
        self, task: Task, needs: Sequence[Any], methods: Any, report: Callable[[float], None]
    ) -> SearchedChunk:
        chunk = self.chunks[task.index]
        part, content = chunk.read()
        found = self._filter.filter(self._candidates(part, self.windows, self.criteria.length))
        return SearchedChunk(found, content, chunk.data.opened.in_bytes)

    def _candidates(self, part: Part, windows: Windows, length: int) -> Iterator[Candidate]:
        """The windows of a part, with ids that count from its beginning where the rows have none."""
        stride = windows if isinstance(windows, int) else None
        if windows != "any":
            return (
                token_windows(part, length, stride)
                if isinstance(part, Tensor)
                else entry_windows(part, self.model, length, stride)
            )
        if isinstance(part, Tensor):
            return likely_windows(self.model, part, self.criteria)
        rows = [one.tokens for one in part if one.tokens is not None]
        if len({len(row) for row in rows}) != 1 or len(rows) < len(part):
            raise ValueError(
                "windows must be first or a number for rows of different lengths, got any. Give "
                "rows of one length."
            )
        return named_windows(likely_windows(self.model, torch.stack(rows), self.criteria), part)

    def results(self, cache: Cache) -> SearchResults:
        return SearchResults.of(cache)

    def collection(
        self, found: SearchResults, *, n_dev: int = 5, n_max: int | None = None, seed: int = 0
    ) -> Collection:
        """The last step, which needs all chunks, of data that have not changed since: arguments as
        of ``collect_memorized``.
        """
        if found.missing:
            raise ValueError(
                f"chunks must all be searched, got {len(found.missing)} of {len(self.chunks)} "
                "missing. Run the search again."
            )
        for chunk, content in zip(self.chunks, found.contents, strict=True):
            if chunk.read()[1] != content:
                place = (
                    f"{str(chunk.data.path or chunk.data.name)!r} ({chunk.first} to {chunk.end}). "
                    "Search them again in another folder."
                )
                raise ValueError(
                    "data must stay as they were when they were searched, got another content in "
                    f"{place}"
                )
        return assemble(
            self._filter,
            [chunk for chunk in found.chunks if chunk],
            n_dev=n_dev,
            n_max=n_max,
            seed=seed,
        )

    def general_text(
        self,
        collected: Sequence[MemorizedSequence],
        n_sequences: int = 2048,
        length: int = 128,
        *,
        seed: int = 0,
    ) -> Int[Tensor, "sequence pos"]:
        """``perplexity_split`` of the first tokens of each row or text of the data."""
        stream = chain.from_iterable(
            self._candidates(chunk.read()[0], "first", length) for chunk in self.chunks
        )
        return perplexity_split(stream, collected, n_sequences, length, seed=seed)

    @cached_property
    def _filter(self) -> Filter:
        return Filter(self.model, self.criteria, self.decode)


def _numbered(text: str, prefix: str, first: int | None) -> str:
    """An id, or a text that begins with one, of a chunk as that of the data: ``row-2+25`` from row
    100 on is ``row-102+25``.
    """
    return prefix + (
        text
        if first is None
        else re.sub(r"\d+", lambda number: str(int(number[0]) + first), text, count=1)
    )
