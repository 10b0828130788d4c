"""The neurons of a TransformerLens model, or other units of it (``units.py``), read and changed by
hooks; and the checks of arguments.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property, partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int, Num, Shaped
from torch import Tensor

from tl_localize.checks import nearest
from tl_localize.model.forward import (
    NOT_CAUSAL,
    check_parts,
    dropout_in_training,
    graph_dropped,
    modules_in,
    parameters_of,
    residual,
    unhooked,
    versions,
)
from tl_localize.model.hooks import (
    added_hooks,
    interrupt_waits,
    own_attribute,
    registered,
    undone_together,
)
from tl_localize.units import NEURONS, UNITS, Acts, Units, check_units, model_name

Hook = Callable[..., Tensor]
# model -> in which mode, with which units it has proven itself
_PROVEN: WeakKeyDictionary[Any, list[tuple[bool, Units | None]]] = WeakKeyDictionary()
WRITTEN_MISFIT, WRITTEN_ROUNDINGS = 1e-2, 16.0  # as shares of what the rows write
VECTORIZED = "tanh exp erf sigmoid log log1p expm1 sin cos sqrt rsqrt"  # functions of torch


@cache
def initialize_vector_functions() -> None:
    """Call each vectorized function of the CPU library once, on one element and so on one thread,
    before anything is computed.

    The library initializes a function at its first call, seemingly by a race: where two threads
    make that call, now and then one thread's half of the numbers is off by 1e-4
    (docs/differences.md has a reproduction in plain torch).
    """
    for name in VECTORIZED.split():
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
    named_parameters: Callable[..., Any]
    __call__: Callable[..., Any]


ENCODERS = ("HookedEncoder", "HookedEncoderDecoder")  # TransformerLens 3 has them


def check_model(model: object) -> None:
    """Raise TypeError unless it is a model of TransformerLens, ValueError for one with an encoder.
    Whether a position sees later ones is measured in ``check_parts``.
    """
    # Before Python 3.12 isinstance reads hook_dict, which a Bridge makes anew each time.
    own, names = getattr(model, "__dict__", {}), LanguageModel.__annotations__
    is_known = all(name in own or hasattr(type(model), name) for name in names)
    if not is_known and not isinstance(model, LanguageModel):
        raise TypeError(
            f"model must be a TransformerLens model, got {type(model).__name__}. Make one with "
            "load_model(name_or_path)."
        )
    if type(model).__name__ in ENCODERS or not hasattr(model, "blocks"):
        raise ValueError(NOT_CAUSAL.format(type(model).__name__, ""))


# Hooks: pure functions of the units, bound with `partial`. TransformerLens passes its HookPoint as
# `hook=`.


def scale_neurons(act: Acts, hook: object = None, *, gate: Num[Tensor, "#batch neuron"]) -> Acts:
    """Multiply every neuron by its gate, at every position."""
    return act * gate.to(act)[(slice(None), None, ..., *(None,) * (act.ndim - 3))]


def record_neurons(act: Acts, hook: object = None, *, store: dict[int, Tensor], layer: int) -> Acts:
    """Keep the activation under its layer and pass it on."""
    store[layer] = act
    return act


def patch_neurons(
    act: Acts, hook: object = None, *, values: Tensor, position: int | None = None
) -> Acts:
    """Replace the neurons at every position, or at one."""
    values = values.to(act)
    return values if position is None else act.select_scatter(values, 1, position)


def clamp_neurons(
    act: Acts, hook: object = None, *, mask: Bool[Tensor, " neuron"], values: Tensor
) -> Acts:
    """Set the masked neurons to given values (``[neuron *width]``, or one number), at every
    position.
    """
    others = ~mask.to(act.device).view(-1, *(1,) * (act.ndim - 3))
    return act.where(others, values.to(act))


# Hooks of torch, on what the rows of a layer write.


def _add_change(
    module: object,
    inputs: object,
    output: Tensor,
    *,
    seen: dict[int, Tensor],
    layer: int,
    index: Tensor,
    change: Tensor,
    on: Tensor | None,
) -> Tensor:
    """Add what changes of some rows write, given the activations that were seen."""
    act = seen.pop(layer).flatten(2)
    chosen = act.gather(-1, index[:, None, :].expand(*act.shape[:2], -1))
    if on is not None:
        chosen = chosen * on[:, None, :]
    written = einsum(
        chosen, change.to(chosen), "batch pos row, batch row d_model -> batch pos d_model"
    )
    return output + written.view_as(output)  # OPT has the positions of all rows in one axis


def _add_zeros(
    module: object, inputs: object, output: Tensor, *, store: dict[int, Tensor], layer: int
) -> Tensor:
    store[layer] = torch.zeros_like(output, requires_grad=True)
    return output + store[layer]


def _record_output(
    module: object, inputs: object, output: Tensor, *, store: dict[int, Tensor], layer: int
) -> Tensor:
    store[layer] = output
    return output


def _each(hook: Hook, layers: Iterable[int], store: dict[int, Tensor]) -> dict[int, Hook]:
    return {layer: partial(hook, store=store, layer=layer) for layer in layers}


class ModelView:
    """What measures and hooks need of a model, whatever its units are.

    ``model`` is the model, ``device`` its device, ``n_layers`` its blocks.

    Raises:
        TypeError: it is not a TransformerLens model.
        ValueError: it is in training mode with dropout, was made in ``torch.inference_mode``, is
            spread over several devices, or does not run in parts as it does as a whole; or torch
            rounds (``torch.autocast``).

    >>> view = ModelView(model)
    >>> view.n_layers, view.device.type
    (6, 'cpu')
    """

    def __init__(self, model: LanguageModel) -> None:
        initialize_vector_functions()
        check_model(model)
        self.model: Any = model
        if name := dropout_in_training(model):
            raise ValueError(
                f"model must not be in training mode, got active dropout in {name!r}, which makes "
                "each pass another one. Call model.eval() first."
            )
        if (dtype := torch.get_default_dtype()) != torch.float32:
            raise ValueError(
                f"default dtype of torch must be float32, got {dtype}, which changes random "
                "numbers and sums. Call torch.set_default_dtype(torch.float32)."
            )
        if (place := torch.get_default_device()).type != "cpu":
            raise ValueError(
                f"default device of torch must be the CPU, got {place}. Call "
                "torch.set_default_device(None): what is computed lies where the model does."
            )
        self.parameters = parameters_of(model)
        if any(parameter.is_inference() for parameter in self.parameters):
            raise ValueError(
                "model must be made outside torch.inference_mode, got weights that can have no "
                "gradient. Make it outside, or load it with load_model."
            )
        self.n_layers = len(self.model.blocks)
        devices = sorted({str(parameter.device) for parameter in self.parameters})
        if len(devices) > 1:
            raise ValueError(
                f"model must be on one device, got {model_name(model)!r} on {', '.join(devices)}. "
                "Move it with model.to(device)."
            )
        if torch.is_autocast_enabled(self.parameters[0].device.type):
            raise ValueError(
                f"torch.autocast must be off, got it for {devices[0]!r}, where it rounds what is "
                "computed. Load the model in the dtype that it should have, with dtype=."
            )
        self._prove_once(None, self._check_parts)

    @cached_property
    def points(self) -> Mapping[str, Any]:
        """The hook points of the model by name, once: a Bridge makes the dictionary anew."""
        return self.model.hook_dict

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def layer_width(self) -> int:
        """Numbers of the widest part of a layer: most of what a forward pass keeps."""
        weight = getattr(getattr(self.model.blocks[0], "mlp", None), "W_out", None)
        return weight.shape[0] if isinstance(weight, Tensor) else 4 * self.model.cfg.d_model

    @contextmanager
    def hooked(
        self, last: Sequence[tuple[str, Hook]] = (), first: Sequence[tuple[str, Hook]] = ()
    ) -> Iterator[None]:
        """Hooks that run after those already on the model (``last``), and hooks that run before
        them (``first``).
        """
        with self._added(first, prepend=True), self._added(last):
            yield

    @contextmanager
    def one_gelu_kernel(self) -> Iterator[None]:
        """Compute GPT-2's GELU by one kernel of torch instead of eight, in float32 and float64;
        equal up to rounding.
        """
        if self.parameters[0].dtype not in (torch.float32, torch.float64):
            yield
            return
        gelu = partial(torch.nn.functional.gelu, approximate="tanh")
        with undone_together() as stack:
            for module in modules_in([self.model]):
                if type(module).__name__ == "NewGELUActivation":  # of transformers, in a Bridge
                    stack.enter_context(own_attribute(module, "forward", gelu))
                elif getattr(vars(module).get("act_fn"), "__name__", "") == "gelu_new":
                    stack.enter_context(own_attribute(module, "act_fn", gelu))
            yield

    @contextmanager
    def lean(self) -> Iterator[None]:
        """``one_gelu_kernel``, and autograd ignores the weights: the same gradients of neurons for
        less time and memory.
        """
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            with self.one_gelu_kernel(), graph_dropped(self.model):
                yield
        finally:
            with interrupt_waits():
                for parameter in trained:
                    parameter.requires_grad_(True)

    def _added(
        self, hooks: Iterable[tuple[str, Hook]], prepend: bool = False
    ) -> AbstractContextManager[None]:
        return added_hooks([(self.points[name], hook) for name, hook in hooks], prepend=prepend)

    # What is taken from TransformerLens and transformers proves itself, once for a model.

    def _prove_once(
        self, units: Units | None, check: Callable[[Int[Tensor, "1 pos"]], None]
    ) -> None:
        """Run a check on some tokens, once for a model, its mode and its units. The hooks of a
        user's on hook points do not meet these passes.
        """
        proven = _PROVEN.setdefault(self.model, [])
        state = (self.model.training, units)
        if state in proven or self.device.type == "meta":
            return
        cfg = self.model.cfg
        tokens = torch.arange(min(4, cfg.n_ctx), device=self.device)[None] % cfg.d_vocab
        with unhooked(self.points.values()), graph_dropped(self.model):
            check(tokens)
        proven.append(state)

    def _check_parts(self, tokens: Int[Tensor, "1 pos"]) -> None:
        check_parts(self.model, tokens, self.one_gelu_kernel())


class NeuronView(ModelView):
    """Reads and changes the neurons of a model, or other units, through hooks. The hooks are on the
    model only inside a ``with`` block.

    ``size`` is (n_layers, n_neurons), where n_neurons counts the units of each layer. ``shape`` is
    (n_neurons, *width): a neuron is one number, an attention head a vector of ``width``.

    Args:
        units: what "neuron" means.

    Raises:
        TypeError; ValueError: as of ``ModelView``, or the model does not have these units (for
            neurons: no MLP, a mixture of experts, no ``hook_post`` with the neurons as its last
            axis).

    >>> view = NeuronView(model)
    >>> gates = {1: torch.zeros(1, view.n_neurons)}  # layer 1 ablated
    >>> with view.scaled(gates), view.recorded() as acts:
    ...     logits = model(sequence.tokens)
    >>> view.n_layers, view.n_neurons, bool(acts[0].any()), bool(acts[1].any())
    (6, 1536, True, False)
    """

    def __init__(self, model: LanguageModel, units: Units = NEURONS) -> None:
        check_model(model)
        check_units(units)
        self.units = units
        self.shape = units.shape(model)  # raises where the model does not have them
        super().__init__(model)
        self.size = self.n_layers, self.shape[0]
        self.n_neurons = self.shape[0]
        if units in UNITS.values():
            self._prove_once(units, self._check_written)
        else:
            self._check_points(units)
            self._prove_once(units, self._check_read)

    def _check_points(self, units: Units) -> None:
        """ValueError unless the model has the hook points of units of the user's own."""
        for name in map(units.point, range(self.n_layers)):
            if name not in self.points:
                raise ValueError(
                    f"units must name hook points of the model, got {name!r} from {units!r}."
                    f"{nearest(name, self.points)}"
                )

    def _check_read(self, tokens: Int[Tensor, "1 pos"]) -> None:
        """ValueError unless what units of the user's own read has as many units as they say."""
        with self.recorded() as acts:
            residual(self.model, tokens)
        for layer in range(self.n_layers):
            found = tuple(acts[layer].shape) if layer in acts else "nothing"
            if found != (*tokens.shape, *self.shape):
                raise ValueError(
                    f"units must read [batch pos unit *width] with the shape {self.shape} of their "
                    f"rows, got {found} at {self.units.point(layer)} of {tokens.shape[1]} tokens "
                    f"from {self.units!r}. Change read, rows or shape, or name another point."
                )

    @property
    def layer_width(self) -> int:
        return max(super().layer_width, math.prod(self.shape))

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
        if self.units not in UNITS.values():
            memory = rows.untyped_storage().data_ptr()
            parameters = list(self.model.parameters())
            if all(weight.untyped_storage().data_ptr() != memory for weight in parameters):
                raise ValueError(
                    f"units must give the model's own parameter as rows, got another tensor from "
                    f"{self.units!r}. Use units whose rows are weights of the model."
                )
        return rows if rows.ndim == 2 else rows.view(-1, rows.shape[-1])

    def row_mask(self, mask: Bool[Tensor, "*some neuron"]) -> Bool[Tensor, "*some row"]:
        """Which rows belong to some units: of a neuron one, of a head as many as its vector has
        entries.
        """
        return mask.repeat_interleave(math.prod(self.shape[1:]), -1)

    @torch.no_grad()
    def row_norms(self) -> Float[Tensor, "layer neuron"]:
        """Euclidean norm of each row of W_out, or of all rows of a unit together, in float32."""
        rows = (self.rows(layer).float().flatten(1) for layer in range(self.n_layers))
        return torch.stack([of_layer.contiguous().norm(dim=-1) for of_layer in rows])

    @torch.no_grad()
    def strengths(self, layer: int, act: Float[Tensor, "*some"]) -> Float[Tensor, "*rest neuron"]:
        """How strongly each unit fires: the norm of what it writes, divided by its row norm. For a
        neuron this is the absolute value of its activation.
        """
        if len(self.shape) == 1:
            return act.abs()
        entries = act.float().flatten(act.ndim - len(self.shape) + 1)
        rows = self.rows(layer).float().flatten(1, -2)
        written = einsum(
            entries, rows, "... neuron entry, neuron entry d_model -> ... neuron d_model"
        )
        norms = rows.flatten(1).norm(dim=-1)
        return written.norm(dim=-1) / norms.clamp_min(torch.finfo(norms.dtype).tiny)

    def by_unit(self, values: Shaped[Tensor, "*some"]) -> Shaped[Tensor, "*rest neuron"]:
        """The sum over the entries of each unit, of values whose last axes are those of ``shape``;
        a neuron is one entry.
        """
        units = values.shape[: values.ndim - len(self.shape) + 1]
        return values.reshape(*units, -1).sum(-1)

    @contextmanager
    def recorded(self) -> Iterator[dict[int, Tensor]]:
        """The neurons of each layer in the last forward pass, [batch pos neuron *width], as the
        model used them.
        """
        store: dict[int, Tensor] = {}
        with self._hooked_layers(_each(record_neurons, range(self.n_layers), store)):
            yield store

    @contextmanager
    def scaled(self, gates: Mapping[int, Num[Tensor, "#batch neuron"]]) -> Iterator[None]:
        """Multiply the neurons of the given layers by gates (one row for all, or one per row of the
        batch).
        """
        for layer, gate in gates.items():
            if gate.ndim != 2 or gate.shape[-1] != self.n_neurons:
                raise ValueError(
                    f"gate must have shape [batch neuron] with neuron={self.n_neurons}, got "
                    f"{tuple(gate.shape)} at layer {layer}. One row serves the whole batch."
                )
        hooks = {layer: partial(scale_neurons, gate=gate) for layer, gate in gates.items()}
        with self._hooked_layers(hooks):
            yield

    @contextmanager
    def patched(self, layer: int, values: Tensor, position: int | None = None) -> Iterator[None]:
        """Replace the neurons of one layer by ``values``, [batch pos neuron *width], or those at
        one position, [batch neuron *width].
        """
        hook = partial(patch_neurons, values=values, position=position)
        with self._hooked_layers({layer: hook}):
            yield

    @contextmanager
    def clamped(
        self, chosen: Bool[Tensor, "layer neuron"], values: Float[Tensor, "layer neuron *width"]
    ) -> Iterator[None]:
        """Set the chosen neurons to values, at every position."""
        masks, values = chosen.to(self.device), values.to(self.device)
        hooks = {
            layer: partial(clamp_neurons, mask=masks[layer], values=values[layer])
            for layer in chosen.cpu().any(-1).nonzero().flatten().tolist()
        }
        with self._hooked_layers(hooks):
            yield

    @contextmanager
    def rows_changed(
        self,
        index: Mapping[int, Int[Tensor, "#batch row"]],
        change: Mapping[int, Float[Tensor, "#batch row d_model"]],
        on: Mapping[int, Bool[Tensor, "batch row"]] | None = None,
    ) -> Iterator[None]:
        """Run as if, for batch row b, ``change[layer][b]`` were added to the rows
        ``index[layer][b]`` of W_out (of W_O, head by head).

        One forward pass serves many changed models, and autograd sees the changed rows only. An
        index and a change of batch 1 are shared by the whole batch; ``on[layer][b]`` says which of
        the changes apply to batch row b, by default all.
        """
        seen: dict[int, Tensor] = {}
        before = _each(record_neurons, index, seen)
        after = {
            layer: partial(
                _add_change,
                seen=seen,
                layer=layer,
                index=index[layer],
                change=change[layer],
                on=on[layer] if on else None,
            )
            for layer in index
        }
        with self._hooked_layers(before), self._hooked_outputs(after):
            yield

    @contextmanager
    def outputs(self) -> Iterator[dict[int, Tensor]]:
        """Zeros that are added to what the rows of each layer write: their gradient is the gradient
        of the output, [batch pos d_model], or [batch x pos d_model] where the layer writes so.
        """
        zeros: dict[int, Tensor] = {}
        hooks = _each(_add_zeros, range(self.n_layers), zeros)
        with self._hooked_outputs(hooks):
            yield zeros

    def _check_written(self, tokens: Int[Tensor, "1 pos"]) -> None:
        """Raise ValueError unless hooks on the units of each layer take effect, and what the layer
        writes without them is less by their activations times their rows.
        """
        gates = torch.tensor([1.0, 0.0], device=self.device)[:, None].expand(2, self.n_neurons)
        written: dict[int, Tensor] = {}
        seeing = self._hooked_outputs(_each(_record_output, range(self.n_layers), written))
        with (
            self.scaled(dict.fromkeys(range(self.n_layers), gates)),
            self.recorded() as acts,
            seeing,
        ):
            residual(self.model, tokens.expand(2, -1))
        for layer in range(self.n_layers):
            if layer in acts and layer in written:
                both = written[layer].detach()
                whole, without = both.float().reshape(2, -1, both.shape[-1])
                rows = self.rows(layer).detach().float().flatten(0, -2)
                expected = acts[layer][0].detach().float().flatten(1) @ rows
                rounding = WRITTEN_ROUNDINGS * torch.finfo(both.dtype).eps
                allowed = WRITTEN_MISFIT * expected.norm() + rounding * whole.norm()
                misfit = (whole - without - expected).norm()
                if not misfit > allowed:  # what is not finite makes scores that are refused
                    continue
            raise ValueError(
                f"model must have {self.units.name} whose hooks take effect and whose rows are "
                f"what they write, got others in layer {layer} of {model_name(self.model)!r} with "
                f"{versions()}. Install versions that were tested (constraints.txt), or use "
                "another model."
            )

    def _hooked_layers(self, hooks: Mapping[int, Hook]) -> AbstractContextManager[None]:
        return self._added(self.units.hook(layer, hook) for layer, hook in hooks.items())

    def _hooked_outputs(self, hooks: Mapping[int, Hook]) -> AbstractContextManager[None]:
        """Hooks of what the rows of some layers write, bias included, before the model's own hooks
        see it.
        """
        places = [(self.units.output(self.model, layer), hook) for layer, hook in hooks.items()]
        return registered(places, "register_forward_hook", prepend=True)
