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
    from tl_localize.report.tables import inj_tables

    table = inj_tables(results, "reference-gpt2")["inj"]
    assert table.loc[("ratio 1 %, 3 sentences", "Hard Concrete"), "R@1x"] == "50.0 ± 5.8"


def test_inj_tables_set_the_published_numbers_beside_ours(results):
    from tl_localize.report.tables import inj_tables

    tables = inj_tables(results, "gpt2")
    assert (
        tables["inj"].loc[("paper", "ratio 1 %, published", "Hard Concrete"), "R@1x"]
        == "49.5 ± 0.5"
    )
    assert (
        tables["inj_across_layers"].loc[("paper", "ratio 0.1 %, published", "Slimming"), "R@5x"]
        == "95.4"
    )
    assert (
        tables["inj"].loc[("ours", "ratio 1 %, 3 sentences", "Hard Concrete"), "R@1x"]
        == "50.0 ± 5.8"
    )


def test_save_table_writes_three_formats_that_hold_the_same_cell(results, tmp_path):
    from tl_localize.report.tables import inj_tables, save_table

    save_table(inj_tables(results, "x")["inj"], tmp_path, "inj", "A caption")
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".tex", ".csv"}
    for path in tmp_path.iterdir():
        assert "50.0 ± 5.8" in path.read_text(encoding="utf-8")
    assert "A caption" in (tmp_path / "inj.tex").read_text(encoding="utf-8")


def test_to_markdown_puts_the_index_into_columns(results):
    from tl_localize.report.tables import inj_tables, to_markdown

    header = to_markdown(inj_tables(results, "x")["inj"]).splitlines()[0]
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "setting",
        "method",
        "R@1x",
        "R@2x",
    ]


def test_del_tables_show_mean_and_error_in_points(del_results):
    from tl_localize.report.tables import CAPTIONS, del_tables

    tables = del_tables(del_results, "reference-gpt2")
    assert set(tables) == {name for name in CAPTIONS if name.startswith("del")} - {
        "del_single_layer"
    }
    row = tables["del"].loc[("0.5 % of each layer, 4 sequences", "Hard Concrete")]
    assert row["Δ Self-Acc (points)"] == "-35.0 ± 5.0"
    assert row["Δ Rand-PPL (2 ** nats)"] == "0.25 ± 0.00"
    assert tables["del_memorization"].loc["m", "Acc (%)"] == "95.0 ± 2.9"


def test_del_tables_set_the_published_numbers_beside_ours(del_results):
    from tl_localize.report.tables import del_tables

    tables = del_tables(del_results, "EleutherAI/pythia-2.8b-deduped")
    theirs = tables["del"].loc[("paper", "0.5 % of each layer, published", "Hard Concrete")]
    assert (
        theirs["Δ Self-Acc (points)"],
        theirs["Δ Self-Dist (characters)"],
        theirs["Δ Rand-PPL"],
    ) == ("-53.2", "99.8", "")
    assert theirs["Δ Rand-PPL (2 ** nats)"] == "0.56"
    assert (
        tables["del"].loc[
            ("ours", "0.5 % of each layer, 4 sequences", "Random"), "Δ Self-Acc (points)"
        ]
        == "0.0 ± 0.0"
    )
    assert (
        tables["del_memorization"].loc["pythia-2.8b-deduped, published", "Len (characters)"]
        == "160"
    )
    assert tables["del_tests"].loc[(0.005, "Hard Concrete"), "published_p_value"] == 4.1e-78
    assert (
        del_tables(del_results, "gpt2-xl")["del_categories"].loc[("paper", "Poems"), "sequences"]
        == "9"
    )


def test_del_tests_compare_with_integrated_gradients_in_points(del_results):
    from tl_localize.report.tables import del_tables

    row = del_tables(del_results, "x")["del_tests"].loc[(0.005, "Hard Concrete")]
    assert row["difference of Δ Self-Acc (points)"] == pytest.approx(-17.5)
    assert row["level"] == 0.05 / 2
    assert bool(row["significant"])


def test_del_categories_and_examples_show_each_category(del_results):
    from tl_localize.report.tables import del_tables, to_markdown

    tables = del_tables(del_results, "x")
    assert tables["del_categories"]["sequences"].to_dict() == {"poems": "2", "code": "2"}
    assert tables["del_categories"]["Acc (%)"].to_dict() == {"poems": "100.0", "code": "90.0"}
    examples = tables["del_examples"]
    assert list(examples["category"][:2]) == ["poems", "code"]
    assert examples.loc["a", ["prefix", "suffix", "Hard Concrete", "Random"]].tolist() == [
        r"a|b\n",
        "A",
        "-40",
        "0",
    ]
    assert r"a\|b\n" in to_markdown(examples)  # a bar would end the cell
    assert (
        tables["del_related"].loc[(0.005, "Hard Concrete"), "Δ Acc of the same category (points)"]
        == "-8.75 ± 1.25"
    )


def test_del_tables_without_categories_and_integrated_gradients(del_results):
    from dataclasses import replace

    from tl_localize.report.tables import del_tables

    frame = del_results.frame[del_results.frame["method"] != "integrated_gradients"]
    bare = replace(
        del_results, frame=frame, before=del_results.before.assign(category=""), confusion={}
    )
    assert set(del_tables(bare, "x")) == {
        "del_memorization",
        "del",
        "del_at_price",
        "del_pairs",
        "del_examples",
    }


def test_single_layer_table_by_hand():
    import pandas as pd

    from tl_localize.report.tables import single_layer_table

    rows = [
        {
            "layer": layer,
            "multiple": multiple,
            "delta_self_accuracy": -0.1 * multiple - change,
            "delta_neg_accuracy": 0.02,
            "ratio": 0.1,
        }
        | {"n_neurons": 7 * multiple + (layer is None)}
        for layer, multiple in ((None, 1), (1, 1), (1, 5))
        for change in (0.0, 0.02)
    ]
    other = {
        "layer": 2,
        "multiple": 1,
        "delta_self_accuracy": -1.0,
        "delta_neg_accuracy": 0.0,
        "ratio": 0.05,
        "n_neurons": 3,
    }
    table = single_layer_table(pd.DataFrame([*rows, other]).astype({"layer": "Int64"}))
    assert list(table.index) == ["all layers", "layer 1"]
    assert table.loc["layer 1"].tolist() == [
        "7, 35",
        "-11.0 ± 1.0",
        "2.0 ± 0.0",
        "-51.0 ± 1.0",
        "2.0 ± 0.0",
    ]
    assert table.loc["all layers"].tolist() == ["8", "-11.0 ± 1.0", "2.0 ± 0.0", "", ""]
