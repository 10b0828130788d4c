"""The paper: its settings, the numbers that it published, and the names of its models.

Source: Chang, Thomason, Jia (2024), arXiv:2311.09060, and the authors' code

(github.com/terarachang/MemPi).
"""

import json
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from tl_localize.checks import check_choice
from tl_localize.methods import METHODS
from tl_localize.methods.general_text import WithGeneralText
from tl_localize.texts.reference import DATA

Json = dict[str, Any]
# the authors' settings, and the grids they searched
PAPER = json.loads((DATA / "paper_settings.json").read_text(encoding="utf-8"))
# to be shown
TITLES = {
    **{name: method.title for name, method in METHODS.items()},
    **{
        f"{name}_same_kind": f"{method.title.partition(' (')[0]}, same kind (of texts)"
        for name, method in METHODS.items()
        if issubclass(method, WithGeneralText)
    },
    "oracle_first_order": "oracle, first order (knows the model before)",
    "oracle_rounds": "oracle in rounds (knows the model before)",
    "oracle_mask": "oracle, learned mask (knows the model before)",
}


def paper_model(name: str) -> str:
    """A model's name, or its directory's, as the published tables spell it; other names as they
    are.

    >>> paper_model("EleutherAI/pythia-2.8b-deduped-v0")
    'pythia-2.8b-deduped'
    """
    short = Path(name).absolute().name.lower().removesuffix("-v0") if name else ""
    return {"gpt2-small": "gpt2"}.get(short, short)


def paper_settings(
    model: str, benchmark: Literal["inj", "del"], ratio: float = 0.01
) -> dict[str, Json]:
    """The authors' hyperparameters of Slimming and Hard Concrete, by method name; empty for a model
    that they did not use.

    At an injection ratio that the paper does not have, they are those of the nearest one.

    Source: Chang et al. (2024), arXiv:2311.09060, and the authors' code
    (github.com/terarachang/MemPi).

    >>> paper_settings("gpt2", "inj", 0.01)["hard_concrete"]["sparsity_weight"]
    100.0
    """
    settings: Json = PAPER[benchmark].get(paper_model(model), {})
    if benchmark == "inj":
        return settings.get("0.001" if ratio < 0.003 else "0.01", {})
    return settings


def settings_source(model: str, benchmark: Literal["inj", "del"]) -> str:
    """Where the settings of learned masks come from, as text: the paper or our defaults.

    >>> print(settings_source("gpt2", "inj"))
    Settings of learned masks: the paper's for gpt2.
    """
    if paper_settings(model, benchmark):
        return f"Settings of learned masks: the paper's for {paper_model(model)}."
    return f"Default settings: the paper gives none for {Path(model).absolute().name}."


def short_title(method: object) -> str:
    """A method's title without what stands in brackets, for a legend or the head of a column; other
    names as they are.

    >>> short_title("attribution"), short_title("mine")
    ('Attribution', 'mine')
    """
    title = TITLES.get(str(method), str(method))
    return title.split(" (")[0] if title in TITLES.values() else title


def published(table: str, model: str | None = None) -> pd.DataFrame:
    """The paper's numbers as tidy data: table, model, setting, method, metric, value,
    standard_error, note.

    Recalls and accuracies are fractions; perplexities are 2 ** nats, and say so in the metric's
    name. What stands beside our tables has its row, column and text there.

    Args:
        table: ``inj``, ``inj_global``, ``inj_expanded``, ``inj_seeds``, ``inj_pvalues``, ``del``,
            ``del_pvalues``, ``memorization``, ``categories``, ``cost`` or ``architecture``.
        model: only this one, by its TransformerLens name.

    Raises:
        ValueError: an unknown table.

    >>> published("inj", "gpt2")[["setting", "method", "metric", "value"]].head(2)
      setting         method       metric  value
    0    0.01  hard_concrete  recall@0.01  0.495
    1    0.01  hard_concrete  recall@0.02  0.702
    """
    frame = pd.read_csv(DATA / "published.csv", dtype={"setting": str})
    check_choice("table", table, frame["table"].unique())
    frame = frame[frame["table"] == table]
    return (frame[frame["model"] == paper_model(model)] if model else frame).reset_index(drop=True)


def with_paper(ours: pd.DataFrame, table: str, model: str) -> pd.DataFrame:
    """Our table above the paper's, where the paper has this model.

    >>> with_paper(pd.DataFrame({"R@1x": ["50.0"]}, index=["mine"]), "inj", "mine").index.tolist()
    ['mine']
    """
    theirs = published(table, model)
    if not len(theirs):
        return ours
    rows = ["row", "method"] if theirs["method"].notna().all() else ["row"]
    texts = theirs.pivot_table("text", rows, "column", aggfunc="first", sort=False)
    return pd.concat({"ours": ours, "paper": texts}, names=["source"]).fillna("")


def with_titles(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the titles of methods in place of their names.

    >>> with_titles(pd.DataFrame({"R@1x": ["50.0"]}, index=["hard_concrete"])).index.tolist()
    ['Hard Concrete']
    """
    return table.rename(index=TITLES, columns={name: short_title(name) for name in TITLES})
