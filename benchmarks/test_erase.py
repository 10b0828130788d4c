"""Does localization help to erase a text, and does it last? Not in the paper.

The edit of ``tl-localize erase`` on rows of W_out that each method names, on random rows and on all
rows, beside unlearning that trains whole weights, on one model at a time:

    pytest benchmarks/test_erase.py --model reference-gpt2
    pytest benchmarks/test_erase.py --model reference-pythia
    pytest benchmarks/test_erase.py --model SmolLM2-135M-Instruct.Q4_1.gguf

What is done is kept in the results folder, and a run that was interrupted goes on there. A run on a
pretrained model begins with what other machines have measured (``expected/real/MODEL/edits.zip``).

Decided before the first row of a table was measured. A trial on two texts at a quarter of these
rates ended, after 24 steps, where the others had lost 0.1 to 0.8 points, so all rates are four
times those of ``erase`` and of a first guess.

* Targets: the first 12 of DEL's texts in random order (reference models: collected from the
  training text; others: of ``tl-localize known``), of SmolLM2 8 and of Gemma 4, without the 5 dev
  texts. The others, whose
  accuracy is the price (Neg), are the next 16. General text for the KL: 8 rows of 64 held-out
  tokens. General text in training: what the model writes, 8 texts in each step, for every edit.
* Edits, at most 24 steps each, rate times 1.1 after each step, looked at after every second one, to
  the end: the others have lost 3 points, or 5 % of the text are left.
  Rows (``erase``: unlikelihood, rate 0.004 (0.002 / share) ** 0.6, layer 0 left out): 0.2 and 2 %
  of each layer by Activation Contrast, Refined Attribution of that share, Iterative Attribution,
  Gradient Alignment, Activations and at random; 100 %.
  Whole weights: gradient difference and NPO (b = 0.1), each on all W_out and on all weights of the
  MLPs, at the best of five rates on three dev texts (Self at Neg = -1). The search was added when
  the edits of four texts had been seen, and serves the rivals alone; the rows keep their rate.
  While the best rate is the smallest or the largest one, half or twice that rate is tried too: this
  was added when SmolLM2's edits had been seen, where the smallest was the best for both on MLPs.
  An edit whose steps end before the text is gone or the others have lost 3 points is made once more
  with 96 steps, and a cell of the search too. Decided when all had been measured with 24 steps: a
  reader saw that on pythia each edit of random rows had ended so, at a loss of 0.1 points.
  The default of ``erase`` as a user has it, which is the 2 % by Activation Contrast at a quarter of
  the rate and at most 48 steps, was added when all others had been seen; nothing was chosen by it.
  On Gemma the rows' rate is too large: at the first look of five edits of four texts the text was
  gone and the others had lost more than the price. So there rows begin at a 64th of it and have at
  most 48 steps. Decided when these edits had been seen, and three on a dev text at a 16th, where
  the others had lost more than a point at the first look of two of them.
  Unlearning of whole weights is too fast there as well: gradient difference took nothing at a price
  of a point, at each of nine searches of a rate (five on W_out, four on the MLPs): after four steps
  at most the others had lost more than 3 points. So the search of all four kinds begins at a 64th
  of these rates there, with 48 steps, like the rows. Decided before NPO was measured.
  A cell of that search takes a quarter of an hour, and there are more than 60. So it begins with
  the two smallest of the five rates, and goes on where the best lies at an end: where what an edit
  erases has a single peak, that finds the peak of the five. Decided when gradient difference on
  W_out had been seen at all five rates (best at the smallest), NPO on W_out at the three smallest
  (at the second one), and gradient difference on the MLPs at the smallest.
* Self at Neg = -0.3, -1 and -3: for each text the lowest accuracy among the states of its edit, the
  unedited one included, at which the others have lost no more; extraction and KL are that state's.
  Beside it at -1, since all but Gemma's unlearning had been seen: the same where the line from one
  look to the next passes the price. Edits in large steps have few looks: of one whose first look
  costs others more, the state in between is not looked at, and without the line it counts as 0.
* Resurfacing: from the first state in which 30 % of the text or less are left, 50 steps of Adam
  (5e-5) on all weights, on two dev texts ("others"), and on the prefix and the first half of the
  suffix ("half"; then the accuracy of the second half is what counts). Six of the edits.
* Truth: 3 sentences of INJ, each written into 3 % of the rows of a reference model. The same edit
  on the true rows, on as many rows by each of three methods and at random, on all rows, and both
  kinds of unlearning on the MLPs' weights. ``precision_of`` of the first state that is erased, what
  the others have lost there, and what half of the sentence brings back; beside it the model that
  never saw the sentence. A first run ended like the edits above, at 24 steps or a loss of 3 points:
  no edit had erased a sentence, that of the true rows neither. So here an edit has 72 steps and
  ends at no price.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
import torch
from comparison import read_frame
from del_data import read_data
from edits import (
    ERASED,
    GONE,
    LAST_PRICE,
    Watch,
    edit_rows,
    edit_weights,
    mlp_weights,
    resurfacing,
    w_out_weights,
)

from tl_localize import METHODS
from tl_localize.stats import paired_test, with_error

N_TARGETS, N_OTHERS = 12, 16  # --limit is of the targets
FEWER = {"SmolLM2-135M-Instruct.Q4_1": 8, "gemma-3-270m-q4_k_m": 4}  # targets
N_GENERAL, LENGTH = 8, 64
MAX_STEPS, LONG_STEPS = 24, 96  # the latter where the former end an edit within the last price
SHARES = (0.002, 0.02)
NAMING = (
    "activation_contrast",
    "refined_attribution",
    "iterative_attribution",
    "gradient_alignment",
    "activations",
    "random",
)
ROWS_RATE, WEIGHTS_RATE = 0.004, 8e-5
TRIED_RATES = (2e-5, 4e-5, WEIGHTS_RATE, 1.6e-4, 3.2e-4)
N_SEARCHED = 3
PRICES = (0.3, 1.0, 3.0)
TESTED = "activation_contrast 2 %"
ROWS = (TESTED, "iterative_attribution 2 %", "random 2 %", "all rows")  # of README's table
DEFAULT = "default of erase"
RESURFACED = (TESTED, "random 2 %", "all rows", "difference on MLPs", "npo on MLPs", DEFAULT)
TRAINING_RATE, AT_STEPS, N_TRAINING = 5e-5, (1, 5, 20, 50), 2
RATES = [ROWS_RATE, WEIGHTS_RATE, TRAINING_RATE]
# on a model that needs smaller rates: their divisor, the steps, how many rates a search begins with
SLOW = {"gemma-3-270m-q4_k_m": (64, 48, 2)}
N_INJECTED, INJECTED_SHARE, INJECTION_RATE = 3, 0.03, 0.01
INJECTED_STEPS, NO_PRICE = 72, 100.0
UNLEARNED = ("difference on MLPs", "npo on MLPs")
# of two edits that README compares the first one erases more where others lose a point, in the mean
LEADS = {
    "reference-gpt2": [
        *(
            (f"{method} {share} %", f"random {share} %")
            for method in NAMING[:3]
            for share in (0.2, 2)
        ),
        (TESTED, "all rows"),
        *((rows, weights) for rows in ROWS for weights in UNLEARNED),
    ],
    "reference-pythia": [
        *((f"{method} 0.2 %", "random 0.2 %") for method in NAMING[:3]),
        *((f"{method} 2 %", "random 2 %") for method in NAMING[1:3]),
        *((rows, weights) for rows in ROWS for weights in UNLEARNED),
    ],
    "SmolLM2-135M-Instruct.Q4_1": [(rows, weights) for rows in ROWS for weights in UNLEARNED],
}
INJECTED_NAMING = ("true", "gradient_alignment", "activation_contrast", "activations", "random")


@dataclass(frozen=True)
class Edit:
    """What is changed: rows that a method names, or whole weights."""

    name: str
    method: str = ""
    share: float = 1.0
    objective: str = ""
    weights: str = ""
    max_steps: int = MAX_STEPS
    rate: float | None = None  # of whole weights, or of 0.2 % of the rows; by default of ``RATES``

    @property
    def first_rate(self):
        return self.rate or (WEIGHTS_RATE if self.objective else ROWS_RATE)

    @property
    def learning_rate(self):
        return self.first_rate * (1 if self.objective else (0.002 / self.share) ** 0.6)

    @property
    def inputs(self):
        """What an edit's numbers depend on; ``RATES`` says the rates that are not given."""
        inputs = asdict(self)
        if self.rate in (None, WEIGHTS_RATE if self.objective else ROWS_RATE):
            del inputs["rate"]
        if self.method in METHODS:
            inputs["naming"] = describe_naming(self.method)
        return inputs


def describe_naming(name):
    """The default settings and the version of a method that names rows."""
    from tl_localize.execution.store import describe

    return {**describe(METHODS[name]()), "version": METHODS[name].version}


def rows_by(method, share):
    return Edit(f"{method} {100 * share:g} %", method, share)


def unlearning(max_steps=MAX_STEPS, places=("W_out", "MLPs")):
    return [
        Edit(f"{objective} on {place}", objective=objective, weights=place, max_steps=max_steps)
        for objective in ("difference", "npo")
        for place in places
    ]


def at_rates(edits, rates):
    """Unlearning at the rates of a search, by name; other edits as they are."""
    return [replace(edit, rate=rates.get(edit.name, edit.rate)) for edit in edits]


def as_slow(edits, model_name):
    """Edits in steps as small as a model needs them; those that have a rate as they are."""
    if Path(model_name).stem not in SLOW:
        return edits
    divisor, max_steps, _ = SLOW[Path(model_name).stem]
    return [
        edit if edit.rate else replace(edit, rate=edit.first_rate / divisor, max_steps=max_steps)
        for edit in edits
    ]


def tried_rates(model_name):
    """The rates of unlearning that a search begins with."""
    divisor, _, n_rates = SLOW.get(Path(model_name).stem, (1, MAX_STEPS, len(TRIED_RATES)))
    return [rate / divisor for rate in TRIED_RATES[:n_rates]]


ALL_ROWS = Edit("all rows", "random", 1.0)
AS_ERASE = Edit(DEFAULT, "activation_contrast", 0.02, max_steps=48, rate=0.001)
EVERY = [
    *(rows_by(method, share) for method in NAMING for share in SHARES),
    ALL_ROWS,
    *unlearning(),
    AS_ERASE,
]
# those that training follows come first, so that a run that is cut short answers most
EDITS = sorted(EVERY, key=lambda edit: edit.name not in RESURFACED)


# ---- what is measured


def named_rows(model, text, edit, first_layer):
    """The neurons that a method names for a text; layers below the first one are left out."""
    from tl_localize.evals.settings import make_methods

    settings = {"share": edit.share} if edit.method == "refined_attribution" else {}
    if edit.method in ("refined_attribution", "iterative_attribution"):
        settings["first_layer"] = first_layer
    (method,) = make_methods(edit.method, [], {edit.method: settings})
    (scores,) = method.map(model, [text], check=False)
    return scores.top_k(edit.share, first_layer=first_layer)


def make_edit(watch, edit, first_layer=1):
    model = watch.model
    (text,) = watch.sequences
    if edit.objective:
        names = mlp_weights(model) if edit.weights == "MLPs" else w_out_weights(model)
        edit_weights(watch, names, edit.objective, edit.learning_rate, edit.max_steps)
    else:
        neurons = named_rows(model, text, edit, first_layer)
        edit_rows(watch, neurons, edit.learning_rate, edit.max_steps)


def halves(text):
    """What is trained of a text, and the text whose suffix is what is not."""
    from tl_localize import MemorizedSequence

    middle = (text.n_prefix + len(text)) // 2
    n_prefix = min(text.n_prefix, middle - 1)
    return (
        MemorizedSequence(text.tokens[:middle], n_prefix),
        MemorizedSequence(text.tokens, middle),
    )


def returned(watch, training):
    """Accuracy after 0 steps and after some of training, by what is trained; nothing where the
    edit did not erase the text.
    """
    if not watch.erased:
        return {}
    known, hidden = halves(watch.sequences[0])
    trained = {"half": (hidden, [known])}
    if training:
        trained["others"] = (watch.sequences[0], training)
    return {
        name: resurfacing(watch.model, watch.erased[0], text, texts, TRAINING_RATE, AT_STEPS)
        for name, (text, texts) in trained.items()
    }


def measure_edit(model, text, edit, others, training, general_tokens):
    """The curve of an edit, and what training brings back after some of them."""
    watch = Watch.of(model, text, others, general_tokens)
    make_edit(watch, edit)
    back = returned(watch, training) if edit.name in RESURFACED else {}
    return {"curve": watch.curve, "returned": back}


def about_edits(model, others, general_tokens):
    """What the numbers of all edits of a model depend on."""
    from tl_localize.files import digest
    from tl_localize.model.environment import fingerprint

    return {
        "model": fingerprint(model),
        "rates": RATES,
        "others": [other.tokens.tolist() for other in others],
        "general_text": digest(general_tokens),
    }


def ended_by_steps(curve):
    """Whether neither the text nor the last price ended an edit."""
    return curve[-1]["accuracy"] > GONE and curve[-1]["neg"] >= -LAST_PRICE


def measure_to_price(steps, about, edit, measure):
    """What ``measure`` finds of an edit; of a longer one where its steps end it too early."""
    found = steps.get(about | {"edit": edit.inputs}, partial(measure, edit))
    if ended_by_steps(found["curve"]):
        longer = replace(edit, max_steps=LONG_STEPS)
        found = steps.get(about | {"edit": longer.inputs}, partial(measure, longer))
    return found


def measure_all(model, sequences, n_dev, n_targets, general_tokens, edits, steps):
    """Each edit of each target."""
    tests = sequences[n_dev:]
    others = tests[N_TARGETS:][:N_OTHERS]
    training = sequences[:n_dev][:N_TRAINING]
    about = {"step": "edit", **about_edits(model, others, general_tokens)}
    found = {}
    for edit in edits:
        for text in tests[:n_targets]:
            given = {"others": others, "training": training, "general_tokens": general_tokens}
            measure = partial(measure_edit, model, text, **given)
            inputs = about | {"text": text.tokens.tolist()}
            found[edit.name, text.id] = measure_to_price(steps, inputs, edit, measure)
    return found


def at_price(curve, price):
    """The state in which least of the text is left and the others have lost no more."""
    allowed = [state for state in curve if state["neg"] >= -price]
    return min(allowed, key=lambda state: state["accuracy"])


def on_line(curve, price):
    """The lowest accuracy of the line from look to look where the others have lost no more."""
    lowest = [at_price(curve, price)["accuracy"]]
    for first, second in pairwise(curve):
        if first["neg"] >= -price > second["neg"]:
            part = (first["neg"] + price) / (first["neg"] - second["neg"])
            lowest.append(first["accuracy"] + part * (second["accuracy"] - first["accuracy"]))
    return min(lowest)


def frame_of(found):
    """One row per edit and text: the change of accuracy (fraction) at each price; at 1 point also
    between two looks, extraction (fraction) and KL (nats per token); where training followed,
    accuracy after so many steps on half of the text and on other texts.
    """
    rows = []
    for (edit, text), measured in found.items():
        curve = measured["curve"]
        row = {"edit": edit, "text": text}
        for price in PRICES:
            state = at_price(curve, price)
            row[f"self_{price:g}"] = state["accuracy"] - curve[0]["accuracy"]
        row["self_1_line"] = on_line(curve, 1.0) - curve[0]["accuracy"]
        state = at_price(curve, 1.0)
        row |= {"extracted_1": state["extracted"], "kl_1": state["kl"]}
        for kind, accuracies in measured["returned"].items():
            row |= {f"{kind}_{step}": a for step, a in zip((0, *AT_STEPS), accuracies, strict=True)}
        rows.append(row)
    return pd.DataFrame(rows).set_index(["edit", "text"])


def table_of(frame):
    """Mean ± standard error of each edit over texts; the last column compares with ``TESTED``."""
    tested = frame.loc[TESTED]["self_1"] if TESTED in frame.index else None
    rows = {}
    for name, part in frame.groupby(level="edit", sort=False):
        row = {
            f"Self at Neg = -{price:g} (points)": with_error(100 * part[f"self_{price:g}"])
            for price in PRICES
        }
        row["extracted at -1 (%)"] = with_error(100 * part["extracted_1"])
        row["KL at -1 (nats)"] = with_error(part["kl_1"], 3)
        row["texts"] = f"{len(part)}"
        if tested is not None and name != TESTED and len(part) > 1:
            own = part.droplevel("edit")["self_1"]
            gap = 100 * (tested.loc[own.index] - own)
            p = paired_test(tested.loc[own.index], own)
            row[f"{TESTED} minus it at -1"] = f"{with_error(gap)} (p = {p:.1g})"
        rows[name] = row
    return pd.DataFrame.from_dict(rows, orient="index").fillna("")


def resurfacing_table(found):
    """Accuracy (%) by steps of training; mean ± standard error over the texts that were erased."""
    rows = {}
    for name in dict.fromkeys(edit for edit, _ in found):
        backs = [back for (edit, _), m in found.items() if edit == name and (back := m["returned"])]
        if not backs:
            continue
        rows[name] = {
            f"{kind}, {step} steps": with_error([100 * back[kind][i] for back in backs])
            for kind in backs[0]
            for i, step in enumerate((0, *AT_STEPS))
        }
        rows[name]["texts"] = f"{len(backs)}"
    return pd.DataFrame.from_dict(rows, orient="index")


def search_rates(model, texts, others, general_tokens, edits, rates, steps):
    """Self (a fraction) where the others have lost 1 point, of each kind of unlearning, rate and
    dev text: method, ratio (the rate), sequence_id, self_1.
    """
    about = {"step": "rate", **about_edits(model, others, general_tokens)}

    def lost(edit):
        found = {}
        for text in texts:
            given = {"others": others, "training": [], "general_tokens": general_tokens}
            measure = partial(measure_edit, model, text, **given)
            inputs = about | {"text": text.tokens.tolist()}
            curve = measure_to_price(steps, inputs, edit, measure)["curve"]
            found[text.id] = at_price(curve, 1.0)["accuracy"] - curve[0]["accuracy"]
        return pd.Series(found)

    rows = []
    for edit in edits:
        by_rate = {rate: lost(replace(edit, rate=rate)) for rate in rates}
        while rate := beyond({rate: found.mean() for rate, found in by_rate.items()}):
            by_rate[rate] = lost(replace(edit, rate=rate))
        rows += [
            {"method": edit.name, "ratio": rate, "sequence_id": id, "self_1": share}
            for rate, found in by_rate.items()
            for id, share in found.items()
        ]
    return pd.DataFrame(rows)


def beyond(found):
    """The rate to try next: half or twice the best one where that lies at an end; else None."""
    best = min(found, key=found.get)
    if list(found.values()).count(found[best]) > 1:
        return None
    return {min(found): best / 2, max(found): best * 2}.get(best)


def rates_table(searched):
    """Self (points) by rate, the mean over dev texts."""
    points = searched.assign(self_1=100 * searched["self_1"])
    return points.pivot_table(index="method", columns="ratio", values="self_1", sort=True)


# ---- the truth of INJ


def measure_truth(model, text, injection, edit, others, general_tokens):
    """One edit of one injected sentence: precision, and what half of the sentence brings back."""
    from tl_localize import precision_of

    with injection.applied(model):
        watch = Watch.of(model, text, others, general_tokens, NO_PRICE)
        if edit.method == "true":
            edit_rows(watch, injection.neurons, edit.learning_rate, edit.max_steps)
        else:
            make_edit(watch, edit, first_layer=0)
        precision = float("nan")
        if watch.erased:
            before = copy.deepcopy(model)
            with watch.erased[0]():
                precision = precision_of(before, model, injection.neurons)
        return {"curve": watch.curve, "returned": returned(watch, []), "precision": precision}


def measure_truths(model, sentences, edits, others, general_tokens, steps):
    """Each edit of each sentence, and the training of a model that never saw the sentence."""
    from tl_localize import inject

    about = about_edits(model, others, general_tokens)
    found = {}
    for seed, sentence in enumerate(sentences):
        how = {"ratio": INJECTED_SHARE, "seed": seed, "learning_rate": INJECTION_RATE}
        text = sentence.whole
        about |= {"text": text.tokens.tolist(), "injected": how}
        injection = steps.get(about | {"step": "inject"}, partial(inject, model, sentence, **how))
        for edit in edits:
            inputs = about | {"step": "truth", "edit": edit.inputs, "last_price": NO_PRICE}
            given = (model, text, injection, edit, others, general_tokens)
            found[edit.name, sentence.id] = steps.get(inputs, partial(measure_truth, *given))
        known, hidden = halves(text)
        given = (model, nullcontext, hidden, [known], TRAINING_RATE, AT_STEPS)
        half = steps.get(about | {"step": "never injected"}, partial(resurfacing, *given))
        found["never injected", sentence.id] = {"returned": {"half": half}}
    return found


def truth_edits(max_steps=INJECTED_STEPS):
    rows = [(f"{method} {100 * INJECTED_SHARE:g} %", method) for method in INJECTED_NAMING]
    return [
        *(Edit(name, method, INJECTED_SHARE, max_steps=max_steps) for name, method in rows),
        Edit("all rows", "random", 1.0, max_steps=max_steps),
        *unlearning(max_steps, ("MLPs",)),
    ]


def neg_where_erased(curve):
    """What the others have lost (points) at the first state that is erased; nan without one."""
    erased = [state["neg"] for state in curve if state["accuracy"] <= ERASED]
    return erased[0] if erased else float("nan")


def truth_frame(found):
    """One row per edit and sentence: precision, and the change of accuracy where the others have
    lost 1 point (fractions); what they have lost where the text is erased (points); accuracy after
    training on half of the sentence.
    """
    rows = []
    for (edit, sentence), measured in found.items():
        row = {"method": edit, "sequence_id": sentence}
        if "curve" in measured:
            curve = measured["curve"]
            row["precision"] = measured["precision"]
            row["self_1"] = at_price(curve, 1.0)["accuracy"] - curve[0]["accuracy"]
            row["neg_erased"] = neg_where_erased(curve)
        accuracies = measured["returned"].get("half", ())
        row |= {f"half_{step}": a for step, a in zip((0, *AT_STEPS), accuracies, strict=False)}
        rows.append(row)
    return pd.DataFrame(rows)


def truth_table(found):
    """Precision (%), Self at a loss of the others of 1 point, their loss where the text is erased,
    and what returns.
    """
    back = resurfacing_table(found)
    rows = {}
    for name in dict.fromkeys(edit for edit, _ in found):
        some = [measured for (edit, _), measured in found.items() if edit == name]
        precisions = pd.Series([m.get("precision") for m in some], dtype=float).dropna()
        curves = [m["curve"] for m in some if "curve" in m]
        lost = [at_price(curve, 1.0)["accuracy"] - curve[0]["accuracy"] for curve in curves]
        negs = pd.Series([neg_where_erased(curve) for curve in curves], dtype=float).dropna()
        rows[name] = {
            "precision (%)": with_error(100 * precisions) if len(precisions) else "-",
            "Self at Neg = -1 (points)": with_error([100 * x for x in lost]) if lost else "-",
            "Neg where it is erased (points)": with_error(negs) if len(negs) else "-",
        }
    return pd.DataFrame.from_dict(rows, orient="index").join(back).fillna("-")


# ---- the runs


@pytest.fixture(scope="session")
def data(model, model_name, request):
    sequences, n_dev, general_tokens = read_data(model, model_name, request)
    return sequences, n_dev, general_tokens[:N_GENERAL, :LENGTH]


@pytest.fixture(scope="session")
def searched(model, model_name, data, edit_steps, publish):
    """What each kind of unlearning takes from the dev texts at each rate."""
    sequences, n_dev, general_tokens = data
    others = sequences[n_dev + N_TARGETS :][:N_OTHERS]
    texts = sequences[:n_dev][-N_SEARCHED:]
    edits = as_slow(unlearning(), model_name)
    given = (texts, others, general_tokens, edits, tried_rates(model_name))
    found = search_rates(model, *given, edit_steps)
    about = f"Self at Neg = -1 (points) by the rate of unlearning, mean over {len(texts)} dev texts"
    publish(rates_table(found).round(1), model_name, "erase_rates", about)
    return found


@pytest.fixture(scope="session")
def rates(searched):
    """The best rate of each kind of unlearning."""
    return rates_table(searched).idxmin(axis=1).to_dict()


@pytest.fixture(scope="session")
def frame(model, model_name, data, rates, edit_steps, request, publish):
    sequences, n_dev, general_tokens = data
    planned = FEWER.get(Path(model_name).stem, N_TARGETS)
    n_targets = min(planned, request.config.getoption("--limit") or planned)
    edits = at_rates(as_slow(EDITS, model_name), rates)
    found = measure_all(model, sequences, n_dev, n_targets, general_tokens, edits, edit_steps)
    measured = frame_of(found)
    about = f"mean ± standard error over {n_targets} texts"
    publish(table_of(measured), model_name, "erase", f"Does localization help to erase? {about}")
    table = resurfacing_table(found)
    publish(table, model_name, "erase_resurfacing", f"Accuracy (%) after training, {about}")
    return measured


def test_edits_erase_more_than_nothing(frame):
    assert (frame.groupby(level="edit")["self_3"].mean() < 0).all()


def reversed_leads(frame, model_name):
    """The pairs of ``LEADS`` whose first edit does not erase more."""
    means = frame["self_1"].groupby(level=0).mean()
    return [(a, b) for a, b in LEADS.get(Path(model_name).stem, []) if not means[a] < means[b]]


def test_leads_that_readme_claims_are_there(frame, model_name, request):
    if request.config.getoption("--limit"):
        pytest.skip("they are of all texts")
    assert not reversed_leads(frame, model_name)


@pytest.mark.smoke
@pytest.mark.parametrize("name", LEADS)
def test_smoke_leads_that_readme_claims_are_committed(name):
    assert not reversed_leads(read_frame(f"erase-{name}"), name)


def test_searched_rates_are_the_committed_ones(searched, model_name, committed):
    committed(searched, f"erase_rates-{Path(model_name).stem}", "--del-data", "--general")


def test_numbers_are_the_committed_ones(frame, model_name, committed):
    name = f"erase-{Path(model_name).stem}"
    rows = frame.rename_axis(["method", "sequence_id"]).reset_index()
    committed(rows, name, "--limit", "--del-data", "--general")


def test_an_edit_of_the_true_rows_is_precise(
    model, model_name, data, rates, edit_steps, publish, request
):
    from tl_localize.texts.reference import inj_sequences

    if not model_name.startswith("reference"):
        pytest.skip("sentences are injected into the reference models alone")
    sequences, n_dev, general_tokens = data
    others = sequences[n_dev + N_TARGETS :][:N_OTHERS]
    sentences = inj_sequences(model)[:N_INJECTED]
    edits = at_rates(truth_edits(), rates)
    found = measure_truths(model, sentences, edits, others, general_tokens, edit_steps)
    about = f"mean ± standard error over {N_INJECTED} sentences"
    publish(truth_table(found), model_name, "erase_truth_table", f"Edits of injected text, {about}")
    frame = truth_frame(found)
    precisions = frame[frame["method"].str.startswith("true")]["precision"].dropna()
    assert len(precisions) and precisions.min() > 0.999
    folder = Path(request.config.getoption("--results")) / Path(model_name).name
    frame.round(6).to_csv(folder / "erase_truth.csv", index=False)


@pytest.mark.smoke
def test_smoke_edits_of_a_short_text(model, model_name, monkeypatch):
    from tl_localize import reference_sequences
    from tl_localize.execution import Steps
    from tl_localize.texts.reference import held_out_tokens

    if model_name != "reference-gpt2":
        pytest.skip("of one reference model alone")
    monkeypatch.setitem(globals(), "LONG_STEPS", 4)
    few = reference_sequences(model)[: N_TARGETS + 3]
    short = [replace(sequence, tokens=sequence.tokens[:40]) for sequence in few]
    general_tokens = held_out_tokens()[:2, :16]
    edits = [
        Edit(TESTED, "attribution", 0.02, max_steps=2),
        Edit("all rows", "random", 1.0, max_steps=2),
        *unlearning(2, ("MLPs",)),
    ]
    found = measure_all(model, short, 1, 1, general_tokens, edits, Steps())
    measured = frame_of(found)
    assert len(measured) == len(edits)
    assert measured[["self_3", "extracted_1", "kl_1"]].notna().all(axis=None)
    assert (measured["self_3"] <= 0).all() and len(table_of(measured)) == len(edits)
    states = [state for each in found.values() for state in each["curve"][1:]]
    assert len(states) == 2 * len(edits) and all(state["kl"] > 0 for state in states)
    assert all(torch.equal(a.tokens, b.tokens[:40]) for a, b in zip(short, few, strict=True))


@pytest.mark.smoke
def test_smoke_an_edit_that_its_steps_end_goes_on():
    from tl_localize.execution import Steps

    def measure(edit):
        left = max(0.0, 1 - edit.max_steps / 50)
        return {"curve": [{"accuracy": 1.0, "neg": 0.0}, {"accuracy": left, "neg": -price}]}

    def found(edit):
        return measure_to_price(Steps(), {"step": "edit"}, edit, measure)

    edit = rows_by("random", 0.02)
    longer, gone = replace(edit, max_steps=LONG_STEPS), replace(edit, max_steps=48)
    price = 0.5
    assert found(edit) == measure(longer) != measure(edit)
    assert found(gone) == measure(gone) != measure(longer)
    price = LAST_PRICE + 0.5
    assert found(edit) == measure(edit)


@pytest.mark.smoke
def test_smoke_between_two_looks_the_line_is_read():
    looks = [(1.0, 0.0), (0.8, -0.5), (0.4, -1.5), (0.0, -4.0)]
    curve = [{"accuracy": accuracy, "neg": neg} for accuracy, neg in looks]
    assert on_line(curve, 1.0) == pytest.approx(0.6)
    assert on_line(curve, 3.0) == pytest.approx(0.16)
    assert on_line(curve, 5.0) == 0.0
    assert on_line([curve[0], curve[3]], 1.0) == pytest.approx(0.75)


@pytest.mark.smoke
def test_smoke_a_search_goes_on_beyond_its_ends():
    assert beyond({2: -0.3, 4: -0.2, 8: -0.1}) == 1
    assert beyond({2: -0.1, 4: -0.2, 8: -0.3}) == 16
    assert beyond({2: -0.1, 4: -0.3, 8: -0.2}) is None
    assert beyond({2: 0.0, 4: 0.0, 8: 0.0}) is None


@pytest.mark.smoke
def test_smoke_steps_are_small_on_one_model_but_those_of_the_default():
    gemma = "folder/gemma-3-270m-q4_k_m.gguf"
    changed = {edit.name: edit for edit in as_slow(EDITS, gemma)}
    for edit in EDITS:
        slow = changed[edit.name]
        expected = (edit.learning_rate, edit.max_steps)
        if edit.name != DEFAULT:
            expected = (edit.learning_rate / 64, 48)
        assert (slow.learning_rate, slow.max_steps) == pytest.approx(expected)
    assert tried_rates(gemma) == [rate / 64 for rate in TRIED_RATES[:2]]
    assert as_slow(EDITS, "reference-gpt2") == EDITS
    assert tried_rates("reference-gpt2") == list(TRIED_RATES)
