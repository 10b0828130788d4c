"""What objects show of themselves: in a notebook, in a terminal, as a repr."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pandas as pd
import pytest
import torch

from tl_localize import (
    DelBenchmark,
    DelResults,
    InjBenchmark,
    Injection,
    InjResults,
    JointInjection,
    NeuronScores,
    NeuronSet,
)
from tl_localize.collect import Collection, Criteria, Report, token_windows
from tl_localize.evals.del_results import METRICS
from tl_localize.injection import FinalLosses
from tl_localize.sequences import SequenceBatch
from tl_localize.stats import styled


class Balance(HTMLParser):
    """Fails where a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_html(html: str) -> str:
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    assert "<script" not in html.lower().replace("&lt;script", "")
    return html


@pytest.fixture
def scores() -> NeuronScores:
    return NeuronScores(
        torch.tensor([[0.0, 3.5, -1.0], [0.25, 0.0, 0.0]]), "mine", "<a> poem", "Mine(steps=2)"
    )


@pytest.fixture
def injection() -> Injection:
    found = NeuronSet.from_pairs([(0, 0), (1, 1), (1, 2)], (2, 3))
    curve, by_token = torch.tensor([6.0, 0.04]), torch.tensor([0.04, 0.9])
    return Injection(found, torch.zeros(3, 4), curve, by_token, True, "s0")


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"sequence_id": ["s0", "s1"], "method": ["random", "random"], **columns})


@pytest.fixture
def inj_results() -> InjResults:
    columns = {
        "injection_ratio": 0.01,
        "ratio": 0.01,
        "multiple": 1,
        "recall": [0.5, 0.25],
        "converged": True,
        "seed": [0, 1],
    }
    return InjResults(frame(**columns, group=["s0", "s1"]))


@pytest.fixture
def del_results() -> DelResults:
    return DelResults(
        frame(model="m", ablation="zero", ratio=0.01, **dict.fromkeys(METRICS, 0.5)), pd.DataFrame()
    )


def test_scores_show_the_best_neurons_and_escape_names(scores: NeuronScores) -> None:
    html = check_html(scores._repr_html_())
    assert "&lt;a&gt; poem" in html and "Mine(steps=2)" in html and "2 layers x 3 neurons" in html
    assert html.index(">3.5<") < html.index(">0.25<")


def test_scores_show_how_many_of_the_top_percent_lie_in_each_layer() -> None:
    values = torch.zeros(2, 200)
    values[0, 7] = values[1, :3] = 1.0  # both layers reach 1, as masks do
    html = check_html(NeuronScores(values)._repr_html_())
    assert ">in the top 1 %<" in html
    assert re.findall(r'row\d_col3" [^>]*>(\d+)<', html.rpartition("<table")[2]) == ["1", "3"]
    assert "width: 10em" in html or "linear-gradient" in html  # a bar


def test_scores_without_positive_values_can_be_shown() -> None:
    check_html(NeuronScores(-torch.ones(2, 3))._repr_html_())


def test_set_shows_counts_and_indices(injection: Injection) -> None:
    html = check_html(injection.neurons._repr_html_())
    assert "NeuronSet: 3 of 6 neurons" in html and ">1, 2<" in html


def test_empty_set_can_be_shown() -> None:
    check_html(NeuronSet(torch.zeros(2, 3) > 0)._repr_html_())


def test_injection_shows_its_state_and_loss(injection: Injection) -> None:
    html = check_html(injection._repr_html_())
    assert "converged" in html and ">0.04<" in html and "token 2, nats" in html and ">1, 2<" in html


@pytest.mark.parametrize("name", ["inj_results", "del_results"])
def test_results_show_their_table(name: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(name)
    assert len(repr(results)) < 120 and "2 " in repr(results) and "1 %" in repr(results)
    assert "random" in check_html(results._repr_html_())


@pytest.mark.parametrize(
    "empty", [InjResults(pd.DataFrame()), DelResults(pd.DataFrame(), pd.DataFrame())]
)
def test_results_of_nothing_can_be_shown(empty: Any) -> None:
    assert "nothing measured" in repr(empty) and "nothing measured" in check_html(
        empty._repr_html_()
    )


def test_styled_tables_escape_text_and_shorten_numbers() -> None:
    table = pd.DataFrame({"<name>": ["<a>", "b"], "score": [0.960942, 2.0]})
    html = check_html(styled(table, "<caption>", ["score"]))
    texts = ["&lt;name&gt;", "&lt;a&gt;", "&lt;caption&gt;", ">0.96094<", ">2<"]
    assert all(text in html for text in texts)
    assert "&lt;x&gt;" in check_html(styled(pd.DataFrame({"score": [1.0]}, index=["<x>"])))


def test_styled_tables_without_rows_can_be_shown() -> None:
    assert "name" in check_html(styled(pd.DataFrame({"name": []})))


@pytest.fixture
def shown(gpt2_like: Any, sequence: Any, scores: NeuronScores, injection: Injection) -> list[Any]:
    """Of each class one object; benchmarks hold a model, sequences and general text."""
    report = Report(3, {"accuracy": 2})
    text = torch.zeros(1, 90, dtype=torch.long)
    settings: Any = {"ratios": (0.25, 0.5), "n_dev": 0, "decode": str}
    return [
        Collection([sequence], 1, pd.DataFrame({"id": ["a"]}), report, Criteria()),
        report,
        next(token_windows(text)),
        SequenceBatch.of([sequence, sequence]),
        DelBenchmark(gpt2_like, [sequence], text[:, :8], **settings),
        InjBenchmark(model=gpt2_like, sequences=[sequence], ratio=0.1),
        sequence,
        scores,
        injection,
        injection.neurons,
    ]


def test_objects_are_shown_in_a_line_that_begins_with_their_class(shown: list[Any]) -> None:
    for one in shown:
        text = repr(one)
        assert text.startswith(type(one).__name__) and len(text) < 160, text
        assert "\n" not in text and "tensor(" not in text


def test_joint_injection_shows_its_state_and_each_sequence(injection: Injection) -> None:
    one, other = injection, replace(injection, sequence_id="<b>", converged=False)
    losses = (FinalLosses(0.5, 0.25, 0.0625, 0.125), FinalLosses(0.04, 0.0, 0.0, 0.0))
    html = check_html(JointInjection((one, other), torch.zeros(2, 2), losses)._repr_html_())
    assert "1 of them NOT converged" in html
    cells = ("0.0625", "0.125", "0.04", "&lt;b&gt;", "True", "False")
    assert all(f">{cell}<" in html for cell in cells)
