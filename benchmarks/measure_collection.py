"""How long collection takes and how much memory: the filter on windows of a reference model's
training texts, and de-duplication.

For 100,000 sequences of 80 tokens each, and for fewer:

    python benchmarks/measure_collection.py
    python benchmarks/measure_collection.py 10000
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from tl_localize import load_model
from tl_localize.collect import Criteria, Report
from tl_localize.collect.duplicates import near_duplicates
from tl_localize.collect.filter import Candidate, Filter
from tl_localize.collect.reference_texts import training_data
from tl_localize.collect.search import chunks_of
from tl_localize.sequences import decoder
from tl_localize.texts.readers import Data

STRIDE = 1  # windows at every position: more than a hundred thousand in the training texts
MODEL = "reference-gpt2"


def peak() -> float:
    """Largest memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_filter(n: int) -> None:
    model = load_model(MODEL)
    tokens = torch.cat([entry.tokens for entry in training_data(model).entries()])
    rows = tokens[: len(tokens) // 256 * 256].view(-1, 256)
    filter = Filter(model, Criteria(), decoder(model))
    chunks = chunks_of([Data(source=rows)])
    windows = (window for chunk in chunks for window in chunk.windows(model, 80, STRIDE))
    started, processor = time.perf_counter(), time.process_time()
    print(
        f"filter: {MODEL}, {torch.get_num_threads()} threads, {peak():.0f} MiB before", flush=True
    )

    def watched() -> Iterator[Candidate]:
        for i, window in enumerate(islice(windows, n), 1):
            yield window
            if i % 10_000 == 0:
                print(
                    f"  {i} read, {time.perf_counter() - started:.0f} s, {peak():.0f} MiB",
                    flush=True,
                )

    found = filter.filter(watched())
    seconds, on_processor = time.perf_counter() - started, time.process_time() - processor
    print(f"  {Report(**found['report'])}, {len(found['recited'])} asked to recite")
    print(
        f"  {seconds:.0f} s in all, {on_processor:.0f} s on processors, peak {peak():.0f} MiB",
        flush=True,
    )


def measure_duplicates(n: int) -> None:
    """Half of the sequences have four near-duplicates, with a third of their tokens exchanged;
    tokens are as rare as words are.
    """
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.3, size=(n, 80)), 4095)
    family = np.arange(n) // 5 * 5
    related = np.arange(n) < n // 2
    copied = rng.random((n, 80)) < 2 / 3
    copied[:, :20] = True
    tokens = np.where(related[:, None] & copied, tokens[family], tokens)
    started = time.perf_counter()
    groups = near_duplicates(tokens)
    print(
        f"de-duplication: {n} sequences, {len(groups)} groups, {time.perf_counter() - started:.0f} "
        f"s, peak {peak():.0f} MiB"
    )


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    measure_duplicates(count)
    measure_filter(count)
