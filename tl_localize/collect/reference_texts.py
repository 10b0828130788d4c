"""What the reference models may have memorized: the search of their texts, and whose text each
memorized sequence is.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tl_localize.collect.collection import Collection
from tl_localize.collect.criteria import Criteria
from tl_localize.collect.duplicates import origins
from tl_localize.collect.search import Search, chunks_of
from tl_localize.neurons import LanguageModel
from tl_localize.readers import Data
from tl_localize.reference import N_TOKENS, general_texts, load_planted
from tl_localize.sequences import encode, tokenizer_of

TRAINING = "training texts"  # what the corpus is called


def training_rows(model: LanguageModel) -> Int[Tensor, "row pos"]:
    """The planted texts, and the general texts of training in pieces of as many tokens: [row pos]
    int64, 80 tokens each.
    """
    tokenizer = tokenizer_of(model)
    rows = [encode(tokenizer, one.text) for one in load_planted()]
    for text in general_texts("training")[0]:
        tokens = encode(tokenizer, text)
        rows += [
            tokens[start : start + N_TOKENS]
            for start in range(0, len(tokens) + 1 - N_TOKENS, N_TOKENS)
        ]
    return torch.tensor(rows)


def reference_search(
    model: LanguageModel, criteria: Criteria | None = None, stride: int | None = None
) -> Search:
    """The search of the texts that the reference models saw in training, as far as this Python has
    them (``reference.lacking_texts``).
    """
    criteria = criteria or Criteria()
    data = Data(source=training_rows(model), name=TRAINING)
    return Search(model, chunks_of([data], stride, criteria.length), criteria, stride)


def with_planted(model: LanguageModel, found: Collection) -> Collection:
    """The planted texts with their own names and categories; all others are ``natural``."""
    planted = load_planted()
    known = [encode(tokenizer_of(model), text.text) for text in planted]
    which = origins([sequence.tokens.tolist() for sequence in found.sequences], known)
    names = [
        (planted[i].id, planted[i].category) if i >= 0 else (s.id, "natural")
        for s, i in zip(found.sequences, which, strict=True)
    ]
    return found.labelled(dict(zip(found.frame["id"], names, strict=True)))


def reference_tables(found: Collection) -> dict[str, tuple[pd.DataFrame, str]]:
    """Tables and captions by name: which planted texts were found, by repetitions, and the natural
    ones.
    """
    names = set(found.frame["id"])
    planted = pd.DataFrame(
        [{"repetitions": text.repetitions, "found": text.id in names} for text in load_planted()]
    )
    counts: Any = planted.groupby("repetitions")["found"].agg(planted="size", found="sum")
    natural = found.frame[found.frame["category"] == "natural"].set_index("id")[
        ["accuracy", "distance", "prefix", "suffix"]
    ]
    natural = natural.assign(
        prefix=[repr(text) for text in natural["prefix"]],
        suffix=[repr(text) for text in natural["suffix"]],
    )
    return {
        "planted": (
            counts,
            "Planted texts that were found, by how often they were repeated in training",
        ),
        "natural": (natural, f"Memorized texts that nobody planted ({len(natural)})"),
    }
