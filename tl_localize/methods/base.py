"""What every localization method shares."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import starmap
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.batching import halving, rows_that_fit
from tl_localize.changes import used
from tl_localize.neurons import LanguageModel, NeuronView, check_count
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.units import NEURONS, Units, check_units

Values = Float[Tensor, "layer neuron"]
BatchValues = Float[Tensor, "sequence layer neuron"]
Found = Tensor | NeuronScores | ValueError  # [layer neuron], or why there are none
Report = Callable[[float], None]  # the fraction of the work that is done
# what the benchmarks accept: a Localizer, or any such callable
Method = Callable[[LanguageModel, MemorizedSequence], NeuronScores]


@dataclass(frozen=True, kw_only=True)
class Localizer(ABC):
    """A localization method: a frozen dataclass of its hyperparameters that is called with a model
    and a sequence.

    A subclass defines ``_attribute`` (one sequence, [layer neuron]) or, if many sequences at once
    are faster, ``_attribute_batch`` ([sequence layer neuron]). Larger always means more
    responsible. Either may return NeuronScores, where some scores are estimates. A subclass with
    settings checks them in ``__post_init__``. ``name`` is the method's name in results, ``title``
    its name in tables and figures (the name unless given). ``version`` goes up when the method's
    numbers change.

    Args:
        units: what is scored: the neurons of the MLPs, or for example ``AttentionHeads()``.
        batch_tokens: tokens in one forward pass; by default as many as fit into memory. Changes no
            score.

    Raises:
        TypeError: a setting that is not a number.
        ValueError: a setting that is out of its range, such as a learning rate of 0.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class FirstNeurons(Localizer):
    ...     name: ClassVar[str] = "first_neurons"
    ...     def _attribute(self, neurons, sequence, report):
    ...         return -torch.arange(neurons.n_neurons).float().repeat(neurons.n_layers, 1)
    >>> FirstNeurons()(model, sequence).top_k(0.002).mask.nonzero()[:3].tolist()
    [[0, 0], [0, 1], [0, 2]]
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    version: ClassVar[int] = 1
    # the scores of one layer mean something without the other layers
    by_layer: ClassVar[bool] = True
    chunk: ClassVar[int] = 1  # targets that a benchmark gives the method at once
    units: Units = NEURONS
    batch_tokens: int | None = field(default=None, repr=False, compare=False)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # dataclass would write one that always names the units
            cls.__repr__ = Localizer.__repr__

    def __repr__(self) -> str:
        shown = [
            f.name for f in fields(self) if f.repr and (f.name != "units" or self.units != NEURONS)
        ]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def passes(self) -> float:
        """About how many forward passes of a model of 10,000 neurons a sequence costs; it only
        foretells the time of a run.
        """
        return 1.0

    def __post_init__(self) -> None:
        check_units(self.units)
        if self.batch_tokens is not None:
            check_count(batch_tokens=self.batch_tokens)

    def __call__(self, model: LanguageModel, sequence: MemorizedSequence) -> NeuronScores:
        """Score every neuron for one sequence; ValueError where it does not fit the model, or a
        score is not finite.
        """
        return next(self.map(model, [sequence]))

    def map(
        self,
        model: LanguageModel,
        sequences: Sequence[MemorizedSequence],
        batch_size: int | None = None,
        progress: Report | None = None,
    ) -> Iterator[NeuronScores]:
        """Score every neuron for each sequence, in order: the same numbers as one call each, in
        batches where that is faster.

        Args:
            batch_size: sequences in one batch; by default as many as ``batch_tokens`` allow.
            progress: called with the fraction of the work done, from 0 to 1.

        Raises:
            ValueError: at the turn of a sequence whose scores are not finite. The others lose
                nothing: ``next`` goes on with them.
        """
        sequences = check_sequences(model, sequences)
        neurons = NeuronView(model, self.units)
        size = rows_that_fit(neurons, max(map(len, sequences)), batch_size, self.batch_tokens)
        found = self._attribute_many(neurons, sequences, size, progress or (lambda fraction: None))
        # Not a generator, which would end with the first error.
        return starmap(partial(self._scored, neurons), zip(sequences, found, strict=True))

    def _scored(
        self, neurons: NeuronView, sequence: MemorizedSequence, value: Found
    ) -> NeuronScores:
        if isinstance(value, ValueError):
            raise value
        about: dict[str, Any] = {
            "method": self.name,
            "sequence_id": sequence.id,
            "settings": repr(self),
            "units": self.units,
        }
        scores = (
            replace(value, **about)
            if isinstance(value, NeuronScores)
            else NeuronScores(value, **about)
        )
        return check_scores(scores, neurons.model, self, self.units)

    def _attribute_many(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], size: int, report: Report
    ) -> Iterator[Found]:
        """Scores of all sequences, in batches of up to ``size``."""
        n = len(sequences)
        for batch, values in halving(
            partial(self._attribute_some, neurons, sequences, report), range(n), size
        ):
            report((batch[-1] + 1) / n)
            yield from values

    def _attribute_some(
        self,
        neurons: NeuronView,
        sequences: Sequence[MemorizedSequence],
        report: Report,
        batch: list[int],
    ) -> BatchValues | list[Found]:
        start, share = batch[0] / len(sequences), len(batch) / len(sequences)
        # whatever mode the caller is in
        with used(neurons.model), torch.inference_mode(False), torch.enable_grad():
            return self._attribute_batch(
                neurons,
                [sequences[i] for i in batch],
                lambda fraction: report(start + share * fraction),
            )

    def _attribute(
        self, neurons: NeuronView, sequence: MemorizedSequence, report: Report
    ) -> Values | NeuronScores:
        raise TypeError(f"{type(self).__name__} must define _attribute or _attribute_batch.")

    def _attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report
    ) -> BatchValues | list[Found]:
        found: list[Found] = []
        for i, one in enumerate(sequences):
            try:
                found.append(
                    self._attribute(
                        neurons, one, lambda fraction, i=i: report((i + fraction) / len(sequences))
                    )
                )
            except ValueError as error:
                found.append(error)
        return found


def check_methods(methods: Any, units: Units) -> None:
    """Raise TypeError or ValueError unless this is a list with at least one method, of which none
    says that it scores other units.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise TypeError(
            f"methods must be a list of methods, got {methods!r}. Pass for example "
            "[HardConcrete()]."
        )
    if not methods:
        raise ValueError(
            "methods must hold at least one method, got none. Pass for example [HardConcrete()]."
        )
    for method in methods:
        if isinstance(method, type) or not callable(method):
            raise TypeError(
                f"methods must hold objects that score a (model, sequence), got {method!r}. Pass "
                "for example [HardConcrete()]."
            )
        if repr(found := getattr(method, "units", units)) != repr(units):
            raise ValueError(
                f"methods must score {units!r}, as the benchmark, got {found!r} of {method!r}. "
                "Give both the same units."
            )


def check_scores(
    scores: object, model: LanguageModel, method: Method, units: Units
) -> NeuronScores:
    """Raise TypeError or ValueError unless a method returned scores of these units and of the
    model's shape.
    """
    if not isinstance(scores, NeuronScores):
        raise TypeError(
            f"methods must return NeuronScores, got {type(scores).__name__} from {method!r}. Wrap "
            "the tensor in one."
        )
    if repr(scores.units) != repr(units):
        raise ValueError(
            f"scores must be of {units!r}, got {scores.units!r} from {method!r}. Give the "
            "benchmark and its methods one unit."
        )
    view = NeuronView(model, units)
    if (own := tuple(scores.values.shape)) != (shape := (view.n_layers, view.n_neurons)):
        raise ValueError(
            f"scores must have the model's shape {shape}, got {own} from {method!r}. Localize in "
            "this model, [layer neuron]."
        )
    return scores


def label_methods(methods: Sequence[Method]) -> dict[str, Method]:
    """Methods by their name in tables: ``name``, or the repr with all settings where two methods
    share a name.
    """
    names = [
        getattr(method, "name", getattr(method, "__name__", type(method).__name__))
        for method in methods
    ]
    labels = [
        repr(method) if names.count(name) > 1 else name
        for name, method in zip(names, methods, strict=True)
    ]
    if len(set(labels)) < len(labels):
        raise ValueError(f"methods must differ, got {labels}. Give each another setting.")
    return dict(zip(labels, methods, strict=True))
