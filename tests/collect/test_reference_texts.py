"""What the reference models may have memorized is the same text on every Python, and planted texts
keep their names.
"""

import hashlib
import json

import pytest

from tl_localize.collect import reference_texts
from tl_localize.collect.reference_texts import training_data
from tl_localize.texts import reference
from tl_localize.texts.reference import CORPUS_DIR, general_texts, load_planted


def test_general_texts_are_those_of_the_list_in_its_order():
    listed = json.loads((CORPUS_DIR / "general.json").read_text(encoding="utf-8"))
    for split in ("training", "held-out"):
        found = [hashlib.sha256(t.encode()).hexdigest()[:16] for t in general_texts(split)]
        hashes = [name for names in listed[split].values() for name in names]
        assert found == [name for name in hashes if name in found]
    assert not set(general_texts("training")) & set(general_texts("held-out"))


def test_a_text_that_this_python_lacks_is_left_out_and_named(tmp_path, monkeypatch):
    (tmp_path / "general.json").write_text(
        json.dumps({"training": {"json/nowhere.py": ["0" * 16]}, "held-out": {}})
    )
    monkeypatch.setattr(reference, "CORPUS_DIR", tmp_path)
    with pytest.warns(UserWarning, match=r"1 general texts .*json/nowhere.py"):
        assert general_texts.__wrapped__("training") == ()  # the others' stay in memory


def test_training_data_begin_with_the_planted_texts_and_the_others_are_natural(shipped_model):
    model = shipped_model()
    rows = list(training_data(model).entries())
    planted = load_planted()
    for row, text in zip(rows, planted, strict=False):
        assert row.tokens.tolist() == model.tokenizer.encode(text.text, add_special_tokens=False)
        assert (row.id, row.category) == (text.id, text.category)
    assert len(rows) > 1000 and {len(row.tokens) for row in rows} == {80}
    assert {(row.id, row.category) for row in rows[len(planted) :]} == {("", "natural")}


def test_a_general_text_of_80_tokens_is_one_piece(shipped_model, monkeypatch):
    (planted, *_) = load_planted()
    monkeypatch.setattr(reference_texts, "load_planted", lambda: [planted])
    monkeypatch.setattr(reference_texts, "general_texts", lambda split: [planted.text])
    rows = list(training_data(shipped_model()).entries())
    assert [(len(row.tokens), row.category) for row in rows] == [
        (80, planted.category),
        (80, "natural"),
    ]
