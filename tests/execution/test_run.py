"""Runs that lose nothing: resumed, grown, shared, failed, interrupted, killed. The rows are those
of an undisturbed run.
"""

import errno
import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from folders import Counted, files_of, leftovers, spoil
from kill import forked, kill_until, log_writes

from tl_localize import METHODS, Activations, InjResults, Localizer, RowNorm
from tl_localize.evals.ablation import AblationMeter
from tl_localize.execution import Store, status
from tl_localize.execution.run import BarCounter
from tl_localize.injection import training
from tl_localize.model.environment import fingerprint
from tl_localize.model.forward import is_bridge


@dataclass(frozen=True, kw_only=True)
class OneByOne(Localizer):
    """A user's method of one sequence."""

    name = "own"

    def attribute(self, neurons, sequence):
        return torch.ones(neurons.size)


NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def injected(monkeypatch):
    """The seeds with which sentences were injected."""
    from tl_localize.evals.inj import benchmark

    seeds = []
    inject = benchmark.inject
    monkeypatch.setattr(
        benchmark,
        "inject",
        lambda *given, seed, **how: seeds.append(seed) or inject(*given, seed=seed, **how),
    )
    return seeds


# ---- a folder gives what memory gives, and what is there is not computed again


@pytest.mark.parametrize("which", ["inj", "joint", "deletion", "layers", "rev"])
def test_folder_gives_what_memory_gives_and_is_not_computed_again(
    which, request, methods, run, counted, written, undisturbed, assert_same
):
    benchmark = request.getfixturevalue(which)
    in_memory = undisturbed(which)
    counted.clear()
    assert_same(run(benchmark, methods), in_memory)
    assert counted and set(counted.values()) == {1}
    written.clear()
    assert_same(run(benchmark, methods), in_memory)
    assert not written and set(counted.values()) == {1}


def test_results_hold_what_another_run_added_in_the_meantime(inj, tmp_path):
    first, second = Store(tmp_path), Store(tmp_path)
    inj.run([Activations()], first, False)
    replace(inj, ratio=inj.ratio / 2).run([RowNorm()], second, False)
    for store in (first, second):
        frame = InjResults.of(store).frame
        found = set(zip(frame["injection_ratio"], frame["method"], strict=True))
        assert {(inj.ratio, "activations"), (inj.ratio / 2, "row_norm")} <= found


def test_inj_grows_by_sentences_methods_and_ratios(
    inj, methods, run, counted, injected, assert_same
):
    run(replace(inj, sequences=inj.sequences[:2]), methods[1:])
    grown = run(inj, methods)
    assert injected == [0, 1, 2, 3]
    assert counted == {"s0": 1, "s1": 1, "s2": 1, "s3": 1}
    assert_same(grown, inj.run(methods, progress=False), grown=True)
    other = replace(inj, ratio=0.1)
    both = run(other, methods)
    assert counted["s0"] == 3
    assert set(both.frame["injection_ratio"]) == {0.1, 0.2}
    assert_same(
        replace(both, frame=both.frame.query("injection_ratio == 0.1").reset_index(drop=True)),
        other.run(methods, progress=False),
        grown=True,
    )
    few = run(replace(inj, ratio=0.3), methods[:1])
    assert set(few.frame.query("injection_ratio == 0.3")["multiple"]) == {1, 2}


def test_del_grows_by_targets_methods_and_ratios(
    deletion, methods, run, counted, undisturbed, assert_same
):
    run(replace(deletion, n_targets=2, ratios=(0.1,)), methods[1:])
    grown = run(deletion, methods)
    assert counted == {"s1": 1, "s2": 1, "s3": 1}
    assert_same(grown, undisturbed("deletion"), grown=True)


def test_del_scores_no_target_whose_rows_are_there(
    deletion, methods, run, counted, undisturbed, assert_same, tmp_path
):
    run(replace(deletion, n_targets=2), methods)
    scores = list(tmp_path.rglob("steps/scores/*"))
    for path in scores:
        path.unlink()
    grown = run(deletion, methods)
    assert scores and counted == {"s1": 1, "s2": 1, "s3": 1}
    assert_same(grown, undisturbed("deletion"), grown=True)


@dataclass(frozen=True, kw_only=True)
class InBatches(Localizer):
    """A user's method of several sequences, which something ends in its second batch."""

    name = "in_batches"
    scored: ClassVar[list[list[str]]] = []
    ends: ClassVar[list[BaseException]] = []

    def attribute_batch(self, neurons, sequences, report):
        self.scored.append([sequence.id for sequence in sequences])
        if len(self.scored) == 2 and self.ends:
            raise self.ends.pop()
        return torch.ones(len(sequences), *neurons.size)


@pytest.fixture
def in_batches(monkeypatch):
    """The method, with two of the three targets in its first batch."""
    monkeypatch.setattr(InBatches, "scored", [])
    monkeypatch.setattr(InBatches, "ends", [])
    return InBatches(batch_tokens=24)


def test_the_batches_before_an_interruption_are_kept(deletion, run, in_batches, tmp_path):
    in_batches.ends.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(deletion, [in_batches])
    first, second = in_batches.scored
    assert (len(first), len(second)) == (2, 1)
    assert len(list(tmp_path.rglob("steps/scores/*"))) == len(first)
    run(deletion, [in_batches])
    assert in_batches.scored[2:] == [second]


def test_what_a_failing_batch_holds_is_scored_alone_and_nothing_else(deletion, run, in_batches):
    in_batches.ends.append(RuntimeError("another"))
    assert not len(run(deletion, [in_batches]).missing)
    assert in_batches.scored[2:] == [in_batches.scored[1]]


def test_del_and_its_single_layers_share_a_folder_and_scores(
    deletion, layers, methods, run, counted, undisturbed, assert_same
):
    run(deletion, methods)
    both = run(layers, methods)
    assert counted == {"s1": 1, "s2": 1, "s3": 1}
    assert_same(replace(both, single_layers=pd.DataFrame()), undisturbed("deletion"))
    single = undisturbed("layers").single_layers
    pd.testing.assert_frame_equal(
        both.single_layers.drop(columns="seconds"), single.drop(columns="seconds")
    )


def test_rev_grows_by_methods(rev, methods, run, counted, written, undisturbed, assert_same):
    run(rev, methods[:1])
    assert written["learn"] == 2
    grown = run(rev, methods)
    assert written["learn"] == 2 and set(counted.values()) == {1}
    assert_same(grown, undisturbed("rev"), grown=True)


def test_rev_grows_by_ratios(rev, methods, run, counted, written, assert_same):
    methods = methods[1:]
    both = replace(rev, ratios=(0.25, 0.5))
    run(rev, methods)
    n_cells = written["rev"]
    grown = run(both, methods)
    assert written["learn"] == 2 and set(counted.values()) == {1}
    n_texts = sum(len(group.sequences) for group in rev.groups())
    assert written["oracle"] == n_texts and written["rev"] == 2 * n_cells
    assert_same(grown, both.run(methods, progress=False), grown=True)


def test_shards_together_give_the_rows_of_one_run(
    benchmark, methods, run, written, counted, assert_same
):
    whole = run(benchmark, methods, "whole")
    n_written = dict(written)
    written.clear()
    first = run(benchmark, methods, shard=(3, 3))
    assert len(first.missing) > 0
    run(benchmark, methods, shard=(1, 3))
    last = run(benchmark, methods, shard=(2, 3))
    assert_same(last, whole)
    assert written == n_written


# ---- what all runs of a folder agree on


def test_folder_names_the_settings_that_contradict_it(inj, deletion, methods, run, make_model):
    run(inj, methods[1:])
    for changed, difference in (
        (replace(inj, learning_rate=0.01), "learning_rate: 0.05 in the folder, 0.01 now"),
        (replace(inj, seed=3), "seed: 0 in the folder, 3 now"),
        (replace(inj, sequences=inj.sequences[::-1]), "part 0: "),
        (replace(inj, model=make_model(7, model_name="gpt2-like")), "fingerprint: "),
        (replace(inj, model=inj.model.to(torch.float64)), "dtype: float32 .*, float64 now"),
    ):
        with pytest.raises(ValueError, match=difference):
            run(changed, methods[1:])
    inj.model.to(torch.float32)
    with pytest.raises(ValueError, match="benchmark: inj in the folder, del now"):
        run(deletion, methods[1:])
    assert len(run(inj, methods[1:]).missing) == 0


@dataclass(frozen=True)
class OtherwiseCounted(Counted):
    """Another method of the same label."""

    rate: float = 0.5


def test_folder_refuses_another_method_or_version_under_a_label(inj, run, monkeypatch):
    run(inj, [Counted()])
    with pytest.raises(ValueError, match=r"counted: .*'Counted'.* in the folder, .*'rate': 0.5"):
        run(inj, [OtherwiseCounted()])
    monkeypatch.setattr(Counted, "version", 2)
    with pytest.raises(ValueError, match=r"counted: .*'version': 1\} in the folder, .*: 2\} now"):
        run(inj, [Counted()])


@pytest.mark.parametrize("which", ["inj", "deletion"])
def test_method_that_is_no_dataclass_is_refused_where_results_are_kept(which, request, run):
    def mine(model, sequence):
        return Counted()(model, sequence)

    benchmark = request.getfixturevalue(which)
    with pytest.raises(ValueError, match="mine must be a frozen dataclass of plain settings"):
        run(benchmark, [mine])
    assert "mine" in set(benchmark.run([mine], progress=False).frame["method"])


def swap_activation(model):
    mlp = model.blocks[1].mlp
    if is_bridge(model):
        mlp.original_component.act = torch.nn.LeakyReLU()
    else:
        mlp.act_fn = torch.nn.LeakyReLU()


def change_class(model):
    mlp = model.blocks[1].mlp

    class Halved(type(mlp)):
        def forward(self, x):
            return super().forward(x) / 2

    mlp.__class__ = Halved


def replace_forward(model):
    mlp = model.blocks[0].mlp
    right = mlp.forward
    vars(mlp)["forward"] = lambda x: 0.99 * right(x)  # an attribute set otherwise is the wrapped's


def hook(model):
    model.add_hook("blocks.1.hook_resid_pre", lambda act, hook: 2 * act)


@pytest.mark.parametrize("either", ["gpt2_like", "bridge gpt2"], indirect=True)
@pytest.mark.parametrize("change", [swap_activation, change_class, replace_forward, hook])
def test_folder_refuses_a_model_of_the_same_weights_that_computes_something_else(
    inj, either, run, change
):
    small = replace(inj, model=either, sequences=inj.sequences[:1])
    run(small, [Activations()])
    before = fingerprint(either)
    change(either)
    assert fingerprint(either) == before
    with pytest.raises(ValueError, match=r"probe: \["):
        run(small, [Activations()])


def test_folder_takes_the_model_in_another_number_of_threads(inj, run, written):
    run(inj, [Activations()])
    written.clear()
    torch.set_num_threads(2)
    try:
        results = run(inj, [Activations()])
    finally:
        torch.set_num_threads(1)
    assert not written
    assert [made["threads"] for made in results.settings["environments"]] == [1, 2]


def test_folder_refuses_another_precision_of_matrix_products(inj, run):
    run(inj, [Activations()])
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match="matmul_precision: highest in the folder, high now"):
            run(inj, [Activations()])
    finally:
        torch.set_float32_matmul_precision("highest")


def test_active_dropout_is_refused(inj, run):
    inj.model.blocks[0].mlp.dropout = torch.nn.Dropout(0.1)
    inj.model.train()
    with pytest.raises(ValueError, match="must not be in training mode, got active dropout"):
        run(inj, [Activations()])
    inj.model.eval()
    assert len(run(inj, [Activations()]).frame)


def test_inference_mode_changes_nothing(inj, run, undisturbed, assert_same):
    with torch.inference_mode():
        found = run(inj, [Activations()])
    assert_same(found, undisturbed("inj", [Activations()]))


# ---- progress


@pytest.mark.parametrize("benchmark", ["joint", "layers", "rev"], indirect=True)
def test_progress_goes_from_zero_to_one_and_never_falls(benchmark, methods, run):
    for shard in ((1, 1), (2, 2)):
        told = []
        options = {"name": str(shard), "shard": shard}
        run(benchmark, methods, progress=lambda *given, told=told: told.append(given), **options)
        fractions = [fraction for fraction, _ in told]
        assert fractions == sorted(fractions)
        assert fractions[0] == 0 and fractions[-1] == 1
        assert any("counted" in what for _, what in told)


def test_bar_of_one_cell_moves_within_it_and_says_the_time_that_is_left(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    counter = BarCounter(1)
    for fraction in (0.5, 0.2):  # it does not go back
        counter.report(fraction, "erase: step 3")
    shown = counter.bar.format_dict
    assert shown["n"] == 0.5 and shown["total"] == 1
    counter.finish_cell(False)
    assert counter.bar.n == 1
    counter.bar.close()
    bar = capsys.readouterr().err
    assert " 50%" in bar and "? left" not in bar.split("100%")[-1] and "erase: step 3: 50%" in bar


def test_bar_is_shown_on_a_terminal_and_not_in_a_pipe(inj, methods, run, capsys, monkeypatch):
    run(inj, methods, "pipe", progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(inj, methods, "terminal", progress=True)
    assert "| 16/16 " in capsys.readouterr().err


# ---- failures


@pytest.mark.parametrize("which", ["inj", "deletion", "rev"])
def test_failure_is_told_the_others_go_on_and_it_is_tried_again(
    which, request, methods, run, tmp_path, caplog, counted, undisturbed, assert_same
):
    benchmark = request.getfixturevalue(which)
    group = benchmark.groups()[-1]
    bad = benchmark.targets[1].id if which == "deletion" else group.sequences[0].id
    Counted.fails_on.add(bad)
    part = group.name if which == "rev" else bad
    results = run(benchmark, methods)
    assert f"FAILED counted on {part}: OutOfMemoryError: CUDA out of memory" in caplog.text
    assert set(results.missing["method"]) == {"counted"}
    assert set(results.missing["part"]) == {part}
    assert set(results.missing["reason"]) == {"OutOfMemoryError: CUDA out of memory"}
    state = status(Store(tmp_path / "run"))
    assert state.frame["failed"].to_dict() == {
        label: len(results.missing) if label == "counted" else 0 for label in state.frame.index
    }
    assert not state.frame["missing"].any() and not state.clean
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        benchmark.run(methods, progress=False)
    Counted.fails_on.clear()
    counted.clear()
    mended = run(benchmark, methods)
    assert counted.keys() <= {sequence.id for sequence in getattr(group, "sequences", [])} | {bad}
    assert counted[bad] == 1
    assert leftovers(tmp_path / "run") == []
    assert_same(mended, undisturbed(which))


def test_traceback_of_a_failure_is_kept(inj, run, tmp_path):
    Counted.fails_on.add("s1")
    run(inj, [Counted()])
    (failure,) = (tmp_path / "run" / "failures").iterdir()
    assert "in __call__" in failure.read_text()


def test_failed_injection_is_tried_once_a_run_and_costs_its_own_sentence(
    inj, methods, run, monkeypatch
):
    from tl_localize.evals.inj import benchmark

    inject = benchmark.inject
    tried = []

    def fails(*given, seed, **how):
        tried.append(seed)
        if seed == 2:
            raise ValueError("loss must be finite, got nan")
        return inject(*given, seed=seed, **how)

    monkeypatch.setattr(benchmark, "inject", fails)
    results = run(inj, methods)
    assert tried == [0, 1, 2, 3]
    assert set(results.missing["part"]) == {"s2"}
    assert len(results.missing) == 4
    run(inj, methods)
    assert tried == [0, 1, 2, 3, 2]


def test_failed_measurement_of_the_model_as_it_is_is_tried_once_a_run(
    deletion, methods, run, monkeypatch
):
    tried = []

    def fails(self, *_):
        tried.append(self)
        raise ValueError("loss on general_tokens must be finite, got one that is not")

    monkeypatch.setattr(AblationMeter, "_measure_baseline", fails)
    results = run(deletion, methods)
    assert len(tried) == 1
    assert not len(results.frame) and len(results.missing) == 3 * 3 * 2


def test_run_ends_when_the_device_is_gone(inj, run, tmp_path, monkeypatch):
    """After a sticky CUDA error everything else would be recorded as failed."""

    def gone(*_):
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(Counted, "__call__", gone)
    with pytest.raises(torch.AcceleratorError):
        run(inj, [Counted()])
    assert not Store(tmp_path / "run").failures()


@pytest.mark.parametrize("name", ["zero_out", "integrated_gradients", "own"])
def test_a_text_is_kept_as_soon_as_it_is_scored(deletion, run, tmp_path, monkeypatch, name):
    """By a method that scores one text after the other."""
    kind = OneByOne if name == "own" else METHODS[name]
    score, asked = ("attribute" if name == "own" else "_score"), []
    right = getattr(kind, score)

    def interrupted(self, neurons, sequence, *report):
        asked.append(sequence.id)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return right(self, neurons, sequence, *report)

    monkeypatch.setattr(kind, score, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(deletion, [kind()])
    assert len(list((tmp_path / "run/steps/scores").glob("[!.]*"))) == 2
    run(deletion, [kind()])
    assert len(asked) == 4 and asked[2] == asked[3]


@pytest.mark.parametrize("which", ["inj", "deletion", "rev"])
def test_interrupted_run_goes_on_where_it_was(
    which,
    request,
    methods,
    run,
    unchanged,
    tmp_path,
    counted,
    monkeypatch,
    undisturbed,
    assert_same,
):
    benchmark = request.getfixturevalue(which)
    check = unchanged(benchmark.model)
    right = Counted.__call__

    def interrupted(self, model, sequence):
        if len(counted) == 2:
            raise KeyboardInterrupt
        return right(self, model, sequence)

    with monkeypatch.context() as patch:
        patch.setattr(Counted, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(benchmark, methods)
    check()
    assert leftovers(tmp_path / "run") == []
    assert_same(run(benchmark, methods), undisturbed(which))


def test_interrupted_injection_goes_on_where_it_was(
    joint, methods, run, tmp_path, monkeypatch, undisturbed, assert_same
):
    whole = undisturbed("joint")
    right, passes = training.JointTraining.means, []

    def counted_means(self, on, on_device, train=False):
        passes.append(train)
        if not broken_off and sum(passes) == 3:
            broken_off.append(True)
            raise KeyboardInterrupt
        return right(self, on, on_device, train)

    broken_off = []
    monkeypatch.setattr(training, "KEPT_EVERY", 1)
    monkeypatch.setattr(training.JointTraining, "means", counted_means)
    with pytest.raises(KeyboardInterrupt):
        run(joint, methods)
    (unfinished,) = files_of(tmp_path / "run", "training")
    passes.clear()
    assert_same(run(joint, methods), whole)
    n_steps = whole.frame.groupby("group")["steps"].first().sum()
    assert sum(passes) == n_steps - 2 and not unfinished.exists()


def test_training_is_kept_until_its_end_is_written(
    joint, methods, run, tmp_path, monkeypatch, undisturbed, assert_same
):
    whole = undisturbed("joint")
    write = Store._write

    def full(self, key, inputs, value, cell=None):
        if inputs["step"] == "inject":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, key, inputs, value, cell)

    monkeypatch.setattr(training, "KEPT_EVERY", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            run(joint, methods)
    (unfinished,) = files_of(tmp_path / "run", "training")
    assert_same(run(joint, methods), whole)
    assert not unfinished.exists()


@pytest.mark.parametrize("which", ["inj", "deletion", "rev"])
def test_numbers_of_numpy_are_the_same_settings(request, methods, run, which):
    benchmark = request.getfixturevalue(which)
    first = run(replace(benchmark, seed=np.int64(3)), methods)
    again = run(replace(benchmark, seed=3), methods)  # not refused, and of the same types
    pd.testing.assert_frame_equal(first.frame, again.frame)


# ---- damage, a full disk


@pytest.mark.parametrize(
    ("which", "kind"),
    [
        ("inj", "inj"),
        ("inj", "inject"),
        ("deletion", "del"),
        ("deletion", "before"),
        ("deletion", "scores"),
        ("rev", "learn"),
    ],
)
def test_damaged_file_is_put_aside_told_once_and_computed_again(
    request, methods, run, tmp_path, which, kind, caplog, undisturbed, assert_same
):
    benchmark = request.getfixturevalue(which)
    if which != "rev":
        methods = methods[1:]
    run(benchmark, methods)
    spoil(files_of(tmp_path / "run", kind)[0], "flipped")
    if kind in ("inject", "scores", "learn"):  # they are read when rows are missing
        for path in files_of(tmp_path / "run", "del" if which == "deletion" else which):
            path.unlink()
    found = run(benchmark, methods)
    (put_aside,) = (tmp_path / "run" / "damaged").iterdir()
    (record,) = [record for record in caplog.records if "was moved to" in record.getMessage()]
    assert record.levelname == "ERROR"
    assert f"damaged/{put_aside.name}" in record.getMessage()
    assert_same(found, undisturbed(which, methods))


def test_file_under_the_name_of_another_step_is_not_trusted(
    inj, methods, run, tmp_path, caplog, undisturbed
):
    run(inj, methods)
    first, second, *_ = files_of(tmp_path / "run", "inj")
    first.write_bytes(second.read_bytes())
    found = run(inj, methods)
    assert "it belongs to another step" in caplog.text
    columns = ["sequence_id", "method", "ratio", "recall"]
    wanted = undisturbed("inj").frame[columns]
    pd.testing.assert_frame_equal(found.frame[columns], wanted)


@pytest.mark.parametrize(
    ("which", "n_writes"), [("inj", 0), ("deletion", 1), ("deletion", 4), ("inj", 9)]
)
def test_full_disk_ends_the_run_and_loses_nothing(
    which, request, methods, run, tmp_path, monkeypatch, n_writes, undisturbed, assert_same
):
    benchmark = request.getfixturevalue(which)
    fsync = os.fsync
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > n_writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"have room.*what a results folder holds is kept"):
            run(benchmark, methods)
    assert len(calls) == n_writes + 1
    assert leftovers(tmp_path / "run") == []
    assert len(files_of(tmp_path / "run")) == max(0, n_writes - 1)  # and the settings
    assert_same(run(benchmark, methods), undisturbed(which))


@dataclass(frozen=True)
class ReadsAFile:
    """A method that misses a file of its own."""

    name: str = "reads_a_file"

    def __call__(self, model, sequence):
        raise FileNotFoundError(errno.ENOENT, "No such file", "weights.pt")


def test_a_file_that_a_method_misses_is_its_failure_alone(inj, run):
    found = run(inj, [Activations(), ReadsAFile()])
    assert set(found.missing["method"]) == {"reads_a_file"}
    assert {"activations", "random"} < set(found.frame["method"])


def test_a_progress_that_fails_ends_the_run_and_is_no_failure_of_a_method(inj, methods, run):
    def broken(fraction, what):
        raise KeyError("bar")

    with pytest.raises(RuntimeError, match=r"progress must .* got KeyError: 'bar'. Mend it"):
        run(inj, methods, progress=broken)
    assert not len(run(inj, methods).missing)


# ---- two at once, kills


@NEEDS_FORK
@pytest.mark.parametrize("which", ["inj", "deletion", "rev"])
def test_two_runs_at_once_into_one_folder_end_with_all_rows(
    which, request, methods, run, tmp_path, undisturbed, assert_same
):
    benchmark = request.getfixturevalue(which)

    def work(order):
        torch.set_num_threads(1)
        assert not len(run(benchmark, methods[::order]).missing)

    children = [forked(lambda order=order: work(order)) for order in (1, -1)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    found = benchmark.results(Store(tmp_path / "run"))
    assert_same(found, undisturbed(which), grown=True)
    assert leftovers(tmp_path / "run") == []


@NEEDS_FORK
@pytest.mark.parametrize("which", ["inj", "deletion", "rev"])
def test_killed_run_loses_nothing(which, request, methods, run, tmp_path, assert_same):
    benchmark = request.getfixturevalue(which)
    log = tmp_path / "log"

    def killed():
        torch.set_num_threads(1)
        log_writes(log)
        run(benchmark, methods)

    began = time.monotonic()
    whole = run(benchmark, methods, "whole")
    mean = (time.monotonic() - began) / 6
    seen = kill_until(killed, tmp_path / "run", log, rounds=6, seed=0, mean=mean)
    while not seen.rounds:  # on a busy machine it may end before the first kill
        mean /= 2
        shutil.rmtree(tmp_path / "run")
        log.unlink()
        seen = kill_until(killed, tmp_path / "run", log, rounds=6, seed=0, mean=mean)
    assert set(seen.written.values()) == {1}
    assert_same(run(benchmark, methods), whole)
    for path in (tmp_path / "run" / "tmp").iterdir():  # what was being written
        path.unlink()
    assert leftovers(tmp_path / "run") == []
    names = [
        [path.relative_to(tmp_path / name) for path in files_of(tmp_path / name)]
        for name in ("run", "whole")
    ]
    assert names[0] == names[1]


def test_without_a_terminal_the_log_tells_how_far_a_run_is(joint, run, monkeypatch, caplog):
    monkeypatch.setattr("tl_localize.execution.run.EVERY", 0.0)
    with caplog.at_level("INFO", logger="tl_localize.progress"):
        run(joint, [], progress=True)
    lines = [record.message for record in caplog.records if record.name == "tl_localize.progress"]
    training = "0 of 4 done; inject group-00: step 1, largest loss"
    assert any(training in line for line in lines), lines
    assert any(line.startswith("3 of 4 done; ") for line in lines)


# ---- what is no run


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"store": "results"}, TypeError, r"store must be a Store, got str\. Pass store=Store"),
        ({"shard": 3}, ValueError, r"shard must be two numbers, got 3\. Write \(1, 3\)"),
        ({"shard": "1/2"}, ValueError, "shard must be two numbers, got '1/2'"),
    ],
)
def test_what_is_no_store_or_shard_is_named(inj, given, error, said):
    with pytest.raises(error, match=said):
        inj.run([Activations()], **given)


@pytest.mark.parametrize("parts", [1, 5, 10, 16, 17, 40])
def test_targets_are_cut_into_as_many_groups_as_are_asked_for(deletion, make_sequences, parts):
    benchmark = replace(deletion, sequences=make_sequences(*[(8, 3)] * 18), n_targets=17)
    groups = benchmark.groups(parts)
    assert [number for group in groups for number in group] == list(range(17))
    assert len(groups) == max(2, min(17, parts)) and max(map(len, groups)) <= 16
