"""Published rivals against the slow, obvious forms of their rules, and laws of their own."""

import math

import pytest
import torch
from oracles import gate_gradient_of, loss_of, row_gradients
from rivals import SHORT_RIVALS, TEXTS, UNLEARNED

from tl_localize import (
    METHODS,
    AdversarialHardConcrete,
    BalancedSubnet,
    ContrastiveGradient,
    MemorizedSequence,
    SelectivePruning,
    SelectiveSynapticDampening,
)
from tl_localize.evals.settings import make_methods
from tl_localize.methods import RIVALS, general_text
from tl_localize.model.neurons import NeuronView

WITH_TEXTS = ["selective_synaptic_dampening", "selective_pruning", *UNLEARNED]
GENERAL = [MemorizedSequence(torch.tensor(text), 1) for text in TEXTS]


def loss(model, sequence):
    return loss_of(model, sequence.tokens, sequence.n_prefix)


def short(name, **settings):
    return METHODS[name](**SHORT_RIVALS.get(name, {}) | settings)


# ---- ratios to general text


def firing(model, sequence, importance):
    """Of each neuron the mean square, or the mean size, where a suffix token is predicted."""
    _, cache = model.run_with_cache(sequence.tokens[None])
    places = slice(sequence.n_prefix - 1, len(sequence) - 1)
    acts = [cache[f"blocks.{i}.mlp.hook_post"][0, places] for i in range(model.cfg.n_layers)]
    sizes = torch.stack(acts).abs()
    return (sizes.square() if importance == "rms" else sizes).mean(1)


@pytest.mark.parametrize("importance", ["rms", "abs"])
def test_selective_pruning_is_a_ratio_of_firing(neox_like, sequence, importance):
    own, general = (
        torch.stack([firing(neox_like, text, importance) for text in texts]).mean(0)
        for texts in ([sequence], GENERAL)
    )
    if importance == "rms":
        own, general = own.sqrt(), general.sqrt()
    found = SelectivePruning(texts=TEXTS, importance=importance)(neox_like, sequence).values
    torch.testing.assert_close(found, own / (general + 1e-6))


def importances(model, sequence):
    return row_gradients(model, loss(model, sequence)).square().sum(-1)


def test_dampening_is_a_ratio_of_squared_gradients(any_model, sequence):
    general = torch.stack([importances(any_model, text) for text in GENERAL]).mean(0)
    found = SelectiveSynapticDampening(texts=TEXTS)(any_model, sequence).values
    wanted = importances(any_model, sequence) / general
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-5)


def test_dampening_scores_a_neuron_whose_row_has_no_gradient_zero(neox_like, sequence):
    dead = [("blocks.1.mlp.hook_post", lambda act, hook: act.index_fill(-1, torch.tensor([7]), 0))]
    with neox_like.hooks(fwd_hooks=dead):
        values = SelectiveSynapticDampening(texts=TEXTS)(neox_like, sequence).values
    assert (values == 0).nonzero().tolist() == [[1, 7]]


@pytest.mark.parametrize("name", ["selective_synaptic_dampening", "selective_pruning"])
def test_a_text_is_not_compared_with_itself(gpt2_like, sequence, monkeypatch, name):
    own = tuple(sequence.tokens.tolist())
    found, wanted = (
        short(name, texts=texts)(gpt2_like, sequence).values for texts in ((own, *TEXTS), TEXTS)
    )
    torch.testing.assert_close(found, wanted)
    monkeypatch.setattr(general_text, "work_in_batches", None)  # said before texts are read
    with pytest.raises(ValueError, match="texts must hold another text than the one"):
        short(name, texts=(own,))(gpt2_like, sequence)


# ---- the contrastive objective


def test_contrastive_gradient_is_that_of_the_whole_objective(any_model, sequence):
    """The divergence of the model from itself on general text included."""
    with torch.no_grad():
        before = [any_model(text.tokens[None]).log_softmax(-1) for text in GENERAL]

    def objective():
        now = [any_model(text.tokens[None]).log_softmax(-1) for text in GENERAL]
        pairs = zip(now, before, strict=True)
        divergences = [(p.exp() * (p - q)).sum(-1).mean() for p, q in pairs]
        return torch.stack(divergences).mean() - loss(any_model, sequence)

    found = ContrastiveGradient()(any_model, sequence).values
    wanted = row_gradients(any_model, objective()).norm(dim=-1)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-5)


# ---- masks


def slope_of(model, gates, sequence):
    return gate_gradient_of(model, sequence, loss, gates).float()


def plain_subnet(model, sequence, method, generator, start):
    """|s| after some steps of momentum by hand, all general texts in each step."""
    n_closed = round(method.share * model.cfg.d_mlp)
    s = start.clone()
    speed = torch.zeros_like(start)
    for _ in range(method.steps):
        gates = torch.ones_like(s)
        for layer in range(method.first_layer, len(s)):
            gates[layer, s[layer].abs().argsort()[:n_closed]] = 0
        slopes = sum(slope_of(model, gates, text) for text in GENERAL) / len(GENERAL)
        slopes = len(GENERAL) * (slopes - slope_of(model, gates, sequence))
        speed = method.momentum * speed + slopes * s.sign() + method.weight_decay * s
        s[method.first_layer :] -= method.learning_rate * speed[method.first_layer :]
    return -s.abs()


@pytest.mark.parametrize("first_layer", [0, 1])
def test_balanced_subnet_is_straight_through_descent(neox_like, sequence, first_layer):
    method = BalancedSubnet(
        texts=TEXTS, texts_per_step=2, steps=3, share=0.2, seed=4, first_layer=first_layer
    )
    generator = torch.Generator().manual_seed(4)
    start = (2 * torch.rand(3, 56, generator=generator) - 1) / math.sqrt(56)
    found = method(neox_like, sequence).values
    wanted = plain_subnet(neox_like, sequence, method, generator, start)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    assert torch.equal(found[:first_layer], -start[:first_layer].abs())


def plain_sample(location, noise, temperature):
    s = torch.sigmoid((noise.log() - (1 - noise).log() + location) / temperature)
    return (s * 1.2 - 0.1).clamp(0, 1)


def plain_adversary(model, sequence, method):
    """Locations after some steps of torch's Adam on the objective as a whole."""
    generator = torch.Generator().manual_seed(method.seed)
    location = torch.full((3, 56), math.log(1.15 / 0.05)).requires_grad_()
    adam = torch.optim.Adam([location], lr=method.learning_rate)
    for _ in range(method.steps):
        noise = torch.rand(3, 56, generator=generator)
        gates = plain_sample(location, noise, method.temperature)
        torch.randperm(2, generator=generator)
        hooks = [
            (f"blocks.{i}.mlp.hook_post", lambda act, hook, gate=gate: act * gate)
            for i, gate in enumerate(gates)
        ]
        with model.hooks(fwd_hooks=hooks):
            general = torch.stack([loss(model, text) for text in GENERAL]).mean()
            objective = method.general_weight * general - loss(model, sequence)
        shift = method.temperature * math.log(0.1 / 1.1)
        closed = 1 - torch.sigmoid(location - shift)
        adam.zero_grad()
        (objective + method.sparsity_weight * closed.mean()).backward()
        adam.step()
    return torch.sigmoid(-location.detach())


def test_adversarial_hard_concrete_follows_torchs_adam(neox_like, sequence):
    method = AdversarialHardConcrete(
        texts=TEXTS, steps=3, learning_rate=0.1, temperature=0.7, general_weight=2, seed=3
    )
    wanted = plain_adversary(neox_like, sequence, method)
    torch.testing.assert_close(method(neox_like, sequence).values, wanted, rtol=1e-3, atol=2e-3)
    assert wanted.std() > 0.005


@pytest.mark.parametrize("name", UNLEARNED)
def test_a_mask_that_is_trained_loses_the_text_rather_than_general_text(gpt2_like, sequence, name):
    fast = {"learning_rate": 0.1, "steps": 15} | ({"share": 0.2} if "subnet" in name else {})
    scores = short(name, **fast)(gpt2_like, sequence)
    before = [float(loss(gpt2_like, text).detach()) for text in (sequence, *GENERAL)]
    with scores.top_k(0.2).dropped_out(gpt2_like):
        after = [float(loss(gpt2_like, text).detach()) for text in (sequence, *GENERAL)]
    own, *general = [b - a for a, b in zip(before, after, strict=True)]
    assert own > 0.1 and own > sum(general) / 2 + 0.1


@pytest.mark.parametrize("name", UNLEARNED)
def test_masks_with_their_own_general_text_equal_each_alone(gpt2_like, sequences, name):
    """A text that is among the general ones is left out of its own training only."""
    method = short(name, texts=(*TEXTS, tuple(sequences[1].tokens.tolist())))
    together = [scores.values for scores in method.map(gpt2_like, sequences[:2], check=False)]
    torch.testing.assert_close(
        together[1], short(name)(gpt2_like, sequences[1]).values, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        together[0], method(gpt2_like, sequences[0]).values, rtol=0, atol=1e-5
    )


def test_a_mask_reads_every_general_text_before_one_comes_again(gpt2_like):
    texts = tuple((i, i + 1, i + 2) for i in range(5))
    method = BalancedSubnet(texts=texts, texts_per_step=2)
    draws = method._general_texts(NeuronView(gpt2_like), torch.Generator().manual_seed(0))
    read = [int(text.tokens[0]) for _ in range(5) for text in next(draws)]
    assert sorted(read[:5]) == sorted(read[5:]) == list(range(5))


# ---- general text


@pytest.mark.parametrize("name", WITH_TEXTS)
def test_by_default_the_model_writes_general_text(gpt2_like, sequence, monkeypatch, name):
    """What is predicted of a written text is what greedy decoding put there."""
    written = torch.tensor([[4, 5, 6, 7, 8], [8, 9, 9, 8, 4]])
    monkeypatch.setattr(general_text, "written_texts", lambda *given: written)
    method = short(name, texts=())
    texts = method.general_text(NeuronView(gpt2_like))
    assert [(text.n_prefix, text.tokens.tolist()) for text in texts] == [
        (4, row) for row in written.tolist()
    ]
    assert not torch.equal(
        method(gpt2_like, sequence).values, short(name)(gpt2_like, sequence).values
    )


@pytest.mark.parametrize("name", [*WITH_TEXTS, "activation_contrast"])
def test_the_beginning_of_text_token_predicts_nothing(gpt2_like, monkeypatch, name):
    written = torch.tensor([[7, 5, 6, 7, 8, 3], [7, 9, 9, 8, 4, 3]])
    monkeypatch.setattr(general_text, "written_texts", lambda *given: written)
    monkeypatch.setattr(general_text, "first_tokens", lambda tokenizer: [7])
    given = make_methods(name, [f"{name}.texts=[[7,5,6],[5,7,6],[7,5]]"])[0]
    view = NeuronView(gpt2_like)
    assert [text.n_prefix for text in given.general_text(view)] == [2, 1, 1]
    drawn = 2 if name == "activation_contrast" else 4
    texts = make_methods(name)[0].general_text(view)
    assert [text.n_prefix for text in texts] == [drawn] * 2


# ---- how they are named


def test_rivals_run_where_they_are_named():
    names = [rival.name for rival in RIVALS]
    assert [method.name for method in make_methods("rivals")] == names
    named = {*names, "refined_attribution"}
    assert not {method.name for method in make_methods("all")} & named
    mixed = make_methods("attribution,rivals", ["balanced_subnet.share=0.02"])
    assert [method.name for method in mixed] == ["attribution", *names]
    assert mixed[1].share == 0.02


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("balanced_subnet", {"share": 2}, "share must be a fraction"),
        ("balanced_subnet", {"momentum": -1}, "momentum must be a number in"),
        ("adversarial_hard_concrete", {"general_weight": -1}, "general_weight must be a number"),
        ("selective_pruning", {"importance": "std"}, "importance must be one of 'rms', 'abs'"),
        ("selective_synaptic_dampening", {"texts": ((1,),)}, "texts must have 2 tokens or more"),
    ],
)
def test_settings_out_of_their_range_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        METHODS[name](**settings)


@pytest.mark.parametrize("name", UNLEARNED)
def test_a_first_layer_beyond_the_model_is_refused(gpt2_like, sequence, name):
    with pytest.raises(ValueError, match="first_layer must be below 2, the number"):
        short(name, first_layer=2)(gpt2_like, sequence)


@pytest.mark.parametrize("name", UNLEARNED)
def test_a_mask_does_not_keep_a_longer_text_that_holds_its_own(gpt2_like, name):
    sequence, *others = GENERAL
    longer = (3, *sequence.tokens.tolist(), 4)
    kept = tuple(tuple(text.tokens.tolist()) for text in others)
    found = short(name, texts=(longer, *kept))(gpt2_like, sequence)
    torch.testing.assert_close(found.values, short(name, texts=kept)(gpt2_like, sequence).values)


def test_the_weight_of_closed_masks_is_that_of_the_adversary(neox_like, sequence):
    how = {"texts": TEXTS, "steps": 3, "learning_rate": 0.1, "seed": 3}
    method = AdversarialHardConcrete(**how, sparsity_weight=300)
    wanted = plain_adversary(neox_like, sequence, method)
    torch.testing.assert_close(method(neox_like, sequence).values, wanted, rtol=1e-3, atol=2e-3)
    lighter = AdversarialHardConcrete(**how)(neox_like, sequence).values
    assert (lighter - wanted).abs().max() > 0.01
