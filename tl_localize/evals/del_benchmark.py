"""DEL: ablate the neurons that a method locates for a memorized sequence; is that sequence
forgotten, and only that one?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from jaxtyping import Integer
from torch import Tensor

from tl_localize.batching import Report
from tl_localize.evals.ablation import ABLATIONS, Ablation, AblationMeter
from tl_localize.evals.del_results import DelResults
from tl_localize.evals.localize import check_names, localized, scores_task
from tl_localize.execution.engine import Benchmark, Methods, Progress
from tl_localize.execution.environment import fingerprint
from tl_localize.execution.store import Cache, Store
from tl_localize.execution.tasks import Plan, Task, described, digest_of
from tl_localize.methods import METHODS, RandomBaseline
from tl_localize.methods.base import Method, check_methods, label_methods
from tl_localize.metrics import Decode, decoder
from tl_localize.neurons import (
    LanguageModel,
    NeuronView,
    Real,
    as_tensor,
    check_count,
    check_seed,
    model_name,
)
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence, check_sequences, check_tokens
from tl_localize.units import NEURONS, Units


@dataclass(frozen=True, eq=False)
class DelBenchmark(Benchmark[DelResults]):
    """What a model forgets when the neurons are ablated that a method holds responsible for one
    sequence.

    Each test sequence is the target once: its neurons, the top ``ratio`` of every layer from
    ``first_layer`` on (rounded down), are ablated at every position, and the model is measured on
    the target (Self), on every other test sequence (Neg), and on general text (Rand-PPL).
    Everything is a forward pass with hooks: no weight is touched.

    Source: Chang et al. (2024), arXiv:2311.09060, section 4.2.

    Args:
        sequences: memorized sequences, the dev ones first.
        general_tokens: [sequence pos] random text for the perplexity, and for the values of mean
            and resample ablation.
        ratios: shares of each layer that are ablated.
        n_dev: how many of the first sequences were used to choose hyperparameters; they are neither
            targets nor negatives.
        n_targets: how many of the test sequences are targets, the first ones; all by default. All
            of them are negatives.
        ablation: what an ablated neuron's activation becomes: ``"zero"``, the paper's dropout,
            ``"mean"`` or ``"resample"`` over ``general_tokens``, or any ``Ablation``.
        first_layer: layers below it are spared.
        seed: of resample ablation and of Random.
        decode: token ids -> text; the model's tokenizer unless given.
        batch_tokens: tokens in one forward pass; by default as many as fit.
        budget_factors: the budget of all layers, times each of these, is spent in each single layer
            instead (``run_single_layer``).
        units: what is scored and ablated; the methods must be of the same. With
            ``AttentionHeads()`` a ratio is a share of a layer's heads.

    Raises:
        ValueError: a ratio that selects no neuron, a dev set that leaves no test sequence, an id
            that occurs twice, tokens that the model can't read.

    >>> results = DelBenchmark(model, few, text, ratios=(0.005,), n_dev=1).run([Activations()])
    >>> sorted(set(results.frame["method"]))
    ['activations', 'random']
    """

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
    budget_factors: tuple[int, ...] = ()
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
        ratios: Any = self.ratios
        if isinstance(ratios, str) or not isinstance(ratios, Sequence):
            raise TypeError(
                f"ratios must be a sequence of fractions, got {ratios!r}. Write for example "
                "(0.001, 0.005)."
            )
        if not self.ratios or len(set(self.ratios)) < len(self.ratios):
            raise ValueError(
                f"ratios must be different fractions, got {self.ratios}. The paper's are (0.001, "
                "0.005)."
            )
        check_seed(self.seed)
        check_count(0, n_dev=self.n_dev)
        for name in ("n_targets", "batch_tokens"):
            if getattr(self, name) is not None:
                check_count(**{name: getattr(self, name)})
        for factor in self.budget_factors:
            check_count(multiples=factor)
        blank = NeuronScores(torch.zeros(view.n_layers, view.n_neurons), units=self.units)
        for ratio in self.ratios:
            # top_k raises where a ratio or the first layer selects no neuron
            self.chosen(blank, ratio)
            self.budgets(ratio)
        if self.n_dev >= len(self.sequences):
            raise ValueError(
                f"n_dev must leave at least one of the {len(self.sequences)} sequences for the "
                f"test, got {self.n_dev}. "
                "Collect more sequences, or use a smaller dev set."
            )
        n_test = len(self.sequences) - self.n_dev
        if (self.n_targets or 0) > n_test:
            raise ValueError(
                f"n_targets must be in [1, {n_test}], the number of test sequences, got "
                f"{self.n_targets}. None is all."
            )
        names = [sequence.id for sequence in self.test_sequences]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"sequences must have different ids, got {twice[:3]} more than once. Give each its "
                "own id."
            )
        text, n_ctx = as_tensor("general_tokens", self.general_tokens), self.model.cfg.n_ctx
        if text.ndim != 2 or not len(text) or not 2 <= text.shape[1] <= n_ctx:
            raise ValueError(
                f"general_tokens must have the shape [sequence pos] with 2 to n_ctx={n_ctx} "
                f"positions, got {tuple(text.shape)}."
            )
        # minima of unsigned types are not everywhere
        check_tokens(self.model, text.long(), " in general_tokens")
        object.__setattr__(self, "general_tokens", text)

    def __repr__(self) -> str:
        n_test, ratios = (
            len(self.sequences) - self.n_dev,
            ", ".join(f"{100 * ratio:g} %" for ratio in self.ratios),
        )
        counts = f"{self.n_targets or n_test} targets among {n_test} sequences"
        what = "" if self.units == NEURONS else f" of {self.units.name}"
        return f"DelBenchmark({model_name(self.model)!r}, {counts}, {ratios} of each layer{what}, {self.ablation})"

    @cached_property
    def test_sequences(self) -> list[MemorizedSequence]:
        """The sequences without the dev ones, each with an id."""
        return [replace(s, id=s.id or f"sequence-{i}") for i, s in enumerate(self.sequences)][
            self.n_dev :
        ]

    def run_single_layer(
        self,
        method: Method,
        ratio: Real,
        multiples: Sequence[int] = (1, 5),
        store: Store | None = None,
        progress: Progress | None = None,
    ) -> pd.DataFrame:
        """One layer against all layers at equal budget, for a method whose scores of a layer mean
        something without the other layers.

        In each single layer the top N = ratio x d_mlp x (L - first_layer) neurons are ablated
        (rounded down), and ``multiple`` x N. Beside them stands the usual share of every layer from
        first_layer on; there ``layer`` is missing.

        Source: Chang et al. (2024), arXiv:2311.09060, section 5.4 and A.7.

        Returns:
            the columns of ``DelResults.frame``, and ``layer`` and ``multiple``.

        Raises:
            ValueError: a learned mask, which is of all layers together; a multiple of the budget
                that is more than a layer has.
        """
        single = replace(self, ratios=(ratio,), budget_factors=tuple(multiples))
        (label,) = label_methods([method])
        frame = single.run([method], store, progress).single_layer.get(label, pd.DataFrame())
        # a folder may have it at other ratios too
        return frame[frame["ratio"] == ratio].reset_index(drop=True) if len(frame) else frame

    # The plan

    def labelled(self, methods: Sequence[Method]) -> Methods:
        """The methods by label. Random is always among them, except for single layers."""
        check_methods(methods, self.units)
        if self.budget_factors:
            for method in methods:
                check_by_layer(method)
            return label_methods(methods)
        there = any(getattr(method, "name", "") == RandomBaseline.name for method in methods)
        return label_methods(
            [*methods, *([] if there else [RandomBaseline(seed=self.seed, units=self.units)])]
        )

    def plan(self, methods: Sequence[Method]) -> Plan:
        labelled, test = self.labelled(methods), self.test_sequences
        check_names(test, labelled)
        made_of = fingerprint(self.model)
        texts = [[s.id, s.category, s.fingerprint, self._decode(s.tokens.tolist())] for s in test]
        data = {
            "model": model_name(self.model),
            "fingerprint": made_of,
            "n_sequences": len(test),
            "sequences": digest_of(texts),
            "general_text": f"{list(self.general_tokens.shape)} {digest_of(self.general_tokens.tolist())}",
        }
        baseline = Task("baseline", data, label="baseline", name="the model as it is", index=-1)
        targets = test[: self.n_targets]
        scores = {
            label: self._scores(made_of, label, method, targets)
            for label, method in labelled.items()
        }
        how: dict[str, Any] = {
            "first_layer": self.first_layer,
            "ablation": described(self._ablation),
        }
        how |= {} if self.units == NEURONS else {"units": described(self.units)}
        tasks = [baseline]
        for ratio in self.ratios:
            budgets = self.budgets(ratio)
            for index, target in enumerate(targets):
                for label, of_targets in scores.items():
                    chunk, place = of_targets[index]
                    inputs = {
                        "target": index,
                        "place": place,
                        "ratio": ratio,
                        "budgets": budgets,
                        **how,
                    }
                    kind = "single_layer" if self.budget_factors else "del"
                    tasks.append(
                        Task(
                            kind,
                            inputs,
                            (baseline, chunk),
                            label,
                            target.id,
                            index,
                            float(ratio),
                            chunk.key,
                        )
                    )
        return Plan(
            benchmark="del",
            settings={
                **data,
                **how,
                "seed": self.seed,
                "dtype": str(next(iter(self.model.parameters())).dtype),
            },
            parts=[[target.id, target.fingerprint] for target in targets],
            methods={label: described(method) for label, method in labelled.items()},
            tasks=tasks,
            grows="targets, methods and ratios",
        )

    def _scores(
        self, made_of: str, label: str, method: Method, targets: Sequence[MemorizedSequence]
    ) -> list[tuple[Task, int]]:
        """For each target the task that scores it, and its place in the task's chunk."""
        size = getattr(method, "chunk", 1)
        check_count(chunk=size)
        found: list[tuple[Task, int]] = []
        for first in range(0, len(targets), size):
            chunk = targets[first : first + size]
            name = chunk[0].id if len(chunk) == 1 else f"{chunk[0].id} and {len(chunk) - 1} others"
            prints = [target.fingerprint for target in chunk]
            task = scores_task(made_of, label, method, prints, name=name, index=first)
            found += [(task, place) for place in range(len(chunk))]
        return found

    def budgets(self, ratio: Real) -> list[dict[str, Any]]:
        """What is ablated for one target: the ratio of every layer, and multiples of the whole
        budget in each single layer.
        """
        view = NeuronView(self.model, self.units)
        n, n_layers = view.n_neurons, view.n_layers
        budget = math.floor(round(ratio * n * (n_layers - self.first_layer), 6))
        for factor in self.budget_factors:
            if not 1 <= factor * budget <= n:
                raise ValueError(
                    f"multiples must keep multiple * {budget} in [1, {n}], the {self.units.name} "
                    f"of one layer, got {factor}. "
                    "Use a smaller multiple or ratio."
                )
        places = [(layer, factor) for layer in range(n_layers) for factor in self.budget_factors]
        single = [
            {"layer": layer, "multiple": factor, "count": factor * budget}
            for layer, factor in places
        ]
        return [{"layer": None, "multiple": 1, "count": 0}, *single]

    def chosen(
        self, scores: NeuronScores, ratio: Real, layer: int | None = None, count: int = 0
    ) -> NeuronSet:
        """The neurons that are ablated: the ratio of every layer, or the highest-scored of one, of
        which ties go to the lower index.
        """
        if layer is None:
            return scores.top_k(ratio, first_layer=self.first_layer, rounding="floor")
        mask = torch.zeros_like(scores.values, dtype=torch.bool)
        mask[layer, scores.values[layer].argsort(descending=True, stable=True)[:count]] = True
        return NeuronSet(mask, scores.units)

    # Its tasks

    def compute(self, task: Task, needs: Sequence[Any], methods: Methods, report: Report) -> Any:
        if task.kind == "baseline":
            return self._meter().baseline
        if task.kind == "scores":
            chunk = self.test_sequences[task.index : task.index + len(task.inputs["sequences"])]
            return localized(methods[task.label], self.model, chunk, report, self.units)
        baseline, chunk = needs
        meter, index, budgets = self._meter(baseline), task.inputs["target"], task.inputs["budgets"]
        scores = chunk.of(task.inputs["place"], self.test_sequences[index], self.units)
        effects: list[dict[str, Any]] = []
        for i, budget in enumerate(budgets):
            report(i / len(budgets))
            effects.append(
                meter.effect(
                    index,
                    self.chosen(scores, task.inputs["ratio"], budget["layer"], budget["count"]),
                )
            )
        name = getattr(
            self._ablation,
            "name",
            getattr(self._ablation, "__name__", type(self._ablation).__name__),
        )
        return {"effects": effects, "ablation": name}

    def _meter(self, baseline: dict[str, Any] | None = None) -> AblationMeter:
        """The meter that belongs to a baseline; it is kept from task to task, because it keeps what
        no ablation changes.
        """
        meter: AblationMeter | None = self.__dict__.get("_kept")
        if meter is None or baseline is None or meter.baseline is not baseline:
            sequences, text = self.test_sequences, self.general_tokens
            how = (self._ablation, self._decode, self.batch_tokens, baseline, self.units)
            meter = AblationMeter(self.model, sequences, text, *how)
            object.__setattr__(self, "_kept", meter)
        return meter

    def results(self, cache: Cache) -> DelResults:
        return DelResults.of(cache)

    @property
    def _ablation(self) -> Ablation:
        if isinstance(self.ablation, str):
            return ABLATIONS[self.ablation](self.general_tokens, self.seed)
        return self.ablation

    @property
    def _decode(self) -> Decode:
        return self.decode or decoder(self.model)


def check_by_layer(method: Method) -> None:
    """Raise ValueError where the method says that its scores of one layer mean nothing without the
    other layers.
    """
    if not getattr(method, "by_layer", True):
        able = [name for name, kind in METHODS.items() if kind.by_layer]
        raise ValueError(
            f"method must score each layer by itself for single layers, got {method!r}, which "
            "learns all layers together. "
            f"Use one of {', '.join(able)}."
        )
