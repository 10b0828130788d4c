"""Batch sizes that fit into memory."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from tl_localize.neurons import NeuronView, check_count

Item = TypeVar("Item")
Result = TypeVar("Result")
Report = Callable[[float], None]  # the fraction of the work that is done

CPU_BYTES = 2**30  # working memory of one batch; more is not faster on a CPU
CUDA_SHARE = 0.5  # share of the free memory that one batch may take
MAX_TOKENS = {"cpu": 4096, "cuda": 131072}


def tokens_that_fit(neurons: NeuronView) -> int:
    """Tokens whose forward and backward pass fit into memory, by a rough count of what autograd
    keeps per token.
    """
    cfg = neurons.model.cfg
    widest = max(neurons.d_mlp, math.prod(neurons.shape))
    floats = neurons.n_layers * (6 * widest + 16 * cfg.d_model) + 4 * cfg.d_vocab
    device = neurons.device
    if device.type != "cuda":
        return int(min(max(CPU_BYTES / (4 * floats), 256), MAX_TOKENS.get(device.type, 4096)))
    tokens = min(max(CUDA_SHARE * free_on_cuda(device) / (4 * floats), 256), MAX_TOKENS["cuda"])
    # a power of two is mostly the same in every run; the batch size changes the last digits
    return 2 ** int(math.log2(tokens))


def rows_that_fit(
    neurons: NeuronView, length: int, batch_size: int | None = None, batch_tokens: int | None = None
) -> int:
    """Sequences of a length in one forward pass: ``batch_size``, or as many as ``batch_tokens`` or
    the memory allow.
    """
    if batch_size is not None:
        check_count(batch_size=batch_size)
        return batch_size
    return max(1, (batch_tokens or tokens_that_fit(neurons)) // length)


def free_on_cuda(device: torch.device) -> int:
    """Free bytes of a GPU: what the driver calls free, and what torch keeps in reserve."""
    return (
        torch.cuda.mem_get_info(device)[0]
        + torch.cuda.memory_reserved(device)
        - torch.cuda.memory_allocated(device)
    )


def part_of(report: Report, start: float, end: float) -> Report:
    """The report of a part of the work, from one fraction of the whole to another."""
    return lambda fraction: report(start + (end - start) * fraction)


def halving(
    work: Callable[[list[Item]], Result], items: Sequence[Item], size: int
) -> Iterator[tuple[list[Item], Result]]:
    """Work through items in batches of a size that is halved, with one warning, while memory runs
    out; a batch of one then raises.
    """
    start, warned = 0, False
    while start < len(items):
        batch = list(items[start : start + size])
        try:
            result = work(batch)
        except (RuntimeError, MemoryError) as error:
            if len(batch) == 1 or not out_of_memory(error):
                raise
        else:
            yield batch, result
            start += len(batch)
            continue
        # Outside the except block, because there the traceback still holds the tensors.
        size = len(batch) // 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not warned:
            warnings.warn(
                f"Out of memory with a batch of {len(batch)}: going on with {size}.",
                RuntimeWarning,
                stacklevel=2,
            )
            warned = True


def out_of_memory(error: BaseException) -> bool:
    """True for the errors by which CUDA and the CPU allocator report that memory ran out."""
    # the last is CUBLAS's and CUDNN's
    signs = ("out of memory", "can't allocate memory", "alloc_failed")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        sign in str(error).lower() for sign in signs
    )
