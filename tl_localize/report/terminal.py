"""Tables for a terminal, by rich: the best method first, controls last. A pipe gets them as plain
text.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tl_localize.methods import RandomBaseline, RowNorm
from tl_localize.paper import TITLES, short_title
from tl_localize.report.saving import flat

NO_METHODS = [RowNorm.name, RandomBaseline.name]  # the row of a table that is no method
BAR_WIDTH, BLOCK = 12, "\u2588"  # of the longest bar, in characters, and what it is made of
CONTROLS = [TITLES[name] for name in NO_METHODS]


def console() -> Console:
    """Standard output; in a pipe nothing is wrapped."""
    out = Console(highlight=False, emoji=False)
    if not out.is_terminal:
        out.width = 1000
    return out


def rank_rows(
    table: pd.DataFrame, *, lowest_first: bool = False, width: int | None = None
) -> Iterator[tuple[str, Table]]:
    """Each setting of a results table and its table: sorted by the first column, of which there is
    a bar, controls last.

    Args:
        table: texts such as ``87.2 ± 0.9`` with the method as the last level of the index, the
            setting above it.
        lowest_first: the smallest number of the first column is the best.
        width: characters of a line. A wider table comes in several, of some columns each.

    >>> recalls = {("1 %", "Random"): "3.4 ± 0.2", ("1 %", "Hard Concrete"): "87.2 ± 0.9"}
    >>> ((setting, shown),) = rank_rows(pd.DataFrame({"R@1x": recalls}))
    >>> setting, [str(cell) for cell in shown.columns[0].cells]
    ('1 %', ['Hard Concrete', 'Random'])
    """
    above = list(range(table.index.nlevels - 1))
    for setting, part in table.groupby(level=above, sort=False):
        part = part.set_axis(part.index.get_level_values(-1))
        numbers = part.iloc[:, 0].str.extract(r"^(-?[\d.]+)", expand=False).astype(float)
        order = np.lexsort((numbers if lowest_first else -numbers, part.index.isin(CONTROLS)))
        best_first = part.iloc[order].rename(short_title).rename_axis("method")
        best_first.insert(0, "", bars(numbers.iloc[order].abs().fillna(0)))
        name = ", ".join(map(str, setting))
        for columns in parts_that_fit(best_first, width):
            yield name, plain_table(columns)


def parts_that_fit(
    table: pd.DataFrame, width: int | None, wrapped: bool = False
) -> Iterator[pd.DataFrame]:
    """A table in parts of some columns each, no wider than so many characters where that can be.

    Args:
        wrapped: texts may go on in the next line.
    """
    ruler = Console(width=1000)
    start = 0
    for end in range(1, table.shape[1]):
        wider = table.iloc[:, start : end + 1]
        least, most = ruler.measure(plain_table(wider))
        if width is not None and (least if wrapped else most) > width:
            yield table.iloc[:, start:end]
            start = end
    yield table.iloc[:, start:]


def plain_table(table: pd.DataFrame) -> Table:
    """A table as it is; the levels of its index become columns, and numbers stand to the right.

    >>> counts = pd.DataFrame({"done": [3]}, index=pd.Index(["slimming"], name="method"))
    >>> plain_table(counts).row_count
    1
    """
    whole = flat(table)
    shown = Table(box=box.SIMPLE_HEAD, header_style="")
    for name, column in whole.items():
        is_number = column.astype(str).str.match(r"-?\d").all()
        shown.add_column(
            Text(str(name)),
            justify="right" if is_number else "left",
            no_wrap=bool(is_number),
            overflow="fold",  # on a narrow terminal an id goes on in the next line
        )
    for row in whole.itertuples(index=False):
        shown.add_row(*map(_cell, row))
    return shown


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    return Text(f"{value:.3g}" if isinstance(value, float) else str(value))


def bars(values: "pd.Series[float]", most: float | None = None) -> list[str]:
    """A bar for each number of a column: what the terminal has for a figure. Numbers below zero,
    and nan, have none.

    Args:
        most: The number whose bar is the longest; the greatest of the column unless given.

    >>> [len(bar) for bar in bars(pd.Series([2.0, 1.0, -1.0]), most=4)]
    [6, 3, 0]
    """
    sign = "#" if console().encoding.startswith("ascii") else BLOCK
    longest = values.max() if most is None else most
    shares = values.clip(lower=0) / longest if longest > 0 else 0 * values
    return [sign * round(BAR_WIDTH * share) for share in shares.fillna(0)]


def show(table: pd.DataFrame, title: str = "") -> None:
    """Print a table, and a title above it."""
    out = console()
    if title:
        out.print(f"\n{title}", markup=False)
    for columns in parts_that_fit(table, out.width, wrapped=True):
        out.print(plain_table(columns))
