"""Write new sequences into chosen rows of W_out (the paper's algorithm 1)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_localize.losses import target_logits
from tl_localize.memory import halving, tokens_that_fit
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.optim import BatchAdam
from tl_localize.scores import NeuronSet, check_ratio, load_tensors, save_tensors
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences


@dataclass(frozen=True, eq=False)
class Injection:
    """Rows of W_out trained until the model recites one sequence.

    Args:
        neurons: the neurons whose rows were trained, the ground truth of INJ.
        rows: [n d_model] the trained rows, in the order of ``neurons.mask.nonzero()``, float32 on the CPU.
        losses: [step] loss of the whole sequence before each update, nats per token; the last one belongs to ``rows``.
        token_losses: [pos-1] loss of each token but the first at the end; shows which tokens keep a loss from falling further.
        converged: whether the last loss is below the stop loss.
        sequence_id: id of the sequence.
    """

    neurons: NeuronSet
    rows: Float[Tensor, "n d_model"]
    losses: Float[Tensor, " step"]
    token_losses: Float[Tensor, " suffix"]
    converged: bool
    sequence_id: str = ""

    def __repr__(self) -> str:
        state = "converged" if self.converged else "NOT converged"
        return (
            f"Injection({self.sequence_id!r}, {len(self.neurons)} rows, {state}: loss {self.losses[-1]:.3f} after {len(self.losses)} steps)"
        )

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
        tensors = {"mask": self.neurons.mask, "rows": self.rows, "losses": self.losses, "token_losses": self.token_losses}
        save_tensors(path, tensors, {"converged": json.dumps(self.converged), "sequence_id": self.sequence_id})

    @classmethod
    def load(cls, path: str | Path) -> Injection:
        """Read what ``save`` wrote."""
        tensors, metadata = load_tensors(path, "mask", "rows", "losses", "token_losses")
        parts = (tensors[name] for name in ("rows", "losses", "token_losses"))
        return cls(NeuronSet(tensors["mask"]), *parts, json.loads(metadata["converged"]), metadata.get("sequence_id", ""))


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


def draw_neurons(view: NeuronView, ratio: float, seed: int) -> NeuronSet:
    """The neurons whose rows are trained: ``int(n * ratio)`` of all, drawn by numpy's RandomState(seed), as the authors do.

    Raises:
        ValueError: ratio is outside (0, 1] or selects no neuron.
    """
    check_ratio("ratio", ratio)
    n = view.n_layers * view.n_neurons
    if int(n * ratio) == 0:
        raise ValueError(f"ratio must select at least one of {n} neurons, got {ratio!r}, which selects none. Use at least {1 / n:.2g}.")
    ids = np.random.RandomState(seed).choice(n, int(n * ratio), replace=False)
    mask = torch.zeros(n, dtype=torch.bool)
    mask[torch.from_numpy(ids)] = True
    return NeuronSet(mask.reshape(view.n_layers, view.n_neurons))


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
    """
    settings = {"ratio": ratio, "learning_rate": learning_rate, "max_steps": max_steps, "stop_loss": stop_loss}
    return next(inject_many(model, [sequence], seeds=[seed], **settings))


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
    """
    sequences = list(sequences)
    check_sequences(model, sequences)
    view = NeuronView(model)
    if len(seeds) != len(sequences):
        raise ValueError(f"seeds must hold one seed for each of {len(sequences)} sequences, got {len(seeds)}.")
    for name, value in (("learning_rate", learning_rate), ("max_steps", max_steps), ("stop_loss", stop_loss)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value!r}.")
    size = batch_size or max(1, tokens_that_fit(view) // max(map(len, sequences)))
    work = [(replace(sequence, n_prefix=1), draw_neurons(view, ratio, seed)) for sequence, seed in zip(sequences, seeds, strict=True)]

    def train(batch: list[tuple[MemorizedSequence, NeuronSet]]) -> list[Injection]:
        return _train(view, [s for s, _ in batch], [n for _, n in batch], learning_rate, max_steps, stop_loss)

    return (injection for _, injections in halving(train, work, size) for injection in injections)


def padded_index(
    sets: Sequence[NeuronSet], device: torch.device
) -> tuple[dict[int, Int[Tensor, "batch row"]], dict[int, Bool[Tensor, "batch row"]]]:
    """For each layer, the neurons of each set, padded to the longest, and which entries are real. Layers without any are left out."""
    index: dict[int, Tensor] = {}
    real: dict[int, Tensor] = {}
    for layer in range(len(sets[0].mask)):
        chosen = [neurons.mask[layer].nonzero().flatten() for neurons in sets]
        if max(map(len, chosen)):
            index[layer] = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True).to(device)
            real[layer] = (torch.arange(index[layer].shape[1])[None] < torch.tensor([len(c) for c in chosen])[:, None]).to(device)
    return index, real


def _train(
    view: NeuronView,
    sequences: Sequence[MemorizedSequence],
    sets: Sequence[NeuronSet],
    learning_rate: float,
    max_steps: int,
    stop_loss: float,
) -> list[Injection]:
    device = view.device
    batch = SequenceBatch.of(sequences, device)
    index, real = padded_index(sets, device)
    layers = list(index)
    before = {layer: view.rows(layer).detach().float()[index[layer]] for layer in layers}
    changes = [torch.zeros_like(before[layer]).requires_grad_() for layer in layers]
    adam = BatchAdam(changes, learning_rate)
    open_rows = list(range(len(sequences)))
    losses: list[list[float]] = [[] for _ in sequences]
    done: dict[int, Injection] = {}
    for step in range(max_steps):
        with torch.enable_grad(), view.frozen(), view.rows_changed(index, dict(zip(layers, changes, strict=True))):
            token_losses = F.cross_entropy(target_logits(view.model, batch), batch.targets, reduction="none")
            loss = batch.mean(token_losses)
        values = loss.tolist()
        for row, value in zip(open_rows, values, strict=True):
            if not np.isfinite(value):
                raise ValueError(f"loss must be finite, got {value} at step {step} of {sequences[row]!r}. Lower learning_rate.")
            losses[row].append(value)
        finished = [i for i, value in enumerate(values) if value < stop_loss or step == max_steps - 1]
        for i in finished:
            row = open_rows[i]
            rows = torch.cat(
                [(before[layer][i] + change[i].detach())[real[layer][i]] for layer, change in zip(layers, changes, strict=True)]
            )
            done[row] = Injection(
                sets[row],
                rows.cpu(),
                torch.tensor(losses[row]),
                token_losses.detach()[batch.rows == i].cpu(),
                values[i] < stop_loss,
                sequences[row].id,
            )
        if len(done) == len(sequences):
            break
        gradients = torch.autograd.grad(loss.sum(), changes)
        adam.step([gradient * real[layer][..., None] for layer, gradient in zip(layers, gradients, strict=True)])
        if finished:
            still = torch.tensor([i for i in range(len(open_rows)) if i not in finished], device=device)
            open_rows = [open_rows[i] for i in still.tolist()]
            batch, changes = batch.take(still), adam.keep(still)
            index, real, before = ({layer: part[layer][still] for layer in layers} for part in (index, real, before))
    return [done[row] for row in range(len(sequences))]
