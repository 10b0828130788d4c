"""What is wrong is named: the argument, the rule, the value and the remedy; and nothing is left
behind.

jaxtyping's checks are off, so that what a user sees is what is tested.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_localize import (
    METHODS,
    Activations,
    HardConcrete,
    InjBenchmark,
    Injection,
    IntegratedGradients,
    MemorizedSequence,
    NeuronScores,
    NeuronSet,
    RandomBaseline,
    Slimming,
    ZeroOut,
    accuracy,
    check_recited,
    inject,
    inject_together,
    levenshtein,
    load_model,
    memorization_loss,
    perplexity,
    perplexity_base2,
)
from tl_localize.reference import reference_sequences
from tl_localize.report.figures import score_map
from tl_localize.report.token_view import token_view
from tl_localize.sequences import SequenceBatch

# <argument> must be <rule>, got <value>. <what to do>.
FORM = re.compile(r"^\S+( of \S+)? must .+, got .+\. \S.*[.?]$", re.DOTALL)
SCORES = NeuronScores(torch.rand(2, 48))
GOOD = MemorizedSequence(torch.arange(8), 3, "good")
LONG = MemorizedSequence(torch.zeros(33, dtype=torch.long), 3, "long")


def tokens(*ids: int) -> MemorizedSequence:
    return MemorizedSequence(torch.tensor(ids), 1)


def inject_with(model: Any, sequence: MemorizedSequence = GOOD, **settings: Any) -> Injection:
    return inject(
        model,
        sequence,
        **{"ratio": 0.1, "seed": 0, "learning_rate": 0.01, "max_steps": 2} | settings,
    )


def inj_of(model: Any, method: Any) -> Any:
    return InjBenchmark(model=model, sequences=[GOOD], ratio=0.1, max_steps=2).run([method])


SHAPE = r"scores must have the model's shape \(2, 48\), got \(3, 48\)"
Case = tuple[Callable[[Any, Path], Any], str]
CASES: dict[str, Case] = {
    # ratios
    **{
        f"top_k of ratio {ratio!r}": (
            lambda m, p, ratio=ratio: SCORES.top_k(ratio),
            r"ratio must be a fraction in \(0, 1\], got ",
        )
        for ratio in (0, 0.0, -0.1, 1.5, 5, float("nan"), float("inf"), True, "0.01", None)
    },
    "top_k of too small a ratio": (
        lambda m, p: SCORES.top_k(0.01),
        "ratio must select at least one of 48 neurons, got 0.01",
    ),
    "top_k of too small a ratio by floor": (
        lambda m, p: SCORES.top_k(0.02, rounding="floor"),
        "ratio must select at least one of 48",
    ),
    "top_k of too small a ratio of the model": (
        lambda m, p: SCORES.top_k(0.01, per="model"),
        "at least one of 96 neurons, got 0.01",
    ),
    "inject ratio 0": (
        lambda m, p: inject_with(m, ratio=0),
        r"ratio must be a fraction in \(0, 1\], got 0",
    ),
    "inject ratio in percent": (
        lambda m, p: inject_with(m, ratio=3),
        r"ratio must be a fraction .* got 3. Write 0.01 for 1 %",
    ),
    "inject ratio of no neuron": (
        lambda m, p: inject_with(m, ratio=0.001),
        "ratio must select at least one of 96 neurons, got 0.001",
    ),
    # choices
    "top_k per neuron": (
        lambda m, p: SCORES.top_k(0.5, per="neuron"),
        "per must be 'layer' or 'model', got 'neuron'",
    ),
    "top_k rounding up": (
        lambda m, p: SCORES.top_k(0.5, rounding="up"),
        "rounding must be 'nearest' or 'floor', got 'up'",
    ),
    "top_k first layer": (
        lambda m, p: SCORES.top_k(0.5, first_layer=2),
        r"first_layer must be a whole number in \[0, 2\), got 2",
    ),
    "top_k negative first layer": (
        lambda m, p: SCORES.top_k(0.5, first_layer=-1),
        r"first_layer must be .* got -1",
    ),
    "top_k first layer half": (
        lambda m, p: SCORES.top_k(0.5, first_layer=0.5),
        r"first_layer must be .* got 0.5",
    ),
    "activations": (
        lambda m, p: Activations(absolute="max"),
        "absolute must be 'token' or 'mean', got 'max'",
    ),
    "quadrature": (
        lambda m, p: IntegratedGradients(rule="simpson"),
        "rule must be 'endpoints', .* got 'simpson'",
    ),
    # sequences
    **{
        f"n_prefix {n}": (
            lambda m, p, n=n: MemorizedSequence(torch.arange(5), n),
            r"n_prefix must be at least 1 and below the number of tokens \(5\), got " + str(n),
        )
        for n in (0, -1, 5, 6)
    },
    "n_prefix 1.0": (
        lambda m, p: MemorizedSequence(torch.arange(5), 1.0),
        "n_prefix must be a whole number, got 1.0",
    ),
    "n_prefix as text": (
        lambda m, p: MemorizedSequence(torch.arange(5), "3"),
        "n_prefix must be a whole number, got '3'",
    ),
    "n_prefix True": (
        lambda m, p: MemorizedSequence(torch.arange(5), True),
        "n_prefix must be a whole number, got True",
    ),
    "one token": (
        lambda m, p: MemorizedSequence(torch.tensor([3]), 1),
        r"n_prefix must be .* \(1\), got 1",
    ),
    "no token": (
        lambda m, p: MemorizedSequence(torch.tensor([], dtype=torch.long), 1),
        r"n_prefix must be .* \(0\), got 1",
    ),
    "tokens in a batch": (
        lambda m, p: MemorizedSequence(torch.zeros(1, 5, dtype=torch.long), 1),
        r"tokens must be a vector .* \(1, 5\)",
    ),
    "tokens as text": (
        lambda m, p: MemorizedSequence("Two roads", 1),
        "tokens must be token ids, got the text 'Two roads'. Use .*from_text",
    ),
    "tokens as floats": (
        lambda m, p: MemorizedSequence(torch.rand(5), 1),
        "tokens must be a vector of token ids, got .*float32",
    ),
    "tokens as booleans": (
        lambda m, p: MemorizedSequence(torch.ones(5) > 0, 1),
        "tokens must be a vector of token ids, got .*bool",
    ),
    "too long": (
        lambda m, p: Activations()(m, LONG),
        r"sequence must be at most n_ctx=32 tokens long, got 33 in .*'long'",
    ),
    "too long among others": (
        lambda m, p: ZeroOut().map(m, [GOOD, LONG]),
        "sequence must be at most n_ctx=32 tokens long, got 33",
    ),
    "too long to inject": (
        lambda m, p: inject_with(m, LONG),
        "sequence must be at most n_ctx=32 tokens long, got 33",
    ),
    "too long to measure": (
        lambda m, p: accuracy(m, [LONG]),
        "sequence must be at most n_ctx=32 tokens long, got 33",
    ),
    "token above the vocabulary": (
        lambda m, p: ZeroOut()(m, tokens(1, 61)),
        r"tokens must be in \[0, 61\), got 61",
    ),
    "token below zero": (
        lambda m, p: ZeroOut()(m, tokens(1, -2)),
        r"tokens must be in \[0, 61\), got -2",
    ),
    "token outside to inject": (
        lambda m, p: inject_with(m, tokens(1, 99)),
        r"tokens must be in \[0, 61\), got 99",
    ),
    "token outside to measure": (
        lambda m, p: accuracy(m, [tokens(1, 99)]),
        r"tokens must be in \[0, 61\), got 99",
    ),
    "no sequence to localize": (
        lambda m, p: ZeroOut().map(m, []),
        "sequences must hold at least one sequence, got none",
    ),
    "no sequence to measure": (
        lambda m, p: accuracy(m, []),
        "sequences must hold at least one sequence, got none",
    ),
    "no sequence to inject": (
        lambda m, p: inject_together(m, [], ratio=0.1, seed=0, learning_rate=0.1),
        "sequences must hold at least one sequence, got none",
    ),
    "tensor for a sequence": (
        lambda m, p: ZeroOut()(m, torch.arange(5)),
        "sequence must be a MemorizedSequence, got Tensor",
    ),
    "text for a sequence": (
        lambda m, p: ZeroOut()(m, "Two roads"),
        "sequence must be a MemorizedSequence, got str",
    ),
    "list for a sequence": (
        lambda m, p: ZeroOut()(m, [GOOD]),
        "sequence must be a MemorizedSequence, got list",
    ),
    "one sequence for many": (
        lambda m, p: ZeroOut().map(m, GOOD),
        r"sequences must be a list of sequences, got .*'good'",
    ),
    "one sequence to inject": (
        lambda m, p: inject_together(m, GOOD, ratio=0.1, seed=0, learning_rate=0.01),
        r"sequences must be a list of sequences, got .*'good'",
    ),
    "one sequence for a batch": (
        lambda m, p: SequenceBatch.of(GOOD),
        r"sequences must be a list of sequences, got .*'good'",
    ),
    "no sequence for a batch": (
        lambda m, p: SequenceBatch.of([]),
        "sequences must hold at least one sequence, got none",
    ),
    "tokens of nothing": (
        lambda m, p: MemorizedSequence(None, 1),
        "tokens must be a tensor, got NoneType",
    ),
    "tokens of the tokenizer's words": (
        lambda m, p: MemorizedSequence(["two", "roads"], 1),
        "tokens must be a tensor, got list",
    ),
    "all the tokenizer gives": (
        lambda m, p: MemorizedSequence({"input_ids": [1, 2]}, 1),
        "tokens must be a tensor, got dict",
    ),
    "one sequence to measure": (
        lambda m, p: accuracy(m, GOOD),
        r"sequences must be a list of sequences, got .*'good'",
    ),
    # text
    "no tokenizer": (
        lambda m, p: MemorizedSequence.from_text(m, "a", " b"),
        "model must have a tokenizer to read text, got none",
    ),
    "name for a model that reads": (
        lambda m, p: MemorizedSequence.from_text("reference", "a", " b"),
        "model must be a TransformerLens model, got str",
    ),
    "no decoder": (
        lambda m, p: levenshtein(m, [GOOD]),
        "decode must be given for a model without a tokenizer, got None",
    ),
    "text that is not recited": (
        lambda m, p: check_recited(m, [GOOD]),
        r"sequence must be recited .*, got 0\.\d+ in .*'good'",
    ),
    "token view of a text that is not recited": (
        lambda m, p: token_view(m, GOOD, NeuronSet(torch.ones(2, 48) > 0), decode=str),
        r"sequence must be recited .*, got 0\.00 in .*'good'",
    ),
    "token view of scores": (
        lambda m, p: token_view(m, GOOD, SCORES, decode=str),
        "neurons must be a NeuronSet, got NeuronScores",
    ),
    "sequence for a batch": (
        lambda m, p: memorization_loss(m, GOOD),
        "batch must be a SequenceBatch, got MemorizedSequence",
    ),
    "batch on another device": (
        lambda m, p: memorization_loss(m, SequenceBatch.of([GOOD], "meta")),
        "batch must be on the model's device 'cpu', got 'meta'. Make it with",
    ),
    # models
    "module that should have a tokenizer": (
        lambda m, p: token_view(torch.nn.Linear(2, 2), GOOD, NeuronSet(torch.ones(2, 48) > 0)),
        "model must be a TransformerLens model, got Linear",
    ),
    "name for the reference model": (
        lambda m, p: reference_sequences("reference"),
        "model must be a TransformerLens model, got str",
    ),
    "module for a loss": (
        lambda m, p: memorization_loss(torch.nn.Linear(2, 2), SequenceBatch.of([GOOD])),
        "model must be a TransformerLens model, got Linear",
    ),
    "name for a model": (
        lambda m, p: ZeroOut()("gpt2", GOOD),
        "model must be a TransformerLens model, got str",
    ),
    "module for a model": (
        lambda m, p: accuracy(torch.nn.Linear(2, 2), [GOOD]),
        "model must be a TransformerLens model, got Linear",
    ),
    "nothing for a model": (
        lambda m, p: inject_with(None),
        "model must be a TransformerLens model, got NoneType",
    ),
    "unknown name": (
        lambda m, p: load_model("gpt2-smal"),
        "name_or_path must be a shipped model, .* got 'gpt2-smal'. .*'gpt2-small'",
    ),
    "empty folder": (
        lambda m, p: load_model(p),
        "name_or_path must hold a config.json that transformers can read, got",
    ),
    "unknown device": (
        lambda m, p: load_model(p, device="gpu"),
        "device must be there, got 'gpu'",
    ),
    "device that is not there": (
        lambda m, p: load_model(p, device="xpu:7"),
        "device must be there, got 'xpu:7'",
    ),
    "device without numbers": (
        lambda m, p: load_model(p, device="meta"),
        "device must be there, got 'meta'",
    ),
    "dtype as text": (
        lambda m, p: load_model(p, dtype="float32"),
        "dtype must be a floating-point torch dtype, got 'float32'",
    ),
    "dtype of whole numbers": (
        lambda m, p: load_model(p, dtype=torch.int8),
        "dtype must be a floating-point torch dtype, got torch.int8",
    ),
    # settings
    **{
        f"{name} of {value!r}": (
            lambda m, p, name=name, value=value: HardConcrete(**{name: value}),
            f"{name} must be {rule}, got ",
        )
        for name, value, rule in [
            ("learning_rate", 0, "above 0 and finite"),
            ("learning_rate", -1e-3, "above 0 and finite"),
            ("learning_rate", float("nan"), "above 0 and finite"),
            ("learning_rate", float("inf"), "above 0 and finite"),
            ("learning_rate", "0.01", "a number"),
            ("sparsity_weight", 0, "above 0 and finite"),
            ("sparsity_weight", None, "a number"),
            ("temperature", -0.3, "above 0 and finite"),
            ("steps", 0, "a whole number from 1 on"),
            ("steps", 2.5, "a whole number from 1 on"),
            ("steps", 20.0, "a whole number from 1 on"),
            ("steps", True, "a number"),
            ("seed", -1, r"a whole number from 0 to 2\*\*63 - 1"),
            ("seed", 0.5, r"a whole number from 0 to 2\*\*63 - 1"),
            ("seed", 2**70, r"a whole number from 0 to 2\*\*63 - 1"),
            ("first_layer", -1, "a whole number from 0 on"),
            ("stop_sparsity", "0.1", "a number"),
            ("stop_sparsity", float("nan"), r"in \[0, 1\]"),
            ("stop_sparsity", -0.1, r"in \[0, 1\]"),
            ("stop_sparsity", 2, r"in \[0, 1\]"),
            ("batch_tokens", 0, "a whole number from 1 on"),
            ("initial_mask", 1.1, r"in \(-0.1, 1.1\)"),
            ("initial_mask", -0.1, r"in \(-0.1, 1.1\)"),
            ("initial_mask", float("nan"), r"in \(-0.1, 1.1\)"),
        ]
    },
    "seed of the baseline": (
        lambda m, p: RandomBaseline(seed=-3),
        r"seed must be a whole number from 0 to 2\*\*63 - 1, got -3",
    ),
    "first layer too high": (
        lambda m, p: Slimming(first_layer=2)(m, GOOD),
        "first_layer must be below the model's 2 layers, got 2",
    ),
    "batch size 0": (
        lambda m, p: ZeroOut().map(m, [GOOD], batch_size=0),
        "batch_size must be a whole number from 1 on, got 0",
    ),
    "injection batch size -1": (
        lambda m, p: inject_together(
            m, [GOOD], ratio=0.1, seed=0, learning_rate=0.1, batch_size=-1
        ),
        "batch_size must be a whole number from 1 on, got -1",
    ),
    # scores and sets
    "mask of numbers": (
        lambda m, p: NeuronSet(torch.ones(2, 3)),
        "mask must be a boolean tensor .* got .*float32",
    ),
    "mask of scores": (
        lambda m, p: NeuronSet(SCORES),
        r"mask must be a boolean tensor .*, got NeuronScores. Take some, as scores.top_k",
    ),
    "mask of text": (lambda m, p: NeuronSet("all"), "mask must be a tensor, got str"),
    "scores of text": (lambda m, p: NeuronScores("high"), "values must be a tensor, got str"),
    "recall of scores": (
        lambda m, p: SCORES.top_k(0.5).recall_of(SCORES),
        "truth must be a NeuronSet, got NeuronScores",
    ),
    "map of a set": (
        lambda m, p: score_map(SCORES.top_k(0.5)),
        "scores must be NeuronScores, got NeuronSet",
    ),
    "method of another model in INJ": (
        lambda m, p: inj_of(m, lambda model, sequence: NeuronScores(torch.rand(3, 48))),
        SHAPE,
    ),
    "method of tensors in INJ": (
        lambda m, p: inj_of(m, lambda model, sequence: torch.rand(2, 48)),
        "methods must return NeuronScores",
    ),
    "mask of one layer": (
        lambda m, p: NeuronSet(torch.ones(3) > 0),
        r"mask must be a boolean tensor .* got shape \(3,\)",
    ),
    "scores of one layer": (
        lambda m, p: NeuronScores(torch.ones(3)),
        r"values must have the shape \[layer neuron\], got \(3,\)",
    ),
    "scores with nan": (
        lambda m, p: NeuronScores(torch.tensor([[1, torch.nan]]), "mine"),
        "values must be finite, got 1 .*'mine'",
    ),
    "scores with inf": (
        lambda m, p: NeuronScores(torch.tensor([[1, torch.inf]])),
        "values must be finite, got 1",
    ),
    "recall in another model": (
        lambda m, p: SCORES.top_k(0.5).recall_of(NeuronSet(torch.ones(3, 48) > 0)),
        r"truth must have the shape",
    ),
    "recall of nothing": (
        lambda m, p: SCORES.top_k(0.5).recall_of(NeuronSet(torch.zeros(2, 48) > 0)),
        "truth must hold at least one",
    ),
    "dropout in another model": (
        lambda m, p: NeuronSet(torch.ones(3, 48) > 0).dropped_out(m).__enter__(),
        r"mask must have the model's shape \(2, 48\), got \(3, 48\)",
    ),
    "dropout hooks in another model": (
        lambda m, p: m.run_with_hooks(
            GOOD.tokens, fwd_hooks=NeuronSet(torch.ones(2, 47) > 0).dropout_hooks()
        ),
        "mask must have the model's 48 neurons a layer, got 47",
    ),
    "injection in another model": (
        lambda m, p: (
            Injection(
                NeuronSet(torch.ones(3, 48) > 0),
                torch.zeros(144, 24),
                torch.ones(1),
                torch.ones(1),
                True,
            )
            .applied(m)
            .__enter__()
        ),
        "model must have 3 layers of 48 neurons .*, got 2 layers",
    ),
    # files
    "damaged file": (
        lambda m, p: NeuronScores.load(written(p, b"not safetensors")),
        "path must be a whole safetensors file, got",
    ),
    "empty file": (
        lambda m, p: NeuronScores.load(written(p, b"")),
        "path must be a whole safetensors file, got",
    ),
    "half a file": (
        lambda m, p: NeuronScores.load(halved(p)),
        "path must be a whole safetensors file, got",
    ),
    "other tensors": (
        lambda m, p: Injection.load(saved(p)),
        r"path must hold the tensors \['mask', .* got .* without",
    ),
    # perplexity
    "perplexity of a vector": (
        lambda m, p: perplexity(m, torch.arange(5)),
        r"tokens must be token ids \[batch pos\] .* got shape \(5,\)",
    ),
    "perplexity of one token": (
        lambda m, p: perplexity(m, torch.zeros(2, 1, dtype=torch.long)),
        "tokens must be token ids .* 2 to n_ctx=32",
    ),
    "perplexity of nothing": (
        lambda m, p: perplexity(m, torch.zeros(0, 9, dtype=torch.long)),
        r"tokens must be .* got shape \(0, 9\)",
    ),
    "perplexity of too long": (
        lambda m, p: perplexity_base2(m, torch.zeros(1, 33, dtype=torch.long)),
        "tokens must be .*n_ctx=32 positions",
    ),
    "perplexity outside the vocabulary": (
        lambda m, p: perplexity(m, torch.tensor([[1, 61]])),
        r"tokens must be in \[0, 61\), got 61",
    ),
    "perplexity of text": (
        lambda m, p: perplexity(m, "Two roads"),
        r"tokens must be a tensor of token ids \[batch pos\], got str",
    ),
    "perplexity of a list": (
        lambda m, p: perplexity(m, [[1, 2]]),
        r"tokens must be a tensor of token ids \[batch pos\], got list",
    ),
    "perplexity of floats": (
        lambda m, p: perplexity(m, torch.rand(2, 5)),
        r"tokens must be token ids .* of torch\.float32",
    ),
    # injection
    "injection learning rate": (
        lambda m, p: inject_with(m, learning_rate=0),
        "learning_rate must be above 0 and finite, got 0",
    ),
    "injection learning rate as text": (
        lambda m, p: inject_with(m, learning_rate="x"),
        "learning_rate must be a number, got 'x'",
    ),
    "benchmark's ratio in percent": (
        lambda m, p: InjBenchmark(model=m, sequences=[GOOD], ratio=1),
        r"multiples must keep ratio \* multiple in \(0, 1\], got \(1, 2, 5\) with ratio 1. Use a "
        r"smaller ratio",
    ),
    "injection steps": (
        lambda m, p: inject_with(m, max_steps=0),
        "max_steps must be a whole number from 1 on, got 0",
    ),
    "injection seed": (
        lambda m, p: inject_with(m, seed=-1),
        r"seed must be a whole number from 0 to 2\*\*32 - 1, got -1",
    ),
    "injection seed too large": (
        lambda m, p: inject_with(m, seed=2**32),
        r"seed must be a whole number from 0 to 2\*\*32 - 1, got",
    ),
    "seed of Zero-Out": (
        lambda m, p: ZeroOut(seed=2**63),
        r"seed must be a whole number from 0 to 2\*\*63 - 1, got",
    ),
    "steps of Integrated Gradients": (
        lambda m, p: IntegratedGradients(steps=0),
        "steps must be a whole number from 1 on, got 0",
    ),
    "injection stop loss": (
        lambda m, p: inject_with(m, stop_loss=-1),
        "stop_loss must be above 0 and finite, got -1",
    ),
}


def written(folder: Path, content: bytes) -> Path:
    (folder / "file.safetensors").write_bytes(content)
    return folder / "file.safetensors"


def saved(folder: Path) -> Path:
    SCORES.save(folder / "scores.safetensors")
    return folder / "scores.safetensors"


def halved(folder: Path) -> Path:
    content = saved(folder).read_bytes()
    return written(folder, content[: len(content) // 2])


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named(unchecked: None, gpt2_like: Any, tmp_path: Path, case: str) -> None:
    act, message = CASES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        act(gpt2_like, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_told_rule_value_and_remedy(
    unchecked: None, gpt2_like: Any, tmp_path: Path, case: str
) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        CASES[case][0](gpt2_like, tmp_path)
    assert FORM.match(str(caught.value)), str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_leaves_the_model_as_it_was(
    unchecked: None, gpt2_like: Any, tmp_path: Path, unchanged: Any, case: str
) -> None:
    check = unchanged(gpt2_like)
    with pytest.raises((ValueError, TypeError)):
        CASES[case][0](gpt2_like, tmp_path)
    check()


@pytest.mark.parametrize("name", METHODS)
def test_unknown_setting_is_refused_by_python(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'learing_rate'"):
        METHODS[name](learing_rate=1.0)


def test_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"path must be an existing safetensors file, got .*no\.safetensors"
    ):
        NeuronScores.load(tmp_path / "no.safetensors")


def test_saving_into_a_missing_folder_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"path must be in an existing folder, got .*none"):
        SCORES.save(tmp_path / "none" / "scores.safetensors")


@pytest.mark.parametrize("name", ["zero_out", "integrated_gradients", "activations"])
def test_scores_that_are_not_finite_are_refused(gpt2_like: Any, unchecked: None, name: str) -> None:
    gpt2_like.blocks[0].mlp.W_in.data[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=rf"values must be finite, got .*'{name}', sequence 'good'"
    ):
        METHODS[name]()(gpt2_like, GOOD)


def test_method_without_attribute_is_named(gpt2_like: Any) -> None:
    from dataclasses import dataclass
    from typing import ClassVar

    from tl_localize import Localizer

    @dataclass(frozen=True, kw_only=True)
    class Empty(Localizer):
        name: ClassVar[str] = "empty"

    with pytest.raises(TypeError, match=r"Empty must define attribute or attribute_batch"):
        Empty()(gpt2_like, GOOD)


def test_method_that_returns_another_shape_is_named(gpt2_like: Any, unchecked: None) -> None:
    from dataclasses import dataclass
    from typing import ClassVar

    from tl_localize import Localizer

    @dataclass(frozen=True, kw_only=True)
    class Wide(Localizer):
        name: ClassVar[str] = "wide"

        def attribute(self, neurons: Any, sequence: Any) -> torch.Tensor:
            return torch.zeros(48, 2)

    with pytest.raises(
        ValueError, match=r"scores must have the model's shape \(2, 48\), got \(48, 2\) from .*Wide"
    ):
        Wide()(gpt2_like, GOOD)
