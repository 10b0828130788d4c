"""Measures how far apart two runs of DEL may be, and writes expected/bands.csv:

    python benchmarks/measure_bands.py reference-gpt2

Hard Concrete and Iterative Attribution (for the texts that the model writes) draw: other seeds are
compared with seed 0. Slimming draws nothing: each weight is multiplied by 1 + 6e-8 g with a normal
g, which changes its last digits. The band of a method, share and column is the largest difference
of a text, over a few targets; of the mean of these where the committed frame has means alone.
Perplexity is not measured, and of these methods not compared.
"""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from comparison import BANDS, EXACT, EXPECTED, MEAN, indexed, read_frame

N_TARGETS, SEEDS = 2, (1, 2)
DRAWN, LEARNED = ("hard_concrete", "iterative_attribution"), ("slimming",)
LEAST = 1e-3  # of a mean accuracy: two machines agreed to 0.1 points, which is all that was kept
LAST_DIGIT = 6e-8  # of float32, relative
COLUMNS = [
    *("delta_self_accuracy", "delta_self_levenshtein"),
    *("delta_neg_accuracy", "delta_neg_levenshtein"),
]
HOW = {
    **dict.fromkeys(DRAWN, f"{len(SEEDS)} seeds on {N_TARGETS} targets of {{model}}"),
    **dict.fromkeys(LEARNED, f"{len(SEEDS)} changes of the weights' last digits, as above"),
}


def benchmark(name: str) -> Any:
    """DEL on the first targets of a shipped model."""
    from tl_localize import DelBenchmark, load_model
    from tl_localize.collect.reference_texts import reference_search
    from tl_localize.evals.settings import DEL_SEQUENCES, del_ratios, drawn_first
    from tl_localize.texts.reference import held_out_tokens

    model = load_model(name)
    search = reference_search(model)
    found = search.collection(search.run(), n_dev=5)
    sequences = drawn_first(found.sequences, found.n_dev, seed=0)[:DEL_SEQUENCES]
    general = held_out_tokens()[:1, :16]  # its perplexity is not looked at
    how = {"ratios": del_ratios(name), "n_dev": found.n_dev, "n_targets": N_TARGETS}
    return DelBenchmark(model, sequences, general, **how)


def with_other_digits(data: Any, seed: int) -> Any:
    """The same with the last digits of all weights changed."""
    model = copy.deepcopy(data.model)
    change_last_digits(model, seed)
    return replace(data, model=model)


@torch.no_grad()
def change_last_digits(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        weight.mul_(1 + LAST_DIGIT * noise)


def measured(data: Any, method: str, **settings: Any) -> pd.DataFrame:
    from tl_localize.evals.settings import del_methods

    (chosen,) = del_methods(method)
    frame = data.run([replace(chosen, **settings)]).frame
    return indexed(frame[frame["method"] == method])[COLUMNS].droplevel("method")


def largest(base: pd.DataFrame, others: list[pd.DataFrame], means: bool) -> pd.DataFrame:
    """The largest difference by share and column: of a text, or of the mean over texts."""
    gaps = [(other - base).groupby("ratio") for other in others]
    parts = [gap.mean().abs() if means else gap.agg(lambda x: x.abs().max()) for gap in gaps]
    return pd.concat(parts).groupby("ratio").max()


def bands_of(name: str) -> pd.DataFrame:
    """The rows of expected/bands.csv for a model's frame of DEL."""
    frame = f"del-{name}"
    committed = read_frame(frame)
    data = benchmark(name)
    others: dict[str, list[pd.DataFrame]] = {
        method: [measured(data, method, seed=seed) for seed in SEEDS] for method in DRAWN
    }
    changed = [with_other_digits(data, seed) for seed in SEEDS]
    others |= {method: [measured(other, method) for other in changed] for method in LEARNED}
    rows: list[dict[str, Any]] = []
    for method, found in others.items():
        texts = committed.xs(method, level="method").index.unique("sequence_id")
        bands = largest(measured(data, method), found, MEAN in texts)
        if MEAN in texts:
            bands = bands.clip(lower=LEAST)
        for ratio, band in bands.iterrows():
            about = {"frame": frame, "method": method, "setting": ratio}
            how = HOW[method].format(model=name)
            rows += [
                about | {"column": column, "band": max(band[column], EXACT), "measured": how}
                for column in COLUMNS
                if column in committed
            ]
            rows += [
                about | {"column": column, "band": math.inf, "measured": "not compared"}
                for column in committed
                if "perplexity" in str(column)
            ]
    return pd.DataFrame(rows)


if __name__ == "__main__":
    path = EXPECTED / f"{BANDS}.csv"
    bands = pd.read_csv(path)
    for name in sys.argv[1:]:
        found = bands_of(name)
        replaced = bands["frame"].isin(found["frame"]) & bands["method"].isin(found["method"])
        bands = pd.concat([bands[~replaced], found]).sort_values(["frame", "method", "setting"])
    bands.to_csv(path, index=False)
