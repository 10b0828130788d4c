"""REV of the paper's sentences: all rows of a model learn a few of them, and the named rows are put
back; the unit is the model.
"""

from __future__ import annotations

from typing import Any

from plan import REV_METHODS, REV_SHARES
from real_model import RealModel


def test_rev(real: RealModel) -> None:
    from dataclasses import replace

    from tl_localize import RevBenchmark
    from tl_localize.evals.settings import first_layer_settings, make_methods
    from tl_localize.injection.recipes import RECIPES

    plan = real.plan
    n = plan.n_rev_sentences
    # half of the groups is never trained, and some sentences fit in no group
    texts = real.sentences(3 * (plan.n_rev_drawn or plan.n_rev) * n)
    wanted = REV_METHODS.split(",")
    settings = [setting for setting in plan.settings if setting.split(".")[0] in wanted]
    methods = make_methods(REV_METHODS, settings, first_layer_settings(0))
    how: Any = {"n_sequences": n, "n_groups": plan.n_rev, "ratios": REV_SHARES}
    how["recipe"] = replace(RECIPES["adam"], **plan.recipe)
    benchmark = RevBenchmark(real.model, texts, real.general(12), **how)
    results = real.run(benchmark, methods, real.store("rev"))
    real.publish(rev=results.frame)
