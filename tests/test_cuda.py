"""The same numbers on a GPU: every method, injection and the masks side by side. Skipped where
there is none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_localize import METHODS, inject

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHORT: dict[str, dict[str, Any]] = {
    "hard_concrete": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "slimming": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
}
# Adam turns the last digits into steps, where a gradient is nearly zero
TOLERANCE = {"hard_concrete": 1e-2, "slimming": 1e-2}


@pytest.fixture
def exact_products() -> Any:
    """Matrix products in float32 proper, not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on_cuda(model: Any) -> Any:
    model.to("cuda")
    model.cfg.device = "cuda"
    return model


@pytest.mark.parametrize("name", METHODS)
def test_method_on_cuda_equals_cpu(
    any_model: Any, sequences: Any, exact_products: None, name: str
) -> None:
    method = METHODS[name](**SHORT.get(name, {}))
    wanted = [scores.values for scores in method.map(any_model, sequences)]
    for found, values in zip(method.map(on_cuda(any_model), sequences), wanted, strict=True):
        assert found.values.device.type == "cpu"
        assert (found.values - values).abs().max() < TOLERANCE.get(name, 1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_method_on_cuda_same_seed_same_bits(gpt2_like: Any, sequence: Any, name: str) -> None:
    method, model = METHODS[name](**SHORT.get(name, {})), on_cuda(gpt2_like)
    assert torch.equal(method(model, sequence).values, method(model, sequence).values)


def test_injection_on_cuda_equals_cpu(gpt2_like: Any, sequence: Any, exact_products: None) -> None:
    settings: dict[str, Any] = {"ratio": 0.2, "seed": 0, "learning_rate": 0.03, "max_steps": 10}
    wanted = inject(gpt2_like, sequence, **settings)
    found = inject(on_cuda(gpt2_like), sequence, **settings)
    torch.testing.assert_close(found.losses, wanted.losses, atol=1e-3, rtol=1e-3)


def test_memory_that_runs_out_on_cuda_halves_the_batch(
    gpt2_like: Any, make_sequences: Any, unchanged: Any
) -> None:
    """A real shortage: the process may take only a sliver of the card."""
    model = on_cuda(gpt2_like)
    sequences = make_sequences(*[(30, 1)] * 512)
    method = METHODS["slimming"](steps=2)
    wanted = [scores.values for scores in method.map(model, sequences, batch_size=8)]
    check = unchanged(model)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + 64 * 2**20) / total
        )
        with pytest.warns(RuntimeWarning, match="Out of memory with a batch of 512"):
            found = [scores.values for scores in method.map(model, sequences, batch_size=512)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    check()
    assert (
        max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
        < 1e-2
    )
