"""Windows of rows and texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_localize.collect import text_windows, token_windows


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
    with pytest.raises(ValueError, match="stride must be a whole number from 1 on, got 0"):
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


def test_windows_of_a_stream_are_those_of_its_rows() -> None:
    rows = torch.arange(60).reshape(3, 20)
    stream = ({"tokens": row.tolist()} for row in rows)
    found = [
        (one.id, one.tokens.tolist())
        for one in token_windows((row["tokens"] for row in stream), 8, 8)
    ]
    assert found == [(one.id, one.tokens.tolist()) for one in token_windows(rows, 8, 8)]
