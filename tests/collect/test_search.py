"""A search in chunks gives what one pass gives; the plan reads next to nothing; changed data are
found out.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recited import CRITERIA, letters

from tl_localize.collect import Criteria, collect_memorized, text_windows, token_windows
from tl_localize.collect.filter import Filter
from tl_localize.collect.search import Search, SearchResults, chunks_of, parse_windows
from tl_localize.execution.engine import InProcess
from tl_localize.execution.store import Store
from tl_localize.readers import Data

LOOSE = replace(CRITERIA, max_jaccard=1)


@pytest.fixture
def small(monkeypatch: Any) -> None:
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 7)


class Tokenizer:
    """Numbers, separated by blanks, are tokens."""

    padding_side = "right"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return letters(ids)


@pytest.fixture
def model(gpt2_like: Any) -> Any:
    gpt2_like.tokenizer = Tokenizer()
    return gpt2_like


@pytest.fixture
def files(model: Any, corpus: Any, tmp_path: Path) -> dict[str, Path]:
    """The same rows as text, JSON lines (with blank lines), and tokens."""
    rows = [*corpus(model), corpus(model)[0]]
    words = [" ".join(map(str, row.tolist())) for row in rows]
    (tmp_path / "a.txt").write_text("\n".join(["", *words]) + "\n")
    (tmp_path / "b.jsonl").write_text(
        "\n\n".join(json.dumps({"text": text, "é": "é"}) for text in words)
    )
    np.save(tmp_path / "c.npy", torch.stack(rows).numpy().astype(np.uint16))
    return {path.suffix[1:]: path for path in tmp_path.iterdir()}


def search_of(
    model: Any, *paths: Path, stride: int | None = None, criteria: Criteria = LOOSE
) -> Search:
    chunks = chunks_of([Data(source=path) for path in paths], stride, criteria.length)
    return Search(model, chunks, criteria, stride)


def shown(collection: Any) -> tuple[str, str, dict[str, list[str]]]:
    return collection.frame.to_csv(), str(collection.report), collection.report.examples


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("stride", [None, 3])
def test_rows_in_chunks_are_the_rows_in_one_stream(
    model: Any, files: Any, stride: int | None, tmp_path: Path
) -> None:
    rows = torch.from_numpy(np.load(files["npy"]))
    stream = token_windows(rows, LOOSE.length, stride)
    expected = shown(collect_memorized(model, stream, LOOSE, n_dev=2))
    search = search_of(model, files["npy"], stride=stride)
    assert len(search.chunks) == 5
    assert shown(search.collection(search.run(store=Store(tmp_path / "out")), n_dev=2)) == expected
    given = Search(model, chunks_of([Data(source=rows)], stride, LOOSE.length), LOOSE, stride)
    assert shown(given.collection(given.run(), n_dev=2)) == expected


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_texts_in_chunks_are_the_texts_in_one_stream(
    model: Any, files: Any, kind: str, tmp_path: Path
) -> None:
    texts = [one.text for one in Data(source=files[kind]).entries()]
    stream = text_windows(texts, model, LOOSE.length)
    expected = collect_memorized(model, stream, LOOSE, n_dev=2)
    search = search_of(model, files[kind])
    assert len(search.chunks) == 5
    found = search.collection(search.run(store=Store(tmp_path / "out")), n_dev=2)
    assert shown(found) == shown(expected)


def test_chunks_have_about_as_many_windows(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 10)
    for name, source in (
        ("rows", torch.zeros(10, 400, dtype=torch.long)),
        ("texts", tmp_path / "a.txt"),
    ):
        (tmp_path / "a.txt").write_text(("x" * 1600 + "\n") * 10)
        data = Data(source=source, name=name)
        assert len(chunks_of([data], length=80)) == 1
        assert [chunk.end for chunk in chunks_of([data], 80, length=80)] == [2, 4, 6, 8, 10]


@pytest.mark.usefixtures("small")
def test_ids_name_the_file_where_there_are_several(model: Any, files: Any) -> None:
    search = search_of(model, files["npy"], files["txt"])
    found = search.collection(search.run(), n_dev=0)
    # the same rows as texts are duplicates
    assert {sequence.id.split("-")[0] for sequence in found.sequences} == {"c/row"}
    assert found.report.examples["exact duplicate"][0].startswith("c/row-30: ")


@pytest.mark.usefixtures("small")
def test_the_plan_makes_no_forward_pass(model: Any, files: Any, monkeypatch: Any) -> None:
    search = search_of(model, files["txt"], files["npy"])
    monkeypatch.setattr(Filter, "filter", lambda *a: pytest.fail("a forward pass was made"))
    assert len(search.plan().tasks) == len(search.chunks)


@pytest.mark.usefixtures("small")
def test_shards_and_another_draw_compute_each_chunk_once(
    model: Any, files: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    right, calls = Filter.filter, []
    monkeypatch.setattr(Filter, "filter", lambda *a: calls.append(1) or right(*a))
    search, store = search_of(model, files["txt"]), Store(tmp_path / "out")
    n = len(search.chunks)
    found = search.run(store=store, executor=InProcess((2, 2)))
    assert list(found.missing.values()) == [""] * (n - n // 2)
    assert 0 < found.report.n_in < 32
    with pytest.raises(
        ValueError, match=rf"chunks must all be searched, got {n - n // 2} of {n} missing"
    ):
        search.collection(found)
    (numbered, *_) = (chunk for chunk in found.chunks[1:] if chunk)
    assert numbered.recited[0].id.startswith("text-")
    found = search.run(store=store)
    assert found.missing == {} and found.report.n_in == 32
    assert len(search.collection(found, n_dev=1, n_max=4, seed=1).sequences) == 4
    assert len(calls) == n
    assert SearchResults.of(Store(tmp_path / "out")).report.n_in == 32


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["txt", "npy"])
def test_data_that_grow_cost_the_last_chunk_and_what_is_new(
    model: Any, files: Any, kind: str
) -> None:
    def keys() -> list[str]:
        return [task.key for task in search_of(model, files[kind]).plan().tasks]

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
    model: Any, files: Any, kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    store = Store(tmp_path / "out")
    n = len(search_of(model, files[kind]).run(store=store).chunks)
    right, calls = Filter.filter, []
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
def test_a_failed_chunk_is_recorded_and_the_others_go_on(
    model: Any, files: Any, tmp_path: Path
) -> None:
    lines = files["txt"].read_text().splitlines()
    files["txt"].write_text("\n".join([*lines[:20], "70 " * 22, *lines[20:]]))
    search = search_of(model, files["txt"])
    found = search.run(store=Store(tmp_path / "out"))
    (reason,) = found.missing.values()
    assert "tokens must be in [0, 61), got 70 in 'text-" in reason
    with pytest.raises(ValueError, match="tokens must be in"):
        search.run()


@pytest.mark.usefixtures("small")
def test_settings_and_spelling_must_be_those_of_the_folder(
    model: Any, files: Any, tmp_path: Path
) -> None:
    search, store = search_of(model, files["npy"]), Store(tmp_path / "out")
    search.run(store=store)
    for other, message in (
        (replace(search, decode=lambda ids: " ".join(map(str, ids))), "spelling: "),
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


def test_chunks_open_their_file_again_elsewhere(
    model: Any, files: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (chunk,) = chunks_of([Data(source=Path("c.npy"))], length=22)
    data = pickle.dumps(chunk)
    assert len(data) < 1000
    monkeypatch.chdir("/")
    assert pickle.loads(data).inputs == chunk.inputs


def test_general_text_is_the_beginning_of_texts_that_were_not_collected(
    model: Any, files: Any
) -> None:
    search = search_of(model, files["npy"])
    found = search.collection(search.run(), n_dev=0)
    general = search.general_text(found.sequences, length=22)
    kept = [row.tolist() for row in general]
    assert kept and not [s for s in found.sequences if s.tokens.tolist() in kept]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "a"}\n', r"columns of tokens or text .*, got only \['body'\]"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"', "path must be a whole json file in UTF-8"),
        ("a.txt", b"", "whole text file|data must hold at least one row, got none"),
        ("a.npy", b"no array", "path must be a whole .npy file"),
    ],
)
def test_mistakes_in_the_data_are_found_without_a_model(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        chunks_of([Data(source=tmp_path / name)])
    with pytest.raises(FileNotFoundError, match="path must be an existing file"):
        chunks_of([Data(source=tmp_path / f"no-{name}")])
    with pytest.raises(ValueError, match="data must be rows that can be counted, got the stream"):
        chunks_of([Data(source=iter(["a"]))])


def test_files_of_one_name_are_refused(files: Any, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    with pytest.raises(ValueError, match="data must be files of different names"):
        chunks_of([Data(source=files["npy"]), Data(source=tmp_path / "more" / "c.npy")])


def test_parse_windows() -> None:
    assert [parse_windows(text) for text in ("first", "12")] == [None, 12]
    for text in ("all", "any", "0", "-1", "1.5"):
        with pytest.raises(ValueError, match=f"windows must be first or a number .*, got '{text}'"):
            parse_windows(text)
