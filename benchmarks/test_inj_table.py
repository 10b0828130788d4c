"""The INJ tables: recall of injected rows by every method (the paper's tables 2, 6, 7, 8 and 9), on
each model.

Our sentences on both reference models, and the same of one model in a results folder:

    pytest benchmarks/test_inj_table.py
    tl-localize inj --set zero_out.screen=None

32 sentences, however long they take:

    pytest benchmarks/test_inj_table.py --full
    tl-localize inj --limit 32 --set zero_out.screen=None

The paper's data, and settings that tl-localize tune has found:

    pytest benchmarks/test_inj_table.py --model gpt2 --device cuda \\
        --data ecbd_2021_definition_dedup.jsonl
    pytest benchmarks/test_inj_table.py --settings settings.json
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

HERE = Path(__file__).parent
N_SENTENCES_FULL = 32  # of the reference models, all methods, with --full
# of the tables with more data and with other seeds, as in the paper without Zero-Out
N_SENTENCES_CHEAP = 8
CHEAP = "hard_concrete,slimming,integrated_gradients,activations"
OTHER_SEED = 1000


@pytest.fixture(scope="session")
def sentences(model, request):
    from tl_localize.texts.reference import inj_sequences

    data = request.config.getoption("--data")
    return inj_sequences(model, Path(data) if data else None)


@pytest.fixture(scope="session")
def run(model, model_name, sentences, tuned, request):
    """INJ with some methods on the first sentences, at each of the model's ratios."""
    from tl_localize.evals.settings import inj_runs
    from tl_localize.execution import Steps
    from tl_localize.model.loading import is_reference

    def measure(methods, limit, seed=0):
        limit = request.config.getoption("--limit") or (limit if is_reference(model_name) else None)
        runs = inj_runs(model, model_name, sentences[:limit], methods, [], tuned, seed=seed)
        steps = Steps()
        for inj, some in runs:
            results = inj.run(some, steps)
        return results

    return measure


@pytest.fixture(scope="session")
def results(run, model_name, quick, publish, request):
    from tl_localize.evals.inj import inj_tables
    from tl_localize.evals.settings import INJ_SENTENCES
    from tl_localize.report.saving import CAPTIONS

    n_sentences = N_SENTENCES_FULL if request.config.getoption("--full") else INJ_SENTENCES
    measured = run(*quick("all", n_sentences, 1))
    for name, table in inj_tables(measured, model_name).items():
        publish(table, model_name, name, CAPTIONS[name])
    return measured


@pytest.fixture(scope="session")
def recalls(results):
    """Mean recall, [method, multiple of the ratio], of the first injection ratio."""
    frame = results.frame[results.frame["converged"]]
    frame = frame[frame["injection_ratio"] == frame["injection_ratio"].iloc[0]]
    return frame.groupby(["method", "multiple"])["recall"].mean().unstack()


@pytest.mark.parametrize(
    "method", ["hard_concrete", "slimming", "zero_out", "integrated_gradients", "activations"]
)
def test_every_method_beats_random(recalls, method):
    assert (recalls.loc[method] > recalls.loc["random"]).all()


def test_hard_concrete_beats_activations(recalls):
    assert recalls.loc["hard_concrete"].iloc[0] > recalls.loc["activations"].iloc[0]


def test_slimming_beats_activations(recalls, model_name, request):
    """The paper's order, which does not hold on the reference models: ``Activations`` contains the
    length of the row, which betrays it.
    """
    from tl_localize.model.loading import is_reference

    if is_reference(model_name):
        request.applymarker(
            pytest.mark.xfail(
                strict=True,
                reason=(
                    "the row norm finds the injected rows: see RowNorm, and test_inj_distractors"
                ),
            )
        )
    assert recalls.loc["slimming"].iloc[0] > recalls.loc["activations"].iloc[0]


def test_most_injections_converge(results):
    assert results.frame["converged"].mean() > 0.9


@pytest.mark.quick
def test_recalls_are_the_committed_ones(results, model_name, committed):
    """Sentence by sentence."""
    used = results.frame[results.frame["converged"]]
    committed(used, f"inj-{model_name}", "--limit", "--data", "--settings", "--full")


@pytest.fixture(scope="session")
def more_data(run, publish, model_name):
    from tl_localize.paper import TITLES

    measured = run(CHEAP, N_SENTENCES_CHEAP)
    publish(
        measured.table().rename(index=TITLES),
        model_name,
        "inj_expanded",
        "INJ with more sentences, without Zero-Out",
    )
    return measured


@pytest.fixture(scope="session")
def other_rows(run):
    """The same sentences in other random rows."""
    return run(CHEAP, N_SENTENCES_CHEAP, OTHER_SEED)


def test_recalls_of_other_rows_are_the_committed_ones(more_data, other_rows, model_name, committed):
    """Sentence by sentence, with both seeds."""
    seeds = {0: more_data.frame, OTHER_SEED: other_rows.frame}
    measured = pd.concat(seeds, names=["first_seed"]).reset_index("first_seed")
    used = measured[measured["converged"]]
    committed(used, f"inj_seeds-{model_name}", "--limit", "--data", "--settings")


def test_more_sentences_keep_the_order_of_masks_and_activations(more_data):
    frame = more_data.frame[more_data.frame["converged"] & (more_data.frame["multiple"] == 1)]
    means = frame.groupby("method")["recall"].mean()
    assert means["hard_concrete"] > means["activations"] > means["random"]


def test_other_seeds_change_no_recall(more_data, other_rows, publish, model_name, request):
    """The paper's criterion: p > 0.05 in each test, without a correction, of each method."""
    from tl_localize.evals.inj import compare_seeds
    from tl_localize.paper import TITLES
    from tl_localize.stats import ALPHA

    table = compare_seeds(more_data.frame, other_rows.frame)
    publish(
        table.set_index(["injection_ratio", "ratio", "method"]).rename(index=TITLES),
        model_name,
        "inj_seeds",
        f"INJ with other rows (seeds {OTHER_SEED} + index), paired two-tailed t-tests",
    )
    if model_name == "reference-pythia":
        request.applymarker(
            pytest.mark.xfail(
                strict=True,
                reason="Slimming recalls 1.2 to 2.0 points more of the other rows, p = 0.02",
            )
        )
    methods = table[table["method"] != "random"]  # its p compares two draws
    assert (methods["p_value"] > ALPHA).all()


@pytest.mark.smoke
def test_smoke_on_the_beginning_of_two_sentences(model, sentences):
    from dataclasses import replace

    from tl_localize.evals.inj.benchmark import InjBenchmark
    from tl_localize.evals.settings import make_methods

    methods = make_methods(
        "hard_concrete,integrated_gradients,activations", ["hard_concrete.steps=100"]
    )
    short = [replace(sentence, tokens=sentence.tokens[:20]) for sentence in sentences[:2]]
    frame = InjBenchmark(model=model, sequences=short, ratio=0.03).run(methods).frame
    means = frame[frame["multiple"] == 1].groupby("method")["recall"].mean()
    assert means["hard_concrete"] > means["activations"] > means["random"]
