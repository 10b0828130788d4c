"""Many independent minimizations in one batch: what is finished leaves it, and what waits takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tl_localize.batching import free, out_of_memory, warn_halved
from tl_localize.neurons import NeuronView, Real
from tl_localize.optim import BatchAdam

Result = TypeVar("Result")
Start = Callable[[list[int]], Sequence[Tensor]]
Advance = Callable[[tuple[int, ...], BatchAdam], dict[int, Result]]


def side_by_side(
    neurons: NeuronView,
    n: int,
    size: int,
    start: Start,
    advance: Advance[Result],
    *,
    learning_rate: Real,
    max_steps: int,
    report: Callable[[float], None],
) -> Iterator[Result]:
    """Solve problems 0 to n - 1 by Adam, up to ``size`` at a time; yields their results in order.

    Problems share nothing but forward and backward passes, and each has a step counter and a state of Adam of its own, so its result
    depends neither on the others nor on when it began. When memory runs out the size is halved, with one warning, and the problems in
    the batch begin anew.

    Args:
        start: numbers of problems -> the first values of their parameters, new tensors [batch ...].
        advance: makes one step: numbers of the problems in the batch and their Adam -> results of those that are finished, by number.
        max_steps: of each problem; for ``report``, which gets the fraction of the work that is done.
    Raises:
        torch.OutOfMemoryError: one problem alone does not fit.
    """
    company = Company(start, advance, learning_rate, list(range(n)))
    done: dict[int, Result] = {}
    share, warned = 0.0, False
    for number in range(n):
        while number not in done:
            try:
                with torch.inference_mode(False), torch.enable_grad(), neurons.lean():  # whatever mode the caller is in
                    while number not in done:
                        done |= company.step(size)
                        share = max(share, (number + len(done) + company.n_steps / max_steps) / n)
                        report(share)
            except (RuntimeError, MemoryError) as error:
                if len(company.inside) <= 1 or not out_of_memory(error):
                    raise
            else:
                continue
            # Outside the except block, where the traceback no longer holds the tensors that are to be freed.
            if not warned:
                warn_halved(len(company.inside))
                warned = True
            size = len(company.inside) // 2
            company = Company(start, advance, learning_rate, company.inside + company.waiting)
            free()
        yield done.pop(number)


class Company(Generic[Result]):
    """The problems in the batch, and those that wait."""

    def __init__(self, start: Start, advance: Advance[Result], learning_rate: Real, waiting: list[int]) -> None:
        self.start, self.advance, self.waiting = start, advance, waiting
        self.inside: list[int] = []
        self.adam = BatchAdam([values.requires_grad_() for values in start([])], learning_rate)

    @property
    def n_steps(self) -> int:
        """Steps made by the problems in the batch, all together."""
        return int(self.adam.n_steps.sum())

    def step(self, size: int) -> dict[int, Result]:
        """Fill the batch, make a step, and let go those that are finished."""
        if entering := self.waiting[: size - len(self.inside)]:
            self.inside, self.waiting = self.inside + entering, self.waiting[len(entering) :]
            self.adam.add(self.start(entering))
        finished = self.advance(tuple(self.inside), self.adam)
        if finished:
            still = [i for i, number in enumerate(self.inside) if number not in finished]
            self.adam.keep(torch.tensor(still, dtype=torch.long))
            self.inside = [self.inside[i] for i in still]
        return finished
