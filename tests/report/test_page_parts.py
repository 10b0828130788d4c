"""A page of HTML: what it is of, tables and figures, and nothing in them is taken for HTML."""

import base64
import re

import pandas as pd
import torch

from tl_localize import MemorizedSequence
from tl_localize.report.pages import PageFigure, PageTable, Shown, in_words, page
from tl_localize.report.text_losses import TextLosses
from tl_localize.report.token_view import TokenView

SCRIPT = "<script>alert('x')</script>"


def test_nothing_of_a_text_or_a_name_is_taken_for_html():
    names = pd.DataFrame({SCRIPT: [SCRIPT]}, index=pd.Index([SCRIPT], name=f"id {SCRIPT}"))
    sequence = MemorizedSequence(torch.tensor([0, 1]), 1, SCRIPT)
    view = TokenView(
        sequence, torch.tensor([1]), torch.tensor([0]), lambda ids: SCRIPT * len(ids), 1, SCRIPT
    )
    losses = pd.DataFrame({"id": [SCRIPT], "category": SCRIPT, "before": 1, "after": 0, "lost": 1})
    parts = [PageTable(names, SCRIPT), PageFigure(b"", SCRIPT), view, TextLosses(losses, 7)]
    made = page(parts, SCRIPT, {SCRIPT: SCRIPT})
    assert "<script" not in made.lower()
    assert made.count("&lt;script&gt;") >= 10


def test_a_page_holds_its_pictures_and_fetches_nothing():
    made = page([PageFigure(b"a picture", "A curve")], "A title", {"model": "gpt2", "left out": ""})
    (source,) = re.findall(r'<img src="data:image/png;base64,([^"]+)"', made)
    assert base64.b64decode(source) == b"a picture"
    assert "left out" not in made
    assert not re.search(r"https?:|<link|<script|url\(", made)


def test_a_table_is_whole_and_has_the_names_of_its_rows():
    long = "word " * 40 + "end"
    table = pd.DataFrame(
        {"text": [long], "none": [float("nan")]}, index=pd.Index(["s0"], name="id")
    )
    shown = PageTable(table, "Texts")
    assert isinstance(shown, Shown)
    html = shown.html()
    assert long in html and "<th>id</th>" in html and "nan" not in html.lower()
    assert PageTable(pd.DataFrame({"a": range(100)}, index=range(100))).html().count("<tr>") == 100


def test_settings_are_said_in_words():
    method = {"class": "Slimming", "steps": 3, "units": {"class": "MLPNeurons"}, "rate": 1e-3}
    assert in_words(method) == "Slimming(steps=3, units=MLPNeurons(), rate=0.001)"
    assert in_words([{"a": None}, True]) == "[a=None, True]"
