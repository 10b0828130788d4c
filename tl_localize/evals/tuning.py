"""Hyperparameter search on dev sequences: every setting of a grid through a benchmark, ranked by
one stated rule.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.checks import Real
from tl_localize.evals.deletion.results import DelResults
from tl_localize.evals.inj.results import InjResults
from tl_localize.evals.settings import default_settings, make_method
from tl_localize.evals.shared import NOT_DONE
from tl_localize.execution.store import Json
from tl_localize.files import refuse_unreadable, write_json
from tl_localize.methods import METHODS, Localizer, RandomBaseline, RowNorm

Grid = Mapping[str, Sequence[Any]]


def expand(method: str, grid: Grid) -> list[Localizer]:
    """One method per combination of the grid's values, in the order in which they are written.

    Raises:
        ValueError: An unknown method or setting; the nearest names are offered.

    >>> [method.steps for method in expand("slimming", {"steps": [60, 200]})]
    [60, 200]
    """
    combinations = itertools.product(*grid.values())
    return [make_method(method, dict(zip(grid, values, strict=True))) for values in combinations]


def rank(results: InjResults | DelResults, ratio: Real) -> pd.DataFrame:
    """The settings that were run at a ratio, the best first; ties go to the earlier setting.

    In INJ the score is the mean recall over the dev sentences and all multiples; injections that
    did not converge are left out, as in the tables. In DEL it is how much more accuracy the target
    loses than the others (Self minus Neg), in points, a mean over the dev sequences; nan for one
    sequence, which has no other.

    Returns:
        One row per setting: method, settings, score; none of a setting that failed on a sequence.
        Empty where nothing is measured at this ratio.

    >>> benchmark = InjBenchmark(model, few[:1], ratio=0.02)
    >>> ranking = rank(benchmark.run(expand("slimming", {"steps": [1, 9]})), 0.02)
    >>> [settings["steps"] for settings in ranking["settings"]]
    [9, 1]
    """
    failed = failed_at(results, ratio)
    frame = results.frame[~results.frame["method"].isin(failed)]
    if isinstance(results, InjResults):
        used = frame[(frame["injection_ratio"] == ratio) & frame["converged"]]
        scores = used["recall"]
    else:
        used = frame[frame["ratio"] == ratio]
        scores = 100 * (used["delta_neg_accuracy"] - used["delta_self_accuracy"])
    means = scores.groupby(used["method"]).mean().dropna()
    controls = RandomBaseline.name, RowNorm.name
    names = {kind.__name__: name for name, kind in METHODS.items() if name not in controls}
    rows: dict[str, Json] = {}
    scope = results.settings.get("scopes", {}).get(f"{float(ratio):g}", {"methods": {}})
    for label, about in scope["methods"].items():
        name = names.get(about.get("class"))  # a function has none
        if name and label in means:
            settings = {key: about[key] for key in default_settings(name) if key in about}
            rows[label] = {"method": name, "settings": settings, "score": means[label]}
    ranking = pd.DataFrame(list(rows.values()), columns=["method", "settings", "score"])
    return ranking.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def failed_at(results: InjResults | DelResults, ratio: Real) -> list[str]:
    """The methods that failed on a sequence at this ratio, so that their mean is of easier ones."""
    failed = results.missing
    if len(failed):  # results of one's own frame lack the columns
        failed = failed[(failed["scope"] == f"{float(ratio):g}") & failed["reason"].ne(NOT_DONE)]
    return [] if failed.empty else list(failed["method"].unique())


def ranking_table(ranking: pd.DataFrame) -> pd.DataFrame:
    """A ranking for a reader: of the settings only those that differ, as columns."""
    axes = pd.DataFrame(list(ranking["settings"]))
    varied = axes.astype(str).nunique() > 1
    return axes.loc[:, varied].join(ranking.drop(columns="settings")).set_index("method")


def write_settings(ranking: pd.DataFrame, path: str | Path, rule: str) -> dict[str, Json]:
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


def read_settings(path: str | Path) -> dict[str, Json]:
    """Settings by method name, from a file that ``write_settings`` wrote; ValueError where a method
    or setting is unknown.

    >>> _ = (folder / "settings.json").write_text('{"settings": {"slimming": {"steps": 200}}}')
    >>> read_settings(folder / "settings.json")
    {'slimming': {'steps': 200}}
    """
    rule = "settings must be a file written by tl-localize tune"
    with refuse_unreadable(rule, Path(path), "Correct the file, or make it again."):
        settings = json.loads(Path(path).read_bytes())["settings"]
        for method, values in settings.items():
            make_method(method, values)
    return settings
