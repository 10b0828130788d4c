"""Who makes which units: this process, one of several array jobs, or the workers of a Ray cluster. There is no science in it.

All write to one results folder, and a unit's bits don't depend on who made it, so any of them can take over from any other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tl_localize.neurons import LanguageModel
from tl_localize.runs import Event, Run, Work
from tl_localize.runs.base import Begun
from tl_localize.execution.store import Store, Unit

ATTEMPTS = 3  # deaths of a worker over one unit before the unit is recorded as failed
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Step:
    """Measurements that one part waits for.

    Args:
        run: index of the run.
    """

    run: int
    work: Work
    labels: list[str]


Job = list[Step]  # what one process does, one after the other, because it shares what is computed on the way


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/8"`` as (2, 8)."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(f"shard must read i/n with i from 1 to n, got {text!r}. Write 1/4, 2/4, 3/4 and 4/4 for four jobs.")
    return int(index), int(count)


def jobs(runs: Sequence[Run], shard: tuple[int, int] = (1, 1)) -> list[Job]:
    """What is missing in the groups of parts that fall to one of n shards; every n-th of them, whatever is already done.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Attribution, InjBenchmark, MemorizedSequence, load_model
    >>> from tl_localize.execution.distributed import jobs
    >>> from tl_localize.runs import InjRun
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = InjRun(Store(Path(folder)), benchmark, [Attribution()])
    ...     [step.labels for job in jobs([run]) for step in job], jobs([run], shard=(2, 2))
    ([['attribution', 'random', 'row_norm']], [])
    """
    index, count = shard
    groups: dict[str, list[tuple[int, Work]]] = {}
    for r, run in enumerate(runs):
        for work in run.works:
            groups.setdefault(work.group, []).append((r, work))
    mine = list(groups.values())[index - 1 :: count]
    found = [[Step(r, work, labels) for r, work in group if (labels := runs[r].missing(work))] for group in mine]
    return [job for job in found if job]


def in_process(
    runs: Sequence[Run], todo: Sequence[Job], stop: Stop = lambda: False, begun: Begun = lambda label, name: None
) -> Iterator[Event]:
    """Make the units here, one after the other, until there are none or ``stop`` says so; ``begun`` is told of each before it is made.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Attribution, InjBenchmark, MemorizedSequence, load_model
    >>> from tl_localize.execution.distributed import in_process, jobs
    >>> from tl_localize.runs import InjRun, inj_results
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = InjRun(Store(Path(folder)), benchmark, [Attribution()])
    ...     [event.label for event in in_process([run], jobs([run]))], inj_results(run.store)
    (['inject', 'attribution', 'random', 'row_norm'], InjResults(1 sequences x 3 methods, injection ratio 2 %))
    """
    for job in todo:
        for step in job:
            for event in runs[step.run].make(step.work, step.labels, begun):
                yield event
                if stop():
                    return


def by_ray(
    runs: Sequence[Run],
    todo: Sequence[Job],
    load: Callable[[], LanguageModel],
    stop: Stop = lambda: False,
    begun: Begun = lambda label, name: None,
    *,
    address: str | None = None,
    workers: int | None = None,
    gpus: float | None = None,
) -> Iterator[Event]:
    """Make the units by actors of a Ray cluster, each of which loads the model once.

    A worker that dies, with its machine or without, gives its job back, and another one is hired. Dies this process, then the same
    command goes on from what is in the folder, which all machines must see under the same path.

    Args:
        load: gives the model, on the machine where it is called.
        begun: is told of the first unit of each job that a worker takes.
        address: of a cluster that is there; by default one is started on this machine.
        workers: by default as many as the cluster has room for.
        gpus: for each worker, also a fraction; by default one where there are GPUs. Without GPUs a worker gets as many cores as this
            process has threads, because results differ in the last digits between numbers of threads.
    Raises:
        ImportError: Ray is not installed.

    >>> from functools import partial
    >>> from tl_localize import load_model
    >>> from tl_localize.execution.distributed import by_ray, jobs
    >>> for event in by_ray([run], jobs([run]), partial(load_model, "reference"), workers=2):  # doctest: +SKIP
    ...     print(event.label, event.name)
    """
    ray = import_ray()
    if not todo:
        return
    if not ray.is_initialized():
        ray.init(address=address or "local", log_to_driver=False, include_dashboard=False)
    there = ray.cluster_resources()
    gpus = gpus if gpus is not None else float(there.get("GPU", 0) > 0)
    threads = torch.get_num_threads()
    room = there.get("GPU", 0) / gpus if gpus else there.get("CPU", 1) / threads
    options = {"num_gpus": gpus, "num_cpus": 1 if gpus else threads, "max_concurrency": 2}
    hire = ray.remote(Worker).options(**options)
    arguments = (load, [Recipe.of(run) for run in runs], threads)
    waiting, deaths = deque(todo), Counter[str]()  # deaths by the unit that was in hand
    busy: dict[Any, tuple[Any, Job | None]] = {}  # what was asked for -> of whom, for which job; None is getting ready

    def engage() -> None:
        worker: Any = hire.remote(*arguments)
        busy[worker.ready.remote()] = (worker, None)

    for _ in range(min(workers or max(1, int(room)), len(todo))):
        engage()
    stopped = False
    while any(job for _, job in busy.values()) or (waiting and not stopped):
        if stop() and not stopped:
            stopped = True
            for worker, job in busy.values():
                if job:
                    worker.stop.remote()
        ready, _ = ray.wait(list(busy), timeout=0.5)
        for reference in ready:
            worker, job = busy.pop(reference)
            try:
                events: list[Event] = ray.get(reference)
            except ray.exceptions.RayActorError as error:
                unit = in_hand(runs, job or [])
                deaths[unit.key if unit else ""] += 1
                if unit and job and deaths[unit.key] == ATTEMPTS:
                    job, event = without(runs, job, unit, error)
                    yield event
                elif deaths[""] == ATTEMPTS:
                    reason = str(error).strip().splitlines()[-1]
                    raise ValueError(f"worker must be able to start and load the model, got {reason} {ATTEMPTS} times.") from error
                if job:
                    waiting.appendleft(job)
                if not stopped:
                    engage()
                continue
            except ray.exceptions.RayTaskError as error:  # its text is a traceback, the cause's is a sentence
                raise error.cause from error
            yield from events
            if waiting and not stopped:
                job = waiting.popleft()
                busy[worker.make.remote(job)] = (worker, job)
                begun(job[0].labels[0], job[0].work.name)
            else:
                ray.kill(worker)
    for worker, _ in busy.values():
        ray.kill(worker)


def in_hand(runs: Sequence[Run], job: Job) -> Unit | None:
    """The first unit of a job that is not there: what a worker died over."""
    for step in job:
        others = [unit for label, unit in step.work.measures.items() if label not in step.labels]
        for unit in step.work.units:
            if unit not in others and not runs[step.run].store.has(unit):
                return unit
    return None


def without(runs: Sequence[Run], job: Job, unit: Unit, error: Exception) -> tuple[Job, Event]:
    """A job without a unit that is given up, and what waits for it; that it failed is recorded."""
    step = next(step for step in job if unit in step.work.units)
    event = runs[step.run].give_up(step.work, unit, error)
    rest = [Step(s.run, s.work, [label for label in s.labels if s.work.measures[label] != unit]) for s in job if s.work.base != unit]
    return [step for step in rest if step.labels], event


def import_ray() -> Any:
    """Ray, which is an extra."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError("engine 'ray' needs Ray: pip install 'tl_localize[ray]'. Without it, --engine process does the same.") from error


@dataclass(frozen=True, eq=False)
class Recipe:
    """A run without its model, which every worker has its own of."""

    kind: type[Run]
    folder: Path
    benchmark: Callable[..., Any]
    settings: dict[str, Any]
    others: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> Recipe:
        settings = {f.name: getattr(run.benchmark, f.name) for f in fields(run.benchmark) if f.name != "model"}
        others = {f.name: getattr(run, f.name) for f in fields(run) if f.init and f.name not in ("store", "benchmark")}
        return cls(type(run), run.store.folder.resolve(), type(run.benchmark), settings, others)

    def run(self, model: LanguageModel) -> Run:
        """The same run with a worker's model; a model of other weights is refused, because its plan contradicts the folder's."""
        return self.kind(Store(self.folder), self.benchmark(model=model, **self.settings), **self.others)


class Worker:
    """An actor: holds the model, makes units."""

    def __init__(self, load: Callable[[], LanguageModel], recipes: Sequence[Recipe], threads: int) -> None:
        torch.set_num_threads(threads)
        model = load()
        self.runs = [recipe.run(model) for recipe in recipes]
        self.stopped = False

    def ready(self) -> list[Event]:
        return []

    def make(self, job: Job) -> list[Event]:
        return list(in_process(self.runs, [job], lambda: self.stopped))

    def stop(self) -> None:
        """Finish the unit in hand; called while ``make`` runs."""
        self.stopped = True
