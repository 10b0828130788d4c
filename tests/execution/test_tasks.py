"""Keys hold everything that a number depends on; plans of one folder agree."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tl_localize.execution.tasks import Plan, Task, closure, digest_of, tasks_of


def plan_of(tasks: list[Task], **changes: Any) -> Plan:
    given: dict[str, Any] = {
        "settings": {"a": 1},
        "parts": ["s0", "s1"],
        "methods": {"m": "M()"},
        "scope": "1 %",
        "scoped": {"rate": 1},
    }
    return Plan("inj", tasks=tasks, **(given | changes))


def test_key_depends_on_kind_inputs_and_needs_alone() -> None:
    need = Task("injections", {"seed": 0})
    task = Task("scores", {"a": 1, "b": [1.5, "x"]}, (need,))
    assert (
        task.key
        == Task(
            "scores",
            {"b": [1.5, "x"], "a": 1},
            (Task("injections", {"seed": 0}),),
            "label",
            "name",
            3,
            0.1,
        ).key
    )
    others = [
        replace(task, kind="inj"),
        replace(task, inputs={"a": 1}),
        replace(task, needs=()),
        replace(task, needs=(need, need)),
    ]
    others.append(replace(task, needs=(Task("injections", {"seed": 1}),)))
    assert len({one.key for one in (task, *others)}) == 6


def test_closure_gives_needs_first_and_each_task_once() -> None:
    first = Task("a", {})
    second, third = Task("b", {}, (first,)), Task("c", {}, (first,))
    assert [task.kind for task in closure([third, second, third])] == ["a", "c", "b"]


def test_plan_is_the_same_after_a_file() -> None:
    need = Task("injections", {"seed": 0}, name="s\ud800", index=1)
    tasks = [
        Task("inj", {"nan": float("nan"), "m": m}, (need,), m, "s0", 1, 0.1, need.key)
        for m in ("x", "y")
    ]
    plan = plan_of(tasks, settings={"stop_loss": float("inf")})
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert [task.key for task in again.tasks] == [task.key for task in tasks]
    assert again.tasks[0].needs[0] is again.tasks[1].needs[0]
    assert digest_of(again.to_json()) == digest_of(plan.to_json())
    assert plan.contradictions(again) == []


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"parts": ["s0"]}, []),
        ({"parts": ["s0", "s1", "s2"], "methods": {"n": "N()"}}, []),
        ({"scope": "2 %", "scoped": {"rate": 2}, "methods": {"m": "M(1)"}}, []),
        ({"scoped": {"rate": 2}}, ["rate: 1 in the folder, 2 now"]),
        ({"settings": {"a": 2}}, ["a: 1 in the folder, 2 now"]),
        ({"settings": {"a": 1, "b": 2}}, ["b: None in the folder, 2 now"]),
        (
            {"parts": ["s1", "s0"]},
            ["part 0: s0 in the folder, s1 now", "part 1: s1 in the folder, s0 now"],
        ),
        ({"methods": {"m": "M(1)"}}, ["methods.m: M() in the folder, M(1) now"]),
    ],
)
def test_plans_contradict_each_other(changes: dict[str, Any], wrong: list[str]) -> None:
    assert plan_of([], **changes).contradictions(plan_of([])) == wrong
    assert plan_of([]).contradictions(replace(plan_of([]), benchmark="del")) == [
        "benchmark: del in the folder, inj now"
    ]


def test_tasks_of_plans_stand_in_the_order_of_tables_and_the_newest_counts() -> None:
    def task(label: str, index: int, ratio: float, version: int = 1) -> Task:
        return Task(
            "inj",
            {"version": version, "label": label, "index": index, "ratio": ratio},
            (),
            label,
            "",
            index,
            ratio,
        )

    first = plan_of([task("a", 0, 0.2), task("b", 0, 0.2)])
    second = plan_of([task("b", 0, 0.2, version=2), task("c", 0, 0.2), task("b", 1, 0.2)])
    third = plan_of([task("a", 0, 0.1)])
    found = [
        (task.ratio, task.index, task.label, task.inputs["version"])
        for task in tasks_of([first, second, third])
    ]
    assert found == [
        (0.2, 0, "a", 1),
        (0.2, 0, "b", 2),
        (0.2, 0, "c", 1),
        (0.2, 1, "b", 1),
        (0.1, 0, "a", 1),
    ]
