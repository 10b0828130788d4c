"""What DEL measured: one row per target, method and ratio, and the tables that are made of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd

from tl_localize.evals.shared import (
    Measured,
    count_missing,
    means_of,
    missing_of,
    rows_of,
    settings_of,
    stack_blocks,
    without_rows,
)
from tl_localize.execution.store import Steps
from tl_localize.stats import at_cost, compare_with_reference, in_percent, quantity, with_error
from tl_localize.units import NEURONS, UNITS, Units

METRICS: dict[str, tuple[str, int, int]] = {  # column: title, factor, decimals
    "delta_self_accuracy": ("Δ Self-Acc (points)", 100, 1),
    "delta_self_levenshtein": ("Δ Self-Dist (characters)", 1, 1),
    "delta_neg_accuracy": ("Δ Neg-Acc (points)", 100, 1),
    "delta_neg_levenshtein": ("Δ Neg-Dist (characters)", 1, 1),
    "delta_perplexity": ("Δ Rand-PPL", 1, 2),
    "delta_perplexity_base2": ("Δ Rand-PPL (2 ** nats)", 1, 2),
}
PRICES = (0.5, 1.0, 3.0, 5.0)  # points of Neg at which methods are compared
CHANGES = "accuracy_changes"  # of a row: the change of accuracy of each test sequence
Matrices = dict[tuple[str, float], pd.DataFrame]  # by method and ratio, [ablated measured]


@dataclass(frozen=True, eq=False, repr=False)
class DelResults(Measured):
    """What DEL measured. A delta is after minus before; accuracies are fractions, distances
    characters (tokens, where the model has no tokenizer), perplexities exp of nats.

    Args:
        frame: One row per target x method x ratio: model, sequence_id, category, method, ratio,
            ablation, n_neurons, n_layers (that they are in), delta_self_accuracy,
            delta_self_levenshtein, delta_neg_accuracy, delta_neg_levenshtein (means over the other
            test sequences, nan where there is none), delta_perplexity, delta_perplexity_base2
            (2 ** nats, as published), what they were before, and seconds of the scores.
        settings: What it was measured with.
        missing: What a run was asked for and has not got, one row per sequence x method x ratio:
            method, part (the sequence), scope (the ratio), reason.
        before: One row per test sequence: model, sequence_id, category, prefix and suffix (text),
            accuracy, levenshtein, length (characters of the suffix), perplexity, perplexity_base2
            (of the general text: one number for all).
        confusion: (method, ratio) -> change of accuracy, [ablated measured].
        single_layers: Rows of the study of single layers: the columns of ``frame``, and layer
            (missing where all layers are ablated) and multiple of the budget.

    >>> del_results
    DelResults(2 sequences x 2 methods)
    """

    caption = "after minus before"
    columns: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("model", "sequence_id", "category", "method", "ablation"), "object"),
        "ratio": "float64",
        "n_neurons": "int64",
        **dict.fromkeys(METRICS, "float64"),
    }
    before_columns: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("model", "sequence_id", "category", "prefix", "suffix"), "object"),
        **dict.fromkeys(("accuracy", "levenshtein", "perplexity", "perplexity_base2"), "float64"),
        "length": "int64",
    }
    before: pd.DataFrame = field(default_factory=pd.DataFrame)
    confusion: Matrices = field(default_factory=dict)
    single_layers: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.before):
            object.__setattr__(self, "before", without_rows(self.before_columns))

    @classmethod
    def of(cls, steps: Steps) -> "DelResults":
        """Everything that the runs of a folder, or of memory, have so far."""
        rows = list(rows_of(steps))
        before = pd.DataFrame([row for rows in steps.given("before") for row in rows])
        plain = [row for row in rows if "layer" not in row]
        single = pd.DataFrame([row for row in rows if "layer" in row])
        if len(single):
            single = single.drop(columns=CHANGES).astype({"layer": "Int64"})
        changes: dict[tuple[str, float], dict[str, list[float]]] = {}
        for row in plain if len(before) else []:
            of_set = changes.setdefault((row["method"], row["ratio"]), {})
            of_set[row["sequence_id"]] = row[CHANGES]
        confusion: Matrices = {}
        for key, by_target in changes.items():
            matrix = pd.DataFrame(
                list(by_target.values()), list(by_target), list(before["sequence_id"])
            )
            confusion[key] = matrix.rename_axis("ablated").rename_axis("measured", axis=1)
        frame = pd.DataFrame(plain).drop(columns=CHANGES, errors="ignore")
        about = settings_of(steps), missing_of(steps)
        return cls(frame, *about, before, confusion, single)

    @property
    def units(self) -> Units:
        """What was ablated, of those kinds that the package has; of other kinds it says neurons."""
        classes = {type(units).__name__: units for units in UNITS.values()}
        return classes.get(self.settings.get("units", {}).get("class", ""), NEURONS)

    @property
    def distances_in(self) -> str:
        """What distances and lengths count: tokens where the model has no tokenizer."""
        texts = self.before.get("prefix", ())  # a frame may be kept without its texts
        return "characters" if all(isinstance(text, str) for text in texts) else "tokens"

    def summary(self) -> pd.DataFrame:
        """The numbers of ``table``: model, ablation, method, ratio, metric, mean, standard_error
        and n, the number of targets. Accuracies are fractions.
        """
        keys = ["model", "ablation", "method", "ratio"]
        return means_of(self.frame, keys, list(METRICS))

    def at_price(self) -> pd.DataFrame:
        """Self (points) where the others lose 0.5, 1, 3 and 5 points (Neg), on the curve of each
        method: what it buys at a price. A fixed ratio compares what methods erase at different
        prices.

        The curve is linear between the ratios. Where its first ratio costs more than the price, the
        cell says how much: nothing was measured below it. ``-`` means that the curve ends before
        this price; ``the curve ends at`` says where. Errors are bootstrap errors over targets. A
        number has no error where one resample in forty ends before the price, or begins beyond it.

        Returns:
            Text, one row per method.
        """
        columns = [*(f"Self at Neg = -{price:g}" for price in PRICES), "the curve ends at"]
        rows: dict[str, list[str]] = {}
        for method, points in self.points().items():
            own, neg = points["self"].to_numpy(), points["neg"].to_numpy()
            row = [at_cost(price, -neg, own) for price in PRICES]
            ends = f"{with_error(own[:, -1])} / {with_error(neg[:, -1])}"
            row.append(f"{ends} ({100 * points['self'].columns[-1]:.4g} %)")
            rows[method] = [*row, f"{len(points)}"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=[*columns, "targets"])

    def points(self) -> dict[str, pd.DataFrame]:
        """Of each method Self and Neg in points, [target (self or neg, ratio)], of the targets that
        have all ratios; their means are its curve.
        """
        self._check_one_model()
        names = {"delta_self_accuracy": "self", "delta_neg_accuracy": "neg"}
        found: dict[str, pd.DataFrame] = {}
        for method, part in self.frame.rename(columns=names).groupby("method", sort=False):
            wide = part.pivot(index="sequence_id", columns="ratio", values=["self", "neg"]).dropna()
            if len(wide):
                found[str(method)] = 100 * wide
        return found

    def table(self) -> pd.DataFrame:
        """The paper's DEL table as text: a block for each ratio, a row for each method, mean ±
        standard error over targets.

        Accuracies are in percentage points. Self should fall (distance: rise), the others should
        stay.
        """
        self._check_one_model()
        metrics = {
            column: (title.replace("characters", self.distances_in), factor, decimals)
            for column, (title, factor, decimals) in METRICS.items()
        }
        blocks: dict[str, pd.DataFrame] = {}
        groups: Any = self.frame.groupby(["ablation", "ratio"], sort=False)
        for (ablation, ratio), block in groups:
            rows: dict[str, dict[str, str]] = {}
            for method, part in block.groupby("method", sort=False):
                row = {
                    title: with_error(factor * part[column], decimals)
                    for column, (title, factor, decimals) in metrics.items()
                }
                rows[str(method)] = row | {"targets": f"{len(part)}"}
            table = pd.DataFrame(rows).T
            n_sequences = block["sequence_id"].nunique()
            name = (
                f"{share_in_words(block, ratio, self.units)}, {quantity(n_sequences, 'sequence')}"
            )
            if len(self.missing):
                name += count_missing(table, self.missing[self.missing["scope"] == f"{ratio:g}"])
            name = name if ablation == "zero" else f"{ablation}, {name}"
            blocks[name if name not in blocks else f"{name}, ratio {ratio:g}"] = table
        titles = [title for title, _, _ in metrics.values()]
        return stack_blocks(blocks, [*titles, "targets"])

    def before_table(self) -> pd.DataFrame:
        """How well the model memorizes the test sequences, as text: the paper's table of accuracy,
        distance, perplexity and length.
        """
        before, unit = self.before, self.distances_in
        columns = ["Acc (%)", f"Dist ({unit})", "PPL", "PPL (2 ** nats)", f"Len ({unit})"]
        rows: dict[str, list[str]] = {}
        if len(before):
            rows[before["model"][0]] = [
                with_error(100 * before["accuracy"], 1),
                with_error(before["levenshtein"], 2),
                f"{before['perplexity'][0]:.2f}",
                f"{before['perplexity_base2'][0]:.2f}",
                f"{before['length'].mean():.0f}",
                f"{len(before)}",
            ]
        return pd.DataFrame.from_dict(rows, orient="index", columns=[*columns, "Sequences"])

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


def self_and_others(
    index: int, effect: Mapping[str, Any], before: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """What an ablation changed, after minus before: of the target (self), of the mean of the others
    (neg, nan where there is none) and of general text; and what they were before.

    Args:
        index: of the target.
        effect: what ``AblationMeter.effect`` gives.
        before: [sequence] the rows of ``DelResults.before``.
    """
    row: dict[str, float] = {}
    for name in ("accuracy", "levenshtein"):
        was = [float(intact[name]) for intact in before]
        for column, values in ((f"delta_%s_{name}", effect[name]), (f"%s_{name}_before", was)):
            others = [value for i, value in enumerate(values) if i != index]
            row[column % "self"] = values[index]
            row[column % "neg"] = sum(others) / len(others) if others else math.nan
    for name in ("perplexity", "perplexity_base2"):
        row[f"delta_{name}"] = effect[name]
        row[f"{name}_before"] = before[index][name]
    return row


def share_in_words(block: pd.DataFrame, ratio: float, units: Units) -> str:
    """What a ratio takes of each layer, as text. Of a ratio with more than four digits, such as
    1 / 1536, nobody but the number of units means anything.
    """
    percent = 100 * ratio
    if "per" in block and block["per"].eq("model").all():
        return f"{quantity(int(block['n_neurons'].max()), units.one)} of the model"
    n_layers = block.get("n_layers", pd.Series(dtype=float)).max()
    if math.isclose(percent, float(f"{percent:.4g}"), rel_tol=1e-9) or math.isnan(n_layers):
        return f"{percent:.4g} % of each layer"
    count = round(block["n_neurons"].max() / n_layers)
    return f"{quantity(count, units.one)} of each layer ({in_percent(ratio)})"
