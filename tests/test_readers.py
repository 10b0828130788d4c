"""Each form of data that users have as sequences, and what is said of broken ones."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from tl_localize.readers import Data, read_sequences, read_tokens, stacked_tokens

TEXTS = ["the first text is here", "another text than that", "a third of them at end"]
TOKENS = np.array([[ord(letter) for letter in text] for text in TEXTS])
EXPECTED = [(f"sequence-000{i}", 9, text) for i, text in enumerate(TEXTS)]


class Letters:
    """One token for each character."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(chr(i) for i in ids)


@pytest.fixture
def lettered() -> Any:
    """What a reader needs of a model: its tokenizer and the size of its vocabulary."""

    class Model(SimpleNamespace):
        hook_dict = hooks = parameters = __call__ = lambda self, *args, **kwargs: None

    return Model(tokenizer=Letters(), cfg=SimpleNamespace(d_vocab=256), blocks=None)


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def parquet(path: Path, **columns: Any) -> Path:
    pd.DataFrame(columns).to_parquet(path)
    return path


def read(model: Any, source: Any, **options: Any) -> list[tuple[str, int, str]]:
    """Id, length of the prefix and text of each sequence."""
    return [
        (one.id, one.n_prefix, model.tokenizer.decode(one.tokens.tolist()))
        for one in read_sequences(source, model, **options)
    ]


# Files of token ids


def saved(path: Path, tokens: np.ndarray) -> Path:
    """Tokens in a file of the kind that its suffix says."""
    if path.suffix == ".npy":
        np.save(path, tokens)
    elif path.suffix == ".pt":
        torch.save(torch.from_numpy(tokens), path)
    else:
        save_file({"tokens": torch.from_numpy(tokens), "other": torch.zeros(3)}, path)
    return path


@pytest.mark.parametrize("suffix", ["npy", "pt", "safetensors"])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_token_files_are_read_and_never_written(tmp_path: Path, suffix: str, dtype: Any) -> None:
    path = saved(tmp_path / f"t.{suffix}", TOKENS.astype(dtype))
    found = read_tokens(path)
    assert str(found.dtype) == f"torch.{np.dtype(dtype)}"
    assert found.tolist() == TOKENS.tolist()
    found[0, 0] = 99
    assert read_tokens(path).tolist() == TOKENS.tolist()


def test_other_token_files(tmp_path: Path) -> None:
    tokens = torch.from_numpy(TOKENS)
    torch.save(tokens, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"any": tokens}, tmp_path / "one.safetensors")
    for name in ("old.pt", "one.safetensors"):
        assert torch.equal(read_tokens(tmp_path / name), tokens)


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_batches_of_pythias_shape_are_mapped(tmp_path: Path, suffix: str) -> None:
    tokens = np.random.default_rng(0).integers(50304, size=(1024, 2049), dtype=np.uint16)
    path = saved(tmp_path / f"batch.{suffix}", tokens)
    found = read_tokens(path)
    assert np.array_equal(found.numpy(), tokens)
    maps = Path("/proc/self/maps")
    if maps.is_file():
        (area,) = (
            line.split()[0] for line in maps.read_text().splitlines() if line.endswith(str(path))
        )
        first, end = (int(address, 16) for address in area.split("-"))
        assert first <= found.data_ptr() < end  # its memory is the file's
    (entry,) = Data(source=path).entries(1000, 1001)
    assert entry.tokens is not None and np.array_equal(entry.tokens.numpy(), tokens[1000])


class Harmful:
    """Would run code if it were unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("harm",))


def test_read_tokens_refuses_to_run_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(Harmful(), tmp_path / "t.pt")
    with pytest.raises(ValueError, match=r"a whole .pt file of one tensor, got "):
        read_tokens(tmp_path / "t.pt")
    assert "harm" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_read_tokens_names_files_that_hold_something_else(tmp_path: Path) -> None:
    (tmp_path / "t.npy").write_bytes(b"\x93NUMPY nothing")
    for name in ("t.pt", "t.safetensors"):
        (tmp_path / name).write_bytes(b"nothing")
    (tmp_path / "empty.pt").write_bytes(b"")
    tokens = torch.from_numpy(TOKENS)
    save_file({"a": tokens, "b": tokens + 1}, tmp_path / "ab.safetensors")
    inside = {
        "dict": {"tokens": tokens},
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "sparse": torch.ones(2, 2, dtype=torch.long).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        "meta": torch.ones(2, 2, dtype=torch.long, device="meta"),
        "float": tokens.float(),
        "bool": tokens > 3,
        "vector": tokens[0],
        "none": tokens[:0],
    }
    for name, value in inside.items():
        torch.save(value, tmp_path / f"{name}.pt")
    paths = list(tmp_path.iterdir())
    assert len(paths) == 14
    for path in paths:
        message = rf"path must be a whole {path.suffix} file of one tensor, got .*{path.name}"
        with pytest.raises(ValueError, match=message):
            read_tokens(path)
    with pytest.raises(ValueError, match=r"path must end in .npy, .pt, .safetensors .*, got .*csv"):
        read_tokens(write(tmp_path / "t.csv", "1,2"))
    with pytest.raises(FileNotFoundError, match=r"must be an existing file, got .*nowhere"):
        read_tokens(tmp_path / "nowhere.npy")


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    """Without the check, the next touch of a page that is gone kills the process with SIGBUS."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(1 << 20).reshape(-1, 64))
    rows = Data(source=path).entries()
    next(rows)
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ValueError, match=r"data must be whole, .*tokens\.npy.* has become shorter"):
        list(rows)


def test_a_prefix_file_and_a_suffix_file_are_the_rows_side_by_side(
    tmp_path: Path, lettered: Any
) -> None:
    np.save(tmp_path / "prefix.npy", TOKENS[:, :9].astype(np.uint16))
    np.save(tmp_path / "suffix.npy", TOKENS[:, 9:])
    prefix, suffix = str(tmp_path / "prefix.npy"), tmp_path / "suffix.npy"
    assert read(lettered, prefix, suffix=suffix) == EXPECTED
    assert read(lettered, prefix, suffix=suffix, n_prefix=3) == [
        (id, 3, text) for id, _, text in EXPECTED
    ]
    np.save(suffix, TOKENS[:2, 9:])
    with pytest.raises(ValueError, match=r"must have as many rows, got 3 and 2"):
        read(lettered, prefix, suffix=suffix)


# Rows of named columns


def test_files_of_every_kind(tmp_path: Path, lettered: Any) -> None:
    pairs = pd.DataFrame([{"prompt": text[:9], "completion": text[9:]} for text in TEXTS])
    halves = [{"prefix": text[:9], "suffix": text[9:]} for text in TEXTS]
    in_tokens = [{"prefix": row[:9].tolist(), "suffix": row[9:].tolist()} for row in TOKENS]
    pairs.to_parquet(tmp_path / "a.parquet")
    pairs.to_csv(tmp_path / "a.csv", index=False)
    write(tmp_path / "a.json", *pairs.to_dict("records"))
    write(tmp_path / "b.jsonl", *halves)
    write(tmp_path / "c[1]*.jsonl", "", *in_tokens)  # no pattern
    write(tmp_path / ".d.jsonl", *({"text": text} for text in TEXTS))
    write(tmp_path / "e.jsonl", *({"definition": text, "note": None} for text in TEXTS))
    write(tmp_path / "f.txt", "", *TEXTS, " ")
    for column in ("tokens", "token_ids", "input_ids"):
        parquet(tmp_path / f"{column}.parquet", index=[5, 7, 9], **{column: list(TOKENS)})
    for path in tmp_path.iterdir():
        prefix_is_known = path.name[0] in "abc"
        assert read(lettered, path, n_prefix=None if prefix_is_known else 9) == EXPECTED, path
    with pytest.raises(ValueError, match=r"path must end in .*\.json, .*, got '.*t.data'"):
        read(lettered, write(tmp_path / "t.data", *TEXTS))


def test_folders_of_rows(tmp_path: Path, lettered: Any) -> None:
    parquet(tmp_path / "train-00000.parquet", tokens=list(TOKENS[:1]))
    parquet(tmp_path / "train-00001.parquet", tokens=list(TOKENS[1:]))
    assert read(lettered, tmp_path, n_prefix=9) == EXPECTED
    (entry,) = Data(source=tmp_path).entries(1, 2)
    assert entry.tokens is not None and entry.tokens.tolist() == TOKENS[1].tolist()


def test_columns_that_are_named(tmp_path: Path, lettered: Any) -> None:
    rows = [
        {"body": text, "n": 3 + i, "who": f"w{i}", "kind": "ab"[i % 2], "text": 0}
        for i, text in enumerate(TEXTS)
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    named = {"key": "body", "n_prefix": "n", "id": "who", "category": "kind"}
    found = list(read_sequences(path, lettered, **named))
    about = [(one.id, one.category, one.n_prefix) for one in found]
    assert about == [("w0", "a", 3), ("w1", "b", 4), ("w2", "a", 5)]
    assert found[1].text == ("anot", "her text than that")
    for options, message in (
        ({"key": "bodi"}, r"the column 'bodi', got only \[.*\] at row 0 of .*Did you mean body\?"),
        ({"key": "body", "id": "whom"}, r"the column 'whom', .*Did you mean who\?"),
        ({"key": "body", "category": "kinds"}, r"the column 'kinds', .*Did you mean kind\?"),
        ({"key": "body", "n_prefix": "kind"}, "(?s)n_prefix.*'a'.*row 0"),
        ({"key": "n"}, "n must be a list of whole numbers, got 3 at row 0"),
        ({"key": "body", "n_prefix": 99}, r"n_prefix must be at least 1 and below .*\(at row 0"),
    ):
        with pytest.raises(ValueError, match=message):
            read(lettered, path, **options)
    for option in ("n_prefix", "n_suffix"):
        with pytest.raises(ValueError, match=f"{option} must be a whole number from 1 on, got 0"):
            Data(source=path, **{option: 0})


def test_rows_of_other_lengths_need_a_column_or_a_cut(tmp_path: Path, lettered: Any) -> None:
    rows = [{"tokens": row.tolist()[: 22 - i], "n": 9} for i, row in enumerate(TOKENS)]
    path = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(ValueError, match=r"rows must have 22 tokens, as the first one, got 21 at"):
        read(lettered, path, n_prefix=9)
    assert read(lettered, path, n_prefix="n") == [
        (id, 9, text[: 22 - i]) for i, (id, _, text) in enumerate(EXPECTED)
    ]
    cut = [(id, 9, text[:20]) for id, _, text in EXPECTED]
    assert read(lettered, path, n_prefix=9, n_suffix=11) == cut
    with pytest.raises(ValueError, match=r"n_prefix \+ n_suffix = 21 tokens, got 20. .*row 2"):
        read(lettered, path, n_prefix=9, n_suffix=12)


def test_data_sets_in_python_and_saved(tmp_path: Path, lettered: Any) -> None:
    dataset = datasets.Dataset.from_dict({"tokens": TOKENS.tolist(), "who": ["a", "b", "c"]})
    expected = [(who, 9, text) for who, text in zip("abc", TEXTS, strict=True)]
    options: dict[str, Any] = {"n_prefix": 9, "id": "who"}
    dataset.save_to_disk(tmp_path / "saved")
    splits = datasets.DatasetDict({"train": dataset, "test": dataset})
    splits.save_to_disk(tmp_path / "splits")
    rows = ({"tokens": row, "who": who} for row, who in zip(TOKENS, "abc", strict=True))
    streamed = dataset.to_iterable_dataset()
    for source in (dataset, streamed, rows, tmp_path / "saved", tmp_path / "splits" / "train"):
        assert read(lettered, source, **options) == expected
    chosen = dataset.with_format("torch").select([2, 0])
    assert read(lettered, chosen, **options) == [expected[2], expected[0]]
    assert read(lettered, dataset.filter(lambda row: row["who"] > "a"), **options) == expected[1:]
    with pytest.raises(ValueError, match=r"got a DatasetDict of train, test. Pass data\[SPLIT\]"):
        read(lettered, splits, **options)
    with pytest.raises(ValueError, match=r"with the splits test, train. Name one"):
        read(lettered, tmp_path / "splits", **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"token": [1]}, r"columns of tokens or text .*, got only \['token'\] at row 1 of .*a.jso"),
        ({"text": "a", "tokens": [1]}, "the tokens or the text once, got tokens, text at row 1"),
        ({"tokens": [0.5, 1.0]}, "a list of whole numbers, got "),
        ({"tokens": [[1, 2], [3]]}, "a list of whole numbers, got .* at row 1"),
        ({"tokens": []}, r"a list of whole numbers, got \[\] at row 1"),
        ({"tokens": None}, r"columns of tokens or text .*, got only \[\] at row 1"),
        ({"tokens": [1, None]}, r"a list of whole numbers, got \[1, None\] at row 1"),
        ({"tokens": "1 2"}, "a list of whole numbers, got '1 2' at row 1"),
        ({"prompt": "a", "completion": 3}, "completion must be text, got 3 at row 1"),
        ({"prompt": "ab", "all": "xbc"}, "all must begin with prompt, got 'xbc' .* at row 1"),
        ({"prompt": "ab", "all": "ab"}, "suffix must be text.*row 1"),
        ({"text": "  "}, "n_prefix must be at least 1 and below .*row 1"),
        ({"tokens": [1, -1]}, "tokens must be in .*, got -1 at row 1"),
        ([1], "path must be a whole json file in UTF-8, got .*a.jsonl"),
        ('{"tokens": [1, 2', "path must be a whole json file in UTF-8, got .*a.jsonl"),
        ("[" * 100_000, "path must be a whole json file in UTF-8, got .*a.jsonl"),
        ('{"text": ' + "9" * 5000 + "}", "must be .*, got .*inf"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, lettered: Any, row: Any, message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "all": "abc"}, row)
    with pytest.raises(ValueError, match=message):
        read(lettered, path)


def test_empty_damaged_and_other_files_are_named(tmp_path: Path, lettered: Any) -> None:
    parquet(tmp_path / "whole.parquet", tokens=list(TOKENS))
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-9])
    changed = whole[:60].replace(whole[20:40], bytes(20)) + whole[60:]
    (tmp_path / "changed.parquet").write_bytes(changed)
    (tmp_path / "nothing.parquet").write_bytes(b"")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "latin.csv").write_bytes(b"text\ncaf\xe9\n")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "empty.txt").write_text("")
    parquet(tmp_path / "empty.parquet", tokens=[])
    for path in [*tmp_path.iterdir()]:
        if path.name != "whole.parquet":
            message = rf"in UTF-8, got .*{path.name}|at least one row, got none in .*{path.name}"
            with pytest.raises(ValueError, match=message):
                read(lettered, path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"or a folder of parquet files, got .*folder"):
        read(lettered, tmp_path / "folder")


def test_a_damaged_saved_data_set_is_named(tmp_path: Path, lettered: Any) -> None:
    datasets.Dataset.from_dict({"tokens": TOKENS.tolist()}).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"path must be a whole saved data set, got .*saved"):
        read(lettered, tmp_path / "saved")


def test_a_changed_file_is_read_anew_and_nothing_else_is_written(tmp_path: Path) -> None:
    """No cache of an earlier reading is served, none is left, and the network is not needed."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    script = (
        "import os, socket, sys\n"
        "socket.socket.connect = socket.getaddrinfo = None  # a call would raise\n"
        "from tl_localize.readers import Data\n"
        "for text in ('one', 'two'):\n"
        "    open(sys.argv[1], 'w').write(text)\n"
        "    os.utime(sys.argv[1], (1, 1))\n"
        "    print([one.text for one in Data(source=sys.argv[1]).entries()])\n"
    )
    homes = {"HOME": str(home), "HF_HOME": str(home / "hf"), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.txt")],
        env={**os.environ, **homes},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["['one']", "['two']"]
    assert "Generating" not in done.stderr
    assert not list((home / "hf").rglob("*.arrow"))
    assert not list(temporary.glob("tl-localize-*"))


# Tokens of another tokenizer


def test_tokens_outside_the_vocabulary_are_named(tmp_path: Path, lettered: Any) -> None:
    tokens = TOKENS.copy()
    tokens[1, 5] = 300
    np.save(tmp_path / "t.npy", tokens)
    with pytest.raises(ValueError, match=r"in \[0, 256\), got 300 at row 1 of .*t.npy"):
        read(lettered, tmp_path / "t.npy", n_prefix=9)


def test_tokens_of_another_tokenizer_are_refused_with_what_they_read() -> None:
    from tl_localize import load_model
    from tl_localize.reference import reference_sequences

    model = load_model("reference")
    tokens = torch.stack([one.tokens for one in reference_sequences(model)])
    assert len(list(read_sequences(tokens, model))) == len(tokens)
    foreign = (tokens * 7 + 13) % model.cfg.d_vocab
    wrong = r"tokenizer makes, got \d+% of them in the first \d+ rows, the first of which begins "
    with pytest.raises(ValueError, match=wrong):
        next(read_sequences(foreign, model))
    assert len(list(read_sequences(foreign, model, any_tokens=True))) == len(tokens)


def test_real_tokens_of_gpt2_are_not_pythias(shared: Path, lettered: Any) -> None:
    from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

    folder = shared / "data/tokenizers"
    files = [shared / f"data/satml/train_{part}.npy" for part in ("prefix", "suffix")]
    data = Data(source=files[0], suffix=files[1])
    lettered.cfg.d_vocab = 50304
    lettered.tokenizer = GPT2Tokenizer(
        vocab=str(folder / "gpt2/vocab.json"), merges=str(folder / "gpt2/merges.txt")
    )
    found = list(data.sequences(lettered))
    assert (len(found), {(one.n_prefix, len(one)) for one in found}) == (500, {(50, 100)})
    assert found[7].suffix.tolist() == np.load(files[1])[7].tolist()
    lettered.tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "gpt-neox-20b/tokenizer.json")
    )
    with pytest.raises(ValueError, match="must be those that the model's tokenizer makes, got "):
        list(data.sequences(lettered))


# Others


def test_data_travel_by_their_paths(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "t.txt", *TEXTS)
    monkeypatch.chdir(tmp_path)
    data = Data(source="t.txt", n_prefix=9)
    assert data.size == 3
    packed = pickle.dumps(data)
    monkeypatch.chdir("/")
    assert len(packed) < 1000 and pickle.loads(packed).size == 3


def test_stacked_tokens_take_the_first_rows_of_tables(tmp_path: Path, lettered: Any) -> None:
    path = parquet(tmp_path / "t.parquet", tokens=list(TOKENS))
    assert stacked_tokens(path, lettered, 2).tolist() == TOKENS[:2].tolist()
    with pytest.raises(ValueError, match="data must hold rows of tokens of one length"):
        stacked_tokens(write(tmp_path / "t.txt", *TEXTS), lettered)


def test_manual_sets_are_cut_at_the_prompt(tmp_path: Path, lettered: Any) -> None:
    row = {"prompt": "ab", "all": "abcde", "prompt_len": 2, "category": ["letters", "early"]}
    rows = row, row | {"category": [], "prompt": "a"}, row | {"category": None}
    first, second, third = read_sequences(write(tmp_path / "m.jsonl", *rows), lettered)
    assert (first.category, first.n_prefix, first.text) == ("letters", 2, ("ab", "cde"))
    assert (second.category, second.n_prefix, third.category) == ("", 1, "")


def test_texts_begin_as_the_tokenizer_begins_them_and_tokens_stay(
    tmp_path: Path, lettered: Any
) -> None:
    """Models that were trained with a beginning-of-text token read it before every text."""

    class WithBos(Letters):
        bos_token_id, bos_token, eos_token_id = 1, "<s>", 2

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            ids = super().__call__(text)["input_ids"]
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    lettered.tokenizer = WithBos()
    pair, whole, tokens = (
        {"prompt": TEXTS[0][:9], "completion": TEXTS[0][9:]},
        {"text": TEXTS[0]},
        {"tokens": TOKENS[0].tolist()},
    )
    for row, n_prefix, bos in ((pair, None, True), (whole, 9, True), (tokens, 9, False)):
        path = write(tmp_path / "a.jsonl", row)
        (one,) = read_sequences(path, lettered, n_prefix=n_prefix, n_suffix=5)
        assert one.tokens.tolist() == [*([1] * bos), *TOKENS[0, :14]]
        assert (one.n_prefix, one.bos) == (9 + bos, "<s>" * bos)
        assert one.text == (TEXTS[0][:9], TEXTS[0][9:14])


def test_the_real_manual_set(shared: Path, lettered: Any) -> None:
    from transformers import GPT2Tokenizer

    tokenizer = shared / "data/tokenizers/gpt2"
    lettered.tokenizer = GPT2Tokenizer(
        vocab=str(tokenizer / "vocab.json"), merges=str(tokenizer / "merges.txt")
    )
    lettered.cfg.d_vocab = 50257
    path = shared / "data/manual/memorized_data-gpt2-xl.jsonl"
    sequences = list(read_sequences(path, lettered))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(sequences) == 105
    assert [one.n_prefix for one in sequences] == [row["prompt_len"] for row in rows]
    assert sequences[0].category == "address"


def test_the_real_token_files(shared: Path, lettered: Any) -> None:
    lettered.tokenizer, lettered.cfg.d_vocab = None, 50304
    path = shared / "data/pile/pythia-2.8b-deduped-v0/pile_bs0-100-dedup.pt"
    sequences = list(read_sequences(path, lettered))
    assert (len(sequences), sequences[3].n_prefix, sequences[3].id) == (505, 32, "sequence-0003")
    path = shared / "data/pile/gpt2-xl/pile_random_batch.pt"
    assert stacked_tokens(path, lettered).shape == (2048, 128)


@pytest.mark.parametrize(("name", "n"), [("ecbd_2021", 156), ("ecbd_2021_22_23", 328)])
def test_the_real_definitions(shared: Path, name: str, n: int) -> None:
    path = shared / f"data/ecbd/{name}_definition_dedup.jsonl"
    texts = [one.text for one in Data(source=path).entries()]
    assert len(texts) == n and all(texts)


def test_entries_keep_empty_texts_to_be_counted(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("one\r\n\nzwölf\n".encode())
    assert [one.text for one in Data(source=tmp_path / "t.txt").entries()] == ["one", "", "zwölf"]
    path = write(tmp_path / "t.jsonl", {"text": "one"}, "", {"text": ""})
    assert [one.text for one in Data(source=path).entries()] == ["one", ""]
