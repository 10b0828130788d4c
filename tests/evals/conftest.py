"""INJ of three sentences and of six with a distractor each; DEL of seven sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence


@pytest.fixture
def sentences():
    from tl_localize import MemorizedSequence

    generator = torch.Generator().manual_seed(0)
    return [
        MemorizedSequence(torch.randint(0, 50, (8 + i,), generator=generator), 3, id=f"s{i}")
        for i in range(3)
    ]


@pytest.fixture
def benchmark(gpt2_like, sentences):
    from tl_localize.evals.inj_benchmark import InjBenchmark

    return InjBenchmark(
        model=gpt2_like,
        sequences=sentences,
        ratio=0.2,
        learning_rate=0.05,
        stop_loss=0.5,
        max_steps=20,
    )


@pytest.fixture
def together(gpt2_like):
    from tl_localize import MemorizedSequence
    from tl_localize.evals.inj_benchmark import InjBenchmark

    generator = torch.Generator().manual_seed(1)
    sentences = [
        MemorizedSequence(
            torch.cat([torch.tensor([i]), torch.randint(10, 50, (6,), generator=generator)]),
            1,
            id=f"s{i}",
        )
        for i in (0, 1, 2, 3, 0, 1)
    ]
    return InjBenchmark(
        model=gpt2_like,
        sequences=sentences,
        ratio=0.1,
        learning_rate=0.02,
        distractors=1,
        stop_loss=0.5,
        max_steps=40,
    )


@pytest.fixture
def general() -> torch.Tensor:
    return torch.randint(61, (5, 12), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def recited(make_sequences: Callable[..., list[Any]]) -> Callable[[Any], list[Any]]:
    """Seven sequences of different lengths whose suffixes a model recites in part."""

    def of(model: Any) -> list[Any]:
        sequences = make_sequences(
            (9, 3), (14, 1), (6, 4), (11, 6), (16, 8), (12, 5), (16, 2), seed=3
        )
        tokens = pad_sequence([one.tokens for one in sequences], batch_first=True)
        for position in range(1, tokens.shape[1]):
            guess = model(tokens[:, :position])[:, -1].argmax(-1)
            for i, one in enumerate(sequences):
                if position % 4 and one.n_prefix <= position < len(one):
                    tokens[i, position] = guess[i]
        return [
            replace(one, tokens=tokens[i, : len(one)], category="bbbbaba"[i])
            for i, one in enumerate(sequences)
        ]

    return of


@pytest.fixture
def benchmark_of(recited: Callable[..., Any], general: torch.Tensor) -> Callable[..., Any]:
    """DEL with two dev sequences at two ratios, unless something else is given."""
    from noise import letters

    from tl_localize.evals import DelBenchmark

    def make(model: Any, **settings: Any) -> Any:
        defaults: dict[str, Any] = {"ratios": (0.2, 0.5), "n_dev": 2, "decode": letters}
        return DelBenchmark(model, recited(model), general, **(defaults | settings))

    return make
