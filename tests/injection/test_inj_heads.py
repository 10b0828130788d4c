"""Injection into the rows of W_O of heads: on both classes, alone and together, applied, saved, and
measured by INJ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from architectures import tiny_bridge

from tl_localize import (
    AttentionHeads,
    Attribution,
    InjBenchmark,
    Injection,
    JointInjection,
    RowNorm,
    Units,
    inject,
    inject_together,
)
from tl_localize.execution import Store
from tl_localize.forward import is_bridge, lay_out

HEADS = AttentionHeads()
HOW: dict[str, Any] = {"ratio": 0.5, "learning_rate": 0.05, "max_steps": 25, "units": HEADS}


@pytest.fixture(params=["gpt2_like", "laid out", "llama_like", "bridge"])
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "bridge":
        return tiny_bridge(1, {})
    if request.param == "laid out":
        return lay_out(request.getfixturevalue("gpt2_like"))
    return request.getfixturevalue(request.param)


def plain_loss(model: Any, sequence: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        model(sequence.tokens[None])[0, :-1], sequence.tokens[1:]
    )


def test_injection_trains_all_rows_of_the_drawn_heads(
    model: Any, sequence: Any, unchanged: Any
) -> None:
    check = unchanged(model)
    injection = inject(model, sequence, seed=4, **HOW)
    n_heads, d_head, d_model = model.blocks[0].attn.W_O.shape
    n = len(model.blocks) * n_heads
    drawn = np.random.RandomState(4).choice(n, int(n * 0.5), replace=False)
    assert sorted(layer * n_heads + head for layer, head in injection.neurons) == sorted(
        drawn.tolist()
    )
    assert injection.neurons.units == HEADS and injection.rows.shape == (
        len(drawn) * d_head,
        d_model,
    )
    assert f"{len(drawn) * d_head} rows" in repr(injection)
    before = [block.attn.W_O.detach().clone() for block in model.blocks]
    with injection.applied(model), torch.no_grad():
        assert float(plain_loss(model, sequence)) == pytest.approx(
            float(injection.losses[-1]), abs=1e-4
        )
        found = torch.cat([model.blocks[layer].attn.W_O[head] for layer, head in injection.neurons])
        assert torch.equal(found, injection.rows)
        for layer, block in enumerate(model.blocks):
            changed = (before[layer] != block.attn.W_O).flatten(1).any(1)
            assert torch.equal(changed, injection.neurons.mask[layer])
    check()


def test_injection_of_heads_is_adam_on_their_rows(gpt2_like: Any, sequence: Any) -> None:
    """The losses of a plain training of W_O in which other rows get no gradient."""
    if is_bridge(gpt2_like):
        pytest.skip("W_O of a Bridge is a view of a parameter, which Adam does not take")
    injection = inject(gpt2_like, sequence, seed=4, **(HOW | {"max_steps": 6}))
    weights = [block.attn.W_O for block in gpt2_like.blocks]
    adam, losses = torch.optim.Adam(weights, lr=0.05), []
    for _ in range(6):
        losses.append(loss := plain_loss(gpt2_like, sequence))
        gradients = torch.autograd.grad(loss, weights)
        for layer, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            weight.grad = gradient * injection.neurons.mask[layer][:, None, None]
        adam.step()
    assert injection.losses.tolist() == pytest.approx(
        [float(loss.detach()) for loss in losses], abs=1e-4
    )


def test_injections_of_heads_are_saved_with_their_units(
    gpt2_like: Any, make_sequences: Any, tmp_path: Path
) -> None:
    pair = make_sequences((9, 1), (8, 1))
    joint = inject_together(gpt2_like, pair, seed=0, **(HOW | {"ratio": 0.4, "max_steps": 3}))
    assert not (
        joint.injections[0].neurons & joint.injections[1].neurons
    ) and "2 x 16 rows" in repr(joint)
    for one, kind in ((joint, JointInjection), (joint.injections[0], Injection)):
        one.save(tmp_path / "injection.safetensors")
        loaded = kind.load(tmp_path / "injection.safetensors")
        first = loaded.injections[0] if isinstance(loaded, JointInjection) else loaded
        assert first.neurons == joint.injections[0].neurons and torch.equal(
            first.rows, joint.injections[0].rows
        )
    with joint.applied(gpt2_like), torch.no_grad():
        total = sum(float(plain_loss(gpt2_like, sequence)) for sequence in pair)
    assert total == pytest.approx(sum(one.loss for one in joint.final), abs=1e-3)


@pytest.mark.parametrize("distractors", [0, 1])
def test_inj_of_heads(
    gpt2_like: Any, make_sequences: Any, distractors: int, tmp_path: Path
) -> None:
    sequences = [
        replace(one, tokens=torch.cat([torch.tensor([i]), one.tokens]))
        for i, one in enumerate(make_sequences((8, 1), (9, 1)))
    ]
    options: dict[str, Any] = {
        "ratio": 0.34,
        "multiples": (1, 2),
        "max_steps": 4,
        "distractors": distractors,
        "units": HEADS,
    }
    benchmark = InjBenchmark(model=gpt2_like, sequences=sequences, **options)
    results = benchmark.run([Attribution(units=HEADS)], Store(tmp_path))
    assert results.settings["runs"][0]["units"] == {"class": "AttentionHeads"}
    seed = benchmark.groups[0].seed
    first = results.frame[results.frame["seed"] == seed]
    how = {
        "ratio": 0.34,
        "seed": seed,
        "learning_rate": 0.005 if distractors else 0.003,
        "max_steps": 4,
        "units": HEADS,
    }
    group = benchmark.groups[0].sequences
    injection = (
        inject_together(gpt2_like, group, **how)
        if distractors
        else inject(gpt2_like, group[0], **how)
    )
    truth = (
        injection.injections[0] if isinstance(injection, JointInjection) else injection
    ).neurons
    for method in (Attribution(units=HEADS), RowNorm(units=HEADS)):
        with injection.applied(gpt2_like):
            scores = method(gpt2_like, group[0])
        for multiple in (1, 2):
            mine = (
                (first["method"] == method.name)
                & (first["multiple"] == multiple)
                & (first["sequence_id"] == group[0].id)
            )
            assert first[mine]["recall"].tolist() == [
                pytest.approx(scores.top_k(0.34 * multiple).recall_of(truth))
            ]


def test_inj_refuses_methods_of_other_units(gpt2_like: Any, sequence: Any) -> None:
    benchmark = InjBenchmark(
        model=gpt2_like, sequences=[sequence], ratio=0.34, multiples=(1,), units=HEADS
    )
    with pytest.raises(
        ValueError, match=r"methods must score AttentionHeads\(\), as the benchmark"
    ):
        benchmark.run([Attribution()])


def test_ratio_without_a_head_is_refused(gpt2_like: Any, sequence: Any) -> None:
    with pytest.raises(ValueError, match=r"ratio must select at least one of 6 heads, got 0\.1"):
        inject(gpt2_like, sequence, seed=0, **(HOW | {"ratio": 0.1}))


def test_rows_that_are_copies_are_refused(gpt2_like: Any, sequence: Any) -> None:
    @dataclass(frozen=True)
    class Copied(Units):
        name: ClassVar[str] = "copies"

        def point(self, layer: int) -> str:
            return HEADS.point(layer)

        def rows(self, model: Any, layer: int) -> torch.Tensor:
            return model.blocks[layer].attn.W_O.detach().clone()

        def output(self, model: Any, layer: int) -> Any:
            return HEADS.output(model, layer)

    with pytest.raises(
        ValueError, match="units must give the model's own parameter as rows, got a copy from"
    ):
        inject(gpt2_like, sequence, seed=0, **(HOW | {"units": Copied()}))


def test_injection_of_heads_does_not_fit_another_model(
    gpt2_like: Any, llama_like: Any, sequence: Any
) -> None:
    injection = inject(gpt2_like, sequence, seed=0, **(HOW | {"max_steps": 1}))
    with (
        pytest.raises(
            ValueError, match="model must have 2 layers of 3 heads and rows of 24 entries"
        ),
        injection.applied(llama_like),
    ):
        pass
