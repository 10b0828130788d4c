"""The command line: tl-localize collect | del | inj | localize | tune. One file for each command."""

from __future__ import annotations

import warnings

import typer

from tl_localize.cli import collect, del_benchmark, inj, localize, tune

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def main() -> None:
    """Which MLP neurons make a language model recite a text?"""
    # What the libraries below announce is no business of someone who reads a table.
    warnings.filterwarnings("ignore", category=DeprecationWarning)


for command in (collect.collect, inj.inj, localize.localize, tune.tune):
    app.command()(command)
app.command("del")(del_benchmark.del_benchmark)
