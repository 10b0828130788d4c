"""What every localization method shares."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.memory import halving, tokens_that_fit
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, check_sequences

Report = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class Localizer(ABC):
    """A localization method: a frozen dataclass of its hyperparameters that is called with a model and a sequence.

    A subclass writes ``_attribute`` (one sequence, [layer neuron]) or, if many sequences at once are faster, ``_attribute_batch``
    ([sequence layer neuron]). Larger always means more responsible.

    Args:
        batch_tokens: tokens in one forward pass; by default as many as fit into the memory that is there. Changes no score.
    """

    name: ClassVar[str]
    batch_tokens: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _POSITIVE and value is not None and not value > 0:
                raise ValueError(f"{f.name} must be above 0, got {value!r}.")
            if f.name in _COUNTS and value is not None and (isinstance(value, bool) or int(value) != value or value < 0):
                raise ValueError(f"{f.name} must be a whole number from 0 on, got {value!r}.")

    def __call__(self, model: LanguageModel, sequence: MemorizedSequence) -> NeuronScores:
        """Score every neuron for one sequence.

        Raises:
            ValueError: the model has no neuron axis, the sequence does not fit the model, or a score is not finite.
        """
        return next(self.map(model, [sequence]))

    def map(
        self,
        model: LanguageModel,
        sequences: Sequence[MemorizedSequence],
        batch_size: int | None = None,
        progress: Report | None = None,
    ) -> Iterator[NeuronScores]:
        """Score every neuron for each sequence, in order; the same numbers as one call each, but side by side where that is faster.

        Args:
            batch_size: sequences side by side; by default as many as ``batch_tokens`` allow.
            progress: called with the fraction of the work done, from 0 to 1.
        """
        sequences = list(sequences)
        check_sequences(model, sequences)
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size!r}.")
        neurons = NeuronView(model)
        size = batch_size or max(1, self._tokens(neurons) // max(map(len, sequences)))
        return self._map(neurons, sequences, size, progress or (lambda fraction: None))

    def _map(self, neurons: NeuronView, sequences: list[MemorizedSequence], size: int, progress: Report) -> Iterator[NeuronScores]:
        done = 0

        def attribute(batch: list[MemorizedSequence]) -> Float[Tensor, "sequence layer neuron"]:
            share = len(batch) / len(sequences)
            return self._attribute_batch(neurons, batch, lambda fraction: progress(done / len(sequences) + share * fraction))

        for batch, values in halving(attribute, sequences, size):
            done += len(batch)
            progress(done / len(sequences))
            for sequence, value in zip(batch, values, strict=True):
                expected = (neurons.n_layers, neurons.n_neurons)
                if tuple(value.shape) != expected:
                    raise ValueError(f"scores of {self.name} must have the shape {expected}, got {tuple(value.shape)}.")
                yield NeuronScores(value, self.name, sequence.id, repr(self))

    def _attribute(self, neurons: NeuronView, sequence: MemorizedSequence, report: Report) -> Float[Tensor, "layer neuron"]:
        raise TypeError(f"{type(self).__name__} must define _attribute or _attribute_batch.")

    def _attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report
    ) -> Float[Tensor, "sequence layer neuron"]:
        n = len(sequences)
        return torch.stack(
            [self._attribute(neurons, sequence, lambda fraction, i=i: report((i + fraction) / n)) for i, sequence in enumerate(sequences)]
        )

    def _tokens(self, neurons: NeuronView) -> int:
        """Tokens of one forward pass."""
        return self.batch_tokens or tokens_that_fit(neurons)


_POSITIVE = {"learning_rate", "sparsity_weight", "temperature", "steps", "batch_tokens"}
_COUNTS = {"steps", "seed", "first_layer", "batch_tokens"}
