"""Hyperparameter search on dev sequences: every setting of a grid through a benchmark, ranked by
one stated rule.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.execution.tasks import Plan
from tl_localize.files import nearest, reading, write_json
from tl_localize.methods import METHODS, Localizer
from tl_localize.neurons import Real
from tl_localize.units import AttentionHeads, MLPNeurons

Grid = Mapping[str, Sequence[Any]]


def expand(method: str, grid: Grid) -> list[Localizer]:
    """One method per combination of the grid's values, in the order in which they are written.

    Raises:
        ValueError: an unknown method or setting (the nearest names are offered), or an axis without
            values.

    >>> [(method.steps, method.learning_rate) for method in expand("slimming", {"steps": [60, 200], "learning_rate": [0.01, 0.1]})]
    [(60, 0.01), (60, 0.1), (200, 0.01), (200, 0.1)]
    """
    if method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, got {method!r}.{nearest(method, METHODS)}"
        )
    # no setting of a method, but what it scores
    known = [f.name for f in dataclasses.fields(METHODS[method]) if f.name != "units"]
    for name, values in grid.items():
        if name not in known:
            raise ValueError(
                f"grid must name settings of {method} ({', '.join(known)}), got "
                f"{name!r}.{nearest(name, known)}"
            )
        if not values or not isinstance(values, (list, tuple)):
            raise ValueError(f"grid must hold a list of values for {name}, got {values!r}.")
    try:
        return [
            METHODS[method](**dict(zip(grid, values, strict=True)))
            for values in itertools.product(*grid.values())
        ]
    except TypeError as error:
        raise ValueError(
            f"grid must hold values that {method} takes, got {dict(grid)} ({error})."
        ) from error


def method_of(given: dict[str, Any]) -> Localizer:
    """The method that has this identity: what a plan says of it; ValueError where it is none of
    ours.
    """
    kinds = {kind.__name__: kind for kind in METHODS.values()}
    units = {kind.__name__: kind for kind in (MLPNeurons, AttentionHeads)}
    try:
        settings = {name: value for name, value in given.items() if name != "class"}
        if "units" in settings:
            settings["units"] = units[settings["units"]["class"]]()
        return kinds[given["class"]](**settings)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"method must be one of ours, got {given!r}.") from error


def read_grids(path: str | Path) -> dict[str, Grid]:
    """Grids by method name from a JSON file: {"hard_concrete": {"learning_rate": [0.01, 0.001],
    ...}, ...}.
    """
    return _read(path, 'grid must be a JSON file such as {"slimming": {"steps": [60, 200]}}')


def _read(path: str | Path, rule: str, part: str | None = None) -> dict[str, Any]:
    """Objects by name: a JSON file, or a part of it."""
    text = Path(path).read_bytes()
    with reading(rule, Path(path), "Correct the file, or make it again."):
        found = json.loads(text) if part is None else json.loads(text)[part]
        if not all(isinstance(values, dict) for values in found.values()):
            raise TypeError(f"{found!r} does not hold objects by name")
        return found


def rank_inj(results: InjResults, candidates: Sequence[Localizer]) -> pd.DataFrame:
    """Settings by mean recall over the dev sentences and all multiples, the best first; ties go to
    the earlier setting.

    Injections that did not converge are left out, as in the tables.

    Returns:
        one row per setting: method, settings, R@..x for each multiple, score (mean recall), seconds
        per sentence.

    Raises:
        ValueError: no injection converged.

    >>> benchmark = InjBenchmark(model=model, sequences=few[:1], ratio=0.02)
    >>> candidates = expand("slimming", {"steps": [2, 20]})
    >>> ranking = rank_inj(benchmark.run(candidates), candidates)
    >>> [settings["steps"] for settings in ranking["settings"]]
    [20, 2]
    """
    frame = results.frame[results.frame["converged"]]
    if not len(frame):
        raise ValueError(
            "results must hold an injection that converged, got none. Inject with another ratio, "
            "learning_rate or max_steps."
        )
    methods = frame.groupby("method")
    recalls = (
        frame.groupby(["method", "multiple"])["recall"]
        .mean()
        .unstack()
        .rename(columns="R@{:g}x".format)
    )
    return _ranked(
        recalls.assign(score=recalls.mean(axis=1), seconds=methods["seconds"].mean()), candidates
    )


def rank_del(results: DelResults, candidates: Sequence[Localizer], ratio: Real) -> pd.DataFrame:
    """Settings by how much more accuracy the target loses than the others (Self minus Neg) at a
    ratio, the best first.

    Ties go to the earlier setting. The losses are in percentage points, means over the dev
    sequences.

    Returns:
        one row per setting: method, settings, self_loss, neg_loss, score (self_loss - neg_loss).

    Raises:
        ValueError: the ratio was not run, or there is one sequence and so no other.

    >>> benchmark = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0)
    >>> candidates = expand("slimming", {"steps": [2, 20]})
    >>> ranking = rank_del(benchmark.run(candidates), candidates, 0.05)
    >>> [settings["steps"] for settings in ranking["settings"]]
    [20, 2]
    """
    frame = results.frame[results.frame["ratio"] == ratio]
    if not len(frame):
        raise ValueError(
            f"ratio must be one of {sorted(set(results.frame['ratio']))}, got {ratio}. Run it too."
        )
    if frame["delta_neg_accuracy"].isna().any():
        raise ValueError(
            "results must be of at least two sequences, got one, which has no other to compare "
            "with. Use a larger dev set."
        )
    losses = -100 * frame.groupby("method")[["delta_self_accuracy", "delta_neg_accuracy"]].mean()
    losses.columns = ["self_loss", "neg_loss"]
    return _ranked(losses.assign(score=losses["self_loss"] - losses["neg_loss"]), candidates)


def _ranked(measured: pd.DataFrame, candidates: Sequence[Localizer]) -> pd.DataFrame:
    """A row for each candidate that was measured, by its repr or its name, the largest score first."""
    rows: list[dict[str, Any]] = []
    for method in candidates:
        name = repr(method) if repr(method) in measured.index else method.name
        if name in measured.index:
            settings = {
                f.name: getattr(method, f.name)
                for f in dataclasses.fields(method)
                if f.compare and f.name != "units"
            }
            rows.append({"method": method.name, "settings": settings, **measured.loc[name]})
    return pd.DataFrame(rows).sort_values(
        "score", ascending=False, kind="stable", ignore_index=True
    )


@dataclass(frozen=True)
class Ranking:
    """What a search over settings has found in a results folder, at one ratio."""

    frame: pd.DataFrame  # as of ``rank_inj`` or ``rank_del``; empty where nothing is measured yet
    rule: str  # how the best one is chosen, for a reader
    n_missing: int  # measurements that the ranking still lacks
    n_lost: int  # dev sentences whose injections did not converge, which are left out
    ratio: float

    @classmethod
    def of(
        cls,
        results: InjResults | DelResults,
        plans: Sequence[Plan],
        names: Collection[str],
        ratio: float | None = None,
    ) -> Ranking:
        """What is ranked: the methods that were tuned (``names``), at a ratio, by default that of
        the newest plan.
        """
        ratio = plans[-1].tasks[-1].ratio if ratio is None else ratio
        labels = {
            label: text
            for plan in plans
            if plan.tasks[-1].ratio == ratio
            for label, text in plan.methods.items()
        }
        methods = {label: method_of(text) for label, text in labels.items()}
        candidates = [method for method in dict.fromkeys(methods.values()) if method.name in names]
        column = "ratio" if isinstance(results, DelResults) else "injection_ratio"
        frame, missing = (
            part[part[column] == ratio] if len(part) else part
            for part in (results.frame, results.missing)
        )
        if len(frame):
            frame = frame.assign(method=[repr(methods.get(label)) for label in frame["method"]])
        if (
            not len(frame)
            or not frame["method"].isin([repr(method) for method in candidates]).any()
        ):
            return cls(pd.DataFrame(), "", len(missing), 0, ratio)
        results = dataclasses.replace(results, frame=frame)
        if isinstance(results, DelResults):
            n_dev = len(plans[-1].parts)
            rule = (
                "largest loss of accuracy on the target minus that on the others at "
                f"{100 * ratio:g} %, {n_dev} dev sequences"
            )
            return cls(rank_del(results, candidates, ratio), rule, len(missing), 0, ratio)
        n_dev, lost = (
            frame["sequence_id"].nunique(),
            frame.loc[~frame["converged"], "sequence_id"].nunique(),
        )
        rule = f"highest mean recall on the {n_dev} dev sentences of inj"
        if lost:
            rule += f", of which {lost} are left out, because their injections did not converge"
        ranked = rank_inj(results, candidates) if frame["converged"].any() else pd.DataFrame()
        return cls(ranked, rule, len(missing), lost, ratio)

    def shown(self) -> pd.DataFrame:
        """The ranking for a reader: of the settings only those that differ between the rows of a
        method.
        """
        rows = self.frame.to_dict("records")
        texts: list[str] = []
        for row in rows:
            others = [other["settings"] for other in rows if other["method"] == row["method"]]
            axes = {
                axis: value
                for axis, value in row["settings"].items()
                if any(other[axis] != value for other in others)
            }
            texts.append(
                ", ".join(f"{axis}={value}" for axis, value in (axes or row["settings"]).items())
            )
        return self.frame.assign(settings=texts).set_index("settings")


def write_settings(ranking: pd.DataFrame, path: str | Path, rule: str) -> dict[str, dict[str, Any]]:
    """Write the best setting of each method to a file that ``--settings`` of ``tl-localize inj``
    and ``del`` reads; returns them.

    >>> ranking = pd.DataFrame({"method": ["slimming", "slimming"], "settings": [{"steps": 200}, {"steps": 60}]})  # the best first
    >>> best = write_settings(ranking, folder / "settings.json", "mean recall on the dev sentences")
    >>> best == read_settings(folder / "settings.json"), best
    (True, {'slimming': {'steps': 200}})
    """
    best = {
        str(row["method"]): row["settings"]
        for row in ranking.drop_duplicates("method").to_dict("records")
    }
    write_json(path, {"rule": rule, "settings": best})
    return best


def read_settings(path: str | Path) -> dict[str, dict[str, Any]]:
    """Settings by method name, from a file that ``write_settings`` wrote; ValueError where a method
    or setting is unknown.

    >>> _ = (folder / "settings.json").write_text('{"rule": "mean recall", "settings": {"slimming": {"steps": 200}}}')
    >>> read_settings(folder / "settings.json")
    {'slimming': {'steps': 200}}
    """
    settings = _read(path, "settings must be a file written by tl-localize tune", "settings")
    for method, values in settings.items():
        try:
            expand(method, {name: [value] for name, value in values.items()})
        except ValueError as error:
            raise ValueError(f"{error} (in {str(path)!r})") from error
    return settings
