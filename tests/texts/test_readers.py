"""Each form of data that users have as sequences, and what is said of broken ones."""

import codecs
import json
import os
import pickle
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from tl_localize.texts.readers import Data, read_sequences, read_tokens

TEXTS = ["the first text is here", "another text than that", "a third of them at end"]
TOKENS = np.array([[ord(letter) for letter in text] for text in TEXTS])
EXPECTED = [(f"sequence-000{i}", 9, text) for i, text in enumerate(TEXTS)]


class Letters:
    """One token for each character."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids, **options):
        return "".join(chr(i) for i in ids)


@pytest.fixture
def lettered():
    """What a reader needs of a model: its tokenizer and the size of its vocabulary."""

    class Model(SimpleNamespace):
        hook_dict = hooks = parameters = named_parameters = __call__ = (
            lambda self, *args, **kwargs: None
        )

    return Model(tokenizer=Letters(), cfg=SimpleNamespace(d_vocab=256), blocks=None)


def write(path, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def parquet(path, **columns):
    pd.DataFrame(columns).to_parquet(path)
    return path


def read(model, source, **options):
    """Id, length of the prefix and text of each sequence."""
    return [
        (sequence.id, sequence.n_prefix, model.tokenizer.decode(sequence.tokens.tolist()))
        for sequence in read_sequences(source, model, **options)
    ]


# Files of token ids


def saved(path, tokens):
    """Tokens in a file of the kind that its suffix says."""
    if path.suffix == ".npy":
        np.save(path, tokens)
    elif path.suffix == ".pt":
        torch.save(torch.from_numpy(tokens), path)
    else:
        save_file({"tokens": torch.from_numpy(tokens), "other": torch.zeros(3)}, path)
    return path


@pytest.mark.parametrize("suffix", ["npy", "pt", "safetensors"])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_token_files_are_mapped_and_never_written(tmp_path, suffix, dtype):
    tokens = np.random.default_rng(0).integers(50304, size=(64, 2049)).astype(dtype)
    path = saved(tmp_path / f"t.{suffix}", tokens)
    found = read_tokens(path)
    assert found.numpy().dtype == dtype and np.array_equal(found.numpy(), tokens)
    maps = Path("/proc/self/maps")
    if maps.is_file():
        areas = [line.split()[0] for line in maps.read_text().splitlines() if str(path) in line]
        ranges = [[int(address, 16) for address in area.split("-")] for area in areas]
        assert any(first <= found.data_ptr() < end for first, end in ranges)  # of the file
    found[0, 0] = 99
    assert np.array_equal(read_tokens(path).numpy(), tokens)


def test_a_safetensors_file_of_one_tensor_may_have_any_name(tmp_path):
    tokens = torch.from_numpy(TOKENS)
    save_file({"any": tokens}, tmp_path / "one.safetensors")
    assert torch.equal(read_tokens(tmp_path / "one.safetensors"), tokens)


class Harmful:
    """Would run code if it were unpickled."""

    def __reduce__(self):
        return (print, ("harm",))


def test_read_tokens_names_files_that_hold_something_else_and_runs_no_code(tmp_path, capsys):
    tokens = torch.from_numpy(TOKENS)
    for name in ("t.npy", "t.pt", "t.safetensors", "t.data"):
        (tmp_path / name).write_bytes(b"\x93NUMPY nothing")
    save_file({"a": tokens, "b": tokens + 1}, tmp_path / "ab.safetensors")
    inside = [Harmful(), {"tokens": tokens}, tokens.float()]
    for i, value in enumerate([*inside, tokens > 3, tokens[0], tokens[:0]]):
        torch.save(value, tmp_path / f"{i}.pt")
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=rf"path must be a whole .* got .*{path.name}"):
            read_tokens(path)
    assert "harm" not in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"must be an existing file, got .*nowhere"):
        read_tokens(tmp_path / "nowhere.npy")


# Rows of named columns


def test_files_of_every_kind(tmp_path, lettered):
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


def test_folders_of_rows(tmp_path, lettered):
    parquet(tmp_path / "train-00000.parquet", tokens=list(TOKENS[:1]))
    parquet(tmp_path / "train-00001.parquet", tokens=list(TOKENS[1:]))
    assert read(lettered, tmp_path, n_prefix=9) == EXPECTED
    (entry,) = Data(source=tmp_path).entries(1, 2)
    assert entry.tokens is not None and entry.tokens.tolist() == TOKENS[1].tolist()


def test_columns_that_are_named(tmp_path, lettered):
    rows = [
        {"body": text, "n": 3 + i, "who": f"w{i}", "kind": "ab"[i % 2], "text": 0}
        for i, text in enumerate(TEXTS)
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    named = {"key": "body", "n_prefix": "n", "id": "who", "category": "kind"}
    found = list(read_sequences(path, lettered, **named))
    about = [(sequence.id, sequence.category, sequence.n_prefix) for sequence in found]
    assert about == [("w0", "a", 3), ("w1", "b", 4), ("w2", "a", 5)]
    assert found[1].text == ("anot", "her text than that")
    for options, message in (
        ({"key": "bodi"}, r"the column 'bodi', got .* at row 0 of .*Did you mean body\?"),
        ({"key": "body", "id": "whom"}, r"the column 'whom', .*Did you mean who\?"),
        ({"key": "body", "n_prefix": "kind"}, "(?s)n_prefix.*'a'.*row 0"),
        ({"key": "n"}, "n must be text or a list of whole numbers, got 3 at row 0"),
        ({"key": "body", "n_prefix": 99}, r"n_prefix must be below .*\(at row 0"),
    ):
        with pytest.raises(ValueError, match=message):
            read(lettered, path, **options)
    with pytest.raises(ValueError, match="n_prefix must be a whole number from 1 on, got 0"):
        Data(source=path, n_prefix=0)


def test_rows_have_their_own_lengths_or_are_cut(tmp_path, lettered):
    rows = [{"tokens": row.tolist()[: 22 - i], "n": 9} for i, row in enumerate(TOKENS)]
    path = write(tmp_path / "a.jsonl", *rows)
    whole = [(id, 9, text[: 22 - i]) for i, (id, _, text) in enumerate(EXPECTED)]
    assert read(lettered, path, n_prefix=9) == read(lettered, path, n_prefix="n") == whole
    cut = [(id, 9, text[:20]) for id, _, text in EXPECTED]
    assert read(lettered, path, n_prefix=9, n_suffix=11) == cut


def test_data_sets_in_python_and_saved(tmp_path, lettered):
    dataset = datasets.Dataset.from_dict({"tokens": TOKENS.tolist(), "who": ["a", "b", "c"]})
    expected = [(who, 9, text) for who, text in zip("abc", TEXTS, strict=True)]
    options = {"n_prefix": 9, "id": "who"}
    splits = datasets.DatasetDict({"train": dataset, "test": dataset})
    splits.save_to_disk(tmp_path)
    rows = list(dataset)
    streamed = dataset.to_iterable_dataset()
    for source in (dataset, streamed, rows, iter(rows), tmp_path / "train"):
        assert read(lettered, source, **options) == expected
    chosen = dataset.with_format("torch").select([2, 0])
    assert read(lettered, chosen, **options) == [expected[2], expected[0]]
    for source in (splits, tmp_path):
        with pytest.raises(ValueError, match="split"):
            read(lettered, source, **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"token": [1]}, r"once .*, got only \['token'\] at row 1 of .*a.jso"),
        ({"text": "a", "tokens": [1]}, r"once .*, got only \['text', 'tokens'\] at row 1"),
        ({"tokens": None}, r"once .*, got only \[\] at row 1"),
        ({"tokens": [0.5, 1.0]}, "a list of whole numbers, got "),
        ({"tokens": []}, r"text must be longer than its prefix, 32 tokens .* got 0.*at row 1"),
        ({"tokens": [1, None]}, r"a list of whole numbers, got \[1, None\] at row 1"),
        ({"tokens": "1 2"}, "tokens must be a list of whole numbers, got '1 2' at row 1"),
        ({"prompt": "a", "completion": 3}, "must be text or a list of whole numbers, .* at row 1"),
        ({"prompt": "ab", "all": "ab"}, "suffix must be text of one token or more.*row 1"),
        ({"tokens": [*range(32), -1]}, "tokens must be in .*, got -1.*at row 1"),
        ([1], "path must be a whole json file"),
        ('{"tokens": [1, 2', "path must be a whole json file"),
        ("[" * 100_000, "path must be a whole json file"),
        ('{"text": ' + "9" * 5000 + "}", "path must be a whole json file"),
    ],
)
def test_a_broken_row_is_named(tmp_path, lettered, row, message):
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "all": "abc"}, row)
    with pytest.raises(ValueError, match=message):
        read(lettered, path)


def test_damaged_and_other_files_are_named(tmp_path, lettered):
    whole = parquet(tmp_path / "whole.parquet", tokens=list(TOKENS)).read_bytes()
    changed = whole[:60].replace(whole[20:40], bytes(20)) + whole[60:]
    damaged = {
        "cut.parquet": whole[:-9],
        "changed.parquet": changed,
        "nothing.parquet": b"",
        "latin.jsonl": b'{"text": "caf\xe9"}\n',
        "latin.txt": b"caf\xe9\n",
        "latin.csv": b"text\ncaf\xe9\n",
        "t.data": b"text\n",
    }
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    datasets.Dataset.from_dict({"tokens": TOKENS.tolist()}).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:200])
    (tmp_path / "notes.md").write_text("some text")
    with pytest.raises(
        ValueError, match=r"path must end in one of .*npy.*notes.md.*Save the texts"
    ):
        read(lettered, tmp_path / "notes.md")
    for name in [*damaged, "folder", "saved"]:
        with pytest.raises(ValueError, match=rf"(data|path) must .*, got .*{name}"):
            read(lettered, tmp_path / name)


@pytest.mark.parametrize(
    "lines", ["text\nTwo roads, diverged\nHello, world", "prefix,suffix\nTwo,roads,\na,b,"]
)
def test_a_row_with_more_fields_than_the_header_is_refused(tmp_path, lettered, lines):
    (tmp_path / "texts.csv").write_text(lines)
    with pytest.raises(ValueError, match=r"more fields than the header: .* need quotes.*Mend it"):
        read(lettered, tmp_path / "texts.csv")


def test_a_changed_file_is_read_anew_and_nothing_else_is_written(tmp_path, monkeypatch):
    """No cache of an earlier reading is served, none is left, and the network is not needed."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for call in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, call, None)  # a call would raise
    monkeypatch.setattr(socket, "getaddrinfo", None)
    path = tmp_path / "a.txt"
    for text in ("one", "two"):
        path.write_text(text)
        os.utime(path, (1, 1))
        assert [entry.text for entry in Data(source=path).entries()] == [text]
    assert not list(home.rglob("*.arrow"))
    assert not list(temporary.glob("tl-localize-*"))


def test_tokens_outside_the_vocabulary_are_named(tmp_path, lettered):
    tokens = TOKENS.copy()
    tokens[1, 5] = 300
    np.save(tmp_path / "t.npy", tokens)
    with pytest.raises(ValueError, match=r"in \[0, 256\), got 300.*at row 1 of .*t.npy"):
        read(lettered, tmp_path / "t.npy", n_prefix=9)


@pytest.mark.parametrize("ids", [False, True])
def test_what_follows_a_prompt_is_read_once(lettered, ids):
    prompt, whole = TEXTS[0][:9], TEXTS[0]
    row = {"prompt": prompt, "all": whole}
    broken = {"prompt": TEXTS[1], "all": whole}
    if ids:
        row, broken = ({k: [*map(ord, v)] for k, v in some.items()} for some in (row, broken))
    assert read(lettered, [row]) == EXPECTED[:1]
    with pytest.raises(ValueError, match=r"all must begin with the prompt, got .* at row 0"):
        read(lettered, [broken])


def test_counts_beside_empty_cells_are_floats_in_a_table(lettered, tmp_path):
    frame = pd.DataFrame({"text": ["a" * 34, "b" * 34], "n_prefix": [3, None]})
    assert [length for _, length, _ in read(lettered, frame)] == [3, 32]
    frame.to_csv(tmp_path / "rows.csv", index=False)
    assert [length for _, length, _ in read(lettered, tmp_path / "rows.csv")] == [3, 32]
    frame.loc[0, "n_prefix"] = 3.5
    with pytest.raises((TypeError, ValueError), match=r"n_prefix must be .*got 3\.5.*at row 0"):
        read(lettered, frame)


def test_a_column_bos_of_something_else_is_not_read(lettered):
    row = {"tokens": [*map(ord, TEXTS[0])], "n_prefix": 9}
    for value in (False, True, 0):
        assert read(lettered, [row | {"bos": value}]) == read(lettered, [row])


def test_counts_of_nothing_are_refused(lettered):
    tokens = [*map(ord, TEXTS[0])]
    with pytest.raises(ValueError, match=r"n_prefix must be .*got 0"):
        read(lettered, [{"tokens": tokens, "n_prefix": 0}])
    with pytest.raises(ValueError, match=r"prefix must prompt the model, got nothing at row 0"):
        read(lettered, [{"prefix": "", "suffix": TEXTS[0]}])
    with pytest.raises(ValueError, match=r"n_suffix must be .*got -4"):
        Data(source=[], n_suffix=-4)


# Others


def test_cells_of_a_csv_are_text(tmp_path, lettered):
    """pandas takes NA and None for nothing, and 001 for 1."""
    lines = ["id,category,text,n_prefix", "001,NA,the first text,3", "None,null,None,", "3,x,,4"]
    path = tmp_path / "a.csv"
    for encoding in ("utf-8", "utf-8-sig"):  # a spreadsheet puts a mark first
        path.write_text("\n".join(lines) + "\n", encoding=encoding)
        found = list(Data(source=path).entries())
        about = [(entry.id, entry.category, entry.text, entry.n_prefix) for entry in found]
        expected = [("001", "NA", "the first text", 3), ("None", "null", "None", None)]
        assert about == [*expected, ("3", "x", "", 4)]
    first, second = Data(source=path, n_prefix="n_prefix").entries(0, 2)
    assert (first.n_prefix, second.n_prefix) == (3, None)
    sequences = list(Data(source=path).sequences(lettered, third_of_short=True))
    assert [sequence.id for sequence in sequences] == ["001", "None"]  # a blank text is left out


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("né un\n\ntwo\n", encoding="utf-8-sig")
    assert [entry.text for entry in Data(source=path).entries()] == ["né un", "", "two"]


def test_data_travel_by_their_paths(tmp_path, monkeypatch):
    write(tmp_path / "t.txt", *TEXTS)
    monkeypatch.chdir(tmp_path)
    data = Data(source="t.txt", n_prefix=9)
    assert data.size == 3
    packed = pickle.dumps(data)
    monkeypatch.chdir("/")
    assert len(packed) < 1000 and pickle.loads(packed).size == 3


def test_manual_sets_are_cut_at_the_prompt(tmp_path, lettered):
    row = {"prompt": "ab", "all": "abcde", "prompt_len": 2, "category": ["letters", "early"]}
    rows = row, row | {"category": [], "prompt": "a"}, row | {"category": None}
    first, second, third = read_sequences(write(tmp_path / "m.jsonl", *rows), lettered)
    assert (first.category, first.n_prefix, first.text) == ("letters", 2, ("ab", "cde"))
    assert (second.category, second.n_prefix, third.category) == ("", 1, "")


def test_texts_begin_as_the_tokenizer_begins_them_and_tokens_stay(lettered):
    """Models that were trained with a beginning-of-text token read it before every text."""

    class WithBos(Letters):
        bos_token_id, bos_token, eos_token_id = 1, "<s>", 2

        def __call__(self, text, add_special_tokens=True):
            ids = super().__call__(text)["input_ids"]
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    lettered.tokenizer = WithBos()
    text, ids = TEXTS[0], TOKENS[0].tolist()
    rows = [
        ({"prompt": text[:9], "completion": text[9:]}, None, [1]),
        ({"text": text}, 9, [1]),
        ({"tokens": ids}, 9, []),
    ]
    for row, n_prefix, bos in rows:
        (sequence,) = read_sequences([row], lettered, n_prefix=n_prefix, n_suffix=5)
        assert sequence.tokens.tolist() == [*bos, *ids[:14]]
        assert (sequence.n_prefix, sequence.bos) == (9 + len(bos), "<s>" * len(bos))
        assert sequence.text == (text[:9], text[9:14])


def test_entries_keep_empty_texts_to_be_counted(tmp_path):
    (tmp_path / "t.txt").write_bytes("one\r\n\nzwölf\n".encode())
    rows = write(tmp_path / "t.jsonl", {"text": "one"}, "", {"text": ""})
    for path, texts in ((tmp_path / "t.txt", ["one", "", "zwölf"]), (rows, ["one", ""])):
        assert [entry.text for entry in Data(source=path).entries()] == texts


def test_json_lines_may_differ_in_columns_and_types(tmp_path, lettered):
    rows: list[dict[str, object]] = [{"text": TEXTS[0], "n": 1}, {"text": TEXTS[1], "n": "one"}]
    path = write(tmp_path / "a.jsonl", *rows, "", {"text": TEXTS[2], "extra": {"deep": [1]}})
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read(lettered, path, n_prefix=9) == EXPECTED
    data = Data(source=path)
    (entry,) = data.entries(2, 3)
    assert (data.size, entry.text) == (3, TEXTS[2])


def test_texts_that_look_like_dates_are_texts(tmp_path, lettered):
    row = {"id": "2024-05-01", "category": "2024-05-01T10:00:00Z", "prefix": "on "}
    rows = [row | {"suffix": "1984-03-02"}] * 2
    whole = tmp_path / "list.json"
    whole.write_text(json.dumps(rows))
    for path in (write(tmp_path / "dates.jsonl", *rows), whole):
        first, second = read_sequences(path, lettered)
        assert (first.id, first.category) == (row["id"], row["category"])
        assert first.text == second.text == ("on ", "1984-03-02")


def test_rows_of_any_iterable(lettered):
    frame = pd.DataFrame({"text": TEXTS}, index=[5, 6, 7])
    by_name = dict(zip("abc", TEXTS, strict=True))
    for source in (frame, frame["text"], by_name.values(), iter(TEXTS), tuple(TEXTS)):
        assert read(lettered, source, n_prefix=9) == EXPECTED
    assert sorted(text for *_, text in read(lettered, set(TEXTS), n_prefix=9)) == sorted(TEXTS)


@pytest.mark.parametrize("nothing", [None, float("nan"), np.float32("nan"), pd.NA, pd.NaT])
def test_cells_with_nothing_in_them_are_left_out(lettered, nothing):
    tokens = [*map(ord, TEXTS[0])]
    row = {"tokens": tokens, "id": nothing, "category": nothing, "bos": nothing, "n_prefix": 9}
    frame = pd.DataFrame([row, row | {"id": "b", "category": "poem", "bos": ""}], dtype=object)
    first, second = Data(source=frame).entries()
    assert (first.id, first.category, first.bos, first.n_prefix) == ("", "", "", 9)
    assert (second.id, second.category) == ("b", "poem")


@pytest.mark.parametrize("row", [{"prefix": 5, "suffix": 7}, {"prompt": 5, "all": 7}, {"text": 5}])
def test_a_number_in_place_of_a_text_is_named(lettered, row):
    with pytest.raises(ValueError, match=r"must be text or a list of whole numbers, got 5 at row"):
        read(lettered, [row])


def test_a_text_that_is_shorter_than_the_usual_prefix_says_so(lettered):
    with pytest.raises(ValueError, match=r"text must be longer .* 32 .*got 31\. .*row"):
        read(lettered, [{"tokens": [7] * 31}])
