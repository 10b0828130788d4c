"""INJ of three sentences, and of six with a distractor each."""

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
