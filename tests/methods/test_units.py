"""Attention heads, and a user's unit: every method against its definition in plain loops, on both
classes of models.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from oracles import loss_of, put_last
from torch import Tensor

from tl_localize import (
    METHODS,
    Activations,
    AttentionHeads,
    Attribution,
    GradientAlignment,
    HardConcrete,
    IntegratedGradients,
    IterativeAttribution,
    MLPNeurons,
    NeuronScores,
    NeuronSet,
    RandomBaseline,
    RowNorm,
    Slimming,
    Units,
    ZeroOut,
)
from tl_localize.forward import is_bridge
from tl_localize.identity import identity_text
from tl_localize.neurons import NeuronView

HEADS = AttentionHeads()
SHORT: dict[str, dict[str, Any]] = {
    "hard_concrete": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "slimming": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "integrated_gradients": {"steps": 3},
    "gradient_alignment": {"points": 2, "share": 0.4},
    "iterative_attribution": {"rounds": 2, "share": 0.7},
}


@dataclass(frozen=True)
class HeadEntries(Units):
    """The single entries of z, as docs/units.md has them."""

    name: ClassVar[str] = "entries of heads"

    def point(self, layer: int) -> str:
        return f"blocks.{layer}.attn.hook_z"

    def rows(self, model: Any, layer: int) -> Tensor:
        return model.blocks[layer].attn.W_O.flatten(0, 1)

    def output(self, model: Any, layer: int) -> Any:
        return AttentionHeads().output(model, layer)

    def read(self, act: Tensor, layer: int) -> Tensor:
        return act.flatten(2)

    def write(self, act: Tensor, units: Tensor, layer: int) -> Tensor:
        return units.view_as(act)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    return METHODS[request.param](**SHORT.get(request.param, {}), units=HEADS)


def z_name(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_z"


def targets(sequence: Any) -> Tensor:
    """The positions that predict a suffix token."""
    return torch.arange(sequence.n_prefix - 1, len(sequence) - 1)


def clean_z(model: Any, sequence: Any) -> list[Tensor]:
    """What each head hands to W_O, [pos head d_head] of each layer."""
    found: dict[int, Tensor] = {}

    def record(act: Tensor, hook: Any, *, layer: int) -> None:
        found[layer] = act[0].detach().clone()

    hooks = [(z_name(layer), partial(record, layer=layer)) for layer in range(len(model.blocks))]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(sequence.tokens[None])
    return [found[layer] for layer in range(len(model.blocks))]


def with_gates(model: Any, gates: Tensor) -> Any:
    """The model with each head's z times its gate, [layer head]."""

    def scale(act: Tensor, hook: Any, *, layer: int) -> Tensor:
        return torch.stack(
            [act[:, :, head] * gates[layer, head] for head in range(act.shape[2])], dim=2
        )

    return model.hooks(
        fwd_hooks=[(z_name(layer), partial(scale, layer=layer)) for layer in range(len(gates))]
    )


def n_heads(model: Any) -> int:
    return model.blocks[0].attn.W_O.shape[0]


def gate_gradient(
    model: Any, objective: Callable[[], Tensor], gates: Tensor | None = None
) -> Tensor:
    gates = torch.ones(len(model.blocks), n_heads(model)) if gates is None else gates.clone()
    with with_gates(model, gates.requires_grad_()):
        (gradient,) = torch.autograd.grad(objective(), gates)
    return gradient.float()


def true_probabilities(model: Any, sequence: Any) -> Tensor:
    positions = targets(sequence)
    return (
        model(sequence.tokens[None])[0, positions]
        .softmax(-1)
        .gather(-1, sequence.tokens[positions + 1][:, None])[:, 0]
    )


def loss(model: Any, sequence: Any) -> Tensor:
    return loss_of(model, sequence.tokens, sequence.n_prefix)


def agree(found: NeuronScores, wanted: Tensor, tolerance: float = 2e-5) -> None:
    assert (found.values - wanted).abs().max() < tolerance * max(1.0, float(wanted.abs().max()))


# ---- each method by its definition


@pytest.mark.parametrize("screen", [None, 0.3])
def test_zero_out_of_heads_is_the_loss_without_each_head(
    either: Any, sequence: Any, screen: float | None
) -> None:
    ones = torch.ones(len(either.blocks), n_heads(either))
    wanted = torch.zeros_like(ones)
    with torch.no_grad():
        for layer, head in torch.ones_like(ones).nonzero().tolist():
            gates = ones.clone()
            gates[layer, head] = 0
            with with_gates(either, gates):
                ablated = loss(either, sequence)
            wanted[layer, head] = ablated - loss(either, sequence)
    found = ZeroOut(units=HEADS, screen=screen)(either, sequence)
    agree(found, wanted)
    assert found.exact is None or (
        len(found.exact) == wanted.numel() and found.exact.units == HEADS
    )


@pytest.mark.parametrize("rule", ["endpoints", "gauss-legendre"])
def test_integrated_gradients_of_heads_is_the_path_of_each_layer(
    either: Any, sequence: Any, rule: Any, recwarn: Any
) -> None:
    method = IntegratedGradients(units=HEADS, steps=3, rule=rule)
    points, weights = method.quadrature()
    wanted = torch.zeros(len(either.blocks), n_heads(either))
    for layer, z in enumerate(clean_z(either, sequence)):
        for position in targets(sequence).tolist():
            values = (points[:, None, None] * z[position]).requires_grad_()
            tokens = sequence.tokens[None, : position + 1].expand(len(points), -1)
            with either.hooks(fwd_hooks=[(z_name(layer), partial(put_last, values=values))]):
                p = either(tokens)[:, -1].softmax(-1)[:, sequence.tokens[position + 1]]
            (gradients,) = torch.autograd.grad(p.sum(), values)
            of_entries = z[position] * torch.einsum("s,shd->hd", weights, gradients)
            wanted[layer] += of_entries.sum(-1) / len(targets(sequence))
    agree(method(either, sequence), wanted)
    assert not [one for one in recwarn if "slow way" in str(one.message)], (
        "attention of these models is live"
    )


@pytest.mark.parametrize("absolute", ["token", "mean"])
def test_activations_of_heads_is_the_norm_of_what_they_write(
    either: Any, sequence: Any, absolute: Any
) -> None:
    wanted = torch.zeros(len(either.blocks), n_heads(either))
    for layer, z in enumerate(clean_z(either, sequence)):
        for head, rows in enumerate(either.blocks[layer].attn.W_O.detach()):
            written = torch.stack([z[position, head] @ rows for position in targets(sequence)])
            wanted[layer, head] = (
                written.norm(dim=-1).mean() if absolute == "token" else written.mean(0).norm()
            )
    agree(Activations(units=HEADS, absolute=absolute)(either, sequence), wanted)


def test_attribution_of_heads_is_minus_the_gradient_of_a_gate(either: Any, sequence: Any) -> None:
    agree(
        Attribution(units=HEADS)(either, sequence),
        -gate_gradient(either, lambda: loss(either, sequence)),
    )


def test_row_norm_of_heads_is_that_of_all_their_rows(either: Any, sequence: Any) -> None:
    wanted = torch.tensor(
        [
            [float(rows.square().sum().sqrt()) for rows in block.attn.W_O.detach()]
            for block in either.blocks
        ]
    )
    agree(RowNorm(units=HEADS)(either, sequence), wanted)


def test_gradient_alignment_of_heads_is_the_cosine_of_two_matrices(
    either: Any, sequence: Any
) -> None:
    positions = targets(sequence)

    def cosines() -> Tensor:
        logits = either(sequence.tokens[None])[0, positions].double()
        log_p = logits.log_softmax(-1).gather(-1, sequence.tokens[positions + 1][:, None])
        odds = (log_p - torch.log1p(-log_p.exp())).mean()
        found = torch.zeros(len(either.blocks), n_heads(either))
        for layer, block in enumerate(either.blocks):
            weight = block.attn.W_O
            # W_O of a Bridge is a view of it
            (leaf,) = (p for p in either.parameters() if p.data_ptr() == weight.data_ptr())
            (gradient,) = torch.autograd.grad(odds, leaf, retain_graph=True)
            of_heads = gradient.contiguous().as_strided(weight.shape, weight.stride())
            found[layer] = torch.nn.functional.cosine_similarity(
                weight.detach().flatten(1), of_heads.flatten(1), dim=-1
            )
        return found

    agree(GradientAlignment(units=HEADS, points=1)(either, sequence), first := cosines(), 2e-4)
    count = max(1, round(0.4 * n_heads(either)))
    half = torch.ones_like(first).scatter(-1, first.topk(count).indices, 0.5)
    # the gradient of rows behind a gate has the gate's factor, of which the cosine knows nothing
    with with_gates(either, half):
        second = cosines()
    agree(
        GradientAlignment(units=HEADS, points=2, share=0.4)(either, sequence),
        (first + second) / 2,
        2e-4,
    )


def test_iterative_attribution_of_heads_takes_the_largest_effect_of_each_round(
    either: Any, sequence: Any
) -> None:
    gates = torch.ones(len(either.blocks), n_heads(either))
    places, count = torch.zeros_like(gates), 2
    first = gate_gradient(either, lambda: true_probabilities(either, sequence).mean())
    for n in range(count):
        effects = gate_gradient(either, lambda: true_probabilities(either, sequence).mean(), gates)
        for layer in range(len(gates)):
            head = int(effects[layer].masked_fill(gates[layer] == 0, -torch.inf).argmax())
            places[layer, head] = 1 - n / count
        gates = (places == 0).float()
    left = first[places == 0].clamp(min=0).max()
    wanted = torch.where(places > 0, left + places, first)
    agree(
        IterativeAttribution(units=HEADS, rounds=2, share=2 / n_heads(either), first_layer=0)(
            either, sequence
        ),
        wanted,
    )


def test_slimming_of_heads_trains_a_mask_of_heads(either: Any, sequence: Any) -> None:
    mask = torch.ones(len(either.blocks), n_heads(either), requires_grad=True)
    adam = torch.optim.Adam([mask], lr=0.05)
    for _ in range(7):
        with with_gates(either, mask.clamp(0, 1)):
            total = loss(either, sequence) + 5.0 * mask.abs().mean()
        adam.zero_grad()
        total.backward(inputs=[mask])
        adam.step()
    found = Slimming(units=HEADS, steps=7, learning_rate=0.05, sparsity_weight=5.0)(
        either, sequence
    )
    agree(found, mask.detach().clamp(0, 1), 2e-3)


def test_hard_concrete_of_heads_trains_a_random_mask_of_heads(either: Any, sequence: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.tensor(0.5 + 0.1) / 1.2
    location = torch.full(
        (len(either.blocks), n_heads(either)), float(start.logit()), requires_grad=True
    )
    adam = torch.optim.Adam([location], lr=0.05)
    for _ in range(7):
        u = torch.rand(1, *location.shape, generator=generator)[0].clamp(1e-4, 1 - 1e-4)
        s = (u.log() - (1 - u).log() + location).sigmoid()
        with with_gates(either, (1.2 * s - 0.1).clamp(0, 1)):
            total = (
                loss(either, sequence)
                + 5.0 * (location - torch.tensor(0.1 / 1.1).log()).sigmoid().mean()
            )
        adam.zero_grad()
        total.backward(inputs=[location])
        adam.step()
    method = HardConcrete(
        units=HEADS, steps=7, learning_rate=0.05, sparsity_weight=5.0, initial_mask=0.5, seed=3
    )
    agree(method(either, sequence), location.detach().sigmoid(), 2e-3)


# ---- laws


@pytest.mark.parametrize("either", ["gpt2_like", "llama_like", "bridge neox"], indirect=True)
def test_method_scores_every_head(either: Any, sequence: Any, method: Any) -> None:
    scores = method(either, sequence)
    assert scores.values.shape == (len(either.blocks), n_heads(either))
    assert (scores.units, scores.settings) == (HEADS, identity_text(method))


def test_map_equals_single_calls_for_heads(gpt2_like: Any, sequences: Any, method: Any) -> None:
    for found, sequence in zip(method.map(gpt2_like, sequences), sequences, strict=True):
        torch.testing.assert_close(
            found.values, method(gpt2_like, sequence).values, atol=2e-3, rtol=1e-3
        )


def test_model_is_as_before_after_methods_of_heads(
    gpt2_like: Any, sequence: Any, method: Any, unchanged: Any
) -> None:
    check = unchanged(gpt2_like)
    one, two = method(gpt2_like, sequence), method(gpt2_like, sequence)
    with one.top_k(0.4).dropped_out(gpt2_like):
        pass
    check()
    assert torch.equal(one.values, two.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_methods_of_heads_score_models_of_other_precision(
    neox_like: Any, sequence: Any, method: Any, dtype: torch.dtype
) -> None:
    if method.name == "iterative_attribution":
        pytest.skip("its scores are an order, in which rounding exchanges two heads")
    wanted = method(neox_like, sequence).values
    neox_like.to(dtype)
    neox_like.cfg.dtype = dtype
    found = method(neox_like, sequence).values
    assert torch.corrcoef(torch.stack([found.flatten(), wanted.flatten()]))[0, 1] > 0.9


@torch.no_grad()
def test_ablated_heads_write_nothing(either: Any, sequence: Any) -> None:
    heads = NeuronSet.from_pairs(
        [(0, 1), (1, 0), (1, 2)], (len(either.blocks), n_heads(either)), HEADS
    )
    with heads.dropped_out(either):
        ablated = either(sequence.tokens[None])
    for layer, head in heads:
        either.blocks[layer].attn.W_O.data[head] = 0
    torch.testing.assert_close(ablated, either(sequence.tokens[None]), atol=1e-5, rtol=1e-5)


def test_neurons_are_the_default_and_appear_nowhere(sequence: Any, gpt2_like: Any) -> None:
    assert Attribution(units=MLPNeurons()) == Attribution()
    assert Attribution(units=HEADS) != Attribution()
    scores = Attribution()(gpt2_like, sequence)
    assert "48 neurons" in repr(scores) and "96 neurons" in repr(scores.top_k(0.1))


# ---- a user's unit


@pytest.mark.parametrize("name", ["attribution", "integrated_gradients"])
def test_a_head_is_the_sum_of_its_entries(either: Any, sequence: Any, name: str) -> None:
    entries, heads = (
        METHODS[name](units=units)(either, sequence).values for units in (HeadEntries(), HEADS)
    )
    assert (entries.view(*heads.shape, -1).sum(-1) - heads).abs().max() < 1e-5 * max(
        1.0, float(heads.abs().max())
    )


def test_zero_out_of_a_users_unit_is_the_loss_without_it(either: Any, sequence: Any) -> None:
    found = ZeroOut(units=HeadEntries())(either, sequence).values
    layer, entry = 1, 5
    with torch.no_grad():
        before = loss(either, sequence)
        either.blocks[layer].attn.W_O.flatten(0, 1)[entry] = 0
        assert float(loss(either, sequence) - before) == pytest.approx(
            float(found[layer, entry]), abs=1e-5
        )


@pytest.mark.parametrize("either", ["gpt2_like", "bridge llama"], indirect=True)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_users_unit(
    either: Any, sequence: Any, name: str, tmp_path: Path
) -> None:
    scores = METHODS[name](**SHORT.get(name, {}), units=HeadEntries())(either, sequence)
    assert scores.values.shape == (len(either.blocks), either.blocks[0].attn.W_O[..., 0].numel())
    scores.save(tmp_path / "scores.safetensors")
    assert NeuronScores.load(tmp_path / "scores.safetensors").units == HeadEntries()
    assert pickle.loads(pickle.dumps(scores.top_k(0.1))) == scores.top_k(0.1)


# ---- what is refused


def test_sets_of_other_units_are_refused(gpt2_like: Any, sequence: Any) -> None:
    heads = NeuronSet(torch.ones(2, 3) > 0, HEADS)
    others = NeuronSet(torch.ones(2, 3) > 0)
    assert heads != others
    for combine in (heads.__and__, heads.__or__, heads.__sub__, heads.jaccard):
        with pytest.raises(
            ValueError,
            match=r"other must have the shape .+ of AttentionHeads\(\), got .+ of MLPNeurons",
        ):
            combine(others)
    with pytest.raises(ValueError, match=r"truth must have the shape .+ of AttentionHeads\(\)"):
        heads.recall_of(others)
    with pytest.raises(ValueError, match="scores must be of one method in one model"):
        NeuronScores.mean(
            [NeuronScores(torch.ones(2, 3)), NeuronScores(torch.ones(2, 3), units=HEADS)]
        )
    with (
        pytest.raises(ValueError, match=r"mask must have the model's shape \(2, 48\)"),
        others.dropped_out(gpt2_like),
    ):
        pass


def test_heads_without_their_hook_are_refused(gpt2_like: Any, sequence: Any) -> None:
    if is_bridge(gpt2_like):
        pytest.skip("a Bridge makes its hook points and rows anew each time")
    del gpt2_like.hook_dict[z_name(1)]
    with pytest.raises(
        ValueError, match=r"model must have attention heads \(hook blocks.1.attn.hook_z"
    ):
        Attribution(units=HEADS)(gpt2_like, sequence)


def test_heads_without_rows_are_refused(gpt2_like: Any, sequence: Any) -> None:
    if is_bridge(gpt2_like):
        pytest.skip("a Bridge makes its hook points and rows anew each time")
    del gpt2_like.blocks[0].attn.W_O
    with pytest.raises(
        ValueError,
        match=r"model must have attention heads .* got 'gpt2-like' with W_O of shape \(\)",
    ):
        NeuronView(gpt2_like, HEADS)


def test_a_users_unit_in_no_hook_point_is_refused(gpt2_like: Any) -> None:
    @dataclass(frozen=True)
    class Nowhere(HeadEntries):
        def point(self, layer: int) -> str:
            return f"blocks.{layer}.attn.hook_zz"

    with pytest.raises(
        ValueError, match=r"units must be in hook points of the model, got 'blocks.0.attn.hook_zz'"
    ):
        NeuronView(gpt2_like, Nowhere())


def test_units_without_rows_are_refused_where_rows_are_needed(
    gpt2_like: Any, sequence: Any
) -> None:
    @dataclass(frozen=True)
    class Stream(Units):
        name: ClassVar[str] = "entries of the residual stream"

        def point(self, layer: int) -> str:
            return f"blocks.{layer}.hook_resid_mid"

        def shape(self, model: Any) -> tuple[int, ...]:
            return (model.cfg.d_model,)

    if "blocks.0.hook_resid_mid" not in gpt2_like.hook_dict:
        pytest.skip("this class has another name for the point")
    for method in (
        Attribution(),
        HardConcrete(steps=2),
        ZeroOut(),
        IntegratedGradients(steps=2),
        RandomBaseline(),
    ):
        assert replace(method, units=Stream())(gpt2_like, sequence).values.shape == (2, 24)
    for method in (RowNorm(), Activations(), GradientAlignment()):
        with pytest.raises(ValueError, match=r"units must have (output rows|an output)"):
            replace(method, units=Stream())(gpt2_like, sequence)


@pytest.mark.parametrize("given", ["heads", AttentionHeads, None])
def test_units_that_are_none_are_refused(unchecked: None, gpt2_like: Any, given: Any) -> None:
    for call in (
        lambda: Attribution(units=given),
        lambda: NeuronView(gpt2_like, given),
        lambda: NeuronSet(torch.ones(2, 3) > 0, given),
        lambda: NeuronScores(torch.ones(2, 3), units=given),
    ):
        with pytest.raises(
            TypeError,
            match=r"units must be Units, got .* Pass MLPNeurons\(\) or AttentionHeads\(\)\.",
        ):
            call()


def test_scores_of_an_unknown_unit_are_refused(tmp_path: Path) -> None:
    from tl_localize.files import save_tensors

    save_tensors(
        tmp_path / "scores.safetensors",
        {"values": torch.ones(2, 3)},
        {"units": "SparseFeatures(layer=3)"},
    )
    with pytest.raises(
        ValueError,
        match=(
            r"units must be of a known class .* got 'SparseFeatures\(layer=3\)'. Import the module"
        ),
    ):
        NeuronScores.load(tmp_path / "scores.safetensors")


# ---- docs/units.md


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the Python blocks of the page define, run from the first to the last."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "units.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/units.md", "exec", dont_inherit=True), names)
    return names


def test_the_page_runs_and_its_entries_are_those_of_this_file(
    page: dict[str, Any], sequence: Any, gpt2_like: Any
) -> None:
    assert len(page["heads"]) == 5 and page["entries"].values.shape == (6, 192)
    found, wanted = (
        GradientAlignment(units=units)(gpt2_like, sequence).values
        for units in (page["HeadEntries"](), HeadEntries())
    )
    assert torch.equal(found, wanted)


@pytest.fixture
def features(page: dict[str, Any]) -> Any:
    """Random autoencoders of 40 features for two layers of 24 numbers, of which about half fire."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"encoders": (24, 40), "biases": (40,), "decoders": (40, 24)}
    return page["SparseFeatures"](
        "random",
        **{
            k: [0.3 * torch.randn(n, generator=generator) for _ in range(2)]
            for k, n in sizes.items()
        },
    )


@pytest.mark.parametrize("name", ["gpt2_like", "llama_like"])
def test_features_of_an_autoencoder_are_scored_by_their_definition(
    request: Any, sequence: Any, features: Any, name: str
) -> None:
    model = request.getfixturevalue(name)
    if "blocks.0.hook_resid_post" not in model.hook_dict:
        pytest.skip("this class has another name for the point")
    encoder, bias, decoder = features.encoders[1], features.biases[1], features.decoders[1]
    ablated = ZeroOut(units=features)(model, sequence)
    gradients = Attribution(units=features)(model, sequence).values
    before = loss(model, sequence).detach()
    for feature in (0, 7, 39):

        def without(act: Tensor, hook: Any, share: float = 1.0, feature: int = feature) -> Tensor:
            fires = (act @ encoder[:, feature] + bias[feature]).clamp(min=0)
            return act - share * fires[..., None] * decoder[feature]

        with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", without)]):
            rise = loss(model, sequence) - before
        assert float(ablated.values[1, feature]) == pytest.approx(float(rise), abs=2e-5)
        with (
            torch.no_grad(),
            model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", partial(without, share=1e-3))]),
        ):
            slope = 1e3 * (loss(model, sequence) - before)
        assert float(gradients[1, feature]) == pytest.approx(float(slope), rel=0.05, abs=2e-3)
    with pytest.raises(ValueError, match="units must have an output"):
        GradientAlignment(units=features)(model, sequence)


def test_features_of_an_autoencoder_are_localized_by_every_other_method(
    gpt2_like: Any, sequence: Any, features: Any
) -> None:
    if "blocks.0.hook_resid_post" not in gpt2_like.hook_dict:
        pytest.skip("this class has another name for the point")
    for name in set(METHODS) - {"gradient_alignment"}:
        scores = METHODS[name](**SHORT.get(name, {}), units=features)(gpt2_like, sequence)
        assert scores.values.shape == (2, 40)
        with scores.top_k(0.1).dropped_out(gpt2_like):
            pass
    assert repr(scores.top_k(0.1)) == "NeuronSet(8 of 80 features, per layer [4, 4])"
