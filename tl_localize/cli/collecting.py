"""tl-localize collect, and the collection that del and tune make where no data are given."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import typer
from torch import Tensor

from tl_localize.cli.options import say
from tl_localize.cli.publish import print_collection, print_report
from tl_localize.cli.running import Run, data_of
from tl_localize.collect import Criteria
from tl_localize.collect.collection import check_draw
from tl_localize.collect.reference_texts import reference_search, with_planted
from tl_localize.collect.search import Search, SearchResults, chunks_of, parse_windows
from tl_localize.evals.presets import GENERAL
from tl_localize.execution import Store
from tl_localize.files import save_tensors
from tl_localize.models import is_reference
from tl_localize.neurons import LanguageModel
from tl_localize.reference import GENERAL_LENGTH, held_out_tokens, lacking_texts

COLUMNS = ("suffix", "key", "id", "category", "any_tokens")
CRITERIA = tuple(Criteria.__dataclass_fields__)


def run_collect(given: Namespace) -> None:
    run, stride = Run(given), parse_windows(given.windows)
    criteria = Criteria(**{name: vars(given)[name] for name in CRITERIA})
    check_draw(given.n_dev, given.n_max, given.seed)
    found = [data_of(given, path, *COLUMNS) for path in given.data or [None]]
    data = [one for one in found if one is not None]
    if not data and not is_reference(given.model):
        raise ValueError(
            f"data must be given for {given.model!r}, whose training text is not shipped, got "
            "none. Name a corpus with --data."
        )
    chunks = chunks_of(data, stride, criteria.length)
    store = run.store("collect", given.model)
    model = run.load()
    for one in data:
        one.checked(model)
    if data:
        search = Search(model, chunks, criteria, stride)
    else:
        say_lacking()
        search = reference_search(model, criteria, stride)
    results = searched(search, store, run)
    draw = {"n_dev": given.n_dev, "n_max": given.n_max, "seed": given.seed}
    collection = search.collection(results, **draw)
    if not data:
        collection = with_planted(model, collection)
    collection.save(store.folder)
    print_collection(collection, store.folder, of_reference=not data)
    try:
        general = held_out_tokens()[: given.n_general]
        if data:
            sizes = (given.n_general, GENERAL_LENGTH)
            general = search.general_text(collection.sequences, *sizes, seed=given.seed)
        save_tensors(store.folder / GENERAL, {"tokens": general.int()}, {})
    except ValueError as error:
        say(f"No text for the perplexity: {error} Or give tl-localize del a file with --general.")
    typer.echo(f"Use them: tl-localize del --model {given.model} --data {store.folder}")


def collect_reference(run: Run, model: LanguageModel, general: Tensor, folder: Path) -> Path:
    """The folder of the collection of a reference model's own training texts, made where it is not
    there.
    """
    say_lacking()
    search, store = reference_search(model), Store(folder)
    results = searched(search, store, run, undone=1)
    collection = search.collection(results, n_dev=run.given.n_dev)
    with_planted(model, collection).save(folder)
    save_tensors(folder / GENERAL, {"tokens": general.int()}, {})
    return folder


def say_lacking() -> None:
    if lacking := lacking_texts():
        say(lacking)


def searched(search: Search, store: Store, run: Run, undone: int = 0) -> SearchResults:
    """All chunks of a search. Leaves where it was interrupted or chunks are missing, and says how
    to go on. Where only the chunks of other shards are missing, ``undone`` is the exit status: not
    0 where the search is only the beginning of the command.
    """
    if not run.compute([(search, [])], store):
        raise typer.Exit(130)
    found = SearchResults.of(store)
    if not found.missing:
        return found
    print_report(found.report)
    failed = {name: reason for name, reason in found.missing.items() if reason}
    for name, reason in failed.items():
        say(f"FAILED collect on {name}: {reason.splitlines()[0]}")
    say(f"{len(found.missing)} of {len(found.chunks)} chunks are missing, {len(failed)} failed.")
    if failed:
        say("Tracebacks are in the folder's failures; --retry-failed searches them again.")
    say("Once all are searched, the same command without --shard goes on.")
    raise typer.Exit(1 if failed else undone)
