"""The workers of a Ray cluster compute: each holds the model, all write to one folder."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tl_localize.checks import check_count
from tl_localize.execution.run import Benchmark, Methods
from tl_localize.execution.store import Steps, Store
from tl_localize.model.environment import environment
from tl_localize.model.neurons import LanguageModel

LOG = logging.getLogger(__name__)
ATTEMPTS = 3  # deaths of a worker over one group before the group is given up
_MODELS: dict[Any, LanguageModel] = {}  # of this worker


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """The workers of a Ray cluster compute the groups of a benchmark, each group as one task.

    Where a worker dies, with its machine or without, another one takes its group. If this process
    dies, the same command goes on from what is in the folder, which all machines must see under the
    same path.

    Args:
        load: gives the model on the machine where it is called.
        address: of a cluster that is there; by default one is started on this machine.
        workers: at most so many at a time; by default as many as the cluster has room for, each
            with a GPU where there are GPUs. Else a worker gets as many cores as this process has
            threads, because results differ in the last digits between numbers of threads.

    Raises:
        ImportError: Ray is not installed.
        ValueError: less than one worker is asked for, the run has no store, this process has more
            threads than any machine has cores, or a worker has another model.

    >>> RayCluster(load=lambda: load_model("reference"), workers=2).workers
    2
    """

    load: Callable[[], LanguageModel]
    address: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_count(workers=self.workers)

    def start(self) -> int:
        ray = _import_ray()
        if not ray.is_initialized():
            with keeping_sigterm():
                ray.init(
                    address=self.address or "local", log_to_driver=False, include_dashboard=False
                )
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        threads = torch.get_num_threads()
        most = max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
        if not gpus and threads > most:
            raise ValueError(
                f"threads must be at most {most:g}, the cores of the largest machine of the "
                f"cluster, got {threads}. Call torch.set_num_threads, or set OMP_NUM_THREADS, "
                "before."
            )
        room = gpus or int(resources["CPU"] / threads)
        return self.workers or max(1, room)

    def __call__(
        self,
        benchmark: Benchmark[Any],
        groups: Sequence[Any],
        methods: Methods,
        steps: Steps,
    ) -> None:
        ray = _import_ray()
        if not isinstance(steps, Store):
            raise ValueError(
                "store must be given where Ray computes, got none. Pass store=Store(folder) that "
                "all machines see."
            )
        n_workers = self.start()
        threads = torch.get_num_threads()
        gpus = min(1, ray.cluster_resources().get("GPU", 0))
        # max_calls: a worker keeps its model
        worker = ray.remote(max_calls=0)(compute_group).options(
            num_gpus=gpus, num_cpus=1 if gpus else threads, max_retries=ATTEMPTS - 1
        )
        make = without_model(benchmark)
        work = ray.put((self.load, make, methods, steps.folder.resolve(), threads))
        waiting = list(groups)
        running: dict[Any, Any] = {}
        try:
            while waiting or running:
                while waiting and len(running) < n_workers:
                    group = waiting.pop(0)
                    running[worker.remote(work, group)] = group
                (task,), _ = ray.wait(list(running))
                group = running.pop(task)
                self._finish(ray, task, group, steps)
        finally:
            for task in running:
                ray.cancel(task)

    def _finish(self, ray: Any, task: Any, group: Any, steps: Store) -> None:
        """Tell that a group is done, or that it was given up."""
        try:
            for was_there in ray.get(task):
                steps.finish_cell(was_there)
            LOG.info("%s is done", group)
        # its text is a traceback, the cause's is a sentence
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            LOG.warning("FAILED %s: its worker died %d times: %s", group, ATTEMPTS, reason)


def _import_ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError(
            "ray must be installed where --ray is given, got no such module: pip install ray."
        ) from error


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Ray puts a handler of its own in the place of one that is there."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def without_model(benchmark: Benchmark[Any]) -> Callable[..., Benchmark[Any]]:
    """What makes the benchmark again from a ``model``, which is not sent to another machine."""
    kind: Any = type(benchmark)
    names = [field.name for field in fields(kind) if field.init and field.name != "model"]
    return partial(kind, **{name: getattr(benchmark, name) for name in names})


def compute_group(work: Any, group: Any) -> list[bool]:
    """On a worker: compute one group; whether each of its cells was there before."""
    load, make, methods, folder, threads = work
    steps = Store(Path(folder))
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(steps.agreed["float32_matmul_precision"])
    run = folder, steps.agreed["fingerprint"]
    model = _MODELS.get(run)
    if model is None:
        _MODELS.clear()  # of another run, whose model may fill the memory
        model = _MODELS[run] = load()
    benchmark: Benchmark[Any] = make(model=model)
    steps.environment = environment(model)
    steps.agree(benchmark.settings(methods))  # raises where this machine has another model
    finished: list[bool] = []
    steps.finish_cell = finished.append
    for _ in benchmark.rows(group, methods, steps):
        pass
    return finished
