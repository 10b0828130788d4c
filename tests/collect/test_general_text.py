"""General text shares nothing with the collected sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tl_localize import MemorizedSequence
from tl_localize.collect import perplexity_split


def test_perplexity_split_shares_no_run_with_the_collected() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(61, size=(50, 20))
    collected = MemorizedSequence(torch.tensor(rows[7, 3:15]), 4)
    found = perplexity_split(rows, [collected], 49, 20, overlap=5)
    assert sorted(found.tolist()) == sorted(rows[[i for i in range(50) if i != 7]].tolist())
    small = perplexity_split(iter(rows), [collected], 10, 12, overlap=5)
    assert small.shape == (10, 12)
    assert torch.equal(small, perplexity_split(rows, [collected], 10, 12, overlap=5))
    assert not torch.equal(small, perplexity_split(rows, [collected], 10, 12, overlap=5, seed=1))
    assert len(perplexity_split(rows, [collected], 60, 20, overlap=5)) == 49
    with pytest.raises(
        ValueError, match=r"got none \(49 sequences are shorter than 21 tokens, 1 share text"
    ):
        perplexity_split(
            [*rows[:49], np.concatenate([rows[7], rows[7]])], [collected], 5, 21, overlap=5
        )


def test_perplexity_split_gives_every_sequence_the_same_chance() -> None:
    rows = np.arange(20)[:, None] * np.ones(3, dtype=np.int64)[None]
    drawn = [
        int(i) for seed in range(300) for i in perplexity_split(rows, [], 5, 3, seed=seed)[:, 0]
    ]
    counts = np.bincount(drawn, minlength=20)
    assert counts.min() > 45
    assert counts.max() < 110
