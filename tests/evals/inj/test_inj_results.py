"""The tables that are made of what INJ measured."""

import errno
import json
from dataclasses import replace

import pandas as pd
import pytest
from noise import Noise

from tl_localize.evals import InjResults
from tl_localize.evals.inj import inj_figures


def test_table_counts_injections_that_did_not_converge(inj_results):
    frame = inj_results.frame.assign(converged=False)
    assert "NONE of 4 injections converged" in InjResults(frame).table().index[0][0]
    frame["converged"] = frame["sequence_id"] != "s0"
    mixed, alone = InjResults(frame).table(), InjResults(frame[frame["converged"]]).table()
    assert "1 more did NOT converge" in mixed.index[0][0]
    assert mixed.to_numpy().tolist() == alone.to_numpy().tolist()


def test_tests_compare_with_a_reference(benchmark):
    results = benchmark.run([Noise(), Noise("integrated_gradients", 5)])
    tests = InjResults(results.frame.assign(converged=True)).tests()
    assert set(tests["method"]) == {"noise", "random", "row_norm"}
    assert (tests["level"] == 0.05 / 3).all()


def test_tests_ask_whether_more_is_recalled(benchmark):
    frame = benchmark.run([Noise(), Noise("integrated_gradients", 5)]).frame
    frame = frame.assign(converged=True)
    results = {}
    for rise in (-0.3, 0.3):
        own = frame["method"] == "noise"
        jitter = frame["sequence_id"].str[-1].astype(int) / 100
        base = 0.5 + jitter**2
        moved = frame.assign(recall=base.where(~own, base + rise + jitter))
        tests = InjResults(moved).tests().query("method == 'noise'")
        results[rise] = tests["p_value"]
    assert (results[0.3] < 0.05).all() and (results[-0.3] > 0.95).all()


@pytest.mark.parametrize("across", [False, True])
def test_summary_holds_the_numbers_of_the_table(joint_results, across):
    results = replace(joint_results, frame=joint_results.frame.assign(converged=True))
    column = "foreign_recall_across_layers" if across else "foreign_recall"
    keys = ["method", "multiple", "metric"]
    row = results.summary().set_index(keys).loc[("activations", 1, column)]
    part = results.frame.query("method == 'activations' and multiple == 1")
    groups = part.groupby("group")[column].mean()
    assert row["mean"] == groups.mean() and row["n"] == len(groups)
    text = f"{100 * row['mean']:.1f} ± {100 * row['standard_error']:.1f}"
    table = results.table(across_layers=across)
    assert table.xs("activations", level=1)["R@1x"].iloc[0].endswith(text)


def test_save_writes_what_is_there(inj_results, tmp_path):
    missing = pd.DataFrame([{"method": "activations", "reason": "not yet done"}])
    replace(inj_results, missing=missing).save(tmp_path)
    assert (tmp_path / "missing.csv").exists()
    inj_results.save(tmp_path)
    assert not (tmp_path / "missing.csv").exists()
    assert len(pd.read_csv(tmp_path / "frame.csv")) == len(inj_results.frame)
    settings = json.loads((tmp_path / "measured_with.json").read_text())
    assert settings["scopes"]["0.2"]["methods"]["activations"]["absolute"] == "token"


def test_what_was_saved_is_kept_where_the_disk_is_full(inj_results, tmp_path, monkeypatch):
    inj_results.save(tmp_path)
    before = (tmp_path / "frame.csv").read_bytes()

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tl_localize.evals.shared.write_text", full)
    with pytest.raises(OSError, match="No space left"):
        inj_results.save(tmp_path)
    assert (tmp_path / "frame.csv").read_bytes() == before


def test_the_level_of_what_was_trained_counts_each_sentence(joint_results):
    pytest.importorskip("matplotlib")
    from tl_localize.evals.inj import target_against_distractors

    frame = joint_results.frame
    firsts = frame.groupby("group")["sequence_id"].transform("first")
    only = replace(joint_results, frame=frame.assign(converged=frame["sequence_id"] == firsts))
    (panel,) = target_against_distractors(only).axes
    (known,) = [line for line in panel.lines if line.get_label() == "knows what was altered"]
    n_sentences = frame.groupby("group")["sequence_id"].nunique().max()
    assert n_sentences > 1 and known.get_xdata()[0] == pytest.approx(100 / n_sentences)


def test_each_figure_has_a_caption_on_a_page(joint_results):
    pytest.importorskip("matplotlib")
    from tl_localize.cli.reports import FIGURES

    results = replace(joint_results, frame=joint_results.frame.assign(converged=True))
    drawn = inj_figures(results)
    assert len(drawn) == 2 and set(drawn) <= set(FIGURES)
