"""From a results folder to its tables and figures, what is printed of them, and the exit status."""

from pathlib import Path
from typing import Any

import pandas as pd
import typer

from tl_localize.cli.running import say
from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.rev_results import RevResults
from tl_localize.evals.sparing import general_text
from tl_localize.evals.tuning import rank, shown, write_settings
from tl_localize.execution import Status, Store, status
from tl_localize.execution.store import planned
from tl_localize.files import write_text
from tl_localize.report.figures import del_figures, inj_figures, rev_figures, save_figure
from tl_localize.report.looks import FIGURES_NEED, has_matplotlib
from tl_localize.report.tables import CAPTIONS, del_tables, inj_tables, rev_tables, save_table
from tl_localize.report.terminal import console, ranked, reading, show

REV_WIDE = 100  # columns of REV's table, also in a pipe
WIDE = 110  # columns of a terminal that holds all of DEL's table
TUNED = "tuned.json"  # marks a folder of tl-localize tune
REPORTS: dict[str, Any] = {  # of each benchmark its results, tables and figures
    "inj": (InjResults, inj_tables, inj_figures),
    "del": (DelResults, del_tables, del_figures),
    "rev": (RevResults, rev_tables, rev_figures),
}


def show_status(folder: Path) -> None:
    store = Store(folder, read_only=True)
    show(status(store).frame.rename_axis("method"))
    say_failures(store)


def conclude(store: Store, done: bool = True) -> None:
    """Publish what is there, and say what failed; leave with a status that tells."""
    publish(store)
    state = say_failures(store)
    if state.frame["not_converged"].sum():
        say(
            "Some injections did NOT converge and are left out of the means; another --ratio, "
            "--max-steps or --learning-rate may help, in REV another --recipe or fewer --sentences."
        )
    if not done:
        raise typer.Exit(130)
    damaged = [task for task in planned(store) if store.has(task) and store.read(task) is None]
    if damaged or not state.clean:
        raise typer.Exit(1)


def say_failures(store: Store) -> Status:
    """Say what failed and why."""
    state = status(store)
    for task, reason in state.reasons.items():
        say(f"FAILED {task}: {reason.splitlines()[0]}")
    if state.reasons:
        say(
            "Tracebacks are in the folder's failures; the same command with --retry-failed tries "
            "again."
        )
    return state


def publish(store: Store) -> None:
    """All that a results folder has, as files in it and on the terminal."""
    benchmark = planned(store) and store.plans()[0].plan.benchmark
    if benchmark not in REPORTS:
        raise ValueError(
            f"folder must hold results of {', '.join(REPORTS)}, got those of {benchmark!r}. The "
            "report of a collection is its report.csv."
        )
    results = REPORTS[benchmark][0].of(store)
    if not len(results.frame):
        say("Nothing is measured yet.")
    elif (store.folder / TUNED).exists():
        publish_ranking(results, store)
    else:
        table = publish_results(results, store)
        if len(table):
            print_results(results, table, benchmark)
        figures = "figures, " if has_matplotlib() else ""
        say(f"All tables, {figures}the frame and the settings: {store.folder}")


def publish_results(results: InjResults | DelResults | RevResults, store: Store) -> pd.DataFrame:
    """Write what was measured, its tables, and its figures where matplotlib is installed; returns
    the main table.
    """
    folder, plan = store.folder, store.plans()[0].plan
    results.save(folder)
    model = about = plan.settings["model"]
    if "units" in plan.settings:
        about += f", {plan.settings['units']['class']}"
    _, tabulate, draw = REPORTS[plan.benchmark]
    tables = tabulate(results, model)
    for name, table in tables.items():
        save_table(table, folder, name, f"{CAPTIONS[name]} [{about}]")
    if has_matplotlib():
        for name, figure in draw(results).items():
            save_figure(figure, folder, name)
    else:
        say(FIGURES_NEED)
    return tables.get(plan.benchmark, pd.DataFrame())


def print_results(results: Any, table: pd.DataFrame, benchmark: str) -> None:
    """The main table, and what it says."""
    out, width = console(), None
    if benchmark == "del" and out.width < WIDE:
        table = table.filter(regex="Self-Acc|Neg-Acc")
    if benchmark == "rev":  # the file has the errors
        table, width = rev_tables(results, errors=False)["rev"], min(out.width, REV_WIDE)
    out.print(f"\n{CAPTIONS[benchmark]}.\n", markup=False)
    for setting, part in ranked(table, lowest_first=benchmark != "inj", width=width):
        out.print(setting, part, sep="\n", markup=False)
    if benchmark == "inj":
        out.print(reading(results), markup=False)
    elif benchmark == "del":
        if out.width >= WIDE:
            show(results.at_price(), f"{CAPTIONS['del_at_price']}.\n")
        out.print(general_text(results), markup=False)


def publish_ranking(results: InjResults | DelResults, store: Store) -> None:
    """The ranking of the settings at the newest plan's ratio, and the best of each method where all
    is measured.
    """
    folder, plan = store.folder, store.plans()[-1].plan
    benchmark, ratio, missing = plan.benchmark, plan.tasks[-1].ratio, results.missing
    write_text(folder / "frame.csv", results.frame.to_csv(index=False))
    ranking = rank(results, ratio)
    if not len(ranking):
        say("There is nothing to rank yet at this ratio.")
        return
    table, caption = shown(ranking), f"The dev sequences of {benchmark}, ratio {ratio:g}"
    save_table(table, folder, "ranking", caption)
    show(table)
    if len(missing):
        say(
            f"{len(missing)} measurements are MISSING: the ranking is of what is there, and "
            "settings.json is not written."
        )
        return
    file = folder / "settings.json"
    for name, settings in write_settings(ranking, file, caption).items():
        typer.echo(f"\nBest {name}: {settings}")
    typer.echo(f"Use them: tl-localize {benchmark} --settings {file}")
