"""By how much the number of threads moves a published number: recall of INJ on one sentence, with
one thread and with two.

In about two minutes:

    pytest benchmarks/test_threads.py -s
"""

from __future__ import annotations

import pandas as pd
import pytest
import torch

METHODS = "hard_concrete,slimming,integrated_gradients,activations,attribution"
TOLERANCE = 0.01  # of a recall: training takes other last digits to other rows


@pytest.fixture(scope="module")
def moved(model, model_name, publish):
    from tl_localize.evals.settings import inj_runs
    from tl_localize.texts.reference import inj_sequences

    before = torch.get_num_threads()
    found = {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            ((benchmark, methods),) = inj_runs(
                model, model_name, inj_sequences(model)[:1], METHODS, ratios=[0.03]
            )
            frame = benchmark.run(methods).frame
            found[f"{threads} thread{'s' * (threads > 1)}"] = frame[
                frame["multiple"] == 1
            ].set_index("method")["recall"]
    finally:
        torch.set_num_threads(before)
    table = pd.DataFrame(found)
    table["moved by"] = (table.iloc[:, 1] - table.iloc[:, 0]).abs()
    publish(
        table.round(4).map("{:.4f}".format),
        model_name,
        "threads",
        "INJ, recall of one sentence with one thread and with two",
    )
    return table


@pytest.mark.slow
def test_threads_move_a_recall_by_little(moved):
    assert (moved["moved by"] < TOLERANCE).all(), f"\n{moved}"
