"""What the paper published, as data: its numbers and its hyperparameters.

Source: Chang, Thomason, Jia (2024), arXiv:2311.09060, and the authors' code (github.com/terarachang/MemPi).
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from tl_localize.methods import METHODS

TITLES = {  # in tables and figures
    **{name: method.title for name, method in METHODS.items()},
    "true_rows": "the true rows (the best that can be done)",
}


def short_title(method: object) -> str:
    """A method's title without what stands in brackets, for a legend or the head of a column; other names as they are.

    >>> short_title("attribution"), short_title("mine")
    ('Attribution', 'mine')
    """
    return TITLES.get(str(method), str(method)).split(" (")[0]


def published(table: str, model: str | None = None) -> pd.DataFrame:
    """The paper's numbers as tidy data: table, model, setting, method, metric, value, standard_error, note.

    Recalls and accuracies are fractions; perplexities are 2 ** nats, and say so in the metric's name.

    Args:
        table: ``inj``, ``inj_global``, ``inj_expanded``, ``inj_seeds``, ``inj_pvalues``, ``del``, ``del_pvalues``,
            ``memorization``, ``categories``, ``cost`` or ``architecture``.
        model: only this one, by its TransformerLens name.
    Raises:
        ValueError: an unknown table.

    >>> published("inj", "gpt2")[["setting", "method", "metric", "value"]].head(2)
      setting         method       metric  value
    0    0.01  hard_concrete  recall@0.01  0.495
    1    0.01  hard_concrete  recall@0.02  0.702
    """
    frame = pd.read_csv(str(files("tl_localize") / "data" / "published.csv"), dtype={"setting": str})
    if table not in set(frame["table"]):
        raise ValueError(f"table must be one of {sorted(set(frame['table']))}, got {table!r}.")
    frame = frame[frame["table"] == table]
    return (frame[frame["model"] == paper_model(model)] if model else frame).reset_index(drop=True)


def paper_settings(model: str, benchmark: Literal["inj", "del"], ratio: float | None = None) -> dict[str, dict[str, Any]]:
    """The authors' hyperparameters of Slimming and Hard Concrete, by method name; empty for a model that they did not use.

    Args:
        ratio: of the injection; at a ratio the paper does not have, the settings of the nearest one.

    >>> Slimming(**paper_settings("gpt2", "inj", ratio=0.01)["slimming"])
    Slimming(learning_rate=0.005, sparsity_weight=15000.0, steps=4000, stop_sparsity=0.2, first_layer=0)
    """
    settings: dict[str, Any] = _hyperparameters()[benchmark].get(paper_model(model), {})
    if benchmark == "inj" and settings:
        return settings["0.001" if ratio is not None and ratio < 0.003 else "0.01"]
    return settings


def paper_grids() -> dict[str, dict[str, list[Any]]]:
    """The values that the authors searched, by method name and setting.

    >>> paper_grids()["slimming"]
    {'learning_rate': [0.01, 0.005, 0.001], 'sparsity_weight': [30000.0, 10000.0, 5000.0, 1000.0]}
    """
    return _hyperparameters()["grids"]


def _hyperparameters() -> dict[str, Any]:
    return json.loads((files("tl_localize") / "data" / "paper_settings.json").read_text(encoding="utf-8"))


def paper_model(name: str) -> str:
    """A model's name, or its directory's, as the published tables spell it; other names as they are.

    >>> paper_model("EleutherAI/pythia-2.8b-deduped-v0"), paper_model("models/gpt2-xl/"), paper_model("gpt2-small")
    ('pythia-2.8b-deduped', 'gpt2-xl', 'gpt2')
    """
    short = Path(name).absolute().name.lower().removesuffix("-v0")
    return {"gpt2-small": "gpt2"}.get(short, short)


def settings_source(model: str, benchmark: Literal["inj", "del"]) -> str:
    """Where a model's settings come from, as text: the paper or our defaults.

    >>> settings_source("models/gpt2-xl", "del")
    "the paper's for gpt2-xl"
    """
    if paper_settings(model, benchmark):
        return f"the paper's for {paper_model(model)}"
    return f"the defaults, for the paper has none for {Path(model).absolute().name}"
