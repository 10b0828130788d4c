"""Writes the tables of README.md and docs/ from committed numbers.

    python docs/tables.py            # writes each table that is marked
    python docs/tables.py --check    # names those that differ, and writes nothing

A table stands on its page between two comments, and this script writes what is between them:

    <!-- table: NAME -->
    <!-- end -->

Numbers come from the frames in benchmarks/expected, one row for each text, and are means with a
95 % interval over texts (``tl_localize.stats.bootstrap``). Where an earlier run kept no frame they
come from the tables in docs/results that the commands wrote.

The tables of DEL and INJ in docs/results, as the commands write them, are made of the same frames.
Here stands which tables there are; how one is made, in the file of its benchmark (*_tables.py).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import paper_tables  # noqa: E402
from cells import (  # noqa: E402
    GEMMA,
    GENERAL_RIVALS,
    GPT2,
    MASK_RIVALS,
    PYTHIA,
    RIVALS,
    SHIPPED,
    SMOLLM2,
    TITLES,
    markdown,
)
from comparison import read_frame  # noqa: E402
from control_tables import (  # noqa: E402
    contrast_table,
    memory_difference_table,
    memory_table,
    seeds_table,
)
from cost_tables import PAPER_COSTS, cost_table, gpu_table, minutes_table, times_table  # noqa: E402
from deletion_tables import (  # noqa: E402
    Column,
    against_table,
    all_columns,
    at_price,
    del_table,
    deletion,
    few_neurons_table,
    heads_table,
    layers_of_shipped,
    points_of,
    price_table,
    prices_of,
    rivals_table,
    shares,
    single_layers_table,
    third_table,
)
from erase_tables import (  # noqa: E402
    erase_methods_pairs_table,
    erase_methods_table,
    erase_pairs_table,
    erase_table,
    erasures_table,
    front_edits_table,
    rates_table,
    return_table,
    smaller_steps_table,
    truth_table,
)
from injection_tables import (  # noqa: E402
    SMOLLM2_GROUPS,
    alignment_share_table,
    alone_table,
    inj_table,
    recall_multiples,
    recall_pair,
    recall_table,
)
from rev_tables import rev_price_table, rev_table  # noqa: E402

from tl_localize import METHODS, DelResults, InjResults  # noqa: E402
from tl_localize.evals.agreement import METHODS as PAPER_RANKED  # noqa: E402
from tl_localize.evals.agreement import agreement, published_agreement  # noqa: E402
from tl_localize.evals.deletion.tables import del_tables  # noqa: E402
from tl_localize.evals.inj import compare_seeds  # noqa: E402
from tl_localize.evals.inj.tables import inj_tables  # noqa: E402
from tl_localize.evals.settings import default_settings  # noqa: E402
from tl_localize.paper import with_titles  # noqa: E402
from tl_localize.report.saving import flat  # noqa: E402

PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.S)


# Do the benchmarks agree?


LEAST_METHODS = 4  # in a pair of settings whose tau is shown


def agreement_table() -> str:
    """Kendall's tau of INJ's recall against DEL's Self, over the paper's methods."""
    rows = []
    kinds = {
        "gpt2": ("inj-reference-gpt2", "del-reference-gpt2"),
        "pythia": ("inj-reference-pythia", "del-reference-pythia"),
        "SmolLM2": (f"real-{SMOLLM2}", f"forgetting-{SMOLLM2}"),
    }
    measured = {
        model: (read_frame(inj)["recall"], read_frame(lost)["delta_self_accuracy"])
        for model, (inj, lost) in kinds.items()
    }
    measured["SmolLM2, the paper's texts"] = paper_tables.agreement_frames(SMOLLM2)
    for model, (recall, lost) in measured.items():
        recalls = means(recall)
        rows.append([f"{model}, measured here", *tau_cells(agreement(recalls, means(lost)))])
        compared = lost[lost.index.isin(PAPER_RANKED, "method")]
        texts = [set(part.index.unique("sequence_id")) for _, part in compared.groupby("method")]
        few = set.intersection(*texts)
        if len(few) < len(set.union(*texts)):
            same = lost[lost.index.isin(few, "sequence_id")]
            title = f"{model}, DEL of the {len(few)} texts that all methods have"
            rows.append([title, *tau_cells(agreement(recalls, means(same)))])
    paper = published_agreement()
    for name, found in paper.groupby("model", sort=False):
        rows.append([f"{name}, the paper's numbers", *tau_cells(found)])
    return markdown(["model", "tau, mean", "least", "most", "pairs", "methods"], rows)


def tau_cells(found: pd.DataFrame) -> list[str]:
    """Of pairs with enough methods: of two the tau is +1 or -1."""
    used = found[found["n"] >= LEAST_METHODS]
    tau = used["tau"]
    cells = [f"{value:+.2f}" for value in (tau.mean(), tau.min(), tau.max())]
    (n_methods,) = used["n"].unique()
    return [*cells, f"{len(used)}", f"{n_methods}"]


def means(frame: pd.Series) -> pd.DataFrame:
    """As ``agreement`` takes them: of each method and setting."""
    settings = [level for level in frame.index.names if level not in ("sequence_id", "group")]
    table = frame.groupby(settings).mean().rename("value").reset_index()
    levels = [level for level in settings if level != "method"]
    table["setting"] = table[levels].astype(str).agg(" ".join, axis=1)
    return table


# README


def front_table() -> str:
    """One row for each test: ours, the best of the paper's methods, and a control."""
    prices = points_of(SMOLLM2, "forgetting")

    def lost(method: str) -> str:
        own, neg = prices[method]["self"].to_numpy(), prices[method]["neg"].to_numpy()
        return at_price(own, -neg, 3)

    def found(method: str) -> str:
        return recall_pair(SMOLLM2_GROUPS, method)

    tests = {
        "DEL, SmolLM2: change of the text where others lose 3 points": (
            lost,
            list(prices),
            ("iterative_attribution", "random"),
        ),
        "INJ with distractors, SmolLM2, 1 %: the text's rows found / the other texts' rows": (
            found,
            read_frame(SMOLLM2_GROUPS).index.unique("method"),
            ("gradient_alignment", "row_norm"),
        ),
    }
    rows = []
    for test, (cell, measured, (ours, control)) in tests.items():
        known = {name: cell(name) for name in PAPER_RANKED if name in measured}
        best = max(known, key=lambda name: leading(known[name]))
        named = {ours: cell(ours), best: known[best], control: cell(control)}
        rows.append([test, *(f"{text} ({plain(name)})" for name, text in named.items())])
    return markdown(
        ["test, and model", "ours", "the best of the paper's but Zero-Out", "control"], rows
    )


def leading(cell: str) -> float:
    """The size of the number that a cell begins with; minus infinity where it has none."""
    begins = re.match(r"-?\d+\.\d+", cell)
    return abs(float(begins[0])) if begins else -math.inf


def plain(method: str) -> str:
    return method.removesuffix("_same_kind").replace("_", " ").title()


# Settings, and what was planted


def settings_table() -> str:
    """The settings of each method, with their defaults."""
    rows: list[list[str]] = []
    for name in METHODS:
        settings = {key: v for key, v in default_settings(name).items() if key != "batch_tokens"}
        shown = ", ".join(f"`{key}` {setting_text(value)}" for key, value in settings.items())
        rows.append([name, shown or "none"])
    return markdown(["method", "settings, and their defaults"], rows)


def setting_text(value: object) -> str:
    if value is None or value == ():
        return "none"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def planted_table() -> str:
    """How many planted texts are memorized by the paper's criteria, by repetitions."""
    frames = {
        model: pd.read_csv(ROOT / f"docs/results/{model}/planted.csv").set_index("repetitions")
        for model in SHIPPED.values()
    }
    found = pd.DataFrame({model: frame["found"] for model, frame in frames.items()})
    found.insert(0, "texts", frames[GPT2]["planted"])
    rows = [[f"{times}", *map(str, line)] for times, *line in found.itertuples()]
    return markdown(["repetitions", "texts", *frames], rows)


# Which tables there are


SMOLLM2_METHODS = (
    *("iterative_attribution", "attribution_contrast_1", "attribution", "hard_concrete"),
    *("hard_concrete_tuned", "slimming", "slimming_tuned", "activations"),
    *("integrated_gradients", "random"),
)
FORGETTING = (
    *("iterative_attribution", "refined_attribution", *SMOLLM2_METHODS[1:-1]),
    *(*MASK_RIVALS, *GENERAL_RIVALS, "random"),
)
GEMMA_METHODS = (
    *("iterative_attribution", "attribution_contrast_1", "attribution", "hard_concrete"),
    *("slimming", "activations", "integrated_gradients", *GENERAL_RIVALS, "random"),
)
SHIPPED_METHODS = (
    *("iterative_attribution", "iterative_attribution_contrast_0", "slimming"),
    *("integrated_gradients", "hard_concrete", "attribution", "zero_out"),
    *("gradient_alignment", "activations", "random"),
)
FEW = ("iterative_attribution", "attribution_contrast_1", "attribution", "slimming")
REV_METHODS = (
    *("oracle_mask", "oracle_rounds", "oracle_first_order", "activation_contrast_same_kind"),
    *("activation_contrast", "activations", "iterative_attribution", "hard_concrete", "slimming"),
    *("attribution", "gradient_alignment", "row_norm", "random"),
)
REV_OF_PAPER_TEXTS = tuple(
    name for name in REV_METHODS if name not in ("hard_concrete", "slimming")
)
SHARES_OF_PAPER_TEXTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MODELS: list[Column] = [
    ("SmolLM2, 0.2 %", SMOLLM2, "forgetting", 0.002),
    ("Gemma 3, 0.2 %", GEMMA, "forgetting", 0.002),
    ("gpt2, 10 %", GPT2, "del", 0.1),
    ("pythia, 10 %", PYTHIA, "del", 0.1),
]
SMOLLM2_SHARES = {"0.2 %": 0.002, "0.5 %": 0.005, "1 %": 0.01, "3 %": 0.03}
SMOLLM2_FEW = {"1 neuron (0.07 %)": 0.0007, "2 neurons (0.14 %)": 0.0014}
GEMMA_SHARES = {
    "1 neuron of each layer": 0.0007,
    "4 (0.2 %)": 0.002,
    "10 (0.5 %)": 0.005,
    "61 (3 %)": 0.03,
}
IN_GROUPS = (
    *("gradient_alignment", "attribution", "slimming", "hard_concrete", "iterative_attribution"),
    *("integrated_gradients", "activations", "row_norm", "random"),
)
SENTENCES = (
    *("gradient_alignment", "iterative_attribution", "integrated_gradients", "hard_concrete"),
    *("zero_out", "slimming", "activations", "attribution", "row_norm", "random"),
)
PAPER_TEXTS = ("gradient_alignment", *SMOLLM2_METHODS[:-1], "zero_out", "random")
BY_CATEGORY = (
    *("hard_concrete", "slimming", "integrated_gradients", "activations"),
    *("iterative_attribution", "attribution_contrast_1", "attribution", "gradient_alignment"),
    "random",
)
OTHER_ABLATIONS = ("slimming", "activations", "random")
IN_OTHER_ROWS = (
    *("hard_concrete", "slimming", "integrated_gradients", "activations", "row_norm"),
    "random",
)
RECALLS = {
    "SmolLM2, 1 %": SMOLLM2_GROUPS,
    "gpt2, 3 %": f"distractors-{GPT2}",
    "pythia, 3 %": f"distractors-{PYTHIA}",
}
RIVALS_IN_REV = {
    name: TITLES[name]
    for name in ("activation_contrast_same_kind", "activation_contrast", "activations")
} | {
    "selective_pruning_same_kind": "SelectivePruning, with texts of the same kind",
    "selective_synaptic_dampening_same_kind": "SelectiveSynapticDampening, likewise",
    **(RIVALS | {"hard_concrete": TITLES["hard_concrete"]}),
}
RIVALS_IN_INJ = [method for method in RIVALS if method != "random"]
TABLES: dict[str, Callable[[], str]] = {
    "agreement": agreement_table,
    "paper-recited-smollm2": lambda: paper_tables.recited_table(SMOLLM2),
    "paper-recited-gemma": lambda: paper_tables.recited_table(GEMMA),
    "paper-before-gemma": lambda: paper_tables.before_table(GEMMA),
    "paper-texts-gemma": lambda: paper_tables.texts_table(GEMMA, PAPER_TEXTS),
    "paper-sentences-gemma": lambda: paper_tables.sentences_table(GEMMA, SENTENCES),
    "paper-across-gemma": lambda: paper_tables.across_layers_table(GEMMA, SENTENCES),
    "paper-before-smollm2": lambda: paper_tables.before_table(SMOLLM2),
    "paper-texts-smollm2": lambda: paper_tables.texts_table(SMOLLM2, PAPER_TEXTS),
    "paper-counts-smollm2": lambda: prices_of(
        paper_tables.counts_points(SMOLLM2), (*BY_CATEGORY, "zero_out"), (0.5, 1, 3, 5)
    ),
    "paper-ablations-smollm2": lambda: paper_tables.ablations_table(SMOLLM2, OTHER_ABLATIONS),
    "paper-costs-smollm2": lambda: paper_tables.costs_table(SMOLLM2, PAPER_COSTS),
    "paper-single-smollm2": lambda: single_layers_table(
        paper_tables.frames_of(SMOLLM2)["single_layers"].query("method != 'random'")
    ),
    "paper-expanded-smollm2": lambda: paper_tables.expanded_table(SMOLLM2, IN_OTHER_ROWS),
    "paper-rev-smollm2": lambda: paper_tables.rev_table(
        SMOLLM2, REV_OF_PAPER_TEXTS, SHARES_OF_PAPER_TEXTS
    ),
    "paper-categories-smollm2": lambda: paper_tables.categories_table(
        SMOLLM2, (*BY_CATEGORY, "zero_out")
    ),
    "paper-distractors-smollm2": lambda: recall_multiples(SMOLLM2_GROUPS, IN_GROUPS),
    "paper-seeds-smollm2": lambda: paper_tables.seeds_table(SMOLLM2, IN_OTHER_ROWS),
    "paper-across-smollm2": lambda: paper_tables.across_layers_table(SMOLLM2, SENTENCES),
    "paper-sentences-smollm2": lambda: paper_tables.sentences_table(SMOLLM2, SENTENCES),
    "cost": cost_table,
    "gpu": gpu_table,
    "settings": settings_table,
    "times": times_table,
    "front": front_table,
    "front-edits": front_edits_table,
    "heads": heads_table,
    "inj": lambda: inj_table(SENTENCES),
    "inj-smollm2": lambda: alone_table(0.01),
    "inj-smollm2-small": lambda: alone_table(0.001),
    "planted": planted_table,
    "third": third_table,
    "distractors": lambda: recall_table(
        ("gradient_alignment", "attribution", "slimming", "hard_concrete", "row_norm", "random"),
        RECALLS,
    ),
    "benchmark-minutes": minutes_table,
    "rivals": rivals_table,
    "rivals-inj": lambda: recall_table(
        ("gradient_alignment", *RIVALS_IN_INJ, "activations", "row_norm", "random"),
        {f"{name}, 3 %": f"distractors-{model}" for name, model in SHIPPED.items()},
        TITLES | RIVALS,
    ),
    "rivals-rev": lambda: rev_price_table(tuple(RIVALS_IN_REV), SHIPPED, RIVALS_IN_REV),
    "rev": lambda: rev_price_table(
        REV_METHODS[:9] + REV_METHODS[10:11] + REV_METHODS[-1:], SHIPPED, TITLES
    ),
    "del": lambda: del_table(
        ("iterative_attribution", "slimming", "hard_concrete", "activations", "random"), MODELS
    ),
    "del-smollm2": lambda: del_table(FORGETTING, shares(SMOLLM2, SMOLLM2_SHARES), counted=True),
    "del-smollm2-few": lambda: del_table(
        ("refined_attribution", *FEW, "activations", *MASK_RIVALS, *GENERAL_RIVALS, "random"),
        shares(SMOLLM2, SMOLLM2_FEW),
        counted=True,
    ),
    "few-smollm2": lambda: few_neurons_table(SMOLLM2),
    "del-gemma": lambda: del_table(GEMMA_METHODS, shares(GEMMA, GEMMA_SHARES), counted=True),
    "prices-smollm2": lambda: price_table(SMOLLM2, "forgetting", FORGETTING, (1, 3, 5)),
    "prices-gemma": lambda: price_table(GEMMA, "forgetting", GEMMA_METHODS, (1, 3, 5)),
    "tests-smollm2": lambda: against_table(SMOLLM2, FORGETTING[1:], (1, 3, 5)),
    "tests-gemma": lambda: against_table(GEMMA, GEMMA_METHODS[1:], (1, 3, 5), added=True),
}
TABLES["alignment-share"] = alignment_share_table
for shipped in (GPT2, PYTHIA):
    TABLES[f"memory-{shipped}"] = partial(memory_table, shipped)
    TABLES[f"memory-difference-{shipped}"] = partial(memory_difference_table, shipped)
    TABLES[f"memory-contrast-{shipped}"] = partial(contrast_table, shipped)
    TABLES[f"seeds-{shipped}"] = partial(seeds_table, shipped)
    TABLES[f"erase-{shipped}"] = partial(erase_table, shipped)
    TABLES[f"erase_returned-{shipped}"] = partial(return_table, shipped)
    TABLES[f"erase_truth-{shipped}"] = partial(truth_table, shipped)
    TABLES[f"single-layers-{shipped}"] = partial(layers_of_shipped, shipped)
TABLES["erasures"] = erasures_table
TABLES["erase-methods"] = erase_methods_table
TABLES["erase-methods-pairs"] = erase_methods_pairs_table
TABLES["erase-smaller-steps"] = smaller_steps_table
TABLES["erase-pairs"] = erase_pairs_table
TABLES["erase-rates"] = partial(rates_table, {**SHIPPED, "SmolLM2": SMOLLM2})
TABLES["erase-rates-gemma"] = partial(rates_table, {"Gemma": GEMMA})
TABLES["erase-smollm2"] = partial(erase_table, SMOLLM2)
TABLES["erase_returned-smollm2"] = partial(return_table, SMOLLM2)
TABLES["erase-gemma"] = partial(erase_table, GEMMA)
TABLES["erase_returned-gemma"] = partial(return_table, GEMMA)
for shipped in SHIPPED.values():
    TABLES[f"del-{shipped}"] = partial(all_columns, shipped, SHIPPED_METHODS, (0.02, 0.1))
    TABLES[f"rev-{shipped}"] = partial(rev_table, shipped, REV_METHODS)


# Files in docs/results: the tables of tl-localize del and inj

FILES = {  # name of the file: the benchmark and the name of its table
    "del": ("del", "del"),
    "del_at_price": ("del", "del_at_price"),
    "del_tests": ("del", "del_tests"),
    "del_curve": ("curve", "del"),
    "del_curve_at_price": ("curve", "del_at_price"),
    "units_heads": ("heads", "del"),
    "units_neurons": ("neurons", "del"),
    "inj": ("inj", "inj"),
    "inj_whole_model": ("inj", "inj_across_layers"),
    "inj_tests": ("inj", "inj_tests"),
    "inj_more_sentences": ("seeds", "inj"),
    "inj_other_rows": ("seeds", "other_rows"),
    "distractors3_recall": ("distractors", "inj"),
    "distractors3_whole_model": ("distractors", "inj_across_layers"),
    "distractors3_tests": ("distractors", "inj_tests"),
}


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame with the methods in the package's order."""
    places = {name: place for place, name in enumerate(METHODS)}
    return frame.sort_values("method", key=lambda names: names.map(places), kind="stable")


def injection(model: str, kind: str = "inj") -> InjResults:
    frame = in_order(read_frame(f"{kind}-{model}").reset_index())
    ratio = (frame["injection_ratio"] * frame["multiple"]).round(6)
    about = {"model": model, "seed": 0, "ratio": ratio, "converged": True}  # others have no row
    return InjResults(frame.assign(**about), {}, pd.DataFrame())


def seeds_of_injection(model: str) -> dict[str, pd.DataFrame]:
    """INJ of more sentences, and the same in other rows."""
    results = injection(model, "inj_seeds")
    first, other = (part for _, part in results.frame.groupby("first_seed"))
    table = compare_seeds(first, other).set_index(["injection_ratio", "ratio", "method"])
    alone = replace(results, frame=first).table()
    return {"inj": with_titles(alone), "other_rows": with_titles(table)}


def stored_files(model: str) -> dict[Path, str]:
    """The texts of the files of a model."""

    def ablations(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return del_tables(DelResults(in_order(frame), {}, pd.DataFrame()), model)

    of_units = deletion(model, "heads").frame.groupby("units")
    tables = {
        **{kind: ablations(deletion(model, kind).frame) for kind in ("del", "curve")},
        **{str(units): ablations(part.drop(columns="units")) for units, part in of_units},
        "inj": inj_tables(injection(model), model),
        "distractors": inj_tables(injection(model, "distractors"), model),
        "seeds": seeds_of_injection(model),
    }
    found: dict[Path, str] = {}
    for name, (benchmark, table) in FILES.items():
        whole = flat(tables[benchmark][table])
        text = whole.to_csv(index=False, float_format="%.3g")
        found[ROOT / f"docs/results/{model}/{name}.csv"] = text
    return found


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(text: str) -> str:
    """The text of a page with its tables as they should be."""

    def replaced(place: re.Match[str]) -> str:
        make = TABLES.get(place["name"])
        return f"{place[1]}\n{make()}\n\n{place[3]}" if make else place[0]

    return PLACE.sub(replaced, text)


def complaints(write: bool) -> list[str]:
    """Pages and files whose tables differ, which are none where they are written; and tables on no
    page.
    """
    found = []
    used = set()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        used |= {place["name"] for place in PLACE.finditer(text)}
        expected = with_tables(text)
        if write:
            page.write_text(expected, encoding="utf-8")
        elif expected != text:
            found.append(f"{page.relative_to(ROOT)}: a table differs. Run python docs/tables.py")
    for path, text in (stored_files(GPT2) | stored_files(PYTHIA)).items():
        if write:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"{path.relative_to(ROOT)} differs. Run python docs/tables.py")
    unknown = [f"{name}: docs/tables.py has no such table" for name in sorted(used - {*TABLES})]
    return found + unknown + [f"{name}: no page shows it" for name in TABLES if name not in used]


if __name__ == "__main__":
    found = complaints(write="--check" not in sys.argv[1:])
    print("\n".join(found) or "every table is that of its numbers")
    sys.exit(bool(found))
