"""A method and a decoder as a user may have them."""

from dataclasses import dataclass

import torch

from tl_localize import NeuronScores


def letters(ids):
    return "".join(chr(65 + i) + (chr(97 + i % 7) if i % 3 else "") for i in ids)


@dataclass(frozen=True)
class Noise:
    """Scores that depend on the sequence; a method of the user's own, without ``map``."""

    name: str = "noise"
    seed: int = 0

    def __call__(self, model, sequence):
        generator = torch.Generator().manual_seed(self.seed + int(sequence.tokens.sum()))
        return NeuronScores(
            torch.rand(model.cfg.n_layers, model.cfg.d_mlp, generator=generator),
            self.name,
            sequence.id,
        )
