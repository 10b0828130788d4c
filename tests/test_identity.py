"""A dataclass is its class and its fields."""

import json
from dataclasses import dataclass, field

import pytest
import torch


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    steps: tuple[int, ...] = (1, 2)
    speed: int = field(default=3, compare=False)


def test_identity_names_class_and_compared_fields():
    from tl_localize.files import identity, identity_text

    expected = {"class": "Outer", "inner": {"class": "Inner", "rate": 0.1}, "steps": [1, 2]}
    assert identity(Outer(speed=7)) == expected
    assert json.loads(identity_text(Outer())) == expected


def test_identity_of_tensors_follows_their_numbers():
    from tl_localize.files import identity

    one, same, other = torch.arange(3), torch.arange(3), torch.tensor([0, 1, 3])
    assert identity(one) == identity(same) != identity(other)


@pytest.mark.parametrize("value", [object(), {"f": len}])
def test_identity_refuses_what_it_cannot_tell_apart(value):
    from tl_localize.files import identity

    with pytest.raises(ValueError, match="settings must be"):
        identity(value)
