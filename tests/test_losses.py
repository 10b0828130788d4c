"""Memorization loss: by hand, padded, and through a model's own logits."""

import pytest
import torch

from tl_localize import MemorizedSequence, memorization_loss
from tl_localize.metrics import residual, target_logits, unembed
from tl_localize.sequences import SequenceBatch


def by_hand(model, sequence):
    """The definition, token by token, without padding."""
    log_p = model(sequence.tokens[None])[0].log_softmax(-1)
    return -torch.stack(
        [log_p[t - 1, sequence.tokens[t]] for t in range(sequence.n_prefix, len(sequence))]
    ).mean()


@torch.no_grad()
def test_memorization_loss_is_the_mean_over_suffix_tokens(any_model, sequences):
    wanted = torch.stack([by_hand(any_model, sequence) for sequence in sequences])
    torch.testing.assert_close(memorization_loss(any_model, sequences), wanted)


@torch.no_grad()
def test_memorization_loss_of_a_model_that_knows_nothing_is_log_vocab(gpt2_like, sequences):
    gpt2_like.unembed.W_U.zero_()
    gpt2_like.unembed.b_U.zero_()
    losses = memorization_loss(gpt2_like, sequences)
    torch.testing.assert_close(losses, torch.full((4,), 61.0).log())


def test_memorization_loss_has_a_gradient(any_model, sequences):
    memorization_loss(any_model, sequences).sum().backward()
    assert any_model.blocks[0].mlp.W_out.grad.abs().max() > 0


def test_memorization_loss_does_not_see_the_suffix_twice(any_model, sequence):
    other = MemorizedSequence(torch.cat([sequence.tokens, torch.tensor([1, 2])]), sequence.n_prefix)
    batch, longer = SequenceBatch.of([sequence]), SequenceBatch.of([other])
    with torch.no_grad():
        first = target_logits(any_model, batch)
        torch.testing.assert_close(target_logits(any_model, longer)[: len(first)], first)


@torch.no_grad()
def test_unembed_of_the_residual_is_the_models_logits(any_model, sequence):
    resid = residual(any_model, sequence.tokens[None])
    torch.testing.assert_close(unembed(any_model, resid), any_model(sequence.tokens[None]))


@pytest.mark.parametrize("point", ["blocks.1.hook_resid_post", "ln_final.hook_normalized"])
@torch.no_grad()
def test_memorization_loss_sees_the_users_hooks(any_model, sequence, point):
    before = memorization_loss(any_model, [sequence])
    with any_model.hooks(fwd_hooks=[(point, lambda act, hook: torch.zeros_like(act))]):
        wanted = by_hand(any_model, sequence)
        torch.testing.assert_close(memorization_loss(any_model, [sequence])[0], wanted)
    assert (wanted - before).abs() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_memorization_loss_takes_no_token_for_padding(gpt2_like, sequence, side):
    """TransformerLens masks tokens equal to the pad token when the tokenizer pads on the left."""
    wanted = by_hand(gpt2_like, sequence)

    class Tokenizer:
        padding_side = side
        pad_token_id = int(sequence.tokens[0])
        bos_token_id = eos_token_id = None

    gpt2_like.tokenizer = Tokenizer()
    torch.testing.assert_close(memorization_loss(gpt2_like, [sequence])[0], wanted)
