"""Scores of neurons and sets of neurons: plain data."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_localize.checks import Real, check_choice, check_count, check_ratio
from tl_localize.drawing import axes, finish, mark_layers
from tl_localize.files import Saved
from tl_localize.model.hooks import added_hooks
from tl_localize.model.hugging_face import ablated_units
from tl_localize.model.neurons import Hook, LanguageModel, NeuronView, clamp_neurons
from tl_localize.units import NEURONS, UNITS, Units, check_units

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Rounding = Literal["nearest", "floor"]
MARKED = 10  # highest scores of a layer that a figure marks


def rounded_down(ratio: Real, n: int) -> int:
    """How many of n a ratio is, rounded down; up to rounding errors, so that 0.29 of 100 is 29."""
    return math.floor(round(ratio * n, 6))


def least_share(n: int, *, rounding: Rounding = "floor") -> str:
    """The least ratio of n that is one of them, to two digits and never below it.

    >>> least_share(1536), least_share(10), least_share(1536, rounding="nearest")
    ('0.00066', '0.1', '0.00033')
    """
    least = 1 / n if rounding == "floor" else 0.5 / n
    scale = 10 ** (1 - math.floor(math.log10(least)))
    digits = math.ceil(round(scale * least, 6))
    if rounding == "nearest" and digits == round(scale * least, 6):
        digits += 1  # a half is rounded to the even number, which is 0
    return f"{digits / scale:g}"


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

    @classmethod
    def from_indices(
        cls, indices: Iterable[Sequence[int]], shape: Sequence[int], units: Units | str = NEURONS
    ) -> "NeuronSet":
        """The set of some pairs (layer, neuron).

        Args:
            indices: The pairs; both numbers count from 0. Also a tensor [pair 2].
            shape: Layers and neurons of each, such as ``scores.values.shape``.
            units: What "neuron" means here, or its name, as in JSON.

        Raises:
            ValueError: The shape is not two sizes, or a pair is none of that shape.

        >>> NeuronSet.from_indices([(1, 2), (0, 0)], shape=(2, 3)).mask.tolist()
        [[True, False, False], [False, False, True]]
        """
        sizes = tuple(shape) if isinstance(shape, Iterable) else ()  # pyright: ignore[reportUnnecessaryIsInstance]
        if len(sizes) != 2 or not all(map(_is_whole, sizes)) or min(sizes) < 1:
            raise ValueError(
                f"shape must be the layers and the neurons of each, got {sizes or shape}. Write "
                "for example (6, 1536), or scores.values.shape."
            )
        if isinstance(units, str):
            check_choice("units", units, UNITS)
            units = UNITS[units]
        n_layers, n_neurons = map(int, sizes)
        mask = torch.zeros(n_layers, n_neurons, dtype=torch.bool)
        pairs = _plain(indices)
        for pair in list[Any](pairs if isinstance(pairs, Iterable) else [pairs]):
            both: tuple[Any, ...] = tuple(_plain(pair)) if isinstance(pair, Iterable) else ()
            whole = len(both) == 2 and all(map(_is_whole, both))
            if not (whole and 0 <= both[0] < n_layers and 0 <= both[1] < n_neurons):
                raise ValueError(
                    f"indices must be pairs (layer, neuron) below {n_layers} and {n_neurons}, got "
                    f"{pair}. Both count from 0."
                )
            mask[both] = True
        return cls(mask, units)

    def __len__(self) -> int:
        return int(self.mask.sum())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((layer, neuron) for layer, neuron in self.mask.nonzero().tolist())

    def __contains__(self, pair: object) -> bool:
        both = tuple(pair) if isinstance(pair, list) else pair  # such as JSON has it
        return both in set(self)

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
        check_set(other, name)
        if (other.mask.shape, other.units) != (self.mask.shape, self.units):
            raise ValueError(
                f"{name} must be a NeuronSet of shape {tuple(self.mask.shape)} of {self.units!r}, "
                f"got {other!r}. Both sets must belong to one model, and be of one kind of unit."
            )
        return other.mask

    def __repr__(self) -> str:
        counts = f"{len(self)} of {self.mask.numel()} {self.units.name}"
        return f"NeuronSet({counts}, per layer {self.mask.sum(1).tolist()})"

    def to_frame(self) -> "pd.DataFrame":
        """One row per neuron, the lowest layer first: layer, neuron."""
        import pandas as pd

        return pd.DataFrame(list(self), columns=["layer", "neuron"])

    def to_json(self) -> str:
        """The set as text that any program reads: ``units``, ``shape`` and ``indices``, which
        ``from_indices`` takes.

        >>> print(NeuronSet(torch.tensor([[True, False], [False, True]])).to_json())
        {"units": "neurons", "shape": [2, 2], "indices": [[0, 0], [1, 1]]}
        """
        shape = list(self.mask.shape)
        return json.dumps({"units": self.units.name, "shape": shape, "indices": list(self)})

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

    @contextmanager
    def hooks_for(self, hf_model: torch.nn.Module) -> Iterator[None]:
        """Set these neurons to zero in a model of transformers inside the ``with`` block, without
        TransformerLens: for ``generate``, pipelines and evaluations.

        Args:
            hf_model: What ``AutoModelForCausalLM.from_pretrained`` gives, of the model that was
                localized in.

        Raises:
            ValueError: The model has other layers or neurons, its architecture is not among the
                tested ones, or the units are of a user's own.

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> hf_model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=12))
        >>> neurons = NeuronSet.from_indices([(1, 5)], shape=(2, 48))
        >>> with neurons.hooks_for(hf_model):
        ...     logits = hf_model(torch.tensor([[1, 2, 3]])).logits
        """
        with ablated_units(hf_model, self.units, self.mask):
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
        if self.exact is not None:
            check_set(self.exact, "exact")
            if self.exact.mask.shape != values.shape:
                raise ValueError(
                    f"exact must be a set of the shape {tuple(values.shape)}, got "
                    f"{tuple(self.exact.mask.shape)}. Take the one that the method gave."
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

    def plot(self) -> "Figure":
        """The highest scores of each layer, and the range of all others: where the method looks,
        and how far it tells neurons apart. Layers below ``first_layer`` are left out.

        Raises:
            ImportError: matplotlib, of the extra ``plots``, is missing.
        """
        (ax,) = axes(1, (6.4, 3.6))
        for layer in range(self.first_layer or 0, len(self.values)):
            best, rest = self.values[layer].sort(descending=True).values.tensor_split([MARKED])
            ax.plot([layer] * len(best), best, "o", color="#0072B2", markersize=4, alpha=0.6)
            if len(rest):
                ax.vlines(layer, float(rest.min()), float(rest.max()), color="#bbbbbb", linewidth=5)
        mark_layers(ax, range(self.first_layer or 0, len(self.values)))
        names = f"the {MARKED} highest {self.units.name}", f"all other {self.units.name}"
        for line, name in zip((*ax.get_lines()[:1], *ax.collections[:1]), names, strict=False):
            line.set_label(name)
        finish(ax, "layer", "score", " of ".join(filter(None, [self.method, self.sequence_id])))
        ax.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
        figure: Any = ax.figure
        return figure

    def top_k(
        self,
        ratio: Real | None = None,
        *,
        count: int | None = None,
        per: Literal["layer", "model"] = "layer",
        layers: Iterable[int] | None = None,
        first_layer: int | None = None,
        rounding: Rounding = "nearest",
    ) -> NeuronSet:
        """The highest-scored neurons of every layer or of the whole model, a share or a number of
        them. Ties go to the lower index.

        Args:
            ratio: Fraction in (0, 1]; 0.01 is 1 %.
            count: The number of neurons, in place of the ratio.
            per: ``"layer"`` takes the share in every layer, ``"model"`` across all layers.
            layers: Only these, such as ``[3]``; all from ``first_layer`` on unless given.
            first_layer: Layers below it are left out (DEL spares layer 0 with ``first_layer=1``).
                By default that of the scores, or 0 where they have none.
            rounding: How ratio times the neurons of a layer becomes a count (INJ rounds to nearest,
                DEL down). Across the model the count is always rounded down, as in the published
                numbers.

        Raises:
            ValueError: Not exactly one of ratio and count is given; ratio is outside (0, 1] or
                selects no neuron; count is more than there are; an unknown choice; first_layer is
                not a layer, or another one than the method chose from; layers are none of those
                from it on.
        """
        check_choice("per", per, ("layer", "model"))
        check_choice("rounding", rounding, ("nearest", "floor"))
        chosen_from = self._chosen_from(layers, first_layer)
        pool = self.values[chosen_from]
        if per == "model":
            pool = pool.reshape(1, -1)
        n = pool.shape[1]
        if count is None:
            if isinstance(ratio, int) and ratio > 1:
                raise ValueError(
                    f"ratio must be a fraction in (0, 1], 0.01 for 1 %, got {ratio}. Pass "
                    f"count={ratio} for so many."
                )
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
            if ratio is None:
                raise ValueError(
                    f"count must select 1 to {n} {self.units.name}, got {count}. Take fewer."
                )
            least = least_share(n, rounding="floor" if per == "model" else rounding)
            raise ValueError(
                f"ratio must select 1 to {n} {self.units.name}, got {ratio}. The least ratio is "
                f"{least}."
            )
        best = pool.argsort(dim=-1, descending=True, stable=True)[:, :count]
        chosen = torch.zeros(pool.shape, dtype=torch.bool).scatter_(-1, best, True)
        mask = torch.zeros(self.values.shape, dtype=torch.bool)
        mask[chosen_from] = chosen.view(len(chosen_from), -1)
        return NeuronSet(mask, self.units)

    def _chosen_from(self, layers: Iterable[int] | None, first_layer: int | None) -> list[int]:
        """The layers to choose from."""
        there = list(range(self._start(first_layer), len(self.values)))
        if layers is None:
            return there
        plain = _plain(layers)
        several = plain if isinstance(plain, Iterable) else [plain]
        wanted: list[Any] = [_plain(layer) for layer in several]
        if not wanted or not all(map(_is_whole, wanted)) or not set(wanted) <= set(there):
            raise ValueError(
                f"layers must be some of {there[0]} to {there[-1]}, got {wanted}. Layers count "
                "from 0, and those below first_layer are left out."
            )
        return sorted(set(wanted))

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


def check_set(neurons: object, name: str = "neurons") -> None:
    """Raise TypeError where scores, or something else, are given in place of a set."""
    if not isinstance(neurons, NeuronSet):
        raise TypeError(
            f"{name} must be a NeuronSet, got {type(neurons).__name__}. Take some, as "
            "scores.top_k(0.01) does."
        )


def _plain(values: Any) -> Any:
    """Tensors and arrays as numbers."""
    return values.tolist() if isinstance(values, Tensor | np.ndarray) else values


def _is_whole(value: object) -> bool:
    """A whole number, numpy's too; True is none."""
    return not isinstance(value, bool) and isinstance(value, Integral)
