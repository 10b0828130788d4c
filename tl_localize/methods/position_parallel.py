"""Position-parallel attention: changes at all positions in one forward pass, each as if it were the
only change.

Change the neurons of layer l at one position t only, and read the model at t. The positions before
t do not attend to t and stay clean; those after t are not attended to by t. So this run differs
from the clean one at position t alone, and in the layers above l position t attends to the clean
keys and values of earlier positions and to its own changed key and value.

Therefore one forward pass in which every position is changed serves all t, if attention is changed
as follows. Keys and values are the clean ones. On the diagonal of the scores, where t attends to
itself, stands changed query times changed key. z, which was computed with the clean value of t,
gets pattern_tt (changed v_t - clean v_t) added. Positions are then independent: this is exact, not
an approximation.

The user's hooks act as in separate runs: the hooks here that overwrite run before them, and those
that read keys, values and pattern run after them. Not supported is a hook that depends on a
position's distance from the end, or that moves something from one position to another (the mean
over positions): here it meets all changed positions together. Hooks that act on every position
alike, or on absolute positions, are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.forward import (
    attention_hooks,
    attention_scale,
    is_bridge,
    residual,
    rotation_limit,
)
from tl_localize.methods.partial_runs import CleanRun, fits
from tl_localize.neurons import Hook, NeuronView

Query = Float[Tensor, "batch pos head d_head"]
Key = Float[Tensor, "batch pos kv_head d_head"]
# a query, key or value as the model has it; a norm of a Bridge may have the heads side by side
Point = Float[Tensor, "batch *rest d"]
Scores = Float[Tensor, "batch head pos pos"]
N_POINTS = 6  # query, key, value, scores, pattern, z


class NotParallel(RuntimeError):
    """This model's positions can't be changed in one pass; says why."""


NOT_LIVE = "the hooks of attention are not live"


# TransformerLens asks every hook for its repr, and tensors are slow to print
@dataclass(eq=False, repr=False)
class PositionParallelAttention:
    """The hooks of one attention layer, and the tensors that they hand to each other."""

    # scores are q . k / scale, then limited by the cap where there is one; 0 where it is to be
    # measured
    scale: float
    soft_cap: float
    normed: bool  # queries and keys come from a Bridge's norms
    # all points of the clean run, then key and value, [1 pos kv_head d_head]
    clean: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    # query, key, value and pattern of the run with changes
    changed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def measure_scale(self) -> None:
        """The scale by regression of the scores' diagonal on q . k, where the model does not tell
        it; 0 where a hook was not called.
        """
        if len(self.clean) < N_POINTS:
            self.scale = 0.0
        elif not self.scale:
            own = self.clean["scores"].float().diagonal(dim1=-2, dim2=-1)
            query, key = self._by_head(
                self.clean["query"].float(), self.clean["key"].float(), own.shape[1]
            )
            dots = (
                (query * key).sum(-1).transpose(1, 2)
                if query.shape == key.shape
                else torch.zeros_like(own)
            )
            if self.soft_cap > 0:
                own = self.soft_cap * torch.atanh((own / self.soft_cap).clamp(-1 + 1e-6, 1 - 1e-6))
            self.scale = float((dots * dots).sum() / (dots * own).sum()) if dots.any() else 0.0
        self.clean = {name: act for name, act in self.clean.items() if name in ("key", "value")}

    def keep(self, act: Point, hook: object = None, *, name: str) -> Point:
        """Queries or the pattern."""
        self.changed[name] = act
        return act

    def put_clean(self, act: Point, hook: object = None, *, name: str) -> Point:
        """Clean keys or values; ``scores`` and ``z`` use the changed ones."""
        self.changed[name] = act
        return self.clean[name].expand_as(act)

    def scores(self, act: Scores, hook: object = None) -> Scores:
        """Changed query times changed key on the diagonal. There the bias of ALiBi is 0, and no
        attention window excludes it.
        """
        query, key = self._by_head(self.now("query"), self.now("key"), act.shape[1])
        own = (
            einsum(query, key, "batch pos head d_head, batch pos head d_head -> batch head pos")
            / self.scale
        )
        if self.soft_cap > 0:
            own = self.soft_cap * torch.tanh(own / self.soft_cap)
        return act.diagonal_scatter(own.to(act), dim1=-2, dim2=-1)

    def z(self, act: Query, hook: object = None) -> Query:
        """Replaces each position's own clean value by its changed one."""
        value = self.now("value")
        change = self._per_head(value - self.clean["value"], act.shape[2])
        weight = self.now("pattern").diagonal(dim1=-2, dim2=-1)
        return act + weight.transpose(1, 2)[..., None].to(change) * change

    def now(self, name: str) -> Tensor:
        """A tensor of this run, which a hook that was called before must have kept."""
        if name not in self.changed:
            raise NotParallel(NOT_LIVE)
        return self.changed[name]

    def _by_head(self, query: Tensor, key: Tensor, n_heads: int) -> tuple[Query, Query]:
        """Queries, and the key of each of them; a Bridge's norms have the heads side by side or
        before the positions.
        """
        if self.normed and query.ndim == 4:
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        query = query.reshape(*query.shape[:2], n_heads, -1)
        return query, self._per_head(key.reshape(*key.shape[:2], -1, query.shape[-1]), n_heads)

    @staticmethod
    def _per_head(act: Key, n_heads: int) -> Query:
        """Grouped keys and values, repeated for each query head."""
        return (
            act
            if act.shape[2] == n_heads
            else act.repeat_interleave(n_heads // act.shape[2], dim=2)
        )


@dataclass(frozen=True, eq=False)
class PositionParallelModel:
    """``PositionParallelAttention`` in every layer, and the clean run of a sequence."""

    clean: CleanRun
    layers: list[PositionParallelAttention]

    @classmethod
    @torch.no_grad()
    def of(cls, neurons: NeuronView, tokens: Int[Tensor, "1 pos"]) -> PositionParallelModel:
        """The hooks with the clean keys and values of a sequence.

        Raises:
            NotParallel: a run of its own gives other numbers at a position than one pass.
        """
        if reason := why_not_parallel(neurons, tokens.shape[1]):
            raise NotParallel(reason)
        cap = float(getattr(neurons.model.cfg, "attn_scores_soft_cap", 0) or 0)
        layers: list[PositionParallelAttention] = []
        last: list[tuple[str, Hook]] = []
        for layer in range(neurons.n_layers):
            points = attention_hooks(neurons.model, layer)
            normed = points["query"].endswith("norm.hook_out")
            scale = attention_scale(neurons.model, layer)
            layers.append(PositionParallelAttention(scale, cap, normed))
            kept = layers[-1].clean
            last += [(point, partial(_record, kept=kept, name=n)) for n, point in points.items()]
        clean = CleanRun.of(neurons, tokens)
        with neurons.hooked(last=last):
            residual(neurons.model, tokens)
        for attention in layers:
            attention.measure_scale()
        parallel = cls(clean, layers)
        parallel._check()
        return parallel

    def _check(self) -> None:
        """Raise NotParallel unless one pass gives what separate runs give, where layer 0 is
        ablated, at two positions.
        """
        clean, neurons = self.clean, self.clean.neurons
        if any(not attention.scale for attention in self.layers[1:]):
            raise NotParallel(NOT_LIVE)
        zeros = torch.zeros_like(clean.acts[0])
        with self.from_layer(1), neurons.patched(0, zeros[None]):
            together = clean.again(0, 1)[0]
        n = len(zeros)
        for position in {n // 2, n - 1}:
            with neurons.patched_at(0, position, zeros[:1]):
                alone = residual(neurons.model, clean.tokens[:, : position + 1])[0, -1]
            before = clean.entering[neurons.n_layers][0, position]
            if not fits(alone - before, together[position] - before, alone):
                raise NotParallel(
                    f"one pass gives other numbers at position {position} than a run of its own"
                )

    @contextmanager
    def from_layer(self, first_layer: int) -> Iterator[None]:
        """In this layer and above, no position sees another position's change."""
        neurons = self.clean.neurons
        last: list[tuple[str, Hook]] = []
        first: list[tuple[str, Hook]] = []
        for layer, attention in list(enumerate(self.layers))[first_layer:]:
            points = attention_hooks(neurons.model, layer)
            for name in ("query", "pattern"):
                last.append((points[name], partial(attention.keep, name=name)))
            for name in ("key", "value"):
                last.append((points[name], partial(attention.put_clean, name=name)))
            first += [(points["scores"], attention.scores), (points["z"], attention.z)]
        try:
            with neurons.hooked(last=last, first=first):
                yield
        finally:
            for attention in self.layers:
                attention.changed.clear()  # otherwise a failed run's graph stays in memory


def _record(act: Tensor, hook: object = None, *, kept: dict[str, Tensor], name: str) -> Tensor:
    kept[name] = act
    return act


def why_not_parallel(neurons: NeuronView, n_tokens: int) -> str | None:
    """Why this model's positions cannot be changed in one pass; None if they can."""
    cfg, model = neurons.model.cfg, neurons.model
    if getattr(cfg, "attention_dir", "causal") != "causal":
        return "attention is not causal"
    if (limit := rotation_limit(model)) is not None and n_tokens > limit:
        return f"attention depends on the length beyond {limit} tokens"
    if not is_bridge(model):  # a Bridge's attention is measured, but its configuration says little
        if cfg.positional_embedding_type == "relative_positional_bias":
            return "attention has a learned relative bias"
        if getattr(cfg, "clip_qkv", None) is not None:
            return "queries, keys and values are clipped where no hook reads them"
        normed = any(getattr(block.attn, "k_norm", None) is not None for block in model.blocks)
        if normed and cfg.positional_embedding_type != "rotary":
            return "keys are normalized where no hook reads them"
    names = (
        name for layer in range(neurons.n_layers) for name in attention_hooks(model, layer).values()
    )
    if missing := [name for name in names if name not in neurons.points]:
        return f"there is no hook {missing[0]}"
    return None
