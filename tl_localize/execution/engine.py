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
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from tl_localize.batching import Report, out_of_memory
from tl_localize.execution.environment import check_plain, environment, measured
from tl_localize.execution.status import Times, hopeless
from tl_localize.execution.store import Cache, Store
from tl_localize.execution.tasks import Plan, Record, Task, closure
from tl_localize.neurons import LanguageModel

LOG = logging.getLogger(__name__)
# records that a process keeps for the next task: what it needs is often what the task before it
# needed
LAST = 4

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

    def __call__(self, maker: Maker, groups: Groups) -> Iterator[Outcome]: ...


@dataclass(frozen=True)
class InProcess:
    """This process computes, one task after the other.

    Args:
        shard: (i, n): every n-th group of tasks, beginning with the i-th, so that n jobs share the
            work.
        stop: asked after each task; when it says True, the run ends with what is done.

    >>> InProcess(shard=(2, 8)).shard
    (2, 8)
    """

    shard: tuple[int, int] = (1, 1)
    stop: Callable[[], bool] = lambda: False

    def __call__(self, maker: Maker, groups: Groups) -> Iterator[Outcome]:
        for task in (task for group in groups for task in group):
            for outcome in maker.outcomes(task):
                yield outcome
                if self.stop():
                    return


@dataclass(eq=False)
class Maker:
    """Computes tasks of a run in this process, what they need first.

    Args:
        methods: by label.
        failed: keys of tasks that are not tried; those that fail are added.
        environment: of the model, for the records.
    """

    benchmark: Benchmark[Any]
    methods: Methods
    cache: Cache
    failed: set[str]
    watch: Timer
    environment: dict[str, Any]
    last: OrderedDict[str, Record] = field(default_factory=OrderedDict[str, Record], init=False)

    def outcomes(self, task: Task) -> Generator[Outcome, None, Record | None]:
        """What becomes of a task and of those that it needs and that are not there. Returns its
        record, None where there is none.
        """
        record = self.last.pop(task.key, None)
        if record is None and task.key not in self.failed:
            record = self.cache.read(task)
            if record is None:
                needs: list[Record] = []
                for need in task.needs:
                    found = yield from self.outcomes(need)
                    if found is None:
                        return None
                    needs.append(found)
                record, outcome = self._computed(task, needs)
                yield outcome
        if record is not None:
            self.last[task.key] = record
            while len(self.last) > LAST:
                self.last.popitem(last=False)
        return record

    def _computed(self, task: Task, needs: list[Record]) -> tuple[Record | None, Outcome]:
        self.watch.begin(task)
        try:
            record, about = measured(
                self.benchmark.model,
                lambda: self.benchmark.compute(task, needs, self.methods, self.watch.within),
            )
        except OSError:  # the folder's, not the task's
            raise
        except Exception as error:
            if isinstance(error, getattr(torch, "AcceleratorError", ())) and not out_of_memory(
                error
            ):
                raise  # after it, this process can compute nothing
            self.failed.add(task.key)
            return None, Outcome(task, 0.0, self.cache.fail(task, error))
        record = Record(record.value, record.tensors, {**self.environment, **about, **record.about})
        self.cache.write(task, record)
        return record, Outcome(task, about["seconds"])


class Benchmark(ABC, Generic[Results]):
    """What INJ, DEL and collection share: a frozen dataclass with a ``model`` that plans tasks,
    computes one, and reads results.

    ``run`` is the only way in: from Python, the command line, shards and Ray.

    >>> benchmark = InjBenchmark(model=model, sequences=few[:1], ratio=0.02, max_steps=2)
    >>> sorted({task.kind for task in closure(benchmark.plan([Activations()]).tasks)})
    ['inj', 'injections', 'scores']
    """

    model: LanguageModel

    @abstractmethod
    def plan(self, methods: Sequence[Any]) -> Plan:
        """The tasks of a run. It costs no forward pass."""

    @abstractmethod
    def compute(
        self, task: Task, needs: Sequence[Record], methods: Methods, report: Report
    ) -> Record:
        """One task, from the records of what it needs; it depends on nothing else, so any process
        may compute it at any time.
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
        store: Store | None = None,
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
                recorded and the others go on. Without one nothing is kept, and an error is raised.
            progress: called with the fraction done and what is being done.
            executor: who computes; ``InProcess()`` by default.
            retry_failed: compute again what failed before.

        Raises:
            ValueError: the settings contradict those of the folder, or there are hooks on a model
                whose results are kept.
        """
        executor = executor or InProcess()
        labelled, plan = self.labelled(methods), self.plan(methods)
        cache = Cache() if store is None else store
        if store is not None:
            check_plain(self.model)
            check_named(plan)
        made_with = environment(self.model, plan.settings["fingerprint"])
        cache.add_plan(plan, made_with)
        failed = set() if retry_failed else set(cache.failures())
        groups = missing_groups(plan, cache, executor.shard, failed)
        watch = Timer(progress, cache, [task for group in groups for task in group])
        for outcome in executor(Maker(self, labelled, cache, failed, watch, made_with), groups):
            watch.done(outcome)
        watch.end(failed)
        return self.results(cache)


def missing_groups(
    plan: Plan, cache: Cache, shard: tuple[int, int] = (1, 1), failed: Set[str] = frozenset()
) -> list[list[Task]]:
    """What is missing in the groups that fall to one of n shards: every n-th of them, whatever is
    already done.

    Needs of a group are in it where their records are damaged; where there are none, they are
    computed when something needs them.
    """
    index, count = shard

    def missing(task: Task, own: bool) -> bool:
        return not hopeless(task, failed) and (own or cache.has(task)) and cache.read(task) is None

    groups: dict[str, list[Task]] = {}
    for task in plan.tasks:
        groups.setdefault(task.group or task.key, []).append(task)
    mine = list(groups.values())[index - 1 :: count]
    wanted = {task.key for group in mine for task in group}
    seen = set[str]()
    found = [
        [task for task in closure(group, seen) if missing(task, task.key in wanted)]
        for group in mine
    ]
    return [group for group in found if group]


class Timer:
    """Turns what is done into a fraction, by what tasks of each kind and label took so far, the
    task in hand included.
    """

    def __init__(self, progress: Progress | None, cache: Cache, tasks: Sequence[Task]) -> None:
        self.progress, self.cache, self.times = progress, cache, Times()
        self.left = (
            {task.key: task for task in closure(tasks) if not cache.has(task)} if progress else {}
        )
        # of what is left, by kind and label
        self.weights: defaultdict[tuple[str, str], float] = defaultdict(float)
        for task in self.left.values():
            self.weights[task.kind, task.label] += task.weight
        self.now: Task | None = None
        self.began = self.spent = self.shown = 0.0

    def begin(self, task: Task) -> None:
        self.now, self.began = task, time.perf_counter()
        self.within(0.0)

    def within(self, fraction: float) -> None:
        """The task in hand is so far."""
        if self.progress and self.now:
            name, own = (
                (self.now.kind, self.now.label),
                self.times.rate(self.now.kind, self.now.label, 1.0),
            )
            # the first of its label: what it has taken so far tells the rest
            if fraction and name not in self.times.known:
                own = (time.perf_counter() - self.began) / fraction / self.now.weight
            left = sum(
                weight * (own if which == name else self.times.rate(*which, 1.0))
                for which, weight in self.weights.items()
            )
            done = self.spent + fraction * self.now.weight * own
            self.shown = max(self.shown, min(1.0, done / max(self.spent + left, 1e-9)))
            self.progress(self.shown, f"{self.now.label} on {self.now.name}")

    def done(self, outcome: Outcome) -> None:
        task = outcome.task
        if self.left.pop(task.key, None):
            self.weights[task.kind, task.label] -= task.weight
        self.times.add(task, outcome.seconds)
        self.spent += outcome.seconds
        if outcome.reason:
            LOG.warning(
                "FAILED %s on %s: %s", task.label, task.name, outcome.reason.splitlines()[0]
            )
        else:
            LOG.info("%s on %s: %.2f s, %s", task.label, task.name, outcome.seconds, task.file)

    def end(self, failed: set[str]) -> None:
        """Nothing more is computed; a run that was stopped is not done."""
        if self.progress and all(
            self.cache.has(task) or hopeless(task, failed) for task in self.left.values()
        ):
            self.progress(1.0, "done")


def check_named(plan: Plan) -> None:
    """Raise ValueError unless the repr of each method and ablation can stand for it in the key of a
    record.
    """
    for text in (
        *plan.methods.values(),
        *(value for value in plan.settings.values() if isinstance(value, str)),
    ):
        if " at 0x" in text:
            raise ValueError(
                "methods and ablations must have a repr that names all their settings, got "
                f"{text}. Write a frozen dataclass, or run "
                "without a store."
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
