"""How far a folder is, from the folder alone."""

from dataclasses import replace

from folders import Counted

from tl_localize.execution import Store, status


def test_status_counts_what_is_done_failed_and_missing(inj, methods, run, tmp_path):
    Counted.fails_on.add("s2")
    run(inj, methods, shard=(1, 2))  # s0 and s2
    state = status(Store(tmp_path / "run", read_only=True))
    columns = ["asked", "done", "failed", "missing"]
    assert state.frame.loc["activations", columns].tolist() == [4, 2, 0, 2]
    assert state.frame.loc["counted", columns].tolist() == [4, 1, 1, 2]
    ((cell, reason),) = state.failures.items()
    assert (cell.method, cell.part) == ("counted", "s2") and "out of memory" in reason
    assert state.frame.loc["activations", "not_converged"] == 2 and not state.clean


def test_status_of_several_runs_counts_a_cell_once(deletion, layers, methods, run, tmp_path):
    run(replace(deletion, n_targets=2, ratios=(0.1,)), methods[:1])
    run(deletion, methods)
    run(layers, methods[:1])
    state = status(Store(tmp_path / "run"))
    # two ratios of three targets, and single layers, which Random has too
    assert state.frame["asked"].to_dict() == {"activations": 9, "random": 9, "counted": 6}
    assert (state.frame["done"] == state.frame["asked"]).all() and state.clean


def test_status_of_a_folder_without_a_run_is_empty(tmp_path):
    assert len(status(Store(tmp_path)).frame) == 0


def test_a_failure_of_what_is_done_is_none(deletion, methods, run, tmp_path):
    """As where data have grown: the cell has another key."""
    run(deletion, methods[:1])
    store = Store(tmp_path / "run")
    store.fail("x", store.settings.cells()[0], ValueError("no room"))
    state = status(store)
    assert not state.failures and state.clean and not state.frame["failed"].any()
