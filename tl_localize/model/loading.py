"""Models: from a name or a directory to a HookedTransformer or a TransformerBridge with raw
weights.
"""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tl_localize.checks import check_choice, nearest
from tl_localize.files import refuse_unreadable
from tl_localize.model.forward import as_bridge, lay_out, logits_misfit
from tl_localize.model.neurons import NeuronView, initialize_vector_functions

if TYPE_CHECKING:  # imported when a model is loaded
    from transformer_lens import HookedTransformer
    from transformer_lens.model_bridge import TransformerBridge

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
REFERENCE_MODELS = ("reference-gpt2", "reference-pythia")  # shipped; "reference" is the first
LOGITS_TOLERANCE = 1e-4  # of a converted model against transformers, float32 and float64
HALF_TOLERANCE = 4.0  # in float16 and bfloat16: times what ``logits_misfit`` allows
READS_GGUF = 5, 23  # the first transformers whose tokenizers of GGUF files are right
# in old files: causal masks and rotary frequencies
BUFFERS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|inv_freq$")
END_OF_TEXT = "<|endoftext|>"  # where a tokenizer names no token for it
# What TransformerLens does to weights unless it is told not to.
PROCESSING = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
# model -> what it was loaded from, and the checksums of its weights
_SOURCES: WeakKeyDictionary[Any, tuple[str, list[int]]] = WeakKeyDictionary()
# bytes of a number -> the whole numbers of that size
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ADVICE = "Convert it to a TransformerLens model yourself: every method takes one."


@torch.inference_mode(False)  # whatever mode the caller is in, so that the weights have gradients
def load_model(
    name_or_path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str = torch.float32,
    bridge: bool = False,
) -> "HookedTransformer | TransformerBridge":
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
            adapts; a GGUF file of one, whose weights become floating-point numbers again; a name
            that TransformerLens knows; or a name of the Hugging Face hub.
        device: CUDA when there is one, unless given.
        dtype: of the weights: float32, float64, bfloat16 or float16, of torch or by name.
        bridge: a TransformerBridge, also where there is a HookedTransformer.

    Raises:
        TypeError: something else than a name or a path, such as a model.
        ValueError: an unknown name, a model that can't be loaded right (a mixture of experts, an
            MLP without a neuron axis, other logits), another dtype, or CUDA asked for and absent.
        ImportError: a GGUF file without the package that reads it, or with a transformers that
            reads its tokenizer wrongly.

    >>> load_model("reference").cfg.d_mlp
    1536
    """
    initialize_vector_functions()
    check_path(name_or_path)
    device = check_device(device)
    dtype = check_dtype(dtype)
    path = local_path(name_or_path)
    bridge = bridge or not has_hooked_transformer()
    with warnings.catch_warnings(), _full_precision():
        # TransformerLens 3.9 calls every HookedTransformer deprecated
        warnings.simplefilter("ignore")
        if path.is_dir() or (is_gguf(path) and path.is_file()):
            model = _load(path, device, dtype, bridge)
        else:
            model = _load_by_name(os.fspath(name_or_path), device, dtype, bridge)
        model = lay_out(model.eval())
        _SOURCES[model] = os.fspath(name_or_path), checksums(model)
        return model


def source_of_model(model: Any) -> str | None:
    """What was given to ``load_model``; None where a model came from elsewhere."""
    source, _ = _SOURCES.get(model, (None, []))
    return source


def is_as_loaded(model: Any) -> bool:
    """Whether a model has the weights with which ``load_model`` gave it."""
    _, sums = _SOURCES.get(model, (None, []))
    return sums == checksums(model)


def checksums(model: Any) -> list[int]:
    """Of each weight the sum of its numbers, whose bits are read as whole ones, each times a key of
    its place; all modulo 2 ** 64. The same on every device, and faster than a hash.
    """
    keys = torch.randint(2**62, (2**20,), generator=torch.Generator().manual_seed(0))
    sums: list[int] = []
    for weight in model.parameters():
        bits = weight.detach().contiguous().view(WHOLE[weight.element_size()]).flatten()
        keys = keys.to(bits.device)
        total = torch.zeros_like(keys[: len(bits)])
        for part in bits.split(len(keys)):
            total.mul_(3)[: len(part)].add_(part)
        sums.append(int((total * keys[: len(total)]).sum()))
    return sums


def local_path(name_or_path: str | Path) -> Path:
    """Where a model would lie on this machine: a shipped one in the package."""
    name = os.fspath(name_or_path)
    if not is_reference(name):
        return Path(name)
    shipped = REFERENCE_MODELS[0] if name == "reference" else name
    return Path(__file__).parents[1] / "data" / shipped


def transformers_source(name_or_path: str | Path) -> str | Path:
    """From where transformers reads what ``load_model`` takes: a folder or a GGUF file as a Path,
    or a name of the hub.
    """
    path = local_path(name_or_path)
    if path.is_dir() or is_gguf(path):
        return path
    return official_name(str(name_or_path)) or str(name_or_path)


def has_hooked_transformer() -> bool:
    """Whether the installed TransformerLens has HookedTransformer, as 3.x does."""
    import transformer_lens

    try:
        return hasattr(transformer_lens, "HookedTransformer")
    except ImportError:  # what 4.x raises, with directions for those who ask for the class
        return False


def is_reference(name: str | Path) -> bool:
    """Whether a name is that of a shipped model, whose texts are shipped too
    (``tl_localize.texts.reference``).

    >>> is_reference("reference"), is_reference("gpt2")
    (True, False)
    """
    return str(name) in ("reference", *REFERENCE_MODELS)


def check_path(name_or_path: Any) -> None:
    """Raise TypeError unless this is a name or a path."""
    if not isinstance(name_or_path, str | os.PathLike):
        raise TypeError(
            f"name_or_path must be a name or a path, got {type(name_or_path).__name__}. Save a "
            "model of transformers and its tokenizer by save_pretrained(folder) and give the "
            "folder; a model of TransformerLens needs no loading: every method takes it."
        )


def check_dtype(dtype: Any) -> torch.dtype:
    """The dtype, also of its name; ValueError where no model can have it."""
    if dtype in DTYPES.values():
        return dtype
    check_choice("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def is_gguf(name: str | Path) -> bool:
    """Whether a name is that of a GGUF file, whose quantized weights are converted.

    >>> is_gguf("model.gguf"), is_gguf("gpt2")
    (True, False)
    """
    return Path(name).suffix == ".gguf"


def check_device(device: str | torch.device | None) -> torch.device:
    """The device to use: the given one, which must be there, else CUDA when there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device).tolist()  # "meta" holds no numbers
        return torch.device(device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        usable = "'cpu' or 'cuda'" if torch.cuda.is_available() else "'cpu': there is no CUDA here"
        raise ValueError(
            f"device must be there, got {str(device)!r}, which torch can't use here. Write "
            f"{usable}."
        ) from error


def known_names() -> dict[str, str]:
    """The hub's name of each model that TransformerLens knows, by each of its names in lower
    case.
    """
    from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    return {
        alias.lower(): official
        for official in OFFICIAL_MODEL_NAMES
        for alias in (official, *MODEL_ALIASES.get(official, ()))
    }


def official_name(name: str) -> str | None:
    """The hub's name of a model that TransformerLens knows."""
    return known_names().get(name.lower())


def _load_by_name(name: str, device: torch.device, dtype: torch.dtype, bridge: bool) -> Any:
    official = official_name(name)
    of_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not is_gguf(name)
    if official is None and not of_hub:
        raise ValueError(
            "name_or_path must be a shipped model, an existing directory or a name that "
            f"TransformerLens or the hub knows, got {name!r}. Check the spelling."
            f"{nearest(name.lower(), [*known_names(), *REFERENCE_MODELS])}"
        )
    if bridge or official is None:
        return _load(official or name, device, dtype, True)
    from transformer_lens import HookedTransformer

    model = HookedTransformer.from_pretrained_no_processing(
        name,
        device=str(device),
        dtype=dtype,
        default_prepend_bos=False,
        default_padding_side="right",
    )
    _set_tokenizer(model, official)  # its own puts BOS first, whatever the checkpoint's does
    return model


def _load(source: str | Path, device: torch.device, dtype: torch.dtype, bridge: bool) -> Any:
    """A model that transformers reads, in a class of TransformerLens.

    Args:
        source: A directory or a GGUF file, as a Path, or a name of the hub.
    """
    from transformers import AutoConfig

    with _refuse_unreadable(source, "config.json"):
        config = AutoConfig.from_pretrained(**_files(source))
        bridge = bridge or _needs_bridge(config)
        text_config = config.get_text_config()
        longest = min(32, getattr(text_config, "max_position_embeddings", 32))
        tokens = torch.arange(longest)[None] * 7919 % text_config.vocab_size
    hf_model = load_transformers(source, dtype)
    # of the whole path, as "." has no name; a link keeps its own
    name = source if isinstance(source, str) else os.path.basename(os.path.abspath(source))
    name = name.removesuffix(".gguf")
    with _refuse_unreadable(source, "config.json"), torch.no_grad():
        expected = hf_model(tokens, use_cache=False).logits  # a Bridge changes the model in place
    with refuse_unreadable(
        "name_or_path must be a model that TransformerLens adapts", source, ADVICE
    ):
        if bridge:
            model = as_bridge(hf_model.to(device), name)
        else:
            model = _hooked_transformer(hf_model, name, device, dtype)
        with torch.no_grad():
            found = model(tokens.to(device)).cpu()
    _set_tokenizer(model, source)
    NeuronView(model)  # raises where it has no neurons
    _check_logits(source, model, found, expected)
    return model


def _hooked_transformer(hf_model: Any, name: str, device: torch.device, dtype: torch.dtype) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions

    cfg = HookedTransformerConfig(
        model_name=name,
        original_architecture=type(hf_model).__name__,
        device=str(device),
        dtype=dtype,
        init_weights=False,
        default_prepend_bos=False,
        **_shapes(hf_model),
    )
    model = HookedTransformer(cfg)
    convert = getattr(weight_conversions, CONVERTERS[hf_model.config.model_type])
    weights = convert(hf_model, cfg)
    model.load_and_process_state_dict(weights, **dict.fromkeys(PROCESSING, False))
    return model


def _files(source: str | Path) -> dict[str, Any]:
    """Where transformers finds a model."""
    if isinstance(source, Path) and is_gguf(source):
        _check_reads_gguf()
        return {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    return {"pretrained_model_name_or_path": source}


def _check_reads_gguf() -> None:
    """Raise ImportError where this transformers reads tokenizers of GGUF files wrongly: Gemma's
    merges nothing up to 5.17 and begins no text with BOS up to 5.22, and the model then recites
    nothing.
    """
    from transformers import __version__

    if tuple(map(int, __version__.split(".")[:2])) < READS_GGUF:
        needed = ".".join(map(str, READS_GGUF))
        raise ImportError(
            f"transformers must be {needed} or newer to read a GGUF file, got {__version__}, which "
            f"splits texts into wrong tokens. pip install 'transformers>={needed}'"
        )


def _refuse_unreadable(source: str | Path, what: str) -> AbstractContextManager[None]:
    """What transformers says of a damaged, contradictory or absent file is one ValueError with its
    place.
    """
    rule = f"name_or_path must hold a {what} that transformers can read"
    of_hub = "Check the spelling, and the connection to the hub."
    is_local = isinstance(source, Path)
    return refuse_unreadable(rule, source, "Copy the model again." if is_local else of_hub)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Transformers logs errors alone and draws no bars inside the ``with`` block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_transformers(source: str | Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it.

    Transformers fills weights that the file lacks with noise, drops those that the config has no
    place for, and only logs it. Here both are errors.
    """
    from transformers import AutoModelForCausalLM

    with (
        quiet_transformers(),  # the error below says what is wrong
        _refuse_unreadable(source, "config.json with safetensors weights"),
        _bar_on_a_terminal(source),
    ):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **_files(source),
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True if isinstance(source, Path) else None,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, found = loaded
    wrong = [*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])]
    wrong += [key for key in found["unexpected_keys"] if not BUFFERS.search(key)]
    if wrong:
        raise ValueError(
            f"name_or_path must hold the weights of its config and no others, got {str(source)!r} "
            f"with {len(wrong)} missing, of another shape or without a place, such as "
            f"{min(wrong)!r}. Correct config.json (is the number of layers right?) or save the "
            "model again."
        )
    return (_dequantized(model, dtype) if "gguf_file" in _files(source) else model).eval()


@contextmanager
def _bar_on_a_terminal(source: str | Path) -> Iterator[None]:
    """The bar with which transformers converts a GGUF file heeds none of its settings: here it is
    drawn in a notebook or on a terminal, and not into a pipe.
    """
    if not is_gguf(source):
        yield
        return
    from transformers import modeling_gguf_pytorch_utils

    converting: Any = modeling_gguf_pytorch_utils
    original = converting.tqdm
    converting.tqdm = partial(original, disable=None)
    try:
        yield
    finally:
        converting.tqdm = original


def _dequantized(model: Any, dtype: torch.dtype) -> Any:
    """A plain model with the weights of a GGUF file, whose config still says quantized. Its buffers
    keep their dtype, as elsewhere in transformers: rounded frequencies turn late positions wrong.
    """
    del model.config.quantization_config
    with torch.random.fork_rng(devices=[]):  # the first weights are drawn
        plain = type(model)(model.config)
    for weight in plain.parameters():
        weight.data = weight.data.to(dtype)
    plain.load_state_dict(model.state_dict())
    return plain


def _set_tokenizer(model: Any, source: str | Path) -> None:
    """Set the tokenizer of the hub, or of a directory that has one.

    This is what ``HookedTransformer.set_tokenizer`` does, but without its second copy, which puts
    BOS first.
    """
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        return
    with _refuse_unreadable(source, "tokenizer"):
        tokenizer.padding_side = "right"
        if tokenizer.eos_token is None and END_OF_TEXT in tokenizer.get_vocab():
            tokenizer.eos_token = END_OF_TEXT
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
        model.cfg.tokenizer_prepends_bos = tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    model.tokenizer = tokenizer


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer as transformers loads it; None of a directory that has none."""
    from transformers import AutoTokenizer

    if isinstance(source, Path) and source.is_dir():
        names = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")
        if not any((source / name).is_file() for name in names):
            return None
    with _refuse_unreadable(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(**_files(source))


# TransformerLens' converters of weights, by model type
CONVERTERS = {
    "gpt2": "convert_gpt2_weights",
    "gpt_neox": "convert_neox_weights",
    "llama": "convert_llama_weights",
}
# settings that a Bridge and a HookedTransformer both have
ADAPTED = (
    "d_model d_head n_heads n_layers n_ctx d_vocab d_mlp eps act_fn normalization_type "
    "positional_embedding_type n_key_value_heads gated_mlp final_rms parallel_attn_mlp "
    "scale_attn_by_inverse_layer_idx"
)


def _shapes(hf_model: Any) -> dict[str, Any]:
    """The settings of a HookedTransformer: what TransformerLens reads from a config for a Bridge,
    which is the whole config, and what it leaves out there.
    """
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge.sources import build_bridge_config_from_hf

    config = hf_model.config
    kind = type(hf_model).__name__
    found = build_bridge_config_from_hf(config, kind, "", torch.float32)
    found = ArchitectureAdapterFactory.select_architecture_adapter(found).cfg
    shapes = {name: getattr(found, name) for name in ADAPTED.split()}
    shapes["use_attn_scale"] = getattr(config, "scale_attn_weights", True)
    if found.positional_embedding_type == "rotary":
        share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        shapes["rotary_dim"] = int(found.d_head * share)
        shapes["rotary_base"] = config.rope_parameters.get("rope_theta", 10000)
    return shapes


def _needs_bridge(c: Any) -> bool:
    """Whether HookedTransformer can't hold a model of this config."""
    has_biases = c.model_type == "gpt_neox"
    rope = (getattr(c, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        c.model_type not in CONVERTERS
        or rope != "default"
        or getattr(c, "attention_bias", has_biases) != has_biases
        or getattr(c, "mlp_bias", False)
    )


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products of float32 matrices in float32, whatever was set (TF32 has 10 bits); what was set is
    given back.
    """
    backends: Any = torch.backends
    products: list[Any] = [backends.cuda.matmul, getattr(backends.mkldnn, "matmul", None)]
    new = [getattr(each, "fp32_precision", None) for each in products]  # from torch 2.9 on
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
        for each, precision in zip(products, new, strict=True):
            if precision is not None:
                each.fp32_precision = precision


def _check_logits(source: str | Path, model: Any, found: Tensor, expected: Tensor) -> None:
    """Raise ValueError if the logits are not those of transformers; in half precision, if they are
    grossly others.
    """
    if not expected.isfinite().all():
        raise ValueError(
            f"checkpoint must compute finite logits, got others of {str(source)!r} in transformers "
            "itself. Copy it again, or load it with dtype=torch.float32."
        )
    difference = float((found - expected).abs().max())
    allowed = LOGITS_TOLERANCE * max(1.0, float(expected.abs().max()) / 10)
    off = not difference < allowed  # nor where it is no number
    if model.cfg.dtype not in (torch.float32, torch.float64):
        off = logits_misfit(model, found, expected) > HALF_TOLERANCE
    if off:
        raise ValueError(
            "name_or_path must be a model whose logits TransformerLens reproduces, got "
            f"{str(source)!r}, off by {difference:.2g}. {ADVICE}"
        )
