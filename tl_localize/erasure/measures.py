"""What an edit costs, what is left of a text, and whether a change of weights lies where it
should.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Integer
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.injection.recipes import check_earlier
from tl_localize.metrics import accuracy, perplexity
from tl_localize.model.forward import generate, residual, unembed
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronSet
from tl_localize.sequences import MemorizedSequence, decoder_or_ids, one_or_more

Json = dict[str, Any]

TIED = ("embed.W_E", "unembed.W_U")  # one weight in many models


@dataclass(frozen=True)
class Price:
    """What other text loses by an edit.

    Args:
        others_lost: mean accuracy that other known texts lose, in points (1 is 0.01).
        perplexity_rise: of general text, in percent.

    >>> Price(0.5, 3.0).within(Price(1.0, 5.0))
    True
    """

    others_lost: float
    perplexity_rise: float

    def within(self, limit: "Price") -> bool:
        """Whether both are at most what the limit allows, to the sixth digit."""
        lost, rise = round(self.others_lost, 6), round(self.perplexity_rise, 6)
        return lost <= limit.others_lost and rise <= limit.perplexity_rise

    def __str__(self) -> str:
        return (
            f"the others lose {self.others_lost:.2g} points, the perplexity of general text "
            f"changes by {self.perplexity_rise:+.2g} %"
        )


class PriceMeter:
    """Measures the price of what is done to a model, against the model as it is when this is
    made.
    """

    def __init__(
        self,
        model: LanguageModel,
        others: Sequence[MemorizedSequence],
        general_tokens: Integer[Tensor, "batch pos"],
    ) -> None:
        self.model = model
        self.others = others
        self.general_tokens = general_tokens
        self.accuracy = self._accuracy()
        self.perplexity = perplexity(model, general_tokens)

    def measure(self) -> Price:
        """The price of the model as it is now."""
        lost = 100 * (self.accuracy - self._accuracy())
        now = perplexity(self.model, self.general_tokens)
        return Price(lost, 100 * (now / self.perplexity - 1))

    def _accuracy(self) -> float:
        """Mean accuracy of the other texts; 0 where there are none."""
        return mean_accuracy(self.model, self.others) if self.others else 0.0


def mean_accuracy(model: LanguageModel, sequences: Sequence[MemorizedSequence]) -> float:
    """Mean accuracy, rounded so that 3 right tokens of 10 are 0.3."""
    return round(float(accuracy(model, sequences).double().mean()), 6)


def measure_texts(model: LanguageModel, sequences: Sequence[MemorizedSequence]) -> pd.DataFrame:
    """What the model still has of each text.

    Returns:
        One row per text: ``accuracy`` (teacher-forced, fraction of the suffix); ``extracted``, the
        fraction of the suffix that greedy decoding gives before its first wrong token; ``exact``,
        whether it gives all of it; ``distance``, from what it gives to the suffix, in characters
        (in tokens, where the model has no tokenizer). ``half_...``: the same from the second half
        of the prefix alone.

    >>> measure_texts(model, few[:1])["exact"].tolist()
    [True]
    """
    sequences = one_or_more(sequences)
    rows: list[Json] = []
    shares = accuracy(model, sequences).double().round(decimals=6).tolist()
    for sequence, share in zip(sequences, shares, strict=True):
        row: Json = {"id": sequence.id, "category": sequence.category, "accuracy": share}
        first = int(bool(sequence.bos))  # a model that was trained with it needs it
        start, words = sequence.prefix[:first], sequence.prefix[first:]
        half = torch.cat([start, words[len(words) // 2 :]])
        for name, prefix in (("", sequence.prefix), ("half_", half)):
            found = extract(model, prefix, sequence.suffix)
            row |= {f"{name}{key}": value for key, value in found.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def extract(model: LanguageModel, prefix: Tensor, suffix: Tensor) -> Json:
    """How much of a suffix greedy decoding gives after a prefix."""
    context = prefix[None].to(next(iter(model.parameters())).device)
    found = generate(model, context, len(suffix))[0].cpu()
    wrong = (found != suffix).nonzero()
    n_right = int(wrong[0]) if len(wrong) else len(suffix)
    decode = decoder_or_ids(model)
    texts = [decode([*prefix.tolist(), *ids.tolist()]) for ids in (found, suffix)]
    return {
        "extracted": n_right / len(suffix),
        "exact": n_right == len(suffix),
        "distance": Levenshtein.distance(*texts),
    }


@torch.no_grad()
def kl_of_edit(
    model: LanguageModel,
    edited: Callable[[], AbstractContextManager[None]],
    general_tokens: Integer[Tensor, "batch pos"],
) -> float:
    """KL from the model as it is to the edited one on general text, in nats per token.

    Args:
        edited: makes the context in which the model is edited.
    """
    total = 0.0
    for row in general_tokens.long():
        tokens = row[None].to(next(iter(model.parameters())).device)
        before = unembed(model, residual(model, tokens)).float().log_softmax(-1)
        with edited():
            after = unembed(model, residual(model, tokens)).float().log_softmax(-1)
        sums = F.kl_div(after[0], before[0], reduction="batchmean", log_target=True)
        total += float(sums)
    return total / len(general_tokens)


@torch.no_grad()
def precision_of(before: LanguageModel, after: LanguageModel, truth: NeuronSet) -> float:
    """Localization precision of an edit: the share of a weight change that lies in the true rows,
    as a share of its squared norm over all weights.

    It judges any edit whose true place is known, such as the unlearning of a text that INJ wrote:
    1 is a change of nothing but these rows, and a change that is spread evenly has their share of
    all weights.

    Args:
        before: the model before the edit.
        after: a model of the same shape, after it.
        truth: the neurons whose rows of W_out hold the text.

    Raises:
        ValueError: another model, the same weights, or a set of another shape.

    >>> from copy import deepcopy
    >>> edited = deepcopy(model)
    >>> edited.blocks[2].mlp.W_out.data[7] += 1
    >>> truth = NeuronSet(torch.arange(6 * 1536).reshape(6, 1536) == 2 * 1536 + 7)
    >>> precision_of(model, edited, truth)
    1.0
    """
    weights_before = check_earlier(after, before)
    weights_after = dict(after.named_parameters())

    def change(name: str) -> Tensor:
        # some devices have no float64
        return weights_after[name].cpu().double() - weights_before[name].cpu().double()

    def is_twin(name: str) -> bool:
        """Whether a weight holds others, which a TransformerBridge has beside it: Q, K and V, or
        the gate and what it gates.
        """
        mlp, gated, _ = name.partition("_original_component.gate_up_proj.")
        if gated:
            return any(other.startswith(f"{mlp}gate.") for other in weights_after)
        return ".qkv." in name and name.replace(".qkv.", ".q.") in weights_after

    names = [name for name in weights_before if not is_twin(name)]
    if set(TIED) <= set(names) and torch.equal(change(TIED[0]), change(TIED[1]).T):
        names.remove(TIED[1])  # one weight, which a HookedTransformer has twice
    total = sum(float(change(name).square().sum()) for name in names)
    old = NeuronView(before, truth.units)
    new = NeuronView(after, truth.units)
    if tuple(truth.mask.shape) != new.size:
        raise ValueError(
            f"truth must have the model's shape {new.size}, got {tuple(truth.mask.shape)}. Give "
            "the rows of this model."
        )
    inside = 0.0
    for layer, chosen in enumerate(new.row_mask(truth.mask)):
        index = chosen.nonzero().flatten()
        rows_after = new.flat_rows(layer).detach()[index.to(new.device)].cpu().double()
        rows_before = old.flat_rows(layer).detach()[index.to(old.device)].cpu().double()
        inside += float((rows_after - rows_before).square().sum())
    return inside / total
