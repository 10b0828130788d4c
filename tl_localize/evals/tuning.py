"""Hyperparameter search on dev sequences: every setting of a grid through a benchmark, ranked by
one stated rule.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.presets import make_method, settings_of
from tl_localize.execution.tasks import Plan
from tl_localize.files import reading, write_json
from tl_localize.methods import METHODS, Localizer
from tl_localize.neurons import Real

Grid = Mapping[str, Sequence[Any]]
ADVICE = "Correct the file, or make it again."


def expand(method: str, grid: Grid) -> list[Localizer]:
    """One method per combination of the grid's values, in the order in which they are written.

    Raises:
        ValueError: An unknown method or setting (the nearest names are offered), or an axis without
            values.

    >>> [method.steps for method in expand("slimming", {"steps": [60, 200]})]
    [60, 200]
    """
    for name, values in grid.items():
        if not values or not isinstance(values, (list, tuple)):
            raise ValueError(f"grid must hold a list of values for {name}, got {values!r}.")
    combinations = itertools.product(*grid.values())
    return [make_method(method, dict(zip(grid, values, strict=True))) for values in combinations]


def read_grids(path: str | Path) -> dict[str, Grid]:
    """Grids by method name from a JSON file: {"hard_concrete": {"learning_rate": [0.01, 0.001],
    ...}, ...}.
    """
    rule = 'grid must be a JSON file such as {"slimming": {"steps": [60, 200]}}'
    with reading(rule, Path(path), ADVICE):
        return _objects(json.loads(Path(path).read_bytes()))


def _objects(content: Any) -> dict[str, Any]:
    """The content of a file, where it is objects by name."""
    if not all(isinstance(values, dict) for values in content.values()):
        raise TypeError(f"{content!r} does not hold objects by name")
    return content


def rank_inj(results: InjResults, candidates: Mapping[str, Localizer]) -> pd.DataFrame:
    """Settings by mean recall over the dev sentences and all multiples, the best first; ties go to
    the earlier setting.

    Injections that did not converge are left out, as in the tables.

    Args:
        candidates: Methods by their label in the results.

    Returns:
        One row per setting: method, settings, R@..x for each multiple, score (mean recall), seconds
        per sentence.

    Raises:
        ValueError: No injection converged.

    >>> benchmark = InjBenchmark(model, few[:1], ratio=0.02)
    >>> methods = expand("slimming", {"steps": [2, 20]})
    >>> ranking = rank_inj(benchmark.run(methods), {repr(method): method for method in methods})
    >>> [settings["steps"] for settings in ranking["settings"]]
    [20, 2]
    """
    frame = results.frame[results.frame["converged"]]
    if not len(frame):
        raise ValueError(
            "results must hold an injection that converged, got none. Inject with another ratio, "
            "learning_rate or max_steps."
        )
    recalls = frame.pivot_table("recall", "method", "multiple").rename(columns="R@{:g}x".format)
    seconds = frame.groupby("method")["seconds"].mean()
    return _ranked(recalls.assign(score=recalls.mean(axis=1), seconds=seconds), candidates)


def rank_del(results: DelResults, candidates: Mapping[str, Localizer], ratio: Real) -> pd.DataFrame:
    """Settings by how much more accuracy the target loses than the others (Self minus Neg) at a
    ratio, the best first.

    Ties go to the earlier setting. The losses are in percentage points, means over the dev
    sequences.

    Args:
        candidates: Methods by their label in the results.

    Returns:
        One row per setting: method, settings, self_loss, neg_loss, score (self_loss - neg_loss).

    Raises:
        ValueError: The ratio was not run, or there is one sequence and so no other.

    >>> benchmark = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0)
    >>> methods = expand("slimming", {"steps": [2, 20], "first_layer": [1]})
    >>> candidates = {repr(method): method for method in methods}
    >>> ranking = rank_del(benchmark.run(methods), candidates, 0.05)
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


def _ranked(found: pd.DataFrame, candidates: Mapping[str, Localizer]) -> pd.DataFrame:
    """A row for each candidate that was measured under its label, the largest score first."""
    rows: dict[Localizer, dict[str, Any]] = {}
    for label, method in candidates.items():
        if label in found.index:
            settings = {name: getattr(method, name) for name in settings_of(method.name)}
            rows[method] = {"method": method.name, "settings": settings, **found.loc[label]}
    return pd.DataFrame(list(rows.values())).sort_values(
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
        candidates: dict[str, Localizer] = {}
        for plan in plans:
            if plan.tasks[-1].ratio == ratio:
                candidates |= tuned(plan, names)
        column = "ratio" if isinstance(results, DelResults) else "injection_ratio"
        missing = results.missing
        if len(missing):
            missing = missing[missing[column] == ratio]
        frame = results.frame
        if len(frame):
            frame = frame[(frame[column] == ratio) & frame["method"].isin(candidates)]
        if not len(frame):
            return cls(pd.DataFrame(), "", len(missing), 0, ratio)
        if isinstance(results, DelResults):
            rule = (
                "largest loss of accuracy on the target minus that on the others at "
                f"{100 * ratio:g} %, {len(plans[-1].parts)} dev sequences"
            )
            ranked = rank_del(replace(results, frame=frame), candidates, ratio)
            return cls(ranked, rule, len(missing), 0, ratio)
        sentences = frame.groupby("sequence_id")["converged"].all()
        n_lost = int((~sentences).sum())
        rule = f"highest mean recall on the {len(sentences)} dev sentences of inj"
        if n_lost:
            rule += f", of which {n_lost} are left out, because their injections did not converge"
        ranked = pd.DataFrame()
        if n_lost < len(sentences):
            ranked = rank_inj(replace(results, frame=frame), candidates)
        return cls(ranked, rule, len(missing), n_lost, ratio)

    def shown(self) -> pd.DataFrame:
        """The ranking for a reader: of the settings only those that differ between the rows of a
        method.
        """
        settings = pd.DataFrame(list(self.frame["settings"]))
        varied = settings.groupby(self.frame["method"]).transform("nunique", dropna=False) > 1
        texts: list[str] = []
        for i, row in enumerate(self.frame["settings"]):
            axes = {name: value for name, value in row.items() if varied.loc[i, name]}
            texts.append(", ".join(f"{name}={value}" for name, value in (axes or row).items()))
        return self.frame.assign(settings=texts).set_index("settings")


def tuned(plan: Plan, names: Collection[str]) -> dict[str, Localizer]:
    """The methods of a plan by label, of those that have one of these names."""
    found: dict[str, Localizer] = {}
    for label, about in plan.methods.items():
        for name in names:
            if about["class"] == METHODS[name].__name__:
                own = settings_of(name)  # some are no part of what a method is
                settings = {setting: about[setting] for setting in own if setting in about}
                found[label] = make_method(name, settings)
    return found


def write_settings(ranking: pd.DataFrame, path: str | Path, rule: str) -> dict[str, dict[str, Any]]:
    """Write the best setting of each method to a file that ``--settings`` of ``tl-localize inj``
    and ``del`` reads; returns them.

    >>> ranking = pd.DataFrame({"method": ["slimming"], "settings": [{"steps": 200}]})
    >>> best = write_settings(ranking, folder / "settings.json", "mean recall")
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

    >>> _ = (folder / "settings.json").write_text('{"settings": {"slimming": {"steps": 200}}}')
    >>> read_settings(folder / "settings.json")
    {'slimming': {'steps': 200}}
    """
    with reading("settings must be a file written by tl-localize tune", Path(path), ADVICE):
        settings = _objects(json.loads(Path(path).read_bytes())["settings"])
        for method, values in settings.items():
            make_method(method, values)
    return settings
