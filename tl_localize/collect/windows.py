"""Candidates: windows of token rows and texts that are tested for memorization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from tl_localize.batching import halving, rows_that_fit
from tl_localize.collect.criteria import Criteria
from tl_localize.losses import residual, unembed
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.readers.data import Entry
from tl_localize.readers.sources import as_token_ids
from tl_localize.sequences import encode, tokenizer_of


@dataclass(frozen=True, eq=False)
class Candidate:
    """A token sequence and where it is from.

    >>> Candidate(np.arange(80), "page 3", "poems")
    Candidate('page 3', 80 tokens)
    """

    tokens: Integer[np.ndarray, " pos"]
    id: str
    category: str = ""  # groups the confusion matrix of DEL

    def __repr__(self) -> str:
        return f"Candidate({self.id!r}, {len(self.tokens)} tokens)"


def token_windows(
    tokens: Iterable[Any], length: int = 80, stride: int | None = None
) -> Iterator[Candidate]:
    """Windows of long rows: the first ``length`` tokens of each (as the authors take them), or one
    every ``stride`` tokens.

    Args:
        tokens: a tensor [sequence pos], which may be mapped from a file (``readers.read_tokens``),
            or an iterable of rows, such as ``(row["tokens"] for row in dataset)``.

    >>> [window.id for window in token_windows(text, length=64, stride=64)]  # of a row of 128 tokens
    ['row-0+0', 'row-0+64']
    """
    if stride is not None and stride < 1:
        raise ValueError(
            f"stride must be at least 1, got {stride}. Leave it out for the first window of each "
            "row."
        )
    for i, row in enumerate(tokens):
        ids = row.cpu().long() if isinstance(row, Tensor) else as_token_ids(row, f"row {i}")
        yield from _windows(ids.numpy(), f"row-{i}", length, stride)


def text_windows(
    texts: Iterable[str], model: LanguageModel, length: int = 80, stride: int | None = None
) -> Iterator[Candidate]:
    """The same for texts; a text that is empty or too short comes out as it is, and is counted as
    too short.

    >>> list(text_windows(["a long text, in which the model reads on and on", ""], model, length=8))
    [Candidate('text-0', 8 tokens), Candidate('text-1', 0 tokens)]
    """
    return entry_windows((Entry("", text=text) for text in texts), model, length, stride)


def entry_windows(
    entries: Iterable[Entry], model: LanguageModel, length: int = 80, stride: int | None = None
) -> Iterator[Candidate]:
    """The same for rows of data, with their own ids and categories where they have some."""
    for i, one in enumerate(entries):
        if one.tokens is not None:
            row, name = one.tokens.numpy(), f"row-{i}"
        else:
            row, name = (
                np.array(encode(tokenizer_of(model), one.text) if one.text else [], dtype=np.int64),
                f"text-{i}",
            )
        yield from _windows(row, one.id or name, length, stride, one.category)


def named_windows(windows: Iterable[Candidate], entries: Sequence[Entry]) -> Iterator[Candidate]:
    """Windows of some rows (``row-2+25``) with these rows' own ids and categories."""
    for one in windows:
        row, _, start = one.id.removeprefix("row-").partition("+")
        entry = entries[int(row)]
        yield replace(
            one, id=f"{entry.id}+{start}" if entry.id else one.id, category=entry.category
        )


def _windows(
    row: Int[np.ndarray, " pos"], name: str, length: int, stride: int | None, category: str = ""
) -> Iterator[Candidate]:
    starts = range(0, len(row) - length + 1, stride) if stride and len(row) >= length else (0,)
    for start in starts:
        yield Candidate(
            row[start : start + length], f"{name}+{start}" if stride else name, category
        )


def likely_windows(
    model: LanguageModel,
    tokens: Integer[Tensor, "sequence pos"],
    criteria: Criteria | None = None,
    *,
    slack: int = 4,
) -> Iterator[Candidate]:
    """Windows of long rows, at any position, that the model may have memorized; one forward pass
    over each row finds them.

    A row that is longer than the model can read is read in pieces that overlap, so that every
    window is in exactly one of them. There the context of a window is all that stands before it in
    the piece instead of its own prefix; therefore up to ``slack`` suffix tokens more may be wrong
    than the criteria allow. Of overlapping windows the best one is taken; of equal ones the last,
    because its prefix belongs most to the memorized text. The criteria are still to be tested.

    >>> row = torch.cat([one.tokens for one in few[:2]])  # of 160 tokens
    >>> list(likely_windows(model, row[None]))
    [Candidate('row-0+0', 80 tokens), Candidate('row-0+80', 80 tokens)]
    """
    criteria = criteria or Criteria()
    view = NeuronView(model)
    longest = model.cfg.n_ctx + 1  # tokens of a piece, the last of which is only predicted
    if tokens.shape[1] < criteria.length:
        raise ValueError(
            f"tokens must be rows of at least {criteria.length} tokens, got {tokens.shape[1]}. "
            "Lower n_prefix or n_suffix."
        )
    if criteria.length > longest:
        raise ValueError(
            f"n_prefix + n_suffix must be at most n_ctx + 1 = {longest}, got {criteria.length}. "
            "Use shorter sequences."
        )
    needed = criteria.n_suffix - criteria.max_misses - slack
    size = rows_that_fit(view, min(tokens.shape[1], longest))
    for rows, right in halving(
        partial(_right_in_windows, view, tokens, criteria), range(len(tokens)), size
    ):
        for i, row in zip(rows, right, strict=True):
            for start in _best_windows(row, criteria.length, needed):
                yield Candidate(
                    tokens[i, start : start + criteria.length].cpu().long().numpy(),
                    f"row-{i}+{start}",
                )


@torch.no_grad()
def _right_in_windows(
    view: NeuronView, tokens: Integer[Tensor, "sequence pos"], criteria: Criteria, rows: list[int]
) -> Int[np.ndarray, "row window"]:
    """Right predictions in the suffix of the window that starts at each position of some
    consecutive rows.
    """
    part = tokens[rows[0] : rows[-1] + 1].long().to(view.device)
    longest = view.model.cfg.n_ctx + 1
    found: list[np.ndarray] = []
    for start in range(0, tokens.shape[1] + 1 - criteria.length, longest + 1 - criteria.length):
        piece = part[:, start : start + longest]
        with view.one_gelu_kernel():
            # of tokens 1, 2, ...
            right = (
                unembed(view.model, residual(view.model, piece[:, :-1])).argmax(-1) == piece[:, 1:]
            )
        total = np.pad(right.cpu().numpy().cumsum(1), ((0, 0), (1, 0)))
        first = np.arange(piece.shape[1] + 1 - criteria.length) + criteria.n_prefix - 1
        found.append(total[:, first + criteria.n_suffix] - total[:, first])
    return np.concatenate(found, 1)


def _best_windows(found: Int[np.ndarray, " window"], length: int, needed: int) -> list[int]:
    """Starts of windows that do not overlap, with at least so many right predictions in the suffix."""
    chosen: list[int] = []
    for start in sorted(np.flatnonzero(found >= needed), key=lambda s: (-found[s], -s)):
        if all(abs(start - other) >= length for other in chosen):
            chosen.append(int(start))
    return sorted(chosen)
