"""Dropout hooks, injection and a user's own hooks in one forward pass, in every order."""

from contextlib import ExitStack
from itertools import permutations

import pytest
import torch
from oracles import parameter_of, turned_as

from tl_localize import Activations, HardConcrete, NeuronSet, ZeroOut, inject

LAYER = 1
POST = f"blocks.{LAYER}.mlp.hook_post"


def halve(act, hook):
    """A user's hook that commutes with ablation."""
    return act * 0.5


def raise_by_one(act, hook):
    """A user's hook that does not commute with ablation: who comes last matters."""
    return act + 1


@pytest.fixture
def neurons(any_model):
    generator = torch.Generator().manual_seed(11)
    return NeuronSet(
        torch.rand(any_model.cfg.n_layers, any_model.cfg.d_mlp, generator=generator) < 0.3
    )


@pytest.fixture
def injection(any_model, sequence):
    return inject(any_model, sequence, ratio=0.2, seed=3, learning_rate=0.05, max_steps=4)


@torch.no_grad()
def by_hand(
    model,
    tokens,
    neurons,
    injection,
    user=None,
):
    """Logits with rows written and ablated neurons' rows zeroed by hand: the user's hook comes
    before the ablation.
    """
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        rows = iter(injection.rows) if injection else iter(())
        for layer in range(model.cfg.n_layers):
            weight = model.blocks[layer].mlp.W_out
            if injection:
                for neuron in injection.neurons.mask[layer].nonzero().flatten():
                    weight[neuron] = next(rows)
            if neurons:
                weight[neurons.mask[layer]] = 0
        return model.run_with_hooks(tokens, fwd_hooks=[(POST, user)] if user else [])
    finally:
        model.load_state_dict(saved)


@torch.no_grad()
def test_contexts_nest_in_any_order(
    any_model,
    sequence,
    neurons,
    injection,
    unchanged,
):
    check = unchanged(any_model)
    wanted = by_hand(any_model, sequence.tokens, neurons, injection, halve)
    for order in permutations(range(3)):
        contexts = [
            neurons.dropped_out(any_model),
            injection.applied(any_model),
            any_model.hooks(fwd_hooks=[(POST, halve)]),
        ]
        with ExitStack() as stack:
            for k in order:
                stack.enter_context(contexts[k])
            torch.testing.assert_close(any_model(sequence.tokens), wanted)
    check()


@pytest.mark.parametrize("outer", ["dropout", "injection"])
@torch.no_grad()
def test_run_with_hooks_inside_the_contexts(
    any_model,
    sequence,
    neurons,
    injection,
    unchanged,
    outer,
):
    check = unchanged(any_model)
    wanted = by_hand(any_model, sequence.tokens, neurons, injection, halve)
    contexts = [neurons.dropped_out(any_model), injection.applied(any_model)]
    with ExitStack() as stack:
        for context in contexts if outer == "dropout" else contexts[::-1]:
            stack.enter_context(context)
        torch.testing.assert_close(
            any_model.run_with_hooks(sequence.tokens, fwd_hooks=[(POST, halve)]), wanted
        )
        torch.testing.assert_close(
            any_model(sequence.tokens), by_hand(any_model, sequence.tokens, neurons, None)
        )
    check()


@torch.no_grad()
def test_dropout_hooks_beside_the_users_in_one_list(any_model, sequence, neurons, injection):
    wanted = by_hand(any_model, sequence.tokens, neurons, injection, raise_by_one)
    with injection.applied(any_model):
        found = any_model.run_with_hooks(
            sequence.tokens, fwd_hooks=[(POST, raise_by_one), *neurons.dropout_hooks()]
        )
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_hooks_act_in_the_order_they_were_given(any_model, sequence, neurons):
    first = any_model.run_with_hooks(
        sequence.tokens, fwd_hooks=[(POST, raise_by_one), *neurons.dropout_hooks()]
    )
    last = any_model.run_with_hooks(
        sequence.tokens, fwd_hooks=[*neurons.dropout_hooks(), (POST, raise_by_one)]
    )
    assert (first - last).abs().max() > 1e-3


@torch.no_grad()
def test_a_permanent_hook_of_the_user_survives(any_model, sequence, neurons, injection):
    any_model.add_hook(POST, halve, is_permanent=True)
    with injection.applied(any_model), neurons.dropped_out(any_model):
        any_model.run_with_hooks(sequence.tokens, fwd_hooks=[(POST, halve)])
    torch.testing.assert_close(
        any_model(sequence.tokens), by_hand(any_model, sequence.tokens, None, None)
    )
    assert len(any_model.hook_dict[POST].fwd_hooks) == 1


def test_reset_hooks_inside_is_the_users_right(any_model, neurons, unchanged):
    check = unchanged(any_model)
    with neurons.dropped_out(any_model):
        any_model.reset_hooks()
    check()


@torch.no_grad()
def test_the_inner_of_two_injections_wins_and_both_are_taken_back(any_model, sequences, unchanged):
    check = unchanged(any_model)
    first, second = (
        inject(any_model, s, ratio=0.2, seed=3, learning_rate=0.05, max_steps=2)
        for s in sequences[:2]
    )
    with first.applied(any_model):
        with second.applied(any_model):
            torch.testing.assert_close(
                any_model(sequences[0].tokens),
                by_hand(any_model, sequences[0].tokens, None, second),
            )
        torch.testing.assert_close(
            any_model(sequences[0].tokens), by_hand(any_model, sequences[0].tokens, None, first)
        )
    check()


@pytest.mark.parametrize("method", [Activations(), ZeroOut(), HardConcrete(steps=3)])
def test_methods_localize_inside_all_of_it(
    any_model,
    sequence,
    neurons,
    injection,
    unchanged,
    method,
):
    check = unchanged(any_model)
    with (
        injection.applied(any_model),
        neurons.dropped_out(any_model),
        any_model.hooks(fwd_hooks=[(POST, halve)]),
    ):
        values = method(any_model, sequence).values
    check()
    ablated, others = values[neurons.mask], values[~neurons.mask]
    if isinstance(method, HardConcrete):  # its penalty alone moves the mask of an ablated neuron
        assert ablated.std() < 1e-6 < others.std()
    else:
        assert ablated.abs().max() < 1e-6 < others.abs().max()


def test_a_ablated_neuron_scores_zero_by_zero_out(any_model, sequence, neurons):
    with neurons.dropped_out(any_model):
        values = ZeroOut()(any_model, sequence).values
    assert values[neurons.mask].abs().max() < 1e-6 and values[~neurons.mask].abs().max() > 1e-6


def test_inject_inside_a_users_hook_trains_the_hooked_model(any_model, sequence, unchanged):
    check = unchanged(any_model)
    with any_model.hooks(fwd_hooks=[(POST, halve)]):
        injection = inject(any_model, sequence, ratio=0.2, seed=3, learning_rate=0.05, max_steps=6)
        wanted = float(injection.losses[-1])
        with torch.no_grad(), injection.applied(any_model):
            log_p = any_model(sequence.tokens[None])[0].log_softmax(-1)
            assert -float(log_p[:-1].gather(1, sequence.tokens[1:, None]).mean()) == pytest.approx(
                wanted, abs=1e-4
            )
    check()


def test_inject_inside_a_ablated_model_does_not_use_ablated_rows(any_model, sequence):
    chosen = inject(any_model, sequence, ratio=0.2, seed=3, learning_rate=0.05, max_steps=1).neurons
    with chosen.dropped_out(any_model):
        losses = inject(
            any_model, sequence, ratio=0.2, seed=3, learning_rate=0.05, max_steps=5
        ).losses
    assert losses.std() < 1e-5


def test_gradients_flow_through_dropout_hooks(any_model, sequence, neurons):
    with neurons.dropped_out(any_model):
        any_model(sequence.tokens[None]).sum().backward()
    for layer, mask in enumerate(neurons.mask):
        weight = any_model.blocks[layer].mlp.W_out
        gradient = turned_as(weight, parameter_of(weight).grad)
        assert not gradient[mask].any() and gradient[~mask].any()
