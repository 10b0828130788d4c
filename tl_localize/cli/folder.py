"""tl-localize status | trace: how far a results folder is, and the files behind a number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tl_localize.cli.publish import made_collection
from tl_localize.collect.filter import FilteredChunk, merged
from tl_localize.collect.search import SearchResults
from tl_localize.execution import Store, status
from tl_localize.execution.status import planned
from tl_localize.execution.tasks import closure
from tl_localize.report.terminal import console, plain

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


def show_status(folder: Path) -> None:
    store = Store(folder, read_only=True)
    if not store.plans() and (folder / "collection").is_dir():
        typer.echo("The sequences are collected first:\n")
        folder = folder / "collection"
        store = Store(folder, read_only=True)
    state = status(store)
    left = state.frame["seconds_left"].round(1)
    console().print(plain(state.frame.assign(seconds_left=left).rename_axis("method")))
    for task, reason in state.reasons.items():
        typer.echo(f"FAILED {task}: {reason}")
    typer.echo(f"\nTime left: about {left.sum() / 60:.1f} min for one process.")
    if store.plans()[-1].plan.benchmark == "collect":
        report = SearchResults.of(store).report
        made = "The last step is still to be made."
        if made_collection(folder, report):
            made = "The collection is made."
        typer.echo(
            f"In the chunks that are done: {report} (before near-duplicates are removed). {made}"
        )


def show_trace(folder: Path, method: str | None, ratio: float | None, name: str) -> None:
    store = Store(folder, read_only=True)
    tasks = [task for task in planned(store) if task.kind != "baseline"]
    found = [
        task
        for task in tasks
        if method in (None, task.label)
        and ratio in (None, task.ratio)
        and task.name.startswith(name)
    ]
    if not found:
        known = ", ".join(sorted({task.label for task in tasks}))
        raise ValueError(
            "method, ratio and name must select a number of the tables, got none. Methods: "
            f"{known}."
        )
    collecting = found[0].kind == "collect"
    chunks = SearchResults.of(store).chunks if collecting else []
    for task in found:
        of = f"from {task.name} on" if collecting else f"ratio {task.ratio:g}, {task.name}"
        typer.echo(f"{task.label}, {of}")
        for one in (task, *closure(task.needs)):
            typer.echo(f"  {folder / one.file}")
        record = store.read(task)
        if record is None:
            typer.echo("  MISSING")
        else:
            rows = chunk_rows(chunks[task.index]) if collecting else measured(record.value)
            for row in rows:
                typer.echo(f"    {row}")
            typer.echo(f"  {record.about}")
        typer.echo()


def chunk_rows(chunk: FilteredChunk | None) -> Iterator[dict[str, Any]]:
    """What the search of a chunk says: the report, and each memorized sequence."""
    report, recited = merged([chunk] if chunk else [])
    yield {"came in": report.n_in, **{name: n for name, n in report.removed.items() if n}}
    for one in recited:
        yield {"id": one.id, "accuracy": one.accuracy, "distance": one.distance}


def measured(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a measurement says, a row for each number of the tables."""
    rows: list[dict[str, Any]] = list(value.get("frame", []))
    for effect in value.get("effects", []):
        own = {
            f"self_{name}": effect[name][effect["target"]] for name in ("accuracy", "levenshtein")
        }
        rows.append({**effect, **own})
    for row in rows:
        yield {name: row[name] for name in SHOWN if row.get(name) is not None}
