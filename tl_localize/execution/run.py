"""Benchmarks as resumable runs: what is missing is computed by this process, one of n shards, or a
Ray cluster. No science.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

from tqdm import auto, tqdm

from tl_localize.checks import check_count
from tl_localize.execution.store import Progress, ProgressError, Row, Settings, Steps
from tl_localize.model.environment import environment
from tl_localize.model.neurons import LanguageModel, ModelView

LOG = logging.getLogger(__name__)
# how far a run is, where there is no terminal; the commands show it
TOLD = logging.getLogger("tl_localize.progress")
EVERY = 30.0  # seconds between two such lines

Results = TypeVar("Results")
Methods = Mapping[str, Any]  # label -> method
Shard = tuple[int, int]  # (i, n): the i-th of n parts
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} {elapsed} elapsed, {remaining} left{postfix}"
BAR_OF_ONE = BAR.replace("{n_fmt}/{total_fmt} ", "")  # it moves within its one cell


class Cluster(Protocol):
    """Other processes that compute groups; ``RayCluster`` is one."""

    def start(self) -> int:
        """How many workers will compute, each a group at a time."""
        ...

    def __call__(
        self, benchmark: "Benchmark[Any]", groups: Sequence[Any], methods: Methods, steps: Steps
    ) -> None: ...


class Benchmark(ABC, Generic[Results]):
    """What INJ, DEL, REV and the search of a corpus share: a frozen dataclass with a ``model``, and
    ``run``.

    A subclass says what can be computed apart (``groups``), how (``rows``: a plain loop, each step
    of which is remembered by ``steps``), and how results are read.

    >>> benchmark = InjBenchmark(model, few[:1], ratio=0.02, max_steps=2)
    >>> methods, steps = {"activations": Activations()}, Steps()
    >>> steps.agree(benchmark.settings(methods))
    >>> [row["multiple"] for row in benchmark.rows(benchmark.groups()[0], methods, steps)]
    [1, 2, 5]
    """

    model: LanguageModel

    @abstractmethod
    def groups(self, parts: int = 1) -> Sequence[Any]:
        """What can be computed apart, in any order and on any machine: at least ``parts`` groups,
        where there are so many.
        """

    @abstractmethod
    def rows(self, group: Any, methods: Methods, steps: Steps) -> Iterator[Row]:
        """The rows of the tables of one group. Each step is remembered, so those that were computed
        before cost nothing.
        """

    @abstractmethod
    def settings(self, methods: Methods) -> Settings:
        """What a run is asked for, and what all runs into one folder must agree on. It costs one
        short forward pass.
        """

    @abstractmethod
    def results(self, steps: Steps) -> Results:
        """Everything that was computed so far."""

    def label(self, methods: Sequence[Any]) -> Methods:
        """The methods of a run, controls among them, by the label that they have in tables."""
        return {}

    def run(
        self,
        methods: Sequence[Any] = (),
        store: Steps | None = None,
        progress: Progress | bool = True,
        *,
        shard: Shard = (1, 1),
        cluster: Cluster | None = None,
    ) -> Results:
        """Compute what is missing, and give the results.

        Args:
            methods: anything that maps (model, sequence) to NeuronScores; where it has one, its
                ``map(model, sequences, progress=...)`` is used.
            store: a results folder: what is there is not computed again, a cell that fails is
                recorded, the others go on, and the next run tries it again. ``Steps()`` keeps the
                rows of several runs in memory; there an error is raised.
            progress: a bar in a notebook or on a terminal; ``False`` for none; or what is called
                with the fraction done and what is being done.
            shard: (i, n): compute the i-th of n parts, so that n jobs share the work.
            cluster: who computes in place of this process.

        Raises:
            TypeError: the store is a folder's name.
            ValueError: the settings contradict those of the folder, or the model computes something
                else than when the folder was made.
        """
        if not isinstance(store, Steps | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"store must be a Store, got {type(store).__name__}. Pass store=Store(folder)."
            )
        check_shard(shard)
        ModelView(self.model)  # raises where dropout is active, before anything is kept
        labelled = self.label(methods)
        steps = Steps() if store is None else store
        steps.environment = environment(self.model)
        settings = self.settings(labelled)
        steps.agree(settings)
        index, count = shard
        groups = self.groups(count * (cluster.start() if cluster else 1))
        own = groups[index - 1 :: count]
        n_cells = round(len(settings.cells()) * len(own) / max(1, len(groups)))
        with show_progress(steps, n_cells, progress):
            if cluster is not None:
                cluster(self, own, labelled, steps)
            else:
                for group in own:
                    for _ in self.rows(group, labelled, steps):
                        pass
        return self.results(steps)


def check_shard(shard: Shard) -> None:
    """ValueError unless this is a pair and the i-th of n parts is there."""
    try:
        index, count = shard
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"shard must be two numbers, got {shard!r}. Write (1, 3) for the first of three."
        ) from error
    check_count(shard=index)
    check_count(shard=count)
    if index > count:
        raise ValueError(
            f"shard must be one of its parts, got {shard}. Write (1, 3) for the first of three."
        )


def show_progress(
    steps: Steps, n_cells: int, progress: Progress | bool
) -> AbstractContextManager[None]:
    """Inside the block the cells that are done are counted and shown."""
    if progress is True:
        return _show_on_a_bar(steps, n_cells)
    return _call_progress(steps, n_cells, progress) if progress else nullcontext()


@contextmanager
def _show_on_a_bar(steps: Steps, n_cells: int) -> Iterator[None]:
    counter = BarCounter(n_cells)
    with counter.bar, _reporting_to(steps, counter.report, counter.finish_cell):
        yield


class BarCounter:
    """Shows how much of a run is done: a bar; where no terminal shows it, a line of the log now and
    then.
    """

    def __init__(self, n_cells: int) -> None:
        # disable=None: a notebook shows it always, else a terminal alone
        form = BAR_OF_ONE if n_cells == 1 else BAR
        self.bar: tqdm[Any] = auto.tqdm(total=n_cells, bar_format=form, smoothing=0, disable=None)
        self.n_cells = n_cells
        self.n_done = 0
        self.told_at = time.monotonic()

    def report(self, fraction: float, what: str) -> None:
        state = f"{what}: {fraction:.0%}" if fraction else what
        if self.n_cells == 1 and not self.bar.disable:
            self.bar.n = max(self.bar.n, fraction)  # so that the time that is left is known
        self.bar.set_postfix_str(state)
        if self.bar.disable and time.monotonic() - self.told_at >= EVERY:
            self.told_at = time.monotonic()
            TOLD.info("%d of %d done; %s", self.n_done, self.n_cells, state)

    def finish_cell(self, was_there: bool) -> None:
        self.n_done += 1
        if was_there and not self.bar.disable:
            self.bar.initial += 1  # it takes no part in the time that is left
        self.bar.update(self.n_done - self.bar.n)


@contextmanager
def _call_progress(steps: Steps, n_cells: int, progress: Progress) -> Iterator[None]:
    counter = Counter(n_cells, progress)
    with _reporting_to(steps, counter.report, counter.finish_cell):
        yield
    counter.tell(1.0, "done")


class Counter:
    """Tells how much of a run is done. A cell may do several things one after the other, each of
    which starts at zero; what is told never falls.
    """

    def __init__(self, n_cells: int, progress: Progress) -> None:
        self.n_cells = max(1, n_cells)
        self.progress = progress
        self.n_done = 0
        self.told = 0.0
        self.doing = ""

    def report(self, fraction: float, what: str) -> None:
        self.doing = what
        self.tell((self.n_done + min(fraction, 0.99)) / self.n_cells, what)

    def finish_cell(self, was_there: bool) -> None:
        self.n_done += 1
        self.tell(self.n_done / self.n_cells, self.doing)

    def tell(self, fraction: float, what: str) -> None:
        self.told = max(self.told, min(1.0, fraction))
        try:
            self.progress(self.told, what)
        except Exception as error:
            raise ProgressError(
                "progress must take a fraction and what is being done, and raise nothing, got "
                f"{type(error).__name__}: {error}. Mend it; what is done is kept."
            ) from error


@contextmanager
def _reporting_to(
    steps: Steps, report: Callable[[float, str], None], finish_cell: Callable[[bool], None]
) -> Iterator[None]:
    """Steps tell what they do inside the block."""
    before = steps.report, steps.finish_cell
    steps.report, steps.finish_cell = report, finish_cell
    try:
        yield
    finally:
        steps.report, steps.finish_cell = before
