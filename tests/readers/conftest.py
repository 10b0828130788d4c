from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


class Letters:
    """One token for each character."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(i) for i in ids)


@pytest.fixture
def lettered() -> Any:
    """What a reader needs of a model: its tokenizer and the size of its vocabulary."""

    class Model(SimpleNamespace):
        hook_dict = hooks = parameters = __call__ = lambda self, *args, **kwargs: None

    return Model(tokenizer=Letters(), cfg=SimpleNamespace(d_vocab=256), blocks=None)
