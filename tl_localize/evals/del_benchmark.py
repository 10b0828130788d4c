"""DEL: silence the neurons that a method locates for a memorized sequence; is that sequence forgotten, and only that one?"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
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

from tl_localize.html import card
from tl_localize.losses import unembed
from tl_localize.memory import halving, tokens_that_fit
from tl_localize.methods import RandomBaseline
from tl_localize.methods.base import Method, Progress, label_methods
from tl_localize.metrics import Decode, decoder
from tl_localize.neurons import LanguageModel, NeuronView, Real
from tl_localize.scores import NeuronScores, NeuronSet, check_ratio, load_tensors, save_tensors
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences
from tl_localize.stats import compare_with_reference, mean_and_error, paired_test, summarize
from tl_localize.store import environment, prepare_folder, write_json, write_text

INTERVENTIONS = ("zero", "mean", "resample")
WINDOW = 16  # targets that are localized, then silenced side by side

METRICS: dict[str, tuple[str, int, int]] = {  # column: title, factor, decimals
    "delta_self_accuracy": ("Δ Self-Acc (points)", 100, 1),
    "delta_self_levenshtein": ("Δ Self-Dist (characters)", 1, 1),
    "delta_neg_accuracy": ("Δ Neg-Acc (points)", 100, 1),
    "delta_neg_levenshtein": ("Δ Neg-Dist (characters)", 1, 1),
    "delta_perplexity": ("Δ Rand-PPL", 1, 2),
    "delta_perplexity_base2": ("Δ Rand-PPL (2 ** nats)", 1, 2),
}


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
    >>> from tl_localize.reference_corpus import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> from tl_localize.reference_corpus import held_out_tokens
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
        check_general_tokens(self.model, self.general_tokens)

    def test_sequences(self) -> list[MemorizedSequence]:
        """The sequences without the dev ones, each with an id."""
        return [replace(s, id=s.id or f"sequence-{i}") for i, s in enumerate(self.sequences)][self.n_dev :]

    def run(self, methods: Sequence[Method], progress: Progress | None = None) -> DelResults:
        """Locate, silence and measure for every target, method and ratio. Random is always among the methods.

        Args:
            methods: anything that maps (model, sequence) to NeuronScores; its ``map`` is used where it has one.
            progress: called with the fraction done and what is being done.
        """
        labels = label_methods(self._with_random(methods))
        evaluation = Evaluation(self)
        effects: dict[tuple[str, float], list[Effect]] = {(label, ratio): [] for label in labels for ratio in self.ratios}
        for i, (label, method) in enumerate(labels.items()):
            report = part_of(progress, i, len(labels), label)
            for targets, scores in self._scored(method, evaluation, report):
                for ratio in self.ratios:
                    sets = [score.top_k(ratio, first_layer=self.first_layer, rounding="floor") for score in scores]
                    effects[label, ratio] += evaluation.effects(targets, sets)
        rows = [evaluation.row(effect) | {"method": key[0], "ratio": key[1]} for key, found in effects.items() for effect in found]
        if progress:
            progress(1.0, "done")
        return DelResults(
            _in_order(pd.DataFrame(rows)),
            evaluation.before_frame(),
            {key: evaluation.matrix([effect.accuracy for effect in found], found) for key, found in effects.items()},
            {key: evaluation.matrix([effect.levenshtein for effect in found], found) for key, found in effects.items()},
            self.settings(methods),
        )

    def run_single_layer(
        self, method: Method, ratio: Real, multiples: Sequence[int] = (1, 5), progress: Progress | None = None
    ) -> pd.DataFrame:
        """One layer against all layers at equal budget, for a method whose scores of a layer mean something without the other layers.

        In each single layer the top N = ratio x d_mlp x (L - first_layer) neurons are silenced (rounded down), and ``multiple`` x N. Beside
        them stands the usual share of every layer from first_layer on; there ``layer`` is missing.

        Source: Chang et al. (2024), arXiv:2311.09060, section 5.4 and A.7.
        Returns: the columns of ``DelResults.frame``, and ``layer`` and ``multiple``.
        Raises:  ValueError: a multiple of the budget that is more than a layer has.
        """
        n, n_layers = self.model.cfg.d_mlp, self.model.cfg.n_layers
        check_selects(ratio, n)
        budget = math.floor(round(ratio * n * (n_layers - self.first_layer), 6))
        for multiple in multiples:
            if not 1 <= multiple * budget <= n:
                raise ValueError(
                    f"multiples must keep multiple * {budget} in [1, {n}], the neurons of one layer, got {multiple}. "
                    "Use a smaller multiple or ratio."
                )
        (label,) = label_methods([method])
        evaluation = Evaluation(self)
        rows: list[dict[str, Any]] = []
        for targets, scores in self._scored(method, evaluation, part_of(progress, 0, 1, label)):
            shares: list[tuple[int | None, int, list[NeuronSet]]] = [
                (None, 1, [score.top_k(ratio, first_layer=self.first_layer, rounding="floor") for score in scores])
            ]
            for layer in range(n_layers):
                shares += [(layer, m, [top_of_layer(score, layer, m * budget) for score in scores]) for m in multiples]
            for layer, multiple, sets in shares:
                extra = {"method": label, "ratio": ratio, "layer": layer, "multiple": multiple}
                rows += [evaluation.row(effect) | extra for effect in evaluation.effects(targets, sets)]
        if progress:
            progress(1.0, "done")
        return _in_order(pd.DataFrame(rows).astype({"layer": "Int64"}))

    def settings(self, methods: Sequence[Method]) -> dict[str, Any]:
        """Everything that the numbers depend on."""
        n_test = len(self.sequences) - self.n_dev
        return {
            "benchmark": "del",
            "ratios": list(self.ratios),
            "first_layer": self.first_layer,
            "intervention": self.intervention,
            "seed": self.seed,
            "n_dev": self.n_dev,
            "n_targets": self.n_targets or n_test,
            "n_sequences": n_test,
            "general_text": list(self.general_tokens.shape),
            "methods": {label: repr(method) for label, method in label_methods(self._with_random(methods)).items()},
            "environment": environment(self.model),
        }

    def _with_random(self, methods: Sequence[Method]) -> list[Method]:
        if not methods:
            raise ValueError("methods must hold at least one method, got none. Pass for example [HardConcrete(first_layer=1)].")
        there = any(getattr(method, "name", "") == RandomBaseline.name for method in methods)
        return [*methods, *([] if there else [RandomBaseline(seed=self.seed)])]

    def _scored(
        self, method: Method, evaluation: Evaluation, report: Callable[[float], None]
    ) -> Iterator[tuple[list[int], list[NeuronScores]]]:
        """Indices of targets and their scores, a window at a time."""
        targets = evaluation.sequences[: self.n_targets]
        # Half of the progress is localization, half what is done with each window.
        done = 0.0
        side_by_side: Any = getattr(method, "map", None)
        scores: Iterator[NeuronScores] = (
            iter(side_by_side(self.model, targets, progress=lambda fraction: report((fraction + done) / 2)))
            if side_by_side
            else (method(self.model, target) for target in targets)
        )
        for start in range(0, len(targets), WINDOW):
            window = list(range(start, min(start + WINDOW, len(targets))))
            yield window, [check_scores(next(scores), self.model, method) for _ in window]
            done = (window[-1] + 1) / len(targets)
            report(done)


class Evaluation:
    """Measures one model with neurons silenced; what does not depend on the neurons is done once, when it is made."""

    def __init__(self, benchmark: DelBenchmark) -> None:
        self.benchmark = benchmark
        self.model = benchmark.model
        self.view = NeuronView(benchmark.model)
        self.sequences = benchmark.test_sequences()
        self.general_tokens = benchmark.general_tokens
        self.tokens = benchmark.batch_tokens or tokens_that_fit(self.view)
        decode = self.decode = benchmark.decode or decoder(benchmark.model)
        self.truth = [sequence.suffix.numpy() for sequence in self.sequences]
        self.texts = [decode(sequence.tokens.tolist()) for sequence in self.sequences]
        self.means = self._means() if benchmark.intervention == "mean" else None
        untouched = NeuronSet(torch.zeros(self.view.n_layers, self.view.n_neurons, dtype=torch.bool))
        (self.predicted,), losses = self._predictions([untouched], self._values([0])), self._losses([untouched], self._values([0]))
        self.accuracy = np.array([np.mean(guess == truth) for guess, truth in zip(self.predicted, self.truth, strict=True)])
        self.levenshtein = np.array([self._distance(i, guess) for i, guess in enumerate(self.predicted)], dtype=float)
        self.perplexity, self.perplexity_base2 = perplexities(losses[0])

    def effects(self, targets: Sequence[int], sets: Sequence[NeuronSet]) -> list[Effect]:
        """What each set of neurons changes when it is silenced for its target."""
        values = self._values(targets)
        predicted, losses = self._predictions(sets, values), self._losses(sets, values)
        return [self._effect(*part) for part in zip(targets, sets, predicted, losses, strict=True)]

    def _effect(self, target: int, chosen: NeuronSet, predicted: list[np.ndarray], losses: Float[np.ndarray, " sequence"]) -> Effect:
        accuracy, levenshtein = np.zeros(len(predicted)), np.zeros(len(predicted))
        for i, (guess, old, truth) in enumerate(zip(predicted, self.predicted, self.truth, strict=True)):
            if not np.array_equal(guess, old):  # most stay as they were, and need no decoding
                accuracy[i] = np.mean(guess == truth) - self.accuracy[i]
                levenshtein[i] = self._distance(i, guess) - self.levenshtein[i]
        perplexity, base2 = perplexities(losses)
        return Effect(target, len(chosen), accuracy, levenshtein, perplexity - self.perplexity, base2 - self.perplexity_base2)

    def _distance(self, index: int, predicted: Integer[np.ndarray, " suffix"]) -> int:
        """Characters between the text with the predicted suffix and the true one, as ``metrics.levenshtein`` counts them."""
        return Levenshtein.distance(self.decode([*self.sequences[index].prefix.tolist(), *predicted.tolist()]), self.texts[index])

    # Forward passes

    def _predictions(self, sets: Sequence[NeuronSet], values: Float[Tensor, "#set layer neuron"]) -> list[list[np.ndarray]]:
        """Teacher-forced argmax of each suffix: for each set, for each test sequence."""
        found: list[list[np.ndarray]] = [[] for _ in sets]

        def predict(part: list[MemorizedSequence]) -> list[list[np.ndarray]]:
            batch = SequenceBatch.of(part, self.view.device)

            def argmax(resid: Float[Tensor, "set batch pos d_model"]) -> Int[Tensor, "set target"]:
                return unembed(self.model, resid[:, batch.rows, batch.positions]).argmax(-1)

            ends = np.cumsum([len(sequence.suffix) for sequence in part])[:-1]
            return [np.split(row, ends) for row in self._silenced(batch.tokens, sets, values, argmax).numpy()]

        for _, rows in halving(predict, self.sequences, max(1, self.tokens // max(map(len, self.sequences)))):
            for pieces, row in zip(found, rows, strict=True):
                pieces.extend(row)
        return found

    def _losses(self, sets: Sequence[NeuronSet], values: Float[Tensor, "#set layer neuron"]) -> Float[np.ndarray, "set sequence"]:
        """Nats per token of each sequence of general text, for each set."""

        def losses(rows: list[int]) -> Tensor:
            tokens = self._general(rows)

            def loss(resid: Float[Tensor, "set batch pos d_model"]) -> Float[Tensor, "set batch"]:
                targets = tokens[:, 1:].expand(len(resid), -1, -1)
                logits = unembed(self.model, resid[:, :, :-1])
                return F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape).mean(-1)

            return self._silenced(tokens, sets, values, loss)

        size = max(1, self.tokens // self.general_tokens.shape[1])
        found = torch.cat([loss for _, loss in halving(losses, range(len(self.general_tokens)), size)], 1).double().numpy()
        if not np.isfinite(found).all():
            raise ValueError("loss on general_tokens must be finite, got one that is not. Use float32, or silence fewer neurons.")
        return found

    @torch.no_grad()
    def _silenced(
        self,
        tokens: Int[Tensor, "batch pos"],
        sets: Sequence[NeuronSet],
        values: Float[Tensor, "#set layer neuron"],
        head: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """head(final residual stream, [set batch pos d_model]) with each set silenced, [set ...] on the CPU.

        Several sets share a forward pass; the layers below the lowest silenced one are the same for all sets and run once.
        """
        model, n_layers, device = self.model, self.view.n_layers, self.view.device
        masks = torch.stack([chosen.mask for chosen in sets])
        touched: list[int] = masks.any(-1).any(0).nonzero().flatten().tolist()
        first = min(touched, default=n_layers)
        start: Tensor = model(tokens, stop_at_layer=first, padding_side="right")

        def rows(per_set: Tensor) -> Tensor:  # [set neuron] -> one row for each set and sequence, unless one row does for all
            return per_set.to(device) if len(per_set) == 1 else per_set.to(device).repeat_interleave(len(tokens), 0)

        def work(group: list[int]) -> Tensor:
            mine, theirs = masks[group], values if len(values) == 1 else values[group]
            with self.view.held({layer: rows(mine[:, layer]) for layer in touched}, {layer: rows(theirs[:, layer]) for layer in touched}):
                resid = start.repeat(len(group), 1, 1)
                if touched:
                    resid = model(resid, start_at_layer=first, stop_at_layer=n_layers, padding_side="right")
            return head(resid.unflatten(0, (len(group), len(tokens)))).cpu()

        return torch.cat([result for _, result in halving(work, range(len(sets)), max(1, self.tokens // tokens.numel()))])

    # What silenced neurons become

    def _values(self, targets: Sequence[int]) -> Float[Tensor, "#set layer neuron"]:
        """Activations of silenced neurons: one for all sets, or one for each target."""
        if self.means is not None:
            return self.means[None]
        if self.benchmark.intervention == "zero":
            return torch.zeros(1, self.view.n_layers, self.view.n_neurons)
        return torch.stack([self._resampled(target) for target in targets])

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

    # Rows and matrices

    def row(self, effect: Effect) -> dict[str, Any]:
        """A row of the frame, without method and ratio."""
        i = effect.target
        return {
            "model": self._model_name,
            "sequence_id": self.sequences[i].id,
            "category": self.sequences[i].category,
            "intervention": self.benchmark.intervention,
            "n_neurons": effect.n_neurons,
            "delta_self_accuracy": float(effect.accuracy[i]),
            "delta_self_levenshtein": float(effect.levenshtein[i]),
            "delta_neg_accuracy": mean_of_others(effect.accuracy, i),
            "delta_neg_levenshtein": mean_of_others(effect.levenshtein, i),
            "delta_perplexity": effect.perplexity,
            "delta_perplexity_base2": effect.perplexity_base2,
            "self_accuracy_before": float(self.accuracy[i]),
            "self_levenshtein_before": float(self.levenshtein[i]),
            "neg_accuracy_before": mean_of_others(self.accuracy, i),
            "neg_levenshtein_before": mean_of_others(self.levenshtein, i),
            "perplexity_before": self.perplexity,
            "perplexity_base2_before": self.perplexity_base2,
        }

    def before_frame(self) -> pd.DataFrame:
        """How the model does before anything is silenced, one row per test sequence."""
        prefixes = [self.decode(sequence.prefix.tolist()) for sequence in self.sequences]
        return pd.DataFrame(
            {
                "model": self._model_name,
                "sequence_id": [sequence.id for sequence in self.sequences],
                "category": [sequence.category for sequence in self.sequences],
                "prefix": prefixes,
                "suffix": [text[len(prefix) :] for prefix, text in zip(prefixes, self.texts, strict=True)],
                "accuracy": self.accuracy,
                "levenshtein": self.levenshtein,
                "length": [len(text) - len(prefix) for prefix, text in zip(prefixes, self.texts, strict=True)],
                "perplexity": self.perplexity,
                "perplexity_base2": self.perplexity_base2,
            }
        )

    def matrix(self, changes: Sequence[Float[np.ndarray, " sequence"]], effects: Sequence[Effect]) -> pd.DataFrame:
        """Changes by the ids of the silenced (rows) and the measured sequences (columns)."""
        ids = [sequence.id for sequence in self.sequences]
        rows = pd.Index([ids[effect.target] for effect in effects], name="silenced")
        return pd.DataFrame(np.stack(changes), index=rows, columns=pd.Index(ids, name="measured"))

    @property
    def _model_name(self) -> str:
        return str(getattr(self.model.cfg, "model_name", type(self.model).__name__))


@dataclass(frozen=True, eq=False)
class Effect:
    """What changes when the neurons of a target are silenced: after minus before."""

    target: int
    n_neurons: int
    accuracy: Float[np.ndarray, " sequence"]
    levenshtein: Float[np.ndarray, " sequence"]
    perplexity: float
    perplexity_base2: float


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

    >>> from tl_localize import Activations, DelBenchmark, load_model
    >>> from tl_localize.reference_corpus import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> from tl_localize.reference_corpus import held_out_tokens
    >>> few = reference_sequences(model)[:3]
    >>> DelBenchmark(model, few, held_out_tokens()[:2], ratios=(0.005,), n_dev=1).run([Activations()])
    DelResults(2 targets x 2 methods, 0.5 % of each layer silenced)
    """

    frame: pd.DataFrame
    before: pd.DataFrame
    confusion: dict[tuple[str, float], pd.DataFrame] = field(default_factory=dict)
    confusion_levenshtein: dict[tuple[str, float], pd.DataFrame] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        if not len(self.frame):
            return "DelResults(nothing measured)"
        ratios = ", ".join(f"{100 * ratio:g} %" for ratio in self.frame["ratio"].unique())
        counts = f"{self.frame['sequence_id'].nunique()} targets x {self.frame['method'].nunique()} methods"
        return f"DelResults({counts}, {ratios} of each layer silenced)"

    def _repr_html_(self) -> str:
        if not len(self.frame):
            return f"<div>{self!r}</div>"
        return card(f"{self!r}: after minus before, mean \u00b1 standard error over targets", self.table().to_html())

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
        for name, frame in (("frame", self.frame), ("before", self.before), ("summary", self.summary())):
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
        return cls(frame, before, matrices["accuracy"], matrices["levenshtein"], settings)


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
    if not len(tokens) or not 2 <= tokens.shape[1] <= n_ctx:
        raise ValueError(f"general_tokens must have the shape [sequence pos] with 2 to n_ctx={n_ctx} positions, got {tuple(tokens.shape)}.")
    low, high = int(tokens.long().min()), int(tokens.long().max())  # minima of unsigned types are not everywhere
    if low < 0 or high >= d_vocab:
        raise ValueError(
            f"general_tokens must be in [0, {d_vocab}), got {low if low < 0 else high}. Was the text tokenized with another tokenizer?"
        )


def check_scores(scores: object, model: LanguageModel, method: Method) -> NeuronScores:
    """Raise TypeError or ValueError unless a method gave scores of the model's shape."""
    if not isinstance(scores, NeuronScores):
        raise TypeError(f"methods must return NeuronScores, got {type(scores).__name__} from {method!r}. Wrap the tensor in one.")
    shape = (model.cfg.n_layers, model.cfg.d_mlp)
    if tuple(scores.values.shape) != shape:
        raise ValueError(f"scores must have the model's shape {shape}, got {tuple(scores.values.shape)} from {method!r}.")
    return scores


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


def with_error(values: Any, decimals: int) -> str:
    """Mean and standard error of a column, as text."""
    mean, error = mean_and_error(values)
    return f"{mean:.{decimals}f}" + ("" if math.isnan(error) else f" ± {error:.{decimals}f}")


def part_of(progress: Progress | None, index: int, count: int, label: str) -> Callable[[float], None]:
    """Reports the fraction of one of several equal parts as a fraction of the whole."""
    return lambda fraction: progress((index + fraction) / count, label) if progress else None


def _largest(parts: Sequence[dict[tuple[str, float], pd.DataFrame]]) -> dict[tuple[str, float], pd.DataFrame]:
    """All matrices by name; of those of one name the one with the most rows."""
    found: dict[tuple[str, float], pd.DataFrame] = {}
    for part in parts:
        found |= {key: matrix for key, matrix in part.items() if key not in found or len(matrix) > len(found[key])}
    return found


def _in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that say which row it is first."""
    first = ["model", "sequence_id", "category", "method", "ratio"]
    return frame.reindex(columns=[*first, *(column for column in frame.columns if column not in first)])
