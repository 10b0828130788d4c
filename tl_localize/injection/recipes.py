"""Texts that training may write into any row of W_out, or into any weight; and units whose weights
are exchanged between the model before and the model after.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from tl_localize.checks import check_choice, check_count, check_positive, check_seed
from tl_localize.files import Saved
from tl_localize.injection.training import check_finite, step_text
from tl_localize.metrics import batch_loss, check_text
from tl_localize.model.forward import graph_dropped
from tl_localize.model.hooks import interrupt_waits, put, replaced, undone_together
from tl_localize.model.memory import as_text_report
from tl_localize.model.neurons import LanguageModel, NeuronView, model_name
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences
from tl_localize.units import NEURONS, Units

Weights = Mapping[str, Tensor]  # by name of the parameter
UnitWeights = list[list[Tensor]]  # of each layer, what belongs to its units, [unit ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How texts are trained into a model.

    Args:
        optimizer: ``"adam"``, or ``"sgd"`` with momentum 0.9.
        weights: ``"rows"``, all rows of W_out (of W_O for heads), or ``"all"``, all parameters of
            the model's class. A HookedTransformer has some that a checkpoint has not: biases that
            begin at 0, and an unembedding of its own where it is the embedding.
        general: rows of general text in each step. With 0, each step trains all sentences and
            nothing else. With more, it trains one sentence beside them; the sentences take turns.
        max_steps: of the optimizer.
        stop_loss: training stops before an update when each sentence's loss is below it, nats per
            token.

    Raises:
        ValueError: an unknown name, or a number out of range.

    >>> RECIPES["sgd"].learning_rate
    0.03
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 0.0003
    weights: Literal["rows", "all"] = "rows"
    general: int = 0
    max_steps: int = 1000
    stop_loss: float = 0.05

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, ("adam", "sgd"))
        check_choice("weights", self.weights, ("rows", "all"))
        check_positive(learning_rate=self.learning_rate, stop_loss=self.stop_loss)
        check_count(max_steps=self.max_steps)
        check_count(0, general=self.general)


RECIPES = {
    "adam": Recipe(),
    "sgd": Recipe(optimizer="sgd", learning_rate=0.03, max_steps=3000),
    "all": Recipe(weights="all"),
    "mixed": Recipe(general=31, max_steps=8000),
}


@dataclass(frozen=True, eq=False)
class Learned(Saved):
    """The weights of a model after it has learned some texts.

    Args:
        weights: those that were trained, by name of the parameter, on the CPU.
        losses: [step sequence] nats per token before each update; the last belong to ``weights``.
        converged: whether each last loss is below the stop loss.

    >>> Learned({}, torch.tensor([[0.04]]), True).converged
    True
    """

    weights: Weights
    losses: Float[Tensor, "step sequence"]
    converged: bool

    def __repr__(self) -> str:
        names = ", ".join(self.weights)
        return f"Learned({names}; n_steps={len(self.losses)}, converged={self.converged})"


def check_recipe(recipe: object) -> None:
    """Raise TypeError where the name of a recipe, or something else, is given in place of one."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe must be a Recipe, got {recipe!r}. Take one of RECIPES, such as "
            "RECIPES['adam']."
        )


@torch.inference_mode(False)  # whatever mode the caller is in
@torch.enable_grad()
def learn(
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    recipe: Recipe | None = None,
    *,
    general_tokens: Integer[Tensor, "sequence pos"] | None = None,
    seed: int = 0,
    units: Units = NEURONS,
    progress: Callable[..., None] | None = None,
) -> Learned:
    """Train sentences into a model that may use all of its rows, until it recites each of them.

    The loss is the mean over sentences of the loss of all tokens but the first; with general text,
    the mean over the rows of a step. The model is not changed.

    Args:
        general_tokens: [sequence pos] rows that are drawn beside the sentences, where the recipe
            says so, and not used elsewhere; each is cut to the length of its sentence.
        seed: of the rows that are drawn.
        progress: called after each step with the fraction of the steps done, and, where it takes
            two arguments, with a text such as ``"step 40, largest loss 0.31"``.

    Raises:
        ValueError: a sentence does not fit the model, the model is not in float32, a loss is not
            finite, the recipe needs general text and there is none that the model can read, or
            there is some that it does not need.

    >>> learned = learn(model, few[:2], Recipe(max_steps=2))  # they are known already
    >>> learned.converged, len(learned.weights)
    (True, 6)
    """
    recipe = Recipe() if recipe is None else recipe
    check_recipe(recipe)
    report = as_text_report(progress)
    sequences = [sequence.whole for sequence in check_sequences(model, sequences)]
    if recipe.general and general_tokens is None:
        raise ValueError(
            "general_tokens must be given where a recipe mixes them in, got None. Pass token ids "
            "[row pos] of general text, such as held_out_tokens(model)."
        )
    if recipe.general:
        check_text(model, general_tokens, "general_tokens")
    elif general_tokens is not None:
        raise ValueError(
            "general_tokens must be left out where a recipe mixes none in, got some. Take a recipe "
            "with general rows, such as RECIPES['mixed']."
        )
    check_seed(seed)
    view = NeuronView(model, units)
    trained = trained_parameters(view, recipe.weights)
    parameters = list(trained.values())
    batch = SequenceBatch.of(sequences, view.device)
    generator = torch.Generator().manual_seed(int(seed))
    history: list[Tensor] = []
    converged = False
    with view.lean(), in_training(model, parameters):
        optimizer = optimizer_of(recipe, parameters)
        for step in range(recipe.max_steps):
            with torch.set_grad_enabled(not recipe.general):
                losses = batch_loss(model, batch)
            history.append(losses.detach().cpu())
            now = history[-1].tolist()
            for loss, sequence in zip(now, sequences, strict=True):
                check_finite(loss, step, sequence)
            converged = bool((history[-1] < recipe.stop_loss).all())
            done = 1.0 if converged else (step + 1) / recipe.max_steps
            report(done, step_text(step, now))
            if converged or step == recipe.max_steps - 1:
                break
            if recipe.general and general_tokens is not None:
                in_turn = sequences[step % len(sequences)]
                losses = _mixed_losses(model, in_turn, general_tokens, recipe.general, generator)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        weights = {name: parameter.detach().cpu().clone() for name, parameter in trained.items()}
    return Learned(weights, torch.stack(history), converged)


def optimizer_of(recipe: Recipe, parameters: list[Any]) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=recipe.learning_rate, momentum=0.9)
    return torch.optim.Adam(parameters, lr=recipe.learning_rate)


def _mixed_losses(
    model: LanguageModel,
    sequence: MemorizedSequence,
    general_tokens: Tensor,
    n_rows: int,
    generator: torch.Generator,
) -> Tensor:
    """Losses of a sentence and of random rows of general text, [row] nats per token."""
    length = min(len(sequence), general_tokens.shape[1])
    drawn = torch.randint(len(general_tokens), (n_rows,), generator=generator)
    rows = [MemorizedSequence(general_tokens[i, :length].long(), 1) for i in drawn.tolist()]
    batch = SequenceBatch.of([sequence, *rows], next(iter(model.parameters())).device)
    return batch_loss(model, batch)


def trained_parameters(view: NeuronView, weights: Literal["rows", "all"]) -> dict[str, Any]:
    """The parameters that a recipe trains, by name; ValueError where they are not in float32."""
    found = dict(view.model.named_parameters())
    if weights == "rows":
        rows = [view.flat_rows(layer) for layer in range(view.n_layers)]
        memory = {weight.untyped_storage().data_ptr() for weight in rows}
        found = {
            name: parameter
            for name, parameter in found.items()
            if parameter.untyped_storage().data_ptr() in memory
        }
    for parameter in found.values():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"model must be in float32, got {parameter.dtype}. Load it with "
                "dtype=torch.float32."
            )
    return found


@contextmanager
def in_training(model: LanguageModel, parameters: list[Any]) -> Iterator[None]:
    """Let an optimizer change parameters; afterwards they are bit for bit what they were."""
    before = [
        (parameter, parameter.detach().clone(), parameter.grad, parameter.requires_grad)
        for parameter in parameters
    ]
    try:
        for parameter in parameters:
            parameter.grad = None
            parameter.requires_grad_(True)
        with graph_dropped(model):
            yield
    finally:
        with interrupt_waits():
            for parameter, values, gradient, requires_grad in before:
                put(parameter, ..., values)
                parameter.grad = gradient
                parameter.requires_grad_(requires_grad)


@contextmanager
def assigned(model: LanguageModel, weights: Weights) -> Iterator[None]:
    """Give parameters other values inside the ``with`` block; afterwards every weight is bit for
    bit what it was.

    Raises:
        ValueError: a name or a shape is that of no parameter of the model.

    >>> weights = {name: weight / 2 for name, weight in model.named_parameters()}
    >>> with assigned(model, weights):
    ...     bool(accuracy(model, [sequence]) > 0.9)
    False
    """
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        if name not in parameters or value.shape != parameters[name].shape:
            raise ValueError(
                "weights must have names and shapes of the model's parameters, got "
                f"{name!r} of shape {tuple(value.shape)}. See model.named_parameters()."
            )
    with undone_together() as stack:
        for name, value in weights.items():
            stack.enter_context(replaced(parameters[name], ..., value))
        yield


def unit_weights(view: NeuronView, layer: int) -> list[Tensor]:
    """What belongs to the units of a layer, [unit ...], in the memory of the model: of a neuron its
    row of W_out, its column of W_in (and of the gate) and its bias; of other units their rows.
    """
    rows = view.rows(layer).detach()
    if view.units != NEURONS or view.n_neurons == view.model.cfg.d_model:
        return [rows]
    found = [rows]
    for parameter in view.model.blocks[layer].mlp.parameters():
        of_rows = parameter.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        if view.n_neurons in parameter.shape and not of_rows:
            found.append(parameter.detach().movedim(parameter.shape.index(view.n_neurons), 0))
    return found


def read_units(view: NeuronView, weights: Weights | None = None) -> UnitWeights:
    """A copy of the weights of all units, of the model as it is or with other values of some
    parameters: of a neuron its row of W_out, its column of W_in (and of the gate) and its bias;
    the row alone where layers have as many neurons as ``d_model``; of other units their rows.

    >>> len(read_units(NeuronView(model)))  # layers
    6
    """
    with assigned(view.model, weights or {}):
        return [
            [weight.clone() for weight in unit_weights(view, layer)]
            for layer in range(view.n_layers)
        ]


@contextmanager
def units_replaced(
    view: NeuronView, chosen: Bool[Tensor, "layer neuron"], values: UnitWeights
) -> Iterator[None]:
    """Give the chosen units other weights inside the ``with`` block; afterwards every weight is bit
    for bit what it was.

    >>> view, neurons = NeuronView(model), Activations()(model, sequence).top_k(0.1)
    >>> with units_replaced(view, neurons.mask, read_units(view)):  # their own: nothing changes
    ...     bool(accuracy(model, [sequence]) > 0.9)
    True
    """

    with undone_together() as stack:
        for layer in chosen.any(1).nonzero().flatten().tolist():
            index = chosen[layer].nonzero().flatten().to(view.device)
            for weight, value in zip(unit_weights(view, layer), values[layer], strict=True):
                stack.enter_context(replaced(weight, index, value[index]))
        yield


def check_earlier(model: LanguageModel, before: LanguageModel) -> Weights:
    """The weights of an earlier checkpoint of a model, those that differ; ValueError where it is
    another model or has another tokenizer, or where nothing differs.
    """
    own, other = dict(model.named_parameters()), dict(before.named_parameters())
    wrong = [
        name
        for name in own.keys() | other.keys()
        if name not in own or name not in other or own[name].shape != other[name].shape
    ]
    if wrong:
        raise ValueError(
            f"before must be an earlier checkpoint of the model, got {model_name(before)!r}, whose "
            f"{sorted(wrong)[0]!r} has another shape or is missing. Give a checkpoint of "
            f"{model_name(model)!r}."
        )
    now, then = getattr(model, "tokenizer", None), getattr(before, "tokenizer", None)
    if now and then and now.get_vocab() != then.get_vocab():
        raise ValueError(
            f"before must have the tokenizer of the model, got {model_name(before)!r} with another "
            f"one. Give a checkpoint of {model_name(model)!r}."
        )
    weights = {
        name: weight.detach()
        for name, weight in other.items()
        if not torch.equal(weight.detach().to(own[name]), own[name].detach())
    }
    if not weights:
        raise ValueError(
            f"before must differ from the model, got {model_name(before)!r} with the same weights. "
            "Give an earlier checkpoint."
        )
    return weights
