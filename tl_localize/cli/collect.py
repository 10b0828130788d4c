"""tl-localize collect"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tl_localize.cli.options import ModelOptions, RowOptions, RunOptions, check_at_least, say
from tl_localize.cli.running import compute
from tl_localize.collect import Collection, Criteria, Report
from tl_localize.collect.collection import check_draw
from tl_localize.collect.criteria import NEAR, SURPLUS
from tl_localize.collect.reference_texts import (
    TRAINING,
    reference_search,
    reference_tables,
    with_planted,
)
from tl_localize.collect.search import Search, SearchResults, chunks_of, parse_windows
from tl_localize.evals.presets import GENERAL
from tl_localize.execution import Store
from tl_localize.files import prepare_folder, save_tensors, write_text
from tl_localize.models import is_reference
from tl_localize.neurons import LanguageModel
from tl_localize.reference import GENERAL_LENGTH, N_DEV, held_out_tokens, lacking_texts
from tl_localize.report.tables import save_table
from tl_localize.report.terminal import console, plain

PAPER = Criteria()
FEW = 20  # test sequences below which a mean over targets says little


def collect(
    *,
    data: Annotated[
        list[Path] | None, typer.Option(help="Texts, JSON lines, tokens, or a table; many times.")
    ] = None,
    on: ModelOptions,
    rows: RowOptions,
    windows: Annotated[
        str, typer.Option(help="Of each row: first, or one every N tokens.")
    ] = "first",
    n_prefix: Annotated[int, typer.Option(help="Tokens that prompt the model.")] = PAPER.n_prefix,
    n_suffix: Annotated[int, typer.Option(help="Tokens that it must recite.")] = PAPER.n_suffix,
    min_accuracy: Annotated[float, typer.Option(help="Of the suffix, teacher-forced.")] = float(
        PAPER.min_accuracy
    ),
    max_distance: Annotated[
        int, typer.Option(help="Characters between the greedy continuation and the suffix.")
    ] = PAPER.max_distance,
    min_distinct: Annotated[
        int, typer.Option(help="Distinct tokens in the suffix, true and generated.")
    ] = PAPER.min_distinct,
    max_jaccard: Annotated[
        float, typer.Option(help="Near-duplicates share more n-grams than this.")
    ] = float(PAPER.max_jaccard),
    ngram: Annotated[int, typer.Option(help="Tokens of an n-gram.")] = PAPER.ngram,
    n_dev: Annotated[
        int, typer.Option(help="Sequences drawn to choose hyperparameters; they come first.")
    ] = N_DEV,
    n_max: Annotated[
        int | None,
        typer.Option(
            help="Draw at most so many of what is found, dev ones included (the paper: 505)."
        ),
    ] = None,
    n_general: Annotated[
        int, typer.Option(help="Sequences of 128 tokens for the perplexity, at most.")
    ] = 2048,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    run: RunOptions,
) -> None:
    """Find the sequences of a corpus that a model has memorized, for tl-localize del.

    Writes them with a report (how many each criterion removed, with examples) and general text for
    the perplexity. Without data a reference model's own training texts are searched. The corpus is
    searched in chunks, each of which is kept: a collection that was interrupted goes on with the
    same command, and the last step is made once all chunks are there. Exit status 1: a chunk
    failed; 130: interrupted.
    """
    stride = parse_windows(windows)
    criteria = Criteria(
        **{name: value for name, value in run.options.items() if name in asdict(PAPER)}
    )
    check_draw(n_dev, n_max, seed)
    check_at_least(1, n_general=n_general)
    given = [one for path in data or [None] if (one := rows.data(path))]
    if not given and not is_reference(on.model):
        raise ValueError(
            f"data must be given for {on.model!r}, whose training text is not shipped, got none. "
            "Name a corpus with --data."
        )
    chunks = chunks_of(given, stride, criteria.length)
    store = Store(run.folder("collect", on.short))
    model = on.load()
    for one in given:
        one.checked(model)
    if not given and (lacking := lacking_texts()):
        say(lacking)
    search = (
        Search(model, chunks, criteria, stride)
        if given
        else reference_search(model, criteria, stride)
    )
    found = searched(search, store, run, on.load, "this makes the collection")
    collection = search.collection(found, n_dev=n_dev, n_max=n_max, seed=seed)
    collection = collection if given else with_planted(model, collection)
    collection.save(store.folder)
    show_collection(collection, store.folder, planted=not given)
    try:
        general = (
            search.general_text(collection.sequences, n_general, GENERAL_LENGTH, seed=seed)
            if given
            else held_out_tokens()[:n_general]
        )
        save_tensors(store.folder / GENERAL, {"tokens": general.int()}, {})
    except ValueError as error:
        say(
            f"No text for the perplexity: {error} Or give tl-localize del another file with "
            "--general."
        )
    typer.echo(f"Use them: tl-localize del --model {on.model} --data {store.folder}")


def searched(
    search: Search, store: Store, run: RunOptions, load: Callable[[], LanguageModel], then: str
) -> SearchResults:
    """All chunks of a search. Leaves where it was interrupted or chunks are missing, and says what
    the command does once they are there.
    """
    if not compute([(search, [])], store, run, load):
        raise typer.Exit(130)
    found = SearchResults.of(store)
    if not found.missing:
        return found
    show_report(found.report)
    failed = {name: reason for name, reason in found.missing.items() if reason}
    for name, reason in failed.items():
        say(f"FAILED collect on {name}: {reason.splitlines()[0]}")
    again = re.sub(r" --shard[ =]\S+", "", shlex.join(["tl-localize", *sys.argv[1:]]))
    again += " --retry-failed" if failed and "--retry-failed" not in again else ""
    why = (
        f", of which {len(failed)} failed (tracebacks are in the folder's failures)"
        if failed
        else ""
    )
    when = (
        "Once the other shards are done"
        if len(found.missing) > len(failed)
        else "When they are searched after all"
    )
    say(
        f"{len(found.missing)} of {len(found.chunks)} chunks are missing{why}. {when}, {then}:\n  "
        f"{again}"
    )
    raise typer.Exit(1 if failed else 0)


def publish_collect(store: Store, folder: Path) -> None:
    """The report of a collection, and of the training texts the tables, from its folder: as far as
    it is made.
    """
    report = SearchResults.of(store).report
    if not (collection := made_collection(store.folder, report)):
        say(
            "The last step is still to be made, by the same command of tl-localize collect. What "
            "was found in the chunks that are done:"
        )
        show_report(report)
        return
    write_text(prepare_folder(folder) / "report.csv", collection.report.table().to_csv())
    show_collection(
        collection, folder, planted=store.plans()[-1].plan.settings["data"] == [TRAINING]
    )


def made_collection(folder: Path, so_far: Report) -> Collection | None:
    """The collection of a folder; None where the last step was not made, or not from the chunks
    that are there.
    """
    try:
        collection = Collection.load(folder)
    except FileNotFoundError:
        return None
    last = {**collection.report.removed, "came in": collection.report.n_in}
    alone = {name: n for name, n in so_far.removed.items() if name not in (NEAR, SURPLUS)} | {
        "came in": so_far.n_in
    }
    return collection if alone.items() <= last.items() else None


def show_report(report: Report) -> None:
    console().print(plain(report.table()[["removed", "left"]]))


def show_collection(collection: Collection, folder: Path, *, planted: bool) -> None:
    """The report, and of the reference models' own texts the tables, of which the first rows go to
    the terminal.
    """
    show_report(collection.report)
    tables = reference_tables(collection) if planted else {}
    for name, (table, caption) in tables.items():
        save_table(table, folder, name, caption)
        console().print(f"{caption}\n", plain(table.head(10)), sep="\n", markup=False)
    typer.echo(
        f"{len(collection.sequences)} memorized sequences ({collection.n_dev} of them dev), the "
        f"report and its examples: {folder}"
    )
    if (n_test := len(collection.sequences) - collection.n_dev) < FEW:
        what = (
            f"{n_test} target{'s' * (n_test > 1)} and {n_test - 1} others that must not be "
            "forgotten"
        )
        say(
            f"DEL would have {what}: enough for examples, too few for a mean. Give more text that "
            "the model saw often in training."
        )
