"""The memorized sequences of a stream: near-duplicates removed, dev sequences drawn, saved and
loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from tl_localize.collect.criteria import CRITERIA, LOOSEN, NEAR, SURPLUS, Criteria, Report
from tl_localize.collect.duplicates import near_duplicates
from tl_localize.collect.filter import Filter, FilteredChunk, Recitation, merged
from tl_localize.execution.environment import environment
from tl_localize.files import prepare_folder, reading, write_json, write_text
from tl_localize.metrics import Decode
from tl_localize.neurons import LanguageModel, check_seed
from tl_localize.sequences import MemorizedSequence

COLUMNS = ["id", "category", "split", "accuracy", "distance", "prefix", "suffix"]


@dataclass(frozen=True, eq=False)
class Collection:
    """Memorized sequences, the dev ones first.

    Args:
        frame: one row per sequence, in the same order: id, category, split ("dev" or "test"),
            accuracy (teacher-forced, fraction), distance (of the greedy continuation, characters),
            prefix and suffix (text).
        groups: id of each kept sequence -> ids of the near-duplicates that it stands for.
        settings: what else the choice depends on: seed, n_max, versions, which weights.

    >>> collection = collect_memorized(model, [one.tokens for one in few], n_dev=1)
    >>> collection.save(folder)
    >>> Collection.load(folder).frame["split"].tolist()
    ['dev', 'test', 'test']
    """

    sequences: list[MemorizedSequence]
    n_dev: int
    frame: pd.DataFrame
    report: Report
    criteria: Criteria
    groups: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        found = f"{len(self.sequences)} of {self.report.n_in} sequences memorized"
        return f"Collection({found}, {self.n_dev} for development)"

    def labelled(self, labels: Mapping[str, tuple[str, str]]) -> Collection:
        """The same with other ids and categories: old id -> (new id, category), for as many as one
        likes.
        """
        new = {one.id: labels.get(one.id, (one.id, one.category)) for one in self.sequences}
        ids, categories = zip(*new.values(), strict=True)
        return replace(
            self,
            sequences=[
                replace(one, id=new[one.id][0], category=new[one.id][1]) for one in self.sequences
            ],
            frame=self.frame.assign(id=ids, category=categories),
            groups={new[name][0]: members for name, members in self.groups.items()},
        )

    def save(self, folder: str | Path) -> None:
        """Write sequences.jsonl, report.csv and settings.json, each whole or not at all.

        A line of sequences.jsonl has the keys of the authors' manual sets (prompt, all, prompt_len,
        category) and the tokens themselves. settings.json seals these lines with their sha256.
        """
        path = prepare_folder(folder)
        lines = ""
        for sequence, row in zip(self.sequences, self.frame.to_dict("records"), strict=True):
            record = {name: row[name] for name in ("id", "split", "accuracy", "distance")}
            record |= {
                "category": [sequence.category] if sequence.category else [],
                "prompt": row["prefix"],
            }
            record |= {
                "all": row["prefix"] + row["suffix"],
                "prompt_len": sequence.n_prefix,
                "tokens": sequence.tokens.tolist(),
            }
            lines += json.dumps(record, ensure_ascii=False) + "\n"
        write_text(path / "sequences.jsonl", lines)
        write_text(path / "report.csv", self.report.table().to_csv())
        record = {
            "sha256": _seal(path),
            "criteria": asdict(self.criteria),
            "report": vars(self.report),
            "groups": self.groups,
        }
        write_json(path / "settings.json", record | self.settings)

    @classmethod
    def load(cls, folder: str | Path) -> Collection:
        """What ``save`` wrote; the dev sequences, by their ``split``, come first.

        Raises:
            FileNotFoundError; ValueError: a file is not what ``save`` wrote, such as one whose
                lines were cut or sorted.
        """
        path = Path(folder)
        for name in ("sequences.jsonl", "settings.json"):
            if not (path / name).is_file():
                raise FileNotFoundError(
                    f"folder must hold a collection, got {str(folder)!r} without a {name}. Run "
                    "tl-localize collect."
                )
        with reading("collection must be what tl-localize collect wrote", path, "Collect again."):
            settings = json.loads((path / "settings.json").read_text(encoding="utf-8"))
            if settings.pop("sha256", "") != _seal(path):
                raise ValueError(
                    "other lines than were written (cut, sorted or changed) in sequences.jsonl"
                )
            rows: Any = [
                json.loads(line) for line in (path / "sequences.jsonl").read_bytes().splitlines()
            ]
            rows.sort(key=lambda row: row["split"] != "dev")
            for row in rows:
                row["category"] = next(iter(row["category"]), "")
                row["prefix"], row["suffix"] = row["prompt"], row["all"][len(row["prompt"]) :]
            sequences = [_loaded(row) for row in rows]
            n_dev = sum(row["split"] == "dev" for row in rows)
            report, criteria = (
                Report(**settings.pop("report")),
                Criteria(**settings.pop("criteria")),
            )
            about = report, criteria, settings.pop("groups"), settings
            return cls(sequences, n_dev, pd.DataFrame(rows)[COLUMNS], *about)


def _loaded(row: dict[str, Any]) -> MemorizedSequence:
    text = row["prefix"], row["suffix"]
    about = row["prompt_len"], row["id"], row["category"], text
    return MemorizedSequence(torch.tensor(row["tokens"]), *about)


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
) -> Collection:
    """The sequences of a stream that the model has memorized, near-duplicates removed, dev
    sequences first.

    Args:
        stream: Candidates (``token_windows``, ``text_windows``) or plain
            vectors of token ids; of a longer one the first 32 + 48 tokens are taken. Read once.
        n_dev: how many of the found ones are drawn for the choice of hyperparameters.
        n_max: draw at most so many, dev ones included (the authors keep 505).
        decode: token ids -> text; the model's tokenizer unless given.
        batch_size: sequences in a forward pass; by default as many as fit.

    Raises:
        ValueError: a token that the model does not know, or too few sequences left (with the
            criterion that removed the last ones).

    >>> print(collect_memorized(model, [*text, *(one.tokens for one in few)], n_dev=1).report)
    4 came in, 1 removed: accuracy, 3 left
    """
    check_draw(n_dev, n_max, seed)
    filter = Filter(model, criteria or Criteria(), decode, batch_size)
    return assemble(filter, [filter.filter(stream)], n_dev=n_dev, n_max=n_max, seed=seed)


def check_draw(n_dev: int, n_max: int | None, seed: int = 0) -> None:
    """Raise ValueError unless the draw leaves sequences for the test, and its seed is one."""
    check_seed(seed, bits=32)
    if n_dev < 0 or (n_max is not None and n_max <= n_dev):
        raise ValueError(f"n_dev must be at least 0 and below n_max={n_max}, got {n_dev}.")


def assemble(
    filter: Filter,
    chunks: Iterable[FilteredChunk],
    *,
    n_dev: int = 5,
    n_max: int | None = None,
    seed: int = 0,
) -> Collection:
    """The collection from the filtered parts of a stream, in order; arguments and errors as of
    ``collect_memorized``.
    """
    check_draw(n_dev, n_max, seed)
    report, found = merged(chunks)
    _check_found(report, found)
    groups = _grouped(found, filter.criteria, report)
    if len(groups) <= n_dev:
        raise ValueError(
            f"n_dev must leave at least one of the {len(groups)} memorized sequences for the test, "
            f"got {n_dev} ({report}). Give more text, loosen a criterion, or use a smaller dev set."
        )
    order = np.random.default_rng(seed).permutation(len(groups)).tolist()
    drawn = order[:n_dev] + sorted(order[n_dev:n_max])
    for i in order[len(drawn) :]:
        one = groups[i][0]
        report.remove(SURPLUS, one.id, f"more than {n_max} were found", one.text)
    chosen = [groups[i][0] for i in drawn]
    sequences = [_sequence(filter, one) for one in chosen]
    frame = pd.DataFrame([vars(one) for one in chosen])
    frame["split"] = ["dev" if i < n_dev else "test" for i in range(len(chosen))]
    frame["prefix"] = [one.text[0] for one in sequences]
    frame["suffix"] = [one.text[1] for one in sequences]
    copies = {groups[i][0].id: [one.id for one in groups[i][1:]] for i in drawn if groups[i][1:]}
    settings = {"seed": seed, "n_max": n_max, "environment": environment(filter.model)}
    return Collection(sequences, n_dev, frame[COLUMNS], report, filter.criteria, copies, settings)


def _check_found(report: Report, found: list[Recitation]) -> None:
    """Raise ValueError where nothing came in, or nothing is memorized."""
    if not report.n_in:
        raise ValueError("stream must hold at least one sequence, got none. Check the data file.")
    if not found:
        last = [criterion for criterion in CRITERIA if report.removed[criterion]][-1]
        raise ValueError(
            f"stream must hold a memorized sequence, got none: {report}. DEL has nothing to ablate "
            f"here. The last ones failed by {last!r}. {LOOSEN[last]}"
        )


def _grouped(found: list[Recitation], criteria: Criteria, report: Report) -> list[list[Recitation]]:
    """Groups of near-duplicates, the one that is recited best first; the others are removed."""
    tokens = np.stack([one.tokens for one in found])
    groups: list[list[Recitation]] = []
    for indices in near_duplicates(tokens, criteria.max_jaccard, criteria.ngram):
        members = [found[i] for i in indices]
        best = min(members, key=lambda one: (one.distance, -one.accuracy))
        others = [one for one in members if one is not best]
        for one in others:
            report.remove(NEAR, one.id, f"of {best.id}", one.text)
        groups.append([best, *others])
    return groups


def _sequence(filter: Filter, one: Recitation) -> MemorizedSequence:
    n_prefix = filter.criteria.n_prefix
    prefix, suffix = (filter.decode(part.tolist()) for part in np.split(one.tokens, [n_prefix]))
    if one.text.startswith(prefix):  # no character is cut by the boundary
        suffix = one.text[len(prefix) :]
    tokens = torch.from_numpy(one.tokens)
    return MemorizedSequence(tokens, n_prefix, one.id, one.category, (prefix, suffix))


def _seal(folder: Path) -> str:
    return hashlib.sha256((folder / "sequences.jsonl").read_bytes()).hexdigest()
