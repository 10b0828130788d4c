"""A Hugging Face folder of an edited model."""

import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tl_localize.erasure.row_edit import RowEdit
from tl_localize.files import write_json, write_text
from tl_localize.model.loading import (
    load_tokenizer,
    load_transformers,
    quiet_transformers,
    transformers_source,
)

# in which a model may be loaded; its old rows are the source's, rounded
DTYPES = torch.float32, torch.bfloat16, torch.float16


def check_new_folder(folder: str | Path) -> None:
    """Raise ValueError unless a folder is new or empty."""
    path = Path(folder).resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"folder must be new or empty, got {str(folder)!r}, which is there. Choose another one."
        )


def write_directory(
    folder: Path, source: str | Path, edit: RowEdit, record: dict[str, Any], card: str
) -> None:
    """Write the edited model and what is known of the edit, whole or not at all: an empty folder
    that is there, such as the current one, is filled, and its ``config.json`` comes last.
    """
    check_new_folder(folder)
    folder = folder.resolve()
    place = transformers_source(source)
    hf_model = load_transformers(place, torch.float32)
    edit = put_rows(hf_model, edit)
    tokenizer = load_tokenizer(place)
    folder.parent.mkdir(parents=True, exist_ok=True)
    is_there = folder.is_dir()
    place = folder if is_there else folder.parent
    temporary = place / f".{folder.name}.{secrets.token_hex(8)}.tmp"
    try:
        with quiet_transformers():
            hf_model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        for file in temporary.glob("*.safetensors"):  # which others could not read
            shutil.copymode(temporary / "config.json", file)
        edit.save(temporary / "erased.safetensors")
        write_json(temporary / "erased.json", record)
        write_text(temporary / "erased.md", card)
        if is_there:
            for file in sorted(temporary.iterdir(), key=lambda file: file.name == "config.json"):
                os.replace(file, folder / file.name)
        else:
            os.replace(temporary, folder)
    except SafetensorError as error:  # what it makes of an OSError
        raise OSError(
            f"folder must have room for the model, got {str(folder)!r}: {error}. Make room, or "
            "choose another one."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@torch.no_grad()
def put_rows(hf_model: Any, edit: RowEdit) -> RowEdit:
    """Write the new rows into a model of transformers. Where they belong is found by the old rows:
    for each layer there must be one weight that holds them at their places, up to the rounding of
    the precision in which the model was loaded.

    Returns:
        the edit, whose old rows are those that were there, not rounded.

    Raises:
        ValueError: for a layer there is no such weight, or there are several.
    """
    start = 0
    replaced: list[Tensor] = []
    for layer, chosen in enumerate(edit.neurons.mask):
        index = chosen.nonzero().flatten()
        if not len(index):
            continue
        part = slice(start, start + len(index))
        start += len(index)
        old, new = edit.old_rows[part], edit.rows[part]
        places = [
            weight
            for parameter in hf_model.parameters()
            for weight in read_as_rows(parameter, len(chosen), old.shape[1])
            if any(torch.equal(weight[index].to(dtype).float(), old) for dtype in DTYPES)
        ]
        if len(places) != 1:
            raise ValueError(
                f"source must hold the rows of W_out of layer {layer} once, got {len(places)} "
                "weights that hold them. Name what the model was loaded from, and edit MLP "
                "neurons; layers that share their weights can't be edited apart."
            )
        replaced.append(places[0][index].float())
        places[0][index] = new.to(places[0])
    return replace(edit, old_rows=torch.cat(replaced))


def read_as_rows(parameter: Tensor, n_rows: int, width: int) -> list[Tensor]:
    """The ways to read a weight as rows of W_out: as it is, or transposed."""
    found: list[Tensor] = []
    if tuple(parameter.shape) == (n_rows, width):
        found.append(parameter.data)
    if tuple(parameter.shape) == (width, n_rows):
        found.append(parameter.data.T)
    return found
