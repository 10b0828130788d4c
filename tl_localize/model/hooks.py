"""Changes of a model that end with their ``with`` block: hooks, attributes, parts of weights.

Whatever is raised inside the block, also by Ctrl-C, the change is undone when the block ends. While
hooks and weights are changed, and while they are put back, a further Ctrl-C waits. What is not
promised is a Ctrl-C in the few bytecodes in which a block begins or ends.
"""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def interrupt_waits() -> Iterator[None]:
    """Ctrl-C inside the block takes effect at its end."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield  # Python interrupts the main thread alone; None: whoever runs it hears the signal
        return
    interrupted: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: interrupted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def undone_together() -> Iterator[ExitStack]:
    """A stack of changes, all of which are undone before a Ctrl-C takes effect."""
    stack = ExitStack()
    try:
        yield stack
    finally:
        with interrupt_waits():
            stack.close()


@contextmanager
def added_hooks(hooks: Iterable[tuple[Any, Any]], *, prepend: bool = False) -> Iterator[None]:
    """Forward hooks on hook points of TransformerLens.

    Args:
        hooks: Each hook point with its hook.
        prepend: Whether they run before the hooks that are there.
    """
    with undone_together() as stack:
        with interrupt_waits():
            for point, hook in hooks:
                before = list(point.fwd_hooks)
                point.add_hook(hook, prepend=prepend)  # returns nothing
                new = [handle for handle in point.fwd_hooks if not _holds(before, handle)]
                stack.callback(_remove_handles, point, new)
        yield


def _holds(handles: list[Any], wanted: Any) -> bool:
    return any(handle is wanted for handle in handles)


def _remove_handles(point: Any, handles: list[Any]) -> None:
    for handle in handles:
        handle.hook.remove()
    point.fwd_hooks = [handle for handle in point.fwd_hooks if not _holds(handles, handle)]


@contextmanager
def registered(hooks: Iterable[tuple[Any, Any]], register: str, **options: Any) -> Iterator[None]:
    """Hooks of torch on modules, put there by one of their methods.

    Args:
        hooks: Each module with its hook.
        register: ``"register_forward_hook"`` or ``"register_forward_pre_hook"``.
        options: Of that method, such as ``prepend``.
    """
    with undone_together() as stack:
        with interrupt_waits():
            for module, hook in hooks:
                handle = getattr(module, register)(hook, **options)
                stack.callback(handle.remove)
        yield


@contextmanager
def own_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module itself, in place of that of its class or of its submodules."""
    attributes = vars(module)
    missing = object()
    before = attributes.get(name, missing)
    attributes[name] = value
    try:
        yield
    finally:
        if before is missing:
            attributes.pop(name, None)
        else:
            attributes[name] = before


@contextmanager
def replaced(weight: Tensor, index: Any, values: Tensor) -> Iterator[None]:
    """Other values for the indexed part of a weight; afterwards it is bit for bit what it was."""
    before = weight.data[index].clone()
    try:
        put(weight, index, values)
        yield
    finally:
        with interrupt_waits():
            put(weight, index, before)


def put(weight: Tensor, index: Any, values: Tensor) -> None:
    """Give the indexed part of a weight other values."""
    weight.data[index] = values.to(weight)
