"""Hard Concrete: a sparse, nearly binary random mask learned by an L0 penalty."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.methods.base import Localizer, Report
from tl_localize.methods.masks import train_masks, tuned_layers
from tl_localize.neurons import NeuronView, Real
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence

GATE_LOW, GATE_HIGH = -0.1, 1.1  # gamma and zeta: the interval that the concrete variable is stretched to
NOISE_MARGIN = 1e-4  # the uniform noise is kept this far from 0 and 1


@dataclass(frozen=True, kw_only=True)
class HardConcrete(Localizer):
    """Probability-like location of a neuron's random mask, learned so that few neurons are open and the sequence is still recited.

        u ~ U(0, 1),   s = sigmoid((log u - log(1 - u) + a) / temperature),   mask = clip(s (high - low) + low, 0, 1)
        minimize over a   loss(x | h * mask) + sparsity_weight * mean sigmoid(a - temperature log(-low / high))
        A(l, i) = sigmoid(a_i)

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (8), (9) and A.4, after Louizos et al. (2018). Differs: the paper sums the
    penalty, this is the mean over the tuned neurons, so that one weight serves every model size (as in the authors' code).
    Args:    initial_mask: expected mask at the start, in (-0.1, 1.1); sigmoid(a) starts at (initial_mask + 0.1) / 1.2.
             temperature: of the concrete distribution; smaller is closer to binary masks and noisier gradients.
             steps: at most so many; training ends earlier when, at a 10th step, the penalty is below ``stop_sparsity``.
             first_layer: layers below it are not tuned: their masks stay random at the start value.
             seed: of the noise, drawn on the CPU for every device: step by step, layer by layer, the same for every sequence.
    Memory:  4 (B L (5 f + 10 d + 4 h n) + 4 T V + 16 L f B / n) bytes beyond the weights; letters in ``memory.peak_bytes``.
    Returns: [layer neuron] in (0, 1).
    Raises:  ValueError: initial_mask is not in (-0.1, 1.1).

    >>> from tl_localize import HardConcrete, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> scores = HardConcrete(steps=5, first_layer=1)(model, sequence)  # so few steps show the form only
    >>> len(scores.top_k(0.005, first_layer=1, rounding="floor"))
    35
    """

    name: ClassVar[str] = "hard_concrete"
    by_layer: ClassVar[bool] = False  # the masks of all layers are learned together
    learning_rate: Real = 1e-3
    sparsity_weight: Real = 30.0
    steps: int = 150
    stop_sparsity: Real = 0.1
    temperature: Real = 1.0
    initial_mask: Real = 1.05
    first_layer: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not GATE_LOW < self.initial_mask < GATE_HIGH:
            raise ValueError(f"initial_mask must be in ({GATE_LOW}, {GATE_HIGH}), got {self.initial_mask!r}. Use 0.5.")

    def _attribute_many(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], size: int, report: Report
    ) -> Iterator[Tensor | NeuronScores]:
        tuned = tuned_layers(neurons, self.first_layer)
        start = torch.tensor(math.log((self.initial_mask - GATE_LOW) / (GATE_HIGH - self.initial_mask)), device=neurons.device)
        untuned = start.expand(1, self.first_layer, neurons.n_neurons)
        noise = Noise(self.seed, neurons.n_layers, neurons.n_neurons)

        def gates(location: Float[Tensor, "batch tuned neuron"], steps: list[int]) -> dict[int, Tensor]:
            everywhere = torch.cat([untuned.expand(len(location), -1, -1), location], dim=1)
            return dict(enumerate(hard_concrete(everywhere, noise.at(steps).to(location.device), self.temperature).unbind(1)))

        shift = self.temperature * math.log(-GATE_LOW / GATE_HIGH)
        locations = train_masks(
            neurons,
            sequences,
            start.expand(len(sequences), len(tuned), neurons.n_neurons),
            gates,
            lambda location: (location - shift).sigmoid().mean((1, 2)),
            size=size,
            learning_rate=self.learning_rate,
            sparsity_weight=self.sparsity_weight,
            steps=self.steps,
            stop_sparsity=self.stop_sparsity,
            report=report,
        )
        return (torch.cat([untuned[0], location]).sigmoid().cpu() for location in locations)


class Noise:
    """The uniform noise of every step, the same for every sequence: [layer neuron] a step, drawn on the CPU one after the other.

    The generator's state before each step is kept (5 kB), so that sequences at different steps each find theirs.
    """

    def __init__(self, seed: int, n_layers: int, n_neurons: int) -> None:
        self.shape = n_layers, n_neurons
        self.generator = torch.Generator().manual_seed(seed)
        self.states = [self.generator.get_state()]  # the last one is that of the first step not drawn yet

    def at(self, steps: list[int]) -> Float[Tensor, "#batch layer neuron"]:
        """Noise of the step (from 1) that each row of a batch is at; one row when all are at the same."""
        drawn = {step: self._draw(step) for step in sorted(set(steps))}
        return torch.stack([drawn[step] for step in steps] if len(drawn) > 1 else list(drawn.values()))

    def _draw(self, step: int) -> Float[Tensor, "layer neuron"]:
        self.generator.set_state(self.states[step - 1])
        noise = torch.rand(self.shape, generator=self.generator)
        if step == len(self.states):
            self.states.append(self.generator.get_state())
        return noise


def hard_concrete(location: Float[Tensor, "*shape"], noise: Float[Tensor, "*noise"], temperature: float) -> Float[Tensor, "*shape"]:
    """A sample of the hard concrete distribution, differentiable in its location."""
    noise = noise.clamp(NOISE_MARGIN, 1 - NOISE_MARGIN)
    concrete = ((noise.log() - (1 - noise).log() + location) / temperature).sigmoid()
    return (concrete * (GATE_HIGH - GATE_LOW) + GATE_LOW).clamp(0, 1)
