"""Slimming: a sparse mask learned by an L1 penalty."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.checks import Real
from tl_localize.methods.base import Values
from tl_localize.methods.masks import Draw, MaskLearner, Parameters
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import SequenceBatch


@dataclass(frozen=True, kw_only=True)
class Slimming(MaskLearner):
    """Mask value that a neuron keeps when the mask is trained to be sparse while the model still
    recites the sequence.

        minimize over m   loss(x | h * clip(m, 0, 1)) + sparsity_weight * mean |m|,  from m = 1
        A(l, i) = clip(m_i, 0, 1)

    Source: Chang et al. (2024), arXiv:2311.09060, eq. (9). Differs: the paper sums |m|, this is the
    mean over the tuned neurons, so that one weight serves every model size (the authors' code does
    the same). sparsity_weight = lambda, m = m in the paper.

    Args:
        sparsity_weight: weight of the mean.
        steps: at most; training stops earlier at a 10th step at which mean |m| is below
            ``stop_sparsity``.
        first_layer: layers below it are not masked and score 1.

    Returns:
        [layer neuron] in [0, 1], many of them tied at 0 and at 1.

    >>> len(Slimming(steps=5)(model, sequence).top_k(0.01))  # 5 steps are too few for a result
    90
    """

    name = "slimming"
    title = "Slimming"
    learning_rate: Real = 1e-2
    sparsity_weight: Real = 1000.0
    steps: int = 60
    stop_sparsity: Real = 0.1

    def start(self, neurons: NeuronView, batch: SequenceBatch) -> Float[Tensor, " batch"]:
        return torch.ones(len(batch), device=neurons.device)

    def gates(self, parameters: Parameters, noise: Draw) -> Parameters:
        return parameters.clamp(0, 1)

    def sparsity(self, parameters: Parameters) -> Float[Tensor, " batch"]:
        return parameters.abs().mean((1, 2))

    def scores(self, parameters: Values) -> Values:
        return parameters.clamp(0, 1).cpu()
