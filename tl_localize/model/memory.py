"""Batch sizes that fit into memory."""

import gc
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tl_localize.checks import Real, check_count, out_of_memory
from tl_localize.model.neurons import ModelView

Item = TypeVar("Item")
Result = TypeVar("Result")
FractionReport = Callable[[float], None]  # the fraction of the work that is done
TextReport = Callable[[float, str], None]  # and what was just done

CPU_BYTES = 2**30  # working memory of one batch; more is not faster on a CPU
CUDA_MARGIN = 1.25  # of the memory that a batch is computed to take
MAX_TOKENS = {"cpu": 4096, "cuda": 131072}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model on which the memory of a pass depends.

    >>> shape = Shape(n_layers=2, d_model=8, d_mlp=32, n_heads=2, d_vocab=50)
    >>> shape.token_bytes(length=10, gradient=False)
    688
    """

    n_layers: int
    d_model: int
    d_mlp: int
    n_heads: int
    d_vocab: int
    itemsize: int = 4  # bytes of a number
    act_fn: str = "gelu"

    def token_bytes(self, length: int, gradient: bool) -> Real:
        """What a token of a text takes in a pass, fitted to the peaks of three shapes on the
        pretended device: with gradient what autograd keeps of all layers, else what is there at a
        time. Norms, softmax and losses are in float32.
        """
        size = self.itemsize
        d_model = self.d_model
        logits = (size + 4) * self.d_vocab
        if not gradient:
            layer = size * (2 * self.d_mlp + 4 * d_model + 3 * self.n_heads * length)
            return max(layer, logits) + 8 * d_model
        layer = size * (2 * self.d_mlp + 2.5 * d_model) + 22 * d_model
        layer += (size + 4) * self.n_heads * length
        if self.act_fn == "gelu_new" and size == 2:
            layer += 4.5 * self.d_mlp  # of eight kernels, each with a result
        return self.n_layers * layer + logits

    def tokens_in(self, free: Real, length: int, gradient: bool) -> int:
        """Tokens of texts of a length whose pass fits into free memory, with the margin; a power
        of two, which is mostly the same in every run, as the batch size changes the last digits.
        """
        tokens = free / (CUDA_MARGIN * self.token_bytes(length, gradient))
        return 2 ** int(math.log2(min(max(tokens, 1), MAX_TOKENS["cuda"])))


def shape_of(view: ModelView) -> Shape:
    """The sizes of a model."""
    cfg = view.model.cfg
    return Shape(
        n_layers=view.n_layers,
        d_model=cfg.d_model,
        d_mlp=view.layer_width,
        n_heads=cfg.n_heads,
        d_vocab=cfg.d_vocab,
        itemsize=view.parameters[0].element_size(),
        act_fn=str(cfg.act_fn),
    )


def tokens_that_fit(view: ModelView, length: int, gradient: bool = True) -> int:
    """Tokens of texts of a length whose pass fits into memory."""
    shape = shape_of(view)
    device = view.device
    if device.type == "cuda":
        # what the driver calls free, and what torch keeps in reserve
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return shape.tokens_in(free - torch.cuda.memory_allocated(device), length, gradient)
    floats = view.n_layers * (6 * shape.d_mlp + 16 * shape.d_model) + 4 * shape.d_vocab
    return int(min(max(CPU_BYTES / (4 * floats), 256), MAX_TOKENS["cpu"]))


def rows_that_fit(
    view: ModelView,
    length: int,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    gradient: bool = True,
) -> int:
    """Sequences of a length in one pass: ``batch_size``, or as many as ``batch_tokens`` or the
    memory allow.
    """
    if batch_size is not None:
        check_count(batch_size=batch_size)
        return batch_size
    return max(1, (batch_tokens or tokens_that_fit(view, length, gradient)) // length)


def part_of(report: FractionReport, start: float, end: float) -> FractionReport:
    """The report of a part of the work, from one fraction of the whole to another."""
    return lambda fraction: report(start + (end - start) * fraction)


def check_progress(progress: object) -> None:
    """Raise TypeError unless this is a function, or nothing."""
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress must be a function of the fraction done, got {progress!r}. Leave it out."
        )


def as_text_report(progress: Callable[..., None] | None) -> TextReport:
    """A user's callback, as one of a fraction and a text: one that has no second parameter for a
    text gets the fraction alone.

    >>> as_text_report([].append)(0.5, "step 20, loss 0.31")
    """
    check_progress(progress)
    if progress is None:
        return lambda fraction, text: None
    try:
        parameters = [*inspect.signature(progress).parameters.values()]
    except ValueError:  # of a function that tells none
        parameters = []
    if any(each.kind is each.VAR_POSITIONAL for each in parameters[:2]):
        return progress
    named = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    # a default that is no text binds something else
    if len(named) > 1 and (named[1].default is named[1].empty or isinstance(named[1].default, str)):
        return progress
    return lambda fraction, text: progress(fraction)


def work_in_batches(
    work: Callable[[list[Item]], Result], items: Sequence[Item], size: int
) -> Iterator[tuple[list[Item], Result]]:
    """Work through items in batches of a size that is halved, with one warning, while memory runs
    out; a batch of one then raises.
    """
    start = 0
    warned = False
    while start < len(items):
        batch = list(items[start : start + size])
        try:
            yield batch, work(batch)
            start += len(batch)
            continue
        except (RuntimeError, MemoryError) as error:
            if len(batch) == 1 or not out_of_memory(error):
                raise
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


def part_at(values: Tensor, chunk: list[int]) -> Tensor:
    """``values[chunk]`` of a chunk without gaps: a slice, since a list would be copied to the
    device, which the host waits for.
    """
    return values[chunk[0] : chunk[-1] + 1]
