"""Layer by layer: each number is that of the set it names."""

from functools import partial

import pandas as pd
import pytest
import torch

from tl_localize import NeuronSet, ablate_layers, accuracy, memorization_loss
from tl_localize.metrics import predicted_suffixes
from tl_localize.sequences import MemorizedSequence


@pytest.fixture
def recited(gpt2_like, sequence):
    """A text whose suffix the model predicts."""
    tokens = sequence.tokens.clone()
    for place in range(sequence.n_prefix, len(tokens)):
        text = MemorizedSequence(tokens, sequence.n_prefix)
        tokens[place] = predicted_suffixes(gpt2_like, [text])[0][place - sequence.n_prefix]
    return MemorizedSequence(tokens, sequence.n_prefix, "recited")


@torch.no_grad()
def test_each_layer_is_ablated_alone_and_spared(gpt2_like, recited, sequence):
    neurons = NeuronSet(torch.rand(2, 48, generator=torch.Generator().manual_seed(0)) < 0.7)
    same_elsewhere = MemorizedSequence(recited.tokens, 1)
    others = iter([recited, sequence, same_elsewhere])  # the text itself is no other one
    found = ablate_layers(gpt2_like, recited, neurons, others)
    pd.testing.assert_frame_equal(
        found.frame, ablate_layers(gpt2_like, recited, neurons, sequence).frame
    )
    assert found.before == 1.0 and found.frame["neurons"].tolist() == neurons.mask.sum(1).tolist()
    with neurons.dropped_out(gpt2_like):
        assert found.after == float(accuracy(gpt2_like, recited)) < 1
    alone = [
        NeuronSet.from_indices([pair for pair in neurons if pair[0] == layer], (2, 48))
        for layer in (0, 1)
    ]
    loss = memorization_loss(gpt2_like, [recited])
    for layer, own in enumerate(alone):
        row = found.frame.T[layer].to_dict()
        with own.dropped_out(gpt2_like):
            assert row["only"] == float(accuracy(gpt2_like, recited))
            assert row["others"] == float(accuracy(gpt2_like, sequence))
            rise = float(memorization_loss(gpt2_like, [recited]) - loss)
        assert row["rise"] == pytest.approx(rise, abs=1e-5)
        with alone[1 - layer].dropped_out(gpt2_like):
            assert row["spared"] == float(accuracy(gpt2_like, recited))


def test_figure_has_what_the_frame_has(gpt2_like, recited):
    neurons = NeuronSet(torch.ones(2, 48) > 0)
    found = ablate_layers(gpt2_like, recited, neurons)
    only, spared, everything = found.plot().axes[0].get_lines()
    assert only.get_ydata().tolist() == (100 * found.frame["only"]).tolist()
    assert spared.get_ydata().tolist() == (100 * found.frame["spared"]).tolist()
    assert list(everything.get_ydata()) == [100 * found.after] * 2
    assert "<table" in found._repr_html_()


def test_layers_of_an_empty_set_are_refused(gpt2_like, sequence):
    with pytest.raises(ValueError, match="neurons must hold some of the neurons, got none"):
        ablate_layers(gpt2_like, sequence, NeuronSet(torch.zeros(2, 48) > 0))


def test_logits_that_are_no_numbers_are_not_taken_for_forgotten(gpt2_like, recited):
    neurons = NeuronSet.from_indices([(0, 1), (1, 2)], (2, 48))
    broken = partial(torch.full_like, fill_value=torch.nan)
    hook = ("blocks.1.hook_resid_post", lambda act, hook: broken(act))
    message = "logits must be numbers"
    with gpt2_like.hooks(fwd_hooks=[hook]), pytest.raises(ValueError, match=message):
        ablate_layers(gpt2_like, recited, neurons)
