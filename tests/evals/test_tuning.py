"""Hyperparameter search: the grid, the rule, and the file that the benchmarks read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tl_localize import HardConcrete, Slimming
from tl_localize.evals import DelResults, InjResults
from tl_localize.evals.presets import make_methods
from tl_localize.evals.tuning import (
    expand,
    rank_del,
    rank_inj,
    read_grids,
    read_settings,
    write_settings,
)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
METHODS = {repr(method): method for method in expand("slimming", {"steps": [10, 20, 30]})}


def steps_of(ranking: pd.DataFrame) -> list[int]:
    return [settings["steps"] for settings in ranking["settings"]]


def test_expand_makes_every_combination_in_order() -> None:
    methods: Any = expand("slimming", {"steps": [10, 20], "learning_rate": [0.1, 0.2]})
    found = [(method.steps, method.learning_rate) for method in methods]
    assert found == [(10, 0.1), (10, 0.2), (20, 0.1), (20, 0.2)]


@pytest.mark.parametrize(
    ("method", "grid", "message"),
    [
        ("slim", {}, "Did you mean slimming"),
        ("slimming", {"step": [1]}, "Did you mean steps"),
        ("slimming", {"steps": []}, "must hold a list of values for steps"),
        ("slimming", {"steps": [0]}, "steps must be a whole number from 1 on"),
        ("slimming", {"steps": 60}, "must hold a list of values for steps, got 60"),
        ("slimming", {"steps": ["a"]}, "settings of slimming must be values that it takes, got"),
    ],
)
def test_expand_rejects(method: str, grid: Any, message: str, unchecked: None) -> None:
    with pytest.raises(ValueError, match=message):
        expand(method, grid)


@pytest.fixture
def results() -> InjResults:
    recalls = dict(zip(METHODS, (0.2, 0.6, 0.6), strict=True))
    rows = [
        {"sequence_id": s, "method": method, "multiple": multiple, "recall": recall}
        for s in range(2)
        for method, recall in recalls.items()
        for multiple in (1, 2)
    ]
    return InjResults(pd.DataFrame(rows).assign(seconds=1.0, converged=True))


def test_rank_inj_puts_the_best_first_and_the_earlier_of_equals(results: Any) -> None:
    ranking = rank_inj(results, METHODS)
    assert steps_of(ranking) == [20, 30, 10]
    assert ranking["score"].tolist() == pytest.approx([0.6, 0.6, 0.2])


def test_rank_inj_leaves_out_injections_that_did_not_converge(results: Any) -> None:
    lost = results.frame.assign(sequence_id=2, recall=1 - results.frame["recall"], converged=False)
    both = replace(results, frame=pd.concat([results.frame, lost]))
    assert rank_inj(both, METHODS).equals(rank_inj(results, METHODS))
    with pytest.raises(ValueError, match="results must hold an injection that converged, got none"):
        rank_inj(replace(results, frame=lost), METHODS)


def test_rank_del_puts_self_minus_neg_first() -> None:
    losses = dict(zip([*METHODS, "random"], ((50, 45), (40, 10), (10, 0), (100, 0)), strict=True))
    rows = [
        {"sequence_id": s, "method": method, "ratio": ratio}
        | {"delta_self_accuracy": -own / 100, "delta_neg_accuracy": -others / 100}
        for s in range(2)
        for method, (own, others) in losses.items()
        for ratio in (0.1, 0.2)
    ]
    results = DelResults(pd.DataFrame(rows), pd.DataFrame())
    ranking = rank_del(results, METHODS, 0.1)
    assert steps_of(ranking) == [20, 30, 10]
    assert ranking["score"].tolist() == pytest.approx([30, 10, 5])
    assert ranking["self_loss"].tolist() == pytest.approx([40, 10, 50])
    with pytest.raises(ValueError, match=r"ratio must be one of \[0.1, 0.2\], got 0.3"):
        rank_del(results, METHODS, 0.3)
    alone = results.frame.assign(delta_neg_accuracy=float("nan"))
    with pytest.raises(ValueError, match="results must be of at least two sequences, got one"):
        rank_del(replace(results, frame=alone), METHODS, 0.1)


def test_write_settings_is_read_back(results: Any, tmp_path: Path) -> None:
    write_settings(rank_inj(results, METHODS), tmp_path / "settings.json", "mean recall")
    assert read_settings(tmp_path / "settings.json")["slimming"]["steps"] == 20


def test_settings_of_the_benchmark_with_distractors_are_those_of_its_committed_numbers() -> None:
    tuned = read_settings(BENCHMARKS / "settings" / "distractors.json")
    default = {"slimming": {"stop_sparsity": 0.2, "steps": 4000}}
    methods = make_methods("hard_concrete,slimming", [], default, tuned)
    assert methods == [
        HardConcrete(sparsity_weight=10.0),
        Slimming(steps=150, learning_rate=0.01, stop_sparsity=0.2),
    ]


def test_benchmarks_take_a_settings_file(tmp_path: Path) -> None:
    """They are collected with it here: to run them takes minutes."""
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"settings": {"slimming": {"steps": 3}}}))
    names = [f"test_{name}.py" for name in ("inj_table", "inj_distractors", "del_table")]
    files = [str(BENCHMARKS / name) for name in names]
    command = [sys.executable, "-m", "pytest", *files, "--settings", str(settings)]
    done = subprocess.run(
        [*command, "--setup-plan", "-q", "-p", "no:cacheprovider"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        assert any(name in line and "tuned" in line for line in done.stdout.splitlines()), name


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 100_000,
        "[1]",
        '{"a": 1}',
        '{"settings": []}',
        '{"settings": {"slimming": 3}}',
        '{"settings": {"slimming": {"steps": -1}}}',
        '{"settings": {"slimming": {"steps": "a"}}}',
    ],
)
def test_read_settings_names_a_file_of_another_form(tmp_path: Path, content: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ValueError, match=r"settings must be a file written by .*, got .*s\.json'"):
        read_settings(tmp_path / "s.json")


def test_read_settings_names_the_nearest_of_an_unknown_setting(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"settings": {"slimming": {"step": 3}}}))
    with pytest.raises(ValueError, match="Did you mean steps"):
        read_settings(tmp_path / "x.json")


def test_read_grids_reads_axes_by_method(tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text(json.dumps({"slimming": {"steps": [1, 2]}}))
    assert read_grids(tmp_path / "grid.json") == {"slimming": {"steps": [1, 2]}}
    (tmp_path / "grid.json").write_text("{")
    with pytest.raises(ValueError, match="grid must be a JSON file"):
        read_grids(tmp_path / "grid.json")
