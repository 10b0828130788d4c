"""A corpus searched in chunks, none of which knows of the others; the last step needs them all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_localize.collect.collection import Collection, assemble
from tl_localize.collect.criteria import Criteria, Report
from tl_localize.collect.filter import Filter, FilteredChunk, merged
from tl_localize.collect.general_text import perplexity_split
from tl_localize.collect.windows import Candidate, entry_windows
from tl_localize.execution.engine import Benchmark
from tl_localize.execution.environment import fingerprint
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import Plan, Task, digest_of
from tl_localize.metrics import Decode
from tl_localize.neurons import LanguageModel, model_name
from tl_localize.readers import Data
from tl_localize.sequences import MemorizedSequence

# Windows in a chunk, about: half a minute of a small model on a processor, seconds on a GPU.
CHUNK_WINDOWS = 2048


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some rows of the data, which are searched as a whole.

    On another machine the data are opened again, by their path.
    """

    data: Data
    prefix: str  # of the ids
    first: int
    end: int

    def __repr__(self) -> str:
        return f"Chunk({self.data.name!r}, {self.first} to {self.end})"

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What its key holds of the data: the range, and a digest of all its rows."""
        digest = hashlib.sha256()
        for one in self.data.entries(self.first, self.end):
            row = repr((one.text, one.id, one.category))
            digest.update(row.encode(errors="surrogatepass"))
            if one.tokens is not None:
                digest.update(one.tokens.numpy().tobytes())
        about = {"prefix": self.prefix, "first": self.first, "end": self.end}
        return {**about, "content": digest.hexdigest()[:32]}

    def windows(
        self, model: LanguageModel, length: int, stride: int | None = None
    ) -> Iterator[Candidate]:
        """The candidates in its rows, whose ids count the rows of the data."""
        entries = self.data.entries(self.first, self.end)
        return entry_windows(entries, model, length, stride, first=self.first, prefix=self.prefix)


def chunks_of(
    data: Sequence[Data], stride: int | None = None, length: int = Criteria().length
) -> list[Chunk]:
    """The chunks of some data, for the first window of each row or one every ``stride`` tokens.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Two files of one name, no rows or of another kind, or a stream.

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
        if one.size is None:
            raise ValueError(
                f"data must be rows that can be counted, got the stream {one.name!r}. Give "
                "collect_memorized its token_windows."
            )
        head = next(one.entries(), None)
        if head is None:
            raise ValueError(
                f"data must hold at least one row, got none in {one.name!r}. Check the file."
            )
        size = CHUNK_WINDOWS
        if stride is not None:
            # A token of text has about four characters.
            n_tokens = len(head.text) // 4 if head.tokens is None else len(head.tokens)
            size = max(1, CHUNK_WINDOWS * length // max(length, n_tokens))
        prefix = f"{Path(one.name).stem}/" if len(data) > 1 else ""
        for first in range(0, one.size, size):
            found.append(Chunk(one, prefix, first, min(first + size, one.size)))
    return found


def parse_windows(text: str) -> int | None:
    """The tokens between windows, from a command line; None of ``first``."""
    if text == "first":
        return None
    if not text.isdecimal() or not int(text):
        raise ValueError(
            f"windows must be first or a number of tokens from 1 on, got {text!r}. Use first, as "
            "the paper does."
        )
    return int(text)


@dataclass(frozen=True, eq=False)
class SearchResults:
    """What the chunks of a search gave, as far as they are searched.

    >>> SearchResults([None], {"0": ""}).report.n_in
    0
    """

    chunks: list[FilteredChunk | None]  # None where it is missing
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
        """
        found = cls([], {})
        failures = cache.failures()
        for task in cache.plans()[-1].plan.tasks:
            record = cache.read(task)
            if record is None:
                found.missing[task.name] = failures.get(task.key, {"reason": ""})["reason"]
                found.chunks.append(None)
            else:
                found.chunks.append(record.value)
        return found


@dataclass(frozen=True, eq=False)
class Search(Benchmark[SearchResults]):
    """The search of a corpus for memorized sequences: ``run`` filters the chunks, ``collection``
    makes the last step.

    >>> data = Data(source=torch.stack([one.tokens for one in few]))
    >>> search = Search(model, chunks_of([data]), Criteria())
    >>> search.collection(search.run(), n_dev=1)
    Collection(3 of 3 sequences memorized, 1 for development)
    """

    model: LanguageModel
    chunks: Sequence[Chunk]  # as ``chunks_of`` gives them, for this stride
    criteria: Criteria
    stride: int | None = None  # tokens between the windows of a row; None is its first window
    decode: Decode | None = None  # the model's tokenizer unless given

    def __repr__(self) -> str:
        return f"Search({model_name(self.model)!r}, {len(self.chunks)} chunks, {self.criteria!r})"

    def plan(self, methods: Sequence[Any] = (), before: Sequence[Plan] = ()) -> Plan:
        made_of = fingerprint(self.model)
        probe = range(0, self.model.cfg.d_vocab, 1 + self.model.cfg.d_vocab // 256)
        # distances depend on how tokens are spelled
        spelling = digest_of([self._filter.decode([token]) for token in probe])
        about = {**asdict(self.criteria), "spelling": spelling}
        about["windows"] = self.stride or "first"
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
    ) -> FilteredChunk:
        chunk = self.chunks[task.index]
        windows = chunk.windows(self.model, self.criteria.length, self.stride)
        return self._filter.filter(windows)

    def results(self, cache: Cache) -> SearchResults:
        return SearchResults.of(cache)

    def collection(
        self, found: SearchResults, *, n_dev: int = 5, n_max: int | None = None, seed: int = 0
    ) -> Collection:
        """The last step, which needs all chunks: arguments as of ``collect_memorized``."""
        if found.missing:
            raise ValueError(
                f"chunks must all be searched, got {len(found.missing)} of {len(self.chunks)} "
                "missing. Run the search again."
            )
        chunks = [chunk for chunk in found.chunks if chunk]
        return assemble(self._filter, chunks, n_dev=n_dev, n_max=n_max, seed=seed)

    def general_text(
        self,
        collected: Sequence[MemorizedSequence],
        n_sequences: int = 2048,
        length: int = 128,
        *,
        seed: int = 0,
    ) -> Int[Tensor, "sequence pos"]:
        """``perplexity_split`` of the first tokens of each row or text of the data."""
        stream = (one for chunk in self.chunks for one in chunk.windows(self.model, length))
        return perplexity_split(stream, collected, n_sequences, length, seed=seed)

    @cached_property
    def _filter(self) -> Filter:
        return Filter(self.model, self.criteria, self.decode)
