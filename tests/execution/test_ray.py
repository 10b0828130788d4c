"""RayCluster with a Ray of our own, whose workers compute in this process and die when told to;
benchmarks/test_ray.py has a real one.
"""

import pickle
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tl_localize.cli import interrupted_by_sigterm
from tl_localize.execution import RayCluster
from tl_localize.execution import ray as our_ray


class RayError(Exception): ...


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__("a traceback")
        self.cause = cause


class Killed(BaseException): ...


class Task:
    def __init__(self, function, given, retries):
        self.function = function
        self.given = given
        self.retries = retries


class FakeRay:
    """Workers compute when they are asked; what they are sent is pickled. Over the groups that
    ``dies`` names they die so often, each time after all steps of the group were kept.
    """

    def __init__(self):
        self.dies = {}
        self.most_at_once = self.attempts = 0
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": 2.0}

    def nodes(self):
        dead = {"Alive": False, "Resources": {"CPU": 64.0}}
        return [dead, *({"Alive": True, "Resources": {"CPU": 1.0}} for _ in range(2))]

    def put(self, work):
        load, make, *rest = work
        return load, make, pickle.dumps(rest)

    def remote(self, *, max_calls):
        assert max_calls == 0  # a worker keeps its model

        def remote_function(function):
            def options(*, max_retries, num_cpus, num_gpus):
                def start(work, group):
                    return Task(function, (work, group), max_retries)

                return SimpleNamespace(remote=start)

            return SimpleNamespace(options=options)

        return remote_function

    def wait(self, tasks):
        self.most_at_once = max(self.most_at_once, len(tasks))
        return tasks[:1], tasks[1:]

    def get(self, task):
        (load, make, rest), group = task.given
        for _ in range(task.retries + 1):
            self.attempts += 1
            try:
                found = task.function((load, make, *pickle.loads(rest)), group)
            except Killed:
                continue
            except Exception as error:
                raise RayTaskError(error) from error
            if not self.dies.get(str(group), 0):
                return found
            self.dies[str(group)] -= 1
        raise RayError("the worker died")

    def cancel(self, task): ...


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(our_ray, "_MODELS", {})
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.mark.parametrize("workers", [0, -1, "2"])
def test_a_number_of_workers_is_checked(workers):
    with pytest.raises((TypeError, ValueError), match="workers must be"):
        RayCluster(load=lambda: None, workers=workers)


@pytest.mark.parametrize("which", ["inj", "deletion", "rev"])
def test_workers_compute_what_one_process_computes(which, request, fake, methods, run, assert_same):
    benchmark = request.getfixturevalue(which)
    told = []
    found = run(
        benchmark,
        methods,
        progress=lambda fraction, _: told.append(fraction),
        cluster=RayCluster(load=lambda: benchmark.model, workers=2),
    )
    assert_same(found, benchmark.run(methods, progress=False))
    assert told == sorted(told) and told[-1] == 1
    assert fake.most_at_once == min(2, len(benchmark.groups(2)))  # a group for each worker


def test_group_of_a_worker_that_dies_is_taken_by_another(
    inj, fake, methods, run, written, assert_same
):
    fake.dies = {"s1": 2, "s3": 1}
    found = run(inj, methods, cluster=RayCluster(load=lambda: inj.model))
    assert fake.attempts == 4 + 3
    assert written["inj"] == 4 * 4
    assert_same(found, inj.run(methods, progress=False))


def test_group_that_kills_its_workers_is_given_up_and_the_rest_goes_on(
    inj, fake, methods, run, monkeypatch, caplog
):
    right = our_ray.compute_group

    def dies(work, group):
        if group.name == "s1":
            raise Killed
        return right(work, group)

    monkeypatch.setattr(our_ray, "compute_group", dies)
    results = run(inj, methods, cluster=RayCluster(load=lambda: inj.model))
    assert fake.attempts == 3 + 3
    assert set(results.missing["part"]) == {"s1"} and len(results.missing) == 4
    assert "FAILED s1: its worker died 3 times: the worker died" in caplog.messages


def test_shards_of_a_cluster_are_joined(inj, fake, methods, run, assert_same):
    cluster = RayCluster(load=lambda: inj.model)
    assert len(run(inj, methods, shard=(1, 2), cluster=cluster).missing) == 2 * 4
    assert_same(run(inj, methods, shard=(2, 2), cluster=cluster), inj.run(methods, progress=False))


def test_worker_with_another_model_ends_the_run(inj, fake, methods, run, make_model):
    cluster = RayCluster(load=lambda: make_model(9, model_name="gpt2-like"))
    with pytest.raises(ValueError, match=r"fingerprint: .* in the folder, .* now"):
        run(inj, methods, cluster=cluster)


def test_cluster_needs_ray_and_a_store(inj, fake, methods, run, monkeypatch):
    cluster = RayCluster(load=lambda: inj.model)
    with pytest.raises(ValueError, match="store must be given where Ray computes, got none"):
        inj.run(methods, progress=False, cluster=cluster)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="pip install ray"):
        run(inj, methods, cluster=cluster)


def test_the_signal_that_ends_a_job_is_heard_as_before(fake):
    """Ray has a handler of its own, which would end the process before anything is published."""
    fake.is_initialized = lambda: False
    fake.init = lambda **_: signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    with interrupted_by_sigterm():
        assert RayCluster(load=lambda: None).start() == 2
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    before = signal.getsignal(signal.SIGTERM)
    try:
        RayCluster(load=lambda: None).start()
        assert signal.getsignal(signal.SIGTERM) is not before  # where nothing was to be kept
    finally:
        signal.signal(signal.SIGTERM, before)


def test_more_threads_than_a_machine_has_cores_are_refused(inj, fake, methods, run, monkeypatch):
    """A worker would wait for ever."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(ValueError, match=r"at most 1, the cores of the largest .* got 2\. Call"):
        run(inj, methods, cluster=RayCluster(load=lambda: inj.model))


def test_benchmark_is_sent_without_its_model(inj, fake, methods, run, monkeypatch):
    def refuse(model, protocol):
        raise TypeError("a model must not be sent")

    monkeypatch.setattr(type(inj.model), "__reduce_ex__", refuse)
    assert not len(run(replace(inj), methods, cluster=RayCluster(load=lambda: inj.model)).missing)
    with pytest.raises(TypeError, match="must not be sent"):
        pickle.dumps(inj)


def test_a_worker_computes_as_the_first_process_does(inj, fake, methods, run, monkeypatch):
    """In as many threads and with the same products of matrices, as numbers depend on both."""
    called = {}
    for name in ("set_num_threads", "set_float32_matmul_precision"):
        monkeypatch.setattr(torch, name, lambda value, name=name: called.update({name: value}))
    run(inj, methods, cluster=RayCluster(load=lambda: inj.model))
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    assert called == {"set_num_threads": threads, "set_float32_matmul_precision": precision}


def test_a_worker_that_is_kept_loads_the_model_of_another_run(
    inj, fake, methods, run, make_model, assert_same
):
    run(inj, methods, "first", cluster=RayCluster(load=lambda: inj.model))
    other = replace(inj, model=make_model(7, model_name="gpt2-like"))
    found = run(other, methods, "second", cluster=RayCluster(load=lambda: other.model))
    assert_same(found, other.run(methods, progress=False))
    assert list(our_ray._MODELS.values()) == [other.model]
