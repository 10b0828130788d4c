"""Differentiable losses of a model in its present state, hooks and injections included."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tl_localize.changes import Use
from tl_localize.forward import residual, unembed
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences


def target_logits(model: LanguageModel, batch: SequenceBatch) -> Float[Tensor, "target vocab"]:
    """Logits at the positions that predict a suffix token; nothing else is unembedded."""
    return unembed(model, residual(model, batch.tokens)[batch.rows, batch.positions])


def loss_scale(model: LanguageModel) -> float:
    """Factor of a loss, by which its gradient is divided again: in float16 a power of two, since
    small gradients would become zero.
    """
    return 4096.0 if next(iter(model.parameters())).dtype == torch.float16 else 1.0


def mean_probability(model: LanguageModel, batch: SequenceBatch) -> Float[Tensor, " batch"]:
    """Mean probability of the true suffix tokens: bounded, so that tokens already lost have no
    gradient.
    """
    return batch.mean(
        target_logits(model, batch).softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    )


def mean_log_odds(model: LanguageModel, batch: SequenceBatch) -> Float[Tensor, " batch"]:
    """Mean of log p - log(1 - p) of the true suffix tokens: its gradient vanishes neither where p
    is near 1 nor where it is near 0.
    """
    logits, true = target_logits(model, batch), batch.targets[:, None]
    others = logits.scatter(-1, true, -torch.inf).logsumexp(-1)
    return batch.mean(logits.gather(-1, true)[:, 0] - others)


def batch_loss(model: LanguageModel, batch: SequenceBatch) -> Float[Tensor, " batch"]:
    """``memorization_loss`` of a batch on the model's device, as methods use it."""
    return batch.mean(F.cross_entropy(target_logits(model, batch), batch.targets, reduction="none"))


def memorization_loss(
    model: LanguageModel, sequences: Iterable[MemorizedSequence]
) -> Float[Tensor, " sequence"]:
    """How badly the model recites each suffix: nats per suffix token; smaller means better
    memorized. Autograd can differentiate it.

        loss(x) = 1/T sum over t of -log P(s_t | p, s_<t)

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (4); with a prefix of one token it is their
    eq. (11).

    Returns:
        [sequence] nats per suffix token, on the model's device.

    Raises:
        ValueError: A sequence does not fit the model.

    >>> bool(memorization_loss(model, [sequence]) < 0.1)
    True
    """
    sequences = check_sequences(model, sequences)
    with Use(model):
        return batch_loss(model, SequenceBatch.of(sequences, NeuronView(model).device))
