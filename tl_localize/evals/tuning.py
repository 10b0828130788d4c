"""Hyperparameter search on dev sequences: every setting of a grid through a benchmark, ranked by one stated rule."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.evals.del_benchmark import DelResults
from tl_localize.evals.inj_benchmark import InjResults
from tl_localize.execution.store import nearest, write_json
from tl_localize.methods import METHODS, Localizer
from tl_localize.neurons import Real

Grid = Mapping[str, Sequence[Any]]


def expand(method: str, grid: Grid) -> list[Localizer]:
    """One method per combination of the grid's values, in the order in which they are written.

    Raises:
        ValueError: an unknown method or setting (the nearest names are offered), or an axis without values.

    >>> from tl_localize.evals.tuning import expand
    >>> [(method.steps, method.learning_rate) for method in expand("slimming", {"steps": [60, 200], "learning_rate": [0.01, 0.1]})]
    [(60, 0.01), (60, 0.1), (200, 0.01), (200, 0.1)]
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.{nearest(method, METHODS)}")
    known = [f.name for f in dataclasses.fields(METHODS[method])]
    for name, values in grid.items():
        if name not in known:
            raise ValueError(f"grid must name settings of {method} ({', '.join(known)}), got {name!r}.{nearest(name, known)}")
        if not values or not isinstance(values, (list, tuple)):
            raise ValueError(f"grid must hold a list of values for {name}, got {values!r}.")
    try:
        return [METHODS[method](**dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]
    except TypeError as error:
        raise ValueError(f"grid must hold values that {method} takes, got {dict(grid)} ({error}).") from error


def method_of(text: str) -> Localizer:
    """The method that has this repr: what a plan says of it.

    Raises:
        ValueError: it is not the repr of one of ours.
    """
    kinds = {kind.__name__: kind for kind in METHODS.values()}
    try:
        call: Any = ast.parse(text, mode="eval").body
        return kinds[call.func.id](**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"method must be the repr of one of {', '.join(kinds)}, got {text!r}. Was the plan made by tune?") from error


def read_grids(path: str | Path) -> dict[str, Grid]:
    """Grids by method name from a JSON file: {"hard_concrete": {"learning_rate": [0.01, 0.001], ...}, ...}."""
    try:
        grids = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"grid must be a JSON file, got {str(path)!r} ({error}).") from error
    if not isinstance(grids, dict) or not all(isinstance(axes, dict) for axes in grids.values()):
        raise ValueError(f'grid must be a JSON object such as {{"slimming": {{"steps": [60, 200]}}}}, got {str(path)!r}.')
    return grids


def rank_inj(results: InjResults, candidates: Sequence[Localizer]) -> pd.DataFrame:
    """Settings by mean recall over the dev sentences and all multiples, the best first; ties go to the earlier setting.

    Injections that did not converge are left out, as in the tables.

    Returns: one row per setting: method, settings, R@..x for each multiple, score (mean recall), seconds per sentence.
    Raises:  ValueError: no injection converged.

    >>> from tl_localize import InjBenchmark, MemorizedSequence, load_model
    >>> from tl_localize.evals.tuning import expand, rank_inj
    >>> model = load_model("reference")
    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02)
    >>> candidates = expand("slimming", {"steps": [2, 20]})
    >>> ranking = rank_inj(benchmark.run(candidates), candidates)
    >>> [settings["steps"] for settings in ranking["settings"]]
    [20, 2]
    """
    label = {repr(method): method for method in candidates}
    names = {method.name: method for method in candidates}
    rows: list[dict[str, Any]] = []
    frame = results.frame[results.frame["converged"]]
    if not len(frame):
        raise ValueError("results must hold an injection that converged, got none. Inject with another ratio, learning_rate or max_steps.")
    for (name,), group in frame.groupby(["method"], sort=False):
        method = label.get(str(name)) or names.get(str(name))
        if method is not None:
            recalls = group.groupby("multiple")["recall"].mean()
            rows.append(
                {
                    "method": method.name,
                    "settings": settings_of(method),
                    **{f"R@{multiple:g}x": float(recall) for multiple, recall in recalls.to_dict().items()},
                    "score": float(recalls.mean()),
                    "seconds": float(group["seconds"].mean()),
                }
            )
    return pd.DataFrame(rows).sort_values("score", ascending=False, kind="stable", ignore_index=True)


def rank_del(results: DelResults, candidates: Sequence[Localizer], ratio: Real) -> pd.DataFrame:
    """Settings by how much more accuracy the target loses than the others (Self minus Neg) at a ratio, the best first.

    Ties go to the earlier setting. The losses are in percentage points, means over the dev sequences.

    Returns: one row per setting: method, settings, self_loss, neg_loss, score (self_loss - neg_loss).
    Raises:  ValueError: the ratio was not run, or there is one sequence and so no other.

    >>> from tl_localize import DelBenchmark, load_model
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> from tl_localize.evals.tuning import expand, rank_del
    >>> model = load_model("reference")
    >>> two, text = reference_sequences(model)[:2], held_out_tokens()[:1]
    >>> benchmark = DelBenchmark(model, two, text, ratios=(0.05,), n_dev=0)
    >>> candidates = expand("slimming", {"steps": [2, 20]})
    >>> ranking = rank_del(benchmark.run(candidates), candidates, 0.05)
    >>> [settings["steps"] for settings in ranking["settings"]]
    [20, 2]
    """
    frame = results.frame[results.frame["ratio"] == ratio]
    if not len(frame):
        raise ValueError(f"ratio must be one of {sorted(set(results.frame['ratio']))}, got {ratio}. Run it too.")
    if frame["delta_neg_accuracy"].isna().any():
        raise ValueError("results must be of at least two sequences, got one, which has no other to compare with. Use a larger dev set.")
    names = {method.name: method for method in candidates} | {repr(method): method for method in candidates}
    rows: list[dict[str, Any]] = []
    for (name,), group in frame.groupby(["method"], sort=False):
        method = names.get(str(name))
        if method is not None:
            own, others = (-100 * float(group[f"delta_{which}_accuracy"].mean()) for which in ("self", "neg"))
            record = {"method": method.name, "settings": settings_of(method)}
            rows.append(record | {"self_loss": own, "neg_loss": others, "score": own - others})
    return pd.DataFrame(rows).sort_values("score", ascending=False, kind="stable", ignore_index=True)


def settings_of(method: Localizer) -> dict[str, Any]:
    """The hyperparameters of a method, as ``METHODS[name](**settings)`` takes them."""
    return {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.compare}


def write_settings(ranking: pd.DataFrame, path: str | Path, rule: str) -> dict[str, dict[str, Any]]:
    """Write the best setting of each method to a file that ``--settings`` of ``tl-localize inj`` and ``del`` reads; returns them.

    >>> import tempfile
    >>> import pandas as pd
    >>> from tl_localize.evals.tuning import read_settings, write_settings
    >>> ranking = pd.DataFrame({"method": ["slimming", "slimming"], "settings": [{"steps": 200}, {"steps": 60}]})  # the best first
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     best = write_settings(ranking, f"{folder}/settings.json", "mean recall on the dev sentences")
    ...     best == read_settings(f"{folder}/settings.json"), best
    (True, {'slimming': {'steps': 200}})
    """
    best = {str(row["method"]): row["settings"] for row in ranking.drop_duplicates("method").to_dict("records")}
    write_json(path, {"rule": rule, "settings": best})
    return best


def read_settings(path: str | Path) -> dict[str, dict[str, Any]]:
    """Settings by method name, from a file that ``write_settings`` wrote.

    Raises:
        ValueError: another kind of file, or a method or setting that there is not.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import METHODS
    >>> from tl_localize.evals.tuning import read_settings
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "settings.json")
    ...     _ = path.write_text('{"rule": "mean recall", "settings": {"slimming": {"steps": 200}}}')
    ...     [METHODS[name](**settings).steps for name, settings in read_settings(path).items()]
    [200]
    """
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))["settings"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"settings must be a file written by tl-localize tune, got {str(path)!r} ({error!r}).") from error
    if not isinstance(settings, dict) or not all(isinstance(values, dict) for values in settings.values()):
        raise ValueError(f"settings must be a file written by tl-localize tune, got {str(path)!r} with settings {settings!r}.")
    for method, values in settings.items():
        expand(method, {name: [value] for name, value in values.items()})
    return settings
