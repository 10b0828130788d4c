"""Runs that lose nothing: resumed, shared, failed, killed. The tables are those of an undisturbed
run, bit for bit.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from folders import records, run_into, spoil
from pandas.testing import assert_frame_equal

from tl_localize import Activations, HardConcrete, IntegratedGradients, NeuronScores
from tl_localize.evals import DelResults, InjBenchmark, InjResults
from tl_localize.evals.ablation import AblationMeter
from tl_localize.evals.presets import single_layer_run
from tl_localize.evals.single_layer import single_layers
from tl_localize.execution import InProcess, Store, status
from tl_localize.execution.engine import Outcome, Run, Timer, missing_groups, parse_shard, shares
from tl_localize.execution.environment import fingerprint
from tl_localize.execution.store import unpack
from tl_localize.execution.tasks import Plan, Record, Task, closure

# ---- a folder gives what memory gives


@pytest.mark.parametrize("distractors", [0, 1])
def test_inj_in_a_folder_gives_what_it_gives_in_memory(
    finished: Any, inj: Any, methods: Any, tmp_path: Path, distractors: int
) -> None:
    finished("inj", distractors=distractors)
    alone, stored = (
        replace(inj, distractors=distractors).run(methods),
        InjResults.of(Store(tmp_path / "run")),
    )
    assert_frame_equal(stored.frame.drop(columns="seconds"), alone.frame.drop(columns="seconds"))
    assert_frame_equal(stored.truth, alone.truth)
    assert_frame_equal(stored.assignment, alone.assignment)


def test_del_in_a_folder_gives_what_it_gives_in_memory(
    finished: Any, deletion: Any, methods: Any, tmp_path: Path
) -> None:
    finished("del")
    alone, stored = deletion.run(methods), DelResults.of(Store(tmp_path / "run"))
    assert_frame_equal(stored.before, alone.before)
    assert_frame_equal(stored.frame, alone.frame)
    for key, matrix in alone.confusion.items():
        assert_frame_equal(stored.confusion[key], matrix)
        assert_frame_equal(stored.confusion_levenshtein[key], alone.confusion_levenshtein[key])
    study, methods = single_layer_run(replace(deletion, ratios=(0.1,)), Activations())
    assert_frame_equal(single_layers(Store(tmp_path / "run")), study.run(methods))


def test_run_in_memory_raises_the_error_of_a_method(inj: Any, deletion: Any) -> None:
    for benchmark in (inj, deletion):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            benchmark.run([Fails("s1")])


# ---- resume


@pytest.mark.parametrize("distractors", [0, 1])
def test_inj_in_pieces_and_shards_equals_inj_in_one(
    run_inj: Any, finished: Any, inj_numbers: Any, distractors: int
) -> None:
    n_tasks = finished("inj", "whole", distractors=distractors)
    assert n_tasks == (2 * (1 + 4 * 2 + 1) if distractors else 4 * (1 + 4 * 2))
    how = {"distractors": distractors}
    pieces = [run_inj("pieces", stop_after=5, **how) for _ in range(n_tasks // 5 + 1)]
    shards = [run_inj("shards", shard=(i, 3), **how) for i in (3, 1, 2)]
    assert sum(map(len, pieces)) == sum(map(len, shards)) == n_tasks
    assert inj_numbers("pieces") == inj_numbers("shards") == inj_numbers("whole")


def test_del_in_pieces_and_shards_equals_del_in_one(
    run_del: Any, finished: Any, del_numbers: Any
) -> None:
    n_tasks = finished("del", "whole")
    assert n_tasks == 1 + (3 + 1 + 3) + 3 * (2 * 3 + 1)  # Hard Concrete takes all targets at once
    assert sum(len(run_del("pieces", stop_after=7)) for _ in range(n_tasks // 7 + 1)) == n_tasks
    for i in (2, 1):
        run_del("shards", shard=(i, 2))
    assert del_numbers("pieces") == del_numbers("shards") == del_numbers("whole")


def test_run_ends_where_stop_says_so(run_inj: Any, tmp_path: Path) -> None:
    told: list[float] = []
    assert len(run_inj(stop_after=4, progress=lambda fraction, _: told.append(fraction))) == 4
    assert len(records(tmp_path / "run")) == 4
    assert told[-1] < 1


@pytest.mark.parametrize("which", ["inj", "deletion"])
def test_resuming_with_nothing_to_do_reads_each_record_once(
    which: str, request: Any, methods: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = request.getfixturevalue(which)
    run_into(benchmark, methods, tmp_path)
    opened: list[str] = []

    def counted(path: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(Path(path).name)
        return open(path, *arguments, **options)

    monkeypatch.setattr("tl_localize.execution.store.open", counted, raising=False)
    assert run_into(benchmark, methods, tmp_path) == []
    read = [name for name in opened if name.endswith(".safetensors")]
    assert sorted(read) == sorted(path.name for path in records(tmp_path))


@pytest.mark.parametrize("which", ["inj", "deletion"])
def test_shard_begins_by_reading_records_of_its_own_groups(
    which: str, request: Any, methods: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = request.getfixturevalue(which)
    benchmark.run(methods, Store(tmp_path))
    plan = benchmark.plan(methods)
    read: list[str] = []
    right = Store.read
    monkeypatch.setattr(
        Store, "read", lambda store, task: read.append(task.key) or right(store, task)
    )
    assert missing_groups(plan, Store(tmp_path), (2, 3)) == []
    own = [task.key for task in closure(task for group in shares(plan, 3)[1] for task in group)]
    assert sorted(read) == sorted(own)
    # the tables are of all that is there
    monkeypatch.setattr(type(benchmark), "results", lambda *_: None)
    read.clear()
    benchmark.run(methods, Store(tmp_path), executor=InProcess((2, 3)))
    assert set(read) == set(own)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_shards_have_about_the_same_weight(count: int) -> None:
    """Of 25 targets with one method that costs 100 times as much as another."""
    tasks = [
        Task("scores", {"i": i, "label": label}, label=label, weight=weight)
        for i in range(25)
        for label, weight in (("cheap", 1.0), ("dear", 100.0))
    ]
    plan = Plan("del", {}, [], {}, tasks)
    found = [[task for group in groups for task in group] for groups in shares(plan, count)]
    assert Counter(task.key for part in found for task in part) == Counter(t.key for t in tasks)
    loads = [sum(task.weight for task in part) for part in found]
    assert max(loads) - min(loads) <= 101


# ---- growing, and contradictions


def test_inj_adds_sentences_methods_and_ratios_and_reuses_what_is_there(
    run_inj: Any, inj: Any, methods: Any
) -> None:
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


def test_inj_at_other_multiples_reuses_the_scores(
    run_inj: Any, finished: Any, tmp_path: Path
) -> None:
    finished("inj")
    for path in (tmp_path / "run" / "plans").iterdir():
        path.unlink()
    assert {outcome.task.kind for outcome in run_inj(multiples=(1, 3))} == {"inj"}


def test_del_with_a_new_method_ratio_and_target_costs_only_these(
    run_del: Any, methods: Any
) -> None:
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
        ({"multiples": (1,)}, "multiples"),
        (
            {"methods": [HardConcrete(steps=11)]},
            r"methods.hard_concrete: \{.*'steps': 3.* in the folder, .*'steps': 11.* now",
        ),
    ],
)
def test_run_refuses_settings_that_contradict_the_folder(
    run_inj: Any, changes: Any, difference: str
) -> None:
    run_inj(stop_after=1)
    with pytest.raises(ValueError, match=difference):
        run_inj(**changes)


def test_run_refuses_another_model_other_sentences_and_another_benchmark(
    run_inj: Any, run_del: Any, inj: Any, make_model: Any
) -> None:
    run_inj(stop_after=1)
    with pytest.raises(ValueError, match="fingerprint: "):
        run_inj(model=make_model(7, model_name="gpt2-like"))
    with pytest.raises(ValueError, match="part 0: "):
        run_inj(sequences=inj.sequences[::-1])
    with pytest.raises(ValueError, match="benchmark: inj in the folder, del now"):
        run_del()


def test_run_refuses_a_method_or_an_ablation_without_a_lasting_name_where_results_are_kept(
    run_inj: Any, run_del: Any, inj: Any
) -> None:
    def mine(model: Any, sequence: Any) -> NeuronScores:
        return Counted()(model, sequence)

    for run, changes in (
        (run_inj, {"methods": [mine]}),
        (run_del, {"methods": [mine]}),
        (run_del, {"ablation": lambda *_: None}),
    ):
        with pytest.raises(
            ValueError, match="must be a frozen dataclass of plain settings where results are kept"
        ):
            run(**changes)
    assert set(inj.run([mine]).frame["method"]) == {"mine", "random", "row_norm"}


def test_run_refuses_a_model_with_hooks(gpt2_like: Any, run_inj: Any, tmp_path: Path) -> None:
    with (
        gpt2_like.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", lambda act, hook: 2 * act)]),
        pytest.raises(
            ValueError,
            match=(
                r"model must have no hooks where results are kept, got some at "
                r"'blocks\.1\.mlp\.hook_post'"
            ),
        ),
    ):
        run_inj()
    assert not records(tmp_path / "run")


def activation_swapped(model: Any) -> None:
    model.blocks[1].mlp.act_fn = torch.nn.LeakyReLU()


def class_changed(model: Any) -> None:
    mlp = model.blocks[1].mlp

    class Halved(type(mlp)):
        def forward(self, x: Any) -> Any:
            return super().forward(x) / 2

    mlp.__class__ = Halved


def forward_replaced(model: Any) -> None:
    right = model.blocks[0].mlp.forward
    model.blocks[0].mlp.forward = lambda x: 0.99 * right(x)


def gradient_scaled(model: Any) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            return 2 * gradient

    right = model.blocks[0].mlp.act_fn
    model.blocks[0].mlp.act_fn = lambda x: Scaled.apply(right(x))


@pytest.mark.parametrize(
    "change", [activation_swapped, class_changed, forward_replaced, gradient_scaled]
)
def test_folder_refuses_a_model_of_the_same_weights_that_computes_something_else(
    run_inj: Any, gpt2_like: Any, change: Any
) -> None:
    run_inj(methods=[Activations()], stop_after=1)
    before = fingerprint(gpt2_like)
    change(gpt2_like)
    assert fingerprint(gpt2_like) == before
    with pytest.raises(ValueError, match=r"the same weights give another (logits|gradient) than"):
        run_inj(methods=[Activations()])


def test_folder_refuses_a_bridge_whose_activation_function_was_swapped(
    make_sequences: Any, tmp_path: Path
) -> None:
    from architectures import tiny_bridge

    model = tiny_bridge(0, {"model_name": "gpt2-like"})
    inj = InjBenchmark(model, make_sequences((8, 3)), ratio=0.2, max_steps=2)
    inj.run([Activations()], Store(tmp_path))
    model.original_model.transformer.h[1].mlp.act = torch.nn.LeakyReLU()
    with pytest.raises(ValueError, match="the same weights give another logits than"):
        inj.run([Activations()], Store(tmp_path))


def test_folder_takes_the_model_in_another_number_of_threads(run_inj: Any) -> None:
    run_inj(methods=[Activations()])
    torch.set_num_threads(2)
    try:
        assert run_inj(methods=[Activations()]) == []
    finally:
        torch.set_num_threads(1)


def test_folder_refuses_another_precision_of_matrix_products(run_inj: Any) -> None:
    run_inj(methods=[Activations()], stop_after=1)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match="matmul_precision: highest in the folder, high now"):
            run_inj(methods=[Activations()])
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("place", ["hook point", "module"])
def test_run_refuses_a_model_with_backward_hooks(run_inj: Any, gpt2_like: Any, place: str) -> None:
    if place == "module":
        gpt2_like.blocks[1].mlp.register_full_backward_hook(lambda *_: None)
    else:
        gpt2_like.add_hook("blocks.1.hook_resid_pre", lambda *_, **__: None, dir="bwd")
    with pytest.raises(ValueError, match="model must have no hooks where results are kept"):
        run_inj()


def test_active_dropout_is_refused_everywhere(run_inj: Any, inj: Any, gpt2_like: Any) -> None:
    gpt2_like.blocks[0].mlp.dropout = torch.nn.Dropout(0.1)
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


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/2/3", "²/3", "-1/2"])
def test_parse_shard_rejects(text: str) -> None:
    with pytest.raises(ValueError, match="shard must read i/n"):
        parse_shard(text)


# ---- what a number depends on


@dataclass(frozen=True)
class Counted:
    """Scores that say which version of a method gave them."""

    version: ClassVar[int] = 1
    name: ClassVar[str] = "counted"

    def __call__(self, model: Any, sequence: Any) -> NeuronScores:
        return NeuronScores(
            torch.arange(96.0).reshape(2, 48).roll(self.version, 1), self.name, sequence.id
        )


def test_method_of_another_version_is_computed_again(
    run_inj: Any, run_del: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run, name, n_tasks in ((run_inj, "inj", 4 * 2), (run_del, "del", 3 * (1 + 2))):
        run(name, methods=[Counted()])
        assert run(name, methods=[Counted()]) == []
        with monkeypatch.context() as patch:
            patch.setattr(Counted, "version", 2)
            again = run(name, methods=[Counted()])
            assert {outcome.task.label for outcome in again} == {"counted"}
            assert len(again) == n_tasks


def test_nothing_old_is_served_when_weights_change_in_the_same_process(
    gpt2_like: Any, run_inj: Any, run_del: Any
) -> None:
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
def six_targets(deletion: Any, make_sequences: Any) -> Any:
    return replace(deletion, sequences=make_sequences(*[(9, 3)] * 6), n_dev=0, n_targets=None)


def test_chunk_puts_targets_into_one_task(six_targets: Any, tmp_path: Path) -> None:
    plan = six_targets.plan([InFours(steps=3)])
    scores = {task.needs[1] for task in plan.tasks[1:] if task.label == "hard_concrete"}
    assert sorted((task.index, len(task.inputs["sequences"]), task.name) for task in scores) == [
        (0, 4, "s0 and 3 others"),
        (4, 2, "s4 and 1 others"),
    ]
    results = six_targets.run([InFours(steps=3)], Store(tmp_path))
    batched = next(task for task in scores if task.index == 0)
    record = Store(tmp_path).read(batched)
    assert record and record.about["batch_tokens"] > 0 and len(record.value.scores) == 4
    alone = six_targets.run([HardConcrete(steps=3)])
    columns = ["sequence_id", "method", "ratio", "n_neurons"]
    assert_frame_equal(results.frame[columns], alone.frame[columns])
    for index, sequence in enumerate(six_targets.sequences[:4]):
        assert torch.allclose(
            record.value.of(index, sequence).values,
            HardConcrete(steps=3)(six_targets.model, sequence).values,
            atol=1e-4,
        )


def test_resumed_run_with_chunks_equals_an_undisturbed_one(
    six_targets: Any, tmp_path: Path
) -> None:
    methods = [InFours(steps=3)]
    n_tasks = len(run_into(six_targets, methods, tmp_path / "whole"))
    assert n_tasks == 1 + (2 + 6) + 2 * 2 * 6
    shards = [(2, 2), (1, 2)] * 4
    pieces = [run_into(six_targets, methods, tmp_path / "pieces", 6, shard) for shard in shards]
    assert sum(map(len, pieces)) == n_tasks
    for task in closure(six_targets.plan(methods).tasks):
        if task.kind == "scores":
            one, other = (Store(tmp_path / name).read(task) for name in ("whole", "pieces"))
            assert one and other
            for index, scores in enumerate(one.value.scores):
                assert torch.equal(scores.values, other.value.scores[index].values)
    one, other = (DelResults.of(Store(tmp_path / name)).frame for name in ("whole", "pieces"))
    assert one.equals(other)


@pytest.mark.parametrize("chunk", [0, -1, 2.5])
def test_chunk_must_be_a_whole_number(
    deletion: Any, monkeypatch: pytest.MonkeyPatch, chunk: Any
) -> None:
    monkeypatch.setattr(InFours, "chunk", chunk)
    with pytest.raises(ValueError, match="chunk must be a whole number from 1 on, got"):
        deletion.plan([InFours()])


def test_del_that_grows_keeps_its_partial_chunk(
    six_targets: Any, tmp_path: Path, caplog: Any
) -> None:
    """From 3 to 5 to 6 targets in chunks of 4, and back; two shards that start anew agree."""
    methods = [InFours(steps=3)]
    few, more = (replace(six_targets, n_targets=n) for n in (3, 5))
    run_into(few, methods, tmp_path)
    caplog.clear()
    added = run_into(more, methods, tmp_path)
    assert "13 of 21 results are kept from before" in caplog.text
    new = {(one.task.kind, one.task.label, one.task.index) for one in added}
    assert new == {
        ("scores", "hard_concrete", 3),
        *((kind, "random", i) for kind in ("scores", "del") for i in (3, 4)),
        *(("del", "hard_concrete", i) for i in (3, 4)),
    }
    cuts = {
        one.task.index: len(one.task.inputs["sequences"])
        for one in added
        if one.task.kind == "scores" and one.task.label == "hard_concrete"
    }
    assert cuts == {3: 2}
    assert run_into(few, methods, tmp_path) == []
    last = run_into(six_targets, methods, tmp_path)
    assert {one.task.index for one in last} == {5}
    assert not len(DelResults.of(Store(tmp_path)).missing)
    frame, whole = DelResults.of(Store(tmp_path)).frame, six_targets.run(methods).frame
    columns = ["sequence_id", "method", "ratio", "n_neurons"]
    assert sorted(map(tuple, frame[columns].to_numpy())) == sorted(
        map(tuple, whole[columns].to_numpy())
    )


# ---- progress


@pytest.mark.parametrize("which", ["inj", "deletion"])
def test_progress_goes_from_zero_to_one_and_never_falls(
    which: str, request: Any, methods: Any, tmp_path: Path
) -> None:
    for store in (None, Store(tmp_path), Store(tmp_path)):
        told: list[tuple[float, str]] = []
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

    def __call__(self, model: Any, sequence: Any) -> NeuronScores:
        if sequence.id == self.on:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return NeuronScores(torch.arange(96.0).reshape(2, 48), self.name, sequence.id)


def failing_inject(index: int) -> Any:
    right = InjBenchmark.inject

    def wrong(self: Any, group: Any, *rest: Any) -> Any:
        if group.seed == index:
            raise ValueError("loss must be finite, got nan")
        return right(self, group, *rest)

    return wrong


def test_failure_is_recorded_and_the_rest_goes_on(run_inj: Any, tmp_path: Path) -> None:
    outcomes = run_inj(methods=[Fails("s1")])
    assert [(o.task.kind, o.task.label, o.task.name) for o in outcomes if o.reason] == [
        ("scores", "fails", "s1")
    ]
    state = status(Store(tmp_path / "run"))
    assert state.frame.loc["fails", ["planned", "done", "failed", "missing"]].tolist() == [
        4,
        3,
        1,
        0,
    ]
    assert not state.clean
    (reason,) = state.reasons.values()
    assert "out of memory" in reason
    (failure,) = Store(tmp_path / "run").failures().values()
    assert "Traceback" in failure["traceback"]
    results = InjResults.of(Store(tmp_path / "run"))
    assert results.missing.to_dict("records") == [
        {"injection_ratio": 0.2, "group": "s1", "method": "fails", "reason": reason}
    ]
    table = results.table()
    assert table.loc[(table.index[0][0], "fails"), "missing"] == "1"
    assert "1 measurements MISSING" in table.index[0][0]
    assert run_inj(methods=[Fails("s1")]) == []  # it is not tried again


def test_failure_that_is_mended_leaves_no_trace(
    run_inj: Any, finished: Any, inj_numbers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> Any:
        raise ValueError("loss must be finite, got nan")

    with monkeypatch.context() as patch:
        patch.setattr(Activations, "attribute_batch", wrong)
        assert sum(bool(outcome.reason) for outcome in run_inj()) == 4
    run_inj(retry_failed=True)
    assert Store(tmp_path / "run").failures() == {}
    finished("inj", "undisturbed")
    assert inj_numbers() == inj_numbers("undisturbed")


def test_failure_beside_a_finished_record_is_forgotten(
    run_inj: Any, finished: Any, inj: Any, methods: Any, tmp_path: Path
) -> None:
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


def test_failed_injection_holds_up_its_own_sentence_only(
    run_inj: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InjBenchmark, "inject", failing_inject(2))
    told: list[float] = []
    run_inj(progress=lambda fraction, what: told.append(fraction))
    assert told == sorted(told) and told[-1] == 1
    frame = status(Store(tmp_path / "run")).frame
    assert frame.loc["activations", ["done", "failed"]].tolist() == [3, 1]


def test_failed_baseline_is_tried_once(
    run_del: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def wrong(self: Any, *_: Any) -> Any:
        calls.append(self)
        raise ValueError("loss on general_tokens must be finite, got one that is not")

    monkeypatch.setattr(AblationMeter, "_measured_baseline", wrong)
    outcomes = run_del()
    assert len(calls) == len(outcomes) == 1
    assert status(Store(tmp_path / "run")).frame.loc[
        "activations", ["done", "failed"]
    ].tolist() == [0, 6]


def test_run_ends_when_the_device_is_gone(
    run_inj: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sticky CUDA error every other task would be recorded as failed."""

    def gone(*_: Any) -> Any:
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(InjBenchmark, "inject", gone)
    with pytest.raises(torch.AcceleratorError):
        run_inj()
    assert not Store(tmp_path / "run").failures()


def test_interrupted_run_goes_on_where_it_was(
    run_inj: Any,
    finished: Any,
    inj_numbers: Any,
    gpt2_like: Any,
    unchanged: Any,
    leftovers: Any,
    monkeypatch: Any,
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    check = unchanged(gpt2_like)
    with monkeypatch.context() as patch:
        patch.setattr(HardConcrete, "map", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_inj()
    check()
    assert leftovers() == []
    run_inj()
    finished("inj", "whole")
    assert inj_numbers() == inj_numbers("whole")


# ---- damage


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "foreign", "nested"])
@pytest.mark.parametrize("kind", ["inj", "scores", "injections"])
def test_damaged_record_of_inj_is_set_aside_and_made_again(
    run_inj: Any, finished: Any, inj_numbers: Any, tmp_path: Path, how: str, kind: str, caplog: Any
) -> None:
    methods = [Activations()]
    finished("inj", methods=methods)
    before = inj_numbers()
    damage(tmp_path / "run", kind, how, "inj")
    run_inj(methods=methods)
    assert inj_numbers() == before
    assert_set_aside(tmp_path / "run", kind, caplog)


@pytest.mark.parametrize("how", ["truncated", "flipped", "deleted"])
@pytest.mark.parametrize("kind", ["baseline", "del", "scores"])
def test_damaged_or_deleted_record_of_del_is_made_again(
    run_del: Any, finished: Any, del_numbers: Any, tmp_path: Path, how: str, kind: str, caplog: Any
) -> None:
    """Also the baseline of a finished folder, without which there is no table."""
    methods = [Activations()]
    finished("del", methods=methods)
    before = del_numbers()
    damage(tmp_path / "run", kind, how, "del")
    run_del(methods=methods)
    assert del_numbers() == before
    if how != "deleted":
        assert_set_aside(tmp_path / "run", kind, caplog)


@pytest.mark.parametrize("how", ["truncated", "flipped"])
@pytest.mark.parametrize("kind", ["scores", "injections"])
def test_damaged_record_that_tables_were_made_of_is_named_and_made_again(
    run_inj: Any, finished: Any, inj_numbers: Any, tmp_path: Path, how: str, kind: str, caplog: Any
) -> None:
    """In a finished folder too, in which nothing needs it; and as an error, so that a quiet run
    names it.
    """
    finished("inj")
    before, spoiled = inj_numbers(), records(tmp_path / "run", kind)[0]
    whole = unpack(spoiled.read_bytes())[1]
    spoil(spoiled, how)
    assert [f"{outcome.task.key}.safetensors" for outcome in run_inj()] == [spoiled.name]
    assert_set_aside(tmp_path / "run", kind, caplog)
    assert [
        record.levelname for record in caplog.records if "set aside" in record.getMessage()
    ] == ["ERROR"]
    assert all(
        torch.equal(tensor, whole[name]) for name, tensor in unpack(spoiled.read_bytes())[1].items()
    )
    assert inj_numbers() == before
    assert run_inj() == []


def damage(folder: Path, kind: str, how: str, results: str) -> None:
    spoiled = records(folder, kind)[0]
    if how == "deleted":
        spoiled.unlink()
    else:
        spoil(spoiled, how)
    if kind == "scores" or kind == "injections":  # deleted ones are made only when they are needed
        for path in records(folder, results):
            path.unlink()


def assert_set_aside(folder: Path, kind: str, caplog: Any) -> None:
    (kept,) = (folder / "set_aside").iterdir()
    assert (
        f"records/{kind}/{kept.name.rsplit('.', 1)[0]} was set aside as set_aside/{kept.name}"
        in caplog.text
    )


def test_record_under_another_name_is_not_trusted(
    run_inj: Any, finished: Any, inj_numbers: Any, tmp_path: Path
) -> None:
    finished("inj")
    before = inj_numbers()
    first, second, *_ = records(tmp_path / "run", "inj")
    first.write_bytes(second.read_bytes())
    assert len(run_inj()) == 1
    assert inj_numbers() == before


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "foreign", "nested"])
def test_damaged_plan_is_set_aside_and_made_again(
    run_inj: Any, finished: Any, inj_numbers: Any, tmp_path: Path, how: str, caplog: Any
) -> None:
    finished("inj")
    before = inj_numbers()
    (plan,) = (tmp_path / "run" / "plans").iterdir()
    spoil(plan, how)
    assert run_inj() == []
    assert inj_numbers() == before
    assert "plans/0001.json was set aside" in caplog.text


@pytest.mark.parametrize("how", ["truncated", "empty", "foreign", "nested"])
def test_damaged_failure_is_set_aside_and_its_task_computed_again(
    run_inj: Any, finished: Any, tmp_path: Path, how: str, caplog: Any
) -> None:
    finished("inj", methods=[Fails("s1")])
    (failure,) = (tmp_path / "run" / "failures").iterdir()
    spoil(failure, how)
    assert [bool(outcome.reason) for outcome in run_inj(methods=[Fails("s1")])] == [True]
    assert f"failures/{failure.name} was set aside" in caplog.text


def test_foreign_files_are_kept(
    run_inj: Any, finished: Any, inj_numbers: Any, tmp_path: Path
) -> None:
    finished("inj")
    before = inj_numbers()
    (tmp_path / "run" / "records" / "inj" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "failures" / "x.json").write_text("{}")
    (tmp_path / "run" / "plans" / "y.json").write_text("")
    (tmp_path / "run" / "plans" / "folder").mkdir()
    assert run_inj() == []
    assert inj_numbers() == before
    # nobody looks for it
    assert (tmp_path / "run" / "records" / "inj" / "notes.txt").read_text() == "mine"
    assert len(list((tmp_path / "run" / "set_aside").iterdir())) == 3


# ---- two at once, clocks, kills


def test_two_runs_in_one_folder_agree(
    inj: Any, methods: Any, finished: Any, inj_numbers: Any, leftovers: Any, tmp_path: Path
) -> None:
    """Turn by turn; the second does not see what the first has done."""
    own: set[str] = set()

    class Blind(Store):
        def has(self, task: Task) -> bool:
            return task.key in own

        def read(self, task: Task) -> Record | None:
            return super().read(task) if task.key in own else None

        def write(self, task: Task, record: Record) -> None:
            own.add(task.key)
            super().write(task, record)

    labelled, plan = inj.labelled(methods), inj.plan(methods)
    turns = []
    for kind in (Store, Blind):
        store = kind(tmp_path / "run")
        store.add_plan(plan, {})
        run = Run(inj, labelled, store, set(), {}, Timer(None, []))
        turns.append(InProcess()(run, missing_groups(plan, store)))
    computed = 0
    while turns:
        turns = [turn for turn in turns if next(turn, None) is not None]
        computed += len(turns)
    assert 36 < computed <= 72
    finished("inj", "whole")
    assert inj_numbers() == inj_numbers("whole")
    assert leftovers() == []


@pytest.mark.parametrize("moved", [-50, 50])
def test_clocks_that_go_backwards_change_nothing(
    run_inj: Any,
    finished: Any,
    inj: Any,
    inj_numbers: Any,
    leftovers: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moved: int,
) -> None:
    """Files of years ago and years ahead, and a clock that steps back while a run is under way."""
    n_tasks = finished("inj", "whole")
    then = time.time() + moved * 365 * 24 * 3600

    def shift() -> None:
        for i, path in enumerate(sorted((tmp_path / "run").rglob("*"))):
            os.utime(path, (then + i, then - i))

    done = len(run_inj(sequences=inj.sequences[:2], stop_after=7))
    shift()
    steps = iter(range(10**6))
    # each look at the clock is earlier than the last
    monkeypatch.setattr(time, "time", lambda: then - next(steps))
    assert done + len(run_inj()) == n_tasks
    assert [len(one.plan.parts) for one in Store(tmp_path / "run").plans()] == [2, 4]
    shift()
    assert run_inj() == []
    assert inj_numbers() == inj_numbers("whole")
    assert leftovers() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("which", ["inj", "del"])
def test_killed_run_loses_nothing(which: str, request: Any, tmp_path: Path, leftovers: Any) -> None:
    from kill import kill_until, logged

    run, numbers = (request.getfixturevalue(name) for name in (f"run_{which}", f"{which}_numbers"))
    log = tmp_path / "log"

    def killed() -> None:
        torch.set_num_threads(1)
        logged(log)
        run()

    began = time.monotonic()
    run("whole")
    seen = kill_until(
        killed, tmp_path / "run", log, rounds=6, seed=0, mean=(time.monotonic() - began) / 6
    )
    assert seen.rounds > 0
    assert seen.wasted == 0
    assert numbers() == numbers("whole")
    # what was being written is removed after an hour
    for path in (tmp_path / "run" / "tmp").iterdir():
        os.utime(path, (0, 0))
    assert run() == []
    assert leftovers() == []


# ---- the time left


def test_timer_knows_what_takes_long_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """One method costs 1 s a sequence and the other 100: the fraction done is right as soon as one
    of the first is done.
    """
    quick = [Task("scores", {"a": i}, label="a", weight=2.0) for i in range(3)]
    slow = [Task("scores", {"b": i}, label="b", weight=200.0) for i in range(3)]
    told: list[float] = []
    timer = Timer(lambda fraction, what: told.append(fraction), [*quick, *slow])
    timer.begin(quick[0])
    timer.done(Outcome(quick[0], 1.0))
    timer.begin(quick[1])
    assert told[-1] == pytest.approx(1 / 303)
    for task in quick[1:]:
        timer.done(Outcome(task, 1.0))
    now = [0.0]
    monkeypatch.setattr("tl_localize.execution.engine.time.perf_counter", lambda: now[0])
    timer.begin(slow[0])
    now[0] = 20.0
    timer.report(0.1)  # it takes 200 s and not 100
    assert told[-1] == pytest.approx(23 / 603)
