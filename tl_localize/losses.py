"""Differentiable losses of a model in its present state, hooks and injections included."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tl_localize.changes import used
from tl_localize.forward import residual, unembed
from tl_localize.neurons import LanguageModel, check_model
from tl_localize.sequences import SequenceBatch

MAKE_BATCH = "SequenceBatch.of(sequences, model.cfg.device)"


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


def memorization_loss(model: LanguageModel, batch: SequenceBatch) -> Float[Tensor, " batch"]:
    """How badly the model recites each suffix: nats per suffix token; smaller means better
    memorized.

        loss(x) = 1/T sum over t of -log P(s_t | p, s_<t)

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (4); with a prefix of one token it is their

    eq. (11).

    Args:
        batch: on the model's device; ``SequenceBatch.of(sequences, model.cfg.device)`` makes one.

    Returns:
        [batch] nats per suffix token, on the model's device.

    Raises:
        ValueError: the batch is on another device.

    >>> bool(memorization_loss(model, SequenceBatch.of([sequence], model.cfg.device)) < 0.1)
    True
    """
    check_model(model)
    if not isinstance(batch, SequenceBatch):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"batch must be a SequenceBatch, got {type(batch).__name__}. Make one with "
            f"{MAKE_BATCH}."
        )
    device, given = next(iter(model.parameters())).device, batch.targets.device
    if given != device:
        raise ValueError(
            f"batch must be on the model's device {str(device)!r}, got {str(given)!r}. Make it "
            f"with {MAKE_BATCH}."
        )
    with used(model):
        return batch.mean(
            F.cross_entropy(target_logits(model, batch), batch.targets, reduction="none")
        )
