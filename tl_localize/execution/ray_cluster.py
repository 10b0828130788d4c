"""The workers of a Ray cluster compute: each holds the model, all write to one folder."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tl_localize.execution.engine import Benchmark, Groups, InProcess, Outcome, Run, Timer
from tl_localize.execution.environment import behaviour, conflicts, environment
from tl_localize.execution.status import blocked
from tl_localize.execution.store import Store
from tl_localize.execution.tasks import Task, closure
from tl_localize.neurons import LanguageModel, check_between, check_count

ATTEMPTS = 3  # deaths of a worker over one task before the task is recorded as failed


@dataclass(eq=False)
class RayCluster:
    """Actors of a Ray cluster compute; each loads the model once, and goes on to the next run of
    the same executor.

    A worker that dies, with its machine or without, gives its group of tasks back, and another one
    is started. If this process dies, the same command goes on from what is in the folder, which all
    machines must see under the same path.

    Args:
        load: gives the model on the machine where it is called.
        address: of a cluster that is there; by default one is started on this machine.
        workers: by default as many as the cluster has room for.
        gpus: for each worker, also a fraction; by default one where there are GPUs. Without GPUs a
            worker gets as many cores as this process has threads, because results differ in the
            last digits between numbers of threads.
        shard: as of ``InProcess``.
        stop: as of ``InProcess``.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the run has no store.

    >>> RayCluster(lambda: load_model("reference"), workers=2).shard
    (1, 1)
    """

    load: Callable[[], LanguageModel]
    address: str | None = None
    workers: int | None = None
    gpus: float | None = None
    shard: tuple[int, int] = (1, 1)
    stop: Callable[[], bool] = lambda: False
    idle: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_count(workers=self.workers)
        if self.gpus is not None:
            check_between(0, math.inf, gpus=self.gpus)

    def __call__(self, run: Run, groups: Groups) -> Iterator[Outcome]:
        ray = import_ray()
        if not isinstance(run.cache, Store):
            raise ValueError(
                "store must be given where Ray computes, got none. Pass store=Store(folder) that "
                "all machines see."
            )
        if not groups:
            return
        if not ray.is_initialized():
            ray.init(address=self.address or "local", log_to_driver=False, include_dashboard=False)
        pool = Pool(self, ray, run, run.cache, groups)
        for _ in range(min(self.workers or self._room(ray), len(groups))):
            pool.add_worker()
        while pool.is_computing():
            if self.stop():
                pool.stop()
            ready, _ = ray.wait(list(pool.busy), timeout=0.5)
            for reference in ready:
                yield from pool.outcomes(reference)
        self.idle += [worker for worker, _ in pool.busy.values()]

    def close(self) -> None:
        """End all workers."""
        for worker in self.idle:
            import_ray().kill(worker)
        self.idle.clear()

    def new_worker(self, ray: Any) -> Any:
        """An actor that loads the model."""
        threads, gpus = torch.get_num_threads(), self._gpus(ray)
        actor = ray.remote(Worker).options(
            num_gpus=gpus, num_cpus=1 if gpus else threads, max_concurrency=2
        )
        return actor.remote(self.load, threads, torch.get_float32_matmul_precision())

    def _room(self, ray: Any) -> int:
        """How many workers the cluster has room for."""
        there, gpus = ray.cluster_resources(), self._gpus(ray)
        room = there["GPU"] / gpus if gpus else there["CPU"] / torch.get_num_threads()
        return max(1, int(room))

    def _gpus(self, ray: Any) -> float:
        if self.gpus is not None:
            return self.gpus
        return float(ray.cluster_resources().get("GPU", 0) > 0)


class Pool:
    """The workers of one run, and the groups of tasks that wait for them."""

    def __init__(
        self, cluster: RayCluster, ray: Any, run: Run, store: Store, groups: Groups
    ) -> None:
        self.cluster, self.ray, self.run, self.store = cluster, ray, run, store
        # sent once to each machine, whatever the number of groups
        self.work = ray.put(Work.of(run, store.folder))
        self.waiting = deque(map(list, groups))
        # what was asked for -> of which worker, for which group; none while it gets ready
        self.busy: dict[Any, tuple[Any, list[Task]]] = {}
        self.deaths = Counter[str]()  # by the task that was in hand
        self.stopped = False

    def add_worker(self) -> None:
        idle = self.cluster.idle
        worker = idle.pop() if idle else self.cluster.new_worker(self.ray)
        self.busy[worker.ready.remote()] = worker, []

    def is_computing(self) -> bool:
        waiting = bool(self.waiting) and not self.stopped
        return waiting or any(group for _, group in self.busy.values())

    def stop(self) -> None:
        """Let all workers finish the task in hand."""
        if not self.stopped:
            self.stopped = True
            for worker, group in self.busy.values():
                if group:
                    worker.stop.remote()

    def outcomes(self, reference: Any) -> list[Outcome]:
        """What a worker has computed; it gets the next group."""
        worker, group = self.busy.pop(reference)
        try:
            outcomes: list[Outcome] = self.ray.get(reference)
        except self.ray.exceptions.RayActorError as error:
            return self._died(group, error)
        # its text is a traceback, the cause's is a sentence
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error
        self.deaths.pop("", None)
        failed = self.run.failed
        failed.update(outcome.task.key for outcome in outcomes if outcome.reason)
        if self.waiting and not self.stopped:
            group = self.waiting.popleft()
            self.busy[worker.compute.remote(self.work, group, failed)] = worker, group
            self.run.timer.begin(group[0])
        else:
            self.cluster.idle.append(worker)
        return outcomes

    def _died(self, group: list[Task], error: Exception) -> list[Outcome]:
        """A worker died: another one takes its place, and its group waits again."""
        failed = self.run.failed
        tasks = closure(task for task in group if not blocked(task, failed))
        in_hand = next((task for task in tasks if not self.store.has(task)), None)
        name = in_hand.key if in_hand else ""
        self.deaths[name] += 1
        often = self.deaths[name] == ATTEMPTS
        if often and not in_hand:
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(
                f"worker must be able to start and load the model, got {reason} {ATTEMPTS} times."
            ) from error
        if group:
            self.waiting.appendleft(group)
        if not self.stopped:
            self.add_worker()
        if not often or not in_hand:
            return []
        failed.add(in_hand.key)
        return [Outcome(in_hand, 0.0, self.store.fail(in_hand, error))]


def import_ray() -> Any:
    """Ray, which is an extra."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError(
            "engine 'ray' needs Ray: pip install ray. Without it, --engine process does the same."
        ) from error


@dataclass(frozen=True, eq=False)
class Work:
    """A benchmark without its model, which every worker has."""

    kind: Callable[..., Benchmark[Any]]
    settings: dict[str, Any]
    methods: dict[str, Any]
    folder: Path
    environment: dict[str, Any]

    @classmethod
    def of(cls, run: Run, folder: Path) -> Work:
        one: Any = run.benchmark
        settings = {
            f.name: getattr(one, f.name) for f in fields(one) if f.init and f.name != "model"
        }
        made_with = run.environment | {"behaviour": behaviour(one.model)}
        return cls(type(one), settings, dict(run.methods), folder.resolve(), made_with)


class Worker:
    """An actor: it holds the model and computes groups of tasks."""

    def __init__(self, load: Callable[[], LanguageModel], threads: int, precision: str) -> None:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        self.model = load()
        self.environment = environment(self.model)
        self.behaviour = behaviour(self.model)
        self.stopped = False

    def ready(self) -> list[Outcome]:
        """Begin a run."""
        self.stopped = False
        return []

    def compute(self, work: Work, group: list[Task], failed: set[str]) -> list[Outcome]:
        mine = self.environment | {"behaviour": self.behaviour}
        wrong = conflicts(mine, work.environment)
        if mine["fingerprint"] != work.environment["fingerprint"]:
            wrong = [f"weights {mine['fingerprint']}, not {work.environment['fingerprint']}"]
        if wrong:
            raise ValueError(
                f"model must be the same on all machines, got on a worker {wrong[0]}. Give all "
                "machines the same files."
            )
        benchmark = work.kind(model=self.model, **work.settings)
        store, timer = Store(work.folder), Timer(None, [])
        run = Run(benchmark, work.methods, store, failed, self.environment, timer)
        return list(InProcess(stop=lambda: self.stopped)(run, [group]))

    def stop(self) -> None:
        """Finish the task in hand; called while ``compute`` runs."""
        self.stopped = True
