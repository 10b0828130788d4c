"""Changed rows of W_out, with those that they replace."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_localize.files import Saved
from tl_localize.injection import rows_replaced
from tl_localize.model.neurons import LanguageModel, NeuronView, model_name
from tl_localize.scores import NeuronSet

ROUNDING = 0.003  # of bfloat16, relative to the length of the rows


@dataclass(frozen=True, eq=False)
class RowEdit(Saved):
    """Rows of W_out that a model has in place of its own.

    Args:
        neurons: whose rows were changed.
        rows: [n d_model] the new rows, in the order of ``neurons.mask.nonzero()``, float32 on the
            CPU; for heads, all their rows.
        old_rows: [n d_model] the rows that the model had before.

    >>> neurons = NeuronSet(torch.arange(6 * 1536).reshape(6, 1536) < 1)
    >>> edit = RowEdit(neurons, torch.zeros(1, 192), model.blocks[0].mlp.W_out[:1].clone())
    >>> with edit.applied(model), edit.undone(model):  # the model's own rows again
    ...     bool(model.blocks[0].mlp.W_out[0].any())
    True
    """

    neurons: NeuronSet
    rows: Float[Tensor, "n d_model"]
    old_rows: Float[Tensor, "n d_model"]

    @contextmanager
    def applied(self, model: LanguageModel) -> Iterator[None]:
        """Put the new rows into W_out inside the ``with`` block; afterwards every weight is bit for
        bit what it was.

        Raises:
            ValueError: The rows belong to a model of another shape.
        """
        with rows_replaced(model, self.neurons, self.rows):
            yield

    @contextmanager
    def undone(self, model: LanguageModel) -> Iterator[None]:
        """Put the old rows into an edited model inside the ``with`` block.

        Raises:
            ValueError: The model does not hold the new rows, or is of another shape.
        """
        if not self._is_in(NeuronView(model, self.neurons.units)):
            raise ValueError(
                f"model must hold the rows of the edit, got others in {model_name(model)!r}. Load "
                "the folder that erase wrote, or use applied for the model before."
            )
        with rows_replaced(model, self.neurons, self.old_rows):
            yield

    def _is_in(self, view: NeuronView) -> bool:
        """Whether a model holds the new rows, to what half precision rounds; true of a model of
        another shape, which is refused elsewhere.
        """
        if view.size != self.neurons.mask.shape:
            return True
        now = read_rows(view, self.neurons)
        if now.shape != self.rows.shape:
            return True
        return bool((now - self.rows).norm() <= ROUNDING * self.rows.norm())


def read_rows(view: NeuronView, neurons: NeuronSet) -> Float[Tensor, "n d_model"]:
    """The rows of W_out of some neurons, float32 on the CPU."""
    rows: list[Tensor] = []
    for layer, chosen in enumerate(view.row_mask(neurons.mask)):
        index = chosen.nonzero().flatten().to(view.device)
        rows.append(view.flat_rows(layer).detach()[index].float().cpu())
    return torch.cat(rows)
