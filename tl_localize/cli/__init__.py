"""The command line: tl-localize collect | del | inj | localize | tune, and status | table | trace of a results folder."""

from __future__ import annotations

import warnings

import typer

from tl_localize.cli import collect, del_benchmark, folder, inj, localize, tune
from tl_localize.cli.options import expanded

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def main() -> None:
    """Which MLP neurons make a language model recite a text?"""
    # What the libraries below announce is no business of someone who reads a table.
    warnings.filterwarnings("ignore", category=DeprecationWarning)


COMMANDS = {
    "collect": collect.collect,
    "inj": inj.inj,
    "del": del_benchmark.del_benchmark,
    "localize": localize.localize,
    "tune": tune.tune,
    "status": folder.status,
    "table": folder.table,
    "trace": folder.trace,
}
for name, command in COMMANDS.items():
    app.command(name)(expanded(name, command))
