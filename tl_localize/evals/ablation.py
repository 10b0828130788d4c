"""What an ablated neuron's activation becomes, and a meter of what the ablation of some neurons
changes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Integer
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.methods.partial_runs import activations
from tl_localize.metrics import (
    Decode,
    mean_base2,
    predicted_suffixes,
    sequence_losses,
    target_logits,
)
from tl_localize.model.memory import tokens_that_fit, work_in_batches
from tl_localize.model.neurons import LanguageModel, NeuronView, model_name
from tl_localize.scores import NeuronSet
from tl_localize.sequences import MemorizedSequence, SequenceBatch, divide_text
from tl_localize.units import NEURONS, Units

Tokens = Integer[Tensor, "sequence pos"]
Replacements = Float[Tensor, "layer neuron *width"]
Rows = list[dict[str, Any]]


def zeros(text: Tokens, seed: int, neurons: NeuronView, target: int) -> Replacements:
    """Zero ablation, the paper's dropout."""
    return torch.zeros(neurons.n_layers, *neurons.shape)


def means(text: Tokens, seed: int, neurons: NeuronView, target: int) -> Replacements:
    """Mean ablation: each neuron's mean over general text. The first position of a text, which has
    no context, does not count.
    """
    n, length = text.shape
    total = torch.zeros(neurons.n_layers, *neurons.shape, dtype=torch.float64)
    size = max(1, tokens_that_fit(neurons, length) // length)
    batches = work_in_batches(lambda rows: activations(neurons, text[rows]), range(n), size)
    for _, acts in batches:
        for layer, act in acts.items():
            # some devices have no float64, so the sum is made on the CPU
            total[layer] += act[:, 1:].cpu().double().sum((0, 1))
    return (total / (n * (length - 1))).float()


def resampled(text: Tokens, seed: int, neurons: NeuronView, target: int) -> Replacements:
    """Resample ablation: what each neuron was at one random position of general text, the same
    position for all neurons.

    Every target has its own position, the same for all methods and ratios. The first position of a
    text does not count.
    """
    n, length = text.shape
    drawn = int(np.random.default_rng([seed, target]).integers(n * (length - 1)))
    row, position = divmod(drawn, length - 1)
    acts = activations(neurons, text[row : row + 1])
    return torch.stack([act[0, position + 1].float().cpu() for act in acts.values()])


# by name: the values of all neurons, at every position, while the neurons of a target are ablated,
# from general text and a seed
ABLATIONS: dict[str, Callable[[Tokens, int, NeuronView, int], Replacements]] = {
    "zero": zeros,
    "mean": means,
    "resample": resampled,
}


@dataclass(eq=False)
class AblationMeter:
    """Measures what the ablation of neurons changes, against the model as it is.

    Each set of neurons is ablated alone, so that no number depends on which sets were measured
    before.

    Args:
        sequences: The target and the others.
        general_tokens: [sequence pos], for the perplexity.
        ablation: What neurons are clamped at for a target, one of ``ABLATIONS`` with its text.
        before: The rows of ``DelResults.before``, of the same model and data; measured now unless
            given.
        units: What is ablated.
    """

    model: LanguageModel
    sequences: Sequence[MemorizedSequence]
    general_tokens: Tokens
    ablation: Callable[[NeuronView, int], Replacements]
    decode: Decode
    before: Rows = field(default_factory=list)
    units: Units = NEURONS

    def __post_init__(self) -> None:
        self.view = NeuronView(self.model, self.units)
        self.values: dict[int, Tensor] = {}  # what neurons are clamped at, by target
        self.texts = [self.decode(sequence.tokens.tolist()) for sequence in self.sequences]
        self.before = self.before or self._measure_baseline()

    def effect(self, target: int, chosen: NeuronSet) -> dict[str, Any]:
        """What a set of neurons changes when it is ablated for its target, after minus before, as
        JSON takes it.

        Returns:
            target, n_neurons, n_layers (that they are in); accuracy and levenshtein, lists
            [sequence] of fractions and characters; perplexity and perplexity_base2 of general text.
        """
        with self._ablated(target, chosen):
            now = self._measure()
        changes = now - pd.DataFrame(self.before)[now.columns]
        n_layers = int(chosen.mask.any(1).sum())
        effect: dict[str, Any] = {"target": target, "n_neurons": len(chosen), "n_layers": n_layers}
        for name in now.columns:
            effect[name] = changes[name].tolist()
            if name.startswith("perplexity"):  # of one text, the same for all sequences
                effect[name] = effect[name][0]
        return effect

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

    def _ablated(self, target: int, chosen: NeuronSet) -> AbstractContextManager[None]:
        """Clamp neurons for a target inside the ``with`` block."""
        if target not in self.values:
            self.values[target] = self.ablation(self.view, target)
        return self.view.clamped(chosen.mask, self.values[target])

    def _measure_baseline(self) -> Rows:
        """The model as it is: the rows of ``DelResults.before``."""
        rows: Rows = []
        numbers: Any = self._measure().to_dict("records")
        for sequence, measured in zip(self.sequences, numbers, strict=True):
            tokens = sequence.tokens.tolist()
            prefix, suffix = divide_text(self.decode, tokens, sequence.n_prefix)
            about = {"model": model_name(self.model), "sequence_id": sequence.id}
            about |= {"category": sequence.category, "prefix": prefix, "suffix": suffix}
            rows.append({**about, "length": len(suffix), **measured})
        return rows

    @torch.no_grad()
    def _measure(self) -> pd.DataFrame:
        """Accuracy and distance of each predicted suffix (teacher-forced argmax) as ``metrics``
        counts them, and the perplexities of general text, with the neurons that are clamped now.
        """
        with self.view.one_gelu_kernel():
            predicted = predicted_suffixes(self.model, self.sequences)
            losses = sequence_losses(self.model, self.general_tokens).double()
        if not losses.isfinite().all():
            raise ValueError(
                "loss on general_tokens must be finite, got one that is not. Use float32, or "
                "ablate fewer neurons."
            )
        rows: list[dict[str, float]] = []
        for sequence, guess, text in zip(self.sequences, predicted, self.texts, strict=True):
            distance = Levenshtein.distance(
                self.decode([*sequence.prefix.tolist(), *guess.tolist()]), text
            )
            right = float((guess == sequence.suffix).double().mean())
            rows.append({"accuracy": right, "levenshtein": float(distance)})
        perplexity = float(np.exp(losses.numpy().mean()))
        general = {"perplexity": perplexity, "perplexity_base2": mean_base2(losses)}
        return pd.DataFrame(rows).assign(**general)
