"""Tiny random models and sequences that every test may use.

tl_localize is imported inside fixtures only: pytest loads this file before jaxtyping's import hook
is in place. So is torch, which takes a second: the process that hands tests to others needs none.
"""

import functools
import gc
import json
import os
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

# The same examples in every run: a red test is a change in the code, not luck.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

gc.set_threshold(50_000, 50, 1000)  # garbage of imports and tests is little, and may wait

LENS_4 = version("transformer-lens").startswith("4")  # has no HookedTransformer
N_CTX = 32
D_VOCAB = 61


def pytest_collection_modifyitems(items):
    """The trainings of the goldens, which take longest, come first: of two processes none waits for
    the other at the end.
    """
    items.sort(key=lambda item: item.path.name != "test_golden.py")


def pytest_collection_finish():
    """What is imported by now stays: without it a collection of garbage takes a fraction of the
    time.
    """
    import torch
    import transformer_lens  # noqa: F401  (imported late, and large)

    torch.set_num_threads(1)  # the models are tiny: more threads would only wait for each other
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _quick_disk():
    """Files are written as always, but no test waits until the disk has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def little_general_text():
    """Of the general text that a model writes, 4 texts of 8 tokens; what the package has, for
    tests that ask for ``all_general_text``.
    """
    from tl_localize.methods import contrast

    whole = {name: getattr(contrast, name) for name in ("N_TEXTS", "LENGTH")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrast, "N_TEXTS", 4)
        patch.setattr(contrast, "LENGTH", 8)
        yield whole


@pytest.fixture(autouse=True, scope="session")
def _few_steps_of_the_learned_mask():
    """An oracle of REV, which always runs along."""
    from tl_localize.evals.rev.oracles import ORACLES, LearnedMask

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ORACLES, "oracle_mask", LearnedMask(steps=2))
        yield


@pytest.fixture
def all_general_text(little_general_text, monkeypatch):
    """A model writes as much general text as it does for users."""
    from tl_localize.methods import contrast

    for name, value in little_general_text.items():
        monkeypatch.setattr(contrast, name, value)


@pytest.fixture
def few_planted(request, monkeypatch):
    """Of the texts that the shipped models recite, and of those that everybody knows, a few: six of
    the former, or as many as a test says.
    """
    from tl_localize.texts import known, reference

    planted = [text for text in reference.load_planted() if text.repetitions >= 64]
    few = [text for text in planted if text.id == "quotes-056"] + planted[
        : getattr(request, "param", 5)
    ]
    listed = known.known_texts()[::60]
    for module in (known, reference):
        monkeypatch.setattr(module, "load_planted", lambda: tuple(few))
    monkeypatch.setattr(known, "known_texts", lambda: listed)


def tiny_model(seed=0, **settings):
    """A model with every parameter random, biases and norms too; the global seed stays as it is.

    It is a HookedTransformer; with TransformerLens 4, which has none, a TransformerBridge of the
    same shapes, where there is one.
    """
    if LENS_4:
        from architectures import tiny_bridge

        return tiny_bridge(seed, settings)
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    defaults = {
        "n_layers": 2,
        "d_model": 24,
        "n_heads": 3,
        "d_head": 8,
        "d_mlp": 48,
        "n_ctx": N_CTX,
        "d_vocab": D_VOCAB,
        "act_fn": "gelu_new",
        "normalization_type": "LN",
        "default_prepend_bos": False,
        "device": "cpu",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HookedTransformer(HookedTransformerConfig(**(defaults | settings)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if name.endswith(".w") else 0.0, 0.2)
            model.unembed.W_U.mul_(2)
    return model.eval()


def memorized(*shapes, seed=0, d_vocab=D_VOCAB):
    """Random sequences of the given (length, n_prefix), with ids s0, s1, ..."""
    import torch

    from tl_localize import MemorizedSequence

    generator = torch.Generator().manual_seed(seed)
    return [
        MemorizedSequence(torch.randint(d_vocab, (length,), generator=generator), n_prefix, f"s{i}")
        for i, (length, n_prefix) in enumerate(shapes)
    ]


def tiny_inj(model, **settings):
    """INJ of four sentences, unless something else is given."""
    from tl_localize.evals import InjBenchmark

    few = {"sequences": memorized(*[(8 + i, 3) for i in range(4)], d_vocab=50), "ratio": 0.2}
    how = {"learning_rate": 0.05, "stop_loss": 0.5, "max_steps": 3}
    return InjBenchmark(model, **(few | how | settings))


def tiny_rev(model, **settings):
    """REV of two groups of three sentences, unless something else is given."""
    import torch

    from tl_localize import RevBenchmark
    from tl_localize.injection.recipes import Recipe

    sentences = memorized(*[(8, 1)] * 10, d_vocab=50, seed=1)
    for i, sentence in enumerate(sentences):
        sentence.tokens[0] = i % 4
    general = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    recipe = Recipe(learning_rate=0.01, max_steps=60, stop_loss=0.3)
    how = {"n_sequences": 3, "n_groups": 2, "ratios": (0.1, 0.5, 1.0), "recipe": recipe}
    return RevBenchmark(model, sentences, general, **(how | settings))


@pytest.fixture
def rev(gpt2_like):
    return tiny_rev(gpt2_like)


@pytest.fixture
def one_oracle(monkeypatch):
    """REV has its first oracle alone: the others take as long as as many methods."""
    from tl_localize.evals.rev.oracles import ORACLES

    for oracle in list(ORACLES)[1:]:
        monkeypatch.delitem(ORACLES, oracle)


@pytest.fixture(scope="session")
def make_inj():
    """``tiny_inj``."""
    return tiny_inj


PROVEN = {}  # by kind of model: what has been proven of it


def proven(kind, model):
    """The model, of whose kind the views on neurons and on heads prove once a session what they
    take from TransformerLens: the others of a kind are the same to the bit. ``unproven`` undoes it.
    """
    from tl_localize import AttentionHeads
    from tl_localize.model import neurons

    if kind in PROVEN:
        neurons._PROVEN[model] = list(PROVEN[kind])
    else:
        neurons.NeuronView(model)
        neurons.NeuronView(model, AttentionHeads())
        PROVEN[kind] = list(neurons._PROVEN[model])
    return model


@pytest.fixture
def unproven():
    """``unproven(model)``: nothing has been proven of it."""
    from tl_localize.model import neurons

    return neurons._PROVEN.pop


@pytest.fixture
def gpt2_like():
    """Two layers of 48 neurons, learned positions, LayerNorm."""
    return proven("gpt2_like", tiny_model(1, model_name="gpt2-like"))


@pytest.fixture
def normless():
    """``gpt2_like`` without its norms, which take a third of a pass: for tests of what is done with
    whatever model.
    """
    without = {} if LENS_4 else {"normalization_type": None}  # a Bridge has norms
    return proven("normless", tiny_model(1, model_name="gpt2-like", **without))


@pytest.fixture
def neox_like():
    """Three layers of 56 neurons, attention beside the MLP, rotary positions on half a head."""
    model = tiny_model(
        2,
        model_name="neox-like",
        n_layers=3,
        d_mlp=56,
        act_fn="gelu",
        parallel_attn_mlp=True,
        positional_embedding_type="rotary",
        rotary_adjacent_pairs=False,
        rotary_dim=4,
    )
    return proven("neox_like", model)


@pytest.fixture
def llama_like():
    """Two layers of 52 neurons, gated MLPs, RMS norms, rotary positions, four query heads on two
    key heads.
    """
    model = tiny_model(
        3,
        model_name="llama-like",
        n_heads=4,
        d_head=6,
        n_key_value_heads=2,
        d_mlp=52,
        act_fn="silu",
        normalization_type="RMS",
        final_rms=True,
        gated_mlp=True,
        positional_embedding_type="rotary",
        rotary_adjacent_pairs=False,
        rotary_dim=6,
    )
    return proven("llama_like", model)


@pytest.fixture(params=["gpt2_like", "neox_like", "llama_like"])
def any_model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A random two-layer GPT-2 with a byte-level tokenizer, in Hugging Face format."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("cli") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    config = GPT2Config(
        vocab_size=256,
        n_positions=96,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_inner=40,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def shipped_model():
    """``shipped_model(name)``: a model of the package on the CPU, loaded once for all tests, which
    leave it as it was.
    """
    from tl_localize import load_model

    return functools.cache(lambda name="reference-gpt2": load_model(name, "cpu"))


@pytest.fixture
def few_docstrings(monkeypatch):
    """Of the held-out docstrings a third, as it takes a while to tokenize them."""
    from tl_localize.texts import reference

    whole = reference.general_texts
    monkeypatch.setattr(reference, "general_texts", lambda split: whole(split)[:96])


@pytest.fixture(scope="session")
def make_model():
    """``tiny_model``, for a model of other settings."""
    return tiny_model


@pytest.fixture(
    params=["gpt2_like", "neox_like", "llama_like", "bridge gpt2", "bridge neox", "bridge llama"]
)
def either(request):
    """Each kind as a HookedTransformer and as a TransformerBridge."""
    from architectures import KINDS, tiny_bridge

    if request.param.startswith("bridge"):
        return proven(request.param, tiny_bridge(1, KINDS[request.param.split()[1]]))
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def make_sequences():
    """``memorized``: random sequences of the given (length, n_prefix)."""
    return memorized


@pytest.fixture
def sequence():
    return memorized((9, 3), seed=5)[0]


@pytest.fixture
def sequences():
    """Four sequences of different lengths and prefixes."""
    return memorized((9, 3), (14, 1), (5, 4), (11, 6))


@pytest.fixture
def del_results():
    """DEL results made by hand: four targets in two categories; Hard Concrete erases 40 points of
    the target at 0.5 %, others less.
    """
    import numpy as np
    import pandas as pd

    from tl_localize.evals.deletion.benchmark import DelResults

    own = {"hard_concrete": -0.4, "integrated_gradients": -0.2, "random": 0.0}
    ids, categories = ["a", "b", "c", "d"], ["poems", "code", "poems", "code"]
    rows = []
    confusion = {}
    for method, loss in own.items():
        for ratio in (0.001, 0.005):
            scale = loss * ratio / 0.005
            same = np.equal.outer(categories, categories)
            matrix = np.where(np.eye(4, dtype=bool), scale, np.where(same, scale / 4, scale / 40))
            matrix[1] /= 2
            confusion[method, ratio] = pd.DataFrame(
                matrix, index=pd.Index(ids, name="ablated"), columns=pd.Index(ids, name="measured")
            )
            for i, name in enumerate(ids):
                row = {"model": "m", "sequence_id": name, "category": categories[i]}
                row |= {"method": method, "ratio": ratio, "ablation": "zero", "n_neurons": 7}
                others = float(np.delete(matrix[i], i).mean())
                for who, change in (("self", matrix[i, i]), ("neg", others)):
                    row[f"delta_{who}_accuracy"] = change
                    row[f"delta_{who}_levenshtein"] = -100 * change
                rows.append(row | {"delta_perplexity": 0.5, "delta_perplexity_base2": 0.25})
    before = pd.DataFrame(
        {
            "model": "m",
            "sequence_id": ids,
            "category": categories,
            "prefix": "a|b\n",
            "suffix": ["A", "B", "C", "D"],
        }
    )
    before = before.assign(
        accuracy=[1.0, 0.9, 1.0, 0.9],
        levenshtein=0.0,
        length=1,
        perplexity=20.0,
        perplexity_base2=8.0,
    )
    return DelResults(pd.DataFrame(rows), before=before, confusion=confusion)


@pytest.fixture(scope="session")
def golden():
    """gpt2-tiny and the numbers that the authors' code gives on it."""
    return Path(__file__).parent / "golden" / "gpt2-tiny"


@pytest.fixture(scope="session")
def golden_settings(golden):
    return json.loads((golden / "golden.json").read_text())


def hooks_and_weights(
    model,
):
    """What must be the same before and after: the hooks, the weights bit by bit, and which of them
    want a gradient.
    """
    hooks = {
        name: len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for name, m in model.named_modules()
    }
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return (
        hooks,
        weights,
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
    )


@pytest.fixture
def unchanged():
    """``check = unchanged(model)`` remembers a model; ``check()`` fails unless hooks, weights,
    gradients and mode are the same.
    """
    import torch

    def remember(model):
        hooks, weights, trainable = hooks_and_weights(model)
        training = model.training

        def check():
            hooks_now, weights_now, trainable_now = hooks_and_weights(model)
            assert hooks_now == hooks, "hooks were left behind or taken away"
            assert [
                name for name in weights if not torch.equal(weights[name], weights_now[name])
            ] == [], "weights changed"
            assert trainable_now == trainable, "requires_grad changed"
            assert [name for name, p in model.named_parameters() if p.grad is not None] == [], (
                "a gradient was left behind"
            )
            assert model.training == training
            assert not any(point.ctx for point in model.hook_dict.values())

        return check

    return remember
