"""What is in results folders, and what can happen to their files."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch

from tl_localize import NeuronScores


def files_of(folder, kind="*"):
    """The files of all steps of a kind."""
    return sorted((folder / "steps").glob(f"{kind}/*"))


def leftovers(folder):
    """Files in a folder that an undisturbed run does not leave."""
    return [path for name in ("tmp", "damaged", "failures") for path in (folder / name).iterdir()]


def spoil(path, how):
    """Damage a file."""
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 4
    spoilt = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "flipped": data,
        "foreign": b'{"a": 1}\n',
        "nested": b'{"format": ' + b"[" * 100_000,
    }
    path.write_bytes(spoilt[how])


@dataclass(frozen=True)
class Counted:
    """A user's own method that counts its calls and cannot do some sentences."""

    name: str = "counted"
    version: ClassVar[int] = 1
    calls: ClassVar[Counter[str]] = Counter()
    fails_on: ClassVar[set[str]] = set()

    def __call__(self, model, sequence):
        self.calls[sequence.id] += 1
        if sequence.id in self.fails_on:
            raise torch.OutOfMemoryError("CUDA out of memory")
        generator = torch.Generator().manual_seed(int(sequence.tokens.sum()))
        shape = model.cfg.n_layers, model.cfg.d_mlp
        return NeuronScores(torch.rand(shape, generator=generator), self.name, sequence.id)
