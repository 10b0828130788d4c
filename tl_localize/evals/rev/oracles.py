"""Oracles of REV: rankings of units by those who know the model before."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.injection.recipes import UnitWeights, in_training, read_units, units_replaced
from tl_localize.metrics import batch_loss, mean_log_odds, mean_unlikelihood
from tl_localize.model.neurons import NeuronView
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, eq=False)
class Change:
    """What training changed, and for which texts. The model has its weights after training.

    Args:
        sequences: the texts that were trained.
        trained: names of the parameters that differ.
        before: the weights of all units before training.
        after: and after it.
    """

    view: NeuronView
    sequences: Sequence[MemorizedSequence]
    trained: Sequence[str]
    before: UnitWeights
    after: UnitWeights

    @torch.enable_grad()
    def effects(self, objective: Callable[[], Tensor]) -> Float[Tensor, "layer neuron"]:
        """The gradient of an objective times the change, summed over the weights of each unit: how
        much it rises, to first order, by what training did to the unit.
        """
        parameters: dict[str, Any] = dict(self.view.model.named_parameters())
        changed = [parameters[name] for name in self.trained]
        with in_training(self.view.model, changed):
            gradients: Any = torch.autograd.grad(objective(), changed, materialize_grads=True)
        # gradients are read by unit, as weights are; what was not trained has not changed
        by_unit = read_units(self.view, dict(zip(self.trained, gradients, strict=True)))
        effects = torch.zeros(self.view.size)
        for layer, parts in enumerate(zip(by_unit, self.before, self.after, strict=True)):
            for gradient, was, now in zip(*parts, strict=True):
                product = gradient * (now - was)
                effects[layer] += product.reshape(self.view.n_neurons, -1).sum(1).cpu()
        return effects

    def part(self, put_back: Float[Tensor, "layer neuron"]) -> UnitWeights:
        """The weights of all units when this part of each one's change is undone."""
        weights: UnitWeights = []
        for layer, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            part = put_back[layer].to(self.view.device)
            weights.append(
                [
                    now + part.view(-1, *(1,) * (now.ndim - 1)) * (was - now)
                    for was, now in zip(before, after, strict=True)
                ]
            )
        return weights


class Oracle(Protocol):
    """Ranks the units for the k-th text of a change."""

    def __call__(self, change: Change, k: int) -> NeuronScores: ...


@dataclass(frozen=True)
class Gradients:
    """What a unit's true change does to the mean log-odds of a text, to first order: the gradient
    times the change, summed over the weights of the unit.

    With several rounds, half of the units of each layer are ranked in rounds: those that the
    earlier rounds chose are put back when the gradient is taken; the rest are ranked by the last.
    """

    rounds: int = 1

    def __call__(self, change: Change, k: int) -> NeuronScores:
        view, sequence = change.view, change.sequences[k]
        batch = SequenceBatch.of([sequence], view.device)
        values = torch.zeros(view.size)
        chosen = torch.zeros_like(values, dtype=torch.bool)
        rounds = min(self.rounds, max(1, view.n_neurons // 2))
        per_round = max(1, view.n_neurons // (2 * rounds))
        for left in range(rounds, 0, -1):
            with units_replaced(view, chosen, change.before):
                effects = change.effects(lambda: mean_log_odds(view.model, batch).sum())
            effects = effects / effects.abs().amax(1, keepdim=True).clamp_min(1e-30)  # in [-1, 1]
            values = torch.where(chosen, values, effects)
            if left > 1:
                best = effects.masked_fill(chosen, -math.inf).topk(per_round).indices
                new = torch.zeros_like(chosen).scatter(1, best, True)
                values = torch.where(new, effects + 2 * left, values)
                chosen |= new
        return NeuronScores(values, sequence_id=sequence.id, units=view.units)


@dataclass(frozen=True)
class LearnedMask:
    """How much of a unit's change a mask puts back that is trained to lose the text and to keep the
    others, which the gradients above do not look at.

        m = sigmoid(a),  weights of unit i = after_i + m_i (before_i - after_i)
        minimize over a   mean over the text's tokens of -log(1 - p)
                          + mean over the other texts of their loss

    Settings were tried on a model of another seed, at the price of 5 points: twice as many steps
    gained 1 point, a term for the mean of m lost some.

    Source: Panigrahi et al. (2023), arXiv:2302.06600, learn which weights of a fine-tuned model
    carry a skill by a mask between two models. Differs: units in place of weights, and texts that
    are to stay.
    """

    steps: int = 50
    learning_rate: float = 0.1

    def __call__(self, change: Change, k: int) -> NeuronScores:
        view, sequence = change.view, change.sequences[k]
        others = [other for i, other in enumerate(change.sequences) if i != k]
        target = SequenceBatch.of([sequence], view.device)
        kept = SequenceBatch.of(others, view.device) if others else None

        def objective() -> Tensor:
            lost = mean_unlikelihood(view.model, target).sum()
            return lost if kept is None else lost + batch_loss(view.model, kept).mean()

        everything = torch.ones(view.size, dtype=torch.bool)
        logits = torch.zeros(view.size, requires_grad=True)
        optimizer = torch.optim.Adam([logits], lr=self.learning_rate)
        for _ in range(self.steps):
            mask = logits.sigmoid()
            with units_replaced(view, everything, change.part(mask.detach())):
                slopes = -change.effects(objective)  # of the objective, by the mask
            with torch.enable_grad():
                optimizer.zero_grad()
                (mask * slopes).sum().backward()
            optimizer.step()
        return NeuronScores(logits.detach(), sequence_id=sequence.id, units=view.units)


ORACLES: dict[str, Oracle] = {
    "oracle_first_order": Gradients(),
    "oracle_rounds": Gradients(rounds=10),
    "oracle_mask": LearnedMask(),
}
