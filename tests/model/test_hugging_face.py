"""Hooks on a model of transformers do what ablation in TransformerLens does."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from architectures import config_of, random_model, save

from tl_localize import AttentionHeads, MLPNeurons, NeuronSet, load_model
from tl_localize.model.hugging_face import unit_modules, zero_input
from tl_localize.model.neurons import NeuronView

PAGE = Path(__file__).resolve().parents[2] / "docs" / "elsewhere.md"
TOKENS = torch.arange(9)[None]
# one for each name of a module, but those that transformers 5.9 or TransformerLens 3.9 have not
TRIED = ("GPT-2", "GPT-NeoX (Pythia)", "Llama", "Gemma 2", "Phi", "OPT", "GPT-J", "GPT-Neo")
TRIED += ("Bloom", "StarCoder2")


@pytest.fixture(scope="module", params=TRIED)
def pair(request, tmp_path_factory):
    """A model of transformers, and the same one in TransformerLens."""
    folder = tmp_path_factory.mktemp("model")
    hf_model = save(config_of(request.param), folder)
    return hf_model, load_model(folder, device="cpu")


@torch.no_grad()
@pytest.mark.parametrize("units", [MLPNeurons(), AttentionHeads()], ids=["neurons", "heads"])
def test_logits_are_those_of_ablation_in_transformerlens(pair, units):
    hf_model, model = pair
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(NeuronView(model, units).size, generator=generator) < 0.4
    neurons = NeuronSet(mask, units)
    before = hf_model(TOKENS).logits
    with neurons.dropped_out(model):
        expected = model(TOKENS)
    with neurons.hooks_for(hf_model):
        found = hf_model(TOKENS).logits
    assert (found - expected).abs().max() < 1e-5
    assert (found - before).abs().max() > 0.1
    assert torch.equal(hf_model(TOKENS).logits, before)  # no hook is left


def test_names_on_the_page_are_those_of_models():
    named = set(re.findall(r"`([\w.]+\.\{layer\}\.[\w.]+)`", PAGE.read_text(encoding="utf-8")))
    named -= {name for name in named if name.startswith("blocks.")}
    found = set()
    for name in TRIED:
        model = random_model(config_of(name), 1, 0.15)
        for units in (MLPNeurons(), AttentionHeads()):
            found |= {path.replace(".0.", ".{layer}.") for path in unit_modules(model, units, 2)}
    assert len(named) == 14 and named <= found


def plain_gpt2():
    return random_model(config_of("GPT-2"), 1, 0.15)


def test_modules_of_other_layers_and_neurons_are_named():
    gpt2 = plain_gpt2()
    with (
        pytest.raises(ValueError, match=r"each of 3 layers, got those of layers .0, 1"),
        NeuronSet.from_indices([(2, 0)], (3, 48)).hooks_for(gpt2),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"must have 47 neurons .* 48 numbers at transformer.h.0"),
        NeuronSet.from_indices([(1, 0)], (2, 47)).hooks_for(gpt2),
    ):
        pass
    with (
        pytest.raises(ValueError, match="hf_model must have 2 heads in each layer, as the set"),
        NeuronSet.from_indices([(1, 0)], (2, 2), units=AttentionHeads()).hooks_for(gpt2),
    ):
        pass
    assert not any(module._forward_pre_hooks for module in gpt2.modules())


def test_architecture_that_norms_its_neurons_is_refused():
    model = random_model(config_of("BitNet"), 1, 0.15)
    with pytest.raises(ValueError, match=r"got those of layers \[\] in BitNetForCausalLM"):
        unit_modules(model, MLPNeurons(), 2)


def test_parts_of_a_module_are_not_taken_for_it():
    model = plain_gpt2()
    module = model.transformer.h[0].mlp.c_proj
    module.adapter = torch.nn.Linear(2, 2)
    assert unit_modules(model, MLPNeurons(), 2)["transformer.h.0.mlp.c_proj"] is module


def test_further_inputs_of_a_module_are_handed_on():
    found = zero_input(None, (torch.ones(4), "more"), mask=torch.tensor([True, False]))
    assert (found[0].tolist(), found[1]) == ([0, 0, 1, 1], "more")


def test_hooks_need_a_module():
    with (
        pytest.raises(TypeError, match="hf_model must be a model of transformers, got str"),
        NeuronSet.from_indices([(0, 0)], (2, 48)).hooks_for("gpt2"),
    ):
        pass


def test_nothing_is_left_after_an_exception():
    gpt2 = plain_gpt2()
    with pytest.raises(KeyError), NeuronSet.from_indices([(0, 0)], (2, 48)).hooks_for(gpt2):
        raise KeyError
    assert not any(module._forward_pre_hooks for module in gpt2.modules())


@dataclass(frozen=True)
class Outputs(MLPNeurons):
    """What an MLP writes, under the name of its neurons."""

    def point(self, layer):
        return f"blocks.{layer}.hook_mlp_out"

    def shape(self, model):
        return (model.cfg.d_model,)


def test_units_of_the_users_own_are_refused_whatever_their_name():
    hf_model = random_model(config_of("GPT-2"), seed=0, deviation=0.2)
    neurons = NeuronSet.from_indices([(1, 5)], (2, hf_model.config.n_embd), Outputs())
    message = "hf_model must have a known module"
    with pytest.raises(ValueError, match=message), neurons.hooks_for(hf_model):
        pass
