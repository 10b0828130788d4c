"""tl-localize erase: what is written, and what is refused before anything is."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from commands import invoke

from tl_localize import accuracy, load_model
from tl_localize.cli.erasing import losses_of
from tl_localize.erasure import RowEdit
from tl_localize.model import loading


@pytest.fixture
def erase(trained_dir, model, texts, tmp_path, monkeypatch):
    load = loading.load_model

    def load_once(name, *how):
        return model if name == str(trained_dir) else load(name, *how)

    monkeypatch.setattr(loading, "load_model", load_once)
    rows = [{"tokens": text.tokens.tolist(), "n_prefix": 4} for text in texts]
    files = {"texts": rows[:2], "others": rows[2:]}
    for name, some in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in some)
        (tmp_path / f"{name}.jsonl").write_text(lines)

    def run(arguments, *more):
        return invoke(f"erase --model {trained_dir} {arguments}", *more)

    run.data = f"--data {tmp_path / 'texts.jsonl'} --others {tmp_path / 'others.jsonl'}"
    return run


FREE = "--max-others-lost 100 --max-perplexity-rise 1000"
KEPT = f"{FREE} --max-steps 1 --max-recited 1"  # one step, and nothing has to be erased


def test_erase_writes_a_folder_that_load_model_takes(erase, tmp_path, texts):
    out = tmp_path / "edited"
    result = erase(f"{erase.data} {FREE} --share 0.5 --learning-rate 0.02 --out", out)
    assert result.exit_code == 0, result.output
    assert "30 rows of W_out in layers 1 to 1 were trained" in result.stdout
    assert "recited, teacher-forced (%)" in result.stdout
    known = f"tl-localize known --model {out} --data {tmp_path}/texts.jsonl lists what it still"
    assert known in result.stderr.splitlines()[-1]
    assert "it/s" not in result.stderr  # bars of transformers, in a pipe
    record = json.loads((out / "erased.json").read_text())
    assert len(record["texts"]["after"]) == 2
    by_layer = result.stdout.split("What was changed, by layer:")[1]
    assert re.search("^ +1 +30 +[\\d.]+ +\u2588{12} *$", by_layer, re.M)
    page = (out / "erased.html").read_text()
    for named in ("trained without 2 texts", f"--out {out}", "torch=", "max_recited=0.3"):
        assert named in page
    assert page.count("30 rows changed: ") == 2 and "recited tokens forgotten" in page
    model = load_model(out, "cpu")
    assert accuracy(model, texts[:2]).mean() <= 0.3
    with RowEdit.load(out / "erased.safetensors").undone(model):
        assert accuracy(model, texts[:2]).mean() == 1


def test_texts_that_are_not_erased_are_told(erase):
    result = erase(f"{erase.data} {FREE} --max-steps 1")
    assert result.exit_code == 1, result.output
    assert "The texts are not erased: " in result.stderr
    assert "Next: give --out FOLDER" in result.stderr.splitlines()[-1]


def test_a_price_that_is_not_kept_writes_nothing_unless_forced(erase, tmp_path):
    out = tmp_path / "edited"
    arguments = f"{erase.data} --max-others-lost 0 --max-perplexity-rise 0 --out {out}"
    arguments += " --max-recited 0 --method row_norm --edit ablate"
    result = erase(arguments)
    assert result.exit_code == 2
    assert "price must be one that an edit can keep, got --max-others-lost 0" in result.stderr
    assert not out.exists()
    forced = erase(f"{arguments} --force")
    assert forced.exit_code == 1 and "The texts are not erased: " in forced.stderr
    page, card = (out / "erased.html").read_text(), (out / "erased.md").read_text()
    assert "<dt>in short</dt><dd>The texts are not erased: " in page
    assert card.startswith("# trained in which 2 texts were to be erased\n\n**The texts are not ")
    assert "trained in which 2 texts were to be erased" in page
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "text must be given in one way"),
        ("--example primes --prefix a --suffix b", "got 2"),
        ("--example prime", "Did you mean"),
        ("--example primes --method all", "method must be one"),
        ("--example primes --share 2", "share must be a fraction"),
        ("--prefix 'Two roads' --suffix ' diverged'", "sequence must be recited by the model"),
    ],
)
def test_erase_says_what_is_wrong(erase, arguments, message):
    result = erase(arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_other_texts_are_read_by_their_own_columns(erase, tmp_path, texts):
    rows = [{"body": text.tokens.tolist(), "who": "a", "n": 4} for text in texts[:2]]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    others = erase.data.split("--others ")[1]
    result = erase(f"--data {own} --key body --n-prefix n --others {others} {KEPT}")
    assert result.exit_code == 0, result.output


def test_columns_are_those_of_the_other_texts_too(erase, tmp_path, texts):
    files = {"own": texts[:2], "others": texts[2:]}
    for name, some in files.items():
        rows = [{"body": text.tokens.tolist(), "n_prefix": 4} for text in some]
        (tmp_path / name).with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))
    others = f"--others {tmp_path / 'others.jsonl'}"
    result = erase(f"--data {tmp_path / 'own.jsonl'} --key body {others} {KEPT}")
    assert result.exit_code == 0, result.output
    result = erase(f"--prefix 'Two roads' --suffix ' diverged' --key body {others}")
    assert "sequence must be recited by the model" in result.stderr


def test_a_model_without_a_tokenizer_takes_token_ids(erase, tmp_path, trained_dir):
    folder = tmp_path / "my model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained_dir / name, folder)
    general = torch.randint(1, 256, (6, 10), generator=torch.Generator().manual_seed(4))
    np.save(tmp_path / "general.npy", general.numpy())
    out = tmp_path / "edited"
    how = f"erase {erase.data} {KEPT} --general {tmp_path / 'general.npy'} --model"
    result = invoke(how, folder, "--out", out)
    assert result.exit_code == 0, result.output
    assert load_model(out, "cpu").tokenizer is None


def test_general_text_of_a_collection_is_that_of_the_erasure(erase, tmp_path, monkeypatch):
    from tl_localize.erasure.erase import erase as right

    given = []

    def spy(*arguments, general_tokens, **settings):
        given.append(general_tokens)
        return right(*arguments, general_tokens=general_tokens, **settings)

    general = torch.randint(1, 256, (6, 10), generator=torch.Generator().manual_seed(4))
    np.save(tmp_path / "general.npy", general.numpy())
    monkeypatch.setattr("tl_localize.cli.erasing.erase", spy)
    monkeypatch.setattr(
        "tl_localize.cli.erasing.collected_text", lambda folder: tmp_path / "general.npy"
    )
    result = erase(f"{erase.data} {KEPT}")
    assert result.exit_code == 0, result.output
    assert torch.equal(given[0], general)


def test_a_folder_with_files_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "mine").write_text("mine")
    result = invoke("erase --example primes --model nosuch --out", tmp_path)
    assert result.exit_code == 2 and "folder must be new or empty" in result.stderr


def test_settings_without_a_method_are_those_of_the_default_one(erase):
    result = erase(f"{erase.data} --set nonsense.steps=3")
    assert result.exit_code == 2 and "nonsense" in result.stderr


def test_a_prefix_needs_a_suffix(erase):
    result = erase("--example primes --prefix", "2, 3")
    assert result.exit_code == 2
    assert "prefix and suffix must be given together" in " ".join(result.stderr.split())


def test_what_is_asked_for_is_what_is_done(erase, tmp_path):
    asked = "--max-others-lost 90 --max-perplexity-rise 900 --max-recited 0.9 --seed 7"
    asked += " --share 0.4 --learning-rate 0.01 --max-steps 2 --method attribution --force"
    result = erase(f"{erase.data} {asked} --out", tmp_path / "edited")
    assert result.exit_code in (0, 1), result.output
    settings = json.loads((tmp_path / "edited" / "erased.json").read_text())["settings"]
    wanted = {"max_others_lost": 90, "max_perplexity_rise": 900, "max_recited": 0.9, "seed": 7}
    wanted |= {"share": 0.4, "learning_rate": 0.01, "max_steps": 2, "edit": "rows", "others": 4}
    assert {name: settings[name] for name in wanted} == wanted
    assert settings["method"]["class"] == "Attribution"


def test_losses_of_each_text_are_percentages_before_and_after():
    about = {"id": ["a", "b"], "category": ["x", ""]}
    frames = {"before": [1.0, 0.9], "after": [0.25, 1 / 3]}
    texts = {when: pd.DataFrame(about | {"accuracy": part}) for when, part in frames.items()}
    table = losses_of(SimpleNamespace(texts=texts))
    assert table.loc["a"].tolist() == ["x", 100, 25] and table.loc["b", "after"] == 33.3
    assert table.loc["b", "before"] == 90


def test_of_a_short_other_text_the_first_third_is_the_prefix(erase, tmp_path, texts):
    others = tmp_path / "plain.jsonl"
    others.write_text("".join(json.dumps({"tokens": t.tokens.tolist()}) + "\n" for t in texts[2:]))
    result = erase(f"--data {tmp_path / 'texts.jsonl'} --others {others} {KEPT}")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("more", "first"), [("", 1), ("slimming.first_layer=0", 0)])
def test_masks_of_erase_leave_out_layer_0_unless_asked(erase, tmp_path, more, first):
    out = tmp_path / "edited"
    asked = "--method slimming --set slimming.steps=1" + (f" --set {more}" if more else "")
    result = erase(f"{erase.data} {KEPT} {asked} --out", out)
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "erased.json").read_text())["rows"]
    assert min(layer for layer, _ in rows) == first
