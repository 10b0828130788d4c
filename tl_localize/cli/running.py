"""A command that works for long: who computes, what is told of it meanwhile, and Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tl_localize.cli.options import say
from tl_localize.evals.presets import parse_dtype
from tl_localize.execution import Benchmark, InProcess, RayCluster, Store
from tl_localize.execution.engine import parse_shard
from tl_localize.models import load_model
from tl_localize.neurons import LanguageModel
from tl_localize.readers import Data

EVERY = 60  # seconds between two lines of a log
UNNAMED = ("", "neurons", "zero")  # what is usual has no part in the name of a folder


class Run:
    """The model of a command, where its results go, and who computes, from its options."""

    def __init__(self, given: Namespace) -> None:
        self.given = given
        # mistakes are found before the model is loaded
        self.dtype = parse_dtype(given.dtype)
        self.shard = parse_shard(given.shard)

    def store(self, *parts: str) -> Store:
        """The results folder; its default name has these parts, of a path the last one."""
        name = "-".join(Path(part).name for part in parts if part not in UNNAMED)
        return Store(self.given.out or Path("tl-localize-results") / name)

    def load(self) -> LanguageModel:
        return load_model(self.given.model, self.given.device, self.dtype)

    def compute(self, runs: Sequence[tuple[Benchmark[Any], Sequence[Any]]], store: Store) -> bool:
        """Compute what is missing of some benchmarks, each with its methods. False if it was
        interrupted.
        """
        given, quiet = self.given, self.given.quiet
        if not quiet and given.engine == "process":
            n = torch.get_num_threads()
            say(f"Using {n} CPU thread{'s' * (n > 1)} (set OMP_NUM_THREADS to change).")
        with Stop() as stop, Progress(given.verbose, quiet) as progress:
            executor = InProcess(self.shard, stop)
            if given.engine == "ray":
                how = (given.address, given.workers, given.gpus)
                executor = RayCluster(self.load, *how, self.shard, stop)
            try:
                for number, (benchmark, methods) in enumerate(runs):
                    show = partial(progress.show, number, len(runs))
                    again = given.retry_failed
                    benchmark.run(methods, store, show, executor=executor, retry_failed=again)
                    if stop():
                        break
            except KeyboardInterrupt:
                stop.asked = True
            finally:
                if isinstance(executor, RayCluster):
                    executor.close()
        if stop.asked:
            say("Interrupted. What is done is kept; go on with the same command.")
        elif not progress.computed and not quiet:
            say("Already done; using saved results.")
        return not stop.asked


def data_of(given: Namespace, path: Path | None, *options: str) -> Data | None:
    """The data of ``--data`` and of the named options beside it; None where none are given."""
    if path is None:
        if getattr(given, "suffix", None):
            raise ValueError("data must be given with suffixes, got none. Name it with --data.")
        return None
    values = {name: vars(given)[name] for name in options}
    length = str(values.get("n_prefix"))
    if length.lstrip("-").isdecimal():  # else a column's name
        values["n_prefix"] = int(length)
    return Data(source=path, **values)


class Stop:
    """Ctrl-C or SIGTERM asks for a stop after the task in hand, a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Stop:
        self.before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        say(
            "Finishing the task in hand, which may take minutes. Once more stops at once, and "
            "loses that task alone."
        )


class Progress(logging.Handler):
    """A bar with the time left on a terminal, a line a minute in a log, nothing in a pipe; also
    while one task takes hours.

    What the engine logs is shown too: each task if ``verbose``, failures unless ``quiet``.
    """

    def __init__(self, verbose: bool = False, quiet: bool = False) -> None:
        super().__init__()
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        self.told = not quiet and (self.terminal or verbose or is_log())
        self.threshold = logging.INFO if verbose else logging.WARNING
        if quiet:
            self.threshold = logging.ERROR
        self.bar = tqdm(
            total=1.0,
            bar_format="{l_bar}{bar}| {elapsed} elapsed, {remaining} left {postfix}",
            mininterval=0.5,
            dynamic_ncols=True,
            disable=quiet or not self.terminal,
        )
        self.done, self.now, self.computed = 0.0, "getting ready", False
        self.started, self.ended = time.monotonic(), threading.Event()
        self.clock = threading.Thread(target=self.tick, daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())

    def show(self, number: int, count: int, fraction: float, what: str) -> None:
        """The numbered one of some runs is so far; this is being done."""
        self.computed = self.computed or fraction < 1
        self.done, self.now = (number + fraction) / count, what
        self.bar.set_postfix_str(what, refresh=False)
        self.bar.update(self.done - self.bar.n)

    def tick(self) -> None:
        while not self.ended.wait(1 if self.terminal else EVERY):
            if self.terminal:
                self.bar.refresh()
                continue
            left = "?"
            if self.done:
                spent = time.monotonic() - self.started
                left = tqdm.format_interval(spent * (1 - self.done) / self.done)
            say(f"{100 * self.done:.0f} %, {left} left, now {self.now}")

    def __enter__(self) -> Progress:
        log = logging.getLogger("tl_localize")
        log.addHandler(self)
        log.setLevel(self.threshold)
        if self.told:
            self.clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        log = logging.getLogger("tl_localize")
        log.removeHandler(self)
        log.setLevel(logging.NOTSET)
        self.ended.set()
        if self.told:
            self.clock.join()
        self.bar.close()


def is_log() -> bool:
    """Whether standard error goes to a file, or to the log of a batch job."""
    if "SLURM_JOB_ID" in os.environ:
        return True
    try:
        return stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError):
        return False
