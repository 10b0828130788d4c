"""What is scored and ablated: the neurons of the MLPs, attention heads, or units of a user's own.

The units of a layer lie in the activation of one hook point, which ``read`` shows as [batch pos
unit *width]: a neuron is one number, a head a vector. A unit is scaled, set to zero or patched as a
whole. Everything else of this package speaks of neurons and means units.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from tl_localize.files import Storable

Acts = Float[Tensor, "batch pos neuron *width"]


class Units(Storable, ABC):
    """A kind of unit: where the units of a layer are in a model, and what they write.

    A subclass is a frozen dataclass. It defines ``point``, and ``rows`` if its units write rows
    (else ``shape``); other functions only where they differ from the ones here. Two score tables or
    sets can be combined when their units are equal.

    >>> @dataclass(frozen=True)
    ... class Entries(Units):  # the single entries of z, as if each were a head of width 1
    ...     name: ClassVar[str] = "entries of heads"
    ...     def point(self, layer):
    ...         return f"blocks.{layer}.attn.hook_z"
    ...     def rows(self, model, layer):
    ...         return model.blocks[layer].attn.W_O.flatten(0, 1)
    ...     def read(self, act, layer):
    ...         return act.flatten(2)
    ...     def write(self, act, units, layer):
    ...         return units.view_as(act)
    >>> Attribution(units=Entries())(model, sequence)
    NeuronScores('attribution', 'contact_info-000', 6 layers x 192 entries of heads)
    """

    name: ClassVar[str]  # in the plural, for messages and figures
    one: ClassVar[str] = "unit"
    # single numbers whose rows are added last in a layer: runs may start above it (where a check
    # agrees)
    additive: ClassVar[bool] = False

    @abstractmethod
    def point(self, layer: int) -> str:
        """Name of the hook point that holds the units of a layer."""

    def shape(self, model: Any) -> tuple[int, ...]:
        """The number of units in each layer, and the shape of one; raises ValueError where the
        model has none.
        """
        return tuple(self.rows(model, 0).shape[:-1])

    def rows(self, model: Any, layer: int) -> Float[Tensor, "neuron *width d_model"]:
        """Output rows: a unit adds its activation times its rows to the output of its part of the
        layer. The model's own parameter.
        """
        raise ValueError(
            f"units must have output rows, got {self!r}, which has none. Use a method that needs "
            "none, such as Attribution."
        )

    def output(self, model: Any, layer: int) -> Any:
        """The module, or the hook point, whose output the rows are summed into; only Gradient
        Alignment and INJ need it.
        """
        raise ValueError(
            f"units must have an output for this, got {self!r}, which has none. Use another method."
        )

    def read(self, act: Float[Tensor, "batch pos ..."], layer: int) -> Acts:
        """The units in the activation of the hook point."""
        return act

    def write(
        self, act: Float[Tensor, "batch pos ..."], units: Acts, layer: int
    ) -> Float[Tensor, "batch pos ..."]:
        """The activation with other units in it."""
        return units

    def hook(self, layer: int, change: Callable[..., Tensor]) -> tuple[str, Callable[..., Tensor]]:
        """The point of a layer and a hook for it that changes the units, or only looks at them."""
        return self.point(layer), partial(_change, units=self, layer=layer, change=change)


def _change(
    act: Tensor,
    hook: object = None,
    *,
    units: Units,
    layer: int,
    change: Callable[[Tensor], Tensor],
) -> Tensor:
    before = units.read(act, layer)
    after = change(before)
    return act if after is before else units.write(act, after, layer)


class _OfWeight(Units):
    """Units whose rows are the axes but the last of a weight of each block."""

    part: ClassVar[str]  # of the block
    weight: ClassVar[str]
    n_axes: ClassVar[int]  # of the weight
    out: ClassVar[str]  # of a Bridge: the module with the weight

    def shape(self, model: Any) -> tuple[int, ...]:
        """The shape of the units; ValueError where a block has other ones (a mixture of experts, a
        quantized model).
        """
        points: Any = model.hook_dict  # a Bridge makes it anew each time
        first: tuple[int, ...] = ()
        for layer, block in enumerate(model.blocks):
            rows = getattr(getattr(block, self.part, None), self.weight, None)
            shape: tuple[int, ...] = tuple(getattr(rows, "shape", ()))
            first = first or shape
            right = len(shape) == self.n_axes and shape[-1:] == (model.cfg.d_model,)
            if not right or shape != first or self.point(layer) not in points:
                has = f"a {self.weight} of shape {shape}" if shape else f"no {self.weight}"
                raise ValueError(
                    f"model must have {self.name} in every layer (the hook {self.point(layer)} and "
                    f"a {self.weight} of {self.n_axes} axes, of the same shape in all), got "
                    f"{model_name(model)!r} with {has} in layer {layer}. Choose a model that has "
                    "them, and is neither quantized nor a mixture of experts, or other units."
                )
        return first[:-1]

    def rows(self, model: Any, layer: int) -> Float[Tensor, "neuron *width d_model"]:
        return getattr(getattr(model.blocks[layer], self.part), self.weight)

    def output(self, model: Any, layer: int) -> Any:
        part = getattr(model.blocks[layer], self.part)
        of_bridge = getattr(getattr(part, self.out, None), "hook_out", None)
        return of_bridge or part


@dataclass(frozen=True)
class MLPNeurons(_OfWeight):
    """The neurons of the MLPs, the default: neuron i of a layer adds its activation times row i of
    W_out to the output of the MLP.

    >>> Activations(units=MLPNeurons()) == Activations()
    True
    """

    name = "neurons"
    one = "neuron"
    additive = True
    part = "mlp"
    weight = "W_out"
    n_axes = 2
    out = "out"

    def point(self, layer: int) -> str:
        return f"blocks.{layer}.mlp.hook_post"


@dataclass(frozen=True)
class AttentionHeads(_OfWeight):
    """Attention heads (query heads, where keys and values are grouped): head h adds z_h times its
    rows of W_O to the output of attention.

    >>> scores = Attribution(units=AttentionHeads())(model, sequence)
    >>> scores
    NeuronScores('attribution', 'contact_info-000', 6 layers x 6 heads)
    >>> with scores.top_k(1 / 6, first_layer=1).dropped_out(model):  # one head of each layer
    ...     measured = accuracy(model, [sequence])
    """

    name = "heads"
    one = "head"
    part = "attn"
    weight = "W_O"
    n_axes = 3
    out = "o"

    def point(self, layer: int) -> str:
        return f"blocks.{layer}.attn.hook_z"


NEURONS = MLPNeurons()
# by name, for the command line
UNITS: dict[str, Units] = {units.name: units for units in (NEURONS, AttentionHeads())}


def check_units(units: Any) -> None:
    """Raise TypeError unless these are units."""
    if not isinstance(units, Units):
        raise TypeError(
            f"units must be Units, got {units!r}. Pass MLPNeurons() or AttentionHeads()."
        )


def model_name(model: Any) -> str:
    """The model's name, for messages."""
    return getattr(model.cfg, "model_name", type(model).__name__)
