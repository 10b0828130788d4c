"""DEL: the numbers of ablating one set of neurons after the other, and of the authors' code."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from noise import Noise, letters

from tl_localize import (
    METHODS,
    Activations,
    AttentionHeads,
    IterativeAttribution,
    MemorizedSequence,
    NeuronScores,
    NeuronSet,
    RandomBaseline,
    SelectivePruning,
    Slimming,
    accuracy,
    levenshtein,
    load_model,
    perplexity,
    perplexity_base2,
)
from tl_localize.evals import DelBenchmark
from tl_localize.evals.deletion.results import METRICS
from tl_localize.execution import Store

RATIO = 0.2
TOLERANCE = 2e-4  # of a perplexity near 100 in float32


@pytest.fixture
def gpt2_like(normless):
    """What is measured is measured alike in any model; the two others here have norms."""
    return normless


def naive(benchmark, target, neurons):
    """One set ablated by itself, measured by the public functions."""
    model, sequences, text = benchmark.model, benchmark.test_sequences, benchmark.general_tokens

    def measured():
        return {
            "accuracy": accuracy(model, sequences),
            "levenshtein": levenshtein(model, sequences, letters),
            "perplexity": perplexity(model, text),
            "perplexity_base2": perplexity_base2(model, text),
        }

    before = measured()
    with neurons.dropped_out(model):
        change = {name: after - before[name] for name, after in measured().items()}
    others = [i for i in range(len(sequences)) if i != target]
    found = {f"delta_{name}": change[name] for name in ("perplexity", "perplexity_base2")}
    for name in ("accuracy", "levenshtein"):
        found[f"delta_self_{name}"] = float(change[name][target])
        found[f"delta_neg_{name}"] = float(change[name][others].mean())
    return found


@pytest.mark.parametrize("settings", [{}, {"first_layer": 0}])
def test_del_gives_the_numbers_of_ablating_one_set_after_the_other(
    any_model, benchmark_of, settings
):
    benchmark = benchmark_of(any_model, n_targets=2, **settings)
    frame = benchmark.run([Noise()]).frame
    assert len(frame) == 2 * 2 * 2
    some_effect = 0.0
    for i, target in enumerate(benchmark.test_sequences[:2]):
        for ratio in benchmark.ratios:
            neurons = Noise()(any_model, target).top_k(
                ratio, first_layer=benchmark.first_layer, rounding="floor"
            )
            row = frame[
                (frame.sequence_id == target.id)
                & (frame.method == "noise")
                & (frame.ratio == ratio)
            ].iloc[0]
            expected = naive(benchmark, i, neurons)
            assert row["n_neurons"] == len(neurons)
            assert dict(row[[*expected]]) == pytest.approx(expected, abs=TOLERANCE, rel=1e-4)
            some_effect += abs(expected["delta_self_accuracy"]) + abs(
                expected["delta_neg_levenshtein"]
            )
    assert some_effect > 0.5  # else the comparison would say nothing


def test_del_uses_map_where_there_is_one(gpt2_like, benchmark_of):
    benchmark = benchmark_of(gpt2_like, n_targets=3)
    method = Activations()

    def activations(model, sequence):
        return method(model, sequence)

    by_map, by_call = (benchmark.run([each]).frame for each in (method, activations))
    assert by_map["sequence_id"].nunique() == 3
    timeless = [frame.drop(columns="seconds") for frame in (by_map, by_call)]
    pd.testing.assert_frame_equal(*timeless)


def test_del_never_measures_a_dev_sequence(gpt2_like, benchmark_of):
    benchmark = benchmark_of(gpt2_like)
    frame = benchmark.run([Noise()]).frame
    without = replace(benchmark, sequences=benchmark.sequences[2:], n_dev=0).run([Noise()])
    assert set(frame["sequence_id"]) == {"s2", "s3", "s4", "s5", "s6"}
    pd.testing.assert_frame_equal(
        frame.drop(columns="seconds"), without.frame.drop(columns="seconds")
    )


def test_del_adds_random_once(gpt2_like, benchmark_of):
    benchmark = benchmark_of(gpt2_like, n_targets=1)
    for methods, names in (
        ([Noise()], ["noise", "random"]),
        ([RandomBaseline(seed=3), Noise()], ["random", "noise"]),
    ):
        assert list(benchmark.run(methods).frame["method"].unique()) == names


def test_del_leaves_the_model_as_it_was(any_model, benchmark_of, unchanged):
    benchmark = benchmark_of(any_model, ablation="mean")
    check = unchanged(any_model)
    benchmark.run([Noise()])
    check()


def test_del_leaves_no_hook_when_a_method_raises(gpt2_like, benchmark_of, unchanged):
    def broken(model, sequence):
        raise RuntimeError("broken")

    benchmark = benchmark_of(gpt2_like)
    check = unchanged(gpt2_like)
    with pytest.raises(RuntimeError, match="broken"):
        benchmark.run([broken])
    check()


def test_del_loses_only_the_target_whose_scores_are_not_finite(gpt2_like, benchmark_of, tmp_path):
    benchmark = replace(benchmark_of(gpt2_like), ratios=(0.2,))
    method = Slimming(steps=10, first_layer=1)
    bad = benchmark.test_sequences[1]
    attribute = Slimming.attribute_batch
    wanted = benchmark.run([method]).frame.set_index(["method", "sequence_id"])[
        "delta_self_accuracy"
    ]

    def with_one_lost(self, neurons, sequences, *rest):
        if bad in sequences:
            raise ValueError("loss must be finite, got nan")
        return attribute(self, neurons, sequences, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slimming, "attribute_batch", with_one_lost)
        results = benchmark.run([method], Store(tmp_path / "run"))
    lost = results.missing[["part", "method", "reason"]].to_numpy().tolist()
    assert lost == [[bad.id, "slimming", "ValueError: loss must be finite, got nan"]]
    found = results.frame.set_index(["method", "sequence_id"])["delta_self_accuracy"]
    pd.testing.assert_series_equal(
        found.sort_index(), wanted.drop(("slimming", bad.id)).sort_index()
    )


def test_del_measures_the_model_with_the_hooks_it_has(gpt2_like, benchmark_of):
    benchmark = benchmark_of(gpt2_like, first_layer=0)
    everything = NeuronSet(torch.ones(2, 48, dtype=torch.bool))
    with everything.dropped_out(gpt2_like):
        frame = benchmark.run([Noise()]).frame
        expected = accuracy(gpt2_like, benchmark.test_sequences)
    assert (frame[list(METRICS)] == 0).all().all()
    assert frame["self_accuracy_before"].iloc[0] == pytest.approx(float(expected[0]))


def test_single_layers_get_the_budget_of_all_layers(neox_like, benchmark_of):
    benchmark = benchmark_of(neox_like, ratios=(0.26,), n_targets=4)
    with pytest.raises(ValueError, match=r"count must select 1 to 56 neurons, got 140"):
        replace(benchmark, layers="each")
    study = replace(benchmark, layers="each", multiples=(1, 2)).run([Noise()])
    assert not len(study.frame)
    frame = study.single_layers.query("method == 'noise'")
    everywhere = frame[frame["layer"].isna()].drop(columns=["layer", "multiple", "seconds"])
    expected = benchmark.run([Noise()]).frame.query("method == 'noise'").drop(columns="seconds")
    pd.testing.assert_frame_equal(
        everywhere.reset_index(drop=True), expected.reset_index(drop=True), rtol=1e-4
    )
    assert (everywhere["n_neurons"] == 2 * 14).all()  # int(0.26 * 56) of each of two layers
    assert (frame[frame["multiple"] == 1]["n_neurons"] == 28).all()  # and not int(0.26 * 112)
    assert (frame[frame["multiple"] == 2]["n_neurons"] == 2 * 28).all()
    target = benchmark.test_sequences[3]
    mask = torch.zeros(3, 56, dtype=torch.bool)
    mask[2, Noise()(neox_like, target).values[2].topk(28).indices] = True
    row = frame.query("sequence_id == @target.id and layer == 2 and multiple == 1").iloc[0]
    expected = naive(benchmark, 3, NeuronSet(mask))
    assert dict(row[[*expected]]) == pytest.approx(expected, abs=TOLERANCE, rel=1e-4)


@pytest.mark.parametrize("name", ["hard_concrete", "slimming"])
def test_single_layers_refuse_masks_of_all_layers(gpt2_like, benchmark_of, name):
    each = benchmark_of(gpt2_like, ratios=(0.1,), layers="each", multiples=(1,))
    with pytest.raises(ValueError, match=r"method must score each layer by itself"):
        each.run([METHODS[name](first_layer=1)])


def test_single_layers_at_two_ratios_share_a_folder(gpt2_like, benchmark_of, tmp_path):
    for ratio in (0.1, 0.2):
        how = {"ratios": (ratio,), "layers": "each", "multiples": (1,), "n_targets": 2}
        study = benchmark_of(gpt2_like, **how)
        results = study.run([Activations()], Store(tmp_path))
    assert set(results.single_layers["ratio"]) == {0.1, 0.2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratios": (0.001,)}, "ratio must select 1 to 48 neurons, got 0.001.*0.021"),
        ({"ratios": ()}, "ratios must be fractions that differ"),
        ({"ratios": (0.1, 0.1)}, "ratios must be fractions that differ"),
        ({"ratios": (1 / 3, 0.333333)}, "ratios must be fractions that differ in six digits"),
        ({"ratios": 0.1}, r"ratios must be several numbers, got 0.1. Write a tuple"),
        ({"multiples": 2}, "multiples must be several numbers, got 2"),
        ({"multiples": ()}, "multiples must be different counts"),
        ({"multiples": (1, 1)}, "multiples must be different counts"),
        ({"n_dev": 7}, "n_dev must leave at least one of the 7 sequences for the test, got 7"),
        ({"ablation": "noise"}, "ablation must be one of"),
        ({"general_tokens": torch.full((2, 5), 61)}, r"\[0, 61\), got 61 in general_tokens"),
        ({"general_tokens": torch.zeros(2, 40).long()}, r"n_ctx=32 positions, got shape \(2, 40\)"),
        ({"general_tokens": torch.zeros(0, 5).long()}, "general_tokens must be token ids"),
        ({"general_tokens": torch.tensor([1, 2, 3])}, "general_tokens must be token ids"),
        ({"general_tokens": "some text"}, "general_tokens must be a tensor of token ids"),
        ({"sequences": []}, "sequences must hold at least one sequence"),
        ({"units": "heads"}, "units must be Units"),
        (
            {"first_layer": 2},
            "first_layer must be below 2, the number of the model",
        ),
    ],
)
def test_del_refuses_what_it_cannot_run(gpt2_like, benchmark_of, settings, message):
    benchmark = benchmark_of(gpt2_like)
    with pytest.raises((ValueError, TypeError), match=message):
        replace(benchmark, **settings)


def test_heads_of_a_model_without_neurons(make_model, benchmark_of):
    model = make_model(1, attn_only=True)
    benchmark = benchmark_of(model, units=AttentionHeads(), ratios=(0.5,))
    results = benchmark.run([Activations(units=AttentionHeads())])
    assert set(results.frame["n_neurons"]) == {1}


def test_without_a_tokenizer_distances_are_in_tokens(gpt2_like, benchmark_of):
    benchmark = benchmark_of(gpt2_like)
    of_tokens = replace(benchmark, decode=None).run([Activations()])
    each = replace(benchmark, decode=lambda ids: "".join(chr(200 + i) for i in ids))
    of_letters = each.run([Activations()])  # a letter for each token
    for name in ("frame", "before"):
        found, expected = getattr(of_tokens, name), getattr(of_letters, name)
        numbers = expected.select_dtypes("number").columns.difference(["seconds"])
        assert len(numbers) > 3
        pd.testing.assert_frame_equal(found[numbers], expected[numbers])
    first = of_tokens.before.iloc[0]
    assert first["prefix"] + first["suffix"] == benchmark.test_sequences[0].tokens.tolist()
    for results, unit in ((of_tokens, "tokens"), (of_letters, "characters")):
        titles = [*results.table().columns, *results.before_table().columns]
        assert [t for t in titles if "Dist" in t or "Len" in t] == [
            *(f"Δ {who}-Dist ({unit})" for who in ("Self", "Neg")),
            *(f"{what} ({unit})" for what in ("Dist", "Len")),
        ]


def test_del_refuses_ids_that_occur_twice(gpt2_like, benchmark_of):
    benchmark = benchmark_of(gpt2_like)
    with pytest.raises(ValueError, match=r"different ids, got \['s6'\] more than once"):
        replace(benchmark, sequences=[*benchmark.sequences, benchmark.sequences[-1]])
    unnamed = replace(
        benchmark, sequences=[replace(sequence, id="") for sequence in benchmark.sequences]
    )
    assert unnamed.test_sequences[0].id == "sequence-2"


def test_del_refuses_methods_that_give_something_else(gpt2_like, benchmark_of):
    benchmark = benchmark_of(gpt2_like)
    with pytest.raises(TypeError, match="methods must return NeuronScores, got Tensor"):
        benchmark.run([lambda model, sequence: torch.zeros(2, 48)])
    with pytest.raises(ValueError, match=r"got \(MLPNeurons\(\), 2, 47\)"):
        benchmark.run([lambda model, sequence: NeuronScores(torch.zeros(2, 47))])
    with pytest.raises(ValueError, match="first_layer of 'slimming' must be 1"):
        benchmark.run([Slimming()])


def test_del_without_a_spared_layer_takes_methods_that_leave_theirs_open(gpt2_like, benchmark_of):
    benchmark = replace(benchmark_of(gpt2_like, n_targets=1), first_layer=0, ratios=(0.5,))
    left_open, given = (
        benchmark.run([IterativeAttribution(rounds=2, share=0.5, first_layer=first_layer)]).frame
        for first_layer in (None, 0)
    )
    pd.testing.assert_frame_equal(left_open.drop(columns="seconds"), given.drop(columns="seconds"))


GOLDEN = {
    "act": "act_t0",
    "ig": "ig_t0",
    "zero": "zero_t0",
    "slim": "slim_t0",
    **{f"hc_s{seed}": "hc_t0" for seed in range(5)},
}


class Given:
    """A method that gives the scores it was made with."""

    def __init__(self, name, values):
        self.name = name
        self.scores = NeuronScores(torch.tensor(values, dtype=torch.float32))

    def __call__(self, model, sequence):
        return self.scores


def chosen_by_the_authors(name, value, ids, ratio):
    """A method that names the neurons of the authors' code, which are those of our ``top_k``."""
    theirs = np.zeros((4, 256))
    count = int(256 * ratio)
    np.put_along_axis(theirs[1:], ids, 1, axis=1)
    chosen = NeuronScores(torch.tensor(value)).top_k(ratio, first_layer=1, rounding="floor")
    ranked = np.sort(value, axis=1)
    # which of equal scores comes first is anybody's choice
    tied = (ranked[:, -count] == ranked[:, -count - 1])[:, None]
    ours = chosen.mask.numpy()
    assert np.array_equal(ours[1:] | tied[1:], theirs[1:].astype(bool) | tied[1:]), name
    assert name == "slim" or not tied[1:].any()
    return Given(f"golden_{name}", theirs)


@pytest.fixture(scope="module")
def golden_model(golden):
    return load_model(golden, device="cpu")


@pytest.mark.parametrize("ratio", [0.01, 0.2])
def test_del_agrees_with_the_authors_code(golden, golden_model, golden_settings, ratio):
    """The ablated neurons, all accuracies and distances, the perplexity, of ten attributions."""
    reference, scores, expected = (
        dict(np.load(golden / f"{name}.npz")) for name in ("reference", "suffix", "del_eval")
    )
    first, second = golden_settings["tokenizer"]["first"], golden_settings["tokenizer"]["second"]
    values = {
        name: scores[key][int(name[-1])] if name.startswith("hc") else scores[key]
        for name, key in GOLDEN.items()
    }
    values["random"] = expected["random_attribution"]
    methods = [
        chosen_by_the_authors(name, value, expected[f"{name}_r{ratio}_ids"], ratio)
        for name, value in values.items()
    ]
    results = DelBenchmark(
        golden_model,
        [MemorizedSequence(torch.tensor(tokens), 16) for tokens in reference["memorized"]],
        torch.tensor(reference["ppl_batch"]),
        ratios=(ratio,),
        n_dev=0,
        n_targets=1,
        decode=lambda ids: "".join(first[i // 16] + second[i % 16] for i in ids),
    ).run(methods)
    before = results.before
    record = golden_settings["del_eval"]
    assert np.array_equal(before["accuracy"], expected["acc_before"])
    assert np.array_equal(before["levenshtein"], expected["dist_before"])
    assert before["perplexity_base2"][0] == pytest.approx(record["ppl_before"], abs=1e-4)
    for name in values:
        key = (f"golden_{name}", ratio)
        accuracies = before["accuracy"] + results.confusion[key].iloc[0].to_numpy()
        assert np.array_equal(accuracies, expected[f"{name}_r{ratio}_acc_after"]), name
        row = results.frame[results.frame.method == key[0]].iloc[0]
        theirs = record[name][str(ratio)]
        distance = before["levenshtein"][0] + row["delta_self_levenshtein"]
        assert distance == expected[f"{name}_r{ratio}_dist_after"][0], name
        assert row["perplexity_base2_before"] + row["delta_perplexity_base2"] == pytest.approx(
            theirs["ppl_after"], abs=1e-4
        ), name
        assert row["delta_neg_accuracy"] == pytest.approx(theirs["d_acc_others_mean"], abs=1e-9)
        assert row["delta_neg_levenshtein"] == pytest.approx(theirs["d_dist_others_mean"], abs=1e-9)
        assert row["n_neurons"] == 3 * theirs["n_zeroed_per_layer"]


def test_a_method_is_not_measured_by_texts_that_it_was_given(gpt2_like, benchmark_of):
    benchmark = benchmark_of(gpt2_like)
    *_, dev, test = [tuple(each.tokens.tolist()) for each in benchmark.sequences[:3]]
    assert benchmark.label([SelectivePruning(texts=(dev,))])
    with pytest.raises(
        ValueError, match=r"texts of 'selective_pruning' must share no .* texts\[1\]"
    ):
        benchmark.run([SelectivePruning(texts=(dev, (1, *test)))])


def test_a_text_and_its_copy_are_refused(gpt2_like, sequences):
    text = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    copied = replace(sequences[0], id="copy")
    with pytest.raises(ValueError, match=r"sequences must be different texts, got .* in 'copy'"):
        DelBenchmark(gpt2_like, [*sequences, copied], text, ratios=(0.1,), n_dev=0)


def test_a_method_is_not_given_a_text_that_is_measured_though_it_is_no_target(
    gpt2_like, benchmark_of
):
    benchmark = benchmark_of(gpt2_like, n_targets=1)
    negative = tuple(benchmark.test_sequences[-1].tokens.tolist())
    with pytest.raises(ValueError, match="texts of 'selective_pruning' must share no 13 tokens"):
        benchmark.run([SelectivePruning(texts=((1, 2, 3), negative))])


def test_distances_are_of_suffixes_as_they_stand_after_their_prefix(gpt2_like, benchmark_of):
    """A decoder may read a token by what stands before it."""

    def in_pairs(ids):
        return "".join(chr(97 + a * b % 61) for a, b in pairwise([0, *ids]))

    benchmark = benchmark_of(gpt2_like, decode=in_pairs, n_targets=1)
    results = benchmark.run([Noise()])
    wanted = levenshtein(gpt2_like, benchmark.test_sequences, in_pairs)
    assert results.before["levenshtein"].tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ablation": "mean"}, "ablation: zero in the folder, mean now"),
        ({"first_layer": 0}, "first_layer: 1 in the folder, 0 now"),
        ({"seed": 1}, "seed: 0 in the folder, 1 now"),
    ],
)
def test_a_folder_of_del_refuses_what_changes_its_numbers(
    gpt2_like, benchmark_of, tmp_path, settings, said
):
    benchmark_of(gpt2_like, n_targets=1).run([Noise()], Store(tmp_path))
    with pytest.raises(ValueError, match=said):
        benchmark_of(gpt2_like, n_targets=1, **settings).run([Noise()], Store(tmp_path))


def test_single_layers_of_other_multiples_have_a_folder_of_their_own(
    gpt2_like, benchmark_of, tmp_path
):
    single = benchmark_of(gpt2_like, ratios=(0.1,), layers="each", multiples=(1,), n_targets=1)
    single.run([Noise()], Store(tmp_path))
    with pytest.raises(ValueError, match=r"multiples: \[1\] in the folder, \[1, 2\] now"):
        replace(single, multiples=(1, 2)).run([Noise()], Store(tmp_path))
