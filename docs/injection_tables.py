"""Tables of INJ: the rows that a method finds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from cells import (  # noqa: E402
    MULTIPLES,
    SHIPPED,
    SMOLLM2,
    TITLES,
    markdown,
    mean_with_interval,
    number,
)
from comparison import read_frame  # noqa: E402

from tl_localize.paper import published  # noqa: E402

ALONE = (
    *("hard_concrete", "slimming", "zero_out", "integrated_gradients", "activations"),
    *("attribution", "gradient_alignment", "iterative_attribution", "row_norm", "random"),
)
SMOLLM2_GROUPS = f"real/{SMOLLM2}/distractors"


def recall_pair(name: str, method: str, multiple: int = 1) -> str:
    """Recall of the target's / of the others' rows in percent; the sentences of a group share a
    model, so intervals are over groups.
    """
    frame = read_frame(name)
    index = frame.index
    rows = (index.get_level_values("method") == method) & (
        index.get_level_values("multiple") == multiple
    )
    if "converged" in frame:
        rows &= frame["converged"].astype(bool)
    found = frame.loc[rows, ["recall", "foreign_recall"]]
    if "group" in index.names:
        found = found.groupby(level="group").mean()
    return " / ".join(mean_with_interval(100 * found[column]) for column in found)


def recall_table(
    methods: Sequence[str], frames: dict[str, str], titles: dict[str, str] = TITLES
) -> str:
    rows = [
        [titles[method], *(recall_pair(name, method) for name in frames.values())]
        for method in methods
    ]
    return markdown(["method", *frames], rows)


def recall_multiples(name: str, methods: Sequence[str]) -> str:
    """Recall of the target's / of the others' rows among one, two and five times as many."""
    rows = [
        [TITLES[method], *(recall_pair(name, method, multiple) for multiple in MULTIPLES)]
        for method in methods
    ]
    return markdown(["method", *(f"R@{multiple}x" for multiple in MULTIPLES)], rows)


def inj_table(methods: Sequence[str]) -> str:
    """Recall of INJ as published, one sentence at a time."""
    frames = {f"{name}, 3 %": read_frame(f"inj-{model}") for name, model in SHIPPED.items()}
    of_share = read_frame(f"real-{SMOLLM2}").xs(0.01, level="injection_ratio")
    frames |= {"SmolLM2, 1 %": of_share}
    rows = []
    for method in methods:
        found = [
            frame.xs((method, 1), level=("method", "multiple"))["recall"]
            for frame in frames.values()
        ]
        rows.append([TITLES[method], *(mean_with_interval(100 * recall) for recall in found)])
    return markdown(["method", *frames], rows)


def alone_table(ratio: float) -> str:
    """INJ of one sentence at a time in SmolLM2, beside the paper's recall on GPT-2."""
    frame = 100 * read_frame(f"real-{SMOLLM2}").xs(ratio, level="injection_ratio")
    paper = published("inj", "gpt2").set_index(["setting", "method", "metric"])["value"]
    headings = [f"R@{multiple}x" for multiple in MULTIPLES]
    rows = []
    for method in ALONE:
        found = frame.xs(method, level="method")["recall"]
        count = len(found.index.unique("sequence_id"))
        cells = [mean_with_interval(found.xs(multiple, level="multiple")) for multiple in MULTIPLES]
        keys = [(f"{ratio:g}", method, f"recall@{ratio * multiple:g}") for multiple in MULTIPLES]
        theirs = [number(100 * paper[key]) if key in paper.index else "" for key in keys]
        rows.append([f"{TITLES[method]} ({count})", *cells, *theirs])
    theirs = [f"GPT-2 124M (the paper), {headings[0]}", *headings[1:]]
    return markdown(["method (sentences)", *headings, *theirs], rows)


def alignment_share_table() -> str:
    """Recall of Gradient Alignment by its share; the interval is over what was trained apart."""
    columns: dict[str, pd.DataFrame] = {}
    for name, model in SHIPPED.items():
        frame = pd.read_csv(ROOT / f"docs/results/{model}/alignment_share.csv")
        for distractors, part in frame.groupby("distractors"):
            kind = f"with {distractors} distractors" if distractors else "alone"
            columns[f"{name}, {kind}"] = part
    shares = next(iter(columns.values()))["share"].unique()
    rows = []
    for share in shares:
        cells = []
        for part in columns.values():
            recalls = part[part["share"] == share].groupby("group")[["recall", "foreign_recall"]]
            kinds = [mean_with_interval(100 * values) for _, values in recalls.mean().items()]
            cells.append(" / ".join(filter(None, kinds)))
        named = "Attribution, which has none" if share == "none" else f"{100 * float(share):g} %"
        rows.append([named, *cells])
    return markdown(["share", *columns], rows)
