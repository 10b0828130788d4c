"""Iterative Attribution: which neurons must be ablated together for a text to be forgotten?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.batching import Report, rows_that_fit
from tl_localize.forward import generate
from tl_localize.losses import batch_loss, mean_probability
from tl_localize.methods.base import BatchValues, Localizer
from tl_localize.methods.masks import check_first_layer
from tl_localize.methods.partial_runs import gate_gradients
from tl_localize.neurons import NeuronView, Real, check_count, check_number, check_ratio, check_seed
from tl_localize.sequences import MemorizedSequence, SequenceBatch

N_TEXTS, LENGTH = 16, 64  # that the model writes
# effects by seed, as long as the view lives
_GENERAL: WeakKeyDictionary[NeuronView, dict[int, Tensor]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class IterativeAttribution(Localizer):
    """Order in which neurons are ablated, in rounds, by their effect on the probability of the
    text: what is *needed for* it?

        E(l, i) = d O / d gate of neuron i
        A(l, i) = 1 - (place in the order of its layer) / (number ablated) + m      if ablated
        A(l, i) = E(l, i) of the first round                                        else

    O is the mean probability of the true suffix tokens while the neurons of earlier rounds are
    ablated; m is the highest E of those that are never ablated. Each round ablates the neurons with
    the largest effect, 1 / rounds of the share of each layer, so that what takes over from ablated
    neurons is measured while they are ablated. O is bounded, so tokens that are already lost have
    no gradient. The sets of all smaller ratios are nested in one run. With a contrast, neurons that
    other text needs too are ablated later: E is divided by

        1 + contrast G(l, i) / mean G
        G(l, i) = mean over texts that the model itself writes of |d loss / d gate of neuron i|

    Source: ours, not of the paper; one round is ``Attribution`` with the probability in place of
    the loss.

    Args:
        rounds: forward and backward passes.
        share: of the neurons of each layer that are ablated in all rounds together; the largest
            ratio that is to be looked at.
        first_layer: layers below it are not ablated, and score their first effect; by default 1, as
            in DEL, or 0 in a model of one layer.
        contrast: 0 erases most at a fixed share; 3 a little less, and other texts lose much less.
        seed: of the 16 texts of up to 64 tokens that the model writes, after its beginning-of-text
            token if it has one.

    Returns:
        [layer neuron]; at most 1 + m, without a unit.

    Raises:
        ValueError: contrast is negative or not finite, or first_layer leaves no layer of the model.

    >>> len(IterativeAttribution()(model, sequence).top_k(0.01))  # of all layers but the first
    75
    """

    name: ClassVar[str] = "iterative_attribution"
    title: ClassVar[str] = "Iterative Attribution (not the paper's)"
    by_layer: ClassVar[bool] = False  # all layers are ablated together
    chunk: ClassVar[int] = 16
    rounds: int = 10
    share: Real = 0.1
    first_layer: int | None = None
    contrast: Real = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(rounds=self.rounds)
        check_ratio("share", self.share)
        if self.first_layer is not None:
            check_count(0, first_layer=self.first_layer)
        check_seed(self.seed)
        if not 0 <= check_number("contrast", self.contrast) < math.inf:
            raise ValueError(
                f"contrast must be a finite number from 0 on, got {self.contrast!r}. Use 3, or 0 "
                "for none."
            )

    @property
    def passes(self) -> float:
        return 3.0 * (self.rounds + (self.contrast > 0))

    def chosen_from(self, neurons: NeuronView) -> int:
        if self.first_layer is None:
            return min(1, neurons.n_layers - 1)
        return check_first_layer(neurons, self.first_layer)

    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: Report
    ) -> BatchValues:
        batch = SequenceBatch.of(sequences, neurons.device)
        tuned = slice(self.chosen_from(neurons), None)
        gates = torch.ones(len(batch), neurons.n_layers, neurons.n_neurons, device=neurons.device)
        # 1 for the first that is ablated, down to above 0 for the last; 0 for those that never are
        places = torch.zeros_like(gates)
        count = max(1, round(self.share * neurons.n_neurons))
        ends = [round(count * (n + 1) / self.rounds) for n in range(self.rounds)]
        needed = general_effects(neurons, self.seed) if self.contrast else torch.ones_like(gates[0])
        weight = 1 / (1 + self.contrast * needed / needed.mean())
        first = gates
        for n, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if n and start == end:
                continue
            (effects,) = gate_gradients(neurons, batch, mean_probability, gates)
            effects *= weight
            first = first if n else effects
            leaving = (
                effects.masked_fill(gates == 0, -torch.inf)[:, tuned].topk(end - start).indices
            )
            order = 1 - torch.arange(start, end, device=neurons.device) / count
            places[:, tuned] = places[:, tuned].scatter(-1, leaving, order.expand(leaving.shape))
            gates = (places == 0).to(gates)
            report((n + 1) / self.rounds)
        highest = first.masked_fill(places > 0, 0).clamp(min=0).amax((1, 2), keepdim=True)
        return torch.where(places > 0, highest + places, first).cpu()


def general_effects(neurons: NeuronView, seed: int) -> Float[Tensor, "layer neuron"]:
    """How much the texts that a model writes need each neuron: mean absolute gradient of their loss
    for a gate of one on it. Measured once for a view, which serves one ``map``.
    """
    if neurons in _GENERAL and seed in _GENERAL[neurons]:
        return _GENERAL[neurons][seed]
    texts = [
        MemorizedSequence(tokens, 1, f"text-{i}")
        for i, tokens in enumerate(written_texts(neurons, seed))
    ]
    size = rows_that_fit(neurons, len(texts[0]))
    total = torch.zeros(neurons.n_layers, neurons.n_neurons, device=neurons.device)
    for start in range(0, N_TEXTS, size):
        (effects,) = gate_gradients(
            neurons,
            SequenceBatch.of(texts[start : start + size], neurons.device),
            batch_loss,
        )
        total += effects.abs().sum(0)
    _GENERAL.setdefault(neurons, {})[seed] = total / N_TEXTS
    return _GENERAL[neurons][seed]


def written_texts(neurons: NeuronView, seed: int) -> Int[Tensor, "text pos"]:
    """Texts sampled from a model, after its tokenizer's beginning-of-text token, or each after a
    random token where there is none.
    """
    config: Any = neurons.model.cfg
    generator = torch.Generator().manual_seed(seed)
    length = min(LENGTH, config.n_ctx)
    uniform = torch.rand(N_TEXTS, length - 1, generator=generator)
    first = torch.randint(config.d_vocab, (N_TEXTS, 1), generator=generator)
    bos = getattr(getattr(neurons.model, "tokenizer", None), "bos_token_id", None)
    if bos is not None:
        first = torch.full_like(first, bos)
    first = first.to(neurons.device)
    new = generate(neurons.model, first, length - 1, uniform.to(neurons.device))
    return torch.cat([first, new], 1).cpu()
