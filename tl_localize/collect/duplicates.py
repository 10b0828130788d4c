"""Sequences that share much of their text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from tl_localize.neurons import Real

BLOCK = 256  # sequences that are compared with all before them at a time


def near_duplicates(tokens: Int[np.ndarray, "sequence pos"], max_jaccard: Real = 0.05, ngram: int = 5) -> list[list[int]]:
    """Groups of sequences that are connected by pairs whose n-gram sets have a Jaccard index above the limit.

    Source: Chang et al. (2024), arXiv:2311.09060, details of data collection, after Lee et al. (2022), arXiv:2107.06499.
    Returns: indices of each group, rising; groups in order of their first member.

    >>> near_duplicates(np.array([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], [0, 2, 3, 4, 5, 6]]), ngram=3)
    [[0, 2], [1]]
    """
    n, grams = len(tokens), _ngram_ids(tokens, ngram)
    has: Any = sparse.csr_array((np.ones(grams.size, np.int32), (np.repeat(np.arange(n), grams.shape[1]), grams.ravel())))
    has.data[:] = 1  # repeated n-grams were summed
    sizes = has.sum(1)
    has = has[:, has.sum(0) > 1]
    group = np.arange(n)  # of each sequence: the first member of its group
    for start in range(0, n, BLOCK):
        common: Any = (has[start : start + BLOCK] @ has[: start + BLOCK].T).tocoo()
        one, other = common.row + start, common.col
        near = common.data / (sizes[one] + sizes[other] - common.data) > max_jaccard
        edges = (np.concatenate([one[near], np.arange(n)]), np.concatenate([other[near], group]))
        graph = sparse.coo_array((np.ones(len(edges[0]), bool), edges), shape=(n, n))
        _, labels = connected_components(graph, directed=False)
        group = np.unique(labels, return_index=True)[1][labels]
    order = np.argsort(group, kind="stable")
    return [members.tolist() for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1)]


def _ngram_ids(tokens: Int[np.ndarray, "sequence pos"], ngram: int) -> Int[np.ndarray, "sequence ngram"]:
    """A number for each n-gram, the same for equal ones: exact, by numbering the pairs (shorter n-gram, next token)."""
    width = tokens.shape[1] - ngram + 1
    _, ids = np.unique(tokens, return_inverse=True)
    single = ids.reshape(tokens.shape).astype(np.int64)
    ids, base = single[:, :width], int(single.max()) + 1
    for k in range(1, ngram):
        _, pairs = np.unique(ids * base + single[:, k : k + width], return_inverse=True)
        ids = pairs.reshape(ids.shape).astype(np.int64)
    return ids


def origins(sequences: Iterable[Sequence[int]], known: Sequence[Sequence[int]], ngram: int = 5) -> list[int]:
    """Of each token sequence the index of the known text that it shows at least half of (in n-grams); -1 where there is none."""
    sets = [_ngrams(tokens, ngram) for tokens in known]
    found: list[int] = []
    for tokens in sequences:
        mine = _ngrams(tokens, ngram)
        shared = [len(mine & grams) for grams in sets]
        best = int(np.argmax(shared))
        found.append(best if shared[best] and 2 * shared[best] >= len(sets[best]) else -1)
    return found


def _ngrams(tokens: Sequence[int], n: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)}
