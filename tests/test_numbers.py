"""Every number of every public function has its rule: what breaks it is refused by its name, and a
new parameter needs a row here.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tl_localize
from tl_localize import (
    Activations,
    DelBenchmark,
    InjBenchmark,
    Injection,
    JointInjection,
    MemorizedSequence,
    NeuronScores,
    NeuronSet,
    SingleLayerStudy,
    check_recited,
    explore,
    inject,
    inject_together,
    load_model,
    reference_sequences,
)
from tl_localize.injection import FinalLosses

Call = Callable[[Any, dict[str, Any]], object]  # of a model and the setting in question

NO_NUMBERS = (math.nan, "0.1", True)
COUNT = (*NO_NUMBERS, 0, -1, 2.5, math.inf)
FROM_0 = (*NO_NUMBERS, -1, 0.5, math.inf)
POSITIVE = (*NO_NUMBERS, None, 0, -1, math.inf)
FRACTION = (*NO_NUMBERS, None, 0, -0.1, 1.5, math.inf)
UNIT = (*NO_NUMBERS, None, -0.1, 2, math.inf)
SEED = (*NO_NUMBERS, None, -1, 0.5, 2**63)
NUMPY_SEED = (*SEED, 2**32)
LAYER = (*NO_NUMBERS, None, -1, 0.5, 2)  # of two

GOOD = [MemorizedSequence(torch.arange(8), 3, "a"), MemorizedSequence(torch.arange(1, 9), 3, "b")]
TEXT = torch.arange(20).reshape(2, 10)
SCORES = NeuronScores(torch.rand(2, 48))
NEURONS = NeuronSet(torch.ones(2, 48) > 0)
INJECTION = Injection(NEURONS, torch.zeros(96, 24), torch.ones(1), torch.ones(1), True)


def one_of(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sequences in which one value breaks the rule."""
    return tuple((value,) for value in values)


def inj(model: Any, given: dict[str, Any]) -> InjBenchmark:
    return InjBenchmark(**({"model": model, "sequences": GOOD, "ratio": 0.1} | given))


def del_of(model: Any, given: dict[str, Any], kind: Any = DelBenchmark) -> Any:
    return kind(model, GOOD, TEXT, **({"ratios": (0.1,), "n_dev": 0, "decode": str} | given))


def without_none(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for value in values if value is not None)


DELETION = {
    "ratios": one_of(FRACTION),
    "n_dev": (*FROM_0, 2),
    "n_targets": (*COUNT, 3),
    "first_layer": LAYER,
    "seed": SEED,
    "batch_tokens": COUNT,
}
MASK = {
    "learning_rate": POSITIVE,
    "sparsity_weight": POSITIVE,
    "steps": COUNT,
    "stop_sparsity": UNIT,
    "first_layer": FROM_0,
}
TRAINED = {"ratio": FRACTION, "learning_rate": POSITIVE, "max_steps": COUNT, "stop_loss": POSITIVE}
OWN = {  # of each method, beside batch_tokens
    "Activations": {},
    "Attribution": {},
    "GradientAlignment": {"points": COUNT, "share": FRACTION},
    "IterativeAttribution": {
        "rounds": COUNT,
        "share": FRACTION,
        "first_layer": FROM_0,
        "contrast": (*NO_NUMBERS, None, -1, math.inf),
        "seed": SEED,
    },
    "HardConcrete": {
        **MASK,
        "temperature": POSITIVE,
        "initial_mask": (*NO_NUMBERS, None, -0.1, 1.1),
        "seed": SEED,
    },
    "IntegratedGradients": {"steps": COUNT},
    "RandomBaseline": {"seed": SEED},
    "RowNorm": {},
    "Slimming": MASK,
    "ZeroOut": {"screen": without_none(FRACTION), "screen_sample": FROM_0, "seed": SEED},
}
# By the function's name: a call with a setting, and the values that break its rule.
CALLS: dict[str, tuple[Call, dict[str, tuple[Any, ...]]]] = {
    **{
        name: (
            lambda m, given, name=name: getattr(tl_localize, name)(**given),
            {"batch_tokens": COUNT, **rules},
        )
        for name, rules in OWN.items()
    },
    "Localizer": (lambda m, given: Activations(**given), {"batch_tokens": COUNT}),
    "Localizer.map": (lambda m, given: Activations().map(m, GOOD, **given), {"batch_size": COUNT}),
    "inject": (
        lambda m, given: inject(
            m, GOOD[0], **({"ratio": 0.1, "seed": 0, "learning_rate": 0.01} | given)
        ),
        {**TRAINED, "seed": NUMPY_SEED},
    ),
    "inject_together": (
        lambda m, given: inject_together(
            m, GOOD, **({"ratio": 0.1, "seed": 0, "learning_rate": 0.01} | given)
        ),
        {
            **TRAINED,
            "seed": NUMPY_SEED,
            "kl_weight": (*NO_NUMBERS, -0.1, math.inf),
            "stop_kl": POSITIVE,
            "stop_single": POSITIVE,
            "batch_size": COUNT,
        },
    ),
    "InjBenchmark": (
        inj,
        {
            **TRAINED,
            "seed": (*NUMPY_SEED, 2**32 - 1),  # two sentences take two
            "max_steps": COUNT,
            "learning_rate": without_none(POSITIVE),
            "multiples": one_of(POSITIVE),
            "distractors": FROM_0,
        },
    ),
    "DelBenchmark": (del_of, DELETION),
    "SingleLayerStudy": (
        lambda m, given: del_of(m, given, SingleLayerStudy),
        DELETION | {"multiples": one_of(COUNT)},
    ),
    "MemorizedSequence": (
        lambda m, given: MemorizedSequence(torch.arange(5), **given),
        {"n_prefix": (*COUNT, None, 5)},
    ),
    "NeuronScores": (
        lambda m, given: NeuronScores(torch.rand(2, 48), **given),
        {"missed": without_none(UNIT), "first_layer": without_none(LAYER)},
    ),
    "NeuronScores.top_k": (
        lambda m, given: SCORES.top_k(**(given if "count" in given else {"ratio": 0.1} | given)),
        {"ratio": FRACTION, "count": (*COUNT, 49), "first_layer": without_none(LAYER)},
    ),
    "NeuronSet.from_pairs": (
        lambda m, given: NeuronSet.from_pairs(**({"pairs": [(0, 0)], "shape": (2, 48)} | given)),
        {
            "pairs": ([(0, 48)], [(2, 0)], [(-1, 0)], [(0.5, 0)], [("0", 0)]),
            "shape": ((0, 4), (2, -1), (2, 4.5), ("2", 4)),
        },
    ),
    "Injection.unlearned": (
        lambda m, given: INJECTION.unlearned(**given),
        {"threshold": (*NO_NUMBERS, None, -0.1)},
    ),
    "JointInjection.applied": (
        lambda m, given: (
            JointInjection((INJECTION,), torch.zeros(1, 1), (FinalLosses(0.0, 0.0, 0.0, 0.0),))
            .applied(m, **given)
            .__enter__()
        ),
        {"without": (*NO_NUMBERS, -1, 0.5, 1)},
    ),
    "explore": (
        lambda m, given: explore(m, GOOD[0], SCORES, [], decode=str, **given),
        {"ratio": FRACTION, "ratios": one_of(FRACTION)},
    ),
    "reference_sequences": (
        lambda m, given: reference_sequences(load_model("reference"), **given),
        {"min_repetitions": (10**6,)},
    ),
    "check_recited": (lambda m, given: check_recited(m, GOOD, **given), {"min_accuracy": UNIT}),
}
# Numbers by which something is looked up: what is not there is named with what is.
LOOKED_UP = {
    "DelResults.confusion",
    "DelResults.confusion_levenshtein",
    "DelResults.confusion_by_category.ratio",
}
LOOKED_UP |= {"Explorer.chosen.pair", "Explorer.chosen.ratio"}
LOOKED_UP |= {
    f"{units}.{what}.layer"
    for units in ("Units", "MLPNeurons", "AttentionHeads")
    for what in ("point", "rows", "output", "read", "write", "hook")
}
CASES = [
    (f"{name}.{setting}", value)
    for name, (_, rules) in CALLS.items()
    for setting, values in rules.items()
    for value in values
]


def numbers() -> Iterator[str]:
    """Every parameter of a public function, class or method that takes numbers, such as
    ``"inject.ratio"``.
    """
    for name in tl_localize.__all__:
        thing = getattr(tl_localize, name)
        functions = {name: thing.__init__ if dataclasses.is_dataclass(thing) else thing}
        if inspect.isclass(thing):
            methods = inspect.getmembers(
                thing, lambda member: inspect.isfunction(member) or inspect.ismethod(member)
            )
            functions |= {
                method.__qualname__: method for own, method in methods if not own.startswith("_")
            }
        for function_name, function in functions.items():
            for parameter in (
                inspect.signature(function).parameters.values() if callable(function) else ()
            ):
                of_numbers = re.search(r"\b(int|float|Real)\b", str(parameter.annotation))
                if of_numbers and "Callable" not in parameter.annotation:
                    yield f"{function_name}.{parameter.name}"


def test_every_number_of_every_public_function_has_its_rule() -> None:
    assert set(numbers()) - LOOKED_UP == {name for name, _ in CASES}


@pytest.mark.parametrize(
    ("name", "value"), CASES, ids=[f"{name} {value!r}"[:60] for name, value in CASES]
)
def test_number_that_breaks_its_rule_is_refused_by_its_name(
    unchecked: None, gpt2_like: Any, name: str, value: Any
) -> None:
    function, _, setting = name.rpartition(".")
    with pytest.raises((ValueError, TypeError)) as caught:
        CALLS[function][0](gpt2_like, {setting: value})
    own = {"seeds": "seed", "ratios": "ratio"}.get(setting, setting)
    assert re.match(
        rf"{own}( of \S+)? must .+, got .+\. \S.*[.?]$", str(caught.value), re.DOTALL
    ), str(caught.value)
