"""What a run has where the user says nothing, and how names become methods, data and benchmarks. No
printing.

The command line and ``pytest benchmarks`` both take their settings from here, so that a committed
table is the output of one command.
"""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer
from torch import Tensor

from tl_localize.checks import check_choice
from tl_localize.collect import Collection
from tl_localize.evals.deletion.benchmark import DelBenchmark
from tl_localize.evals.inj.benchmark import InjBenchmark
from tl_localize.execution.store import Json
from tl_localize.methods import (
    METHODS,
    NAMED,
    RIVALS,
    IterativeAttribution,
    Localizer,
    RandomBaseline,
)
from tl_localize.model.loading import is_reference
from tl_localize.model.neurons import LanguageModel
from tl_localize.paper import paper_settings
from tl_localize.sequences import MemorizedSequence
from tl_localize.texts.readers import COLLECTED, Data, read_tokens
from tl_localize.texts.reference import N_DEV, held_out_tokens
from tl_localize.units import NEURONS, Units

MethodSettings = Mapping[str, Mapping[str, Any]]  # by method name

# of Zero-Out where a result is wanted soon: the share of the neurons with an exact score
SCREEN = 0.05
INJ_SENTENCES = 5  # of the committed table of each reference model, and of the default run
# of the default run on a reference model; the committed tables have "25,zero_out=6"
DEL_TARGETS = 8
# of a reference model, dev ones included: the others are what must not be forgotten
DEL_SEQUENCES = 105
DEL_GENERAL = 48  # rows of general text of a reference model
FIRST_LAYER = DelBenchmark.first_layer  # layer 0 is spared, and learned masks leave it open
# shares of a layer's heads
HEAD_RATIOS = (0.17, 0.34)  # that DEL ablates
HEADS_SHARE = 0.5  # that Iterative Attribution takes at most
REV_HEAD_RATIOS = (0.17, 0.34, 0.5, 0.67)  # that REV puts back
MAX_OTHERS_LOST = 1.0  # points of accuracy that other sequences may lose
GENERAL = "general.safetensors"  # in a collection's folder: text for the perplexity


def make_method(name: str, settings: Mapping[str, Any], units: Units = NEURONS) -> Localizer:
    """A method by name; ValueError where the name or a setting is unknown, with the nearest one.

    >>> make_method("slimming", {"steps": 60}).steps
    60
    """
    check_choice("methods", name, METHODS)
    for setting in settings:
        check_choice(f"settings of {name}", setting, default_settings(name))
    try:
        return METHODS[name](**settings, units=units)
    except TypeError as error:
        raise ValueError(
            f"settings of {name} must be values that it takes, got {settings} ({error}). "
            f"Its defaults are {default_settings(name)}."
        ) from error


def default_settings(name: str) -> Json:
    """The settings of a method with their defaults; the units have an option of their own."""
    return {f.name: f.default for f in fields(METHODS[name]) if f.name != "units"}


def make_methods(
    names: str, settings: Sequence[str] = (), *defaults: MethodSettings, units: Units = NEURONS
) -> list[Localizer]:
    """Methods by name, with settings such as ``hard_concrete.steps=200`` over the given defaults,
    of which the last ones count most.

    Args:
        names: Comma-separated; ``rivals`` stands for the rivals, ``all`` for all but them and
            Refined Attribution, whose sets are of one size.

    >>> make_methods("slimming", ["slimming.steps=60"], {"slimming": {"steps": 5}})[0].steps
    60
    """
    named = [method.name for method in NAMED]
    several = {
        "all": [name for name in METHODS if name not in named],
        "rivals": [method.name for method in RIVALS],
    }
    given = [name.strip() for name in names.split(",") if name.strip()]
    wanted = [name for written in given for name in several.get(written, [written])]
    values: dict[str, Json] = {name: {} for name in wanted}
    for name in wanted:
        for source in defaults:
            values[name].update(source.get(name, {}))
    for setting in settings:
        match = re.fullmatch(r"(\w+)\.(\w+)=(.*)", setting)
        if not match or match[1] not in values:
            raise ValueError(
                f"--set must read METHOD.SETTING=VALUE, of one of {', '.join(wanted)}, got "
                f"{setting!r}. For example hard_concrete.steps=200."
            )
        name, field, text = match.groups()
        try:
            values[name][field] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError):
            values[name][field] = text
    return [make_method(name, values[name], units) for name in wanted]


def first_layer_settings(first_layer: int) -> MethodSettings:
    """Settings of the methods that choose neurons together: they leave the layers below out while
    they choose, not only afterwards.
    """
    return {
        name: {"first_layer": first_layer}
        for name, method in METHODS.items()
        if hasattr(method, "first_layer")
    }


def first_layer_of(model: LanguageModel) -> int:
    """Layer 0 is spared, unless it is the only one."""
    return min(FIRST_LAYER, int(model.cfg.n_layers) - 1)


def sparing_layers(methods: Iterable[Localizer], model: LanguageModel) -> list[Localizer]:
    """Methods of DEL for this model: they were made before it was loaded."""
    first_layer = first_layer_of(model)
    return [
        replace(method, first_layer=first_layer)
        if getattr(method, "first_layer", None) == FIRST_LAYER
        else method
        for method in methods
    ]


def defaults_for(units: Units, of_neurons: MethodSettings) -> MethodSettings:
    """The paper's settings, which are of neurons. Of heads, of which there are few, Iterative
    Attribution ablates up to half of a layer.
    """
    return of_neurons if units == NEURONS else {IterativeAttribution.name: {"share": HEADS_SHARE}}


def del_methods(
    names: str,
    settings: Sequence[str] = (),
    model: str = "",
    tuned: MethodSettings | None = None,
    seed: int = 0,
    units: Units = NEURONS,
) -> list[Localizer]:
    """``make_methods`` for DEL: layer 0 is spared, and learned masks have the paper's settings for
    its models, then the tuned ones.
    """
    defaults = [
        defaults_for(units, paper_settings(model, "del")),
        tuned or {},
        first_layer_settings(FIRST_LAYER),
        {RandomBaseline.name: {"seed": seed}},
    ]
    return make_methods(names, settings, *defaults, units=units)


def inj_ratios(model: str, units: Units = NEURONS) -> list[float]:
    """The paper's two shares of the rows of W_out; 3 % for the reference models, into which
    sentences can be injected at that ratio.

    Of heads about a sixth of all of them, with all their rows of W_O: on average one of the six
    heads of a layer of the reference models.
    """
    if units != NEURONS:
        return [HEAD_RATIOS[0]]
    return [0.03] if is_reference(model) else [0.01, 0.001]


def inj_methods(
    names: str,
    settings: Sequence[str] = (),
    model: str = "",
    tuned: MethodSettings | None = None,
    ratio: float = 0.01,
    units: Units = NEURONS,
) -> list[Localizer]:
    """``make_methods`` for INJ, whose rows lie in all layers: learned masks have the paper's
    settings for its models at this ratio, then the tuned ones.
    """
    paper = defaults_for(units, paper_settings(model, "inj", ratio))
    return make_methods(names, settings, first_layer_settings(0), paper, tuned or {}, units=units)


def inj_runs(
    model: LanguageModel,
    name: str,
    sequences: Sequence[MemorizedSequence],
    methods: str,
    settings: Sequence[str] = (),
    tuned: MethodSettings | None = None,
    ratios: Sequence[float] | None = None,
    units: Units = NEURONS,
    **options: Any,
) -> list[tuple[InjBenchmark, list[Localizer]]]:
    """INJ at each ratio, with its methods."""
    runs: list[tuple[InjBenchmark, list[Localizer]]] = []
    for ratio in ratios or inj_ratios(name, units):
        chosen = inj_methods(methods, settings, name, tuned, ratio, units)
        benchmark = InjBenchmark(model, sequences, ratio=ratio, units=units, **options)
        runs.append((benchmark, chosen))
    return runs


def del_ratios(model: str, units: Units = NEURONS) -> tuple[float, ...]:
    """The paper's two shares of a layer; larger ones for the reference models, of which those are
    too few neurons to forget anything.

    Of heads about a sixth and a third of each layer: one and two of the six of the reference
    models, two and four of twelve.
    """
    if units != NEURONS:
        return HEAD_RATIOS
    return (0.02, 0.1) if is_reference(model) else (0.001, 0.005)


def max_lost_of(
    model: str, max_others_lost: float | None, ratios: Sequence[float] | None, units: Units
) -> float | None:
    """How many points the other sequences may lose where shares of DEL are chosen by that; None
    where they are given, or the paper's or our own for this model.
    """
    if ratios:
        return None
    settled = is_reference(model) or paper_settings(model, "del") or units != NEURONS
    if settled or max_others_lost is not None:
        return max_others_lost
    return MAX_OTHERS_LOST


def del_data(
    model: LanguageModel, data: Data, general: Path | None = None, n_dev: int | None = None
) -> tuple[list[MemorizedSequence], int, Integer[Tensor, "sequence pos"]]:
    """Sequences, how many of the first are dev ones (by default those of a collection, of other
    data 5), and general text.
    """
    if n_dev is None:
        collected = data.path and (data.path / COLLECTED).is_file()
        n_dev = Collection.load(data.path).n_dev if data.path and collected else N_DEV
    general = general or collected_text(data.path)
    return list(data.sequences(model)), n_dev, read_general_text(model, general)


def collected_text(folder: Path | None) -> Path | None:
    """The general text of a collection's folder; None of other data."""
    if folder and (folder / COLLECTED).is_file() and (folder / GENERAL).is_file():
        return folder / GENERAL
    return None


def read_general_text(model: LanguageModel, path: Path | None) -> Integer[Tensor, "sequence pos"]:
    """Of a file of token ids, by default Python's docstrings."""
    if path:
        return read_tokens(path)
    return held_out_tokens(model)[:DEL_GENERAL]


def drawn_first(
    sequences: Sequence[MemorizedSequence], n_dev: int, seed: int = 0
) -> list[MemorizedSequence]:
    """The test sequences in random order, so that the first of them are a fair sample; the dev ones
    stay first.
    """
    order = np.random.default_rng(seed).permutation(np.arange(n_dev, len(sequences)))
    return [*sequences[:n_dev], *(sequences[i] for i in order)]
