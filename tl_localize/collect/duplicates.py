"""Sequences that share much of their text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from tl_localize.neurons import Real

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
    sets = [ngrams(row, ngram) for row in tokens]
    n, sizes = len(sets), np.array([len(grams) for grams in sets])
    columns, _ = pd.factorize(np.array(list(chain.from_iterable(sets)), dtype=object))
    has: Any = sparse.csr_array(
        (np.ones(len(columns), np.int32), (np.repeat(np.arange(n), sizes), columns))
    )
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
    return [members.tolist() for members in pd.Series(range(n)).groupby(group).groups.values()]


def origins(
    sequences: Iterable[Sequence[int]], known: Sequence[Sequence[int]], ngram: int = 5
) -> list[int]:
    """Of each token sequence the index of the known text that it shows at least half of (in
    n-grams); -1 where there is none.
    """
    sets = [ngrams(tokens, ngram) for tokens in known]
    found: list[int] = []
    for tokens in sequences:
        mine = ngrams(tokens, ngram)
        shared = [len(mine & grams) for grams in sets]
        best = int(np.argmax(shared))
        found.append(best if shared[best] and 2 * shared[best] >= len(sets[best]) else -1)
    return found


def ngrams(tokens: Sequence[int] | Int[np.ndarray, " pos"], n: int) -> set[bytes]:
    """All runs of n tokens, each as the bytes of int64 numbers."""
    row = np.asarray(tokens, dtype=np.int64)
    return {row[start : start + n].tobytes() for start in range(len(row) - n + 1)}
