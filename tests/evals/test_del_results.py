"""The tables that are made of what DEL measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from noise import Noise, letters

from tl_localize import accuracy, levenshtein, perplexity
from tl_localize.evals import DelResults

RATIO = 0.2


def test_before_says_how_well_the_model_memorizes(gpt2_like: Any, benchmark_of: Any) -> None:
    benchmark = benchmark_of(gpt2_like)
    results = benchmark.run([Noise()])
    sequences = benchmark.test_sequences
    before = results.before
    assert before["accuracy"].to_numpy() == pytest.approx(accuracy(gpt2_like, sequences).numpy(), abs=1e-6)
    assert list(before["levenshtein"]) == levenshtein(gpt2_like, sequences, letters).tolist()
    assert list(before["length"]) == [len(letters(s.suffix.tolist())) for s in sequences]
    assert before["perplexity"].unique() == pytest.approx(perplexity(gpt2_like, benchmark.general_tokens))
    assert results.before_table().loc["gpt2-like", "Sequences"] == "5"


def test_confusion_holds_every_pair(gpt2_like: Any, benchmark_of: Any) -> None:
    results = benchmark_of(gpt2_like).run([Noise()])
    matrix = results.confusion["noise", 0.5]
    rows = results.frame.query("method == 'noise' and ratio == 0.5")
    assert list(matrix.index) == list(matrix.columns) == list(rows["sequence_id"])
    assert np.diag(matrix) == pytest.approx(rows["delta_self_accuracy"])
    others = (matrix.to_numpy().sum(1) - np.diag(matrix)) / 4
    assert others == pytest.approx(rows["delta_neg_accuracy"])
    grouped = results.confusion_by_category("noise", 0.5)
    assert [category for category, _ in grouped.index] == ["b", "b", "b", "a", "a"]
    assert grouped.loc[("b", "s5"), ("a", "s4")] == matrix.loc["s5", "s4"]
    with pytest.raises(ValueError, match="method and ratio must be one of"):
        results.confusion_by_category("noise", 0.3)


def test_table_has_the_paper_s_rows_and_errors(gpt2_like: Any, benchmark_of: Any) -> None:
    results = benchmark_of(gpt2_like).run([Noise()])
    table = results.table()
    values = 100 * results.frame.query("method == 'noise' and ratio == 0.5")["delta_self_accuracy"]
    expected = f"{values.mean():.1f} ± {values.std() / np.sqrt(5):.1f}"
    assert table.loc[("50 % of each layer, 5 sequences", "noise"), "Δ Self-Acc (points)"] == expected
    summary = results.summary().set_index(["method", "ratio", "metric"])
    assert summary.loc[("noise", 0.5, "delta_self_accuracy"), "mean"] == pytest.approx(values.mean() / 100)


def test_tests_ask_whether_self_accuracy_falls_more(gpt2_like: Any, benchmark_of: Any) -> None:
    from scipy.stats import ttest_rel

    results = benchmark_of(gpt2_like).run([Noise(), Noise("integrated_gradients", 5)])
    tests = results.tests().set_index(["method", "ratio"])
    wide = results.frame.query("ratio == 0.5").pivot(index="sequence_id", columns="method", values="delta_self_accuracy")
    expected = ttest_rel(wide["noise"], wide["integrated_gradients"], alternative="less").pvalue
    assert tests.loc[("noise", 0.5), "p_value"] == pytest.approx(expected)
    assert (tests["level"] == 0.05 / 2).all()
    with pytest.raises(ValueError, match=r"reference must be one of the methods .*got 'slimming'"):
        results.tests("slimming")


def test_save_writes_every_number(gpt2_like: Any, benchmark_of: Any, tmp_path: Path) -> None:
    benchmark = benchmark_of(gpt2_like, n_dev=6)  # one test sequence: Neg is nan
    results = benchmark.run([Noise()])
    assert results.frame["delta_neg_accuracy"].isna().all()
    lacking = pd.DataFrame([{"ratio": 0.5, "sequence_id": "7", "method": "noise", "reason": "out of memory"}])
    replace(results, missing=lacking).save(tmp_path)
    assert pd.read_csv(tmp_path / "missing.csv")["reason"].tolist() == ["out of memory"]
    results.save(tmp_path)
    assert not (tmp_path / "missing.csv").exists()
    written = pd.read_csv(tmp_path / "frame.csv")
    assert written["delta_perplexity"].tolist() == pytest.approx(results.frame["delta_perplexity"].tolist())
    confusion = pd.read_csv(tmp_path / "confusion.csv")
    assert len(confusion) == 2 * len(results.confusion) and set(confusion["change of"]) == {"accuracy", "levenshtein"}


def test_related_compares_the_category_with_all_others(gpt2_like: Any, benchmark_of: Any) -> None:
    results = benchmark_of(gpt2_like).run([Noise()])  # test sequences: b b a b a
    row = results.related().set_index(["method", "ratio"]).loc[("noise", 0.5)]
    matrix = results.confusion["noise", 0.5].to_numpy()
    related = [matrix[0, [1, 3]], matrix[1, [0, 3]], matrix[2, [4]], matrix[3, [0, 1]], matrix[4, [2]]]
    unrelated = [matrix[0, [2, 4]], matrix[1, [2, 4]], matrix[2, [0, 1, 3]], matrix[3, [2, 4]], matrix[4, [0, 1, 3]]]
    assert row["related"] == pytest.approx(np.mean([part.mean() for part in related]))
    assert row["unrelated"] == pytest.approx(np.mean([part.mean() for part in unrelated]))
    assert row["n"] == 5
    nameless = replace(results, before=results.before.assign(category=""))
    assert len(nameless.related()) == 0


def test_join_keeps_what_runs_share_once(gpt2_like: Any, benchmark_of: Any) -> None:
    benchmark = benchmark_of(gpt2_like)
    first, second = benchmark.run([Noise()]), benchmark.run([Noise("other", 9)])
    joined = DelResults.join([first, second])
    pd.testing.assert_frame_equal(
        joined.frame.sort_values(["method", "ratio", "sequence_id"], ignore_index=True),
        benchmark.run([Noise(), Noise("other", 9)]).frame.sort_values(["method", "ratio", "sequence_id"], ignore_index=True),
    )
    assert len(joined.before) == 5
    assert {method for method, _ in joined.confusion} == {"noise", "other", "random"}
    mixed = DelResults.join([first, benchmark_of(gpt2_like, ablation="mean").run([Noise()])])
    assert mixed.confusion == {}
    assert len(mixed.table()) == 4 * 2


def test_join_of_runs_with_different_targets_says_how_many(gpt2_like: Any, benchmark_of: Any) -> None:
    many, few = benchmark_of(gpt2_like, n_targets=4).run([Noise()]), benchmark_of(gpt2_like, n_targets=2).run([Noise("other", 9)])
    joined = DelResults.join([many, few])
    assert joined.table()["targets"].tolist() == ["4", "4", "2"] * 2
    assert {key[0]: len(matrix) for key, matrix in joined.confusion.items()} == {"noise": 4, "random": 4, "other": 2}
    assert "targets" not in many.table()


def test_at_price_interpolates_between_the_ratios(del_results):
    """Two ratios by hand: Neg 0, -0.4 and -2, Self 0, -10 and -30."""
    from dataclasses import replace

    changes = {0.001: (-0.1, -0.004), 0.005: (-0.3, -0.02)}
    frame = del_results.frame[del_results.frame["method"] == "hard_concrete"]
    own, others = (frame["ratio"].map({ratio: pair[i] for ratio, pair in changes.items()}) for i in (0, 1))
    results = replace(del_results, frame=frame.assign(delta_self_accuracy=own, delta_neg_accuracy=others))
    assert results.at_price().loc["hard_concrete"].to_dict() == {
        "Self at Neg = -0.5": f"{-10 - 20 * 0.1 / 1.6:.1f}",
        "Self at Neg = -1": f"{-10 - 20 * 0.6 / 1.6:.1f}",
        "Self at Neg = -3": "",
    }


def test_at_price_keeps_models_apart(del_results):
    from dataclasses import replace

    two = [del_results.frame, del_results.frame.assign(model="other")]
    assert set(replace(del_results, frame=pd.concat(two)).at_price().index) == {
        (m, n) for m in ("m", "other") for n in ("hard_concrete", "integrated_gradients", "random")
    }
