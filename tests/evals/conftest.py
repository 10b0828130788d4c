"""INJ of three sentences and of six with a distractor each; DEL of seven sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch


@pytest.fixture
def sentences():
    from tl_localize import MemorizedSequence

    generator = torch.Generator().manual_seed(0)
    return [MemorizedSequence(torch.randint(0, 50, (8 + i,), generator=generator), 3, id=f"s{i}") for i in range(3)]


@pytest.fixture
def benchmark(gpt2_like, sentences):
    from tl_localize.evals.inj_benchmark import InjBenchmark

    return InjBenchmark(model=gpt2_like, sequences=sentences, ratio=0.2, learning_rate=0.05, stop_loss=0.5, max_steps=20)


@pytest.fixture
def together(gpt2_like):
    from tl_localize import MemorizedSequence
    from tl_localize.evals.inj_benchmark import InjBenchmark

    generator = torch.Generator().manual_seed(1)
    sentences = [
        MemorizedSequence(torch.cat([torch.tensor([i]), torch.randint(10, 50, (6,), generator=generator)]), 1, id=f"s{i}")
        for i in (0, 1, 2, 3, 0, 1)
    ]
    return InjBenchmark(model=gpt2_like, sequences=sentences, ratio=0.1, learning_rate=0.02, distractors=1, stop_loss=0.5, max_steps=40)


@pytest.fixture
def general() -> torch.Tensor:
    return torch.randint(61, (5, 12), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def recited(make_sequences: Callable[..., list[Any]]) -> Callable[[Any], list[Any]]:
    """Seven sequences of different lengths whose suffixes a model recites in part."""

    def of(model: Any) -> list[Any]:
        found: list[Any] = []
        for i, sequence in enumerate(make_sequences((9, 3), (14, 1), (6, 4), (11, 6), (16, 8), (12, 5), (16, 2), seed=3)):
            tokens = sequence.tokens.clone()
            for position in range(sequence.n_prefix, len(tokens)):
                if position % 4:
                    tokens[position] = model(tokens[None, :position])[0, -1].argmax()
            found.append(replace(sequence, tokens=tokens, category=("b", "b", "b", "b", "a", "b", "a")[i]))
        return found

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
