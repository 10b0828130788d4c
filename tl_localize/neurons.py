"""The neurons of a TransformerLens model, or other units of it (``units.py``), read and changed by
hooks; and the checks of arguments.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int, Num, Shaped
from torch import Tensor

from tl_localize.changes import Undo, Use, adding_hook, undo_interrupted
from tl_localize.forward import dropout_in_training
from tl_localize.units import NEURONS, Acts, Units, check_units, model_name

Hook = Callable[..., Tensor]
# where a float is meant: the run-time type checker of the tests, unlike PEP 484, does not take an
# int for it
Real = float | int


@cache
def initialize_vector_functions() -> None:
    """Call each vectorized function of the CPU library once, on one element and so on one thread,
    before anything is computed.

    The library initializes a function at its first call, seemingly by a race: where two threads
    make that call, now and then one thread's half of the numbers is off by 1e-4
    (docs/differences.md has a reproduction in plain torch).
    """
    for name in [
        "tanh",
        "exp",
        "erf",
        "sigmoid",
        "log",
        "log1p",
        "expm1",
        "sin",
        "cos",
        "sqrt",
        "rsqrt",
    ]:
        for dtype in (torch.float32, torch.float64):
            getattr(torch, name)(torch.ones(1, dtype=dtype))


@runtime_checkable
class LanguageModel(Protocol):
    """What tells a TransformerLens model, of either class: its config, hooks and call. (Type
    checkers do not see a Bridge's blocks.)
    """

    cfg: Any
    hook_dict: Any
    hooks: Callable[..., Any]
    parameters: Callable[..., Any]
    __call__: Callable[..., Any]


def check_model(model: object) -> None:
    """Raise TypeError unless it is a model to work with."""
    if not isinstance(model, LanguageModel):
        raise TypeError(
            f"model must be a TransformerLens model, got {type(model).__name__}. Make one with "
            "load_model(name_or_path)."
        )


def as_tensor(name: str, value: Any) -> Tensor:
    """A user's value as a tensor; TypeError where torch cannot convert it."""
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be a tensor, got {type(value).__name__}. Pass numbers that "
            "torch.as_tensor takes."
        ) from error


def check_number(name: str, value: Any) -> Any:
    """The value; raises TypeError unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}. Pass an int or a float.")
    return value


def check_positive(**settings: Any) -> None:
    """Raise TypeError or ValueError unless each is a finite number above 0."""
    for name, value in settings.items():
        if not 0 < check_number(name, value) < math.inf:
            raise ValueError(
                f"{name} must be above 0 and finite, got {value!r}. Pass a positive number."
            )


def check_between(low: Real, high: Real, **settings: Any) -> None:
    """Raise TypeError or ValueError unless each is a number in [low, high]."""
    for name, value in settings.items():
        if not low <= check_number(name, value) <= high:
            raise ValueError(
                f"{name} must be in [{low}, {high}], got {value!r}. Pass a finite number in "
                "between."
            )


def check_count(lowest: int = 1, **settings: Any) -> None:
    """Raise TypeError or ValueError unless each is a whole number from ``lowest`` on."""
    for name, value in settings.items():
        if not isinstance(check_number(name, value), numbers.Integral) or int(value) < lowest:
            raise ValueError(
                f"{name} must be a whole number from {lowest} on, got {value!r}. Write it without "
                "a point."
            )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless it is one of the choices."""
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {known}, got {value!r}. Choose one of them.")


def check_seed(seed: Any, bits: int = 63) -> None:
    """Raise TypeError or ValueError unless it is a whole number from 0 to 2**bits - 1 (torch takes
    63 bits, numpy's RandomState 32).
    """
    if not isinstance(check_number("seed", seed), numbers.Integral) or not 0 <= int(seed) < 2**bits:
        raise ValueError(
            f"seed must be a whole number from 0 to 2**{bits} - 1, got {seed!r}. 0 is as good as "
            "any."
        )


def check_ratio(name: str, ratio: Any) -> float:
    """The ratio; raises ValueError unless it is a number in (0, 1]."""
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or not 0 < float(ratio) <= 1:
        raise ValueError(f"{name} must be a fraction in (0, 1], got {ratio!r}. Write 0.01 for 1 %.")
    return float(ratio)


# Hooks: pure functions of the units, bound with `partial`. TransformerLens passes its HookPoint as
# `hook=`.


def scale_neurons(act: Acts, hook: object = None, *, gate: Num[Tensor, "#batch neuron"]) -> Acts:
    """Multiply every neuron by its gate, at every position."""
    return act * gate.to(act)[(slice(None), None, ..., *(None,) * (act.ndim - 3))]


def zero_neurons(act: Acts, hook: object = None, *, mask: Bool[Tensor, " neuron"]) -> Acts:
    """Set the masked neurons to zero, at every position."""
    if (n := act.shape[2]) != len(mask):
        raise ValueError(
            f"mask must have the model's {n} neurons a layer, got {len(mask)}. Localize in the "
            "model that is to be ablated."
        )
    return act.masked_fill(mask.to(act.device)[(..., *(None,) * (act.ndim - 3))], 0.0)


def record_neurons(act: Acts, hook: object = None, *, store: dict[int, Tensor], layer: int) -> Acts:
    """Keep the activation under its layer and pass it on."""
    store[layer] = act
    return act


def patch_neurons(act: Acts, hook: object = None, *, values: Acts) -> Acts:
    """Replace the neurons at every position."""
    return values.to(act)


def patch_neurons_at(
    act: Acts, hook: object = None, *, position: int, values: Float[Tensor, "batch neuron *width"]
) -> Acts:
    """Replace the neurons at one position."""
    return act.select_scatter(values.to(act), 1, position)


def clamp_neurons(
    act: Acts,
    hook: object = None,
    *,
    index: Int[Tensor, " chosen"],
    values: Float[Tensor, " chosen *width"],
) -> Acts:
    """Set the chosen neurons to given values, at every position."""
    return act.index_copy(
        2, index.to(act.device), values.to(act).expand(*act.shape[:2], *values.shape)
    )


def _see_rows(act: Acts, hook: object = None, *, seen: dict[int, Tensor], layer: int) -> Acts:
    """Keep the activations until the output of their layer uses them."""
    if seen:
        raise RuntimeError(
            f"the rows of layer {min(seen)} must be applied in each pass, and were not. Leave "
            "compatibility mode."
        )
    seen[layer] = act
    return act


def _add_change(
    output: Tensor,
    hook: object = None,
    *,
    seen: dict[int, Tensor],
    layer: int,
    index: Int[Tensor, "#batch row"],
    change: Float[Tensor, "#batch row d_model"],
    on: Bool[Tensor, "batch row"] | None,
) -> Tensor:
    """Add what changes of some rows write, given the activations that were seen."""
    act = seen.pop(layer).flatten(2)
    chosen = act.gather(-1, index[:, None, :].expand(*act.shape[:2], -1))
    if on is not None:
        chosen = chosen * on[:, None, :]
    return output + einsum(
        chosen, change.to(chosen), "batch pos row, batch row d_model -> batch pos d_model"
    )


def _add_zeros(
    output: Tensor, hook: object = None, *, zeros: dict[int, Tensor], layer: int
) -> Tensor:
    zeros[layer] = torch.zeros_like(output, requires_grad=True)
    return output + zeros[layer]


def _after_module(hook: Hook, module: object, inputs: object, output: Tensor) -> Tensor:
    """Call a hook as torch calls a forward hook."""
    return hook(output)


class NeuronView:
    """Reads and changes the neurons of a model, or other units, through hooks, which stay on the
    model inside ``with`` only.

    ``n_layers`` and ``n_neurons`` (units of each layer) are the model's numbers, ``shape`` is
    (n_neurons, *width): a neuron is one number, an attention head a vector. ``model`` is the model
    and ``device`` its device.

    Args:
        units: what "neuron" means.

    Raises:
        TypeError: it is not a TransformerLens model.
        ValueError: the model does not have these units (for neurons: no MLP, a mixture of experts,
            no ``hook_post`` with the neurons as its last axis), or it is spread over several
            devices.

    >>> view = NeuronView(model)
    >>> gates = {1: torch.zeros(1, view.n_neurons)}  # layer 1 ablated
    >>> with view.scaled(gates), view.recorded() as acts:
    ...     logits = model(sequence.tokens)
    >>> view.n_layers, view.n_neurons, bool(acts[0].any()), bool(acts[1].any())
    (6, 1536, True, False)
    """

    def __init__(self, model: LanguageModel, units: Units = NEURONS) -> None:
        initialize_vector_functions()
        check_model(model)
        check_units(units)
        undo_interrupted(model)
        self.model: Any = model
        self.units = units
        if name := dropout_in_training(model):
            raise ValueError(
                f"model must not be in training mode, got active dropout in {name!r}, which makes "
                "each pass another one. Call model.eval() first."
            )
        self.points: Mapping[str, Any] = model.hook_dict  # a Bridge makes it anew each time
        self.parameters = list(model.parameters())
        self.shape = units.shape(model)
        self.n_layers, self.n_neurons = len(self.model.blocks), self.shape[0]
        for layer in range(self.n_layers):
            if (point := units.point(layer)) not in self.points:
                raise ValueError(
                    f"units must be in hook points of the model, got {point!r} of {units!r}, which "
                    f"{model_name(model)!r} lacks."
                )
        devices = {parameter.device for parameter in self.parameters}
        if len(devices) > 1:
            found = f"{model_name(model)!r} on {', '.join(sorted(map(str, devices)))}"
            raise ValueError(
                f"model must be on one device, got {found}. Move it with model.to(device)."
            )

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def d_mlp(self) -> int:
        """Neurons of an MLP, whatever the units are: most of what a forward pass keeps."""
        weight = getattr(getattr(self.model.blocks[0], "mlp", None), "W_out", None)
        return weight.shape[0] if isinstance(weight, Tensor) else 4 * self.model.cfg.d_model

    def rows(self, layer: int) -> Float[Tensor, "neuron *width d_model"]:
        """W_out of a layer, the model's own parameter; neuron i adds h_i times row i to the MLP's
        output. Of heads: W_O.
        """
        return self.units.rows(self.model, layer)

    def flat_rows(self, layer: int) -> Float[Tensor, "row d_model"]:
        """All output rows of a layer, unit by unit, in the memory of the model's own parameter;
        ValueError where that can't be.
        """
        rows, again = self.rows(layer), self.rows(layer)
        if rows.data_ptr() != again.data_ptr():
            raise ValueError(
                "units must give the model's own parameter as rows, got a copy from "
                f"{self.units!r}. Return the parameter."
            )
        return rows if rows.ndim == 2 else rows.view(-1, rows.shape[-1])

    def row_mask(self, mask: Bool[Tensor, "*some neuron"]) -> Bool[Tensor, "*some row"]:
        """Which rows belong to some units: of a neuron one, of a head as many as its vector has
        entries.
        """
        return mask.repeat_interleave(math.prod(self.shape[1:]), -1)

    @torch.no_grad()
    def row_norms(self) -> Float[Tensor, "layer neuron"]:
        """Euclidean norm of each row of W_out, or of all rows of a unit together, float32 on the
        CPU.
        """
        rows = [self.rows(layer).float().flatten(1) for layer in range(self.n_layers)]
        return torch.stack([of_layer.contiguous().norm(dim=-1).cpu() for of_layer in rows])

    @torch.no_grad()
    def strengths(self, layer: int, act: Float[Tensor, "*some"]) -> Float[Tensor, "*rest neuron"]:
        """What times its row norm is the norm of what each unit writes: of a neuron the absolute
        value of its activation.
        """
        if len(self.shape) == 1:
            return act.abs()
        rows = self.rows(layer).float().flatten(1, -2)  # [unit row d_model]
        norms = rows.flatten(1).norm(dim=-1)
        # R' R = rows rows'
        triangular = (
            torch.linalg.qr(rows.mT).R
            / norms.clamp_min(torch.finfo(norms.dtype).tiny)[:, None, None]
        )
        flat = act.float().flatten(act.ndim - len(self.shape) + 1)
        return einsum(
            flat, triangular, "... neuron row, neuron entry row -> ... neuron entry"
        ).norm(dim=-1)

    def by_unit(self, values: Shaped[Tensor, "*some"]) -> Shaped[Tensor, "*rest neuron"]:
        """The sum over the entries of each unit, of values whose last axes are those of ``shape``;
        a neuron is one entry.
        """
        if len(self.shape) == 1:
            return values
        return values.flatten(values.ndim - len(self.shape) + 1).sum(-1)

    def recorded(self) -> Use[dict[int, Tensor]]:
        """The neurons of each layer in the last forward pass, [batch pos neuron *width], as the
        model used them.
        """
        store: dict[int, Tensor] = {}
        hooks = {
            layer: partial(record_neurons, store=store, layer=layer)
            for layer in range(self.n_layers)
        }
        return Use(self.model, self._hooking(hooks), store)

    def scaled(self, gates: Mapping[int, Num[Tensor, "#batch neuron"]]) -> Use[None]:
        """Multiply the neurons of the given layers by gates (one row for all, or one per row of the
        batch).
        """
        for layer, gate in gates.items():
            if gate.ndim != 2 or gate.shape[-1] != self.n_neurons:
                rule = f"gate must have shape [batch neuron] with neuron={self.n_neurons}"
                raise ValueError(
                    f"{rule}, got {tuple(gate.shape)} at layer {layer}. One row serves the whole "
                    "batch."
                )
        hooks = {layer: partial(scale_neurons, gate=gate) for layer, gate in gates.items()}
        return Use(self.model, self._hooking(hooks))

    def patched_at(
        self, layer: int, position: int, values: Float[Tensor, "batch neuron *width"]
    ) -> Use[None]:
        """Replace the neurons of one layer at one position."""
        hook = partial(patch_neurons_at, position=position, values=values)
        return Use(self.model, self._hooking({layer: hook}))

    def patched(self, layer: int, values: Acts) -> Use[None]:
        """Replace the neurons of one layer at every position."""
        return Use(self.model, self._hooking({layer: partial(patch_neurons, values=values)}))

    def clamped(
        self, chosen: Bool[Tensor, "layer neuron"], values: Float[Tensor, "layer neuron *width"]
    ) -> Use[None]:
        """Set the chosen neurons to values, at every position."""
        hooks: dict[int, Hook] = {}
        for layer in chosen.any(-1).nonzero().flatten().tolist():
            index = chosen[layer].nonzero().flatten().to(self.device)
            hooks[layer] = partial(
                clamp_neurons, index=index, values=values[layer].to(self.device)[index]
            )
        return Use(self.model, self._hooking(hooks))

    def output_hooked(self, layer: int) -> bool:
        """Whether a hook may change what the MLP of a layer writes before it reaches the next
        layer.
        """
        block = self.model.blocks[layer]
        names = ("mlp.out.hook_out", "mlp.hook_out", "hook_mlp_out", "hook_resid_post", "hook_out")
        points = [self.points.get(f"blocks.{layer}.{name}") for name in names]
        modules = [block.mlp, block, *(point for point in points if point is not None)]
        return any(module._forward_hooks for module in modules)

    def hooked(
        self, last: Sequence[tuple[str, Hook]] = (), first: Sequence[tuple[str, Hook]] = ()
    ) -> Use[None]:
        """Hooks that run after those already on the model (``last``), and hooks that run before
        them (``first``).
        """
        return Use(self.model, chain(self._adding(first, True), self._adding(last, False)))

    def rows_changed(
        self,
        index: Mapping[int, Int[Tensor, "#batch row"]],
        change: Mapping[int, Float[Tensor, "#batch row d_model"]],
        on: Mapping[int, Bool[Tensor, "batch row"]] | None = None,
    ) -> Use[None]:
        """Run as if, for batch row b, ``change[layer][b]`` were added to the rows
        ``index[layer][b]`` of W_out (of W_O, head by head).

        One forward pass serves many changed models, and autograd sees the changed rows only. An
        index and a change of batch 1 are shared by the whole batch; ``on[layer][b]`` says which of
        the changes apply to batch row b, by default all.
        """
        seen: dict[int, Tensor] = {}
        before: dict[int, Hook] = {}
        after: dict[int, Hook] = {}
        for layer in index:
            before[layer] = partial(_see_rows, seen=seen, layer=layer)
            after[layer] = partial(
                _add_change,
                seen=seen,
                layer=layer,
                index=index[layer],
                change=change[layer],
                on=on[layer] if on else None,
            )
        return Use(self.model, chain(self._hooking(before), self._hooking_outputs(after)))

    def outputs(self) -> Use[dict[int, Tensor]]:
        """Zeros that are added to what the rows of each layer write, [batch pos d_model]: their
        gradient is the gradient of the output.
        """
        zeros: dict[int, Tensor] = {}
        hooks = {
            layer: partial(_add_zeros, zeros=zeros, layer=layer) for layer in range(self.n_layers)
        }
        return Use(self.model, self._hooking_outputs(hooks), zeros)

    def one_gelu_kernel(self) -> Use[None]:
        """Compute GPT-2's GELU by one kernel of torch instead of eight, in float32 and float64;
        equal up to rounding.
        """
        return Use(self.model, self._simplifying_gelu())

    def lean(self) -> Use[None]:
        """``one_gelu_kernel``, and autograd ignores the weights: the same gradients of neurons for
        less time and memory.
        """
        return Use(self.model, chain(self._freezing(), self._simplifying_gelu()))

    # What a block changes: each yields how a change is undone, and then makes it.

    def _adding(self, hooks: Iterable[tuple[str, Hook]], prepend: bool) -> Iterator[Undo]:
        for name, hook in hooks:
            yield from adding_hook(self.points[name], hook, "add_hook", prepend=prepend)

    def _hooking(self, hooks: Mapping[int, Hook]) -> Iterator[Undo]:
        return self._adding([self.units.hook(layer, hooks[layer]) for layer in hooks], False)

    def _hooking_outputs(self, hooks: Mapping[int, Hook]) -> Iterator[Undo]:
        """Hooks of what the rows of some layers write, bias included, before the model's own hooks
        see it.
        """
        for layer, hook in hooks.items():
            place = self.units.output(self.model, layer)
            if isinstance(place, str):
                yield from self._adding([(place, hook)], True)
            else:
                yield from adding_hook(place, partial(_after_module, hook), "register_forward_hook")

    def _freezing(self) -> Iterator[Undo]:
        for parameter in self.parameters:
            if parameter.requires_grad:
                yield partial(parameter.requires_grad_, True)
                parameter.requires_grad_(False)

    def _simplifying_gelu(self) -> Iterator[Undo]:
        for block in self.model.blocks:
            mlp: Any = getattr(block, "mlp", None)
            dtype = getattr(getattr(mlp, "W_out", None), "dtype", None)
            if dtype not in (torch.float32, torch.float64):
                continue
            if getattr(getattr(mlp, "act_fn", None), "__name__", "") == "gelu_new":
                yield partial(setattr, mlp, "act_fn", mlp.act_fn)
                mlp.act_fn = partial(torch.nn.functional.gelu, approximate="tanh")
            # of a Bridge: the module of transformers
            wrapped = getattr(mlp, "original_component", None)
            for name, child in list(wrapped.named_children()) if wrapped is not None else ():
                if type(child).__name__ == "NewGELUActivation":
                    yield partial(setattr, wrapped, name, child)
                    setattr(wrapped, name, torch.nn.GELU(approximate="tanh"))
