"""tl-localize methods | models | texts: what there is"""

from __future__ import annotations

import pandas as pd

from tl_localize.methods import METHODS
from tl_localize.models import REFERENCE_MODELS
from tl_localize.reference import load_planted
from tl_localize.report.terminal import console, plain

REFERENCE_TEXT = (
    "shipped: 6 layers of 1536 neurons, trained on Python's documentation and 320 planted texts"
)


def list_methods() -> None:
    meanings = {name: (one.__doc__ or "").split("\n")[0] for name, one in METHODS.items()}
    frame = pd.DataFrame({"score of a neuron": meanings}).rename_axis("method")
    console().print(plain(frame))


def list_models() -> None:
    known = dict.fromkeys(REFERENCE_MODELS, REFERENCE_TEXT) | {
        "a path": "a Hugging Face directory",
        "a name": "that TransformerLens knows, such as gpt2-xl or EleutherAI/pythia-2.8b",
    }
    console().print(plain(pd.DataFrame({"what it is": known}).rename_axis("model")))


def list_texts() -> None:
    planted = sorted(load_planted(), key=lambda one: -one.repetitions)
    rows = [
        {
            "example": one.id,
            "times seen": one.repetitions,
            "text": one.text.replace("\n", " ")[:60] + "...",
        }
        for one in planted
    ]
    console().print(plain(pd.DataFrame(rows).set_index("example")))
