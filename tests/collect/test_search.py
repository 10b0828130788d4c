"""A search in chunks gives what one pass gives, and changed data are found out."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recited import CRITERIA, letters, recite

from tl_localize.collect import Collection, collect_memorized
from tl_localize.collect.filter import Filter
from tl_localize.collect.search import Search, chunks_of
from tl_localize.execution import Steps, Store
from tl_localize.texts.readers import Data

LOOSE = replace(CRITERIA, max_jaccard=1)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 7)


class Tokenizer:
    """Numbers, separated by blanks, are tokens."""

    padding_side = "right"

    def __call__(self, text, **options):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, **options):
        return letters(ids)


@pytest.fixture
def model(gpt2_like):
    gpt2_like.tokenizer = Tokenizer()
    return gpt2_like


@pytest.fixture
def files(model, corpus, tmp_path):
    """The same rows as text, JSON lines (with blank lines), and tokens."""
    rows = corpus(model)
    rows.append(rows[0])
    words = [" ".join(map(str, row.tolist())) for row in rows]
    (tmp_path / "a.txt").write_text("\n".join(["", *words]) + "\n")
    (tmp_path / "b.jsonl").write_text(
        "\n\n".join(json.dumps({"text": text, "é": "é"}) for text in words)
    )
    np.save(tmp_path / "c.npy", torch.stack(rows).numpy().astype(np.uint16))
    return {path.suffix[1:]: path for path in tmp_path.iterdir()}


def search_of(model, *paths, stride=None, criteria=LOOSE):
    chunks = chunks_of([Data(source=path) for path in paths], stride, criteria.length)
    return Search(model, chunks, criteria, stride)


def shown(collection):
    return collection.frame.to_csv(), str(collection.report)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kind", "stride"), [("npy", None), ("npy", 3), ("txt", 3), ("jsonl", None)]
)
def test_files_in_chunks_are_the_rows_in_one(model, files, kind, stride, tmp_path, monkeypatch):
    search = search_of(model, files[kind], stride=stride)
    assert len(search.chunks) == 5
    found = search.collection(search.run(store=Store(tmp_path / "out")), n_dev=2)
    monkeypatch.undo()
    rows = np.load(files["npy"]).tolist()
    if kind != "npy":
        rows = [entry.text for entry in Data(source=files[kind]).entries()]
    assert shown(found) == shown(collect_memorized(model, rows, LOOSE, stride=stride, n_dev=2))


def test_windows_are_the_first_tokens_or_one_every_so_many(model):
    (chunk,) = chunks_of([Data(source=torch.arange(20).reshape(2, 10).int())])
    assert [(c.id, c.tokens.tolist()) for c in chunk.windows(model, 4)] == [
        ("row-0", [0, 1, 2, 3]),
        ("row-1", [10, 11, 12, 13]),
    ]
    assert [(c.id, c.tokens[0]) for c in chunk.windows(model, 4, stride=3)][3:] == [
        ("row-1+0", 10),
        ("row-1+3", 13),
        ("row-1+6", 16),
    ]
    assert [len(c.tokens) for c in chunk.windows(model, 12, stride=3)] == [10, 10]
    with pytest.raises(ValueError, match="stride must be a whole number from 1 on, got 0"):
        chunks_of([chunk.data], 0)


class WithBos(Tokenizer):
    """Puts a token first, as those of Llama and Gemma do."""

    bos_token, bos_token_id, eos_token_id = "<s>", 60, 59

    def __call__(self, text, add_special_tokens=True):
        found = super().__call__(text)["input_ids"] if text != "a" else [1]
        return {"input_ids": [self.bos_token_id] * add_special_tokens + found}


def test_texts_begin_as_the_tokenizer_begins_them(gpt2_like, tmp_path):
    gpt2_like.tokenizer = WithBos()
    start = torch.randint(59, (12, 7), generator=torch.Generator().manual_seed(1))
    start[:, 0] = 60
    rows = recite(gpt2_like, start, 16)
    data = [" ".join(map(str, row[1:].tolist())) for row in rows]
    found = collect_memorized(gpt2_like, data, LOOSE, n_dev=1)
    as_tokens = collect_memorized(
        gpt2_like, list(rows), replace(LOOSE, n_prefix=7), n_dev=1, decode=letters
    )
    expected = [(s.id.replace("row", "text"), s.tokens.tolist()) for s in as_tokens.sequences]
    assert len(expected) > 3
    assert [(s.id, s.tokens.tolist()) for s in found.sequences] == expected
    assert {(s.n_prefix, s.bos) for s in found.sequences} == {(7, "<s>")}
    assert found.frame["prefix"].tolist() == [
        letters(s.tokens[1:7].tolist()) for s in found.sequences
    ]
    assert found.frame["distance"].max() == 0
    found.save(tmp_path)
    again = Collection.load(tmp_path).sequences
    for read in (again, list(Data(source=tmp_path).sequences(gpt2_like))):
        assert list(map(vars_of, read)) == list(map(vars_of, found.sequences))
    file = Data(source=tmp_path / "sequences.jsonl")
    assert list(map(vars_of, file.sequences(gpt2_like))) == list(map(vars_of, found.sequences))
    (shorter, *_) = Data(source=tmp_path, n_prefix=3, n_suffix=2).sequences(gpt2_like)
    assert (shorter.n_prefix, len(shorter), shorter.bos) == (4, 6, "<s>")
    once_more = collect_memorized(gpt2_like, Data(source=tmp_path), LOOSE, n_dev=1)
    assert sorted(s.tokens.tolist() for s in once_more.sequences) == sorted(
        s.tokens.tolist() for s in found.sequences
    )
    mixed = collect_memorized(gpt2_like, [*rows[:, 1:], *data], LOOSE, n_dev=1)
    assert len(mixed.sequences) >= len(found.sequences)


def vars_of(sequence):
    return {**vars(sequence), "tokens": sequence.tokens.tolist()}


def test_a_window_that_bos_makes_too_long_is_refused(gpt2_like):
    gpt2_like.tokenizer = WithBos()
    n_ctx = gpt2_like.cfg.n_ctx
    text = " ".join(map(str, range(n_ctx)))
    longest = replace(LOOSE, n_suffix=n_ctx - LOOSE.n_prefix)
    with pytest.raises(
        ValueError, match=f"at most n_ctx={n_ctx}, got {n_ctx + 1}, of which one is "
    ):
        collect_memorized(gpt2_like, [text], longest, n_dev=0)


def test_chunks_have_about_as_many_windows(tmp_path, monkeypatch):
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 10)
    for name, source in (
        ("rows", torch.zeros(10, 400, dtype=torch.long)),
        ("texts", tmp_path / "a.txt"),
    ):
        (tmp_path / "a.txt").write_text(("x" * 1600 + "\n") * 10)
        data = Data(source=source, name=name)
        assert len(chunks_of([data], length=80)) == 1
        assert [chunk.end for chunk in chunks_of([data], 80, length=80)] == [2, 4, 6, 8, 10]
    long = Data(source=torch.zeros(2, 1000, dtype=torch.long))
    assert [chunk.end for chunk in chunks_of([long], 80, length=80)] == [1, 2]
    mixed = Data(source=[[0] * 10, *([[0] * 89] * 5)])  # the first row has one window of 51
    assert [chunk.end for chunk in chunks_of([mixed], 1, length=80)] == [1, 2, 3, 4, 5, 6]


def test_key_of_a_chunk_holds_all_that_its_rows_say():
    def content(**changes):
        row = {"tokens": [1, 2], "who": "a", "kind": "b", **changes}
        (chunk,) = chunks_of([Data(source=[row], id="who", category="kind")])
        return chunk.inputs["content"]

    assert len({content(), content(tokens=[1, 3]), content(who="c"), content(kind="c")}) == 4
    assert content() == content()


@pytest.mark.usefixtures("small")
def test_ids_name_the_file_where_there_are_several(model, files):
    search = search_of(model, files["npy"], files["txt"])
    found = search.collection(search.run(), n_dev=0)
    # the same rows as texts are duplicates
    assert {sequence.id.split("-")[0] for sequence in found.sequences} == {"c/row"}
    rows = np.load(files["npy"]).tolist()
    table = collect_memorized(model, rows, LOOSE, n_dev=0).report.table()
    removed, left = table.loc["exact duplicate", ["removed", "left"]].tolist()
    assert removed == 1 and left > 9
    assert found.report.removed["exact duplicate"] == left + 2 * removed


@pytest.mark.usefixtures("small")
def test_shards_and_another_draw_compute_each_chunk_once(model, files, tmp_path, monkeypatch):
    right = Filter.filter
    calls = []
    monkeypatch.setattr(Filter, "filter", lambda *a: calls.append(1) or right(*a))
    search = search_of(model, files["txt"])
    store = Store(tmp_path / "out")
    n = len(search.chunks)
    found = search.run(store=store, shard=(2, 2))
    assert found.count(None) == n - n // 2
    with pytest.raises(
        ValueError, match=rf"chunks must all be searched, got {n - n // 2} of {n} missing"
    ):
        search.collection(found)
    (numbered, *_) = (chunk for chunk in found[1:] if chunk)
    assert numbered["recited"][0]["id"].startswith("text-")
    found = search.run(store=store)
    assert None not in found and sum(chunk["report"]["n_in"] for chunk in found) == 32
    assert len(search.collection(found, n_dev=1, n_max=4, seed=1).sequences) == 4
    assert len(calls) == n


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["txt", "npy"])
def test_data_that_grow_cost_the_last_chunk_and_what_is_new(model, files, kind):
    def keys():
        return [chunk.inputs for chunk in search_of(model, files[kind]).chunks]

    before = keys()
    if kind == "npy":
        np.save(files[kind], np.load(files[kind])[list(range(31)) + [5] * 9])
    else:
        files[kind].write_text(files[kind].read_text() + files[kind].read_text()[:500])
    after = keys()
    assert before[:-1] == after[: len(before) - 1]
    assert before[-1] not in after
    if kind == "txt":
        files[kind].write_text("1 " + files[kind].read_text())
        assert keys()[0] != after[0] and keys()[1:] == after[1:]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["txt", "npy"])
def test_a_chunk_whose_data_have_changed_is_searched_again(
    model, files, kind, tmp_path, monkeypatch
):
    store = Store(tmp_path / "out")
    n = len(search_of(model, files[kind]).run(store=store))
    right = Filter.filter
    calls = []
    monkeypatch.setattr(Filter, "filter", lambda *a: calls.append(1) or right(*a))
    data = bytearray(files[kind].read_bytes())
    data[400] ^= 1
    files[kind].write_bytes(data)
    changed = search_of(model, files[kind])
    found = shown(changed.collection(changed.run(store=store), n_dev=2))
    assert len(calls) == 1 < n
    fresh = search_of(model, files[kind])
    assert found == shown(fresh.collection(fresh.run(), n_dev=2))


@pytest.mark.usefixtures("small")
def test_tokens_that_are_other_text_are_searched_again(model, files):
    steps = Steps()
    chunks = chunks_of([Data(source=files["npy"])], length=LOOSE.length)
    for decode in (letters, lambda ids: letters(ids)[::2]):
        search = Search(model, chunks, LOOSE, decode=decode)
        found = search.run(store=steps)
        fresh = Search(model, chunks, LOOSE, decode=decode).run()
        assert shown(search.collection(found, n_dev=2)) == shown(search.collection(fresh, n_dev=2))


@pytest.mark.usefixtures("small")
def test_a_failed_chunk_is_recorded_and_the_others_go_on(model, files, tmp_path):
    lines = files["txt"].read_text().splitlines()
    files["txt"].write_text("\n".join([*lines[:20], "70 " * 22, *lines[20:]]))
    search = search_of(model, files["txt"])
    store = Store(tmp_path / "out")
    assert search.run(store=store).count(None) == 1
    (failure,) = store.failures().values()
    assert "tokens must be in [0, 61), got 70 in 'text-" in failure
    with pytest.raises(ValueError, match="tokens must be in"):
        search.run()


@pytest.mark.usefixtures("small")
def test_settings_must_be_those_of_the_folder(model, files, tmp_path):
    search = search_of(model, files["npy"])
    store = Store(tmp_path / "out")
    search.run(store=store)
    for other, message in (
        (
            replace(search, criteria=replace(LOOSE, min_accuracy=0.9)),
            "min_accuracy: 0.7 in the folder, 0.9 now",
        ),
        (
            search_of(model, files["npy"], files["txt"]),
            r"data: \['c.npy'\] in the folder, \['c.npy', 'a.txt'\] now",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            other.run(store=store)


@pytest.mark.usefixtures("small")
def test_shard_does_not_take_rows_of_data_that_have_changed(model, files, tmp_path):
    store = Store(tmp_path / "out")
    search_of(model, files["npy"]).run(store=store)
    rows = np.load(files["npy"])
    np.save(files["npy"], rows[::-1])
    changed = search_of(model, files["npy"])
    n = len(changed.chunks)
    assert changed.run(store=store, shard=(1, 2)).count(None) == n // 2
    assert changed.run(store=store, shard=(2, 2)) == search_of(model, files["npy"]).run()


def test_chunks_open_their_file_again_elsewhere(model, files, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (chunk,) = chunks_of([Data(source=Path("c.npy"))], length=22)
    data = pickle.dumps(chunk)
    assert len(data) < 1000
    monkeypatch.chdir("/")
    assert pickle.loads(data).inputs == chunk.inputs


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "a"}\n', r"columns of tokens or text .*, got only \['body'\]"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"', "path must be a whole json file in UTF-8"),
        ("a.txt", b"", "with at least one row"),
        ("a.npy", b"no array", "path must be a whole .npy file"),
    ],
)
def test_mistakes_in_the_data_are_found_without_a_model(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        chunks_of([Data(source=tmp_path / name)])
    with pytest.raises(FileNotFoundError, match="path must be an existing file"):
        chunks_of([Data(source=tmp_path / f"no-{name}")])
    with pytest.raises(ValueError, match="data must be rows that can be counted, got the stream"):
        chunks_of([Data(source=iter(["a"]))])


def test_a_token_that_no_model_knows_fails_its_chunk_alone(model, files, tmp_path):
    rows = np.load(files["npy"]).astype(np.int64)
    rows[0, 1] = -100
    search = Search(model, chunks_of([Data(source=rows)], length=LOOSE.length), LOOSE)
    store = Store(tmp_path / "out")
    assert search.run(store=store) == [None]
    (reason,) = store.failures().values()
    assert reason.startswith("ValueError: tokens must be in [0, 61), got -100 in 'row-0'")


def test_half_a_character_is_named_with_its_row(model):
    with pytest.raises(ValueError, match=r"valid Unicode, got '\\ud83d' at .* \(at row 1 of"):
        collect_memorized(model, ["1 2", "3 \ud83d"], LOOSE)


def test_repeated_ids_are_told_apart(model, files):
    rows = [{"tokens": row.tolist(), "id": "page"} for row in np.load(files["npy"])]
    rows[3]["id"] = "page#1"
    found = collect_memorized(model, rows, LOOSE, n_dev=1).sequences
    ids = [sequence.id for sequence in found]
    assert len(set(ids)) == len(ids) > 3
    assert all(id.startswith("page#") for id in ids)


def test_files_of_one_name_are_refused(files, tmp_path):
    both = chunks_of([Data(source=files["npy"]), Data(source=tmp_path / "c.npy", name="c.2")])
    assert [chunk.prefix for chunk in both] == ["c.npy/", "c.2/"]
    (tmp_path / "more").mkdir()
    with pytest.raises(ValueError, match="data must be files of different names"):
        chunks_of([Data(source=files["npy"]), Data(source=tmp_path / "more" / "c.npy")])
