"""What commands say to the person at the terminal, and what that person typed."""

import shlex
from contextvars import ContextVar
from pathlib import Path

from rich.console import Console

COMMAND: ContextVar[str] = ContextVar("COMMAND", default="")  # the command line that is run


def say(text: str, whole: bool = False) -> None:
    """A line on standard error, broken between words where it is not to stay whole; tables go to
    standard output.
    """
    out = Console(stderr=True, highlight=False, emoji=False)  # of a path :key: is no key
    out.print(text, markup=False, soft_wrap=whole or not out.is_terminal)


def command(*words: str | Path) -> str:
    """A command of tl-localize, to be copied into a shell."""
    return shlex.join(["tl-localize", *map(str, words)])


def say_next(text: str) -> None:
    """The last line of a command: what to do next, which a terminal breaks so that it can be
    copied.
    """
    say(f"Next: {text}", whole=True)
