"""What the benchmarks share: methods by label, groups of sequences, scores as steps, and results
that are shown and saved.
"""

import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd

from tl_localize.execution.store import Json, Row, Steps, describe, ends_the_run
from tl_localize.files import Saved, prepare_folder, write_json, write_text
from tl_localize.methods import RandomBaseline, RowNorm
from tl_localize.methods.base import Localizer, Method, check_scores, label_methods
from tl_localize.methods.general_text import WithGeneralText
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence, share_text
from tl_localize.stats import html_table
from tl_localize.units import NEURONS, Units

LOG = logging.getLogger(__name__)
Results = TypeVar("Results", bound="Measured")


# Methods and sequences


def with_controls(
    methods: Sequence[Method], units: Units, *controls: Localizer, first_layer: int = 0
) -> dict[str, Method]:
    """The methods by label, and after them those controls that are not among them; Random and
    RowNorm unless given.

    Args:
        first_layer: of the benchmark; methods that leave it open choose from there on.

    Raises:
        ValueError: a method has another first layer, or a function the name of a control.
    """
    labelled = {
        label: at_first_layer(label, method, first_layer)
        for label, method in label_methods(methods, units).items()
    }
    controls = controls or (RandomBaseline(units=units), RowNorm(units=units))
    names = [getattr(method, "name", "") for method in methods]
    missing = {control.name: control for control in controls if control.name not in names}
    for name in missing:
        if name in labelled:
            raise ValueError(
                f"methods must not have the name of a control, got a function {name!r}. Call it "
                "otherwise."
            )
    return labelled | missing


def check_texts(methods: Mapping[str, Method], measured: Sequence[MemorizedSequence]) -> None:
    """Raise ValueError where a method is given a text that others are measured by: it would spare
    what it has seen.
    """
    for label, method in methods.items():
        for text in method.given if isinstance(method, WithGeneralText) else ():
            if any(share_text(text, sequence) for sequence in measured):
                raise ValueError(
                    f"texts of {label!r} must share no 13 tokens with a text of the benchmark, got "
                    f"{text.id}. Leave it out, or the text of the benchmark."
                )


def at_first_layer(label: str, method: Method, first_layer: int) -> Method:
    """The method as it chooses from this layer on; ValueError where it has another one."""
    start = getattr(method, "first_layer", first_layer)
    if start is None:  # the method leaves it open
        fields: Any = method
        return replace(fields, first_layer=first_layer)
    if start != first_layer:
        raise ValueError(
            f"first_layer of {label!r} must be {first_layer}, as in the benchmark, got {start}. "
            "Give both the same."
        )
    return method


def describe_methods(methods: Mapping[str, Method], n_parts: int) -> dict[str, tuple[Any, int]]:
    """What a run is asked for: label -> the method with its version, and how many parts."""
    found: dict[str, tuple[Any, int]] = {}
    for label, method in methods.items():
        what = describe(method)
        if isinstance(what, dict) and "only here" not in what:
            what["version"] = getattr(method, "version", 0)
        found[label] = (what, n_parts)
    return found


@dataclass(frozen=True, eq=False)
class Group:
    """Sentences that are in one model together, of which each is the target in its turn.

    Args:
        seed: of what is drawn for this group.
    """

    name: str
    seed: int
    sequences: Sequence[MemorizedSequence]

    def __repr__(self) -> str:
        return self.name


def draw_groups(
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


# Scores


@dataclass(frozen=True, eq=False)
class Scored(Saved):
    """The scores of one sequence, and what they cost.

    Args:
        seconds: of this sequence; of several that were scored together, the mean.

    >>> Scored(NeuronScores(torch.zeros(2, 3)), seconds=0.5).seconds
    0.5
    """

    scores: NeuronScores
    seconds: float


def score(
    method: Method,
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    steps: Steps,
    *,
    made_of: Json,
    units: Units,
) -> list[Scored | Exception]:
    """The scores of some sequences by one method, or the reason why a sequence has none. Those that
    are missing are computed side by side, and each is remembered by itself.

    A mask that is learned beside others agrees with one that is learned alone to the tolerance of
    float32, not to the bit.

    Args:
        made_of: what the model computes with: its fingerprint, and what is injected into it.
    """
    about = {"step": "scores", **made_of, "method": describe(method)}
    about["version"] = getattr(method, "version", 0)
    inputs = [{**about, "sequence": sequence.fingerprint} for sequence in sequences]

    def compute(missing: list[int]) -> Iterable[Scored | Exception]:
        # without their units, which may be large and are known here
        found = score_now(method, model, [sequences[i] for i in missing], steps, units)
        return (with_units(result, NEURONS) for result in found)

    found: list[Scored | Exception] = []
    for result, sequence in zip(steps.get_many(inputs, compute), sequences, strict=True):
        if isinstance(result, Scored):  # under the id that the sequence has now
            result = with_units(result, units)
            result = replace(result, scores=replace(result.scores, sequence_id=sequence.id))
        found.append(result)
    return found


def with_units(result: Scored | Exception, units: Units) -> Any:
    """Scores as those of other units; an error as it is."""
    if isinstance(result, Exception):
        return result
    exact = result.scores.exact and replace(result.scores.exact, units=units)
    return replace(result, scores=replace(result.scores, units=units, exact=exact))


def score_now(
    method: Method,
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    steps: Steps,
    units: Units,
) -> Iterator[Scored | Exception]:
    """``score`` without a look at what is remembered. Scores are given as soon as their batch is
    done; each sequence is scored alone where the method gains nothing from several, or can't take
    them.
    """
    neurons = NeuronView(model, units)
    name = getattr(method, "name", type(method).__name__)
    n_given = 0
    if len(sequences) > 1 and takes_several(method):
        what = f"{name} on {sequences[0].id} and {len(sequences) - 1} others"
        started = time.perf_counter()
        try:
            for batch in scores_by(method, neurons, sequences, reporter(steps, what)):
                seconds = (time.perf_counter() - started) / len(batch)
                yield from (Scored(scores, seconds) for scores in batch)
                n_given += len(batch)
                started = time.perf_counter()
        except Exception as error:
            if ends_the_run(error):
                raise
            LOG.warning("%s: each is scored alone after %s", what, type(error).__name__)
    for sequence in sequences[n_given:]:
        started = time.perf_counter()
        report = reporter(steps, f"{name} on {sequence.id}")
        result = score_alone(method, neurons, sequence, report)
        seconds = time.perf_counter() - started
        yield Scored(result, seconds) if isinstance(result, NeuronScores) else result


def takes_several(method: Method) -> bool:
    """Whether a method is faster on several sequences than on one after the other."""
    if not isinstance(method, Localizer):
        return hasattr(method, "map")
    return method.takes_several


def score_alone(
    method: Method, neurons: NeuronView, sequence: MemorizedSequence, report: Callable[..., None]
) -> NeuronScores | Exception:
    """The scores of one sequence, or the reason why it has none."""
    try:
        ((scores,),) = scores_by(method, neurons, [sequence], report)
        return scores
    except Exception as error:
        if ends_the_run(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they may hold what filled the memory
        return error


def scores_by(
    method: Method,
    neurons: NeuronView,
    sequences: Sequence[MemorizedSequence],
    progress: Callable[..., None],
) -> Iterator[list[NeuronScores]]:
    """What a method gives, batch by batch where it takes several sequences together."""
    model = neurons.model
    if isinstance(method, Localizer):
        # whether a text is recited is the benchmark's to know, which may inject it
        yield from method.map_batches(model, sequences, progress=progress)
        return
    several: Any = method
    if hasattr(method, "map"):
        found = several.map(model, sequences, progress=progress)
    else:
        found = map(partial(method, model), sequences)
    for scores in found:
        yield [check_scores(scores, neurons, method)]


def reporter(steps: Steps, what: str) -> Callable[..., None]:
    """What is called with the fraction of a step that is done, and with what was just done."""

    def tell(fraction: float, text: str = "") -> None:
        steps.report(fraction, f"{what}: {text}" if text else what)

    return tell


def scores_of(scored: Scored | Exception) -> Scored:
    """The scores; the reason is raised where there are none."""
    if isinstance(scored, Exception):
        raise scored
    return scored


# Results


@dataclass(frozen=True, eq=False, repr=False)
class Measured(ABC):
    """How results are read, shown in one line and in a notebook as their table, and saved.

    Args:
        frame: one row per measurement.
        settings: what it was measured with.
        missing: what a run was asked for and has not got, one row per cell: method, part, scope,
            reason.
    """

    caption: ClassVar[str]
    columns: ClassVar[dict[str, str]]  # of the frame, with their types
    frame: pd.DataFrame
    settings: Json = field(default_factory=dict)
    missing: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __post_init__(self) -> None:
        if not len(self.frame):
            object.__setattr__(self, "frame", without_rows(self.columns))

    @classmethod
    def of(cls: type[Results], steps: Steps) -> Results:
        """Everything that the runs of a folder, or of memory, have so far."""
        return cls(pd.DataFrame(list(rows_of(steps))), settings_of(steps), missing_of(steps))

    @abstractmethod
    def table(self) -> pd.DataFrame: ...

    @abstractmethod
    def summary(self) -> pd.DataFrame: ...

    def __repr__(self) -> str:
        n_sequences, n_methods = self.frame[["sequence_id", "method"]].nunique()
        return f"{type(self).__name__}({n_sequences} sequences x {n_methods} methods)"

    def _check_one_model(self) -> None:
        """Raise ValueError where rows of several models would have one mean."""
        models = self.frame["model"].unique().tolist() if "model" in self.frame else []
        if len(models) > 1:
            raise ValueError(
                f"frame must be of one model where means are taken, got {models}. Make results of "
                'the rows of each: frame[frame["model"] == name].'
            )

    def _repr_html_(self) -> str:
        return html_table(self.table(), f"{self!r}: {self.caption}, mean \u00b1 standard error")

    def save(self, folder: str | Path) -> None:
        """Write each frame, and ``summary()``, as CSV, and ``measured_with.json``, each whole or
        not at all; a frame without rows has no file.
        """
        path = prepare_folder(folder)
        for name, frame in [*vars(self).items(), ("summary", self.summary())]:
            if isinstance(frame, pd.DataFrame):
                if len(frame):
                    write_text(path / f"{name}.csv", frame.to_csv(index=False))
                else:
                    (path / f"{name}.csv").unlink(missing_ok=True)
        write_json(path / "measured_with.json", self.settings)


def rows_of(steps: Steps) -> Iterator[Row]:
    """The rows of all cells, in the order of tables."""
    for rows in steps.done().values():
        yield from rows


NOT_DONE = "not done yet"


def missing_of(steps: Steps) -> pd.DataFrame:
    """The cells that were asked for and are not done, each with the reason."""
    cells = steps.settings.cells() if steps.settings else []
    done, failures = steps.done(), steps.failures()
    rows = [
        {**vars(cell), "reason": failures.get(cell, NOT_DONE)} for cell in cells if cell not in done
    ]
    return pd.DataFrame(rows, columns=["method", "part", "scope", "reason"])


def settings_of(steps: Steps) -> Json:
    """What was measured with which settings, as JSON takes it."""
    if steps.settings is None:
        return {}
    settings = steps.settings
    scopes: Json = {}
    for name, scope in settings.scopes.items():
        methods = {label: what for label, (what, _) in scope.methods.items()}
        scopes[name] = {**scope.settings, "methods": methods}
    return {
        "benchmark": settings.benchmark,
        **settings.settings,
        "scopes": scopes,
        "environments": list(settings.environments),
        "commands": list(settings.commands),
    }


def without_rows(columns: dict[str, str]) -> pd.DataFrame:
    """A frame without rows, of columns with their types."""
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in columns.items()})


def stack_blocks(blocks: dict[str, pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """A table of the blocks of some settings, one below the other; without rows where there are no
    blocks.

    >>> list(stack_blocks({}, ["R@1x"]).columns)
    ['R@1x']
    """
    if blocks:
        return pd.concat(blocks)
    return pd.DataFrame(columns=list(columns), index=pd.MultiIndex.from_arrays([[], []]))


def means_of(frame: pd.DataFrame, keys: list[str], metrics: list[str]) -> pd.DataFrame:
    """Mean, standard error and number of the values of each metric, by the keys."""
    long = frame.melt(keys, metrics, "metric")
    values: Any = long.groupby([*keys, "metric"], sort=False)["value"]
    return values.agg(mean="mean", standard_error="sem", n="count").reset_index()


def count_missing(rows: pd.DataFrame, missing: pd.DataFrame) -> str:
    """Give the rows of a table, one for each method, a column that counts what is missing; the end
    of the table's label, empty where nothing is.
    """
    if not len(missing):
        return ""
    rows["missing"] = [f"{(missing['method'] == method).sum()}" for method in rows.index]
    return f", {len(missing)} measurements MISSING"
