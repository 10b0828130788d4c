"""Integrated Gradients: one pass against the definition, and the laws of the definition."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from oracles import ATTENTION, ONE_BY_ONE, plain_integrated_gradients, times, turned

from tl_localize import IntegratedGradients, MemorizedSequence
from tl_localize.methods import integrated_gradients, position_parallel

FEW = IntegratedGradients(steps=2)


@pytest.fixture
def sequence(make_sequences):
    return make_sequences((7, 3), seed=5)[0]


def agree(
    model,
    sequence,
    method=FEW,
    tolerance=1e-6,
):
    expected = plain_integrated_gradients(model, sequence, *method.quadrature())
    assert expected.abs().max() > 1e-4, "a test on zeros shows nothing"
    assert (method(model, sequence).values - expected).abs().max() < tolerance


@pytest.mark.parametrize("rule", ["endpoints", "midpoint", "gauss-legendre"])
def test_integrated_gradients_equals_definition(any_model, sequence, rule):
    agree(any_model, sequence, IntegratedGradients(steps=4, rule=rule))


@pytest.mark.parametrize("batch_tokens", [1, 20, 10_000])
def test_integrated_gradients_does_not_depend_on_batch(neox_like, sequence, batch_tokens):
    expected = plain_integrated_gradients(neox_like, sequence, *FEW.quadrature())
    assert (
        replace(FEW, batch_tokens=batch_tokens)(neox_like, sequence).values - expected
    ).abs().max() < 1e-6


@pytest.mark.parametrize("attention", ATTENTION)
def test_integrated_gradients_equals_definition_for_attention(
    make_model, make_sequences, attention
):
    agree(
        make_model(7, **({"n_layers": 2} | ATTENTION[attention])), make_sequences((8, 4), seed=3)[0]
    )


@pytest.mark.parametrize("reason", ONE_BY_ONE)
def test_integrated_gradients_takes_the_slow_way_and_says_so(make_model, make_sequences, reason):
    model = make_model(8, **ONE_BY_ONE[reason])
    sequence = make_sequences((8, 2), seed=3)[0]
    with pytest.warns(UserWarning, match="one pass gives other numbers at position"):
        agree(model, sequence)


POINTS = [
    "hook_resid_pre",
    "hook_attn_out",
    "hook_mlp_out",
    "hook_resid_post",
    "mlp.hook_pre",
    "mlp.hook_post",
] + [
    f"attn.hook_{name}" for name in ("q", "k", "v", "rot_q", "rot_k", "attn_scores", "pattern", "z")
]


@pytest.mark.parametrize(("point", "layer"), [(point, i % 3) for i, point in enumerate(POINTS)])
def test_integrated_gradients_serves_hooks_of_the_user(neox_like, sequence, point, layer):
    hook = (
        partial(times, factor=0.7)
        if point in ("attn.hook_attn_scores", "attn.hook_pattern")
        else turned
    )
    with neox_like.hooks(fwd_hooks=[(f"blocks.{layer}.{point}", hook)]):
        agree(neox_like, sequence)


def test_integrated_gradients_serves_hooks_on_modules(llama_like, sequence, unchanged):
    handles = [
        llama_like.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output.sin()),
        llama_like.blocks[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.8,)),
        llama_like.blocks[1].register_forward_hook(
            lambda module, inputs, output: turned(output, None)
        ),
    ]
    check = unchanged(llama_like)
    agree(llama_like, sequence)
    check()
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("rule", ["midpoint", "gauss-legendre"])
def test_integrated_gradients_of_a_layer_sums_to_rise_of_probability(any_model, sequence, rule):
    values = IntegratedGradients(steps=24, rule=rule)(any_model, sequence).values
    tokens = sequence.tokens
    positions = range(sequence.n_prefix - 1, len(sequence) - 1)

    def silent_last(act, hook):
        return torch.cat([act[:, :-1], torch.zeros_like(act[:, -1:])], dim=1)

    for layer in range(any_model.cfg.n_layers):
        rises = []
        for t in positions:
            with torch.no_grad():
                full = any_model(tokens[None, : t + 1])[0, -1].softmax(-1)[tokens[t + 1]]
                hooks = [(f"blocks.{layer}.mlp.hook_post", silent_last)]
                silent = any_model.run_with_hooks(tokens[None, : t + 1], fwd_hooks=hooks)[
                    0, -1
                ].softmax(-1)[tokens[t + 1]]
            rises.append(float(full - silent))
        tolerance = 2e-5 if rule == "midpoint" else 2e-7
        assert float(values[layer].sum()) == pytest.approx(sum(rises) / len(rises), abs=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integrated_gradients_in_half_precision_is_near(llama_like, sequence, dtype):
    exact = FEW(llama_like, sequence).values
    half = FEW(llama_like.to(dtype), sequence).values
    assert (half - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("slow", [False, True])
def test_integrated_gradients_of_a_text_recited_almost_surely_do_not_underflow(
    llama_like, sequence, slow, monkeypatch
):
    """In float16 a gradient below 6e-8 is zero, and that of a probability near one is smaller."""

    def failing(clean):
        raise position_parallel.NotParallel("this test asks for it")

    if slow:
        monkeypatch.setattr(position_parallel.PositionParallelModel, "of", failing)
        monkeypatch.setattr(integrated_gradients.warnings, "warn", lambda *args, **kwargs: None)
    short = MemorizedSequence(sequence.tokens[:5], 4)
    llama_like.unembed.b_U.data[short.suffix] += 30.0
    exact = FEW(llama_like.double(), short).values
    assert 0 < exact.abs().max() < 1e-6
    half = FEW(llama_like.to(torch.float16), short).values
    assert (half - exact).abs().max() < 0.05 * exact.abs().max()
