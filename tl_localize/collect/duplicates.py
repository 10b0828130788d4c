"""Sequences that share text: near-duplicates, and general text that must share none."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from numpy.lib.stride_tricks import sliding_window_view
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from tl_localize.checks import Real, check_count, check_seed
from tl_localize.sequences import OVERLAP, MemorizedSequence, ngrams

BLOCK = 256  # sequences that are compared with all before them at a time


def near_duplicates(
    tokens: Int[np.ndarray, "sequence pos"], max_jaccard: Real = 0.05, ngram: int = 5
) -> list[list[int]]:
    """Groups of sequences that are connected by pairs whose n-gram sets have a Jaccard index above
    the limit.

    Source: Chang et al. (2024), arXiv:2311.09060, details of data collection, after Lee et al.
    (2022), arXiv:2107.06499.

    Returns:
        indices of each group, rising; groups in order of their first member.

    >>> tokens = np.array([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], [0, 2, 3, 4, 5, 6]])
    >>> near_duplicates(tokens, ngram=3)
    [[0, 2], [1]]
    """
    windows = sliding_window_view(tokens, ngram, axis=1)
    n, per_row = windows.shape[:2]
    _, grams = np.unique(windows.reshape(-1, ngram), axis=0, return_inverse=True)
    cells = np.repeat(np.arange(n), per_row), grams.ravel()
    has: Any = sparse.csr_array((np.ones(n * per_row, np.int32), cells))
    has.data[:] = 1  # also where a sequence has an n-gram twice
    sizes = np.diff(has.indptr)
    has = has[:, has.sum(0) > 1]
    group = np.arange(n)  # of each sequence: the first member of its group
    for start in range(0, n, BLOCK):
        common: Any = (has[start : start + BLOCK] @ has[: start + BLOCK].T).tocoo()
        first, other = common.row + start, common.col
        near = common.data / (sizes[first] + sizes[other] - common.data) > max_jaccard
        edges = (np.concatenate([first[near], np.arange(n)]), np.concatenate([other[near], group]))
        graph = sparse.coo_array((np.ones(len(edges[0]), bool), edges), shape=(n, n))
        _, labels = connected_components(graph, directed=False)
        group = np.unique(labels, return_index=True)[1][labels]
    return [members.tolist() for members in pd.Series(range(n)).groupby(group).groups.values()]


def perplexity_split(
    rows: Iterable[Int[np.ndarray, " row"]],
    collected: Sequence[MemorizedSequence],
    n_sequences: int = 2048,
    length: int = 128,
    *,
    seed: int = 0,
) -> Int[Tensor, "sequence pos"]:
    """Random sequences for the perplexity, none of which shares a run of 13 tokens, or the whole of
    the shorter one, with a collected sequence.

    Every row has the same chance (reservoir sampling), and memory does not grow with their number.

    Args:
        rows: of each the first ``length`` tokens; shorter ones are skipped.
        n_sequences: at most so many.

    Returns:
        [sequence pos] int64 on the CPU: as many as asked for, or all there are.

    Raises:
        ValueError: there are none.

    >>> perplexity_split(text.numpy(), few, length=16).shape
    torch.Size([1, 16])
    """
    check_count(n_sequences=n_sequences, length=length)
    check_seed(seed)
    taken: dict[int, set[bytes]] = {}  # by the length of the run
    for sequence in collected:
        tokens = sequence.tokens[bool(sequence.bos) :].numpy()
        n = min(OVERLAP, length, len(tokens))
        taken.setdefault(n, set()).update(ngrams(tokens, n))
    rng = np.random.default_rng(seed)
    kept: list[Int[np.ndarray, " pos"]] = []
    seen = 0
    for given in rows:
        row = np.asarray(given[:length])
        if len(row) and row.dtype.kind not in "iu":
            raise TypeError(
                f"rows must be token ids, which are whole numbers, got {row.dtype}. Give texts as "
                "the tokenizer reads them."
            )
        row = row.astype(np.int64)
        if len(row) < length or any(not t.isdisjoint(ngrams(row, n)) for n, t in taken.items()):
            continue
        seen += 1
        place = len(kept) if len(kept) < n_sequences else int(rng.integers(seen))
        if place < n_sequences:
            kept[place : place + 1] = [row]
    if not kept:
        raise ValueError(
            f"rows must hold general text for the perplexity, got none of {length} tokens that "
            "shares no text with collected ones. Give longer or more text."
        )
    return torch.from_numpy(np.stack(kept))
