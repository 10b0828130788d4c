"""INJ on tiny random models, with answers known by construction."""

from dataclasses import replace
from functools import reduce
from operator import or_

import pandas as pd
import pytest
import torch

from tl_localize import (
    Activations,
    IterativeAttribution,
    MemorizedSequence,
    NeuronScores,
    RandomBaseline,
    inject_together,
)


def change_of(model):
    """A method that knows the weights from before: how much a row has changed since."""
    before = [block.mlp.W_out.detach().clone() for block in model.blocks]

    def change(model, sequence):
        pairs = zip(model.blocks, before, strict=True)
        changes = [(block.mlp.W_out - old).norm(dim=-1) for block, old in pairs]
        return NeuronScores(torch.stack(changes).detach(), "change", sequence.id)

    return change


def test_perfect_method_has_full_recall_across_layers(benchmark):
    frame = benchmark.run([change_of(benchmark.model)]).frame
    assert (frame[frame["method"] == "change"]["recall_across_layers"] == 1).all()


def test_altered_rows_are_the_targets_and_the_distractors(together):
    """Who knows which rows were altered, and nothing else, finds those of all sentences alike."""
    change = change_of(together.model)

    def altered(model, sequence):
        return NeuronScores((change(model, sequence).values > 0).float())

    frame = replace(together, max_steps=5).run([altered]).frame
    widest = frame.query("method == 'altered' and multiple == 5")
    columns = ["recall_across_layers", "foreign_recall_across_layers"]
    assert (widest[columns] == 1).all(axis=None)


def test_frame_has_one_row_per_sequence_method_and_ratio(inj_results):
    frame = inj_results.frame
    assert len(frame) == 4 * 3 * 3
    assert not frame.duplicated(["sequence_id", "method", "ratio"]).any()
    assert set(frame["method"]) == {"activations", "random", "row_norm"}


def test_random_recalls_its_share(benchmark):
    twice = [replace(each, id=f"{each.id}-{i}") for i in range(2) for each in benchmark.sequences]
    many = replace(benchmark, sequences=twice, max_steps=1)
    frame = many.run([RandomBaseline(seed=seed) for seed in range(15)]).frame
    random = frame[frame["method"].str.startswith("Random")]
    for multiple, group in random.groupby("multiple"):
        assert group["recall"].mean() == pytest.approx(0.2 * multiple, abs=0.03)


def test_weights_are_bit_equal_afterwards(benchmark, together, unchanged):
    def broken(model, sequence):
        raise RuntimeError("broken method")

    check = unchanged(benchmark.model)
    brief, brief_together = (replace(inj, max_steps=3) for inj in (benchmark, together))
    brief.run([Activations()])
    for inj in (brief, brief_together):
        with pytest.raises(RuntimeError, match="broken method"):
            inj.run([broken])
    check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": []}, "sequences must hold"),
        (
            {"sequences": 2 * [MemorizedSequence([5, 6, 7], 1, "s0")]},
            r"different ids, got \['s0'\] more",
        ),
        ({"distractors": 4, "ratio": 0.05}, "distractors must leave at least one group of 5"),
    ],
)
def test_inj_benchmark_rejects(benchmark, change, message):
    with pytest.raises(ValueError, match=message):
        replace(benchmark, **change)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (Activations(), "methods must be a list"),
        ("activations", "methods must be a list"),
        ([Activations], "methods must be a list of objects"),
        (["activations"], "methods must be a list of objects"),
        ([Activations(), Activations()], "methods must differ"),
    ],
)
def test_run_rejects(benchmark, methods, message):
    with pytest.raises((TypeError, ValueError), match=message):
        benchmark.run(methods)


def test_groups_are_drawn_by_the_seed_and_disjoint(together):
    def members(seed):
        groups = [group.sequences for group in replace(together, seed=seed).groups()]
        assert all(group[0].tokens[0] != group[1].tokens[0] for group in groups)
        return [[sequence.fingerprint for sequence in group] for group in groups]

    every = [member for group in members(0) for member in group]
    assert len(every) == len(set(every))
    assert members(0) == members(0)
    assert any(members(seed) != members(0) for seed in range(1, 5))
    first, second = together.sequences[:2]
    same = [*(replace(first, id=name) for name in "abc"), second]
    assert len(replace(together, sequences=same).groups()) == 1


def test_methods_that_leave_their_first_layer_open_choose_in_all_layers(benchmark):
    benchmark = replace(benchmark, max_steps=2)
    left_open = benchmark.run([IterativeAttribution(rounds=2)]).frame
    given = benchmark.run([IterativeAttribution(rounds=2, first_layer=0)]).frame
    pd.testing.assert_frame_equal(left_open.drop(columns="seconds"), given.drop(columns="seconds"))
    with pytest.raises(ValueError, match="first_layer of 'iterative_attribution' must be 0"):
        benchmark.run([IterativeAttribution(first_layer=1)])


def test_a_function_with_the_name_of_a_control_is_refused(benchmark):
    def random(model, sequence):
        raise AssertionError("never called")

    with pytest.raises(ValueError, match="methods must not have the name of a control"):
        benchmark.run([random])


def test_groups_are_injected_with_seeds_in_a_row(together):
    seeds = [group.seed for group in replace(together, seed=5).groups()]
    assert seeds == list(range(5, 5 + len(seeds))) and len(seeds) > 1


def test_rows_of_a_group_are_those_of_its_injection(together):
    """Recall of each sentence's own rows and of the others', and what its injection says."""
    frame = together.run([Activations()]).frame.query("method == 'activations' and multiple == 2")
    how = {**together.training, "ratio": together.ratio}
    for group in together.groups():
        joint = inject_together(together.model, group.sequences, seed=group.seed, **how)
        with joint.applied(together.model):
            scores = [Activations()(together.model, sequence) for sequence in group.sequences]
        for own, found, sequence in zip(joint.injections, scores, group.sequences, strict=True):
            is_own = (frame["group"] == group.name) & (frame["sequence_id"] == sequence.id)
            (row,) = frame[is_own].to_dict("records")
            others = reduce(or_, [each.neurons for each in joint.injections if each is not own])
            for name, per in (("", "layer"), ("_across_layers", "model")):
                top = found.top_k(2 * together.ratio, per=per)
                assert row[f"recall{name}"] == top.recall_of(own.neurons)
                assert row[f"foreign_recall{name}"] == top.recall_of(others)
            assert (row["converged"], row["loss"]) == (own.converged, float(own.losses[-1]))


@pytest.mark.parametrize(("ratio", "expected"), [(0.02, (0.01, 200)), (0.021, (0.003, 400))])
def test_training_follows_the_ratio(benchmark, ratio, expected):
    open_ones = replace(benchmark, ratio=ratio, learning_rate=None, max_steps=None)
    training = open_ones.training
    assert (training["learning_rate"], training["max_steps"]) == expected


def test_a_method_is_not_given_a_sentence_of_the_group(together, benchmark):
    from tl_localize import SelectivePruning

    def given(sentences):
        texts = tuple(tuple(sentence.tokens.tolist()) for sentence in sentences)
        return SelectivePruning(texts=texts)

    assert benchmark.label([given(benchmark.sequences)])  # each is alone in its model
    with pytest.raises(ValueError, match="texts of 'selective_pruning' must share no 13 tokens"):
        together.label([given(together.sequences)])
