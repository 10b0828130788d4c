"""Checks of arguments: whatever is wrong is said in one sentence, with what to do."""

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# where a float is meant: the run-time type checker of the tests, unlike PEP 484, does not take an
# int for it
Real = float | int


def _check(rule: str, right: Callable[[Any], bool], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not right(value):
            raise ValueError(f"{name} must be {rule}, got {value!r}. Pass such a number.")


def check_positive(**settings: Any) -> None:
    """Raise ValueError unless each is a finite number above 0."""
    _check("a number above 0 and finite", lambda value: 0 < value < math.inf, settings)


def check_between(low: Real, high: Real, **settings: Any) -> None:
    """Raise ValueError unless each is a number in [low, high]."""
    _check(f"a number in [{low}, {high}]", lambda value: low <= value <= high, settings)


def check_count(lowest: int = 1, **settings: Any) -> None:
    """Raise ValueError unless each is a whole number from ``lowest`` on."""
    rule = f"a whole number from {lowest} on"
    _check(rule, lambda n: isinstance(n, numbers.Integral) and int(n) >= lowest, settings)


def check_seed(seed: Any, bits: int = 63) -> None:
    """Raise ValueError unless it is a whole number of so many bits (torch takes 63, numpy's
    RandomState 32).
    """
    check_count(0, seed=seed)
    check_between(0, 2**bits - 1, seed=seed)


def check_several(**settings: Any) -> None:
    """Raise ValueError unless each is a tuple or another sequence of numbers."""
    for name, values in settings.items():
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise ValueError(
                f"{name} must be several numbers, got {values!r}. Write a tuple, such as "
                "(0.1, 0.2), or (0.1,) for one number."
            )


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ValueError unless it is one of the choices; the nearest ones are offered."""
    known = list(choices)
    if value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}. Choose one of "
            f"them.{nearest(str(value), map(str, known))}"
        )


def check_ratio(name: str, ratio: Any) -> float:
    """The ratio; raises ValueError unless it is a number in (0, 1]."""
    _check("a fraction in (0, 1], 0.01 for 1 %", lambda value: 0 < value <= 1, {name: ratio})
    return float(ratio)


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' or nothing: names that are spelled nearly so, and those that hold it."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=2)
    if len(name) >= 3:
        near += [longer for longer in names if name in longer and longer not in near]
    return f" Did you mean {' or '.join(near[:3])}?" if near else ""


def out_of_memory(error: BaseException) -> bool:
    """True for the errors by which CUDA and the CPU allocator report that memory ran out."""
    # the last is CUBLAS's and CUDNN's
    signs = ("out of memory", "can't allocate memory", "alloc_failed")
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in said for sign in signs)
