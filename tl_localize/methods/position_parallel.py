"""Position-parallel attention: changes at all positions in one forward pass, each as if it were the only change.

Change the neurons of layer l at one position t only, and read the model at t. The positions before t do not attend to t and stay clean;
those after t are not attended to by t. So this run differs from the clean one at position t alone, and in the layers above l position t
attends to the clean keys and values of earlier positions and to its own changed key and value.

Therefore the runs for all t fit into one forward pass in which every position is changed, if attention is changed as follows. Keys and
values are the clean ones. On the diagonal of the scores, where t attends to itself, stands changed query times changed key. z, which was
computed with the clean value of t, gets pattern_tt (changed v_t - clean v_t) added. Positions are then independent, and the gradient of a
sum over positions is each position's own gradient. This is exact, not an approximation.

The user's hooks act as in separate runs, in the order in which they were added: the hooks here that overwrite run before them, and those
that read keys, values and pattern run after them. One kind of hook is not supported: one that depends on a position's distance from the
end, or that moves something from one position to another (the mean over positions, a copy of position 3 at position 7). Here it meets all
changed positions together; in separate runs it would meet one of them, in a sequence that ends there. Hooks that act on every position
alike, or on absolute positions, are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_localize.neurons import AttentionPoints, Hook, NeuronView

Query = Float[Tensor, "batch pos head d_head"]
Key = Float[Tensor, "batch pos kv_head d_head"]
Scores = Float[Tensor, "batch head pos pos"]


@dataclass(eq=False, repr=False)  # TransformerLens asks every hook for its repr, and tensors are slow to print
class PositionParallelAttention:
    """The hooks of one attention layer, and the tensors that they hand to each other.

    Args:
        scale, soft_cap: scores are q . k / scale, then limited by the cap where there is one.
        clean: keys and values of the clean run, [1 pos kv_head d_head].
        changed: query, key, value and weight (the diagonal of the pattern) of the present run; empty between runs.
    """

    scale: float
    soft_cap: float
    clean: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    changed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def record_keys(self, act: Key, hook: object = None) -> Key:
        self.clean["key"] = act
        return act

    def record_values(self, act: Key, hook: object = None) -> Key:
        self.clean["value"] = act
        return act

    def query(self, act: Query, hook: object = None) -> Query:
        self.changed["query"] = act
        return act

    def key(self, act: Key, hook: object = None) -> Key:
        """Clean keys; ``scores`` uses the changed ones."""
        self.changed["key"] = act
        return self.clean["key"].expand_as(act)

    def value(self, act: Key, hook: object = None) -> Key:
        """Clean values; ``z`` uses the changed ones."""
        self.changed["value"] = act
        return self.clean["value"].expand_as(act)

    def scores(self, act: Scores, hook: object = None) -> Scores:
        """Changed query times changed key on the diagonal. There the bias of ALiBi is 0, and no attention window excludes it."""
        query = self.changed["query"]
        key = self._per_head(self.changed["key"], query.shape[2])
        own = einsum(query, key, "batch pos head d_head, batch pos head d_head -> batch head pos") / self.scale
        if self.soft_cap > 0:
            own = self.soft_cap * torch.tanh(own / self.soft_cap)
        return act.diagonal_scatter(own.to(act), dim1=-2, dim2=-1)

    def pattern(self, act: Scores, hook: object = None) -> Scores:
        self.changed["weight"] = act.diagonal(dim1=-2, dim2=-1)
        return act

    def z(self, act: Query, hook: object = None) -> Query:
        """Replaces each position's own clean value by its changed one."""
        change = self._per_head(self.changed["value"] - self.clean["value"], act.shape[2])
        return act + self.changed["weight"].transpose(1, 2)[..., None].to(change) * change

    @staticmethod
    def _per_head(act: Key, n_heads: int) -> Query:
        """Grouped keys and values, repeated for each query head."""
        return act if act.shape[2] == n_heads else act.repeat_interleave(n_heads // act.shape[2], dim=2)


@dataclass(frozen=True, eq=False)
class PositionParallelModel:
    """``PositionParallelAttention`` in every layer."""

    neurons: NeuronView
    layers: list[PositionParallelAttention]

    @classmethod
    def of(cls, neurons: NeuronView) -> PositionParallelModel:
        cap = float(getattr(neurons.model.cfg, "attn_scores_soft_cap", 0) or 0)
        return cls(neurons, [PositionParallelAttention(float(block.attn.attn_scale), cap) for block in neurons.model.blocks])

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The next forward pass records the clean keys and values."""
        last: list[tuple[str, Hook]] = []
        for layer, attention in enumerate(self.layers):
            points = attention_points(self.neurons, layer)
            last += [(points.key, attention.record_keys), (points.value, attention.record_values)]
        with self.neurons.hooked(last=last):
            yield

    @contextmanager
    def from_layer(self, first_layer: int) -> Iterator[None]:
        """In this layer and above, no position sees another position's change."""
        last: list[tuple[str, Hook]] = []
        first: list[tuple[str, Hook]] = []
        for layer, attention in list(enumerate(self.layers))[first_layer:]:
            points = attention_points(self.neurons, layer)
            last += [(getattr(points, name), getattr(attention, name)) for name in ("query", "key", "value", "pattern")]
            first += [(points.scores, attention.scores), (points.z, attention.z)]
        try:
            with self.neurons.hooked(last=last, first=first):
                yield
        finally:
            for attention in self.layers:
                attention.changed.clear()  # otherwise a failed run's graph stays in memory


def attention_points(neurons: NeuronView, layer: int) -> AttentionPoints:
    return AttentionPoints.of(layer, rotary=neurons.model.cfg.positional_embedding_type == "rotary")


def why_not_parallel(neurons: NeuronView, n_tokens: int) -> str | None:
    """Why this model's positions cannot be changed in one pass; None if they can."""
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
