"""Injection: only the chosen rows are trained, and the model gets every bit back."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import parameter_of

from tl_localize import Injection, MemorizedSequence, NeuronSet, inject
from tl_localize.injection import draw_sets, rows_replaced
from tl_localize.model.neurons import NeuronView
from tl_localize.units import UNITS

QUICK = {"ratio": 0.2, "learning_rate": 0.05, "max_steps": 12}


def whole_loss(model, sequence):
    log_p = model(sequence.tokens[None])[0].log_softmax(-1)
    return -log_p[:-1].gather(1, sequence.tokens[1:, None]).mean()


def trained_by_hand(model, sequence, neurons, steps, learning_rate):
    """Algorithm 1 with torch's Adam on whole matrices and a mask on their gradients; changes the
    model.
    """
    weights = [neurons.units.rows(model, layer) for layer in range(len(model.blocks))]
    parameters = [parameter_of(weight) for weight in weights]
    adam = torch.optim.Adam(parameters, lr=learning_rate)
    losses = []
    for step in range(steps):
        loss = whole_loss(model, sequence)
        losses.append(float(loss.detach()))
        if step == steps - 1:
            break
        adam.zero_grad()
        loss.backward()
        for weight, own, mask in zip(weights, parameters, neurons.mask, strict=True):
            own.grad.as_strided(weight.shape, weight.stride())[~mask] = 0
        adam.step()
    model.zero_grad(set_to_none=True)
    trained = zip(weights, neurons.mask, strict=True)
    return torch.cat([weight.detach()[mask].flatten(0, -2) for weight, mask in trained]), losses


@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
def test_inject_follows_algorithm_1(any_model, sequence, units):
    injection = inject(any_model, sequence, seed=0, **(QUICK | {"ratio": 0.4}), units=units)
    rows, losses = trained_by_hand(any_model, sequence, injection.neurons, 12, 0.05)
    torch.testing.assert_close(injection.losses, torch.tensor(losses), atol=1e-3, rtol=1e-3)
    assert (injection.rows - rows).abs().mean() < 1e-3


def test_inject_trains_the_whole_sequence_whatever_its_prefix(gpt2_like, sequence):
    other = MemorizedSequence(sequence.tokens, 7)
    first, second = (inject(gpt2_like, s, seed=0, **QUICK) for s in (sequence, other))
    assert torch.equal(first.rows, second.rows)


def test_inject_stops_below_the_stop_loss(gpt2_like, sequence):
    full = inject(gpt2_like, sequence, seed=0, **QUICK)
    assert not full.converged and len(full.losses) == 12
    stop = float(full.losses[5]) + 1e-6
    injection = inject(gpt2_like, sequence, seed=0, stop_loss=stop, **QUICK)
    assert injection.converged and torch.equal(injection.losses, full.losses[:6])
    assert injection.sequence_id == sequence.id != ""


def test_applied_changes_the_chosen_rows_and_gives_every_bit_back(any_model, sequence, unchanged):
    check = unchanged(any_model)
    before = any_model.W_out.detach().clone()
    injection = inject(any_model, sequence, seed=0, **QUICK)
    check()
    with injection.applied(any_model), torch.no_grad():
        assert torch.equal((any_model.W_out != before).any(-1), injection.neurons.mask)
        loss = float(whole_loss(any_model, sequence))
    check()
    assert float(injection.losses[-1]) == pytest.approx(loss, abs=1e-4)
    check = unchanged(any_model.to(torch.bfloat16))
    with pytest.raises(KeyboardInterrupt), injection.applied(any_model):
        raise KeyboardInterrupt
    check()


@pytest.mark.parametrize("n_rows", [1, 2, 4])
def test_rows_must_be_as_many_as_the_neurons(gpt2_like, unchanged, n_rows):
    neurons = NeuronSet.from_indices([(0, 3), (0, 5), (1, 7)], (2, 48))
    check = unchanged(gpt2_like)
    rows = rows_replaced(gpt2_like, neurons, torch.zeros(n_rows, 24))
    with pytest.raises(ValueError, match=r"rows must be \(3, 24\)"), rows:
        pass
    check()


def test_inject_does_not_mind_the_callers_gradient_mode(gpt2_like, sequence):
    wanted = inject(gpt2_like, sequence, seed=0, **QUICK)
    with torch.inference_mode():
        assert torch.equal(inject(gpt2_like, sequence, seed=0, **QUICK).rows, wanted.rows)


def test_inject_refuses_a_loss_that_is_not_finite(gpt2_like, sequence):
    gpt2_like.W_E.data[sequence.tokens[0]] = torch.nan
    with pytest.raises(ValueError, match="loss must be finite"):
        inject(gpt2_like, sequence, seed=0, **QUICK)


@pytest.mark.parametrize("after", [0, 3])
def test_inject_interrupted_in_a_hook_leaves_the_model_as_it_was(
    any_model, sequence, unchanged, after
):
    calls = [0]

    def interrupted(act, hook):
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt
        return act

    any_model.add_hook("blocks.1.mlp.hook_post", interrupted)
    check = unchanged(any_model)
    with pytest.raises(KeyboardInterrupt):
        inject(any_model, sequence, seed=0, **QUICK)
    check()


# ---- the rows


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32 - 1), ratio=st.floats(0.02, 1))
def test_rows_are_numpys_draw(gpt2_like, seed, ratio):
    wanted = np.random.RandomState(seed).choice(96, int(96 * ratio), replace=False)
    (neurons,) = draw_sets(NeuronView(gpt2_like), ratio, seed, 1)
    assert {48 * layer + neuron for layer, neuron in neurons} == set(wanted.tolist())


def test_injection_comes_back_from_disk(gpt2_like, sequence, tmp_path):
    injection = inject(gpt2_like, sequence, seed=0, **QUICK)
    injection.save(tmp_path / "i.safetensors")
    loaded = Injection.load(tmp_path / "i.safetensors")
    assert loaded.neurons == injection.neurons
    for name in ("rows", "losses"):
        assert torch.equal(getattr(loaded, name), getattr(injection, name))
    assert (loaded.converged, loaded.sequence_id) == (injection.converged, injection.sequence_id)


def test_whether_it_converged_is_saved_for_any_number(gpt2_like, sequence, tmp_path):
    how = QUICK | {"max_steps": 1, "stop_loss": np.float64(1e-9)}
    injection = inject(gpt2_like, sequence, seed=0, **how)
    injection.save(tmp_path / "rows.safetensors")
    assert Injection.load(tmp_path / "rows.safetensors").converged is injection.converged is False
