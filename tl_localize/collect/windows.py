"""Candidates: windows of token rows and texts that are tested for memorization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Integer

from tl_localize.neurons import LanguageModel, check_count
from tl_localize.readers import Data, Entry
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

    >>> [window.id for window in token_windows(text[:, :128], length=64, stride=64)]
    ['row-0+0', 'row-0+64']
    """
    return entry_windows(Data(source=tokens).entries(), None, length, stride)


def text_windows(
    texts: Iterable[str], model: LanguageModel, length: int = 80, stride: int | None = None
) -> Iterator[Candidate]:
    """The same for texts; a text that is empty or too short comes out as it is, and is counted as
    too short.

    >>> list(text_windows(["a long text, in which the model reads on and on", ""], model, length=8))
    [Candidate('text-0', 8 tokens), Candidate('text-1', 0 tokens)]
    """
    return entry_windows(Data(source=texts).entries(), model, length, stride)


def entry_windows(
    entries: Iterable[Entry],
    model: Any,
    length: int = 80,
    stride: int | None = None,
    *,
    first: int = 0,
    prefix: str = "",
) -> Iterator[Candidate]:
    """The same for rows of data, with their own ids and categories where they have some.

    Args:
        model: Its tokenizer reads texts; None where all rows are tokens.
        first: Number of the first row, in ids.
        prefix: Of all ids.
    """
    if stride is not None:
        check_count(stride=stride)
    for i, one in enumerate(entries, first):
        if one.tokens is not None:
            name, tokens = f"row-{i}", one.tokens
        else:
            name, tokens = f"text-{i}", encode(tokenizer_of(model), one.text) if one.text else []
        row = np.asarray(tokens, dtype=np.int64)
        name = prefix + (one.id or name)
        if stride is None:
            yield Candidate(row[:length], name, one.category)
        else:
            for start in range(0, max(1, len(row) - length + 1), stride):
                yield Candidate(row[start : start + length], f"{name}+{start}", one.category)
