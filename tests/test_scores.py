"""Top-k, recall, ablation, and scores on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_localize import AttentionHeads, NeuronScores, NeuronSet
from tl_localize.scores import rounded_down

SCORES = NeuronScores(torch.tensor([[0.1, 0.9, 0.5, 0.3], [4.0, 1.0, 3.0, 2.0]]), "toy", "s0")
TABLES = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(-3, 3), min_size=n, max_size=n), min_size=1, max_size=4)
)  # few values, so that there are ties
MASKS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.tuples(*[st.tuples(*[st.booleans()] * n)] * 2), min_size=1, max_size=4)
)


def chosen(neurons: NeuronSet) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in neurons.mask]


def scores_of(table: list[list[int]]) -> NeuronScores:
    return NeuronScores(torch.tensor(table, dtype=torch.float32))


# ---- top_k


def test_top_k_per_layer() -> None:
    assert chosen(SCORES.top_k(0.5)) == [[1, 2], [0, 2]]


def test_top_k_per_model() -> None:
    assert chosen(SCORES.top_k(0.5, per="model")) == [[], [0, 1, 2, 3]]


def test_top_k_first_layer_is_left_out_per_layer() -> None:
    assert chosen(SCORES.top_k(0.25, first_layer=1)) == [[], [0]]


def test_top_k_first_layer_is_left_out_of_the_count_per_model() -> None:
    assert chosen(SCORES.top_k(0.5, per="model", first_layer=1)) == [[], [0, 2]]


def test_top_k_takes_everything_at_one() -> None:
    assert SCORES.top_k(1).mask.all()


def test_top_k_ties_go_to_the_lower_index() -> None:
    assert chosen(NeuronScores(torch.zeros(2, 6)).top_k(0.5)) == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("n", "ratio", "rounding", "count"),
    [
        (256, 0.01, "nearest", 3),
        (256, 0.01, "floor", 2),
        (256, 0.05, "nearest", 13),
        (256, 0.05, "floor", 12),
        (3072, 0.005, "nearest", 15),
        (200, 0.07, "floor", 14),  # 200 * 0.07 is 14.000000000000002
        (100, 0.29, "nearest", 29),  # 100 * 0.29 is 28.999999999999996
    ],
)
def test_top_k_counts(n: int, ratio: float, rounding: Any, count: int) -> None:
    assert len(NeuronScores(torch.rand(1, n)).top_k(ratio, rounding=rounding)) == count


def test_top_k_per_model_rounds_down() -> None:
    assert len(NeuronScores(torch.rand(4, 256)).top_k(0.0299, per="model")) == 30


@given(TABLES, st.floats(0.2, 1))
def test_top_k_chosen_are_not_below_the_others(table: list[list[int]], ratio: float) -> None:
    scores = scores_of(table)
    if round(len(table[0]) * ratio) == 0:
        return
    mask = scores.top_k(ratio).mask
    for values, row in zip(scores.values, mask, strict=True):
        if not row.all():
            assert values[row].min() >= values[~row].max()


@given(
    TABLES,
    st.floats(0.01, 1),
    st.sampled_from(["layer", "model"]),
    st.sampled_from(["nearest", "floor"]),
)
def test_top_k_selects_the_count_or_says_why_not(
    table: list[list[int]], ratio: float, per: Any, rounding: Any
) -> None:
    scores = scores_of(table)
    n = len(table[0]) if per == "layer" else len(table) * len(table[0])
    count = round(n * ratio) if (per, rounding) == ("layer", "nearest") else rounded_down(ratio, n)
    if count:
        assert len(scores.top_k(ratio, per=per, rounding=rounding)) == count * (
            len(table) if per == "layer" else 1
        )
    else:
        with pytest.raises(ValueError, match="ratio must select at least one of"):
            scores.top_k(ratio, per=per, rounding=rounding)


@given(TABLES, st.floats(0.2, 1), st.floats(0.2, 1))
def test_top_k_of_a_smaller_ratio_is_a_subset(
    table: list[list[int]], one: float, other: float
) -> None:
    scores, n = scores_of(table), len(table[0])
    small, large = sorted((one, other))
    if round(n * small):
        assert not (scores.top_k(small).mask & ~scores.top_k(large).mask).any()


@given(TABLES, st.floats(0.2, 1))
def test_top_k_does_not_change_under_a_rising_function(
    table: list[list[int]], ratio: float
) -> None:
    if round(len(table[0]) * ratio):
        scores = scores_of(table)
        assert torch.equal(
            scores.top_k(ratio).mask, NeuronScores(scores.values.exp() * 2 + 1).top_k(ratio).mask
        )


# ---- recall


def test_recall_by_hand() -> None:
    truth = NeuronSet(torch.tensor([[True, True, False, False], [True, False, False, True]]))
    assert SCORES.top_k(0.5).recall_of(truth) == 0.5


@given(MASKS)
def test_recall_counts_the_true_neurons_found(masks: list[Any]) -> None:
    found, truth = (NeuronSet(torch.tensor([row[i] for row in masks])) for i in (0, 1))
    if len(truth):
        wanted = sum(f and t for row in masks for f, t in zip(*row, strict=True)) / sum(
            t for row in masks for t in row[1]
        )
        assert found.recall_of(truth) == pytest.approx(wanted)


@given(MASKS)
def test_recall_of_itself_is_one(masks: list[Any]) -> None:
    neurons = NeuronSet(torch.tensor([row[0] for row in masks]))
    if len(neurons):
        assert neurons.recall_of(neurons) == 1


@given(MASKS)
def test_recall_of_all_neurons_is_one(masks: list[Any]) -> None:
    truth = NeuronSet(torch.tensor([row[0] for row in masks]))
    if len(truth):
        assert NeuronSet(torch.ones_like(truth.mask)).recall_of(truth) == 1


# ---- plain data


def test_scores_do_not_change_with_the_callers_tensor() -> None:
    values = torch.zeros(2, 3)
    scores = NeuronScores(values)
    values[0, 0] = 7
    assert not scores.values.any()


def test_scores_do_not_keep_their_batch_alive() -> None:
    assert NeuronScores(torch.zeros(8, 2, 3)[5]).values.untyped_storage().nbytes() == 2 * 3 * 4


def test_neurons_do_not_change_with_the_callers_tensor() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    neurons = NeuronSet(mask)
    mask[0, 0] = True
    assert len(neurons) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_scores_are_float32(dtype: torch.dtype) -> None:
    assert NeuronScores(torch.ones(1, 2, dtype=dtype)).values.dtype == torch.float32


def test_scores_leave_autograd() -> None:
    assert not NeuronScores(torch.ones(1, 2, requires_grad=True)).values.requires_grad


def test_scores_come_back_from_disk(tmp_path: Path) -> None:
    scores = NeuronScores(torch.rand(2, 3), "zero_out", "sequence 7 ü", "ZeroOut()")
    scores.save(tmp_path / "s.safetensors")
    loaded = NeuronScores.load(tmp_path / "s.safetensors")
    assert torch.equal(loaded.values, scores.values)
    assert (loaded.method, loaded.sequence_id, loaded.settings) == (
        scores.method,
        scores.sequence_id,
        scores.settings,
    )


# ---- ablation


@pytest.fixture
def neurons(any_model: Any) -> NeuronSet:
    generator = torch.Generator().manual_seed(11)
    return NeuronSet(
        torch.rand(any_model.cfg.n_layers, any_model.cfg.d_mlp, generator=generator) < 0.3
    )


@torch.no_grad()
def test_dropped_out_equals_removing_the_rows(
    any_model: Any, neurons: NeuronSet, sequence: Any
) -> None:
    with neurons.dropped_out(any_model):
        ablated = any_model(sequence.tokens)
    for layer, mask in enumerate(neurons.mask):
        any_model.blocks[layer].mlp.W_out[mask] = 0
    torch.testing.assert_close(ablated, any_model(sequence.tokens))


@torch.no_grad()
def test_dropout_hooks_equal_dropped_out(any_model: Any, neurons: NeuronSet, sequence: Any) -> None:
    with neurons.dropped_out(any_model):
        wanted = any_model(sequence.tokens)
    assert torch.equal(
        any_model.run_with_hooks(sequence.tokens, fwd_hooks=neurons.dropout_hooks()), wanted
    )


def test_dropout_hooks_spare_layers_without_neurons() -> None:
    assert len(NeuronSet(torch.tensor([[False, False], [True, False]])).dropout_hooks()) == 1


def test_dropped_out_leaves_nothing_behind(
    any_model: Any, neurons: NeuronSet, sequence: Any, unchanged: Any
) -> None:
    check = unchanged(any_model)
    with torch.no_grad(), neurons.dropped_out(any_model):
        any_model(sequence.tokens)
    check()


def test_dropped_out_leaves_nothing_behind_when_the_body_raises(
    any_model: Any, neurons: NeuronSet, unchanged: Any
) -> None:
    check = unchanged(any_model)
    with pytest.raises(ZeroDivisionError), neurons.dropped_out(any_model):
        _ = 1 / 0
    check()


def test_scores_of_which_some_are_estimates_survive_the_disk(tmp_path: Path) -> None:
    mask = torch.tensor([[True, False], [False, True]])
    scores = NeuronScores(torch.rand(2, 2), "zero_out", exact=NeuronSet(mask), missed=0.0123)
    scores.save(tmp_path / "some.safetensors")
    found = NeuronScores.load(tmp_path / "some.safetensors")
    assert (
        found.exact is not None and torch.equal(found.exact.mask, mask) and found.missed == 0.0123
    )
    assert "2 exact, the others estimated, missed &lt;= 1.23% of them" in found._repr_html_()
    NeuronScores(torch.rand(2, 2)).save(tmp_path / "all.safetensors")
    found = NeuronScores.load(tmp_path / "all.safetensors")
    assert found.exact is None and found.missed is None


def test_scores_reject_a_mask_of_another_shape() -> None:
    with pytest.raises(ValueError, match="exact must have the shape of values"):
        NeuronScores(torch.rand(2, 2), exact=NeuronSet(torch.ones(2, 3, dtype=torch.bool)))


# ---- sets as sets, scores as data

PAIRS = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 3)))


@given(PAIRS, PAIRS)
def test_sets_behave_as_pythons_sets_of_pairs(
    one: set[tuple[int, int]], other: set[tuple[int, int]]
) -> None:
    a, b = NeuronSet.from_pairs(one, (2, 4)), NeuronSet.from_pairs(other, (2, 4))
    assert (set(a & b), set(a | b), set(a - b)) == (one & other, one | other, one - other)
    assert (a == b, hash(a) == hash(b)) == (one == other, one == other)
    assert (set(a ^ b), a <= b) == (one ^ other, one <= other)
    assert list(a) == sorted(one) and all(pair in a for pair in one) and (2, 0) not in a
    assert a.to_frame().to_numpy().tolist() == [list(pair) for pair in sorted(one)]
    if one | other:
        assert a.jaccard(b) == len(one & other) / len(one | other)


def test_sets_of_other_models_are_not_mixed(unchecked: None) -> None:
    small, large = NeuronSet.from_pairs([(0, 0)], (1, 2)), NeuronSet.from_pairs([(0, 0)], (1, 3))
    assert small != large
    with pytest.raises(
        ValueError, match=r"other must have the shape \(1, 2\) of .+, got \(1, 3\) of "
    ):
        small | large
    with pytest.raises(TypeError, match="other must be a NeuronSet, got set"):
        small & {(0, 0)}  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(ValueError, match="two empty sets"):
        NeuronSet.from_pairs([], (1, 2)).jaccard(NeuronSet.from_pairs([], (1, 2)))
    with pytest.raises(
        ValueError, match=r"pairs must be \(layer, neuron\) below \(1, 2\), got \(0, 2\)"
    ):
        NeuronSet.from_pairs([(0, 2)], (1, 2))


def test_scores_as_a_frame_are_in_order() -> None:
    scores = NeuronScores(torch.tensor([[0.0, 3.0, 1.0], [3.0, -1.0, 2.0]]))
    frame = scores.to_frame()
    assert list(zip(frame["layer"], frame["neuron"], strict=True)) == [
        (0, 1),
        (1, 0),
        (1, 2),
        (0, 2),
        (0, 0),
        (1, 1),
    ]
    assert [set(scores.top_k(count=n, per="model")) for n in (1, 2, 6)] == [
        set(zip(*frame.head(n)[["layer", "neuron"]].T.values, strict=True)) for n in (1, 2, 6)
    ]
    assert set(scores.top_k(count=2, per="model", first_layer=1)) == {(1, 0), (1, 2)}
    with pytest.raises(ValueError, match="count must be at most the 3 neurons"):
        scores.top_k(count=4, first_layer=1)


def test_mean_of_scores_is_over_texts_of_one_method() -> None:
    one, other = (
        NeuronScores(torch.tensor([values]), "mine", name, "Mine()")
        for values, name in (([1.0, 2.0], "a"), ([3.0, -2.0], "b"))
    )
    mean = NeuronScores.mean([one, other])
    assert mean.values.tolist() == [[2.0, 0.0]] and (
        mean.method,
        mean.settings,
        mean.sequence_id,
    ) == ("mine", "Mine()", "mean of 2 texts")
    with pytest.raises(ValueError, match="scores must be of one method"):
        NeuronScores.mean([one, NeuronScores(torch.zeros(1, 2), "theirs")])
    with pytest.raises(ValueError, match="at least one text"):
        NeuronScores.mean([])


def test_sets_come_back_from_disk(tmp_path: Path) -> None:
    neurons = NeuronSet(torch.tensor([[True, False], [False, True]]), AttentionHeads())
    neurons.save(tmp_path / "set.safetensors")
    assert NeuronSet.load(tmp_path / "set.safetensors") == neurons


def test_scores_know_the_layer_from_which_on_they_were_chosen(tmp_path: Path) -> None:
    scores = NeuronScores(torch.tensor([[9.0, 9.0], [1.0, 2.0], [3.0, 0.0]]), first_layer=1)
    scores.save(tmp_path / "scores.safetensors")
    loaded = NeuronScores.load(tmp_path / "scores.safetensors")
    assert set(loaded.top_k(0.5)) == set(loaded.top_k(0.5, first_layer=1)) == {(1, 1), (2, 0)}
    assert set(loaded.top_k(count=1, per="model")) == {(2, 0)}
    assert loaded.to_frame()["layer"].tolist() == [2, 1, 1, 2]
    with pytest.raises(ValueError, match=r"first_layer must be 1, from which on .*, got 0\."):
        loaded.top_k(0.5, first_layer=0)


def test_count_is_of_every_layer_or_of_the_model() -> None:
    assert chosen(SCORES.top_k(count=1)) == [[1], [0]]
    assert chosen(SCORES.top_k(count=1, per="model")) == [[], [0]]


def test_one_rule_rounds_down_up_to_rounding_errors() -> None:
    scores = NeuronScores(torch.rand(1, 100))
    assert len(scores.top_k(0.29, per="model")) == len(scores.top_k(0.29, rounding="floor")) == 29
