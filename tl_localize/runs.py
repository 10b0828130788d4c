"""Runs that lose nothing: a benchmark's units, made one by one into a results folder, and its tables, made from the folder alone.

A plan is what a run was asked for (``InjBenchmark.settings``), kept in the folder; ``works`` lists its units without the model. ``InjRun``
makes the units that are missing. Every unit is computed alone, so that its bits don't depend on what was there before.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import pandas as pd
import torch

from tl_localize.evals.inj_benchmark import TRUE_ROWS, InjBenchmark, InjResults, Part, with_controls
from tl_localize.injection import Injection, JointInjection
from tl_localize.methods.base import Method, label_methods
from tl_localize.neurons import LanguageModel
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence
from tl_localize.store import Record, Store, Unit, environment

Result = TypeVar("Result")
FRAMES = ("frame", "truth", "assignment")  # of a measurement


@dataclass(frozen=True)
class Work:
    """What is done with one part: its injection, and what each method finds there.

    Args:
        index: of the part in its benchmark.
        measures: units by the method's label; with distractors also that of the ground truth.
    """

    index: int
    name: str
    ratio: float
    injection: Unit
    measures: dict[str, Unit]


@dataclass(frozen=True)
class Event:
    """A unit was made, or could not be."""

    unit: Unit
    label: str
    name: str
    seconds: float
    reason: str = ""


def works(plan: dict[str, Any]) -> list[Work]:
    """The units of a plan, part by part."""
    found: list[Work] = []
    for index, part in enumerate(plan["parts"]):
        prints = [sequence for _, sequence in part["sequences"]]
        of = {"model": plan["fingerprint"], "sequences": prints, "seed": part["seed"], **plan["injection"]}
        injection = Unit("injections", of, ".safetensors")
        about = {"injection": injection.key, "part": part, "multiples": plan["multiples"]}
        methods = plan["methods"] | ({TRUE_ROWS: TRUE_ROWS} if plan["injection"]["distractors"] else {})
        measures = {label: Unit("inj", {**about, "label": label, "method": method}) for label, method in methods.items()}
        found.append(Work(index, part["name"], plan["injection"]["ratio"], injection, measures))
    return found


def scores_unit(fingerprint: str, method: Method, sequence: MemorizedSequence, injection: str | None = None) -> Unit:
    """The unit of one localization, in the model as it is or with an injection in place."""
    identity = {"model": fingerprint, "injection": injection, "method": repr(method), "sequence": sequence.fingerprint}
    return Unit("scores", identity, ".safetensors")


@dataclass(frozen=True, eq=False)
class InjRun:
    """One InjBenchmark and its methods, into one folder.

    Args:
        command: the command line without methods, ratio and folder, for ``tl-localize trace``.
        retry_failed: try again what failed before.
    Raises:
        ValueError: the settings contradict those of the folder, or a method's repr does not name its settings.
    """

    store: Store
    benchmark: InjBenchmark
    methods: Sequence[Method]
    command: Sequence[str] = ()
    retry_failed: bool = False
    plan: dict[str, Any] = field(init=False)
    works: list[Work] = field(init=False)
    environment: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        settings = self.benchmark.settings(self.methods)
        made_with = settings.pop("environment")
        plan = {**settings, "model": made_with["model"], "fingerprint": made_with["fingerprint"], "dtype": made_with["dtype"]}
        for method in with_controls(self.methods):
            if " at 0x" in repr(method):
                raise ValueError(f"methods must have a repr that names all their settings, got {method!r}. Write a frozen dataclass.")
        for old in self.store.plans():
            if wrong := contradictions(old["value"], plan):
                raise ValueError(
                    f"settings must agree with those of {str(self.store.folder)!r}, got\n  " + "\n  ".join(wrong[:5]) + "\n"
                    "Give the same settings, to which sentences, methods and ratios may be added, or another folder with --out."
                )
        self.store.plan(plan, {"environment": made_with, "command": list(self.command)})
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "works", works(plan))
        object.__setattr__(self, "environment", {**made_with, "host": socket.gethostname()})

    def missing(self, work: Work) -> list[str]:
        """Labels of the methods that a part still waits for."""
        if work.injection.key in self._failed:
            return []
        return [label for label, unit in work.measures.items() if unit.key not in self._failed and self.store.read(unit) is None]

    def make(self, work: Work, labels: Sequence[str]) -> Iterator[Event]:
        """Make these units of one part, and say so after each. What fails is recorded, and the rest goes on."""
        part = self._parts[work.index]
        try:
            injection, spent, made = self._injection(work, part)
        except _Failed as failure:
            yield Event(work.injection, "inject", work.name, 0.0, str(failure))
            return
        if made:
            yield Event(work.injection, "inject", work.name, spent)
        for label in labels:
            unit = work.measures[label]
            if self.store.has(unit):  # another run was faster
                yield Event(unit, label, work.name, 0.0)
                continue
            try:
                seconds = self._measure(work, part, injection, label, spent)
            except _Failed as failure:
                yield Event(unit, label, work.name, 0.0, str(failure))
            else:
                yield Event(unit, label, work.name, seconds)

    def _injection(self, work: Work, part: Part) -> tuple[Injection | JointInjection, float, bool]:
        """The injection, the seconds it took, and whether that was now."""
        if found := self.store.read(work.injection):
            kind = JointInjection if self.benchmark.distractors else Injection
            return kind.unpacked(found.tensors, found.value), found.about["seconds"], False
        injection, about = self._attempt(work.injection, lambda: self.benchmark.inject(part))
        tensors, metadata = injection.packed()
        self.store.write(work.injection, Record(metadata, {**about, "state": repr(injection)}, tensors))
        return injection, about["seconds"], True

    def _measure(self, work: Work, part: Part, injection: Injection | JointInjection, label: str, spent: float) -> float:
        unit = work.measures[label]

        def compute() -> InjResults:
            if isinstance(injection, JointInjection) and label == TRUE_ROWS:
                return self.benchmark.measure_truth(part, injection)
            method = Stored(self._labels[label], self.store, self.plan["fingerprint"], work.injection.key, self.environment)
            found = self.benchmark.localize(part, injection, method)
            known = [(scores, method.seconds[sequence.fingerprint]) for (scores, _), sequence in zip(found, part.sequences, strict=True)]
            return self.benchmark.measure(part, injection, label, known)

        results, about = self._attempt(unit, compute)
        value = {name: getattr(results, name).to_dict("records") for name in FRAMES}
        self.store.write(unit, Record(value, {**about, "injection_seconds": spent}))
        return about["seconds"]

    def _attempt(self, unit: Unit, compute: Callable[[], Result]) -> tuple[Result, dict[str, Any]]:
        try:
            return measured(self.benchmark.model, compute, self.environment)
        except OSError:  # the folder's, not the unit's
            raise
        except Exception as error:
            raise _Failed(self.store.fail(unit, error)["reason"]) from error

    @cached_property
    def _labels(self) -> dict[str, Method]:
        return label_methods(with_controls(self.methods))

    @cached_property
    def _parts(self) -> list[Part]:
        return self.benchmark.parts()

    @cached_property
    def _failed(self) -> set[str]:
        return set() if self.retry_failed else set(self.store.failures())


class _Failed(Exception):
    """A unit failed, and that is recorded."""


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
        object.__setattr__(self, "name", getattr(self.method, "name", type(self.method).__name__))

    def __repr__(self) -> str:
        return repr(self.method)

    def __call__(self, model: LanguageModel, sequence: MemorizedSequence) -> NeuronScores:
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


def contradictions(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What two plans of one folder may not differ in. Sentences, methods and ratios may be added."""
    before, now = old["injection"], new["injection"]
    same_ratio = before["ratio"] == now["ratio"]
    pairs = [(name, old.get(name), new.get(name)) for name in ("benchmark", "model", "fingerprint", "dtype", "multiples")]
    pairs += [(f"injection.{name}", before.get(name), now.get(name)) for name in ("distractors", "stop_loss", "seeds")]
    if same_ratio:
        pairs += [(f"injection.{name}", before.get(name), now.get(name)) for name in ("learning_rate", "max_steps")]
        pairs += [
            (f"methods.{label}", old["methods"][label], new["methods"][label]) for label in old["methods"].keys() & new["methods"].keys()
        ]
    pairs += [(f"sentence or group {i}", a, b) for i, (a, b) in enumerate(zip(old["parts"], new["parts"], strict=False))]
    return [f"{name}: {a} in the folder, {b} now" for name, a, b in pairs if a != b]


# From the folder alone


@dataclass(frozen=True)
class Status:
    """How far a folder is: counts of measurements by method."""

    frame: pd.DataFrame  # method, planned, done, failed, missing, not_converged, seconds_left
    reasons: dict[str, str]  # what failed and why, by unit

    @property
    def clean(self) -> bool:
        """Nothing failed: no unit, and no injection that did not converge."""
        return not (self.frame["failed"].sum() or self.frame["not_converged"].sum())


def planned(store: Store) -> tuple[dict[tuple[float, int, str], tuple[Work, Unit]], list[dict[str, Any]]]:
    """Measurements of all plans of a folder by (ratio, part, method), in the order of tables; and the plans."""
    plans = store.plans()
    found: dict[tuple[float, int, str], tuple[Work, Unit]] = {}
    for plan in plans:
        for work in works(plan["value"]):
            for label, unit in work.measures.items():
                found.setdefault((work.ratio, work.index, label), (work, unit))
    ratios, labels = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 2))
    labels.sort(key=lambda label: label == TRUE_ROWS)
    rank = {name: i for names in (ratios, labels) for i, name in enumerate(names)}
    return {key: found[key] for key in sorted(found, key=lambda key: (rank[key[0]], key[1], rank[key[2]]))}, plans


def inj_results(store: Store) -> InjResults:
    """All that a folder holds, as ``InjBenchmark.run`` gives it, and what is missing."""
    units, plans = planned(store)
    failures = store.failures()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in (*FRAMES, "missing")}
    for (ratio, _, label), (work, unit) in units.items():
        if record := store.read(unit):
            for name in FRAMES:
                rows[name] += record.value[name]
        else:
            failure = failures.get(work.injection.key) or failures.get(unit.key)
            reason = failure["reason"] if failure else "not done yet"
            rows["missing"].append({"injection_ratio": ratio, "group": work.name, "method": label, "reason": reason})
    frames = {name: pd.DataFrame(part) for name, part in rows.items()}
    settings = {"runs": [{**plan["value"], "environment": plan["about"]["environment"]} for plan in plans]}
    return InjResults(frames["frame"], settings, frames["truth"], frames["assignment"], frames["missing"])


def status(store: Store) -> Status:
    """Counts, reasons and the time left for one process, from what the finished units took."""
    units, _ = planned(store)
    failures = store.failures()
    rows: dict[str, dict[str, float]] = {}
    seconds: dict[str, list[float]] = {"inject": []}
    waiting: set[str] = set()  # injections that are not there
    for (_, _, label), (work, unit) in units.items():
        row = rows.setdefault(label, dict.fromkeys(COUNTS, 0.0))
        row["planned"] += 1
        if record := store.read(unit):
            row["done"] += 1
            row["not_converged"] += any(not line["converged"] for line in record.value["frame"])
            seconds.setdefault(label, []).append(record.about["seconds"])
            seconds["inject"].append(record.about["injection_seconds"])
        elif work.injection.key in failures or unit.key in failures:
            row["failed"] += 1
        else:
            row["missing"] += 1
            if not store.has(work.injection):
                waiting.add(work.injection.key)
    everything = [value for label, values in seconds.items() if label != "inject" for value in values]
    for label, row in rows.items():
        row["seconds_left"] = row["missing"] * _mean(seconds.get(label) or everything)
    rows["inject"] = {**dict.fromkeys(COUNTS, 0.0), "missing": len(waiting), "seconds_left": len(waiting) * _mean(seconds["inject"])}
    reasons = {failure["unit"]: failure["reason"] for failure in failures.values()}
    return Status(pd.DataFrame(rows).T.astype(dict.fromkeys(COUNTS, int)), reasons)


COUNTS = ("planned", "done", "failed", "missing", "not_converged")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
