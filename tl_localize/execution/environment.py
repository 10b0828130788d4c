"""What a number was made with: which weights, versions, device and threads, in what time and
memory.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
from torch import Tensor

from tl_localize.batching import tokens_that_fit
from tl_localize.execution.tasks import canonical
from tl_localize.neurons import LanguageModel, NeuronView, model_name

Result = TypeVar("Result")
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
    tensors: list[tuple[str, Tensor]] = [
        *sorted(named.named_parameters()),
        *sorted(named.named_buffers()),
    ]
    digest = hashlib.sha256(canonical(_architecture(model)).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
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


def measured(model: LanguageModel, compute: Callable[[], Result]) -> tuple[Result, dict[str, Any]]:
    """A result and what it took: seconds, peak memory in bytes (of the device, or of the process so
    far), tokens of a batch.
    """
    device = next(iter(model.parameters())).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    batch_tokens = tokens_that_fit(NeuronView(model))
    started = time.perf_counter()
    result = compute()
    seconds = time.perf_counter() - started
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _process_memory()
    return result, {"seconds": seconds, "peak_memory": memory, "batch_tokens": batch_tokens}


def _process_memory() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
