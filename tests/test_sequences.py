"""MemorizedSequence, and batches with their padding and their targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_localize import MemorizedSequence
from tl_localize.sequences import SequenceBatch, check_sequences, encode

Shapes = list[tuple[int, int]]
SHAPES = st.lists(
    st.integers(2, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))),
    min_size=1,
    max_size=6,
)


def counting(shapes: Shapes) -> list[MemorizedSequence]:
    """Sequences 100, 101, 102, ...; 200, 201, ...; and so on."""
    return [
        MemorizedSequence(torch.arange(n) + 100 * (i + 1), n_prefix, f"s{i}")
        for i, (n, n_prefix) in enumerate(shapes)
    ]


# ---- one sequence


def test_sequence_splits_at_n_prefix() -> None:
    sequence = MemorizedSequence(torch.tensor([5, 6, 7, 8]), 3)
    assert (sequence.prefix.tolist(), sequence.suffix.tolist(), len(sequence)) == (
        [5, 6, 7],
        [8],
        4,
    )


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_sequence_keeps_tokens_as_int64(dtype: torch.dtype) -> None:
    assert MemorizedSequence(torch.tensor([1, 2], dtype=dtype), 1).tokens.dtype == torch.int64


def test_sequence_does_not_change_with_the_callers_tensor() -> None:
    tokens = torch.tensor([1, 2, 3])
    sequence = MemorizedSequence(tokens, 1)
    tokens[0] = 9
    assert sequence.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("convert", [list, tuple, lambda tokens: torch.tensor(tokens).numpy()])
def test_sequence_takes_plain_numbers(unchecked: None, convert: Callable[[list[int]], Any]) -> None:
    assert MemorizedSequence(convert([1, 2, 3]), 1).tokens.tolist() == [1, 2, 3]


def test_sequence_repr_is_short() -> None:
    assert (
        repr(MemorizedSequence(torch.arange(9), 4, "poem"))
        == "MemorizedSequence('poem', 4 prefix + 5 suffix tokens)"
    )


def test_sequence_shows_its_text() -> None:
    sequence = MemorizedSequence(
        torch.arange(9),
        4,
        "poem",
        text=("Two <roads> diverged in", " a yellow wood, And sorry I could not"),
    )
    shown = (
        "MemorizedSequence('poem', 4 prefix + 5 suffix tokens: 'Two <roads> diverged in' | ' a "
        "yellow wood, And sorry I co...')"
    )
    assert repr(sequence) == shown
    assert (
        "&lt;roads&gt; diverged in</span><b> | </b> a yellow wood, And sorry I could not"
        in sequence._repr_html_()
    )
    assert (
        MemorizedSequence(torch.arange(9), 4)._repr_html_()
        == "<div>MemorizedSequence(&#x27;&#x27;, 4 prefix + 5 suffix tokens)</div>"
    )


# ---- text


@pytest.fixture
def bpe(tmp_path: Path) -> Any:
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
def reader(gpt2_like: Any, bpe: Any) -> Any:
    gpt2_like.tokenizer = bpe
    return gpt2_like


def test_tokenizer_of_these_tests_puts_bos_first(bpe: Any) -> None:
    assert bpe("two roads")["input_ids"][0] == bpe.bos_token_id


def test_encode_leaves_special_tokens_out(bpe: Any) -> None:
    assert encode(bpe, "two roads") == bpe("two roads")["input_ids"][1:]


def test_from_text_has_the_tokens_of_the_whole_text(reader: Any, bpe: Any) -> None:
    sequence = MemorizedSequence.from_text(
        reader, "two roads", " diverged in", id="frost", category="poems", prepend_bos=False
    )
    assert sequence.tokens.tolist() == encode(bpe, "two roads diverged in")
    assert bpe.decode(sequence.prefix) == "two roads"
    assert bpe.decode(sequence.suffix) == " diverged in"
    assert (sequence.id, sequence.category, sequence.bos) == ("frost", "poems", "")


def test_from_text_puts_bos_first_where_the_tokenizer_does(reader: Any, bpe: Any) -> None:
    plain = MemorizedSequence.from_text(reader, "two roads", " diverged", prepend_bos=False)
    sequence = MemorizedSequence.from_text(reader, "two roads", " diverged")
    assert sequence.tokens.tolist() == bpe("two roads diverged")["input_ids"]
    assert sequence.n_prefix == plain.n_prefix + 1
    assert torch.equal(sequence.suffix, plain.suffix)
    assert "the first is '<s>'" in repr(sequence) and "<s>" not in repr(plain)


def test_from_text_ignores_the_bos_that_transformer_lens_adds_to_gpt2(
    reader: Any, bpe: Any
) -> None:
    reader.set_tokenizer(bpe)
    reader.tokenizer.eos_token = "<s>"  # GPT-2 has one token for the beginning and the end
    sequence = MemorizedSequence.from_text(reader, "two roads", " diverged")
    assert sequence.tokens.tolist() == encode(bpe, "two roads diverged")
    chosen = MemorizedSequence.from_text(reader, "two roads", " diverged", prepend_bos=True)
    assert chosen.tokens.tolist() == [bpe.bos_token_id, *sequence.tokens.tolist()]


def test_from_text_needs_a_bos_to_prepend(reader: Any, bpe: Any) -> None:
    bpe.bos_token = None
    with pytest.raises(ValueError, match="prepend_bos must be False for a tokenizer without"):
        MemorizedSequence.from_text(reader, "two roads", " diverged", prepend_bos=True)


def test_from_text_survives_long_text_without_a_warning(reader: Any, bpe: Any) -> None:
    bpe.model_max_length = 4
    assert (
        len(MemorizedSequence.from_text(reader, "two roads", " diverged in a yellow wood" * 3)) > 4
    )


# ---- batches


@given(SHAPES)
def test_batch_targets_are_the_suffix_tokens(shapes: Shapes) -> None:
    sequences = counting(shapes)
    batch = SequenceBatch.of(sequences)
    for row, sequence in enumerate(sequences):
        assert batch.targets[batch.rows == row].tolist() == sequence.suffix.tolist()


@given(SHAPES)
def test_batch_positions_come_one_before_their_targets(shapes: Shapes) -> None:
    batch = SequenceBatch.of(counting(shapes))
    assert torch.equal(batch.tokens[batch.rows, batch.positions] + 1, batch.targets)


@given(SHAPES)
def test_batch_pads_on_the_right(shapes: Shapes) -> None:
    sequences = counting(shapes)
    for row, sequence in zip(SequenceBatch.of(sequences).tokens, sequences, strict=True):
        assert torch.equal(row[: len(sequence)], sequence.tokens)


def test_batch_mean_by_hand() -> None:
    batch = SequenceBatch.of(counting([(4, 1), (3, 2)]))
    assert batch.mean(torch.tensor([1.0, 2.0, 6.0, 5.0])).tolist() == [3.0, 5.0]


def test_batch_mean_is_float32_in_half_precision() -> None:
    assert (
        SequenceBatch.of(counting([(4, 1)])).mean(torch.ones(3, dtype=torch.bfloat16)).dtype
        == torch.float32
    )


# ---- what fits a model


def test_check_sequences_takes_a_sequence_as_long_as_the_context(
    gpt2_like: Any, make_sequences: Any
) -> None:
    check_sequences(gpt2_like, make_sequences((32, 1)))


def test_check_sequences_takes_the_last_token_of_the_vocabulary(gpt2_like: Any) -> None:
    check_sequences(gpt2_like, [MemorizedSequence(torch.tensor([0, 60]), 1)])


# ---- text that can't be split


@pytest.mark.parametrize(
    ("prefix", "suffix", "message"),
    [
        ("", " diverged", "prefix must be text, got ''"),
        ("two roads", "", "suffix must be text, got ''"),
        (None, " diverged", "prefix must be text, got None"),
        ("two roads", 7, "suffix must be text, got 7"),
        (
            "two ro",
            "ads diverged",
            "suffix must begin at a token boundary, got 'ads diverged' after 'two ro'",
        ),
        ("two ro", "ads diverged", r"The last boundary before it is 'two' \| ' roads diverged'\."),
        ("tw", "o roads", "where the tokenizer merges across. Use a longer prefix."),
    ],
)
def test_from_text_refuses(
    unchecked: None, reader: Any, prefix: Any, suffix: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MemorizedSequence.from_text(reader, prefix, suffix)
