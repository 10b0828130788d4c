"""What a frozen dataclass is, as JSON: its class and its fields. Results are kept under it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def identity(value: Any) -> Any:
    """A setting, a method, units or an ablation, as JSON takes it.

    A dataclass is its class name and those of its fields that it compares; a tensor is its shape
    and a hash of its numbers. A repr is for people, and nothing reads it.

    Raises:
        ValueError: a part of it is neither a dataclass nor a plain value, so two different ones
            could not be told apart.

    >>> identity(IntegratedGradients(steps=5, units=AttentionHeads()))["steps"]
    5
    """
    if is_dataclass(value) and not isinstance(value, type):
        own = {one.name: identity(getattr(value, one.name)) for one in fields(value) if one.compare}
        return {"class": type(value).__name__, **own}
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous().numpy().tobytes()
        return {"shape": list(value.shape), "sha256": hashlib.sha256(numbers).hexdigest()[:32]}
    if isinstance(value, Mapping):
        return {str(name): identity(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [identity(part) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(
        f"settings must be plain values or dataclasses, got {value!r}. Write a frozen dataclass "
        "with its settings as fields."
    )


def identity_text(value: Any) -> str:
    """``identity`` as one line of JSON, the same for the same content."""
    return json.dumps(identity(value), sort_keys=True)
