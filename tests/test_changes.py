"""Whatever moment Ctrl-C or an alarm comes at, whichever order blocks end in, the model is given
back; and one thread works with it at a time.
"""

import gc
import os
import signal
import sys
import threading
import timeit
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import tl_localize
from tl_localize import METHODS, Injection, NeuronSet, accuracy, memorization_loss, perplexity
from tl_localize.neurons import NeuronView

pytestmark = pytest.mark.usefixtures("unchecked")

PACKAGE = f"{Path(tl_localize.__file__).parent}{os.sep}"

SHORT = {
    "hard_concrete": {"steps": 3},
    "slimming": {"steps": 3},
    "integrated_gradients": {"steps": 2},
}
NEEDS_TIMERS = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="no timers on this system"
)


def injection_of(seed):
    generator = torch.Generator().manual_seed(seed)
    neurons = NeuronSet(torch.rand(2, 48, generator=generator) < 0.3)
    rows = torch.randn(len(neurons), 24, generator=generator)
    return Injection(neurons, rows, torch.ones(1), True)


BLOCKS = {
    "applied": lambda model: injection_of(0).applied(model),
    "dropped_out": lambda model: injection_of(0).neurons.dropped_out(model),
    "scaled": lambda model: NeuronView(model).scaled({0: torch.ones(1, 48)}),
    "lean": lambda model: NeuronView(model).lean(),
}


def enter(block):
    with block:
        pass


@pytest.fixture
def held():
    """Exceptions, whose tracebacks hold every frame and so every block."""
    errors = []
    yield errors
    errors.clear()


# ---- what an exception leaves


class Alarm(BaseException):
    """Of an alarm. The run-time type checkers of the tests would turn an Exception into theirs."""


@pytest.fixture(params=[KeyboardInterrupt, Alarm])
def interrupted(request, held):
    """Runs a function again and again until an exception comes after so many seconds."""
    came = []

    def alarm(number, frame):
        came.append(True)
        raise request.param

    def run(function, after):
        came.clear()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, after)
                while not came:
                    function()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except request.param as error:
            held.append(error)

    before = signal.signal(signal.SIGALRM, alarm)
    yield run
    signal.signal(signal.SIGALRM, before)


@NEEDS_TIMERS
# raised in a finalizer or in a callback of the garbage collector: swallowed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", BLOCKS)
def test_exception_at_any_moment_leaves_nothing_after_the_next_use(
    gpt2_like, unchanged, interrupted, held, what
):
    check = unchanged(gpt2_like)
    for i in range(100):
        interrupted(lambda: enter(BLOCKS[what](gpt2_like)), 2e-4 + 3.65e-5 * i)
        NeuronView(gpt2_like)
        check()
    assert len(held) > 50


@NEEDS_TIMERS
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", METHODS)
def test_method_gives_the_model_back_whenever_it_is_interrupted(
    gpt2_like, sequence, unchanged, interrupted, held, name
):
    method, check = METHODS[name](**SHORT.get(name, {})), unchanged(gpt2_like)
    seconds = min(timeit.repeat(lambda: method(gpt2_like, sequence), number=1, repeat=3))
    wanted = method(gpt2_like, sequence)
    for i in range(1, 8):
        interrupted(lambda: method(gpt2_like, sequence), seconds * i / 8)
        NeuronView(gpt2_like)
        check()
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert held
    assert torch.equal(method(gpt2_like, sequence).values, wanted.values)


def raises_at(line, error, function, held):
    """Run a function and raise before its n-th line in the package; whether there were so many."""
    left = [line]

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        left[0] -= event == "line"
        if not left[0] and event == "line":
            raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except Exception as raised:
        held.append(raised)
        cause = raised  # the type checkers of the tests turn it into theirs
        while cause and not isinstance(cause, error):
            cause = cause.__cause__ or cause.__context__
        if not cause:
            raise
    finally:
        sys.settrace(before)
    return left[0] <= 0


def test_raises_at_counts_no_line_of_another_package_in_a_folder_of_our_name(held, tmp_path):
    """As in a clone named tl_localize whose environment lies inside."""
    file = tmp_path / "tl_localize" / ".venv" / "site-packages" / "other.py"
    names = {}
    exec(compile("def other():\n    return 1\n", file, "exec"), names)
    assert not raises_at(1, TimeoutError, names["other"], held)
    assert not held


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", [*BLOCKS, "method"])
def test_exception_at_any_line_leaves_nothing_after_the_next_use(
    gpt2_like, sequence, unchanged, held, what
):
    method = METHODS["attribution"]()

    def work():
        if what == "method":
            method(gpt2_like, sequence)
        else:
            enter(BLOCKS[what](gpt2_like))

    check, line = unchanged(gpt2_like), 1
    while raises_at(line, TimeoutError, work, held):
        NeuronView(gpt2_like)
        check()
        line += 2 if what != "method" else 13
    assert line > 50


def test_block_that_is_dropped_without_its_end_is_undone(gpt2_like, unchanged):
    def paused():
        with BLOCKS["applied"](gpt2_like):
            yield

    check, generator, block = unchanged(gpt2_like), paused(), BLOCKS["dropped_out"](gpt2_like)
    next(generator)
    block.__enter__()
    del generator, block
    gc.collect()  # jaxtyping's wrappers hold what they returned
    check()


# ---- blocks of the user


def test_block_of_the_user_is_never_undone_under_him(gpt2_like, sequence):
    neurons = injection_of(0).neurons

    def found():
        METHODS["activations"]()(gpt2_like, sequence)
        return float(memorization_loss(gpt2_like, [sequence]).detach())

    def paused():
        with neurons.dropped_out(gpt2_like):
            while True:
                yield found()

    def into(stack):
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


def test_hooks_of_the_user_stay(gpt2_like, sequence):
    def own(act, hook):
        return act * 0.5

    point = gpt2_like.hook_dict["blocks.0.mlp.hook_post"]
    with BLOCKS["dropped_out"](gpt2_like):
        point.add_hook(own)
    METHODS["attribution"]()(gpt2_like, sequence)
    assert [handle.user_hook for handle in point.fwd_hooks] == [own]
    assert list(point._forward_hooks) == [point.fwd_hooks[0].hook.id]


def test_block_is_entered_once(gpt2_like):
    block = BLOCKS["dropped_out"](gpt2_like)
    enter(block)
    with pytest.raises(RuntimeError, match="with must get a new block"):
        enter(block)


# ---- threads


def in_thread(function):
    """What a function raises in another thread."""
    raised = []

    def run():
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


MEASURES = {
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
    gpt2_like, sequence, unchecked, name
):
    with BLOCKS["applied"](gpt2_like):
        (error,) = in_thread(lambda: MEASURES[name](gpt2_like, sequence))
    assert isinstance(error, RuntimeError) and "one thread at a time" in str(error)
    assert not in_thread(lambda: MEASURES[name](gpt2_like, sequence))


def test_two_threads_never_give_a_wrong_score(gpt2_like, sequence, unchanged):
    check = unchanged(gpt2_like)
    names = ("slimming", "activations", "attribution")
    methods = [METHODS[name](**SHORT.get(name, {})) for name in names]
    wanted = [method(gpt2_like, sequence).values for method in methods]
    wrong = []
    refused = []

    def often():
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


def test_block_of_a_thread_that_has_ended_is_undone(gpt2_like, unchanged):
    check, block = unchanged(gpt2_like), BLOCKS["applied"](gpt2_like)
    in_thread(block.__enter__)
    NeuronView(gpt2_like)
    check()
