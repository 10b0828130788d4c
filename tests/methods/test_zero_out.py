"""Zero-Out: from the layer up against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import ATTENTION, ONE_BY_ONE, loss_of, plain_zero_out, times, turned

from tl_localize import Attribution, MemorizedSequence, NeuronScores, NeuronSet, ZeroOut
from tl_localize.methods import zero_out
from tl_localize.methods.zero_out import ScreenedScores


def agree(model: Any, sequence: MemorizedSequence, method: ZeroOut | None = None) -> None:
    expected = plain_zero_out(model, sequence)
    with torch.no_grad():
        loss = float(loss_of(model, sequence.tokens, sequence.n_prefix))
    assert expected.abs().max() > 1e-3, "a test on zeros shows nothing"
    # A score is a difference of losses, of which float32 holds six digits: 1e-6, or a millionth of the loss where it is above one nat
    # and rests on few tokens.
    assert ((method or ZeroOut())(model, sequence).values - expected).abs().max() < 1e-6 * (
        max(1.0, loss) if len(sequence.suffix) < 6 else 1.5
    )


def test_zero_out_equals_definition(any_model: Any, sequence: Any) -> None:
    agree(any_model, sequence)


@given(length=st.integers(2, 16), share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_zero_out_equals_definition_at_any_length(any_model: Any, length: int, share: float, seed: int) -> None:
    tokens = torch.randint(any_model.cfg.d_vocab, (length,), generator=torch.Generator().manual_seed(seed))
    agree(any_model, MemorizedSequence(tokens, 1 + int(share * (length - 2))))


@pytest.mark.parametrize("attention", list(ATTENTION))
def test_zero_out_equals_definition_for_attention(make_model: Callable[..., Any], make_sequences: Any, attention: str) -> None:
    agree(make_model(7, **ATTENTION[attention]), make_sequences((8, 2), seed=3)[0])


@pytest.mark.parametrize("attention", list(ONE_BY_ONE))
def test_zero_out_serves_what_integrated_gradients_takes_slowly(
    make_model: Callable[..., Any], make_sequences: Any, attention: str
) -> None:
    agree(make_model(8, **ONE_BY_ONE[attention]), make_sequences((8, 2), seed=3)[0])


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(
    "point", ["hook_resid_pre", "hook_mlp_out", "hook_resid_post", "mlp.hook_pre", "mlp.hook_post", "attn.hook_z", "attn.hook_pattern"]
)
def test_zero_out_serves_hooks_of_the_user(neox_like: Any, sequence: Any, point: str, layer: int) -> None:
    hook = partial(times, factor=0.7) if point == "attn.hook_pattern" else turned
    with neox_like.hooks(fwd_hooks=[(f"blocks.{layer}.{point}", hook)]):
        agree(neox_like, sequence)


def test_zero_out_scores_dead_neuron_zero(gpt2_like: Any, sequence: Any) -> None:
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[0, ::2] = mask[1, ::3] = True
    with NeuronSet(mask).dropped_out(gpt2_like):
        agree(gpt2_like, sequence)
        assert ZeroOut()(gpt2_like, sequence).values[mask].abs().max() < 1e-6


@pytest.mark.parametrize("batch_tokens", [1, 50, 10_000])
def test_zero_out_does_not_depend_on_batch(llama_like: Any, sequence: Any, batch_tokens: int) -> None:
    agree(llama_like, sequence, replace(ZeroOut(), batch_tokens=batch_tokens))


def test_zero_out_equals_row_of_zeros(gpt2_like: Any, sequence: Any) -> None:
    score = ZeroOut()(gpt2_like, sequence).values[1, 7]
    with torch.no_grad():
        before = loss_of(gpt2_like, sequence.tokens, sequence.n_prefix)
        gpt2_like.blocks[1].mlp.W_out[7].zero_()
        after = loss_of(gpt2_like, sequence.tokens, sequence.n_prefix)
    assert float(score) == pytest.approx(float(after - before), abs=1e-6)


def test_zero_out_leaves_model_as_it_was(any_model: Any, sequence: Any, unchanged: Any) -> None:
    check = unchanged(any_model)
    ZeroOut()(any_model, sequence)
    check()


def test_zero_out_screened_at_one_is_exact(gpt2_like: Any, sequence: Any) -> None:
    agree(gpt2_like, sequence, ZeroOut(screen=1.0))


def test_zero_out_screened_says_which_scores_are_exact(neox_like: Any, sequence: Any) -> None:
    method = ZeroOut(screen=0.2, screen_sample=5)
    result = method.screened(neox_like, sequence)
    exact, estimates = ZeroOut()(neox_like, sequence).values, Attribution()(neox_like, sequence).values
    assert result.top.mask.sum(1).tolist() == [11] * 3 and result.sample.mask.sum(1).tolist() == [5] * 3
    assert len(result.exact) == 48
    mask = result.exact.mask
    assert (result.scores.values - torch.where(mask, exact, estimates)).abs().max() < 1e-6
    assert estimates[result.top.mask].min() > estimates.min()
    assert result.largest_error == pytest.approx(float((exact - estimates).abs()[result.sample.mask].max()), abs=1e-6)
    assert torch.equal(method(neox_like, sequence).values, result.scores.values)


def screened_by_hand(sample_scores: list[float]) -> ScreenedScores:
    """One layer of 20 neurons: 0 to 3 were screened and score 4, 3, 2, 1; the sample follows; the rest were estimated at zero."""
    values, top, sample = torch.zeros(1, 20), torch.zeros(1, 20, dtype=torch.bool), torch.zeros(1, 20, dtype=torch.bool)
    values[0, :4], top[0, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0]), True
    values[0, 4 : 4 + len(sample_scores)], sample[0, 4 : 4 + len(sample_scores)] = torch.tensor(sample_scores), True
    return ScreenedScores(NeuronScores(values), torch.zeros(1, 20), NeuronSet(top), NeuronSet(sample))


def test_screened_scores_bound_what_was_missed() -> None:
    result = screened_by_hand([0.5, 0.1, 0.2, 0.3, 0.4, 0.0, 0.1, 0.2, 0.3, 0.4])
    found, bound = result.missed(0.1)
    assert found == 0 and bound == pytest.approx(1 - 0.05 ** (1 / 10))  # none of ten: (1 - share) ** 10 = 0.05
    assert result.largest_error == 0.5
    found, bound = screened_by_hand([3.5] + [0.0] * 9).missed(0.1)
    assert found == 1 and bound > 0.3
    assert screened_by_hand([5.0]).missed(0.1) == (1, 1.0)


def test_screened_scores_reject_more_than_was_screened() -> None:
    with pytest.raises(ValueError, match=r"screened share, 0\.2"):
        screened_by_hand([0.0]).missed(0.5)


def test_zero_out_rejects_screen_outside_fraction(gpt2_like: Any, sequence: Any) -> None:
    with pytest.raises(ValueError, match="screen must be a fraction"):
        ZeroOut(screen=5.0)
    with pytest.raises(ValueError, match="screen must be a fraction"):
        ZeroOut().screened(gpt2_like, sequence)
    with pytest.raises(ValueError, match="screen_sample must be a whole number"):
        ZeroOut(screen_sample=-1)


def test_zero_out_goes_on_with_half_the_batch_when_memory_runs_out(gpt2_like: Any, sequence: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = zero_out.token_losses
    monkeypatch.setattr(zero_out, "token_losses", lambda n, resid, s: whole(n, resid, s) if len(resid) < 9 else out_of_memory())
    with pytest.warns(RuntimeWarning, match="Out of memory"):
        agree(gpt2_like, sequence)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")
