"""From a plan to its results: which tasks are missing, who computes them, and what is told of it.
No science.

A benchmark plans tasks and computes one of them. A cache (a folder, or memory) stands in front of
``compute``. An executor decides who computes: this process, one of n shards, or the workers of a
Ray cluster. A record's bits do not depend on who computed it.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from tqdm import auto, tqdm

from tl_localize.batching import Report, out_of_memory
from tl_localize.execution.environment import behaviour, environment
from tl_localize.execution.store import Cache, blocked
from tl_localize.execution.tasks import Json, Plan, Record, Task, closure
from tl_localize.neurons import LanguageModel

LOG = logging.getLogger(__name__)
# how far a run is, where there is no terminal; the commands show it
TOLD = logging.getLogger("tl_localize.progress")

Results = TypeVar("Results")
# the fraction of a run that is done, and what is being done
Progress = Callable[[float, str], None]
Methods = Mapping[str, Any]  # label -> method
Groups = Sequence[Sequence[Task]]  # tasks that share needs, one group after the other
Shard = tuple[int, int]  # (i, n): the i-th of n parts
BAR = "{l_bar}{bar}| {elapsed} elapsed{postfix}"
EVERY = 30.0  # seconds between two lines of a run that no terminal shows


@dataclass(frozen=True)
class Outcome:
    """A task was computed, or could not be.

    Args:
        reason: why it could not; empty where it was.

    >>> Outcome(Task("scores", {}, label="activations", name="s0")).reason
    ''
    """

    task: Task
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class InProcess:
    """Who computes: this process, one task after the other.

    Args:
        shard: (i, n): the i-th of n parts of about the same weight, so that n jobs share the work.

    >>> InProcess(shard=(2, 8)).shard
    (2, 8)
    """

    shard: Shard = (1, 1)

    def __call__(self, run: "Run", groups: Groups) -> Iterator[Outcome]:
        for group in groups:
            yield from run.outcomes(group)


class Pace:
    """How long the tasks of a run take, and so the time that is left.

    Args:
        tasks: those that are left to compute.

    >>> tasks = [Task("scores", {"of": text}, label="slimming", weight=8) for text in "ab"]
    >>> pace = Pace(tasks)
    >>> pace.left(2.0) is None  # nothing is known yet
    True
    >>> pace.add(tasks[0], 3.0)
    >>> pace.left(2.0)  # the second takes as long, and two seconds of it are over
    1.0
    """

    def __init__(self, tasks: Sequence[Task] = ()) -> None:
        # of each kind of task and label: the weight that is left, that is done, and its seconds
        self.weights: dict[tuple[str, str], float] = {}
        self.done: dict[tuple[str, str], float] = {}
        self.seconds: dict[tuple[str, str], float] = {}
        for task in tasks:
            self._count(self.weights, task, task.weight)

    def _count(self, counts: dict[tuple[str, str], float], task: Task, value: float) -> None:
        counts[task.kind, task.label] = counts.get((task.kind, task.label), 0.0) + value

    def add(self, task: Task, seconds: float) -> None:
        """A task is done, or has failed, so many seconds after the one before it."""
        self._count(self.weights, task, -task.weight)
        self._count(self.done, task, task.weight)
        self._count(self.seconds, task, seconds)

    def left(self, since: float) -> float | None:
        """The seconds that are left, so many after the last task was done; None where there is no
        basis for a number.

        Tasks of a label that ran take as long as it took. Other labels of the same kind count by
        their weight, as long as more of the kind is done than is left of them.
        """
        total = 0.0
        for kind in {kind for kind, _ in self.weights}:
            done = sum(value for (of, _), value in self.done.items() if of == kind)
            seconds = sum(value for (of, _), value in self.seconds.items() if of == kind)
            unknown = 0.0
            for key, weight in self.weights.items():
                if key[0] == kind and key in self.done:
                    total += weight * self.seconds[key] / self.done[key]
                elif key[0] == kind:
                    unknown += weight
            if unknown > done:
                return None
            total += unknown * seconds / done if unknown else 0.0
        return max(0.0, total - since)


@dataclass(eq=False)
class Run:
    """What computes the tasks of a run in one process.

    Args:
        methods: by label.
        failed: keys of tasks that are not tried; those that fail are added.
        environment: of the model, for the records.
        weight: of all tasks that are left to compute.
        done: weight of the tasks that are done.
        pace: how long tasks take.
        last: when the last task was done.
    """

    benchmark: "Benchmark[Any]"
    methods: Methods
    cache: Cache
    failed: set[str]
    environment: Json
    progress: Progress | None = None
    weight: float = 1.0
    done: float = 0.0
    pace: Pace = field(default_factory=Pace)
    last: float = field(default_factory=time.perf_counter)

    def outcomes(self, group: Sequence[Task]) -> Iterator[Outcome]:
        """Compute a group and what it needs that is not there. Values are held until it ends."""
        held: dict[str, Any] = {}
        for task in closure(one for one in group if not blocked(one, self.failed)):
            if blocked(task, self.failed):  # by now
                continue
            if record := self.cache.read(task):
                held[task.key] = record.value
            else:
                yield self._compute(task, held)

    def _compute(self, task: Task, held: Json) -> Outcome:
        needs = [held[need.key] for need in task.needs]
        self.report(task, 0.0)
        started = time.perf_counter()
        try:
            value = self.benchmark.compute(task, needs, self.methods, partial(self.report, task))
        except OSError:  # the folder's, not the task's
            raise
        except Exception as error:
            gone = isinstance(error, getattr(torch, "AcceleratorError", ()))
            if gone and not out_of_memory(error):
                raise  # after it, this process can compute nothing
            self.failed.add(task.key)
            return Outcome(task, self.cache.fail(task, error))
        held[task.key] = value
        seconds = time.perf_counter() - started
        self.cache.write(task, Record(value, self.environment | {"seconds": seconds}))
        return Outcome(task)

    def report(self, task: Task, fraction: float, what: str = "") -> None:
        """Tell that this fraction of a task is done, and what was just done in it."""
        if self.progress:
            share = (self.done + fraction * task.weight) / self.weight
            more = f": {what}" if what else ""
            self.progress(min(1.0, share), f"{task.label} on {task.name}{more}")

    def time_left(self) -> float | None:
        """The seconds that are left of the run; None where nobody can know."""
        return self.pace.left(time.perf_counter() - self.last)

    def tell(self, outcome: Outcome) -> None:
        """Tell that a task is done, or has failed."""
        task = outcome.task
        self.report(task, 1.0)
        self.done += task.weight
        now = time.perf_counter()
        self.pace.add(task, now - self.last)
        self.last = now
        if outcome.reason:
            reason = outcome.reason.splitlines()[0]
            LOG.warning("FAILED %s on %s: %s", task.label, task.name, reason)
        else:
            LOG.info("%s on %s: %s", task.label, task.name, task.file)


class Benchmark(ABC, Generic[Results]):
    """What INJ, DEL and collection share: a frozen dataclass with a ``model`` that plans tasks,
    computes one, and reads results.

    ``run`` is the only way in: from Python, the command line, shards and Ray.

    >>> benchmark = InjBenchmark(model, few[:1], ratio=0.02, max_steps=2)
    >>> sorted({task.kind for task in closure(benchmark.plan([Activations()]).tasks)})
    ['inj', 'injections', 'scores']
    """

    model: LanguageModel

    @abstractmethod
    def plan(self, methods: Sequence[Any], before: Sequence[Plan] = ()) -> Plan:
        """The tasks of a run. It costs no forward pass.

        Args:
            before: the plans that its folder has.
        """

    @abstractmethod
    def compute(self, task: Task, needs: Sequence[Any], methods: Methods, report: Report) -> Any:
        """One task, from the values of what it needs: rows as JSON takes them, or an object that
        can be saved, such as an injection. It depends on nothing else, so any process may
        compute it at any time.
        """

    @abstractmethod
    def results(self, cache: Cache) -> Results:
        """Everything that the plans of a cache have so far."""

    def labelled(self, methods: Sequence[Any]) -> Methods:
        """The methods of a run, controls among them, by the label that they have in tables."""
        return {}

    def run(
        self,
        methods: Sequence[Any] = (),
        store: Cache | None = None,
        progress: Progress | bool = True,
        *,
        executor: InProcess | None = None,
        retry_failed: bool = False,
    ) -> Results:
        """Compute what is missing, and give the results.

        Args:
            methods: anything that maps (model, sequence) to NeuronScores; its ``map`` is used where
                it has one.
            store: a results folder: what is there is not computed again, a task that fails is
                recorded and the others go on. A ``Cache`` keeps the results of several runs in
                memory; there an error is raised.
            progress: a bar in a notebook or on a terminal; ``False`` for none; or what is called
                with the fraction done and what is being done.
            executor: who computes; ``InProcess()`` by default.
            retry_failed: compute again what failed before.

        Raises:
            ValueError: the settings contradict those of the folder, or the model computes something
                else than when the folder was made.
        """
        executor, cache = executor or InProcess(), store or Cache()
        before = [one.plan for one in cache.plans()]
        labelled, plan = self.labelled(methods), self.plan(methods, before)
        made_with = environment(self.model, plan.settings["fingerprint"])
        probed: Json = {}
        if store is not None:  # keys and fingerprint must name all that numbers depend on
            for name, value in (plan.settings | plan.methods).items():
                if isinstance(value, dict) and "only here" in value:
                    raise ValueError(
                        f"{name} must be a frozen dataclass of plain settings where results are "
                        f"kept, got {value['only here'][0]}. Write one, or run without a store."
                    )
            probed["behaviour"] = behaviour(self.model)
        cache.add_plan(plan, made_with | probed)
        failed = set() if retry_failed else set(cache.failures())
        groups = missing_groups(plan, cache, executor.shard, failed)
        missing = [task for group in groups for task in group]
        if before:
            kept = sum(cache.has(task) for task in plan.tasks)
            LOG.warning("%d of %d results are kept from before.", kept, len(plan.tasks))
        left = [task for task in closure(missing) if not cache.has(task)]
        weight = sum(task.weight for task in left)
        run = Run(self, labelled, cache, failed, made_with, None, weight, pace=Pace(left))
        bar = progress_bar(run.time_left) if progress is True else nullcontext(progress or None)
        with bar as report:
            run.progress = report
            for outcome in executor(run, groups):
                run.tell(outcome)
            # a run that was stopped is not done
            if report and all(cache.has(task) or blocked(task, failed) for task in missing):
                report(1.0, "done")
        return self.results(cache)


@contextmanager
def progress_bar(
    time_left: Callable[[], float | None] | None = None,
) -> Iterator[Callable[..., None]]:
    """A bar in a notebook or on a terminal: what is called with the fraction that is done and with
    what is being done. Elsewhere a line of the log now and then.

    Args:
        time_left: the seconds that are left, or None while nobody can know; by default what the
            fraction says.
    """
    # None: a notebook shows it always, else a terminal alone
    bar: tqdm[Any] = auto.tqdm(total=1.0, bar_format=BAR, smoothing=0, disable=None)
    started = told = time.perf_counter()

    def advance(fraction: float, what: str = "") -> None:
        nonlocal told
        now = time.perf_counter()
        if bar.disable and now - told < EVERY:
            return
        left = time_left() if time_left else (now - started) * (1 / max(fraction, 1e-9) - 1)
        parts = [what] if left is None else [f"{tqdm.format_interval(left)} left", what]
        state = ", ".join(part for part in parts if part)
        if bar.disable:
            told = now
            elapsed = tqdm.format_interval(now - started)
            TOLD.info("%.0f %%, %s elapsed, %s", 100 * fraction, elapsed, state)
        bar.set_postfix_str(state, refresh=False)
        bar.update(fraction - bar.n)

    with bar:
        yield advance


def missing_groups(
    plan: Plan, cache: Cache, shard: Shard = (1, 1), failed: Set[str] = frozenset()
) -> list[list[Task]]:
    """What is missing in the groups that fall to one of n shards, whatever is already done.

    Needs of a group are in it where their records are damaged; where there are none, they are
    computed when something needs them.
    """
    groups: dict[str, list[Task]] = {}
    for task in plan.tasks:
        groups.setdefault(task.group or task.key, []).append(task)
    wanted = {task.key for task in plan.tasks}

    def lacking(task: Task) -> bool:
        expected = task.key in wanted or cache.has(task)
        return expected and not blocked(task, failed) and cache.read(task) is None

    checked: set[str] = set()
    own = shares(list(groups.values()), shard[1])[shard[0] - 1]
    found = [list(filter(lacking, closure(group, checked))) for group in own]
    return [group for group in found if group]


def shares(groups: Groups, count: int) -> list[Groups]:
    """Groups in so many parts of about the same weight: the heaviest group first, each to the part
    that has the least so far.
    """
    weights = [sum(task.weight for task in closure(group)) for group in groups]
    loads = [0.0] * count
    parts: list[list[int]] = [[] for _ in loads]
    for i in sorted(range(len(groups)), key=lambda i: -weights[i]):
        least = loads.index(min(loads))
        loads[least] += weights[i]
        parts[least].append(i)
    return [[groups[i] for i in sorted(part)] for part in parts]
