"""INJ: write sentences into a few rows of W_out, then ask a method which rows they are.

There are two forms. The paper's: one sentence at a time. It has a shortcut, because training makes
rows longer: RowNorm shows how much of a method's recall row norms alone explain. Ours, with
distractors: several sentences in disjoint rows of one model, each set of rows enough for its
sentence and without effect on the others'. All the rows are altered in the same way, so a method
has to read the sentence to tell which are its rows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial, reduce
from operator import or_
from typing import Literal

import torch

from tl_localize.checks import Real, check_count, check_positive, check_ratio, check_seed
from tl_localize.evals.inj.results import InjResults
from tl_localize.evals.shared import (
    Group,
    check_texts,
    describe_methods,
    draw_groups,
    reporter,
    score,
    scores_of,
    with_controls,
)
from tl_localize.execution.run import Benchmark, Methods
from tl_localize.execution.store import Cell, Json, Lazy, Row, Scope, Settings, Steps, describe
from tl_localize.files import digest
from tl_localize.injection import JointInjection, draw_sets, inject, inject_together
from tl_localize.methods.base import Method
from tl_localize.model.environment import about_model, environment
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, check_ids, check_sequences, with_ids
from tl_localize.units import NEURONS, Units

# Learning rate and steps of an injection by ratio: the paper's up to 2 %. Beyond, each row takes
# part in writing the sentence only if the steps are smaller: at 0.01 rows grow that the sentence
# does not need, and no method that reads the sentence can find them.
INJECTION = {0.002: (0.05, 200), 0.02: (0.01, 200), 1.0: (0.003, 400)}
TOGETHER = (0.005, 1000)  # with distractors
UNFINISHED = {"step": "training"}
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

    Source: Chang et al. (2024), arXiv:2311.09060, section 3.1. Differs: RowNorm and the form with
    distractors are ours.

    Args:
        sequences: the sentences; each is injected and localized whole, with its first token as the
            prefix.
        ratio: share of all rows that one sentence is written into, at most 0.5.
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
        sequences = check_sequences(self.model, self.sequences)
        object.__setattr__(self, "sequences", sequences)  # also of an iterator
        check_ids(sequences)
        if check_ratio("ratio", self.ratio) > 0.5:
            raise ValueError(
                f"ratio must be at most 0.5, as recall is measured among twice as many rows, got "
                f"{self.ratio}. 0.01 is 1 %."
            )
        check_count(0, distractors=self.distractors)
        size = self.distractors + 1
        view = NeuronView(self.model, self.units)
        # raises where the sets can't be drawn
        draw_sets(view, self.ratio, self.seed, size)
        training = self.training
        check_count(max_steps=training.pop("max_steps"))
        check_positive(**training)
        blank = NeuronScores(torch.zeros(view.size), units=self.units)
        for multiple in self.multiples:
            blank.top_k(self.ratio * multiple)  # raises where it selects none, or more than all
        if not self.groups():
            raise ValueError(
                f"distractors must leave at least one group of {size} sentences that begin with "
                f"different tokens, got {self.distractors} for {len(self.sequences)} sentences. "
                f"Give at least {size}, or fewer distractors."
            )
        check_seed(self.seed + len(self.groups()) - 1, bits=32)

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

    @property
    def scope(self) -> str:
        """What the settings of a folder call this injection ratio."""
        return f"{float(self.ratio):g}"

    def label(self, methods: Sequence[Method]) -> Methods:
        """The methods by label; Random and RowNorm are always among them."""
        labelled = with_controls(methods, self.units)
        if self.distractors:
            check_texts(labelled, self.sequences)
        return labelled

    def groups(self, parts: int = 1) -> list[Group]:
        """Each sentence, or each group of sentences that is written together, with its seed and
        name.
        """
        return self._groups

    @cached_property
    def _groups(self) -> list[Group]:
        whole = [sequence.whole for sequence in with_ids(self.sequences)]
        if not self.distractors:
            return [
                Group(sequence.id, self.seed + i, [sequence]) for i, sequence in enumerate(whole)
            ]
        drawn = draw_groups(whole, self.distractors + 1, self.seed)
        return [Group(f"group-{i:02d}", self.seed + i, members) for i, members in enumerate(drawn)]

    def settings(self, methods: Methods) -> Settings:
        fixed: Json = {
            **about_model(self.model),
            "seed": self.seed,
            "distractors": self.distractors,
        }
        fixed["units"] = describe(self.units)
        groups = self.groups()
        parts = [
            [
                group.name,
                digest([[sequence.id, sequence.fingerprint] for sequence in group.sequences]),
            ]
            for group in groups
        ]
        how = {"ratio": float(self.ratio), "multiples": self.multiples, **self.training}
        scope = Scope(how, describe_methods(methods, len(groups)))
        return Settings("inj", fixed, parts, {self.scope: scope}, [environment(self.model)])

    def rows(self, group: Group, methods: Methods, steps: Steps) -> Iterator[Row]:
        """What each method finds of the sentences of a group."""
        injected = self._injection_inputs(group, steps)
        injection = Lazy(lambda: self._injection(group, steps))
        for label, method in methods.items():
            inputs: Json = {"step": "inj", "injection": injected, "multiples": self.multiples}
            inputs |= {"method": describe(method), "version": getattr(method, "version", 0)}
            inputs |= {"label": label, "group": group.name}
            inputs |= {"ids": [sequence.id for sequence in group.sequences]}
            cell = Cell(label, group.name, self.scope)
            yield from steps.rows(
                cell, inputs, partial(self._recalls, group, label, method, injection, steps)
            )

    def _injection_inputs(self, group: Group, steps: Steps) -> Json:
        return {
            "step": "inject",
            "model": steps.agreed["fingerprint"],
            "ratio": float(self.ratio),
            **self.training,
            "units": describe(self.units),
            "together": bool(self.distractors),
            "seed": group.seed,
            "sequences": [sequence.fingerprint for sequence in group.sequences],
        }

    def _injection(self, group: Group, steps: Steps) -> JointInjection:
        inputs = self._injection_inputs(group, steps)
        found = steps.get(inputs, lambda: self._inject(group, steps))
        steps.drop(inputs | UNFINISHED)  # not before the end of the training is written
        return found

    def _inject(self, group: Group, steps: Steps) -> JointInjection:
        """Train the rows of one group. It is trained alone: side by side with others it would
        differ in the last digits.
        """
        how: Json = {**self.training, "ratio": self.ratio, "seed": group.seed, "units": self.units}
        how["progress"] = reporter(steps, f"inject {group.name}")
        if self.distractors:  # hundreds of steps, which on a CPU may take an hour
            unfinished = self._injection_inputs(group, steps) | UNFINISHED
            how |= {"resume": steps.find(unfinished), "keep": partial(steps.keep, unfinished)}
            return inject_together(self.model, group.sequences, **how)
        return JointInjection([inject(self.model, group.sequences[0], **how)])

    def _recalls(
        self,
        group: Group,
        label: str,
        method: Method,
        injection: Lazy[JointInjection],
        steps: Steps,
    ) -> list[Row]:
        """What one method finds of each sentence: recall of its rows, and of the distractors' (nan
        where there are none).
        """
        made_of = {"injection": self._injection_inputs(group, steps)}
        with injection().applied(self.model):
            scored = score(
                method, self.model, group.sequences, steps, made_of=made_of, units=self.units
            )
        injections = injection().injections
        sets = [injected.neurons for injected in injections]
        rows: list[Row] = []
        for k, sequence in enumerate(group.sequences):
            found = scores_of(scored[k])
            others = sets[:k] + sets[k + 1 :]
            for multiple in self.multiples:
                ratio = self.ratio * multiple
                row: Row = {
                    "model": steps.agreed["model"],
                    "sequence_id": sequence.id,
                    "method": label,
                    "injection_ratio": float(self.ratio),
                    "seed": group.seed,
                    "group": group.name,
                    "steps": len(injections[k].losses),
                    "converged": injections[k].converged,
                    "loss": float(injections[k].losses[-1]),
                    "seconds": found.seconds,
                    "ratio": round(ratio, 10),
                    "multiple": multiple,
                }
                for name, per in PLACES.items():
                    top = found.scores.top_k(ratio, per=per)
                    foreign = top.recall_of(reduce(or_, others)) if others else math.nan
                    row[f"recall{name}"] = top.recall_of(sets[k])
                    row[f"foreign_recall{name}"] = foreign
                rows.append(row)
        return rows

    def results(self, steps: Steps) -> InjResults:
        return InjResults.of(steps)
