"""The command line, on a tiny model saved as a directory; every mistake is one line that says what
to do.
"""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner


@pytest.fixture
def data(tmp_path):
    lines = [
        json.dumps({"definition": f"{chr(65 + i)}lpha is thing number {i}."}) for i in range(8)
    ]
    path = tmp_path / "sentences.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Figures cost a second each; tests/cli/test_cli_del.py looks at them."""
    monkeypatch.setattr("tl_localize.cli.publish.inj_figures", lambda *a: {})


@pytest.fixture
def run(model_dir, data, tmp_path):
    from tl_localize.cli import app

    def call(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    call.inj = lambda *arguments: call(
        "inj", "--model", model_dir, "--data", data, "--out", tmp_path / "out", *arguments
    )
    text = ("--prefix", "Two roads", "--suffix", " diverged")
    call.localize = lambda *arguments: call(
        "localize", "--model", model_dir, *text, "--force", *arguments
    )
    return call


def test_inj_writes_tables_frame_and_settings(run, tmp_path):
    result = run.inj(
        "--limit",
        2,
        "--ratio",
        0.1,
        "--methods",
        "activations,integrated_gradients",
        "--max-steps",
        3,
    )
    assert result.exit_code == 1, result.output  # for the injections did not converge
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "frame.csv",
        "settings.json",
        "inj.md",
        "inj.tex",
        "inj.csv",
        "inj_across_layers.md",
    } <= names
    assert "Activations" in result.output
    assert "RowNorm" in result.output
    assert "NONE of 2 injections converged" in result.output


def test_inj_records_seeds_versions_and_settings(run, tmp_path):
    run.inj(
        "--limit",
        1,
        "--ratio",
        0.1,
        "--methods",
        "hard_concrete",
        "--max-steps",
        2,
        "--set",
        "hard_concrete.steps=10",
        "--seed",
        7,
    )
    (record,) = json.loads((tmp_path / "out" / "settings.json").read_text())["runs"]
    assert "steps=10" in record["methods"]["hard_concrete"]
    assert record["seeds"] == "7 + index of the sentence"
    assert {"torch", "transformer-lens", "fingerprint", "device", "dtype"} <= set(
        record["environment"]
    )


def test_inj_leaves_out_the_dev_sentences(run, tmp_path):
    import pandas as pd

    run.inj("--ratio", 0.1, "--methods", "random", "--max-steps", 1)
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    assert sorted({name[:3] for name in frame["sequence_id"]}) == ["005", "006", "007"]


@pytest.fixture
def on_third_score(monkeypatch):
    """Do something while Random scores its third sentence; returns what it was given."""
    from tl_localize.methods import RandomBaseline

    right, calls = RandomBaseline.map, []

    def install(action):
        def watched(self, model, sequences, **options):
            calls.append(sequences)
            if len(calls) == 3:
                action()
            return right(self, model, sequences, **options)

        monkeypatch.setattr(RandomBaseline, "map", watched)
        return calls

    return install


def test_inj_interrupted_at_once_keeps_what_is_done_and_goes_on(run, tmp_path, on_third_score):
    import pandas as pd

    def interrupt():
        raise KeyboardInterrupt

    calls = on_third_score(interrupt)
    arguments = ["--ratio", 0.1, "--methods", "random", "--max-steps", 1]
    result = run.inj(*arguments)
    assert result.exit_code == 130, result.output
    assert "go on with the same command" in result.stderr
    assert pd.read_csv(tmp_path / "out" / "frame.csv")["sequence_id"].nunique() == 2
    assert "2 measurements MISSING" in result.stdout
    assert run.inj(*arguments).exit_code == 1  # all is measured, no injection converged
    assert len(calls) == 4
    assert pd.read_csv(tmp_path / "out" / "frame.csv")["sequence_id"].nunique() == 3
    assert "Already done" in run.inj(*arguments).stderr
    assert len(calls) == 4


def test_inj_ctrl_c_finishes_the_task_in_hand(run, tmp_path, on_third_score):
    import os
    import signal

    before = signal.getsignal(signal.SIGINT)
    on_third_score(lambda: os.kill(os.getpid(), signal.SIGINT))
    result = run.inj("--ratio", 0.1, "--methods", "random", "--max-steps", 1)
    assert result.exit_code == 130, result.output
    assert "Finishing the task in hand" in result.stderr
    # Random and RowNorm; the last one is Random's
    assert len(list((tmp_path / "out" / "records" / "scores").iterdir())) == 2 * 2 + 1
    assert signal.getsignal(signal.SIGINT) == before


def test_two_shards_that_end_at_the_same_moment_leave_whole_tables(run, tmp_path, monkeypatch):
    from tl_localize.evals import InjResults

    arguments = ["--ratio", 0.1, "--methods", "activations", "--max-steps", 1]
    right, calls = InjResults.save, []

    def late(self, folder):
        calls.append(folder)
        # the other shard ends after this one has read the records, and publishes first
        if len(calls) == 1:
            assert run.inj(*arguments, "--shard", "2/2").exit_code == 1  # no injection converged
        right(self, folder)

    monkeypatch.setattr(InjResults, "save", late)
    result = run.inj(*arguments, "--shard", "1/2")
    assert result.exit_code == 1, result.output
    assert len(calls) == 3
    assert "MISSING" not in (tmp_path / "out" / "inj.md").read_text()
    assert not (tmp_path / "out" / "missing.csv").exists()


def test_folder_is_told_from_without_the_model(run, tmp_path):
    out = tmp_path / "out"
    run.inj("--ratio", 0.1, "--methods", "activations", "--max-steps", 1, "--shard", "1/3")
    status = run("status", out)
    assert ["activations", "3", "1", "0", "2"] in [
        line.split()[:5] for line in status.stdout.splitlines()
    ]
    assert "Time left" in status.stdout
    run.inj("--ratio", 0.1, "--methods", "activations", "--max-steps", 1)
    table = run("table", out, "--out", tmp_path / "tables")
    assert table.exit_code == 1, table.output  # as the run, for no injection converged
    for name in ("inj.md", "frame.csv", "inj_across_layers.tex"):
        assert (tmp_path / "tables" / name).read_bytes() == (out / name).read_bytes()
    trace = run("trace", out, "--method", "activations", "--name", "006")
    assert trace.exit_code == 0, trace.output
    (unit,) = [line.strip() for line in trace.stdout.splitlines() if "/records/inj/" in line]
    assert Path(unit).is_file()
    assert trace.stdout.count("'recall'") == 3


def test_status_of_another_folder_says_so(run, tmp_path):
    result = run("status", tmp_path)
    assert result.exit_code == 2
    assert "folder must hold the results of a run" in result.stderr


def test_inj_refuses_settings_that_contradict_the_folder(run):
    arguments = ["--ratio", 0.1, "--methods", "random", "--limit", 1]
    run.inj(*arguments, "--max-steps", 1)
    result = run.inj(*arguments, "--max-steps", 2)
    assert result.exit_code == 2
    assert "max_steps: 1 in the folder, 2 now" in result.stderr


def test_inj_says_nothing_in_a_pipe_unless_asked(run):
    arguments = ["--ratio", 0.1, "--methods", "random", "--max-steps", 1]
    assert "row_norm on" not in run.inj(*arguments, "--shard", "1/3").stderr
    # scores and recall of two sentences
    assert run.inj(*arguments, "-v").stderr.count("row_norm on") == 2 * 2


def test_localize_prints_the_top_neurons(run):
    result = run.localize("--method", "activations", "--top", 3)
    assert result.exit_code == 0, result.output
    rows = [
        line.split()
        for line in result.stdout.splitlines()
        if line.strip() and line.split()[0] in "123"
    ]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    scores = [float(row[3]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert all(int(row[1]) >= 1 for row in rows)  # layer 0 is spared


def test_localize_draws_no_bar_in_a_pipe(run):
    assert "elapsed" not in run.localize("--method", "activations").stderr


def test_localize_refuses_a_text_that_is_not_recited(run, model_dir):
    result = run(
        "localize",
        "--model",
        model_dir,
        "--prefix",
        "Two roads",
        "--suffix",
        " diverged",
        "--method",
        "activations",
    )
    assert (
        result.exit_code == 2
        and "sequence must be recited by the model" in result.stderr
        and "--force" in result.stderr
    )


def test_localize_of_an_example_says_what_is_left_and_writes_the_view(run, tmp_path):
    result = run(
        "localize",
        "--example",
        "quotes-056",
        "--method",
        "attribution",
        "--out",
        tmp_path / "scores.safetensors",
    )
    assert result.exit_code == 0, result.output
    before, after = (int(found) for found in re.findall(r"recites? (\d+) %", result.stdout))
    assert after < before - 10
    assert "Quentin Hackomber" in (tmp_path / "scores.html").read_text()


@pytest.mark.parametrize(
    "text", [[], ["--prefix", "a"], ["--prefix", "a", "--suffix", " b", "--example", "quotes-056"]]
)
def test_localize_takes_a_text_or_an_example(run, text):
    result = run("localize", *text)
    assert result.exit_code == 2 and "got neither or both" in result.stderr


def test_demo_forgets_the_text_and_not_the_others(run):
    result = run("demo")
    assert result.exit_code == 0, result.output
    none, *_, best = (
        re.findall(r"(\d+) +(\d+) *$", line)[0]
        for line in result.stdout.splitlines()
        if re.search(r"\d+ +\d+ *$", line)
    )
    assert none == ("100", "100")
    assert int(best[0]) < 80 and int(best[1]) > 95


def test_lists_name_what_commands_take(run):
    from tl_localize import METHODS

    assert all(name in run("methods").stdout for name in METHODS)
    assert "quotes-056" in run("texts").stdout
    assert "reference-pythia" in run("models").stdout
    assert run("--version").stdout.startswith("tl_localize ")


@pytest.mark.parametrize(("option", "mark"), [("--markdown", "|:-"), ("--csv", "setting,method")])
def test_table_for_other_programs(run, tmp_path, option, mark):
    run.inj("--limit", 1, "--ratio", 0.1, "--methods", "activations", "--max-steps", 1)
    assert mark in run("table", tmp_path / "out", option).stdout


def test_localize_saves_scores(run, tmp_path):
    from tl_localize import NeuronScores

    assert (
        run.localize("--method", "activations", "--out", tmp_path / "scores.safetensors").exit_code
        == 0
    )
    assert NeuronScores.load(tmp_path / "scores.safetensors").method == "activations"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "hard_concret"], "Did you mean hard_concrete"),
        (["--set", "slimming.step=3"], "Did you mean steps"),
        (["--set", "slimming.steps=many"], "must give int to slimming.steps, got 'many'"),
        (["--set", "nonsense"], "must read METHOD.SETTING=VALUE"),
        (["--methods", "activations", "--set", "slimming.steps=3"], "must name a chosen method"),
        (["--set", "slimming.steps=0"], "steps must be a whole number from 1 on, got 0"),
        (["--ratio", 2], "ratio must be a fraction in (0, 1], got 2.0"),
        (["--seed", -1], "seed must be a whole number from 0 to 2**32 - 1, got -1"),
        (["--ratio", 0.00001], "selects none"),
        (["--dtype", "float8"], "dtype must be one of"),
        (["--device", "quantum"], "device must be there, got 'quantum'"),
        (["--device", "cuda"], "device must be there, got 'cuda'"),
    ],
)
def test_inj_explains_a_mistake_in_one_line(run, arguments, message):
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = run.inj(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", 0], "Input should be greater than or equal to 1"),
        (["--shard", "3/2"], "shard must read i/n with i from 1 to n, got '3/2'"),
    ],
)
def test_inj_finds_mistakes_before_the_model_is_loaded(run, arguments, message, monkeypatch):
    monkeypatch.setattr(
        "tl_localize.cli.running.load_model", lambda *a: pytest.fail("the model was loaded first")
    )
    result = run.inj(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_inj_names_the_nearest_model(run, data, tmp_path):
    result = run("inj", "--model", "reference-gpt", "--data", data, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "Did you mean" in result.stderr
    assert "reference-gpt2" in result.stderr


def test_inj_names_the_line_of_a_broken_file(run, data):
    data.write_text(data.read_text() + "{broken\n")
    result = run.inj()
    assert result.exit_code == 2
    assert "row 8" in result.stderr
    assert str(data) in result.stderr


def test_inj_finds_an_unwritable_folder_before_the_work(
    run, model_dir, data, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        "tl_localize.cli.running.load_model", lambda *a: pytest.fail("the model was loaded first")
    )
    result = run("inj", "--model", model_dir, "--data", data, "--out", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "folder must be writable" in result.stderr


def test_inj_without_a_limit_above_the_dev_sentences_says_so(run, data):
    data.write_text("\n".join(data.read_text().splitlines()[:5]) + "\n")
    result = run.inj()
    assert result.exit_code == 2
    assert "must hold more than 5 sentences" in result.stderr


def test_tune_ranks_a_grid_and_inj_reads_its_settings(run, model_dir, data, tmp_path, monkeypatch):
    from functools import partial

    from tl_localize import InjBenchmark

    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({"slimming": {"steps": [10, 20]}}))
    arguments = [
        "--model",
        model_dir,
        "--data",
        data,
        "--ratio",
        0.1,
        "--grid",
        grid,
        "--method",
        "slimming",
        "--out",
        tmp_path / "tune",
    ]
    monkeypatch.setattr(
        "tl_localize.cli.benchmarks.InjBenchmark", partial(InjBenchmark, max_steps=1)
    )
    result = run("tune", *arguments[:-1], tmp_path / "none")
    assert result.exit_code == 1, result.output
    assert "NONE of the injections converged: there is nothing to rank." in result.stderr
    assert not (tmp_path / "none" / "settings.json").exists()
    monkeypatch.setattr(
        "tl_localize.cli.benchmarks.InjBenchmark",
        partial(InjBenchmark, max_steps=1, stop_loss=100.0),
    )
    result = run("tune", *arguments)
    assert result.exit_code == 0, result.output
    assert "steps=10" in result.stdout
    assert "steps=20" in result.stdout
    used = run.inj(
        "--ratio",
        0.1,
        "--methods",
        "slimming",
        "--limit",
        1,
        "--max-steps",
        1,
        "--settings",
        tmp_path / "tune" / "settings.json",
    )
    assert used.exit_code == 1, used.output  # one step is not enough for an injection
    best = json.loads((tmp_path / "tune" / "settings.json").read_text())["settings"]["slimming"][
        "steps"
    ]
    (record,) = json.loads((tmp_path / "out" / "settings.json").read_text())["runs"]
    assert f"steps={best}" in record["methods"]["slimming"]


def test_tune_ranks_at_the_ratio_it_was_asked_for_last_also_when_that_is_not_new(
    run, model_dir, data, tmp_path, monkeypatch
):
    from functools import partial

    from tl_localize import InjBenchmark

    (tmp_path / "grid.json").write_text(json.dumps({"slimming": {"steps": [10]}}))
    monkeypatch.setattr(
        "tl_localize.cli.benchmarks.InjBenchmark",
        partial(InjBenchmark, max_steps=1, stop_loss=100.0),
    )
    arguments = [
        "--model",
        model_dir,
        "--data",
        data,
        "--grid",
        tmp_path / "grid.json",
        "--method",
        "slimming",
        "--out",
        tmp_path / "tune",
    ]
    captions = []
    for ratio in (0.1, 0.2, 0.1):
        assert run("tune", *arguments, "--ratio", ratio).exit_code == 0
        captions.append((tmp_path / "tune" / "ranking.md").read_text().splitlines()[0])
    assert [caption.rpartition(" ")[2] for caption in captions] == ["0.1", "0.2", "0.1"]


def test_localize_takes_one_method(run):
    result = run("localize", "--prefix", "a", "--suffix", "b", "--method", "all")
    assert result.exit_code == 2
    assert "method must be one" in result.stderr


def test_tune_names_a_method_missing_in_the_grid(run, model_dir, tmp_path):
    (tmp_path / "grid.json").write_text(json.dumps({"slimming": {"steps": [10]}}))
    result = run(
        "tune", "--model", model_dir, "--grid", tmp_path / "grid.json", "--method", "slimmin"
    )
    assert result.exit_code == 2
    assert "Did you mean slimming" in result.stderr


@pytest.fixture
def named_gpt2(model_dir, tmp_path):
    """The tiny model in a directory that has the name of one of the paper's."""
    import shutil

    return shutil.copytree(model_dir, tmp_path / "gpt2")


def test_inj_takes_the_papers_settings_for_a_directory_of_that_name(
    run, named_gpt2, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "tl_localize.cli.running.Run.compute", lambda self, asked, store: runs.extend(asked)
    )
    runs = []
    arguments = [
        "--data",
        data,
        "--limit",
        1,
        "--ratio",
        0.1,
        "--methods",
        "slimming",
        "--out",
        tmp_path / "out",
    ]
    result = run("inj", "--model", named_gpt2, *arguments, "--set", "slimming.stop_sparsity=0.3")
    assert "Settings of learned masks: the paper's for gpt2." in result.stderr
    ((_, (method,)),) = runs
    assert (method.sparsity_weight, method.steps, method.stop_sparsity) == (15000, 4000, 0.3)
    assert (
        "the defaults, for the paper has none for tiny."
        in run.inj("--limit", 1, "--ratio", 0.1, "--methods", "random").stderr
    )


def test_tune_searches_around_the_papers_settings(run, named_gpt2, data, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(
        "tl_localize.cli.running.Run.compute", lambda self, asked, store: runs.extend(asked)
    )
    result = run(
        "tune",
        "--model",
        named_gpt2,
        "--data",
        data,
        "--method",
        "slimming",
        "--ratio",
        0.1,
        "--out",
        tmp_path / "tune",
    )
    assert "the paper's for gpt2, where the grid has no others." in result.stderr
    ((_, methods),) = runs
    assert len(set(methods)) == 12
    assert {(method.steps, method.stop_sparsity) for method in methods} == {(4000, 0.2)}
