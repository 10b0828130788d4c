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
alike, or on absolute positions below the last block's end, are exact.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_localize.methods.partial_runs import CleanRun, fits
from tl_localize.model.forward import attention_hooks, attention_scale, residual
from tl_localize.model.neurons import Hook

# a query, key or value as the model has it; a norm of a Bridge may have the heads side by side
Point = Float[Tensor, "batch *rest d"]
Query = Float[Tensor, "batch pos head d_head"]
Key = Float[Tensor, "batch pos kv_head d_head"]
Scores = Float[Tensor, "batch head pos pos"]


class NotParallel(RuntimeError):
    """This model's positions can't be changed in one pass; says why."""


# TransformerLens asks every hook for its repr, and tensors are slow to print
@dataclass(eq=False, repr=False)
class PositionParallelAttention:
    """The hooks of one attention layer, and the tensors that they hand to each other.

    Args:
        points: names of the hook points.
        scale: scores are q . k / scale, then limited by the cap; 0 where it is to be measured.
        soft_cap: 0 where there is none.
        clean: key and value of the clean run.
        changed: the points of the present run.
    """

    points: dict[str, str]
    scale: float
    soft_cap: float
    clean: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    changed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def hooks(self, names: Iterable[str]) -> list[tuple[str, Hook]]:
        return [(self.points[name], partial(self.keep, name=name)) for name in names]

    def keep(self, act: Point, hook: object = None, *, name: str) -> Point:
        """Keeps the tensor of this run, and hands the clean one on where there is one; ``scores``
        and ``z`` use the changed ones.
        """
        self.changed[name] = act
        return self.clean[name].expand_as(act) if name in self.clean else act

    def take_as_clean(self) -> None:
        """The run that was kept becomes the clean one. Where the model does not tell the scale, it
        is that of a regression of the scores' diagonal on q . k.
        """
        if not self.scale:
            own = self.changed["scores"].float().diagonal(dim1=-2, dim2=-1)
            dots = self._own_products(own.shape[1], own.dtype)
            if self.soft_cap > 0:
                own = self.soft_cap * torch.atanh((own / self.soft_cap).clamp(-1 + 1e-6, 1 - 1e-6))
            self.scale = float((dots * dots).sum() / (dots * own).sum())
        self.clean = {name: self.changed[name] for name in ("key", "value")}
        self.changed = {}

    def scores(self, act: Scores, hook: object = None) -> Scores:
        """Changed query times changed key on the diagonal. No attention window excludes it, and the
        bias of ALiBi is 0 there: but a HookedTransformer that has seen a longer text has another
        constant in it, so that the check of a new run fails and the slow way is taken.
        """
        own = self._own_products(act.shape[1], act.dtype) / self.scale
        if self.soft_cap > 0:
            own = self.soft_cap * torch.tanh(own / self.soft_cap)
        return act.diagonal_scatter(own.to(act), dim1=-2, dim2=-1)

    def z(self, act: Query, hook: object = None) -> Query:
        """Replaces each position's own clean value by its changed one."""
        change = per_head(self.changed["value"] - self.clean["value"], act.shape[2])
        weight = self.changed["pattern"].diagonal(dim1=-2, dim2=-1)
        return act + weight.transpose(1, 2)[..., None].to(change) * change

    def _own_products(self, n_heads: int, dtype: torch.dtype) -> Float[Tensor, "batch head pos"]:
        """q . k of each position with itself; a Bridge's norms have the heads side by side or
        before the positions.
        """
        query, key = self.changed["query"].to(dtype), self.changed["key"].to(dtype)
        if self.points["query"].endswith("norm.hook_out") and query.ndim == 4:
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        query = query.reshape(*query.shape[:2], n_heads, -1)
        key = per_head(key.reshape(*key.shape[:2], -1, query.shape[-1]), n_heads)
        return einsum(query, key, "batch pos head d_head, batch pos head d_head -> batch head pos")


def per_head(act: Key, n_heads: int) -> Query:
    """Grouped keys and values, repeated for each query head."""
    return act if act.shape[2] == n_heads else act.repeat_interleave(n_heads // act.shape[2], dim=2)


@dataclass(frozen=True, eq=False)
class PositionParallelModel:
    """``PositionParallelAttention`` in every layer from 1 on, and the clean run of a sequence."""

    clean: CleanRun
    layers: dict[int, PositionParallelAttention]

    @classmethod
    @torch.no_grad()
    def of(cls, clean: CleanRun) -> "PositionParallelModel":
        """The hooks with the clean keys and values of a sequence.

        Raises:
            NotParallel: a run of its own gives other numbers at a position than one pass.
        """
        neurons = clean.neurons
        model = neurons.model
        cap = float(getattr(model.cfg, "attn_scores_soft_cap", 0) or 0)
        layers: dict[int, PositionParallelAttention] = {}
        recording: list[tuple[str, Hook]] = []
        for layer in range(1, neurons.n_layers):
            points = attention_hooks(model, layer)
            scale = attention_scale(model, layer)
            layers[layer] = PositionParallelAttention(points, scale, cap)
            recording += layers[layer].hooks(points)
        parallel = cls(clean, layers)
        try:
            with neurons.hooked(last=recording):
                residual(model, clean.tokens)
            for attention in layers.values():
                attention.take_as_clean()
            parallel._check()
        except KeyError as error:
            raise NotParallel(f"the hooks of attention are not live ({error})") from error
        return parallel

    def _check(self) -> None:
        """Raise NotParallel unless one pass gives what separate runs give, where layer 0 is
        ablated, at two positions.
        """
        clean = self.clean
        neurons = clean.neurons
        zeros = torch.zeros_like(clean.acts[0])
        with self.from_layer(1), neurons.patched(0, zeros[None]):
            together = clean.again(0, 1)[0]
        n = len(zeros)
        for position in {n // 2, n - 1}:
            with neurons.patched(0, zeros[:1], position):
                alone = residual(neurons.model, clean.tokens[:, : position + 1])[0, -1]
            before = clean.entering[neurons.n_layers][0, position]
            if not fits(alone - before, together[position] - before, alone):
                raise NotParallel(
                    f"one pass gives other numbers at position {position} than a run of its own"
                )

    @contextmanager
    def from_layer(self, first_layer: int) -> Iterator[None]:
        """In this layer and above, no position sees another position's change."""
        last: list[tuple[str, Hook]] = []
        first: list[tuple[str, Hook]] = []
        for layer, attention in self.layers.items():
            if layer >= first_layer:
                last += attention.hooks(["query", "pattern", "key", "value"])
                first.append((attention.points["scores"], attention.scores))
                first.append((attention.points["z"], attention.z))
        try:
            with self.clean.neurons.hooked(last=last, first=first):
                yield
        finally:
            for attention in self.layers.values():
                attention.changed.clear()  # otherwise a failed run's graph stays in memory
