"""What the cost tables are measured with: random models of known shapes, clocks, bare passes."""

from __future__ import annotations

import platform
import time
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

N_TOKENS, N_PREFIX = 80, 32  # the paper's
SHORT = 33  # tokens of a text in the table of sizes
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"n_layers": 3, "d_model": 64, "n_heads": 4, "d_mlp": 256, "d_vocab": 512},
    "reference": {"n_layers": 6, "d_model": 192, "n_heads": 6, "d_mlp": 1536, "d_vocab": 4096},
    "gpt2": {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_mlp": 3072, "d_vocab": 50257},
    "pythia-410m": {
        "n_layers": 24,
        "d_model": 1024,
        "n_heads": 16,
        "d_mlp": 4096,
        "d_vocab": 50304,
    },
    "gpt2-xl": {"n_layers": 48, "d_model": 1600, "n_heads": 25, "d_mlp": 6400, "d_vocab": 50257},
    "pythia-2.8b": {
        "n_layers": 32,
        "d_model": 2560,
        "n_heads": 32,
        "d_mlp": 10240,
        "d_vocab": 50304,
    },
    "pythia-6.9b": {
        "n_layers": 32,
        "d_model": 4096,
        "n_heads": 32,
        "d_mlp": 16384,
        "d_vocab": 50432,
    },
}
SMALL = ("small", "reference", "gpt2", "pythia-410m")  # shapes that a CPU can do
NEOX: dict[str, Any] = {
    "act_fn": "gelu",
    "parallel_attn_mlp": True,
    "positional_embedding_type": "rotary",
    "rotary_adjacent_pairs": False,
}


def random_model(shape: str, device: torch.device, dtype: torch.dtype, **settings: Any) -> Any:
    """A model of a known shape with random weights, made where it is to run."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    from tl_localize.model.forward import lay_out

    sizes = SHAPES[shape] | settings
    d_head = sizes["d_model"] // sizes["n_heads"]
    family = (
        NEOX | {"rotary_dim": d_head // 4} if shape.startswith("pythia") else {"act_fn": "gelu_new"}
    )
    config = {
        "n_ctx": 512,
        "d_head": d_head,
        "normalization_type": "LN",
        "default_prepend_bos": False,
        "init_weights": False,
    }
    with torch.device(device):
        model = HookedTransformer(
            HookedTransformerConfig(**(config | family | sizes), device=str(device), dtype=dtype),
            move_to_device=False,
        )
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith((".w", ".b")) or ".b_" in name:
                    parameter.fill_(1.0 if name.endswith(".w") else 0.0)
                else:
                    parameter.normal_(0.0, 0.02, generator=generator)
    return lay_out(model.eval())  # as load_model does


def random_sequences(model: Any, n: int, n_tokens: int = N_TOKENS) -> list[Any]:
    from tl_localize import MemorizedSequence

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.cfg.d_vocab, (n, n_tokens), generator=generator)
    return [
        MemorizedSequence(row, min(N_PREFIX, n_tokens // 2), f"r{i}")
        for i, row in enumerate(tokens)
    ]


# ---- clocks


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside the ``with`` block that are alive, and the most there were
    at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen | before:
                    self.seen.add(storage._cdata)
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, key: int, n_bytes: int) -> None:
        self.seen.discard(key)
        self.alive -= n_bytes


def seconds(work: Any, device: torch.device) -> float:
    """Wall time on CUDA, CPU time of this process elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_bytes(work: Any, device: torch.device) -> int:
    """Most memory that tensors took beyond what was there before."""
    return seconds_and_bytes(work, device)[1]


def seconds_and_bytes(work: Any, device: torch.device, repeats: int = 1) -> tuple[float, int]:
    """The least time of some runs, and the most memory of one. CUDA counts memory at no price;
    elsewhere it takes another run.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        taken = min(seconds(work, device) for _ in range(repeats))
        return taken, torch.cuda.max_memory_allocated() - before
    taken = min(seconds(work, device) for _ in range(repeats))
    with LiveBytes() as live:
        work()
    return taken, live.peak


# ---- bare passes


def post(layer: int) -> str:
    return f"blocks.{layer}.mlp.hook_post"


def suffix_of(
    sequence: Any, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the positions that predict a suffix token, and those tokens."""
    tokens = sequence.tokens.to(device)
    positions = torch.arange(sequence.n_prefix - 1, len(tokens) - 1, device=device)
    return tokens, positions, tokens[positions + 1]


def forward(model: Any, sequence: Any) -> None:
    with torch.no_grad():
        model(sequence.tokens.to(model.cfg.device)[None])


def forward_and_backward(model: Any, sequence: Any) -> None:
    """The loss, and its gradient back to the neurons of the first layer."""
    mask_loop_once = torch.ones(
        model.cfg.d_mlp, device=model.cfg.device, dtype=model.cfg.dtype, requires_grad=True
    )
    tokens, positions, targets = suffix_of(sequence, model.cfg.device)
    logits = model.run_with_hooks(
        tokens[None], fwd_hooks=[(post(0), lambda act, hook: act * mask_loop_once)]
    )
    (-logits.float().log_softmax(-1)[0, positions, targets].mean()).backward()


def even(n: int, k: int) -> list[int]:
    """k of n numbers, evenly spread."""
    return sorted({i * n // k for i in range(min(n, k))})


def middles(n: int, k: int) -> list[int]:
    """The middles of k equal parts of n numbers: what grows evenly over them has its mean there."""
    return sorted({(2 * i + 1) * n // (2 * k) for i in range(min(n, k))})


def setting(model: Any, n_tokens: int = N_TOKENS, n_prefix: int = N_PREFIX) -> str:
    device = torch.device(model.cfg.device)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    dtype = str(model.cfg.dtype).removeprefix("torch.")
    return f"{name}, {dtype}, torch {torch.__version__}, {n_tokens} tokens, prefix {n_prefix}"
