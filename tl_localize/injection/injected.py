"""Rows of W_out that were trained to make a model recite sequences: what they are, applied, on
disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_localize.changes import Undo, Use
from tl_localize.files import Saved
from tl_localize.neurons import LanguageModel, NeuronView, check_between, check_ratio, check_seed
from tl_localize.scores import NeuronSet, rounded_down

UNLEARNED_NATS = 0.5  # a token whose loss stays above this (a probability below 61 %) is unlearned


@dataclass(frozen=True, eq=False)
class Injection(Saved):
    """Rows of W_out trained until the model recites one sequence.

    Args:
        neurons: the neurons whose rows were trained, the ground truth of INJ.
        rows: [n d_model] the trained rows, in the order of ``neurons.mask.nonzero()``, float32 on
            the CPU; for heads, all their rows.
        losses: [step] loss of the whole sequence before each update, nats per token; the last one
            belongs to ``rows``.
        token_losses: [pos-1] loss of each token but the first at the end.
        converged: whether the last loss is below the stop loss (in a joint injection: and all its
            other stops hold).
        sequence_id: id of the sequence.

    >>> neurons = NeuronSet(torch.arange(6 * 1536).reshape(6, 1536) < 2)  # the first two of layer 0
    >>> rows, losses = torch.zeros(2, 192), torch.tensor([0.04])
    >>> injection = Injection(neurons, rows, losses, losses, True, "nothing")
    >>> with injection.applied(model):
    ...     bool((model.blocks[0].mlp.W_out[:2] == 0).all())
    True
    """

    required: ClassVar[tuple[str, ...]] = ("mask", "rows", "losses", "token_losses")
    neurons: NeuronSet
    rows: Float[Tensor, "n d_model"]
    losses: Float[Tensor, " step"]
    token_losses: Float[Tensor, " suffix"]
    converged: bool
    sequence_id: str = ""

    def __repr__(self) -> str:
        state = "converged" if self.converged else "NOT converged"
        text = (
            f"{self.sequence_id!r}, {len(self.rows)} rows, {state}: loss {self.losses[-1]:.3f} "
            f"after {len(self.losses)} steps"
        )
        if not self.converged:
            worst = [f"token {i} ({nats:.2f} nats)" for i, nats in self.unlearned()[:3]]
            text += f"; unlearned: {', '.join(worst) or 'no single token'}"
        return f"Injection({text})"

    def _repr_html_(self) -> str:
        from tl_localize.stats import styled

        facts: dict[str, float] = {"rows trained": len(self.rows), "steps": len(self.losses)}
        facts["loss before, nats per token"] = float(self.losses[0])
        facts["loss after"] = float(self.losses[-1])
        for position, nats in self.unlearned()[:3]:
            facts[f"unlearned: token {position}, nats"] = nats
        about = {"": list(facts), "value": np.array(list(facts.values()), dtype=object)}
        state = "converged" if self.converged else "NOT converged"
        title = f"Injection of {self.sequence_id!r}: {state}"
        return styled(about, title) + self.neurons.html_by_layer()

    def unlearned(self, threshold: float = UNLEARNED_NATS) -> list[tuple[int, float]]:
        """The unlearned tokens: (position in the sequence, nats at the end) of all above the
        threshold, the worst first.

        Two different predictions from one state, such as those after two equal first tokens in a
        rotary model, keep ln 2 = 0.69 nats each.
        """
        check_between(0, math.inf, threshold=threshold)
        worst = self.token_losses.argsort(descending=True, stable=True).tolist()
        return [
            (i + 1, float(self.token_losses[i])) for i in worst if self.token_losses[i] > threshold
        ]

    def applied(self, model: LanguageModel) -> Use[None]:
        """Put the rows into W_out inside the ``with`` block; afterwards every weight is bit for bit
        what it was.

        Blocks may overlap and end in any order.

        Raises:
            ValueError: The rows belong to a model of another shape.
        """
        return Use(model, self.writing(model))

    def writing(self, model: LanguageModel) -> Iterator[Undo]:
        """The change that ``applied`` makes."""
        view, mask, rows = NeuronView(model, self.neurons.units), self.neurons.mask, self.rows
        shape = (int(view.row_mask(mask).sum()), view.flat_rows(0).shape[-1])
        if mask.shape != (view.n_layers, view.n_neurons) or rows.shape != shape:
            raise ValueError(
                f"model must have {mask.shape[0]} layers of {mask.shape[1]} {view.units.name} and "
                f"rows of {rows.shape[-1]} entries, got "
                f"{view.n_layers} layers of {view.n_neurons} and {shape[-1]}. Apply an injection "
                "to the model it was made in."
            )
        own, written = _Rows(view, self), _WRITTEN.setdefault(model, [])
        yield partial(_take_out, model, own)
        written.append((own, own.there()))
        own.put(own.rows)

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        parts = (self.neurons.mask, self.rows, self.losses, self.token_losses)
        about = {"converged": json.dumps(self.converged), "sequence_id": self.sequence_id}
        return dict(zip(self.required, parts, strict=True)), about | self.neurons.packed()[1]

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Injection:
        _, rows, losses, token_losses = (tensors[name] for name in cls.required)
        neurons, id = NeuronSet.unpacked(tensors, metadata), metadata.get("sequence_id", "")
        return cls(neurons, rows, losses, token_losses, json.loads(metadata["converged"]), id)


class _Rows:
    """Rows of an injection and their places in a model, layer by layer."""

    def __init__(self, view: NeuronView, injection: Injection) -> None:
        self.view = view
        self.index = [
            of_layer.nonzero().flatten().to(view.device)
            for of_layer in view.row_mask(injection.neurons.mask)
        ]
        self.rows = injection.rows.split([len(index) for index in self.index])

    def there(self) -> list[Tensor]:
        """What the model has in these places."""
        return [
            self.view.flat_rows(layer).detach()[index] for layer, index in enumerate(self.index)
        ]

    def put(self, parts: Sequence[Tensor]) -> None:
        for layer, (index, part) in enumerate(zip(self.index, parts, strict=True)):
            weight = self.view.flat_rows(layer).data  # an interrupted no_grad would stay
            weight[index] = part.to(weight)


# model -> the rows that are in it and what they replaced, in the order in which they were put in
_WRITTEN: WeakKeyDictionary[Any, list[tuple[_Rows, list[Tensor]]]] = WeakKeyDictionary()


def _take_out(model: Any, own: _Rows) -> None:
    """Put back what some rows replaced; rows that were put in later stay in the model."""
    written = _WRITTEN[model]
    places = [rows for rows, _ in written]
    if own not in places:
        return
    first = places.index(own)
    for rows, before in reversed(written[first:]):
        rows.put(before)
    left = written[:first]
    for rows in places[first + 1 :]:
        left.append((rows, rows.there()))
        rows.put(rows.rows)
    # Last: whatever interrupts this function before, it can be called again.
    _WRITTEN[model] = left


@dataclass(frozen=True)
class FinalLosses:
    """What the stops of a joint injection ask for, of one sentence at the end; nats per token.

    Args:
        loss: with all sets on.
        alone_loss: loss with its own set alone.
        off_kl: KL(base model || its own set off, all others on).
        other_kl: the highest KL with one other set alone.

    >>> FinalLosses(loss=0.04, alone_loss=0.05, off_kl=0.02, other_kl=0.03).off_kl
    0.02
    """

    loss: float
    alone_loss: float
    off_kl: float
    other_kl: float


@dataclass(frozen=True, eq=False)
class JointInjection(Saved):
    """Several sequences in disjoint sets of rows of W_out of one model: each set suffices alone for
    its sequence, and changes nothing on the others, whichever sets are on.

    Args:
        injections: one for each sequence; ``injections[k].applied(model)`` applies set k alone.
        kls: [step sentence] how far other sets moved the model on each sequence before each update:
            KL(base model || own set off, some others on), mean over the positions that predict a
            token, nats. At the end: with all others on.
        final: one for each sequence.

    >>> pair = inject_together(model, few[:2], ratio=0.01, seed=0, learning_rate=0.005, max_steps=2)
    >>> with pair.applied(model, without=0):
    ...     measured = accuracy(model, few[:2])
    """

    required: ClassVar[tuple[str, ...]] = ("kls", "ends")
    injections: tuple[Injection, ...]
    kls: Float[Tensor, "step sentence"]
    final: tuple[FinalLosses, ...]

    @property
    def losses(self) -> Float[Tensor, "step sentence"]:
        """Loss of each whole sequence with its own set and some others on, before each update; at
        the end with all. Nats per token.
        """
        return torch.stack([injection.losses for injection in self.injections], dim=1)

    @property
    def converged(self) -> Bool[Tensor, " sentence"]:
        """Whether each sequence is below all its stops."""
        return torch.tensor([injection.converged for injection in self.injections])

    def __repr__(self) -> str:
        pairs = zip(self.injections, self.final, strict=True)
        high = [f"{one.sequence_id!r}: {final}" for one, final in pairs if not one.converged]
        state = f"NOT converged: {', '.join(high)}" if high else "all converged"
        n, n_rows = len(self.injections), len(self.injections[0].rows)
        return f"JointInjection({n} x {n_rows} rows, {len(self.kls)} steps, {state})"

    def _repr_html_(self) -> str:
        import pandas as pd

        from tl_localize.stats import styled

        table = [
            {"sequence": one.sequence_id, "rows trained": len(one.rows)}
            | asdict(final)
            | {"converged": one.converged}
            for one, final in zip(self.injections, self.final, strict=True)
        ]
        failed = len(table) - int(self.converged.sum())
        title = f"JointInjection of {len(table)} sequences, {len(self.kls)} steps, nats per token"
        return styled(pd.DataFrame(table), f"{title}: {failed} of them NOT converged")

    def applied(self, model: LanguageModel, without: int | None = None) -> Use[None]:
        """Put all sets, or all but one, into W_out inside the ``with`` block; afterwards every
        weight is bit for bit what it was.

        Raises:
            ValueError: The rows belong to a model of another shape, or there is no set ``without``.
        """
        if without is not None and without not in range(len(self.injections)):
            raise ValueError(
                f"without must be the number of a set, from 0 to {len(self.injections) - 1}, got "
                f"{without!r}. None is all."
            )
        chosen = [one for k, one in enumerate(self.injections) if k != without]
        return Use(model, chain.from_iterable(one.writing(model) for one in chosen))

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors = {"kls": self.kls, "ends": torch.tensor([astuple(one) for one in self.final])}
        for k, injection in enumerate(self.injections):
            for name, tensor in injection.packed()[0].items():
                tensors[f"{k}.{name}"] = tensor
        about = [injection.packed()[1] for injection in self.injections]
        return tensors, {"injections": json.dumps(about)}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> JointInjection:
        injections: list[Injection] = []
        for k, about in enumerate(json.loads(metadata["injections"])):
            part = {name: tensors[f"{k}.{name}"] for name in Injection.required}
            injections.append(Injection.unpacked(part, about))
        final = tuple(FinalLosses(*one) for one in tensors["ends"].tolist())
        return cls(tuple(injections), tensors["kls"], final)


def draw_sets(view: NeuronView, ratio: float, seed: int, n_sets: int) -> list[NeuronSet]:
    """Disjoint sets of ratio * n, rounded down, of all n neurons, or heads: one permutation by
    numpy's RandomState(seed), cut into pieces.

    The first set is what the authors draw: their ``RandomState(seed).choice(n, size,
    replace=False)`` is the permutation's beginning.

    Raises:
        ValueError: ratio is outside (0, 1], selects no neuron, or selects so many that the sets
            don't fit; seed is not from 0 to 2**32 - 1.

    >>> [len(one) for one in draw_sets(NeuronView(model), 0.01, 0, 2)]
    [92, 92]
    """
    check_ratio("ratio", ratio)
    check_seed(seed, bits=32)
    n = view.n_layers * view.n_neurons
    size = rounded_down(ratio, n)
    if size == 0:
        of = f"{n} {view.units.name}"
        raise ValueError(
            f"ratio must select at least one of {of}, got {ratio!r}, which selects none. Use at "
            f"least {1 / n:.2g}."
        )
    if n_sets * size > n:
        raise ValueError(
            f"ratio must leave room for {n_sets} disjoint sets, got {ratio!r}: {n_sets} x {size} "
            f"rows of the {n} there are. "
            f"Use at most 1/{n_sets}, or fewer sequences."
        )
    order = torch.from_numpy(np.random.RandomState(seed).permutation(n))
    owner = torch.full((n,), -1)
    owner[order[: n_sets * size]] = torch.arange(n_sets).repeat_interleave(size)
    return [
        NeuronSet((owner == k).reshape(view.n_layers, view.n_neurons), view.units)
        for k in range(n_sets)
    ]
