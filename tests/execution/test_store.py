"""Files are written whole or not at all, and folders are checked before the work."""

import json

import pytest


def test_prepare_folder_makes_missing_parents(tmp_path):
    from tl_localize.execution.store import prepare_folder

    assert list(prepare_folder(tmp_path / "a" / "b").iterdir()) == []


def test_prepare_folder_rejects_a_file_in_the_way(tmp_path):
    from tl_localize.execution.store import prepare_folder

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder must be writable, got .*file.*Choose another one with --out"):
        prepare_folder(tmp_path / "file")


def test_write_text_leaves_the_old_file_when_it_fails(tmp_path):
    from tl_localize.execution.store import write_text

    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_environment_is_json_and_names_the_weights(gpt2_like):
    from tl_localize.execution.store import environment

    record = json.loads(json.dumps(environment(gpt2_like)))
    assert len(record["fingerprint"]) == 16
    assert record["dtype"] == "float32"


def test_fingerprint_changes_with_one_weight(gpt2_like):
    import torch

    from tl_localize.execution.store import fingerprint

    before = fingerprint(gpt2_like)
    weight = gpt2_like.blocks[0].mlp.W_out
    with torch.no_grad():
        old = weight[0, 0].item()
        weight[0, 0] += 1
        changed = fingerprint(gpt2_like)
        weight[0, 0] = old
    assert changed != before
    assert fingerprint(gpt2_like) == before
