"""The command line: ``tl-localize COMMAND``. What a command needs is imported when it runs, so that
help comes at once.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tl_localize import __version__
from tl_localize.cli import commands as c

# Threads of OpenMP that wait must not spin, or two programs on one machine take turns in waiting.
# It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


SPELLED = {"±": "+-", "Δ": "change of ", "…": "...", "→": "->"}


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


def spelled(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that an output such as ASCII does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(SPELLED.get(one, "?") for one in missing), error.end


def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Which MLP neurons make a language model recite a text? Begin with tl-localize demo."""
    codecs.register_error("spelled", spelled)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="spelled")
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
    "Benchmarks": {"inj": c.inj, "del": c.del_benchmark, "tune": c.tune, "collect": c.collect},
    "A results folder": {"status": c.status, "table": c.table, "trace": c.trace},
    "What there is": {"methods": c.methods, "models": c.models, "texts": c.texts},
}
for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
