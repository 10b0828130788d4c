"""The paper's data, which lie in a folder that the user names: sentences, memorized texts, general
text, as sequences of a model. None of it is kept: ids and categories stand for the texts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

ECBD = "ecbd/ecbd_2021_definition_dedup.jsonl"
EXPANDED = "ecbd/ecbd_2021_22_23_definition_dedup.jsonl"
MANUAL = "manual/memorized_data-gpt2-xl.jsonl"
RANDOM_BATCH = "pile/gpt2-xl/pile_random_batch.pt"
TOKENIZER = "tokenizers/gpt2"
# the file's categories by those of the paper's table 1; the others are its "Others"
CATEGORIES = {
    "Quotes": (
        "Trump,Shakespeare,Martin_Luther_King,Obama,Churchill,Steve_Jobs,Lincoln,Isaac_Newton"
    ),
    "Quotes (Book)": "book_quotes,Bible",
    "Ordered items": "alphabet,Country_States_Provinces,US_Presidents,Zodiac_signs,planets,week",
    "Terms of use": "terms_of_use",
    "Poems": "poems",
    "Code": "github,regex",
    "Contact Info": "address,email",
    "URLs": "url",
}
PAPER_CATEGORY = {name: title for title, names in CATEGORIES.items() for name in names.split(",")}
OTHERS = "Others"


def sentences(model: Any, folder: Path, file: str = ECBD) -> list[Any]:
    """All sentences of a file; their ids are their places in it."""
    from tl_localize.texts.readers import Data

    found = Data(source=folder / file, n_prefix=1).sequences(model)
    return [replace(sequence, id=f"ecbd-{i:03d}") for i, sequence in enumerate(found)]


def memorized(model: Any, name: str, folder: Path) -> list[Any]:
    """The sequences of the Pile that this Pythia recites, else the manual texts, with the paper's
    categories; without those whose suffix begins within a token of this model.
    """
    from tl_localize.paper import paper_model, published
    from tl_localize.texts.readers import Data

    if "pythia" in paper_model(name):
        files = sorted((folder / "pile").glob(f"{paper_model(name)}*/pile_bs*.pt"))
        if files:
            return list(Data(source=files[0]).sequences(model))
        if len(published("del", name)):
            raise FileNotFoundError(
                f"--paper-data must hold pile/{paper_model(name)}/pile_bs*.pt, what this model "
                f"recites, got {str(folder)!r} without it. Put the authors' file there."
            )
    lines = (folder / MANUAL).read_text(encoding="utf-8").splitlines()
    found: list[Any] = []
    for i, line in enumerate(lines):
        try:
            (sequence,) = Data(source=[json.loads(line)]).sequences(model)
        except ValueError as error:
            if "token boundary" not in str(error):
                raise
            continue  # this tokenizer merges the end of the prompt with the suffix
        category = PAPER_CATEGORY.get(sequence.category, f"{OTHERS} ({sequence.category})")
        found.append(replace(sequence, id=f"manual-{i:03d}", category=category))
    return found


def general_text(model: Any, name: str, folder: Path, n_rows: int, length: int) -> Any:
    """[row pos] the beginnings of the first rows of the paper's random text of the Pile, in the
    model's tokens: of GPT-2 as they are, else decoded and read by the model's tokenizer. A row
    that is too short then is left out.
    """
    import torch
    from transformers import GPT2Tokenizer

    from tl_localize.paper import paper_model
    from tl_localize.sequences import encode, first_tokens, tokenizer_of
    from tl_localize.texts.readers import read_tokens

    rows = read_tokens(folder / RANDOM_BATCH).long()
    if paper_model(name).startswith("gpt2"):
        return rows[:n_rows, :length]
    files = {
        "vocab": folder / TOKENIZER / "vocab.json",
        "merges": folder / TOKENIZER / "merges.txt",
    }
    gpt2: Any = GPT2Tokenizer(**{key: str(path) for key, path in files.items()})
    tokenizer = tokenizer_of(model)
    first = list(first_tokens(tokenizer))
    found: list[list[int]] = []
    for row in rows.tolist():
        tokens = [*first, *encode(tokenizer, gpt2.decode(row))][:length]
        if len(tokens) == length:
            found.append(tokens)
        if len(found) == n_rows:
            break
    return torch.tensor(found)
