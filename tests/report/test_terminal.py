"""Tables for a terminal: order, controls, and the sentence below them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest


def table(rows: dict[str, list[str]], columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame(rows, index=columns).T


def cells(shown: Any, column: int = 0) -> list[str]:
    return [str(cell) for cell in shown.columns[column].cells]


def test_ranked_puts_the_best_first_and_controls_last() -> None:
    from tl_localize.methods import RandomBaseline, RowNorm
    from tl_localize.report.terminal import ranked

    rows = {
        RowNorm.title: ["99 ± 1"],
        "Mine": [""],
        "Slimming": ["58.9 ± 1.4"],
        RandomBaseline.title: ["3"],
        "Zero-Out": ["87.6 ± 0.8"],
    }
    ((setting, shown),) = ranked(table(rows, ["R@1x"]))
    assert setting == "" and cells(shown) == ["Zero-Out", "Slimming", "Mine", "RowNorm", "Random"]
    assert [str(cell.style) for cell in shown.columns[1].cells] == ["bold", "", "", "dim", "dim"]
    assert [row.end_section for row in shown.rows] == [False, False, True, False, False]


def test_ranked_by_loss_puts_the_most_negative_first_and_drops_equal_columns() -> None:
    from tl_localize.report.terminal import ranked

    rows = {"A": ["-1.0", "25"], "B": ["-20.4 ± 2", "25"]}
    ((_, shown),) = ranked(table(rows, ["Self", "targets"]), lowest_first=True)
    assert cells(shown) == ["B", "A"]
    assert [column.header for column in shown.columns] == ["method", "Self"]


def test_ranked_gives_a_table_for_each_setting() -> None:
    from tl_localize.report.terminal import ranked

    whole = pd.concat(
        {
            "ratio 1 %": table({"A": ["1"]}, ["R"]),
            "ratio 3 %": table({"A": ["2"], "B": ["3"]}, ["R"]),
        }
    )
    assert [(setting, cells(shown)) for setting, shown in ranked(whole)] == [
        ("ratio 1 %", ["A"]),
        ("ratio 3 %", ["B", "A"]),
    ]


@pytest.mark.parametrize(
    ("recalls", "said"),
    [
        ({"slimming": 0.5, "row_norm": 0.9, "random": 0.03}, "No method beats RowNorm (90 %)"),
        (
            {"slimming": 0.95, "row_norm": 0.9, "random": 0.03},
            "Slimming finds 95 % of the injected rows; RowNorm",
        ),
        ({"random": 0.03, "row_norm": 0.9}, ""),
    ],
)
def test_reading_compares_with_the_row_norm(recalls: dict[str, float], said: str) -> None:
    from tl_localize import InjResults
    from tl_localize.report.terminal import reading

    rows = [
        {
            "method": name,
            "recall": recall,
            "injection_ratio": 0.03,
            "multiple": 1.0,
            "converged": True,
        }
        for name, recall in recalls.items()
    ]
    rows += [{**row, "multiple": 5.0, "recall": 1.0} for row in rows]
    text = reading(InjResults(pd.DataFrame(rows)))
    assert text.startswith(said) and bool(text) == bool(said)


def test_number_and_bars() -> None:
    from tl_localize.report.terminal import bars, number

    assert number("87.2 ± 0.9") == 87.2 and math.isnan(number("NONE"))
    assert bars([0, 0]) == "  " and bars([1, 8]) == "▁█"


def test_picture_of_what_was_printed_needs_no_other_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tl_localize.report.terminal import console, save_svg

    out = console(record=True)
    out.print("[bold]recited[/bold]")
    save_svg(out, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "recited" in text and "font-face" not in text and "cdn" not in text
