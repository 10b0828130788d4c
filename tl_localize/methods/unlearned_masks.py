"""Training of masks that lose a text and keep general text, shared by two published rivals."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from tl_localize.checks import Real, check_count, check_positive
from tl_localize.methods.base import BatchValues, Found, Values, one_by_one
from tl_localize.methods.general_text import WithGeneralText
from tl_localize.methods.masks import Parameters, check_first_layer
from tl_localize.methods.partial_runs import gate_gradients
from tl_localize.metrics import batch_loss
from tl_localize.model.memory import FractionReport, rows_that_fit, work_in_batches
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch

Texts = list[MemorizedSequence]


@dataclass(frozen=True, kw_only=True)
class UnlearnedMask(WithGeneralText):
    """A method that trains masks which lose a text while general text stays: each step minimizes

        general_weight * mean over some general texts y of loss(y | h * mask)
        - own_weight * loss(x | h * mask) + penalty

    One independent mask per sequence; the masks of a batch are trained side by side, on the same
    general texts and random numbers. Layers below ``first_layer`` have no mask and keep their
    start. There is no early stop.

    Args:
        texts_per_step: general texts in each step; all are read in a random order before the first
            comes again.
    """

    learning_rate: Real
    steps: int
    texts_per_step: int = 4
    first_layer: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(learning_rate=self.learning_rate)
        check_count(steps=self.steps, texts_per_step=self.texts_per_step)
        check_count(0, first_layer=self.first_layer)

    def chosen_from(self, neurons: NeuronView) -> int:
        return check_first_layer(neurons, self.first_layer)

    @abstractmethod
    def weights(self) -> tuple[Real, Real]:
        """``own_weight`` and ``general_weight``."""

    @abstractmethod
    def start(self, neurons: NeuronView, generator: Generator) -> Values:
        """The first parameters of every mask, on the CPU."""

    @abstractmethod
    def gates(self, parameters: Parameters, generator: Generator) -> Parameters:
        """What the neurons are multiplied by; differentiable."""

    def penalty(self, parameters: Parameters) -> Tensor:
        """What is added to the objective, the sum over masks; nothing by default."""
        return parameters.new_zeros(())

    @abstractmethod
    def optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
        """What moves the parameters, each entry by its own gradient alone."""

    @abstractmethod
    def scores(self, parameters: Values) -> Values:
        """The scores that trained parameters are."""

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> list[Found]:
        n_given = len(self.texts)
        if n_given and any(len(self.other_texts(sequence)) < n_given for sequence in sequences):
            # whose general text is another one for each of them
            return one_by_one(
                lambda sequence, part: self._train_alone(neurons, sequence, part), sequences, report
            )
        return self._train(neurons, sequences, report)

    def _train_alone(
        self, neurons: NeuronView, sequence: MemorizedSequence, report: FractionReport
    ) -> Found:
        others = tuple(self.texts[i] for i in self.other_texts(sequence))
        return replace(self, texts=others)._train(neurons, [sequence], report)[0]

    def _train(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> list[Found]:
        generator = torch.Generator().manual_seed(int(self.seed))
        start = self.start(neurons, generator).to(neurons.device)
        masks = start.repeat(len(sequences), 1, 1)
        own = SequenceBatch.of(sequences, neurons.device)
        own_weight, general_weight = self.weights()
        tuned = masks[:, self.first_layer :].clone()
        optimizer = self.optimizer(tuned)
        general = self._general_texts(neurons, generator)
        for step in range(self.steps):
            values = tuned.clone().requires_grad_()
            gates = self.gates(values, generator)
            every = torch.ones_like(masks)
            every[:, self.first_layer :] = gates.detach()
            slopes = general_weight * self._general_slopes(neurons, every, next(general))
            slopes -= own_weight * gate_gradients(neurons, own, batch_loss, every)[0]
            # its gradient is that of the objective
            total = (gates * slopes[:, self.first_layer :]).sum() + self.penalty(values)
            (tuned.grad,) = torch.autograd.grad(total, values)
            optimizer.step()
            report((step + 1) / self.steps)
        masks[:, self.first_layer :] = tuned.detach()
        return [self.scores(mask).cpu() for mask in masks]

    def _general_texts(self, neurons: NeuronView, generator: Generator) -> Iterator[Texts]:
        """The general texts of each step."""
        texts = self.general_text(neurons)
        left: list[int] = []
        while True:
            chosen: Texts = []
            while len(chosen) < min(self.texts_per_step, len(texts)):
                left = left or torch.randperm(len(texts), generator=generator).tolist()
                chosen.append(texts[left.pop()])
            yield chosen

    def _general_slopes(self, neurons: NeuronView, gates: BatchValues, texts: Texts) -> BatchValues:
        """Gradient of the mean loss of some texts for the gates of each mask."""
        pairs = [(mask, text) for mask in range(len(gates)) for text in texts]
        total = torch.zeros_like(gates)

        def measure(some: list[tuple[int, MemorizedSequence]]) -> BatchValues:
            batch = SequenceBatch.of([text for _, text in some], neurons.device)
            return gate_gradients(neurons, batch, batch_loss, gates[[mask for mask, _ in some]])[0]

        size = rows_that_fit(neurons, max(map(len, texts)), batch_tokens=self.batch_tokens)
        for some, slopes in work_in_batches(measure, pairs, size):
            for (mask, _), slope in zip(some, slopes, strict=True):
                total[mask] += slope
        return total / len(texts)
