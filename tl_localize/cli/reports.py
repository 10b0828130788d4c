"""What is published of each benchmark: its results, tables and figures, and what is said of them.

The one place where the commands import the tables and figures of benchmarks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from tl_localize.evals.deletion import del_figures, del_tables
from tl_localize.evals.deletion.results import DelResults
from tl_localize.evals.deletion.sparing import describe_general_text
from tl_localize.evals.inj import inj_figures, inj_tables
from tl_localize.evals.inj.results import InjResults
from tl_localize.evals.inj.tables import say_result
from tl_localize.evals.rev import rev_figures, rev_tables
from tl_localize.evals.rev.results import RevResults
from tl_localize.execution import Steps

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.figure import Figure

REV_WIDE = 100  # columns of REV's table, also in a pipe
FIGURES = {  # by file name, what a page says below them
    "inj_recall_curve": "INJ: recall of the injected rows against the share of each layer that is "
    "looked at, mean and standard error over sentences.",
    "inj_target_against_distractors": "INJ with distractors: recall of the target's rows against "
    "that of the distractors' rows, mean and standard error over groups; better: up and left.",
    "del_forgetting": "DEL: accuracy that the target loses (Self) against what the other sequences "
    "lose (Neg), mean and standard error over targets; better: up and left.",
    "del_confusion": "DEL: change of accuracy of each sequence (column) when the units of "
    "another one (row) are ablated. A method that finds those of the target alone colours the "
    "diagonal alone.",
    "rev_curves": "REV: change of accuracy of the sentence against that of the others as more "
    "units are put back, and as more are given to the model before; mean and standard error over "
    "models.",
}
Tables = Mapping[str, pd.DataFrame]
Figures = Mapping[str, "Figure"]


@dataclass(frozen=True, eq=False)
class Published:
    """What is published of the results of one benchmark.

    Args:
        results: what was measured.
        tables: by file name, for a model of this name.
        draw: figures by file name.
        next_step: what to do when all is measured.
        sentence: what the results say.
        lowest_first: the smallest number of the main table is the best.
        narrow: which columns of the main table a narrow terminal has room for; all unless given.
        shown: what is printed of the main table, where it is not all of it.
        width: characters of a line of the main table, also in a pipe; any unless given.
        more: name of another table, for a wide terminal.
    """

    results: InjResults | DelResults | RevResults
    tables: Callable[[str], Tables]
    draw: Callable[[], Figures]
    next_step: str
    sentence: Callable[[], str] = str
    lowest_first: bool = True
    narrow: str = ""
    shown: Callable[[], pd.DataFrame] | None = None
    width: int | None = None
    more: str = ""


def report_inj(steps: Steps) -> Published:
    results = InjResults.of(steps)
    return Published(
        results,
        partial(inj_tables, results),
        partial(inj_figures, results),
        "tl-localize del ablates the neurons that these methods name for a memorized text.",
        partial(say_result, results),
        lowest_first=False,
    )


def report_del(steps: Steps) -> Published:
    results = DelResults.of(steps)
    return Published(
        results,
        partial(del_tables, results),
        partial(del_figures, results),
        "tl-localize localize shows one text without the named neurons, token by token.",
        partial(describe_general_text, results),
        narrow="Self-Acc|Neg-Acc",
        more="del_at_price",
    )


def report_rev(steps: Steps) -> Published:
    results = RevResults.of(steps)
    return Published(
        results,
        partial(rev_tables, results),
        partial(rev_figures, results),
        "tl-localize rev --model NOW --before EARLIER --data TEXTS asks it of two checkpoints.",
        shown=lambda: rev_tables(results, errors=False)["rev"],  # the file has the errors
        width=REV_WIDE,
    )


REPORTS: dict[str, Callable[[Steps], Published]] = {
    "inj": report_inj,
    "del": report_del,
    "rev": report_rev,
}
