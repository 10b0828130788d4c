"""Tables: formats, and the paper's numbers beside ours."""

from dataclasses import replace

import pandas as pd
import pytest

from tl_localize import InjResults
from tl_localize.evals.deletion import del_tables
from tl_localize.evals.inj import inj_tables
from tl_localize.report.saving import CAPTIONS, save_table, to_markdown

OURS, THEIRS = "ratio 1 %, 3 sentences", "ratio 1 %, published"
TEST = ("m", "zero", 0.005, "Hard Concrete")
DEL, DEL_PAPER = "0.5 % of each layer, 4 sequences", "0.5 % of each layer, published"


@pytest.fixture
def results():
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


def test_inj_tables_set_the_published_numbers_beside_ours(results):
    tables = inj_tables(results, "gpt2")
    table = tables["inj"]["R@1x"]
    assert table["ours", OURS, "Hard Concrete"] == "50.0 ± 5.8"
    assert table["paper", THEIRS, "Hard Concrete"] == "49.5 ± 0.5"
    across = tables["inj_across_layers"]["R@5x"]
    assert across["paper", "ratio 0.1 %, published", "Slimming"] == "95.4"


def test_save_table_writes_three_formats_that_hold_the_same_cell(results, tmp_path):
    save_table(inj_tables(results, "x")["inj"], tmp_path, "inj", "A caption")
    texts = {path.suffix: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert set(texts) == {".md", ".tex", ".csv"}
    assert all("50.0 ± 5.8" in text for text in texts.values())
    assert "A caption" in texts[".tex"] and texts[".md"].startswith("A caption\n\n|")


def test_del_tables_show_mean_and_error_in_points(del_results):
    tables = del_tables(del_results, "reference-gpt2")
    names = {name for name in CAPTIONS if name.startswith("del")}
    assert set(tables) == names - {"del_single_layer"}
    row = tables["del"].loc[(DEL, "Hard Concrete")]
    assert row["Δ Self-Acc (points)"] == "-35.0 ± 5.0"
    assert row["Δ Rand-PPL (2 ** nats)"] == "0.25 ± 0.00"
    assert tables["del_memorization"].loc["m", "Acc (%)"] == "95.0 ± 2.9"


def test_del_tables_set_the_published_numbers_beside_ours(del_results):
    tables = del_tables(del_results, "EleutherAI/pythia-2.8b-deduped")
    theirs = tables["del"].loc[("paper", DEL_PAPER, "Hard Concrete")]
    columns = ["Self-Acc (points)", "Self-Dist (characters)", "Rand-PPL", "Rand-PPL (2 ** nats)"]
    found = [theirs[f"Δ {column}"] for column in columns]
    assert found == ["-53.2", "99.8", "", "0.56"]
    assert tables["del"].loc[("ours", DEL, "Random"), "Δ Self-Acc (points)"] == "0.0 ± 0.0"
    before = tables["del_memorization"].loc[("paper", "pythia-2.8b-deduped")]
    assert before["Len (characters)"] == "160"
    categories = del_tables(del_results, "gpt2-xl")["del_categories"]
    assert categories.loc[("paper", "Poems"), "sequences"] == "9"


def test_del_tests_compare_with_integrated_gradients_in_points(del_results):
    row = del_tables(del_results, "x")["del_tests"].loc[TEST]
    assert row["difference of Δ Self-Acc (points)"] == pytest.approx(-17.5)
    assert row["level"] == 0.05 / 2 and row["significant"]


def test_del_categories_are_counted(del_results):
    table = del_tables(del_results, "x")["del_categories"]
    assert table["sequences"].to_dict() == {"poems": "2", "code": "2"}
    assert table["Acc (%)"].to_dict() == {"poems": "100.0", "code": "90.0"}


def test_markdown_escapes_bars():
    assert r"a\|b" in to_markdown(pd.DataFrame({"text": ["a|b"]}, index=["x"]))
    assert r"a\|b" in to_markdown(pd.DataFrame({"a|b": [1.0]}, index=["x"]))
    for lines in ({"text": ["a\nb"]}, {"a\nb": [1.0]}):
        assert len(to_markdown(pd.DataFrame(lines, index=["x"])).splitlines()) == 3


def test_del_tables_without_categories_and_integrated_gradients(del_results):
    frame = del_results.frame[del_results.frame["method"] != "integrated_gradients"]
    bare = replace(del_results, frame=frame, before=del_results.before.assign(category=""))
    assert set(del_tables(bare, "x")) == {"del_memorization", "del", "del_at_price"}


def test_latex_of_a_caption_is_escaped_and_texts_stay_as_they_are(tmp_path):
    table = pd.DataFrame({"PPL": ["1234.56"]}, index=pd.Index(["007"], name="id"))
    save_table(table, tmp_path, "t", "recall (%) of my_model")
    assert "\\caption{recall (\\%) of my\\_model}" in (tmp_path / "t.tex").read_text()
    last = (tmp_path / "t.md").read_text().splitlines()[-1]
    assert [cell.strip() for cell in last.split("|")] == ["", "007", "1234.56", ""]
