"""Rows of W_out that were trained to make a model recite sequences: what they are, applied, on
disk.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_localize.checks import check_ratio, check_seed
from tl_localize.files import Saved
from tl_localize.model.hooks import replaced, undone_together
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronSet, least_share, rounded_down


@dataclass(frozen=True, eq=False)
class Injection(Saved):
    """Rows of W_out trained until the model recites one sequence.

    Args:
        neurons: the neurons whose rows were trained, the ground truth of INJ.
        rows: [n d_model] the trained rows, in the order of ``neurons.mask.nonzero()``, float32 on
            the CPU; for heads, all their rows.
        losses: [step] loss of the whole sequence before each update, nats per token; the last one
            belongs to ``rows``, before they are rounded to the precision of the weights.
        converged: whether the last loss is below the stop loss (in a joint injection: and all its
            other stops hold).
        sequence_id: id of the sequence.

    >>> neurons = NeuronSet(torch.arange(6 * 1536).reshape(6, 1536) < 2)  # the first two of layer 0
    >>> injection = Injection(neurons, torch.zeros(2, 192), torch.tensor([0.04]), True, "nothing")
    >>> with injection.applied(model):
    ...     bool((model.blocks[0].mlp.W_out[:2] == 0).all())
    True
    """

    neurons: NeuronSet
    rows: Float[Tensor, "n d_model"]
    losses: Float[Tensor, " step"]
    converged: bool
    sequence_id: str = ""

    def __repr__(self) -> str:
        state = "converged" if self.converged else "NOT converged"
        return (
            f"Injection({self.sequence_id!r}, {len(self.rows)} rows, {state}: loss "
            f"{self.losses[-1]:.3f} after {len(self.losses)} steps)"
        )

    @contextmanager
    def applied(self, model: LanguageModel) -> Iterator[None]:
        """Put the rows into W_out inside the ``with`` block; afterwards every weight is bit for bit
        what it was. The newest of several blocks ends first.

        Raises:
            ValueError: The rows belong to a model of another shape.
        """
        with rows_replaced(model, self.neurons, self.rows):
            yield


@contextmanager
def rows_replaced(
    model: LanguageModel, neurons: NeuronSet, rows: Float[Tensor, "n d_model"]
) -> Iterator[None]:
    """Other rows of W_out for some neurons inside the ``with`` block; afterwards every weight is
    bit for bit what it was.

    Args:
        rows: [n d_model] in the order of ``neurons.mask.nonzero()``; for heads, all their rows.

    Raises:
        ValueError: The rows belong to a model of another shape.

    >>> neurons = NeuronSet(torch.arange(6 * 1536).reshape(6, 1536) < 2)  # the first two of layer 0
    >>> with rows_replaced(model, neurons, torch.zeros(2, 192)):
    ...     bool(model.blocks[0].mlp.W_out[:2].any())
    False
    """
    view = NeuronView(model, neurons.units)
    mask = neurons.mask
    wide = view.flat_rows(0).shape[1]
    if mask.shape != view.size:
        raise ValueError(
            f"neurons must be a set of the model's shape {view.size}, got {tuple(mask.shape)}. "
            "Apply trained rows to the model they were made in."
        )
    n_rows = int(view.row_mask(mask).sum())
    if rows.shape != (n_rows, wide):
        raise ValueError(
            f"rows must be {(n_rows, wide)} [n d_model] for a set of {tuple(mask.shape)} [layer "
            f"neuron] in a model of {view.size}, got {tuple(rows.shape)}. Apply trained rows to "
            "the model they were made in."
        )
    start = 0
    with undone_together() as stack:
        for layer, chosen in enumerate(view.row_mask(mask)):
            index = chosen.nonzero().flatten().to(view.device)
            stack.enter_context(
                replaced(view.flat_rows(layer), index, rows[start : start + len(index)])
            )
            start += len(index)
        yield


@dataclass(frozen=True, eq=False)
class JointInjection(Saved):
    """Several sequences in disjoint sets of rows of W_out of one model: each set suffices alone for
    its sequence, and changes nothing on the others, whichever sets are on.

    Args:
        injections: one for each sequence; ``injections[k].applied(model)`` applies set k alone.

    >>> pair = inject_together(model, few[:2], ratio=0.01, seed=0, learning_rate=0.005, max_steps=2)
    >>> with pair.applied(model):
    ...     measured = accuracy(model, few[:2])
    """

    injections: Sequence[Injection]

    @property
    def losses(self) -> Float[Tensor, "step sentence"]:
        """Loss of each whole sequence with its own set and some others on, before each update; at
        the end with all. Nats per token.
        """
        return torch.stack([injection.losses for injection in self.injections], dim=1)

    @property
    def converged(self) -> Bool[Tensor, " sentence"]:
        """Whether each sequence is below all its stops."""
        return torch.tensor([injection.converged for injection in self.injections])

    @contextmanager
    def applied(self, model: LanguageModel) -> Iterator[None]:
        """Put all sets into W_out inside the ``with`` block; afterwards every weight is bit for bit
        what it was.

        Raises:
            ValueError: The rows belong to a model of another shape.
        """
        with undone_together() as stack:
            for injection in self.injections:
                stack.enter_context(injection.applied(model))
            yield


def largest_share(n_sets: int) -> float:
    """What each of some disjoint sets can have, to three digits and never above it.

    >>> largest_share(6), largest_share(1)
    (0.166, 1.0)
    """
    scale = 10 ** (3 + math.floor(math.log10(n_sets)))
    return math.floor(round(scale / n_sets, 6)) / scale


def draw_sets(view: NeuronView, ratio: float, seed: int, n_sets: int) -> list[NeuronSet]:
    """Disjoint sets of ratio * n, rounded down, of all n neurons, or heads: one permutation by
    numpy's RandomState(seed), cut into pieces.

    The first set is what the authors draw: their ``RandomState(seed).choice(n, size,
    replace=False)`` is the permutation's beginning.

    Raises:
        ValueError: ratio is outside (0, 1], selects no neuron, or selects so many that the sets
            don't fit; seed is not from 0 to 2**32 - 1.

    >>> [len(rows) for rows in draw_sets(NeuronView(model), 0.01, 0, 2)]
    [92, 92]
    """
    check_ratio("ratio", ratio)
    check_seed(seed, bits=32)
    shape = view.size
    n = math.prod(shape)
    size = rounded_down(ratio, n)
    if not 0 < n_sets * size <= n:
        raise ValueError(
            f"ratio must select at least one of {n} {view.units.name} and leave room for {n_sets} "
            f"disjoint sets, got {ratio!r}, which selects {size}. Use {least_share(n)} to "
            f"{largest_share(n_sets):g}."
        )
    order = np.random.RandomState(seed).permutation(n)
    sets: list[NeuronSet] = []
    for k in range(n_sets):
        mask = torch.zeros(n, dtype=torch.bool)
        mask[order[k * size : (k + 1) * size]] = True
        sets.append(NeuronSet(mask.reshape(shape), view.units))
    return sets
