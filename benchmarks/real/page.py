"""A model's page: all tables and figures beside the published ones, made of its frames alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from frames import confusion_matrices, read_frames
from paper_texts import CATEGORIES, OTHERS

from tl_localize.evals import DelResults, InjResults, RevResults
from tl_localize.files import prepare_folder, write_text
from tl_localize.paper import TITLES, published, with_paper, with_titles
from tl_localize.report.saving import save_figure, to_markdown
from tl_localize.stats import ALPHA

Frames = dict[str, pd.DataFrame]
# the paper's model that stands beside one that the paper does not have: of the size of ours in INJ,
# that which recites the manual texts in DEL
LIKE = dict.fromkeys(("inj", "inj_global", "inj_expanded", "inj_seeds", "inj_pvalues"), "gpt2")
LIKE |= dict.fromkeys(("del", "del_pvalues", "memorization", "categories"), "gpt2-xl")
LIKE["cost"] = "pythia-6.9b-deduped"
TUNED = {f"{name}_tuned": f"{TITLES[name]}, tuned" for name in ("slimming", "hard_concrete")}
MORE_TITLES = TUNED | {"attribution_contrast_1": "Attribution, contrast 1 (not the paper's)"}
NOT_YET = "Not measured yet.\n"
LEAST_ERASED = 20  # points, by all layers together
DEL_TESTS, INJ_TESTS = 2, 6  # of a method: two shares, each with three budgets in INJ


class Page:
    """Sections of Markdown, and figures in a folder."""

    def __init__(self, frames: Frames, folder: Path, title: str, draw: bool) -> None:
        self.frames = frames
        self.folder = folder
        self.title = title
        self.draw = draw

    def like(self, kind: str) -> str:
        """The paper's model that stands beside this one in a table."""
        return self.title if len(published(kind, self.title)) else LIKE[kind]

    def table(self, table: pd.DataFrame) -> str:
        titled = with_titles(table).rename(index=MORE_TITLES, columns=MORE_TITLES)
        return f"{to_markdown(titled)}\n"

    def beside(self, ours: pd.DataFrame, kind: str) -> str:
        """Our table above the paper's, of the same columns."""
        like = self.like(kind)
        sources = {"ours": "measured here", "paper": f"the paper, {like}"}
        return self.table(with_paper(ours, kind, like).rename(index=sources))

    def published(self, kind: str) -> str:
        """The paper's table by itself."""
        like = self.like(kind)
        rows = published(kind, like)
        index = ["setting", "method"] if rows["setting"].notna().any() else ["method"]
        wide = rows.pivot_table("value", index, "metric", sort=False)
        return f"The paper, {like}:\n\n{self.table(wide)}"

    def figure(self, make: Callable[[], Any], name: str) -> str:
        if self.draw:
            save_figure(make(), prepare_folder(self.folder / "figures"), name)
        return f"![{name}](figures/{name}.png)\n"

    def rows(self, name: str) -> pd.DataFrame:
        return self.frames.get(name, pd.DataFrame())

    def deletion(self, name: str) -> DelResults | None:
        """The results of a part of DEL."""
        if name not in self.frames:
            return None
        before, pairs = self.rows(f"{name}_before"), self.rows(f"{name}_confusion")
        matrices = confusion_matrices(pairs) if len(pairs) else {}
        return DelResults(self.rows(name), before=before, confusion=matrices)

    def markdown(self) -> str:
        parts = [f"# {self.title}\n", ABOUT]
        for heading, section in SECTIONS.items():
            parts += [f"## {heading}\n", section(self) or NOT_YET]
        return "\n".join(parts)


ABOUT = """Made by `pytest benchmarks/ --real --paper-data FOLDER` of the frames beside this page;
what is measured, and how, was written before: `benchmarks/real/PLAN.md`. Texts are named by their
places in the paper's files. Numbers are means ± standard errors over targets, sentences or groups.
"""


def write_page(frames: Path, folder: Path, title: str, draw: bool = True) -> Path:
    """Write page.md of the frames of a folder, and the figures that it shows, where they are to be
    drawn.
    """
    page = Page(read_frames(frames), folder, title, draw)
    path = prepare_folder(folder) / "page.md"
    write_text(path, page.markdown())
    return path


# Sections


def recited_section(page: Page) -> str:
    """Table 1, and the texts by id."""
    rows = page.rows("recited")
    if not len(rows):
        return ""
    kinds = (
        rows["category"]
        .str.split(" (", regex=False)
        .str[0]
        .where(rows["category"].str.startswith(OTHERS), rows["category"])
    )
    order = [*CATEGORIES, OTHERS]
    used = rows.assign(kind=kinds, recited=rows["role"] != "not recited")
    groups = used.groupby("kind")
    table = pd.DataFrame({"texts": groups.size(), "recited": groups["recited"].sum()})
    table["recited"] = table["recited"].map(str)
    table = table.reindex([name for name in order if name in table.index] or table.index)
    counts = published("categories").set_index("row")["value"]
    table["the paper, gpt2-xl (all recited)"] = counts.reindex(table.index)
    found = rows[rows["role"] != "not recited"].sort_values("accuracy", ascending=False)
    return page.table(table.rename_axis("category")) + "\n" + page.table(found.set_index("id"))


def before_section(page: Page) -> str:
    results = page.deletion("deletion")
    return page.beside(results.before_table(), "memorization") if results else ""


def deletion_section(page: Page) -> str:
    results = page.deletion("deletion")
    if results is None:
        return ""
    from tl_localize.evals.deletion import forgetting

    shown = page.figure(lambda: forgetting(results), "deletion")
    return "\n".join([page.beside(results.table(), "del"), shown])


def deletion_tests_section(page: Page) -> str:
    results = page.deletion("deletion")
    if results is None or "integrated_gradients" not in set(results.frame["method"]):
        return ""
    tests = of_plan(results.tests(), DEL_TESTS)
    tests = tests.set_index(["ratio", "method"]).drop(columns=["model", "ablation"])
    tests["difference"] = 100 * tests["difference"]
    return "\n".join([page.table(tests), page.published("del_pvalues")])


def counts_section(page: Page) -> str:
    """Sets of the whole model, and what they buy at a price."""
    results = page.deletion("counts")
    if results is None:
        return ""
    from tl_localize.evals.deletion import forgetting

    self_neg = results.table()[["Δ Self-Acc (points)", "Δ Neg-Acc (points)", "targets"]]
    shown = page.figure(lambda: forgetting(results), "counts")
    return "\n".join([page.table(results.at_price()), page.table(self_neg), shown])


def confusion_section(page: Page) -> str:
    results = page.deletion("deletion")
    if results is None or not results.confusion:
        return ""
    from tl_localize.evals.deletion import confusion, confusion_by_category

    table = confusion_by_category(results).set_index(["ratio", "method"])
    return "\n".join([page.table(table), page.figure(lambda: confusion(results), "confusion")])


def layers_section(page: Page) -> str:
    rows = page.rows("single_layers")
    if not len(rows):
        return ""
    rows = rows[rows["method"] != "random"]
    from tl_localize.evals.deletion import layers_against_all, single_layer_figure

    compared = layers_against_all(rows)
    parts = [page.table(compared.set_index(["ratio", "multiple", "method"]))]
    few = compared.loc[compared["all"] > -LEAST_ERASED, "method"].unique()
    if len(few):
        parts.append(
            f"All layers together erase less than {LEAST_ERASED} points by {', '.join(few)}, so by "
            "the plan these rows decide nothing.\n"
        )
    for method, part in rows.groupby("method", sort=False):

        def draw(part: pd.DataFrame = part) -> Any:
            return single_layer_figure(part)

        parts.append(page.figure(draw, f"single_layers_{method}"))
    return "\n".join(parts)


def injection_section(page: Page) -> str:
    rows = page.rows("injection")
    if not len(rows):
        return ""
    from tl_localize.evals.inj import recall_curve

    results = InjResults(rows)
    parts = [page.beside(results.table(), "inj"), "Among the top of the whole model (A.11):\n"]
    parts.append(page.beside(results.table(across_layers=True), "inj_global"))
    if rows["converged"].any():
        parts.append(page.figure(lambda: recall_curve(results), "injection"))
    return "\n".join(parts)


def of_plan(tests: pd.DataFrame, n_tests: int) -> pd.DataFrame:
    """Tests at the level of all settings of the plan, also where some are not measured yet."""
    level = ALPHA / n_tests
    return tests.assign(tests=n_tests, level=level, significant=tests["p_value"] < level)


def injection_tests_section(page: Page) -> str:
    rows = page.rows("injection")
    if not len(rows) or "integrated_gradients" not in set(rows["method"]):
        return ""
    tests = of_plan(InjResults(rows).tests(), INJ_TESTS)
    tests = tests.set_index(["injection_ratio", "ratio", "method"])
    return "\n".join([page.table(tests), page.published("inj_pvalues")])


def expanded_section(page: Page) -> str:
    rows = page.rows("expanded")
    if not len(rows):
        return ""
    return "\n".join([page.table(InjResults(rows).table()), page.published("inj_expanded")])


def seeds_section(page: Page) -> str:
    rows, first = page.rows("seeds"), page.rows("injection")
    if not (len(rows) and len(first)):
        return ""
    from tl_localize.evals.inj import compare_seeds

    tables = {
        f"seed {name}": compare_seeds(first, part) for name, part in rows.groupby("first_seed")
    }
    table = pd.concat(tables, names=["against"]).droplevel(1)
    table = table.set_index(["injection_ratio", "ratio", "method"], append=True)
    return "\n".join([page.table(table), page.published("inj_seeds")])


def distractors_section(page: Page) -> str:
    rows = page.rows("distractors")
    if not len(rows):
        return ""
    from tl_localize.evals.inj import target_against_distractors

    results = InjResults(rows)
    parts = [page.table(results.table())]
    if results.frame["converged"].any():
        parts.append(page.figure(lambda: target_against_distractors(results), "distractors"))
    return "\n".join(parts)


def agreement_section(page: Page) -> str:
    """Kendall's tau, and the paper's own."""
    from tl_localize.evals.agreement import agreement, published_agreement

    inj, deletion = page.rows("injection"), page.deletion("deletion")
    if not len(inj) or deletion is None:
        return ""
    recalls = InjResults(inj).summary().query("metric == 'recall'")
    recalls = recalls.assign(
        setting=[
            f"ratio {100 * ratio:g} %, R@{multiple}x"
            for ratio, multiple in zip(recalls["injection_ratio"], recalls["multiple"], strict=True)
        ]
    ).rename(columns={"mean": "value"})
    lost = deletion.summary().query("metric == 'delta_self_accuracy'")
    lost = lost.assign(setting=(100 * lost["ratio"]).map("{:g} %".format))
    found = agreement(recalls, lost.rename(columns={"mean": "value"}))
    paper = published_agreement().set_index(["model", "inj", "del"])
    ours = page.table(found.set_index(["inj", "del"]))
    return "\n".join([ours, "The paper's own numbers:\n", page.table(paper)])


def cost_section(page: Page) -> str:
    rows = page.rows("costs")
    if not len(rows):
        return ""
    return "\n".join([page.table(rows.set_index("method")), page.published("cost")])


def ablation_section(page: Page) -> str:
    results = page.deletion("ablations")
    if not results:
        return ""
    # zero ablation, which is table 3, has more methods and texts than the others
    rows = results.frame
    n_ablations = rows.groupby(["method", "sequence_id"])["ablation"].transform("nunique")
    return page.table(replace(results, frame=rows[n_ablations == n_ablations.max()]).table())


def quadrature_section(page: Page) -> str:
    results = page.deletion("quadrature")
    return page.table(results.table()) if results else ""


def zero_out_section(page: Page) -> str:
    rows = page.rows("zero_out")
    return page.table(InjResults(rows).table()) if len(rows) else ""


def tuning_section(page: Page) -> str:
    rows = page.rows("tuning_del"), page.rows("tuning_inj")
    parts = [page.table(part.set_index("method")) for part in rows if len(part)]
    return "\n".join(parts)


def rev_section(page: Page) -> str:
    rows = page.rows("rev")
    if not len(rows):
        return ""
    from tl_localize.evals.rev import rev_by_model, rev_tables

    results = RevResults(rows)
    parts = [
        page.table(table) for name, table in rev_tables(results).items() if name != "rev_tests"
    ]
    by_model = rev_by_model(results).set_index(["direction", "ratio", "method"])
    return "\n".join([page.table(by_model), *parts])


SECTIONS: dict[str, Callable[[Page], str]] = {
    "Table 1: which of the manual texts are recited": recited_section,
    "How well the targets are memorized": before_section,
    "Table 3: DEL": deletion_section,
    "DEL: t-tests (table 11)": deletion_tests_section,
    "DEL: sets of the whole model": counts_section,
    "DEL: which other texts are forgotten": confusion_section,
    "DEL: one layer against all (5.4, A.10)": layers_section,
    "Table 2: INJ": injection_section,
    "INJ: t-tests (table 10)": injection_tests_section,
    "INJ: expanded data (A.5)": expanded_section,
    "INJ: other seeds (A.6)": seeds_section,
    "INJ with distractors (not in the paper)": distractors_section,
    "INJ: Zero-Out of every neuron, one sentence": zero_out_section,
    "Do the two benchmarks agree (5.3)": agreement_section,
    "Costs (A.7)": cost_section,
    "DEL by other ablations (a limitation of the paper)": ablation_section,
    "Integrated Gradients with more points": quadrature_section,
    "REV (not in the paper)": rev_section,
    "The search of the masks' settings": tuning_section,
}
