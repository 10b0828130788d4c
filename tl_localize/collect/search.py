"""A corpus searched in chunks, none of which knows of the others; the last step needs them all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int, Integer
from torch import Tensor

from tl_localize.collect.collection import Collection, assemble
from tl_localize.collect.criteria import Criteria, Report
from tl_localize.collect.filter import Filter, FilteredChunk, merged
from tl_localize.collect.general_text import perplexity_split
from tl_localize.collect.windows import Candidate, likely_windows, text_windows, token_windows
from tl_localize.execution.engine import Benchmark
from tl_localize.execution.environment import fingerprint
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import Plan, Record, Task, digest_of
from tl_localize.metrics import Decode
from tl_localize.neurons import LanguageModel, model_name
from tl_localize.readers import TOKEN_SUFFIXES, read_texts, read_tokens
from tl_localize.sequences import MemorizedSequence

CHUNK_BYTES = 2**20  # of text
CHUNK_WINDOWS = 2048  # of token rows, about: half a minute of a small model on a processor, seconds on a GPU
SAMPLE = 4096  # bytes at the beginning of a chunk that are part of its key

Part = Integer[Tensor, "row pos"] | list[str]
Windows = int | Literal["first", "any"]  # of a row: one every so many tokens, its first one, wherever it may be memorized


@dataclass(frozen=True, eq=False)
class Corpus:
    """A file of texts or of token rows, or rows that are given. On another machine the file is opened again, by its path.

    >>> Corpus(Path("rows"), given=text).read(0, 1).shape
    torch.Size([1, 128])
    """

    path: Path  # .jsonl or .txt of texts, .npy, .pt or .safetensors of token rows; a name only, where rows are given
    key: str = "text"  # of the text, in .jsonl files
    given: Integer[Tensor, "row pos"] | None = None

    def __reduce__(self) -> tuple[type[Corpus], tuple[Any, ...]]:
        return type(self), (self.path.absolute(), self.key, self.given)

    @cached_property
    def rows(self) -> Integer[Tensor, "row pos"] | None:
        """Tokens, mapped from the file; None where it is text."""
        return self.given if self.given is not None or self.path.suffix not in TOKEN_SUFFIXES else read_tokens(self.path)

    def read(self, first: int, end: int) -> Part:
        """The rows of a range, or the texts whose lines begin in a range of bytes."""
        return list(read_texts(self.path, self.key, first, end)) if self.rows is None else self.rows[first:end]

    def sample(self, first: int, end: int) -> bytes:
        """What stands for the content of a range in its key: its beginning, or all of it where rows are given."""
        if self.rows is None:
            with self.path.open("rb") as file:
                file.seek(first)
                return file.read(min(SAMPLE, end - first))
        shown = end if self.given is not None else min(end, first + 1 + SAMPLE // self.rows[0].nbytes)
        return _bytes_of(self.rows[first:shown])


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of a corpus that is searched as a whole: some rows, or the texts that begin in some bytes of a file."""

    corpus: Corpus
    prefix: str  # of the ids
    first: int
    end: int

    def __repr__(self) -> str:
        return f"Chunk({self.corpus.path.name!r}, {self.first} to {self.end})"

    @property
    def inputs(self) -> dict[str, Any]:
        """What its key holds of the data: the range, and a digest of its first 4 KiB, for no more is read before the work begins.

        A change further inside a chunk leaves its key, so the last step compares the whole content with what was searched.
        """
        start = hashlib.sha256(self.corpus.sample(self.first, self.end)).hexdigest()[:32]
        return {"prefix": self.prefix, "key": self.corpus.key, "first": self.first, "end": self.end, "start": start}

    def read(self) -> tuple[Part, dict[str, Any]]:
        """Its rows or texts, how many there are, and a hash of all of them."""
        part = self.corpus.read(self.first, self.end)
        content = digest_of(part) if isinstance(part, list) else hashlib.sha256(_bytes_of(part)).hexdigest()
        return part, {"n": len(part), "content": content}


def chunks_of(corpora: Sequence[Corpus], windows: Windows = "first", length: int = Criteria().length) -> list[Chunk]:
    """The chunks of some corpora, of which no more than the size and the first text is read.

    Raises:  FileNotFoundError; ValueError: two files of one name, an empty or another kind of file, or windows="any" of text.

    >>> chunks_of([Corpus(Path("rows"), given=text.repeat(3000, 1))])
    [Chunk('rows', 0 to 2048), Chunk('rows', 2048 to 3000)]
    """
    if len({corpus.path.stem for corpus in corpora}) < len(corpora):
        given = ", ".join(str(corpus.path) for corpus in corpora)
        raise ValueError(f"data must be files of different names, got {given}. The ids are made of these names.")
    found: list[Chunk] = []
    for corpus in corpora:
        if corpus.rows is None:
            if windows == "any":
                raise ValueError(f"windows must be first or a number for text, got any for {str(corpus.path)!r}. Give rows of tokens.")
            if next(read_texts(corpus.path, corpus.key), None) is None:
                raise ValueError(f"data must hold at least one text, got none in {str(corpus.path)!r}. Check the file.")
            size, end = CHUNK_BYTES, corpus.path.stat().st_size
        else:
            end = len(corpus.rows)
            size = CHUNK_WINDOWS if windows == "first" else max(1, CHUNK_WINDOWS * length // corpus.rows.shape[1])
        prefix = f"{corpus.path.stem}/" if len(corpora) > 1 else ""
        found += [Chunk(corpus, prefix, first, min(first + size, end)) for first in range(0, end, size)]
    return found


def parse_windows(text: str) -> Windows:
    """``first``, ``any`` or the tokens between windows, from a command line."""
    if text == "first" or text == "any":
        return text
    if not text.isdecimal() or not int(text):
        raise ValueError(f"windows must be first, any or a number of tokens from 1 on, got {text!r}. Use first, as the paper does.")
    return int(text)


@dataclass(frozen=True, eq=False)
class SearchResults:
    """What the chunks of a search gave, as far as they are searched.

    >>> SearchResults([None], [{}], {"0": ""}).report.n_in
    0
    """

    chunks: list[FilteredChunk | None]  # None where it is missing
    contents: list[dict[str, Any]]  # how many texts or rows there were, and their hash
    missing: dict[str, str]  # chunk -> why it could not be searched; empty where it was not tried yet

    @property
    def report(self) -> Report:
        """What was removed so far; near-duplicates and the draw come when all chunks are there."""
        return merged(chunk for chunk in self.chunks if chunk)[0]

    @classmethod
    def of(cls, cache: Cache) -> SearchResults:
        """From the records of the last plan of a cache: data that have grown or changed make another plan.

        Ids count texts over all chunks of a file; where an earlier chunk is missing, from the chunk on, whose name they bear.
        """
        found = cls([], [], {})
        failures, counted = cache.failures(), dict[str, int | None]()
        for task in cache.plans()[-1].plan.tasks:
            record, prefix = cache.read(task), task.inputs["chunk"]["prefix"]
            if record is None:
                found.missing[task.name] = failures.get(task.key, {"reason": ""})["reason"]
                chunk, content, counted[prefix] = None, {}, None
            else:
                first = counted.get(prefix, 0) if record.value["of_texts"] else task.inputs["chunk"]["first"]
                renamed = partial(_numbered, prefix=prefix if first is not None else f"{task.name}: ", first=first or 0)
                chunk = FilteredChunk.unpacked(record.value, record.tensors, renamed)
                content = {"n": record.value["n"], "content": record.value["content"]}
                counted[prefix] = None if first is None else first + record.value["n"]
            found.chunks.append(chunk)
            found.contents.append(content)
        return found


@dataclass(frozen=True, eq=False)
class Search(Benchmark[SearchResults]):
    """The search of a corpus for memorized sequences: ``run`` filters the chunks, ``collection`` makes the last step.

    >>> search = Search(model, chunks_of([Corpus(Path("rows"), given=torch.stack([one.tokens for one in few]))]), Criteria())
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
        spelling = digest_of([self._filter.decode([token]) for token in probe])  # distances depend on how tokens are spelled
        about = {**asdict(self.criteria), "windows": self.windows, "spelling": spelling}
        tasks: list[Task] = []
        for i, chunk in enumerate(self.chunks):
            inputs = {"model": made_of, **about, "chunk": chunk.inputs}
            tasks.append(Task("collect", inputs, label="collect", name=f"{chunk.prefix}{chunk.first}", index=i, ratio=1.0))
        settings = {"model": model_name(self.model), "fingerprint": made_of, "dtype": str(next(iter(self.model.parameters())).dtype)}
        settings |= {"data": list(dict.fromkeys(chunk.corpus.path.name for chunk in self.chunks)), **about}
        return Plan("collect", settings, [], {}, tasks, grows="text at the end of the data (and another n_dev, n_max and seed)")

    def compute(self, task: Task, needs: Sequence[Record], methods: Any, report: Callable[[float], None]) -> Record:
        part, content = self.chunks[task.index].read()
        value, tensors = self._filter.filter(self._candidates(part, self.windows, self.criteria.length)).packed()
        return Record({**value, **content, "of_texts": isinstance(part, list)}, tensors)

    def _candidates(self, part: Part, windows: Windows, length: int) -> Iterator[Candidate]:
        """The windows of a part, with ids that count from its beginning."""
        stride = windows if isinstance(windows, int) else None
        if isinstance(part, list):
            return text_windows(part, self.model, length, stride)
        return likely_windows(self.model, part, self.criteria) if windows == "any" else token_windows(part, length, stride)

    def results(self, cache: Cache) -> SearchResults:
        return SearchResults.of(cache)

    def collection(self, found: SearchResults, *, n_dev: int = 5, n_max: int | None = None, seed: int = 0) -> Collection:
        """The last step, which needs all chunks, of data that have not changed since: arguments as of ``collect_memorized``."""
        if found.missing:
            raise ValueError(f"chunks must all be searched, got {len(found.missing)} of {len(self.chunks)} missing. Run the search again.")
        for chunk, content in zip(self.chunks, found.contents, strict=True):
            if chunk.read()[1] != content:
                place = f"{str(chunk.corpus.path)!r} ({chunk.first} to {chunk.end}). Search them again in another folder."
                raise ValueError(f"data must stay as they were when they were searched, got another content in {place}")
        return assemble(self._filter, [chunk for chunk in found.chunks if chunk], n_dev=n_dev, n_max=n_max, seed=seed)

    def general_text(
        self, collected: Sequence[MemorizedSequence], n_sequences: int = 2048, length: int = 128, *, seed: int = 0
    ) -> Int[Tensor, "sequence pos"]:
        """``perplexity_split`` of the first tokens of each row or text of the corpus."""
        stream = chain.from_iterable(self._candidates(chunk.read()[0], "first", length) for chunk in self.chunks)
        return perplexity_split(stream, collected, n_sequences, length, seed=seed)

    @cached_property
    def _filter(self) -> Filter:
        return Filter(self.model, self.criteria, self.decode)


def _numbered(text: str, prefix: str, first: int) -> str:
    """An id, or a text that begins with one, of a chunk as that of the corpus: ``row-2+25`` from row 100 on is ``row-102+25``."""
    return prefix + re.sub(r"\d+", lambda number: str(int(number[0]) + first), text, count=1)


def _bytes_of(rows: Integer[Tensor, "row pos"]) -> bytes:
    return rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()
