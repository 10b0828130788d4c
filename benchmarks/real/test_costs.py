"""What each method costs on a model, here and by the plain loop of the authors' formula (A.7)."""

from __future__ import annotations

import pandas as pd
from costs import N_TOKENS, setting
from real_model import RealModel
from test_cost_table import STEPS, cost_table

QUICK_STEPS = dict.fromkeys(STEPS, 3)


def test_costs(real: RealModel) -> None:
    import jaxtyping

    rehearsed = real.plan.n_tokens is not None
    how = {"n_sequences": 2, "n_neurons": 2, "steps": QUICK_STEPS} if rehearsed else {}
    jaxtyping.config.update("jaxtyping_disable", True)  # its checks would be timed with the rest
    try:
        table = cost_table(real.model, repeats=1, **how)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    names = {"seconds": "seconds", "of the loop": "by the formula", "ratio": "formula / here"}
    frame = table.rename(columns=names)[[*names.values(), "measured", "of the loop measured"]]
    real.publish(costs=pd.DataFrame(frame).reset_index().assign(measured_with=about(real)))
    assert (frame["seconds"] > 0).all()


def about(real: RealModel) -> str:
    return setting(real.model, N_TOKENS)
