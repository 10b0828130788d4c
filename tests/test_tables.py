"""Tables: formats, and the paper's numbers beside ours."""

import pandas as pd
import pytest


@pytest.fixture
def results():
    from tl_localize.evals.inj_benchmark import InjResults

    rows = [
        {
            "sequence_id": s,
            "group": s,
            "method": method,
            "injection_ratio": 0.01,
            "ratio": 0.01 * multiple,
            "multiple": multiple,
            "recall": base + 0.1 * s * multiple,
            "recall_across_layers": base,
            "converged": True,
            "seed": s,
        }
        for s in range(3)
        for method, base in (("hard_concrete", 0.4), ("integrated_gradients", 0.2))
        for multiple in (1, 2)
    ]
    return InjResults(pd.DataFrame(rows))


def test_inj_tables_show_mean_and_error_in_percent(results):
    from tl_localize.tables import inj_tables

    table = inj_tables(results, "reference-gpt2")["inj"]
    assert table.loc[("ratio 1 %, 3 sentences", "Hard Concrete"), "R@1x"] == "50.0 ± 5.8"


def test_inj_tables_set_the_published_numbers_beside_ours(results):
    from tl_localize.tables import inj_tables

    tables = inj_tables(results, "gpt2")
    assert tables["inj"].loc[("paper", "ratio 1 %, published", "Hard Concrete"), "R@1x"] == "49.5 ± 0.5"
    assert tables["inj_across_layers"].loc[("paper", "ratio 0.1 %, published", "Slimming"), "R@5x"] == "95.4"
    assert tables["inj"].loc[("ours", "ratio 1 %, 3 sentences", "Hard Concrete"), "R@1x"] == "50.0 ± 5.8"


def test_save_table_writes_three_formats_that_hold_the_same_cell(results, tmp_path):
    from tl_localize.tables import inj_tables, save_table

    save_table(inj_tables(results, "x")["inj"], tmp_path, "inj", "A caption")
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".tex", ".csv"}
    for path in tmp_path.iterdir():
        assert "50.0 ± 5.8" in path.read_text(encoding="utf-8")
    assert "A caption" in (tmp_path / "inj.tex").read_text(encoding="utf-8")


def test_to_markdown_puts_the_index_into_columns(results):
    from tl_localize.tables import inj_tables, to_markdown

    header = to_markdown(inj_tables(results, "x")["inj"]).splitlines()[0]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["setting", "method", "R@1x", "R@2x"]
