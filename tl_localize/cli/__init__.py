"""The command line: ``tl-localize COMMAND``. A command is imported when it is given, so that help
comes at once.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tl_localize import __version__

# Threads of OpenMP that wait must not spin, or two programs on one machine take turns in waiting.
# It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

COMMANDS = {  # group: name: module, function, first sentence of its help
    "First steps": {
        "demo": (
            "demo",
            "demo",
            "A first look in half a minute: a text that the shipped model recites, and what "
            "ablation does to it.",
        ),
        "localize": (
            "localize",
            "localize",
            "Score every neuron for one text, print the best ones, and ablate them.",
        ),
    },
    "Benchmarks": {
        "inj": (
            "inj",
            "inj",
            "INJ: write new sentences into random rows of W_out, then ask each method which rows "
            "they are.",
        ),
        "del": (
            "del_benchmark",
            "del_benchmark",
            "DEL: ablate the neurons that each method locates; is the text forgotten, and only it?",
        ),
        "tune": (
            "tune",
            "tune",
            "Try every setting of a grid on the dev sequences of a benchmark and keep the best one.",
        ),
        "collect": (
            "collect",
            "collect",
            "Find the sequences of a corpus that a model has memorized, for tl-localize del.",
        ),
    },
    "A results folder": {
        "status": (
            "folder",
            "status",
            "What is done, missing and failed, and about how long the rest takes.",
        ),
        "table": (
            "folder",
            "table",
            "All tables and figures from the folder alone; the model is not needed.",
        ),
        "trace": (
            "folder",
            "trace",
            "The tasks that a number was made of, their files, and the command that makes them "
            "again.",
        ),
    },
    "What there is": {
        "methods": ("lists", "methods", "The methods, by the name that --methods takes."),
        "models": ("lists", "models", "The models that --model takes."),
        "texts": ("lists", "texts", "The shipped texts, for --example of localize and demo."),
    },
}


class Commands(TyperGroup):
    """Commands by name; for the help of all, their first sentences are enough."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for group in COMMANDS.values() for name in group]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for group, commands in COMMANDS.items():
            if cmd_name in commands:
                module, function, sentence = commands[cmd_name]
                one = typer.Typer(**STYLE)
                if ctx.resilient_parsing or ctx.meta.get("helping"):
                    one.command(cmd_name, help=sentence, rich_help_panel=group)(lambda: None)
                else:
                    from tl_localize.cli.options import expanded

                    command = getattr(import_module(f"tl_localize.cli.{module}"), function)
                    one.command(cmd_name)(expanded(cmd_name, command))
                return typer.main.get_command(one)
        return None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta["helping"] = True
        super().format_help(ctx, formatter)


STYLE: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
}
app = typer.Typer(no_args_is_help=True, cls=Commands, **STYLE)


def print_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"tl_localize {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Which MLP neurons make a language model recite a text? Begin with tl-localize demo."""
    # What the libraries below announce is no business of someone who reads a table.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
