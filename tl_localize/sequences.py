"""Sequences that a model has memorized, and batches of them."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tl_localize.checks import check_count
from tl_localize.model.neurons import LanguageModel, check_model

Decode = Callable[[list[int]], str]
CUT = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for a character that it has a part of
SHOWN = 30  # characters of the prefix and of the suffix in a sequence's repr
OVERLAP = 13  # tokens in a row that are the same text


@dataclass(frozen=True, eq=False)
class MemorizedSequence:
    """A prefix that prompts the model and the suffix that it recites.

    Args:
        tokens: [pos] token ids, prefix and suffix together. Kept as int64 on the CPU.
        n_prefix: number of prefix tokens, 1 <= n_prefix < len(tokens). INJ uses 1.
        id: name of the sequence in results.
        category: group of the sequence in DEL's confusion matrix.
        text: Prefix and suffix as text, to be shown; no number depends on it.
        bos: The beginning-of-text token that the prefix starts with, to be shown.

    Raises:
        ValueError, TypeError: other tokens or another n_prefix.

    >>> MemorizedSequence.from_text(model, "Return the", " value of the argument.", id="docs")
    MemorizedSequence('docs', 2 prefix + 5 suffix tokens: 'Return the' | ' value of the argument.')
    """

    tokens: Int[Tensor, " pos"]
    n_prefix: int
    id: str = ""
    category: str = ""
    text: tuple[str, str] = ("", "")
    bos: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str):
            raise TypeError(
                f"tokens must be token ids, got text, {self.tokens!r:.60}. Use "
                "MemorizedSequence.from_text(model, prefix, suffix)."
            )
        for name, value in (("id", self.id), ("category", self.category)):
            if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{name} must be text, got {value!r}. Pass str({value!r}).")
        try:
            tokens = torch.as_tensor(self.tokens)
        except (RuntimeError, ValueError) as error:  # such as a BatchEncoding
            raise TypeError(
                f"tokens must be a vector of token ids, got {type(self.tokens).__name__}. Of what "
                'a tokenizer gives, take ["input_ids"].'
            ) from error
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(
                f"tokens must be a vector of token ids, got shape {tuple(tokens.shape)} of "
                f"{tokens.dtype}. Pass one sequence, such as tokens[0], as the tokenizer gives it."
            )
        check_count(n_prefix=self.n_prefix)
        if self.n_prefix >= len(tokens):
            raise ValueError(
                f"n_prefix must be below the number of tokens, {len(tokens)}, got "
                f"{self.n_prefix}. The suffix needs a token to be scored on."
            )
        object.__setattr__(self, "tokens", tokens.detach().to("cpu", torch.long, copy=True))
        object.__setattr__(self, "n_prefix", int(self.n_prefix))  # numpy's is none that JSON takes

    @classmethod
    def from_text(
        cls,
        model: LanguageModel,
        prefix: str,
        suffix: str,
        *,
        id: str = "",
        category: str = "",
        prepend_bos: bool | None = None,
    ) -> "MemorizedSequence":
        """Tokenize ``prefix + suffix`` as the model's tokenizer does, without other special tokens.

        Args:
            prepend_bos: Whether the prefix starts with the beginning-of-text token. None: as the
                tokenizer does by default, where this token is not also the end of a text. So
                models that were trained with one (Llama, Gemma) get it, and GPT-2 and Pythia do
                not. In a model that ``load_model`` did not load, TransformerLens may have set the
                tokenizer to add it: False leaves it out.

        Raises:
            ValueError: the model has no tokenizer, prefix or suffix is empty, or no token boundary
                falls between them.
        """
        for name, text in {"prefix": prefix, "suffix": suffix}.items():
            if not isinstance(text, str) or not text:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"{name} must be text of one token or more, got {text!r}. Divide the text in "
                    "two."
                )
        tokenizer = tokenizer_of(model)
        prefix_tokens = encode(tokenizer, prefix)
        tokens = encode(tokenizer, prefix + suffix)
        if tokens[: len(prefix_tokens)] != prefix_tokens:
            raise ValueError(
                f"suffix must begin at a token boundary, got {suffix[:20]!r} after "
                f"{prefix[-20:]!r}, where the tokenizer merges across. Divide the text before a "
                "space, or elsewhere."
            )
        sequence = cls(torch.tensor(tokens), len(prefix_tokens), id, category, (prefix, suffix))
        return with_bos(model, sequence, prepend_bos)

    @property
    def prefix(self) -> Int[Tensor, " prefix"]:
        return self.tokens[: self.n_prefix]

    @property
    def suffix(self) -> Int[Tensor, " suffix"]:
        return self.tokens[self.n_prefix :]

    @property
    def whole(self) -> "MemorizedSequence":
        """With every token in the suffix but the first one of its text."""
        return replace(self, n_prefix=1 + bool(self.bos))

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens and where the suffix begins; id and category change no number."""
        return hashlib.sha256(f"{self.n_prefix} {self.tokens.tolist()}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        counts = f"{self.id!r}, {self.n_prefix} prefix + {len(self) - self.n_prefix} suffix tokens"
        if self.bos:
            counts += f", the first is {self.bos!r}"
        prefix, suffix = self.text
        if not any(self.text):
            return f"MemorizedSequence({counts})"
        end = prefix if len(prefix) <= SHOWN else f"...{prefix[-SHOWN:]}"
        start = suffix if len(suffix) <= SHOWN else f"{suffix[:SHOWN]}..."
        return f"MemorizedSequence({counts}: {end!r} | {start!r})"


def tokenizer_of(model: LanguageModel) -> Any:
    """The model's tokenizer; ValueError if it has none."""
    check_model(model)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(
            "model must have a tokenizer to read and show text, got none. Put its files into the "
            "model's directory, or give rows of token ids, and of decode, others and general text "
            "what the call takes."
        )
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without the special tokens that TransformerLens' wrapped tokenizers put
    first.

    Raises:
        ValueError: the text is not valid Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text must be valid Unicode, got {text[error.start : error.end]!r} at character "
            f"{error.start}. Save or type it in UTF-8, without halves of characters."
        ) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decoder(model: LanguageModel) -> Decode:
    """The decoding function of the model's tokenizer: it leaves spaces as they are."""
    return partial(tokenizer_of(model).decode, clean_up_tokenization_spaces=False)


def decoder_or_ids(model: LanguageModel) -> Decode:
    """``decoder``; where the model has no tokenizer, ids stay ids, so that distances count
    tokens.
    """
    check_model(model)
    if getattr(model, "tokenizer", None) is None:
        return cast(Decode, list)
    return decoder(model)


def divide_text(decode: Decode, tokens: list[int], n_prefix: int) -> tuple[str, str]:
    """Prefix and suffix as text. A character of which both have a part is the suffix's.

    >>> def decode(ids):
    ...     return bytes(ids).decode(errors="replace")
    >>> divide_text(decode, list("né.".encode()), 2)
    ('n', 'é.')
    """
    text = decode(tokens)
    prefix = decode(tokens[:n_prefix])
    while prefix[-1:] == CUT:
        prefix = prefix[:-1]
    return prefix, text[len(prefix) :]


def first_tokens(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, where the tokenizer puts one first that means nothing else."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or bos == tokenizer.eos_token_id or tokenizer("a")["input_ids"][:1] != [bos]:
        return []
    return [bos]


def with_bos(
    model: LanguageModel, sequence: MemorizedSequence, prepend_bos: bool | None = None
) -> MemorizedSequence:
    """The sequence after the beginning-of-text token; by default after ``first_tokens``."""
    tokenizer = tokenizer_of(model)
    if not (first_tokens(tokenizer) if prepend_bos is None else prepend_bos):
        return sequence
    if tokenizer.bos_token_id is None:
        raise ValueError(
            f"prepend_bos must be false where the tokenizer has no such token, got {prepend_bos}. "
            "Leave it out."
        )
    tokens = torch.cat([torch.tensor([tokenizer.bos_token_id]), sequence.tokens])
    n_prefix = sequence.n_prefix + 1
    return replace(sequence, tokens=tokens, n_prefix=n_prefix, bos=tokenizer.bos_token)


def with_text(model: LanguageModel, sequence: MemorizedSequence) -> MemorizedSequence:
    """The sequence with its prefix and suffix as text, where the model has a tokenizer."""
    if getattr(model, "tokenizer", None) is None:
        return sequence
    first = int(bool(sequence.bos))
    tokens = sequence.tokens[first:].tolist()
    return replace(sequence, text=divide_text(decoder(model), tokens, sequence.n_prefix - first))


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    """Sequences padded on the right, and the list of all their suffix tokens.

    A target is a suffix token: ``targets[i]`` of row ``rows[i]`` is predicted at ``positions[i]``.
    All tensors are int64, on one device. Padding needs no attention mask: in a causal model nothing
    flows to an earlier position, and padded positions have no target.

    >>> long = MemorizedSequence(torch.tensor([5, 6, 7, 8]), 2)
    >>> batch = SequenceBatch.of([long, MemorizedSequence(torch.tensor([5, 9]), 1)])
    >>> batch.targets.tolist(), batch.rows.tolist(), batch.positions.tolist()
    ([7, 8, 9], [0, 0, 1], [1, 2, 0])
    >>> batch.mean(torch.tensor([1.0, 3.0, 5.0])).tolist()
    [2.0, 5.0]
    """

    tokens: Int[Tensor, "batch pos"]
    rows: Int[Tensor, " target"]
    positions: Int[Tensor, " target"]
    targets: Int[Tensor, " target"]
    counts: Int[Tensor, " batch"]  # targets of each row

    @classmethod
    def of(
        cls, sequences: Sequence[MemorizedSequence], device: torch.device | str = "cpu"
    ) -> "SequenceBatch":
        """The batch of some sequences; it must be on the model's device."""
        counts = torch.tensor([len(sequence) - sequence.n_prefix for sequence in sequences])
        rows = torch.arange(len(sequences)).repeat_interleave(counts)
        tokens = pad_sequence([sequence.tokens for sequence in sequences], batch_first=True)
        positions = torch.cat([torch.arange(s.n_prefix - 1, len(s) - 1) for s in sequences])
        targets = tokens[rows, positions + 1]
        parts = (tokens, rows, positions, targets, counts)
        # one copy to the device
        moved = torch.cat([part.flatten() for part in parts]).to(device)
        moved = moved.split([part.numel() for part in parts])
        return cls(*(new.view_as(part) for new, part in zip(moved, parts, strict=True)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def weights(self) -> Float[Tensor, "batch pos"]:
        """Weights of a mean over the positions that predict a suffix token, row by row."""
        weights = torch.zeros(self.tokens.shape, device=self.tokens.device)
        weights[self.rows, self.positions] = 1.0
        return weights / weights.sum(1, keepdim=True)

    def mean(self, values: Float[Tensor, " target"]) -> Float[Tensor, " batch"]:
        """Mean of a number per target over each row's targets, float32."""
        # Each value to its own place and then a sum, whose order is fixed: index_add on CUDA adds
        # in any order.
        placed = values.new_zeros(self.tokens.shape, dtype=torch.float32).index_put(
            (self.rows, self.positions), values.float()
        )
        return placed.sum(-1) / self.counts


def as_list(sequences: Iterable[MemorizedSequence]) -> list[MemorizedSequence]:
    """The sequences as a list; TypeError if something else is among them, ValueError if there are
    none.
    """
    if isinstance(sequences, MemorizedSequence):
        raise TypeError(
            f"sequences must be a list of sequences, got one, {sequences!r}. Put it into a list."
        )
    if not isinstance(sequences, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"sequences must be a list of sequences, got {sequences!r:.60}. Make some with "
            "MemorizedSequence(tokens, n_prefix); what known gives has them as .sequences."
        )
    sequences = list(sequences)
    if not sequences:
        raise ValueError(
            "sequences must hold at least one sequence, got none. Check the data file or --limit."
        )
    for sequence in sequences:
        if not isinstance(sequence, MemorizedSequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"sequence must be a MemorizedSequence, got {type(sequence).__name__}. "
                "Make one with MemorizedSequence(tokens, n_prefix) or "
                "MemorizedSequence.from_text(model, prefix, suffix)."
            )
    return sequences


def ngrams(row: Int[np.ndarray, " row"], n: int) -> set[bytes]:
    """All runs of n tokens."""
    return {row[start : start + n].tobytes() for start in range(len(row) - n + 1)}


def without_text_of(
    sequences: Iterable[MemorizedSequence], texts: Sequence[MemorizedSequence]
) -> list[MemorizedSequence]:
    """Those of the sequences that share no run of 13 tokens with one of the texts, and neither hold
    a shorter text as a whole nor lie in one: what is done to the texts would be done to them too.
    """
    return [each for each in sequences if not any(share_text(each, text) for text in texts)]


def share_text(first: MemorizedSequence, second: MemorizedSequence) -> bool:
    """Whether two sequences share a run of 13 tokens, or all of the shorter one."""
    pair = (first, second)
    # a given text may begin with the other's BOS without saying so
    begins = {int(sequence.tokens[0]) for sequence in pair if sequence.bos}
    rows = [sequence.tokens[int(int(sequence.tokens[0]) in begins) :].numpy() for sequence in pair]
    n = min(OVERLAP, *map(len, rows))
    return not ngrams(rows[0], n).isdisjoint(ngrams(rows[1], n))


def other_texts(
    model: LanguageModel,
    others: MemorizedSequence | Iterable[MemorizedSequence],
    texts: Sequence[MemorizedSequence],
) -> list[MemorizedSequence]:
    """The texts that should survive, of which there may be none, without those that share text with
    ``texts``; ValueError or TypeError unless the model can read every one.
    """
    if isinstance(others, Iterable):
        others = list(others)
        if not others:
            return []
    return without_text_of(check_sequences(model, one_or_more(others)), texts)


def one_or_more(
    sequences: MemorizedSequence | Iterable[MemorizedSequence],
) -> list[MemorizedSequence]:
    """``as_list``, also of a sequence that is no list."""
    return as_list([sequences] if isinstance(sequences, MemorizedSequence) else sequences)


def check_tokens(
    model: LanguageModel,
    tokens: Int[Tensor, "*shape"],
    where: str = "",
    predicted: Int[Tensor, "*predicted"] | None = None,
) -> None:
    """Raise ValueError unless every token is in the model's vocabulary, and those that it is to
    predict are among its logits, which may be fewer in a model of one's own.
    """
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= model.cfg.d_vocab:
        raise ValueError(
            f"tokens must be in [0, {model.cfg.d_vocab}), got {low if low < 0 else high}{where}. "
            "Was the text tokenized with another model's tokenizer?"
        )
    n_logits = getattr(model.cfg, "d_vocab_out", -1)
    if predicted is not None and 0 < n_logits <= int(predicted.max()):
        raise ValueError(
            f"tokens that are predicted must be in [0, {n_logits}), for which the model has "
            f"logits, got {int(predicted.max())}{where}. Choose another prefix or suffix."
        )


def check_sequences(
    model: LanguageModel, sequences: Iterable[MemorizedSequence]
) -> list[MemorizedSequence]:
    """The sequences as a list; ValueError or TypeError unless the model can read every one."""
    check_model(model)
    sequences = as_list(sequences)
    for sequence in sequences:
        if len(sequence) > model.cfg.n_ctx:
            raise ValueError(
                f"sequence must be at most n_ctx={model.cfg.n_ctx} tokens long, got "
                f"{len(sequence)} in {sequence!r}. Shorten it."
            )
        check_tokens(model, sequence.tokens, f" in {sequence!r}", sequence.suffix)
    return sequences


def with_ids(sequences: Sequence[MemorizedSequence]) -> list[MemorizedSequence]:
    """The sequences, each with an id."""
    return [
        replace(sequence, id=sequence.id or f"sequence-{i}") for i, sequence in enumerate(sequences)
    ]


def check_ids(sequences: Sequence[MemorizedSequence]) -> None:
    """Raise ValueError where two sequences have the same id: a table would hold one of them."""
    names = [sequence.id for sequence in with_ids(sequences)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"sequences must have different ids, got {twice[:3]} more than once. Give each its own "
            "id."
        )


def check_different(sequences: Sequence[MemorizedSequence]) -> None:
    """Raise ValueError where two sequences have the same tokens: each would count among the other
    texts of its copy.
    """
    first: dict[tuple[int, ...], MemorizedSequence] = {}
    for sequence in sequences:
        other = first.setdefault(tuple(sequence.tokens.tolist()), sequence)
        if other is not sequence:
            raise ValueError(
                f"sequences must be different texts, got the tokens of {other.id!r} again in "
                f"{sequence.id!r}. Leave one of them out."
            )
