"""What ablated neurons are clamped at, and a meter that keeps what no ablation changes."""

import numpy as np
import pytest
import torch
from noise import Noise

from tl_localize import accuracy, perplexity
from tl_localize.evals.ablation import resampled
from tl_localize.model.neurons import NeuronView

RATIO = 0.2


@pytest.mark.parametrize("ablation", ["mean", "resample"])
def test_ablations_clamp_neurons_at_values_of_general_text(gpt2_like, benchmark_of, ablation):
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

    def hold(act, hook):
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


def test_resample_depends_on_the_seed_alone(gpt2_like, benchmark_of):
    def run(**settings):
        return (
            benchmark_of(gpt2_like, ablation="resample", n_targets=2, **settings)
            .run([Noise()])
            .frame.query("method == 'noise'")["delta_perplexity"]  # Random has the seed too
        )

    first = run()
    assert first.equals(run())
    assert not first.equals(run(seed=1))


def test_each_target_has_its_own_draw(gpt2_like, general):
    view = NeuronView(gpt2_like)
    _, cache = gpt2_like.run_with_cache(general)
    acts = cache["blocks.1.mlp.hook_post"][:, 1:].flatten(0, 1)
    for target in (0, 3):
        drawn = int(np.random.default_rng([0, target]).integers(len(acts)))
        torch.testing.assert_close(resampled(general, 0, view, target)[1], acts[drawn])
