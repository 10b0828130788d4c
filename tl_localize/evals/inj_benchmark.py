"""INJ: write sentences into a few rows of W_out, then ask a method which rows they are.

There are two forms. The paper's: one sentence at a time. It has a shortcut, because training makes
rows longer: RowNorm shows how much of a method's recall row norms alone explain. Ours, with
distractors: several sentences in disjoint rows of one model, each set of rows enough for its
sentence and without effect on the others'. All the rows are altered in the same way, so a method
has to read the sentence to tell which are its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from tl_localize.batching import Report
from tl_localize.evals.inj_results import TRUE_ROWS, InjResults
from tl_localize.evals.localize import ScoredChunk, check_names, localized, scores_task
from tl_localize.execution.engine import Benchmark, Methods
from tl_localize.execution.environment import fingerprint
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import Plan, Task, described
from tl_localize.injection import Injection, JointInjection, draw_sets, inject, inject_together
from tl_localize.losses import memorization_loss
from tl_localize.methods import RandomBaseline, RowNorm
from tl_localize.methods.base import Method, check_methods, label_methods
from tl_localize.metrics import accuracy
from tl_localize.neurons import (
    LanguageModel,
    NeuronView,
    Real,
    check_count,
    check_positive,
    check_ratio,
    check_seed,
    model_name,
)
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.units import NEURONS, Units

Row = dict[str, Any]

# Learning rate and steps of an injection by ratio: the paper's up to 2 %. Beyond, each row takes
# part in writing the sentence only if the steps are smaller: at 0.01 rows grow that the sentence
# does not need, and no method that reads the sentence can find them.
INJECTION = {0.002: (0.05, 200), 0.02: (0.01, 200), 1.0: (0.003, 400)}
TOGETHER = (0.005, 1000)  # with distractors
PERFECT = {
    "recall": 1.0,
    "recall_across_layers": 1.0,
    "foreign_recall": 0.0,
    "foreign_recall_across_layers": 0.0,
}


@dataclass(frozen=True, eq=False)
class Group:
    """What is written into the model together: one sentence, or a target and its distractors."""

    name: str
    seed: int  # of the rows that are trained
    sequences: Sequence[MemorizedSequence]


@dataclass(frozen=True, eq=False)
class InjBenchmark(Benchmark[InjResults]):
    """Recall of the rows into which sentences were injected.

    Without distractors sentence i is written alone, into rows drawn with seed ``seed + i``, as in
    the paper's algorithm 1. With K - 1 distractors the sentences come in groups of K, group g is
    written together with seed ``seed + g``; sentences that are left over, because no group can take
    them, are not measured.

    Source: Chang et al. (2024), arXiv:2311.09060, section 4.1. Differs: RowNorm and the form with
    distractors are ours.

    Args:
        sequences: the sentences; each is injected and localized whole, with its first token as the
            prefix.
        ratio: share of all rows that one sentence is written into.
        learning_rate: of the injection; by default the paper's, 0.05 at ratios up to 0.2 %, 0.01 up
            to 2 %, and 0.003 beyond; 0.005 with distractors.
        max_steps: of the injection; by default the paper's 200, 400 at ratios above 2 %, 1000 with
            distractors.
        multiples: recall is measured among the top ``ratio * multiple`` of each layer, and of the
            model.
        distractors: other sentences in the model, K - 1.
        units: whose rows are trained and looked for. With ``AttentionHeads()`` the ratio is a share
            of all heads, and all rows of W_O that belong to a head are trained, as many as its
            vector has entries.

    Raises:
        ValueError: a ratio that selects no row, multiples that leave (0, 1], a sentence that does
            not fit the model, or fewer sentences than a group takes.

    >>> benchmark = InjBenchmark(model, [sequence], ratio=0.01, max_steps=2)
    >>> sorted(set(benchmark.run([Activations()]).frame["method"]))
    ['activations', 'random', 'row_norm']
    """

    model: LanguageModel
    sequences: Sequence[MemorizedSequence]
    _: KW_ONLY
    ratio: Real
    learning_rate: Real | None = None
    max_steps: int | None = None
    stop_loss: Real = 0.05
    seed: int = 0
    multiples: tuple[Real, ...] = (1, 2, 5)
    distractors: int = 0
    units: Units = NEURONS

    def __repr__(self) -> str:
        about = f"{len(self.sequences)} sequences, ratio={self.ratio}"
        return f"InjBenchmark({model_name(self.model)!r}, {about}, distractors={self.distractors})"

    def __post_init__(self) -> None:
        check_sequences(self.model, self.sequences)
        check_count(0, distractors=self.distractors)
        view = NeuronView(self.model, self.units)
        # raises where the sets can't be drawn
        draw_sets(view, self.ratio, self.seed, self.distractors + 1)
        training = self.training
        check_count(max_steps=training.pop("max_steps"))
        check_positive(**training)
        blank = NeuronScores(torch.zeros(view.n_layers, view.n_neurons), units=self.units)
        for multiple in self.multiples:
            check_positive(multiples=multiple)
            check_ratio("multiples of ratio", self.ratio * multiple)
            blank.top_k(self.ratio * multiple)  # raises where it selects none
        if not self.multiples:
            raise ValueError("multiples must hold at least one number, got (). 1 is the ratio.")
        if not self.groups:
            raise ValueError(
                f"distractors must leave at least one group of {self.distractors + 1} sentences "
                f"that begin with different tokens, got {self.distractors} for "
                f"{len(self.sequences)} sentences. Give at least {self.distractors + 1}, or fewer "
                "distractors."
            )
        check_seed(self.seed + len(self.groups) - 1, bits=32)

    @property
    def training(self) -> dict[str, Any]:
        """The settings of ``inject``, with the defaults of this ratio."""
        rate, steps = next(both for largest, both in INJECTION.items() if self.ratio <= largest)
        if self.distractors:
            rate, steps = TOGETHER
        return {
            "learning_rate": rate if self.learning_rate is None else self.learning_rate,
            "max_steps": steps if self.max_steps is None else self.max_steps,
            "stop_loss": self.stop_loss,
        }

    def labelled(self, methods: Sequence[Method]) -> Methods:
        """The methods by label; Random and RowNorm are always among them."""
        check_methods(methods, self.units)
        every = list(methods)
        for control in (RandomBaseline(units=self.units), RowNorm(units=self.units)):
            if not any(isinstance(method, type(control)) for method in methods):
                every.append(control)
        labelled = label_methods(every)
        if TRUE_ROWS in labelled:
            raise ValueError(
                f"methods must not be called {TRUE_ROWS!r}, got {labelled[TRUE_ROWS]!r}. That is "
                "the best a method could do."
            )
        return labelled

    def plan(self, methods: Sequence[Method], before: Sequence[Plan] = ()) -> Plan:
        labelled = self.labelled(methods)
        check_names(self.sequences, labelled)
        made_of = fingerprint(self.model)
        ratio, training = float(self.ratio), self.training
        settings: dict[str, Any] = {"distractors": self.distractors, **self._units()}
        tasks: list[Task] = []
        for index, group in enumerate(self.groups):
            tasks += self._tasks(index, group, labelled, {"model": made_of, **settings, **training})
        return Plan(
            benchmark="inj",
            settings={
                "model": model_name(self.model),
                "fingerprint": made_of,
                "dtype": str(next(iter(self.model.parameters())).dtype),
                "multiples": list(map(float, self.multiples)),
                "seed": self.seed,
                **settings,
            },
            parts=[
                [group.name, [[s.id, s.fingerprint] for s in group.sequences]]
                for group in self.groups
            ],
            methods={label: described(method) for label, method in labelled.items()},
            tasks=tasks,
            scope=f"ratio {ratio:g}",
            scoped={"ratio": ratio, **training},
            grows="sentences, methods and ratios",
        )

    def _units(self) -> dict[str, Any]:
        return {} if self.units == NEURONS else {"units": described(self.units)}

    def _tasks(
        self, index: int, group: Group, labelled: Methods, how: dict[str, Any]
    ) -> list[Task]:
        """The measurements of one group: of each method, and with distractors of the true rows."""
        prints = [sequence.fingerprint for sequence in group.sequences]
        place: dict[str, Any] = {"name": group.name, "index": index, "ratio": float(self.ratio)}
        inputs = {**how, "sequences": prints, "seed": group.seed, "ratio": self.ratio}
        injection = Task("injections", inputs, (), "inject", **place)
        place["group"] = injection.key
        about = {
            "ids": [sequence.id for sequence in group.sequences],
            "group": group.name,
            "multiples": list(map(float, self.multiples)),
        }
        tasks: list[Task] = []
        for label, method in labelled.items():
            scores = scores_task(how["model"], label, method, prints, (injection,), **place)
            needs = (injection, scores)
            tasks.append(Task("inj", {**about, "label": label}, needs, label, **place))
        if self.distractors:
            tasks.append(Task(TRUE_ROWS, about, (injection,), TRUE_ROWS, **place))
        return tasks

    @cached_property
    def groups(self) -> list[Group]:
        """The sentences one by one, or with their distractors: drawn by the seed, no two of a group
        beginning with the same token.
        """
        whole = [
            replace(sequence, n_prefix=1, id=sequence.id or f"sequence-{i}")
            for i, sequence in enumerate(self.sequences)
        ]
        if not self.distractors:
            return [
                Group(sequence.id, self.seed + i, [sequence]) for i, sequence in enumerate(whole)
            ]
        waiting = [whole[i] for i in np.random.RandomState(self.seed).permutation(len(whole))]
        groups: list[Group] = []
        while True:
            members: dict[int, MemorizedSequence] = {}  # by first token
            for sequence in waiting:
                if len(members) <= self.distractors:
                    members.setdefault(int(sequence.tokens[0]), sequence)
            if len(members) <= self.distractors:
                return groups
            groups.append(
                Group(f"group-{len(groups):02d}", self.seed + len(groups), list(members.values()))
            )
            waiting = [sequence for sequence in waiting if sequence not in members.values()]

    def compute(self, task: Task, needs: Sequence[Any], methods: Methods, report: Report) -> Any:
        group = self.groups[task.index]
        if task.kind == "injections":
            return self.inject(group, report)
        injection: Injection | JointInjection = needs[0]
        if task.kind == "scores":
            method = methods[task.label]
            with injection.applied(self.model):
                return localized(method, self.model, group.sequences, report, self.units)
        chunk = None if task.kind == TRUE_ROWS else needs[1]
        return self._measured(group, injection, task.label, chunk)

    def inject(self, group: Group, report: Report) -> Injection | JointInjection:
        """Train the rows of one group. It is trained alone: side by side with others it would
        differ in the last digits.
        """
        settings: dict[str, Any] = {"ratio": self.ratio, "seed": group.seed, **self.training}
        settings["units"] = self.units
        if self.distractors:
            return inject_together(self.model, group.sequences, **settings, progress=report)
        return inject(self.model, group.sequences[0], **settings)

    def _measured(
        self,
        group: Group,
        injection: Injection | JointInjection,
        label: str,
        chunk: ScoredChunk | None,
    ) -> dict[str, Any]:
        """What one method found (None: the true rows): recalls, and with distractors what the
        ablation of its neurons does.
        """
        joint = injection if isinstance(injection, JointInjection) else None
        injections = injection.injections if isinstance(injection, JointInjection) else (injection,)
        sets = [one.neurons for one in injections]
        scores: list[NeuronScores] = []
        if chunk:
            scores = [chunk.of(k, one, self.units) for k, one in enumerate(group.sequences)]
        found = [one.top_k(self.ratio) for one in scores] or sets
        about = {"injection_ratio": self.ratio, "seed": group.seed, "group": group.name}
        about["steps"] = len(injection.losses)
        frame, truth, assignment = list[Row](), list[Row](), list[Row]()
        effects = self._ablated(group, joint, found) if joint else [{}]
        for k, (sequence, one) in enumerate(zip(group.sequences, injections, strict=True)):
            row = {"sequence_id": sequence.id, "method": label, **about, "converged": one.converged}
            row |= asdict(joint.final[k]) if joint else {"loss": float(one.losses[-1])}
            for multiple in self.multiples:
                ratio = self.ratio * multiple
                recalls = recalls_at(scores[k], ratio, sets, k) if scores else PERFECT
                row |= {"ratio": round(ratio, 10), "multiple": multiple, **recalls, **effects[k]}
                frame.append(row | {"seconds": chunk.seconds if chunk else 0.0})
            for other, rows in zip(group.sequences, sets if joint and scores else (), strict=False):
                pair = {"method": label, "localized": sequence.id, "whose": other.id}
                assignment.append({**about, **pair, "recall": found[k].recall_of(rows)})
        if joint and not scores:
            truth = [row | about for row in ground_truth(self.model, joint, group.sequences)]
        converged = all(one.converged for one in injections)
        return {"frame": frame, "truth": truth, "assignment": assignment, "converged": converged}

    def _ablated(
        self, group: Group, joint: JointInjection, found: Sequence[NeuronSet]
    ) -> list[dict[str, float]]:
        """Change of accuracy on each sentence and on its distractors when the neurons that were
        found for it are ablated.
        """
        effects: list[dict[str, float]] = []
        with joint.applied(self.model):
            before = accuracy(self.model, group.sequences)
            for k, neurons in enumerate(found):
                with neurons.dropped_out(self.model):
                    change = (accuracy(self.model, group.sequences) - before).tolist()
                own = change.pop(k)
                foreign = sum(change) / self.distractors
                effects.append({"delta_own_accuracy": own, "delta_foreign_accuracy": foreign})
        return effects

    def results(self, cache: Cache) -> InjResults:
        return InjResults.of(cache)


def recalls_at(
    scores: NeuronScores, ratio: float, sets: Sequence[NeuronSet], own: int
) -> dict[str, float]:
    """Recall of the target's rows, and of the distractors' (nan where there are none), among the
    top share.
    """
    recalls: dict[str, float] = {}
    others = [one for k, one in enumerate(sets) if k != own]
    tops = {"": scores.top_k(ratio), "_across_layers": scores.top_k(ratio, per="model")}
    for suffix, top in tops.items():
        recalls[f"recall{suffix}"] = top.recall_of(sets[own])
        recalls[f"foreign_recall{suffix}"] = (
            top.recall_of(reduce(or_, others)) if others else math.nan
        )
    return recalls


def ground_truth(
    model: LanguageModel, joint: JointInjection, group: Sequence[MemorizedSequence]
) -> list[Row]:
    """Is each sentence in its own rows, in all of them and nowhere else? One row per sentence.

    Each state stands four times: ``<state>`` is the accuracy as a fraction and ``<state>_loss`` the
    loss in nats per token, where rows that are off are the base model's; ``<state>_zeroed`` and
    ``<state>_zeroed_loss`` where the model has all sets, and the neurons of those that are off are
    ablated. ``all_on``, ``own_alone`` and ``other_off`` (mean over
    the other sets, one off at a time) should recite the sentence; ``own_off`` should be near
    ``untouched``.
    """
    measured = partial(measured_with, model, joint, group)
    own = torch.eye(len(group), dtype=torch.bool)
    untouched = measured(torch.zeros(len(group)))[0].tolist()
    rows: list[Row] = []
    for sequence, injection, right in zip(group, joint.injections, untouched, strict=True):
        unlearned = "" if injection.converged else str(injection.unlearned())
        about = {"sequence_id": sequence.id, "converged": injection.converged}
        rows.append({**about, "unlearned": unlearned, "untouched": right})
    for suffix, zeroed in (("", False), ("_zeroed", True)):
        # [2 sentence set]
        alone = torch.stack([measured(on, zeroed) for on in own], dim=-1)
        without = torch.stack([measured(on, zeroed) for on in ~own], dim=-1)
        own_off = without.diagonal(dim1=1, dim2=2)
        states = {
            "all_on": measured(torch.ones(len(group)), zeroed),
            "own_alone": alone.diagonal(dim1=1, dim2=2),
            "own_off": own_off,
            "other_off": (without.sum(-1) - own_off) / (len(group) - 1),
        }
        for state, values in states.items():
            for row, right, nats in zip(rows, *values.tolist(), strict=True):
                row |= {f"{state}{suffix}": right, f"{state}{suffix}_loss": nats}
    return rows


@torch.no_grad()
def measured_with(
    model: LanguageModel,
    joint: JointInjection,
    group: Sequence[MemorizedSequence],
    on: Shaped[Tensor, " sentence"],
    zeroed: bool = False,
) -> Float[Tensor, "2 sentence"]:
    """Accuracy and loss of each sentence while some sets are on, and the others are the base
    model's rows or zeroed.
    """
    with ExitStack() as stack:
        for injection, is_on in zip(joint.injections, on.tolist(), strict=True):
            if is_on or zeroed:
                stack.enter_context(injection.applied(model))
            if zeroed and not is_on:
                stack.enter_context(injection.neurons.dropped_out(model))
        return torch.stack([accuracy(model, group), memorization_loss(model, group).cpu()])
