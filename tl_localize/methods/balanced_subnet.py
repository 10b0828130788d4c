"""BalancedSubnet: which neurons must be closed for the text to be lost and general text kept?"""

import math
from dataclasses import dataclass

import torch
from torch import Generator

from tl_localize.checks import Real, check_between, check_ratio
from tl_localize.methods.base import Values
from tl_localize.methods.masks import Parameters
from tl_localize.methods.unlearned_masks import UnlearnedMask
from tl_localize.model.neurons import NeuronView


@dataclass(frozen=True, kw_only=True)
class BalancedSubnet(UnlearnedMask):
    """Closeness to zero of a neuron's parameter, when a mask that closes a fixed share of each
    layer is trained to lose the text and keep general text.

        mask = 0 for the ``share`` of each layer whose |s| is smallest, 1 for the others
        minimize over s   n (mean over general texts y of loss(y | h * mask) - loss(x | h * mask))
        A(l, i) = -|s_i|

    The gradient of the mask is taken as that of |s| (straight-through), by stochastic gradient
    descent. The set that is trained is the best ``share`` of each layer: the order within it says
    little, since the parameters of what must stay closed swing around 0. So train it for the ratio
    that you look at.

    n is ``texts_per_step``, also where fewer texts are given. Each step: one forward and one
    backward pass of the text and of n general texts, or of all where fewer are given.

    Source: Sakarvadia et al. (2025), arXiv:2410.02159, and its code
    (github.com/msakarvadia/memorization). Differs: masks of neurons, where theirs are of single
    weights of the MLPs; one text is to be lost, and weighs as much as the general texts of a step;
    the model is in eval mode; parameters start uniform in +-1 / sqrt(neurons of a layer).

    Args:
        share: of the neurons of each layer that the mask closes; the authors try 0.001 % to 90 % of
            the weights. Search it on dev texts, or use the ratio of the benchmark.
        learning_rate: of SGD; the authors'.
        momentum: of SGD; the authors'.
        weight_decay: of SGD; the authors'.
        steps: the authors try 1 to 3000 epochs. Search it on dev texts.
        texts_per_step: general texts in each step, at most; n above.
        texts: token ids of general text; by default 48 texts that the model writes.
        seed: of the parameters at the start, of the order of general texts, and of those that the
            model writes.
        first_layer: layers below it have no mask and keep their start.

    Returns:
        [layer neuron], at most 0.

    >>> len(BalancedSubnet(steps=2)(model, sequence).top_k(0.1))  # 2 steps are too few for a result
    924
    """

    name = "balanced_subnet"
    title = "BalancedSubnet (not the paper's)"
    learning_rate: Real = 0.1
    steps: int = 100
    share: Real = 0.1
    momentum: Real = 0.9
    weight_decay: Real = 5e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio("share", self.share)
        check_between(0, 1, momentum=self.momentum, weight_decay=self.weight_decay)

    def weights(self) -> tuple[Real, Real]:
        return self.texts_per_step, self.texts_per_step

    def start(self, neurons: NeuronView, generator: Generator) -> Values:
        uniform = torch.rand(neurons.size, generator=generator)
        return (2 * uniform - 1) / math.sqrt(neurons.n_neurons)

    def gates(self, parameters: Parameters, generator: Generator) -> Parameters:
        sizes = parameters.abs()
        n_closed = max(1, round(self.share * sizes.shape[-1]))
        closed = sizes.detach().topk(n_closed, largest=False).indices
        mask = torch.ones_like(sizes).scatter(-1, closed, 0)
        return mask + (sizes - sizes.detach())

    def optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [parameters],
            lr=float(self.learning_rate),
            momentum=float(self.momentum),
            weight_decay=float(self.weight_decay),
        )

    def scores(self, parameters: Values) -> Values:
        return -parameters.abs()
