"""From a results folder to its tables and figures, what is printed of them, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from tl_localize.cli.options import say
from tl_localize.collect import Collection, Report
from tl_localize.collect.criteria import NEAR, SURPLUS
from tl_localize.collect.reference_texts import TRAINING, reference_tables
from tl_localize.collect.search import SearchResults
from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.single_layer import single_layers
from tl_localize.evals.tuning import Ranking, write_settings
from tl_localize.execution import Store, status
from tl_localize.execution.status import planned
from tl_localize.files import prepare_folder, write_text
from tl_localize.methods import METHODS
from tl_localize.report.figures import (
    del_figures,
    recall_curve,
    save_figure,
    target_against_distractors,
)
from tl_localize.report.tables import (
    CAPTIONS,
    del_tables,
    inj_tables,
    save_table,
    to_markdown,
)
from tl_localize.report.terminal import NO_METHODS, console, plain, ranked, reading

WIDE = 110  # columns of a terminal that holds all of DEL's table
FEW = 20  # test sequences below which a mean over targets says little
TUNED = "tuned.json"  # marks a folder of tl-localize tune, and holds the model as it was given


def form_of(markdown: bool, csv: bool) -> str:
    return "csv" if csv else "markdown" if markdown else "text"


def conclude(store: Store, folder: Path, form: str = "text", done: bool = True) -> None:
    """Publish what is there, and say what failed; leave with a status that tells.

    Where another run has written the last records meanwhile, its tables may just have been replaced
    by older ones: publish again.
    """
    while True:
        lacking = [task for task in planned(store) if not store.has(task)]
        publish(store, folder, form)
        state = status(store)
        if state.frame["missing"].sum() or not any(store.has(task) for task in lacking):
            break
    for task, reason in state.reasons.items():
        say(f"FAILED {task}: {reason.splitlines()[0]}")
    if state.reasons:
        say(
            "Tracebacks are in the folder's failures; the same command with --retry-failed tries "
            "again."
        )
    if state.frame["not_converged"].sum():
        say(
            "Some injections did NOT converge and are left out of the means; another --ratio, "
            "--max-steps or --learning-rate may help."
        )
    if not done:
        raise typer.Exit(130)
    damaged = [task for task in planned(store) if store.has(task) and store.read(task) is None]
    if damaged or not state.clean:
        raise typer.Exit(1)


def publish(store: Store, folder: Path, form: str) -> None:
    """All that a results folder has, in a folder and on the terminal."""
    benchmark = store.plans()[0].plan.benchmark
    if benchmark == "collect":
        publish_collection(store, folder)
        return
    results = InjResults.of(store) if benchmark == "inj" else DelResults.of(store)
    if not len(results.frame):
        say("Nothing is measured yet.")
    elif (store.folder / TUNED).exists():
        publish_ranking(results, store, folder)
    else:
        publish_results(results, store, folder, form)


def publish_results(
    results: InjResults | DelResults, store: Store, folder: Path, form: str
) -> None:
    """Write what was measured, its tables, and its figures where matplotlib is installed; print the
    main table.
    """
    results.save(folder)
    plan = store.plans()[0].plan
    model = about = plan.settings["model"]
    if "units" in plan.settings:
        about += f", {plan.settings['units']['class']}"
    layers = single_layers(store)
    if isinstance(results, InjResults):
        tables = inj_tables(results, model)
    else:
        tables = del_tables(results, model, layers=layers)
    for name, frame in layers.groupby("method") if len(layers) else ():
        largest = frame[frame["ratio"] == frame["ratio"].max()]
        write_text(folder / f"single_layer_{name}.csv", largest.to_csv(index=False))
    for name, table in tables.items():
        save_table(table, folder, name, f"{CAPTIONS[name]} [{about}]")
    try:
        figures = (
            inj_figures(results)
            if isinstance(results, InjResults)
            else del_figures(results, layers=layers)
        )
        for name, figure in figures.items():
            save_figure(figure, folder, name)
    except ImportError as error:
        say(str(error))
    main = tables[plan.benchmark]
    if form == "csv":
        typer.echo(results.summary().to_csv(index=False), nl=False)
    elif form == "markdown":
        typer.echo(to_markdown(main))
    else:
        out = console()
        if plan.benchmark == "del" and out.width < WIDE:
            main = main.filter(regex="Self-Acc|Neg-Acc")
        parts = ranked(main, lowest_first=plan.benchmark == "del")
        shown = [part for named in parts for part in named]
        caption = f"\n{CAPTIONS[plan.benchmark]}.\n"
        out.print(caption, *shown, reading(results), sep="\n", markup=False)
    say(f"All tables, figures, the frame and the settings: {folder}")


def inj_figures(results: InjResults) -> dict[str, Any]:
    """The figures of INJ by file name."""
    figures = {"inj_recall_curve": recall_curve(results)}
    if results.distractors:
        figures["inj_target_against_distractors"] = target_against_distractors(results)
    return figures


def publish_ranking(results: InjResults | DelResults, store: Store, folder: Path) -> None:
    """The ranking of the settings at the newest plan's ratio, and the best of each method where all
    is measured.
    """
    plans = [one.plan for one in store.plans()]
    write_text(prepare_folder(folder) / "frame.csv", results.frame.to_csv(index=False))
    tuned = json.loads((store.folder / TUNED).read_text())
    ranking = Ranking.of(results, plans, set(METHODS) - set(NO_METHODS))
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
    shown, benchmark = ranking.shown(), plans[-1].benchmark
    caption = f"The dev sequences of {benchmark}, ratio {ranking.ratio:g}"
    save_table(shown, folder, "ranking", caption)
    console().print(plain(shown))
    if ranking.n_missing:
        say(
            f"{ranking.n_missing} measurements are MISSING: the ranking is of what is there, and "
            "settings.json is not written."
        )
        return
    best = write_settings(ranking.frame, folder / "settings.json", ranking.rule)
    for name, settings in best.items():
        typer.echo(f"\nBest {name}: {settings}")
    model, file = tuned["model"], folder / "settings.json"
    typer.echo(f"Use them: tl-localize {benchmark} --model {model} --settings {file}")


def publish_collection(store: Store, folder: Path) -> None:
    """The report of a collection, and of the training texts the tables, from its folder: as far as
    it is made.
    """
    report = SearchResults.of(store).report
    collection = made_collection(store.folder, report)
    if collection is None:
        say(
            "The last step is still to be made, by the same command of tl-localize collect. What "
            "was found in the chunks that are done:"
        )
        print_report(report)
        return
    write_text(prepare_folder(folder) / "report.csv", collection.report.table().to_csv())
    print_collection(collection, folder, store.plans()[-1].plan.settings["data"] == [TRAINING])


def made_collection(folder: Path, so_far: Report) -> Collection | None:
    """The collection of a folder; None where the last step was not made, or not from the chunks
    that are there.
    """
    try:
        collection = Collection.load(folder)
    except FileNotFoundError:
        return None
    made = collection.report
    removed = {name: n for name, n in so_far.removed.items() if name not in (NEAR, SURPLUS)}
    same = made.n_in == so_far.n_in and removed.items() <= made.removed.items()
    return collection if same else None


def print_report(report: Report) -> None:
    console().print(plain(report.table()[["removed", "left"]]))


def print_collection(collection: Collection, folder: Path, of_reference: bool) -> None:
    """The report, and of the reference models' own texts the tables, of which the first rows go to
    the terminal.
    """
    print_report(collection.report)
    tables = reference_tables(collection) if of_reference else {}
    for name, (table, caption) in tables.items():
        save_table(table, folder, name, caption)
        console().print(f"{caption}\n", plain(table.head(10)), sep="\n", markup=False)
    n_found, n_dev = len(collection.sequences), collection.n_dev
    typer.echo(
        f"{n_found} memorized sequences ({n_dev} of them dev), the report and its examples: "
        f"{folder}"
    )
    n_test = n_found - n_dev
    if n_test < FEW:
        targets = "1 target" if n_test == 1 else f"{n_test} targets"
        say(
            f"DEL would have {targets} and {n_test - 1} others that must not be forgotten: enough "
            "for examples, too few for a mean. Give more text that the model saw often in training."
        )
