"""Tables for a terminal: order, controls, and the sentence below them."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from tl_localize import InjResults, RandomBaseline, RowNorm
from tl_localize.report.terminal import bars, ranked, reading


def table(rows: dict[str, list[str]], columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame(rows, index=columns).T


def names(shown: Any) -> list[Any]:
    return list(shown.columns[0].cells)


def test_ranked_puts_the_best_first_and_controls_last() -> None:
    rows = {
        RowNorm.title: ["99 ± 1"],
        "Mine": [""],
        "Slimming": ["58.9 ± 1.4"],
        RandomBaseline.title: ["3"],
        "Zero-Out": ["87.6 ± 0.8"],
    }
    ((setting, shown),) = ranked(table(rows, ["R@1x"]))
    assert setting == "" and names(shown) == ["Zero-Out", "Slimming", "Mine", "RowNorm", "Random"]
    assert [row.style for row in shown.rows] == ["bold", "", "", "dim", "dim"]
    assert [row.end_section for row in shown.rows] == [False, False, True, False, False]


def test_ranked_by_loss_puts_the_most_negative_first_and_drops_equal_columns() -> None:
    rows = {"A": ["-1.0", "25"], "B": ["-20.4 ± 2", "25"]}
    ((_, shown),) = ranked(table(rows, ["Self", "targets"]), lowest_first=True)
    assert names(shown) == ["B", "A"]
    assert [column.header for column in shown.columns] == ["method", "Self"]


def test_ranked_gives_a_table_for_each_setting() -> None:
    parts = {"1 %": table({"A": ["1"]}, ["R"]), "3 %": table({"A": ["2"], "B": ["3"]}, ["R"])}
    found = [(setting, names(shown)) for setting, shown in ranked(pd.concat(parts))]
    assert found == [("1 %", ["A"]), ("3 %", ["B", "A"])]


@pytest.mark.parametrize(
    ("slimming", "said"),
    [
        (0.5, "No method beats RowNorm (90 %)"),
        (0.95, "Slimming finds 95 % of the injected rows; RowNorm"),
        (None, ""),
    ],
)
def test_reading_compares_with_the_row_norm(slimming: float | None, said: str) -> None:
    recalls = {"random": 0.03, "row_norm": 0.9} | ({"slimming": slimming} if slimming else {})
    frame = pd.DataFrame({"method": recalls.keys(), "recall": recalls.values()})
    frame = frame.assign(injection_ratio=0.03, multiple=1.0, converged=True)
    frame = pd.concat([frame, frame.assign(multiple=5.0, recall=1.0)])
    text = reading(InjResults(frame))
    assert text.startswith(said) and bool(text) == bool(said)


def test_bars() -> None:
    assert bars([0, 0]) == "  " and bars([1, 8]) == "▁█"
