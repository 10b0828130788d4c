"""What every localization method shares."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.batching import Report, halving, part_of, rows_that_fit
from tl_localize.changes import Use
from tl_localize.identity import identity_text
from tl_localize.neurons import LanguageModel, NeuronView, check_count
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.units import NEURONS, Units, check_units

Values = Float[Tensor, "layer neuron"]
BatchValues = Float[Tensor, "sequence layer neuron"]
Found = Tensor | NeuronScores | ValueError  # [layer neuron], or why there are none
# what the benchmarks accept: a Localizer, or any such callable
Method = Callable[[LanguageModel, MemorizedSequence], NeuronScores]


@dataclass(frozen=True, kw_only=True)
class Localizer(ABC):
    """A localization method: a frozen dataclass of its hyperparameters that is called with a model
    and a sequence.

    A subclass defines ``attribute`` (one sequence, [layer neuron]) or, if many sequences at once
    are faster, ``attribute_batch`` ([sequence layer neuron]). Larger always means more responsible.
    Either may return NeuronScores, where some scores are estimates. A subclass with settings checks
    them in ``__post_init__``. ``name`` is the method's name in results, ``title`` its name in
    tables and figures (the name unless given). ``version`` goes up when the method's numbers
    change.

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
    ...     def attribute(self, neurons, sequence):
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

    def chosen_from(self, neurons: NeuronView) -> int | None:
        """The layer from which on a method chooses in all layers together; None where it judges
        each neuron alone.
        """
        return None

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
        report = progress or (lambda fraction: None)
        # A generator ends with the first error that it raises, so this one yields errors.
        return map(_scores_or_raise, self._results(neurons, sequences, size, report))

    def attribute(self, neurons: NeuronView, sequence: MemorizedSequence) -> Values | NeuronScores:
        """The scores of one sequence, which a method of one's own defines.

        Args:
            neurons: reads and changes the neurons of the model, which is ``neurons.model``.

        Raises:
            ValueError: the sequence has no scores; the other sequences of ``map`` keep theirs.
        """
        raise TypeError(f"{type(self).__name__} must define attribute or attribute_batch.")

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report
    ) -> BatchValues | list[Found]:
        """The scores of some sequences that fit into memory side by side; by default one by one.

        Args:
            report: called with the fraction of this batch that is done.
        """
        return one_by_one(
            lambda sequence, report: self.attribute(neurons, sequence), sequences, report
        )

    def _results(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], size: int, report: Report
    ) -> Iterator[NeuronScores | ValueError]:
        """Scores of each sequence, or why there are none, in batches of up to ``size``."""
        about: dict[str, Any] = {
            "method": self.name,
            "settings": identity_text(self),
            "units": self.units,
            "first_layer": self.chosen_from(neurons),
        }
        work = partial(self._attribute_some, neurons, sequences, report)
        for batch, values in halving(work, range(len(sequences)), size):
            for i, value in zip(batch, values, strict=True):
                yield self._wrapped(neurons, value, about | {"sequence_id": sequences[i].id})

    def _attribute_some(
        self,
        neurons: NeuronView,
        sequences: Sequence[MemorizedSequence],
        report: Report,
        batch: list[int],
    ) -> BatchValues | list[Found]:
        part = part_of(report, batch[0] / len(sequences), (batch[-1] + 1) / len(sequences))
        # whatever mode the caller is in
        with Use(neurons.model), torch.inference_mode(False), torch.enable_grad():
            values = self.attribute_batch(neurons, [sequences[i] for i in batch], part)
        part(1.0)
        return values

    def _wrapped(
        self, neurons: NeuronView, value: Found, about: dict[str, Any]
    ) -> NeuronScores | ValueError:
        if isinstance(value, ValueError):
            return value
        try:
            if isinstance(value, NeuronScores):
                scores = replace(value, **about)
            else:
                scores = NeuronScores(value, **about)
            return check_scores(scores, neurons.model, self, self.units)
        except ValueError as error:
            return error


def _scores_or_raise(result: NeuronScores | ValueError) -> NeuronScores:
    if isinstance(result, ValueError):
        raise result
    return result


def one_by_one(
    attribute: Callable[[MemorizedSequence, Report], Values | NeuronScores],
    sequences: Sequence[MemorizedSequence],
    report: Report,
) -> list[Found]:
    """The scores of each sequence by a function of one; its ValueError concerns this sequence
    alone.
    """
    found: list[Found] = []
    for i, sequence in enumerate(sequences):
        part = part_of(report, i / len(sequences), (i + 1) / len(sequences))
        try:
            found.append(attribute(sequence, part))
        except ValueError as error:
            found.append(error)
        part(1.0)
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
        found = getattr(method, "units", units)
        if found != units:
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
    if scores.units != units:
        raise ValueError(
            f"scores must be of {units!r}, got {scores.units!r} from {method!r}. Give the "
            "benchmark and its methods one unit."
        )
    view = NeuronView(model, units)
    own, shape = tuple(scores.values.shape), (view.n_layers, view.n_neurons)
    if own != shape:
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
