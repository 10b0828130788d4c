"""The Ray executor with a Ray of our own, whose actors work in this process and die when told to;
benchmarks/test_ray.py has a real one.
"""

import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tl_localize import InjBenchmark
from tl_localize.execution import RayCluster, Store, status


class RayError(Exception): ...


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__("a traceback")
        self.cause = cause


class Killed(BaseException): ...


class FakeRay:
    """Workers work when they are asked, in this process; what they are sent is pickled."""

    def __init__(self):
        self.hired = 0
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": 2.0}

    def put(self, work):
        load, *rest = work
        return load, pickle.dumps(rest)

    def remote(self, function):
        def start(work, *given):
            self.hired += 1
            load, rest = work
            part, failed = pickle.loads(pickle.dumps(given))
            return self.stream(function((load, *pickle.loads(rest)), part, failed))

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def stream(self, outcomes):
        """Each result or what prevented it, when it is asked for."""
        while True:
            try:
                yield next(outcomes)
            except StopIteration:
                return
            except Killed:
                yield RayError("the worker died")
                return
            except Exception as error:
                yield RayTaskError(error)

    def wait(self, streams):
        return streams[:1], streams[1:]

    def get(self, result):
        if isinstance(result, RayError):
            raise result
        return result

    def cancel(self, stream):
        stream.close()


@pytest.fixture
def cluster(monkeypatch, gpt2_like):
    """A cluster whose workers die over the tasks that ``dies`` names."""

    def make(dies=lambda task: False, **settings):
        fake = FakeRay()
        monkeypatch.setitem(sys.modules, "ray", fake)
        right = InjBenchmark.compute

        def compute(self, task, *arguments):
            if dies(task):
                raise Killed
            return right(self, task, *arguments)

        monkeypatch.setattr(InjBenchmark, "compute", compute)
        return RayCluster(lambda: gpt2_like, **{"workers": 2, **settings}), fake

    return make


def test_workers_compute_what_one_process_computes(
    inj, methods, cluster, tmp_path, run_inj, inj_numbers
):
    executor, fake = cluster()
    told = []
    inj.run(
        methods,
        Store(tmp_path / "run"),
        lambda fraction, _: told.append(fraction),
        executor=executor,
    )
    run_inj("whole")
    assert inj_numbers() == inj_numbers("whole")
    assert fake.hired == 2
    assert told == sorted(told) and told[-1] == 1


def test_worker_that_dies_now_and_then_costs_nothing(
    inj,
    methods,
    cluster,
    tmp_path,
    run_inj,
    inj_numbers,
    leftovers,
):
    tasks = []
    run_inj("whole")
    executor, fake = cluster(lambda task: tasks.append(task) or len(tasks) % 7 == 0)
    inj.run(methods, Store(tmp_path / "run"), executor=executor)
    assert fake.hired > 4
    assert inj_numbers() == inj_numbers("whole")
    assert leftovers() == []


def test_task_that_kills_its_workers_is_given_up_and_the_rest_goes_on(
    inj, methods, cluster, tmp_path
):
    executor, fake = cluster(
        lambda task: (task.kind, task.label, task.name) == ("scores", "hard_concrete", "s1")
    )
    results = inj.run(methods, Store(tmp_path), executor=executor)
    assert fake.hired == 2 + 3
    assert results.missing[["group", "method"]].to_numpy().tolist() == [["s1", "hard_concrete"]]
    assert "the worker died" in results.missing["reason"][0]
    assert status(Store(tmp_path)).frame["failed"].sum() == 2  # its recall and its scores


def test_worker_that_never_starts_ends_the_run(inj, methods, cluster, tmp_path):
    def dies():
        raise Killed

    executor, _ = cluster()
    with pytest.raises(
        ValueError,
        match="worker must be able to start and load the model, got the worker died 3 times",
    ):
        inj.run(methods, Store(tmp_path), executor=replace(executor, load=dies))


def test_worker_with_another_model_ends_the_run(inj, methods, cluster, tmp_path, make_model):
    executor, _ = cluster()
    other = make_model(9, model_name="gpt2-like")
    with pytest.raises(ValueError, match="same on all machines, got on a worker fingerprint"):
        inj.run(methods, Store(tmp_path), executor=replace(executor, load=lambda: other))


def test_cluster_needs_ray_and_a_store(inj, methods, cluster, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        with pytest.raises(ImportError, match="pip install ray"):
            inj.run(methods, Store(tmp_path), executor=RayCluster(lambda: inj.model))
    executor, _ = cluster()
    with pytest.raises(ValueError, match="store must be given where Ray computes, got none"):
        inj.run(methods, executor=executor)
