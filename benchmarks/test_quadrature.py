"""How far Integrated Gradients with few points is from the integral, by rule and number of points.

Both reference models, in three minutes:

    pytest benchmarks/test_quadrature.py

The integral is taken to be Gauss-Legendre with 160 points. The error is the sum of all differences,
without signs, in percent of the sum of all scores; ``kept`` is the share of the top 1 % of each
layer, by the integral, that the rule ranks there too.
"""

from __future__ import annotations

import pandas as pd
import pytest

RULES = ("endpoints", "midpoint", "gauss-legendre")
STEPS = (5, 10, 20, 40)
N_SEQUENCES = 2
TOP = 0.01


@pytest.fixture(scope="session")
def errors(model, model_name, request, publish):
    """[rule, steps]: error in percent, and share of the top kept, means over sequences."""
    from tl_localize import IntegratedGradients
    from tl_localize.texts.reference import reference_sequences

    if not model_name.startswith("reference"):
        pytest.skip("of the reference models alone, whose memorized texts are at hand")
    rows = []
    for sequence in reference_sequences(model)[
        : request.config.getoption("--limit") or N_SEQUENCES
    ]:
        integral = IntegratedGradients(steps=160, rule="gauss-legendre")(model, sequence)
        for rule in RULES:
            for steps in STEPS:
                scores = IntegratedGradients(steps=steps, rule=rule)(model, sequence)
                error = float(
                    (scores.values - integral.values).abs().sum() / integral.values.abs().sum()
                )
                kept = scores.top_k(TOP).recall_of(integral.top_k(TOP))
                rows.append({"rule": rule, "points": steps, "error (%)": 100 * error, "kept": kept})
    table = pd.DataFrame(rows).groupby(["rule", "points"], sort=False).mean()
    publish(
        table.round(5), model_name, "quadrature", "Integrated Gradients: error of the quadrature"
    )
    return table


def test_more_points_are_nearer_to_the_integral(errors):
    for rule in RULES:
        assert errors["error (%)"][rule][40] < errors["error (%)"][rule][5]


@pytest.mark.parametrize("rule", RULES[1:])
def test_ten_points_of_the_other_rules_rank_as_well_as_the_authors_twenty(errors, rule):
    assert errors["kept"][rule, 10] >= errors["kept"]["endpoints", 20]
