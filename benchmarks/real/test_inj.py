"""INJ of the paper's sentences: tables 2 and A.11, t-tests, expanded data, seeds, distractors."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from plan import IN_APPENDIX, MASKS, PAPER_METHODS
from real_model import RealModel, with_grids

METHODS = f"{PAPER_METHODS},attribution,gradient_alignment,iterative_attribution"
SEEDS = (1000, 2000)  # of the first sentence, beside 0
DISTRACTORS = 3


def measure(
    real: RealModel, part: str, ratio: float, n: int | None, methods: str, **options: Any
) -> Any:
    """The results of a part with those that its folder has already."""
    expanded = options.pop("expanded", False)
    some = real.sentences(n, expanded)
    benchmark, chosen = real.inj_runs(some, methods, ratio, **options)
    return real.run(benchmark, [*chosen, *real.searched("inj")], real.store(part))


def table_2(real: RealModel, ratio: float) -> None:
    results = measure(real, "injection", ratio, real.plan.sentences[ratio], METHODS)
    real.publish(injection=results.frame)


def test_table_2(real: RealModel) -> None:
    table_2(real, max(real.plan.sentences))


def test_table_2_small_ratio(real: RealModel) -> None:
    table_2(real, min(real.plan.sentences))


def test_masks_tuned_for_injection(real: RealModel) -> None:
    """The masks' settings by the dev sentences, at the larger ratio; then table 2 with them."""
    from tl_localize.evals.tuning import rank, write_settings

    if not real.plan.tuned:
        pytest.skip(f"{real.title} has the paper's settings")
    ratio = max(real.plan.sentences)
    dev = real.dev_sentences[: real.plan.n_dev]
    benchmark, methods = real.inj_runs(dev, ",".join(MASKS), ratio)
    methods = with_grids(methods, real.plan.grids)
    found = real.run(benchmark, methods, real.store("tuning-inj"))
    if len(found.missing):
        pytest.skip("other shards are still searching")
    ranking = rank(found, ratio)
    write_settings(ranking, real.settings_file("inj"), "mean recall on the dev sentences")
    real.publish(tuning_inj=ranking)
    for share in real.plan.sentences:
        table_2(real, share)


def test_distractors(real: RealModel) -> None:
    n = real.plan.n_groups * (DISTRACTORS + 1)
    how: Any = {"distractors": DISTRACTORS}
    methods = METHODS.replace("zero_out,", "")
    results = measure(real, "distractors", max(real.plan.sentences), n, methods, **how)
    real.publish(distractors=results.frame)


def test_seeds(real: RealModel) -> None:
    """The first sentences at the smaller ratio, in other rows."""
    ratio = min(real.plan.sentences)
    parts = []
    for seed in SEEDS:
        part = f"seed-{seed}"
        results = measure(real, part, ratio, real.plan.n_seeds, IN_APPENDIX, seed=seed)
        parts.append(results.frame.assign(first_seed=seed))
        real.publish(seeds=pd.concat(parts))


def test_expanded_data(real: RealModel) -> None:
    """Sentences of 2022 and 2023 at the smaller ratio."""
    ratio = min(real.plan.sentences)
    n = real.plan.n_expanded
    results = measure(real, "expanded", ratio, n, IN_APPENDIX, expanded=True)
    real.publish(expanded=results.frame)


def test_exact_zero_out(real: RealModel) -> None:
    """Every neuron of one sentence, beside the screened scores of the same."""
    from real_model import renamed

    from tl_localize import ZeroOut

    if real.plan.screen is None:
        pytest.skip("Zero-Out is exact in table 2")
    benchmark, screened = real.inj_runs(real.sentences(1), "zero_out", max(real.plan.sentences))
    methods = [*screened, renamed(ZeroOut(), "zero_out_exact")]
    results = real.run(benchmark, methods, real.store("zero-out"))
    real.publish(zero_out=results.frame)
