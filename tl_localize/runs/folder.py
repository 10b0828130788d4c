"""What a results folder says by itself, without the model: its units, how far they are, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tl_localize.collect import Report, Sifted, merged
from tl_localize.evals.del_benchmark import DelResults, Effect, Share, single_layer_frame
from tl_localize.evals.inj_benchmark import TRUE_ROWS, InjResults
from tl_localize.runs.base import Run, Work
from tl_localize.runs.collect_run import CollectRun
from tl_localize.runs.del_run import BY_LAYER, DelRun
from tl_localize.runs.inj_run import FRAMES, InjRun
from tl_localize.execution.store import Store, Unit

RUNS: dict[str, type[Run]] = {"inj": InjRun, "del": DelRun, "collect": CollectRun}
COUNTS = ("planned", "done", "failed", "missing", "not_converged")

Planned = dict[tuple[float, int, str], tuple[Work, Unit]]


def works(plan: dict[str, Any]) -> list[Work]:
    """The units of a plan, part by part.

    Raises:
        ValueError: it is not the plan of a run.
    """
    if plan["benchmark"] not in RUNS:
        raise ValueError(f"folder must hold a run of {' or '.join(RUNS)}, got one of {plan['benchmark']}. Was it made by another version?")
    return RUNS[plan["benchmark"]].works_of(plan)


def planned(store: Store) -> tuple[Planned, list[dict[str, Any]]]:
    """Measurements of all plans of a folder by (ratio, part, method), in the order of tables; and the plans.

    Of a collection the last plan alone counts: data that have grown or changed since make another one.
    """
    plans = store.plans()
    if plans and plans[-1]["value"]["benchmark"] == "collect":
        plans = plans[-1:]
    found: Planned = {}
    for plan in plans:
        for work in works(plan["value"]):
            for label, unit in work.measures.items():
                found.setdefault((work.ratio, work.index, label), (work, unit))
    ratios, labels = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 2))
    labels.sort(key=lambda label: label == TRUE_ROWS)
    rank = {name: i for names in (ratios, labels) for i, name in enumerate(names)}
    return {key: found[key] for key in sorted(found, key=lambda key: (rank[key[0]], key[1], rank[key[2]]))}, plans


# Results


def inj_results(store: Store) -> InjResults:
    """All that a folder holds, as ``InjBenchmark.run`` gives it, and what is missing.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Attribution, InjBenchmark, MemorizedSequence, load_model
    >>> from tl_localize.runs import InjRun, inj_results
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = InjRun(Store(Path(folder)), benchmark, [Attribution()])
    ...     made = list(run.make(run.works[0], ["attribution"]))
    ...     inj_results(run.store), list(inj_results(run.store).missing["method"])
    (InjResults(1 sequences x 1 methods, injection ratio 2 %), ['random', 'row_norm'])
    """
    units, plans = planned(store)
    failures = store.failures()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in (*FRAMES, "missing")}
    for (ratio, _, label), (work, unit) in units.items():
        if record := store.read(unit):
            for name in FRAMES:
                rows[name] += record.value[name]
        else:
            lacking = {"injection_ratio": ratio, "group": work.name, "method": label, "reason": _reason(work, unit, failures)}
            rows["missing"].append(lacking)
    frames = {name: pd.DataFrame(part) for name, part in rows.items()}
    return InjResults(frames["frame"], _settings(plans), frames["truth"], frames["assignment"], frames["missing"])


def del_results(store: Store) -> DelResults:
    """All that a folder holds, as ``DelBenchmark.run`` gives it, and what is missing.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Attribution, DelBenchmark, load_model
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> from tl_localize.runs import DelRun, del_results
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> two, text = reference_sequences(model)[:2], held_out_tokens()[:1]
    >>> benchmark = DelBenchmark(model, two, text, ratios=(0.05,), n_dev=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = DelRun(Store(Path(folder)), benchmark, [Attribution()])
    ...     made = list(run.make(run.works[0], ["attribution", "random"]))
    ...     del_results(run.store), len(del_results(run.store).missing)
    (DelResults(1 targets x 2 methods, 5 % of each layer silenced), 2)
    """
    units, plans = planned(store)
    failures = store.failures()
    every_layer = {key: value for key, value in units.items() if not key[2].endswith(BY_LAYER)}
    labels, ratios = dict.fromkeys(label for _, _, label in every_layer), dict.fromkeys(ratio for ratio, _, _ in every_layer)
    effects: dict[tuple[str, float], list[Effect]] = {(label, ratio): [] for label in labels for ratio in ratios}
    missing: list[dict[str, Any]] = []
    for (ratio, _, label), (work, unit) in every_layer.items():
        if record := store.read(unit):
            effects[label, ratio] += map(Effect.unpacked, record.value["effects"])
        else:
            missing.append({"ratio": ratio, "sequence_id": work.name, "method": label, "reason": _reason(work, unit, failures)})
    before = _before(store, units)
    if before is None or not any(effects.values()):
        return DelResults(pd.DataFrame(), pd.DataFrame(), settings=_settings(plans), missing=pd.DataFrame(missing))
    intervention = plans[0]["value"]["intervention"]
    return DelResults.of(before, effects, intervention, _settings(plans), pd.DataFrame(missing))


def single_layer_frames(store: Store) -> dict[str, pd.DataFrame]:
    """What ``DelBenchmark.run_single_layer`` gives, by method, of the targets that are done, at the ratio that was asked for last.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Activations, DelBenchmark, load_model
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> from tl_localize.runs import DelRun, single_layer_frames
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> benchmark = DelBenchmark(model, reference_sequences(model)[:2], held_out_tokens()[:1], ratios=(0.05,), n_dev=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = DelRun(Store(Path(folder)), benchmark, [Activations()], multiples=(1,))
    ...     made = list(run.make(run.works[0], run.missing(run.works[0])))
    ...     frames = single_layer_frames(run.store)
    >>> len(frames["activations"])  # six layers, and all together
    7
    """
    units, plans = planned(store)
    before = _before(store, units)
    if before is None:
        return {}
    asked = [(plan["value"], label) for plan in plans for label in plan["value"]["methods"] if label.endswith(BY_LAYER)]
    ratios = {label: DelRun.ratio_of(plan) for plan, label in asked}
    frames: dict[str, pd.DataFrame] = {}
    for label, ratio in ratios.items():
        found: list[tuple[Effect, Share]] = []
        for key, (_, unit) in units.items():
            if (key[0], key[2]) == (ratio, label) and (record := store.read(unit)):
                shares = [Share(**share) for share in unit.identity["shares"]]
                found += zip(map(Effect.unpacked, record.value["effects"]), shares, strict=True)
        name = label.removesuffix(BY_LAYER)
        if found:
            frames[name] = single_layer_frame(before, found, plans[0]["value"]["intervention"], name, ratio)
    return frames


def collected(store: Store) -> Report:
    """What was found in the chunks of a collection that are done; near-duplicates and the draw come when all are.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> from tl_localize import load_model
    >>> from tl_localize.collect import Criteria
    >>> from tl_localize.reference import reference_sequences
    >>> from tl_localize.runs import CollectRun, Corpus, Search, collected
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> corpus = Corpus(Path("planted"), given=torch.stack([one.tokens for one in reference_sequences(model)[:3]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = CollectRun(Store(Path(folder)), Search(model, corpus.chunks(), Criteria()))
    ...     made = list(run.make(run.works[0], run.missing(run.works[0])))
    ...     collected(run.store)
    Report(3 came in, 3 left)
    """
    units, _ = planned(store)
    records = [record for _, unit in units.values() if (record := store.read(unit))]
    counts, _ = merged(Sifted.unpacked(record.value, record.tensors) for record in records)
    return counts.report()


def _before(store: Store, units: Planned) -> pd.DataFrame | None:
    """How the model of a DEL folder is as it is."""
    for work, _ in units.values():
        record = store.read(work.base) if work.base else None
        return pd.DataFrame(record.value["frame"]) if record else None
    return None


def _reason(work: Work, unit: Unit, failures: dict[str, dict[str, Any]]) -> str:
    failure = _failure(work, unit, failures)
    return failure["reason"] if failure else "not done yet"


def _failure(work: Work, unit: Unit, failures: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    return next((failures[one.key] for one in (work.base, unit) if one and one.key in failures), None)


def _settings(plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"runs": [{**plan["value"], "environment": plan["about"]["environment"]} for plan in plans]}


# How far it is


@dataclass(frozen=True)
class Status:
    """How far a folder is.

    Args:
        frame: one row per method: counts of measurements (planned, done, failed, missing, not_converged), and seconds_left.
        reasons: what failed and why, by unit.

    >>> import pandas as pd
    >>> from tl_localize.runs import Status
    >>> frame = pd.DataFrame({"planned": [3], "done": [3], "failed": [0], "missing": [0], "not_converged": [1]})
    >>> Status(frame, {}).clean
    False
    """

    frame: pd.DataFrame
    reasons: dict[str, str]

    def __repr__(self) -> str:
        counts = ", ".join(f"{self.frame[name].sum()} {name}" for name in ("planned", "done", "failed", "missing") if name in self.frame)
        return f"Status({counts})"

    @property
    def clean(self) -> bool:
        """Nothing failed: no unit, and no injection that did not converge."""
        return not (self.frame["failed"].sum() or self.frame["not_converged"].sum())


def status(store: Store) -> Status:
    """Counts, reasons and the time left for one process, from what the finished units took.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Attribution, InjBenchmark, MemorizedSequence, load_model
    >>> from tl_localize.runs import InjRun, status
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = InjRun(Store(Path(folder)), benchmark, [Attribution()])
    ...     made = list(run.make(run.works[0], ["attribution"]))
    ...     status(run.store).frame.loc[["attribution", "random"], ["planned", "done", "missing"]]
                 planned  done  missing
    attribution        1     1        0
    random             1     0        1
    """
    units, plans = planned(store)
    failures = store.failures()
    base = RUNS[plans[0]["value"]["benchmark"]].base_label if plans else ""
    rows: dict[str, dict[str, float]] = {}
    seconds: dict[str, list[float]] = {base: []}
    waiting: set[str] = set()  # bases that are not there
    for (_, _, label), (work, unit) in units.items():
        row = rows.setdefault(label, dict.fromkeys(COUNTS, 0.0))
        row["planned"] += 1
        if record := store.read(unit):
            row["done"] += 1
            row["not_converged"] += any(not line["converged"] for line in record.value.get("frame", ()))
            seconds.setdefault(label, []).append(record.about["seconds"])
            seconds[base].append(record.about["base_seconds"])
        elif _failure(work, unit, failures):
            row["failed"] += 1
        else:
            row["missing"] += 1
            if work.base and not store.has(work.base):
                waiting.add(work.base.key)
    everything = [value for label, values in seconds.items() if label != base for value in values]
    for label, row in rows.items():
        row["seconds_left"] = row["missing"] * _mean(seconds.get(label) or everything)
    if base:
        rows[base] = {**dict.fromkeys(COUNTS, 0.0), "missing": len(waiting), "seconds_left": len(waiting) * _mean(seconds[base])}
    reasons = {failure["unit"]: failure["reason"] for failure in failures.values()}
    return Status(pd.DataFrame(rows, index=[*COUNTS, "seconds_left"]).T.astype(dict.fromkeys(COUNTS, int)), reasons)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
