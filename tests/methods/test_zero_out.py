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
from oracles import ATTENTION, ONE_BY_ONE, in_double, loss_of, plain_zero_out, times, turned

from tl_localize import Attribution, MemorizedSequence, NeuronSet, ZeroOut
from tl_localize.methods import zero_out
from tl_localize.methods.zero_out import missed_share
from tl_localize.neurons import NeuronView


def agree(
    model: Any, sequence: MemorizedSequence, method: ZeroOut | None = None, every: int = 1
) -> None:
    """Both in float64, where nothing but a different number could be a difference; of every so many
    neurons.
    """
    in_double(model)
    expected = plain_zero_out(model, sequence, every)
    assert expected.abs().max() > 1e-3, "a test on zeros shows nothing"
    # the scores are kept in float32
    assert ((method or ZeroOut())(model, sequence).values[:, ::every] - expected).abs().max() < 2e-7


def test_zero_out_equals_definition(any_model: Any, sequence: Any) -> None:
    agree(any_model, sequence)


def test_zero_out_in_float32_equals_definition_in_float64(
    any_model: Any, make_sequences: Any
) -> None:
    for sequence in make_sequences((16, 1), (12, 4), (16, 8)):
        found = ZeroOut()(any_model.float(), sequence).values[:, ::3]
        assert (found - plain_zero_out(in_double(any_model), sequence, every=3)).abs().max() < 1e-6
        any_model.cfg.dtype = torch.float32


@given(length=st.integers(2, 16), share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_zero_out_equals_definition_at_any_length(
    any_model: Any, length: int, share: float, seed: int
) -> None:
    tokens = torch.randint(
        any_model.cfg.d_vocab, (length,), generator=torch.Generator().manual_seed(seed)
    )
    agree(any_model, MemorizedSequence(tokens, 1 + int(share * (length - 2))), every=5)


@pytest.mark.parametrize("attention", list(ATTENTION))
def test_zero_out_equals_definition_for_attention(
    make_model: Callable[..., Any], make_sequences: Any, attention: str
) -> None:
    agree(make_model(7, **ATTENTION[attention]), make_sequences((8, 2), seed=3)[0], every=5)


@pytest.mark.parametrize("attention", list(ONE_BY_ONE))
def test_zero_out_serves_what_integrated_gradients_takes_slowly(
    make_model: Callable[..., Any], make_sequences: Any, attention: str
) -> None:
    agree(make_model(8, **ONE_BY_ONE[attention]), make_sequences((8, 2), seed=3)[0], every=5)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(
    "point",
    [
        "hook_resid_pre",
        "hook_mlp_out",
        "hook_resid_post",
        "mlp.hook_pre",
        "mlp.hook_post",
        "attn.hook_z",
        "attn.hook_pattern",
    ],
)
def test_zero_out_serves_hooks_of_the_user(
    neox_like: Any, sequence: Any, point: str, layer: int
) -> None:
    hook = partial(times, factor=0.7) if point == "attn.hook_pattern" else turned
    with neox_like.hooks(fwd_hooks=[(f"blocks.{layer}.{point}", hook)]):
        agree(neox_like, sequence, every=7)


def test_zero_out_scores_dead_neuron_zero(gpt2_like: Any, sequence: Any) -> None:
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[0, ::2] = mask[1, ::3] = True
    with NeuronSet(mask).dropped_out(gpt2_like):
        agree(gpt2_like, sequence, every=5)
        assert ZeroOut()(gpt2_like, sequence).values[mask].abs().max() == 0


@pytest.mark.parametrize("batch_tokens", [1, 50, 10_000])
def test_zero_out_does_not_depend_on_batch(
    llama_like: Any, sequence: Any, batch_tokens: int
) -> None:
    agree(llama_like, sequence, replace(ZeroOut(), batch_tokens=batch_tokens), every=5)


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
    agree(gpt2_like, sequence, ZeroOut(screen=1.0), every=5)


def test_zero_out_screened_says_which_scores_are_exact(neox_like: Any, sequence: Any) -> None:
    scores = ZeroOut(screen=0.2, screen_sample=5)(neox_like, sequence)
    exact, estimates = ZeroOut()(neox_like, sequence), Attribution()(neox_like, sequence)
    assert exact.exact is None and exact.missed is None and scores.exact is not None
    assert scores.exact.mask.sum(1).tolist() == [11 + 5] * 3
    assert (
        scores.values - torch.where(scores.exact.mask, exact.values, estimates.values)
    ).abs().max() < 1e-6
    assert (scores.exact.mask | ~estimates.top_k(0.1).mask).all()
    assert "48 exact, the others estimated, missed <= " in repr(scores)


def test_zero_out_screens_by_estimate_and_by_length_in_turn() -> None:
    estimates, lengths = (
        torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]]),
        torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]),
    )
    assert [
        zero_out.screened(estimates, lengths, n)[0].nonzero().flatten().tolist()
        for n in (1, 2, 4, 6)
    ] == [
        [0],
        [0, 5],
        [0, 1, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]


def test_zero_out_length_of_what_is_written_by_hand(llama_like: Any, sequence: Any) -> None:
    lengths = zero_out.output_norms(NeuronView(llama_like), sequence)
    _, cache = llama_like.run_with_cache(sequence.tokens[None])
    contribution = cache["blocks.1.mlp.hook_post"][0, :, 7, None] * llama_like.W_out[1, 7]
    assert float(lengths[1, 7]) == pytest.approx(float(contribution.detach().norm()), rel=1e-5)


def test_zero_out_screens_the_neuron_that_writes_most_and_the_one_with_the_highest_estimate(
    neox_like: Any, sequence: Any
) -> None:
    estimates, lengths = (
        Attribution()(neox_like, sequence).values,
        zero_out.output_norms(NeuronView(neox_like), sequence),
    )
    scores = ZeroOut(screen=0.1, screen_sample=0)(neox_like, sequence)
    assert scores.exact is not None
    longest = lengths.argmax(1)
    assert (
        scores.exact.mask[torch.arange(3), longest].all()
        and scores.exact.mask[torch.arange(3), estimates.argmax(1)].all()
    )


def test_zero_out_screened_draws_the_same_sample_again(neox_like: Any, sequence: Any) -> None:
    first, again, other = (
        ZeroOut(screen=0.2, screen_sample=5, seed=seed)(neox_like, sequence).exact
        for seed in (0, 0, 1)
    )
    assert torch.equal(first.mask, again.mask) and not torch.equal(first.mask, other.mask)


def missed_by_hand(sample_scores: list[float]) -> float:
    """Bound for one layer of 300 neurons: 0 to 3 were screened and score 4, 3, 2, 1; the sample
    follows; the top 1 % are three.
    """
    values, top, sample = (
        torch.zeros(1, 300),
        torch.zeros(1, 300, dtype=torch.bool),
        torch.zeros(1, 300, dtype=torch.bool),
    )
    values[0, :4], top[0, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0]), True
    values[0, 4 : 4 + len(sample_scores)], sample[0, 4 : 4 + len(sample_scores)] = (
        torch.tensor(sample_scores),
        True,
    )
    return missed_share(values, top, sample)


def test_missed_share_by_hand() -> None:
    # none of ten: (1 - share) ** 10 = 0.05
    assert missed_by_hand([1.5] + [0.0] * 9) == pytest.approx(1 - 0.05 ** (1 / 10))
    assert missed_by_hand([2.5] + [0.0] * 9) > 0.3
    assert missed_by_hand([5.0]) == missed_by_hand([]) == 1.0
    assert (
        missed_share(
            torch.zeros(1, 4),
            torch.ones(1, 4, dtype=torch.bool),
            torch.zeros(1, 4, dtype=torch.bool),
        )
        == 0.0
    )


def test_zero_out_rejects_screen_outside_fraction() -> None:
    with pytest.raises(ValueError, match="screen must be a fraction"):
        ZeroOut(screen=5.0)
    with pytest.raises(ValueError, match="screen_sample must be a whole number"):
        ZeroOut(screen_sample=-1)


def test_zero_out_goes_on_with_half_the_batch_when_memory_runs_out(
    gpt2_like: Any, sequence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = zero_out.token_losses
    monkeypatch.setattr(
        zero_out,
        "token_losses",
        lambda n, resid, s: whole(n, resid, s) if len(resid) < 9 else out_of_memory(),
    )
    with pytest.warns(RuntimeWarning, match="Out of memory"):
        agree(gpt2_like, sequence, every=5)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")
