"""Training of rows of W_out until a model recites new sequences (the paper's algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from tl_localize.injection.injected import Injection, draw_sets
from tl_localize.losses import target_logits
from tl_localize.neurons import LanguageModel, NeuronView, check_count, check_positive
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences
from tl_localize.units import NEURONS, Units


class TrainedRows:
    """Rows of W_out in training: the model keeps its own, and changes are added in each pass.

    ``index`` [1 row], ``before`` [row d_model] and ``changes`` [1 row d_model] are by layer, of the
    layers that have rows in training.
    """

    def __init__(
        self, view: NeuronView, rows: Bool[Tensor, "layer row"], learning_rate: float
    ) -> None:
        self.index: dict[int, Tensor] = {}
        self.before: dict[int, Tensor] = {}
        self.changes: dict[int, Tensor] = {}
        for layer in rows.any(1).nonzero().flatten().tolist():
            index = rows[layer].nonzero().T.to(view.device)
            before = view.flat_rows(layer).detach()[index[0]].float()
            self.index[layer], self.before[layer] = index, before
            self.changes[layer] = torch.zeros_like(before)[None].requires_grad_()
        self.adam = torch.optim.Adam(list(self.changes.values()), lr=float(learning_rate))

    def add_gradients(self, total: Tensor) -> None:
        """Add the gradients of a number to those of the changes, or none if memory runs out."""
        changes = list(self.changes.values())
        gradients = torch.autograd.grad(total, changes)
        for change, gradient in zip(changes, gradients, strict=True):
            change.grad = gradient if change.grad is None else change.grad + gradient

    def now(self) -> dict[int, Tensor]:
        """The rows as they are trained so far, by layer, [row d_model]."""
        return {
            layer: before + self.changes[layer].detach()[0] for layer, before in self.before.items()
        }


@torch.inference_mode(False)  # whatever mode the caller is in
@torch.enable_grad()
def inject(
    model: LanguageModel,
    sequence: MemorizedSequence,
    *,
    ratio: float,
    seed: int,
    learning_rate: float,
    max_steps: int = 200,
    stop_loss: float = 0.05,
    units: Units = NEURONS,
) -> Injection:
    """Train a random share of the rows of W_out, and nothing else, until the model recites the
    whole sequence.

    Adam minimizes the mean loss of all tokens but the first; it stops, before an update, when the
    loss is below ``stop_loss``. The model is not changed: use ``with injection.applied(model):``.

    Source: Chang et al. (2024), arXiv:2311.09060, algorithm 1 and eq. (11). Differs: the authors
    train in training mode, with dropout where a model has it; this trains the model as it is.

    Args:
        ratio: share of the rows of all layers together.
        seed: of the drawn rows (numpy RandomState).
        learning_rate: of Adam; the paper uses 0.01 at 1 % and 0.05 at 0.1 %.
        units: whose rows are trained: of ``AttentionHeads()`` a share of all heads, with all rows
            of W_O that belong to them.

    Raises:
        ValueError: ratio selects no neuron, the sequence does not fit the model, or the loss is not
            finite.

    >>> inject(model, sequence, ratio=0.01, seed=0, learning_rate=0.01).converged
    True
    """
    sequence = replace(check_sequences(model, [sequence])[0], n_prefix=1)
    check_positive(learning_rate=learning_rate, stop_loss=stop_loss)
    check_count(max_steps=max_steps)
    view = NeuronView(model, units)
    neurons = draw_sets(view, ratio, seed, 1)[0]
    rows = TrainedRows(view, view.row_mask(neurons.mask), learning_rate)
    batch = SequenceBatch.of([sequence], view.device)
    losses: list[float] = []
    token_losses = torch.empty(0)
    with view.lean():
        for step in range(max_steps):
            with view.rows_changed(rows.index, rows.changes):
                logits = target_logits(view.model, batch)
            token_losses = F.cross_entropy(logits, batch.targets, reduction="none")
            loss = batch.mean(token_losses).sum()
            losses.append(float(loss.detach()))
            check_finite("loss", losses[-1], step, sequence)
            if losses[-1] < stop_loss or step == max_steps - 1:
                break
            rows.adam.zero_grad()
            rows.add_gradients(loss)
            rows.adam.step()
    return Injection(
        neurons,
        torch.cat(list(rows.now().values())).cpu(),
        torch.tensor(losses),
        token_losses.detach().cpu(),
        losses[-1] < stop_loss,
        sequence.id,
    )


def check_finite(name: str, value: float, step: int, sequence: MemorizedSequence) -> None:
    """Raise ValueError where a loss of training is not finite."""
    if not math.isfinite(value):
        raise ValueError(
            f"{name} must be finite, got {value} at step {step} of {sequence!r}. Lower "
            "learning_rate."
        )
