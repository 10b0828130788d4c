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

    >>> frame = pd.DataFrame({"planned": [3], "done": [3], "failed": [0], "missing": [0], "not_converged": [1]})
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
    measurements = {task.key for task in tasks}
    rows: dict[str, dict[str, float]] = {}
    missing: list[tuple[dict[str, float], Task]] = []
    needed = [task for task in closure(tasks) if task.key not in measurements]
    for task in [*tasks, *needed]:
        label = task.label if task.key in measurements else f"({task.kind})"
        row = rows.setdefault(label, dict.fromkeys((*COUNTS, "seconds_left"), 0.0))
        record = store.read(task) if task.key in measurements else None
        took = (
            record.about["seconds"]
            if record
            else None
            if task.key in measurements
            else store.seconds(task)
        )
        state = "done" if took is not None else "failed" if hopeless(task, failures) else "missing"
        row["planned"] += 1
        row[state] += 1
        row["not_converged"] += bool(record and record.value.get("converged") is False)
        if took is not None:
            times.add(task, took)
        elif state == "missing":
            missing.append((row, task))
    for row, task in missing:
        row["seconds_left"] += task.weight * times.rate(task.kind, task.label)
    known = {task.key for task in (*tasks, *needed)}
    reasons = {
        failure["task"]: failure["reason"] for key, failure in failures.items() if key in known
    }
    return Status(
        pd.DataFrame(rows, index=[*COUNTS, "seconds_left"]).T.astype(dict.fromkeys(COUNTS, int)),
        reasons,
    )


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


def hopeless(task: Task, failed: Collection[str]) -> bool:
    """Whether the task, or one that it needs, has failed."""
    return bool(failed) and any(one.key in failed for one in closure([task]))


def reason_of(task: Task, failures: dict[str, dict[str, Any]]) -> str:
    """Why a task has no record."""
    return next(
        (failures[one.key]["reason"] for one in closure([task]) if one.key in failures),
        "not done yet",
    )
