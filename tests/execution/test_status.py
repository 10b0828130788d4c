"""How far a folder is, from the folder alone."""

import pytest

from tl_localize.execution import Store, status


def test_status_counts_what_is_done_and_expects_the_time_that_is_left(run_inj, tmp_path):
    run_inj(stop_after=9)  # all of the first sentence
    store = Store(tmp_path / "run", read_only=True)
    state = status(store)
    columns = ["planned", "done", "failed", "missing"]
    assert state.frame.loc["activations", columns].tolist() == [4, 1, 0, 3]
    assert state.frame.loc["(injections)", columns].tolist() == [4, 1, 0, 3]
    assert state.frame.loc["(scores)", columns].tolist() == [16, 4, 0, 12]
    assert list(state.frame.index[-2:]) == ["(injections)", "(scores)"]
    assert state.reasons == {}
    run_inj()
    state = status(Store(tmp_path / "run"))
    assert (state.frame["done"] == state.frame["planned"]).all()
    assert state.frame.loc["activations", "not_converged"] == 4 and not state.clean


def test_status_of_several_plans_counts_a_task_once(run_del, tmp_path):
    run_del(n_targets=2, ratios=(0.1,))
    run_del()
    frame = status(Store(tmp_path / "run")).frame
    assert frame["planned"].to_dict() == {
        "baseline": 1,
        "activations": 6 + 3,  # in single layers, too
        "hard_concrete": 6,
        "random": 6,
        "(scores)": 3 + 2 + 3,
    }
    assert (frame["done"] == frame["planned"]).all()


def test_status_needs_a_plan(tmp_path):
    with pytest.raises(ValueError, match="folder must hold the plan of a run, got none"):
        status(Store(tmp_path))
