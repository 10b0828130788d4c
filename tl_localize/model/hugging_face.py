"""Where the units of this package are in a model of transformers, and hooks that ablate them there.

Neurons are the input of the module that writes the output of an MLP, and the values of heads are
the input of the one that writes the output of attention. What those modules are called differs
between architectures; their names here are those of the tested ones.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from tl_localize.model.hooks import registered
from tl_localize.units import UNITS, Units

# names within a block of the modules whose input holds the units
MODULES = {
    "neurons": (
        "mlp.c_proj",
        "mlp.dense_4h_to_h",
        "mlp.down_proj",
        "mlp.fc2",
        "mlp.fc_out",
        "ffn.down_proj",
        "feed_forward.w2",
        "fc2",
    ),
    "heads": (
        "attn.c_proj",
        "attention.dense",
        "self_attn.o_proj",
        "self_attention.dense",
        "self_attn.dense",
        "self_attn.out_proj",
        "attn.attention.out_proj",
        "attn.out_proj",
    ),
}
NORMED = ("bitnet",)  # architectures that norm the units before that module


def unit_modules(hf_model: nn.Module, units: Units, n_layers: int) -> dict[str, nn.Module]:
    """The modules whose input holds the units of each layer, by their names, the lowest layer
    first.

    Raises:
        TypeError: It is no module of torch.
        ValueError: It has no such modules, or not one for each layer.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> hf_model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=12))
    >>> list(unit_modules(hf_model, MLPNeurons(), n_layers=2))
    ['transformer.h.0.mlp.c_proj', 'transformer.h.1.mlp.c_proj']
    """
    if not isinstance(hf_model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"hf_model must be a model of transformers, got {type(hf_model).__name__}. Load it "
            "with AutoModelForCausalLM.from_pretrained."
        )
    kind = str(getattr(getattr(hf_model, "config", None), "model_type", ""))
    names = MODULES[units.name] if units in UNITS.values() else ()  # an own kind may be named alike
    endings = "|".join(map(re.escape, names))
    pattern = re.compile(rf"(?:^|.*\.)(\d+)\.(?:{endings})")
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in hf_model.named_modules():
        match = pattern.fullmatch(name)
        if match and endings and kind not in NORMED:
            found[int(match[1])] = name, module
    if sorted(found) != list(range(n_layers)):
        raise ValueError(
            f"hf_model must have a known module for the {units.name} of each of {n_layers} layers, "
            f"got those of layers {sorted(found)} in {type(hf_model).__name__}. Use the model that "
            "was localized in, of a tested architecture, or dropout_hooks() in TransformerLens."
        )
    return dict(found[layer] for layer in range(n_layers))


@contextmanager
def ablated_units(
    hf_model: nn.Module, units: Units, mask: Bool[Tensor, "layer neuron"]
) -> Iterator[None]:
    """Inside the block the units of a mask are zero at every position in a model of transformers.

    Raises:
        ValueError: The mask is of another model.
    """
    modules = list(unit_modules(hf_model, units, len(mask)).items())
    n_units = mask.shape[1]
    n_heads = getattr(getattr(hf_model, "config", None), "num_attention_heads", n_units)
    for name, module in modules:
        width = input_width(module)
        if units.additive:
            fits = width == n_units
        else:  # the config says how many heads there are: another number may divide the width
            fits = width % n_units == 0 and n_units == n_heads
        if not fits:
            raise ValueError(
                f"hf_model must have {n_units} {units.name} in each layer, as the set, got an "
                f"input of {width} numbers at {name}. Use the model that was localized in."
            )
    hooks = [
        (modules[layer][1], partial(zero_input, mask=mask[layer]))
        for layer in mask.any(1).nonzero().flatten().tolist()
    ]
    with registered(hooks, "register_forward_pre_hook"):
        yield


def input_width(module: nn.Module) -> int:
    """How many numbers a linear layer takes, be it torch's or GPT-2's ``Conv1D``."""
    own: Any = module
    return int(getattr(own, "in_features", 0) or own.nx)


def zero_input(
    module: object,
    given: tuple[Float[Tensor, "*some width"], ...],
    *,
    mask: Bool[Tensor, " neuron"],
) -> tuple[Float[Tensor, "*some width"], ...]:
    """A forward pre-hook of torch that sets units of the input to zero: single numbers, or as many
    neighbours as a head has.
    """
    act, *rest = given
    places = mask.to(act.device).repeat_interleave(act.shape[-1] // len(mask))
    return act.masked_fill(places, 0.0), *rest
