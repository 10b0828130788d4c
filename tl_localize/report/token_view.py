"""A suffix token by token, before and after neurons are silenced: HTML in a notebook, colours in a terminal, brackets in a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from jaxtyping import Bool, Int
from torch import Tensor

from tl_localize.metrics import Decode, check_recited, decoder, predicted_suffixes
from tl_localize.neurons import LanguageModel
from tl_localize.scores import NeuronSet
from tl_localize.sequences import MemorizedSequence

FORGOTTEN, LEARNED, WRONG, RIGHT = "forgotten", "learned", "wrong", "right"
STYLES = {  # of HTML; each is told from the others without colour
    FORGOTTEN: "background:#c0392b;color:white;font-weight:bold;border-radius:3px;margin:0 1px",
    LEARNED: "border-bottom:2px solid #1f618d",
    WRONG: "border-bottom:1px dotted #777",
    RIGHT: "",
}
LEGEND = {  # what is said of a state where it occurs
    FORGOTTEN: "right before, now the token above it is predicted",
    LEARNED: "wrong before, right now",
    WRONG: "wrong before and now",
}
COLOURS = {FORGOTTEN: "\033[7;31m", LEARNED: "\033[4;34m", WRONG: "\033[2;4m", RIGHT: ""}  # of a terminal
OFF = "\033[0m"


@dataclass(frozen=True, eq=False, repr=False)
class TokenView:
    """What a model predicts for each suffix token from the true tokens before it, before and after neurons are silenced.

    In a notebook it shows itself: a forgotten token is white on a dark ground, and what the model now says stands above it.
    ``print(view)`` does the same in a terminal, and with ``[true|predicted]`` where there are no colours.

    Args:
        sequence: the sequence.
        before: [suffix] predicted tokens of the whole model, teacher-forced argmax.
        after: [suffix] the same with the neurons silenced.
        decode: token ids -> text.
        n_silenced: how many neurons are silenced.

    >>> import torch
    >>> from tl_localize import MemorizedSequence
    >>> from tl_localize.report.token_view import TokenView
    >>> sequence = MemorizedSequence(torch.tensor([0, 1, 2]), 1)
    >>> letters = lambda ids: "".join("abcdefghij"[i] for i in ids)
    >>> view = TokenView(sequence, torch.tensor([1, 2]), torch.tensor([1, 9]), letters, 5)
    >>> view.states()
    ['right', 'forgotten']
    >>> print(view.text(colour=False))
    a >>> b[c|j]
    5 neurons silenced: 1 of 2 recited tokens forgotten, 2 in the suffix
    """

    sequence: MemorizedSequence
    before: Int[Tensor, " suffix"]
    after: Int[Tensor, " suffix"]
    decode: Decode
    n_silenced: int

    @property
    def forgotten(self) -> Bool[Tensor, " suffix"]:
        """Tokens that are right before and wrong after."""
        return (self.before == self.sequence.suffix) & (self.after != self.sequence.suffix)

    def states(self) -> list[str]:
        """Of each suffix token: right, forgotten (right before, wrong after), learned (the reverse) or wrong (both times)."""
        names = {(True, True): RIGHT, (True, False): FORGOTTEN, (False, True): LEARNED, (False, False): WRONG}
        truth = self.sequence.suffix
        return [names[pair] for pair in zip((self.before == truth).tolist(), (self.after == truth).tolist(), strict=True)]

    def text(self, colour: bool | None = None) -> str:
        """Prefix and suffix as text; by default in colour on a terminal that wants it, else with brackets."""
        if colour is None:
            colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        parts = [self.decode(self.sequence.prefix.tolist()), " >>> "]
        for true, predicted, state in self._tokens():
            if colour:
                parts.append(f"{COLOURS[state]}{breaks_shown(true)}{OFF}" if COLOURS[state] else true)
            else:
                both = breaks_shown(true, predicted)
                parts.append({FORGOTTEN: f"[{both}]", WRONG: f"({both})"}.get(state, true))
        return "".join(parts) + f"\n{self._summary}"

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"TokenView({self.sequence.id!r}, {self._summary})"

    def _repr_html_(self) -> str:
        tokens = "".join(self._html(*token) for token in self._tokens())
        prefix = f'<span style="color:#777">{visible(self.decode(self.sequence.prefix.tolist()))}</span>'
        box = "white-space:pre-wrap;font-family:monospace;line-height:2.4"
        states = set(self.states())
        legend = ", ".join(f'<span style="{STYLES[state]}">{state}</span>: {text}' for state, text in LEGEND.items() if state in states)
        return f'<div>{escape(self._summary)}. {legend}</div><div style="{box}">{prefix}<b> | </b>{tokens}</div>'

    @property
    def _summary(self) -> str:
        states = self.states()
        right, forgotten = sum(state in (RIGHT, FORGOTTEN) for state in states), states.count(FORGOTTEN)
        return f"{self.n_silenced} neurons silenced: {forgotten} of {right} recited tokens forgotten, {len(states)} in the suffix"

    def _tokens(self) -> Iterator[tuple[str, str, str]]:
        """Of each suffix token: its text, what is predicted after, its state."""
        for true, predicted, state in zip(self.sequence.suffix.tolist(), self.after.tolist(), self.states(), strict=True):
            yield self.decode([true]), self.decode([predicted]), state

    @staticmethod
    def _html(true: str, predicted: str, state: str) -> str:
        if state == RIGHT:
            return f"<span>{visible(true)}</span>"
        token = f'<span style="{STYLES[state]}" title="{state}">{visible(true)}</span>'
        if state == LEARNED:
            return token
        return f'<ruby>{token}<rt style="font-size:80%">{visible(predicted, breaks=False)}</rt></ruby>'


def token_view(model: LanguageModel, sequence: MemorizedSequence, neurons: NeuronSet, decode: Decode | None = None) -> TokenView:
    """Which tokens of a suffix flip when neurons are silenced (zero at every position, prefix included).

    Args:    decode: token ids -> text; the model's tokenizer unless given.
    Raises:  ValueError: the sequence does not fit the model, not one of its tokens is predicted right to begin with, the neurons are
             another model's, or nothing can decode.

    >>> from tl_localize import Attribution, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> from tl_localize.report.token_view import token_view
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> view = token_view(model, sequence, Attribution()(model, sequence).top_k(0.05))
    >>> bool(view.forgotten.any())
    True
    """
    if not isinstance(neurons, NeuronSet):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"neurons must be a NeuronSet, got {type(neurons).__name__}. Take some, as scores.top_k(0.01) does.")
    decode = decode or decoder(model)
    (before,) = predicted_suffixes(model, [sequence])
    if not (before == sequence.suffix).any():
        check_recited(model, [sequence])
    with neurons.dropped_out(model):
        (after,) = predicted_suffixes(model, [sequence])
    return TokenView(sequence, before, after, decode, len(neurons))


BREAK = "\u23ce"  # the key's sign


def breaks_shown(*texts: str) -> str:
    """Texts side by side on one line."""
    return "|".join(texts).replace("\n", BREAK)


def visible(text: str, *, breaks: bool = True) -> str:
    """Text escaped for HTML, with its line breaks to be seen."""
    return escape(text).replace("\n", f"{BREAK}\n" if breaks else BREAK)
