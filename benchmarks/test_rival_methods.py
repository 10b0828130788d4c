"""DEL's curves of published rivals beside our methods and Hard Concrete: what is forgotten, and at
which price for other texts, when located neurons are ablated. Not in the paper.

Both reference models on their own training texts, 12 targets:

    pytest benchmarks/test_rival_methods.py

Another model, by the texts of ``tl-localize known`` or a file; fewer targets:

    pytest benchmarks/test_rival_methods.py --model gpt2-xl --device cuda \\
        --del-data memorized_data-gpt2-xl.jsonl --general pile_random_batch.pt
    pytest benchmarks/test_rival_methods.py --model reference-gpt2 --limit 2

Search: each method with free settings gets as many of them as Hard Concrete's grid
(``settings/grid-del.json``) has, or all that there are where those are fewer. Where the best ones
lie at an end of what was tried, the next value beyond is tried, until the best ones lie inside or
``MOST`` were tried, by the same rule for each method. Each is run on the 5 dev texts, which are in
no table, at the largest share; the best is the one with the highest Self minus Neg, as in
``tl-localize tune``. Ours are not searched. General text is the same for all: 48
texts that the model itself writes. BalancedSubnet and Refined Attribution, whose sets are of one
size, are run for each share.

What is done is kept in the results folder, and a run that was interrupted goes on there.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from del_data import read_data

HERE = Path(__file__).parent
N_TARGETS = 12  # unless --limit says another number
SHARES = (0.02, 0.05, 0.1)  # of each layer of the reference models
OURS = ("iterative_attribution", "refined_attribution", "attribution")
OF_ONE_SHARE = ("balanced_subnet", "refined_attribution")
HARD_CONCRETE = json.loads((HERE / "settings" / "grid-del.json").read_text())["hard_concrete"]
BUDGET = math.prod(map(len, HARD_CONCRETE.values()))  # settings of each method, to begin with
MOST = 3 * BUDGET
GRIDS = {
    "hard_concrete": HARD_CONCRETE,
    "balanced_subnet": {"learning_rate": [0.01, 0.03, 0.1], "steps": [50, 150]},
    "adversarial_hard_concrete": {
        "learning_rate": [0.01, 0.03],
        "general_weight": [0.3, 1.0, 3.0],
    },
    "selective_pruning": {"importance": ["rms", "abs"]},
    # without free settings
    "selective_synaptic_dampening": {},
    "contrastive_gradient": {},
}
QUICK = {"hard_concrete": {"steps": [3]}, "balanced_subnet": {"steps": [2, 3]}}
QUICK |= {"adversarial_hard_concrete": {"steps": [2]}, "selective_pruning": {}}


def method_at(name, settings, ratio):
    """A method for one share of each layer, with its settings over those of DEL."""
    from tl_localize.evals.settings import del_methods

    (method,) = del_methods(name, [], "", {name: settings})
    return replace(method, share=ratio) if name in OF_ONE_SHARE else method


def beyond(tried, best):
    """The next settings outside of those that were tried, at each end where the best ones lie; as
    far from the end as the value before it, in logarithms.
    """
    found = []
    for axis, value in best.items():
        if not isinstance(value, int | float):
            continue
        values = sorted({settings[axis] for settings in tried})
        if len(values) == 1 or value not in (values[0], values[-1]):
            continue
        before = values[1] if value == values[0] else values[-2]
        further = float(f"{value * value / before:.2g}")
        found.append(best | {axis: max(1, round(further)) if isinstance(value, int) else further})
    return [settings for settings in found if settings not in tried]


def search_settings(dev, grids, store=None):
    """The best settings of each method on dev texts, and what each trial scored."""
    from tl_localize.evals.tuning import expand, rank

    (ratio,) = dev.ratios
    best = {}
    trials = []
    for name, grid in grids.items():
        new = [{axis: getattr(method, axis) for axis in grid} for method in expand(name, grid)]
        assert len(new) <= BUDGET
        best[name] = new[0]
        if len(new) == 1:
            continue
        tried = []
        while new and len(tried) + len(new) <= MOST:
            tried += new
            methods = [method_at(name, settings, ratio) for settings in tried]
            # a folder has those of all methods, and those that an interrupted run had reached
            by_text = {json.dumps(settings): settings for settings in tried}
            scores = {}
            for found in rank(dev.run(methods, store), ratio).to_dict("records"):
                text = json.dumps({axis: found["settings"].get(axis) for axis in grid})
                if found["method"] == name and text in by_text:
                    scores[text] = found["score"]
            best[name] = by_text[next(iter(scores))]
            new = beyond(tried, best[name])
        for text, score in scores.items():
            trials.append(
                {"method": name, "settings": text, "Self - Neg (points)": round(score, 1)}
            )
    return best, pd.DataFrame(trials).set_index("method")


def searched(name):
    """The best settings of each method for a shipped model, as they were published; defaults for
    others.
    """
    path = HERE.parent / "docs" / "results" / name / "rivals_search.csv"
    if not path.is_file():
        return {method: {} for method in GRIDS}
    trials = pd.read_csv(path).drop_duplicates("method").set_index("method")["settings"]
    of_one_setting = {method: {} for method in GRIDS}
    return of_one_setting | {method: json.loads(settings) for method, settings in trials.items()}


def settings_elsewhere(name, ratio):
    """For INJ: the rivals as they were searched for DEL, and sets of one size at this share of each
    layer.
    """
    found = {key: settings for key, settings in searched(name).items() if key != "hard_concrete"}
    of_one_share = {method: found.get(method, {}) | {"share": ratio} for method in OF_ONE_SHARE}
    return found | of_one_share


def measure_curves(benchmark, best, ours, steps):
    """DEL at each share of a benchmark: ours as they are, the others with their best settings."""
    from tl_localize.evals.deletion.results import DelResults

    wanted = {name: {} for name in ours} | best
    for ratio in benchmark.ratios:
        methods = [method_at(name, settings, ratio) for name, settings in wanted.items()]
        replace(benchmark, ratios=(ratio,)).run(methods, steps)
    return DelResults.of(steps)


@pytest.fixture(scope="session")
def results(model, model_name, request, publish):
    from tl_localize.evals.deletion.benchmark import DelBenchmark
    from tl_localize.evals.settings import del_ratios
    from tl_localize.execution import Store
    from tl_localize.model.loading import is_reference

    folder = Path(request.config.getoption("--results")) / Path(model_name).name / "rivals"
    limit = request.config.getoption("--limit")
    sequences, n_dev, text = read_data(model, model_name, request)
    ratios = SHARES if is_reference(model_name) else del_ratios(model_name)
    dev = DelBenchmark(model, sequences[:n_dev], text, ratios=(max(ratios),), n_dev=0)
    best, trials = search_settings(dev, GRIDS, Store(folder / "search"))
    publish(
        trials, model_name, "rivals_search", f"Settings searched on {len(dev.sequences)} dev texts"
    )
    n_targets = min(limit or N_TARGETS, len(sequences) - n_dev)
    benchmark = DelBenchmark(
        model, sequences, text, ratios=ratios, n_dev=n_dev, n_targets=n_targets
    )
    measured = measure_curves(benchmark, best, OURS, Store(folder / "curves"))
    about = f"mean ± standard error over {n_targets} targets"
    publish(measured.table(), model_name, "rivals", f"Rivals in DEL, {about}")
    publish(measured.at_price(), model_name, "rivals_at_price", f"Rivals at a price, {about}")
    return measured


@pytest.fixture(scope="session")
def changes(results):
    """Mean change of accuracy of the target and of the others, [method, ratio]."""
    columns = ["delta_self_accuracy", "delta_neg_accuracy"]
    return results.frame.groupby(["method", "ratio"])[columns].mean()


# not said of the other rivals: on reference-gpt2 their neurons took nothing of two texts, or a
# point, and as much of the others as random neurons, or more
@pytest.mark.parametrize("name", ["hard_concrete", "adversarial_hard_concrete", *OURS])
def test_methods_that_train_or_attribute_beat_random_on_self_minus_neg(changes, name):
    largest = changes.xs(changes.index.get_level_values("ratio").max(), level="ratio")
    gaps = largest["delta_neg_accuracy"] - largest["delta_self_accuracy"]
    assert gaps[name] > gaps["random"]


def test_changes_are_the_committed_ones(results, model_name, committed):
    committed(results.frame, f"rivals-{model_name}", "--limit", "--del-data", "--general")


@pytest.mark.smoke
def test_smoke_settings_beyond_both_ends():
    tried = [{"rate": rate, "steps": 50, "kind": "abs"} for rate in (0.01, 0.03, 0.1)]
    beyond_best = [[found["rate"] for found in beyond(tried, best)] for best in tried]
    assert beyond_best == [[0.0033], [], [0.33]]


@pytest.mark.smoke
def test_smoke_search_and_curves_of_a_few_short_texts(model, publish, model_name, tmp_path):
    from tl_localize import reference_sequences
    from tl_localize.evals.deletion.benchmark import DelBenchmark
    from tl_localize.execution import Steps, Store
    from tl_localize.texts.reference import held_out_tokens

    if not model_name.startswith("reference"):
        pytest.skip("of the reference models alone")
    found = reference_sequences(model)[:4]
    short = [replace(sequence, tokens=sequence.tokens[:40]) for sequence in found]
    text = tuple(tuple(row[:24].tolist()) for row in held_out_tokens()[:2])
    general = {"texts": [text]}  # in place of what the model would write
    grids = {name: QUICK.get(name, {}) | general for name in GRIDS if "gradient" not in name}
    grids["hard_concrete"] = QUICK["hard_concrete"]
    benchmark = DelBenchmark(model, short, held_out_tokens()[:2], ratios=(0.05, 0.1), n_dev=2)
    dev = replace(benchmark, sequences=short[:2], ratios=(0.1,), n_dev=0)
    store = Store(tmp_path)
    best, trials = search_settings(dev, grids | {"contrastive_gradient": {}}, store)
    again, as_often = search_settings(dev, grids | {"contrastive_gradient": {}}, store)
    assert again == best and as_often.equals(trials)
    steps = [json.loads(settings)["steps"] for settings in trials["settings"]]
    assert len(steps) > 2 and {2, 3} < set(steps)
    inside = min(steps) < best["balanced_subnet"]["steps"] < max(steps)
    assert inside or min(steps) == 1 or len(steps) == MOST
    measured = measure_curves(benchmark, best, ["attribution"], Steps())
    points = measured.points()
    assert set(points) == {*GRIDS, "attribution", "random"}
    assert all(len(found) == 2 for found in points.values())
    assert points["attribution"]["self"].to_numpy().mean() < 0
