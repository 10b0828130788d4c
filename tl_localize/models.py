"""Models: from a name or a directory to a HookedTransformer or a TransformerBridge with raw
weights.
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_localize.files import reading
from tl_localize.forward import as_bridge, lay_out
from tl_localize.neurons import NeuronView, initialize_vector_functions

if TYPE_CHECKING:  # imported when a model is loaded
    from transformer_lens import HookedTransformer
    from transformer_lens.model_bridge import TransformerBridge

REFERENCE_MODELS = ("reference-gpt2", "reference-pythia")  # shipped; "reference" is the first
LOGITS_TOLERANCE = 1e-4  # of a converted model against transformers, float32
# in old files: causal masks and rotary frequencies
BUFFERS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|inv_freq$")
# What TransformerLens does to weights unless it is told not to.
PROCESSING = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
ADVICE = "Convert it to a TransformerLens model yourself: every method takes one."


def load_model(
    name_or_path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    bridge: bool = False,
) -> HookedTransformer | TransformerBridge:
    """A TransformerLens model with unprocessed weights, in eval mode, that never adds BOS by
    itself.

    It is a HookedTransformer where the installed TransformerLens (3.x) has that class and it holds
    the model, and a TransformerBridge otherwise. Folding and centring would change the rows of
    W_out, which INJ trains and Activations weighs, so nothing is processed. The logits of a
    directory's model and of a Bridge are compared with those of transformers.

    Args:
        name_or_path: ``"reference-gpt2"`` (also ``"reference"``) or ``"reference-pythia"``, which
            are shipped; a local Hugging Face folder (config.json and safetensors weights, tokenizer
            optional) of a causal language model that transformers builds and TransformerLens
            adapts; a GGUF file of one, or a folder that holds one, whose weights become
            floating-point numbers again; a name that TransformerLens knows; or a name of the
            Hugging Face hub.
        device: CUDA when there is one, unless given.
        bridge: a TransformerBridge, also where there is a HookedTransformer.

    Raises:
        ValueError: an unknown name, a model that can't be loaded right (a mixture of experts, an
            MLP without a neuron axis, other logits), or CUDA asked for and absent.
        ImportError: a GGUF file without the package that reads it.

    >>> load_model("reference").cfg.d_mlp
    1536
    """
    initialize_vector_functions()
    device = check_device(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"dtype must be a floating-point torch dtype, got {dtype!r}. Write torch.float32."
        )
    name = str(name_or_path)
    if is_reference(name):
        name = str(
            Path(__file__).parent / "data" / (REFERENCE_MODELS[0] if name == "reference" else name)
        )
    with warnings.catch_warnings():
        # TransformerLens 3.9 calls every HookedTransformer deprecated
        warnings.simplefilter("ignore")
        load = _load_local if Path(name).is_dir() or Path(name).suffix == ".gguf" else _load_by_name
        return lay_out(load(name, device, dtype, bridge or not has_hooked_transformer()).eval())


def has_hooked_transformer() -> bool:
    """Whether the installed TransformerLens has HookedTransformer, as 3.x does."""
    import transformer_lens

    try:
        return hasattr(transformer_lens, "HookedTransformer")
    except ImportError:  # what 4.x raises, with directions for those who ask for the class
        return False


def is_reference(name: str | Path) -> bool:
    """Whether a name is that of a shipped model, whose texts are shipped too
    (``tl_localize.reference``).

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
        if asked.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=asked)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]  # the whole message is a page long
        raise ValueError(
            f"device must be there, got {str(device)!r}, which torch can't use here ({reason}). "
            "Write 'cpu' or 'cuda'."
        ) from error
    return asked


def _load_by_name(name: str, device: torch.device, dtype: torch.dtype, bridge: bool) -> Any:
    from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    known = {
        alias.lower(): official
        for official in OFFICIAL_MODEL_NAMES
        for alias in (official, *MODEL_ALIASES.get(official, ()))
    }
    near = difflib.get_close_matches(name.lower(), [*known, *REFERENCE_MODELS], n=3)
    hint = (
        f"Did you mean {' or '.join(map(repr, near))}?" if near else "A local directory must exist."
    )
    unknown = (
        "name_or_path must be a shipped model, a local directory or a name TransformerLens or the "
        f"hub knows, got {name!r}. {hint}"
    )
    if name.lower() not in known and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(unknown)
    if bridge or name.lower() not in known:
        from transformers import AutoConfig

        source = known.get(name.lower(), name)
        try:
            return _load_bridge(source, AutoConfig.from_pretrained(source), device, dtype)
        except OSError as error:  # the hub has no such model, or is out of reach
            raise ValueError(f"{unknown} ({str(error).splitlines()[0]})") from error
    from transformer_lens import HookedTransformer

    return HookedTransformer.from_pretrained_no_processing(
        name,
        device=str(device),
        dtype=dtype,
        default_prepend_bos=False,
        default_padding_side="right",
    )


def _load_local(name: str, device: torch.device, dtype: torch.dtype, bridge: bool) -> Any:
    from transformers import AutoConfig

    path = _gguf_file(Path(name)) or Path(name)
    if path.suffix != ".gguf":
        _check_model_type(path)
    with _reading(path, "config.json"):
        hf_config = AutoConfig.from_pretrained(**_source(path))
        n_layers = int(hf_config.get_text_config().num_hidden_layers)
    if n_layers < 1:
        raise ValueError(
            f"name_or_path must be a model with layers, got 0 in {str(path)!r}. Correct its "
            "config.json."
        )
    if bridge or _needs_bridge(hf_config):
        return _load_bridge(path, hf_config, device, dtype)
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions

    shapes, converter = _CONFIGS[hf_config.model_type]
    hf_model = _load_transformers(path, dtype)
    with _reading(path, "config.json"):
        cfg = HookedTransformerConfig(
            model_name=_name(path),
            original_architecture=type(hf_model).__name__,
            device=str(device),
            dtype=dtype,
            init_weights=False,
            default_prepend_bos=False,
            **_common_shapes(hf_config),
            **shapes(hf_config),
        )
        model = HookedTransformer(cfg)
        converted = getattr(weight_conversions, converter)(hf_model, cfg)
        weights = {key: value.clone() for key, value in converted.items()}
        model.load_and_process_state_dict(weights, **dict.fromkeys(PROCESSING, False))
        tokens = _probe(model.cfg)
        expected = _logits(hf_model, tokens)
    _set_tokenizer(model, path)
    _check_logits(path, model.eval(), tokens, expected)
    return model


def _load_bridge(
    source: str | Path, hf_config: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    """A TransformerBridge around a model of transformers, from a directory or the hub."""
    wrong: list[str] = []
    if not getattr(hf_config, "scale_attn_weights", True):
        wrong.append("scale_attn_weights=False")
    if getattr(hf_config, "add_cross_attention", False):
        wrong.append("add_cross_attention=True")
    if getattr(hf_config, "quantization_config", None) is not None:
        wrong.append("quantization_config")
    if wrong:
        raise ValueError(
            f"name_or_path must be a model that TransformerLens can hold, got {str(source)!r} with "
            f"{', '.join(wrong)}. {ADVICE}"
        )
    hf_model = _load_transformers(source, dtype)
    name = _name(source) if isinstance(source, Path) else source
    architecture = type(hf_model).__name__
    with _reading(source, "config.json"):
        tokens = _probe(hf_config.get_text_config())
        expected = _logits(hf_model, tokens)  # before the bridge, which changes the model in place
    try:
        model = as_bridge(hf_model.to(device), name)
    except Exception as error:  # each architecture fails in its own way
        raise ValueError(
            f"name_or_path must be a model that TransformerLens adapts, got {str(source)!r} "
            f"({architecture}): {error}. {ADVICE}"
        ) from error
    _set_tokenizer(model, source)
    NeuronView(model)  # raises where it has no neurons
    _check_logits(source, model, tokens, expected)
    return model


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a directory without config.json;
    None where there is none.
    """
    if path.suffix == ".gguf":
        found = [path]
    elif (path / "config.json").exists():
        return None
    else:
        found = sorted(path.glob("*.gguf"))
    if not found:
        return None
    if not found[0].is_file():
        raise FileNotFoundError(
            f"name_or_path must be an existing file, got {str(path)!r}. Check the spelling."
        )
    if len(found) > 1:
        raise ValueError(
            f"name_or_path must hold one GGUF file, got {', '.join(one.name for one in found)} in "
            f"{str(path)!r}. Name one."
        )
    if not find_spec("gguf"):
        raise ImportError("a GGUF file needs the package gguf: pip install gguf.")
    with found[0].open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(
                f"name_or_path must be a GGUF file, got {str(found[0])!r}, which is none. Copy or "
                "download it again."
            )
    return found[0]


def _name(path: Path) -> str:
    return path.stem if path.suffix == ".gguf" else path.name


def _source(path: str | Path) -> dict[str, Any]:
    """Where transformers finds a model: a directory, a GGUF file, or a name of the hub."""
    if isinstance(path, Path) and _is_gguf(path):
        return {
            "pretrained_model_name_or_path": path.parent,
            "gguf_file": path.name,
            "local_files_only": True,
        }
    return {"pretrained_model_name_or_path": path, "local_files_only": isinstance(path, Path)}


def _reading(path: str | Path, what: str) -> AbstractContextManager[None]:
    """A damaged or contradictory file is one ValueError with its place; the errors of the hub,
    which a name is looked up in, pass.
    """
    if not isinstance(path, Path):
        return nullcontext()
    rule = f"name_or_path must hold a {what} that transformers can read"
    return reading(rule, path, "Correct it, or copy the directory again.")


def _check_model_type(path: Path) -> None:
    """Raise ValueError unless a directory holds a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    with _reading(path, "config.json"):
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] not in KNOWN:
            raise ValueError(f"{config['model_type']!r} is no causal language model")


def _load_transformers(path: str | Path, dtype: torch.dtype) -> Any:
    """The model of a directory or a GGUF file, or of the hub where it is not a Path, as
    transformers loads it.

    Transformers fills weights that the file lacks with noise, drops those that the config has no
    place for, and only logs it. Here both are errors.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": "eager",
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    if isinstance(path, Path) and path.is_dir():
        options["use_safetensors"] = True
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # the errors below say what is wrong
    logging.disable_progress_bar()
    try:
        with _reading(path, "config.json with safetensors weights"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(**_source(path), **options)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    model, found = loaded
    wrong = sorted(found["missing_keys"]) + sorted(str(key[0]) for key in found["mismatched_keys"])
    if wrong:
        raise ValueError(
            "name_or_path must hold every weight of its config, in the config's shapes, got "
            f"{str(path)!r} with {_some(wrong)} missing or of another shape. Save it again."
        )
    dropped = sorted(key for key in found["unexpected_keys"] if not BUFFERS.search(key))
    if dropped:
        raise ValueError(
            "name_or_path must hold only weights that its config has a place for, got "
            f"{str(path)!r} with {_some(dropped)} beside them. Correct config.json (is the number "
            "of layers right?) or save the model again."
        )
    return (_dequantized(model, dtype) if _is_gguf(path) else model).eval()


def _is_gguf(path: str | Path) -> bool:
    return isinstance(path, Path) and path.suffix == ".gguf"


def _dequantized(model: Any, dtype: torch.dtype) -> Any:
    """A plain model with the weights of a GGUF file, whose config still says quantized."""
    del model.config.quantization_config
    plain = type(model)(model.config).to(dtype)
    plain.load_state_dict(model.state_dict())
    return plain


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")


def _set_tokenizer(model: Any, path: str | Path) -> None:
    """Set the tokenizer of the hub, or of a directory that has one.

    This is what ``HookedTransformer.set_tokenizer`` does, but without its second copy, which puts
    BOS first.
    """
    from transformers import AutoTokenizer

    if isinstance(path, Path) and path.is_dir():
        names = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")
        if not any((path / name).is_file() for name in names):
            return
    with _reading(path, "tokenizer"):
        tokenizer: Any = AutoTokenizer.from_pretrained(**_source(path))
        tokenizer.padding_side = "right"
        tokenizer.eos_token = tokenizer.eos_token or "<|endoftext|>"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
        model.cfg.tokenizer_prepends_bos = tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    model.tokenizer = tokenizer


def _common_shapes(c: Any) -> dict[str, Any]:
    """What every family has; transformers gives it under these names also where config.json has
    others (``n_embd``).
    """
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
        "NTK_original_ctx_len": rope.get(
            "original_max_position_embeddings", c.max_position_embeddings
        ),
        "NTK_by_parts_low_freq_factor": rope.get("low_freq_factor", 1.0),
        "NTK_by_parts_high_freq_factor": rope.get("high_freq_factor", 4.0),
        "NTK_by_parts_factor": rope.get("factor", 1.0),
    }
    return {
        **_rotary(c),
        "rotary_dim": _common_shapes(c)["d_head"],
        "n_key_value_heads": c.num_key_value_heads
        if c.num_key_value_heads != c.num_attention_heads
        else None,
        "eps": c.rms_norm_eps,
        "normalization_type": "RMS",
        "final_rms": True,
        "gated_mlp": True,
        **(scaled if rope.get("rope_type") == "llama3" else {}),
    }


# by model type; with TransformerLens' converter of weights
_CONFIGS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "gpt2": (_gpt2, "convert_gpt2_weights"),
    "gpt_neox": (_neox, "convert_neox_weights"),
    "llama": (_llama, "convert_llama_weights"),
    "mistral": (_llama, "convert_mistral_weights"),
    "qwen2": (_llama, "convert_qwen2_weights"),
}


def _needs_bridge(c: Any) -> bool:
    """Whether HookedTransformer can't hold a model of this config."""
    return (
        c.model_type not in _CONFIGS
        or (getattr(c, "rope_parameters", None) or {}).get("rope_type", "default")
        not in ("default", "llama3")
        or (
            getattr(c, "use_sliding_window", True)
            and getattr(c, "sliding_window", None) is not None
        )
        or (c.model_type == "llama" and getattr(c, "attention_bias", False))
        or (c.model_type == "gpt_neox" and not getattr(c, "attention_bias", True))
        or getattr(c, "mlp_bias", False)
        or getattr(c, "add_cross_attention", False)
        or getattr(c, "quantization_config", None) is not None
    )


def _probe(c: Any) -> Int[Tensor, "1 pos"]:
    """A few tokens for the check of logits; ``c`` is a config of transformers or of
    TransformerLens.
    """
    longest = getattr(c, "max_position_embeddings", None) or getattr(c, "n_ctx", 32)
    n_vocab = getattr(c, "vocab_size", None) or c.d_vocab
    return torch.arange(min(32, longest))[None] * 7919 % n_vocab


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products of float32 matrices in float32, whatever was set (TF32 has 10 bits); what was set is
    given back.
    """
    matmul: Any = torch.backends.cuda.matmul
    new = getattr(matmul, "fp32_precision", None)  # from torch 2.9 on
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:  # what torch raises where only the new one was set
        old = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if old is not None:
            torch.set_float32_matmul_precision(old)
        if new is not None:
            matmul.fp32_precision = new


@torch.no_grad()
def _logits(hf_model: Any, tokens: Int[Tensor, "1 pos"]) -> Float[Tensor, "1 pos vocab"]:
    with _full_precision():
        return hf_model(tokens, use_cache=False).logits


@torch.no_grad()
def _check_logits(
    path: str | Path,
    model: Any,
    tokens: Int[Tensor, "1 pos"],
    expected: Float[Tensor, "1 pos vocab"],
) -> None:
    """Raise ValueError if the logits are not those of transformers; only float32 is exact enough
    for this check.
    """
    if model.cfg.dtype != torch.float32:
        return
    difference = float("inf")
    for _ in range(2):  # twice before a model is refused: a process's first numbers may be off
        with _full_precision():
            found = model(tokens.to(model.cfg.device)).cpu()
        difference = float((found - expected).abs().max())
        if difference < LOGITS_TOLERANCE * max(1.0, float(expected.abs().max()) / 10):
            return
    name = model.cfg.original_architecture or getattr(model.cfg, "architecture", "")
    raise ValueError(
        "name_or_path must be a model whose logits TransformerLens reproduces, got "
        f"{str(path)!r} ({name}), off by {difference:.2g}. {ADVICE}"
    )
