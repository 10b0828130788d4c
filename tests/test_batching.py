"""Batches that are halved when memory runs out, and minimization of many problems in batches."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tl_localize.batching import halving, minimize, out_of_memory, rows_that_fit, tokens_that_fit
from tl_localize.neurons import NeuronView


def limited(limit: int, error: type[BaseException] = torch.OutOfMemoryError) -> Any:
    """Work that fits only so many items."""

    def work(batch: list[int]) -> list[int]:
        if len(batch) > limit:
            raise error("out of memory")
        return [2 * item for item in batch]

    return work


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 50))
def test_halving_works_through_everything_in_order(n: int, size: int, limit: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [item for _, results in halving(limited(limit), range(n), size) for item in results]
    assert found == [2 * item for item in range(n)]


def test_halving_gives_batches_of_the_size_asked_for() -> None:
    assert [batch for batch, _ in halving(limited(99), range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_halving_warns_once() -> None:
    with pytest.warns(
        RuntimeWarning, match="Out of memory with a batch of 16: going on with 8."
    ) as caught:
        list(halving(limited(2), range(40), 16))
    assert len(caught) == 1


def test_halving_goes_on_with_the_smaller_size() -> None:
    with pytest.warns(RuntimeWarning):
        assert [len(batch) for batch, _ in halving(limited(4), range(18), 16)] == [4, 4, 4, 4, 2]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate"
        ),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: f"{type(error).__name__}-{str(error)[:12]}",
)
def test_out_of_memory_is_recognized(error: BaseException) -> None:
    assert out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), ValueError("out of range"), KeyboardInterrupt()]
)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not out_of_memory(error)


def test_halving_passes_other_errors_on() -> None:
    def work(batch: list[int]) -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        list(halving(work, range(4), 2))


def test_halving_raises_when_one_item_does_not_fit() -> None:
    with pytest.warns(RuntimeWarning), pytest.raises(torch.OutOfMemoryError):
        list(halving(limited(0), range(4), 2))


def test_halving_frees_what_the_failed_batch_held() -> None:
    alive: list[int] = []

    class Tensor:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    held_at_start = []

    def work(batch: list[int]) -> None:
        held_at_start.append(len(alive))
        big = Tensor()
        if len(batch) > 1:
            raise MemoryError(big)

    with pytest.warns(RuntimeWarning):
        list(halving(work, range(4), 4))
    assert max(held_at_start) == 0


def test_tokens_that_fit_are_enough_for_a_sequence_and_not_endless(any_model: Any) -> None:
    assert 256 <= tokens_that_fit(NeuronView(any_model)) <= 4096


def test_tokens_that_fit_shrink_with_the_model(gpt2_like: Any) -> None:
    view = NeuronView(gpt2_like)
    small = tokens_that_fit(view)
    view.shape, view.model = (
        (500_000,),
        SimpleNamespace(
            cfg=gpt2_like.cfg, blocks=gpt2_like.blocks, parameters=gpt2_like.parameters
        ),
    )
    assert tokens_that_fit(view) < small


def test_rows_that_fit_are_at_least_one_and_as_given(gpt2_like: Any) -> None:
    view = NeuronView(gpt2_like)
    assert (
        rows_that_fit(view, 10, 3),
        rows_that_fit(view, 10, batch_tokens=25),
        rows_that_fit(view, 10, batch_tokens=1),
    ) == (3, 2, 1)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on, got 0"):
        rows_that_fit(view, 10, 0)


# ---- minimization
# ----------------------------------------------------------------------------------------------------

TARGETS = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))


class Problems:
    """Go to TARGETS[number] in ``lengths[number]`` steps of Adam; remembers the problems of each
    step.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.batches = lengths, list[tuple[int, ...]]()

    def begin(self, batch: list[int]) -> Any:
        return [torch.zeros(len(batch), 3), torch.zeros(len(batch), 2, 3)], self.advance

    def advance(self, numbers: tuple[int, ...], parameters: list[torch.Tensor], step: int) -> Any:
        self.batches.append(numbers)
        one, two = parameters
        ends = {
            number: one[i].detach() + two[i].detach().sum(0)
            for i, number in enumerate(numbers)
            if step == self.lengths[number]
        }
        if len(ends) == len(numbers):
            return [], ends
        loss = ((one + two.sum(1) - TARGETS[list(numbers)]) ** 2).sum()
        return torch.autograd.grad(loss, parameters), ends

    def solve(
        self, model: Any, size: int, report: Any = lambda fraction: None
    ) -> list[torch.Tensor]:
        n = len(self.lengths)
        return list(
            minimize(
                NeuronView(model),
                n,
                size,
                self.begin,
                learning_rate=0.1,
                max_steps=max(self.lengths),
                report=report,
            )
        )


def alone(number: int, n_steps: int) -> torch.Tensor:
    """The same problem by torch.optim.Adam, without a batch."""
    one, two = torch.zeros(3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    adam = torch.optim.Adam([one, two], lr=0.1)
    for _ in range(n_steps):
        adam.zero_grad()
        ((one + two.sum(0) - TARGETS[number]) ** 2).sum().backward()
        adam.step()
    return (one + two.sum(0)).detach()


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9), size=st.integers(1, 12))
def test_minimize_solves_each_problem_as_if_alone_and_in_order(
    gpt2_like: Any, lengths: list[int], size: int
) -> None:
    problems = Problems(lengths)
    found = problems.solve(gpt2_like, size)
    assert len(found) == len(lengths) and max(map(len, problems.batches)) == min(size, len(lengths))
    for number, values in enumerate(found):
        torch.testing.assert_close(values, alone(number, lengths[number]))


def test_minimize_starts_the_next_batch_when_all_have_stopped(gpt2_like: Any) -> None:
    problems = Problems([2, 1, 1])
    problems.solve(gpt2_like, 2)
    assert problems.batches == [(0, 1), (0, 1), (0,), (2,), (2,)]


def test_minimize_report_rises_to_one(gpt2_like: Any) -> None:
    seen: list[float] = []
    Problems([3, 1, 4, 2]).solve(gpt2_like, 2, seen.append)
    assert seen == sorted(seen) and seen[-1] == 1 and seen[0] > 0


@pytest.mark.parametrize("at", [1, 2, 4])
def test_minimize_begins_a_batch_anew_when_memory_runs_out(gpt2_like: Any, at: int) -> None:
    lengths = [3, 5, 4, 2, 6, 3]
    problems = Problems(lengths)
    advance = problems.advance

    def failing(*args: Any) -> Any:
        result = advance(*args)
        if len(problems.batches) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    problems.advance = failing  # type: ignore[method-assign]
    with pytest.warns(
        RuntimeWarning, match="Out of memory with a batch of 4: going on with 2"
    ) as caught:
        found = problems.solve(gpt2_like, 4)
    assert len(caught) == 1 and max(map(len, problems.batches[at:])) == 2
    for number, values in enumerate(found):
        torch.testing.assert_close(values, alone(number, lengths[number]))


def test_minimize_raises_when_one_problem_does_not_fit(gpt2_like: Any, unchanged: Any) -> None:
    problems = Problems([2, 2, 2])

    def failing(*args: Any) -> Any:
        raise MemoryError

    problems.advance = failing  # type: ignore[method-assign]
    check = unchanged(gpt2_like)
    with pytest.warns(RuntimeWarning), pytest.raises(MemoryError):
        problems.solve(gpt2_like, 3)
    check()
