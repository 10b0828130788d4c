"""What DEL measured: one row per target, method and ratio, and the tables that are made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.evals.ablation import Baseline, Effect
from tl_localize.execution.status import reason_of
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import tasks_of
from tl_localize.files import load_tensors, prepare_folder, save_tensors, write_json, write_text
from tl_localize.stats import compare_with_reference, mean_and_error, paired_test, styled, summarize, with_error

METRICS: dict[str, tuple[str, int, int]] = {  # column: title, factor, decimals
    "delta_self_accuracy": ("Δ Self-Acc (points)", 100, 1),
    "delta_self_levenshtein": ("Δ Self-Dist (characters)", 1, 1),
    "delta_neg_accuracy": ("Δ Neg-Acc (points)", 100, 1),
    "delta_neg_levenshtein": ("Δ Neg-Dist (characters)", 1, 1),
    "delta_perplexity": ("Δ Rand-PPL", 1, 2),
    "delta_perplexity_base2": ("Δ Rand-PPL (2 ** nats)", 1, 2),
}


@dataclass(frozen=True)
class Budget:
    """What is ablated: the ratio of every layer, or so many neurons of one.

    Args:
        layer: None for every layer.
        multiple: of the whole budget, for one layer.
        count: neurons, for one layer.
    """

    layer: int | None = None
    multiple: int = 1
    count: int = 0


@dataclass(frozen=True, eq=False)
class DelResults:
    """What DEL measured. A delta is after minus before; accuracies are fractions, distances characters, perplexities exp of nats.

    Args:
        frame: one row per target x method x ratio: model, sequence_id, category, method, ratio, ablation, n_neurons,
            delta_self_accuracy, delta_self_levenshtein, delta_neg_accuracy, delta_neg_levenshtein (means over the other test sequences,
            nan where there is none), delta_perplexity, delta_perplexity_base2 (2 ** nats, as published), and what they were before.
        before: one row per test sequence: model, sequence_id, category, prefix and suffix (text), accuracy, levenshtein, length (characters
            of the suffix), perplexity, perplexity_base2 (of the general text: one number for all).
        confusion: (method, ratio) -> change of accuracy, [ablated measured].
        confusion_levenshtein: the same for the distance.
        settings: what it was measured with.
        missing: what a run was asked for and has not got, one row per sequence x method x ratio: ratio, sequence_id, method, reason.
        single_layer: method -> frame of ``DelBenchmark.run_single_layer``, where it was run.

    >>> DelBenchmark(model, few, text, ratios=(0.005,), n_dev=1).run([Activations()])
    DelResults(2 targets x 2 methods, 0.5 % of each layer ablated)
    """

    frame: pd.DataFrame
    before: pd.DataFrame
    confusion: dict[tuple[str, float], pd.DataFrame] = field(default_factory=dict)
    confusion_levenshtein: dict[tuple[str, float], pd.DataFrame] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    missing: pd.DataFrame = field(default_factory=pd.DataFrame)
    single_layer: dict[str, pd.DataFrame] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: Cache) -> DelResults:
        """Everything that the plans of a folder, or of a run in memory, have so far."""
        plans, failures = cache.plans(), cache.failures()
        settings = {"runs": [{**one.plan.settings, "methods": one.plan.methods, "environment": one.about["environment"]} for one in plans]}
        baseline: Baseline | None = None
        rows: list[dict[str, Any]] = []
        single: dict[str, list[dict[str, Any]]] = {}
        missing: list[dict[str, Any]] = []
        effects: dict[tuple[str, float], list[Effect]] = {}
        for task in tasks_of([one.plan for one in plans]):
            record = cache.read(task)
            if task.kind == "baseline":
                baseline = record and Baseline.unpacked(record)
            elif record is None:
                if task.kind == "del":
                    missing.append(
                        {"ratio": task.ratio, "sequence_id": task.name, "method": task.label, "reason": reason_of(task, failures)}
                    )
            elif baseline:
                found = [Effect.unpacked(value) for value in record.value["effects"]]
                method = task.needs[1].label
                about = {"ablation": task.inputs["ablation"].partition("(")[0].lower(), "method": method, "ratio": task.ratio}
                if task.kind == "del":
                    effects.setdefault((method, task.ratio), []).extend(found)
                    rows += [row_of(effect, baseline.frame) | about for effect in found]
                else:
                    budgets = [Budget(**budget) for budget in task.inputs["budgets"]]
                    single.setdefault(method, []).extend(
                        row_of(effect, baseline.frame) | about | {"layer": budget.layer, "multiple": budget.multiple}
                        for effect, budget in zip(found, budgets, strict=True)
                    )
        before = baseline.frame if baseline and (rows or single) else pd.DataFrame()
        accuracy, levenshtein = (
            {key: matrix(before, part, [getattr(effect, name) for effect in part]) for key, part in effects.items()}
            for name in ("accuracy", "levenshtein")
        )
        by_layer = {method: _in_order(pd.DataFrame(part).astype({"layer": "Int64"})) for method, part in single.items()}
        return cls(_in_order(pd.DataFrame(rows)), before, accuracy, levenshtein, settings, pd.DataFrame(missing), by_layer)

    def __repr__(self) -> str:
        if not len(self.frame):
            return "DelResults(nothing measured)"
        ratios = ", ".join(f"{100 * ratio:g} %" for ratio in self.frame["ratio"].unique())
        counts = f"{self.frame['sequence_id'].nunique()} targets x {self.frame['method'].nunique()} methods"
        return f"DelResults({counts}, {ratios} of each layer ablated)"

    def _repr_html_(self) -> str:
        if not len(self.frame):
            return f"<div>{self!r}</div>"
        return styled(self.table(), f"{self!r}: after minus before, mean \u00b1 standard error over targets")

    def summary(self) -> pd.DataFrame:
        """Mean and standard error over targets: model, ablation, method, ratio, metric, mean, standard_error, n."""
        keys = ["model", "ablation", "method", "ratio"]
        parts = [summarize(self.frame, keys, metric).assign(metric=metric) for metric in METRICS]
        return pd.concat(parts, ignore_index=True).reindex(columns=[*keys, "metric", "mean", "standard_error", "n"])

    def table(self) -> pd.DataFrame:
        """The paper's DEL table as text: a block for each ratio, a row for each method, mean ± standard error over targets.

        Accuracies are in percentage points. Self should fall (distance: rise), the others should stay. Where methods have different numbers
        of targets, a column says how many.
        """
        blocks: dict[str, pd.DataFrame] = {}
        frame: Any = self.frame
        several = frame["model"].nunique() > 1
        for (model, ablation, ratio), block in frame.groupby(["model", "ablation", "ratio"], sort=False):
            rows = {
                method: {title: with_error(factor * part[column], decimals) for column, (title, factor, decimals) in METRICS.items()}
                for method, part in block.groupby("method", sort=False)
            }
            counts = block.groupby("method").size()
            if counts.nunique() > 1:
                rows = {method: row | {"targets": f"{counts[method]}"} for method, row in rows.items()}
            parts = [f"{100 * ratio:g} % of each layer", f"{block['sequence_id'].nunique()} sequences"]
            if len(self.missing):
                lacking = self.missing[self.missing["ratio"] == ratio]["method"]
                parts.append(f"{len(lacking)} measurements MISSING")
                rows = {method: row | {"missing": f"{(lacking == method).sum()}"} for method, row in rows.items()}
            name = ", ".join([*([model] if several else []), *([] if ablation == "zero" else [ablation]), *parts])
            blocks[name] = pd.DataFrame(rows).T
        return pd.concat(blocks)

    def before_table(self) -> pd.DataFrame:
        """How well each model memorizes the test sequences, as text: the paper's table of accuracy, distance, perplexity and length."""
        before: Any = self.before
        rows = {
            model: {
                "Acc (%)": with_error(100 * part["accuracy"], 1),
                "Dist (characters)": with_error(part["levenshtein"], 2),
                "PPL": f"{part['perplexity'].iloc[0]:.2f}",
                "PPL (2 ** nats)": f"{part['perplexity_base2'].iloc[0]:.2f}",
                "Len (characters)": f"{part['length'].mean():.0f}",
                "Sequences": f"{len(part)}",
            }
            for model, part in before.groupby("model", sort=False)
        }
        return pd.DataFrame(rows).T

    def tests(self, reference: str = "integrated_gradients") -> pd.DataFrame:
        """One-tailed paired t-tests: does a method lower Self accuracy more than the reference? Bonferroni over models and ratios."""
        return compare_with_reference(self.frame, reference, "delta_self_accuracy", ["model", "ablation", "ratio"], larger_is_better=False)

    def related(self) -> pd.DataFrame:
        """Are sequences of the target's own category hurt more than others?

        Over targets whose category has another sequence: change of accuracy of these and of the sequences of other categories, means over
        targets of means over sequences, and the one-tailed paired t-test that the related ones fall more.

        Returns: one row per method and ratio: related, related_error, unrelated, unrelated_error, p_value, n. Empty without categories.
        """
        category = dict(zip(self.before["sequence_id"], self.before["category"], strict=True))
        rows: list[dict[str, Any]] = []
        for (method, ratio), matrix in self.confusion.items():
            groups = np.array([category[name] for name in matrix.columns])
            pairs: list[tuple[float, float]] = []
            for name, changes in zip(matrix.index, matrix.to_numpy(), strict=True):
                same = (groups == category[name]) & (matrix.columns != name)
                other = groups != category[name]
                if category[name] and same.any() and other.any():
                    pairs.append((float(changes[same].mean()), float(changes[other].mean())))
            if pairs:
                related, unrelated = np.array(pairs).T
                means = dict(zip(("related", "related_error"), mean_and_error(related), strict=True))
                means |= dict(zip(("unrelated", "unrelated_error"), mean_and_error(unrelated), strict=True))
                p = paired_test(related, unrelated, "less")
                rows.append({"method": method, "ratio": ratio, **means, "p_value": p, "n": len(pairs)})
        return pd.DataFrame(rows)

    def confusion_by_category(self, method: str, ratio: float) -> pd.DataFrame:
        """Change of accuracy, [ablated measured], sequences of one category side by side; both axes are (category, id)."""
        if (method, ratio) not in self.confusion:
            raise ValueError(f"method and ratio must be one of {sorted(self.confusion)}, got {(method, ratio)}.")
        category = dict(zip(self.before["sequence_id"], self.before["category"], strict=True))
        first_seen = {name: i for i, name in enumerate(dict.fromkeys(category.values()))}
        matrix = self.confusion[method, ratio]

        def grouped(axis: pd.Index) -> list[str]:
            return sorted(axis, key=lambda name: first_seen[category[name]])

        def labels(names: list[str]) -> pd.MultiIndex:
            return pd.MultiIndex.from_tuples([(category[name], name) for name in names], names=["category", "id"])

        rows, columns = grouped(matrix.index), grouped(matrix.columns)
        return pd.DataFrame(matrix.loc[rows, columns].to_numpy(), index=labels(rows), columns=labels(columns))

    @classmethod
    def join(cls, results: Sequence[DelResults]) -> DelResults:
        """Runs of several methods, ablations or models as one; what two runs share (Random) is kept once.

        Confusion matrices are kept where all runs are of one model and one ablation; of two of one name, that of more targets.
        """
        keys = ["model", "ablation", "method", "ratio", "sequence_id"]
        frame: Any = pd.concat([part.frame for part in results], ignore_index=True).drop_duplicates(keys, ignore_index=True)
        before: Any = pd.concat([part.before for part in results], ignore_index=True)
        one = results if len(frame[["model", "ablation"]].drop_duplicates()) == 1 else ()
        confusion = _largest([part.confusion for part in one])
        levenshtein = _largest([part.confusion_levenshtein for part in one])
        unique = before.drop_duplicates(["model", "sequence_id"], ignore_index=True)
        return cls(frame, unique, confusion, levenshtein, {"runs": [part.settings for part in results]})

    def save(self, folder: str | Path) -> None:
        """Write frame.csv, before.csv, summary.csv, confusion.safetensors and settings.json, each whole or not at all."""
        path = prepare_folder(folder)
        for name, frame in (("frame", self.frame), ("before", self.before), ("summary", self.summary()), ("missing", self.missing)):
            if name == "missing" and not len(frame):
                (path / "missing.csv").unlink(missing_ok=True)
            else:
                write_text(path / f"{name}.csv", frame.to_csv(index=False))
        if self.confusion:
            tensors, keys = dict[str, Tensor](), list[dict[str, Any]]()
            for i, ((method, ratio), matrix) in enumerate(self.confusion.items()):
                keys.append({"method": method, "ratio": ratio, "ablated": list(matrix.index), "measured": list(matrix.columns)})
                tensors[f"accuracy.{i}"] = torch.tensor(matrix.to_numpy())
                tensors[f"levenshtein.{i}"] = torch.tensor(self.confusion_levenshtein[method, ratio].to_numpy())
            save_tensors(path / "confusion.safetensors", tensors, {"keys": json.dumps(keys)})
        write_json(path / "settings.json", self.settings)

    @classmethod
    def load(cls, folder: str | Path) -> DelResults:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: the folder holds no results.
        """
        path = Path(folder)
        if not (path / "frame.csv").is_file():
            raise FileNotFoundError(f"folder must hold the results of a DEL run, got {str(folder)!r} without a frame.csv. Check the path.")
        texts = dict.fromkeys(("model", "sequence_id", "category", "prefix", "suffix", "method", "ablation"), str)
        frame, before = (pd.read_csv(path / f"{name}.csv", dtype=texts, na_filter=False) for name in ("frame", "before"))
        numbers = [column for column in frame.columns if column not in texts]
        frame[numbers] = frame[numbers].apply(pd.to_numeric)
        matrices: dict[str, dict[tuple[str, float], pd.DataFrame]] = {"accuracy": {}, "levenshtein": {}}
        if (path / "confusion.safetensors").is_file():
            tensors, metadata = load_tensors(path / "confusion.safetensors")
            for i, key in enumerate(json.loads(metadata["keys"])):
                rows, columns = (pd.Index(key[axis], name=axis) for axis in ("ablated", "measured"))
                for name, found in matrices.items():
                    found[key["method"], key["ratio"]] = pd.DataFrame(tensors[f"{name}.{i}"].numpy(), index=rows, columns=columns)
        settings = json.loads((path / "settings.json").read_text(encoding="utf-8"))
        missing = path / "missing.csv"
        lacking = pd.read_csv(missing, dtype=texts | {"reason": str}, na_filter=False) if missing.is_file() else pd.DataFrame()
        return cls(frame, before, matrices["accuracy"], matrices["levenshtein"], settings, lacking)


def row_of(effect: Effect, before: pd.DataFrame) -> dict[str, Any]:
    """A row of the frame, without method, ratio and ablation."""
    i = effect.target
    columns: dict[str, Any] = {name: before[name].to_numpy() for name in before.columns}
    return {
        **{name: columns[name][i] for name in ("model", "sequence_id", "category")},
        "n_neurons": effect.n_neurons,
        "delta_self_accuracy": float(effect.accuracy[i]),
        "delta_self_levenshtein": float(effect.levenshtein[i]),
        "delta_neg_accuracy": mean_of_others(effect.accuracy, i),
        "delta_neg_levenshtein": mean_of_others(effect.levenshtein, i),
        "delta_perplexity": effect.perplexity,
        "delta_perplexity_base2": effect.perplexity_base2,
        "self_accuracy_before": float(columns["accuracy"][i]),
        "self_levenshtein_before": float(columns["levenshtein"][i]),
        "neg_accuracy_before": mean_of_others(columns["accuracy"], i),
        "neg_levenshtein_before": mean_of_others(columns["levenshtein"], i),
        "perplexity_before": float(columns["perplexity"][i]),
        "perplexity_base2_before": float(columns["perplexity_base2"][i]),
    }


def mean_of_others(values: Float[np.ndarray, " sequence"], index: int) -> float:
    """Mean over all but one; nan where there is no other."""
    return float(np.delete(values, index).mean()) if len(values) > 1 else math.nan


def _largest(parts: Sequence[dict[tuple[str, float], pd.DataFrame]]) -> dict[tuple[str, float], pd.DataFrame]:
    """All matrices by name; of those of one name the one with the most rows."""
    found: dict[tuple[str, float], pd.DataFrame] = {}
    for part in parts:
        found |= {key: matrix for key, matrix in part.items() if key not in found or len(matrix) > len(found[key])}
    return found


def matrix(before: pd.DataFrame, effects: Sequence[Effect], changes: Sequence[Float[np.ndarray, " sequence"]]) -> pd.DataFrame:
    """Changes by the ids of the ablated (rows) and the measured sequences (columns)."""
    ids = list(before["sequence_id"])
    rows = pd.Index([ids[effect.target] for effect in effects], name="ablated")
    return pd.DataFrame(np.stack(changes), index=rows, columns=pd.Index(ids, name="measured"))


def _in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that say which row it is first."""
    first = ["model", "sequence_id", "category", "method", "ratio"]
    return frame.reindex(columns=[*first, *(column for column in frame.columns if column not in first)])
