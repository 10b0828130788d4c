"""What INJ and DEL share: scores as tasks, of which each localizes one chunk of sequences with one
method, and results on disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from tl_localize.batching import Report
from tl_localize.execution.store import StoredPlan
from tl_localize.execution.tasks import Record, Task
from tl_localize.files import prepare_folder, write_json, write_text
from tl_localize.methods.base import Method, check_scores
from tl_localize.neurons import LanguageModel
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence
from tl_localize.units import NEURONS, Units


def check_names(sequences: Sequence[MemorizedSequence], labels: Iterable[str]) -> None:
    """Raise ValueError unless tables can be written with these ids, categories and labels: file
    names may hold half a character.
    """
    for name in (
        *(name for sequence in sequences for name in (sequence.id, sequence.category)),
        *labels,
    ):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"names must be text that can be written as UTF-8, got {name!r}. Rename it."
            ) from error


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
    version = getattr(method, "version", 0)
    inputs = {
        "model": fingerprint,
        "method": repr(method),
        "version": version,
        "sequences": sequences,
    }
    return Task("scores", inputs, needs, label, weight=getattr(method, "passes", 1.0), **place)


def localized(
    method: Method,
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    report: Report,
    units: Units,
) -> Record:
    """The record of a ``scores_task``. The seconds are those of one sequence, on average.

    A sequence that can't be scored has its reason there; where there are no scores at all, the
    error is raised.
    """
    side_by_side: Any = getattr(method, "map", None)
    started = time.perf_counter()
    found = (
        side_by_side(model, sequences, progress=report)
        if side_by_side
        else map(partial(method, model), sequences)
    )
    texts: list[dict[str, str]] = []
    tensors: dict[str, Tensor] = {}
    failure: ValueError | None = None
    for i in range(len(sequences)):
        try:
            parts, about = check_scores(next(found), model, method, units).packed()
            tensors |= {f"{i}.{name}": tensor for name, tensor in parts.items()}
        except (ValueError, StopIteration) as error:
            # a generator ends with its first error
            if isinstance(error, StopIteration) or (i == len(sequences) - 1 and not tensors):
                raise failure or error from None
            failure, about = error, {"failed": str(error)}
        texts.append(about)
    return Record(
        {"scores": texts, "seconds": (time.perf_counter() - started) / len(sequences)}, tensors
    )


def scores_of(record: Record, index: int, sequence_id: str, units: Units = NEURONS) -> NeuronScores:
    """The scores of one sequence of a chunk; ValueError where it has none."""
    if reason := record.value["scores"][index].get("failed"):
        raise ValueError(reason)
    prefix = f"{index}."
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in record.tensors.items()
        if name.startswith(prefix)
    }
    return NeuronScores.unpacked(
        tensors, record.value["scores"][index] | {"sequence_id": sequence_id}, units
    )


def settings_of(plans: Sequence[StoredPlan]) -> dict[str, Any]:
    """What was measured with which settings, one record per run."""
    of = [(one.plan, one.about["environment"]) for one in plans]
    return {
        "runs": [
            {**plan.settings, **plan.scoped, "methods": plan.methods, "environment": environment}
            for plan, environment in of
        ]
    }


def save_results(
    folder: str | Path, settings: dict[str, Any], frames: dict[str, pd.DataFrame]
) -> None:
    """Write each frame as CSV and ``settings.json``, each whole or not at all; a frame without rows
    has no file.
    """
    path = prepare_folder(folder)
    for name, frame in frames.items():
        if len(frame):
            write_text(path / f"{name}.csv", frame.to_csv(index=False))
        else:
            (path / f"{name}.csv").unlink(missing_ok=True)
    write_json(path / "settings.json", settings)
