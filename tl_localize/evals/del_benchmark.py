"""DEL: ablate the neurons that a method locates for a memorized sequence; is that sequence
forgotten, and only that one?
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Integer
from torch import Tensor

from tl_localize.batching import Report
from tl_localize.evals.ablation import ABLATIONS, Ablation, AblationMeter
from tl_localize.evals.del_results import DelResults
from tl_localize.evals.localize import check_names, localized, scores_task
from tl_localize.execution.engine import Benchmark, Methods, Results
from tl_localize.execution.environment import fingerprint
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import Plan, Task, closure, described, digest_of
from tl_localize.identity import identity
from tl_localize.methods import RandomBaseline
from tl_localize.methods.base import Method, check_methods, label_methods
from tl_localize.metrics import Decode, check_text, decoder
from tl_localize.neurons import (
    LanguageModel,
    NeuronView,
    Real,
    check_count,
    check_seed,
    model_name,
)
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.units import NEURONS, Units


@dataclass(frozen=True, eq=False)
class Deletion(Benchmark[Results]):
    """What DEL and the study of single layers share: the data, scores of targets, and the effect of
    each set of neurons that is ablated.
    """

    kind: ClassVar[str]  # of the tasks whose records make the tables
    model: LanguageModel
    sequences: Sequence[MemorizedSequence]
    general_tokens: Integer[Tensor, "sequence pos"]
    _: KW_ONLY
    ratios: tuple[Real, ...] = (0.001, 0.005)
    n_dev: int = 5
    n_targets: int | None = None
    ablation: str | Ablation = "zero"
    first_layer: int = 1
    seed: int = 0
    decode: Decode | None = None
    batch_tokens: int | None = None
    units: Units = NEURONS

    def __post_init__(self) -> None:
        view = NeuronView(self.model, self.units)
        check_sequences(self.model, self.sequences)
        if self.decode is None:
            decoder(self.model)
        if isinstance(self.ablation, str) and self.ablation not in ABLATIONS:
            raise ValueError(
                f"ablation must be one of {', '.join(ABLATIONS)}, or an Ablation, got "
                f"{self.ablation!r}."
            )
        check_seed(self.seed)
        check_count(0, n_dev=self.n_dev, first_layer=self.first_layer)
        for name in ("n_targets", "batch_tokens"):
            if getattr(self, name) is not None:
                check_count(**{name: getattr(self, name)})
        n_test = len(self.sequences) - self.n_dev
        if n_test < 1:
            raise ValueError(
                f"n_dev must leave at least one of the {len(self.sequences)} sequences for the "
                f"test, got {self.n_dev}. Collect more sequences, or use a smaller dev set."
            )
        if self.n_targets is not None and self.n_targets > n_test:
            raise ValueError(
                f"n_targets must be in [1, {n_test}], the number of test sequences, got "
                f"{self.n_targets}. None is all."
            )
        names = [sequence.id for sequence in self.test_sequences]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"sequences must have different ids, got {twice[:3]} more than once. Give each its "
                "own id."
            )
        check_text(self.model, self.general_tokens, "general_tokens")
        check_shares(self.ratios)
        blank = NeuronScores(torch.zeros(view.n_layers, view.n_neurons), units=self.units)
        for ratio in self.ratios:
            self._sets(blank, ratio)  # raises where it selects no neuron

    @abstractmethod
    def _sets(self, scores: NeuronScores, ratio: Real) -> list[tuple[dict[str, Any], NeuronSet]]:
        """The sets that are ablated one after the other for a target, and what is said of each."""

    def _inputs(self) -> dict[str, Any]:
        """What the sets depend on, beside scores, ratio and first layer."""
        return {}

    @cached_property
    def test_sequences(self) -> list[MemorizedSequence]:
        """The sequences without the dev ones, each with an id."""
        named = [replace(s, id=s.id or f"sequence-{i}") for i, s in enumerate(self.sequences)]
        return named[self.n_dev :]

    # The plan

    def labelled(self, methods: Sequence[Method]) -> Methods:
        """The methods by label."""
        check_methods(methods, self.units)
        return label_methods(methods)

    def plan(self, methods: Sequence[Method], before: Sequence[Plan] = ()) -> Plan:
        labelled, test = self.labelled(methods), self.test_sequences
        check_names(test, labelled)
        data = self._data()
        baseline = Task("baseline", data, label="baseline", name="the model as it is", index=-1)
        how = {"first_layer": self.first_layer, "ablation": described(self._ablation)}
        if self.units != NEURONS:
            how["units"] = identity(self.units)
        targets = test[: self.n_targets]
        scores = {
            label: self._scores(data["fingerprint"], label, method, before)
            for label, method in labelled.items()
        }
        tasks = [baseline]
        for ratio in self.ratios:
            for index, target in enumerate(targets):
                place: dict[str, Any] = {"name": target.id, "index": index, "ratio": float(ratio)}
                for label in labelled:
                    chunk, i = scores[label][index]
                    inputs = {"target": index, "place": i, "ratio": ratio, **self._inputs(), **how}
                    needs = (baseline, chunk)
                    tasks.append(Task(self.kind, inputs, needs, label, **place, group=chunk.key))
        return Plan(
            benchmark="del",
            settings={**data, **how, "seed": self.seed},
            parts=[[target.id, target.fingerprint] for target in targets],
            methods={label: described(method) for label, method in labelled.items()},
            tasks=tasks,
            grows="targets, methods and ratios",
        )

    def _data(self) -> dict[str, Any]:
        """What the model as it is depends on."""
        test, text = self.test_sequences, self.general_tokens
        sequences = [
            [s.id, s.category, s.fingerprint, self._decode(s.tokens.tolist())] for s in test
        ]
        return {
            "model": model_name(self.model),
            "fingerprint": fingerprint(self.model),
            "dtype": str(next(iter(self.model.parameters())).dtype),
            "n_sequences": len(test),
            "sequences": digest_of(sequences),
            "general_text": f"{list(text.shape)} {digest_of(text.tolist())}",
        }

    def _scores(
        self, made_of: str, label: str, method: Method, before: Sequence[Plan]
    ) -> list[tuple[Task, int]]:
        """For each target the task that scores it, and its place in the task's chunk.

        Chunks that a folder has stay as they are, though there are more or fewer targets now.
        """
        size = getattr(method, "chunk", 1)
        check_count(chunk=size)
        known: dict[int, int] = {}  # chunks of earlier runs: first target -> how many
        for task in closure(task for plan in before for task in plan.tasks):
            if task.kind == "scores" and task.inputs["method"] == described(method):
                known.setdefault(task.index, len(task.inputs["sequences"]))
        found: list[tuple[Task, int]] = []
        n_targets = self.n_targets or len(self.test_sequences)
        while (first := len(found)) < n_targets:
            later = [start for start in known if start > first]
            end = min(first + size, n_targets, *later)
            chunk = self.test_sequences[first : first + known.get(first, end - first)]
            name = chunk[0].id if len(chunk) == 1 else f"{chunk[0].id} and {len(chunk) - 1} others"
            prints = [target.fingerprint for target in chunk]
            task = scores_task(made_of, label, method, prints, name=name, index=first)
            found += [(task, place) for place in range(len(chunk))]
        return found

    # Its tasks

    def compute(self, task: Task, needs: Sequence[Any], methods: Methods, report: Report) -> Any:
        if task.kind == "scores":
            chunk = self.test_sequences[task.index : task.index + len(task.inputs["sequences"])]
            return localized(methods[task.label], self.model, chunk, report, self.units)
        meter = AblationMeter(
            self.model,
            self.test_sequences,
            self.general_tokens,
            self._ablation,
            self._decode,
            self.batch_tokens,
            needs[0] if needs else None,
            self.units,
        )
        if task.kind == "baseline":
            return meter.baseline
        index, chunk = task.inputs["target"], needs[1]
        scores = chunk.of(task.inputs["place"], self.test_sequences[index], self.units)
        sets = self._sets(scores, task.inputs["ratio"])
        effects: list[dict[str, Any]] = []
        for i, (about, chosen) in enumerate(sets):
            report(i / len(sets))
            effects.append({**meter.effect(index, chosen), **about})
        unnamed = getattr(self._ablation, "__name__", type(self._ablation).__name__)
        return {"effects": effects, "ablation": getattr(self._ablation, "name", unnamed)}

    @property
    def _ablation(self) -> Ablation:
        if isinstance(self.ablation, str):
            return ABLATIONS[self.ablation](self.general_tokens, self.seed)
        return self.ablation

    @property
    def _decode(self) -> Decode:
        return self.decode or decoder(self.model)


@dataclass(frozen=True, eq=False)
class DelBenchmark(Deletion[DelResults]):
    """What a model forgets when the neurons are ablated that a method holds responsible for one
    sequence.

    Each test sequence is the target once: its neurons, the top ``ratio`` of every layer from
    ``first_layer`` on (rounded down), are ablated at every position, and the model is measured on
    the target (Self), on every other test sequence (Neg), and on general text (Rand-PPL).
    Everything is a forward pass with hooks: no weight is touched. Random is always among the
    methods.

    Source: Chang et al. (2024), arXiv:2311.09060, section 4.2.

    Args:
        sequences: Memorized sequences, the dev ones first.
        general_tokens: [sequence pos] random text for the perplexity, and for the values of mean
            and resample ablation.
        ratios: Shares of each layer that are ablated.
        n_dev: How many of the first sequences were used to choose hyperparameters; they are neither
            targets nor negatives.
        n_targets: How many of the test sequences are targets, the first ones; all by default. All
            of them are negatives.
        ablation: What an ablated neuron's activation becomes: ``"zero"``, the paper's dropout,
            ``"mean"`` or ``"resample"`` over ``general_tokens``, or any ``Ablation``.
        first_layer: Layers below it are spared.
        seed: Of resample ablation and of Random.
        decode: Token ids -> text; the model's tokenizer unless given.
        batch_tokens: Tokens in one forward pass; by default as many as fit.
        units: What is scored and ablated; the methods must be of the same. With
            ``AttentionHeads()`` a ratio is a share of a layer's heads.

    Raises:
        ValueError: A ratio that selects no neuron, a dev set that leaves no test sequence, an id
            that occurs twice, tokens that the model can't read.

    >>> results = DelBenchmark(model, few, text, ratios=(0.005,), n_dev=1).run([Activations()])
    >>> sorted(set(results.frame["method"]))
    ['activations', 'random']
    """

    kind: ClassVar[str] = "del"

    def __repr__(self) -> str:
        ratios = ", ".join(f"{100 * ratio:g} %" for ratio in self.ratios)
        n_test = len(self.test_sequences)
        counts = f"{self.n_targets or n_test} targets among {n_test} sequences"
        shares = f"{ratios} of each layer of {self.units.name}"
        return f"DelBenchmark({model_name(self.model)!r}, {counts}, {shares}, {self.ablation})"

    def labelled(self, methods: Sequence[Method]) -> Methods:
        check_methods(methods, self.units)
        if any(getattr(method, "name", "") == RandomBaseline.name for method in methods):
            return label_methods(methods)
        return label_methods([*methods, RandomBaseline(seed=self.seed, units=self.units)])

    def _sets(self, scores: NeuronScores, ratio: Real) -> list[tuple[dict[str, Any], NeuronSet]]:
        return [({}, scores.top_k(ratio, first_layer=self.first_layer, rounding="floor"))]

    def results(self, cache: Cache) -> DelResults:
        return DelResults.of(cache)


def check_shares(ratios: object) -> None:
    """Raise TypeError or ValueError unless this is a sequence of different shares."""
    advice = "Write for example (0.001, 0.005)."
    if isinstance(ratios, str) or not isinstance(ratios, Sequence):
        raise TypeError(f"ratios must be a sequence of fractions, got {ratios!r}. {advice}")
    if not ratios or len(set(ratios)) < len(ratios):
        raise ValueError(f"ratios must be different fractions, got {ratios}. {advice}")
