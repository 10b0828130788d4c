"""How far a results folder is, from the folder alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tl_localize.execution.store import Store
from tl_localize.execution.tasks import Task, closure, tasks_of

COUNTS = ("planned", "done", "failed", "missing", "not_converged")


@dataclass(frozen=True)
class Status:
    """How far a folder is.

    Args:
        frame: one row per label: counts of tasks (planned, done, failed, missing, not_converged),
            and seconds_left. Rows of what measurements need, such as injections, come last.
        reasons: what failed and why, by the task's file.

    >>> counts = {"planned": [3], "done": [3], "failed": [0], "missing": [0], "not_converged": [1]}
    >>> frame = pd.DataFrame(counts)
    >>> Status(frame, {}).clean
    False
    """

    frame: pd.DataFrame
    reasons: dict[str, str]

    @property
    def clean(self) -> bool:
        """Nothing failed: no task, and no injection that did not converge."""
        return not (self.reasons or self.frame["failed"].sum() or self.frame["not_converged"].sum())


def planned(store: Store) -> list[Task]:
    """The tasks whose records make the tables of a folder, in the order of tables.

    Of a collection the last plan alone counts: data that have grown or changed make another one.

    Raises:
        ValueError: the folder holds no plan.
    """
    plans = [one.plan for one in store.plans()]
    if not plans:
        raise ValueError(
            f"folder must hold the plan of a run, got none in {str(store.folder)!r}. Give the "
            "run's own command again."
        )
    return tasks_of(plans[-1:] if plans[-1].benchmark == "collect" else plans)


def status(store: Store) -> Status:
    """Counts, reasons, and the time left for one process, from what the finished tasks took.

    >>> benchmark = InjBenchmark(model=model, sequences=few[:1], ratio=0.02, max_steps=2)
    >>> _ = benchmark.run([Activations()], Store(folder))
    >>> status(Store(folder)).frame.loc["activations", ["planned", "done"]].tolist()
    [1, 1]
    """
    tasks, failures, times = planned(store), store.failures(), Times()
    rows: dict[str, dict[str, float]] = {}
    missing: list[tuple[dict[str, float], Task]] = []
    known: set[str] = set()

    def count(task: Task, label: str, took: float | None) -> dict[str, float]:
        known.add(task.key)
        row = rows.setdefault(label, dict.fromkeys((*COUNTS, "seconds_left"), 0.0))
        row["planned"] += 1
        if took is not None:
            row["done"] += 1
            times.add(task, took)
        elif blocked(task, failures):
            row["failed"] += 1
        else:
            row["missing"] += 1
            missing.append((row, task))
        return row

    for task in tasks:
        record = store.read(task)
        label = f"{task.label} ({task.kind})" if task.kind == "single_layer" else task.label
        row = count(task, label, record.about["seconds"] if record else None)
        rows_of = record.value if record else None
        row["not_converged"] += isinstance(rows_of, dict) and rows_of.get("converged") is False
    for task in closure(tasks):
        if task.key not in known:
            count(task, f"({task.kind})", store.seconds(task))
    for row, task in missing:
        row["seconds_left"] += task.weight * times.rate(task.kind, task.label)
    frame = pd.DataFrame(rows, index=[*COUNTS, "seconds_left"]).T
    reasons = {one["task"]: one["reason"] for key, one in failures.items() if key in known}
    return Status(frame.astype(dict.fromkeys(COUNTS, int)), reasons)


class Times:
    """Seconds that tasks of a kind and label took for their weight; what all of the kind took,
    where the label is new.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], tuple[float, float]] = {}

    def add(self, task: Task, seconds: float) -> None:
        for name in {(task.kind, task.label), (task.kind, "")}:
            total, weight = self.known.get(name, (0.0, 0.0))
            self.known[name] = total + seconds, weight + task.weight

    def rate(self, kind: str, label: str, default: float = 0.0) -> float:
        total, weight = self.known.get((kind, label)) or self.known.get((kind, "")) or (default, 1)
        return total / weight


def blocked(task: Task, failed: Collection[str]) -> bool:
    """Whether a failure is in the way: of the task, or of one that it needs."""
    return bool(failed) and any(one.key in failed for one in closure([task]))


def reason_of(task: Task, failures: dict[str, dict[str, Any]]) -> str:
    """Why a task has no record."""
    return next(
        (failures[one.key]["reason"] for one in closure([task]) if one.key in failures),
        "not done yet",
    )
