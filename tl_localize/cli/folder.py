"""tl-localize status | table | trace: what a results folder says, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_localize.cli.collect import made_collection, publish_collect
from tl_localize.cli.del_benchmark import publish_del
from tl_localize.cli.inj import publish_inj
from tl_localize.cli.options import Printed
from tl_localize.cli.tune import TUNED, publish_tune
from tl_localize.collect.filter import FilteredChunk, merged
from tl_localize.collect.search import SearchResults
from tl_localize.execution import Record, Store, Task
from tl_localize.execution import status as status_of
from tl_localize.execution.status import planned
from tl_localize.execution.tasks import closure
from tl_localize.report.terminal import console, plain

Folder = Annotated[
    Path, typer.Argument(help="Results folder of tl-localize inj, del, tune or collect.")
]
SHOWN = (
    "sequence_id",
    "ratio",
    "recall",
    "recall_across_layers",
    "layer",
    "multiple",
    "self_accuracy",
    "self_levenshtein",
    "perplexity",
)


def status(folder: Folder) -> None:
    """What is done, missing and failed in a results folder, and about how long the rest takes one
    process.
    """
    store = Store(folder, read_only=True)
    if not store.plans() and (folder / "collection").is_dir():
        typer.echo("The sequences are collected first:\n")
        folder = folder / "collection"
        store = Store(folder, read_only=True)
    state = status_of(store)
    seconds = float(state.frame["seconds_left"].sum())
    console().print(
        plain(
            state.frame.assign(seconds_left=state.frame["seconds_left"].round(1)).rename_axis(
                "method"
            )
        )
    )
    for task, reason in state.reasons.items():
        typer.echo(f"FAILED {task}: {reason}")
    typer.echo(f"\nTime left: about {seconds / 60:.1f} min for one process.")
    if store.plans()[-1].plan.benchmark == "collect":
        report = SearchResults.of(store).report
        made = (
            "The collection is made."
            if made_collection(folder, report)
            else "The last step is still to be made."
        )
        typer.echo(
            f"In the chunks that are done: {report} (before near-duplicates are removed). {made}"
        )


def table(
    *,
    folder: Folder,
    out: Annotated[
        Path | None, typer.Option(help="Where to write. Default: the folder itself.")
    ] = None,
    printed: Printed,
) -> None:
    """All tables and figures from a results folder alone; the model is not needed."""
    store = Store(folder, read_only=True)
    planned(store)  # raises where there is none
    first = store.plans()[0]
    of_results = {
        "inj": partial(publish_inj, printed=printed),
        "del": partial(publish_del, printed=printed),
    }
    publish = {**of_results, "collect": publish_collect}[first.plan.benchmark]
    (publish_tune if (folder / TUNED).is_file() else publish)(store, out or folder)


def trace(
    folder: Folder,
    method: Annotated[
        str | None, typer.Option(help="Only the numbers of this method, by its name in the frame.")
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Only the numbers of this ratio (inj: of the injection).")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Only this sentence, group or target, or all whose names begin so."),
    ] = None,
) -> None:
    """The tasks that a number in a table was made of, their files, and what made them: versions,
    device, settings.
    """
    store = Store(folder, read_only=True)
    tasks = [task for task in planned(store) if task.kind != "baseline"]
    found = [
        task
        for task in tasks
        if method in (None, task.label)
        and ratio in (None, task.ratio)
        and task.name.startswith(name or "")
    ]
    if not found:
        known = ", ".join(sorted({task.label for task in tasks}))
        raise ValueError(
            "method, ratio and name must select a number of the tables, got none. Methods: "
            f"{known}."
        )
    plans = store.plans()
    searched = SearchResults.of(store).chunks if tasks[0].kind == "collect" else []
    plan_of = {task.key: one for one in reversed(plans) for task in one.plan.tasks}
    for task in found:
        record = store.read(task)
        typer.echo(
            f"{task.label}, from {task.name} on"
            if task.kind == "collect"
            else f"{task.label}, ratio {task.ratio:g}, {task.name}"
        )
        for one in (task, *closure(task.needs)):
            typer.echo(f"  {folder / one.file}")
        for line in numbers(task, record, searched) if record else []:
            typer.echo(f"    {line}")
        plan = plan_of[task.key].plan
        for what in (plan.methods.get(task.label), plan.settings | plan.scoped):
            typer.echo(f"  {what}")
        typer.echo(f"  {record.about if record else 'MISSING'}\n")


def numbers(
    task: Task, record: Record, searched: Sequence[FilteredChunk | None]
) -> list[dict[str, Any]]:
    """What a measurement says, a line for each number of the tables."""
    if task.kind == "collect":
        chunk = searched[task.index]
        report, recited = merged([chunk] if chunk else [])
        removed = {name: n for name, n in report.removed.items() if n}
        return [
            {"came in": report.n_in, **removed},
            *({"id": m.id, "accuracy": m.accuracy, "distance": m.distance} for m in recited),
        ]
    rows: list[dict[str, Any]] = list(record.value.get("frame", []))
    for effect in record.value.get("effects", ()):
        own = {
            f"self_{name}": effect[name][effect["target"]] for name in ("accuracy", "levenshtein")
        }
        alone: dict[str, Any] = {}
        if effect.get("layer") is not None:
            alone = {name: effect[name] for name in ("layer", "multiple")}
        rows.append({**alone, **own, "perplexity": effect["perplexity"]})
    return [{name: value for name, value in row.items() if name in SHOWN} for row in rows]
