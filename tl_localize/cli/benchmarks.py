"""tl-localize inj | del | rev | tune: from options to a benchmark, which is run and published."""

import json
from argparse import Namespace
from dataclasses import replace
from typing import Any

from tl_localize.cli.collecting import collect_reference
from tl_localize.cli.publish import TUNED, conclude
from tl_localize.cli.running import compute, folder_of, load, own_data, say
from tl_localize.collect.known import known
from tl_localize.evals import presets
from tl_localize.evals.del_benchmark import DelBenchmark
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.evals.rev_benchmark import N_GENERAL, RevBenchmark
from tl_localize.evals.sparing import check_max_lost, sparing_runs
from tl_localize.evals.tuning import expand, read_settings
from tl_localize.execution import Store
from tl_localize.files import reading, write_text
from tl_localize.injection import RECIPES
from tl_localize.methods import Localizer, ZeroOut
from tl_localize.models import is_reference
from tl_localize.neurons import LanguageModel, check_choice
from tl_localize.readers import Data, read_tokens
from tl_localize.reference import N_DEV, held_out_tokens, inj_sequences, reference_sequences
from tl_localize.sequences import MemorizedSequence
from tl_localize.stats import counted
from tl_localize.units import NEURONS, UNITS


def screened_settings(given: Namespace) -> dict[str, Any]:
    """Settings from a file, over a Zero-Out that ablates few neurons."""
    tuned = read_settings(given.settings) if given.settings else {}
    if UNITS[given.units] != NEURONS:  # heads are few
        return tuned
    return {ZeroOut.name: {"screen": presets.SCREEN}} | tuned


def say_screen(methods: list[Localizer]) -> None:
    """Say where a Zero-Out ablates few neurons."""
    for method in methods:
        if isinstance(method, ZeroOut) and method.screen is not None:
            say(
                f"Zero-Out ablates {100 * method.screen:g} % of the neurons and estimates the "
                "others; --set zero_out.screen=None ablates all, "
                f"{1 / method.screen:.3g} times as many."
            )


def run_inj(given: Namespace) -> None:
    units = UNITS[given.units]
    tuned = screened_settings(given)
    # mistakes are found before the model is loaded
    say_screen(presets.make_methods(given.methods, given.set, tuned, units=units))
    say_settings(given, "inj")
    data = own_data(given)
    others = f"distractors-{given.distractors}" if given.distractors else ""
    folder = folder_of(given, "inj", given.model, given.units, others)
    model, limit = load(given), given.limit
    store = Store(folder)
    if limit is None and data is None and is_reference(given.model):
        limit = presets.INJ_SENTENCES
    sequences = inj_sequences(model, data, n_max=limit)
    sentences = counted(len(sequences), "sentence")
    say(
        f"{sentences} (the first {N_DEV} of the data are dev sentences and left out), "
        f"model {given.model}"
    )
    runs = presets.inj_runs(
        model,
        given.model,
        sequences,
        given.methods,
        given.set,
        tuned,
        given.ratio,
        units,
        seed=given.seed,
        learning_rate=given.learning_rate,
        max_steps=given.max_steps,
        distractors=given.distractors,
    )
    conclude(store, compute(given, runs, store))


def run_del(given: Namespace) -> None:
    units = UNITS[given.units]
    # mistakes are found before the model is loaded
    tuned = read_settings(given.settings) if given.settings else {}
    methods = presets.del_methods(given.methods, given.set, given.model, tuned, given.seed, units)
    if given.max_others_lost is not None:
        check_max_lost(given.max_others_lost)
    data = own_data(given)
    say_settings(given, "del")
    folder = folder_of(given, "del", given.model, given.units, given.ablation)
    model = load(given)
    store = Store(folder)
    sequences, n_dev, text = del_texts(given, model, data, store)
    n_test = len(sequences) - n_dev
    own = min(presets.DEL_TARGETS, n_test)
    n_targets = own if given.targets is None and given.data is None else given.targets
    max_lost = presets.max_lost_of(given.model, given.max_others_lost, given.ratio, units)
    ratios = given.ratio or presets.del_ratios(given.model, units)
    benchmark = DelBenchmark(
        model,
        sequences,
        text,
        n_dev=n_dev,
        n_targets=n_targets,
        ratios=tuple(ratios) if max_lost is None else (1.0,),
        ablation=given.ablation,
        seed=given.seed,
        units=units,
    )
    say(
        f"{n_targets or n_test} of {n_test} sequences are targets ({n_dev} dev sequences are left "
        f"out), model {given.model}"
    )
    runs: Any = [(benchmark, methods)]
    if max_lost is not None:
        say(
            f"Shares of a layer: 1, 2, 4, ... {units.name}, until the others have lost more than "
            f"{max_lost:g} points of accuracy (Neg)."
        )
        runs = sparing_runs(benchmark, methods, store, max_lost)
    conclude(store, compute(given, runs, store))


def del_texts(
    given: Namespace, model: LanguageModel, data: Data | None, store: Store
) -> tuple[list[MemorizedSequence], int, Any]:
    """Sequences in random order, how many of the first are dev ones, and general text."""
    limit = given.limit
    if data is None and is_reference(given.model):
        limit = limit or presets.DEL_SEQUENCES
    sequences, n_dev, text = texts_of(given, model, data, store, given.n_dev)
    return presets.drawn_first(sequences, n_dev, given.seed)[:limit], n_dev, text


def texts_of(
    given: Namespace,
    model: LanguageModel,
    data: Data | None,
    store: Store,
    n_dev: int,
    place: int = 0,
) -> tuple[list[MemorizedSequence], int, Any]:
    """``presets.del_data`` of the user's data or of a shipped model's collection; else texts that
    the model knows, the best of each category for the test, those in another place as dev ones, and
    general text.
    """
    if data is None and is_reference(given.model):
        data = collect_reference(given, model, store.folder / "collection", n_dev)
    if data is not None:
        return presets.del_data(model, data, given.general, n_dev)
    recited = known(model, given.min_accuracy)
    say(f"{recited}. {recited.advice()}")
    text = presets.general_text(model, given.general)
    return recited.diverse(place=place), n_dev if place else 0, text


def run_rev(given: Namespace) -> None:
    units = UNITS[given.units]
    # mistakes are found before the model is loaded
    defaults = (presets.of_units(units, {}), presets.sparing(0), screened_settings(given))
    methods = presets.make_methods(given.methods, given.set, *defaults, units=units)
    say_screen(methods)
    ratios = given.ratio or (RevBenchmark.ratios if units == NEURONS else presets.REV_HEAD_RATIOS)
    data = own_data(given)
    folder = folder_of(given, "rev", given.model, given.units, given.recipe, given.before or "")
    model = load(given)
    before = load(given, given.before) if given.before else None
    store = Store(folder)
    if before is None:
        sequences = inj_sequences(model, data)
    else:
        sequences = list(data.sequences(model)) if data else reference_sequences(model)
    recipe = RECIPES[given.recipe]
    general = held_out_tokens(model)[: None if recipe.general else N_GENERAL]
    if given.general:
        general = read_tokens(given.general)
    benchmark = RevBenchmark(
        model,
        sequences,
        general,
        before=before,
        recipe=recipe,
        n_sequences=given.n_sequences,
        n_groups=given.n_groups,
        ratios=tuple(sorted(ratios)),
        seed=given.seed,
        units=units,
    )
    groups, texts = len(benchmark.groups), len(benchmark.groups[0])
    say(f"{counted(groups, 'group')} of {counted(texts, 'text')}, model {given.model}")
    conclude(store, compute(given, [(benchmark, methods)], store))


def run_tune(given: Namespace) -> None:
    units = UNITS[given.units]
    data = own_data(given)
    of_inj = given.benchmark == "inj"
    default = presets.inj_ratios if of_inj else presets.del_ratios
    ratio = given.ratio or max(default(given.model, units))
    methods = candidates(given, ratio)
    say_settings(given, given.benchmark)
    folder = folder_of(given, "tune", given.benchmark, given.model, given.units)
    model = load(given)
    store = Store(folder)
    if of_inj:
        benchmark = InjBenchmark(
            model,
            inj_sequences(model, data, dev=True),
            ratio=ratio,
            distractors=given.distractors,
            units=units,
        )
    else:
        sequences, n_dev, text = texts_of(given, model, data, store, N_DEV, place=1)
        dev = sequences[:n_dev]
        benchmark = DelBenchmark(model, dev, text, ratios=(ratio,), n_dev=0, units=units)
    write_text(store.folder / TUNED, "{}")
    conclude(store, compute(given, [(benchmark, methods)], store))


def candidates(given: Namespace, ratio: float) -> list[Localizer]:
    """The method with each setting of its grid, over what the grid leaves open."""
    grids = presets.PAPER["grids"]
    if given.grid:
        rule = 'grid must be a JSON file such as {"slimming": {"steps": [60, 200]}}'
        with reading(rule, given.grid):
            grids = json.loads(given.grid.read_bytes())
    check_choice("method", given.method, grids)
    units, asked = UNITS[given.units], (given.method, given.set)
    if given.benchmark == "inj":
        paper = presets.of_units(units, presets.paper_settings(given.model, "inj", ratio))
        (fixed,) = presets.make_methods(*asked, presets.sparing(0), paper, units=units)
    else:
        (fixed,) = presets.del_methods(*asked, given.model, units=units)
    grid = grids[given.method]
    found: list[Localizer] = []
    for one in expand(given.method, grid):
        found.append(replace(fixed, **{axis: getattr(one, axis) for axis in grid}))
    return found


def say_settings(given: Namespace, benchmark: Any) -> None:
    """Say where the settings of learned masks come from that the user leaves open."""
    if given.units == NEURONS.name:
        say(presets.settings_source(given.model, benchmark))
    else:
        say(f"Default settings: they were chosen for neurons, not {given.units}.")
