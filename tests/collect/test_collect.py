"""Collection: the same sequences as by the book, and near-duplicates as by all pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from tl_localize import MemorizedSequence, accuracy
from tl_localize.collect import (
    DISTANT,
    INACCURATE,
    MONOTONOUS,
    NEAR,
    REPEATED,
    REPETITIVE,
    SHORT,
    SURPLUS,
    Bound,
    Candidate,
    Criteria,
    Generation,
    Sieve,
    Sifted,
    assemble,
    collect_memorized,
    likely_windows,
    load_collection,
    near_duplicates,
    next_row,
    origins,
    perplexity_split,
    text_windows,
    token_windows,
)
from tl_localize.neurons import NeuronView

CRITERIA = Criteria(n_prefix=6, n_suffix=16, min_accuracy=0.7, max_distance=6, min_distinct=3, ngram=3)


def letters(ids: list[int]) -> str:
    return "".join(chr(65 + i) + (chr(97 + i % 7) if i % 3 else "") for i in ids)


def recite(model: Any, tokens: torch.Tensor, n: int) -> torch.Tensor:
    """Greedy continuation of each row by n tokens, without a cache."""
    for _ in range(n):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


@pytest.fixture
def corpus() -> Callable[..., list[torch.Tensor]]:
    """Sequences that a model recites, with some suffix tokens exchanged."""

    def make(model: Any, n: int = 30) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(4)
        rows = recite(model, torch.randint(61, (n, 6), generator=generator), 16)
        for i in range(n):
            for _ in range(i % 7):
                rows[i, int(torch.randint(6, 22, (1,), generator=generator))] = int(torch.randint(61, (1,), generator=generator))
        return list(rows)

    return make


def by_the_book(model: Any, rows: list[torch.Tensor], criteria: Criteria) -> dict[int, tuple[float, int]]:
    """Index -> accuracy and distance of what passes, each criterion computed for each sequence by itself."""
    passed: dict[int, tuple[float, int]] = {}
    continued = recite(model, torch.stack(rows)[:, : criteria.n_prefix], criteria.n_suffix)
    for i, (tokens, generated) in enumerate(zip(rows, continued, strict=True)):
        sequence = MemorizedSequence(tokens, criteria.n_prefix)
        distance = Levenshtein.distance(letters(generated.tolist()), letters(tokens.tolist()))
        distinct = min(len(set(sequence.suffix.tolist())), len(set(generated[criteria.n_prefix :].tolist())))
        share = float(accuracy(model, [sequence])[0])
        if share >= criteria.min_accuracy - 1e-6 and distance <= criteria.max_distance and distinct >= criteria.min_distinct:
            passed[i] = (share, distance)
    return passed


@pytest.mark.parametrize("batch_size", [None, 3])
def test_collect_finds_what_the_criteria_say(any_model: Any, corpus: Any, batch_size: int | None) -> None:
    rows = corpus(any_model)
    expected = by_the_book(any_model, rows, CRITERIA)
    assert 3 < len(expected) < 27
    everything = Criteria(**{**vars(CRITERIA), "max_jaccard": 1})
    found = collect_memorized(any_model, rows, everything, n_dev=0, decode=letters, batch_size=batch_size)
    assert [sequence.id for sequence in found.sequences] == [f"sequence-{i}" for i in expected]
    assert found.frame["accuracy"].tolist() == pytest.approx([share for share, _ in expected.values()])
    assert found.frame["distance"].tolist() == [distance for _, distance in expected.values()]
    assert all(torch.equal(s.tokens, rows[i]) for s, i in zip(found.sequences, expected, strict=True))
    assert found.report.n_in == 30
    assert found.report.n_out == len(expected)


def test_generation_with_a_cache_is_generation_without(any_model: Any) -> None:
    context = torch.randint(61, (3, 5), generator=torch.Generator().manual_seed(1))
    expected = recite(any_model, context, 12)[:, 5:]
    generation = Generation(NeuronView(any_model), context)
    assert torch.tensor([generation.step() for _ in range(12)]).T.tolist() == expected.tolist()
    generation = Generation(NeuronView(any_model), context)
    steps = [generation.step() for _ in range(4)]
    generation.keep([2, 0])
    steps = [[step[2], step[0]] for step in steps] + [generation.step() for _ in range(8)]
    assert torch.tensor(steps).T.tolist() == expected[[2, 0]].tolist()


def test_collect_leaves_the_model_as_it_was(gpt2_like: Any, corpus: Any, unchanged: Any) -> None:
    check = unchanged(gpt2_like)
    collect_memorized(gpt2_like, corpus(gpt2_like), CRITERIA, n_dev=1, decode=letters)
    check()


def test_report_counts_what_each_criterion_removes(gpt2_like: Any) -> None:
    generator = torch.Generator().manual_seed(9)
    good = list(recite(gpt2_like, torch.randint(61, (6, 6), generator=generator), 16))
    distinct = [len(set(row[6:].tolist())) for row in good]
    wrong = good[0].clone()
    wrong[6:16] = (wrong[6:16] + 1) % 61
    constant = good[0].clone()
    constant[6:] = 5
    stream = [*good, good[1].clone(), wrong, constant, good[2][:10], torch.zeros(0), torch.cat([good[3], good[3]])]
    criteria = Criteria(n_prefix=6, n_suffix=16, min_distinct=2, max_jaccard=1)
    assert min(distinct) >= 2
    report = collect_memorized(gpt2_like, stream, criteria, n_dev=0, n_max=4, decode=letters).report
    n_unique = len({tuple(row.tolist()) for row in good})
    assert report.removed == {
        SHORT: 2,
        REPETITIVE: 1,
        INACCURATE: 1,
        REPEATED: 2 + 6 - n_unique,
        DISTANT: 0,
        MONOTONOUS: 0,
        NEAR: 0,
        SURPLUS: n_unique - 4,
    }
    assert (report.n_in, report.n_out) == (12, 4)
    assert report.table()["left"].iloc[-1] == 4
    assert report.examples[SHORT][0].startswith("sequence-9: 10 tokens: 'A" if good[2][0] == 0 else "sequence-9: 10 tokens: ")
    assert report.examples[SHORT][1] == "sequence-10: 0 tokens: ''"
    assert str(report).startswith("12 came in, 2 removed: too short")


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
        return [s.id for s in collect_memorized(gpt2_like, rows, everything, decode=letters, **arguments).sequences]

    whole = ids(n_dev=0)
    first = ids(n_dev=3)
    assert sorted(first) == sorted(whole)
    assert first == ids(n_dev=3)
    assert first[3:] == [name for name in whole if name not in first[:3]]
    assert first[:3] != ids(n_dev=3, seed=1)[:3]
    assert len(ids(n_dev=3, n_max=5)) == 5
    assert ids(n_dev=3, n_max=5)[:3] == first[:3]


def test_collect_takes_a_tensor_a_list_and_an_iterator(gpt2_like: Any, corpus: Any) -> None:
    rows = corpus(gpt2_like)
    results = [
        collect_memorized(gpt2_like, stream, CRITERIA, n_dev=1, decode=letters).frame.to_csv()
        for stream in (rows, torch.stack(rows).int(), (row.tolist() for row in rows), [row.numpy().astype(np.uint16) for row in rows])
    ]
    assert len(set(results)) == 1


def test_collect_reads_the_stream_once_and_in_batches(gpt2_like: Any, corpus: Any) -> None:
    rows = corpus(gpt2_like)
    read: list[int] = []
    ahead: list[int] = []

    def stream() -> Iterator[torch.Tensor]:
        for i in range(60):
            read.append(i)
            yield rows[i % 30]

    def progress(fraction: float, state: str) -> None:
        ahead.append(len(read))
        assert fraction == pytest.approx(len(read) / 60)

    collect_memorized(gpt2_like, stream(), CRITERIA, n_dev=1, decode=letters, batch_size=2, total=60, progress=progress)
    assert read == list(range(60))
    assert ahead[0] < 20  # the first have passed before the stream is at its end


def test_parts_that_know_nothing_of_each_other_are_together_the_stream(gpt2_like: Any, corpus: Any) -> None:
    rows = corpus(gpt2_like)
    distinct = [1] * 12 + [5] * 10  # repeats itself: monotonous where it is recited
    stream = [Candidate(row.numpy(), f"c{i}") for i, row in enumerate([*rows, *rows[::-1], torch.tensor(distinct), *rows[3:20]])]
    criteria = Criteria(**{**vars(CRITERIA), "max_distance": 3, "min_distinct": 2, "max_jaccard": 0.3})
    whole = collect_memorized(gpt2_like, stream, criteria, n_dev=2, decode=letters)
    assert min(whole.report.removed[name] for name in (REPEATED, DISTANT, INACCURATE)) > 0
    sieve = Sieve(gpt2_like, criteria, letters)
    parts = [sieve.sift(stream[start : start + 8]).packed() for start in range(0, len(stream), 8)]
    kept = [Sifted.unpacked(json.loads(json.dumps(value)), tensors) for value, tensors in parts]
    found = assemble(sieve, kept, n_dev=2)
    assert found.frame.to_csv() == whole.frame.to_csv()
    assert (found.report.n_in, found.report.removed, found.groups) == (whole.report.n_in, whole.report.removed, whole.groups)


def test_save_and_load_keep_the_sequences(gpt2_like: Any, corpus: Any, tmp_path: Path) -> None:
    found = collect_memorized(gpt2_like, corpus(gpt2_like), CRITERIA, n_dev=2, decode=letters)
    found.save(tmp_path / "out")
    sequences, n_dev = load_collection(tmp_path / "out")
    assert n_dev == 2
    for ours, theirs in zip(found.sequences, sequences, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert (ours.id, ours.n_prefix, ours.category) == (theirs.id, theirs.n_prefix, theirs.category)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "sequences.jsonl",
        "report.csv",
        "settings.json",
    }


def test_save_writes_what_read_manual_reads(gpt2_like: Any, corpus: Any, tmp_path: Path) -> None:
    found = collect_memorized(gpt2_like, corpus(gpt2_like), CRITERIA, n_dev=2, decode=letters)
    found.labelled({found.sequences[0].id: ("first", "poems")}).save(tmp_path)
    row = json.loads((tmp_path / "sequences.jsonl").read_text().splitlines()[0])
    assert row["all"] == letters(found.sequences[0].tokens.tolist())
    assert row["all"].startswith(row["prompt"])
    assert (row["prompt_len"], row["category"], row["id"], row["split"]) == (6, ["poems"], "first", "dev")


def test_load_collection_names_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "sequences.jsonl").write_text('{"id": "a", "split": "dev", "category": [], "tokens": [1, 2]}\n')
    with pytest.raises(ValueError, match=r"got 'prompt_len' .*line 1\). Collect again"):
        load_collection(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"without a sequences\.jsonl\. Run tl-localize collect"):
        load_collection(tmp_path / "elsewhere")


def test_labelled_changes_ids_and_categories_everywhere(gpt2_like: Any, corpus: Any) -> None:
    row = corpus(gpt2_like, 1)[0]
    worse = row.clone()
    worse[20] = (worse[20] + 1) % 61
    found = collect_memorized(gpt2_like, [row, worse], Criteria(**{**vars(CRITERIA), "max_jaccard": 0.3}), n_dev=0, decode=letters)
    renamed = found.labelled({"sequence-0": ("poem", "poems")})
    assert [(s.id, s.category) for s in renamed.sequences] == [("poem", "poems")]
    assert renamed.frame[["id", "category"]].to_numpy().tolist() == [["poem", "poems"]]
    assert renamed.groups == {"poem": ["sequence-1"]}


def test_origins_name_the_known_text_that_is_shown_by_half() -> None:
    known = [list(range(20)), list(range(100, 120))]
    shifted, less, both = list(range(7, 27)), list(range(10, 30)), [*range(5), *range(100, 116)]
    assert origins([known[1], shifted, less, both, [1]], known) == [1, 0, -1, 1, -1]


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_prefix": 0}, r"n_prefix must be in \[1, inf\], got 0"),
        ({"n_suffix": 8}, r"min_distinct must be in \[0, 8\], got 16"),
        ({"min_accuracy": 90}, r"min_accuracy must be in \[0, 1\], got 90"),
        ({"max_distance": -1}, "max_distance must be in"),
        ({"max_jaccard": 1.5}, "max_jaccard must be in"),
        ({"ngram": 81}, r"ngram must be in \[1, 80\], got 81"),
    ],
)
def test_criteria_refuse(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Criteria(**changes)


def test_collect_names_the_criterion_that_removed_the_last(gpt2_like: Any, corpus: Any) -> None:
    rows = corpus(gpt2_like, 6)
    unknown = [torch.randint(61, (22,), generator=torch.Generator().manual_seed(i)) for i in range(5)]

    def collect(stream: Any, **changes: Any) -> Any:
        return collect_memorized(gpt2_like, stream, Criteria(**{**vars(CRITERIA), **changes}), n_dev=0, decode=letters)

    for stream, changes, message in (
        ([], {}, r"stream must hold at least one sequence, got none. Check the data file"),
        ([row[:20] for row in rows], {}, r"6 removed: too short.*failed by 'too short'. Give longer texts"),
        (unknown, {}, r"5 came in, 5 removed: accuracy, 0 left. The last ones failed by 'accuracy'. Lower min_accuracy"),
        (rows, {"min_distinct": 16}, r"6 removed: few distinct tokens in the true suffix.*Lower min_distinct"),
        (unknown, {"min_accuracy": 0}, r"failed by 'distance of the greedy continuation'. Raise max_distance"),
    ):
        with pytest.raises(ValueError, match=message):
            collect(stream, **changes)


def test_collect_refuses_a_dev_set_larger_than_the_data(gpt2_like: Any, corpus: Any) -> None:
    rows = corpus(gpt2_like, 2)
    with pytest.raises(ValueError, match=r"n_dev must leave at least one of the \d memorized sequences for the test, got 5 \(2 came in"):
        collect_memorized(gpt2_like, rows, CRITERIA, decode=letters)
    with pytest.raises(ValueError, match=r"below n_max=3, got 5"):
        collect_memorized(gpt2_like, rows, CRITERIA, n_max=3, decode=letters)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (torch.full((22,), 61), r"tokens must be in \[0, 61\), got 61 in 'sequence-0'"),
        (torch.full((22,), -1), r"tokens must be in \[0, 61\), got -1"),
        (torch.zeros(2, 22, dtype=torch.long), r"vectors of token ids, got shape \(2, 22\)"),
        (np.zeros(22), "vectors of token ids, got .* of float64"),
        ("text", "vectors of token ids, got .*token_windows"),
    ],
)
def test_collect_refuses_what_is_no_token_sequence(gpt2_like: Any, item: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect_memorized(gpt2_like, [item], CRITERIA, decode=letters)


def test_collect_refuses_sequences_longer_than_the_context(gpt2_like: Any) -> None:
    with pytest.raises(ValueError, match=r"n_prefix \+ n_suffix must be at most n_ctx=32, got 80"):
        collect_memorized(gpt2_like, [], decode=letters)
    with pytest.raises(ValueError, match="decode must be given"):
        collect_memorized(gpt2_like, [], CRITERIA)


# Sources


def test_token_windows_take_the_first_or_every_so_many() -> None:
    tokens = torch.arange(20).reshape(2, 10).int()
    assert [(c.id, c.tokens.tolist()) for c in token_windows(tokens, 4)] == [("row-0", [0, 1, 2, 3]), ("row-1", [10, 11, 12, 13])]
    assert [(c.id, c.tokens[0]) for c in token_windows(tokens[1:], 4, stride=3)] == [("row-0+0", 10), ("row-0+3", 13), ("row-0+6", 16)]
    assert [len(c.tokens) for c in token_windows(tokens, 12, stride=3)] == [10, 10]
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        list(token_windows(tokens, 4, stride=0))


def test_text_windows_keep_short_texts_to_be_counted(gpt2_like: Any) -> None:
    gpt2_like.tokenizer = lambda text, add_special_tokens: {"input_ids": [ord(letter) % 61 for letter in text]}
    found = list(text_windows(["abcdef", "", "ab"], gpt2_like, 4))
    assert [(c.id, len(c.tokens)) for c in found] == [("text-0", 4), ("text-1", 0), ("text-2", 2)]
    gpt2_like.tokenizer = None
    with pytest.raises(ValueError, match="model must have a tokenizer"):
        list(text_windows(["a"], gpt2_like))


def test_likely_windows_find_a_memory_inside_a_row(gpt2_like: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(61, (4, 30), generator=generator)
    criteria = Criteria(n_prefix=4, n_suffix=10, min_distinct=1)
    for position in range(13, 25):  # from here on, row 2 is what the model says itself
        rows[2, position] = gpt2_like(rows[2:3, :position])[0, -1].argmax()
    found = list(likely_windows(gpt2_like, rows, criteria, slack=0))
    assert [candidate.id for candidate in found] == ["row-2+11"]  # the last window whose suffix is all right
    assert torch.equal(torch.from_numpy(found[0].tokens), rows[2, 11:25])
    with pytest.raises(ValueError, match="rows of at least 14 tokens, got 10"):
        next(likely_windows(gpt2_like, rows[:, :10], criteria))


@pytest.mark.parametrize("n_prefix", [8, 23])  # windows of 18 tokens, and of all that the model can read
def test_likely_windows_see_every_window_of_a_row_longer_than_the_context_once(gpt2_like: Any, monkeypatch: Any, n_prefix: int) -> None:
    from tl_localize import collect

    rows = torch.randint(61, (2, 3 * 32 + 5), generator=torch.Generator().manual_seed(2))
    criteria = Criteria(n_prefix=n_prefix, n_suffix=10, min_distinct=1)
    seen: list[Any] = []
    monkeypatch.setattr(collect, "_best_windows", lambda found, length, needed: seen.append(found) or [])
    assert list(likely_windows(gpt2_like, rows, criteria)) == []
    step = 33 + 1 - criteria.length
    for row, found in zip(rows, seen, strict=True):
        assert len(found) == len(row) + 1 - criteria.length
        for start, n in enumerate(found.tolist()):
            piece = row[start - start % step :][:33]  # what the window is seen in
            right = gpt2_like(piece[None, :-1])[0].argmax(-1) == piece[1:]
            first = start % step + n_prefix - 1
            assert n == int(right[first : first + 10].sum())


def test_likely_windows_refuse_windows_longer_than_the_context(gpt2_like: Any) -> None:
    rows = torch.randint(61, (2, 80))
    with pytest.raises(ValueError, match=r"n_prefix \+ n_suffix must be at most n_ctx \+ 1 = 33, got 34"):
        next(likely_windows(gpt2_like, rows, Criteria(n_prefix=4, n_suffix=30, min_distinct=1)))


# Early stop


def test_next_row_is_the_edit_distance() -> None:
    truth, text = "kitten sitting", "sitten kittin on"
    row = np.arange(len(truth) + 1)
    for n, letter in enumerate(text, 1):
        row = next_row(row, np.array([letter != other for other in truth]))
        assert row.tolist() == [Levenshtein.distance(text[:n], truth[:j]) for j in range(len(truth) + 1)]


@given(st.lists(st.integers(0, 5), min_size=4, max_size=14), st.lists(st.integers(0, 5), min_size=4, max_size=14), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_bound_never_exceeds_the_distance(tokens: list[int], suffix: list[int], n_prefix: int) -> None:
    """Bytes of UTF-8 as tokens: characters are cut in the middle."""
    data = "aé€a".encode()
    letters_of = [data[i % len(data)] for i in range(6)]

    def decode(ids: list[int]) -> str:
        return bytes(letters_of[i] for i in ids).decode("utf-8", errors="replace")

    bound = Bound(decode, tokens[:n_prefix], tokens)
    distance = Levenshtein.distance(decode([*tokens[:n_prefix], *suffix]), decode(tokens))
    last = 0
    for n in range(1, len(suffix) + 1):
        least = bound.least(suffix[:n])
        assert least <= distance
        assert least >= last or not bound.sound
        last = least


# Near-duplicates


def by_all_pairs(tokens: np.ndarray, max_jaccard: float, ngram: int) -> list[list[int]]:
    sets = [{tuple(row[i : i + ngram]) for i in range(len(row) - ngram + 1)} for row in tokens.tolist()]
    group = list(range(len(tokens)))
    for i in range(len(tokens)):
        for j in range(i):
            if len(sets[i] & sets[j]) / len(sets[i] | sets[j]) > max_jaccard:
                group = [group[j] if g == group[i] else g for g in group]
    return sorted([i for i in range(len(tokens)) if group[i] == g] for g in set(group))


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=80)
def test_near_duplicates_are_those_of_all_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, length, vocabulary = int(rng.integers(1, 30)), int(rng.integers(5, 30)), int(rng.choice([2, 4, 60]))
    originals = rng.integers(vocabulary, size=(max(1, n // 4), length))
    tokens = originals[rng.integers(len(originals), size=n)]
    edited = rng.random(tokens.shape) < rng.choice([0, 0.05, 0.2])
    tokens[edited] = rng.integers(vocabulary, size=int(edited.sum()))
    max_jaccard, ngram = float(rng.choice([0, 0.05, 0.1, 0.3, 0.9, 1])), int(rng.integers(1, 6))
    groups = near_duplicates(tokens, max_jaccard, ngram)
    assert groups == sorted(groups)
    assert sorted(groups) == by_all_pairs(tokens, max_jaccard, ngram)


def test_near_duplicates_are_connected_through_a_third() -> None:
    a, b, c = np.arange(0, 20), np.arange(10, 30), np.arange(20, 40)
    assert near_duplicates(np.stack([a, c]), 0.1, 5) == [[0], [1]]
    assert near_duplicates(np.stack([a, c, b]), 0.1, 5) == [[0, 1, 2]]


def test_near_duplicates_pass_over_what_is_in_the_group_already() -> None:
    """Large groups that all have the same beginning."""
    rng = np.random.default_rng(0)
    tokens = np.repeat(rng.integers(4096, size=(8, 80)), 100, axis=0)
    edited = rng.random(tokens.shape) < 0.1
    tokens[edited] = rng.integers(4096, size=int(edited.sum()))
    tokens[:, :9] = tokens[0, :9]
    assert len(near_duplicates(tokens)) == 8


# General text


def test_perplexity_split_shares_no_run_with_the_collected() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(61, size=(50, 20))
    collected = MemorizedSequence(torch.tensor(rows[7, 3:15]), 4)
    found = perplexity_split(rows, [collected], 49, 20, overlap=5)
    assert sorted(found.tolist()) == sorted(rows[[i for i in range(50) if i != 7]].tolist())
    small = perplexity_split(iter(rows), [collected], 10, 12, overlap=5)
    assert small.shape == (10, 12)
    assert torch.equal(small, perplexity_split(rows, [collected], 10, 12, overlap=5))
    assert not torch.equal(small, perplexity_split(rows, [collected], 10, 12, overlap=5, seed=1))
    assert len(perplexity_split(rows, [collected], 60, 20, overlap=5)) == 49
    with pytest.raises(ValueError, match=r"got none \(49 sequences are shorter than 21 tokens, 1 share text"):
        perplexity_split([*rows[:49], np.concatenate([rows[7], rows[7]])], [collected], 5, 21, overlap=5)


def test_perplexity_split_gives_every_sequence_the_same_chance() -> None:
    rows = np.arange(20)[:, None] * np.ones(3, dtype=np.int64)[None]
    drawn = [int(i) for seed in range(300) for i in perplexity_split(rows, [], 5, 3, seed=seed)[:, 0]]
    counts = np.bincount(drawn, minlength=20)
    assert counts.min() > 45
    assert counts.max() < 110


def test_candidates_keep_their_category(gpt2_like: Any, corpus: Any) -> None:
    stream = [Candidate(row.numpy(), f"c{i}", "poems") for i, row in enumerate(corpus(gpt2_like))]
    found = collect_memorized(gpt2_like, stream, CRITERIA, n_dev=1, decode=letters)
    assert {sequence.category for sequence in found.sequences} == {"poems"}
    assert all(sequence.id.startswith("c") for sequence in found.sequences)
