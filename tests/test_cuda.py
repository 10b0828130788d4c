"""The same numbers on a GPU: every path of the package on the CPU and on the device.

Skipped where there is no CUDA device. A path is a function of a model that gives numbers; it runs
on the CPU first and then on the device with the same sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from noise import letters

from tl_localize import (
    METHODS,
    AttentionHeads,
    Attribution,
    DelBenchmark,
    InjBenchmark,
    MemorizedSequence,
    MLPNeurons,
    RandomBaseline,
    Slimming,
    ZeroOut,
    accuracy,
    inject,
    inject_together,
    levenshtein,
    memorization_loss,
    perplexity,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHORT: dict[str, dict[str, Any]] = {
    "hard_concrete": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "slimming": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "iterative_attribution": {"share": 0.5, "rounds": 3, "contrast": 3.0},
}
TRAINED = 1e-2  # Adam turns the last digits into steps, where a gradient is nearly zero
INJECTED: dict[str, Any] = {"ratio": 0.2, "seed": 0, "learning_rate": 0.03, "max_steps": 10}
KINDS = ("gpt2_like", "neox_like", "llama_like", "bridge")
UNITS = {"neurons": MLPNeurons(), "heads": AttentionHeads()}


@dataclass(frozen=True)
class Given:
    """What a path works with."""

    model: Any
    sequences: list[Any]
    folder: Path

    @property
    def general(self) -> torch.Tensor:
        return torch.randint(61, (5, 12), generator=torch.Generator().manual_seed(7))


Path_ = Callable[[Given], torch.Tensor]


def measures(given: Given) -> torch.Tensor:
    with ZeroOut()(given.model, given.sequences[0]).top_k(0.1).dropped_out(given.model):
        return torch.cat(
            [
                accuracy(given.model, given.sequences),
                levenshtein(given.model, given.sequences, letters),
                memorization_loss(given.model, given.sequences).detach().cpu(),
                torch.tensor([perplexity(given.model, given.general)]),
            ]
        )


def injections(given: Given) -> torch.Tensor:
    injection = inject(given.model, given.sequences[0], **INJECTED)
    with injection.applied(given.model):
        learned = memorization_loss(given.model, given.sequences).detach().cpu()
    return torch.cat([injection.rows.flatten(), injection.losses, learned])


def joint_injections(given: Given) -> torch.Tensor:
    injection = inject_together(given.model, given.sequences[:2], **INJECTED)
    with injection.applied(given.model, without=0):
        learned = memorization_loss(given.model, given.sequences).detach().cpu()
    return torch.cat([injection.losses.flatten(), injection.kls.flatten(), learned])


def inj(given: Given) -> torch.Tensor:
    benchmark = InjBenchmark(
        given.model, given.sequences, ratio=0.1, distractors=1, max_steps=6, learning_rate=0.02
    )
    frame = benchmark.run([Attribution()]).frame.drop(columns="seconds")
    return torch.tensor(frame.select_dtypes("number").to_numpy(dtype=float))


def del_with(ablation: str) -> Path_:
    def run(given: Given) -> torch.Tensor:
        from tl_localize.execution import Store

        benchmark = DelBenchmark(
            given.model,
            given.sequences,
            given.general,
            ratios=(0.2,),
            n_dev=1,
            ablation=ablation,
            decode=letters,
        )
        benchmark.run([Attribution()], store=Store(given.folder))
        resumed = benchmark.run([Attribution(), RandomBaseline()], store=Store(given.folder))
        return torch.tensor(resumed.frame.select_dtypes("number").to_numpy(dtype=float))

    return run


def collection(given: Given) -> torch.Tensor:
    from tl_localize.collect import Criteria, collect_memorized

    written = generated(given, torch.arange(1, 13)[:, None].repeat(1, 6), 16)
    criteria = Criteria(n_prefix=6, n_suffix=16, min_accuracy=0.5, max_distance=90, min_distinct=1)
    found = collect_memorized(given.model, list(written), criteria, decode=letters, n_dev=0)
    return torch.stack([one.tokens for one in found.sequences]).float()


def views(given: Given) -> torch.Tensor:
    from tl_localize import explore, token_view

    tokens = generated(given, given.sequences[0].prefix[None], 8)[0]
    sequence = MemorizedSequence(tokens, 3, "recited")
    scores = Attribution()(given.model, sequence)
    view = explore(given.model, sequence, scores, given.sequences[1:], decode=letters)
    text = str(token_view(given.model, sequence, scores.top_k(0.2), decode=letters))
    return torch.tensor([len(view.html()) // 1000, *map(ord, text)]).float()


def generated(given: Given, context: torch.Tensor, n: int) -> torch.Tensor:
    from tl_localize.forward import generate

    device = next(given.model.parameters()).device
    return torch.cat([context, generate(given.model, context.to(device), n).cpu()], 1)


def written_texts(given: Given) -> torch.Tensor:
    return generated(given, given.sequences[0].prefix[None], 6).float()


PATHS: dict[str, tuple[Path_, float]] = {
    "measures": (measures, 1e-4),
    "injections": (injections, TRAINED),
    "joint injections": (joint_injections, TRAINED),
    "INJ": (inj, TRAINED),
    **{f"DEL, {name}": (del_with(name), 1e-3) for name in ("zero", "mean", "resample")},
    "collection": (collection, 0.0),
    "views": (views, 1.0),
    "written texts": (written_texts, 0.0),
}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Matrix products in float32 proper, not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=KINDS)
def given(request: pytest.FixtureRequest, sequences: list[Any], tmp_path: Path) -> Given:
    if request.param == "bridge":
        from architectures import tiny_bridge

        return Given(tiny_bridge(0, {}), sequences, tmp_path)
    return Given(request.getfixturevalue(request.param), sequences, tmp_path)


def on_cuda(given: Given) -> Given:
    given.model.to("cuda")
    given.model.cfg.device = "cuda"
    return replace(given, folder=given.folder / "device")


def check_same(path: Path_, given: Given, tolerance: float) -> None:
    wanted = path(given)
    found = path(on_cuda(given))
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", METHODS)
def test_method_on_the_device_equals_cpu(given: Given, name: str, units: str) -> None:
    method = METHODS[name](**SHORT.get(name, {}), units=UNITS[units])

    def scores(given: Given) -> torch.Tensor:
        found = list(method.map(given.model, given.sequences))
        assert all(one.values.device.type == "cpu" for one in found)
        return torch.stack([one.values for one in found])

    check_same(scores, given, TRAINED if name in ("hard_concrete", "slimming") else 1e-5)


@pytest.mark.parametrize("name", PATHS)
def test_path_on_the_device_equals_cpu(given: Given, name: str) -> None:
    path, tolerance = PATHS[name]
    check_same(path, given, tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_method_on_the_device_same_seed_same_bits(gpt2_like: Any, sequence: Any, name: str) -> None:
    method, model = METHODS[name](**SHORT.get(name, {})), gpt2_like.to("cuda")
    model.cfg.device = "cuda"
    assert torch.equal(method(model, sequence).values, method(model, sequence).values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_the_device_gives_finite_scores(given: Given, dtype: torch.dtype) -> None:
    given = on_cuda(given)
    given.model.to(dtype)
    for method in (Attribution(), Slimming(**SHORT["slimming"]), ZeroOut()):
        assert method(given.model, given.sequences[0]).values.isfinite().all()


def test_memory_that_runs_out_on_the_device_halves_the_batch(
    gpt2_like: Any, make_sequences: Any, unchanged: Any
) -> None:
    """A real shortage: the process may take only a sliver of the card."""
    model = gpt2_like.to("cuda")
    model.cfg.device = "cuda"
    sequences = make_sequences(*[(30, 1)] * 512)
    method = Slimming(**(SHORT["slimming"] | {"steps": 2}))
    wanted = [scores.values for scores in method.map(model, sequences, batch_size=8)]
    check = unchanged(model)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + 24 * 2**20) / total
        )
        with pytest.warns(RuntimeWarning, match="Out of memory with a batch of 512"):
            found = [scores.values for scores in method.map(model, sequences, batch_size=512)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    check()
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), atol=TRAINED, rtol=0)
