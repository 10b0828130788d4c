"""The memorized sequences of a stream: near-duplicates removed, dev sequences drawn, saved and
loaded.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from tl_localize.checks import check_count, check_seed
from tl_localize.collect.criteria import NEAR, Criteria, Report
from tl_localize.collect.duplicates import near_duplicates
from tl_localize.collect.filter import Row
from tl_localize.files import prepare_folder, refuse_unreadable, write_json, write_text
from tl_localize.sequences import MemorizedSequence
from tl_localize.texts.readers import COLLECTED

COLUMNS = ["id", "category", "split", "accuracy", "distance", "prefix", "suffix"]


@dataclass(frozen=True, eq=False)
class Collection:
    """Memorized sequences, the dev ones first.

    Args:
        frame: one row per sequence, in the same order: id, category, split ("dev" or "test"),
            accuracy (teacher-forced, fraction), distance (of the greedy continuation, characters),
            prefix and suffix (text).
        settings: what else the choice depends on: seed, n_max, versions, which weights.

    >>> from tl_localize.collect import Criteria, collect_memorized
    >>> windows = [sequence.tokens for sequence in few]
    >>> collection = collect_memorized(model, windows, Criteria(n_suffix=16), n_dev=1)
    >>> collection.save(folder)
    >>> Collection.load(folder).frame["split"].tolist()
    ['dev', 'test']
    """

    sequences: list[MemorizedSequence]
    n_dev: int
    frame: pd.DataFrame
    report: Report
    criteria: Criteria
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        found = f"{len(self.sequences)} of {self.report.n_in} sequences memorized"
        return f"Collection({found}, {self.n_dev} for development)"

    @classmethod
    def of(cls, rows: list[Row], criteria: Criteria, **about: Any) -> "Collection":
        """From the columns of the frame and the tokens, a row for each sequence."""
        sequences = [
            MemorizedSequence(
                torch.tensor(row["tokens"]),
                criteria.n_prefix + bool(row["bos"]),
                row["id"],
                row["category"],
                (row["prefix"], row["suffix"]),
                row["bos"],
            )
            for row in rows
        ]
        n_dev = sum(row["split"] == "dev" for row in rows)
        return cls(sequences, n_dev, pd.DataFrame(rows)[COLUMNS], criteria=criteria, **about)

    def save(self, folder: str | Path) -> None:
        """Write sequences.jsonl, report.csv and collection.json, each whole or not at all.

        A line of sequences.jsonl has the columns of the frame, the keys of the authors' manual sets
        (prompt, all, prompt_len, category), the tokens themselves and, as bos, the
        beginning-of-text token that they start with, which prompt_len does not count.
        """
        path = prepare_folder(folder)
        lines = ""
        for sequence, row in zip(self.sequences, self.frame.to_dict("records"), strict=True):
            row["prompt"] = row["prefix"]
            row["all"] = row["prefix"] + row["suffix"]
            row["category"] = [row["category"]]
            row["prompt_len"] = sequence.n_prefix - bool(sequence.bos)
            row["bos"] = sequence.bos
            row["tokens"] = sequence.tokens.tolist()
            lines += json.dumps(row, ensure_ascii=False) + "\n"
        write_text(path / COLLECTED, lines)
        write_text(path / "report.csv", self.report.table().to_csv())
        record = {
            "criteria": asdict(self.criteria),
            "report": vars(self.report),
            "settings": self.settings,
        }
        write_json(path / "collection.json", record)

    @classmethod
    def load(cls, folder: str | Path) -> "Collection":
        """What ``save`` wrote.

        Raises:
            FileNotFoundError; ValueError: a file is not what ``save`` wrote.
        """
        path = Path(folder)
        for name in (COLLECTED, "collection.json"):
            if not (path / name).is_file():
                raise FileNotFoundError(
                    f"folder must hold a collection, got {str(folder)!r} without a {name}. Run "
                    "tl-localize collect."
                )
        with refuse_unreadable(
            "collection must be what tl-localize collect wrote", path, "Collect again."
        ):
            record = json.loads((path / "collection.json").read_text(encoding="utf-8"))
            lines = (path / COLLECTED).read_bytes().splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
            for row in rows:
                (row["category"],) = row["category"]
            criteria = Criteria(**record.pop("criteria"))
            report = Report(**record.pop("report"))
            return cls.of(rows, criteria, report=report, **record)


def check_draw(n_dev: int, n_max: int | None, seed: int = 0) -> None:
    """Raise ValueError unless the draw leaves sequences for the test, and its seed is one."""
    check_seed(seed, bits=32)
    check_count(0, n_dev=n_dev)
    if n_max is not None:
        check_count(n_max=n_max)
    if n_max is not None and n_max <= n_dev:
        raise ValueError(
            f"n_dev must be below n_max={n_max}, got {n_dev}. Keep fewer for choosing settings."
        )


def without_copies(found: list[Row], criteria: Criteria, report: Report) -> list[Row]:
    """Of near-duplicates the one that is recited best; the others are removed."""
    tokens = np.array([row["tokens"][int(bool(row["bos"])) :] for row in found])
    kept: list[Row] = []
    for indices in near_duplicates(tokens, criteria.max_jaccard, criteria.ngram):
        members = [found[i] for i in indices]
        kept.append(min(members, key=lambda row: (row["distance"], -row["accuracy"])))
    report.removed[NEAR] = len(found) - len(kept)
    return kept
