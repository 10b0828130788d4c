"""From a stream of token sequences to those that a model has memorized, by the paper's criteria.

The stream is read once and never held: what stays in memory is one batch and what has passed so far. Tests that cost nothing come first,
then a forward pass over the first suffix tokens, then one over all of them, then greedy generation.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int, Integer
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from tl_localize.losses import residual, unembed
from tl_localize.batching import halving, tokens_that_fit
from tl_localize.metrics import Decode, decoder
from tl_localize.models import key_value_cache
from tl_localize.neurons import LanguageModel, NeuronView, Real
from tl_localize.readers import read_jsonl
from tl_localize.sequences import MemorizedSequence, encode
from tl_localize.execution.store import environment, prepare_folder, write_json, write_text

Item = TypeVar("Item")
Passed = TypeVar("Passed")
Progress = Callable[[float, str], None]

SHORT, REPETITIVE, INACCURATE = "too short", "few distinct tokens in the true suffix", "accuracy"
REPEATED, DISTANT, MONOTONOUS = "exact duplicate", "distance of the greedy continuation", "few distinct tokens in the generated suffix"
NEAR, SURPLUS = "near-duplicate", "not drawn"
CRITERIA = (SHORT, REPETITIVE, INACCURATE, REPEATED, DISTANT, MONOTONOUS, NEAR, SURPLUS)  # in the order in which they are applied
LOOSEN = {
    SHORT: "Give longer texts, or lower n_prefix or n_suffix.",
    REPETITIVE: "Lower min_distinct.",
    INACCURATE: "Lower min_accuracy, or give text that the model saw often in training.",
    REPEATED: "Give more text.",
    DISTANT: "Raise max_distance.",
    MONOTONOUS: "Lower min_distinct.",
}
EXAMPLES = 3  # of each criterion, kept for the report
CHECK_EVERY = 4  # generated tokens between two looks at who can still pass


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """What counts as memorized.

    Source: Chang et al. (2024), arXiv:2311.09060, section 4.2 and appendix (details of data collection).
    Args:
        n_prefix: tokens that prompt the model.
        n_suffix: tokens that it must recite.
        min_accuracy: teacher-forced argmax, share of the suffix tokens.
        max_distance: Levenshtein distance of the greedily generated suffix to the true one, characters.
        min_distinct: distinct tokens in the suffix, the true one and the generated one.
        max_jaccard: sequences with a larger Jaccard index of their n-gram sets are near-duplicates.
        ngram: tokens of an n-gram.
    Raises:
        ValueError: one of them is out of its range.

    >>> from tl_localize.collect import Criteria
    >>> criteria = Criteria(n_prefix=10, n_suffix=20)
    >>> criteria.length, criteria.max_misses  # an accuracy of 0.9 forgives 2 of 20 tokens
    (30, 2)
    """

    n_prefix: int = 32
    n_suffix: int = 48
    min_accuracy: Real = 0.9
    max_distance: int = 20
    min_distinct: int = 16
    max_jaccard: Real = 0.05
    ngram: int = 5

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n_prefix", 1, math.inf),
            ("n_suffix", 1, math.inf),
            ("min_accuracy", 0, 1),
            ("max_distance", 0, math.inf),
            ("min_distinct", 0, self.n_suffix),
            ("max_jaccard", 0, 1),
            ("ngram", 1, self.length),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be in [{low}, {high}], got {getattr(self, name)!r}.")

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.n_prefix + self.n_suffix

    @property
    def max_misses(self) -> int:
        """Suffix tokens that may be predicted wrong."""
        return math.floor((1 - self.min_accuracy) * self.n_suffix + 1e-9)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A token sequence and where it is from.

    Args:
        tokens: [pos] token ids.
        id: names it in the collection.
        category: groups the confusion matrix of DEL; may be empty.

    >>> import numpy as np
    >>> from tl_localize.collect import Candidate
    >>> Candidate(np.arange(80), "page 3", "poems")
    Candidate('page 3', 80 tokens)
    """

    tokens: Integer[np.ndarray, " pos"]
    id: str
    category: str = ""

    def __repr__(self) -> str:
        return f"Candidate({self.id!r}, {len(self.tokens)} tokens)"


@dataclass(frozen=True, eq=False)
class Memory:
    """A candidate that is predicted well enough to be asked to recite, and how that went.

    Args:
        distance: of the greedy continuation; at least, where generation was given up.
        failed: the criterion that removes it, and why; nothing where it has passed.
    """

    tokens: Int[np.ndarray, " pos"]
    id: str
    category: str
    accuracy: float
    distance: int
    text: str
    failed: str = ""
    why: str = ""


@dataclass(frozen=True, eq=False)
class Report:
    """How many sequences came in, how many each criterion removed, and examples of what it removed.

    >>> from tl_localize.collect import Report
    >>> report = Report(10, {"accuracy": 7, "near-duplicate": 1})
    >>> report.n_out, report.table().loc["accuracy", ["removed", "left"]].tolist()
    (2, [7, 3])
    """

    n_in: int
    removed: dict[str, int]
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def n_out(self) -> int:
        return self.n_in - sum(self.removed.values())

    def table(self) -> pd.DataFrame:
        """One row per criterion, in the order in which they were applied: removed, left, an example."""
        left, rows = self.n_in, list[dict[str, Any]]()
        for criterion in CRITERIA:
            left -= self.removed.get(criterion, 0)
            example = next(iter(self.examples.get(criterion, [])), "")
            rows.append({"criterion": criterion, "removed": self.removed.get(criterion, 0), "left": left, "example": example})
        return pd.DataFrame(rows).set_index("criterion")

    def __repr__(self) -> str:
        return f"Report({self})"

    def __str__(self) -> str:
        parts = [f"{self.n_in} came in", *(f"{n} removed: {name}" for name, n in self.removed.items() if n), f"{self.n_out} left"]
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class Collection:
    """Memorized sequences, the dev ones first.

    Args:
        sequences: what DelBenchmark takes, with ``n_dev``.
        frame: one row per sequence, in the same order: id, category, split ("dev" or "test"), accuracy (teacher-forced, fraction), distance
            (of the greedy continuation, characters), prefix and suffix (text).
        groups: id of each kept sequence -> ids of the near-duplicates that it stands for.
        settings: what else the choice depends on: seed, n_max, versions, which weights.

    >>> from tl_localize import load_model
    >>> from tl_localize.collect import collect_memorized
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> found = collect_memorized(model, [one.tokens for one in reference_sequences(model)[:3]], n_dev=1)
    >>> found = found.labelled({found.frame["id"][0]: ("first", "mine")})
    >>> found.frame[["id", "category", "split"]].values.tolist()[0], len(found.sequences)
    (['first', 'mine', 'dev'], 3)
    """

    sequences: list[MemorizedSequence]
    n_dev: int
    frame: pd.DataFrame
    report: Report
    criteria: Criteria
    groups: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Collection({len(self.sequences)} of {self.report.n_in} sequences memorized, {self.n_dev} for development)"

    def labelled(self, labels: Mapping[str, tuple[str, str]]) -> Collection:
        """The same with other ids and categories: old id -> (new id, category), for as many as one likes."""
        old = list(self.frame["id"])
        new = [labels.get(name, (name, category)) for name, category in zip(old, self.frame["category"], strict=True)]
        renamed = {name: label for name, (label, _) in zip(old, new, strict=True)}
        return replace(
            self,
            sequences=[replace(s, id=name, category=group) for s, (name, group) in zip(self.sequences, new, strict=True)],
            frame=self.frame.assign(id=[name for name, _ in new], category=[group for _, group in new]),
            groups={renamed[name]: members for name, members in self.groups.items()},
        )

    def save(self, folder: str | Path) -> None:
        """Write sequences.jsonl, report.csv and settings.json, each whole or not at all.

        A line of sequences.jsonl has the keys of the authors' manual sets (prompt, all, prompt_len, category) and the tokens themselves.
        """
        path = prepare_folder(folder)
        lines: list[str] = []
        for sequence, row in zip(self.sequences, self.frame.to_dict("records"), strict=True):
            record = {name: row[name] for name in ("id", "split", "accuracy", "distance")}
            record |= {"category": [sequence.category] if sequence.category else [], "prompt": row["prefix"]}
            record |= {"all": row["prefix"] + row["suffix"], "prompt_len": sequence.n_prefix, "tokens": sequence.tokens.tolist()}
            lines.append(json.dumps(record, ensure_ascii=False))
        write_text(path / "sequences.jsonl", "\n".join(lines) + "\n")
        write_text(path / "report.csv", self.report.table().to_csv())
        report = {"n_in": self.report.n_in, "removed": self.report.removed, "examples": self.report.examples}
        record = {"n_dev": self.n_dev, "criteria": asdict(self.criteria), "report": report, "groups": self.groups}
        write_json(path / "settings.json", record | self.settings)


def load_collection(folder: str | Path) -> tuple[list[MemorizedSequence], int]:
    """The sequences and n_dev that ``Collection.save`` wrote.

    Raises:
        FileNotFoundError: the folder holds no collection.
        ValueError: a broken line (the message has its number).

    >>> import tempfile
    >>> from tl_localize import load_model
    >>> from tl_localize.collect import collect_memorized, load_collection
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     collect_memorized(model, [one.tokens for one in reference_sequences(model)[:3]], n_dev=1).save(folder)
    ...     sequences, n_dev = load_collection(folder)
    >>> len(sequences), n_dev
    (3, 1)
    """
    path = Path(folder) / "sequences.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"folder must hold a collection, got {str(folder)!r} without a sequences.jsonl. Run tl-localize collect.")
    sequences: list[MemorizedSequence] = []
    n_dev = 0
    for line, row in read_jsonl(path, "id", "split"):
        try:
            category = next(iter(row["category"]), "")
            sequences.append(MemorizedSequence(torch.tensor(row["tokens"]), row["prompt_len"], row["id"], category))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line must be one that tl-localize collect wrote, got {error!s} ({path}, line {line}). Collect again."
            ) from error
        n_dev += row["split"] == "dev"
    return sequences, n_dev


def origins(sequences: Iterable[Sequence[int]], known: Iterable[Sequence[int]], ngram: int = 5) -> list[int]:
    """Of each token sequence the index of the known text that it shows at least half of (in n-grams); -1 where there is none."""
    sizes: list[int] = []
    holders: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, tokens in enumerate(known):
        grams = _ngrams(tokens, ngram)
        sizes.append(len(grams))
        for gram in grams:
            holders[gram].append(i)
    found: list[int] = []
    for tokens in sequences:
        shared = Counter(i for gram in _ngrams(tokens, ngram) for i in holders.get(gram, ()))
        index, count = max(shared.items(), key=lambda item: item[1], default=(-1, 0))
        found.append(index if index >= 0 and 2 * count >= sizes[index] else -1)
    return found


def _ngrams(tokens: Sequence[int], n: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)}


# Sources


def token_windows(
    tokens: Integer[Tensor, "sequence pos"], length: int = 80, stride: int | None = None, *, first: int = 0
) -> Iterator[Candidate]:
    """Windows of long rows: the first ``length`` tokens of each (as the authors take them), or one every ``stride`` tokens.

    A memory-mapped tensor (``readers.read_tokens`` of a ``.npy`` file) is read row by row.

    Args:
        tokens: [sequence pos] token ids.
        length: of a window, tokens.
        first: number of the first row, for the ids.
    Raises:
        ValueError: stride is less than 1.

    >>> from tl_localize.collect import token_windows
    >>> from tl_localize.reference import held_out_tokens
    >>> [window.id for window in token_windows(held_out_tokens()[:1], length=64, stride=64)]  # of 128 tokens
    ['row-0+0', 'row-0+64']
    """
    if stride is not None and stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}. Leave it out for the first window of each row.")
    for i in range(len(tokens)):
        yield from _windows(tokens[i].cpu().long().numpy(), f"row-{first + i}", length, stride)


def text_windows(
    texts: Iterable[str], model: LanguageModel, length: int = 80, stride: int | None = None, *, first: int = 0
) -> Iterator[Candidate]:
    """The same for texts; a text that is empty or too short comes out as it is, and is counted as too short.

    Raises:
        ValueError: the model has no tokenizer.

    >>> from tl_localize import load_model
    >>> from tl_localize.collect import text_windows
    >>> list(text_windows(["a long text, in which the model reads on and on", ""], load_model("reference"), length=8))
    [Candidate('text-0', 8 tokens), Candidate('text-1', 0 tokens)]
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("model must have a tokenizer to read text, got none. Set model.tokenizer, or give tokens.")
    for i, text in enumerate(texts, first):
        yield from _windows(np.array(encode(tokenizer, text) if text else [], dtype=np.int64), f"text-{i}", length, stride)


def _windows(row: Int[np.ndarray, " pos"], name: str, length: int, stride: int | None) -> Iterator[Candidate]:
    starts = range(0, len(row) - length + 1, stride) if stride and len(row) >= length else (0,)
    for start in starts:
        yield Candidate(row[start : start + length], f"{name}+{start}" if stride else name)


def likely_windows(
    model: LanguageModel, tokens: Integer[Tensor, "sequence pos"], criteria: Criteria | None = None, *, slack: int = 4, first: int = 0
) -> Iterator[Candidate]:
    """Windows of long rows, at any position, that the model may have memorized; one forward pass over each row finds them.

    A row that is longer than the model can read is read in pieces that overlap, so that every window is in exactly one of them. With all
    that stands before it there as context instead of its own prefix, at most ``slack`` suffix tokens of a window more may be wrong than the
    criteria allow. Overlapping windows: the best one is taken, of equal ones the last, whose prefix is most a part of the memory. What the
    criteria say about the windows is still to be tested.

    Args:
        tokens: [sequence pos] token ids.
        first: number of the first row, for the ids.
    Raises:
        ValueError: the rows are shorter than a window.

    >>> import torch
    >>> from tl_localize import load_model
    >>> from tl_localize.collect import likely_windows
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> row = torch.cat([one.tokens for one in reference_sequences(model)[:2]])  # of 160 tokens
    >>> list(likely_windows(model, row[None]))
    [Candidate('row-0+0', 80 tokens), Candidate('row-0+80', 80 tokens)]
    """
    criteria = criteria or Criteria()
    view = NeuronView(model)
    needed = criteria.n_suffix - criteria.max_misses - slack
    n_windows = tokens.shape[1] + 1 - criteria.length
    longest = model.cfg.n_ctx + 1  # tokens of a piece, the last of which is only predicted
    if n_windows < 1:
        raise ValueError(f"tokens must be rows of at least {criteria.length} tokens, got {tokens.shape[1]}. Lower n_prefix or n_suffix.")
    if criteria.length > longest:
        raise ValueError(f"n_prefix + n_suffix must be at most n_ctx + 1 = {longest}, got {criteria.length}. Use shorter sequences.")

    @torch.no_grad()
    def hits(rows: list[int]) -> Int[np.ndarray, "row window"]:
        part = tokens[rows[0] : rows[-1] + 1].long().to(view.device)
        found: list[np.ndarray] = []
        for start in range(0, n_windows, longest + 1 - criteria.length):
            piece = part[:, start : start + longest]
            with view.one_gelu_kernel():
                right = unembed(model, residual(model, piece[:, :-1])).argmax(-1) == piece[:, 1:]
            found.append(_right_in_suffix(right.cpu().numpy(), criteria))
        return np.concatenate(found, 1)

    for rows, right in halving(hits, range(len(tokens)), max(1, tokens_that_fit(view) // min(tokens.shape[1], longest))):
        for i, row in zip(rows, right, strict=True):
            for start in _best_windows(row, criteria.length, needed):
                yield Candidate(tokens[i, start : start + criteria.length].cpu().long().numpy(), f"row-{first + i}+{start}")


def _right_in_suffix(right: Bool[np.ndarray, "row pos"], criteria: Criteria) -> Int[np.ndarray, "row window"]:
    """Right predictions in the suffix of the window that starts at each position; ``right[:, t]`` is of token t + 1."""
    total = np.pad(right.cumsum(1), ((0, 0), (1, 0)))
    first = np.arange(right.shape[1] + 2 - criteria.length) + criteria.n_prefix - 1
    return total[:, first + criteria.n_suffix] - total[:, first]


def _best_windows(found: Int[np.ndarray, " window"], length: int, needed: int) -> list[int]:
    """Starts of windows that do not overlap, with at least so many right predictions in the suffix."""
    chosen: list[int] = []
    for start in sorted(np.flatnonzero(found >= needed), key=lambda s: (-found[s], -s)):
        if all(abs(start - other) >= length for other in chosen):
            chosen.append(int(start))
    return sorted(chosen)


# Collecting


def collect_memorized(
    model: LanguageModel,
    stream: Iterable[Any],
    criteria: Criteria | None = None,
    *,
    n_dev: int = 5,
    n_max: int | None = None,
    seed: int = 0,
    decode: Decode | None = None,
    batch_size: int | None = None,
    total: int | None = None,
    progress: Progress | None = None,
) -> Collection:
    """The sequences of a stream that the model has memorized, near-duplicates removed, dev sequences first.

    Args:
        stream: Candidates (``token_windows``, ``text_windows``, ``likely_windows``) or plain vectors of token ids; of a longer one the
            first 32 + 48 tokens are taken. Read once.
        n_dev: how many of the found ones are drawn for the choice of hyperparameters.
        n_max: draw at most so many, dev ones included (the authors keep 505).
        seed: of both draws.
        decode: token ids -> text; the model's tokenizer unless given.
        batch_size: sequences in a forward pass; by default as many as fit.
        total: length of the stream, if known, for the progress.
        progress: called with the fraction done (nan when total is not known) and the numbers so far.
    Raises:
        ValueError: a token that the model does not know, no sequence left (with the criterion that removed the last ones), or fewer than
            the dev set needs.

    >>> from tl_localize import load_model
    >>> from tl_localize.collect import collect_memorized
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> model = load_model("reference")
    >>> stream = [*held_out_tokens()[:2], *(one.tokens for one in reference_sequences(model)[:4])]
    >>> found = collect_memorized(model, stream, n_dev=1)
    >>> print(found.report)
    6 came in, 2 removed: accuracy, 4 left
    """
    sieve = Sieve(model, criteria or Criteria(), decode, batch_size)
    check_draw(n_dev, n_max)

    def report(sifted: Sifted) -> None:
        if progress:
            n_in = sifted.counts.n_in
            progress(n_in / total if total else math.nan, f"{n_in} read, {len(sifted.accurate)} predicted accurately")

    return assemble(sieve, [sieve.sift(stream, report)], n_dev=n_dev, n_max=n_max, seed=seed)


def check_draw(n_dev: int, n_max: int | None) -> None:
    """Raise ValueError unless the draw leaves sequences for the test."""
    if n_dev < 0 or (n_max is not None and n_max <= n_dev):
        raise ValueError(f"n_dev must be at least 0 and below n_max={n_max}, got {n_dev}.")


def assemble(sieve: Sieve, parts: Iterable[Sifted], *, n_dev: int = 5, n_max: int | None = None, seed: int = 0) -> Collection:
    """The collection from the parts of a stream, in order: near-duplicates removed, dev sequences drawn; arguments as above."""
    check_draw(n_dev, n_max)
    criteria = sieve.criteria
    counts, found = merged(parts)
    if not found:
        raise ValueError(_nothing_left(counts))
    groups = near_duplicates(np.stack([memory.tokens for memory in found]), criteria.max_jaccard, criteria.ngram)
    best = [min(group, key=lambda i: (found[i].distance, -found[i].accuracy, i)) for group in groups]
    for group, chosen in zip(groups, best, strict=True):
        for i in group:
            if i != chosen:
                counts.remove(NEAR, found[i].id, f"of {found[chosen].id}", found[i].text)
    if len(best) <= n_dev:
        raise ValueError(
            f"n_dev must leave at least one of the {len(best)} memorized sequences for the test, got {n_dev} ({counts.report()}). "
            "Give more text, loosen a criterion, or use a smaller dev set."
        )
    order = np.random.default_rng(seed).permutation(len(best))
    dev, rest = order[:n_dev], np.sort(order[n_dev:n_max])
    kept = [found[best[i]] for i in chain(dev, rest)]
    for i in order[len(kept) :]:
        counts.remove(SURPLUS, found[best[i]].id, f"more than {n_max} were found", found[best[i]].text)
    members = {found[chosen].id: [found[i].id for i in group if i != chosen] for group, chosen in zip(groups, best, strict=True)}
    texts = [_prefix_and_suffix(sieve, memory) for memory in kept]
    return Collection(
        [MemorizedSequence(torch.from_numpy(m.tokens), criteria.n_prefix, m.id, m.category) for m in kept],
        n_dev,
        pd.DataFrame(
            {
                "id": [m.id for m in kept],
                "category": [m.category for m in kept],
                "split": ["dev"] * n_dev + ["test"] * (len(kept) - n_dev),
                "accuracy": [m.accuracy for m in kept],
                "distance": [m.distance for m in kept],
                "prefix": [prefix for prefix, _ in texts],
                "suffix": [suffix for _, suffix in texts],
            }
        ),
        counts.report(),
        criteria,
        {m.id: members[m.id] for m in kept if members[m.id]},
        {"seed": seed, "n_max": n_max, "environment": environment(sieve.model)},
    )


def _prefix_and_suffix(sieve: Sieve, memory: Memory) -> tuple[str, str]:
    """Texts that together are the text of the whole; the suffix's own where a character is cut by the boundary."""
    n = sieve.criteria.n_prefix
    prefix = sieve.decode(memory.tokens[:n].tolist())
    return prefix, memory.text[len(prefix) :] if memory.text.startswith(prefix) else sieve.decode(memory.tokens[n:].tolist())


def _nothing_left(counts: Counts) -> str:
    if not counts.n_in:
        return "stream must hold at least one sequence, got none. Check the data file."
    last = [criterion for criterion in CRITERIA if counts.removed[criterion]][-1]
    return f"stream must hold a memorized sequence, got none: {counts.report()}. The last ones failed by {last!r}. {LOOSEN.get(last, '')}"


@dataclass(eq=False)
class Counts:
    """How many sequences came in and how many each criterion removed, so far, with the first examples."""

    n_in: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def remove(self, criterion: str, id: str, why: str, text: str | Callable[[], str]) -> None:
        self.removed[criterion] += 1
        examples = self.examples.setdefault(criterion, [])
        if len(examples) < EXAMPLES:
            examples.append(f"{id}: {why}: {(text if isinstance(text, str) else text())[:100]!r}")

    def report(self) -> Report:
        examples = {criterion: self.examples[criterion] for criterion in CRITERIA if criterion in self.examples}
        return Report(self.n_in, {criterion: self.removed[criterion] for criterion in CRITERIA}, examples)


@dataclass(frozen=True, eq=False)
class Sifted:
    """What the criteria say of a stream, or of a part of it that knows nothing of the others.

    Args:
        counts: what came in, and what was removed before it was asked to recite.
        accurate: what was asked to recite, and how that went.
    """

    counts: Counts = field(default_factory=Counts)
    accurate: list[Memory] = field(default_factory=list)

    def packed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """For a file: a record as JSON takes it, and tensors."""
        about = [{name: value for name, value in vars(memory).items() if name != "tokens"} for memory in self.accurate]
        tokens = torch.from_numpy(np.array([memory.tokens for memory in self.accurate], dtype=np.int64))
        return {**vars(self.counts), "accurate": about}, {"tokens": tokens}

    @classmethod
    def unpacked(cls, value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Sifted:
        """What ``packed`` gave."""
        counts = Counts(value["n_in"], Counter(value["removed"]), value["examples"])
        return cls(counts, [Memory(row, **about) for row, about in zip(tensors["tokens"].numpy(), value["accurate"], strict=True)])


def merged(parts: Iterable[Sifted]) -> tuple[Counts, list[Memory]]:
    """Parts of a stream as one: what an earlier one holds is a duplicate in a later one. Returns what has passed, in order."""
    counts, seen, found = Counts(), set[bytes](), list[Memory]()
    for part in parts:
        counts.n_in += part.counts.n_in
        counts.removed.update(part.counts.removed)
        for criterion, examples in part.counts.examples.items():
            counts.examples[criterion] = [*counts.examples.get(criterion, []), *examples][:EXAMPLES]
        for memory in part.accurate:
            if (tokens := memory.tokens.tobytes()) in seen:
                counts.remove(REPEATED, memory.id, "seen before", memory.text)
            elif memory.failed:
                counts.remove(memory.failed, memory.id, memory.why, memory.text)
            else:
                found.append(memory)
            seen.add(tokens)
    return counts, found


class Sieve:
    """The criteria that look at one sequence at a time, in the order of their cost.

    Raises:
        ValueError: the model's context is too short for the criteria.
    """

    def __init__(self, model: LanguageModel, criteria: Criteria, decode: Decode | None = None, batch_size: int | None = None) -> None:
        if criteria.length > model.cfg.n_ctx:
            raise ValueError(f"n_prefix + n_suffix must be at most n_ctx={model.cfg.n_ctx}, got {criteria.length}. Use shorter sequences.")
        self.model, self.criteria, self.decode = model, criteria, decode or decoder(model)
        self.view = NeuronView(model)
        self.batch_size = batch_size or max(1, tokens_that_fit(self.view) // criteria.length)
        self._start()

    def sift(self, stream: Iterable[Any], progress: Callable[[Sifted], None] = lambda _: None) -> Sifted:
        """What the criteria say of a stream; each step waits until it has a batch of what the step before let through.

        Args:
            progress: called with what is known so far, at every batch that was read or has recited.
        """
        sifted = self._start()

        def watched() -> Iterator[Any]:
            for item in stream:
                yield item
                if self.counts.n_in % self.batch_size == 0:
                    progress(sifted)

        probed = self._in_batches(self._readable(watched()), self._probe)
        accurate = self._in_batches(chain.from_iterable(probed), self._accurate)
        for recited in self._in_batches(chain.from_iterable(accurate), self._recited):
            sifted.accurate.extend(recited)
            progress(sifted)
        return sifted

    def _start(self) -> Sifted:
        sifted = Sifted()
        self.counts, self.seen = sifted.counts, set[bytes]()
        return sifted

    def remove(self, criterion: str, candidate: Candidate, why: str) -> None:
        ids = candidate.tokens.tolist()
        self.counts.remove(criterion, candidate.id, why, lambda: self.decode(ids) if ids else "")

    def _in_batches(self, items: Iterable[Item], work: Callable[[list[Item]], Passed]) -> Iterator[Passed]:
        for batch in _batches(items, self.batch_size):
            for _, passed in halving(work, batch, len(batch)):
                yield passed

    def _readable(self, stream: Iterable[Any]) -> Iterator[Candidate]:
        """Long enough, in the vocabulary, not repetitive: no model needed."""
        criteria, d_vocab = self.criteria, self.model.cfg.d_vocab
        for item in stream:
            given = item if isinstance(item, Candidate) else Candidate(_vector(item), f"sequence-{self.counts.n_in}")
            self.counts.n_in += 1
            candidate = replace(given, tokens=given.tokens[: criteria.length].astype(np.int64))
            if len(candidate.tokens) and not 0 <= (low := int(candidate.tokens.min())) <= (high := int(candidate.tokens.max())) < d_vocab:
                raise ValueError(
                    f"tokens must be in [0, {d_vocab}), got {low if low < 0 else high} in {candidate.id!r}. "
                    "Was the text tokenized with another model's tokenizer?"
                )
            if len(candidate.tokens) < criteria.length:
                self.remove(SHORT, candidate, f"{len(candidate.tokens)} tokens")
            elif (distinct := len(set(candidate.tokens[criteria.n_prefix :].tolist()))) < criteria.min_distinct:
                self.remove(REPETITIVE, candidate, f"{distinct} tokens")
            elif candidate.tokens.tobytes() in self.seen:  # most copies are caught here, before any forward pass
                self.remove(REPEATED, candidate, "seen before")
            else:
                yield candidate

    def _probe(self, batch: list[Candidate]) -> list[Candidate]:
        """Only as many suffix tokens as it takes to see that most sequences are not memorized; removes nothing that could pass."""
        allowed = self.criteria.max_misses
        n = min(self.criteria.n_suffix, max(4, 3 * allowed))
        misses = (self._predict(batch, n) != _stack(batch)[:, self.criteria.n_prefix :][:, :n]).sum(1)
        for candidate, missed in zip(batch, misses, strict=True):
            if missed > allowed:
                self.remove(INACCURATE, candidate, f"{missed} of the first {n} suffix tokens wrong")
        return [candidate for candidate, missed in zip(batch, misses, strict=True) if missed <= allowed]

    def _accurate(self, batch: list[Candidate]) -> list[tuple[Candidate, Bool[np.ndarray, " suffix"]]]:
        """Accuracy of the whole suffix; what has passed before is not looked at again."""
        fresh = [candidate for candidate in batch if candidate.tokens.tobytes() not in self.seen]
        right = self._predict(fresh, self.criteria.n_suffix) == _stack(fresh)[:, self.criteria.n_prefix :] if fresh else []
        hits_of = {id(candidate): hits for candidate, hits in zip(fresh, right, strict=True)}
        passed: list[tuple[Candidate, np.ndarray]] = []
        for candidate in batch:
            hits = hits_of.get(id(candidate))
            if candidate.tokens.tobytes() in self.seen or hits is None:
                self.remove(REPEATED, candidate, "seen before")
            elif (~hits).sum() > self.criteria.max_misses:
                self.remove(INACCURATE, candidate, f"accuracy {hits.mean():.2f}")
            else:
                self.seen.add(candidate.tokens.tobytes())
                passed.append((candidate, hits))
        return passed

    @torch.no_grad()
    def _predict(self, batch: list[Candidate], n: int) -> Int[np.ndarray, "batch suffix"]:
        """Teacher-forced argmax of the first n suffix tokens."""
        start = self.criteria.n_prefix
        tokens = torch.from_numpy(_stack(batch)[:, : start + n - 1]).to(self.view.device)
        with self.view.one_gelu_kernel():
            return unembed(self.model, residual(self.model, tokens)[:, start - 1 :]).argmax(-1).cpu().numpy()

    def _recited(self, batch: list[tuple[Candidate, Bool[np.ndarray, " suffix"]]]) -> list[Memory]:
        """Whether the greedy continuation is close enough to the truth.

        Up to its first teacher-forced miss a greedy continuation is the truth itself, so who misses nothing needs no generation, and the
        others start there.
        """
        criteria = self.criteria
        n_prefix = criteria.n_prefix
        generated: dict[int, list[int] | None] = {
            i: candidate.tokens[n_prefix:].tolist() for i, (candidate, hits) in enumerate(batch) if hits.all()
        }
        open_rows = sorted((i for i in range(len(batch)) if i not in generated), key=lambda i: int(batch[i][1].argmin()))
        for part in _batches(open_rows, self.batch_size):
            known = int(batch[part[0]][1].argmin())
            tokens = _stack([batch[i][0] for i in part])
            generated |= dict(zip(part, self._generate(tokens, known), strict=True))
        recited: list[Memory] = []
        for i, (candidate, hits) in enumerate(batch):
            suffix = generated[i]
            text = self.decode(candidate.tokens.tolist())
            distance, failed, why = criteria.max_distance + 1, DISTANT, f"more than {criteria.max_distance} characters"
            if suffix is not None:
                distance = Levenshtein.distance(self.decode([*candidate.tokens[:n_prefix].tolist(), *suffix]), text)
                if distance > criteria.max_distance:
                    why = f"{distance} characters"
                elif len(set(suffix)) < criteria.min_distinct:
                    failed, why = MONOTONOUS, f"{len(set(suffix))} tokens"
                else:
                    failed = why = ""
            recited.append(Memory(candidate.tokens, candidate.id, candidate.category, float(hits.mean()), distance, text, failed, why))
        return recited

    def _generate(self, tokens: Int[np.ndarray, "batch pos"], known: int) -> list[list[int] | None]:
        """Greedy suffixes, the first ``known`` tokens of which are the true ones; None where the distance has become too large."""
        n_prefix, n_suffix = self.criteria.n_prefix, self.criteria.n_suffix
        result: list[list[int] | None] = [None] * len(tokens)
        texts = [Bound(self.decode, row[:n_prefix].tolist(), row.tolist()) for row in tokens]
        generation = Generation(self.view, torch.from_numpy(tokens[:, : n_prefix + known]))
        rows = list(range(len(tokens)))
        suffixes = {i: tokens[i, n_prefix : n_prefix + known].tolist() for i in rows}
        for step in range(known, n_suffix):
            for i, token in zip(rows, generation.step(), strict=True):
                suffixes[i].append(token)
            if (step + 1) % CHECK_EVERY == 0 and step + 1 < n_suffix:
                keep = [k for k, i in enumerate(rows) if texts[i].least(suffixes[i]) <= self.criteria.max_distance]
                if len(keep) < len(rows):
                    rows = [rows[k] for k in keep]
                    if not rows:
                        return result
                    generation.keep(keep)
        for i in rows:
            result[i] = suffixes[i]
        return result


class Generation:
    """Greedy decoding of a batch of equally long contexts with TransformerLens' key-value cache."""

    def __init__(self, view: NeuronView, context: Int[Tensor, "batch pos"]) -> None:
        self.model, self.view = view.model, view
        self.new = context.to(view.device)
        self.cache = key_value_cache(view.model, view.device, len(context))

    @torch.no_grad()
    def step(self) -> list[int]:
        """The next token of each row."""
        n_layers = self.view.n_layers
        # The mask is given, because TransformerLens would take tokens equal to the pad token for padding.
        mask = torch.ones_like(self.new)
        with self.view.one_gelu_kernel():
            resid: Tensor = self.model(
                self.new, stop_at_layer=n_layers, past_kv_cache=self.cache, attention_mask=mask, padding_side="right"
            )
        self.new = unembed(self.model, resid[:, -1]).argmax(-1)[:, None]
        return self.new[:, 0].tolist()

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows alone."""
        index = torch.tensor(rows, device=self.view.device)
        self.new = self.new[index]
        self.cache.previous_attention_mask = self.cache.previous_attention_mask[index]
        for entry in self.cache.entries:
            entry.past_keys, entry.past_values = entry.past_keys[index], entry.past_values[index]


class Bound:
    """The least distance that a text can still have to the true one, whatever comes after its beginning.

    Whatever follows, the beginning is aligned with some beginning of the truth, so the distance is at least the smallest one to any of
    those: the smallest entry of the row of the dynamic programme, which never falls as the beginning grows.
    """

    def __init__(self, decode: Decode, prefix: list[int], tokens: list[int]) -> None:
        self.decode, self.prefix = decode, prefix
        self.text = settled(decode(prefix))
        truth = decode(tokens)
        # Where the prefix's own text is not the beginning of the whole text, nothing is known: the bound stays 0.
        self.sound = truth.startswith(self.text)
        self.truth = np.array([ord(letter) for letter in truth[len(self.text) :]])
        self.row = np.arange(len(self.truth) + 1)

    def least(self, suffix: list[int]) -> int:
        """Bound for all continuations of prefix + suffix."""
        text = settled(self.decode([*self.prefix, *suffix]))
        self.sound = self.sound and text.startswith(self.text)
        if not self.sound:
            return 0
        for letter in text[len(self.text) :]:
            self.row = next_row(self.row, self.truth != ord(letter))
        self.text = text
        return int(self.row.min())


def settled(text: str) -> str:
    """A text without the replacement characters at its end: they stand for a character whose last bytes are still to come."""
    return text.rstrip("\ufffd")


def next_row(row: Int[np.ndarray, " char"], differs: Bool[np.ndarray, " letter"]) -> Int[np.ndarray, " char"]:
    """The next row of the edit distance: entry j is the distance of one more letter's text to the first j letters of the truth."""
    moved = np.minimum(row + 1, np.concatenate([[row[0] + 1], row[:-1] + differs]))
    steps = np.arange(len(row))
    return np.minimum.accumulate(moved - steps) + steps


# Near-duplicates


def near_duplicates(tokens: Int[np.ndarray, "sequence pos"], max_jaccard: Real = 0.05, ngram: int = 5) -> list[list[int]]:
    """Groups of sequences that are connected by pairs whose n-gram sets have a Jaccard index above the limit.

    An inverted index finds the pairs. Two tricks keep it short and change nothing: of the n-grams of a sequence, in order of rarity, the
    last few can't hold all that a near-duplicate must share, so they are not indexed; and a posting list is kept by group, so that what
    is in the group already is passed over at once.

    Source: Chang et al. (2024), arXiv:2311.09060, details of data collection, after Lee et al. (2022), arXiv:2107.06499.
    Returns: indices of each group, rising; groups in order of their first member.
    """
    grams = ngram_ids(tokens, ngram)
    rarity = np.argsort(np.argsort(np.bincount(grams.ravel()), kind="stable"))  # of each n-gram: the number of rarer ones
    ranked = np.sort(rarity[grams], axis=1)
    distinct = np.diff(ranked, axis=1, prepend=-1) > 0
    sizes = distinct.sum(1)
    spread = np.bincount(ranked[distinct])  # sequences that hold an n-gram; who holds one alone shares it with nobody
    shared = distinct & (spread[ranked] > 1)
    share = max_jaccard / (1 + max_jaccard)
    needed = np.floor(share * (sizes + sizes.min()) - 1e-9) + 1  # n-grams that a near-duplicate of a sequence has in common with it
    indexed = shared & (np.cumsum(distinct, axis=1) <= (sizes - needed + 1)[:, None])
    sets = np.split(ranked[shared], np.cumsum(shared.sum(1))[:-1])
    indices = np.split(ranked[indexed], np.cumsum(indexed.sum(1))[:-1])
    size = sizes.tolist()
    groups = Groups(len(tokens))
    postings: dict[int, int | dict[int, list[int]]] = {}  # n-gram -> its first sequence, or group -> members once there are more
    for i, index in enumerate(indices):
        mine: set[int] | None = None
        tested: set[int] = set()
        own = groups.root(i)
        for gram in index.tolist():
            known = postings.get(gram)
            if known is None:
                postings[gram] = i
                continue
            by_group = postings[gram] = groups.merged({groups.root(known): [known]} if isinstance(known, int) else known)
            for group, members in by_group.items():
                if group == own or groups.root(group) == own:
                    continue
                for j in members:
                    if j not in tested:
                        tested.add(j)
                        mine = mine or set(sets[i].tolist())
                        common = len(mine.intersection(sets[j].tolist()))
                        if common / (size[i] + size[j] - common) > max_jaccard:
                            groups.join(own, j)
                            break
            by_group.setdefault(own, []).append(i)
    return groups.members()


class Groups:
    """Disjoint sets of the numbers below n."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def root(self, i: int) -> int:
        """The number that stands for the group of i."""
        parent = self.parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        self.parent[self.root(j)] = self.root(i)

    def merged(self, by_group: dict[int, list[int]]) -> dict[int, list[int]]:
        """Lists by group, brought up to date where groups have been joined since."""
        if all(self.parent[group] == group for group in by_group):
            return by_group
        result: dict[int, list[int]] = {}
        for group, members in by_group.items():
            short, long = sorted((result.get(self.root(group), []), members), key=len)
            long.extend(short)
            result[self.root(group)] = long
        return result

    def members(self) -> list[list[int]]:
        """All groups, in order of their first member."""
        groups: dict[int, list[int]] = {}
        for i in range(len(self.parent)):
            groups.setdefault(self.root(i), []).append(i)
        return list(groups.values())


def ngram_ids(tokens: Int[np.ndarray, "sequence pos"], ngram: int) -> Int[np.ndarray, "sequence ngram"]:
    """A number for each n-gram, the same for equal ones: exact, by numbering the pairs (shorter n-gram, next token)."""
    width = tokens.shape[1] - ngram + 1
    _, ids = np.unique(tokens, return_inverse=True)
    single = ids.reshape(tokens.shape).astype(np.int64)
    ids, base = single[:, :width], int(single.max()) + 1
    for k in range(1, ngram):
        _, pairs = np.unique(ids * base + single[:, k : k + width], return_inverse=True)
        ids = pairs.reshape(ids.shape).astype(np.int64)
    return ids


# General text


def perplexity_split(
    stream: Iterable[Any],
    collected: Sequence[MemorizedSequence],
    n_sequences: int = 2048,
    length: int = 128,
    *,
    overlap: int = 13,
    seed: int = 0,
) -> Int[Tensor, "sequence pos"]:
    """Random sequences for the perplexity, none of which shares a run of ``overlap`` tokens with a collected sequence.

    Every sequence of the stream has the same chance (reservoir sampling), and memory does not grow with the stream.

    Args:
        stream: as for ``collect_memorized``; of each item the first ``length`` tokens, shorter ones are passed over.
        n_sequences: at most so many.
        overlap: tokens.
        seed: of the draw.
    Returns: [sequence pos] int64 on the CPU: as many as asked for, or all there are.
    Raises:
        ValueError: there are none.

    >>> from tl_localize import load_model
    >>> from tl_localize.collect import perplexity_split
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> collected = reference_sequences(load_model("reference"))[:5]
    >>> perplexity_split(held_out_tokens(), collected, n_sequences=8).shape
    torch.Size([8, 128])
    """
    taken = {run for sequence in collected for run in _runs(sequence.tokens.numpy(), overlap)}
    rng = np.random.default_rng(seed)
    kept: list[np.ndarray] = []
    seen = short = shared = 0
    for item in stream:
        row = (item.tokens if isinstance(item, Candidate) else _vector(item))[:length].astype(np.int64)
        if len(row) < length:
            short += 1
        elif any(run in taken for run in _runs(row, overlap)):
            shared += 1
        else:
            seen += 1
            if len(kept) < n_sequences:
                kept.append(row)
            elif (place := int(rng.integers(seen))) < n_sequences:
                kept[place] = row
    if not kept:
        raise ValueError(
            f"stream must hold general text for the perplexity, got none ({short} sequences are shorter than {length} tokens, {shared} "
            "share text with collected ones). Give longer or more text, or a shorter length."
        )
    return torch.from_numpy(np.stack(kept))


def _runs(row: Integer[np.ndarray, " pos"], length: int) -> Iterator[bytes]:
    row = row.astype(np.int64)
    return (row[start : start + length].tobytes() for start in range(len(row) - length + 1))


def _vector(item: Any) -> Integer[np.ndarray, " pos"]:
    """Token ids of an item that is not a Candidate."""
    tokens = item.detach().cpu().long().numpy() if isinstance(item, Tensor) else np.asarray(item)
    tokens = tokens.astype(np.int64) if tokens.size == 0 else tokens
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"stream must give vectors of token ids, got shape {tokens.shape} of {tokens.dtype}. Cut texts and long rows with text_windows "
            "or token_windows."
        )
    return tokens


def _stack(batch: Sequence[Candidate]) -> Int[np.ndarray, "batch pos"]:
    return np.stack([candidate.tokens for candidate in batch])


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
