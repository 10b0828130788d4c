"""What the paper's runs take on a GPU."""

import pytest

from tl_localize.evals.planning import SHAPES, plan


@pytest.mark.parametrize("model", SHAPES)
def test_plan_says_what_fits_and_takes_what_is_there(model):
    small, large = plan(model, gpu=24), plan(model, gpu=80)
    batch = "texts in a batch"
    assert (small[batch] <= large[batch]).all() and (large[batch] > 0).all()
    assert (large["GB"] < 80).all() and (small["GB"][small[batch] > 0] < 24).all()
    assert (large["hours"] == small["hours"]).all()
    steps = large["passes of a text"].loc["inj"]
    assert steps["slimming"] == steps["hard_concrete"] == 2 * 4000


def test_plan_counts_weights_and_zero_where_nothing_fits():
    table = plan("EleutherAI/pythia-6.9b-deduped", gpu=24, dtype="float32")
    assert (table["texts in a batch"] == 0).all()
    assert table["GB"].between(27, 28).all()  # 6.9e9 numbers of four bytes


@pytest.mark.parametrize("settings", [{"model": "pythia-6.8b"}, {"gpu": 0}, {"dtype": "int8"}])
def test_plan_rejects(settings):
    with pytest.raises(ValueError, match="must be"):
        plan(**{"model": "gpt2", **settings})
