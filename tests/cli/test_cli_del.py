"""tl-localize collect, del and tune --benchmark del, on a tiny model that recites itself."""

import json
import os
import re
from multiprocessing import get_context
from pathlib import Path
from shutil import copytree

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

LOOSE = [
    "--n-prefix",
    4,
    "--n-suffix",
    12,
    "--min-distinct",
    1,
    "--max-jaccard",
    1,
    "--any-tokens",
    "--n-dev",
    2,
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
    monkeypatch.setattr("tl_localize.cli.del_benchmark.del_figures", lambda *a: {})


@pytest.fixture
def run(model_dir, tmp_path):
    from tl_localize.cli import app

    def call(command, *arguments, out="out"):
        given = [command, "--model", model_dir, "--out", tmp_path / out, *arguments]
        return CliRunner().invoke(app, [str(argument) for argument in given])

    return call


@pytest.fixture(scope="module")
def first_collection(model_dir, recited, tmp_path_factory):
    import torch

    from tl_localize.cli import app
    from tl_localize.files import save_tensors

    folder = tmp_path_factory.mktemp("collection")
    arguments = [
        "--data",
        write_corpus(recited, folder),
        "--model",
        model_dir,
        "--out",
        folder / "out",
        *LOOSE,
    ]
    assert CliRunner().invoke(app, ["collect", *map(str, arguments)]).exit_code == 0
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


# collect


def test_collect_finds_the_recited_rows_and_says_what_went(run, corpus, tmp_path):
    from tl_localize.collect import Collection

    result = run("collect", "--data", corpus, *LOOSE)
    assert result.exit_code == 0, result.output
    collection = Collection.load(tmp_path / "out")
    sequences = collection.sequences
    assert collection.n_dev == 2
    assert {sequence.id for sequence in sequences} <= {f"row-{i}" for i in range(N_ROWS)}
    report = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert report["report"]["n_in"] == N_ROWS + 4
    assert report["report"]["removed"]["accuracy"] == 4
    assert report["criteria"]["n_suffix"] == 12
    assert {"fingerprint", "torch"} <= set(report["environment"])
    assert "accuracy" in result.stdout
    assert "No text for the perplexity" in result.stderr  # rows of 30 tokens
    n_test = len(sequences) - 2
    assert (
        f"DEL would have {n_test} targets and {n_test - 1} others that must not be forgotten"
        in result.stderr
    )


def test_collect_writes_general_text_that_shares_no_run_with_the_collected(run, recited, tmp_path):
    from tl_localize.readers import read_tokens

    general = np.random.default_rng(1).integers(256, size=(5, 140))
    rows = np.concatenate([np.pad(recited, ((0, 0), (0, 110))), general])
    np.save(tmp_path / "long.npy", rows)
    result = run("collect", "--data", tmp_path / "long.npy", *LOOSE, "--n-general", 3)
    assert result.exit_code == 0, result.output
    found = read_tokens(tmp_path / "out" / "general.safetensors")
    assert found.shape == (3, 128)
    assert all(row.tolist() in general[:, :128].tolist() for row in found)


def test_collect_reads_text_and_counts_empty_and_short_lines(run, recited, model_dir, tmp_path):
    from tl_localize import load_model

    tokenizer = load_model(model_dir, device="cpu").tokenizer
    letters = np.random.default_rng(0).integers(97, 123, size=(3, 20)).astype(np.uint8)
    lines = ["", *(bytes(row).decode() for row in letters), "short", ""]
    (tmp_path / "corpus.txt").write_text("\n".join(lines) + "\n")
    loosest = ["--min-accuracy", 0, "--max-distance", 1000]
    result = run("collect", "--data", tmp_path / "corpus.txt", *LOOSE[:-1], 1, *loosest)
    assert result.exit_code == 0, result.output
    assert (
        json.loads((tmp_path / "out" / "settings.json").read_text())["report"]["removed"][
            "too short"
        ]
        == 3
    )
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "sequences.jsonl").read_text().splitlines()
    ]
    assert {row["all"] for row in rows} == {line[:16] for line in lines[1:4]}
    assert all(tokenizer.decode(row["tokens"]) == row["all"] for row in rows)


def test_collect_names_the_file_of_a_row_where_there_are_several(run, corpus, recited, tmp_path):
    np.save(tmp_path / "more.npy", recited[:1, ::-1].copy())
    assert run("collect", "--data", corpus, "--data", tmp_path / "more.npy", *LOOSE).exit_code == 0
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "sequences.jsonl").read_text().splitlines()
    ]
    assert {row["id"].split("-")[0] for row in rows} == {"corpus/row", "more/row"}


def test_collect_refuses_files_of_one_name(run, corpus, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / corpus.name).write_bytes(corpus.read_bytes())
    result = run("collect", "--data", corpus, "--data", tmp_path / "other" / corpus.name, *LOOSE)
    assert result.exit_code == 2
    assert "data must be files of different names" in result.stderr


def test_collect_looks_at_every_window(run, corpus, tmp_path):
    assert run("collect", "--data", corpus, *LOOSE, "--windows", 7).exit_code == 0
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["report"]["n_in"] == 3 * (
        N_ROWS + 4
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "data must be given for"),
        (["--data", "nowhere.npy"], "path must be an existing file, got "),
        (
            ["--windows", "all"],
            "windows must be first or a number of tokens from 1 on, got 'all'",
        ),
        (["--windows", 0], "windows must be first or a number"),
        (["--min-accuracy", 90], "min_accuracy must be in [0, 1], got 90"),
        (["--min-distinct", 100], "min_distinct must be in [0, 48], got 100"),
        (["--n-general", 0], "n_general must be at least 1, got 0"),
        (["--seed", -1], "seed must be a whole number from 0 to 2**32 - 1, got -1"),
        (["--seed", 2**32], "seed must be a whole number from 0 to 2**32 - 1, got 4294967296"),
    ],
)
def test_collect_finds_mistakes_before_the_model_is_loaded(run, arguments, message, monkeypatch):
    monkeypatch.setattr(
        "tl_localize.cli.options.load_model", lambda *a: pytest.fail("the model was loaded first")
    )
    one_error(run("collect", *arguments), message)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        (
            "a.jsonl",
            b'{"body": "a"}\n',
            [],
            "text; definition), got only ['body']",
        ),
        ("a.txt", b"", [], "data must hold at least one row, got none"),
        ("a.npy", b"no array", [], "path must be a whole .npy file of one tensor"),
    ],
)
def test_collect_explains_a_bad_file_before_the_model_is_loaded(
    run, tmp_path, name, content, arguments, message, monkeypatch
):
    monkeypatch.setattr(
        "tl_localize.cli.options.load_model", lambda *a: pytest.fail("the model was loaded first")
    )
    (tmp_path / name).write_bytes(content)
    one_error(run("collect", "--data", tmp_path / name, *arguments), message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\n\xff\xfe\n", "path must be a whole text file in UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{broken\n', "path must be a whole json file in UTF-8"),
    ],
)
def test_collect_names_a_file_with_a_bad_line(run, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    one_error(run("collect", "--data", tmp_path / name), message)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (
            lambda rows: rows[:, :10],
            LOOSE,
            "failed by 'too short'. Give longer texts, or lower n_prefix or n_suffix.",
        ),
        (lambda rows: rows, [*LOOSE[:-1], 50], "n_dev must leave at least one of the"),
        (
            lambda rows: rows,
            ["--any-tokens", "--n-prefix", 90],
            "n_prefix + n_suffix must be at most n_ctx=96, got 138",
        ),
        (
            lambda rows: rows,
            [*LOOSE, "--min-distinct", 12],
            "distinct tokens in the true suffix'. Lower min_distinct.",
        ),
        (
            lambda rows: (rows * 7 + 3) % 256,
            [*LOOSE, "--min-accuracy", 1],
            "DEL has nothing to ablate here. The last ones failed by 'accuracy'.",
        ),
    ],
)
def test_collect_names_what_was_wrong_and_writes_nothing(
    run, recited, tmp_path, change, arguments, message
):
    np.save(tmp_path / "bad.npy", change(recited.astype(np.int32)))
    one_error(run("collect", "--data", tmp_path / "bad.npy", *arguments), message)
    assert not (tmp_path / "out" / "sequences.jsonl").exists()


def test_collect_records_a_failed_chunk_goes_on_and_tries_again_when_asked(
    run, corpus, tmp_path, monkeypatch
):
    from tl_localize.collect.filter import Filter

    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)
    arguments = ["--data", corpus, *LOOSE]
    assert run("collect", *arguments, out="whole").exit_code == 0
    right, calls = Filter.filter, []

    def fails(self, *stream):
        calls.append(stream)
        if len(calls) == 2:
            raise ValueError("tokens must be in [0, 256), got 300")
        return right(self, *stream)

    monkeypatch.setattr(Filter, "filter", fails)
    monkeypatch.setattr("sys.argv", ["tl-localize", "collect"])
    for _ in range(2):  # the second finds all others done, and does not try again
        result = run("collect", *arguments)
        assert result.exit_code == 1, result.output
        assert "ValueError: tokens must be in [0, 256), got 300" in result.stderr
        assert "1 of 5 chunks are missing, of which 1 failed" in result.stderr
        assert result.stderr.rstrip().endswith(
            "When they are searched after all, this makes the collection:\n  tl-localize collect "
            "--retry-failed"
        )
        assert "Traceback" not in result.output
        assert len(calls) == 5
        assert not (tmp_path / "out" / "sequences.jsonl").exists()
    (failure,) = (tmp_path / "out" / "failures").iterdir()
    assert "Traceback" in failure.read_text()
    assert run("collect", *arguments, "--retry-failed").exit_code == 0
    assert len(calls) == 6
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")
    assert list((tmp_path / "out" / "failures").iterdir()) == []


def test_collect_names_tokens_of_another_tokenizer(run, recited, tmp_path):
    np.save(tmp_path / "bad.npy", recited.astype(np.int32) + 250)
    one_error(
        run("collect", "--data", tmp_path / "bad.npy", *LOOSE), "tokens must be in [0, 256), got "
    )


def test_table_and_trace_of_a_collection(run, corpus, tmp_path, monkeypatch):
    import shlex
    import shutil

    from tl_localize.cli import app

    def told(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result

    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)
    arguments = ["--data", corpus, *LOOSE]
    run("collect", *arguments, "--shard", "2/2")
    early = told("table", tmp_path / "out")
    assert "The last step is still to be made" in early.stderr
    assert not (tmp_path / "out" / "report.csv").exists()
    assert told("trace", tmp_path / "out").stdout.count("MISSING") == 3
    whole = run("collect", *arguments).stdout
    out = tmp_path / "out"
    table = told("table", out, "--out", tmp_path / "tables").stdout
    assert table.splitlines()[:12] == whole.splitlines()[:12]
    assert (tmp_path / "tables" / "report.csv").read_bytes() == (out / "report.csv").read_bytes()

    lines = told("trace", out).stdout.splitlines()
    assert sum(line.startswith("collect, from ") for line in lines) == 5
    assert sum("'came in': 3" in line for line in lines) == 4
    saved = [json.loads(line)["id"] for line in (out / "sequences.jsonl").read_text().splitlines()]
    assert all(any(f"'id': '{name}'" in line for line in lines) for name in saved)
    (only,) = [
        line
        for line in told("trace", out, "--name", "6").stdout.splitlines()
        if "--shard 3/5" in line
    ]
    monkeypatch.chdir(tmp_path)
    told(*shlex.split(only)[1:])
    (unit,) = (tmp_path / "made-again" / "records" / "collect").iterdir()
    assert (out / "records" / "collect" / unit.name).exists()

    shutil.copytree(out, tmp_path / "damaged")
    spoiled = tmp_path / "damaged" / "records" / "collect" / unit.name
    spoiled.write_bytes(spoiled.read_bytes()[:-1])
    assert "The last step is still to be made" in told("table", tmp_path / "damaged").stderr
    (out / "settings.json").write_text("{")
    one_error(
        CliRunner().invoke(app, ["table", str(out)]),
        "collection must be what tl-localize collect wrote, got ",
    )


def collected(folder):
    names = ("sequences.jsonl", "report.csv", "settings.json")
    return [(folder / name).read_bytes() for name in names]


@pytest.mark.parametrize("windows", ["first", "7"])
def test_collect_goes_on_where_it_was(run, corpus, tmp_path, monkeypatch, windows):
    from tl_localize.collect.filter import Filter

    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)
    (twin := tmp_path / "twin.npy").write_bytes(corpus.read_bytes())
    arguments = ["--data", corpus, "--data", twin, *LOOSE, "--windows", windows]
    right, calls = Filter.filter, []

    def killed(self, *stream):
        calls.append(stream)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return right(self, *stream)

    assert run("collect", *arguments, out="whole").exit_code == 0
    monkeypatch.setattr(Filter, "filter", killed)
    result = run("collect", *arguments)
    assert result.exit_code == 130, result.output
    assert "go on with the same command" in result.stderr
    assert len(list((tmp_path / "out" / "records" / "collect").iterdir())) == 2
    result = run("collect", *arguments)
    assert result.exit_code == 0, result.output
    assert len(calls) == 1 + len(list((tmp_path / "out" / "records" / "collect").iterdir()))
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")
    done = len(calls)
    # another draw costs nothing
    assert run("collect", *arguments, "--seed", 1, "--n-max", 4).exit_code == 0
    assert len(calls) == done
    one_error(
        run("collect", *arguments, "--min-accuracy", 0.5),
        "min_accuracy: 0.9 in the folder, 0.5 now",
    )
    one_error(
        run("collect", "--data", corpus, *arguments[4:]),
        "data: ['corpus.npy', 'twin.npy'] in the folder, ['corpus.npy'] now",
    )


def test_collect_in_shards_is_collect_in_one(run, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)
    monkeypatch.setattr("sys.argv", ["tl-localize", "collect", "--shard", "2/3", "--seed", "0"])
    arguments = ["--data", corpus, *LOOSE]
    assert run("collect", *arguments, out="whole").exit_code == 0
    for shard, missing in (("3/3", 4), ("1/3", 2)):
        result = run("collect", *arguments, "--shard", shard)
        assert result.exit_code == 0, result.output
        assert f"{missing} of 5 chunks are missing" in result.stderr
        assert result.stderr.rstrip().endswith("tl-localize collect --seed 0")
        assert not (tmp_path / "out" / "sequences.jsonl").exists()
    assert run("collect", *arguments, "--shard", "2/3").exit_code == 0
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")
    one_error(run("collect", *arguments, "--shard", "4/3"), "shard must read i/n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_collect_by_two_processes_at_a_time_is_collect_by_one(run, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)
    arguments = ["--data", corpus, *LOOSE]
    assert run("collect", *arguments, out="whole").exit_code == 0

    def shard(i):
        assert run("collect", *arguments, "--shard", f"{i}/2").exit_code == 0

    shards = [get_context("fork").Process(target=shard, args=(i,)) for i in (1, 2)]
    for process in shards:
        process.start()
    for process in shards:
        process.join()
    assert [process.exitcode for process in shards] == [0, 0]
    assert run("collect", *arguments).exit_code == 0
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")


@pytest.mark.parametrize(("signals", "kept"), [(1, 2), (2, 1)])
def test_collect_ctrl_c_finishes_the_chunk_in_hand_and_twice_stops_at_once(
    run, corpus, tmp_path, monkeypatch, signals, kept
):
    import signal

    from tl_localize.collect.filter import Filter

    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)
    right, calls = Filter.filter, []

    def interrupted(self, *stream):
        calls.append(stream)
        if len(calls) == 2:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)
        return right(self, *stream)

    arguments = ["--data", corpus, *LOOSE]
    assert run("collect", *arguments, out="whole").exit_code == 0
    monkeypatch.setattr(Filter, "filter", interrupted)
    result = run("collect", *arguments)
    assert result.exit_code == 130, result.output
    assert (
        "Finishing the task in hand, which may take minutes. Once more stops at once"
        in result.stderr
    )
    assert "go on with the same command" in result.stderr
    assert "missing" not in result.stderr
    assert len(list((tmp_path / "out" / "records" / "collect").iterdir())) == kept
    assert run("collect", *arguments).exit_code == 0
    assert len(calls) == 2 + 5 - kept
    assert collected(tmp_path / "out") == collected(tmp_path / "whole")


def test_collect_says_nothing_in_a_pipe_unless_asked(run, corpus, monkeypatch):
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)
    arguments = ["--data", corpus, *LOOSE]
    for given, lines in (([], 0), (["-v"], 5), (["--quiet"], 0)):
        result = run("collect", *arguments, *given, out="".join(given) or "plain")
        assert result.stderr.count("collect on ") == lines, result.stderr
        assert "%" not in result.stderr


def test_collect_says_how_far_it_is_in_a_log_also_within_a_long_chunk(run, corpus, monkeypatch):
    import re
    import time

    from tl_localize.collect.filter import Filter

    right = Filter.filter

    def slow(self, *stream):
        time.sleep(0.3)
        return right(self, *stream)

    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)
    monkeypatch.setattr("tl_localize.cli.running.is_log", lambda: True)
    monkeypatch.setattr("tl_localize.cli.running.EVERY", 0.1)  # seconds between two lines
    monkeypatch.setattr(Filter, "filter", slow)
    log = run("collect", "--data", corpus, *LOOSE).stderr
    assert re.search(r"^0 %, \? left, now collect on 0$", log, re.M), log
    assert re.search(r"^80 %, 00:0\d left, now collect on 12$", log, re.M), log
    assert log.count("now collect on 6") > 1
    assert "left" not in run("collect", "--data", corpus, *LOOSE, "--quiet", out="quiet").stderr


def test_a_terminal_shows_what_is_in_hand_while_it_takes_long(capsys, monkeypatch):
    import sys
    import time

    from tl_localize.cli.running import progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress() as show:
        show(0.25, "zero_out on s1")
        time.sleep(2.5)
    shown = capsys.readouterr().err.split("\r")
    # the clock moves
    assert len({line for line in shown if "zero_out on s1" in line and "25%" in line}) > 1, shown


def test_status_of_a_collection_says_what_was_found_so_far(run, corpus, tmp_path, monkeypatch):
    from tl_localize.cli import app

    def told(command):
        return CliRunner().invoke(app, [command, str(tmp_path / "out")])

    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)
    arguments = ["--data", corpus, *LOOSE]
    run("collect", *arguments, "--shard", "2/2")
    result = told("status")
    assert result.exit_code == 0, result.output
    assert ["collect", "5", "2", "0", "3"] in [
        line.split()[:5] for line in result.stdout.splitlines()
    ]
    assert "(" not in result.stdout.split("Time left")[0]  # no row but that of the chunks
    assert "6 came in" in result.stdout
    assert "The last step is still to be made." in result.stdout
    run("collect", *arguments)
    assert f"{N_ROWS + 4} came in, 4 removed: accuracy" in (whole := told("status").stdout)
    assert "The collection is made." in whole
    rows = np.load(corpus)
    # data that have grown: the last chunk is another one
    np.save(corpus, np.concatenate([rows, rows[:1]]))
    run("collect", *arguments, "--shard", "1/9")
    assert ["collect", "5", "4", "0", "1"] in [
        line.split()[:5] for line in told("status").stdout.splitlines()
    ]


# del


@pytest.mark.usefixtures("undrawn")
def test_del_writes_tables_frame_and_settings(run, collection, tmp_path):
    result = run(
        "del",
        "--data",
        collection,
        "--ratio",
        0.1,
        "--ratio",
        0.05,
        "--methods",
        "activations,integrated_gradients",
    )
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "frame.csv",
        "before.csv",
        "settings.json",
        "del.md",
        "del.tex",
        "del_tests.md",
        "del_memorization.md",
        "del_examples.md",
    } <= names
    assert not any("single_layer" in name for name in names)
    assert "Random" in result.stdout
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    n_collected = len((collection / "sequences.jsonl").read_text().splitlines())
    assert frame["sequence_id"].nunique() == n_collected - 2  # dev ones are left out
    assert set(frame["ratio"]) == {0.05, 0.1}


def test_del_of_some_targets_ablates_one_layer(run, collection, tmp_path):
    arguments = [
        "--data",
        collection,
        "--ratio",
        0.05,
        "--methods",
        "activations",
        "--targets",
        2,
        "--single-layer",
        "activations",
    ]
    assert run("del", *arguments).exit_code == 0
    assert pd.read_csv(tmp_path / "out" / "frame.csv")["sequence_id"].nunique() == 2
    assert set(pd.read_csv(tmp_path / "out" / "single_layer_activations.csv")["multiple"]) == {1, 5}
    assert {"del_single_layer_activations.svg", "del_single_layer.md", "del_forgetting.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }


@pytest.mark.usefixtures("undrawn")
def test_del_reads_the_authors_formats(run, collection, recited, tmp_path):
    import torch

    torch.save(torch.tensor(recited).long(), tmp_path / "pile.pt")
    general = [
        "--general",
        collection / "general.safetensors",
        "--ratio",
        0.1,
        "--methods",
        "activations",
        "--n-dev",
        3,
    ]
    assert (
        run(
            "del", "--data", tmp_path / "pile.pt", "--n-prefix", 4, "--any-tokens", *general
        ).exit_code
        == 0
    )
    assert pd.read_csv(tmp_path / "out" / "frame.csv")["sequence_id"].nunique() == N_ROWS - 3
    rows = [
        {"prompt": f"{i}abc", "all": f"{i}abcdefgh", "prompt_len": 4, "category": ["letters"]}
        for i in range(6)
    ]
    (tmp_path / "manual.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    result = run(
        "del", "--data", tmp_path / "manual.jsonl", *general, "--ablation", "mean", out="manual"
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "manual" / "del_categories.md").is_file()
    assert "mean" in (tmp_path / "manual" / "del.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--ratio", 0.001],
            "ratio must select at least one of 40 neurons, got 0.001, which selects none",
        ),
        (["--ratio", 5], "ratio must be a fraction in (0, 1], got 5.0"),
        (["--ratio", 0.1, "--targets", 100], "n_targets must be in [1, "),
        (["--ratio", 0.1, "--ablation", "one"], "ablation must be one of"),
        (["--methods", "actvations"], "Did you mean activations"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_del_explains_a_mistake_in_one_line(run, collection, arguments, message):
    one_error(run("del", "--data", collection, *arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", 5], "ratio must be a fraction in (0, 1], got 5.0"),
        (["--ratio", 0.1, "--ratio", 0.1], "ratio must be given once for each share"),
        (
            ["--ablation", "meen"],
            "ablation must be one of zero, mean, resample, got 'meen'. Did you mean mean?",
        ),
        (["--targets", 0], "targets must be at least 1, got 0. Leave it out for the default."),
        (["--targets", 101], "targets must be at most 100 without data, got 101. Raise --limit."),
        (["--n-dev", 105], "n_dev must be at least 0 and below n_max=105, got 105"),
        (["--n-dev", -1], "n_dev must be at least 0, got -1"),
        (["--n-prefix", 0], "n_prefix must be at least 1, got 0"),
        (["--seed", -1], "seed must be a whole number from 0 to 2**32 - 1, got -1"),
        (["--seed", 2**32], "seed must be a whole number from 0 to 2**32 - 1, got 4294967296"),
        (["--shard", "0/2"], "shard must read i/n"),
        (["--workers", 0], "workers must be at least 1, got 0"),
        (
            ["--single-layer", "hard_concrete"],
            "method must score each layer by itself for single layers, got HardConcrete(",
        ),
        (["--single-layer", "slimming"], "Use one of"),
    ],
)
def test_del_finds_mistakes_before_the_model_is_loaded(run, arguments, message, monkeypatch):
    monkeypatch.setattr(
        "tl_localize.cli.options.load_model", lambda *a: pytest.fail("the model was loaded first")
    )
    one_error(run("del", "--model", "reference", *arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", 5], "ratio must be a fraction in (0, 1], got 5.0"),
        (["--ratio", 0], "ratio must be a fraction in (0, 1], got 0.0"),
        (
            ["--n-dev", 1],
            "n_dev must be at least 2, for a target and another, and below the 105 sequences, got 1",
        ),
        (["--shard", "0/2"], "shard must read i/n"),
        (["--distractors", -1], "distractors must be at least 0, got -1"),
    ],
)
def test_tune_finds_mistakes_before_the_model_is_loaded(run, arguments, message, monkeypatch):
    monkeypatch.setattr(
        "tl_localize.cli.options.load_model", lambda *a: pytest.fail("the model was loaded first")
    )
    one_error(run("tune", "--benchmark", "del", "--model", "reference", *arguments), message)


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
    monkeypatch.setattr("tl_localize.cli.del_benchmark.reference_search", search)
    monkeypatch.setattr("tl_localize.cli.del_benchmark.lacking_texts", lambda: "")
    monkeypatch.setattr("tl_localize.cli.del_benchmark.held_out_tokens", lambda: general)
    monkeypatch.setattr(
        "tl_localize.cli.options.load_model", lambda *a: load_model(model_dir, device="cpu")
    )
    return ["--model", "reference", "--n-dev", 2]


@pytest.mark.usefixtures("undrawn")
def test_del_collects_in_the_machinery_of_runs(run, default_data, tmp_path, monkeypatch):
    import shlex
    import signal

    from tl_localize.cli import app
    from tl_localize.collect.filter import Filter

    right, calls = Filter.filter, []

    def interrupted(self, *stream):
        calls.append(stream)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return right(self, *stream)

    monkeypatch.setattr(Filter, "filter", interrupted)
    arguments = [*default_data, "--methods", "activations", "--ratio", 0.1]
    # before anything is collected
    one_error(run("del", *arguments[:-1], 0.001, out="other"), "which selects none")
    assert calls == []
    stopped = run("del", *arguments)
    assert stopped.exit_code == 130, stopped.output
    assert "Finishing the task in hand" in stopped.stderr
    assert "go on with the same command" in stopped.stderr
    assert len(calls) == 2
    told = CliRunner().invoke(app, ["status", str(tmp_path / "out")]).stdout
    assert ["collect", "5", "2", "0", "3"] in [line.split()[:5] for line in told.splitlines()]
    assert "The sequences are collected first" in told
    assert "base" not in told
    monkeypatch.setattr("sys.argv", ["tl-localize", "del", "--shard", "1/2"])
    shard = run("del", *arguments, "--shard", "1/2", "-v")
    assert shard.exit_code == 0, shard.output
    assert shard.stderr.count("collect on ") == 2  # of chunks 0, 2 and 4 the first was there
    assert shard.stderr.rstrip().endswith(
        "1 of 5 chunks are missing. Once the other shards are done, this goes on, in shards or at "
        "once:\n  tl-localize del"
    )
    whole = run("del", *arguments)
    assert whole.exit_code == 0, whole.output
    assert len(calls) == 5
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    trace = CliRunner().invoke(app, ["trace", str(tmp_path / "out"), "--method", "activations"])
    *_, command = [
        line.strip() for line in trace.stdout.splitlines() if line.startswith("  tl-localize del")
    ]
    monkeypatch.chdir(tmp_path)
    again = CliRunner().invoke(app, shlex.split(command)[1:])
    assert again.exit_code == 0, again.output
    assert len(calls) == 5
    made = pd.read_csv("made-again/frame.csv")
    assert len(frame.merge(made, how="inner")) == len(made) == 1


@pytest.mark.usefixtures("undrawn")
def test_tune_del_collects_in_the_machinery_of_runs(run, default_data, tmp_path):
    (tmp_path / "grid.json").write_text(json.dumps({"slimming": {"steps": [10, 20]}}))
    arguments = [
        "--benchmark",
        "del",
        *default_data,
        "--ratio",
        0.1,
        "--grid",
        tmp_path / "grid.json",
        "--method",
        "slimming",
    ]
    result = run("tune", *arguments, "-v")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("collect on ") == 5
    assert (tmp_path / "out" / "settings.json").is_file()
    assert "collect on " not in run("tune", *arguments, "-v").stderr


def test_status_of_a_folder_without_a_plan_says_so(tmp_path):
    from tl_localize.cli import app
    from tl_localize.execution import Store

    Store(tmp_path / "out")
    one_error(
        CliRunner().invoke(app, ["status", str(tmp_path / "out")]),
        "folder must hold the plan of a run, got none in",
    )


def test_del_explains_missing_data(run, collection, tmp_path):
    one_error(run("del"), "Run tl-localize collect, or name a file with --data")
    one_error(run("del", "--data", tmp_path / "nowhere"), "data must be an existing path")
    one_error(
        run("del", "--data", tmp_path, "--general", collection / "general.safetensors"),
        "or a folder of tl-localize collect",
    )
    (collection / "general.safetensors").unlink()
    one_error(
        run("del", "--data", collection),
        "general must be given where the data have no general.safetensors",
    )


def test_del_names_the_row_that_is_broken(run, collection, tmp_path):
    (tmp_path / "manual.jsonl").write_text('{"prompt": "abc", "all": "xbcdef"}\n')
    arguments = ["--general", collection / "general.safetensors", "--ratio", 0.1]
    one_error(
        run("del", "--data", tmp_path / "manual.jsonl", *arguments),
        "all must begin with prompt, got 'xbcdef' after the prompt 'abc' at row 0 of",
    )


def test_del_with_a_dev_set_larger_than_the_data(run, collection, recited, tmp_path):
    np.save(tmp_path / "rows.npy", recited)
    arguments = [
        "--general",
        collection / "general.safetensors",
        "--n-prefix",
        4,
        "--any-tokens",
        "--ratio",
        0.1,
        "--n-dev",
        9,
    ]
    one_error(
        run("del", "--data", tmp_path / "rows.npy", *arguments),
        "n_dev must leave at least one of the 9 sequences for the test",
    )


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
    import shlex

    from tl_localize import Activations
    from tl_localize.cli import app

    arguments = [
        "--data",
        collection,
        "--methods",
        "activations",
        "--targets",
        3,
        "--single-layer",
        "activations",
        "--ratio",
        0.05,
    ]
    assert run("del", *arguments, "--ratio", 0.1, out="whole").exit_code == 0
    first = run("del", *arguments, "--shard", "2/3")
    assert first.exit_code == 0, first.output
    assert "measurements MISSING" in first.stdout
    status = CliRunner().invoke(app, ["status", str(tmp_path / "out")])
    rows = [re.split(r"\s{2,}", line.strip()) for line in status.stdout.splitlines()]
    counts = {row[0]: row[1:5] for row in rows if len(row) > 5}
    assert counts["activations"] == counts["activations, layer by layer"] == ["3", "1", "0", "2"]
    assert run("del", *arguments).exit_code == 0
    monkeypatch.setattr(
        Activations, "attribute_batch", lambda *a: pytest.fail("scores were computed again")
    )
    # of the new ratio alone
    assert run("del", *arguments, "--ratio", 0.1, "-v").stderr.count(" on row-") == 3 * 3
    assert numbers(tmp_path / "out") == numbers(tmp_path / "whole")
    monkeypatch.undo()
    monkeypatch.setattr("tl_localize.cli.del_benchmark.del_figures", lambda *a: {})
    table = CliRunner().invoke(
        app, ["table", str(tmp_path / "out"), "--out", str(tmp_path / "tables")]
    )
    assert table.exit_code == 0, table.output
    assert numbers(tmp_path / "tables") == numbers(tmp_path / "whole")
    trace = CliRunner().invoke(
        app, ["trace", str(tmp_path / "out"), "--method", "activations", "--ratio", "0.1"]
    )
    *_, command = [
        line.strip() for line in trace.stdout.splitlines() if line.startswith("  tl-localize del")
    ]
    *_, unit = [line.strip() for line in trace.stdout.splitlines() if "/records/del/" in line]
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
    again, before = pd.read_csv("made-again/frame.csv"), pd.read_csv("whole/frame.csv")
    shared = before.merge(again, how="inner")
    assert len(shared) == len(again) == 1
    assert (tmp_path / "made-again" / "records" / "del" / unit.rpartition("/")[2]).exists()


@pytest.mark.usefixtures("undrawn")
def test_del_refuses_what_contradicts_and_takes_more_targets(run, collection, tmp_path):
    arguments = ["--data", collection, "--methods", "random", "--ratio", 0.1]
    assert run("del", *arguments, "--targets", 2).exit_code == 0
    one_error(run("del", *arguments, "--ablation", "mean"), "ablation: ")
    one_error(run("del", *arguments, "--seed", 1), "seed: 0 in the folder, 1 now")
    one_error(
        run("del", *arguments, "--methods", "activations", "--set", "random.seed=3"),
        "must name a chosen method",
    )
    grown = run("del", *arguments, "--targets", 4, "-v")
    assert grown.stderr.count("random on ") == 2 * 2  # scores and effects
    np.save(tmp_path / "general.npy", np.zeros((3, 20), dtype=np.int64))
    one_error(
        run("del", *arguments, "--general", tmp_path / "general.npy"), "general_text: [3, 20]"
    )


@pytest.mark.usefixtures("undrawn")
def test_del_records_a_failure_and_tries_again_when_asked(run, collection, tmp_path, monkeypatch):
    from tl_localize import Activations

    right, calls = Activations.attribute_batch, []

    def wrong(self, neurons, sequences, report):
        calls.append(sequences)
        if len(calls) == 2:
            raise ValueError("loss must be finite, got nan")
        return right(self, neurons, sequences, report)

    monkeypatch.setattr(Activations, "attribute_batch", wrong)
    arguments = ["--data", collection, "--methods", "activations", "--ratio", 0.1, "--targets", 3]
    result = run("del", *arguments)
    assert result.exit_code == 1, result.output
    assert "FAILED records/scores/" in result.stderr
    assert "1 measurements MISSING" in result.stdout
    assert pd.read_csv(tmp_path / "out" / "missing.csv")["reason"].tolist() == [
        "ValueError: loss must be finite, got nan"
    ]
    assert run("del", *arguments).exit_code == 1
    assert len(calls) == 3
    assert run("del", *arguments, "--retry-failed").exit_code == 0
    assert len(calls) == 4
    assert not (tmp_path / "out" / "missing.csv").exists()


# tune


@pytest.mark.usefixtures("undrawn")
def test_tune_del_ranks_a_grid_on_the_dev_sequences_and_del_reads_it(run, collection, tmp_path):
    (tmp_path / "grid.json").write_text(json.dumps({"slimming": {"steps": [10, 20]}}))
    arguments = [
        "--benchmark",
        "del",
        "--data",
        collection,
        "--ratio",
        0.1,
        "--grid",
        tmp_path / "grid.json",
        "--method",
        "slimming",
    ]
    result = run("tune", *arguments, out="tuned")
    assert result.exit_code == 0, result.output
    assert "self_loss" in result.stdout
    dev = {
        row["id"]
        for line in (collection / "sequences.jsonl").read_text().splitlines()
        if (row := json.loads(line))["split"] == "dev"
    }
    assert set(pd.read_csv(tmp_path / "tuned" / "frame.csv")["sequence_id"]) == dev
    record = json.loads((tmp_path / "tuned" / "settings.json").read_text())
    assert "the target minus that on the others at 10 %, 2 dev sequences" in record["rule"]
    assert record["settings"]["slimming"]["first_layer"] == 1
    used = run(
        "del",
        "--data",
        collection,
        "--ratio",
        0.1,
        "--methods",
        "slimming",
        "--settings",
        tmp_path / "tuned" / "settings.json",
    )
    assert used.exit_code == 0, used.output
    written = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert (
        f"steps={record['settings']['slimming']['steps']}"
        in written["runs"][0]["methods"]["slimming"]
    )


@pytest.mark.usefixtures("undrawn")
def test_tune_del_goes_on_and_table_prints_its_ranking(run, collection, tmp_path):
    from tl_localize.cli import app

    (tmp_path / "grid.json").write_text(json.dumps({"slimming": {"steps": [10, 20]}}))
    arguments = [
        "--benchmark",
        "del",
        "--data",
        collection,
        "--ratio",
        0.1,
        "--grid",
        tmp_path / "grid.json",
        "--method",
        "slimming",
    ]
    part = run("tune", *arguments, "--shard", "1/2", out="tuned")
    assert part.exit_code == 0, part.output
    assert "MISSING: the ranking is of what is there" in part.stderr
    assert not (tmp_path / "tuned" / "settings.json").exists()
    whole = run("tune", *arguments, out="tuned")
    assert run("tune", *arguments, out="at-once").exit_code == 0
    for name in ("settings.json", "ranking.csv"):
        assert (tmp_path / "tuned" / name).read_bytes() == (
            tmp_path / "at-once" / name
        ).read_bytes()
    table = CliRunner().invoke(
        app, ["table", str(tmp_path / "tuned"), "--out", str(tmp_path / "tables")]
    )
    assert table.exit_code == 0, table.output
    assert "steps=20" in table.stdout
    assert table.stdout.splitlines()[:4] == whole.stdout.splitlines()[:4]
    assert (tmp_path / "tables" / "ranking.csv").read_bytes() == (
        tmp_path / "tuned" / "ranking.csv"
    ).read_bytes()


@pytest.mark.parametrize("n_dev", [1, 9])
def test_tune_del_needs_two_dev_sequences_and_a_test_one(run, collection, recited, tmp_path, n_dev):
    np.save(tmp_path / "rows.npy", recited)
    general = [
        "--general",
        collection / "general.safetensors",
        "--n-prefix",
        4,
        "--any-tokens",
        "--ratio",
        0.1,
    ]
    result = run(
        "tune", "--benchmark", "del", "--data", tmp_path / "rows.npy", *general, "--n-dev", n_dev
    )
    one_error(
        result,
        "n_dev must be at least 2, for a target and another, and below the 9 sequences, got "
        f"{n_dev}",
    )


def test_tune_explains_another_benchmark(run):
    one_error(run("tune", "--benchmark", "inject"), "'inject' is not one of 'inj', 'del'")


# the data users have


@pytest.fixture
def forms(recited, tmp_path):
    """The recited rows in every form, by the options that name them."""
    import datasets

    rows = recited.astype(int).tolist()
    np.save(tmp_path / "prefix.npy", recited[:, :4].astype(np.uint16))
    np.save(tmp_path / "suffix.npy", recited[:, 4:].astype(np.uint16))
    table = pd.DataFrame(
        {
            "token_ids": rows,
            "who": [f"w{i}" for i in range(N_ROWS)],
            "kind": ["a", "b", "c"] * 3,
            "n": 4,
        }
    )
    table.to_parquet(tmp_path / "table.parquet")
    table.to_json(tmp_path / "lines.jsonl", orient="records", lines=True)
    datasets.Dataset.from_pandas(table).save_to_disk(tmp_path / "data set")
    named = ["--id", "who", "--category", "kind"]
    return {
        "pair": ["--prefix", tmp_path / "prefix.npy", "--suffix", tmp_path / "suffix.npy"],
        "parquet": ["--data", tmp_path / "table.parquet", *named],
        "jsonl": ["--data", tmp_path / "lines.jsonl", *named],
        "saved": ["--data", tmp_path / "data set", *named],
    }


@pytest.mark.parametrize("windows", ["first", "8"])
def test_collect_takes_every_form(run, corpus, forms, tmp_path, windows, recited):
    np.save(tmp_path / "rows.npy", recited)
    found = {}
    for name, given in {"npy": ["--data", tmp_path / "rows.npy"], **forms}.items():
        result = run("collect", *given, *LOOSE, "--windows", windows, out=name)
        assert result.exit_code == 0, result.output
        rows = [
            json.loads(line)
            for line in (tmp_path / name / "sequences.jsonl").read_text().splitlines()
        ]
        found[name] = [row["tokens"] for row in rows]
        if "--id" in given:
            assert {row["id"][0] for row in rows} == {"w"} and {
                row["category"][0] for row in rows
            } <= {"a", "b", "c"}
        else:
            assert all(row["id"].startswith("row-") for row in rows)
    assert all(rows == found["npy"] for rows in found.values())


@pytest.mark.usefixtures("undrawn")
def test_del_takes_every_form(run, collection, forms, tmp_path):
    general = [
        "--general",
        collection / "general.safetensors",
        "--ratio",
        0.1,
        "--methods",
        "activations",
        "--n-dev",
        3,
        "--any-tokens",
    ]
    frames = {}
    for name, given in forms.items():
        length = ["--n-prefix", "n" if name == "parquet" else 4] if name != "pair" else []
        result = run("del", *given, *length, *general, out=name)
        assert result.exit_code == 0, result.output
        frames[name] = pd.read_csv(tmp_path / name / "frame.csv")
    for name, frame in frames.items():
        assert set(frame["sequence_id"].str[0]) == {"w" if "--id" in forms[name] else "s"}
        pd.testing.assert_series_equal(
            frame["delta_self_accuracy"], frames["pair"]["delta_self_accuracy"]
        )
    assert run("del", *forms["pair"], *general, out="pair").exit_code == 0  # goes on where it was


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prefix", "a.npy"],
            "prefix must stand with suffix and without data, got --prefix a.npy and no --suffix",
        ),
        (
            ["--prefix", "a.npy", "--suffix", "b.npy", "--data", "c.npy"],
            "got --prefix a.npy and --data c.npy",
        ),
        (["--suffix", "a.npy"], "prefix must be given with suffix, got none"),
    ],
)
def test_options_of_data_that_contradict_are_refused(run, arguments, message, monkeypatch):
    monkeypatch.setattr(
        "tl_localize.cli.options.load_model", lambda *a: pytest.fail("the model was loaded first")
    )
    for command in ("collect", "del", "inj"):
        one_error(run(command, *arguments), message)


def test_inj_takes_texts_of_any_name_and_tokens(run, tmp_path, forms):
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"body": f"A new thing, number {i}."}) + "\n" for i in range(7))
    )
    common = ["--ratio", 0.1, "--methods", "activations", "--max-steps", 2, "--limit", 1]
    result = run("inj", "--data", tmp_path / "texts.jsonl", "--key", "body", *common)
    # for it did not converge
    assert "1 sentences" in result.stderr and result.exit_code == 1, result.output
    result = run("inj", *forms["parquet"], *common, "--any-tokens", out="tokens")
    assert "1 sentences" in result.stderr and result.exit_code == 1, result.output
