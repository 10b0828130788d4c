"""Scores of neurons and sets of neurons: plain data."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_localize.changes import uninterrupted
from tl_localize.files import Saved
from tl_localize.neurons import (
    Hook,
    LanguageModel,
    NeuronView,
    Real,
    as_tensor,
    check_between,
    check_count,
    check_ratio,
    zero_neurons,
)
from tl_localize.units import NEURONS, Units, check_units, units_in

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHOWN = 8  # neurons that a notebook lists, of all or of each layer
SHOWN_RATIO = 0.01  # share of all neurons that a notebook counts by layer


@dataclass(frozen=True, eq=False)
class NeuronSet:
    """A set of neurons.

    Args:
        mask: [layer neuron], True for the neurons in the set. Kept on the CPU.
        units: what "neuron" means here: for example attention heads. Sets of different units are
            not combined.

    Raises:
        ValueError: the mask is not boolean, or not of two axes.

    It behaves as a set of pairs (layer, neuron): ``&``, ``|``, ``-``, ``==``, ``in``, ``len`` and
    iteration.

    >>> found, truth = (NeuronSet.from_pairs(pairs, (2, 4)) for pairs in ([(0, 0), (1, 0), (1, 3)], [(0, 0), (0, 1)]))
    >>> len(found), found.recall_of(truth), list(found & truth)
    (3, 0.5, [(0, 0)])
    """

    mask: Bool[Tensor, "layer neuron"]
    units: Units = NEURONS

    def __post_init__(self) -> None:
        if isinstance(self.mask, NeuronScores):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "mask must be a boolean tensor [layer neuron], got NeuronScores. Take some, as "
                "scores.top_k(0.01) does."
            )
        mask = as_tensor("mask", self.mask)
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be a boolean tensor [layer neuron], got shape {tuple(mask.shape)} of "
                f"{mask.dtype}. "
                "Compare scores with a threshold, or use NeuronScores.top_k."
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

    def units_text(self) -> dict[str, str]:
        """What a file says of the units: nothing where they are neurons."""
        return {} if self.units == NEURONS else {"units": repr(self.units)}

    def __len__(self) -> int:
        return int(self.mask.sum())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((layer, neuron) for layer, neuron in self.mask.nonzero().tolist())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NeuronSet)
            and torch.equal(self.mask, other.mask)
            and repr(self.units) == repr(other.units)
        )

    def __hash__(self) -> int:
        return hash((*self.mask.shape, *self))

    def __and__(self, other: NeuronSet) -> NeuronSet:
        return replace(self, mask=self.mask & self._fitting(other))

    def __or__(self, other: NeuronSet) -> NeuronSet:
        return replace(self, mask=self.mask | self._fitting(other))

    def __sub__(self, other: NeuronSet) -> NeuronSet:
        return replace(self, mask=self.mask & ~self._fitting(other))

    def jaccard(self, other: NeuronSet) -> float:
        """Neurons in both sets, as a fraction of those in either; ValueError where the shapes
        differ or both are empty.
        """
        if not (union := len(self | other)):
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
        if (own := tuple(self.mask.shape)) != (given := tuple(other.mask.shape)):
            raise ValueError(
                f"{name} must have the shape {own}, got {given}. Both sets must belong to one "
                "model."
            )
        if repr(self.units) != repr(other.units):
            raise ValueError(
                f"{name} must be of {self.units!r}, as this set, got {other.units!r}. Compare sets "
                "of one kind of unit."
            )
        return other.mask

    def __repr__(self) -> str:
        return f"NeuronSet({len(self)} of {self.mask.numel()} {self.units.name}, per layer {self.mask.sum(1).tolist()})"

    def html_by_layer(self) -> str:
        """A table of how many neurons lie in each layer, and the first few of them."""
        from tl_localize.stats import styled

        indices = [[str(i) for i in layer.nonzero().flatten().tolist()] for layer in self.mask]
        which = [
            ", ".join([*some[:SHOWN], "..."] if len(some) > SHOWN else some) for some in indices
        ]
        columns = {
            "layer": range(len(indices)),
            self.units.name: list(map(len, indices)),
            "which": which,
        }
        return styled(
            columns,
            f"NeuronSet: {len(self)} of {self.mask.numel()} {self.units.name}",
            [self.units.name],
        )

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

    @uninterrupted
    def dropped_out(self, model: LanguageModel) -> Iterator[None]:
        """Set these neurons to zero inside the ``with`` block; ValueError where the set is of
        another model's shape.
        """
        view = NeuronView(model, self.units)
        if (own := tuple(self.mask.shape)) != (shape := (view.n_layers, view.n_neurons)):
            raise ValueError(
                f"mask must have the model's shape {shape}, got {own}. Localize in the model that "
                "is to be ablated."
            )
        with view.hooked(last=self.dropout_hooks()):
            yield


@dataclass(frozen=True, eq=False)
class NeuronScores(Saved):
    """How responsible each neuron is for one sequence, according to one method; larger means more.

    Args:
        values: [layer neuron] float32 on the CPU, finite.
        settings: the method with all its hyperparameters, as its repr.
        exact: mask of the exact scores, where the others are estimates (``ZeroOut(screen=...)``);
            None: all are exact.
        missed: upper bound on the share of the estimated neurons that belong into the top (see
            ``ZeroOut``); None: all are exact.
        units: what "neuron" means here: for example attention heads.

    Raises:
        ValueError: a value is not finite, or values or exact are of another shape.

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
                f"(method {self.method!r}, sequence "
                f"{self.sequence_id!r}). Try float32, or a smaller learning rate."
            )
        if self.exact is not None and self.exact.mask.shape != values.shape:
            shape, given = tuple(values.shape), tuple(self.exact.mask.shape)
            raise ValueError(
                f"exact must have the shape of values, {shape}, got {given}. Pass the mask of the "
                "exact scores."
            )
        object.__setattr__(self, "values", values)

    def __repr__(self) -> str:
        n_layers, n_neurons = self.values.shape
        text = (
            f"{self.method!r}, {self.sequence_id!r}, {n_layers} layers x {n_neurons} "
            f"{self.units.name}"
        )
        if self.exact is not None:
            text += f", {len(self.exact)} exact, the others estimated"
        if self.missed is not None:
            text += f", missed <= {self.missed:.2%} of them"
        return f"NeuronScores({text})"

    def _repr_html_(self) -> str:
        from tl_localize.stats import styled

        n_layers = len(self.values)
        best = self.to_frame().head(SHOWN)
        top = self.top(max(1, int(self.values.numel() * SHOWN_RATIO))).mask.sum(1)
        in_top = f"in the top {100 * SHOWN_RATIO:g} %"
        layers = {
            "layer": range(n_layers),
            "mean": self.values.mean(1).tolist(),
            "highest": self.values.amax(1).tolist(),
            in_top: top,
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
        about = {
            (one.method, one.settings, *([repr(one.units)] if one.units != NEURONS else []))
            for one in scores
        }
        for what in (about, {tuple(one.values.shape) for one in scores}):
            if len(what) > 1:
                raise ValueError(
                    f"scores must be of one method in one model, got {sorted(what)}. Take their "
                    "mean one by one."
                )
        values = torch.stack([one.values for one in scores]).mean(0)
        return cls(
            values,
            scores[0].method,
            f"mean of {len(scores)} texts",
            scores[0].settings,
            units=scores[0].units,
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per neuron, the highest score first: layer, neuron, score. Ties go to the lower
        index.
        """
        import pandas as pd

        order = self.values.flatten().argsort(descending=True, stable=True)
        layers, neurons = order // self.values.shape[1], order % self.values.shape[1]
        return pd.DataFrame(
            {
                "layer": layers.numpy(),
                "neuron": neurons.numpy(),
                "score": self.values.flatten()[order].numpy(),
            }
        )

    def plot(self, ax: Any = None, *, per: Literal["layer", "model"] = "model") -> Figure:
        """A map of the scores over layers and neurons: ``report.figures.score_map``."""
        # by name, as data stands below its figures
        return import_module("tl_localize.report.figures").score_map(self, ax, per=per)

    def top(self, n: int, first_layer: int = 0) -> NeuronSet:
        """The n neurons of the highest scores in the whole model; ``top_k`` takes a share, of every
        layer or of the model.
        """
        pool = self._from_layer(first_layer).reshape(1, -1)
        check_count(n=n)
        if n > pool.numel():
            of = f"{pool.numel()} {self.units.name}"
            raise ValueError(
                f"n must be at most the {of} to choose from, got {n}. Take fewer, or a share with "
                "top_k."
            )
        return self._best(pool, n)

    def top_k(
        self,
        ratio: Real,
        per: Literal["layer", "model"] = "layer",
        first_layer: int = 0,
        rounding: Literal["nearest", "floor"] = "nearest",
    ) -> NeuronSet:
        """The highest-scored share of the neurons, of every layer or of the whole model. Ties go to
        the lower index.

        Args:
            ratio: fraction in (0, 1]; 0.01 is 1 %.
            per: ``"layer"`` takes the share in every layer, ``"model"`` across all layers.
            first_layer: layers below it are left out (DEL spares layer 0 with ``first_layer=1``).
            rounding: how ratio times the neurons of a layer becomes a count (INJ rounds to nearest,
                DEL down). Across the model the count is always rounded down, as in the published
                numbers.

        Raises:
            ValueError: ratio is outside (0, 1] or selects no neuron; an unknown choice; first_layer
                is not a layer.
        """
        check_ratio("ratio", ratio)
        if per not in ("layer", "model"):
            raise ValueError(
                f"per must be 'layer' or 'model', got {per!r}. 'layer' takes the share in every "
                "layer."
            )
        if rounding not in ("nearest", "floor"):
            raise ValueError(
                f"rounding must be 'nearest' or 'floor', got {rounding!r}. INJ uses 'nearest', DEL "
                "'floor'."
            )
        candidates = self._from_layer(first_layer)
        pool = candidates if per == "layer" else candidates.reshape(1, -1)
        n = pool.shape[-1]
        count = round(n * ratio) if per == "layer" and rounding == "nearest" else int(n * ratio)
        if count == 0:
            of = f"{n} {self.units.name}"
            raise ValueError(
                f"ratio must select at least one of {of}, got {ratio!r}, which selects none. Use "
                f"at least {1 / n:.2g}."
            )
        return self._best(pool, count)

    def _from_layer(self, first_layer: int) -> Float[Tensor, "some_layer neuron"]:
        """The scores of the layers from this one on."""
        n_layers = len(self.values)
        if (
            isinstance(first_layer, bool)
            or not isinstance(first_layer, numbers.Integral)
            or not 0 <= first_layer < n_layers
        ):
            raise ValueError(
                f"first_layer must be a whole number in [0, {n_layers}), got {first_layer}. The "
                f"model has {n_layers} layers."
            )
        return self.values[first_layer:]

    def _best(self, pool: Float[Tensor, "part candidate"], count: int) -> NeuronSet:
        """The ``count`` best of each part of the upper layers; ties go to the lower index."""
        best = pool.argsort(dim=-1, descending=True, stable=True)[:, :count]
        mask = torch.zeros(self.values.numel(), dtype=torch.bool)
        mask[-pool.numel() :] = (
            torch.zeros_like(pool, dtype=torch.bool).scatter(-1, best, True).flatten()
        )
        return NeuronSet(mask.view_as(self.values), self.units)

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        texts = {"method": self.method, "sequence_id": self.sequence_id, "settings": self.settings}
        texts |= {} if self.missed is None else {"missed": repr(self.missed)}
        texts |= {} if self.units == NEURONS else {"units": repr(self.units)}
        return {"values": self.values} | (
            {} if self.exact is None else {"exact": self.exact.mask}
        ), texts

    @classmethod
    def unpacked(
        cls, tensors: dict[str, Tensor], metadata: dict[str, str], units: Units | None = None
    ) -> NeuronScores:
        units = units or units_in(metadata)
        exact = NeuronSet(tensors["exact"], units) if "exact" in tensors else None
        missed = float(metadata["missed"]) if "missed" in metadata else None
        method, sequence_id, settings = (
            metadata.get(key, "") for key in ("method", "sequence_id", "settings")
        )
        return cls(tensors["values"], method, sequence_id, settings, exact, missed, units)
