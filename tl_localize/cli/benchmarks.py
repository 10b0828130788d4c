"""tl-localize inj | del | tune: from options to a benchmark, which is run and published."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

from tl_localize.cli.collecting import COLUMNS, collect_reference
from tl_localize.cli.options import say
from tl_localize.cli.publish import TUNED, conclude, form_of
from tl_localize.cli.running import Run, data_of
from tl_localize.evals import presets
from tl_localize.evals.del_benchmark import DelBenchmark
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.evals.tuning import expand, read_grids, read_settings
from tl_localize.execution import Store
from tl_localize.files import nearest, write_json
from tl_localize.methods import Localizer, ZeroOut
from tl_localize.models import is_reference
from tl_localize.neurons import LanguageModel
from tl_localize.readers import Data
from tl_localize.reference import N_DEV, held_out_tokens, inj_sequences
from tl_localize.sequences import MemorizedSequence
from tl_localize.units import NEURONS

LENGTHS = ("n_prefix", "n_suffix")


def run_inj(given: Namespace) -> None:
    run, units = Run(given), presets.parse_units(given.units)
    tuned = read_settings(given.settings) if given.settings else {}
    if units == NEURONS and not given.exact:  # heads are few
        tuned = {ZeroOut.name: {"screen": presets.SCREEN}} | tuned
        say(
            f"Zero-Out ablates {presets.SCREEN:.0%} of the neurons and estimates the others; "
            f"--exact ablates all, {1 / presets.SCREEN:.0f} times as many."
        )
    # mistakes are found before the model is loaded
    presets.make_methods(given.methods, given.set or (), tuned, units=units)
    say_settings(given, "inj", given.settings)
    data = data_of(given, given.data, "key", "any_tokens")
    others = f"distractors-{given.distractors}" if given.distractors else ""
    store = run.store("inj", given.model, given.units, others)
    model, limit = run.load(), given.limit
    if limit is None and data is None and is_reference(given.model):
        limit = presets.INJ_SENTENCES
    sequences = inj_sequences(model, data, n_max=limit)
    say(
        f"{len(sequences)} sentences (the first {N_DEV} of the data are dev sentences and left "
        f"out), model {given.model}"
    )
    names = ("seed", "learning_rate", "max_steps", "distractors")
    training = {name: vars(given)[name] for name in names}
    asked = (given.methods, given.set or (), tuned, given.ratio, units)
    runs = presets.inj_runs(model, given.model, sequences, *asked, **training)
    done = run.compute(runs, store)
    conclude(store, store.folder, form_of(given.markdown, given.csv), done)


def run_del(given: Namespace) -> None:
    run, units = Run(given), presets.parse_units(given.units)
    # mistakes are found before the model is loaded
    chosen, alone = del_methods(given)
    data = data_of(given, given.data, *COLUMNS, *LENGTHS)
    presets.check_data(given.model, data, given.general)
    n_targets, fewer = presets.parse_targets(given.targets) if given.targets else (None, {})
    say_settings(given, "del", given.settings)
    store = run.store("del", given.model, given.units, given.ablation)
    model, limit = run.load(), given.limit
    how: dict[str, Any] = {
        "ratios": tuple(given.ratio or presets.del_ratios(given.model, units)),
        "ablation": given.ablation,
        "seed": given.seed,
        "units": units,
    }
    if data is None:
        limit = limit or presets.DEL_SEQUENCES
        data = collected(run, model, how, store)
    sequences, n_dev, text = presets.del_data(model, data, given.general, given.n_dev)
    sequences = presets.drawn_first(sequences, n_dev, given.seed)[:limit]
    n_test = len(sequences) - n_dev
    if given.data is None and n_targets is None:
        n_targets = min(presets.DEL_TARGETS, n_test)
    benchmark = DelBenchmark(model, sequences, text, n_dev=n_dev, n_targets=n_targets, **how)
    say(
        f"{n_targets or n_test} of {n_test} sequences are targets ({n_dev} dev sequences are left "
        f"out), model {given.model}"
    )
    runs = presets.del_runs(benchmark, chosen, fewer)
    runs += [presets.single_layer_run(benchmark, method) for method in alone]
    done = run.compute(runs, store)
    conclude(store, store.folder, form_of(given.markdown, given.csv), done)


def del_methods(given: Namespace) -> tuple[list[Localizer], list[Localizer]]:
    """The methods of DEL, and the one whose budget is also spent in single layers."""
    tuned = read_settings(given.settings) if given.settings else {}
    how = (given.model, tuned, given.seed, presets.parse_units(given.units))
    chosen = presets.del_methods(given.methods, given.set or (), *how)
    if given.single_layer is None:
        return chosen, []
    own = [text for text in given.set or () if text.startswith(f"{given.single_layer}.")]
    return chosen, presets.del_methods(given.single_layer, own, *how)


def run_tune(given: Namespace) -> None:
    run, units = Run(given), presets.parse_units(given.units)
    data = data_of(given, given.data, *COLUMNS, *LENGTHS)
    methods, ratio = candidates(given)
    if given.benchmark == "del":
        presets.check_data(given.model, data, given.general)
    say_settings(given, given.benchmark, "the grid")
    store = run.store("tune", given.benchmark, given.model, given.units)
    model = run.load()
    if given.benchmark == "inj":
        sentences = inj_sequences(model, data, dev=True)
        how: dict[str, Any] = {"distractors": given.distractors, "units": units}
        benchmark = InjBenchmark(model=model, sequences=sentences, ratio=ratio, **how)
    else:
        how = {"ratios": (ratio,), "units": units}
        data = data or collected(run, model, how, store)
        sequences, n_dev, text = presets.del_data(model, data, given.general, given.n_dev)
        presets.check_dev(n_dev, len(sequences))
        benchmark = DelBenchmark(model, sequences[:n_dev], text, n_dev=0, **how)
    write_json(store.folder / TUNED, {"model": given.model})
    done = run.compute([(benchmark, methods)], store)
    conclude(store, store.folder, done=done)


def candidates(given: Namespace) -> tuple[list[Localizer], float]:
    """The method with each setting of its grid, over what the grid leaves open, and the ratio."""
    grids = read_grids(given.grid) if given.grid else presets.PAPER["grids"]
    if given.method not in grids:
        raise ValueError(
            f"grid must hold the method {given.method!r}, got {sorted(grids)}."
            f"{nearest(given.method, grids)}"
        )
    units, ratio = presets.parse_units(given.units), given.ratio
    if given.benchmark == "inj":
        ratio = ratio or max(presets.inj_ratios(given.model, units))
        paper = presets.of_units(units, presets.paper_settings(given.model, "inj", ratio))
        defaults = (presets.sparing(0), paper)
        (fixed,) = presets.make_methods(given.method, given.set or (), *defaults, units=units)
    else:
        ratio = ratio or max(presets.del_ratios(given.model, units))
        (fixed,) = presets.del_methods(given.method, given.set or (), given.model, units=units)
    grid = grids[given.method]
    values = [{axis: getattr(one, axis) for axis in grid} for one in expand(given.method, grid)]
    return [replace(fixed, **changed) for changed in values], ratio


def collected(run: Run, model: LanguageModel, how: dict[str, Any], store: Store) -> Data:
    """The collection of a reference model's own training texts, inside the folder of a run."""
    text = held_out_tokens()[: presets.DEL_GENERAL]
    # settings that can't be are found on any sequences, before the minutes that a collection takes
    DelBenchmark(model, [MemorizedSequence(row, 1) for row in text], text, n_dev=0, **how)
    say("The reference model's memorized sequences are collected from its training texts.")
    return Data(source=collect_reference(run, model, text, store.folder / "collection"))


def say_settings(given: Namespace, benchmark: Any, over: object) -> None:
    """Say which settings the learned masks have where neither ``--set`` nor what is put over them
    has others.
    """
    source = presets.settings_source(given.model, benchmark)
    if given.units != NEURONS.name:
        source = f"the defaults, which were chosen for neurons, not {given.units}"
    where = f", where {over} has no others" if over else ""
    say(f"Settings of learned masks: {source}{where}.")
