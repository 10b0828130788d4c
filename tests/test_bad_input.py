"""What is wrong is named: the argument, the rule, the value and the remedy; and nothing is left
behind.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tl_localize import (
    METHODS,
    Activations,
    DelBenchmark,
    InjBenchmark,
    Injection,
    IntegratedGradients,
    Localizer,
    MemorizedSequence,
    NeuronScores,
    NeuronSet,
    RevBenchmark,
    Slimming,
    ZeroOut,
    accuracy,
    check_recited,
    inject,
    inject_together,
    load_model,
    memorization_loss,
    perplexity,
)
from tl_localize.report.token_view import token_view
from tl_localize.texts.reference import reference_sequences

# <argument> must be <rule>, got <value>. <what to do>.
FORM = re.compile(r"^\S+( of \S+)? must .+, got .+\. \S.*[.?]$", re.DOTALL)
SCORES = NeuronScores(torch.rand(2, 48))
CHOSEN = NeuronScores(torch.rand(2, 48), first_layer=1)
ALL = NeuronSet(torch.ones(2, 48) > 0)
NAN = torch.tensor([[1, torch.nan]])
GOOD = MemorizedSequence(torch.arange(8), 3, "good")
LONG = MemorizedSequence(torch.zeros(33, dtype=torch.long), 3, "long")


def tokens(*ids):
    return MemorizedSequence(torch.tensor(ids), 1)


def inject_with(model, sequence=GOOD, **settings):
    return inject(
        model,
        sequence,
        **{"ratio": 0.1, "seed": 0, "learning_rate": 0.01, "max_steps": 2} | settings,
    )


def inj_of(model, method):
    return InjBenchmark(model, [GOOD], ratio=0.1, max_steps=2).run([method])


class Nameless(Localizer):
    def attribute(self, neurons, sequence):
        return np.ones(neurons.size)


class OfNumpy(Nameless):
    name = "of_numpy"


OTHER_INJECTION = Injection(
    NeuronSet(torch.ones(3, 48) > 0), torch.zeros(144, 24), torch.ones(1), True
)
# what reads sequences with a model
READERS = {
    "localize": lambda m, sequences: list(ZeroOut().map(m, sequences)),
    "measure": accuracy,
    "measure the loss": memorization_loss,
    "inject": lambda m, sequences: inject_together(
        m, sequences, ratio=0.1, seed=0, learning_rate=0.1
    ),
}


# <name>: a call with bad arguments
CASES = {
    **{
        f"top_k of {settings}": lambda m, p, settings=settings: SCORES.top_k(**settings)
        for settings in (
            {"ratio": 0.01},
            {"ratio": 0.02, "rounding": "floor"},
            {"ratio": 0.01, "per": "model"},
            {"ratio": 0.5, "per": "neuron"},
            {"ratio": 0.5, "rounding": "up"},
            {"ratio": 0.5, "count": 3},
            {"ratio": 0.5, "first_layer": 2},
            {},
        )
    },
    "top_k below the layer that was chosen from": lambda m, p: CHOSEN.top_k(0.5, first_layer=0),
    "inject ratio of no neuron": lambda m, p: inject_with(m, ratio=0.001),
    "activations": lambda m, p: Activations(absolute="max"),
    "quadrature": lambda m, p: IntegratedGradients(rule="simpson"),
    # sequences
    **{
        f"tokens {tokens!r}": lambda m, p, tokens=tokens: MemorizedSequence(tokens, 1)
        for tokens in (
            torch.tensor([3]),
            torch.tensor([], dtype=torch.long),
            torch.zeros(1, 5, dtype=torch.long),
            torch.full((5,), 0.5),
            torch.ones(5) > 0,
        )
    },
    **{
        f"{what} to {name}": lambda m, p, call=call, bad=bad: call(m, bad)
        for name, call in READERS.items()
        for what, bad in {
            "too long": [LONG],
            "too long among others": [GOOD, LONG],
            "token above the vocabulary": [tokens(1, 61)],
            "token below zero": [tokens(1, -2)],
            "no sequence": [],
            "tensor": [torch.arange(5)],
            "text": ["Two roads"],
        }.items()
    },
    "no tokenizer": lambda m, p: MemorizedSequence.from_text(m, "a", " b"),
    "text that is not recited": lambda m, p: check_recited(m, [GOOD]),
    "token view of a text that is not recited": lambda m, p: token_view(m, GOOD, ALL, decode=str),
    "token view of scores": lambda m, p: token_view(m, GOOD, SCORES, decode=str),
    # models
    **{
        f"{type(bad).__name__} for a model to {name}": lambda m, p, call=call, bad=bad: call(
            bad, [GOOD]
        )
        for name, call in READERS.items()
        for bad in ("gpt2", torch.nn.Linear(2, 2), None)
    },
    "name for a model that reads": lambda m, p: MemorizedSequence.from_text("reference", "a", "b"),
    "name for the reference model": lambda m, p: reference_sequences("reference"),
    "unknown name": lambda m, p: load_model("gpt2-smal"),
    "empty folder": lambda m, p: load_model(p),
    **{
        f"load_model with {settings}": lambda m, p, settings=settings: load_model(p, **settings)
        for settings in (
            {"device": "gpu"},
            {"device": "xpu:7"},
            {"device": "meta"},
        )
    },
    "first layer too high": lambda m, p: Slimming(first_layer=2)(m, GOOD),
    # scores and sets
    **{
        f"mask {mask!r}": lambda m, p, mask=mask: NeuronSet(mask)
        for mask in (torch.ones(2, 3), torch.ones(3) > 0)
    },
    **{
        f"scores {values!r}": lambda m, p, values=values: NeuronScores(values, "mine")
        for values in (torch.ones(3), NAN, torch.tensor([[1, torch.inf]]))
    },
    **{
        f"recall of {truth!r}": lambda m, p, truth=truth: ALL.recall_of(truth)
        for truth in (NeuronSet(torch.ones(3, 48) > 0),)
    },
    "method of another model": lambda m, p: inj_of(m, lambda *_: NeuronScores(torch.rand(3, 48))),
    "method without a name": lambda m, p: Nameless()(m, GOOD),
    "method of tensors": lambda m, p: inj_of(m, lambda *_: torch.rand(2, 48)),
    "dropout in another model": lambda m, p: (
        NeuronSet(torch.ones(3, 48) > 0).dropped_out(m).__enter__()
    ),
    "injection in another model": lambda m, p: OTHER_INJECTION.applied(m).__enter__(),
    # files
    "damaged file": lambda m, p: NeuronScores.load(written(p, b"not safetensors")),
    "empty file": lambda m, p: NeuronScores.load(written(p, b"")),
    "half a file": lambda m, p: NeuronScores.load(halved(p)),
    "other tensors": lambda m, p: Injection.load(saved(p)),
    # general text
    **{
        f"perplexity of {text!r}": lambda m, p, text=text: perplexity(m, text)
        for text in (
            torch.arange(5),
            torch.zeros(2, 1, dtype=torch.long),
            torch.zeros(0, 9, dtype=torch.long),
            torch.zeros(1, 33, dtype=torch.long),
            torch.tensor([[1, 61]]),
            torch.rand(2, 5),
            torch.zeros(2, 5, dtype=torch.long).numpy(),
            [[1, 2]],
            "Two roads",
        )
    },
    "benchmark's ratio in percent": lambda m, p: InjBenchmark(m, [GOOD], ratio=1),
}


def written(folder, content):
    (folder / "file.safetensors").write_bytes(content)
    return folder / "file.safetensors"


def saved(folder):
    SCORES.save(folder / "scores.safetensors")
    return folder / "scores.safetensors"


def halved(folder):
    content = saved(folder).read_bytes()
    return written(folder, content[: len(content) // 2])


def test_bad_input_is_told_argument_rule_value_and_remedy(gpt2_like, tmp_path, unchanged):
    check = unchanged(gpt2_like)
    for name, call in CASES.items():
        said = "nothing"
        try:
            call(gpt2_like, tmp_path)
        except (ValueError, TypeError) as error:
            said = str(error)
        assert FORM.match(said), (name, said)
    check()


def test_a_method_may_score_by_numpy(gpt2_like):
    assert torch.equal(OfNumpy()(gpt2_like, GOOD).values, torch.ones(2, 48))


def test_benchmarks_take_an_iterator_of_sequences(gpt2_like):
    sequences = [replace(GOOD, id="s0"), replace(GOOD, id="s1", tokens=GOOD.tokens.flip(0))]
    text = torch.zeros(2, 5, dtype=torch.long)
    for benchmark in (
        InjBenchmark(gpt2_like, iter(sequences), ratio=0.1),
        DelBenchmark(gpt2_like, iter(sequences), text, ratios=(0.1,), n_dev=0),
        RevBenchmark(gpt2_like, iter(sequences), text, n_sequences=1, n_groups=1),
    ):
        assert benchmark.sequences == sequences and benchmark.groups()


def test_missing_file_is_a_file_not_found_error(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"path must be an existing file, got .*no\.safetensors"
    ):
        NeuronScores.load(tmp_path / "no.safetensors")


def test_saving_into_a_missing_folder_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder must be there .*none"):
        SCORES.save(tmp_path / "none" / "scores.safetensors")


@pytest.mark.parametrize("name", ["zero_out", "integrated_gradients", "activations"])
def test_scores_that_are_not_finite_are_refused(gpt2_like, name):
    gpt2_like.blocks[0].mlp.W_in.data[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=rf"values must be finite, got .*'{name}', sequence 'good'"
    ):
        next(METHODS[name]().map(gpt2_like, [GOOD], check=False))


def test_method_without_attribute_is_named(gpt2_like):
    from dataclasses import dataclass
    from typing import ClassVar

    from tl_localize import Localizer

    @dataclass(frozen=True, kw_only=True)
    class Empty(Localizer):
        name: ClassVar[str] = "empty"

    with pytest.raises(TypeError, match=r"Empty must define attribute or attribute_batch"):
        Empty()(gpt2_like, GOOD)


def test_method_that_returns_another_shape_is_named(gpt2_like):
    from dataclasses import dataclass
    from typing import ClassVar

    from tl_localize import Localizer

    @dataclass(frozen=True, kw_only=True)
    class Wide(Localizer):
        name: ClassVar[str] = "wide"

        def attribute(self, neurons, sequence):
            return torch.zeros(48, 2)

    with pytest.raises(
        ValueError, match=r"scores must be of .*2, 48\).* got .*48, 2\) from .*Wide"
    ):
        Wide()(gpt2_like, GOOD)
