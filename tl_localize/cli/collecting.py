"""tl-localize collect, and the collection that del and tune make where no data are given."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import typer

from tl_localize.cli.publish import say_failures
from tl_localize.cli.running import compute, data_of, folder_of, load, say
from tl_localize.collect import Collection, Criteria, perplexity_split
from tl_localize.collect.collection import check_draw
from tl_localize.collect.reference_texts import reference_search, training_data
from tl_localize.collect.search import Search, chunks_of
from tl_localize.evals.presets import DEL_GENERAL, GENERAL
from tl_localize.execution import Store
from tl_localize.files import save_tensors
from tl_localize.models import is_reference
from tl_localize.neurons import LanguageModel
from tl_localize.readers import Data
from tl_localize.reference import GENERAL_LENGTH, held_out_tokens
from tl_localize.report.terminal import show
from tl_localize.stats import counted

CRITERIA = Criteria.__dataclass_fields__


def run_collect(given: Namespace) -> None:
    criteria = Criteria(**{name: value for name, value in vars(given).items() if name in CRITERIA})
    draw = {"n_dev": given.n_dev, "n_max": given.n_max, "seed": given.seed}
    check_draw(**draw)
    data = [data_of(given, path) for path in given.data]
    if not data and not is_reference(given.model):
        raise ValueError(
            f"data must be given for {given.model!r}, whose training text is not shipped, got "
            "none. Name a corpus with --data."
        )
    chunks = chunks_of(data, given.windows, criteria.length)
    folder = folder_of(given, "collect", given.model)
    model = load(given)
    store = Store(folder)
    if not data:
        chunks = chunks_of([training_data(model)], given.windows, criteria.length)
    search = Search(model, chunks, criteria, given.windows)
    collection = collected(search, store, given, **draw)
    show(collection.report.table())
    n_found, n_dev = len(collection.sequences), collection.n_dev
    found = counted(n_found, "memorized sequence")
    typer.echo(f"{found} ({n_dev} of them dev): {store.folder}")
    try:
        general = held_out_tokens()
        if data:
            windows = (one for chunk in chunks for one in chunk.windows(model, GENERAL_LENGTH))
            rows = (window.tokens for window in windows)
            general = perplexity_split(rows, collection.sequences, seed=given.seed)
        save_tensors(store.folder / GENERAL, {"tokens": general.int()})
    except ValueError as error:
        say(f"No text for the perplexity: {error} Or give tl-localize del a file with --general.")
    typer.echo(f"Use them: tl-localize del --model {given.model} --data {store.folder}")


def collect_reference(given: Namespace, model: LanguageModel, folder: Path, n_dev: int) -> Data:
    """The collection of a reference model's own training texts, made where it is not there."""
    say("The reference model's memorized sequences are collected from its training texts.")
    search = reference_search(model)
    collected(search, Store(folder), given, undone=1, n_dev=n_dev)
    general = held_out_tokens()[:DEL_GENERAL]
    save_tensors(folder / GENERAL, {"tokens": general.int()})
    return Data(source=folder)


def collected(
    search: Search, store: Store, given: Namespace, *, undone: int = 0, **draw: Any
) -> Collection:
    """The collection that a search makes, in its folder. Leaves where it was interrupted or chunks
    are missing.

    Args:
        undone: the exit status where only the chunks of other shards are missing: not 0 where the
            search is only the beginning of the command.
    """
    if not compute(given, [(search, [])], store):
        raise typer.Exit(130)
    found = search.results(store)
    if None in found:
        failed = say_failures(store).reasons
        missing = f"{found.count(None)} of {len(found)} chunks are missing"
        say(f"{missing}. Once all are searched, the same command without --shard goes on.")
        raise typer.Exit(1 if failed else undone)
    collection = search.collection(found, **draw)
    collection.save(store.folder)
    return collection
