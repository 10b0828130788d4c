"""Whatever moment Ctrl-C comes at, whichever order blocks end in, the model is given back; and one
thread works with it at a time.
"""

from __future__ import annotations

import signal
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tl_localize import METHODS, Injection, NeuronSet, accuracy, memorization_loss, perplexity
from tl_localize.changes import uninterrupted
from tl_localize.neurons import NeuronView
from tl_localize.sequences import SequenceBatch

SHORT = {
    "hard_concrete": {"steps": 3},
    "slimming": {"steps": 3},
    "integrated_gradients": {"steps": 2},
}
NEEDS_TIMERS = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="no timers on this system"
)


def injection_of(seed: int) -> Injection:
    generator = torch.Generator().manual_seed(seed)
    neurons = NeuronSet(torch.rand(2, 48, generator=generator) < 0.3)
    return Injection(
        neurons,
        torch.randn(len(neurons), 24, generator=generator),
        torch.ones(1),
        torch.ones(1),
        True,
    )


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Also where the suite is a background job of a shell, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted() -> Any:
    """Runs a function until Ctrl-C comes after so many seconds; gives the exception, whose
    traceback holds every frame, or None.
    """

    fired: list[int] = []

    def wait() -> None:
        """The handler runs some time after the timer: Ctrl-C must not come when nobody expects it.

        Not within the ``try`` below: on Python 3.12 and 3.13 the jump back of a loop there is not
        covered by its ``except``.
        """
        while not fired:
            time.sleep(1e-4)

    def run(function: Callable[[], object], after: float) -> BaseException | None:
        fired.clear()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, after)
                function()
                wait()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt as error:
            return error
        return None

    def ctrl_c(number: int, frame: Any) -> None:
        fired.append(number)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, ctrl_c)
    yield run
    signal.signal(signal.SIGALRM, before)


@NEEDS_TIMERS
@pytest.mark.parametrize("what", ["applied", "dropped_out", "scaled", "lean"])
def test_block_gives_the_model_back_whenever_it_is_interrupted(
    gpt2_like: Any, unchanged: Any, interrupted: Any, what: str
) -> None:
    view, injection = NeuronView(gpt2_like), injection_of(0)
    blocks: dict[str, Callable[[], Any]] = {
        "applied": lambda: injection.applied(gpt2_like),
        "dropped_out": lambda: injection.neurons.dropped_out(gpt2_like),
        "scaled": lambda: view.scaled({0: torch.ones(1, 48), 1: torch.ones(1, 48)}),
        "lean": view.lean,
    }
    check, caught = unchanged(gpt2_like), []

    def often() -> None:
        while True:
            with blocks[what]():
                pass

    for i in range(300):
        caught.append(interrupted(often, 2e-4 + 7.3e-6 * i))
        check()
    assert all(isinstance(error, KeyboardInterrupt) for error in caught)


@pytest.mark.parametrize("what", ["applied", "dropped_out"])
def test_block_that_is_dropped_without_its_end_gives_the_model_back(
    gpt2_like: Any, unchanged: Any, what: str
) -> None:
    """What is left of a ``with`` when Ctrl-C comes at an instruction that Python 3.12 and 3.13 do
    not cover by it.
    """
    check, injection = unchanged(gpt2_like), injection_of(0)
    block = (
        injection.applied(gpt2_like)
        if what == "applied"
        else injection.neurons.dropped_out(gpt2_like)
    )
    block.__enter__()
    with pytest.raises(AssertionError):
        check()
    del block
    check()


@NEEDS_TIMERS
# raised in a callback of the garbage collector: swallowed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", METHODS)
def test_method_gives_the_model_back_whenever_it_is_interrupted(
    gpt2_like: Any, sequence: Any, unchanged: Any, interrupted: Any, name: str
) -> None:
    method, check, caught = METHODS[name](**SHORT.get(name, {})), unchanged(gpt2_like), []
    seconds = min(timeit.repeat(lambda: method(gpt2_like, sequence), number=1, repeat=3))
    wanted = method(gpt2_like, sequence)
    for i in range(1, 60):
        caught.append(interrupted(lambda: method(gpt2_like, sequence), seconds * i / 60))
        check()
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert any(isinstance(error, KeyboardInterrupt) for error in caught)
    assert torch.equal(method(gpt2_like, sequence).values, wanted.values)


def test_interrupt_that_comes_while_a_block_begins_is_raised_and_the_block_is_left() -> None:
    steps: list[str] = []

    @uninterrupted
    def block() -> Any:
        signal.raise_signal(signal.SIGINT)
        steps.append("begun")
        yield
        steps.append("ended")

    with pytest.raises(KeyboardInterrupt), block():
        steps.append("inside")
    assert steps == ["begun"]


def test_interrupt_that_comes_while_a_block_ends_is_raised_after_it() -> None:
    steps: list[str] = []

    @uninterrupted
    def inner() -> Any:
        yield
        signal.raise_signal(signal.SIGINT)
        steps.append("inner")

    @uninterrupted
    def outer() -> Any:
        with inner():
            yield
        steps.append("outer")

    with pytest.raises(KeyboardInterrupt), outer():
        steps.append("inside")
    assert steps == ["inside", "inner", "outer"]


def test_interrupt_goes_to_the_users_own_handler_which_is_given_back() -> None:
    heard: list[int] = []

    def own(number: int, frame: Any) -> None:
        heard.append(number)

    @uninterrupted
    def block() -> Any:
        signal.raise_signal(signal.SIGINT)
        yield
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, own)
    try:
        with block():
            assert heard == [signal.SIGINT]
            signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT] * 3 and signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


# ---- blocks that overlap
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_applied_blocks_end_in_any_order(
    gpt2_like: Any, unchanged: Any, order: tuple[int, ...]
) -> None:
    check, weights = unchanged(gpt2_like), gpt2_like.W_out.detach().clone()
    blocks = [injection_of(seed).applied(gpt2_like) for seed in range(3)]
    for block in blocks:
        block.__enter__()
    left = [0, 1, 2]
    for k in order:
        blocks[k].__exit__(None, None, None)
        left.remove(k)
        expected = weights.clone()
        for seed in left:
            injection = injection_of(seed)
            expected[injection.neurons.mask] = injection.rows
        assert torch.equal(gpt2_like.W_out.detach(), expected)
    check()


# ---- threads
# ---------------------------------------------------------------------------------------------------------


def in_thread(function: Callable[[], object]) -> list[BaseException]:
    """What a function raises in another thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


MEASURES: dict[str, Callable[[Any, Any], object]] = {
    "accuracy": lambda model, sequence: accuracy(model, [sequence]),
    "perplexity": lambda model, sequence: perplexity(model, sequence.tokens[None]),
    "loss": lambda model, sequence: memorization_loss(model, SequenceBatch.of([sequence])),
    **{
        name: lambda model, sequence, name=name: METHODS[name](**SHORT.get(name, {}))(
            model, sequence
        )
        for name in METHODS
    },
}


@pytest.mark.parametrize("name", MEASURES)
def test_second_thread_is_refused_while_the_first_has_changed_the_model(
    gpt2_like: Any, sequence: Any, unchecked: None, name: str
) -> None:
    with injection_of(0).applied(gpt2_like):
        (error,) = in_thread(lambda: MEASURES[name](gpt2_like, sequence))
    assert isinstance(error, RuntimeError) and str(error).startswith(
        "model must be used by one thread at a time, got "
    )
    assert not in_thread(lambda: MEASURES[name](gpt2_like, sequence))


def test_two_threads_never_give_a_wrong_score(
    gpt2_like: Any, sequence: Any, unchanged: Any
) -> None:
    check, methods = (
        unchanged(gpt2_like),
        [
            METHODS[name](**SHORT.get(name, {}))
            for name in ("slimming", "activations", "attribution")
        ],
    )
    wanted = [method(gpt2_like, sequence).values for method in methods]
    wrong: list[str] = []
    refused: list[str] = []

    def often() -> None:
        for _ in range(8):
            for method, values in zip(methods, wanted, strict=True):
                try:
                    if not torch.equal(method(gpt2_like, sequence).values, values):
                        wrong.append(method.name)
                except RuntimeError as error:
                    refused.append(str(error))

    threads = [threading.Thread(target=often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        not wrong and len(refused) < 48 and all("one thread at a time" in text for text in refused)
    )
    check()
