"""DEL: ablate the neurons that a method locates for a memorized sequence; is that sequence
forgotten, and only that one?
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from jaxtyping import Integer
from torch import Tensor

from tl_localize.checks import Real, check_choice, check_count, check_seed
from tl_localize.evals.ablation import ABLATIONS, AblationMeter
from tl_localize.evals.deletion.results import DelResults, frame_of, measured
from tl_localize.evals.shared import localized, named, scores_task, with_controls
from tl_localize.execution.run import Benchmark, Methods, Results
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import Json, Plan, Task, closure, described, digest_of
from tl_localize.files import identity
from tl_localize.methods import RandomBaseline
from tl_localize.methods.base import Localizer, Method, label_methods
from tl_localize.metrics import Decode, check_text, decoder
from tl_localize.model.environment import about_model
from tl_localize.model.memory import Report
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores, NeuronSet, rounded_down
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.units import NEURONS, Units

Sets = list[tuple[Json, NeuronSet]]


@dataclass(frozen=True, eq=False, repr=False)
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
    ablation: Literal["zero", "mean", "resample"] = "zero"
    first_layer: int = 1
    seed: int = 0
    decode: Decode | None = None
    units: Units = NEURONS

    def __post_init__(self) -> None:
        view = NeuronView(self.model, self.units)
        check_sequences(self.model, self.sequences)
        check_text(self.model, self.general_tokens, "general_tokens")
        if self.decode is None:
            decoder(self.model)
        check_choice("ablation", self.ablation, ABLATIONS)
        check_seed(self.seed)
        check_count(0, n_dev=self.n_dev, first_layer=self.first_layer)
        if self.n_targets is not None:
            check_count(n_targets=self.n_targets)
        names = [sequence.id for sequence in self.test_sequences]
        if not names:
            raise ValueError(
                f"n_dev must leave at least one of the {len(self.sequences)} sequences for the "
                f"test, got {self.n_dev}. Collect more sequences, or use a smaller dev set."
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"sequences must have different ids, got {twice[:3]} more than once. Give each its "
                "own id."
            )
        if not 0 < len(set(self.ratios)) == len(self.ratios):
            raise ValueError(
                f"ratios must be different fractions, got {self.ratios!r}. Write for example "
                "(0.001, 0.005)."
            )
        blank = NeuronScores(torch.zeros(view.size), units=self.units)
        for ratio in self.ratios:
            self._sets(blank, ratio)  # raises where it selects no neuron

    @abstractmethod
    def _sets(self, scores: NeuronScores, ratio: Real) -> Sets:
        """The sets that are ablated one after the other for a target, and what is said of each."""

    def _inputs(self) -> Json:
        """What the sets depend on, beside scores, ratio and first layer."""
        return {}

    @cached_property
    def test_sequences(self) -> list[MemorizedSequence]:
        """The sequences without the dev ones, each with an id."""
        return named(self.sequences)[self.n_dev :]

    # The plan

    def labelled(self, methods: Sequence[Method]) -> Methods:
        """The methods by label."""
        return label_methods(methods, self.units)

    def plan(self, methods: Sequence[Method], before: Sequence[Plan] = ()) -> Plan:
        labelled, test = self.labelled(methods), self.test_sequences
        data = self._data()
        baseline = Task("baseline", data, label="baseline", name="the model as it is", index=-1)
        # in the form of folders of earlier versions
        ablation = {"class": self.ablation.title()}
        how: Json = {"first_layer": self.first_layer, "ablation": ablation}
        if self.units != NEURONS:
            how["units"] = identity(self.units)
        targets = test[: self.n_targets]
        chunks = {
            label: self._chunks(data["fingerprint"], label, method, before)
            for label, method in labelled.items()
        }
        tasks = [baseline]
        for ratio in self.ratios:
            for index, target in enumerate(targets):
                place: Json = {"name": target.id, "index": index, "ratio": float(ratio)}
                place["weight"] = float(len(test) + len(self.general_tokens))
                for label in labelled:
                    chunk = chunks[label][index]
                    inputs = {"target": index, "place": index - chunk.index, "ratio": ratio}
                    inputs |= {**self._inputs(), **how}
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

    def _data(self) -> Json:
        """What the model as it is depends on."""
        test, text = self.test_sequences, self.general_tokens
        sequences = [
            [s.id, s.category, s.fingerprint, self._decode(s.tokens.tolist())] for s in test
        ]
        return {
            **about_model(self.model),
            "n_sequences": len(test),
            "sequences": digest_of(sequences),
            "general_text": f"{list(text.shape)} {digest_of(text.tolist())}",
        }

    def _chunks(
        self, made_of: str, label: str, method: Method, before: Sequence[Plan]
    ) -> list[Task]:
        """For each target the task that scores it, with others of its chunk.

        Chunks that a folder has stay as they are, though there are more or fewer targets now.
        """
        size, start = getattr(method, "chunk", 1), getattr(method, "first_layer", None)
        check_count(chunk=size)
        if start not in (None, self.first_layer):
            raise ValueError(
                f"first_layer of {label!r} must be {self.first_layer}, as in the benchmark, got "
                f"{start}. Give both the same."
            )
        known: dict[int, int] = {}  # chunks of earlier runs: first target -> how many
        for task in closure(task for plan in before for task in plan.tasks):
            if task.kind == "scores" and task.inputs["method"] == described(method):
                known.setdefault(task.index, len(task.inputs["sequences"]))
        found: list[Task] = []
        n_targets = len(self.test_sequences[: self.n_targets])
        while len(found) < n_targets:
            first = len(found)
            end = min(first + size, n_targets, *(start for start in known if start > first))
            chunk = self.test_sequences[first : first + known.get(first, end - first)]
            name = chunk[0].id if len(chunk) == 1 else f"{chunk[0].id} and {len(chunk) - 1} others"
            prints = [target.fingerprint for target in chunk]
            task = scores_task(made_of, label, method, prints, name=name, index=first)
            found += [task] * len(chunk)
        return found

    # Its tasks

    def compute(self, task: Task, needs: Sequence[Any], methods: Methods, report: Report) -> Any:
        test = self.test_sequences
        if task.kind == "scores":
            chunk = test[task.index : task.index + len(task.inputs["sequences"])]
            return localized(methods[task.label], self.model, chunk, report, self.units)
        before = needs[0]["frame"] if needs else []
        clamp = partial(ABLATIONS[self.ablation], self.general_tokens, self.seed)
        data = (self.model, test, self.general_tokens, clamp, self._decode)
        meter = AblationMeter(*data, before, self.units)
        if task.kind == "baseline":
            return {"frame": meter.before}
        scores = needs[1].of(task.inputs["place"], test[task.index], self.units)
        sets = self._sets(scores, task.inputs["ratio"])
        effects: list[Json] = []
        for i, (about, chosen) in enumerate(sets):
            report(i / len(sets))
            effects.append({**meter.effect(task.index, chosen), **about})
        return {"effects": effects, "ablation": self.ablation}

    @property
    def _decode(self) -> Decode:
        return self.decode or decoder(self.model)


@dataclass(frozen=True, eq=False, repr=False)
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
        n_targets: How many of the test sequences are targets at most, the first ones; all by
            default. All of them are negatives.
        ablation: What an ablated neuron's activation becomes: ``"zero"``, the paper's dropout,
            ``"mean"`` or ``"resample"`` over ``general_tokens``.
        first_layer: Layers below it are spared.
        seed: Of resample ablation and of Random.
        decode: Token ids -> text; the model's tokenizer unless given.
        units: What is scored and ablated; the methods must be of the same. With
            ``AttentionHeads()`` a ratio is a share of a layer's heads.

    Raises:
        ValueError: A ratio that selects no neuron, a dev set that leaves no test sequence, an id
            that occurs twice, tokens that the model can't read.

    >>> results = DelBenchmark(model, few, text, ratios=(0.005,), n_dev=1).run([Activations()])
    >>> sorted(set(results.frame["method"]))
    ['activations', 'random']
    """

    kind = "del"

    def labelled(self, methods: Sequence[Method]) -> Methods:
        random = RandomBaseline(seed=self.seed, units=self.units)
        return with_controls(methods, self.units, random)

    def _sets(self, scores: NeuronScores, ratio: Real) -> Sets:
        return [({}, scores.top_k(ratio, first_layer=self.first_layer, rounding="floor"))]

    def results(self, cache: Cache) -> DelResults:
        return DelResults.of(cache)


@dataclass(frozen=True, eq=False, repr=False)
class SingleLayerStudy(Deletion[pd.DataFrame]):
    """DEL with the neurons of one layer against those of all layers, at equal budget, for methods
    whose scores of a layer mean something without the other layers.

    In each single layer the top N = ratio x d_mlp x (L - first_layer) neurons are ablated (rounded
    down), and ``multiple`` x N. Beside them stands the usual share of every layer from first_layer
    on; there ``layer`` is missing. It reads and fills the results folder of ``DelBenchmark``, which
    has the same scores.

    Source: Chang et al. (2024), arXiv:2311.09060, section 5.4 and A.7.

    Args:
        multiples: Of the budget.

    Returns:
        ``run`` gives a frame: the columns of ``DelResults.frame``, and ``layer`` and ``multiple``.

    Raises:
        ValueError: A learned mask, which is of all layers together; a multiple of the budget that
            is more than a layer has.

    >>> study = SingleLayerStudy(model, few, text, ratios=(0.02,), n_dev=1)
    >>> study.run([Activations()])["layer"].nunique()
    6
    """

    kind = "single_layer"
    _: KW_ONLY
    multiples: tuple[int, ...] = (1, 5)

    def labelled(self, methods: Sequence[Method]) -> Methods:
        view = NeuronView(self.model, self.units)
        for method in methods:
            if isinstance(method, Localizer) and method.chosen_from(view) is not None:
                raise ValueError(
                    f"method must score each layer by itself for single layers, got {method!r}, "
                    "which chooses in all layers together. Use another one."
                )
        return super().labelled(methods)

    def _inputs(self) -> Json:
        return {"multiples": list(self.multiples)}

    def _sets(self, scores: NeuronScores, ratio: Real) -> Sets:
        everywhere = scores.top_k(ratio, first_layer=self.first_layer, rounding="floor")
        sets: Sets = [({"layer": None, "multiple": 1}, everywhere)]
        n_layers, n = scores.values.shape
        budget = rounded_down(ratio, n * (n_layers - self.first_layer))
        for layer in range(n_layers):
            for multiple in self.multiples:
                check_count(multiples=multiple)
                best = scores.top_k(count=multiple * budget).mask
                mask = torch.zeros_like(best)
                mask[layer] = best[layer]
                about = {"layer": layer, "multiple": multiple}
                sets.append((about, NeuronSet(mask, scores.units)))
        return sets

    def results(self, cache: Cache) -> pd.DataFrame:
        return single_layers(cache)


def single_layers(cache: Cache) -> pd.DataFrame:
    """What ``SingleLayerStudy`` has measured so far, of all methods and ratios; empty where nothing
    is measured.
    """
    before, effects = measured(cache, "single_layer")
    if not len(effects):
        return pd.DataFrame()
    about = effects[["layer", "multiple"]].astype({"layer": "Int64"})
    return frame_of(effects, before).join(about)
