"""The workers of a Ray cluster compute: each holds the model, and all write to one results folder."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tl_localize.execution.engine import Benchmark, Groups, InProcess, Maker, Outcome, Timer
from tl_localize.execution.environment import environment
from tl_localize.execution.status import hopeless
from tl_localize.execution.store import Cache, Store
from tl_localize.execution.tasks import Task, closure
from tl_localize.neurons import LanguageModel

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
        shard, stop: as of ``InProcess``.

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

    def __call__(self, maker: Maker, groups: Groups) -> Iterator[Outcome]:
        ray, cache, failed = import_ray(), maker.cache, maker.failed
        if not isinstance(cache, Store):
            raise ValueError(
                "store must be given where Ray computes, got none. Pass store=Store(folder) that "
                "all machines see."
            )
        if not groups:
            return
        if not ray.is_initialized():
            ray.init(address=self.address or "local", log_to_driver=False, include_dashboard=False)
        work = Work.of(maker, cache.folder)
        # deaths by the task that was in hand
        waiting, deaths = deque(map(list, groups)), Counter[str]()
        # what was asked for -> of whom, for which group; None is getting ready
        busy: dict[Any, tuple[Any, list[Task] | None]] = {}

        def engage() -> None:
            worker: Any = self.idle.pop() if self.idle else self._hired(ray)
            busy[worker.ready.remote()] = (worker, None)

        for _ in range(min(self.workers or self._room(ray), len(waiting))):
            engage()
        stopped = False
        while any(group for _, group in busy.values()) or (waiting and not stopped):
            if self.stop() and not stopped:
                stopped = True
                for worker, group in busy.values():
                    if group:
                        worker.stop.remote()
            ready, _ = ray.wait(list(busy), timeout=0.5)
            for reference in ready:
                worker, group = busy.pop(reference)
                try:
                    outcomes: list[Outcome] = ray.get(reference)
                except ray.exceptions.RayActorError as error:
                    task = in_hand(group or [], cache, failed)
                    deaths[task.key if task else ""] += 1
                    if task and deaths[task.key] == ATTEMPTS:
                        failed.add(task.key)
                        yield Outcome(task, 0.0, cache.fail(task, error))
                    elif deaths[""] == ATTEMPTS:
                        reason = str(error).strip().splitlines()[-1]
                        raise ValueError(
                            f"worker must be able to start and load the model, got {reason} "
                            f"{ATTEMPTS} times."
                        ) from error
                    if group:
                        waiting.appendleft(group)
                    if not stopped:
                        engage()
                    continue
                # its text is a traceback, the cause's is a sentence
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                deaths.pop("", None)
                failed.update(outcome.task.key for outcome in outcomes if outcome.reason)
                yield from outcomes
                if waiting and not stopped:
                    group = waiting.popleft()
                    busy[worker.compute.remote(work, group, failed)] = (worker, group)
                    maker.watch.begin(group[0])
                else:
                    self.idle.append(worker)
        self.idle += [worker for worker, _ in busy.values()]

    def close(self) -> None:
        """End all workers."""
        for worker in self.idle:
            import_ray().kill(worker)
        self.idle.clear()

    def _hired(self, ray: Any) -> Any:
        gpus = self._gpus(ray)
        options = {
            "num_gpus": gpus,
            "num_cpus": 1 if gpus else torch.get_num_threads(),
            "max_concurrency": 2,
        }
        return ray.remote(Worker).options(**options).remote(self.load, torch.get_num_threads())

    def _room(self, ray: Any) -> int:
        there, gpus = ray.cluster_resources(), self._gpus(ray)
        return max(
            1,
            int(
                there.get("GPU", 0) / gpus
                if gpus
                else there.get("CPU", 1) / torch.get_num_threads()
            ),
        )

    def _gpus(self, ray: Any) -> float:
        return (
            self.gpus if self.gpus is not None else float(ray.cluster_resources().get("GPU", 0) > 0)
        )


def in_hand(group: Sequence[Task], cache: Cache, failed: set[str]) -> Task | None:
    """The first task of a group that is not there: what a worker died over."""
    return next(
        (
            task
            for task in closure(task for task in group if not hopeless(task, failed))
            if not cache.has(task)
        ),
        None,
    )


def import_ray() -> Any:
    """Ray, which is an extra."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError(
            "engine 'ray' needs Ray: pip install 'tl_localize[ray]'. Without it, --engine process "
            "does the same."
        ) from error


@dataclass(frozen=True, eq=False)
class Work:
    """A benchmark without its model, which every worker has."""

    kind: Callable[..., Benchmark[Any]]
    settings: dict[str, Any]
    methods: dict[str, Any]
    folder: Path
    fingerprint: str

    @classmethod
    def of(cls, maker: Maker, folder: Path) -> Work:
        one: Any = maker.benchmark
        settings = {
            f.name: getattr(one, f.name) for f in fields(one) if f.init and f.name != "model"
        }
        return cls(
            type(one),
            settings,
            dict(maker.methods),
            folder.resolve(),
            maker.environment["fingerprint"],
        )


class Worker:
    """An actor: it holds the model and computes groups of tasks."""

    def __init__(self, load: Callable[[], LanguageModel], threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = load()
        self.environment = environment(self.model)
        self.stopped = False

    def ready(self) -> list[Outcome]:
        """Begin a run."""
        self.stopped = False
        return []

    def compute(self, work: Work, group: list[Task], failed: set[str]) -> list[Outcome]:
        if (mine := self.environment["fingerprint"]) != work.fingerprint:
            raise ValueError(
                f"model must be the same on all machines, got weights {mine} on a worker and "
                f"{work.fingerprint} here. "
                "Give all machines the same files."
            )
        benchmark = work.kind(model=self.model, **work.settings)
        maker = Maker(
            benchmark,
            work.methods,
            Store(work.folder),
            failed,
            Timer(None, Cache(), []),
            self.environment,
        )
        return list(InProcess(stop=lambda: self.stopped)(maker, [group]))

    def stop(self) -> None:
        """Finish the task in hand; called while ``compute`` runs."""
        self.stopped = True
