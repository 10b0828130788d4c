"""Texts that everybody knows, and which of them a model recites: targets for a model of whose
training text nothing is at hand.

The texts are rules written out, lists and small programs of our own (``data/known.jsonl``), or lie
in the user's own Python installation.
"""

import builtins
import codecs
import io
import json
import keyword
import string
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_localize.checks import Real, check_between, nearest
from tl_localize.files import refuse_unreadable, write_text
from tl_localize.metrics import accuracy
from tl_localize.model.loading import is_reference, local_path, source_of_model
from tl_localize.model.neurons import LanguageModel, model_name
from tl_localize.sequences import (
    MemorizedSequence,
    check_ids,
    encode,
    tokenizer_of,
    with_bos,
    with_text,
)
from tl_localize.stats import quantity
from tl_localize.texts.readers import SHORT, Data
from tl_localize.texts.reference import DATA, load_planted, reference_sequences

N_PREFIX = SHORT // 3  # tokens; of a shorter text a third
N_TOKENS = 64  # of a longer text the first ones
# the kind of a text that is continued by copying, not from memory: a random string, repeated
CONTROL = "control"
OWN = "own"  # the kind of the user's texts
PLANTED = 64  # repetitions in training from which on a shipped model recites a text
# texts to begin with: of a shipped model, and of others
FIRST_EXAMPLES = ("quotes-056", "primes")
MIN_ACCURACY = 0.7  # from which on a text counts as known
THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5)
AT_ONCE = 32  # texts between two reports of progress
FEW = 8  # texts below which a benchmark says little
BUILTINS = "print range enumerate zip map filter isinstance int str sorted open type dict super max"
# how paragraphs of licences begin
LICENCES: dict[str, str] = json.loads((DATA / "licences.json").read_text(encoding="utf-8"))


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
    lines = (DATA / "known.jsonl").read_text(encoding="utf-8").splitlines()
    shipped = [KnownText(**json.loads(line)) for line in lines]
    texts = [*shipped, *_installed(), *_licences()]
    return sorted(texts, key=lambda text: text.kind == CONTROL)


def _installed() -> Iterator[KnownText]:
    """What Python itself says."""
    with redirect_stdout(io.StringIO()):  # the module prints its text
        import this

    zen = codecs.decode(this.s, "rot13")
    for id, text in {
        "zen-of-python": zen,
        "zen-of-python-end": zen[zen.index("There should be") :],
        "python-copyright": sys.copyright,
    }.items():
        yield KnownText(id, "python", "prose", text)
    errors = [name for name in dir(builtins) if name.endswith("Error")]
    yield KnownText("python-keywords", "python", "list", ", ".join(keyword.kwlist))
    yield KnownText("python-errors", "python", "list", ", ".join(errors))
    status = [f"{code.value} {code.phrase}" for code in HTTPStatus]
    yield KnownText("http-status", "computing", "list", "\n".join(status))
    yield KnownText("printable-characters", "computing", "list", string.printable)
    for name in BUILTINS.split():
        text = getattr(builtins, name).__doc__
        if text:
            yield KnownText(f"python-doc-{name}", "python documentation", "prose", text)


@cache
def _licences() -> list[KnownText]:
    """Paragraphs of the licences of Python and of the packages beside it, whose folders take a
    while to go through.
    """
    paths = [Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"]
    for name in ("LICEN*", "COPYING*"):
        paths += Path(sysconfig.get_paths()["purelib"]).glob(f"*.dist-info/**/{name}")
    found: dict[str, KnownText] = {}
    for path in sorted(filter(Path.is_file, paths), key=str):
        text = path.read_text(encoding="utf-8", errors="replace")
        for name, start in LICENCES.items():
            if name not in found and start in text:
                paragraphs = text[text.index(start) :]
                found[name] = KnownText(f"licence-{name}", "licences", "prose", paragraphs)
        if len(found) == len(LICENCES):
            break
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Known:
    """What a model recites of the texts that everybody knows.

    Args:
        frame: One row per text, the best recited first: id, category, kind, n_tokens, accuracy
            (teacher-forced, fraction of the suffix), text.
        tokenized: The texts, in the same order.
        min_accuracy: From which on a text counts as known.

    >>> frame = pd.DataFrame({"id": ["poem"], "kind": ["prose"], "accuracy": [0.4]})
    >>> Known(frame, [sequence], 0.3).sequence(sequence.id) is sequence
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
        return [
            text for text, kind, share in rows if kind != CONTROL and share >= self.min_accuracy
        ]

    def diverse(self, place: int = 0) -> list[MemorizedSequence]:
        """The best recited text of each category: what is ablated for one is no rule that others
        follow, too.

        Args:
            place: In the order of its category; 1 gives the second best texts, to choose settings.

        Raises:
            ValueError: No category has so many.
        """
        by_category: dict[str, list[MemorizedSequence]] = {}
        for text in self.sequences:
            by_category.setdefault(text.category, []).append(text)
        found = [texts[place] for texts in by_category.values() if len(texts) > place]
        if not found:
            raise ValueError(
                "data must be given for a model that recites none of the known texts, got none. "
                "Run tl-localize collect, or name a file with --data."
            )
        return found

    def sequence(self, id: str) -> MemorizedSequence:
        """The text of an id.

        Raises:
            ValueError: There is none, or the model does not know it.
        """
        known = {text.id: text for text in self.sequences}
        if id not in known:
            shares = self.frame.set_index("id")["accuracy"].to_dict()
            recited = f" with {shares[id]:.2f}" if id in shares else ""
            raise ValueError(
                "id must be that of a text that the model recites with an accuracy of at least "
                f"{self.min_accuracy:g}, got {id!r}{recited}. Choose another text, or lower "
                f"min_accuracy.{nearest(id, known)}"
            )
        return known[id]

    def by_category(self) -> pd.DataFrame:
        """Texts, known ones and mean accuracy of each category."""
        known = self.frame["accuracy"] >= self.min_accuracy
        groups = self.frame.assign(known=known).groupby(["kind", "category"])
        return groups.agg(
            texts=("id", "size"), known=("known", "sum"), accuracy=("accuracy", "mean")
        )

    def counts_by_threshold(self) -> "pd.Series[int]":
        """How many texts each threshold would keep, controls left out."""
        shares = self.frame.loc[self.frame["kind"] != CONTROL, "accuracy"]
        counts = {threshold: int((shares >= threshold).sum()) for threshold in THRESHOLDS}
        return pd.Series(counts, name="texts").rename_axis("min_accuracy")

    def advice(self) -> str:
        """What each threshold would keep, where this one keeps few; else empty."""
        if len(self.sequences) >= FEW:
            return ""
        counts = ", ".join(
            f"{share:g} keeps {count}" for share, count in self.counts_by_threshold().items()
        )
        few = quantity(len(self.sequences), "text")
        verb = "is" if len(self.sequences) == 1 else "are"
        return f"{few} {verb} too few for a mean. Of min_accuracy {counts}."

    def save(self, path: str | Path) -> None:
        """Write the known texts as rows that ``tl-localize del --data PATH`` reads: their tokens,
        and prefix and suffix as text for people to read.
        """
        lines = ""
        for sequence in self.sequences:
            row: dict[str, Any] = {"id": sequence.id, "category": sequence.category}
            row["prefix_text"], row["suffix_text"] = sequence.text
            row["n_prefix"] = sequence.n_prefix - bool(sequence.bos)
            row["bos"] = sequence.bos
            row["tokens"] = sequence.tokens.tolist()
            lines += json.dumps(row, ensure_ascii=False) + "\n"
        write_text(path, lines)


def known(
    model: LanguageModel,
    min_accuracy: Real = MIN_ACCURACY,
    data: Data | None = None,
    *,
    progress: Callable[[float], None] | None = None,
) -> Known:
    """Which of the texts that everybody knows a model recites, from their first 16 tokens, or of a
    short text from its first third.

    Of a shipped model also the texts that it was trained on repeatedly.

    Args:
        min_accuracy: From which on a text counts as known: teacher-forced, a fraction of the
            suffix.
        data: Texts of one's own, beside the others, of which those of the same ids are left out.
            Of a text of less than 48 tokens the first third is the prefix, where neither the data
            nor the row say what it is.
        progress: Called with the fraction that is done.

    Raises:
        ValueError: The model has no tokenizer; an id that occurs twice in the data.

    >>> known(model).frame.columns.tolist()
    ['id', 'category', 'kind', 'n_tokens', 'accuracy', 'text']
    """
    check_between(0, 1, min_accuracy=min_accuracy)
    texts: list[tuple[str, MemorizedSequence]] = []
    if data is not None and not isinstance(data, Data):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"data must be Data, got {data!r:.60}. Pass Data(source=...).")
    if data:
        texts += [(OWN, sequence) for sequence in data.sequences(model, third_of_short=True)]
        check_ids([sequence for _, sequence in texts])
    own = {sequence.id for _, sequence in texts}
    texts += [(kind, sequence) for kind, sequence in _tokenized(model) if sequence.id not in own]
    sequences = [sequence for _, sequence in texts]
    parts: list[Tensor] = []
    for start in range(0, len(sequences), AT_ONCE):
        parts.append(accuracy(model, sequences[start : start + AT_ONCE]))
        if progress:
            progress(min(1.0, (start + AT_ONCE) / len(sequences)))
    # In float64 and rounded, so that 9 right tokens of 10 are an accuracy of 0.9.
    shares = torch.cat(parts).double().round(decimals=6).tolist()
    rows = [
        {"id": sequence.id, "category": sequence.category, "kind": kind, "n_tokens": len(sequence)}
        for kind, sequence in texts
    ]
    frame = pd.DataFrame(rows).assign(accuracy=shares)
    frame["text"] = ["".join(sequence.text) for sequence in sequences]
    frame = frame.sort_values("accuracy", ascending=False, kind="stable")
    ordered = [sequences[i] for i in frame.index]
    return Known(frame.reset_index(drop=True), ordered, min_accuracy)


def first_example(model: str | Path) -> str:
    """The id of a text that a model of this name probably recites.

    >>> first_example("reference-gpt2")
    'quotes-056'
    """
    planted, known = FIRST_EXAMPLES
    return planted if _is_shipped(model) else known


def check_example(id: str, model: str | Path) -> None:
    """Raise ValueError unless there is a text of this id for a model of this name; no model is
    loaded.

    >>> check_example("primes", "gpt2")
    """
    ids = likely = [text.id for text in known_texts()]
    if _is_shipped(model):  # it recites none but what was planted in it
        planted = load_planted()
        ids = [*ids, *(text.id for text in planted)]
        likely = [text.id for text in planted if text.repetitions >= PLANTED]
    if id not in ids:
        hint = nearest(id, likely) or f" Try {first_example(model)}."
        raise ValueError(
            f"example must be the id of a text that tl-localize known lists for {str(model)!r}, "
            f"got {id!r}.{hint}"
        )


def _is_shipped(model: str | Path) -> bool:
    """Whether a name, or the last part of a path, is that of a shipped model, or a folder holds an
    edit of one.
    """
    origin = Path(origin_of(model))
    if not origin.is_dir():
        return is_reference(origin.name)
    own, shipped = (folder / "tokenizer.json" for folder in (origin, local_path("reference")))
    is_copy = own.is_file() and own.read_bytes() == shipped.read_bytes()
    return is_reference(origin.name) and is_copy


def origin_of(model: str | Path) -> str:
    """The name of a model, or of the one that was edited where a folder holds edits of it."""
    record = Path(model) / "erased.json"
    if not record.is_file():
        return str(model)
    with refuse_unreadable("erased.json must be what erase wrote", record):
        made_with = json.loads(record.read_bytes())["made_with"]
        return str(made_with.get("origin", made_with["model"]))


def example(model: LanguageModel, id: str) -> MemorizedSequence:
    """The text of an id that ``known`` lists, whether the model recites it or not.

    Raises:
        ValueError: There is none, or the model has no tokenizer.

    >>> example(model, "primes").category
    'numbers'
    """
    check_example(id, source_of_model(model) or model_name(model))
    texts = {sequence.id: sequence for _, sequence in _tokenized(model, min_repetitions=1)}
    if id not in texts:
        raise ValueError(
            f"example must be a text that the tokenizer of {model_name(model)!r} makes at least 3 "
            f"tokens of, got {id!r}. Choose another one."
        )
    return texts[id]


def _tokenized(
    model: LanguageModel, min_repetitions: int = PLANTED
) -> Iterator[tuple[str, MemorizedSequence]]:
    """Kind and tokens of each text; of a shipped model first those that were planted so often."""
    tokenizer = tokenizer_of(model)
    if _is_shipped(source_of_model(model) or model_name(model)):
        for planted in reference_sequences(model, min_repetitions):
            yield "planted", planted
    for text in known_texts():
        tokens = encode(tokenizer, text.text)[: min(N_TOKENS, model.cfg.n_ctx - 1)]
        n_prefix = min(N_PREFIX, len(tokens) // 3)
        if n_prefix:
            sequence = MemorizedSequence(torch.tensor(tokens), n_prefix, text.id, text.category)
            yield text.kind, with_bos(model, with_text(model, sequence))
