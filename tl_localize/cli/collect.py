"""tl-localize collect"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from tl_localize.cli.options import Device, Dtype, Model, errors_explained, parse_dtype, say
from tl_localize.cli.running import Address, Engine, Gpus, How, Quiet, RetryFailed, Shard, Verbose, Workers, again, work
from tl_localize.collect import (
    NEAR,
    SURPLUS,
    Collection,
    Criteria,
    Report,
    check_draw,
    collect_memorized,
    load_collection,
    origins,
    perplexity_split,
    token_windows,
)
from tl_localize.execution.store import Store, Unit, prepare_folder, write_text
from tl_localize.models import REFERENCE_MODELS, load_model
from tl_localize.neurons import LanguageModel
from tl_localize.readers import TOKEN_SUFFIXES, read_jsonl
from tl_localize.reference import N_DEV, changed_texts, general_texts, held_out_tokens, load_planted, reference_stream
from tl_localize.report.tables import save_table, to_markdown
from tl_localize.runs import CollectRun, Corpus, Search, collected
from tl_localize.scores import save_tensors

PAPER = Criteria()
GENERAL = "general.safetensors"  # in a collection's folder: text for the perplexity
GENERAL_LENGTH = 128
STREAM = "training stream"


def collect(
    data: Annotated[
        list[Path] | None,
        typer.Option(help=f"Text (one a line), .jsonl, or tokens ({', '.join(TOKEN_SUFFIXES)}); may be given many times."),
    ] = None,
    model: Model = "reference-gpt2",
    windows: Annotated[
        str, typer.Option(help="first: the first tokens of each row or text; any: wherever a row may be memorized; N: every N tokens.")
    ] = "first",
    key: Annotated[str, typer.Option(help="Key of the text in .jsonl files.")] = "text",
    n_prefix: Annotated[int, typer.Option(help="Tokens that prompt the model.")] = PAPER.n_prefix,
    n_suffix: Annotated[int, typer.Option(help="Tokens that it must recite.")] = PAPER.n_suffix,
    min_accuracy: Annotated[float, typer.Option(help="Of the suffix, teacher-forced.")] = float(PAPER.min_accuracy),
    max_distance: Annotated[int, typer.Option(help="Characters between the greedy continuation and the suffix.")] = PAPER.max_distance,
    min_distinct: Annotated[int, typer.Option(help="Distinct tokens in the suffix, true and generated.")] = PAPER.min_distinct,
    max_jaccard: Annotated[float, typer.Option(help="Near-duplicates share more n-grams than this.")] = float(PAPER.max_jaccard),
    ngram: Annotated[int, typer.Option(help="Tokens of an n-gram.")] = PAPER.ngram,
    n_dev: Annotated[int, typer.Option(help="Sequences drawn to choose hyperparameters; they come first.")] = N_DEV,
    n_max: Annotated[int | None, typer.Option(help="Draw at most so many of what is found, dev ones included (the paper: 505).")] = None,
    n_general: Annotated[int, typer.Option(help="Sequences of 128 tokens for the perplexity, at most.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    out: Annotated[Path | None, typer.Option(help="Folder of the collection. Default: ./tl-localize-results/collect-MODEL.")] = None,
    engine: Engine = "process",
    address: Address = None,
    workers: Workers = None,
    gpus: Gpus = None,
    shard: Shard = "1/1",
    retry_failed: RetryFailed = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Find the sequences of a corpus that a model has memorized, for tl-localize del.

    Writes them with a report (how many each criterion removed, with examples) and general text for the perplexity. Without data a
    reference model's own training stream is searched. The corpus is searched in chunks, each of which is kept: a collection that was
    interrupted goes on with the same command, and the last step is made once all chunks are there. Exit status 1: a chunk failed; 130:
    interrupted.
    """
    with errors_explained():
        stride = parse_windows(windows)
        criteria = Criteria(
            n_prefix=n_prefix,
            n_suffix=n_suffix,
            min_accuracy=min_accuracy,
            max_distance=max_distance,
            min_distinct=min_distinct,
            max_jaccard=max_jaccard,
            ngram=ngram,
        )
        check_draw(n_dev, n_max)
        how = How(shard=shard, engine=engine, address=address, workers=workers, gpus=gpus, verbose=verbose, quiet=quiet)
        if n_general < 1:
            raise ValueError(f"n_general must be at least 1, got {n_general}. The paper has 2048.")
        if not data and model not in ("reference", *REFERENCE_MODELS):
            raise ValueError(f"data must be given for {model!r}, whose training text is not shipped, got none. Name a corpus with --data.")
        if data and len({path.stem for path in data}) < len(data):
            raise ValueError(f"data must be files of different names, got {', '.join(map(str, data))}. The ids are made of these names.")
        chunks = [
            chunk
            for path in data or []
            for chunk in Corpus(path, key).chunks(stride, criteria.length, f"{path.stem}/" if len(data or []) > 1 else "")
        ]
        store = Store(prepare_folder(out or Path("tl-localize-results") / f"collect-{Path(model).name}"))
        load = partial(load_model, model, device, parse_dtype(dtype))
        loaded = load()
        names = [path.name for path in data or []]
        search = Search(loaded, chunks, criteria, stride, names) if data else reference_search(loaded, criteria, stride)
        command = again(
            "collect",
            model=model,
            data=data,
            windows=windows,
            key=key,
            **asdict(criteria),
            n_dev=n_dev,
            n_max=n_max,
            n_general=n_general,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        run = CollectRun(store, search, command=command, retry_failed=retry_failed)
        found = searched(run, load, how, "this makes the collection", n_dev=n_dev, n_max=n_max, seed=seed)
        found = found if data else with_planted(loaded, found)
        found.save(store.folder)
        show_report(found.report)
        show_tables({} if data else reference_tables(found), store.folder)
        n_found = len(found.sequences)
        typer.echo(f"{n_found} memorized sequences ({n_dev} of them dev), the report and its examples: {store.folder}")
        try:
            heads = chain.from_iterable(chunk.windows(loaded, criteria, length=GENERAL_LENGTH) for chunk in search.chunks)
            general = perplexity_split(heads if data else held_out_tokens(), found.sequences, n_general, GENERAL_LENGTH, seed=seed)
            save_tensors(store.folder / GENERAL, {"tokens": general.int()}, {})
        except ValueError as error:
            say(f"No text for the perplexity: {error} Or give tl-localize del another file with --general.")
        typer.echo(f"Use them: tl-localize del --model {model} --data {store.folder}")


def searched(run: CollectRun, load: Callable[[], LanguageModel], how: How, then: str, **draw: Any) -> Collection:
    """What a search finds; what is missing is made first. Where it was interrupted or chunks are still missing it says so, and leaves.

    Args:
        then: what the command without ``--shard`` does once all chunks are there.
        draw: as of ``CollectRun.collection``.
    """
    if not work([run], load, how):
        raise typer.Exit(130)
    parts = run.parts()
    if None in parts:
        say_missing(run, [unit for work, part in zip(run.works, parts, strict=True) if part is None for unit in work.units], then)
    return run.collection(parts, **draw)


def say_missing(run: CollectRun, missing: Sequence[Unit], then: str) -> None:
    """Say what the last step waits for, and leave: with status 1 where a chunk could not be searched."""
    failures = run.store.failures()
    failed = [failures[unit.key] for unit in missing if unit.key in failures]
    for failure in failed:
        say(f"FAILED {failure['unit']}: {failure['reason'].splitlines()[0]}")
    words = ["tl-localize", *sys.argv[1:]]
    shards = [i for i, word in enumerate(words) if word == "--shard" or word.startswith("--shard=")]
    dropped = {*shards, *(i + 1 for i in shards if words[i] == "--shard")}
    words = [word for i, word in enumerate(words) if i not in dropped]
    words += ["--retry-failed"] if failed and "--retry-failed" not in words else []
    why = f", of which {len(failed)} failed (tracebacks are in the folder's failures)" if failed else ""
    when = "Once the other shards are done" if len(missing) > len(failed) else "When they are made after all"
    say(f"{len(missing)} of {len(run.works)} chunks are missing{why}. {when}, {then}:\n  {shlex.join(words)}")
    raise typer.Exit(1 if failed else 0)


def publish_collect(store: Store, folder: Path) -> None:
    """The report of a collection, and of a training stream the tables, from its folder: as far as it is made."""
    searched, found = collected(store), saved_collection(store.folder)
    last = {**found.report.removed, "came in": found.report.n_in} if found else {}
    alone = {name: n for name, n in searched.removed.items() if name not in (NEAR, SURPLUS)} | {"came in": searched.n_in}
    if found is None or not alone.items() <= last.items():
        say("The last step is still to be made, by the same command of tl-localize collect. What was found in the chunks that are done:")
        show_report(searched)
        return
    write_text(prepare_folder(folder) / "report.csv", found.report.table().to_csv())
    show_report(found.report)
    show_tables(reference_tables(found) if store.plans()[-1]["value"]["data"] == [STREAM] else {}, folder)
    typer.echo(f"{len(found.sequences)} memorized sequences ({found.n_dev} of them dev): {store.folder}")


def show_report(report: Report) -> None:
    """What each criterion removed, on the terminal."""
    typer.echo(f"\n{to_markdown(report.table()[['removed', 'left']])}\n")


def show_tables(tables: Mapping[str, tuple[pd.DataFrame, str]], folder: Path) -> None:
    """Tables with their captions into a folder, and their first rows on the terminal."""
    for name, (table, caption) in tables.items():
        save_table(table, folder, name, caption)
        typer.echo(f"{caption}\n\n{to_markdown(table.head(10))}\n")


def saved_collection(folder: Path) -> Collection | None:
    """What ``Collection.save`` wrote; None where it has not.

    Raises:
        ValueError: a file is not what it wrote.
    """
    try:
        sequences, n_dev = load_collection(folder)
        text = (folder / "settings.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    rows = [row for _, row in read_jsonl(folder / "sequences.jsonl", "prompt", "all")]
    try:
        frame = pd.DataFrame({name: [row[name] for row in rows] for name in ("id", "split", "accuracy", "distance")}).assign(
            category=[sequence.category for sequence in sequences],
            prefix=[row["prompt"] for row in rows],
            suffix=[row["all"][len(row["prompt"]) :] for row in rows],
        )
        settings = json.loads(text)
        return Collection(sequences, n_dev, frame, Report(**settings["report"]), Criteria(**settings["criteria"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"collection must be what tl-localize collect wrote, got {error!s} in {str(folder)!r}. Collect again.") from error


def parse_windows(text: str) -> int | str | None:
    """None for the first window, "any", or the tokens between windows."""
    if text in ("first", "any"):
        return None if text == "first" else text
    if not text.isdecimal() or not int(text):
        raise ValueError(f"windows must be first, any or a number of tokens from 1 on, got {text!r}. Use first, as the paper does.")
    return int(text)


def training_corpus(model: LanguageModel) -> Corpus:
    """The rows that the reference models were trained on."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    return Corpus(Path(STREAM), given=torch.from_numpy(reference_stream(tokenizer).rows))


def reference_search(model: LanguageModel, criteria: Criteria = PAPER, stride: int | str | None = None) -> Search:
    """The search of the reference models' training stream."""
    say("The reference models' training stream is made again from this Python's documentation.")
    if changed := changed_texts(general_texts()):
        say(
            f"{len(changed)} of its documents are not as they were in training, for another Python version ships other "
            "documentation: the natural sequences may differ, the planted ones do not."
        )
    return Search(model, training_corpus(model).chunks(stride, criteria.length), criteria, stride, [STREAM])


def collect_reference(model: LanguageModel, criteria: Criteria, **draw: Any) -> Collection:
    """What a reference model has memorized of its own training stream."""
    corpus = training_corpus(model)
    assert corpus.rows is not None
    return with_planted(model, collect_memorized(model, token_windows(corpus.rows, criteria.length), criteria, **draw))


def with_planted(model: LanguageModel, found: Collection) -> Collection:
    """The planted texts with their own names and categories; all others are ``natural``."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    planted = load_planted()
    known = tokenizer([text.text for text in planted], add_special_tokens=False)["input_ids"]
    which = origins([sequence.tokens.tolist() for sequence in found.sequences], known)
    names = {
        s.id: (planted[i].id, planted[i].category) if i >= 0 else (s.id, "natural") for s, i in zip(found.sequences, which, strict=True)
    }
    return found.labelled(names)


def reference_tables(found: Collection) -> dict[str, tuple[pd.DataFrame, str]]:
    """Tables and captions by name: which planted texts were found, by repetitions, and the natural ones."""
    names = set(found.frame["id"])
    planted = pd.DataFrame([{"repetitions": text.repetitions, "found": text.id in names} for text in load_planted()])
    counts: Any = planted.groupby("repetitions")["found"].agg(planted="size", found="sum")
    natural = found.frame[found.frame["category"] == "natural"].set_index("id")[["accuracy", "distance", "prefix", "suffix"]]
    natural = natural.assign(prefix=[repr(text) for text in natural["prefix"]], suffix=[repr(text) for text in natural["suffix"]])
    return {
        "planted": (counts, "Planted texts that were found, by how often they were repeated in training"),
        "natural": (natural, f"Memorized texts that nobody planted ({len(natural)})"),
    }
