"""The DEL tables and figures: what is forgotten when located neurons are ablated, on each model.

Both reference models on their own training texts:

    pytest benchmarks/test_del_table.py

The same tables of one model, in a results folder:

    tl-localize del --methods METHODS --targets 25    # all but zero_out
    tl-localize del --methods zero_out --targets 6    # into the same folder

Heads against neurons, at as many output rows:

    pytest benchmarks/test_del_table.py -k heads

Larger shares, for the loss at a price:

    pytest benchmarks/test_del_table.py -k larger_shares

The authors' data, which were collected from the Pile:

    pytest benchmarks/test_del_table.py --model gpt2-xl --device cuda \\
        --del-data memorized_data-gpt2-xl.jsonl --general pile_random_batch.pt
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from comparison import differences, indexed, names, read_bands, read_frame
from del_data import collected, of_collection, read_data

HERE = Path(__file__).parent
# Of the reference models; of others all sequences are targets.
N_TARGETS, N_TARGETS_ZERO_OUT = 25, 6  # a forward pass for each neuron takes its time
METHODS = (
    "hard_concrete,slimming,zero_out,integrated_gradients,activations,attribution,"
    "gradient_alignment,iterative_attribution"
)
PAPER_METHODS = ["hard_concrete", "slimming", "zero_out", "integrated_gradients", "activations"]
HEADS = "attribution,iterative_attribution,zero_out,activations"
# of the neurons of a layer: 32, 64 and 128 rows of W_out; a head has 32 rows of W_O
AS_MANY_ROWS = (0.0209, 0.0417, 0.0834)
NEURONS = "attribution,iterative_attribution"
CURVE, N_TARGETS_CURVE = (0.05, 0.1, 0.2), 8
CURVE_METHODS = (
    "hard_concrete,slimming,integrated_gradients,activations,attribution,iterative_attribution"
)
GIVEN = ("--limit", "--del-data", "--general", "--settings")  # other data than the committed


@pytest.fixture(scope="session")
def files(request):
    """Paths of the sequences and of the general text, where the user named them."""
    return [
        Path(value) if (value := request.config.getoption(name)) else None
        for name in ("--del-data", "--general")
    ]


@pytest.fixture(scope="session")
def collection(model, model_name, files):
    from tl_localize.model.loading import is_reference

    return None if files[0] or not is_reference(model_name) else collected(model)


@pytest.fixture(scope="session")
def benchmark(model, model_name, collection, files, request):
    """DEL on the drawn sequences, for a number of targets."""
    from tl_localize.evals.deletion.benchmark import DelBenchmark
    from tl_localize.evals.settings import del_ratios, read_general_text

    if collection is None:
        sequences, n_dev, general = read_data(model, model_name, request)
    else:
        sequences, n_dev, general = of_collection(collection)
        if files[1]:
            general = read_general_text(model, files[1])

    def make(n_targets):
        limit = request.config.getoption("--limit") or (None if collection is None else n_targets)
        n_targets = limit and min(limit, len(sequences) - n_dev)
        ratios = del_ratios(model_name)
        return DelBenchmark(
            model, sequences, general, ratios=ratios, n_dev=n_dev, n_targets=n_targets
        )

    return make


@pytest.fixture(scope="session")
def results(benchmark, collection, model_name, tuned, quick, publish, publish_figure, request):
    from tl_localize.evals.deletion import del_figures, del_tables
    from tl_localize.evals.deletion.results import DelResults
    from tl_localize.evals.settings import del_methods
    from tl_localize.execution import Steps
    from tl_localize.report.saving import CAPTIONS

    as_committed = collection is not None and not request.config.getoption("--limit")
    steps = Steps()
    methods, n_targets = quick(METHODS, N_TARGETS, 2)
    for method in del_methods(methods, [], model_name, tuned):
        few = as_committed and method.name == "zero_out"
        benchmark(N_TARGETS_ZERO_OUT if few else n_targets).run([method], steps)
    measured = DelResults.of(steps)
    for name, table in del_tables(measured, model_name).items():
        publish(table, model_name, name, CAPTIONS[name])
    for name, figure in del_figures(measured).items():
        publish_figure(figure, model_name, name)
    return measured


@pytest.fixture(scope="session")
def losses(results):
    """Mean loss of accuracy at the largest ratio, in points: Self and Neg of each method."""
    frame = results.frame[results.frame["ratio"] == results.frame["ratio"].max()]
    return -100 * frame.groupby("method")[["delta_self_accuracy", "delta_neg_accuracy"]].mean()


def test_collection_finds_a_hundred_sequences_in_the_training_texts(
    collection, model_name, publish
):
    from tl_localize.texts.reference import load_planted

    if collection is None:
        pytest.skip("the sequences were given")
    # Without the texts: they are Python's.
    publish(
        collection.report.table(),
        model_name,
        "collect_report",
        "Collection: what each criterion removed",
    )
    frame = collection.frame.set_index("id")
    planted = pd.DataFrame([vars(text) for text in load_planted()])
    planted["found"] = planted["id"].isin(frame.index)
    counts = planted.groupby("repetitions")["found"].agg(planted="size", found="sum")
    caption = "Planted texts that were found, by how often they were repeated in training"
    publish(counts, model_name, "collect_planted", caption)
    natural = frame.loc[frame["category"] == "natural", ["accuracy", "distance"]]
    caption = f"Memorized texts that nobody planted ({len(natural)})"
    publish(natural, model_name, "collect_natural", caption)
    shares = counts["found"] / counts["planted"]
    assert len(collection.sequences) - collection.n_dev >= 100
    assert shares.iloc[-1] > shares.iloc[0]


@pytest.mark.parametrize("method", PAPER_METHODS)
def test_every_method_hurts_the_target_more_than_the_others(losses, method):
    assert losses.loc[method, "delta_self_accuracy"] > losses.loc[method, "delta_neg_accuracy"]


@pytest.mark.parametrize("method", PAPER_METHODS)
def test_every_method_beats_random_on_self_minus_neg(losses, method):
    gaps = losses["delta_self_accuracy"] - losses["delta_neg_accuracy"]
    assert gaps[method] > gaps["random"]


def test_random_neurons_change_little(losses):
    assert losses.loc["random"].abs().max() < 5


@pytest.mark.quick
def test_losses_are_the_committed_ones(results, model_name, committed):
    """Target by target."""
    committed(results.frame, f"del-{model_name}", *GIVEN)


def test_heads_and_neurons_of_as_many_rows_lose_what_is_committed(
    benchmark, model_name, tuned, committed, publish
):
    """Which holds more of a memory? One and two heads of each layer, against neurons with as many
    output rows, and twice as many.
    """
    from tl_localize import AttentionHeads, MLPNeurons
    from tl_localize.evals.deletion import del_tables
    from tl_localize.evals.settings import del_methods, del_ratios
    from tl_localize.report.saving import CAPTIONS

    heads = AttentionHeads()
    n_targets = 25
    parts = {}
    for units, methods, ratios in (
        (heads, HEADS, del_ratios(model_name, heads)),
        (MLPNeurons(), NEURONS, AS_MANY_ROWS),
    ):
        of_units = replace(benchmark(n_targets), units=units, ratios=ratios)
        results = of_units.run(del_methods(methods, [], model_name, tuned, units=units))
        publish(
            del_tables(results, model_name)["del"],
            model_name,
            f"del_{units.name}",
            f"{CAPTIONS['del']}: {units.name}",
        )
        parts[units.name] = results.frame
    measured = pd.concat(parts, names=["units"]).reset_index("units")
    committed(measured, f"heads-{model_name}", *GIVEN)


def test_losses_at_larger_shares_are_the_committed_ones(
    benchmark, model_name, tuned, committed, publish
):
    """What is forgotten at the same loss of others, on a curve of three shares."""
    from tl_localize.evals.deletion import del_tables
    from tl_localize.evals.settings import del_methods
    from tl_localize.report.saving import CAPTIONS

    data = replace(benchmark(N_TARGETS_CURVE), ratios=CURVE)
    results = data.run(del_methods(CURVE_METHODS, [], model_name, tuned))
    table = del_tables(results, model_name)["del_at_price"]
    publish(table, model_name, "del_curve_at_price", CAPTIONS["del_at_price"])
    committed(results.frame, f"curve-{model_name}", *GIVEN)


def test_rows_of_a_target_are_the_committed_ones(benchmark, model_name, files):
    """And those with another first layer are not."""
    from tl_localize.evals.settings import del_methods

    if files[0] or f"del-{model_name}" not in names():
        pytest.skip("nothing is committed of these sequences")
    method = "attribution"
    data = benchmark(1)
    (chosen,) = del_methods(method, [], model_name, {})
    expected = read_frame(f"del-{model_name}")
    target = data.targets[0].id
    rows = expected[
        (expected.index.get_level_values("method") == method)
        & (expected.index.get_level_values("sequence_id") == target)
    ]
    bands = read_bands(f"del-{model_name}")
    assert differences(indexed(data.run([chosen]).frame), rows, bands).empty
    lower = replace(data, first_layer=0).run([chosen]).frame
    assert len(differences(indexed(lower), rows, bands)) == rows.size


@pytest.mark.smoke
def test_smoke_on_a_few_planted_sequences(model, model_name):
    from tl_localize.collect import Criteria, collect_memorized
    from tl_localize.evals.deletion.benchmark import DelBenchmark
    from tl_localize.evals.settings import del_methods
    from tl_localize.texts.reference import held_out_tokens, load_planted

    if getattr(model, "tokenizer", None) is None or not model_name.startswith("reference"):
        pytest.skip("of the reference models alone")
    most = sorted(load_planted(), key=lambda text: -text.repetitions)[:16]
    found = collect_memorized(
        model,
        model.tokenizer([text.text for text in most], add_special_tokens=False)["input_ids"],
        Criteria(),
        n_dev=1,
    )
    methods = del_methods("attribution,activations", [], model_name, {})
    frame = (
        DelBenchmark(
            model, found.sequences, held_out_tokens()[:8], ratios=(0.1,), n_dev=1, n_targets=6
        )
        .run(methods)
        .frame
    )
    means = -frame.groupby("method")[["delta_self_accuracy", "delta_neg_accuracy"]].mean()
    gaps = means["delta_self_accuracy"] - means["delta_neg_accuracy"]
    assert gaps["attribution"] > gaps["random"]
    assert (
        means.loc["activations", "delta_self_accuracy"] > means.loc["random", "delta_self_accuracy"]
    )
