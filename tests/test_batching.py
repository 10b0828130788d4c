"""Batches that are halved when memory runs out, and minimization of many problems in batches."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_localize.batching import halving, out_of_memory, rows_that_fit, tokens_that_fit
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
