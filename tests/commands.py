"""A command of ``tl-localize`` in this process, and what it printed."""

import io
import shlex
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass


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
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        status = main([*words, *map(str, arguments)])
    for stream in streams:
        stream.flush()
    return Done(status, *(stream.buffer.getvalue().decode(charset) for stream in streams))
