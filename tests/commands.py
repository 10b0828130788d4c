"""A command of ``tl-localize`` in this process, and what it printed."""

import copy
import io
import shlex
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from cyclopts import App

ASSEMBLE = App.assemble_argument_collection
ASSEMBLED = {}  # by command: its options


def assembled_once(app, **how):
    """The options of a command, which cyclopts reads anew from its signature each time, and which
    is most of what a command costs that is refused: a copy of the first time's, as parsing fills
    it.
    """
    if how:
        return ASSEMBLE(app, **how)
    command = app.default_command
    if command not in ASSEMBLED:
        ASSEMBLED[command] = ASSEMBLE(app)
    kept = ASSEMBLED[command]
    same = [(each.field_info, each.parameter, each.hint) for each in kept]  # nothing changes them
    return copy.deepcopy(kept, {id(part): part for parts in same for part in parts})


@dataclass(frozen=True)
class Done:
    """What a command left: its exit status and what it printed."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(command: str | Sequence[str], *arguments: object, charset: str = "utf-8") -> Done:
    """Run a command, whose first words may stand in one text; as in a pipe."""
    from tl_localize.cli import main

    words = shlex.split(command) if isinstance(command, str) else list(command)
    streams = [  # as Python opens them
        io.TextIOWrapper(io.BytesIO(), encoding=charset, errors=errors)
        for errors in ("strict", "backslashreplace")
    ]
    once = patch.object(App, "assemble_argument_collection", assembled_once)
    with once, redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        status = main([*words, *map(str, arguments)])
    for stream in streams:
        stream.flush()
    return Done(status, *(stream.buffer.getvalue().decode(charset) for stream in streams))
