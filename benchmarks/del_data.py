"""What DEL's tables and the studies beside them are of: sequences, dev ones, general text."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

Texts = tuple[list[Any], int, Tensor]  # sequences, how many of them are dev ones, general text


def collected(model: Any) -> Any:
    """What a shipped model has memorized of its own training texts."""
    from tl_localize.collect.reference_texts import reference_search
    from tl_localize.texts.reference import N_DEV

    search = reference_search(model)
    return search.collection(search.run(), n_dev=N_DEV)


def of_collection(collection: Any) -> Texts:
    """The dev sequences, then the others in random order; held-out text."""
    from tl_localize.evals.settings import DEL_GENERAL, DEL_SEQUENCES, drawn_first
    from tl_localize.texts.reference import held_out_tokens

    sequences = drawn_first(collection.sequences, collection.n_dev)[:DEL_SEQUENCES]
    return sequences, collection.n_dev, held_out_tokens()[:DEL_GENERAL]


def shipped_benchmark(model: Any, n_targets: int, **settings: Any) -> Any:
    """DEL's table of a shipped model."""
    from tl_localize import DelBenchmark
    from tl_localize.evals.settings import del_ratios
    from tl_localize.model.neurons import model_name

    sequences, n_dev, general = of_collection(collected(model))
    how = {"ratios": del_ratios(model_name(model)), "n_dev": n_dev, "n_targets": n_targets}
    how |= {"general_tokens": general}
    return DelBenchmark(model, sequences, **(how | settings))


def folder_of(request: Any, model_name: str, study: str) -> Path:
    """The folder of a study's steps on a model: another one for each choice of data."""
    files = [
        Path(value)
        for name in ("--del-data", "--general")
        if (value := request.config.getoption(name))
    ]
    parts = [path.read_bytes() if path.is_file() else str(path).encode() for path in files]
    chosen = "-" + sha256(b"".join(parts)).hexdigest()[:8] if files else ""
    return Path(request.config.getoption("--results")) / Path(model_name).name / (study + chosen)


def read_data(model: Any, model_name: str, request: Any) -> Texts:
    """Sequences, the dev ones first and the rest in random order; how many are dev ones; general
    text for the perplexity.

    A shipped model's are collected from its training text. Another model's are those of
    ``--del-data``, or of the texts that everybody knows and it recites: the best of each category
    as targets, second best ones as dev texts, and the rest behind them, as others.
    """
    from tl_localize.evals.settings import del_data, drawn_first, read_general_text
    from tl_localize.model.loading import is_reference
    from tl_localize.texts.known import known
    from tl_localize.texts.readers import Data
    from tl_localize.texts.reference import N_DEV

    source, general = (
        Path(value) if (value := request.config.getoption(name)) else None
        for name in ("--del-data", "--general")
    )
    if source:
        sequences, n_dev, text = del_data(model, Data(source=source), general)
        return drawn_first(sequences, n_dev), n_dev, text
    if is_reference(model_name):
        sequences, n_dev, text = of_collection(collected(model))
        return sequences, n_dev, read_general_text(model, general) if general else text
    recited = known(model)
    dev = drawn_first(recited.diverse(place=1), 0)[:N_DEV]
    chosen = [*dev, *drawn_first(recited.diverse(), 0)]
    ids = {text.id for text in chosen}
    rest = [text for text in recited.sequences if text.id not in ids]
    return [*chosen, *drawn_first(rest, 0)], len(dev), read_general_text(model, general)
