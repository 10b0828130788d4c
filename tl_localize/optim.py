"""Adam over many independent problems that share one batch dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from tl_localize.neurons import Real


class BatchAdam:
    """torch.optim.Adam's update, for parameters whose first axis is a batch of independent problems.

    Adam works entry by entry, so a batch of problems is trained exactly as each alone; what torch's class can't do is ``keep``: drop
    the problems that are finished, state and all.
    """

    def __init__(self, parameters: Sequence[Tensor], learning_rate: Real, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8):
        self.parameters = list(parameters)
        self.learning_rate, self.betas, self.eps = learning_rate, betas, eps
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.n_steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One update, in place."""
        self.n_steps += 1
        first, second = self.betas
        size = self.learning_rate / (1 - first**self.n_steps)
        root = (1 - second**self.n_steps) ** 0.5
        for parameter, mean, square, gradient in zip(self.parameters, self.means, self.squares, gradients, strict=True):
            mean.lerp_(gradient, 1 - first)
            square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            parameter.addcdiv_(mean, (square.sqrt() / root).add_(self.eps), value=-size)

    @torch.no_grad()
    def keep(self, index: Int[Tensor, " kept"]) -> list[Tensor]:
        """Go on with the given problems only; returns their parameters, which take the place of the old ones."""
        self.parameters = [parameter.detach()[index].requires_grad_(parameter.requires_grad) for parameter in self.parameters]
        self.means = [mean[index] for mean in self.means]
        self.squares = [square[index] for square in self.squares]
        return self.parameters
