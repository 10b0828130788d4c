"""What every localization method shares."""

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.checks import check_count
from tl_localize.files import identity_text
from tl_localize.metrics import warn_unless_recited
from tl_localize.model.memory import (
    FractionReport,
    check_progress,
    part_of,
    rows_that_fit,
    work_in_batches,
)
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.units import NEURONS, Units, check_units

Values = Float[Tensor, "layer neuron"]
BatchValues = Float[Tensor, "sequence layer neuron"]
Found = Tensor | NeuronScores  # [layer neuron]
# what the benchmarks accept: a Localizer, or any such callable
Method = Callable[[LanguageModel, MemorizedSequence], NeuronScores]


@dataclass(frozen=True, kw_only=True)
class Localizer(ABC):
    """A localization method: a frozen dataclass of its hyperparameters that is called with a model
    and a sequence.

    A subclass defines ``attribute`` (one sequence, [layer neuron]) or, if many sequences at once
    are faster, ``attribute_batch`` ([sequence layer neuron]). Larger always means more responsible.
    Either may return NeuronScores, where some scores are estimates. A subclass with settings checks
    them in ``__post_init__``. ``name`` is the method's name in results, tables and
    figures. ``version`` goes up when the method's numbers
    change; ``batched`` is False where several sequences take as long as one after the other: then
    each is given as soon as it is scored.

    Args:
        units: what is scored: the neurons of the MLPs, or for example ``AttentionHeads()``.
        batch_tokens: tokens in one forward pass; by default as many as fit into memory. Changes no
            score.

    Raises:
        TypeError: units that are none.
        ValueError: a setting that is no number, or out of its range, such as a learning rate of 0.

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
    batched: ClassVar[bool] = True
    units: Units = NEURONS
    batch_tokens: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for setting in fields(self):
            if type(setting.default) is float and type(value := getattr(self, setting.name)) is int:
                object.__setattr__(self, setting.name, float(value))  # 1 and 1.0 are one setting
        check_units(self.units)
        if self.batch_tokens is not None:
            check_count(batch_tokens=self.batch_tokens)

    def chosen_from(self, neurons: NeuronView) -> int | None:
        """The lowest layer that the method scores, if it scores all layers together; None if it
        judges each neuron alone.
        """
        return None

    @property
    def takes_several(self) -> bool:
        """Whether it is faster on several sequences than on one after the other."""
        return self.batched and type(self).attribute_batch is not Localizer.attribute_batch

    def __call__(self, model: LanguageModel, sequence: MemorizedSequence) -> NeuronScores:
        """Score every neuron for one sequence.

        A text that the model does not recite is scored too, with a ``NotRecitedWarning``; to know
        that takes one forward pass.

        Raises:
            ValueError: the sequence does not fit the model, or a score is not finite.
        """
        sequences = check_sequences(model, [sequence])
        warn_unless_recited(model, sequences, self.batch_tokens)
        return next(self.map(model, sequences, check=False))

    def map(
        self,
        model: LanguageModel,
        sequences: Sequence[MemorizedSequence],
        batch_size: int | None = None,
        progress: FractionReport | None = None,
        *,
        check: bool = True,
    ) -> Iterator[NeuronScores]:
        """Score every neuron for each sequence, in order: the same numbers as one call each, to
        the tolerance of the dtype, in batches where that is faster. The sequences of a batch are
        padded on the right: a hook of yours that counts positions from the end, or moves something
        to earlier ones, needs ``batch_size=1``.

        Args:
            batch_size: sequences in one batch; by default as many as ``batch_tokens`` allow.
            progress: called with the fraction of the work done, from 0 to 1.
            check: warn (``NotRecitedWarning``) where the model does not recite a sequence; to know
                that takes one forward pass of the sequences, side by side.

        Raises:
            ValueError: a sequence does not fit the model, or its scores are not finite.

        It works as it is read: inside a block that changes the model take ``list`` of it.
        """
        sequences = check_sequences(model, sequences)
        if check:
            warn_unless_recited(model, sequences, self.batch_tokens)
        return chain.from_iterable(self.map_batches(model, sequences, batch_size, progress))

    def map_batches(
        self,
        model: LanguageModel,
        sequences: Sequence[MemorizedSequence],
        batch_size: int | None = None,
        progress: FractionReport | None = None,
    ) -> Iterator[list[NeuronScores]]:
        """``map`` without its warning, one batch at a time, each given as soon as it is scored.

        >>> [len(batch) for batch in Activations().map_batches(model, few, batch_size=2)]
        [2, 2]
        """
        sequences = check_sequences(model, sequences)
        neurons = NeuronView(model, self.units)
        size = rows_that_fit(neurons, max(map(len, sequences)), batch_size, self.batch_tokens)
        if not self.takes_several:
            size = 1  # each is given as soon as it is scored
        check_progress(progress)
        return self._results(neurons, sequences, size, progress or (lambda fraction: None))

    def attribute(self, neurons: NeuronView, sequence: MemorizedSequence) -> Values | NeuronScores:
        """The scores of one sequence, which a method of one's own defines.

        Args:
            neurons: reads and changes the neurons of the model, which is ``neurons.model``.

        Raises:
            ValueError: the sequence has no scores.
        """
        raise TypeError(f"{type(self).__name__} must define attribute or attribute_batch.")

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues | list[Found]:
        """The scores of some sequences that fit into memory side by side; by default one by one.

        Args:
            report: called with the fraction of this batch that is done.
        """
        return one_by_one(lambda sequence, _: self.attribute(neurons, sequence), sequences, report)

    def _results(
        self,
        neurons: NeuronView,
        sequences: Sequence[MemorizedSequence],
        size: int,
        report: FractionReport,
    ) -> Iterator[list[NeuronScores]]:
        """Scores of each sequence, in batches of up to ``size``."""
        n = len(sequences)
        if not isinstance(getattr(self, "name", None), str):
            kind = type(self).__name__
            raise TypeError(
                f"method must have a name, got none in {kind}. Write into the class: "
                f"name: ClassVar[str] = {kind.lower()!r}."
            )

        def work(batch: list[int]) -> BatchValues | list[Found]:
            part = part_of(report, batch[0] / n, (batch[-1] + 1) / n)
            # whatever mode the caller is in
            with torch.inference_mode(False), torch.enable_grad():
                values = self.attribute_batch(neurons, [sequences[i] for i in batch], part)
            part(1.0)
            return values

        about: dict[str, Any] = {
            "method": self.name,
            "settings": identity_text(self),
            "units": self.units,
        }
        chosen_from = self.chosen_from(neurons)
        for batch, values in work_in_batches(work, range(n), size):
            if not hasattr(values, "__len__"):
                raise TypeError(
                    "attribute_batch must return scores of each sequence, got "
                    f"{type(values).__name__} from {self!r}. Return a tensor [sequence layer "
                    "neuron]."
                )
            if len(values) != len(batch):
                raise ValueError(
                    f"attribute_batch must return scores of all {len(batch)} sequences, got "
                    f"{len(values)} from {self!r}. Return them in the order of the sequences."
                )
            found: list[NeuronScores] = []
            for i, value in zip(batch, values, strict=True):
                about["sequence_id"] = sequences[i].id
                if isinstance(value, NeuronScores):
                    first_layer = value.first_layer if chosen_from is None else chosen_from
                    scores = replace(value, **about, first_layer=first_layer)
                else:
                    numbers = self._as_tensor(value)
                    scores = NeuronScores(numbers, **about, first_layer=chosen_from)
                found.append(check_scores(scores, neurons, self))
            yield found

    def _as_tensor(self, value: Any) -> Tensor:
        """What a method of one's own gave for a sequence; TypeError where it is no tensor."""
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"attribute must return a tensor [layer neuron], got {type(value).__name__} from "
                f"{self!r}. Stack the layers with torch.stack."
            ) from error


def one_by_one(
    score: Callable[[MemorizedSequence, FractionReport], Found],
    sequences: Sequence[MemorizedSequence],
    report: FractionReport,
) -> list[Found]:
    """The scores of each sequence, for methods that are no faster on several.

    Args:
        score: called with a sequence and with what is told the fraction of it that is done.
    """
    found: list[Found] = []
    for i, sequence in enumerate(sequences):
        part = part_of(report, i / len(sequences), (i + 1) / len(sequences))
        found.append(score(sequence, part))
        part(1.0)
    return found


def check_scores(scores: object, neurons: NeuronView, method: Method) -> NeuronScores:
    """Raise TypeError or ValueError unless a method returned scores of these neurons."""
    if not isinstance(scores, NeuronScores):
        raise TypeError(
            f"methods must return NeuronScores, got {type(scores).__name__} from {method!r}. Wrap "
            "the tensor in one."
        )
    found = scores.units, *scores.values.shape
    wanted = neurons.units, *neurons.size
    if found != wanted:
        raise ValueError(
            f"scores must be of {wanted} (units, layers, neurons), got {found} from {method!r}. "
            "Localize in this model, in the units of the benchmark."
        )
    return scores


def label_methods(methods: Any, units: Units) -> dict[str, Method]:
    """Methods by their name in tables: ``name``, or the repr with all settings where two methods
    share a name.

    Raises:
        TypeError, ValueError: it is not a list of methods that all score these units.
    """
    known = isinstance(methods, list | tuple)
    if not known or any(isinstance(method, type) or not callable(method) for method in methods):
        raise TypeError(
            "methods must be a list of objects that score a (model, sequence), got "
            f"{methods!r}. Pass for example [HardConcrete()]."
        )
    names: list[str] = []
    for method in methods:
        found = getattr(method, "units", units)
        if found != units:
            raise ValueError(
                f"methods must score {units!r}, as the benchmark, got {found!r} of {method!r}. "
                "Give both the same units."
            )
        default = getattr(method, "__name__", type(method).__name__)
        names.append(getattr(method, "name", default))
    labelled: dict[str, Method] = {
        repr(method) if names.count(name) > 1 else name: method
        for name, method in zip(names, methods, strict=True)
    }
    if len(labelled) < len(names):
        raise ValueError(f"methods must differ, got {names}. Give each another setting.")
    return labelled
