"""The Ray executor with a Ray of our own, whose actors work in this process and die when told to;
benchmarks/test_ray.py has a real one.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tl_localize import Activations, InjBenchmark
from tl_localize.evals.ablation import AblationMeter
from tl_localize.execution import RayCluster, Store, status
from tl_localize.execution.engine import Run, Timer
from tl_localize.execution.environment import environment
from tl_localize.execution.ray_cluster import Work


class ActorDied(Exception): ...


class FailedThere(Exception):
    def __init__(self, cause: BaseException) -> None:
        super().__init__("a traceback")
        self.cause = cause


@dataclass
class Put:
    data: bytes


class FakeRay:
    """Actors work when they are asked, in this process; what they are sent is pickled.
    ``dies(task)`` kills the one that begins a task.
    """

    def __init__(self, dies: Callable[[Any], bool] = lambda task: False) -> None:
        self.dies, self.begun, self.hired, self.killed = dies, 0, 0, 0
        self.sent: list[Put] = []
        self.exceptions = SimpleNamespace(RayActorError=ActorDied, RayTaskError=FailedThere)

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def put(self, value: Any) -> Put:
        self.sent.append(Put(pickle.dumps(value)))
        return self.sent[-1]

    def kill(self, actor: Any) -> None:
        self.killed += 1

    def remote(self, kind: Any) -> Any:
        def hire(*arguments: Any) -> Any:
            self.hired += 1
            actor: list[Any] = []

            def call(name: str, *given: Any) -> Any:
                def work() -> Any:
                    actor[:] = actor or [kind(*arguments)]
                    sent = pickle.loads(pickle.dumps(given))
                    return getattr(actor[0], name)(
                        *(pickle.loads(one.data) if isinstance(one, Put) else one for one in sent)
                    )

                return work() if name == "stop" else work

            return SimpleNamespace(
                **{
                    name: SimpleNamespace(remote=partial(call, name))
                    for name in ("ready", "compute", "stop")
                }
            )

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=hire))

    def wait(self, references: Any, timeout: float) -> Any:
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        try:
            return reference()
        except Killed as error:
            raise ActorDied("the actor died") from error
        except Exception as error:
            raise FailedThere(error) from error


class Killed(BaseException): ...


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, gpt2_like: Any) -> Callable[..., Any]:
    """A cluster whose workers die over the tasks that ``dies`` names."""

    def make(dies: Callable[[Any], bool] = lambda task: False, **settings: Any) -> Any:
        fake = FakeRay(dies)
        for module in ("tl_localize.execution.ray_cluster.import_ray",):
            monkeypatch.setattr(module, lambda: fake)
        right = InjBenchmark.compute

        def compute(self: Any, task: Any, *arguments: Any) -> Any:
            if fake.dies(task):
                raise Killed
            return right(self, task, *arguments)

        monkeypatch.setattr(InjBenchmark, "compute", compute)
        return RayCluster(lambda: gpt2_like, **{"workers": 2, **settings}), fake

    return make


def test_workers_compute_what_one_process_computes(
    inj: Any, methods: Any, cluster: Any, tmp_path: Path, run_inj: Any, inj_numbers: Any
) -> None:
    executor, fake = cluster()
    told: list[float] = []
    inj.run(
        methods,
        Store(tmp_path / "run"),
        lambda fraction, _: told.append(fraction),
        executor=executor,
    )
    run_inj("whole")
    assert inj_numbers() == inj_numbers("whole")
    assert fake.hired == 2
    assert len(fake.sent) == 1  # the sentences are sent once, not once a group
    assert told == sorted(told) and told[-1] == 1
    inj.run([*methods, Activations(absolute="mean")], Store(tmp_path / "other"), executor=executor)
    assert fake.hired == 2  # they go on to the next run
    executor.close()
    assert fake.killed == 2


def test_worker_that_dies_now_and_then_costs_nothing(
    inj: Any,
    methods: Any,
    cluster: Any,
    tmp_path: Path,
    run_inj: Any,
    inj_numbers: Any,
    leftovers: Any,
) -> None:
    tasks: list[Any] = []
    run_inj("whole")
    executor, fake = cluster(lambda task: tasks.append(task) or len(tasks) % 7 == 0)
    inj.run(methods, Store(tmp_path / "run"), executor=executor)
    assert fake.hired > 4
    assert inj_numbers() == inj_numbers("whole")
    assert leftovers() == []


def test_task_that_kills_its_workers_is_given_up_and_the_rest_goes_on(
    inj: Any, methods: Any, cluster: Any, tmp_path: Path
) -> None:
    executor, fake = cluster(
        lambda task: (task.kind, task.label, task.name) == ("scores", "hard_concrete", "s1")
    )
    results = inj.run(methods, Store(tmp_path), executor=executor)
    assert fake.hired >= 1 + 3
    assert results.missing[["group", "method"]].to_numpy().tolist() == [["s1", "hard_concrete"]]
    assert "the actor died" in results.missing["reason"][0]
    assert status(Store(tmp_path)).frame["failed"].sum() == 2  # its recall and its scores


def test_worker_that_never_starts_ends_the_run(
    inj: Any, methods: Any, cluster: Any, tmp_path: Path
) -> None:
    def dies() -> Any:
        raise Killed

    executor, _ = cluster()
    with pytest.raises(
        ValueError,
        match="worker must be able to start and load the model, got the actor died 3 times",
    ):
        inj.run(methods, Store(tmp_path), executor=replace(executor, load=dies))


def test_worker_with_another_model_ends_the_run(
    inj: Any, methods: Any, cluster: Any, tmp_path: Path, make_model: Any
) -> None:
    executor, _ = cluster()
    other = make_model(9, model_name="gpt2-like")
    with pytest.raises(
        ValueError, match="model must be the same on all machines, got on a worker weights"
    ):
        inj.run(methods, Store(tmp_path), executor=replace(executor, load=lambda: other))


def test_baseline_that_failed_on_one_worker_is_not_tried_on_the_next(
    deletion: Any, methods: Any, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def wrong(*_: Any) -> Any:
        calls.append(1)
        raise ValueError("loss on general_tokens must be finite, got one that is not")

    executor, _ = cluster(workers=1)
    monkeypatch.setattr(AblationMeter, "_measured_baseline", wrong)
    results = deletion.run(methods, Store(tmp_path), executor=executor)
    assert len(calls) == 1
    assert len(results.missing) == 3 * 3 * 2


def test_stopped_cluster_works_again(inj: Any, methods: Any, cluster: Any, tmp_path: Path) -> None:
    done: list[Any] = []
    executor, _ = cluster(lambda task: done.append(task), workers=1)
    stops = iter([False, False, True])
    stopping = replace(executor, stop=lambda: next(stops, False))
    inj.run(methods, Store(tmp_path), executor=stopping)
    assert 0 < len(done) < 36
    inj.run(methods, Store(tmp_path), executor=stopping)
    assert len(done) == 36


def test_benchmark_plans_the_same_tasks_on_a_worker(
    inj: Any, deletion: Any, methods: Any, tmp_path: Path
) -> None:
    for benchmark in (inj, deletion, replace(deletion, ablation="resample")):
        labelled, made_with = benchmark.labelled(methods), environment(benchmark.model)
        run = Run(benchmark, labelled, Store(tmp_path), set(), made_with, Timer(None, []))
        work = pickle.loads(pickle.dumps(Work.of(run, tmp_path)))
        again = work.kind(model=benchmark.model, **work.settings)
        assert [task.key for task in again.plan(methods).tasks] == [
            task.key for task in benchmark.plan(methods).tasks
        ]


def test_cluster_needs_ray_and_a_store(
    inj: Any, methods: Any, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        with pytest.raises(ImportError, match="pip install ray"):
            inj.run(methods, Store(tmp_path), executor=RayCluster(lambda: inj.model))
    executor, _ = cluster()
    with pytest.raises(ValueError, match="store must be given where Ray computes, got none"):
        inj.run(methods, executor=executor)
    with pytest.raises(ValueError, match="workers must be a whole number from 1 on, got 0"):
        RayCluster(lambda: inj.model, workers=0)
    with pytest.raises(ValueError, match="gpus must be"):
        RayCluster(lambda: inj.model, gpus=-1)
