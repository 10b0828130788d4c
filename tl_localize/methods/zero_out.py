"""Zero-Out: silence one neuron at a time."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from tl_localize.losses import unembed
from tl_localize.memory import halving
from tl_localize.methods.base import Localizer, Report
from tl_localize.methods.one_pass import CleanRun, silencing_estimate
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores, NeuronSet, check_ratio
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**29}  # larger blocks come fresh from the system on a CPU, and are slower for it


@dataclass(frozen=True, kw_only=True)
class ZeroOut(Localizer):
    """Rise of the memorization loss when one neuron is zero at every position, prefix included.

        A(l, i) = loss(x | neuron i of layer l silenced) - loss(x)

    With ``screen`` the first-order estimate of ``Attribution`` ranks the neurons of each layer; only the highest-ranked share gets its
    exact score and the rest keep their estimate. ``screened`` tells which is which, and what a random sample of the rest shows
    about those that the estimate has missed.

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (5). Differs: nothing without ``screen``, which is ours.
    Args:    screen: share of each layer's neurons that is scored exactly, in (0, 1]; None for all.
             screen_sample: neurons per layer, drawn at random among the rest, that are scored exactly too.
             seed: of the sample.
    Returns: [layer neuron], nats per suffix token.

    >>> from tl_localize import ZeroOut, load_model
    >>> from tl_localize.reference_corpus import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> screened = ZeroOut(screen=0.005, screen_sample=4).screened(model, sequence)
    >>> len(screened.top), len(screened.sample)
    (48, 24)
    """

    name: ClassVar[str] = "zero_out"
    screen: float | None = None
    screen_sample: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.screen is not None:
            check_ratio("screen", self.screen)
        if isinstance(self.screen_sample, bool) or not isinstance(self.screen_sample, numbers.Integral) or self.screen_sample < 0:
            raise ValueError(f"screen_sample must be a whole number from 0 on, got {self.screen_sample!r}. 32 is the default.")

    def screened(self, model: LanguageModel, sequence: MemorizedSequence) -> ScreenedScores:
        """Scores, which of them are exact, and what the sample says about the others.

        Raises:
            ValueError: ``screen`` is None; the model or the sequence cannot be scored.
        """
        if self.screen is None:
            raise ValueError("screen must be a fraction in (0, 1], got None, with which every score is exact. Write ZeroOut(screen=0.05).")
        check_sequences(model, [sequence])
        values, estimates, top, sample = self._screened(NeuronView(model), sequence, lambda fraction: None)
        return ScreenedScores(NeuronScores(values, self.name, sequence.id, repr(self)), estimates, NeuronSet(top), NeuronSet(sample))

    def _attribute(self, neurons: NeuronView, sequence: MemorizedSequence, report: Report) -> Float[Tensor, "layer neuron"]:
        if self.screen is not None:
            return self._screened(neurons, sequence, report)[0]
        everything = torch.ones(neurons.n_layers, neurons.n_neurons, dtype=torch.bool)
        return self._exact(neurons, sequence, everything, torch.zeros_like(everything, dtype=torch.float32), report)

    def _screened(
        self, neurons: NeuronView, sequence: MemorizedSequence, report: Report
    ) -> tuple[Float[Tensor, "layer neuron"], Float[Tensor, "layer neuron"], Bool[Tensor, "layer neuron"], Bool[Tensor, "layer neuron"]]:
        """Scores, estimates, the neurons that the estimate chose, the neurons that were drawn among the rest."""
        assert self.screen is not None
        estimates = silencing_estimate(neurons, SequenceBatch.of([sequence], neurons.device))[0]
        count = max(1, round(self.screen * neurons.n_neurons))
        best = estimates.argsort(dim=-1, descending=True, stable=True)[:, :count]
        top = torch.zeros_like(estimates, dtype=torch.bool).scatter(-1, best, True)
        lots = torch.rand(estimates.shape, generator=torch.Generator().manual_seed(self.seed)).masked_fill(top, -1.0)
        drawn = lots.argsort(dim=-1, descending=True)[:, : min(self.screen_sample, neurons.n_neurons - count)]
        sample = torch.zeros_like(top).scatter(-1, drawn, True)
        return self._exact(neurons, sequence, top | sample, estimates, report), estimates, top, sample

    @torch.no_grad()
    def _exact(
        self,
        neurons: NeuronView,
        sequence: MemorizedSequence,
        chosen: Bool[Tensor, "layer neuron"],
        others: Float[Tensor, "layer neuron"],
        report: Report,
    ) -> Float[Tensor, "layer neuron"]:
        """Exact scores of the chosen neurons, and the numbers given for the others."""
        batch = SequenceBatch.of([sequence], neurons.device)
        clean = CleanRun.of(neurons, batch.tokens)
        scores = others.clone()
        done = 0
        for layer in range(neurons.n_layers):
            for chunk, rise in self._rises(clean, batch, layer, chosen[layer].nonzero().flatten().tolist()):
                scores[layer, chunk] = rise
                done += len(chunk)
                report(done / int(chosen.sum()))
        return scores

    def _rises(
        self, clean: CleanRun, batch: SequenceBatch, layer: int, chosen: Sequence[int]
    ) -> Iterator[tuple[list[int], Float[Tensor, " chunk"]]]:
        """Rise of the loss for each of the chosen neurons of a layer, in chunks, on the CPU; nothing below the layer runs again."""
        neurons = clean.neurons
        act, rows = clean.acts[layer], neurons.rows(layer)
        baseline = token_losses(neurons, clean.inputs.residual[neurons.n_layers], batch)
        size = max(1, self._tokens(neurons) // batch.tokens.shape[1])

        def losses(chunk: list[int]) -> Tensor:
            if neurons.writes_unchanged(layer):
                written = act.T[chunk][:, :, None] * rows[chunk][:, None, :]  # [neuron pos d_model]
                entering = clean.inputs.residual[layer + 1]
                return token_losses(neurons, clean.above(layer + 1, entering - written.to(entering)), batch)
            gates = 1 - F.one_hot(torch.tensor(chunk, device=act.device), neurons.n_neurons)
            entering = clean.inputs.residual[layer].expand(len(chunk), -1, -1)
            with neurons.scaled({layer: gates}):
                return token_losses(neurons, clean.above(layer, entering), batch)

        for chunk, loss in halving(losses, chosen, size):
            yield chunk, (loss - baseline).mean(1).cpu()  # small differences first: their mean keeps its digits


@dataclass(frozen=True, eq=False)
class ScreenedScores:
    """Zero-Out scores of which some are exact and the others a first-order estimate.

    Args:
        scores: exact for the neurons of ``top`` and ``sample``, the estimate for the others.
        estimates: the estimate of every neuron, [layer neuron].
        top: the neurons of each layer that the estimate ranked highest.
        sample: neurons drawn at random among the others, as many in every layer.
    """

    scores: NeuronScores
    estimates: Float[Tensor, "layer neuron"]
    top: NeuronSet
    sample: NeuronSet

    @property
    def exact(self) -> NeuronSet:
        """The neurons whose score is exact."""
        return NeuronSet(self.top.mask | self.sample.mask)

    @property
    def largest_error(self) -> float:
        """Largest distance between estimate and exact score in the sample, nats per suffix token; nan without a sample."""
        errors = (self.scores.values - self.estimates).abs()[self.sample.mask]
        return float(errors.max()) if len(errors) else math.nan

    def missed(self, ratio: float, confidence: float = 0.95) -> tuple[int, float]:
        """What screening may have missed of the exact top ``ratio`` of each layer.

        Returns: how many sampled neurons belong into the top of their layer, and the largest share of all neurons outside
            ``top`` that may belong there, at this confidence (Clopper and Pearson's one-sided bound; 1 without a sample).
        Raises:
            ValueError: ratio or confidence is not a fraction, or ratio exceeds what was screened.
        """
        check_ratio("ratio", ratio)
        check_ratio("confidence", confidence)
        n_neurons = self.scores.values.shape[1]
        count, screened = max(1, round(ratio * n_neurons)), int(self.top.mask[0].sum())
        if count > screened:
            raise ValueError(f"ratio must be at most the screened share, {screened / n_neurons:.3g}, got {ratio!r}. Raise screen.")
        lowest = self.scores.values.masked_fill(~self.top.mask, -math.inf).topk(count).values[:, -1:]
        found = int((self.sample.mask & (self.scores.values > lowest)).sum())
        n = len(self.sample)
        if found == n:
            return found, 1.0
        from scipy.stats import beta

        return found, float(beta.ppf(confidence, found + 1, n - found))


def token_losses(neurons: NeuronView, resid: Float[Tensor, "batch pos d_model"], sequence: SequenceBatch) -> Float[Tensor, "batch target"]:
    """-log P of each suffix token of one sequence for each residual stream of a batch; few logits at a time."""
    predicting = resid[:, sequence.positions]
    size = max(1, LOGITS_AT_ONCE.get(resid.device.type, 2**22) // (len(sequence.targets) * neurons.model.cfg.d_vocab))
    losses: list[Tensor] = []
    for part in predicting.split(size):
        logits = unembed(neurons.model, part)
        targets = sequence.targets.to(logits.device).repeat(len(part))
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets, reduction="none").reshape(len(part), -1))
    return torch.cat(losses)
