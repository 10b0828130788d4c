"""What REV measured: one row per sentence, method, ratio and direction, and its tables."""

from typing import Any, ClassVar

import numpy as np
import pandas as pd

from tl_localize.checks import check_choice
from tl_localize.evals.shared import Measured
from tl_localize.stats import at_cost, mean_text, paired_test, with_error

PRICE = 5.0  # points that the others lose (put back) or gain (graft)
DIRECTIONS = {"put_back": "put back to the model before", "graft": "given to the model before"}


class RevResults(Measured):
    """What REV measured. A delta is after minus before; accuracies are fractions, losses nats per
    token.

    Args:
        frame: one row per sentence x method x ratio x direction: sequence_id, method, group,
            direction (``"put_back"`` or ``"graft"``), converged, steps, ratio, delta_own_accuracy,
            delta_others_accuracy (mean over the other sentences of the group, nan where there is
            none), delta_general_loss.
        settings: what it was measured with.
        missing: what a run was asked for and has not got, one row per group x method.

    >>> how = {"n_sequences": 1, "ratios": (0.1,), "recipe": Recipe(max_steps=2)}
    >>> RevBenchmark(model, [sequence], text, **how).run([Activations()])
    RevResults(1 sequences x 5 methods)
    """

    caption = "after minus before"
    columns: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("model", "sequence_id", "method", "group", "direction"), "object"),
        "converged": "bool",
        "steps": "int64",
        "ratio": "float64",
        **dict.fromkeys(("delta_own_accuracy", "delta_others_accuracy"), "float64"),
        "delta_general_loss": "float64",
    }

    def _used_rows(self) -> pd.DataFrame:
        """The rows of models that recited every sentence."""
        return self.frame.query("converged")

    def summary(self) -> pd.DataFrame:
        """Own over others as more units are exchanged: means over sentences, in points.

        Returns:
            one row per direction, method and ratio: own, own_error, others, others_error (standard
            errors over sentences), general (nats), n.
        """
        names = {"delta_own_accuracy": "own", "delta_others_accuracy": "others"}
        groups: Any = self._used_rows().groupby(["direction", "method", "ratio"], sort=False)
        parts: dict[str, Any] = {}
        for column, name in names.items():
            parts[name] = 100 * groups[column].mean()
            parts[f"{name}_error"] = 100 * groups[column].sem()
        parts["general"] = groups["delta_general_loss"].mean()
        parts["n"] = groups.size()
        return pd.DataFrame(parts).reset_index()

    def points(self, direction: str = "put_back") -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Of each method the change of own and of others in points, both [sentence ratio]."""
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        used = self._used_rows()
        for method, part in used[used["direction"] == direction].groupby("method", sort=False):
            wide = part.pivot(
                index=["group", "sequence_id"],
                columns="ratio",
                values=["delta_own_accuracy", "delta_others_accuracy"],
            )
            own, others = wide["delta_own_accuracy"], wide["delta_others_accuracy"]
            found[str(method)] = 100 * own.to_numpy(), 100 * others.to_numpy()
        return found

    def table(self, direction: str = "put_back", errors: bool = True) -> pd.DataFrame:
        """Own where the others changed by 5 points, and own / others in points by share.

        The first is on the curve of each method: linear between the shares, with jackknife errors
        over sentences; ``-`` where the curve ends before.

        Args:
            errors: the standard errors of own and others too, which make the table wide.

        Returns:
            text, one row per method.
        """
        sign = "-" if direction == "put_back" else "+"
        ratios = sorted(self.frame["ratio"].unique())
        columns = [f"own at others {sign}{PRICE:g}", *(f"{100 * ratio:g} %" for ratio in ratios)]
        rows: dict[str, list[str]] = {}
        for method, (own, others) in self.points(direction).items():
            row = [at_cost(PRICE, np.abs(others), own)]
            for i in range(len(ratios)):
                pair = [with_error(part[:, i]) for part in (own, others)]
                if not errors:
                    pair = [mean_text(float(part[:, i].mean()), np.nan) for part in (own, others)]
                row.append(" / ".join(pair))
            rows[method] = row
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns)

    def tests(self, reference: str = "activations") -> pd.DataFrame:
        """Does a method forget more than the reference at the same price? Two-sided paired t-tests
        over sentences of own minus others, at the share where own minus others is largest on
        average for each method, in points.
        """
        points = {method: own - others for method, (own, others) in self.points().items()}
        names = ["method", "reference", "difference", "p_value", "n"]
        if not points:
            return pd.DataFrame(columns=names)
        check_choice("reference", reference, points)
        best = {name: gaps[:, gaps.mean(0).argmin()] for name, gaps in points.items()}
        rows = [
            {
                "method": name,
                "reference": reference,
                "difference": float((gap - best[reference]).mean()),
                "p_value": paired_test(gap, best[reference]),
                "n": len(gap),
            }
            for name, gap in best.items()
            if name != reference
        ]
        return pd.DataFrame(rows, columns=names)
