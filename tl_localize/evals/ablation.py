"""What an ablated neuron's activation becomes, and a meter of what the ablation of some neurons
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.batching import bytes_to_keep, halving, tokens_that_fit
from tl_localize.execution.tasks import digest_of
from tl_localize.forward import residual, resume
from tl_localize.losses import unembed
from tl_localize.methods.partial_runs import CleanRun
from tl_localize.metrics import Decode, mean_base2
from tl_localize.neurons import LanguageModel, NeuronView, model_name
from tl_localize.scores import NeuronSet
from tl_localize.sequences import MemorizedSequence, SequenceBatch
from tl_localize.units import NEURONS, Units


@runtime_checkable
class Ablation(Protocol):
    """What ablated neurons are clamped at: a frozen callable whose repr names all its settings.

    ``name`` is its name in tables. ``per_target`` says whether the values differ between targets;
    where they do not, they are computed once. Both may be missing.

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
    per_target: ClassVar[bool] = False

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron *width"]:
        return torch.zeros(neurons.n_layers, *neurons.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Mean:
    """Mean ablation: each neuron's mean over general text. The first position of a text, which has
    no context, does not count.

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

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron *width"]:
        def total(rows: list[int]) -> Tensor:
            acts = activations(neurons, self.text[rows[0] : rows[-1] + 1])
            return torch.stack(
                [acts[layer][:, 1:].double().sum((0, 1)).cpu() for layer in range(neurons.n_layers)]
            )

        n, length = self.text.shape
        sums = [
            part for _, part in halving(total, range(n), max(1, tokens_that_fit(neurons) // length))
        ]
        return (torch.stack(sums).sum(0) / (n * (length - 1))).float()


@dataclass(frozen=True, eq=False, repr=False)
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

    text: Integer[Tensor, "sequence pos"]
    seed: int = 0
    name: ClassVar[str] = "resample"
    per_target: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"Resample({list(self.text.shape)} tokens, {digest_of(self.text.tolist())}, seed={self.seed})"

    def __call__(self, neurons: NeuronView, target: int) -> Float[Tensor, "layer neuron *width"]:
        n, length = self.text.shape
        row, position = divmod(
            int(np.random.default_rng([self.seed, target]).integers(n * (length - 1))), length - 1
        )
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
    """Measures what the ablation of neurons changes; what does not depend on the neurons is
    computed once.

    That is the baseline, and the residual stream below the first layer with an ablated neuron,
    which is kept as far as memory allows. Each set of neurons is ablated alone, so that no number
    depends on which sets were measured before.

    Args:
        sequences: the target and the others.
        general_tokens: [sequence pos], for the perplexity.
        batch_tokens: tokens in one forward pass; by default as many as fit.
        baseline: of the same model and data; measured now unless given.
        units: what is ablated.
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
        self.tokens = batch_tokens or tokens_that_fit(self.view)
        self.room = bytes_to_keep(self.view)
        self.restarts = CleanRun.of(
            self.view, sequences[0].tokens[None].to(self.view.device)
        ).restarts
        # what, first row, rows, layer -> the residual stream that enters it
        self.kept: dict[tuple[str, int, int, int], Tensor] = {}
        self.values: Tensor | None = None  # of an ablation that is the same for all targets
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
        predicted, general = self._measured(chosen, self._values(target))
        changes = {"accuracy": [0.0] * len(predicted), "levenshtein": [0.0] * len(predicted)}
        for i, (guess, old, was) in enumerate(
            zip(predicted, self.baseline["predicted"], self.before, strict=True)
        ):
            if guess != old:  # most stay as they were, and need no decoding
                for name, value in self._compared(i, guess).items():
                    changes[name][i] = value - was[name]
        general = {name: value - self.before[0][name] for name, value in general.items()}
        return {"target": target, "n_neurons": len(chosen), **changes, **general}

    @torch.no_grad()
    def probabilities(
        self, target: int, chosen: NeuronSet
    ) -> tuple[Float[Tensor, " suffix"], Int[Tensor, " suffix"]]:
        """Of each suffix token of the target, while neurons are ablated: the probability of the
        true token, and the token predicted.
        """
        batch = SequenceBatch.of([self.sequences[target]], self.view.device)
        resid = self._ablated("sequences", [target], batch.tokens, chosen, self._values(target))
        p = unembed(self.model, resid[batch.rows, batch.positions]).softmax(-1)
        return p.gather(-1, batch.targets[:, None])[:, 0].cpu(), p.argmax(-1).cpu()

    def _values(self, target: int) -> Float[Tensor, "layer neuron *width"]:
        """What ablated neurons are clamped at."""
        if self.values is not None:
            return self.values
        values = self.ablation(self.view, target)
        if tuple(values.shape) != (shape := (self.view.n_layers, *self.view.shape)):
            raise ValueError(
                f"ablation must give values of the shape {shape}, got {tuple(values.shape)} from "
                f"{self.ablation!r}."
            )
        if not getattr(self.ablation, "per_target", True):
            self.values = values
        return values

    def _measured_baseline(self) -> dict[str, Any]:
        """The model as it is: the rows of ``DelResults.before``, and the teacher-forced argmax of
        each suffix.
        """
        untouched = torch.zeros(self.view.n_layers, *self.view.shape)
        nothing = NeuronSet(
            torch.zeros(self.view.n_layers, self.view.n_neurons, dtype=torch.bool), self.view.units
        )
        predicted, general = self._measured(nothing, untouched)
        rows: list[dict[str, Any]] = []
        for i, (sequence, text) in enumerate(zip(self.sequences, self.texts, strict=True)):
            prefix = self.decode(sequence.prefix.tolist())
            about = {
                "model": model_name(self.model),
                "sequence_id": sequence.id,
                "category": sequence.category,
            }
            shown = {"prefix": prefix, "suffix": text[len(prefix) :]}
            rows.append(
                {
                    **about,
                    **shown,
                    **self._compared(i, predicted[i]),
                    "length": len(text) - len(prefix),
                    **general,
                }
            )
        return {"frame": rows, "predicted": predicted}

    def _compared(self, index: int, predicted: list[int]) -> dict[str, float]:
        """Accuracy of a predicted suffix, and its distance in characters from the true one, as
        ``metrics.levenshtein`` counts them.
        """
        sequence = self.sequences[index]
        distance = Levenshtein.distance(
            self.decode([*sequence.prefix.tolist(), *predicted]), self.texts[index]
        )
        return {
            "accuracy": float(np.mean(sequence.suffix.numpy() == predicted)),
            "levenshtein": float(distance),
        }

    @torch.no_grad()
    def _measured(
        self, chosen: NeuronSet, values: Float[Tensor, "layer neuron *width"]
    ) -> tuple[list[list[int]], dict[str, float]]:
        """Teacher-forced argmax of each suffix and the perplexities of general text, with a set of
        neurons clamped at these values.
        """
        size = max(1, self.tokens // max(map(len, self.sequences)))
        batches = halving(
            partial(self._predicted, chosen, values), range(len(self.sequences)), size
        )
        predicted = [guess.tolist() for _, part in batches for guess in part]
        size = max(1, self.tokens // self.general_tokens.shape[1])
        batches = halving(
            partial(self._losses, chosen, values), range(len(self.general_tokens)), size
        )
        found = torch.cat([losses for _, losses in batches]).double()
        if not found.isfinite().all():
            raise ValueError(
                "loss on general_tokens must be finite, got one that is not. Use float32, or "
                "ablate fewer neurons."
            )
        return predicted, {
            "perplexity": float(np.exp(found.numpy().mean())),
            "perplexity_base2": mean_base2(found),
        }

    def _predicted(
        self, chosen: NeuronSet, values: Float[Tensor, "layer neuron *width"], rows: list[int]
    ) -> Sequence[Tensor]:
        batch = SequenceBatch.of([self.sequences[row] for row in rows], self.view.device)
        resid = self._ablated("sequences", rows, batch.tokens, chosen, values)
        predicted = unembed(self.model, resid[batch.rows, batch.positions]).argmax(-1).cpu()
        return predicted.split([len(self.sequences[row].suffix) for row in rows])

    def _losses(
        self, chosen: NeuronSet, values: Float[Tensor, "layer neuron *width"], rows: list[int]
    ) -> Float[Tensor, " batch"]:
        tokens = self.general_tokens[rows[0] : rows[-1] + 1].long().to(self.view.device)
        logits = unembed(
            self.model, self._ablated("general text", rows, tokens, chosen, values)[:, :-1]
        )
        return (
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            .view(len(rows), -1)
            .mean(-1)
            .cpu()
        )

    def _ablated(
        self,
        what: str,
        rows: list[int],
        tokens: Int[Tensor, "batch pos"],
        chosen: NeuronSet,
        values: Float[Tensor, "layer neuron *width"],
    ) -> Float[Tensor, "batch pos d_model"]:
        """The final residual stream of consecutive rows while a set of neurons is clamped at these
        values.
        """
        n_layers = self.view.n_layers
        first = int(chosen.mask.any(-1).int().argmax()) if len(chosen) else n_layers
        with self.view.one_gelu_kernel(), self.view.clamped(chosen.mask, values):
            if not self.restarts:
                return residual(self.model, tokens)
            key = (what, rows[0], len(rows), first)
            entering = self.kept.get(key)
            if entering is None:
                entering = residual(self.model, tokens, first)
                if first < n_layers and entering.nbytes <= self.room:
                    self.kept[key] = entering
                    self.room -= entering.nbytes
            return resume(self.model, first, entering)
