"""Accuracy, edit distance and perplexity, against loops that share nothing with them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from tl_localize import MemorizedSequence, accuracy, levenshtein, perplexity, perplexity_base2
from tl_localize.metrics import predicted_suffixes


def spell(ids: list[int]) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


def edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


@torch.no_grad()
def predicted(model: Any, sequence: MemorizedSequence) -> torch.Tensor:
    return model(sequence.tokens[None])[0].argmax(-1)[sequence.n_prefix - 1 : -1]


@pytest.fixture
def general() -> torch.Tensor:
    return torch.randint(61, (5, 12), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def losses_by_hand(model: Any, tokens: torch.Tensor) -> list[float]:
    log_p = model(tokens).log_softmax(-1)
    return [
        -sum(float(log_p[b, t - 1, tokens[b, t]]) for t in range(1, tokens.shape[1]))
        / (tokens.shape[1] - 1)
        for b in range(len(tokens))
    ]


def test_accuracy_is_the_share_of_right_tokens(any_model: Any, sequences: Any) -> None:
    right = [
        MemorizedSequence(
            torch.cat(
                [
                    s.prefix,
                    torch.where(
                        torch.arange(len(s.suffix)) % 2 == 0, predicted(any_model, s), s.suffix
                    ),
                ]
            ),
            s.n_prefix,
        )
        for s in sequences
    ]
    wanted = [float((predicted(any_model, s) == s.suffix).float().mean()) for s in right]
    assert accuracy(any_model, right).tolist() == pytest.approx(wanted)


def test_accuracy_of_the_first_greedy_token_is_one(any_model: Any, sequence: Any) -> None:
    with torch.no_grad():
        next_token = any_model(sequence.tokens[None])[0, -1].argmax()
    recited = MemorizedSequence(torch.cat([sequence.tokens, next_token[None]]), len(sequence))
    assert accuracy(any_model, [recited]).tolist() == [1.0]


def test_predicted_suffixes_do_not_depend_on_the_batch(
    any_model: Any, sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [next(predicted_suffixes(any_model, [s])).tolist() for s in sequences]
    monkeypatch.setattr(
        "tl_localize.batching.tokens_that_fit", lambda view: 3 * max(map(len, sequences))
    )
    assert [p.tolist() for p in predicted_suffixes(any_model, sequences)] == alone


def test_measures_take_a_generator(gpt2_like: Any, sequences: Any) -> None:
    for measure in (accuracy, partial(levenshtein, decode=str)):
        found = measure(gpt2_like, (sequence for sequence in sequences))
        assert torch.equal(found, measure(gpt2_like, sequences))


def test_levenshtein_counts_characters(any_model: Any, sequences: Any) -> None:
    wanted = [
        edit_distance(
            spell([*s.prefix.tolist(), *predicted(any_model, s).tolist()]), spell(s.tokens.tolist())
        )
        for s in sequences
    ]
    assert levenshtein(any_model, sequences, spell).tolist() == wanted


def test_levenshtein_of_a_shift_is_two(gpt2_like: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = MemorizedSequence(torch.tensor([0, 1, 2, 3, 4]), 1)
    monkeypatch.setattr(
        "tl_localize.metrics.predicted_suffixes",
        lambda model, sequences: iter([torch.tensor([2, 3, 4, 5])]),
    )
    assert levenshtein(gpt2_like, [sequence], spell).tolist() == [2]


def test_perplexity_is_exp_of_nats_per_token(any_model: Any, general: torch.Tensor) -> None:
    losses = losses_by_hand(any_model, general)
    assert perplexity(any_model, general) == pytest.approx(
        math.exp(sum(losses) / len(losses)), rel=1e-5
    )


def test_perplexity_base2_is_the_mean_of_powers_of_two(
    any_model: Any, general: torch.Tensor
) -> None:
    losses = losses_by_hand(any_model, general)
    assert perplexity_base2(any_model, general) == pytest.approx(
        sum(2**loss for loss in losses) / len(losses), rel=1e-5
    )


def test_perplexity_does_not_depend_on_the_batch(
    any_model: Any, general: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = perplexity(any_model, general)
    monkeypatch.setattr("tl_localize.batching.tokens_that_fit", lambda view: 24)
    assert perplexity(any_model, general) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    "measure",
    [
        accuracy,
        lambda m, s: levenshtein(m, s, spell),
        lambda m, s: perplexity(m, s[0].tokens[None]),
    ],
)
def test_metrics_see_hooks(gpt2_like: Any, make_sequences: Any, measure: Any) -> None:
    sequences = [
        MemorizedSequence(torch.cat([s.prefix, predicted(gpt2_like, s)]), s.n_prefix)
        for s in make_sequences((20, 19), (18, 17), (16, 15))
    ]
    before = measure(gpt2_like, sequences)
    with gpt2_like.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda act, hook: -act)]):
        assert not torch.equal(
            torch.as_tensor(measure(gpt2_like, sequences)), torch.as_tensor(before)
        )


def test_metrics_leave_nothing_behind(
    any_model: Any, sequences: Any, general: torch.Tensor, unchanged: Any
) -> None:
    check = unchanged(any_model)
    accuracy(any_model, sequences)
    perplexity(any_model, general)
    check()


def test_metrics_keep_no_graph(any_model: Any, sequences: Any) -> None:
    assert not accuracy(any_model, sequences).requires_grad


def test_perplexity_takes_the_unsigned_tokens_of_files(
    gpt2_like: Any, general: torch.Tensor
) -> None:
    assert perplexity(gpt2_like, general.to(torch.uint16)) == perplexity(gpt2_like, general)


def test_perplexity_of_half_precision_sums_in_float32(
    make_model: Any, general: torch.Tensor
) -> None:
    model = make_model(1)
    wanted = perplexity(model, general)
    assert perplexity(model.to(torch.bfloat16), general) == pytest.approx(wanted, rel=0.05)


def test_perplexity_base2_of_many_rows_averages_within_128_chunks_first(
    monkeypatch: pytest.MonkeyPatch, gpt2_like: Any
) -> None:
    """As the authors' ``loss.chunk(128)``: 256 rows are 128 means of two, 300 rows are 100 means of
    three.
    """
    from tl_localize import metrics

    for n, size in ((64, 1), (256, 2), (300, 3)):
        losses = torch.linspace(1, 5, n, dtype=torch.float64)
        monkeypatch.setattr(metrics, "sequence_losses", lambda model, tokens, losses=losses: losses)
        expected = sum(2 ** float(losses[i : i + size].mean()) for i in range(0, n, size)) / (
            n // size
        )
        assert perplexity_base2(gpt2_like, torch.zeros(1, 2, dtype=torch.long)) == pytest.approx(
            expected, rel=1e-12
        )
