"""Tables of edits that erase a text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from cells import (  # noqa: E402
    GEMMA,
    SHIPPED,
    SMOLLM2,
    markdown,
    mean_with_interval,
    number,
    power,
    with_t_interval,
)
from comparison import names, read_frame  # noqa: E402
from edits import EDITED_BEFORE  # noqa: E402

from tl_localize.stats import paired_test  # noqa: E402

EDITS = {
    "default of erase": "the default of `erase`",
    "activation_contrast": "Activation Contrast",
    "refined_attribution": "Refined Attribution",
    "iterative_attribution": "Iterative Attribution",
    "gradient_alignment": "Gradient Alignment",
    "activations": "Activations",
    "random": "random rows",
    "true": "the true rows",
    "all rows": "all rows",
    "difference on": "gradient difference,",
    "npo on": "NPO,",
    "never injected": "a model that never saw it",
}
MODELS = {**SHIPPED, "SmolLM2": SMOLLM2, "Gemma": GEMMA}
ASKED_ROWS = "iterative_attribution"
DEFAULT_ROWS = "activation_contrast"
TESTED_EDIT = f"{DEFAULT_ROWS} 2 %"
ATTRIBUTIONS = ("iterative_attribution", "refined_attribution")
COMPARED_EDITS = (
    *((TESTED_EDIT, other) for other in ("random 2 %", "all rows", "activations 2 %")),
    *(("default of erase", other) for other in (TESTED_EDIT, "random 2 %", "all rows")),
    # added when all had been seen
    *((f"{method} 2 %", other) for method in ATTRIBUTIONS for other in ("random 2 %", "all rows")),
    *((f"{method} 2 %", "random 2 %") for method in ("activations", "gradient_alignment")),
    *(
        (f"{method} 0.2 %", "random 0.2 %")
        for method in (DEFAULT_ROWS, *ATTRIBUTIONS, "activations", "gradient_alignment")
    ),
)
LINE = "self_1_line"  # where the line between two looks passes the price
N_COMPARED = 17  # edits that are compared with it on each model, also where some are still to come
SMALLER_STEPS = "erase_smaller_steps"
COMPARED_ROWS = ("activation_contrast", "random", "all rows")
UNPLANNED_ROWS = ("random", "all rows")  # which the default's are compared with, without a test
N_ROW_TESTS = 12  # three on each of four models, also where some are still to come
TRAINING = {
    **{f"others_{step}": f"others, {step} steps" for step in (0, 50)},
    **{f"half_{step}": f"half of it, {step} steps" for step in (0, 5, 50)},
}


def edit_title(edit: str) -> str:
    name = next(name for name in EDITS if edit.startswith(name))
    return EDITS[name] + edit.removeprefix(name)


def edits_of(name: str) -> dict[str, pd.DataFrame]:
    """The rows of each edit by text, fractions in percent or points."""
    frame = read_frame(name)
    factors = {column: 1 if column == "kl_1" else 100 for column in map(str, frame)}
    frame = frame * pd.Series(factors)
    parts = frame.groupby(level="method", sort=False)
    return {str(edit): part.droplevel("method") for edit, part in parts}


def erase_table(model: str) -> str:
    """What each edit leaves of a text at a price, and how much less than the one that is tested."""
    edits = edits_of(f"erase-{model}")
    tested = edits[TESTED_EDIT]["self_1"]
    rows = []
    of_all = ("all rows", "difference on", "npo on")  # they stand at the end
    for edit in sorted(edits, key=lambda edit: (edit.startswith(of_all), edit)):
        rows_of = edits[edit]
        prices = [mean_with_interval(rows_of[f"self_{price}"]) for price in ("0.3", "1", "3")]
        if LINE in rows_of:
            prices.append(mean_with_interval(rows_of[LINE]))
        also = [mean_with_interval(rows_of["extracted_1"]), mean_with_interval(rows_of["kl_1"], 3)]
        gap = ""
        if edit != TESTED_EDIT:
            both = pd.concat([tested, rows_of["self_1"]], axis=1, keys=["tested", "other"]).dropna()
            p = np.minimum(1.0, paired_test(both["tested"], both["other"]) * N_COMPARED)
            gap = f"{with_t_interval(both['tested'] - both['other'])} (p = {power(p)})"
        rows.append([edit_title(edit), *prices, *also, gap])
    prices = [f"Self at Neg = -{price}" for price in ("0.3", "1", "3")]
    if LINE in edits[TESTED_EDIT]:
        prices.append("between looks at -1")
    also = ["extracted at -1 (%)", "KL at -1", f"{edit_title(TESTED_EDIT)} minus it at -1"]
    return markdown([f"edit ({len(tested)} texts)", *prices, *also], rows)


def front_edits_table() -> str:
    """README: the same edit on located and on other rows, beside unlearning of whole weights."""
    edits = {
        TESTED_EDIT: "rows by Activation Contrast",
        "iterative_attribution 2 %": "by Iterative Attribution",
        "random 2 %": "as many random rows",
        "all rows": "all rows",
        "difference on MLPs": "gradient difference",
        "npo on MLPs": "NPO",
    }
    rows = []
    for title, model in MODELS.items():
        measured = edits_of(f"erase-{model}")
        cells = [
            mean_with_interval(measured[edit]["self_1"]) if edit in measured else "-"
            for edit in edits
        ]
        rows.append([f"{title} ({len(measured[TESTED_EDIT])} texts)", *cells])
    return markdown(["change of the text where others lose a point", *edits.values()], rows)


def rates_table(models: Mapping[str, str]) -> str:
    """Self where the others have lost a point, mean over dev texts, by the rate of unlearning."""
    frames = {title: 100 * read_frame(f"erase_rates-{model}") for title, model in models.items()}
    rates = sorted({rate for frame in frames.values() for rate in frame.index.unique("ratio")})
    rows = []
    for title, frame in frames.items():
        n_texts = frame.index.unique("sequence_id").size
        for edit, part in frame["self_1"].groupby(level="method"):
            means = part.groupby(level="ratio").mean().reindex(rates)
            best = means.min()
            cells = [f"**{number(m)}**" if m == best else number(m) for m in means]
            rows.append([f"{title} ({n_texts} texts)", edit_title(str(edit)), *cells])
    return markdown(["model", "unlearning", *(f"{rate:g}" for rate in rates)], rows)


def erase_pairs_table() -> str:
    """Differences of two edits at each price, of the same texts, with intervals of Student's t."""
    rows = []
    for title, model in MODELS.items():
        edits = edits_of(f"erase-{model}")
        for first, second in COMPARED_EDITS:
            if second not in edits:
                continue
            gaps = edits[first] - edits[second].loc[edits[first].index]
            cells = [with_t_interval(gaps[f"self_{price}"]) for price in ("0.3", "1", "3")]
            cells.append(with_t_interval(gaps[LINE]) if LINE in gaps else "")
            n_texts = f"{title} ({len(gaps)} texts)"
            rows.append([n_texts, f"{edit_title(first)} minus {edit_title(second)}", *cells])
    prices = [f"Self at Neg = -{price}" for price in ("0.3", "1", "3")]
    return markdown(["model", "edits", *prices, "between looks at -1"], rows)


def erase_methods_table() -> str:
    """What ``erase`` takes with the rows that each method names, of texts of their own."""
    rows = []
    for title, model in MODELS.items():
        if f"erase_methods-{model}" not in names():
            continue
        edits = edits_of(f"erase_methods-{model}")
        for edit in (ASKED_ROWS, *COMPARED_ROWS):
            found = edits[edit]
            measured = [found["self_1"], found["extracted_1"], found["delta_others_accuracy"]]
            cells = [mean_with_interval(values) for values in measured]
            kl = mean_with_interval(found["kl_1"], 3)
            rows.append([f"{title} ({len(found)} texts)", edit_title(edit), *cells, kl])
    titles = ["change of the text", "still written (%)", "change of others, not watched", "KL"]
    return markdown(["model", "rows", *titles], rows)


def erase_methods_pairs_table() -> str:
    """Differences of the same, of all texts and of those that had not been edited before."""
    rows = []
    for title, model in MODELS.items():
        if f"erase_methods-{model}" not in names():
            continue
        edits = edits_of(f"erase_methods-{model}")
        every = edits[ASKED_ROWS]["self_1"]
        before = every.index.isin(EDITED_BEFORE.get(model, ()))
        for what, index in (("", every.index), (" not edited before", every.index[~before])):
            if what and not before.any():
                continue
            own = {edit: edits[edit]["self_1"].loc[index] for edit in (ASKED_ROWS, *COMPARED_ROWS)}
            cells = []
            for edit in COMPARED_ROWS:
                p = np.minimum(1.0, paired_test(own[ASKED_ROWS], own[edit]) * N_ROW_TESTS)
                gap = with_t_interval(own[ASKED_ROWS] - own[edit])
                cells.append(f"{gap} (p = {power(p)})")
            for edit in UNPLANNED_ROWS:
                cells.append(with_t_interval(own[DEFAULT_ROWS] - own[edit]))
            rows.append([f"{title} ({len(index)} texts{what})", *cells])
    titles = [f"{edit_title(ASKED_ROWS)} minus {edit_title(edit)}" for edit in COMPARED_ROWS]
    also = [
        f"{edit_title(DEFAULT_ROWS)} minus {edit_title(edit)} (no test was planned)"
        for edit in UNPLANNED_ROWS
    ]
    return markdown(["model", *titles, *also], rows)


def smaller_steps_table() -> str:
    """What ``erase`` takes at its first learning rate, and in the smaller steps in which it begins
    again, of the same texts.
    """
    rows = []
    for title, model in MODELS.items():
        if f"{SMALLER_STEPS}-{model}" not in names():
            continue
        first, smaller = (edits_of(f"{kind}-{model}") for kind in ("erase_methods", SMALLER_STEPS))
        for edit, now in smaller.items():
            before = first[edit].loc[now.index]
            cells = [
                mean_with_interval(found[measure])
                for measure in ("self_1", "delta_others_accuracy")
                for found in (before, now)
            ]
            gap = with_t_interval(now["self_1"] - before["self_1"])
            rows.append([f"{title} ({len(now)} texts)", edit_title(edit), *cells, gap])
    text, others = "change of the text", "change of others, not watched"
    steps = [f"{what}, {size} steps" for what in (text, others) for size in ("large", "small")]
    return markdown(["model", "rows", *steps, "small minus large, of the text"], rows)


def return_table(model: str) -> str:
    """What training brings back, of the texts that an edit erased."""
    rows = []
    for edit, rows_of in edits_of(f"erase-{model}").items():
        erased = rows_of["half_0"].dropna()
        if len(erased):
            cells = [mean_with_interval(rows_of[column]) for column in TRAINING]
            rows.append([f"{edit_title(edit)} ({len(erased)})", *cells])
    return markdown(["edit (texts that it erased)", *TRAINING.values()], rows)


def truth_table(model: str) -> str:
    """Edits of injected sentences, whose rows are known."""
    rows = []
    frame = pd.read_csv(ROOT / f"docs/results/{model}/erase_truth.csv")
    columns = ("precision", "neg_erased", "half_0", "half_5", "half_50")
    for edit, rows_of in frame.groupby("method", sort=False):
        erased = int(rows_of["half_0"].notna().sum())
        points = 100 * rows_of[[*columns]].assign(neg_erased=rows_of["neg_erased"] / 100)
        cells = [mean_with_interval(points[name]) for name in columns]
        rows.append([f"{edit_title(str(edit))} ({erased})", *cells])
    half = [f"half of it, {step} steps" for step in (0, 5, 50)]
    names = ["edit (sentences that it erased)", "precision (%)", "Neg where it is erased", *half]
    return markdown(names, rows)


def erasures_table() -> str:
    """Edits of 1, 5 and 20 texts at once: means over the texts."""
    frame = pd.read_csv(ROOT / "docs/results/erasures.csv")
    rows = []
    for line in frame.sort_values(["model", "max_others_lost", "texts"]).to_dict("records"):
        now = [
            f"{number(100 * line[f'{name}_before'])} → {number(100 * line[f'{name}_after'])}"
            for name in ("accuracy", "extracted", "half_extracted")
        ]
        price = [number(line["others_lost"]), number(line["perplexity_rise"])]
        erased = f"{line['texts_erased']} of {line['texts']}"
        asked = f"{line['max_others_lost']:g}"
        rows.append([str(line["model"]), asked, erased, *now, *price, number(line["kl"], 4)])
    names = ["recited (%)", "written from the prefix (%)", "from half of it (%)"]
    price_names = ["others lose (points)", "perplexity rises (%)", "KL"]
    return markdown(["model", "price (points)", "texts erased", *names, *price_names], rows)
