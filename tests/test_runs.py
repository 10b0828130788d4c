"""Runs that lose nothing: resume, damage, failures, shards, kills. The tables must be those of an undisturbed run, bit for bit."""

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch


@pytest.fixture
def sentences():
    from tl_localize import MemorizedSequence

    generator = torch.Generator().manual_seed(0)
    return [MemorizedSequence(torch.randint(0, 50, (8 + i,), generator=generator), 3, id=f"s{i}") for i in range(4)]


@pytest.fixture
def benchmark(gpt2_like, sentences):
    from tl_localize.evals.inj_benchmark import InjBenchmark

    return InjBenchmark(model=gpt2_like, sequences=sentences, ratio=0.2, learning_rate=0.05, stop_loss=0.5, max_steps=20)


@pytest.fixture
def methods():
    from tl_localize import Activations, HardConcrete

    return [Activations(), HardConcrete(steps=10)]


@pytest.fixture
def start(benchmark, methods, tmp_path):
    """A run into a folder, with everything as in the other runs unless it is given."""
    from tl_localize.runs import InjRun

    from tl_localize.execution.store import Store

    def make(name="run", methods=methods, retry_failed=False, **changes):
        return InjRun(Store(tmp_path / name), replace(benchmark, **changes), methods, retry_failed=retry_failed)

    return make


def work(run, stop_after=None, shard=(1, 1)):
    """Events of a run, at most so many."""
    from tl_localize.execution.distributed import in_process, jobs

    events = []
    for event in in_process([run], jobs([run], shard)):
        events.append(event)
        if len(events) == stop_after:
            break
    return events


def numbers(run):
    """All that was measured, but for the time that it took."""
    from tl_localize.runs import inj_results

    results = inj_results(run.store)
    frame = results.frame.drop(columns="seconds")
    return frame.to_csv(), results.table().to_csv(), results.truth.to_csv(), results.assignment.to_csv()


def leftovers(folder):
    return [path for name in ("tmp", "set_aside", "failures") for path in (folder / name).iterdir()]


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_run_gives_what_the_benchmark_gives_without_a_store(start, benchmark, methods):
    from pandas.testing import assert_frame_equal
    from tl_localize.runs import inj_results

    run = start()
    work(run)
    assert_frame_equal(inj_results(run.store).frame.drop(columns="seconds"), benchmark.run(methods).frame.drop(columns="seconds"))


def test_run_in_pieces_equals_a_run_in_one(start):
    whole = start("whole")
    n_events = len(work(whole))
    assert n_events == 4 * (1 + 4)
    pieces = [len(work(start("pieces"), stop_after=3)) for _ in range(n_events // 3 + 1)]
    assert sum(pieces) == n_events
    assert numbers(start("pieces")) == numbers(whole)


def test_run_with_distractors_in_pieces_equals_a_run_in_one(start, benchmark, methods):
    from pandas.testing import assert_frame_equal
    from tl_localize.runs import inj_results

    whole = start("whole", distractors=1)
    n_events = len(work(whole))
    assert sum(len(work(start("pieces", distractors=1), stop_after=4)) for _ in range(n_events // 4 + 1)) == n_events
    assert numbers(start("pieces", distractors=1)) == numbers(whole)
    alone, stored = replace(benchmark, distractors=1).run(methods), inj_results(whole.store)
    assert_frame_equal(stored.truth, alone.truth)
    assert_frame_equal(stored.assignment, alone.assignment)
    assert_frame_equal(stored.frame.drop(columns="seconds"), alone.frame.drop(columns="seconds"), check_like=True)


def test_run_adds_sentences_and_methods_and_reuses_the_injections(start, sentences, methods):
    from tl_localize import IntegratedGradients

    work(start(sequences=sentences[:2], methods=methods[:1]))
    added = work(start())
    assert sum(event.label == "inject" for event in added) == 2
    more = work(start(methods=[*methods, IntegratedGradients(steps=2)]))
    assert {event.label for event in more} == {"integrated_gradients"}
    assert len(more) == 4


def test_run_measured_at_other_multiples_reuses_the_scores(start, tmp_path, monkeypatch):
    from tl_localize import HardConcrete

    work(start())
    for path in (tmp_path / "run" / "plans").iterdir():
        path.unlink()
    monkeypatch.setattr(HardConcrete, "_attribute_many", lambda *a: pytest.fail("scores were computed again"))
    assert all(event.reason == "" for event in work(start(multiples=(1, 3))))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"learning_rate": 0.01}, "injection.learning_rate: 0.05 in the folder, 0.01 now"),
        ({"seed": 3}, "seeds: 0 \\+ index of the sentence in the folder, 3 \\+"),
        ({"multiples": (1,)}, "multiples"),
    ],
)
def test_run_refuses_settings_that_contradict_the_folder(start, changes, difference):
    start()
    with pytest.raises(ValueError, match=difference):
        start(**changes)


def test_run_refuses_another_setting_of_a_method(start):
    from tl_localize import HardConcrete

    start()
    with pytest.raises(ValueError, match=r"methods.hard_concrete: HardConcrete\(.*steps=10.* in the folder, .*steps=11.* now"):
        start(methods=[HardConcrete(steps=11)])


def test_run_refuses_another_model_and_other_sentences(start, make_model, sentences):
    start()
    with pytest.raises(ValueError, match="fingerprint: "):
        start(model=make_model(7, model_name="gpt2-like"))
    with pytest.raises(ValueError, match="sentence or group 0: "):
        start(sequences=sentences[::-1])


def test_stored_refuses_a_function_whose_address_is_its_only_name(gpt2_like, tmp_path):
    from tl_localize.runs import stored

    from tl_localize.execution.store import Store

    with pytest.raises(ValueError, match="must have a repr that names all their settings"):
        stored([lambda model, sequence: None], Store(tmp_path), gpt2_like)


def test_nothing_is_kept_of_a_model_with_hooks(gpt2_like, sequence, start, tmp_path):
    from tl_localize.runs import stored

    from tl_localize import Activations
    from tl_localize.execution.store import Store

    (method,) = stored([Activations()], Store(tmp_path / "scores"), gpt2_like)
    with gpt2_like.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", lambda act, hook: 2 * act)]):
        with pytest.raises(ValueError, match=r"model must have no hooks where results are kept, got some at 'blocks\.1\.mlp\.hook_post'"):
            method(gpt2_like, sequence)
        with pytest.raises(ValueError, match="model must have no hooks where results are kept"):
            start(model=gpt2_like)
    assert not list((tmp_path / "scores").rglob("*.safetensors"))
    method(gpt2_like, sequence)
    assert len(list((tmp_path / "scores").rglob("*.safetensors"))) == 1


def test_run_ends_when_the_device_is_gone(start, monkeypatch):
    """After a sticky CUDA error every other unit would be recorded as failed."""
    from tl_localize.execution.distributed import in_process, jobs
    from tl_localize.runs import InjRun

    run = start()
    monkeypatch.setattr(InjRun, "make_base", lambda *_: (_ for _ in ()).throw(torch.AcceleratorError("an illegal memory access")))
    with pytest.raises(torch.AcceleratorError):
        list(in_process([run], jobs([run])))
    assert not run.store.failures()


def test_run_refuses_a_method_without_a_lasting_name(start):
    with pytest.raises(ValueError, match="must have a repr that names all their settings"):
        start(methods=[lambda model, sequence: None])


def test_shards_together_are_the_whole(start):
    whole = start("whole")
    work(whole)
    counts = [len(work(start("shards"), shard=(i, 3))) for i in (3, 1, 2)]
    assert counts == [5, 10, 5]
    assert numbers(start("shards")) == numbers(whole)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/2/3"])
def test_parse_shard_rejects(text):
    from tl_localize.execution.distributed import parse_shard

    with pytest.raises(ValueError, match="shard must read i/n"):
        parse_shard(text)


def test_ray_engine_says_what_to_install(start, monkeypatch):
    from tl_localize.execution.distributed import by_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    run = start()
    with pytest.raises(ImportError, match=r"pip install 'tl_localize\[ray\]'"):
        next(by_ray([run], [], lambda: run.benchmark.model))


def test_del_at_another_ratio_reuses_the_scores(gpt2_like, make_sequences, tmp_path, monkeypatch):
    from tl_localize.runs import stored

    from tl_localize import HardConcrete, RandomBaseline
    from tl_localize.evals.del_benchmark import DelBenchmark
    from tl_localize.execution.store import Store

    def measure(ratio, methods):
        general = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(1))
        sequences = make_sequences((9, 3), (9, 3), (9, 3))
        return DelBenchmark(gpt2_like, sequences, general, ratios=(ratio,), n_dev=0, decode=str).run(methods).frame

    methods = [HardConcrete(steps=10, first_layer=1), RandomBaseline()]
    measure(0.1, stored(methods, Store(tmp_path), gpt2_like))
    one_by_one = [lambda model, sequence, m=method: m(model, sequence) for method in methods]
    for call, method in zip(one_by_one, methods, strict=True):
        call.name = method.name
    plain = measure(0.2, one_by_one)
    monkeypatch.setattr(HardConcrete, "_attribute_many", lambda *a: pytest.fail("scores were computed again"))
    again = measure(0.2, stored(methods, Store(tmp_path), gpt2_like))
    assert again.equals(plain)


def test_unit_that_kills_its_workers_is_given_up_and_the_rest_of_the_job_stays(start_del):
    from tl_localize.execution.distributed import in_hand, jobs, without

    runs = start_del()
    job, *_ = jobs(runs)
    before = runs[0].works[0].base
    assert in_hand(runs, job) == before
    work_all(runs, stop_after=2)
    lost = in_hand(runs, job)
    assert lost == runs[0].works[0].measures["hard_concrete"]
    rest, event = without(runs, job, lost, RuntimeError("the worker died"))
    assert (event.label, event.name, event.reason, event.measured) == ("hard_concrete", "s1", "RuntimeError: the worker died", True)
    assert [len(step.labels) for step in rest] == [2, 3, 1]
    assert "hard_concrete" not in rest[0].labels
    assert lost.key in runs[0].store.failures()
    rest, event = without(runs, job, before, RuntimeError("again"))
    assert (rest, event.label, event.measured) == ([], "before", False)


def test_worker_gets_the_same_units_from_the_recipe_of_a_run(start_del, start):
    import pickle

    from tl_localize.execution.distributed import Recipe

    for run in (*start_del("del"), start("inj", retry_failed=True)):
        recipe = Recipe.of(run)
        settings = pickle.loads(pickle.dumps([recipe.settings, recipe.others]))  # as a worker on another machine gets them
        again = replace(recipe, settings=settings[0], others=settings[1]).run(run.benchmark.model)
        assert type(again) is type(run)
        assert again.works == run.works
        assert again.retry_failed == run.retry_failed


def test_failed_base_is_not_tried_for_every_target(start_del, monkeypatch):
    from tl_localize.runs import DelRun, status

    calls = []

    def wrong(self, work):
        calls.append(work)
        raise ValueError("loss on general_tokens must be finite, got one that is not")

    monkeypatch.setattr(DelRun, "make_base", wrong)
    events = work_all(start_del(ratios=(0.1,)))
    assert 1 <= len(calls) <= 2  # by each run once
    assert all(event.reason for event in events)
    assert status(start_del(ratios=(0.1,))[0].store).frame.loc["activations", ["done", "failed"]].tolist() == [0, 3]


# ---- failures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fails:
    """A method that cannot do one sentence."""

    on: str
    name: str = "fails"

    def __call__(self, model, sequence):
        from tl_localize import NeuronScores

        if sequence.id == self.on:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return NeuronScores(torch.arange(96.0).reshape(2, 48), self.name, sequence.id)


def test_failure_is_recorded_and_the_rest_goes_on(start, monkeypatch):
    from tl_localize.runs import inj_results, status

    events = work(start(methods=[Fails("s1")]))
    assert [(event.label, event.name) for event in events if event.reason] == [("fails", "s1")]
    run = start(methods=[Fails("s1")])
    state = status(run.store)
    assert state.frame.loc["fails", ["planned", "done", "failed", "missing"]].tolist() == [4, 3, 1, 0]
    assert not state.clean
    (reason,) = state.reasons.values()
    assert "out of memory" in reason
    assert "Traceback" in json.dumps(run.store.failures())
    table = inj_results(run.store).table()
    assert table.loc[(table.index[0][0], "fails"), "missing"] == "1"
    assert "1 measurements MISSING" in table.index[0][0]
    assert work(run) == []  # it is not tried again
    monkeypatch.setattr(Fails, "__call__", Fails("").__class__.__call__)
    assert len(work(start(methods=[Fails("s1")], retry_failed=True))) == 1  # unless asked for


def test_failure_that_is_mended_is_forgotten(start, monkeypatch):
    from tl_localize import Activations

    right = Activations._attribute_batch

    def wrong(self, neurons, sequences, report):
        raise ValueError("loss must be finite, got nan")

    monkeypatch.setattr(Activations, "_attribute_batch", wrong)
    assert sum(bool(event.reason) for event in work(start())) == 4
    monkeypatch.setattr(Activations, "_attribute_batch", right)
    run = start(retry_failed=True)
    work(run)
    assert run.store.failures() == {}
    undisturbed = start("undisturbed")
    work(undisturbed)
    assert numbers(run) == numbers(undisturbed)


def test_failed_injection_holds_up_its_own_part_only(start, monkeypatch):
    from tl_localize.runs import status

    from tl_localize.evals.inj_benchmark import InjBenchmark

    right = InjBenchmark.inject

    def wrong(self, part, progress=None):
        if part.index == 2:
            raise ValueError("loss must be finite, got nan")
        return right(self, part, progress)

    monkeypatch.setattr(InjBenchmark, "inject", wrong)
    run = start()
    work(run)
    frame = status(run.store).frame
    assert frame.loc["activations", ["done", "failed"]].tolist() == [3, 1]


# ---- damage ----------------------------------------------------------------------------------------------------------


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 4
    path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "flipped": data, "foreign": b"{}\n"}[how])


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "foreign"])
@pytest.mark.parametrize("kind", ["inj", "scores", "injections"])
def test_damaged_unit_is_set_aside_and_made_again(start, tmp_path, how, kind, caplog):
    run = start(methods=start().methods[:1])
    work(run)
    before = numbers(run)
    spoiled = sorted((tmp_path / "run" / "units" / kind).iterdir())[0]
    spoil(spoiled, how)
    if kind != "inj":  # what a measurement was made of is read only when it is needed
        for path in (tmp_path / "run" / "units" / "inj").iterdir():
            path.unlink()
    again = start(methods=run.methods)
    work(again)
    assert numbers(again) == before
    assert f"units/{kind}/{spoiled.name} was set aside" in caplog.text
    (kept,) = (tmp_path / "run" / "set_aside").iterdir()
    assert kept.name.startswith(spoiled.name)


def test_every_flipped_bit_is_noticed(start, tmp_path):
    from tl_localize.execution.store import Damaged, unpack

    run = start(methods=start().methods[:1])
    work(run, stop_after=2)
    for path in (tmp_path / "run" / "units").glob("*/*"):
        data = path.read_bytes()
        sound, tensors = unpack(data, path.suffix)
        for at in range(0, len(data), 7):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            try:
                record, others = unpack(bytes(flipped), path.suffix)
            except Damaged:
                continue
            assert record == sound, f"{path.name}: byte {at}"
            assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_opening_finds_damage_without_reading_a_number(start, tmp_path, monkeypatch, caplog):
    from tl_localize.execution.distributed import jobs

    from tl_localize.execution.store import Store

    run = start()
    work(run)
    spoiled = tmp_path / "run" / run.works[2].measures["hard_concrete"].file
    spoil(spoiled, "flipped")
    monkeypatch.setattr(Store, "read", lambda *a: pytest.fail("a number was read"))
    again = start()
    assert [(step.work.index, step.labels) for job in jobs([again]) for step in job] == [(2, ["hard_concrete"])]
    assert f"{spoiled.name} was set aside" in caplog.text


def test_unit_under_another_name_is_not_trusted(start, tmp_path):
    run = start(methods=start().methods[:1])
    work(run)
    before = numbers(run)
    first, second, *_ = sorted((tmp_path / "run" / "units" / "inj").iterdir())
    first.write_bytes(second.read_bytes())
    again = start(methods=run.methods)
    work(again)
    assert numbers(again) == before


def test_foreign_files_are_set_aside_and_kept(start, tmp_path):
    run = start()
    work(run)
    before = numbers(run)
    (tmp_path / "run" / "units" / "inj" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "failures" / "x.json").write_text("{}")
    (tmp_path / "run" / "plans" / "y.json").write_text("")
    again = start()
    assert work(again) == []
    assert numbers(again) == before
    assert len(again.store.names) == 4 + 4 * 4 * 2
    assert again.store.failures() == {}
    assert len(list((tmp_path / "run" / "set_aside").iterdir())) == 3
    assert "mine" in {path.read_text() for path in (tmp_path / "run" / "set_aside").iterdir()}


def test_full_disk_stops_with_a_message_and_loses_nothing(start, tmp_path, monkeypatch):
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 15:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    run = start()
    with monkeypatch.context() as patch:
        patch.setattr("tl_localize.files.os.fsync", full)
        with pytest.raises(OSError, match=r"folder must have room.*what is done is kept"):
            work(run)
    assert leftovers(tmp_path / "run") == []
    again = start()
    work(again)
    whole = start("whole")
    work(whole)
    assert numbers(again) == numbers(whole)


def test_full_tmpfs_for_real(tmp_path):
    """A file system of 64 KiB in a namespace of its own: half a file is never left."""
    script = """
import pathlib, sys, os
from tl_localize.execution.store import Record, Store, Unit
import torch
store = Store(pathlib.Path(sys.argv[1]))
done = 0
try:
    for i in range(100):
        store.write(Unit("scores", {"i": i}, ".safetensors"), Record({}, {}, {"values": torch.ones(50, 20)}))
        done += 1
except OSError as error:
    assert "folder must have room" in str(error), error
assert 3 < done < 100, done
assert list(pathlib.Path(sys.argv[1], "tmp").iterdir()) == []
again = Store(pathlib.Path(sys.argv[1]))
assert sum(again.read(Unit("scores", {"i": i}, ".safetensors")) is not None for i in range(100)) == done
print("ok", done)
"""
    mount = f'mount -t tmpfs -o size=64k none {tmp_path} && "$0" -c "$1" {tmp_path}'
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False) if sys.platform == "linux" else None
    if probe is None or probe.returncode:
        pytest.skip("mount namespaces are not allowed here")
    root = Path(__file__).parents[1]
    command = ["unshare", "-rm", "bash", "-c", mount, sys.executable, script]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(root)})
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ok")


def test_read_only_folder_can_be_read_and_is_not_changed(start, tmp_path):
    from tl_localize.runs import inj_results, status

    from tl_localize.execution.store import Store

    run = start()
    work(run)
    spoil(sorted((tmp_path / "run" / "units" / "inj").iterdir())[0], "empty")
    before = sorted(tmp_path.rglob("*"))
    store = Store(tmp_path / "run", read_only=True)
    assert status(store).frame["missing"].sum() == 1
    assert len(inj_results(store).missing) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_store_rejects_a_folder_that_is_none(tmp_path):
    from tl_localize.execution.store import Store

    with pytest.raises(ValueError, match="folder must hold the results of a run"):
        Store(tmp_path / "nothing", read_only=True)


def test_two_runs_in_one_folder_agree(start):
    """Turn by turn, each with its own idea of what is there."""
    from tl_localize.execution.distributed import in_process, jobs

    first, second = start(), start()
    turns = [in_process([run], jobs([run])) for run in (first, second)]
    while turns:
        turns = [turn for turn in turns if next(turn, None) is not None]
    whole = start("whole")
    work(whole)
    assert numbers(start()) == numbers(whole)
    assert leftovers(first.store.folder) == []


@pytest.mark.parametrize("moved", [-50, 50])
def test_clocks_that_go_backwards_change_nothing(start, tmp_path, monkeypatch, moved):
    """Files of years ago and years ahead, folders too, and a clock that steps back while a run is under way."""
    from tl_localize import Activations

    whole = start("whole")
    work(whole)
    right, calls = Activations._attribute_batch, []

    def fails_once(self, neurons, sequences, report):
        calls.append(sequences)
        if len(calls) == 1:
            raise ValueError("loss must be finite, got nan")
        return right(self, neurons, sequences, report)

    monkeypatch.setattr(Activations, "_attribute_batch", fails_once)
    then = time.time() + moved * 365 * 24 * 3600

    def shift():
        for i, path in enumerate(sorted((tmp_path / "run").rglob("*"))):
            os.utime(path, (then + i, then - i))

    work(start(sequences=whole.benchmark.sequences[:2]), stop_after=7)  # a first plan, half done, one unit failed
    shift()
    start()  # a second plan
    shift()
    steps = iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: then - next(steps))  # each look at the clock is earlier than the last
    run = start()
    labels = [(event.name, event.label) for event in work(run)]
    assert len(labels) == 4 * (1 + 4) - 7  # neither what is done nor what has failed
    assert len(run.store.failures()) == 1
    assert [len(plan["value"]["parts"]) for plan in run.store.plans()] == [2, 4]
    shift()
    again = start(retry_failed=True)
    assert [event.label for event in work(again)] == ["activations"]
    shift()
    assert work(start()) == []
    assert numbers(start()) == numbers(whole)
    assert leftovers(tmp_path / "run") == []


# ---- a kill ----------------------------------------------------------------------------------------------------------


def test_abandoned_temporary_files_are_removed_and_those_in_use_stay(tmp_path):
    import socket

    from tl_localize.files import remove_abandoned

    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = tmp_path / f".a.json.{socket.gethostname()}.{child.pid}.0a0a0a0a.tmp"
    living = tmp_path / f".a.json.{socket.gethostname()}.{os.getppid()}.0a0a0a0a.tmp"
    elsewhere = tmp_path / ".a.json.elsewhere.1.0a0a0a0a.tmp"
    for path in (dead, living, elsewhere):
        path.touch()
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living, elsewhere])
    os.utime(elsewhere, (0, 0))
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [living]


@pytest.fixture
def start_del(gpt2_like, make_sequences, methods, tmp_path):
    """DEL at two ratios, and layer by layer, into a folder."""
    from tl_localize.runs import DelRun

    from tl_localize import Activations
    from tl_localize.evals.del_benchmark import DelBenchmark
    from tl_localize.execution.store import Store

    def make(name="run", ratios=(0.1, 0.2), methods=methods, **changes):
        general = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(1))
        settings = {"n_dev": 1, "n_targets": 3, "decode": str, **changes}
        sequences = make_sequences((9, 3), (9, 3), (12, 3), (7, 2), (9, 1))
        found = [DelBenchmark(gpt2_like, sequences, general, ratios=(ratio,), **settings) for ratio in ratios]
        runs = [DelRun(Store(tmp_path / name), benchmark, methods) for benchmark in found]
        return [*runs, DelRun(runs[0].store, found[0], [Activations()], multiples=(1, 5))]

    return make


def work_all(runs, stop_after=None, shard=(1, 1)):
    from itertools import islice

    from tl_localize.execution.distributed import in_process, jobs

    return list(islice(in_process(runs, jobs(runs, shard)), stop_after))


def del_numbers(store):
    from tl_localize.runs import del_results, single_layer_frames

    from tl_localize.report.tables import del_tables

    results = del_results(store)
    assert not len(results.missing)
    tables = [table.to_csv() for table in del_tables(results, "tiny").values()]
    matrices = [matrix.to_csv() for found in (results.confusion, results.confusion_levenshtein) for matrix in found.values()]
    layers = [frame.to_csv() for frame in single_layer_frames(store).values()]
    assert len(layers) == 1
    return [results.frame.to_csv(), results.before.to_csv(), *tables, *matrices, *layers]


def test_del_run_gives_what_the_benchmark_gives_without_a_store(start_del, methods):
    from pandas.testing import assert_frame_equal
    from tl_localize.runs import del_results, single_layer_frames, stored

    runs = start_del()
    work_all(runs)
    kept, single = del_results(runs[0].store), single_layer_frames(runs[0].store)["activations"]
    alone = stored(methods, runs[0].store, runs[0].benchmark.model)  # localized one by one
    plain = replace(runs[0].benchmark, ratios=(0.1, 0.2)).run(alone)
    assert_frame_equal(kept.before, plain.before)
    columns = list(plain.frame.columns)
    order = ["method", "ratio", "sequence_id"]
    assert_frame_equal(kept.frame[columns].sort_values(order, ignore_index=True), plain.frame.sort_values(order, ignore_index=True))
    for key, matrix in plain.confusion.items():
        assert_frame_equal(kept.confusion[key], matrix)
    assert_frame_equal(single, runs[0].benchmark.run_single_layer(alone[0], 0.1))


def test_del_in_pieces_and_shards_equals_del_in_one(start_del):
    whole = start_del("whole")
    n_events = len(work_all(whole))
    assert n_events == 1 + 3 * (3 + 3 + 1)
    assert sum(len(work_all(start_del("pieces"), stop_after=4)) for _ in range(n_events // 4 + 1)) == n_events
    for i in (2, 1):
        work_all(start_del("shards"), shard=(i, 2))
    assert del_numbers(start_del("pieces")[0].store) == del_numbers(start_del("shards")[0].store) == del_numbers(whole[0].store)


def test_del_with_a_new_method_and_ratio_costs_only_these(start_del, methods, monkeypatch):
    from tl_localize import Activations, HardConcrete

    work_all(start_del(methods=methods[1:], ratios=(0.1,)))
    monkeypatch.setattr(HardConcrete, "_attribute_batch", lambda *a: pytest.fail("scores were computed again"))
    added = work_all(start_del(methods=[Activations(), *methods[1:]], ratios=(0.1, 0.2)))
    assert [event.label for event in added if event.label == "before"] == []
    assert sum(event.unit.identity["ratio"] == 0.1 for event in added) == 3  # Activations


def test_del_run_refuses_another_benchmark_s_folder_and_two_ratios(start, start_del):
    from tl_localize.runs import DelRun

    start("run")
    with pytest.raises(ValueError, match="benchmark: inj in the folder, del now"):
        start_del("run")
    run = start_del("other")[0]
    with pytest.raises(ValueError, match=r"ratios must be a single one in each run, got \(0.1, 0.2\)"):
        DelRun(run.store, replace(run.benchmark, ratios=(0.1, 0.2)), run.methods)


@pytest.mark.parametrize("how", ["truncated", "flipped"])
@pytest.mark.parametrize("kind", ["before", "del", "scores"])
def test_damaged_unit_of_del_is_made_again(start_del, tmp_path, how, kind, caplog):
    runs = start_del()
    work_all(runs)
    before = del_numbers(runs[0].store)
    units = tmp_path / "run" / "units"
    spoiled = sorted((units / kind).iterdir())[0]
    spoil(spoiled, how)
    if kind != "del":
        for path in (units / "del").iterdir():
            path.unlink()
    again = start_del()
    work_all(again)
    assert del_numbers(again[0].store) == before
    assert f"units/{kind}/{spoiled.name} was set aside" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_del_loses_nothing(start_del, tmp_path):
    from kill import kill_until, logged

    log = tmp_path / "log"

    def run():
        torch.set_num_threads(1)
        again = start_del()
        logged(again[0], log)
        work_all(again)

    whole = start_del("whole")
    began = time.monotonic()
    work_all(whole)
    seen = kill_until(run, tmp_path / "run", log, rounds=6, seed=1, mean=(time.monotonic() - began) / 3)
    assert seen.rounds > 0
    assert seen.wasted == 0
    assert del_numbers(start_del()[0].store) == del_numbers(whole[0].store)
    assert leftovers(tmp_path / "run") == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_run_loses_nothing(start, tmp_path):
    from kill import kill_until, logged

    log = tmp_path / "log"

    def run():
        torch.set_num_threads(1)
        again = start()
        logged(again, log)
        work(again)

    whole = start("whole")
    began = time.monotonic()
    work(whole)
    seen = kill_until(run, tmp_path / "run", log, rounds=6, seed=0, mean=(time.monotonic() - began) / 6)
    assert seen.rounds > 0
    assert seen.wasted == 0
    assert numbers(start()) == numbers(whole)
    assert leftovers(tmp_path / "run") == []
