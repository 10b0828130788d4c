"""tl-localize tune"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tl_localize.cli import options
from tl_localize.cli.del_benchmark import collected_default
from tl_localize.cli.options import (
    Distractors,
    General,
    MethodSettings,
    ModelOptions,
    RunOptions,
    SequenceOptions,
    Units,
    say,
)
from tl_localize.cli.running import compute, finish
from tl_localize.evals import presets
from tl_localize.evals.del_benchmark import DelBenchmark
from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.tuning import Ranking, expand, read_grids, write_settings
from tl_localize.execution import Store
from tl_localize.files import nearest, prepare_folder, write_json, write_text
from tl_localize.reference import N_DEV, inj_sequences
from tl_localize.report.tables import save_table
from tl_localize.report.terminal import console, plain
from tl_localize.units import NEURONS

TUNED = "tuned.json"  # marks a folder of tl-localize tune: its methods, and the model


def tune(
    *,
    benchmark: Annotated[Literal["inj", "del"], typer.Option(help="On which benchmark.")] = "inj",
    method: Annotated[
        str, typer.Option(help="Method to tune: hard_concrete, slimming or another with settings.")
    ] = "hard_concrete",
    grid: Annotated[
        Path | None,
        typer.Option(help="JSON file {METHOD: {SETTING: [values]}}. Default: the paper's grid."),
    ] = None,
    on: ModelOptions,
    data: Annotated[
        Path | None,
        typer.Option(
            help="As for tl-localize inj or del. Default: our own sentences or sequences."
        ),
    ] = None,
    general: General = None,
    units: Units = "neurons",
    ratio: Annotated[
        float | None,
        typer.Option(
            help="inj: share of the rows to inject into. del: share of each layer to ablate."
        ),
    ] = None,
    distractors: Distractors = 0,
    n_dev: Annotated[
        int, typer.Option(help="del, of files: the first sequences, on which settings are chosen.")
    ] = N_DEV,
    rows: SequenceOptions,
    set: MethodSettings = None,
    run: RunOptions,
) -> None:
    """Try every setting of a grid on the dev sequences of a benchmark and keep the best one.

    What the grid leaves open is as in tl-localize inj or del, for the paper's models the paper's,
    and so is the ratio, the largest of theirs. INJ keeps the highest mean recall; DEL the largest
    loss of accuracy on the target minus that on the others (Self minus Neg). Prints all settings,
    the best first, and writes settings.json for --settings of tl-localize inj or del. In a folder
    that is there it computes only what is missing.
    """
    given = rows.data(data)
    grids = read_grids(grid) if grid else presets.PAPER["grids"]
    if method not in grids:
        raise ValueError(
            f"grid must hold the method {method!r}, got {sorted(grids)}.{nearest(method, grids)}"
        )
    kind = presets.parse_units(units)
    if ratio is None:
        ratio = max(
            presets.inj_ratios(on.model, kind)
            if benchmark == "inj"
            else presets.del_ratios(on.model, kind)
        )
    if benchmark == "inj":
        of_units = presets.of_units(kind, presets.paper_settings(on.model, "inj", ratio))
        (fixed,) = presets.make_methods(method, set or [], of_units, units=kind)
    else:
        (fixed,) = presets.del_methods(method, set or [], on.model, units=kind)
        presets.check_data(on.model, given, general)
        if given is None:
            presets.check_dev(n_dev, presets.DEL_SEQUENCES)
    options.say_settings(on.model, benchmark, "the grid", kind)
    candidates = [
        replace(fixed, **{axis: getattr(one, axis) for axis in grids[method]})
        for one in expand(method, grids[method])
    ]
    options.check_ratios([ratio])
    options.check_at_least(0, distractors=distractors)
    folder = run.folder("tune", benchmark, on.short, "" if kind == NEURONS else units)
    model = on.load()
    if benchmark == "inj":
        sentences = inj_sequences(model, given, dev=True)
        setting = InjBenchmark(
            model=model, sequences=sentences, ratio=ratio, distractors=distractors, units=kind
        )
    else:
        if given is None:
            data = given = collected_default(model, on, run, folder, n_dev, [ratio], kind)
        sequences, n_dev, text = presets.del_data(model, given, general, n_dev)
        presets.check_dev(n_dev, len(sequences))
        setting = DelBenchmark(model, sequences[:n_dev], text, ratios=(ratio,), n_dev=0, units=kind)
    store = Store(folder)
    tuned = read_tuned(store)["methods"] if (folder / TUNED).exists() else []
    methods = list(dict.fromkeys([*tuned, method]))
    write_json(folder / TUNED, {"model": on.model, "methods": methods})
    finish(
        store,
        compute([(setting, candidates)], store, run, on.load),
        partial(publish_tune, ratio=ratio),
    )


def read_tuned(store: Store) -> dict[str, Any]:
    """The model and the methods that were tuned in a folder."""
    return json.loads((store.folder / TUNED).read_text())


def publish_tune(store: Store, folder: Path, ratio: float | None = None) -> None:
    """The ranking of the settings, by default at the newest plan's ratio, and the best of each
    method where all is measured.
    """
    plans = store.plans()
    given = read_tuned(store)
    benchmark = plans[-1].plan.benchmark
    results = InjResults.of(store) if benchmark == "inj" else DelResults.of(store)
    if not len(results.frame):
        say("Nothing is measured yet.")
        return
    write_text(prepare_folder(folder) / "frame.csv", results.frame.to_csv(index=False))
    ranking = Ranking.of(results, [one.plan for one in plans], given["methods"], ratio)
    if ranking.n_lost:
        say(
            f"{ranking.n_lost} dev sentences are left out of the ranking, because their injections "
            "did not converge."
        )
    if not len(ranking.frame):
        say(
            "NONE of the injections converged: there is nothing to rank."
            if ranking.n_lost
            else "Nothing is measured yet at this ratio."
        )
        return
    shown = ranking.shown()
    save_table(
        shown, folder, "ranking", f"The dev sequences of {benchmark}, ratio {ranking.ratio:g}"
    )
    console().print(plain(shown))
    if ranking.n_missing:
        say(
            f"{ranking.n_missing} measurements are MISSING: the ranking is of what is there, and "
            "settings.json is not written."
        )
        return
    for name, best in write_settings(ranking.frame, folder / "settings.json", ranking.rule).items():
        typer.echo(f"\nBest {name}: {best}")
    typer.echo(
        f"Use them: tl-localize {benchmark} --model {given['model']} --settings "
        f"{folder / 'settings.json'}"
    )
