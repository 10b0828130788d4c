"""A long run: who computes, what is told of it meanwhile, Ctrl-C, and the words at the end."""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from tqdm import tqdm

from tl_localize.cli.options import RunOptions, say
from tl_localize.execution import Benchmark, InProcess, RayCluster, Store, status
from tl_localize.execution.engine import Progress, parse_shard
from tl_localize.execution.status import planned
from tl_localize.neurons import LanguageModel

EVERY = 60  # seconds between two lines of a log


def compute(
    runs: Sequence[tuple[Benchmark[Any], Sequence[Any]]],
    store: Store,
    options: RunOptions,
    load: Callable[[], LanguageModel],
) -> bool:
    """Compute what is missing of some benchmarks, each with its methods. False if it was
    interrupted.
    """
    interrupted, shard, computed = False, parse_shard(options.shard), False
    if not options.quiet and options.engine == "process":
        say(
            f"Computed on {torch.get_num_threads()} CPU threads beside the device; "
            "OMP_NUM_THREADS=1 before the command takes one."
        )

    def tell(number: int, fraction: float, what: str) -> None:
        nonlocal computed
        computed = computed or fraction < 1
        show((number + fraction) / len(runs), what)

    with interruptible() as stop, progress(options.verbose, options.quiet) as show:
        cluster = (
            RayCluster(load, options.address, options.workers, options.gpus, shard, stop)
            if options.engine == "ray"
            else None
        )
        try:
            for number, (benchmark, methods) in enumerate(runs):
                executor = cluster or InProcess(shard, stop)
                benchmark.run(
                    methods,
                    store,
                    partial(tell, number),
                    executor=executor,
                    retry_failed=options.retry_failed,
                )
                if interrupted := stop():
                    break
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if cluster:
                cluster.close()
    if interrupted:
        say(
            "Interrupted. What is done is kept; go on with the same command:\n  "
            f"{shlex.join(['tl-localize', *sys.argv[1:]])}"
        )
    elif not computed and not options.quiet:
        say(
            "Nothing is left to compute here: all of it is there, has failed before, or falls to "
            "other shards."
        )
    return not interrupted


def finish(store: Store, done: bool, publish: Callable[[Store, Path], None]) -> None:
    """Publish what is there, and say what failed; leave with a status that tells.

    Where another run has written the last records meanwhile, its tables may just have been replaced
    by older ones: publish again.
    """
    while True:
        lacking = [task for task in planned(store) if not store.has(task)]
        publish(store, store.folder)
        state = status(store)
        if state.frame["missing"].sum() or not any(store.has(task) for task in lacking):
            break
    for task, reason in state.reasons.items():
        say(f"FAILED {task}: {reason.splitlines()[0]}")
    if state.reasons:
        say(
            "Tracebacks are in the folder's failures; the same command with --retry-failed tries "
            "again."
        )
    if state.frame["not_converged"].sum():
        say(
            "Some injections did NOT converge and are left out of the means; another --ratio, "
            "--max-steps or --learning-rate may help."
        )
    if not done:
        raise typer.Exit(130)
    if not state.clean:
        raise typer.Exit(1)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM asks for a stop after the task in hand, a second one stops at once."""
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        say(
            "Finishing the task in hand, which may take minutes. Once more stops at once, and "
            "loses that task alone."
        )

    alone_hears = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.signal(number, ask)
        for number in (signal.SIGINT, signal.SIGTERM)
        if alone_hears
    }
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress(verbose: bool = False, quiet: bool = False) -> Iterator[Progress]:
    """A bar with the time left on a terminal, a line a minute in a log, nothing in a pipe; also
    while one task takes hours.

    What the engine logs is shown too: each task if ``verbose``, failures unless ``quiet``.
    """
    started, done, now = time.monotonic(), 0.0, "getting ready"
    terminal, form = (
        sys.stderr.isatty(),
        "{l_bar}{bar}| {elapsed} elapsed, {remaining} left {postfix}",
    )
    bar = tqdm(
        total=100,
        unit="%",
        bar_format=form,
        mininterval=0.5,
        dynamic_ncols=True,
        disable=quiet or not terminal,
    )
    log, said = logging.getLogger("tl_localize"), logging.Handler()
    said.emit = lambda record: say(record.getMessage())

    def show(fraction: float, what: str) -> None:
        nonlocal done, now
        done, now = 0.0 if math.isnan(fraction) else fraction, what
        bar.set_postfix_str(what, refresh=False)
        bar.update(100 * done - bar.n)

    def tick() -> None:
        while not ended.wait(1 if terminal else EVERY):
            if terminal:
                bar.refresh()
            else:
                left = (
                    tqdm.format_interval((time.monotonic() - started) * (1 - done) / done)
                    if done
                    else "?"
                )
                say(f"{100 * done:.0f} %, {left} left, now {now}")

    ended, clock = threading.Event(), threading.Thread(target=tick, daemon=True)
    if not quiet and (terminal or verbose or is_log()):
        clock.start()
    log.addHandler(said)
    log.setLevel(logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING)
    with bar:
        try:
            yield show
        finally:
            log.removeHandler(said)
            log.setLevel(logging.NOTSET)
            ended.set()
            if clock.is_alive():
                clock.join()


def is_log() -> bool:
    """Whether standard error goes to a file, or to the log of a batch job."""
    if "SLURM_JOB_ID" in os.environ:
        return True
    try:
        return stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError):
        return False
