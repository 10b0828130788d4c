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
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Integer
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
from tl_localize.report.token_view import TokenView
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.units import NEURONS

RATIOS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25)
N_OTHERS = 6  # shipped texts that stand for the others, of a shipped model
GENERAL_ROWS = 1  # of general text, for the perplexity
CARDS = 16  # neurons of each method whose cards a saved file holds
PROMOTED = 8  # tokens on a card
HIGH = 0.01  # share of the model's neurons that "ranks high" means
Request = Sequence[Any]


class Explorer:
    """The view that ``explore`` makes: a notebook shows it, ``save`` writes it, ``answer`` gives its
    numbers.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequence: MemorizedSequence | Sequence[MemorizedSequence],
        scores: NeuronScores | Iterable[NeuronScores],
        others: Sequence[MemorizedSequence] | None = None,
        *,
        general: Integer[Tensor, "sequence pos"] | None = None,
        ratios: Sequence[Real] = RATIOS,
        ablations: Sequence[str] | None = None,
        ratio: Real = 0.1,
        decode: Decode | None = None,
    ) -> None:
        scores = [scores] if isinstance(scores, NeuronScores) else list(scores)
        self.view, self.decode = (
            NeuronView(model, scores[0].units if scores else NEURONS),
            decode or decoder(model),
        )
        self.texts = check_sequences(
            model, [sequence] if isinstance(sequence, MemorizedSequence) else sequence
        )
        shipped = is_reference(model_name(model))
        if others is None:
            known = {one.fingerprint for one in self.texts}
            pool = (
                [one for one in reference_sequences(model) if one.fingerprint not in known]
                if shipped
                else []
            )
            others = pool[:: max(1, len(pool) // N_OTHERS)][:N_OTHERS]
        self.others, self.general = (
            list(others),
            held_out_tokens()[:16] if general is None and shipped else general,
        )
        for one in (*ratios, ratio):
            check_ratio("ratio", one)
        self.ratios = sorted(float(one) for one in ratios if round(self.view.n_neurons * one))
        self.ablations = list(ablations or (ABLATIONS if self.general is not None else ["zero"]))
        if not self.ratios or not set(self.ablations) <= set(ABLATIONS):
            given = f"the ratios {list(ratios)} and the ablations {self.ablations}"
            raise ValueError(
                f"ratios must take a neuron of each layer, and ablations be of {list(ABLATIONS)}, "
                f"got {given}."
            )
        if self.general is None and self.ablations != ["zero"]:
            raise ValueError(
                f"general must be text for the ablations {self.ablations}, got None. Pass token "
                "ids [sequence pos]."
            )
        self.start = min(range(len(self.ratios)), key=lambda i: abs(self.ratios[i] - ratio))
        shape, ids = (self.view.n_layers, self.view.n_neurons), [one.id for one in self.texts]
        self.pairs: list[tuple[int, NeuronScores]] = []  # the index of a text, and scores for it
        for one in scores:
            same = tuple(one.values.shape) == shape and repr(one.units) == repr(self.view.units)
            if not same or (len(ids) > 1 and one.sequence_id not in ids):
                wanted = (
                    f"this model {shape}, of {self.view.units.name} and of one of the texts {ids}"
                )
                raise ValueError(f"scores must be of {wanted}, got {one!r}. Localize them again.")
            self.pairs.append((ids.index(one.sequence_id) if len(ids) > 1 else 0, one))
        if not self.pairs:
            raise ValueError(
                "scores must hold those of at least one method, got none. Call a method: "
                "Attribution()(model, sequence)."
            )
        for text in sorted(
            {text for text, _ in self.pairs}
            - {text for text, one in self.pairs if one.method == RandomBaseline.name}
        ):
            self.pairs.append(
                (text, RandomBaseline(units=self.view.units)(model, self.texts[text]))
            )
        self._meters: dict[str, AblationMeter] = {}
        self._answers: dict[str, Any] = {}

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(short_title(one.method) for _, one in self.pairs))
        return f"Explorer({', '.join(one.id for one in self.texts)!r}: {methods}; {len(self.others)} other texts)"

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
        if key not in self._answers:
            kinds: dict[str, Any] = {"step": self._step, "layer": self._layer, "card": self._card}
            with torch.no_grad():
                self._answers[key] = kinds[request[0]](*request[1:])
        return self._answers[key]

    def chosen(self, pair: int, ratio: int, per: str, layers: str) -> NeuronSet:
        """The neurons that a setting of the sliders ablates: the top share of some layers, each by
        itself or all together.
        """
        values = self.pairs[pair][1].values
        some = [int(layer) for layer in layers.split(",")]
        mask = torch.zeros_like(values, dtype=torch.bool)
        mask[some] = (
            NeuronScores(values[some])
            .top_k(self.ratios[ratio], per="model" if per == "model" else "layer")
            .mask
        )
        return NeuronSet(mask, self.view.units)

    def _meter(self, ablation: str) -> AblationMeter:
        if ablation not in self._meters:
            general = self.texts[0].tokens[None] if self.general is None else self.general
            baseline = next(iter(self._meters.values())).baseline if self._meters else None
            sequences = [*self.texts, *self.others]
            how = ABLATIONS[ablation](general, 0)
            text, units = general[:GENERAL_ROWS], self.view.units
            self._meters[ablation] = AblationMeter(
                self.view.model, sequences, text, how, self.decode, baseline=baseline, units=units
            )
        return self._meters[ablation]

    def _step(self, pair: int, ratio: int, per: str, layers: str, ablation: str) -> dict[str, Any]:
        text, meter, chosen = (
            self.pairs[pair][0],
            self._meter(ablation),
            self.chosen(pair, ratio, per, layers),
        )
        effect = meter.effect(text, chosen)
        after = [
            row["accuracy"] + change
            for row, change in zip(meter.before, effect["accuracy"], strict=True)
        ]
        p, predicted = meter.probabilities(text, chosen)
        wrong = (predicted != self.texts[text].suffix).nonzero().flatten().tolist()
        return {
            "n": len(chosen),
            "layers": chosen.mask.sum(1).tolist(),
            "p": _permille(p),
            "wrong": [[i, self.decode([int(predicted[i])])] for i in wrong],
            "self": round(after[text], 4),
            "neg": self._neg(text, after),
            "others": [
                [one.id, round(after[i], 3)] for i, one in enumerate(meter.sequences) if i != text
            ],
            "perplexity": self._perplexity(meter, effect["perplexity"]),
        }

    def _neg(self, text: int, accuracies: list[float]) -> float | None:
        """Mean accuracy of the other sequences."""
        others = accuracies[:text] + accuracies[text + 1 :]
        return round(sum(others) / len(others), 4) if others else None

    def _perplexity(self, meter: AblationMeter, change: float = 0) -> float | None:
        return None if self.general is None else round(meter.before[0]["perplexity"] + change, 2)

    def _layer(self, pair: int, layer: int, ablation: str) -> dict[str, Any]:
        text, meter = self.pairs[pair][0], self._meter(ablation)
        found = [
            meter.probabilities(text, self.chosen(pair, i, "layer", str(layer)))
            for i in range(len(self.ratios))
        ]
        right = [
            float((predicted == self.texts[text].suffix).float().mean()) for _, predicted in found
        ]
        return {"p": [_permille(p) for p, _ in found], "self": [round(share, 4) for share in right]}

    def _card(self, pair: int, layer: int, neuron: int) -> dict[str, Any]:
        text, own = self.pairs[pair]
        row, fires = self._written(text, layer, neuron)
        logits = unembed(self.view.model, torch.stack([row, torch.zeros_like(row)]))
        promoted = (logits[0] - logits[1]).cpu()
        order = promoted.argsort(descending=True)
        ranks = [
            [short_title(one.method), *self._rank(one, layer, neuron)]
            for i, one in self.pairs
            if i == text
        ]
        elsewhere = sorted(
            (self._rank(one, layer, neuron)[0], one.sequence_id) for one in self._elsewhere
        )
        return {
            "fires": [round(x, 3) for x in fires.float().cpu().tolist()],
            "promoted": [
                [self.decode([int(i)]), round(float(promoted[i]), 3)] for i in order[:PROMOTED]
            ],
            "suppressed": [
                [self.decode([int(i)]), round(float(promoted[i]), 3)]
                for i in order.flip(0)[:PROMOTED]
            ],
            "ranks": ranks,
            "score": float(own.values[layer, neuron]),
            "elsewhere": [
                [name, rank] for rank, name in elsewhere if rank <= HIGH * own.values.numel()
            ],
            "compared": len(self._elsewhere),
        }

    def _written(
        self, text: int, layer: int, neuron: int
    ) -> tuple[Float[Tensor, " d_model"], Float[Tensor, " pos"]]:
        """The direction that a unit writes, and how much of it at each position; of a head the mean
        of what it writes, and its norms.
        """
        act, rows = (
            activations(self.view, self.texts[text].tokens[None])[layer][0, :, neuron],
            self.view.rows(layer)[neuron],
        )
        if act.ndim == 1:
            return rows, act
        written = act.flatten(1) @ rows.flatten(0, -2)
        return written.mean(0), written.norm(dim=-1)

    @staticmethod
    def _rank(scores: NeuronScores, layer: int, neuron: int) -> tuple[int, int]:
        """From 1: among all neurons, and among those of its layer."""
        value = scores.values[layer, neuron]
        return int((scores.values > value).sum()) + 1, int((scores.values[layer] > value).sum()) + 1

    @cached_property
    def _elsewhere(self) -> list[NeuronScores]:
        """Attribution scores of the other texts: one forward and one backward pass of each."""
        with torch.enable_grad():
            return (
                list(Attribution(units=self.view.units).map(self.view.model, self.others))
                if self.others
                else []
            )

    # What is shown

    @cached_property
    def data(self) -> dict[str, Any]:
        """What the view needs before it asks."""
        meter = self._meter(self.ablations[0])
        nothing = NeuronSet(
            torch.zeros(self.view.n_layers, self.view.n_neurons, dtype=torch.bool), self.view.units
        )
        accuracies = [row["accuracy"] for row in meter.before]
        texts = [
            {
                "id": one.id,
                "tokens": [self.decode([token]) for token in one.tokens.tolist()],
                "prefix": one.n_prefix,
                "p": _permille(meter.probabilities(i, nothing)[0]),
                "self": round(accuracies[i], 4),
                "neg": self._neg(i, accuracies),
            }
            for i, one in enumerate(self.texts)
        ]
        colours = looks(one.method for _, one in self.pairs)
        pairs = [
            {
                "text": text,
                "method": short_title(one.method),
                "colour": colours[one.method].colour,
                "map": _quantized(one.values),
                "top": [
                    [int(a), int(b), float(c)]
                    for a, b, c in one.to_frame().head(CARDS).itertuples(index=False)
                ],
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
            "n_others": len(self.texts) + len(self.others) - 1,
            "perplexity": self._perplexity(meter),
        }

    def _layer_choices(self) -> list[list[Any]]:
        """Names and layers of the positions of the slider; layer 0, which every text needs, is in
        few.
        """
        n = self.view.n_layers
        upper = list(range(1, n)) or [0]
        choices = [[f"layers 1 to {n - 1}", upper]] if n > 1 else []
        choices += [["all layers", list(range(n))]] + [
            [f"only layer {k}", [k]] for k in range(n if n > 1 else 0)
        ]
        if n > 2:
            choices += [
                [f"layers 1 to {n - 1} without {k}", [layer for layer in upper if layer != k]]
                for k in upper
            ]
        return [[name, ",".join(map(str, layers))] for name, layers in choices]

    def _grid(self, ablations: Sequence[str]) -> dict[str, Any]:
        """The answers that a saved file holds: every position of the sliders, and the cards of each
        method's best neurons.
        """
        choices = [layers for _, layers in self._layer_choices()]
        steps = itertools.product(
            range(len(self.pairs)), range(len(self.ratios)), ("layer", "model"), choices, ablations
        )
        requests: list[Request] = [
            ("step", *step) for step in steps if step[2] == "layer" or "," in step[3]
        ]
        requests += [
            ("layer", *one)
            for one in itertools.product(
                range(len(self.pairs)), range(self.view.n_layers), ablations
            )
        ]
        requests += [
            ("card", i, layer, neuron)
            for i, pair in enumerate(self.data["pairs"])
            for layer, neuron, _ in pair["top"]
        ]
        return {"/".join(map(str, request)): self.answer(request) for request in requests}

    def html(self, ablations: Sequence[str] | None = None) -> str:
        """The view as a piece of HTML that needs neither kernel nor network, for a page or for
        ``IPython.display.HTML``.

        Every position of the sliders is measured, a fraction of a second each, so ``explore`` with
        few ``ratios`` is faster.

        Args:
            ablations: those that the page offers; by default the first only.
        """
        ablations = list(ablations or self.ablations[:1])
        data = self.data | {"ablations": ablations, "answers": self._grid(ablations)}
        packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        name, script = f"tl-localize-{id(self)}", SCRIPT.read_text(encoding="utf-8")
        start = f"mount(document.getElementById({name!r}), {packed});"
        return f'<div id="{name}">{self._repr_html_()}</div><script type="module">{script}\n{start}</script>'

    def save(self, path: str | Path, ablations: Sequence[str] | None = None) -> None:
        """Write the view, as of ``html``, as one file that opens offline."""
        title = f"<title>{escape(repr(self))}</title>"
        page = f'<!doctype html><html lang="en"><head><meta charset="utf-8">{title}</head><body>{self.html(ablations)}</body></html>'
        write_whole(Path(path), page.encode())

    def _repr_html_(self) -> str:
        """The token view of the first setting, where no script runs."""
        text, meter = self.pairs[0][0], self._meter(self.ablations[0])
        chosen = self.chosen(0, self.start, "layer", self._layer_choices()[0][1])
        before, (_, after) = (
            torch.tensor(meter.baseline["predicted"][text]),
            meter.probabilities(text, chosen),
        )
        return TokenView(
            self.texts[text], before, after, self.decode, len(chosen), chosen.units.name
        ).html()

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
            return live | shown, about
        except ImportError:
            hint = (
                "For the interactive view: pip install 'tl_localize[notebooks]', or "
                "view.save('explorer.html')."
            )
            return shown | {"text/html": f"<p>{escape(hint)}</p>{shown['text/html']}"}, {}


def explore(
    model: LanguageModel,
    sequence: MemorizedSequence | Sequence[MemorizedSequence],
    scores: NeuronScores | Iterable[NeuronScores],
    others: Sequence[MemorizedSequence] | None = None,
    *,
    general: Integer[Tensor, "sequence pos"] | None = None,
    ratios: Sequence[Real] = RATIOS,
    ablations: Sequence[str] | None = None,
    ratio: Real = 0.1,
    decode: Decode | None = None,
) -> Explorer:
    """Explore which neurons some scores name, and what the model forgets without them.
    A notebook shows the view.

    Sliders choose the share of the neurons and the layers. The view shows the probability of each
    true token before and after, the accuracy on this text (Self) and on the others (Neg), the
    neurons of each layer, accuracy against ratio for each layer, and maps of layer x neuron and
    layer x token. A click on a neuron shows its card. Two methods or texts stand side by side;
    equally many random neurons are added as a control.

    Args:
        sequence: a text that the model recites, or several to choose from.
        scores: of one method or of several, all of one kind of unit; of several texts, each with
            its ``sequence_id``.
        others: the texts that should survive; of a shipped model some of its shipped texts,
            otherwise none.
        general: general text for perplexity, mean and resample; of a shipped model the shipped
            text.
        ratios: shares of the neurons that the slider offers; shares that take no neuron of a layer
            are left out.
        ablations: of ``"zero"``, ``"mean"``, ``"resample"``; by default all, without general text
            only zero.
        ratio: the share to begin with; the nearest of ``ratios`` is taken.
        decode: token ids -> text; the tokenizer's unless given.

    Raises:
        ValueError: scores of another model or of a text that is not given, an unknown ablation, a
            ratio outside (0, 1].

    >>> view = explore(model, sequence, Attribution()(model, sequence), few[1:], general=text, ratios=(0.05,), ablations=["zero"])
    >>> view.save(folder / "explorer.html")
    >>> (folder / "explorer.html").stat().st_size < 500_000
    True
    """
    return Explorer(
        model,
        sequence,
        scores,
        others,
        general=general,
        ratios=ratios,
        ablations=ablations,
        ratio=ratio,
        decode=decode,
    )


SCRIPT = Path(__file__).with_name("explorer.js")


def _permille(p: Float[Tensor, " token"]) -> list[int]:
    return (1000 * p).round().int().tolist()


def _quantized(values: Float[Tensor, "layer neuron"]) -> str:
    """Scores as bytes, in base64: from 0 for the lowest positive score of their layer, or what is
    not positive, to 255 for the highest.
    """
    low, high = values.amin(1, keepdim=True).clamp(min=0), values.amax(1, keepdim=True)
    shares = (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
    return base64.b64encode(
        (255 * shares.clamp(0, 1)).round().to(torch.uint8).numpy().tobytes()
    ).decode()
