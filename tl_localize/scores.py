"""Scores of neurons and sets of neurons: plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_localize.changes import Use, adding_hook
from tl_localize.files import Saved
from tl_localize.identity import identity_text
from tl_localize.neurons import (
    Hook,
    LanguageModel,
    NeuronView,
    Real,
    as_tensor,
    check_between,
    check_choice,
    check_count,
    check_ratio,
    zero_neurons,
)
from tl_localize.units import NEURONS, Units, check_units, read_units

if TYPE_CHECKING:
    import pandas as pd

LISTED = 8  # neurons that a notebook lists, of all or of each layer
COUNTED = 0.01  # share of all neurons that a notebook counts by layer


def rounded_down(ratio: Real, n: int) -> int:
    """How many of n a ratio is, rounded down; up to rounding errors, so that 0.29 of 100 is 29."""
    return math.floor(round(ratio * n, 6))


@dataclass(frozen=True, eq=False)
class NeuronSet(Saved):
    """A set of neurons.

    It behaves as a set of pairs (layer, neuron): ``&``, ``|``, ``-``, ``^``, ``<=``, ``==``,
    ``in``, ``len`` and iteration.

    Args:
        mask: [layer neuron], True for the neurons in the set. Kept on the CPU.
        units: What "neuron" means here: for example attention heads. Sets of different units are
            not combined.

    Raises:
        ValueError: The mask is not boolean, or not of two axes.

    >>> found = NeuronSet.from_pairs([(0, 0), (1, 0), (1, 3)], (2, 4))
    >>> truth = NeuronSet.from_pairs([(0, 0), (0, 1)], (2, 4))
    >>> len(found), found.recall_of(truth), list(found & truth)
    (3, 0.5, [(0, 0)])
    """

    required: ClassVar[tuple[str, ...]] = ("mask",)
    mask: Bool[Tensor, "layer neuron"]
    units: Units = NEURONS

    def __post_init__(self) -> None:
        mask = as_tensor("mask", self.mask)
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be a boolean tensor [layer neuron], got shape {tuple(mask.shape)} of "
                f"{mask.dtype}. Compare scores with a threshold, or use NeuronScores.top_k."
            )
        check_units(self.units)
        object.__setattr__(self, "mask", mask.detach().to("cpu", copy=True))

    @classmethod
    def from_pairs(
        cls, pairs: Iterable[tuple[int, int]], shape: tuple[int, int], units: Units = NEURONS
    ) -> NeuronSet:
        """The set of some (layer, neuron) pairs in a model of ``shape`` (layers, neurons of each
        layer); ValueError for others.
        """
        for length in shape:
            check_count(shape=length)
        mask = torch.zeros(shape, dtype=torch.bool)
        for layer, neuron in pairs:
            check_count(0, **{"pairs of layer": layer, "pairs of neuron": neuron})
            if layer >= shape[0] or neuron >= shape[1]:
                raise ValueError(
                    f"pairs must be (layer, neuron) below {tuple(shape)}, got {(layer, neuron)}. "
                    "Both count from 0."
                )
            mask[layer, neuron] = True
        return cls(mask, units)

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

    def __hash__(self) -> int:
        return hash((*self.mask.shape, *self))

    def __and__(self, other: NeuronSet) -> NeuronSet:
        return replace(self, mask=self.mask & self._fitting(other))

    def __or__(self, other: NeuronSet) -> NeuronSet:
        return replace(self, mask=self.mask | self._fitting(other))

    def __sub__(self, other: NeuronSet) -> NeuronSet:
        return replace(self, mask=self.mask & ~self._fitting(other))

    def __xor__(self, other: NeuronSet) -> NeuronSet:
        return replace(self, mask=self.mask ^ self._fitting(other))

    def __le__(self, other: NeuronSet) -> bool:
        return not len(self - other)

    def jaccard(self, other: NeuronSet) -> float:
        """Neurons in both sets, as a fraction of those in either; ValueError where the shapes
        differ or both are empty.
        """
        union = len(self | other)
        if not union:
            raise ValueError(
                "other must hold a neuron where this set has none, got two empty sets. Their "
                "overlap is not defined."
            )
        return len(self & other) / union

    def to_frame(self) -> pd.DataFrame:
        """One row per neuron: layer, neuron."""
        import pandas as pd

        return pd.DataFrame(list(self), columns=["layer", "neuron"])

    def _fitting(self, other: NeuronSet, name: str = "other") -> Bool[Tensor, "layer neuron"]:
        """The mask of another set of the same model."""
        if not isinstance(other, NeuronSet):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"{name} must be a NeuronSet, got {type(other).__name__}. Take some scores, as "
                "scores.top_k(0.01) does."
            )
        own, given = (tuple(one.mask.shape) for one in (self, other))
        if own != given or self.units != other.units:
            raise ValueError(
                f"{name} must have the shape {own} of {self.units!r}, got {given} of "
                f"{other.units!r}. Both sets must belong to one model, and be of one kind of unit."
            )
        return other.mask

    def __repr__(self) -> str:
        counts = f"{len(self)} of {self.mask.numel()} {self.units.name}"
        return f"NeuronSet({counts}, per layer {self.mask.sum(1).tolist()})"

    def html_by_layer(self) -> str:
        """A table of how many neurons lie in each layer, and the first few of them."""
        from tl_localize.stats import styled

        which: list[str] = []
        for layer in self.mask:
            indices = [str(i) for i in layer.nonzero().flatten().tolist()]
            which.append(", ".join(indices[:LISTED]) + (", ..." if len(indices) > LISTED else ""))
        columns = {
            "layer": range(len(which)),
            self.units.name: self.mask.sum(1).tolist(),
            "which": which,
        }
        caption = f"NeuronSet: {len(self)} of {self.mask.numel()} {self.units.name}"
        return styled(columns, caption, [self.units.name])

    _repr_html_ = html_by_layer

    def recall_of(self, truth: NeuronSet) -> float:
        """Fraction of the true neurons that are in this set; ValueError where the shapes differ or
        truth is empty.
        """
        self._fitting(truth, "truth")
        if not len(truth):
            raise ValueError(
                "truth must hold at least one neuron, got an empty set. Recall of nothing is not "
                "defined."
            )
        return len(self & truth) / len(truth)

    def dropout_hooks(self) -> list[tuple[str, Hook]]:
        """Hooks that set these neurons to zero at every position, for ``fwd_hooks=``; they compose
        with any others.

        The hooks do not know the model, so a wrong number of layers goes unnoticed;
        ``dropped_out(model)`` compares the shapes.
        """
        return [
            self.units.hook(layer, partial(zero_neurons, mask=mask))
            for layer, mask in enumerate(self.mask)
            if mask.any()
        ]

    def dropped_out(self, model: LanguageModel) -> Use[None]:
        """Set these neurons to zero inside the ``with`` block; ValueError where the set is of
        another model's shape.
        """
        view = NeuronView(model, self.units)
        if (own := tuple(self.mask.shape)) != (shape := (view.n_layers, view.n_neurons)):
            raise ValueError(
                f"mask must have the model's shape {shape}, got {own}. Localize in the model that "
                "is to be ablated."
            )
        changes = (
            adding_hook(view.points[name], hook, "add_hook", every_thread=True)
            for name, hook in self.dropout_hooks()
        )
        return Use(model, chain.from_iterable(changes))

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        return {"mask": self.mask}, {"units": identity_text(self.units)}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> NeuronSet:
        return cls(tensors["mask"], read_units(metadata.get("units")))


@dataclass(frozen=True, eq=False)
class NeuronScores(Saved):
    """How responsible each neuron is for one sequence, according to one method; larger means more.

    Args:
        values: [layer neuron] float32 on the CPU, finite.
        settings: The method with all its hyperparameters, as JSON.
        exact: Mask of the exact scores, where the others are estimates (``ZeroOut(screen=...)``);
            None: all are exact.
        missed: Upper bound on the share of the estimated neurons that belong into the top (see
            ``ZeroOut``); None: all are exact.
        units: What "neuron" means here: for example attention heads.
        first_layer: The layer from which on the method chose, where it chooses in all layers
            together, as learned masks do: the scores of the layers below mean nothing. None: each
            neuron is judged alone.

    Raises:
        ValueError: A value is not finite, values or exact are of another shape, or first_layer is
            not a layer.

    >>> scores = NeuronScores(torch.tensor([[0.1, 0.9, 0.0], [0.3, 0.2, 0.4]]), "mine")
    >>> scores.top_k(1 / 3).mask.tolist()
    [[False, True, False], [False, False, True]]
    """

    required: ClassVar[tuple[str, ...]] = ("values",)
    values: Float[Tensor, "layer neuron"]
    method: str = ""
    sequence_id: str = ""
    settings: str = ""
    exact: NeuronSet | None = None
    missed: float | None = None
    units: Units = NEURONS
    first_layer: int | None = None

    def __post_init__(self) -> None:
        # a view would keep its whole batch alive
        values = as_tensor("values", self.values).detach().to("cpu", torch.float32, copy=True)
        if values.ndim != 2:
            raise ValueError(
                f"values must have the shape [layer neuron], got {tuple(values.shape)}. Pass the "
                "scores of one sequence."
            )
        check_units(self.units)
        if self.missed is not None:
            check_between(0, 1, missed=self.missed)
        if not values.isfinite().all():
            raise ValueError(
                f"values must be finite, got {int((~values.isfinite()).sum())} that are not "
                f"(method {self.method!r}, sequence {self.sequence_id!r}). Try float32, or a "
                "smaller learning rate."
            )
        if self.exact is not None and self.exact.mask.shape != values.shape:
            shape, given = tuple(values.shape), tuple(self.exact.mask.shape)
            raise ValueError(
                f"exact must have the shape of values, {shape}, got {given}. Pass the mask of the "
                "exact scores."
            )
        object.__setattr__(self, "values", values)
        self._start(self.first_layer)

    def __repr__(self) -> str:
        n_layers, n_neurons = self.values.shape
        size = f"{n_layers} layers x {n_neurons} {self.units.name}"
        text = f"{self.method!r}, {self.sequence_id!r}, {size}"
        if self.first_layer:
            text += f", chosen from layer {self.first_layer} on"
        if self.exact is not None:
            text += f", {len(self.exact)} exact, the others estimated"
        if self.missed is not None:
            text += f", missed <= {self.missed:.2%} of them"
        return f"NeuronScores({text})"

    def _repr_html_(self) -> str:
        from tl_localize.stats import styled

        best = self.to_frame().head(LISTED)
        top = self.top_k(count=max(1, int(self.values.numel() * COUNTED)), per="model")
        in_top = f"in the top {100 * COUNTED:g} %"
        layers = {
            "layer": range(len(self.values)),
            "mean": self.values.mean(1).tolist(),
            "highest": self.values.amax(1).tolist(),
            in_top: top.mask.sum(1),
        }
        return styled(best, f"{self!r} {self.settings}; larger is more responsible") + styled(
            layers, bars=[in_top]
        )

    @classmethod
    def mean(cls, scores: Iterable[NeuronScores]) -> NeuronScores:
        """The mean of one method's scores over texts; ValueError where the methods or the shapes
        differ, or there are none.
        """
        scores = list(scores)
        if not scores:
            raise ValueError(
                "scores must hold those of at least one text, got none. Pass "
                "list(method.map(model, sequences))."
            )
        first = scores[0]
        kind = (first.method, first.settings, first.units, first.first_layer, first.values.shape)
        for one in scores:
            if (one.method, one.settings, one.units, one.first_layer, one.values.shape) != kind:
                raise ValueError(
                    f"scores must be of one method in one model, got {one!r} {one.settings} beside "
                    f"{first!r} {first.settings}. Take their mean one by one."
                )
        values = torch.stack([one.values for one in scores]).mean(0)
        name = f"mean of {len(scores)} texts"
        return replace(first, values=values, sequence_id=name, exact=None, missed=None)

    def to_frame(self) -> pd.DataFrame:
        """One row per neuron, the highest score first: layer, neuron, score. Ties go to the lower
        index; layers below ``first_layer`` are left out.
        """
        import pandas as pd

        start, n_neurons = self.first_layer or 0, self.values.shape[1]
        values = self.values[start:].flatten()
        order = values.argsort(descending=True, stable=True)
        columns = {
            "layer": (order // n_neurons + start).numpy(),
            "neuron": (order % n_neurons).numpy(),
            "score": values[order].numpy(),
        }
        return pd.DataFrame(columns)

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
            nearest = per == "layer" and rounding == "nearest"
            count = round(n * share) if nearest else rounded_down(share, n)
            if not count:
                raise ValueError(
                    f"ratio must select at least one of {n} {self.units.name}, got {ratio!r}, "
                    f"which selects none. Use at least {1 / n:.2g}."
                )
        elif ratio is not None:
            raise ValueError(
                f"ratio must be left out beside a count, got {ratio!r} and count {count!r}. Pass "
                "one of them."
            )
        check_count(count=count)
        if count > n:
            raise ValueError(
                f"count must be at most the {n} {self.units.name} to choose from, got {count}. "
                "Take fewer."
            )
        best = pool.argsort(dim=-1, descending=True, stable=True)[:, :count]
        mask = torch.zeros(self.values.shape, dtype=torch.bool)
        mask[start:] = (
            torch.zeros_like(pool, dtype=torch.bool).scatter(-1, best, True).view(-1, mask.shape[1])
        )
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
                f"first_layer must be {self.first_layer}, from which on {self.method!r} chose in "
                f"all layers together, got {first_layer}. Give the method another first_layer."
            )
        return first_layer

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors = {"values": self.values}
        if self.exact is not None:
            tensors["exact"] = self.exact.mask
        texts = {"method": self.method, "sequence_id": self.sequence_id, "settings": self.settings}
        texts["units"] = identity_text(self.units)
        for name in ("missed", "first_layer"):
            if (value := getattr(self, name)) is not None:
                texts[name] = repr(value)
        return tensors, texts

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> NeuronScores:
        units = read_units(metadata.get("units"))
        texts = {name: metadata.get(name, "") for name in ("method", "sequence_id", "settings")}
        return cls(
            tensors["values"],
            **texts,
            exact=NeuronSet(tensors["exact"], units) if "exact" in tensors else None,
            missed=float(metadata["missed"]) if "missed" in metadata else None,
            units=units,
            first_layer=int(metadata["first_layer"]) if "first_layer" in metadata else None,
        )
