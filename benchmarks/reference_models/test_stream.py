"""General text is that of the corpus or said to differ; the stream holds every repetition."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from stream import (
    HERE,
    ROW_LENGTH,
    GeneralText,
    changed_texts,
    general_texts,
    reference_stream,
    source_texts,
    training_stream,
)

from tl_localize import load_model
from tl_localize.sequences import tokenizer_of

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def listed():
    return json.loads((HERE / "corpus.json").read_text())


def test_held_out_documents_are_disjoint_from_training(listed):
    splits = {"training": set(), "held-out": set()}
    for name, sha, _, split in listed["general"]:
        assert GeneralText(name, "").held_out == (split == "held-out")
        splits[split].add(sha)
    assert not splits["training"] & splits["held-out"]
    assert len(splits["training"]) + len(splits["held-out"]) == len(listed["general"])


def test_source_texts_are_docstrings_and_prose_comments_outside_tests(tmp_path: Path):
    (tmp_path / "pack" / "test").mkdir(parents=True)
    (tmp_path / "pack" / "test" / "a.py").write_text('"""No."""')
    source = 'class A:\n    """One."""\n    def f(self):\n        """Two."""\n'
    source += "    # three\n    # four\n\n# 0x80 -> 0x81\n"
    (tmp_path / "pack" / "b.py").write_text(source)
    (tmp_path / "c.py").write_text("this is no Python")
    assert list(source_texts(tmp_path)) == [
        ("pack.b:A", "One."),
        ("pack.b:A.f", "Two."),
        ("pack.b#5", "three\nfour"),
    ]


def test_changed_texts_names_what_differs(tmp_path: Path):
    texts = [GeneralText(name, f"text of {name}") for name in "abc"]
    (tmp_path / "corpus.json").write_text(
        json.dumps({"general": [["a", texts[0].sha], ["b", "0"], ["d", "0"]]})
    )
    assert changed_texts(texts, tmp_path / "corpus.json") == ["b", "c", "d"]


@pytest.mark.slow
def test_general_texts_are_the_corpus_or_said_to_differ(listed):
    texts = general_texts()
    assert (
        len({text.name for text in texts})
        == len({text.text for text in texts})
        == len(texts)
        > 1000
    )
    unchanged = {name for name, *_ in listed["general"]} - set(changed_texts(texts))
    shas = {name: sha for name, sha, *_ in listed["general"]}
    assert all(text.sha == shas[text.name] for text in texts if text.name in unchanged)
    assert len(unchanged) > 1000


def places(stream, texts):
    """(row, start) of each occurrence of a text."""
    n = texts.shape[1]
    windows = np.lib.stride_tricks.sliding_window_view(stream, n, axis=1)
    return [
        [(int(row), int(start)) for row, start in np.argwhere((windows == text).all(2))]
        for text in texts
    ]


@pytest.fixture(scope="module")
def texts():
    return np.random.default_rng(0).integers(10, 4000, size=(4, 80))


def test_training_stream_holds_every_repetition(texts):
    repetitions = [1, 3, 40, 100]
    options = {"end_of_text": 0, "general_rows": 30}
    stream = training_stream([[5] * 9, [6] * 50], texts.tolist(), repetitions, **options)
    assert (
        stream == training_stream([[5] * 9, [6] * 50], texts.tolist(), repetitions, **options)
    ).all()
    assert stream.shape[1] == ROW_LENGTH
    found = places(stream, texts)
    assert [len(of_one) for of_one in found] == repetitions
    assert (
        abs(sum(start == 0 for of_one in found for _, start in of_one) - sum(repetitions) / 2) <= 2
    )


def test_training_stream_is_denser_at_the_end(texts):
    stream = training_stream(
        [[5] * 99], texts[:2].tolist(), [900, 900], end_of_text=0, general_rows=900
    )
    per_row = np.bincount(
        [row for of_one in places(stream, texts[:2]) for row, _ in of_one], minlength=len(stream)
    )
    third = len(per_row) // 3
    assert per_row[-third:].mean() > 1.1 * per_row[:third].mean()


@pytest.mark.slow
def test_reference_stream_is_that_of_training_where_python_ships_the_same_text(listed):
    if changed_texts(general_texts()):
        pytest.skip("this Python ships other documentation than that of training")
    rows = reference_stream(tokenizer_of(load_model("reference", device="cpu")))
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == listed["stream_sha256"]


def test_general_texts_do_not_depend_on_who_hooks_into_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Typer does; tl-localize collect must make the stream of a plain process again."""
    before = general_texts()
    general_texts.cache_clear()
    monkeypatch.setattr(sys, "excepthook", lambda *a: None)
    assert general_texts() == before
    assert any(text.name == "sys:excepthook" for text in before)


def test_stream_of_a_model_that_memorizes_less_repeats_no_planted_text_more_often():
    from tl_localize.texts.reference import load_planted

    tokenizer = tokenizer_of(load_model("reference-gpt2", device="cpu"))
    rows = reference_stream(tokenizer, most_repetitions=2, general_rows=10)
    repeated = [min(text.repetitions, 2) for text in load_planted()]
    assert rows.shape == (sum(repeated) // 2 + 10, ROW_LENGTH)
    often = np.array(
        tokenizer.encode(
            next(text.text for text in load_planted() if text.repetitions == 128),
            add_special_tokens=False,
        )
    )
    windows = np.lib.stride_tricks.sliding_window_view(rows, len(often), axis=1)
    assert (windows == often).all(-1).sum() == 2
