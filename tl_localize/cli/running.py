"""What the commands that work for long share: options, progress, Ctrl-C, and the words at the end."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from tqdm import tqdm

from tl_localize.cli.options import check_at_least, say
from tl_localize.execution.distributed import by_ray, in_process, jobs, parse_shard
from tl_localize.neurons import LanguageModel
from tl_localize.runs import Event, Run, status
from tl_localize.runs.base import Begun

EVERY = 60  # seconds between two lines of a log

Engine = Annotated[Literal["process", "ray"], typer.Option(help="Where the work is done: in this process, or by a Ray cluster.")]
Address = Annotated[str | None, typer.Option(help="Of a Ray cluster. Default: one is started on this machine.")]
Workers = Annotated[int | None, typer.Option(help="Of Ray. Default: as many as there is room for.")]
Gpus = Annotated[float | None, typer.Option(help="For each Ray worker, also a fraction. Default: 1 where there are GPUs.")]
Shard = Annotated[str, typer.Option(help="i/n: do the i-th of n parts of the work, one for each job of an array.")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="A line for every unit.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


@dataclass(frozen=True, kw_only=True)
class How:
    """Where work is done, and what is said of it: the options above.

    Raises:
        ValueError: one of them is out of its range.
    """

    shard: str
    engine: str
    address: str | None
    workers: int | None
    gpus: float | None
    verbose: bool
    quiet: bool

    def __post_init__(self) -> None:
        parse_shard(self.shard)
        check_at_least(1, workers=self.workers)
        check_at_least(0, gpus=self.gpus)


def work(runs: Sequence[Run], load: Callable[[], LanguageModel], how: How) -> bool:
    """Make what is missing. False if it was interrupted."""
    todo = jobs(runs, parse_shard(how.shard))
    planned = sum(len(work.measures) for run in runs for work in run.works)
    missing = sum(len(step.labels) for job in todo for step in job)
    if missing and missing < planned:
        say(f"{missing} of {planned} units are to be made, the others are there, have failed or fall to other shards.")
    try:
        with interruptible() as stop, progress(missing, how.verbose, how.quiet) as (show, begun):
            if how.engine == "ray":
                events = by_ray(runs, todo, load, stop, begun, address=how.address, workers=how.workers, gpus=how.gpus)
            else:
                events = in_process(runs, todo, stop, begun)
            for event in events:
                show(event)
            interrupted = stop()
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        say(f"Interrupted. What is done is kept; go on with the same command:\n  {shlex.join(['tl-localize', *sys.argv[1:]])}")
    return not interrupted


def finish(runs: Sequence[Run], done: bool) -> None:
    """Say what failed; leave with a status that tells."""
    state = status(runs[0].store)
    for unit, reason in state.reasons.items():
        say(f"FAILED {unit}: {reason.splitlines()[0]}")
    if state.reasons:
        say("Tracebacks are in the folder's failures; the same command with --retry-failed tries again.")
    if state.frame["not_converged"].sum():
        say("Some injections did NOT converge and are left out of the means; another --ratio, --max-steps or --learning-rate may help.")
    if not done:
        raise typer.Exit(130)
    if not state.clean:
        raise typer.Exit(1)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM asks for a stop after the unit in hand, a second one stops at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        say("Finishing the unit in hand, which may take minutes. Once more stops at once, and loses that unit alone.")

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone hears signals
        before: dict[signal.Signals, Any] = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress(total: int, verbose: bool, quiet: bool) -> Iterator[tuple[Callable[[Event], None], Begun]]:
    """A bar on a terminal, a line a minute in a log, nothing in a pipe unless asked for; also while one unit takes hours.

    Gives what is to be told of each unit that was made, and of each that is begun.
    """
    counts = {"done": 0, "failed": 0}
    started, now = time.monotonic(), "getting ready"
    logging.basicConfig(level=logging.ERROR if quiet else logging.WARNING, format="tl-localize: %(message)s")
    if total == 0:
        quiet = True
    terminal = sys.stderr.isatty()
    bar = tqdm(total=total, unit="unit", disable=quiet or not terminal, mininterval=0.5, dynamic_ncols=True)

    def begun(label: str, name: str) -> None:
        nonlocal now
        now = f"{label} on {name}"
        bar.set_postfix_str(now + (f", {counts['failed']} FAILED" if counts["failed"] else ""))

    def show(event: Event) -> None:
        counts["failed"] += bool(event.reason)
        counts["done"] += event.measured
        bar.update(event.measured)
        if event.reason and not quiet:
            say(f"FAILED {event.label} on {event.name}: {event.reason.splitlines()[0]}")
        if verbose:
            say(f"{event.label} on {event.name}: {event.seconds:.2f} s, {event.unit.file}")

    def tick() -> None:
        while not ended.wait(1 if terminal else EVERY):
            if terminal:
                bar.refresh()
            else:
                speed = tqdm.format_meter(
                    counts["done"], total, time.monotonic() - started, unit="unit", bar_format="{rate_fmt}, {remaining} left"
                )
                say(f"{counts['done']} of {total} units, {counts['failed']} failed, {speed.strip()}, now {now}")

    ended, clock = threading.Event(), threading.Thread(target=tick, daemon=True)
    if not quiet and (terminal or verbose or is_log()):
        clock.start()
    with bar:
        try:
            yield show, begun
        finally:
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


def again(command: str, **options: Any) -> list[str]:
    """A command line from the options that a run was given, paths in full; what was left out is left out."""
    if Path(options["model"]).is_dir():
        options["model"] = Path(options["model"])
    line = [command]
    for name, value in options.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and one is not False:
                path = str(Path(one).resolve()) if isinstance(one, Path) else str(one)
                line += [f"--{name.replace('_', '-')}"] + ([] if one is True else [path])
    return line
