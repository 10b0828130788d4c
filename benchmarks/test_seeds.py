"""Does it matter which texts the model happened to write? The contrast of Iterative Attribution is
made of 48 texts that the model writes after random first tokens, so another seed gives other texts.
Not in the paper.

    pytest benchmarks/test_seeds.py --model reference-gpt2

Decided before the first row was measured: the targets and shares of DEL's table, seeds 0 to 4, of
which 0 is the committed table's. For each seed the means over the texts; beside them the standard
deviation over seeds of such a mean, and the standard error over texts. No test but that seed 0 is
the committed table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison import differences, indexed, read_bands, read_frame, rows_measured
from del_data import shipped_benchmark

SEEDS = range(5)
CHANGES = {"delta_self_accuracy": "Self", "delta_neg_accuracy": "Neg"}


def measure(benchmark, seeds, steps):
    """DEL's rows of each seed."""
    from tl_localize import IterativeAttribution
    from tl_localize.methods.base import label_methods

    first_layer = benchmark.first_layer
    methods = [IterativeAttribution(first_layer=first_layer, seed=seed) for seed in seeds]
    labels = {
        label: method.seed for label, method in label_methods(methods, benchmark.units).items()
    }
    frame = benchmark.run(methods, steps).frame
    frame = frame[frame["method"].isin(labels)]
    return frame.assign(seed=frame["method"].map(labels), method=IterativeAttribution.name)


def summary(rows):
    """The mean of each seed, the deviation over seeds, and the error over texts, in points."""
    points = rows.assign(**{name: 100 * rows[name] for name in CHANGES})
    shares = points.groupby("ratio", sort=False)
    means = points.groupby(["ratio", "seed"], sort=False)[[*CHANGES]].mean()
    table = means.unstack("seed").stack(level=0, future_stack=True)
    table["deviation over seeds"] = means.groupby("ratio").std().stack(future_stack=True)
    of_texts = shares.apply(
        lambda part: part.groupby("sequence_id")[[*CHANGES]].mean().sem(), include_groups=False
    )
    table["error over texts"] = of_texts.stack(future_stack=True)
    return table.rename(CHANGES, level=1).round(2)


@pytest.fixture(scope="session")
def rows(model, model_name, request, publish):
    from tl_localize.execution import Store

    if not model_name.startswith("reference"):
        pytest.skip("of the shipped models, whose table is committed")
    folder = Path(request.config.getoption("--results")) / Path(model_name).name
    n_targets = request.config.getoption("--limit") or 25
    found = measure(shipped_benchmark(model, n_targets), SEEDS, Store(folder / "seeds"))
    found[["seed", "ratio", "sequence_id", *CHANGES]].round(6).to_csv(
        folder / "seeds.csv", index=False
    )
    publish(summary(found), model_name, "seeds_summary", "Seeds of the texts that the model writes")
    return found


def test_seed_0_is_the_committed_table(rows, model_name):
    """Up to its band, as the texts differ on another machine."""
    name = f"del-{model_name}"
    first = indexed(rows[rows["seed"] == 0])
    expected = rows_measured(read_frame(name), first)
    assert len(expected) == len(first)
    wrong = differences(first, expected, read_bands(name))
    assert wrong.empty, wrong.to_string()


@pytest.mark.smoke
def test_smoke_of_two_seeds(model, model_name):
    from dataclasses import replace

    from tl_localize import DelBenchmark
    from tl_localize.execution import Steps
    from tl_localize.texts.reference import held_out_tokens, reference_sequences

    few = [replace(text, tokens=text.tokens[:40]) for text in reference_sequences(model)[:2]]
    benchmark = DelBenchmark(model, few, held_out_tokens()[:2, :32], ratios=(0.02,), n_dev=0)
    found = measure(benchmark, (0, 1), Steps())
    assert found.groupby("seed").size().tolist() == [2, 2]
    assert summary(found).shape == (2, 4)
