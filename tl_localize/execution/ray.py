"""The workers of a Ray cluster compute: each holds the model, all write to one folder."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import torch

from tl_localize.execution.run import Groups, InProcess, Outcome, Run, shares
from tl_localize.execution.store import Store, blocked
from tl_localize.execution.tasks import closure
from tl_localize.model.environment import behaviour, conflicts, environment
from tl_localize.model.neurons import LanguageModel

ATTEMPTS = 3  # deaths of a worker over one task before the task is recorded as failed


@dataclass(frozen=True)
class RayCluster(InProcess):
    """Workers of a Ray cluster compute. Each loads the model and takes a part of the work, of
    about the same weight.

    Where a worker dies, with its machine or without, another one goes on with its part. If this
    process dies, the same command goes on from what is in the folder, which all machines must see
    under the same path.

    Args:
        load: gives the model on the machine where it is called.
        address: of a cluster that is there; by default one is started on this machine.
        workers: by default as many as the cluster has room for, each with a GPU where there are
            GPUs. Else a worker gets as many cores as this process has threads, because results
            differ in the last digits between numbers of threads.
        shard: as of ``InProcess``.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the run has no store.

    >>> RayCluster(lambda: load_model("reference"), workers=2).shard
    (1, 1)
    """

    load: Callable[[], LanguageModel]
    address: str | None = None
    workers: int | None = None

    def __call__(self, run: Run, groups: Groups) -> Iterator[Outcome]:
        try:
            ray: Any = import_module("ray")
        except ImportError as error:
            raise ImportError(
                "ray must be installed where --ray is given, got no such module: pip install ray."
            ) from error
        if not isinstance(run.cache, Store):
            raise ValueError(
                "store must be given where Ray computes, got none. Pass store=Store(folder) that "
                "all machines see."
            )
        if not groups:
            return
        if not ray.is_initialized():
            ray.init(address=self.address or "local", log_to_driver=False, include_dashboard=False)
        there, threads = ray.cluster_resources(), torch.get_num_threads()
        gpus = min(1, there.get("GPU", 0))
        room = int(there["GPU"] if gpus else there["CPU"] / threads)
        worker = ray.remote(computed).options(
            num_gpus=gpus, num_cpus=1 if gpus else threads, num_returns="streaming", max_retries=0
        )
        one: Any = run.benchmark
        own = [part.name for part in fields(one) if part.init and part.name != "model"]
        make = partial(type(one), **{name: getattr(one, name) for name in own})
        made_with = run.cache.plans()[-1].environment
        folder = run.cache.folder.resolve()
        work = ray.put((self.load, make, run.methods, folder, made_with, threads))
        start = partial(worker.remote, work)
        parts = shares(groups, min(self.workers or max(1, room), len(groups)))
        yield from _outcomes(ray, run, start, parts)


def _outcomes(
    ray: Any, run: Run, start: Callable[..., Any], parts: Sequence[Groups]
) -> Iterator[Outcome]:
    """What the workers compute, as they do it. ``start`` gives a stream of outcomes of a part,
    which begins with None when the worker is ready.
    """
    deaths, begun = Counter[str](), set[Any]()
    streams = {start(part, run.failed): part for part in parts}
    try:
        while streams:
            (stream,), _ = ray.wait(list(streams))
            try:
                outcome: Outcome | None = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
                continue
            # its text is a traceback, the cause's is a sentence
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:  # the worker died
                part = streams.pop(stream)
                yield from _given_up(run, part if stream in begun else [], deaths, error)
                streams[start(part, run.failed)] = part
                continue
            begun.add(stream)
            deaths.pop("", None)
            if outcome:
                if outcome.reason:
                    run.failed.add(outcome.task.key)
                yield outcome
    finally:
        for stream in streams:
            ray.cancel(stream)


def _given_up(run: Run, part: Groups, deaths: Counter[str], error: Exception) -> Iterator[Outcome]:
    """The task that a worker had in hand when it died, where that has happened often; a worker
    without a part had not even loaded the model.
    """
    lost = [
        task
        for task in closure(chain(*part))
        if not run.cache.has(task) and not blocked(task, run.failed)
    ]
    name = lost[0].key if lost else ""
    deaths[name] += 1
    if deaths[name] < ATTEMPTS:
        return
    if not lost:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"worker must be able to start and load the model, got {reason} {ATTEMPTS} times."
        ) from error
    run.failed.add(name)
    yield Outcome(lost[0], run.cache.fail(lost[0], error))


def computed(work: Any, part: Groups, failed: set[str]) -> Iterator[Outcome | None]:
    """On a worker: the outcomes of a part of a run, after None when the model is loaded."""
    load, make, methods, folder, made_with, threads = work
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(made_with["float32_matmul_precision"])
    model = load()
    own = environment(model)
    if wrong := conflicts(own | {"behaviour": behaviour(model)}, made_with):
        raise ValueError(
            f"model must be the same on all machines, got on a worker {wrong[0]}. Give all "
            "machines the same files."
        )
    yield None
    yield from InProcess()(Run(make(model=model), methods, Store(folder), failed, own), part)
