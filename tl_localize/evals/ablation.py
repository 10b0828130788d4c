"""What an ablated neuron's activation becomes, and a meter of what the ablation of some neurons changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.batching import bytes_to_keep, halving, tokens_that_fit
from tl_localize.execution.tasks import Record, digest_of
from tl_localize.losses import unembed
from tl_localize.metrics import Decode, decoder, mean_base2
from tl_localize.neurons import LanguageModel, NeuronView, model_name
from tl_localize.scores import NeuronSet
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@runtime_checkable
class Ablation(Protocol):
    """What ablated neurons are clamped at: a frozen callable whose repr names all its settings.

    ``name`` is its name in tables. ``per_target`` says whether the values differ between targets; where they do not, they are computed
    once. Both may be missing.

    >>> isinstance(Zero(), Ablation)
    True
    """

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron"]:
        """The values of all neurons, at every position, while the neurons of a target are ablated."""
        ...


@dataclass(frozen=True)
class Zero:
    """Zero ablation, the paper's dropout.

    >>> Zero()(NeuronView(model), 0).shape
    torch.Size([6, 1536])
    """

    name: ClassVar[str] = "zero"
    per_target: ClassVar[bool] = False

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron"]:
        return torch.zeros(neurons.n_layers, neurons.n_neurons)


@dataclass(frozen=True, eq=False, repr=False)
class Mean:
    """Mean ablation: each neuron's mean over general text. The first position of a text, which has no context, does not count.

    Args:
        text: [sequence pos] token ids.

    >>> bool(Mean(text)(NeuronView(model), 0).any())
    True
    """

    text: Integer[Tensor, "sequence pos"]
    name: ClassVar[str] = "mean"
    per_target: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"Mean({list(self.text.shape)} tokens, {digest_of(self.text.tolist())})"

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron"]:
        def total(rows: list[int]) -> Tensor:
            acts = activations(neurons, self.text[rows[0] : rows[-1] + 1])
            return torch.stack([acts[layer][:, 1:].double().sum((0, 1)).cpu() for layer in range(neurons.n_layers)])

        n, length = self.text.shape
        sums = [part for _, part in halving(total, range(n), max(1, tokens_that_fit(neurons) // length))]
        return (torch.stack(sums).sum(0) / (n * (length - 1))).float()


@dataclass(frozen=True, eq=False, repr=False)
class Resample:
    """Resample ablation: what each neuron was at one random position of general text, the same position for all neurons.

    Every target has its own position, the same for all methods and ratios. The first position of a text does not count.

    Args:
        text: [sequence pos] token ids.

    >>> Resample(text, seed=1).name
    'resample'
    """

    text: Integer[Tensor, "sequence pos"]
    seed: int = 0
    name: ClassVar[str] = "resample"
    per_target: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"Resample({list(self.text.shape)} tokens, {digest_of(self.text.tolist())}, seed={self.seed})"

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron"]:
        n, length = self.text.shape
        row, position = divmod(int(np.random.default_rng([self.seed, target]).integers(n * (length - 1))), length - 1)
        acts = activations(neurons, self.text[row : row + 1])
        return torch.stack([acts[layer][0, position + 1].float().cpu() for layer in range(neurons.n_layers)])


ABLATIONS: dict[str, Callable[[Tensor, int], Ablation]] = {  # by name, from general text and a seed
    "zero": lambda text, seed: Zero(),
    "mean": lambda text, seed: Mean(text),
    "resample": Resample,
}


@torch.no_grad()
def activations(neurons: NeuronView, tokens: Integer[Tensor, "batch pos"]) -> dict[int, Tensor]:
    """The neurons of each layer, [batch pos neuron]."""
    with neurons.recorded() as acts:
        neurons.model(tokens.long().to(neurons.device), stop_at_layer=neurons.n_layers, padding_side="right")
    return acts


@dataclass(frozen=True, eq=False)
class Baseline:
    """The model as it is.

    Args:
        frame: ``DelResults.before``.
        predicted: teacher-forced argmax of each suffix.
    """

    frame: pd.DataFrame
    predicted: list[list[int]]

    def packed(self) -> Record:
        return Record({"frame": self.frame.to_dict("records"), "predicted": self.predicted})

    @classmethod
    def unpacked(cls, record: Record) -> Baseline:
        """What ``packed`` gave."""
        return cls(pd.DataFrame(record.value["frame"]), record.value["predicted"])


@dataclass(frozen=True, eq=False)
class Effect:
    """What changes when neurons are ablated for a target: after minus before.

    Args:
        target: index of the target among the sequences.
        accuracy, levenshtein: of each sequence, as a fraction and in characters.
        perplexity, perplexity_base2: of general text.
    """

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
    def unpacked(cls, value: dict[str, Any]) -> Effect:
        """What ``packed`` gave."""
        arrays: dict[str, Any] = {name: np.array(value[name]) for name in ("accuracy", "levenshtein")}
        return cls(**{**value, **arrays})


class AblationMeter:
    """Measures what the ablation of neurons changes; what does not depend on the neurons is computed once.

    That is the baseline, and the residual stream below the first layer with an ablated neuron, which is kept as far as memory allows.
    Each set of neurons is ablated alone, so that no number depends on which sets were measured before.

    Args:
        sequences: the target and the others.
        general_tokens: [sequence pos], for the perplexity.
        batch_tokens: tokens in one forward pass; by default as many as fit.
        baseline: of the same model and data; measured now unless given.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequences: Sequence[MemorizedSequence],
        general_tokens: Integer[Tensor, "sequence pos"],
        ablation: Ablation,
        decode: Decode | None = None,
        batch_tokens: int | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        self.model, self.sequences, self.general_tokens, self.ablation = model, sequences, general_tokens, ablation
        self.view = NeuronView(model)
        self.tokens = batch_tokens or tokens_that_fit(self.view)
        self.room = bytes_to_keep(self.view)
        self.kept: dict[tuple[str, int, int, int], Tensor] = {}  # what, first row, rows, layer -> the residual stream that enters it
        self.values: Tensor | None = None  # of an ablation that is the same for all targets
        self.decode = decode or decoder(model)
        self.truth = [sequence.suffix.numpy() for sequence in sequences]
        self.texts = [self.decode(sequence.tokens.tolist()) for sequence in sequences]
        self.baseline = baseline or self._measured_baseline()
        self.predicted = [np.array(guess) for guess in self.baseline.predicted]
        frame = self.baseline.frame
        self.accuracy, self.levenshtein = (frame[name].to_numpy() for name in ("accuracy", "levenshtein"))
        self.perplexity, self.perplexity_base2 = (float(frame[name].iloc[0]) for name in ("perplexity", "perplexity_base2"))

    def effect(self, target: int, chosen: NeuronSet) -> Effect:
        """What a set of neurons changes when it is ablated for its target."""
        values = self._values(target)
        predicted = self._predictions(chosen, values)
        accuracy, levenshtein = np.zeros(len(predicted)), np.zeros(len(predicted))
        for i, (guess, old, truth) in enumerate(zip(predicted, self.predicted, self.truth, strict=True)):
            if not np.array_equal(guess, old):  # most stay as they were, and need no decoding
                accuracy[i] = np.mean(guess == truth) - self.accuracy[i]
                levenshtein[i] = self._distance(i, guess) - self.levenshtein[i]
        perplexity, base2 = perplexities(self._losses(chosen, values))
        return Effect(target, len(chosen), accuracy, levenshtein, perplexity - self.perplexity, base2 - self.perplexity_base2)

    def _values(self, target: int) -> Float[Tensor, "layer neuron"]:
        """What ablated neurons are clamped at."""
        if self.values is not None:
            return self.values
        values = self.ablation(self.view, target)
        if tuple(values.shape) != (shape := (self.view.n_layers, self.view.n_neurons)):
            raise ValueError(f"ablation must give values of the shape {shape}, got {tuple(values.shape)} from {self.ablation!r}.")
        if not getattr(self.ablation, "per_target", True):
            self.values = values
        return values

    def _measured_baseline(self) -> Baseline:
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
        return Baseline(frame, [guess.tolist() for guess in predicted])

    def _distance(self, index: int, predicted: Integer[np.ndarray, " suffix"]) -> int:
        """Characters between the text with the predicted suffix and the true one, as ``metrics.levenshtein`` counts them."""
        return Levenshtein.distance(self.decode([*self.sequences[index].prefix.tolist(), *predicted.tolist()]), self.texts[index])

    @torch.no_grad()
    def _predictions(self, chosen: NeuronSet, values: Float[Tensor, "layer neuron"]) -> list[np.ndarray]:
        """Teacher-forced argmax of each suffix."""

        def predict(rows: list[int]) -> list[np.ndarray]:
            batch = SequenceBatch.of([self.sequences[row] for row in rows], self.view.device)
            resid = self._ablated("sequences", rows, batch.tokens, chosen, values)
            predicted = unembed(self.model, resid[batch.rows, batch.positions]).argmax(-1).cpu().numpy()
            return np.split(predicted, np.cumsum([len(self.truth[row]) for row in rows])[:-1])

        size = max(1, self.tokens // max(map(len, self.sequences)))
        return [guess for _, part in halving(predict, range(len(self.sequences)), size) for guess in part]

    @torch.no_grad()
    def _losses(self, chosen: NeuronSet, values: Float[Tensor, "layer neuron"]) -> Float[np.ndarray, " sequence"]:
        """Nats per token of each sequence of general text."""

        def losses(rows: list[int]) -> Float[Tensor, " batch"]:
            tokens = self.general_tokens[rows[0] : rows[-1] + 1].long().to(self.view.device)
            logits = unembed(self.model, self._ablated("general text", rows, tokens, chosen, values)[:, :-1])
            targets = tokens[:, 1:]
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(-1).cpu()

        size = max(1, self.tokens // self.general_tokens.shape[1])
        found = torch.cat([loss for _, loss in halving(losses, range(len(self.general_tokens)), size)]).double().numpy()
        if not np.isfinite(found).all():
            raise ValueError("loss on general_tokens must be finite, got one that is not. Use float32, or ablate fewer neurons.")
        return found

    def _ablated(
        self, what: str, rows: list[int], tokens: Int[Tensor, "batch pos"], chosen: NeuronSet, values: Float[Tensor, "layer neuron"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The final residual stream of consecutive rows while a set of neurons is clamped at these values."""
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


def perplexities(losses: Float[np.ndarray, " sequence"]) -> tuple[float, float]:
    """exp of the mean loss, and the published form (``metrics.perplexity_base2``)."""
    return float(np.exp(losses.mean())), mean_base2(torch.from_numpy(losses))
