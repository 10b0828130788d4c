"""What a number was made with: which weights, versions, device and threads."""

import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tl_localize.files import digest
from tl_localize.model.neurons import LanguageModel, model_name

Json = dict[str, Any]
PACKAGES = "tl_localize torch transformer-lens transformers numpy scipy pandas"
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
# Share of the largest logit by which machines may differ on them, in float32. Float64 differs by
# 5e-7 on the reference model; of one layer, exact GELU by 1.2e-4 and LeakyReLU by 0.19.
TOLERANCE = 1e-4


def environment(model: LanguageModel) -> Json:
    """Versions, machine, device and threads."""
    device = next(iter(model.parameters())).device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **_installed(),
    }


@cache
def _installed() -> Json:
    """Versions of the packages that numbers depend on."""
    found: Json = {}
    for package in PACKAGES.split():
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def about_model(model: LanguageModel) -> Json:
    """What all runs of a folder must agree on about the model: its name, weights, dtype, precision
    of products ("high" is TF32), and what it computes on fixed tokens.
    """
    return {
        "model": model_name(model),
        "fingerprint": fingerprint(model),
        "dtype": str(next(iter(model.parameters())).dtype).removeprefix("torch."),
        "float32_matmul_precision": matmul_precision(),
        "probe": probe(model),
    }


def matmul_precision() -> str:
    """What ``torch.get_float32_matmul_precision`` gives, also where TF32 was set by the newer way,
    after which torch refuses to tell.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul: Any = torch.backends.cuda.matmul
        return "high" if matmul.fp32_precision == "tf32" else "highest"


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
    parameters, buffers = dict(named.named_parameters()), dict(named.named_buffers())
    return digest(config, parameters, buffers)[:16]


@torch.no_grad()
def probe(model: LanguageModel) -> list[float]:
    """Some logits of the model on fixed tokens, and last by how much they may differ elsewhere.

    Activation functions, classes of modules and hooks are not in the weights; here they show.
    """
    device = next(iter(model.parameters())).device
    n_tokens = min(PROBE, model.cfg.n_ctx)
    tokens = torch.arange(n_tokens, device=device) * 7919 % model.cfg.d_vocab
    logits = model(tokens[None])[0].float().flatten().cpu()
    tolerance = max(TOLERANCE, 10 * torch.finfo(next(iter(model.parameters())).dtype).eps)
    some = logits[:: 1 + len(logits) // 16].tolist()
    return [*some, tolerance * float(logits.abs().max())]
