"""DEL: ablate the neurons that a method locates for a memorized sequence; is that sequence
forgotten, and only that one?
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from jaxtyping import Integer
from torch import Tensor

from tl_localize.checks import Real, check_choice, check_count, check_seed, check_several
from tl_localize.evals.ablation import ABLATIONS, AblationMeter
from tl_localize.evals.deletion.results import CHANGES, DelResults, self_and_others
from tl_localize.evals.shared import (
    Scored,
    check_texts,
    describe_methods,
    score,
    scores_of,
    with_controls,
)
from tl_localize.execution.run import Benchmark, Methods
from tl_localize.execution.store import Cell, Json, Lazy, Row, Scope, Settings, Steps, describe
from tl_localize.files import digest
from tl_localize.methods import RandomBaseline
from tl_localize.methods.base import Localizer, Method
from tl_localize.methods.masks import check_first_layer
from tl_localize.metrics import Decode, check_text
from tl_localize.model.environment import about_model, environment
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import (
    MemorizedSequence,
    check_different,
    check_ids,
    check_sequences,
    decoder_or_ids,
    with_ids,
)
from tl_localize.units import NEURONS, Units

SIDE_BY_SIDE = 16  # targets that a method scores at a time, at most
Sets = list[tuple[Json, NeuronSet]]  # neurons that are ablated, and what is said of them


@dataclass(frozen=True, eq=False, repr=False)
class DelBenchmark(Benchmark[DelResults]):
    """What a model forgets when the neurons are ablated that a method holds responsible for one
    sequence.

    Each test sequence is the target once: its neurons, the top ``ratio`` of every layer from
    ``first_layer`` on (rounded down), are ablated at every position, and the model is measured on
    the target (Self), on every other test sequence (Neg), and on general text (Rand-PPL).
    Everything is a forward pass with hooks: no weight is touched. Random is always among the
    methods.

    Source: Chang et al. (2024), arXiv:2311.09060, section 3.2; of single layers 5.4 and A.10.

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
        first_layer: Layers below it are spared; a model of one layer takes 0.
        seed: Of resample ablation and of Random.
        decode: Token ids -> text; the model's tokenizer unless given. A model without one has
            distances in tokens.
        units: What is scored and ablated; the methods must be of the same. With
            ``AttentionHeads()`` a ratio is a share of a layer's heads.
        layers: ``"all"``, or ``"each"``: single layers against all layers, at equal budget. The
            usual share of every layer stands where ``layer`` is missing; beside it as many neurons,
            the top ones, are ablated in each single layer, and ``multiple`` times as many. The rows
            are ``results.single_layers``. A folder may hold both.
        multiples: Of the budget of a single layer.
        per: What a ratio is a share of: each layer, as in the paper, or with ``"model"`` all layers
            from ``first_layer`` on together, of which the best neurons are ablated wherever they
            lie. A folder holds one of both.

    Raises:
        ValueError: A ratio that selects no neuron, a dev set that leaves no test sequence, an id
            that occurs twice, tokens that the model can't read; with ``layers="each"`` a learned
            mask, which is of all layers together, or a budget that is more than a layer has.

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
    ablation: Literal["zero", "mean", "resample"] = "zero"
    first_layer: int = 1
    seed: int = 0
    decode: Decode | None = None
    units: Units = NEURONS
    layers: Literal["all", "each"] = "all"
    multiples: tuple[int, ...] = (1, 5)
    per: Literal["layer", "model"] = "layer"

    def __post_init__(self) -> None:
        view = NeuronView(self.model, self.units)
        sequences = check_sequences(self.model, self.sequences)
        object.__setattr__(self, "sequences", sequences)  # also of an iterator
        check_text(self.model, self.general_tokens, "general_tokens")
        check_choice("ablation", self.ablation, ABLATIONS)
        check_choice("layers", self.layers, ("all", "each"))
        check_choice("per", self.per, ("layer", "model"))
        if (self.per, self.layers) == ("model", "each"):
            raise ValueError(
                "per must be 'layer' where single layers are ablated, got 'model'. Leave it out."
            )
        check_seed(self.seed)
        check_count(0, n_dev=self.n_dev, first_layer=self.first_layer)
        check_first_layer(view, self.first_layer)
        check_several(ratios=self.ratios, multiples=self.multiples)
        for multiple in self.multiples:
            check_count(multiples=multiple)
        if not 0 < len(set(self.multiples)) == len(self.multiples):
            raise ValueError(
                f"multiples must be different counts, got {self.multiples}. Write for example "
                "(1, 5)."
            )
        if self.n_targets is not None:
            check_count(n_targets=self.n_targets)
        if not self.test_sequences:
            raise ValueError(
                f"n_dev must leave at least one of the {len(self.sequences)} sequences for the "
                f"test, got {self.n_dev}. Collect more sequences, or use a smaller dev set."
            )
        check_ids(self.test_sequences)
        check_different(self.test_sequences)
        blank = NeuronScores(torch.zeros(view.size), units=self.units)
        for ratio in self.ratios:
            self._sets(blank, ratio)  # raises where it selects no neuron
        if not 0 < len({self._scope(ratio) for ratio in self.ratios}) == len(self.ratios):
            raise ValueError(
                f"ratios must be fractions that differ in six digits, got {self.ratios!r}. Write "
                "for example (0.001, 0.005)."
            )

    @cached_property
    def test_sequences(self) -> list[MemorizedSequence]:
        """The sequences without the dev ones, each with an id."""
        return with_ids(self.sequences)[self.n_dev :]

    @property
    def targets(self) -> list[MemorizedSequence]:
        return self.test_sequences[: self.n_targets]

    def groups(self, parts: int = 1) -> list[range]:
        """Numbers of targets that are scored side by side."""
        n = len(self.targets)
        count = min(n, max(parts, math.ceil(n / SIDE_BY_SIDE)))
        return [range(i * n // count, (i + 1) * n // count) for i in range(count)]

    def label(self, methods: Sequence[Method]) -> Methods:
        """The methods by label; Random is always among them."""
        random = RandomBaseline(seed=self.seed, units=self.units)
        labelled = with_controls(methods, self.units, random, first_layer=self.first_layer)
        check_texts(labelled, self.test_sequences)
        view = NeuronView(self.model, self.units)
        for method in labelled.values():
            of_all = isinstance(method, Localizer) and method.chosen_from(view) is not None
            if self.layers == "each" and of_all:
                raise ValueError(
                    f"method must score each layer by itself for single layers, got {method!r}, "
                    "which chooses in all layers together. Use another one."
                )
        return labelled

    def settings(self, methods: Methods) -> Settings:
        test = self.test_sequences
        sequences = [
            [target.id, target.category, target.fingerprint, self._decode(target.tokens.tolist())]
            for target in test
        ]
        settings: Json = {
            **about_model(self.model),
            "n_sequences": len(test),
            "sequences": digest(sequences),
            "general_text": digest(self.general_tokens),
            "first_layer": self.first_layer,
            "ablation": self.ablation,
            "seed": self.seed,
            "units": describe(self.units),
        }
        if self.per == "model":
            settings["per"] = self.per
        scopes: dict[str, Scope] = {}
        for ratio in self.ratios:
            how: Json = {"ratio": float(ratio), "layers": self.layers}
            if self.layers == "each":
                how["multiples"] = list(self.multiples)
            scopes[self._scope(ratio)] = Scope(how, describe_methods(methods, len(self.targets)))
        parts = [[target.id, target.fingerprint] for target in self.targets]
        return Settings("del", settings, parts, scopes, [environment(self.model)])

    def _scope(self, ratio: Real) -> str:
        """What the settings of a folder call a ratio."""
        name = f"{float(ratio):g}"
        return name if self.layers == "all" else f"{name} of each layer alone"

    def rows(self, group: range, methods: Methods, steps: Steps) -> Iterator[Row]:
        """What the ablation of each target's neurons changes, method by method."""
        meter = Lazy(lambda: self._meter(steps))
        for label, method in methods.items():
            missing = [index for index in group if self._lacks_rows(index, label, method, steps)]
            scored = Lazy(partial(self._scores, missing, method, steps))
            for ratio in self.ratios:
                for index in group:
                    cell = self._cell(index, label, ratio)
                    compute = partial(self._measure, index, ratio, label, scored, meter, steps)
                    yield from steps.rows(cell, self._inputs(cell, method, steps), compute)

    def _cell(self, index: int, label: str, ratio: Real) -> Cell:
        return Cell(label, self.test_sequences[index].id, self._scope(ratio))

    def _lacks_rows(self, index: int, label: str, method: Method, steps: Steps) -> bool:
        cells = [self._cell(index, label, ratio) for ratio in self.ratios]
        return any(steps.find(self._inputs(cell, method, steps)) is None for cell in cells)

    def _inputs(self, cell: Cell, method: Method, steps: Steps) -> Json:
        return {
            "step": "del",
            **steps.agreed,
            **vars(cell),
            "multiples": list(self.multiples) if self.layers == "each" else [],
            "what": describe(method),
            "version": getattr(method, "version", 0),
        }

    def _scores(
        self, indices: Sequence[int], method: Method, steps: Steps
    ) -> Mapping[int, Scored | Exception]:
        """The scores of some targets, by their number."""
        targets = [self.test_sequences[index] for index in indices]
        made_of = {"model": steps.agreed["fingerprint"]}
        found = score(method, self.model, targets, steps, made_of=made_of, units=self.units)
        return dict(zip(indices, found, strict=True))

    def _meter(self, steps: Steps) -> AblationMeter:
        """What measures the effect of an ablation, with the model as it is."""
        clamp = partial(ABLATIONS[self.ablation], self.general_tokens, self.seed)
        data = (self.model, self.test_sequences, self.general_tokens, clamp, self._decode)
        inputs: Json = {"step": "before"} | {name: steps.agreed[name] for name in BEFORE}
        before = steps.get(inputs, lambda: AblationMeter(*data, units=self.units).before)
        return AblationMeter(*data, before, self.units)

    def _measure(
        self,
        index: int,
        ratio: Real,
        label: str,
        scored: Lazy[Mapping[int, Scored | Exception]],
        meter: Lazy[AblationMeter],
        steps: Steps,
    ) -> list[Row]:
        """The rows of one target at one ratio."""
        found = scores_of(scored()[index])
        target = self.test_sequences[index]
        rows: list[Row] = []
        for about, chosen in self._sets(found.scores, ratio):
            row: Row = {
                "model": steps.agreed["model"],
                "sequence_id": target.id,
                "category": target.category,
                "method": label,
                "ratio": float(ratio),
                "ablation": self.ablation,
                "n_neurons": len(chosen),
            }
            if self.per == "model":
                row["per"] = self.per
            effect = meter().effect(index, chosen)
            row["n_layers"] = effect["n_layers"]
            rows.append({**row, **about, **self_and_others(index, effect, meter().before)})
            rows[-1] |= {"seconds": found.seconds, CHANGES: effect["accuracy"]}
        return rows

    def _sets(self, scores: NeuronScores, ratio: Real) -> Sets:
        """The sets that are ablated one after the other for a target, and what is said of each."""
        everywhere = scores.top_k(
            ratio, per=self.per, first_layer=self.first_layer, rounding="floor"
        )
        if self.layers == "all":
            return [({}, everywhere)]
        sets: Sets = [({"layer": None, "multiple": 1}, everywhere)]
        for layer in range(len(scores.values)):
            for multiple in self.multiples:
                best = scores.top_k(count=multiple * len(everywhere)).mask
                mask = torch.zeros_like(best)
                mask[layer] = best[layer]
                about = {"layer": layer, "multiple": multiple}
                sets.append((about, NeuronSet(mask, scores.units)))
        return sets

    @property
    def _decode(self) -> Decode:
        return self.decode or decoder_or_ids(self.model)

    def results(self, steps: Steps) -> DelResults:
        if steps.done():
            self._meter(steps)  # measures the model as it is again where that file was damaged
        return DelResults.of(steps)


# what the model as it is depends on
BEFORE = ("model", "fingerprint", "dtype", "sequences", "general_text")
