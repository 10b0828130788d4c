"""The REV tables: what a model forgets when rows are put back that training could use freely, on
each model. Not in the paper.

Both reference models by fast methods, and the same of one model in a results folder:

    pytest benchmarks/test_rev_table.py
    tl-localize rev --groups 4 --methods METHODS \\
        --ratio 0.2 --ratio 0.25 --ratio 0.3 --ratio 0.35 --ratio 0.4
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_rival_methods import settings_elsewhere

METHODS = (
    "activation_contrast,activations,attribution,gradient_alignment,hard_concrete,"
    "iterative_attribution,slimming"
)
RIVALS = "refined_attribution,rivals"
N_GROUPS = 4
RATIOS = (0.2, 0.25, 0.3, 0.35, 0.4)  # around the price of 5 points
RATIOS_QUICK = (0.3,)
ONE_SHARE = 0.3  # of methods whose sets are of one size
N_GENERAL = 12  # rows of general text, as in tl-localize rev


@pytest.fixture(scope="session")
def sentences(model, request):
    from tl_localize.texts.reference import inj_sequences

    data = request.config.getoption("--data")
    return inj_sequences(model, Path(data) if data else None)[: request.config.getoption("--limit")]


@pytest.fixture(scope="session")
def general(model):
    from tl_localize.texts.reference import held_out_tokens

    return held_out_tokens(model)[:N_GENERAL]


@pytest.fixture(scope="session")
def results(model, model_name, sentences, general, tuned, quick, publish, publish_figure):
    from tl_localize import RevBenchmark
    from tl_localize.evals.rev import rev_figures, rev_tables
    from tl_localize.evals.settings import first_layer_settings, make_methods
    from tl_localize.report.saving import CAPTIONS

    names, n_groups = quick(f"{METHODS},{RIVALS}", N_GROUPS, 1)
    rivals = settings_elsewhere(model_name, ONE_SHARE)
    methods = make_methods(names, [], rivals, first_layer_settings(0), tuned)
    ratios = RATIOS if n_groups == N_GROUPS else RATIOS_QUICK
    benchmark = RevBenchmark(model, sentences, general, n_groups=n_groups, ratios=ratios)
    measured = benchmark.run(methods)
    for name, table in rev_tables(measured).items():
        publish(table, model_name, name, CAPTIONS[name])
    for name, figure in rev_figures(measured).items():
        publish_figure(figure, model_name, name)
    return measured


@pytest.fixture(scope="session")
def changes(results):
    """Mean change of accuracy of own and of others, rows put back, [method, ratio]."""
    back = results.frame[results.frame["converged"] & (results.frame["direction"] == "put_back")]
    columns = ["delta_own_accuracy", "delta_others_accuracy"]
    return back.groupby(["method", "ratio"])[columns].mean()


def test_the_learned_mask_leads(changes):
    gaps = (changes["delta_own_accuracy"] - changes["delta_others_accuracy"]).unstack().min(axis=1)
    assert gaps.idxmin() == "oracle_mask"


@pytest.mark.parametrize("method", METHODS.split(","))
def test_every_method_forgets_its_own_text_rather_than_others(changes, method):
    largest = changes.loc[method].loc[changes.index.get_level_values("ratio").max()]
    assert largest["delta_own_accuracy"] < largest["delta_others_accuracy"]


def test_most_trainings_converge(results):
    assert results.frame.groupby("group")["converged"].first().mean() > 0.5


@pytest.mark.quick
def test_changes_are_the_committed_ones(results, model_name, committed):
    """Sentence by sentence, in both directions."""
    used = results.frame[results.frame["converged"]]
    committed(used, f"rev-{model_name}", "--limit", "--data", "--settings")


@pytest.mark.smoke
def test_smoke_on_the_beginning_of_two_sentences(model, sentences, general):
    from dataclasses import replace

    from tl_localize import Activations, RevBenchmark

    short = [replace(sentence, tokens=sentence.tokens[:16]) for sentence in sentences[:2]]
    benchmark = RevBenchmark(model, short, general[:2], n_sequences=2, ratios=(0.3,))
    frame = benchmark.run([Activations()]).frame
    lost = -frame[frame["direction"] == "put_back"].groupby("method")["delta_own_accuracy"].mean()
    assert frame["converged"].all()
    assert lost["oracle_rounds"] > lost["activations"] > lost["random"]
