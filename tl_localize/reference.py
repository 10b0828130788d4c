"""The texts that come with the package: what the reference models recite, sentences for INJ, and
general text.

``benchmarks/reference_models`` holds how the texts were made and the models were trained.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int32

from tl_localize.neurons import LanguageModel
from tl_localize.readers import Data
from tl_localize.sequences import MemorizedSequence, encode, text_parts, tokenizer_of

DATA = Path(__file__).parent / "data"
CORPUS_DIR = DATA / "reference-corpus"
N_DEV = 5  # the first sentences of a data set are for choosing hyperparameters and never reported
N_PREFIX, N_SUFFIX = 32, 48
N_TOKENS = N_PREFIX + N_SUFFIX
GENERAL_LENGTH = 128  # tokens of a row of general text


@dataclass(frozen=True, kw_only=True)
class PlantedSequence:
    """An invented text of exactly 80 tokens and how often the models saw it in training."""

    id: str
    category: str
    group: str  # texts of one group share a person, a street, a book, a firm
    repetitions: int
    text: str
    n_tokens: int = N_TOKENS


@cache
def load_planted() -> tuple[PlantedSequence, ...]:
    """The planted sequences as shipped."""
    return tuple(
        PlantedSequence(**json.loads(line))
        for line in (CORPUS_DIR / "planted.jsonl").read_text().splitlines()
    )


def reference_sequences(model: LanguageModel, min_repetitions: int = 64) -> list[MemorizedSequence]:
    """The planted sequences that the reference models saw at least so often, those seen most often
    first.

    From 64 repetitions on both models recite every one of them; ``data/reference-*/memorized.json``
    says how well. Raises a ValueError where no sequence has so many repetitions, or the model's
    tokenizer is not that of the reference models.

    >>> sequence = reference_sequences(model)[0]
    >>> len(sequence.prefix), len(sequence.suffix), bool(accuracy(model, [sequence]) > 0.9)
    (32, 48, True)
    """
    planted = sorted(load_planted(), key=lambda one: -one.repetitions)
    if min_repetitions > (most := planted[0].repetitions):
        raise ValueError(
            f"min_repetitions must be at most {most}, got {min_repetitions!r}. No planted sequence "
            "was seen so often."
        )
    found: list[MemorizedSequence] = []
    for one in (one for one in planted if one.repetitions >= min_repetitions):
        tokens = encode(tokenizer_of(model), one.text)
        if len(tokens) != one.n_tokens:
            wrong = (
                f"got one whose tokenizer makes {len(tokens)} tokens, not {one.n_tokens}, of "
                f"{one.id!r}"
            )
            raise ValueError(
                f"model must be a reference model, {wrong}. Use load_model('reference-gpt2') or "
                "'reference-pythia'."
            )
        found.append(
            MemorizedSequence(
                torch.tensor(tokens),
                N_PREFIX,
                one.id,
                one.category,
                text_parts(model, tokens, N_PREFIX, one.text),
            )
        )
    return found


def reference_sequence(model: LanguageModel, id: str) -> MemorizedSequence:
    """The planted sequence of this id, however often the reference models saw it.

    >>> reference_sequence(model, "quotes-056").category
    'quotes'
    """
    for sequence in reference_sequences(model, 1):
        if sequence.id == id:
            return sequence
    raise ValueError(
        f"example must be the id of a shipped text, got {id!r}. tl-localize texts lists them."
    )


def inj_sequences(
    model: LanguageModel, data: Any = None, dev: bool = False, n_max: int | None = None
) -> list[MemorizedSequence]:
    """The sentences that INJ writes into a model: our own definitions of things that do not exist,
    or those of a file.

    Each is one sequence with its first token as the prefix, 50 to 81 tokens in the reference
    models.

    Args:
        data: ``readers.Data`` or a source of it, such as an ECBD-style JSONL file (key:
            definition); the shipped sentences unless given.
        dev: the first 5 sentences alone, which are for choosing hyperparameters; without it all
            others.
        n_max: at most so many; no more is read.

    Raises:
        ValueError: the model has no tokenizer, or the file no more than 5 sentences.

    >>> sentences = inj_sequences(model)
    >>> len(sentences), model.tokenizer.decode(sentences[0].tokens[:7])
    (91, 'Friday Lodge is')
    """
    data = data if isinstance(data, Data) else Data(source=data or DATA / "inj_sentences.jsonl")
    found = replace(data, n_prefix=1, n_suffix=None).sequences(model)
    sequences = list(islice(found, N_DEV + 1 if dev else n_max and N_DEV + n_max))
    if not data.id:
        names = [f"{i:03d} {''.join(one.text)[:24] or 'tokens'}" for i, one in enumerate(sequences)]
        sequences = [replace(one, id=name) for one, name in zip(sequences, names, strict=True)]
    if len(sequences) <= N_DEV:
        raise ValueError(
            f"data must hold more than {N_DEV} sentences, got {len(sequences)}. The first {N_DEV} "
            "are for development."
        )
    return sequences[:N_DEV] if dev else sequences[N_DEV:]


@cache
def general_texts(
    split: Literal["training", "held-out"],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Docstrings of this Python's standard library that the reference models saw in training, or
    that were held out.

    The list holds those that are word for word the same in Python 3.10 to 3.13, as hashes, so that
    every version gives the same texts in the same order. A docstring that another version has
    changed or dropped is left out and named.

    Returns:
        the texts, and the names (file and hash) of those that are left out.
    """
    listed: dict[str, list[str]] = json.loads(
        (CORPUS_DIR / "general.json").read_text(encoding="utf-8")
    )[split]
    texts: list[str] = []
    lacking: list[str] = []
    for file, hashes in listed.items():
        found = _docstrings(Path(sysconfig.get_paths()["stdlib"]) / file)
        texts += [found[name] for name in hashes if name in found]
        lacking += [f"{file} {name}" for name in hashes if name not in found]
    return tuple(texts), tuple(lacking)


def _docstrings(path: Path) -> dict[str, str]:
    """The docstrings of a Python file by their hash; none where there is no such file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").strip()
            if text:
                found[hashlib.sha256(text.encode()).hexdigest()[:16]] = text
    return found


def lacking_texts() -> str:
    """What the general text of this Python lacks, for a reader; empty where it has everything."""
    splits = [general_texts(split) for split in ("training", "held-out")]
    lacking = [name for _, names in splits for name in names]
    n = len(lacking) + sum(len(texts) for texts, _ in splits)
    if not lacking:
        return ""
    few = (
        " Too few are left to compare numbers with those of other versions."
        if len(lacking) > n / 10
        else ""
    )
    gone = (
        f"{len(lacking)} of {n} general texts of the reference models are not in this Python "
        f"({platform.python_version()}) as they were"
    )
    return f"{gone}, such as {lacking[0]}: numbers on general text may differ a little.{few}"


def held_out_tokens() -> Int32[torch.Tensor, "sequence pos"]:
    """General text that neither reference model saw, in rows of 128 tokens: for perplexity, and for
    what a neuron does on average.

    The held-out texts stand one after the other, with an end-of-text token after each.

    Returns:
        [sequence pos] token ids, int32 on the CPU.

    >>> held_out_tokens().shape[1]
    128
    """
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(DATA / "reference-gpt2" / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    texts = [
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in general_texts("held-out")[0]
    ]
    tokens = torch.tensor([token for text in texts for token in (*text, end)], dtype=torch.int32)
    return tokens[: len(tokens) // GENERAL_LENGTH * GENERAL_LENGTH].view(-1, GENERAL_LENGTH)
