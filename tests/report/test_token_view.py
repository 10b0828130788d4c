"""The token view tells four states of a token apart, in HTML, in colour and with brackets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_localize import MemorizedSequence, NeuronSet
from tl_localize.metrics import predicted_suffixes
from tl_localize.report.token_view import TokenView, token_view


@pytest.fixture
def view() -> TokenView:
    """Suffix b c d e: right, forgotten, learned, wrong."""
    sequence = MemorizedSequence(torch.tensor([0, 1, 2, 3, 4]), 1, "s0")
    return TokenView(
        sequence,
        torch.tensor([1, 2, 9, 9]),
        torch.tensor([1, 8, 3, 8]),
        lambda ids: "".join("<bcdefgh\nj"[i] for i in ids),
        5,
    )


def test_tells_four_states_apart(view: TokenView) -> None:
    assert view.states() == ["right", "forgotten", "learned", "wrong"]


def test_without_colour_has_brackets(view: TokenView) -> None:
    assert view.text(colour=False).startswith(
        "< >>> b[c|\u23ce]d(e|\u23ce)\n5 neurons ablated: 1 of 2 recited tokens forgotten"
    )


def test_in_colour_has_escape_codes(view: TokenView) -> None:
    assert "\033[7;31mc\033[0m" in view.text(colour=True)


def test_escapes_text_and_shows_line_breaks(view: TokenView) -> None:
    html = view._repr_html_()
    assert "&lt;" in html and "\u23ce" in html and ">c<" in html


def test_says_what_its_marks_mean(view: TokenView) -> None:
    html = view._repr_html_()
    assert all(f"{state}</span>: " in html for state in ("forgotten", "learned", "wrong"))
    whole = TokenView(view.sequence, view.sequence.suffix, view.sequence.suffix, view.decode, 0)
    assert "</span>: " not in whole._repr_html_()


def test_without_colour_stays_on_one_line_where_a_break_is_predicted(view: TokenView) -> None:
    assert view.text(colour=False).count("\n") == 1  # before the summary


def test_measures_before_and_after(gpt2_like: Any, sequence: Any) -> None:
    tokens = sequence.tokens.clone()
    # so one token is right
    tokens[sequence.n_prefix] = next(predicted_suffixes(gpt2_like, [sequence]))[0]
    sequence = MemorizedSequence(tokens, sequence.n_prefix)
    neurons = NeuronSet(torch.ones(2, 48) > 0)
    view = token_view(gpt2_like, sequence, neurons, decode=str)
    (whole,) = predicted_suffixes(gpt2_like, [sequence])
    with neurons.dropped_out(gpt2_like):
        (ablated,) = predicted_suffixes(gpt2_like, [sequence])
    assert (
        torch.equal(view.before, whole)
        and torch.equal(view.after, ablated)
        and not torch.equal(whole, ablated)
    )
    assert len(repr(view)) < 140
