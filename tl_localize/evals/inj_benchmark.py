"""INJ: write sentences into a few rows of W_out, then ask a method which rows they are.

There are two forms. The paper's: one sentence at a time. It has a shortcut, because training makes
rows longer: RowNorm shows how much of a method's recall row norms alone explain. Ours, with
distractors: several sentences in disjoint rows of one model, each set of rows enough for its
sentence and without effect on the others'. All the rows are altered in the same way, so a method
has to read the sentence to tell which are its rows.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Any, Literal

import torch

from tl_localize.batching import Report
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.localize import (
    ScoredChunk,
    grouped,
    localized,
    named,
    scores_task,
    with_controls,
)
from tl_localize.execution.engine import Benchmark, Methods
from tl_localize.execution.environment import about_model
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import Json, Plan, Task, described
from tl_localize.injection import Injection, JointInjection, draw_sets, inject, inject_together
from tl_localize.methods.base import Method
from tl_localize.neurons import (
    LanguageModel,
    NeuronView,
    Real,
    check_count,
    check_positive,
    check_seed,
)
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.units import NEURONS, Units

Group = list[MemorizedSequence]  # what is written together: a target and its distractors

# Learning rate and steps of an injection by ratio: the paper's up to 2 %. Beyond, each row takes
# part in writing the sentence only if the steps are smaller: at 0.01 rows grow that the sentence
# does not need, and no method that reads the sentence can find them.
INJECTION = {0.002: (0.05, 200), 0.02: (0.01, 200), 1.0: (0.003, 400)}
TOGETHER = (0.005, 1000)  # with distractors
# About as many forward passes as an injection takes, of one sentence; for the progress of a run. A
# step has a backward pass too, which takes about two; together each sentence is in two states.
PASSES_ALONE, PASSES_TOGETHER = 3.0 * 100, 2 * 3.0 * 400
# where the top is taken, by the end of the column's name
PLACES: dict[str, Literal["layer", "model"]] = {"": "layer", "_across_layers": "model"}


@dataclass(frozen=True, eq=False, repr=False)
class InjBenchmark(Benchmark[InjResults]):
    """Recall of the rows into which sentences were injected, among as many neurons that a method
    ranks highest in each layer, and in the model, and among 2 and 5 times as many.

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
        distractors: other sentences in the model, K - 1.
        units: whose rows are trained and looked for. With ``AttentionHeads()`` the ratio is a share
            of all heads, and all rows of W_O that belong to a head are trained, as many as its
            vector has entries.

    Raises:
        ValueError: a ratio that selects no row, a sentence that does not fit the model, or fewer
            sentences than a group takes.

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
    distractors: int = 0
    units: Units = NEURONS

    def __post_init__(self) -> None:
        check_sequences(self.model, self.sequences)
        check_count(0, distractors=self.distractors)
        size = self.distractors + 1
        view = NeuronView(self.model, self.units)
        # raises where the sets can't be drawn
        draw_sets(view, self.ratio, self.seed, size)
        training = self.training
        check_count(max_steps=training.pop("max_steps"))
        check_positive(**training)
        blank = NeuronScores(torch.zeros(view.size), units=self.units)
        for multiple in (1, 2):
            blank.top_k(self.ratio * multiple)  # raises where it selects none, or more than all
        if not self.groups:
            raise ValueError(
                f"distractors must leave at least one group of {size} sentences that begin with "
                f"different tokens, got {self.distractors} for {len(self.sequences)} sentences. "
                f"Give at least {size}, or fewer distractors."
            )
        check_seed(self.seed + len(self.groups) - 1, bits=32)

    @property
    def training(self) -> Json:
        """The settings of ``inject``, with the defaults of this ratio."""
        rate, steps = next(both for largest, both in INJECTION.items() if self.ratio <= largest)
        if self.distractors:
            rate, steps = TOGETHER
        return {
            "learning_rate": rate if self.learning_rate is None else self.learning_rate,
            "max_steps": steps if self.max_steps is None else self.max_steps,
            "stop_loss": self.stop_loss,
        }

    @property
    def multiples(self) -> list[int]:
        """Recall is measured among the top ``ratio * multiple``."""
        return [multiple for multiple in (1, 2, 5) if self.ratio * multiple <= 1]

    def labelled(self, methods: Sequence[Method]) -> Methods:
        """The methods by label; Random and RowNorm are always among them."""
        return with_controls(methods, self.units)

    def plan(self, methods: Sequence[Method], before: Sequence[Plan] = ()) -> Plan:
        labelled = self.labelled(methods)
        about, ratio, training = about_model(self.model), float(self.ratio), self.training
        multiples = [float(multiple) for multiple in self.multiples]
        settings: Json = {"distractors": self.distractors}
        if self.units != NEURONS:
            settings["units"] = described(self.units)
        made_of = about["fingerprint"]
        made = {"model": made_of, **settings, **training, "ratio": self.ratio}
        parts: list[Any] = []
        tasks: list[Task] = []
        for index, group in enumerate(self.groups):
            name = f"group-{index:02d}" if self.distractors else group[0].id
            prints = [one.fingerprint for one in group]
            parts.append([name, [[one.id, one.fingerprint] for one in group]])
            inputs = {**made, "sequences": prints, "seed": self.seed + index}
            place: Json = {"name": name, "index": index, "ratio": ratio}
            passes = PASSES_TOGETHER * len(group) if self.distractors else PASSES_ALONE
            injection = Task("injections", inputs, (), "inject", weight=passes, **place)
            place["group"] = injection.key
            ids = [one.id for one in group]
            for label, method in labelled.items():
                scores = scores_task(made_of, label, method, prints, (injection,), **place)
                own = {"ids": ids, "group": name, "multiples": multiples, "label": label}
                tasks.append(Task("inj", own, (injection, scores), label, **place))
        return Plan(
            benchmark="inj",
            settings={**about, "multiples": multiples, "seed": self.seed, **settings},
            parts=parts,
            methods={label: described(method) for label, method in labelled.items()},
            tasks=tasks,
            scope=f"ratio {ratio:g}",
            scoped={"ratio": ratio, **training},
            grows="sentences, methods and ratios",
        )

    @cached_property
    def groups(self) -> list[Group]:
        """The sentences one by one, or with their distractors: drawn by the seed, no two of a group
        beginning with the same token.
        """
        whole = [sequence.whole for sequence in named(self.sequences)]
        if not self.distractors:
            return [[sequence] for sequence in whole]
        return grouped(whole, self.distractors + 1, self.seed)

    def compute(self, task: Task, needs: Sequence[Any], methods: Methods, report: Report) -> Any:
        group = self.groups[task.index]
        if task.kind == "injections":
            return self.inject(task, report)
        if task.kind == "scores":
            method = methods[task.label]
            with needs[0].applied(self.model):
                return localized(method, self.model, group, report, self.units)
        return self._recalls(task, *needs)

    def inject(self, task: Task, report: Report) -> Injection | JointInjection:
        """Train the rows of one group. It is trained alone: side by side with others it would
        differ in the last digits.
        """
        group, settings = self.groups[task.index], self.training
        settings |= {"ratio": self.ratio, "seed": self.seed + task.index, "units": self.units}
        if self.distractors:
            return inject_together(self.model, group, **settings, progress=report)
        return inject(self.model, group[0], **settings, progress=report)

    def _recalls(
        self, task: Task, injection: Injection | JointInjection, chunk: ScoredChunk
    ) -> Json:
        """What one method found of each sentence: recall of its rows, and of the distractors' (nan
        where there are none).
        """
        group = self.groups[task.index]
        injections = [injection] if isinstance(injection, Injection) else injection.injections
        sets = [one.neurons for one in injections]
        frame: list[Json] = []
        for k, (sequence, one) in enumerate(zip(group, injections, strict=True)):
            scores, others = chunk.of(k, sequence, self.units), sets[:k] + sets[k + 1 :]
            for multiple in self.multiples:
                ratio = self.ratio * multiple
                row: Json = {
                    "sequence_id": sequence.id,
                    "method": task.label,
                    "injection_ratio": self.ratio,
                    "seed": self.seed + task.index,
                    "group": task.name,
                    "steps": len(one.losses),
                    "converged": one.converged,
                    "loss": float(one.losses[-1]),
                    "seconds": chunk.seconds,
                    "ratio": round(ratio, 10),
                    "multiple": multiple,
                }
                for name, per in PLACES.items():
                    top = scores.top_k(ratio, per=per)
                    foreign = top.recall_of(reduce(or_, others)) if others else math.nan
                    row[f"recall{name}"] = top.recall_of(sets[k])
                    row[f"foreign_recall{name}"] = foreign
                frame.append(row)
        return {"frame": frame, "converged": all(one.converged for one in injections)}

    def results(self, cache: Cache) -> InjResults:
        return InjResults.of(cache)
