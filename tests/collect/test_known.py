"""Which texts a model knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tl_localize import MemorizedSequence, accuracy
from tl_localize.collect.known import CONTROL, Known, KnownText, known, known_texts
from tl_localize.readers import Data, read_sequences

OWN = [
    KnownText("count", "numbers", "rule", "1 2 3 4 5 6 7 8"),
    KnownText("short", "numbers", "rule", "1 2"),
    KnownText("copy", "repetition", CONTROL, "9 8 7 9 8 7 9 8 7 9 8 7"),
    KnownText("long", "books", "prose", " ".join(str(i % 61) for i in range(100))),
]


class Tokenizer:
    """Numbers, separated by blanks, are tokens."""

    padding_side = "right"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def model(gpt2_like: Any, monkeypatch: Any) -> Any:
    gpt2_like.tokenizer = Tokenizer()
    monkeypatch.setattr("tl_localize.collect.known.known_texts", lambda: list(OWN))
    return gpt2_like


def test_there_are_a_hundred_texts_of_every_kind() -> None:
    texts = known_texts()
    assert len(texts) >= 150 and len({one.id for one in texts}) == len(texts)
    assert {one.kind for one in texts} == {"rule", "list", "prose", "code", CONTROL}
    assert texts == known_texts()  # the same in every run
    by_id = {one.id: one.text for one in texts}
    assert by_id["primes"].startswith("2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31")
    assert by_id["fibonacci"].startswith("1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89")
    assert by_id["roman-numerals"].endswith("XXXVIII, XXXIX, XL")
    assert "nineteen, twenty, twenty-one" in by_id["count-in-words"]
    assert by_id["ordinals"].startswith("1st, 2nd, 3rd, 4th") and "11th, 12th" in by_id["ordinals"]
    assert by_id["e"].startswith("2.71828182845904523536028747135266249775724709369995")
    assert by_id["golden-ratio"].startswith("1.61803398874989484820458683436563811772030917980576")
    assert by_id["zen-of-python"].startswith("The Zen of Python, by Tim Peters")


def test_the_zen_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    sys.modules.pop("this", None)
    known_texts()
    assert capsys.readouterr().out == ""


def test_known_measures_each_text_after_its_first_tokens(model: Any) -> None:
    found = known(model, 0)
    about = found.frame.set_index("id")[["category", "kind", "n_tokens"]].T.to_dict("list")
    assert about == {
        "count": ["numbers", "rule", 8],
        "copy": ["repetition", CONTROL, 12],
        "long": ["books", "prose", 31],  # what the model reads after a beginning-of-text token
    }
    lengths = {one.id: one.n_prefix for one in found.tokenized}
    assert lengths == {"count": 2, "copy": 4, "long": 10}
    assert found.frame["accuracy"].tolist() == pytest.approx(
        accuracy(model, found.tokenized).tolist(), abs=1e-6
    )
    assert found.frame["accuracy"].is_monotonic_decreasing
    assert [one.id for one in found.tokenized] == found.frame["id"].tolist()
    assert {one.id for one in found.sequences} == {"count", "long"}  # no control


def made(model: Any, shares: list[float]) -> Known:
    """Known texts with these accuracies."""
    found = known(model)
    return Known(found.frame.assign(accuracy=shares), found.tokenized, 0.7)


def test_nine_of_ten_is_an_accuracy_of_nine_tenths(model: Any, monkeypatch: Any) -> None:
    """In float32 it is less."""
    share = torch.tensor([9 / 10] * 3)
    assert float(share[0]) < 0.9
    monkeypatch.setattr("tl_localize.collect.known.accuracy", lambda *a: share)
    assert len(known(model, 0.9).sequences) == 2


def test_a_text_that_is_not_known_is_refused_with_its_accuracy(model: Any) -> None:
    found = made(model, [0.95, 0.7, 0.25])
    first, second, last = found.frame["id"]
    assert found.sequence(first) is found.tokenized[0] and found.sequence(second)
    with pytest.raises(ValueError, match=f"of at least 0.7, got 0.25 of '{last}'. Choose another"):
        found.sequence(last)
    with pytest.raises(ValueError, match=r"got 'cuont'.* Did you mean count\?"):
        found.sequence("cuont")
    with pytest.raises(ValueError, match=r"min_accuracy must be in \[0, 1\], got 70"):
        known(model, 70)


def test_thresholds_say_what_they_keep_without_controls(model: Any) -> None:
    found = made(model, [0.95, 0.7, 0.25])
    real = found.frame[found.frame["kind"] != CONTROL]["accuracy"]
    assert found.kept().to_dict() == {t: (real >= t).sum() for t in (0.9, 0.8, 0.7, 0.6, 0.5)}
    table = found.by_category()
    assert table["texts"].sum() == 3 and table["known"].sum() == 2
    assert (
        repr(found) == f"Known({len(found.sequences)} of 3 texts with an accuracy of at least 0.7)"
    )


def test_own_texts_and_saved_ones(model: Any, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("5 6 7 8 9 10\n11 12 13 14 15\n")
    found = known(model, 0, Data(source=tmp_path / "own.txt", n_prefix=2))
    assert (found.frame["kind"] == "own").sum() == 2
    found.save(tmp_path / "known.jsonl")
    options = {"n_prefix": "n_prefix", "id": "id", "category": "category", "any_tokens": True}
    again = list(read_sequences(tmp_path / "known.jsonl", model, **options))
    for ours, theirs in zip(found.sequences, again, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert (ours.id, ours.category, ours.n_prefix) == (
            theirs.id,
            theirs.category,
            theirs.n_prefix,
        )


def test_the_command_prints_and_writes_what_is_known(
    model: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from tl_localize.cli import app

    monkeypatch.setattr("tl_localize.cli.known.load_model", lambda *a: model)
    path = tmp_path / "known.jsonl"
    run = CliRunner().invoke(app, ["known", "--min-accuracy", "0", "--out", str(path)])
    assert run.exit_code == 0, run.output
    assert "count" in run.stdout and "Texts that a threshold keeps: " in run.stdout
    assert len(path.read_text().splitlines()) == 2
    run = CliRunner().invoke(app, ["known", "--csv"])
    assert run.stdout.startswith("id,category,kind,n_tokens,accuracy\n")
    model.tokenizer = None
    run = CliRunner().invoke(app, ["known"])
    assert run.exit_code == 2 and "model must have a tokenizer" in run.stderr


def test_a_model_without_a_tokenizer_is_refused(gpt2_like: Any) -> None:
    with pytest.raises(ValueError, match="model must have a tokenizer to read text, got none"):
        known(gpt2_like)


@pytest.mark.parametrize("name", ["reference-gpt2", "reference-pythia"])
def test_a_shipped_model_knows_what_was_planted(name: str, monkeypatch: Any) -> None:
    from tl_localize import load_model

    monkeypatch.setattr("tl_localize.collect.known.known_texts", list)
    found = known(load_model(name, device="cpu"), 0.9)
    assert set(found.frame["kind"]) == {"planted"}
    assert len(found.sequences) == len(found.frame) > 90
    assert all(isinstance(one, MemorizedSequence) for one in found.sequences)
