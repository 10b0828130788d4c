"""The bounds of the criteria, and the report."""

from __future__ import annotations

from typing import Any

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
        ({"n_prefix": 0}, r"n_prefix must be in \[1, inf\], got 0"),
        ({"n_suffix": 8}, r"min_distinct must be in \[0, 8\], got 16"),
        ({"min_accuracy": 90}, r"min_accuracy must be in \[0, 1\], got 90"),
        ({"max_distance": -1}, "max_distance must be in"),
        ({"max_jaccard": 1.5}, "max_jaccard must be in"),
        ({"ngram": 81}, r"ngram must be in \[1, 80\], got 81"),
    ],
)
def test_criteria_refuse(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Criteria(**changes)


def test_report_counts_what_each_criterion_removes(gpt2_like: Any) -> None:
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
        torch.zeros(0),
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
    assert report.examples[SHORT][0].startswith(
        "sequence-9: 10 tokens: 'A" if good[2][0] == 0 else "sequence-9: 10 tokens: "
    )
    assert report.examples[SHORT][1] == "sequence-10: 0 tokens: ''"
    assert str(report).startswith("12 came in, 2 removed: too short")
