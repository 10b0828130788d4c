"""The token view tells four states of a token apart, in HTML, in colour and with brackets."""

import pytest
import torch
from tokenizers import decoders

from tl_localize import MemorizedSequence, NeuronSet
from tl_localize.metrics import predicted_suffixes
from tl_localize.report.terminal import console
from tl_localize.report.token_view import TokenView, pieces, text_after, token_view


@pytest.fixture
def view():
    """Suffix b c d e: right, forgotten, learned, wrong."""
    sequence = MemorizedSequence(torch.tensor([0, 1, 2, 3, 4]), 1, "s0")
    before, after = torch.tensor([1, 2, 9, 9]), torch.tensor([1, 8, 3, 8])
    return TokenView(sequence, before, after, lambda ids: "".join("<bcdefgh\nj"[i] for i in ids), 5)


def test_tells_four_states_apart(view):
    assert view.states() == ["right", "forgotten", "learned", "wrong"]


def test_shows_states_with_brackets_or_in_colour(view):
    shown, summary = view.text(colour=False).split("\n")
    assert shown == "< >>> b[c|\u23ce]d(e|\u23ce)"
    assert summary.startswith("5 neurons ablated: 1 of 2 recited tokens forgotten")
    assert "\033[7;31mc\033[0m" in view.text(colour=True)


def test_a_line_break_is_shown_as_a_sign_where_it_is_marked(view):
    tokens, right, wrong = torch.tensor([1, 8, 8]), torch.tensor([8, 8]), torch.tensor([8, 2])
    view = TokenView(MemorizedSequence(tokens, 1), right, wrong, view.decode, 5)
    assert view.text(colour=False).startswith("b >>> \n[\u23ce|c]\n5 neurons")


def test_is_shown_with_brackets_where_there_is_no_terminal_or_no_output(view, monkeypatch):
    assert str(view) == view.text(colour=False)
    monkeypatch.setattr("sys.stdout", None)
    assert str(view) == view.text(colour=False) and console().width == 1000


def test_html_escapes_text_shows_line_breaks_and_says_what_its_marks_mean(view):
    html = view._repr_html_()
    assert "&lt;" in html and "\u23ce" in html and ">c<" in html
    assert all(f"{state}</span>: " in html for state in ("forgotten", "learned", "wrong"))


def utf8(ids):
    return bytes(ids).decode(errors="replace")


def of_bytes(text, after, n_prefix):
    tokens, changed = (torch.tensor(list(written.encode())) for written in (text, after))
    sequence = MemorizedSequence(tokens, n_prefix)
    return TokenView(sequence, sequence.suffix, changed[n_prefix:], utf8, 1)


def test_characters_that_are_several_tokens_are_shown_whole():
    view = of_bytes("né à Łódź", "né à Łx.dź", 2)  # the prefix ends within the é
    assert view.text(colour=False).startswith("n >>> é à Ł[ó|x.]dź\n")
    assert "\ufffd" not in of_bytes("né 中", "né 中", 4)._repr_html_()
    assert pieces(utf8, [110, 195]) == [(0, 1, "n"), (1, 2, "\ufffd")]  # a text that is cut


def test_pieces_keep_the_space_that_a_decoder_drops_at_the_beginning_of_a_text():
    words = ["▁the", "▁cat", "s"]
    decoded = pieces(
        lambda ids: "".join(words[i] for i in ids).replace("▁", " ").lstrip(), [0, 1, 2]
    )
    assert [text for _, _, text in decoded] == ["the", " cat", "s"]


def test_measures_before_and_after(gpt2_like, sequence):
    tokens = sequence.tokens.clone()
    # so one token is right
    tokens[sequence.n_prefix] = predicted_suffixes(gpt2_like, [sequence])[0][0]
    sequence = MemorizedSequence(tokens, sequence.n_prefix)
    neurons = NeuronSet(torch.ones(2, 48) > 0)
    view = token_view(gpt2_like, sequence, neurons, decode=str)
    assert torch.equal(view.before, predicted_suffixes(gpt2_like, [sequence])[0])
    with neurons.dropped_out(gpt2_like):
        (ablated,) = predicted_suffixes(gpt2_like, [sequence])
    assert torch.equal(view.after, ablated) and not torch.equal(view.before, ablated)


def test_characters_in_bytes_are_whole_where_a_decoder_gives_up_all_bytes_around_a_broken_one():
    """As the decoders of Llama and Gemma do."""
    llama = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    text = "a: \ua9b1\ua9b8\ua992\ua9bc\ua981\ua9ab\ua9ae\ua983 e"
    pairs = zip(text.encode(), range(len(text.encode())), strict=True)
    names = [chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte, _ in pairs]
    found = pieces(lambda ids: llama.decode([names[i] for i in ids]), list(range(len(names))))
    assert [shown for *_, shown in found] == list(text)
    stray = text_after(lambda ids: llama.decode([names[i] for i in ids]), [0, 3, 4, 5], [4])
    assert stray == "\ufffd"  # and not one for each byte before it too
