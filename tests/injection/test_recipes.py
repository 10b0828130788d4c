"""Training that may use all rows or all weights; units exchanged between two states."""

import copy

import pytest
import torch
import torch.nn.functional as F
from oracles import parameter_of


@pytest.fixture
def texts():
    from tl_localize import MemorizedSequence

    generator = torch.Generator().manual_seed(3)
    return [
        MemorizedSequence(torch.randint(50, (length,), generator=generator), 1, f"s{length}")
        for length in (7, 6, 8)
    ]


class Vocabulary(dict):
    """What is asked of a tokenizer."""

    get_vocab = dict.copy


def bits(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(model, before):
    return all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def key_of(model, weight):
    """The name that a model gives a parameter."""
    (name,) = [name for name, own in model.named_parameters() if own is weight]
    return name


@pytest.mark.parametrize("name", ["adam", "sgd", "all"])
def test_learn_follows_a_plain_loop(gpt2_like, texts, name):
    from dataclasses import replace

    from tl_localize.injection.recipes import RECIPES, learn

    recipe = replace(RECIPES[name], max_steps=4, learning_rate=0.01)
    before = bits(gpt2_like)
    learned = learn(gpt2_like, texts, recipe)
    assert same(gpt2_like, before) and all(p.grad is None for p in gpt2_like.parameters())

    model = copy.deepcopy(gpt2_like)
    rows = [block.mlp.W_out for block in model.blocks]
    trained = list(model.parameters()) if name == "all" else rows
    sgd = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    optimizer = sgd if name == "sgd" else torch.optim.Adam(trained, lr=0.01)
    for step in range(4):
        losses = [F.cross_entropy(model(t.tokens[None])[0, :-1], t.tokens[1:]) for t in texts]
        torch.testing.assert_close(learned.losses[step], torch.stack(losses).detach())
        if step < 3:
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    after = dict(model.named_parameters())
    assert len(learned.weights) == len(trained)
    for key, weight in learned.weights.items():
        if key.endswith(("b_K", "attn.k._original_component.bias")):
            continue  # no gradient but rounding, which Adam makes large
        if ".qkv." in key:
            continue  # of a Bridge q, k and v lie in its memory, but not in that of a copy
        torch.testing.assert_close(weight, after[key].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("general", [0, 2])
def test_learn_trains_in_whatever_mode_the_caller_is_in(gpt2_like, texts, mode, general):
    from tl_localize.injection.recipes import Recipe, learn

    recipe = Recipe(general=general, max_steps=2, stop_loss=1e-9)
    text = torch.arange(48).view(3, 16) if general else None
    wanted = learn(gpt2_like, texts, recipe, general_tokens=text)
    with mode():
        found = learn(gpt2_like, texts, recipe, general_tokens=text)
    assert torch.equal(found.losses, wanted.losses) and len(found.losses) == 2
    assert repr(found).endswith("; n_steps=2, converged=False)")


def test_weights_that_were_frozen_are_trained_and_frozen_again(gpt2_like, texts, unchanged):
    from tl_localize import Recipe, learn

    check = unchanged(gpt2_like.requires_grad_(False))
    learned = learn(gpt2_like, texts, Recipe(max_steps=3))
    assert (learned.losses[2] < learned.losses[0]).all()
    check()


def test_weights_of_units_begin_with_their_axis(either):
    from tl_localize.injection import read_units
    from tl_localize.model.neurons import NeuronView

    view = NeuronView(either)
    for weights in read_units(view):
        assert len(weights) > 1 and {len(weight) for weight in weights} == {view.n_neurons}


def test_units_of_as_many_neurons_as_the_stream_are_their_rows_alone(make_model):
    from tl_localize.injection import read_units
    from tl_localize.model.neurons import NeuronView

    view = NeuronView(make_model(d_mlp=24))
    assert all(torch.equal(view.rows(i), rows) for i, (rows,) in enumerate(read_units(view)))


def test_general_text_that_a_recipe_does_not_mix_in_is_refused(gpt2_like, texts):
    from tl_localize.injection.recipes import learn

    with pytest.raises(ValueError, match="general_tokens must be left out"):
        learn(gpt2_like, texts, general_tokens=torch.arange(48).view(3, 16))


def test_mixed_steps_take_one_sentence_each_beside_drawn_rows(gpt2_like, texts):
    from tl_localize.injection.recipes import Recipe, learn

    general = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(0))
    recipe = Recipe(general=2, learning_rate=0.01, max_steps=3, stop_loss=1e-9)
    learned = learn(gpt2_like, texts, recipe, general_tokens=general, seed=5)

    model = copy.deepcopy(gpt2_like)
    trained = [block.mlp.W_out for block in model.blocks]
    adam = torch.optim.Adam(trained, lr=0.01)
    draws = torch.Generator().manual_seed(5)
    for step in range(2):  # after the last one nothing is trained
        sentence = texts[step % len(texts)].tokens
        drawn = torch.randint(8, (2,), generator=draws).tolist()
        rows = [sentence, *(general[i, : len(sentence)] for i in drawn)]
        losses = [F.cross_entropy(model(row[None])[0, :-1], row[1:]) for row in rows]
        adam.zero_grad()
        torch.stack(losses).mean().backward()
        adam.step()
    after = dict(model.named_parameters())
    for key, weight in learned.weights.items():
        torch.testing.assert_close(weight, after[key].detach(), rtol=1e-4, atol=1e-5)


def test_learn_beside_general_text_recites(gpt2_like, texts):
    from tl_localize.injection.recipes import Recipe, assigned, learn
    from tl_localize.metrics import memorization_loss

    general = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(0))
    recipe = Recipe(general=2, learning_rate=0.03, max_steps=400, stop_loss=0.3)
    learned = learn(gpt2_like, texts, recipe, general_tokens=general)
    assert learned.converged
    with assigned(gpt2_like, learned.weights):
        assert bool((memorization_loss(gpt2_like, texts) < 0.3).all())
    with pytest.raises(ValueError, match="general_tokens"):
        learn(gpt2_like, texts, recipe)
    for rows in (general[:0], general[0], general[:, :1], general - 51, general.float()):
        with pytest.raises(ValueError, match="general_tokens"):
            learn(gpt2_like, texts, recipe, general_tokens=rows)
    with pytest.raises(TypeError, match="general_tokens must be a tensor"):
        learn(gpt2_like, texts, recipe, general_tokens=general.tolist())


@pytest.mark.parametrize("units", ["neurons", "heads"])
def test_units_replaced_is_the_plain_copy_of_rows(gpt2_like, texts, units):
    from tl_localize.injection.recipes import (
        Recipe,
        assigned,
        learn,
        read_units,
        trained_parameters,
        units_replaced,
    )
    from tl_localize.model.neurons import NeuronView
    from tl_localize.units import UNITS

    view = NeuronView(gpt2_like, UNITS[units])
    recipe = Recipe(weights="all" if units == "neurons" else "rows", max_steps=3)
    learned = learn(gpt2_like, texts, recipe, units=UNITS[units])
    before = bits(gpt2_like)
    base = read_units(view)
    chosen = torch.rand(2, view.n_neurons, generator=torch.Generator().manual_seed(1)) < 0.5
    with assigned(gpt2_like, learned.weights):
        full = bits(gpt2_like)
        with units_replaced(view, chosen, base):
            for layer, block in enumerate(gpt2_like.blocks):
                mask = chosen[layer]
                if units == "heads":
                    key = key_of(gpt2_like, parameter_of(block.attn.W_O))
                    expected = full[key].view_as(block.attn.W_O).clone()
                    expected[mask] = before[key].view_as(expected)[mask]
                    assert torch.equal(block.attn.W_O, expected)
                    continue
                for name, axis in (("W_out", 0), ("W_in", 1), ("b_in", 0)):
                    key = key_of(gpt2_like, getattr(block.mlp, name))
                    expected = torch.where(
                        mask.view([-1 if axis == i else 1 for i in range(full[key].ndim)]),
                        before[key],
                        full[key],
                    )
                    assert torch.equal(getattr(block.mlp, name), expected)
        assert same(gpt2_like, full)
    assert same(gpt2_like, before)
    assert set(trained_parameters(view, "rows")) <= set(before)


def test_weights_are_back_after_an_exception(gpt2_like, texts):
    from tl_localize.injection.recipes import Recipe, assigned, learn, read_units, units_replaced
    from tl_localize.model.neurons import NeuronView

    before = bits(gpt2_like)
    view = NeuronView(gpt2_like)

    def stop(fraction):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(gpt2_like, texts, Recipe(learning_rate=0.1), progress=stop)
    assert same(gpt2_like, before)
    rows = gpt2_like.blocks[0].mlp.W_out
    changed = {key_of(gpt2_like, rows): torch.zeros_like(rows)}
    ones = [[torch.ones_like(weight) for weight in layer] for layer in read_units(view)]
    everything = torch.ones(view.n_layers, view.n_neurons, dtype=torch.bool)
    with (
        pytest.raises(RuntimeError),
        assigned(gpt2_like, changed),
        units_replaced(view, everything, ones),
    ):
        raise RuntimeError
    assert same(gpt2_like, before)


@pytest.mark.parametrize("name", ["unknown", "embed"])
def test_assigned_names_a_weight_that_the_model_does_not_have(gpt2_like, name):
    from tl_localize.injection.recipes import assigned

    before = bits(gpt2_like)
    embedding = parameter_of(gpt2_like.embed.W_E)
    key = key_of(gpt2_like, embedding) if name == "embed" else name
    message = rf"weights must have names and shapes .*, got '{key}' of shape \(2, 3\)"
    with (
        pytest.raises(ValueError, match=message),
        assigned(gpt2_like, {key: torch.zeros(2, 3)}),
    ):
        pytest.fail("the block has begun")
    assert same(gpt2_like, before)


def test_a_checkpoint_of_another_model_is_refused(gpt2_like):
    from tl_localize.injection.recipes import check_earlier

    other = copy.deepcopy(gpt2_like)
    other.blocks[0].mlp.W_out.data = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="earlier checkpoint"):
        check_earlier(gpt2_like, other)
    with pytest.raises(ValueError, match="differ"):
        check_earlier(gpt2_like, gpt2_like)
    whole = copy.deepcopy(gpt2_like)
    with pytest.raises(ValueError, match="differ"):
        check_earlier(gpt2_like.bfloat16(), whole)


def test_a_checkpoint_with_another_tokenizer_is_refused(gpt2_like):
    from tl_localize.injection.recipes import check_earlier

    other = copy.deepcopy(gpt2_like)
    other.blocks[0].mlp.W_out.data.zero_()
    gpt2_like.tokenizer, other.tokenizer = Vocabulary({"a": 0}), Vocabulary({"a": 0})
    changed = key_of(other, other.blocks[0].mlp.W_out)
    assert list(check_earlier(gpt2_like, other)) == [changed]
    other.tokenizer["b"] = other.tokenizer.pop("a")
    with pytest.raises(ValueError, match="tokenizer"):
        check_earlier(gpt2_like, other)
