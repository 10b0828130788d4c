"""Whatever moment Ctrl-C or an alarm comes at, whichever order blocks end in, the model is given
back; and one thread works with it at a time.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

from tl_localize import METHODS, Injection, NeuronSet, accuracy, memorization_loss, perplexity
from tl_localize.neurons import NeuronView

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
    rows = torch.randn(len(neurons), 24, generator=generator)
    return Injection(neurons, rows, torch.ones(1), torch.ones(1), True)


BLOCKS: dict[str, Callable[[Any], Any]] = {
    "applied": lambda model: injection_of(0).applied(model),
    "dropped_out": lambda model: injection_of(0).neurons.dropped_out(model),
    "scaled": lambda model: NeuronView(model).scaled({0: torch.ones(1, 48)}),
    "lean": lambda model: NeuronView(model).lean(),
}


def enter(block: Any) -> None:
    with block:
        pass


@pytest.fixture
def held() -> Iterator[list[BaseException]]:
    """Exceptions, whose tracebacks hold every frame and so every block."""
    errors: list[BaseException] = []
    yield errors
    errors.clear()


# ---- what an exception leaves


class Alarm(BaseException):
    """Of an alarm. The run-time type checkers of the tests would turn an Exception into theirs."""


class Interrupter:
    """Runs a function until an exception comes after so many seconds."""

    def __init__(self, error: type[BaseException], held: list[BaseException]) -> None:
        self.error, self.held, self.waiting = error, held, False

    def alarm(self, number: int, frame: Any) -> None:
        self.waiting = False
        raise self.error

    def wait(self) -> None:
        while self.waiting:  # the handler runs some time after the timer
            time.sleep(1e-4)

    def run(self, function: Callable[[], object], after: float) -> None:
        self.waiting = True
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, after)
                function()
                self.wait()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except self.error as error:
            self.held.append(error)


@pytest.fixture(params=[KeyboardInterrupt, Alarm])
def interrupted(request: pytest.FixtureRequest, held: list[BaseException]) -> Iterator[Interrupter]:
    found = Interrupter(request.param, held)
    before = signal.signal(signal.SIGALRM, found.alarm)
    yield found
    signal.signal(signal.SIGALRM, before)


@NEEDS_TIMERS
# raised in a finalizer or in a callback of the garbage collector: swallowed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", BLOCKS)
def test_exception_at_any_moment_leaves_nothing_after_the_next_use(
    gpt2_like: Any, unchanged: Any, interrupted: Any, held: list[BaseException], what: str
) -> None:
    check, left = unchanged(gpt2_like), 0

    def often() -> None:
        while interrupted.waiting:
            enter(BLOCKS[what](gpt2_like))

    for i in range(250):
        interrupted.run(often, 2e-4 + 1.46e-5 * i)
        try:
            check()
        except AssertionError:
            left += 1
            NeuronView(gpt2_like)
            check()
    assert left <= 5 and len(held) > 240


@NEEDS_TIMERS
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", METHODS)
def test_method_gives_the_model_back_whenever_it_is_interrupted(
    gpt2_like: Any, sequence: Any, unchanged: Any, interrupted: Any, held: Any, name: str
) -> None:
    method, check = METHODS[name](**SHORT.get(name, {})), unchanged(gpt2_like)
    seconds = min(timeit.repeat(lambda: method(gpt2_like, sequence), number=1, repeat=3))
    wanted = method(gpt2_like, sequence)
    for i in range(1, 20):
        interrupted.run(lambda: method(gpt2_like, sequence), seconds * i / 20)
        NeuronView(gpt2_like)
        check()
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert held
    assert torch.equal(method(gpt2_like, sequence).values, wanted.values)


def raises_at(
    line: int, error: type[BaseException], function: Callable[[], object], held: list[BaseException]
) -> bool:
    """Run a function and raise before its n-th line in the package; whether there were so many."""
    left = [line]

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if "tl_localize" not in frame.f_code.co_filename:
            return None
        left[0] -= event == "line"
        if not left[0] and event == "line":
            raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except (error, TypeCheckError) as raised:
        held.append(raised)
    finally:
        sys.settrace(before)
    return left[0] <= 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", [*BLOCKS, "method"])
def test_exception_at_any_line_leaves_nothing_after_the_next_use(
    gpt2_like: Any, sequence: Any, unchanged: Any, held: list[BaseException], what: str
) -> None:
    method = METHODS["attribution"]()

    def work() -> None:
        if what == "method":
            method(gpt2_like, sequence)
        else:
            enter(BLOCKS[what](gpt2_like))

    check, line = unchanged(gpt2_like), 1
    while raises_at(line, TimeoutError, work, held):
        NeuronView(gpt2_like)
        check()
        line += 1 if what != "method" else 3
    assert line > 50


@pytest.mark.parametrize("what", ["applied", "dropped_out"])
def test_block_that_is_dropped_without_its_end_gives_the_model_back(
    gpt2_like: Any, unchanged: Any, what: str
) -> None:
    check, block = unchanged(gpt2_like), BLOCKS[what](gpt2_like)
    block.__enter__()
    with pytest.raises(AssertionError):
        check()
    del block
    check()


def test_block_of_a_generator_that_is_dropped_is_undone(gpt2_like: Any, unchanged: Any) -> None:
    def paused() -> Iterator[None]:
        with BLOCKS["applied"](gpt2_like):
            yield

    check, generator = unchanged(gpt2_like), paused()
    next(generator)
    del generator
    check()


# ---- blocks of the user


def test_block_of_the_user_is_never_undone_under_him(gpt2_like: Any, sequence: Any) -> None:
    neurons = injection_of(0).neurons

    def found() -> float:
        METHODS["activations"]()(gpt2_like, sequence)
        return float(memorization_loss(gpt2_like, [sequence]).detach())

    def paused() -> Iterator[float]:
        with neurons.dropped_out(gpt2_like):
            while True:
                yield found()

    def into(stack: ExitStack) -> None:
        stack.enter_context(neurons.dropped_out(gpt2_like))

    clean = found()
    with neurons.dropped_out(gpt2_like):
        ablated = found()
        with NeuronView(gpt2_like).scaled({0: torch.zeros(1, 48)}):
            assert found() not in (ablated, clean)
        assert found() == ablated
    generator, stack = paused(), ExitStack()
    assert [found(), next(generator), found(), next(generator)] == [clean, *[ablated] * 3]
    generator.close()
    assert found() == clean
    into(stack)
    assert found() == ablated
    stack.close()
    assert found() == clean


def test_hooks_of_the_user_stay(gpt2_like: Any, sequence: Any) -> None:
    def own(act: torch.Tensor, hook: Any) -> torch.Tensor:
        return act * 0.5

    point = gpt2_like.hook_dict["blocks.0.mlp.hook_post"]
    with BLOCKS["dropped_out"](gpt2_like):
        point.add_hook(own)
    METHODS["attribution"]()(gpt2_like, sequence)
    assert [handle.user_hook for handle in point.fwd_hooks] == [own]
    assert list(point._forward_hooks) == [point.fwd_hooks[0].hook.id]


def test_block_is_entered_once(gpt2_like: Any) -> None:
    block = BLOCKS["dropped_out"](gpt2_like)
    enter(block)
    with pytest.raises(RuntimeError, match="with must get a new block"):
        enter(block)


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
    "loss": lambda model, sequence: memorization_loss(model, [sequence]),
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
    with BLOCKS["applied"](gpt2_like):
        (error,) = in_thread(lambda: MEASURES[name](gpt2_like, sequence))
    assert isinstance(error, RuntimeError) and str(error).startswith(
        "model must be used by one thread at a time, got "
    )
    assert not in_thread(lambda: MEASURES[name](gpt2_like, sequence))


def test_two_threads_never_give_a_wrong_score(
    gpt2_like: Any, sequence: Any, unchanged: Any
) -> None:
    check = unchanged(gpt2_like)
    names = ("slimming", "activations", "attribution")
    methods = [METHODS[name](**SHORT.get(name, {})) for name in names]
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
    assert not wrong and len(refused) < 48
    assert all("one thread at a time" in text for text in refused)
    check()


def test_block_of_a_thread_that_has_ended_is_undone(gpt2_like: Any, unchanged: Any) -> None:
    check, block = unchanged(gpt2_like), BLOCKS["applied"](gpt2_like)
    in_thread(block.__enter__)
    NeuronView(gpt2_like)
    check()
