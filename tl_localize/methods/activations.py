"""Activations: how strongly a neuron fires, times its row norm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from einops import einsum
from torch import Tensor

from tl_localize.checks import check_choice
from tl_localize.methods.base import BatchValues, Localizer
from tl_localize.methods.partial_runs import activations
from tl_localize.model.memory import FractionReport
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class Activations(Localizer):
    """Mean activation over the suffix times the row norm (the norm of the neuron's row of W_out).

        A(l, i) = 1/T sum over t of |h_{i,t}| ||v_i||      absolute="token", the paper's equation
        A(l, i) = |1/T sum over t of h_{i,t}| ||v_i||      absolute="mean", the authors' code

    h_{i,t} is the activation at the position that predicts suffix token t, v_i the row of W_out. A
    head's activation is a vector and its rows of W_O are a matrix: its score is the norm of what it
    writes, ||h_{i,t} v_i||, or ||1/T sum over t of h_{i,t} v_i||.

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (8).

    Args:
        absolute: whether the absolute value is taken of each token or of the mean.

    Returns:
        [layer neuron] in units of the residual stream.

    Raises:
        ValueError: absolute is neither ``"token"`` nor ``"mean"``.

    >>> Activations()(model, sequence).values.shape
    torch.Size([6, 1536])
    """

    name = "activations"
    title = "Activations"
    absolute: Literal["token", "mean"] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("absolute", self.absolute, ("token", "mean"))

    @torch.no_grad()
    def attribute_batch(
        self, neurons: NeuronView, sequences: Sequence[MemorizedSequence], report: FractionReport
    ) -> BatchValues:
        batch = SequenceBatch.of(sequences, neurons.device)
        weights = batch.weights
        strengths: list[Tensor] = []
        for layer, act in activations(neurons, batch.tokens).items():
            if self.absolute == "token":
                each = neurons.strengths(layer, act.float())
                strength = einsum(each, weights, "b pos neuron, b pos -> b neuron")
            else:
                mean = einsum(act.float(), weights, "b pos neuron ..., b pos -> b neuron ...")
                strength = neurons.strengths(layer, mean)
            strengths.append(strength)
        return (torch.stack(strengths, dim=1) * neurons.row_norms()).cpu()
