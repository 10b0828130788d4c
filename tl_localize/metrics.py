"""Losses, which can be differentiated, and measures of a model in its present state, hooks and
injections included.

Texts of several lengths are padded on the right. A hook that counts positions from the end, or
moves something to earlier ones (the mean over positions), would read the padding: where the model
has such a hook, measure the texts one at a time.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.checks import Real, check_between
from tl_localize.model.forward import hooked_above, residual, unembed
from tl_localize.model.memory import part_at, rows_that_fit, work_in_batches
from tl_localize.model.neurons import LanguageModel, ModelView
from tl_localize.sequences import (
    Decode,
    MemorizedSequence,
    SequenceBatch,
    check_sequences,
    check_tokens,
    decoder_or_ids,
    one_or_more,
)

RECITED = 0.9  # the accuracy from which on a text counts as recited: the paper's
PUBLISHED_CHUNKS = 128  # of the sequences of general text, whose losses the authors average first


@torch.no_grad()
def predicted_suffixes(
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    batch_tokens: int | None = None,
) -> Sequence[Int[Tensor, " suffix"]]:
    """Teacher-forced argmax of each suffix token, sequence by sequence (eq. 4 of the paper).

    Raises:
        ValueError: a sequence does not fit the model, or a logit is no number: a text is not
            forgotten where the model computes nothing.
    """
    sequences = check_sequences(model, sequences)
    view = ModelView(model)
    size = rows_that_fit(view, max(map(len, sequences)), batch_tokens=batch_tokens, gradient=False)

    def predict(some: list[MemorizedSequence]) -> Tensor:
        batch = SequenceBatch.of(some, view.device)
        logits = target_logits(model, batch)
        guesses = logits.argmax(-1)  # of NaN, where there is one
        missing = logits.gather(-1, guesses[:, None])[:, 0].isnan()
        return guesses.where(~missing, -1)  # looked at below: a GPU does not wait here

    found = [part for _, part in work_in_batches(predict, sequences, size)]
    lengths = [len(sequence) - sequence.n_prefix for sequence in sequences]
    predicted = torch.cat(found).cpu().split(lengths)
    for sequence, guesses in zip(sequences, predicted, strict=True):
        if (guesses < 0).any():
            raise nan_in(sequence)
    return predicted


def nan_in(sequence: MemorizedSequence) -> ValueError:
    """The error that says that a model's logits on a text are no numbers."""
    return ValueError(
        f"logits must be numbers, got NaN in {sequence!r}. Use float32, or ablate fewer neurons."
    )


def accuracy(
    model: LanguageModel, sequences: MemorizedSequence | Iterable[MemorizedSequence]
) -> Float[Tensor, " sequence"]:
    """Share of the suffix tokens that the model predicts right, each from the true tokens before
    it.

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (5).

    Args:
        sequences: some sequences, or one, whose result is a tensor of one number.

    Returns:
        [sequence] fraction, float32 on the CPU.

    Raises:
        ValueError: a sequence does not fit the model.

    >>> bool(accuracy(model, sequence) > 0.9)
    True
    """
    sequences = one_or_more(sequences)
    return shares_right(predicted_suffixes(model, sequences), sequences)


def shares_right(
    guesses: Iterable[Tensor], sequences: Sequence[MemorizedSequence]
) -> Float[Tensor, " sequence"]:
    """Share of the tokens of each suffix that are predicted right."""
    pairs = zip(guesses, sequences, strict=True)
    return torch.stack([(guess == sequence.suffix).float().mean() for guess, sequence in pairs])


class NotRecitedWarning(UserWarning):
    """A method scored a sequence that the model does not recite, which its scores then say little
    about.

    Silence it where it is meant so:

    >>> warnings.filterwarnings("ignore", category=NotRecitedWarning)
    """


def check_recited(
    model: LanguageModel,
    sequences: MemorizedSequence | Iterable[MemorizedSequence],
    min_accuracy: Real = RECITED,
) -> None:
    """Raise ValueError unless the model recites every sequence. A method only warns of it.

    Args:
        min_accuracy: teacher-forced, a fraction; 0.9 is the paper's (section 3.2).

    >>> frost = MemorizedSequence.from_text(model, "Two roads", " diverged in a yellow wood")
    >>> check_recited(model, [frost])
    Traceback (most recent call last):
        ...
    ValueError: sequence must be recited by the model with an accuracy of at least 0.9, got ...
    """
    check_between(0, 1, min_accuracy=min_accuracy)
    sequences = one_or_more(sequences)
    if problem := what_is_not_recited(sequences, accuracy(model, sequences), min_accuracy):
        raise ValueError(problem)


def warn_unless_recited(
    model: LanguageModel, sequences: Sequence[MemorizedSequence], batch_tokens: int | None = None
) -> None:
    """Warn the caller's caller, once for the sequences together, where the model does not recite
    them. It costs one forward pass of the sequences.
    """
    guesses = predicted_suffixes(model, sequences, batch_tokens)
    if problem := what_is_not_recited(sequences, shares_right(guesses, sequences), RECITED):
        advice = "Where it is meant so: warnings.filterwarnings('ignore', category="
        advice += "tl_localize.NotRecitedWarning), or map(..., check=False)."
        warnings.warn(f"{problem} {advice}", NotRecitedWarning, stacklevel=3)


def what_is_not_recited(
    sequences: Sequence[MemorizedSequence], measured: Tensor, min_accuracy: Real
) -> str:
    """How many sequences have a lower accuracy, and the worst of them, in words; empty where none
    has.
    """
    # torch compares in float32, as the shares are, so 9 right tokens of 10 are an accuracy of 0.9
    n_low = int((measured < min_accuracy).sum())
    if not n_low:
        return ""
    return (
        f"sequence must be recited by the model with an accuracy of at least {min_accuracy:g}, "
        f"got {measured.min():.2f} in {sequences[int(measured.argmin())]!r}, and less than "
        f"that in {n_low} of {len(sequences)}. Choose a text that the model saw often in "
        "training, give a longer prefix, or check spelling and spaces."
    )


def levenshtein(
    model: LanguageModel,
    sequences: MemorizedSequence | Iterable[MemorizedSequence],
    decode: Decode | None = None,
) -> Float[Tensor, " sequence"]:
    """Edit distance between the text of the predicted suffix (teacher-forced argmax) and of the
    true one.

    Both are decoded after the prefix, so that a character cut by the boundary counts the same in
    both.

    Args:
        sequences: some sequences, or one, whose result is a tensor of one number.
        decode: token ids -> text; the model's tokenizer unless given.

    Returns:
        [sequence] characters (tokens, where the model has no tokenizer), float32 on the CPU.

    >>> bool(levenshtein(model, [sequence]) < 20)
    True
    """
    decode = decode or decoder_or_ids(model)
    sequences = one_or_more(sequences)
    distances: list[int] = []
    for guess, sequence in zip(predicted_suffixes(model, sequences), sequences, strict=True):
        text = decode([*sequence.prefix.tolist(), *guess.tolist()])
        distances.append(Levenshtein.distance(text, decode(sequence.tokens.tolist())))
    return torch.tensor(distances, dtype=torch.float32)


def perplexity(model: LanguageModel, tokens: Integer[Tensor, "batch pos"]) -> float:
    """exp of the mean loss in nats per token over sequences of general text (every token but the
    first is predicted).

    Args:
        tokens: [batch pos] token ids, on any device, 2 to n_ctx positions.

    Raises:
        ValueError: other tokens.

    >>> 20 < perplexity(model, text) < 150
    True
    """
    return float(sequence_losses(model, tokens).mean().exp())


def perplexity_base2(model: LanguageModel, tokens: Integer[Tensor, "batch pos"]) -> float:
    """The published tables' number: mean of 2 ** (nats per token), base 2 with a natural-log loss.

    The authors average the losses within at most 128 chunks of consecutive sequences first, so
    2,048 sequences are 128 means of 16.

    Source: the authors' code (github.com/terarachang/MemPi); the paper says perplexity.

    >>> perplexity_base2(model, text) < perplexity(model, text)
    True
    """
    return mean_base2(sequence_losses(model, tokens))


def mean_base2(losses: Float[Tensor, " sequence"]) -> float:
    """The published perplexity of some losses in nats: mean of 2 ** (mean of a chunk), of at most
    128 chunks.
    """
    return float(
        torch.stack([2 ** chunk.mean() for chunk in losses.chunk(PUBLISHED_CHUNKS)]).mean()
    )


@torch.no_grad()
def sequence_losses(
    model: LanguageModel,
    tokens: Integer[Tensor, "batch pos"],
    batch_tokens: int | None = None,
) -> Float[Tensor, " batch"]:
    """Loss of each sequence, nats per token."""
    view = ModelView(model)
    check_text(model, tokens, "tokens")

    on_device = tokens.long().to(view.device)

    def losses(rows: list[int]) -> Tensor:
        part = part_at(on_device, rows)
        logits = unembed(model, residual(model, part)[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        return losses.view(len(rows), -1).mean(1)

    size = rows_that_fit(view, tokens.shape[1], batch_tokens=batch_tokens, gradient=False)
    return torch.cat([loss for _, loss in work_in_batches(losses, range(len(tokens)), size)]).cpu()


def check_text(model: LanguageModel, tokens: Any, name: str) -> None:
    """Raise TypeError or ValueError unless these are rows of text that the model can read."""
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"{name} must be a tensor of token ids [batch pos], got {type(tokens).__name__}. Make "
            "one with torch.tensor(...)."
        )
    n_ctx = model.cfg.n_ctx
    shape = tuple(tokens.shape)
    whole = torch.can_cast(tokens.dtype, torch.long) and tokens.dtype != torch.bool
    if len(shape) != 2 or not shape[0] or not 2 <= shape[1] <= n_ctx or not whole:
        raise ValueError(
            f"{name} must be token ids [batch pos] of 2 to n_ctx={n_ctx} positions, got shape "
            f"{shape} of {tokens.dtype}. Cut general text into pieces of that length."
        )
    # torch has no minimum of the unsigned types that files of tokens come in
    check_tokens(model, tokens.long(), f" in {name}", tokens[:, 1:].long())


# Losses


def target_logits(model: LanguageModel, batch: SequenceBatch) -> Float[Tensor, "target vocab"]:
    """Logits at the positions that predict a suffix token; nothing else is unembedded, but where
    hooks act there, which may mean positions.
    """
    stream = residual(model, batch.tokens)
    if hooked_above(model):
        return unembed(model, stream)[batch.rows, batch.positions]
    return unembed(model, stream[batch.rows, batch.positions])


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
    logits = target_logits(model, batch)
    true = batch.targets[:, None]
    others = logits.scatter(-1, true, -torch.inf).logsumexp(-1)
    return batch.mean(logits.gather(-1, true)[:, 0] - others)


def mean_unlikelihood(model: LanguageModel, batch: SequenceBatch) -> Float[Tensor, " batch"]:
    """Mean of -log(1 - p) of the true suffix tokens: its gradient does not vanish where p is near
    1, and tokens already lost have none.

    Source: Welleck et al. (2020), arXiv:1908.04319, eq. (2).
    """
    logits = target_logits(model, batch)
    true = batch.targets[:, None]
    others = logits.scatter(-1, true, -torch.inf).logsumexp(-1)
    return batch.mean(logits.logsumexp(-1) - others)


def batch_loss(model: LanguageModel, batch: SequenceBatch) -> Float[Tensor, " batch"]:
    """``memorization_loss`` of a batch on the model's device, as methods use it."""
    return batch.mean(F.cross_entropy(target_logits(model, batch), batch.targets, reduction="none"))


def memorization_loss(
    model: LanguageModel, sequences: MemorizedSequence | Iterable[MemorizedSequence]
) -> Float[Tensor, " sequence"]:
    """How badly the model recites each suffix: nats per suffix token; smaller means better
    memorized. Autograd can differentiate it.

        loss(x) = 1/T sum over t of -log P(s_t | p, s_<t)

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (6); with a prefix of one token it is their
    eq. (13).

    Returns:
        [sequence] nats per suffix token, on the model's device.

    Raises:
        ValueError: A sequence does not fit the model.

    >>> bool(memorization_loss(model, [sequence]) < 0.1)
    True
    """
    sequences = check_sequences(model, one_or_more(sequences))
    return batch_loss(model, SequenceBatch.of(sequences, ModelView(model).device))
