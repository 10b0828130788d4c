"""Tables for a terminal, by rich: the best method first, controls below a rule. A pipe gets them as
plain text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import TRUE_ROWS, InjResults
from tl_localize.methods import RandomBaseline, RowNorm
from tl_localize.report.paper import TITLES, short_title
from tl_localize.report.tables import flat

NO_METHODS = [RowNorm.name, RandomBaseline.name, TRUE_ROWS]  # the row of a table that is no method
CONTROLS = [TITLES[name] for name in NO_METHODS]
BLOCKS = " ▁▂▃▄▅▆▇█"


def console() -> Console:
    """Standard output; in a pipe nothing is wrapped."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = 200
    return out


def ranked(table: pd.DataFrame, *, lowest_first: bool = False) -> Iterator[tuple[str, Table]]:
    """Each setting of a results table and its table: sorted by the first column, the best in bold,
    without columns that are all equal.

    Args:
        table: texts such as ``87.2 ± 0.9`` with the method as the last level of the index.
        lowest_first: the smallest number of the first column is the best.

    >>> recalls = {"Random": "3.4 ± 0.2", "Slimming": "58.9 ± 1.4", "Hard Concrete": "87.2 ± 0.9"}
    >>> ((_, shown),) = ranked(pd.DataFrame({"R@1x": recalls}))
    >>> [str(cell) for cell in shown.columns[0].cells]
    ['Hard Concrete', 'Slimming', 'Random']
    """
    above = list(range(table.index.nlevels - 1))
    for setting, part in table.groupby(level=above, sort=False) if above else [((), table)]:
        part = part.set_axis(part.index.get_level_values(-1))
        numbers = part.iloc[:, 0].str.extract(r"^(-?\d+\.?\d*)", expand=False).astype(float)
        is_control = part.index.isin(CONTROLS)
        part = part.iloc[np.lexsort((numbers if lowest_first else -numbers, is_control))]
        kept = [column for column in part.columns[1:] if part[column].nunique() > 1]
        shown = Table("method", box=box.SIMPLE_HEAD, header_style="")
        for column in [part.columns[0], *kept]:
            shown.add_column(column, justify="right")
        n_methods = int((~is_control).sum())
        for place, name in enumerate(part.index):
            if place == n_methods:
                shown.add_section()
            style = "dim" if place >= n_methods else "" if place else "bold"
            cells = part.iloc[place][[part.columns[0], *kept]]
            shown.add_row(short_title(name), *map(str, cells), style=style)
        yield ", ".join(map(str, setting)), shown


def plain(table: pd.DataFrame) -> Table:
    """A table as it is; the levels of its index become columns, and numbers stand to the right.

    >>> plain(pd.DataFrame({"done": [3]}, index=pd.Index(["slimming"], name="method"))).row_count
    1
    """
    whole = flat(table)
    shown = Table(box=box.SIMPLE_HEAD, header_style="")
    for name, column in whole.items():
        is_number = pd.api.types.is_numeric_dtype(column)
        shown.add_column(Text(str(name)), justify="right" if is_number else "left")
    for row in whole.itertuples(index=False):
        shown.add_row(
            *(Text(f"{cell:.3g}" if isinstance(cell, float) else str(cell)) for cell in row)
        )
    return shown


def bars(counts: list[int]) -> str:
    """A bar for each count, the highest one full.

    >>> bars([0, 4, 8])
    ' ▄█'
    """
    most = max([*counts, 1])
    return "".join(BLOCKS[math.ceil(count / most * (len(BLOCKS) - 1))] for count in counts)


def reading(results: InjResults | DelResults) -> str:
    """What the main table says, in a sentence: of the largest ratio, and of INJ for as many neurons
    as were injected.
    """
    if isinstance(results, InjResults):
        return _inj_reading(results)
    frame = results.frame[results.frame["ratio"] == results.frame["ratio"].max()]
    columns = ["delta_self_accuracy", "delta_neg_accuracy"]
    means = 100 * frame.groupby("method")[columns].mean()
    methods = means.drop(NO_METHODS, errors="ignore")
    if not len(methods):
        return ""
    best = methods["delta_self_accuracy"].idxmin()
    own, by_chance = (
        "{:+.1f} points on the target and {:+.1f} on others".format(*pair)
        for pair in means.reindex([best, RandomBaseline.name]).to_numpy()
    )
    top = f"the top {100 * frame['ratio'].iloc[0]:g} % of each layer by {short_title(best)}"
    return f"Accuracy without {top}: {own}; without as many at random: {by_chance}."


def _inj_reading(results: InjResults) -> str:
    frame = results.frame[results.frame["converged"]]
    frame = frame[frame["injection_ratio"] == results.frame["injection_ratio"].max()]
    means = 100 * frame[frame["multiple"] == frame["multiple"].min()].groupby("method").mean(
        numeric_only=True
    )
    methods = means.drop(NO_METHODS, errors="ignore")
    if not len(methods):
        return ""
    best = methods["recall"].idxmax()
    recall, by_norm = means.loc[best, "recall"], means["recall"].get(RowNorm.name, math.nan)
    found = f"{short_title(best)} finds {recall:.0f} % of"
    if results.distractors:
        return (
            f"{found} the target's rows and {means.loc[best, 'foreign_recall']:.0f} % of the "
            "distractors'. A method that does not read the sentence finds as many of both."
        )
    if by_norm < recall:
        norm = f"RowNorm, which never reads the sentence, finds {by_norm:.0f} %."
        return f"{found} the injected rows; {norm}"
    return (
        f"No method beats RowNorm ({by_norm:.0f} %), which never reads the sentence: what is found "
        "here is altered rows, not the text. Try --distractors 3."
    )
