"""The texts that come with the package: what the reference models recite, sentences for INJ, and
general text.

``benchmarks/reference_models`` holds how the texts were made and the models were trained.
"""

import ast
import hashlib
import inspect
import json
import platform
import re
import sys
import sysconfig
import warnings
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int32

from tl_localize.checks import check_count
from tl_localize.model.neurons import LanguageModel
from tl_localize.sequences import MemorizedSequence, encode, first_tokens, tokenizer_of, with_text
from tl_localize.texts.readers import Data, numbered

DATA = Path(__file__).parents[1] / "data"
CORPUS_DIR = DATA / "reference-corpus"
N_DEV = 5  # the first sentences of a data set are for choosing hyperparameters and never reported
N_PREFIX, N_SUFFIX = 32, 48
N_TOKENS = N_PREFIX + N_SUFFIX
GENERAL_LENGTH = 128  # tokens of a row of general text
THREE_QUOTES = re.compile(r'("""|\'\'\')(.*?)\1', re.DOTALL)


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
    says how well. Raises a ValueError where the model's tokenizer is not that of the reference
    models.

    >>> sequence = reference_sequences(model)[0]
    >>> len(sequence.prefix), len(sequence.suffix), bool(accuracy(model, [sequence]) > 0.9)
    (32, 48, True)
    """
    check_count(min_repetitions=min_repetitions)
    planted = sorted(load_planted(), key=lambda text: -text.repetitions)
    chosen = [text for text in planted if text.repetitions >= min_repetitions]
    found: list[MemorizedSequence] = []
    for text in chosen:
        tokens = torch.tensor(encode(tokenizer_of(model), text.text))
        if len(tokens) != text.n_tokens:
            raise ValueError(
                f"model must be a reference model, got one whose tokenizer makes {len(tokens)} "
                f"tokens, not {text.n_tokens}, of {text.id!r}. Use load_model('reference-gpt2') or "
                "'reference-pythia'."
            )
        sequence = MemorizedSequence(tokens, N_PREFIX, text.id, text.category)
        found.append(with_text(model, sequence))
    return found


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
    sequences = list(islice(found, n_max and min(N_DEV + n_max, sys.maxsize)))
    sequences = [
        replace(sequence, id=f"{i:03d} {''.join(sequence.text)[:24] or 'tokens'}")
        if sequence.id == numbered(i)  # the data have none
        else sequence
        for i, sequence in enumerate(sequences)
    ]
    if len(sequences) <= N_DEV:
        raise ValueError(
            f"data must hold more than {N_DEV} sentences, got {len(sequences)}. The first {N_DEV} "
            "are for development."
        )
    return sequences[:N_DEV] if dev else sequences[N_DEV:]


@cache
def general_texts(split: Literal["training", "held-out"]) -> tuple[str, ...]:
    """Docstrings of this Python's standard library that the reference models saw in training, or
    that were held out.

    The list holds those that are word for word the same in Python 3.10 to 3.13, as hashes, so that
    every version gives the same texts in the same order. A docstring that another version has
    changed or dropped is left out, with a warning.
    """
    listed: dict[str, list[str]] = json.loads(
        (CORPUS_DIR / "general.json").read_text(encoding="utf-8")
    )[split]
    texts: list[str] = []
    lacking: list[str] = []
    for file, hashes in listed.items():
        found = _docstrings(Path(sysconfig.get_paths()["stdlib"]) / file, set(hashes))
        texts += [found[name] for name in hashes if name in found]
        lacking += [f"{file} {name}" for name in hashes if name not in found]
    if lacking:
        warnings.warn(
            f"{len(lacking)} general texts of the reference models are not in this Python "
            f"({platform.python_version()}) as they were, such as {lacking[0]}: numbers on "
            "general text may differ.",
            stacklevel=2,
        )
    return tuple(texts)


def _docstrings(path: Path, wanted: set[str]) -> dict[str, str]:
    """Docstrings of a Python file by their hash; none where there is no such file. They are looked
    for among all that stands in three quotes, which is ten times as fast as reading Python.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    literals = (text for _, text in THREE_QUOTES.findall(source) if "\\" not in text)
    found = {_hash_of(text): text for text in (inspect.cleandoc(part).strip() for part in literals)}
    return found if wanted <= found.keys() else found | _parsed_docstrings(source)


def _hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parsed_docstrings(source: str) -> dict[str, str]:
    """The docstrings of Python source by their hash; none where it is not Python."""
    try:
        nodes: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, str] = {}
    for node in nodes:
        # expressions, which are most of a file, hold no docstring
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt | ast.ExceptHandler):
                nodes.append(part)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").strip()
            if text:
                found[_hash_of(text)] = text
    return found


def held_out_tokens(model: LanguageModel | None = None) -> Int32[torch.Tensor, "sequence pos"]:
    """General text that neither reference model saw, in rows of 128 tokens, or as many as the model
    reads: for perplexity, and for what a neuron does on average.

    The held-out texts stand one after the other, with an end-of-text token after each, if there is
    one. A row begins as the model's texts do: with Gemma's beginning-of-text token, without one
    for GPT-2.

    Args:
        model: whose tokens they are; by default those of the reference models.

    Returns:
        [sequence pos] token ids, int32 on the CPU.

    >>> held_out_tokens().shape[1]
    128
    """
    from transformers import PreTrainedTokenizerFast

    own: Any = PreTrainedTokenizerFast
    shipped = DATA / "reference-gpt2"
    tokenizer = own.from_pretrained(shipped) if model is None else tokenizer_of(model)
    ids: list[int] = []
    for text in general_texts("held-out"):
        ids += encode(tokenizer, text)
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
    first = torch.tensor(first_tokens(tokenizer), dtype=torch.int32)
    length = min(GENERAL_LENGTH, model.cfg.n_ctx) if model else GENERAL_LENGTH
    width = length - len(first)
    rows = torch.tensor(ids[: len(ids) // width * width], dtype=torch.int32).view(-1, width)
    return torch.cat([first.expand(len(rows), -1), rows], 1)
