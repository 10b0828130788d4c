"""What objects show of themselves: in a notebook, in a terminal, as a repr."""

import pandas as pd
import pytest

from tl_localize import Activations, DelResults, InjResults, inject
from tl_localize.collect import Collection, Criteria, Report


def test_objects_are_shown_in_a_line_that_begins_with_their_class(gpt2_like, sequence):
    report = Report(3, {"accuracy": 2})
    scores = Activations()(gpt2_like, sequence)
    for value in [
        Collection([sequence], 1, pd.DataFrame({"id": ["a"]}), report, Criteria()),
        report,
        sequence,
        scores,
        scores.top_k(0.1),
        inject(gpt2_like, sequence, ratio=0.1, seed=0, learning_rate=0.01, max_steps=1),
    ]:
        shown = repr(value)
        assert shown.startswith(type(value).__name__) and len(shown) < 160, shown
        assert "\n" not in shown and "tensor(" not in shown


@pytest.mark.parametrize("empty", [InjResults(pd.DataFrame()), DelResults(pd.DataFrame())])
def test_results_show_their_table_or_that_there_is_none(empty, del_results):
    assert "0 sequences" in repr(empty) and "0 sequences" in empty._repr_html_()
    assert "<table" in del_results._repr_html_()
