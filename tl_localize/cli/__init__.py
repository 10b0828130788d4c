"""The command line: ``tl-localize COMMAND``. What a command needs is imported when it runs, so that
help comes at once.
"""

import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tl_localize import __version__
from tl_localize.cli import commands as c

os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


class Commands(TyperGroup):
    """Commands whose mistakes of the user are one line on standard error, and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # nobody reads on; click ends the command
            raise
        except (ValueError, OSError, ImportError) as error:
            typer.echo(f"tl-localize: {error}", err=True)
            raise typer.Exit(2) from error


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tl_localize {__version__}")
        raise typer.Exit


def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Which MLP neurons make a language model recite a text? Begin with tl-localize demo."""
    sys.stderr = sys.stderr or io.StringIO()  # it was closed
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where it is ASCII
    # What the libraries below announce is no business of someone who reads a table.
    warnings.filterwarnings("ignore", category=DeprecationWarning)


app = typer.Typer(
    cls=Commands,
    callback=main,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
PANELS = {
    "First steps": {"demo": c.demo, "localize": c.localize, "known": c.known},
    "Benchmarks": {
        "inj": c.inj,
        "del": c.del_benchmark,
        "rev": c.rev,
        "tune": c.tune,
        "collect": c.collect,
    },
    "A results folder": {"status": c.status, "table": c.table},
    "What there is": {"methods": c.methods, "plan": c.plan},
}
for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
