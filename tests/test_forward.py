"""Partial runs of both classes equal full ones; where a shortcut does not hold, it is noticed and
the numbers stay right.
"""

import threading

import pytest
import torch
from architectures import KINDS, config_of, save, tiny_bridge
from oracles import plain_integrated_gradients, plain_zero_out
from torch.utils._python_dispatch import TorchDispatchMode

from tl_localize import (
    METHODS,
    GradientAlignment,
    IntegratedGradients,
    NeuronSet,
    RowNorm,
    ZeroOut,
    accuracy,
    inject,
    load_model,
    memorization_loss,
    perplexity,
)
from tl_localize.execution.environment import fingerprint
from tl_localize.forward import (
    entering,
    generate,
    is_bridge,
    lay_out,
    residual,
    resume,
    unembed,
)
from tl_localize.methods.partial_runs import CleanRun
from tl_localize.neurons import NeuronView

pytestmark = pytest.mark.usefixtures("unchecked")

TOKENS = torch.randint(61, (2, 11), generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=KINDS)
def bridge(request):
    """A TransformerBridge, which both generations of TransformerLens have."""
    return tiny_bridge(1, KINDS[request.param])


def test_resume_from_every_layer_with_a_larger_batch_equals_the_full_run(either):
    with entering(either) as streams, torch.no_grad():
        whole = residual(either, TOKENS)
    for layer, resid in streams.items():
        with torch.no_grad():
            assert torch.equal(resume(either, 0, streams[0], layer), resid)
            again = resume(either, layer, resid.repeat(3, 1, 1))
        assert (again - whole.repeat(3, 1, 1)).abs().max() < 1e-5


def test_resume_has_the_gradient_of_the_full_run(either):
    with entering(either) as streams:
        whole = residual(either, TOKENS)
    last = len(streams) - 1
    (wanted,) = torch.autograd.grad(whole.square().sum(), streams[last])
    leaf = streams[last].detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(resume(either, last, leaf).square().sum(), leaf)
    assert (gradient - wanted).abs().max() < 1e-4 * wanted.abs().max()


class Copied(TorchDispatchMode):
    """Sizes of the tensors that are copied inside the ``with`` block."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_lay_out_changes_no_bit_of_a_pass_a_gradient_or_a_training(any_model, sequence):
    def everything():
        injection = inject(any_model, sequence, ratio=0.05, seed=0, learning_rate=0.05, max_steps=5)
        with torch.no_grad():
            found = [any_model(TOKENS), injection.rows, injection.losses]
        return found + [
            method(any_model, sequence).values for method in (GradientAlignment(), RowNorm())
        ]

    before, kind = everything(), fingerprint(any_model)
    assert lay_out(any_model) is any_model and fingerprint(any_model) == kind
    assert all(torch.equal(*pair) for pair in zip(before, everything(), strict=True))


def test_a_pass_after_lay_out_copies_no_weight(any_model):
    if is_bridge(any_model):
        pytest.skip("a Bridge has no such copies")
    smallest = min(weight.numel() for name, weight in any_model.named_parameters() if "W_" in name)
    tokens = TOKENS[:1, :2]  # so few that no activation is as large as a weight
    with torch.no_grad(), Copied() as before:
        any_model(tokens)
    lay_out(any_model)
    with torch.no_grad(), Copied() as after:
        any_model(tokens)
    assert max(before.sizes) >= smallest  # what this is about
    assert max(after.sizes, default=0) < smallest


@torch.no_grad()
def test_hooks_meet_no_pass_but_the_asked_for(bridge):
    shapes = []

    def seen(act, hook):
        shapes.append(tuple(act.shape))
        return act

    with bridge.hooks(fwd_hooks=[("blocks.0.mlp.hook_post", seen)]):
        resid = residual(bridge, TOKENS)
        unembed(bridge, resid)
        resume(bridge, 1, resume(bridge, 0, resid, 1))
    assert [shape[:2] for shape in shapes] == [tuple(TOKENS.shape)] * 2


@torch.no_grad()
def test_unembedded_residual_is_the_logits(either):
    logits = either(TOKENS)
    assert (unembed(either, residual(either, TOKENS)) - logits).abs().max() < 1e-5
    assert (unembed(either, residual(either, TOKENS)[0, 3]) - logits[0, 3]).abs().max() < 1e-5


@torch.no_grad()
def test_greedy_tokens_with_a_cache_are_those_without(either):
    wanted = TOKENS[:, :5]
    for _ in range(6):
        wanted = torch.cat([wanted, either(wanted)[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(either, TOKENS[:, :5], 6), wanted[:, 5:])


@torch.no_grad()
@pytest.mark.parametrize("either", ["neox_like", "bridge gpt2", "bridge llama"], indirect=True)
@pytest.mark.filterwarnings("ignore")  # TransformerLens warns of what a hook on a norm does
def test_users_hooks_at_every_hook_point_compose(either):
    """On each hook point that a forward pass calls: the parts of a run put together are the run,
    and the hook is called as often.
    """
    called = []

    def shift(act, hook):
        called.append(hook.name)
        return act * 1.01

    either.run_with_hooks(
        TOKENS,
        fwd_hooks=[(lambda name: "hook_" in name, lambda act, hook: called.append(hook.name))],
    )
    names = sorted({name for name in called if name.startswith(("blocks", "ln_final", "unembed"))})
    assert len(names) > 20
    for name in names:
        with either.hooks(fwd_hooks=[(name, shift)]):
            logits = either(TOKENS)
            with entering(either) as streams:
                resid = residual(either, TOKENS)
            assert (unembed(either, resid) - logits).abs().max() < 1e-4, name
            layer = int(name.split(".")[1]) if name.startswith("blocks") else 0
            assert (resume(either, layer, streams[layer]) - resid).abs().max() < 1e-4, name


def test_partial_runs_leave_nothing_behind(either, unchanged):
    residual(either, TOKENS)
    check = unchanged(either)
    states = [set(vars(block)) for block in either.blocks]

    def failing(act, hook):
        raise RuntimeError("the user's own")

    resid = resume(either, 0, residual(either, TOKENS), 1)
    with (
        either.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", failing)]),
        pytest.raises(RuntimeError, match="the user's own"),
    ):
        resume(either, 1, resid)
    unembed(either, resid)
    check()
    assert [set(vars(block)) for block in either.blocks] == states


def test_bridge_is_a_bridge(bridge, gpt2_like):
    assert is_bridge(bridge) and is_bridge(gpt2_like) == (
        type(gpt2_like).__name__ == "TransformerBridge"
    )


def test_bridge_scores_equal_their_definitions(bridge, sequence, unchanged):
    check = unchanged(bridge)
    assert (
        ZeroOut()(bridge, sequence).values - plain_zero_out(bridge, sequence)
    ).abs().max() < 1e-5
    method = IntegratedGradients(steps=3)
    wanted = plain_integrated_gradients(bridge, sequence, *method.quadrature())
    assert (method(bridge, sequence).values - wanted).abs().max() < 1e-6
    check()


def test_injection_into_a_bridge_writes_the_rows_that_were_trained(bridge, sequence, unchanged):
    check = unchanged(bridge)
    injection = inject(bridge, sequence, ratio=0.3, seed=0, learning_rate=0.05, max_steps=80)
    with injection.applied(bridge), torch.no_grad():
        logits = bridge(sequence.tokens[None])[0, :-1]
        assert (
            abs(
                float(
                    torch.nn.functional.cross_entropy(logits, sequence.tokens[1:])
                    - injection.losses[-1]
                )
            )
            < 1e-4
        )
    check()


def test_dropout_hooks_of_a_bridge_are_its_own(bridge, sequence):
    chosen = NeuronSet(
        torch.rand(len(bridge.blocks), 48, generator=torch.Generator().manual_seed(0)) < 0.5
    )
    with chosen.dropped_out(bridge):
        inside = bridge(sequence.tokens[None])
        assert accuracy(bridge, [sequence]).shape == (1,)
    assert torch.equal(
        bridge.run_with_hooks(sequence.tokens[None], fwd_hooks=chosen.dropout_hooks()), inside
    )


# ---- shortcuts that do not hold


def exact(model, sequence):
    """The scores are those of the definitions, whatever way is taken."""
    wanted = plain_zero_out(model, sequence)
    assert (ZeroOut()(model, sequence).values - wanted).abs().max() < 1e-5
    method = IntegratedGradients(steps=2)
    wanted = plain_integrated_gradients(model, sequence, *method.quadrature())
    assert (method(model, sequence).values - wanted).abs().max() < 1e-6 * max(
        1.0, float(wanted.abs().max())
    )


@pytest.mark.parametrize("name", ["Gemma 2", "OLMo 2", "Granite"])
def test_output_that_is_normalized_or_scaled_is_not_taken_for_added(tmp_path, name, sequence):
    save(config_of(name), tmp_path)
    model = load_model(tmp_path, device="cpu", bridge=True)
    assert CleanRun.of(NeuronView(model), sequence.tokens[None]).additive == frozenset()


@pytest.mark.parametrize("bridge", ["gpt2"], indirect=True)
def test_block_that_needs_more_than_the_residual_stream_is_noticed(bridge, sequence):
    """Layer 1 also gets the embeddings, which no partial run has."""
    kept = []

    def keep(act, hook):
        kept[:] = [act]

    def add(act, hook):
        return act + kept[0]

    slow = pytest.warns(
        UserWarning,
        match="Every run starts from the tokens, the slow way, because layer 1 gets more",
    )
    with bridge.hooks(fwd_hooks=[("embed.hook_out", keep), ("blocks.1.hook_in", add)]), slow:
        exact(bridge, sequence)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bridge", ["llama"], indirect=True)
def test_position_that_sees_others_changes_is_noticed(bridge, sequence):
    def leak(act, hook):
        return act + 0.3 * act.cumsum(1)

    slow = pytest.warns(
        UserWarning, match="the slow way, because one pass gives other numbers at position"
    )
    with bridge.hooks(fwd_hooks=[("blocks.1.hook_in", leak)]), slow:
        exact(bridge, sequence)


@pytest.mark.parametrize("name", ["OPT", "GPT-J"])
def test_attention_whose_hooks_are_not_live_is_noticed(tmp_path, name, sequence):
    save(config_of(name), tmp_path)
    model = load_model(tmp_path, device="cpu", bridge=True)
    with pytest.warns(UserWarning, match="because the hooks of attention are not live"):
        exact(model, sequence)


def test_model_on_two_devices_is_refused(bridge):
    bridge.embed.to("meta")
    with pytest.raises(
        ValueError, match=r"model must be on one device, got .* on cpu, meta\. Move it"
    ):
        NeuronView(bridge)


# ---- passes that are not ours


@pytest.mark.parametrize("either", ["gpt2_like", "bridge neox"], indirect=True)
@pytest.mark.parametrize("name", ["zero_out", "attribution", "integrated_gradients", "slimming"])
def test_model_called_by_another_thread_gives_right_numbers_on_both_sides(either, sequence, name):
    method = METHODS[name](**({"steps": 3} if hasattr(METHODS[name], "steps") else {}))
    wanted = method(either, sequence).values
    with torch.no_grad():
        logits = either(sequence.tokens[None])
    wrong = []
    ended = threading.Event()

    def often():
        while not ended.is_set():
            try:
                with torch.no_grad():
                    found = either(sequence.tokens[None])
                if not torch.allclose(found, logits, atol=1e-4):
                    wrong.append("logits")
            except BaseException as error:
                wrong.append(error)

    thread = threading.Thread(target=often)
    thread.start()
    for _ in range(3):
        if not torch.allclose(method(either, sequence).values, wanted, atol=1e-5):
            wrong.append("scores")
    ended.set()
    thread.join()
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_model_that_drops_at_random_is_refused(kind, sequence):
    model = tiny_bridge(1, KINDS[kind])
    assert float(accuracy(model, [sequence])) >= 0
    model.train()
    # the Bridge does not name all modules of the model of transformers
    modules = {*model.modules(), *model.original_model.modules()}
    dropped = [module for module in modules if isinstance(module, torch.nn.Dropout)]
    for module in dropped:
        module.p = 0.0
    assert torch.equal(model(TOKENS), model(TOKENS))
    assert float(accuracy(model, [sequence])) >= 0
    for module in dropped or [model.original_model.model.layers[1].self_attn]:
        setattr(module, "p" if dropped else "attention_dropout", 0.1)
    calls = [
        lambda: accuracy(model, [sequence]),
        lambda: memorization_loss(model, [sequence]),
        lambda: perplexity(model, sequence.tokens[None]),
        lambda: METHODS["activations"]()(model, sequence),
        lambda: inject(model, sequence, ratio=0.1, seed=0, learning_rate=0.1),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match="must not be in training mode, got active dropout in '"
        ):
            call()
