"""Injection into the rows of W_O of heads: on both classes, alone and together, applied, saved, and
measured by INJ.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from architectures import tiny_bridge

from tl_localize import (
    AttentionHeads,
    Attribution,
    InjBenchmark,
    Injection,
    inject,
    inject_together,
)
from tl_localize.execution import Store
from tl_localize.model.forward import lay_out

HEADS = AttentionHeads()
HOW = {"ratio": 0.5, "learning_rate": 0.05, "max_steps": 25, "units": HEADS}


@pytest.fixture(params=["gpt2_like", "laid out", "llama_like", "bridge"])
def model(request):
    if request.param == "bridge":
        return tiny_bridge(1, {})
    if request.param == "laid out":
        return lay_out(request.getfixturevalue("gpt2_like"))
    return request.getfixturevalue(request.param)


def plain_loss(model, sequence):
    return torch.nn.functional.cross_entropy(
        model(sequence.tokens[None])[0, :-1], sequence.tokens[1:]
    )


def test_injection_trains_all_rows_of_the_drawn_heads(model, sequence, unchanged, tmp_path):
    check = unchanged(model)
    injection = inject(model, sequence, seed=4, **HOW)
    n_heads, d_head, d_model = model.blocks[0].attn.W_O.shape
    n = len(model.blocks) * n_heads
    drawn = np.random.RandomState(4).choice(n, int(n * 0.5), replace=False)
    assert {layer * n_heads + head for layer, head in injection.neurons} == set(drawn.tolist())
    assert injection.rows.shape == (len(drawn) * d_head, d_model)
    injection.save(tmp_path / "heads.safetensors")
    injection = Injection.load(tmp_path / "heads.safetensors")
    assert injection.neurons.units == HEADS
    with injection.applied(model), torch.no_grad():
        loss = float(plain_loss(model, sequence))
        found = torch.cat([model.blocks[layer].attn.W_O[head] for layer, head in injection.neurons])
    assert torch.equal(found, injection.rows)
    assert loss == pytest.approx(float(injection.losses[-1]), abs=1e-4)
    check()


@pytest.mark.parametrize("distractors", [0, 1])
def test_inj_of_heads_is_its_parts(gpt2_like, make_sequences, distractors, tmp_path):
    how = {"ratio": 0.34, "max_steps": 4, "units": HEADS}
    method = Attribution(units=HEADS)
    benchmark = InjBenchmark(
        model=gpt2_like,
        sequences=make_sequences((8, 1), (9, 1)),
        distractors=distractors,
        learning_rate=0.01,
        **how,
    )
    frame = benchmark.run([method], Store(tmp_path)).frame
    how |= {"seed": benchmark.seed, "learning_rate": 0.01}
    sequences = benchmark.groups()[0].sequences
    if distractors:
        injection = inject_together(gpt2_like, sequences, **how)
        truth = injection.injections[0].neurons
    else:
        injection = inject(gpt2_like, sequences[0], **how)
        truth = injection.neurons
    with injection.applied(gpt2_like):
        scores = method(gpt2_like, sequences[0])
    mine = frame[(frame["seed"] == how["seed"]) & (frame["sequence_id"] == sequences[0].id)]
    found = mine[mine["method"] == method.name].set_index("multiple")["recall"]
    for multiple in (1, 2):
        wanted = scores.top_k(0.34 * multiple).recall_of(truth)
        assert found[multiple] == pytest.approx(wanted)


def test_inj_refuses_methods_of_other_units(gpt2_like, sequence):
    benchmark = InjBenchmark(model=gpt2_like, sequences=[sequence], ratio=0.34, units=HEADS)
    with pytest.raises(ValueError, match="methods must score AttentionHeads"):
        benchmark.run([Attribution()])


def test_ratio_without_a_head_is_refused(gpt2_like, sequence):
    with pytest.raises(ValueError, match="at least one of 6 heads"):
        inject(gpt2_like, sequence, seed=0, **(HOW | {"ratio": 0.1}))


def test_rows_that_are_copies_are_refused(gpt2_like, sequence):
    @dataclass(frozen=True)
    class Copied(AttentionHeads):
        def rows(self, model, layer):
            return model.blocks[layer].attn.W_O.detach().clone()

    with pytest.raises(ValueError, match="must give the model's own parameter"):
        inject(gpt2_like, sequence, seed=0, **(HOW | {"units": Copied()}))
