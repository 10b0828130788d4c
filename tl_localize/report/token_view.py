"""A suffix token by token, before and after neurons are ablated: HTML in a notebook, colours in a
terminal, brackets in a log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from tl_localize.metrics import Decode, check_recited, decoder, predicted_suffixes
from tl_localize.neurons import LanguageModel
from tl_localize.scores import NeuronSet
from tl_localize.sequences import MemorizedSequence

BREAK = "\u23ce"  # stands for a line break


class _Look(NamedTuple):
    """How a token in one state is shown; states differ without colour too. Forms are of the true
    and the predicted token.
    """

    style: str = ""  # of HTML
    terminal: str = ""
    log: str = ""
    legend: str = ""


_RED = "background:#c0392b;color:white;font-weight:bold;border-radius:3px;margin:0 1px"
LOOKS = {
    "forgotten": _Look(
        _RED,
        "\033[7;31m{0}\033[0m",
        "[{0}|{1}]",
        "right before, now the token above it is predicted",
    ),
    "learned": _Look(
        "border-bottom:2px solid #1f618d", "\033[4;34m{0}\033[0m", "", "wrong before, right now"
    ),
    "wrong": _Look(
        "border-bottom:1px dotted #777", "\033[2;4m{0}\033[0m", "({0}|{1})", "wrong before and now"
    ),
    "right": _Look(),
}


@dataclass(frozen=True, eq=False, repr=False)
class TokenView:
    """What a model predicts for each suffix token from the true tokens before it, before and after
    neurons are ablated.

    A notebook shows it in HTML: a forgotten token is white on a dark ground, and the token that is
    predicted instead stands above it. ``print(view)`` does the same in a terminal, and writes
    ``[true|predicted]`` where there are no colours.

    Args:
        before: [suffix] tokens predicted by the whole model, teacher-forced argmax.
        after: [suffix] the same with the neurons ablated.

    >>> letters = lambda ids: "".join("abcdefghij"[i] for i in ids)
    >>> abc = MemorizedSequence(torch.tensor([0, 1, 2]), 1)
    >>> print(TokenView(abc, torch.tensor([1, 2]), torch.tensor([1, 9]), letters, 5).text(colour=False))
    a >>> b[c|j]
    5 neurons ablated: 1 of 2 recited tokens forgotten, 2 in the suffix
    """

    sequence: MemorizedSequence
    before: Int[Tensor, " suffix"]
    after: Int[Tensor, " suffix"]
    decode: Decode
    n_ablated: int
    units: str = "neurons"

    def states(self) -> list[str]:
        """Of each suffix token: right, forgotten (right before, wrong after), learned (the reverse)
        or wrong (both times).
        """
        was_right, is_right = (
            self.before == self.sequence.suffix,
            self.after == self.sequence.suffix,
        )
        return [
            ("wrong", "learned", "forgotten", "right")[i]
            for i in (2 * was_right + is_right).tolist()
        ]

    def text(self, colour: bool | None = None) -> str:
        """Prefix and suffix as text; by default in colour on a terminal that allows it, else with
        brackets.
        """
        if colour is None:
            colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        parts = [self.decode(self.sequence.prefix.tolist()), " >>> "]
        for true, predicted, state in self._tokens():
            form = LOOKS[state].terminal if colour else LOOKS[state].log
            parts.append(
                form.format(*(text.replace("\n", BREAK) for text in (true, predicted)))
                if form
                else true
            )
        return "".join(parts) + f"\n{self._summary}"

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"TokenView({self.sequence.id!r}, {self._summary})"

    def html(self) -> str:
        """The view for a notebook or a page."""
        prefix, tokens = (
            self.decode(self.sequence.prefix.tolist()),
            "".join(_html_token(*token) for token in self._tokens()),
        )
        seen = [
            (state, look) for state, look in LOOKS.items() if look.legend and state in self.states()
        ]
        legend = ", ".join(
            f'<span style="{look.style}">{state}</span>: {look.legend}' for state, look in seen
        )
        box = "white-space:pre-wrap;font-family:monospace;line-height:2.4"
        text = f'<span style="color:#777">{_html_text(prefix)}</span><b> | </b>{tokens}'
        return f'<div>{escape(self._summary)}. {legend}</div><div style="{box}">{text}</div>'

    _repr_html_ = html

    @property
    def _summary(self) -> str:
        states, recited = self.states(), int((self.before == self.sequence.suffix).sum())
        forgotten = f"{states.count('forgotten')} of {recited} recited tokens forgotten"
        return f"{self.n_ablated} {self.units} ablated: {forgotten}, {len(states)} in the suffix"

    def _tokens(self) -> Iterator[tuple[str, str, str]]:
        """Of each suffix token: its text, what is predicted after, its state."""
        for true, predicted, state in zip(
            self.sequence.suffix.tolist(), self.after.tolist(), self.states(), strict=True
        ):
            yield self.decode([true]), self.decode([predicted]), state


def token_view(
    model: LanguageModel,
    sequence: MemorizedSequence,
    neurons: NeuronSet,
    decode: Decode | None = None,
) -> TokenView:
    """Which tokens of a suffix flip when neurons are ablated (zero at every position, prefix
    included).

    Raises:
        ValueError: the sequence or the neurons do not fit the model, not one token is predicted
            right to begin with, or no decoder.

    >>> token_view(model, sequence, Attribution()(model, sequence).top_k(0.05)).states().count("forgotten") > 0
    True
    """
    if not isinstance(neurons, NeuronSet):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"neurons must be a NeuronSet, got {type(neurons).__name__}. Take some, as "
            "scores.top_k(0.01) does."
        )
    decode = decode or decoder(model)
    (before,) = predicted_suffixes(model, [sequence])
    if not (before == sequence.suffix).any():
        check_recited(model, [sequence])
    with neurons.dropped_out(model):
        (after,) = predicted_suffixes(model, [sequence])
    return TokenView(sequence, before, after, decode, len(neurons), neurons.units.name)


def _html_text(text: str) -> str:
    """Text escaped for HTML, with a sign before each line break."""
    return escape(text).replace("\n", f"{BREAK}\n")


def _html_token(true: str, predicted: str, state: str) -> str:
    if state == "right":
        return f"<span>{_html_text(true)}</span>"
    token = f'<span style="{LOOKS[state].style}" title="{state}">{_html_text(true)}</span>'
    instead = escape(predicted).replace("\n", BREAK)
    return (
        token
        if state == "learned"
        else f'<ruby>{token}<rt style="font-size:80%">{instead}</rt></ruby>'
    )
