"""Hyperparameter search: the grid, the rule, and the file that the benchmarks read."""

import json
from pathlib import Path

import pandas as pd
import pytest


def test_expand_makes_every_combination_in_order():
    from tl_localize.evals.tuning import expand

    methods = expand("slimming", {"steps": [10, 20], "learning_rate": [0.1, 0.2]})
    assert [(m.steps, m.learning_rate) for m in methods] == [
        (10, 0.1),
        (10, 0.2),
        (20, 0.1),
        (20, 0.2),
    ]


@pytest.mark.parametrize(
    ("method", "grid", "message"),
    [
        ("slim", {}, "Did you mean slimming"),
        ("slimming", {"step": [1]}, "Did you mean steps"),
        ("slimming", {"steps": []}, "must hold a list of values for steps"),
        ("slimming", {"steps": [0]}, "steps must be a whole number from 1 on"),
        ("slimming", {"steps": 60}, "must hold a list of values for steps, got 60"),
        (
            "slimming",
            {"steps": ["a"]},
            "settings of slimming must be values that it takes, got",
        ),
    ],
)
def test_expand_rejects(method, grid, message, unchecked):
    from tl_localize.evals.tuning import expand

    with pytest.raises(ValueError, match=message):
        expand(method, grid)


@pytest.fixture
def candidates():
    from tl_localize.evals.tuning import expand

    return {repr(method): method for method in expand("slimming", {"steps": [10, 20, 30]})}


@pytest.fixture
def results(candidates):
    from tl_localize.evals.inj_benchmark import InjResults

    rows = [
        {
            "sequence_id": s,
            "method": method,
            "multiple": multiple,
            "recall": recall,
            "seconds": 1.0,
            "converged": True,
        }
        for s in range(2)
        for method, recall in zip(candidates, (0.2, 0.6, 0.6), strict=True)
        for multiple in (1, 2)
    ]
    return InjResults(pd.DataFrame(rows))


def test_rank_inj_puts_the_best_first_and_the_earlier_of_equals(results, candidates):
    from tl_localize.evals.tuning import rank_inj

    ranking = rank_inj(results, candidates)
    assert [settings["steps"] for settings in ranking["settings"]] == [20, 30, 10]
    assert ranking["score"].tolist() == pytest.approx([0.6, 0.6, 0.2])


def test_rank_inj_leaves_out_injections_that_did_not_converge(results, candidates):
    from dataclasses import replace

    from tl_localize.evals.tuning import rank_inj

    lost = results.frame.assign(sequence_id=2, recall=1 - results.frame["recall"], converged=False)
    ranking = rank_inj(replace(results, frame=pd.concat([results.frame, lost])), candidates)
    assert ranking.equals(rank_inj(results, candidates))
    with pytest.raises(ValueError, match="results must hold an injection that converged, got none"):
        rank_inj(replace(results, frame=lost), candidates)


def test_rank_del_puts_self_minus_neg_first(candidates):
    from tl_localize.evals.del_benchmark import DelResults
    from tl_localize.evals.tuning import rank_del

    rows = [
        {
            "sequence_id": s,
            "method": method,
            "ratio": ratio,
            "delta_self_accuracy": own,
            "delta_neg_accuracy": others,
        }
        for s in range(2)
        for method, own, others in zip(
            candidates, (-0.5, -0.4, -0.1), (-0.45, -0.1, 0.0), strict=True
        )
        for ratio in (0.1, 0.2)
    ]
    rows.append(
        {
            "sequence_id": 0,
            "method": "random",
            "ratio": 0.1,
            "delta_self_accuracy": -1.0,
            "delta_neg_accuracy": 0.0,
        }
    )
    results = DelResults(pd.DataFrame(rows), pd.DataFrame())
    ranking = rank_del(results, candidates, 0.1)
    assert [settings["steps"] for settings in ranking["settings"]] == [20, 30, 10]
    assert ranking["score"].tolist() == pytest.approx([30, 10, 5])
    assert ranking["self_loss"].tolist() == pytest.approx([40, 10, 50])
    with pytest.raises(ValueError, match=r"ratio must be one of \[0.1, 0.2\], got 0.3"):
        rank_del(results, candidates, 0.3)


def test_rank_del_needs_another_sequence(candidates):
    from tl_localize.evals.del_benchmark import DelResults
    from tl_localize.evals.tuning import rank_del

    row = {
        "sequence_id": 0,
        "method": "slimming",
        "ratio": 0.1,
        "delta_self_accuracy": -1.0,
        "delta_neg_accuracy": float("nan"),
    }
    with pytest.raises(ValueError, match="results must be of at least two sequences, got one"):
        rank_del(DelResults(pd.DataFrame([row]), pd.DataFrame()), candidates, 0.1)


def test_write_settings_is_read_back(results, candidates, tmp_path):
    from tl_localize.evals.tuning import rank_inj, read_settings, write_settings

    write_settings(rank_inj(results, candidates), tmp_path / "settings.json", "mean recall")
    assert read_settings(tmp_path / "settings.json")["slimming"]["steps"] == 20


def test_settings_of_the_benchmark_with_distractors_are_those_of_its_committed_numbers():
    from tl_localize import HardConcrete, Slimming
    from tl_localize.evals.presets import make_methods
    from tl_localize.evals.tuning import read_settings

    tuned = read_settings(
        Path(__file__).parents[2] / "benchmarks" / "settings" / "distractors.json"
    )
    methods = make_methods(
        "hard_concrete,slimming", [], {"slimming": {"stop_sparsity": 0.2, "steps": 4000}}, tuned
    )
    assert methods == [
        HardConcrete(sparsity_weight=10.0),
        Slimming(steps=150, learning_rate=0.01, stop_sparsity=0.2),
    ]


def test_benchmarks_take_a_settings_file(tmp_path):
    """They are collected with it here: to run them takes minutes."""
    import subprocess
    import sys

    (tmp_path / "settings.json").write_text(json.dumps({"settings": {"slimming": {"steps": 3}}}))
    files = [
        Path(__file__).parents[2] / "benchmarks" / f"test_{name}.py"
        for name in ("inj_table", "inj_distractors", "del_table")
    ]
    command = [sys.executable, "-m", "pytest", *files, "--settings", tmp_path / "settings.json"]
    done = subprocess.run(
        [*map(str, command), "--setup-plan", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for file in files:
        assert any(file.name in line and "tuned" in line for line in done.stdout.splitlines()), (
            file.name
        )


def test_read_settings_rejects_another_file(tmp_path):
    from tl_localize.evals.tuning import read_settings

    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match="settings must be a file written by tl-localize tune"):
        read_settings(tmp_path / "x.json")


@pytest.mark.parametrize("settings", [[], {"slimming": 3}, {"slimming": {"steps": "a"}}])
def test_read_settings_rejects_settings_of_another_form(tmp_path, settings):
    from tl_localize.evals.tuning import read_settings

    (tmp_path / "x.json").write_text(json.dumps({"settings": settings}))
    with pytest.raises(
        ValueError,
        match=r"settings must be a file written by",
    ):
        read_settings(tmp_path / "x.json")


def test_read_settings_rejects_an_unknown_setting(tmp_path):
    from tl_localize.evals.tuning import read_settings

    (tmp_path / "x.json").write_text(json.dumps({"settings": {"slimming": {"step": 3}}}))
    with pytest.raises(ValueError, match="Did you mean steps"):
        read_settings(tmp_path / "x.json")


def test_read_grids_reads_axes_by_method(tmp_path):
    from tl_localize.evals.tuning import read_grids

    (tmp_path / "grid.json").write_text(json.dumps({"slimming": {"steps": [1, 2]}}))
    assert read_grids(tmp_path / "grid.json") == {"slimming": {"steps": [1, 2]}}


def test_read_grids_rejects_broken_json(tmp_path):
    from tl_localize.evals.tuning import read_grids

    (tmp_path / "grid.json").write_text("{")
    with pytest.raises(ValueError, match="grid must be a JSON file"):
        read_grids(tmp_path / "grid.json")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 100_000,
        "[1]",
        '{"settings": []}',
        '{"settings": {"slimming": 3}}',
        '{"settings": {"slimming": {"steps": -1}}}',
    ],
)
def test_read_settings_names_a_file_of_another_form(tmp_path, content):
    from tl_localize.evals.tuning import read_settings

    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ValueError, match=r"must .*, got .*s\.json'"):
        read_settings(tmp_path / "s.json")
