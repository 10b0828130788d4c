"""The texts that come with the package: what the reference models recite, sentences for INJ, and general text.

``benchmarks/reference_models`` holds how the texts were made and the models were trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Int32

from tl_localize.neurons import LanguageModel
from tl_localize.readers import read_definitions, read_tokens
from tl_localize.sequences import MemorizedSequence, encode, tokenizer_of

DATA = Path(__file__).parent / "data"
CORPUS_DIR = DATA / "reference-corpus"
N_DEV = 5  # the first sentences of a data set are for choosing hyperparameters and never reported
N_PREFIX, N_SUFFIX = 32, 48
N_TOKENS = N_PREFIX + N_SUFFIX


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
    return tuple(PlantedSequence(**json.loads(line)) for line in (CORPUS_DIR / "planted.jsonl").read_text().splitlines())


def reference_sequences(model: LanguageModel, min_repetitions: int = 64) -> list[MemorizedSequence]:
    """The planted sequences that the reference models saw at least so often, those seen most often first.

    From 64 repetitions on both models recite every one of them; ``data/reference-*/memorized.json`` says how well.

    Raises:
        ValueError: no sequence has so many repetitions, or the model's tokenizer is not that of the reference models.

    >>> sequence = reference_sequences(model)[0]
    >>> len(sequence.prefix), len(sequence.suffix), bool(accuracy(model, [sequence]) > 0.9)
    (32, 48, True)
    """
    planted = [one for one in load_planted() if one.repetitions >= min_repetitions]
    if not planted:
        most = max(one.repetitions for one in load_planted())
        raise ValueError(f"min_repetitions must be at most {most}, got {min_repetitions!r}. No planted sequence was seen so often.")
    found: list[MemorizedSequence] = []
    for one in sorted(planted, key=lambda one: -one.repetitions):
        tokens = encode(tokenizer_of(model), one.text)
        if len(tokens) != one.n_tokens:
            raise ValueError(
                f"model must be a reference model, got one whose tokenizer makes {len(tokens)} tokens, not {one.n_tokens}, of {one.id!r}. "
                "Use load_model('reference-gpt2') or load_model('reference-pythia')."
            )
        found.append(MemorizedSequence(torch.tensor(tokens), N_PREFIX, one.id, one.category))
    return found


def inj_sequences(model: LanguageModel, path: str | Path | None = None, dev: bool = False) -> list[MemorizedSequence]:
    """The sentences that INJ writes into a model: our own definitions of things that do not exist, or those of a file.

    Each is one sequence with its first token as the prefix, 50 to 81 tokens in the reference models.

    Args:
        path: an ECBD-style JSONL file (key: definition), as of ``readers.read_definitions``; the shipped sentences unless given.
        dev: the first 5 sentences alone, which are for choosing hyperparameters; without it all others.
    Raises:
        ValueError: the model has no tokenizer, or the file no more than 5 sentences.

    >>> sentences = inj_sequences(model)
    >>> len(sentences), model.tokenizer.decode(sentences[0].tokens[:7])
    (91, 'Friday Lodge is')
    """
    sentences = read_definitions(path or DATA / "inj_sentences.jsonl")
    if len(sentences) <= N_DEV:
        raise ValueError(f"data must hold more than {N_DEV} sentences, got {len(sentences)}. The first {N_DEV} are for development.")
    tokenizer = tokenizer_of(model)
    sequences = [
        MemorizedSequence(torch.tensor(encode(tokenizer, sentence)), 1, id=f"{i:03d} {sentence[:24]}")
        for i, sentence in enumerate(sentences)
    ]
    return sequences[:N_DEV] if dev else sequences[N_DEV:]


def held_out_tokens() -> Int32[torch.Tensor, "sequence pos"]:
    """General text that neither reference model saw, 256 rows of 128 tokens: for perplexity, and for what a neuron does on average.

    Returns: [sequence pos] token ids, int32 on the CPU.

    >>> held_out_tokens().shape
    torch.Size([256, 128])
    """
    return read_tokens(CORPUS_DIR / "held_out.safetensors")
