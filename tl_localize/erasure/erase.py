"""``erase``: which rows of W_out to change so that a model no longer recites some texts, and
everything else stays as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from tl_localize.checks import (
    Real,
    check_between,
    check_choice,
    check_count,
    check_positive,
    check_ratio,
    check_seed,
)
from tl_localize.erasure.measures import (
    Price,
    PriceMeter,
    kl_of_edit,
    mean_accuracy,
    measure_texts,
)
from tl_localize.erasure.result import Erasure
from tl_localize.erasure.row_edit import RowEdit, read_rows
from tl_localize.files import identity
from tl_localize.injection import rows_replaced
from tl_localize.injection.training import TrainedRows
from tl_localize.methods import ActivationContrast, IterativeAttribution, Localizer
from tl_localize.methods.base import Method, check_scores, label_methods
from tl_localize.methods.contrast import N_DRAWN, written_texts
from tl_localize.metrics import accuracy, batch_loss, check_recited, check_text, mean_unlikelihood
from tl_localize.model.environment import about_model, environment
from tl_localize.model.loading import is_as_loaded, is_reference, source_of_model
from tl_localize.model.memory import TextReport, as_text_report, rows_that_fit, work_in_batches
from tl_localize.model.neurons import LanguageModel, NeuronView, model_name
from tl_localize.scores import NeuronScores, NeuronSet, least_share
from tl_localize.sequences import (
    MemorizedSequence,
    SequenceBatch,
    check_sequences,
    one_or_more,
    other_texts,
)
from tl_localize.texts.known import MIN_ACCURACY, known, origin_of
from tl_localize.texts.reference import held_out_tokens
from tl_localize.units import NEURONS

Edit = Literal["rows", "ablate"]
DEFAULT_METHODS = {"rows": ActivationContrast, "ablate": IterativeAttribution}
N_OTHERS = 40  # other texts: half of them watch the price, half of them are measured at the end
N_GENERAL, LENGTH = 32, 64  # rows of general text, and their tokens: halved likewise
N_WRITTEN = 8  # texts that the model writes, in each training step
SHARE = 0.02  # of the rows of each layer that are trained
MAX_STEPS = 48
GROWTH = 1.1  # of the learning rate, from step to step: few steps serve any model
CHECK_EVERY = 2  # training steps between two looks at the price
LEAST_STEPS = 8  # to the price: where fewer pass it, they are too large
SMALLER_RATES = (1, 1 / 4, 1 / 16, 1 / 64, 1 / 256)  # that are tried then
N_HALVINGS = 6  # of the interval in which the smallest set lies
N_BETWEEN = 4  # of the way from the last state within the price to the next one


@dataclass(frozen=True)
class Goal:
    """When to stop.

    Args:
        max_recited: mean accuracy of the texts at which they count as erased, a fraction.
        price: what other text may lose.
    """

    max_recited: Real
    price: Price

    def __post_init__(self) -> None:
        check_between(0, 1, max_recited=self.max_recited)
        check_between(0, 100, max_others_lost=self.price.others_lost)
        check_between(0, 1e6, max_perplexity_rise=self.price.perplexity_rise)

    @property
    def settings(self) -> dict[str, Real]:
        """As they are asked for."""
        return {
            "max_recited": self.max_recited,
            "max_others_lost": self.price.others_lost,
            "max_perplexity_rise": self.price.perplexity_rise,
        }


@dataclass(frozen=True, eq=False)
class State:
    """Rows that were tried, and what they do."""

    neurons: NeuronSet
    rows: Float[Tensor, "n d_model"]
    recited: float
    price: Price


@dataclass(frozen=True, eq=False)
class Trial:
    """What tried rows are judged by."""

    model: LanguageModel
    sequences: Sequence[MemorizedSequence]
    meter: PriceMeter
    goal: Goal

    def judge(self, neurons: NeuronSet, rows: Float[Tensor, "n d_model"]) -> State:
        """What the model does with these rows."""
        with rows_replaced(self.model, neurons, rows):
            recited = mean_accuracy(self.model, self.sequences)
            return State(neurons, rows, recited, self.meter.measure())

    def keeps_price(self, state: State) -> bool:
        return state.price.within(self.goal.price)

    def is_erased(self, state: State) -> bool:
        return state.recited <= self.goal.max_recited


def erase(
    model: LanguageModel,
    sequences: MemorizedSequence | Iterable[MemorizedSequence],
    *,
    edit: Edit = "rows",
    method: Method | None = None,
    share: Real = SHARE,
    others: MemorizedSequence | Iterable[MemorizedSequence] | None = None,
    general_tokens: Integer[Tensor, "batch pos"] | None = None,
    max_recited: Real = 0.3,
    max_others_lost: Real = 1.0,
    max_perplexity_rise: Real = 5.0,
    learning_rate: Real | None = None,
    max_steps: int = MAX_STEPS,
    seed: int = 0,
    check: bool = True,
    progress: Callable[..., None] | None = None,
) -> Erasure:
    """Change rows of W_out until a model no longer recites some texts, as far as other text allows.

    ``edit="rows"`` trains the rows that a method names in each layer, of each text its own, and
    nothing else, by gradient difference: Adam minimizes

        sum over the texts of the mean over suffix tokens of -log(1 - p)
        + mean loss, in nats per token, of texts that the model itself has written

    until the texts are erased or the price is passed. It looks at the price in every second step;
    where it is passed, the edit goes back on the line to what was looked at before (at first the
    model as it is) until the price is kept.

    ``edit="ablate"`` sets to zero the smallest number of rows, across all layers, without which the
    texts are erased, or as many as the price allows.

    The model is not changed: use ``with erasure.applied(model):`` or ``erasure.save(folder)``.

    Source: gradient difference is common in unlearning, here with the unlikelihood of Welleck et
    al. (2020), arXiv:1908.04319, in place of minus the loss: it does little to tokens that are lost
    already. On rows that a localization method names it is near to output vector editing (Hakimi et
    al. 2026, arXiv:2606.18767).

    Args:
        sequences: the texts, or one; what counts is how much the model recites of them in the mean.
        method: what names the rows, a method of this package or a frozen dataclass that maps
            (model, sequence) to scores; those that are ablated by the mean of its scores over the
            texts. By default Activation Contrast to train them, Iterative Attribution to ablate
            them.
        share: of the rows of each layer that are trained for each text; layer 0 is left out, unless
            the method trains masks from there on (its ``first_layer``).
        others: texts that the model is to go on reciting, two at least. Every second one watches
            the price, the rest is measured at the end. By default 40 of those that everybody knows
            (``tl-localize known``) and that the model recites. One that shares a run of 13 tokens
            with a text, or that the model does not recite, is left out.
        general_tokens: [batch pos] general text for the perplexity, two rows at least, used
            likewise; by default held-out text of this package.
        max_recited: mean accuracy at which the texts count as erased, a fraction.
        max_others_lost: accuracy that the others may lose, in points.
        max_perplexity_rise: of general text, in percent.
        learning_rate: at the start, from where it grows by a tenth in each step. By default
            ``0.001 (0.002 / share) ** 0.6``; where the price is passed within six steps, the
            training begins again at a quarter of it, four times at most.
        max_steps: of the training.
        seed: of the texts that the model writes, and of the choice of others.
        check: whether texts that the model does not recite are an error, and others that it does
            not recite are left out.
        progress: called with the fraction done and, where it takes two arguments, with a text.

    Raises:
        ValueError: a text is not recited, there are too few others, a number is out of range, or a
            setting of the training is given where nothing is trained; training makes logits NaN.

    >>> general = reference_sequences(model)[-1].tokens.view(2, 40)  # or any other rows
    >>> erasure = erase(model, sequence, others=few[1:], general_tokens=general, max_steps=2)
    >>> erasure.within_price, len(erasure.neurons)  # 31 rows in each of five layers
    (True, 155)
    """
    check_training(edit, share, learning_rate, max_steps)
    check_seed(seed)
    rates = tried_rates(share) if learning_rate is None else [learning_rate]
    goal = Goal(max_recited, Price(max_others_lost, max_perplexity_rise))
    if method is None:
        method = DEFAULT_METHODS[edit](seed=int(seed))
    if isinstance(method, type) or not callable(method):
        raise TypeError(
            f"method must be an object that scores a (model, sequence), got {method!r}. Pass for "
            "example HardConcrete()."
        )
    label_methods([method], getattr(method, "units", NEURONS))
    settings: dict[str, Any] = {"edit": edit, "method": identity(method), "seed": seed}
    if edit == "rows":
        check_share(NeuronView(model, getattr(method, "units", NEURONS)), share)
    texts = check_sequences(model, one_or_more(sequences))
    if check:
        check_recited(model, texts, MIN_ACCURACY)
    report = as_text_report(progress)
    report(0.0, "choose texts that are to stay")
    stay = choose_others(model, texts, others, seed, check)
    general = choose_general(model, general_tokens)
    trial = Trial(model, texts, PriceMeter(model, stay[::2], general[::2]), goal)
    report(0.0, "localize")
    scores = scores_of_each(model, method, texts)
    settings |= {"others": len(stay), "rows of general text": len(general), **goal.settings}
    if edit == "rows":
        named = [own.top_k(share, first_layer=first_layer_of(own)) for own in scores]
        neurons = reduce(or_, named)
        states, n_steps, rate = train_slowly(trial, neurons, rates, max_steps, seed, report)
        state = nearest_to_price(trial, states, report)
        settings |= {"share": share, "learning_rate": rate, "steps": n_steps}
        settings |= {"max_steps": max_steps}
    else:
        state = find_smallest(trial, mean_scores(scores), report)
    old_rows = read_rows(NeuronView(model, state.neurons.units), state.neurons)
    row_edit = RowEdit(state.neurons, state.rows, old_rows)
    return measured_erasure(model, row_edit, state.price, settings, texts, stay, general)


def check_training(edit: str, share: Real, learning_rate: Real | None, max_steps: int) -> None:
    """Raise ValueError where a setting of the training is wrong, or nothing is trained."""
    check_choice("edit", edit, ("rows", "ablate"))
    check_ratio("share", share)
    check_count(max_steps=max_steps)
    if learning_rate is not None:
        check_positive(learning_rate=learning_rate)
    given: dict[str, tuple[object, object]] = {
        "share": (share, SHARE),
        "learning_rate": (learning_rate, None),
        "max_steps": (max_steps, MAX_STEPS),
    }
    for name, (value, default) in given.items():
        if edit == "ablate" and value != default:
            raise ValueError(
                f"{name} must be left out where edit is 'ablate', got {value}. It belongs to the "
                "training of rows; the smallest set that serves is looked for."
            )


def check_share(view: NeuronView, share: Real) -> None:
    """Raise ValueError where a share of a layer is no unit at all, before anything is computed."""
    n = view.size[1]
    if not round(n * share):
        raise ValueError(
            f"share must select 1 to {n} {view.units.name} of a layer, got {share}. The least "
            f"share is {least_share(n, rounding='nearest')}."
        )


def choose_others(
    model: LanguageModel,
    texts: Sequence[MemorizedSequence],
    others: MemorizedSequence | Iterable[MemorizedSequence] | None,
    seed: int,
    check: bool,
) -> list[MemorizedSequence]:
    """Texts that are to stay, in random order; none shares text with those that are erased."""
    given = known(model).sequences if others is None else others
    given = list(given) if isinstance(given, Iterable) else [given]
    left = other_texts(model, given, texts)
    if others is not None and check and left:
        # rounded, so that 7 right tokens of 10 are 0.7
        shares = accuracy(model, left).double().round(decimals=6).tolist()
        left = [text for text, share in zip(left, shares, strict=True) if share >= MIN_ACCURACY]
    if len(left) < 2:
        raise ValueError(
            f"others must be at least 2 texts that the model recites at {MIN_ACCURACY:g} and that "
            "share no 13 tokens in a row with the erased ones, got "
            f"{len(left)} of {len(given)}. Give such texts, as tl-localize known --out writes them."
        )
    if others is not None:
        return left
    order = torch.randperm(len(left), generator=torch.Generator().manual_seed(int(seed)))
    return [left[i] for i in order[:N_OTHERS].tolist()]


def choose_general(
    model: LanguageModel, general_tokens: Integer[Tensor, "batch pos"] | None
) -> Integer[Tensor, "batch pos"]:
    """Rows of general text, two at least."""
    if general_tokens is None:
        return held_out_tokens(model)[:N_GENERAL, :LENGTH]
    check_text(model, general_tokens, "general_tokens")
    if len(general_tokens) < 2:
        raise ValueError(
            f"general_tokens must have at least 2 rows, got {len(general_tokens)}: one watches the "
            "price, the other is measured at the end. Cut the text into shorter rows."
        )
    return general_tokens


def scores_of_each(
    model: LanguageModel, method: Method, texts: Sequence[MemorizedSequence]
) -> list[NeuronScores]:
    """A method's scores of each text."""
    if isinstance(method, Localizer):
        return list(method.map(model, texts, check=False))
    neurons = NeuronView(model, getattr(method, "units", NEURONS))
    return [check_scores(method(model, text), neurons, method) for text in texts]


def mean_scores(each: Sequence[NeuronScores]) -> NeuronScores:
    """The mean of the scores of some texts."""
    values = torch.stack([scores.values for scores in each]).mean(0)
    return replace(each[0], values=values, exact=exact_of_all(each), sequence_id="")


def exact_of_all(each: Sequence[NeuronScores]) -> NeuronSet | None:
    """Where the mean of some scores is exact: where each of them is. None, if they all are."""
    masks = [scores.exact for scores in each if scores.exact is not None]
    return reduce(and_, masks) if masks else None


def first_layer_of(scores: NeuronScores) -> int:
    """Layer 0 is left out, as in DEL, unless the method or the model has it otherwise."""
    if scores.first_layer is not None:
        return scores.first_layer
    return min(1, len(scores.values) - 1)


# Ablation


def find_smallest(trial: Trial, scores: NeuronScores, report: TextReport) -> State:
    """The smallest number of rows, across the layers, without which the texts are erased, to one
    part in 64 of it; where there is none within the price, as many as it allows, and at least one.
    """
    view = NeuronView(trial.model, scores.units)
    first_layer = first_layer_of(scores)
    largest = scores.values[first_layer:].numel()

    def judge(count: int) -> State:
        neurons = scores.top_k(count=count, per="model", first_layer=first_layer)
        state = trial.judge(neurons, torch.zeros_like(read_rows(view, neurons)))
        report(0.5, f"{count} rows: {state.recited:.0%} recited; {state.price}")
        return state

    def is_enough(state: State) -> bool:
        return trial.is_erased(state) or not trial.keeps_price(state)

    best = high = judge(1)
    while not is_enough(high) and len(high.neurons) < largest:
        best = high
        high = judge(min(2 * len(high.neurons), largest))
    for _ in range(N_HALVINGS):
        middle = (len(best.neurons) + len(high.neurons)) // 2
        if middle in (len(best.neurons), len(high.neurons)):
            break
        state = judge(middle)
        if is_enough(state):
            high = state
        else:
            best = state
    report(1.0, "found")
    return high if trial.keeps_price(high) else best


# Trained rows


def tried_rates(share: Real) -> list[float]:
    """Learning rates at the start, the largest first: fewer rows are trained faster."""
    return [0.001 * (0.002 / float(share)) ** 0.6 * smaller for smaller in SMALLER_RATES]


def train_slowly(
    trial: Trial,
    neurons: NeuronSet,
    rates: Sequence[Real],
    max_steps: int,
    seed: int,
    report: TextReport,
) -> tuple[list[State], int, Real]:
    """``train_rows`` at the first rate that does not pass the price in the first steps, and that
    rate.
    """
    rate, *smaller = rates
    states, n_steps = train_rows(trial, neurons, rate, max_steps, seed, report)
    if not smaller or n_steps >= LEAST_STEPS or trial.keeps_price(states[-1]):
        return states, n_steps, rate
    report(0.0, f"the price was passed: again at a learning rate of {smaller[0]:.2g}")
    return train_slowly(trial, neurons, smaller, max_steps, seed, report)


@torch.inference_mode(False)  # whatever mode the caller is in
@torch.enable_grad()
def train_rows(
    trial: Trial,
    neurons: NeuronSet,
    learning_rate: Real,
    max_steps: int,
    seed: int,
    report: TextReport,
) -> tuple[list[State], int]:
    """Train the rows of some neurons until the texts are erased or the price is passed: what was
    looked at, from the model as it is to the last step, and the number of steps.
    """
    view = NeuronView(trial.model, neurons.units)
    rows = TrainedRows(view, view.row_mask(neurons.mask), float(learning_rate))
    general = general_sequences(view, seed)
    now = mean_accuracy(trial.model, trial.sequences)
    states = [State(neurons, read_rows(view, neurons), now, Price(0.0, 0.0))]
    step = 0
    with view.lean():
        for step in range(1, max_steps + 1):
            rows.adam.zero_grad()
            some = general_of_step(general, step)
            add_gradients(view, rows, trial.sequences, mean_unlikelihood, 1.0)
            add_gradients(view, rows, some, batch_loss, 1 / len(some))
            rows.adam.step()
            for group in rows.adam.param_groups:
                group["lr"] *= GROWTH
            if step % CHECK_EVERY and step != max_steps:
                continue
            state = trial.judge(neurons, torch.cat(list(rows.now().values())).cpu())
            report(step / max_steps, f"step {step}: {state.recited:.0%} recited; {state.price}")
            states.append(state)
            if trial.is_erased(state) or not trial.keeps_price(state):
                break
    report(1.0, "trained")
    return states, step


def nearest_to_price(trial: Trial, states: Sequence[State], report: TextReport) -> State:
    """The last state, if it keeps the price. Otherwise the farthest one that does, to one part in
    16, on the line to it from the state before it: late steps are large. If there is none but the
    model as it is, the nearest to that which was looked at.
    """
    *_, low, high = states
    if trial.keeps_price(high):
        return high
    start = states[0]
    for _ in range(N_BETWEEN):
        state = trial.judge(low.neurons, (low.rows + high.rows) / 2)
        report(1.0, f"between two steps: {state.recited:.0%} recited; {state.price}")
        if trial.keeps_price(state):
            low = state
        else:
            high = state
    return high if low is start else low


def general_sequences(view: NeuronView, seed: int) -> list[MemorizedSequence]:
    """Texts that the model writes, whose suffix is what greedy decoding put there."""
    written = written_texts(view, seed)
    return [MemorizedSequence(row, min(N_DRAWN, len(row) - 1)) for row in written]


def general_of_step(general: list[MemorizedSequence], step: int) -> list[MemorizedSequence]:
    """Those of a step, counted from 1: one after the other, and again."""
    start = (step - 1) * N_WRITTEN % len(general)
    return general[start : start + N_WRITTEN]


def add_gradients(
    view: NeuronView,
    rows: TrainedRows,
    sequences: Sequence[MemorizedSequence],
    objective: Callable[[LanguageModel, SequenceBatch], Tensor],
    weight: float,
) -> None:
    """Add the gradients of the sum of an objective over sequences, times a weight."""

    def add(some: list[MemorizedSequence]) -> None:
        batch = SequenceBatch.of(some, view.device)
        with view.rows_changed(rows.index, rows.changes):
            total = weight * objective(view.model, batch).sum()
        rows.add_gradients(total)

    size = rows_that_fit(view, max(map(len, sequences)))
    for _ in work_in_batches(add, sequences, size):
        pass


# What was measured


def measured_erasure(
    model: LanguageModel,
    edit: RowEdit,
    watched: Price,
    settings: dict[str, Any],
    texts: Sequence[MemorizedSequence],
    others: Sequence[MemorizedSequence],
    general: Integer[Tensor, "batch pos"],
) -> Erasure:
    """An edit with what is measured before and after it, on texts that were not looked at while it
    was made: every second one, from the second on.
    """
    general = general[1::2]
    made_with = {
        **about_model(model),
        "origin": origin_of(source_of_model(model) or model_name(model)),
        "environment": environment(model),
        "others_watched": [text.id for text in others[::2]],
        "others_measured": [text.id for text in others[1::2]],
    }

    def measure() -> dict[str, float]:
        meter = PriceMeter(model, others[1::2], general)
        return {"others_accuracy": meter.accuracy, "perplexity": meter.perplexity}

    before = {"before": measure_texts(model, texts)}
    measured = {"before": measure() | {"kl": 0.0}}
    with edit.applied(model):
        after = {"after": measure_texts(model, texts)}
        measured["after"] = measure()
    measured["after"]["kl"] = kl_of_edit(model, lambda: edit.applied(model), general)
    source = source_of_model(model) if is_as_loaded(model) else None
    if source and not is_reference(source) and Path(source).exists():
        source = str(Path(source).absolute())  # until it is saved the process may change its folder
    texts_measured = before | after
    return Erasure(edit, watched, settings, measured, texts_measured, made_with, source)
