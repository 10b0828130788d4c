"""Whether INJ and DEL rank methods alike, and whether texts of one category are confused."""

from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tl_localize.evals import DelResults
from tl_localize.evals.agreement import agreement, published_agreement
from tl_localize.evals.deletion import confusion_by_category, layers_against_all
from tl_localize.stats import group_test, rank_agreement, within_and_between

METHODS = ["hard_concrete", "slimming", "integrated_gradients", "activations"]


def ranked(values, setting):
    return pd.DataFrame({"method": METHODS, "setting": setting, "value": values})


def test_agreement_is_kendalls_tau_of_what_is_found_and_what_is_lost():
    recalls = ranked([0.5, 0.4, 0.3, 0.2], "1 %")
    losses = pd.concat(
        [ranked([-0.4, -0.3, -0.2, -0.1], "same"), ranked([-0.1, -0.2, -0.3, -0.4], "reversed")]
    )
    found = agreement(recalls, losses).set_index("del")
    assert found["tau"].to_dict() == {"same": 1.0, "reversed": -1.0}
    assert found["n"].tolist() == [4, 4]


def test_agreement_leaves_random_out():
    recalls = pd.concat([ranked([0.5, 0.4, 0.3, 0.2], "1 %"), ranked([9.0] * 4, "1 %")[:1]])
    recalls.iloc[-1, 0] = "random"
    assert agreement(recalls, ranked([-0.4, -0.3, -0.2, -0.1], "0.1 %"))["n"].tolist() == [4]


def test_published_agreement_has_every_pair_of_settings_of_the_papers_models():
    counts = published_agreement().groupby("model").size()
    assert counts.to_dict() == {
        "gpt2-xl": 12,
        "pythia-2.8b-deduped": 12,
        "pythia-6.9b-deduped": 12,
    }


def test_rank_agreement_of_one_thing_is_nan():
    assert np.isnan(rank_agreement([1.0], [2.0])).all()


def blocks(size, effect):
    """A matrix of two groups in which more is lost within, and the names of the groups."""
    groups = ["a"] * size + ["b"] * size
    same = np.equal.outer(np.array(groups), np.array(groups))
    noise = np.random.default_rng(0).normal(size=same.shape)
    return noise - effect * same, groups


def test_group_test_finds_an_effect_and_none_where_there_is_none():
    values, groups = blocks(6, effect=3.0)
    assert group_test(values, groups, n_shuffles=499) < 0.01
    assert group_test(*blocks(6, effect=0.0), n_shuffles=499) > 0.05
    within, between = within_and_between(values, groups)
    assert within - between == pytest.approx(-3.0, abs=0.5)


def test_group_test_is_the_share_of_all_orders_of_the_names():
    groups = ["a", "a", "b", "b", "c"]
    values = np.random.default_rng(2).normal(size=(5, 5))
    values[np.equal.outer(groups, groups)] -= 1
    values[0, 3] = np.nan  # not measured

    def gap(names):
        same = np.equal.outer(names, names)
        counted = np.isfinite(values) & ~np.eye(5, dtype=bool)
        return values[same & counted].mean() - values[~same & counted].mean()

    gaps = np.array([gap(names) for names in permutations(groups)])
    exact = (gaps <= gap(groups) + 1e-12).mean()
    assert 0.05 < exact < 0.5
    assert group_test(values, groups, n_shuffles=20000) == pytest.approx(exact, abs=0.015)


def test_group_test_needs_both_kinds_of_pairs():
    values = np.zeros((3, 3))
    for groups in (["a", "b", "c"], ["a", "a", "a"]):
        assert np.isnan(group_test(values, groups, n_shuffles=9))


def test_confusion_by_category_counts_targets_alone(measured):
    _, results = measured
    found = confusion_by_category(results, n_shuffles=19).set_index(["method", "ratio"])
    matrix = results.confusion["noise", 0.5]
    categories = results.before["category"].tolist()  # of all five, which were targets
    pairs = [
        100 * matrix.iloc[i, j]
        for i in range(5)
        for j in range(5)
        if i != j and categories[i] == categories[j]
    ]
    row = found.loc["noise", 0.5]
    assert row["within"] == pytest.approx(np.mean(pairs))
    assert (row["n_within"], row["n_within"] + row["n_between"]) == (len(pairs), 20)
    few = DelResults(
        results.frame,
        before=results.before,
        confusion={key: matrix.iloc[:3] for key, matrix in results.confusion.items()},
    )
    assert confusion_by_category(few, n_shuffles=9)["n"].eq(3).all()
    some = results.before.assign(category=["", "", *categories[2:]])
    alone = DelResults(results.frame, before=some, confusion=results.confusion)
    n_within = confusion_by_category(alone, n_shuffles=9)["n_within"]
    assert n_within.eq(sum(map(categories[2:].count, categories[2:])) - 3).all()


def test_layers_against_all_compares_target_by_target(gpt2_like, benchmark_of):
    from noise import Noise

    benchmark = benchmark_of(gpt2_like, layers="each", ratios=(0.1,), multiples=(1,))
    frame = benchmark.run([Noise()]).single_layers
    row: Any = layers_against_all(frame).set_index("method").loc["noise"]
    used = frame[frame["method"] == "noise"].assign(lost=100 * frame["delta_self_accuracy"])
    single = used[used["layer"] > 0].groupby("layer")["lost"].mean()
    assert row["all"] == pytest.approx(used.loc[used["layer"].isna(), "lost"].mean())
    assert row["mean_layer"] == pytest.approx(single.mean())
    assert row["best"] == pytest.approx(single.min())
    assert (row["n_layers"], row["n"]) == (len(single), 5)


def test_layers_against_all_counts_the_layers_that_erase_as_much():
    lost = {
        None: (-0.5, -0.6, -0.4),
        0: (-0.9, -0.9, -0.9),
        1: (-0.1, -0.2, 0.0),
        2: (-0.3, -0.2, -0.2),
        3: (-0.6, -0.5, -0.7),
    }
    about = {"method": "noise", "ratio": 0.1, "multiple": 1}
    rows = [
        about | {"layer": layer, "sequence_id": i, "delta_self_accuracy": change}
        for layer, changes in lost.items()
        for i, change in enumerate(changes)
    ]
    (row,) = layers_against_all(pd.DataFrame(rows)).to_dict("records")
    assert (row["best_layer"], row["layers_ahead"], row["n_layers"]) == (3, 1, 3)
    mean = (-10 - 70 / 3 - 60) / 3
    assert (row["all"], row["best"], row["mean_layer"]) == pytest.approx((-50, -60, mean))
    assert row["p_value"] < 0.05
    some = [row for row in rows if (row["layer"], row["sequence_id"]) not in [(None, 0), (2, 1)]]
    (row,) = layers_against_all(pd.DataFrame(some)).to_dict("records")
    assert (row["n"], row["all"], row["best"]) == pytest.approx((1, -40, -70))


def test_del_takes_the_best_neurons_of_the_whole_model(neox_like, benchmark_of):
    from noise import Noise

    benchmark = benchmark_of(neox_like, per="model", ratios=(0.1,), n_targets=2)
    frame = benchmark.run([Noise()]).frame.query("method == 'noise'")
    for row, target in zip(frame.to_dict("records"), benchmark.targets, strict=True):
        chosen = Noise()(neox_like, target).top_k(0.1, per="model", first_layer=1)
        assert (row["n_neurons"], row["n_layers"]) == (len(chosen), 2) == (11, 2)


def test_del_takes_a_number_of_neurons_of_the_whole_model(gpt2_like, benchmark_of):
    from noise import Noise

    n_layers, n_neurons = gpt2_like.cfg.n_layers, gpt2_like.cfg.d_mlp
    ratios = (1 / ((n_layers - 1) * n_neurons), 4 / ((n_layers - 1) * n_neurons))
    results = benchmark_of(gpt2_like, per="model", ratios=ratios).run([Noise()])
    assert results.frame.groupby("ratio")["n_neurons"].unique().map(list).tolist() == [[1], [4]]
    assert results.frame["per"].eq("model").all()
    assert results.table().index.unique(0)[0].startswith("1 neuron of the model")


def test_del_keeps_shares_of_a_layer_and_of_the_model_apart(gpt2_like, benchmark_of, tmp_path):
    from noise import Noise

    from tl_localize.execution import Store

    benchmark_of(gpt2_like).run([Noise()], Store(tmp_path))
    with pytest.raises(ValueError, match="per: None in the folder, model now"):
        benchmark_of(gpt2_like, per="model").run([Noise()], Store(tmp_path))
    with pytest.raises(ValueError, match="per must be 'layer' where single layers are ablated"):
        benchmark_of(gpt2_like, per="model", layers="each")


def test_names_are_shuffled_by_the_seed(measured):
    values, groups = blocks(4, effect=0.3)
    found = [group_test(values, groups, n_shuffles=200, seed=seed) for seed in (0, 0, 1, 2)]
    assert found[0] == found[1] and len(set(found)) > 1
    _, results = measured
    again = [confusion_by_category(results, 200, seed)["p_value"] for seed in (0, 0, 1)]
    assert again[0].equals(again[1]) and not again[0].equals(again[2])


def test_confusion_by_category_tests_that_more_is_lost_within(measured):
    _, results = measured
    found = confusion_by_category(results, n_shuffles=99, seed=1).set_index(["method", "ratio"])
    p_values = found["p_value"].to_dict()
    groups = results.before["category"].tolist()
    for key, matrix in results.confusion.items():
        p = group_test(100 * matrix.to_numpy(), groups, 99, 1)
        assert p_values[key] == p != 0.5
