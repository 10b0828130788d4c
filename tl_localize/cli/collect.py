"""tl-localize collect"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from jaxtyping import Integer
from torch import Tensor

from tl_localize.cli.options import N_DEV, Device, Dtype, Model, bar, errors_explained, parse_dtype, say
from tl_localize.collect import (
    Candidate,
    Chunk,
    Collection,
    Criteria,
    Progress,
    collect_chunks,
    likely_windows,
    origins,
    perplexity_split,
    text_windows,
    token_windows,
)
from tl_localize.models import REFERENCE_MODELS, load_model
from tl_localize.neurons import LanguageModel
from tl_localize.readers import TOKEN_SUFFIXES, read_texts, read_tokens
from tl_localize.reference_corpus import CORPUS_DIR, changed_texts, general_texts, load_planted, reference_stream
from tl_localize.scores import save_tensors
from tl_localize.store import Store, digest_of, prepare_folder
from tl_localize.tables import save_table, to_markdown

PAPER = Criteria()
GENERAL = "general.safetensors"  # in a collection's folder: text for the perplexity
GENERAL_LENGTH = 128
CHUNK = 8192  # windows, about, after which what is found is kept: minutes on a processor, seconds on a GPU


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
) -> None:
    """Find the sequences of a corpus that a model has memorized, for tl-localize del.

    Writes them with a report (how many each criterion removed, with examples) and general text for the perplexity. Without data a
    reference model's own training stream is searched. A collection that was interrupted goes on with the same command.
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
        if n_general < 1:
            raise ValueError(f"n_general must be at least 1, got {n_general}. The paper has 2048.")
        if not data and model not in ("reference", *REFERENCE_MODELS):
            raise ValueError(f"data must be given for {model!r}, whose training text is not shipped, got none. Name a corpus with --data.")
        sources = [Corpus(path, key) for path in data or []]
        folder = prepare_folder(out or Path("tl-localize-results") / f"collect-{Path(model).name}")
        loaded = load_model(model, device, parse_dtype(dtype))
        draw: dict[str, Any] = {"n_dev": n_dev, "n_max": n_max, "seed": seed}
        store = Store(folder)
        try:
            with bar() as show:
                if sources:
                    total = sum(source.n_rows for source in sources) if stride is None else None
                    chunks = chain.from_iterable(source.chunks(loaded, criteria, stride, len(sources) > 1) for source in sources)
                    about = {"windows": windows, "key": key, "data": [path.name for path in data or []]}
                    found = collect_chunks(loaded, chunks, criteria, store=store, about=about, total=total, progress=show, **draw)
                else:
                    say("The reference models' training stream is made again from this Python's documentation.")
                    if changed := changed_texts(general_texts()):
                        say(f"{len(changed)} of its documents are not as they were in training: the natural sequences may differ.")
                    found = collect_reference(loaded, criteria, stride, store=store, progress=show, **draw)
        except KeyboardInterrupt as error:
            say(f"Interrupted. What is done is kept; go on with the same command:\n  {shlex.join(['tl-localize', *sys.argv[1:]])}")
            raise typer.Exit(130) from error
        found.save(folder)
        typer.echo(f"\n{to_markdown(found.report.table()[['removed', 'left']])}\n")
        if sources:
            parts = chain.from_iterable(source.chunks(loaded, PAPER, None, False, GENERAL_LENGTH) for source in sources)
            rows = chain.from_iterable(part.windows() for part in parts)
        else:
            rows = reference_general()
            for name, (table, caption) in reference_tables(found).items():
                save_table(table, folder, name, caption)
                typer.echo(f"{caption}\n\n{to_markdown(table.head(10))}\n")
        n_found = len(found.sequences)
        typer.echo(f"{n_found} memorized sequences ({n_dev} of them dev), the report and its examples: {folder}")
        try:
            general = perplexity_split(rows, found.sequences, n_general, GENERAL_LENGTH, seed=seed)
            save_tensors(folder / GENERAL, {"tokens": general.int()}, {})
        except ValueError as error:
            say(f"No text for the perplexity: {error} Or give tl-localize del another file with --general.")
        typer.echo(f"Use them: tl-localize del --model {model} --data {folder}")


class Corpus:
    """A file of token rows or of texts; opened and, where it is text, read through once before any work, so that mistakes come early."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.tokens = read_tokens(path) if path.suffix in TOKEN_SUFFIXES else None
        self.n_rows = sum(1 for _ in read_texts(path, key)) if self.tokens is None else len(self.tokens)
        if not self.n_rows:
            raise ValueError(f"data must hold at least one text, got none in {str(path)!r}. Check the file.")

    def chunks(
        self, model: LanguageModel, criteria: Criteria, stride: int | str | None, named: bool, length: int | None = None
    ) -> Iterator[Chunk]:
        """Candidates, a part of the file at a time, with the file's name before their ids where there are several files."""
        length = length or criteria.length
        number = stride if isinstance(stride, int) else None
        name = f"{self.path.stem}/" if named else ""
        if self.tokens is None and stride == "any":
            raise ValueError(f"windows must be first or a number for text, got any for {str(self.path)!r}. Give rows of tokens.")
        chunks = row_chunks(model, self.tokens, criteria, stride, length) if self.tokens is not None else self._texts(model, length, number)
        for chunk in chunks:
            yield Chunk([name, chunk.identity], partial(prefixed, name, chunk.windows))

    def _texts(self, model: LanguageModel, length: int, stride: int | None) -> Iterator[Chunk]:
        texts, first = read_texts(self.path, self.key), 0
        while part := list(islice(texts, CHUNK)):
            yield Chunk([first, digest_of(part)], partial(text_windows, part, model, length, stride, first=first))
            first += len(part)


def prefixed(name: str, windows: Callable[[], Iterable[Candidate]]) -> Iterator[Candidate]:
    """Windows with a name before their ids."""
    return (replace(window, id=f"{name}{window.id}") for window in windows())


def row_chunks(
    model: LanguageModel, rows: Integer[Tensor, "row pos"], criteria: Criteria, stride: int | str | None, length: int
) -> Iterator[Chunk]:
    """Rows so many at a time that the work does not depend on how many windows a row has."""
    size = CHUNK if stride is None else max(1, CHUNK * length // rows.shape[1])
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        content = hashlib.sha256(part.contiguous().view(torch.uint8).numpy().data).hexdigest()
        yield Chunk([first, content], partial(row_windows, model, part, criteria, stride, length, first))


def row_windows(
    model: LanguageModel, rows: Integer[Tensor, "row pos"], criteria: Criteria, stride: int | str | None, length: int, first: int = 0
) -> Iterator[Candidate]:
    """The first window of each row, one every so many tokens, or those that are likely to be memorized."""
    if stride == "any":
        return likely_windows(model, rows, criteria, first=first)
    return token_windows(rows, length, stride if isinstance(stride, int) else None, first=first)


def parse_windows(text: str) -> int | str | None:
    """None for the first window, "any", or the tokens between windows."""
    if text in ("first", "any"):
        return None if text == "first" else text
    if not text.isdecimal() or not int(text):
        raise ValueError(f"windows must be first, any or a number of tokens from 1 on, got {text!r}. Use first, as the paper does.")
    return int(text)


def collect_reference(
    model: LanguageModel,
    criteria: Criteria,
    stride: int | str | None = None,
    *,
    store: Store | None = None,
    progress: Progress | None = None,
    **draw: Any,
) -> Collection:
    """What a reference model has memorized of its own training stream.

    The planted texts are recognized afterwards: they get their own names and categories, all others are ``natural``.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    rows = torch.from_numpy(reference_stream(tokenizer).rows)
    total = len(rows) if stride is None else None
    chunks = row_chunks(model, rows, criteria, stride, criteria.length)
    about = {"windows": str(stride), "data": "training stream"}
    found = collect_chunks(model, chunks, criteria, store=store, about=about, total=total, progress=progress, **draw)
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


def reference_general() -> Integer[Tensor, "sequence pos"]:
    """Documentation that the reference models never saw."""
    return read_tokens(CORPUS_DIR / "held_out.safetensors")
