"""Results without rows: of a folder in which nothing is measured yet, or made by hand."""

from dataclasses import replace

import pandas as pd
import pytest

from tl_localize import DelResults, InjResults, RevResults
from tl_localize.evals.deletion import confusion, del_figures, del_tables, forgetting
from tl_localize.evals.inj import inj_figures, inj_tables, recall_curve, target_against_distractors
from tl_localize.evals.rev import rev_figures, rev_tables
from tl_localize.report.saving import save_table

KINDS = {
    InjResults: (inj_tables, inj_figures),
    DelResults: (del_tables, del_figures),
    RevResults: (rev_tables, rev_figures),
}


@pytest.fixture
def full(make_inj, gpt2_like, rev, one_oracle, del_results):
    """Results with rows, of each kind."""
    return {
        InjResults: lambda: make_inj(gpt2_like).run(),
        DelResults: lambda: del_results,
        RevResults: replace(rev, n_sequences=2, ratios=(0.5,)).run,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_frames_without_rows_have_the_columns_of_those_with_rows(kind, full):
    empty = kind(pd.DataFrame())
    some = full[kind]()
    assert not len(empty.frame) and set(some.frame) <= set(empty.frame)
    reference = some.frame["method"].iloc[0]
    for name in ("summary", "at_price", "before_table"):
        if hasattr(kind, name):
            found = getattr(empty, name)()
            assert not len(found) and list(found) == list(getattr(some, name)()), name
    tests = empty.tests()
    assert not len(tests) and list(tests) == list(some.tests(reference))
    table = empty.table()
    assert not len(table) and set(table) <= set(some.table())
    assert table.index.nlevels == some.table().index.nlevels
    assert "0 sequences x 0 methods" in empty._repr_html_()


@pytest.mark.parametrize("kind", KINDS)
def test_results_without_rows_are_saved_and_have_no_figure(kind, tmp_path):
    empty = kind(pd.DataFrame())
    tabulate, draw = KINDS[kind]
    empty.save(tmp_path)
    for title, table in tabulate(empty, "gpt2").items():
        save_table(table, tmp_path, title)
    assert draw(empty) == {}


def test_a_run_whose_confusion_is_lost_has_its_other_figure(del_results):
    lost = replace(del_results, confusion={})
    assert list(del_figures(lost)) == ["del_forgetting"]
    with pytest.raises(ValueError, match="results must hold confusion matrices, got none"):
        confusion(lost)


@pytest.mark.parametrize(
    ("draw", "kind"),
    [
        (recall_curve, InjResults),
        (target_against_distractors, InjResults),
        (forgetting, DelResults),
        (confusion, DelResults),
    ],
)
def test_a_figure_of_nothing_is_refused(draw, kind):
    with pytest.raises(ValueError, match="results must hold measurements to be drawn, got none"):
        draw(kind(pd.DataFrame()))


def test_rows_of_two_models_have_no_mean_together(full):
    for kind in (InjResults, DelResults):
        results = full[kind]()
        frame = pd.concat([results.frame, results.frame.assign(model="another")])
        with pytest.raises(ValueError, match=r"frame must be of one model .*'another'"):
            replace(results, frame=frame).table()
