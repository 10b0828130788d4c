"""Tables of seconds, minutes and memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from cells import GPT2, SHIPPED, SMOLLM2, markdown

from tl_localize.paper import published

ROOT = Path(__file__).resolve().parents[1]
COSTS = {
    "activations": "Activations",
    "attribution": "Attribution",
    "integrated_gradients": "Integrated Gradients, 20 points",
    "slimming, 16 in map": "Slimming, 60 steps, 16 in `map`",
    "hard_concrete, 16 in map": "Hard Concrete, 200 steps, 16 in `map`",
    "zero_out, screen=0.05": "Zero-Out, `screen=0.05`",
    "zero_out": "Zero-Out",
}
SHORT_NAMES = {SMOLLM2: "SmolLM2-135M", GPT2: "shipped gpt2"}
TASKS = {
    "demo": "`tl-localize demo`",
    "known": "`tl-localize known`",
    "localize": "`tl-localize localize`, one text",
    "erase": "`tl-localize erase`, one text",
    "inj --limit 1": "`tl-localize inj --limit 1`, all methods",
    "inj --limit 1, three methods": "`tl-localize inj --limit 1 --ratio 0.01`, three quick methods",
    "del --targets 1": "`tl-localize del --targets 1`, all methods",
    "del --targets 1, three methods": "`tl-localize del --targets 1`, three quick methods",
    "rev --groups 1": "`tl-localize rev --groups 1`, all methods, without the learned mask",
    "activations": "Activations, one text",
    "attribution": "Attribution, one text",
    "gradient_alignment": "Gradient Alignment, one text",
    "iterative_attribution": "Iterative Attribution, the first text of a model",
    "iterative_attribution, another text": "Iterative Attribution, another text",
    "slimming": "Slimming, one text",
    "hard_concrete": "Hard Concrete, one text",
    "integrated_gradients": "Integrated Gradients, one text",
    "zero_out, screen=0.05": "Zero-Out with `screen=0.05`, one text",
}
GPU_COSTS = {
    "activations": "Activations",
    "attribution": "Attribution",
    "gradient_alignment": "Gradient Alignment, 4 points",
    "iterative_attribution": "Iterative Attribution, another text than the first",
    "integrated_gradients": "Integrated Gradients, 20 points",
    "slimming": "Slimming, 60 steps, alone",
    "slimming, 16 in map": "Slimming, 60 steps, 16 in `map`",
    "hard_concrete": "Hard Concrete, 150 steps, alone",
    "zero_out, screen=0.05": "Zero-Out, `screen=0.05`",
    "zero_out": "Zero-Out",
    "zero_out, loop batched": "Zero-Out, against a loop over 64 at a time",
}
PAPER_COSTS = {name: GPU_COSTS[name] for name in GPU_COSTS if name != "zero_out, loop batched"}


def minutes_table() -> str:
    """Minutes of processor time by file and model."""
    minutes = pd.read_csv(ROOT / "benchmarks" / "minutes.csv", dtype=str).fillna("")
    return markdown(list(minutes), minutes.to_numpy().tolist())


def cost_table() -> str:
    """Seconds of one text, how many times the loop of the paper's algorithm, and memory."""
    frames = {
        name: pd.read_csv(ROOT / f"docs/results/{model}/cost.csv").set_index("method")
        for name, model in SHIPPED.items()
    }
    rows: list[list[str]] = []
    for method, title in COSTS.items():
        cells: list[str] = []
        for frame in frames.values():
            line = frame.loc[method]
            cells += [f"{line['seconds']:.2g}", f"{line['ratio']:.2g}"]
        gpt2 = frames["gpt2"].loc[method]
        paper = gpt2["A6000, pythia-6.9b (paper)"]
        rows.append([title, *cells, f"{gpt2['MiB']:.0f}", "" if np.isnan(paper) else f"{paper:g}"])
    measured = ["gpt2, seconds", "times faster", "pythia, seconds", "times faster", "gpt2, MiB"]
    return markdown(["method", *measured, "the paper, Pythia-6.9B on an A6000, seconds"], rows)


def gpu_table() -> str:
    """Seconds of one text on a GPU, how many times as long the plain loop takes, and the paper's
    seconds.
    """
    frame = pd.read_csv(ROOT / "docs/results/gpu/cost.csv")
    parts = {shape: part.set_index("method") for shape, part in frame.groupby("shape")}
    pythia, xl = parts["pythia-6.9b"], parts["gpt2-xl"]
    paper = published("cost").set_index("method")["value"]
    bare = [
        f"{x['seconds'] * x['loop']:.3g}"
        for x in (pythia.loc["attribution"], xl.loc["attribution"])
    ]
    rows = [["one bare pass forward and backward", bare[0], "", "", bare[1]]]
    for method, title in GPU_COSTS.items():
        line = pythia.loc[method]
        theirs = paper.get(method.partition(",")[0])
        own = [f"{line['seconds']:g}", f"{line['loop']:g}", f"{theirs:g}" if theirs else ""]
        other = xl.loc[method] if method in xl.index else None
        rows.append([title, *own, "" if other is None else f"{other['seconds']:g}"])
    names = ["Pythia-6.9B, seconds", "its loop, times as long", "the paper, an A6000"]
    return markdown(["method", *names, "GPT-2-XL, seconds"], rows)


def times_table() -> str:
    """Seconds of each task on each model and device."""
    frame = pd.read_csv(ROOT / "docs/results/times.csv")
    seconds = frame.set_index(["task", "model", "device"])["seconds"].unstack([1, 2])
    columns = [f"{SHORT_NAMES.get(model, model)}, {device}" for model, device in seconds.columns]
    rows = [
        [title, *(f"{found:.2g}" if found < 100 else f"{found:.0f}" for found in seconds.loc[task])]
        for task, title in TASKS.items()
        if task in seconds.index
    ]
    return markdown(["task", *columns], rows).replace(" nan ", "  ")
