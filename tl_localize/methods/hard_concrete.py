"""Hard Concrete: a sparse, nearly binary random mask learned by an L0 penalty."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.checks import Real, check_between, check_positive, check_seed
from tl_localize.methods.base import Values
from tl_localize.methods.concrete import (
    GATE_HIGH,
    GATE_LOW,
    hard_concrete,
    location_of,
    open_probability,
)
from tl_localize.methods.masks import CHECK_EVERY, Draw, MaskLearner, Parameters
from tl_localize.metrics import batch_loss
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import SequenceBatch

INITIAL_MASK = 1.05  # expected mask at the start, where the text's loss bears it
LARGEST_RISE = 0.1  # of the text's loss by the first masks, nats per suffix token


@dataclass(frozen=True, kw_only=True)
class HardConcrete(MaskLearner):
    """Location of a neuron's random mask, trained so that few neurons are open while the model
    still recites the sequence.

        u ~ U(0, 1),   s = sigmoid((log u - log(1 - u) + a) / temperature)
        mask = clip(s (high - low) + low, 0, 1)
        minimize over a   loss(x | h * mask)
                          + sparsity_weight * mean sigmoid(a - temperature log(-low / high))
        A(l, i) = sigmoid(a_i)

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (10) to (12) and A.4, after Louizos
    et al. (2018). Differs: the paper sums the penalty, this is the mean over the tuned neurons, so
    that one weight serves every model size (as in the authors' code); the paper searches its start
    for each model, and takes it for every text. a = log alpha, temperature = beta, low = gamma,
    high = zeta, sparsity_weight = lambda in the paper.

    Args:
        initial_mask: expected mask at the start, in (-0.1, 1.1); sigmoid(a) starts at (initial_mask
            + 0.1) / 1.2. By default it is 1.05, or a starts higher, by as many steps of 1 as it
            takes until the first masks raise the text's loss by at most 0.1 nats per suffix token.
        temperature: of the concrete distribution; smaller is closer to binary masks and noisier
            gradients.
        steps: at most; training stops earlier at a 10th step at which the penalty is below
            ``stop_sparsity``.
        first_layer: layers below it are not tuned: their masks stay random at the start value.
        seed: of the noise, which is drawn on the CPU step by step, layer by layer, and is the same
            for every sequence.

    Returns:
        [layer neuron] in (0, 1).

    Raises:
        ValueError: initial_mask is not in (-0.1, 1.1).

    >>> len(HardConcrete(steps=5)(model, sequence).top_k(0.01))  # 5 steps are too few for a result
    90
    """

    name = "hard_concrete"
    title = "Hard Concrete"
    version = 2
    learning_rate: Real = 1e-3
    sparsity_weight: Real = 30.0
    steps: int = 150
    stop_sparsity: Real = 0.1
    temperature: Real = 1.0
    initial_mask: Real | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(temperature=self.temperature)
        check_seed(self.seed)
        if self.initial_mask is not None:
            # the ends of the range would take an endless location
            check_between(GATE_LOW + 1e-6, GATE_HIGH - 1e-6, initial_mask=self.initial_mask)

    @torch.no_grad()
    def start(self, neurons: NeuronView, batch: SequenceBatch) -> Float[Tensor, " batch"]:
        mask = INITIAL_MASK if self.initial_mask is None else self.initial_mask
        start = torch.full((len(batch),), location_of(mask), device=neurons.device)
        if self.initial_mask is None:
            noise = next(self.noise(neurons))
            clean = batch_loss(neurons.model, batch)
            rising = torch.ones_like(start, dtype=torch.bool)
            while rising.any():
                gates = self.gates(start[:, None, None].expand(-1, *noise.shape), noise).unbind(1)
                with neurons.scaled(dict(enumerate(gates))):
                    rising = batch_loss(neurons.model, batch) > clean + LARGEST_RISE
                start += rising
        return start

    def noise(self, neurons: NeuronView) -> Iterator[Draw]:
        generator = torch.Generator().manual_seed(int(self.seed))
        shape = (CHECK_EVERY, *neurons.size)
        while True:
            # one copy to the device for all steps between two tests of the stop
            yield from torch.rand(shape, generator=generator).to(neurons.device)

    def gates(self, parameters: Parameters, noise: Draw) -> Parameters:
        return hard_concrete(parameters, noise, self.temperature)

    def sparsity(self, parameters: Parameters) -> Float[Tensor, " batch"]:
        return open_probability(parameters, self.temperature).mean((1, 2))

    def scores(self, parameters: Values) -> Values:
        return parameters.sigmoid().cpu()
