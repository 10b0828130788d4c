"""Changes of a model that end with their ``with`` block, at whatever moment Ctrl-C comes, and by
one thread at a time.

Python raises KeyboardInterrupt between any two instructions, also within ``__exit__`` before it has
done anything. So what begins or ends a change of a model is never interrupted: Ctrl-C that comes
meanwhile is raised right afterwards.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from inspect import currentframe
from types import FrameType
from typing import Any, ParamSpec, TypeVar, no_type_check
from weakref import WeakKeyDictionary

Value = TypeVar("Value")
Given = ParamSpec("Given")

# model -> the thread that uses it, and how many blocks it is in
_USERS: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
_LOCK = threading.Lock()


class _Holding:
    """The handler of Ctrl-C inside a block: as before in the block, and held back while the block
    begins or ends.
    """

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before, self.came = before, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _between(frame):
            self.came = True
        else:
            self.before(number, frame)

    def deliver(self, frame: FrameType | None) -> None:
        """Hand on what was held back, unless a block around this one begins or ends just now."""
        if self.came and not _between(frame):
            self.came = False
            self.before(signal.SIGINT, frame)


@no_type_check  # run-time checkers wrap methods, and a wrapper can be interrupted
class Uninterrupted(AbstractContextManager[Value]):
    """A context manager whose beginning and end Ctrl-C does not interrupt."""

    def __init__(self, context: AbstractContextManager[Value]) -> None:
        self.context = context
        self.held: _Holding | None = None

    def __enter__(self) -> Value:
        holding = self._hold()
        entered = False
        try:
            value = self.context.__enter__()
            entered = True
            if holding:
                # in no variable: a frame that holds itself keeps this block
                holding.deliver(getattr(currentframe(), "f_back", None))
        except BaseException:
            if entered:
                self.context.__exit__(*sys.exc_info())
            self._let_go()
            raise
        return value

    def __exit__(self, *error: Any) -> bool | None:
        holding = self._hold() or self.held
        try:
            return self.context.__exit__(*error)
        finally:
            self._let_go()
            if holding:
                holding.deliver(getattr(currentframe(), "f_back", None))

    def _hold(self) -> _Holding | None:
        """The handler that holds Ctrl-C back, put in place unless it is; None in other threads, in
        which no handler runs.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        now: Any = signal.getsignal(signal.SIGINT)
        if not isinstance(now, _Holding) and callable(now):
            now = self.held = _Holding(now)
            signal.signal(signal.SIGINT, now)
        return now if isinstance(now, _Holding) else None

    def _let_go(self) -> None:
        if (
            self.held
            and signal.getsignal(signal.SIGINT) is self.held
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(signal.SIGINT, self.held.before)


_BETWEEN = {Uninterrupted.__enter__.__code__, Uninterrupted.__exit__.__code__}


def _between(frame: FrameType | None) -> bool:
    """Whether a block begins or ends in this frame, or in one that called it."""
    while frame:
        if frame.f_code in _BETWEEN:
            return True
        frame = frame.f_back
    return False


def uninterrupted(
    function: Callable[Given, Iterator[Value]],
) -> Callable[Given, AbstractContextManager[Value]]:
    """As ``contextlib.contextmanager``, for what changes a model: Ctrl-C interrupts neither the
    part before the yield nor that after it.
    """
    make = contextmanager(function)

    @wraps(function)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> AbstractContextManager[Value]:
        return Uninterrupted(make(*args, **kwargs))

    return made


@uninterrupted
def used(model: Any) -> Iterator[None]:
    """Only this thread works with the model; RuntimeError where another one does, whose hooks and
    changed rows would enter its numbers.
    """
    own = threading.get_ident()
    with _LOCK:
        user, n_blocks = _USERS.get(model, (own, 0))
        if n_blocks and user != own:
            raise RuntimeError(
                "model must be used by one thread at a time, got a call while another thread has "
                "hooks or changed rows on it, or computes. "
                "Take turns, or give each thread a model of its own."
            )
        _USERS[model] = (own, n_blocks + 1)
    try:
        yield
    finally:
        with _LOCK:
            user, n_blocks = _USERS[model]
            _USERS[model] = (user, n_blocks - 1)
