"""One tiny random model of transformers for each architecture that is tried, by its name in
docs/architectures.md.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

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
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64}
GEMMA = GROUPED | {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
MOE = GROUPED | {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", OLD),
    "GPT-BigCode": ("GPTBigCode", OLD),
    "OpenAI GPT": ("OpenAIGPT", {**OLD, "n_inner": None}),
    "GPT-NeoX (Pythia)": ("GPTNeoX", SIZES),
    "Llama": ("Llama", GROUPED),
    "Llama 3.x": (
        "Llama",
        GROUPED | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
    ),
    "Mistral": ("Mistral", GROUPED | {"sliding_window": 5}),
    "Ministral 3": ("Ministral3", GROUPED | {"head_dim": 8}),
    "Qwen 2": ("Qwen2", GROUPED),
    "Qwen 3": ("Qwen3", GROUPED | {"head_dim": 8}),
    "Gemma": ("Gemma", GROUPED | {"head_dim": 8}),
    "Gemma 2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "Gemma 3": ("Gemma3Text", GEMMA),
    "VaultGemma": ("VaultGemma", GEMMA),
    "Phi": ("Phi", SIZES),
    "Phi-3": ("Phi3", GROUPED | {"pad_token_id": 0}),
    "OLMo": ("Olmo", GROUPED),
    "OLMo 2": ("Olmo2", GROUPED),
    "OLMo 3": ("Olmo3", GROUPED),
    "SmolLM 3": ("SmolLM3", GROUPED | {"pad_token_id": 0}),
    "StableLM": ("StableLm", GROUPED),
    "Falcon": (
        "Falcon",
        {
            **SIZES,
            "ffn_hidden_size": 48,
            "new_decoder_architecture": False,
            "alibi": False,
            "multi_query": True,
        },
    ),
    "Cohere": ("Cohere", GROUPED),
    "Cohere 2": ("Cohere2", GROUPED | {"sliding_window": 5}),
    "Granite": ("Granite", GROUPED | {"residual_multiplier": 0.22, "attention_multiplier": 0.3}),
    "GLM": ("Glm", GROUPED | {"head_dim": 8, "pad_token_id": 0}),
    "GLM 4": ("Glm4", GROUPED | {"head_dim": 8, "pad_token_id": 0}),
    "StarCoder2": ("Starcoder2", GROUPED),
    "Nemotron": ("Nemotron", GROUPED),
    "Seed-OSS": ("SeedOss", GROUPED | {"head_dim": 8}),
    "EXAONE 4": (
        "Exaone4",
        GROUPED | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "CodeGen": ("CodeGen", {**OLD, "rotary_dim": 4}),
    "Apertus": ("Apertus", GROUPED),
    "Arcee": ("Arcee", GROUPED),
    "Ernie 4.5": ("Ernie4_5", GROUPED),
    "Jais 2": ("Jais2", GROUPED | {"head_dim": 8}),
    "LFM2": (
        "Lfm2",
        GROUPED
        | {"layer_types": ["full_attention", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "OPT": (
        "OPT",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
        }
        | {"max_position_embeddings": 64, "pad_token_id": 0},
    ),
    "GPT-J": ("GPTJ", {**OLD, "rotary_dim": 4}),
    "GPT-Neo": (
        "GPTNeo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "window_size": 5,
        }
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "Bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "MPT": (
        "Mpt",
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2},
    ),
    "XGLM": (
        "XGLM",
        {
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
    "BitNet": ("BitNet", GROUPED),
    "Falcon with ALiBi": (
        "Falcon",
        {**SIZES, "ffn_hidden_size": 48, "alibi": True, "multi_query": False},
    ),
    "Helium": ("Helium", GROUPED | {"head_dim": 8}),
    "HunYuan": ("HunYuanDenseV1", GROUPED | {"head_dim": 8, "pad_token_id": 0}),
    "DeepSeek-like (Llama)": ("Llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "Persimmon": ("Persimmon", SIZES),
    "Mixtral": ("Mixtral", MOE),
    "Qwen 3 MoE": ("Qwen3Moe", MOE | {"head_dim": 8}),
    "Qwen 2 MoE": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 24}),
    "GPT-2 without scaled attention": ("GPT2", OLD | {"scale_attn_weights": False}),
    "Mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}


def save(config: Any, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of a config, saved as users save theirs; weights large enough that a wrong
    formula shows.
    """
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
                parameter.normal_(1.0 if is_norm else 0.0, 0.15)
        model = model.to(dtype)
        model.save_pretrained(path)
    return model


def config_of(name: str) -> Any:
    import transformers

    kind, settings = CONFIGS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, f"{kind}Config")(
            vocab_size=N_VOCAB, bos_token_id=0, eos_token_id=0, **settings
        )


# settings of tiny_bridge
NEOX = {
    "parallel_attn_mlp": True,
    "positional_embedding_type": "rotary",
    "rotary_adjacent_pairs": False,
    "rotary_dim": 4,
}
LLAMA = {
    "normalization_type": "RMS",
    "final_rms": True,
    "gated_mlp": True,
    "positional_embedding_type": "rotary",
    "rotary_dim": 6,
}
LLAMA |= {
    "rotary_adjacent_pairs": False,
    "n_heads": 4,
    "d_head": 6,
    "n_key_value_heads": 2,
    "act_fn": "silu",
}
KINDS = {"gpt2": {}, "neox": NEOX | {"n_layers": 3, "act_fn": "gelu"}, "llama": LLAMA}


def tiny_bridge(seed: int, settings: dict[str, Any]) -> Any:
    """A TransformerBridge of the shapes that conftest's ``tiny_model`` gives a HookedTransformer;
    skips where there is none.
    """
    import pytest

    from tl_localize.forward import as_bridge

    known = {
        "n_layers",
        "n_heads",
        "d_head",
        "d_mlp",
        "model_name",
        "act_fn",
        "d_model",
        "n_ctx",
        "d_vocab",
        "n_key_value_heads",
        "dtype",
    }
    kinds = {
        frozenset(): "gpt2",
        frozenset(
            {
                "parallel_attn_mlp",
                "positional_embedding_type",
                "rotary_adjacent_pairs",
                "rotary_dim",
            }
        ): "neox",
        frozenset(
            {
                "normalization_type",
                "final_rms",
                "gated_mlp",
                "positional_embedding_type",
                "rotary_adjacent_pairs",
                "rotary_dim",
            }
        ): "llama",
    }
    kind = kinds.get(frozenset(settings) - known)
    if kind is None or settings.get("act_fn") == "solu_ln":
        pytest.skip(f"only a HookedTransformer has {sorted(set(settings) - known)}")
    of = {
        "n_layers": 2,
        "d_model": 24,
        "n_heads": 3,
        "d_head": 8,
        "d_mlp": 48,
        "n_ctx": 32,
        "d_vocab": 61,
        "act_fn": "gelu_new",
        **settings,
    }
    import transformers

    common = {
        "vocab_size": of["d_vocab"],
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if kind == "gpt2":
        sizes = {
            "n_layer": of["n_layers"],
            "n_embd": of["d_model"],
            "n_head": of["n_heads"],
            "n_inner": of["d_mlp"],
        }
        config: Any = transformers.GPT2Config(
            n_positions=of["n_ctx"], activation_function=of["act_fn"], **sizes, **common
        )
    else:
        sizes = {
            "num_hidden_layers": of["n_layers"],
            "hidden_size": of["d_model"],
            "num_attention_heads": of["n_heads"],
        }
        sizes |= {
            "intermediate_size": of["d_mlp"],
            "max_position_embeddings": of["n_ctx"],
            "hidden_act": of["act_fn"],
        }
        if kind == "neox":
            rope = {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": of["rotary_dim"] / of["d_head"],
            }
            config = transformers.GPTNeoXConfig(**sizes, **common, rope_parameters=rope)
        else:
            heads = {"num_key_value_heads": of["n_key_value_heads"], "head_dim": of["d_head"]}
            config = transformers.LlamaConfig(**sizes, **common, **heads)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
                parameter.normal_(1.0 if is_norm else 0.0, 0.2)
            model.get_output_embeddings().weight.mul_(2)
        made = as_bridge(model.to(of.get("dtype", torch.float32)), of.get("model_name", "tiny"))
        # at its first pass a Bridge puts hooks of its own on its modules
        made(torch.zeros(1, 1, dtype=torch.long))
        return made


def row(name: str, folder: Path) -> str:
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
        inject,
        load_model,
    )
    from tl_localize.methods.partial_runs import CleanRun
    from tl_localize.neurons import NeuronView

    save(config_of(name), folder)
    try:
        model = load_model(folder, device="cpu", bridge=True)
    except ValueError as error:
        reason = next(short for sign, short in REFUSALS.items() if sign in str(error))
        return f"| {name} | refused: {reason} | |"
    sequence = MemorizedSequence(
        torch.randint(N_VOCAB, (9,), generator=torch.Generator().manual_seed(3)), 5, "s"
    )
    view = NeuronView(model)
    additive = CleanRun.of(view, sequence.tokens[None]).additive
    ablated = ZeroOut()(model, sequence)
    wanted = plain_zero_out(model, sequence)
    assert (ablated.values - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
    method = IntegratedGradients(steps=2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        values = method(model, sequence).values
    wanted = plain_integrated_gradients(model, sequence, *method.quadrature())
    assert (values - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
    HardConcrete(steps=2)(model, sequence)
    before = [view.rows(layer).clone() for layer in range(view.n_layers)]
    injection = inject(model, sequence, ratio=0.3, seed=0, learning_rate=0.05, max_steps=60)
    with injection.applied(model), torch.no_grad():
        logits = model(sequence.tokens[None])[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, sequence.tokens[1:])
        assert abs(float(loss) - float(injection.losses[-1])) < 1e-3, (
            "the rows that were trained are not those that are applied"
        )
    assert all(torch.equal(view.rows(layer), rows) for layer, rows in enumerate(before))
    with ablated.top_k(0.1).dropped_out(model):
        assert accuracy(model, [sequence]).shape == (1,)
    way = (
        "one position at a time"
        if any("slow way" in str(one.message) for one in warned)
        else "one pass"
    )
    output = "added" if len(additive) == view.n_layers else "changed after W_out, or hooked"
    return f"| {name} | {output} | {way} |"


REFUSALS = {
    "experts": "mixture of experts",
    "Unsupported architecture": "not adapted by TransformerLens",
    "scale_attn_weights": "TransformerLens scales its attention",
    "none with a W_out": "no MLP with a W_out",
    "reproduces": "TransformerLens gives other logits",
    "must be a model that TransformerLens adapts": "TransformerLens can't wrap it",
}
