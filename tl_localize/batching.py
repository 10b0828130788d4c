"""Batches that fit into memory: a first guess, and half of it when the guess was wrong."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from tl_localize.neurons import NeuronView

Item = TypeVar("Item")
Result = TypeVar("Result")

CPU_BYTES = 2**30  # working memory of one batch; more is not faster on a CPU
CUDA_SHARE = 0.5  # of the memory that is free
CUDA_SHARE_KEPT = 0.25  # the same, for what is kept from one pass to the next
MAX_TOKENS = {"cpu": 4096, "cuda": 131072}


def tokens_that_fit(neurons: NeuronView) -> int:
    """Tokens whose forward and backward pass fit into memory, by a rough count of what autograd keeps per token."""
    cfg = neurons.model.cfg
    floats = neurons.n_layers * (6 * neurons.n_neurons + 16 * cfg.d_model) + 4 * cfg.d_vocab
    device = neurons.device
    if device.type != "cuda":
        return int(min(max(CPU_BYTES / (4 * floats), 256), MAX_TOKENS.get(device.type, 4096)))
    tokens = min(max(CUDA_SHARE * free_on_cuda(device) / (4 * floats), 256), MAX_TOKENS["cuda"])
    return 2 ** int(math.log2(tokens))  # the same from run to run, as far as can be: the size of a batch decides on last digits


def bytes_to_keep(neurons: NeuronView) -> int:
    """Bytes that may be kept from one forward pass to the next instead of computing them again."""
    return int(CUDA_SHARE_KEPT * free_on_cuda(neurons.device)) if neurons.device.type == "cuda" else CPU_BYTES


def free_on_cuda(device: torch.device) -> int:
    """Bytes of a card that no tensor holds: what the driver calls free, and what torch keeps in reserve."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def peak_bytes(neurons: NeuronView, method: str, *, n_tokens: int, n_targets: int, length: int, n_rows: int = 0) -> int:
    """Bound on the memory beyond the weights that one forward pass of a method, or of ``"inject"``, takes, in bytes.

    In numbers of 4 bytes (each method's docstring says the same): L layers of f neurons, width d, h heads, V words; a pass over B tokens
    in sequences of n, T of them with a loss:

        activations                            B (L f + 5 f + 8 d + 5 h n)
        zero_out                               B (5 f + 8 d + 5 h n) + n (L f + L d + d) + 3 T V
        attribution, integrated_gradients      B L (5 f + 10 d + 4 h n) + 4 T V
        slimming, hard_concrete                the same + 16 L f B / n: masks, noise, gradients and Adam's state
        inject                                 the same + 8 r d B / n for r trained rows; T is nearly B

    Losses, masks and logits are float32 in any model. ``zero_out`` unembeds its targets in blocks, of which T is the size. Measured peaks
    are between a fifth of this and all of it (benchmarks/test_cost_table.py).

    Args:
        method: the method's ``name``.
        n_tokens, n_targets: B and T, of one pass.
        length: n, of the longest sequence.
        n_rows: r, of W_out, that are trained for one sequence.

    >>> from tl_localize import load_model
    >>> from tl_localize.batching import peak_bytes
    >>> from tl_localize.neurons import NeuronView
    >>> view = NeuronView(load_model("reference"))
    >>> sizes = dict(n_tokens=80, n_targets=48, length=80)  # one sequence of 80 tokens
    >>> [peak_bytes(view, name, **sizes) // 2**20 for name in ("activations", "hard_concrete")]  # MiB
    [6, 24]
    """
    cfg = neurons.model.cfg
    layers, f, d, attention = neurons.n_layers, neurons.n_neurons, cfg.d_model, cfg.n_heads * length
    forward, backward = 5 * f + 8 * d + 5 * attention, layers * (5 * f + 10 * d + 4 * attention)
    if method == "activations":
        floats = n_tokens * (layers * f + forward)
    elif method == "zero_out":
        floats = n_tokens * forward + length * (layers * f + layers * d + d) + 3 * n_targets * cfg.d_vocab
    else:
        floats = n_tokens * backward + 4 * n_targets * cfg.d_vocab
        if method in ("slimming", "hard_concrete"):
            floats += 16 * layers * f * n_tokens // length
        floats += 8 * n_rows * d * n_tokens // length
    return 4 * floats


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
        free()
        if not warned:
            warn_halved(len(batch))
            warned = True


def free() -> None:
    """Give back what a failed pass held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def warn_halved(n: int) -> None:
    """Say that a batch of n did not fit."""
    warnings.warn(f"Out of memory with a batch of {n}: going on with {n // 2}.", RuntimeWarning, stacklevel=3)


def out_of_memory(error: BaseException) -> bool:
    """True for CUDA's and the CPU allocator's ways to say that memory ran out."""
    signs = ("out of memory", "can't allocate memory", "alloc_failed")  # the last is CUBLAS's and CUDNN's
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in str(error).lower() for sign in signs)
