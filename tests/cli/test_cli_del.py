"""tl-localize collect, del and tune --benchmark del, on a tiny model that recites itself."""

import json
import os
import re
import signal
import time
from multiprocessing import get_context
from pathlib import Path
from shutil import copytree

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

LOOSE = [
    "--n-prefix",
    "4",
    "--n-suffix",
    "12",
    "--min-distinct",
    "1",
    "--max-jaccard",
    "1",
    "--any-tokens",
    "--n-dev",
    "2",
]
N_ROWS, LENGTH = 9, 30


@pytest.fixture(scope="module")
def recited(model_dir):
    """Rows of tokens that the tiny model recites from their third token on: [row pos]."""
    import torch

    from tl_localize import load_model

    model = load_model(model_dir, device="cpu")
    rows = torch.randint(256, (N_ROWS, 3), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        while rows.shape[1] < LENGTH:
            rows = torch.cat([rows, model(rows)[:, -1].argmax(-1, keepdim=True)], 1)
    return rows.numpy()


@pytest.fixture
def corpus(recited, tmp_path):
    """The recited rows among rows of noise."""
    return write_corpus(recited, tmp_path)


def write_corpus(recited, folder):
    noise = np.random.default_rng(0).integers(256, size=(4, LENGTH))
    np.save(folder / "corpus.npy", np.concatenate([recited, noise]).astype(np.uint16))
    return folder / "corpus.npy"


@pytest.fixture
def undrawn(monkeypatch):
    """Figures cost a second each; one test here looks at them."""
    monkeypatch.setattr("tl_localize.cli.publish.del_figures", lambda *a, **k: {})


@pytest.fixture
def unloaded(monkeypatch):
    monkeypatch.setattr(
        "tl_localize.cli.running.load_model", lambda *a: pytest.fail("the model was loaded first")
    )


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)


def tell(command, *arguments):
    """A command, whose first words stand in one text."""
    from tl_localize.cli import app

    return CliRunner().invoke(app, [*command.split(), *map(str, arguments)])


@pytest.fixture
def run(model_dir, tmp_path):
    def call(command, *arguments, out="out"):
        return tell(command, *arguments, "--model", model_dir, "--out", tmp_path / out)

    return call


@pytest.fixture(scope="module")
def first_collection(model_dir, recited, tmp_path_factory):
    import torch

    from tl_localize.files import save_tensors

    folder = tmp_path_factory.mktemp("collection")
    data = ["--data", write_corpus(recited, folder), "--out", folder / "out"]
    assert tell("collect", *data, "--model", model_dir, *LOOSE).exit_code == 0
    general = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))
    save_tensors(folder / "out" / "general.safetensors", {"tokens": general.int()}, {})
    return folder / "out"


@pytest.fixture
def collection(first_collection, tmp_path):
    """A copy of what collect wrote, with general text of 20 tokens a row."""
    return Path(copytree(first_collection, tmp_path / "collection"))


def one_error(result, message):
    assert result.exit_code == 2, result.output
    # typer draws a box around its own words
    assert message in " ".join(result.stderr.replace("│", " ").split()), result.stderr
    assert "Traceback" not in result.output


def good(result):
    assert result.exit_code == 0, result.output
    return result


def rows_of(folder):
    return [json.loads(line) for line in (folder / "sequences.jsonl").read_text().splitlines()]


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())


# collect


def test_collect_finds_the_recited_rows_and_says_what_went(run, corpus, tmp_path):
    from tl_localize.collect import Collection

    result = good(run("collect --data", corpus, *LOOSE))
    collection = Collection.load(tmp_path / "out")
    sequences = collection.sequences
    assert collection.n_dev == 2
    assert {sequence.id for sequence in sequences} <= {f"row-{i}" for i in range(N_ROWS)}
    record = settings_of(tmp_path / "out")
    assert record["report"]["n_in"] == N_ROWS + 4
    assert record["report"]["removed"]["accuracy"] == 4
    assert record["criteria"]["n_suffix"] == 12
    assert {"fingerprint", "torch"} <= set(record["environment"])
    assert "accuracy" in result.stdout
    assert "No text for the perplexity" in result.stderr  # rows of 30 tokens
    n_test = len(sequences) - 2
    assert f"DEL would have {n_test} targets and {n_test - 1} others" in result.stderr


def test_options_of_collect_have_the_defaults_of_the_criteria():
    import inspect

    from tl_localize.cli.commands import collect
    from tl_localize.collect import Criteria

    defaults = {name: one.default for name, one in inspect.signature(collect).parameters.items()}
    assert vars(Criteria()).items() <= defaults.items()


def test_collect_writes_general_text_that_shares_no_run_with_the_collected(run, recited, tmp_path):
    from tl_localize.readers import read_tokens

    general = np.random.default_rng(1).integers(256, size=(5, 140))
    rows = np.concatenate([np.pad(recited, ((0, 0), (0, 110))), general])
    np.save(tmp_path / "long.npy", rows)
    good(run("collect --n-general 3 --data", tmp_path / "long.npy", *LOOSE))
    found = read_tokens(tmp_path / "out" / "general.safetensors")
    assert found.shape == (3, 128)
    assert all(row.tolist() in general[:, :128].tolist() for row in found)


def test_collect_reads_text_and_counts_empty_and_short_lines(run, model_dir, tmp_path):
    from tl_localize import load_model

    tokenizer = load_model(model_dir, device="cpu").tokenizer
    letters = np.random.default_rng(0).integers(97, 123, size=(3, 20)).astype(np.uint8)
    lines = ["", *(bytes(row).decode() for row in letters), "short", ""]
    (tmp_path / "corpus.txt").write_text("\n".join(lines) + "\n")
    loosest = ["--min-accuracy", "0", "--max-distance", "1000", "--n-dev", "1"]
    good(run("collect --data", tmp_path / "corpus.txt", *LOOSE, *loosest))
    assert settings_of(tmp_path / "out")["report"]["removed"]["too short"] == 3
    rows = rows_of(tmp_path / "out")
    assert {row["all"] for row in rows} == {line[:16] for line in lines[1:4]}
    assert all(tokenizer.decode(row["tokens"]) == row["all"] for row in rows)


def test_collect_names_the_file_of_a_row_where_there_are_several(run, corpus, recited, tmp_path):
    np.save(tmp_path / "more.npy", recited[:1, ::-1].copy())
    good(run("collect --data", corpus, "--data", tmp_path / "more.npy", *LOOSE))
    names = {row["id"].split("-")[0] for row in rows_of(tmp_path / "out")}
    assert names == {"corpus/row", "more/row"}


def test_collect_refuses_files_of_one_name(run, corpus, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / corpus.name).write_bytes(corpus.read_bytes())
    result = run("collect --data", corpus, "--data", tmp_path / "other" / corpus.name, *LOOSE)
    one_error(result, "data must be files of different names")


def test_collect_looks_at_every_window(run, corpus, tmp_path):
    good(run("collect --windows 7 --data", corpus, *LOOSE))
    assert settings_of(tmp_path / "out")["report"]["n_in"] == 3 * (N_ROWS + 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "data must be given for"),
        ("--data nowhere.npy", "nowhere.npy"),
        ("--windows all", "windows must be first"),
        ("--min-accuracy 90", "min_accuracy must be in [0, 1], got 90"),
        ("--n-general 0", "Input should be greater than or equal to 1"),
        ("--seed -1", "seed must be a whole number from 0 to 2**32 - 1, got -1"),
        ("--shard 4/3", "shard must read i/n"),
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_collect_finds_mistakes_before_the_model_is_loaded(run, arguments, message):
    one_error(run(f"collect {arguments}"), message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "a"}\n', "['body']"),
        ("a.txt", b"", "data must hold at least one row, got none"),
        ("b.txt", b"good\n\xff\xfe\n", "path must be a whole text file in UTF-8"),
        ("a.npy", b"no array", "path must be a whole .npy file of one tensor"),
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_collect_explains_a_bad_file_before_the_model_is_loaded(
    run, tmp_path, name, content, message
):
    (tmp_path / name).write_bytes(content)
    one_error(run("collect --data", tmp_path / name), message)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (
            lambda rows: rows[:, :10],
            LOOSE,
            "failed by 'too short'. Give longer texts, or lower n_prefix or n_suffix.",
        ),
        (lambda rows: rows, [*LOOSE, "--n-dev", 50], "n_dev must leave at least one of the"),
        (
            lambda rows: rows,
            ["--any-tokens", "--n-prefix", 90],
            "n_prefix + n_suffix must be at most n_ctx=96, got 138",
        ),
        (
            lambda rows: (rows * 7 + 3) % 256,
            [*LOOSE, "--min-accuracy", 1],
            "DEL has nothing to ablate here. The last ones failed by 'accuracy'.",
        ),
        (lambda rows: rows + 250, LOOSE, "tokens must be in [0, 256), got "),
    ],
)
def test_collect_names_what_was_wrong_and_writes_nothing(
    run, recited, tmp_path, change, arguments, message
):
    np.save(tmp_path / "bad.npy", change(recited.astype(np.int32)))
    one_error(run("collect --data", tmp_path / "bad.npy", *arguments), message)
    assert not (tmp_path / "out" / "sequences.jsonl").exists()


@pytest.fixture
def on_filter(monkeypatch):
    """Do something, with the number of the call, before each chunk is searched."""
    from tl_localize.collect.filter import Filter

    right, calls = Filter.filter, []

    def install(action):
        def watched(self, *stream):
            calls.append(stream)
            action(len(calls))
            return right(self, *stream)

        monkeypatch.setattr(Filter, "filter", watched)
        return calls

    return install


@pytest.mark.usefixtures("small_chunks")
def test_collect_records_a_failed_chunk_goes_on_and_tries_again_when_asked(
    run, corpus, tmp_path, on_filter
):
    def fail(call):
        if call == 2:
            raise ValueError("tokens must be in [0, 256), got 300")

    good(run("collect --data", corpus, *LOOSE, out="whole"))
    calls = on_filter(fail)
    for _ in range(2):  # the second finds all others done, and does not try again
        result = run("collect --data", corpus, *LOOSE)
        assert result.exit_code == 1, result.output
        assert "ValueError: tokens must be in [0, 256), got 300" in result.stderr
        assert "1 of 5 chunks are missing, 1 failed" in result.stderr
        assert "--retry-failed searches them again" in result.stderr
        assert "Traceback (most recent" not in result.output
        assert len(calls) == 5
        assert not (tmp_path / "out" / "sequences.jsonl").exists()
    (failure,) = (tmp_path / "out" / "failures").iterdir()
    assert "Traceback" in failure.read_text()
    good(run("collect --retry-failed --data", corpus, *LOOSE))
    assert len(calls) == 6
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")
    assert list((tmp_path / "out" / "failures").iterdir()) == []


@pytest.mark.usefixtures("small_chunks")
def test_table_and_trace_of_a_collection(run, corpus, tmp_path):
    out = tmp_path / "out"
    run("collect --shard 2/2 --data", corpus, *LOOSE)
    assert "The last step is still to be made" in good(tell("table", out)).stderr
    assert not (out / "report.csv").exists()
    assert good(tell("trace", out)).stdout.count("MISSING") == 3
    whole = run("collect --data", corpus, *LOOSE).stdout
    table = good(tell("table", out, "--out", tmp_path / "tables")).stdout
    assert table.splitlines()[:12] == whole.splitlines()[:12]
    assert (tmp_path / "tables" / "report.csv").read_bytes() == (out / "report.csv").read_bytes()

    lines = good(tell("trace", out)).stdout.splitlines()
    assert sum(line.startswith("collect, from ") for line in lines) == 5
    assert sum("'came in': 3" in line for line in lines) == 4
    for row in rows_of(out):
        assert any(f"'id': '{row['id']}'" in line for line in lines)
    assert good(tell("trace --name 6", out)).stdout.count("records/collect") == 1

    copytree(out, tmp_path / "damaged")
    record = next((tmp_path / "damaged" / "records" / "collect").iterdir())
    record.write_bytes(record.read_bytes()[:-1])
    damaged = tell("table", tmp_path / "damaged")
    assert "The last step is still to be made" in damaged.stderr and damaged.exit_code == 1
    (out / "settings.json").write_text("{")
    one_error(tell("table", out), "collection must be what tl-localize collect wrote, got ")


def collected(folder):
    names = ("sequences.jsonl", "report.csv", "settings.json")
    return [(folder / name).read_bytes() for name in names]


@pytest.mark.parametrize("windows", ["first", "7"])
@pytest.mark.usefixtures("small_chunks")
def test_collect_goes_on_where_it_was(run, corpus, tmp_path, windows, on_filter):
    twin = tmp_path / "twin.npy"
    twin.write_bytes(corpus.read_bytes())
    arguments = ["--data", twin, *LOOSE, "--windows", windows]
    both = ["--data", corpus, *arguments]

    def kill(call):
        if call == 3:
            raise KeyboardInterrupt

    good(run("collect", *both, out="whole"))
    calls = on_filter(kill)
    result = run("collect", *both)
    assert result.exit_code == 130, result.output
    assert "go on with the same command" in result.stderr
    records = tmp_path / "out" / "records" / "collect"
    assert len(list(records.iterdir())) == 2
    good(run("collect", *both))
    assert len(calls) == 1 + len(list(records.iterdir()))
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")
    done = len(calls)
    good(run("collect --seed 1 --n-max 4", *both))  # another draw costs nothing
    assert len(calls) == done
    one_error(run("collect", *both, "--min-accuracy", 0.5), "min_accuracy: 0.9 in the folder")
    one_error(run("collect", *arguments), "data: ['corpus.npy', 'twin.npy'] in the folder")


@pytest.mark.usefixtures("small_chunks")
def test_collect_in_shards_is_collect_in_one(run, corpus, tmp_path):
    good(run("collect --data", corpus, *LOOSE, out="whole"))
    for shard, missing in (("3/3", 4), ("1/3", 2)):
        result = good(run(f"collect --shard {shard} --data", corpus, *LOOSE))
        assert f"{missing} of 5 chunks are missing" in result.stderr
        assert "the same command without --shard goes on" in result.stderr
        assert not (tmp_path / "out" / "sequences.jsonl").exists()
    good(run("collect --shard 2/3 --data", corpus, *LOOSE))
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("small_chunks")
def test_collect_by_two_processes_at_a_time_is_collect_by_one(run, corpus, tmp_path):
    good(run("collect --data", corpus, *LOOSE, out="whole"))

    def shard(i):
        good(run(f"collect --shard {i}/2 --data", corpus, *LOOSE))

    shards = [get_context("fork").Process(target=shard, args=(i,)) for i in (1, 2)]
    for process in shards:
        process.start()
    for process in shards:
        process.join()
    assert [process.exitcode for process in shards] == [0, 0]
    good(run("collect --data", corpus, *LOOSE))
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")


@pytest.mark.parametrize(("signals", "kept"), [(1, 2), (2, 1)])
@pytest.mark.usefixtures("small_chunks")
def test_collect_ctrl_c_finishes_the_chunk_in_hand_and_twice_stops_at_once(
    run, corpus, tmp_path, signals, kept, on_filter
):
    def interrupt(call):
        if call == 2:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)

    good(run("collect --data", corpus, *LOOSE, out="whole"))
    calls = on_filter(interrupt)
    result = run("collect --data", corpus, *LOOSE)
    assert result.exit_code == 130, result.output
    assert "Finishing the task in hand" in result.stderr
    assert "go on with the same command" in result.stderr
    assert "missing" not in result.stderr
    assert len(list((tmp_path / "out" / "records" / "collect").iterdir())) == kept
    good(run("collect --data", corpus, *LOOSE))
    assert len(calls) == 2 + 5 - kept
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")


@pytest.mark.parametrize(("given", "lines"), [("", 0), ("-v", 5), ("--quiet", 0)])
@pytest.mark.usefixtures("small_chunks")
def test_collect_says_nothing_in_a_pipe_unless_asked(run, corpus, given, lines):
    result = run(f"collect {given} --data", corpus, *LOOSE)
    assert result.stderr.count("collect on ") == lines, result.stderr
    assert "%" not in result.stderr


@pytest.mark.usefixtures("small_chunks")
def test_collect_says_how_far_it_is_in_a_log_also_within_a_long_chunk(
    run, corpus, monkeypatch, on_filter
):
    monkeypatch.setattr("tl_localize.cli.running.is_log", lambda: True)
    monkeypatch.setattr("tl_localize.cli.running.EVERY", 0.1)  # seconds between two lines
    on_filter(lambda call: time.sleep(0.3))
    log = run("collect --data", corpus, *LOOSE).stderr
    assert re.search(r"^0 %, \? left, now collect on 0$", log, re.M), log
    assert re.search(r"^80 %, 00:0\d left, now collect on 12$", log, re.M), log
    assert log.count("now collect on 6") > 1
    assert "left" not in run("collect --quiet --data", corpus, *LOOSE, out="quiet").stderr


def test_a_terminal_shows_what_is_in_hand_while_it_takes_long(capsys, monkeypatch):
    import sys

    from tl_localize.cli.running import Progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress() as progress:
        progress.show(0, 1, 0.25, "zero_out on s1")
        time.sleep(2.5)
    shown = capsys.readouterr().err.split("\r")
    # the clock moves
    assert len({line for line in shown if "zero_out on s1" in line and "25%" in line}) > 1, shown


def counts(status):
    """Planned, done, failed and missing by label, of what tl-localize status prints."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in status.stdout.splitlines()]
    return {row[0]: row[1:5] for row in rows if len(row) > 5}


@pytest.mark.usefixtures("small_chunks")
def test_status_of_a_collection_says_what_was_found_so_far(run, corpus, tmp_path):
    out = tmp_path / "out"
    run("collect --shard 2/2 --data", corpus, *LOOSE)
    result = good(tell("status", out))
    assert counts(result)["collect"] == ["5", "2", "0", "3"]
    assert "(" not in result.stdout.split("Time left")[0]  # no row but that of the chunks
    assert "6 came in" in result.stdout
    assert "The last step is still to be made." in result.stdout
    run("collect --data", corpus, *LOOSE)
    whole = tell("status", out).stdout
    assert f"{N_ROWS + 4} came in, 4 removed: accuracy" in whole
    assert "The collection is made." in whole
    rows = np.load(corpus)
    # data that have grown: the last chunk is another one
    np.save(corpus, np.concatenate([rows, rows[:1]]))
    run("collect --shard 1/9 --data", corpus, *LOOSE)
    assert counts(tell("status", out))["collect"] == ["5", "4", "0", "1"]


# del


@pytest.mark.usefixtures("undrawn")
def test_del_writes_tables_frame_and_settings(run, collection, tmp_path):
    methods = "--methods activations,integrated_gradients"
    result = good(run(f"del --ratio 0.1 --ratio 0.05 {methods} --data", collection))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    tables = {"del.md", "del.tex", "del_tests.md", "del_memorization.md", "del_examples.md"}
    assert tables | {"frame.csv", "before.csv", "settings.json"} <= names
    assert not any("single_layer" in name for name in names)
    assert "Random" in result.stdout
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    assert frame["sequence_id"].nunique() == len(rows_of(collection)) - 2  # but the dev ones
    assert set(frame["ratio"]) == {0.05, 0.1}


def test_del_of_some_targets_ablates_one_layer(run, collection, tmp_path):
    methods = "--methods activations --single-layer activations"
    good(run(f"del --ratio 0.05 --targets 2 {methods} --data", collection))
    out = tmp_path / "out"
    assert pd.read_csv(out / "frame.csv")["sequence_id"].nunique() == 2
    assert set(pd.read_csv(out / "single_layer_activations.csv")["multiple"]) == {1, 5}
    names = {"del_single_layer_activations.svg", "del_single_layer.md", "del_forgetting.png"}
    assert names <= {path.name for path in out.iterdir()}


@pytest.mark.usefixtures("undrawn")
def test_del_reads_the_authors_formats(run, collection, recited, tmp_path):
    import torch

    torch.save(torch.tensor(recited).long(), tmp_path / "pile.pt")
    command = "del --ratio 0.1 --methods activations --n-dev 3 --general"
    general = collection / "general.safetensors"
    pile = ["--n-prefix", "4", "--any-tokens", "--data"]
    good(run(command, general, *pile, tmp_path / "pile.pt"))
    assert pd.read_csv(tmp_path / "out" / "frame.csv")["sequence_id"].nunique() == N_ROWS - 3
    rows = [
        {"prompt": f"{i}abc", "all": f"{i}abcdefgh", "prompt_len": 4, "category": ["letters"]}
        for i in range(6)
    ]
    manual = tmp_path / "manual.jsonl"
    manual.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    good(run(command, general, "--ablation", "mean", "--data", manual, out="manual"))
    assert (tmp_path / "manual" / "del_categories.md").is_file()
    assert "mean" in (tmp_path / "manual" / "del.md").read_text()
    manual.write_text('{"prompt": "abc", "all": "xbcdef"}\n')
    one_error(run(command, general, "--data", manual, out="bad"), "all must begin with prompt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ratio 0.001", "ratio must select at least one of 40 neurons, got 0.001"),
        ("--ratio 5", "ratio must be a fraction in (0, 1], got 5.0"),
        ("--ratio 0.1 --ratio 0.1", "ratios must be different"),
        ("--ratio 0.1 --targets 100", "n_targets must be in [1, "),
        ("--ratio 0.1 --targets 0", "n_targets must be a whole number from 1 on, got 0"),
        ("--ratio 0.1 --ablation one", "ablation must be one of"),
        ("--methods random --single-layer slimming --ratio 0.1", "single layer"),
        ("--seed -1 --ratio 0.1", "seed must be a whole number"),
    ],
)
def test_del_explains_a_mistake_in_one_line(run, collection, arguments, message):
    one_error(run(f"del {arguments} --data", collection), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--methods actvations", "Did you mean activations"),
        ("--targets none", "targets must be a number"),
        ("--data a --n-prefix 0", "n_prefix must be a whole number from 1 on, got 0"),
        ("--limit 0", "Input should be greater than or equal to 1"),
        ("--shard 0/2", "shard must read i/n"),
        ("--dtype float8", "dtype must be one of"),
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_del_finds_mistakes_before_the_model_is_loaded(arguments, message, tmp_path):
    one_error(tell(f"del {arguments} --out", tmp_path), message)


@pytest.fixture
def default_data(recited, model_dir, monkeypatch):
    """The tiny model in place of the reference model, its recited rows in place of the training
    texts, five chunks of it.
    """
    import torch

    from tl_localize import load_model
    from tl_localize.collect import Criteria
    from tl_localize.collect.search import Search, chunks_of
    from tl_localize.readers import Data

    def search(model):
        criteria = Criteria(n_prefix=4, n_suffix=12, min_distinct=1, max_jaccard=1)
        corpus = Data(source=torch.from_numpy(recited), name="training texts")
        return Search(model, chunks_of([corpus], length=criteria.length), criteria)

    general = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 2)
    monkeypatch.setattr("tl_localize.cli.collecting.reference_search", search)
    monkeypatch.setattr("tl_localize.cli.collecting.lacking_texts", lambda: "")
    monkeypatch.setattr("tl_localize.cli.benchmarks.held_out_tokens", lambda: general)
    monkeypatch.setattr(
        "tl_localize.cli.running.load_model", lambda *a: load_model(model_dir, device="cpu")
    )


@pytest.mark.usefixtures("undrawn", "default_data")
def test_del_collects_in_the_machinery_of_runs(tmp_path, on_filter):
    def interrupt(call):
        if call == 2:
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "out"
    command = f"del --model reference --n-dev 2 --methods activations --ratio 0.1 --out {out}"
    calls = on_filter(interrupt)
    # before anything is collected
    one_error(tell(f"{command}ther --ratio 0.001"), "which selects none")
    one_error(tell(f"{command}ther --ablation meen"), "ablation must be one of")
    assert calls == []
    stopped = tell(command)
    assert stopped.exit_code == 130, stopped.output
    assert "Finishing the task in hand" in stopped.stderr
    assert "go on with the same command" in stopped.stderr
    assert len(calls) == 2
    told = tell("status", out)
    assert counts(told)["collect"] == ["5", "2", "0", "3"]
    assert "The sequences are collected first" in told.stdout
    assert "base" not in told.stdout
    shard = tell(f"{command} --shard 1/2 -v")
    assert shard.exit_code == 1  # DEL is not done: an array job must not count as done
    assert shard.stderr.count("collect on ") == 2  # of chunks 0, 2 and 4 the first was there
    assert "1 of 5 chunks are missing" in shard.stderr
    good(tell(command))
    assert len(calls) == 5
    assert (out / "frame.csv").is_file()


@pytest.fixture
def tuning(tmp_path):
    """A command that tunes two settings of Slimming."""
    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({"slimming": {"steps": [10, 20]}}))
    return f"tune --benchmark del --method slimming --ratio 0.1 --grid {grid}"


@pytest.mark.usefixtures("undrawn", "default_data")
def test_tune_del_collects_in_the_machinery_of_runs(tuning, tmp_path):
    command = f"{tuning} --model reference --n-dev 2 -v --out"
    assert good(tell(command, tmp_path / "out")).stderr.count("collect on ") == 5
    assert (tmp_path / "out" / "settings.json").is_file()
    assert "collect on " not in tell(command, tmp_path / "out").stderr


def test_status_of_a_folder_without_a_plan_says_so(tmp_path):
    from tl_localize.execution import Store

    Store(tmp_path / "out")
    one_error(tell("status", tmp_path / "out"), "folder must hold the plan of a run, got none in")


def test_del_explains_missing_data(run, collection, tmp_path):
    general = collection / "general.safetensors"
    one_error(run("del"), "Run tl-localize collect, or name a file with --data")
    one_error(run("del --general", general, "--suffixes", general), "data must be given with")
    one_error(run("del --data", tmp_path / "nowhere"), "nowhere")
    np.save(tmp_path / "rows.npy", np.zeros((9, LENGTH), dtype=int))
    rows = ["--general", general, "--data", tmp_path / "rows.npy"]
    command = "del --n-prefix 4 --any-tokens --ratio 0.1 --n-dev 9"
    one_error(run(command, *rows), "n_dev must leave at least one of the 9 sequences for the test")
    general.unlink()
    one_error(run("del --data", collection), "general must be given where the data have no general")


def numbers(folder):
    """Every table, and what is behind it."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in (".csv", ".md", ".tex") or path.stem == "confusion"
    }


@pytest.mark.usefixtures("undrawn")
def test_del_in_pieces_is_del_in_one_and_the_folder_tells_of_it(
    run, collection, tmp_path, monkeypatch
):
    from tl_localize import Activations

    out = tmp_path / "out"
    methods = "--methods activations --single-layer activations"
    command = f"del --targets 3 --ratio 0.05 {methods} --data {collection}"
    good(run(f"{command} --ratio 0.1", out="whole"))
    first = good(run(f"{command} --shard 2/3"))
    assert "measurements MISSING" in first.stdout
    found = [row for name, row in counts(tell("status", out)).items() if "activations" in name]
    assert found == [["3", "1", "0", "2"]] * 2
    good(run(command))
    with monkeypatch.context() as patch:
        patch.setattr(
            Activations, "attribute_batch", lambda *a: pytest.fail("scores computed again")
        )
        # of the new ratio alone
        assert run(f"{command} --ratio 0.1 -v").stderr.count(" on row-") == 3 * 3
    assert numbers(out) == numbers(tmp_path / "whole")
    good(tell("table", out, "--out", tmp_path / "tables"))
    assert numbers(tmp_path / "tables") == numbers(tmp_path / "whole")
    trace = good(tell("trace --method activations --ratio 0.1", out)).stdout
    assert "self_accuracy" in trace
    files = [line.strip() for line in trace.splitlines() if "/records/del/" in line]
    assert len(files) == 3 and all(Path(file).is_file() for file in files)
    Path(files[0]).write_bytes(b"damaged")
    assert tell("table", out, "--out", tmp_path / "tables").exit_code == 1


@pytest.mark.usefixtures("undrawn")
def test_a_narrow_terminal_shows_self_and_neg_alone(run, collection, tmp_path):
    from tl_localize.cli import app

    good(run("del --ratio 0.1 --methods activations --targets 2 --data", collection))
    narrow = {"FORCE_COLOR": "1", "COLUMNS": "80"}
    shown = good(CliRunner().invoke(app, ["table", str(tmp_path / "out")], env=narrow)).stdout
    assert "Self-Acc" in shown and "Neg-Acc" in shown and "PPL" not in shown
    assert "Activations" in shown and "…" not in shown


@pytest.mark.usefixtures("undrawn")
def test_del_refuses_what_contradicts_and_takes_more_targets(run, collection, tmp_path):
    command = f"del --methods random --ratio 0.1 --data {collection}"
    good(run(f"{command} --targets 2"))
    one_error(run(f"{command} --ablation mean"), "ablation: ")
    one_error(run(f"{command} --seed 1"), "seed: 0 in the folder, 1 now")
    other = f"{command} --methods activations --set random.seed=3"
    one_error(run(other), "of one of activations")
    grown = run(f"{command} --targets 4 -v")
    assert grown.exit_code == 0, grown.exception
    assert grown.stderr.count("random on ") == 2 * 2  # scores and effects
    np.save(tmp_path / "general.npy", np.zeros((3, 20), dtype=np.int64))
    one_error(run(f"{command} --general", tmp_path / "general.npy"), "general_text: [3, 20]")


@pytest.mark.usefixtures("undrawn")
def test_del_records_a_failure_and_tries_again_when_asked(run, collection, tmp_path, monkeypatch):
    from tl_localize import Activations

    right, calls = Activations.attribute_batch, []

    def wrong(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise ValueError("loss must be finite, got nan")
        return right(self, *arguments)

    monkeypatch.setattr(Activations, "attribute_batch", wrong)
    command = f"del --methods activations --ratio 0.1 --targets 3 --data {collection}"
    result = run(command)
    assert result.exit_code == 1, result.output
    assert "FAILED records/scores/" in result.stderr
    assert "1 measurements MISSING" in result.stdout
    missing = tmp_path / "out" / "missing.csv"
    assert pd.read_csv(missing)["reason"].tolist() == ["ValueError: loss must be finite, got nan"]
    assert run(command).exit_code == 1
    assert len(calls) == 3
    good(run(f"{command} --retry-failed"))
    assert len(calls) == 4
    assert not missing.exists()


# tune


@pytest.mark.usefixtures("undrawn")
def test_tune_del_ranks_a_grid_on_the_dev_sequences_and_del_reads_it(
    run, collection, tuning, tmp_path
):
    result = good(run(f"{tuning} --data", collection, out="tuned"))
    assert "self_loss" in result.stdout
    dev = {row["id"] for row in rows_of(collection) if row["split"] == "dev"}
    assert set(pd.read_csv(tmp_path / "tuned" / "frame.csv")["sequence_id"]) == dev
    record = settings_of(tmp_path / "tuned")
    assert "the target minus that on the others at 10 %, 2 dev sequences" in record["rule"]
    best = record["settings"]["slimming"]
    assert best["first_layer"] == 1
    used = ["--settings", tmp_path / "tuned" / "settings.json", "--data", collection]
    good(run("del --ratio 0.1 --methods slimming", *used))
    written = settings_of(tmp_path / "out")["runs"][0]["methods"]["slimming"]
    assert str(best["steps"]) in str(written)


@pytest.mark.usefixtures("undrawn")
def test_tune_del_goes_on_and_table_prints_its_ranking(run, collection, tuning, tmp_path):
    command, tuned = f"{tuning} --data {collection}", tmp_path / "tuned"
    part = good(run(f"{command} --shard 1/2", out="tuned"))
    assert "MISSING: the ranking is of what is there" in part.stderr
    assert not (tuned / "settings.json").exists()
    whole = run(command, out="tuned")
    good(run(command, out="at-once"))
    for name in ("settings.json", "ranking.csv"):
        assert (tuned / name).read_bytes() == (tmp_path / "at-once" / name).read_bytes()
    table = good(tell("table", tuned, "--out", tmp_path / "tables"))
    assert "steps=20" in table.stdout
    assert table.stdout.splitlines()[:4] == whole.stdout.splitlines()[:4]
    again = tmp_path / "tables" / "ranking.csv"
    assert again.read_bytes() == (tuned / "ranking.csv").read_bytes()


@pytest.mark.parametrize("n_dev", [1, 9])
def test_tune_del_needs_two_dev_sequences_and_a_test_one(
    run, collection, recited, tuning, tmp_path, n_dev
):
    np.save(tmp_path / "rows.npy", recited)
    rows = ["--general", collection / "general.safetensors", "--data", tmp_path / "rows.npy"]
    result = run(f"{tuning} --n-prefix 4 --any-tokens --n-dev {n_dev}", *rows)
    one_error(result, "n_dev must be at least 2, for a target and another, and below the 9")


# the data users have


@pytest.fixture
def forms(recited, tmp_path):
    """The recited rows in every form, by the options that name them."""
    import datasets

    np.save(tmp_path / "prefix.npy", recited[:, :4].astype(np.uint16))
    np.save(tmp_path / "suffix.npy", recited[:, 4:].astype(np.uint16))
    table = pd.DataFrame(
        {
            "token_ids": recited.astype(int).tolist(),
            "who": [f"w{i}" for i in range(N_ROWS)],
            "kind": ["a", "b", "c"] * 3,
            "n": 4,
        }
    )
    table.to_parquet(tmp_path / "table.parquet")
    table.to_json(tmp_path / "lines.jsonl", orient="records", lines=True)
    datasets.Dataset.from_pandas(table).save_to_disk(tmp_path / "saved")
    named = "--id who --category kind --data"
    return {
        "pair": f"--data {tmp_path}/prefix.npy --suffixes {tmp_path}/suffix.npy",
        "parquet": f"{named} {tmp_path}/table.parquet",
        "jsonl": f"{named} {tmp_path}/lines.jsonl",
        "saved": f"{named} {tmp_path}/saved",
    }


def test_collect_takes_every_form(run, forms, tmp_path, recited):
    np.save(tmp_path / "rows.npy", recited)
    found = {}
    for name, given in {"npy": f"--data {tmp_path}/rows.npy", **forms}.items():
        good(run(f"collect {given}", *LOOSE, out=f"of-{name}"))
        rows = rows_of(tmp_path / f"of-{name}")
        found[name] = [row["tokens"] for row in rows]
        if "--id" in given:
            assert {row["id"][0] for row in rows} == {"w"}
            assert {row["category"][0] for row in rows} <= {"a", "b", "c"}
        else:
            assert all(row["id"].startswith("row-") for row in rows)
    assert all(rows == found["npy"] for rows in found.values())


@pytest.mark.usefixtures("undrawn")
def test_del_takes_every_form(run, collection, forms, tmp_path):
    general = f"--general {collection}/general.safetensors"
    command = f"del --ratio 0.1 --methods activations --n-dev 3 --any-tokens {general}"
    frames = {}
    for name, given in forms.items():
        length = {"pair": "", "parquet": "--n-prefix n"}.get(name, "--n-prefix 4")
        good(run(f"{command} {given} {length}", out=f"of-{name}"))
        frames[name] = pd.read_csv(tmp_path / f"of-{name}" / "frame.csv")
    for name, frame in frames.items():
        assert set(frame["sequence_id"].str[0]) == {"w" if "--id" in forms[name] else "s"}
        pd.testing.assert_series_equal(
            frame["delta_self_accuracy"], frames["pair"]["delta_self_accuracy"]
        )
    good(run(f"{command} {forms['pair']}", out="of-pair"))  # goes on where it was


def test_inj_takes_texts_of_any_name_and_tokens(run, tmp_path, forms):
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"body": f"A new thing, number {i}."}) + "\n" for i in range(7))
    )
    command = "inj --ratio 0.1 --methods activations --max-steps 2 --limit 1"
    for name, data in {
        "texts": f"--key body --data {tmp_path}/texts.jsonl",
        "tokens": f"--any-tokens --data {tmp_path}/table.parquet",
    }.items():
        result = run(f"{command} {data}", out=name)
        # for it did not converge
        assert "1 sentences" in result.stderr and result.exit_code == 1, result.output
