"""Near-duplicates are those of all pairs; general text shares nothing with the collected."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_localize import MemorizedSequence
from tl_localize.collect.duplicates import near_duplicates, perplexity_split


def by_all_pairs(tokens, max_jaccard, ngram):
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
@settings(deadline=None, max_examples=50)
def test_near_duplicates_are_those_of_all_pairs(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    length = int(rng.integers(5, 30))
    vocabulary = int(rng.choice([2, 4, 60]))
    originals = rng.integers(vocabulary, size=(max(1, n // 4), length))
    tokens = originals[rng.integers(len(originals), size=n)]
    edited = rng.random(tokens.shape) < rng.choice([0, 0.05, 0.2])
    tokens[edited] = rng.integers(vocabulary, size=int(edited.sum()))
    max_jaccard = float(rng.choice([0, 0.05, 0.1, 0.3, 0.9, 1]))
    ngram = int(rng.integers(1, 6))
    groups = near_duplicates(tokens, max_jaccard, ngram)
    assert groups == sorted(groups)
    assert sorted(groups) == by_all_pairs(tokens, max_jaccard, ngram)


def test_near_duplicates_are_connected_through_a_third():
    a, b, c = np.arange(0, 20), np.arange(10, 30), np.arange(20, 40)
    assert near_duplicates(np.stack([a, c]), 0.1, 5) == [[0], [1]]
    assert near_duplicates(np.stack([a, c, b]), 0.1, 5) == [[0, 1, 2]]


def test_perplexity_split_shares_no_run_with_the_collected():
    rng = np.random.default_rng(0)
    rows = rng.integers(61, size=(50, 30))
    collected = MemorizedSequence(torch.tensor(rows[7, 3:23]), 4)
    found = perplexity_split(rows, [collected], 49, 30)
    assert sorted(found.tolist()) == sorted(rows[[i for i in range(50) if i != 7]].tolist())
    small = perplexity_split(rows, [collected], 10, 20)
    assert small.shape == (10, 20)
    assert torch.equal(small, perplexity_split(rows, [collected], 10, 20))
    assert not torch.equal(small, perplexity_split(rows, [collected], 10, 20, seed=1))
    assert len(perplexity_split(rows, [collected], 60, 30)) == 49
    for same in (rows.astype(np.uint16), rows.astype(np.int32), torch.tensor(rows)):
        assert torch.equal(small, perplexity_split(same, [collected], 10, 20))
    with pytest.raises(ValueError, match="none of 31 tokens"):
        perplexity_split(rows, [collected], 5, 31)
    with pytest.raises(ValueError, match="n_sequences must be"):
        perplexity_split(rows, [collected], 0, 30)
    short = perplexity_split(rows[:, 3:], [collected], 50, 5)  # less than 13 tokens
    assert len(short) == 49 and rows[7, 3:8].tolist() not in short.tolist()


def test_perplexity_split_refuses_what_is_no_token_or_no_seed():
    with pytest.raises(TypeError, match=r"rows must be token ids, .* got float64"):
        perplexity_split([[1.5, 2.5, 3.0]], [], length=3)
    with pytest.raises(ValueError, match="seed must be"):
        perplexity_split([[1, 2, 3]], [], length=3, seed=-1)


def test_perplexity_split_holds_no_collected_text_that_is_shorter_than_a_run():
    rows = np.arange(90).reshape(3, 30)
    pair = [MemorizedSequence(torch.tensor(rows[0, 4:12]), 3)]
    pair.append(MemorizedSequence(torch.tensor([99, *rows[1, 5:12]]), 3, bos="<s>"))
    assert perplexity_split(rows, pair, length=30).tolist() == [rows[2].tolist()]


def test_perplexity_split_gives_every_sequence_the_same_chance():
    rows = np.arange(20)[:, None] * np.ones(3, dtype=np.int64)[None]
    drawn = [
        int(i) for seed in range(300) for i in perplexity_split(rows, [], 5, 3, seed=seed)[:, 0]
    ]
    counts = np.bincount(drawn, minlength=20)
    assert counts.min() > 45
    assert counts.max() < 110
