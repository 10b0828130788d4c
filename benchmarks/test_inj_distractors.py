"""INJ with distractors: four sentences in disjoint rows of one model; whose rows does a method
find? Not in the paper.

Both reference models, 4 groups of 4 sentences, without Zero-Out:

    pytest benchmarks/test_inj_distractors.py

The committed table, which has 8 groups and all methods, and the paper's methods and ours among
them in a results folder (there Zero-Out is screened):

    pytest benchmarks/test_inj_distractors.py --full
    tl-localize inj --distractors 3 --limit 32 --settings benchmarks/settings/distractors.json
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_rival_methods import settings_elsewhere

HERE = Path(__file__).parent
DISTRACTORS = 3
N_GROUPS, N_GROUPS_FULL = 4, 8
ALL = "all,refined_attribution,rivals"
CHEAP = (
    "hard_concrete,slimming,integrated_gradients,activations,attribution,gradient_alignment,"
    "iterative_attribution"
)
# of the reference models; tl-localize inj --distractors 3 --settings reads it too
SETTINGS = HERE / "settings" / "distractors.json"


def settings_of(name, ratio):
    """The settings of a shipped model."""
    from tl_localize.evals.settings import SCREEN
    from tl_localize.evals.tuning import read_settings

    screened = {"zero_out": {"screen": SCREEN}}
    return screened | read_settings(SETTINGS) | settings_elsewhere(name, ratio)


@pytest.fixture(scope="session")
def results(model, model_name, tuned, request, publish):
    from tl_localize.evals.inj import inj_tables, target_against_distractors
    from tl_localize.evals.settings import inj_ratios, inj_runs
    from tl_localize.execution import Steps
    from tl_localize.report.saving import CAPTIONS, save_figure
    from tl_localize.texts.reference import inj_sequences

    full = request.config.getoption("--full")
    data = request.config.getoption("--data")
    limit = request.config.getoption("--limit") or (DISTRACTORS + 1) * (
        N_GROUPS_FULL if full else N_GROUPS
    )
    sentences = inj_sequences(model, Path(data) if data else None)[:limit]
    ratios = inj_ratios(model_name)[:1]
    if model_name.startswith("reference"):
        tuned = settings_of(model_name, ratios[0]) | tuned
    methods = ALL if full else CHEAP
    runs = inj_runs(
        model, model_name, sentences, methods, [], tuned, ratios, distractors=DISTRACTORS
    )
    steps = Steps()
    for inj, some in runs:
        measured = inj.run(some, steps)
    for name, table in inj_tables(measured, model_name).items():
        publish(table, model_name, f"distractors_{name}", CAPTIONS[name])
    folder = Path(request.config.getoption("--results")) / Path(model_name).name
    save_figure(target_against_distractors(measured), folder, "distractors")
    measured.save(folder / "distractors")
    return measured


def test_most_sentences_are_recited_with_their_own_rows_and_not_with_others(results):
    assert results.frame.groupby("sequence_id")["converged"].first().mean() >= 0.9


@pytest.mark.parametrize(
    "method",
    ["hard_concrete", "slimming", "integrated_gradients", "attribution", "gradient_alignment"],
)
def test_methods_that_read_the_sentence_tell_its_rows_better_than_norms_do(results, method):
    """Norms find as many rows of the others in the mean over a group, and of single sentences far
    more or fewer.
    """
    rows = results.frame[results.frame["multiple"] == 1].copy()
    rows["gap"] = rows["recall"] - rows["foreign_recall"]
    gaps = rows.pivot_table(index="sequence_id", columns="method", values="gap")
    assert gaps[method].mean() > 0
    assert (gaps[method] > gaps["row_norm"]).mean() >= 0.9


def test_recalls_are_the_committed_ones(results, model_name, request, committed):
    if not request.config.getoption("--full"):
        pytest.skip("the committed numbers are those of --full")
    used = results.frame[results.frame["converged"]]
    committed(used, f"distractors-{model_name}", "--limit", "--data", "--settings")
