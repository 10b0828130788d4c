"""From a results folder to its tables and figures, what is printed of them, and the exit status."""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.cli.messages import command, say, say_next
from tl_localize.cli.pages import about_results, methods_table, write_page
from tl_localize.cli.reports import FIGURES, REPORTS, Published, Tables
from tl_localize.drawing import FIGURES_NEED, has_matplotlib
from tl_localize.evals.deletion.results import DelResults
from tl_localize.evals.inj.results import InjResults
from tl_localize.evals.shared import NOT_DONE
from tl_localize.evals.tuning import failed_at, rank, ranking_table, write_settings
from tl_localize.execution import Status, Store, status
from tl_localize.files import refuse_unreadable, write_json, write_text
from tl_localize.report.pages import PageFigure, PageTable, Shown
from tl_localize.report.saving import CAPTIONS, save_figure, save_table
from tl_localize.report.terminal import console, rank_rows, show
from tl_localize.stats import quantity

WIDE = 110  # columns of a terminal that holds all of DEL's table
TUNE = "tune.json"  # marks a folder of tl-localize tune, and holds the ratio that was asked last
BEST = "best_settings.json"
PAGE = "report.html"
INTERRUPTED = 130
# what the score of a setting is, by the benchmark of tl-localize tune
SCORES = {"inj": "mean recall, a fraction", "del": "Neg minus Self, points"}


def show_status(folder: Path) -> None:
    store = Store(folder, read_only=True)
    state = status(store)
    show(state.frame.rename_axis("method"))
    say_failures(state)


def conclude(
    store: Store, *, interrupted: bool = False, part: bool = False, whole_last: bool = False
) -> None:
    """Publish what is there, and say what failed and what to do next; leave with a status that
    tells.

    Args:
        part: the run was one shard of several, so that results of the others may be missing.
        whole_last: after the shards the command is to be given once without one.
    """
    if interrupted and store.settings is None:  # before anything was computed
        sys.exit(INTERRUPTED)
    next_step = publish(store)
    state = status(store)
    say_failures(state)
    n_missing = int(state.frame["missing"].sum())
    if state.frame["not_converged"].sum():
        say(
            "Some injections did NOT converge, and are left out of the means where others did; "
            "another --ratio, --max-steps or --learning-rate may help, in REV another --recipe or "
            "fewer --sentences."
        )
    if n_missing:
        who = "the same command computes"
        if part:
            then = ", and then this command without --shard," if whole_last else ""
            who = f"the other shards{then} compute"
        elif store.settings and (store.read_only or len(store.settings.commands) > 1):
            who = "this folder's commands, which settings.json lists, compute"
            if all("--shard" in command for command in store.settings.commands):
                who = f"the other shards of {who.removesuffix(', compute')}, compute"
        next_step = f"{who} the {quantity(n_missing, 'result')} not there yet."
    say_next(next_step)
    if interrupted:
        sys.exit(INTERRUPTED)
    if not state.clean or (n_missing and not part):
        sys.exit(1)


def say_failures(state: Status) -> None:
    """Say what failed and why."""
    for cell, reason in state.failures.items():
        where = f" ({cell.scope})" if cell.scope else ""
        say(f"FAILED {cell.method} on {cell.part}{where}: {reason.splitlines()[0]}")
    if state.failures:
        say("Tracebacks are in the folder's failures; the command that asked for them tries again.")


def publish(store: Store) -> str:
    """All that a results folder has, as files in it and on the terminal; what to do next."""
    benchmark = store.settings.benchmark if store.settings else ""
    if benchmark not in REPORTS:
        raise ValueError(
            f"folder must hold results of {', '.join(REPORTS)}, got those of {benchmark!r}. The "
            "report of a collection is its report.csv."
        )
    report = REPORTS[benchmark](store)
    single = getattr(report.results, "single_layers", ())
    if not len(report.results.frame) and not len(single):
        say("Nothing is measured yet.")
    elif (store.folder / TUNE).exists():
        return publish_ranking(report, benchmark, store.folder)
    else:
        tables = publish_results(report, benchmark, store)
        if benchmark in tables:
            print_results(report, tables, benchmark)
        else:
            for name, table in tables.items():
                show(table, f"{CAPTIONS[name]}.\n")
        figures = "figures, " if has_matplotlib() else ""
        say(f"All tables, {figures}the frame and the settings: {store.folder}")
        if not figures:
            say(FIGURES_NEED)
    return report.next_step


def publish_results(report: Published, benchmark: str, store: Store) -> Tables:
    """Write what was measured, its tables, its figures where matplotlib is installed, and a page
    with all of them; returns the tables.
    """
    report.results.save(store.folder)
    model = str(store.agreed["model"])
    units = store.agreed.get("units", {}).get("class")
    about = f"{model}, {units}" if units else model
    tables = report.tables(model)
    figures: list[Shown] = []
    for name, table in tables.items():
        save_table(table, store.folder, name, f"{CAPTIONS[name]} [{about}]")
    if has_matplotlib():
        for name, figure in report.draw().items():
            save_figure(figure, store.folder, name)
            png = (store.folder / f"{name}.png").read_bytes()
            figures.append(PageFigure(png, FIGURES[name]))
    main = [PageTable(table, CAPTIONS[name]) for name, table in tables.items() if name == benchmark]
    further = [
        PageTable(table, CAPTIONS[name]) for name, table in tables.items() if name != benchmark
    ]
    parts = [*main, *figures, *further, methods_table(store)]
    head = {"in short": report.sentence(), **about_results(report.results, store)}
    write_page(store.folder / PAGE, parts, f"{benchmark.upper()}, {model}", head)
    return tables


def print_results(report: Published, tables: Tables, benchmark: str) -> None:
    """The main table, and what it says."""
    out = console()
    is_wide = out.width >= WIDE
    table = report.shown() if report.shown else tables[benchmark]
    if report.narrow and not is_wide:
        table = table.filter(regex=report.narrow)
    width = min(out.width, report.width or out.width)
    out.print(f"\n{CAPTIONS[benchmark]}.\n", markup=False)
    for setting, part in rank_rows(table, lowest_first=report.lowest_first, width=width):
        out.print(setting, part, sep="\n", markup=False)
    if report.more and is_wide:
        show(tables[report.more], f"{CAPTIONS[report.more]}.\n")
    out.print(report.sentence(), markup=False)


def publish_ranking(report: Published, benchmark: str, folder: Path) -> str:
    """The ranking of the settings at the ratio that was asked last, and the best of each method
    where all is measured; what to do next.
    """
    results = report.results
    assert isinstance(results, InjResults | DelResults)  # what tl-localize tune takes
    ratio = read_ratio(folder)
    write_text(folder / "frame.csv", results.frame.to_csv(index=False))
    missing = results.missing[results.missing["scope"] == f"{ratio:g}"]
    n_missing = int(missing["reason"].eq(NOT_DONE).sum())
    failed = failed_at(results, ratio)
    ranking = rank(results, ratio)
    again = "the same command measures what is missing, or the one that was broken off."
    if len(failed):
        say(f"{quantity(len(failed), 'setting')} FAILED on a text and can't be ranked.")
    if not len(ranking) and n_missing:
        say("There is nothing to rank yet at this ratio.")
        return again
    if not len(ranking):
        why = "no injection converged" if benchmark == "inj" else "a single dev text has no others"
        why = "each failed" if len(failed) else why
        say(f"No setting has a score: {why}. {BEST} is not written.")
        return "another --ratio." if benchmark == "inj" else "more dev texts (--n-dev)."
    table = ranking_table(ranking)
    caption = f"The dev sequences of {benchmark}, ratio {ratio:g}; score: {SCORES[benchmark]}"
    save_table(table, folder, "ranking", caption)
    show(table, f"{caption}.\n")
    if n_missing:
        say(
            f"{quantity(n_missing, 'measurement')} MISSING: the ranking is of what is there, and "
            f"{BEST} is not written."
        )
        return again
    ranking = without_layers(ranking)
    for name, settings in write_settings(ranking, folder / BEST, caption).items():
        print(f"\nBest {name}: {settings}")
    same = "with the model, the options of texts (--data, --n-dev, ...) and --units of this search"
    return f"{command(benchmark, '--settings', folder / BEST)}, {same}."


def without_layers(ranking: pd.DataFrame) -> pd.DataFrame:
    """A ranking whose settings lack ``first_layer``, unless it was searched: DEL spares a layer
    that INJ and REV look at, and each of them sees to that.
    """
    found: list[Any] = [settings.get("first_layer") for settings in ranking["settings"]]
    layers: Any = pd.Series(found, ranking.index, dtype=object)
    n_found = layers.groupby(ranking["method"]).transform(lambda part: part.nunique(dropna=False))
    kept: list[Any] = [
        settings if whole else {key: settings[key] for key in settings if key != "first_layer"}
        for settings, whole in zip(ranking["settings"], n_found > 1, strict=True)
    ]
    return ranking.assign(settings=kept)


def write_ratio(folder: Path, ratio: float) -> None:
    """Mark a folder of tl-localize tune, with the ratio at which settings are ranked."""
    write_json(folder / TUNE, {"ratio": ratio})


def read_ratio(folder: Path) -> float:
    with refuse_unreadable(
        "folder must hold a whole tune.json", folder / TUNE, "Give the command again."
    ):
        return float(json.loads((folder / TUNE).read_bytes())["ratio"])
