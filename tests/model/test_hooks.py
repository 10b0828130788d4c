"""Whatever is raised while a model is changed, it is given back: no hook, no attribute and no
weight of the change is left. Blocks may end in any order, and hooks of the user stay.
"""

import copy
import inspect
import os
import signal
import sys
from contextlib import ExitStack, suppress
from itertools import cycle, permutations

import pytest
import torch
from architectures import KINDS, tiny_bridge
from rivals import SHORT_RIVALS

from tl_localize import METHODS, Injection, MemorizedSequence, NeuronSet, Recipe, inject, learn
from tl_localize.files import digest
from tl_localize.injection.injected import rows_replaced
from tl_localize.model.forward import unhooked
from tl_localize.model.hooks import added_hooks, interrupt_waits, registered
from tl_localize.model.neurons import NeuronView

SHORT = SHORT_RIVALS | {
    "hard_concrete": {"steps": 3},
    "slimming": {"steps": 3},
    "integrated_gradients": {"steps": 2},
    "gradient_alignment": {"points": 2},
    "iterative_attribution": {"rounds": 2},
    "refined_attribution": {"steps": 2},
}
GENERAL = torch.arange(20).reshape(2, 10)
OF_LAST_PASS = ("_pattern", "_fired_")  # attributes in which modules of a Bridge keep something


def work_of(name):
    """Something that changes a model while it runs."""
    training = {"learning_rate": 0.05, "max_steps": 3}
    if name == "inject":
        return lambda model, sequence: inject(model, sequence, ratio=0.2, seed=0, **training)
    if name == "learn":
        recipe = Recipe(**training, general=1)
        return lambda model, sequence: learn(
            model, [sequence], recipe, general_tokens=GENERAL, seed=0
        )
    return METHODS[name](**SHORT.get(name, {}))


def attributes_of(model):
    """The attributes of each module by itself. The list of hooks of a point is made anew; so are
    some of a Bridge itself, of which the names count, and what its modules keep of a pass.
    """
    found = {}
    for name, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if key != "fwd_hooks"}
        own = {key: key.startswith(OF_LAST_PASS) or id(value) for key, value in kept.items()}
        found[name] = own if name else sorted(own)
    return found


def state_of(model):
    """What a block may change: hooks of points, attributes, weights."""
    hooks = [len(point.fwd_hooks) for point in model.hook_dict.values()]
    weights = [digest(parameter.detach()) for parameter in model.parameters()]
    return hooks, attributes_of(model), weights


@pytest.fixture(autouse=True)
def interrupts_are_heard():
    """Also where this process was started in the background of a shell, which turns them off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)


def lose_device(*_, **__):
    raise RuntimeError("the device is gone")


def at_call(number, function):
    """What calls a function the n-th time that it is called itself; and how often it was."""
    calls = []

    def hook(*given, **named):
        calls.append(None)
        if len(calls) == number:
            function()

    return hook, calls


WITH_PASSES = [name for name in METHODS if name not in ("random", "row_norm")]
HAPPENINGS = [(press_ctrl_c, KeyboardInterrupt), (lose_device, RuntimeError)]


@pytest.mark.parametrize("where", ["hook", "forward"])
@pytest.mark.parametrize("name", [*WITH_PASSES, "inject", "learn"])
def test_what_is_raised_during_work_leaves_nothing(normless, sequence, unchanged, name, where):
    work = work_of(name)
    point = normless.hook_dict["blocks.1.mlp.hook_post"]

    def call_with(hook):
        """The hook runs in the middle of a forward pass, or before the MLP's own."""
        if where == "hook":
            point.add_hook(hook)
            return lambda: work(normless, sequence)
        handle = normless.blocks[1].mlp.register_forward_pre_hook(lambda *_: hook())
        handles.append(handle)
        return lambda: work(normless, sequence)

    handles = []
    wanted = scores_in(work(normless, sequence))  # scores of general text are kept from now on
    count, calls = at_call(0, lambda: None)
    call_with(count)()
    clear(point, handles)
    check = unchanged(normless)
    attributes = attributes_of(normless)
    numbers = sorted({1, (len(calls) + 1) // 2, len(calls)})
    happenings = HAPPENINGS if where == "hook" else HAPPENINGS[::-1]
    for number, (happens, raised) in zip(numbers, cycle(happenings), strict=False):
        hook, _ = at_call(number, happens)
        call = call_with(hook)
        with pytest.raises(raised):
            call()
        clear(point, handles)
        check()
        assert attributes_of(normless) == attributes
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    again = scores_in(work(normless, sequence))
    assert all(map(torch.equal, again, wanted))
    check()


@pytest.mark.parametrize("change", ["in_training", "replaced", "added_hooks"])
def test_a_second_interrupt_waits_until_the_model_is_as_it_was(
    gpt2_like, unchanged, monkeypatch, change
):
    """Someone presses Ctrl-C once more while the first one is still at work."""
    from tl_localize.injection import recipes
    from tl_localize.model import hooks

    def begin_with_ctrl_c(name, *modules):
        function = getattr(hooks, name)

        def interrupted(*given):
            press_ctrl_c()
            return function(*given)

        for module in modules:
            monkeypatch.setattr(module, name, interrupted)

    check = unchanged(gpt2_like)
    parameters = list(gpt2_like.parameters())
    point = gpt2_like.hook_dict["blocks.1.mlp.hook_post"]
    inside = {
        "in_training": lambda: recipes.in_training(gpt2_like, parameters),
        "replaced": lambda: hooks.replaced(parameters[0], ..., parameters[0] + 1),
        "added_hooks": lambda: hooks.added_hooks([(point, lambda *_, **__: None)] * 2),
    }
    pressed = []

    def press_twice():
        with inside[change]():
            if change == "in_training":
                for parameter in parameters:
                    parameter.data.add_(1)
            begin_with_ctrl_c("put", hooks, recipes)
            begin_with_ctrl_c("_holds", hooks)
            pressed.append(True)
            press_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert pressed and not point.fwd_hooks
    check()


@pytest.mark.parametrize("either", ["gpt2_like", "bridge gpt2"], indirect=True)
def test_model_can_be_copied_after_work(either, sequence):
    """Torch copies no tensor that has a graph, such as the pattern that a Bridge's attention keeps
    of its last pass.
    """
    for name in [*WITH_PASSES, "inject", "learn"]:
        with torch.no_grad():
            wanted = either(sequence.tokens[None])  # and what is kept of a pass has no graph
        work_of(name)(either, sequence)
        copied = copy.deepcopy(either)
        with torch.no_grad():
            assert torch.equal(copied(sequence.tokens[None]), wanted), name


def scores_in(result):
    """The numbers of whatever some work gave."""
    if hasattr(result, "weights"):
        return list(result.weights.values())
    return [result.values if hasattr(result, "values") else result.rows]


def clear(point, handles):
    """Take the hook of this test away, and nothing else."""
    for handle in handles:
        handle.remove()
    handles.clear()
    if point.fwd_hooks:
        point.fwd_hooks.pop().hook.remove()


def test_model_can_be_copied_after_its_proof():
    model = tiny_bridge(1, KINDS["gpt2"])
    NeuronView(model)
    assert copy.deepcopy(model).cfg.n_layers == model.cfg.n_layers


# ---- blocks


def injection_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    neurons = NeuronSet(torch.rand(NeuronView(model).size, generator=generator) < 0.3)
    rows = torch.randn(len(neurons), model.cfg.d_model, generator=generator)
    return Injection(neurons, rows, torch.ones(1), True)


BLOCKS = {
    "applied": lambda model: injection_of(model, 0).applied(model),
    "dropped_out": lambda model: injection_of(model, 0).neurons.dropped_out(model),
    "scaled": lambda model: NeuronView(model).scaled({0: torch.zeros(1, model.cfg.d_mlp)}),
    "lean": lambda model: NeuronView(model).lean(),
}


@pytest.mark.parametrize("either", ["gpt2_like", "bridge gpt2"], indirect=True)
@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", BLOCKS)
def test_block_ends_whatever_is_raised_in_it(either, unchanged, name, raised):
    NeuronView(either)  # a Bridge puts attributes on its modules in its first pass
    check = unchanged(either)
    attributes = attributes_of(either)
    changed = []

    def work():
        with BLOCKS[name](either):
            changed.append(state_of(either) != before)
            raise raised

    before = state_of(either)
    with pytest.raises(raised):
        work()
    assert changed == [True]
    check()
    assert attributes_of(either) == attributes


def test_nested_blocks_give_back_what_they_found(gpt2_like, sequence, unchanged):
    """Also injections into the same rows, of which the inner one counts."""
    check = unchanged(gpt2_like)

    @torch.no_grad()
    def logits():
        return gpt2_like(sequence.tokens[None])

    first, second, third = (injection_of(gpt2_like, seed) for seed in range(3))
    blocks = [first.applied, second.applied, third.neurons.dropped_out]
    for order in permutations(blocks):
        seen = [logits()]
        with ExitStack() as outer, ExitStack() as middle, ExitStack() as inner:
            for stack, block in zip((outer, middle, inner), order, strict=True):
                stack.enter_context(block(gpt2_like))
                seen.append(logits())
            for stack, wanted in zip((inner, middle, outer), seen[2::-1], strict=True):
                stack.close()
                assert torch.equal(logits(), wanted)
        check()


def test_hook_blocks_end_in_any_order(gpt2_like, sequence, unchanged):
    """They share nothing but the list of hooks of a point."""
    check = unchanged(gpt2_like)
    for order in permutations(range(3)):
        stacks = [ExitStack() for _ in range(3)]
        for i, stack in enumerate(stacks):
            stack.enter_context(injection_of(gpt2_like, i).neurons.dropped_out(gpt2_like))
        for i in order:
            stacks[i].close()
        check()


def test_hooks_of_the_user_stay(gpt2_like, sequence):
    def own(act, hook):
        return act * 0.5

    point = gpt2_like.hook_dict["blocks.0.mlp.hook_post"]
    with BLOCKS["dropped_out"](gpt2_like):
        point.add_hook(own)
    METHODS["attribution"]()(gpt2_like, sequence)
    assert [handle.user_hook for handle in point.fwd_hooks] == [own]
    assert list(point._forward_hooks) == [point.fwd_hooks[0].hook.id]


def test_block_of_the_user_is_there_while_a_method_runs(gpt2_like):
    sequence = MemorizedSequence(torch.arange(9), 3, "own")
    method = METHODS["attribution"]()
    clean = method(gpt2_like, sequence).values
    with BLOCKS["dropped_out"](gpt2_like):
        ablated = method(gpt2_like, sequence).values
        assert torch.equal(method(gpt2_like, sequence).values, ablated)
    assert not torch.equal(ablated, clean)
    assert torch.equal(method(gpt2_like, sequence).values, clean)


@pytest.mark.parametrize("putting", ["add_hook", "register_forward_hook"])
def test_an_interrupt_while_a_hook_is_put_there_waits(gpt2_like, unchanged, monkeypatch, putting):
    point = gpt2_like.blocks[0].mlp.hook_post
    put = getattr(type(point), putting)

    def put_and_press(*given, **named):
        handle = put(*given, **named)
        press_ctrl_c()
        return handle

    check = unchanged(gpt2_like)
    monkeypatch.setattr(type(point), putting, put_and_press)
    hooks = [(point, lambda act, *_, **__: None)]
    block = added_hooks(hooks) if putting == "add_hook" else registered(hooks, putting)
    with pytest.raises(KeyboardInterrupt), block:
        pass
    check()


def test_a_handler_that_python_did_not_set_stays(monkeypatch):
    """That of a program in which Python runs, of which it knows None."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", None)
    with interrupt_waits():
        pass


def test_an_interrupt_while_weights_become_trainable_again_waits(gpt2_like):
    parameters = list(gpt2_like.parameters())
    (begin, code) = NeuronView.lean.__wrapped__.__code__.co_firstlineno, NeuronView.lean.__wrapped__
    source = inspect.getsource(code).splitlines()
    (line,) = [begin + i for i, text in enumerate(source) if "requires_grad_(True)" in text]
    for number in (1, 2, len(parameters)):
        hook, calls = at_call(number, press_ctrl_c)

        def trace(frame, event, _, hook=hook):
            if (frame.f_code, event, frame.f_lineno) == (code.__code__, "line", line):
                hook()
            return trace

        before = sys.gettrace()
        block = NeuronView(gpt2_like).lean()
        block.__enter__()
        sys.settrace(trace)
        block.gen.gi_frame.f_trace = trace  # a frame that runs already is traced when told so
        with pytest.raises(KeyboardInterrupt):
            block.__exit__(None, None, None)
        sys.settrace(before)
        assert len(calls) == len(parameters)
        assert all(parameter.requires_grad for parameter in parameters)


def test_an_interrupt_between_the_ends_of_two_changes_waits(gpt2_like, unchanged):
    """At each line of what undoes one change after the other."""
    lines = [ExitStack.close.__code__, ExitStack.__exit__.__code__]
    neurons = NeuronSet(torch.ones(2, gpt2_like.cfg.d_mlp, dtype=torch.bool))
    rows = torch.zeros(len(neurons), gpt2_like.cfg.d_model)
    check = unchanged(gpt2_like)
    calls, number = [None], 0
    while len(calls) > number:
        number += 1
        hook, calls = at_call(number, press_ctrl_c)

        def trace(frame, event, _, hook=hook):
            if frame.f_code in lines and event == "line":
                hook()
            return trace

        before = sys.gettrace()
        with suppress(KeyboardInterrupt):
            with neurons.dropped_out(gpt2_like), rows_replaced(gpt2_like, neurons, rows):
                sys.settrace(trace)
            sys.settrace(before)
        sys.settrace(before)
        assert not any(point.fwd_hooks for point in gpt2_like.hook_dict.values()), number
        check()
    assert number > 10


def test_an_interrupt_while_hooks_of_the_user_come_back_waits(gpt2_like):
    hooks = [(name, lambda act, hook: None) for name in gpt2_like.hook_dict]
    with gpt2_like.hooks(hooks):
        points = gpt2_like.hook_dict.values()
        before = [len(point._forward_hooks) for point in points]
        code = unhooked.__wrapped__.__code__
        lines = enumerate(inspect.getsource(code).splitlines(), code.co_firstlineno)
        (line,) = [number for number, text in lines if "_forward_hooks.update" in text]

        def trace(frame, event, _):
            if (frame.f_code, event, frame.f_lineno) == (code, "line", line):
                press_ctrl_c()
            return trace

        earlier = sys.gettrace()
        block = unhooked(gpt2_like.hook_dict.values())
        block.__enter__()
        sys.settrace(trace)
        block.gen.gi_frame.f_trace = trace
        with pytest.raises(KeyboardInterrupt):
            block.__exit__(None, None, None)
        sys.settrace(earlier)
        assert [len(point._forward_hooks) for point in points] == before
