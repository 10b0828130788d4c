"""Hyperparameter search: the grid, the rule, and the file that the benchmarks read."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tl_localize import HardConcrete, Slimming
from tl_localize.evals import DelResults, InjResults
from tl_localize.evals.settings import make_methods
from tl_localize.evals.shared import NOT_DONE
from tl_localize.evals.tuning import expand, rank, read_settings, write_settings
from tl_localize.files import identity

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
METHODS = {repr(method): method for method in expand("slimming", {"steps": [10, 20, 30]})}


def steps_of(ranking):
    return [settings["steps"] for settings in ranking["settings"]]


def test_expand_makes_every_combination_in_order():
    methods = expand("slimming", {"steps": [10, 20], "learning_rate": [0.1, 0.2]})
    found = [(method.steps, method.learning_rate) for method in methods]
    assert found == [(10, 0.1), (10, 0.2), (20, 0.1), (20, 0.2)]


@pytest.mark.parametrize(
    ("method", "grid", "message"),
    [
        ("slim", {}, "Did you mean slimming"),
        ("slimming", {"step": [1]}, "Did you mean steps"),
        ("slimming", {"steps": [0]}, "steps must be a whole number from 1 on"),
        ("slimming", {"steps": ["a"]}, "steps must be a whole number from 1 on"),
    ],
)
def test_expand_rejects(method, grid, message):
    with pytest.raises(ValueError, match=message):
        expand(method, grid)


RUN = {"methods": {label: identity(method) for label, method in METHODS.items()}}
RUNS = {"scopes": {"0.1": RUN}}


@pytest.fixture
def results():
    recalls = dict(zip(METHODS, (0.2, 0.6, 0.6), strict=True))
    about = {"seconds": 1.0, "converged": True, "injection_ratio": 0.1}
    rows = [
        {"sequence_id": s, "method": method, "multiple": multiple, "recall": recall, **about}
        for s in range(2)
        for method, recall in recalls.items()
        for multiple in (1, 2)
    ]
    return InjResults(pd.DataFrame(rows), RUNS)


def test_rank_of_inj_puts_the_best_first_and_the_earlier_of_equals(results):
    ranking = rank(results, 0.1)
    assert steps_of(ranking) == [20, 30, 10]
    assert ranking["score"].tolist() == pytest.approx([0.6, 0.6, 0.2])
    lost = results.frame.assign(recall=1 - results.frame["recall"], converged=False)
    both = replace(results, frame=pd.concat([results.frame, lost]))
    assert rank(both, 0.1).equals(ranking)
    assert len(rank(replace(results, frame=lost), 0.1)) == len(rank(results, 0.2)) == 0


def test_rank_of_del_puts_self_minus_neg_first():
    losses = dict(zip([*METHODS, "random"], ((50, 45), (40, 10), (10, 0), (100, 0)), strict=True))
    rows = [
        {"method": method, "ratio": ratio, "delta_self_accuracy": -own / 100}
        | {"delta_neg_accuracy": -others * ratio * 10 / 100}
        for method, (own, others) in losses.items()
        for ratio in (0.1, 0.2)
    ]
    results = DelResults(pd.DataFrame(rows), RUNS)
    ranking = rank(results, 0.1)
    assert steps_of(ranking) == [20, 30, 10]
    assert ranking["score"].tolist() == pytest.approx([30, 10, 5])
    alone = results.frame.assign(delta_neg_accuracy=float("nan"))  # no other sequence
    assert len(rank(replace(results, frame=alone), 0.1)) == 0


def test_a_function_among_the_methods_is_not_ranked(results):
    methods = {**RUN["methods"], "mine": {"only here": "mine"}}
    also = replace(results, settings={"scopes": {"0.1": {"methods": methods}}})
    pd.testing.assert_frame_equal(rank(also, 0.1), rank(results, 0.1))


def test_write_settings_is_read_back(results, tmp_path):
    write_settings(rank(results, 0.1), tmp_path / "settings.json", "mean recall")
    assert read_settings(tmp_path / "settings.json")["slimming"]["steps"] == 20


def test_settings_of_the_benchmark_with_distractors_are_those_of_its_committed_numbers():
    tuned = read_settings(BENCHMARKS / "settings" / "distractors.json")
    default = {"slimming": {"stop_sparsity": 0.2, "steps": 4000}}
    methods = make_methods("hard_concrete,slimming", [], default, tuned)
    assert methods == [
        HardConcrete(sparsity_weight=10.0),
        Slimming(steps=150, learning_rate=0.01, stop_sparsity=0.2),
    ]


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
def test_read_settings_names_a_file_of_another_form(tmp_path, content):
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ValueError, match=r"settings must be a file written by .*, got .*s\.json'"):
        read_settings(tmp_path / "s.json")


def test_read_settings_names_the_nearest_of_an_unknown_setting(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"settings": {"slimming": {"step": 3}}}))
    with pytest.raises(ValueError, match="Did you mean steps"):
        read_settings(tmp_path / "x.json")


def test_a_setting_that_failed_on_a_sequence_is_not_ranked(results):
    waits, failed, _ = METHODS
    missing = pd.DataFrame(
        [
            {"method": failed, "part": "0", "scope": "0.1", "reason": "out of memory"},
            {"method": waits, "part": "1", "scope": "0.1", "reason": NOT_DONE},
        ]
    )
    assert steps_of(rank(replace(results, missing=missing), 0.1)) == [30, 10]
    elsewhere = replace(results, missing=missing.assign(scope="0.2"))
    assert steps_of(rank(elsewhere, 0.1)) == [20, 30, 10]
