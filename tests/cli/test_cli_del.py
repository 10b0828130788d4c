"""tl-localize collect, del and tune --benchmark del, on a tiny model that recites itself."""

import json
import re
import sys
from base64 import b64encode
from contextlib import suppress
from shutil import copy, copytree

import numpy as np
import pandas as pd
import pytest
from commands import invoke

LOOSE = "--n-prefix 4 --n-suffix 12 --min-distinct 1 --max-jaccard 1 --n-dev 2 --data"
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


@pytest.fixture(scope="module")
def first_corpus(recited, tmp_path_factory):
    """The recited rows among rows of noise."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.npy"
    noise = np.random.default_rng(0).integers(256, size=(4, LENGTH))
    np.save(path, np.concatenate([recited, noise]).astype(np.uint16))
    return path


@pytest.fixture
def corpus(first_corpus, tmp_path):
    path = tmp_path / "corpus.npy"
    path.write_bytes(first_corpus.read_bytes())
    return path


@pytest.fixture
def few_texts(monkeypatch):
    """Of the known texts two of each of six categories, and four rows of general text."""
    from tl_localize.texts.known import known_texts

    found = {}
    for text in known_texts():
        found.setdefault(text.category, []).append(text)
    few = [text for texts in found.values() if len(texts) > 1 for text in texts[:2]][:12]
    monkeypatch.setattr("tl_localize.texts.known.known_texts", lambda: few)
    monkeypatch.setattr("tl_localize.evals.settings.DEL_GENERAL", 4)


@pytest.fixture
def unloaded(monkeypatch):
    monkeypatch.setattr(
        "tl_localize.model.loading.load_model", lambda *a: pytest.fail("the model was loaded first")
    )


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 3)


def tell(command, *arguments):
    """A command, whose first words stand in one text."""
    return invoke(command, *arguments)


@pytest.fixture
def run(model_dir, tmp_path):
    def call(command, *arguments, out="out"):
        return tell(command, *arguments, "--model", model_dir, "--out", tmp_path / out)

    call.model_dir = model_dir
    return call


@pytest.fixture
def general(tmp_path):
    """A file of general text of 20 tokens a row."""
    import torch

    from tl_localize.files import save_tensors

    path = tmp_path / "general.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_tensors(path, {"tokens": torch.randint(256, (3, 20), generator=generator).int()})
    return path


@pytest.fixture(scope="module")
def first_collection(model_dir, first_corpus):
    out = first_corpus.parent / "out"
    good(tell(f"collect {LOOSE}", first_corpus, "--out", out, "--model", model_dir))
    return out


@pytest.fixture
def collection(first_collection, general, tmp_path):
    """A copy of what collect wrote, with general text."""
    folder = copytree(first_collection, tmp_path / "collection")
    (folder / general.name).write_bytes(general.read_bytes())
    return folder


def one_error(result, message):
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def good(result):
    assert result.exit_code == 0, result.output
    return result


def rows_of(folder):
    return [json.loads(line) for line in (folder / "sequences.jsonl").read_text().splitlines()]


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())


def collected(folder):
    return json.loads((folder / "collection.json").read_text())


def best_of(folder):
    return json.loads((folder / "best_settings.json").read_text())


def methods_of(folder):
    """Label -> method, of the only scope of a folder."""
    (scope,) = settings_of(folder)["scopes"].values()
    return {label: what for label, (what, _) in scope["methods"].items()}


# collect


def test_collect_finds_the_recited_rows_and_says_what_went(run, corpus, tmp_path):
    result = good(run(f"collect {LOOSE}", corpus))
    rows = rows_of(tmp_path / "out")
    assert {row["id"] for row in rows} <= {f"row-{i}" for i in range(N_ROWS)}
    record = collected(tmp_path / "out")
    assert record["report"]["n_in"] == N_ROWS + 4
    assert record["report"]["removed"]["accuracy"] == 4
    assert record["criteria"]["n_suffix"] == 12
    assert "accuracy" in result.stdout
    assert "No text for the perplexity" in result.stderr  # rows of 30 tokens
    assert f"{len(rows)} memorized sequences (2 of them dev)" in result.stdout


def test_options_of_collect_have_the_defaults_of_the_criteria():
    from tl_localize.cli.command_options import CollectOptions
    from tl_localize.collect import Criteria

    assert vars(Criteria()).items() <= (vars(CollectOptions()) | {"ngram": 5}).items()


@pytest.mark.parametrize("length", [40, 128])
def test_collect_writes_general_text_that_shares_no_run_with_the_collected(
    run, recited, tmp_path, monkeypatch, length
):
    from tl_localize.model.loading import load_model
    from tl_localize.texts.readers import read_tokens

    monkeypatch.setattr("tl_localize.cli.collecting.GENERAL_LENGTH", length)
    length = min(length, load_model(run.model_dir).cfg.n_ctx)
    general = np.random.default_rng(1).integers(256, size=(5, 140))
    rows = np.concatenate([np.pad(recited, ((0, 0), (0, 110))), general])
    np.save(tmp_path / "long.npy", rows)
    good(run(f"collect {LOOSE}", tmp_path / "long.npy"))
    found = read_tokens(tmp_path / "out" / "general.safetensors")
    assert found.shape == (5, length)
    assert all(row.tolist() in general[:, :length].tolist() for row in found)


def test_windows_of_a_corpus_give_general_text_of_all_of_it(run, recited, tmp_path, monkeypatch):
    from tl_localize.texts.readers import read_tokens

    monkeypatch.setattr("tl_localize.cli.collecting.GENERAL_LENGTH", 20)
    long = np.random.default_rng(1).integers(256, size=5 * 20 + 10)
    np.save(tmp_path / "long.npy", np.stack([np.resize(row, long.size) for row in recited]))
    np.save(tmp_path / "more.npy", long[None])
    files = f"--data {tmp_path / 'more.npy'} --data {tmp_path / 'long.npy'}"
    good(run(f"collect {LOOSE.removesuffix('--data')} {files} --windows 80"))
    found = read_tokens(tmp_path / "out" / "general.safetensors").tolist()
    assert all(long[start : start + 20].tolist() in found for start in range(0, 100, 20))


@pytest.mark.parametrize("error", [ValueError("none"), KeyboardInterrupt()])
def test_general_text_of_another_collection_does_not_stay(
    run, recited, tmp_path, monkeypatch, error
):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("tl_localize.cli.collecting.GENERAL_LENGTH", 20)
    corpus = tmp_path / "long.npy"
    np.save(corpus, np.pad(recited, ((0, 0), (0, 30))))
    general = tmp_path / "out" / "general.safetensors"
    good(run(f"collect --n-max 4 {LOOSE}", corpus))
    first = rows_of(tmp_path / "out")
    assert general.is_file()
    monkeypatch.setattr("tl_localize.cli.collecting.perplexity_split", fail)
    if isinstance(error, KeyboardInterrupt):
        with suppress(KeyboardInterrupt):
            run(f"collect {LOOSE}", corpus)
        assert rows_of(tmp_path / "out") == first
    else:
        assert "else it takes Python's docstrings" in good(run(f"collect {LOOSE}", corpus)).stderr
        assert len(rows_of(tmp_path / "out")) > len(first) and not general.exists()


def test_collect_counts_a_row_without_token_ids_as_too_short(run, recited, tmp_path):
    rows = [*recited.tolist(), []]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    good(run(f"collect {LOOSE}", tmp_path / "c.jsonl"))
    assert collected(tmp_path / "out")["report"]["removed"]["too short"] == 1


def test_collect_reads_text_and_counts_empty_and_short_lines(run, tmp_path):
    letters = np.random.default_rng(0).integers(97, 123, size=(3, 20)).astype(np.uint8)
    lines = ["", *(bytes(row).decode() for row in letters), "short", ""]
    (tmp_path / "corpus.txt").write_text("\n".join(lines) + "\n")
    loosest = "--min-accuracy 0 --max-distance 1000"
    good(run(f"collect {loosest} {LOOSE}", tmp_path / "corpus.txt"))
    assert collected(tmp_path / "out")["report"]["removed"]["too short"] == 3
    assert {row["all"] for row in rows_of(tmp_path / "out")} == {line[:16] for line in lines[1:4]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "data must be given for"),
        ("--key body", "key must be given with --data, got 'body' alone"),
        ("--data nowhere.npy", "nowhere.npy"),
        ("--windows all", 'unable to convert "all" into int'),
        ("--min-accuracy 90", "min_accuracy must be a number in [0, 1], got 90"),
        ("--seed -1", "seed must be a whole number from 0 on, got -1"),
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_collect_finds_mistakes_before_the_model_is_loaded(run, arguments, message):
    one_error(run(f"collect {arguments}"), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--n-dev 50", "n_dev must leave"), ("--n-prefix 90", "n_prefix + n_suffix must be at most")],
)
def test_collect_names_what_was_wrong_and_writes_nothing(run, corpus, tmp_path, arguments, message):
    one_error(run(f"collect {LOOSE}", corpus, *arguments.split()), message)
    assert not (tmp_path / "out" / "sequences.jsonl").exists()


@pytest.fixture
def on_filter(monkeypatch):
    """Do something, with the number of the call, before each chunk is searched."""
    from tl_localize.collect.filter import Filter

    right = Filter.filter
    calls = []

    def install(action):
        def watched(self, *stream):
            calls.append(stream)
            action(len(calls))
            return right(self, *stream)

        monkeypatch.setattr(Filter, "filter", watched)
        return calls

    return install


def interrupt_second(call):
    if call == 2:
        raise KeyboardInterrupt


@pytest.mark.usefixtures("small_chunks")
def test_status_of_a_collection(run, corpus, tmp_path):
    out = tmp_path / "out"
    command = f"collect {LOOSE}"
    run(command, corpus, "--shard", "2/2")
    assert counts(good(tell("status", out)))["collect"] == ["5", "2", "0", "3"]
    assert not (out / "report.csv").exists()
    assert "accuracy" in good(run(command, corpus)).stdout
    assert pd.read_csv(out / "report.csv")["removed"].sum() >= 4
    one_error(tell("table", out), "folder must hold results of inj, del, rev")


def counts(status):
    """Planned, done, failed and missing by label, of what tl-localize status prints."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in status.stdout.splitlines()]
    return {row[0]: row[1:5] for row in rows if len(row) > 5}


def test_a_terminal_shows_a_bar(capsys, monkeypatch):
    from tl_localize.execution import Steps
    from tl_localize.execution.run import show_progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    steps = Steps()
    with show_progress(steps, 1, True):
        steps.report(0.25, "zero_out on s1")
    assert re.search("left.*zero_out on s1: 25%", capsys.readouterr().err)


# del


@pytest.mark.usefixtures("undrawn")
def test_del_writes_tables_frame_and_settings(run, collection, tmp_path, monkeypatch):
    methods = "--methods activations,integrated_gradients"
    result = good(run(f"del --ratio 0.1 --ratio 0.05 {methods} --data", collection))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    tables = {"del.md", "del.tex", "del_tests.md", "del_memorization.md"}
    assert tables | {"frame.csv", "before.csv", "settings.json"} <= names
    assert "Random" in result.stdout
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    assert frame["sequence_id"].nunique() == len(rows_of(collection)) - 2  # but the dev ones
    assert set(frame["ratio"]) == {0.05, 0.1}
    # a narrow terminal has room for Self and Neg alone
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    shown = good(tell("table", tmp_path / "out")).stdout
    assert "Self-Acc" in shown and "Neg-Acc" in shown and "PPL" not in shown
    assert "Activations" in shown and "…" not in shown


def test_del_of_some_targets_draws_figures(run, collection, tmp_path):
    good(run("del --ratio 0.05 --targets 2 --methods activations --data", collection))
    out = tmp_path / "out"
    assert pd.read_csv(out / "frame.csv")["sequence_id"].nunique() == 2
    names = {"del_confusion.svg", "del_forgetting.png"}
    assert names <= {path.name for path in out.iterdir()}
    page = (out / "report.html").read_text()
    for name in ("del_confusion", "del_forgetting"):
        assert b64encode((out / f"{name}.png").read_bytes()).decode() in page


@pytest.mark.usefixtures("undrawn")
def test_del_reads_the_authors_formats(run, general, recited, tmp_path):
    import torch

    torch.save(torch.tensor(recited).long(), tmp_path / "pile.pt")
    command = f"del --ratio 0.1 --methods activations --n-dev 3 --general {general} --data"
    good(run(command, tmp_path / "pile.pt", "--n-prefix", 4))
    assert pd.read_csv(tmp_path / "out" / "frame.csv")["sequence_id"].nunique() == N_ROWS - 3
    rows = [
        {"prompt": f"{i}abc", "all": f"{i}abcdefgh", "prompt_len": 4, "category": ["letters"]}
        for i in range(6)
    ]
    manual = tmp_path / "manual.jsonl"
    manual.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    good(run(command, manual, "--ablation", "mean", out="manual"))
    assert (tmp_path / "manual" / "del_categories.md").is_file()
    assert "mean" in (tmp_path / "manual" / "del.md").read_text()


def test_options_of_data_hold_for_what_collect_wrote(collection, model_dir):
    from tl_localize import load_model
    from tl_localize.evals.settings import del_data
    from tl_localize.texts.readers import Data

    model = load_model(model_dir, "cpu")
    whole, n_dev, _ = del_data(model, Data(source=collection))
    cut, n_dev_of_cut, _ = del_data(model, Data(source=collection, n_prefix=3, n_suffix=5))
    assert n_dev_of_cut == n_dev == 2
    assert [del_data(model, Data(source=collection), n_dev=n)[1] for n in (0, 3)] == [0, 3]
    assert [(s.id, s.n_prefix, len(s)) for s in cut] == [(s.id, 3, 8) for s in whole]
    assert [s.id for s in whole] == [row["id"] for row in rows_of(collection)]
    with pytest.raises(ValueError, match="row must have the column 'author'"):
        del_data(model, Data(source=collection, id="author"))


def test_a_collection_without_general_text_takes_docstrings(collection, model_dir):
    from tl_localize import load_model
    from tl_localize.evals.settings import DEL_GENERAL, del_data
    from tl_localize.texts.readers import Data
    from tl_localize.texts.reference import held_out_tokens

    (collection / "general.safetensors").unlink()
    model = load_model(model_dir, "cpu")
    _, _, general = del_data(model, Data(source=collection))
    assert general.equal(held_out_tokens(model)[:DEL_GENERAL])


@pytest.mark.usefixtures("undrawn")
def test_a_model_without_a_tokenizer_takes_token_ids(model_dir, corpus, general, tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        copy(model_dir / name, folder)
    model = ("--model", folder, "--out")
    found = good(tell(f"collect {LOOSE}", corpus, *model, tmp_path / "found"))
    next_step = f"Next: tl-localize del --model '{folder}' --data {tmp_path / 'found'}"
    assert next_step in found.stderr  # as a shell takes it
    data = f"--data {tmp_path / 'found'} --general {general}"
    done = good(
        tell(f"del --ratio 0.1 --methods activations --targets 99 {data}", *model, tmp_path / "del")
    )
    n = len(rows_of(tmp_path / "found")) - 2
    assert f"{n} of {n} sequences are targets (2 dev sequences left out)" in done.stderr
    before = pd.read_csv(tmp_path / "del" / "before.csv")
    assert (before["length"] == 12).all()  # tokens


@pytest.mark.usefixtures("undrawn")
def test_del_takes_tokens_and_named_columns(run, general, recited, tmp_path):
    np.save(tmp_path / "tokens.npy", recited.astype(np.uint16))
    table = pd.DataFrame({"body": recited.astype(int).tolist(), "who": "w", "kind": "k", "n": 4})
    table["who"] += table.index.astype(str)
    table.to_parquet(tmp_path / "table.parquet")
    command = f"del --ratio 0.1 --methods activations --general {general} --data"
    good(run(command, tmp_path / "tokens.npy", "--n-prefix", 4, out="plain"))
    named = ["--key", "body", "--id", "who", "--category", "kind", "--n-prefix", "n"]
    good(run(command, tmp_path / "table.parquet", *named, out="named"))
    plain, named = (pd.read_csv(tmp_path / name / "frame.csv") for name in ("plain", "named"))
    assert set(plain["sequence_id"].str[0]) == {"s"} and set(named["sequence_id"].str[0]) == {"w"}
    assert plain["delta_self_accuracy"].tolist() == named["delta_self_accuracy"].tolist()


@pytest.mark.usefixtures("undrawn", "few_texts")
def test_del_of_known_texts_chooses_its_shares(run, tmp_path):
    command = "del --methods activations --min-accuracy 0 --limit 3 --max-others-lost 100"
    part = good(run(f"{command} --shard 1/3", out="part"))
    assert "the other shards, and then this command without --shard, compute" in part.stderr
    result = good(run(command))
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    shares = sorted(set(40 * frame["ratio"]))
    assert shares == pytest.approx([1, 2, 4, 8, 16, 32])
    assert frame["sequence_id"].nunique() == 3
    assert "Perplexity of general text: at most" in result.stdout
    refused = run("del --methods activations --min-accuracy 1", out="none")
    one_error(refused, "recites none of the known texts")
    assert "0 texts are too few for a mean. Of min_accuracy 0.9 keeps 0" in refused.stderr


@pytest.mark.usefixtures("undrawn", "few_texts")
def test_tune_takes_known_texts_that_del_does_not_take(run, tmp_path):
    grid = tmp_path / "grid.json"
    grid.write_text('{"slimming": {"steps": [1, 2]}}')
    command = "tune --benchmark del --method slimming --ratio 0.1 --min-accuracy 0 --grid"
    good(run(command, grid, out="tuned"))
    good(run("del --methods random --ratio 0.1 --min-accuracy 0", out="del"))
    dev, test = (pd.read_csv(tmp_path / name / "frame.csv") for name in ("tuned", "del"))
    assert dev["sequence_id"].nunique() == 5
    assert not set(dev["sequence_id"]) & set(test["sequence_id"])
    assert best_of(tmp_path / "tuned")["settings"]["slimming"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ratio 0.001", "ratio must select 1 to 40 neurons, got 0.001"),
        ("--limit 1", "limit must be more than the 2 dev sequences, got 1. Write --limit 4"),
        ("--units heads --methods random", "ratio must select 1 to 2 heads, got 0.17"),
    ],
)
def test_del_explains_a_mistake_in_one_line(run, collection, arguments, message):
    one_error(run(f"del {arguments} --data", collection), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--methods actvations", "Did you mean activations"),
        ("--data . --n-prefix 0", "n_prefix must be a whole number from 1 on, got 0"),
        ("--data . --n-prefix -3", "n_prefix must be a whole number from 1 on, got -3"),
        ("--limit 0", 'Invalid value "0" for --limit. Must be >= 1.'),
        ("--ablation one", "Choose from"),
        ("--units heds", "Choose from"),
        ("--dtype float8", "Choose from"),
        ("--data nowhere", "nowhere"),
        ("--n-dev -1", "n_dev must be a whole number from 0 on, got -1"),
        ("--n-dev 3 --model .", "n_dev must be left out where a model that is not shipped has no"),
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
    from tl_localize.texts.readers import Data

    def search(model):
        criteria = Criteria(n_prefix=4, n_suffix=12, min_distinct=1, max_jaccard=1)
        corpus = Data(source=torch.from_numpy(recited), name="training texts")
        return Search(model, chunks_of([corpus], length=criteria.length), criteria)

    general = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("tl_localize.collect.search.CHUNK_WINDOWS", 2)
    for name, value in (
        ("collecting.reference_search", search),
        ("collecting.held_out_tokens", lambda: general),
    ):
        monkeypatch.setattr(f"tl_localize.cli.{name}", value)
    load = lambda *a: load_model(model_dir, device="cpu")  # noqa: E731
    monkeypatch.setattr("tl_localize.model.loading.load_model", load)


@pytest.mark.usefixtures("undrawn", "default_data")
def test_del_collects_in_the_machinery_of_runs(tmp_path, on_filter):
    out = tmp_path / "out"
    command = f"del --model reference --n-dev 2 --methods activations --ratio 0.1 --out {out}"
    calls = on_filter(interrupt_second)
    assert tell(command).exit_code == 130
    assert counts(tell("status", out / "collection"))["collect"] == ["5", "1", "0", "4"]
    shard = tell(f"{command} --shard 1/2 -v")
    assert shard.exit_code == 1  # DEL is not done: an array job must not count as done
    assert shard.stderr.count("collect on ") == 2  # of chunks 0, 2 and 4 the first was there
    assert "2 of 5 chunks are missing" in shard.stderr
    good(tell(command))
    assert len(calls) == 1 + 5
    assert (out / "frame.csv").is_file()


@pytest.fixture
def tuning(tmp_path):
    """A command that tunes two settings of Slimming."""
    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({"slimming": {"steps": [2, 4]}}))
    return f"tune --benchmark del --method slimming --grid {grid}"


def numbers(folder):
    """Every table, and what is behind it but the seconds that it took."""
    found = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in (".csv", ".md", ".tex")
    }
    frame = pd.read_csv(folder / "frame.csv").drop(columns="seconds")
    return found | {"frame.csv": frame.to_csv()}


@pytest.mark.usefixtures("undrawn")
def test_del_in_pieces_is_del_in_one_and_the_folder_tells_of_it(
    run, collection, tmp_path, monkeypatch
):
    from tl_localize import Activations

    out, whole = tmp_path / "out", tmp_path / "whole"
    command = f"del --targets 3 --ratio 0.05 --methods activations --data {collection}"
    good(run(f"{command} --ratio 0.1", out="whole"))
    part = good(run(f"{command} --shard 2/3"))
    assert "measurements MISSING" in part.stdout
    assert "Next: the other shards compute the 4 results not there yet." in part.stderr
    assert counts(tell("status", out))["activations"] == ["3", "1", "0", "2"]
    good(run(command))
    with monkeypatch.context() as patch:
        patch.setattr(
            Activations, "attribute_batch", lambda *a: pytest.fail("scores computed again")
        )
        # of the new ratio alone
        assert run(f"{command} --ratio 0.1 -v").stderr.count(" on row-") == 3 * 2
    assert numbers(out) == numbers(whole)
    for path in out.glob("*.csv"):
        path.unlink()
    good(tell("table", out))
    assert numbers(out) == numbers(whole)
    next((out / "steps" / "del").iterdir()).write_bytes(b"damaged")
    assert tell("table", out).exit_code == 1


@pytest.mark.usefixtures("undrawn")
def test_del_records_a_failure_and_tries_again(run, collection, tmp_path, monkeypatch):
    from tl_localize import Activations

    right = Activations.attribute_batch
    broken = {"row-6"}
    scored = []

    def wrong(self, neurons, sequences, report):
        names = {sequence.id for sequence in sequences}
        if names & broken:
            raise ValueError("loss must be finite, got nan")
        scored.append(names)
        return right(self, neurons, sequences, report)

    monkeypatch.setattr(Activations, "attribute_batch", wrong)
    command = f"del --methods activations --ratio 0.1 --targets 3 --data {collection}"
    result = run(command)
    assert result.exit_code == 1, result.output
    assert "FAILED activations on row-" in result.stderr
    assert "the command that asked for them tries again" in result.stderr
    missing = tmp_path / "out" / "missing.csv"
    assert pd.read_csv(missing)["reason"].tolist() == ["ValueError: loss must be finite, got nan"]
    broken.clear()
    scored.clear()
    good(run(command))
    assert scored == [{"row-6"}]  # the others are not scored again
    assert not missing.exists()


# tune


@pytest.mark.usefixtures("undrawn")
def test_tune_needs_a_dev_sequence(run, collection, tuning):
    one_error(run(f"{tuning} --ratio 0.1 --n-dev 0 --data", collection), "n_dev must leave a sequ")


def test_tune_del_ranks_a_grid_on_the_dev_sequences_and_del_reads_it(
    run, collection, tuning, tmp_path
):
    command = f"{tuning} --ratio 0.1 --data"
    tuned = tmp_path / "tuned"
    part = good(run(command, collection, "--shard", "1/2", out="tuned"))
    assert "MISSING: the ranking is of what is there" in part.stderr
    assert not (tuned / "best_settings.json").exists()
    result = good(run(command, collection, out="tuned"))
    assert "score" in result.stdout
    dev = {row["id"] for row in rows_of(collection) if row["split"] == "dev"}
    assert set(pd.read_csv(tuned / "frame.csv")["sequence_id"]) == dev
    record = best_of(tuned)
    assert "dev sequences of del, ratio 0.1; score: Neg minus Self, points" in record["rule"]
    best = record["settings"]["slimming"]
    used = ["--settings", tuned / "best_settings.json", "--data", collection]
    good(run("del --ratio 0.1 --methods slimming", *used))
    read = methods_of(tmp_path / "out")["slimming"]
    assert read["steps"] == best["steps"] and read["first_layer"] == 1
    injected = run("inj --ratio 0.1 --limit 1 --max-steps 2 --methods slimming", *used, out="inj")
    assert injected.exit_code != 2, injected.output  # of all layers
    table = good(tell("table", tuned))
    assert table.stdout.splitlines()[:4] == result.stdout.splitlines()[:4]


@pytest.mark.usefixtures("undrawn")
def test_del_and_tune_of_heads(run, collection, tuning, tmp_path):
    methods = "attribution,iterative_attribution"
    heads = f"--units heads --ratio 0.5 --data {collection}"
    result = good(run(f"del --methods {methods} {heads}"))
    assert "they were chosen for neurons, not heads" in result.stderr
    frame = pd.read_csv(tmp_path / "out" / "frame.csv")
    assert set(frame["n_neurons"]) == {1}
    assert set(frame["method"]) == {*methods.split(","), "random"}
    record = settings_of(tmp_path / "out")
    assert record["settings"]["units"] == {"class": "AttentionHeads"}
    assert methods_of(tmp_path / "out")["iterative_attribution"]["share"] == 0.5
    assert "[tiny, AttentionHeads]" in (tmp_path / "out" / "del.md").read_text()
    good(run(f"{tuning} {heads}", out="tuned"))
    assert best_of(tmp_path / "tuned")["settings"]["slimming"]["steps"] in (2, 4)


# ---- a model of one layer


@pytest.fixture
def one_layer(model_dir, tmp_path):
    """The first layer of the tiny model."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    path = tmp_path / "one-layer"
    GPT2LMHeadModel.from_pretrained(model_dir, n_layer=1).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(path)
    return path


@pytest.mark.usefixtures("few_texts", "undrawn")
def test_the_only_layer_is_not_spared(one_layer, first_corpus, tmp_path):
    given = ["--model", one_layer, "--device", "cpu"]
    texts = ["--n-prefix", "4", "--n-dev", "2", "--data", first_corpus, *given]
    command = "del --targets 1 --ratio 0.5 --methods slimming,activations --set slimming.steps=2"
    good(tell(command, "--out", tmp_path / "out", *texts))
    record = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert record["settings"]["first_layer"] == 0
    text = ["--prefix", "Two roads", "--suffix", " diverged", "--force", *given]
    result = good(tell("localize --ratio 0.1", *text))
    assert "names 4 neurons from layer 0 on: 4 neurons of each layer (10 %)" in result.stdout


@pytest.fixture
def half_recited(recited, tmp_path):
    """Two texts that the model recites, and one that it does not."""
    noise = np.random.default_rng(1).integers(256, size=LENGTH)
    rows = [*recited[:2].tolist(), noise.tolist()]
    path = tmp_path / "half.jsonl"
    lines = [json.dumps({"tokens": row, "n_prefix": 4, "id": f"{i}"}) for i, row in enumerate(rows)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.usefixtures("undrawn")
def test_del_says_which_texts_are_not_recited_and_leaves_them_out_if_asked(
    run, half_recited, tmp_path
):
    del_ = "del --methods activations --n-dev 0 --ratio 0.1 --data"
    told = good(run(del_, half_recited, out="all"))
    assert "1 of 3 texts are recited at less than 0.7: there is little" in told.stderr
    assert pd.read_csv(tmp_path / "all" / "frame.csv")["sequence_id"].nunique() == 3
    left_out = good(run(del_, half_recited, "--min-accuracy", "0.9", out="some"))
    assert "are recited at less" not in left_out.stderr
    ids = pd.read_csv(tmp_path / "some" / "frame.csv", dtype={"sequence_id": str})["sequence_id"]
    assert set(ids) == {"0", "1"}
    lines = half_recited.read_text().splitlines()
    half_recited.write_text("\n".join(reversed(lines)))  # the first one is not recited
    good(
        run(
            del_.replace("--n-dev 0", "--n-dev 2"), half_recited, "--min-accuracy", "0.9", out="dev"
        )
    )
    ids = pd.read_csv(tmp_path / "dev" / "frame.csv", dtype={"sequence_id": str})["sequence_id"]
    assert set(ids) == {"0"}  # the second one stays a dev text


@pytest.mark.usefixtures("undrawn")
def test_del_refuses_an_accuracy_that_no_text_reaches(run, recited, tmp_path):
    path = tmp_path / "none.jsonl"
    noise = np.random.default_rng(1).integers(256, size=LENGTH)
    path.write_text(json.dumps({"tokens": noise.tolist(), "n_prefix": 4}))
    refused = run("del --n-dev 0 --min-accuracy 1 --data", path)
    one_error(refused, "min_accuracy must be one that a text of the data reaches, got 1")


@pytest.mark.usefixtures("undrawn")
def test_del_says_that_one_text_has_no_others(run, recited, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"tokens": recited[0].tolist(), "n_prefix": 4}))
    result = run("del --methods activations --n-dev 0 --ratio 0.1 --data", path)
    assert "There is no other text, so what others lose (Neg) is not measured." in result.stderr


def test_del_says_what_every_neuron_by_zero_out_costs(run, recited, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"tokens": recited[0].tolist(), "n_prefix": 99}))
    asked = "del --methods zero_out --data"
    cost = "Zero-Out ablates every neuron, one after the other"
    assert cost in run(asked, path).stderr
    assert cost not in run(f"{asked} {path} --set", "zero_out.screen=0.1").stderr


@pytest.mark.usefixtures("undrawn")
def test_the_seed_of_del_is_that_of_its_draws_and_of_random(run, collection, tmp_path):
    good(run("del --ratio 0.1 --targets 1 --methods activations --seed 7 --data", collection))
    assert settings_of(tmp_path / "out")["settings"]["seed"] == 7
    assert methods_of(tmp_path / "out")["random"]["seed"] == 7


def test_nine_right_tokens_of_ten_are_nine_tenths(monkeypatch):
    """In float32 their share is less."""
    import torch

    from tl_localize.cli import benchmarks

    shares = torch.tensor([0.9, 0.89, 1.0])
    assert shares.tolist()[0] < 0.9
    monkeypatch.setattr(benchmarks, "check_sequences", lambda model, texts: texts)
    monkeypatch.setattr(benchmarks, "accuracy", lambda model, texts: shares)
    assert benchmarks.recited_of(None, ["nine", "less", "all"], 0.9) == ["nine", "all"]


@pytest.mark.usefixtures("few_texts", "undrawn")
def test_tune_does_not_spare_the_only_layer(one_layer, first_corpus, tuning, tmp_path):
    texts = ["--n-prefix", "4", "--n-dev", "2", "--data", first_corpus]
    out = tmp_path / "tuned"
    good(tell(f"{tuning} --ratio 0.5 --device cpu --model", one_layer, "--out", out, *texts))
    assert settings_of(out)["settings"]["first_layer"] == 0


@pytest.mark.usefixtures("undrawn", "few_texts")
def test_a_shard_of_del_does_not_choose_the_last_share_by_its_own_targets(run, tmp_path):
    command = "del --methods activations --min-accuracy 0 --limit 3 --max-others-lost 100"
    for shard in ("1/3", "2/3"):
        good(run(f"{command} --shard {shard}"))
        frame = pd.read_csv(tmp_path / "out" / "frame.csv")
        assert (40 * frame["ratio"]).unique() == pytest.approx([1])
