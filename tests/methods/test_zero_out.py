"""Zero-Out: from the layer up against the definition."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import ATTENTION, in_double, plain_zero_out, times, turned

from tl_localize import Attribution, MemorizedSequence, NeuronSet, ZeroOut
from tl_localize.methods import zero_out


def agree(model, sequence, method=None, every=1):
    """Both in float64, where nothing but a different number could be a difference; of every so many
    neurons.
    """
    in_double(model)
    expected = plain_zero_out(model, sequence, every)
    assert expected.abs().max() > 1e-3, "a test on zeros shows nothing"
    # the scores are kept in float32
    assert ((method or ZeroOut())(model, sequence).values[:, ::every] - expected).abs().max() < 2e-7


def test_zero_out_equals_definition(any_model, sequence):
    agree(any_model, sequence)


@given(length=st.integers(2, 16), share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_zero_out_equals_definition_at_any_length(any_model, length, share, seed):
    tokens = torch.randint(
        any_model.cfg.d_vocab, (length,), generator=torch.Generator().manual_seed(seed)
    )
    agree(any_model, MemorizedSequence(tokens, 1 + int(share * (length - 2))), every=5)


def test_zero_out_equals_definition_where_positions_enter_every_layer(make_model, make_sequences):
    model = make_model(7, positional_embedding_type="shortformer")
    with pytest.warns(UserWarning, match="the slow way"):
        agree(model, make_sequences((8, 2), seed=3)[0], every=5)


@pytest.mark.parametrize("attention", list(ATTENTION))
def test_zero_out_equals_definition_for_attention(make_model, make_sequences, attention):
    agree(make_model(7, **ATTENTION[attention]), make_sequences((8, 2), seed=3)[0], every=5)


@pytest.mark.parametrize(
    ("point", "layer"),
    [
        ("hook_resid_pre", 0),
        ("hook_mlp_out", 1),
        ("hook_resid_post", 2),
        ("mlp.hook_pre", 0),
        ("mlp.hook_post", 1),
        ("attn.hook_z", 2),
        ("attn.hook_pattern", 1),
    ],
)
def test_zero_out_serves_hooks_of_the_user(neox_like, sequence, point, layer):
    hook = partial(times, factor=0.7) if point == "attn.hook_pattern" else turned
    with neox_like.hooks(fwd_hooks=[(f"blocks.{layer}.{point}", hook)]):
        agree(neox_like, sequence, every=7)


def test_zero_out_scores_dead_neuron_zero(gpt2_like, sequence):
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[0, ::2] = mask[1, ::3] = True
    with NeuronSet(mask).dropped_out(gpt2_like):
        agree(gpt2_like, sequence, every=5)
        assert ZeroOut()(gpt2_like, sequence).values[mask].abs().max() == 0


@pytest.mark.parametrize("batch_tokens", [1, 50, 10_000])
def test_zero_out_does_not_depend_on_batch(llama_like, sequence, batch_tokens):
    agree(llama_like, sequence, replace(ZeroOut(), batch_tokens=batch_tokens), every=5)


def test_zero_out_screened_at_one_is_exact(gpt2_like, sequence):
    agree(gpt2_like, sequence, ZeroOut(screen=1.0), every=5)


def test_zero_out_screened_says_which_scores_are_exact(neox_like, sequence):
    scores = ZeroOut(screen=0.2, screen_sample=5)(neox_like, sequence)
    exact, estimates = ZeroOut()(neox_like, sequence), Attribution()(neox_like, sequence)
    assert exact.exact is None and scores.exact is not None
    assert scores.exact.mask.sum(1).tolist() == [11 + 5] * 3
    assert (
        scores.values - torch.where(scores.exact.mask, exact.values, estimates.values)
    ).abs().max() < 1e-6
    assert (scores.exact.mask | ~estimates.top_k(0.1).mask).all()


def test_zero_out_screens_by_estimate_and_by_length_in_turn():
    estimates = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    lengths = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    assert [
        zero_out.highest_of_both(estimates, lengths, n)[0].nonzero().flatten().tolist()
        for n in (1, 2, 4, 6)
    ] == [
        [0],
        [0, 5],
        [0, 1, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]


def test_zero_out_screens_the_neuron_that_writes_most_and_the_one_with_the_highest_estimate(
    llama_like, sequence
):
    scores = ZeroOut(screen=0.1, screen_sample=0)(llama_like, sequence)
    _, cache = llama_like.run_with_cache(sequence.tokens[None])
    written = cache["blocks.1.mlp.hook_post"][0].norm(dim=0) * llama_like.W_out[1].norm(dim=-1)
    highest = Attribution()(llama_like, sequence).values[1].argmax()
    assert scores.exact is not None and scores.exact.mask[1, [written.argmax(), highest]].all()


def test_the_sample_of_a_screen_follows_the_seed(gpt2_like, sequence):
    screened = [ZeroOut(screen=0.1, screen_sample=5, seed=seed) for seed in (0, 1)]
    first, second = (method(gpt2_like, sequence).exact.mask for method in screened)
    assert not torch.equal(first, second)
