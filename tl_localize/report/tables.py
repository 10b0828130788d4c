"""Tables as Markdown, LaTeX and CSV, and the paper's published numbers beside ours."""

import json
from pathlib import Path

import pandas as pd

from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.rev_results import RevResults
from tl_localize.files import prepare_folder, write_text
from tl_localize.reference import DATA
from tl_localize.report.paper import TITLES, published, short_title

CAPTIONS: dict[str, str] = json.loads((DATA / "captions.json").read_text(encoding="utf-8"))
INDEX_NAMES = ("source", "setting", "method")  # of a table's last levels where they have no names


def inj_tables(results: InjResults, model: str) -> dict[str, pd.DataFrame]:
    """The INJ tables by file name (``CAPTIONS``): per layer, across layers, tests, and the paper's
    numbers where it has this model.

    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02)
    >>> list(inj_tables(benchmark.run([Attribution()]), "gpt2")["inj"].index.unique(0))
    ['ours', 'paper']
    """
    tables = {"inj": results.table(), "inj_across_layers": results.table(across_layers=True)}
    if not results.distractors:
        for name, theirs in (("inj", "inj"), ("inj_across_layers", "inj_global")):
            tables[name] = _with_paper(tables[name], theirs, model)
    used = results.frame.query("converged")
    if used["group"].nunique() > 1 and used["method"].eq("integrated_gradients").any():
        tables["inj_tests"] = results.tests().set_index(["injection_ratio", "ratio", "method"])
    return {name: _with_titles(table) for name, table in tables.items()}


def del_tables(results: DelResults, model: str) -> dict[str, pd.DataFrame]:
    """The DEL tables by file name (``CAPTIONS``), with the paper's numbers beside ours where it has
    this model.

    ``del_tests`` is there if Integrated Gradients ran, ``del_categories`` if the sequences have
    categories.

    >>> results = DelBenchmark(model, few[:2], text, ratios=(0.05,), n_dev=0).run([Attribution()])
    >>> list(del_tables(results, "reference-gpt2"))
    ['del_memorization', 'del', 'del_at_price', 'del_categories']
    """
    tables = {
        "del_memorization": _with_paper(results.before_table(), "memorization", model),
        "del": _with_paper(results.table(), "del", model),
        "del_at_price": results.at_price(),
    }
    if results.frame["method"].eq("integrated_gradients").any():
        tables["del_tests"] = _del_tests(results)
    if results.before["category"].ne("").any():
        tables["del_categories"] = _with_paper(_categories(results), "categories", model)
    return {name: _with_titles(table) for name, table in tables.items()}


def rev_tables(
    results: RevResults, model: str = "", errors: bool = True
) -> dict[str, pd.DataFrame]:
    """The REV tables by file name (``CAPTIONS``): units put back, units given to the model before,
    and tests where Activations ran on more than one sentence; none if no training converged. The
    paper has no such numbers of any model. Without errors the main ones are narrower.

    >>> how = {"n_sequences": 1, "ratios": (0.1,), "recipe": Recipe(max_steps=2)}
    >>> results = RevBenchmark(model, [sequence], text, **how).run()
    >>> list(rev_tables(results))
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
    if len(points.get("activations", [[]])[0]) > 1:
        tables["rev_tests"] = results.tests().set_index(["reference", "method"])
    return {name: _with_titles(table) for name, table in tables.items()}


def _with_paper(ours: pd.DataFrame, table: str, model: str) -> pd.DataFrame:
    """Our table above the paper's, where the paper has this model."""
    theirs = published(table, model)
    if not len(theirs):
        return ours
    rows = ["row", "method"] if theirs["method"].notna().all() else ["row"]
    texts = theirs.pivot_table("text", rows, "column", aggfunc="first", sort=False)
    return pd.concat({"ours": ours, "paper": texts}, names=["source"]).fillna("")


def _with_titles(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(index=TITLES, columns={name: short_title(name) for name in TITLES})


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


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub table; the levels of the index become columns.

    >>> print(to_markdown(pd.DataFrame({"R@1x": [87.2, 3.4]}, index=["Hard Concrete", "Random"])))
    | method        |   R@1x |
    |:--------------|-------:|
    | Hard Concrete |   87.2 |
    | Random        |    3.4 |
    """
    escaped = flat(table).replace(r"\|", r"\\|", regex=True)  # a bar would end the cell
    return escaped.to_markdown(index=False, floatfmt=".3g")


def flat(table: pd.DataFrame) -> pd.DataFrame:
    """A table whose index became columns, with names.

    >>> list(flat(pd.DataFrame({"R@1x": [87.2]}, index=["Hard Concrete"])).columns)
    ['method', 'R@1x']
    """
    names = zip(table.index.names, ("", *INDEX_NAMES)[-table.index.nlevels :], strict=True)
    return table.reset_index(names=[str(given or name) for given, name in names])


def save_table(table: pd.DataFrame, folder: str | Path, name: str, caption: str = "") -> None:
    """Write NAME.md, NAME.tex and NAME.csv, each whole or not at all.

    >>> save_table(pd.DataFrame({"R@1x": [87.2]}, index=["Hard Concrete"]), folder, "inj", "Recall")
    >>> sorted(path.name for path in folder.iterdir())
    ['inj.csv', 'inj.md', 'inj.tex']
    """
    whole = flat(table)
    latex = whole.to_latex(index=False, caption=caption or None, escape=True, float_format="%.3g")
    texts = {
        "md": f"{caption}\n\n{to_markdown(table)}\n".lstrip(),
        "tex": latex,
        "csv": whole.to_csv(index=False),
    }
    path = prepare_folder(folder)
    for suffix, text in texts.items():
        write_text(path / f"{name}.{suffix}", text)
