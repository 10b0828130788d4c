"""What commands that work for long share: model, data, results folder, and who computes."""

import logging
from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm.contrib.logging import logging_redirect_tqdm

from tl_localize.execution import Benchmark, InProcess, RayCluster, Store
from tl_localize.files import check_writable
from tl_localize.models import is_gguf, load_model
from tl_localize.neurons import LanguageModel
from tl_localize.readers import Data

UNNAMED = ("", "neurons", "zero", "adam")  # what is usual has no part in the name of a folder


def folder_of(given: Namespace, *parts: str) -> Path:
    """The results folder; its default name has these parts, of a path the last one.

    It must be fit for results before a model is loaded, but a new one is made only afterwards: a
    model that is not there leaves no folder.
    """
    name = "-".join(Path(part).name for part in parts if part not in UNNAMED)
    folder = given.out or Path("tl-localize-results") / name
    check_writable(folder)
    if folder.is_dir() and any(folder.iterdir()):
        Store(folder)
    return folder


def compute(
    given: Namespace, runs: Iterable[tuple[Benchmark[Any], Sequence[Any]]], store: Store
) -> bool:
    """Compute what is missing of some benchmarks, each with its methods. False if it was
    interrupted. Above the bar stands what the engine logs: each task if ``--verbose`` is given,
    else what failed; without a bar, how far it is now and then.
    """
    executor = InProcess(shard=given.shard)
    log = logging.getLogger("tl_localize")
    log.setLevel(logging.INFO if given.verbose else logging.WARNING)
    logging.getLogger("tl_localize.progress").setLevel(logging.INFO)
    if given.ray:
        executor = RayCluster(partial(load, given), address=given.ray, shard=given.shard)
    else:
        n = torch.get_num_threads()
        say(f"Using {n} CPU thread{'s' * (n > 1)} (set OMP_NUM_THREADS to change).")
    try:
        for benchmark, methods in runs:
            with logging_redirect_tqdm([log]):
                benchmark.run(methods, store, executor=executor, retry_failed=given.retry_failed)
    except KeyboardInterrupt:
        say("Interrupted. What is done is kept; go on with the same command.")
        return False
    return True


def load(given: Namespace, name: str = "") -> LanguageModel:
    """The model of a command, or another one, in its dtype."""
    name = name or given.model
    if is_gguf(name):
        say(f"Converting {Path(name).name} to {given.dtype} weights, which takes a while.")
    return load_model(name, given.device, getattr(torch, given.dtype))


def data_of(given: Namespace, path: Path) -> Data:
    """The data of a path, as the options of a command say."""
    known = Data.__dataclass_fields__
    values = {name: value for name, value in vars(given).items() if name in known}
    length = str(values.get("n_prefix"))
    if length.isdecimal():  # else a column's name
        values["n_prefix"] = int(length)
    return Data(source=path, **values)


def own_data(given: Namespace) -> Data | None:
    """The user's data, where a command takes one path."""
    return data_of(given, given.data) if given.data else None


def say(text: str) -> None:
    """A line for the person at the terminal, broken between words; tables go to standard output,
    everything else to standard error.
    """
    out = Console(stderr=True, highlight=False)
    out.print(text, markup=False, soft_wrap=not out.is_terminal)
