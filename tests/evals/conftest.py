"""INJ of four sentences and of six with a distractor each; DEL of seven sequences."""

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence


@pytest.fixture(scope="session")
def make_joint(make_inj, make_sequences):
    """INJ of six sentences, one distractor each."""

    def make(model):
        sentences = make_sequences(*[(7, 1)] * 6, d_vocab=50, seed=1)
        for i, sentence in enumerate(sentences):
            sentence.tokens[0] = i % 4
        how = {"ratio": 0.1, "learning_rate": 0.02, "max_steps": 40}
        return make_inj(model, sequences=sentences, distractors=1, **how)

    return make


@pytest.fixture
def benchmark(gpt2_like, make_inj):
    return make_inj(gpt2_like, max_steps=20)


@pytest.fixture
def together(gpt2_like, make_joint):
    return make_joint(gpt2_like)


@pytest.fixture(scope="session")
def inj_results(make_model, make_inj):
    from tl_localize import Activations

    return make_inj(make_model(1), max_steps=20).run([Activations()])


@pytest.fixture(scope="session")
def joint_results(make_model, make_joint):
    from tl_localize import Activations

    return make_joint(make_model(1)).run([Activations()])


@pytest.fixture(scope="session")
def general():
    return torch.randint(61, (5, 12), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session")
def recited(make_sequences):
    """Seven sequences of different lengths whose suffixes a model recites in part."""

    @torch.no_grad()
    def of(model):
        sequences = make_sequences(
            (9, 3), (14, 1), (6, 4), (11, 6), (16, 8), (12, 5), (16, 2), seed=3
        )
        tokens = pad_sequence([sequence.tokens for sequence in sequences], batch_first=True)
        for position in range(1, tokens.shape[1]):
            guess = model(tokens[:, :position])[:, -1].argmax(-1)
            for i, sequence in enumerate(sequences):
                if position % 4 and sequence.n_prefix <= position < len(sequence):
                    tokens[i, position] = guess[i]
        return [
            replace(sequence, tokens=tokens[i, : len(sequence)], category="bbbbaba"[i])
            for i, sequence in enumerate(sequences)
        ]

    return of


@pytest.fixture(scope="session")
def benchmark_of(recited, general):
    """DEL with two dev sequences at two ratios, unless something else is given."""
    from noise import letters

    from tl_localize.evals import DelBenchmark

    def make(model, **settings):
        defaults = {"ratios": (0.2, 0.5), "n_dev": 2, "decode": letters}
        return DelBenchmark(model, recited(model), general, **(defaults | settings))

    return make


@pytest.fixture(scope="session")
def measured(make_model, benchmark_of):
    """A DEL benchmark and its results with three random methods."""
    from noise import Noise

    benchmark = benchmark_of(make_model(1, model_name="gpt2-like"))
    return benchmark, benchmark.run([Noise(), Noise("integrated_gradients", 5)])
