"""One clean forward pass, runs of the model that start again above a changed layer, and one backward pass for all layers.

**From the layer up.** A change of layer l leaves everything below it as it was, so the residual stream that enters each layer is
recorded once and a changed run starts at layer l. Where what a neuron writes, h_i v_i, is just added to the residual stream
(``NeuronView.adds_output``), a change of h by d changes what enters layer l + 1 by d W_out, and the run starts there.

**All positions in one pass.** Change the neurons of layer l at one position t only, and read the model at t. The positions before t
do not see t and stay clean; those after t are not seen by t and do not matter. So the run at t differs from the clean one in nothing
but position t itself, and in the layers above l position t attends to the clean keys and values of the positions before it and to its
own changed key and value. Therefore the runs for all t fit into one forward pass in which every position is changed, if attention is
told so (``OwnAttention``): keys and values become the clean ones; the diagonal of the scores, where t meets itself, becomes changed query
times changed key; and z, which has used the clean value of t, gets pattern_tt (changed v_t - clean v_t). Positions are then independent,
and the gradient of a sum over positions is every position's own gradient. This is exact, not an approximation.

Hooks of the user take effect as in separate runs, wherever they are and in the order in which they were added: what the hooks
here overwrite is overwritten where the model has just computed it, before the user's hooks, and keys, values and pattern are read after
them. One kind cannot be served: a hook that treats a position by its distance from the end, or that carries something from one position to
another (the mean over positions, a copy of position 3 at position 7). In one pass it meets all changed positions together, where separate
runs show it one of them and a sequence that ends there. Hooks that act on every position alike, or on absolute positions, are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.losses import loss_scale, memorization_loss, residual
from tl_localize.neurons import AttentionPoints, Hook, LayerInputs, NeuronView
from tl_localize.sequences import SequenceBatch


@dataclass(frozen=True, eq=False)
class CleanRun:
    """What one forward pass of the unchanged model leaves behind.

    Args:
        inputs: residual stream entering each layer, [1 pos d_model]; under ``n_layers`` the one after the last layer.
        acts: neurons of each layer, [pos neuron], after the user's hooks.
    """

    neurons: NeuronView
    inputs: LayerInputs
    acts: dict[int, Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, neurons: NeuronView, tokens: Int[Tensor, "1 pos"]) -> CleanRun:
        with neurons.inputs_recorded() as inputs, neurons.recorded() as acts:
            inputs.residual[neurons.n_layers] = residual(neurons.model, tokens)
        return cls(neurons, inputs, {layer: act[0] for layer, act in acts.items()})

    def above(self, layer: int, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream after the last layer when ``resid`` enters the given one."""
        model = self.neurons.model
        return model(
            resid.contiguous(),  # TransformerLens views it as [batch * pos, d_model]
            start_at_layer=layer,
            stop_at_layer=self.neurons.n_layers,
            shortformer_pos_embed=self.inputs.shortformer,
            padding_side="right",
        )


@dataclass(eq=False, repr=False)  # TransformerLens asks every hook for its repr, and tensors are slow to print
class OwnAttention:
    """Attention of one layer in which each position sees the clean others and its own changed self: hooks, and what they hand on.

    Args:
        scale, soft_cap: scores are q . k / scale, then bent by the cap where there is one.
        keys, values: the clean ones, [1 pos kv_head d_head].
    """

    scale: float
    soft_cap: float
    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    _query: Tensor = field(default_factory=lambda: torch.empty(0))
    _own_key: Tensor = field(default_factory=lambda: torch.empty(0))
    _own_value: Tensor = field(default_factory=lambda: torch.empty(0))
    _weight: Tensor = field(default_factory=lambda: torch.empty(0))

    def record_keys(self, act: Float[Tensor, "1 pos kv_head d_head"], hook: object = None) -> Float[Tensor, "1 pos kv_head d_head"]:
        self.keys = act
        return act

    def record_values(self, act: Float[Tensor, "1 pos kv_head d_head"], hook: object = None) -> Float[Tensor, "1 pos kv_head d_head"]:
        self.values = act
        return act

    def query(self, act: Float[Tensor, "batch pos head d_head"], hook: object = None) -> Float[Tensor, "batch pos head d_head"]:
        self._query = act
        return act

    def key(self, act: Float[Tensor, "batch pos kv_head d_head"], hook: object = None) -> Float[Tensor, "batch pos kv_head d_head"]:
        """Clean keys for everyone; the changed ones wait for ``scores``."""
        self._own_key = act
        return self.keys.expand_as(act)

    def value(self, act: Float[Tensor, "batch pos kv_head d_head"], hook: object = None) -> Float[Tensor, "batch pos kv_head d_head"]:
        """Clean values for everyone; the changed ones wait for ``z``."""
        self._own_value = act
        return self.values.expand_as(act)

    def scores(self, act: Float[Tensor, "batch head pos pos"], hook: object = None) -> Float[Tensor, "batch head pos pos"]:
        """Changed query times changed key on the diagonal. A relative position of zero adds nothing (ALiBi), and no window excludes it."""
        own = (
            einsum(self._query, self._per_head(self._own_key), "batch pos head d_head, batch pos head d_head -> batch head pos")
            / self.scale
        )
        if self.soft_cap > 0:
            own = self.soft_cap * torch.tanh(own / self.soft_cap)
        return act.diagonal_scatter(own.to(act), dim1=-2, dim2=-1)

    def pattern(self, act: Float[Tensor, "batch head pos pos"], hook: object = None) -> Float[Tensor, "batch head pos pos"]:
        self._weight = act.diagonal(dim1=-2, dim2=-1)
        return act

    def z(self, act: Float[Tensor, "batch pos head d_head"], hook: object = None) -> Float[Tensor, "batch pos head d_head"]:
        """The part of z that comes from the position itself, moved from its clean value to its changed one."""
        change = self._per_head(self._own_value - self.values)
        return act + self._weight.transpose(1, 2)[..., None].to(change) * change

    def _per_head(self, act: Float[Tensor, "batch pos kv_head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        """Grouped keys and values once per query head."""
        n_heads = self._query.shape[2]
        return act if act.shape[2] == n_heads else act.repeat_interleave(n_heads // act.shape[2], dim=2)


@dataclass(frozen=True, eq=False)
class OwnAttentions:
    """``OwnAttention`` of every layer."""

    neurons: NeuronView
    layers: list[OwnAttention]

    @classmethod
    def of(cls, neurons: NeuronView) -> OwnAttentions:
        cap = float(getattr(neurons.model.cfg, "attn_scores_soft_cap", 0) or 0)
        return cls(neurons, [OwnAttention(float(block.attn.attn_scale), cap) for block in neurons.model.blocks])

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The next forward pass gives the clean keys and values."""
        last: list[tuple[str, Hook]] = []
        for layer, attention in enumerate(self.layers):
            points = attention_points(self.neurons, layer)
            last += [(points.key, attention.record_keys), (points.value, attention.record_values)]
        with self.neurons.hooked(last=last):
            yield

    @contextmanager
    def from_layer(self, first_layer: int) -> Iterator[None]:
        """Positions do not see each other's changes in this layer and above."""
        last: list[tuple[str, Hook]] = []
        first: list[tuple[str, Hook]] = []
        for layer, attention in list(enumerate(self.layers))[first_layer:]:
            points = attention_points(self.neurons, layer)
            last += [
                (points.query, attention.query),
                (points.key, attention.key),
                (points.value, attention.value),
                (points.pattern, attention.pattern),
            ]
            first += [(points.scores, attention.scores), (points.z, attention.z)]
        with self.neurons.hooked(last=last, first=first):
            yield


def attention_points(neurons: NeuronView, layer: int) -> AttentionPoints:
    return AttentionPoints.of(layer, rotary=neurons.model.cfg.positional_embedding_type == "rotary")


def obstacle(neurons: NeuronView, n_tokens: int) -> str | None:
    """Why the positions of this model cannot run in one pass; None if they can."""
    cfg = neurons.model.cfg
    if getattr(cfg, "attention_dir", "causal") != "causal":
        return "attention is not causal"
    if cfg.positional_embedding_type == "relative_positional_bias":
        return "attention has a learned relative bias"
    if getattr(cfg, "clip_qkv", None) is not None:
        return "queries, keys and values are clipped where no hook reads them"
    normed = any(getattr(block.attn, "k_norm", None) is not None for block in neurons.model.blocks)
    if normed and cfg.positional_embedding_type != "rotary":
        return "keys are normalized where no hook reads them"
    trained = getattr(cfg, "train_seq_length", None) or cfg.n_ctx
    if n_tokens > trained and (getattr(cfg, "use_logn_attn", False) or getattr(cfg, "use_dynamic_ntk_rope", False)):
        return f"attention depends on the length beyond {trained} tokens"
    names = (name for layer in range(neurons.n_layers) for name in vars(attention_points(neurons, layer)).values())
    if missing := [name for name in names if name not in neurons.model.hook_dict]:
        return f"there is no hook {missing[0]}"
    return None


def ablation_estimate(neurons: NeuronView, batch: SequenceBatch) -> Float[Tensor, "sequence layer neuron"]:
    """First-order rise of each sequence's memorization loss when a neuron is silenced, of all neurons from one forward and backward pass.

    Each neuron is multiplied by a gate of one; the gate's gradient is the sum over positions of h dloss/dh, and silencing moves it by -1.
    """
    gates = torch.ones(neurons.n_layers, len(batch), neurons.n_neurons, device=neurons.device).requires_grad_()
    scale = loss_scale(neurons.model)
    with torch.enable_grad(), neurons.lean(), neurons.scaled(dict(enumerate(gates.unbind()))):
        (gradient,) = torch.autograd.grad(scale * memorization_loss(neurons.model, batch).sum(), gates)
    return -gradient.transpose(0, 1).float().cpu() / scale
