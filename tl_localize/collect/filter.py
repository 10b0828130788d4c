"""The criteria that look at one sequence at a time.

Tests that cost nothing come first, then a forward pass over the first suffix tokens, then one over
all of them, then greedy generation. The stream is read once; memory holds one batch and what has
passed so far.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.batching import halving, rows_that_fit
from tl_localize.collect.criteria import (
    DISTANT,
    EXAMPLES,
    INACCURATE,
    MONOTONOUS,
    REPEATED,
    REPETITIVE,
    SHORT,
    Criteria,
    Report,
)
from tl_localize.collect.windows import Candidate
from tl_localize.files import Saved
from tl_localize.forward import generate
from tl_localize.losses import residual, unembed
from tl_localize.metrics import Decode, decoder
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.sequences import check_tokens

Item = TypeVar("Item")
Passed = TypeVar("Passed")
Hits = Bool[np.ndarray, " suffix"]


@dataclass(frozen=True, eq=False)
class Recitation:
    """A candidate that is predicted accurately, and how well the model recites it."""

    tokens: Int[np.ndarray, " pos"]
    id: str
    category: str
    accuracy: float  # teacher-forced, fraction of the suffix
    distance: int  # of the greedy continuation, characters
    text: str  # of the whole sequence
    failed: str = ""  # the criterion that removes it; empty where it has passed
    why: str = ""  # the number that it failed by


@dataclass(frozen=True, eq=False)
class FilteredChunk(Saved):
    """What the criteria say of a part of a stream, without knowledge of the others."""

    required: ClassVar[tuple[str, ...]] = ("tokens",)
    report: Report  # what came in, and what was removed before generation
    recited: list[Recitation]  # what was left for generation

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        about = [
            {name: value for name, value in vars(one).items() if name != "tokens"}
            for one in self.recited
        ]
        tokens = torch.from_numpy(np.array([one.tokens for one in self.recited], dtype=np.int64))
        return {"tokens": tokens}, {"chunk": json.dumps([vars(self.report), about])}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> FilteredChunk:
        report, recited = json.loads(metadata["chunk"])
        rows = zip(tensors["tokens"].numpy(), recited, strict=True)
        return cls(Report(**report), [Recitation(row, **about) for row, about in rows])


def merged(chunks: Iterable[FilteredChunk]) -> tuple[Report, list[Recitation]]:
    """Parts of a stream as one; what an earlier part holds is a duplicate in a later one. Returns
    what has passed, in order.
    """
    report, seen, found = Report(), set[bytes](), list[Recitation]()
    for chunk in chunks:
        report.add(chunk.report)
        for one in chunk.recited:
            if (tokens := one.tokens.tobytes()) in seen:
                report.remove(REPEATED, one.id, "seen before", one.text)
            elif one.failed:
                report.remove(one.failed, one.id, one.why, one.text)
            else:
                found.append(one)
            seen.add(tokens)
    return report, found


class Filter:
    """The criteria that look at one sequence at a time, in the order of their cost; arguments as of
    ``collect_memorized``.

    >>> Filter(model, Criteria()).filter([sequence.tokens, text[0]]).report
    Report(2 came in, 1 removed: accuracy, 1 left)
    """

    def __init__(
        self,
        model: LanguageModel,
        criteria: Criteria,
        decode: Decode | None = None,
        batch_size: int | None = None,
    ) -> None:
        if criteria.length > model.cfg.n_ctx:
            raise ValueError(
                f"n_prefix + n_suffix must be at most n_ctx={model.cfg.n_ctx}, got "
                f"{criteria.length}. Use shorter sequences."
            )
        self.model, self.criteria, self.decode = model, criteria, decode or decoder(model)
        self.view = NeuronView(model)
        self.batch_size = rows_that_fit(self.view, criteria.length, batch_size)

    def filter(self, stream: Iterable[Any]) -> FilteredChunk:
        """Each step waits until it has a batch of what the step before let through."""
        self.report, self.seen = Report(), set[bytes]()
        probed = self._in_batches(self._readable(stream), self._probe)
        accurate = self._in_batches(probed, self._accurate)
        return FilteredChunk(self.report, list(self._in_batches(accurate, self._recited)))

    def _in_batches(
        self, items: Iterable[Item], work: Callable[[list[Item]], list[Passed]]
    ) -> Iterator[Passed]:
        iterator = iter(items)
        while batch := list(islice(iterator, self.batch_size)):
            for _, passed in halving(work, batch, len(batch)):
                yield from passed

    def _remove(self, criterion: str, candidate: Candidate, why: str) -> None:
        shown = len(candidate.tokens) and len(self.report.examples[criterion]) < EXAMPLES
        self.report.remove(
            criterion, candidate.id, why, self.decode(candidate.tokens.tolist()) if shown else ""
        )

    def _readable(self, stream: Iterable[Any]) -> Iterator[Candidate]:
        """Long enough, in the vocabulary, not repetitive: no model needed."""
        criteria = self.criteria
        for item in stream:
            given = as_candidate(item, f"sequence-{self.report.n_in}")
            self.report.n_in += 1
            candidate = replace(given, tokens=given.tokens[: criteria.length].astype(np.int64))
            tokens = candidate.tokens
            if len(tokens):
                check_tokens(self.model, torch.from_numpy(tokens), f" in {candidate.id!r}")
            if len(tokens) < criteria.length:
                self._remove(SHORT, candidate, f"{len(tokens)} tokens")
            elif (
                distinct := len(set(tokens[criteria.n_prefix :].tolist()))
            ) < criteria.min_distinct:
                self._remove(REPETITIVE, candidate, f"{distinct} tokens")
            # most copies are caught here, before any forward pass
            elif tokens.tobytes() in self.seen:
                self._remove(REPEATED, candidate, "seen before")
            else:
                yield candidate

    def _probe(self, batch: list[Candidate]) -> list[Candidate]:
        """Only as many suffix tokens as it takes to see that most sequences are not memorized;
        removes nothing that could pass.
        """
        allowed = self.criteria.max_misses
        n = min(self.criteria.n_suffix, max(4, 3 * allowed))
        passed: list[Candidate] = []
        for candidate, missed in zip(batch, (~self._hits(batch, n)).sum(1), strict=True):
            if missed <= allowed:
                passed.append(candidate)
            else:
                self._remove(
                    INACCURATE, candidate, f"{missed} of the first {n} suffix tokens wrong"
                )
        return passed

    def _accurate(self, batch: list[Candidate]) -> list[tuple[Candidate, Hits]]:
        """Accuracy of the whole suffix; a copy of what has passed before is removed."""
        passed: list[tuple[Candidate, Hits]] = []
        for candidate, hits in zip(batch, self._hits(batch, self.criteria.n_suffix), strict=True):
            tokens = candidate.tokens.tobytes()
            if tokens in self.seen:
                self._remove(REPEATED, candidate, "seen before")
            elif (~hits).sum() > self.criteria.max_misses:
                self._remove(INACCURATE, candidate, f"accuracy {hits.mean():.2f}")
            else:
                self.seen.add(tokens)
                passed.append((candidate, hits))
        return passed

    @torch.no_grad()
    def _hits(self, batch: list[Candidate], n: int) -> Bool[np.ndarray, "batch suffix"]:
        """Which of the first n suffix tokens the teacher-forced argmax predicts."""
        start = self.criteria.n_prefix
        tokens = np.stack([candidate.tokens for candidate in batch])[:, : start + n]
        given = torch.from_numpy(tokens[:, :-1]).to(self.view.device)
        with self.view.one_gelu_kernel():
            predicted = unembed(self.model, residual(self.model, given)[:, start - 1 :]).argmax(-1)
        return predicted.cpu().numpy() == tokens[:, start:]

    def _recited(self, batch: list[tuple[Candidate, Hits]]) -> list[Recitation]:
        """Whether the greedy continuation is close enough to the truth."""
        criteria, recited = self.criteria, list[Recitation]()
        for (candidate, hits), whole in zip(batch, self._continued(batch).tolist(), strict=True):
            text = self.decode(candidate.tokens.tolist())
            distance, distinct = (
                Levenshtein.distance(self.decode(whole), text),
                len(set(whole[criteria.n_prefix :])),
            )
            failed = why = ""
            if distance > criteria.max_distance:
                failed, why = DISTANT, f"{distance} characters"
            elif distinct < criteria.min_distinct:
                failed, why = MONOTONOUS, f"{distinct} tokens"
            recited.append(
                Recitation(
                    candidate.tokens,
                    candidate.id,
                    candidate.category,
                    float(hits.mean()),
                    distance,
                    text,
                    failed,
                    why,
                )
            )
        return recited

    def _continued(self, batch: list[tuple[Candidate, Hits]]) -> Int[np.ndarray, "batch pos"]:
        """Each prefix with its greedy continuation.

        Up to its first teacher-forced miss the continuation is the true suffix. So a candidate
        without a miss needs no generation, and the others start at the earliest miss among them.
        """
        tokens = np.stack([candidate.tokens for candidate, _ in batch])
        rows = [i for i, (_, hits) in enumerate(batch) if not hits.all()]
        if rows:
            start = self.criteria.n_prefix + min(int(batch[i][1].argmin()) for i in rows)
            context = torch.from_numpy(tokens[rows, :start]).to(self.view.device)
            with self.view.one_gelu_kernel():
                tokens[rows, start:] = (
                    generate(self.model, context, self.criteria.length - start).cpu().numpy()
                )
        return tokens


def as_candidate(item: Any, id: str) -> Candidate:
    """A Candidate as it is, or one of a plain vector of token ids.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(item, Candidate):
        return item
    tokens = item.detach().cpu().long().numpy() if isinstance(item, Tensor) else np.asarray(item)
    tokens = tokens.astype(np.int64) if tokens.size == 0 else tokens
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        wrong = (
            f"got shape {tokens.shape} of {tokens.dtype}. Cut texts and long rows with "
            "text_windows or token_windows."
        )
        raise ValueError(f"stream must give vectors of token ids, {wrong}")
    return Candidate(tokens, id)
