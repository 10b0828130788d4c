"""Changes of a model that end with their ``with`` block, and one thread at a time.

A block notes how each change is undone before it makes the change. When the block ends, it undoes
all of them, the newest first. Ctrl-C or an alarm may come between any two instructions of Python,
also just before a block begins to undo. What such an exception leaves is undone when the object of
the ``with`` is deleted or, where a traceback still holds it, at the next use of the model.
"""

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, currentframe
from types import FrameType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

Value = TypeVar("Value")
# Undoes one change. It is right also where the change was never made, or is undone already.
Undo = Callable[[], object]
PAUSES = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


@dataclass(eq=False)
class _Block:
    """What is known of a block that has begun and not ended.

    Args:
        context: The object of the ``with`` statement.
        frame: The running function that has the ``with`` statement. None for a generator, which
            may pause inside the block, and for an ExitStack.
        undos: How its changes are undone, the oldest first.
    """

    context: ref[Any]
    thread: int
    frame: FrameType | None
    undos: list[Undo] = field(default_factory=list[Undo])

    def undo(self, open_blocks: "list[_Block]") -> None:
        try:
            self._undo_changes()
        except BaseException:
            self._undo_changes()  # again, as Ctrl-C is not pressed twice in a millisecond
            raise
        if self in open_blocks:
            open_blocks.remove(self)
        self.frame = None  # which may hold the object of the `with` statement

    def _undo_changes(self) -> None:
        while self.undos:
            self.undos[-1]()
            self.undos.pop()


# model -> its blocks that have begun and not ended, the oldest first
_OPEN: WeakKeyDictionary[Any, list[_Block]] = WeakKeyDictionary()


class Use(AbstractContextManager[Value], Generic[Value]):
    """A block in which one thread works with a model, with some changes. Enter it by ``with`` or by
    an ExitStack, once.

    Args:
        model: The model that is used.
        changes: Yields how a change is undone, then makes it, and so on for the next.
        value: What ``with ... as`` gives.

    Raises:
        RuntimeError: When it is entered: another thread is in a block of the model, so that its
            hooks and changed rows would enter the numbers.
    """

    block: _Block | None = None

    def __init__(self, model: Any, changes: Iterable[Undo] = (), value: Any = None) -> None:
        self.model, self.changes, self.value = model, changes, value

    def __enter__(self) -> Value:
        if self.block:
            raise RuntimeError("with must get a new block, got one that was used. Make another.")
        undo_interrupted(self.model)
        frame: Any = getattr(currentframe(), "f_back", None)
        if frame.f_code.co_flags & PAUSES or frame.f_globals.get("__name__") == "contextlib":
            frame = None
        self.open_blocks = _OPEN.setdefault(self.model, [])
        self.block = _Block(ref(self), threading.get_ident(), frame)
        self.open_blocks.append(self.block)
        try:
            if any(other.thread != self.block.thread for other in self.open_blocks):
                raise RuntimeError(
                    "model must be used by one thread at a time, got a call while another thread "
                    "has hooks or changed rows on it, or computes. Take turns, or give each thread "
                    "a model of its own."
                )
            for undo in self.changes:
                self.block.undos.append(undo)
        except BaseException:
            self.block.undo(self.open_blocks)
            raise
        return self.value

    def __exit__(self, *error: object) -> None:
        if self.block:
            self.block.undo(self.open_blocks)

    def __del__(self) -> None:
        self.__exit__()


def undo_interrupted(model: Any) -> None:
    """Undo what interrupted blocks have left: their object is deleted, their function no longer
    runs, or their thread has ended.
    """
    open_blocks = _OPEN.get(model)
    if not open_blocks:
        return
    ended = {block.frame for block in open_blocks if block.thread == threading.get_ident()}
    frame = currentframe()
    while frame:
        ended.discard(frame)
        frame = frame.f_back
    # not Thread.is_alive: in Python 3.11 an interrupt within it marks the main thread as ended
    threads = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    for block in reversed(list(open_blocks)):
        gone = block.context() is None or block.thread not in threads
        if gone or (block.frame is not None and block.frame in ended):
            block.undo(open_blocks)


def adding_hooks(
    hooks: Iterable[tuple[Any, Any]], register: str, *, every_thread: bool = False, **options: Any
) -> Iterator[Undo]:
    """The changes that a method ``register`` of modules of torch, or of hook points, makes.

    Args:
        hooks: Each module with its hook.
        every_thread: Whether the hooks act in every thread. By default they act in this one: passes
            of the model in other threads are neither changed nor seen.
    """
    for module, hook in hooks:
        own = partial(hook) if every_thread else partial(_in_thread, threading.get_ident(), hook)
        yield partial(_remove_hook, module, own)
        getattr(module, register)(own, **options)


def _in_thread(thread: int, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    return function(*args, **options) if threading.get_ident() == thread else None


def _remove_hook(module: Any, hook: Any) -> None:
    """Take a hook away, wherever an interrupted method has put it."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, function in list(hooks.items()):
            # TransformerLens registers a function of its own, which has the hook in its closure
            inside = gc.get_referents(*(getattr(function, "__closure__", None) or ()))
            if any(one is hook for one in (function, *inside)):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    if handles := getattr(module, "fwd_hooks", None):
        module.fwd_hooks = [one for one in handles if one.hook.id in module._forward_hooks]
