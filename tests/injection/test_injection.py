"""Injection: only the chosen rows are trained, and the model gets every bit back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tl_localize import Injection, MemorizedSequence, NeuronSet, inject
from tl_localize.injection import draw_sets
from tl_localize.neurons import NeuronView

QUICK: dict[str, Any] = {"ratio": 0.2, "learning_rate": 0.05, "max_steps": 12}


def whole_loss(model: Any, sequence: MemorizedSequence) -> torch.Tensor:
    log_p = model(sequence.tokens[None])[0].log_softmax(-1)
    return -log_p[:-1].gather(1, sequence.tokens[1:, None]).mean()


def trained_by_hand(
    model: Any, sequence: MemorizedSequence, neurons: NeuronSet, steps: int, learning_rate: float
) -> tuple[Any, list[float]]:
    """Algorithm 1 with torch's Adam on whole matrices and a mask on their gradients; changes the
    model.
    """
    weights = [block.mlp.W_out for block in model.blocks]
    adam = torch.optim.Adam(weights, lr=learning_rate)
    losses = []
    for step in range(steps):
        loss = whole_loss(model, sequence)
        losses.append(float(loss.detach()))
        if step == steps - 1:
            break
        adam.zero_grad()
        loss.backward()
        for weight, mask in zip(weights, neurons.mask, strict=True):
            weight.grad[~mask] = 0
        adam.step()
    model.zero_grad(set_to_none=True)
    return torch.cat(
        [weight.detach()[mask] for weight, mask in zip(weights, neurons.mask, strict=True)]
    ), losses


def test_inject_follows_algorithm_1(any_model: Any, sequence: Any) -> None:
    injection = inject(any_model, sequence, seed=0, **QUICK)
    rows, losses = trained_by_hand(any_model, sequence, injection.neurons, 12, 0.05)
    torch.testing.assert_close(injection.losses, torch.tensor(losses), atol=1e-3, rtol=1e-3)
    assert (injection.rows - rows).abs().mean() < 1e-3


def test_inject_lowers_the_loss(any_model: Any, sequence: Any) -> None:
    losses = inject(any_model, sequence, seed=0, **QUICK).losses
    assert losses[-1] < 0.8 * losses[0]


def test_inject_trains_the_whole_sequence_whatever_its_prefix(
    gpt2_like: Any, sequence: Any
) -> None:
    other = MemorizedSequence(sequence.tokens, 7)
    one, two = (inject(gpt2_like, s, seed=0, **QUICK) for s in (sequence, other))
    assert torch.equal(one.rows, two.rows) and len(one.token_losses) == len(sequence) - 1


def test_inject_stops_below_the_stop_loss(gpt2_like: Any, sequence: Any) -> None:
    full = inject(gpt2_like, sequence, seed=0, **QUICK)
    stop = float(full.losses[5]) + 1e-6
    injection = inject(gpt2_like, sequence, seed=0, stop_loss=stop, **QUICK)
    assert (
        injection.converged and len(injection.losses) == int((full.losses < stop).nonzero()[0]) + 1
    )


def test_inject_that_runs_out_of_steps_says_so(gpt2_like: Any, sequence: Any) -> None:
    injection = inject(gpt2_like, sequence, seed=0, **QUICK)
    assert not injection.converged and len(injection.losses) == 12
    assert "NOT converged" in repr(injection)


@torch.no_grad()
def test_applied_model_has_the_last_loss(any_model: Any, sequence: Any) -> None:
    injection = inject(any_model, sequence, seed=0, **QUICK)
    with injection.applied(any_model):
        assert float(whole_loss(any_model, sequence)) == pytest.approx(
            float(injection.losses[-1]), abs=1e-4
        )


def test_token_losses_average_to_the_last_loss(any_model: Any, sequence: Any) -> None:
    injection = inject(any_model, sequence, seed=0, **QUICK)
    assert float(injection.token_losses.mean()) == pytest.approx(
        float(injection.losses[-1]), abs=1e-5
    )


def test_inject_leaves_the_model_as_it_was(any_model: Any, sequence: Any, unchanged: Any) -> None:
    check = unchanged(any_model)
    inject(any_model, sequence, seed=0, **QUICK)
    check()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_applied_gives_every_bit_back(
    any_model: Any, sequence: Any, unchanged: Any, error: type[BaseException]
) -> None:
    injection = inject(any_model, sequence, seed=0, **QUICK)
    check = unchanged(any_model)

    def body() -> None:
        with injection.applied(any_model):
            raise error

    with pytest.raises(error):
        body()
    check()


def test_applied_changes_the_chosen_rows_only(any_model: Any, sequence: Any) -> None:
    injection = inject(any_model, sequence, seed=0, **QUICK)
    before = any_model.W_out.detach().clone()
    with injection.applied(any_model):
        changed = (any_model.W_out.detach() != before).any(-1)
    assert torch.equal(changed, injection.neurons.mask)


def test_applied_gives_half_precision_back(make_model: Any, sequence: Any, unchanged: Any) -> None:
    model = make_model(1)
    injection = inject(model, sequence, seed=0, **QUICK)
    model.to(torch.bfloat16)
    check = unchanged(model)
    with injection.applied(model):
        pass
    check()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inject_does_not_mind_the_callers_gradient_mode(
    gpt2_like: Any, sequence: Any, mode: Any
) -> None:
    wanted = inject(gpt2_like, sequence, seed=0, **QUICK)
    with mode():
        assert torch.equal(inject(gpt2_like, sequence, seed=0, **QUICK).rows, wanted.rows)


def test_inject_same_seed_same_bits(gpt2_like: Any, sequence: Any) -> None:
    one, two = (inject(gpt2_like, sequence, seed=4, **QUICK) for _ in range(2))
    assert torch.equal(one.rows, two.rows)


def test_inject_refuses_a_loss_that_is_not_finite(gpt2_like: Any, sequence: Any) -> None:
    gpt2_like.W_E.data[sequence.tokens[0]] = torch.nan
    with pytest.raises(ValueError, match="loss must be finite, got nan at step 0"):
        inject(gpt2_like, sequence, seed=0, **QUICK)


@pytest.mark.parametrize("after", [0, 3])
def test_inject_interrupted_in_a_hook_leaves_the_model_as_it_was(
    any_model: Any, sequence: Any, unchanged: Any, after: int
) -> None:
    calls = [0]

    def interrupted(act: torch.Tensor, hook: Any) -> torch.Tensor:
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
def test_rows_are_numpys_draw(gpt2_like: Any, seed: int, ratio: float) -> None:
    view = NeuronView(gpt2_like)
    wanted = np.random.RandomState(seed).choice(96, int(96 * ratio), replace=False)
    assert draw_sets(view, ratio, seed, 1)[0].mask.flatten().nonzero().flatten().tolist() == sorted(
        wanted.tolist()
    )


def test_injection_comes_back_from_disk(gpt2_like: Any, sequence: Any, tmp_path: Path) -> None:
    injection = inject(gpt2_like, sequence, seed=0, **QUICK)
    injection.save(tmp_path / "i.safetensors")
    loaded = Injection.load(tmp_path / "i.safetensors")
    assert all(
        torch.equal(getattr(loaded, name), getattr(injection, name))
        for name in ("rows", "losses", "token_losses")
    )
    assert torch.equal(loaded.neurons.mask, injection.neurons.mask)
    assert (loaded.converged, loaded.sequence_id) == (injection.converged, injection.sequence_id)
