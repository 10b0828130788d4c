"""How far a results folder is, from the folder alone."""

from __future__ import annotations

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
        frame: one row per label: counts of tasks (planned, done, failed, missing, not_converged), and seconds_left. Rows of what
            measurements need, such as injections, come last.
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

    @property
    def complete(self) -> bool:
        """Every planned task has its record."""
        return bool((self.frame["done"] == self.frame["planned"]).all())


def planned(store: Store) -> list[Task]:
    """The tasks whose records make the tables of a folder, in the order of tables.

    Of a collection the last plan alone counts: data that have grown or changed make another one.

    Raises:
        ValueError: the folder holds no plan.
    """
    plans = [one.plan for one in store.plans()]
    if not plans:
        raise ValueError(f"folder must hold the plan of a run, got none in {str(store.folder)!r}. Give the run's own command again.")
    return tasks_of(plans[-1:] if plans[-1].benchmark == "collect" else plans)


def status(store: Store) -> Status:
    """Counts, reasons, and the time left for one process, from what the finished tasks took.

    >>> benchmark = InjBenchmark(model=model, sequences=few[:1], ratio=0.02, max_steps=2)
    >>> _ = benchmark.run([Activations()], Store(folder))
    >>> status(Store(folder)).frame.loc["activations", ["planned", "done"]].tolist()
    [1.0, 1.0]
    """
    tasks, failures = planned(store), store.failures()
    measurements = {task.key for task in tasks}
    rows: dict[str, dict[str, float]] = {}
    spent: dict[tuple[str, str], list[float]] = {}  # kind and label, and kind alone -> seconds, tasks
    missing: list[Task] = []
    everything = list(closure(tasks))
    for task in [*tasks, *(task for task in everything if task.key not in measurements)]:
        row = rows.setdefault(task.label if task.key in measurements else f"({task.kind})", dict.fromkeys((*COUNTS, "seconds_left"), 0.0))
        row["planned"] += 1
        record = store.read(task) if task.key in measurements else None
        took = record.about["seconds"] if record else None if task.key in measurements else store.seconds(task)
        if took is not None:
            row["done"] += 1
            row["not_converged"] += bool(record and record.value.get("converged") is False)
            for name in ((task.kind, task.label), (task.kind, "")):
                total = spent.setdefault(name, [0.0, 0.0])
                total[0] += took
                total[1] += 1
        elif failure_of(task, failures):
            row["failed"] += 1
        else:
            row["missing"] += 1
            missing.append(task)
    for task in missing:
        seconds, count = spent.get((task.kind, task.label)) or spent.get((task.kind, "")) or (0.0, 1.0)
        rows[task.label if task.key in measurements else f"({task.kind})"]["seconds_left"] += seconds / count
    known = {task.key for task in everything}
    reasons = {failure["task"]: failure["reason"] for key, failure in failures.items() if key in known}
    return Status(pd.DataFrame(rows, index=[*COUNTS, "seconds_left"]).T.astype(dict.fromkeys(COUNTS, int)), reasons)


def failure_of(task: Task, failures: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Why a task, or one that it needs, could not be computed; None where that is not known."""
    return next((failures[one.key] for one in closure([task]) if one.key in failures), None)


def reason_of(task: Task, failures: dict[str, dict[str, Any]]) -> str:
    """Why a task has no record."""
    failure = failure_of(task, failures)
    return failure["reason"] if failure else "not done yet"
