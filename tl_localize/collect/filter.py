"""The criteria that look at one sequence at a time.

Tests that cost nothing come first, then a forward pass over the first suffix tokens, then one over
all of them, then greedy generation.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.collect.criteria import (
    DISTANT,
    INACCURATE,
    MONOTONOUS,
    REPEATED,
    REPETITIVE,
    SHORT,
    Criteria,
    Report,
)
from tl_localize.metrics import Decode, residual, unembed
from tl_localize.model.forward import generate
from tl_localize.model.memory import rows_that_fit, work_in_batches
from tl_localize.model.neurons import LanguageModel, ModelView
from tl_localize.sequences import check_tokens

# Candidates that are filtered as a whole: half a minute of a small model on a processor, seconds on
# a GPU.
CHUNK_WINDOWS = 2048
# What the criteria say of a chunk, as JSON has it: under "report" what came in and what was removed
# before generation, under "recited" a row for each that was left for it.
Filtered = dict[str, Any]
# tokens, id, category, bos, accuracy, distance, text; failed: by which criterion
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A window of a row or of a text, which is tested for memorization.

    Args:
        category: groups the confusion matrix of DEL.
        bos: the beginning-of-text token that a window of a text starts with, where the tokenizer
            puts one first; no count of the criteria includes it.

    >>> Candidate(np.arange(80), "page 3", "poems").category
    'poems'
    """

    tokens: Int[np.ndarray, " pos"]
    id: str
    category: str = ""
    bos: str = ""


def merge_chunks(chunks: Iterable[Filtered]) -> tuple[Report, list[Row]]:
    """Chunks as one; what an earlier one holds is a duplicate in a later one. Returns what has
    passed, in order.
    """
    report = Report()
    seen: set[tuple[int, ...]] = set()
    found: list[Row] = []
    for chunk in chunks:
        report.add(Report(**chunk["report"]))
        for row in chunk["recited"]:
            tokens = tuple(row["tokens"])
            if tokens in seen:
                report.removed[REPEATED] += 1
            elif row["failed"]:
                report.removed[row["failed"]] += 1
            else:
                found.append(row)
            seen.add(tokens)
    return report, found


@dataclass(frozen=True, eq=False)
class Filter:
    """The criteria that look at one sequence at a time, in the order of their cost; arguments as of
    ``collect_memorized``.

    >>> candidate = Candidate(text[0].numpy(), "a")
    >>> decode = model.tokenizer.decode
    >>> Filter(model, Criteria(), decode).filter([candidate])["report"]["n_in"]
    1
    """

    model: LanguageModel
    criteria: Criteria
    decode: Decode

    def __post_init__(self) -> None:
        self._check_fits(self.criteria.length)

    def _check_fits(self, length: int, bos: str = "") -> None:
        """Raise ValueError where a window is longer than what the model reads."""
        if length > self.model.cfg.n_ctx:
            raise ValueError(
                f"n_prefix + n_suffix must be at most n_ctx={self.model.cfg.n_ctx}, got "
                f"{length}{bos and f', of which one is {bos}'}. Use shorter sequences."
            )

    @cached_property
    def view(self) -> ModelView:
        return ModelView(self.model)

    def filter(self, candidates: Iterable[Candidate]) -> Filtered:
        """What the criteria say of some candidates, all of which are held in memory."""
        report = Report()
        readable = list(self._readable_candidates(candidates, report))
        recited: list[Row] = []
        for bos in dict.fromkeys(["", *(candidate.bos for candidate in readable)]):
            of_one_length = [candidate for candidate in readable if candidate.bos == bos]
            recited += self._recited(of_one_length, report)
        return {"report": vars(report), "recited": recited}

    def _recited(self, candidates: list[Candidate], report: Report) -> Iterator[Row]:
        """Those that the model predicts, each with what it writes after the prefix."""
        criteria = self.criteria
        size = rows_that_fit(self.view, criteria.length, gradient=False)
        left = dict.fromkeys(candidates, 0.0)  # and their accuracy
        # The first suffix tokens show that most are not memorized; what could pass is not removed.
        n_first = min(criteria.n_suffix, max(4, 3 * criteria.max_misses))
        for n in (n_first, criteria.n_suffix):
            for batch, missed in work_in_batches(partial(self._count_misses, n), list(left), size):
                for candidate, wrong in zip(batch, missed, strict=True):
                    left[candidate] = (n - wrong) / n
                    if wrong > criteria.max_misses:
                        del left[candidate]
                        report.removed[INACCURATE] += 1
        for batch, continued in work_in_batches(self._continue, list(left), size):
            for candidate, suffix in zip(batch, continued, strict=True):
                yield self._row_of(candidate, suffix, left[candidate])

    def _readable_candidates(
        self, candidates: Iterable[Candidate], report: Report
    ) -> Iterator[Candidate]:
        """Long enough, in the vocabulary, not repetitive: no model needed."""
        criteria = self.criteria
        for candidate in candidates:
            report.n_in += 1
            tokens = candidate.tokens
            if len(tokens):
                check_tokens(self.model, torch.from_numpy(tokens), f" in {candidate.id!r}")
            self._check_fits(len(tokens), candidate.bos)
            distinct = len(set(tokens[self._n_prefix(candidate) :].tolist()))
            if len(tokens) < self._n_prefix(candidate) + criteria.n_suffix:
                report.removed[SHORT] += 1
            elif distinct < criteria.min_distinct:
                report.removed[REPETITIVE] += 1
            else:
                yield candidate

    def _n_prefix(self, candidate: Candidate) -> int:
        """Tokens that prompt the model."""
        return self.criteria.n_prefix + bool(candidate.bos)

    @torch.no_grad()
    def _count_misses(self, n: int, batch: list[Candidate]) -> list[int]:
        """How many of the first n suffix tokens the teacher-forced argmax does not predict."""
        start = self._n_prefix(batch[0])
        tokens = self._tokens(batch)[:, : start + n]
        with self.view.one_gelu_kernel():
            states = residual(self.model, tokens[:, :-1])[:, start - 1 :]
            logits = unembed(self.model, states)
        predicted = logits.argmax(-1)  # of NaN, where there is one
        missing = logits.gather(-1, predicted[..., None]).isnan().flatten(1).any(1)
        misses = (predicted != tokens[:, start:]).sum(1)
        found: list[int] = misses.masked_fill(missing, -1).tolist()
        if -1 in found:
            raise ValueError(
                f"logits must be numbers, got NaN in {batch[found.index(-1)].id!r}. Use float32."
            )
        return found

    def _tokens(self, batch: list[Candidate]) -> Int[Tensor, "batch pos"]:
        stacked = np.stack([candidate.tokens for candidate in batch])
        return torch.from_numpy(stacked).to(self.view.device)

    def _continue(self, batch: list[Candidate]) -> list[list[int]]:
        """The greedy continuation of each prefix."""
        context = self._tokens(batch)[:, : self._n_prefix(batch[0])]
        with self.view.one_gelu_kernel():
            return generate(self.model, context, self.criteria.n_suffix).tolist()

    def _row_of(self, candidate: Candidate, suffix: list[int], accuracy: float) -> Row:
        """Whether a greedy continuation is close enough to the truth."""
        criteria = self.criteria
        tokens: list[int] = candidate.tokens.tolist()
        first = int(bool(candidate.bos))
        text = self.decode(tokens[first:])
        said = self.decode(tokens[first : self._n_prefix(candidate)] + suffix)
        distance = Levenshtein.distance(said, text)
        failed = ""
        if distance > criteria.max_distance:
            failed = DISTANT
        elif len(set(suffix)) < criteria.min_distinct:
            failed = MONOTONOUS
        about = {"accuracy": accuracy, "distance": distance, "text": text, "failed": failed}
        return {**vars(candidate), "tokens": tokens, **about}
