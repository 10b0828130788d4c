"""What the benchmarks share: scores as tasks, of which each localizes one chunk of sequences with
one method; what a run has so far; results as text and on disk.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd

from tl_localize.batching import Report
from tl_localize.execution.store import Cache, reason_of
from tl_localize.execution.tasks import Json, Task, described, tasks_of
from tl_localize.files import Saved, prepare_folder, write_json, write_text
from tl_localize.methods import RandomBaseline, RowNorm
from tl_localize.methods.base import Localizer, Method, check_scores, label_methods
from tl_localize.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence
from tl_localize.stats import styled
from tl_localize.units import NEURONS, Units

Results = TypeVar("Results", bound="Measured")


@dataclass(frozen=True, eq=False)
class ScoredChunk(Saved):
    """What one method scored: the scores of each sequence, or the reason why it has none.

    Args:
        seconds: of one sequence, on average.

    >>> chunk = ScoredChunk([NeuronScores(torch.zeros(2, 3))], seconds=0.5)
    >>> chunk.of(0, sequence).sequence_id == sequence.id
    True
    """

    scores: Sequence[NeuronScores | str]
    seconds: float

    def of(self, index: int, sequence: MemorizedSequence, units: Units = NEURONS) -> NeuronScores:
        """The scores of a sequence under the id that it has now; ValueError where it has none."""
        found = self.scores[index]
        if isinstance(found, str):
            raise ValueError(found)
        exact = found.exact and replace(found.exact, units=units)
        return replace(found, sequence_id=sequence.id, units=units, exact=exact)


@dataclass(frozen=True, eq=False, repr=False)
class Measured(ABC):
    """How results are read, shown in one line and in a notebook as their table, and saved."""

    kind: ClassVar[str]  # of the tasks whose records make the frame
    caption: ClassVar[str]
    missing_names: ClassVar[dict[str, str]] = {}  # what ``recorded`` says -> column
    columns: ClassVar[dict[str, str]]  # of the frame, with their types
    frame: pd.DataFrame
    settings: Json = field(default_factory=dict)
    missing: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __post_init__(self) -> None:
        if not len(self.frame):
            object.__setattr__(self, "frame", without_rows(self.columns))

    @classmethod
    def of(cls: type[Results], cache: Cache) -> Results:
        """Everything that the plans of a folder, or of a run in memory, have so far."""
        found, missing = recorded(cache, cls.kind)
        frame = pd.DataFrame([row for _, value in found for row in value["frame"]])
        lacking = pd.DataFrame(missing).rename(columns=cls.missing_names)
        return cls(frame, settings_of(cache), lacking)

    @abstractmethod
    def table(self) -> pd.DataFrame: ...

    @abstractmethod
    def summary(self) -> pd.DataFrame: ...

    def __repr__(self) -> str:
        n_sequences, n_methods = self.frame[["sequence_id", "method"]].nunique()
        return f"{type(self).__name__}({n_sequences} sequences x {n_methods} methods)"

    def _repr_html_(self) -> str:
        return styled(self.table(), f"{self!r}: {self.caption}, mean \u00b1 standard error")

    def save(self, folder: str | Path) -> None:
        """Write each frame, and ``summary()``, as CSV, and ``settings.json``, each whole or not at
        all; a frame without rows has no file.
        """
        path = prepare_folder(folder)
        for name, frame in [*vars(self).items(), ("summary", self.summary())]:
            if isinstance(frame, pd.DataFrame):
                (path / f"{name}.csv").unlink(missing_ok=True)
                if len(frame):
                    write_text(path / f"{name}.csv", frame.to_csv(index=False))
        write_json(path / "settings.json", self.settings)


def with_controls(
    methods: Sequence[Method], units: Units, *controls: Localizer
) -> dict[str, Method]:
    """The methods by label, and after them those controls that are not among them; Random and
    RowNorm unless given.
    """
    labelled = label_methods(methods, units)
    controls = controls or (RandomBaseline(units=units), RowNorm(units=units))
    names = [getattr(method, "name", "") for method in methods]
    return labelled | {one.name: one for one in controls if one.name not in names}


def named(sequences: Sequence[MemorizedSequence]) -> list[MemorizedSequence]:
    """The sequences, each with an id."""
    return [replace(one, id=one.id or f"sequence-{i}") for i, one in enumerate(sequences)]


def grouped(
    sequences: Sequence[MemorizedSequence], size: int, seed: int
) -> list[list[MemorizedSequence]]:
    """Groups of sequences, drawn by the seed, no two of a group beginning with the same token;
    those that are left over, because no group can take them, are in none.
    """
    waiting = [sequences[i] for i in np.random.RandomState(seed).permutation(len(sequences))]
    groups: list[list[MemorizedSequence]] = []
    while True:
        members: dict[int, MemorizedSequence] = {}  # by first token
        for sequence in waiting:
            if len(members) < size:
                members.setdefault(int(sequence.whole.prefix[-1]), sequence)
        if len(members) < size:
            return groups
        groups.append(list(members.values()))
        waiting = [sequence for sequence in waiting if sequence not in members.values()]


def scores_task(
    fingerprint: str,
    label: str,
    method: Method,
    sequences: list[str],
    needs: tuple[Task, ...] = (),
    **place: Any,
) -> Task:
    """The scores of a chunk of sequences (their fingerprints) by one method, in the model as it is,
    or with what ``needs`` injects.

    The chunk is part of the key, because masks that are learned in one batch differ in their last
    digits from masks learned alone.
    """
    inputs = {
        "model": fingerprint,
        "method": described(method),
        "version": getattr(method, "version", 0),
        "sequences": sequences,
    }
    weight = getattr(method, "passes", 1.0) * len(sequences)
    return Task("scores", inputs, needs, label, weight=weight, **place)


def localized(
    method: Method,
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    report: Report,
    units: Units,
) -> ScoredChunk:
    """What a ``scores_task`` computes. Where sequences can't be scored together, each is scored
    alone, and those that have no scores have the reason in their place.
    """
    neurons, started = NeuronView(model, units), time.perf_counter()

    def scored(some: Sequence[MemorizedSequence], progress: Report | None) -> list[NeuronScores]:
        side_by_side: Any = getattr(method, "map", None)
        if isinstance(method, Localizer):
            # whether a text is recited is the benchmark's to know, which may inject it
            found = method.map(model, some, progress=progress, check=False)
        elif side_by_side:
            found = side_by_side(model, some, progress=progress)
        else:
            found = map(partial(method, model), some)
        return [check_scores(one, neurons, method) for one in found]

    scores: list[NeuronScores | str] = []
    try:
        scores += scored(sequences, report)
    except ValueError:
        for sequence in sequences if len(sequences) > 1 else ():
            try:
                scores += scored([sequence], None)
            except ValueError as error:
                scores.append(str(error))
        if all(isinstance(one, str) for one in scores):
            raise
    return ScoredChunk(scores, (time.perf_counter() - started) / len(sequences))


def recorded(cache: Cache, kind: str) -> tuple[list[tuple[Task, Any]], list[Json]]:
    """What the tasks of a kind have given so far, in the order of tables, and what is missing: one
    row for each with ratio, name, method and reason.
    """
    found: list[tuple[Task, Any]] = []
    missing: list[Json] = []
    failures = cache.failures()
    for task in tasks_of([one.plan for one in cache.plans()]):
        if task.kind == kind:
            if record := cache.read(task):
                found.append((task, record.value))
            else:
                row = {"ratio": task.ratio, "name": task.name, "method": task.label}
                missing.append({**row, "reason": reason_of(task, failures)})
    return found, missing


def settings_of(cache: Cache) -> Json:
    """What was measured with which settings, one record per run."""
    runs: list[Json] = []
    for one in cache.plans():
        plan = one.plan
        about = {"methods": plan.methods, "environment": one.environment}
        runs.append({**plan.settings, **plan.scoped, **about})
    return {"runs": runs}


def without_rows(columns: dict[str, str]) -> pd.DataFrame:
    """A frame without rows, of columns with their types."""
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in columns.items()})


def stacked(blocks: dict[str, pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """A table of the blocks of some settings, one below the other; without rows where there are no
    blocks.

    >>> list(stacked({}, ["R@1x"]).columns)
    ['R@1x']
    """
    if blocks:
        return pd.concat(blocks)
    return pd.DataFrame(columns=list(columns), index=pd.MultiIndex.from_arrays([[], []]))


def means_of(frame: pd.DataFrame, keys: list[str], metrics: list[str]) -> pd.DataFrame:
    """Mean, standard error and number of the values of each metric, by the keys."""
    long = frame.melt(keys, metrics, "metric")
    values: Any = long.groupby([*keys, "metric"], sort=False)["value"]
    return values.agg(mean="mean", standard_error="sem", n="size").reset_index()


def count_missing(rows: pd.DataFrame, missing: pd.DataFrame) -> str:
    """Give the rows of a table, one for each method, a column that counts what is missing; the end
    of the table's label, empty where nothing is.
    """
    if not len(missing):
        return ""
    rows["missing"] = [f"{(missing['method'] == method).sum()}" for method in rows.index]
    return f", {len(missing)} measurements MISSING"
