"""An interactive view of what is forgotten when neurons are ablated: live in Jupyter, VS Code and
Colab, or one HTML file without a kernel.

The view is written once, in explorer.js. It asks for numbers by short requests. In a notebook
Python answers them (``Explorer.answer``); a saved file holds the answers to a grid of requests.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from tl_localize.evals.ablation import ABLATIONS, AblationMeter, activations
from tl_localize.files import write_whole
from tl_localize.losses import unembed
from tl_localize.methods import Attribution, RandomBaseline
from tl_localize.metrics import Decode, decoder
from tl_localize.models import is_reference
from tl_localize.neurons import LanguageModel, NeuronView, Real, check_ratio, model_name
from tl_localize.reference import held_out_tokens, reference_sequences
from tl_localize.report.looks import looks
from tl_localize.report.paper import short_title
from tl_localize.report.token_view import TokenView, pieces, text_after
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence, check_sequences

RATIOS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25)
N_OTHERS = 6  # shipped texts that stand for the others, of a shipped model
GENERAL_ROWS = 1  # of general text, for the perplexity
CARDS = 16  # neurons of each method whose cards a saved file holds
PROMOTED = 8  # tokens on a card
SCRIPT = Path(__file__).with_name("explorer.js")
Request = Sequence[Any]


def explore(
    model: LanguageModel,
    sequence: MemorizedSequence | Sequence[MemorizedSequence],
    scores: NeuronScores | Iterable[NeuronScores],
    others: Sequence[MemorizedSequence] | None = None,
    *,
    general: Integer[Tensor, "sequence pos"] | None = None,
    ratios: Sequence[Real] = RATIOS,
    ablation: str | Sequence[str] | None = None,
    ratio: Real = 0.1,
    decode: Decode | None = None,
) -> Explorer:
    """Explore which neurons some scores name, and what the model forgets without them. A notebook
    shows the view.

    Sliders choose the share of the neurons and the layers. The view shows the probability of each
    true token before and after, the accuracy on this text (Self) and on the others (Neg), the
    neurons of each layer, accuracy against ratio for each layer, and maps of layer x neuron and
    layer x token. A click on a neuron shows its card. Two methods or texts stand side by side;
    equally many random neurons are added as a control.

    Args:
        sequence: A text that the model recites, or several to choose from.
        scores: Of one method or of several, all of one kind of unit; each has the id of its text as
            ``sequence_id``.
        others: The texts that should survive; of a shipped model some of its shipped texts,
            otherwise none.
        general: General text for perplexity, mean and resample; of a shipped model the shipped
            text.
        ratios: Shares of the neurons that the slider offers; shares that take no neuron of a layer
            are left out.
        ablation: ``"zero"``, ``"mean"``, ``"resample"``, or several of them to choose from; by
            default all, without general text only zero.
        ratio: The share to begin with; the nearest of ``ratios`` is taken.
        decode: Token ids -> text; the tokenizer's unless given.

    Raises:
        TypeError: The scores are something else, such as a ``NeuronSet``.
        ValueError: Scores of another model or of a text that is not given, an unknown ablation, a
            ratio outside (0, 1].

    >>> scores = Attribution()(model, sequence)
    >>> view = explore(model, sequence, scores, few[1:], ratios=(0.05,), ablation="zero")
    >>> view.save(folder / "explorer.html")
    >>> (folder / "explorer.html").stat().st_size < 500_000
    True
    """
    texts = [sequence] if isinstance(sequence, MemorizedSequence) else sequence
    texts = check_sequences(model, texts)
    pairs = _paired(model, texts, scores)
    view = NeuronView(model, pairs[0][1].units)
    if is_reference(model_name(model)):
        general = held_out_tokens()[:16] if general is None else general
        if others is None:
            known = {one.fingerprint for one in texts}
            pool = [one for one in reference_sequences(model) if one.fingerprint not in known]
            others = pool[:: max(1, len(pool) // N_OTHERS)][:N_OTHERS]
    for one in (*ratios, ratio):
        check_ratio("ratio", one)
    shares = sorted(float(one) for one in ratios if round(view.n_neurons * one))
    if not shares:
        raise ValueError(f"ratios must take a neuron of each layer, got {list(ratios)}.")
    if ablation is None:
        ablation = ["zero"] if general is None else list(ABLATIONS)
    ablations = [ablation] if isinstance(ablation, str) else list(ablation)
    if not ablations or not set(ablations) <= set(ABLATIONS):
        raise ValueError(f"ablation must be of {list(ABLATIONS)}, got {ablation!r}.")
    if general is None and ablations != ["zero"]:
        raise ValueError(
            f"general must be text for the ablations {ablations}, got None. Pass token ids "
            "[sequence pos]."
        )
    start = min(range(len(shares)), key=lambda i: abs(shares[i] - ratio))
    decode = decode or decoder(model)
    return Explorer(
        view, texts, pairs, list(others or []), general, shares, start, ablations, decode
    )


def _paired(
    model: LanguageModel,
    texts: Sequence[MemorizedSequence],
    scores: NeuronScores | Iterable[NeuronScores],
) -> list[tuple[int, NeuronScores]]:
    """The index of a text and scores for it; random scores last, for each text that has none."""
    scores = [scores] if isinstance(scores, NeuronScores | NeuronSet) else list(scores)
    pairs: list[tuple[int, NeuronScores]] = []
    ids = [text.id for text in texts]
    for one in scores:
        if not isinstance(one, NeuronScores):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"scores must be NeuronScores or several, got {type(one).__name__}. The view takes "
                "sets of them by itself; token_view(model, sequence, neurons) shows one set."
            )
        view = NeuronView(model, scores[0].units)
        shape = (view.n_layers, view.n_neurons)
        known = one.sequence_id in ids or (len(ids) == 1 and not one.sequence_id)
        if one.values.shape != shape or one.units != view.units or not known:
            wanted = f"this model {shape}, of {view.units.name} and of one of the texts {ids}"
            raise ValueError(f"scores must be of {wanted}, got {one!r}. Localize them again.")
        pairs.append((ids.index(one.sequence_id) if one.sequence_id else 0, one))
    if not pairs:
        raise ValueError(
            "scores must hold those of at least one method, got none. Call a method: "
            "Attribution()(model, sequence)."
        )
    control = RandomBaseline(units=scores[0].units)
    with_random = {text for text, one in pairs if one.method == control.name}
    for text in sorted({text for text, _ in pairs} - with_random):
        pairs.append((text, control(model, texts[text])))
    return pairs


@dataclass(eq=False, repr=False)
class Explorer:
    """The view that ``explore`` makes: a notebook shows it, ``save`` writes it.

    >>> scores = Attribution()(model, sequence)
    >>> view = explore(model, sequence, scores, few[1:], ratios=(0.05,), ablation="zero")
    >>> view.answer(["step", 0, 0, "layer", "1", "zero"])["layers"]
    [0, 77, 0, 0, 0, 0]
    """

    view: NeuronView
    texts: list[MemorizedSequence]
    pairs: list[tuple[int, NeuronScores]]  # the index of a text, and scores for it
    others: list[MemorizedSequence]
    general: Integer[Tensor, "sequence pos"] | None
    ratios: list[float]
    start: int  # the index of the ratio to begin with
    ablations: list[str]
    decode: Decode
    answers: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(short_title(one.method) for _, one in self.pairs))
        return f"Explorer({self.texts[0].id!r}: {methods}; {len(self.others)} other texts)"

    # What the view asks for

    def answer(self, request: Request) -> dict[str, Any]:
        """The numbers of a request, as JSON takes them; a request that was answered before costs
        nothing.

        ``["step", pair, ratio, per, layers, ablation]``: what the ablation of the chosen neurons
        changes. ``["layer", pair, layer, ablation]``: the same for the top of one layer, at each
        ratio. ``["card", pair, layer, neuron]``: one neuron. ``pair`` and ``ratio`` are indices,
        ``layers`` is text such as ``"1,2,3"``, ``per`` is "layer" or "model".
        """
        key = "/".join(map(str, request))
        if key not in self.answers:
            kinds: dict[str, Any] = {"step": self._step, "layer": self._layer, "card": self._card}
            with torch.no_grad():
                self.answers[key] = kinds[request[0]](*request[1:])
        return self.answers[key]

    def chosen(self, pair: int, ratio: int, per: str, layers: str) -> NeuronSet:
        """The neurons that a setting of the sliders ablates: the top share of some layers, each by
        itself or all together; none of a layer in which the method did not choose.
        """
        scores = self.pairs[pair][1]
        first = scores.first_layer or 0
        some = [layer for layer in map(int, layers.split(",")) if layer >= first]
        mask = self._nothing.mask.clone()
        if some:
            which = "model" if per == "model" else "layer"
            mask[some] = NeuronScores(scores.values[some]).top_k(self.ratios[ratio], per=which).mask
        return NeuronSet(mask, self.view.units)

    @cached_property
    def _meters(self) -> dict[str, AblationMeter]:
        """By ablation; the model as it is, is measured once."""
        general = self.texts[0].tokens[None] if self.general is None else self.general
        meters: dict[str, AblationMeter] = {}
        baseline = None
        for name in self.ablations:
            meters[name] = AblationMeter(
                self.view.model,
                [*self.texts, *self.others],
                general[:GENERAL_ROWS],
                ABLATIONS[name](general, 0),
                self.decode,
                baseline=baseline,
                units=self.view.units,
            )
            baseline = meters[name].baseline
        return meters

    def _step(self, pair: int, ratio: int, per: str, layers: str, ablation: str) -> dict[str, Any]:
        text, meter = self.pairs[pair][0], self._meters[ablation]
        chosen = self.chosen(pair, ratio, per, layers)
        effect = meter.effect(text, chosen)
        p, predicted = meter.probabilities(text, chosen)
        return {
            "layers": chosen.mask.sum(1).tolist(),
            "p": _permille(p),
            "wrong": self._wrong(text, predicted),
            "accuracy": [round(change, 4) for change in effect["accuracy"]],
            "perplexity": round(effect["perplexity"], 2),
        }

    def _wrong(self, text: int, predicted: Int[Tensor, " suffix"]) -> list[list[Any]]:
        """Where each piece begins in which a token is not predicted, and what is predicted."""
        one = self.texts[text]
        true, guess = one.tokens.tolist(), [*one.prefix.tolist(), *predicted.tolist()]
        return [
            [start, text_after(self.decode, true[:start], guess[start:end])]
            for start, end, _ in pieces(self.decode, true)
            if guess[start:end] != true[start:end]
        ]

    def _layer(self, pair: int, layer: int, ablation: str) -> dict[str, Any]:
        text, found = self.pairs[pair][0], {"p": [], "self": []}
        for ratio in range(len(self.ratios)):
            chosen = self.chosen(pair, ratio, "layer", str(layer))
            p, predicted = self._meters[ablation].probabilities(text, chosen)
            right = (predicted == self.texts[text].suffix).float().mean()
            found["p"].append(_permille(p))
            found["self"].append(round(float(right), 4))
        return found

    def _card(self, pair: int, layer: int, neuron: int) -> dict[str, Any]:
        text = self.pairs[pair][0]
        row, fires = self._written(text, layer, neuron)
        logits = unembed(self.view.model, torch.stack([row, torch.zeros_like(row)])).cpu()
        promoted = logits[0] - logits[1]
        order = promoted.argsort(descending=True)
        shown = {"promoted": order[:PROMOTED], "suppressed": order.flip(0)[:PROMOTED]}
        words = {
            name: [[self.decode([int(i)]), round(float(promoted[i]), 3)] for i in tokens]
            for name, tokens in shown.items()
        }
        same_text = [one for i, one in self.pairs if i == text]
        return {
            **words,
            "fires": [round(x, 3) for x in fires.float().cpu().tolist()],
            "ranks": [[short_title(one.method), *_ranks(one, layer, neuron)] for one in same_text],
            "elsewhere": [
                [one.sequence_id, _ranks(one, layer, neuron)[0]] for one in self._elsewhere
            ],
        }

    def _written(
        self, text: int, layer: int, neuron: int
    ) -> tuple[Float[Tensor, " d_model"], Float[Tensor, " pos"]]:
        """The direction that a unit writes, and how much of it at each position; of a head the mean
        of what it writes, and its norms.
        """
        act = activations(self.view, self.texts[text].tokens[None])[layer][0, :, neuron]
        rows = self.view.rows(layer)[neuron]
        if act.ndim == 1:
            return rows, act
        written = act.flatten(1) @ rows.flatten(0, -2)
        return written.mean(0), written.norm(dim=-1)

    @cached_property
    def _elsewhere(self) -> list[NeuronScores]:
        """Attribution scores of the other texts: one forward and one backward pass of each."""
        if not self.others:
            return []
        with torch.enable_grad():
            return list(Attribution(units=self.view.units).map(self.view.model, self.others))

    # What is shown

    @cached_property
    def data(self) -> dict[str, Any]:
        """What the view needs before it asks."""
        meter = self._meters[self.ablations[0]]
        texts = [
            {
                "id": one.id,
                "pieces": pieces(self.decode, one.tokens.tolist()),
                "prefix": one.n_prefix,
                "p": _permille(meter.probabilities(i, self._nothing)[0]),
            }
            for i, one in enumerate(self.texts)
        ]
        colours = looks(one.method for _, one in self.pairs)
        pairs = [
            {
                "text": text,
                "method": short_title(one.method),
                "colour": colours[one.method].colour,
                "map": _quantized(one),
                "top": one.to_frame().head(CARDS)[["layer", "neuron"]].to_numpy().tolist(),
            }
            for text, one in self.pairs
        ]
        return {
            "model": model_name(self.view.model),
            "shape": [self.view.n_layers, self.view.n_neurons],
            "units": [self.view.units.one, self.view.units.name],
            "texts": texts,
            "pairs": pairs,
            "ratios": self.ratios,
            "start": self.start,
            "layers": self._layer_choices(),
            "ablations": self.ablations,
            "names": [one.id for one in meter.sequences],
            "accuracy": [round(row["accuracy"], 4) for row in meter.before],
            "perplexity": self.general is not None and round(meter.before[0]["perplexity"], 2),
        }

    @property
    def _nothing(self) -> NeuronSet:
        mask = torch.zeros(self.view.n_layers, self.view.n_neurons, dtype=torch.bool)
        return NeuronSet(mask, self.view.units)

    def _layer_choices(self) -> list[list[str]]:
        """Names and layers of the positions of the slider; layer 0, which every text needs, is in
        few.
        """
        every = list(range(self.view.n_layers))
        choices = {"all layers": every}
        if every[1:]:
            above = f"layers 1 to {every[-1]}"
            choices = {above: every[1:], **choices} | {f"only layer {k}": [k] for k in every}
            for k in every[1:] if every[2:] else []:
                choices[f"{above} without {k}"] = [layer for layer in every[1:] if layer != k]
        return [[name, ",".join(map(str, layers))] for name, layers in choices.items()]

    def _grid(self, ablations: Sequence[str]) -> dict[str, Any]:
        """The answers that a saved file holds: every position of the sliders, and the cards of each
        method's best neurons.
        """
        layers = [layers for _, layers in self._layer_choices()]
        requests: list[Request] = []
        for pair, shown in enumerate(self.data["pairs"]):
            ratios = range(len(self.ratios))
            for step in itertools.product(ratios, ["layer", "model"], layers, ablations):
                if step[1] == "layer" or "," in step[2]:  # of one layer both are the same
                    requests.append(["step", pair, *step])
            for layer in itertools.product(range(self.view.n_layers), ablations):
                requests.append(["layer", pair, *layer])
            requests += [["card", pair, *neuron] for neuron in shown["top"]]
        return {"/".join(map(str, request)): self.answer(request) for request in requests}

    def html(self, ablations: Sequence[str] | None = None) -> str:
        """The view as a piece of HTML that needs neither kernel nor network, for a page or for
        ``IPython.display.HTML``.

        Every position of the sliders is measured, a fraction of a second each, so ``explore`` with
        few ``ratios`` is faster.

        Args:
            ablations: Those that the page offers; by default the first only.
        """
        ablations = list(ablations or self.ablations[:1])
        data = self.data | {"ablations": ablations, "answers": self._grid(ablations)}
        packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        name, script = f"tl-localize-{id(self)}", SCRIPT.read_text(encoding="utf-8")
        start = f"mount(document.getElementById({name!r}), {packed});"
        still = f'<div id="{name}">{self._repr_html_()}</div>'
        return f'{still}<script type="module">{script}\n{start}</script>'

    def save(self, path: str | Path, ablations: Sequence[str] | None = None) -> None:
        """Write the view, as of ``html``, as one file that opens offline."""
        dark = '<meta name="color-scheme" content="light dark">'
        head = f'<head><meta charset="utf-8">{dark}<title>{escape(repr(self))}</title></head>'
        page = f'<!doctype html><html lang="en">{head}<body>{self.html(ablations)}</body></html>'
        write_whole(Path(path), page.encode())

    def _repr_html_(self) -> str:
        """The token view of the first setting, where no script runs."""
        text, meter = self.pairs[0][0], self._meters[self.ablations[0]]
        chosen = self.chosen(0, self.start, "layer", self._layer_choices()[0][1])
        before, after = (meter.probabilities(text, one)[1] for one in (self._nothing, chosen))
        one, units = self.texts[text], chosen.units.name
        return TokenView(one, before, after, self.decode, len(chosen), units).html()

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
            hint = (
                "For the interactive view: pip install anywidget ipywidgets, or "
                "view.save('explorer.html')."
            )
            return shown | {"text/html": f"<p>{escape(hint)}</p>{shown['text/html']}"}, {}
        return live | shown, about


def _ranks(scores: NeuronScores, layer: int, neuron: int) -> tuple[int, int]:
    """From 1: among all neurons, and among those of its layer."""
    higher = scores.values > scores.values[layer, neuron]
    return int(higher.sum()) + 1, int(higher[layer].sum()) + 1


def _permille(p: Float[Tensor, " token"]) -> list[int]:
    return (1000 * p).round().int().tolist()


def _quantized(scores: NeuronScores) -> str:
    """Scores as bytes, in base64: from 0 for the lowest positive score of their layer, or what is
    not positive, to 255 for the highest.
    """
    values = scores.values.clone()
    values[: scores.first_layer or 0] = 0
    low, high = values.amin(1, keepdim=True).clamp(min=0), values.amax(1, keepdim=True)
    shares = (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
    levels = (255 * shares.clamp(0, 1)).round().to(torch.uint8)
    return base64.b64encode(levels.numpy().tobytes()).decode()
