"""Scores of neurons and sets of neurons: plain data."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_localize.checks import Real, check_choice, check_count, check_ratio
from tl_localize.files import Saved
from tl_localize.model.hooks import added_hooks
from tl_localize.model.neurons import Hook, LanguageModel, NeuronView, clamp_neurons
from tl_localize.units import NEURONS, Units, check_units

if TYPE_CHECKING:
    import pandas as pd


def rounded_down(ratio: Real, n: int) -> int:
    """How many of n a ratio is, rounded down; up to rounding errors, so that 0.29 of 100 is 29."""
    return math.floor(round(ratio * n, 6))


@dataclass(frozen=True, eq=False)
class NeuronSet(Saved):
    """A set of neurons.

    It behaves as a set of pairs (layer, neuron): ``&``, ``|``, ``-``, ``<=``, ``==``,
    ``in``, ``len`` and iteration.

    Args:
        mask: [layer neuron], True for the neurons in the set. Kept on the CPU.
        units: What "neuron" means here: for example attention heads. Sets of different units are
            not combined.

    Raises:
        ValueError: The mask is not boolean, or not of two axes.

    >>> found = NeuronSet(torch.tensor([[True, False, True], [False, False, True]]))
    >>> truth = NeuronSet(torch.tensor([[True, True, False], [False, False, False]]))
    >>> len(found), found.recall_of(truth), list(found & truth)
    (3, 0.5, [(0, 0)])
    """

    mask: Bool[Tensor, "layer neuron"]
    units: Units = NEURONS

    def __post_init__(self) -> None:
        mask = torch.as_tensor(self.mask)
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be a boolean tensor [layer neuron], got shape {tuple(mask.shape)} of "
                f"{mask.dtype}. Compare scores with a threshold, or use NeuronScores.top_k."
            )
        check_units(self.units)
        object.__setattr__(self, "mask", mask.detach().to("cpu", copy=True))

    def __len__(self) -> int:
        return int(self.mask.sum())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((layer, neuron) for layer, neuron in self.mask.nonzero().tolist())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NeuronSet)
            and self.units == other.units
            and torch.equal(self.mask, other.mask)
        )

    def __and__(self, other: "NeuronSet") -> "NeuronSet":
        return replace(self, mask=self.mask & self._fitting(other))

    def __or__(self, other: "NeuronSet") -> "NeuronSet":
        return replace(self, mask=self.mask | self._fitting(other))

    def __sub__(self, other: "NeuronSet") -> "NeuronSet":
        return replace(self, mask=self.mask & ~self._fitting(other))

    def __le__(self, other: "NeuronSet") -> bool:
        return not len(self - other)

    def _fitting(self, other: "NeuronSet", name: str = "other") -> Bool[Tensor, "layer neuron"]:
        """The mask of another set of the same model."""
        if (other.mask.shape, other.units) != (self.mask.shape, self.units):
            raise ValueError(
                f"{name} must be a NeuronSet of shape {tuple(self.mask.shape)} of {self.units!r}, "
                f"got {other!r}. Both sets must belong to one model, and be of one kind of unit."
            )
        return other.mask

    def __repr__(self) -> str:
        counts = f"{len(self)} of {self.mask.numel()} {self.units.name}"
        return f"NeuronSet({counts}, per layer {self.mask.sum(1).tolist()})"

    def recall_of(self, truth: "NeuronSet") -> float:
        """Fraction of the true neurons that are in this set; ValueError where the shapes differ, or
        where there are no true neurons.
        """
        self._fitting(truth, "truth")
        if not len(truth):
            raise ValueError(
                f"truth must hold at least one of the {truth.units.name}, got none. A recall is a "
                "share of them: check how the set was made."
            )
        return len(self & truth) / len(truth)

    def dropout_hooks(self, device: torch.device | str = "cpu") -> list[tuple[str, Hook]]:
        """Hooks that set these neurons to zero at every position, for ``fwd_hooks=``; they compose
        with any others.

        The hooks do not know the model, so a wrong number of layers goes unnoticed;
        ``dropped_out(model)`` compares the shapes.

        Args:
            device: Where the masks are kept; they are copied to the model's device in each pass.
        """
        masks = self.mask.to(device)
        zero = torch.zeros((), device=device)
        return [
            self.units.hook(layer, partial(clamp_neurons, mask=masks[layer], values=zero))
            for layer in self.mask.any(1).nonzero().flatten().tolist()
        ]

    @contextmanager
    def dropped_out(self, model: LanguageModel) -> Iterator[None]:
        """Set these neurons to zero inside the ``with`` block; ValueError where the set is of
        another model's shape.
        """
        view = NeuronView(model, self.units)
        if (own := tuple(self.mask.shape)) != (shape := view.size):
            raise ValueError(
                f"mask must have the model's shape {shape}, got {own}. Localize in the model that "
                "is to be ablated."
            )
        hooks = [(view.points[name], hook) for name, hook in self.dropout_hooks(view.device)]
        with added_hooks(hooks):
            yield


@dataclass(frozen=True, eq=False)
class NeuronScores(Saved):
    """How responsible each neuron is for one sequence, according to one method; larger means more.

    Args:
        values: [layer neuron] float32 on the CPU, finite.
        settings: The method with all its hyperparameters, as JSON.
        exact: Mask of the exact scores, where the others are estimates (``ZeroOut(screen=...)``);
            None: all are exact.
        units: What "neuron" means here: for example attention heads.
        first_layer: For methods that score all layers together, as learned masks do: the lowest
            layer that has scores. Those of the layers below it mean nothing. None: the method
            judges each neuron alone, so every layer has scores.

    Raises:
        ValueError: A value is not finite, values are of another shape, or first_layer is not a
            layer.

    >>> scores = NeuronScores(torch.tensor([[0.1, 0.9, 0.0], [0.3, 0.2, 0.4]]), "mine")
    >>> scores.top_k(1 / 3).mask.tolist()
    [[False, True, False], [False, False, True]]
    """

    values: Float[Tensor, "layer neuron"]
    method: str = ""
    sequence_id: str = ""
    settings: str = ""
    exact: NeuronSet | None = None
    units: Units = NEURONS
    first_layer: int | None = None

    def __post_init__(self) -> None:
        # a view would keep its whole batch alive
        values = torch.as_tensor(self.values).detach().to("cpu", torch.float32, copy=True)
        if values.ndim != 2:
            raise ValueError(
                f"values must have the shape [layer neuron], got {tuple(values.shape)}. Pass the "
                "scores of one sequence."
            )
        check_units(self.units)
        if not values.isfinite().all():
            raise ValueError(
                f"values must be finite, got {int((~values.isfinite()).sum())} that are not "
                f"(method {self.method!r}, sequence {self.sequence_id!r}). Try float32, or a "
                "smaller learning rate."
            )
        object.__setattr__(self, "values", values)
        self._start(self.first_layer)

    def __repr__(self) -> str:
        n_layers, n_neurons = self.values.shape
        size = f"{n_layers} layers x {n_neurons} {self.units.name}"
        return f"NeuronScores({self.method!r}, {self.sequence_id!r}, {size})"

    def to_frame(self) -> "pd.DataFrame":
        """One row per neuron, the highest score first: layer, neuron, score. Ties go to the lower
        index; layers below ``first_layer`` are left out.
        """
        import pandas as pd

        scores: Any = pd.DataFrame(self.values.numpy()).iloc[self.first_layer or 0 :].stack()
        frame = scores.rename_axis(["layer", "neuron"]).reset_index(name="score")
        return frame.sort_values("score", ascending=False, kind="stable", ignore_index=True)

    def top_k(
        self,
        ratio: Real | None = None,
        *,
        count: int | None = None,
        per: Literal["layer", "model"] = "layer",
        first_layer: int | None = None,
        rounding: Literal["nearest", "floor"] = "nearest",
    ) -> NeuronSet:
        """The highest-scored neurons of every layer or of the whole model, a share or a number of
        them. Ties go to the lower index.

        Args:
            ratio: Fraction in (0, 1]; 0.01 is 1 %.
            count: The number of neurons, in place of the ratio.
            per: ``"layer"`` takes the share in every layer, ``"model"`` across all layers.
            first_layer: Layers below it are left out (DEL spares layer 0 with ``first_layer=1``).
                By default that of the scores, or 0 where they have none.
            rounding: How ratio times the neurons of a layer becomes a count (INJ rounds to nearest,
                DEL down). Across the model the count is always rounded down, as in the published
                numbers.

        Raises:
            ValueError: Not exactly one of ratio and count is given; ratio is outside (0, 1] or
                selects no neuron; count is more than there are; an unknown choice; first_layer is
                not a layer, or another one than the method chose from.
        """
        check_choice("per", per, ("layer", "model"))
        check_choice("rounding", rounding, ("nearest", "floor"))
        start = self._start(first_layer)
        pool = self.values[start:]
        if per == "model":
            pool = pool.reshape(1, -1)
        n = pool.shape[1]
        if count is None:
            share = check_ratio("ratio", ratio)
            down = per == "model" or rounding == "floor"
            count = rounded_down(share, n) if down else round(n * share)
        elif ratio is None:
            check_count(count=count)
        else:
            raise ValueError(
                f"ratio must be left out beside a count, got {ratio!r} and count {count!r}. Pass "
                "one of them."
            )
        if not 0 < count <= n:
            name, given = ("ratio", ratio) if ratio else ("count", count)
            raise ValueError(
                f"{name} must select 1 to {n} {self.units.name}, got {given}. The least ratio is "
                f"{1 / n:.2g}."
            )
        best = pool.argsort(dim=-1, descending=True, stable=True)[:, :count]
        mask = torch.zeros(self.values.shape, dtype=torch.bool)
        mask[start:].view(pool.shape).scatter_(-1, best, True)
        return NeuronSet(mask, self.units)

    def _start(self, first_layer: int | None) -> int:
        """The first layer to choose from."""
        if first_layer is None:
            return self.first_layer or 0
        check_count(0, first_layer=first_layer)
        if first_layer >= len(self.values):
            raise ValueError(
                f"first_layer must be below the {len(self.values)} layers of the scores, got "
                f"{first_layer}. Layers count from 0."
            )
        if self.first_layer not in (None, first_layer):
            raise ValueError(
                f"first_layer must be {self.first_layer}, the lowest layer that {self.method!r} "
                f"scored, got {first_layer}. Give the method another first_layer."
            )
        return first_layer
