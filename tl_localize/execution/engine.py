"""From a plan to its results: which tasks are missing, who computes them, and what is told of it.
No science.

A benchmark plans tasks and computes one of them. A cache (a folder, or memory) stands in front of
``compute``. An executor decides who computes: this process, one of n shards, or the workers of a
Ray cluster. A record's bits do not depend on who computed it.
"""

from __future__ import annotations

import logging
import re
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from tl_localize.batching import Report, out_of_memory, tokens_that_fit
from tl_localize.execution.environment import (
    behaviour,
    check_plain,
    environment,
    peak_memory,
    reset_peak_memory,
)
from tl_localize.execution.status import Times, blocked
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import Plan, Record, Task, closure
from tl_localize.neurons import LanguageModel, NeuronView

LOG = logging.getLogger(__name__)

Results = TypeVar("Results")
# the fraction of a run that is done, and what is being done
Progress = Callable[[float, str], None]
Methods = Mapping[str, Any]  # label -> method
Groups = Sequence[Sequence[Task]]  # tasks that share needs, one group after the other


@dataclass(frozen=True)
class Outcome:
    """A task was computed, or could not be.

    Args:
        reason: why it could not; empty where it was.

    >>> Outcome(Task("scores", {}, label="activations", name="s0"), 1.5).reason
    ''
    """

    task: Task
    seconds: float
    reason: str = ""


@runtime_checkable
class Executor(Protocol):
    """Who computes."""

    @property
    def shard(self) -> tuple[int, int]: ...

    def __call__(self, run: Run, groups: Groups) -> Iterator[Outcome]: ...


@dataclass(frozen=True)
class InProcess:
    """This process computes, one task after the other.

    Args:
        shard: (i, n): the i-th of n parts of about the same weight, so that n jobs share the work.
        stop: asked after each task; when it says True, the run ends with what is done.

    >>> InProcess(shard=(2, 8)).shard
    (2, 8)
    """

    shard: tuple[int, int] = (1, 1)
    stop: Callable[[], bool] = lambda: False

    def __call__(self, run: Run, groups: Groups) -> Iterator[Outcome]:
        for group in groups:
            for outcome in run.outcomes(group):
                yield outcome
                if self.stop():
                    return


@dataclass(eq=False)
class Run:
    """What computes the tasks of a run in one process.

    Args:
        methods: by label.
        failed: keys of tasks that are not tried; those that fail are added.
        environment: of the model, for the records.
        timer: told when a task begins.
    """

    benchmark: Benchmark[Any]
    methods: Methods
    cache: Cache
    failed: set[str]
    environment: dict[str, Any]
    timer: Timer

    def outcomes(self, group: Sequence[Task]) -> Iterator[Outcome]:
        """Compute a group and what it needs that is not there. Values are held until it ends."""
        held: dict[str, Any] = {}
        waiting = list(reversed(group))
        while waiting:
            task = waiting.pop()
            if task.key in held or self.cache.has(task) or blocked(task, self.failed):
                continue
            lacking = [need for need in task.needs if not self._hold(need, held)]
            if lacking:
                waiting += [task, *reversed(lacking)]
            else:
                yield self._compute(task, held)

    def _hold(self, task: Task, held: dict[str, Any]) -> bool:
        """Read what a task gave, unless it is held; whether it is there."""
        if task.key not in held and (record := self.cache.read(task)):
            held[task.key] = record.value
        return task.key in held

    def _compute(self, task: Task, held: dict[str, Any]) -> Outcome:
        model, needs = self.benchmark.model, [held[need.key] for need in task.needs]
        about = {**self.environment, "batch_tokens": tokens_that_fit(NeuronView(model))}
        self.timer.begin(task)
        reset_peak_memory(model)
        started = time.perf_counter()
        try:
            value = self.benchmark.compute(task, needs, self.methods, self.timer.report)
        except OSError:  # the folder's, not the task's
            raise
        except Exception as error:
            if self.cache.has(task):  # another run has computed it meanwhile
                return Outcome(task, 0.0)
            if isinstance(error, getattr(torch, "AcceleratorError", ())) and not out_of_memory(
                error
            ):
                raise  # after it, this process can compute nothing
            self.failed.add(task.key)
            return Outcome(task, 0.0, self.cache.fail(task, error))
        seconds = time.perf_counter() - started
        about |= {"seconds": seconds, "peak_memory": peak_memory(model)}
        self.cache.write(task, Record(value, about))
        held[task.key] = value
        return Outcome(task, seconds)


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
        progress: Progress | None = None,
        *,
        executor: Executor | None = None,
        retry_failed: bool = False,
    ) -> Results:
        """Compute what is missing, and give the results.

        Args:
            methods: anything that maps (model, sequence) to NeuronScores; its ``map`` is used where
                it has one.
            store: a results folder: what is there is not computed again, a task that fails is
                recorded and the others go on. A ``Cache`` keeps the results of several runs in
                memory; there an error is raised.
            progress: called with the fraction done and what is being done.
            executor: who computes; ``InProcess()`` by default.
            retry_failed: compute again what failed before.

        Raises:
            ValueError: the settings contradict those of the folder, or there are hooks on a model
                whose results are kept.
        """
        executor, cache = executor or InProcess(), store or Cache()
        before = [one.plan for one in cache.plans()]
        labelled, plan = self.labelled(methods), self.plan(methods, before)
        made_with = environment(self.model, plan.settings["fingerprint"])
        self._add_plan(plan, cache, made_with, lasting=store is not None)
        failed = set() if retry_failed else set(cache.failures())
        groups = missing_groups(plan, cache, executor.shard, failed)
        missing = [task for group in groups for task in group]
        if before and missing:
            kept = sum(cache.has(task) for task in plan.tasks)
            LOG.warning("%d of %d results are kept from before.", kept, len(plan.tasks))
        timer = Timer(progress, [task for task in closure(missing) if not cache.has(task)])
        for outcome in executor(Run(self, labelled, cache, failed, made_with, timer), groups):
            timer.done(outcome)
        # a run that was stopped is not done
        if progress and all(cache.has(task) or blocked(task, failed) for task in missing):
            progress(1.0, "done")
        return self.results(cache)

    def _add_plan(
        self, plan: Plan, cache: Cache, made_with: dict[str, Any], *, lasting: bool
    ) -> None:
        """Remember a plan; where results are kept, only of a model and settings that keys name."""
        if lasting:
            check_plain(self.model)
            check_identities(plan)
            made_with = made_with | {"behaviour": behaviour(self.model)}
        cache.add_plan(plan, made_with)


def missing_groups(
    plan: Plan, cache: Cache, shard: tuple[int, int] = (1, 1), failed: Set[str] = frozenset()
) -> list[list[Task]]:
    """What is missing in the groups that fall to one of n shards, whatever is already done.

    Needs of a group are in it where their records are damaged; where there are none, they are
    computed when something needs them.
    """
    found: list[list[Task]] = []
    checked: set[str] = set()
    for group in shares(plan, shard[1])[shard[0] - 1]:
        wanted = {task.key for task in group}
        missing: list[Task] = []
        for task in closure(group, checked):
            expected = task.key in wanted or cache.has(task)
            if expected and not blocked(task, failed) and cache.read(task) is None:
                missing.append(task)
        if missing:
            found.append(missing)
    return found


def shares(plan: Plan, count: int) -> list[list[list[Task]]]:
    """The groups of a plan for each of n shards, so that their weights are about the same: the
    heaviest group first, each to the shard that has the least so far.
    """
    groups: dict[str, list[Task]] = {}
    for task in plan.tasks:
        groups.setdefault(task.group or task.key, []).append(task)
    weights = {name: sum(task.weight for task in closure(group)) for name, group in groups.items()}
    loads = [0.0] * count
    shard_of: dict[str, int] = {}
    for name in sorted(groups, key=lambda name: -weights[name]):
        shard_of[name] = loads.index(min(loads))
        loads[shard_of[name]] += weights[name]
    found: list[list[list[Task]]] = [[] for _ in loads]
    for name, group in groups.items():
        found[shard_of[name]].append(group)
    return found


class Timer:
    """Turns what is done into a fraction, by what tasks of each kind and label took so far, the
    task in hand included.

    Args:
        tasks: what is left to compute.
    """

    def __init__(self, progress: Progress | None, tasks: Sequence[Task]) -> None:
        self.progress, self.times = progress, Times()
        self.left = {task.key for task in tasks}
        # of what is left, by kind and label
        self.weights: defaultdict[tuple[str, str], float] = defaultdict(float)
        for task in tasks:
            self.weights[task.kind, task.label] += task.weight
        self.now: Task | None = None
        self.began = self.spent = self.shown = 0.0

    def begin(self, task: Task) -> None:
        self.now, self.began = task, time.perf_counter()
        self.report(0.0)

    def report(self, fraction: float) -> None:
        """This fraction of the task in hand is done."""
        task = self.now
        if not self.progress or not task:
            return
        rates = {name: self.times.rate(*name, default=1.0) for name in self.weights}
        own = task.kind, task.label
        # the first of its label: what it has taken so far tells the rest
        if fraction and own not in self.times.known:
            rates[own] = (time.perf_counter() - self.began) / fraction / task.weight
        left = sum(weight * rates[name] for name, weight in self.weights.items())
        done = self.spent + fraction * task.weight * rates.get(own, 1.0)
        self.shown = max(self.shown, min(1.0, done / max(self.spent + left, 1e-9)))
        self.progress(self.shown, f"{task.label} on {task.name}")

    def done(self, outcome: Outcome) -> None:
        task = outcome.task
        if task.key in self.left:
            self.left.remove(task.key)
            self.weights[task.kind, task.label] -= task.weight
        self.times.add(task, outcome.seconds)
        self.spent += outcome.seconds
        about = task.label, task.name
        if outcome.reason:
            LOG.warning("FAILED %s on %s: %s", *about, outcome.reason.splitlines()[0])
        else:
            LOG.info("%s on %s: %.2f s, %s", *about, outcome.seconds, task.file)


def check_identities(plan: Plan) -> None:
    """Raise ValueError unless each method and setting can stand in the key of a record."""
    for name, value in (plan.settings | plan.methods).items():
        if isinstance(value, dict) and "only here" in value:
            raise ValueError(
                f"{name} must be a frozen dataclass of plain settings where results are kept, got "
                f"{value['only here'][0]}. Write one, or run without a store."
            )


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/8"`` as (2, 8)."""
    match = re.fullmatch("([0-9]+)/([0-9]+)", text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count:
        raise ValueError(
            f"shard must read i/n with i from 1 to n, got {text!r}. Write 1/4, 2/4, 3/4 and 4/4 "
            "for four jobs."
        )
    return index, count
