"""What a number was made with: which weights, versions, device and threads, in what time and
memory.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tl_localize.execution.tasks import canonical, hash_tensors
from tl_localize.neurons import LanguageModel, model_name

PACKAGES = ("tl_localize", "torch", "transformer-lens", "transformers", "numpy", "scipy", "pandas")


def environment(model: LanguageModel, made_of: str = "") -> dict[str, Any]:
    """Versions, device, dtype, threads, and which weights: their fingerprint, which is taken unless
    it is given.
    """
    parameter = next(iter(model.parameters()))
    on_cuda = parameter.device.type == "cuda"
    return {
        "model": model_name(model),
        "fingerprint": made_of or fingerprint(model),
        "device": torch.cuda.get_device_name(parameter.device)
        if on_cuda
        else str(parameter.device),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def fingerprint(model: LanguageModel) -> str:
    """Hash of all weights and buffers, the config and the activation functions: 16 hexadecimal
    digits, taken anew each time.
    """
    named: Any = model
    digest = hashlib.sha256(canonical(_architecture(model)).encode())
    hash_tensors(digest, dict(named.named_parameters()))
    hash_tensors(digest, dict(named.named_buffers()))
    return digest.hexdigest()[:16]


def _architecture(model: Any) -> dict[str, Any]:
    """The plain entries of the config that change what the model computes, and the functions
    between its weights.
    """
    elsewhere = (
        "device",
        "n_devices",
        "seed",
        "model_name",
        "original_architecture",
        "from_checkpoint",
        "checkpoint",
        "init",
        "tokenizer",
    )
    plain = {
        name: value
        for name, value in vars(model.cfg).items()
        if isinstance(value, str | int | float | bool)
    }
    functions = [
        getattr(getattr(block.mlp, "act_fn", None), "__qualname__", "") for block in model.blocks
    ]
    shown: dict[str, Any] = {
        name: value for name, value in plain.items() if not name.startswith(elsewhere)
    } | {"functions": functions}
    # of a Bridge: the config of transformers
    wrapped = getattr(getattr(model, "original_model", None), "config", None)
    if wrapped is not None:
        given = json.loads(wrapped.to_json_string(use_diff=False))
        shown["transformers"] = {
            k: v
            for k, v in given.items()
            if k not in ("_name_or_path", "transformers_version", "dtype")
        }
    return shown


def check_plain(model: LanguageModel) -> None:
    """Raise ValueError if something changes the model's numbers that its fingerprint does not know.

    Records are kept under the fingerprint, so hooks, a replaced ``forward``, autocast and another
    default dtype are refused.
    """
    points = model.hook_dict.items()
    if hooked := [
        name
        for name, point in points
        if point._forward_hooks or point._forward_pre_hooks or point._backward_hooks
    ]:
        raise ValueError(
            f"model must have no hooks where results are kept, got some at {hooked[0]!r}. Take "
            "them away with model.reset_hooks(), or run "
            "without a store, which keeps nothing."
        )
    named: Any = model
    for name, module in named.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        replaced = [vars(module)["forward"]] if "forward" in vars(module) else []
        # A Bridge replaces and hooks what it wraps.
        if any(
            not str(getattr(one, "__module__", "")).startswith("transformer_lens")
            for one in (*hooks, *replaced)
        ):
            what = "a replaced forward" if replaced else "a hook of torch"
            raise ValueError(
                f"model must be as it was loaded where results are kept, got {what} on "
                f"{name or 'the model'!r}. Run without a store."
            )
    if any(
        torch.is_autocast_enabled(kind)
        for kind in {"cpu", next(iter(model.parameters())).device.type}
    ):
        raise ValueError(
            "model must run outside torch.autocast where results are kept, got it on. Load the "
            "model in the dtype you want."
        )
    if torch.get_default_dtype() != torch.float32:
        raise ValueError(
            "default dtype must be torch.float32 where results are kept, got "
            f"{torch.get_default_dtype()}. Set it back."
        )


def reset_peak_memory(model: LanguageModel) -> None:
    """Let ``peak_memory`` count from now on, where the device can."""
    device = next(iter(model.parameters())).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(model: LanguageModel) -> int | None:
    """Peak memory in bytes: of a GPU since ``reset_peak_memory``, else of the process so far; None
    where it is not known.
    """
    device = next(iter(model.parameters())).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
