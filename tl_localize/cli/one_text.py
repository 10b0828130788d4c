"""tl-localize demo | localize: one text, the neurons that a method names, and what their ablation
does.
"""

from __future__ import annotations

import time
from argparse import Namespace
from functools import partial

import pandas as pd
import typer
from rich.console import Console
from rich.text import Text

from tl_localize.cli.options import say
from tl_localize.cli.running import Progress
from tl_localize.evals.presets import (
    FIRST_LAYER,
    HEAD_RATIOS,
    make_methods,
    parse_dtype,
    parse_units,
    sparing,
)
from tl_localize.files import prepare_folder, write_text
from tl_localize.methods import IterativeAttribution
from tl_localize.metrics import accuracy, check_recited
from tl_localize.models import load_model
from tl_localize.neurons import LanguageModel, check_ratio
from tl_localize.reference import reference_sequence, reference_sequences
from tl_localize.report.paper import short_title
from tl_localize.report.terminal import bars, console, plain
from tl_localize.report.token_view import token_view
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence
from tl_localize.units import NEURONS

SHOWN = "random,activations,attribution,iterative_attribution"  # cheap ones, the best last
RATIO = 0.1  # of the neurons of each layer
OTHERS = 20  # texts that should not be forgotten


def percent(model: LanguageModel, sequences: list[MemorizedSequence]) -> str:
    return f"{100 * float(accuracy(model, sequences).mean()):.0f}"


def show_demo(out: Console, example: str) -> None:
    model = load_model("reference-gpt2", "cpu")
    sequence = reference_sequence(model, example)
    others = [one for one in reference_sequences(model) if one.id != sequence.id][:OTHERS]
    check_recited(model, [sequence])
    out.print(
        "[bold]reference-gpt2[/bold] saw a text often in training. Given the first half, it "
        "recites the rest."
    )
    out.print("Which neurons of its MLPs make it do so, and is the text gone without them?")
    columns = [
        "neurons ablated",
        f"top 1 %, layers {FIRST_LAYER} to {model.cfg.n_layers - 1}",
        "seconds",
        "text recited (%)",
        f"{OTHERS} other texts (%)",
    ]
    rows = [["none", "", "", percent(model, [sequence]), percent(model, others)]]
    found: dict[str, NeuronSet] = {}
    for method in make_methods(SHOWN, (), sparing(FIRST_LAYER)):
        began = time.perf_counter()
        scores, name = method(model, sequence), short_title(method.name)
        seconds = f"{time.perf_counter() - began:.1f}"
        best = scores.top_k(0.01, per="model", first_layer=FIRST_LAYER).mask.sum(1)
        found[name] = neurons = scores.top_k(RATIO, first_layer=FIRST_LAYER)
        with neurons.dropped_out(model):
            left = [percent(model, [sequence]), percent(model, others)]
        by_layer = bars(best[FIRST_LAYER:].tolist())
        rows.append([f"{len(neurons)} by {name}", by_layer, seconds, *left])
    out.print(plain(pd.DataFrame(rows, columns=columns).set_index("neurons ablated")))
    names = list(found)
    for name in (names[0], names[-1]):
        out.print(f"The text without the neurons of [bold]{name}[/bold], token by token:\n")
        view = token_view(model, sequence, found[name])
        out.print(Text.from_ansi(view.text(colour=out.is_terminal) + "\n"))
    out.print(
        "Next: [bold]tl-localize inj[/bold] asks for neurons that are known; [bold]tl-localize "
        "localize[/bold] takes a text."
    )


def localize_text(given: Namespace) -> None:
    units, first_layer = parse_units(given.units), given.first_layer
    methods = make_methods(given.method, given.set or (), sparing(first_layer), units=units)
    if len(methods) != 1:
        raise ValueError(
            f"method must be one, got {given.method!r}. Give the command once for each."
        )
    ratio = given.ratio
    if ratio is None:
        ratio = RATIO if units == NEURONS else HEAD_RATIOS[0]
    check_ratio("ratio", ratio)
    if given.out:
        prepare_folder(given.out.parent)
    model = load_model(given.model, given.device, parse_dtype(given.dtype))
    sequence = chosen_text(model, given)
    before, n_suffix = float(accuracy(model, [sequence])[0]), len(sequence.suffix)
    typer.echo(f"The model recites {100 * before:.0f} % of the {n_suffix} tokens of the suffix.")
    with Progress() as progress:
        show = partial(progress.show, 0, 1, what=methods[0].name)
        (scores,) = methods[0].map(model, [sequence], progress=show)
    if given.out:
        scores.save(given.out)
    typer.echo(f"{scores.settings}, layers from {first_layer} on:")
    console().print(plain(best_units(scores, first_layer, given.top)))
    if not before:
        return
    view = token_view(model, sequence, scores.top_k(ratio, first_layer=first_layer))
    after = float((view.after == sequence.suffix).float().mean())
    without = f"Without the top {100 * ratio:g} % of each layer"
    typer.echo(f"{without} it recites {100 * after:.0f} %:\n\n{view}")
    if given.out:
        page = given.out.with_suffix(".html")
        write_text(page, f'<meta charset="utf-8">{view.html()}')
        say(f"Scores: {given.out}\nToken view: {page}")


def best_units(scores: NeuronScores, first_layer: int, top: int) -> pd.DataFrame:
    """The best neurons or heads by rank; without the scores of Iterative Attribution, which are the
    same for all that it takes in one round.
    """
    best = scores.to_frame().query("layer >= @first_layer").head(top)
    best = best.set_index(pd.RangeIndex(1, len(best) + 1, name="rank"))
    best = best.rename(columns={"neuron": scores.units.one})
    if scores.method == IterativeAttribution.name:
        best = best.drop(columns="score")
    return best


def chosen_text(model: LanguageModel, given: Namespace) -> MemorizedSequence:
    """The text of the options; ValueError where there is none or two, or the model does not recite
    it.
    """
    if bool(given.example) == bool(given.prefix and given.suffix):
        raise ValueError(
            "text must be given as --prefix and --suffix or as --example, got neither or both. See "
            "tl-localize texts."
        )
    if given.example:
        sequence = reference_sequence(model, given.example)
    else:
        sequence = MemorizedSequence.from_text(model, given.prefix, given.suffix)
    try:
        check_recited(model, [sequence])
    except ValueError as error:
        if not given.force:
            raise ValueError(f"{error} Or rank its neurons all the same, with --force.") from error
    return sequence
