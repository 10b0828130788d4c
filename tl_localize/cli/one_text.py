"""tl-localize demo | localize: one text, the neurons that a method names, and what their ablation
does.
"""

from argparse import Namespace

import pandas as pd
import typer
from rich.console import Console
from rich.text import Text

from tl_localize.checks import check_ratio
from tl_localize.cli.running import load, say
from tl_localize.evals.deletion.sparing import BROKEN, largest_set
from tl_localize.evals.settings import FIRST_LAYER, make_methods, sparing
from tl_localize.execution.run import progress_bar
from tl_localize.files import prepare_folder, write_text
from tl_localize.methods import IterativeAttribution
from tl_localize.metrics import accuracy, check_recited, perplexity
from tl_localize.model.loading import load_model
from tl_localize.model.neurons import LanguageModel
from tl_localize.paper import short_title
from tl_localize.report.terminal import console, plain
from tl_localize.report.token_view import token_view
from tl_localize.scores import NeuronScores
from tl_localize.sequences import MemorizedSequence
from tl_localize.texts.known import MIN_ACCURACY, example
from tl_localize.texts.reference import held_out_tokens, reference_sequences
from tl_localize.units import UNITS

SHOWN = "random,activations,attribution,iterative_attribution"  # cheap ones, the best last
RATIO = 0.1  # of the neurons of each layer
OTHERS = 20  # texts that should not be forgotten
TOP = 20  # neurons to print
N_GENERAL, GENERAL_LENGTH = 8, 64  # rows of general text, and their tokens
RECITED = 0.9  # accuracy of a text of the user's own; of one that many people know MIN_ACCURACY


def show_demo(out: Console, id: str) -> None:
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
    if given.ratio is not None:
        check_ratio("ratio", given.ratio)
    if bool(given.example) == bool(given.prefix and given.suffix):
        raise ValueError(
            "text must be given as --prefix and --suffix or as --example, got neither or both. "
            "Try --example primes, or what tl-localize known lists."
        )
    if given.out:
        prepare_folder(given.out.parent)
    model = load(given)
    if given.example:
        sequence, least = example(model, given.example), MIN_ACCURACY
    else:
        sequence = MemorizedSequence.from_text(model, given.prefix, given.suffix)
        least = RECITED
    before = percent(model, [sequence])
    typer.echo(f"The model recites {before} % of the {len(sequence.suffix)} tokens of the suffix.")
    if not given.force:
        check_recited(model, [sequence], least)
    with progress_bar() as advance:
        (scores,) = methods[0].map(model, [sequence], progress=advance, check=False)
    one, name = scores.units.one, short_title(scores.method)
    typer.echo(f"The best {one}s by {name}, from layer {FIRST_LAYER} on:")
    console().print(plain(best_units(scores)))
    if given.out:
        scores.save(given.out)
        say(f"Scores: {given.out}")
    if before:
        show_ablation(model, sequence, scores, given)


def show_ablation(
    model: LanguageModel, sequence: MemorizedSequence, scores: NeuronScores, given: Namespace
) -> None:
    """What the text and general text lose without the best neurons of each layer."""
    general = held_out_tokens(model)[:N_GENERAL, :GENERAL_LENGTH]
    if given.ratio is None:
        chosen = largest_set(model, scores, general, given.spare, FIRST_LAYER)
    else:
        chosen = scores.top_k(given.ratio, first_layer=FIRST_LAYER)
    was, (n_layers, n_units) = perplexity(model, general), chosen.mask[FIRST_LAYER:].shape
    with chosen.dropped_out(model):
        now = perplexity(model, general)
    count = len(chosen) // n_layers
    view = token_view(model, sequence, chosen)
    typer.echo(f"Without the top {count} of each layer ({100 * count / n_units:.2g} %):\n\n{view}")
    typer.echo(f"Perplexity of general text: {was:.4g} before, {now:.4g} without them.")
    if now >= BROKEN * was:
        say(
            "The model is broken rather than the text forgotten; try a smaller --ratio or another "
            "--method."
        )
    if given.ratio is None and now > (1 + given.spare / 100) * was:
        say("That is more than --spare allows, but one of each layer is the smallest set.")
    if given.out:
        page = given.out.with_suffix(".html")
        write_text(page, f'<meta charset="utf-8">{view.html()}')


def best_units(scores: NeuronScores) -> pd.DataFrame:
    """The best neurons or heads by rank; without the scores of Iterative Attribution, which are no
    more than places in the order of a layer.
    """
    best = scores.to_frame().query("layer >= @FIRST_LAYER").head(TOP)
    best = best.set_index(pd.RangeIndex(1, len(best) + 1, name="rank"))
    best = best.rename(columns={"neuron": scores.units.one})
    if scores.method == IterativeAttribution.name:
        best = best.drop(columns="score")
    return best
