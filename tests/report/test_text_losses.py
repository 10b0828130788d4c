"""What other texts lose: measured with the same neurons, sorted, and the text itself first."""

import re
from dataclasses import replace

import pandas as pd
import pytest
import torch

from tl_localize import MemorizedSequence, NeuronSet, accuracy, text_losses
from tl_localize.report import text_losses as module
from tl_localize.report.pages import page
from tl_localize.report.text_losses import TextLosses
from tl_localize.texts.known import known


@pytest.fixture
def losses():
    frame = pd.DataFrame({"id": ["own", "<a>", "b"], "category": ["x", "", "y"]})
    frame = frame.assign(before=[0.8, 1.0, 0.9], after=[0.2, 0.5, 0.95])
    return TextLosses(frame.assign(lost=frame["before"] - frame["after"]), 7)


def test_losses_are_those_of_ablation_the_most_first(gpt2_like, make_sequences):
    own, *others = [replace(text, category="x") for text in make_sequences(*[(12, 4)] * 5)]
    neurons = NeuronSet(torch.rand(2, 48, generator=torch.Generator().manual_seed(0)) < 0.8)
    elsewhere = MemorizedSequence(own.tokens, own.n_prefix + 1)
    found = text_losses(gpt2_like, own, neurons, iter([own, elsewhere, *others]))
    assert found.frame["id"].iloc[0] == own.id and len(found.others) == 4
    assert found.others["lost"].is_monotonic_decreasing and set(found.frame["category"]) == {"x"}
    texts = {text.id: text for text in (own, *others)}
    ordered = [texts[id] for id in found.frame["id"]]
    assert found.frame["before"].tolist() == accuracy(gpt2_like, ordered).tolist()
    with neurons.dropped_out(gpt2_like):
        assert found.frame["after"].tolist() == accuracy(gpt2_like, ordered).tolist()


def test_what_does_not_fit_is_refused_before_texts_are_searched(gpt2_like, sequence, monkeypatch):
    monkeypatch.setattr(module, "known", lambda *_, **__: pytest.fail("texts were searched"))
    neurons = NeuronSet(torch.ones(2, 48) > 0)
    with pytest.raises(ValueError, match="mask must have the model's shape"):
        text_losses(gpt2_like, sequence, NeuronSet(torch.ones(3, 4) > 0))
    for text, others in (("a", None), (sequence, ["a"]), (sequence, 3)):
        with pytest.raises(TypeError, match=r"must be a (MemorizedSequence|list of sequences)"):
            text_losses(gpt2_like, text, neurons, others)
    assert len(text_losses(gpt2_like, sequence, neurons, []).others) == 0


def test_texts_that_the_model_knows_are_measured_once(few_planted, monkeypatch, shipped_model):
    model = shipped_model()
    texts = known(model).sequences
    neurons = NeuronSet(torch.rand(6, 1536, generator=torch.Generator().manual_seed(0)) < 0.1)
    expected = text_losses(model, texts[1], neurons, texts)
    passes = []
    monkeypatch.setattr(
        module, "accuracy", lambda model, some: passes.append(len(some)) or accuracy(model, some)
    )
    found = text_losses(model, texts[1], neurons)
    assert len(texts) > 5 and passes == [1, len(texts)]
    pd.testing.assert_frame_equal(found.frame, expected.frame, atol=1e-6)


def test_table_has_the_text_the_most_that_is_lost_and_the_mean_of_all(losses):
    table = losses.table(n=1)
    assert table.index.tolist() == ["own", "<a>", "mean of 2 other texts"]
    assert table["lost (%)"].tolist() == [60.0, 50.0, 22.5]
    assert table["category"].tolist() == ["x", "", ""]


def test_nothing_lost_has_no_sign():
    frame = pd.DataFrame({"id": ["a", "b"], "category": "", "before": 0.3, "after": 0.1 + 0.2})
    found = TextLosses(frame.assign(lost=frame["before"] - frame["after"]), 7)
    assert "1 other text loses 0.0 points" in str(found)
    assert "-0" not in found.table().to_string()


def test_sentence_counts_the_texts_that_fall(losses):
    assert str(losses) == (
        "own: 80% recited before, 20% without 7 neurons. 2 other texts lose 22.5 points on "
        "average; 1 of them loses 10 points or more."
    )


def test_figure_shows_before_and_after(losses):
    before, own, others = losses.plot().axes[0].get_lines()
    assert before.get_xdata().tolist() == [80, 100, 90, 95]
    assert own.get_xdata().tolist() == [20] and others.get_xdata().tolist() == [50, 95, 72.5]


def test_page_names_the_model_and_escapes_ids(losses):
    made = page([losses], "What falls", {"model": "gpt2 & more"})
    assert "gpt2 &amp; more" in made and "<td>&lt;a&gt;</td>" in made and "<h1>What falls" in made
    assert made.count("<tr") == 3


def test_bars_show_what_is_left_and_what_is_lost(losses):
    widths = re.findall(r"width:(\d+)%", losses.html())
    assert widths == ["20", "60", "50", "50", "90", "0"]  # the last text gained


def test_a_loss_of_ten_points_counts_whatever_floats_make_of_it():
    frame = pd.DataFrame({"id": ["own", "a"], "category": ["", ""]})
    frame = frame.assign(before=[0.8, 0.9], after=[0.2, 0.8], lost=[0.6, 0.9 - 0.8])
    assert "1 of them loses 10 points" in str(TextLosses(frame, 7))
