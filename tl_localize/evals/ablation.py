"""What an ablated neuron's activation becomes, and a meter of what the ablation of some neurons
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.batching import halving, tokens_that_fit
from tl_localize.forward import residual
from tl_localize.losses import target_logits
from tl_localize.metrics import Decode, mean_base2, predicted_suffixes, sequence_losses
from tl_localize.neurons import LanguageModel, NeuronView, model_name
from tl_localize.scores import NeuronSet
from tl_localize.sequences import MemorizedSequence, SequenceBatch
from tl_localize.units import NEURONS, Units


@runtime_checkable
class Ablation(Protocol):
    """What ablated neurons are clamped at: a frozen dataclass of its settings that can be called.

    ``name`` is its name in tables; it may be missing.

    >>> isinstance(Zero(), Ablation)
    True
    """

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron *width"]:
        """The values of all neurons, at every position, while the neurons of a target are ablated:
        of shape [n_layers, *neurons.shape].
        """
        ...


@dataclass(frozen=True)
class Zero:
    """Zero ablation, the paper's dropout.

    >>> Zero()(NeuronView(model), 0).shape
    torch.Size([6, 1536])
    """

    name: ClassVar[str] = "zero"

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron *width"]:
        return torch.zeros(neurons.n_layers, *neurons.shape)


@dataclass(frozen=True, eq=False)
class Mean:
    """Mean ablation: each neuron's mean over general text. The first position of a text, which has
    no context, does not count.

    Args:
        text: [sequence pos] token ids.

    >>> bool(Mean(text)(NeuronView(model), 0).any())
    True
    """

    text: Integer[Tensor, "sequence pos"] = field(repr=False)
    name: ClassVar[str] = "mean"

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron *width"]:
        n, length = self.text.shape
        total = torch.zeros(neurons.n_layers, *neurons.shape, dtype=torch.float64)
        size = max(1, tokens_that_fit(neurons) // length)
        batches = halving(lambda rows: activations(neurons, self.text[rows]), range(n), size)
        for _, acts in batches:
            for layer, act in acts.items():
                # some devices have no float64, so the sum is made on the CPU
                total[layer] += act[:, 1:].cpu().double().sum((0, 1))
        return (total / (n * (length - 1))).float()


@dataclass(frozen=True, eq=False)
class Resample:
    """Resample ablation: what each neuron was at one random position of general text, the same
    position for all neurons.

    Every target has its own position, the same for all methods and ratios. The first position of a
    text does not count.

    Args:
        text: [sequence pos] token ids.

    >>> Resample(text, seed=1).name
    'resample'
    """

    text: Integer[Tensor, "sequence pos"] = field(repr=False)
    seed: int = 0
    name: ClassVar[str] = "resample"

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron *width"]:
        n, length = self.text.shape
        drawn = int(np.random.default_rng([self.seed, target]).integers(n * (length - 1)))
        row, position = divmod(drawn, length - 1)
        acts = activations(neurons, self.text[row : row + 1])
        return torch.stack(
            [acts[layer][0, position + 1].float().cpu() for layer in range(neurons.n_layers)]
        )


ABLATIONS: dict[str, Callable[[Tensor, int], Ablation]] = {  # by name, from general text and a seed
    "zero": lambda text, seed: Zero(),
    "mean": lambda text, seed: Mean(text),
    "resample": Resample,
}


@torch.no_grad()
def activations(neurons: NeuronView, tokens: Integer[Tensor, "batch pos"]) -> dict[int, Tensor]:
    """The neurons of each layer, [batch pos neuron *width]."""
    with neurons.recorded() as acts:
        residual(neurons.model, tokens.long().to(neurons.device))
    return acts


class AblationMeter:
    """Measures what the ablation of neurons changes, against the model as it is.

    Each set of neurons is ablated alone, so that no number depends on which sets were measured
    before.

    Args:
        sequences: The target and the others.
        general_tokens: [sequence pos], for the perplexity.
        batch_tokens: Tokens in one forward pass; by default as many as fit.
        baseline: What ``baseline`` was for the same model and data; measured now unless given.
        units: What is ablated.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequences: Sequence[MemorizedSequence],
        general_tokens: Integer[Tensor, "sequence pos"],
        ablation: Ablation,
        decode: Decode,
        batch_tokens: int | None = None,
        baseline: dict[str, Any] | None = None,
        units: Units = NEURONS,
    ) -> None:
        self.model, self.sequences, self.general_tokens = model, sequences, general_tokens
        self.ablation, self.decode = ablation, decode
        self.view = NeuronView(model, units)
        self.batch_tokens = batch_tokens
        self.values: dict[int, Tensor] = {}  # what neurons are clamped at, by target
        self.texts = [decode(sequence.tokens.tolist()) for sequence in sequences]
        self.baseline = baseline or self._measured_baseline()
        self.before: list[dict[str, Any]] = self.baseline["frame"]

    def effect(self, target: int, chosen: NeuronSet) -> dict[str, Any]:
        """What a set of neurons changes when it is ablated for its target, after minus before, as
        JSON takes it.

        Returns:
            target, n_neurons; accuracy and levenshtein, lists [sequence] of fractions and
            characters; perplexity and perplexity_base2 of general text.
        """
        with self._ablated(target, chosen):
            predicted, general = self._measured()
        changes: dict[str, Any] = {"target": target, "n_neurons": len(chosen)}
        changes |= {"accuracy": [], "levenshtein": []}
        for i, was in enumerate(self.before):
            # most stay as they were, and need no decoding
            same = predicted[i] == self.baseline["predicted"][i]
            now = was if same else self._compared(i, predicted[i])
            for name in ("accuracy", "levenshtein"):
                changes[name].append(now[name] - was[name])
        for name, value in general.items():
            changes[name] = value - self.before[0][name]
        return changes

    @torch.no_grad()
    def probabilities(
        self, target: int, chosen: NeuronSet
    ) -> tuple[Float[Tensor, " suffix"], Int[Tensor, " suffix"]]:
        """Of each suffix token of the target, while neurons are ablated: the probability of the
        true token, and the token predicted.
        """
        batch = SequenceBatch.of([self.sequences[target]], self.view.device)
        with self._ablated(target, chosen):
            p = target_logits(self.model, batch).softmax(-1)
        return p.gather(-1, batch.targets[:, None])[:, 0].cpu(), p.argmax(-1).cpu()

    @contextmanager
    def _ablated(self, target: int, chosen: NeuronSet) -> Iterator[None]:
        """Clamp neurons for a target inside the ``with`` block."""
        if target not in self.values:
            values, shape = self.ablation(self.view, target), (self.view.n_layers, *self.view.shape)
            if tuple(values.shape) != shape:
                raise ValueError(
                    f"ablation must give values of the shape {shape}, got {tuple(values.shape)} "
                    f"from {self.ablation!r}."
                )
            self.values[target] = values
        with self.view.clamped(chosen.mask, self.values[target]):
            yield

    def _measured_baseline(self) -> dict[str, Any]:
        """The model as it is: the rows of ``DelResults.before``, and the teacher-forced argmax of
        each suffix.
        """
        predicted, general = self._measured()
        rows: list[dict[str, Any]] = []
        for i, sequence in enumerate(self.sequences):
            prefix = self.decode(sequence.prefix.tolist())
            suffix = self.texts[i][len(prefix) :]
            rows.append(
                {
                    "model": model_name(self.model),
                    "sequence_id": sequence.id,
                    "category": sequence.category,
                    "prefix": prefix,
                    "suffix": suffix,
                    **self._compared(i, predicted[i]),
                    "length": len(self.texts[i]) - len(prefix),
                    **general,
                }
            )
        return {"frame": rows, "predicted": predicted}

    def _compared(self, index: int, predicted: list[int]) -> dict[str, float]:
        """Accuracy of a predicted suffix, and its distance in characters from the true one, as
        ``metrics.levenshtein`` counts them.
        """
        sequence = self.sequences[index]
        text = self.decode([*sequence.prefix.tolist(), *predicted])
        return {
            "accuracy": float(np.mean(sequence.suffix.numpy() == predicted)),
            "levenshtein": float(Levenshtein.distance(text, self.texts[index])),
        }

    @torch.no_grad()
    def _measured(self) -> tuple[list[list[int]], dict[str, float]]:
        """Teacher-forced argmax of each suffix and the perplexities of general text, with the
        neurons that are clamped now.
        """
        how = (self.batch_tokens, self.view.units)
        with self.view.one_gelu_kernel():
            predicted = [
                guess.tolist() for guess in predicted_suffixes(self.model, self.sequences, *how)
            ]
            losses = sequence_losses(self.model, self.general_tokens, *how).double()
        if not losses.isfinite().all():
            raise ValueError(
                "loss on general_tokens must be finite, got one that is not. Use float32, or "
                "ablate fewer neurons."
            )
        return predicted, {
            "perplexity": float(np.exp(losses.numpy().mean())),
            "perplexity_base2": mean_base2(losses),
        }
