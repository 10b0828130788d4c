"""How much of the exact top 1 % of each layer ``ZeroOut(screen=...)`` keeps, by share, on planted sequences and injected sentences.

pytest benchmarks/test_screen_recall.py --limit 4        # of each kind, on both reference models

One exact Zero-Out and one Attribution of each sequence say it for every share: a neuron of the exact top is kept if its estimate is
among the highest of its layer. The sequences are the first planted ones with the most repetitions, and the first INJ sentences, each
injected at 3 % of the rows.
"""

from __future__ import annotations

import pandas as pd
import pytest
import torch

SHARES = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3)
TOP = 0.01
SHARE = 0.1  # with the sample of 32 a layer 12 % of the exact passes, so 12 times the plain loop's speed where exact Zero-Out has 1.5 times
N_SEQUENCES = 4
RATIO, LEARNING_RATE = 0.03, 0.01


def recalls(model, sequence, method):
    """Share -> part of the exact top of each layer that is among the best estimates."""
    from tl_localize import Attribution

    exact, estimate = method(model, sequence), Attribution()(model, sequence)
    truth = exact.top_k(TOP)
    return {share: estimate.top_k(share).recall_of(truth) for share in SHARES}


def planted(model, limit):
    from tl_localize import MemorizedSequence
    from tl_localize.reference_corpus import load_planted
    from tl_localize.sequences import encode

    most = sorted(load_planted(), key=lambda sequence: -sequence.repetitions)[:limit]
    return [MemorizedSequence(torch.tensor(encode(model.tokenizer, sequence.text)), 32, sequence.id) for sequence in most]


@pytest.fixture(scope="session")
def table(model, model_name, request, publish):
    from tl_localize import ZeroOut, inject
    from tl_localize.cli.options import inj_sequences

    limit = request.config.getoption("--limit") or N_SEQUENCES
    rows = [{"kind": "planted", "id": s.id} | recalls(model, s, ZeroOut()) for s in planted(model, limit)]
    for sentence in inj_sequences(model, None)[:limit]:
        injection = inject(model, sentence, ratio=RATIO, seed=0, learning_rate=LEARNING_RATE)
        with injection.applied(model):
            rows.append({"kind": "injected", "id": sentence.id} | recalls(model, sentence, ZeroOut()))
    frame = pd.DataFrame(rows)
    shown = frame.groupby("kind")[list(SHARES)].agg(["mean", "min"]).stack(level=0, future_stack=True).rename_axis(["kind", "share"])
    publish(shown, model_name, "screen_recall", f"Zero-Out screened: part of the exact top {TOP:.0%} of each layer that is kept")
    return frame


def test_screening_keeps_more_at_larger_shares(table):
    assert (table[list(SHARES)].diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)


def test_share_that_is_twelve_times_as_fast_keeps_99_percent_of_the_exact_top(table):
    assert table[SHARE].mean() >= 0.99, table[list(SHARES)].mean()
