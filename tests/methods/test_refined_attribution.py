"""Refined Attribution against a loop that ablates by hooks, one set and one text at a time."""

from itertools import pairwise

import pytest
import torch
from oracles import gate_gradient_of, mean_probability
from test_contrast import plain_need

from tl_localize import RefinedAttribution


def best_of(scores, count, per, first_layer):
    """The pairs (layer, neuron) of the highest scores."""
    pairs = [(i, j) for i in range(first_layer, len(scores)) for j in range(scores.shape[1])]
    pairs.sort(key=lambda pair: -float(scores[pair]))
    if per == "model":
        return pairs[:count]
    layers = range(first_layer, len(scores))
    return [pair for i in layers for pair in [pair for pair in pairs if pair[0] == i][:count]]


def plain_refinement(model, sequence, method, count, first_layer, weight):
    """The scores after some steps, and the set of each step."""
    size = model.cfg.n_layers, model.cfg.d_mlp
    scores = torch.zeros(size)
    speed = torch.zeros(size)
    ablated = []
    sets = []
    for step in range(method.steps):
        kept = torch.ones(size)
        for pair in ablated:
            kept[pair] = 0
        effects = gate_gradient_of(model, sequence, mean_probability, kept).float() * weight
        speed = 0.9 * speed + effects
        scores = scores + (method.steps - step) / method.steps * speed
        ablated = best_of(scores, count, method.per, first_layer)
        sets.append(set(ablated))
    return scores, sets


@pytest.mark.parametrize(
    ("per", "first_layer", "contrast", "count"),
    [("layer", 0, 0, 12), ("layer", None, 1, 12), ("model", None, 1, 5)],
)
def test_refined_attribution_is_the_plain_loop(
    any_model, sequence, per, first_layer, contrast, count
):
    need = plain_need(any_model, seed=0) if contrast else torch.tensor(0.0)
    start = 1 if first_layer is None else first_layer
    n = any_model.cfg.d_mlp * (1 if per == "layer" else any_model.cfg.n_layers - start)
    method = RefinedAttribution(
        share=(count + 0.5) / n, per=per, steps=5, first_layer=first_layer, contrast=contrast
    )
    weight = 1 / (1 + contrast * need**3)
    wanted, sets = plain_refinement(any_model, sequence, method, count, start, weight)
    scores = method(any_model, sequence)
    torch.testing.assert_close(scores.values, wanted, rtol=1e-3, atol=1e-6)
    assert set(scores.top_k(count=count, per=per)) == sets[-1]


def test_a_set_gives_neurons_back(gpt2_like, sequence):
    method = RefinedAttribution(share=0.25, steps=8, first_layer=0, contrast=0)
    _, sets = plain_refinement(gpt2_like, sequence, method, 12, 0, 1.0)
    assert any(before - after for before, after in pairwise(sets))


def test_more_steps_lower_the_probability_further(make_model, make_sequences):
    """What takes over is seen in later steps only; on texts that the model predicts."""
    model = make_model(3, n_layers=4, d_mlp=96)
    change = 0.0
    for sequence in make_sequences((12, 4), (12, 3), (12, 5), seed=1):
        for position in range(sequence.n_prefix, len(sequence)):
            sequence.tokens[position] = model(sequence.tokens[None, :position])[0, -1].argmax()
        for steps, sign in ((20, 1), (1, -1)):
            method = RefinedAttribution(share=0.15, steps=steps, contrast=0)
            neurons = method(model, sequence).top_k(0.15, rounding="floor")
            with neurons.dropped_out(model), torch.no_grad():
                change += sign * float(mean_probability(model, sequence))
    assert change < 0


def test_a_share_of_less_than_a_neuron_is_one(gpt2_like, sequence):
    small, single = (
        RefinedAttribution(share=share, per="model", steps=3)(gpt2_like, sequence)
        for share in (0.001, 1 / 48)
    )
    assert torch.equal(small.values, single.values)


def test_refined_attribution_rejects_a_first_layer_beyond_the_model(gpt2_like, sequence):
    with pytest.raises(ValueError, match="first_layer must be below 2, the number"):
        RefinedAttribution(first_layer=2)(gpt2_like, sequence)
