"""load_model: directories of each family against transformers, tokenizers without BOS, and refusals
by name.
"""

import json
import shutil
import sys
from importlib.metadata import version
from logging import ERROR, INFO
from types import SimpleNamespace

import pytest
import torch
from architectures import config_of, save
from safetensors.torch import load_file, save_file

from tl_localize import Attribution, MemorizedSequence, NeuronSet, ZeroOut, load_model
from tl_localize.model import loading
from tl_localize.model.forward import is_bridge
from tl_localize.model.loading import (
    _check_logits,
    _set_tokenizer,
    check_device,
    has_hooked_transformer,
    quiet_transformers,
)

TOKENS = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(2))
NEOX = "GPT-NeoX (Pythia)"
BASE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
FAMILIES = {
    "gpt2": ("GPT-2", {}),
    "gpt2 with n_inner by default": ("GPT-2", {"n_inner": None}),
    "gpt2 with relu": ("GPT-2", {"activation_function": "relu"}),
    "gpt2 with attention scaled by layer": ("GPT-2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2 untied": ("GPT-2", {"tie_word_embeddings": False}),
    "gpt2 with another eps": ("GPT-2", {"layer_norm_epsilon": 1e-2}),
    "neox": (NEOX, {}),
    "neox with another base": (NEOX, {"rope_parameters": BASE}),
    "neox without parallel residual": (NEOX, {"use_parallel_residual": False}),
    "neox tied": (NEOX, {"tie_word_embeddings": True}),
    "llama with grouped heads": ("Llama", {}),
    "llama without groups": ("Llama", {"num_key_value_heads": 4}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with its own head_dim": ("Llama", {"head_dim": 12}),
    "llama with another base": (
        "Llama",
        {"rope_parameters": BASE | {"partial_rotary_factor": 1.0}},
    ),
}
BRIDGED = {  # what HookedTransformer can't hold
    "bloom": ("Bloom", {}),
    "opt": ("OPT", {}),
    "llama linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "neox dynamic rope": (
        NEOX,
        {"rope_parameters": BASE | {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "llama with rope llama3": ("Llama 3.x", {}),
    "mistral": ("Mistral", {}),
    "llama with biases": ("DeepSeek-like (Llama)", {}),
    "llama with biases of MLPs": ("Llama", {"mlp_bias": True}),
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    save(config_of("GPT-2"), path)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


# Weights


ONLY_HOOKED = pytest.mark.skipif(
    version("transformer-lens").startswith("4"), reason="TransformerLens 4 has no HookedTransformer"
)


def same_logits(model, hf):
    with torch.no_grad():
        assert (model(TOKENS) - hf(TOKENS).logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", [*FAMILIES, *BRIDGED])
def test_load_model_has_the_logits_of_transformers(tmp_path, family):
    """Where HookedTransformer can't hold the model, nobody has to ask for a Bridge."""
    name, changes = (FAMILIES | BRIDGED)[family]
    hf = save(config_of(name, **changes), tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert is_bridge(model) is (family in BRIDGED or not has_hooked_transformer())
    same_logits(model, hf)
    if not is_bridge(model):
        model = load_model(tmp_path, device="cpu", bridge=True)
        same_logits(model, hf)
    assert is_bridge(model) and not model.training and model.cfg.default_prepend_bos is False


@ONLY_HOOKED
def test_a_model_by_name_has_the_tokenizer_of_its_checkpoint(gpt2_like, monkeypatch):
    """That of TransformerLens puts BOS first, whatever the checkpoint's does."""
    from transformer_lens import HookedTransformer

    own = SimpleNamespace(
        eos_token="</s>", bos_token="<s>", pad_token=None, bos_token_id=0, encode=lambda text: []
    )
    monkeypatch.setattr(gpt2_like, "tokenizer", "another")
    make = "from_pretrained_no_processing"
    monkeypatch.setattr(HookedTransformer, make, lambda *_, **__: gpt2_like)
    monkeypatch.setattr(loading, "load_tokenizer", lambda source: own if source == "gpt2" else None)
    assert load_model("gpt2-small", "cpu").tokenizer is own
    assert own.pad_token == "</s>" and not gpt2_like.cfg.tokenizer_prepends_bos


def test_a_loaded_model_is_what_was_promised(folder, monkeypatch, capfd):
    weight = load_file(folder / "model.safetensors")["transformer.h.1.mlp.c_proj.weight"]
    state = torch.get_rng_state()
    monkeypatch.chdir(folder.parent)
    model = load_model("model", device="cpu")
    assert torch.equal(torch.get_rng_state(), state)  # the global seed is left alone
    assert capfd.readouterr() == ("", "")
    assert torch.equal(model.W_out[1], weight) and model.cfg.d_mlp == 48
    assert not model.training and model.cfg.default_prepend_bos is False
    assert model.tokenizer is None  # the folder has none
    with torch.no_grad():
        model.W_E.zero_()
        model.blocks[0].mlp.W_out.zero_()
    again = load_model(folder, device="cpu")  # shares no memory with the file
    assert again.W_E.any() and again.blocks[0].mlp.W_out.any()
    neurons = ZeroOut()(again, MemorizedSequence(TOKENS[0, :6], 3)).top_k(0.1)
    assert isinstance(neurons, NeuronSet) and len(neurons) == 10


def test_a_model_of_the_current_folder_has_its_name(saved, monkeypatch):
    monkeypatch.chdir(saved)
    assert load_model(".", device="cpu").cfg.model_name == saved.name


def test_load_model_does_not_read_the_path_for_a_name(tmp_path):
    path = tmp_path / "llama" / "my-gpt2-opt-Meta-Llama-3-model"
    hf = save(config_of(NEOX), path)
    same_logits(load_model(path, device="cpu"), hf)


def test_load_model_reads_fp16_and_sharded_weights_into_float32(tmp_path):
    hf = save(config_of("GPT-2"), tmp_path, torch.float16)
    shutil.rmtree(tmp_path)
    hf.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_model(tmp_path, device="cpu")
    assert model.W_out.dtype == torch.float32
    same_logits(model, hf.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_load_model_in_another_dtype(saved, dtype):
    assert {p.dtype for p in load_model(saved, device="cpu", dtype=dtype).parameters()} == {dtype}


# Tokenizers

TEXTS = ("Two roads diverged in", " a yellow wood,\n\nAnd sorry I could not travel 12345 bo")


@pytest.mark.parametrize("form", ["vocabulary and merges", "with BOS"])
def test_a_loaded_model_reads_text_with_the_folders_own_tokenizer(tmp_path, capfd, form):
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    save(config_of("GPT-2", vocab_size=300), tmp_path)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(TEXTS)] * 4, 300, special_tokens=["<s>"])
    if form == "with BOS":  # a post-processor puts it first
        trained._tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
        PreTrainedTokenizerFast(
            tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="<s>"
        ).save_pretrained(tmp_path)
    else:
        trained.save_model(str(tmp_path))
    own = AutoTokenizer.from_pretrained(tmp_path)
    capfd.readouterr()
    model = load_model(tmp_path, device="cpu")
    assert capfd.readouterr() == ("", "")
    sequence = MemorizedSequence.from_text(model, *TEXTS)
    parts = model.tokenizer.decode(sequence.prefix), model.tokenizer.decode(sequence.suffix)
    assert parts == TEXTS
    wanted, start = own([TEXTS[0] + TEXTS[1], TEXTS[0]], add_special_tokens=False)["input_ids"]
    assert sequence.tokens.tolist() == wanted
    assert model.to_tokens(TEXTS[0])[0].tolist() == start  # without BOS


def test_special_tokens_of_a_tokenizer_are_kept(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    words = models.WordLevel({name: i for i, name in enumerate(special.values())}, "<s>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), padding_side="left", **special
    ).save_pretrained(tmp_path)
    model = SimpleNamespace(cfg=SimpleNamespace())
    _set_tokenizer(model, tmp_path)
    assert {name: getattr(model.tokenizer, name) for name in special} == special
    assert model.tokenizer.padding_side == "right"


def test_a_token_that_a_vocabulary_lacks_does_not_end_its_texts(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save(config_of("GPT-2", vocab_size=300), tmp_path)
    own = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>").save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert model.tokenizer.eos_token_id is None
    with pytest.raises(ValueError, match="prepend_bos must be false where the tokenizer has no"):
        MemorizedSequence.from_text(model, "a", " b", prepend_bos=True)
    assert MemorizedSequence.from_text(model, "a", " b").tokens.tolist() == [1, 2]


def test_a_model_that_was_loaded_without_gradients_has_them(saved, sequence):
    with torch.inference_mode():
        model = load_model(saved, device="cpu")
    Attribution()(model, sequence)
    assert not any(parameter.is_inference() for parameter in model.parameters())


# Refusals


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (NEOX, {"attention_bias": False}, "must be a model that TransformerLens adapts"),
        ("Mixtral", {}, "must have neurons in every layer"),
    ],
)
def test_load_model_refuses_what_it_can_not_load_right(tmp_path, name, changes, message):
    save(config_of(name, **changes), tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, device="cpu")


@ONLY_HOOKED
def test_load_model_refuses_other_logits(saved, monkeypatch):
    from tl_localize.model import loading as models

    shapes = models._shapes
    monkeypatch.setattr(models, "_shapes", lambda c: shapes(c) | {"act_fn": "relu"})
    with pytest.raises(ValueError, match=r"whose logits TransformerLens reproduces, got .*off by"):
        load_model(saved, device="cpu")


def test_a_difference_of_logits_is_judged_by_their_size(gpt2_like):
    expected = torch.full((1, 2, 3), 100.0)
    _check_logits("a", gpt2_like, expected + 5e-4, expected)
    for found in (expected + 2e-3, expected * torch.nan):
        with pytest.raises(ValueError, match="whose logits TransformerLens reproduces"):
            _check_logits("a", gpt2_like, found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_load_model_refuses_other_logits_in_every_precision(tmp_path, dtype):
    save(config_of("GPT-2 without scaled attention"), tmp_path)
    with pytest.raises(ValueError, match=r"whose logits TransformerLens reproduces, got .*off by"):
        load_model(tmp_path, device="cpu", dtype=dtype, bridge=True)


@pytest.mark.parametrize("bars", [True, False])
def test_transformers_says_what_it_said_after_a_quiet_block(monkeypatch, bars):
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", bars)
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        with quiet_transformers():
            assert logging.get_verbosity() == ERROR
            assert not logging.is_progress_bar_enabled()
        assert logging.get_verbosity() == INFO
        assert logging.is_progress_bar_enabled() == bars
    finally:
        logging.set_verbosity(before)


def precision():
    """What both settings of torch say."""
    both = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    new = [getattr(products, "fp32_precision", None) for products in both]
    try:
        return torch.get_float32_matmul_precision(), *new
    except RuntimeError:
        return "only the new one was set", *new


@pytest.mark.parametrize(("old", "new"), [("medium", None), ("highest", "tf32")])
def test_logits_are_checked_at_full_precision(saved, old, new):
    """Where TF32 is allowed its rounding would refuse every model on a GPU."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    inside = set()
    hook = register_module_forward_pre_hook(lambda *_: inside.add(precision()))
    matmul = torch.backends.cuda.matmul
    try:
        torch.set_float32_matmul_precision(old)
        if new is not None and hasattr(matmul, "fp32_precision"):
            matmul.fp32_precision = new
        before = precision()
        load_model(saved, device="cpu")
        assert inside and {old for old, *_ in inside} == {"highest"}
        assert {precision for _, *new in inside for precision in new} <= {None, "ieee"}
        assert precision() == before
    finally:
        hook.remove()
        torch.set_float32_matmul_precision("highest")


DEEP = "[" * 100_000
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DAMAGE = [  # what a file is replaced by; numbers: so many bytes are left
    (CONFIG, None),
    (CONFIG, "{"),
    (CONFIG, "{}"),
    (CONFIG, DEEP),
    (CONFIG, '{"model_type": "no-such-model"}'),
    (CONFIG, {"n_embd": -1}),
    (CONFIG, {"n_head": 0}),
    (CONFIG, {"n_inner": 96}),
    (CONFIG, {"n_layer": 1}),
    (CONFIG, {"activation_function": "no-such"}),
    (TOKENIZER, DEEP),
    (TOKENIZER, '{"model": null}'),
    ("tokenizer_config.json", "[]"),
    ("generation_config.json", DEEP),
    (INDEX, '{"weight_map": null}'),
    (INDEX, DEEP),
    (WEIGHTS, None),
    (WEIGHTS, 0),
    (WEIGHTS, 1000),
]


@pytest.mark.parametrize(("name", "content"), DAMAGE)
def test_damage_is_named_with_its_place(folder, name, content):
    file = folder / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content)
    elif isinstance(content, int):
        content = file.read_bytes()[:content].decode("latin-1")
    if name == INDEX:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="name_or_path must") as caught:
        load_model(folder, device="cpu")
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(folder))


@pytest.mark.parametrize("name", ["./gone", "models/gone.gguf", "gone.gguf"])
def test_a_path_where_nothing_is_is_no_damaged_model(name):
    with pytest.raises(ValueError, match=r"existing directory or a name .*Check the spelling"):
        load_model(name)


def test_load_model_refuses_missing_weights(folder):
    weights = load_file(folder / WEIGHTS)
    removed = "transformer.h.1.mlp.c_fc.weight"
    del weights[removed]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"must hold the weights of its config .*{removed}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("family", "buffer"),
    [
        ("gpt2 untied", "transformer.h.{}.attn.bias"),
        ("gpt2 untied", "transformer.h.{}.attn.masked_bias"),
        ("neox", "gpt_neox.layers.{}.attention.bias"),
        ("neox", "gpt_neox.layers.{}.attention.rotary_emb.inv_freq"),
        ("llama without groups", "model.layers.{}.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_load_model_takes_files_that_hold_buffers(tmp_path, family, buffer):
    name, changes = FAMILIES[family]
    hf = save(config_of(name, **changes), tmp_path)
    buffers = {buffer.format(i): torch.ones(2) for i in range(2)}
    weights = load_file(tmp_path / WEIGHTS) | buffers
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    same_logits(load_model(tmp_path, device="cpu"), hf)


def test_of_a_whole_file_beside_an_index_the_whole_is_loaded(tmp_path):
    hf = save(config_of("Llama"), tmp_path)
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / INDEX).is_file()
    hf.save_pretrained(tmp_path / "whole")
    whole = (tmp_path / "whole" / WEIGHTS).rename(tmp_path / WEIGHTS)
    for part in tmp_path.glob("model-0*.safetensors"):
        part.unlink()
    same_logits(load_model(tmp_path, device="cpu"), hf)
    whole.write_bytes(whole.read_bytes()[:1000])
    with pytest.raises(ValueError, match="with safetensors weights"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gpt3-smal", "gpt2-small"),
        ("reference-gpt", "reference-gpt2"),
        ("pythia-70M-dedup", "pythia-70m-deduped"),
        ("no/such/folder", ""),
    ],
)
def test_load_model_refuses_an_unknown_name_and_offers_near_ones(name, near):
    with pytest.raises(ValueError, match=f"name_or_path must .* got '{name}'.*{near}"):
        load_model(name)


def test_load_model_names_what_to_do_with_a_model(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(TypeError, match=r"a path, got .*\. Save .* by save_pretrained\(folder\)"):
        load_model(model)


@pytest.mark.parametrize("dtype", ["float33", "int8", torch.int8, None])
def test_load_model_lists_the_dtypes(tmp_path, dtype):
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'float64', 'bfloat16'"):
        load_model(tmp_path, dtype=dtype)


def test_load_model_takes_a_dtype_by_name(saved):
    assert load_model(saved, device="cpu", dtype="bfloat16").W_in.dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:77"])
def test_a_device_that_is_not_there_is_refused_before_weights_are_read(tmp_path, device):
    with pytest.raises(ValueError, match=f"device must be there, got '{device}'"):
        load_model(tmp_path, device=device)


@pytest.mark.parametrize(("there", "wanted"), [(True, "cuda"), (False, "cpu")])
def test_device_is_cuda_when_there_is_one(monkeypatch, there, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert check_device(None).type == wanted


def test_load_model_needs_transformer_lens_only_when_it_loads():
    assert "transformer_lens" not in vars(sys.modules["tl_localize.model.loading"])


# GGUF files


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
}


def rotated(weight, n_heads):
    """Rows of queries or keys in the order of llama.cpp's rotation."""
    halves = weight.reshape(n_heads, 2, len(weight) // n_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model):
    """A tiny Llama as llama.cpp writes it, in float32."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("transformers", "5.23")
    c = model.config
    weights = {name: value.float().numpy() for name, value in model.state_dict().items()}
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

    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    writer.add_tensor("output.weight", weights["lm_head.weight"])
    for layer in range(c.num_hidden_layers):
        for ours, theirs in GGUF_NAMES.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(theirs)
            writer.add_tensor(
                f"blk.{layer}.{theirs}.weight", rotated(weight, heads) if heads else weight
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("bridge", [False, True], ids=["hooked", "bridge"])
def test_gguf_gives_the_logits_of_transformers(tmp_path, bridge):
    hf = save(config_of("Llama"), tmp_path / "hf")
    write_gguf(tmp_path / "tiny.gguf", hf)
    model = load_model(tmp_path / "tiny.gguf", "cpu", bridge=bridge)
    same_logits(model, hf)
    assert model.cfg.model_name == "tiny" and model.tokenizer is not None


def test_gguf_in_half_precision_keeps_the_frequencies_of_positions(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", save(config_of("Llama"), tmp_path / "hf"))
    state = torch.get_rng_state()
    model = load_model(tmp_path / "tiny.gguf", "cpu", "bfloat16", bridge=True)
    kept = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    assert kept and all(buffer.dtype == torch.float32 for buffer in kept.values())
    assert next(model.parameters()).dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), state)


def test_gguf_needs_a_transformers_that_reads_its_tokenizer(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf", save(config_of("Llama"), tmp_path / "hf"))
    monkeypatch.setattr("transformers.__version__", "5.22.2")
    with pytest.raises(ImportError, match=r"transformers must be 5\.23 or newer .* got 5\.22\.2"):
        load_model(tmp_path / "tiny.gguf", "cpu")


def test_gguf_is_converted_without_a_bar_in_a_pipe(tmp_path, capfd):
    from transformers import modeling_gguf_pytorch_utils

    from tl_localize.cli.options import ModelOptions

    write_gguf(tmp_path / "tiny.gguf", save(config_of("Llama"), tmp_path / "hf"))
    before = dict(vars(modeling_gguf_pytorch_utils))
    capfd.readouterr()
    ModelOptions(model=str(tmp_path / "tiny.gguf"), device="cpu").load()
    assert vars(modeling_gguf_pytorch_utils) == before  # the bar of others is drawn
    assert capfd.readouterr().err.splitlines() == [
        "Converting tiny.gguf to float32 weights, which takes a while."
    ]


def test_gguf_that_can_not_be_read_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"no model")
    for name in ("a.gguf", "b.gguf"):
        with pytest.raises(ValueError, match=name):
            load_model(tmp_path / name)


def test_a_checkpoint_that_computes_no_numbers_is_named(saved, tmp_path):
    folder = tmp_path / "nan"
    shutil.copytree(saved, folder)
    weights = load_file(folder / "model.safetensors")
    weights["transformer.ln_f.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"checkpoint must compute finite logits.* Copy it again"):
        load_model(folder, "cpu")
