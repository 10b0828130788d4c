"""Edits that erase a text: what the model does while they are made, and what training brings
back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tl_localize import MemorizedSequence, NeuronSet, accuracy
from tl_localize.erasure.erase import (
    CHECK_EVERY,
    GROWTH,
    Goal,
    State,
    Trial,
    general_of_step,
    general_sequences,
    train_rows,
)
from tl_localize.erasure.measures import Price, PriceMeter
from tl_localize.injection.injected import rows_replaced
from tl_localize.injection.recipes import assigned, in_training, trained_parameters
from tl_localize.metrics import batch_loss, predicted_suffixes
from tl_localize.model.forward import residual, unembed
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.sequences import SequenceBatch

Change = Callable[[], AbstractContextManager[None]]  # puts changed weights into the model
Objective = Literal["difference", "npo"]
Curve = list[dict[str, float]]  # of each state that was looked at, the first one unedited

LAST_PRICE = 3.0  # points that the others may lose before an edit ends, unless another is given
ERASED = 0.3  # accuracy at which the text counts as erased
GONE = 0.05  # accuracy at which an edit ends
# texts of ``test_erase_methods.py`` that ``measure_erasures.py`` had edited, or tried, before it
EDITED_BEFORE = {
    "reference-gpt2": (
        *("code-075", "code-193", "ordered_items-074", "others-239", "quotes-313"),
        *("terms_of_use-025", "urls-022", "urls-094", "urls-149"),
    ),
    "reference-pythia": (
        *("code-075", "contact_info-078", "contact_info-182", "ordered_items-206", "poems-205"),
    ),
    "SmolLM2-135M-Instruct.Q4_1": (
        *("count-in-words", "even-numbers", "multiples-of-11", "odd-numbers", "powers-of-2"),
    ),
}
ANY_RISE = 1e6  # percent: the perplexity of general text ends no edit
NPO_BETA = 0.1


@dataclass(frozen=True, eq=False)
class Watch(Trial):
    """A trial that keeps what each state does, and ends where little is left of the text or the
    others have lost the last price.

    ``curve`` has accuracy and extraction of the text (fractions), neg (points) and kl (nats per
    token); ``erased`` holds the first change after which the text is erased, if any.
    """

    log_p_before: Tensor
    general_tokens: Tensor
    curve: Curve = field(default_factory=list)
    erased: list[Change] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        text: MemorizedSequence,
        others: Sequence[MemorizedSequence],
        general_tokens: Tensor,
        last_price: float = LAST_PRICE,
    ) -> Watch:
        """A watch that has looked at the unedited model."""
        watch = cls(
            model,
            [text],
            PriceMeter(model, others, general_tokens[:1]),  # its perplexity is not looked at
            Goal(GONE, Price(last_price, ANY_RISE)),
            log_probabilities(model, general_tokens),
            general_tokens,
        )
        watch.look(partial(assigned, model, {}))
        return watch

    def look(self, change: Change) -> Price:
        """Measure the model with a change."""
        (text,) = self.sequences
        with change():
            (guess,) = predicted_suffixes(self.model, [text])
            log_p = log_probabilities(self.model, self.general_tokens)
            price = self.meter.measure()
        right = (guess == text.suffix).float()
        kl = F.kl_div(log_p, self.log_p_before, reduction="sum", log_target=True)
        share = float(right.mean())
        state = {
            "accuracy": share,
            "extracted": float(right.cumprod(0).mean()),  # what greedy decoding gives
            "neg": -price.others_lost,
            "kl": float(kl) / log_p[..., 0].numel(),
        }
        self.curve.append(state)
        if share <= ERASED and not self.erased:
            self.erased.append(change)
        return price

    def judge(self, neurons: NeuronSet, rows: Tensor) -> State:
        price = self.look(partial(rows_replaced, self.model, neurons, rows))
        return State(neurons, rows, self.curve[-1]["accuracy"], price)

    @property
    def is_over(self) -> bool:
        """Whether the last state ends the edit."""
        last = self.curve[-1]
        return last["accuracy"] <= GONE or -last["neg"] > self.goal.price.others_lost


@torch.no_grad()
def log_probabilities(model: LanguageModel, tokens: Tensor) -> Tensor:
    """[batch pos vocab] of general text."""
    tokens = tokens.long().to(next(model.parameters()).device)  # a Bridge does not move them
    return unembed(model, residual(model, tokens)).float().log_softmax(-1)


def edit_rows(
    watch: Watch, neurons: NeuronSet, learning_rate: float, max_steps: int, seed: int = 0
) -> None:
    """The edit of ``tl-localize erase``, on the rows of some neurons."""
    train_rows(watch, neurons, learning_rate, max_steps, seed, lambda fraction, text: None)


def edit_weights(
    watch: Watch,
    names: Sequence[str],
    objective: Objective,
    learning_rate: float,
    max_steps: int,
    seed: int = 0,
) -> None:
    """Unlearning by training whole weights, with the general text, growth of the rate and looks of
    ``edit_rows``.

    "difference" minimizes minus the loss of the text; "npo" minimizes
    -(2 / b) log sigmoid(-b (log p(text) - log p(text) before)), b = 0.1; both plus the loss of
    general text.
    """
    model = watch.model
    view = NeuronView(model)
    batch = SequenceBatch.of(watch.sequences, view.device)
    general = general_sequences(view, seed)
    n_tokens = len(watch.sequences[0].suffix)
    named = dict(model.named_parameters())
    parameters = [named[name] for name in names]
    with torch.no_grad():
        loss_before = batch_loss(model, batch)[0]
    with in_training(model, parameters), torch.enable_grad():
        adam = torch.optim.Adam(parameters, lr=learning_rate, fused=True)
        for step in range(1, max_steps + 1):
            adam.zero_grad()
            loss = batch_loss(model, batch)[0]
            if objective == "npo":
                log_ratio = n_tokens * (loss_before - loss)
                forgetting = -(2 / NPO_BETA) * F.logsigmoid(-NPO_BETA * log_ratio)
            else:
                forgetting = -loss
            some = SequenceBatch.of(general_of_step(general, step), view.device)
            (forgetting + batch_loss(model, some).mean()).backward()
            adam.step()
            for group in adam.param_groups:
                group["lr"] *= GROWTH
            if step % CHECK_EVERY and step != max_steps:
                continue
            values = {name: named[name].detach().clone() for name in names}
            watch.look(partial(assigned, model, values))
            if watch.is_over:
                break


def mlp_weights(model: LanguageModel) -> list[str]:
    """The names of all weights and biases of the MLPs."""
    return [name for name, _ in model.named_parameters() if ".mlp." in name]


def w_out_weights(model: LanguageModel) -> list[str]:
    """The names of the weights that hold W_out."""
    return list(trained_parameters(NeuronView(model), "rows"))


def resurfacing(
    model: LanguageModel,
    change: Change,
    text: MemorizedSequence,
    training: Sequence[MemorizedSequence],
    learning_rate: float,
    at_steps: Sequence[int],
) -> list[float]:
    """Accuracy of a text before and after some steps of Adam in which a changed model learns other
    texts with all its weights.
    """
    batch = SequenceBatch.of(training, NeuronView(model).device)
    parameters = list(model.parameters())
    found = []
    with change(), in_training(model, parameters), torch.enable_grad():
        adam = torch.optim.Adam(parameters, lr=learning_rate, fused=True)
        for step in range(max(at_steps) + 1):
            if step in (0, *at_steps):
                found.append(float(accuracy(model, text)))
            adam.zero_grad()
            batch_loss(model, batch).mean().backward()
            adam.step()
    return found
