"""De-duplicated, drawn, saved, loaded."""

import json

import pandas as pd
import pytest
import torch
from recited import CRITERIA, letters

from tl_localize.collect import Collection, Criteria, collect_memorized
from tl_localize.collect.collection import without_copies
from tl_localize.collect.criteria import NEAR, Report
from tl_localize.texts.readers import Data


def test_collect_keeps_the_best_memorized_near_duplicate(gpt2_like, corpus):
    row = corpus(gpt2_like, 1)[0]
    worse, better = row.clone(), row.clone()
    worse[20] = (worse[20] + 1) % 61
    criteria = Criteria(**{**vars(CRITERIA), "max_jaccard": 0.3})
    found = collect_memorized(gpt2_like, [worse, better], criteria, n_dev=0, decode=letters)
    assert [sequence.id for sequence in found.sequences] == ["row-1"]
    assert found.report.removed[NEAR] == 1


def test_without_a_tokenizer_sequences_have_no_text(gpt2_like, corpus):
    found = collect_memorized(gpt2_like, corpus(gpt2_like), CRITERIA, n_dev=0)
    assert {sequence.text for sequence in found.sequences} == {("", "")}
    assert set(found.frame["prefix"]) == set(found.frame["suffix"]) == {""}


def test_of_near_duplicates_the_nearest_is_kept_and_of_those_the_most_accurate():
    tokens = list(range(22))
    found = [
        {"tokens": [60, *tokens], "bos": "<s>", "distance": 3, "accuracy": 1.0},
        {"tokens": tokens, "bos": "", "distance": 2, "accuracy": 0.8},
        {"tokens": tokens, "bos": "", "distance": 2, "accuracy": 0.9},
    ]
    assert without_copies(found, CRITERIA, Report(3)) == [found[2]]


def test_dev_sequences_are_drawn_by_seed_and_come_first(gpt2_like, corpus):
    rows = corpus(gpt2_like)
    everything = Criteria(**{**vars(CRITERIA), "max_jaccard": 1})

    def ids(**arguments):
        return [
            s.id
            for s in collect_memorized(
                gpt2_like, rows, everything, decode=letters, **arguments
            ).sequences
        ]

    whole = ids(n_dev=0)
    first = ids(n_dev=3)
    assert sorted(first) == sorted(whole)
    assert first == ids(n_dev=3)
    assert first[3:] == [name for name in whole if name not in first[:3]]
    assert first[:3] != ids(n_dev=3, seed=1)[:3]
    assert len(ids(n_dev=3, n_max=5)) == 5
    assert ids(n_dev=3, n_max=5)[:3] == first[:3]


def test_save_and_load_keep_everything(gpt2_like, corpus, tmp_path):
    rows = [*corpus(gpt2_like), corpus(gpt2_like)[0]]
    # U+2028 separates lines, but not of a file
    named = [{"tokens": row, "who": f"c\u2028{i}", "kind": "poems"} for i, row in enumerate(rows)]
    data = Data(source=named, id="who", category="kind")
    found = collect_memorized(gpt2_like, data, CRITERIA, n_dev=2, decode=letters)
    found.save(tmp_path / "out")
    first = json.loads((tmp_path / "out" / "sequences.jsonl").read_text().split("\n")[0])
    assert first["all"] == letters(found.sequences[0].tokens.tolist())
    assert first["all"].startswith(first["prompt"]) and first["category"] == ["poems"]
    loaded = Collection.load(tmp_path / "out")
    for ours, theirs in zip(found.sequences, loaded.sequences, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        for name in ("id", "n_prefix", "category", "text"):
            assert getattr(ours, name) == getattr(theirs, name)
    pd.testing.assert_frame_equal(loaded.frame, found.frame)
    for name in ("n_dev", "criteria", "settings"):
        assert getattr(loaded, name) == getattr(found, name)
    assert vars(loaded.report) == vars(found.report)


@pytest.mark.parametrize(("n_dev", "n_max"), [(1.5, None), (1, 2.5), (-1, None), (2, 2)])
def test_a_draw_of_no_whole_number_is_refused_before_the_search(gpt2_like, n_dev, n_max):
    with pytest.raises(ValueError, match=r"n_(dev|max) must be"):
        collect_memorized(gpt2_like, iter(()), n_dev=n_dev, n_max=n_max)


def test_load_names_what_is_broken(gpt2_like, corpus, tmp_path):
    collect_memorized(gpt2_like, corpus(gpt2_like), CRITERIA, n_dev=2, decode=letters).save(
        tmp_path
    )
    good = (tmp_path / "sequences.jsonl").read_text()
    (tmp_path / "sequences.jsonl").write_text(good[:-9])
    with pytest.raises(ValueError, match="collection must be"):
        Collection.load(tmp_path)
    (tmp_path / "sequences.jsonl").write_text(good)
    assert Collection.load(tmp_path).n_dev == 2
    for broken in ("{", "[]", "{}"):
        (tmp_path / "collection.json").write_text(broken)
        with pytest.raises(ValueError, match="collection must be"):
            Collection.load(tmp_path)
    (tmp_path / "collection.json").unlink()
    with pytest.raises(FileNotFoundError, match="without a collection"):
        Collection.load(tmp_path)


def test_collect_names_the_criterion_that_removed_the_last(gpt2_like, corpus):
    rows = corpus(gpt2_like, 6)
    unknown = [
        torch.randint(61, (22,), generator=torch.Generator().manual_seed(i)) for i in range(5)
    ]

    def collect(stream, **changes):
        return collect_memorized(
            gpt2_like, stream, Criteria(**{**vars(CRITERIA), **changes}), n_dev=0, decode=letters
        )

    for stream, changes, message in (
        ([], {}, "at least one row"),
        ([row[:20] for row in rows], {}, "failed by 'too short'"),
        (unknown, {}, "5 came in, 5 removed: accuracy, 0 left.*failed by 'accuracy'"),
        (rows, {"min_distinct": 16}, "few distinct tokens"),
        (unknown, {"min_accuracy": 0}, "distance of the greedy continuation"),
    ):
        with pytest.raises(ValueError, match=message):
            collect(stream, **changes)


def test_collect_refuses_a_dev_set_larger_than_the_data(gpt2_like, corpus):
    rows = corpus(gpt2_like, 2)
    for how, message in (
        ({}, "n_dev must leave at least one"),
        ({"n_dev": 2}, "n_dev must leave at least one of the 2 memorized sequences"),
        ({"n_max": 3}, "n_max"),
        ({"n_dev": 0, "seed": 2**32}, "seed"),
    ):
        with pytest.raises(ValueError, match=message):
            collect_memorized(gpt2_like, rows, CRITERIA, decode=letters, **how)
