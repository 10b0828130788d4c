"""Attention heads, and a user's unit: every method against its definition in plain loops, on both
classes of models.
"""

import pickle
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from architectures import KINDS, tiny_bridge
from oracles import loss_of, put_last
from rivals import SHORT_RIVALS

from tl_localize import (
    METHODS,
    ActivationContrast,
    Activations,
    AttentionHeads,
    Attribution,
    GradientAlignment,
    IntegratedGradients,
    MLPNeurons,
    NeuronScores,
    NeuronSet,
    RowNorm,
    Units,
    ZeroOut,
)
from tl_localize.files import Storable, identity_text
from tl_localize.injection.injected import rows_replaced
from tl_localize.metrics import memorization_loss
from tl_localize.model.forward import is_bridge
from tl_localize.model.neurons import NeuronView

HEADS = AttentionHeads()
NEED_ROWS = (
    "activation_contrast",
    "contrastive_gradient",
    "gradient_alignment",
    "selective_synaptic_dampening",
)
SHORT = SHORT_RIVALS | {
    "hard_concrete": {"steps": 2, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "slimming": {"steps": 2, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "integrated_gradients": {"steps": 2},
    "gradient_alignment": {"points": 2, "share": 0.4},
    "iterative_attribution": {"rounds": 2, "share": 0.7},
    "refined_attribution": {"steps": 2, "share": 0.4},
}


@dataclass(frozen=True)
class HeadEntries(Units):
    """The single entries of z, as docs/units.md has them."""

    name: ClassVar[str] = "entries of heads"

    def point(self, layer):
        return f"blocks.{layer}.attn.hook_z"

    def rows(self, model, layer):
        return model.blocks[layer].attn.W_O.flatten(0, 1)

    def output(self, model, layer):
        return AttentionHeads().output(model, layer)

    def read(self, act, layer):
        return act.flatten(2)

    def write(self, act, units, layer):
        return units.view_as(act)


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param](**SHORT.get(request.param, {}), units=HEADS)


def z_name(layer):
    return f"blocks.{layer}.attn.hook_z"


def targets(sequence):
    """The positions that predict a suffix token."""
    return torch.arange(sequence.n_prefix - 1, len(sequence) - 1)


def clean_z(model, sequence):
    """What each head hands to W_O, [pos head d_head] of each layer."""
    found = {}

    def record(act, hook, *, layer):
        found[layer] = act[0].detach().clone()

    hooks = [(z_name(layer), partial(record, layer=layer)) for layer in range(len(model.blocks))]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(sequence.tokens[None])
    return [found[layer] for layer in range(len(model.blocks))]


def with_gates(model, gates):
    """The model with each head's z times its gate, [layer head]."""

    def scale(act, hook, *, layer):
        return torch.stack(
            [act[:, :, head] * gates[layer, head] for head in range(act.shape[2])], dim=2
        )

    return model.hooks(
        fwd_hooks=[(z_name(layer), partial(scale, layer=layer)) for layer in range(len(gates))]
    )


def ones(model):
    """A gate of one for each head, [layer head]."""
    return torch.ones(len(model.blocks), model.blocks[0].attn.W_O.shape[0])


def loss(model, sequence):
    return loss_of(model, sequence.tokens, sequence.n_prefix)


def agree(found, wanted, tolerance=2e-5):
    assert (found.values - wanted).abs().max() < tolerance * max(1.0, float(wanted.abs().max()))


# ---- each method by its definition


def without(model, sequence, layer, head):
    """The rise of the loss without a head."""
    gates = ones(model)
    gates[layer, head] = 0
    with torch.no_grad(), with_gates(model, gates):
        ablated = loss(model, sequence)
    return float(ablated - loss(model, sequence).detach())


def test_zero_out_of_heads_is_the_loss_without_each_head(either, sequence):
    wanted = ones(either)
    for layer, head in wanted.nonzero().tolist():
        wanted[layer, head] = without(either, sequence, layer, head)
    for screen in (None, 0.3):
        agree(ZeroOut(units=HEADS, screen=screen)(either, sequence), wanted)


def test_integrated_gradients_of_heads_is_the_path_of_each_layer(either, sequence, recwarn):
    method = IntegratedGradients(units=HEADS, steps=3, rule="gauss-legendre")
    points, weights = method.quadrature()
    wanted = torch.zeros_like(ones(either))
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
    assert not [warning for warning in recwarn if "slow way" in str(warning.message)], (
        "attention of these models is live"
    )


def test_activations_of_heads_is_the_norm_of_what_they_write(either, sequence):
    of_tokens, of_mean = torch.zeros(2, *ones(either).shape)
    for layer, z in enumerate(clean_z(either, sequence)):
        for head, rows in enumerate(either.blocks[layer].attn.W_O.detach()):
            written = torch.stack([z[position, head] @ rows for position in targets(sequence)])
            of_tokens[layer, head] = written.norm(dim=-1).mean()
            of_mean[layer, head] = written.mean(0).norm()
    agree(Activations(units=HEADS)(either, sequence), of_tokens)
    agree(Activations(units=HEADS, absolute="mean")(either, sequence), of_mean)


def test_attribution_of_heads_is_minus_the_gradient_of_a_gate(either, sequence):
    gates = ones(either).requires_grad_()
    with with_gates(either, gates):
        (gradient,) = torch.autograd.grad(loss(either, sequence), gates)
    agree(Attribution(units=HEADS)(either, sequence), -gradient)


def test_row_norm_of_heads_is_that_of_all_their_rows(either, sequence):
    rows = torch.stack([block.attn.W_O.detach() for block in either.blocks])
    agree(RowNorm(units=HEADS)(either, sequence), rows.square().sum((-1, -2)).sqrt())


def test_gradient_alignment_of_heads_is_the_cosine_of_two_matrices(either, sequence):
    positions = targets(sequence)
    logits = either(sequence.tokens[None])[0, positions].double()
    log_p = logits.log_softmax(-1).gather(-1, sequence.tokens[positions + 1][:, None])
    odds = (log_p - torch.log1p(-log_p.exp())).mean()
    wanted = torch.zeros_like(ones(either))
    for layer, block in enumerate(either.blocks):
        weight = block.attn.W_O
        # W_O of a Bridge is a view of it
        (leaf,) = (p for p in either.parameters() if p.data_ptr() == weight.data_ptr())
        (gradient,) = torch.autograd.grad(odds, leaf, retain_graph=True)
        of_heads = gradient.contiguous().as_strided(weight.shape, weight.stride())
        wanted[layer] = torch.nn.functional.cosine_similarity(
            weight.detach().flatten(1), of_heads.flatten(1), dim=-1
        )
    agree(GradientAlignment(units=HEADS, points=1)(either, sequence), wanted, 2e-4)


# ---- laws


@pytest.fixture(scope="module", params=["gated", "Bridge"])
def kept(request, make_model):
    """Two models for tests that leave them alone, which each of them checks."""
    if request.param == "Bridge":
        return tiny_bridge(1, KINDS["neox"])
    return make_model(3, **KINDS["llama"])


def test_method_scores_every_head_alike_and_leaves_the_model_alone(
    kept, sequences, method, unchanged
):
    check = unchanged(kept)
    together = method.map(kept, sequences[:2], check=False)
    for found, sequence in zip(together, sequences[:2], strict=True):
        alone = next(method.map(kept, [sequence], check=False))
        assert (found.units, found.settings) == (HEADS, identity_text(method))
        assert found.values.shape == ones(kept).shape
        torch.testing.assert_close(found.values, alone.values, atol=2e-3, rtol=1e-3)
    assert torch.equal(method(kept, sequence).values, alone.values)
    with alone.top_k(0.4).dropped_out(kept):
        pass
    check()


@torch.no_grad()
def test_ablated_heads_write_nothing(either, sequence):
    mask = torch.zeros_like(ones(either), dtype=torch.bool)
    mask[[0, 1, 1], [1, 0, 2]] = True
    heads = NeuronSet(mask, HEADS)
    with heads.dropped_out(either):
        ablated = either(sequence.tokens[None])
    for layer, head in heads:
        either.blocks[layer].attn.W_O.data[head] = 0
    torch.testing.assert_close(ablated, either(sequence.tokens[None]), atol=1e-5, rtol=1e-5)


# ---- a user's unit


def test_a_head_is_the_sum_of_its_entries(either, sequence):
    entries = Attribution(units=HeadEntries())(either, sequence).values
    heads = Attribution(units=HEADS)(either, sequence)
    agree(heads, entries.view(*heads.values.shape, -1).sum(-1), 1e-5)


def test_zero_out_of_a_users_unit_is_the_loss_without_it(either, sequence):
    found = ZeroOut(units=HeadEntries())(either, sequence).values
    with torch.no_grad():
        before = loss(either, sequence)
        either.blocks[1].attn.W_O.flatten(0, 1)[5] = 0
        assert float(loss(either, sequence) - before) == pytest.approx(float(found[1, 5]), abs=1e-5)


@pytest.mark.parametrize("kept", ["Bridge"], indirect=True)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_users_unit(kept, sequence, name, tmp_path, unchanged):
    check = unchanged(kept)
    scores = METHODS[name](**SHORT.get(name, {}), units=HeadEntries())(kept, sequence)
    check()
    assert scores.values.shape == (len(kept.blocks), kept.blocks[0].attn.W_O[..., 0].numel())
    scores.save(tmp_path / "scores.safetensors")
    assert NeuronScores.load(tmp_path / "scores.safetensors").units == HeadEntries()
    assert pickle.loads(pickle.dumps(scores.top_k(0.1))) == scores.top_k(0.1)


# ---- what is refused


def test_sets_of_other_units_are_refused(gpt2_like):
    heads, others = NeuronSet(torch.ones(2, 3) > 0, HEADS), NeuronSet(torch.ones(2, 3) > 0)
    assert heads != others
    for combine in (heads.__and__, heads.__or__, heads.__sub__, heads.recall_of):
        with pytest.raises(ValueError, match=r"NeuronSet of shape .+ of AttentionHeads\(\)"):
            combine(others)
    with pytest.raises(ValueError, match="mask must have the model's shape"):
        others.dropped_out(gpt2_like).__enter__()


def test_heads_without_hook_or_rows_are_refused(make_model):
    models = [make_model(), make_model()]
    if is_bridge(models[0]):
        pytest.skip("a Bridge makes its hook points and rows anew each time")
    del models[0].hook_dict[z_name(1)]
    del models[1].blocks[0].attn.W_O
    for model in models:
        with pytest.raises(ValueError, match="model must have heads in every layer"):
            NeuronView(model, HEADS)


def test_layers_of_different_widths_are_refused():
    parts = [SimpleNamespace(mlp=SimpleNamespace(W_out=torch.ones(n, 4))) for n in (6, 5)]
    names = dict.fromkeys(f"blocks.{layer}.mlp.hook_post" for layer in range(2))
    model = SimpleNamespace(blocks=parts, hook_dict=names, cfg=SimpleNamespace(d_model=4))
    with pytest.raises(ValueError, match=r"same shape in all.*W_out of shape \(5, 4\) in layer 1"):
        MLPNeurons().shape(model)


def test_a_hook_that_only_looks_writes_nothing(monkeypatch):
    monkeypatch.setattr(MLPNeurons, "write", lambda *_: pytest.fail("the units were written"))
    _, hook = MLPNeurons().hook(0, lambda act: act)
    act = torch.rand(1, 2, 3)
    assert hook(act) is act


def test_a_head_that_writes_nothing_has_no_strength(gpt2_like, sequence):
    head = NeuronSet.from_indices([(0, 1)], (2, 3), HEADS)
    with rows_replaced(gpt2_like, head, torch.zeros(8, 24)):
        assert Activations(units=HEADS)(gpt2_like, sequence).values[0, 1] == 0


@dataclass(frozen=True)
class Stream(Units):
    name: ClassVar[str] = "entries of the residual stream"

    def point(self, layer):
        return f"blocks.{layer}.hook_resid_mid"

    def shape(self, model):
        return (model.cfg.d_model,)


def test_units_without_rows_are_refused_where_rows_are_needed(gpt2_like, sequence):
    if "blocks.0.hook_resid_mid" not in gpt2_like.hook_dict:
        pytest.skip("this class has another name for the point")
    for name, kind in METHODS.items():
        method = kind(**SHORT.get(name, {}), units=Stream())
        if name in ("row_norm", "activations", *NEED_ROWS):
            with pytest.raises(ValueError, match="units must have"):
                method(gpt2_like, sequence)
        else:
            assert method(gpt2_like, sequence).values.shape == (2, 24)


@dataclass(frozen=True)
class Misspelled(Stream):
    def point(self, layer):
        return f"blocks.{layer}.mlp.hook_pree"


def test_a_point_that_the_model_does_not_have_is_named(gpt2_like, sequence):
    with pytest.raises(ValueError, match=r"hook_pree.*hook_pre"):
        Attribution(units=Misspelled())(gpt2_like, sequence)


@dataclass(frozen=True)
class Narrow(Stream):
    def shape(self, model):
        return (model.cfg.d_model // 2,)


def test_units_that_are_not_as_many_as_are_read_are_refused(gpt2_like, sequence):
    with pytest.raises(ValueError, match=r"the shape \(12,\) of their rows, got \(1, 4, 24\) at"):
        Attribution(units=Narrow())(gpt2_like, sequence)


@dataclass(frozen=True)
class OfLayers(Stream):
    layers: tuple[int, ...] = (0, 1)


def test_units_with_a_tuple_are_themselves_when_they_are_read(tmp_path):
    units = OfLayers(layers=(1,))
    NeuronScores(torch.zeros(1, 2), units=units).save(tmp_path / "scores.safetensors")
    assert NeuronScores.load(tmp_path / "scores.safetensors").units == units


@dataclass(frozen=True)
class OfMany(Stream):
    layers: tuple = (0, 1)
    encoders: dict = field(default_factory=dict)
    n: int = field(init=False, default=3)


def test_units_with_a_mapping_by_number_are_themselves_when_they_are_read(tmp_path):
    units = OfMany(encoders={0: torch.eye(2), 3: torch.ones(2)})
    NeuronScores(torch.zeros(1, 2), units=units).save(tmp_path / "scores.safetensors")
    found = NeuronScores.load(tmp_path / "scores.safetensors").units
    assert found.layers == (0, 1) and list(found.encoders) == [0, 3]
    assert torch.equal(found.encoders[0], torch.eye(2))
    nested = OfMany(layers=(Noted(),))
    with pytest.raises(ValueError, match="fields must be plain values, tensors or"):
        NeuronScores(torch.zeros(1, 2), units=nested).save(tmp_path / "others.safetensors")


@dataclass(frozen=True)
class Noted:
    width: int = 3


@dataclass(frozen=True)
class Entering(Stream):
    """The entries of the residual stream before a layer, which a layer above does not compute."""

    def point(self, layer):
        return "hook_embed" if layer == 0 else f"blocks.{layer - 1}.hook_resid_post"


def test_zero_out_of_units_below_their_layer_runs_from_the_tokens(gpt2_like, sequence):
    if not {"blocks.0.hook_resid_post", "hook_embed"} <= set(gpt2_like.hook_dict):
        pytest.skip("this class has other names for the points")
    with pytest.warns(UserWarning, match="or its units lie there"):
        scores = ZeroOut(units=Entering())(gpt2_like, sequence)
    before = memorization_loss(gpt2_like, [sequence]).item()
    for layer, entry in ((0, 2), (1, 5)):
        mask = torch.zeros(2, 24, dtype=torch.bool)
        mask[layer, entry] = True
        with NeuronSet(mask, Entering()).dropped_out(gpt2_like):
            loss = memorization_loss(gpt2_like, [sequence]).item()
        assert float(scores.values[layer, entry]) == pytest.approx(loss - before, abs=1e-5)


@dataclass(frozen=True)
class Elsewhere(Stream):
    """Rows that are no weights of the model."""

    decoder: torch.Tensor = field(default_factory=lambda: torch.ones(24, 24))

    def rows(self, model, layer):
        return self.decoder


def test_rows_that_are_not_the_models_are_not_replaced(gpt2_like):
    neurons = NeuronSet(torch.ones(2, 24, dtype=torch.bool), Elsewhere())
    with (
        pytest.raises(ValueError, match="own parameter as rows, got another tensor"),
        rows_replaced(gpt2_like, neurons, torch.zeros(48, 24)),
    ):
        pass


@dataclass(frozen=True, slots=True)
class Slotted(MLPNeurons):
    n: int = 48


def test_units_with_slots_keep_their_settings(tmp_path):
    NeuronScores(torch.zeros(1, 2), units=Slotted(n=8)).save(tmp_path / "scores.safetensors")
    assert NeuronScores.load(tmp_path / "scores.safetensors").units == Slotted(n=8)


@pytest.mark.parametrize("given", ["heads", AttentionHeads, None])
def test_units_that_are_none_are_refused(gpt2_like, given):
    for kind in (
        Attribution,
        partial(NeuronView, gpt2_like),
        partial(NeuronScores, ones(gpt2_like)),
    ):
        with pytest.raises(TypeError, match="units must be Units"):
            kind(units=given)


def test_units_of_an_unknown_class_are_refused(tmp_path):
    class Gone(MLPNeurons):
        pass

    NeuronScores(torch.zeros(1, 2), units=Gone()).save(tmp_path / "scores.safetensors")
    del Storable.kinds["Gone"]
    with pytest.raises(ValueError, match="must be imported first"):
        NeuronScores.load(tmp_path / "scores.safetensors")


# ---- docs/units.md


@pytest.fixture(scope="module")
def page():
    """What the Python blocks of the page define, run from the first to the last."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "units.md").read_text(encoding="utf-8")
    names = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/units.md", "exec", dont_inherit=True), names)
    return names


def test_the_page_runs_and_its_entries_are_those_of_this_file(page, sequence, gpt2_like):
    assert len(page["heads"]) == 5 and page["entries"].values.shape == (6, 192)
    both = [GradientAlignment(units=Entries()) for Entries in (page["HeadEntries"], HeadEntries)]
    found, wanted = (method(gpt2_like, sequence).values for method in both)
    assert torch.equal(found, wanted)


@pytest.fixture
def features(page, gpt2_like):
    """Random autoencoders of 40 features for two layers of 24 numbers, of which about half fire."""
    if "blocks.0.hook_resid_post" not in gpt2_like.hook_dict:
        pytest.skip("this class has another name for the point")
    generator = torch.Generator().manual_seed(0)

    def of_layers(*shape):
        return [0.3 * torch.randn(shape, generator=generator) for _ in range(2)]

    return page["SparseFeatures"](
        "random", encoders=of_layers(24, 40), biases=of_layers(40), decoders=of_layers(40, 24)
    )


@pytest.mark.parametrize("name", ["gpt2_like", "llama_like"])
def test_features_of_an_autoencoder_are_scored_by_their_definition(
    request, sequence, features, name
):
    model = request.getfixturevalue(name)
    encoder, bias, decoder = features.encoders[1], features.biases[1], features.decoders[1]
    ablated = ZeroOut(units=features)(model, sequence).values
    gradients = Attribution(units=features)(model, sequence).values

    def rise(feature, share):
        def less(act, hook):
            fires = (act @ encoder[:, feature] + bias[feature]).clamp(min=0)
            return act - share * fires[..., None] * decoder[feature]

        with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", less)]):
            lower = loss(model, sequence)
        return float(lower - loss(model, sequence).detach())

    for feature in (0, 7, 39):
        assert float(ablated[1, feature]) == pytest.approx(rise(feature, 1.0), abs=2e-5)
        slope = 1e3 * rise(feature, 1e-3)
        assert float(gradients[1, feature]) == pytest.approx(slope, rel=0.05, abs=2e-3)
    with pytest.raises(ValueError, match="units must have an output"):
        GradientAlignment(units=features)(model, sequence)


def test_features_of_an_autoencoder_are_localized_by_every_other_method(
    gpt2_like, sequence, features
):
    for name in set(METHODS) - set(NEED_ROWS):
        scores = METHODS[name](**SHORT.get(name, {}), units=features)(gpt2_like, sequence)
        assert scores.values.shape == (2, 40)
        with scores.top_k(0.1).dropped_out(gpt2_like):
            pass


def test_activation_contrast_of_heads_counts_all_entries_of_their_matrix(either, sequence):
    texts = ((1, 2, 3, 4), (5, 6, 7, 8, 9))
    plain, aligned = (
        ActivationContrast(units=HEADS, texts=texts, alignment=weight)(either, sequence).values
        for weight in (0, 0.5)
    )
    cosines = GradientAlignment(units=HEADS, points=1)(either, sequence).values
    n_entries = either.blocks[0].attn.W_O[0].numel()
    agree_with = plain * (1 + 0.5 * n_entries**0.5 * cosines)
    torch.testing.assert_close(aligned, agree_with, rtol=1e-3, atol=1e-4)
