"""Activation Contrast: a ratio of root mean squares, of the text and of others."""

from dataclasses import replace
from functools import wraps

import pytest
import torch

from tl_localize import ActivationContrast, Attribution, MemorizedSequence, SelectivePruning
from tl_localize.methods import activation_contrast, contrast


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(0)
    return [MemorizedSequence(torch.randint(50, (n,), generator=generator), 1) for n in (7, 5, 9)]


def plain(model, sequence):
    _, cache = model.run_with_cache(sequence.tokens[None])
    acts = [cache[f"blocks.{layer}.mlp.hook_post"][0, :-1] for layer in range(2)]
    return torch.stack([act.square().mean(0).sqrt() for act in acts])


def cosines(model, sequence):
    rows = [block.mlp.W_out for block in model.blocks]
    with torch.enable_grad():
        logits = model(sequence.tokens[None])[0, :-1].log_softmax(-1)
        log_probs = logits[torch.arange(len(logits)), sequence.tokens[1:]]
        odds = (log_probs - (-log_probs.exp()).log1p()).mean()
        gradients = torch.autograd.grad(odds, rows)
    return torch.cosine_similarity(torch.stack(rows), torch.stack(gradients), -1).detach()


@pytest.mark.parametrize("alignment", [0, 0.5])
def test_scores_are_ratios_to_the_other_texts_times_alignment(gpt2_like, texts, alignment):
    listed = tuple(tuple(text.tokens.tolist()) for text in texts)
    method = ActivationContrast(texts=listed, alignment=alignment)
    for k, scores in enumerate(method.map(gpt2_like, texts)):
        others = [plain(gpt2_like, text) for i, text in enumerate(texts) if i != k]
        expected = plain(gpt2_like, texts[k]) / torch.stack(others).mean(0)
        z = gpt2_like.cfg.d_model**0.5 * cosines(gpt2_like, texts[k])
        torch.testing.assert_close(scores.values, expected * (1 + alignment * z))


def test_written_texts_are_kept_until_the_model_computes_something_else(
    make_model, texts, monkeypatch
):
    gpt2_like = make_model(0)
    write = contrast.write_texts
    seeds = []

    @wraps(write)
    def counted(neurons, seed):
        seeds.append(seed)
        return write(neurons, seed)

    monkeypatch.setattr(contrast, "write_texts", counted)
    method = ActivationContrast(alignment=0)
    before = method(gpt2_like, texts[0]).values
    for again in (method, ActivationContrast(alignment=0.5), Attribution(contrast=1)):
        again(gpt2_like, texts[1])
    assert torch.equal(before, method(gpt2_like, texts[0]).values)
    assert seeds == [0]
    replace(method, seed=1)(gpt2_like, texts[0])
    assert seeds == [0, 1]
    weight = gpt2_like.blocks[0].mlp.W_in
    own = weight.detach().clone()
    weight.data[:, :7] *= 2
    changed = method(gpt2_like, texts[0]).values
    weight.data.copy_(own)
    fresh = plain(gpt2_like, texts[0])
    assert not torch.allclose(changed[0, :7] / before[0, :7], torch.ones(7))
    assert torch.equal(method(gpt2_like, texts[0]).values, before)
    assert fresh.shape == before.shape and len(seeds) > 2


def test_listed_texts_are_scored_once_for_all_batches(gpt2_like, texts, monkeypatch):
    measure = activation_contrast.strengths
    scored = []

    @wraps(measure)
    def counted(neurons, given):
        scored.append(len(given))
        return measure(neurons, given)

    monkeypatch.setattr(activation_contrast, "strengths", counted)
    listed = tuple(tuple(text.tokens.tolist()) for text in texts)
    for texts_now in (listed, listed[1:]):
        method = ActivationContrast(texts=texts_now)
        list(method.map(gpt2_like, texts, batch_size=1))
    assert sorted(scored) == [*[1] * 6, 2, 3]


def test_lists_and_tensors_are_as_good_as_tuples(texts):
    tuples = tuple(tuple(text.tokens.tolist()) for text in texts)
    wanted = ActivationContrast(texts=tuples)
    assert ActivationContrast(texts=[list(text) for text in tuples]) == wanted
    assert ActivationContrast(texts=[text.tokens for text in texts]) == wanted


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("ab", "cd"), TypeError, "texts must be the token ids of some texts"),
        ((1, 2), TypeError, "texts must be the token ids of some texts"),
        (((1, 2.5),), TypeError, "texts must be the token ids of some texts"),
        (((1, 61), (1, 2)), ValueError, r"got 61 in MemorizedSequence\('texts\[0\]'"),
        (((1,) * 33, (1, 2)), ValueError, "sequence must be at most n_ctx=32"),
    ],
)
def test_other_texts_that_the_model_cannot_read(gpt2_like, given, error, message):
    sequence = MemorizedSequence(torch.tensor([1, 2, 3]), 1)
    with pytest.raises(error, match=message):
        ActivationContrast(texts=given)(gpt2_like, sequence)


@pytest.mark.parametrize("texts", [((1,),), ()])
def test_a_list_needs_another_text(gpt2_like, texts):
    sequence = MemorizedSequence(torch.tensor([1, 2, 3]), 1)
    with pytest.raises(ValueError, match="texts"):
        ActivationContrast(texts=texts or ((1, 2, 3),))(gpt2_like, sequence)


@pytest.mark.parametrize("method", [ActivationContrast, SelectivePruning])
def test_a_longer_text_that_holds_the_scored_one_is_left_out(gpt2_like, texts, method):
    sequence, other, _ = texts
    longer = (3, *sequence.tokens.tolist(), 4)
    others = (tuple(other.tokens.tolist()),)
    found = method(texts=(longer, *others))(gpt2_like, sequence)
    torch.testing.assert_close(found.values, method(texts=others)(gpt2_like, sequence).values)
