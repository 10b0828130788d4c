"""Tables of DEL."""

from typing import Any

import pandas as pd

from tl_localize.evals.deletion.results import DelResults
from tl_localize.paper import with_paper, with_titles
from tl_localize.stats import with_error


def del_tables(results: DelResults, model: str) -> dict[str, pd.DataFrame]:
    """The DEL tables by file name (``CAPTIONS``), with the paper's numbers beside ours where it has
    this model.

    ``del_tests`` is there if Integrated Gradients ran, ``del_categories`` if the sequences have
    categories, ``del_single_layer`` if single layers were measured; of these alone it is the only
    table.

    >>> list(del_tables(del_results, "reference-gpt2"))
    ['del_memorization', 'del', 'del_at_price', 'del_categories']
    """
    tables: dict[str, pd.DataFrame] = {}
    if len(results.single_layers):
        tables["del_single_layer"] = _single_layers(results.single_layers)
        if not len(results.frame):
            return {name: with_titles(table) for name, table in tables.items()}
    tables |= {
        "del_memorization": with_paper(results.before_table(), "memorization", model),
        "del": with_paper(results.table(), "del", model),
        "del_at_price": results.at_price(),
    }
    if results.frame["method"].eq("integrated_gradients").any():
        tables["del_tests"] = _del_tests(results)
    if results.before["category"].ne("").any():
        tables["del_categories"] = with_paper(_categories(results), "categories", model)
    return {name: with_titles(table) for name, table in tables.items()}


def _del_tests(results: DelResults) -> pd.DataFrame:
    tests = results.tests()
    points = (100 * tests.pop("difference")).round(6)  # equal means differ in the last bit
    tests["difference of Δ Self-Acc (points)"] = points
    return tests.set_index(["model", "ablation", "ratio", "method"])


def _categories(results: DelResults) -> pd.DataFrame:
    """Of each category: how many sequences, and their accuracy."""
    accuracies = results.before.groupby("category", sort=False)["accuracy"]
    columns = {
        "sequences": accuracies.size().map(str),
        "Acc (%)": (100 * accuracies.mean()).map("{:.1f}".format),
    }
    return pd.DataFrame(columns).rename(index={"": "(none)"})


def _single_layers(frame: pd.DataFrame) -> pd.DataFrame:
    """One layer against all layers at equal budget, at the largest ratio: change of accuracy in
    points.
    """
    largest = frame[frame["ratio"] == frame["ratio"].max()]
    layers = largest["layer"].fillna(-1).astype(int)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    groups: Any = largest.groupby(["method", layers, "multiple"])
    for (method, layer, factor), part in groups:
        ablated = "all layers" if layer < 0 else f"layer {layer}"
        row = rows.setdefault((method, ablated), {})
        row[f"{factor} x budget, neurons"] = f"{part['n_neurons'].mean():.0f}"
        row[f"{factor} x budget, Self"] = with_error(100 * part["delta_self_accuracy"])
        row[f"{factor} x budget, Neg"] = with_error(100 * part["delta_neg_accuracy"])
    return pd.DataFrame(rows).T.fillna("").rename_axis(["method", "ablated"])
