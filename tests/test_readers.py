"""Readers: the files of the authors, and what they say about files that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

TOKENS = torch.arange(12).reshape(3, 4)


class Letters:
    """One token for each character."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture
def lettered() -> Any:
    """What read_manual needs of a model."""

    class Model(SimpleNamespace):
        hook_dict = hooks = parameters = __call__ = lambda self, *args, **kwargs: None

    return Model(tokenizer=Letters(), cfg=None, blocks=None)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def manual_row(**changes: object) -> dict[str, object]:
    return {"prompt": "ab", "all": "abcde", "prompt_len": 2, "category": ["letters", "early"]} | changes


def test_read_definitions_skips_blank_lines(tmp_path: Path) -> None:
    from tl_localize.readers import read_definitions

    path = write(tmp_path / "d.jsonl", {"definition": "One."}, "", "   ", {"definition": "Zwölf.", "other": 1})
    assert read_definitions(path) == ["One.", "Zwölf."]


def test_read_definitions_reads_the_real_files(shared: Path) -> None:
    from tl_localize.readers import read_definitions

    assert len(read_definitions(shared / "data/ecbd/ecbd_2021_definition_dedup.jsonl")) == 156
    assert len(read_definitions(shared / "data/ecbd/ecbd_2021_22_23_definition_dedup.jsonl")) == 328


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (({"definition": "a"}, '{"definition": "b"'), r"JSON object, got '\{\"definition\": \"b\"' at .*d.jsonl, line 2"),
        (({"definition": "a"}, [1]), "got a list at .*line 2"),
        (("", {"sentence": "a"}), r"key 'definition', got only \['sentence'\] at .*line 2"),
        (({"definition": 3},), "definition must be text, got 3 at .*line 1"),
        (({"definition": "  "},), "definition must be text, got '  ' at .*line 1"),
        ((), "at least one JSON object, got the empty file"),
        (("", "\t"), "at least one JSON object, got the empty file"),
    ],
)
def test_read_definitions_names_the_broken_line(tmp_path: Path, lines: tuple[object, ...], message: str) -> None:
    from tl_localize.readers import read_definitions

    with pytest.raises(ValueError, match=message):
        read_definitions(write(tmp_path / "d.jsonl", *lines))


def test_read_definitions_names_the_line_of_another_encoding(tmp_path: Path) -> None:
    from tl_localize.readers import read_definitions

    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"definition": "ok"}\n{"definition": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"UTF-8 text, got the bytes b'\\xe9.* line 2"):
        read_definitions(path)


def test_read_definitions_accepts_a_byte_order_mark(tmp_path: Path) -> None:
    from tl_localize.readers import read_definitions

    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"definition": "ok"}\r\n')
    assert read_definitions(path) == ["ok"]


@pytest.mark.parametrize("name", ["read_definitions", "read_tokens", "read_texts", "read_categories"])
def test_readers_name_a_missing_file(tmp_path: Path, name: str) -> None:
    from tl_localize import readers

    with pytest.raises(FileNotFoundError, match=r"existing file, got .*nowhere"):
        getattr(readers, name)(tmp_path / "nowhere.npy")


def test_read_manual_cuts_at_the_prompt(tmp_path: Path, lettered: Any) -> None:
    from tl_localize.readers import read_categories, read_manual

    path = write(tmp_path / "m.jsonl", manual_row(), manual_row(category=[], prompt="a", prompt_len=1))
    first, second = read_manual(path, lettered)
    assert (first.id, first.category, first.n_prefix, first.tokens.tolist()) == ("manual-000", "letters", 2, [97, 98, 99, 100, 101])
    assert (second.id, second.category, second.n_prefix) == ("manual-001", "", 1)
    assert read_categories(path) == [("letters", "early"), ()]


def test_read_manual_warns_where_prompt_len_belongs_to_another_tokenizer(tmp_path: Path, lettered: Any) -> None:
    from tl_localize.readers import read_manual

    path = write(tmp_path / "m.jsonl", manual_row(), manual_row(prompt_len=1))
    with pytest.warns(UserWarning, match=r"got another in 1 of 2 rows of .*line 2: 1, not 2"):
        assert [sequence.n_prefix for sequence in read_manual(path, lettered)] == [2, 2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (manual_row(all="xbcde"), "all must begin with prompt, got 'xbcde' after the prompt 'ab' at .*line 1"),
        (manual_row(all="ab"), "suffix must be text.*line 1"),
        (manual_row(category=3), "category must be a list of names, got 3 at .*line 1"),
        ({"prompt": "a", "all": "ab"}, "key 'category', got only .*line 1"),
        ({"prompt": "a", "category": []}, "key 'all', got only .*line 1"),
    ],
)
def test_read_manual_names_the_broken_line(tmp_path: Path, lettered: Any, row: dict[str, object], message: str) -> None:
    from tl_localize.readers import read_manual

    with pytest.raises(ValueError, match=message):
        read_manual(write(tmp_path / "m.jsonl", row), lettered)


def test_read_manual_agrees_with_every_prompt_len_of_the_real_file(shared: Path, lettered: Any) -> None:
    from transformers import GPT2Tokenizer

    from tl_localize.readers import read_categories, read_manual

    tokenizer = shared / "data/tokenizers/gpt2"
    lettered.tokenizer = GPT2Tokenizer(vocab=str(tokenizer / "vocab.json"), merges=str(tokenizer / "merges.txt"))
    path = shared / "data/manual/memorized_data-gpt2-xl.jsonl"
    sequences = read_manual(path, lettered)  # a prompt_len that differs would warn, and a warning is an error here
    assert len(sequences) == 105
    assert (sequences[0].category, sequences[0].n_prefix) == ("address", 4)
    assert read_categories(path)[0] == ("address", "Google")


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_read_tokens_maps_npy(tmp_path: Path, dtype: Any) -> None:
    from tl_localize.readers import read_tokens

    np.save(tmp_path / "t.npy", TOKENS.numpy().astype(dtype))
    assert torch.equal(read_tokens(tmp_path / "t.npy").long(), TOKENS)


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_read_tokens_never_writes_to_the_file(tmp_path: Path, suffix: str) -> None:
    from tl_localize.readers import read_tokens

    path = saved(tmp_path / f"t.{suffix}", TOKENS.numpy())
    read_tokens(path)[0, 0] = 99
    assert torch.equal(read_tokens(path), TOKENS)


def saved(path: Path, tokens: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        save_file({"tokens": torch.from_numpy(tokens), "other": torch.zeros(3)}, path)
    return path


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_batches_of_pythias_shape_are_mapped_and_searched_in_blocks_of_rows(tmp_path: Path, suffix: str) -> None:
    from tl_localize.collect.search import Corpus, chunks_of
    from tl_localize.readers import read_tokens

    tokens = np.random.default_rng(0).integers(50304, size=(1024, 2049), dtype=np.uint16)
    path = saved(tmp_path / f"batch.{suffix}", tokens)
    found = read_tokens(path)
    assert (found.dtype, found.shape) == (torch.uint16, (1024, 2049))
    assert np.array_equal(found.numpy(), tokens)
    maps = Path("/proc/self/maps")
    if maps.is_file():
        (area,) = (line.split()[0] for line in maps.read_text().splitlines() if line.endswith(str(path)))
        first, end = (int(address, 16) for address in area.split("-"))
        assert first <= found.data_ptr() < end  # its memory is the file's
    corpus = Corpus(path)
    chunks = chunks_of([corpus], "any")
    assert [chunk.end - chunk.first for chunk in chunks] == [79] * 12 + [76]
    last, _ = chunks[-1].read()
    assert isinstance(last, torch.Tensor) and corpus.rows is not None
    assert last.untyped_storage().data_ptr() == corpus.rows.untyped_storage().data_ptr()  # no copy
    assert np.array_equal(last.numpy(), tokens[-76:])


@pytest.mark.parametrize("old_format", [False, True])
def test_read_tokens_reads_pt(tmp_path: Path, old_format: bool) -> None:
    from tl_localize.readers import read_tokens

    torch.save(TOKENS, tmp_path / "t.pt", _use_new_zipfile_serialization=not old_format)
    assert torch.equal(read_tokens(tmp_path / "t.pt"), TOKENS)


def test_read_tokens_reads_the_tokens_of_safetensors(tmp_path: Path) -> None:
    from tl_localize.readers import read_tokens

    save_file({"any": TOKENS}, tmp_path / "one.safetensors")
    save_file({"tokens": TOKENS, "other": TOKENS + 1}, tmp_path / "two.safetensors")
    assert torch.equal(read_tokens(tmp_path / "one.safetensors"), TOKENS)
    assert torch.equal(read_tokens(tmp_path / "two.safetensors"), TOKENS)


class Harmful:
    """Would run code if it were unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("harm",))


def test_read_tokens_refuses_to_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tl_localize.readers import read_tokens

    torch.save(Harmful(), tmp_path / "t.pt")
    with pytest.raises(ValueError, match=r"one plain tensor, got .* can't read safely"):
        read_tokens(tmp_path / "t.pt")
    assert "harm" not in capsys.readouterr().out


def test_read_tokens_refuses_other_files(tmp_path: Path) -> None:
    from tl_localize.readers import read_tokens

    (tmp_path / "t.csv").write_text("1,2")
    (tmp_path / "t.npy").write_bytes(b"\x93NUMPY nothing")
    (tmp_path / "t.pt").write_bytes(b"nothing")
    (tmp_path / "t.safetensors").write_bytes(b"nothing")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"tokens": TOKENS}, tmp_path / "dict.pt")
    save_file({"a": TOKENS, "b": TOKENS + 1}, tmp_path / "ab.safetensors")
    for name, message in {
        "t.csv": r"file of tokens \(.npy, .pt, .safetensors\), got .*t.csv",
        "t.npy": "whole .npy file of integers, got .*t.npy",
        "t.pt": "one plain tensor, got .*t.pt",
        "empty.pt": "one plain tensor, got .*empty.pt",
        "t.safetensors": "whole safetensors file, got .*t.safetensors",
        "dict.pt": "one plain tensor, got a dict",
        "ab.safetensors": r"one tensor or one named 'tokens', got \['a', 'b'\]",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_tokens(tmp_path / name)


@pytest.mark.parametrize("tokens", [TOKENS.float(), TOKENS > 3, TOKENS[0], TOKENS[:0]])
def test_read_tokens_refuses_what_is_no_batch_of_ids(tmp_path: Path, tokens: torch.Tensor) -> None:
    from tl_localize.readers import read_tokens

    torch.save(tokens, tmp_path / "t.pt")
    with pytest.raises(ValueError, match=r"integers of shape \[sequence pos\], got"):
        read_tokens(tmp_path / "t.pt")


def test_read_tokens_reads_the_real_files(shared: Path) -> None:
    from tl_localize.readers import memorized_sequences, read_tokens

    tokens = read_tokens(shared / "data/pile/pythia-2.8b-deduped-v0/pile_bs0-100-dedup.pt")
    assert tokens.shape == (505, 80)
    sequences = memorized_sequences(tokens)
    assert (len(sequences), sequences[3].n_prefix, sequences[3].id) == (505, 32, "sequence-0003")
    assert read_tokens(shared / "data/pile/gpt2-xl/pile_random_batch.pt").shape == (2048, 128)


def test_memorized_sequences_takes_names_and_categories() -> None:
    from tl_localize.readers import memorized_sequences

    sequences = memorized_sequences(TOKENS.to(torch.uint16), 2, ["a", "b", "c"], ["x", "", "y"])
    assert [(s.id, s.category, s.n_prefix) for s in sequences] == [("a", "x", 2), ("b", "", 2), ("c", "y", 2)]
    assert torch.equal(sequences[1].tokens, TOKENS[1])
    with pytest.raises(ValueError, match="ids must have one entry for each of the 3 sequences, got 1"):
        memorized_sequences(TOKENS, 2, ["a"])


def test_read_texts_gives_empty_texts_to_be_counted(tmp_path: Path) -> None:
    from tl_localize.readers import read_texts

    (tmp_path / "t.txt").write_bytes("one\r\n\nzwölf\n".encode())
    assert list(read_texts(tmp_path / "t.txt")) == ["one", "", "zwölf"]
    assert list(read_texts(write(tmp_path / "t.jsonl", {"text": "one"}, "", {"text": ""}))) == ["one", ""]
    assert list(read_texts(write(tmp_path / "u.jsonl", {"content": "one"}), key="content")) == ["one"]


def test_read_texts_names_the_broken_line(tmp_path: Path) -> None:
    from tl_localize.readers import read_texts

    with pytest.raises(ValueError, match=r"key 'text', got only .*line 2"):
        list(read_texts(write(tmp_path / "t.jsonl", {"text": "a"}, {"content": "b"})))
