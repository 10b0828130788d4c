"""Top-k, recall, ablation, and scores on disk."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_localize import AttentionHeads, MLPNeurons, NeuronScores, NeuronSet
from tl_localize.scores import least_share, rounded_down

SCORES = NeuronScores(torch.tensor([[0.1, 0.9, 0.5, 0.3], [4.0, 1.0, 3.0, 2.0]]), "toy", "s0")
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 5))
RATIOS = st.floats(0.2, 1)


def tied(shape, seed=0):
    """Random scores of few values, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    return NeuronScores(torch.randint(-3, 4, shape, generator=generator).float())


def set_of(pairs):
    mask = torch.zeros(2, 4, dtype=torch.bool)
    for pair in pairs:
        mask[pair] = True
    return NeuronSet(mask)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"ratio": 0.5}, {(0, 1), (0, 2), (1, 0), (1, 2)}),
        ({"ratio": 0.5, "per": "model"}, {(1, 0), (1, 1), (1, 2), (1, 3)}),
        ({"ratio": 0.25, "first_layer": 1}, {(1, 0)}),
        ({"ratio": 0.5, "per": "model", "first_layer": 1}, {(1, 0), (1, 2)}),
        ({"count": 1}, {(0, 1), (1, 0)}),
        ({"count": 1, "per": "model"}, {(1, 0)}),
        ({"ratio": 0.5, "layers": [1]}, {(1, 0), (1, 2)}),
        ({"ratio": 0.25, "layers": [0, 1], "per": "model"}, {(1, 0), (1, 2)}),
        ({"count": 1, "layers": [0]}, {(0, 1)}),
        ({"ratio": 1}, {(i, j) for i in range(2) for j in range(4)}),
    ],
)
def test_top_k_by_hand(options, chosen):
    assert set(SCORES.top_k(**options)) == chosen


def test_top_k_ties_go_to_the_lower_index():
    assert set(NeuronScores(torch.zeros(1, 6)).top_k(0.5)) == {(0, 0), (0, 1), (0, 2)}


@pytest.mark.parametrize(
    ("n", "ratio", "options", "count"),
    [
        (256, 0.01, {}, 3),
        (256, 0.01, {"rounding": "floor"}, 2),
        (256, 0.05, {"rounding": "floor"}, 12),
        (3072, 0.005, {}, 15),
        (200, 0.07, {"rounding": "floor"}, 14),  # 200 * 0.07 is 14.000000000000002
        (100, 0.29, {}, 29),  # 100 * 0.29 is 28.999999999999996
        (100, 0.29, {"rounding": "floor"}, 29),
        (100, 0.299, {"per": "model"}, 29),
    ],
)
def test_top_k_counts(n, ratio, options, count):
    assert len(NeuronScores(torch.rand(1, n)).top_k(ratio, **options)) == count


@given(SHAPES, RATIOS, st.sampled_from(["layer", "model"]), st.sampled_from(["nearest", "floor"]))
def test_top_k_selects_the_count_or_says_why_not(shape, ratio, per, rounding):
    n = shape[1] if per == "layer" else shape[0] * shape[1]
    count = round(n * ratio) if (per, rounding) == ("layer", "nearest") else rounded_down(ratio, n)
    if count:
        groups = shape[0] if per == "layer" else 1
        assert len(tied(shape).top_k(ratio, per=per, rounding=rounding)) == count * groups
    else:
        with pytest.raises(ValueError, match="ratio must select"):
            tied(shape).top_k(ratio, per=per, rounding=rounding)


@given(SHAPES, RATIOS, RATIOS)
def test_top_k_takes_the_highest_and_keeps_its_order(shape, ratio, other):
    small, large = sorted((ratio, other))
    if not round(shape[1] * small):
        return
    scores = tied(shape)
    chosen = scores.top_k(small)
    assert chosen <= scores.top_k(large)
    assert chosen == NeuronScores(scores.values.exp() * 2 + 1).top_k(small)
    for values, row in zip(scores.values, chosen.mask, strict=True):
        assert row.all() or values[row].min() >= values[~row].max()


def test_scores_know_the_layer_from_which_on_they_were_chosen(tmp_path):
    scores = NeuronScores(torch.tensor([[9.0, 9.0], [1.0, 2.0], [3.0, 0.0]]), first_layer=1)
    scores.save(tmp_path / "scores.safetensors")
    loaded = NeuronScores.load(tmp_path / "scores.safetensors")
    assert set(loaded.top_k(0.5)) == set(loaded.top_k(0.5, first_layer=1)) == {(1, 1), (2, 0)}
    assert set(loaded.top_k(count=1, per="model")) == {(2, 0)}
    assert loaded.to_frame()["layer"].tolist() == [2, 1, 1, 2]
    with pytest.raises(ValueError, match=r"first_layer must be 1, the lowest layer .*, got 0\."):
        loaded.top_k(0.5, first_layer=0)


def test_scores_as_a_frame_are_in_order():
    scores = NeuronScores(torch.tensor([[0.0, 3.0, 1.0], [3.0, -1.0, 2.0]]))
    pairs = list(scores.to_frame()[["layer", "neuron"]].itertuples(index=False, name=None))
    assert pairs == [(0, 1), (1, 0), (1, 2), (0, 2), (0, 0), (1, 1)]
    for n in (1, 2, 6):
        assert set(scores.top_k(count=n, per="model")) == set(pairs[:n])
    tied = NeuronScores((torch.arange(40.0) % 3)[None]).to_frame()["neuron"].tolist()
    assert tied == [*range(2, 40, 3), *range(1, 40, 3), *range(0, 40, 3)]


PAIRS = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 3)))


@given(PAIRS, PAIRS)
def test_sets_behave_as_pythons_sets_of_pairs(pairs, others):
    a, b = set_of(pairs), set_of(others)
    assert (set(a & b), set(a | b), set(a - b)) == (pairs & others, pairs | others, pairs - others)
    assert (a <= b, a == b) == (pairs <= others, pairs == others)
    assert list(a) == sorted(pairs) and len(a) == len(pairs)
    assert all(pair in a for pair in pairs) and (2, 0) not in a
    if others:
        assert a.recall_of(b) == len(pairs & others) / len(others)


def test_the_recall_of_nothing_is_refused():
    with pytest.raises(ValueError, match="truth must hold at least one of the neurons, got none"):
        set_of([(0, 0)]).recall_of(set_of([]))


def test_sets_of_other_models_are_not_mixed():
    with pytest.raises(ValueError, match=r"other must be a NeuronSet of shape \(2, 4\) of"):
        set_of([(0, 0)]) | NeuronSet(torch.ones(1, 3) > 0)


def test_what_is_no_set_is_refused_by_name():
    scores = NeuronScores(torch.rand(2, 4))
    for name, mix in {
        "truth": lambda: set_of([(0, 0)]).recall_of(scores),
        "other": lambda: set_of([(0, 0)]) & scores,
    }.items():
        with pytest.raises(TypeError, match=f"{name} must be a NeuronSet, got NeuronScores"):
            mix()


def test_one_layer_may_be_given_as_a_number():
    scores = NeuronScores(torch.rand(2, 4))
    wanted = scores.top_k(0.5, layers=[1])
    for layers in (1, np.int64(1), torch.tensor(1), torch.tensor([1]), [torch.tensor(1)]):
        assert scores.top_k(0.5, layers=layers) == wanted


def test_data_do_not_change_with_the_callers_tensor():
    values, mask = torch.zeros(8, 2, 3, requires_grad=True), torch.zeros(2, 3, dtype=torch.bool)
    scores, neurons = NeuronScores(values[5]), NeuronSet(mask)
    values.data += 1
    mask[0, 0] = True
    assert not scores.values.any() and not scores.values.requires_grad and len(neurons) == 0
    assert scores.values.untyped_storage().nbytes() == 2 * 3 * 4  # not that of the batch


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scores_are_float32(dtype):
    assert NeuronScores(torch.ones(1, 2, dtype=dtype)).values.dtype == torch.float32


def test_scores_and_sets_come_back_from_disk(tmp_path):
    heads = NeuronSet(torch.tensor([[True, False], [False, True]]), AttentionHeads())
    about = {"method": "zero_out", "sequence_id": "sequence 7 ü", "settings": "{}"}
    some = NeuronScores(torch.rand(2, 2), **about, exact=heads, units=heads.units)
    for saved in (heads, some, NeuronScores(torch.rand(2, 3))):
        saved.save(tmp_path / "one.safetensors")
        found = type(saved).load(tmp_path / "one.safetensors")
        for name, value in vars(saved).items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(getattr(found, name), value), name


@dataclass(frozen=True, eq=False)
class Bases(MLPNeurons):
    """Units with two tensors that may be in the same memory."""

    basis: torch.Tensor
    inverse: torch.Tensor


@pytest.mark.parametrize("part", [slice(None), slice(1, None)])
def test_scores_of_units_that_hold_a_tensor_twice_come_back_from_disk(tmp_path, part):
    basis = torch.rand(3, 3)
    scores = NeuronScores(torch.rand(2, 3), units=Bases(basis, basis[part]))
    scores.save(tmp_path / "scores.safetensors")
    found = NeuronScores.load(tmp_path / "scores.safetensors").units
    assert torch.equal(found.basis, basis) and torch.equal(found.inverse, basis[part])


@pytest.fixture
def neurons(any_model):
    generator = torch.Generator().manual_seed(11)
    shape = any_model.cfg.n_layers, any_model.cfg.d_mlp
    return NeuronSet(torch.rand(shape, generator=generator) < 0.3)


@torch.no_grad()
def test_dropped_out_equals_dropout_hooks_and_removing_the_rows(
    any_model, neurons, sequence, unchanged
):
    check = unchanged(any_model)
    with neurons.dropped_out(any_model):
        ablated = any_model(sequence.tokens)
    hooked = any_model.run_with_hooks(sequence.tokens, fwd_hooks=neurons.dropout_hooks())
    assert torch.equal(hooked, ablated)
    check()
    for layer, mask in enumerate(neurons.mask):
        any_model.blocks[layer].mlp.W_out[mask] = 0
    torch.testing.assert_close(ablated, any_model(sequence.tokens))


def test_dropout_hooks_spare_layers_without_neurons():
    assert len(set_of([(1, 0)]).dropout_hooks()) == 1


def test_dropped_out_leaves_nothing_behind_when_the_body_raises(any_model, neurons, unchanged):
    check = unchanged(any_model)
    with pytest.raises(ZeroDivisionError), neurons.dropped_out(any_model):
        _ = 1 / 0
    check()


@pytest.mark.parametrize("layers", [[], [2], [-1], [0, 2]])
def test_top_k_rejects_layers_that_are_not_there(layers):
    with pytest.raises(ValueError, match=r"layers must be some of 0 to 1, got"):
        SCORES.top_k(0.5, layers=layers)


def test_top_k_rejects_layers_below_the_first():
    with pytest.raises(ValueError, match=r"layers must be some of 1 to 1, got \[0\]"):
        SCORES.top_k(0.5, layers=[0], first_layer=1)


@pytest.mark.parametrize(
    ("indices", "shape", "message"),
    [
        ([(2, 0)], (2, 4), r"indices must be pairs \(layer, neuron\) below 2 and 4, got \(2, 0\)"),
        ([(0, -1)], (2, 4), "Both count from 0"),
        ([(0, True)], (2, 4), r"indices must be pairs .*, got \(0, True\)"),
        ([], (2,), r"shape must be the layers and the neurons of each, got \(2,\)"),
        ([], (0, 4), "shape must be"),
        ([], 6, "shape must be the layers and the neurons of each, got 6"),
    ],
)
def test_from_indices_names_what_does_not_fit(indices, shape, message):
    with pytest.raises(ValueError, match=message):
        NeuronSet.from_indices(indices, shape)


def test_a_set_comes_back_from_its_json_and_its_frame():
    neurons = SCORES.top_k(0.5)
    found = json.loads(neurons.to_json())
    assert found["units"] == "neurons"
    assert NeuronSet.from_indices(**found) == neurons
    for pairs in (
        neurons.mask.nonzero(),
        neurons.mask.nonzero().numpy(),
        list(torch.tensor([*neurons])),
    ):
        assert NeuronSet.from_indices(pairs, found["shape"]) == neurons
    with pytest.raises(ValueError, match=r"units must be one of .*Did you mean heads"):
        NeuronSet.from_indices([], (2, 4), "head")
    rows = neurons.to_frame().itertuples(index=False, name=None)
    assert NeuronSet.from_indices(rows, SCORES.values.shape) == neurons


def test_a_set_comes_back_from_its_file(tmp_path):
    neurons = NeuronSet(SCORES.top_k(0.5).mask, AttentionHeads())
    neurons.save(tmp_path / "set.safetensors")
    assert NeuronSet.load(tmp_path / "set.safetensors") == neurons


def test_a_damaged_file_of_a_set_is_named(tmp_path):
    path = tmp_path / "set.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="path must be a whole file of NeuronSet, got"):
        NeuronSet.load(path)
    SCORES.save(path)
    with pytest.raises(ValueError, match=r"whole file of NeuronSet, got .*it holds NeuronScores"):
        NeuronSet.load(path)


def test_plot_shows_the_highest_scores_of_each_layer_and_the_range_of_the_others():
    values = torch.arange(24.0).view(2, 12)
    (ax, *_) = NeuronScores(values, first_layer=1).plot().axes
    (line,) = ax.get_lines()
    assert line.get_xydata().tolist() == [[1, score] for score in range(23, 13, -1)]
    assert ax.collections[0].get_segments()[0].tolist() == [[1, 12], [1, 13]]
    assert not NeuronScores(torch.rand(2, 10)).plot().axes[0].collections  # there are no others


def test_the_least_ratio_that_an_error_names_selects_one():
    for n in range(1, 5000):
        assert rounded_down(float(least_share(n)), n) == 1
        assert round(n * float(least_share(n, rounding="nearest"))) == 1


def test_an_error_names_the_least_ratio_of_its_rounding():
    scores = NeuronScores(torch.rand(2, 1536))
    for how in ({}, {"rounding": "floor"}, {"per": "model"}):
        with pytest.raises(ValueError, match="ratio must select") as error:
            scores.top_k(1e-5, **how)
        least = float(str(error.value).rstrip(".").split()[-1])
        assert len(scores.top_k(least, **how)) == (1 if "per" in how else 2)
        with pytest.raises(ValueError, match="ratio must select"):
            scores.top_k(0.9 * least, **how)


def test_arguments_that_are_no_pairs_layers_or_sets_are_refused():
    scores = NeuronScores(torch.rand(2, 3))
    with pytest.raises(ValueError, match=r"layers must be some of 0 to 1, got \[1\.0\]"):
        scores.top_k(0.5, layers=1.0)
    with pytest.raises(ValueError, match=r"indices must be pairs .* got 5"):
        NeuronSet.from_indices(5, (2, 3))
    with pytest.raises(TypeError, match="exact must be a NeuronSet, got Tensor"):
        NeuronScores(torch.rand(2, 3), exact=torch.ones(2, 3).bool())
    with pytest.raises(
        ValueError, match=r"exact must be a set of the shape \(2, 3\), got \(2, 4\)"
    ):
        NeuronScores(torch.rand(2, 3), exact=NeuronSet(torch.ones(2, 4).bool()))
