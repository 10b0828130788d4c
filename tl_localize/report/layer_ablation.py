"""A text layer by layer: what is left of it when the neurons of one layer are ablated, and when
those of one layer are spared.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pandas as pd
import torch

from tl_localize.drawing import axes, finish, mark_layers
from tl_localize.metrics import accuracy, nan_in, target_logits
from tl_localize.model.neurons import LanguageModel, ModelView
from tl_localize.scores import NeuronSet, check_set
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences, other_texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET, OTHERS = "#0072B2", "#888888"  # colours of the text and of other texts


@dataclass(frozen=True, eq=False)
class LayerAblation:
    """What is left of a text, layer by layer.

    Args:
        frame: One row for each layer that has neurons in the set. ``neurons``: how many. ``only``:
            accuracy on the text when the neurons of this layer alone are ablated. ``rise``: how
            much its loss rises then, in nats per suffix token. ``spared``: accuracy when those of
            all other layers are ablated. ``others``: mean accuracy on other texts in the first of
            these cases, where there are any.
        before: Accuracy on the text before.
        after: Accuracy with all neurons of the set ablated.
        units: The name of what is ablated.

    >>> frame = pd.DataFrame({"neurons": [2], "only": [0.9], "spared": [0.8]}, index=[1])
    >>> LayerAblation(frame, before=1.0, after=0.7).plot().axes[0].get_title()
    '2 neurons ablated, by layer'
    """

    frame: pd.DataFrame
    before: float
    after: float
    units: str = "neurons"

    def _repr_html_(self) -> str:
        return self.frame.round(3).to_html()

    def plot(self) -> "Figure":
        """What is left of the text over the layers, in percent of the suffix tokens.

        Raises:
            ImportError: matplotlib, of the extra ``plots``, is missing.
        """
        (ax,) = axes(1, (6.4, 3.6))
        layers, percents = self.frame.index, 100 * self.frame
        if "others" in percents:
            label = "other texts, only this layer ablated"
            ax.plot(layers, percents["others"], "^-", color=OTHERS, linewidth=1, label=label)
        ax.plot(layers, percents["only"], "o-", color=TARGET, label="only this layer ablated")
        label = "all but this layer ablated"
        ax.plot(layers, percents["spared"], "s--", color=TARGET, fillstyle="none", label=label)
        ax.axhline(100 * self.after, color=TARGET, linestyle=":", label="all layers ablated")
        ax.set_ylim(-3, 103)
        mark_layers(ax, layers.tolist())
        title = f"{int(self.frame['neurons'].sum())} {self.units} ablated, by layer"
        finish(ax, "layer", "suffix tokens still right (%)", title)
        ax.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
        figure = ax.get_figure(root=True)
        assert figure is not None
        return figure


def ablate_layers(
    model: LanguageModel,
    sequence: MemorizedSequence,
    neurons: NeuronSet,
    others: Iterable[MemorizedSequence] = (),
) -> LayerAblation:
    """Ablate the neurons of a set layer by layer: those of one layer alone, and those of all other
    layers.

    Args:
        others: Texts that should not suffer, measured where one layer is ablated. The text itself
            is left out, if it is among them, and so is one that shares 13 tokens in a row with it.

    Raises:
        ValueError: The set is empty, or a text or the set does not fit the model.

    >>> neurons = Attribution()(model, sequence).top_k(0.1, first_layer=1)
    >>> layers = ablate_layers(model, sequence, neurons)
    >>> layers.frame.index.tolist(), layers.before > layers.after
    ([1, 2, 3, 4, 5], True)
    """
    check_set(neurons)
    if not len(neurons):
        raise ValueError(
            f"neurons must hold some of the {neurons.units.name}, got none. Take more, as "
            "scores.top_k(0.1) does."
        )
    (sequence,) = check_sequences(model, [sequence])
    others = other_texts(model, others, [sequence])
    before, loss_before = _measured(model, sequence)
    after, _ = _measured(model, sequence, neurons)
    rows: list[dict[str, float]] = []
    for layer in neurons.mask.any(1).nonzero().flatten().tolist():
        mask = torch.zeros_like(neurons.mask)
        mask[layer] = neurons.mask[layer]
        own = replace(neurons, mask=mask)
        only, loss = _measured(model, sequence, own)
        spared, _ = _measured(model, sequence, neurons - own)
        row = {"layer": layer, "neurons": len(own), "only": only, "rise": loss - loss_before}
        row["spared"] = spared
        if others:
            with own.dropped_out(model):
                row["others"] = float(accuracy(model, others).mean())
        rows.append(row)
    return LayerAblation(pd.DataFrame(rows).set_index("layer"), before, after, neurons.units.name)


@torch.no_grad()
def _measured(
    model: LanguageModel, sequence: MemorizedSequence, ablated: NeuronSet | None = None
) -> tuple[float, float]:
    """Accuracy and loss on one text, in nats per suffix token, in one forward pass."""
    batch = SequenceBatch.of([sequence], ModelView(model).device)
    with ablated.dropped_out(model) if ablated else nullcontext():
        logits = target_logits(model, batch).float()
    if logits.isnan().any():
        raise nan_in(sequence)
    right = (logits.argmax(-1) == batch.targets).float().mean()
    return float(right), float(torch.nn.functional.cross_entropy(logits, batch.targets))
