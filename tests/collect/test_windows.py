"""Windows of rows and texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_localize.collect import Criteria, likely_windows, text_windows, token_windows


def test_token_windows_take_the_first_or_every_so_many() -> None:
    tokens = torch.arange(20).reshape(2, 10).int()
    assert [(c.id, c.tokens.tolist()) for c in token_windows(tokens, 4)] == [
        ("row-0", [0, 1, 2, 3]),
        ("row-1", [10, 11, 12, 13]),
    ]
    assert [(c.id, c.tokens[0]) for c in token_windows(tokens[1:], 4, stride=3)] == [
        ("row-0+0", 10),
        ("row-0+3", 13),
        ("row-0+6", 16),
    ]
    assert [len(c.tokens) for c in token_windows(tokens, 12, stride=3)] == [10, 10]
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        list(token_windows(tokens, 4, stride=0))


def test_text_windows_keep_short_texts_to_be_counted(gpt2_like: Any) -> None:
    gpt2_like.tokenizer = lambda text, add_special_tokens: {
        "input_ids": [ord(letter) % 61 for letter in text]
    }
    found = list(text_windows(["abcdef", "", "ab"], gpt2_like, 4))
    assert [(c.id, len(c.tokens)) for c in found] == [("text-0", 4), ("text-1", 0), ("text-2", 2)]
    gpt2_like.tokenizer = None
    with pytest.raises(ValueError, match="model must have a tokenizer"):
        list(text_windows(["a"], gpt2_like))


def test_likely_windows_find_a_memory_inside_a_row(gpt2_like: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(61, (4, 30), generator=generator)
    criteria = Criteria(n_prefix=4, n_suffix=10, min_distinct=1)
    for position in range(13, 25):  # from here on, row 2 is what the model says itself
        rows[2, position] = gpt2_like(rows[2:3, :position])[0, -1].argmax()
    found = list(likely_windows(gpt2_like, rows, criteria, slack=0))
    # the last window whose suffix is all right
    assert [candidate.id for candidate in found] == ["row-2+11"]
    assert torch.equal(torch.from_numpy(found[0].tokens), rows[2, 11:25])
    with pytest.raises(ValueError, match="rows of at least 14 tokens, got 10"):
        next(likely_windows(gpt2_like, rows[:, :10], criteria))


# windows of 18 tokens, and of all that the model can read
@pytest.mark.parametrize("n_prefix", [8, 23])
def test_likely_windows_see_every_window_of_a_row_longer_than_the_context_once(
    gpt2_like: Any, monkeypatch: Any, n_prefix: int
) -> None:
    rows = torch.randint(61, (2, 3 * 32 + 5), generator=torch.Generator().manual_seed(2))
    criteria = Criteria(n_prefix=n_prefix, n_suffix=10, min_distinct=1)
    seen: list[Any] = []
    monkeypatch.setattr(
        "tl_localize.collect.windows._best_windows",
        lambda found, length, needed: seen.append(found) or [],
    )
    assert list(likely_windows(gpt2_like, rows, criteria)) == []
    step = 33 + 1 - criteria.length
    for row, found in zip(rows, seen, strict=True):
        assert len(found) == len(row) + 1 - criteria.length
        for start, n in enumerate(found.tolist()):
            piece = row[start - start % step :][:33]  # what the window is seen in
            right = gpt2_like(piece[None, :-1])[0].argmax(-1) == piece[1:]
            first = start % step + n_prefix - 1
            assert n == int(right[first : first + 10].sum())


def test_likely_windows_refuse_windows_longer_than_the_context(gpt2_like: Any) -> None:
    rows = torch.randint(61, (2, 80))
    with pytest.raises(
        ValueError, match=r"n_prefix \+ n_suffix must be at most n_ctx \+ 1 = 33, got 34"
    ):
        next(likely_windows(gpt2_like, rows, Criteria(n_prefix=4, n_suffix=30, min_distinct=1)))


def test_windows_of_a_stream_are_those_of_its_rows() -> None:
    rows = torch.arange(60).reshape(3, 20)
    stream = ({"tokens": row.tolist()} for row in rows)
    found = [
        (one.id, one.tokens.tolist())
        for one in token_windows((row["tokens"] for row in stream), 8, 8)
    ]
    assert found == [(one.id, one.tokens.tolist()) for one in token_windows(rows, 8, 8)]
    with pytest.raises(
        ValueError, match="tokens must be a list of whole numbers, got 'text' at row 0"
    ):
        list(token_windows(["text"], 8))
