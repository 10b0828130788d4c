"""Each form of data that users have as sequences, and what is said of broken ones."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tl_localize.readers import Data, kept_by, read_sequences, read_texts, stacked_tokens

TEXTS = ["the first text is here", "another text than that", "a third of them at end"]
TOKENS = np.array([[ord(letter) for letter in text] for text in TEXTS])


def write(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def parquet(path: Path, **columns: Any) -> Path:
    pd.DataFrame(columns).to_parquet(path)
    return path


def manual_row(**changes: object) -> dict[str, object]:
    return {
        "prompt": "ab",
        "all": "abcde",
        "prompt_len": 2,
        "category": ["letters", "early"],
    } | changes


def read(model: Any, source: Any, **options: Any) -> list[tuple[str, int, str]]:
    """Id, length of the prefix and text of each sequence."""
    return [
        (one.id, one.n_prefix, model.tokenizer.decode(one.tokens.tolist()))
        for one in read_sequences(source, model, **options)
    ]


EXPECTED = [(f"sequence-000{i}", 9, text) for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_a_prefix_file_and_a_suffix_file_are_the_rows_side_by_side(
    tmp_path: Path, lettered: Any, dtype: Any
) -> None:
    for name, part in (
        ("pre", TOKENS[:, :4]),
        ("prefix", TOKENS[:, 4:9]),
        ("suffix", TOKENS[:, 9:]),
    ):
        np.save(tmp_path / f"{name}.npy", part.astype(dtype))
    found = read(
        lettered,
        tmp_path / "prefix.npy",
        suffix=tmp_path / "suffix.npy",
        pre_prefix=tmp_path / "pre.npy",
    )
    assert found == EXPECTED
    found = read(lettered, str(tmp_path / "prefix.npy"), suffix=str(tmp_path / "suffix.npy"))
    assert found == [(id, 5, text[4:]) for id, _, text in EXPECTED]


def test_prefix_and_suffix_files_of_other_counts_are_refused(tmp_path: Path, lettered: Any) -> None:
    np.save(tmp_path / "prefix.npy", TOKENS[:, :9])
    np.save(tmp_path / "suffix.npy", TOKENS[:2, 9:])
    with pytest.raises(
        ValueError, match=r"must have as many rows, got 3 in '.*prefix.npy', 2 in '.*suffix.npy'"
    ):
        read(lettered, tmp_path / "prefix.npy", suffix=tmp_path / "suffix.npy")
    np.save(tmp_path / "suffix.npy", TOKENS[:, 9:].astype(float))
    with pytest.raises(
        ValueError,
        match=r"tokens must be integers of shape .*, got torch.float64 of shape .*suffix.npy",
    ):
        read(lettered, tmp_path / "prefix.npy", suffix=tmp_path / "suffix.npy")
    with pytest.raises(ValueError, match="suffix must be given with pre_prefix"):
        Data(source=tmp_path / "prefix.npy", pre_prefix=tmp_path / "prefix.npy")


def test_the_extraction_challenge_is_read_as_it_is_published(shared: Path, lettered: Any) -> None:
    folder = shared / "data/satml"
    lettered.tokenizer, lettered.cfg.d_vocab = None, 50257
    found = list(
        read_sequences(folder / "train_prefix.npy", lettered, suffix=folder / "train_suffix.npy")
    )
    assert (len(found), {(one.n_prefix, len(one)) for one in found}) == (500, {(50, 100)})
    assert found[7].suffix.tolist() == np.load(folder / "train_suffix.npy")[7].tolist()


@pytest.mark.parametrize("column", ["tokens", "token_ids", "input_ids"])
def test_parquet_rows_of_tokens(tmp_path: Path, lettered: Any, column: str) -> None:
    path = parquet(
        tmp_path / "evals.parquet", **{"index": [5, 7, 9], column: list(TOKENS), "other": [0.5] * 3}
    )
    assert read(lettered, path, n_prefix=9) == EXPECTED


def test_parquet_is_told_by_its_content_and_read_a_part_at_a_time(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The layout of Pythia's training order: rows of 2,049 tokens in row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = np.random.default_rng(0).integers(50000, size=(30, 2049))
    path = tmp_path / "order.data"
    pq.write_table(pa.table({"token_ids": list(rows)}), path, row_group_size=8)
    read_groups: list[int] = []
    right = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda *a, **o: read_groups.extend(o["row_groups"]) or right(*a, **o),
    )
    monkeypatch.setattr("tl_localize.readers.sources.ROWS_AT_ONCE", 3)
    data = Data(source=path)
    assert (data.opened.size, read_groups) == (30, [])
    found = [one.tokens.tolist() for one in data.entries(10, 18)]
    assert found == rows[10:18].tolist()
    assert read_groups == [1, 2]
    assert [one.tokens.tolist() for one in data.entries()] == rows.tolist()


def test_a_folder_of_parquet_files_is_their_rows_in_order(tmp_path: Path, lettered: Any) -> None:
    parquet(tmp_path / "train-00000.parquet", tokens=list(TOKENS[:1]))
    parquet(tmp_path / "train-00001.parquet", tokens=list(TOKENS[1:]))
    assert read(lettered, tmp_path, n_prefix=9) == EXPECTED
    assert [one.tokens.tolist() for one in Data(source=tmp_path).entries(1, 2)] == TOKENS[
        1:2
    ].tolist()


def test_json_lines_and_tables_of_text(tmp_path: Path, lettered: Any) -> None:
    pairs = [{"prompt": text[:9], "completion": text[9:]} for text in TEXTS]
    assert read(lettered, write(tmp_path / "pairs.jsonl", *pairs)) == EXPECTED
    assert (
        read(lettered, parquet(tmp_path / "pairs.parquet", **pd.DataFrame(pairs).to_dict("list")))
        == EXPECTED
    )
    assert (
        read(lettered, write(tmp_path / "a.jsonl", *({"text": text} for text in TEXTS)), n_prefix=9)
        == EXPECTED
    )
    assert (
        read(
            lettered,
            write(tmp_path / "b.jsonl", *({"tokens": row.tolist()} for row in TOKENS)),
            n_prefix=9,
        )
        == EXPECTED
    )
    assert (
        read(
            lettered, write(tmp_path / "any name", *({"text": text} for text in TEXTS)), n_prefix=9
        )
        == EXPECTED
    )
    assert read(lettered, write(tmp_path / "c.txt", "", *TEXTS, " "), n_prefix=9) == EXPECTED


def test_columns_that_are_named(tmp_path: Path, lettered: Any) -> None:
    rows = [
        {"body": text, "n": 3 + i, "who": f"w{i}", "kind": "ab"[i % 2], "text": 0}
        for i, text in enumerate(TEXTS)
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    found = list(
        read_sequences(path, lettered, key="body", n_prefix="n", id="who", category="kind")
    )
    assert [(one.id, one.category, one.n_prefix) for one in found] == [
        ("w0", "a", 3),
        ("w1", "b", 4),
        ("w2", "a", 5),
    ]
    assert found[1].text == ("anot", "her text than that")
    for options, message in (
        (
            {"key": "bodi"},
            r"row must have the column 'bodi', got only \[.*\] at .*line 1. Did you mean body\?",
        ),
        ({"key": "body", "id": "whom"}, r"the column 'whom', .*Did you mean who\?"),
        ({"key": "body", "category": "kinds"}, r"the column 'kinds', .*Did you mean kind\?"),
        ({"key": "body", "n_prefix": "kind"}, "kind must be a whole number, got 'a' at .*line 1"),
        ({"key": "n"}, "tokens must be a list of whole numbers, got 3 at .*line 1"),
        (
            {"key": "body", "n_prefix": 99},
            r"n_prefix must be at least 1 and below .*\(at .*line 1\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            read(lettered, path, **options)


def test_rows_of_other_lengths_need_a_column_or_a_cut(tmp_path: Path, lettered: Any) -> None:
    rows = [{"tokens": row.tolist()[: 22 - i], "n": 9} for i, row in enumerate(TOKENS)]
    path = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(
        ValueError,
        match=(
            r"rows must have 22 tokens, as the first one, got 21 at .*line 2. Cut them with "
            r"n_suffix"
        ),
    ):
        read(lettered, path, n_prefix=9)
    assert read(lettered, path, n_prefix="n") == [
        (id, 9, text[: 22 - i]) for i, (id, _, text) in enumerate(EXPECTED)
    ]
    assert read(lettered, path, n_prefix=9, n_suffix=11) == [
        (id, 9, text[:20]) for id, _, text in EXPECTED
    ]
    with pytest.raises(
        ValueError, match=r"row must have n_prefix \+ n_suffix = 21 tokens, got 20. .*line 3"
    ):
        read(lettered, path, n_prefix=9, n_suffix=12)


def test_data_sets_in_python_and_saved(tmp_path: Path, lettered: Any) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"tokens": TOKENS.tolist(), "who": ["a", "b", "c"]})
    expected = [(who, 9, text) for who, text in zip("abc", TEXTS, strict=True)]
    options = {"n_prefix": 9, "id": "who"}
    assert read(lettered, dataset, **options) == expected
    assert read(lettered, dataset.with_format("torch").select([2, 0]), **options) == [
        expected[2],
        expected[0],
    ]
    assert read(lettered, dataset.to_iterable_dataset(), **options) == expected
    assert (
        read(
            lettered,
            ({"tokens": row, "who": who} for row, who in zip(TOKENS, "abc", strict=True)),
            **options,
        )
        == expected
    )
    dataset.save_to_disk(tmp_path / "saved")
    assert read(lettered, tmp_path / "saved", **options) == expected
    splits = datasets.DatasetDict({"train": dataset, "test": dataset})
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"got a DatasetDict of train, test. Pass data\[SPLIT\]"):
        read(lettered, splits, **options)
    with pytest.raises(ValueError, match=r"one with the splits test, train. Name a split's folder"):
        read(lettered, tmp_path / "splits", **options)
    assert read(lettered, tmp_path / "splits" / "train", **options) == expected


def test_scores_keep_the_rows_with_these_indices(tmp_path: Path, lettered: Any) -> None:
    scores = tmp_path / "scores.csv"
    scores.write_text("index,score\n2,1.0\n1,0.96875\n0,1.0\n")
    np.save(tmp_path / "t.npy", TOKENS)
    kept = [("row-0", 9, TEXTS[0]), ("row-2", 9, TEXTS[2])]
    options = {"scores": scores, "n_prefix": 9}
    assert read(lettered, tmp_path / "t.npy", **options) == kept
    assert (
        read(
            lettered,
            write(tmp_path / "t.jsonl", *({"tokens": row.tolist()} for row in TOKENS)),
            **options,
        )
        == kept
    )
    # a table that has the indices
    indexed = parquet(tmp_path / "t.parquet", index=[2, 5, 0], tokens=list(TOKENS[[2, 1, 0]]))
    assert read(lettered, indexed, **options) == kept[::-1]
    assert len(read(lettered, tmp_path / "t.npy", **options, min_score=0.9)) == 3
    assert [one.id for one in Data(source=tmp_path / "t.npy", scores=scores).entries(1, 3)] == [
        "row-2"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("idx,score\n1,1.0\n", r"row must have the column 'index', got only \['idx', 'score'\]"),
        ("index,scor\n1,1.0\n", r"the column 'score', .*Did you mean scor\?"),
        ("index,score\n1,high\n", "score must be a number in every row"),
        ("index,score\n1,1.0\n,0.5\n", "index must be a number in every row, got float64"),
        ("", "scores must be a CSV file of index and score, got .*No columns"),
        ("index,score\n1,0.5\n", "min_score must be at most 0.5, the highest score in .*, got 1"),
        (
            "index,score\n7,1.0\n",
            "scores must be of rows in 't.npy', got 1 indices, of which it has 0",
        ),
    ],
)
def test_broken_scores_are_named(tmp_path: Path, lettered: Any, content: str, message: str) -> None:
    (tmp_path / "scores.csv").write_text(content)
    np.save(tmp_path / "t.npy", TOKENS)
    with pytest.raises(ValueError, match=message):
        read(lettered, tmp_path / "t.npy", scores=tmp_path / "scores.csv", n_prefix=9)
    with pytest.raises(FileNotFoundError, match="scores must be an existing file"):
        kept_by(tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"token": [1]},
            r"columns of tokens or text .*, got only \['token'\] at .*line 2. Did you mean token\? "
            r"Name it with key",
        ),
        ({"idx": 3}, r"got only \['idx'\] at .*line 2. Name one with key"),
        ({"text": "a", "tokens": [1]}, "the tokens or the text once, got tokens, text at .*line 2"),
        ({"tokens": [0.5, 1.0]}, "a list of whole numbers, got float64 such as .*line 2"),
        ({"tokens": [[1, 2], [3]]}, "a list of whole numbers, got .*line 2"),
        ({"tokens": []}, r"a list of whole numbers, got \[\] at .*line 2"),
        ({"tokens": None}, "a list of whole numbers, got None at .*line 2"),
        ({"tokens": [1, None]}, "a list of whole numbers, got object .*line 2"),
        ({"prompt": "a", "completion": 3}, "completion must be text, got 3 at .*line 2"),
        ({"text": "  "}, r"text must hold words, got '  '.*line 2"),
        ({"tokens": [1, -1]}, "tokens must be in .*, got -1 at .*line 2"),
        ([1], "got a list at .*line 2"),
        ('{"tokens": [1, 2', r"JSON object, got .* at .*line 2"),  # cut off
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, lettered: Any, row: Any, message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"tokens": TOKENS[0].tolist()}, row)
    with pytest.raises(ValueError, match=message):
        read(lettered, path, n_prefix=9)


def test_empty_damaged_and_other_files_are_named(tmp_path: Path, lettered: Any) -> None:
    parquet(tmp_path / "whole.parquet", tokens=list(TOKENS))
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-9])
    (tmp_path / "changed.parquet").write_bytes(
        whole[:60].replace(whole[20:40], bytes(20)) + whole[60:]
    )
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "nothing.parquet").write_bytes(b"")
    (tmp_path / "t.csv").write_text("index,score\n1,1.0\n")
    (tmp_path / "folder").mkdir()
    parquet(tmp_path / "none.parquet", tokens=[])
    for name, message in {
        "cut.parquet": "path must be a whole parquet file, got .*cut.parquet",
        "changed.parquet": "path must be a whole parquet file, got .*changed.parquet",
        "nothing.parquet": "path must be a whole parquet file, got .*nothing.parquet",
        "none.parquet": "data must hold at least one row, got none in 'none.parquet'",
        "empty.jsonl": "data must hold at least one row, got none in 'empty.jsonl'",
        "t.csv": r"got the table .*t.csv.*scores \(--scores\)",
        "folder": "a saved data set or a folder of parquet files, got .*folder",
    }.items():
        with pytest.raises(ValueError, match=message):
            read(lettered, tmp_path / name)


def test_a_damaged_saved_data_set_is_named(tmp_path: Path, lettered: Any) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"tokens": TOKENS.tolist()}).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"path must be a whole saved data set, got .*saved"):
        read(lettered, tmp_path / "saved")


@pytest.mark.parametrize("module", ["pyarrow.parquet", "datasets"])
def test_a_missing_extra_is_named(
    tmp_path: Path, lettered: Any, monkeypatch: Any, module: str
) -> None:
    import sys

    path = parquet(tmp_path / "a.parquet", tokens=list(TOKENS))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError,
        match=r'must be installed to read this file, .*pip install "tl_localize\[data\]"',
    ):
        read(lettered, path if module == "pyarrow.parquet" else tmp_path / "saved", n_prefix=9)


def test_tokens_outside_the_vocabulary_are_shown(tmp_path: Path, lettered: Any) -> None:
    tokens = TOKENS.copy()
    tokens[1, 5] = 300
    np.save(tmp_path / "t.npy", tokens)
    wrong = r"tokens must be in \[0, 256\), got 300 at row 1 of .*t.npy, which begins 'anothr text"
    with pytest.raises(ValueError, match=wrong):
        read(lettered, tmp_path / "t.npy", n_prefix=9)


def test_tokens_of_another_tokenizer_are_refused_with_what_they_read() -> None:
    from tl_localize import load_model
    from tl_localize.reference import reference_sequences

    model = load_model("reference")
    tokens = torch.stack([one.tokens for one in reference_sequences(model)])
    assert len(list(read_sequences(tokens, model))) == len(tokens)
    foreign = (tokens * 7 + 13) % model.cfg.d_vocab
    with pytest.raises(
        ValueError,
        match=(
            r"the model's tokenizer makes, got \d+% of them in the first \d+ rows, the first of "
            r"which begins "
        ),
    ):
        next(read_sequences(foreign, model))
    assert len(list(read_sequences(foreign, model, any_tokens=True))) == len(tokens)


def test_real_tokens_of_gpt2_are_not_pythias(shared: Path, lettered: Any) -> None:
    from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

    folder = shared / "data/tokenizers"
    pair = {
        "source": shared / "data/satml/train_prefix.npy",
        "suffix": shared / "data/satml/train_suffix.npy",
    }
    lettered.cfg.d_vocab = 50304
    lettered.tokenizer = GPT2Tokenizer(
        vocab=str(folder / "gpt2/vocab.json"), merges=str(folder / "gpt2/merges.txt")
    )
    assert sum(1 for _ in Data(**pair).sequences(lettered)) == 500
    lettered.tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "gpt-neox-20b/tokenizer.json")
    )
    with pytest.raises(
        ValueError, match="tokens must be those that the model's tokenizer makes, got "
    ):
        list(Data(**pair).sequences(lettered))


def test_data_travel_by_their_paths(tmp_path: Path, monkeypatch: Any) -> None:
    np.save(tmp_path / "t.npy", TOKENS)
    monkeypatch.chdir(tmp_path)
    data = Data(source="t.npy", n_prefix=9)
    assert data.opened.size == 3
    packed = pickle.dumps(data)
    monkeypatch.chdir("/")
    assert len(packed) < 1000 and pickle.loads(packed).opened.size == 3


def test_stacked_tokens_take_the_first_rows_of_tables(tmp_path: Path, lettered: Any) -> None:
    path = parquet(tmp_path / "t.parquet", tokens=list(TOKENS))
    assert stacked_tokens(path, lettered, 2).tolist() == TOKENS[:2].tolist()
    with pytest.raises(ValueError, match="data must hold rows of tokens of one length"):
        stacked_tokens(write(tmp_path / "t.txt", *TEXTS), lettered)


def test_manual_sets_are_cut_at_the_prompt(tmp_path: Path, lettered: Any) -> None:
    rows = (
        manual_row(),
        manual_row(category=[], prompt="a", prompt_len=1),
        manual_row(category="one"),
    )
    first, second, third = read_sequences(write(tmp_path / "m.jsonl", *rows), lettered)
    assert (first.id, first.category, first.n_prefix, first.tokens.tolist()) == (
        "manual-000",
        "letters",
        2,
        [97, 98, 99, 100, 101],
    )
    assert (second.id, second.category, second.n_prefix) == ("manual-001", "", 1)
    assert third.category == "one"


def test_manual_sets_of_another_tokenizer_warn(tmp_path: Path, lettered: Any) -> None:
    path = write(tmp_path / "m.jsonl", manual_row(), manual_row(prompt_len=1))
    with pytest.warns(UserWarning, match=r"got another in 1 of 2 rows of .*line 2: 1, not 2"):
        assert [sequence.n_prefix for sequence in read_sequences(path, lettered)] == [2, 2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            manual_row(all="xbcde"),
            "all must begin with prompt, got 'xbcde' after the prompt 'ab' at .*line 1",
        ),
        (manual_row(all="ab"), "suffix must be text.*line 1"),
        (manual_row(category=3), "category must be a name or a list of names, got 3 at .*line 1"),
    ],
)
def test_a_broken_row_of_a_manual_set_is_named(
    tmp_path: Path, lettered: Any, row: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(lettered, write(tmp_path / "m.jsonl", row))


def test_every_prompt_len_of_the_real_manual_set_is_right(shared: Path, lettered: Any) -> None:
    from transformers import GPT2Tokenizer

    tokenizer = shared / "data/tokenizers/gpt2"
    lettered.tokenizer = GPT2Tokenizer(
        vocab=str(tokenizer / "vocab.json"), merges=str(tokenizer / "merges.txt")
    )
    path = shared / "data/manual/memorized_data-gpt2-xl.jsonl"
    # a prompt_len that differs would warn, and a warning is an error here
    sequences = list(read_sequences(path, lettered))
    assert len(sequences) == 105
    assert (sequences[0].category, sequences[0].n_prefix) == ("address", 4)


def test_the_real_token_files(shared: Path, lettered: Any) -> None:
    lettered.tokenizer, lettered.cfg.d_vocab = None, 50304
    sequences = list(
        read_sequences(shared / "data/pile/pythia-2.8b-deduped-v0/pile_bs0-100-dedup.pt", lettered)
    )
    assert (len(sequences), sequences[3].n_prefix, sequences[3].id) == (505, 32, "sequence-0003")
    assert stacked_tokens(shared / "data/pile/gpt2-xl/pile_random_batch.pt", lettered).shape == (
        2048,
        128,
    )


def test_read_texts_gives_empty_texts_to_be_counted(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("one\r\n\nzwölf\n".encode())
    assert list(read_texts(tmp_path / "t.txt")) == ["one", "", "zwölf"]
    assert list(read_texts(write(tmp_path / "t.jsonl", {"text": "one"}, "", {"text": ""}))) == [
        "one",
        "",
    ]
    assert list(read_texts(write(tmp_path / "u.jsonl", {"content": "one"}), key="content")) == [
        "one"
    ]


@pytest.mark.parametrize("name", ["ecbd_2021", "ecbd_2021_22_23"])
def test_the_real_definitions(shared: Path, name: str) -> None:
    texts = list(read_texts(shared / f"data/ecbd/{name}_definition_dedup.jsonl"))
    assert len(texts) == {"ecbd_2021": 156, "ecbd_2021_22_23": 328}[name] and all(texts)


def test_json_lines_of_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"definition": "ok"}\n{"definition": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"UTF-8 text, got the bytes b'\\xe9.* line 2"):
        list(read_texts(path))
    path.write_bytes(b'\xef\xbb\xbf{"definition": "ok"}\r\n')
    assert list(read_texts(path)) == ["ok"]
