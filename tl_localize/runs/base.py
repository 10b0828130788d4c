"""The form that all runs share: what a run is asked for, the units that this takes, and how each is made, once."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch

from tl_localize.batching import out_of_memory
from tl_localize.methods.base import Method
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence
from tl_localize.execution.store import Record, Store, Unit, environment

Result = TypeVar("Result")
Begun = Callable[[str, str], None]  # label and name of the unit that comes next


@dataclass(frozen=True)
class Work:
    """What is done with one part of a run: measurements, and what they all need.

    Args:
        index: of the part.
        ratio: of the run, where it has one.
        base: is made first, and kept: an injection, or the measures of the model as it is; None where nothing is needed.
        measures: units by label, which is the method's but where it says more.
        group: parts of one group use the same scores, so one process makes them.

    >>> from tl_localize.runs import Work
    >>> from tl_localize.execution.store import Unit
    >>> base, effect = Unit("before", {"model": "m"}), Unit("effects", {"model": "m", "method": "Activations()"})
    >>> [unit.kind for unit in Work(0, "s0", 0.01, base, {"activations": effect}, "s0").units]
    ['before', 'effects']
    """

    index: int
    name: str
    ratio: float
    base: Unit | None
    measures: dict[str, Unit]
    group: str

    def __repr__(self) -> str:
        return f"Work({self.index}, {self.name!r}, {len(self.units)} units)"

    @property
    def units(self) -> list[Unit]:
        """All of them, in the order in which they are made."""
        return [*([self.base] if self.base else []), *self.measures.values()]


@dataclass(frozen=True)
class Event:
    """A unit was made, or could not be.

    Args:
        label: of the method, or what measurements need.
        name: of the part.
        seconds: that it took.
        reason: why it could not be made; empty where it was.

    >>> from tl_localize.runs import Event
    >>> from tl_localize.execution.store import Unit
    >>> event = Event(Unit("scores", {"sequence": "s0"}), "activations", "s0", 0.0, "ValueError: loss must be finite")
    >>> bool(event.reason)
    True
    """

    unit: Unit
    label: str
    name: str
    seconds: float
    reason: str = ""
    measured: bool = True  # it is a measurement, not what measurements need


@dataclass(frozen=True, eq=False)
class Run(ABC):
    """A benchmark and its methods, into one folder: what ``InjRun``, ``DelRun`` and ``CollectRun`` share.

    ``works`` are its parts; ``make`` makes the units of one, and ``missing`` says which are left. ``distributed.in_process`` makes all.

    Args:
        command: the command line without methods, ratio and folder, for ``tl-localize trace``.
        retry_failed: try again what failed before.
    Raises:
        ValueError: the settings contradict those of the folder, or a method's repr does not name its settings.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Activations, DelBenchmark, load_model
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> from tl_localize.runs import DelRun, Run
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> benchmark = DelBenchmark(model, reference_sequences(model)[:2], held_out_tokens()[:1], ratios=(0.05,), n_dev=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for _ in range(2):  # the second one finds what the first has made
    ...         run: Run = DelRun(Store(Path(folder)), benchmark, [Activations()])
    ...         print([event.label for event in run.make(run.works[0], run.missing(run.works[0]))])
    ['before', 'activations', 'random']
    []
    """

    store: Store
    benchmark: Any
    methods: Sequence[Method]
    command: Sequence[str] = ()
    retry_failed: bool = False
    plan: dict[str, Any] = field(init=False)
    works: list[Work] = field(init=False)
    environment: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        for method in self.labels.values():
            check_named(method)
        check_bare(self.benchmark.model)
        settings = self.settings()
        made_with = settings.pop("environment")
        plan = {**settings, "model": made_with["model"], "fingerprint": made_with["fingerprint"], "dtype": made_with["dtype"]}
        for old in self.store.plans():
            if wrong := self.contradictions(old["value"], plan):
                raise ValueError(
                    f"settings must agree with those of {str(self.store.folder)!r}, got\n  " + "\n  ".join(wrong[:5]) + "\n"
                    f"Give the same settings, to which {self.may_grow} may be added, or another folder with --out."
                )
        self.store.plan(plan, {"environment": made_with, "command": list(self.command)})
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "works", self.works_of(plan))
        object.__setattr__(self, "environment", {**made_with, "host": socket.gethostname()})

    def __repr__(self) -> str:
        methods = f", methods {', '.join(self.labels)}" if self.labels else ""
        return f"{type(self).__name__}({str(self.store.folder)!r}, {self.benchmark!r}{methods})"

    # What a run says of itself

    part: ClassVar[str]  # what a part is called
    base_label: ClassVar[str] = ""  # there is none: works need no base
    may_grow: ClassVar[str]
    by_ratio: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def labels(self) -> Mapping[str, Method]:
        """Its methods, controls among them, by the name they have in tables."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The plan (all that the numbers depend on, with ``benchmark``, ``parts``, ``methods``), and the environment."""

    @staticmethod
    @abstractmethod
    def ratio_of(plan: dict[str, Any]) -> float:
        """The ratio of a plan: methods may have other settings at another one."""

    @staticmethod
    @abstractmethod
    def must_agree(plan: dict[str, Any]) -> dict[str, Any]:
        """By name, what must be the same in all plans of a folder; what ``by_ratio`` names only in those of one ratio."""

    @staticmethod
    @abstractmethod
    def works_of(plan: dict[str, Any]) -> list[Work]:
        """The units of a plan, part by part."""

    def make_base(self, work: Work) -> tuple[Any, Record]:
        """What the measurements of a part need, and the record of it; asked only of runs whose works have a base."""
        raise NotImplementedError

    def read_base(self, work: Work, record: Record) -> Any:
        """The same from its record, of such runs."""
        raise NotImplementedError

    @abstractmethod
    def measure(self, work: Work, base: Any, label: str) -> Record:
        """One measurement of a part."""

    @classmethod
    def contradictions(cls, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
        """What two plans of one folder may not differ in. Parts, methods and ratios may be added."""
        if old["benchmark"] != new["benchmark"]:
            return [f"benchmark: {old['benchmark']} in the folder, {new['benchmark']} now"]
        names = ("model", "fingerprint", "dtype")
        before, now = ({name: plan[name] for name in names} | cls.must_agree(plan) for plan in (old, new))
        pairs = [(name, before.get(name), now.get(name)) for name in before]
        if cls.ratio_of(old) == cls.ratio_of(new):
            both = old["methods"].keys() & new["methods"].keys()
            pairs += [(f"methods.{label}", old["methods"][label], new["methods"][label]) for label in both]
        else:
            pairs = [pair for pair in pairs if pair[0] not in cls.by_ratio]
        parts = zip(old.get("parts", ()), new.get("parts", ()), strict=False)
        pairs += [(f"{cls.part} {i}", a, b) for i, (a, b) in enumerate(parts)]
        return [f"{name}: {a} in the folder, {b} now" for name, a, b in pairs if a != b]

    # How it is made

    def missing(self, work: Work) -> list[str]:
        """Labels of the measurements that a part still waits for."""
        if work.base and work.base.key in self._failed:
            return []
        return [label for label, unit in work.measures.items() if unit.key not in self._failed and not self.store.sound(unit)]

    def make(self, work: Work, labels: Sequence[str], begun: Begun = lambda label, name: None) -> Iterator[Event]:
        """Make these units of one part, and say so before and after each. What fails is recorded, and the rest goes on."""
        base, spent = None, 0.0
        if work.base:
            if work.base.key in self._failed:
                return
            begun(self.base_label, work.name)
            try:
                base, spent, made = self._base(work, work.base)
            except _Failed as failure:
                yield Event(work.base, self.base_label, work.name, 0.0, str(failure), measured=False)
                return
            if made:
                yield Event(work.base, self.base_label, work.name, spent, measured=False)
        for label in labels:
            unit = work.measures[label]
            if self.store.has(unit):  # another run was faster
                yield Event(unit, label, work.name, 0.0)
                continue
            begun(label, work.name)
            try:
                record, about = self._attempt(unit, lambda label=label: self.measure(work, base, label))
            except _Failed as failure:
                yield Event(unit, label, work.name, 0.0, str(failure))
            else:
                self.store.write(unit, Record(record.value, {**about, "base_seconds": spent}, record.tensors))
                yield Event(unit, label, work.name, about["seconds"])

    def give_up(self, work: Work, unit: Unit, error: Exception) -> Event:
        """Record that a unit of a part failed elsewhere."""
        self._failed.add(unit.key)
        labels = {one.key: label for label, one in work.measures.items()}
        reason = self.store.fail(unit, error)["reason"]
        return Event(unit, labels.get(unit.key, self.base_label), work.name, 0.0, reason, measured=unit != work.base)

    def stored(self, label: str, injection: str | None = None) -> Stored:
        """A method whose scores are kept in the folder."""
        return Stored(self.labels[label], self.store, self.plan["fingerprint"], injection, self.environment)

    def _base(self, work: Work, unit: Unit) -> tuple[Any, float, bool]:
        """What the measurements need, the seconds it took, and whether that was now. The last one is remembered."""
        if unit.key not in self._last:
            self._last.clear()
            if found := self.store.read(unit):
                self._last[unit.key] = self.read_base(work, found), found.about["seconds"]
            else:
                (base, record), about = self._attempt(unit, lambda: self.make_base(work))
                self.store.write(unit, Record(record.value, {**about, **record.about}, record.tensors))
                self._last[unit.key] = base, about["seconds"]
                return *self._last[unit.key], True
        return *self._last[unit.key], False

    def _attempt(self, unit: Unit, compute: Callable[[], Result]) -> tuple[Result, dict[str, Any]]:
        try:
            return measured(self.benchmark.model, compute, self.environment)
        except OSError:  # the folder's, not the unit's
            raise
        except Exception as error:
            if isinstance(error, getattr(torch, "AcceleratorError", ())) and not out_of_memory(error):
                raise  # no unit of this process can be made after it
            self._failed.add(unit.key)
            raise _Failed(self.store.fail(unit, error)["reason"]) from error

    @cached_property
    def _last(self) -> dict[str, tuple[Any, float]]:
        return {}

    @cached_property
    def _failed(self) -> set[str]:
        return set() if self.retry_failed else set(self.store.failures())


class _Failed(Exception):
    """A unit failed, and that is recorded."""


def check_named(method: Method) -> None:
    """Raise ValueError unless the method's repr can stand for it in the name of a file."""
    if " at 0x" in repr(method):
        raise ValueError(f"methods must have a repr that names all their settings, got {method!r}. Write a frozen dataclass.")


def check_bare(model: LanguageModel) -> None:
    """Raise ValueError if there are hooks on the model: scores are kept under the name of its weights, which know nothing of hooks."""
    if hooked := NeuronView(model).hooked_points():
        raise ValueError(
            f"model must have no hooks where results are kept, got some at {hooked[0]!r}. Take them away with model.reset_hooks(), or call "
            "the method itself, which keeps nothing."
        )


# Scores


def scores_unit(fingerprint: str, method: Method, sequence: MemorizedSequence, injection: str | None = None) -> Unit:
    """The unit of one localization, in the model as it is or with an injection in place."""
    identity = {"model": fingerprint, "injection": injection, "method": repr(method), "sequence": sequence.fingerprint}
    return Unit("scores", identity, ".safetensors")


@dataclass(frozen=True, eq=False)
class Stored:
    """A method that looks into a store before it computes: what both benchmarks take in place of the method.

    Args:
        fingerprint: of the model that the scores are of.
        injection: key of the injection that is in place, if there is one.
        about: what the scores are made with, for their records.
    """

    method: Method
    store: Store
    fingerprint: str
    injection: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_named(self.method)
        object.__setattr__(self, "name", getattr(self.method, "name", type(self.method).__name__))
        object.__setattr__(self, "by_layer", getattr(self.method, "by_layer", True))

    def __repr__(self) -> str:
        return repr(self.method)

    def __call__(self, model: LanguageModel, sequence: MemorizedSequence) -> NeuronScores:
        check_bare(model)
        unit = scores_unit(self.fingerprint, self.method, sequence, self.injection)
        found = self.store.read(unit)
        if found is None:
            scores, about = measured(model, lambda: self.method(model, sequence), self.about)
            tensors, metadata = scores.packed()
            found = Record(metadata, about, tensors)
            self.store.write(unit, found)
        self.seconds[sequence.fingerprint] = found.about["seconds"]
        return NeuronScores.unpacked(found.tensors, found.value | {"sequence_id": sequence.id})


def stored(methods: Sequence[Method], store: Store, model: LanguageModel) -> list[Method]:
    """Methods whose scores of this model are kept in a folder: DelBenchmark at another ratio then computes none again.

    Each sequence is localized alone, so that no score depends on which others were there before.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Activations, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> from tl_localize.runs import stored
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (method,) = stored([Activations()], Store(Path(folder)), model)
    ...     first, second = (method(model, reference_sequences(model)[0]) for _ in range(2))  # the second is read
    ...     bool((first.values == second.values).all()), len(Store(Path(folder)).names)
    (True, 1)
    """
    about = environment(model)
    return [Stored(method, store, about["fingerprint"], about={**about, "host": socket.gethostname()}) for method in methods]


def measured(model: LanguageModel, compute: Callable[[], Result], about: dict[str, Any]) -> tuple[Result, dict[str, Any]]:
    """A result, and what it took: seconds and peak memory in bytes (of the device, or of the process so far)."""
    device = next(iter(model.parameters())).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    result = compute()
    seconds = time.perf_counter() - started
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _process_memory()
    return result, {**about, "seconds": seconds, "peak_memory": memory}


def _process_memory() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
