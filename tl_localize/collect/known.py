"""Texts that everybody knows, and which of them a model recites: targets for a model of whose
training text nothing is at hand.

The texts are generated, lie in the user's own Python installation, or are lists and small programs
of our own (``data/known.jsonl``).
"""

from __future__ import annotations

import builtins
import codecs
import io
import json
import keyword
import math
import random
import string
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from decimal import Decimal, localcontext
from http import HTTPStatus
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path

import pandas as pd
import torch

from tl_localize.files import nearest, write_text
from tl_localize.metrics import accuracy
from tl_localize.models import REFERENCE_MODELS
from tl_localize.neurons import LanguageModel, Real, check_between, model_name
from tl_localize.readers import Data
from tl_localize.reference import reference_sequences
from tl_localize.sequences import MemorizedSequence, encode, text_parts, tokenizer_of, with_bos

N_PREFIX = 16  # tokens; of a text of less than 48 a third
N_TOKENS = 64  # of a longer text the first ones
CONTROL = "control"  # the kind of a text that is continued by copying, not from memory
THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5)
ONES = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
ROMAN = {40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}
BUILTINS = "print range enumerate zip map filter isinstance int str sorted open type dict super max"
# How paragraphs of licences begin.
LICENCES = {
    "mit": "Permission is hereby granted, free of charge",
    "mit-warranty": 'THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY',
    "bsd": "Redistribution and use in source and binary forms",
    "bsd-warranty": "THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS",
    "apache": "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION",
    "apache-licensor": '"Licensor" shall mean',
    "apache-grant": "2. Grant of Copyright License.",
    "apache-notice": 'Licensed under the Apache License, Version 2.0 (the "License")',
    "isc": "Permission to use, copy, modify, and/or distribute this software",
    "psf": "1. This LICENSE AGREEMENT is between the Python Software Foundation",
}


@dataclass(frozen=True)
class KnownText:
    """A text that many people know.

    Args:
        kind: What must be known to continue it: a rule, a list, prose, code, a text that was
            planted in a shipped model, or nothing (control).

    >>> KnownText("even", "numbers", "rule", "2, 4, 6, 8").kind
    'rule'
    """

    id: str
    category: str
    kind: str
    text: str


def known_texts() -> list[KnownText]:
    """All texts; those of the installation as far as it has them.

    >>> texts = known_texts()
    >>> len(texts) > 100, texts[0].text[:16]
    (True, '1, 2, 3, 4, 5, 6')
    """
    return [*_rules(), *_decimals(), *_shipped(), *_installed(), *_licences(), *_controls()]


def _in_words(n: int) -> str:
    """A number from 1 to 99."""
    if n < 20:
        return ONES.split()[n - 1]
    tens, ones = TENS.split()[n // 10 - 2], n % 10
    return f"{tens}-{ONES.split()[ones - 1]}" if ones else tens


def _in_roman(n: int) -> str:
    written = ""
    for value, letters in ROMAN.items():
        written += letters * (n // value)
        n %= value
    return written


def _ordinal(n: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{'th' if n in (11, 12, 13) else ending}"


def _rules() -> Iterator[KnownText]:
    n = range(1, 41)
    fibonacci = [1, 1]
    for _ in n:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    numbers = {
        "count": n,
        "count-in-words": map(_in_words, n),
        "count-down": reversed(n),
        "tens-in-words": (_in_words(10 * i) for i in range(1, 10)),
        "even-numbers": (2 * i for i in n),
        "odd-numbers": (2 * i - 1 for i in n),
        **{f"multiples-of-{k}": [k * i for i in n] for k in (3, 4, 5, 6, 7, 8, 9, 11, 12, 25)},
        "hundreds": (100 * i for i in n),
        "thousands": (f"{1000 * i:,}" for i in n),
        "years": range(1990, 2022),
        "ordinals": map(_ordinal, n),
        "roman-numerals": map(_in_roman, n),
        "binary-numbers": (f"{i:b}" for i in n),
        "hexadecimal-numbers": (f"0x{i:02x}" for i in n),
        "primes": (i for i in range(2, 180) if all(i % k for k in range(2, i))),
        "squares": (i**2 for i in n),
        "cubes": (i**3 for i in n),
        **{f"powers-of-{k}": [k**i for i in range(20)] for k in (2, 3, 10)},
        "fibonacci": fibonacci,
        "factorials": map(math.factorial, range(1, 15)),
        "triangular-numbers": (i * (i + 1) // 2 for i in n),
        **{f"{k}-times-table": [f"{k} x {i} = {k * i}" for i in n[:12]] for k in (2, 7, 9)},
    }
    letters = {
        "alphabet": string.ascii_lowercase,
        "capital-alphabet": string.ascii_uppercase,
        "alphabet-in-both-cases": map(str.__add__, string.ascii_uppercase, string.ascii_lowercase),
        "alphabet-backwards": reversed(string.ascii_lowercase),
    }
    for category, texts in (("numbers", numbers), ("alphabets", letters)):
        for id, items in texts.items():
            yield KnownText(id, category, "rule", ", ".join(map(str, items)))


def _decimals() -> Iterator[KnownText]:
    with localcontext() as context:
        context.prec = 60
        numbers = {"e": Decimal(1).exp(), "square-root-of-two": Decimal(2).sqrt()}
        numbers["golden-ratio"] = (1 + Decimal(5).sqrt()) / 2
        for id, value in numbers.items():
            yield KnownText(id, "decimals", "list", str(value))


def _shipped() -> Iterator[KnownText]:
    lines = (files("tl_localize") / "data" / "known.jsonl").read_text(encoding="utf-8")
    for line in lines.splitlines():
        yield KnownText(**json.loads(line))


def _installed() -> Iterator[KnownText]:
    """What Python itself says."""
    with redirect_stdout(io.StringIO()):  # the module prints its text
        import this

    zen = codecs.decode(this.s, "rot13")
    yield KnownText("zen-of-python", "python", "prose", zen)
    yield KnownText("zen-of-python-end", "python", "prose", zen[zen.index("There should be") :])
    yield KnownText("python-copyright", "python", "prose", sys.copyright)
    yield KnownText("python-keywords", "python", "list", ", ".join(keyword.kwlist))
    errors = [name for name in dir(builtins) if name.endswith("Error")]
    yield KnownText("python-errors", "python", "list", ", ".join(errors))
    status = [f"{one.value} {one.phrase}" for one in HTTPStatus]
    yield KnownText("http-status", "computing", "list", "\n".join(status))
    yield KnownText("printable-characters", "computing", "list", string.printable)
    for name in BUILTINS.split():
        text = getattr(builtins, name).__doc__
        if text:
            yield KnownText(f"python-doc-{name}", "python documentation", "prose", text)


def _licences() -> Iterator[KnownText]:
    """Paragraphs of the licences of Python and of the packages beside it."""
    paths = [Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"]
    for package in distributions():
        found = [path for path in package.files or [] if path.name.startswith(("LICEN", "COPYING"))]
        paths += [Path(str(path.locate())) for path in found]
    missing = dict(LICENCES)
    for path in sorted(paths, key=str):
        if not missing:
            return
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        for name, start in list(missing.items()):
            if start in text:
                del missing[name]
                yield KnownText(f"licence-{name}", "licences", "prose", text[text.index(start) :])


def _controls() -> Iterator[KnownText]:
    """Random strings, each repeated: a model that copies continues them without memory."""
    for seed in range(3):
        word = "".join(random.Random(seed).choices(string.ascii_lowercase, k=12))
        yield KnownText(f"repeated-{word}", "repetition", CONTROL, " ".join([word] * 8))


@dataclass(frozen=True, eq=False)
class Known:
    """What a model recites of the texts that everybody knows.

    Args:
        frame: One row per text, the best recited first: id, category, kind, n_tokens, accuracy
            (teacher-forced, fraction of the suffix).
        tokenized: The texts, in the same order.
        min_accuracy: From which on a text counts as known.

    >>> frame = pd.DataFrame({"id": ["poem"], "kind": ["prose"], "accuracy": [0.4]})
    >>> Known(frame, [sequence], 0.3).sequence("poem") is sequence
    True
    >>> Known(frame, [sequence], 0.7).sequences
    []
    """

    frame: pd.DataFrame
    tokenized: list[MemorizedSequence]
    min_accuracy: Real

    def __repr__(self) -> str:
        found = f"{len(self.sequences)} of {len(self.frame)} texts"
        return f"Known({found} with an accuracy of at least {self.min_accuracy:g})"

    @property
    def sequences(self) -> list[MemorizedSequence]:
        """The known texts, for DEL; controls are left out."""
        rows = zip(self.tokenized, self.frame["kind"], self.frame["accuracy"], strict=True)
        return [one for one, kind, share in rows if kind != CONTROL and share >= self.min_accuracy]

    def sequence(self, id: str) -> MemorizedSequence:
        """The text of an id.

        Raises:
            ValueError: There is none, or the model does not know it.
        """
        ids = self.frame["id"].tolist()
        if id not in ids:
            raise ValueError(
                f"id must be that of a text, got {id!r}. tl-localize known lists them."
                f"{nearest(id, ids)}"
            )
        share = self.frame["accuracy"][ids.index(id)]
        if share < self.min_accuracy:
            raise ValueError(
                "id must be that of a text that the model recites with an accuracy of at least "
                f"{self.min_accuracy:g}, got {share:.2f} of {id!r}. Choose another text, or lower "
                "min_accuracy."
            )
        return self.tokenized[ids.index(id)]

    def by_category(self) -> pd.DataFrame:
        """Texts, known ones and mean accuracy of each category."""
        known = self.frame["accuracy"] >= self.min_accuracy
        groups = self.frame.assign(known=known).groupby(["kind", "category"])
        return groups.agg(
            texts=("id", "size"), known=("known", "sum"), accuracy=("accuracy", "mean")
        )

    def kept(self) -> pd.Series[int]:
        """How many texts each threshold would keep, controls left out."""
        shares = self.frame.loc[self.frame["kind"] != CONTROL, "accuracy"]
        counts = {threshold: int((shares >= threshold).sum()) for threshold in THRESHOLDS}
        return pd.Series(counts, name="texts").rename_axis("min_accuracy")

    def save(self, path: str | Path) -> None:
        """Write the known texts as rows that ``tl-localize del`` reads (``--data PATH --n-prefix
        n_prefix --id id --category category``).
        """
        lines = ""
        for one in self.sequences:
            row = {"id": one.id, "category": one.category, "n_prefix": one.n_prefix}
            lines += json.dumps({**row, "tokens": one.tokens.tolist()}) + "\n"
        write_text(path, lines)


def known(model: LanguageModel, min_accuracy: Real = 0.7, data: Data | None = None) -> Known:
    """Which of the texts that everybody knows a model recites, from their first 16 tokens, or of a
    short text from its first third.

    Of a shipped model also the texts that it was trained on repeatedly.

    Args:
        min_accuracy: From which on a text counts as known: teacher-forced, a fraction of the
            suffix.
        data: Texts of one's own, beside the others.

    Raises:
        ValueError: The model has no tokenizer.

    >>> known(model).frame.columns.tolist()
    ['id', 'category', 'kind', 'n_tokens', 'accuracy']
    """
    check_between(0, 1, min_accuracy=min_accuracy)
    tokenizer = tokenizer_of(model)
    sequences = list(data.sequences(model)) if data else []
    kinds = ["own"] * len(sequences)
    if model_name(model) in REFERENCE_MODELS:
        planted = reference_sequences(model)
        sequences += planted
        kinds += ["planted"] * len(planted)
    for text in known_texts():
        tokens = encode(tokenizer, text.text)[: min(N_TOKENS, model.cfg.n_ctx - 1)]
        n_prefix = min(N_PREFIX, len(tokens) // 3)
        if n_prefix:
            parts = text_parts(model, tokens, n_prefix)
            about = n_prefix, text.id, text.category, parts
            sequences.append(with_bos(model, MemorizedSequence(torch.tensor(tokens), *about)))
            kinds.append(text.kind)
    by_length = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    # In float64 and rounded, so that 9 right tokens of 10 are an accuracy of 0.9.
    measured = accuracy(model, [sequences[i] for i in by_length]).double().round(decimals=6)
    shares = dict(zip(by_length, measured.tolist(), strict=True))
    order = sorted(shares, key=lambda i: (-shares[i], i))
    rows = [
        {
            "id": sequences[i].id,
            "category": sequences[i].category,
            "kind": kinds[i],
            "n_tokens": len(sequences[i]),
            "accuracy": shares[i],
        }
        for i in order
    ]
    return Known(pd.DataFrame(rows), [sequences[i] for i in order], min_accuracy)
