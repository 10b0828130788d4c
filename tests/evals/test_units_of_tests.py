"""What is paired in a test: seeds by sentence, REV by model."""

import pandas as pd
import pytest
from scipy.stats import ttest_rel

from tl_localize.evals import RevResults
from tl_localize.evals.inj import compare_seeds
from tl_localize.evals.rev import rev_by_model


def test_compare_seeds_pairs_converged_sentences(inj_results):
    first = inj_results.frame.assign(converged=True)
    other = first.assign(recall=first["recall"] + (first["sequence_id"] == "s0") * 0.1)
    other.loc[other["sequence_id"] == "s1", "converged"] = False
    found = compare_seeds(first, other)
    assert found["n"].eq(first["sequence_id"].nunique() - 1).all()
    assert (found["recall_other_seed"] > found["recall"]).all()
    row = found.iloc[0]
    keys = {name: row[name] for name in ("method", "injection_ratio", "ratio")}
    pair = [
        frame.query("sequence_id != 's1'").merge(pd.DataFrame([keys]))["recall"]
        for frame in (first, other)
    ]
    assert row["p_value"] == pytest.approx(ttest_rel(*pair).pvalue)


def results_of(n_models):
    """Two sentences in each model; the method forgets 10 points more of its own."""
    rows = []
    for group in range(n_models):
        for sentence in range(2):
            for method, own in (("activations", -0.2), ("mine", -0.3)):
                row = {"method": method, "group": f"group-{group}", "converged": True}
                row |= {"sequence_id": f"s{sentence}", "direction": "put_back", "ratio": 0.1}
                row |= {"model": "m", "steps": 1, "delta_general_loss": 0.0}
                row["delta_own_accuracy"] = own - 0.01 * group * (method == "mine")
                rows.append({**row, "delta_others_accuracy": -0.1})
    return RevResults(pd.DataFrame(rows))


def test_rev_by_model_counts_models_not_sentences():
    found = rev_by_model(results_of(3)).set_index("method")
    assert found["n"].tolist() == [3, 3]
    assert found.loc["mine", "gap"] == pytest.approx(-21.0)
    assert found.loc["mine", "models_ahead"] == 3
    assert found["p_value"].isna().all()  # three models are too few for a test


def test_rev_by_model_tests_from_eight_models_on():
    assert rev_by_model(results_of(8)).set_index("method").loc["mine", "p_value"] < 1e-5
