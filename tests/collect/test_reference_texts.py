"""What the reference models may have memorized is the same text on every Python, and planted texts
keep their names.
"""

import hashlib
import json

import torch

from tl_localize import load_model, reference
from tl_localize.collect import Criteria, collect_memorized
from tl_localize.collect.reference_texts import reference_tables, training_rows, with_planted
from tl_localize.reference import (
    CORPUS_DIR,
    general_texts,
    held_out_tokens,
    lacking_texts,
    load_planted,
    reference_sequences,
)


def test_general_texts_are_those_of_the_list_in_its_order():
    listed = json.loads((CORPUS_DIR / "general.json").read_text(encoding="utf-8"))
    for split in ("training", "held-out"):
        texts, lacking = general_texts(split)
        hashes = [name for names in listed[split].values() for name in names]
        gone = {name.split()[-1] for name in lacking}
        assert [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts] == [
            name for name in hashes if name not in gone
        ]
    assert not set(general_texts("training")[0]) & set(general_texts("held-out")[0])


def test_a_text_that_this_python_lacks_is_left_out_and_named(tmp_path, monkeypatch):
    (tmp_path / "general.json").write_text(
        json.dumps({"training": {"json/nowhere.py": ["0" * 16]}, "held-out": {}})
    )
    monkeypatch.setattr(reference, "CORPUS_DIR", tmp_path)
    # what the others have read stays in memory
    monkeypatch.setattr(reference, "general_texts", general_texts.__wrapped__)
    assert reference.general_texts("training") == ((), (f"json/nowhere.py {'0' * 16}",))
    assert "1 of 1 general texts" in lacking_texts() and "Too few are left" in lacking_texts()


def test_training_rows_begin_with_the_planted_texts():
    model = load_model("reference", device="cpu")
    rows = training_rows(model)
    planted = [model.tokenizer.encode(one.text, add_special_tokens=False) for one in load_planted()]
    assert rows.shape[1] == 80 and rows[: len(planted)].tolist() == planted
    assert len(rows) > 1000


def test_planted_texts_get_their_own_names_and_the_others_are_natural():
    model = load_model("reference", device="cpu")
    planted = reference_sequences(model)[:3]
    shifted = torch.cat([planted[2].tokens[10:], planted[2].tokens[:10]])
    natural = held_out_tokens()[:1, :80].long()
    criteria = Criteria(min_accuracy=0, max_distance=10**6, min_distinct=1)
    found = collect_memorized(
        model, [planted[0].tokens, planted[1].tokens, shifted, natural[0]], criteria, n_dev=0
    )
    named = with_planted(model, found)
    assert named.frame[["id", "category"]].to_numpy().tolist() == [
        *([one.id, one.category] for one in planted),
        ["sequence-3", "natural"],
    ]
    counts, others = (table for table, _ in reference_tables(named).values())
    assert counts["found"].sum() == 3 and counts["planted"].sum() == len(load_planted())
    assert others.index.tolist() == ["sequence-3"]
