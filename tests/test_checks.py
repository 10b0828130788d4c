"""Every number of every public function has its rule: what breaks it is refused by its name, and a
new parameter needs a row here.
"""

import dataclasses
import inspect
import math
import re

import pytest
import torch

import tl_localize
from tl_localize import (
    Activations,
    DelBenchmark,
    InjBenchmark,
    MemorizedSequence,
    NeuronScores,
    NeuronSet,
    Recipe,
    RevBenchmark,
    check_recited,
    erase,
    explore,
    inject,
    inject_together,
    learn,
    reference_sequences,
)
from tl_localize.checks import check_several, nearest

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


def one_of(values):
    """Sequences in which one value breaks the rule."""
    return tuple((value,) for value in values)


def inj(model, given):
    return InjBenchmark(**({"model": model, "sequences": GOOD, "ratio": 0.1} | given))


def del_of(model, given):
    how = {"ratios": (0.1,), "n_dev": 0, "decode": str}
    return DelBenchmark(model, GOOD, TEXT, **(how | given))


def without_none(values):
    return tuple(value for value in values if value is not None)


DELETION = {
    "ratios": one_of(FRACTION),
    "n_dev": (*FROM_0, 2),
    "n_targets": COUNT,
    "first_layer": LAYER,
    "seed": SEED,
    "multiples": one_of(COUNT),
}
MASK = {
    "learning_rate": POSITIVE,
    "sparsity_weight": POSITIVE,
    "steps": COUNT,
    "stop_sparsity": UNIT,
    "first_layer": FROM_0,
}
TRAINED = {"ratio": FRACTION, "learning_rate": POSITIVE, "max_steps": COUNT, "stop_loss": POSITIVE}
GENERAL_TEXT = {"texts": (((1,),),), "seed": SEED}
UNLEARNED = {
    **GENERAL_TEXT,
    "learning_rate": POSITIVE,
    "steps": COUNT,
    "texts_per_step": COUNT,
    "first_layer": FROM_0,
}
OWN = {  # of each method, beside batch_tokens
    "Activations": {},
    "Attribution": {"contrast": (*NO_NUMBERS, None, -1, math.inf), "seed": SEED},
    "AdversarialHardConcrete": {
        **UNLEARNED,
        "general_weight": (*NO_NUMBERS, None, -1, math.inf),
        "sparsity_weight": (*NO_NUMBERS, None, -1, math.inf),
        "temperature": POSITIVE,
        "initial_mask": without_none((*NO_NUMBERS, -0.1, 1.1)),
    },
    "BalancedSubnet": {
        **UNLEARNED,
        "share": FRACTION,
        "momentum": UNIT,
        "weight_decay": UNIT,
    },
    "ContrastiveGradient": {},
    "SelectivePruning": GENERAL_TEXT,
    "SelectiveSynapticDampening": GENERAL_TEXT,
    "ActivationContrast": {"alignment": UNIT, "seed": SEED, "texts": (((1,),),)},
    "GradientAlignment": {"points": COUNT, "share": FRACTION},
    "IterativeAttribution": {
        "rounds": COUNT,
        "share": FRACTION,
        "first_layer": FROM_0,
        "contrast": (*NO_NUMBERS, None, -1, math.inf),
        "seed": SEED,
    },
    "RefinedAttribution": {
        "share": FRACTION,
        "steps": COUNT,
        "first_layer": FROM_0,
        "contrast": (*NO_NUMBERS, None, -1, math.inf),
        "seed": SEED,
    },
    "HardConcrete": {
        **MASK,
        "temperature": POSITIVE,
        "initial_mask": (*NO_NUMBERS, -0.1, 1.1),
        "seed": SEED,
    },
    "IntegratedGradients": {"steps": COUNT},
    "RandomBaseline": {"seed": SEED},
    "RowNorm": {},
    "Slimming": MASK,
    "ZeroOut": {"screen": without_none(FRACTION), "screen_sample": FROM_0, "seed": SEED},
}
# By the function's name: a call with a setting, and the values that break its rule.
CALLS = {
    **{
        name: (
            lambda m, given, name=name: getattr(tl_localize, name)(**given),
            {"batch_tokens": COUNT, **rules},
        )
        for name, rules in OWN.items()
    },
    "Localizer": (lambda m, given: Activations(**given), {"batch_tokens": COUNT}),
    "Localizer.map": (lambda m, given: Activations().map(m, GOOD, **given), {"batch_size": COUNT}),
    "Localizer.map_batches": (
        lambda m, given: Activations().map_batches(m, GOOD, **given),
        {"batch_size": COUNT},
    ),
    "erase": (
        lambda m, given: erase(m, GOOD[0], check=False, others=GOOD[1:], **given),
        {
            "share": FRACTION,
            "max_recited": UNIT,
            "max_others_lost": (*NO_NUMBERS, None, -1, 101),
            "max_perplexity_rise": (*NO_NUMBERS, None, -1, math.inf),
            "learning_rate": without_none(POSITIVE),
            "max_steps": COUNT,
            "seed": SEED,
        },
    ),
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
            "batch_size": COUNT,
        },
    ),
    "Recipe": (
        lambda m, given: Recipe(**given),
        {
            "learning_rate": POSITIVE,
            "general": FROM_0,
            "max_steps": COUNT,
            "stop_loss": POSITIVE,
        },
    ),
    "learn": (
        lambda m, given: learn(m, GOOD, Recipe(max_steps=1), **given),
        {"seed": SEED},
    ),
    "RevBenchmark": (
        lambda m, given: RevBenchmark(m, GOOD, TEXT, **({"n_sequences": 2} | given)),
        {
            "n_sequences": COUNT,
            "n_groups": without_none(COUNT),
            "ratios": one_of(FRACTION),
            "seed": NUMPY_SEED,
        },
    ),
    "InjBenchmark": (
        inj,
        {
            **TRAINED,
            "seed": (*NUMPY_SEED, 2**32 - 1),  # two sentences take two
            "max_steps": COUNT,
            "learning_rate": without_none(POSITIVE),
            "distractors": FROM_0,
        },
    ),
    "DelBenchmark": (del_of, DELETION),
    "Benchmark.run": (
        lambda m, given: inj(m, {}).run(progress=False, **given),
        {"shard": ((0, 1), (2, 1), (1, 0), (-1, 2), (1, 1.5), (True, 2), ("1", 2))},
    ),
    "MemorizedSequence": (
        lambda m, given: MemorizedSequence(torch.arange(5), **given),
        {"n_prefix": (*COUNT, None, 5)},
    ),
    "NeuronScores": (
        lambda m, given: NeuronScores(torch.rand(2, 48), **given),
        {"first_layer": without_none(LAYER)},
    ),
    "NeuronScores.top_k": (
        lambda m, given: SCORES.top_k(**(given if "count" in given else {"ratio": 0.1} | given)),
        {
            "ratio": FRACTION,
            "count": (*COUNT, 49),
            "layers": ([2], [-1], [0.5], [True], []),
            "first_layer": without_none(LAYER),
        },
    ),
    "NeuronSet.from_indices": (
        lambda m, given: NeuronSet.from_indices(**({"indices": [(0, 0)], "shape": (2, 3)} | given)),
        {
            "indices": ([(2, 0)], [(0, 3)], [(-1, 0)], [(0,)], [(0.5, 0)], [3]),
            "shape": ((2,), (0, 3), (2, 0), (2.5, 3)),
        },
    ),
    "explore": (
        lambda m, given: explore(
            m, GOOD[0], SCORES, [], general=GOOD[0].tokens[None], decode=str, **given
        ),
        {"ratios": one_of(FRACTION)},
    ),
    "reference_sequences": (
        lambda m, given: reference_sequences(m, **given),
        {"min_repetitions": COUNT},
    ),
    "check_recited": (lambda m, given: check_recited(m, GOOD, **given), {"min_accuracy": UNIT}),
}
# Numbers by which something is looked up: what is not there is named with what is.
LOOKED_UP = {
    "DelResults.confusion",
    "Erasure.measured",
}
# of how many parts a run needs groups; it has checked that
LOOKED_UP |= {f"{kind}Benchmark.groups.parts" for kind in ("Inj", "Del", "Rev")}
LOOKED_UP |= {"Explorer.chosen.pair", "Explorer.chosen.ratio"}
LOOKED_UP |= {
    f"{units}.{what}.layer"
    for units in ("Units", "_OfWeight", "MLPNeurons", "AttentionHeads")
    for what in ("point", "rows", "output", "read", "write", "hook")
}


def numbers():
    """Every parameter of a public function, class or method that takes numbers, such as
    ``"inject.ratio"``.
    """
    for name in tl_localize.__all__:
        thing = getattr(tl_localize, name)
        if inspect.isclass(thing) and issubclass(thing, Warning):
            continue  # Python gives no signature of it
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
                annotation = str(parameter.annotation)
                if re.search(r"\b(int|float)\b", annotation) and "Callable" not in annotation:
                    yield f"{function_name}.{parameter.name}"


def test_every_number_of_every_public_function_has_its_rule():
    known = {f"{name}.{setting}" for name, (_, rules) in CALLS.items() for setting in rules}
    assert set(numbers()) - LOOKED_UP == known


@pytest.mark.parametrize("name", CALLS)
def test_numbers_that_break_their_rule_are_refused_by_their_name(gpt2_like, name):
    function, rules = CALLS[name]
    for setting, values in rules.items():
        own = {"seeds": "seed", "ratios": "ratio"}.get(setting, setting)
        for value in values:
            with pytest.raises((ValueError, TypeError), match=f"^{own}") as caught:
                function(gpt2_like, {setting: value})
            assert re.match(
                rf"{own}( of \S+)? must .+, got .+\. \S.*[.?]$", str(caught.value), re.DOTALL
            ), str(caught.value)


def test_a_text_is_not_taken_for_several_numbers():
    with pytest.raises(ValueError, match=r"ratios must be several numbers, got '0\.1, 0\.2'"):
        check_several(ratios="0.1, 0.2")


def test_a_name_is_offered_once_and_one_that_holds_a_letter_is_not():
    assert nearest("prime", ["primes", "even"]) == " Did you mean primes?"
    assert nearest("zero", ["zero_out", "zeros", "even"]) == " Did you mean zeros or zero_out?"
    assert nearest("e", ["primes", "even"]) == ""
