"""Tables of INJ, and what they say in a sentence."""

import pandas as pd

from tl_localize.evals.inj.results import InjResults
from tl_localize.methods import RandomBaseline, RowNorm
from tl_localize.paper import short_title, with_paper, with_titles


def inj_tables(results: InjResults, model: str) -> dict[str, pd.DataFrame]:
    """The INJ tables by file name (``CAPTIONS``): per layer, across layers, tests, and the paper's
    numbers where it has this model.

    >>> list(inj_tables(inj_results, "gpt2"))
    ['inj', 'inj_across_layers']
    """
    tables = {"inj": results.table(), "inj_across_layers": results.table(across_layers=True)}
    if not results.distractors:
        for name, theirs in (("inj", "inj"), ("inj_across_layers", "inj_global")):
            tables[name] = with_paper(tables[name], theirs, model)
    used = results.frame.query("converged")
    if used["group"].nunique() > 1 and used["method"].eq("integrated_gradients").any():
        tables["inj_tests"] = results.tests().set_index(["injection_ratio", "ratio", "method"])
    return {name: with_titles(table) for name, table in tables.items()}


def say_result(results: InjResults) -> str:
    """What the table of INJ says, in a sentence: of the largest ratio, for as many neurons as were
    injected.
    """
    frame = results.frame.query("converged")
    frame = frame[frame["injection_ratio"] == frame["injection_ratio"].max()]
    frame = frame[frame["multiple"] == frame["multiple"].min()]
    groups = frame.groupby(["method", "group"]).mean(numeric_only=True)
    means = 100 * groups.groupby("method").mean()
    methods = means.drop([RowNorm.name, RandomBaseline.name], errors="ignore")
    if methods.empty or RowNorm.name not in means.index:
        return ""
    best = methods["recall"].idxmax()
    by_norm = means.loc[RowNorm.name, "recall"]
    recall = methods.loc[best, "recall"]
    found = f"{short_title(best)} finds {recall:.0f} % of"
    if results.distractors:
        return (
            f"{found} the target's rows and {methods.loc[best, 'foreign_recall']:.0f} % of the "
            "distractors'. A method that does not read the sentence finds as many of both."
        )
    if by_norm < recall:
        norm = f"RowNorm, which never reads the sentence, finds {by_norm:.0f} %."
        return f"{found} the injected rows; {norm}"
    return (
        f"No method beats RowNorm ({by_norm:.0f} %), which never reads the sentence: what is found "
        "here is altered rows, not the text. Try --distractors 3."
    )
