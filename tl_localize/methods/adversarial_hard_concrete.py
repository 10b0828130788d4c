"""Adversarial Hard Concrete: which random masks close when the text is to be lost?"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from tl_localize.checks import Real, check_between, check_positive
from tl_localize.methods.base import Values
from tl_localize.methods.concrete import (
    GATE_HIGH,
    GATE_LOW,
    hard_concrete,
    location_of,
    open_probability,
)
from tl_localize.methods.masks import Parameters
from tl_localize.methods.unlearned_masks import UnlearnedMask
from tl_localize.model.neurons import NeuronView


@dataclass(frozen=True, kw_only=True)
class AdversarialHardConcrete(UnlearnedMask):
    """How far a neuron's random mask closes, when masks are trained to lose the text, to keep
    general text and to close few neurons.

        u ~ U(0, 1),   s = sigmoid((log u - log(1 - u) + a) / temperature)
        mask = clip(s (high - low) + low, 0, 1)
        minimize over a   - loss(x | h * mask)
                          + general_weight * mean over general texts y of loss(y | h * mask)
                          + sparsity_weight * mean over neurons of P(mask = 0)
        P(mask = 0) = 1 - sigmoid(a - temperature log(-low / high))
        A(l, i) = sigmoid(-a_i)

    ``HardConcrete`` asks the other way round: which masks stay open while few may?

    Each step: one forward and one backward pass of the text and of some general texts.

    Source: Chen et al. (2024), arXiv:2405.10989, who look for neurons of personal data. Without the
    term of general text it is ``HardConcrete`` turned round. Differs:
    their code and settings are not published, so these are ours, to be searched on dev texts; the
    penalty is a mean over neurons, so that one weight serves every model size.

    Args:
        general_weight: of the loss of general text.
        sparsity_weight: of the share of masks that are closed.
        temperature: of the concrete distribution.
        initial_mask: expected mask at the start, in (-0.1, 1.1).
        steps: all are taken; minus a loss has no lower bound, so more close more masks.
        texts_per_step: general texts in each step.
        texts: token ids of general text; by default 48 texts that the model writes.
        seed: of the noise, of the order of general texts, and of those that the model writes. The
            noise is the same for every sequence.
        first_layer: layers below it have no mask and keep their start.

    Returns:
        [layer neuron] in (0, 1).

    Raises:
        ValueError: initial_mask is not in (-0.1, 1.1).

    >>> method = AdversarialHardConcrete(steps=2)  # too few for a result
    >>> len(method(model, sequence).top_k(0.01))
    90
    """

    name = "adversarial_hard_concrete"
    title = "Adversarial Hard Concrete (not the paper's)"
    learning_rate: Real = 1e-2
    steps: int = 150
    general_weight: Real = 1.0
    sparsity_weight: Real = 1.0
    temperature: Real = 1.0
    initial_mask: Real = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(temperature=self.temperature)
        check_between(0, 1e6, general_weight=self.general_weight)
        check_between(0, 1e6, sparsity_weight=self.sparsity_weight)
        # the ends of the range would take an endless location
        check_between(GATE_LOW + 1e-6, GATE_HIGH - 1e-6, initial_mask=self.initial_mask)

    def weights(self) -> tuple[Real, Real]:
        return 1, self.general_weight

    def start(self, neurons: NeuronView, generator: Generator) -> Values:
        return torch.full(neurons.size, location_of(self.initial_mask))

    def gates(self, parameters: Parameters, generator: Generator) -> Parameters:
        noise = torch.rand(parameters.shape[1:], generator=generator).to(parameters.device)
        return hard_concrete(parameters, noise, self.temperature)

    def penalty(self, parameters: Parameters) -> Tensor:
        closed = 1 - open_probability(parameters, self.temperature)
        return self.sparsity_weight * closed.mean((1, 2)).sum()

    def optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.Adam([parameters], lr=float(self.learning_rate))

    def scores(self, parameters: Values) -> Values:
        return (-parameters).sigmoid()
