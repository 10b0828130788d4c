"""What the store costs: its share of an INJ run, and the time to open a folder of 100,000 finished
tasks, all of them checked.

    pytest benchmarks/test_store_cost.py -s

Two Ray workers against one, on a machine with nothing else to do:

    pytest benchmarks/test_store_cost.py -s -k workers
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

N_TASKS = 100_000


def test_store_takes_under_two_percent_of_an_inj_run(tmp_path, monkeypatch):
    from tl_localize import load_model
    from tl_localize.evals.presets import inj_runs
    from tl_localize.execution import Store
    from tl_localize.reference import inj_sequences

    spent = 0.0

    def timed(call):
        def inner(*arguments, **options):
            nonlocal spent
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                spent += time.perf_counter() - began

        return inner

    for name in ("read", "write", "has", "add_plan", "plans", "failures"):
        monkeypatch.setattr(Store, name, timed(getattr(Store, name)))
    model = load_model("reference-gpt2", "cpu")
    sequences = inj_sequences(model, None)[:2]
    began, process = time.perf_counter(), time.process_time()
    ((benchmark, methods),) = inj_runs(
        model,
        "reference-gpt2",
        sequences,
        "hard_concrete,slimming,integrated_gradients,activations",
    )
    benchmark.run(methods, Store(tmp_path / "run"))
    n_tasks = sum(1 for _ in (tmp_path / "run" / "records").rglob("*.safetensors"))
    total = time.perf_counter() - began
    print(
        f"\nstore: {spent:.3f} s of {total:.1f} s = {100 * spent / total:.2f} % ({n_tasks} tasks)"
    )
    print(f"{time.process_time() - process:.1f} s of it on a processor")
    assert spent < 0.02 * total


def test_a_folder_of_many_finished_tasks_opens_in_seconds(tmp_path):
    """What resume does before its first task, and status; each in a process of its own, as users
    have it.
    """
    script = """
import hashlib, json, sys, time
from pathlib import Path
import torch
from tl_localize import MemorizedSequence, RandomBaseline, load_model
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.execution import Store, status
from tl_localize.execution.engine import missing_groups
from tl_localize.execution.environment import environment
from tl_localize.execution.store import pack
folder, n_tasks = Path(sys.argv[1]), int(sys.argv[2])
model = load_model("reference-gpt2", "cpu")
tokens = torch.randint(0, 1000, (n_tasks // 10, 40), generator=torch.Generator().manual_seed(0))
sequences = [MemorizedSequence(row, 1, id=f"s{i}") for i, row in enumerate(tokens)]
benchmark = InjBenchmark(model=model, sequences=sequences, ratio=0.01)
methods = [RandomBaseline(seed=i) for i in range(9)]  # and a control
began, process = time.perf_counter(), time.process_time()
def told(what):
    seconds, busy = time.perf_counter() - began, time.process_time() - process
    print(f"{what}: {seconds:.2f} s, of which {busy:.2f} s on a processor")
store = Store(folder)
plan = benchmark.plan(methods)
store.add_plan(plan, environment(model))
told("planned")
todo = missing_groups(plan, store)
told("ready for the first task, every file checked")
opened = time.process_time() - process
print(sum(map(len, todo)))
if sys.argv[3] == "make":
    row = {"sequence_id": "s", "method": "m", "converged": True, "loss": 0.1, "steps": 9}
    row |= {"ratio": 0.1, "multiple": 1.0, "recall": 0.5}
    row |= {"recall_across_layers": 0.5, "group": "g", "seed": 1}
    value = {"frame": [row | {"multiple": m} for m in (1, 2, 5)]}
    about = {**environment(model), "seconds": 1.5, "peak_memory": 1 << 30}
    (folder / "records" / "inj").mkdir(parents=True)
    for task in plan.tasks:
        body = {"key": task.key, "kind": task.kind, "inputs": task.inputs}
        body |= {"value": value, "about": about}
        (folder / task.file).write_bytes(pack(body))  # without fsync, which would take minutes
else:
    began, process = time.perf_counter(), time.process_time()
    frame = status(store).frame
    told("status")
    print(frame.loc[[name for name in frame.index if not name.startswith("(")], "done"].sum())
    process = time.process_time()
    for task in plan.tasks:
        data = (folder / task.file).read_bytes()
        json.loads(json.loads(data[8:])["__metadata__"]["record"])
        hashlib.sha256(data).digest()
    plain = time.process_time() - process
    once = f"reading, hashing and parsing each file once ({plain:.2f} s)"
    told(f"opening took {opened / plain:.1f} times as long as {once}; all of it")
"""
    for what in ("make", "open"):
        command = [sys.executable, "-c", script, str(tmp_path / "run"), str(N_TASKS), what]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-4000:]
    print(f"\n{result.stdout}")
    missing, done = (int(line) for line in result.stdout.splitlines() if ":" not in line)
    assert (missing, done) == (0, N_TASKS)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_two_workers_are_faster_than_one(tmp_path, alone):
    """From the first task to the last, on reference-gpt2; both times one thread for each worker."""
    script = """
import sys, time
from functools import partial
from pathlib import Path
import torch
torch.set_num_threads(1)
from tl_localize import load_model
from tl_localize.evals.presets import inj_runs
from tl_localize.execution import RayCluster, Store
from tl_localize.reference import inj_sequences
load = partial(load_model, "reference-gpt2", "cpu")
model = load()
sequences = inj_sequences(model, None)[:8]
names = "hard_concrete,integrated_gradients"
((benchmark, methods),) = inj_runs(model, "reference-gpt2", sequences, names)
times = []
tell = lambda fraction, what: times.append(time.perf_counter())
cluster = RayCluster(load, workers=int(sys.argv[2]))
benchmark.run(methods, Store(Path(sys.argv[1])), tell, executor=cluster)
print(times[-1] - times[0])
"""
    seconds = {}
    for workers in (1, 2):
        command = alone(f"{sys.executable} -c '{script}' {tmp_path / str(workers)} {workers}")
        seconds[workers] = float(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
        )
    print(
        f"\n1 worker {seconds[1]:.1f} s, 2 workers {seconds[2]:.1f} s: "
        f"{seconds[1] / seconds[2]:.2f} times as fast"
    )
    assert seconds[1] / seconds[2] > 1.6
