"""What a number was made with: which weights, versions, device and threads, in what time and
memory.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tl_localize.execution.tasks import canonical, hash_tensors
from tl_localize.neurons import LanguageModel, model_name

PACKAGES = ("tl_localize", "torch", "transformer-lens", "transformers", "numpy", "scipy", "pandas")

# entries of a config that change no number
ELSEWHERE = (
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
PROBE = 128  # tokens on which a model shows what it computes
# Share of the largest number by which machines may differ on them, in float32. Float64 differs by
# 5e-7 on the reference model; of one layer, exact GELU by 1.2e-4 and LeakyReLU by 0.19.
TOLERANCE = 1e-4


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
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
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
    """Hash of all weights and buffers and the plain entries of the config: 16 hexadecimal digits,
    taken anew each time.
    """
    named: Any = model
    config = {
        name: value
        for name, value in vars(model.cfg).items()
        if isinstance(value, str | int | float | bool) and not name.startswith(ELSEWHERE)
    }
    digest = hashlib.sha256(canonical(config).encode())
    hash_tensors(digest, dict(named.named_parameters()))
    hash_tensors(digest, dict(named.named_buffers()))
    return digest.hexdigest()[:16]


def behaviour(model: LanguageModel) -> dict[str, list[float]]:
    """What the model computes on fixed tokens: some logits, and some entries of the gradient of
    their loss with respect to the token embeddings. The last number is the largest of all.

    Activation functions, classes of modules and hooks are not in the weights; here they show.
    """
    one: Any = model
    device = next(iter(model.parameters())).device
    tokens = torch.arange(min(PROBE, model.cfg.n_ctx), device=device) * 7919 % model.cfg.d_vocab
    embedded: list[Tensor] = []

    def leaf(module: Any, given: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    handle = one.embed.register_forward_hook(leaf)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            logits = one(tokens[None])[0].float()
            loss = F.cross_entropy(logits[:-1], tokens[1:])
            (gradient,) = torch.autograd.grad(loss, embedded)
    finally:
        handle.remove()
    return {"logits": _probed(logits), "gradient": _probed(gradient)}


def _probed(values: Tensor) -> list[float]:
    flat = values.detach().float().flatten().cpu()
    some = flat[:: 1 + len(flat) // 16]
    return [*some.tolist(), float(flat.abs().max())]


def conflicts(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Why numbers that were made in two environments do not belong into one folder."""
    found: list[str] = []
    name = "float32_matmul_precision"  # "high" is TF32
    if now.get(name) != before.get(name):
        found.append(f"torch.{name}: {before.get(name)} in the folder, {now.get(name)} now")
    if "behaviour" in now and "behaviour" in before:
        eps = torch.finfo(getattr(torch, now["dtype"])).eps
        tolerance = max(TOLERANCE, 10 * eps)
        for what, new in now["behaviour"].items():
            old = before["behaviour"][what]
            furthest = max(abs(x - y) for x, y in zip(old, new, strict=True))
            if not furthest <= tolerance * old[-1]:
                found.append(
                    f"model: the same weights give another {what} than in the folder (off by "
                    f"{furthest:.2g} of {old[-1]:.2g}). Was a module or a hook exchanged?"
                )
    return found


def check_plain(model: LanguageModel) -> None:
    """Raise ValueError if something that the user put there changes the model's numbers.

    Records are kept under the fingerprint, so hooks, autocast and another default dtype are
    refused.
    """
    named: Any = model
    points = {id(point) for point in model.hook_dict.values()}
    for name, module in named.named_modules():
        hooks = [
            *module._forward_hooks.values(),
            *module._forward_pre_hooks.values(),
            *module._backward_hooks.values(),
            *module._backward_pre_hooks.values(),
        ]
        # a Bridge hooks what it wraps; at hook points every hook is a user's
        if id(module) not in points:
            hooks = [hook for hook in hooks if not _of_transformer_lens(hook)]
        if hooks:
            raise ValueError(
                f"model must have no hooks where results are kept, got some at {name!r}. Take "
                "them away with model.reset_hooks(), or run without a store."
            )
    device = next(iter(model.parameters())).device
    if any(torch.is_autocast_enabled(kind) for kind in {"cpu", device.type}):
        raise ValueError(
            "model must run outside torch.autocast where results are kept, got it on. Load the "
            "model in the dtype you want."
        )
    if torch.get_default_dtype() != torch.float32:
        raise ValueError(
            "default dtype must be torch.float32 where results are kept, got "
            f"{torch.get_default_dtype()}. Set it back."
        )


def _of_transformer_lens(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformer_lens")


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
