"""Does Gradient Alignment need to know how many rows were trained? Its setting ``share``, by
default the injection's own 3 %, from a tenth of that to three times as much. Not in the paper.

One sentence in each model, and four in disjoint rows of one model:

    pytest benchmarks/test_alignment_share.py --model reference-gpt2

Decided before the first row was measured: the sentences and groups of ``test_inj_table`` (5) and
``test_inj_distractors`` (4 groups of 4), recall of the own rows at as many neurons as were trained,
beside the recall of the distractors' rows; Attribution, which has no such setting, for comparison.
No test: the interval is a bootstrap over what was trained apart, sentences or groups.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

SHARES = (0.003, 0.01, 0.03, 0.1)
N_ALONE, N_GROUPS, DISTRACTORS = 5, 4, 3
COLUMNS = ["distractors", "share", "sequence_id", "group", "recall", "foreign_recall"]


def measure(model, model_name, sentences, distractors, steps):
    """One row for each sentence that has converged and each share, at as many neurons as it has."""
    from tl_localize import Attribution, GradientAlignment
    from tl_localize.evals.inj.benchmark import InjBenchmark
    from tl_localize.evals.settings import inj_ratios
    from tl_localize.methods.base import label_methods
    from tl_localize.units import NEURONS

    methods = [*(GradientAlignment(share=share) for share in SHARES), Attribution()]
    labelled = label_methods(methods, NEURONS)
    shares = {label: getattr(method, "share", "none") for label, method in labelled.items()}
    ratio = inj_ratios(model_name)[0]
    inj = InjBenchmark(model, sentences, ratio=ratio, distractors=distractors)
    frame = inj.run(methods, steps).frame
    used = frame[frame["method"].isin(shares) & (frame["multiple"] == 1) & frame["converged"]]
    used = used.assign(share=used["method"].map(shares), distractors=distractors)
    return used.reindex(columns=COLUMNS)


@pytest.fixture(scope="session")
def frame(model, model_name, request, publish):
    from tl_localize.execution import Store
    from tl_localize.texts.reference import inj_sequences

    folder = Path(request.config.getoption("--results")) / Path(model_name).name
    n_groups = request.config.getoption("--limit") or N_GROUPS
    found = []
    for distractors, n in ((0, N_ALONE), (DISTRACTORS, n_groups * (DISTRACTORS + 1))):
        steps = Store(folder / f"alignment_share-{distractors}")
        sentences = inj_sequences(model, n_max=n)
        found.append(measure(model, model_name, sentences, distractors, steps))
    rows = pd.concat(found, ignore_index=True)
    rows.round(4).to_csv(folder / "alignment_share.csv", index=False)
    means = 100 * rows.groupby(["distractors", "share"], sort=False)[COLUMNS[-2:]].mean()
    publish(means.round(1), model_name, "alignment_share_means", "Gradient Alignment by share")
    return rows


def test_each_share_finds_more_own_rows_than_foreign_ones(frame):
    means = frame[frame["distractors"] > 0].groupby("share")[COLUMNS[-2:]].mean()
    assert (means["recall"] > means["foreign_recall"]).all()


@pytest.mark.smoke
def test_smoke_of_the_beginnings_of_two_sentences(model, model_name):
    from dataclasses import replace

    from tl_localize.execution import Steps
    from tl_localize.texts.reference import inj_sequences

    short = [replace(text, tokens=text.tokens[:16]) for text in inj_sequences(model)[:2]]
    rows = measure(model, model_name, short, 1, Steps())
    assert set(rows["share"]) <= {*SHARES, "none"} and rows["group"].eq("group-00").all()
