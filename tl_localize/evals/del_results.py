"""What DEL measured: one row per target, method and ratio, and the tables that are made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tl_localize.evals.localize import save_results, settings_of
from tl_localize.execution.status import reason_of
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import tasks_of
from tl_localize.stats import (
    compare_all,
    compare_with_reference,
    interpolated_at,
    jackknife,
    mean_and_error,
    mean_text,
    paired_test,
    styled,
    summarize,
    with_error,
)

METRICS: dict[str, tuple[str, int, int]] = {  # column: title, factor, decimals
    "delta_self_accuracy": ("Δ Self-Acc (points)", 100, 1),
    "delta_self_levenshtein": ("Δ Self-Dist (characters)", 1, 1),
    "delta_neg_accuracy": ("Δ Neg-Acc (points)", 100, 1),
    "delta_neg_levenshtein": ("Δ Neg-Dist (characters)", 1, 1),
    "delta_perplexity": ("Δ Rand-PPL", 1, 2),
    "delta_perplexity_base2": ("Δ Rand-PPL (2 ** nats)", 1, 2),
}
PRICES = (0.5, 1.0, 3.0)  # points of Neg at which methods are compared


@dataclass(frozen=True, eq=False)
class DelResults:
    """What DEL measured. A delta is after minus before; accuracies are fractions, distances
    characters, perplexities exp of nats.

    Args:
        frame: one row per target x method x ratio: model, sequence_id, category, method, ratio,
            ablation, n_neurons, delta_self_accuracy, delta_self_levenshtein, delta_neg_accuracy,
            delta_neg_levenshtein (means over the other test sequences, nan where there is none),
            delta_perplexity, delta_perplexity_base2 (2 ** nats, as published), and what they were
            before.
        before: one row per test sequence: model, sequence_id, category, prefix and suffix (text),
            accuracy, levenshtein, length (characters of the suffix), perplexity, perplexity_base2
            (of the general text: one number for all).
        confusion: (method, ratio) -> change of accuracy, [ablated measured].
        confusion_levenshtein: the same for the distance.
        settings: what it was measured with.
        missing: what a run was asked for and has not got, one row per sequence x method x ratio:
            ratio, sequence_id, method, reason.
        single_layer: method -> frame of ``DelBenchmark.run_single_layer``, where it was run, of all
            ratios.

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
        before = pd.DataFrame()
        rows: list[dict[str, Any]] = []
        single: dict[str, list[dict[str, Any]]] = {}
        missing: list[dict[str, Any]] = []
        effects: dict[tuple[str, float], list[dict[str, Any]]] = {}
        for task in tasks_of([one.plan for one in plans]):
            record = cache.read(task)
            if task.kind == "baseline":
                before = pd.DataFrame(record.value["frame"] if record else [])
            elif record is None:
                if task.kind == "del":
                    about = {"ratio": task.ratio, "sequence_id": task.name, "method": task.label}
                    missing.append(about | {"reason": reason_of(task, failures)})
            elif len(before):
                method, ablation = task.needs[1].label, {"ablation": record.value["ablation"]}
                for effect, budget in zip(
                    record.value["effects"], task.inputs["budgets"], strict=True
                ):
                    row = row_of(effect, before, method, task.ratio) | ablation
                    if task.kind == "del":
                        effects.setdefault((method, task.ratio), []).append(effect)
                        rows.append(row)
                    else:
                        single.setdefault(method, []).append(
                            row | {name: budget[name] for name in ("layer", "multiple")}
                        )
        if not rows and not single:
            before = pd.DataFrame()
        ids = list(before.get("sequence_id", []))
        ablated = {
            key: pd.Index([ids[one["target"]] for one in part], name="ablated")
            for key, part in effects.items()
        }
        measured = pd.Index(ids, name="measured")
        confusion, levenshtein = (
            {
                key: pd.DataFrame([one[name] for one in part], ablated[key], measured)
                for key, part in effects.items()
            }
            for name in ("accuracy", "levenshtein")
        )
        by_layer = {
            method: pd.DataFrame(part).astype({"layer": "Int64"}) for method, part in single.items()
        }
        return cls(
            pd.DataFrame(rows),
            before,
            confusion,
            levenshtein,
            settings_of(plans),
            pd.DataFrame(missing),
            by_layer,
        )

    def __repr__(self) -> str:
        if not len(self.frame):
            return "DelResults(nothing measured)"
        ratios = ", ".join(f"{100 * ratio:g} %" for ratio in self.frame["ratio"].unique())
        counts = (
            f"{self.frame['sequence_id'].nunique()} targets x {self.frame['method'].nunique()} "
            "methods"
        )
        return f"DelResults({counts}, {ratios} of each layer ablated)"

    def _repr_html_(self) -> str:
        if not len(self.frame):
            return f"<div>{self!r}</div>"
        return styled(
            self.table(), f"{self!r}: after minus before, mean \u00b1 standard error over targets"
        )

    def summary(self) -> pd.DataFrame:
        """Mean and standard error over targets: model, ablation, method, ratio, metric, mean,
        standard_error, n.
        """
        keys = ["model", "ablation", "method", "ratio"]
        parts = [summarize(self.frame, keys, metric).assign(metric=metric) for metric in METRICS]
        return pd.concat(parts, ignore_index=True).reindex(
            columns=[*keys, "metric", "mean", "standard_error", "n"]
        )

    def curve(self) -> pd.DataFrame:
        """Self over Neg as more is ablated: means in points over the targets that a method has at
        all its ratios.

        A fixed ratio compares what methods erase at different prices. At one Neg, the lower Self is
        better.

        Returns:
            one row per method and ratio (per model and ablation): self, self_error, neg, neg_error
            (standard errors over targets), n.
        """
        rows: list[tuple[Any, ...]] = []
        for key, (ratios, own, neg) in self._curves().items():
            for i, ratio in enumerate(ratios):
                rows.append(
                    (*key, ratio, *mean_and_error(own[:, i]), *mean_and_error(neg[:, i]), len(own))
                )
        return pd.DataFrame(
            rows,
            columns=[
                "model",
                "ablation",
                "method",
                "ratio",
                "self",
                "self_error",
                "neg",
                "neg_error",
                "n",
            ],
        )

    def at_price(self) -> pd.DataFrame:
        """Self (points) where the others lose 0.5, 1 and 3 points (Neg), on the curve of each
        method: what it buys at a price.

        The curve begins with nothing ablated and is linear between the ratios; ``-`` where it ends
        at a lower price, and the last column says where it ends. Errors are jackknife errors over
        targets; there is none where the curve needs each target to get so far.

        Returns:
            text, one row per method (per model, ablation and method where there are several).
        """
        keys = [i for i, key in enumerate(("model", "ablation")) if self.frame[key].nunique() > 1]
        rows: dict[Any, dict[str, str]] = {}
        curves = self._curves()
        for key, (ratios, own, neg) in curves.items():
            row = {f"Self at Neg = -{price:g}": _at(price, own, neg) for price in PRICES}
            ends = " / ".join(with_error(x[:, -1]) for x in (own, neg))
            row |= {"the curve ends at": f"{ends} ({100 * ratios[-1]:g} %)"}
            if len({len(one) for _, one, _ in curves.values()}) > 1:
                row |= {"targets": f"{len(own)}"}
            rows[(*(key[i] for i in keys), key[-1]) if keys else key[-1]] = row
        return pd.DataFrame(rows).T

    def _curves(self) -> dict[tuple[str, str, str], tuple[list[float], np.ndarray, np.ndarray]]:
        """By model, ablation and method: the ratios, and Self and Neg in points, [target ratio]."""
        columns, found = ["delta_self_accuracy", "delta_neg_accuracy"], dict[Any, Any]()
        for key, part in self.frame.groupby(["model", "ablation", "method"], sort=False):
            wide: Any = (
                100 * part.pivot(index="sequence_id", columns="ratio", values=columns).dropna()
            )
            if len(wide):
                found[key] = (
                    [float(ratio) for ratio in wide[columns[0]]],
                    *(wide[name].to_numpy(dtype=float) for name in columns),
                )
        return found

    def table(self) -> pd.DataFrame:
        """The paper's DEL table as text: a block for each ratio, a row for each method, mean ±
        standard error over targets.

        Accuracies are in percentage points. Self should fall (distance: rise), the others should
        stay. Where methods have different numbers of targets, a column says how many.
        """
        blocks: dict[str, pd.DataFrame] = {}
        frame: Any = self.frame
        several = frame["model"].nunique() > 1
        for (model, ablation, ratio), block in frame.groupby(
            ["model", "ablation", "ratio"], sort=False
        ):
            rows = {
                method: {
                    title: with_error(factor * part[column], decimals)
                    for column, (title, factor, decimals) in METRICS.items()
                }
                for method, part in block.groupby("method", sort=False)
            }
            counts = block.groupby("method").size()
            if counts.nunique() > 1:
                rows = {
                    method: row | {"targets": f"{counts[method]}"} for method, row in rows.items()
                }
            parts = [
                f"{100 * ratio:g} % of each layer",
                f"{block['sequence_id'].nunique()} sequences",
            ]
            if len(self.missing):
                lacking = self.missing[self.missing["ratio"] == ratio]["method"]
                parts.append(f"{len(lacking)} measurements MISSING")
                rows = {
                    method: row | {"missing": f"{(lacking == method).sum()}"}
                    for method, row in rows.items()
                }
            name = ", ".join(
                [*([model] if several else []), *([] if ablation == "zero" else [ablation]), *parts]
            )
            blocks[name] = pd.DataFrame(rows).T
        return pd.concat(blocks)

    def before_table(self) -> pd.DataFrame:
        """How well each model memorizes the test sequences, as text: the paper's table of accuracy,
        distance, perplexity and length.
        """
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
        """One-tailed paired t-tests: does a method lower Self accuracy more than the reference?
        Bonferroni over models and ratios.
        """
        return compare_with_reference(
            self.frame,
            reference,
            "delta_self_accuracy",
            ["model", "ablation", "ratio"],
            larger_is_better=False,
        )

    def pairs(self) -> pd.DataFrame:
        """Each method against every other: difference of Self accuracy in points, row minus column,
        and p that the row lowers it more.

        At the largest ratio, by one-tailed paired t-tests over the targets that both have,
        uncorrected. Text, one row per method.
        """
        largest = self.frame[self.frame["ratio"] == self.frame["ratio"].max()]
        return compare_all(
            largest, "delta_self_accuracy", ["model", "ablation", "ratio"], larger_is_better=False
        )

    def related(self) -> pd.DataFrame:
        """Are sequences of the target's own category hurt more than others?

        Over targets whose category has another sequence: change of accuracy of these and of the
        sequences of other categories, means over targets of means over sequences, and the
        one-tailed paired t-test that the related ones fall more.

        Returns:
            one row per method and ratio: related, related_error, unrelated, unrelated_error,
            p_value, n. Empty without categories.
        """
        category = self._categories()
        rows: list[tuple[Any, ...]] = []
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
                means = (*mean_and_error(related), *mean_and_error(unrelated))
                rows.append(
                    (method, ratio, *means, paired_test(related, unrelated, "less"), len(pairs))
                )
        columns = [
            "method",
            "ratio",
            "related",
            "related_error",
            "unrelated",
            "unrelated_error",
            "p_value",
            "n",
        ]
        return pd.DataFrame(rows, columns=columns)

    def confusion_by_category(self, method: str, ratio: float) -> pd.DataFrame:
        """Change of accuracy, [ablated measured], sequences of one category side by side; both axes
        are (category, id).
        """
        if (method, ratio) not in self.confusion:
            raise ValueError(
                f"method and ratio must be one of {sorted(self.confusion)}, got {(method, ratio)}."
            )
        category = self._categories()
        order = list(dict.fromkeys(category.values()))
        matrix = self.confusion[method, ratio]
        for axis in (0, 1):
            names = sorted(matrix.axes[axis], key=lambda name: order.index(category[name]))
            labels = pd.MultiIndex.from_tuples(
                [(category[name], name) for name in names], names=["category", "id"]
            )
            matrix = matrix.reindex(names, axis=axis).set_axis(labels, axis=axis)
        return matrix

    def _categories(self) -> dict[str, str]:
        return dict(zip(self.before["sequence_id"], self.before["category"], strict=True))

    @classmethod
    def join(cls, results: Sequence[DelResults]) -> DelResults:
        """Runs of several methods, ablations or models as one; what two runs share (Random) is kept
        once.

        Confusion matrices are kept where all runs are of one model and one ablation; of two of one
        name, that of more targets.
        """
        keys = ["model", "ablation", "method", "ratio", "sequence_id"]
        frame: Any = pd.concat([part.frame for part in results], ignore_index=True).drop_duplicates(
            keys, ignore_index=True
        )
        before: Any = pd.concat([part.before for part in results], ignore_index=True)
        matrices: tuple[dict[tuple[str, float], pd.DataFrame], ...] = {}, {}
        for part in results if len(frame[["model", "ablation"]].drop_duplicates()) == 1 else ():
            for found, more in zip(
                matrices, (part.confusion, part.confusion_levenshtein), strict=True
            ):
                found |= {
                    key: matrix
                    for key, matrix in more.items()
                    if len(matrix) > len(found.get(key, ()))
                }
        unique = before.drop_duplicates(["model", "sequence_id"], ignore_index=True)
        return cls(
            frame,
            unique,
            *matrices,
            {"runs": [run for part in results for run in part.settings.get("runs", [])]},
        )

    def save(self, folder: str | Path) -> None:
        """Write frame.csv, before.csv, summary.csv, confusion.csv, missing.csv and settings.json,
        each whole or not at all.
        """
        frames = {
            "frame": self.frame,
            "before": self.before,
            "summary": self.summary(),
            "missing": self.missing,
        }
        if self.confusion:
            both = {
                "accuracy": pd.concat(self.confusion),
                "levenshtein": pd.concat(self.confusion_levenshtein),
            }
            frames["confusion"] = pd.concat(
                both, names=["change of", "method", "ratio", "ablated"]
            ).reset_index()
        save_results(folder, self.settings, frames)


def _at(price: float, own: np.ndarray, neg: np.ndarray) -> str:
    """Self where Neg is first so low, with its error, from Self and Neg in points, [target ratio]."""

    def at(some: np.ndarray) -> float:
        return interpolated_at(price, -neg[some].mean(0), own[some].mean(0))

    everyone = np.arange(n := len(own))
    found, without = at(everyone), [at(np.delete(everyone, i)) for i in everyone] if n > 1 else []
    return "-" if math.isnan(found) else mean_text(found, jackknife(without))


def row_of(
    effect: dict[str, Any], before: pd.DataFrame, method: str, ratio: float
) -> dict[str, Any]:
    """A row of the frame, without the ablation."""
    i, was = effect["target"], {name: before[name].to_numpy() for name in before.columns}
    row: dict[str, Any] = {name: was[name][i] for name in ("model", "sequence_id", "category")}
    row |= {"method": method, "ratio": ratio, "n_neurons": effect["n_neurons"]}
    for name in ("accuracy", "levenshtein"):
        row |= {
            f"delta_self_{name}": effect[name][i],
            f"delta_neg_{name}": mean_of_others(effect[name], i),
        }
        row |= {
            f"self_{name}_before": float(was[name][i]),
            f"neg_{name}_before": mean_of_others(was[name], i),
        }
    for name in ("perplexity", "perplexity_base2"):
        row |= {f"delta_{name}": effect[name], f"{name}_before": float(was[name][i])}
    return row


def mean_of_others(values: Sequence[float] | np.ndarray, index: int) -> float:
    """Mean over all but one; nan where there is no other."""
    return float(np.delete(values, index).mean()) if len(values) > 1 else math.nan
