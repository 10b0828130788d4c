"""What general text needs: neurons that a method is to spare."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from tl_localize.checks import Real, check_between, check_seed
from tl_localize.methods.base import Localizer, Values
from tl_localize.methods.partial_runs import gate_gradients
from tl_localize.metrics import mean_probability
from tl_localize.model.forward import generate
from tl_localize.model.memory import part_at, rows_that_fit, work_in_batches
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence, SequenceBatch, first_tokens

Given = TypeVar("Given")

N_TEXTS = 48
N_DRAWN = 4  # first tokens of each text, which are drawn
LENGTH = 64  # tokens of each text
POWER = 3
# model -> the last of its states, and what was measured in it: of which units, and the values
Measurements = list[tuple[tuple[Any, ...], Tensor]]
_KEPT: WeakKeyDictionary[Any, tuple[bytes, Measurements]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Contrasted(Localizer):
    """A method that can spare the neurons that general text needs: it divides its effects by

        1 + contrast G(l, i) ** 3,    with a mean of G of 1
        G(l, i) ~ root mean square over texts of d O / d gate of neuron i

    O is the mean probability of a text's tokens, as in ``IterativeAttribution``. The texts are 48
    that the model itself writes, of 64 tokens: the beginning-of-text token of models that were
    trained with one, a random token, sampled ones up to the fourth, and greedy ones. They are
    written once for a model and kept until its weights or hooks change. One that recites the scored
    text is not left out, and spares that text's own neurons a little.

    >>> Attribution(contrast=1).contrast
    1.0
    """

    contrast: Real = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        check_between(0, 100, contrast=self.contrast)

    def spared(self, neurons: NeuronView) -> Tensor:
        """What effects are multiplied by, [layer neuron]; 1 without a contrast."""
        if not self.contrast:
            return torch.tensor(1.0)
        measure = partial(general_need, batch_tokens=self.batch_tokens)
        need = measure_once(neurons, self.seed, measure).to(neurons.device)
        return 1 / (1 + self.contrast * need**POWER)


def measure_once(
    neurons: NeuronView, given: Given, measure: Callable[[NeuronView, Given], Tensor]
) -> Tensor:
    """What ``measure`` gives of a seed or of texts, kept with the model until it computes something
    else. A partial function may add settings that change no number.
    """
    state = _computation_key(neurons)
    if _KEPT.get(neurons.model, (b"", []))[0] != state:
        _KEPT[neurons.model] = state, []
    measurements = _KEPT[neurons.model][1]
    # units are compared, as one repr may stand for two kinds, and one of them may have no hash
    wanted = (getattr(measure, "func", measure).__name__, neurons.units, given)
    for about, values in measurements:
        if about == wanted:
            return values
    values = measure(neurons, given)
    measurements.append((wanted, values))
    return values


@torch.no_grad()
def _computation_key(neurons: NeuronView) -> bytes:
    """A key that changes when a row of a weight does, when a hook comes or goes, when the logits of
    some fixed tokens change by a bit, as they do where a hook does something else, and when texts
    begin with another token.
    """
    model = neurons.model
    tokens = torch.arange(min(LENGTH, model.cfg.n_ctx, model.cfg.d_vocab), device=neurons.device)
    logits = model(tokens[None]).float().cpu().numpy()
    # of each row, as few tokens meet every neuron
    sums = [weight.sum(-1, dtype=torch.float32).flatten() for weight in neurons.parameters]
    weights = torch.cat([row_sums.to(neurons.device) for row_sums in sums]).cpu().numpy()
    # torch numbers hooks, and no number comes twice
    hooks = [
        number
        for module in model.modules()
        for number in (*module._forward_pre_hooks, *module._forward_hooks)
    ]
    begin = first_tokens(getattr(model, "tokenizer", None))
    computed = weights.tobytes() + logits.tobytes()
    return hashlib.sha256(repr((begin, hooks)).encode() + computed).digest()


def general_need(neurons: NeuronView, seed: int, batch_tokens: int | None = None) -> Values:
    """How much general text needs each neuron; the mean is 1."""
    texts = written_texts(neurons, seed)
    total = torch.zeros(neurons.size, device=neurons.device)

    def squares(chosen: list[int]) -> Tensor:
        some = [MemorizedSequence(texts[i], min(N_DRAWN, len(texts[i]) - 1)) for i in chosen]
        batch = SequenceBatch.of(some, neurons.device)
        (gradients,) = gate_gradients(neurons, batch, mean_probability)
        # a text that the model cannot read tells nothing
        return gradients.square().nan_to_num(0, 0).sum(0)

    size = rows_that_fit(neurons, texts.shape[1], batch_tokens=batch_tokens)
    for _, part in work_in_batches(squares, range(N_TEXTS), size):
        total += part
    need = total.sqrt()
    return need / need.mean()


def written_texts(neurons: NeuronView, seed: int) -> Int[Tensor, "text pos"]:
    """Texts that the model has written, once until it computes something else."""
    return measure_once(neurons, seed, write_texts)


def write_texts(neurons: NeuronView, seed: int) -> Int[Tensor, "text pos"]:
    """Texts that the model writes: a random token, sampled ones, and greedy ones, after the
    beginning-of-text token of models that were trained with one. All are written side by side where
    memory allows: in batches of another size two tokens that are nearly as likely may change
    places, and the rest of a text with them.
    """
    model: Any = neurons.model
    length = min(LENGTH, model.cfg.n_ctx)
    generator = torch.Generator().manual_seed(int(seed))
    random = torch.randint(model.cfg.d_vocab, (N_TEXTS, 1), generator=generator)
    begin = torch.tensor(first_tokens(getattr(model, "tokenizer", None)), dtype=torch.long)
    first = torch.cat([begin.expand(N_TEXTS, -1), random], 1).to(neurons.device)
    n_drawn = min(N_DRAWN, length)
    n_sampled = max(0, n_drawn - first.shape[1])
    uniform = torch.rand(N_TEXTS, n_sampled, generator=generator).to(neurons.device)

    def write(rows: list[int]) -> Tensor:
        some = part_at(first, rows)
        drawn = torch.cat([some, generate(model, some, n_sampled, part_at(uniform, rows))], 1)
        greedy = generate(model, drawn, length - drawn.shape[1])
        return torch.cat([drawn, greedy], 1).cpu()

    return torch.cat([texts for _, texts in work_in_batches(write, range(N_TEXTS), N_TEXTS)])
