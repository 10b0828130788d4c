"""Measures how far apart two runs may be, and writes expected/bands.csv:

    python benchmarks/measure_bands.py del-reference-gpt2 inj-reference-gpt2

Another machine widens them, by the frames that a run of ``pytest benchmarks`` left there:

    python benchmarks/measure_bands.py rev-reference-gpt2 \\
        --measured benchmarks/results/measured --machine "EPYC without AVX-512"

Hard Concrete and Iterative Attribution (for the texts that the model writes) draw: other seeds are
compared with seed 0. For another machine stands a model each of whose weights is multiplied by
1 + 6e-8 g with a normal g, which changes its last digits. The band of a method, share and column is
the largest difference of a text, over a few texts.

DEL trains nothing but the masks, so the methods that draw or learn are measured. INJ, INJ with
distractors and REV train the model first, so all methods are measured, over all shares together; so
are the rivals, most of which draw or learn.
Perplexity is not measured, and of those methods not compared. In a trained model a token at a tie,
or a row at the border of a share, may move under any method: what a machine moved under one of them
is allowed to all.
"""

from __future__ import annotations

import argparse
import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import test_del_table
import test_inj_distractors
import test_inj_table
import test_rev_table
import test_rival_methods
import torch
from comparison import (
    BANDS,
    EVERY,
    EXACT,
    EXPECTED,
    SETTINGS,
    by_levels,
    indexed,
    read_bands,
    read_frame,
)
from del_data import shipped_benchmark

N_TARGETS, SEEDS = 2, (1, 2)
DRAWN, LEARNED = ("hard_concrete", "iterative_attribution"), ("slimming",)
WRITTEN = (
    "activation_contrast"  # it draws the texts that the model writes, where a model is trained
)
# of frames that are measured here
KINDS = ("del", "curve", "heads", "inj", "inj_seeds", "distractors", "rev", "rivals")
TRAINED = ("inj", "inj_seeds", "distractors", "rev", "erase", "real")  # frames of edited models
N_GROUPS = {"rev": test_rev_table.N_GROUPS, "distractors": test_inj_distractors.N_GROUPS_FULL}
BAND_COLUMNS = ["frame", "method", "setting", "column", "band", "measured"]
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
    """DEL on the first targets of a shipped model; its perplexity is not looked at."""
    from tl_localize import load_model
    from tl_localize.texts.reference import held_out_tokens

    few_rows = {"general_tokens": held_out_tokens()[:1, :16]}
    return shipped_benchmark(load_model(name), N_TARGETS, **few_rows)


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

    (chosen,) = del_methods(method, units=data.units)
    frame = data.run([replace(chosen, **settings)]).frame
    return indexed(frame[frame["method"] == method])[COLUMNS].droplevel("method")


def largest(base: pd.DataFrame, others: list[pd.DataFrame]) -> pd.DataFrame:
    """The largest difference of a text by share and column."""
    return pd.concat([(other - base).abs() for other in others]).groupby("ratio").max()


def bands_of_heads(frame: str, name: str) -> pd.DataFrame:
    """The rows of expected/bands.csv for a model's frame of heads against neurons."""
    from tl_localize import AttentionHeads, MLPNeurons
    from tl_localize.evals.settings import del_ratios

    data, method = benchmark(name), "iterative_attribution"
    parts: list[pd.DataFrame] = []
    for units, ratios in (
        (AttentionHeads(), del_ratios(name, AttentionHeads())),
        (MLPNeurons(), test_del_table.AS_MANY_ROWS),
    ):
        of_units = replace(data, units=units, ratios=ratios)
        others = [measured(of_units, method, seed=seed) for seed in SEEDS]
        parts.append(largest(measured(of_units, method), others))
    unseen = [name for name in read_frame(frame).columns if "perplexity" in name]
    rows: list[dict[str, Any]] = []
    for ratio, band in pd.concat(parts).iterrows():
        about = {"frame": frame, "method": method, "setting": ratio}
        how = HOW[method].format(model=name)
        rows += [
            about | {"column": column, "band": max(band[column], EXACT), "measured": how}
            for column in COLUMNS
        ]
        rows += [
            about | {"column": column, "band": math.inf, "measured": "not compared"}
            for column in unseen
        ]
    return pd.DataFrame(rows)


def bands_of_del(frame: str, name: str) -> pd.DataFrame:
    """The rows of expected/bands.csv for a model's frame of DEL, at its shares."""
    committed = read_frame(frame)
    data = replace(benchmark(name), ratios=tuple(committed.index.unique("ratio")))
    others: dict[str, list[pd.DataFrame]] = {
        method: [measured(data, method, seed=seed) for seed in SEEDS] for method in DRAWN
    }
    changed = [with_other_digits(data, seed) for seed in SEEDS]
    others |= {method: [measured(other, method) for other in changed] for method in LEARNED}
    rows: list[dict[str, Any]] = []
    for method, found in others.items():
        for ratio, band in largest(measured(data, method), found).iterrows():
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


def benchmark_that_trains(kind: str, model: Any, name: str) -> tuple[Any, list[Any]]:
    """INJ of two sentences, or INJ with distractors or REV of the committed groups; and the
    methods.
    """
    from tl_localize import RevBenchmark
    from tl_localize.evals.settings import (
        first_layer_settings,
        inj_ratios,
        inj_runs,
        make_methods,
    )
    from tl_localize.texts.reference import held_out_tokens, inj_sequences

    sentences = inj_sequences(model)
    if kind == "rev":
        rev = RevBenchmark(
            model,
            sentences,
            held_out_tokens(model)[: test_rev_table.N_GENERAL],
            n_groups=test_rev_table.N_GROUPS,
            ratios=test_rev_table.RATIOS,
        )
        rivals = test_rev_table.settings_elsewhere(name, test_rev_table.ONE_SHARE)
        names = f"{test_rev_table.METHODS},{test_rev_table.RIVALS}"
        return rev, make_methods(names, [], rivals, first_layer_settings(0))
    if kind in ("inj", "inj_seeds"):
        chosen = "all" if kind == "inj" else test_inj_table.CHEAP
        (run,) = inj_runs(model, name, sentences[:N_TARGETS], chosen)
    else:
        n_others = test_inj_distractors.DISTRACTORS
        (ratio,) = inj_ratios(name)[:1]
        (run,) = inj_runs(
            model,
            name,
            sentences[: (n_others + 1) * test_inj_distractors.N_GROUPS_FULL],
            test_inj_distractors.ALL,
            [],
            test_inj_distractors.settings_of(name, ratio),
            [ratio],
            distractors=n_others,
        )
    return run


def bands_of_trained(frame: str, kind: str, name: str) -> pd.DataFrame:
    """The rows of expected/bands.csv for a frame of a benchmark that trains: the committed numbers
    of its first texts against those of a model with other last digits, methods with another seed.
    """
    from tl_localize import load_model

    model = load_model(name)
    change_last_digits(model, seed=SEEDS[0])
    benchmark, methods = benchmark_that_trains(kind, model, name)
    drawn = [
        replace(method, seed=SEEDS[0]) if hasattr(method, "seed") else method for method in methods
    ]
    n_groups = N_GROUPS.get(kind, 1)
    found = benchmark.run(drawn, shard=(1, n_groups)).frame.astype({"group": str})
    if kind == "inj_seeds":
        found["first_seed"] = 0
    return bands_of_gaps(frame, name, indexed(found[found["converged"]]))


def bands_of_rivals(frame: str, name: str) -> pd.DataFrame:
    """The same of a frame of rivals, at the settings that were searched for them."""
    from tl_localize import METHODS, load_model
    from tl_localize.execution import Steps

    model = load_model(name)
    change_last_digits(model, seed=SEEDS[0])
    ours = {method: {} for method in test_rival_methods.OURS}
    best = ours | test_rival_methods.searched(name)
    drawn = {
        method: settings | ({"seed": SEEDS[0]} if hasattr(METHODS[method](), "seed") else {})
        for method, settings in best.items()
    }
    benchmark = shipped_benchmark(model, N_TARGETS, ratios=test_rival_methods.SHARES)
    measured = test_rival_methods.measure_curves(benchmark, drawn, (), Steps())
    return bands_of_gaps(frame, name, indexed(measured.frame))


def bands_of_gaps(frame: str, name: str, measured: pd.DataFrame) -> pd.DataFrame:
    """The largest difference of each method and column from the committed numbers."""
    gap = (measured - read_frame(frame)).abs().dropna(how="all")
    n_texts = gap.index.unique("sequence_id").size
    how = f"other last digits of the weights and other seeds, {n_texts} texts of {name}"
    largest_gaps = gap.groupby("method").max().drop("random", errors="ignore")
    return pd.DataFrame(
        {"frame": frame, "method": method, "column": column, "band": max(band, EXACT)}
        | {"measured": how}
        for method, columns in largest_gaps.to_dict("index").items()
        for column, band in columns.items()
        if not math.isnan(band)
    )


def widened(frame: str, folder: Path, machine: str) -> pd.DataFrame:
    """The rows of expected/bands.csv for a frame, as wide as what another machine measured, where
    that is wider; also of methods that had none.
    """
    committed = read_frame(frame)
    gap = (by_levels(read_frame(frame, folder), committed) - committed).abs()
    setting = next((name for name in SETTINGS if name in gap.index.names), None)
    drawn = gap.index.isin([*DRAWN, *LEARNED, WRITTEN, "random"], "method")
    trained = frame.partition("-")[0] in TRAINED
    of_all = gap[~drawn].max() if trained else pd.Series(0.0, gap.columns)
    rows: list[dict[str, Any]] = []
    for band in read_bands(frame).to_dict("records"):
        own = gap[gap.index.isin([band["method"]], "method")]
        if not math.isnan(band["setting"]):
            own = own[own.index.isin([band["setting"]], setting)]
        moved = pd.Series([own[band["column"]].max(), of_all[band["column"]]]).max()
        if moved > band["band"]:
            band |= {"band": moved + EXACT, "measured": f"{band['measured']}; {machine}"}
        rows.append(band)
    known = {(row["method"], row["column"]) for row in rows}
    for method, columns in gap.groupby(level="method").max().to_dict("index").items():
        for column, moved in columns.items():
            if moved > EXACT and not {(method, column), (EVERY, column)} & known:
                found = {"method": method, "setting": math.nan, "column": column}
                rows.append({"frame": frame, **found, "band": moved + EXACT, "measured": machine})
    return pd.DataFrame(rows, columns=BAND_COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the bands of committed frames.")
    parser.add_argument("frames", nargs="+")
    parser.add_argument("--measured", type=Path, help="folder of frames of another machine")
    parser.add_argument("--machine", default="another machine")
    given = parser.parse_args()
    path = EXPECTED / f"{BANDS}.csv"
    for frame in given.frames:
        if frame.partition("-")[0] not in KINDS and not given.measured:
            parser.error(f"FRAME must be of {', '.join(KINDS)}, got {frame}. Give --measured.")
    for frame in given.frames:
        kind, _, name = frame.partition("-")
        if given.measured:
            found = widened(frame, given.measured, given.machine)
        elif kind in ("del", "curve"):
            found = bands_of_del(frame, name)
        elif kind == "rivals":
            found = bands_of_rivals(frame, name)
        elif kind == "heads":
            found = bands_of_heads(frame, name)
        else:
            found = bands_of_trained(frame, kind, name)
        bands = pd.read_csv(path)
        replaced = (bands["frame"] == frame) & bands["method"].isin(found["method"])
        bands = pd.concat([bands[~replaced], found]).sort_values(["frame", "method", "setting"])
        bands.to_csv(path, index=False)


if __name__ == "__main__":
    main()
