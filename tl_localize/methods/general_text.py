"""General text: what methods compare a text with, the same for all of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import ClassVar, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.checks import check_seed
from tl_localize.methods.base import BatchValues, Localizer
from tl_localize.methods.contrast import N_DRAWN, measure_once, written_texts
from tl_localize.model.memory import rows_that_fit, work_in_batches
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, check_sequences, first_tokens, share_text

Measure = Callable[[NeuronView, Sequence[MemorizedSequence]], BatchValues]


@dataclass(frozen=True, kw_only=True)
class WithGeneralText(Localizer):
    """A method that compares a text with general text: ``texts``, or 48 texts that the model itself
    writes, as for the contrast of our other methods (``Contrasted``).

    Of given texts every token but the first is predicted, of written ones those that greedy
    decoding put there (by Activation Contrast every token but the first). The beginning-of-text
    token of models that were trained with one is not the first: it predicts nothing, as in the text
    that is scored. A given text that shares a run of 13 tokens with the text that is scored, or
    holds it, or lies in it, is left out of its comparison.

    Args:
        texts: token ids of general text; by default the model writes it, once for a model.
        seed: of the texts that the model writes, and of all else that is drawn.

    >>> SelectivePruning(texts=((5, 6, 7), (9, 8, 4))).texts[1]
    (9, 8, 4)
    """

    version = 3
    n_drawn: ClassVar[int] = N_DRAWN  # first tokens of a written text that count as its prefix
    texts: tuple[tuple[int, ...], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        object.__setattr__(self, "texts", as_token_ids(self.texts))
        if any(len(text) < 2 for text in self.texts):
            raise ValueError("texts must have 2 tokens or more, got a shorter one. Leave it out.")

    @property
    def given(self) -> list[MemorizedSequence]:
        """The given texts as sequences, each with its first token as the prefix."""
        return [
            MemorizedSequence(torch.tensor(text), 1, f"texts[{i}]")
            for i, text in enumerate(self.texts)
        ]

    def general_text(self, neurons: NeuronView) -> list[MemorizedSequence]:
        """General text as sequences, whose suffix is what is predicted; ValueError where the model
        cannot read a given one.
        """
        begin = first_tokens(getattr(neurons.model, "tokenizer", None))

        def after_bos(text: MemorizedSequence) -> MemorizedSequence:
            if text.tokens[: len(begin)].tolist() != begin:
                return text
            n_prefix = max(text.n_prefix, len(begin) + 1)
            return replace(text, n_prefix=min(n_prefix, len(text) - 1))

        if self.texts:
            return check_sequences(neurons.model, [after_bos(text) for text in self.given])
        written = written_texts(neurons, self.seed)
        prefixes = [min(self.n_drawn, len(text) - 1) for text in written]
        return [after_bos(MemorizedSequence(*pair)) for pair in zip(written, prefixes, strict=True)]

    def other_texts(self, sequence: MemorizedSequence) -> list[int]:
        """The numbers of the given texts that share nothing with the one that is scored; ValueError
        where none is left.
        """
        others = [i for i, text in enumerate(self.given) if not share_text(text, sequence)]
        if not others:
            raise ValueError(
                "texts must hold another text than the one that is scored, got only that one. "
                "Add texts, or give none."
            )
        return others

    def general_mean(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], measure: Measure
    ) -> Float[Tensor, "*sequence layer neuron"]:
        """Mean of a measure over general text, on the CPU: for each sequence where texts are given,
        else for all.
        """

        def measure_texts(neurons: NeuronView, given: object) -> Tensor:
            texts = self.general_text(neurons)

            def measure_some(chosen: list[int]) -> Tensor:
                return measure(neurons, [texts[i] for i in chosen]).cpu()

            length = max(map(len, texts))
            size = rows_that_fit(neurons, length, batch_tokens=self.batch_tokens)
            parts = work_in_batches(measure_some, range(len(texts)), size)
            values = torch.cat([found for _, found in parts])
            return values if self.texts else values.mean(0)

        # raises where one has no other text, before anything is measured
        others = [self.other_texts(sequence) for sequence in sequences] if self.texts else []
        # the class: one's own may have another text
        given = (type(self), measure, self.texts, self.seed, self.n_drawn)
        if "<" in getattr(measure, "__qualname__", "<"):  # made in a call, so it may hold settings
            found = measure_texts(neurons, given)
        else:
            found = measure_once(neurons, given, measure_texts)
        if not self.texts:
            return found
        return torch.stack([found[chosen].mean(0) for chosen in others])


def as_token_ids(texts: Iterable[Iterable[SupportsIndex]]) -> tuple[tuple[int, ...], ...]:
    """Texts as tuples of whole numbers: a settings file has lists, a sequence a tensor."""
    try:
        return tuple(tuple(index(token) for token in text) for text in texts)
    except TypeError as error:
        raise TypeError(
            f"texts must be the token ids of some texts, got {texts!r:.60}. Give the ids of each, "
            "such as sequence.tokens."
        ) from error
