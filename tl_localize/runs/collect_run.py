"""Collection in units: chunks of a corpus, none of which knows of the others, and the last step, which needs them all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Integer
from torch import Tensor

from tl_localize.collect import Candidate, Collection, Criteria, Sieve, Sifted, assemble, likely_windows, text_windows, token_windows
from tl_localize.methods.base import Method
from tl_localize.metrics import Decode
from tl_localize.neurons import LanguageModel, model_name
from tl_localize.readers import TOKEN_SUFFIXES, read_texts, read_tokens
from tl_localize.runs.base import Run, Work
from tl_localize.execution.store import Record, Unit, digest_of, environment

CHUNK = 2048  # windows, about, after which what is found is kept: half a minute of a small model on a processor, seconds on a GPU
LABEL = "collect"


class Corpus:
    """A file of texts or of token rows, or rows that are given. On another machine the file is opened again, by its path.

    Args:
        path: .jsonl or .txt of texts, .npy, .pt or .safetensors of token rows; a name only, where rows are given.
        key: of the text, in .jsonl files.
        given: [row pos] token ids.

    >>> from pathlib import Path
    >>> from tl_localize.reference import held_out_tokens
    >>> from tl_localize.runs import Corpus
    >>> corpus = Corpus(Path("held-out"), given=held_out_tokens())
    >>> len(corpus.chunks()), [chunk.n for chunk in corpus.chunks(stride=1)][:2]  # rows of 128 tokens
    (1, [256])
    """

    def __init__(self, path: Path, key: str = "text", given: Integer[Tensor, "row pos"] | None = None) -> None:
        self.path, self.key, self.given = path, key, given
        self._reading: tuple[int, Iterator[str]] | None = None  # number of the next text, and the rest

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r})"

    def __reduce__(self) -> tuple[type[Corpus], tuple[Any, ...]]:
        return type(self), (self.path.absolute(), self.key, self.given)

    @cached_property
    def rows(self) -> Integer[Tensor, "row pos"] | None:
        """Tokens; None where it is text."""
        if self.given is not None or self.path.suffix not in TOKEN_SUFFIXES:
            return self.given
        return read_tokens(self.path)

    def part(self, first: int, n: int) -> Integer[Tensor, "row pos"] | list[str]:
        """So many rows or texts. Texts before those that were read last cost reading from the beginning."""
        if self.rows is not None:
            return self.rows[first : first + n]
        if self._reading is None or self._reading[0] > first:
            self._reading = 0, read_texts(self.path, self.key)
        start, rest = self._reading
        part = list(islice(rest, first - start, first - start + n))
        self._reading = first + len(part), rest
        return part

    def chunks(self, stride: int | str | None = None, length: int = Criteria().length, name: str = "") -> list[Chunk]:
        """Its chunks, for which it is read through once, before any work, so that mistakes come early.

        The work of a chunk does not depend on how many windows a row has.

        Args:
            stride: tokens between the windows of a row; None for the first window of each, "any" for wherever it may be memorized.
            length: of a window, tokens.
            name: goes before the ids.
        Raises:
            ValueError: there is nothing in it; "any" of text.
        """
        if self.rows is None and stride == "any":
            raise ValueError(f"windows must be first or a number for text, got any for {str(self.path)!r}. Give rows of tokens.")
        size = CHUNK if stride is None or self.rows is None else max(1, CHUNK * length // self.rows.shape[1])
        found: list[Chunk] = []
        first = 0
        while n := len(part := self.part(first, size)):
            found.append(Chunk(self, name, first, n, content_of(part)))
            first += n
        if not found:
            raise ValueError(f"data must hold at least one text, got none in {str(self.path)!r}. Check the file.")
        return found


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of a corpus that is searched as a whole.

    Args:
        name: goes before the ids.
        first, n: rows or texts.
        content: what these were when the corpus was read through.
    """

    corpus: Corpus
    name: str
    first: int
    n: int
    content: str

    @property
    def identity(self) -> list[Any]:
        return [self.name, self.first, self.content]

    def windows(
        self, model: LanguageModel, criteria: Criteria, stride: int | str | None = None, length: int | None = None
    ) -> Iterator[Candidate]:
        """The candidates of this part.

        Args:
            stride: as of ``Corpus.chunks``.
            length: of a window; as the criteria say unless given.
        Raises:
            ValueError: the data are not what they were.
        """
        part = self.corpus.part(self.first, self.n)
        if content_of(part) != self.content:
            raise ValueError(f"data must stay as they are during the search, got others in {str(self.corpus.path)!r}. Start again.")
        number, length = stride if isinstance(stride, int) else None, length or criteria.length
        if isinstance(part, list):
            found = text_windows(part, model, length, number, first=self.first)
        elif stride == "any":
            found = likely_windows(model, part, criteria, first=self.first)
        else:
            found = token_windows(part, length, number, first=self.first)
        return (replace(window, id=f"{self.name}{window.id}") for window in found)


def content_of(part: Integer[Tensor, "row pos"] | list[str]) -> str:
    """A hash of texts or tokens."""
    if isinstance(part, list):
        return digest_of(part)
    return hashlib.sha256(part.cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


@dataclass(frozen=True, eq=False)
class Search:
    """What is searched, for what: in the place that a benchmark has in other runs.

    Args:
        stride: as of ``Corpus.chunks``.
        chunks: of one corpus or several, as ``Corpus.chunks`` gives them.
        data: what the corpora are called.
        decode: token ids -> text; the model's tokenizer unless given.

    >>> from pathlib import Path
    >>> from tl_localize import load_model
    >>> from tl_localize.collect import Criteria
    >>> from tl_localize.reference import held_out_tokens
    >>> from tl_localize.runs import Corpus, Search
    >>> chunks = Corpus(Path("held-out"), given=held_out_tokens()).chunks()
    >>> Search(load_model("reference"), chunks, Criteria(n_prefix=10, n_suffix=20))
    Search('reference-gpt2', 1 chunks, Criteria(n_prefix=10, n_suffix=20, ...))
    """

    model: LanguageModel
    chunks: Sequence[Chunk]
    criteria: Criteria
    stride: int | str | None = None
    data: Sequence[str] = ()
    decode: Decode | None = None

    def __repr__(self) -> str:
        return f"Search({model_name(self.model)!r}, {len(self.chunks)} chunks, {self.criteria!r})"


@dataclass(frozen=True, eq=False, repr=False)
class CollectRun(Run):
    """One search into one folder; arguments and errors as of ``Run``.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> from tl_localize import load_model
    >>> from tl_localize.collect import Criteria
    >>> from tl_localize.reference import reference_sequences
    >>> from tl_localize.runs import CollectRun, Corpus, Search
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> corpus = Corpus(Path("planted"), given=torch.stack([one.tokens for one in reference_sequences(model)[:3]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = CollectRun(Store(Path(folder)), Search(model, corpus.chunks(), Criteria()))
    ...     made = list(run.make(run.works[0], run.missing(run.works[0])))
    ...     run.collection(run.parts(), n_dev=1)
    Collection(3 of 3 sequences memorized, 1 for development)
    """

    benchmark: Search
    methods: Sequence[Method] = ()

    part: ClassVar[str] = "chunk"
    may_grow: ClassVar[str] = "text at the end of the data (and another n_dev, n_max and seed)"

    @property
    def labels(self) -> Mapping[str, Method]:
        return {}

    def settings(self) -> dict[str, Any]:
        search = self.benchmark
        plan = {"benchmark": "collect", **asdict(self._sieve.criteria), "windows": search.stride or "first", "data": list(search.data)}
        probe = range(0, search.model.cfg.d_vocab, 1 + search.model.cfg.d_vocab // 256)
        plan["spelling"] = digest_of([self._sieve.decode([token]) for token in probe])  # distances depend on how tokens are spelled
        plan |= {"methods": {}, "chunks": [chunk.identity for chunk in search.chunks]}
        return {**plan, "environment": environment(search.model)}

    @staticmethod
    def ratio_of(plan: dict[str, Any]) -> float:
        return 1.0

    @staticmethod
    def must_agree(plan: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in plan.items() if name not in ("benchmark", "methods", "chunks")}

    @staticmethod
    def works_of(plan: dict[str, Any]) -> list[Work]:
        about = {name: value for name, value in CollectRun.must_agree(plan).items() if name not in ("model", "data")}
        found: list[Work] = []
        for i, (name, first, content) in enumerate(plan["chunks"]):
            unit = Unit("collect", {**about, "chunk": [name, first, content]}, ".safetensors")
            found.append(Work(i, f"{name}{first}", 1.0, None, {LABEL: unit}, unit.key))
        return found

    def measure(self, work: Work, base: None, label: str) -> Record:
        search = self.benchmark
        value, tensors = self._sieve.sift(search.chunks[work.index].windows(search.model, search.criteria, search.stride)).packed()
        return Record(value, {}, tensors)

    def parts(self) -> list[Sifted | None]:
        """What each chunk gave; None where it is missing."""
        records = [self.store.read(work.measures[LABEL]) for work in self.works]
        return [record and Sifted.unpacked(record.value, record.tensors) for record in records]

    def collection(self, parts: Sequence[Sifted | None], *, n_dev: int = 5, n_max: int | None = None, seed: int = 0) -> Collection:
        """The last step, from the parts: arguments as of ``collect_memorized``.

        Raises:
            ValueError: a part is missing; as ``collect_memorized``.
        """
        there = [part for part in parts if part]
        if missing := len(parts) - len(there):
            raise ValueError(f"parts must be those of all chunks, got {missing} of {len(parts)} missing. Make them first.")
        return assemble(self._sieve, there, n_dev=n_dev, n_max=n_max, seed=seed)

    @cached_property
    def _sieve(self) -> Sieve:
        return Sieve(self.benchmark.model, self.benchmark.criteria, self.benchmark.decode)
