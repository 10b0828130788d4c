"""Problems side by side: each as if alone, whatever the company, in order, through a shortage of memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tl_localize.neurons import NeuronView
from tl_localize.optim import BatchAdam
from tl_localize.side_by_side import side_by_side

TARGETS = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))


class Problems:
    """Go to TARGETS[number] in LENGTHS[number] steps; remembers who was in each batch."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.companies = lengths, list[tuple[int, ...]]()

    def start(self, numbers: list[int]) -> list[torch.Tensor]:
        return [torch.zeros(len(numbers), 3)]

    def advance(self, numbers: tuple[int, ...], adam: BatchAdam) -> dict[int, torch.Tensor]:
        self.companies.append(numbers)
        loss = ((adam.parameters[0] - TARGETS[list(numbers)]) ** 2).sum()
        adam.step(torch.autograd.grad(loss, adam.parameters))
        ends = zip(numbers, adam.n_steps.tolist(), adam.parameters[0].detach().clone(), strict=True)
        return {number: values for number, n_steps, values in ends if n_steps == self.lengths[number]}

    def solve(self, model: Any, size: int, report: Any = lambda fraction: None) -> Any:
        n = len(self.lengths)
        return side_by_side(
            NeuronView(model), n, size, self.start, self.advance, learning_rate=0.1, max_steps=max(self.lengths), report=report
        )


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9), size=st.integers(1, 12))
def test_problems_are_solved_as_if_alone_and_in_order(gpt2_like: Any, lengths: list[int], size: int) -> None:
    problems = Problems(lengths)
    found = list(problems.solve(gpt2_like, size))
    for number, values in enumerate(found):
        parameter = torch.zeros(1, 3)
        adam = BatchAdam([parameter], 0.1)
        for _ in range(lengths[number]):
            adam.step([2 * (parameter - TARGETS[number])])
        torch.testing.assert_close(values, parameter[0])
    assert max(map(len, problems.companies)) == min(size, len(lengths)) and sum(map(len, problems.companies)) == sum(lengths)


def test_places_are_filled_as_soon_as_they_are_free(gpt2_like: Any) -> None:
    problems = Problems([3, 1, 1, 2])
    list(problems.solve(gpt2_like, 2))
    assert problems.companies == [(0, 1), (0, 2), (0, 3), (3,)]


def test_report_rises_to_one(gpt2_like: Any) -> None:
    seen: list[float] = []
    list(Problems([3, 1, 4, 2]).solve(gpt2_like, 2, seen.append))
    assert seen == sorted(seen) and seen[-1] == 1 and seen[0] > 0


@pytest.mark.parametrize("at", [1, 2, 4])
def test_problems_begin_anew_when_memory_runs_out(gpt2_like: Any, at: int) -> None:
    wanted = list(Problems([3, 5, 4, 2, 6, 3]).solve(gpt2_like, 1))
    problems = Problems([3, 5, 4, 2, 6, 3])
    advance = problems.advance

    def failing(numbers: tuple[int, ...], adam: BatchAdam) -> dict[int, torch.Tensor]:
        result = advance(numbers, adam)  # Adam has made its step already
        if len(problems.companies) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    problems.advance = failing  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="Out of memory with a batch of 4: going on with 2") as caught:
        found = list(problems.solve(gpt2_like, 4))
    assert len(caught) == 1 and max(map(len, problems.companies[at:])) == 2
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_too_small_for_one_problem_raises(gpt2_like: Any, unchanged: Any) -> None:
    problems = Problems([2, 2, 2])

    def failing(numbers: tuple[int, ...], adam: BatchAdam) -> dict[int, torch.Tensor]:
        raise MemoryError

    problems.advance = failing  # type: ignore[method-assign]
    check = unchanged(gpt2_like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(MemoryError):
            list(problems.solve(gpt2_like, 3))
    check()
