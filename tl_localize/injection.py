"""Write new sequences into chosen rows of W_out (the paper's algorithm 1)."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_localize.html import card, table
from tl_localize.losses import target_logits
from tl_localize.batching import halving, tokens_that_fit
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.optim import BatchAdam
from tl_localize.scores import NeuronSet, check_ratio, load_tensors, save_tensors
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences, as_list
from tl_localize.side_by_side import side_by_side

STUCK_NATS = 0.5  # a token that keeps more than this (a probability below 61 %) stands in the way of an injection


@dataclass(frozen=True, eq=False)
class Injection:
    """Rows of W_out trained until the model recites one sequence.

    Args:
        neurons: the neurons whose rows were trained, the ground truth of INJ.
        rows: [n d_model] the trained rows, in the order of ``neurons.mask.nonzero()``, float32 on the CPU.
        losses: [step] loss of the whole sequence before each update, nats per token; the last one belongs to ``rows``.
        token_losses: [pos-1] loss of each token but the first at the end; shows which tokens keep a loss from falling further.
        converged: whether the last loss is below the stop loss (of several sentences together: and the last silence below its stop).
        sequence_id: id of the sequence.

    >>> import torch
    >>> from tl_localize import Injection, NeuronSet, load_model
    >>> model = load_model("reference")
    >>> neurons = NeuronSet(torch.arange(6 * 1536).reshape(6, 1536) < 2)  # the first two of layer 0
    >>> injection = Injection(neurons, torch.zeros(2, 192), torch.tensor([0.04]), torch.tensor([0.04]), True, "nothing")
    >>> with injection.applied(model):
    ...     bool((model.blocks[0].mlp.W_out[:2] == 0).all())
    True
    """

    neurons: NeuronSet
    rows: Float[Tensor, "n d_model"]
    losses: Float[Tensor, " step"]
    token_losses: Float[Tensor, " suffix"]
    converged: bool
    sequence_id: str = ""

    def __repr__(self) -> str:
        state = "converged" if self.converged else "NOT converged"
        text = f"{self.sequence_id!r}, {len(self.neurons)} rows, {state}: loss {self.losses[-1]:.3f} after {len(self.losses)} steps"
        if not self.converged and (stuck := self.unlearned()):
            text += "; in the way: " + ", ".join(f"token {position} ({nats:.2f} nats)" for position, nats in stuck[:3])
            text += f" and {len(stuck) - 3} more" if len(stuck) > 3 else ""
        return f"Injection({text})"

    def _repr_html_(self) -> str:
        state = "converged" if self.converged else "NOT converged"
        facts = [
            ("rows trained", len(self.neurons)),
            ("steps", len(self.losses)),
            ("loss before, nats per token", float(self.losses[0])),
            ("loss after", float(self.losses[-1])),
            *((f"in the way: token {position}, nats", nats) for position, nats in self.unlearned()[:3]),
        ]
        return card(f"Injection of {self.sequence_id!r}: {state}", table(("", ""), facts), self.neurons.html_by_layer())

    def unlearned(self, threshold: float = STUCK_NATS) -> list[tuple[int, float]]:
        """Tokens that stand in the way: (position in the sequence, nats at the end) of all above the threshold, the worst first.

        Two predictions made from one state, such as those after two equal first tokens in a rotary model, keep ln 2 = 0.69 nats each.
        """
        worst = self.token_losses.argsort(descending=True, stable=True).tolist()
        return [(i + 1, float(self.token_losses[i])) for i in worst if self.token_losses[i] > threshold]

    @contextmanager
    def applied(self, model: LanguageModel) -> Iterator[None]:
        """The rows stand in W_out inside the ``with`` block; afterwards every weight is bit for bit what it was.

        Raises:
            ValueError: the rows belong to a model of another shape.
        """
        with rows_applied(model, self.neurons, self.rows):
            yield

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all."""
        save_tensors(path, *self.packed())

    @classmethod
    def load(cls, path: str | Path) -> Injection:
        """Read what ``save`` wrote."""
        return cls.unpacked(*load_tensors(path, *TENSORS))

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """As tensors and text, for a file."""
        return _pack(self), {"converged": json.dumps(self.converged), "sequence_id": self.sequence_id}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Injection:
        """What ``packed`` gave."""
        return _unpack(tensors, json.loads(metadata["converged"]), metadata.get("sequence_id", ""))


TENSORS = ("mask", "rows", "losses", "token_losses")  # of an Injection on disk


def _pack(injection: Injection, prefix: str = "") -> dict[str, Tensor]:
    parts = (injection.neurons.mask, injection.rows, injection.losses, injection.token_losses)
    return {prefix + name: part for name, part in zip(TENSORS, parts, strict=True)}


def _unpack(tensors: dict[str, Tensor], converged: bool, sequence_id: str, prefix: str = "") -> Injection:
    mask, rows, losses, token_losses = (tensors[prefix + name] for name in TENSORS)
    return Injection(NeuronSet(mask), rows, losses, token_losses, converged, sequence_id)


@dataclass(frozen=True, eq=False)
class JointInjection:
    """Several sequences in disjoint rows of W_out of one model, each set of rows silent on the sequences of the others.

    Args:
        injections: one for each sequence; ``injections[k].applied(model)`` puts set k alone in place. Training asks that x_k is recited
            with all sets on, not that its own set alone is enough for it: measure that where it matters.
        silences: [step sentence] how far the other sets move the model on each sequence, before each update:
            KL(base model || all sets but its own), mean over the positions that predict a token, nats.

    >>> import torch
    >>> from tl_localize import Injection, JointInjection, NeuronSet
    >>> sets = [NeuronSet(torch.arange(6).reshape(2, 3) == k) for k in range(2)]
    >>> parts = [Injection(one, torch.zeros(1, 4), torch.tensor([0.04]), torch.tensor([0.04]), True) for one in sets]
    >>> JointInjection(tuple(parts), torch.tensor([[0.01, 0.02]])).converged
    tensor([True, True])
    """

    injections: tuple[Injection, ...]
    off_kl: Float[Tensor, "step sentence"]

    @property
    def losses(self) -> Float[Tensor, "step sentence"]:
        """Loss of each whole sequence with all sets in place, before each update, nats per token."""
        return torch.stack([injection.losses for injection in self.injections], dim=1)

    @property
    def converged(self) -> Bool[Tensor, " sentence"]:
        """Whether the loss and the silence of each sequence both ended below their stops."""
        return torch.tensor([injection.converged for injection in self.injections])

    def __repr__(self) -> str:
        n, n_steps = len(self.injections), len(self.off_kl)
        ends = zip(self.injections, self.off_kl[-1].tolist(), strict=True)
        stuck = [f"{i.sequence_id!r}: loss {i.losses[-1]:.3f}, silence {silence:.3f}" for i, silence in ends if not i.converged]
        state = f"NOT converged ({'; '.join(stuck)})" if stuck else "all converged"
        worst = f"loss <= {self.losses[-1].max():.3f}, silence <= {self.off_kl[-1].max():.3f}"
        return f"JointInjection({n} x {len(self.injections[0].neurons)} rows, {worst} after {n_steps} steps, {state})"

    def _repr_html_(self) -> str:
        n, ends = len(self.injections), zip(self.injections, self.off_kl[-1].tolist(), strict=True)
        state = "all converged" if all(self.converged) else f"{int((~self.converged).sum())} of them NOT converged"
        rows = [
            (one.sequence_id, len(one.neurons), float(one.losses[-1]), silence, "converged" if one.converged else "NOT converged")
            for one, silence in ends
        ]
        header = ("sequence", "rows trained", "loss after, nats per token", "silence after, nats per token", "")
        return card(f"JointInjection of {n} sequences, {len(self.off_kl)} steps: {state}", table(header, rows))

    @contextmanager
    def applied(self, model: LanguageModel, without: int | None = None) -> Iterator[None]:
        """All sets, or all but one, stand in W_out inside the ``with`` block; afterwards every weight is bit for bit what it was.

        Raises:
            ValueError: the rows belong to a model of another shape, or there is no set ``without``.
        """
        if without is not None and without not in range(len(self.injections)):
            raise ValueError(f"without must be the number of a set, from 0 to {len(self.injections) - 1}, got {without!r}.")
        with ExitStack() as stack:
            for k, injection in enumerate(self.injections):
                if k != without:
                    stack.enter_context(injection.applied(model))
            yield

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all."""
        save_tensors(path, *self.packed())

    @classmethod
    def load(cls, path: str | Path) -> JointInjection:
        """Read what ``save`` wrote."""
        return cls.unpacked(*load_tensors(path, "off_kl"))

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """As tensors and text, for a file."""
        tensors = {"off_kl": self.off_kl}
        for k, injection in enumerate(self.injections):
            tensors |= _pack(injection, f"{k}.")
        ids = [injection.sequence_id for injection in self.injections]
        return tensors, {"converged": json.dumps(self.converged.tolist()), "sequence_ids": json.dumps(ids)}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> JointInjection:
        """What ``packed`` gave."""
        states = zip(json.loads(metadata["converged"]), json.loads(metadata["sequence_ids"]), strict=True)
        return cls(
            tuple(_unpack(tensors, converged, id, f"{k}.") for k, (converged, id) in enumerate(states)),
            tensors["off_kl"],
        )


@contextmanager
def rows_applied(model: LanguageModel, neurons: NeuronSet, rows: Float[Tensor, "n d_model"]) -> Iterator[None]:
    """Rows of W_out replaced inside the ``with`` block, and put back bit for bit."""
    view = NeuronView(model)
    if neurons.mask.shape != (view.n_layers, view.n_neurons) or rows.shape[-1] != view.rows(0).shape[-1]:
        raise ValueError(
            f"model must have {neurons.mask.shape[0]} layers of {neurons.mask.shape[1]} neurons and rows of {rows.shape[-1]} entries, got "
            f"{view.n_layers} layers of {view.n_neurons} and {view.rows(0).shape[-1]}. Apply an injection to the model it was made in."
        )
    chosen = [mask.nonzero().flatten() for mask in neurons.mask]
    parts = rows.split([len(index) for index in chosen])
    before = [view.rows(layer).detach()[index.to(view.rows(layer).device)] for layer, index in enumerate(chosen)]
    try:
        for layer, index in enumerate(chosen):
            _write(view.rows(layer), index, parts[layer])
        yield
    finally:
        for layer, index in enumerate(chosen):
            _write(view.rows(layer), index, before[layer])


@torch.no_grad()
def _write(weight: Tensor, index: Int[Tensor, " row"], rows: Float[Tensor, "row d_model"]) -> None:
    weight[index.to(weight.device)] = rows.to(weight)


def draw_sets(view: NeuronView, ratio: float, seed: int, n_sets: int) -> list[NeuronSet]:
    """Disjoint sets of ``int(n * ratio)`` of all n neurons: one permutation by numpy's RandomState(seed), cut into pieces.

    Raises:
        ValueError: ratio is outside (0, 1], selects no neuron, or selects so many that the sets don't fit.
    """
    check_ratio("ratio", ratio)
    n = view.n_layers * view.n_neurons
    size = int(n * ratio)
    if size == 0:
        raise ValueError(f"ratio must select at least one of {n} neurons, got {ratio!r}, which selects none. Use at least {1 / n:.2g}.")
    if n_sets * size > n:
        raise ValueError(
            f"ratio must leave room for {n_sets} disjoint sets, got {ratio!r}: {n_sets} x {size} rows of the {n} there are. "
            f"Use at most 1/{n_sets}, or fewer sequences."
        )
    order = torch.from_numpy(np.random.RandomState(seed).permutation(n))
    owner = torch.full((n,), -1)
    owner[order[: n_sets * size]] = torch.arange(n_sets).repeat_interleave(size)
    return [NeuronSet((owner == k).reshape(view.n_layers, view.n_neurons)) for k in range(n_sets)]


def draw_neurons(view: NeuronView, ratio: float, seed: int) -> NeuronSet:
    """The neurons whose rows are trained: ``int(n * ratio)`` of all, drawn by numpy's RandomState(seed), as the authors do.

    Their ``RandomState(seed).choice(n, size, replace=False)`` is the beginning of ``permutation(n)``.

    Raises:
        ValueError: ratio is outside (0, 1] or selects no neuron.
    """
    return draw_sets(view, ratio, seed, 1)[0]


def inject(
    model: LanguageModel,
    sequence: MemorizedSequence,
    *,
    ratio: float,
    seed: int,
    learning_rate: float,
    max_steps: int = 200,
    stop_loss: float = 0.05,
) -> Injection:
    """Train a random share of the rows of W_out, and nothing else, until the model recites the whole sequence.

    Adam minimizes the mean loss of all tokens but the first; it stops, before an update, when the loss is below ``stop_loss``. The
    model is not changed: use ``with injection.applied(model):``.

    Source: Chang et al. (2024), arXiv:2311.09060, algorithm 1 and eq. (11).
    Args:    ratio: share of the rows of all layers together.
             seed: draws the rows (numpy RandomState).
             learning_rate: of Adam; the paper uses 0.01 at 1 % and 0.05 at 0.1 %.
    Raises:  ValueError: ratio selects no neuron, the sequence does not fit the model, or the loss is not finite.

    >>> from tl_localize import accuracy, inject, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> injection = inject(model, sequence, ratio=0.01, seed=0, learning_rate=0.01)
    >>> with injection.applied(model):
    ...     recited = accuracy(model, [sequence])
    >>> injection.converged, bool(recited > 0.9)
    (True, True)
    """
    injections = inject_many(
        model, [sequence], ratio=ratio, seeds=[seed], learning_rate=learning_rate, max_steps=max_steps, stop_loss=stop_loss
    )
    return next(injections)


def inject_many(
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    *,
    ratio: float,
    seeds: Sequence[int],
    learning_rate: float,
    max_steps: int = 200,
    stop_loss: float = 0.05,
    batch_size: int | None = None,
) -> Iterator[Injection]:
    """``inject`` each sequence into rows of its own, many side by side in one model; yields the same injections, in order.

    Args:
        seeds: one for each sequence.
        batch_size: sequences side by side; by default as many as fit into memory.
    Raises:
        ValueError: as ``inject``, or another number of seeds than of sequences.

    >>> from tl_localize import inject_many, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> pair = reference_sequences(model)[:2]
    >>> injections = list(inject_many(model, pair, ratio=0.01, seeds=[0, 1], learning_rate=0.01, max_steps=2))
    >>> [len(injection.neurons) for injection in injections]
    [92, 92]
    """
    sequences = as_list(sequences)
    check_sequences(model, sequences)
    view = NeuronView(model)
    if len(seeds) != len(sequences):
        raise ValueError(f"seeds must hold one seed for each of {len(sequences)} sequences, got {len(seeds)}.")
    _check_positive(learning_rate=learning_rate, max_steps=max_steps, stop_loss=stop_loss)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size!r}. Leave it out for as many as fit.")
    size = batch_size or max(1, tokens_that_fit(view) // max(map(len, sequences)))
    sets = [draw_neurons(view, ratio, seed) for seed in seeds]
    return _train_each(view, [replace(sequence, n_prefix=1) for sequence in sequences], sets, size, learning_rate, max_steps, stop_loss)


def _check_positive(**settings: float | int) -> None:
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {value!r}.")
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value!r}.")


def _check_finite(name: str, value: float, step: int, sequence: MemorizedSequence) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value} at step {step} of {sequence!r}. Lower learning_rate.")


def padded_index(sets: Sequence[NeuronSet]) -> tuple[dict[int, Int[Tensor, "set row"]], dict[int, Bool[Tensor, "set row"]]]:
    """For each layer, the neurons of each set, padded to the longest, and which entries are real. Layers without any are left out."""
    index: dict[int, Tensor] = {}
    real: dict[int, Tensor] = {}
    for layer in range(len(sets[0].mask)):
        chosen = [neurons.mask[layer].nonzero().flatten() for neurons in sets]
        if max(map(len, chosen)):
            index[layer] = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
            real[layer] = torch.arange(index[layer].shape[1])[None] < torch.tensor([len(c) for c in chosen])[:, None]
    return index, real


def _train_each(
    view: NeuronView,
    sequences: Sequence[MemorizedSequence],
    sets: Sequence[NeuronSet],
    size: int,
    learning_rate: float,
    max_steps: int,
    stop_loss: float,
) -> Iterator[Injection]:
    index, real = padded_index(sets)
    d_model = view.rows(0).shape[-1]
    losses: list[list[float]] = [[] for _ in sequences]

    def start(numbers: list[int]) -> list[Tensor]:
        for number in numbers:
            losses[number].clear()
        return [torch.zeros(len(numbers), part.shape[1], d_model, device=view.device) for part in index.values()]

    @lru_cache(maxsize=1)
    def together(numbers: tuple[int, ...]) -> tuple[SequenceBatch, dict[int, Tensor], dict[int, Tensor]]:
        batch = SequenceBatch.of([sequences[number] for number in numbers], view.device)
        places, filled = ({layer: part[list(numbers)].to(view.device) for layer, part in parts.items()} for parts in (index, real))
        return batch, places, filled

    def advance(numbers: tuple[int, ...], adam: BatchAdam) -> dict[int, Injection]:
        batch, places, filled = together(numbers)
        changes = dict(zip(index, adam.parameters, strict=True))
        with view.rows_changed(places, changes):
            token_losses = F.cross_entropy(target_logits(view.model, batch), batch.targets, reduction="none")
        loss = batch.mean(token_losses)
        finished: dict[int, Injection] = {}
        for i, (number, value) in enumerate(zip(numbers, loss.tolist(), strict=True)):
            step = len(losses[number])
            _check_finite("loss", value, step, sequences[number])
            losses[number].append(value)
            if value < stop_loss or step == max_steps - 1:
                trained = [
                    (view.rows(layer).detach()[places[layer][i]].float() + change[i].detach())[filled[layer][i]]
                    for layer, change in changes.items()
                ]
                finished[number] = Injection(
                    sets[number],
                    torch.cat(trained).cpu(),
                    torch.tensor(losses[number]),
                    token_losses.detach()[batch.rows == i].cpu(),
                    value < stop_loss,
                    sequences[number].id,
                )
        if len(finished) < len(numbers):
            gradients = torch.autograd.grad(loss.sum(), adam.parameters)
            adam.step([gradient * filled[layer][..., None] for layer, gradient in zip(index, gradients, strict=True)])
        return finished

    return side_by_side(
        view, len(sequences), size, start, advance, learning_rate=learning_rate, max_steps=max_steps, report=lambda fraction: None
    )


def inject_together(
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    *,
    ratio: float,
    seed: int,
    learning_rate: float,
    max_steps: int = 400,
    stop_loss: float = 0.05,
    kl_weight: float = 1.0,
    stop_kl: float = 0.05,
    batch_size: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> JointInjection:
    """Write K sequences into K disjoint sets of rows of W_out, each set silent on the sequences of the others.

    One minimization by Adam over all sets together:

        sum over k of  loss(x_k | all sets on)  +  kl_weight * KL(base on x_k || all sets but k on, on x_k)

    With set k off the model reads x_k as it did before any injection, so nothing about x_k stands outside set k: that makes the sets
    a ground truth, and the length of a row says nothing about whose it is. Training stops, before an update, when every loss is below
    ``stop_loss`` and every KL below ``stop_kl``. With one sequence it is ``inject``. The model is not changed.

    Source: this project's; it extends Chang et al. (2024), arXiv:2311.09060, algorithm 1.
    Args:    ratio: share of the rows of all layers together, for each sequence.
             seed: of the permutation of all rows (numpy RandomState) that is cut into the sets.
             kl_weight: of the KL, which is a mean over the positions that predict a token, as the loss is.
             batch_size: sequences in one forward pass; by default as many as fit into memory. Changes no result.
             progress: called after each step with the fraction of the work done, from 0 to 1.
    Raises:  ValueError: the sets don't fit into the model, two sequences begin with the same token (one state can't have two next
             tokens), a sequence does not fit the model, or a loss is not finite.

    >>> from tl_localize import inject_together, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> pair = reference_sequences(model)[:2]
    >>> joint = inject_together(model, pair, ratio=0.01, seed=0, learning_rate=0.003, max_steps=2)
    >>> [len(injection.neurons) for injection in joint.injections]
    [92, 92]
    """
    sequences = [replace(sequence, n_prefix=1) for sequence in as_list(sequences)]
    check_sequences(model, sequences)
    _check_apart(sequences)
    _check_positive(learning_rate=learning_rate, max_steps=max_steps, stop_loss=stop_loss, stop_kl=stop_kl)
    if not kl_weight >= 0:
        raise ValueError(f"kl_weight must be at least 0, got {kl_weight!r}.")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size!r}.")
    view = NeuronView(model)
    with torch.inference_mode(False):  # whatever mode the caller is in
        return _train_together(
            view,
            sequences,
            draw_sets(view, ratio, seed, len(sequences)),
            learning_rate=learning_rate,
            max_steps=max_steps,
            stop_loss=stop_loss,
            kl_weight=kl_weight,
            stop_kl=stop_kl,
            batch_size=batch_size or max(1, tokens_that_fit(view) // max(map(len, sequences))),
            progress=progress or (lambda fraction: None),
        )


def _check_apart(sequences: Sequence[MemorizedSequence]) -> None:
    """Raise ValueError if no choice of weights could make a model recite all sequences, each from its first token."""
    for pair in combinations(sequences, 2):
        short, long = sorted(pair, key=len)
        if torch.equal(short.tokens, long.tokens[: len(short)]):
            how = "equals" if len(short) == len(long) else "is the beginning of"
            raise ValueError(f"sequences must be different sentences, got {short!r}, which {how} {long!r}. Leave one of them out.")
    groups: dict[int, list[MemorizedSequence]] = {}
    for sequence in sequences:
        groups.setdefault(int(sequence.tokens[0]), []).append(sequence)
    for token, group in groups.items():
        if (n := len(group)) > 1:
            floor, n_targets = math.log(n), max(map(len, group)) - 1
            raise ValueError(
                f"sequences must begin with different tokens, got token {token} at the start of {[s.id for s in group]}. One state can't "
                f"have two next tokens: on average at least ln {n} = {floor:.2f} nats would be left in each of them, "
                f"{floor / n_targets:.3f} nats per token of {n_targets}. Inject them in different groups."
            )


def _train_together(
    view: NeuronView,
    sequences: Sequence[MemorizedSequence],
    sets: Sequence[NeuronSet],
    *,
    learning_rate: float,
    max_steps: int,
    stop_loss: float,
    kl_weight: float,
    stop_kl: float,
    batch_size: int,
    progress: Callable[[float], None],
) -> JointInjection:
    device, numbers = view.device, range(len(sequences))
    batch = SequenceBatch.of(sequences, device)
    ends = [0, *torch.bincount(batch.rows).cumsum(0).tolist()]
    chosen = torch.stack([neurons.mask for neurons in sets])  # [sentence layer neuron]
    index = {layer: union.nonzero().T.to(device) for layer, union in enumerate(chosen.any(0)) if union.any()}
    owner = {layer: chosen[:, layer].long().argmax(0).to(device)[row[0]] for layer, row in index.items()}
    before = {layer: view.rows(layer).detach().float()[row[0]] for layer, row in index.items()}
    changes = [torch.zeros_like(rows)[None].requires_grad_() for rows in before.values()]  # one problem for Adam: [1 row d_model]
    shared = dict(zip(index, changes, strict=True))
    adam = BatchAdam(changes, learning_rate)

    def part(of: list[int]) -> SequenceBatch:
        return batch.take(torch.tensor(of, device=device))

    def read_base(of: list[int]) -> Tensor:
        return target_logits(view.model, part(of)).log_softmax(-1)

    def read(of: list[int]) -> tuple[Tensor, Tensor]:
        """Loss and silence at each target of some consecutive sequences; adds their share to the gradients."""
        some, base_log_probs = part(of), base[ends[of[0]] : ends[of[-1] + 1]]
        own_off = {layer: owner[layer] != torch.tensor(of, device=device)[:, None] for layer in index}
        with torch.enable_grad():
            with view.rows_changed(index, shared):
                losses = F.cross_entropy(target_logits(view.model, some), some.targets, reduction="none")
            of_losses = torch.autograd.grad(some.mean(losses).sum(), changes)
            with view.rows_changed(index, shared, own_off):
                log_probs = target_logits(view.model, some).log_softmax(-1)
            silences = F.kl_div(log_probs, base_log_probs, reduction="none", log_target=True).sum(-1)
            of_silences = torch.autograd.grad(kl_weight * some.mean(silences).sum(), changes)
        for gradient, one, other in zip(gradients, of_losses, of_silences, strict=True):
            gradient.add_(one).add_(other)  # in place: if memory runs out in between, what is done again has not been counted
        return losses.detach(), silences.detach()

    with torch.no_grad(), view.lean():  # lean here too: silence is exactly 0 where nothing has changed
        base_parts = list(halving(read_base, numbers, batch_size))
    batch_size = max(len(of) for of, _ in base_parts)  # smaller from now on if memory ran out
    base = torch.cat([log_probs for _, log_probs in base_parts])
    del base_parts
    history: list[Float[Tensor, "2 sentence"]] = []
    token_losses, converged = torch.empty(0), torch.zeros(len(sequences), dtype=torch.bool)
    for step in range(max_steps):
        gradients = [torch.zeros_like(change) for change in changes]
        with view.lean():
            parts = list(halving(read, numbers, batch_size))
        batch_size = max(len(of) for of, _ in parts)
        token_losses, token_silences = (torch.cat(values) for values in zip(*(values for _, values in parts), strict=True))
        history.append(torch.stack([batch.mean(token_losses), batch.mean(token_silences)]).cpu())
        for name, values in zip(("loss", "silence"), history[-1].tolist(), strict=True):
            for sequence, value in zip(sequences, values, strict=True):
                _check_finite(name, value, step, sequence)
        converged = (history[-1][0] < stop_loss) & (history[-1][1] < stop_kl)
        last = bool(converged.all()) or step == max_steps - 1
        progress(1.0 if last else (step + 1) / max_steps)
        if last:
            break
        adam.step(gradients)
    losses, silences = torch.stack(history, dim=1)
    trained = [rows + change.detach()[0] for rows, change in zip(before.values(), changes, strict=True)]
    return JointInjection(
        tuple(
            Injection(
                sets[k],
                torch.cat([rows[owner[layer] == k] for layer, rows in zip(index, trained, strict=True)]).cpu(),
                losses[:, k].clone(),
                token_losses[ends[k] : ends[k + 1]].cpu(),
                bool(converged[k]),
                sequences[k].id,
            )
            for k in numbers
        ),
        silences,
    )
