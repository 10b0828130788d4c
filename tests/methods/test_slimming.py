"""Slimming."""

from tl_localize import Slimming
from tl_localize.model.neurons import NeuronView

QUICK = Slimming(steps=30, learning_rate=0.05, sparsity_weight=3.0)


def test_slimming_leaves_untuned_layers_open(neox_like, sequence):
    values = Slimming(steps=12, first_layer=2)(neox_like, sequence).values
    assert (values[:2] == 1).all() and (values[2] < 1).any()


def test_slimming_does_not_mask_untuned_layers(gpt2_like, sequence, monkeypatch):
    NeuronView(gpt2_like)  # whose proof scales too
    scaled = NeuronView.scaled
    untouched = []

    def recording(self, gates):
        untouched.append(bool((gates[0] == 1).all()))
        return scaled(self, gates)

    monkeypatch.setattr(NeuronView, "scaled", recording)
    Slimming(steps=2, first_layer=1)(gpt2_like, sequence)
    assert untouched == [True, True]


def test_slimming_drops_a_neuron_that_does_nothing(gpt2_like, sequence):
    gpt2_like.blocks[1].mlp.W_out.data[7] = 0
    values = QUICK(gpt2_like, sequence).values
    assert values[1, 7] == values.min() == 0
