"""De-duplicated, drawn, saved, loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from recited import CRITERIA, letters

from tl_localize.collect import Collection, Criteria, collect_memorized
from tl_localize.collect.criteria import NEAR


def test_collect_keeps_the_best_memorized_near_duplicate(gpt2_like: Any, corpus: Any) -> None:
    row = corpus(gpt2_like, 1)[0]
    worse, better = row.clone(), row.clone()
    worse[20] = (worse[20] + 1) % 61
    criteria = Criteria(**{**vars(CRITERIA), "max_jaccard": 0.3})
    found = collect_memorized(gpt2_like, [worse, better], criteria, n_dev=0, decode=letters)
    assert [sequence.id for sequence in found.sequences] == ["sequence-1"]
    assert found.groups == {"sequence-1": ["sequence-0"]}
    assert found.report.removed[NEAR] == 1
    assert found.report.examples[NEAR][0].startswith("sequence-0: of sequence-1: ")


def test_dev_sequences_are_drawn_by_seed_and_come_first(gpt2_like: Any, corpus: Any) -> None:
    rows = corpus(gpt2_like)
    everything = Criteria(**{**vars(CRITERIA), "max_jaccard": 1})

    def ids(**arguments: Any) -> list[str]:
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


def test_save_and_load_keep_everything(gpt2_like: Any, corpus: Any, tmp_path: Path) -> None:
    found = collect_memorized(
        gpt2_like, [*corpus(gpt2_like), corpus(gpt2_like)[0]], CRITERIA, n_dev=2, decode=letters
    )
    found = found.labelled({found.sequences[0].id: ("first", "poems")})
    found.save(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "sequences.jsonl",
        "report.csv",
        "settings.json",
    }
    loaded = Collection.load(tmp_path / "out")
    for ours, theirs in zip(found.sequences, loaded.sequences, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert (ours.id, ours.n_prefix, ours.category) == (
            theirs.id,
            theirs.n_prefix,
            theirs.category,
        )
    pd.testing.assert_frame_equal(loaded.frame, found.frame)
    for name in ("n_dev", "criteria", "groups", "settings"):
        assert getattr(loaded, name) == getattr(found, name)
    assert vars(loaded.report) == vars(found.report)


def test_load_names_what_is_broken(gpt2_like: Any, corpus: Any, tmp_path: Path) -> None:
    collect_memorized(gpt2_like, corpus(gpt2_like), CRITERIA, n_dev=2, decode=letters).save(
        tmp_path
    )
    good = (tmp_path / "sequences.jsonl").read_text()
    lines = good.splitlines(keepends=True)
    for changed in (
        lines[:-1],
        sorted(lines),
        [*lines, lines[0]],
        [good.replace('"dev"', '"test"')],
        [],
    ):
        (tmp_path / "sequences.jsonl").write_text("".join(changed))
        with pytest.raises(
            ValueError,
            match=(
                r"other lines than were written \(cut, sorted or changed\) in "
                r"sequences.jsonl.*Collect again"
            ),
        ):
            Collection.load(tmp_path)
    (tmp_path / "sequences.jsonl").write_text(good)
    assert Collection.load(tmp_path).n_dev == 2
    for broken in ("{", "[]", "{}"):
        (tmp_path / "settings.json").write_text(broken)
        with pytest.raises(
            ValueError, match="collection must be what tl-localize collect wrote, got "
        ):
            Collection.load(tmp_path)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"without a settings\.json\. Run tl-localize collect"
    ):
        Collection.load(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"without a sequences\.jsonl\. Run tl-localize collect"
    ):
        Collection.load(tmp_path / "elsewhere")


def test_dev_sequences_are_those_whose_split_says_so(
    gpt2_like: Any, corpus: Any, tmp_path: Path
) -> None:
    found = collect_memorized(gpt2_like, corpus(gpt2_like), CRITERIA, n_dev=2, decode=letters)
    found.save(tmp_path)
    lines = (tmp_path / "sequences.jsonl").read_text().splitlines(keepends=True)[::-1]
    (tmp_path / "sequences.jsonl").write_text("".join(lines))
    settings = json.loads((tmp_path / "settings.json").read_text())
    settings["sha256"] = hashlib.sha256("".join(lines).encode()).hexdigest()
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    loaded = Collection.load(tmp_path)
    names = [sequence.id for sequence in found.sequences]
    assert loaded.n_dev == 2
    assert (
        [sequence.id for sequence in loaded.sequences]
        == list(loaded.frame["id"])
        == [*names[1::-1], *names[:1:-1]]
    )


def test_save_writes_a_manual_set(gpt2_like: Any, corpus: Any, tmp_path: Path) -> None:
    found = collect_memorized(gpt2_like, corpus(gpt2_like), CRITERIA, n_dev=2, decode=letters)
    found.labelled({found.sequences[0].id: ("first", "poems")}).save(tmp_path)
    row = json.loads((tmp_path / "sequences.jsonl").read_text().splitlines()[0])
    assert row["all"] == letters(found.sequences[0].tokens.tolist())
    assert row["all"].startswith(row["prompt"])
    assert (row["prompt_len"], row["category"], row["id"], row["split"]) == (
        6,
        ["poems"],
        "first",
        "dev",
    )


def test_labelled_changes_ids_and_categories_everywhere(gpt2_like: Any, corpus: Any) -> None:
    row = corpus(gpt2_like, 1)[0]
    worse = row.clone()
    worse[20] = (worse[20] + 1) % 61
    found = collect_memorized(
        gpt2_like,
        [row, worse],
        Criteria(**{**vars(CRITERIA), "max_jaccard": 0.3}),
        n_dev=0,
        decode=letters,
    )
    renamed = found.labelled({"sequence-0": ("poem", "poems")})
    assert [(s.id, s.category) for s in renamed.sequences] == [("poem", "poems")]
    assert renamed.frame[["id", "category"]].to_numpy().tolist() == [["poem", "poems"]]
    assert renamed.groups == {"poem": ["sequence-1"]}


def test_collect_names_the_criterion_that_removed_the_last(gpt2_like: Any, corpus: Any) -> None:
    rows = corpus(gpt2_like, 6)
    unknown = [
        torch.randint(61, (22,), generator=torch.Generator().manual_seed(i)) for i in range(5)
    ]

    def collect(stream: Any, **changes: Any) -> Any:
        return collect_memorized(
            gpt2_like, stream, Criteria(**{**vars(CRITERIA), **changes}), n_dev=0, decode=letters
        )

    for stream, changes, message in (
        ([], {}, r"stream must hold at least one sequence, got none. Check the data file"),
        (
            [row[:20] for row in rows],
            {},
            r"6 removed: too short.*failed by 'too short'. Give longer texts",
        ),
        (
            unknown,
            {},
            r"5 came in, 5 removed: accuracy, 0 left\..*The last ones failed by 'accuracy'. Lower "
            r"min_accuracy",
        ),
        (
            rows,
            {"min_distinct": 16},
            r"6 removed: few distinct tokens in the true suffix.*Lower min_distinct",
        ),
        (
            unknown,
            {"min_accuracy": 0},
            r"failed by 'distance of the greedy continuation'. Raise max_distance",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            collect(stream, **changes)


def test_collect_refuses_a_dev_set_larger_than_the_data(gpt2_like: Any, corpus: Any) -> None:
    rows = corpus(gpt2_like, 2)
    with pytest.raises(
        ValueError,
        match=(
            r"n_dev must leave at least one of the \d memorized sequences for the test, got 5 \(2 "
            r"came in"
        ),
    ):
        collect_memorized(gpt2_like, rows, CRITERIA, decode=letters)
    with pytest.raises(ValueError, match=r"below n_max=3, got 5"):
        collect_memorized(gpt2_like, rows, CRITERIA, n_max=3, decode=letters)
    for seed in (-1, 2**32):
        with pytest.raises(
            ValueError, match=rf"seed must be a whole number from 0 to 2\*\*32 - 1, got {seed}"
        ):
            collect_memorized(gpt2_like, rows, CRITERIA, n_dev=0, seed=seed, decode=letters)
