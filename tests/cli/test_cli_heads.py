"""--units heads of localize, inj, del and tune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from tl_localize import AttentionHeads, NeuronScores, load_model
from tl_localize.cli import app
from tl_localize.files import save_tensors


def run(command: str, *arguments: Any) -> Result:
    return CliRunner().invoke(app, [*command.split(), *map(str, arguments)])


@pytest.fixture
def given(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Options of del and tune: rows that the model recites from their third token on, and general
    text.
    """
    monkeypatch.setattr("tl_localize.cli.publish.del_figures", lambda *a, **k: {})
    model = load_model(model_dir, device="cpu")
    rows = torch.randint(256, (6, 3), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        while rows.shape[1] < 16:
            rows = torch.cat([rows, model(rows)[:, -1].argmax(-1, keepdim=True)], 1)
    general = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))
    for name, tokens in (("rows", rows), ("general", general)):
        save_tensors(tmp_path / f"{name}.safetensors", {"tokens": tokens.int()}, {})
    files = f"--data {tmp_path}/rows.safetensors --general {tmp_path}/general.safetensors"
    model_and_out = f"--model {model_dir} --out {tmp_path}/out"
    return f"{model_and_out} {files} --n-prefix 3 --any-tokens --units heads"


def test_del_of_heads(given: str, tmp_path: Path) -> None:
    methods = "attribution,iterative_attribution"
    result = run(f"del {given} --n-dev 2 --ratio 0.5 --methods {methods}")
    assert result.exit_code == 0, result.output
    assert "which were chosen for neurons, not heads" in result.stderr
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    assert set(frame["n_neurons"]) == {1}
    assert set(frame["method"]) == {*methods.split(","), "random"}
    (record,) = json.loads((tmp_path / "out" / "settings.json").read_text())["runs"]
    assert record["units"] == {"class": "AttentionHeads"}
    assert record["methods"]["iterative_attribution"]["share"] == 0.5
    assert "[tiny, AttentionHeads]" in (tmp_path / "out" / "del.md").read_text()


def test_del_of_heads_refuses_the_default_ratios_of_a_model_with_two_heads(given: str) -> None:
    result = run(f"del {given} --n-dev 2 --methods random")
    assert result.exit_code == 2
    assert "ratio must select at least one of 2 heads, got 0.17" in result.stderr


def test_tune_of_heads(given: str, tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text(json.dumps({"slimming": {"steps": [2, 3]}}))
    tune = f"tune --benchmark del --method slimming --grid {tmp_path}/grid.json"
    result = run(f"{tune} {given} --ratio 0.5 --n-dev 3")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "settings.json").read_text())["settings"]
    assert found["slimming"]["steps"] in (2, 3)


def test_inj_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tl_localize.cli.publish.inj_figures", lambda *a: {})
    command = "inj --limit 1 --max-steps 2 --methods attribution --units heads --device cpu --out"
    result = run(command, tmp_path / "out")
    assert result.exit_code == 1, result.output  # for the injection did not converge
    (record,) = json.loads((tmp_path / "out" / "settings.json").read_text())["runs"]
    assert record["units"] == {"class": "AttentionHeads"} and record["ratio"] == 0.17
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    assert set(frame["method"]) == {"attribution", "random", "row_norm"}


def test_localize_heads(model_dir: Path, tmp_path: Path) -> None:
    text = ["--prefix", "Two roads", "--suffix", " diverged", "--model", model_dir]
    command = "localize --force --method zero_out --units heads --ratio 0.5 --out"
    result = run(command, tmp_path / "scores.safetensors", *text)
    assert result.exit_code == 0, result.output
    assert "ZeroOut" in result.stdout and "AttentionHeads" in result.stdout
    assert ["rank", "layer", "head", "score"] in [
        line.split() for line in result.stdout.split("\n")
    ]
    scores = NeuronScores.load(tmp_path / "scores.safetensors")
    assert scores.units == AttentionHeads() and scores.values.shape == (2, 2)


@pytest.mark.parametrize("command", ["inj", "del", "tune", "localize"])
def test_unknown_units_are_refused(command: str, tmp_path: Path) -> None:
    out = tmp_path / ("out.safetensors" if command == "localize" else "out")
    result = run(f"{command} --units heds --out", out)
    assert result.exit_code == 2
    assert "got 'heds'. Did you mean heads" in result.stderr
