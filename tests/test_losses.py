"""Memorization loss: by hand, padded, and through a model's own logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_localize import MemorizedSequence, memorization_loss
from tl_localize.losses import residual, target_logits, unembed
from tl_localize.sequences import SequenceBatch


def by_hand(model: Any, sequence: MemorizedSequence) -> torch.Tensor:
    """The definition, token by token, without padding."""
    log_p = model(sequence.tokens[None])[0].log_softmax(-1)
    return -torch.stack(
        [log_p[t - 1, sequence.tokens[t]] for t in range(sequence.n_prefix, len(sequence))]
    ).mean()


@torch.no_grad()
def test_memorization_loss_is_the_mean_over_suffix_tokens(any_model: Any, sequences: Any) -> None:
    wanted = torch.stack([by_hand(any_model, sequence) for sequence in sequences])
    torch.testing.assert_close(memorization_loss(any_model, sequences), wanted)


@torch.no_grad()
def test_memorization_loss_of_a_model_that_knows_nothing_is_log_vocab(
    gpt2_like: Any, sequences: Any
) -> None:
    gpt2_like.unembed.W_U.zero_()
    gpt2_like.unembed.b_U.zero_()
    losses = memorization_loss(gpt2_like, sequences)
    torch.testing.assert_close(losses, torch.full((4,), 61.0).log())


def test_memorization_loss_has_a_gradient(any_model: Any, sequences: Any) -> None:
    memorization_loss(any_model, sequences).sum().backward()
    assert any_model.blocks[0].mlp.W_out.grad.abs().max() > 0


def test_memorization_loss_does_not_see_the_suffix_twice(any_model: Any, sequence: Any) -> None:
    other = MemorizedSequence(torch.cat([sequence.tokens, torch.tensor([1, 2])]), sequence.n_prefix)
    batch, longer = SequenceBatch.of([sequence]), SequenceBatch.of([other])
    with torch.no_grad():
        first = target_logits(any_model, batch)
        torch.testing.assert_close(target_logits(any_model, longer)[: len(first)], first)


@torch.no_grad()
def test_unembed_of_the_residual_is_the_models_logits(any_model: Any, sequence: Any) -> None:
    resid = residual(any_model, sequence.tokens[None])
    torch.testing.assert_close(unembed(any_model, resid), any_model(sequence.tokens[None]))


@torch.no_grad()
def test_unembed_keeps_leading_axes(any_model: Any) -> None:
    resid = torch.randn(2, 3, 4, any_model.cfg.d_model)
    torch.testing.assert_close(
        unembed(any_model, resid)[1, 2, 3], unembed(any_model, resid[1, 2, 3])
    )


@torch.no_grad()
def test_memorization_loss_sees_the_users_hooks(any_model: Any, sequence: Any) -> None:
    before = memorization_loss(any_model, [sequence])
    with any_model.hooks(
        fwd_hooks=[("blocks.1.hook_resid_post", lambda act, hook: torch.zeros_like(act))]
    ):
        assert (memorization_loss(any_model, [sequence]) - before).abs() > 1e-3


@torch.no_grad()
def test_memorization_loss_sees_hooks_above_the_last_layer(any_model: Any, sequence: Any) -> None:
    with any_model.hooks(
        fwd_hooks=[("ln_final.hook_normalized", lambda act, hook: torch.zeros_like(act))]
    ):
        wanted = by_hand(any_model, sequence)
        torch.testing.assert_close(memorization_loss(any_model, [sequence])[0], wanted)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_memorization_loss_takes_no_token_for_padding(
    gpt2_like: Any, sequence: Any, side: str
) -> None:
    """TransformerLens masks tokens equal to the pad token when the tokenizer pads on the left."""
    wanted = by_hand(gpt2_like, sequence)

    class Tokenizer:
        padding_side = side
        pad_token_id = int(sequence.tokens[0])
        bos_token_id = eos_token_id = None

    gpt2_like.tokenizer = Tokenizer()
    torch.testing.assert_close(memorization_loss(gpt2_like, [sequence])[0], wanted)
