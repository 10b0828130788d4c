"""Models: from a name or a directory to a HookedTransformer with raw weights. No other file names the class."""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import safetensors
import torch

from tl_localize.neurons import initialize_vector_functions

REFERENCE_MODELS = ("reference-gpt2", "reference-pythia")  # shipped; "reference" is the first
LOGITS_TOLERANCE = 1e-4  # of a converted model against transformers, float32
BUFFERS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|inv_freq$")  # in old files: causal masks and rotary frequencies
ADVICE = "Convert it to a HookedTransformer yourself: every method takes one."


def load_model(name_or_path: str | Path, device: str | torch.device | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """A HookedTransformer with unprocessed weights, in eval mode, that never adds BOS by itself.

    Folding and centring would change the rows of W_out, which INJ trains and Activations weighs, so nothing is processed.

    Args:
        name_or_path: ``"reference-gpt2"`` (also ``"reference"``) or ``"reference-pythia"``, which are shipped; a local Hugging Face folder
            (config.json and safetensors weights, tokenizer optional) of a GPT-2, GPT-NeoX or Llama-like model; or any name that
            TransformerLens knows.
        device: CUDA when there is one, unless given.
    Raises:  ValueError: an unknown name, a directory that can't be loaded right, or CUDA asked for and absent.

    >>> load_model("reference").cfg.d_mlp
    1536
    """
    initialize_vector_functions()
    device = check_device(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"dtype must be a floating-point torch dtype, got {dtype!r}. Write torch.float32.")
    name = str(name_or_path)
    if is_reference(name):
        name = str(files("tl_localize") / "data" / (REFERENCE_MODELS[0] if name == "reference" else name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerLens 3.9 calls every HookedTransformer deprecated
        return (_load_directory(Path(name), device, dtype) if Path(name).is_dir() else _load_by_name(name, device, dtype)).eval()


def is_reference(name: str | Path) -> bool:
    """Whether a name is that of a shipped model, whose texts are shipped too (``tl_localize.reference``).

    >>> is_reference("reference"), is_reference("gpt2")
    (True, False)
    """
    return str(name) in ("reference", *REFERENCE_MODELS)


def check_device(device: str | torch.device | None) -> torch.device:
    """The device to use: the given one, which must be there, else CUDA when there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch device, got {str(device)!r}. Write 'cpu' or 'cuda'.") from error
    if asked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be there, got {str(device)!r} on a machine where torch sees no CUDA. Use device='cpu'.")
    if asked.type == "cuda" and (asked.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device must be there, got {str(device)!r} on a machine with {torch.cuda.device_count()} CUDA devices. They count from 0."
        )
    try:
        if asked.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=asked)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]  # the whole message is a page long
        raise ValueError(f"device must be there, got {str(device)!r}, which torch can't use here ({reason}). Use device='cpu'.") from error
    return asked


def _load_by_name(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    from transformer_lens import HookedTransformer
    from transformer_lens.loading_from_pretrained import make_model_alias_map

    known: dict[str, str] = make_model_alias_map()
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), [*known, *REFERENCE_MODELS], n=3)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "A local directory must exist."
        raise ValueError(f"name_or_path must be a shipped model, a local directory or a name TransformerLens knows, got {name!r}. {hint}")
    return HookedTransformer.from_pretrained_no_processing(
        name, device=str(device), dtype=dtype, default_prepend_bos=False, default_padding_side="right"
    )


def _load_directory(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions
    from transformers import AutoConfig

    shapes, converter = _CONFIGS[_model_type(path)]
    _check_weights(path)
    hf_config = AutoConfig.from_pretrained(path, local_files_only=True)
    _refuse(path, hf_config)
    hf_model = _load_transformers(path, dtype)
    cfg = HookedTransformerConfig(
        model_name=path.name,
        original_architecture=type(hf_model).__name__,
        device=str(device),
        dtype=dtype,
        init_weights=False,
        default_prepend_bos=False,
        **_common_shapes(hf_config),
        **shapes(hf_config),
    )
    model = HookedTransformer(cfg)
    weights = {key: value.clone() for key, value in getattr(weight_conversions, converter)(hf_model, cfg).items()}
    model.load_and_process_state_dict(weights, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False)
    _set_tokenizer(model, path)
    _check_logits(path, model.eval(), hf_model)
    return model


def _model_type(path: Path) -> str:
    """The type of a directory's model, which must be one that can be converted."""
    if not (path / "config.json").is_file():
        raise ValueError(f"name_or_path must be a directory with a config.json, got {str(path)!r}. Save with save_pretrained.")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"name_or_path must have a config.json that is JSON, got {str(path)!r} ({error}). Copy it again.") from error
    found = config.get("model_type") if isinstance(config, dict) else None
    if found not in _CONFIGS:
        place = str(path / "config.json")
        raise ValueError(f"name_or_path must be a model of type {', '.join(_CONFIGS)}, got {found!r} in {place!r}. {ADVICE}")
    return found


def _check_weights(path: Path) -> None:
    """Raise ValueError unless there are safetensors files and all of them are whole; transformers prefers one file to an index."""
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    parts = {whole.name} if whole.is_file() or not index.is_file() else set(json.loads(index.read_text())["weight_map"].values())
    if missing := sorted(name for name in parts if not (path / name).is_file()):
        raise ValueError(
            f"name_or_path must hold safetensors weights, got {str(path)!r} without {', '.join(missing)}. "
            "Save with save_pretrained(safe_serialization=True)."
        )
    for name in sorted(parts):
        try:
            with safetensors.safe_open(path / name, framework="pt"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"name_or_path must hold whole safetensors weights, got {str(path / name)!r} ({error}). Copy or download it again."
            ) from error


def _load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """The directory's model as transformers loads it.

    Transformers fills weights that the file lacks with noise, drops those that the config has no place for, and only logs it. Here both are
    errors.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # the errors below say what is wrong
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, attn_implementation="eager", ignore_mismatched_sizes=True, output_loading_info=True
        )
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    model, found = loaded
    if wrong := sorted(found["missing_keys"]) + sorted(str(key[0]) for key in found["mismatched_keys"]):
        raise ValueError(
            f"name_or_path must hold every weight of its config, in the config's shapes, got {str(path)!r} with {_some(wrong)} missing "
            "or of another shape. Save it again."
        )
    if dropped := sorted(key for key in found["unexpected_keys"] if not BUFFERS.search(key)):
        raise ValueError(
            f"name_or_path must hold only weights that its config has a place for, got {str(path)!r} with {_some(dropped)} beside them. "
            "Correct config.json (is the number of layers right?) or save the model again."
        )
    return model.eval()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")


def _set_tokenizer(model: Any, path: Path) -> None:
    """Set the directory's tokenizer as ``HookedTransformer.set_tokenizer`` does, but without its second copy, which puts BOS first."""
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")):
        return
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokenizer.padding_side = "right"
    tokenizer.eos_token = tokenizer.eos_token or "<|endoftext|>"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    model.tokenizer = tokenizer
    model.cfg.tokenizer_prepends_bos = tokenizer.encode("")[:1] == [tokenizer.bos_token_id]


def _common_shapes(c: Any) -> dict[str, Any]:
    """What every family has; transformers gives it under these names also where config.json has others (``n_embd``)."""
    return {
        "d_model": c.hidden_size,
        "d_head": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "n_heads": c.num_attention_heads,
        "n_layers": c.num_hidden_layers,
        "n_ctx": c.max_position_embeddings,
        "d_vocab": c.vocab_size,
    }


def _gpt2(c: Any) -> dict[str, Any]:
    return {
        "d_mlp": c.n_inner or 4 * c.n_embd,
        "eps": c.layer_norm_epsilon,
        "act_fn": c.activation_function,
        "use_attn_scale": c.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": c.scale_attn_by_inverse_layer_idx,
    }


def _rotary(c: Any) -> dict[str, Any]:
    d_head = _common_shapes(c)["d_head"]
    return {
        "d_mlp": c.intermediate_size,
        "act_fn": c.hidden_act,
        "positional_embedding_type": "rotary",
        "rotary_base": c.rope_parameters.get("rope_theta", 10000),
        "rotary_dim": int(d_head * c.rope_parameters.get("partial_rotary_factor", 1.0)),
    }


def _neox(c: Any) -> dict[str, Any]:
    return {**_rotary(c), "eps": c.layer_norm_eps, "parallel_attn_mlp": c.use_parallel_residual}


def _llama(c: Any) -> dict[str, Any]:
    rope = c.rope_parameters
    scaled = {
        "use_NTK_by_parts_rope": True,
        "NTK_original_ctx_len": rope.get("original_max_position_embeddings", c.max_position_embeddings),
        "NTK_by_parts_low_freq_factor": rope.get("low_freq_factor", 1.0),
        "NTK_by_parts_high_freq_factor": rope.get("high_freq_factor", 4.0),
        "NTK_by_parts_factor": rope.get("factor", 1.0),
    }
    return {
        **_rotary(c),
        "rotary_dim": _common_shapes(c)["d_head"],
        "n_key_value_heads": c.num_key_value_heads if c.num_key_value_heads != c.num_attention_heads else None,
        "eps": c.rms_norm_eps,
        "normalization_type": "RMS",
        "final_rms": True,
        "gated_mlp": True,
        **(scaled if rope.get("rope_type") == "llama3" else {}),
    }


_CONFIGS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {  # by model type; with TransformerLens' converter of weights
    "gpt2": (_gpt2, "convert_gpt2_weights"),
    "gpt_neox": (_neox, "convert_neox_weights"),
    "llama": (_llama, "convert_llama_weights"),
    "mistral": (_llama, "convert_mistral_weights"),
    "qwen2": (_llama, "convert_qwen2_weights"),
}


def _refuse(path: Path, c: Any) -> None:
    """Raise ValueError for settings that HookedTransformer can't hold, before the weights are read."""
    rope_type = (getattr(c, "rope_parameters", None) or {}).get("rope_type", "default")
    sliding = getattr(c, "sliding_window", None) if getattr(c, "use_sliding_window", True) else None
    reasons = {
        f"rope_type={rope_type!r}": rope_type not in ("default", "llama3"),
        f"sliding_window={sliding}": sliding is not None,
        "attention_bias=True": c.model_type == "llama" and getattr(c, "attention_bias", False),
        "mlp_bias=True": bool(getattr(c, "mlp_bias", False)),
        "attention_bias=False": c.model_type == "gpt_neox" and not getattr(c, "attention_bias", True),
        "add_cross_attention=True": bool(getattr(c, "add_cross_attention", False)),
        "quantization_config": getattr(c, "quantization_config", None) is not None,
    }
    if found := [reason for reason, present in reasons.items() if present]:
        raise ValueError(
            f"name_or_path must be a model that HookedTransformer can hold, got {str(path)!r} with {', '.join(found)}. {ADVICE}"
        )
    if c.num_hidden_layers < 1:
        raise ValueError(f"name_or_path must be a model with layers, got {c.num_hidden_layers} in {str(path)!r}. Correct its config.json.")


@torch.no_grad()
def _check_logits(path: Path, model: Any, hf_model: Any) -> None:
    """Raise ValueError if the logits are not those of transformers, on a few tokens; only float32 is exact enough for this check."""
    if model.cfg.dtype != torch.float32:
        return
    tokens = torch.arange(min(32, model.cfg.n_ctx))[None] * 7919 % model.cfg.d_vocab
    difference = float("inf")
    for _ in range(2):  # twice before a model is refused: a process's first numbers may be off
        expected = hf_model(tokens).logits
        difference = float((model(tokens.to(model.cfg.device)).cpu() - expected).abs().max())
        if difference < LOGITS_TOLERANCE * max(1.0, float(expected.abs().max()) / 10):
            break
    else:
        raise ValueError(
            f"name_or_path must be a model whose logits TransformerLens reproduces, got {str(path)!r} ({model.cfg.original_architecture}), "
            f"off by {difference:.2g}. {ADVICE}"
        )
