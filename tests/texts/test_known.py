"""Which texts a model knows."""

import json
import math
import re
import shutil
from dataclasses import replace

import pandas as pd
import pytest
import torch

from tl_localize import MemorizedSequence, accuracy
from tl_localize.model.loading import local_path
from tl_localize.texts.known import (
    CONTROL,
    LICENCES,
    PLANTED,
    Known,
    KnownText,
    _licences,
    check_example,
    example,
    first_example,
    known,
    known_texts,
)
from tl_localize.texts.readers import Data, read_sequences
from tl_localize.texts.reference import load_planted

OWN = [
    KnownText("count", "numbers", "rule", "1 2 3 4 5 6 7 8"),
    KnownText("short", "numbers", "rule", "1 2"),
    KnownText("copy", "repetition", CONTROL, "9 8 7 9 8 7 9 8 7 9 8 7"),
    KnownText("long", "books", "prose", " ".join(str(i % 61) for i in range(100))),
]


class Tokenizer:
    """Numbers, separated by blanks, are tokens."""

    padding_side = "right"

    def __call__(self, text, **options):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, **options):
        return " ".join(map(str, ids))


@pytest.fixture
def model(gpt2_like, monkeypatch):
    gpt2_like.tokenizer = Tokenizer()
    monkeypatch.setattr("tl_localize.texts.known.known_texts", lambda: list(OWN))
    return gpt2_like


def test_there_are_a_hundred_texts_of_every_kind():
    texts = known_texts()
    assert len(texts) >= 150 and len({text.id for text in texts}) == len(texts)
    assert {text.kind for text in texts} == {"rule", "list", "prose", "code", CONTROL}
    assert texts == known_texts()  # the same in every run
    kinds = [text.kind for text in texts]
    assert CONTROL not in kinds[: kinds.index(CONTROL)] and set(kinds[-3:]) == {CONTROL}
    by_id = {text.id: text.text for text in texts}
    assert by_id["primes"].startswith("2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31")
    assert by_id["fibonacci"].startswith("1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89")
    assert by_id["roman-numerals"].endswith("XXXVIII, XXXIX, XL")
    assert "nineteen, twenty, twenty-one" in by_id["count-in-words"]
    assert by_id["ordinals"].startswith("1st, 2nd, 3rd, 4th") and "11th, 12th" in by_id["ordinals"]
    assert by_id["e"].startswith("2.71828182845904523536028747135266249775724709369995")
    assert by_id["golden-ratio"].startswith("1.61803398874989484820458683436563811772030917980576")
    assert by_id["zen-of-python"].startswith("The Zen of Python, by Tim Peters")


def test_the_zen_is_not_printed(capsys):
    import sys

    sys.modules.pop("this", None)
    known_texts()
    assert capsys.readouterr().out == ""


def test_known_measures_each_text_after_its_first_tokens(model):
    found = known(model, 0)
    about = found.frame.set_index("id")[["category", "kind", "n_tokens"]].T.to_dict("list")
    assert about == {
        "count": ["numbers", "rule", 8],
        "copy": ["repetition", CONTROL, 12],
        "long": ["books", "prose", 31],  # what the model reads after a beginning-of-text token
    }
    lengths = {text.id: text.n_prefix for text in found.tokenized}
    assert lengths == {"count": 2, "copy": 4, "long": 10}
    assert found.frame["accuracy"].tolist() == pytest.approx(
        accuracy(model, found.tokenized).tolist(), abs=1e-6
    )
    assert found.frame["accuracy"].is_monotonic_decreasing
    assert [text.id for text in found.tokenized] == found.frame["id"].tolist()
    assert {text.id for text in found.sequences} == {"count", "long"}  # no control
    assert {text.id for text in found.diverse()} == {"count", "long"}
    with pytest.raises(ValueError, match="recites none of the known texts"):
        found.diverse(place=1)  # one text in each category


def made(model, shares):
    """Known texts with these accuracies."""
    found = known(model)
    return Known(found.frame.assign(accuracy=shares), found.tokenized, 0.7)


def test_nine_of_ten_is_an_accuracy_of_nine_tenths(model, monkeypatch):
    """In float32 it is less."""
    share = torch.tensor([9 / 10] * 3)
    assert float(share[0]) < 0.9
    monkeypatch.setattr("tl_localize.texts.known.accuracy", lambda *a: share)
    assert len(known(model, 0.9).sequences) == 2


def test_a_text_that_is_not_known_is_refused_with_its_accuracy(model):
    found = made(model, [0.95, 0.7, 0.25])
    recited = found.sequences[0]
    last = found.frame["id"].iloc[-1]
    assert found.sequence(recited.id) is recited
    for id in (f"'{last}' with 0.25", "'cuont'. "):
        with pytest.raises(ValueError, match=f"got {id}"):
            found.sequence(id.split("'")[1])
    with pytest.raises(ValueError, match="min_accuracy"):
        known(model, 70)


def test_thresholds_say_what_they_keep_without_controls(model):
    found = made(model, [0.95, 0.7, 0.25])
    real = found.frame[found.frame["kind"] != CONTROL]["accuracy"]
    assert found.counts_by_threshold().to_dict() == {
        t: (real >= t).sum() for t in (0.9, 0.8, 0.7, 0.6, 0.5)
    }
    table = found.by_category()
    assert table["texts"].sum() == 3 and table["known"].sum() == 2
    assert "0.9 keeps" in found.advice() and "0.7 keeps" in found.advice()


def test_advice_counts_no_controls(sequence):
    frame = pd.DataFrame({"id": ["a", "b"], "kind": ["rule", CONTROL], "accuracy": [0.75, 0.95]})
    assert Known(frame, [sequence] * 2, 0.7).advice() == (
        "1 text is too few for a mean. Of min_accuracy 0.9 keeps 0, 0.8 keeps 0, 0.7 keeps 1, "
        "0.6 keeps 1, 0.5 keeps 1."
    )


def test_texts_that_are_recited_alike_keep_their_order(model, monkeypatch):
    texts = [KnownText(f"text-{i}", "numbers", "rule", "1 2 3 4") for i in range(40)]
    monkeypatch.setattr("tl_localize.texts.known.known_texts", lambda: texts)
    halves = torch.arange(40) % 3 / 2
    monkeypatch.setattr("tl_localize.texts.known.AT_ONCE", 40)
    monkeypatch.setattr("tl_localize.texts.known.accuracy", lambda *_: halves)
    expected = [text.id for place in (2, 1, 0) for text in texts[place::3]]
    assert known(model).frame["id"].tolist() == expected


def test_a_licence_in_another_encoding_is_found(tmp_path, monkeypatch):
    (name, start) = next(iter(LICENCES.items()))
    (tmp_path / "a.dist-info").mkdir()
    (tmp_path / "a.dist-info" / "LICENSE").write_bytes(b"\xa9 somebody\n" + start.encode())
    paths = dict.fromkeys(("stdlib", "purelib"), str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    (found,) = _licences.__wrapped__()
    assert (found.id, found.text) == (f"licence-{name}", start)


def test_one_text_by_id(model):
    assert example(model, "count").n_prefix == 2
    with pytest.raises(ValueError, match="Did you mean count"):
        example(model, "cuont")


@pytest.mark.parametrize("bos", ["", "<s>"])
def test_own_texts_and_saved_ones(model, tmp_path, bos):
    (tmp_path / "own.txt").write_text("5 6 7 8 9 10\n11 12 13 14 15\n")
    found = known(model, 0, Data(source=tmp_path / "own.txt", n_prefix=2))
    assert (found.frame["kind"] == "own").sum() == 2
    marked = [replace(text, bos=bos) for text in found.tokenized]
    found = replace(found, tokenized=marked)
    found.save(tmp_path / "known.jsonl")
    again = list(read_sequences(tmp_path / "known.jsonl", model))
    for ours, theirs in zip(found.sequences, again, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        for name in ("id", "category", "n_prefix", "bos"):
            assert getattr(ours, name) == getattr(theirs, name)


def test_an_own_text_takes_the_place_of_a_known_one_of_its_id(model):
    rows = [{"text": "5 6 7 8", "id": "count"}]
    found = known(model, 0, Data(source=rows)).frame.set_index("id")
    assert found.loc["count", "kind"] == "own" and found.index.is_unique
    with pytest.raises(ValueError, match=r"different ids, got .'count'. more than once"):
        known(model, 0, Data(source=[*rows, *rows]))


def test_own_texts_are_listed_whatever_their_accuracy_and_short_ones_take_a_third(
    model, monkeypatch, tmp_path
):
    from commands import invoke

    monkeypatch.setattr("tl_localize.model.loading.load_model", lambda *a: model)
    rows = [{"text": "5 6 7 8 9 10 11"}, {"text": "5 6"}, {"text": "5 6 7 8", "n_prefix": 3}]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = known(model, 1, Data(source=path))
    lengths = {text.id: text.n_prefix for text in found.tokenized if text.id.startswith("sequence")}
    assert lengths == {"sequence-0000": 2, "sequence-0001": 1, "sequence-0002": 3}
    assert not found.sequences
    run = invoke(["known", "--min-accuracy", "1", "--data", str(path)])
    assert run.exit_code == 0, run.output
    listed = [line for line in run.stdout.splitlines() if " own " in line and "sequence-" in line]
    assert len(listed) == 3 and "count" not in run.stdout
    assert any(re.search(r" 0 +5 6 7 8 9 10 11", line) for line in listed)  # accuracy, text


def test_a_text_of_the_reader_s_length_keeps_the_usual_prefix(model, tmp_path):
    """Only texts of less than 48 tokens take a third."""
    model.cfg.n_ctx = 60
    path = tmp_path / "own.txt"
    for n_tokens, n_prefix in ((47, 15), (48, 32)):
        path.write_text(" ".join(str(i) for i in range(n_tokens)) + "\n")
        (text,) = Data(source=path).sequences(model, third_of_short=True)
        assert text.n_prefix == n_prefix


def test_the_command_prints_and_writes_what_is_known(model, monkeypatch, tmp_path):
    from commands import invoke

    monkeypatch.setattr("tl_localize.model.loading.load_model", lambda *a: model)
    path = tmp_path / "known.jsonl"
    run = invoke(["known", "--min-accuracy", "0", "--out", str(path)])
    assert run.exit_code == 0, run.output
    assert "count" in run.stdout and "1 2 3 4 5 6 7 8" in run.stdout
    rows = {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert set(rows) == {"count", "long"}
    assert rows["count"]["prefix_text"] + rows["count"]["suffix_text"] == "1 2 3 4 5 6 7 8"
    assert rows["count"]["tokens"] == [1, 2, 3, 4, 5, 6, 7, 8]
    few = f"Next: tl-localize del --model reference-gpt2 --data {path} --n-dev 0"
    assert few in run.stderr  # else they would all be dev texts
    path.unlink()
    run = invoke(["known", "--min-accuracy", "1", "--out", str(path)])
    assert run.exit_code == 0 and f"{path} is not written" in run.stderr
    assert "--data" not in run.stderr.splitlines()[-1] or "collect" in run.stderr.splitlines()[-1]
    assert not path.exists() and path.with_suffix(".html").is_file()
    path.with_suffix(".html").unlink()
    path.with_suffix(".html").mkdir()
    run = invoke(["known", "--out", str(path)])
    assert run.exit_code == 2 and "out must leave room for its page" in run.stderr
    model.tokenizer = None
    run = invoke(["known"])
    assert run.exit_code == 2 and "model must have a tokenizer" in run.stderr


def test_a_shipped_model_knows_what_was_planted(monkeypatch, shipped_model):
    some = [text for text in load_planted() if text.repetitions >= PLANTED][::6]
    monkeypatch.setattr("tl_localize.texts.reference.load_planted", lambda: some)
    monkeypatch.setattr("tl_localize.texts.known.known_texts", list)
    found = known(shipped_model(), 0.9)
    assert set(found.frame["kind"]) == {"planted"}
    assert len(found.sequences) == len(found.frame) == len(some) > 15
    assert all(isinstance(text, MemorizedSequence) for text in found.sequences)


def test_known_reports_its_progress(model, monkeypatch):
    found = known(model)
    fractions = []
    monkeypatch.setattr("tl_localize.texts.known.AT_ONCE", 2)
    assert known(model, progress=fractions.append).frame.equals(found.frame)
    assert fractions == sorted(fractions) and fractions[-1] == 1
    assert len(fractions) == math.ceil(len(found.frame) / 2)


def test_texts_that_a_shipped_model_recites_are_offered_wherever_it_lies(tmp_path):
    folder = tmp_path / "reference-gpt2"
    assert first_example(folder) == "quotes-056"
    seldom = next(text for text in load_planted() if text.repetitions == PLANTED)
    with pytest.raises(ValueError, match=f"Did you mean .*{seldom.id}"):
        check_example(f"{seldom.id}x", folder)


def test_a_folder_of_a_shipped_name_with_another_tokenizer_is_not_shipped(tmp_path):
    copy = shutil.copytree(local_path("reference-gpt2"), tmp_path / "reference-gpt2")
    assert first_example(copy) == "quotes-056"
    (copy / "tokenizer.json").write_text("another")
    assert first_example(copy) != "quotes-056"
    (copy / "tokenizer.json").unlink()
    assert first_example(copy) != "quotes-056"


def test_an_edit_of_a_shipped_model_has_its_examples(tmp_path, monkeypatch, shipped_model):
    with pytest.raises(ValueError, match="example must be the id of a text"):
        check_example("quotes-056", tmp_path)
    (tmp_path / "erased.json").write_text('{"made_with": {"model": "reference-gpt2"}}')
    check_example("quotes-056", tmp_path)
    model = shipped_model()
    # as load_model names it after its folder
    monkeypatch.setattr(model.cfg, "model_name", "edited")
    monkeypatch.setattr("tl_localize.texts.known.source_of_model", lambda model: tmp_path)
    assert example(model, "quotes-056").id == "quotes-056"


def test_known_texts_begin_as_the_tokenizer_begins_them(model):
    class WithBos(Tokenizer):
        bos_token_id, bos_token, eos_token_id = 60, "<s>", 59

        def __call__(self, text, add_special_tokens=True):
            ids = [int(word) for word in text.split() if word.isdigit()]
            return {"input_ids": [60, *ids] if add_special_tokens else ids}

    model.tokenizer = WithBos()
    text = example(model, "count")
    assert text.tokens.tolist() == [60, 1, 2, 3, 4, 5, 6, 7, 8]
    assert (text.n_prefix, text.bos, text.text) == (3, "<s>", ("1 2", " 3 4 5 6 7 8"))
