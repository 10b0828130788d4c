"""What each method costs for one sequence, beside the plain loop of the paper's algorithm on the
same model in the same process.

Both reference models, and random weights of another shape (on CUDA when there is one):

    pytest benchmarks/test_cost_table.py
    pytest benchmarks/test_cost_table.py --shape pythia-6.9b --dtype bfloat16

A short text against bare passes, also of ``--model X.gguf``:

    pytest benchmarks/test_cost_table.py -k sizes --shape gpt2 --shape pythia-410m

A small shape, in under 30 s on a CPU:

    pytest benchmarks/test_cost_table.py -m smoke

Seconds are wall time on CUDA and CPU time of the process elsewhere, where other programs may share
the cores. What repeats itself runs in part and is scaled up, because the whole would take hours:
Zero-Out, and the loops of Zero-Out and Integrated Gradients, on an even sample of their passes,
mask learners for a fifth of their steps; in the table of sizes these and injections for a
twentieth. The column ``measured`` says which share has been run. Memory is the peak beyond the
weights. The table and the curves go to the results folder with device and versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
from costs import (
    N_TOKENS,
    SHAPES,
    SHORT,
    SMALL,
    even,
    forward,
    forward_and_backward,
    middles,
    peak_bytes,
    post,
    random_model,
    random_sequences,
    seconds,
    seconds_and_bytes,
    setting,
    suffix_of,
)

# no early stop, so that each run does the same; a fifth is run
STEPS = {"slimming": 60, "hard_concrete": 150}
INJECT_STEPS = 100
# seconds for one sequence, pythia-6.9b in bfloat16 on an NVIDIA H200; masks at their price in map
GOALS = {
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
# of the table of sizes: other texts of DEL, and the ablated share of each layer
N_NEGATIVES = 20
DELETED = 0.02
# neurons per layer that Zero-Out is timed on, and of one layer in three that its loop is timed on
N_NEURONS = 32
MAX_PROFILED = 5.0  # seconds: the profiler keeps each kernel of a run
N_POSITIONS = 3  # positions that the loop of Integrated Gradients is timed on


# ---- the plain loops


@torch.no_grad()
def zero_out_loop(model: Any, sequence: Any, layer: int, chunk: list[int]) -> torch.Tensor:
    """Losses with the neurons of the chunk ablated, one in each row of a batch: whole forward
    passes, all logits.
    """
    tokens, positions, targets = suffix_of(sequence, model.cfg.device)

    def silence(act: torch.Tensor, hook: Any) -> torch.Tensor:
        act = act.clone()
        act[torch.arange(len(chunk)), :, chunk] = 0
        return act

    logits = model.run_with_hooks(
        tokens.expand(len(chunk), -1), return_type="logits", fwd_hooks=[(post(layer), silence)]
    )
    return -logits.float().log_softmax(-1)[:, positions, targets].mean(1)


def integrated_gradients_loop(
    model: Any, sequence: Any, layer: int, position: int, n_steps: int
) -> torch.Tensor:
    """Gradients at all points of the path of one layer at one position, side by side, in the
    sequence up to there.
    """
    tokens = sequence.tokens.to(model.cfg.device)[: position + 1]
    clean: list[torch.Tensor] = []
    with torch.no_grad():
        model.run_with_hooks(
            tokens[None], fwd_hooks=[(post(layer), lambda act, hook: clean.append(act[0, -1]))]
        )
    values = (
        (torch.linspace(0, 1, n_steps, device=tokens.device)[:, None] * clean[0].float())
        .to(clean[0].dtype)
        .requires_grad_()
    )

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
    hooks = [
        (post(layer), lambda act, hook, layer=layer: act * mask[layer].clamp(0, 1).to(act))
        for layer in range(model.cfg.n_layers)
    ]
    for _ in range(n_steps):
        logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)
        loss = -logits.float().log_softmax(-1)[0, positions, targets].mean() + mask.abs().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return mask.detach()


# ---- the table


def busy(work: Any, device: torch.device, expected: float) -> float:
    """Share of the wall time in which kernels run; nan where torch can't see kernels, and where
    they would be too many for the profiler.
    """
    sees_kernels = torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()
    if not sees_kernels or expected > MAX_PROFILED:
        return float("nan")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        wall = seconds(work, device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / wall


@dataclass(frozen=True)
class Work:
    """A method and the plain loop of its algorithm, each run in part; the scales make up for it."""

    name: str
    fast: Callable[[], object]
    loop: Callable[[], object]
    scale: float = 1
    loop_scale: float = 1
    n: int = 1  # sequences at once
    is_warm: bool = False  # the same kernels have run

    def row(self, device: torch.device, repeats: int) -> dict[str, Any]:
        if not self.is_warm:
            self.fast()  # the first run loads kernels
            self.loop()
        taken, peak = seconds_and_bytes(self.fast, device, repeats)
        loop_taken, loop_peak = seconds_and_bytes(self.loop, device, repeats)
        mine = taken * self.scale / self.n
        loops = loop_taken * self.loop_scale
        return {
            "method": self.name,
            "seconds": mine,
            "of the loop": loops,
            "ratio": loops / mine,
            "MiB": peak / 2**20,
            "MiB of the loop": loop_peak / 2**20,
            "measured": 1 / self.scale,
            "of the loop measured": 1 / self.loop_scale,
            "GPU busy": busy(self.fast, device, taken),
        }


def cost_table(
    model: Any,
    n_sequences: int = 16,
    n_neurons: int = N_NEURONS,
    steps: dict[str, int] = STEPS,
    repeats: int = 2,
) -> Any:
    """One row per method: seconds and bytes for one sequence, and of its plain loop."""
    from tl_localize.paper import published

    device = torch.device(model.cfg.device)
    model.requires_grad_(False)
    sequences = random_sequences(model, n_sequences)
    works = [
        *few_passes(model, sequences[0]),
        *zero_outs(model, sequences[0], n_neurons),
        *mask_learners(model, sequences, steps),
    ]
    rows: list[dict[str, Any]] = []
    for work in works:
        row = work.row(device, repeats)
        print(f"{work.name}: {row['seconds']:.3g} s, its loop {row['ratio']:.3g} times as many")
        rows.append(row)
    table = pd.DataFrame(rows).set_index("method")
    paper = published("cost").set_index("method")["value"]
    names = table.index.str.partition(",").get_level_values(0)
    return table.assign(**{"A6000, pythia-6.9b (paper)": paper.reindex(names).to_numpy()})


def few_passes(model: Any, sequence: Any) -> Iterator[Work]:
    from tl_localize import (
        Activations,
        Attribution,
        GradientAlignment,
        IntegratedGradients,
        IterativeAttribution,
    )

    alignment = GradientAlignment()
    rounds = IterativeAttribution()
    gradients = IntegratedGradients()
    bare = partial(forward_and_backward, model, sequence)
    yield Work(
        "activations", partial(Activations(), model, sequence), partial(forward, model, sequence)
    )
    for method, passes in (
        (Attribution(), 1),
        (alignment, alignment.points),
        (rounds, rounds.rounds),
    ):
        yield Work(method.name, partial(method, model, sequence), bare, loop_scale=passes)
    n_layers, n_targets = model.cfg.n_layers, len(sequence) - sequence.n_prefix
    places = [
        (layer, sequence.n_prefix - 1 + i)
        for layer in even(n_layers, 3)
        for i in even(n_targets, N_POSITIONS)
    ]

    def loop() -> None:
        for layer, position in places:
            integrated_gradients_loop(model, sequence, layer, position, gradients.steps)

    # layers are scaled up as if all cost the same, which is so in the loops
    share = n_layers * n_targets / len(places)
    yield Work(gradients.name, partial(gradients, model, sequence), loop, loop_scale=share)


def zero_outs(model: Any, sequence: Any, n_neurons: int) -> Iterator[Work]:
    """Zero-Out on an even sample of the neurons, and with a screen."""
    from tl_localize import ZeroOut
    from tl_localize.model.neurons import NeuronView

    view = NeuronView(model)
    layers, neurons = even(view.n_layers, 3), even(view.n_neurons, n_neurons)
    chosen = torch.zeros(view.n_layers, view.n_neurons, dtype=torch.bool)
    chosen[:, neurons] = True
    scale = chosen.numel() / int(chosen.sum())
    loop_scale = chosen.numel() / (len(layers) * len(neurons))

    def exact() -> None:
        ZeroOut().exact(view, sequence, chosen, lambda fraction: None)

    def loop(size: int) -> None:
        for layer in layers:
            for chunk in torch.tensor(neurons).split(size):
                zero_out_loop(model, sequence, layer, chunk.tolist())

    side = 8 if view.device.type == "cpu" else 64
    screened = partial(ZeroOut(screen=SCREEN), model, sequence)
    yield Work("zero_out", exact, partial(loop, 1), scale, loop_scale)
    yield Work("zero_out, loop batched", exact, partial(loop, side), scale, loop_scale)
    name = f"zero_out, screen={SCREEN}"
    yield Work(name, screened, partial(loop, 1), 1, loop_scale, is_warm=True)


def mask_learners(model: Any, sequences: Any, steps: dict[str, int]) -> Iterator[Work]:
    """A fifth of the steps of each, one sequence alone and all in ``map``."""
    from tl_localize.methods import METHODS

    for name in ("slimming", "hard_concrete"):
        n_steps = max(1, steps[name] // 5)
        kind: Any = METHODS[name]
        method = kind(steps=n_steps, stop_sparsity=1e-12)
        scale = steps[name] / n_steps
        loop = partial(mask_loop, model, sequences[0], n_steps)

        def together(method: Any = method) -> None:
            list(method.map(model, sequences))

        yield Work(name, partial(method, model, sequences[0]), loop, scale, scale)
        title = f"{name}, {len(sequences)} in map"
        n = len(sequences)
        yield Work(title, together, loop, scale, scale, n)


def size_table(
    model: Any, n_tokens: int = SHORT, share: float = 0.05, sampled: tuple[int, int] | None = None
) -> pd.DataFrame:
    """One short text through every method, an injection and the ablations of DEL, against a bare
    forward and backward pass.

    Args:
        share: of the steps of masks and injections that are run, and of the points of Integrated
            Gradients (at least two).
        sampled: layers, and neurons in each, that Zero-Out is run on; by default a batch of neurons
            in the middle of each third.
    """
    from tl_localize import (
        HardConcrete,
        IntegratedGradients,
        NeuronScores,
        Slimming,
        ZeroOut,
        inject,
    )
    from tl_localize.evals.ablation import AblationMeter, zeros
    from tl_localize.methods import METHODS, RIVALS
    from tl_localize.model.neurons import NeuronView

    model.requires_grad_(False)
    device = torch.device(model.cfg.device)
    view = NeuronView(model)
    sequence, *others = random_sequences(model, N_NEGATIVES + 1, n_tokens)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    acts = view.n_layers * view.n_neurons * n_tokens * model.cfg.dtype.itemsize
    off = {"stop_sparsity": 1e-12}

    def part(n: int) -> int:
        return max(2, round(share * n))

    masks = {"hard_concrete": HardConcrete().steps, "slimming": Slimming().steps}
    points = IntegratedGradients().steps
    kinds: dict[str, Any] = dict(METHODS)
    shortened = {name: kinds[name](steps=part(n), **off) for name, n in masks.items()}
    shortened["integrated_gradients"] = IntegratedGradients(steps=part(points))
    shares = {name: part(n) / n for name, n in masks.items()} | {
        "integrated_gradients": part(points) / points
    }
    # Zero-Out: of the screened neurons and the sample some, in a few layers.
    screened = ZeroOut(screen=SCREEN)
    each = max(1, round(SCREEN * view.n_neurons)) + screened.screen_sample
    n_of_layers, n_of_each = sampled or (3, max(1, 1024 // n_tokens))
    chosen = torch.zeros(view.n_layers, view.n_neurons, dtype=torch.bool)
    for layer in middles(view.n_layers, n_of_layers):
        chosen[layer, even(view.n_neurons, min(n_of_each, each))] = True
    shares["zero_out"] = int(chosen.sum()) / (view.n_layers * each)
    text = torch.stack([other.tokens for other in others[:2]])
    meter = AblationMeter(model, [sequence, *others], text, partial(zeros, text, 0), str)
    top = NeuronScores(
        torch.rand(view.n_layers, view.n_neurons, generator=torch.Generator().manual_seed(0))
    ).top_k(DELETED, first_layer=1)
    steps = part(INJECT_STEPS)
    shares["inject"] = steps / INJECT_STEPS
    works: dict[str, Any] = {
        "forward and backward": lambda: forward_and_backward(model, sequence),
        "forward": lambda: forward(model, sequence),
        **{
            name: partial(shortened.get(name) or method(), model, sequence)
            for name, method in METHODS.items()
            if method not in RIVALS
        },
        "zero_out": lambda: screened.exact(view, sequence, chosen, lambda fraction: None),
        "inject": lambda: inject(
            model,
            sequence,
            ratio=INJECTED,
            seed=0,
            learning_rate=0.01,
            max_steps=steps,
            stop_loss=1e-12,
        ),
        f"DEL, {N_NEGATIVES} negatives, a set of neurons": lambda: meter.effect(0, top),
    }

    def first_layer() -> None:
        """All points of the path at the layer that has the most layers above it."""

        def stop(fraction: float) -> None:
            raise StopIteration

        with suppress(StopIteration):
            IntegratedGradients().attribute_batch(view, [sequence], stop)

    rows: dict[str, dict[str, float]] = {}
    for name, work in works.items():
        work()  # the first run loads kernels
        taken = seconds(work, device) / shares.get(name, 1.0)
        peak = peak_bytes(first_layer if name == "integrated_gradients" else work, device)
        bare = rows["forward and backward"]["seconds"] if rows else taken
        rows[name] = {
            "seconds": taken,
            "bare passes": taken / bare,
            "measured": shares.get(name, 1.0),
            "MiB": peak / 2**20,
            "of the weights": peak / weights,
            "of all activations": peak / acts,
        }
    return pd.DataFrame(rows).T.rename_axis("method")


def pytest_generate_tests(metafunc: Any) -> None:
    if "costed" in metafunc.fixturenames:
        options = metafunc.config.getoption
        names = [*(options("--shape") or []), *(options("--model") or [])] or [
            "reference-gpt2",
            "reference-pythia",
        ]
        metafunc.parametrize("costed", names, scope="session", indirect=True)


@pytest.fixture(scope="session")
def costed(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """Name and model: random weights by shape, or a real model."""
    from tl_localize import load_model
    from tl_localize.model.loading import check_device

    options = request.config.getoption
    dtype = getattr(torch, options("--dtype"))
    name = request.param
    if name in SHAPES:
        if name not in SMALL and options("--device") is None and not torch.cuda.is_available():
            pytest.skip(
                f"{name} needs a CUDA device, and would measure there seconds, peak memory and GPU "
                f"busy of one sequence of {N_TOKENS} "
                "tokens by every method and its plain loop (goals for pythia-6.9b in seconds: "
                f"{GOALS}). "
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
    # on a GPU all in ten minutes
    table = cost_table(model, repeats=1 if model.cfg.device.startswith("cuda") else 2)
    if name == "pythia-6.9b":
        table["goal on an H200"] = pd.Series(GOALS)
    publish(table.round(4), name, "cost", f"Cost of one sequence ({setting(model)})")


def test_sizes(costed: tuple[str, Any], publish: Any, unchecked: Any) -> None:
    name, model = costed
    table = size_table(model)
    about = setting(model, SHORT, SHORT // 2)
    publish(
        table.round(3),
        name,
        f"cost_sizes_{str(model.cfg.dtype).removeprefix('torch.')}",
        f"One short text against bare passes ({about})",
    )
    assert (table > 0).all(axis=None)


def test_scaling_curves(costed: tuple[str, Any], publish: Any, unchecked: Any) -> None:
    """Seconds per sequence over length and number of sequences, and over layers of the reference
    models' shape, beside the loop.
    """
    from tl_localize import HardConcrete, IntegratedGradients

    name, model = costed
    device = torch.device(model.cfg.device)
    learner = HardConcrete(steps=10, stop_sparsity=1e-12)
    rows: list[dict[str, Any]] = []

    def add(curve: str, x: int, method: str, work: Any, n: float = 1) -> None:
        work()
        rows.append(
            {
                "curve": curve,
                "x": x,
                "method": method,
                "seconds per sequence": min(seconds(work, device) for _ in range(2)) / n,
            }
        )

    def add_loop(curve: str, x: int, model: Any, sequence: Any) -> None:
        """Integrated Gradients by the plain loop, on an even sample of layers and positions."""
        targets = range(sequence.n_prefix - 1, len(sequence) - 1)
        points = IntegratedGradients().steps
        sample = [
            (layer, targets[i])
            for layer in even(model.cfg.n_layers, 3)
            for i in even(len(targets), N_POSITIONS)
        ]

        def work():
            return [
                integrated_gradients_loop(model, sequence, layer, t, points) for layer, t in sample
            ]

        add(
            curve,
            x,
            "integrated_gradients, plain loop",
            work,
            len(sample) / (model.cfg.n_layers * len(targets)),
        )

    for length in (20, 40, 80, 160):
        sequence = random_sequences(model, 1, length)[0]
        add(
            "tokens",
            length,
            "integrated_gradients",
            partial(IntegratedGradients(), model, sequence),
        )
        add_loop("tokens", length, model, sequence)
        add(
            "tokens",
            length,
            "hard_concrete, 10 steps",
            partial(learner, model, sequence),
        )
    for n in (1, 4, 16):
        some = random_sequences(model, n)
        add(
            "sequences",
            n,
            "hard_concrete, 10 steps",
            lambda some=some: list(learner.map(model, some)),
            n,
        )
    for n_layers in (3, 6, 12):
        deep = random_model("reference", device, torch.float32, n_layers=n_layers)
        sequence = random_sequences(deep, 1)[0]
        curve = "layers of the reference shape"
        add(
            curve,
            n_layers,
            "integrated_gradients",
            partial(IntegratedGradients(), deep, sequence),
        )
        add_loop(curve, n_layers, deep, sequence)
    table = pd.DataFrame(rows).set_index(["curve", "x", "method"])
    publish(table.round(5), name, "cost_curves", f"Seconds per sequence ({setting(model)})")
    assert (table > 0).all(axis=None)


@pytest.mark.smoke
def test_smoke_small_shape_fills_the_whole_table(unchecked: Any) -> None:
    model = random_model(
        "small", torch.device("cpu"), torch.float32, n_layers=2, d_mlp=64, d_vocab=128
    )
    table = cost_table(
        model,
        n_sequences=2,
        n_neurons=4,
        steps={"slimming": 3, "hard_concrete": 3},
        repeats=1,
    )
    sizes = size_table(model, share=0.01, sampled=(2, 4))
    assert len(sizes) == 16 and (sizes > 0).all(axis=None)
    assert len(table) == 12 and (table[["seconds", "ratio", "MiB", "MiB of the loop"]] > 0).all(
        axis=None
    )
