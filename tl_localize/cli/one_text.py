"""tl-localize demo | localize: one text, the neurons that a method names, and what their ablation
does.
"""

import math
from collections.abc import Mapping

import pandas as pd
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from tl_localize.checks import check_ratio
from tl_localize.cli.command_options import LocalizeOptions
from tl_localize.cli.messages import command, say, say_next
from tl_localize.cli.options import ModelOptions
from tl_localize.cli.pages import about_command, write_page
from tl_localize.evals.deletion.sparing import BROKEN, check_max_rise, largest_set
from tl_localize.evals.settings import (
    FIRST_LAYER,
    defaults_for,
    first_layer_of,
    first_layer_settings,
    make_methods,
    sparing_layers,
)
from tl_localize.evals.shared import reporter
from tl_localize.execution import Steps
from tl_localize.execution.run import show_progress
from tl_localize.files import check_out_file, prepare_folder
from tl_localize.methods import Attribution, IterativeAttribution, Localizer
from tl_localize.metrics import RECITED, accuracy, check_recited, perplexity
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.paper import short_title
from tl_localize.report.layer_ablation import ablate_layers
from tl_localize.report.terminal import bars, plain_table, show
from tl_localize.report.text_losses import text_losses
from tl_localize.report.token_view import token_view
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence
from tl_localize.stats import in_percent, quantity
from tl_localize.texts.known import MIN_ACCURACY, check_example, example, first_example
from tl_localize.texts.reference import held_out_tokens, reference_sequences
from tl_localize.units import UNITS

SHOWN = "random,activations,attribution,iterative_attribution"  # cheap ones, the best last
RATIO = 0.1  # of the neurons of each layer
OTHERS = 20  # texts that should not be forgotten
TOP = 20  # neurons to print
EFFECT = "rise of the loss without it (nats per token, first order)"
RISE = "rise of the loss (nats per token)"
N_GENERAL = 8  # rows of general text
GENERAL_LENGTH = 64  # tokens of each


def show_demo(out: Console, id: str) -> None:
    options = ModelOptions(model="reference-gpt2", device="cpu")
    check_example(id, options.model)
    model = options.load()
    sequence = example(model, id)
    others = [other for other in reference_sequences(model) if other.id != sequence.id][:OTHERS]
    check_recited(model, [sequence])
    out.print(
        "[bold]reference-gpt2[/bold] saw a text often in training. Given the first half, it "
        "recites the rest.\nWhich neurons of its MLPs make it do so, and is the text gone without "
        "them?"
    )
    rows = [("none", percent(model, [sequence]), percent(model, others))]
    text = ""
    for method in make_methods(SHOWN, (), first_layer_settings(FIRST_LAYER)):
        neurons = method(model, sequence).top_k(RATIO, first_layer=FIRST_LAYER)
        name = f"{len(neurons)} by {short_title(method.name)}"
        with neurons.dropped_out(model):
            rows.append((name, percent(model, [sequence]), percent(model, others)))
        text = token_view(model, sequence, neurons).text(colour=out.is_terminal)
    columns = ["neurons ablated", "text recited (%)", f"{OTHERS} other texts (%)"]
    out.print(plain_table(pd.DataFrame(rows, columns=columns).set_index(columns[0])))
    out.print(f"The text without {rows[-1][0]}, token by token:\n")
    out.print(Text.from_ansi(text + "\n"))
    out.print(
        "Next: [bold]tl-localize inj[/bold] asks for neurons that are known; [bold]tl-localize "
        "localize[/bold] takes a text."
    )


def percent(model: LanguageModel, sequences: list[MemorizedSequence]) -> int:
    """How much of some suffixes the model recites."""
    return round(100 * float(accuracy(model, sequences).mean()))


def localize_text(options: LocalizeOptions) -> None:
    # mistakes are found before the model is loaded
    method = chosen_method(options)
    check_options(options)
    model = options.model.load()
    (method,) = sparing_layers([method], model)
    asked = getattr(method, "first_layer", None)
    first_layer = first_layer_of(model) if asked is None else asked
    if options.ratio is not None:
        blank = torch.zeros(NeuronView(model, method.units).size)
        NeuronScores(blank, units=method.units).top_k(options.ratio)  # raises where it selects none
    sequence = read_text(options, model)
    steps = Steps()  # in memory: it has the bar of runs
    with show_progress(steps, 1, True):
        what = reporter(steps, method.name)
        (scores,) = method.map(model, [sequence], progress=what, check=False)
    general = held_out_tokens(model)[:N_GENERAL, :GENERAL_LENGTH]
    if options.ratio is None:
        chosen = largest_set(model, scores, general, options.max_perplexity_rise, first_layer)
    else:
        chosen = scores.top_k(options.ratio, first_layer=first_layer)
    show_chosen(model, sequence, scores, chosen, options)
    say_beyond(method, NeuronView(model, chosen.units), chosen)
    if options.out:
        prepare_folder(options.out.parent)
        options.out.with_suffix(".html").unlink(missing_ok=True)  # of an earlier text
        scores.save(options.out)
        say(f"Scores: {options.out}")
    if float(accuracy(model, [sequence])):
        show_ablation(model, sequence, scores, chosen, general, options)
        say_next(next_step(options))
    else:
        page = " No page is written." if options.out else ""
        say(f"The model recites no token of the text, so there is nothing to forget.{page}")
        known = command("known", "--model", options.model.model)
        say_next(f"{known} lists texts that it recites.")


def say_beyond(method: Localizer, neurons: NeuronView, chosen: NeuronSet) -> None:
    """Tell where more units are named than the method looked for."""
    share = getattr(method, "share", None)
    if share is None or method.chosen_from(neurons) is None:
        return
    named = count_of_layer(chosen)
    if named > max(1, round(share * neurons.n_neurons)):
        say(
            f"{short_title(method.name)} looks for {in_percent(share)} of each layer, its share; "
            f"the others are in an order that it did not try. --set {method.name}.share="
            f"{math.ceil(20 * named / neurons.n_neurons) / 20:g} looks for more."
        )


def next_step(options: LocalizeOptions) -> str:
    """What to do after a text was localized."""
    text = ("--example", options.example) if options.example else ()
    erase = command("erase", "--model", options.model.model, *text)
    if options.example:
        return f"{erase} --out FOLDER writes a model without the text."
    return f"{erase} with the same text and --out FOLDER writes a model without it."


def chosen_method(options: LocalizeOptions) -> Localizer:
    """The one method that is asked for."""
    units = UNITS[options.how.units]
    defaults = (defaults_for(units, {}), first_layer_settings(FIRST_LAYER))
    methods = make_methods(options.method, options.how.set, *defaults, units=units)
    if len(methods) != 1:
        raise ValueError(
            f"method must be one, got {options.method!r}. Give the command once for each."
        )
    return methods[0]


def check_options(options: LocalizeOptions) -> None:
    """Raise ValueError where an option is wrong; no model is loaded."""
    if options.ratio is not None:
        check_ratio("ratio", options.ratio)
        if options.max_perplexity_rise != LocalizeOptions.max_perplexity_rise:
            raise ValueError(
                f"max_perplexity_rise must be left out where --ratio is given, got "
                f"{options.max_perplexity_rise:g}. It chooses the share where there is none."
            )
    check_max_rise(options.max_perplexity_rise)
    check_one_text(options.model.model, options.example, options.prefix, options.suffix)
    if options.out:
        check_out_file(options.out, ".safetensors")


def check_one_text(
    model: str, example: str, prefix: str, suffix: str, others: Mapping[str, bool] = {}
) -> None:
    """Raise ValueError unless a text is given in one way; no model is loaded.

    Args:
        others: other ways of the command, and whether they are taken.
    """
    if bool(prefix) != bool(suffix):
        raise ValueError(
            f"prefix and suffix must be given together, got {prefix!r} and {suffix!r}. The prefix "
            "prompts the model, the suffix is what it recites."
        )
    given = [*others.values(), bool(example), bool(prefix)]
    if sum(given) != 1:
        ways = ", ".join(f"as {way}" for way in [*others, "--example"])
        raise ValueError(
            f"text must be given in one way, {ways} or as --prefix and --suffix, got {sum(given)}. "
            f"Try --example {first_example(model)}, or another text that tl-localize known --model "
            f"{model} lists."
        )
    if example:
        check_example(example, model)


def read_text(options: LocalizeOptions, model: LanguageModel) -> MemorizedSequence:
    """The text that is given; ValueError where the model does not recite it and nothing is
    forced.
    """
    if options.example:
        sequence = example(model, options.example)
        least = MIN_ACCURACY
    else:
        sequence = MemorizedSequence.from_text(model, options.prefix, options.suffix)
        least = RECITED
    before = percent(model, [sequence])
    print(f"The model recites {before} % of the {len(sequence.suffix)} tokens of the suffix.")
    if not options.force:
        try:
            check_recited(model, [sequence], least)
        except ValueError as error:
            raise ValueError(
                f"{error} With --force the neurons are ranked all the same."
            ) from error
    return sequence


def share_of_layers(chosen: NeuronSet) -> str:
    """How many units of each layer a set has, as text: the same number in each."""
    count, n_units = count_of_layer(chosen), chosen.mask.shape[1]
    return f"{quantity(count, chosen.units.one)} of each layer ({in_percent(count / n_units)})"


def count_of_layer(chosen: NeuronSet) -> int:
    """How many units of each layer a set has, the same number in each."""
    return len(chosen) // int(chosen.mask.any(1).sum())


def show_chosen(
    model: LanguageModel,
    sequence: MemorizedSequence,
    scores: NeuronScores,
    chosen: NeuronSet,
    options: LocalizeOptions,
) -> None:
    """How many units a method names, by layer, and which of them do most."""
    unit = chosen.units.one
    first_layer = int(chosen.mask.any(1).nonzero()[0])
    method = short_title(scores.method)
    why = ""
    if options.ratio is None:
        rise = options.max_perplexity_rise
        why = f", as many as --max-perplexity-rise {rise:g} allows, at least one"
    print(
        f"{method} names {quantity(len(chosen), unit)} from layer {first_layer} on: "
        f"{share_of_layers(chosen)}{why}."
    )
    show(by_layer(model, sequence, chosen), f"The {chosen.units.name} of one layer alone ablated:")
    (effects,) = Attribution(units=scores.units).map(model, [sequence], check=False)
    best = chosen_units(scores, effects, chosen).head(TOP)
    best = best.set_index(pd.RangeIndex(1, len(best) + 1, name="rank"))
    title = (
        f"The best {unit}s by {method}" if "score" in best else "The strongest of them by effect"
    )
    show(best, f"{title}, from layer {first_layer} on:")


def by_layer(model: LanguageModel, sequence: MemorizedSequence, chosen: NeuronSet) -> pd.DataFrame:
    """Of each layer how many units are chosen, and what is left of the text without them."""
    layers = ablate_layers(model, sequence, chosen).frame
    table = pd.DataFrame({chosen.units.name: layers["neurons"]})
    table["text recited (%)"] = (100 * layers["only"]).round().astype(int)
    table[RISE] = layers["rise"]
    return table.assign(**{"": bars(table[RISE])})


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
    options: LocalizeOptions,
) -> None:
    """What the text and general text lose without the chosen units."""
    was = perplexity(model, general)
    with chosen.dropped_out(model):
        now = perplexity(model, general)
    view = token_view(model, sequence, chosen)
    steps = Steps()  # in memory: it has the bar of runs
    with show_progress(steps, 1, True):
        losses = text_losses(model, sequence, chosen, progress=reporter(steps, "other texts"))
    cost = f"{was:.4g} before, {now:.4g} without them"
    print(f"\nWithout the top {share_of_layers(chosen)}:\n\n{view}")
    print(f"Perplexity of general text: {cost}.")
    if now >= BROKEN * was:
        say(
            "The model is broken rather than the text forgotten; try a smaller --ratio or another "
            "--method."
        )
    if options.ratio is None and now > (1 + options.max_perplexity_rise / 100) * was:
        say(
            "That is more than --max-perplexity-rise allows, but one of each layer is the "
            "smallest set."
        )
    if len(losses.others):
        table = losses.table()
        table[""] = bars(table["lost (%)"], most=100)
        show(table, "Of all texts that the model knows, those that lose most:")
        print(losses)
    if options.out:
        method = f"{short_title(scores.method)} {scores.settings}"
        about = {"model": options.model.model, "text": options.example or "--prefix and --suffix"}
        about |= {"method": method, "ablated": f"the top {share_of_layers(chosen)}"}
        about["perplexity of general text"] = cost
        about |= about_command(model)
        title = f"{short_title(scores.method)}, {options.model.model}"
        write_page(options.out.with_suffix(".html"), [view, losses], title, about)
