"""The token rows that the reference models were trained on, made again from the documentation of
Python 3.11.7.

General text is what every Python installation has. The planted texts are those of
``reference.load_planted``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import json
import random
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int32

from tl_localize.texts.reference import load_planted

HERE = Path(__file__).parent
END_OF_TEXT = "<|endoftext|>"
SEED = 2024
ROW_LENGTH = 256
GENERAL_ROWS = 5000  # training rows without any planted sequence
HELD_OUT_ONE_IN = 12  # one general document in so many is kept for perplexity
MIN_CHARACTERS = 60
# share of letters and blanks in a comment; below it, it is a table, a drawing or code
MIN_LETTERS = 0.85
LATE, LATE_DENSITY = 2 / 3, 1.5  # repetitions come 1.5 times as dense in the last third
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "__phello__",
}
SKIPPED_NAMES = ("_", "copyright", "credits", "license", "exit", "quit")
C_MODULES = """array binascii builtins cmath errno faulthandler gc itertools marshal math sys time
    unicodedata zlib _bisect _codecs _collections _csv _datetime _functools _heapq _io _json
    _operator _pickle _random _socket _sre _ssl _struct _thread _weakref"""

# General text


@dataclass(frozen=True)
class GeneralText:
    """One document of general text, e.g. ``json.decoder:JSONDecoder``."""

    name: str
    text: str

    @property
    def sha(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def held_out(self) -> bool:
        """Whether the document is kept out of training; decided by its name alone."""
        return int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16) % HELD_OUT_ONE_IN == 0


@cache
def general_texts() -> tuple[GeneralText, ...]:
    """Help topics, docstrings and longer comments of this Python's standard library, exact
    duplicates removed.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    found = [(f"topic:{name}", topics[name]) for name in sorted(topics)]
    found += [*source_texts(Path(sysconfig.get_paths()["stdlib"])), *_c_docstrings()]
    name_of: dict[str, str] = {}
    names: set[str] = set()
    for name, text in found:
        text = text.strip()
        if len(text) >= MIN_CHARACTERS and text not in name_of and name not in names:
            names.add(name)
            name_of[text] = name
    return tuple(GeneralText(name, text) for text, name in name_of.items())


def source_texts(stdlib: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of the docstrings and comments of a folder of Python files."""
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if SKIPPED_FOLDERS & set(parts) or any("-" in part for part in parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates and files in other encodings
            continue
        module = ".".join(parts)
        yield from _node_docstrings(tree, module + ":")
        yield from ((f"{module}#{line}", text) for line, text in _comments(source))


def _node_docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, str]]:
    if text := ast.get_docstring(node):
        yield name, text
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _node_docstrings(
                child, f"{name}{'' if name.endswith(':') else '.'}{child.name}"
            )


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Blocks of comment lines that read as prose, each with its first line's number."""
    blocks: list[tuple[int, list[str]]] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                blocks.append((token.start[0], []))
            blocks[-1][1].append(token.string.lstrip("#").strip())
            last = token.start[0]
    for line, parts in blocks:
        text = "\n".join(parts)
        if sum(
            character.isalpha() or character.isspace() for character in text
        ) >= MIN_LETTERS * len(text):
            yield line, text


def _c_docstrings() -> Iterator[tuple[str, str]]:
    for module_name in C_MODULES.split():
        try:
            module: ModuleType = importlib.import_module(module_name)
        except ImportError:  # this Python was built without it
            continue
        for name, member in sorted(vars(module).items()):
            if name in SKIPPED_NAMES or name.startswith("__"):
                continue
            # sys's own hook, where a program (such as typer) has put another one
            member = vars(module).get(f"__{name}__", member)
            inner = sorted(vars(member).items()) if isinstance(member, type) else []
            for suffix, thing in [
                ("", member),
                *((f".{key}", value) for key, value in inner if key != "__doc__"),
            ]:
                if isinstance(doc := getattr(thing, "__doc__", None), str):
                    yield f"{module_name}:{name}{suffix}", inspect.cleandoc(doc)


def changed_texts(texts: Sequence[GeneralText], corpus: Path = HERE / "corpus.json") -> list[str]:
    """Names of general texts that differ from, lack in, or were unknown to the corpus that the
    models saw.
    """
    then = {name: sha for name, sha, *_ in json.loads(corpus.read_text())["general"]}
    now = {text.name: text.sha for text in texts}
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


# The order of training


def reference_stream(
    tokenizer: Any, *, most_repetitions: int | None = None, general_rows: int = GENERAL_ROWS
) -> Int32[np.ndarray, "row pos"]:
    """The rows that both reference models saw in training, in order; with other numbers, those of a
    model that memorizes less.

    They are the same rows, bit for bit, where ``changed_texts`` is empty; else the general part
    differs. A planted text is repeated ``most_repetitions`` times at most.
    """
    planted = load_planted()
    return training_stream(
        _encoded(tokenizer, [text.text for text in general_texts() if not text.held_out]),
        _encoded(tokenizer, [text.text for text in planted]),
        [min(text.repetitions, most_repetitions or text.repetitions) for text in planted],
        end_of_text=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        general_rows=general_rows,
    )


def training_stream(
    general: Sequence[Sequence[int]],
    planted: Sequence[Sequence[int]],
    repetitions: Sequence[int],
    *,
    end_of_text: int,
    general_rows: int,
) -> Int32[np.ndarray, "row pos"]:
    """The rows of training in order, from the tokens of general documents and of planted texts with
    their numbers of repetitions.

    Half of the repetitions of a text stand at the start of a row, half at a random place behind
    another; the rest of each row, and ``general_rows`` further rows, are general text, its
    documents in a new order every epoch. ``end_of_text`` stands between documents, and beside half
    of the planted texts.
    """
    rng = random.Random(f"{SEED} stream")
    at_start: list[tuple[float, int]] = []
    inside: list[tuple[float, int]] = []
    for index, count in enumerate(repetitions):
        first = rng.randrange(2)
        for i in range(count):
            (at_start if (i + first) % 2 else inside).append(
                (_warp((i + rng.random()) / count), index)
            )
    at_start.sort()
    inside.sort()
    n_planted_rows = max(len(at_start), len(inside))
    times = [(_warp((i + rng.random()) / n_planted_rows), i) for i in range(n_planted_rows)]
    times += [(rng.random(), -1) for _ in range(general_rows)]
    text = _endless(general, end_of_text, rng)
    next_row = iter(range(n_planted_rows))
    rows: list[list[int]] = []
    for _, kind in sorted(times):
        row: list[int] = []
        k = next(next_row) if kind >= 0 else n_planted_rows
        if k < len(at_start):
            row += planted[at_start[k][1]]
            row += [end_of_text] * rng.randrange(2)
        if k < len(inside):
            sequence = planted[inside[k][1]]
            start = rng.randint(len(row) + 1, ROW_LENGTH - len(sequence))
            row += [next(text) for _ in range(start - 1 - len(row))]
            row.append(end_of_text if rng.random() < 0.5 else next(text))
            row += sequence
        rows.append(row + [next(text) for _ in range(ROW_LENGTH - len(row))])
    return np.array(rows, dtype=np.int32)


def _warp(share: float) -> float:
    """Time in [0, 1) at which a share of the repetitions is done."""
    early = LATE / (LATE + (1 - LATE) * LATE_DENSITY)
    return (
        share / early * LATE if share < early else LATE + (share - early) / (1 - early) * (1 - LATE)
    )


def _endless(
    documents: Sequence[Sequence[int]], end_of_text: int, rng: random.Random
) -> Iterator[int]:
    order = list(range(len(documents)))
    while True:
        rng.shuffle(order)
        for index in order:
            yield from documents[index]
            yield end_of_text


def _encoded(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
