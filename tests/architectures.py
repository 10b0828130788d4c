"""One tiny random model of transformers for each architecture that is tried, by its name in
docs/architectures.md.
"""

import warnings
from copy import deepcopy

import torch

N_VOCAB = 61
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
HEAD = GROUPED | {"head_dim": 8}
# in the same order
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = HEAD | SLIDING | {"query_pre_attn_scalar": 8}
MOE = GROUPED | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 24}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
PAD = {"pad_token_id": 0}
FALCON = SIZES | {"ffn_hidden_size": 48}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
NEO |= {"max_position_embeddings": 64, "window_size": 5}
XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}
MPT = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2}

CONFIGS = {
    "GPT-2": ("GPT2", OLD),
    "GPT-BigCode": ("GPTBigCode", OLD),
    "OpenAI GPT": ("OpenAIGPT", OLD | {"n_inner": None}),
    "GPT-NeoX (Pythia)": ("GPTNeoX", SIZES),
    "Llama": ("Llama", GROUPED),
    "Llama 3.x": ("Llama", GROUPED | {"rope_parameters": LLAMA3}),
    "Mistral": ("Mistral", GROUPED | {"sliding_window": 5}),
    "Ministral 3": ("Ministral3", HEAD),
    "Qwen 2": ("Qwen2", GROUPED),
    "Qwen 3": ("Qwen3", HEAD),
    "Gemma": ("Gemma", HEAD),
    "Gemma 2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "Gemma 3": ("Gemma3Text", GEMMA),
    "VaultGemma": ("VaultGemma", GEMMA),
    "Phi": ("Phi", SIZES),
    "Phi-3": ("Phi3", GROUPED | PAD),
    "OLMo": ("Olmo", GROUPED),
    "OLMo 2": ("Olmo2", GROUPED),
    "OLMo 3": ("Olmo3", GROUPED),
    "SmolLM 3": ("SmolLM3", GROUPED | PAD),
    "StableLM": ("StableLm", GROUPED),
    "Falcon": (
        "Falcon",
        FALCON | {"new_decoder_architecture": False, "alibi": False, "multi_query": True},
    ),
    "Cohere": ("Cohere", GROUPED),
    "Cohere 2": ("Cohere2", GROUPED | {"sliding_window": 5}),
    "Granite": ("Granite", GROUPED | {"residual_multiplier": 0.22, "attention_multiplier": 0.3}),
    "GLM": ("Glm", HEAD | PAD),
    "GLM 4": ("Glm4", HEAD | PAD),
    "StarCoder2": ("Starcoder2", GROUPED),
    "Nemotron": ("Nemotron", GROUPED),
    "Seed-OSS": ("SeedOss", HEAD),
    "EXAONE 4": ("Exaone4", GROUPED | SLIDING),
    "CodeGen": ("CodeGen", OLD | {"rotary_dim": 4}),
    "Apertus": ("Apertus", GROUPED),
    "Arcee": ("Arcee", GROUPED),
    "Ernie 4.5": ("Ernie4_5", GROUPED),
    "Jais 2": ("Jais2", HEAD),
    "LFM2": (
        "Lfm2",
        GROUPED | {"layer_types": ["full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    ),
    "OPT": ("OPT", SIZES | PAD | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "GPT-J": ("GPTJ", OLD | {"rotary_dim": 4}),
    "GPT-Neo": ("GPTNeo", NEO | {"attention_types": [[["global", "local"], 1]]}),
    "Bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "MPT": ("Mpt", MPT),
    "XGLM": ("XGLM", XGLM | {"max_position_embeddings": 64}),
    "BitNet": ("BitNet", GROUPED),
    "Falcon with ALiBi": ("Falcon", FALCON | {"alibi": True, "multi_query": False}),
    "Helium": ("Helium", HEAD),
    "HunYuan": ("HunYuanDenseV1", HEAD | PAD),
    "DeepSeek-like (Llama)": ("Llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "Persimmon": ("Persimmon", SIZES),
    "Mixtral": ("Mixtral", MOE),
    "Qwen 3 MoE": ("Qwen3Moe", MOE | {"head_dim": 8}),
    "Qwen 2 MoE": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 24}),
    "GPT-2 without scaled attention": ("GPT2", OLD | {"scale_attn_weights": False}),
    "Mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}


def random_model(config, seed, deviation):
    """A model of transformers, all of it random, so that a wrong formula shows."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
            parameter.normal_(1.0 if is_norm else 0.0, deviation)
    return model


def save(config, path, dtype=torch.float32):
    """A random model of a config, saved as users save theirs."""
    model = random_model(config, 1, 0.15).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    return model


def config_of(name, **changes):
    import transformers

    kind, settings = CONFIGS[name]
    ends = {"vocab_size": N_VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, f"{kind}Config")(**ends | settings | changes)


# settings of tiny_bridge
ROTARY = {"positional_embedding_type": "rotary", "rotary_adjacent_pairs": False}
NEOX = ROTARY | {"parallel_attn_mlp": True, "rotary_dim": 4}
LLAMA = ROTARY | {
    "normalization_type": "RMS",
    "final_rms": True,
    "gated_mlp": True,
    "rotary_dim": 6,
}
LLAMA |= {"n_heads": 4, "d_head": 6, "n_key_value_heads": 2, "act_fn": "silu"}
KINDS = {"gpt2": {}, "neox": NEOX | {"n_layers": 3, "act_fn": "gelu"}, "llama": LLAMA}
TINY = {"n_layers": 2, "d_model": 24, "n_heads": 3, "d_head": 8, "d_mlp": 48, "n_ctx": 32}
TINY |= {"d_vocab": 61, "act_fn": "gelu_new", "model_name": "tiny", "dtype": torch.float32}
TINY |= {"n_key_value_heads": None}


def tiny_bridge(seed, settings):
    """A TransformerBridge of the shapes that conftest's ``tiny_model`` gives a HookedTransformer;
    skips where there is none. It is made once and copied, which takes less than half the time.
    """
    key = seed, repr(sorted(settings.items()))
    if key not in MADE:
        MADE[key] = make_bridge(seed, settings)
    made = deepcopy(MADE[key])
    # at its first pass a Bridge puts hooks of its own on its modules, which a copy would share
    with torch.no_grad():  # a kept pattern with its graph can't be copied
        made(torch.zeros(1, 1, dtype=torch.long))
    return made


MADE = {}  # by what ``tiny_bridge`` was asked for


def make_bridge(seed, settings):
    import pytest

    from tl_localize.model.forward import as_bridge

    special = set(settings) - set(TINY)
    of = TINY | settings
    kinds = [kind for kind, known in KINDS.items() if special == set(known) - set(TINY)]
    if not kinds or of["act_fn"] == "solu_ln":
        pytest.skip(f"only a HookedTransformer has {sorted(special)}")
    common = {"vocab_size": of["d_vocab"], "tie_word_embeddings": False}
    values = [of[name] for name in ("d_model", "n_layers", "n_heads", "d_mlp", "n_ctx", "act_fn")]
    sizes = dict(zip([*SIZES, "hidden_act"], values, strict=True))
    if kinds == ["gpt2"]:
        names = [*OLD, "activation_function"]
        config = config_of("GPT-2", **common, **dict(zip(names, values, strict=True)))
    elif kinds == ["neox"]:
        share = of["rotary_dim"] / of["d_head"]
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
        config = config_of("GPT-NeoX (Pythia)", **common, **sizes, rope_parameters=rope)
    else:
        heads = {"num_key_value_heads": of["n_key_value_heads"], "head_dim": of["d_head"]}
        config = config_of("Llama", **common, **sizes, **heads)
    model = random_model(config, seed, 0.2)
    model.get_output_embeddings().weight.data.mul_(2)
    return as_bridge(model.to(of["dtype"]), of["model_name"])


def check_injection(view, sequence):
    """The loss with the written rows is the last one of their training, and afterwards all rows are
    as before.
    """
    from tl_localize import inject

    model = view.model
    tokens = sequence.tokens
    before = [view.rows(layer).clone() for layer in range(view.n_layers)]
    injection = inject(model, sequence, ratio=0.3, seed=0, learning_rate=0.05, max_steps=10)
    with injection.applied(model), torch.no_grad():
        logits = model(tokens[None])[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:])
        assert abs(float(loss) - float(injection.losses[-1])) < 1e-3, "other rows were trained"
    assert all(torch.equal(view.rows(layer), rows) for layer, rows in enumerate(before))


def row(name, folder):
    """The line of docs/architectures.md of an architecture; raises unless every number is that of
    the definition.
    """
    from oracles import plain_integrated_gradients, plain_zero_out

    from tl_localize import (
        HardConcrete,
        IntegratedGradients,
        MemorizedSequence,
        ZeroOut,
        accuracy,
        load_model,
    )
    from tl_localize.methods.partial_runs import CleanRun
    from tl_localize.model.neurons import NeuronView

    save(config_of(name), folder)
    try:
        model = load_model(folder, device="cpu", bridge=True)
    except ValueError as error:
        reason = next(short for sign, short in REFUSALS.items() if sign in str(error))
        return f"| {name} | refused: {reason} | |"
    tokens = torch.randint(N_VOCAB, (9,), generator=torch.Generator().manual_seed(3))
    sequence = MemorizedSequence(tokens, 5, "s")
    view = NeuronView(model)
    additive = CleanRun.of(view, tokens[None]).additive
    method = IntegratedGradients(steps=2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        scores = [ZeroOut()(model, sequence), method(model, sequence)]
    definitions = [
        plain_zero_out(model, sequence),
        plain_integrated_gradients(model, sequence, *method.quadrature()),
    ]
    for found, wanted in zip(scores, definitions, strict=True):
        assert (found.values - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
    HardConcrete(steps=2)(model, sequence)
    check_injection(view, sequence)
    with scores[0].top_k(0.1).dropped_out(model):
        assert accuracy(model, [sequence]).shape == (1,)
    slow = any("slow way" in str(warning.message) for warning in warned)
    way = "one position at a time" if slow else "one pass"
    output = "added" if len(additive) == view.n_layers else "changed after W_out, or hooked"
    return f"| {name} | {output} | {way} |"


REFUSALS = {
    "must have neurons": "no neuron axis",
    "Unsupported architecture": "not adapted by TransformerLens",
    "reproduces": "TransformerLens gives other logits",
    "must be a model that TransformerLens adapts": "TransformerLens can't wrap it",
}
