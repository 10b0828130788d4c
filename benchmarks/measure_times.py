"""How long a user waits: seconds of the commands, and of each method on one text.

    python benchmarks/measure_times.py reference-gpt2
    python benchmarks/measure_times.py SmolLM2-135M-Instruct.Q4_1.gguf --only localize erase

Commands are processes of their own with their defaults on one thread, from start to end, loading
included; those that a benchmark of hours would take on a larger model run on a part of it, which is
in the name of the row. Methods are called once on one text of a loaded model. Seconds are those of
the processor, as other programs may share it; on CUDA they are wall time. A row of
docs/results/times.csv is written as soon as its task is done.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from tl_localize import METHODS, Localizer, MemorizedSequence, example, load_model
from tl_localize.methods.base import LanguageModel
from tl_localize.model.loading import is_reference
from tl_localize.texts.known import first_example

FRAME = Path(__file__).parents[1] / "docs/results/times.csv"
KEYS = ["task", "model", "device"]
SCREENED = "zero_out, screen=0.05"
ONE_TEXT = (
    *("activations", "attribution", "gradient_alignment", "iterative_attribution", "slimming"),
    *("hard_concrete", "integrated_gradients", SCREENED),
)


def commands(model: str) -> dict[str, list[str]]:
    """Arguments of tl-localize by the name of the task."""
    text = ["--example", first_example(model)]
    tasks = {"known": ["known"], "localize": ["localize", *text], "erase": ["erase", *text]}
    if is_reference(model):
        tasks |= {"inj --limit 1": ["inj", "--limit", "1"]}
        tasks |= {"del --targets 1": ["del", "--targets", "1"]}
        tasks |= {"rev --groups 1": ["rev", "--groups", "1"]}
    else:
        some = ["--methods", "iterative_attribution,attribution,activations"]
        ratio = ["--ratio", "0.01"]
        tasks |= {"inj --limit 1, three methods": ["inj", "--limit", "1", *ratio, *some]}
        tasks |= {"del --targets 1, three methods": ["del", "--targets", "1", *some]}
    of_model = {name: [*arguments, "--model", model] for name, arguments in tasks.items()}
    return {"demo": ["demo"], **of_model} if is_reference(model) else of_model


def run_command(arguments: list[str]) -> float:
    """Seconds of a command, in a folder that is thrown away."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if arguments[0] not in ("demo", "known", "localize"):
            arguments = [*arguments, "--out", f"{folder}/out"]
        subprocess.run(
            [Path(sys.executable).with_name("tl-localize"), *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if torch.cuda.is_available():
        return time.perf_counter() - started
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_method(method: Localizer, model: LanguageModel, text: MemorizedSequence) -> float:
    """Seconds of one method on one text."""
    clock = time.process_time
    if torch.cuda.is_available():
        clock = time.perf_counter
    started = clock()
    method(model, text)  # its scores are on the CPU, so nothing is left to wait for
    return clock() - started


def run_again(method: Localizer, model: LanguageModel, text: MemorizedSequence) -> float:
    """Seconds of the second text, after what is prepared once for a model."""
    method(model, text)
    return run_method(method, model, text)


def tasks_of(name: str) -> dict[str, Callable[[], float]]:
    """What is measured on a model, in this order: a function that gives seconds, by its name."""
    model, text = load_model(name), first_example(name)
    sequence = example(model, text)
    methods = {task: METHODS[task.partition(",")[0]] for task in ONE_TEXT}
    settings = {SCREENED: {"screen": 0.05}}
    tasks: dict[str, Callable[[], float]] = {
        task: partial(run_method, method(**settings.get(task, {})), model, sequence)
        for task, method in methods.items()
    }
    tasks["iterative_attribution, another text"] = partial(
        run_again, METHODS["iterative_attribution"](), model, sequence
    )
    tasks |= {task: partial(run_command, call) for task, call in commands(name).items()}
    return tasks


def write_row(row: dict[str, object]) -> None:
    """Put a row in place of that of the same task, model and device."""
    rows = pd.read_csv(FRAME).to_dict("records") if FRAME.is_file() else []
    rows = [old for old in rows if any(old[key] != row[key] for key in KEYS)]
    pd.DataFrame([*rows, row]).sort_values(KEYS).to_csv(FRAME, index=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--only", nargs="*", help="tasks, by their names")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    tasks = tasks_of(asked.model)
    if unknown := set(asked.only or ()) - set(tasks):
        raise ValueError(f"--only must be of {list(tasks)}, got {sorted(unknown)}.")
    for name in asked.only or tasks:
        seconds = tasks[name]()
        print(f"{name}: {seconds:.2f} s", flush=True)
        row = {"task": name, "model": Path(asked.model).stem, "device": device}
        write_row(row | {"seconds": float(f"{seconds:.3g}"), "machine": machine})


if __name__ == "__main__":
    main()
