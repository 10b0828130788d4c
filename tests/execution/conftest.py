"""Small benchmarks: INJ of four sentences, and of two groups of two; DEL of three targets, and of
its single layers; REV of two groups of two.
"""

from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest
import torch


@pytest.fixture(autouse=True)
def counted():
    """What the method that counts its calls has counted so far."""
    from folders import Counted

    Counted.calls.clear()
    Counted.fails_on.clear()
    yield Counted.calls
    Counted.fails_on.clear()


@pytest.fixture
def methods():
    from folders import Counted

    from tl_localize import Activations

    return [Activations(), Counted()]


@pytest.fixture
def gpt2_like(normless):
    """A run is the same work with any model."""
    return normless


@pytest.fixture
def inj(gpt2_like, make_inj):
    return make_inj(gpt2_like)


@pytest.fixture
def joint(inj):
    sequences = [replace(sequence, tokens=sequence.tokens.clone()) for sequence in inj.sequences]
    for i, sequence in enumerate(sequences):
        sequence.tokens[0] = i
    return replace(inj, sequences=sequences, distractors=1)


@pytest.fixture
def deletion(gpt2_like, make_sequences):
    from tl_localize.evals import DelBenchmark

    general = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    sequences = make_sequences((9, 3), (9, 3), (12, 3), (7, 2), (9, 1))
    how = {"ratios": (0.1, 0.2), "n_dev": 1, "n_targets": 3, "first_layer": 0, "decode": str}
    return DelBenchmark(gpt2_like, sequences, general, **how)


@pytest.fixture
def layers(deletion):
    return replace(deletion, ratios=(0.1,), layers="each", multiples=(1,))


@pytest.fixture
def rev(rev, one_oracle):
    return replace(rev, n_sequences=2, ratios=(0.5,), recipe=replace(rev.recipe, max_steps=5))


@pytest.fixture(params=["inj", "joint", "deletion", "layers", "rev"])
def benchmark(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def results_in_memory():
    """What ``undisturbed`` has computed."""
    return {}


@pytest.fixture
def undisturbed(request, methods, results_in_memory, counted):
    """What the benchmark of a fixture gives in memory: computed once, as every test makes the same
    one.
    """

    def results_of(name, methods=methods):
        key = name, *(method.name for method in methods)
        if key not in results_in_memory:
            benchmark = request.getfixturevalue(name)
            before = Counter(counted)
            results_in_memory[key] = benchmark.run(methods, progress=False)
            assert set((counted - before).values()) <= {1}  # no text is scored twice
        return results_in_memory[key]

    return results_of


@pytest.fixture
def run(tmp_path):
    """Run a benchmark into a folder."""
    from tl_localize.execution import Store

    def run(benchmark, methods, name="run", progress=False, **options):
        return benchmark.run(methods, Store(tmp_path / name), progress, **options)

    return run


@pytest.fixture
def written(monkeypatch):
    """How many steps of each kind were computed and written."""
    from tl_localize.execution import Store

    kinds = Counter()
    write = Store._write

    def count(self, key, inputs, value, cell=None):
        kinds[inputs["step"]] += 1
        write(self, key, inputs, value, cell)

    monkeypatch.setattr(Store, "_write", count)
    return kinds


@pytest.fixture
def assert_same():
    """Two results are the same but for the time that they took. Masks that are learned side by side
    differ in the last digits, so numbers are compared to a tolerance. In a folder that has grown,
    methods stand in the order in which they were first asked for.
    """

    def rows_of(frame, grown):
        frame = frame.drop(columns="seconds", errors="ignore")
        keys = ("method", "sequence_id", "ratio", "direction")
        present = [key for key in keys if key in frame]
        return frame.sort_values(present, ignore_index=True) if grown and present else frame

    def check(found, wanted, grown=False):
        assert not len(found.missing)
        for name in ("frame", "before", "single_layers"):
            frames = [getattr(results, name, pd.DataFrame()) for results in (found, wanted)]
            some, others = (rows_of(frame, grown) for frame in frames)
            pd.testing.assert_frame_equal(some, others, rtol=1e-6, atol=1e-6)
        for key, matrix in getattr(wanted, "confusion", {}).items():
            pd.testing.assert_frame_equal(found.confusion[key], matrix)

    return check
