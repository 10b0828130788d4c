"""What INJ and DEL as the paper ran them take on a GPU: passes, tokens, memory, hours."""

from typing import Any

import pandas as pd

from tl_localize.checks import Real, check_choice, check_positive
from tl_localize.evals.settings import paper_model, paper_settings
from tl_localize.methods import IntegratedGradients
from tl_localize.model.memory import Shape

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHAPES = {  # layers, width, heads and vocabulary
    "gpt2": (12, 768, 12, 50257),
    "gpt2-xl": (48, 1600, 25, 50257),
    "pythia-2.8b": (32, 2560, 32, 50304),
    "pythia-6.9b": (32, 4096, 32, 50432),
}
# texts and their tokens; of ECBD-2021 the tokens are about the mean, of both injection ratios
TEXTS = {"inj": (2 * 156, 40), "del": (500, 80)}
GPT2_XL_TEXTS = 100  # of DEL, without the dev ones
INJECT_STEPS = 100  # about as many as an injection takes
GENERAL_TOKENS = 2048 * 128  # of the perplexity, for each ablation
N_ABLATIONS = 6 * 2  # of each text: methods with the random one, and ratios


def plan(model: str, gpu: Real = 80, dtype: str = "bfloat16", tflops: Real = 100) -> pd.DataFrame:
    """What each method of the paper takes in INJ and DEL: texts (of Zero-Out: neurons) in a batch,
    0 where not one fits; tokens in forward passes of the whole model, of which a backward pass is
    one and a run from a layer in the middle on is half; memory and hours.

    Args:
        model: one of the paper's, such as ``"pythia-6.9b"``.
        gpu: memory of the GPU, GB.
        tflops: what the GPU reaches in such passes, 1e12 operations a second; it is not measured.

    Raises:
        ValueError: another model, or a number that is not positive.

    >>> int(plan("pythia-6.9b", gpu=24)["texts in a batch"]["inj"]["slimming"])
    25
    """
    name = paper_model(model).removesuffix("-deduped")
    check_choice("model", name, SHAPES)
    check_positive(gpu=gpu, tflops=tflops)
    check_choice("dtype", dtype, ITEMSIZES)
    n_layers, d_model, n_heads, d_vocab = SHAPES[name]
    shape = Shape(
        n_layers=n_layers,
        d_model=d_model,
        d_mlp=4 * d_model,
        n_heads=n_heads,
        d_vocab=d_vocab,
        itemsize=ITEMSIZES[dtype],
        act_fn="gelu_new" if name.startswith("gpt2") else "gelu",
    )
    weights = shape.weights_bytes()
    rows: list[dict[str, Any]] = []
    for benchmark, (n_texts, length) in TEXTS.items():
        n_texts = GPT2_XL_TEXTS if (benchmark, name) == ("del", "gpt2-xl") else n_texts
        ablations = N_ABLATIONS * (n_texts + GENERAL_TOKENS // length)
        last = {"inject": 2 * INJECT_STEPS} if benchmark == "inj" else {"ablations": ablations}
        for method, passes in (_passes(name, shape, benchmark) | last).items():
            gradient = method not in ("zero_out", "ablations")
            of_token = shape.token_bytes(length, gradient)
            batch = shape.tokens_in(gpu * 1e9 - weights, length, gradient) // length
            tokens = n_texts * length * passes
            rows.append(
                {
                    "benchmark": benchmark,
                    "method": method,
                    "texts in a batch": batch,
                    "passes of a text": passes,
                    "tokens (1e6)": round(tokens / 1e6, 1),
                    "GB": round((weights + batch * length * of_token) / 1e9, 1),
                    "hours": round(tokens * weights / shape.itemsize * 2 / tflops / 3.6e15, 2),
                }
            )
    return pd.DataFrame(rows).set_index(["benchmark", "method"])


def _passes(name: str, shape: Shape, benchmark: Any) -> dict[str, int]:
    """Forward passes of a text, by method."""
    settings = paper_settings(name, benchmark) or paper_settings(f"{name}-deduped", benchmark)
    return {
        "activations": 1,
        "integrated_gradients": IntegratedGradients().steps * shape.n_layers,
        "zero_out": shape.n_layers * shape.d_mlp // 2,
        **{method: 2 * chosen["steps"] for method, chosen in settings.items()},
    }
