"""Runs that lose nothing: resumed, shared, failed, killed. The tables are those of an undisturbed
run, bit for bit.
"""

import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from folders import records, run_into, spoil, study_of
from pandas.testing import assert_frame_equal

from tl_localize import Activations, HardConcrete, IntegratedGradients, NeuronScores
from tl_localize.evals import DelResults, InjBenchmark, InjResults
from tl_localize.evals.ablation import AblationMeter
from tl_localize.evals.del_benchmark import single_layers
from tl_localize.execution import InProcess, Store, status
from tl_localize.execution.engine import Run, missing_groups
from tl_localize.execution.environment import fingerprint
from tl_localize.execution.store import unpack
from tl_localize.execution.tasks import closure

# ---- a folder gives what memory gives


@pytest.mark.parametrize("distractors", [0, 1])
def test_inj_in_a_folder_gives_what_it_gives_in_memory(
    finished, inj, methods, tmp_path, distractors
):
    finished("inj", distractors=distractors)
    alone, stored = (
        replace(inj, distractors=distractors).run(methods),
        InjResults.of(Store(tmp_path / "run")),
    )
    assert_frame_equal(stored.frame.drop(columns="seconds"), alone.frame.drop(columns="seconds"))


def test_del_in_a_folder_gives_what_it_gives_in_memory(finished, deletion, methods, tmp_path):
    finished("del")
    alone, stored = deletion.run(methods), DelResults.of(Store(tmp_path / "run"))
    assert_frame_equal(stored.before, alone.before)
    assert_frame_equal(stored.frame, alone.frame)
    for key, matrix in alone.confusion.items():
        assert_frame_equal(stored.confusion[key], matrix)
    study = study_of(deletion, 0.1)
    assert_frame_equal(single_layers(Store(tmp_path / "run")), study.run([Activations()]))


def test_run_in_memory_raises_the_error_of_a_method(inj, deletion):
    for benchmark in (inj, deletion):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            benchmark.run([Fails("s1")])


# ---- resume


@pytest.mark.parametrize("distractors", [0, 1])
def test_inj_in_pieces_and_shards_equals_inj_in_one(run_inj, finished, inj_numbers, distractors):
    n_tasks = finished("inj", "whole", distractors=distractors)
    assert n_tasks == (2 if distractors else 4) * (1 + 4 * 2)
    how = {"distractors": distractors}
    pieces = [run_inj("pieces", stop_after=5, **how) for _ in range(n_tasks // 5 + 1)]
    shards = [run_inj("shards", shard=(i, 3), **how) for i in (3, 1, 2)]
    assert sum(map(len, pieces)) == sum(map(len, shards)) == n_tasks
    assert inj_numbers("pieces") == inj_numbers("shards") == inj_numbers("whole")


def test_del_in_pieces_and_shards_equals_del_in_one(run_del, finished, del_numbers):
    n_tasks = finished("del", "whole")
    assert n_tasks == 1 + (3 + 1 + 3) + 3 * (2 * 3 + 1)  # Hard Concrete takes all targets at once
    assert sum(len(run_del("pieces", stop_after=7)) for _ in range(n_tasks // 7 + 1)) == n_tasks
    for i in (2, 1):
        run_del("shards", shard=(i, 2))
    assert del_numbers("pieces") == del_numbers("shards") == del_numbers("whole")


def test_rev_in_pieces_and_shards_equals_rev_in_one(run_rev, finished, rev_numbers):
    n_tasks = finished("rev", "whole")
    assert n_tasks == 2 * (1 + 5 * 2 + 2)  # per group: learned, scores and cells, two oracles
    assert sum(len(run_rev("pieces", stop_after=5)) for _ in range(n_tasks // 5 + 1)) == n_tasks
    assert sum(len(run_rev("shards", shard=(i, 2))) for i in (2, 1)) == n_tasks
    assert rev_numbers("pieces") == rev_numbers("shards") == rev_numbers("whole")


def test_run_ends_where_stop_says_so(run_inj, tmp_path):
    told = []
    assert len(run_inj(stop_after=4, progress=lambda fraction, _: told.append(fraction))) == 4
    assert len(records(tmp_path / "run")) == 4
    assert told[-1] < 1


@pytest.mark.parametrize("which", ["inj", "deletion", "rev"])
def test_resuming_with_nothing_to_do_reads_each_record_once(
    which, request, methods, tmp_path, monkeypatch
):
    benchmark = request.getfixturevalue(which)
    run_into(benchmark, methods, tmp_path)
    opened = []
    right = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or right(path))
    assert run_into(benchmark, methods, tmp_path) == []
    read = [name for name in opened if name.endswith(".safetensors")]
    assert sorted(read) == sorted(path.name for path in records(tmp_path))


# ---- growing, and contradictions


def test_inj_adds_sentences_methods_and_ratios_and_reuses_what_is_there(run_inj, inj, methods):
    run_inj(sequences=inj.sequences[:2], methods=methods[:1])
    assert Counter(outcome.task.kind for outcome in run_inj()) == {
        "injections": 2,
        "scores": 2 * 4 + 2,
        "inj": 2 * 4 + 2,
    }
    more = run_inj(methods=[*methods, IntegratedGradients(steps=2)])
    assert {outcome.task.label for outcome in more} == {"integrated_gradients"}
    assert len(more) == 4 * 2
    assert len(run_inj(ratio=0.1, learning_rate=0.02)) == 4 * (1 + 4 * 2)
    assert run_inj() == []


def test_del_with_a_new_method_ratio_and_target_costs_only_these(run_del, methods):
    run_del(methods=methods[1:], ratios=(0.1,))
    added = run_del(ratios=(0.1, 0.2))
    assert Counter(
        (outcome.task.kind, outcome.task.label, outcome.task.ratio) for outcome in added
    ) == {
        ("del", "activations", 0.1): 3,
        **{("del", label, 0.2): 3 for label in ("activations", "hard_concrete", "random")},
    }  # the single layers needed the scores of activations
    assert {
        outcome.task.index
        for outcome in run_del(n_targets=4)
        if outcome.task.label != "hard_concrete"
    } == {3}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"learning_rate": 0.01}, r"learning_rate: 0.05 in the folder, 0.01 now"),
        ({"seed": 3}, r"seed: 0 in the folder, 3 now"),
        (
            {"methods": [HardConcrete(steps=11)]},
            r"methods.hard_concrete: \{.*'steps': 3.* in the folder, .*'steps': 11.* now",
        ),
    ],
)
def test_run_refuses_settings_that_contradict_the_folder(run_inj, changes, difference):
    run_inj(stop_after=1)
    with pytest.raises(ValueError, match=difference):
        run_inj(**changes)


def test_run_refuses_another_model_other_sentences_and_another_benchmark(
    run_inj, run_del, inj, make_model
):
    run_inj(stop_after=1)
    with pytest.raises(ValueError, match="fingerprint: "):
        run_inj(model=make_model(7, model_name="gpt2-like"))
    with pytest.raises(ValueError, match="part 0: "):
        run_inj(sequences=inj.sequences[::-1])
    with pytest.raises(ValueError, match="benchmark: inj in the folder, del now"):
        run_del()


def test_run_refuses_a_method_without_a_lasting_name_where_results_are_kept(run_inj, run_del, inj):
    def mine(model, sequence):
        return Counted()(model, sequence)

    for run in (run_inj, run_del):
        with pytest.raises(
            ValueError, match="must be a frozen dataclass of plain settings where results are kept"
        ):
            run(methods=[mine])
    assert set(inj.run([mine]).frame["method"]) == {"mine", "random", "row_norm"}


def activation_swapped(model):
    model.blocks[1].mlp.act_fn = torch.nn.LeakyReLU()


def class_changed(model):
    mlp = model.blocks[1].mlp

    class Halved(type(mlp)):
        def forward(self, x):
            return super().forward(x) / 2

    mlp.__class__ = Halved


def forward_replaced(model):
    right = model.blocks[0].mlp.forward
    model.blocks[0].mlp.forward = lambda x: 0.99 * right(x)


def gradient_scaled(model):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            return 2 * gradient

    right = model.blocks[0].mlp.act_fn
    model.blocks[0].mlp.act_fn = lambda x: Scaled.apply(right(x))


def hooked(model):
    model.add_hook("blocks.1.hook_resid_pre", lambda act, hook: 2 * act)


def hooked_backward(model):
    def halve(module, given, output):
        return tuple(gradient / 2 for gradient in given)

    model.blocks[1].mlp.register_full_backward_hook(halve)


CHANGES = activation_swapped, class_changed, forward_replaced, gradient_scaled, hooked


@pytest.mark.parametrize("change", [*CHANGES, hooked_backward])
def test_folder_refuses_a_model_of_the_same_weights_that_computes_something_else(
    run_inj, gpt2_like, change
):
    run_inj(methods=[Activations()], stop_after=1)
    before = fingerprint(gpt2_like)
    change(gpt2_like)
    assert fingerprint(gpt2_like) == before
    with pytest.raises(ValueError, match=r"the same weights give another (logits|gradient) than"):
        run_inj(methods=[Activations()])


def test_folder_refuses_a_bridge_whose_activation_function_was_swapped(inj, tmp_path):
    from architectures import tiny_bridge

    model = tiny_bridge(0, {"model_name": "gpt2-like"})
    bridged = replace(inj, model=model, sequences=inj.sequences[:1])
    bridged.run([Activations()], Store(tmp_path))
    model.original_model.transformer.h[1].mlp.act = torch.nn.LeakyReLU()
    with pytest.raises(ValueError, match="the same weights give another logits than"):
        bridged.run([Activations()], Store(tmp_path))


def test_folder_takes_the_model_in_another_number_of_threads(run_inj):
    run_inj(methods=[Activations()])
    torch.set_num_threads(2)
    try:
        assert run_inj(methods=[Activations()]) == []
    finally:
        torch.set_num_threads(1)


def test_folder_refuses_another_precision_of_matrix_products(run_inj):
    run_inj(methods=[Activations()], stop_after=1)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match="matmul_precision: highest in the folder, high now"):
            run_inj(methods=[Activations()])
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("kind", [torch.nn.Dropout, torch.nn.AlphaDropout])
def test_active_dropout_is_refused_everywhere(run_inj, inj, gpt2_like, kind):
    gpt2_like.blocks[0].mlp.dropout = kind(0.1)
    for work in (
        run_inj,
        lambda: inj.run([Activations()]),
        lambda: Activations()(gpt2_like, inj.sequences[0]),
    ):
        gpt2_like.train()
        with pytest.raises(ValueError, match="must not be in training mode, got active dropout"):
            work()
        gpt2_like.eval()
    assert run_inj(methods=[Activations()], stop_after=1)


def test_another_default_dtype_is_refused(run_inj):
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ValueError, match=r"default dtype .* must be float32"):
            run_inj()
    finally:
        torch.set_default_dtype(torch.float32)


def test_inference_mode_changes_nothing(run_inj, inj_numbers):
    run_inj("plain", methods=[Activations()])
    with torch.inference_mode():
        run_inj(methods=[Activations()])
    assert inj_numbers() == inj_numbers("plain")


# ---- what a number depends on


@dataclass(frozen=True)
class Counted:
    """Scores that say which version of a method gave them."""

    version: ClassVar[int] = 1
    name: ClassVar[str] = "counted"

    def __call__(self, model, sequence):
        return NeuronScores(
            torch.arange(96.0).reshape(2, 48).roll(self.version, 1), self.name, sequence.id
        )


def test_method_of_another_version_is_computed_again(run_inj, run_del, monkeypatch):
    for run, name, n_tasks in ((run_inj, "inj", 4 * 2), (run_del, "del", 3 * (1 + 2))):
        run(name, methods=[Counted()])
        assert run(name, methods=[Counted()]) == []
        with monkeypatch.context() as patch:
            patch.setattr(Counted, "version", 2)
            again = run(name, methods=[Counted()])
            assert {outcome.task.label for outcome in again} == {"counted"}
            assert len(again) == n_tasks


def test_nothing_old_is_served_when_weights_change_in_the_same_process(gpt2_like, run_inj, run_del):
    """A permutation keeps every sum; a benchmark that was used before is used again."""
    run_inj("inj", methods=[Activations()])
    run_del("del", methods=[Activations()])
    weights = gpt2_like.blocks[1].mlp.W_out
    weights.data = weights.data[
        :, torch.randperm(weights.shape[1], generator=torch.Generator().manual_seed(0))
    ]
    for run, name in ((run_inj, "inj"), (run_del, "del")):
        with pytest.raises(ValueError, match="fingerprint: "):
            run(name)
    assert len(run_inj("other inj", methods=[Activations()])) == 4 * (1 + 3 * 2)


# ---- chunks


@dataclass(frozen=True, kw_only=True)
class InFours(HardConcrete):
    """Hard Concrete, four targets in a batch."""

    chunk: ClassVar[int] = 4


@pytest.fixture
def six_targets(deletion, make_sequences):
    return replace(deletion, sequences=make_sequences(*[(9, 3)] * 6), n_dev=0, n_targets=None)


def test_chunk_puts_targets_into_one_task(six_targets, tmp_path):
    plan = six_targets.plan([InFours(steps=3)])
    scores = {task.needs[1] for task in plan.tasks[1:] if task.label == "hard_concrete"}
    assert sorted((task.index, len(task.inputs["sequences"])) for task in scores) == [
        (0, 4),
        (4, 2),
    ]
    results = six_targets.run([InFours(steps=3)], Store(tmp_path))
    alone = six_targets.run([HardConcrete(steps=3)])
    columns = ["sequence_id", "method", "ratio", "n_neurons"]
    assert_frame_equal(results.frame[columns], alone.frame[columns])
    record = Store(tmp_path).read(next(task for task in scores if task.index == 0))
    for index, sequence in enumerate(six_targets.sequences[:4]):
        assert torch.allclose(
            record.value.of(index, sequence).values,
            HardConcrete(steps=3)(six_targets.model, sequence).values,
            atol=1e-4,
        )


def test_resumed_run_with_chunks_equals_an_undisturbed_one(six_targets, tmp_path):
    methods = [InFours(steps=3)]
    n_tasks = len(run_into(six_targets, methods, tmp_path / "whole"))
    assert n_tasks == 1 + (2 + 6) + 2 * 2 * 6
    shards = [(2, 2), (1, 2)] * 4
    pieces = [run_into(six_targets, methods, tmp_path / "pieces", 6, shard) for shard in shards]
    assert sum(map(len, pieces)) == n_tasks
    one, other = (DelResults.of(Store(tmp_path / name)).frame for name in ("whole", "pieces"))
    assert one.equals(other)


@pytest.mark.parametrize("chunk", [0, -1, 2.5])
def test_chunk_must_be_a_whole_number(deletion, monkeypatch, chunk):
    monkeypatch.setattr(InFours, "chunk", chunk)
    with pytest.raises(ValueError, match="chunk must be a whole number from 1 on, got"):
        deletion.plan([InFours()])


def test_del_that_grows_keeps_its_partial_chunk(six_targets, tmp_path, caplog):
    """From 3 to 5 to 6 targets in chunks of 4, and back; two shards that start anew agree."""
    methods = [InFours(steps=3)]
    few, more = (replace(six_targets, n_targets=n) for n in (3, 5))
    run_into(few, methods, tmp_path)
    caplog.clear()
    added = [outcome.task for outcome in run_into(more, methods, tmp_path)]
    assert "13 of 21 results are kept from before" in caplog.text
    assert {(task.kind, task.label, task.index) for task in added} == {
        ("scores", "hard_concrete", 3),
        *((kind, "random", i) for kind in ("scores", "del") for i in (3, 4)),
        *(("del", "hard_concrete", i) for i in (3, 4)),
    }
    assert run_into(few, methods, tmp_path) == []
    last = run_into(six_targets, methods, tmp_path)
    assert {one.task.index for one in last} == {5}
    assert not len(DelResults.of(Store(tmp_path)).missing)


# ---- progress


@pytest.mark.parametrize("which", ["inj", "deletion", "rev"])
def test_progress_goes_from_zero_to_one_and_never_falls(which, request, methods, tmp_path):
    for store in (None, Store(tmp_path), Store(tmp_path)):
        told = []
        request.getfixturevalue(which).run(
            methods, store, lambda fraction, what, told=told: told.append((fraction, what))
        )
        fractions = [fraction for fraction, _ in told]
        assert fractions == sorted(fractions)
        assert told[-1] == (1.0, "done")
    assert len(told) == 1  # there was nothing to do


# ---- failures


@dataclass(frozen=True)
class Fails:
    """A method that cannot do one sentence."""

    on: str
    name: str = "fails"

    def __call__(self, model, sequence):
        if sequence.id == self.on:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return NeuronScores(torch.arange(96.0).reshape(2, 48), self.name, sequence.id)


def failing_inject(index):
    right = InjBenchmark.inject

    def wrong(self, task, *rest):
        if task.index == index:
            raise ValueError("loss must be finite, got nan")
        return right(self, task, *rest)

    return wrong


def test_failure_is_recorded_and_the_rest_goes_on(run_inj, tmp_path):
    outcomes = run_inj(methods=[Fails("s1")])
    assert [(o.task.kind, o.task.name) for o in outcomes if o.reason] == [("scores", "s1")]
    store = Store(tmp_path / "run")
    state, results = status(store), InjResults.of(store)
    counts = state.frame.loc["fails", ["planned", "done", "failed", "missing"]]
    assert counts.tolist() == [4, 3, 1, 0] and not state.clean
    (failure,) = store.failures().values()
    assert "out of memory" in failure["reason"] and "Traceback" in failure["traceback"]
    missing = {"injection_ratio": 0.2, "group": "s1", "method": "fails"}
    assert results.missing.to_dict("records") == [missing | {"reason": failure["reason"]}]
    assert "1 measurements MISSING" in results.table().index[0][0]
    assert run_inj(methods=[Fails("s1")]) == []  # it is not tried again


def test_failure_that_is_mended_leaves_no_trace(
    run_inj, finished, inj_numbers, tmp_path, monkeypatch
):
    def wrong(*_):
        raise ValueError("loss must be finite, got nan")

    with monkeypatch.context() as patch:
        patch.setattr(Activations, "attribute_batch", wrong)
        assert sum(bool(outcome.reason) for outcome in run_inj()) == 4
    run_inj(retry_failed=True)
    assert Store(tmp_path / "run").failures() == {}
    finished("inj", "undisturbed")
    assert inj_numbers() == inj_numbers("undisturbed")


def test_failure_beside_a_finished_record_is_forgotten(run_inj, finished, inj, methods, tmp_path):
    """Another run failed on a task that this one had just finished."""
    finished("inj")
    for kind in ("scores", "inj"):
        plan = inj.plan(methods)
        task = next(task for task in closure(plan.tasks) if task.kind == kind)
        store = Store(tmp_path / "run")
        store.fail(task, ValueError("out of memory"))
        if kind == "scores":
            records(tmp_path / "run", "inj")[0].unlink()
            assert len(run_inj()) == 1  # the cell that needs it
        assert Store(tmp_path / "run").failures() == {}
        state = status(Store(tmp_path / "run"))
        assert state.reasons == {} and state.frame["failed"].sum() == 0


def test_failed_injection_holds_up_its_own_sentence_only(run_inj, tmp_path, monkeypatch):
    monkeypatch.setattr(InjBenchmark, "inject", failing_inject(2))
    told = []
    run_inj(progress=lambda fraction, what: told.append(fraction))
    assert told == sorted(told) and told[-1] == 1
    frame = status(Store(tmp_path / "run")).frame
    assert frame.loc["activations", ["done", "failed"]].tolist() == [3, 1]


def test_failed_baseline_is_tried_once(run_del, tmp_path, monkeypatch):
    calls = []

    def wrong(self, *_):
        calls.append(self)
        raise ValueError("loss on general_tokens must be finite, got one that is not")

    monkeypatch.setattr(AblationMeter, "_measured_baseline", wrong)
    outcomes = run_del()
    assert len(calls) == len(outcomes) == 1
    assert status(Store(tmp_path / "run")).frame.loc[
        "activations", ["done", "failed"]
    ].tolist() == [0, 6 + 3]  # in single layers, too


def test_run_ends_when_the_device_is_gone(run_inj, tmp_path, monkeypatch):
    """After a sticky CUDA error every other task would be recorded as failed."""

    def gone(*_):
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(InjBenchmark, "inject", gone)
    with pytest.raises(torch.AcceleratorError):
        run_inj()
    assert not Store(tmp_path / "run").failures()


@pytest.mark.parametrize("which", ["inj", "rev"])
def test_interrupted_run_goes_on_where_it_was(
    which,
    request,
    finished,
    gpt2_like,
    unchanged,
    leftovers,
    monkeypatch,
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    run, numbers = (request.getfixturevalue(name) for name in (f"run_{which}", f"{which}_numbers"))
    check = unchanged(gpt2_like)
    with monkeypatch.context() as patch:
        patch.setattr(HardConcrete, "map", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    check()
    assert leftovers() == []
    run()
    finished(which, "whole")
    assert numbers() == numbers("whole")


# ---- damage


@pytest.mark.parametrize("how", ["truncated", "flipped", "deleted"])
@pytest.mark.parametrize(
    ("which", "kind"),
    [("inj", "inj"), ("inj", "injections"), ("del", "baseline"), ("del", "del"), ("del", "scores")],
)
def test_damaged_or_deleted_record_is_set_aside_and_made_again(
    request, finished, tmp_path, how, which, kind, caplog
):
    """Also the baseline of a finished folder, without which there is no table."""
    run, numbers = (request.getfixturevalue(name) for name in (f"run_{which}", f"{which}_numbers"))
    methods = [Activations()]
    finished(which, methods=methods)
    before = numbers()
    spoiled = records(tmp_path / "run", kind)[0]
    if how == "deleted":
        spoiled.unlink()
    else:
        spoil(spoiled, how)
    if kind in ("scores", "injections"):  # deleted ones are made only when they are needed
        for path in records(tmp_path / "run", which):
            path.unlink()
    run(methods=methods)
    assert numbers() == before
    if how != "deleted":
        assert_set_aside(tmp_path / "run", kind, caplog)


@pytest.mark.parametrize("kind", ["scores", "injections"])
def test_damaged_record_that_tables_were_made_of_is_named_and_made_again(
    run_inj, finished, inj_numbers, tmp_path, kind, caplog
):
    """In a finished folder too, in which nothing needs it; and as an error, so that a quiet run
    names it.
    """
    finished("inj")
    before, spoiled = inj_numbers(), records(tmp_path / "run", kind)[0]
    whole = vars(unpack(spoiled.read_bytes())["value"])
    spoil(spoiled, "flipped")
    assert [f"{outcome.task.key}.safetensors" for outcome in run_inj()] == [spoiled.name]
    assert_set_aside(tmp_path / "run", kind, caplog)
    assert "ERROR" in {record.levelname for record in caplog.records}
    again = vars(unpack(spoiled.read_bytes())["value"])
    tensors = [name for name, value in again.items() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(again[name], whole[name]) for name in tensors)
    assert inj_numbers() == before


def assert_set_aside(folder, kind, caplog):
    (kept,) = (folder / "set_aside").iterdir()
    assert (
        f"records/{kind}/{kept.name.rsplit('.', 1)[0]} was set aside as set_aside/{kept.name}"
        in caplog.text
    )


def test_record_under_another_name_is_not_trusted(run_inj, finished, inj_numbers, tmp_path):
    finished("inj")
    before = inj_numbers()
    first, second, *_ = records(tmp_path / "run", "inj")
    first.write_bytes(second.read_bytes())
    assert len(run_inj()) == 1
    assert inj_numbers() == before


@pytest.mark.parametrize("how", ["truncated", "flipped", "foreign", "nested"])
def test_damaged_plan_is_set_aside_and_made_again(
    run_inj, finished, inj_numbers, tmp_path, how, caplog
):
    finished("inj")
    before = inj_numbers()
    (plan,) = (tmp_path / "run" / "plans").iterdir()
    spoil(plan, how)
    assert run_inj() == []
    assert inj_numbers() == before
    assert "plans/000001.json was set aside" in caplog.text


@pytest.mark.parametrize("how", ["truncated", "nested"])
def test_damaged_failure_is_set_aside_and_its_task_computed_again(
    run_inj, finished, tmp_path, how, caplog
):
    finished("inj", methods=[Fails("s1")])
    (failure,) = (tmp_path / "run" / "failures").iterdir()
    spoil(failure, how)
    assert [bool(outcome.reason) for outcome in run_inj(methods=[Fails("s1")])] == [True]
    assert f"failures/{failure.name} was set aside" in caplog.text


def test_foreign_files_are_kept(run_inj, finished, inj_numbers, tmp_path):
    finished("inj")
    before, folder = inj_numbers(), tmp_path / "run"
    (folder / "records" / "inj" / "notes.txt").write_text("mine")
    (folder / "failures" / "x.json").write_text("{}")
    (folder / "plans" / "y.json").write_text("")
    assert run_inj() == []
    assert inj_numbers() == before
    # nobody looks for it
    assert (folder / "records" / "inj" / "notes.txt").read_text() == "mine"
    assert len(list((folder / "set_aside").iterdir())) == 2


# ---- two at once, clocks, kills


def test_two_runs_in_one_folder_agree(inj, methods, finished, inj_numbers, leftovers, tmp_path):
    """Turn by turn; the second does not see what the first has done."""
    own = set()

    class Blind(Store):
        def has(self, task):
            return task.key in own

        def read(self, task):
            return super().read(task) if task.key in own else None

        def write(self, task, record):
            own.add(task.key)
            super().write(task, record)

    labelled, plan = inj.labelled(methods), inj.plan(methods)
    turns = []
    for kind in (Store, Blind):
        store = kind(tmp_path / "run")
        store.add_plan(plan, {})
        run = Run(inj, labelled, store, set(), {})
        turns.append(InProcess()(run, missing_groups(plan, store)))
    computed = 0
    while turns:
        turns = [turn for turn in turns if next(turn, None) is not None]
        computed += len(turns)
    assert 36 < computed <= 72
    finished("inj", "whole")
    assert inj_numbers() == inj_numbers("whole")
    assert leftovers() == []


@pytest.mark.parametrize("years", [-50, 50])
def test_clocks_that_go_backwards_change_nothing(
    run_inj, finished, inj, inj_numbers, leftovers, tmp_path, monkeypatch, years
):
    """Files of years ago and years ahead, and a clock that steps back while a run is under way."""
    n_tasks = finished("inj", "whole")
    then = time.time() + years * 365 * 24 * 3600
    done = len(run_inj(sequences=inj.sequences[:2], stop_after=7))
    for i, path in enumerate(sorted((tmp_path / "run").rglob("*"))):
        os.utime(path, (then + i, then - i))
    steps = iter(range(10**6))
    # each look at the clock is earlier than the last
    monkeypatch.setattr(time, "time", lambda: then - next(steps))
    assert done + len(run_inj()) == n_tasks
    assert run_inj() == []
    assert inj_numbers() == inj_numbers("whole")
    assert leftovers() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("which", ["inj", "del", "rev"])
def test_killed_run_loses_nothing(which, request, tmp_path, leftovers):
    from kill import kill_until, logged

    run, numbers = (request.getfixturevalue(name) for name in (f"run_{which}", f"{which}_numbers"))
    log = tmp_path / "log"

    def killed():
        torch.set_num_threads(1)
        logged(log)
        run()

    # CPU time: beside a busy machine the kill must come before the end, too
    began = time.process_time()
    run("whole")
    seen = kill_until(
        killed, tmp_path / "run", log, rounds=6, seed=0, mean=(time.process_time() - began) / 6
    )
    assert seen.rounds > 0
    assert seen.wasted == 0
    assert numbers() == numbers("whole")
    for path in (tmp_path / "run" / "tmp").iterdir():  # what was being written
        path.unlink()
    assert run() == []
    assert leftovers() == []
