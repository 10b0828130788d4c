"""The command line, on a tiny model saved as a directory; every mistake is one line that says what
to do.
"""

import errno
import io
import json
import os
import re
import runpy
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from commands import invoke

from tl_localize.cli.options import ModelOptions, RunOptions
from tl_localize.cli.running import compute
from tl_localize.execution import Store

INJ = "--ratio 0.1 --max-steps 1 --methods"

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def data(tmp_path):
    texts = [f"{chr(65 + i)}lpha is thing number {i}." for i in range(8)]
    path = tmp_path / "sentences.jsonl"
    path.write_text("".join(json.dumps({"definition": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def run(model_dir, data, tmp_path):
    def call(command, *arguments, charset="utf-8"):
        return invoke(command, *arguments, charset=charset)

    common = ["--model", model_dir, "--data", data]
    call.inj = lambda command: call(f"inj {command} --out", tmp_path / "out", *common)
    call.tune = lambda command, out="tune": call(f"tune {command} --out", tmp_path / out, *common)
    text = ["--model", model_dir, "--prefix", "Two roads", "--suffix", " diverged"]
    call.localize = lambda command: call(f"localize {command}", *text)
    return call


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())


def methods_of(folder):
    """Label -> method, of the only scope of a folder."""
    (scope,) = settings_of(folder)["scopes"].values()
    return {label: what for label, (what, _) in scope["methods"].items()}


def test_inj_writes_tables_frame_and_settings(run, tmp_path):
    methods = "activations,integrated_gradients"
    result = run.inj(f"--limit 2 --seed 7 {INJ} {methods} --set integrated_gradients.steps=3")
    assert result.exit_code == 1, result.output  # for the injections did not converge
    tables = {"inj.md", "inj.tex", "inj.csv", "inj_across_layers.md"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert tables | {"frame.csv", "settings.json"} <= names
    assert "Activations" in result.stdout and "RowNorm" in result.stdout
    assert "NONE of 2 injections converged" in result.stdout
    record = settings_of(tmp_path / "out")
    assert methods_of(tmp_path / "out")["integrated_gradients"]["steps"] == 3
    assert record["settings"]["seed"] == 7
    assert {"fingerprint", "dtype"} <= set(record["settings"])
    assert {"torch", "transformer-lens"} <= set(record["environments"][0])
    assert "Next: " in result.stderr.splitlines()[-1]


def test_inj_leaves_out_the_dev_sentences(run, tmp_path):
    run.inj(f"{INJ} random")
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    assert sorted({name[:3] for name in frame["sequence_id"]}) == ["005", "006", "007"]


def test_inj_interrupted_keeps_what_is_done_and_goes_on(run, tmp_path, monkeypatch):
    from tl_localize.methods import RandomBaseline

    right = RandomBaseline.map_batches
    calls = []
    frame = tmp_path / "out" / "frame.csv"

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler does
        return right(*arguments, **options)

    monkeypatch.setattr(RandomBaseline, "map_batches", interrupted)
    handler = signal.getsignal(signal.SIGTERM)
    result = run.inj(f"{INJ} random")
    assert result.exit_code == 130, result.output
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "go on with the same command" in result.stderr
    assert pd.read_csv(frame)["sequence_id"].nunique() == 2
    assert "2 measurements MISSING" in result.stdout
    assert run.inj(f"{INJ} random").exit_code == 1  # all is measured, no injection converged
    assert len(calls) == 4
    assert pd.read_csv(frame)["sequence_id"].nunique() == 3
    run.inj(f"{INJ} random")
    assert len(calls) == 4


def test_folder_is_told_from_without_the_model(run, tmp_path):
    out = tmp_path / "out"
    run.inj(f"{INJ} activations --shard 1/3")
    status = run("status", out).stdout
    counts = [line.split()[:5] for line in status.splitlines()]
    assert ["activations", "3", "1", "0", "2"] in counts
    run.inj(f"{INJ} activations")
    written = {path: path.read_bytes() for path in out.glob("*.*")}
    for path in out.glob("inj*"):
        path.unlink()
    table = run("table", out)
    assert table.exit_code == 1, table.output  # as of the run: no injection converged
    assert {path: path.read_bytes() for path in out.glob("*.*")} == written


@pytest.mark.parametrize("name", [".", "nosuch"])
def test_status_of_another_folder_says_so(run, tmp_path, name):
    result = run("status", tmp_path / name)
    assert result.exit_code == 2
    assert "folder must hold the results of a run" in result.stderr
    assert "Name a folder that a command" in result.stderr and "write {" not in result.stderr


def test_inj_refuses_settings_that_contradict_the_folder(run):
    run.inj(f"--limit 1 {INJ} random")
    result = run.inj(f"--limit 1 {INJ} random --max-steps 2")
    assert result.exit_code == 2
    assert "max_steps: 1 in the folder, 2 now" in result.stderr


def test_inj_says_nothing_in_a_pipe_unless_asked(run):
    assert "row_norm on" not in run.inj(f"{INJ} random --shard 1/3").stderr
    # of the two sentences that are left
    assert run.inj(f"{INJ} random -v").stderr.count("row_norm on") == 2


def test_localize_prints_the_top_neurons(run):
    result = run.localize("--force --method activations")
    assert result.exit_code == 0, result.output
    by_layer, best = result.stdout.split("The best neurons by Activations")
    rows = [line.split() for line in best.splitlines() if re.match(r" +\d+ ", line)]
    assert len(re.findall(r"^ +1 +\d+ +\d+ +-?\d", by_layer, re.M)) == 1  # of two layers
    assert [row[0] for row in rows] == [str(rank) for rank in range(1, 21)]
    scores = [float(row[3]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert all(int(row[1]) >= 1 for row in rows)  # layer 0 is spared
    assert "elapsed" not in result.stderr  # no bar in a pipe


@pytest.mark.parametrize("few_planted", [1], indirect=True)
def test_localize_shows_the_strongest_of_neurons_that_are_taken_in_rounds(run, few_planted):
    """In all layers, by an effect: the scores are no more than the order in a layer."""
    result = run("localize --example quotes-056 --ratio 0.02")
    assert result.exit_code == 0, result.output
    chosen = "names 155 neurons from layer 1 on: 31 neurons of each layer (2 %)."
    assert f"Iterative Attribution {chosen}" in result.stdout
    by_layer, strongest = result.stdout.split("The strongest of them by effect")
    layers = re.findall(r"^ +(\d) +(\d+) +(\d+) +(\S+) +(\u2588*) *$", by_layer, re.M)
    assert [(layer, count) for layer, count, *_ in layers] == [(str(n), "31") for n in range(1, 6)]
    assert all(0 <= int(recited) <= 100 for _, _, recited, _, _ in layers)
    longest = max(layers, key=lambda row: float(row[3]))  # the bars are of the rise of the loss
    assert len(longest[-1]) == 12 == max(len(bar) for *_, bar in layers)
    assert re.search(r"rank +layer +neuron +rise of the loss .*first order", strongest)
    rows = re.findall(r"^ +(\d+) +(\d) +(\d+) +(\S+) *$", strongest, re.M)
    effects = [float(row[3]) for row in rows]
    assert len(rows) == 20 and effects == sorted(effects, reverse=True) and effects[0] > 0
    assert len({row[1] for row in rows}) > 2


@torch.no_grad()
def test_localize_measures_what_a_layer_does_alone(shipped_model):
    from tl_localize import memorization_loss
    from tl_localize.cli.one_text import by_layer
    from tl_localize.methods import Activations
    from tl_localize.texts.known import example

    model = shipped_model()
    sequence = example(model, "quotes-056")
    chosen = Activations()(model, sequence).top_k(0.1, first_layer=1)
    table = by_layer(model, sequence, chosen)
    before = float(memorization_loss(model, [sequence]))
    third = chosen.mask.clone()
    third[torch.arange(len(third)) != 3] = False
    with replace(chosen, mask=third).dropped_out(model):
        rise = float(memorization_loss(model, [sequence])) - before
    assert table.loc[3, "rise of the loss (nats per token)"] == pytest.approx(rise)
    assert table["neurons"].tolist() == [154] * 5


def test_localize_heads(run):
    result = run.localize("--force --method zero_out --units heads --ratio 0.5")
    assert result.exit_code == 0, result.output
    assert "The best heads by Zero-Out" in result.stdout
    assert re.search("rank +layer +head +score", result.stdout)


@pytest.mark.parametrize("few_planted", [13], indirect=True)
def test_localize_of_an_example_says_what_is_left_and_writes_the_view(run, tmp_path, few_planted):
    from tl_localize import NeuronScores

    scores = tmp_path / "scores.safetensors"
    result = run("localize --example quotes-056 --method attribution --out", scores)
    assert result.exit_code == 0, result.output
    assert int(re.search(r"(\d+) of 48 recited tokens forgotten", result.stdout)[1]) > 5
    was, now = map(float, re.search(r"text: (.+) before, (.+) without", result.stdout).groups())
    assert was < now < 1.05 * was and "smallest set" not in result.stderr
    page = (tmp_path / "scores.html").read_text()
    for named in ("Quentin Hackomber", "reference-gpt2", "quotes-056", "Attribution", "%)"):
        assert named in page
    assert f"tl-localize localize --example quotes-056 --method attribution --out {scores}" in page
    others = result.stdout.split("those that lose most:")[1]
    own, *rest = re.findall(r"^ +(\S+) +\w+ +\d+ +\S+ +(-?[\d.]+) ", others, re.M)
    assert own[0] == "quotes-056" and len(rest) == 12
    lost = [float(points) for _, points in rest]
    assert lost == sorted(lost, reverse=True) and lost[0] < float(own[1])
    assert all(id in page for id, _ in rest)
    said = r"quotes-056: 100% recited before, .* other texts lose"
    assert re.search(said, others)
    assert result.stderr.splitlines()[-1].startswith("Next: tl-localize erase --model reference-")
    assert NeuronScores.load(scores).method == "attribution"


def test_localize_says_once_how_much_is_recited_and_does_not_warn_of_it(run, recwarn, tmp_path):
    page = tmp_path / "scores.html"
    page.write_text("of an earlier text")
    result = run.localize(f"--force --method activations --out {tmp_path}/scores.safetensors")
    assert result.exit_code == 0 and "The model recites 0 %" in result.stdout
    assert "No page is written." in result.stderr and not page.exists()
    assert not [found for found in recwarn if "must be recited" in str(found.message)]


@pytest.mark.parametrize("few_planted", [1], indirect=True)
def test_localize_warns_where_the_model_is_broken(run, few_planted):
    result = run("localize --example quotes-056 --method random --ratio 1")
    assert result.exit_code == 0 and "broken rather than" in result.stderr


@pytest.mark.parametrize("few_planted", [1], indirect=True)
def test_localize_says_where_the_smallest_set_costs_more_than_it_may(run, few_planted):
    result = run("localize --example quotes-056 --method activations --max-perplexity-rise 0")
    assert result.exit_code == 0 and "Without the top 1 neuron of each layer" in result.stdout
    assert "more than --max-perplexity-rise allows" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "got 0. Try --example quotes-056, or another"),
        ("--model gpt2", "got 0. Try --example primes, or another"),
        ("--prefix a --suffix b --example quotes-056", "got 2. Try"),
        ("--prefix a --example quotes-056", "prefix and suffix must be given together"),
        ("--prefix a --suffix b --method all", "method must be one"),
        ("--example quotes-05", "Did you mean quotes-05"),
        ("--example primes", "accuracy of at least 0.7, got 0."),
        ("--prefix 'Two roads' --suffix ' diverged'", "sequence must be recited by the model"),
        ("--prefix 'Two roads' --suffix ' diverged'", "With --force the neurons are ranked"),
    ],
)
def test_localize_explains_a_mistake_in_one_line(run, arguments, message):
    result = run(f"localize {arguments}")
    assert result.exit_code == 2 and message in result.stderr


def test_a_share_that_is_no_neuron_is_refused_before_the_method_runs(run, monkeypatch):
    from tl_localize.methods import Activations

    def failing(*given, **options):
        raise AssertionError("nothing may be computed")

    monkeypatch.setattr(Activations, "attribute_batch", failing)
    result = run.localize("--force --method activations --ratio 0.00001")
    assert result.exit_code == 2 and "ratio must select" in result.stderr


def test_localize_says_where_memory_does_not_suffice(run, monkeypatch):
    from tl_localize.methods import Activations

    errors = [RuntimeError("another"), torch.OutOfMemoryError("CUDA out of memory.")]

    def failing(*given, **options):
        raise errors.pop()

    monkeypatch.setattr(Activations, "attribute_batch", failing)
    result = run.localize("--force --method activations")
    assert result.exit_code == 1 and "got too little. Take --dtype" in result.stderr
    with pytest.raises(RuntimeError, match="another"):
        run.localize("--force --method activations")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("localize --example mit", "got 'mit'. Try quotes-056."),
        ("localize --example quotes-5", "Did you mean quotes-0"),
        ("localize --model gpt2 --example mit", "Did you mean mitosis or licence-mit"),
        ("localize --model gpt2 --example quotes-056", "lists for 'gpt2', got 'quotes-056'"),
        ("localize --example quotes-056 --max-perplexity-rise -1", "max_perplexity_rise must be"),
        ("demo --example mit", "got 'mit'. Try quotes-056."),
        ("known --min-accuracy 70", "min_accuracy must be a number in [0, 1]"),
        ("del --max-others-lost 101", "max_others_lost must be a number in [0, 100]"),
    ],
)
def test_a_wrong_name_or_number_is_found_before_a_model_is_loaded(
    run, arguments, message, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        "tl_localize.model.loading.load_model", lambda *a: pytest.fail("a model was loaded")
    )
    monkeypatch.chdir(tmp_path)
    result = run(arguments)
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert not list(tmp_path.glob("tl-localize-results"))


@pytest.mark.parametrize(
    "command", ["inj", "del", "rev", "tune", "tune --benchmark del", "collect --data corpus.txt"]
)
def test_a_model_that_is_not_there_leaves_no_folder(run, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("A text.")
    files = set(tmp_path.iterdir())
    result = run(f"{command} --model nosuch")
    assert result.exit_code == 2 and "got 'nosuch'" in result.stderr, result.output
    assert set(tmp_path.iterdir()) == files


@pytest.mark.parametrize("methods", ["random", "zero_out"])
def test_zero_out_is_spoken_of_where_it_runs(run, asked, methods):
    result = run.inj(f"--limit 1 {INJ} {methods}")
    assert ("Zero-Out ablates" in result.stderr) == (methods == "zero_out")


def test_without_matplotlib_no_figures_are_promised(run, monkeypatch):
    monkeypatch.setattr("tl_localize.cli.publish.has_matplotlib", lambda: False)
    result = run.inj(f"--limit 1 {INJ} random")
    assert "All tables, the frame and the settings" in result.stderr
    assert "Figures need matplotlib, which the extra 'plots' brings" in result.stderr


@pytest.mark.parametrize("few_planted", [3], indirect=True)
def test_demo_forgets_the_text_and_not_the_others(run, few_planted):
    result = run("demo")
    assert result.exit_code == 0, result.output
    none, *_, best = re.findall(r"(\d+) +(\d+) *$", result.stdout, re.M)
    assert none == ("100", "100")
    assert int(best[0]) < 80 and int(best[1]) > 95


def test_lists_name_what_commands_take(run):
    from tl_localize import METHODS

    assert all(name in run("methods").stdout for name in METHODS)
    assert run("--version").stdout.startswith("tl_localize ")


def test_the_package_is_the_command_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tl_localize", "--version"])
    monkeypatch.delitem(sys.modules, "tl_localize.__main__", raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_module("tl_localize", run_name="__main__")
    assert left.value.code == 0 and capsys.readouterr().out.startswith("tl_localize ")


def test_table_for_other_programs(run, tmp_path):
    run.inj(f"--limit 1 {INJ} activations")
    run("table", tmp_path / "out")
    assert ",recall," in (tmp_path / "out" / "frame.csv").read_text()


def test_results_of_rev_are_printed(gpt2_like, sequences, capsys):
    import torch

    from tl_localize import Recipe, RevBenchmark
    from tl_localize.cli.publish import print_results
    from tl_localize.cli.reports import report_rev
    from tl_localize.execution import Steps

    how = {"n_sequences": 2, "ratios": (0.1,), "recipe": Recipe(max_steps=2, stop_loss=9.0)}
    steps = Steps()
    RevBenchmark(gpt2_like, sequences[:2], torch.arange(48).view(3, 16), **how).run((), steps)
    report = report_rev(steps)
    print_results(report, report.tables(""), "rev")
    assert "Random" in capsys.readouterr().out


def test_an_output_that_is_ascii_or_closed_ends_well(run, tmp_path, monkeypatch, capsys):
    from tl_localize.cli import main

    run.inj(f"--limit 2 {INJ} activations")
    out = str(tmp_path / "out")
    ascii = run("table", out, charset="ascii")
    assert " ? " in ascii.stdout and ascii.exit_code == run("table", out).exit_code
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", None)
        for command in ("table", "status"):
            assert main([command, out]) in (0, 1)

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def fileno(self):
            return 1

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Closed())
        patch.setattr("os.dup2", lambda *files: None)  # or the tests have no output left
        assert main(["status", out]) == 1
    assert capsys.readouterr().err == ""


def test_ray_loads_a_folder_whose_path_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    asked = []

    class Runs:
        def run(self, methods, store, *, shard, cluster):
            asked.append(cluster.load.__self__.model)

    for name in ("mine", "reference-gpt2"):
        store = Store(tmp_path / "results")
        compute(RunOptions(ray="local"), ModelOptions(model=name), [(Runs(), [])], store)
    assert asked == [str(tmp_path / "mine"), "reference-gpt2"]


def test_text_for_a_terminal_wraps_between_words(monkeypatch, capsys):
    from tl_localize.cli.messages import say

    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    text = "Zero-Out ablates some of the neurons and estimates the others.\n  tl-localize inj"
    say(text)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 30 and len(lines) == 4
    assert " ".join(lines).split() == text.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--methods hard_concret", "Did you mean hard_concrete"),
        ("--set nonsense", "must read METHOD.SETTING=VALUE"),
        ("--set slimming.steps=0", "steps must be a whole number from 1 on, got 0"),
        ("--ratio 2", "got 2.0"),
        ("--ratio 0.1 --learning-rate 0", "learning_rate must be a number above 0"),
        ("--ratio 0.1 --distractors 3 --limit 1", "Give at least 4"),
        ("--device cuda", "Write 'cpu': there is no CUDA here."),
        ("--model reference-gpt", "Did you mean"),
    ],
)
def test_inj_explains_a_mistake_in_one_line(run, data, model_dir, tmp_path, arguments, message):
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    common = ["--model", model_dir, "--data", data, "--out", tmp_path / "out"]
    result = run("inj", *common, *arguments.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("inj --shard 3/2", "shard must read i/n with i from 1 to n, got '3/2'"),
        ("inj --out {file}/out", "folder must be writable"),
        ("rev --model gpt2 --before earlier", "data must be given with an earlier checkpoint"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(run, data, arguments, message, monkeypatch):
    monkeypatch.setattr(
        "tl_localize.model.loading.load_model", lambda *a: pytest.fail("the model was loaded first")
    )
    result = run(arguments.format(file=data))
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/2/3", "²/3", "-1/2"])
def test_a_wrong_shard_is_refused(text):
    result = invoke(["inj", f"--shard={text}"])
    assert result.exit_code == 2 and "shard must read i/n" in result.stderr


def test_inj_names_a_broken_file(run, data):
    data.write_text(data.read_text() + "{broken\n")
    result = run.inj("")
    assert result.exit_code == 2 and str(data) in result.stderr


def test_inj_takes_texts_of_any_name_and_tokens(run, model_dir, tmp_path):
    texts = tmp_path / "texts.jsonl"
    tokens = tmp_path / "tokens.npy"
    common = f"inj {INJ} random"
    texts.write_text("".join(json.dumps({"body": f"A new thing, {i}."}) + "\n" for i in range(6)))
    np.save(tokens, np.random.default_rng(0).integers(256, size=(6, 12)))
    for out, given in {
        "texts": ["--key", "body", "--data", texts],
        "tokens": ["--data", tokens],
    }.items():
        result = run(f"{common} --model", model_dir, "--out", tmp_path / out, *given)
        # for it did not converge
        assert "1 sentence (the first" in result.stderr and result.exit_code == 1, result.output


def test_inj_of_heads(run, tmp_path):
    command = "inj --limit 1 --max-steps 2 --methods attribution --units heads --device cpu --out"
    result = run(command, tmp_path / "out")
    assert result.exit_code == 1, result.output  # for the injection did not converge
    record = settings_of(tmp_path / "out")
    assert record["settings"]["units"] == {"class": "AttentionHeads"}
    assert set(record["scopes"]) == {"0.17"}
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    assert set(frame["method"]) == {"attribution", "random", "row_norm"}


def test_rev_of_heads_prints_its_table(run, data, model_dir, tmp_path, monkeypatch):
    from tl_localize.injection import RECIPES, Recipe

    monkeypatch.setitem(RECIPES, "adam", Recipe(max_steps=2, stop_loss=9.0))
    command = "rev --sentences 2 --groups 1 --ratio 0.5 --methods activations --units heads --model"
    folder = tmp_path / "out"
    result = run(command, model_dir, "--data", data, "--out", folder)
    assert result.exit_code == 0 and "oracle in rounds" in result.stdout, result.output
    assert "1 group of 2 texts (the first 5 of the data are dev sentences" in result.stderr
    assert set(pd.read_csv(folder / "frame.csv")["ratio"]) == {0.5}
    monkeypatch.setitem(RECIPES, "adam", Recipe(max_steps=2, stop_loss=1e-9))
    result = run(command, model_dir, "--data", data, "--out", tmp_path / "unlearned")
    assert result.exit_code == 1 and "did NOT converge" in result.stderr, result.output
    assert not pd.read_csv(tmp_path / "unlearned" / "frame.csv")["converged"].any()


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"slimming": {"steps": [2, 4]}}))
    return path


def soon(monkeypatch, **options):
    """Injections of tune take one step, of two dev sentences."""
    from tl_localize import InjBenchmark

    one_step = partial(InjBenchmark, max_steps=1, **options)
    monkeypatch.setattr("tl_localize.cli.benchmarks.InjBenchmark", one_step)
    monkeypatch.setattr("tl_localize.texts.reference.N_DEV", 2)


def test_tune_ranks_a_grid_and_inj_reads_its_settings(run, grid, tmp_path, monkeypatch):
    command = f"--ratio 0.1 --method slimming --grid {grid}"
    soon(monkeypatch)
    result = run.tune(command, out="none")
    assert result.exit_code == 1, result.output
    assert "No setting has a score" in result.stderr
    assert not (tmp_path / "none" / "best_settings.json").exists()
    soon(monkeypatch, stop_loss=100.0)
    result = run.tune(command)
    assert result.exit_code == 0, result.output
    assert "steps" in result.stdout
    used = run.inj(f"{INJ} slimming --limit 1 --settings {tmp_path}/tune/best_settings.json")
    assert used.exit_code == 0, used.output
    best = json.loads((tmp_path / "tune" / "best_settings.json").read_text())["settings"]
    assert methods_of(tmp_path / "out")["slimming"]["steps"] == best["slimming"]["steps"]


def test_tune_leaves_out_settings_that_fail_and_what_other_ratios_lack(run, tmp_path, monkeypatch):
    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({"slimming": {"sparsity_weight": [1.0, 1e39]}}))
    soon(monkeypatch, stop_loss=100.0)
    common = f"--method slimming --set slimming.steps=2 --grid {grid}"
    run.tune(f"{common} --ratio 0.2 --shard 1/2")
    result = run.tune(f"{common} --ratio 0.1")
    assert "1 setting FAILED" in result.stderr and "MISSING" not in result.stderr
    best = json.loads((tmp_path / "tune" / "best_settings.json").read_text())["settings"]
    assert best["slimming"]["sparsity_weight"] == 1.0
    assert "this folder's commands, which settings.json lists" in result.stderr
    assert result.exit_code == 1


def test_what_is_set_is_no_axis_of_the_grid(run, grid, asked):
    run.tune(f"--ratio 0.1 --method slimming --set slimming.steps=3 --grid {grid}")
    ((_, methods),) = asked
    assert [method.steps for method in methods] == [3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--method rivals", "method must be one of"),
        ("--method slimming", "grid must name values of steps"),
        ("--method hard_concrete --n-dev 20", "n_dev must be left out"),
        ("--method hard_concrete --set hard_concrete.steps={[]:1}", "steps must be"),
    ],
)
def test_tune_explains_a_mistake(run, tmp_path, arguments, message):
    (tmp_path / "grid.json").write_text(
        json.dumps({"rivals": {}, "slimming": {"steps": []}, "hard_concrete": {"seed": [1]}})
    )
    result = run.tune(f"--ratio 0.1 {arguments} --grid {tmp_path}/grid.json")
    assert result.exit_code == 2 and message in result.stderr, result.stderr


def test_inj_with_distractors_takes_whole_groups(asked, tmp_path):
    command = "inj --distractors 3 --methods activations --model reference-gpt2 --out"
    invoke(command, str(tmp_path / "unused"))
    ((benchmark, _),) = asked
    assert [len(group.sequences) for group in benchmark.groups()] == [4, 4]


def test_inj_says_how_many_sentences_are_in_no_group(asked, tmp_path, capsys):
    """A group's sentences begin with different tokens, so a whole number of groups may not fit."""
    command = "inj --distractors 7 --methods activations --model reference-gpt2 --limit 16 --out"
    said = invoke(command, str(tmp_path / "unused")).stderr
    ((benchmark, _),) = asked
    n_left = 16 - sum(len(group.sequences) for group in benchmark.groups())
    assert n_left and f"{n_left} of them are in no group: a group has 8 sentences" in said


def test_tune_keeps_a_first_layer_that_was_searched_alone():
    from tl_localize.cli.publish import without_layers

    settings = [{"steps": 1, "first_layer": 1}, {"steps": 2, "first_layer": 1}, {"contrast": 1.0}]
    ranking = pd.DataFrame({"method": [*2 * ["slimming"], "attribution"], "settings": settings})
    assert list(without_layers(ranking)["settings"]) == [{"steps": 1}, {"steps": 2}, settings[2]]
    settings[1] = {"steps": 1, "first_layer": 0}
    ranking["settings"] = settings
    assert list(without_layers(ranking)["settings"]) == settings


def test_tune_searches_the_zero_out_that_inj_runs(tmp_path):
    from tl_localize.cli.benchmarks import candidates
    from tl_localize.cli.command_options import TuneOptions
    from tl_localize.evals.settings import SCREEN
    from tl_localize.units import NEURONS, UNITS

    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({"zero_out": {"screen_sample": [16, 32]}}))
    screens = {}
    for benchmark, units in (("inj", NEURONS), ("del", NEURONS), ("inj", UNITS["heads"])):
        options = TuneOptions(method="zero_out", benchmark=benchmark, grid=grid)
        found = candidates(options, 0.1, units)
        screens[benchmark, units.name] = {method.screen for method in found}
    assert screens == {
        ("inj", "neurons"): {SCREEN},
        ("del", "neurons"): {None},
        ("inj", "heads"): {None},
    }


def test_the_name_of_a_folder_is_as_it_is_written(tmp_path, monkeypatch):
    from tl_localize.cli.running import folder_of

    monkeypatch.chdir(tmp_path)
    (tmp_path / "snapshot").mkdir()
    for link in ("inj", "mine"):
        (tmp_path / link).symlink_to(tmp_path / "snapshot")
    assert folder_of(RunOptions(), "inj", "mine").name == "inj-mine"
    assert folder_of(RunOptions(), "inj", "snapshot/.").name == "inj-snapshot"


def test_a_table_of_a_folder_says_which_command_goes_on(run, tmp_path):
    run.inj(f"{INJ} activations --limit 2 --shard 2/2")
    said = invoke("table", str(tmp_path / "out")).stderr
    assert "the other shards of this folder's commands" in said and "same command" not in said


def test_localize_takes_the_settings_of_heads_and_a_first_layer(run):
    from tl_localize.cli.command_options import LocalizeOptions
    from tl_localize.cli.one_text import chosen_method
    from tl_localize.cli.options import UnitOptions
    from tl_localize.evals.settings import HEADS_SHARE

    found = chosen_method(LocalizeOptions(how=UnitOptions(units="heads")))
    assert found.name == "iterative_attribution" and found.share == HEADS_SHARE
    method = "--method iterative_attribution --set iterative_attribution.first_layer=0"
    result = run.localize(f"--force {method} --ratio 0.05")
    assert result.exit_code == 0, result.output


def test_localize_says_where_nothing_is_recited(run, tmp_path):
    out = tmp_path / "scores.safetensors"
    result = run.localize(f"--force --method row_norm --ratio 0.1 --out {out}")
    assert result.exit_code == 0 and "recites no token" in result.stderr
    assert "No page is written" in result.stderr and out.is_file()


@pytest.mark.parametrize("content", ["[3]", '{"slimming": 3}', '{"slimming": {"steps": 3}}'])
def test_tune_names_a_grid_of_another_form(run, tmp_path, content):
    (tmp_path / "grid.json").write_text(content)
    result = run.tune(f"--method slimming --grid {tmp_path / 'grid.json'}")
    assert result.exit_code == 2
    assert "grid must be a JSON file such as" in result.stderr
    result = run.tune("--method slimming --ratio 0")
    assert result.exit_code == 2
    assert "ratio must be a fraction in (0, 1]" in result.stderr


def test_tune_leaves_nothing_in_a_folder_that_refuses_it(run, grid, tmp_path, monkeypatch):
    soon(monkeypatch, stop_loss=100.0)
    assert run.inj(f"{INJ} activations --limit 1").exit_code == 0
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    result = run.tune(f"--ratio 0.1 --method slimming --grid {grid}", out="out")
    assert result.exit_code == 2, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_table_of_a_tune_that_was_killed_ranks_settings(run, grid, tmp_path, monkeypatch):
    def half(options, *arguments):
        compute(replace(options, shard=(1, 2)), *arguments)
        sys.exit(9)

    soon(monkeypatch, stop_loss=100.0)
    monkeypatch.setattr("tl_localize.cli.benchmarks.compute", half)
    assert run.tune(f"--ratio 0.1 --method slimming --grid {grid}").exit_code == 9
    result = run(f"table {tmp_path}/tune")
    assert "The dev sequences of inj, ratio 0.1" in result.stdout
    assert "4 measurements MISSING: the ranking is of what is there" in result.stderr


def test_tune_names_a_method_missing_in_the_grid(run, grid):
    result = run.tune(f"--method slimmin --grid {grid}")
    assert result.exit_code == 2
    assert "Did you mean slimming" in result.stderr


@pytest.fixture
def asked(monkeypatch):
    """The runs that a command would compute."""
    runs = []
    monkeypatch.setattr(
        "tl_localize.cli.benchmarks.compute", lambda _run, _model, found, _store: runs.extend(found)
    )
    return runs


def test_a_directory_with_the_name_of_a_paper_s_model_has_the_paper_s_settings(
    run, model_dir, data, tmp_path, asked
):
    named = shutil.copytree(model_dir, tmp_path / "gpt2")
    common = f"--model {named} --data {data} --ratio 0.1 --out {tmp_path}"
    command = f"inj {common}/inj --limit 1 --methods slimming --set slimming.stop_sparsity=0.3"
    assert "Settings of learned masks: the paper's for gpt2." in run(command).stderr
    ((_, (method,)),) = asked
    assert (method.sparsity_weight, method.steps, method.stop_sparsity) == (15000, 4000, 0.3)
    asked.clear()
    result = run(f"tune {common}/tune --method slimming")
    assert "the paper's for gpt2." in result.stderr
    ((_, methods),) = asked
    assert len(set(methods)) == 12
    assert {(method.steps, method.stop_sparsity) for method in methods} == {(4000, 0.2)}
    assert (
        "Default settings: the paper gives none for tiny."
        in run.inj(f"--limit 1 {INJ} random").stderr
    )


def test_known_says_what_to_do_where_nothing_is_known(run, monkeypatch, tmp_path):
    from tl_localize import MemorizedSequence

    def not_recited(model):
        yield "prose", MemorizedSequence.from_text(model, "Two roads", " diverged in a wood")

    monkeypatch.setattr("tl_localize.texts.known._tokenized", not_recited)
    (tmp_path / "known.jsonl").write_text("of another model")
    result = run(f"known --out {tmp_path}/known.jsonl")
    assert result.exit_code == 0 and "is not written, because no text is known" in result.stderr
    assert [path.name for path in tmp_path.glob("known.*")] == ["known.html"]
    assert result.stderr.splitlines()[-1].startswith(
        "Next: tl-localize collect --model reference-gpt2 --data CORPUS finds texts"
    )


def test_known_does_not_write_over_its_data(run, tmp_path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"text": "mine"}\n')
    result = run(f"known --data {mine} --out {tmp_path}/../{tmp_path.name}/mine.jsonl")
    assert result.exit_code == 2 and "out must be another file than the data" in result.stderr
    assert mine.read_text() == '{"text": "mine"}\n'


def test_an_interruption_before_anything_is_computed_is_one(run, monkeypatch):
    from tl_localize.evals import InjBenchmark

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(InjBenchmark, "settings", interrupted)
    result = run.inj(f"{INJ} random")
    assert result.exit_code == 130 and "Interrupted." in result.stderr
    assert "folder must hold" not in result.stderr


def test_localize_says_where_it_names_more_than_the_method_looked_for(gpt2_like, capsys):
    from tl_localize import Attribution, GradientAlignment, IterativeAttribution, NeuronScores
    from tl_localize.cli.one_text import say_beyond
    from tl_localize.model.neurons import NeuronView

    view = NeuronView(gpt2_like)
    scores = NeuronScores(torch.rand(view.size))
    method = IterativeAttribution(share=0.1)
    for other in (Attribution(), GradientAlignment(share=0.1)):
        say_beyond(other, view, scores.top_k(0.5))
    say_beyond(method, view, scores.top_k(0.1))
    assert not capsys.readouterr().err
    say_beyond(method, view, scores.top_k(0.3))
    said = " ".join(capsys.readouterr().err.split())
    assert "looks for 10 % of each layer" in said
    assert "--set iterative_attribution.share=0.3" in said


def test_options_of_rev_are_those_of_its_benchmark(run, data, model_dir, tmp_path, asked):
    options = "--sentences 1 --groups 2 --ratio 0.5 --ratio 0.2 --seed 7 --methods random"
    run(f"rev {options} --model", model_dir, "--data", data, "--out", tmp_path / "rev")
    ((benchmark, methods),) = asked
    assert (benchmark.seed, benchmark.ratios) == (7, (0.2, 0.5))
    assert [len(group.sequences) for group in benchmark.groups()] == [1, 1]
    assert [method.name for method in methods] == ["random"]


def test_tune_takes_distractors_and_the_largest_of_the_usual_ratios(
    run, grid, tmp_path, asked, monkeypatch
):
    monkeypatch.setattr("tl_localize.evals.settings.inj_ratios", lambda *given: [0.1, 0.3, 0.2])
    result = run.tune(f"--distractors 1 --method slimming --grid {grid}")
    assert len(asked) == 1, result.output
    benchmark, _ = asked[0]
    assert (benchmark.distractors, benchmark.ratio) == (1, 0.3)
    assert json.loads((tmp_path / "tune" / "tune.json").read_text()) == {"ratio": 0.3}


def test_localize_spares_layer_0_of_a_ratio_too(run):
    result = run.localize("--force --method activations --ratio 0.1")
    assert result.exit_code == 0, result.output
    assert "Activations names 4 neurons from layer 1 on: 4 neurons of" in result.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_is_loaded_in_the_precision_and_on_the_device_that_are_asked_for(model_dir, dtype):
    from tl_localize.cli.options import ModelOptions

    model = ModelOptions(model=str(model_dir), device="cpu", dtype=dtype).load()
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}


def test_localize_says_what_is_left_of_the_text_without_a_layer(gpt2_like, make_sequences):
    from tl_localize import accuracy
    from tl_localize.cli.one_text import by_layer
    from tl_localize.methods import Activations

    (sequence,) = make_sequences((12, 3))
    for position in range(3, 12):
        sequence.tokens[position] = gpt2_like(sequence.tokens[None, :position])[0, -1].argmax()
    chosen = Activations()(gpt2_like, sequence).top_k(0.3, first_layer=1)
    left = by_layer(gpt2_like, sequence, chosen)["text recited (%)"]
    with chosen.dropped_out(gpt2_like):
        recited = round(100 * float(accuracy(gpt2_like, sequence)))
    assert left.to_dict() == {1: recited} and 50 != recited < 100
