"""The bounds of the criteria, and the report."""

import pytest
import torch
from recited import letters, recite

from tl_localize.collect import Criteria, collect_memorized
from tl_localize.collect.criteria import (
    DISTANT,
    INACCURATE,
    MONOTONOUS,
    NEAR,
    REPEATED,
    REPETITIVE,
    SHORT,
    SURPLUS,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_prefix": 0}, "n_prefix"),
        ({"n_suffix": 8}, "min_distinct"),
        ({"min_accuracy": 90}, "min_accuracy"),
        ({"max_distance": -1}, "max_distance"),
        ({"max_jaccard": 1.5}, "max_jaccard"),
        ({"ngram": 81}, "ngram"),
        ({"n_prefix": 2.5}, "n_prefix must be a whole number"),
        ({"min_distinct": 3.5}, "min_distinct must be a whole number"),
    ],
)
def test_criteria_refuse(changes, message):
    with pytest.raises(ValueError, match=message):
        Criteria(**changes)


def test_report_counts_what_each_criterion_removes(gpt2_like):
    generator = torch.Generator().manual_seed(9)
    good = list(recite(gpt2_like, torch.randint(61, (6, 6), generator=generator), 16))
    distinct = [len(set(row[6:].tolist())) for row in good]
    wrong = good[0].clone()
    wrong[6:16] = (wrong[6:16] + 1) % 61
    constant = good[0].clone()
    constant[6:] = 5
    stream = [
        *good,
        good[1].clone(),
        wrong,
        constant,
        good[2][:10],
        good[2][:3],
        torch.cat([good[3], good[3]]),
    ]
    criteria = Criteria(n_prefix=6, n_suffix=16, min_distinct=2, max_jaccard=1)
    assert min(distinct) >= 2
    report = collect_memorized(gpt2_like, stream, criteria, n_dev=0, n_max=4, decode=letters).report
    n_unique = len({tuple(row.tolist()) for row in good})
    assert report.removed == {
        SHORT: 2,
        REPETITIVE: 1,
        INACCURATE: 1,
        REPEATED: 2 + 6 - n_unique,
        DISTANT: 0,
        MONOTONOUS: 0,
        NEAR: 0,
        SURPLUS: n_unique - 4,
    }
    assert (report.n_in, report.n_out) == (12, 4)
    assert report.table()["left"].iloc[-1] == 4
    assert str(report).startswith("12 came in, 2 removed: too short")
