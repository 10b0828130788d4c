"""What the store costs: its share of an INJ run, and the time to open a folder of 100,000 finished units.

pytest benchmarks/test_store_cost.py -s
pytest benchmarks/test_store_cost.py -s -k workers        # on a machine with nothing else to do: two Ray workers against one
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

N_UNITS = 100_000


def test_store_takes_under_two_percent_of_an_inj_run(tmp_path, monkeypatch):
    from tl_localize import load_model
    from tl_localize.cli.options import REFERENCE_RATIO, inj_sequences, make_methods
    from tl_localize.distributed import in_process, jobs
    from tl_localize.evals.inj_benchmark import InjBenchmark
    from tl_localize.runs import InjRun
    from tl_localize.store import Store

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

    for name in ("read", "write", "has", "plan", "plans", "failures"):
        monkeypatch.setattr(Store, name, timed(getattr(Store, name)))
    model = load_model("reference-gpt2", "cpu")
    sequences = inj_sequences(model, None)[:2]
    began, process = time.perf_counter(), time.process_time()
    store = Store(tmp_path / "run")
    methods = make_methods("hard_concrete,slimming,integrated_gradients,activations", [])
    run = InjRun(store, InjBenchmark(model=model, sequences=sequences, ratio=REFERENCE_RATIO), methods)
    n_units = sum(1 for _ in in_process([run], jobs([run])))
    total = time.perf_counter() - began
    print(f"\nstore: {spent:.3f} s of {total:.1f} s = {100 * spent / total:.2f} % ({n_units} units)")
    print(f"{time.process_time() - process:.1f} s of it on a processor")
    assert spent < 0.02 * total


def test_a_folder_of_many_finished_units_opens_in_seconds(tmp_path):
    from tl_localize.runs import works
    from tl_localize.store import Store, digest_of, pack

    store = Store(tmp_path / "run")
    injection = {"ratio": 0.01, "learning_rate": 0.01, "max_steps": 200, "stop_loss": 0.05, "distractors": 0, "seeds": "0 + index"}
    plan = {
        "benchmark": "inj",
        "model": "m",
        "fingerprint": "f",
        "dtype": "float32",
        "injection": injection,
        "multiples": [1.0, 2.0, 5.0],
        "parts": [{"name": f"s{i}", "seed": i, "sequences": [[f"s{i}", f"{i:016x}"]]} for i in range(N_UNITS // 10)],
        "methods": {f"method_{m}": f"Method({m})" for m in range(10)},
    }
    store.plan(plan, {"environment": {}, "command": []})
    row = {"sequence_id": "s", "method": "m", "converged": True, "loss": 0.1, "steps": 9, "ratio": 0.1, "multiple": 1.0, "recall": 0.5}
    value = {"frame": [row | {"multiple": m, "recall_across_layers": 0.5, "group": "g", "seed": 1} for m in (1, 2, 5)]}
    about = {"torch": "2.13.0", "device": "cpu", "dtype": "float32", "host": "h", "seconds": 1.5, "injection_seconds": 2.5}
    folder = tmp_path / "run" / "units" / "inj"
    folder.mkdir(parents=True)
    for work in works(plan):
        for unit in work.measures.values():
            body = {"key": unit.key, "identity": unit.identity, "value": value, "about": about}
            (folder / f"{unit.key}.json").write_bytes(pack(body, {}, ".json"))  # without fsync, which would take minutes
    assert digest_of(plan)

    began, process = time.perf_counter(), time.process_time()
    opened = Store(tmp_path / "run")
    n_names = len(opened.names)
    listed = time.perf_counter() - began
    missing = [unit for work in works(plan) for unit in work.measures.values() if opened.read(unit) is None]
    checked = time.perf_counter() - began
    print(f"\n{n_names} units: listed in {listed:.2f} s, each read and checked in {checked:.2f} s")
    print(f"of which {time.process_time() - process:.2f} s on a processor")
    assert n_names == N_UNITS
    assert missing == []
    assert listed < 5


@pytest.mark.skipif(find_spec("ray") is None or (os.cpu_count() or 1) < 2, reason="needs Ray and two cores")
def test_two_workers_are_faster_than_one(tmp_path):
    """From the first unit to the last, on reference-gpt2; both times one thread for each worker."""
    script = """
import sys, time
from functools import partial
from pathlib import Path
import torch
torch.set_num_threads(1)
from tl_localize import load_model
from tl_localize.cli.options import REFERENCE_RATIO, inj_sequences, make_methods
from tl_localize.distributed import by_ray, jobs
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.runs import InjRun
from tl_localize.store import Store
load = partial(load_model, "reference-gpt2", "cpu")
model = load()
sequences = inj_sequences(model, None)[:8]
methods = make_methods("hard_concrete,integrated_gradients", [])
run = InjRun(Store(Path(sys.argv[1])), InjBenchmark(model=model, sequences=sequences, ratio=REFERENCE_RATIO), methods)
times = [time.perf_counter() for _ in by_ray([run], jobs([run]), load, workers=int(sys.argv[2]))]
print(times[-1] - times[0])
"""
    seconds = {}
    for workers in (1, 2):
        inside = f"ip link set lo up && exec {sys.executable} -c '{script}' {tmp_path / str(workers)} {workers}"
        alone = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", inside]
        seconds[workers] = float(subprocess.run(alone, capture_output=True, text=True, check=True).stdout.split()[-1])
    print(f"\n1 worker {seconds[1]:.1f} s, 2 workers {seconds[2]:.1f} s: {seconds[1] / seconds[2]:.2f} times as fast")
    assert seconds[1] / seconds[2] > 1.6
