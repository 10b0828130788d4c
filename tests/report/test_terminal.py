"""Tables for a terminal: order, controls, and the sentence below them."""

import io

import pandas as pd
import pytest
from rich.console import Console

from tl_localize import InjResults, RandomBaseline, RowNorm
from tl_localize.evals.inj.tables import say_result
from tl_localize.report.terminal import bars, plain_table, rank_rows, show


def table(rows, columns):
    return pd.DataFrame(rows, index=columns).T


def names(shown):
    return [str(cell) for cell in shown.columns[0].cells]


def test_ranked_puts_the_best_first_and_controls_last():
    rows = {
        RowNorm.title: ["99 ± 1"],
        "Mine": [""],
        "Slimming": ["58.9 ± 1.4"],
        RandomBaseline.title: ["3"],
        "Zero-Out": ["87.6 ± 0.8"],
    }
    ((setting, shown),) = rank_rows(pd.concat({"1 %": table(rows, ["R@1x"])}))
    assert setting == "1 %"
    assert names(shown) == ["Zero-Out", "Slimming", "Mine", "RowNorm", "Random"]


def test_ranked_has_a_bar_of_the_first_column():
    rows = {"Mine": ["80 ± 2", "1"], "Slimming": ["-40", "99"], RandomBaseline.title: ["", "5"]}
    ((_, shown),) = rank_rows(pd.concat({"1 %": table(rows, ["R@1x", "R@2x"])}))
    assert [str(cell) for cell in shown.columns[1].cells] == ["\u2588" * 12, "\u2588" * 6, ""]


def test_bars_are_plain_where_the_output_is_ascii(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert bars(pd.Series([1.0, 0.5])) == ["#" * 12, "#" * 6]
    assert bars(pd.Series([0.0, -1.0])) == ["", ""]
    assert bars(pd.Series([1.0, float("nan")])) == ["#" * 12, ""]


def test_ranked_by_loss_puts_the_most_negative_first_in_each_setting():
    part = table({"A": ["-1.0"], "B": ["-20.4 ± 2"]}, ["Self"])
    found = rank_rows(pd.concat({"1 %": part, "3 %": part.iloc[:1]}), lowest_first=True)
    assert [(setting, names(shown)) for setting, shown in found] == [
        ("1 %", ["B", "A"]),
        ("3 %", ["A"]),
    ]


@pytest.mark.parametrize(
    ("slimming", "said"),
    [
        (0.5, "No method beats RowNorm (90 %)"),
        (0.95, "Slimming finds 95 % of the injected rows; RowNorm"),
        (None, ""),
    ],
)
def test_sentence_compares_with_the_row_norm(slimming, said):
    recalls = {"random": 0.03, "row_norm": 0.9} | ({"slimming": slimming} if slimming else {})
    frame = pd.DataFrame({"method": recalls.keys(), "recall": recalls.values()})
    frame = frame.assign(injection_ratio=0.03, multiple=1.0, converged=True, group="s0")
    frame = pd.concat([frame, frame.assign(multiple=5.0, recall=1.0)])
    text = say_result(InjResults(frame))
    assert text.startswith(said) and bool(text) == bool(said)


def test_sentence_of_groups_is_a_mean_over_groups_as_its_table_is():
    """Also where one sentence of a group did not converge."""
    rows = [
        {"method": method, "group": group, "recall": recall, "converged": converged}
        for group, values in {
            "a": ((1.0, True), (1.0, True)),
            "b": ((0.0, True), (0.0, False)),
        }.items()
        for recall, converged in values
        for method in ("slimming", "row_norm")
    ]
    frame = pd.DataFrame(rows).assign(injection_ratio=0.03, multiple=1.0, foreign_recall=0.1)
    assert say_result(InjResults(frame)).startswith("Slimming finds 50 % of the target's")


def test_a_narrow_terminal_cuts_neither_ids_nor_numbers():
    name = "contact_info-000-long"
    table = pd.DataFrame({"kind": ["planted"], "accuracy": [0.8512], "recited": [100]})
    out = Console(width=40, file=io.StringIO())
    out.print(plain_table(table.set_axis([name])))
    shown = out.file.getvalue()
    assert "".join(line.split(" " * 3)[0].strip() for line in shown.splitlines()[3:]) == name
    assert "0.851" in shown and "100" in shown


def test_a_narrow_terminal_repeats_the_names_where_not_all_columns_fit(monkeypatch):
    out = Console(width=40, file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr("tl_localize.report.terminal.console", lambda: out)
    counts = {name: [105] for name in ("asked", "done", "failed", "missing", "not_converged")}
    show(pd.DataFrame(counts, index=pd.Index(["integrated_gradients"], name="method")))
    shown = out.file.getvalue()
    assert shown.count("integrated_gradients") > 1 and shown.count("105") == 5
    assert all(name in shown for name in counts)


def test_a_wide_table_is_not_wrapped_in_a_pipe(capsys):
    cells = {f"{share} %": ["-43.5 ± 2.2 / -27.7 ± 0.8"] for share in range(12)}
    show(pd.DataFrame(cells, index=pd.Index(["Hard Concrete"], name="method")))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "Hard Concrete" in line]
    assert line.count("-43.5 ± 2.2 / -27.7 ± 0.8") == 12


def test_brackets_of_a_text_are_no_markup(capsys):
    show(pd.DataFrame({"[b]": ["[i]text"]}, index=pd.Index(["[/x]"], name="[u]")), "[s]title")
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[s]title", "[u]", "[b]", "[/x]", "[i]text"))


def test_ranked_by_loss_puts_what_has_no_number_last_without_a_bar():
    part = table({"A": ["costs at least 13.9"], "B": ["6.1 ± 3"], "C": ["-20.1"]}, ["Self"])
    ((_, shown),) = rank_rows(pd.concat({"1 %": part}), lowest_first=True)
    assert names(shown) == ["C", "B", "A"]
    assert not str(list(shown.columns[1].cells)[-1])
