"""Batches that are halved when memory runs out."""

import gc
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_localize.checks import out_of_memory
from tl_localize.model.memory import (
    Shape,
    as_text_report,
    rows_that_fit,
    tokens_that_fit,
    work_in_batches,
)
from tl_localize.model.neurons import NeuronView


def limited(limit, held=object):
    """Work that fits only so many items."""

    def work(batch):
        big = held()
        if len(batch) > limit:
            raise MemoryError(big)
        return [2 * item for item in batch]

    return work


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 20))
def test_halving_works_through_everything_in_order(n, size, limit):
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(gc, "collect", lambda: 0)  # of all tests' garbage, which takes long
        found = [
            item
            for _, results in work_in_batches(limited(limit), range(n), size)
            for item in results
        ]
    assert found == [2 * item for item in range(n)]


def test_a_progress_that_is_no_function_is_named():
    with pytest.raises(TypeError, match="progress must be a function of the fraction done"):
        as_text_report(True)


def test_a_text_goes_to_a_second_parameter_that_is_for_one():
    heard = []
    for hears in (
        lambda fraction, text: heard.append((fraction, text)),
        lambda fraction, text="": heard.append((fraction, text)),
        lambda *given: heard.append(given),
    ):
        as_text_report(hears)(0.5, "step 2")
    assert heard == 3 * [(0.5, "step 2")]
    as_text_report(lambda fraction, bar=heard: bar.append(fraction))(0.5, "step 2")
    as_text_report(heard.append)(0.6, "step 3")
    assert heard[3:] == [0.5, 0.6]
    as_text_report({}.update)  # it tells no parameters


def test_halving_warns_once_and_goes_on_with_the_smaller_size():
    with pytest.warns(RuntimeWarning, match="batch of 16: going on with 8") as caught:
        sizes = [len(batch) for batch, _ in work_in_batches(limited(4), range(18), 16)]
    assert sizes == [4, 4, 4, 4, 2] and len(caught) == 1
    with pytest.warns(RuntimeWarning, match="batch of 3: going on with 1"):
        list(work_in_batches(limited(2), range(3), 16))


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("shape mismatch"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_out_of_memory_is_recognized(error, wanted):
    assert out_of_memory(error) is wanted


def test_halving_passes_other_errors_on():
    def work(batch):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        list(work_in_batches(work, range(4), 2))


@pytest.mark.filterwarnings("ignore:Out of memory")
def test_halving_raises_when_one_item_does_not_fit():
    with pytest.raises(MemoryError):
        list(work_in_batches(limited(0), range(4), 2))


@pytest.mark.filterwarnings("ignore:Out of memory")
def test_halving_frees_what_the_failed_batch_held():
    alive = []
    held_at_start = []

    class Tensor:
        def __init__(self):
            held_at_start.append(len(alive))
            alive.append(1)

        def __del__(self):
            alive.pop()

    list(work_in_batches(limited(1, Tensor), range(4), 4))
    assert len(held_at_start) == 6 and max(held_at_start) == 0


def test_tokens_that_fit_shrink_with_the_model(gpt2_like):
    view = NeuronView(gpt2_like)
    small = tokens_that_fit(view, 10)
    assert 256 <= small <= 4096
    view.model = SimpleNamespace(cfg=gpt2_like.cfg, blocks=gpt2_like.blocks)
    view.shape = (500_000,)
    assert tokens_that_fit(view, 10) < small


def test_rows_that_fit_are_at_least_one_and_as_given(gpt2_like):
    view = NeuronView(gpt2_like)
    assert rows_that_fit(view, 10, 3) == 3
    assert rows_that_fit(view, 10, batch_tokens=25) == 2
    assert rows_that_fit(view, 10, batch_tokens=1) == 1
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on, got 0"):
        rows_that_fit(view, 10, 0)


def test_a_pass_leaves_a_margin_and_gelu_in_half_precision_takes_more():
    shape = {"n_layers": 2, "d_model": 8, "d_mlp": 32, "n_heads": 2, "d_vocab": 50}
    assert Shape(**shape).token_bytes(10, False) == 688
    found = [Shape(**shape).tokens_in(688 * share * 1024, 10, False) for share in (1.24, 1.25)]
    assert found == [512, 1024]
    for itemsize, more in ((4, 0), (2, 2 * 4.5 * 32)):
        new, old = (Shape(**shape, itemsize=itemsize, act_fn=f"gelu{end}") for end in ("_new", ""))
        assert new.token_bytes(10, True) - old.token_bytes(10, True) == more


LARGE = {"n_layers": 8, "d_model": 64, "d_mlp": 256, "n_heads": 4, "d_vocab": 500}


@pytest.mark.parametrize("change", [{"itemsize": 8}, *({name: 2 * n} for name, n in LARGE.items())])
@pytest.mark.parametrize("gradient", [False, True])
def test_more_of_anything_needs_no_less_memory(change, gradient):
    less, more = Shape(**LARGE), Shape(**(LARGE | change))
    assert less.token_bytes(10, gradient) <= more.token_bytes(10, gradient)
    assert less.tokens_in(1e6, 10, gradient) >= more.tokens_in(1e6, 10, gradient)
    assert less.tokens_in(2e6, 10, gradient) >= less.tokens_in(1e6, 200, gradient)
