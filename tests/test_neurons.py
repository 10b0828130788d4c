"""The hooks on a bare tensor, and NeuronView on tiny models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tl_localize import load_model
from tl_localize.neurons import (
    NeuronView,
    initialize_vector_functions,
    patch_neurons_at,
    record_neurons,
    scale_neurons,
    zero_neurons,
)
from tl_localize.units import NEURONS

ACT = torch.arange(12.0).reshape(2, 2, 3) + 1


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(61, (3, 10), generator=torch.Generator().manual_seed(7))


# ---- hooks


def test_scale_neurons_multiplies_each_row_by_its_gate() -> None:
    gate = torch.tensor([[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]])
    wanted = [[[1, 0, 6], [4, 0, 12]], [[3.5, 8, 0], [5, 11, 0]]]
    assert scale_neurons(ACT, gate=gate).tolist() == wanted


def test_scale_neurons_broadcasts_one_row() -> None:
    gate = torch.tensor([[1, 0, 2]])
    assert torch.equal(scale_neurons(ACT, gate=gate), ACT * torch.tensor([1.0, 0.0, 2.0]))


def test_scale_neurons_takes_the_type_of_the_activation() -> None:
    assert scale_neurons(ACT.bfloat16(), gate=torch.ones(1, 3)).dtype == torch.bfloat16


def test_zero_neurons_ablates_the_masked_at_every_position() -> None:
    found = zero_neurons(ACT, mask=torch.tensor([True, False, True]))
    assert torch.equal(found, ACT * torch.tensor([0.0, 1.0, 0.0]))


def test_zero_neurons_ablates_what_is_not_finite() -> None:
    assert not zero_neurons(
        torch.full((1, 2, 3), torch.inf), mask=torch.ones(3, dtype=torch.bool)
    ).any()


def test_patch_neurons_at_changes_one_position() -> None:
    found = patch_neurons_at(ACT, position=1, values=torch.zeros(2, 3))
    assert torch.equal(found, ACT * torch.tensor([1.0, 0.0])[:, None])


def test_record_neurons_passes_the_activation_on() -> None:
    store: dict[int, torch.Tensor] = {}
    assert record_neurons(ACT, store=store, layer=4) is ACT
    assert store[4] is ACT


@pytest.mark.parametrize(
    "hook",
    [
        partial(scale_neurons, gate=torch.zeros(1, 3)),
        partial(zero_neurons, mask=torch.ones(3, dtype=torch.bool)),
        partial(patch_neurons_at, position=1, values=torch.zeros(2, 3)),
    ],
)
def test_hooks_leave_their_input_alone(hook: Any) -> None:
    before = ACT.clone()
    hook(before)
    assert torch.equal(before, ACT)


# ---- the view


def test_view_knows_the_shape(any_model: Any) -> None:
    view = NeuronView(any_model)
    assert (view.n_layers, view.n_neurons) == (any_model.cfg.n_layers, any_model.cfg.d_mlp)


def test_view_rows_are_the_parameter_itself(any_model: Any) -> None:
    assert NeuronView(any_model).rows(1) is any_model.blocks[1].mlp.W_out


def test_view_row_norms(any_model: Any) -> None:
    wanted = torch.stack(
        [block.mlp.W_out.detach().pow(2).sum(-1).sqrt() for block in any_model.blocks]
    )
    torch.testing.assert_close(NeuronView(any_model).row_norms(), wanted)


def test_recorded_neurons_times_rows_is_what_the_mlp_writes(
    any_model: Any, tokens: torch.Tensor
) -> None:
    view = NeuronView(any_model)
    with torch.no_grad(), view.recorded() as neurons:
        _, cache = any_model.run_with_cache(tokens)
    for layer in range(view.n_layers):
        written = neurons[layer] @ view.rows(layer) + any_model.blocks[layer].mlp.b_out
        torch.testing.assert_close(written, cache[f"blocks.{layer}.hook_mlp_out"])


@torch.no_grad()
def test_scaled_by_zero_equals_removing_the_row(any_model: Any, tokens: torch.Tensor) -> None:
    view = NeuronView(any_model)
    gate = torch.ones(1, view.n_neurons)
    gate[0, 5] = 0
    with view.scaled({1: gate}):
        ablated = any_model(tokens)
    any_model.blocks[1].mlp.W_out[5] = 0
    torch.testing.assert_close(ablated, any_model(tokens))


@torch.no_grad()
def test_scaled_gives_each_row_of_the_batch_its_own_gate(
    any_model: Any, tokens: torch.Tensor
) -> None:
    view = NeuronView(any_model)
    gates = torch.rand(3, view.n_neurons, generator=torch.Generator().manual_seed(0))
    with view.scaled({0: gates}):
        together = any_model(tokens)
    for row in range(3):
        with view.scaled({0: gates[row : row + 1]}):
            torch.testing.assert_close(any_model(tokens[row : row + 1])[0], together[row])


@torch.no_grad()
def test_scaled_changes_the_logits(any_model: Any, tokens: torch.Tensor) -> None:
    view = NeuronView(any_model)
    before = any_model(tokens)
    for layer in range(view.n_layers):
        with view.scaled({layer: torch.zeros(1, view.n_neurons)}):
            assert (any_model(tokens) - before).abs().max() > 1e-3, layer


@torch.no_grad()
def test_replaced_by_its_own_value_changes_nothing(any_model: Any, tokens: torch.Tensor) -> None:
    view = NeuronView(any_model)
    with view.recorded() as neurons:
        before = any_model(tokens)
    with view.patched_at(1, 5, neurons[1][:, 5]):
        assert torch.equal(any_model(tokens), before)


@torch.no_grad()
def test_replaced_changes_nothing_before_its_position(any_model: Any, tokens: torch.Tensor) -> None:
    view = NeuronView(any_model)
    before = any_model(tokens)
    with view.patched_at(0, 6, torch.full((3, view.n_neurons), 3.0)):
        after = any_model(tokens)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert (after[:, 6:] - before[:, 6:]).abs().amax(-1).min() > 1e-4


def changed_rows(view: NeuronView) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    index = {0: torch.tensor([[0, 4], [7, 9], [1, 2]]), 1: torch.tensor([[3], [3], [40]])}
    change = {
        layer: torch.randn(*where.shape, view.model.cfg.d_model, generator=generator)
        for layer, where in index.items()
    }
    return index, change


def with_rows_written(
    model: Any, index: dict[int, torch.Tensor], change: dict[int, torch.Tensor], row: int
) -> Any:
    for layer, where in index.items():
        model.blocks[layer].mlp.W_out.data[where[row]] += change[layer][row]
    return model


@pytest.mark.parametrize("row", [0, 1, 2])
@torch.no_grad()
def test_rows_changed_equals_writing_the_rows(
    any_model: Any, tokens: torch.Tensor, row: int
) -> None:
    view = NeuronView(any_model)
    index, change = changed_rows(view)
    with view.rows_changed(index, change):
        together = any_model(tokens)
    alone = with_rows_written(any_model, index, change, row)(tokens[row : row + 1])
    torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)


def test_rows_changed_has_the_gradient_of_the_rows(any_model: Any, tokens: torch.Tensor) -> None:
    view = NeuronView(any_model)
    index, change = changed_rows(view)
    change = {layer: part.requires_grad_() for layer, part in change.items()}
    with view.rows_changed(index, change):
        gradient = torch.autograd.grad(any_model(tokens).square().mean((1, 2)).sum(), change[0])[0]
    written = with_rows_written(any_model, index, change, 2)
    weight = written.blocks[0].mlp.W_out
    wanted = torch.autograd.grad(written(tokens[2:3]).square().mean((1, 2)).sum(), weight)[0][
        index[0][2]
    ]
    torch.testing.assert_close(gradient[2], wanted, atol=1e-4, rtol=1e-3)


def test_frozen_keeps_the_weights_out_of_autograd(any_model: Any, tokens: torch.Tensor) -> None:
    with NeuronView(any_model).lean():
        assert not any_model(tokens).requires_grad


def test_frozen_gives_each_flag_back(any_model: Any, unchanged: Any) -> None:
    any_model.blocks[0].mlp.W_out.requires_grad_(False)
    check = unchanged(any_model)
    with NeuronView(any_model).lean():
        pass
    check()


@pytest.mark.parametrize("way", ["recorded", "scaled", "patched_at", "rows_changed", "lean"])
def test_view_leaves_nothing_behind_when_the_body_raises(
    any_model: Any, tokens: torch.Tensor, unchanged: Any, way: str
) -> None:
    view = NeuronView(any_model)
    arguments = {
        "scaled": ({0: torch.zeros(1, view.n_neurons)},),
        "patched_at": (0, 0, torch.zeros(3, view.n_neurons)),
        "rows_changed": changed_rows(view),
    }
    check = unchanged(any_model)

    def body() -> None:
        with getattr(view, way)(*arguments.get(way, ())):
            any_model(tokens)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        body()
    check()


# ---- refusals


def test_view_refuses_attention_only(make_model: Any) -> None:
    with pytest.raises(
        ValueError, match="model must have MLP layers, got 'only-attention', which has none"
    ):
        NeuronView(make_model(attn_only=True, model_name="only-attention"))


def test_view_refuses_mixture_of_experts(make_model: Any) -> None:
    model = make_model(
        num_experts=2, experts_per_token=1, gated_mlp=True, act_fn="silu", model_name="mixture"
    )
    with pytest.raises(
        ValueError, match="model must have one MLP per layer, got 'mixture' with 2 experts"
    ):
        NeuronView(model)


def test_view_refuses_rows_of_another_shape(gpt2_like: Any) -> None:
    gpt2_like.blocks[1].mlp.W_out = torch.nn.Parameter(torch.zeros(24, 48))
    with pytest.raises(
        ValueError,
        match=r"model must have a neuron axis .* got 'gpt2-like' with W_out of shape \(24, 48\)",
    ):
        NeuronView(gpt2_like)


def test_view_refuses_a_missing_hook(gpt2_like: Any) -> None:
    del gpt2_like.hook_dict[NEURONS.point(1)]
    with pytest.raises(ValueError, match=r"hook blocks\.1\.mlp\.hook_post"):
        NeuronView(gpt2_like)


@pytest.mark.parametrize("model", [None, "gpt2", torch.nn.Linear(2, 2), SimpleNamespace(cfg=None)])
def test_view_refuses_what_is_no_transformer_lens_model(unchecked: Any, model: Any) -> None:
    with pytest.raises(TypeError, match="model must be a TransformerLens model"):
        NeuronView(model)


@pytest.mark.parametrize("shape", [(48,), (1, 47), (1, 1, 48)])
def test_scaled_refuses_a_gate_of_another_shape(
    unchecked: Any, gpt2_like: Any, shape: tuple[int, ...]
) -> None:
    with pytest.raises(
        ValueError, match=r"gate must have shape \[batch neuron\] with neuron=48, got .* at layer 1"
    ):
        NeuronView(gpt2_like).scaled({1: torch.ones(shape)}).__enter__()


@torch.no_grad()
def test_one_gelu_kernel_is_the_same_function_and_is_put_back(
    gpt2_like: Any, sequence: Any
) -> None:
    own = [block.mlp.act_fn for block in gpt2_like.blocks]
    wanted = gpt2_like(sequence.tokens)

    def interrupted() -> None:
        with NeuronView(gpt2_like).one_gelu_kernel():
            assert all(
                block.mlp.act_fn is not fn for block, fn in zip(gpt2_like.blocks, own, strict=True)
            )
            torch.testing.assert_close(gpt2_like(sequence.tokens), wanted, atol=1e-5, rtol=1e-5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(block.mlp.act_fn is fn for block, fn in zip(gpt2_like.blocks, own, strict=True))


def test_one_gelu_kernel_leaves_other_functions_and_half_precision_alone(
    llama_like: Any, gpt2_like: Any
) -> None:
    for model in (llama_like, gpt2_like.to(torch.bfloat16)):
        own = model.blocks[0].mlp.act_fn
        with NeuronView(model).one_gelu_kernel():
            assert model.blocks[0].mlp.act_fn is own


def test_every_process_initializes_vector_functions_before_it_computes(model_dir: Path) -> None:
    """On one thread, because their first call on two threads may be wrong by 1e-4."""
    import subprocess
    import sys

    code = (
        "import torch; torch.set_num_threads(2); from tl_localize.neurons import "
        "initialize_vector_functions;"
        "initialize_vector_functions(); x = torch.linspace(-3, 3, 49152); "
        "print(float((torch.tanh(x) - torch.tanh(x)).abs().max()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) == 0.0
    initialize_vector_functions.cache_clear()
    load_model(model_dir, device="cpu")
    assert initialize_vector_functions.cache_info().currsize
