"""What else a model forgets when the neurons of one text are ablated: of every text that it knows,
how much it recites before and after.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from tl_localize.drawing import axes, finish
from tl_localize.metrics import accuracy
from tl_localize.model.neurons import LanguageModel
from tl_localize.scores import NeuronSet, check_set
from tl_localize.sequences import (
    MemorizedSequence,
    check_sequences,
    other_texts,
    without_text_of,
)
from tl_localize.stats import quantity
from tl_localize.texts.known import known

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 12  # other texts that a picture or a page has room for
FALLEN = 0.1  # of the suffix: what a text must lose to count as one that falls
TARGET, OTHERS, GONE = "#0072B2", "#888888", "#e3c9c5"  # colours of bars; what is lost
BAR = '"display:flex;width:200px;height:10px;background:#f3f3f3"'


@dataclass(frozen=True, eq=False)
class TextLosses:
    """What is left of a text and of others without some neurons.

    Args:
        frame: One row per text, first that whose neurons are ablated, then the others, what lost
            most first: id, category, before, after and lost (accuracies, fractions of the suffix).
        n_ablated: How many neurons.
        units: Their name.

    >>> rows = [["mit", "", 0.8, 0.2, 0.6], ["primes", "", 0.9, 0.9, 0.0]]
    >>> frame = pd.DataFrame(rows, columns=["id", "category", "before", "after", "lost"])
    >>> TextLosses(frame, n_ablated=7).table().index.tolist()
    ['mit', 'primes', 'mean of 1 other text']
    """

    frame: pd.DataFrame
    n_ablated: int
    units: str = "neurons"

    def __str__(self) -> str:
        return self._summary

    @property
    def others(self) -> pd.DataFrame:
        """The rows of the other texts."""
        return self.frame.iloc[1:]

    def table(self, n: int = SHOWN) -> pd.DataFrame:
        """The text, the ``n`` others that lost most, and the mean of all other texts, in percent of
        the suffix tokens.
        """
        numbers = ["before", "after", "lost"]
        rows = self.frame.head(n + 1).set_index("id")
        if len(self.others):
            mean = {name: self.others[name].mean() for name in numbers}
            rows.loc[f"mean of {quantity(len(self.others), 'other text')}"] = mean
        shown = (100 * rows[numbers].astype(float)).round(1) + 0.0  # no "-0.0"
        shown.insert(0, "category", rows["category"].fillna(""))
        return shown.rename(columns={name: f"{name} (%)" for name in numbers})

    def plot(self) -> "Figure":
        """Of the text and of those others that lost most: recited before (grey) and after.

        Raises:
            ImportError: matplotlib, of the extra ``plots``, is missing.
        """
        shown = self.table()
        (ax,) = axes(1, (6.4, 0.6 + 0.27 * len(shown)))
        before, after = shown["before (%)"], shown["after (%)"]
        places = range(len(shown))
        ax.hlines(places, after, before, color="#cccccc", linewidth=2, zorder=0)
        ax.plot(before, places, "|", color="#555555", markersize=9, label="before")
        ax.plot(after[:1], [0], "o", color=TARGET, label="after, the text itself")
        ax.plot(after[1:], places[1:], "o", color=OTHERS, label="after, other texts")
        ax.set_yticks(places, shown.index)
        ax.invert_yaxis()
        ax.set_xlim(-2, 102)
        title = f"Without {self.n_ablated} {self.units}: the text, and those that fall with it"
        finish(ax, "suffix tokens recited (%)", "", title)
        ax.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
        figure = ax.get_figure(root=True)
        assert figure is not None
        return figure

    def html(self) -> str:
        """All texts as a table with bars, for a notebook or ``page``."""
        rows: list[str] = []
        for place, (_, row) in enumerate(self.frame.iterrows()):
            colour = OTHERS if place else TARGET
            left, gone = 100 * min(row["before"], row["after"]), 100 * max(row["lost"], 0.0)
            bar = f"<div style={BAR}>{_part(left, colour)}{_part(gone, GONE)}</div>"
            cells = [escape(str(row["id"])), escape(str(row["category"]))]
            cells += [f"{100 * row[name]:.0f}" for name in ("before", "after")]
            style = ' style="font-weight:bold"' if not place else ""
            rows.append(f"<tr{style}><td>{'</td><td>'.join([*cells, bar])}</td></tr>")
        names = ["text", "category", "before (%)", "after (%)", ""]
        head = "".join(f"<th>{name}</th>" for name in names)
        style = "border-spacing:12px 2px;text-align:left"
        table = f'<table style="{style}">{head}{"".join(rows)}</table>'
        return f'<p>{escape(self._summary)}</p><div style="overflow-x:auto">{table}</div>'

    _repr_html_ = html

    @property
    def _summary(self) -> str:
        text, others = self.frame.iloc[0], self.others
        name = text["id"] or "The text"
        said = f"{name}: {text['before']:.0%} recited before, {text['after']:.0%} without "
        said += f"{self.n_ablated} {self.units}."
        if len(others):
            verb = "loses" if len(others) == 1 else "lose"
            said += f" {quantity(len(others), 'other text')} {verb} "
            said += f"{round(100 * others['lost'].mean(), 1) + 0.0} points on average; "
            fallen = int((others["lost"].round(6) >= FALLEN).sum())
            verb = "loses" if fallen == 1 else "lose"
            said += f"{fallen} of them {verb} {100 * FALLEN:g} points or more."
        return said


def _part(percent: float, colour: str) -> str:
    return f'<div style="width:{percent:.0f}%;background:{colour}"></div>'


def text_losses(
    model: LanguageModel,
    sequence: MemorizedSequence,
    neurons: NeuronSet,
    others: Iterable[MemorizedSequence] | None = None,
    *,
    progress: Callable[[float], None] | None = None,
) -> TextLosses:
    """What is left of a text, and of all others that the model knows, when neurons are ablated:
    which texts fall with it?

    Args:
        others: The other texts; those that ``known`` finds unless given. The text itself is left
            out, if it is among them, and so is one that shares a run of 13 tokens with it.
        progress: Called with the fraction of the search for others that is done.

    Raises:
        ValueError: A text or the set does not fit the model, or the model has no tokenizer and no
            others are given.

    >>> neurons = Attribution()(model, sequence).top_k(0.1, first_layer=1)
    >>> losses = text_losses(model, sequence, neurons, few)
    >>> losses.frame.columns.tolist(), len(losses.others)
    (['id', 'category', 'before', 'after', 'lost'], 2)
    """
    check_set(neurons)
    (sequence,) = check_sequences(model, [sequence])
    with neurons.dropped_out(model):
        pass  # a set of another model is refused before texts are searched
    if others is None:
        recited = known(model, progress=progress)
        rest = without_text_of(recited.sequences, [sequence])
        shares = recited.frame.set_index("id")["accuracy"]
        before = [*accuracy(model, [sequence]).tolist(), *shares[[text.id for text in rest]]]
    else:
        rest = other_texts(model, others, [sequence])
        before = accuracy(model, [sequence, *rest]).tolist()
    texts = [sequence, *rest]
    with neurons.dropped_out(model):
        after = accuracy(model, texts)
    frame = pd.DataFrame({"id": [text.id for text in texts]})
    frame["category"] = [text.category for text in texts]
    frame = frame.assign(before=before, after=after.tolist())
    frame["lost"] = frame["before"] - frame["after"]
    sorted_rest = frame.iloc[1:].sort_values("lost", ascending=False, kind="stable")
    whole = pd.concat([frame.iloc[:1], sorted_rest], ignore_index=True)
    return TextLosses(whole, len(neurons), neurons.units.name)
