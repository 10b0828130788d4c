"""tl-localize localize"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tl_localize.cli.options import MethodSettings, ModelOptions, say
from tl_localize.cli.running import progress
from tl_localize.evals.presets import make_methods
from tl_localize.files import prepare_folder
from tl_localize.methods import METHODS
from tl_localize.metrics import check_recited
from tl_localize.sequences import MemorizedSequence


def localize(
    *,
    prefix: Annotated[str, typer.Option(help="Text that prompts the model.")],
    suffix: Annotated[str, typer.Option(help="Text that the model recites after it; it usually begins with a space.")],
    on: ModelOptions,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "hard_concrete",
    top: Annotated[int, typer.Option(help="Number of neurons to print.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write all scores to this safetensors file.")] = None,
    set: MethodSettings = None,
) -> None:
    """Score every neuron for one text and print the best ones."""
    localizers = make_methods(method, set or [])
    if len(localizers) != 1:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}. Give the command once for each.")
    (localizer,) = localizers
    if out:
        prepare_folder(out.parent)
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}.")
    model = on.load()
    sequence = MemorizedSequence.from_text(model, prefix, suffix)
    try:
        check_recited(model, [sequence])
    except ValueError as error:
        say(f"Warning: {error}")
    with progress() as show:
        (scores,) = localizer.map(model, [sequence], progress=lambda fraction: show(fraction, localizer.name))
    best = scores.values.flatten().argsort(descending=True, stable=True)[:top].tolist()
    typer.echo(f"{sequence}, {scores.settings}\n\n{'rank':>4} {'layer':>5} {'neuron':>6} {'score':>12}")
    for rank, flat in enumerate(best, 1):
        layer, neuron = divmod(flat, scores.values.shape[1])
        typer.echo(f"{rank:>4} {layer:>5} {neuron:>6} {float(scores.values[layer, neuron]):>12.6g}")
    if out:
        scores.save(out)
        typer.echo(f"\nAll scores: {out}")
