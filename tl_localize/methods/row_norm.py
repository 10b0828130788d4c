"""RowNorm: a control that never reads the sentence."""

from dataclasses import dataclass

from tl_localize.methods.base import Localizer, Values
from tl_localize.model.neurons import NeuronView
from tl_localize.sequences import MemorizedSequence


@dataclass(frozen=True, kw_only=True)
class RowNorm(Localizer):
    """Norm of each neuron's row of W_out: a control, not a method, because it never reads the
    sequence.

        A(l, i) = ||v_i||

    For a head it is the norm of all entries of its rows of W_O.
    Training makes row norms larger, so the row norm finds the rows that an injection trained
    without knowing the text. A benchmark in which this control scores well does not show that a
    method localizes.

    Source: ours.

    Returns:
        [layer neuron] in units of the residual stream.

    >>> bool((RowNorm()(model, sequence).values > 0).all())
    True
    """

    name = "row_norm"
    title = "RowNorm (control: never reads the sentence)"

    def attribute(self, neurons: NeuronView, sequence: MemorizedSequence) -> Values:
        return neurons.row_norms().cpu()
