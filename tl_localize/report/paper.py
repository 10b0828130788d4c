"""The numbers that the paper published, as data.

Source: Chang, Thomason, Jia (2024), arXiv:2311.09060, and the authors' code

(github.com/terarachang/MemPi).
"""

import pandas as pd

from tl_localize.evals.presets import paper_model
from tl_localize.methods import METHODS
from tl_localize.neurons import check_choice
from tl_localize.reference import DATA

# to be shown
TITLES = {name: method.title for name, method in METHODS.items()} | {
    "activation_contrast_same_kind": "Activation Contrast, same kind (of texts)",
    "oracle_first_order": "oracle, first order (knows the model before)",
    "oracle_rounds": "oracle in rounds (knows the model before)",
}


def short_title(method: object) -> str:
    """A method's title without what stands in brackets, for a legend or the head of a column; other
    names as they are.

    >>> short_title("attribution"), short_title("mine")
    ('Attribution', 'mine')
    """
    return TITLES.get(str(method), str(method)).split(" (")[0]


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
