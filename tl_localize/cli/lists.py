"""tl-localize methods | models | texts: what there is"""

from __future__ import annotations

import pandas as pd

from tl_localize.methods import METHODS
from tl_localize.models import REFERENCE_MODELS
from tl_localize.reference import load_planted
from tl_localize.report.terminal import console, plain


def methods() -> None:
    """The methods by the name that --methods takes, and what their scores mean."""
    meanings = [(one.__doc__ or "").split("\n")[0] for one in METHODS.values()]
    console().print(
        plain(pd.DataFrame({"score of a neuron": meanings}, index=pd.Index(METHODS, name="method")))
    )


def models() -> None:
    """What --model takes."""
    shipped = dict.fromkeys(
        REFERENCE_MODELS,
        "shipped: 6 layers of 1536 neurons, trained on Python's documentation and 320 planted texts",
    )
    others = {
        "a path": "a Hugging Face directory",
        "a name": "that TransformerLens knows, such as gpt2-xl or EleutherAI/pythia-2.8b",
    }
    console().print(plain(pd.DataFrame({"what it is": shipped | others}).rename_axis("model")))


def texts() -> None:
    """The shipped texts that the reference models saw in training, for --example of localize and
    demo.
    """
    planted = sorted(load_planted(), key=lambda one: -one.repetitions)
    columns = {
        "times seen": [one.repetitions for one in planted],
        "text": [one.text.replace("\n", " ")[:60] + "..." for one in planted],
    }
    console().print(
        plain(pd.DataFrame(columns, index=pd.Index([one.id for one in planted], name="example")))
    )
