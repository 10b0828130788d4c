"""tl-localize demo: the first look, without an argument"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich.text import Text

from tl_localize.evals.presets import FIRST_LAYER, make_methods, sparing
from tl_localize.metrics import accuracy, check_recited
from tl_localize.models import load_model
from tl_localize.reference import reference_sequence, reference_sequences
from tl_localize.report.paper import short_title
from tl_localize.report.terminal import bars, console, plain, save_svg
from tl_localize.report.token_view import token_view
from tl_localize.scores import NeuronSet

SHOWN = "random,activations,attribution,iterative_attribution"  # cheap ones, the best last
RATIO = 0.1  # of the neurons of each layer
OTHERS = 20  # texts that should not be forgotten


def demo(
    example: Annotated[
        str, typer.Option(help="Id of a shipped text, of those that tl-localize texts lists.")
    ] = "quotes-056",
    save: Annotated[Path | None, typer.Option(help="Write what is shown to this SVG file.")] = None,
) -> None:
    """A first look in half a minute: a text that the shipped model recites, and what ablating the
    named neurons does to it.
    """
    out, model = console(record=bool(save)), load_model("reference-gpt2", "cpu")
    sequence = reference_sequence(model, example)
    others = [one for one in reference_sequences(model) if one.id != sequence.id][:OTHERS]
    check_recited(model, [sequence])

    def recited() -> dict[str, str]:
        values = {
            "text recited (%)": accuracy(model, [sequence]),
            f"{OTHERS} other texts (%)": accuracy(model, others),
        }
        return {name: f"{100 * float(value.mean()):.0f}" for name, value in values.items()}

    out.print(
        "[bold]reference-gpt2[/bold] saw a text often in training. Given the first half, it "
        "recites the rest."
    )
    out.print("Which neurons of its MLPs make it do so, and is the text gone without them?")
    where = f"top 1 %, layers {FIRST_LAYER} to {model.cfg.n_layers - 1}"
    rows: dict[str, dict[str, str]] = {"none": {where: "", "seconds": "", **recited()}}
    found: dict[str, NeuronSet] = {}
    methods = make_methods(SHOWN, (), sparing(FIRST_LAYER))
    for method in methods:
        began = time.perf_counter()
        scores, name = method(model, sequence), short_title(method.name)
        seconds = f"{time.perf_counter() - began:.1f}"
        found[name] = scores.top_k(RATIO, first_layer=FIRST_LAYER)
        best = (
            scores.top_k(0.01, per="model", first_layer=FIRST_LAYER)
            .mask.sum(1)[FIRST_LAYER:]
            .tolist()
        )
        with found[name].dropped_out(model):
            rows[f"{len(found[name])} by {name}"] = {
                where: bars(best),
                "seconds": seconds,
                **recited(),
            }
    out.print(plain(pd.DataFrame(rows).T.rename_axis("neurons ablated")))
    for name in (short_title(methods[0].name), short_title(methods[-1].name)):
        out.print(f"The text without the neurons of [bold]{name}[/bold], token by token:\n")
        view = token_view(model, sequence, found[name])
        out.print(Text.from_ansi(view.text(colour=out.is_terminal or bool(save)) + "\n"))
    out.print(
        "Next: [bold]tl-localize inj[/bold] asks for neurons that are known; [bold]tl-localize "
        "localize[/bold] takes a text."
    )
    if save:
        save_svg(out, save)
