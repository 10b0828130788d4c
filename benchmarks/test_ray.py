"""Ray for real: a cluster of two nodes on this machine, in a network namespace that has nothing but
loopback.
"""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

sys.path[:0] = [sys.argv[2]]
import ray
from conftest import memorized, tiny_model
from ray.cluster_utils import Cluster

from tl_localize import Activations, HardConcrete
from tl_localize.evals.inj.benchmark import InjBenchmark
from tl_localize.execution import RayCluster, Store

def load():
    sys.path[:0] = [sys.argv[2]]
    from conftest import tiny_model
    return tiny_model(1, model_name="tiny")

def run(name, **how):
    sequences = memorized(*[(10, 1)] * 14)
    training = {"learning_rate": 0.02, "max_steps": 150, "stop_loss": 0.01}
    benchmark = InjBenchmark(load(), sequences, ratio=0.2, **training)
    methods = [Activations(), HardConcrete(steps=200, stop_sparsity=1e-9)]
    return benchmark.run(methods, Store(Path(sys.argv[1]) / name), **how)

def numbers(results):
    assert not len(results.missing), results.missing
    return results.frame.drop(columns="seconds").to_csv(), results.table().to_csv()

torch.set_num_threads(1)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
assert sum(node["Alive"] for node in ray.nodes()) == 2
disturbed = []

def kill_a_worker():
    # Whether there was one: between two groups no worker computes.
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process that has ended since it was listed
            if (path / "cmdline").read_bytes().startswith(b"ray::compute_group"):
                os.kill(int(path.name), signal.SIGKILL)
                return True
    return False

def disturb(fraction, what):
    if fraction >= 0.2 and "worker" not in disturbed and kill_a_worker():
        disturbed.append("worker")
    if fraction >= 0.5 and "node" not in disturbed and "worker" in disturbed:
        disturbed.append("node")
        cluster.remove_node(second, allow_graceful=False)

by_ray = run("ray", progress=disturb, cluster=RayCluster(load=load))
assert disturbed == ["worker", "node"], disturbed
# A run that had no worker there at that moment may end before the cluster has noticed.
deadline = time.monotonic() + 300
while sum(node["Alive"] for node in ray.nodes()) > 1 and time.monotonic() < deadline:
    time.sleep(1)
assert sum(node["Alive"] for node in ray.nodes()) == 1
assert numbers(by_ray) == numbers(run("whole"))
folder = Path(sys.argv[1]) / "ray"
left = [path for name in ("damaged", "failures") for path in (folder / name).iterdir()]
print("equal", left)
ray.shutdown()
cluster.shutdown()
"""


COLLECT = """
import sys
from pathlib import Path

import numpy as np
import torch

from tl_localize import load_model
from tl_localize.cli import main
from tl_localize.collect.reference_texts import training_data

torch.set_num_threads(1)
folder = Path(sys.argv[1])
rows = folder / "rows.npy"
# Rows that are long enough for general text of 128 tokens.
training = training_data(load_model("reference")).entries(0, 2188)
np.save(rows, np.stack([one.tokens for one in training]).reshape(-1, 160))
for name, more in (("process", []), ("ray", ["--ray", "local"])):
    what = ["collect", "--model", "reference", "--data", str(rows), "--windows", "80"]
    what += ["--out", str(folder / name), "-v"]
    main([*what, *more])
for name in ("sequences.jsonl", "report.csv", "collection.json", "general.safetensors"):
    assert (folder / "process" / name).read_bytes() == (folder / "ray" / name).read_bytes(), name
kept = [folder / name / "steps" / "collect" for name in ("process", "ray")]
steps = [sorted(path.name for path in one.iterdir()) for one in kept]
assert steps[0] == steps[1]
others = [folder / "ray" / name for name in ("tmp", "damaged", "failures")]
print("equal", len(steps[0]), [path for one in others for path in one.iterdir()])
"""


def test_ray_cluster_gives_the_same_tables_though_a_worker_is_killed_and_a_node_removed(
    tmp_path, alone
):
    run_alone(SCRIPT, tmp_path, alone)


def test_ray_collects_what_one_process_collects(tmp_path, alone):
    run_alone(COLLECT, tmp_path, alone)


def run_alone(script, tmp_path, alone):
    """Run a script in a network namespace; it prints "equal", and at the end the list of what was
    left over.
    """
    (tmp_path / "script.py").write_text(script)
    here = Path(__file__).parents[1] / "tests"
    command = alone(f"{sys.executable} {tmp_path / 'script.py'} {tmp_path} {here}")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{here.parent}:{here}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    # Of a busy machine: what Ray starts, and what it waits for.
    environment |= {
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_gcs_server_request_timeout_seconds": "300",
    }
    environment |= {"RAY_health_check_timeout_ms": "120000", "RAY_health_check_period_ms": "5000"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=1800
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "equal" in result.stdout
    assert result.stdout.rstrip().endswith("[]"), result.stdout
