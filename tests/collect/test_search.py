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

from tl_localize.collect import (
    Criteria,
    collect_memorized,
    likely_windows,
    text_windows,
    token_windows,
)
from tl_localize.collect.filter import Filter
from tl_localize.collect.search import Chunk, Search, SearchResults, chunks_of, parse_windows
from tl_localize.execution.engine import InProcess
from tl_localize.execution.store import Store
from tl_localize.readers import Data

LOOSE = replace(CRITERIA, max_jaccard=1)


@pytest.fixture
def small(monkeypatch: Any) -> None:
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 7)
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_BYTES", 300)
    monkeypatch.setattr("tl_localize.readers.sources.SAMPLE", 16)


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
    model: Any, *paths: Path, windows: Any = "first", criteria: Criteria = LOOSE
) -> Search:
    return Search(
        model,
        chunks_of([Data(source=path) for path in paths], windows, criteria.length),
        criteria,
        windows,
    )


def shown(collection: Any) -> tuple[str, str, dict[str, list[str]]]:
    return collection.frame.to_csv(), str(collection.report), collection.report.examples


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("windows", ["first", 3, "any"])
def test_rows_in_chunks_are_the_rows_in_one_stream(
    model: Any, files: Any, windows: Any, tmp_path: Path
) -> None:
    rows = torch.from_numpy(np.load(files["npy"]))
    stride = windows if isinstance(windows, int) else None
    stream = (
        likely_windows(model, rows, LOOSE)
        if windows == "any"
        else token_windows(rows, LOOSE.length, stride)
    )
    expected = collect_memorized(model, stream, LOOSE, n_dev=2)
    search = search_of(model, files["npy"], windows=windows)
    assert len(search.chunks) == 5
    assert shown(search.collection(search.run(store=Store(tmp_path / "out")), n_dev=2)) == shown(
        expected
    )
    given = Search(model, chunks_of([Data(source=rows)], windows, LOOSE.length), LOOSE, windows)
    assert shown(given.collection(given.run(), n_dev=2)) == shown(expected)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_texts_in_chunks_of_bytes_are_the_texts_in_one_stream(
    model: Any, files: Any, kind: str, tmp_path: Path
) -> None:
    from tl_localize.readers import read_texts

    expected = collect_memorized(
        model, text_windows(read_texts(files[kind]), model, LOOSE.length), LOOSE, n_dev=2
    )
    search = search_of(model, files[kind])
    assert len(search.chunks) > 5
    assert shown(search.collection(search.run(store=Store(tmp_path / "out")), n_dev=2)) == shown(
        expected
    )


@pytest.mark.usefixtures("small")
def test_every_line_is_in_one_range(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    lines = ["", "ä", "x" * 700, "", "b", "y" * 299, "c"]
    for end in ("", "\n"):
        path.write_text("\n".join(lines) + end)
        for size in (1, 3, 299, 300, 301):
            data, whole = Data(source=path), path.stat().st_size
            parts = [data.entries(first, first + size) for first in range(0, whole, size)]
            assert [one.text for part in parts for one in part] == lines


def test_ids_name_the_file_where_there_are_several(model: Any, files: Any) -> None:
    search = search_of(model, files["npy"], files["txt"])
    found = search.collection(search.run(), n_dev=0)
    # the same rows as texts are duplicates
    assert {sequence.id.split("-")[0] for sequence in found.sequences} == {"c/row"}
    assert found.report.examples["exact duplicate"][0].startswith("c/row-30: ")


@pytest.mark.usefixtures("small")
def test_the_plan_reads_the_beginning_of_chunks_only(
    model: Any, files: Any, monkeypatch: Any
) -> None:
    search = search_of(model, files["txt"], files["npy"])
    monkeypatch.setattr(Chunk, "read", lambda *a: pytest.fail("a chunk was read"))
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
    # how many texts come before is not known
    assert all(one.id.startswith("300: text-") for one in found.chunks[1].recited)
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
        assert not set(keys()) & set(after)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["txt", "npy"])
def test_data_that_change_inside_a_chunk_are_found_out(
    model: Any, files: Any, kind: str, tmp_path: Path
) -> None:
    store = Store(tmp_path / "out")
    search_of(model, files[kind]).run(store=store)
    data = bytearray(files[kind].read_bytes())
    data[400] ^= 1
    files[kind].write_bytes(data)
    search = search_of(model, files[kind])
    with pytest.raises(
        ValueError,
        match="data must stay as they were when they were searched, got another content in",
    ):
        search.collection(search.run(store=store))


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
    assert pickle.loads(data).read()[1] == chunk.read()[1]


def test_general_text_is_the_beginning_of_texts_that_were_not_collected(
    model: Any, files: Any
) -> None:
    search = search_of(model, files["npy"])
    found = search.collection(search.run(), n_dev=0)
    general = search.general_text(found.sequences, length=22)
    kept = [row.tolist() for row in general]
    assert kept and not [s for s in found.sequences if s.tokens.tolist() in kept]


@pytest.mark.parametrize(
    ("name", "content", "windows", "message"),
    [
        (
            "a.jsonl",
            b'{"body": "a"}\n',
            "first",
            r"row must have columns of tokens or text .*, got only \['body'\]",
        ),
        ("a.txt", b"", "first", "data must hold at least one row, got none"),
        ("a.npy", b"no array", "first", "path must be a whole .npy file of integers"),
        ("a.txt", b"some text\n", "any", "windows must be first or a number for text, got any"),
    ],
)
def test_mistakes_in_the_data_are_found_without_a_model(
    tmp_path: Path, name: str, content: bytes, windows: Any, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        chunks_of([Data(source=tmp_path / name)], windows)
    with pytest.raises(FileNotFoundError, match="path must be an existing file"):
        chunks_of([Data(source=tmp_path / f"no-{name}")])


@pytest.mark.usefixtures("small")
def test_a_broken_line_has_its_number_in_the_file_also_from_a_later_chunk(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b'{"text": "%d"}\n' % i for i in range(60)) + b'{"text": "\xff"}\n')
    chunks = chunks_of([Data(source=path)])
    assert len(chunks) > 2
    with pytest.raises(ValueError, match=r"path must be UTF-8 text, got the bytes .* line 61"):
        [chunk.read() for chunk in chunks[1:]]


def test_files_of_one_name_are_refused(files: Any, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    with pytest.raises(ValueError, match="data must be files of different names"):
        chunks_of([Data(source=files["npy"]), Data(source=tmp_path / "more" / "c.npy")])


def test_parse_windows() -> None:
    assert [parse_windows(text) for text in ("first", "any", "12")] == ["first", "any", 12]
    for text in ("all", "0", "-1", "1.5"):
        with pytest.raises(
            ValueError,
            match=f"windows must be first, any or a number of tokens from 1 on, got '{text}'",
        ):
            parse_windows(text)
