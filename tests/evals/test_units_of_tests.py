"""What is paired in a test: seeds by sentence, REV by model."""

import math

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


def test_compare_seeds_refuses_sentences_that_share_a_model(inj_results, joint_results):
    with pytest.raises(ValueError, match="second must be of INJ without distractors"):
        compare_seeds(inj_results.frame, joint_results.frame)


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
    given = results_of(3)
    given.frame["direction"] = "graft"  # where the lower gap is the worse one
    assert rev_by_model(given).set_index("method").loc["mine", "models_ahead"] == 0
    assert found["p_value"].isna().all()  # three models are too few for a test


def test_the_table_of_rev_has_errors_over_models():
    """Own minus others of 3 models: -20, -21 and -22, whatever the sentences are."""
    table = results_of(3).table()
    assert table.loc["mine", "own - others, at most"] == "-21.0 ± 0.6"
    assert table.loc["activations", "10 %"] == "-20.0 ± 0.0 / -10.0 ± 0.0"
    assert table.loc["mine", "own at others -5"] == "costs at least 10"
    assert results_of(1).table().loc["mine", "own - others, at most"] == "-20.0"


def test_the_table_of_rev_counts_the_models_that_are_missing():
    whole = results_of(3)
    lacks = (whole.frame["method"] == "mine") & (whole.frame["group"] == "group-2")
    cell = {"method": "mine", "part": "group-2", "scope": "", "reason": "not yet done"}
    table = RevResults(whole.frame[~lacks], missing=pd.DataFrame([cell])).table()
    assert table["missing"].to_dict() == {"activations": "0", "mine": "1"}
    assert "missing" not in whole.table()


def test_rev_tests_have_no_p_below_eight_models():
    few, many = results_of(7).tests().iloc[0], results_of(8).tests().iloc[0]
    assert (few["n"], many["n"]) == (7, 8)
    assert math.isnan(few["p_value"]) and many["p_value"] < 1e-5


@pytest.mark.parametrize(("direction", "sign"), [("put_back", 1), ("graft", -1)])
def test_shares_are_of_the_best_oracle(direction, sign):
    """At a price of 5 points the oracle in rounds has -40, the other one -30, the method -10; given
    to the model before, where all is a gain, they have 40, 30 and 10.
    """
    rows = []
    for method, slope in (("oracle_rounds", 8), ("oracle_first_order", 6), ("mine", 2)):
        for ratio, others in ((0.1, -0.02), (0.2, -0.1)):
            row = {"method": method, "group": "group-0", "converged": True, "ratio": ratio}
            row |= {"sequence_id": "s", "direction": direction, "delta_general_loss": 0.0}
            row["delta_own_accuracy"] = sign * slope * others
            rows.append(row | {"delta_others_accuracy": sign * others})
    table = RevResults(pd.DataFrame(rows)).table(direction)
    assert table["of the best oracle"].to_dict() == {
        "oracle_rounds": "100 %",
        "oracle_first_order": "75 %",
        "mine": "25 %",
    }


def test_rev_by_model_tests_from_eight_models_on():
    assert rev_by_model(results_of(8)).set_index("method").loc["mine", "p_value"] < 1e-5


def test_rev_pairs_the_models_that_both_methods_have():
    whole = results_of(9).frame
    lacks_last = (whole["method"] == "activations") & (whole["group"] == "group-8")
    lacks_first = (whole["method"] == "mine") & (whole["group"] == "group-0")
    for left_out, gaps in ((lacks_last, range(8)), (lacks_last | lacks_first, range(1, 8))):
        row = RevResults(whole[~left_out]).tests().iloc[0]
        assert row["n"] == len(gaps)
        assert row["difference"] == pytest.approx(-10 - sum(gaps) / len(gaps))


def test_a_text_that_gains_is_no_share_of_an_oracle_and_one_sentence_has_no_others():
    rows = results_of(2).frame.replace({"method": {"activations": "oracle_rounds"}})
    gains = rows["method"] == "mine"
    rows.loc[gains, "delta_own_accuracy"] = 0.1
    table = RevResults(rows.assign(delta_others_accuracy=-0.01)).table()
    assert table.loc["mine", "of the best oracle"] == "-50 %"
    alone = RevResults(rows.assign(delta_others_accuracy=math.nan)).table()
    assert not alone.map(lambda cell: "nan" in cell).any(axis=None)


def test_a_share_of_the_oracle_is_at_the_largest_ratio_where_no_ratio_costs_the_price():
    """There the method has 20 points, less than at the smaller one; the oracle has 40."""
    changes = {"oracle_rounds": ((-0.3, -0.02), (-0.4, -0.04)), "mine": ((-0.3, 0), (-0.2, -0.04))}
    rows = []
    for method, pairs in changes.items():
        for ratio, (own, others) in zip((0.1, 0.2), pairs, strict=True):
            row = {"method": method, "group": "group-0", "converged": True, "ratio": ratio}
            row |= {"sequence_id": "s", "direction": "put_back", "delta_general_loss": 0.0}
            rows.append(row | {"delta_own_accuracy": own, "delta_others_accuracy": others})
    table = RevResults(pd.DataFrame(rows)).table()
    assert table["of the best oracle"].to_dict() == {"oracle_rounds": "100 %", "mine": "50 %"}


def test_a_model_that_did_not_learn_its_sentences_takes_no_part():
    given = results_of(3)
    given.frame.loc[given.frame["group"] == "group-2", "converged"] = False
    for found in (given.summary(), rev_by_model(given)):
        assert found["n"].eq(2).all()
        assert found.set_index("method").loc["mine", "own"] == pytest.approx(-30.5)
    assert given.table().equals(results_of(2).table())
    assert given.tests()["n"].tolist() == [2]
