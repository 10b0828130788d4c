"""Tables of REV: where training put a text."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from cells import TITLES, markdown, number  # noqa: E402
from comparison import read_frame  # noqa: E402

from tl_localize.evals.rev.results import ORACLES  # noqa: E402
from tl_localize.stats import gain_at  # noqa: E402

REV_PRICE = 5.0  # points that the others lose
REV_SHARES = (0.2, 0.3, 0.4)


@cache
def rev_put_back(model: str) -> pd.DataFrame:
    """Own and others in points, rows put back, by method, share, model (group) and text."""
    frame = 100 * read_frame(f"rev-{model}")
    return pd.DataFrame(frame.xs("put_back", level="direction"))


def rev_curves(model: str, group: str | None = None) -> dict[str, pd.DataFrame]:
    """Own and others in points by share, of each method; means over all models, or of one."""
    frame = rev_put_back(model)
    if group is not None:
        frame = frame.xs(group, level="group")
    curves = frame.groupby(["method", "ratio"]).mean()
    curves = curves.reset_index("method")
    return {
        method: curves[curves["method"] == method].drop(columns="method")
        for method in curves["method"].unique()
    }


def rev_at_price(curve: pd.DataFrame) -> float:
    """Own at the price, or at the largest share where the others have lost less."""
    own, others = curve["delta_own_accuracy"], -curve["delta_others_accuracy"]
    return own.iloc[-1] if others.max() < REV_PRICE else gain_at(REV_PRICE, others, own)


def rev_cell(curve: pd.DataFrame) -> str:
    """The same as text, which says what the largest share costs where that is less, and the first
    where that is more.
    """
    found, costs = number(rev_at_price(curve)), -curve["delta_others_accuracy"]
    if costs.iloc[0] > REV_PRICE:
        return f"costs at least {number(costs.iloc[0])}"
    return f"{found} at {number(-costs.iloc[-1])}" if costs.max() < REV_PRICE else found


def rev_at_most(curve: pd.DataFrame) -> float:
    """Own at the price; or more, at the first share, where that costs others more already."""
    found = rev_at_price(curve)
    return float(curve["delta_own_accuracy"].iloc[0]) if math.isnan(found) else found


def rev_table(model: str, methods: Sequence[str]) -> str:
    """Own / others by share; own at the price; and own minus others."""
    curves = rev_curves(model)
    rows = []
    for method in methods:
        curve = curves[method]
        own, others = curve["delta_own_accuracy"], curve["delta_others_accuracy"]
        cells = [f"{number(own[ratio])} / {number(others[ratio])}" for ratio in REV_SHARES]
        last = [rev_cell(curve), number((own - others).min())]
        rows.append([TITLES[method], *cells, *last])
    headings = [f"{100 * ratio:g} %" for ratio in REV_SHARES]
    last = ["own where others lost 5", "own minus others, at most"]
    return markdown(["rows put back by", *headings, *last], rows)


def rev_price_table(
    methods: Sequence[str], models: Mapping[str, str], titles: Mapping[str, str]
) -> str:
    """Own where the others have lost 5 points, its share of the best oracle's, and in how many
    models it is more than that of Activations.
    """
    columns = ["method"]
    cells: dict[str, list[str]] = {method: [titles[method]] for method in methods}
    for title, model in models.items():
        groups = rev_put_back(model).index.unique("group")
        by_model = [rev_curves(model, group) for group in groups]
        columns += [title, "of the best oracle", f"ahead of Activations, of {len(groups)} models"]
        curves = rev_curves(model)
        best = np.nanmin([rev_at_price(curves[name]) for name in ORACLES])
        for method in methods:
            found = rev_at_price(curves[method])
            ahead = sum(
                rev_at_price(curve[method]) < rev_at_most(curve["activations"])
                for curve in by_model
            )
            count = "" if method == "activations" else str(ahead)
            share = "" if math.isnan(found) else f"{100 * found / best:.0f} %"
            cells[method] += [rev_cell(curves[method]), share, count]
    return markdown(columns, list(cells.values()))
