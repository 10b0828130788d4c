"""A run that is killed at random moments and resumed until it is done, and what must be true
afterwards. For tests and benchmarks.

The run is forked from this process, in which everything is imported, so that a round costs what the
work costs.
"""

import os
import random
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Killed:
    """What was seen.

    Args:
        rounds: runs that were killed.
        inside_writes: of these, while a file was being written (its temporary file was left).
        computed: how often each task was begun.
        wasted: tasks that were begun again after they had been kept.
    """

    rounds: int = 0
    inside_writes: int = 0
    computed: Counter[str] = field(default_factory=Counter)
    wasted: int = 0


def forked(work):
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


def kill_until(run, folder, log, rounds, seed, mean):
    """Kill a run at random moments, at least so many times as it takes, and then let it finish.

    Args:
        run: makes what is missing in ``folder``, and tells ``log`` when it begins a task ("begin
            X") and when it is kept ("kept X").
        mean: seconds to the kill, on average (exponentially distributed, so that all moments are as
            likely).
    """
    lots, seen = random.Random(seed), Killed()
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
                continue
        else:
            status = os.waitpid(child, 0)[1]
        assert status == 0, f"the run ended with {status}"
        break
    kept = set()
    for line in log.read_text().splitlines():
        word, _, task = line.partition(" ")
        if word == "begin":
            seen.computed[task] += 1
            seen.wasted += task in kept
        else:
            kept.add(task)
    return seen


def temporary(folder):
    """Files that are being written, or were when a run was killed."""
    return {path.name for path in folder.glob("tmp/.*.tmp")}


def logged(log):
    """Let all runs of this process tell a log what they begin to compute and what is kept."""
    from tl_localize.execution.engine import Run
    from tl_localize.execution.store import Store

    compute, write = Run._compute, Store.write

    def line(text):
        with log.open("a") as file:
            file.write(text + "\n")

    def told(self, task, held):
        line(f"begin {task.file}")
        return compute(self, task, held)

    def kept(self, task, record):
        write(self, task, record)
        line(f"kept {task.file}")

    Run._compute, Store.write = told, kept
