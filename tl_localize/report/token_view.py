"""A suffix token by token, before and after neurons are ablated: HTML in a notebook, colours in a
terminal, brackets in a log.
"""

from dataclasses import dataclass
from html import escape

from jaxtyping import Int
from rich.console import Console
from torch import Tensor

from tl_localize.metrics import Decode, check_recited, predicted_suffixes
from tl_localize.model.neurons import LanguageModel
from tl_localize.scores import NeuronSet, check_set
from tl_localize.sequences import MemorizedSequence, decoder
from tl_localize.stats import quantity

BREAK = "\u23ce"  # stands for a line break
CONTEXT = 8  # tokens that are decoded before a piece, so that it begins as it does in the text
CUT = 3  # bytes of a character that may lie before them


# How a token in one state is shown, without colours too: the style in HTML, the forms in a terminal
# and in a log (of the true and the predicted text), and what the legend says. The state of a piece
# of several tokens is the first that one of them is in.
FORMS = {
    "forgotten": (
        "background:#c0392b;color:white;font-weight:bold;border-radius:3px;margin:0 1px",
        "\033[7;31m{0}\033[0m",
        "[{0}|{1}]",
        "right before, now the token above it is predicted",
    ),
    "wrong": (
        "border-bottom:1px dotted #777",
        "\033[2;4m{0}\033[0m",
        "({0}|{1})",
        "wrong before and now",
    ),
    "learned": (
        "border-bottom:2px solid #1f618d",
        "\033[4;34m{0}\033[0m",
        "{0}",
        "wrong before, right now",
    ),
    "right": ("", "{0}", "{0}", "right before and now"),
}


@dataclass(frozen=True, eq=False, repr=False)
class TokenView:
    """What a model predicts for each suffix token from the true tokens before it, before and after
    neurons are ablated.

    A notebook shows it in HTML: a forgotten token is white on a dark ground, and the token that is
    predicted instead stands above it. ``print(view)`` does the same in a terminal, and writes
    ``[true|predicted]`` where there are no colours. Tokens that share a character, such as the
    bytes of an accented letter, are shown together.

    Args:
        before: [suffix] tokens predicted by the whole model, teacher-forced argmax.
        after: [suffix] the same with the neurons ablated, or after another change.
        n_ablated: How many units were changed.
        unit: The name of one.
        change: What was done to them.

    >>> letters = lambda ids: "".join("abcdefghij"[i] for i in ids)
    >>> abc = MemorizedSequence(torch.tensor([0, 1, 2]), 1)
    >>> view = TokenView(abc, torch.tensor([1, 2]), torch.tensor([1, 9]), letters, 5)
    >>> print(view.text(colour=False))
    a >>> b[c|j]
    5 neurons ablated: 1 of 2 recited tokens forgotten, 2 in the suffix
    """

    sequence: MemorizedSequence
    before: Int[Tensor, " suffix"]
    after: Int[Tensor, " suffix"]
    decode: Decode
    n_ablated: int
    unit: str = "neuron"
    change: str = "ablated"

    def states(self) -> list[str]:
        """Of each suffix token: right, forgotten (right before, wrong after), learned (the reverse)
        or wrong (both times).
        """
        was_right = self.before == self.sequence.suffix
        is_right = self.after == self.sequence.suffix
        names = ("wrong", "learned", "forgotten", "right")
        return [names[i] for i in (2 * was_right + is_right).tolist()]

    def text(self, colour: bool | None = None) -> str:
        """Prefix and suffix as text; by default in colour on a terminal that allows it, else with
        brackets.
        """
        if colour is None:
            out = Console()
            colour = out.is_terminal and not out.no_color
        prefix, suffix = self._pieces()
        shown = f"{prefix} >>> "
        for true, predicted, state in suffix:
            _, terminal, log, _ = FORMS[state]
            if state != "right":
                true = true.replace("\n", BREAK)
            shown += (terminal if colour else log).format(true, predicted)
        return f"{shown}\n{self._summary}"

    def __repr__(self) -> str:
        return self.text()

    def html(self) -> str:
        """The view for a notebook or a page."""
        prefix, suffix = self._pieces()
        shown = f'<span style="color:#777">{_html_text(prefix)}</span><b> | </b>'
        for true, predicted, state in suffix:
            token = f'<span style="{FORMS[state][0]}" title="{state}">{_html_text(true)}</span>'
            if state in ("forgotten", "wrong"):
                above = f'<rt style="font-size:80%">{escape(predicted)}</rt>'
                token = f"<ruby>{token}{above}</ruby>"
            shown += token
        marks = [
            f'<span style="{style}">{state}</span>: {legend}'
            for state, (style, _, _, legend) in FORMS.items()
            if state in self.states()
        ]
        box = "white-space:pre-wrap;font-family:monospace;line-height:2.4"
        about = f"<div>{escape(self._summary)}. {', '.join(marks)}</div>"
        return f'{about}<div style="{box}">{shown}</div>'

    _repr_html_ = html

    @property
    def _summary(self) -> str:
        states = self.states()
        recited = int((self.before == self.sequence.suffix).sum())
        forgotten = f"{states.count('forgotten')} of {recited} recited tokens forgotten"
        changed = f"{quantity(self.n_ablated, self.unit)} {self.change}"
        return f"{changed}: {forgotten}, {len(states)} in the suffix"

    def _pieces(self) -> tuple[str, list[tuple[str, str, str]]]:
        """The prefix as text, and of each piece of the suffix its text, what is predicted after,
        and its state.
        """
        n = self.sequence.n_prefix
        states = self.states()
        prefix = ""
        found: list[tuple[str, str, str]] = []
        tokens = self.sequence.tokens.tolist()
        predicted = [*tokens[:n], *self.after.tolist()]
        for start, end, text in pieces(self.decode, tokens):
            if end <= n:
                prefix += text
                continue
            guess = text_after(self.decode, tokens[:start], predicted[start:end])
            own = states[max(0, start - n) : end - n]
            state = next(name for name in FORMS if name in own)
            found.append((text, guess.replace("\n", BREAK), state))
        return prefix, found


def pieces(decode: Decode, tokens: list[int]) -> list[tuple[int, int, str]]:
    """Tokens as text: the beginning, the end and the text of each piece.

    A piece is one token, or several that share a character: byte-level tokenizers cut characters
    that are not ASCII into bytes, of which none is text by itself.

    >>> pieces(lambda ids: bytes(ids).decode(errors="replace"), [99, 195, 169, 33])
    [(0, 1, 'c'), (1, 3, 'é'), (3, 4, '!')]
    """
    found: list[tuple[int, int, str]] = []
    start = 0
    for end in range(1, len(tokens) + 1):
        text = text_after(decode, tokens[:start], tokens[start:end])
        if not text.endswith("\ufffd") or end == len(tokens):
            found.append((start, end, text))
            start = end
    return found


def text_after(decode: Decode, before: list[int], tokens: list[int]) -> str:
    """Tokens as text after others: some tokenizers drop the space before a text's first word.

    >>> text_after(lambda ids: " ".join(map(str, ids)), [1, 2], [3])
    ' 3'
    """
    n = CONTEXT
    while n < CONTEXT + CUT and decode(before[-n:]).startswith("\ufffd"):
        n += 1  # it begins within a character, for which some decoders give up all bytes around it
    context = before[-n:]
    start, whole = decode(context), decode(context + tokens)
    if not whole.startswith(start):  # a stray byte takes the bytes before it along
        return decode(tokens)
    return whole[len(start) :]


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

    >>> view = token_view(model, sequence, Attribution()(model, sequence).top_k(0.05))
    >>> "forgotten" in view.states()
    True
    """
    check_set(neurons)
    decode = decode or decoder(model)
    (before,) = predicted_suffixes(model, [sequence])
    if not (before == sequence.suffix).any():
        check_recited(model, [sequence])
    with neurons.dropped_out(model):
        (after,) = predicted_suffixes(model, [sequence])
    return TokenView(sequence, before, after, decode, len(neurons), neurons.units.one)


def _html_text(text: str) -> str:
    """Text escaped for HTML, with a sign before each line break."""
    return escape(text).replace("\n", f"{BREAK}\n")
