"""What each method costs for one sequence, beside the plain loop of the paper's algorithm on the same model in the same process.

pytest benchmarks/test_cost_table.py                                          # both reference models
pytest benchmarks/test_cost_table.py --shape pythia-6.9b --dtype bfloat16     # random weights of that shape, CUDA when there is one
pytest benchmarks/test_cost_table.py -m smoke                                 # a small shape, under 30 s on a CPU

Seconds are wall time on CUDA and CPU time of the process elsewhere, where other programs may share the cores. What repeats itself runs
in part and is scaled up, because the whole would take hours: Zero-Out, and the loops of Zero-Out and Integrated Gradients, on an even
sample of their passes, mask learners and injections for a fifth of their steps; the column ``measured`` says which share has been run.
Memory is the peak beyond the weights. The table and the curves go to the results folder with device and versions.
"""

from __future__ import annotations

import platform
import time
import weakref
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

N_TOKENS, N_PREFIX = 80, 32  # the paper's
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"n_layers": 3, "d_model": 64, "n_heads": 4, "d_mlp": 256, "d_vocab": 512},
    "reference": {"n_layers": 6, "d_model": 192, "n_heads": 6, "d_mlp": 1536, "d_vocab": 4096},
    "gpt2": {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_mlp": 3072, "d_vocab": 50257},
    "gpt2-xl": {"n_layers": 48, "d_model": 1600, "n_heads": 25, "d_mlp": 6400, "d_vocab": 50257},
    "pythia-2.8b": {"n_layers": 32, "d_model": 2560, "n_heads": 32, "d_mlp": 10240, "d_vocab": 50304},
    "pythia-6.9b": {"n_layers": 32, "d_model": 4096, "n_heads": 32, "d_mlp": 16384, "d_vocab": 50432},
}
SMALL = ("small", "reference", "gpt2")  # shapes that a CPU can do
NEOX: dict[str, Any] = {"act_fn": "gelu", "parallel_attn_mlp": True, "positional_embedding_type": "rotary", "rotary_adjacent_pairs": False}
STEPS = {"slimming": 60, "hard_concrete": 200, "inject": 100}  # no early stop, so that each run does the same; a fifth is run
GOALS = {  # seconds for one sequence, pythia-6.9b in bfloat16 on an NVIDIA H200; masks at their price in map
    "activations": 0.1,
    "attribution": 0.3,
    "slimming, 16 in map": 2,
    "hard_concrete, 16 in map": 6,
    "integrated_gradients": 10,
    "zero_out": 15 * 60,
    "zero_out, screen=0.05": 60,
}
INJECTED = 0.01  # of all rows
SCREEN = 0.05  # keeps all of the exact top 1 %, or nearly: benchmarks/test_screen_recall.py
N_NEURONS = 32  # neurons per layer that Zero-Out is timed on, and of one layer in three that its loop is timed on
N_POSITIONS = 3  # positions that the loop of Integrated Gradients is timed on


def random_model(shape: str, device: torch.device, dtype: torch.dtype, **settings: Any) -> Any:
    """A model of a known shape with random weights, made where it is to run."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    from tl_localize.host.seam import lay_out

    sizes = SHAPES[shape] | settings
    d_head = sizes["d_model"] // sizes["n_heads"]
    family = NEOX | {"rotary_dim": d_head // 4} if shape.startswith("pythia") else {"act_fn": "gelu_new"}
    config = {"n_ctx": 512, "d_head": d_head, "normalization_type": "LN", "default_prepend_bos": False, "init_weights": False}
    with torch.device(device):
        model = HookedTransformer(
            HookedTransformerConfig(**(config | family | sizes), device=str(device), dtype=dtype), move_to_device=False
        )
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith((".w", ".b")) or ".b_" in name:
                    parameter.fill_(1.0 if name.endswith(".w") else 0.0)
                else:
                    parameter.normal_(0.0, 0.02, generator=generator)
    return lay_out(model.eval())  # as load_model does


def random_sequences(model: Any, n: int, n_tokens: int = N_TOKENS) -> list[Any]:
    from tl_localize import MemorizedSequence

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.cfg.d_vocab, (n, n_tokens), generator=generator)
    return [MemorizedSequence(row, min(N_PREFIX, n_tokens // 2), f"r{i}") for i, row in enumerate(tokens)]


# ---- clocks ----------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside the ``with`` block that are alive, and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen | before:
                    self.seen.add(storage._cdata)
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, key: int, n_bytes: int) -> None:
        self.seen.discard(key)
        self.alive -= n_bytes


def seconds(work: Any, device: torch.device) -> float:
    """Wall time on CUDA, CPU time of this process elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_bytes(work: Any, device: torch.device) -> int:
    """Most memory that tensors took beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        work()
    return live.peak


# ---- the plain loops -------------------------------------------------------------------------------------------------


def post(layer: int) -> str:
    return f"blocks.{layer}.mlp.hook_post"


def suffix_of(sequence: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the positions that predict a suffix token, and those tokens."""
    tokens = sequence.tokens.to(device)
    positions = torch.arange(sequence.n_prefix - 1, len(tokens) - 1, device=device)
    return tokens, positions, tokens[positions + 1]


@torch.no_grad()
def zero_out_loop(model: Any, sequence: Any, layer: int, chunk: list[int]) -> torch.Tensor:
    """Losses with the neurons of the chunk ablated, one in each row of a batch: whole forward passes, all logits."""
    tokens, positions, targets = suffix_of(sequence, model.cfg.device)

    def silence(act: torch.Tensor, hook: Any) -> torch.Tensor:
        act = act.clone()
        act[torch.arange(len(chunk)), :, chunk] = 0
        return act

    logits = model.run_with_hooks(tokens.expand(len(chunk), -1), return_type="logits", fwd_hooks=[(post(layer), silence)])
    return -logits.float().log_softmax(-1)[:, positions, targets].mean(1)


def integrated_gradients_loop(model: Any, sequence: Any, layer: int, position: int, n_steps: int) -> torch.Tensor:
    """Gradients at all points of the path of one layer at one position, side by side, in the sequence up to there."""
    tokens = sequence.tokens.to(model.cfg.device)[: position + 1]
    clean: list[torch.Tensor] = []
    with torch.no_grad():
        model.run_with_hooks(tokens[None], fwd_hooks=[(post(layer), lambda act, hook: clean.append(act[0, -1]))])
    values = (torch.linspace(0, 1, n_steps, device=tokens.device)[:, None] * clean[0].float()).to(clean[0].dtype).requires_grad_()

    def put(act: torch.Tensor, hook: Any) -> torch.Tensor:
        return torch.cat([act[:, :-1], values[:, None]], dim=1)

    logits = model.run_with_hooks(tokens.expand(n_steps, -1), fwd_hooks=[(post(layer), put)])
    probability = logits[:, -1].float().softmax(-1)[:, sequence.tokens[position + 1]]
    return torch.autograd.grad(probability.sum(), values)[0]


def mask_loop(model: Any, sequence: Any, n_steps: int) -> torch.Tensor:
    """Steps of a mask over all neurons by torch's Adam: one sequence, all logits."""
    tokens, positions, targets = suffix_of(sequence, model.cfg.device)
    mask = torch.ones(model.cfg.n_layers, model.cfg.d_mlp, device=tokens.device, requires_grad=True)
    adam = torch.optim.Adam([mask], lr=1e-3)
    hooks = [(post(layer), lambda act, hook, layer=layer: act * mask[layer].clamp(0, 1).to(act)) for layer in range(model.cfg.n_layers)]
    for _ in range(n_steps):
        logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)
        loss = -logits.float().log_softmax(-1)[0, positions, targets].mean() + mask.abs().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return mask.detach()


def forward(model: Any, sequence: Any) -> None:
    with torch.no_grad():
        model(sequence.tokens.to(model.cfg.device)[None])


def forward_and_backward(model: Any, sequence: Any) -> None:
    """The loss, and its gradient back to the neurons of the first layer."""
    mask_loop_once = torch.ones(model.cfg.d_mlp, device=model.cfg.device, dtype=model.cfg.dtype, requires_grad=True)
    tokens, positions, targets = suffix_of(sequence, model.cfg.device)
    logits = model.run_with_hooks(tokens[None], fwd_hooks=[(post(0), lambda act, hook: act * mask_loop_once)])
    (-logits.float().log_softmax(-1)[0, positions, targets].mean()).backward()


# ---- the table -------------------------------------------------------------------------------------------------------


def even(n: int, k: int) -> list[int]:
    """k of n numbers, evenly spread."""
    return sorted({i * n // k for i in range(min(n, k))})


def busy(work: Any, device: torch.device) -> float:
    """Share of the wall time in which kernels run; nan without CUDA."""
    if device.type != "cuda":
        return float("nan")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        wall = seconds(work, device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / wall


def cost_table(model: Any, n_sequences: int = 16, n_neurons: int = N_NEURONS, steps: dict[str, int] = STEPS, repeats: int = 2) -> Any:
    """One row per method: seconds and bytes for one sequence, and of its plain loop."""
    from tl_localize import (
        Activations,
        Attribution,
        GradientAlignment,
        HardConcrete,
        IntegratedGradients,
        IterativeAttribution,
        Slimming,
        ZeroOut,
        inject_many,
    )
    from tl_localize.neurons import NeuronView
    from tl_localize.report.paper import published

    device, view = torch.device(model.cfg.device), NeuronView(model)
    n_layers, d_mlp = view.n_layers, view.n_neurons
    model.requires_grad_(False)
    sequences = random_sequences(model, n_sequences)
    one = sequences[0]
    n_targets = len(one) - one.n_prefix
    paper = published("cost").set_index("method")["value"]
    some_layers, some_neurons = even(n_layers, 3), even(d_mlp, n_neurons)
    # A sample of layers is scaled up as if all layers cost the same, which is so in the loops.
    loops_of_zero_out = n_layers * d_mlp / (len(some_layers) * len(some_neurons))
    chosen = torch.zeros(n_layers, d_mlp, dtype=torch.bool)
    chosen[:, some_neurons] = True
    positions = [one.n_prefix - 1 + i for i in even(n_targets, N_POSITIONS)]
    side = 8 if device.type == "cpu" else 64
    points = IntegratedGradients().steps
    run = {name: max(1, n // 5) for name, n in steps.items()}
    off = {"stop_sparsity": 1e-12}
    masks = {"slimming": Slimming(steps=run["slimming"], **off), "hard_concrete": HardConcrete(steps=run["hard_concrete"], **off)}

    def zero_out() -> Any:
        """The exact part, on an even sample of the neurons."""
        method = ZeroOut()
        return lambda: method._exact(view, one, chosen, torch.zeros(n_layers, d_mlp), lambda fraction: None)

    def zero_out_loops(size: int) -> Any:
        chunks = torch.tensor(some_neurons).split(size)
        return lambda: [zero_out_loop(model, one, layer, chunk.tolist()) for layer in some_layers for chunk in chunks]

    passes = n_layers * d_mlp / int(chosen.sum())
    in_loop = n_layers * n_targets / (len(some_layers) * len(positions))
    rows: list[tuple[str, Any, float, Any, float]] = [  # name, work, what its seconds count times, the loop, its
        ("activations", lambda: Activations()(model, one), 1, lambda: forward(model, one), 1),
        ("attribution", lambda: Attribution()(model, one), 1, lambda: forward_and_backward(model, one), 1),
        (
            "gradient_alignment",
            lambda: GradientAlignment()(model, one),
            1,
            lambda: forward_and_backward(model, one),
            GradientAlignment().points,
        ),
        (
            "iterative_attribution",
            lambda: IterativeAttribution()(model, one),
            1,
            lambda: forward_and_backward(model, one),
            IterativeAttribution().rounds,
        ),
        (
            "integrated_gradients",
            lambda: IntegratedGradients()(model, one),
            1,
            lambda: [integrated_gradients_loop(model, one, layer, t, points) for layer in some_layers for t in positions],
            in_loop,
        ),
        ("zero_out", zero_out(), passes, zero_out_loops(1), loops_of_zero_out),
        ("zero_out, loop batched", zero_out(), passes, zero_out_loops(side), loops_of_zero_out),
        (f"zero_out, screen={SCREEN}", lambda: ZeroOut(screen=SCREEN)(model, one), 1, zero_out_loops(1), loops_of_zero_out),
    ]
    for name, method in masks.items():
        scale = steps[name] / run[name]
        loop, single = (lambda name=name: mask_loop(model, one, run[name])), (lambda method=method: method(model, one))
        together = lambda method=method: list(method.map(model, sequences))  # noqa: E731
        rows.append((name, single, scale, loop, scale))
        rows.append((f"{name}, {n_sequences} in map", together, scale, single, scale))

    def injected(some: list[Any]) -> Any:
        settings = {"ratio": INJECTED, "learning_rate": 0.01, "max_steps": run["inject"], "stop_loss": 1e-12}
        return lambda: list(inject_many(model, some, seeds=range(len(some)), **settings))

    scale = steps["inject"] / run["inject"]
    rows.append((f"inject, {n_sequences} in inject_many", injected(sequences), scale, injected([one]), scale))
    found: list[dict[str, Any]] = []
    for name, fast, scale, loop, loop_scale in rows:
        fast(), loop()  # the first run loads kernels
        n = n_sequences if f", {n_sequences} in" in name else 1
        taken = [(seconds(fast, device) * scale / n, seconds(loop, device) * loop_scale) for _ in range(repeats)]
        mine, loops = (min(values) for values in zip(*taken, strict=True))
        found.append(
            {
                "method": name,
                "seconds": mine,
                "of the loop": loops,
                "ratio": loops / mine,
                "MiB": peak_bytes(fast, device) / 2**20,
                "MiB of the loop": peak_bytes(loop, device) / 2**20,
                "measured": 1 / scale,
                "of the loop measured": 1 / loop_scale,
                "GPU busy": busy(fast, device),
                "A6000, pythia-6.9b (paper)": paper.get(name.partition(",")[0], float("nan")),
            }
        )
    return pd.DataFrame(found).set_index("method")


def setting(model: Any) -> str:
    device = torch.device(model.cfg.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"{name}, {str(model.cfg.dtype).removeprefix('torch.')}, torch {torch.__version__}, {N_TOKENS} tokens, prefix {N_PREFIX}"


def pytest_generate_tests(metafunc: Any) -> None:
    if "costed" in metafunc.fixturenames:
        options = metafunc.config.getoption
        names = [*(options("--shape") or []), *(options("--model") or [])] or ["reference-gpt2", "reference-pythia"]
        metafunc.parametrize("costed", names, scope="session", indirect=True)


@pytest.fixture(scope="session")
def costed(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """Name and model: random weights by shape, or a real model."""
    from tl_localize import load_model
    from tl_localize.evals.presets import parse_dtype
    from tl_localize.models import check_device

    options = request.config.getoption
    dtype, name = parse_dtype(options("--dtype")), request.param
    if name in SHAPES:
        if name not in SMALL and options("--device") is None and not torch.cuda.is_available():
            pytest.skip(
                f"{name} needs a CUDA device, and would measure there seconds, peak memory and GPU busy of one sequence of {N_TOKENS} "
                f"tokens by every method and its plain loop (goals for pythia-6.9b in seconds: {GOALS}). "
                "--device cpu does it here, in hours."
            )
        return name, random_model(name, check_device(options("--device")), dtype)
    return name, load_model(name, options("--device"), dtype)


@pytest.fixture
def unchecked() -> Any:
    """jaxtyping's checks, which would be timed with the rest, are off."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_cost_table(costed: tuple[str, Any], publish: Any, unchecked: Any) -> None:
    name, model = costed
    table = cost_table(model)
    if name == "pythia-6.9b":
        table["goal on an H200"] = pd.Series(GOALS)
    publish(table.round(4), name, "cost", f"Cost of one sequence ({setting(model)})")


def test_scaling_curves(costed: tuple[str, Any], publish: Any, unchecked: Any) -> None:
    """Seconds per sequence over length and number of sequences, and over layers of the reference models' shape, beside the loop."""
    from tl_localize import HardConcrete, IntegratedGradients

    name, model = costed
    device = torch.device(model.cfg.device)
    learner = HardConcrete(steps=10, stop_sparsity=1e-12)
    rows: list[dict[str, Any]] = []

    def add(curve: str, x: int, method: str, work: Any, n: float = 1) -> None:
        work()
        rows.append({"curve": curve, "x": x, "method": method, "seconds per sequence": min(seconds(work, device) for _ in range(2)) / n})

    def add_loop(curve: str, x: int, model: Any, one: Any) -> None:
        """Integrated Gradients by the plain loop, on an even sample of layers and positions."""
        targets, points = range(one.n_prefix - 1, len(one) - 1), IntegratedGradients().steps
        sample = [(layer, targets[i]) for layer in even(model.cfg.n_layers, 3) for i in even(len(targets), N_POSITIONS)]
        work = lambda: [integrated_gradients_loop(model, one, layer, t, points) for layer, t in sample]  # noqa: E731
        add(curve, x, "integrated_gradients, plain loop", work, len(sample) / (model.cfg.n_layers * len(targets)))

    for length in (20, 40, 80, 160):
        one = random_sequences(model, 1, length)[0]
        add("tokens", length, "integrated_gradients", lambda one=one: IntegratedGradients()(model, one))
        add_loop("tokens", length, model, one)
        add("tokens", length, "hard_concrete, 10 steps", lambda one=one: learner(model, one))
    for n in (1, 4, 16):
        some = random_sequences(model, n)
        add("sequences", n, "hard_concrete, 10 steps", lambda some=some: list(learner.map(model, some)), n)
    for n_layers in (3, 6, 12):
        deep = random_model("reference", device, torch.float32, n_layers=n_layers)
        one, curve = random_sequences(deep, 1)[0], "layers of the reference shape"
        add(curve, n_layers, "integrated_gradients", lambda deep=deep, one=one: IntegratedGradients()(deep, one))
        add_loop(curve, n_layers, deep, one)
    table = pd.DataFrame(rows).set_index(["curve", "x", "method"])
    publish(table.round(5), name, "cost_curves", f"Seconds per sequence ({setting(model)})")
    assert (table > 0).all(axis=None)


@pytest.mark.smoke
def test_smoke_small_shape_fills_the_whole_table(unchecked: Any) -> None:
    model = random_model("small", torch.device("cpu"), torch.float32, n_layers=2, d_mlp=64, d_vocab=128)
    table = cost_table(model, n_sequences=2, n_neurons=4, steps={"slimming": 3, "hard_concrete": 3, "inject": 3}, repeats=1)
    assert len(table) == 13 and (table[["seconds", "ratio", "MiB", "MiB of the loop"]] > 0).all(axis=None)
