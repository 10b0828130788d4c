"""General text for the perplexity that shares nothing with the collected sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_localize.collect.duplicates import ngrams
from tl_localize.collect.filter import as_candidate
from tl_localize.sequences import MemorizedSequence


def perplexity_split(
    stream: Iterable[Any],
    collected: Sequence[MemorizedSequence],
    n_sequences: int = 2048,
    length: int = 128,
    *,
    overlap: int = 13,
    seed: int = 0,
) -> Int[Tensor, "sequence pos"]:
    """Random sequences for the perplexity, none of which shares a run of ``overlap`` tokens with a
    collected sequence.

    Every sequence of the stream has the same chance (reservoir sampling), and memory does not grow
    with the stream.

    Args:
        stream: as for ``collect_memorized``; of each item the first ``length`` tokens; shorter
            items are skipped.
        n_sequences: at most so many.

    Returns:
        [sequence pos] int64 on the CPU: as many as asked for, or all there are.

    Raises:
        ValueError: there are none.

    >>> perplexity_split(text, few, length=64).shape
    torch.Size([1, 64])
    """
    taken = set[bytes]().union(
        *(ngrams(sequence.tokens.numpy(), overlap) for sequence in collected)
    )
    rng = np.random.default_rng(seed)
    kept: list[np.ndarray] = []
    seen = short = shared = 0
    for item in stream:
        row = as_candidate(item, "").tokens[:length].astype(np.int64)
        if len(row) < length:
            short += 1
        elif not taken.isdisjoint(ngrams(row, overlap)):
            shared += 1
        else:
            seen += 1
            if len(kept) < n_sequences:
                kept.append(row)
            elif (place := int(rng.integers(seen))) < n_sequences:
                kept[place] = row
    if not kept:
        why = (
            f"{short} sequences are shorter than {length} tokens, {shared} share text with "
            "collected ones"
        )
        raise ValueError(
            f"stream must hold general text for the perplexity, got none ({why}). Give longer or "
            "more text."
        )
    return torch.from_numpy(np.stack(kept))
