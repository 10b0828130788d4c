"""Adam over many independent problems that share one batch dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from tl_localize.neurons import Real


class BatchAdam:
    """torch.optim.Adam's update, for parameters whose first axis is a batch of independent problems.

    Adam works entry by entry, so a batch of problems is trained exactly as each alone, at a step of its own; what torch's class can't
    do is ``keep``, drop the problems that are finished, state and all, and ``add``, take new ones in.

    Args:
        n_steps: [batch] updates of each problem so far, on the CPU.
    """

    def __init__(self, parameters: Sequence[Tensor], learning_rate: Real, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8):
        self.parameters = list(parameters)
        self.learning_rate, self.betas, self.eps = learning_rate, betas, eps
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.n_steps: Int[Tensor, " batch"] = torch.zeros(len(self.parameters[0]), dtype=torch.long)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One update, in place."""
        self.n_steps = self.n_steps + 1
        first, second = self.betas
        sizes = self.learning_rate / (1 - first ** self.n_steps.double())
        roots = (1 - second ** self.n_steps.double()).sqrt()
        for parameter, mean, square, gradient in zip(self.parameters, self.means, self.squares, gradients, strict=True):
            size, root = (per_problem.to(parameter).reshape(-1, *[1] * (parameter.ndim - 1)) for per_problem in (sizes, roots))
            mean.lerp_(gradient, 1 - first)
            square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            parameter.sub_(mean.div(square.sqrt().div_(root).add_(self.eps)).mul_(size))

    @torch.no_grad()
    def keep(self, index: Int[Tensor, " kept"]) -> None:
        """Go on with the given problems only: new ``parameters`` take the place of the old ones."""
        self.n_steps = self.n_steps[index.cpu()]
        self.parameters = [parameter.detach()[index].requires_grad_(parameter.requires_grad) for parameter in self.parameters]
        self.means = [mean[index] for mean in self.means]
        self.squares = [square[index] for square in self.squares]

    @torch.no_grad()
    def add(self, parameters: Sequence[Tensor]) -> None:
        """Take new problems in, after those that are there."""
        parts = zip(self.parameters, parameters, strict=True)
        self.n_steps = torch.cat([self.n_steps, torch.zeros(len(parameters[0]), dtype=torch.long)])
        self.means, self.squares = (
            [torch.cat([old, torch.zeros_like(new)]) for old, new in zip(state, parameters, strict=True)]
            for state in (self.means, self.squares)
        )
        self.parameters = [torch.cat([old.detach(), new]).requires_grad_(old.requires_grad) for old, new in parts]
