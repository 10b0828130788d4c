"""Agreement with the authors' own code on a tiny model (see golden/README.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tl_localize import (
    Activations,
    HardConcrete,
    IntegratedGradients,
    MemorizedSequence,
    NeuronScores,
    NeuronSet,
    Slimming,
    ZeroOut,
    accuracy,
    inject,
    levenshtein,
    load_model,
    memorization_loss,
    perplexity,
    perplexity_base2,
)
from tl_localize.methods.masks import MaskLearner

TARGETS = (0, 1, 2)
SETTINGS = {"full": (1, 0), "suffix": (16, 1)}  # prompt length, first tuned layer
RATIOS = ("r0.01", "r0.03")
SLIMMING = Slimming(learning_rate=0.01, sparsity_weight=5.0, steps=200, stop_sparsity=0.1)
HARD_CONCRETE = HardConcrete(
    learning_rate=0.01,
    sparsity_weight=10.0,
    steps=300,
    stop_sparsity=0.1,
    temperature=2 / 3,
    initial_mask=0.5,
    seed=0,
)
EARLY = {
    "slim": replace(SLIMMING, sparsity_weight=30.0, stop_sparsity=0.3),
    "hc": replace(HARD_CONCRETE, sparsity_weight=30.0, stop_sparsity=0.5),
}
EXACT = {
    "act": Activations(absolute="mean"),
    "ig": IntegratedGradients(steps=20),
    "zero": ZeroOut(),
}
DEL_METHODS = ("act", "ig", "zero", "slim", *(f"hc_s{seed}" for seed in range(5)), "random")
DEL_RATIOS = ("0.01", "0.05", "0.2")


@pytest.fixture(scope="module")
def model(golden: Path) -> Any:
    return load_model(golden, device="cpu")


@pytest.fixture(scope="module")
def reference(golden: Path) -> dict[str, np.ndarray]:
    return dict(np.load(golden / "reference.npz"))


@pytest.fixture(scope="module")
def expected(golden: Path) -> dict[str, dict[str, np.ndarray]]:
    return {
        name: dict(np.load(golden / f"{name}.npz"))
        for name in ("full", "suffix", "inject", "del_eval")
    }


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def targets(reference: dict[str, np.ndarray]) -> Any:
    def of(setting: str, *which: int) -> list[MemorizedSequence]:
        return [
            MemorizedSequence(
                torch.tensor(reference["memorized"][i]), SETTINGS[setting][0], f"t{i}"
            )
            for i in (which or TARGETS)
        ]

    return of


@pytest.fixture(scope="module")
def scored(model: Any, targets: Any) -> Any:
    """Scores of a method that does not train, all three targets side by side, computed once."""

    @cache
    def run(method: Any, setting: str) -> np.ndarray:
        return np.stack([scores.values.numpy() for scores in method.map(model, targets(setting))])

    return run


@dataclass
class Training:
    """Scores [target layer neuron], and losses and sparsity terms [step target] of every forward
    pass.
    """

    scores: np.ndarray
    losses: np.ndarray
    terms: np.ndarray


@pytest.fixture(scope="module")
def trained(model: Any, targets: Any) -> Any:
    """A mask training, its targets side by side, computed once."""

    @cache
    def run(method: Any, setting: str, *which: int) -> Training:
        seen: list[np.ndarray] = []
        terms = MaskLearner._terms

        def watched(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            found = terms(*args)
            seen.append(torch.stack(found).detach().numpy())
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MaskLearner, "_terms", watched)
            tuned = replace(method, first_layer=SETTINGS[setting][1])
            values = np.stack(
                [scores.values.numpy() for scores in tuned.map(model, targets(setting, *which))]
            )
        return Training(values, *np.stack(seen, axis=1))

    return run


# ---- the model


def test_golden_model_gives_the_recorded_logits(
    model: Any, reference: dict[str, np.ndarray]
) -> None:
    logits = model(torch.tensor(reference["memorized"][:1]).long())[0].detach().numpy()
    assert np.abs(logits - reference["logits_memorized0"]).max() < 1e-4


def test_golden_model_gives_the_recorded_neurons(
    model: Any, reference: dict[str, np.ndarray]
) -> None:
    from tl_localize.neurons import NeuronView

    with torch.no_grad(), NeuronView(model).recorded() as neurons:
        model(torch.tensor(reference["memorized"][:1]).long())
    found = np.stack([neurons[layer][0].numpy() for layer in range(4)])
    assert np.abs(found - reference["mlp_act_memorized0"]).max() < 1e-5


@pytest.mark.parametrize(
    ("tokens", "losses"), [("memorized", "loss_memorized"), ("new", "loss_new")]
)
def test_golden_memorization_loss(
    model: Any, reference: dict[str, np.ndarray], tokens: str, losses: str
) -> None:
    sequences = [MemorizedSequence(torch.tensor(row), 1) for row in reference[tokens]]
    with torch.no_grad():
        found = memorization_loss(model, sequences).numpy()
    np.testing.assert_allclose(found, reference[losses], atol=1e-5)


# ---- methods


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", EXACT)
def test_golden_scores_without_training(
    scored: Any, expected: Any, setting: str, name: str, target: int
) -> None:
    assert (
        np.abs(scored(EXACT[name], setting)[target] - expected[setting][f"{name}_t{target}"]).max()
        < 1e-6
    )


@pytest.mark.parametrize("target", TARGETS)
def test_golden_slimming_values(trained: Any, expected: Any, setting: str, target: int) -> None:
    assert (
        np.abs(
            trained(SLIMMING, setting).scores[target] - expected[setting][f"slim_t{target}"]
        ).max()
        < 2e-2
    )


@pytest.mark.parametrize("target", TARGETS)
def test_golden_slimming_correlation(
    trained: Any, expected: Any, setting: str, target: int
) -> None:
    found, wanted = trained(SLIMMING, setting).scores[target], expected[setting][f"slim_t{target}"]
    assert np.corrcoef(found.flatten(), wanted.flatten())[0, 1] > 0.999


@pytest.mark.parametrize("target", TARGETS)
def test_golden_slimming_losses(trained: Any, expected: Any, setting: str, target: int) -> None:
    np.testing.assert_allclose(
        trained(SLIMMING, setting).losses[:, target],
        expected[setting][f"slim_losses_t{target}"],
        atol=1e-3,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_golden_hard_concrete_values(
    trained: Any, expected: Any, setting: str, target: int
) -> None:
    assert (
        np.abs(
            trained(HARD_CONCRETE, setting).scores[target] - expected[setting][f"hc_t{target}"][0]
        ).max()
        < 1e-4
    )


@pytest.mark.parametrize("target", TARGETS)
def test_golden_hard_concrete_losses(
    trained: Any, expected: Any, setting: str, target: int
) -> None:
    np.testing.assert_allclose(
        trained(HARD_CONCRETE, setting).losses[:, target],
        expected[setting][f"hc_losses_t{target}_s0"],
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("name", "method", "tolerance"), [("slim", SLIMMING, 1e-3), ("hc", HARD_CONCRETE, 1e-5)]
)
def test_golden_sparsity_terms(
    trained: Any, expected: Any, setting: str, name: str, method: Any, tolerance: float
) -> None:
    np.testing.assert_allclose(
        trained(method, setting).terms[9::10, 0],
        expected[setting][f"{name}_reg_every10_t0"],
        atol=tolerance,
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_golden_hard_concrete_other_seeds(trained: Any, expected: Any, seed: int) -> None:
    found = trained(replace(HARD_CONCRETE, seed=seed), "suffix", 1).scores[0]
    assert np.abs(found - expected["suffix"]["hc_t1"][seed]).max() < 1e-4


def test_golden_hard_concrete_noise(expected: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.stack([torch.rand(4, 256, generator=generator) for _ in range(2)]).numpy()
    assert np.array_equal(steps, expected["full"]["hc_noise_seed0_first2steps"])


@pytest.mark.parametrize(("name", "tolerance"), [("slim", 2e-2), ("hc", 1e-4)])
def test_golden_early_stop_values(
    trained: Any, expected: Any, setting: str, name: str, tolerance: float
) -> None:
    assert (
        np.abs(
            trained(EARLY[name], setting, 0).scores[0] - expected[setting][f"{name}_earlystop_t0"]
        ).max()
        < tolerance
    )


@pytest.mark.parametrize("name", EARLY)
def test_golden_early_stop_at_the_same_step(
    trained: Any, expected: Any, setting: str, name: str
) -> None:
    assert len(trained(EARLY[name], setting, 0).losses) == len(
        expected[setting][f"{name}_earlystop_losses_t0"]
    )


@pytest.mark.parametrize(("name", "tolerance"), [("slim", 1e-3), ("hc", 1e-4)])
def test_golden_early_stop_losses(
    trained: Any, expected: Any, setting: str, name: str, tolerance: float
) -> None:
    wanted = expected[setting][f"{name}_earlystop_losses_t0"]
    np.testing.assert_allclose(
        trained(EARLY[name], setting, 0).losses[:, 0], wanted, atol=tolerance
    )


@pytest.mark.parametrize(
    ("name", "method", "tolerance"), [("slim", SLIMMING, 2e-2), ("hc", HARD_CONCRETE, 1e-4)]
)
@pytest.mark.parametrize("point", [1, 2])
def test_golden_trajectory(
    trained: Any, expected: Any, name: str, method: Any, tolerance: float, point: int
) -> None:
    wanted = expected["full"]
    updates = int(wanted[f"{name}_traj_steps_t0"][point]) - 1
    found = trained(replace(method, steps=updates, stop_sparsity=1e-9), "full", 0).scores[0]
    assert np.abs(found - wanted[f"{name}_traj_t0"][point]).max() < tolerance


# ---- injection


@pytest.fixture(scope="module")
def injected(model: Any, reference: dict[str, np.ndarray]) -> Any:
    @cache
    def run(ratio: str) -> tuple[MemorizedSequence, Any]:
        new = MemorizedSequence(torch.tensor(reference["new"][0]), 1, "new0")
        return new, inject(model, new, ratio=float(ratio[1:]), seed=0, learning_rate=0.05)

    return run


@pytest.mark.parametrize("ratio", RATIOS)
def test_golden_injection_draws_the_same_rows(injected: Any, expected: Any, ratio: str) -> None:
    found = injected(ratio)[1].neurons.mask.flatten().nonzero().flatten().tolist()
    assert found == expected["inject"][f"{ratio}_flat_ids_sorted"].tolist()


@pytest.mark.parametrize("ratio", RATIOS)
def test_golden_injection_takes_as_many_steps(injected: Any, expected: Any, ratio: str) -> None:
    assert abs(len(injected(ratio)[1].losses) - len(expected["inject"][f"{ratio}_losses"])) <= 1


@pytest.mark.parametrize("ratio", RATIOS)
def test_golden_injection_follows_the_losses(injected: Any, expected: Any, ratio: str) -> None:
    n = min(len(injected(ratio)[1].losses), len(expected["inject"][f"{ratio}_losses"]))
    np.testing.assert_allclose(
        injected(ratio)[1].losses.numpy()[:n], expected["inject"][f"{ratio}_losses"][:n], atol=1e-2
    )


@pytest.mark.parametrize("ratio", RATIOS)
def test_golden_injection_trains_the_rows_to_the_same_values(
    injected: Any, expected: Any, ratio: str
) -> None:
    found, wanted = injected(ratio)[1].rows.numpy(), expected["inject"][f"{ratio}_rows_after"]
    assert np.corrcoef(found.flatten(), wanted.flatten())[0, 1] > 0.9999
    assert np.abs(found - wanted).max() < 0.05  # one step of Adam


@pytest.mark.parametrize(("ratio", "converged"), [("r0.01", False), ("r0.03", True)])
def test_golden_injection_says_whether_it_converged(
    injected: Any, ratio: str, converged: bool
) -> None:
    assert injected(ratio)[1].converged is converged


@pytest.mark.parametrize("name", ["act", "ig", "zero", "slim", "hc"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_golden_injection_recalls(
    model: Any, injected: Any, golden_settings: Any, ratio: str, name: str
) -> None:
    new, injection = injected(ratio)
    methods = {
        **EXACT,
        "slim": replace(SLIMMING, sparsity_weight=100.0),
        "hc": replace(HARD_CONCRETE, sparsity_weight=100.0),
    }
    with injection.applied(model):
        scores = methods[name](model, new)
    recorded = golden_settings["inject"][ratio]["recall"][name]
    wanted = recorded[0] if isinstance(recorded, list) else recorded
    assert len(wanted) == 5
    for key, recall in wanted.items():
        per, k = key.split("@")
        chosen = scores.top_k(float(k), per="layer" if per == "layerwise" else "model")
        hits = chosen.recall_of(injection.neurons) * len(injection.neurons)
        assert abs(hits - recall * len(injection.neurons)) < 1.01, key


# ---- ablation (DEL)


@pytest.fixture(scope="module")
def decode(golden_settings: Any) -> Any:
    first, second = golden_settings["tokenizer"]["first"], golden_settings["tokenizer"]["second"]
    return lambda ids: "".join(first[i // 16] + second[i % 16] for i in ids)


@pytest.fixture(scope="module")
def measured(model: Any, reference: dict[str, np.ndarray], expected: Any, decode: Any) -> Any:
    """Accuracies, distances and perplexity with the recorded neurons ablated, computed once."""
    everything = [MemorizedSequence(torch.tensor(row), 16) for row in reference["memorized"]]
    general = torch.tensor(reference["ppl_batch"])

    @cache
    def run(method: str | None, ratio: str) -> tuple[np.ndarray, np.ndarray, float]:
        mask = torch.zeros(4, 256, dtype=torch.bool)
        if method is not None:
            for layer, ids in enumerate(expected["del_eval"][f"{method}_r{ratio}_ids"], start=1):
                mask[layer, torch.tensor(ids).long()] = True
        with NeuronSet(mask).dropped_out(model):
            return (
                accuracy(model, everything).numpy(),
                levenshtein(model, everything, decode).numpy(),
                perplexity_base2(model, general),
            )

    return run


def test_golden_accuracy_before(measured: Any, expected: Any) -> None:
    np.testing.assert_allclose(measured(None, "")[0], expected["del_eval"]["acc_before"], atol=1e-6)


def test_golden_distance_before(measured: Any, expected: Any) -> None:
    assert measured(None, "")[1].tolist() == expected["del_eval"]["dist_before"].tolist()


def test_golden_perplexity_before(measured: Any, golden_settings: Any) -> None:
    assert measured(None, "")[2] == pytest.approx(
        golden_settings["del_eval"]["ppl_before"], abs=1e-4
    )


def test_golden_perplexity_is_below_its_base_2_namesake(
    model: Any, reference: dict[str, np.ndarray]
) -> None:
    general = torch.tensor(reference["ppl_batch"])
    assert perplexity(model, general) == pytest.approx(
        perplexity_base2(model, general) ** (1 / np.log(2)), rel=0.05
    )


@pytest.mark.parametrize("ratio", DEL_RATIOS)
@pytest.mark.parametrize("method", DEL_METHODS)
def test_golden_accuracy_after(measured: Any, expected: Any, method: str, ratio: str) -> None:
    np.testing.assert_allclose(
        measured(method, ratio)[0], expected["del_eval"][f"{method}_r{ratio}_acc_after"], atol=1e-6
    )


@pytest.mark.parametrize("ratio", DEL_RATIOS)
@pytest.mark.parametrize("method", DEL_METHODS)
def test_golden_distance_after(measured: Any, expected: Any, method: str, ratio: str) -> None:
    assert (
        measured(method, ratio)[1].tolist()
        == expected["del_eval"][f"{method}_r{ratio}_dist_after"].tolist()
    )


@pytest.mark.parametrize("ratio", DEL_RATIOS)
@pytest.mark.parametrize("method", DEL_METHODS)
def test_golden_perplexity_after(
    measured: Any, golden_settings: Any, method: str, ratio: str
) -> None:
    assert measured(method, ratio)[2] == pytest.approx(
        golden_settings["del_eval"][method][ratio]["ppl_after"], abs=1e-4
    )


@pytest.mark.parametrize("ratio", DEL_RATIOS)
@pytest.mark.parametrize("method", ["act", "ig", "zero", "random"])
def test_golden_floor_of_the_ratio_chooses_the_neurons_that_were_silenced(
    expected: Any, method: str, ratio: str
) -> None:
    values = (
        expected["del_eval"]["random_attribution"]
        if method == "random"
        else expected["suffix"][f"{method}_t0"]
    )
    chosen = NeuronScores(torch.tensor(values)).top_k(float(ratio), first_layer=1, rounding="floor")
    wanted = np.zeros((4, 256), dtype=bool)
    for layer, ids in enumerate(expected["del_eval"][f"{method}_r{ratio}_ids"], start=1):
        wanted[layer, ids] = True
    assert np.array_equal(chosen.mask.numpy(), wanted)
