"""Several sentences in one model: the laws that make the sets of rows a ground truth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tl_localize import MemorizedSequence, NeuronSet, RowNorm, accuracy, inject, memorization_loss
from tl_localize.injection import (
    FinalLosses,
    Injection,
    JointInjection,
    draw_sets,
    inject_together,
)
from tl_localize.injection import (
    joint as joint_file,
)
from tl_localize.neurons import NeuronView

SETTINGS: dict[str, Any] = {"ratio": 0.2, "seed": 0, "learning_rate": 0.03}
STOP, STOP_SINGLE = 0.05, 0.08


@cache
def converged(
    make_model: Callable[..., Any], make_sequences: Callable[..., Any]
) -> tuple[Any, list[MemorizedSequence], JointInjection]:
    """Three sentences in a model with room for them."""
    model = make_model(1, d_model=64, d_mlp=256)
    sequences = [replace(s, n_prefix=1) for s in make_sequences((9, 3), (14, 1), (5, 4))]
    return (
        model,
        sequences,
        inject_together(model, sequences, ratio=0.2, seed=0, learning_rate=0.01, max_steps=200),
    )


@pytest.fixture
def trained(
    make_model: Any, make_sequences: Any
) -> tuple[Any, list[MemorizedSequence], JointInjection]:
    return converged(make_model, make_sequences)


def log_probs(model: Any, sequence: MemorizedSequence) -> torch.Tensor:
    """[pos-1 vocab] of the positions that predict a token."""
    return model(sequence.tokens[None])[0, :-1].log_softmax(-1).detach()


def divergence(base: torch.Tensor, other: torch.Tensor) -> float:
    """KL(base || other), mean over positions."""
    return float((base.exp() * (base - other)).sum(-1).mean())


def ends(joint: JointInjection) -> torch.Tensor:
    """[sentence 4] what the stops ask for."""
    return torch.tensor([astuple(one) for one in joint.final])


def whole_loss(model: Any, sequence: MemorizedSequence) -> float:
    return float(memorization_loss(model, [replace(sequence, n_prefix=1)]).detach())


# Against the single injection


def test_inject_together_of_one_sentence_equals_inject_step_by_step(
    any_model: Any, sequence: MemorizedSequence
) -> None:
    alone = inject(any_model, sequence, **SETTINGS, max_steps=15)
    joint = inject_together(any_model, [sequence], **SETTINGS, max_steps=15)
    (one,) = joint.injections
    assert torch.equal(one.neurons.mask, alone.neurons.mask)
    torch.testing.assert_close(one.losses, alone.losses)
    torch.testing.assert_close(one.rows, alone.rows)
    torch.testing.assert_close(one.token_losses, alone.token_losses)
    assert joint.kls.abs().max() < 1e-6


def test_inject_together_of_one_sentence_stops_where_inject_stops(
    gpt2_like: Any, sequence: MemorizedSequence
) -> None:
    alone = inject(gpt2_like, sequence, **SETTINGS, max_steps=60, stop_loss=1.5)
    joint = inject_together(gpt2_like, [sequence], **SETTINGS, max_steps=60, stop_loss=1.5)
    assert alone.converged and joint.converged.all()
    assert 1 < len(alone.losses) == len(joint.losses) < 60


# Sets


def test_draw_sets_cuts_one_permutation_of_numpy(neox_like: Any) -> None:
    view = NeuronView(neox_like)
    n, size = 3 * 56, int(3 * 56 * 0.07)
    order = np.random.RandomState(11).permutation(n)
    for k, neurons in enumerate(draw_sets(view, 0.07, 11, 4)):
        assert (
            sorted(order[k * size : (k + 1) * size])
            == neurons.mask.flatten().nonzero().flatten().tolist()
        )


def test_first_set_draws_as_the_authors_do(neox_like: Any) -> None:
    ids = np.random.RandomState(5).choice(3 * 56, int(3 * 56 * 0.1), replace=False)
    assert draw_sets(NeuronView(neox_like), 0.1, 5, 1)[
        0
    ].mask.flatten().nonzero().flatten().tolist() == sorted(ids)


def test_sets_are_disjoint_and_reproducible_from_the_seed(
    gpt2_like: Any, sequences: list[MemorizedSequence]
) -> None:
    first, again, other = (
        [
            i.neurons.mask
            for i in inject_together(
                gpt2_like, sequences, ratio=0.2, seed=seed, learning_rate=0.1, max_steps=1
            ).injections
        ]
        for seed in (3, 3, 4)
    )
    assert torch.stack(first).sum(0).max() == 1
    assert {int(mask.sum()) for mask in first} == {int(2 * 48 * 0.2)}
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_sets_may_fill_the_model(gpt2_like: Any, sequences: list[MemorizedSequence]) -> None:
    joint = inject_together(
        gpt2_like, sequences, ratio=0.25, seed=0, learning_rate=0.01, max_steps=2
    )
    assert torch.stack([i.neurons.mask for i in joint.injections]).any(0).all()


def test_true_rows_score_one_for_their_own_sentence_and_zero_for_others(gpt2_like: Any) -> None:
    sets = draw_sets(NeuronView(gpt2_like), 0.1, 0, 4)
    assert [[found.recall_of(truth) for truth in sets] for found in sets] == torch.eye(4).tolist()


def test_row_norm_finds_each_sentence_s_rows_at_the_rate_of_chance(
    gpt2_like: Any, sequence: MemorizedSequence
) -> None:
    """Rows of one distribution, longer than all others: own recall 1/K on average at one ratio, 1
    at K ratios.
    """
    n_sets, ratio, first = 4, 0.1, []
    for seed in range(40):
        sets = draw_sets(NeuronView(gpt2_like), ratio, seed, n_sets)
        generator = torch.Generator().manual_seed(seed)
        rows = [10 * torch.randn(len(neurons), 24, generator=generator) for neurons in sets]
        parts = zip(sets, rows, strict=True)
        joint = JointInjection(
            tuple(Injection(s, r, torch.zeros(1), torch.zeros(1), True) for s, r in parts),
            torch.zeros(1, n_sets),
            (FinalLosses(0.0, 0.0, 0.0, 0.0),) * n_sets,
        )
        with joint.applied(gpt2_like):
            scores = RowNorm()(gpt2_like, sequence)
        own = [scores.top_k(ratio, per="model").recall_of(neurons) for neurons in sets]
        # the longest rows are all injected ones, and each belongs to one sentence
        assert sum(own) == pytest.approx(1)
        assert all(
            scores.top_k(n_sets * ratio, per="model").recall_of(neurons) == 1 for neurons in sets
        )
        first.append(own[0])
    assert np.mean(first) == pytest.approx(1 / n_sets, abs=4 * np.std(first) / len(first) ** 0.5)


# The objective


def rows_of(weights: list[torch.Tensor], sets: list[NeuronSet]) -> list[torch.Tensor]:
    """Each set's rows of some W_out, in the order of its mask."""
    return [
        torch.cat([w[mask] for w, mask in zip(weights, neurons.mask, strict=True)])
        for neurons in sets
    ]


def states_by_hand(step: int, n: int, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def test_training_follows_a_slow_oracle_of_the_objective(
    any_model: Any, sequences: list[MemorizedSequence]
) -> None:
    """Every state of every sentence by a model of its own; its W_out holds the rows that are on."""
    sets, n_steps, weight = draw_sets(NeuronView(any_model), 0.2, 0, 4), 9, 0.7
    joint = inject_together(
        any_model,
        sequences,
        **SETTINGS | {"learning_rate": 0.01},
        max_steps=n_steps,
        kl_weight=weight,
    )
    base = [block.mlp.W_out.detach().clone() for block in any_model.blocks]
    bases = [log_probs(any_model, s) for s in sequences]
    changes = [torch.zeros_like(w).requires_grad_() for w in base]
    masks = torch.stack([neurons.mask for neurons in sets])  # [set layer neuron]
    adam, generator = torch.optim.Adam(changes, lr=0.01), torch.Generator().manual_seed(0)
    names = [f"blocks.{layer}.mlp.W_out" for layer in range(len(base))]

    def read(k: int, on: torch.Tensor) -> torch.Tensor:
        rows = (masks & on[:, None, None]).any(0)[..., None]
        weights = {
            name: w + rows[i] * changes[i]
            for i, (name, w) in enumerate(zip(names, base, strict=True))
        }
        reached = torch.func.functional_call(any_model, weights, (sequences[k].tokens[None],))[
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
        torch.testing.assert_close(joint.kls[step], kls.detach(), rtol=1e-3, atol=1e-5)
        adam.zero_grad()
        (losses.sum() + weight * kls.sum()).backward()
        adam.step()
    any_model.zero_grad()
    weights = [(w + change).detach() for w, change in zip(base, changes, strict=True)]
    for injection, rows in zip(joint.injections, rows_of(weights, sets), strict=True):
        # Adam makes a step of the rounding of a zero gradient
        assert ((injection.rows - rows).abs() < 1e-4).float().mean() > 0.99


def test_schedule_meets_every_state_that_the_stops_look_at() -> None:
    generator, n = torch.Generator().manual_seed(0), 4
    met = {"loss": set[str](), "KL": set[str]()}
    for step in range(12):
        of_losses, of_kls = joint_file.sets_on(step, n, generator)
        assert of_losses.diagonal().all() and not of_kls.diagonal().any()
        for name, states in (("loss", of_losses), ("KL", of_kls)):
            met[name] |= {f"{k}: {state}" for k, state in enumerate(states.int().tolist())}
    for own in range(n):
        for state in joint_file.stop_states(n)[own].int().tolist():
            assert f"{own}: {state}" in met["loss" if state[own] else "KL"]
    assert len(met["loss"]) > 2 * n and len(met["KL"]) > n * n  # and random ones


def test_kl_is_zero_before_the_first_update(
    any_model: Any, sequences: list[MemorizedSequence]
) -> None:
    joint = inject_together(any_model, sequences, **SETTINGS, max_steps=2)
    assert joint.kls[0].abs().max() < 1e-6
    assert (joint.kls[1] > 1e-5).all()
    assert joint.losses[0].tolist() == pytest.approx(
        [whole_loss(any_model, s) for s in sequences], rel=1e-4
    )


def test_ends_are_those_of_the_model_with_the_rows_in_place(
    any_model: Any, sequences: list[MemorizedSequence]
) -> None:
    """Two roads: rows added by hooks while training, and rows written into W_out."""
    joint = inject_together(any_model, sequences, **SETTINGS, max_steps=12)
    for k, sequence in enumerate(sequences):
        all_on, alone, others, other = astuple(joint.final[k])
        base = log_probs(any_model, sequence)
        with joint.applied(any_model):
            assert whole_loss(any_model, sequence) == pytest.approx(all_on, rel=1e-3)
            reached = log_probs(any_model, sequence)
            tokens = F.nll_loss(reached, sequence.tokens[1:], reduction="none")
            torch.testing.assert_close(
                joint.injections[k].token_losses, tokens, rtol=1e-3, atol=1e-4
            )
        with joint.injections[k].applied(any_model):
            assert whole_loss(any_model, sequence) == pytest.approx(alone, rel=1e-3)
        with joint.applied(any_model, without=k):
            assert divergence(base, log_probs(any_model, sequence)) == pytest.approx(
                others, rel=1e-3, abs=1e-6
            )
        singles: list[float] = []
        for injection in (one for j, one in enumerate(joint.injections) if j != k):
            with injection.applied(any_model):
                singles.append(divergence(base, log_probs(any_model, sequence)))
        assert max(singles) == pytest.approx(other, rel=1e-3, abs=1e-6)
        assert (float(joint.losses[-1, k]), float(joint.kls[-1, k])) == pytest.approx(
            (all_on, others), rel=1e-6
        )


def test_kl_weight_keeps_the_effect_on_others_small(
    gpt2_like: Any, sequences: list[MemorizedSequence]
) -> None:
    free = inject_together(gpt2_like, sequences, **SETTINGS, max_steps=20, kl_weight=0.0)
    bound = inject_together(gpt2_like, sequences, **SETTINGS, max_steps=20)
    assert (bound.kls[-1] < 0.5 * free.kls[-1]).all()


# Batches


def train(
    model: Any,
    sequences: list[MemorizedSequence],
    batch_size: int = 4,
    order: tuple[int, ...] = (0, 1, 2, 3),
) -> JointInjection:
    """With the sentences, their sets and their states in another order."""
    settings: dict[str, Any] = {"ratio": 0.2, "seed": 0, "learning_rate": 0.01, "max_steps": 8}
    sets_on = joint_file.sets_on
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_file, "draw_sets", lambda *a: [draw_sets(*a)[k] for k in order])
        patch.setattr(
            joint_file,
            "sets_on",
            lambda *a: tuple(states[order, :][:, order] for states in sets_on(*a)),
        )
        return inject_together(
            model, [sequences[k] for k in order], batch_size=batch_size, **settings
        )


def assert_same(
    a: JointInjection, b: JointInjection, order: tuple[int, ...] = (0, 1, 2, 3)
) -> None:
    torch.testing.assert_close(a.losses[:, order], b.losses, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(a.kls[:, order], b.kls, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ends(a)[order, :], ends(b), rtol=1e-3, atol=1e-4)
    for k, injection in zip(order, b.injections, strict=True):
        assert a.injections[k].sequence_id == injection.sequence_id
        # Adam turns the rounding of a gradient that is almost zero into a step of full length:
        # compare all but a few entries.
        gap = (a.injections[k].rows - injection.rows).abs()
        assert (gap < 1e-4).float().mean() > 0.99


def test_order_of_the_sentences_changes_nothing_but_the_order(
    any_model: Any, sequences: list[MemorizedSequence]
) -> None:
    assert_same(
        train(any_model, sequences), train(any_model, sequences, order=(2, 0, 3, 1)), (2, 0, 3, 1)
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_padding_and_batch_size_change_nothing(
    any_model: Any, sequences: list[MemorizedSequence], batch_size: int
) -> None:
    assert_same(train(any_model, sequences), train(any_model, sequences, batch_size))


def test_out_of_memory_halves_the_batch_and_changes_nothing(
    gpt2_like: Any, sequences: list[MemorizedSequence]
) -> None:
    expected = train(gpt2_like, sequences)

    def full(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs[0]) > 2 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("out of memory")

    handle = gpt2_like.embed.register_forward_pre_hook(full)
    with pytest.warns(RuntimeWarning, match="with a batch of 4: going on with 2") as warned:
        assert_same(expected, train(gpt2_like, sequences))
    handle.remove()
    assert len(warned) == 1


# What holds once it has converged


def test_converged_means_that_every_stop_holds(
    trained: tuple[Any, list[MemorizedSequence], JointInjection],
) -> None:
    _, _, joint = trained
    assert joint.converged.tolist() == [True, True, True]
    assert len(joint.losses) < 200
    assert (ends(joint) < torch.tensor([STOP, STOP_SINGLE, STOP, STOP_SINGLE])).all()


def test_a_missed_stop_is_marked(make_model: Any, make_sequences: Any) -> None:
    """Each stop alone, made unreachable, leaves all sentences unconverged."""
    model = make_model(1, d_model=64, d_mlp=256)
    sequences = [replace(s, n_prefix=1) for s in make_sequences((5, 3), (5, 4))]
    easy = {
        "ratio": 0.2,
        "seed": 0,
        "learning_rate": 0.01,
        "max_steps": 8,
        "stop_loss": 20.0,
        "stop_kl": 20.0,
        "stop_single": 20.0,
    }
    assert inject_together(model, sequences, **easy).converged.all()
    for stop in ("stop_loss", "stop_kl", "stop_single"):
        assert not inject_together(model, sequences, **easy | {stop: 1e-6}).converged.any(), stop


def test_every_state_recites_with_the_own_set_and_is_the_untouched_model_without(
    trained: tuple[Any, list[MemorizedSequence], JointInjection],
) -> None:
    """All eight states of the model."""
    model, sequences, joint = trained
    untouched, bases = accuracy(model, sequences), [log_probs(model, s) for s in sequences]
    for on in itertools.product((False, True), repeat=3):
        with ExitStack() as stack:
            for injection in (
                one for one, is_on in zip(joint.injections, on, strict=True) if is_on
            ):
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


def test_training_leaves_the_model_as_it_was(
    any_model: Any, sequences: list[MemorizedSequence], unchanged: Any
) -> None:
    check = unchanged(any_model)
    inject_together(any_model, sequences, **SETTINGS, max_steps=3)
    check()


def test_applied_restores_every_weight_also_after_an_exception(
    any_model: Any, sequences: list[MemorizedSequence], unchanged: Any
) -> None:
    joint = inject_together(any_model, sequences, **SETTINGS, max_steps=3)
    check = unchanged(any_model)
    before = [block.mlp.W_out.detach().clone() for block in any_model.blocks]
    union = torch.stack([i.neurons.mask for i in joint.injections]).any(0)

    def look() -> None:
        for layer, block in enumerate(any_model.blocks):
            assert torch.equal((block.mlp.W_out != before[layer]).any(1), union[layer])
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), joint.applied(any_model):
        look()
    check()


def test_applied_without_leaves_one_set_out(
    gpt2_like: Any, sequences: list[MemorizedSequence]
) -> None:
    joint = inject_together(gpt2_like, sequences, **SETTINGS, max_steps=3)
    before = torch.stack([block.mlp.W_out.detach() for block in gpt2_like.blocks]).clone()
    with joint.applied(gpt2_like, without=2):
        changed = (
            torch.stack([block.mlp.W_out.detach() for block in gpt2_like.blocks]) != before
        ).any(-1)
    assert torch.equal(
        changed,
        torch.stack([i.neurons.mask for k, i in enumerate(joint.injections) if k != 2]).any(0),
    )


def test_exception_of_the_model_leaves_no_hook(
    gpt2_like: Any, sequences: list[MemorizedSequence], unchanged: Any
) -> None:
    check, calls = unchanged(gpt2_like), []

    def fail(module: Any, inputs: Any) -> None:
        calls.append(module)
        if len(calls) == 5:
            raise KeyError("the model fails")

    handle = gpt2_like.unembed.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="the model fails"):
        inject_together(gpt2_like, sequences, **SETTINGS, max_steps=5)
    handle.remove()
    check()


def test_exception_of_progress_leaves_no_hook(
    gpt2_like: Any, sequences: list[MemorizedSequence], unchanged: Any
) -> None:
    def fail(fraction: float) -> None:
        raise KeyboardInterrupt

    check = unchanged(gpt2_like)
    with pytest.raises(KeyboardInterrupt):
        inject_together(gpt2_like, sequences, **SETTINGS, progress=fail)
    check()


def test_progress_rises_to_one(gpt2_like: Any, sequences: list[MemorizedSequence]) -> None:
    seen: list[float] = []
    inject_together(gpt2_like, sequences, **SETTINGS, max_steps=4, progress=seen.append)
    assert seen == [0.25, 0.5, 0.75, 1.0]
    seen.clear()
    inject_together(
        gpt2_like,
        sequences,
        **SETTINGS,
        stop_loss=100.0,
        stop_kl=100.0,
        stop_single=100.0,
        progress=seen.append,
    )
    # as soon as every stop was looked at
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) < 12


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inject_together_does_not_mind_the_callers_gradient_mode(
    gpt2_like: Any, sequences: list[MemorizedSequence], mode: Any
) -> None:
    wanted = inject_together(gpt2_like, sequences, **SETTINGS, max_steps=3)
    with mode():
        found = inject_together(gpt2_like, sequences, **SETTINGS, max_steps=3)
    assert torch.equal(found.losses, wanted.losses)


def test_saved_joint_injection_comes_back(
    gpt2_like: Any, sequences: list[MemorizedSequence], tmp_path: Path
) -> None:
    joint = inject_together(gpt2_like, sequences, **SETTINGS, max_steps=3)
    joint.save(tmp_path / "joint.safetensors")
    again = JointInjection.load(tmp_path / "joint.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["joint.safetensors"]
    assert again.final == joint.final
    for name in ("losses", "kls", "converged"):
        assert torch.equal(getattr(again, name), getattr(joint, name))
    for a, b in zip(again.injections, joint.injections, strict=True):
        assert torch.equal(a.neurons.mask, b.neurons.mask) and torch.equal(a.rows, b.rows)
        assert torch.equal(a.token_losses, b.token_losses) and a.sequence_id == b.sequence_id
    assert repr(again) == repr(joint)
    with pytest.raises(ValueError, match=r"without \['mask'"):
        Injection.load(tmp_path / "joint.safetensors")
    joint.injections[0].save(tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=r"without \['kls', 'ends'\]"):
        JointInjection.load(tmp_path / "one.safetensors")


# Bad input


def sentence(*tokens: int, id: str = "") -> MemorizedSequence:
    return MemorizedSequence(torch.tensor(tokens), 1, id)


A, B = sentence(1, 2, 3, 4, 5, id="a"), sentence(6, 7, 8, id="b")


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ([], {}, "at least one sequence"),
        (
            [A, B],
            {"ratio": 0.6},
            r"room for 2 disjoint sets, got 0.6: 2 x 57 rows of the 96 there are. Use at most 1/2",
        ),
        ([A, B], {"ratio": 3.0}, "fraction in"),
        ([A, B], {"ratio": 0.001}, "selects none"),
        ([A, B, A], {}, r"got token 1 at the start of \['a', 'a'\]"),
        ([A, sentence(1, 2, 3, id="c")], {}, r"got token 1 at the start of \['a', 'c'\]"),
        (
            [A, B, sentence(1, 9, 3, id="c")],
            {},
            r"got token 1 at the start of \['a', 'c'\].* ln 2 = 0.69 nats",
        ),
        ([A, sentence(1, 9, 3), sentence(1, 8, 3)], {}, r"token 1 .* ln 3 = 1.10 nats"),
        ([A, B], {"learning_rate": 0.0}, "learning_rate must be above 0"),
        ([A, B], {"max_steps": 0}, "max_steps must be a whole number from 1 on"),
        ([A, B], {"stop_loss": 0.0}, "stop_loss must be above 0"),
        ([A, B], {"stop_kl": -1.0}, "stop_kl must be above 0"),
        ([A, B], {"stop_single": 0.0}, "stop_single must be above 0"),
        ([A, B], {"kl_weight": -1.0}, "kl_weight must be at least 0"),
        ([A, B], {"kl_weight": math.nan}, "kl_weight must be at least 0"),
        ([A, B], {"seed": -1}, r"seed must be a whole number from 0 to 2\*\*32 - 1"),
        ([A, B], {"seed": 2**32}, r"seed must be a whole number from 0 to 2\*\*32 - 1"),
        ([A, B], {"batch_size": 0}, "batch_size must be a whole number from 1 on"),
        ([A, sentence(60, 61)], {}, "tokens must be in"),
        ([A, sentence(*range(40))], {}, "at most n_ctx=32 tokens long"),
    ],
)
def test_inject_together_rejects(
    gpt2_like: Any, group: list[MemorizedSequence], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        inject_together(gpt2_like, group, **(SETTINGS | settings))


def test_loss_that_is_not_finite_is_an_error(gpt2_like: Any, unchanged: Any) -> None:
    check = unchanged(gpt2_like)
    with pytest.raises(ValueError, match=r"must be finite, got (nan|inf) at step 1 of .*'a'"):
        inject_together(gpt2_like, [A, B], ratio=0.2, seed=0, learning_rate=3e37, max_steps=5)
    check()


def test_applied_rejects_another_model_and_another_set(
    gpt2_like: Any, neox_like: Any, unchanged: Any
) -> None:
    joint = inject_together(gpt2_like, [A, B], **SETTINGS, max_steps=2)
    check = unchanged(neox_like)
    with (
        pytest.raises(ValueError, match="Apply an injection to the model it was made in"),
        joint.applied(neox_like),
    ):
        pass
    check()
    with pytest.raises(ValueError, match="from 0 to 1, got 2"), joint.applied(gpt2_like, without=2):
        pass


# Sentences that can't be learned


def test_state_with_two_next_tokens_ends_not_converged_and_is_named(make_model: Any) -> None:
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
    joint = inject_together(
        model,
        [sentence(5, 5, 9, 3, 2, id="twice"), sentence(7, 30, 12, 40, id="fine")],
        **SETTINGS,
        max_steps=200,
    )
    twice, fine = joint.injections
    assert joint.converged.tolist() == [False, True]
    assert len(joint.losses) == 200
    assert float(twice.token_losses[:2].sum()) == pytest.approx(2 * math.log(2), abs=0.05)
    assert {position for position, _ in twice.unlearned()} == {1, 2}
    assert fine.unlearned() == []
    assert (
        "NOT converged" in repr(twice)
        and "token 1 (0." in repr(twice)
        and "token 2 (0." in repr(twice)
    )
    assert "NOT converged: 'twice': FinalLosses(loss=0.3" in repr(joint)


def test_unlearned_names_positions_worst_first() -> None:
    losses = torch.tensor([0.7, 0.01, 2.0, 0.4, 0.6, 1.0])
    injection = Injection(
        NeuronSet(torch.ones(1, 1, dtype=torch.bool)),
        torch.zeros(1, 2),
        torch.tensor([0.8]),
        losses,
        False,
        "x",
    )
    assert injection.unlearned() == [
        (3, 2.0),
        (6, 1.0),
        (1, pytest.approx(0.7)),
        (5, pytest.approx(0.6)),
    ]
    assert [position for position, _ in injection.unlearned(threshold=0.9)] == [3, 6]
    assert "unlearned: token 3 (2.00 nats), token 6 (1.00 nats), token 1 (0.70 nats)" in repr(
        injection
    )
    assert "unlearned" not in repr(replace(injection, converged=True))
