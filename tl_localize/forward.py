"""The one file that knows whether a model is a HookedTransformer or a TransformerBridge: runs of a
part of the model.

A HookedTransformer starts and stops at any layer by itself. A Bridge runs the forward pass of
transformers: blocks that are to be skipped hand on what they are given, so that masks and rotations
are made by the model itself, and an exception leaves the pass where it is to stop.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.changes import Undo, Use, adding_hook

Stream = Float[Tensor, "batch pos d_model"]
# order of axes in memory
READ_AS = {"W_U": (1, 0), "W_Q": (0, 2, 1), "W_K": (0, 2, 1), "W_V": (0, 2, 1), "W_O": (2, 0, 1)}
READ_AS_GATED = {"W_in": (1, 0), "W_gate": (1, 0), "W_out": (1, 0)}  # of a gated MLP
# of a Bridge: in which form each block hands the residual stream on
_FORMS: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def is_bridge(model: Any) -> bool:
    """Whether a model is a TransformerBridge, which TransformerLens 4 has alone and 3.9 has beside
    HookedTransformer.
    """
    from transformer_lens.model_bridge import TransformerBridge

    return isinstance(model, TransformerBridge)


def dropout_in_training(model: Any) -> str | None:
    """A module that drops numbers at random, as it is in training mode; None where there is none.
    Modules of transformers may be in this mode although their Bridge is not.
    """
    for name, module in model.named_modules() if model.training or is_bridge(model) else ():
        is_dropout = isinstance(module, torch.nn.Dropout)
        for setting, value in vars(module).items() if module.training else ():
            named = (is_dropout and setting == "p") or "dropout" in setting
            if named and isinstance(value, float) and value > 0:
                return name
    return None


def as_bridge(hf_model: Any, name: str) -> Any:
    """A TransformerBridge around a model of transformers, which it changes in place; the global
    seed stays as it is.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    with torch.random.fork_rng(devices=[]):
        model: Any = build_bridge_from_module(
            hf_model, type(hf_model).__name__, hf_config=hf_model.config, model_name=name
        )
    model.cfg.default_prepend_bos = False
    return model.eval()


@torch.no_grad()
def lay_out(model: Any) -> Any:
    """The model, with the weights of a HookedTransformer in memory as its forward pass reads them;
    no number and no shape changes.

    TransformerLens 3.9 brings them into this order in each pass, as transformers has them, by a
    copy: half the time of a short text's pass. A weight that is in this order already is not
    copied.
    """
    if not is_bridge(model):
        for block in model.blocks:
            mlp = getattr(block, "mlp", None)
            for module, orders in (
                (block.attn, READ_AS),
                (mlp, READ_AS_GATED if hasattr(mlp, "W_gate") else {}),
            ):
                _reorder(module, orders)
        _reorder(model.unembed, READ_AS)
    return model


def _reorder(module: Any, orders: dict[str, tuple[int, ...]]) -> None:
    for name, weight in module.named_parameters(recurse=False) if orders else ():
        order = orders.get(name.removeprefix("_"), ())  # _W_K: of grouped queries
        if order and weight.ndim == len(order):  # not so where it is quantized
            weight.data = (
                weight.data.permute(order)
                .contiguous()
                .permute([order.index(axis) for axis in range(len(order))])
            )


def residual(model: Any, tokens: Int[Tensor, "batch pos"], stop: int | None = None) -> Stream:
    """The residual stream that enters layer ``stop``, by default the one after the last layer."""
    stop = len(model.blocks) if stop is None else stop
    if is_bridge(model):
        return _run(model, tokens, stop=stop)
    # padding_side: TransformerLens would take tokens equal to the pad token for padding when the
    # tokenizer pads on the left.
    return model(tokens, stop_at_layer=stop, padding_side="right")


def resume(model: Any, layer: int, resid: Stream, stop: int | None = None) -> Stream:
    """The same from a layer on, when ``resid`` enters that layer. The batch may be any; nothing
    below the layer runs.
    """
    stop = len(model.blocks) if stop is None else stop
    if layer == stop:
        return resid
    # of no effect: only their number is used
    tokens = torch.zeros(resid.shape[:2], dtype=torch.long, device=resid.device)
    if is_bridge(model):
        return _run(model, tokens, start=layer, resid=resid, stop=stop)
    # position vectors that enter every layer
    shortformer = model.cfg.positional_embedding_type == "shortformer"
    positions = model.hook_pos_embed(model.pos_embed(tokens)) if shortformer else None
    # contiguous: TransformerLens views it as [batch * pos, d_model]
    options: dict[str, Any] = {"shortformer_pos_embed": positions, "padding_side": "right"}
    return model(resid.contiguous(), start_at_layer=layer, stop_at_layer=stop, **options)


def unembed(model: Any, resid: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape vocab"]:
    """Logits (float32, or float64 where the model is) of residual vectors: the model from above its
    last block on.
    """
    if is_bridge(model):
        vectors = resid.reshape(-1, 1, resid.shape[-1])  # each as a sequence of its own
        tokens = torch.zeros(vectors.shape[:2], dtype=torch.long, device=resid.device)
        logits = _run(model, tokens, start=len(model.blocks), resid=vectors)
    else:
        logits = model(
            resid.reshape(1, -1, resid.shape[-1]),
            start_at_layer=len(model.blocks),
            padding_side="right",
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(
        *resid.shape[:-1], -1
    )


def entering(model: Any) -> Use[dict[int, Tensor]]:
    """The residual stream that enters each layer in the last forward pass, before the layer's
    hooks.
    """
    store: dict[int, Tensor] = {}
    changes = (
        _before(block, partial(_record_input, store=store, layer=layer))
        for layer, block in enumerate(model.blocks)
    )
    return Use(model, chain.from_iterable(changes), store)


def _before(module: Any, hook: Any) -> Iterable[Undo]:
    """A hook that runs before the module and before its other hooks."""
    name = "register_forward_pre_hook"
    return adding_hook(module, hook, name, prepend=True, with_kwargs=True)


def _record_input(
    module: object,
    inputs: tuple[Any, ...],
    given: dict[str, Any],
    *,
    store: dict[int, Tensor],
    layer: int,
) -> None:
    store[layer] = _stream(inputs, given)


def _stream(inputs: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
    """The residual stream among what a block is called with."""
    return inputs[0] if inputs else given["hidden_states"]


@torch.no_grad()
def generate(
    model: Any,
    context: Int[Tensor, "batch pos"],
    n: int,
    uniform: Float[Tensor, "batch new"] | None = None,
) -> Int[Tensor, "batch new"]:
    """The n tokens that greedy decoding with a cache of keys and values puts after each context;
    with draws from [0, 1), sampled ones.

    ``HookedTransformer.generate`` can't be used: with a tokenizer it masks tokens at the ends of
    the context that equal the pad token, and without one, or from embeddings, it adds learned
    positions wrongly (TransformerLens 3.9). The mask that is given here masks nothing.
    """
    new, found = context, list[Tensor]()
    if is_bridge(model):
        from transformers import DynamicCache

        states: Any = DynamicCache(config=model.original_model.config)
        options: dict[str, Any] = {"past_key_values": states, "use_cache": True}
    else:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        states = TransformerLensKeyValueCache.init_cache(model.cfg, context.device, len(context))
        options = {
            "stop_at_layer": len(model.blocks),
            "past_kv_cache": states,
            "padding_side": "right",
        }
    for i in range(n):
        if is_bridge(model):
            logits = model(new, **options)[:, -1:].float()
        else:
            logits = unembed(
                model, model(new, attention_mask=torch.ones_like(new), **options)[:, -1:]
            )
        if uniform is None:
            new = logits.argmax(-1)
        else:
            below = logits.float().softmax(-1).cumsum(-1) < uniform[:, i, None, None]
            new = below.sum(-1).clamp(max=logits.shape[-1] - 1)
        found.append(new)
    return torch.cat(found, 1)


def attention_hooks(model: Any, layer: int) -> dict[str, str]:
    """Names of the hook points of a layer's attention. A HookedTransformer's queries and keys are
    those after the rotation.

    A Bridge's are those before it, but after a norm where there is one: the query and the key of
    one position are rotated alike, so their product is the same, and clean keys that are put in
    before the rotation come out rotated.
    """
    rotated = not is_bridge(model) and model.cfg.positional_embedding_type == "rotary"
    prefix = "rot_" if rotated else ""
    points = {
        "query": f"{prefix}q",
        "key": f"{prefix}k",
        "value": "v",
        "scores": "attn_scores",
        "pattern": "pattern",
        "z": "z",
    }
    found = {name: f"blocks.{layer}.attn.hook_{point}" for name, point in points.items()}
    if is_bridge(model):
        normed = {name: f"blocks.{layer}.attn.{name[0]}_norm.hook_out" for name in ("query", "key")}
        found |= {name: point for name, point in normed.items() if point in model.hook_dict}
    return found


def attention_scale(model: Any, layer: int) -> float:
    """What a layer divides its products of query and key by; 0 for a Bridge, which does not tell
    it.
    """
    return 0.0 if is_bridge(model) else float(model.blocks[layer].attn.attn_scale)


def rotation_limit(model: Any) -> int | None:
    """The number of tokens beyond which the attention of a sequence's beginning depends on its
    length, where there is one.
    """
    cfg = model.cfg
    if not is_bridge(model):
        depends = getattr(cfg, "use_logn_attn", False) or getattr(
            cfg, "use_dynamic_ntk_rope", False
        )
        return (getattr(cfg, "train_seq_length", None) or cfg.n_ctx) if depends else None
    config = getattr(
        model.original_model.config, "get_text_config", lambda: model.original_model.config
    )()
    given = getattr(config, "rope_parameters", None) or {}
    # of all layers, or by their kind
    for rope in (given, *(entry for entry in given.values() if isinstance(entry, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            return rope.get("original_max_position_embeddings") or cfg.n_ctx
    return None


class _Reached(Exception):
    """Leaves a forward pass with the residual stream, its argument."""


def _leave_before(module: object, inputs: tuple[Any, ...], given: dict[str, Any]) -> None:
    raise _Reached(_stream(inputs, given))


def _leave_after(module: object, inputs: object, output: Any) -> None:
    raise _Reached(output[0] if isinstance(output, tuple | list) else output)


def _put_in(
    module: object, inputs: tuple[Any, ...], given: dict[str, Any], *, resid: Tensor
) -> Any:
    return ((resid, *inputs[1:]), given) if inputs else (inputs, given | {"hidden_states": resid})


def _run(
    model: Any, tokens: Tensor, start: int = 0, resid: Tensor | None = None, stop: int | None = None
) -> Tensor:
    """A Bridge's forward pass from layer ``start`` on, which ``resid`` enters, to layer ``stop``,
    by default to the logits.
    """
    if start and model not in _FORMS:
        # the user's hooks see a pass of one token
        _run(model, tokens.new_zeros(1, 1))
    found: list[Any] = []
    changes = _cutting(model, start, resid, stop)
    if model not in _FORMS:
        look = partial(_look_at_form, found=found)
        looking = (
            adding_hook(block, look, "register_forward_hook", prepend=True)
            for block in model.blocks
        )
        changes = chain(changes, chain.from_iterable(looking))
    with Use(model, changes):
        try:
            return model(tokens, use_cache=False)
        except _Reached as reached:
            return reached.args[0]
        finally:
            if len(found) == len(model.blocks):
                _FORMS[model] = found


def _look_at_form(module: object, inputs: object, output: Any, *, found: list[Any]) -> None:
    """Keep what a block hands on: None for the residual stream, or a list or tuple of it and
    Nones.
    """
    several = isinstance(output, tuple | list)
    found.append(type(output)([None] * len(output)) if several else None)


def _hand_on(thread: int, block: Any, handed: Any, *args: Any, **options: Any) -> Any:
    """What a skipped block gives in this thread; in others it runs."""
    if threading.get_ident() == thread:
        return handed
    return type(block)._call_impl(block, *args, **options)


def _cutting(model: Any, start: int, resid: Tensor | None, stop: int | None) -> Iterable[Undo]:
    """Forward passes skip the blocks below ``start``, and end before ``stop``."""
    blocks = list(model.blocks)
    for block, form in zip(blocks[:start], _FORMS.get(model, []), strict=False):
        handed = resid if form is None else type(form)([resid, *form[1:]])
        # What torch calls for block(...): so the block's own hooks don't run either. `setattr`
        # would reach the wrapped module.
        yield partial(vars(block).pop, "_call_impl", None)
        vars(block)["_call_impl"] = partial(_hand_on, threading.get_ident(), block, handed)
    if resid is not None and start < len(blocks):
        yield from _before(blocks[start], partial(_put_in, resid=resid))
    if stop == len(blocks):
        yield from adding_hook(blocks[-1], _leave_after, "register_forward_hook")
    elif stop is not None:
        yield from _before(blocks[stop], _leave_before)
