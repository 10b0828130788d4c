"""The same numbers on a GPU: every path of the package on the CPU and on the device.

Skipped where there is no CUDA device. A path is a function of a model that gives numbers; it runs
on the CPU first and then on the device with the same sequences.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import invoke
from noise import letters
from rivals import SHORT_RIVALS, UNLEARNED

from tl_localize import (
    METHODS,
    AttentionHeads,
    Attribution,
    DelBenchmark,
    HardConcrete,
    InjBenchmark,
    IntegratedGradients,
    MemorizedSequence,
    MLPNeurons,
    NeuronScores,
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
from tl_localize.injection.recipes import Recipe, learn
from tl_localize.metrics import (
    batch_loss,
    mean_log_odds,
    mean_probability,
    predicted_suffixes,
    sequence_losses,
)
from tl_localize.model.memory import shape_of
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import SequenceBatch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHORT = SHORT_RIVALS | {
    "hard_concrete": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "slimming": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "iterative_attribution": {"share": 0.5, "rounds": 3, "contrast": 3.0},
    "refined_attribution": {"share": 0.4, "steps": 3},
}
TRAINED = 1e-2  # Adam turns the last digits into steps, where a gradient is nearly zero
INJECTED = {"ratio": 0.2, "seed": 0, "learning_rate": 0.03, "max_steps": 10}
KINDS = ("gpt2_like", "neox_like", "llama_like", "bridge")
UNITS = {"neurons": MLPNeurons(), "heads": AttentionHeads()}


@dataclass(frozen=True)
class Given:
    """What a path works with."""

    model: Any
    sequences: list[Any]
    folder: Path

    @property
    def general(self):
        return torch.randint(61, (5, 12), generator=torch.Generator().manual_seed(7))


Path_ = Callable[[Given], torch.Tensor]


def measures(given):
    chosen = ZeroOut()(given.model, given.sequences[0]).top_k(0.1)
    tokens = given.general[:1]
    device = next(given.model.parameters()).device
    hooked = given.model.run_with_hooks(tokens.to(device), fwd_hooks=chosen.dropout_hooks())
    with chosen.dropped_out(given.model):
        return torch.cat(
            [
                hooked.detach().flatten().cpu(),
                accuracy(given.model, given.sequences),
                levenshtein(given.model, given.sequences, letters),
                memorization_loss(given.model, given.sequences).detach().cpu(),
                torch.tensor([perplexity(given.model, given.general)]),
            ]
        )


def injections(given):
    injection = inject(given.model, given.sequences[0], **INJECTED)
    with injection.applied(given.model):
        learned = memorization_loss(given.model, given.sequences).detach().cpu()
    return torch.cat([injection.rows.flatten(), injection.losses, learned])


def joint_injections(given):
    injection = inject_together(given.model, given.sequences[:2], **INJECTED)
    with injection.applied(given.model):
        learned = memorization_loss(given.model, given.sequences).detach().cpu()
    return torch.cat([injection.losses.flatten(), learned])


def learned_rows(given):
    recipe = Recipe(max_steps=4, general=3)
    learned = learn(given.model, given.sequences[:2], recipe, general_tokens=given.general)
    return torch.cat([learned.losses.flatten(), *(w.flatten() for w in learned.weights.values())])


def screened(given):
    method = ZeroOut(screen=0.2, screen_sample=4)
    found = list(method.map(given.model, given.sequences))
    assert all(scores.exact is not None for scores in found)
    return torch.stack([scores.values for scores in found])


def inj(given):
    benchmark = InjBenchmark(
        given.model, given.sequences, ratio=0.1, distractors=1, max_steps=6, learning_rate=0.02
    )
    frame = benchmark.run([Attribution()]).frame.drop(columns="seconds")
    return torch.tensor(frame.select_dtypes("number").to_numpy(dtype=float))


def del_with(ablation):
    def run(given):
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
        return torch.tensor(
            resumed.frame.drop(columns="seconds").select_dtypes("number").to_numpy(dtype=float)
        )

    return run


def collection(given):
    from tl_localize.collect import Criteria, collect_memorized

    written = generated(given, torch.arange(1, 13)[:, None].repeat(1, 6), 16)
    criteria = Criteria(n_prefix=6, n_suffix=16, min_accuracy=0.5, max_distance=90, min_distinct=1)
    found = collect_memorized(given.model, list(written), criteria, decode=letters, n_dev=0)
    return torch.stack([sequence.tokens for sequence in found.sequences]).float()


def views(given):
    from tl_localize import explore, token_view

    tokens = generated(given, given.sequences[0].prefix[None], 8)[0]
    sequence = MemorizedSequence(tokens, 3, "recited")
    scores = Attribution()(given.model, sequence)
    how = {"general": given.general, "decode": letters}
    view = explore(given.model, sequence, scores, given.sequences[1:], **how)
    text = str(token_view(given.model, sequence, scores.top_k(0.2), decode=letters))
    return torch.tensor([len(view.html()) // 1000, *map(ord, text)]).float()


def generated(given, context, n):
    from tl_localize.model.forward import generate

    device = next(given.model.parameters()).device
    return torch.cat([context, generate(given.model, context.to(device), n).cpu()], 1)


def written_texts(given):
    return generated(given, given.sequences[0].prefix[None], 6).float()


PATHS = {
    "measures": (measures, 1e-4),
    "injections": (injections, TRAINED),
    "joint injections": (joint_injections, TRAINED),
    "learned rows": (learned_rows, TRAINED),
    "screened": (screened, 1e-4),
    "INJ": (inj, TRAINED),
    **{f"DEL, {name}": (del_with(name), 1e-3) for name in ("zero", "mean", "resample")},
    "collection": (collection, 0.0),
    "views": (views, 1.0),
    "written texts": (written_texts, 0.0),
}


@pytest.fixture(autouse=True)
def exact_products():
    """Matrix products in float32 proper, not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=KINDS)
def given(request, sequences, tmp_path):
    if request.param == "bridge":
        from architectures import tiny_bridge

        return Given(tiny_bridge(0, {}), sequences, tmp_path)
    return Given(request.getfixturevalue(request.param), sequences, tmp_path)


def on_cuda(given):
    given.model.to("cuda")
    given.model.cfg.device = "cuda"
    return replace(given, folder=given.folder / "device")


def check_same(path, given, tolerance):
    wanted = path(given)
    found = path(on_cuda(given))
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", METHODS)
def test_method_on_the_device_equals_cpu(given, name, units):
    method = METHODS[name](**SHORT.get(name, {}), units=UNITS[units])

    def scores(given):
        found = list(method.map(given.model, given.sequences))
        assert all(each.values.device.type == "cpu" for each in found)
        return torch.stack([each.values for each in found])

    check_same(
        scores, given, TRAINED if name in ("hard_concrete", "slimming", *UNLEARNED) else 1e-5
    )


@pytest.mark.parametrize("name", PATHS)
def test_path_on_the_device_equals_cpu(given, name):
    path, tolerance = PATHS[name]
    check_same(path, given, tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_method_on_the_device_same_seed_same_bits(gpt2_like, sequence, name):
    method = METHODS[name](**SHORT.get(name, {}))
    model = gpt2_like.to("cuda")
    model.cfg.device = "cuda"
    assert torch.equal(method(model, sequence).values, method(model, sequence).values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_the_device_gives_finite_scores(given, dtype):
    if dtype == torch.float16 and "pretend_cuda" in sys.modules:
        pytest.skip("the pretended device has the host's kernels, and no softmax of float16")
    given = on_cuda(given)
    given.model.to(dtype)
    for method in (Attribution(), Slimming(**SHORT["slimming"]), ZeroOut()):
        assert method(given.model, given.sequences[0]).values.isfinite().all()


def test_memory_that_runs_out_on_the_device_halves_the_batch(gpt2_like, make_sequences, unchanged):
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


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_command_on_the_device_equals_cpu(model_dir, tmp_path, device):
    """With the loading of a model, and scores in a file."""
    found = []
    for place in ("cpu", device):
        out = tmp_path / f"{place.replace(':', '')}.safetensors"
        text = ["--prefix", "Two roads", "--suffix", " diverged in", "--model", str(model_dir)]
        options = ["--force", "--method", "attribution", "--device", place, "--out", str(out)]
        result = invoke(["localize", *text, *options])
        assert result.exit_code == 0, result.output
        found.append(NeuronScores.load(out).values)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


# ---- waits of the host, on the pretended device

Loop = Callable[[Given, int], object]
MASKS = {"sparsity_weight": 5.0, "stop_sparsity": 1e-12}
TRAINING = INJECTED | {"learning_rate": 0.001, "stop_loss": 1e-9}


def ablated(given, n):
    """n neurons of a layer, one in each pass."""
    view = NeuronView(given.model)
    sequence = given.sequences[0]
    chosen = torch.zeros(view.n_layers, view.n_neurons, dtype=torch.bool)
    chosen[1, :n] = True
    ZeroOut(batch_tokens=len(sequence)).exact(view, sequence, chosen, lambda fraction: None)


def dropped_out(given, n):
    tokens = given.sequences[0].tokens[None].to("cuda")
    with Attribution()(given.model, given.sequences[0]).top_k(0.1).dropped_out(given.model):
        for _ in range(n):
            given.model(tokens)


LOOPS = {
    "slimming": lambda given, n: Slimming(steps=n, **MASKS)(given.model, given.sequences[0]),
    "hard_concrete": lambda given, n: list(
        HardConcrete(steps=n, initial_mask=0.9, **MASKS).map(given.model, given.sequences)
    ),
    "inject": lambda given, n: inject(
        given.model, given.sequences[0], **(TRAINING | {"max_steps": n})
    ),
    "inject_together": lambda given, n: inject_together(
        given.model, given.sequences, **(TRAINING | {"max_steps": n})
    ),
    "learn": lambda given, n: learn(
        given.model, given.sequences, Recipe(max_steps=n, stop_loss=1e-9)
    ),
    "zero_out": ablated,
    "integrated_gradients": lambda given, n: IntegratedGradients(
        steps=n, batch_tokens=len(given.sequences[0])
    )(given.model, given.sequences[0]),
    "iterative_attribution": lambda given, n: METHODS["iterative_attribution"](
        rounds=n, share=0.5, contrast=0
    )(given.model, given.sequences[0]),
    "refined_attribution": lambda given, n: METHODS["refined_attribution"](
        steps=n, share=0.5, contrast=0
    )(given.model, given.sequences[0]),
    "gradient_alignment": lambda given, n: METHODS["gradient_alignment"](points=n)(
        given.model, given.sequences[0]
    ),
    "dropped_out": dropped_out,
    "perplexity": lambda given, n: sequence_losses(given.model, given.general.repeat(n, 1), 60),
    "accuracy": lambda given, n: predicted_suffixes(given.model, given.sequences * n, 56),
}


@pytest.fixture
def waits():
    """How often the host waits for the device in the second of two calls: as the pretended device
    counts it, or as torch warns of it.
    """

    def count(work):
        work()
        if "pretend_cuda" in sys.modules:
            pretended = sys.modules["pretend_cuda"]
            pretended.watch()
            work()
            return sum(pretended.syncs().values())
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
        torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    return count


OWN_PASSES = pytest.mark.skipif(
    version("transformer-lens").startswith("4"),
    reason="a Bridge's own passes, those of transformers, wait twice and keep less",
)


@OWN_PASSES
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_waits_at_most_once_per_step(waits, neox_like, sequences, tmp_path, loop):
    given = on_cuda(Given(neox_like, sequences, tmp_path))
    more, few = (waits(partial(LOOPS[loop], given, n)) for n in (16, 6))
    assert more - few <= 10


@OWN_PASSES
def test_losses_and_layers_do_not_wait(waits, make_model, sequences):
    deep, flat = (make_model(n_layers=n).to("cuda") for n in (5, 2))
    for model in (deep, flat):
        model.cfg.device = "cuda"
    batch = SequenceBatch.of(sequences, "cuda")
    for loss in (batch_loss, mean_probability, mean_log_odds):
        assert waits(partial(loss, flat, batch)) == 0
    for name in ("activations", "attribution", "integrated_gradients", "gradient_alignment"):
        method = METHODS[name]()
        assert len({waits(partial(method, model, sequences[0])) for model in (deep, flat)}) == 1


# ---- memory

NEOX = {
    "parallel_attn_mlp": True,
    "positional_embedding_type": "rotary",
    "rotary_dim": 4,
    "rotary_adjacent_pairs": False,
    "act_fn": "gelu",
}
WIDE = {"d_model": 128, "d_mlp": 512, "n_heads": 8, "d_head": 16, "n_ctx": 64, "d_vocab": 1024}


@OWN_PASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [{"n_layers": 4}, NEOX | {"n_layers": 4}, NEOX | {"n_layers": 8, "d_vocab": 512}]
)
def test_memory_of_a_token_is_as_computed(make_model, make_sequences, shape, dtype):
    """Up to the margin of a quarter; and at most twice what is used."""
    model = make_model(**(WIDE | shape)).to("cuda", dtype)
    model.cfg.device, model.cfg.dtype = "cuda", dtype
    sequences = make_sequences(*[(64, 1)] * 12)

    def peak(work, n):
        work(n)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work(n)
        return torch.cuda.max_memory_allocated() - before

    def attribution(n):
        list(Attribution().map(model, sequences[:n], batch_size=n))

    for gradient, work in (
        (True, attribution),
        (False, lambda n: predicted_suffixes(model, sequences[:n], 64 * n)),
    ):
        used = (peak(work, 12) - peak(work, 4)) / (8 * 64)
        computed = shape_of(NeuronView(model)).token_bytes(64, gradient)
        assert used / 1.25 < computed < 2 * used
