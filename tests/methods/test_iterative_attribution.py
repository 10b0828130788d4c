"""Iterative Attribution against a loop that ablates by hooks and measures again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tl_localize import IterativeAttribution, MemorizedSequence, NeuronSet


def mean_probability(model: Any, sequence: MemorizedSequence) -> torch.Tensor:
    positions = torch.arange(sequence.n_prefix - 1, len(sequence.tokens) - 1)
    p = model(sequence.tokens[None], return_type="logits", padding_side="right")[0].double().softmax(-1)
    return p[positions, sequence.tokens[positions + 1]].mean()


def plain_iterative_attribution(
    model: Any, sequence: MemorizedSequence, rounds: int, share: float, first_layer: int
) -> tuple[list[list[int]], torch.Tensor]:
    """For each layer the neurons in the order in which they leave, and the first round's effects: - the slope of shrinking a neuron."""
    n_layers, n = model.cfg.n_layers, model.cfg.d_mlp
    gone: list[list[int]] = [[] for _ in range(n_layers)]
    first = torch.zeros(n_layers, n)
    for step in range(rounds):
        gates = [torch.ones(n, requires_grad=True) for _ in range(n_layers)]
        keep = [torch.tensor([float(i not in out) for i in range(n)]) for out in gone]
        hooks = [
            (f"blocks.{layer}.mlp.hook_post", lambda act, hook, factor=gate * kept: act * factor.to(act))
            for layer, (gate, kept) in enumerate(zip(gates, keep, strict=True))
        ]
        with model.hooks(fwd_hooks=hooks):
            effects = torch.stack(torch.autograd.grad(mean_probability(model, sequence), gates))
        first = effects if step == 0 else first
        for layer in range(first_layer, n_layers):
            left = sorted((i for i in range(n) if i not in gone[layer]), key=lambda i: -float(effects[layer, i]))
            gone[layer] += left[: round(round(share * n) * (step + 1) / rounds) - len(gone[layer])]
    return gone, first


@pytest.mark.parametrize("first_layer", [0, 1])
def test_iterative_attribution_is_the_order_of_leaving(any_model: Any, sequence: Any, first_layer: int) -> None:
    rounds, share = 4, 0.25
    gone, first = plain_iterative_attribution(any_model, sequence, rounds, share, first_layer)
    values = IterativeAttribution(rounds=rounds, share=share, first_layer=first_layer)(any_model, sequence).values
    for layer, order in enumerate(gone):
        assert len(order) == (round(share * any_model.cfg.d_mlp) if layer >= first_layer else 0)
        assert values[layer].argsort(descending=True)[: len(order)].tolist() == order
        stayed = [i for i in range(any_model.cfg.d_mlp) if i not in order]
        torch.testing.assert_close(values[layer, stayed], first[layer, stayed].float(), rtol=1e-4, atol=1e-6)


def test_those_that_leave_score_above_all_that_stay_in_any_layer(gpt2_like: Any, sequences: Any) -> None:
    for scores in IterativeAttribution(rounds=3, share=0.2).map(gpt2_like, sequences):
        order = scores.values.flatten().argsort(descending=True)
        left = NeuronSet(torch.zeros(96).index_fill(0, order[:20], 1).bool().view(2, 48))
        assert left.mask.sum(1).tolist() == [10, 10]


def test_one_round_orders_by_the_effect_on_the_probability(gpt2_like: Any, sequence: Any) -> None:
    _, first = plain_iterative_attribution(gpt2_like, sequence, 1, 0.5, 0)
    for share in (0.1, 0.5):
        values = IterativeAttribution(rounds=1, share=share)(gpt2_like, sequence).values
        assert values.argsort(-1, descending=True).tolist() == first.argsort(-1, descending=True).tolist()


def test_smaller_budgets_are_nested(gpt2_like: Any, sequence: Any) -> None:
    scores = IterativeAttribution(share=0.5)(gpt2_like, sequence)
    small, large = scores.top_k(0.1).mask, scores.top_k(0.4).mask
    assert (small & ~large).sum() == 0


def test_rounds_lower_the_probability_more_than_one_pass(make_model: Any, make_sequences: Any) -> None:
    """What takes over is seen in later rounds only; on a text that the model predicts."""
    model = make_model(3, n_layers=4, d_mlp=96)
    changes: list[float] = []
    for sequence in make_sequences((12, 4), (12, 3), (12, 5), (12, 2), (12, 6), (12, 4), seed=1):
        tokens = sequence.tokens.clone()
        for position in range(sequence.n_prefix, len(tokens)):
            tokens[position] = model(tokens[None, :position])[0, -1].argmax()
        recited = replace(sequence, tokens=tokens)
        reached: list[float] = []
        for rounds in (1, 15):
            found = IterativeAttribution(rounds=rounds, share=0.15)(model, recited).top_k(0.15)
            with found.dropped_out(model), torch.no_grad():
                reached.append(float(mean_probability(model, recited)))
        changes.append(reached[1] - reached[0])
    assert sum(changes) < 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number from 1 on"),
        ({"share": 10}, "share must be a fraction"),
        ({"first_layer": -1}, "first_layer must be a whole number from 0 on"),
    ],
)
def test_iterative_attribution_rejects(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IterativeAttribution(**settings)


def test_iterative_attribution_rejects_a_first_layer_beyond_the_model(gpt2_like: Any, sequence: Any) -> None:
    with pytest.raises(ValueError, match="first_layer must be below the model's 2 layers"):
        IterativeAttribution(first_layer=2)(gpt2_like, sequence)
