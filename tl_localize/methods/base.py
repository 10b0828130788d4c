"""What every localization method shares."""

from __future__ import annotations

import math
import numbers
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.batching import halving, tokens_that_fit
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, check_sequences, as_list

Report = Callable[[float], None]  # the fraction of the work that is done
Progress = Callable[[float, str], None]  # and what is being done
Method = Callable[[LanguageModel, MemorizedSequence], NeuronScores]  # what the benchmarks take: a Localizer, or anything like it


@dataclass(frozen=True, kw_only=True)
class Localizer(ABC):
    """A localization method: a frozen dataclass of its hyperparameters that is called with a model and a sequence.

    A subclass writes ``_attribute`` (one sequence, [layer neuron]) or, if many sequences at once are faster, ``_attribute_batch``
    ([sequence layer neuron]). Larger always means more responsible. Either may give NeuronScores in place of a tensor, where some of the
    scores are estimates.

    Args:
        batch_tokens: tokens in one forward pass; by default as many as fit into the memory that is there. Changes no score.
    Raises:
        TypeError: a setting that is not a number.
        ValueError: one that is out of its range, such as a learning rate of 0.

    >>> from dataclasses import dataclass
    >>> from typing import ClassVar
    >>> import torch
    >>> from tl_localize import Localizer, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> @dataclass(frozen=True, kw_only=True)
    ... class FirstNeurons(Localizer):
    ...     name: ClassVar[str] = "first_neurons"
    ...     def _attribute(self, neurons, sequence, report):
    ...         return -torch.arange(neurons.n_neurons).float().repeat(neurons.n_layers, 1)
    >>> model = load_model("reference")
    >>> scores = FirstNeurons()(model, reference_sequences(model)[0])
    >>> scores.top_k(0.002).mask.nonzero()[:3].tolist()
    [[0, 0], [0, 1], [0, 2]]
    """

    name: ClassVar[str]
    by_layer: ClassVar[bool] = True  # the scores of one layer mean something without the other layers
    batch_tokens: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in _NUMBERS or (value is None and f.default is None):
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{f.name} must be a number, got {value!r}. Leave it out for the default, {f.default}.")
            if f.name in _COUNTS and not (isinstance(value, numbers.Integral) and 0 <= int(value) < 2**63):
                raise ValueError(f"{f.name} must be a whole number from 0 on, got {value!r}. Write one without a point.")
            if f.name not in _FROM_ZERO and not 0 < float(value) < math.inf:
                raise ValueError(f"{f.name} must be above 0 and finite, got {value!r}. Leave it out for the default, {f.default}.")

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
        sequences = as_list(sequences)
        check_sequences(model, sequences)
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size!r}. Leave it out for as many as fit.")
        neurons = NeuronView(model)
        size = batch_size or max(1, self._tokens(neurons) // max(map(len, sequences)))
        return self._map(neurons, sequences, size, progress or (lambda fraction: None))

    def _map(self, neurons: NeuronView, sequences: list[MemorizedSequence], size: int, progress: Report) -> Iterator[NeuronScores]:
        for sequence, value in zip(sequences, self._attribute_many(neurons, sequences, size, progress), strict=True):
            shape = tuple((value.values if isinstance(value, NeuronScores) else value).shape)
            expected = (neurons.n_layers, neurons.n_neurons)
            if shape != expected:
                raise ValueError(
                    f"scores of {self.name} must have the shape {expected}, got {shape}. Return [layer neuron] from _attribute."
                )
            if isinstance(value, NeuronScores):
                yield replace(value, method=self.name, sequence_id=sequence.id, settings=repr(self))
            else:
                yield NeuronScores(value, self.name, sequence.id, repr(self))

    def _attribute_many(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], size: int, report: Report
    ) -> Iterator[Tensor | NeuronScores]:
        """One batch of up to ``size`` sequences after the other; a method that fills its batch again as it goes along overrides this."""
        done = 0

        def attribute(batch: list[MemorizedSequence]) -> Float[Tensor, "sequence layer neuron"] | list[Tensor | NeuronScores]:
            share = len(batch) / len(sequences)
            with torch.inference_mode(False), torch.enable_grad():  # whatever mode the caller is in
                return self._attribute_batch(neurons, batch, lambda fraction: report(done / len(sequences) + share * fraction))

        for batch, values in halving(attribute, sequences, size):
            done += len(batch)
            report(done / len(sequences))
            yield from values

    def _attribute(self, neurons: NeuronView, sequence: MemorizedSequence, report: Report) -> Float[Tensor, "layer neuron"] | NeuronScores:
        raise TypeError(f"{type(self).__name__} must define _attribute or _attribute_batch.")

    def _attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report
    ) -> Float[Tensor, "sequence layer neuron"] | list[Tensor | NeuronScores]:
        n = len(sequences)
        return [
            self._attribute(neurons, sequence, lambda fraction, i=i: report((i + fraction) / n)) for i, sequence in enumerate(sequences)
        ]

    def _tokens(self, neurons: NeuronView) -> int:
        """Tokens of one forward pass."""
        return self.batch_tokens or tokens_that_fit(neurons)


_COUNTS = {"steps", "seed", "first_layer", "batch_tokens"}
_FROM_ZERO = {"seed", "first_layer", "stop_sparsity", "initial_mask"}
_NUMBERS = {"learning_rate", "sparsity_weight", "temperature"} | _COUNTS | _FROM_ZERO


def check_methods(methods: Any) -> None:
    """Raise TypeError or ValueError unless this is a list with at least one method."""
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise TypeError(f"methods must be a list of methods, got {methods!r}. Pass for example [HardConcrete()].")
    if not methods:
        raise ValueError("methods must hold at least one method, got none. Pass for example [HardConcrete()].")
    for method in methods:
        if isinstance(method, type) or not callable(method):
            raise TypeError(f"methods must hold objects that score a (model, sequence), got {method!r}. Pass for example [HardConcrete()].")


def check_scores(scores: object, model: LanguageModel, method: Method) -> NeuronScores:
    """Raise TypeError or ValueError unless a method gave scores of the model's shape."""
    if not isinstance(scores, NeuronScores):
        raise TypeError(f"methods must return NeuronScores, got {type(scores).__name__} from {method!r}. Wrap the tensor in one.")
    shape = (model.cfg.n_layers, model.cfg.d_mlp)
    if tuple(scores.values.shape) != shape:
        raise ValueError(
            f"scores must have the model's shape {shape}, got {tuple(scores.values.shape)} from {method!r}. Localize in this model."
        )
    return scores


def label_methods(methods: Sequence[Method]) -> dict[str, Method]:
    """Methods by the name they have in tables: their own, with all settings where two share it."""
    names = [getattr(method, "name", getattr(method, "__name__", type(method).__name__)) for method in methods]
    labels = [repr(method) if names.count(name) > 1 else name for name, method in zip(names, methods, strict=True)]
    if len(set(labels)) < len(labels):
        raise ValueError(f"methods must differ, got {labels}. Give each another setting.")
    return dict(zip(labels, methods, strict=True))
