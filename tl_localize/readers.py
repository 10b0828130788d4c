"""Readers of data files: definitions, manual sets, token arrays, texts. Nothing is downloaded, nothing is unpickled."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from tl_localize.files import load_tensors
from tl_localize.neurons import LanguageModel
from tl_localize.sequences import MemorizedSequence

TOKEN_SUFFIXES = (".npy", ".pt", ".safetensors")


def read_definitions(path: str | Path) -> list[str]:
    """Sentences of the ECBD format, the data of INJ: one JSON object a line, its text under ``definition``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an empty file; a broken line (the message has its number), a missing key, another encoding than UTF-8.

    >>> _ = (folder / "definitions.jsonl").write_text('{"definition": "A glorpon is a small bell."}')
    >>> read_definitions(folder / "definitions.jsonl")
    ['A glorpon is a small bell.']
    """
    return [row["definition"] for _, row in read_jsonl(path, "definition")]


def read_manual(path: str | Path, model: LanguageModel) -> list[MemorizedSequence]:
    """Memorized sequences of the authors' manual format: ``prompt``, ``all`` (prompt and suffix), ``prompt_len``, ``category`` (a list).

    The first category becomes the sequence's. Ids are ``manual-000``, ``manual-001``, ... ``prompt_len`` counts tokens of one tokenizer.
    Where the model's tokenizer gives another number, the text of the prompt decides, and one warning says in how many rows.

    Raises:  FileNotFoundError, ValueError: as ``read_definitions``; no token boundary lies between ``prompt`` and the rest of ``all``.

    >>> row = '{"prompt": "Return the", "all": "Return the value of x.", "prompt_len": 2, "category": ["docs"]}'
    >>> _ = (folder / "manual.jsonl").write_text(row)
    >>> read_manual(folder / "manual.jsonl", model)[0].category
    'docs'
    """
    sequences: list[MemorizedSequence] = []
    differing: list[str] = []
    for line, row in read_jsonl(path, "prompt", "all"):
        place, prompt, whole = f"{path}, line {line}", row["prompt"], row["all"]
        if not whole.startswith(prompt):
            raise ValueError(
                f"all must begin with prompt, got {whole[:20]!r} after the prompt {prompt[:20]!r} at {place}. Correct the line."
            )
        if "category" not in row:
            raise ValueError(f"line must have the key 'category', got only {sorted(row)} at {place}. Write [] where there is none.")
        names: Any = [row["category"]] if isinstance(row["category"], str) else row["category"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"category must be a list of names, got {names!r} at {place}. Write [] where there is none.")
        id, category = f"manual-{len(sequences):03d}", next(iter(names), "")
        try:
            sequence = MemorizedSequence.from_text(model, prompt, whole[len(prompt) :], id=id, category=category)
        except ValueError as error:
            raise ValueError(f"{error} (at {place})") from error
        if (given := row.get("prompt_len", sequence.n_prefix)) != sequence.n_prefix:
            differing.append(f"line {line}: {given}, not {sequence.n_prefix}")
        sequences.append(sequence)
    if differing:
        warnings.warn(
            f"prompt_len should be the prompt's number of tokens, got another in {len(differing)} of {len(sequences)} rows of {path} "
            f"({differing[0]}). The tokens of the prompt's text are used; was the file made for another tokenizer?",
            stacklevel=2,
        )
    return sequences


def read_tokens(path: str | Path) -> Integer[Tensor, "sequence pos"]:
    """Token ids from a ``.npy``, ``.pt`` or ``.safetensors`` file, mapped into memory: a corpus may be larger than memory.

    A ``.pt`` file is read with ``weights_only=True``, so it can't run code; torch's old format can't be mapped and is read whole. A
    safetensors file holds one tensor, or one named ``tokens``. Changes of the result never reach the file.

    Returns: [sequence pos] in the file's own integer type.
    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another suffix, a damaged file, or something else than a batch of token ids inside.

    >>> np.save(folder / "tokens.npy", np.array([[5, 6, 7]], dtype=np.uint16))
    >>> read_tokens(folder / "tokens.npy")
    tensor([[5, 6, 7]], dtype=torch.uint16)
    """
    path = _existing(path)
    readers = {".npy": _read_npy, ".pt": _read_pt, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise ValueError(f"path must be a file of tokens ({', '.join(TOKEN_SUFFIXES)}), got {str(path)!r}. Read text with read_texts.")
    tokens = readers[path.suffix](path)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool or tokens.ndim != 2 or not tokens.numel():
        raise ValueError(
            f"tokens must be integers of shape [sequence pos], got {tokens.dtype} of shape {tuple(tokens.shape)} in {str(path)!r}. "
            "Save a batch of token ids (one sequence is tokens[None])."
        )
    return tokens


def memorized_sequences(tokens: Integer[Tensor, "sequence pos"], n_prefix: int = 32) -> list[MemorizedSequence]:
    """One sequence for each row of tokens, the authors' Pile format; ids are ``sequence-0000``, ``sequence-0001``, ...

    Raises:  ValueError: n_prefix leaves no suffix.

    >>> memorized_sequences(torch.tensor([[5, 6, 7], [8, 9, 5]]), n_prefix=1)[1]
    MemorizedSequence('sequence-0001', 1 prefix + 2 suffix tokens)
    """
    return [MemorizedSequence(row.long(), n_prefix, f"sequence-{i:04d}") for i, row in enumerate(tokens)]


def read_texts(path: str | Path, key: str = "text", start: int = 0, end: int | None = None) -> Iterator[str]:
    """Texts of a corpus, one at a time: ``.jsonl`` has one object a line with the text under a key, any other file one text a line.

    Empty texts are empty strings, so that the caller can count them.

    Args:    start: only lines that begin at this byte of the file or later.
             end: only lines that begin before this byte.
    Raises:  FileNotFoundError, ValueError: as ``read_definitions``, but the file may be empty.

    >>> _ = (folder / "corpus.txt").write_text("one text a line")
    >>> list(read_texts(folder / "corpus.txt"))
    ['one text a line']
    """
    return _texts(_existing(path), key, start, end)


def _texts(path: Path, key: str, start: int, end: int | None) -> Iterator[str]:
    lines = _lines(path, start, end)
    try:
        if path.suffix == ".jsonl":
            yield from (row[key] for _, row in _objects(path, lines, (key,), allow_empty=True))
        else:
            yield from (text.rstrip("\r\n") for _, text in lines)
    except ValueError:
        if start:  # lines were counted from there; read from the beginning, the file gives the same error with the line's own number
            for _ in _texts(path, key, 0, end):
                pass
        raise


def read_jsonl(path: str | Path, *keys: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line that is not blank; each key must be there and hold text that is not empty.

    Raises:  FileNotFoundError, ValueError: as ``read_definitions``.

    >>> _ = (folder / "rows.jsonl").write_text('{"id": "a", "n": 3}')
    >>> list(read_jsonl(folder / "rows.jsonl", "id"))
    [(1, {'id': 'a', 'n': 3})]
    """
    found = None
    for found in _objects(path, _lines(path), keys):
        yield found
    if found is None:
        raise ValueError(f"path must hold at least one JSON object, got the empty file {str(path)!r}. Check how it was made.")


def _objects(
    path: str | Path, lines: Iterable[tuple[int, str]], keys: Sequence[str], *, allow_empty: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in lines:
        if not text.strip():
            continue
        place = f"{path}, line {line}"
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"line must be a JSON object, got {text.strip()[:40]!r} at {place} ({error.msg}). Correct the line."
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"line must be a JSON object, got a {type(row).__name__} at {place}. Write {{...}} on each line.")
        for key in keys:
            if key not in row:
                raise ValueError(f"line must have the key {key!r}, got only {sorted(row)} at {place}. Is it another kind of file?")
            if not isinstance(row[key], str) or not (row[key].strip() or allow_empty):
                raise ValueError(f"{key} must be text, got {row[key]!r} at {place}. Correct or remove the line.")
        yield line, row


def _lines(path: str | Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each line that begins in [start, end), decoded one by one for the number in the message."""
    with _existing(path).open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        position = file.tell()
        for line, raw in enumerate(file, 1):
            if end is not None and position >= end:
                return
            position += len(raw)
            try:
                yield line, raw.decode("utf-8-sig" if line == 1 and not start else "utf-8")
            except UnicodeDecodeError as error:
                bad = raw[error.start : error.start + 4]
                raise ValueError(f"path must be UTF-8 text, got the bytes {bad!r} at {path}, line {line}. Convert it to UTF-8.") from error


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"path must be an existing file, got {str(path)!r}. Check the spelling.")
    return Path(path)


def _read_npy(path: Path) -> Tensor:
    try:
        # "c": pages are read when touched, and a write would go to memory, not to the file. Torch asks for arrays that can be written.
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except (ValueError, EOFError, TypeError) as error:
        raise ValueError(f"path must be a whole .npy file of integers, got {str(path)!r} ({error}). Make it again.") from error


def _read_pt(path: Path) -> Tensor:
    try:
        tokens: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"path must be a .pt file of one plain tensor, got {str(path)!r}, which torch can't read safely "
            f"({str(error).splitlines()[0][:120] if str(error) else type(error).__name__}). Save the tensor alone with torch.save."
        ) from error
    if not isinstance(tokens, Tensor):
        raise ValueError(f"path must be a .pt file of one plain tensor, got a {type(tokens).__name__} in {str(path)!r}. Save it alone.")
    return tokens


def _read_safetensors(path: Path) -> Tensor:
    tensors, _ = load_tensors(path)
    if len(tensors) != 1 and "tokens" not in tensors:
        raise ValueError(f"path must hold one tensor or one named 'tokens', got {sorted(tensors)} in {str(path)!r}. Save the tokens alone.")
    return tensors["tokens"] if "tokens" in tensors else next(iter(tensors.values()))
