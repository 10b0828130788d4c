"""DEL on the paper's texts that a model recites: tables 1 and 3, t-tests, confusion, sets of the
whole model, single layers, other ablations, points of Integrated Gradients.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from frames import long_confusion, read_frames
from plan import MASKS, PAPER_METHODS, QUICK, SINGLE_LAYERS, SLOW
from real_model import RealModel, renamed, with_grids


@pytest.fixture
def deletion(real: RealModel) -> Any:
    """DEL at the paper's shares, with other settings where they are given."""
    from tl_localize import DelBenchmark

    plan = real.plan
    if len(real.texts) < plan.n_dev + 2:
        pytest.skip(f"{real.title} recites {len(real.texts)} of the texts: too few for DEL")

    def make(n_rows: int | None = None, **settings: Any) -> Any:
        how = {"ratios": plan.shares, "n_dev": plan.n_dev, "n_targets": plan.n_targets}
        return DelBenchmark(real.model, real.texts, real.general(n_rows), **(how | settings))

    return make


def sparing() -> Any:
    """Attribution with the contrast of Iterative Attribution."""
    from tl_localize import Attribution

    return renamed(Attribution(contrast=1.0), "attribution_contrast_1")


def publish(real: RealModel, name: str, results: Any) -> None:
    frames = {name: results.frame, f"{name}_before": results.before}
    real.publish(**frames, **{f"{name}_confusion": long_confusion(results.confusion)})


def test_recited_texts(real: RealModel) -> None:
    from tl_localize.metrics import levenshtein

    roles = {text.id: "target" for text in real.texts}
    roles |= {text.id: "dev" for text in real.texts[: real.plan.n_dev]}
    texts = real.candidates
    frame = pd.DataFrame(
        {
            "id": [text.id for text in texts],
            "category": [text.category for text in texts],
            "role": [roles.get(text.id, "not recited") for text in texts],
            "accuracy": real.accuracies,
            "levenshtein": levenshtein(real.model, texts).tolist(),
            "n_prefix": [text.n_prefix for text in texts],
            "n_suffix": [len(text) - text.n_prefix for text in texts],
            "distinct": [len(set(text.suffix.tolist())) for text in texts],
        }
    )
    real.publish(recited=frame)
    assert len(real.texts) > real.plan.n_dev


def test_table_3(real: RealModel, deletion: Any) -> None:
    methods = [sparing(), *real.del_methods(QUICK)]
    publish(real, "deletion", real.run(deletion(), methods, real.del_store("deletion")))


def test_table_3_slow_methods(real: RealModel, deletion: Any) -> None:
    """One after the other, so that Integrated Gradients is there before Zero-Out begins."""
    n_targets = {"zero_out": real.plan.n_zero_out, "integrated_gradients": real.plan.n_targets}
    for method in real.del_methods(SLOW):
        benchmark = deletion(n_targets=n_targets[method.name])
        results = real.run(benchmark, [method], real.del_store("deletion"))
        publish(real, "deletion", results)


def test_masks_tuned_for_deletion(real: RealModel, deletion: Any) -> None:
    """The masks' settings by the dev texts, at the larger share; then table 3 with them."""
    from tl_localize import DelBenchmark
    from tl_localize.evals.tuning import rank, write_settings

    if not real.plan.tuned:
        pytest.skip(f"{real.title} has the paper's settings")
    dev = real.texts[: real.plan.n_dev]
    share = max(real.plan.shares)
    methods = real.del_methods(",".join(MASKS))
    methods = with_grids(methods, real.plan.grids, first_layer=1)
    benchmark = DelBenchmark(
        real.model, dev, real.general(real.plan.n_few_rows), ratios=(share,), n_dev=0
    )
    found = real.run(benchmark, methods, real.del_store("tuning-del"))
    if len(found.missing):
        pytest.skip("other shards are still searching")
    ranking = rank(found, share)
    write_settings(ranking, real.settings_file("del"), "Neg minus Self on the dev texts")
    real.publish(tuning_del=ranking)
    results = real.run(deletion(), real.searched("del"), real.del_store("deletion"))
    publish(real, "deletion", results)


def test_sets_of_the_whole_model(real: RealModel, deletion: Any) -> None:
    """1, 2, 4, ... neurons of the whole model, so that every curve begins near zero."""
    from tl_localize.model.neurons import NeuronView

    n_layers, n_neurons = NeuronView(real.model).size
    ratios = tuple(count / (n_neurons * (n_layers - 1)) for count in real.plan.counts)
    how: Any = {"ratios": ratios, "per": "model", "n_targets": real.plan.n_counts}
    benchmark = deletion(real.plan.n_few_rows, **how)
    methods = [sparing(), *real.del_methods(f"{QUICK},{SLOW}"), *real.searched("del")]
    publish(real, "counts", real.run(benchmark, methods, real.del_store("counts")))


def test_single_layers(real: RealModel, deletion: Any) -> None:
    """The smaller share in one layer, and five times as much, against all layers: the share that a
    whole number of neurons is, so that one layer gets as many as all.
    """
    from tl_localize.model.neurons import NeuronView
    from tl_localize.scores import rounded_down

    plan = real.plan
    n_neurons = NeuronView(real.model).n_neurons
    share = max(1, rounded_down(plan.shares[0], n_neurons)) / n_neurons
    how: Any = {"ratios": (share,), "layers": "each", "n_targets": plan.n_single_layers}
    benchmark = deletion(plan.n_few_rows, **how)
    for method in real.del_methods(SINGLE_LAYERS):
        results = real.run(benchmark, [method], real.del_store("one-layer"))
        single = results.single_layers
        if plan.screen:  # it orders fewer neurons of a layer than five times the budget has
            single = single[(single["method"] != "zero_out") | ~(single["multiple"] > 1)]
        real.publish(single_layers=single)


@pytest.mark.parametrize("ablation", ["mean", "resample"])
def test_ablations(real: RealModel, deletion: Any, ablation: str) -> None:
    """At the larger share, by the methods of the paper; zero ablation is table 3."""
    from tl_localize import DelResults

    how: Any = {"ablation": ablation, "n_targets": real.plan.n_ablations}
    benchmark = deletion(ratios=real.plan.shares[-1:], **how)
    store = real.del_store(f"ablation-{ablation}")
    results = real.run(benchmark, real.del_methods(PAPER_METHODS), store)
    there = read_frames(real.folder / "frames")
    table_3 = DelResults.of(real.del_store("deletion")).frame
    zero = table_3[table_3["ratio"] == table_3["ratio"].max()]
    parts = [there.get("ablations", pd.DataFrame()), zero, results.frame]
    joined = pd.concat(parts).drop_duplicates(["ablation", "method", "sequence_id"], keep="last")
    real.publish(ablations=joined, ablations_before=results.before)


def test_quadrature(real: RealModel, deletion: Any) -> None:
    """Integrated Gradients with more points."""
    from tl_localize import IntegratedGradients

    methods = [
        renamed(IntegratedGradients(steps=n), f"integrated_gradients_{n}") for n in real.plan.points
    ]
    benchmark = deletion(n_targets=real.plan.n_quadrature)
    publish(real, "quadrature", real.run(benchmark, methods, real.del_store("quadrature")))
