"""Sequences that share much of their text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

from tl_localize.neurons import Real


def near_duplicates(tokens: Int[np.ndarray, "sequence pos"], max_jaccard: Real = 0.05, ngram: int = 5) -> list[list[int]]:
    """Groups of sequences that are connected by pairs whose n-gram sets have a Jaccard index above the limit.

    An inverted index finds the pairs. Two shortcuts leave the result as it is. Of a sequence's n-grams only the rarest are indexed: the
    others are fewer than a near-duplicate must share. And the index keeps sequences by group, so that those of the own group are skipped.

    Source: Chang et al. (2024), arXiv:2311.09060, details of data collection, after Lee et al. (2022), arXiv:2107.06499.
    Returns: indices of each group, rising; groups in order of their first member.

    >>> near_duplicates(np.array([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], [0, 2, 3, 4, 5, 6]]), ngram=3)
    [[0, 2], [1]]
    """
    shared, indexed, sizes = _rarest_first(ngram_ids(tokens, ngram), max_jaccard)
    groups = Groups(len(tokens))
    index: dict[int, dict[int, list[int]]] = {}  # n-gram -> group -> members that have it
    for i, grams in enumerate(indexed):
        mine: set[int] = set()
        tested: set[int] = set()
        for gram in grams.tolist():
            holders = index[gram] = groups.merged(index.get(gram, {}))
            for group, members in holders.items():
                if groups.root(group) == groups.root(i):
                    continue
                for j in members:
                    if j in tested:
                        continue
                    tested.add(j)
                    mine = mine or set(shared[i].tolist())
                    common = len(mine.intersection(shared[j].tolist()))
                    if common / (sizes[i] + sizes[j] - common) > max_jaccard:
                        groups.join(i, j)
                        break
            holders.setdefault(i, []).append(i)
    return groups.members()


def _rarest_first(
    grams: Int[np.ndarray, "sequence ngram"], max_jaccard: Real
) -> tuple[list[Int[np.ndarray, " _"]], list[Int[np.ndarray, " _"]], list[int]]:
    """Of each sequence: the n-grams that others have too, the rarest of these, which are indexed, and how many n-grams it has in all."""
    rarity = np.argsort(np.argsort(np.bincount(grams.ravel()), kind="stable"))  # of each n-gram: the number of rarer ones
    ranked = np.sort(rarity[grams], axis=1)
    distinct = np.diff(ranked, axis=1, prepend=-1) > 0
    sizes = distinct.sum(1)
    shared = distinct & (np.bincount(ranked[distinct])[ranked] > 1)
    needed = np.floor(max_jaccard / (1 + max_jaccard) * (sizes + sizes.min()) - 1e-9) + 1  # n-grams that a near-duplicate must share
    indexed = shared & (np.cumsum(distinct, axis=1) <= (sizes - needed + 1)[:, None])
    of_each = [np.split(ranked[chosen], np.cumsum(chosen.sum(1))[:-1]) for chosen in (shared, indexed)]
    return of_each[0], of_each[1], sizes.tolist()


class Groups:
    """Disjoint sets of the numbers below n."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def root(self, i: int) -> int:
        """The number that stands for the group of i."""
        parent = self.parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        self.parent[self.root(j)] = self.root(i)

    def merged(self, by_group: dict[int, list[int]]) -> dict[int, list[int]]:
        """Lists by group, brought up to date where groups have been joined since."""
        if all(self.parent[group] == group for group in by_group):
            return by_group
        result: dict[int, list[int]] = {}
        for group, members in by_group.items():
            short, long = sorted((result.get(self.root(group), []), members), key=len)
            long.extend(short)
            result[self.root(group)] = long
        return result

    def members(self) -> list[list[int]]:
        """All groups, in order of their first member."""
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for i in range(len(self.parent)):
            groups[self.root(i)].append(i)
        return list(groups.values())


def ngram_ids(tokens: Int[np.ndarray, "sequence pos"], ngram: int) -> Int[np.ndarray, "sequence ngram"]:
    """A number for each n-gram, the same for equal ones: exact, by numbering the pairs (shorter n-gram, next token)."""
    width = tokens.shape[1] - ngram + 1
    _, ids = np.unique(tokens, return_inverse=True)
    single = ids.reshape(tokens.shape).astype(np.int64)
    ids, base = single[:, :width], int(single.max()) + 1
    for k in range(1, ngram):
        _, pairs = np.unique(ids * base + single[:, k : k + width], return_inverse=True)
        ids = pairs.reshape(ids.shape).astype(np.int64)
    return ids


def origins(sequences: Iterable[Sequence[int]], known: Iterable[Sequence[int]], ngram: int = 5) -> list[int]:
    """Of each token sequence the index of the known text that it shows at least half of (in n-grams); -1 where there is none."""
    holders: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    sizes: list[int] = []
    for i, tokens in enumerate(known):
        grams = _ngrams(tokens, ngram)
        sizes.append(len(grams))
        for gram in grams:
            holders[gram].append(i)
    found: list[int] = []
    for tokens in sequences:
        shared = Counter(i for gram in _ngrams(tokens, ngram) for i in holders.get(gram, ()))
        index, count = max(shared.items(), key=lambda item: item[1], default=(-1, 0))
        found.append(index if index >= 0 and 2 * count >= sizes[index] else -1)
    return found


def _ngrams(tokens: Sequence[int], n: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)}
