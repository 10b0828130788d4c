"""INJ on tiny random models, with answers known by construction."""

from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class WeightChange:
    """Knows the weights from before: the perfect method."""

    before: list
    name: str = "weight_change"

    def __call__(self, model, sequence):
        from tl_localize import NeuronScores

        changes = [
            (block.mlp.W_out - old).norm(dim=-1)
            for block, old in zip(model.blocks, self.before, strict=True)
        ]
        return NeuronScores(torch.stack(changes).detach(), self.name, sequence.id)


def test_inj_benchmark_gives_a_perfect_method_full_recall_across_layers(benchmark, gpt2_like):
    oracle = WeightChange([block.mlp.W_out.detach().clone() for block in gpt2_like.blocks])
    frame = benchmark.run([oracle]).frame
    mine = frame[frame["method"] == "weight_change"]
    assert (mine["recall_across_layers"] == 1).all()


def test_inj_benchmark_has_one_row_per_sequence_method_and_ratio(benchmark):
    from tl_localize import Activations

    frame = benchmark.run([Activations()]).frame
    assert len(frame) == 3 * 3 * 3
    assert not frame.duplicated(["sequence_id", "method", "ratio"]).any()
    assert set(frame["method"]) == {"activations", "random", "row_norm"}


def test_inj_benchmark_random_recalls_its_share(gpt2_like, sentences):
    from tl_localize import RandomBaseline
    from tl_localize.evals.inj_benchmark import InjBenchmark

    many = InjBenchmark(model=gpt2_like, sequences=sentences * 3, ratio=0.2, max_steps=1)
    methods = [RandomBaseline(seed=seed) for seed in range(10)]
    frame = many.run(methods).frame
    random = frame[frame["method"].str.startswith("Random")]
    for multiple, group in random.groupby("multiple"):
        assert group["recall"].mean() == pytest.approx(0.2 * multiple, abs=0.03)


def test_inj_benchmark_leaves_the_weights_bit_equal(benchmark, together, gpt2_like, unchanged):
    from tl_localize import Activations

    def broken(model, sequence):
        raise RuntimeError("broken method")

    check = unchanged(gpt2_like)
    benchmark.run([Activations()])
    together.run([Activations()])
    with pytest.raises(RuntimeError, match="broken method"):
        benchmark.run([broken])
    check()


def test_inj_benchmark_repeats_bit_by_bit(benchmark):
    from tl_localize import HardConcrete

    first, second = (
        benchmark.run([HardConcrete(steps=3)]).frame.drop(columns="seconds") for _ in range(2)
    )
    assert first.equals(second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 1.5}, r"ratio must be a fraction in \(0, 1\], got 1.5"),
        ({"sequences": []}, "sequences must hold at least one sequence"),
        ({"multiples": (1, 10)}, "multiples of ratio must be a fraction"),
        ({"distractors": -1}, "distractors must be a whole number from 0 on, got -1"),
        ({"distractors": 3, "ratio": 0.05}, "distractors must leave at least one group of 4"),
        (
            {"ratio": 0.0105, "multiples": (0.5,)},
            "ratio must select at least one of 48 neurons, got 0.00525",
        ),
    ],
)
def test_inj_benchmark_rejects(benchmark, change, message):
    from dataclasses import replace

    with pytest.raises(ValueError, match=message):
        replace(benchmark, **change)


def test_inj_benchmark_rejects_no_method(benchmark):
    with pytest.raises(ValueError, match="methods must hold at least one method"):
        benchmark.run([])


def test_inj_benchmark_rejects_what_is_not_a_list_of_methods(benchmark, unchecked):
    from tl_localize import Activations

    for wrong in (Activations(), "activations"):
        with pytest.raises(TypeError, match="methods must be a list of methods"):
            benchmark.run(wrong)
    for wrong in (Activations, "activations"):
        with pytest.raises(TypeError, match="methods must hold objects that score"):
            benchmark.run([wrong])


def test_inj_benchmark_rejects_the_same_method_twice(benchmark):
    from tl_localize import Activations

    with pytest.raises(ValueError, match="methods must differ"):
        benchmark.run([Activations(), Activations()])


def test_groups_are_disjoint_and_begin_with_different_tokens(together):
    groups = [group.sequences for group in together.groups]
    members = [sequence.fingerprint for group in groups for sequence in group]
    assert len(members) == len(set(members))
    assert all(
        len({int(sequence.tokens[0]) for sequence in group}) == len(group) == 2 for group in groups
    )


def test_groups_depend_on_the_seed_only(together):
    from dataclasses import replace

    def members(seed):
        return [
            [sequence.fingerprint for sequence in group.sequences]
            for group in replace(together, seed=seed).groups
        ]

    assert members(0) == members(0)
    assert any(members(seed) != members(0) for seed in range(1, 5))


def test_groups_leave_out_what_no_group_can_take(together):
    from dataclasses import replace

    same = [together.sequences[0]] * 3 + [together.sequences[1]]
    assert len(replace(together, sequences=same).groups) == 1


def test_distractors_give_the_true_rows_one_and_zero(together):
    from tl_localize import Activations

    frame = together.run([Activations()]).frame
    best = frame[frame["method"] == "true_rows"]
    assert (best["recall"] == 1).all()
    assert (best["foreign_recall"] == 0).all()


def test_distractors_foreign_recall_of_everything_altered_is_full(together):
    """A method that knows which rows were altered, and nothing else, finds own and foreign rows
    alike.
    """
    from tl_localize.scores import NeuronScores

    before = [block.mlp.W_out.detach().clone() for block in together.model.blocks]

    def altered(model, sequence):
        changes = [
            (b.mlp.W_out - old).norm(dim=-1).gt(0).float()
            for b, old in zip(model.blocks, before, strict=True)
        ]
        return NeuronScores(torch.stack(changes).detach(), "altered", sequence.id)

    frame = together.run([altered]).frame
    widest = frame[(frame["method"] == "altered") & (frame["multiple"] == 5)]
    assert (widest["recall_across_layers"] == 1).all()
    assert (widest["foreign_recall_across_layers"] == 1).all()


def test_distractors_assignment_holds_every_pair_of_a_group(together):
    from tl_localize import Activations

    results = together.run([Activations()])
    mine = results.assignment[results.assignment["method"] == "activations"]
    assert len(mine) == len(together.groups) * 2 * 2
    own = mine[mine["localized"] == mine["whose"]].set_index(["group", "localized"])["recall"]
    frame = results.frame[
        (results.frame["method"] == "activations") & (results.frame["multiple"] == 1)
    ]
    assert (frame.set_index(["group", "sequence_id"])["recall"] == own).all()


def test_ground_truth_reads_every_state_of_the_model(together):
    """Against the states made by hand, in weights: rows of the base model or zeros where a set is
    off.
    """
    import pandas as pd

    from tl_localize import accuracy, inject_together, memorization_loss
    from tl_localize.evals.inj_benchmark import ground_truth

    group, model = together.groups[0], together.model
    joint = inject_together(
        model, group.sequences, ratio=0.1, seed=0, learning_rate=0.02, max_steps=40
    )
    truth = pd.DataFrame(ground_truth(model, joint, group.sequences))
    before = [block.mlp.W_out.detach().clone() for block in model.blocks]
    with joint.applied(model):
        trained = [block.mlp.W_out.detach().clone() for block in model.blocks]
    zeros = [torch.zeros_like(rows) for rows in before]
    masks = [injection.neurons.mask for injection in joint.injections]
    columns = {"all_on": lambda k: (), "own_alone": lambda k: (1 - k,), "own_off": lambda k: (k,)}
    # there is one other
    columns["other_off"] = columns["own_alone"]
    for name, (state, off) in ((n, c) for n in ("", "_zeroed") for c in columns.items()):
        for k, sequence in enumerate(group.sequences):
            with torch.no_grad():
                for layer, block in enumerate(model.blocks):
                    block.mlp.W_out.copy_(trained[layer])
                    for j in off(k):
                        block.mlp.W_out[masks[j][layer]] = (zeros if name else before)[layer][
                            masks[j][layer]
                        ]
            loss = float(memorization_loss(model, [sequence]).detach())
            assert truth.loc[k, f"{state}{name}_loss"] == pytest.approx(loss, rel=1e-4)
            assert truth.loc[k, f"{state}{name}"] == float(accuracy(model, [sequence]))
    assert truth.loc[0, "own_off_loss"] > truth.loc[0, "all_on_loss"]
