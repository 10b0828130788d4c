"""The command line: ``tl-localize COMMAND``. What a command needs is imported when it runs, so that
help comes at once.
"""

import io
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cyclopts import CycloptsError

from tl_localize import __version__
from tl_localize.cli.commands import app
from tl_localize.cli.messages import COMMAND, say

__all__ = ["app", "main"]

os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

app.version = f"tl_localize {__version__}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give the exit status. A mistake of the user is one line on standard error,
    and exit status 2.
    """
    sys.stderr = sys.stderr or io.StringIO()  # it was closed
    sys.stdout = sys.stdout or io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where it is ASCII
    # What the libraries below announce is no business of someone who reads a table.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        with interrupted_by_sigterm():
            return run(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains when it ends
        return 1
    except KeyboardInterrupt:
        say("Interrupted.")
        return 130
    except CycloptsError as error:
        command = " ".join(["tl-localize", *(error.command_chain or [])])
        say(f"tl-localize: {error} See {command} --help.")
    except (ValueError, OSError, ImportError) as error:
        say(f"tl-localize: {error}")
    except (RuntimeError, MemoryError) as error:
        from tl_localize.checks import out_of_memory

        if not out_of_memory(error):
            raise
        say(
            "tl-localize: memory must be enough for the model and one text, got too little. Take "
            "--dtype bfloat16, shorter texts or another --device."
        )
        return 1
    return 2


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """A scheduler that ends a job, by SIGTERM, is as a user who presses Ctrl-C: what is done is
    published, and no temporary file stays.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # Python hears signals in its main thread alone; None: whoever runs it hears them
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: Sequence[str]) -> int:
    """Run a command; it leaves with ``sys.exit`` where the status is not 0."""
    COMMAND.set(shlex.join(["tl-localize", *arguments]))
    try:
        app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except SystemExit as leave:
        sys.stdout.flush()
        return leave.code if isinstance(leave.code, int) else 0
    return 0
