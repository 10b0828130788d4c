"""Tables of REV."""

import pandas as pd

from tl_localize.evals.rev.results import MIN_MODELS, RevResults
from tl_localize.paper import with_titles


def rev_tables(
    results: RevResults, model: str = "", errors: bool = True
) -> dict[str, pd.DataFrame]:
    """The REV tables by file name (``CAPTIONS``): units put back, units given to the model before,
    and tests where Activations ran on 8 models or more; none if no training converged. The paper
    has no such numbers of any model. Without errors the main ones are narrower.

    >>> list(rev_tables(rev_results))
    ['rev', 'rev_graft']
    """
    found = {
        "rev": results.table(errors=errors),
        "rev_graft": results.table("graft", errors=errors),
    }
    tables = {
        name: pd.concat({"share of each layer": table}, names=["setting", "method"])
        for name, table in found.items()
        if len(table)
    }
    points = results.points()
    if len(points.get("activations", [[]])[0]) >= MIN_MODELS:
        tables["rev_tests"] = results.tests().set_index(["reference", "method"])
    return {name: with_titles(table) for name, table in tables.items()}
