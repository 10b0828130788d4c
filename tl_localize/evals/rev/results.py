"""What REV measured: one row per sentence, method, ratio and direction, and its tables."""

from typing import Any, ClassVar

import numpy as np
import pandas as pd

from tl_localize.checks import check_choice
from tl_localize.evals.shared import Measured, count_missing
from tl_localize.stats import at_cost, gain_at, mean_text, paired_test, with_error

MIN_MODELS = 8  # below it no p-value is given
ORACLES = ("oracle_mask", "oracle_rounds", "oracle_first_order")
PRICE = 5.0  # points that the others lose (put back) or gain (graft)
DIRECTIONS = {"put_back": "put back to the model before", "graft": "given to the model before"}


class RevResults(Measured):
    """What REV measured. A delta is after minus before; accuracies are fractions, losses nats per
    token.

    Args:
        frame: one row per sentence x method x ratio x direction: model, sequence_id, method, group,
            direction (``"put_back"`` or ``"graft"``), converged, steps, ratio, delta_own_accuracy,
            delta_others_accuracy (mean over the other sentences of the group, nan where there is
            none), delta_general_loss.
        settings: what it was measured with.
        missing: what a run was asked for and has not got, one row per group x method x ratio.

    >>> rev_results
    RevResults(1 sequences x 6 methods)
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

    def _by_model(self) -> pd.DataFrame:
        """Own and others in points, the means of each model over its sentences, by direction,
        method, ratio and group: the sentences of a model share its training.
        """
        columns = {"delta_own_accuracy": "own", "delta_others_accuracy": "others"}
        keys = ["direction", "method", "ratio", "group"]
        groups: Any = self._used_rows().rename(columns=columns).groupby(keys, sort=False)
        means = 100 * groups[list(columns.values())].mean()
        return means.assign(general=groups["delta_general_loss"].mean())

    def summary(self) -> pd.DataFrame:
        """Own over others as more units are exchanged: means over models of the means over their
        sentences, in points.

        Returns:
            one row per direction, method and ratio: own, own_error, others, others_error (standard
            errors over models), general (nats), n (models).
        """
        groups: Any = self._by_model().groupby(["direction", "method", "ratio"], sort=False)
        parts: dict[str, Any] = {}
        for name in ("own", "others"):
            parts[name] = groups[name].mean()
            parts[f"{name}_error"] = groups[name].sem()
        parts["general"] = groups["general"].mean()
        parts["n"] = groups.size()
        return pd.DataFrame(parts).reset_index()

    def points(self, direction: str = "put_back") -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Of each method the change of own and of others in points, both [model ratio], at the
        ratios that are measured on all of its models.
        """
        return {
            method: (wide["own"].to_numpy(), wide["others"].to_numpy())
            for method, wide in self._curves(direction).items()
        }

    def _curves(self, direction: str) -> dict[str, pd.DataFrame]:
        """``points`` of each method, [group (own or others, ratio)]."""
        means = self._by_model()
        means = means[means.index.get_level_values("direction") == direction]
        curves: dict[str, pd.DataFrame] = {}
        for method, part in means.groupby("method", sort=False):
            wide = part.reset_index().pivot(
                index="group", columns="ratio", values=["own", "others"]
            )
            whole = wide["own"].T.dropna().index
            if len(whole):
                curves[str(method)] = wide.loc[:, wide.columns.isin(whole, level="ratio")]
        return curves

    def table(self, direction: str = "put_back", errors: bool = True) -> pd.DataFrame:
        """Own where the others changed by 5 points, as it is and as a share of the best oracle's;
        own minus others at the share where that is largest; and own / others by share, in points.

        The first is on the curve of each method, which is linear between the shares. Where the
        curve ends before, it is own at the largest share and what that costs, and where the first
        share costs more, what that costs. Errors are over models (of the first, by bootstrap);
        one model has none.

        Args:
            errors: also the standard errors of own and others, the share of the oracle and own
                minus others, which make the table wide.

        Returns:
            text, one row per method. A column counts the models that are missing, where some are.
        """
        sign = "-" if direction == "put_back" else "+"
        ratios = sorted(self.frame["ratio"].unique())
        curves = self._curves(direction)
        points = self.points(direction)
        oracles = [_gain(*points[name], direction) for name in ORACLES if name in points]
        best = max((gain for gain in oracles if gain > 0), default=np.nan)
        rows: dict[str, dict[str, str]] = {}
        for method, (own, others) in points.items():
            at_price = at_cost(PRICE, _cost(others, direction), own)
            alone = bool(np.isnan(others).all())
            if at_price == "-" and not alone:
                at_price = f"{own[:, -1].mean():.1f} at {others[:, -1].mean():+.1f}"
            row = rows[method] = {f"own at others {sign}{PRICE:g}": at_price}
            if errors:
                share = 100 * _gain(own, others, direction) / best
                row["of the best oracle"] = "-" if np.isnan(share) else f"{share:.0f} %"
                gap = "-" if alone else with_error(_largest_gap(own, others, direction))
                row["own - others, at most"] = gap
            measured = list(curves[method]["own"].columns)
            for ratio in ratios:
                name = f"{100 * ratio:g} %"
                if ratio not in measured:
                    row[name] = "-"
                    continue
                i = measured.index(ratio)
                pair = [with_error(part[:, i]) for part in (own, others)]
                if not errors:
                    pair = [mean_text(float(part[:, i].mean()), np.nan) for part in (own, others)]
                row[name] = " / ".join(pair[:1] if alone else pair)
        table = pd.DataFrame.from_dict(rows, orient="index")
        if len(self.missing):
            count_missing(table, self.missing.drop_duplicates(["method", "part"]))
        return table

    def tests(self, reference: str = "activations") -> pd.DataFrame:
        """Does a method forget more than the reference at the same price? Own minus others at the
        share where that is largest on average for each method, in points.

        Returns:
            one row per method: reference, difference, p_value (two-sided paired t-test over models;
            nan below 8) and n (models).
        """
        best: dict[str, pd.Series[float]] = {}
        for name, wide in self._curves("put_back").items():
            gap = _largest_gap(wide["own"].to_numpy(), wide["others"].to_numpy(), "put_back")
            best[name] = pd.Series(gap, wide.index)
        names = ["method", "reference", "difference", "p_value", "n"]
        if not best:
            return pd.DataFrame(columns=names)
        check_choice("reference", reference, best)
        rows: list[list[object]] = []
        for name, gap in best.items():
            if name == reference:
                continue
            # of the models that both have
            pairs = pd.concat([gap, best[reference]], axis=1).dropna()
            mine, theirs = pairs.to_numpy().T
            difference = float((mine - theirs).mean())
            rows.append([name, reference, difference, model_test(mine, theirs), len(pairs)])
        return pd.DataFrame(rows, columns=names)


def model_test(first: np.ndarray, second: np.ndarray) -> float:
    """p of the two-sided paired t-test over models; nan below 8 models."""
    return paired_test(first, second) if len(first) >= MIN_MODELS else np.nan


def _cost(changes: np.ndarray, direction: str) -> np.ndarray:
    """What texts lose by rows that are put back, or gain by a graft."""
    return -changes if direction == "put_back" else changes


def _gain(own: np.ndarray, others: np.ndarray, direction: str) -> float:
    """How much own has lost (put back) or gained (graft) where the others have by 5 points, or at
    the largest share where that changes them less.
    """
    costs, gains = _cost(others, direction).mean(0), _cost(own, direction).mean(0)
    return gain_at(PRICE, costs, gains) if costs.max() >= PRICE else float(gains[-1])


def _largest_gap(own: np.ndarray, others: np.ndarray, direction: str) -> np.ndarray:
    """Own minus others of each model, at the ratio where own loses (put back) or gains (graft) most
    beyond the others.
    """
    gaps = own - others
    return gaps[:, _cost(gaps, direction).mean(0).argmax()]
