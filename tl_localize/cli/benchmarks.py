"""tl-localize inj | del | rev | tune: from options to a benchmark, which is run and published."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxtyping import Integer
from torch import Tensor

from tl_localize.checks import check_choice, check_count, check_ratio
from tl_localize.cli.collecting import collect_reference
from tl_localize.cli.command_options import DelOptions, InjOptions, RevOptions, TuneOptions
from tl_localize.cli.messages import say
from tl_localize.cli.options import WHOLE, MemorizedOptions, MethodOptions
from tl_localize.cli.publish import conclude, write_ratio
from tl_localize.cli.running import compute, folder_of
from tl_localize.evals import settings as presets
from tl_localize.evals.deletion.benchmark import DelBenchmark
from tl_localize.evals.deletion.sparing import check_max_lost, sparing_runs
from tl_localize.evals.inj.benchmark import InjBenchmark
from tl_localize.evals.rev.benchmark import N_GENERAL, RevBenchmark
from tl_localize.evals.tuning import expand, read_settings
from tl_localize.execution import Store
from tl_localize.files import refuse_unreadable
from tl_localize.injection import RECIPES
from tl_localize.methods import METHODS, Localizer, ZeroOut
from tl_localize.metrics import RECITED, accuracy
from tl_localize.model.loading import is_reference
from tl_localize.model.neurons import LanguageModel
from tl_localize.paper import PAPER, settings_source
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.stats import in_percent, quantity
from tl_localize.texts.known import MIN_ACCURACY, known
from tl_localize.texts.readers import read_tokens
from tl_localize.texts.reference import N_DEV, held_out_tokens, inj_sequences, reference_sequences
from tl_localize.units import NEURONS, UNITS, Units

General = Integer[Tensor, "sequence pos"]
DelRuns = Iterable[tuple[DelBenchmark, Sequence[Localizer]]]


# What is said of methods


def screened_settings(units: Units, settings: Path | None = None) -> presets.MethodSettings:
    """Settings from a file, over a Zero-Out that ablates few neurons."""
    tuned = read_settings(settings) if settings else {}
    if units != NEURONS:  # heads are few
        return tuned
    return {ZeroOut.name: {"screen": presets.SCREEN}} | tuned


def say_screen(methods: Iterable[Localizer]) -> None:
    """Say where a Zero-Out ablates few neurons."""
    screens = {m.screen for m in methods if isinstance(m, ZeroOut) and m.screen is not None}
    for screen in screens:
        say(
            f"Zero-Out ablates {100 * screen:g} % of the neurons and estimates the others; --set "
            f"zero_out.screen=None ablates all, {1 / screen:.3g} times as many."
        )


def say_all_neurons(methods: Iterable[Localizer]) -> None:
    """Say what Zero-Out costs where it has no screen."""
    if any(isinstance(method, ZeroOut) and method.screen is None for method in methods):
        say(
            "Zero-Out ablates every neuron, one after the other, which takes hours for each text; "
            f"--set zero_out.screen={presets.SCREEN} ablates the {in_percent(presets.SCREEN)} that "
            "a first-order estimate names."
        )


def say_source(source: str, units: Units) -> None:
    """Say where the settings of learned masks come from that the user leaves open."""
    if units == NEURONS:
        say(source)
    else:
        say(f"Default settings: they were chosen for neurons, not {units.name}.")


# INJ


def run_inj(options: InjOptions) -> None:
    units = UNITS[options.methods.how.units]
    # mistakes are found before the model is loaded
    methods = inj_methods_by_ratio(options, units)
    say_screen(method for of_ratio in methods.values() for method in of_ratio)
    name = options.model.model
    say_source(settings_source(name, "inj"), units)
    data = options.columns.read(options.data)
    others = f"distractors-{options.distractors}" if options.distractors else ""
    folder = folder_of(options.run, "inj", name, units.name, others)
    model = options.model.load()
    limit, size = options.limit, options.distractors + 1
    if limit is None and data is None and is_reference(name):
        limit = math.ceil(presets.INJ_SENTENCES / size) * size  # whole groups
    sequences = inj_sequences(model, data, n_max=limit)
    sentences = quantity(len(sequences), "sentence")
    say(f"{sentences} (the first {N_DEV} of the data are dev sentences and left out), model {name}")
    runs: list[tuple[InjBenchmark, list[Localizer]]] = []
    for ratio, of_ratio in methods.items():
        benchmark = InjBenchmark(
            model,
            sequences,
            ratio=ratio,
            units=units,
            seed=options.seed,
            learning_rate=options.learning_rate,
            max_steps=options.max_steps,
            distractors=options.distractors,
        )
        runs.append((benchmark, of_ratio))
    n_left = len(sequences) - sum(len(group.sequences) for group in runs[0][0].groups())
    if n_left:
        say(
            f"{n_left} of them are in no group: a group has {size} sentences, which begin with "
            "different tokens."
        )
    store = Store(folder)
    finished = compute(options.run, options.model, runs, store)
    conclude(store, interrupted=not finished, part=options.run.shard != WHOLE)


def inj_methods_by_ratio(options: InjOptions, units: Units) -> dict[float, list[Localizer]]:
    """The methods at each ratio, on which the paper's settings depend."""
    tuned = screened_settings(units, options.methods.settings)
    name = options.model.model
    found: dict[float, list[Localizer]] = {}
    for ratio in options.ratio or presets.inj_ratios(name, units):
        found[ratio] = presets.inj_methods(
            options.methods.methods, options.methods.how.set, name, tuned, ratio, units
        )
    return found


# DEL


def run_del(options: DelOptions) -> None:
    units = UNITS[options.methods.how.units]
    name = options.model.model
    # mistakes are found before the model is loaded
    asked = options.methods
    tuned = read_settings(asked.settings) if asked.settings else {}
    methods = presets.del_methods(asked.methods, asked.how.set, name, tuned, options.seed, units)
    if options.max_others_lost is not None:
        check_max_lost(options.max_others_lost)
        if options.ratio:
            raise ValueError(
                f"max_others_lost must be left out where --ratio is given, got "
                f"{options.max_others_lost:g}. It ends a run that chooses its own shares."
            )
    if units == NEURONS and not is_reference(name):
        say_all_neurons(methods)
    say_source(settings_source(name, "del"), units)
    folder = folder_of(options.run, "del", name, units.name, options.ablation)
    check_data(options)
    model = options.model.load()
    store = Store(folder)
    methods = presets.sparing_layers(methods, model)
    benchmark = del_benchmark(options, model, units, folder)
    runs: DelRuns = [(benchmark, methods)]
    is_shard = options.run.shard != WHOLE
    max_lost = presets.max_lost_of(name, options.max_others_lost, options.ratio, units)
    if max_lost is not None:
        say(
            f"Shares of a layer: 1, 2, 4, ... {units.name}, until the others have lost more than "
            f"{max_lost:g} points of accuracy (Neg)."
        )
        runs = sparing_runs(benchmark, methods, store, max_lost, is_shard=is_shard)
    finished = compute(options.run, options.model, runs, store)
    sparing = max_lost is not None
    conclude(store, interrupted=not finished, part=is_shard, whole_last=sparing)


def check_data(options: DelOptions | TuneOptions) -> None:
    """Raise ValueError where the options of the data are wrong; no row is read."""
    texts, name = options.texts, options.model.model
    if texts.n_dev is not None:
        check_count(0, n_dev=texts.n_dev)
        alone = texts.sequences.data is None and not is_reference(name)
        if alone and isinstance(options, DelOptions):
            raise ValueError(
                f"n_dev must be left out where a model that is not shipped has no --data, got "
                f"{texts.n_dev}. The texts that it knows are all targets."
            )
    options.texts.sequences.read()


def del_benchmark(
    options: DelOptions, model: LanguageModel, units: Units, folder: Path
) -> DelBenchmark:
    """DEL of the sequences in random order, the dev ones first."""
    name = options.model.model
    limit = options.limit
    if options.texts.sequences.data is None and is_reference(name):
        limit = limit or presets.DEL_SEQUENCES
    sequences, n_dev, text = read_texts(options, model, folder)
    if options.limit is not None and options.limit <= n_dev:
        raise ValueError(
            f"limit must be more than the {quantity(n_dev, 'dev sequence')}, got {options.limit}. "
            f"Write --limit {n_dev + 2} for two others."
        )
    sequences = presets.drawn_first(sequences, n_dev, options.seed)[:limit]
    n_targets = options.targets
    if n_targets is None and options.texts.sequences.data is None:
        n_targets = presets.DEL_TARGETS
    max_lost = presets.max_lost_of(name, options.max_others_lost, options.ratio, units)
    ratios = options.ratio or presets.del_ratios(name, units)
    benchmark = DelBenchmark(
        model,
        sequences,
        text,
        n_dev=n_dev,
        n_targets=n_targets,
        first_layer=presets.first_layer_of(model),
        ratios=tuple(ratios) if max_lost is None else (1.0,),
        ablation=options.ablation,
        seed=options.seed,
        units=units,
    )
    if len(benchmark.test_sequences) == 1:
        say("There is no other text, so what others lose (Neg) is not measured.")
    n_test = quantity(len(benchmark.test_sequences), "sequence")
    say(
        f"{len(benchmark.targets)} of {n_test} are targets ({quantity(n_dev, 'dev sequence')} left "
        f"out), model {name}"
    )
    return benchmark


def read_texts(
    options: DelOptions | TuneOptions, model: LanguageModel, folder: Path, place: int = 0
) -> tuple[list[MemorizedSequence], int, General]:
    """Sequences, how many of the first are dev ones, and general text.

    They are the user's, or a shipped model's collection, which is made where it is not there. Else
    they are texts that the model knows: the best of each category for the test, those in another
    ``place`` as dev ones.
    """
    texts = options.texts
    asked = N_DEV if texts.n_dev is None else texts.n_dev
    data = texts.sequences.read()
    if data is None and is_reference(options.model.model):
        collection = folder / "collection"
        data = collect_reference(options.run, options.model, model, collection, asked)
    if data is not None:
        given, n_dev, general = presets.del_data(model, data, texts.general, texts.n_dev)
        kept = recited_of(model, given, texts.min_accuracy)
        places = set(map(id, kept))
        # a dev text stays one, also where others before it are left out
        return kept, sum(id(text) in places for text in given[:n_dev]), general
    recited = known(model, RECITED if texts.min_accuracy is None else texts.min_accuracy)
    say(f"{recited}. {recited.advice()}")
    general = presets.read_general_text(model, texts.general)
    return recited.diverse(place=place), asked if place else 0, general


def recited_of(
    model: LanguageModel, sequences: list[MemorizedSequence], min_accuracy: float | None
) -> list[MemorizedSequence]:
    """The texts that the model recites with this accuracy; where none is given all of them, and a
    word about those that it does not recite.
    """
    least = MIN_ACCURACY if min_accuracy is None else min_accuracy
    # rounded, so that 9 right tokens of 10 are 0.9
    shares = accuracy(model, check_sequences(model, sequences)).double().round(decimals=6).tolist()
    pairs = zip(sequences, shares, strict=True)
    recited = [sequence for sequence, share in pairs if share >= least]
    n_low = len(sequences) - len(recited)
    if min_accuracy is None:
        if n_low:
            say(
                f"{n_low} of {quantity(len(sequences), 'text')} are recited at less than "
                f"{least:g}: there is little to forget. --min-accuracy {least:g} leaves them out."
            )
        return sequences
    if not recited:
        raise ValueError(
            f"min_accuracy must be one that a text of the data reaches, got {least:g}, where the "
            f"best has {max(shares):.2f}. Give a lower one, or texts that the model recites."
        )
    return recited


# REV


def run_rev(options: RevOptions) -> None:
    units = UNITS[options.methods.how.units]
    name = options.model.model
    # mistakes are found before the model is loaded
    methods = rev_methods(options.methods, units)
    say_screen(methods)
    ratios = options.ratio or (RevBenchmark.ratios if units == NEURONS else presets.REV_HEAD_RATIOS)
    data = options.columns.read(options.data)
    earlier = options.before or ""
    if earlier and data is None and not is_reference(name):
        raise ValueError(
            "data must be given with an earlier checkpoint of a model that is not shipped, got "
            "none. Name texts that the later one recites: --data FILE."
        )
    folder = folder_of(options.run, "rev", name, units.name, options.recipe, earlier)
    model = options.model.load()
    before = options.model.load(earlier) if earlier else None
    if before is None:
        sequences = inj_sequences(model, data)
    else:
        sequences = list(data.sequences(model)) if data else reference_sequences(model)
    recipe = RECIPES[options.recipe]
    if text := options.general or presets.collected_text(options.data):
        general = read_tokens(text)
    else:
        general = held_out_tokens(model)[: None if recipe.general else N_GENERAL]
    benchmark = RevBenchmark(
        model,
        sequences,
        general,
        before=before,
        recipe=recipe,
        n_sequences=options.sentences,
        n_groups=options.groups,
        ratios=tuple(sorted(ratios)),
        seed=options.seed,
        units=units,
    )
    groups = benchmark.groups()
    texts = quantity(len(groups[0].sequences), "text")
    dev = "" if before else f" (the first {N_DEV} of the data are dev sentences and left out)"
    say(f"{quantity(len(groups), 'group')} of {texts}{dev}, model {name}")
    store = Store(folder)
    finished = compute(options.run, options.model, [(benchmark, methods)], store)
    conclude(store, interrupted=not finished, part=options.run.shard != WHOLE)


def rev_methods(asked: MethodOptions, units: Units) -> list[Localizer]:
    """The methods of REV, whose rows lie in all layers, and which has no settings of the paper."""
    defaults = (
        presets.defaults_for(units, {}),
        presets.first_layer_settings(0),
        screened_settings(UNITS[asked.how.units], asked.settings),
    )
    return presets.make_methods(asked.methods, asked.how.set, *defaults, units=units)


# Tuning


def run_tune(options: TuneOptions) -> None:
    units = UNITS[options.how.units]
    name = options.model.model
    # mistakes are found before the model is loaded
    default = presets.inj_ratios if options.benchmark == "inj" else presets.del_ratios
    ratio = max(default(name, units)) if options.ratio is None else options.ratio
    check_ratio("ratio", ratio)
    check_tuned(options)
    methods = candidates(options, ratio, units)
    say_screen(methods)
    say_source(settings_source(name, options.benchmark), units)
    folder = folder_of(options.run, "tune", options.benchmark, name, units.name)
    check_data(options)
    model = options.model.load()
    store = Store(folder)
    if options.benchmark == "del":
        methods = presets.sparing_layers(methods, model)
    benchmark = tuned_benchmark(options, model, ratio, units, folder)
    # a folder that is refused is left as it was; one that is not is marked before hours of work
    store.agree(benchmark.settings(benchmark.label(methods)))
    write_ratio(folder, ratio)
    finished = compute(options.run, options.model, [(benchmark, methods)], store)
    conclude(store, interrupted=not finished, part=options.run.shard != WHOLE)


def check_tuned(options: TuneOptions) -> None:
    """Raise ValueError where an option belongs to the other benchmark."""
    texts = options.texts
    of_del: dict[str, tuple[object, object]] = {
        "n_dev": (texts.n_dev, None),
        "min_accuracy": (texts.min_accuracy, MemorizedOptions.min_accuracy),
        "general": (texts.general, None),
        "n_prefix": (texts.sequences.n_prefix, None),
        "n_suffix": (texts.sequences.n_suffix, None),
    }
    for name, (value, default) in of_del.items():
        if options.benchmark == "inj" and value != default:
            raise ValueError(
                f"{name} must be left out with --benchmark inj, got {value}. It takes "
                f"the first {N_DEV} sentences, whole."
            )
    if options.benchmark == "del" and options.distractors:
        raise ValueError(
            f"distractors must be left out with --benchmark del, got {options.distractors}. They "
            "are of INJ."
        )


def tuned_benchmark(
    options: TuneOptions, model: LanguageModel, ratio: float, units: Units, folder: Path
) -> InjBenchmark | DelBenchmark:
    """The benchmark of the dev sequences alone."""
    if options.benchmark == "inj":
        dev = inj_sequences(model, options.texts.sequences.read(), dev=True)
        others = options.distractors
        return InjBenchmark(model, dev, ratio=ratio, distractors=others, units=units)
    sequences, n_dev, text = read_texts(options, model, folder, place=1)
    if not n_dev:
        raise ValueError(
            "n_dev must leave a sequence to choose settings on, got none. Give --n-dev, or a "
            "smaller --min-accuracy."
        )
    return DelBenchmark(
        model,
        sequences[:n_dev],
        text,
        ratios=(ratio,),
        n_dev=0,
        first_layer=presets.first_layer_of(model),
        units=units,
    )


def candidates(options: TuneOptions, ratio: float, units: Units) -> list[Localizer]:
    """The method with each setting of its grid, over what the grid leaves open."""
    grids: Mapping[str, Mapping[str, Sequence[object]]] = PAPER["grids"]
    if options.grid:
        rule = 'grid must be a JSON file such as {"slimming": {"steps": [60, 200]}}'
        with refuse_unreadable(rule, options.grid):
            grids = {
                method: {setting: [*values] for setting, values in grid.items()}
                for method, grid in json.loads(options.grid.read_bytes()).items()
            }
    if options.grid is None and options.method in METHODS.keys() - grids:
        raise ValueError(
            f"method must be one of the paper's masks ({', '.join(sorted(grids))}) where no grid "
            f"is given, got {options.method!r}. Give its values: --grid FILE."
        )
    check_choice("method", options.method, grids.keys() & METHODS)
    # what --set names is fixed
    fixed_axes = {setting.partition("=")[0].rpartition(".")[2] for setting in options.how.set}
    every = grids[options.method].items()
    grid = {axis: values for axis, values in every if axis not in fixed_axes}
    for axis, values in grid.items():
        if not values:
            raise ValueError(f"grid must name values of {axis}, got none. Give one at least.")
    asked = (options.method, options.how.set)
    name = options.model.model
    if options.benchmark == "inj":
        (fixed,) = presets.inj_methods(*asked, name, screened_settings(units), ratio, units)
    else:
        (fixed,) = presets.del_methods(*asked, name, units=units)
    return [
        replace(fixed, **{axis: getattr(setting, axis) for axis in grid})
        for setting in expand(options.method, grid)
    ]
