"""tl-localize collect, and the collection that del and tune make where no data are given."""

import sys
from pathlib import Path

from jaxtyping import Integer
from torch import Tensor

from tl_localize.cli.command_options import CollectOptions
from tl_localize.cli.messages import command, say, say_next
from tl_localize.cli.options import WHOLE, ModelOptions, RunOptions
from tl_localize.cli.publish import INTERRUPTED, say_failures
from tl_localize.cli.running import compute, folder_of
from tl_localize.collect import Collection, Criteria, perplexity_split
from tl_localize.collect.collection import check_draw
from tl_localize.collect.filter import Filtered
from tl_localize.collect.reference_texts import reference_search, training_data
from tl_localize.collect.search import Search, chunks_of
from tl_localize.evals.settings import DEL_GENERAL, GENERAL
from tl_localize.execution import Store, status
from tl_localize.files import save_tensors
from tl_localize.model.loading import is_reference
from tl_localize.model.neurons import LanguageModel
from tl_localize.report.terminal import show
from tl_localize.stats import quantity
from tl_localize.texts.readers import COLLECTED, Data
from tl_localize.texts.reference import GENERAL_LENGTH, held_out_tokens


def run_collect(options: CollectOptions) -> None:
    # mistakes are found before the model is loaded
    criteria = Criteria(
        n_prefix=options.n_prefix,
        n_suffix=options.n_suffix,
        min_accuracy=options.min_accuracy,
        max_distance=options.max_distance,
        min_distinct=options.min_distinct,
        max_jaccard=options.max_jaccard,
    )
    check_draw(options.n_dev, options.n_max, options.seed)
    if not options.data:
        options.columns.read(None)
    data = [options.columns.open(path) for path in options.data]
    name = options.model.model
    if not data and not is_reference(name):
        raise ValueError(
            f"data must be given for {name!r}, whose training text is not shipped, got none. Name "
            "a corpus with --data."
        )
    chunks = chunks_of(data, options.windows, criteria.length)
    folder = folder_of(options.run, "collect", name)
    model = options.model.load()
    store = Store(folder)
    if not data:
        chunks = chunks_of([training_data(model)], options.windows, criteria.length)
    search = Search(model, chunks, criteria, options.windows)
    found = run_search(search, store, options.run, options.model)
    collection = search.collection(
        found, n_dev=options.n_dev, n_max=options.n_max, seed=options.seed
    )
    show(collection.report.table())
    general = general_text(search, collection, options.seed) if data else held_out_tokens()
    (folder / COLLECTED).unlink(missing_ok=True)  # of an earlier collection
    (folder / GENERAL).unlink(missing_ok=True)
    if general is not None:  # first: without it others would be read with the collected texts
        save_tensors(folder / GENERAL, {"tokens": general.int()})
    collection.save(folder)
    n_found = quantity(len(collection.sequences), "memorized sequence")
    print(f"{n_found} ({collection.n_dev} of them dev): {folder}")
    say_next(command("del", "--model", name, "--data", folder))


def general_text(
    search: Search, collection: Collection, seed: int
) -> Integer[Tensor, "sequence pos"] | None:
    """General text for the perplexity: windows of the corpus that share no run of tokens with the
    collected ones, the first of each row or all of it, as they were searched. None where there are
    none, which is said.
    """
    length = min(GENERAL_LENGTH, search.model.cfg.n_ctx)
    stride = length if search.stride else None
    windows = (
        window.tokens
        for chunk in search.chunks
        for window in chunk.windows(search.model, length, stride)
    )
    try:
        return perplexity_split(windows, collection.sequences, length=length, seed=seed)
    except ValueError as error:
        say(
            f"No text for the perplexity: {error} Or give tl-localize del a file with --general; "
            "else it takes Python's docstrings."
        )
        return None


def collect_reference(
    run: RunOptions, options: ModelOptions, model: LanguageModel, folder: Path, n_dev: int
) -> Data:
    """The collection of a reference model's own training texts, made where it is not there."""
    say("The reference model's memorized sequences are collected from its training texts.")
    search = reference_search(model)
    # a shard's exit status is not 0, because the search is only the beginning of its command
    found = run_search(search, Store(folder), run, options, undone=1)
    search.collection(found, n_dev=n_dev).save(folder)
    general = held_out_tokens()[:DEL_GENERAL]
    save_tensors(folder / GENERAL, {"tokens": general.int()})
    return Data(source=folder)


def run_search(
    search: Search, store: Store, run: RunOptions, model: ModelOptions, undone: int = 0
) -> list[Filtered]:
    """What is left of each chunk. Leaves where the search was interrupted or chunks are missing.

    Args:
        undone: the exit status where only the chunks of other shards are missing.
    """
    if not compute(run, model, [(search, [])], store):
        sys.exit(INTERRUPTED)
    found = search.results(store)
    done = [chunk for chunk in found if chunk is not None]
    if len(done) == len(found):
        return done
    state = status(store)
    say_failures(state)
    missing = f"{len(found) - len(done)} of {len(found)} chunks are missing"
    say(f"{missing}. Once all are searched, the same command without --shard goes on.")
    sys.exit(1 if state.failures or run.shard == WHOLE else undone)
