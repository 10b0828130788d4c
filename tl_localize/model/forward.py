"""The one file that knows whether a model is a HookedTransformer or a TransformerBridge: runs of a
part of the model.

A HookedTransformer starts and stops at any layer by itself. A Bridge runs the forward pass of
transformers: blocks that are to be skipped hand on what they are given, so that masks and rotations
are made by the model itself, and an exception leaves the pass where it is to stop.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.model.hooks import own_attribute, registered

Stream = Float[Tensor, "batch pos d_model"]
# of a Bridge: in which form each block hands the residual stream on
_FORMS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


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
    for name, module in model.named_modules():
        is_dropout = "Dropout" in type(module).__name__
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
    if is_bridge(model):
        return model
    for name, weight in model.named_parameters():
        kind = name.rsplit(".")[-1].removeprefix("_")  # _W_K: of grouped queries
        gated = model.cfg.gated_mlp and ".mlp.W_" in name
        if kind == "W_O":
            weight.data = weight.data.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        elif gated or kind in ("W_U", "W_Q", "W_K", "W_V"):
            weight.data = weight.data.mT.contiguous().mT
    return model


def residual(model: Any, tokens: Int[Tensor, "batch pos"]) -> Stream:
    """The residual stream after the last layer."""
    last = len(model.blocks)
    if is_bridge(model):
        return _run(model, tokens, stop=last)
    # padding_side: TransformerLens would take tokens equal to the pad token for padding when the
    # tokenizer pads on the left.
    return model(tokens, stop_at_layer=last, padding_side="right")


def resume(model: Any, layer: int, resid: Stream, stop: int | None = None) -> Stream:
    """The same from a layer on, when ``resid`` enters that layer; or the stream that enters a
    layer ``stop`` above it. The batch may be any; nothing below the layer runs.
    """
    stop = len(model.blocks) if stop is None else stop
    if layer == stop:
        return resid
    if is_bridge(model):
        return _run_from(model, layer, resid, stop)
    # contiguous: TransformerLens views it as [batch * pos, d_model]
    options: dict[str, Any] = {"stop_at_layer": stop, "padding_side": "right"}
    return model(resid.contiguous(), start_at_layer=layer, **options)


def unembed(model: Any, resid: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape vocab"]:
    """Logits (float32, or float64 where the model is) of residual vectors: the model from above its
    last block on.
    """
    vectors, last = resid.reshape(-1, resid.shape[-1]), len(model.blocks)
    if is_bridge(model):
        logits = _run_from(model, last, vectors[:, None])  # each as a sequence of its own
    else:
        logits = model(vectors[None], start_at_layer=last, padding_side="right")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype).reshape(*resid.shape[:-1], -1)


@contextmanager
def entering(model: Any) -> Iterator[dict[int, Tensor]]:
    """The residual stream that enters each layer in the last forward pass, before the layer's
    hooks.
    """
    store: dict[int, Tensor] = {}
    hooks = [
        (block, partial(_record_input, store=store, layer=layer))
        for layer, block in enumerate(model.blocks)
    ]
    with registered(hooks, "register_forward_pre_hook", prepend=True):
        yield store


def _record_input(module: object, inputs: Any, *, store: dict[int, Tensor], layer: int) -> None:
    store[layer] = inputs[0]


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
    bridge, new, found = is_bridge(model), context, list[Tensor]()
    if bridge:
        from transformers import DynamicCache

        cache: Any = DynamicCache(config=model.original_model.config)
    else:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        cache = TransformerLensKeyValueCache.init_cache(model.cfg, context.device, len(context))
    for i in range(n):
        if bridge:
            logits = model(new, past_key_values=cache, use_cache=True)
        else:
            mask = torch.ones_like(new)
            logits = model(new, past_kv_cache=cache, attention_mask=mask, padding_side="right")
        logits = logits[:, -1:].float()
        if uniform is None:
            new = logits.argmax(-1)
        else:
            below = logits.softmax(-1).cumsum(-1) < uniform[:, i, None, None]
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
    attention, bridge = f"blocks.{layer}.attn.", is_bridge(model)
    rotated = not bridge and model.cfg.positional_embedding_type == "rotary"
    query, key = ("hook_rot_q", "hook_rot_k") if rotated else ("hook_q", "hook_k")
    if bridge and f"{attention}q_norm.hook_out" in model.hook_dict:
        query, key = "q_norm.hook_out", "k_norm.hook_out"
    points = {
        "query": query,
        "key": key,
        "value": "hook_v",
        "scores": "hook_attn_scores",
        "pattern": "hook_pattern",
        "z": "hook_z",
    }
    return {kind: attention + point for kind, point in points.items()}


def attention_scale(model: Any, layer: int) -> float:
    """What a layer divides its products of query and key by; 0 for a Bridge, which does not tell
    it.
    """
    return 0.0 if is_bridge(model) else float(model.blocks[layer].attn.attn_scale)


class _Reached(Exception):
    """Leaves a forward pass with the residual stream, its argument."""


def _leave_after(module: object, inputs: object, output: Any) -> None:
    raise _Reached(output[0] if isinstance(output, tuple | list) else output)


def _put_in(module: object, inputs: Any, *, resid: Tensor) -> Any:
    return (resid, *inputs[1:])


def _run_from(model: Any, start: int, resid: Tensor, stop: int | None = None) -> Tensor:
    """A Bridge's forward pass from layer ``start`` on, which ``resid`` enters."""
    # of no effect: only their number is used
    tokens = torch.zeros(resid.shape[:2], dtype=torch.long, device=resid.device)
    if start and model.blocks[-1] not in _FORMS:
        # the user's hooks see a pass of one token
        _run(model, tokens[:1, :1])
    return _run(model, tokens, start, resid, stop)


def _run(
    model: Any, tokens: Tensor, start: int = 0, resid: Tensor | None = None, stop: int | None = None
) -> Tensor:
    """A Bridge's forward pass to layer ``stop``, by default to the logits."""
    looking: AbstractContextManager[Any] = nullcontext()
    if model.blocks[-1] not in _FORMS:
        hooks = [(block, _look_at_form) for block in model.blocks]
        looking = registered(hooks, "register_forward_hook", prepend=True)
    with _cut(model, start, resid, stop), looking:
        try:
            return model(tokens, use_cache=False)
        except _Reached as reached:
            return reached.args[0]


def _look_at_form(block: Any, inputs: object, output: Any) -> None:
    """Keep what a block hands on: None for the residual stream, or a list or tuple of it and
    Nones.
    """
    several = isinstance(output, tuple | list)
    _FORMS[block] = type(output)([None] * len(output)) if several else None


def _hand_on(handed: Any, *args: Any, **options: Any) -> Any:
    """What a skipped block gives."""
    return handed


@contextmanager
def _cut(model: Any, start: int, resid: Tensor | None, stop: int | None) -> Iterator[None]:
    """Forward passes skip the blocks below ``start``, and end before ``stop``."""
    blocks = list(model.blocks)
    with ExitStack() as stack:
        for block in blocks[:start]:
            form = _FORMS[block]
            handed = resid if form is None else type(form)([resid, *form[1:]])
            # What torch calls for block(...): so the block's own hooks don't run either. `setattr`
            # would reach the wrapped module.
            stack.enter_context(own_attribute(block, "_call_impl", partial(_hand_on, handed)))
        if resid is not None and start < len(blocks):
            entry = (blocks[start], partial(_put_in, resid=resid))
            stack.enter_context(registered([entry], "register_forward_pre_hook", prepend=True))
        if stop is not None:
            end = (blocks[stop - 1], _leave_after)
            stack.enter_context(registered([end], "register_forward_hook"))
        yield
