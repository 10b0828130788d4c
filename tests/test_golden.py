"""Agreement with the authors' own code on a tiny model (see golden/README.md); of DEL in
tests/evals/test_del_benchmark.py.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from tl_localize import (
    Activations,
    HardConcrete,
    IntegratedGradients,
    MemorizedSequence,
    Slimming,
    ZeroOut,
    inject,
    load_model,
    memorization_loss,
)
from tl_localize.methods.masks import MaskLearner

TARGETS = (0, 1)
SETTINGS = {"full": (1, 0), "suffix": (16, 1)}  # prompt length, first tuned layer
RATIOS = ("r0.01", "r0.03")
INJECTED = {"seed": 0, "learning_rate": 0.05}
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


@pytest.fixture(scope="module")
def model(golden):
    return load_model(golden, device="cpu")


@pytest.fixture(scope="module")
def reference(golden):
    return dict(np.load(golden / "reference.npz"))


@pytest.fixture(scope="module")
def expected(golden):
    return {name: dict(np.load(golden / f"{name}.npz")) for name in ("full", "suffix", "inject")}


@pytest.fixture(params=SETTINGS)
def setting(request):
    return request.param


def near(found, wanted, tolerance):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def targets(reference):
    def of(setting, *which):
        return [
            MemorizedSequence(
                torch.tensor(reference["memorized"][i]), SETTINGS[setting][0], f"t{i}"
            )
            for i in (which or TARGETS)
        ]

    return of


@dataclass
class Training:
    """Scores [target layer neuron], and losses and sparsity terms [step target] of every forward
    pass.
    """

    scores: np.ndarray
    losses: np.ndarray
    terms: np.ndarray


@pytest.fixture
def train(model, targets):
    """A mask training, its targets side by side."""

    def run(method, setting, *which):
        seen = []
        terms = MaskLearner._terms

        def watched(*args):
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


def test_golden_model_gives_the_recorded_logits(model, reference):
    logits = model(torch.tensor(reference["memorized"][:1]).long())[0].detach().numpy()
    assert np.abs(logits - reference["logits_memorized0"]).max() < 1e-4


def test_golden_model_gives_the_recorded_neurons(model, reference):
    from tl_localize.model.neurons import NeuronView

    with torch.no_grad(), NeuronView(model).recorded() as neurons:
        model(torch.tensor(reference["memorized"][:1]).long())
    found = np.stack([neurons[layer][0].numpy() for layer in range(4)])
    assert np.abs(found - reference["mlp_act_memorized0"]).max() < 1e-5


@pytest.mark.parametrize(
    ("tokens", "losses"), [("memorized", "loss_memorized"), ("new", "loss_new")]
)
def test_golden_memorization_loss(model, reference, tokens, losses):
    sequences = [MemorizedSequence(torch.tensor(row), 1) for row in reference[tokens]]
    with torch.no_grad():
        found = memorization_loss(model, sequences).numpy()
    np.testing.assert_allclose(found, reference[losses], atol=1e-5)


# ---- methods


@pytest.mark.parametrize("name", EXACT)
def test_golden_scores_without_training(model, targets, expected, setting, name):
    found = EXACT[name].map(model, targets(setting))
    for target, scores in enumerate(found):
        near(scores.values, expected[setting][f"{name}_t{target}"], 1e-6)


@pytest.mark.parametrize(
    ("setting", "name", "method", "values", "losses", "terms"),
    [
        ("full", "slim", SLIMMING, 2e-2, 1e-3, 1e-3),
        ("suffix", "slim", SLIMMING, 2e-2, 1e-3, 1e-3),
        ("full", "hc", HARD_CONCRETE, 1e-4, 1e-4, 1e-5),
    ],
)
def test_golden_masks(train, expected, setting, name, method, values, losses, terms):
    found, wanted = train(method, setting), expected[setting]
    seed = "_s0" if name == "hc" else ""
    for target, scores in enumerate(found.scores):
        own = wanted[f"{name}_t{target}"].reshape(-1, *scores.shape)[0]  # of the first seed
        near(scores, own, values)
        assert np.corrcoef(scores.flatten(), own.flatten())[0, 1] > 0.999
        near(found.losses[:, target], wanted[f"{name}_losses_t{target}{seed}"], losses)
    near(found.terms[9::10, 0], wanted[f"{name}_reg_every10_t0"], terms)


def test_golden_hard_concrete_of_a_suffix_and_another_seed(train, expected):
    found = train(replace(HARD_CONCRETE, seed=2), "suffix", 1)
    near(found.scores[0], expected["suffix"]["hc_t1"][2], 1e-4)
    near(found.losses[:, 0], expected["suffix"]["hc_losses_t1_s2"], 1e-4)


def test_golden_hard_concrete_noise(expected):
    generator = torch.Generator().manual_seed(0)
    steps = torch.stack([torch.rand(4, 256, generator=generator) for _ in range(2)]).numpy()
    assert np.array_equal(steps, expected["full"]["hc_noise_seed0_first2steps"])


@pytest.mark.parametrize(("name", "values", "losses"), [("slim", 2e-2, 1e-3), ("hc", 1e-4, 1e-4)])
def test_golden_early_stop(train, expected, name, values, losses):
    found, wanted = train(EARLY[name], "full", 0), expected["full"]
    near(found.scores[0], wanted[f"{name}_earlystop_t0"], values)
    near(found.losses[:, 0], wanted[f"{name}_earlystop_losses_t0"], losses)  # as many steps


# ---- injection


@pytest.fixture(scope="module")
def new(reference):
    return MemorizedSequence(torch.tensor(reference["new"][0]), 1, "new0")


@pytest.fixture(scope="module")
def injected(model, new):
    """The injection at a ratio."""
    return cache(lambda ratio: inject(model, new, ratio=float(ratio[1:]), **INJECTED))


@pytest.mark.parametrize("ratio", RATIOS)
def test_golden_injection(injected, expected, ratio):
    injection = injected(ratio)
    wanted = {name.removeprefix(f"{ratio}_"): value for name, value in expected["inject"].items()}
    ids = injection.neurons.mask.flatten().nonzero().flatten().tolist()
    assert ids == wanted["flat_ids_sorted"].tolist()
    n = min(len(injection.losses), len(wanted["losses"]))
    assert max(len(injection.losses), len(wanted["losses"])) <= n + 1
    near(injection.losses[:n], wanted["losses"][:n], 1e-2)
    rows = injection.rows.numpy()
    assert np.corrcoef(rows.flatten(), wanted["rows_after"].flatten())[0, 1] > 0.9999
    near(rows, wanted["rows_after"], 0.05)  # one step of Adam
    assert injection.converged is (ratio == "r0.03")


# masks, which take seconds, of the injection that converges alone
@pytest.mark.parametrize(
    ("ratio", "name"),
    [(ratio, name) for ratio in RATIOS for name in EXACT]
    + [(max(RATIOS), name) for name in ("slim", "hc")],
)
def test_golden_injection_recalls(model, new, injected, golden_settings, ratio, name):
    injection = injected(ratio)
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
