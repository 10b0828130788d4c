"""What DEL measured: one row per target, method and ratio, and the tables that are made of them."""

from __future__ import annotations

import math
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
RUN = ["model", "ablation", "method"]  # what has a curve of its own
Matrices = dict[tuple[str, float], pd.DataFrame]  # by method and ratio, [ablated measured]


@dataclass(frozen=True, eq=False)
class DelResults:
    """What DEL measured. A delta is after minus before; accuracies are fractions, distances
    characters, perplexities exp of nats.

    Args:
        frame: One row per target x method x ratio: model, sequence_id, category, method, ratio,
            ablation, n_neurons, delta_self_accuracy, delta_self_levenshtein, delta_neg_accuracy,
            delta_neg_levenshtein (means over the other test sequences, nan where there is none),
            delta_perplexity, delta_perplexity_base2 (2 ** nats, as published), and what they were
            before.
        before: One row per test sequence: model, sequence_id, category, prefix and suffix (text),
            accuracy, levenshtein, length (characters of the suffix), perplexity, perplexity_base2
            (of the general text: one number for all).
        confusion: (method, ratio) -> change of accuracy, [ablated measured].
        confusion_levenshtein: The same for the distance.
        settings: What it was measured with.
        missing: What a run was asked for and has not got, one row per sequence x method x ratio:
            ratio, sequence_id, method, reason.

    >>> DelBenchmark(model, few, text, ratios=(0.005,), n_dev=1).run([Activations()])
    DelResults(2 targets x 2 methods, 0.5 % of each layer ablated)
    """

    frame: pd.DataFrame
    before: pd.DataFrame
    confusion: Matrices = field(default_factory=dict)
    confusion_levenshtein: Matrices = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    missing: pd.DataFrame = field(default_factory=pd.DataFrame)

    @classmethod
    def of(cls, cache: Cache) -> DelResults:
        """Everything that the plans of a folder, or of a run in memory, have so far."""
        before, effects = measured(cache, "del")
        frame = frame_of(effects, before)
        plans, failures = cache.plans(), cache.failures()
        missing: list[dict[str, Any]] = []
        for task in tasks_of([one.plan for one in plans]):
            if task.kind == "del" and cache.read(task) is None:
                about = {"ratio": task.ratio, "sequence_id": task.name, "method": task.label}
                missing.append({**about, "reason": reason_of(task, failures)})
        return cls(
            frame,
            before if len(frame) else pd.DataFrame(),
            _matrices("accuracy", effects, frame, before),
            _matrices("levenshtein", effects, frame, before),
            settings_of(plans),
            pd.DataFrame(missing),
        )

    def __repr__(self) -> str:
        if not len(self.frame):
            return "DelResults(nothing measured)"
        ratios = ", ".join(f"{100 * ratio:g} %" for ratio in self.frame["ratio"].unique())
        n_targets, n_methods = self.frame[["sequence_id", "method"]].nunique()
        counts = f"{n_targets} targets x {n_methods} methods"
        return f"DelResults({counts}, {ratios} of each layer ablated)"

    def _repr_html_(self) -> str:
        if not len(self.frame):
            return f"<div>{self!r}</div>"
        return styled(
            self.table(), f"{self!r}: after minus before, mean \u00b1 standard error over targets"
        )

    def summary(self) -> pd.DataFrame:
        """The numbers of ``table``: model, ablation, method, ratio, metric, mean, standard_error
        and n, the number of targets. Accuracies are fractions.
        """
        keys = [*RUN, "ratio", "metric"]
        long = self.frame.melt([*RUN, "ratio"], list(METRICS), "metric")
        values = long.groupby(keys, sort=False)["value"]
        return values.agg(mean="mean", standard_error="sem", n="size").reset_index()

    def curve(self) -> pd.DataFrame:
        """Self over Neg as more is ablated: means in points over the targets that a method has at
        all its ratios.

        A fixed ratio compares what methods erase at different prices. At one Neg, the lower Self is
        better.

        Returns:
            One row per method and ratio (per model and ablation): self, self_error, neg, neg_error
            (standard errors over targets), n.
        """
        parts: dict[Any, pd.DataFrame] = {}
        for key, points in self._points().items():
            parts[key] = pd.DataFrame({"n": len(points)}, points["self"].columns)
            for name in ("self", "neg"):
                parts[key][name] = points[name].mean()
                parts[key][f"{name}_error"] = points[name].sem()
        return pd.concat(parts, names=[*RUN, "ratio"]).reset_index() if parts else pd.DataFrame()

    def at_price(self) -> pd.DataFrame:
        """Self (points) where the others lose 0.5, 1 and 3 points (Neg), on the curve of each
        method: what it buys at a price.

        The curve begins with nothing ablated and is linear between the ratios; ``-`` where it ends
        at a lower price, and the last column says where it ends. Errors are jackknife errors over
        targets; there is none where the curve needs each target to get so far.

        Returns:
            Text, one row per method (per model, ablation and method where there are several).
        """
        curves = self._points()
        rows: dict[Any, dict[str, str]] = {}
        for key, points in curves.items():
            own, neg = points["self"].to_numpy(), points["neg"].to_numpy()
            row = {f"Self at Neg = -{price:g}": _at(price, own, neg) for price in PRICES}
            ends = f"{with_error(own[:, -1])} / {with_error(neg[:, -1])}"
            row["the curve ends at"] = f"{ends} ({100 * points['self'].columns[-1]:g} %)"
            rows[key] = row | {"targets": f"{len(points)}"}
        table = pd.DataFrame(rows).T
        if len(table) and table["targets"].nunique() == 1:
            table = table.drop(columns="targets")
        for name in ("ablation", "model"):
            if self.frame[name].nunique() == 1:
                table = table.droplevel(RUN.index(name))
        return table

    def _points(self) -> dict[tuple[str, str, str], pd.DataFrame]:
        """By model, ablation and method: Self and Neg in points, [target (self or neg, ratio)], of
        the targets that have all ratios.
        """
        names = {"delta_self_accuracy": "self", "delta_neg_accuracy": "neg"}
        found: dict[Any, pd.DataFrame] = {}
        for key, part in self.frame.rename(columns=names).groupby(RUN, sort=False):
            wide = part.pivot(index="sequence_id", columns="ratio", values=["self", "neg"]).dropna()
            if len(wide):
                found[key] = 100 * wide
        return found

    def table(self) -> pd.DataFrame:
        """The paper's DEL table as text: a block for each ratio, a row for each method, mean ±
        standard error over targets.

        Accuracies are in percentage points. Self should fall (distance: rise), the others should
        stay. Where methods have different numbers of targets, a column says how many.
        """
        blocks: dict[str, pd.DataFrame] = {}
        groups: Any = self.frame.groupby(["model", "ablation", "ratio"], sort=False)
        for (model, ablation, ratio), block in groups:
            rows: dict[Any, dict[str, str]] = {}
            for method, part in block.groupby("method", sort=False):
                rows[method] = {
                    title: with_error(factor * part[column], decimals)
                    for column, (title, factor, decimals) in METRICS.items()
                }
            table = pd.DataFrame(rows).T
            counts = block["method"].value_counts()
            if counts.nunique() > 1:
                table["targets"] = [f"{counts[method]}" for method in rows]
            name = f"{100 * ratio:g} % of each layer, {block['sequence_id'].nunique()} sequences"
            if len(self.missing):
                lacking = self.missing.loc[self.missing["ratio"] == ratio, "method"]
                table["missing"] = [f"{(lacking == method).sum()}" for method in rows]
                name += f", {len(lacking)} measurements MISSING"
            if ablation != "zero":
                name = f"{ablation}, {name}"
            if self.frame["model"].nunique() > 1:
                name = f"{model}, {name}"
            blocks[name] = table
        return pd.concat(blocks)

    def before_table(self) -> pd.DataFrame:
        """How well each model memorizes the test sequences, as text: the paper's table of accuracy,
        distance, perplexity and length.
        """
        rows = {
            model: {
                "Acc (%)": with_error(100 * part["accuracy"], 1),
                "Dist (characters)": with_error(part["levenshtein"], 2),
                "PPL": f"{part['perplexity'].iloc[0]:.2f}",
                "PPL (2 ** nats)": f"{part['perplexity_base2'].iloc[0]:.2f}",
                "Len (characters)": f"{part['length'].mean():.0f}",
                "Sequences": f"{len(part)}",
            }
            for model, part in self.before.groupby("model", sort=False)
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
            One row per method and ratio: related, related_error, unrelated, unrelated_error,
            p_value, n. Empty without categories.
        """
        categories = self.before.set_index("sequence_id")["category"]
        rows: list[dict[str, Any]] = []
        for (method, ratio), matrix in self.confusion.items():
            own = categories[matrix.index].to_numpy()[:, None]
            same = own == categories[matrix.columns].to_numpy()
            itself = matrix.index.to_numpy()[:, None] == matrix.columns.to_numpy()
            means = pd.DataFrame(
                {
                    "related": matrix.where(same & ~itself).mean(axis=1),
                    "unrelated": matrix.mask(same).mean(axis=1),
                }
            )
            means = means[own != ""].dropna()
            if len(means):
                row: dict[str, Any] = {"method": method, "ratio": ratio}
                for name in means:
                    row[name], row[f"{name}_error"] = mean_and_error(means[name])
                row["p_value"] = paired_test(means["related"], means["unrelated"], "less")
                rows.append({**row, "n": len(means)})
        return pd.DataFrame(rows)

    def confusion_by_category(self, method: str, ratio: float) -> pd.DataFrame:
        """Change of accuracy, [ablated measured], sequences of one category side by side; both axes
        are (category, id).
        """
        if (method, ratio) not in self.confusion:
            raise ValueError(
                f"method and ratio must be one of {sorted(self.confusion)}, got {(method, ratio)}."
            )
        matrix = self.confusion[method, ratio]
        groups = self.before.groupby("category", sort=False)["sequence_id"]
        labels = [(category, name) for category, names in groups for name in names]
        for axis in (0, 1):
            found = [label for label in labels if label[1] in matrix.axes[axis]]
            index = pd.MultiIndex.from_tuples(found, names=["category", "id"])
            matrix = matrix.reindex([name for _, name in found], axis=axis).set_axis(
                index, axis=axis
            )
        return matrix

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
            names = ["change of", "method", "ratio", "ablated"]
            frames["confusion"] = pd.concat(both, names=names).reset_index()
        save_results(folder, self.settings, frames)


def measured(cache: Cache, kind: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What the tasks of a kind have measured so far: the sequences before, and a row for each
    effect.
    """
    before = pd.DataFrame()
    effects: list[dict[str, Any]] = []
    for task in tasks_of([one.plan for one in cache.plans()]):
        record = cache.read(task) if task.kind in ("baseline", kind) else None
        if record and task.kind == "baseline":
            before = pd.DataFrame(record.value["frame"])
        elif record:
            about = {"method": task.label, "ratio": task.ratio}
            about["ablation"] = record.value["ablation"]
            effects += [{**about, **effect} for effect in record.value["effects"]]
    return before, pd.DataFrame(effects if len(before) else [])


def frame_of(effects: pd.DataFrame, before: pd.DataFrame) -> pd.DataFrame:
    """Of each effect the target (self), and the mean over the other sequences (neg)."""
    if not len(effects):
        return pd.DataFrame()
    targets = before.loc[effects["target"]].reset_index(drop=True)
    frame = targets[["model", "sequence_id", "category"]].join(
        effects[["method", "ratio", "ablation", "n_neurons"]]
    )
    own = np.arange(len(before)) == effects[["target"]].to_numpy()  # [effect sequence]
    for name in ("accuracy", "levenshtein"):
        changes = pd.DataFrame(effects[name].tolist())
        was = pd.DataFrame([before[name].tolist()] * len(effects))
        for column, values in ((f"delta_%s_{name}", changes), (f"%s_{name}_before", was)):
            frame[column % "self"] = values.where(own).sum(axis=1)
            frame[column % "neg"] = values.mask(own).mean(axis=1)
    for name in ("perplexity", "perplexity_base2"):
        frame[f"delta_{name}"], frame[f"{name}_before"] = effects[name], targets[name]
    return frame


def _matrices(
    name: str, effects: pd.DataFrame, frame: pd.DataFrame, before: pd.DataFrame
) -> Matrices:
    """Changes of one measure by method and ratio, [ablated measured]."""
    matrices: Matrices = {}
    if len(frame):
        changes = pd.DataFrame(effects[name].tolist(), frame["sequence_id"], before["sequence_id"])
        changes = changes.rename_axis("ablated").rename_axis("measured", axis=1)
        groups: Any = frame.groupby(["method", "ratio"], sort=False)
        for key, part in groups:
            matrices[key] = changes.iloc[part.index]
    return matrices


def _at(price: float, own: np.ndarray, neg: np.ndarray) -> str:
    """Self where Neg is first so low, with its error, from Self and Neg in points, both [target
    ratio].
    """
    found = interpolated_at(price, -neg.mean(0), own.mean(0))
    if math.isnan(found):
        return "-"
    without: list[float] = []
    for i in range(len(own)) if len(own) > 1 else ():
        costs, gains = -np.delete(neg, i, 0).mean(0), np.delete(own, i, 0).mean(0)
        without.append(interpolated_at(price, costs, gains))
    return mean_text(found, jackknife(without))
