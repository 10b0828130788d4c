"""tl-localize demo | localize: one text, the neurons that a method names, and what their ablation
does.
"""

from argparse import Namespace
from dataclasses import replace

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from tl_localize.cli.running import load, say
from tl_localize.collect.known import MIN_ACCURACY, check_example, example, first_example
from tl_localize.evals.presets import FIRST_LAYER, make_methods, sparing
from tl_localize.evals.sparing import BROKEN, check_max_rise, largest_set
from tl_localize.execution.engine import progress_bar
from tl_localize.files import check_writable, prepare_folder, write_text
from tl_localize.losses import memorization_loss
from tl_localize.methods import Attribution, IterativeAttribution
from tl_localize.metrics import accuracy, check_recited, perplexity
from tl_localize.models import load_model
from tl_localize.neurons import LanguageModel, check_ratio
from tl_localize.reference import held_out_tokens, reference_sequences
from tl_localize.report.paper import short_title
from tl_localize.report.terminal import plain, show
from tl_localize.report.token_view import page, token_view
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence
from tl_localize.stats import counted
from tl_localize.units import UNITS

SHOWN = "random,activations,attribution,iterative_attribution"  # cheap ones, the best last
RATIO = 0.1  # of the neurons of each layer
OTHERS = 20  # texts that should not be forgotten
TOP = 20  # neurons to print
EFFECT = "rise of the loss without it (nats per token, first order)"
N_GENERAL, GENERAL_LENGTH = 8, 64  # rows of general text, and their tokens
RECITED = 0.9  # accuracy of a text of the user's own; of one that many people know MIN_ACCURACY


def show_demo(out: Console, id: str) -> None:
    check_example(id, "reference-gpt2")
    model = load_model("reference-gpt2", "cpu")
    sequence = example(model, id)
    others = [one for one in reference_sequences(model) if one.id != sequence.id][:OTHERS]
    check_recited(model, [sequence])
    out.print(
        "[bold]reference-gpt2[/bold] saw a text often in training. Given the first half, it "
        "recites the rest.\nWhich neurons of its MLPs make it do so, and is the text gone without "
        "them?"
    )
    rows = [("none", percent(model, [sequence]), percent(model, others))]
    text = ""
    for method in make_methods(SHOWN, (), sparing(FIRST_LAYER)):
        neurons = method(model, sequence).top_k(RATIO, first_layer=FIRST_LAYER)
        name = f"{len(neurons)} by {short_title(method.name)}"
        with neurons.dropped_out(model):
            rows.append((name, percent(model, [sequence]), percent(model, others)))
        text = token_view(model, sequence, neurons).text(colour=out.is_terminal)
    columns = ["neurons ablated", "text recited (%)", f"{OTHERS} other texts (%)"]
    out.print(plain(pd.DataFrame(rows, columns=columns).set_index(columns[0])))
    out.print(f"The text without {rows[-1][0]}, token by token:\n")
    out.print(Text.from_ansi(text + "\n"))
    out.print(
        "Next: [bold]tl-localize inj[/bold] asks for neurons that are known; [bold]tl-localize "
        "localize[/bold] takes a text."
    )


def percent(model: LanguageModel, sequences: list[MemorizedSequence]) -> int:
    """How much of some suffixes the model recites."""
    return round(100 * float(accuracy(model, sequences).mean()))


def localize_text(given: Namespace) -> None:
    units = UNITS[given.units]
    methods = make_methods(given.method, given.set, sparing(FIRST_LAYER), units=units)
    if len(methods) != 1:
        raise ValueError(
            f"method must be one, got {given.method!r}. Give the command once for each."
        )
    check_asked(given)
    model = load(given)
    sequence = asked_text(given, model)
    with progress_bar() as advance:
        (scores,) = methods[0].map(model, [sequence], progress=advance)
    general = held_out_tokens(model)[:N_GENERAL, :GENERAL_LENGTH]
    if given.ratio is None:
        chosen = largest_set(model, scores, general, given.max_perplexity_rise, FIRST_LAYER)
    else:
        chosen = scores.top_k(given.ratio, first_layer=FIRST_LAYER)
    show_chosen(model, sequence, scores, chosen, given)
    if given.out:
        prepare_folder(given.out.parent)
        scores.save(given.out)
        say(f"Scores: {given.out}")
    if percent(model, [sequence]):
        show_ablation(model, sequence, scores, chosen, general, given)


def check_asked(given: Namespace) -> None:
    """Find mistakes before a model is loaded."""
    if given.ratio is not None:
        check_ratio("ratio", given.ratio)
    check_max_rise(given.max_perplexity_rise)
    if bool(given.example) == bool(given.prefix and given.suffix):
        raise ValueError(
            "text must be given as --prefix and --suffix or as --example, got neither or both. "
            f"Try --example {first_example(given.model)}, or another text that tl-localize known "
            f"--model {given.model} lists."
        )
    if given.example:
        check_example(given.example, given.model)
    if given.out:
        check_writable(given.out.parent)


def asked_text(given: Namespace, model: LanguageModel) -> MemorizedSequence:
    """The text that is given; ValueError where the model does not recite it and nothing is
    forced.
    """
    if given.example:
        sequence, least = example(model, given.example), MIN_ACCURACY
    else:
        sequence = MemorizedSequence.from_text(model, given.prefix, given.suffix)
        least = RECITED
    before = percent(model, [sequence])
    typer.echo(f"The model recites {before} % of the {len(sequence.suffix)} tokens of the suffix.")
    if not given.force:
        try:
            check_recited(model, [sequence], least)
        except ValueError as error:
            raise ValueError(
                f"{error} With --force the neurons are ranked all the same."
            ) from error
    return sequence


def share_of_layers(chosen: NeuronSet) -> str:
    """How many units of each layer a set has, as text: the same number in each."""
    n_layers, n_units = chosen.mask[FIRST_LAYER:].shape
    count = len(chosen) // n_layers
    return f"{counted(count, chosen.units.one)} of each layer ({100 * count / n_units:.2g} %)"


def show_chosen(
    model: LanguageModel,
    sequence: MemorizedSequence,
    scores: NeuronScores,
    chosen: NeuronSet,
    given: Namespace,
) -> None:
    """How many units a method names, by layer, and which of them do most."""
    one, method = chosen.units.one, short_title(scores.method)
    why = ""
    if given.ratio is None:
        why = (
            f", as many as --max-perplexity-rise {given.max_perplexity_rise:g} allows, at least one"
        )
    typer.echo(
        f"{method} names {counted(len(chosen), one)} from layer {FIRST_LAYER} on: "
        f"{share_of_layers(chosen)}{why}."
    )
    show(by_layer(model, sequence, chosen), f"The {chosen.units.name} of one layer alone ablated:")
    effects = Attribution(units=scores.units)(model, sequence)
    best = chosen_units(scores, effects, chosen).head(TOP)
    best = best.set_index(pd.RangeIndex(1, len(best) + 1, name="rank"))
    title = f"The best {one}s by {method}" if "score" in best else "The strongest of them by effect"
    show(best, f"{title}, from layer {FIRST_LAYER} on:")


@torch.no_grad()
def by_layer(model: LanguageModel, sequence: MemorizedSequence, chosen: NeuronSet) -> pd.DataFrame:
    """Of each layer how many units are chosen, and what is left of the text without them."""
    before = memorization_loss(model, [sequence])
    rows: list[dict[str, int | float]] = []
    for layer in range(FIRST_LAYER, len(chosen.mask)):
        mask = torch.zeros_like(chosen.mask)
        mask[layer] = chosen.mask[layer]
        own = replace(chosen, mask=mask)
        row: dict[str, int | float] = {"layer": layer, chosen.units.name: len(own)}
        with own.dropped_out(model):
            row["text recited (%)"] = percent(model, [sequence])
            rise = memorization_loss(model, [sequence]) - before
        row["rise of the loss (nats per token)"] = float(rise)
        rows.append(row)
    return pd.DataFrame(rows).set_index("layer")


def chosen_units(scores: NeuronScores, effects: NeuronScores, chosen: NeuronSet) -> pd.DataFrame:
    """The units of a set, the best first: layer, unit, score, effect.

    Scores of Iterative Attribution are no more than places in the order of a layer, so they are
    left out, and the effect gives the order.
    """
    layers, places = chosen.mask.nonzero().numpy().T
    table = pd.DataFrame({"layer": layers, scores.units.one: places})
    if scores.method != IterativeAttribution.name:
        table["score"] = scores.values[chosen.mask].numpy()
    table[EFFECT] = effects.values[chosen.mask].numpy()
    order = "score" if "score" in table else EFFECT
    return table.sort_values(order, ascending=False, kind="stable")


def show_ablation(
    model: LanguageModel,
    sequence: MemorizedSequence,
    scores: NeuronScores,
    chosen: NeuronSet,
    general: Tensor,
    given: Namespace,
) -> None:
    """What the text and general text lose without the chosen units."""
    was = perplexity(model, general)
    with chosen.dropped_out(model):
        now = perplexity(model, general)
    view = token_view(model, sequence, chosen)
    cost = f"{was:.4g} before, {now:.4g} without them"
    typer.echo(f"\nWithout the top {share_of_layers(chosen)}:\n\n{view}")
    typer.echo(f"Perplexity of general text: {cost}.")
    if now >= BROKEN * was:
        say(
            "The model is broken rather than the text forgotten; try a smaller --ratio or another "
            "--method."
        )
    if given.ratio is None and now > (1 + given.max_perplexity_rise / 100) * was:
        say(
            "That is more than --max-perplexity-rise allows, but one of each layer is the "
            "smallest set."
        )
    if given.out:
        method = f"{short_title(scores.method)} {scores.settings}"
        about = {"model": given.model, "text": given.example or "--prefix and --suffix"}
        about |= {"method": method, "ablated": f"the top {share_of_layers(chosen)}"}
        about["perplexity of general text"] = cost
        title = f"{short_title(scores.method)}, {given.model}"
        file = given.out.with_suffix(".html")
        write_text(file, page(view, title, about))
        say(f"Token view: {file}")
