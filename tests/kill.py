"""A run that is killed at random moments and started again until it is done, and what must be true
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
        written: how often each step was written; it is written once, unless it was not kept.
    """

    rounds: int = 0
    inside_writes: int = 0
    written: Counter[str] = field(default_factory=Counter)


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
    """Kill a run at random moments, so many times or until it is done, and then let it finish.

    Args:
        run: computes what is missing in ``folder``, and appends the key of each step that it has
            written to ``log``.
        mean: seconds to the kill, on average (exponentially distributed, so that all moments are as
            likely).
    """
    lots = random.Random(seed)
    seen = Killed()
    while True:
        before = temporary(folder)
        child = forked(run)
        kill = seen.rounds < rounds
        status = wait_for_the_kill(child, folder, before, lots, mean, seen) if kill else None
        if kill and status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            seen.rounds += 1
            seen.inside_writes += not temporary(folder) <= before
            continue
        if status is None:
            status = os.waitpid(child, 0)[1]
        assert status == 0, f"the run ended with {status}"
        seen.written.update(log.read_text().splitlines())
        return seen


def wait_for_the_kill(child, folder, before, lots, mean, seen):
    """Wait for a random time, and every second time until a file is being written; the exit status
    of the run where it ends before.
    """
    deadline = time.monotonic() + lots.expovariate(1 / mean)
    while time.monotonic() < deadline or (seen.rounds % 2 and temporary(folder) <= before):
        time.sleep(0.0005)
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
    return None


def temporary(folder):
    """Files that are being written, or were when a run was killed."""
    return {path.name for path in folder.glob("tmp/.*.tmp")}


def log_writes(log):
    """Let all stores of this process append the key of each step that they have written."""
    from tl_localize.execution import Store

    write = Store._write

    def write_and_tell(self, key, inputs, value, cell=None):
        write(self, key, inputs, value, cell)
        with log.open("a") as file:
            file.write(f"{inputs['step']}/{key}\n")

    Store._write = write_and_tell
