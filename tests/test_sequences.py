"""MemorizedSequence, and batches with their padding and their targets."""

from collections import UserDict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from tl_localize import Attribution, MemorizedSequence, perplexity
from tl_localize.metrics import check_text
from tl_localize.model.forward import is_bridge
from tl_localize.sequences import (
    SequenceBatch,
    check_sequences,
    decoder,
    divide_text,
    encode,
    with_text,
    without_text_of,
)
from tl_localize.texts.reference import general_texts, held_out_tokens

Shapes = list[tuple[int, int]]
SHAPES = st.lists(
    st.integers(2, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))),
    min_size=1,
    max_size=6,
)


def counting(shapes):
    """Sequences 100, 101, 102, ...; 200, 201, ...; and so on."""
    return [
        MemorizedSequence(torch.arange(n) + 100 * (i + 1), n_prefix, f"s{i}")
        for i, (n, n_prefix) in enumerate(shapes)
    ]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_sequence_splits_at_n_prefix_and_does_not_change_with_the_callers_tensor(dtype):
    tokens = torch.tensor([5, 6, 7, 8], dtype=dtype)
    sequence = MemorizedSequence(tokens, 3)
    tokens[0] = 9
    assert (sequence.prefix.tolist(), sequence.suffix.tolist()) == ([5, 6, 7], [8])
    assert sequence.tokens.dtype == torch.int64


def test_fingerprint_is_of_the_tokens_and_of_the_place_of_the_suffix():
    (sequence,) = counting([(9, 3)])
    others = [replace(sequence, n_prefix=4), replace(sequence, tokens=sequence.tokens + 1)]
    assert len({each.fingerprint for each in (sequence, *others)}) == 3
    assert replace(sequence, id="a", category="b").fingerprint == sequence.fingerprint


@pytest.mark.parametrize("convert", [list, tuple, np.array])
def test_sequence_takes_plain_numbers(convert):
    assert MemorizedSequence(convert([1, 2, 3]), 1).tokens.tolist() == [1, 2, 3]


def test_sequence_shows_the_text_around_its_boundary():
    text = "Two roads diverged in", " a yellow wood, And sorry I could not"
    shown = (
        "4 prefix + 5 suffix tokens: 'Two roads diverged in' | ' a yellow wood, And sorry I co...'"
    )
    assert shown in repr(MemorizedSequence(torch.arange(9), 4, text=text))


# ---- text


@pytest.fixture
def bpe(tmp_path):
    """A byte-level BPE tokenizer that puts BOS first, as many do."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        ["two roads diverged in a yellow wood, and sorry I could not travel both"] * 4,
        300,
        special_tokens=["<s>"],
    )
    tokenizer = trained._tokenizer
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.fixture
def reader(gpt2_like, bpe):
    gpt2_like.tokenizer = bpe
    return gpt2_like


def test_from_text_has_the_tokens_of_the_whole_text(reader, bpe):
    sequence = MemorizedSequence.from_text(
        reader, "two roads", " diverged in", id="frost", category="poems", prepend_bos=False
    )
    assert sequence.tokens.tolist() == encode(bpe, "two roads diverged in")
    assert bpe.decode(sequence.prefix) == "two roads"
    assert bpe.decode(sequence.suffix) == " diverged in"
    assert (sequence.id, sequence.category, sequence.bos) == ("frost", "poems", "")


def test_from_text_puts_bos_first_where_the_tokenizer_does(reader, bpe):
    plain = MemorizedSequence.from_text(reader, "two roads", " diverged", prepend_bos=False)
    sequence = MemorizedSequence.from_text(reader, "two roads", " diverged")
    assert sequence.tokens.tolist() == bpe("two roads diverged")["input_ids"]
    assert sequence.n_prefix == plain.n_prefix + 1
    assert torch.equal(sequence.suffix, plain.suffix)
    assert "the first is '<s>'" in repr(sequence) and "<s>" not in repr(plain)


def test_from_text_ignores_the_bos_that_transformer_lens_adds_to_gpt2(reader, bpe):
    if not is_bridge(reader):  # which adds none
        reader.set_tokenizer(bpe)
    reader.tokenizer.eos_token = "<s>"  # GPT-2 has one token for the beginning and the end
    sequence = MemorizedSequence.from_text(reader, "two roads", " diverged")
    assert sequence.tokens.tolist() == encode(bpe, "two roads diverged")
    chosen = MemorizedSequence.from_text(reader, "two roads", " diverged", prepend_bos=True)
    assert chosen.tokens.tolist() == [bpe.bos_token_id, *sequence.tokens.tolist()]


def test_general_text_begins_with_bos_where_texts_do(reader, bpe):
    rows = held_out_tokens(reader)
    n_ctx = reader.cfg.n_ctx
    assert rows.shape[1] == n_ctx and (rows[:, 0] == bpe.bos_token_id).all()
    text = general_texts("held-out")[0]
    assert rows[:2, 1:].flatten().tolist() == encode(bpe, text)[: 2 * n_ctx - 2]
    bpe.eos_token = "<s>"
    assert held_out_tokens(reader)[0].tolist() == encode(bpe, text)[:n_ctx]


def test_a_character_that_the_prefix_cuts_is_the_suffix_s(reader, bpe):
    tokens = torch.tensor(encode(bpe, "two \N{SNOWMAN} roads"))
    at = len(encode(bpe, "two ")) + 1  # of three bytes of the snowman one
    sequence = with_text(reader, MemorizedSequence(tokens, at))
    assert sequence.text == ("two ", "\N{SNOWMAN} roads")
    names = ["n", "<0xE4>", "<0xB8>", "<0xAD>"]
    llama = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # a sign for each byte
    assert divide_text(lambda ids: llama.decode([names[i] for i in ids]), [*range(4)], 3) == (
        "n",
        "\N{CJK UNIFIED IDEOGRAPH-4E2D}",
    )


def test_the_text_of_a_sequence_has_no_bos(reader, bpe):
    tokens = encode(bpe, "two roads")
    marked = MemorizedSequence(torch.tensor([0, *tokens]), 2, bos="<s>")
    plain = MemorizedSequence(torch.tensor(tokens), 1)
    assert with_text(reader, marked).text == with_text(reader, plain).text


def test_decoding_leaves_spaces_as_they_are(gpt2_like):
    gpt2_like.tokenizer = SimpleNamespace(decode=lambda ids, **options: options)
    assert decoder(gpt2_like)([1]) == {"clean_up_tokenization_spaces": False}


def test_text_that_is_no_unicode_is_refused(reader):
    with pytest.raises(ValueError, match=r"valid Unicode, got '\\udce9' at character 3"):
        MemorizedSequence.from_text(reader, "caf\udce9", " roads")


# ---- batches


@given(SHAPES)
def test_batch_holds_the_sequences_and_their_targets(shapes):
    sequences = counting(shapes)
    batch = SequenceBatch.of(sequences)
    assert torch.equal(batch.tokens[batch.rows, batch.positions] + 1, batch.targets)
    for i, sequence in enumerate(sequences):
        assert batch.targets[batch.rows == i].tolist() == sequence.suffix.tolist()
        assert torch.equal(batch.tokens[i, : len(sequence)], sequence.tokens)


def test_batch_mean_by_hand():
    batch = SequenceBatch.of(counting([(4, 1), (3, 2)]))
    assert batch.mean(torch.tensor([1.0, 2.0, 6.0, 5.0])).tolist() == [3.0, 5.0]


def test_batch_mean_is_float32_in_half_precision():
    half = torch.ones(3, dtype=torch.bfloat16)
    assert SequenceBatch.of(counting([(4, 1)])).mean(half).dtype == torch.float32


def test_check_sequences_takes_the_whole_context_and_vocabulary(gpt2_like):
    check_sequences(gpt2_like, [MemorizedSequence(torch.tensor([0, 60] * 16), 1)])


def test_from_text_refuses_text_that_can_not_be_split(reader):
    message = "at a token boundary, got 'ads diverged' after 'two ro'"
    with pytest.raises(ValueError, match=message):
        MemorizedSequence.from_text(reader, "two ro", "ads diverged")


@pytest.mark.parametrize(
    ("prefix", "suffix", "name"), [("", "", "prefix"), ("two", "", "suffix"), (None, "x", "prefix")]
)
def test_from_text_names_what_is_no_text(reader, prefix, suffix, name):
    with pytest.raises(ValueError, match=f"{name} must be text of one token or more"):
        MemorizedSequence.from_text(reader, prefix, suffix)


def test_text_in_place_of_tokens_and_no_list_of_sequences_are_refused(gpt2_like):
    with pytest.raises(TypeError, match=r"id must be text, got 0. Pass str\(0\)"):
        MemorizedSequence([1, 2, 3], 1, id=0)
    with pytest.raises(TypeError, match=r'got UserDict. Of what a tokenizer .*"input_ids"'):
        MemorizedSequence(UserDict(input_ids=[1, 2, 3]), 1)
    with pytest.raises(TypeError, match="tokens must be token ids, got text, 'abc'"):
        MemorizedSequence("abc", 1)
    with pytest.raises(TypeError, match="sequences must be a list of sequences, got 3"):
        check_sequences(gpt2_like, 3)


def test_tokens_without_logits_are_refused_where_they_are_predicted(make_model):
    model = make_model(1)
    model.cfg.d_vocab_out = 20  # a model of one's own, which predicts fewer tokens than it reads
    check_sequences(model, [MemorizedSequence(torch.tensor([50, 19]), 1)])
    with pytest.raises(ValueError, match=r"predicted must be in \[0, 20\), .* got 20 in"):
        check_sequences(model, [MemorizedSequence(torch.tensor([3, 20]), 1)])
    with pytest.raises(ValueError, match=r"got 20 in tokens"):
        perplexity(model, torch.tensor([[3, 20]]))
    check_text(model, torch.tensor([[50, 19]]), "tokens")


def test_sequences_without_text_of_others():
    def sequence(*tokens, bos=""):
        return MemorizedSequence(torch.tensor(tokens), 1 + bool(bos), bos=bos)

    text = sequence(*range(100, 130))
    same = [
        text,
        sequence(*range(5), *range(110, 123), *range(5)),  # a run of 13 tokens
        sequence(*range(112, 116)),  # a part
        sequence(*range(90, 140)),  # the whole
        sequence(0, *range(112, 116), bos="<s>"),  # a part, after the token of the beginning
    ]
    others = [
        sequence(*range(5), *range(110, 122), *range(5)),  # a run of 12 tokens
        sequence(*range(128, 133)),  # a part of it only
        sequence(0, *range(20, 30), bos="<s>"),
    ]
    assert without_text_of([*same, *others], [text]) == others
    assert without_text_of(others, []) == others
    after_bos = sequence(0, *range(100, 130), bos="<s>")
    told_as_ids = sequence(0, *range(112, 116))  # nothing says that its first token is BOS
    assert without_text_of([told_as_ids, *others], [after_bos]) == others


def test_one_sequence_in_place_of_a_list_is_told(gpt2_like, sequence):
    with pytest.raises(TypeError, match="sequences must be a list of sequences, got one"):
        Attribution().map(gpt2_like, sequence)


def test_from_text_has_no_bos_that_the_tokenizer_lacks(reader, bpe):
    bpe.bos_token = None
    with pytest.raises(ValueError, match="prepend_bos must be false"):
        MemorizedSequence.from_text(reader, "two roads", " diverged", prepend_bos=True)


def test_a_tokenizer_without_the_letter_a_is_asked_what_it_puts_first(gpt2_like):
    class Digits:
        bos_token_id, eos_token_id = 0, 1

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [int(letter) for letter in text if letter.isdigit()]}

    gpt2_like.tokenizer = Digits()
    assert MemorizedSequence.from_text(gpt2_like, "23", "45").tokens.tolist() == [2, 3, 4, 5]


def test_a_number_of_numpy_is_a_number():
    assert type(MemorizedSequence(torch.arange(5), np.int64(2)).n_prefix) is int
