"""DEL: silence the neurons that a method locates for a memorized sequence; is that sequence forgotten, and only that one?"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.batching import bytes_to_keep, halving, tokens_that_fit
from tl_localize.execution.store import digest_of, environment, prepare_folder, write_json, write_text
from tl_localize.losses import unembed
from tl_localize.methods import METHODS, RandomBaseline
from tl_localize.methods.base import Method, Progress, check_methods, check_scores, label_methods
from tl_localize.metrics import Decode, decoder
from tl_localize.neurons import LanguageModel, NeuronView, Real, as_tensor, model_name
from tl_localize.scores import NeuronScores, NeuronSet, check_ratio, load_tensors, save_tensors
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences
from tl_localize.stats import compare_with_reference, mean_and_error, paired_test, styled, summarize, with_error

INTERVENTIONS = ("zero", "mean", "resample")

METRICS: dict[str, tuple[str, int, int]] = {  # column: title, factor, decimals
    "delta_self_accuracy": ("Δ Self-Acc (points)", 100, 1),
    "delta_self_levenshtein": ("Δ Self-Dist (characters)", 1, 1),
    "delta_neg_accuracy": ("Δ Neg-Acc (points)", 100, 1),
    "delta_neg_levenshtein": ("Δ Neg-Dist (characters)", 1, 1),
    "delta_perplexity": ("Δ Rand-PPL", 1, 2),
    "delta_perplexity_base2": ("Δ Rand-PPL (2 ** nats)", 1, 2),
}


@dataclass(frozen=True)
class Share:
    """What is silenced: the ratio of every layer, or so many neurons of one."""

    layer: int | None
    multiple: int
    count: int = 0


EVERY_LAYER = Share(None, 1)


@dataclass(frozen=True, eq=False)
class DelBenchmark:
    """What a model forgets when the neurons are silenced that a method holds responsible for one sequence.

    Each test sequence is the target once: its neurons, the top ``ratio`` of every layer from ``first_layer`` on (rounded down), are
    silenced at every position, and the model is measured on the target (Self), on every other test sequence (Neg), and on general text
    (Rand-PPL). Everything is a forward pass with hooks: no weight is touched.

    Source: Chang et al. (2024), arXiv:2311.09060, section 4.2.
    Args:
        sequences: memorized sequences, the dev ones first.
        general_tokens: [sequence pos] random text for the perplexity, and for the values of mean and resample ablation.
        ratios: shares of each layer that are silenced.
        n_dev: how many of the first sequences were used to choose hyperparameters; they are neither targets nor negatives.
        n_targets: how many of the test sequences are targets, the first ones; all by default. All of them are negatives.
        intervention: what a silenced neuron's activation becomes. ``"zero"`` is the paper's dropout; ``"mean"`` is its mean over general
            text; ``"resample"`` is what it was at one random position of general text, one position for each target, the same for all
            neurons, methods and ratios. The first position of a text, which has no context, counts in neither.
        first_layer: layers below it are spared.
        seed: of the resampled positions and of Random.
        decode: token ids -> text; the model's tokenizer unless given.
        batch_tokens: tokens in one forward pass; by default as many as fit.
    Raises:
        ValueError: a ratio that selects no neuron, a dev set that leaves no test sequence, an id that occurs twice, tokens that the model
            can't read.

    >>> from tl_localize import Activations, DelBenchmark, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> from tl_localize.reference import held_out_tokens
    >>> few = reference_sequences(model)[:3]
    >>> results = DelBenchmark(model, few, held_out_tokens()[:2], ratios=(0.005,), n_dev=1).run([Activations()])
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
    intervention: Literal["zero", "mean", "resample"] = "zero"
    first_layer: int = 1
    seed: int = 0
    decode: Decode | None = None
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        view = NeuronView(self.model)
        check_sequences(self.model, self.sequences)
        if self.decode is None:
            decoder(self.model)
        if self.intervention not in INTERVENTIONS:
            raise ValueError(f"intervention must be one of {INTERVENTIONS}, got {self.intervention!r}.")
        if not 0 <= self.first_layer < view.n_layers:
            raise ValueError(f"first_layer must be in [0, {view.n_layers}), got {self.first_layer}. The paper spares layer 0, with 1.")
        ratios: Any = self.ratios
        if isinstance(ratios, str) or not isinstance(ratios, Sequence):
            raise TypeError(f"ratios must be a sequence of fractions, got {ratios!r}. Write for example (0.001, 0.005).")
        if not self.ratios or len(set(self.ratios)) < len(self.ratios):
            raise ValueError(f"ratios must be different fractions, got {self.ratios}. The paper's are (0.001, 0.005).")
        for ratio in self.ratios:
            check_selects(ratio, view.n_neurons)
        if not 0 <= self.n_dev < len(self.sequences):
            raise ValueError(
                f"n_dev must leave at least one of the {len(self.sequences)} sequences for the test, got {self.n_dev}. "
                "Collect more sequences, or use a smaller dev set."
            )
        n_test = len(self.sequences) - self.n_dev
        if self.n_targets is not None and not 1 <= self.n_targets <= n_test:
            raise ValueError(f"n_targets must be in [1, {n_test}], the number of test sequences, got {self.n_targets}.")
        names = [sequence.id for sequence in self.test_sequences()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"sequences must have different ids, got {twice[:3]} more than once. Give each its own id.")
        object.__setattr__(self, "general_tokens", as_tensor("general_tokens", self.general_tokens))
        check_general_tokens(self.model, self.general_tokens)

    def __repr__(self) -> str:
        n_test, ratios = len(self.sequences) - self.n_dev, ", ".join(f"{100 * ratio:g} %" for ratio in self.ratios)
        counts = f"{self.n_targets or n_test} targets among {n_test} sequences"
        return f"DelBenchmark({model_name(self.model)!r}, {counts}, {ratios} of each layer, {self.intervention})"

    def test_sequences(self) -> list[MemorizedSequence]:
        """The sequences without the dev ones, each with an id."""
        return [replace(s, id=s.id or f"sequence-{i}") for i, s in enumerate(self.sequences)][self.n_dev :]

    def run(self, methods: Sequence[Method], progress: Progress | None = None) -> DelResults:
        """Locate, silence and measure for every target, method and ratio. Random is always among the methods.

        Args:
            methods: anything that maps (model, sequence) to NeuronScores; its ``map`` is used where it has one.
            progress: called with the fraction done and what is being done.
        """
        labels = label_methods(self.with_random(methods))
        evaluation = Evaluation(self)
        effects: dict[tuple[str, float], list[Effect]] = {(label, ratio): [] for label in labels for ratio in self.ratios}
        for i, (label, method) in enumerate(labels.items()):
            for target, scores in self._scored(method, evaluation, part_of(progress, i, len(labels), label)):
                for ratio in self.ratios:
                    effects[label, ratio].append(evaluation.effect(target, self.chosen(scores, ratio)))
        if progress:
            progress(1.0, "done")
        return DelResults.of(evaluation.before.frame, effects, self.intervention, self.settings(methods))

    def run_single_layer(
        self, method: Method, ratio: Real, multiples: Sequence[int] = (1, 5), progress: Progress | None = None
    ) -> pd.DataFrame:
        """One layer against all layers at equal budget, for a method whose scores of a layer mean something without the other layers.

        In each single layer the top N = ratio x d_mlp x (L - first_layer) neurons are silenced (rounded down), and ``multiple`` x N. Beside
        them stands the usual share of every layer from first_layer on; there ``layer`` is missing.

        Source: Chang et al. (2024), arXiv:2311.09060, section 5.4 and A.7.
        Returns: the columns of ``DelResults.frame``, and ``layer`` and ``multiple``.
        Raises:  ValueError: a learned mask, which is of all layers together; a multiple of the budget that is more than a layer has.
        """
        check_by_layer(method)
        shares = self.shares(ratio, multiples)
        (label,) = label_methods([method])
        evaluation = Evaluation(self)
        found: list[tuple[Effect, Share]] = []
        for target, scores in self._scored(method, evaluation, part_of(progress, 0, 1, label)):
            found += [(evaluation.effect(target, self.chosen(scores, ratio, share)), share) for share in shares]
        if progress:
            progress(1.0, "done")
        return single_layer_frame(evaluation.before.frame, found, self.intervention, label, ratio)

    # The steps of a run. Each depends on its arguments alone, so that they can be done in any order, on any machine, and be kept.

    def shares(self, ratio: Real, multiples: Sequence[int] = ()) -> list[Share]:
        """What is silenced for one target: the ratio of every layer, and multiples of the whole budget in each single layer."""
        n, n_layers = self.model.cfg.d_mlp, self.model.cfg.n_layers
        check_selects(ratio, n)
        budget = math.floor(round(ratio * n * (n_layers - self.first_layer), 6))
        for multiple in multiples:
            if not 1 <= multiple * budget <= n:
                raise ValueError(
                    f"multiples must keep multiple * {budget} in [1, {n}], the neurons of one layer, got {multiple}. "
                    "Use a smaller multiple or ratio."
                )
        return [EVERY_LAYER, *(Share(layer, m, m * budget) for layer in range(n_layers) for m in multiples)]

    def chosen(self, scores: NeuronScores, ratio: Real, share: Share = EVERY_LAYER) -> NeuronSet:
        """The neurons that are silenced."""
        if share.layer is None:
            return scores.top_k(ratio, first_layer=self.first_layer, rounding="floor")
        return top_of_layer(scores, share.layer, share.count)

    def settings(self, methods: Sequence[Method]) -> dict[str, Any]:
        """Everything that the numbers depend on."""
        test = self.test_sequences()
        described = [[s.id, s.category, s.fingerprint, self.text_of(s)] for s in test]
        return {
            "benchmark": "del",
            "ratios": list(self.ratios),
            "first_layer": self.first_layer,
            "intervention": self.intervention,
            "seed": self.seed,
            "n_dev": self.n_dev,
            "n_sequences": len(test),
            "sequences": digest_of(described),
            "general_text": f"{list(self.general_tokens.shape)} {digest_of(self.general_tokens.tolist())}",
            "parts": [[sequence.id, sequence.fingerprint] for sequence in test[: self.n_targets]],
            "methods": {label: repr(method) for label, method in label_methods(self.with_random(methods)).items()},
            "environment": environment(self.model),
        }

    def with_random(self, methods: Sequence[Method]) -> list[Method]:
        """The methods, with Random added where it is missing."""
        check_methods(methods)
        there = any(getattr(method, "name", "") == RandomBaseline.name for method in methods)
        return [*methods, *([] if there else [RandomBaseline(seed=self.seed)])]

    def text_of(self, sequence: MemorizedSequence) -> str:
        """Prefix and suffix as text."""
        return (self.decode or decoder(self.model))(sequence.tokens.tolist())

    def _scored(self, method: Method, evaluation: Evaluation, report: Callable[[float], None]) -> Iterator[tuple[int, NeuronScores]]:
        """Targets and their scores."""
        targets = evaluation.sequences[: self.n_targets]
        localized = done = 0.0  # half of the progress is localization, half what is done with the scores

        def show(fraction: float) -> None:
            nonlocal localized
            localized = fraction
            report((localized + done) / 2)

        side_by_side: Any = getattr(method, "map", None)
        alone = (method(self.model, target) for target in targets)
        scores: Iterator[NeuronScores] = iter(side_by_side(self.model, targets, progress=show)) if side_by_side else alone
        for target, found in enumerate(scores):
            yield target, check_scores(found, self.model, method)
            done = (target + 1) / len(targets)
            show(max(localized, done))


@dataclass(frozen=True, eq=False)
class Before:
    """The model as it is.

    Args:
        frame: ``DelResults.before``.
        predicted: teacher-forced argmax of each suffix.
    """

    frame: pd.DataFrame
    predicted: list[list[int]]


class Evaluation:
    """Measures one model with neurons silenced; what does not depend on the neurons is done once.

    That is the model as it is, and the residual stream below the first layer with a silenced neuron, which is kept as far as memory
    allows. Each set of neurons is silenced alone, in full batches of its own, so that no number depends on which others were measured
    before.

    Args:
        before: the model as it is; measured now unless given.
    """

    def __init__(self, benchmark: DelBenchmark, before: Before | None = None) -> None:
        self.benchmark = benchmark
        self.model = benchmark.model
        self.view = NeuronView(benchmark.model)
        self.sequences = benchmark.test_sequences()
        self.general_tokens = benchmark.general_tokens
        self.tokens = benchmark.batch_tokens or tokens_that_fit(self.view)
        self.room = bytes_to_keep(self.view)
        self.kept: dict[tuple[str, int, int, int], Tensor] = {}  # what, first row, rows, layer -> the residual stream that enters it
        self.decode = benchmark.decode or decoder(benchmark.model)
        self.truth = [sequence.suffix.numpy() for sequence in self.sequences]
        self.texts = [benchmark.text_of(sequence) for sequence in self.sequences]
        self.means = self._means() if benchmark.intervention == "mean" else None
        self.before = before or self._before()
        self.predicted = [np.array(guess) for guess in self.before.predicted]
        self.accuracy, self.levenshtein = (self.before.frame[name].to_numpy() for name in ("accuracy", "levenshtein"))
        self.perplexity, self.perplexity_base2 = (float(self.before.frame[name].iloc[0]) for name in ("perplexity", "perplexity_base2"))

    def effect(self, target: int, chosen: NeuronSet) -> Effect:
        """What a set of neurons changes when it is silenced for its target."""
        values = self._values(target)
        predicted = self._predictions(chosen, values)
        accuracy, levenshtein = np.zeros(len(predicted)), np.zeros(len(predicted))
        for i, (guess, old, truth) in enumerate(zip(predicted, self.predicted, self.truth, strict=True)):
            if not np.array_equal(guess, old):  # most stay as they were, and need no decoding
                accuracy[i] = np.mean(guess == truth) - self.accuracy[i]
                levenshtein[i] = self._distance(i, guess) - self.levenshtein[i]
        perplexity, base2 = perplexities(self._losses(chosen, values))
        return Effect(target, len(chosen), accuracy, levenshtein, perplexity - self.perplexity, base2 - self.perplexity_base2)

    def _before(self) -> Before:
        untouched = NeuronSet(torch.zeros(self.view.n_layers, self.view.n_neurons, dtype=torch.bool))
        values = torch.zeros(self.view.n_layers, self.view.n_neurons)
        predicted = self._predictions(untouched, values)
        perplexity, perplexity_base2 = perplexities(self._losses(untouched, values))
        prefixes = [self.decode(sequence.prefix.tolist()) for sequence in self.sequences]
        suffixes = [text[len(prefix) :] for prefix, text in zip(prefixes, self.texts, strict=True)]
        frame = pd.DataFrame(
            {
                "model": model_name(self.model),
                "sequence_id": [sequence.id for sequence in self.sequences],
                "category": [sequence.category for sequence in self.sequences],
                "prefix": prefixes,
                "suffix": suffixes,
                "accuracy": [float(np.mean(guess == truth)) for guess, truth in zip(predicted, self.truth, strict=True)],
                "levenshtein": [float(self._distance(i, guess)) for i, guess in enumerate(predicted)],
                "length": [len(text) - len(prefix) for prefix, text in zip(prefixes, self.texts, strict=True)],
                "perplexity": perplexity,
                "perplexity_base2": perplexity_base2,
            }
        )
        return Before(frame, [guess.tolist() for guess in predicted])

    def _distance(self, index: int, predicted: Integer[np.ndarray, " suffix"]) -> int:
        """Characters between the text with the predicted suffix and the true one, as ``metrics.levenshtein`` counts them."""
        return Levenshtein.distance(self.decode([*self.sequences[index].prefix.tolist(), *predicted.tolist()]), self.texts[index])

    # Forward passes

    @torch.no_grad()
    def _predictions(self, chosen: NeuronSet, values: Float[Tensor, "layer neuron"]) -> list[np.ndarray]:
        """Teacher-forced argmax of each suffix, for each test sequence."""

        def predict(rows: list[int]) -> list[np.ndarray]:
            batch = SequenceBatch.of([self.sequences[row] for row in rows], self.view.device)
            resid = self._silenced("sequences", rows, batch.tokens, chosen, values)
            predicted = unembed(self.model, resid[batch.rows, batch.positions]).argmax(-1).cpu().numpy()
            return np.split(predicted, np.cumsum([len(self.truth[row]) for row in rows])[:-1])

        size = max(1, self.tokens // max(map(len, self.sequences)))
        return [guess for _, part in halving(predict, range(len(self.sequences)), size) for guess in part]

    @torch.no_grad()
    def _losses(self, chosen: NeuronSet, values: Float[Tensor, "layer neuron"]) -> Float[np.ndarray, " sequence"]:
        """Nats per token of each sequence of general text."""

        def losses(rows: list[int]) -> Float[Tensor, " batch"]:
            tokens = self._general(rows)
            logits = unembed(self.model, self._silenced("general text", rows, tokens, chosen, values)[:, :-1])
            targets = tokens[:, 1:]
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(-1).cpu()

        size = max(1, self.tokens // self.general_tokens.shape[1])
        found = torch.cat([loss for _, loss in halving(losses, range(len(self.general_tokens)), size)]).double().numpy()
        if not np.isfinite(found).all():
            raise ValueError("loss on general_tokens must be finite, got one that is not. Use float32, or silence fewer neurons.")
        return found

    def _silenced(
        self, what: str, rows: list[int], tokens: Int[Tensor, "batch pos"], chosen: NeuronSet, values: Float[Tensor, "layer neuron"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The final residual stream of consecutive rows while a set of neurons is held at these values."""
        n_layers = self.view.n_layers
        first = int(chosen.mask.any(-1).int().argmax()) if len(chosen) else n_layers
        with self.view.one_gelu_kernel(), self.view.clamped(chosen.mask, values):
            if self.model.cfg.positional_embedding_type == "shortformer":  # its position vectors enter every layer
                return self.model(tokens, stop_at_layer=n_layers, padding_side="right")
            key = (what, rows[0], len(rows), first)
            entering = self.kept.get(key)
            if entering is None:
                entering = self.model(tokens, stop_at_layer=first, padding_side="right")
                if first < n_layers and entering.nbytes <= self.room:
                    self.kept[key] = entering
                    self.room -= entering.nbytes
            return self.model(entering, start_at_layer=first, stop_at_layer=n_layers, padding_side="right")

    # What silenced neurons become

    def _values(self, target: int) -> Float[Tensor, "layer neuron"]:
        """Activations of silenced neurons."""
        if self.means is not None:
            return self.means
        if self.benchmark.intervention == "zero":
            return torch.zeros(self.view.n_layers, self.view.n_neurons)
        return self._resampled(target)

    def _means(self) -> Float[Tensor, "layer neuron"]:
        """Mean activation over general text, its first positions left out."""

        def total(rows: list[int]) -> Tensor:
            acts = self._activations(rows)
            return torch.stack([acts[layer][:, 1:].double().sum((0, 1)).cpu() for layer in range(self.view.n_layers)])

        n, length = self.general_tokens.shape
        sums = [part for _, part in halving(total, range(n), max(1, self.tokens // length))]
        return (torch.stack(sums).sum(0) / (n * (length - 1))).float()

    def _resampled(self, target: int) -> Float[Tensor, "layer neuron"]:
        """Activations at the random position of general text that belongs to a target."""
        n, length = self.general_tokens.shape
        row, position = divmod(int(np.random.default_rng([self.benchmark.seed, target]).integers(n * (length - 1))), length - 1)
        acts = self._activations([row])
        return torch.stack([acts[layer][0, position + 1].float().cpu() for layer in range(self.view.n_layers)])

    @torch.no_grad()
    def _activations(self, rows: list[int]) -> dict[int, Tensor]:
        with self.view.recorded() as acts:
            self.model(self._general(rows), stop_at_layer=self.view.n_layers, padding_side="right")
        return acts

    def _general(self, rows: list[int]) -> Int[Tensor, "batch pos"]:
        """Consecutive rows of the general text."""
        return self.general_tokens[rows[0] : rows[-1] + 1].long().to(self.view.device)


@dataclass(frozen=True, eq=False)
class Effect:
    """What changes when the neurons of a target are silenced: after minus before."""

    target: int
    n_neurons: int
    accuracy: Float[np.ndarray, " sequence"]
    levenshtein: Float[np.ndarray, " sequence"]
    perplexity: float
    perplexity_base2: float

    def packed(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**vars(self), "accuracy": self.accuracy.tolist(), "levenshtein": self.levenshtein.tolist()}

    @classmethod
    def unpacked(cls, record: dict[str, Any]) -> Effect:
        """What ``packed`` gave."""
        arrays: dict[str, Any] = {name: np.array(record[name]) for name in ("accuracy", "levenshtein")}
        return cls(**{**record, **arrays})

    def row(self, before: pd.DataFrame, intervention: str) -> dict[str, Any]:
        """A row of the frame, without method and ratio."""
        i = self.target
        columns: dict[str, Any] = {name: before[name].to_numpy() for name in before.columns}
        return {
            **{name: columns[name][i] for name in ("model", "sequence_id", "category")},
            "intervention": intervention,
            "n_neurons": self.n_neurons,
            "delta_self_accuracy": float(self.accuracy[i]),
            "delta_self_levenshtein": float(self.levenshtein[i]),
            "delta_neg_accuracy": mean_of_others(self.accuracy, i),
            "delta_neg_levenshtein": mean_of_others(self.levenshtein, i),
            "delta_perplexity": self.perplexity,
            "delta_perplexity_base2": self.perplexity_base2,
            "self_accuracy_before": float(columns["accuracy"][i]),
            "self_levenshtein_before": float(columns["levenshtein"][i]),
            "neg_accuracy_before": mean_of_others(columns["accuracy"], i),
            "neg_levenshtein_before": mean_of_others(columns["levenshtein"], i),
            "perplexity_before": float(columns["perplexity"][i]),
            "perplexity_base2_before": float(columns["perplexity_base2"][i]),
        }


@dataclass(frozen=True, eq=False)
class DelResults:
    """What DEL measured. A delta is after minus before; accuracies are fractions, distances characters, perplexities exp of nats.

    Args:
        frame: one row per target x method x ratio: model, sequence_id, category, method, ratio, intervention, n_neurons,
            delta_self_accuracy, delta_self_levenshtein, delta_neg_accuracy, delta_neg_levenshtein (means over the other test sequences,
            nan where there is none), delta_perplexity, delta_perplexity_base2 (2 ** nats, as published), and what they were before.
        before: one row per test sequence: model, sequence_id, category, prefix and suffix (text), accuracy, levenshtein, length (characters
            of the suffix), perplexity, perplexity_base2 (of the general text: one number for all).
        confusion: (method, ratio) -> change of accuracy, [silenced measured].
        confusion_levenshtein: the same for the distance.
        settings: what it was measured with.
        missing: what a run was asked for and has not got, one row per sequence x method x ratio: ratio, sequence_id, method, reason.

    >>> from tl_localize import Activations, DelBenchmark, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> from tl_localize.reference import held_out_tokens
    >>> few = reference_sequences(model)[:3]
    >>> DelBenchmark(model, few, held_out_tokens()[:2], ratios=(0.005,), n_dev=1).run([Activations()])
    DelResults(2 targets x 2 methods, 0.5 % of each layer silenced)
    """

    frame: pd.DataFrame
    before: pd.DataFrame
    confusion: dict[tuple[str, float], pd.DataFrame] = field(default_factory=dict)
    confusion_levenshtein: dict[tuple[str, float], pd.DataFrame] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    missing: pd.DataFrame = field(default_factory=pd.DataFrame)

    @classmethod
    def of(
        cls,
        before: pd.DataFrame,
        effects: Mapping[tuple[str, float], Sequence[Effect]],
        intervention: str,
        settings: dict[str, Any],
        missing: pd.DataFrame | None = None,
    ) -> DelResults:
        """Results from the effects by (method, ratio), target by target."""
        found = {key: part for key, part in effects.items() if part}
        rows = [
            effect.row(before, intervention) | {"method": method, "ratio": ratio}
            for (method, ratio), part in found.items()
            for effect in part
        ]
        accuracy, levenshtein = (
            {key: matrix(before, part, [getattr(effect, name) for effect in part]) for key, part in found.items()}
            for name in ("accuracy", "levenshtein")
        )
        none = pd.DataFrame()
        return cls(_in_order(pd.DataFrame(rows)), before, accuracy, levenshtein, settings, none if missing is None else missing)

    def __repr__(self) -> str:
        if not len(self.frame):
            return "DelResults(nothing measured)"
        ratios = ", ".join(f"{100 * ratio:g} %" for ratio in self.frame["ratio"].unique())
        counts = f"{self.frame['sequence_id'].nunique()} targets x {self.frame['method'].nunique()} methods"
        return f"DelResults({counts}, {ratios} of each layer silenced)"

    def _repr_html_(self) -> str:
        if not len(self.frame):
            return f"<div>{self!r}</div>"
        return styled(self.table(), f"{self!r}: after minus before, mean \u00b1 standard error over targets")

    def summary(self) -> pd.DataFrame:
        """Mean and standard error over targets: model, intervention, method, ratio, metric, mean, standard_error, n."""
        keys = ["model", "intervention", "method", "ratio"]
        parts = [summarize(self.frame, keys, metric).assign(metric=metric) for metric in METRICS]
        return pd.concat(parts, ignore_index=True).reindex(columns=[*keys, "metric", "mean", "standard_error", "n"])

    def table(self) -> pd.DataFrame:
        """The paper's DEL table as text: a block for each ratio, a row for each method, mean ± standard error over targets.

        Accuracies are in percentage points. Self should fall (distance: rise), the others should stay. Where methods have different numbers
        of targets, a column says how many.
        """
        blocks: dict[str, pd.DataFrame] = {}
        frame: Any = self.frame
        several = frame["model"].nunique() > 1
        for (model, intervention, ratio), block in frame.groupby(["model", "intervention", "ratio"], sort=False):
            rows = {
                method: {title: with_error(factor * part[column], decimals) for column, (title, factor, decimals) in METRICS.items()}
                for method, part in block.groupby("method", sort=False)
            }
            counts = block.groupby("method").size()
            if counts.nunique() > 1:
                rows = {method: row | {"targets": f"{counts[method]}"} for method, row in rows.items()}
            parts = [f"{100 * ratio:g} % of each layer", f"{block['sequence_id'].nunique()} sequences"]
            if len(self.missing):
                lacking = self.missing[self.missing["ratio"] == ratio]["method"]
                parts.append(f"{len(lacking)} measurements MISSING")
                rows = {method: row | {"missing": f"{(lacking == method).sum()}"} for method, row in rows.items()}
            name = ", ".join([*([model] if several else []), *([] if intervention == "zero" else [intervention]), *parts])
            blocks[name] = pd.DataFrame(rows).T
        return pd.concat(blocks)

    def before_table(self) -> pd.DataFrame:
        """How well each model memorizes the test sequences, as text: the paper's table of accuracy, distance, perplexity and length."""
        before: Any = self.before
        rows = {
            model: {
                "Acc (%)": with_error(100 * part["accuracy"], 1),
                "Dist (characters)": with_error(part["levenshtein"], 2),
                "PPL": f"{part['perplexity'].iloc[0]:.2f}",
                "PPL (2 ** nats)": f"{part['perplexity_base2'].iloc[0]:.2f}",
                "Len (characters)": f"{part['length'].mean():.0f}",
                "Sequences": f"{len(part)}",
            }
            for model, part in before.groupby("model", sort=False)
        }
        return pd.DataFrame(rows).T

    def tests(self, reference: str = "integrated_gradients") -> pd.DataFrame:
        """One-tailed paired t-tests: does a method lower Self accuracy more than the reference? Bonferroni over models and ratios."""
        return compare_with_reference(
            self.frame, reference, "delta_self_accuracy", ["model", "intervention", "ratio"], larger_is_better=False
        )

    def related(self) -> pd.DataFrame:
        """Are sequences of the target's own category hurt more than others?

        Over targets whose category has another sequence: change of accuracy of these and of the sequences of other categories, means over
        targets of means over sequences, and the one-tailed paired t-test that the related ones fall more.

        Returns: one row per method and ratio: related, related_error, unrelated, unrelated_error, p_value, n. Empty without categories.
        """
        category = dict(zip(self.before["sequence_id"], self.before["category"], strict=True))
        rows: list[dict[str, Any]] = []
        for (method, ratio), matrix in self.confusion.items():
            groups = np.array([category[name] for name in matrix.columns])
            pairs: list[tuple[float, float]] = []
            for name, changes in zip(matrix.index, matrix.to_numpy(), strict=True):
                same = (groups == category[name]) & (matrix.columns != name)
                other = groups != category[name]
                if category[name] and same.any() and other.any():
                    pairs.append((float(changes[same].mean()), float(changes[other].mean())))
            if pairs:
                related, unrelated = np.array(pairs).T
                means = dict(zip(("related", "related_error"), mean_and_error(related), strict=True))
                means |= dict(zip(("unrelated", "unrelated_error"), mean_and_error(unrelated), strict=True))
                p = paired_test(related, unrelated, "less")
                rows.append({"method": method, "ratio": ratio, **means, "p_value": p, "n": len(pairs)})
        return pd.DataFrame(rows)

    def confusion_by_category(self, method: str, ratio: float) -> pd.DataFrame:
        """Change of accuracy, [silenced measured], sequences of one category side by side; both axes are (category, id)."""
        if (method, ratio) not in self.confusion:
            raise ValueError(f"method and ratio must be one of {sorted(self.confusion)}, got {(method, ratio)}.")
        category = dict(zip(self.before["sequence_id"], self.before["category"], strict=True))
        first_seen = {name: i for i, name in enumerate(dict.fromkeys(category.values()))}
        matrix = self.confusion[method, ratio]

        def grouped(axis: pd.Index) -> list[str]:
            return sorted(axis, key=lambda name: first_seen[category[name]])

        def labels(names: list[str]) -> pd.MultiIndex:
            return pd.MultiIndex.from_tuples([(category[name], name) for name in names], names=["category", "id"])

        rows, columns = grouped(matrix.index), grouped(matrix.columns)
        return pd.DataFrame(matrix.loc[rows, columns].to_numpy(), index=labels(rows), columns=labels(columns))

    @classmethod
    def join(cls, results: Sequence[DelResults]) -> DelResults:
        """Runs of several methods, interventions or models as one; what two runs share (Random) is kept once.

        Confusion matrices are kept where all runs are of one model and one intervention; of two of one name, that of more targets.
        """
        keys = ["model", "intervention", "method", "ratio", "sequence_id"]
        frame: Any = pd.concat([part.frame for part in results], ignore_index=True).drop_duplicates(keys, ignore_index=True)
        before: Any = pd.concat([part.before for part in results], ignore_index=True)
        one = results if len(frame[["model", "intervention"]].drop_duplicates()) == 1 else ()
        confusion = _largest([part.confusion for part in one])
        levenshtein = _largest([part.confusion_levenshtein for part in one])
        unique = before.drop_duplicates(["model", "sequence_id"], ignore_index=True)
        return cls(frame, unique, confusion, levenshtein, {"runs": [part.settings for part in results]})

    def save(self, folder: str | Path) -> None:
        """Write frame.csv, before.csv, summary.csv, confusion.safetensors and settings.json, each whole or not at all."""
        path = prepare_folder(folder)
        for name, frame in (("frame", self.frame), ("before", self.before), ("summary", self.summary()), ("missing", self.missing)):
            if name == "missing" and not len(frame):
                (path / "missing.csv").unlink(missing_ok=True)
            else:
                write_text(path / f"{name}.csv", frame.to_csv(index=False))
        if self.confusion:
            tensors, keys = dict[str, Tensor](), list[dict[str, Any]]()
            for i, ((method, ratio), matrix) in enumerate(self.confusion.items()):
                keys.append({"method": method, "ratio": ratio, "silenced": list(matrix.index), "measured": list(matrix.columns)})
                tensors[f"accuracy.{i}"] = torch.tensor(matrix.to_numpy())
                tensors[f"levenshtein.{i}"] = torch.tensor(self.confusion_levenshtein[method, ratio].to_numpy())
            save_tensors(path / "confusion.safetensors", tensors, {"keys": json.dumps(keys)})
        write_json(path / "settings.json", self.settings)

    @classmethod
    def load(cls, folder: str | Path) -> DelResults:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: the folder holds no results.
        """
        path = Path(folder)
        if not (path / "frame.csv").is_file():
            raise FileNotFoundError(f"folder must hold the results of a DEL run, got {str(folder)!r} without a frame.csv. Check the path.")
        texts = dict.fromkeys(("model", "sequence_id", "category", "prefix", "suffix", "method", "intervention"), str)
        frame, before = (pd.read_csv(path / f"{name}.csv", dtype=texts, na_filter=False) for name in ("frame", "before"))
        numbers = [column for column in frame.columns if column not in texts]
        frame[numbers] = frame[numbers].apply(pd.to_numeric)
        matrices: dict[str, dict[tuple[str, float], pd.DataFrame]] = {"accuracy": {}, "levenshtein": {}}
        if (path / "confusion.safetensors").is_file():
            tensors, metadata = load_tensors(path / "confusion.safetensors")
            for i, key in enumerate(json.loads(metadata["keys"])):
                rows, columns = (pd.Index(key[axis], name=axis) for axis in ("silenced", "measured"))
                for name, found in matrices.items():
                    found[key["method"], key["ratio"]] = pd.DataFrame(tensors[f"{name}.{i}"].numpy(), index=rows, columns=columns)
        settings = json.loads((path / "settings.json").read_text(encoding="utf-8"))
        missing = path / "missing.csv"
        lacking = pd.read_csv(missing, dtype=texts | {"reason": str}, na_filter=False) if missing.is_file() else pd.DataFrame()
        return cls(frame, before, matrices["accuracy"], matrices["levenshtein"], settings, lacking)


def check_by_layer(method: Method) -> None:
    """Raise ValueError where the method says that its scores of one layer mean nothing without the other layers."""
    if not getattr(method, "by_layer", True):
        able = [name for name, kind in METHODS.items() if kind.by_layer]
        raise ValueError(
            f"method must score each layer by itself for single layers, got {method!r}, which learns all layers together. "
            f"Use one of {', '.join(able)}."
        )


def check_selects(ratio: Real, n_neurons: int) -> None:
    """Raise ValueError unless the ratio is a fraction that selects at least one neuron of a layer, rounded down."""
    check_ratio("ratio", ratio)
    if int(ratio * n_neurons) == 0:
        raise ValueError(
            f"ratio must select at least one of the {n_neurons} neurons of a layer, got {ratio!r}, which selects none. "
            f"Use at least {1 / n_neurons:.2g}."
        )


def check_general_tokens(model: LanguageModel, tokens: Integer[Tensor, "sequence pos"]) -> None:
    """Raise ValueError unless the model can read every row and predict at least one token of it."""
    n_ctx, d_vocab = model.cfg.n_ctx, model.cfg.d_vocab
    if tokens.ndim != 2 or not len(tokens) or not 2 <= tokens.shape[1] <= n_ctx:
        raise ValueError(f"general_tokens must have the shape [sequence pos] with 2 to n_ctx={n_ctx} positions, got {tuple(tokens.shape)}.")
    low, high = int(tokens.long().min()), int(tokens.long().max())  # minima of unsigned types are not everywhere
    if low < 0 or high >= d_vocab:
        raise ValueError(
            f"general_tokens must be in [0, {d_vocab}), got {low if low < 0 else high}. Was the text tokenized with another tokenizer?"
        )


def top_of_layer(scores: NeuronScores, layer: int, count: int) -> NeuronSet:
    """The highest-scored neurons of one layer; ties go to the lower index."""
    mask = torch.zeros_like(scores.values, dtype=torch.bool)
    mask[layer, scores.values[layer].argsort(descending=True, stable=True)[:count]] = True
    return NeuronSet(mask)


def perplexities(losses: Float[np.ndarray, " sequence"]) -> tuple[float, float]:
    """exp of the mean loss, and the published form: the mean of 2 ** loss."""
    return float(np.exp(losses.mean())), float(np.mean(2**losses))


def mean_of_others(values: Float[np.ndarray, " sequence"], index: int) -> float:
    """Mean over all but one; nan where there is no other."""
    return float(np.delete(values, index).mean()) if len(values) > 1 else math.nan


def part_of(progress: Progress | None, index: int, count: int, label: str) -> Callable[[float], None]:
    """Reports the fraction of one of several equal parts as a fraction of the whole."""
    return lambda fraction: progress((index + fraction) / count, label) if progress else None


def _largest(parts: Sequence[dict[tuple[str, float], pd.DataFrame]]) -> dict[tuple[str, float], pd.DataFrame]:
    """All matrices by name; of those of one name the one with the most rows."""
    found: dict[tuple[str, float], pd.DataFrame] = {}
    for part in parts:
        found |= {key: matrix for key, matrix in part.items() if key not in found or len(matrix) > len(found[key])}
    return found


def single_layer_frame(
    before: pd.DataFrame, effects: Sequence[tuple[Effect, Share]], intervention: str, method: str, ratio: Real
) -> pd.DataFrame:
    """What ``DelBenchmark.run_single_layer`` gives, from what each share does."""
    rows = [
        effect.row(before, intervention) | {"method": method, "ratio": ratio, "layer": share.layer, "multiple": share.multiple}
        for effect, share in effects
    ]
    return _in_order(pd.DataFrame(rows).astype({"layer": "Int64"}))


def matrix(before: pd.DataFrame, effects: Sequence[Effect], changes: Sequence[Float[np.ndarray, " sequence"]]) -> pd.DataFrame:
    """Changes by the ids of the silenced (rows) and the measured sequences (columns)."""
    ids = list(before["sequence_id"])
    rows = pd.Index([ids[effect.target] for effect in effects], name="silenced")
    return pd.DataFrame(np.stack(changes), index=rows, columns=pd.Index(ids, name="measured"))


def _in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that say which row it is first."""
    first = ["model", "sequence_id", "category", "method", "ratio"]
    return frame.reindex(columns=[*first, *(column for column in frame.columns if column not in first)])
