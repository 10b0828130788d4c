"""The one file that knows whether a model is a HookedTransformer or a TransformerBridge: runs of a
part of the model.

A HookedTransformer starts and stops at any layer by itself. A Bridge runs the forward pass of
transformers: blocks that are to be skipped hand on what they are given, so that masks and rotations
are made by the model itself, and an exception leaves the pass where it is to stop.

All of this rests on what a version of TransformerLens and transformers does, and would fail without
a word where another one does something else. So what is used of a model proves itself:
``check_parts`` once for a model, and decoding with a cache in ``generate``.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.model.hooks import (
    interrupt_waits,
    own_attribute,
    registered,
    undone_together,
)

Stream = Float[Tensor, "batch pos d_model"]
# of a Bridge: in which form each block hands the residual stream on
_FORMS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# Two ways to the same logits may differ by this share of their spread, or by so many roundings.
MISFIT, ROUNDINGS = 0.01, 16.0
# How texts are decoded: with a cache; with a cache that a Bridge's attention is given by the name
# that it knows (transformers 5.24 calls it another); without one.
CACHED, HANDED, UNCACHED = "cached", "handed", "uncached"
N_PROVING_ROWS = 2  # of a batch, whose logits with a cache are compared with those without


def is_bridge(model: Any) -> bool:
    """Whether a model is a TransformerBridge, which TransformerLens 4 has alone and 3.9 has beside
    HookedTransformer.
    """
    from transformer_lens.model_bridge import TransformerBridge

    return isinstance(model, TransformerBridge)


def dropout_in_training(model: Any) -> str | None:
    """A module that drops numbers at random, as it is in training mode; None where there is none.
    Modules of transformers may be in this mode although their Bridge is not, which does not name
    all of them (not the dropout of GPT-2's embeddings).
    """
    roots = [model, model.original_model] if is_bridge(model) else [model]
    if not any(module.training for module in modules_in(roots)):
        return None  # nearly always; to name all modules takes ten times as long
    for name, module in chain.from_iterable(root.named_modules() for root in roots):
        is_dropout = "Dropout" in type(module).__name__
        for setting, value in vars(module).items() if module.training else ():
            named = (is_dropout and setting == "p") or "dropout" in setting
            if named and isinstance(value, float) and value > 0:
                return name
    return None


def parameters_of(model: Any) -> list[torch.nn.Parameter]:
    """``model.parameters()`` in any order, in a fraction of its time."""
    modules = modules_in([model.original_model if is_bridge(model) else model])
    found = chain.from_iterable(module._parameters.values() for module in modules)
    return list(dict.fromkeys(parameter for parameter in found if parameter is not None))


def modules_in(roots: list[Any]) -> Iterator[Any]:
    """All modules of some models, in any order, in a fraction of the time of ``modules()``."""
    seen: set[Any] = set()
    waiting = roots[:]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in seen:
            seen.add(module)
            waiting += module._modules.values()
            yield module


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
    last block on. Hooks there see sequences [batch pos d_model] as they are, and other vectors in
    any shape.
    """
    last = len(model.blocks)
    bridge = is_bridge(model)
    if resid.ndim == 3 and hooked_above(model):
        stream = resid
    else:
        vectors = resid.reshape(-1, resid.shape[-1])
        stream = vectors[:, None] if bridge else vectors[None]
    if bridge:
        logits = _run_from(model, last, stream)
    else:
        logits = model(stream, start_at_layer=last, padding_side="right")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype).reshape(*resid.shape[:-1], -1)


def hooked_above(model: Any) -> bool:
    """Whether hooks act above the last block, where no vector needs the others of its text."""
    above = (getattr(model, name, None) for name in ("ln_final", "unembed"))
    return any(
        point._forward_hooks for part in above if part is not None for point in hook_points(part)
    )


def hook_points(module: Any) -> Iterator[Any]:
    """The hook points in a part of a model."""
    from transformer_lens.hook_points import HookPoint

    return (point for point in module.modules() if isinstance(point, HookPoint))


NOT_CAUSAL = (
    "model must predict each token from those before it, got a {}{}. Use a decoder, such as GPT-2."
)


def check_parts(
    model: Any, tokens: Int[Tensor, "batch pos"], in_parts: AbstractContextManager[Any]
) -> None:
    """Raise ValueError unless ``residual`` and ``unembed`` give the logits of the whole model, and
    no position sees a later one, on which the padding of short texts relies.

    Args:
        in_parts: A block for the run in parts, which is to change no number.
    """
    options = {"use_cache": False} if is_bridge(model) else {"padding_side": "right"}
    whole = model(tokens, **options).detach()  # no no_grad: an interrupted one would stay
    changed = torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % model.cfg.d_vocab], 1)
    earlier = model(changed, **options).detach()[:, :-1]
    if tokens.shape[1] > 1 and logits_misfit(model, earlier, whole[:, :-1]) > 0.01:  # mostly 0
        raise ValueError(NOT_CAUSAL.format(type(model).__name__, " that sees later ones"))
    with in_parts:
        parts = unembed(model, residual(model, tokens)).detach()
    misfit = logits_misfit(model, parts, whole)
    if misfit > 1:
        raise ValueError(
            "model must give the same logits in parts as in one pass, got others from "
            f"{type(model).__name__} of {versions()}. Install versions that were tested "
            "(constraints.txt)."
        )


@contextmanager
def graph_dropped(model: Any) -> Iterator[None]:
    """No graph of a pass outlives the block. The attention of GPT-2 and its like in a Bridge keeps
    its last pattern, with the graph that made it, which takes memory and can't be copied.
    """
    try:
        yield
    finally:
        for block in model.blocks:
            kept = vars(getattr(block, "attn", block))
            if isinstance(kept.get("_pattern"), Tensor):
                kept["_pattern"] = kept["_pattern"].detach()


@contextmanager
def unhooked(points: Iterable[Any]) -> Iterator[None]:
    """Hooks that are on hook points now don't run; those that are added inside the block do."""
    before = [(point, dict(point._forward_hooks)) for point in dict.fromkeys(points)]
    try:
        for point, _ in before:
            point._forward_hooks.clear()
        yield
    finally:
        with interrupt_waits():
            for point, hooks in before:
                point._forward_hooks.update(hooks)


@contextmanager
def recorded_streams(model: Any) -> Iterator[dict[int, Tensor]]:
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


class _Proof(NamedTuple):
    """Which way of decoding gave right logits.

    Args:
        state: Of the model, as ``_state`` gives it.
        length: Positions of the longest texts that were compared.
    """

    state: tuple[Any, ...]
    way: str
    length: int


_PROOFS: WeakKeyDictionary[Any, _Proof] = WeakKeyDictionary()  # the last one of a model
_SAID: WeakSet[Any] = WeakSet()  # the models whose slow way was said


@torch.no_grad()
def generate(
    model: Any,
    context: Int[Tensor, "batch pos"],
    n: int,
    uniform: Float[Tensor, "batch new"] | None = None,
) -> Int[Tensor, "batch new"]:
    """The n tokens that greedy decoding puts after each context; with draws from [0, 1), sampled
    ones.

    Decoding with a cache of keys and values proves itself: the first time, its logits are compared
    with those of one pass without a cache over the texts that were written. Where they differ, or
    it would fail, the texts are written without a cache, the slow way, and a warning says so once
    for a model. The proof holds for a model as long as its mode (train or eval), its attention and
    its hooks are the same, and for texts that are not longer. Weights do not matter to a cache.
    Hooks do: one that acts on the last position of a pass meets other positions with a cache.

    ``HookedTransformer.generate`` can't be used: with a tokenizer it masks tokens at the ends of
    the context that equal the pad token, and without one, or from embeddings, it adds learned
    positions wrongly (TransformerLens 3.9). The mask that is given here masks nothing.
    """
    if n == 0:
        return context[:, :0]
    if n == 1:  # no cache is read
        return _decode(model, context, n, uniform, UNCACHED)[0]
    length = context.shape[1] + n
    proof = _PROOFS.get(model)
    if proof and proof.state == _state(model) and length <= proof.length:
        return _decode(model, context, n, uniform, proof.way)[0]
    for way in _cached_ways(model):
        found, logits = _decode(model, context, n, uniform, way, N_PROVING_ROWS)
        if found.shape[1] < n:  # the cache stayed empty
            continue
        texts = torch.cat([context, found[:, :-1]], 1)
        if not any(point._forward_hooks for point in model.hook_dict.values()):
            texts = texts[:N_PROVING_ROWS]  # a hook may be made for the whole batch
        whole = unembed(model, residual(model, texts)[:N_PROVING_ROWS, context.shape[1] - 1 :])
        misfit = logits_misfit(model, logits, whole)
        if misfit <= 1:
            _PROOFS[model] = _Proof(_state(model), way, length)
            return found
    _PROOFS[model] = _Proof(_state(model), UNCACHED, model.cfg.n_ctx)
    if model not in _SAID:
        _SAID.add(model)
        warnings.warn(
            "Texts are written without a cache of keys and values, the slow way, because with one "
            f"{versions()} fail, or give other logits for this model than without. Texts and "
            "scores are right; tested versions are in constraints.txt.",
            stacklevel=2,
        )
    return _decode(model, context, n, uniform, UNCACHED)[0]


def _cached_ways(model: Any) -> tuple[str, ...]:
    """How to decode with a cache; not at all where TransformerLens 3.9 puts keys that are given for
    each query head into a cache that has room for grouped ones.
    """
    if is_bridge(model):
        return CACHED, HANDED
    return () if _is_ungrouped(model) else (CACHED,)


def _is_ungrouped(model: Any) -> bool:
    return getattr(model.cfg, "ungroup_grouped_query_attention", False)


def versions() -> str:
    """What is installed of the libraries that run the models, for messages."""
    lens, transformers = version("transformer-lens"), version("transformers")
    return f"TransformerLens {lens} and transformers {transformers}"


def logits_misfit(
    model: Any, found: Float[Tensor, "*shape vocab"], wanted: Float[Tensor, "*shape vocab"]
) -> float:
    """The largest difference of two ways to the same logits at a position, as a share of what is
    allowed there: above 1 they are not the same. A number that is added to all logits of a position
    has no effect, so it does not count.
    """
    found, wanted = found.cpu().double(), wanted.cpu().double()  # some devices have no float64
    found = found - found.mean(-1, keepdim=True)
    wanted = wanted - wanted.mean(-1, keepdim=True)
    rounding = torch.finfo(next(iter(model.parameters())).dtype).eps
    allowed = max(MISFIT, ROUNDINGS * rounding) * wanted.norm(dim=-1)
    # Logits that are not finite are no misfit: they make scores that are refused by name.
    return float(((found - wanted).norm(dim=-1) / allowed).nan_to_num(0, 0).max())


def _state(model: Any) -> tuple[Any, ...]:
    """What decides whether decoding with a cache is right for a model. Torch never gives the number
    of a hook to another one.
    """
    config = getattr(getattr(model, "original_model", None), "config", None)
    hooks = [
        number
        for module in model.modules()
        for number in (*module._forward_hooks, *module._forward_pre_hooks)
    ]
    attention = getattr(config, "_attn_implementation", None)
    return model.training, attention, _is_ungrouped(model), *hooks


def _decode(
    model: Any,
    context: Int[Tensor, "batch pos"],
    n: int,
    uniform: Float[Tensor, "batch new"] | None,
    way: str,
    n_rows: int = 0,
) -> tuple[Int[Tensor, "batch found"], Float[Tensor, "row found vocab"]]:
    """The new tokens, and the logits that they were taken from, of the first rows; no more than one
    token where a Bridge leaves its cache empty.
    """
    texts = new = context
    cache: Any = None if way == UNCACHED else _new_cache(model, context)
    kept: list[Tensor] = []
    with _handing_cache_on(model) if way == HANDED else nullcontext():
        for i in range(n):
            if cache is None:
                logits = unembed(model, residual(model, texts)[:, -1])
            else:
                logits = _with_cache(model, new, cache)[:, -1].float()
            kept.append(logits[:n_rows])
            if uniform is None:
                new = logits.argmax(-1, keepdim=True)
            else:
                # on the CPU: on CUDA there is no deterministic sum
                below = logits.softmax(-1).cpu().cumsum(-1) < uniform[:, i, None].cpu()
                new = below.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1).to(texts.device)
            texts = torch.cat([texts, new], 1)
            if cache is not None and is_bridge(model) and not cache.get_seq_length():
                break
    return texts[:, context.shape[1] :], torch.stack(kept, 1)


def _new_cache(model: Any, context: Int[Tensor, "batch pos"]) -> Any:
    if is_bridge(model):
        from transformers import DynamicCache

        return DynamicCache(config=model.original_model.config)
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    return TransformerLensKeyValueCache.init_cache(model.cfg, context.device, len(context))


def _with_cache(model: Any, new: Int[Tensor, "batch pos"], cache: Any) -> Tensor:
    """Logits of the next tokens of texts whose earlier ones are in the cache."""
    if not is_bridge(model):
        mask = torch.ones_like(new)
        return model(new, past_kv_cache=cache, attention_mask=mask, padding_side="right")
    # transformers 5.24 renames it
    known = inspect.signature(model.original_model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    return model(new, use_cache=True, **{name: cache})


def _handing_cache_on(model: Any) -> AbstractContextManager[None]:
    """The attention of TransformerLens gets the cache by the name that it knows."""
    attentions = [block.attn for block in model.blocks if hasattr(block, "attn")]
    hooks = [(attention, _rename_cache) for attention in attentions]
    return registered(hooks, "register_forward_pre_hook", with_kwargs=True)


def _rename_cache(module: object, inputs: Any, options: dict[str, Any]) -> Any:
    options = dict(options)
    if "cache" in options:
        options["past_key_values"] = options.pop("cache")
    return inputs, options


def attention_hooks(model: Any, layer: int) -> dict[str, str]:
    """Names of the hook points of a layer's attention. A HookedTransformer's queries and keys are
    those after the rotation.

    A Bridge's are those before it, but after a norm where there is one: the query and the key of
    one position are rotated alike, so their product is the same, and clean keys that are put in
    before the rotation come out rotated.
    """
    attention = f"blocks.{layer}.attn."
    bridge = is_bridge(model)
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
    # hooks on what is embedded would meet the tokens of no effect
    embedding = [
        part
        for name, part in model.named_children()
        if start and "embed" in name and name != "unembed"
    ]
    below = chain.from_iterable(map(hook_points, embedding))
    with unhooked(below), _cut(model, start, resid, stop), looking:
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
    with undone_together() as stack:
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
