"""What INJ measured: one row per sentence, method and ratio, and the tables of them."""

from typing import Any, ClassVar

import pandas as pd

from tl_localize.evals.shared import Measured, count_missing, means_of, stack_blocks
from tl_localize.stats import compare_with_reference, with_error


class InjResults(Measured):
    """What INJ measured.

    Args:
        frame: one row per sequence x method x ratio: model, sequence_id, method, injection_ratio,
            seed, group (the sequence itself without distractors), converged, loss, steps, ratio and
            multiple (of the top share looked at), recall (top share of each layer) and
            recall_across_layers (top share of the model), the same of the other sentences' rows as
            foreign_recall, seconds.
        settings: what it was measured with.
        missing: what a run was asked for and has not got, one row per sentence or group x method:
            method, part, scope (the injection ratio), reason.

    >>> inj_results
    InjResults(2 sequences x 3 methods)
    """

    caption = "recall in percent (with distractors of the target's / the distractors' rows)"
    columns: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("model", "sequence_id", "method", "group"), "object"),
        **dict.fromkeys(("seed", "steps", "multiple"), "int64"),
        **dict.fromkeys(("injection_ratio", "ratio", "loss", "seconds"), "float64"),
        **dict.fromkeys(("recall", "recall_across_layers"), "float64"),
        **dict.fromkeys(("foreign_recall", "foreign_recall_across_layers"), "float64"),
        "converged": "bool",
    }

    @property
    def distractors(self) -> bool:
        """Whether several sentences were in one model."""
        return bool("foreign_recall" in self.frame and self.frame["foreign_recall"].notna().any())

    def table(self, across_layers: bool = False) -> pd.DataFrame:
        """Recall in percent, mean and standard error, in the layout of the paper's table.

        The error is over sentences; with distractors it is over groups, and each cell reads recall
        of the target's / the distractors' rows. Injections that did not converge are left out of
        the means; the row label of each ratio says how many there were.

        Args:
            across_layers: top share of the whole model (the paper's global table) in place of each
                layer.
        """
        self._check_one_model()
        columns = ["recall", "foreign_recall"] if self.distractors else ["recall"]
        if across_layers:
            columns = [f"{column}_across_layers" for column in columns]
        blocks: dict[str, pd.DataFrame] = {}
        groups: Any = self.frame.groupby("injection_ratio", sort=False)
        for ratio, block in groups:
            label, used = converged_part(block)
            rows: dict[Any, dict[str, str]] = {}
            for (method, multiple), part in used.groupby(["method", "multiple"], sort=False):
                # the sentences of a group share a model
                means = 100 * part.groupby("group", sort=False)[columns].mean()
                cell = " / ".join(with_error(means[column]) for column in columns)
                rows.setdefault(method, {})[f"R@{multiple:g}x"] = cell
            table = pd.DataFrame(rows).T
            if len(self.missing):
                lacking = self.missing[self.missing["scope"] == f"{ratio:g}"]
                label += count_missing(table, lacking)
            blocks[f"ratio {100 * ratio:g} %, {label}"] = table
        return stack_blocks(blocks, [f"R@{multiple}x" for multiple in (1, 2, 5)])

    def summary(self) -> pd.DataFrame:
        """The numbers of ``table``: injection_ratio, method, multiple, metric, mean, standard_error
        and n, the number of groups (without distractors sentences) whose injections converged; no
        row where none did. Recalls are fractions.
        """
        self._check_one_model()
        metrics = ["recall", "recall_across_layers"]
        if self.distractors:
            metrics += [f"foreign_{name}" for name in metrics]
        keys = ["injection_ratio", "method", "multiple"]
        used = self.frame.query("converged")
        groups = used.groupby([*keys, "group"], sort=False)[metrics].mean()
        return means_of(groups.reset_index(), keys, metrics)

    def tests(self, reference: str = "integrated_gradients") -> pd.DataFrame:
        """One-tailed paired t-tests: does a method recall more than the reference?
        Bonferroni-corrected, converged injections only.

        Pairs are sentences; with distractors they are groups, whose sentences share a model.
        """
        self._check_one_model()
        used = self.frame.query("converged")
        keys = ["group", "method", "injection_ratio", "ratio"]
        means = used.groupby(keys, sort=False)["recall"].mean().reset_index()
        pairs = means.rename(columns={"group": "sequence_id"})
        return compare_with_reference(pairs, reference, "recall", ["injection_ratio", "ratio"])


def converged_part(block: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """A label that counts the injections that did not converge, and the rows of those that did (all
    rows if none did).
    """
    state = block.drop_duplicates(["sequence_id", "seed"])["converged"]
    n = len(state)
    failed = int((~state).sum())
    if failed == n:
        return f"NONE of {n} injections converged", block
    label = f"{n - failed} sentence{'s' * (n - failed != 1)}" + (
        f" ({failed} more did NOT converge and are left out)" if failed else ""
    )
    return label, block.query("converged")
