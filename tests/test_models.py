"""load_model: directories of each family against transformers, tokenizers without BOS, and refusals
by name.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import save
from safetensors.torch import load_file, save_file

from tl_localize import MemorizedSequence, NeuronSet, ZeroOut, load_model
from tl_localize.forward import is_bridge
from tl_localize.models import check_device, has_hooked_transformer

TOKENS = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(2))


def gpt2(**settings: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        **{
            "vocab_size": 61,
            "n_positions": 24,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_inner": 128,
            **settings,
        }
    )


def neox(**settings: Any) -> Any:
    from transformers import GPTNeoXConfig

    sizes = {
        "vocab_size": 61,
        "max_position_embeddings": 24,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return GPTNeoXConfig(**{**sizes, "intermediate_size": 80, **settings})


def llama(name: str = "Llama", **settings: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": 61,
        "max_position_embeddings": 24,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return getattr(transformers, f"{name}Config")(
        **{**sizes, "num_key_value_heads": 2, "intermediate_size": 80, **settings}
    )


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2 with n_inner of 8 n_embd": gpt2,
    "gpt2 with n_inner of 4 n_embd by default": lambda: gpt2(n_inner=None),
    "gpt2 with relu": lambda: gpt2(activation_function="relu"),
    "gpt2 without scaled attention": lambda: gpt2(scale_attn_weights=False),
    "gpt2 with attention scaled by layer": lambda: gpt2(scale_attn_by_inverse_layer_idx=True),
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False),
    "gpt2 with another eps": lambda: gpt2(layer_norm_epsilon=1e-2),
    "neox": neox,
    "neox with rotary on all dimensions": lambda: neox(
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.0}
    ),
    "neox with another base": lambda: neox(
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    ),
    "neox without parallel residual": lambda: neox(use_parallel_residual=False),
    "neox tied": lambda: neox(tie_word_embeddings=True),
    "llama with grouped heads": llama,
    "llama with one key head": lambda: llama(num_key_value_heads=1),
    "llama without groups": lambda: llama(num_key_value_heads=4),
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama with its own head_dim": lambda: llama(head_dim=12),
    "llama with rope llama3": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "llama with another base": lambda: llama(
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
    "mistral": lambda: llama("Mistral", sliding_window=None),
    "qwen2": lambda: llama("Qwen2"),
    "qwen2 tied": lambda: llama("Qwen2", tie_word_embeddings=True),
}
BRIDGED: dict[str, Callable[[], Any]] = {  # models and settings that HookedTransformer can't hold
    "bloom": lambda: other("Bloom", hidden_size=16, n_layer=1, n_head=2),
    "opt": lambda: other(
        "OPT",
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        word_embed_proj_dim=16,
        pad_token_id=0,
    ),
    "llama linear rope": lambda: llama(
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "neox dynamic rope": lambda: neox(
        rope_parameters={
            "rope_type": "dynamic",
            "factor": 2.0,
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        }
    ),
    "mistral sliding window": lambda: llama("Mistral", sliding_window=8),
    "llama attention bias": lambda: llama(attention_bias=True),
    "llama mlp bias": lambda: llama(mlp_bias=True),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "neox without attention bias": (
        lambda: neox(attention_bias=False),
        "must be a model that TransformerLens adapts, got .*GPTNeoX",
    ),
    "gpt2 cross attention": (lambda: gpt2(add_cross_attention=True), "add_cross_attention=True"),
    "mixture": (
        lambda: llama("Mixtral", num_local_experts=4),
        "one MLP per layer, got .* with 4 experts",
    ),
}


def other(name: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, f"{name}Config")(vocab_size=61, **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(gpt2(), tmp_path / "model")
    return tmp_path / "model"


# Weights


ONLY_HOOKED = pytest.mark.skipif(
    version("transformer-lens").startswith("4"), reason="TransformerLens 4 has no HookedTransformer"
)


@ONLY_HOOKED  # a Bridge: below
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_load_model_has_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    expected = save(FAMILIES[family](), tmp_path)(TOKENS).logits
    assert (load_model(tmp_path, device="cpu")(TOKENS) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", [*FAMILIES, *BRIDGED])
@torch.no_grad()
def test_load_model_as_a_bridge_has_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    """Where HookedTransformer can't hold the model, nobody has to ask for a Bridge."""
    expected = save((FAMILIES | BRIDGED)[family](), tmp_path)(TOKENS).logits
    if family == "gpt2 without scaled attention":
        with pytest.raises(
            ValueError, match=r"TransformerLens can hold, got .* with scale_attn_weights=False"
        ):
            load_model(tmp_path, device="cpu", bridge=True)
        return
    model = load_model(tmp_path, device="cpu", bridge=family in FAMILIES)
    assert is_bridge(model) and not model.training and model.cfg.default_prepend_bos is False
    assert (model(TOKENS) - expected).abs().max() < 1e-4


def test_a_loaded_model_is_what_was_promised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    weight = load_file(folder / "model.safetensors")["transformer.h.1.mlp.c_proj.weight"]
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    monkeypatch.chdir(folder.parent)
    model = load_model("model", device="cpu")
    assert torch.equal(torch.rand(3), drawn)  # the global seed is left alone
    assert capfd.readouterr() == ("", "")
    assert is_bridge(model) is not has_hooked_transformer()
    assert torch.equal(model.W_out[1], weight) and model.cfg.d_mlp == 128
    assert not model.training and model.cfg.default_prepend_bos is False
    assert model.tokenizer is None  # the folder has none
    with torch.no_grad():
        model.W_E.zero_()
        model.blocks[0].mlp.W_out.zero_()
    again = load_model(folder, device="cpu")  # shares no memory with the file
    assert again.W_E.any() and again.blocks[0].mlp.W_out.any()
    neurons = ZeroOut()(again, MemorizedSequence(TOKENS[0, :6], 3)).top_k(0.1)
    assert isinstance(neurons, NeuronSet) and len(neurons) == 26


@pytest.mark.parametrize("word", ["llama", "pythia", "gpt2", "Meta-Llama-3", "opt"])
@torch.no_grad()
def test_load_model_does_not_read_the_path_for_a_name(tmp_path: Path, word: str) -> None:
    hf = save(neox(), tmp_path / word / f"my-{word}-model")
    model = load_model(tmp_path / word / f"my-{word}-model", device="cpu")
    assert (model(TOKENS) - hf(TOKENS).logits).abs().max() < 1e-4


@torch.no_grad()
def test_load_model_reads_fp16_weights_into_float32(tmp_path: Path) -> None:
    hf = save(gpt2(), tmp_path, torch.float16).float()
    model = load_model(tmp_path, device="cpu")
    assert model.W_out.dtype == torch.float32
    assert (model(TOKENS) - hf(TOKENS).logits).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_load_model_in_another_dtype(folder: Path, dtype: torch.dtype) -> None:
    assert {p.dtype for p in load_model(folder, device="cpu", dtype=dtype).parameters()} == {dtype}


@torch.no_grad()
def test_load_model_reads_sharded_weights(tmp_path: Path) -> None:
    hf = save(llama(), tmp_path)
    shutil.rmtree(tmp_path)
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert (load_model(tmp_path, device="cpu")(TOKENS) - hf(TOKENS).logits).abs().max() < 1e-4


@pytest.mark.parametrize("shown", [True, False])
def test_load_model_gives_the_progress_bars_back(folder: Path, shown: bool) -> None:
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    try:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
        load_model(folder, device="cpu")
        assert logging.is_progress_bar_enabled() is shown
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


# Tokenizers

TEXTS = ("Two roads diverged in", " a yellow wood,\n\nAnd sorry I could not travel 12345 bo")


def byte_pairs(path: Path) -> None:
    """A GPT-2-like tokenizer, as its vocabulary and merges."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(TEXTS)] * 4, 300, special_tokens=["<|endoftext|>"])
    trained.save_model(str(path))


def with_bos(path: Path) -> None:
    """A tokenizer whose post-processor puts BOS first, as its tokenizer.json."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(TEXTS)] * 4, 300, special_tokens=["<s>"])
    trained._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="<s>"
    ).save_pretrained(path)


def real_gpt2(path: Path, shared: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(shared / "data" / "tokenizers" / "gpt2" / name, path / name)


def real_neox(path: Path, shared: Path) -> None:
    shutil.copyfile(
        shared / "data" / "tokenizers" / "gpt-neox-20b" / "tokenizer.json", path / "tokenizer.json"
    )


@pytest.fixture(params=["byte pairs", "with BOS", "GPT-2", "GPT-NeoX"])
def readable(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model folder with a tokenizer in it."""
    kind = request.param
    size = {"byte pairs": 300, "with BOS": 300, "GPT-2": 50257, "GPT-NeoX": 50304}[kind]
    save(neox(vocab_size=size) if kind == "GPT-NeoX" else gpt2(vocab_size=size), tmp_path)
    if kind in ("byte pairs", "with BOS"):
        (byte_pairs if kind == "byte pairs" else with_bos)(tmp_path)
    else:
        (real_gpt2 if kind == "GPT-2" else real_neox)(tmp_path, request.getfixturevalue("shared"))
    return tmp_path


def test_a_loaded_model_reads_text_with_the_folders_own_tokenizer(
    readable: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    model = load_model(readable, device="cpu")
    assert capfd.readouterr() == ("", "")
    sequence = MemorizedSequence.from_text(model, *TEXTS)
    parts = model.tokenizer.decode(sequence.prefix), model.tokenizer.decode(sequence.suffix)
    assert parts == TEXTS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = AutoTokenizer.from_pretrained(readable)
    wanted, start = own([TEXTS[0] + TEXTS[1], TEXTS[0]], add_special_tokens=False)["input_ids"]
    assert sequence.tokens.tolist() == wanted
    assert model.to_tokens(TEXTS[0])[0].tolist() == start  # without BOS


# Refusals


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_load_model_refuses_what_it_can_not_load_right(tmp_path: Path, family: str) -> None:
    make, message = REFUSED[family]
    save(make(), tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, device="cpu")


@ONLY_HOOKED
def test_load_model_refuses_other_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tl_localize import models

    shapes, convert = models._CONFIGS["gpt2"]
    monkeypatch.setitem(
        models._CONFIGS, "gpt2", (lambda c: shapes(c) | {"act_fn": "relu"}, convert)
    )
    with pytest.raises(ValueError, match=r"whose logits TransformerLens reproduces, got .*off by"):
        load_model(folder, device="cpu")


def precision() -> tuple[str, Any]:
    """What both settings of torch say."""
    new = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    try:
        return torch.get_float32_matmul_precision(), new
    except RuntimeError:
        return "only the new one was set", new


@pytest.mark.parametrize("old", ["highest", "high", "medium"])
@pytest.mark.parametrize("new", [None, "tf32"])
def test_logits_are_checked_at_full_precision(folder: Path, old: str, new: str | None) -> None:
    """Where TF32 is allowed its rounding would refuse every model on a GPU."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    inside: set[tuple[str, Any]] = set()
    hook = register_module_forward_pre_hook(lambda *_: inside.add(precision()))
    matmul: Any = torch.backends.cuda.matmul
    try:
        torch.set_float32_matmul_precision(old)
        if new is not None and hasattr(matmul, "fp32_precision"):
            matmul.fp32_precision = new
        before = precision()
        load_model(folder, device="cpu")
        assert inside and inside <= {("highest", None), ("highest", "ieee")}
        assert precision() == before
    finally:
        hook.remove()
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["reference-gpt2", "reference-pythia"])
def test_shipped_models_load_where_tf32_is_allowed(name: str) -> None:
    try:
        torch.set_float32_matmul_precision("high")
        load_model(name, device="cuda")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"model_type": "no-such-model"}'])
def test_load_model_refuses_a_damaged_config(folder: Path, content: str | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"name_or_path must hold a config\.json .*, got .*model"):
        load_model(folder)


DEEP = "[" * 100_000
ODD_FILES = {  # what transformers or json answer in their own words, or with a traceback
    "deep config": ("config.json", DEEP),
    "model type of another kind": ("config.json", '{"model_type": {}}'),
    "negative size": ("config.json", {"n_embd": -1}),
    "size of another kind": ("config.json", {"vocab_size": "x"}),
    "no heads": ("config.json", {"n_head": 0}),
    "unknown activation": ("config.json", {"activation_function": "no-such"}),
    "dropout above 1": ("config.json", {"attn_pdrop": 3}),
    "null tokenizer": ("tokenizer.json", "null"),
    "deep tokenizer": ("tokenizer.json", DEEP),
    "tokenizer without a model": ("tokenizer.json", '{"model": null}'),
    "list as settings of the tokenizer": ("tokenizer_config.json", "[]"),
    "settings of generation": ("generation_config.json", DEEP),
    "index of another form": ("model.safetensors.index.json", '{"weight_map": null}'),
    "deep index": ("model.safetensors.index.json", DEEP),
}


@pytest.mark.parametrize("case", ODD_FILES)
def test_a_file_that_transformers_can_not_read_is_named_with_its_place(
    folder: Path, case: str
) -> None:
    name, content = ODD_FILES[case]
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / name).read_text()) | content)
    if "index" in name:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match="name_or_path must") as caught:
        load_model(folder, device="cpu")
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(folder))


@pytest.mark.parametrize("keep", [None, 0, 4, 1000])
def test_load_model_refuses_damaged_weights(folder: Path, keep: int | None) -> None:
    weights = folder / "model.safetensors"
    start = weights.read_bytes()[:keep]
    weights.unlink()
    if keep is not None:
        weights.write_bytes(start)
    with pytest.raises(ValueError, match=r"with safetensors weights .*, got .*model"):
        load_model(folder)


def test_load_model_refuses_missing_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    removed = next(name for name in weights if name.endswith("1.mlp.c_fc.weight"))
    del weights[removed]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=f"name_or_path must hold every weight of its config, .*{removed} missing"
    ):
        load_model(folder)


def test_load_model_refuses_weights_of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_inner": 96}))
    with pytest.raises(ValueError, match="name_or_path must hold"):
        load_model(folder)


def test_load_model_refuses_weights_that_the_config_has_no_place_for(tmp_path: Path) -> None:
    save(gpt2(n_layer=6), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    with pytest.raises(
        ValueError,
        match=(
            r"only weights that its config has a place for, got .*h\.3\.attn.* others beside them"
        ),
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("saved", [0, 2])
def test_load_model_refuses_a_config_without_layers(tmp_path: Path, saved: int) -> None:
    save(gpt2(n_layer=saved), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 0}))
    with pytest.raises(ValueError, match="name_or_path must be a model with layers, got 0 in"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "buffer"),
    [
        ("gpt2 untied", "transformer.h.{}.attn.bias"),
        ("gpt2 untied", "transformer.h.{}.attn.masked_bias"),
        ("neox", "gpt_neox.layers.{}.attention.bias"),
        ("neox", "gpt_neox.layers.{}.attention.masked_bias"),
        ("neox", "gpt_neox.layers.{}.attention.rotary_emb.inv_freq"),
        ("llama without groups", "model.layers.{}.self_attn.rotary_emb.inv_freq"),
    ],
)
@torch.no_grad()
def test_load_model_takes_files_that_hold_buffers(tmp_path: Path, family: str, buffer: str) -> None:
    hf = save(FAMILIES[family](), tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {
        buffer.format(i): torch.ones(2) for i in range(2)
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (load_model(tmp_path, device="cpu")(TOKENS) - hf(TOKENS).logits).abs().max() < 1e-4


def beside_an_index(path: Path) -> Path:
    """A folder with a model in several files, their index, and the same model in one file."""
    hf = save(llama(), path)
    hf.save_pretrained(path, max_shard_size="20KB")
    assert (path / "model.safetensors.index.json").is_file()
    hf.save_pretrained(path / "whole")
    return (path / "whole" / "model.safetensors").rename(path / "model.safetensors")


def test_load_model_checks_the_whole_file_that_it_loads_beside_an_index(tmp_path: Path) -> None:
    whole = beside_an_index(tmp_path)
    whole.write_bytes(whole.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"with safetensors weights .*, got '{tmp_path}'"):
        load_model(tmp_path)


def test_load_model_does_not_ask_for_files_that_it_does_not_load(tmp_path: Path) -> None:
    beside_an_index(tmp_path)
    for part in tmp_path.glob("model-0*.safetensors"):
        part.unlink()
    assert load_model(tmp_path, device="cpu").cfg.n_layers == 2


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gpt3-smal", "gpt2-small"),
        ("reference-gpt", "reference-gpt2"),
        ("pythia-70M-dedup", "pythia-70m-deduped"),
        ("no/such/folder", ""),
    ],
)
def test_load_model_refuses_an_unknown_name_and_offers_near_ones(name: str, near: str) -> None:
    with pytest.raises(
        ValueError, match=f"name_or_path must be a shipped model, .* got '{name}'.*{near}"
    ):
        load_model(name)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:77"])
def test_a_device_that_is_not_there_is_refused_before_weights_are_read(
    tmp_path: Path, device: str
) -> None:
    with pytest.raises(ValueError, match=f"device must be there, got '{device}', which torch can"):
        load_model(tmp_path, device=device)


@pytest.mark.parametrize(("there", "wanted"), [(True, "cuda"), (False, "cpu")])
def test_device_is_cuda_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch, there: bool, wanted: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert check_device(None).type == wanted


def test_load_model_refuses_a_file(folder: Path) -> None:
    with pytest.raises(ValueError, match="name_or_path must be"):
        load_model(folder / "model.safetensors")


def test_load_model_needs_transformer_lens_only_when_it_loads() -> None:
    assert "transformer_lens" not in vars(sys.modules["tl_localize.models"])


# GGUF files


def write_gguf(path: Path, model: Any) -> None:
    """A tiny Llama as llama.cpp writes it: float32, rows of queries and keys in the order of its
    rotation.
    """
    gguf = pytest.importorskip("gguf")
    c, weights = (
        model.config,
        {name: value.float().numpy() for name, value in model.state_dict().items()},
    )
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(ord("a") + i) for i in range(c.vocab_size - 1)), "ab"])
    writer.add_token_types([1] * c.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)

    def rotated(weight: Any, n_heads: int) -> Any:
        return (
            weight.reshape(n_heads, 2, len(weight) // n_heads // 2, -1)
            .swapaxes(1, 2)
            .reshape(weight.shape)
        )

    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
    }
    names |= {
        "mlp.down_proj": "ffn_down",
        **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
        "self_attn.o_proj": "attn_output",
    }
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    writer.add_tensor("output.weight", weights["lm_head.weight"])
    for layer in range(c.num_hidden_layers):
        for ours, theirs in names.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(theirs)
            writer.add_tensor(
                f"blk.{layer}.{theirs}.weight", rotated(weight, heads) if heads else weight
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("whole", [True, False], ids=["file", "directory"])
@pytest.mark.parametrize("bridge", [False, True], ids=["hooked", "bridge"])
def test_gguf_gives_the_logits_of_transformers(tmp_path: Path, whole: bool, bridge: bool) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    hf = LlamaForCausalLM(llama()).eval()
    write_gguf(tmp_path / "tiny.gguf", hf)
    model = load_model(tmp_path / "tiny.gguf" if whole else tmp_path, "cpu", bridge=bridge)
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.allclose(model(tokens), hf(tokens).logits, atol=1e-5)
    assert model.cfg.model_name == "tiny" and model.tokenizer is not None


def test_gguf_that_can_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"no model")
    with pytest.raises(FileNotFoundError, match="must be an existing file"):
        load_model(tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"must be a GGUF file, got .*a.gguf"):
        load_model(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"must hold one GGUF file, got a\.gguf, b\.gguf"):
        load_model(tmp_path)
    monkeypatch.setattr("tl_localize.models.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gguf"):
        load_model(tmp_path / "a.gguf")
