"""What ablated neurons are clamped at, and a meter that keeps what no ablation changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from noise import Noise

from tl_localize import accuracy, perplexity
from tl_localize.evals import DelResults, Mean, Resample, Zero
from tl_localize.execution import Store

RATIO = 0.2


@pytest.mark.parametrize("ablation", ["mean", "resample"])
def test_ablations_clamp_neurons_at_values_of_general_text(
    gpt2_like: Any, benchmark_of: Any, ablation: Any
) -> None:
    """In float64: a perplexity of 330 has 1.6e-4 for each rounding of its loss in float32."""
    gpt2_like.cfg.dtype = torch.float64
    gpt2_like.double()
    benchmark = benchmark_of(gpt2_like, ablation=ablation, ratios=(RATIO,), n_targets=1)
    results = benchmark.run([Noise()])
    target = benchmark.test_sequences[0]
    mask = Noise()(gpt2_like, target).top_k(RATIO, first_layer=1, rounding="floor").mask
    _, cache = gpt2_like.run_with_cache(benchmark.general_tokens)
    acts = cache["blocks.1.mlp.hook_post"][:, 1:]  # [5 11 neuron]
    drawn = int(np.random.default_rng([0, 0]).integers(55))
    value = acts.mean((0, 1)) if ablation == "mean" else acts.flatten(0, 1)[drawn]

    def hold(act: torch.Tensor, hook: Any) -> torch.Tensor:
        return torch.where(mask[1], value, act)

    before = perplexity(gpt2_like, benchmark.general_tokens)
    with gpt2_like.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", hold)]):
        after = perplexity(gpt2_like, benchmark.general_tokens)
        expected = accuracy(gpt2_like, benchmark.test_sequences)
    row = results.frame.iloc[0]
    assert row["delta_perplexity"] == pytest.approx(after - before, abs=1e-5)
    changed = (
        results.confusion["noise", RATIO].iloc[0].to_numpy() + results.before["accuracy"].to_numpy()
    )
    assert changed == pytest.approx(expected.numpy(), abs=1e-6)
    assert row["ablation"] == ablation


def test_resample_depends_on_the_seed_alone(gpt2_like: Any, benchmark_of: Any) -> None:
    def run(**settings: Any) -> pd.Series:
        return (
            benchmark_of(gpt2_like, ablation="resample", **settings)
            .run([Noise()])
            .frame["delta_perplexity"]
        )

    assert run().equals(run())
    assert not run().equals(run(seed=1))


@dataclass(frozen=True)
class Constant:
    """An ablation of a user's own."""

    value: float
    name: str = "constant"

    def __call__(self, neurons: Any, target: int) -> torch.Tensor:
        return torch.full((neurons.n_layers, neurons.n_neurons), self.value)


def test_ablations_are_what_their_names_say(
    gpt2_like: Any, benchmark_of: Any, general: torch.Tensor
) -> None:
    pairs = {
        "zero": [Zero(), Constant(0.0)],
        "mean": [Mean(general)],
        "resample": [Resample(general, 3)],
    }
    for name, ablations in pairs.items():
        by_name = benchmark_of(gpt2_like, ablation=name, n_targets=2, seed=3).run([Noise()])
        for ablation in ablations:
            found = benchmark_of(gpt2_like, ablation=ablation, n_targets=2, seed=3).run([Noise()])
            pd.testing.assert_frame_equal(
                found.frame.drop(columns="ablation"), by_name.frame.drop(columns="ablation")
            )
            assert set(found.frame["ablation"]) == {ablation.name}


def test_ablation_of_a_user_works_everywhere(
    gpt2_like: Any, benchmark_of: Any, tmp_path: Path
) -> None:
    benchmark = benchmark_of(gpt2_like, ablation=Constant(0.5), n_targets=2)
    alone, kept = benchmark.run([Noise()]), benchmark.run([Noise()], Store(tmp_path))
    pd.testing.assert_frame_equal(alone.frame, kept.frame)
    pd.testing.assert_frame_equal(DelResults.of(Store(tmp_path)).frame, kept.frame)
    zero = benchmark_of(gpt2_like, n_targets=2).run([Noise()])
    assert not alone.frame["delta_perplexity"].equals(zero.frame["delta_perplexity"])
    assert "constant, 20 % of each layer, 2 sequences" in alone.table().index.get_level_values(0)
    with pytest.raises(
        ValueError,
        match=r"ablation: .*Constant.* 0.5.* in the folder, .*Constant.* 0.6.* now",
    ):
        replace(benchmark, ablation=Constant(0.6)).run([Noise()], Store(tmp_path))
    by_function = replace(
        benchmark, ablation=lambda neurons, target: Constant(0.5)(neurons, target)
    ).run([Noise()])
    assert by_function.frame["delta_perplexity"].equals(alone.frame["delta_perplexity"])


def test_ablation_of_another_shape_is_refused(
    gpt2_like: Any, benchmark_of: Any, unchecked: None
) -> None:
    with pytest.raises(
        ValueError, match=r"ablation must give values of the shape \(2, 48\), got \(48,\) from"
    ):
        benchmark_of(gpt2_like, ablation=lambda neurons, target: torch.zeros(48)).run([Noise()])
