"""What commands that work for long share: a results folder, and who computes."""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from tl_localize.cli.messages import COMMAND, say
from tl_localize.cli.options import ModelOptions, RunOptions
from tl_localize.execution import RayCluster, Store
from tl_localize.files import check_writable
from tl_localize.methods.base import Method
from tl_localize.stats import quantity

UNNAMED = ("", "neurons", "zero", "adam")  # what is usual has no part in the name of a folder


@runtime_checkable
class Runnable(Protocol):
    """A benchmark, whatever its results are."""

    def run(
        self,
        methods: Sequence[Method],
        store: Store,
        *,
        shard: tuple[int, int],
        cluster: RayCluster | None,
    ) -> object: ...


def folder_of(run: RunOptions, *parts: str) -> Path:
    """The results folder; its default name has these parts, of a path the last one.

    It must be fit for results before a model is loaded, but a new one is made only afterwards: a
    model that is not there leaves no folder.
    """
    # a path may end in a dot; a link keeps its own name
    name = "-".join(
        os.path.basename(os.path.abspath(part)) for part in parts if part not in UNNAMED
    )
    folder = run.out or Path("tl-localize-results") / name
    check_writable(folder)
    if folder.is_dir() and any(folder.iterdir()):
        Store(folder)
    return folder


def compute(
    run: RunOptions,
    model: ModelOptions,
    runs: Iterable[tuple[Runnable, Sequence[Method]]],
    store: Store,
) -> bool:
    """Compute what is missing of some benchmarks, each with its methods. False if it was
    interrupted. Above the bar stands what the engine logs: each result if ``--verbose`` is given,
    else what failed; without a bar, how far it is now and then.
    """
    log = logging.getLogger("tl_localize")
    log.setLevel(logging.INFO if run.verbose else logging.WARNING)
    logging.getLogger("tl_localize.progress").setLevel(logging.INFO)
    store.command = COMMAND.get()
    cluster = None
    if run.ray:
        if Path(model.model).exists():  # a worker may run in another folder
            model = replace(model, model=os.path.abspath(model.model))
        cluster = RayCluster(load=model.load, address=run.ray)
    else:
        threads = quantity(torch.get_num_threads(), "CPU thread")
        say(f"Using {threads} (set OMP_NUM_THREADS to change).")
    try:
        for benchmark, methods in runs:
            with logging_redirect_tqdm([log]):
                benchmark.run(methods, store, shard=run.shard, cluster=cluster)
    except KeyboardInterrupt:
        say("Interrupted. What is done is kept; go on with the same command.")
        return False
    return True
