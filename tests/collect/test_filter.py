"""The filter finds the same sequences as each criterion computed for each sequence by itself."""

import numpy as np
import pytest
import torch
from rapidfuzz.distance import Levenshtein
from recited import CRITERIA, letters, recite

from tl_localize import MemorizedSequence, accuracy
from tl_localize.collect import Criteria, collect_memorized
from tl_localize.collect.criteria import DISTANT, INACCURATE, REPEATED
from tl_localize.model.forward import generate


def by_the_book(model, rows, criteria):
    """Index -> accuracy and distance of what passes, each criterion computed for each sequence by
    itself.
    """
    passed = {}
    continued = recite(model, torch.stack(rows)[:, : criteria.n_prefix], criteria.n_suffix)
    for i, (tokens, generated) in enumerate(zip(rows, continued, strict=True)):
        sequence = MemorizedSequence(tokens, criteria.n_prefix)
        distance = Levenshtein.distance(letters(generated.tolist()), letters(tokens.tolist()))
        distinct = min(
            len(set(sequence.suffix.tolist())), len(set(generated[criteria.n_prefix :].tolist()))
        )
        share = float(accuracy(model, [sequence])[0])
        if (
            share >= criteria.min_accuracy - 1e-6
            and distance <= criteria.max_distance
            and distinct >= criteria.min_distinct
        ):
            passed[i] = (share, distance)
    return passed


@pytest.mark.parametrize(
    ("any_model", "batch_size"),
    [("gpt2_like", 30), ("neox_like", 3), ("llama_like", 7)],
    indirect=["any_model"],
)
def test_collect_finds_what_the_criteria_say(any_model, corpus, batch_size, monkeypatch):
    monkeypatch.setattr("tl_localize.collect.filter.rows_that_fit", lambda *a, **k: batch_size)
    rows = corpus(any_model)
    expected = by_the_book(any_model, rows, CRITERIA)
    assert 3 < len(expected) < 27
    everything = Criteria(**{**vars(CRITERIA), "max_jaccard": 1})
    found = collect_memorized(any_model, rows, everything, n_dev=0, decode=letters)
    assert [sequence.id for sequence in found.sequences] == [f"row-{i}" for i in expected]
    assert found.frame["accuracy"].tolist() == pytest.approx(
        [share for share, _ in expected.values()]
    )
    assert found.frame["distance"].tolist() == [distance for _, distance in expected.values()]
    assert all(
        torch.equal(s.tokens, rows[i]) for s, i in zip(found.sequences, expected, strict=True)
    )
    assert found.report.n_in == 30
    assert found.report.n_out == len(expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_generation_takes_the_pad_token_for_text(side, shipped_model, monkeypatch):
    """``model.generate`` masks it at one end of the context or the other, so it gives other tokens
    here.
    """
    model = shipped_model()
    monkeypatch.setattr(model.tokenizer, "padding_side", side)
    pad = model.tokenizer.pad_token_id
    context = torch.randint(model.cfg.d_vocab, (4, 12), generator=torch.Generator().manual_seed(3))
    context[0, :3] = context[1, -3:] = context[2, 4] = pad
    expected = recite(model, context, 12)
    assert torch.equal(generate(model, context, 12), expected[:, 12:])
    options = {
        "do_sample": False,
        "stop_at_eos": False,
        "prepend_bos": False,
        "verbose": False,
        "return_type": "tokens",
    }
    assert not torch.equal(
        model.generate(context, max_new_tokens=12, padding_side=side, **options), expected
    )


def test_collect_leaves_the_model_as_it_was(gpt2_like, corpus, unchanged):
    check = unchanged(gpt2_like)
    collect_memorized(gpt2_like, corpus(gpt2_like), CRITERIA, n_dev=1, decode=letters)
    check()


def test_collect_takes_a_tensor_and_lists(gpt2_like, corpus):
    rows = corpus(gpt2_like)
    results = [
        collect_memorized(gpt2_like, stream, CRITERIA, n_dev=1, decode=letters).frame.to_csv()
        for stream in (
            rows,
            torch.stack(rows).int(),
            [row.tolist() for row in rows],
            [row.numpy().astype(np.uint16) for row in rows],
        )
    ]
    assert len(set(results)) == 1


def test_chunks_that_know_nothing_of_each_other_are_together_the_data(
    gpt2_like, corpus, monkeypatch
):
    rows = corpus(gpt2_like)
    distinct = torch.tensor([1] * 12 + [5] * 10)  # repeats itself: monotonous where it is recited
    rows = [*rows, *rows[::-1], distinct, *rows[3:20]]
    criteria = Criteria(
        **{**vars(CRITERIA), "max_distance": 3, "min_distinct": 2, "max_jaccard": 0.3}
    )
    whole = collect_memorized(gpt2_like, rows, criteria, n_dev=2, decode=letters)
    assert min(whole.report.removed[name] for name in (REPEATED, DISTANT, INACCURATE)) > 0
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 8)
    found = collect_memorized(gpt2_like, rows, criteria, n_dev=2, decode=letters)
    assert found.frame.to_csv() == whole.frame.to_csv()
    assert vars(found.report) == vars(whole.report)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (torch.full((22,), 61), r"tokens must be in \[0, 61\), got 61 in 'row-0'"),
        (torch.full((22,), -1), r"tokens must be in \[0, 61\), got -1"),
    ],
)
def test_collect_refuses_what_is_no_token_sequence(gpt2_like, item, message):
    with pytest.raises(ValueError, match=message):
        collect_memorized(gpt2_like, [item], CRITERIA, decode=letters)


def test_collect_refuses_sequences_longer_than_the_context(gpt2_like):
    with pytest.raises(ValueError, match=r"n_prefix \+ n_suffix must be at most n_ctx=32, got 80"):
        collect_memorized(gpt2_like, [[1]], decode=letters)


def test_collect_names_a_window_on_which_a_logit_is_no_number(gpt2_like, corpus):
    rows = corpus(gpt2_like)
    broken = gpt2_like.hooks([("ln_final.hook_normalized", lambda act, hook: act * torch.nan)])
    with broken, pytest.raises(ValueError, match=r"logits must be numbers, got NaN in 'row-"):
        collect_memorized(gpt2_like, rows, CRITERIA, decode=letters)
