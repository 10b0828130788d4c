"""Iterative Attribution against a loop that ablates by hooks and measures again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tl_localize import IterativeAttribution, MemorizedSequence, NeuronSet
from tl_localize.methods import iterative_attribution


def mean_probability(model: Any, sequence: MemorizedSequence) -> torch.Tensor:
    positions = torch.arange(sequence.n_prefix - 1, len(sequence.tokens) - 1)
    p = (
        model(sequence.tokens[None], return_type="logits", padding_side="right")[0]
        .double()
        .softmax(-1)
    )
    return p[positions, sequence.tokens[positions + 1]].mean()


def plain_texts(model: Any, seed: int) -> torch.Tensor:
    """Sampled without a cache: the first token whose cumulative probability reaches a draw."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(16, 31, generator=generator)  # the tiny models have 32 positions
    texts = torch.randint(61, (16, 1), generator=generator)
    if model.tokenizer is not None:
        texts = torch.full_like(texts, model.tokenizer.bos_token_id)
    for draw in draws.T.contiguous():
        with torch.no_grad():
            p = model(texts, return_type="logits", padding_side="right")[:, -1].softmax(-1)
        texts = torch.cat([texts, torch.searchsorted(p.cumsum(-1), draw[:, None])], 1)
    return texts


def plain_general_effects(model: Any, texts: torch.Tensor) -> torch.Tensor:
    """Mean over texts of the absolute slope of the loss in each neuron's gate, one text after the
    other.
    """
    total = torch.zeros(model.cfg.n_layers, model.cfg.d_mlp)
    for text in texts:
        gates = [torch.ones(model.cfg.d_mlp, requires_grad=True) for _ in range(model.cfg.n_layers)]
        hooks = [
            (f"blocks.{i}.mlp.hook_post", lambda act, hook, gate=gate: act * gate.to(act))
            for i, gate in enumerate(gates)
        ]
        with model.hooks(fwd_hooks=hooks):
            logits = model(text[None], return_type="logits", padding_side="right")[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, text[1:])
            total += torch.stack(torch.autograd.grad(loss, gates)).abs()
    return total / len(texts)


def plain_iterative_attribution(
    model: Any,
    sequence: MemorizedSequence,
    rounds: int,
    share: float,
    first_layer: int,
    weight: float | torch.Tensor = 1.0,
) -> tuple[list[list[int]], torch.Tensor]:
    """For each layer the neurons in the order in which they leave, and the first round's effects: -
    the slope of shrinking a neuron.
    """
    n_layers, n = model.cfg.n_layers, model.cfg.d_mlp
    gone: list[list[int]] = [[] for _ in range(n_layers)]
    first = torch.zeros(n_layers, n)
    for step in range(rounds):
        gates = [torch.ones(n, requires_grad=True) for _ in range(n_layers)]
        keep = [torch.tensor([float(i not in out) for i in range(n)]) for out in gone]
        hooks = [
            (
                f"blocks.{layer}.mlp.hook_post",
                lambda act, hook, factor=gate * kept: act * factor.to(act),
            )
            for layer, (gate, kept) in enumerate(zip(gates, keep, strict=True))
        ]
        with model.hooks(fwd_hooks=hooks):
            effects = (
                torch.stack(torch.autograd.grad(mean_probability(model, sequence), gates)) * weight
            )
        first = effects if step == 0 else first
        for layer in range(first_layer, n_layers):
            left = sorted(
                (i for i in range(n) if i not in gone[layer]),
                key=lambda i: -float(effects[layer, i]),
            )
            gone[layer] += left[: round(round(share * n) * (step + 1) / rounds) - len(gone[layer])]
    return gone, first


@pytest.mark.parametrize("first_layer", [0, 1])
def test_iterative_attribution_is_the_order_of_leaving(
    any_model: Any, sequence: Any, first_layer: int
) -> None:
    rounds, share = 4, 0.25
    gone, first = plain_iterative_attribution(any_model, sequence, rounds, share, first_layer)
    values = IterativeAttribution(rounds=rounds, share=share, first_layer=first_layer)(
        any_model, sequence
    ).values
    for layer, order in enumerate(gone):
        assert len(order) == (round(share * any_model.cfg.d_mlp) if layer >= first_layer else 0)
        assert values[layer].argsort(descending=True)[: len(order)].tolist() == order
        stayed = [i for i in range(any_model.cfg.d_mlp) if i not in order]
        torch.testing.assert_close(
            values[layer, stayed], first[layer, stayed].float(), rtol=1e-4, atol=1e-6
        )


def test_a_contrast_lets_neurons_that_the_models_own_texts_need_leave_later(
    any_model: Any, sequence: Any
) -> None:
    needed = plain_general_effects(any_model, plain_texts(any_model, seed=3))
    weight = 1 / (1 + 2 * needed / needed.mean())
    gone, first = plain_iterative_attribution(any_model, sequence, 4, 0.25, 1, weight)
    values = IterativeAttribution(rounds=4, share=0.25, first_layer=1, contrast=2, seed=3)(
        any_model, sequence
    ).values
    for layer, order in enumerate(gone):
        assert values[layer].argsort(descending=True)[: len(order)].tolist() == order
        stayed = [i for i in range(any_model.cfg.d_mlp) if i not in order]
        torch.testing.assert_close(
            values[layer, stayed], first[layer, stayed].float(), rtol=1e-4, atol=1e-6
        )
    without = plain_iterative_attribution(any_model, sequence, 4, 0.25, 1)[0]
    assert gone != without


def test_with_a_contrast_the_model_stays_as_it_was_and_map_equals_single_calls(
    any_model: Any, sequences: Any, unchanged: Any
) -> None:
    method = IterativeAttribution(rounds=2, contrast=1)
    check, state = unchanged(any_model), torch.get_rng_state()
    together = list(method.map(any_model, sequences))
    for found, sequence in zip(together, sequences, strict=True):
        torch.testing.assert_close(
            found.values, method(any_model, sequence).values, atol=2e-6, rtol=1e-4
        )
    check()
    assert torch.equal(torch.get_rng_state(), state)


def test_texts_of_a_model_begin_with_its_beginning_of_text_token(model_dir: Any) -> None:
    from tl_localize import load_model
    from tl_localize.methods.iterative_attribution import written_texts
    from tl_localize.neurons import NeuronView

    model = load_model(model_dir, device="cpu")
    model.tokenizer.bos_token = "B"
    texts = written_texts(NeuronView(model), seed=0)
    assert texts.shape == (16, 64) and set(texts[:, 0].tolist()) == {model.tokenizer.bos_token_id}
    assert len(set(map(tuple, texts.tolist()))) == 16


def test_those_that_leave_score_above_all_that_stay_in_any_layer(
    gpt2_like: Any, sequences: Any
) -> None:
    for scores in IterativeAttribution(rounds=3, share=0.2, first_layer=0).map(
        gpt2_like, sequences
    ):
        order = scores.values.flatten().argsort(descending=True)
        left = NeuronSet(torch.zeros(96).index_fill(0, order[:20], 1).bool().view(2, 48))
        assert left.mask.sum(1).tolist() == [10, 10]


def test_one_round_orders_by_the_effect_on_the_probability(gpt2_like: Any, sequence: Any) -> None:
    _, first = plain_iterative_attribution(gpt2_like, sequence, 1, 0.5, 0)
    for share in (0.1, 0.5):
        values = IterativeAttribution(rounds=1, share=share, first_layer=0)(
            gpt2_like, sequence
        ).values
        assert (
            values.argsort(-1, descending=True).tolist()
            == first.argsort(-1, descending=True).tolist()
        )


def test_smaller_budgets_are_nested(gpt2_like: Any, sequence: Any) -> None:
    scores = IterativeAttribution(share=0.5)(gpt2_like, sequence)
    small, large = scores.top_k(0.1).mask, scores.top_k(0.4).mask
    assert (small & ~large).sum() == 0


def test_rounds_lower_the_probability_more_than_one_pass(
    make_model: Any, make_sequences: Any
) -> None:
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
        ({"contrast": -1}, "contrast must be a finite number from 0 on"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_iterative_attribution_rejects(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IterativeAttribution(**settings)


def test_iterative_attribution_rejects_a_first_layer_beyond_the_model(
    gpt2_like: Any, sequence: Any
) -> None:
    with pytest.raises(ValueError, match="first_layer must be below the model's 2 layers"):
        IterativeAttribution(first_layer=2)(gpt2_like, sequence)


def test_by_default_the_first_layer_is_spared_as_in_del(neox_like: Any, sequence: Any) -> None:
    found, wanted = (
        IterativeAttribution(rounds=2, share=0.25, first_layer=layer)(neox_like, sequence)
        for layer in (None, 1)
    )
    assert torch.equal(found.values, wanted.values) and found.first_layer == 1
    assert not found.top_k(0.2).mask[0].any()


def test_texts_of_a_contrast_are_written_once_for_all_batches_of_a_map(
    gpt2_like: Any, sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = [], iterative_attribution.written_texts
    monkeypatch.setattr(
        iterative_attribution, "written_texts", lambda *args: written.append(1) or write(*args)
    )
    method = IterativeAttribution(rounds=1, contrast=1)
    assert len(list(method.map(gpt2_like, sequences, batch_size=1))) == 4
    assert len(written) == 1
