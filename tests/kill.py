"""A run that is killed at random moments and resumed until it is done, and what must be true
afterwards. For tests and benchmarks.

The run is forked from this process, in which everything is imported, so that a round costs what the
work costs.
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Killed:
    """What was seen.

    Args:
        rounds: runs that were killed.
        inside_writes: of these, while a file was being written (its temporary file was left).
        computed: how often each task was begun, and how often it was begun again without having
            been in hand.
    """

    rounds: int = 0
    inside_writes: int = 0
    seconds: float = 0.0
    computed: Counter[str] = field(default_factory=Counter)
    wasted: int = 0


def forked(work: Callable[[], object]) -> int:
    """Run in a child; returns its process id. Exit status 0 when the work ended."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def kill_until(
    run: Callable[[], object], folder: Path, log: Path, rounds: int, seed: int, mean: float
) -> Killed:
    """Kill a run at random moments, at least so many times as it takes, and then let it finish.

    Args:
        run: makes what is missing in ``folder``, and tells ``log`` when it begins a task ("begin
            X") and when it is kept ("kept X").
        mean: seconds to the kill, on average (exponentially distributed, so that all moments are as
            likely).
    """
    lots, seen = random.Random(seed), Killed()
    started = time.monotonic()
    while True:
        left = temporary(folder)
        child = forked(run)
        status = None
        if seen.rounds < rounds:
            deadline = time.monotonic() + lots.expovariate(1 / mean)
            # Every second kill waits for a file that is being written.
            while status is None and (
                time.monotonic() < deadline or (seen.rounds % 2 and temporary(folder) <= left)
            ):
                time.sleep(0.0005)
                done, code = os.waitpid(child, os.WNOHANG)
                status = code if done else None
            if status is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                seen.rounds += 1
                seen.inside_writes += not temporary(folder) <= left
                with log.open("a") as file:
                    file.write("killed\n")
                continue
        else:
            status = os.waitpid(child, 0)[1]
        assert status == 0, f"the run ended with {status}"
        break
    seen.seconds = time.monotonic() - started
    in_hand: set[str] = set()
    again: set[str] = set()  # what was in hand when a run was killed may be begun again
    for line in log.read_text().splitlines():
        word, _, task = line.partition(" ")
        if word == "begin":
            seen.wasted += seen.computed[task] > 0 and task not in again
            seen.computed[task] += 1
            again.discard(task)
            in_hand.add(task)
        elif word == "kept":
            in_hand.discard(task)
        else:
            again |= in_hand
            in_hand.clear()
    return seen


def temporary(folder: Path) -> set[str]:
    """Files that are being written, or were when a run was killed."""
    return (
        {name for name in os.listdir(folder / "tmp") if name.endswith(".tmp")}
        if (folder / "tmp").is_dir()
        else set()
    )


def logged(log: Path) -> None:
    """Let all runs of this process tell a log what they begin to compute and what is kept."""
    from tl_localize.execution.engine import Run
    from tl_localize.execution.store import Store

    compute, write = Run._compute, Store.write

    def line(text: str) -> None:
        with log.open("a") as file:
            file.write(text + "\n")

    def told(self: Any, task: Any, held: Any) -> Any:
        line(f"begin {task.file}")
        return compute(self, task, held)

    def kept(self: Any, task: Any, record: Any) -> None:
        write(self, task, record)
        line(f"kept {task.file}")

    Run._compute, Store.write = told, kept
