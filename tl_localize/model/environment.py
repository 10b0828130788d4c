"""What a number was made with: which weights, versions, device and threads."""

import hashlib
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tl_localize.execution.tasks import Json, canonical, hash_tensors
from tl_localize.model.neurons import LanguageModel, model_name

PACKAGES = "tl_localize torch transformer-lens transformers numpy scipy pandas"

# entries of a config that change no number
ELSEWHERE = (
    "device n_devices seed model_name original_architecture from_checkpoint checkpoint init "
    "tokenizer"
)
PROBE = 128  # tokens on which a model shows what it computes
# Share of the largest number by which machines may differ on them, in float32. Float64 differs by
# 5e-7 on the reference model; of one layer, exact GELU by 1.2e-4 and LeakyReLU by 0.19.
TOLERANCE = 1e-4


def environment(model: LanguageModel, made_of: str = "") -> Json:
    """Versions, device, dtype, threads, and which weights: their fingerprint, which is taken unless
    it is given.
    """
    parameter = next(iter(model.parameters()))
    device = parameter.device
    found: Json = {
        "model": model_name(model),
        "fingerprint": made_of or fingerprint(model),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "python": platform.python_version(),
    }
    for package in PACKAGES.split():
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def about_model(model: LanguageModel) -> dict[str, str]:
    """What the plans of a folder must agree on about the model."""
    return {
        "model": model_name(model),
        "fingerprint": fingerprint(model),
        "dtype": str(next(iter(model.parameters())).dtype),
    }


def fingerprint(model: LanguageModel) -> str:
    """Hash of all weights and buffers and the plain entries of the config: 16 hexadecimal digits,
    taken anew each time.
    """
    named: Any = model
    elsewhere = tuple(ELSEWHERE.split())
    config = {
        name: value
        for name, value in vars(model.cfg).items()
        if isinstance(value, str | int | float | bool) and not name.startswith(elsewhere)
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
    embedded: list[Tensor] = []

    def leaf(module: Any, given: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    handle = one.embed.register_forward_hook(leaf)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            n_tokens, d_vocab = min(PROBE, model.cfg.n_ctx), model.cfg.d_vocab
            tokens = torch.arange(n_tokens, device=device) * 7919 % d_vocab
            logits = one(tokens[None])[0].float()
            loss = F.cross_entropy(logits[:-1], tokens[1:])
            (gradient,) = torch.autograd.grad(loss, embedded)
    finally:
        handle.remove()
    found: dict[str, list[float]] = {}
    for name, values in (("logits", logits), ("gradient", gradient)):
        flat = values.detach().float().flatten().cpu()
        found[name] = [*flat[:: 1 + len(flat) // 16].tolist(), float(flat.abs().max())]
    return found


def conflicts(now: Json, before: Json) -> list[str]:
    """Why numbers that were made in two environments do not belong into one folder."""
    found = [
        f"{name}: {before.get(name)} in the folder, {now.get(name)} now"
        for name in ("fingerprint", "float32_matmul_precision")  # "high" is TF32
        if now.get(name) != before.get(name)
    ]
    if "behaviour" in now and "behaviour" in before:
        tolerance = max(TOLERANCE, 10 * torch.finfo(getattr(torch, now["dtype"])).eps)
        for name, values in now["behaviour"].items():
            old = torch.tensor(before["behaviour"][name])
            if not torch.allclose(
                torch.tensor(values), old, rtol=0, atol=tolerance * float(old[-1])
            ):
                found.append(
                    f"model: the same weights give another {name} than in the folder. Was a module "
                    "or a hook exchanged?"
                )
    return found
