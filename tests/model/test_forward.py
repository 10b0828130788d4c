"""Partial runs of both classes equal full ones; where a shortcut does not hold, it is noticed and
the numbers stay right.
"""

from contextlib import nullcontext

import pytest
import torch
from architectures import KINDS, config_of, save, tiny_bridge
from oracles import plain_integrated_gradients, plain_zero_out
from torch.utils._python_dispatch import TorchDispatchMode

from tl_localize import (
    METHODS,
    AttentionHeads,
    GradientAlignment,
    IntegratedGradients,
    MLPNeurons,
    NeuronSet,
    RowNorm,
    ZeroOut,
    accuracy,
    inject,
    load_model,
    memorization_loss,
    perplexity,
)
from tl_localize.methods.partial_runs import CleanRun
from tl_localize.model import forward
from tl_localize.model.environment import fingerprint
from tl_localize.model.forward import (
    generate,
    is_bridge,
    lay_out,
    logits_misfit,
    recorded_streams,
    residual,
    resume,
    unembed,
)
from tl_localize.model.neurons import NeuronView

TOKENS = torch.randint(61, (2, 11), generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=KINDS)
def bridge(request):
    """A TransformerBridge, which both generations of TransformerLens have."""
    return tiny_bridge(1, KINDS[request.param])


def test_resume_from_every_layer_with_a_larger_batch_equals_the_full_run(either):
    with recorded_streams(either) as streams, torch.no_grad():
        whole = residual(either, TOKENS)
    for layer, resid in streams.items():
        with torch.no_grad():
            assert torch.equal(resume(either, 0, streams[0], layer), resid)
            again = resume(either, layer, resid.repeat(3, 1, 1))
        assert (again - whole.repeat(3, 1, 1)).abs().max() < 1e-5


@torch.no_grad()
def test_resume_takes_an_expanded_stream_that_no_norm_makes_contiguous(normless):
    normless.cfg.parallel_attn_mlp = True  # else the MLP sees a sum
    with recorded_streams(normless) as streams:
        whole = residual(normless, TOKENS[:1])
    again = resume(normless, 1, streams[1].expand(3, -1, -1))
    assert (again - whole).abs().max() < 1e-5


def test_resume_has_the_gradient_of_the_full_run(either):
    with recorded_streams(either) as streams:
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

    before = everything()
    kind = fingerprint(any_model)
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
    for dtype, of_logits in {torch.bfloat16: torch.float32, torch.float64: torch.float64}.items():
        assert unembed(either.to(dtype), residual(either, TOKENS)).dtype == of_logits


def test_greedy_tokens_with_a_cache_are_those_without(either):
    assert torch.equal(generate(either, TOKENS[:, :5], 6), uncached(either, 6))


@pytest.mark.parametrize("name", ["reference-gpt2", "reference-pythia"])
@pytest.mark.parametrize("bridge", [False, True], indirect=False)
def test_reference_models_write_with_a_cache_what_they_write_without(
    name, bridge, recwarn, shipped_model
):
    """With transformers 5.24 and TransformerLens 4.3, a cache stayed empty."""
    model = load_model(name, device="cpu", bridge=True) if bridge else shipped_model(name)
    given = torch.randint(model.cfg.d_vocab, (2, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(generate(model, given, 4), uncached(model, 4, given))
    assert not [warning for warning in recwarn if "slow way" in str(warning.message)]


def uncached(model, n, given=TOKENS[:, :5]):
    """The greedy tokens after some given ones, from whole passes."""
    texts = given
    with torch.no_grad():
        for _ in range(n):
            texts = torch.cat([texts, model(texts)[:, -1:].argmax(-1)], 1)
    return texts[:, given.shape[1] :]


def without_cache(model):
    """What upstream did silently: the model drops the cache that it is given."""
    forward = type(model).forward

    def dropping(tokens, **options):
        for name in ("past_kv_cache", "past_key_values", "cache"):
            options.pop(name, None)
        return forward(model, tokens, **options)

    vars(model)["forward"] = dropping
    return model


def test_cache_that_is_dropped_is_noticed_and_said_once(either, recwarn):
    wanted = uncached(either, 6)
    without_cache(either)
    said = "without a cache .* TransformerLens .* and transformers .* fail, or give other logits"
    with pytest.warns(UserWarning, match=said):
        assert torch.equal(generate(either, TOKENS[:, :5], 6), wanted)
    recwarn.clear()
    assert torch.equal(generate(either, TOKENS[:, :5], 6), wanted)
    either.train().eval()
    with either.hooks(fwd_hooks=[("blocks.0.hook_in", lambda act, hook: act)] * is_bridge(either)):
        assert torch.equal(generate(either, TOKENS[:, :5], 6), wanted)
    assert not [warning for warning in recwarn if "cache" in str(warning.message)]


def test_keys_that_are_no_longer_grouped_have_no_cache(tmp_path):
    save(config_of("Llama"), tmp_path)
    model = load_model(tmp_path, "cpu")
    if is_bridge(model):
        pytest.skip("a Bridge gives its cache what transformers gives it")
    assert model.cfg.n_key_value_heads == model.cfg.n_heads // 2
    wanted = generate(model, TOKENS[:, :5], 6)
    model.set_ungroup_grouped_query_attention(True)
    with pytest.warns(UserWarning, match="without a cache .* fail, or give other logits"):
        assert torch.equal(generate(model, TOKENS[:, :5], 6), wanted)


def test_sampled_tokens_do_not_depend_on_the_cache(either, recwarn):
    draws = torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
    with_cache = generate(either, TOKENS[:, :1], 6, draws)
    without_cache(either)
    forward._PROOFS.clear()
    with pytest.warns(UserWarning, match="without a cache"):
        assert torch.equal(generate(either, TOKENS[:, :1], 6, draws), with_cache)


def test_cache_is_proven_once_and_again_for_longer_texts_and_other_hooks(either, monkeypatch):
    passes = []
    monkeypatch.setattr(
        forward, "residual", lambda model, tokens: passes.append(0) or residual(model, tokens)
    )

    def n_passes(n):
        passes.clear()
        assert torch.equal(generate(either, TOKENS[:, :5], n), uncached(either, n))
        return len(passes)

    either(TOKENS)  # a Bridge puts hooks of its own at its first pass
    first = n_passes(4)
    assert first >= 1
    assert n_passes(4) == n_passes(3) == 0
    assert n_passes(5) >= 1 and n_passes(4) == 0
    with either.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", lambda act, hook: act * 2)]):
        assert n_passes(4) >= 1 and n_passes(4) == 0
    handle = either.blocks[1].register_forward_pre_hook(lambda module, inputs: None)
    assert n_passes(4) >= 1 and n_passes(4) == 0
    handle.remove()
    assert n_passes(4) >= 1
    if is_bridge(either):
        either.original_model.config._attn_implementation = "sdpa"
        assert n_passes(4) >= 1


def test_hook_for_a_whole_batch_meets_all_of_it_in_the_proof(either):
    view = NeuronView(either)
    context = TOKENS[:, :9].reshape(6, 3)
    with view.scaled({0: torch.rand(6, view.n_neurons)}):
        assert torch.equal(generate(either, context, 3), uncached(either, 3, context))


def test_draw_above_the_sum_of_the_rounded_probabilities_is_the_last_token(gpt2_like):
    draws = torch.full((2, 1), 1.1)
    last = gpt2_like.cfg.d_vocab - 1
    assert generate(gpt2_like, TOKENS[:, :5], 1, draws).tolist() == [[last], [last]]


def test_misfit_counts_no_shift_no_nan_and_no_rounding(gpt2_like):
    wanted = torch.randn(3, 61, generator=torch.Generator().manual_seed(0))
    shifted = wanted + 50
    shifted[1] = torch.nan
    assert logits_misfit(gpt2_like, shifted, wanted) < 1e-3
    assert logits_misfit(gpt2_like, 1.05 * wanted, wanted) == pytest.approx(5)
    assert logits_misfit(gpt2_like.bfloat16(), 1.05 * wanted, wanted) == pytest.approx(0.4)


def test_hook_on_the_last_position_is_decoded_without_a_cache(either):
    """Which position is the last one of a pass differs with a cache."""

    def last(act, hook):
        return torch.cat([act[:, :-1], 3 * act[:, -1:]], 1)

    generate(either, TOKENS[:, :5], 6)
    with either.hooks(fwd_hooks=[("blocks.0.mlp.hook_post", last)]):
        wanted = uncached(either, 6)
        with pytest.warns(UserWarning, match="without a cache"):
            assert torch.equal(generate(either, TOKENS[:, :5], 6), wanted)


# ---- what is taken from upstream proves itself


def test_model_whose_parts_are_not_the_whole_is_refused(either, sequence, unproven, monkeypatch):
    """Blocks that are to be skipped run."""
    unproven(either)
    if is_bridge(either):
        monkeypatch.setattr(forward, "own_attribute", lambda *_: nullcontext())
    else:
        whole = type(either).forward
        vars(either)["forward"] = lambda *a, start_at_layer=None, **o: whole(
            either, *a, start_at_layer=None if start_at_layer is None else 0, **o
        )
    with pytest.raises(ValueError, match="must give the same logits in parts as in one pass"):
        accuracy(either, [sequence])


@pytest.mark.parametrize("units", [MLPNeurons(), AttentionHeads()])
@pytest.mark.parametrize("way", ["edits are dropped", "never called", "other rows"])
def test_units_that_are_not_what_is_said_of_them_are_refused(
    either, units, way, unproven, monkeypatch
):
    unproven(either)
    point = either.hook_dict[units.point(1)]
    if way == "edits are dropped":
        vars(point)["_call_impl"] = lambda act: (type(point)._call_impl(point, act), act)[1]
    elif way == "never called":
        vars(point)["_call_impl"] = lambda act: act
    else:
        rows = type(units).rows
        monkeypatch.setattr(type(units), "rows", lambda *a: rows(*a).flip(0).contiguous())
    with pytest.raises(ValueError, match=f"must have {units.name} whose hooks take effect"):
        NeuronView(either, units)


def test_users_hooks_do_not_meet_the_proof(either, unproven):
    unproven(either)

    def failing(act, hook):
        raise RuntimeError("met")

    with either.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", failing)]):
        NeuronView(either)
        with pytest.raises(RuntimeError, match="met"):
            either(TOKENS)
    NeuronView(either, AttentionHeads())
    assert not any("_call_impl" in vars(point) for point in either.hook_dict.values())


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
            with recorded_streams(either) as streams:
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
    found = ZeroOut()(bridge, sequence).values[:, ::4]
    assert (found - plain_zero_out(bridge, sequence, every=4)).abs().max() < 1e-5
    method = IntegratedGradients(steps=2)
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
    wanted = plain_zero_out(model, sequence, every=4)
    assert (ZeroOut()(model, sequence).values[:, ::4] - wanted).abs().max() < 1e-5
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


@pytest.mark.filterwarnings("error", "ignore:sequence must be recited")
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


def test_dropout_that_a_bridge_does_not_name_is_refused(sequence):
    model = tiny_bridge(1, KINDS["gpt2"]).train()
    for module in {*model.modules(), *model.original_model.modules()}:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.original_model.transformer.drop.p = 0.1
    with pytest.raises(ValueError, match=r"active dropout in 'transformer\.drop'"):
        accuracy(model, [sequence])


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


def test_rounding_by_autocast_is_refused(gpt2_like, sequence):
    refused = pytest.raises(ValueError, match=r"torch\.autocast must be off, got it for 'cpu'")
    with torch.autocast("cpu", torch.bfloat16), refused:
        accuracy(gpt2_like, [sequence])
    accuracy(gpt2_like, [sequence])


def test_a_model_that_was_made_in_inference_mode_is_refused(make_model, sequence):
    with torch.inference_mode():
        made = make_model(5)
    assert any(parameter.is_inference() for parameter in made.parameters())
    for call in (
        lambda: METHODS["attribution"]()(made, sequence),
        lambda: accuracy(made, sequence),
    ):
        with pytest.raises(ValueError, match="model must be made outside"):
            call()
    assert all(parameter.requires_grad for parameter in made.parameters())


def test_another_default_device_is_refused(gpt2_like, sequence):
    refused = pytest.raises(ValueError, match="default device of torch must be the CPU, got meta")
    with torch.device("meta"), refused:
        accuracy(gpt2_like, [sequence])


@pytest.mark.filterwarnings("ignore")  # TransformerLens warns of what a hook on a norm does
def test_hooks_above_the_last_block_see_the_positions_of_each_text(either, sequences):
    """Also where only the vectors that predict a suffix are needed."""

    def lose_end(act, hook):
        act[:, 6:] = 0
        return act

    def plain(sequence):
        logits = either(sequence.tokens[None])[0, sequence.n_prefix - 1 : -1]
        return torch.nn.functional.cross_entropy(logits, sequence.suffix)

    names = [name for name in either.hook_dict if name.startswith(("ln_final", "unembed"))]
    points = [name for name in names if name.endswith(("normalized", "hook_in"))]
    assert points
    for name in points:
        with either.hooks(fwd_hooks=[(name, lose_end)]), torch.no_grad():
            wanted = torch.stack([plain(sequence) for sequence in sequences])
            assert (memorization_loss(either, sequences) - wanted).abs().max() < 1e-4, name


def test_hooks_on_the_embedding_of_a_bridge_never_see_the_tokens_of_no_effect(bridge, sequences):
    def lose_a_token(act, hook):
        act[:, 3] = 0  # a pass of one token has no fourth one
        return act

    with bridge.hooks(fwd_hooks=[("embed.hook_out", lose_a_token)]), torch.no_grad():
        whole = bridge(sequences[0].tokens[None])[0, sequences[0].n_prefix - 1 : -1]
        wanted = torch.nn.functional.cross_entropy(whole, sequences[0].suffix)
        assert (memorization_loss(bridge, sequences[:1]) - wanted).abs().max() < 1e-4
    assert len(bridge.embed.hook_out._forward_hooks) == 0
