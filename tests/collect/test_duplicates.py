"""Near-duplicates are those of all pairs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_localize.collect.duplicates import near_duplicates, origins


def by_all_pairs(tokens: np.ndarray, max_jaccard: float, ngram: int) -> list[list[int]]:
    sets = [
        {tuple(row[i : i + ngram]) for i in range(len(row) - ngram + 1)} for row in tokens.tolist()
    ]
    group = list(range(len(tokens)))
    for i in range(len(tokens)):
        for j in range(i):
            if len(sets[i] & sets[j]) / len(sets[i] | sets[j]) > max_jaccard:
                group = [group[j] if g == group[i] else g for g in group]
    return sorted([i for i in range(len(tokens)) if group[i] == g] for g in set(group))


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=80)
def test_near_duplicates_are_those_of_all_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, length, vocabulary = (
        int(rng.integers(1, 30)),
        int(rng.integers(5, 30)),
        int(rng.choice([2, 4, 60])),
    )
    originals = rng.integers(vocabulary, size=(max(1, n // 4), length))
    tokens = originals[rng.integers(len(originals), size=n)]
    edited = rng.random(tokens.shape) < rng.choice([0, 0.05, 0.2])
    tokens[edited] = rng.integers(vocabulary, size=int(edited.sum()))
    max_jaccard, ngram = float(rng.choice([0, 0.05, 0.1, 0.3, 0.9, 1])), int(rng.integers(1, 6))
    groups = near_duplicates(tokens, max_jaccard, ngram)
    assert groups == sorted(groups)
    assert sorted(groups) == by_all_pairs(tokens, max_jaccard, ngram)


def test_near_duplicates_are_connected_through_a_third() -> None:
    a, b, c = np.arange(0, 20), np.arange(10, 30), np.arange(20, 40)
    assert near_duplicates(np.stack([a, c]), 0.1, 5) == [[0], [1]]
    assert near_duplicates(np.stack([a, c, b]), 0.1, 5) == [[0, 1, 2]]


def test_near_duplicates_pass_over_what_is_in_the_group_already() -> None:
    """Large groups that all have the same beginning."""
    rng = np.random.default_rng(0)
    tokens = np.repeat(rng.integers(4096, size=(8, 80)), 100, axis=0)
    edited = rng.random(tokens.shape) < 0.1
    tokens[edited] = rng.integers(4096, size=int(edited.sum()))
    tokens[:, :9] = tokens[0, :9]
    assert len(near_duplicates(tokens)) == 8


def test_origins_name_the_known_text_that_is_shown_by_half() -> None:
    known = [list(range(20)), list(range(100, 120))]
    shifted, less, both = list(range(7, 27)), list(range(10, 30)), [*range(5), *range(100, 116)]
    assert origins([known[1], shifted, less, both, [1]], known) == [1, 0, -1, 1, -1]
