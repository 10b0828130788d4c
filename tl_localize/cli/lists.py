"""tl-localize methods | models | texts: what there is"""

from __future__ import annotations

import pandas as pd

from tl_localize.methods import METHODS
from tl_localize.reference import load_planted
from tl_localize.report.terminal import console, plain

MODELS = {
    "reference-gpt2": "shipped: GPT-2's architecture; the MLP of a layer reads its attention",
    "reference-pythia": "shipped: GPT-NeoX's; attention and MLP of a layer read the same input",
    "a directory": "config.json and model.safetensors of Hugging Face, with or without a tokenizer",
    "a .gguf file": "needs the extra gguf",
    "a name": "that TransformerLens knows, such as gpt2-xl or EleutherAI/pythia-2.8b",
}


def list_methods() -> None:
    meanings = {name: (one.__doc__ or "").split("\n")[0] for name, one in METHODS.items()}
    frame = pd.DataFrame({"score of a neuron": meanings}).rename_axis("method")
    console().print(plain(frame))


def list_models() -> None:
    console().print(plain(pd.DataFrame({"what it is": MODELS}).rename_axis("model")))


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
