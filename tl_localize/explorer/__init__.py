"""An interactive view of what is forgotten when neurons are ablated: live in Jupyter, VS Code and
Colab, or one HTML file without a kernel.

The view is written once, in explorer.js. It asks for numbers by short requests. In a notebook
Python answers them (``Explorer.answer``); a saved file holds the answers to a grid of requests.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from tl_localize.checks import Real, check_choice, check_ratio
from tl_localize.evals.ablation import ABLATIONS, AblationMeter
from tl_localize.files import write_whole
from tl_localize.methods import RandomBaseline
from tl_localize.methods.partial_runs import activations
from tl_localize.metrics import Decode, check_text, unembed
from tl_localize.model.loading import is_reference
from tl_localize.model.neurons import LanguageModel, NeuronView, model_name
from tl_localize.paper import short_title
from tl_localize.report.looks import looks
from tl_localize.report.token_view import TokenView, pieces, text_after
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence, check_sequences, decoder, other_texts
from tl_localize.texts.reference import held_out_tokens, reference_sequences
from tl_localize.units import Units

RATIOS = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2)
EVERY = 20  # of the shipped texts of a shipped model, one in so many stands for the others
CARDS = 16  # best neurons of each method that the view shows; a saved file holds their cards
PROMOTED = 8  # tokens on a card
SCRIPT = Path(__file__).with_name("explorer.js")


def explore(
    model: LanguageModel,
    sequence: MemorizedSequence | Sequence[MemorizedSequence],
    scores: NeuronScores | Iterable[NeuronScores],
    others: Sequence[MemorizedSequence] | None = None,
    *,
    general: Integer[Tensor, "sequence pos"] | None = None,
    ratios: Sequence[Real] = RATIOS,
    ablation: str = "zero",
    decode: Decode | None = None,
) -> "Explorer":
    """Explore which neurons some scores name, and what the model forgets without them. A notebook
    shows the view.

    Sliders choose the share of the neurons and the layers. The view shows the probability of each
    true token before and after, the accuracy on this text (Self) and on the others (Neg), what each
    layer holds by itself, and maps of layer x neuron and layer x token. A click on a neuron shows
    its card. Two methods or texts stand side by side; equally many random neurons are added as a
    control. Each click measures the model as it is then: inside a block that changes it
    (``applied``, ``dropped_out``) ``save`` the view in place of showing it.

    Args:
        sequence: A text that the model recites, or several to choose from.
        scores: Of one method or of several, all of one kind of unit; each has the id of its text as
            ``sequence_id``.
        others: The texts that should survive; of a shipped model some of its shipped texts,
            otherwise none. Those that share a run of 13 tokens with a text are left out.
        general: General text for mean and resample, and in its first row for the perplexity; by
            default the shipped text.
        ratios: Shares of each layer that the slider offers, from the largest; shares that take no
            neuron are left out.
        ablation: ``"zero"``, ``"mean"`` or ``"resample"``.
        decode: Token ids -> text; the tokenizer's unless given.

    Raises:
        TypeError: The scores are something else, such as a ``NeuronSet``.
        ValueError: Scores of another model or of a text that is not given, an unknown ablation, a
            ratio outside (0, 1].

    >>> scores = Attribution()(model, sequence)
    >>> view = explore(model, sequence, scores, few[1:2], general=text, ratios=(0.05,))
    >>> view.save(folder / "explorer.html")
    >>> (folder / "explorer.html").stat().st_size < 500_000
    True
    """
    texts = [sequence] if isinstance(sequence, MemorizedSequence) else sequence
    texts = check_sequences(model, texts)
    scores = [scores] if isinstance(scores, NeuronScores | NeuronSet) else list(scores)
    for given in scores or [None]:
        if not isinstance(given, NeuronScores):
            raise TypeError(
                f"scores must be NeuronScores or several, got {type(given).__name__}. The view "
                "takes sets of them by itself; token_view(model, sequence, neurons) shows one set."
            )
    view = NeuronView(model, scores[0].units)
    pairs = _pair_scores(view, texts, scores)
    if general is None:
        general = held_out_tokens(model)[:16]
    check_text(model, general, "general")
    if others is None and is_reference(model_name(model)):
        others = reference_sequences(model)[::EVERY]
    others = other_texts(model, () if others is None else others, texts)
    shares = sorted(
        float(ratio) for ratio in ratios if round(view.n_neurons * check_ratio("ratio", ratio))
    )
    if not shares:
        raise ValueError(
            f"ratios must take a neuron of each layer, got {list(ratios)}. A layer has "
            f"{view.n_neurons}: take larger ones."
        )
    check_choice("ablation", ablation, ABLATIONS)
    how = (shares, ablation, decode or decoder(model))
    return Explorer(view, texts, pairs, others, general, *how)


def _pair_scores(
    view: NeuronView, texts: list[MemorizedSequence], scores: list[NeuronScores]
) -> list[tuple[int, NeuronScores]]:
    """The index of a text and scores for it; random scores last."""
    ids = [text.id for text in texts]
    if len(texts) > 1 and (len(set(ids)) < len(ids) or not all(s.sequence_id for s in scores)):
        raise ValueError(
            f"texts must have different ids, which their scores hold, got {ids} and scores of "
            f"{[scored.sequence_id for scored in scores]}. Give each text an id and localize again."
        )
    pairs: list[tuple[int, NeuronScores]] = []
    for scored in scores:
        of = scored.sequence_id or ids[0]
        same = scored.values.shape == view.size and scored.units == view.units
        if not same or of not in ids:
            raise ValueError(
                f"scores must be of this model {view.size}, of {view.units.name} and of one of the "
                f"texts {ids}, got {scored!r}. Localize them again."
            )
        pairs.append((ids.index(of), scored))
    control = RandomBaseline(units=view.units)
    for text in sorted({text for text, _ in pairs}):
        (random,) = control.map(view.model, [texts[text]], check=False)
        pairs.append((text, random))
    return pairs


@dataclass(eq=False, repr=False)
class Explorer:
    """The view that ``explore`` makes: a notebook shows it, ``save`` writes it.

    >>> scores = Attribution()(model, sequence)
    >>> view = explore(model, sequence, scores, few[1:2], general=text, ratios=(0.05,))
    >>> view.answer(["step", 0, 0, "1"])["layers"]
    [0, 77, 0, 0, 0, 0]
    """

    view: NeuronView
    texts: list[MemorizedSequence]
    pairs: list[tuple[int, NeuronScores]]  # the index of a text, and scores for it
    others: list[MemorizedSequence]
    general: Integer[Tensor, "sequence pos"]
    ratios: list[Real]
    ablation: str
    decode: Decode

    def __repr__(self) -> str:
        methods = ", ".join(short_title(scores.method) for _, scores in self.pairs)
        return f"Explorer({self.texts[0].id!r}: {methods})"

    # What the view asks for

    def answer(self, request: Sequence[Any]) -> dict[str, Any]:
        """The numbers of a request, as JSON takes them.

        ``["step", pair, ratio, layers]``: what the ablation of the chosen neurons changes.
        ``["card", pair, layer, neuron]``: one neuron. ``pair`` and ``ratio`` are indices,
        ``layers`` is text such as ``"1,2,3"``.
        """
        measure: Any = {"step": self._step, "card": self._card}[request[0]]
        with torch.no_grad():
            return measure(*request[1:])

    def chosen(self, pair: int, ratio: int, layers: str) -> NeuronSet:
        """The neurons that a setting of the sliders ablates: the top share of some layers; none of
        a layer in which the method did not choose.
        """
        mask = self.pairs[pair][1].top_k(self.ratios[ratio]).mask
        some = torch.zeros(len(mask), 1, dtype=torch.bool)
        some[[int(layer) for layer in layers.split(",")]] = True
        return NeuronSet(mask & some, self.view.units)

    @cached_property
    def _meter(self) -> AblationMeter:
        return AblationMeter(
            self.view.model,
            [*self.texts, *self.others],
            self.general[:1],
            partial(ABLATIONS[self.ablation], self.general, 0),
            self.decode,
            units=self.view.units,
        )

    def _step(self, pair: int, ratio: int, layers: str) -> dict[str, Any]:
        text = self.pairs[pair][0]
        chosen = self.chosen(pair, ratio, layers)
        effect = self._meter.effect(text, chosen)
        p, predicted = self._meter.probabilities(text, chosen)
        sequence = self.texts[text]
        true = sequence.tokens.tolist()
        guess = [*sequence.prefix.tolist(), *predicted.tolist()]
        return {
            "layers": chosen.mask.sum(1).tolist(),
            "p": _permille(p),
            "predicted": [
                text_after(self.decode, true[:start], guess[start:end])
                for start, end, _ in pieces(self.decode, true)
            ],
            "accuracy": [round(change, 4) for change in effect["accuracy"]],
            "perplexity": round(effect["perplexity"], 2),
        }

    def _card(self, pair: int, layer: int, neuron: int) -> dict[str, Any]:
        """How much a neuron writes at each position, the tokens that its mean output in the text
        promotes, and its rank by each method among the layers in which it chose; the rank alone of
        units that write no rows.
        """
        text = self.pairs[pair][0]
        ranks: list[list[Any]] = []
        for title, (of, scores) in zip(self._titles, self.pairs, strict=True):
            if of == text:
                first_layer = scores.first_layer or 0
                if layer < first_layer:
                    ranks.append([title, "not ranked"])
                    continue
                ranked = scores.values[first_layer:]
                n_better = int((ranked > scores.values[layer, neuron]).sum())
                ranks.append([title, n_better + 1])
        if type(self.view.units).rows is Units.rows:
            return {"writes": [], "promoted": [], "ranks": ranks}
        act = activations(self.view, self.texts[text].tokens[None])[layer][0, :, neuron]
        act = act.reshape(len(act), -1)  # a head has several values, a neuron one
        written = act @ self.view.rows(layer)[neuron].reshape(act.shape[1], -1)
        mean = written.mean(0)
        logits, nothing = unembed(self.view.model, torch.stack([mean, torch.zeros_like(mean)]))
        promoted = (logits - nothing).topk(min(PROMOTED, len(nothing)))
        return {
            "writes": [round(norm, 3) for norm in written.norm(dim=1).tolist()],
            "promoted": [self.decode([token]) for token in promoted.indices.tolist()],
            "ranks": ranks,
        }

    # What is shown

    @cached_property
    def _titles(self) -> list[str]:
        """The method of each pair; a second one of its name, of the same text, has a number."""
        seen: Counter[tuple[int, str]] = Counter()
        found: list[str] = []
        for text, scores in self.pairs:
            title = short_title(scores.method)
            seen[text, title] += 1
            found.append(title if seen[text, title] == 1 else f"{title} {seen[text, title]}")
        return found

    @cached_property
    def data(self) -> dict[str, Any]:
        """What the view needs before it asks."""
        meter = self._meter
        units = self.view.units
        texts = [
            {
                "id": sequence.id,
                "pieces": pieces(self.decode, sequence.tokens.tolist()),
                "prefix": sequence.n_prefix,
                "p": _permille(meter.probabilities(i, self._nothing)[0]),
            }
            for i, sequence in enumerate(self.texts)
        ]
        # one that is numbered has no look of its own
        keys = [
            scores.method if title == short_title(scores.method) else title
            for title, (_, scores) in zip(self._titles, self.pairs, strict=True)
        ]
        colours = looks(keys)
        pairs = [
            {
                "text": text,
                "method": title,
                "colour": colours[key].colour,
                "map": _levels(scores),
                "top": self._best(scores),
            }
            for title, key, (text, scores) in zip(self._titles, keys, self.pairs, strict=True)
        ]
        return {
            "model": model_name(self.view.model),
            "shape": list(self.view.size),
            "units": [units.one, units.name],
            "texts": texts,
            "pairs": pairs,
            "ratios": self.ratios,
            "layers": self._layer_choices(),
            "ablation": self.ablation,
            "names": [sequence.id for sequence in meter.sequences],
            "accuracy": [round(row["accuracy"], 4) for row in meter.before],
            "perplexity": round(meter.before[0]["perplexity"], 2),
        }

    def _best(self, scores: NeuronScores) -> list[list[int]]:
        """The best neurons of all layers and of those but layer 0, [layer, neuron]: the view shows
        those of the layers that are ablated.
        """
        frame = scores.to_frame()[["layer", "neuron"]]
        later = frame[frame["layer"] > 0]
        best = frame.index[:CARDS].union(later.index[:CARDS])
        return frame.loc[best].to_numpy().tolist()

    @property
    def _nothing(self) -> NeuronSet:
        mask = torch.zeros(self.view.size, dtype=torch.bool)
        return NeuronSet(mask, self.view.units)

    def _layer_choices(self) -> list[str]:
        """The layers of each position of the slider: first without layer 0, which every text
        needs.
        """
        every = [str(layer) for layer in range(self.view.n_layers)]
        return [",".join(every[1:] or every), ",".join(every), *every]

    def html(self) -> str:
        """The view as a piece of HTML that needs neither kernel nor network, for a page or for
        ``IPython.display.HTML``.

        Every position of the sliders is measured, a fraction of a second each, so ``explore`` with
        few ``ratios`` is faster.
        """
        requests: list[list[Any]] = []
        for pair, shown in enumerate(self.data["pairs"]):
            for ratio in range(len(self.ratios)):
                requests += [["step", pair, ratio, layers] for layers in self._layer_choices()]
            requests += [["card", pair, *neuron] for neuron in shown["top"]]
        answers = {"/".join(map(str, request)): self.answer(request) for request in requests}
        data = json.dumps(self.data | {"answers": answers}).replace("<", "\\u003c")
        name = f"tl-localize-{uuid4().hex}"  # another one where a page holds it twice
        script = SCRIPT.read_text(encoding="utf-8")
        start = f"mount(document.getElementById({name!r}), {data});"
        still = f'<div id="{name}">{self._repr_html_()}</div>'
        return f'{still}<script type="module">{script}\n{start}</script>'

    def save(self, path: str | Path) -> None:
        """Write the view, as of ``html``, as one file that opens offline."""
        dark = '<meta name="color-scheme" content="light dark">'
        head = f'<head><meta charset="utf-8">{dark}<title>{escape(repr(self))}</title></head>'
        page = f'<!doctype html><html lang="en">{head}<body>{self.html()}</body></html>'
        write_whole(Path(path), page.encode())

    def _repr_html_(self) -> str:
        """The token view of the first setting, where no script runs."""
        text = self.pairs[0][0]
        chosen = self.chosen(0, len(self.ratios) - 1, self._layer_choices()[0])
        _, before = self._meter.probabilities(text, self._nothing)
        _, after = self._meter.probabilities(text, chosen)
        view = TokenView(
            self.texts[text], before, after, self.decode, len(chosen), chosen.units.one
        )
        return view.html()

    @cached_property
    def widget(self) -> Any:
        """The view as a widget: ``anywidget.AnyWidget``, whose messages Python answers."""
        import anywidget
        import traitlets

        class View(anywidget.AnyWidget):
            _esm = SCRIPT.read_text(encoding="utf-8")
            data = traitlets.Dict().tag(sync=True)

        def reply(widget: Any, message: dict[str, Any], _: Any) -> None:
            try:
                widget.send({"id": message["id"], "answer": self.answer(message["request"])})
            except (LookupError, RuntimeError, ValueError) as error:
                widget.send({"id": message["id"], "error": str(error)})

        view = View(data=self.data)
        view.on_msg(reply)
        return view

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        shown = {"text/plain": repr(self), "text/html": self._repr_html_()}
        try:
            # Colab finds the widget's script by what is about it
            live, about = self.widget._repr_mimebundle_()
        except ImportError:
            hint = "For the interactive view: pip install anywidget ipywidgets."
            return shown | {"text/html": f"<p>{hint}</p>{shown['text/html']}"}, {}
        return live | shown, about


def _permille(p: Float[Tensor, " token"]) -> list[int]:
    return (1000 * p).round().int().tolist()


def _levels(scores: NeuronScores) -> str:
    """Scores as bytes, in base64: 0 for what is not positive, 255 for the highest of its layer."""
    values = scores.values.clamp(min=0)
    values[: scores.first_layer or 0] = 0
    levels = 255 * values / values.amax(1, keepdim=True).clamp(min=1e-30)
    return base64.b64encode(levels.round().to(torch.uint8).numpy().tobytes()).decode()
