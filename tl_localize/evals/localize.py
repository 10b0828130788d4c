"""What INJ and DEL share: scores as tasks, of which each localizes one chunk of sequences with one
method, and results on disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from torch import Tensor

from tl_localize.batching import Report
from tl_localize.execution.store import StoredPlan
from tl_localize.execution.tasks import Task, described
from tl_localize.files import Saved, prepare_folder, write_json, write_text
from tl_localize.methods.base import Method, check_scores
from tl_localize.neurons import LanguageModel
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence
from tl_localize.units import NEURONS, Units


@dataclass(frozen=True, eq=False)
class ScoredChunk(Saved):
    """What one method scored: the scores of each sequence, or the reason why it has none.

    Args:
        seconds: of one sequence, on average.

    >>> chunk = ScoredChunk([NeuronScores(torch.zeros(2, 3))], seconds=0.5)
    >>> chunk.of(0, sequence).sequence_id == sequence.id
    True
    """

    required: ClassVar[tuple[str, ...]] = ()
    scores: list[NeuronScores | str]
    seconds: float

    def of(self, index: int, sequence: MemorizedSequence, units: Units = NEURONS) -> NeuronScores:
        """The scores of a sequence under the id that it has now; ValueError where it has none."""
        found = self.scores[index]
        if isinstance(found, str):
            raise ValueError(found)
        exact = found.exact and replace(found.exact, units=units)
        return replace(found, sequence_id=sequence.id, units=units, exact=exact)

    def packed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors: dict[str, Tensor] = {}
        texts: list[dict[str, str] | str] = []
        for i, scores in enumerate(self.scores):
            if isinstance(scores, str):
                texts.append(scores)
                continue
            parts, about = scores.packed()
            about.pop("units", None)  # who reads them knows, also units of a user's own
            texts.append(about)
            tensors |= {f"{i}.{name}": tensor for name, tensor in parts.items()}
        return tensors, {"scores": json.dumps(texts), "seconds": json.dumps(self.seconds)}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> ScoredChunk:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, _, part = name.partition(".")
            parts.setdefault(index, {})[part] = tensor
        scores = [
            about if isinstance(about, str) else NeuronScores.unpacked(parts[str(i)], about)
            for i, about in enumerate(json.loads(metadata["scores"]))
        ]
        return cls(scores, json.loads(metadata["seconds"]))


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
    inputs = {
        "model": fingerprint,
        "method": described(method),
        "version": getattr(method, "version", 0),
        "sequences": sequences,
    }
    return Task("scores", inputs, needs, label, weight=getattr(method, "passes", 1.0), **place)


def localized(
    method: Method,
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    report: Report,
    units: Units,
) -> ScoredChunk:
    """What a ``scores_task`` computes.

    A sequence that can't be scored has its reason there; where there are no scores at all, the
    error is raised.
    """
    side_by_side: Any = getattr(method, "map", None)
    started = time.perf_counter()
    if side_by_side:
        found = side_by_side(model, sequences, progress=report)
    else:
        found = map(partial(method, model), sequences)
    scores: list[NeuronScores | str] = []
    failure: ValueError | None = None
    for _ in sequences:
        try:
            scores.append(check_scores(next(found), model, method, units))
        except ValueError as error:
            failure = error
            scores.append(str(error))
        except StopIteration:  # a generator ends with its first error
            break
    if failure and (len(scores) < len(sequences) or all(isinstance(one, str) for one in scores)):
        raise failure
    return ScoredChunk(scores, (time.perf_counter() - started) / len(sequences))


def settings_of(plans: Sequence[StoredPlan]) -> dict[str, Any]:
    """What was measured with which settings, one record per run."""
    return {
        "runs": [
            {
                **one.plan.settings,
                **one.plan.scoped,
                "methods": one.plan.methods,
                "environment": one.environment,
            }
            for one in plans
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
