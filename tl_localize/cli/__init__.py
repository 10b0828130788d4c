"""The command line: tl-localize COMMAND, in the groups of COMMANDS."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from tl_localize import __version__
from tl_localize.cli import collect, del_benchmark, demo, folder, inj, lists, localize, tune
from tl_localize.cli.options import expanded

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def print_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"tl_localize {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Which MLP neurons make a language model recite a text? Begin with tl-localize demo."""
    # What the libraries below announce is no business of someone who reads a table.
    warnings.filterwarnings("ignore", category=DeprecationWarning)


COMMANDS = {
    "First steps": {"demo": demo.demo, "localize": localize.localize},
    "Benchmarks": {"inj": inj.inj, "del": del_benchmark.del_benchmark, "tune": tune.tune, "collect": collect.collect},
    "A results folder": {"status": folder.status, "table": folder.table, "trace": folder.trace},
    "What there is": {"methods": lists.methods, "models": lists.models, "texts": lists.texts},
}
for group, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=group)(expanded(name, command))
