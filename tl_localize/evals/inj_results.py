"""What INJ measured: one row per sentence, method and ratio, and the tables of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.evals.localize import save_results, settings_of
from tl_localize.execution.status import reason_of
from tl_localize.execution.store import Cache
from tl_localize.execution.tasks import tasks_of
from tl_localize.stats import compare_all, compare_with_reference, paired_test, styled, with_error

TRUE_ROWS = "true_rows"  # the rows of the truth itself: the best that a method could do
FRAMES = ("frame", "truth", "assignment", "missing")


@dataclass(frozen=True, eq=False)
class InjResults:
    """What INJ measured.

    Args:
        frame: one row per sequence x method x ratio: sequence_id, method, injection_ratio, seed,
            group (the sequence itself without distractors), converged, loss, steps, ratio and
            multiple (of the top share looked at), recall (top share of each layer) and
            recall_across_layers (top share of the model), the same of the other sentences' rows as
            foreign_recall, seconds. With distractors also delta_own_accuracy and
            delta_foreign_accuracy, the effect of ablating the top 1x of each layer.
        settings: what it was measured with, one record per run.
        truth: with distractors, one row per sequence: whether it stands in its own rows alone (see
            ``truth_table``).
        assignment: with distractors, one row per group x method x (localized, whose): share of
            whose rows among the top 1x.
        missing: what a run was asked for and has not got, one row per sentence or group x method:
            injection_ratio, group, method, reason.

    >>> InjBenchmark(model, [sequence], ratio=0.01, max_steps=2).run([Activations()])
    InjResults(1 sequences x 3 methods, injection ratio 1 %)
    """

    frame: pd.DataFrame
    settings: dict[str, Any] = field(default_factory=dict)
    truth: pd.DataFrame = field(default_factory=pd.DataFrame)
    assignment: pd.DataFrame = field(default_factory=pd.DataFrame)
    missing: pd.DataFrame = field(default_factory=pd.DataFrame)

    @classmethod
    def of(cls, cache: Cache) -> InjResults:
        """Everything that the plans of a folder, or of a run in memory, have so far."""
        plans, failures = cache.plans(), cache.failures()
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in FRAMES}
        tasks = tasks_of([one.plan for one in plans])
        for task in sorted(tasks, key=lambda task: task.kind == TRUE_ROWS):
            if record := cache.read(task):
                for name in FRAMES[:-1]:
                    rows[name] += record.value[name]
            else:
                about = {"injection_ratio": task.ratio, "group": task.name, "method": task.label}
                rows["missing"].append(about | {"reason": reason_of(task, failures)})
        return cls(
            settings=settings_of(plans), **{name: pd.DataFrame(part) for name, part in rows.items()}
        )

    def __repr__(self) -> str:
        if not len(self.frame):
            return "InjResults(nothing measured)"
        ratios = ", ".join(f"{100 * ratio:g} %" for ratio in self.frame["injection_ratio"].unique())
        counts = (
            f"{self.frame['sequence_id'].nunique()} sequences x {self.frame['method'].nunique()} "
            "methods"
        )
        form = ", with distractors" if self.distractors else ""
        return f"InjResults({counts}, injection ratio {ratios}{form})"

    def _repr_html_(self) -> str:
        if not len(self.frame):
            return f"<div>{self!r}</div>"
        unit = (
            "recall of the target's / the distractors' rows"
            if self.distractors
            else "recall of the injected rows"
        )
        return styled(self.table(), f"{self!r}: {unit} in percent, mean \u00b1 standard error")

    @property
    def distractors(self) -> bool:
        """Whether several sentences were in one model."""
        return len(self.truth) > 0

    def table(self, across_layers: bool = False) -> pd.DataFrame:
        """Recall in percent, mean and standard error, in the layout of the paper's table.

        The error is over sentences; with distractors it is over groups, and each cell reads recall
        of the target's / the distractors' rows. Injections that did not converge are left out of
        the means; the row label of each ratio says how many there were.

        Args:
            across_layers: top share of the whole model (the paper's global table) in place of each
                layer.
        """
        suffix = "_across_layers" if across_layers else ""
        columns = (
            [f"recall{suffix}", f"foreign_recall{suffix}"]
            if self.distractors
            else [f"recall{suffix}"]
        )
        blocks: dict[str, pd.DataFrame] = {}
        for (injection_ratio,), block in self.frame.groupby(["injection_ratio"], sort=False):
            label, used = converged_part(block)
            rows = {
                method: {
                    f"R@{multiple:g}x": " / ".join(percent(group, column) for column in columns)
                    for multiple, group in part.groupby("multiple", sort=False)
                }
                for method, part in used.groupby("method", sort=False)
            }
            if self.distractors:
                rows |= self._levels(used)
            if len(self.missing):
                lacking = self.missing[self.missing["injection_ratio"] == injection_ratio]["method"]
                label += f", {len(lacking)} measurements MISSING"
                rows = {
                    method: {**row, "missing": str(int((lacking == method).sum()))}
                    for method, row in rows.items()
                }
            blocks[f"ratio {100 * float(str(injection_ratio)):g} %, {label}"] = pd.DataFrame(rows).T
        return pd.concat(blocks)

    def summary(self) -> pd.DataFrame:
        """The numbers of ``table``: injection_ratio, method, multiple, metric, mean, standard_error
        and n, the number of groups (without distractors sentences) whose injections converged.
        Recalls are fractions.
        """
        metrics = ["recall", "recall_across_layers"]
        if self.distractors:
            metrics += [f"foreign_{name}" for name in metrics]
        keys = ["injection_ratio", "method", "multiple", "metric"]
        used = self.frame[self.frame["converged"]]
        long = used.melt([*keys[:3], "group"], metrics, "metric")
        groups = long.groupby([*keys, "group"], sort=False)["value"].mean()
        values: Any = groups.groupby(level=keys, sort=False)
        return values.agg(mean="mean", standard_error="sem", n="size").reset_index()

    def _levels(self, used: pd.DataFrame) -> dict[str, dict[str, str]]:
        """What two kinds of ignorance score: knowing nothing, and knowing what was altered but not
        by which sentence.
        """
        size = used.groupby(["group", "multiple"])["sequence_id"].nunique().max()
        shares = {
            "level: chance": used["injection_ratio"].iloc[0],
            "level: altered rows of any sentence": 1 / size,
        }
        return {
            name: {
                f"R@{m:g}x": " / ".join([f"{100 * min(1, share * m):.1f}"] * 2)
                for m in used["multiple"].unique()
            }
            for name, share in shares.items()
        }

    def ablation_table(self) -> pd.DataFrame:
        """With distractors: change of accuracy in points when the found rows (top 1x of each layer)
        are ablated.

        ``true_rows`` is the best that can be done.
        """
        rows = self.frame[
            (self.frame["multiple"] == self.frame["multiple"].min()) & self.frame["converged"]
        ]
        columns = {"target": "delta_own_accuracy", "distractors": "delta_foreign_accuracy"}
        groups = rows.groupby("method", sort=False)
        return pd.DataFrame(
            {
                method: {name: percent(part, column) for name, column in columns.items()}
                for method, part in groups
            }
        ).T

    def truth_table(self) -> pd.DataFrame:
        """With distractors: accuracy in percent / loss in nats per token on the injected sentences,
        by which sets are on.

        Rows of sets that are off are those of the base model, or zeroed in the model that has all
        sets.
        """
        states = {
            "all_on": "all on",
            "own_alone": "own alone",
            "own_off": "own off",
            "other_off": "another off",
        }
        label, used = converged_part(self.truth)
        rows = {
            (label, how): {
                title: f"{percent(used, state + suffix)} / "
                + with_error(by_group(used, f"{state}{suffix}_loss"), 3)
                for state, title in states.items()
            }
            for how, suffix in (("off: rows of the base model", ""), ("off: zeroed", "_zeroed"))
        }
        return pd.DataFrame(rows).T

    def tests(self, reference: str = "integrated_gradients") -> pd.DataFrame:
        """One-tailed paired t-tests: does a method recall more than the reference?
        Bonferroni-corrected, converged injections only.

        Pairs are sentences; with distractors they are groups, whose sentences share a model.
        """
        return compare_with_reference(
            means_of(self.frame, "recall"), reference, "recall", ["injection_ratio", "ratio"]
        )

    def pairs(self, column: str = "recall") -> pd.DataFrame:
        """Each method against every other: difference of the recall in percent, row minus column,
        and p that the row's is larger.

        Among the smallest share looked at (1x), by one-tailed paired t-tests over sentences, with
        distractors over groups, uncorrected. Of ``foreign_recall`` the p is that the row's is
        smaller. Text, one row per method (per injection ratio, where there are several).
        """
        smallest = self.frame[self.frame["multiple"] == self.frame["multiple"].min()]
        return compare_all(
            means_of(smallest, column),
            column,
            ["injection_ratio"],
            larger_is_better=not column.startswith("foreign"),
        )

    def save(self, folder: str | Path) -> None:
        """Write the frames as CSV and ``settings.json``, each whole or not at all."""
        save_results(folder, self.settings, {name: getattr(self, name) for name in FRAMES})


def converged_part(block: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """A label that counts the injections that did not converge, and the rows of those that did (all
    rows if none did).
    """
    state = block.drop_duplicates(["sequence_id", "seed"])["converged"]
    n, failed = len(state), int((~state).sum())
    if failed == n:
        return f"NONE of {n} injections converged", block
    label = f"{n - failed} sentence{'s' * (n - failed != 1)}" + (
        f" ({failed} more did NOT converge and are left out)" if failed else ""
    )
    return label, block[block["converged"]]


def means_of(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Of each method and share, a column's mean over the sentences of a group that converged; the
    group is the ``sequence_id``.
    """
    used = rows[rows["converged"] & (rows["method"] != TRUE_ROWS)]
    keys = ["group", "method", "injection_ratio", "ratio"]
    return (
        used.groupby(keys, sort=False)[column]
        .mean()
        .reset_index()
        .rename(columns={"group": "sequence_id"})
    )


def by_group(rows: pd.DataFrame, column: str) -> pd.Series:
    """Mean of a column over the sentences of each group: what is independent of one another."""
    return rows.groupby("group", sort=False)[column].mean()


def percent(rows: pd.DataFrame, column: str) -> str:
    """Mean and standard error of a column over groups as text, in percent."""
    return with_error(100 * by_group(rows, column))


def compare_seeds(first: InjResults, second: InjResults) -> pd.DataFrame:
    """Do other random rows change the recall? Paired two-tailed t-tests, sentence by sentence,
    where both injections converged.

    Source: Chang et al. (2024), arXiv:2311.09060, A.6.
    """
    keys = ["sequence_id", "method", "injection_ratio", "ratio"]
    both = first.frame.merge(second.frame, on=keys, suffixes=("", "_other"))
    both = both[both["converged"] & both["converged_other"]]
    rows: list[tuple[Any, ...]] = []
    for key, group in both.groupby(keys[1:], sort=False):
        one, other = group["recall"], group["recall_other"]
        rows.append((*key, one.mean(), other.mean(), paired_test(one, other), len(group)))
    return pd.DataFrame(rows, columns=[*keys[1:], "recall", "recall_other_seed", "p_value", "n"])
