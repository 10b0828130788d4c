"""Several sentences in one model: the laws that make the sets of rows a ground truth."""

import itertools
import math
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import config_of, save
from oracles import name_of, turned_as

from tl_localize import MemorizedSequence, accuracy, inject, load_model, memorization_loss
from tl_localize.evals.shared import draw_groups
from tl_localize.injection import (
    Injection,
    JointInjection,
    TrainingState,
    draw_sets,
    inject_together,
)
from tl_localize.injection import training as joint_file
from tl_localize.injection.training import TrainedRows
from tl_localize.model.neurons import NeuronView

SETTINGS = {"ratio": 0.2, "seed": 0, "learning_rate": 0.03}


@cache
def converged(make_model, make_sequences):
    """Three sentences in a model with room for them."""
    model = make_model(1, d_model=64, d_mlp=256, n_heads=4)
    sequences = [replace(s, n_prefix=1) for s in make_sequences((9, 3), (14, 1), (5, 4))]
    return (
        model,
        sequences,
        inject_together(model, sequences, ratio=0.2, seed=0, learning_rate=0.01, max_steps=200),
    )


@pytest.fixture
def trained(make_model, make_sequences):
    return converged(make_model, make_sequences)


def log_probs(model, sequence):
    """[pos-1 vocab] of the positions that predict a token."""
    return model(sequence.tokens[None])[0, :-1].log_softmax(-1).detach()


def divergence(base, other):
    """KL(base || other), mean over positions."""
    return float((base.exp() * (base - other)).sum(-1).mean())


def whole_loss(model, sequence):
    return float(memorization_loss(model, [replace(sequence, n_prefix=1)]).detach())


# Against the single injection


@pytest.mark.parametrize("stop", [0.05, 1.5])
def test_inject_together_of_one_sentence_equals_inject_step_by_step(any_model, sequence, stop):
    alone = inject(any_model, sequence, **SETTINGS, max_steps=15, stop_loss=stop)
    joint = inject_together(any_model, [sequence], **SETTINGS, max_steps=15, stop_loss=stop)
    (injection,) = joint.injections
    assert injection.neurons == alone.neurons and injection.converged == alone.converged
    for name in ("losses", "rows"):
        torch.testing.assert_close(getattr(injection, name), getattr(alone, name))


# Sets


def test_draw_sets_cuts_one_permutation_of_numpy(neox_like):
    size = int(3 * 56 * 0.07)
    order = np.random.RandomState(11).permutation(3 * 56)
    for k, neurons in enumerate(draw_sets(NeuronView(neox_like), 0.07, 11, 4)):
        wanted = set(order[k * size : (k + 1) * size].tolist())
        assert {56 * layer + neuron for layer, neuron in neurons} == wanted
    (part,) = draw_sets(NeuronView(neox_like), 51 / 168, 0, 1)
    assert 51 / 168 * 168 < 51 == len(part)  # in floating point


def test_the_largest_ratio_that_an_error_names_is_taken(neox_like):
    view = NeuronView(neox_like)
    for n_sets in (2, 3, 6, 7, 11):
        with pytest.raises(ValueError, match="leave room for") as refused:
            draw_sets(view, 0.9, 0, n_sets)
        largest = float(re.search(r" to ([\d.]+)\.$", str(refused.value))[1])
        assert len(draw_sets(view, largest, 0, n_sets)) == n_sets
        assert largest > 0.99 / n_sets


# The objective


def states_by_hand(step, n, drawn):
    """Which sets are on, for the losses and for the KLs [sentence set], as the method says it: of
    four steps, losses with the own set alone, all sets, the own alone, and the own with drawn
    others; KLs with all others, one other, drawn others, and one other, each other in turn.
    """
    turn = 1 + (step // 2) % (n - 1)
    for_losses, for_kls = torch.zeros(2, n, n, dtype=torch.bool)
    for k, other in itertools.product(range(n), range(n)):
        own, in_turn = k == other, other == (k + turn) % n
        lost = [own, True, own, own or bool(drawn[0, k, other])]
        moved = [not own, in_turn, not own and bool(drawn[1, k, other]), in_turn]
        for_losses[k, other], for_kls[k, other] = lost[step % 4], moved[step % 4]
    return for_losses, for_kls


def test_training_follows_a_slow_oracle_of_the_objective(any_model, sequences):
    """Every state of every sentence by a model of its own; its W_out holds the rows that are on."""
    sets = draw_sets(NeuronView(any_model), 0.2, 0, 4)
    n_steps = 9
    joint = inject_together(
        any_model,
        sequences,
        **SETTINGS | {"learning_rate": 0.01},
        max_steps=n_steps,
    )
    base = [block.mlp.W_out.detach().clone() for block in any_model.blocks]
    bases = [log_probs(any_model, s) for s in sequences]
    changes = [torch.zeros_like(w).requires_grad_() for w in base]
    masks = torch.stack([neurons.mask for neurons in sets])  # [set layer neuron]
    adam = torch.optim.Adam(changes, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    weights = [block.mlp.W_out for block in any_model.blocks]
    names = [name_of(any_model, weight) for weight in weights]

    def read(k, on):
        rows = (masks & on[:, None, None]).any(0)[..., None]
        changed = {
            name: turned_as(weights[i], base[i] + rows[i] * changes[i])
            for i, name in enumerate(names)
        }
        reached = torch.func.functional_call(any_model, changed, (sequences[k].tokens[None],))[
            0, :-1
        ].log_softmax(-1)
        if on[k]:
            return F.nll_loss(reached, sequences[k].tokens[1:])
        return (bases[k].exp() * (bases[k] - reached)).sum(-1).mean()

    for step in range(n_steps - 1):
        losses, kls = (
            torch.stack([read(k, on[k]) for k in range(4)])
            for on in states_by_hand(step, 4, torch.rand(2, 4, 4, generator=generator) < 0.5)
        )
        torch.testing.assert_close(joint.losses[step], losses.detach(), rtol=1e-4, atol=1e-5)
        adam.zero_grad()
        (losses.sum() + kls.sum()).backward()
        adam.step()
    any_model.zero_grad()
    rows_then = torch.stack(base) + torch.stack(changes).detach()
    for injection in joint.injections:
        rows = rows_then[injection.neurons.mask]
        # Adam makes a step of the rounding of a zero gradient
        assert ((injection.rows - rows).abs() < 1e-4).float().mean() > 0.99


def test_schedule_meets_every_state_that_the_stops_look_at():
    generator = torch.Generator().manual_seed(0)
    n = 4
    met = {"loss": set[str](), "KL": set[str]()}
    for step in range(12):
        of_losses, of_kls = joint_file.sets_on(step, n, generator)
        assert of_losses.diagonal().all() and not of_kls.diagonal().any()
        for name, states in (("loss", of_losses), ("KL", of_kls)):
            met[name] |= {f"{k}: {state}" for k, state in enumerate(states.int().tolist())}
    for own in range(n):
        for state in joint_file.stop_states(n)[:, own].int().tolist():
            assert f"{own}: {state}" in met["loss" if state[own] else "KL"]
    assert len(met["loss"]) > 2 * n and len(met["KL"]) > n * n  # and random ones


def test_ends_are_those_of_the_model_with_the_rows_in_place(any_model, sequences, monkeypatch):
    """Two roads: rows added by hooks while training, and rows written into W_out."""
    trained = []
    train = joint_file._train
    monkeypatch.setattr(
        joint_file, "_train", lambda *how: trained.append(train(*how)) or trained[0]
    )
    joint = inject_together(any_model, sequences, **SETTINGS, max_steps=12)
    ((_, ends),) = trained
    for k, (sequence, injection) in enumerate(zip(sequences, joint.injections, strict=True)):
        base = log_probs(any_model, sequence)

        def moved(block, base=base, sequence=sequence):
            with block:
                return divergence(base, log_probs(any_model, sequence))

        with joint.applied(any_model):
            loss = whole_loss(any_model, sequence)
        with injection.applied(any_model):
            alone = whole_loss(any_model, sequence)
        others = [other for other in joint.injections if other is not injection]
        off = moved(JointInjection(others).applied(any_model))
        furthest = max(moved(other.applied(any_model)) for other in others)
        assert float(joint.losses[-1, k]) == pytest.approx(loss, rel=1e-3, abs=1e-6)
        found = [*ends[:3, k].tolist(), float(ends[3:, k].max())]
        assert found == pytest.approx((loss, alone, off, furthest), rel=1e-3, abs=1e-6)


# Batches


def train(
    model,
    sequences,
    batch_size=4,
    order=(0, 1, 2, 3),
):
    """With the sentences, their sets and their states in another order."""
    settings = {"ratio": 0.2, "seed": 0, "learning_rate": 0.01, "max_steps": 8}
    sets_on = joint_file.sets_on
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_file, "draw_sets", lambda *a: [draw_sets(*a)[k] for k in order])
        patch.setattr(
            joint_file,
            "sets_on",
            lambda *a: sets_on(*a)[:, order][:, :, order],
        )
        return inject_together(
            model, [sequences[k] for k in order], batch_size=batch_size, **settings
        )


def assert_same(a, b, order=(0, 1, 2, 3)):
    torch.testing.assert_close(a.losses[:, order], b.losses, rtol=1e-3, atol=1e-4)
    for k, injection in zip(order, b.injections, strict=True):
        assert a.injections[k].sequence_id == injection.sequence_id
        # Adam turns the rounding of a gradient that is almost zero into a step of full length:
        # compare all but a few entries.
        gap = (a.injections[k].rows - injection.rows).abs()
        assert (gap < 1e-4).float().mean() > 0.99


def test_order_of_the_sentences_changes_nothing_but_the_order(neox_like, sequences):
    order = (2, 0, 3, 1)
    assert_same(train(neox_like, sequences), train(neox_like, sequences, order=order), order)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_mode_of_the_caller_changes_nothing(gpt2_like, sequences, mode):
    outside = inject_together(gpt2_like, sequences[:2], **SETTINGS, max_steps=2)
    with mode():
        inside = inject_together(gpt2_like, sequences[:2], **SETTINGS, max_steps=2)
    assert torch.equal(inside.losses, outside.losses)


def test_padding_and_batch_size_change_nothing(llama_like, sequences):
    assert_same(train(llama_like, sequences), train(llama_like, sequences, batch_size=3))


def test_the_last_batch_does_not_set_the_size_of_later_ones(gpt2_like, sequences, monkeypatch):
    sizes, in_batches = [], joint_file.work_in_batches
    monkeypatch.setattr(
        joint_file, "work_in_batches", lambda *how: sizes.append(how[2]) or in_batches(*how)
    )
    inject_together(gpt2_like, sequences, **SETTINGS, max_steps=2, batch_size=3)
    assert set(sizes) == {3} and len(sizes) > 2


def test_out_of_memory_halves_the_batch_and_changes_nothing(gpt2_like, sequences):
    expected = train(gpt2_like, sequences)

    def full(module, inputs):
        if len(inputs[0]) > 2 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("out of memory")

    handle = gpt2_like.blocks[0].register_forward_pre_hook(full)
    with pytest.warns(RuntimeWarning, match="with a batch of 4: going on with 2") as warned:
        assert_same(expected, train(gpt2_like, sequences))
    handle.remove()
    assert len(warned) == 1


def test_gradients_are_added_to_all_rows_or_to_none(gpt2_like, monkeypatch):
    view = NeuronView(gpt2_like)
    trained = TrainedRows(view, torch.ones(view.size, dtype=torch.bool), 0.1)
    total = sum((change * 2).sum() for change in trained.changes.values())
    trained.add_gradients(total)
    before = [change.grad.clone() for change in trained.changes.values()]
    assert len(before) > 1
    add, calls = torch.Tensor.__add__, []

    def second_is_full(one, other):
        calls.append(other)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return add(one, other)

    total = sum((change * 3).sum() for change in trained.changes.values())
    monkeypatch.setattr(torch.Tensor, "__add__", second_is_full)
    with pytest.raises(torch.OutOfMemoryError):
        trained.add_gradients(total)
    monkeypatch.undo()
    assert all(map(torch.equal, before, [change.grad for change in trained.changes.values()]))


# What holds once it has converged


@pytest.mark.parametrize("missed", ["", "stop_loss", "STOP_KL", "STOP_SINGLE"])
def test_a_missed_stop_is_marked(gpt2_like, sequences, monkeypatch, missed):
    for name in ("STOP_KL", "STOP_SINGLE"):
        monkeypatch.setattr(joint_file, name, 1e-6 if name == missed else 20.0)
    stop = 1e-6 if missed == "stop_loss" else 20.0
    joint = inject_together(gpt2_like, sequences[:2], **SETTINGS, max_steps=8, stop_loss=stop)
    assert joint.converged.tolist() == [not missed] * 2


def test_every_state_recites_with_the_own_set_and_is_the_untouched_model_without(
    trained,
):
    """All eight states of the model."""
    model, sequences, joint = trained
    assert joint.converged.all() and len(joint.losses) < 200
    untouched = accuracy(model, sequences)
    bases = [log_probs(model, s) for s in sequences]
    for on in itertools.product((False, True), repeat=3):
        with ExitStack() as stack:
            for injection, is_on in zip(joint.injections, on, strict=True):
                if is_on:
                    stack.enter_context(injection.applied(model))
            found = accuracy(model, sequences)
            for k, sequence in enumerate(sequences):
                assert found[k] == 1 if on[k] else found[k] <= untouched[k] + 0.2
                assert (
                    whole_loss(model, sequence) < 0.1
                    if on[k]
                    else divergence(bases[k], log_probs(model, sequence)) < 0.1
                )


# Nothing is left behind


def test_applied_changes_the_rows_of_its_sets_and_restores_them(any_model, sequences, unchanged):
    check = unchanged(any_model)
    joint = inject_together(any_model, sequences, **SETTINGS, max_steps=3)
    before = any_model.W_out.detach().clone()
    sets = [injection.neurons.mask for injection in joint.injections]
    with joint.applied(any_model):
        changed = (any_model.W_out.detach() != before).any(-1)
    assert torch.equal(changed, torch.stack(sets).any(0))
    check()


def test_training_tells_step_and_loss(gpt2_like, sequences):
    how = {"ratio": 0.2, "seed": 0, "learning_rate": 0.01, "max_steps": 3}
    for train, texts in ((inject, sequences[0]), (inject_together, sequences[:2])):
        told = []
        found = train(gpt2_like, texts, **how, progress=lambda *now, told=told: told.append(now))
        assert [fraction for fraction, _ in told] == pytest.approx([1 / 3, 2 / 3, 1])
        which = "loss" if train is inject else "largest loss"
        assert told[0][1] == f"step 1, {which} {float(found.losses[0].max()):.2f}"
    told = []
    inject(gpt2_like, sequences[0], **how, progress=told.append)
    assert told == pytest.approx([1 / 3, 2 / 3, 1])


def test_progress_rises_to_one(gpt2_like, sequences, monkeypatch):
    seen = []
    inject_together(gpt2_like, sequences, **SETTINGS, max_steps=4, progress=seen.append)
    assert seen == [0.25, 0.5, 0.75, 1.0]
    seen.clear()
    for name in ("STOP_KL", "STOP_SINGLE"):
        monkeypatch.setattr(joint_file, name, 100.0)
    inject_together(gpt2_like, sequences, **SETTINGS, stop_loss=100.0, progress=seen.append)
    # as soon as every stop was looked at
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) < 12


def test_saved_joint_injection_comes_back(gpt2_like, sequences, tmp_path):
    joint = inject_together(gpt2_like, sequences, **SETTINGS, max_steps=3)
    joint.save(tmp_path / "joint.safetensors")
    again = JointInjection.load(tmp_path / "joint.safetensors")
    for name in ("losses", "converged"):
        assert torch.equal(getattr(again, name), getattr(joint, name))
    for a, b in zip(again.injections, joint.injections, strict=True):
        assert (a.neurons, a.sequence_id) == (b.neurons, b.sequence_id)
        assert torch.equal(a.rows, b.rows)
    with pytest.raises(ValueError, match="JointInjection"):
        Injection.load(tmp_path / "joint.safetensors")


@pytest.fixture
def kept_often(monkeypatch):
    monkeypatch.setattr(joint_file, "KEPT_EVERY", 3)


def test_training_goes_on_bit_for_bit_where_it_was_broken_off(
    any_model, sequences, kept_often, tmp_path, unchanged
):
    check, states = unchanged(any_model), []
    whole = inject_together(any_model, sequences, **SETTINGS, max_steps=8)

    def keep(state):
        states.append(state)
        if len(states) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inject_together(any_model, sequences, **SETTINGS, max_steps=8, keep=keep)
    check()
    states[-1].save(tmp_path / "state.safetensors")
    loaded = TrainingState.load(tmp_path / "state.safetensors")
    for state in (states[0], states[0], loaded):  # which stay as they are
        again = inject_together(any_model, sequences, **SETTINGS, max_steps=8, resume=state)
        assert torch.equal(again.losses, whole.losses)
        for a, b in zip(again.injections, whole.injections, strict=True):
            assert torch.equal(a.rows, b.rows)


@pytest.mark.parametrize("other", [{"seed": 1}, {"learning_rate": 0.02}, {"ratio": 0.1}])
def test_training_does_not_go_on_from_another_one(gpt2_like, sequences, kept_often, other):
    states, weight = [], gpt2_like.blocks[0].attn.W_V[0, 0, 0].item()
    inject_together(gpt2_like, sequences, **SETTINGS, max_steps=4, keep=states.append)
    with pytest.raises(ValueError, match="resume must be of the same model"):
        inject_together(gpt2_like, sequences, **SETTINGS | other, resume=states[0])
    with torch.no_grad():
        gpt2_like.blocks[0].attn.W_V[0, 0, 0] += 1
    with pytest.raises(ValueError, match="resume must be of the same model"):
        inject_together(gpt2_like, sequences, **SETTINGS, max_steps=4, resume=states[0])
    with pytest.raises(TypeError, match="resume must be a TrainingState, got int"):
        inject_together(gpt2_like, sequences, **SETTINGS, max_steps=4, resume=3)
    with torch.no_grad():
        gpt2_like.blocks[0].attn.W_V[0, 0, 0] = weight
    with pytest.raises(ValueError, match="max_steps must be more than the 3 of resume, got 3"):
        inject_together(gpt2_like, sequences, **SETTINGS, max_steps=3, resume=states[0])


# Bad input


def sentence(*tokens, id=""):
    return MemorizedSequence(torch.tensor(tokens), 1, id)


A, B = sentence(1, 2, 3, 4, 5, id="a"), sentence(6, 7, 8, id="b")


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ([], {}, "at least one sequence"),
        ([A, B], {"ratio": 0.6}, "room for 2 disjoint sets"),
        ([A, B], {"ratio": 0.001}, "at least one"),
        ([A, sentence(1, 2, 3)], {}, "different tokens"),
    ],
)
def test_inject_together_rejects(gpt2_like, group, settings, message):
    with pytest.raises(ValueError, match=message):
        inject_together(gpt2_like, group, **(SETTINGS | settings))


def after_bos(sequence):
    tokens = torch.cat([torch.tensor([9]), sequence.tokens])
    return replace(sequence, tokens=tokens, n_prefix=2, bos="<s>")


def test_a_beginning_of_text_token_is_no_first_token(gpt2_like):
    """It begins every sentence, and no loss asks for what comes after it."""
    group = [after_bos(A), after_bos(B)]
    joint = inject_together(gpt2_like, group, **SETTINGS, max_steps=1)
    alone = inject(gpt2_like, group[0], **SETTINGS, max_steps=1)
    for sequence, losses in zip(group, joint.losses[0], strict=True):
        loss = float(memorization_loss(gpt2_like, [sequence]).detach())
        assert float(losses) == pytest.approx(loss, rel=1e-5)
    assert float(alone.losses[0]) == pytest.approx(float(joint.losses[0, 0]), rel=1e-5)
    assert draw_groups(group, 2, seed=0)
    assert not draw_groups([A, sentence(1, 2, 3)], 2, seed=0)
    with pytest.raises(ValueError, match="different tokens, got the first tokens \\[1, 1\\]"):
        inject_together(gpt2_like, [after_bos(A), after_bos(sentence(1, 2, 3))], **SETTINGS)


def test_loss_that_is_not_finite_is_an_error(gpt2_like, unchanged):
    check = unchanged(gpt2_like)
    with pytest.raises(ValueError, match="must be finite"):
        inject_together(gpt2_like, [A, B], ratio=0.2, seed=0, learning_rate=3e37, max_steps=5)
    check()


def test_applied_rejects_another_model(gpt2_like, neox_like, unchanged):
    joint = inject_together(gpt2_like, [A, B], **SETTINGS, max_steps=2)
    check = unchanged(neox_like)
    with pytest.raises(ValueError, match="model they were made in"), joint.applied(neox_like):
        pass
    check()


# Sentences that can't be learned


def test_state_with_two_next_tokens_ends_not_converged(make_model):
    """In a rotary model two equal first tokens give one state twice: a floor of 2 ln 2 nats."""
    model = make_model(
        4,
        d_model=32,
        act_fn="gelu",
        positional_embedding_type="rotary",
        rotary_adjacent_pairs=False,
        rotary_dim=4,
    )
    model.unembed.W_U.data.mul_(2)
    twice_the_same, other = sentence(5, 5, 9, 3, 2), sentence(7, 30, 12, 40)
    joint = inject_together(model, [twice_the_same, other], **SETTINGS, max_steps=80)
    assert joint.converged.tolist() == [False, True]
    # of four tokens
    assert float(joint.losses[-1, 0]) == pytest.approx(2 * math.log(2) / 4, abs=0.05)


def test_sets_in_a_model_whose_layers_write_all_positions_in_one_axis(tmp_path, make_sequences):
    save(config_of("OPT"), tmp_path)
    model = load_model(tmp_path, device="cpu", bridge=True)
    sequences = make_sequences((9, 3), (12, 3))
    sequences[0].tokens[0] = 1
    base = [whole_loss(model, sequence) for sequence in sequences]
    joint = inject_together(model, sequences, ratio=0.2, seed=0, learning_rate=0.01, max_steps=120)
    with joint.applied(model):
        for sequence, own in zip(sequences, joint.injections, strict=True):
            assert whole_loss(model, sequence) == pytest.approx(float(own.losses[-1]), abs=1e-3)
    for k, own in enumerate(joint.injections):
        with own.applied(model):
            losses = [whole_loss(model, sequence) for sequence in sequences]
        assert losses[k] < 0.5 * base[k] and losses[1 - k] > 0.9 * base[1 - k]
