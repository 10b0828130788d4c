"""tl-localize inj"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_localize.cli import options
from tl_localize.cli.options import (
    Distractors,
    MethodSettings,
    ModelOptions,
    Printed,
    RowOptions,
    RunOptions,
    SettingsFile,
    Units,
    say,
)
from tl_localize.cli.running import compute, finish
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.presets import INJ_SENTENCES, SCREEN, inj_runs, make_methods, parse_units
from tl_localize.evals.tuning import read_settings
from tl_localize.execution import Store
from tl_localize.methods import ZeroOut
from tl_localize.models import is_reference
from tl_localize.neurons import check_seed
from tl_localize.reference import N_DEV, inj_sequences
from tl_localize.report.figures import recall_curve, target_against_distractors
from tl_localize.report.tables import inj_tables
from tl_localize.units import NEURONS


def inj(
    *,
    on: ModelOptions,
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines of texts, or tokens, or a table. Default: our own sentences."
        ),
    ] = None,
    rows: RowOptions,
    methods: Annotated[str, typer.Option(help="Comma-separated names, or 'all'.")] = "all",
    units: Units = "neurons",
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Share of the rows of W_out, or of heads, to write into. Repeatable."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Number of sentences. Default: 5 on a reference model, else all."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Sentence i is written into rows drawn with seed + i.")
    ] = 0,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the injection. Default: the paper's, by ratio.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Of the injection. Default: the paper's, by ratio.")
    ] = None,
    distractors: Distractors = 0,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help=f"Zero-Out: ablate all neurons, and not {SCREEN:.0%} of them."
        ),
    ] = False,
    set: MethodSettings = None,
    settings: SettingsFile = None,
    run: RunOptions,
    printed: Printed,
) -> None:
    """INJ: write new sentences into random rows of W_out, then ask each method which rows they are.

    With --units heads: into all rows of W_O of random heads, a sixth of all heads by default, and
    which heads they are. Prints recall (the share of the true rows among the top 1x, 2x and 5x as
    many neurons of each layer) and writes a results folder. In a folder that is there it computes
    only what is missing. Exit status 1: a task failed, or an injection did not converge; 130:
    interrupted.
    """
    kind = parse_units(units)
    exact = exact or kind != NEURONS  # heads are few
    tuned = ({} if exact else {ZeroOut.name: {"screen": SCREEN}}) | (
        read_settings(settings) if settings else {}
    )
    # mistakes are found before the model is loaded
    chosen = make_methods(methods, set or [], tuned, units=kind)
    options.check_ratios(ratio)
    options.check_at_least(1, limit=limit, max_steps=max_steps)
    options.check_at_least(0, distractors=distractors)
    check_seed(seed, bits=32)
    if learning_rate is not None and not learning_rate > 0:
        raise ValueError(
            f"learning_rate must be above 0, got {learning_rate}. Leave it out for the paper's."
        )
    options.say_settings(on.model, "inj", settings, kind)
    if any(isinstance(method, ZeroOut) and method.screen == SCREEN for method in chosen):
        longer = f"--exact ablates all, {1 / SCREEN:.0f} times as many"
        say(f"Zero-Out ablates {SCREEN:.0%} of the neurons and estimates the others; {longer}.")
    given = rows.data(data)
    others = f"distractors-{distractors}" if distractors else ""
    store = Store(run.folder("inj", on.short, "" if kind == NEURONS else units, others))
    model = on.load()
    limit = limit or (INJ_SENTENCES if is_reference(on.model) and given is None else None)
    sequences = inj_sequences(model, given, n_max=limit)
    say(
        f"{len(sequences)} sentences (the first {N_DEV} of the data are dev sentences and left "
        f"out), model {on.model}"
    )
    training: dict[str, Any] = {
        "seed": seed,
        "learning_rate": learning_rate,
        "max_steps": max_steps,
        "distractors": distractors,
    }
    runs = inj_runs(model, on.model, sequences, methods, set or [], tuned, ratio, kind, **training)
    finish(store, compute(runs, store, run, on.load), partial(publish_inj, printed=printed))


def publish_inj(store: Store, folder: Path, printed: Printed) -> None:
    """All tables and figures of INJ from the folder of a run, and the main table on the terminal."""
    options.publish(InjResults.of(store), store, folder, inj_tables, inj_figures, printed)


def inj_figures(results: InjResults) -> dict[str, Any]:
    """The figures of INJ by file name."""
    also = (
        {"inj_target_against_distractors": target_against_distractors(results)}
        if results.distractors
        else {}
    )
    return {"inj_recall_curve": recall_curve(results), **also}
