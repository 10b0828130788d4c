"""Memorization loss, accuracy, edit distance and perplexity, against loops that share nothing with
them.
"""

from functools import partial

import numpy as np
import pytest
import torch
from oracles import parameter_of

from tl_localize import (
    MemorizedSequence,
    accuracy,
    check_recited,
    levenshtein,
    memorization_loss,
    metrics,
    perplexity,
    perplexity_base2,
)
from tl_localize.metrics import (
    loss_scale,
    predicted_suffixes,
    residual,
    target_logits,
    unembed,
)
from tl_localize.sequences import SequenceBatch


def spell(ids):
    return "".join(chr(ord("A") + i) for i in ids)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


@torch.no_grad()
def predicted(model, sequence):
    return model(sequence.tokens[None])[0].argmax(-1)[sequence.n_prefix - 1 : -1]


@pytest.fixture
def general():
    return torch.randint(61, (5, 12), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def losses_by_hand(model, tokens):
    log_p = model(tokens).log_softmax(-1)
    right = log_p[:, :-1].gather(-1, tokens[:, 1:, None])
    return (-right[..., 0].mean(1)).tolist()


def test_what_is_no_number_is_not_forgotten(any_model, sequences):
    """NaN is the largest of all numbers to argmax, so a broken model predicts some token."""
    with torch.no_grad():
        parameter_of(any_model.embed.W_E)[int(sequences[1].tokens[-2])] = float("nan")
    with pytest.raises(ValueError, match=r"logits must be numbers, got NaN in .* Use float32"):
        accuracy(any_model, sequences)


def test_a_model_without_neurons_is_measured(make_model, sequences, general):
    model = make_model(1, attn_only=True)
    right = torch.stack([(predicted(model, s) == s.suffix).float().mean() for s in sequences])
    assert torch.equal(accuracy(model, sequences), right)
    losses = losses_by_hand(model, general)
    assert perplexity(model, general) == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert memorization_loss(model, sequences).isfinite().all()


def test_accuracy_is_the_share_of_right_tokens(any_model, sequences):
    half_right = []
    for sequence in sequences:
        even = torch.arange(len(sequence.suffix)) % 2 == 0
        suffix = torch.where(even, predicted(any_model, sequence), sequence.suffix)
        half_right.append(
            MemorizedSequence(torch.cat([sequence.prefix, suffix]), sequence.n_prefix)
        )
    wanted = [float((predicted(any_model, s) == s.suffix).float().mean()) for s in half_right]
    assert accuracy(any_model, half_right).tolist() == pytest.approx(wanted)


def test_one_sequence_is_measured_as_a_list_of_one(gpt2_like, sequence):
    assert torch.equal(accuracy(gpt2_like, sequence), accuracy(gpt2_like, [sequence]))
    found = levenshtein(gpt2_like, sequence, decode=spell)
    assert torch.equal(found, levenshtein(gpt2_like, [sequence], decode=spell))
    assert found.shape == (1,)
    loss = memorization_loss(gpt2_like, sequence)
    assert torch.equal(loss, memorization_loss(gpt2_like, [sequence]))


@pytest.mark.parametrize("n", [10, 20, 50])
def test_an_accuracy_of_nine_tenths_is_enough(gpt2_like, monkeypatch, n):
    sequence = MemorizedSequence(torch.arange(n + 1), 1)
    guess = sequence.suffix.clone()
    monkeypatch.setattr(metrics, "predicted_suffixes", lambda *_: iter([guess]))
    guess[: n // 10] = 0
    check_recited(gpt2_like, [sequence])
    guess[n // 10] = 0
    with pytest.raises(ValueError, match="sequence must be recited"):
        check_recited(gpt2_like, [sequence])


def test_predicted_suffixes_do_not_depend_on_the_batch(any_model, sequences, monkeypatch):
    alone = [predicted_suffixes(any_model, [s])[0].tolist() for s in sequences]
    monkeypatch.setattr(
        "tl_localize.model.memory.tokens_that_fit", lambda *_: 3 * max(map(len, sequences))
    )
    assert [p.tolist() for p in predicted_suffixes(any_model, sequences)] == alone


def test_measures_take_a_generator(gpt2_like, sequences):
    for measure in (accuracy, partial(levenshtein, decode=str)):
        found = measure(gpt2_like, (sequence for sequence in sequences))
        assert torch.equal(found, measure(gpt2_like, sequences))


def test_levenshtein_counts_characters(any_model, sequences):
    wanted = []
    for sequence in sequences:
        guess = [*sequence.prefix.tolist(), *predicted(any_model, sequence).tolist()]
        wanted.append(edit_distance(spell(guess), spell(sequence.tokens.tolist())))
    assert levenshtein(any_model, sequences, spell).tolist() == wanted
    after_first = levenshtein(any_model, sequences, lambda ids: spell(ids)[1:])  # of the prefix
    assert after_first.tolist() == wanted


def test_perplexities_are_powers_of_nats_per_token(any_model, general):
    losses = np.array(losses_by_hand(any_model, general))
    assert perplexity(any_model, general) == pytest.approx(np.exp(losses.mean()), rel=1e-5)
    assert perplexity_base2(any_model, general) == pytest.approx((2**losses).mean(), rel=1e-5)


def test_perplexity_does_not_depend_on_the_batch(any_model, general, monkeypatch):
    whole = perplexity(any_model, general)
    monkeypatch.setattr("tl_localize.model.memory.tokens_that_fit", lambda *_: 24)
    assert perplexity(any_model, general) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    "measure",
    [
        accuracy,
        lambda m, s: levenshtein(m, s, spell),
        lambda m, s: torch.tensor(perplexity(m, s[0].tokens[None])),
    ],
)
def test_metrics_see_hooks_and_leave_nothing_behind(gpt2_like, make_sequences, unchanged, measure):
    check = unchanged(gpt2_like)
    sequences = [
        MemorizedSequence(torch.cat([s.prefix, predicted(gpt2_like, s)]), s.n_prefix)
        for s in make_sequences((20, 19), (18, 17), (16, 15))
    ]
    before = measure(gpt2_like, sequences)
    with gpt2_like.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda act, hook: -act)]):
        assert not torch.equal(measure(gpt2_like, sequences), before)
    assert not before.requires_grad
    check()


def test_perplexity_takes_the_unsigned_tokens_of_files(gpt2_like, general):
    assert perplexity(gpt2_like, general.to(torch.uint16)) == perplexity(gpt2_like, general)


def test_perplexity_of_half_precision_sums_in_float32(make_model, general):
    model = make_model(1)
    wanted = perplexity(model, general)
    assert perplexity(model.to(torch.bfloat16), general) == pytest.approx(wanted, rel=0.05)


def test_perplexity_base2_of_many_rows_averages_within_128_chunks_first(monkeypatch, gpt2_like):
    """As the authors' ``loss.chunk(128)``: 256 rows are 128 means of two, 300 rows are 100 means of
    three.
    """
    for n, size in ((64, 1), (256, 2), (300, 3)):
        losses = torch.linspace(1, 5, n, dtype=torch.float64)
        monkeypatch.setattr(metrics, "sequence_losses", lambda *_, losses=losses: losses)
        expected = (2 ** losses.view(-1, size).mean(1)).mean()
        found = perplexity_base2(gpt2_like, torch.zeros(1, 2, dtype=torch.long))
        assert found == pytest.approx(float(expected), rel=1e-12)


# Losses


def by_hand(model, sequence):
    """The definition, token by token, without padding."""
    log_p = model(sequence.tokens[None])[0].log_softmax(-1)
    return -torch.stack(
        [log_p[t - 1, sequence.tokens[t]] for t in range(sequence.n_prefix, len(sequence))]
    ).mean()


@torch.no_grad()
def test_truth_values_are_no_tokens(gpt2_like, general):
    with pytest.raises(ValueError, match="tokens must be token ids"):
        perplexity(gpt2_like, general > 5)


def test_memorization_loss_is_the_mean_over_suffix_tokens(any_model, sequences):
    wanted = torch.stack([by_hand(any_model, sequence) for sequence in sequences])
    torch.testing.assert_close(memorization_loss(any_model, sequences), wanted)


@torch.no_grad()
def test_memorization_loss_of_a_model_that_knows_nothing_is_log_vocab(gpt2_like, sequences):
    gpt2_like.unembed.W_U.zero_()
    gpt2_like.unembed.b_U.zero_()
    losses = memorization_loss(gpt2_like, sequences)
    torch.testing.assert_close(losses, torch.full((4,), 61.0).log())


def test_only_in_float16_are_gradients_scaled(gpt2_like):
    scales = [loss_scale(gpt2_like.to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    assert scales == [1, 2**12]


def test_memorization_loss_has_a_gradient(any_model, sequences):
    memorization_loss(any_model, sequences).sum().backward()
    assert parameter_of(any_model.blocks[0].mlp.W_out).grad.abs().max() > 0


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
