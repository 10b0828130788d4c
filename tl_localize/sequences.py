"""Sequences that a model has memorized, and batches of them."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.neurons import LanguageModel, as_tensor, check_model

SHOWN = 30  # characters of the prefix and of the suffix in a sequence's repr


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
        if isinstance(self.tokens, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            start = self.tokens[:20]
            raise TypeError(
                f"tokens must be token ids, got the text {start!r}. Use "
                "MemorizedSequence.from_text(model, prefix, suffix)."
            )
        tokens = as_tensor("tokens", self.tokens)
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(
                f"tokens must be a vector of token ids, got shape {tuple(tokens.shape)} of "
                f"{tokens.dtype}. Pass one sequence, such as tokens[0], as the tokenizer gives it."
            )
        if isinstance(self.n_prefix, bool) or not isinstance(self.n_prefix, numbers.Integral):
            raise TypeError(
                f"n_prefix must be a whole number, got {self.n_prefix!r}. It counts the tokens of "
                "the prefix."
            )
        if not 1 <= self.n_prefix < len(tokens):
            raise ValueError(
                f"n_prefix must be at least 1 and below the number of tokens ({len(tokens)}), got "
                f"{self.n_prefix}. "
                "The model needs a token to start from, and a suffix to be scored on."
            )
        object.__setattr__(self, "tokens", tokens.detach().to("cpu", torch.long, copy=True))

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
    ) -> MemorizedSequence:
        """Tokenize ``prefix + suffix`` as the model's tokenizer does, without other special tokens.

        Args:
            prepend_bos: Whether the prefix starts with the beginning-of-text token. None: as the
                tokenizer does by default, where this token is not also the end of a text. So
                models that were trained with one (Llama, Gemma) get it, and GPT-2 and Pythia do
                not, also where TransformerLens has set the tokenizer to add it.

        Raises:
            ValueError: the model has no tokenizer, prefix or suffix is empty, or no token boundary
                falls between them.
        """
        tokenizer = tokenizer_of(model)
        for name, text in (("prefix", prefix), ("suffix", suffix)):
            if not text or not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"{name} must be text, got {text!r}. The prefix prompts the model and the "
                    "suffix is what it recites."
                )
        prefix_tokens = encode(tokenizer, prefix)
        tokens = encode(tokenizer, prefix + suffix)
        n_prefix, bos = len(prefix_tokens), ""
        if tokens[:n_prefix] != prefix_tokens:
            shared = n_prefix - 1
            while shared and tokens[:shared] != prefix_tokens[:shared]:
                shared -= 1
            before, after = (
                tokenizer.decode(part, clean_up_tokenization_spaces=False)
                for part in (tokens[:shared], tokens[shared:])
            )
            advice = f"The last boundary before it is {before[-20:]!r} | {after[:20]!r}."
            raise ValueError(
                f"suffix must begin at a token boundary, got {suffix[:20]!r} after "
                f"{prefix[-20:]!r}, where the tokenizer merges across. "
                f"{advice if shared else 'Use a longer prefix.'}"
            )
        if prepend_bos is None:
            prepend_bos = starts_with_bos(tokenizer)
        if prepend_bos:
            if tokenizer.bos_token_id is None:
                raise ValueError(
                    "prepend_bos must be False for a tokenizer without a beginning-of-text token, "
                    "got True. Leave it out."
                )
            tokens, bos = [tokenizer.bos_token_id, *tokens], tokenizer.bos_token
            n_prefix += 1
        return cls(torch.tensor(tokens), n_prefix, id, category, (prefix, suffix), bos)

    @property
    def prefix(self) -> Int[Tensor, " prefix"]:
        return self.tokens[: self.n_prefix]

    @property
    def suffix(self) -> Int[Tensor, " suffix"]:
        return self.tokens[self.n_prefix :]

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

    def _repr_html_(self) -> str:
        prefix, suffix = (escape(part) for part in self.text)
        shown = (
            '<div style="white-space:pre-wrap;font-family:monospace">'
            f'<span style="color:#777">{prefix}</span><b> | </b>{suffix}</div>'
        )
        return f"<div>{escape(repr(replace(self, text=('', ''))))}</div>" + (
            shown if any(self.text) else ""
        )


NO_TOKENIZER = (
    "model must have a tokenizer to read text, got none. Put its files into the model's directory, "
    "or pass tokens."
)


def tokenizer_of(model: LanguageModel, wrong: str = NO_TOKENIZER) -> Any:
    """The model's tokenizer; ValueError if it has none."""
    check_model(model)
    if (tokenizer := getattr(model, "tokenizer", None)) is None:
        raise ValueError(wrong)
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without the special tokens that TransformerLens' wrapped tokenizers put
    first.
    """
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def starts_with_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a token first that means nothing but the beginning of a text."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return False
    first = tokenizer("a")["input_ids"][0]
    return first == bos != tokenizer.eos_token_id


def with_bos(model: LanguageModel, sequence: MemorizedSequence) -> MemorizedSequence:
    """The sequence after the beginning-of-text token, where the tokenizer puts one first."""
    tokenizer = tokenizer_of(model)
    if not starts_with_bos(tokenizer):
        return sequence
    tokens = torch.cat([torch.tensor([tokenizer.bos_token_id]), sequence.tokens])
    n_prefix = sequence.n_prefix + 1
    return replace(sequence, tokens=tokens, n_prefix=n_prefix, bos=tokenizer.bos_token)


def text_parts(
    model: LanguageModel, tokens: list[int], n_prefix: int, text: str = ""
) -> tuple[str, str]:
    """Prefix and suffix as text, divided after some tokens; empty without a tokenizer; without a
    text the suffix is decoded.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return "", ""
    prefix = tokenizer.decode(tokens[:n_prefix], clean_up_tokenization_spaces=False)
    return prefix, text[len(prefix) :] if text else tokenizer.decode(
        tokens[n_prefix:], clean_up_tokenization_spaces=False
    )


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

    def __repr__(self) -> str:
        counts = f"{len(self.tokens)} sequences, {len(self.targets)} targets"
        return f"SequenceBatch({counts}, {self.tokens.device})"

    @classmethod
    def of(
        cls, sequences: Sequence[MemorizedSequence], device: torch.device | str = "cpu"
    ) -> SequenceBatch:
        """The batch of some sequences; it must be on the model's device."""
        sequences = as_list(sequences)
        tokens = torch.nn.utils.rnn.pad_sequence(
            [sequence.tokens for sequence in sequences], batch_first=True
        )
        rows = torch.cat(
            [torch.full((len(s) - s.n_prefix,), row) for row, s in enumerate(sequences)]
        )
        positions = torch.cat([torch.arange(s.n_prefix - 1, len(s) - 1) for s in sequences])
        targets = tokens[rows, positions + 1]
        return cls(*(part.to(device) for part in (tokens, rows, positions, targets)))

    def __len__(self) -> int:
        return len(self.tokens)

    def mean(self, values: Float[Tensor, " target"]) -> Float[Tensor, " batch"]:
        """Mean of a number per target over each row's targets, float32."""
        count = torch.bincount(self.rows, minlength=len(self))
        # Each value to its own place and then a sum, whose order is fixed: index_add on CUDA adds
        # in any order.
        placed = values.new_zeros(self.tokens.shape, dtype=torch.float32).index_put(
            (self.rows, self.positions), values.float()
        )
        return placed.sum(-1) / count


def as_list(sequences: Iterable[MemorizedSequence]) -> list[MemorizedSequence]:
    """The sequences as a list; TypeError if something else is among them, ValueError if there are
    none.
    """
    if isinstance(sequences, MemorizedSequence):
        raise TypeError(
            f"sequences must be a list of sequences, got {sequences!r}. Write [sequence]."
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


def check_tokens(model: LanguageModel, tokens: Int[Tensor, "*shape"], where: str = "") -> None:
    """Raise ValueError unless every token is in the model's vocabulary."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= model.cfg.d_vocab:
        advice = "Was the text tokenized with another model's tokenizer?"
        raise ValueError(
            f"tokens must be in [0, {model.cfg.d_vocab}), got {low if low < 0 else high}{where}. "
            f"{advice}"
        )


def check_sequences(
    model: LanguageModel, sequences: Iterable[MemorizedSequence]
) -> list[MemorizedSequence]:
    """The sequences as a list; ValueError or TypeError unless the model can read every one."""
    check_model(model)
    sequences = as_list(sequences)
    for sequence in sequences:
        if len(sequence) > model.cfg.n_ctx:
            n_ctx = model.cfg.n_ctx
            raise ValueError(
                f"sequence must be at most n_ctx={n_ctx} tokens long, got {len(sequence)} in "
                f"{sequence!r}. Shorten it."
            )
        check_tokens(model, sequence.tokens, f" in {sequence!r}")
    return sequences
