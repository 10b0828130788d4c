"""All that is known of an edit that erases texts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.erasure.directory import write_directory
from tl_localize.erasure.measures import Price
from tl_localize.erasure.row_edit import RowEdit
from tl_localize.model.neurons import LanguageModel
from tl_localize.scores import NeuronSet
from tl_localize.stats import quantity

TEXT_MEASURES = {
    "accuracy": "recited, teacher-forced (%)",
    "extracted": "written from the prefix before the first wrong token (%)",
    "exact": "written from the prefix without an error (% of texts)",
    "half_extracted": "written from half of the prefix before the first wrong token (%)",
    "half_exact": "written from half of the prefix without an error (% of texts)",
}


@dataclass(frozen=True, eq=False, repr=False)
class Erasure:
    """An edit that erases texts, with what was measured before and after it.

    Args:
        edit: the changed rows.
        watched: the price on the texts that were looked at while the edit was made.
        settings: what was asked for, and how.
        measured: before and after: ``others_accuracy``, ``perplexity`` and ``kl`` (from the model
            before, nats per token), all on texts that were not looked at while the edit was made.
        texts: before and after, one row for each erased text: see ``measure_texts``.
        made_with: the model and its weights, versions and machine, and the ids of the other texts.
        source: what the model was loaded from, where that is known and still has its weights.

    >>> general = reference_sequences(model)[-1].tokens.view(2, 40)
    >>> how = {"others": few[1:], "general_tokens": general, "method": Attribution()}
    >>> erasure = erase(model, sequence, edit="ablate", max_recited=0.9, **how)
    >>> with erasure.applied(model):
    ...     bool(accuracy(model, sequence) < 1)
    True
    """

    edit: RowEdit
    watched: Price
    settings: dict[str, Any]
    measured: dict[str, dict[str, float]]
    texts: dict[str, pd.DataFrame]
    made_with: dict[str, Any]
    source: str | None = None

    def __repr__(self) -> str:
        shares = [self.texts[when]["accuracy"].mean() for when in ("before", "after")]
        return (
            f"Erasure({quantity(len(self.texts['after']), 'text')}, "
            f"{quantity(len(self.edit.rows), 'row')}: {shares[0]:.0%} recited before, "
            f"{shares[1]:.0%} after; {self.price})"
        )

    @property
    def neurons(self) -> NeuronSet:
        """Whose rows were changed."""
        return self.edit.neurons

    @property
    def within_price(self) -> bool:
        """Whether the price that was asked for was kept while the edit was made."""
        asked = Price(self.settings["max_others_lost"], self.settings["max_perplexity_rise"])
        return self.watched.within(asked)

    @property
    def missed(self) -> str:
        """How much is still recited, in words, where that is more than was asked for; else
        empty.
        """
        left = round(float(self.texts["after"]["accuracy"].mean()), 6)
        most = self.settings["max_recited"]
        if left <= most:
            return ""
        recited = f"{left:.0%} of the tokens are recited"
        return f"The texts are not erased: {recited}, and {most:.0%} was asked for."

    @property
    def title(self) -> str:
        """What the edited model is, after its name."""
        n_texts = quantity(len(self.texts["after"]), "text")
        return f"in which {n_texts} were to be erased" if self.missed else f"without {n_texts}"

    @property
    def price(self) -> Price:
        """What other text lost, measured on texts that were not looked at while the edit was
        made.
        """
        before, after = self.measured["before"], self.measured["after"]
        lost = 100 * (before["others_accuracy"] - after["others_accuracy"])
        return Price(lost, 100 * (after["perplexity"] / before["perplexity"] - 1))

    @contextmanager
    def applied(self, model: LanguageModel) -> Iterator[None]:
        """Edit a model inside the ``with`` block; afterwards every weight is bit for bit what it
        was.
        """
        with self.edit.applied(model):
            yield

    def table(self) -> pd.DataFrame:
        """What was measured, before and after: means over the erased texts, and of other text."""
        columns: dict[str, dict[str, float]] = {}
        for when, frame in self.texts.items():
            found = {text: 100 * float(frame[key].mean()) for key, text in TEXT_MEASURES.items()}
            found["edit distance of what is written from the prefix"] = float(
                frame["distance"].mean()
            )
            other = self.measured[when]
            found["other known texts recited (%)"] = 100 * other["others_accuracy"]
            found["perplexity of general text"] = other["perplexity"]
            found["KL on general text (nats per token)"] = other["kl"]
            columns[when] = found
        return pd.DataFrame(columns).rename_axis("measure")

    def save(
        self, folder: str | Path, source: str | Path | None = None, force: bool = False
    ) -> None:
        """Write a Hugging Face folder of the edited model, which ``transformers`` loads, whole or
        not at all. All other weights have the values of the source, in float32, and its tokenizer
        comes along.

        Beside them lie ``erased.md`` and ``erased.json``, which say what was asked, which rows
        changed and what was measured, and ``erased.safetensors``, a ``RowEdit`` with the old rows.

        Args:
            folder: new or empty.
            source: what was given to ``load_model``, where the model did not come from there.
            force: also where the price was not kept.

        Raises:
            ValueError: the folder holds files, the price was not kept, the source is not known, or
                the model was changed since it was loaded, or it has no weight that holds the rows
                of W_out as the model has them.
            OSError: the disk is full.
        """
        source = source or self.source
        if source is None:
            raise ValueError(
                "source must be given for a model that load_model did not load, or whose weights "
                "were changed since, got None. Name the folder or the hub's name of its weights."
            )
        if not (self.within_price or force):
            raise ValueError(
                f"edit must keep its price, got one where {self.watched}. Nothing is written: "
                "allow a higher price, or write it all the same with force=True."
            )
        record: dict[str, Any] = {"settings": self.settings, "rows": list(self.neurons)}
        record |= {"made_with": self.made_with, "measured": self.measured}
        record["texts"] = {when: frame.to_dict("index") for when, frame in self.texts.items()}
        card = self._card(Path(source).name)
        write_directory(Path(folder), source, self.edit, record, card)

    def _card(self, name: str) -> str:
        """What a person wants to know of the edited model, as Markdown."""
        from tl_localize.report.saving import to_markdown

        layers = self.neurons.mask.any(1).nonzero().flatten().tolist()
        asked = "\n".join(f"- {setting}: {value}" for setting, value in self.settings.items())
        missed = f"\n\n**{self.missed}**" if self.missed else ""
        return f"""# {name} {self.title}{missed}

tl_localize changed {quantity(len(self.edit.rows), "row")} of W_out in layers {layers[0]} to \
{layers[-1]}, and no other weight. `erased.safetensors` holds the old rows, `erased.json` all \
numbers.

{to_markdown(self.table().round(4))}

Other texts and general text are measured on texts that were not looked at while the edit was made.
That a text is not recited does not mean that nothing of it is left in the weights: training on a
part of it may bring it back.

Asked for:

{asked}
"""
