"""Batches that fit into memory: a first guess, and half of it when the guess was wrong."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from tl_localize.neurons import NeuronView

Item = TypeVar("Item")
Result = TypeVar("Result")

CPU_BYTES = 2**30  # working memory of one batch; more is not faster on a CPU
CUDA_SHARE = 0.5  # of the memory that is free
MAX_TOKENS = {"cpu": 4096, "cuda": 131072}


def tokens_that_fit(neurons: NeuronView) -> int:
    """Tokens whose forward and backward pass fit into memory, by a rough count of what autograd keeps per token."""
    cfg = neurons.model.cfg
    floats = neurons.n_layers * (6 * neurons.n_neurons + 16 * cfg.d_model) + 4 * cfg.d_vocab
    device = neurons.device
    free = CUDA_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else CPU_BYTES
    return int(min(max(free / (4 * floats), 256), MAX_TOKENS.get(device.type, 4096)))


def halving(work: Callable[[list[Item]], Result], items: Sequence[Item], size: int) -> Iterator[tuple[list[Item], Result]]:
    """Work through items in batches of a size that is halved, with one warning, whenever memory runs out.

    Raises:
        torch.OutOfMemoryError: a batch of one does not fit either.
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
        # Outside the except block, where the traceback no longer holds the tensors that are to be freed.
        size = len(batch) // 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not warned:
            warnings.warn(f"Out of memory with a batch of {len(batch)}: going on with {size}.", RuntimeWarning, stacklevel=2)
            warned = True


def out_of_memory(error: BaseException) -> bool:
    """True for CUDA's and the CPU allocator's ways to say that memory ran out."""
    signs = ("out of memory", "can't allocate memory", "alloc_failed")  # the last is CUBLAS's and CUDNN's
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in str(error).lower() for sign in signs)
