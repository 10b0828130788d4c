"""Iterative Attribution against a loop that ablates by hooks and measures again."""

from itertools import count

import pytest
import torch
from oracles import gate_gradient_of, mean_probability
from test_contrast import plain_need

from tl_localize import IterativeAttribution, NeuronSet

# by neurons of a layer: how many of a quarter are gone after each round, for rounds=4
ENDS = {48: [1, 3, 6, 9, 12], 52: [1, 3, 6, 10, 13], 56: [1, 3, 4, 7, 10, 14]}


def plain_order(model, sequence, ends, first_layer, weight):
    """For each layer the neurons in the order in which they leave, and the first round's scores."""
    n_layers, n = model.cfg.n_layers, model.cfg.d_mlp
    gone = [[] for _ in range(n_layers)]
    rounds = []
    for end in ends:
        kept = torch.tensor([[float(i not in out) for i in range(n)] for out in gone])
        effects = gate_gradient_of(model, sequence, mean_probability, kept) * weight
        rounds.append(effects)
        for layer in range(first_layer, n_layers):
            left = [i for i in range(n) if i not in gone[layer]]
            left.sort(key=lambda i: -float(effects[layer, i]))
            gone[layer] += left[: end - len(gone[layer])]
    return gone, rounds[0]


@pytest.mark.parametrize(("first_layer", "contrast"), [(0, 0), (None, 1)])
def test_iterative_attribution_is_the_order_of_leaving(any_model, sequence, first_layer, contrast):
    need = plain_need(any_model, seed=0) if contrast else torch.tensor(0.0)
    gone, first = plain_order(
        any_model,
        sequence,
        ENDS[any_model.cfg.d_mlp],
        1 if first_layer is None else first_layer,
        1 / (1 + contrast * need**3),
    )
    values = IterativeAttribution(rounds=4, share=0.25, first_layer=first_layer, contrast=contrast)(
        any_model, sequence
    ).values
    for layer, order in enumerate(gone):
        assert values[layer].argsort(descending=True)[: len(order)].tolist() == order
        stayed = [i for i in range(any_model.cfg.d_mlp) if i not in order]
        torch.testing.assert_close(
            values[layer, stayed], first[layer, stayed].float(), rtol=1e-3, atol=1e-6
        )


def test_the_default_contrast_is_one():
    assert IterativeAttribution() == IterativeAttribution(contrast=1, first_layer=None)


def test_rounds_double_up_to_a_tenth_of_the_share():
    method = IterativeAttribution()
    assert method._ends(154) == [1, 3, 7, 15, 31, 46, 62, 77, 92, 108, 123, 139, 154]
    assert method._ends(1) == [1] and method._ends(4) == [1, 2, 3, 4]


def test_those_that_leave_score_above_all_that_stay_in_any_layer(gpt2_like, sequence):
    scores = IterativeAttribution(rounds=3, share=0.2, first_layer=0)(gpt2_like, sequence)
    order = scores.values.flatten().argsort(descending=True)
    left = NeuronSet(torch.zeros(96).index_fill(0, order[:20], 1).bool().view(2, 48))
    assert left.mask.sum(1).tolist() == [10, 10]


def test_rounds_lower_the_probability_more_than_one_pass(make_model, make_sequences):
    """What takes over is seen in later rounds only; on texts that the model predicts."""
    model = make_model(3, n_layers=4, d_mlp=96)
    change = 0.0
    for sequence in make_sequences((12, 4), (12, 3), (12, 5), seed=1):
        for position in range(sequence.n_prefix, len(sequence)):
            sequence.tokens[position] = model(sequence.tokens[None, :position])[0, -1].argmax()
        scores = IterativeAttribution(rounds=15, share=0.15, contrast=0)(model, sequence)
        first = gate_gradient_of(model, sequence, mean_probability).float()
        once = NeuronSet(torch.zeros_like(first).scatter(1, first.topk(14).indices, 1).bool())
        once.mask[0] = False
        for neurons, sign in ((scores.top_k(0.15), 1), (once, -1)):
            with neurons.dropped_out(model), torch.no_grad():
                change += sign * float(mean_probability(model, sequence))
    assert change < 0


def test_iterative_attribution_rejects_a_first_layer_beyond_the_model(gpt2_like, sequence):
    with pytest.raises(ValueError, match="first_layer must be below 2, the number"):
        IterativeAttribution(first_layer=2)(gpt2_like, sequence)


def test_effects_of_a_later_round_that_are_no_numbers_are_refused(gpt2_like, sequence):
    """As where an ablation makes float16 overflow."""
    method = IterativeAttribution(rounds=2, share=0.25, contrast=0)
    values = method(gpt2_like, sequence).values
    passes = count()

    def overflow(act, hook):
        return act * (torch.nan if next(passes) else 1)

    assert values.isfinite().all()
    broken = gpt2_like.hooks([("blocks.1.hook_mlp_out", overflow)])
    with broken, pytest.raises(ValueError, match="values must be finite"):
        list(method.map(gpt2_like, [sequence], check=False))
    assert next(passes) > 1


def test_those_that_leave_score_their_place_above_the_best_that_stays(gpt2_like, sequence):
    method = IterativeAttribution(rounds=3, share=0.2, first_layer=0, contrast=0)
    values = method(gpt2_like, sequence).values
    order = values.argsort(descending=True)
    first = gate_gradient_of(gpt2_like, sequence, mean_probability).float()
    stay = first.gather(1, order[:, 10:])
    places = 1 - torch.arange(10) / 10
    wanted = (stay.max().clamp(min=0) + places).expand(2, -1)
    torch.testing.assert_close(values.gather(1, order[:, :10]), wanted, rtol=0, atol=1e-6)
    assert first.max() - stay.max() > 1e-5
