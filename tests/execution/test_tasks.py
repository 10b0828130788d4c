"""Keys hold everything that a number depends on; plans of one folder agree."""

import json
from dataclasses import replace

import pytest
from tl_localize.execution.tasks import Plan, Task, closure, digest_of, tasks_of


def plan_of(tasks, **changes):
    given = {
        "settings": {"a": 1},
        "parts": ["s0", "s1"],
        "methods": {"m": "M()"},
        "scope": "1 %",
        "scoped": {"rate": 1},
    }
    return Plan("inj", tasks=tasks, **(given | changes))


def test_key_depends_on_kind_inputs_and_needs_alone():
    need = Task("injections", {"seed": 0})
    task = Task("scores", {"a": 1, "b": [1.5, "x"]}, (need,))
    same = Task("scores", {"b": [1.5, "x"], "a": 1}, (replace(need),), "label", "name", 3, 0.1)
    assert task.key == same.key
    changes = {"kind": "inj"}, {"inputs": {"a": 1}}, {"needs": ()}, {"needs": (need, need)}
    others = [replace(task, **one) for one in changes]
    others.append(replace(task, needs=(Task("injections", {"seed": 1}),)))
    assert len({one.key for one in (task, *others)}) == 6


def test_closure_gives_needs_first_and_each_task_once():
    first = Task("a", {})
    second, third = Task("b", {}, (first,)), Task("c", {}, (first,))
    assert [task.kind for task in closure([third, second, third])] == ["a", "c", "b"]


def test_plan_is_the_same_after_a_file():
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
def test_plans_contradict_each_other(changes, wrong):
    assert plan_of([], **changes).contradictions(plan_of([])) == wrong
    assert plan_of([]).contradictions(replace(plan_of([]), benchmark="del")) == [
        "benchmark: del in the folder, inj now"
    ]


def test_tasks_of_plans_stand_in_the_order_of_tables_and_the_newest_counts():
    def plan(*tasks):
        return plan_of(
            [
                Task("inj", {"version": version}, label=label, index=index, ratio=ratio)
                for label, index, ratio, version in tasks
            ]
        )

    first = plan(("a", 0, 0.2, 1), ("b", 0, 0.2, 1))
    second = plan(("b", 0, 0.2, 2), ("c", 0, 0.2, 1), ("b", 1, 0.2, 1))
    found = tasks_of([first, second, plan(("a", 0, 0.1, 1))])
    assert [(task.label, task.index, task.ratio, task.inputs["version"]) for task in found] == [
        ("a", 0, 0.2, 1),
        ("b", 0, 0.2, 2),
        ("c", 0, 0.2, 1),
        ("b", 1, 0.2, 1),
        ("a", 0, 0.1, 1),
    ]
