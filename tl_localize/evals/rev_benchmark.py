"""REV: sentences are trained into a model that may use all of its rows; which units have to be put
back to what they were before, so that one sentence is forgotten and the others are not?
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from tl_localize.batching import Report
from tl_localize.evals.localize import grouped, localized, named, scores_task, with_controls
from tl_localize.evals.rev_results import DIRECTIONS, RevResults
from tl_localize.execution.engine import Benchmark, Methods
from tl_localize.execution.environment import about_model
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import Json, Plan, Task, described, digest_of
from tl_localize.injection.learned import (
    RECIPES,
    Learned,
    Recipe,
    UnitWeights,
    assigned,
    check_earlier,
    in_training,
    learn,
    read_units,
    units_put,
)
from tl_localize.losses import mean_log_odds
from tl_localize.methods import ActivationContrast
from tl_localize.methods.base import Method
from tl_localize.metrics import accuracy, check_text, sequence_losses
from tl_localize.neurons import LanguageModel, NeuronView, Real, check_count, check_seed
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences
from tl_localize.units import NEURONS, Units

SAME_KIND = f"{ActivationContrast.name}_same_kind"
ALIGNMENT = 0.05  # of the same; with so many texts the direction of a row is to count less
ORACLES = {"oracle_first_order": 1, "oracle_rounds": 10}  # label -> rounds
Group = list[MemorizedSequence]  # the sentences of one model
EXPECTED_STEPS = 100  # of training, with the default recipe; for the progress of a run
BACKWARD = 2  # a backward pass takes about as long as so many forward ones
N_GENERAL = 12  # the first rows of general text, every other one of which is measured


@dataclass(frozen=True, eq=False, repr=False)
class RevBenchmark(Benchmark[RevResults]):
    """What a model forgets when the units that a method names are put back to what they were before
    the model learned a sentence, and what the model before gains when it is given them.

    The sentences come in groups; group g is trained into the model with seed ``seed + g``. Each
    sentence of a group is the target once, the rest are its others. The second half of the groups
    is never trained: Activation Contrast with their texts, which are of the same kind as the
    target, is among the methods (``activation_contrast_same_kind``). So are Random and RowNorm.
    Two oracles know the model before: ``oracle_first_order`` ranks units by the
    gradient of the target's mean log-odds times the unit's true change, ``oracle_rounds`` does so
    in ten rounds, the units of earlier rounds being put back.

    Source: ours. Putting fine-tuned weights back, or grafting them, to localize a skill: Panigrahi
    et al. (2023), arXiv:2302.06600.

    Args:
        sequences: the sentences; each is trained, localized and measured whole, with its first
            token as the prefix. With ``before``, memorized sequences, which keep their prefix.
        general_tokens: [sequence pos] general text: every other one of the first 12 rows is
            measured, the rest are trained beside the sentences where the recipe mixes them in.
        before: an earlier checkpoint of the model, in place of training: targets are those
            sequences that the model recites; none that the checkpoint recites too is accepted.
        n_sequences: sentences in one model; with one, others are not measured.
        n_groups: how many models are trained; by default half of the groups that the sentences
            fill, at most 3.
        ratios: shares of each layer that are put back.
        recipe: how the sentences are trained into the model.
        seed: of the groups and of what training draws.
        units: what is scored and put back; of heads the rows of W_O.

    Raises:
        ValueError: a ratio that selects no unit, too few sentences, a checkpoint of another model
            or that recites a text too, texts that the model can't read.

    >>> how = {"n_sequences": 1, "ratios": (0.1,), "recipe": Recipe(max_steps=2)}
    >>> benchmark = RevBenchmark(model, [sequence], text, **how)
    >>> sorted(set(benchmark.run([Activations()]).frame["method"]))
    ['activations', 'oracle_first_order', 'oracle_rounds', 'random', 'row_norm']
    """

    model: LanguageModel
    sequences: Sequence[MemorizedSequence]
    general_tokens: Integer[Tensor, "sequence pos"]
    _: KW_ONLY
    before: LanguageModel | None = None
    n_sequences: int = 8
    n_groups: int | None = None
    ratios: tuple[Real, ...] = (0.05, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4)
    recipe: Recipe = RECIPES["adam"]
    seed: int = 0
    units: Units = NEURONS
    min_accuracy: ClassVar[float] = 0.9  # of a text that a checkpoint's later model recites

    def __post_init__(self) -> None:
        check_sequences(self.model, self.sequences)
        check_text(self.model, self.general_tokens, "general_tokens")
        check_count(n_sequences=self.n_sequences)
        check_seed(self.seed, bits=32)
        if self.n_groups is not None:
            check_count(n_groups=self.n_groups)
        view = NeuronView(self.model, self.units)
        if not self.ratios or list(self.ratios) != sorted(set(self.ratios)):
            raise ValueError(
                f"ratios must be different fractions in rising order, got {self.ratios}. Write for "
                "example (0.1, 0.2)."
            )
        blank = NeuronScores(torch.zeros(view.size), units=self.units)
        for ratio in self.ratios:
            blank.top_k(ratio)  # raises where it selects none
        if self.before is not None:
            check_earlier(self.model, self.before)
        if not self.groups or len(self.groups) < (self.n_groups or 1):
            size = 2 * (self.n_groups or 1) - 1  # the second half is not trained
            raise ValueError(
                f"sequences must fill {size} groups of {self.n_sequences} that begin with "
                f"different tokens, got {len(self.sequences)}. Give more, or fewer groups."
            )

    @cached_property
    def groups(self) -> list[Group]:
        """The sentences of each model. With an earlier checkpoint, one group of all targets."""
        if self.before is not None:
            return [self._targets(self.before)]
        return self._halves[0][: self.n_groups or 3]

    @cached_property
    def _halves(self) -> tuple[list[Group], list[Group]]:
        """The groups that may be trained and those that never are: drawn by the seed, no two
        sentences of a group beginning with the same token.
        """
        whole = [one.whole for one in named(self.sequences)]
        groups = grouped(whole, self.n_sequences, self.seed)
        half = math.ceil(len(groups) / 2)
        return groups[:half], groups[half:]

    def _targets(self, before: LanguageModel) -> Group:
        """The sequences that the model recites; ValueError where there are none, or where the
        checkpoint recites one too.
        """
        every = named(self.sequences)
        now, then = accuracy(self.model, every), accuracy(before, every)
        learned = [every[i] for i in (now >= self.min_accuracy).nonzero().flatten().tolist()]
        for i, one in enumerate(every):
            if min(now[i], then[i]) >= self.min_accuracy:
                raise ValueError(
                    f"sequences must be texts that the earlier checkpoint does not recite, got "
                    f"{one.id!r}, which both recite. Leave it out, or give an earlier checkpoint."
                )
        if not learned:
            raise ValueError(
                f"sequences must hold one that the model recites at {self.min_accuracy:g}, got "
                f"none among {len(every)}. Give other texts."
            )
        return learned

    def labelled(self, methods: Sequence[Method]) -> Methods:
        """The methods by label; the controls are always among them."""
        labelled = with_controls(methods, self.units)
        if self.before is None:
            untrained = [one for group in self._halves[1] for one in group]
            texts = tuple(tuple(one.tokens.tolist()) for one in untrained)
            if texts:
                labelled[SAME_KIND] = ActivationContrast(
                    texts=texts, alignment=ALIGNMENT, units=self.units
                )
        return labelled

    def plan(self, methods: Sequence[Method], before: Sequence[Plan] = ()) -> Plan:
        labelled = self.labelled(methods)
        recipe = described(self.recipe)
        if self.before is not None:
            recipe = about_model(self.before)["fingerprint"]
        settings: Json = {
            **about_model(self.model),
            "seed": self.seed,
            "ratios": list(map(float, self.ratios)),
            "units": described(self.units),
            "recipe": recipe,
            "general_text": digest_of(self.general_tokens.tolist()),
        }
        parts: list[Any] = []
        tasks: list[Task] = []
        for index, group in enumerate(self.groups):
            prints = [one.fingerprint for one in group]
            name = f"group-{index:02d}"
            parts.append([name, [[one.id, one.fingerprint] for one in group]])
            inputs = {**settings, "sequences": prints, "seed": self.seed + index}
            inputs.pop("ratios")
            place: Json = {"name": name, "index": index}
            learning = (1 + BACKWARD) * EXPECTED_STEPS * len(group)
            weight = 1.0 if self.before is not None else float(learning)
            trained = Task("learned", inputs, (), "learn", weight=weight, **place)
            place["group"] = trained.key
            how = {"ids": [one.id for one in group], "ratios": settings["ratios"]}
            measured = len(DIRECTIONS) * (1 + len(group) * len(self.ratios))
            passes = float(measured * (len(group) + N_GENERAL // 2))
            for label in (*labelled, *ORACLES):
                needs = (trained,)
                if label in labelled:
                    fingerprint, method = settings["fingerprint"], labelled[label]
                    scores = scores_task(fingerprint, label, method, prints, needs, **place)
                    needs = (trained, scores)
                own = {**how, "label": label}
                tasks.append(Task("rev", own, needs, label, weight=passes, **place))
        return Plan(
            benchmark="rev",
            settings=settings,
            parts=parts,
            methods={label: described(method) for label, method in labelled.items()},
            tasks=tasks,
            grows="groups and methods",
        )

    def compute(self, task: Task, needs: Sequence[Any], methods: Methods, report: Report) -> Any:
        group = self.groups[task.index]
        if task.kind == "learned":
            text = self.general_tokens
            if self.before is not None:
                return Learned(check_earlier(self.model, self.before), torch.zeros(1, 0), True)
            return learn(
                self.model,
                group,
                self.recipe,
                general_tokens=torch.cat([text[:N_GENERAL:2], text[N_GENERAL:]]),
                seed=self.seed + task.index,
                units=self.units,
                progress=report,
            )
        other: Learned = needs[0]
        if task.kind == "scores":
            with assigned(self.model, {} if self.before is not None else other.weights):
                return localized(methods[task.label], self.model, group, report, self.units)
        chunk = needs[1] if needs[1:] else None
        scores = [chunk.of(k, one, self.units) for k, one in enumerate(group)] if chunk else []
        return self._measured(task, group, other, scores, report)

    def _measured(
        self,
        task: Task,
        group: Sequence[MemorizedSequence],
        other: Learned,
        scores: list[NeuronScores],
        report: Report,
    ) -> Json:
        """What one method found for each sentence of a group, in both directions."""
        view, parameters = NeuronView(self.model, self.units), dict(self.model.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in other.weights}
        base, learned = (kept, other.weights) if self.before is None else (other.weights, kept)
        before, after = read_units(view, base), read_units(view, learned)
        if not scores:
            with assigned(self.model, learned):
                rounds, trained = ORACLES[task.label], list(other.weights)
                scores = [change_scores(view, one, trained, before, after, rounds) for one in group]
        frame: list[Json] = []
        for done, direction in enumerate(DIRECTIONS):
            start, values = (learned, before) if direction == "put_back" else (base, after)
            with assigned(self.model, start):
                intact = self._measure(group)
                for k, one in enumerate(group):
                    for ratio in self.ratios:
                        with units_put(view, scores[k].top_k(ratio).mask, values):
                            deltas = (self._measure(group) - intact).tolist()
                        general, own = deltas.pop(), deltas.pop(k)
                        row = {
                            "sequence_id": one.id,
                            "method": task.label,
                            "group": task.name,
                            "direction": direction,
                            "converged": other.converged,
                            "steps": len(other.losses),
                            "ratio": float(ratio),
                            "delta_own_accuracy": own,
                            "delta_others_accuracy": sum(deltas) / len(deltas)
                            if deltas
                            else math.nan,
                            "delta_general_loss": general,
                        }
                        frame.append(row)
                    report((done + (k + 1) / len(group)) / 2)
        return {"frame": frame, "converged": other.converged}

    @torch.no_grad()
    def _measure(self, group: Sequence[MemorizedSequence]) -> np.ndarray:
        """The accuracy of each sentence, and the loss of general text, nats per token."""
        text = self.general_tokens
        if len(text) > 1:
            text = text[1:N_GENERAL:2]
        general = sequence_losses(self.model, text, units=self.units)
        return np.append(accuracy(self.model, group).double(), general.double().mean())

    def results(self, cache: Cache) -> RevResults:
        return RevResults.of(cache)


def change_scores(
    view: NeuronView,
    sequence: MemorizedSequence,
    trained: Sequence[str],
    before: UnitWeights,
    after: UnitWeights,
    rounds: int,
) -> NeuronScores:
    """What a unit's true change does to the mean log-odds of a text, to first order: the gradient
    times the change, summed over the weights of the unit. The model has its learned weights, of
    which ``trained`` names the parameters that differ.

    With several rounds, half of the units of each layer are ranked in rounds: those that the
    earlier rounds chose are put back when the gradient is taken; the rest are ranked by the last.
    """
    values = torch.zeros(view.size)
    chosen = torch.zeros_like(values, dtype=torch.bool)
    rounds = min(rounds, max(1, view.n_neurons // 2))
    per_round = max(1, view.n_neurons // (2 * rounds))
    for left in range(rounds, 0, -1):
        with units_put(view, chosen, before):
            effects = _change_effects(view, sequence, trained, before, after)
        effects = effects / effects.abs().amax(1, keepdim=True).clamp_min(1e-30)  # in [-1, 1]
        values = torch.where(chosen, values, effects)
        if left > 1:
            best = effects.masked_fill(chosen, -math.inf).topk(per_round).indices
            new = torch.zeros_like(chosen).scatter(1, best, True)
            values = torch.where(new, effects + 2 * left, values)
            chosen |= new
    return NeuronScores(values, sequence_id=sequence.id, units=view.units)


@torch.enable_grad()
def _change_effects(
    view: NeuronView,
    sequence: MemorizedSequence,
    trained: Sequence[str],
    before: UnitWeights,
    after: UnitWeights,
) -> Float[Tensor, "layer neuron"]:
    parameters: dict[str, Any] = dict(view.model.named_parameters())
    changed = [parameters[name] for name in trained]
    batch = SequenceBatch.of([sequence], view.device)
    with in_training(view.model, changed):
        odds = mean_log_odds(view.model, batch).sum()
        gradients: Any = torch.autograd.grad(odds, changed, materialize_grads=True)
    # gradients are read by unit, as weights are; what was not trained has not changed
    by_unit = read_units(view, dict(zip(trained, gradients, strict=True)))
    effects = torch.zeros(view.size)
    for layer, parts in enumerate(zip(by_unit, before, after, strict=True)):
        for gradient, was, now in zip(*parts, strict=True):
            product = gradient * (now - was)
            effects[layer] += product.reshape(view.n_neurons, -1).sum(1).cpu()
    return effects
