"""The hooks on a bare tensor, and NeuronView on tiny models."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from oracles import parameter_of, turned_as

from tl_localize import load_model
from tl_localize.model.forward import is_bridge, residual
from tl_localize.model.hooks import registered
from tl_localize.model.neurons import (
    NeuronView,
    clamp_neurons,
    initialize_vector_functions,
    patch_neurons,
    record_neurons,
    scale_neurons,
)

ACT = torch.arange(12.0).reshape(2, 2, 3) + 1
MASK = torch.tensor([True, False, True])
TOKENS = torch.randint(61, (3, 10), generator=torch.Generator().manual_seed(7))


# ---- hooks


@pytest.mark.parametrize(
    ("hook", "wanted"),
    [
        (
            partial(scale_neurons, gate=torch.tensor([[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]])),
            [[[1, 0, 6], [4, 0, 12]], [[3.5, 8, 0], [5, 11, 0]]],
        ),
        (
            partial(scale_neurons, gate=torch.tensor([[1, 0, 2]])),
            [[[1, 0, 6], [4, 0, 12]], [[7, 0, 18], [10, 0, 24]]],
        ),
        (
            partial(clamp_neurons, mask=MASK, values=torch.tensor(0.0)),
            [[[0, 2, 0], [0, 5, 0]], [[0, 8, 0], [0, 11, 0]]],
        ),
        (
            partial(patch_neurons, values=torch.zeros(2, 3), position=1),
            [[[1, 2, 3], [0, 0, 0]], [[7, 8, 9], [0, 0, 0]]],
        ),
        (
            partial(patch_neurons, values=torch.zeros(2, 3), position=0),
            [[[0, 0, 0], [4, 5, 6]], [[0, 0, 0], [10, 11, 12]]],
        ),
        (
            partial(clamp_neurons, mask=MASK, values=torch.tensor([-1.0, -2.0, -3.0])),
            [[[-1, 2, -3], [-1, 5, -3]], [[-1, 8, -3], [-1, 11, -3]]],
        ),
    ],
)
def test_hook_changes_what_it_should_and_leaves_its_input_alone(hook, wanted):
    before = ACT.clone()
    assert hook(before).tolist() == wanted
    assert torch.equal(before, ACT)


def test_clamp_neurons_ablates_what_is_not_finite():
    act = torch.full((1, 2, 3), torch.inf)
    zero = torch.tensor(0.0)
    assert not clamp_neurons(act, mask=MASK | True, values=zero).any()


def test_record_neurons_passes_the_activation_on():
    store = {}
    assert record_neurons(ACT, store=store, layer=4) is ACT and store[4] is ACT


# ---- the view


def test_view_knows_the_shape_and_the_rows(any_model):
    view = NeuronView(any_model)
    rows = [block.mlp.W_out for block in any_model.blocks]
    assert (view.n_layers, view.n_neurons) == (any_model.cfg.n_layers, any_model.cfg.d_mlp)
    assert parameter_of(view.rows(1)) is parameter_of(rows[1])
    norms = torch.stack([row.detach().pow(2).sum(-1).sqrt() for row in rows])
    torch.testing.assert_close(view.row_norms(), norms)
    assert NeuronView(any_model.bfloat16()).row_norms().dtype == torch.float32


def test_a_hook_of_the_user_sees_what_changed_rows_write(either, sequence):
    view = NeuronView(either)
    index, change = {0: torch.tensor([[3]])}, {0: torch.ones(1, 1, either.cfg.d_model)}
    seen = []
    hook = (view.units.output(either, 0), lambda module, given, output: seen.append(output))
    with registered([hook], "register_forward_hook"), torch.no_grad():
        residual(either, sequence.tokens[None])
        with view.rows_changed(index, change):
            residual(either, sequence.tokens[None])
    assert not torch.equal(*seen)


def test_weights_that_are_no_numbers_are_not_taken_for_other_units(gpt2_like, unproven):
    gpt2_like.blocks[0].mlp.W_out.data[0, 0] = torch.nan
    unproven(gpt2_like)
    assert NeuronView(gpt2_like).n_neurons == 48  # scores are refused, by a better name


def test_a_model_proves_itself_in_each_mode(gpt2_like, monkeypatch):
    proofs = []
    monkeypatch.setattr("tl_localize.model.neurons.check_parts", lambda *_: proofs.append(0))
    monkeypatch.setattr("tl_localize.model.neurons.dropout_in_training", lambda _: None)
    for mode, n_proofs in ((False, 0), (True, 1), (True, 1), (False, 1)):
        NeuronView(gpt2_like.train(mode))
        assert len(proofs) == n_proofs


def test_recorded_neurons_times_rows_is_what_the_mlp_writes(any_model):
    view = NeuronView(any_model)
    with torch.no_grad(), view.recorded() as neurons:
        _, cache = any_model.run_with_cache(TOKENS)
    for layer in range(view.n_layers):
        bias = any_model.blocks[layer].mlp.b_out  # of a Bridge None where there is none
        written = neurons[layer] @ view.rows(layer) + (0 if bias is None else bias)
        torch.testing.assert_close(written, cache[f"blocks.{layer}.hook_mlp_out"])


@torch.no_grad()
def test_scaled_by_zero_equals_removing_the_row(any_model):
    view = NeuronView(any_model)
    gate = torch.ones(1, view.n_neurons)
    gate[0, 5] = 0
    before = any_model(TOKENS)
    with view.scaled({1: gate}):
        ablated = any_model(TOKENS)
    any_model.blocks[1].mlp.W_out[5] = 0
    torch.testing.assert_close(ablated, any_model(TOKENS))
    assert (ablated - before).abs().max() > 1e-4


@torch.no_grad()
def test_scaled_gives_each_row_of_the_batch_its_own_gate(any_model):
    view = NeuronView(any_model)
    gates = torch.rand(3, view.n_neurons, generator=torch.Generator().manual_seed(0))
    with view.scaled({0: gates}):
        together = any_model(TOKENS)
    for row in range(3):
        with view.scaled({0: gates[row : row + 1]}):
            torch.testing.assert_close(any_model(TOKENS[row : row + 1])[0], together[row])


@torch.no_grad()
def test_patched_changes_its_position_and_what_follows(any_model):
    view = NeuronView(any_model)
    with view.recorded() as neurons:
        before = any_model(TOKENS)
    with view.patched(1, neurons[1][:, 5], 5):
        assert torch.equal(any_model(TOKENS), before)
    with view.patched(0, torch.full((3, view.n_neurons), 3.0), 6):
        after = any_model(TOKENS)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert (after[:, 6:] - before[:, 6:]).abs().amax(-1).min() > 1e-4


def changed_rows(view):
    generator = torch.Generator().manual_seed(3)
    index = {0: torch.tensor([[0, 4], [7, 9], [1, 2]]), 1: torch.tensor([[3], [3], [40]])}
    change = {
        layer: torch.randn(*where.shape, view.model.cfg.d_model, generator=generator)
        for layer, where in index.items()
    }
    return index, change


@pytest.mark.parametrize("row", [0, 2])
def test_rows_changed_has_the_logits_and_the_gradient_of_the_rows(any_model, row):
    index, change = changed_rows(NeuronView(any_model))
    leaf = change[0].requires_grad_()
    with NeuronView(any_model).rows_changed(index, change):
        together = any_model(TOKENS)
    (gradient,) = torch.autograd.grad(together.square().mean((1, 2)).sum(), leaf)
    for layer, where in index.items():
        rows = any_model.blocks[layer].mlp.W_out.data
        rows[where[row]] += change[layer][row].detach()
    alone = any_model(TOKENS[row : row + 1])
    torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)
    weight = any_model.blocks[0].mlp.W_out
    (wanted,) = torch.autograd.grad(alone.square().mean((1, 2)).sum(), parameter_of(weight))
    wanted = turned_as(weight, wanted)
    torch.testing.assert_close(gradient[row], wanted[index[0][row]], atol=1e-4, rtol=1e-3)


def test_lean_keeps_the_weights_out_of_autograd_and_gives_each_flag_back(any_model, unchanged):
    parameter_of(any_model.blocks[0].mlp.W_out).requires_grad_(False)
    check = unchanged(any_model)
    with NeuronView(any_model).lean():
        assert not any_model(TOKENS).requires_grad
    check()


@torch.no_grad()
def test_one_gelu_kernel_is_the_same_function_and_is_put_back(either):
    def functions():
        return [
            (vars(module).get("act_fn"), vars(module).get("forward"), type(module))
            for module in either.modules()
        ]

    own = functions()
    wanted = either(TOKENS)
    has_it = "gelu_new" in str(either.cfg.act_fn) or "NewGELU" in str(either)
    with NeuronView(either).one_gelu_kernel():
        assert (functions() != own) is has_it
        torch.testing.assert_close(either(TOKENS), wanted, atol=1e-5, rtol=1e-5)
    assert functions() == own
    with NeuronView(either.to(torch.bfloat16)).one_gelu_kernel():
        assert functions() == own


# ---- refusals


def test_view_refuses_rows_of_another_shape(gpt2_like):
    gpt2_like.blocks[1].mlp.W_out.data = torch.zeros(24, 48)
    with pytest.raises(ValueError, match="model must have neurons in every layer"):
        NeuronView(gpt2_like)


MOE = {"num_experts": 2, "experts_per_token": 1, "gated_mlp": True, "act_fn": "silu"}


@pytest.mark.parametrize("settings", [{"attn_only": True}, MOE])
def test_view_refuses_models_without_a_neuron_axis(make_model, settings):
    model = make_model(**settings)
    with pytest.raises(ValueError, match="model must have neurons in every layer"):
        NeuronView(model)


def test_view_refuses_a_missing_hook(gpt2_like, monkeypatch):
    points = dict(gpt2_like.hook_dict)
    del points["blocks.1.mlp.hook_post"]
    vars(gpt2_like).pop("hook_dict", None)  # a Bridge makes it anew each time
    monkeypatch.setattr(type(gpt2_like), "hook_dict", points, raising=False)
    with pytest.raises(ValueError, match=r"hook blocks\.1\.mlp\.hook_post"):
        NeuronView(gpt2_like)


@pytest.mark.parametrize("model", [None, "gpt2", torch.nn.Linear(2, 2), SimpleNamespace(cfg=None)])
def test_view_refuses_what_is_no_transformer_lens_model(model):
    with pytest.raises(TypeError, match="model must be a TransformerLens model"):
        NeuronView(model)


def test_view_refuses_an_encoder(gpt2_like):
    gpt2_like.__class__ = type("HookedEncoder", (type(gpt2_like),), {})
    with pytest.raises(ValueError, match=r"got a HookedEncoder\. Use a decoder"):
        NeuronView(gpt2_like)


def test_view_refuses_a_model_without_blocks_of_its_own(gpt2_like):
    """As T5 in a Bridge, which has an encoder's and a decoder's."""
    del gpt2_like.blocks
    with pytest.raises(ValueError, match="must predict each token from those before it"):
        NeuronView(gpt2_like)


def test_view_refuses_a_model_that_sees_later_tokens(make_model):
    if is_bridge(make_model(1)):
        pytest.skip("a HookedTransformer alone has this setting")
    with pytest.raises(ValueError, match=r"HookedTransformer that sees later ones\. Use a decoder"):
        NeuronView(make_model(1, attention_dir="bidirectional"))


@pytest.mark.parametrize("shape", [(48,), (1, 47), (1, 1, 48)])
def test_scaled_refuses_a_gate_of_another_shape(gpt2_like, shape):
    block = NeuronView(gpt2_like).scaled({1: torch.ones(shape)})
    with pytest.raises(ValueError, match="gate must have shape"), block:
        pass


def test_every_process_initializes_vector_functions_before_it_computes(model_dir):
    """On one thread, because their first call on two threads may be wrong by 1e-4."""
    initialize_vector_functions.cache_clear()
    load_model(model_dir, device="cpu")
    assert initialize_vector_functions.cache_info().currsize
