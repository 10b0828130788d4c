"""tl-localize localize"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from tl_localize.cli.options import MethodSettings, ModelOptions, Units, check_at_least, say
from tl_localize.cli.running import progress
from tl_localize.evals.presets import FIRST_LAYER, del_ratios, make_methods, parse_units, sparing
from tl_localize.files import prepare_folder, write_text
from tl_localize.methods import METHODS
from tl_localize.metrics import accuracy, check_recited
from tl_localize.neurons import check_ratio
from tl_localize.reference import reference_sequence
from tl_localize.report.terminal import console, plain
from tl_localize.report.token_view import token_view
from tl_localize.sequences import MemorizedSequence
from tl_localize.units import NEURONS


def localize(
    *,
    prefix: Annotated[str, typer.Option(help="Text that prompts the model.")] = "",
    suffix: Annotated[
        str,
        typer.Option(help="Text that the model recites after it; it usually begins with a space."),
    ] = "",
    example: Annotated[
        str,
        typer.Option(
            help="Instead of both: the id of a shipped text, of those that tl-localize texts lists."
        ),
    ] = "",
    on: ModelOptions,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "hard_concrete",
    units: Units = "neurons",
    set: MethodSettings = None,
    first_layer: Annotated[
        int, typer.Option(help="Layers below it are left out: layer 0 serves every text.")
    ] = FIRST_LAYER,
    ratio: Annotated[
        float | None,
        typer.Option(
            help="Share of each layer ablated to see what is forgotten. Default: 0.1; heads 0.17."
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Number of neurons to print.")] = 20,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also rank neurons for a text that the model does not recite."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the scores to this safetensors file, the token view beside it as .html."
        ),
    ] = None,
) -> None:
    """Score every neuron for one text, print the best ones, and ablate the top share of each layer
    to see what is forgotten.

    With --units heads the same for attention heads.
    """
    kind = parse_units(units)
    ratio = ratio if ratio is not None else 0.1 if kind == NEURONS else del_ratios("", kind)[0]
    localizers = make_methods(method, set or [], sparing(first_layer), units=kind)
    if len(localizers) != 1:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, got {method!r}. Give the command once "
            "for each."
        )
    (localizer,) = localizers
    check_ratio("ratio", ratio)
    check_at_least(1, top=top)
    if bool(example) == bool(prefix and suffix):
        raise ValueError(
            "text must be given as --prefix and --suffix or as --example, got neither or both. See "
            "tl-localize texts."
        )
    if out:
        prepare_folder(out.parent)
    model = on.load()
    sequence = (
        reference_sequence(model, example)
        if example
        else MemorizedSequence.from_text(model, prefix, suffix)
    )
    try:
        check_recited(model, [sequence])
    except ValueError as error:
        if not force:
            raise ValueError(f"{error} Or rank its neurons all the same, with --force.") from error
    before = float(accuracy(model, [sequence])[0])
    typer.echo(
        f"The model recites {100 * before:.0f} % of the {len(sequence.suffix)} tokens of the "
        "suffix."
    )
    with progress() as show:
        (scores,) = localizer.map(
            model, [sequence], progress=lambda fraction: show(fraction, localizer.name)
        )
    if out:
        scores.save(out)
    chosen = scores.top_k(ratio, first_layer=first_layer)
    best = scores.to_frame().query("layer >= @first_layer").head(top)
    typer.echo(f"{scores.settings}, layers from {first_layer} on:")
    console().print(plain(best.set_index(pd.RangeIndex(1, len(best) + 1, name="rank"))))
    if before:
        view = token_view(model, sequence, chosen)
        after = float((view.after == sequence.suffix).float().mean())
        typer.echo(
            f"Without the top {100 * ratio:g} % of each layer it recites {100 * after:.0f} "
            f"%:\n\n{view}"
        )
        if out:
            write_text(out.with_suffix(".html"), f'<meta charset="utf-8">{view.html()}')
            say(f"Scores: {out}\nToken view: {out.with_suffix('.html')}")
