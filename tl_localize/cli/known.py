"""tl-localize known"""

from __future__ import annotations

from argparse import Namespace

import typer

from tl_localize.cli.options import say
from tl_localize.collect.known import known
from tl_localize.evals.presets import parse_dtype
from tl_localize.models import load_model
from tl_localize.readers import Data
from tl_localize.report.terminal import console, plain


def show_known(given: Namespace) -> None:
    model = load_model(given.model, given.device, parse_dtype(given.dtype))
    found = known(model, given.min_accuracy, Data(source=given.data) if given.data else None)
    if given.out:
        found.save(given.out)
        say(
            f"Use them: tl-localize del --model {given.model} --data {given.out} --n-prefix "
            "n_prefix --id id --category category --general TOKENS"
        )
    if given.csv:
        typer.echo(found.frame.to_csv(index=False))
        return
    shown = found.frame[found.frame["accuracy"] >= given.min_accuracy]
    if len(shown):
        console().print(plain(shown.set_index("id").round(2)))
    console().print("\nBy what must be known:", plain(found.by_category().round(2)), sep="\n")
    kept = ", ".join(f"{n} at {threshold:g}" for threshold, n in found.kept().items())
    typer.echo(f"{found}. Texts that a threshold keeps: {kept}.")
