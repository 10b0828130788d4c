"""Zero-Out: ablate one neuron at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_localize.checks import check_count, check_ratio, check_seed
from tl_localize.methods.base import Found, Localizer, Values, one_by_one
from tl_localize.methods.partial_runs import CleanRun, ablation_estimate, activations
from tl_localize.model.forward import resume, unembed
from tl_localize.model.memory import FractionReport, part_at, tokens_that_fit, work_in_batches
from tl_localize.model.neurons import NeuronView
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence, SequenceBatch

Mask = Bool[Tensor, "layer neuron"]
# tokens of one pass on a CPU, whose cache holds no more
AT_ONCE = 1024
# positions whose logits are there together
LOGITS_AT_ONCE = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, kw_only=True)
class ZeroOut(Localizer):
    """Rise of the memorization loss when one neuron is zero at every position, prefix included.

        A(l, i) = loss(x | neuron i of layer l is 0) - loss(x)

    With ``screen`` only a share of each layer gets its exact score: the neurons that rank highest
    by the first-order estimate of ``Attribution``, which is too low for neurons that fire
    everywhere, and by the norm of their output, ||h_i|| ||v_i|| over all positions, in turn
    (benchmarks/test_screen_recall.py). A random sample of the rest gets its exact score too; the
    others keep their estimate: ``NeuronScores.exact`` is the mask of the exact scores.

    bfloat16 rounds away much of the effect of one neuron; use float32 or float16
    (benchmarks/test_precision.py).

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (7). Differs: nothing without ``screen``,
    which is ours.

    Args:
        screen: share of each layer's neurons that is scored exactly, in (0, 1]; None for all.
        screen_sample: neurons of each layer, drawn at random from the rest, that are scored exactly
            too.
        seed: of the sample.

    Returns:
        [layer neuron], nats per suffix token.

    Raises:
        ValueError: screen is not a fraction in (0, 1], or screen_sample not a whole number from 0
            on.

    >>> scores = ZeroOut(screen=0.005, screen_sample=2)(model, sequence)
    >>> len(scores.exact)  # 8 screened and 2 sampled neurons of each layer
    60
    """

    name = "zero_out"
    title = "Zero-Out"
    batched = False
    screen: float | None = None
    screen_sample: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.screen is not None:
            check_ratio("screen", self.screen)
        check_count(0, screen_sample=self.screen_sample)
        check_seed(self.seed)

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> list[Found]:
        return one_by_one(partial(self._score, neurons), sequences, report)

    def _score(
        self, neurons: NeuronView, sequence: MemorizedSequence, report: FractionReport
    ) -> Values | NeuronScores:
        if self.screen is None:
            everything = torch.ones(neurons.size, dtype=torch.bool)
            return self.exact(neurons, sequence, everything, report)
        estimates = ablation_estimate(neurons, SequenceBatch.of([sequence], neurons.device))[0]
        count = max(1, round(self.screen * neurons.n_neurons))
        chosen = highest_of_both(estimates, output_norms(neurons, sequence), count)
        lots = torch.rand(estimates.shape, generator=torch.Generator().manual_seed(int(self.seed)))
        drawn = lots.masked_fill(chosen, -1.0).topk(min(self.screen_sample, lots.shape[1] - count))
        chosen = chosen.scatter(-1, drawn.indices, True)
        exact = self.exact(neurons, sequence, chosen, report)
        values = torch.where(chosen, exact, estimates)
        return NeuronScores(values, exact=NeuronSet(chosen, neurons.units), units=neurons.units)

    @torch.no_grad()
    def exact(
        self, neurons: NeuronView, sequence: MemorizedSequence, chosen: Mask, report: FractionReport
    ) -> Values:
        """Exact scores of the chosen neurons, and 0 for the others."""
        batch = SequenceBatch.of([sequence], neurons.device)
        scores = torch.zeros(chosen.shape)
        fitting = (
            AT_ONCE
            if neurons.device.type == "cpu"
            else tokens_that_fit(neurons, len(sequence), False)
        )
        size = max(1, (self.batch_tokens or fitting) // len(sequence))
        with neurons.one_gelu_kernel():
            clean = CleanRun.of(neurons, batch.tokens)
            baseline = token_losses(neurons, clean.entering[neurons.n_layers], batch)
            # Ablating a neuron that is zero at every position changes nothing.
            writes = [neurons.by_unit(act.any(0)).bool() for act in clean.acts.values()]
            chosen = chosen & torch.stack(writes).cpu()
            places = chosen.nonzero()[:, 1]
            counts = chosen.sum(1).tolist()
            on_device = places.to(neurons.device).split(counts)
            for layer, some in enumerate(places.split(counts)):
                work = partial(ablated_losses, clean, batch, layer, on_device[layer])
                for chunk, losses in work_in_batches(work, range(len(some)), size):
                    scores[layer, some[chunk]] = (losses - baseline).mean(1).float()
                report((layer + 1) / neurons.n_layers)
        return scores


def ablated_losses(
    clean: CleanRun, batch: SequenceBatch, layer: int, some: Int[Tensor, " some"], chunk: list[int]
) -> Tensor:
    """``token_losses`` with each of a chunk of some neurons of a layer ablated, [neuron target];
    nothing below the layer runs again.
    """
    neurons = clean.neurons
    act = clean.acts[layer]
    ablated = part_at(some, chunk)
    if layer in clean.additive:
        # [neuron pos d_model]
        written = act.T[ablated][:, :, None] * neurons.rows(layer)[ablated][:, None, :]
        entering = clean.entering[layer + 1]
        resid = resume(neurons.model, layer + 1, entering - written.to(entering))
        return token_losses(neurons, resid, batch)
    gates = 1 - F.one_hot(ablated, neurons.n_neurons)
    with neurons.scaled({layer: gates}):
        resid = clean.again(layer, len(chunk))
    # not within: a Bridge unembeds by a run that meets hooks on what enters its last layer
    return token_losses(neurons, resid, batch)


@torch.no_grad()
def output_norms(neurons: NeuronView, sequence: MemorizedSequence) -> Values:
    """Norm of each neuron's output over all positions, for a neuron ||h_i|| ||v_i||; float32 on the
    CPU.
    """
    norms = [
        neurons.strengths(layer, act[0].float()).norm(dim=0)
        for layer, act in activations(neurons, sequence.tokens[None]).items()
    ]
    return (torch.stack(norms) * neurons.row_norms()).cpu()


def highest_of_both(estimates: Values, norms: Values, count: int) -> Mask:
    """``count`` neurons of each layer: the highest by estimate and the highest by norm, from both
    rankings in turn.
    """
    ranks = [
        values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        for values in (estimates, norms)
    ]
    best = torch.minimum(*ranks).argsort(dim=-1, stable=True)[:, :count]
    return torch.zeros_like(estimates, dtype=torch.bool).scatter(-1, best, True)


def token_losses(
    neurons: NeuronView, resid: Float[Tensor, "batch pos d_model"], sequence: SequenceBatch
) -> Float[Tensor, "batch target"]:
    """-log P of each suffix token of one sequence for each residual stream of a batch, float64 on
    the CPU.

    A score is a small difference of these, so the last step, the log of the sum and the distance
    from the highest logit, is in float64.
    """
    predicting = resid[:, sequence.positions]
    found: list[Tensor] = []
    at_once = LOGITS_AT_ONCE.get(resid.device.type, 1024)
    for part in predicting.split(max(1, at_once // len(sequence.targets))):
        logits = unembed(neurons.model, part)
        highest = logits.amax(-1, keepdim=True)
        true = logits.gather(-1, sequence.targets.expand(len(part), -1)[..., None])
        total = torch.sub(logits, highest).exp_().sum(-1, keepdim=True)
        found.append(torch.cat([highest, true, total], -1))
    highest, true, total = torch.cat(found).cpu().double().unbind(-1)
    return total.log() + highest - true
