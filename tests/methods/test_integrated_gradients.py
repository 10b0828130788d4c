"""Integrated Gradients: one pass against the definition, and the laws of the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import ATTENTION, ONE_BY_ONE, plain_integrated_gradients, times, turned
from torch import Tensor

from tl_localize import IntegratedGradients, MemorizedSequence, NeuronSet
from tl_localize.methods import integrated_gradients, position_parallel

FEW = IntegratedGradients(steps=3)


def agree(
    model: Any,
    sequence: MemorizedSequence,
    method: IntegratedGradients = FEW,
    tolerance: float = 1e-6,
) -> None:
    expected = plain_integrated_gradients(model, sequence, *method.quadrature())
    assert expected.abs().max() > 1e-4, "a test on zeros shows nothing"
    assert (method(model, sequence).values - expected).abs().max() < tolerance


@pytest.mark.parametrize("rule", ["endpoints", "midpoint", "gauss-legendre"])
def test_integrated_gradients_equals_definition(any_model: Any, sequence: Any, rule: Any) -> None:
    agree(any_model, sequence, IntegratedGradients(steps=4, rule=rule))


@given(length=st.integers(2, 16), share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_integrated_gradients_equals_definition_at_any_length(
    any_model: Any, length: int, share: float, seed: int
) -> None:
    tokens = torch.randint(
        any_model.cfg.d_vocab, (length,), generator=torch.Generator().manual_seed(seed)
    )
    sequence = MemorizedSequence(tokens, 1 + int(share * (length - 2)))
    expected = plain_integrated_gradients(any_model, sequence, *FEW.quadrature())
    assert (FEW(any_model, sequence).values - expected).abs().max() < 1e-6


@pytest.mark.parametrize("batch_tokens", [1, 20, 10_000])
def test_integrated_gradients_does_not_depend_on_batch(
    neox_like: Any, sequence: Any, batch_tokens: int
) -> None:
    expected = plain_integrated_gradients(neox_like, sequence, *FEW.quadrature())
    assert (
        replace(FEW, batch_tokens=batch_tokens)(neox_like, sequence).values - expected
    ).abs().max() < 1e-6


@pytest.mark.parametrize("attention", ATTENTION)
def test_integrated_gradients_equals_definition_for_attention(
    make_model: Callable[..., Any], make_sequences: Any, attention: str
) -> None:
    agree(
        make_model(7, **({"n_layers": 3} | ATTENTION[attention])), make_sequences((8, 2), seed=3)[0]
    )


@pytest.mark.parametrize("reason", ONE_BY_ONE)
def test_integrated_gradients_takes_the_slow_way_and_says_so(
    make_model: Callable[..., Any], make_sequences: Any, reason: str
) -> None:
    model, sequence = make_model(8, **ONE_BY_ONE[reason]), make_sequences((8, 2), seed=3)[0]
    with pytest.warns(UserWarning, match=reason):
        scores = FEW(model, sequence)
    assert (
        scores.values - plain_integrated_gradients(model, sequence, *FEW.quadrature())
    ).abs().max() < 1e-6


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


@pytest.mark.parametrize(
    ("point", "layer"),
    [*((point, 1) for point in POINTS), *zip(POINTS[::2], [0, 2, 0, 2, 0, 2, 0], strict=True)],
)
def test_integrated_gradients_serves_hooks_of_the_user(
    neox_like: Any, sequence: Any, point: str, layer: int
) -> None:
    hook = (
        partial(times, factor=0.7)
        if point in ("attn.hook_attn_scores", "attn.hook_pattern")
        else turned
    )
    with neox_like.hooks(fwd_hooks=[(f"blocks.{layer}.{point}", hook)]):
        agree(neox_like, sequence)


def test_integrated_gradients_serves_dropout(gpt2_like: Any, sequence: Any) -> None:
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[0, ::2] = mask[1, ::3] = True
    with NeuronSet(mask).dropped_out(gpt2_like):
        agree(gpt2_like, sequence)
        assert FEW(gpt2_like, sequence).values[mask].abs().max() == 0


def test_integrated_gradients_serves_hooks_on_modules(
    llama_like: Any, sequence: Any, unchanged: Any
) -> None:
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


def test_integrated_gradients_sees_changed_rows(gpt2_like: Any, sequence: Any) -> None:
    before = FEW(gpt2_like, sequence).values
    with torch.no_grad():
        gpt2_like.blocks[1].mlp.W_out[5].mul_(-5.0)
    agree(gpt2_like, sequence)
    assert (FEW(gpt2_like, sequence).values - before).abs().max() > 1e-3


@pytest.mark.parametrize("rule", ["midpoint", "gauss-legendre"])
def test_integrated_gradients_of_a_layer_sums_to_rise_of_probability(
    any_model: Any, sequence: Any, rule: Any
) -> None:
    values = IntegratedGradients(steps=24, rule=rule)(any_model, sequence).values
    tokens, positions = sequence.tokens, range(sequence.n_prefix - 1, len(sequence) - 1)

    def silent_last(act: Tensor, hook: Any) -> Tensor:
        return torch.cat([act[:, :-1], torch.zeros_like(act[:, -1:])], dim=1)

    for layer in range(any_model.cfg.n_layers):
        rises: list[float] = []
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


def test_integrated_gradients_leaves_model_as_it_was(
    any_model: Any, sequence: Any, unchanged: Any
) -> None:
    check = unchanged(any_model)
    FEW(any_model, sequence)
    check()


def test_integrated_gradients_leaves_model_as_it_was_when_interrupted(
    gpt2_like: Any, sequence: Any, unchanged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = unchanged(gpt2_like)

    def interrupt(*args: Any) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(integrated_gradients, "probability_gradient", interrupt)
    with pytest.raises(KeyboardInterrupt):
        FEW(gpt2_like, sequence)
    check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integrated_gradients_in_half_precision_is_near(
    llama_like: Any, sequence: Any, dtype: torch.dtype
) -> None:
    exact = FEW(llama_like, sequence).values
    half = FEW(llama_like.to(dtype), sequence).values
    assert (half - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("slow", [False, True])
def test_integrated_gradients_of_a_text_recited_almost_surely_do_not_underflow(
    llama_like: Any, sequence: Any, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16 a gradient below 6e-8 is zero, and that of a probability near one is smaller."""
    if slow:
        monkeypatch.setattr(
            position_parallel,
            "why_not_parallel",
            lambda neurons, n_tokens: "this test asks for it",
        )
        monkeypatch.setattr(integrated_gradients.warnings, "warn", lambda *args, **kwargs: None)
    short = MemorizedSequence(sequence.tokens[:5], 4)
    llama_like.unembed.b_U.data[short.suffix] += 30.0
    exact = FEW(llama_like.double(), short).values
    assert 0 < exact.abs().max() < 1e-6
    half = FEW(llama_like.to(torch.float16), short).values
    assert (half - exact).abs().max() < 0.05 * exact.abs().max()
