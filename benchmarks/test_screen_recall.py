"""How much of the exact top 1 % of each layer ``ZeroOut(screen=...)`` keeps, by share, on planted
sequences and injected sentences.

Of each kind four, on both reference models:

    pytest benchmarks/test_screen_recall.py --limit 4

One exact Zero-Out of each sequence says it for every share: a neuron of the exact top is kept if
the screen takes it. Beside it stands ``Attribution`` alone, which ranks neurons that fire
everywhere too low where a text is recited almost surely. The sequences are the first planted ones
with the most repetitions, and the first INJ sentences, each injected at 3 % of the rows.

On eleven other choices (eight planted texts of 32 to 128 repetitions and three injections, both
models) the screen kept, on average and at worst, 0.974 and 0.944 at 2 %, 0.997 and 0.989 at 3 %,
and all at 5 %; Attribution alone 0.964 and 0.900 at 5 %.
"""

from __future__ import annotations

import pandas as pd
import pytest

SHARES = (0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1)
TOP = 0.01
# with the sample of 32 a layer 7 % of the exact passes, so 12 times the plain loop's speed where
# exact Zero-Out has 0.9 times
SHARE = 0.05
N_SEQUENCES = 4
RATIO, LEARNING_RATE = 0.03, 0.003


def recalls(model, sequence):
    """[(ranking, share)] -> part of the exact top of each layer that the screen takes."""
    from tl_localize import Attribution, NeuronSet, ZeroOut
    from tl_localize.methods.zero_out import highest_of_both, output_norms
    from tl_localize.model.neurons import NeuronView

    truth = ZeroOut()(model, sequence).top_k(TOP)
    estimates = Attribution()(model, sequence).values
    lengths = output_norms(NeuronView(model), sequence)
    kept = {}
    for share in SHARES:
        count = round(share * estimates.shape[1])
        kept["screen", share] = NeuronSet(highest_of_both(estimates, lengths, count)).recall_of(
            truth
        )
        kept["attribution alone", share] = NeuronSet(
            highest_of_both(estimates, estimates, count)
        ).recall_of(truth)
    return kept


@pytest.fixture(scope="session")
def table(model, model_name, request, publish):
    from tl_localize import inject
    from tl_localize.texts.reference import inj_sequences, reference_sequences

    limit = request.config.getoption("--limit") or N_SEQUENCES
    rows = [{"kind": "planted"} | recalls(model, s) for s in reference_sequences(model)[:limit]]
    for sentence in inj_sequences(model, None)[:limit]:
        injection = inject(model, sentence, ratio=RATIO, seed=0, learning_rate=LEARNING_RATE)
        with injection.applied(model):
            rows.append({"kind": "injected"} | recalls(model, sentence))
    frame = pd.DataFrame(rows).set_index("kind")
    frame.columns = pd.MultiIndex.from_tuples(frame.columns, names=["ranking", "share"])
    shown = (
        frame.groupby("kind")
        .agg(["mean", "min"])
        .stack(level=["ranking", "share"], future_stack=True)
    )
    publish(
        shown,
        model_name,
        "screen_recall",
        f"Zero-Out screened: part of the exact top {TOP:.0%} of each layer that is kept",
    )
    return frame


def test_share_that_is_twelve_times_as_fast_keeps_99_percent_of_the_exact_top(table):
    assert table["screen"][SHARE].mean() >= 0.99, table["screen"].mean()
