"""tl-localize status | table | trace: what a results folder says, without the model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_localize.cli.inj import publish_inj
from tl_localize.cli.options import errors_explained
from tl_localize.runs import planned, status, works
from tl_localize.store import Store
from tl_localize.tables import to_markdown

Folder = Annotated[Path, typer.Argument(help="Results folder of tl-localize inj or tune.")]


def show_status(folder: Folder) -> None:
    """What is done, missing and failed in a results folder, and about how long the rest takes one process."""
    with errors_explained():
        state = status(Store(folder, read_only=True))
        seconds = float(state.frame["seconds_left"].sum())
        typer.echo(to_markdown(state.frame.assign(seconds_left=state.frame["seconds_left"].round(1)).rename_axis("method")))
        for unit, reason in state.reasons.items():
            typer.echo(f"FAILED {unit}: {reason}")
        typer.echo(f"\nTime left: about {seconds / 60:.1f} min for one process.")


def table(
    folder: Folder, out: Annotated[Path | None, typer.Option(help="Where to write. Default: the results folder itself.")] = None
) -> None:
    """All tables and figures of INJ from a results folder alone; the model is not needed."""
    with errors_explained():
        publish_inj(Store(folder, read_only=True), out or folder)


def trace(
    folder: Folder,
    method: Annotated[str | None, typer.Option(help="Only the numbers of this method, by its name in the frame.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Only the numbers of this injection ratio.")] = None,
    name: Annotated[str | None, typer.Option(help="Only this sentence or group, or all whose names begin so.")] = None,
) -> None:
    """The units that a number in a table was made of, and for each the command that makes it again in a new folder."""
    with errors_explained():
        store = Store(folder, read_only=True)
        units, plans = planned(store)
        found = [
            (label, work, unit)
            for (r, _, label), (work, unit) in units.items()
            if method in (None, label) and ratio in (None, r) and work.name.startswith(name or "")
        ]
        if not found:
            known = sorted({label for _, _, label in units})
            raise ValueError(f"method, ratio and name must select a number of the tables, got none. Methods: {', '.join(known)}.")
        for label, work, unit in found:
            record = store.read(unit)
            plan = next(p for p in plans if any(unit == u for w in works(p["value"]) for u in w.measures.values()))
            lines = [
                {key: value for key, value in row.items() if key in ("sequence_id", "ratio", "recall", "recall_across_layers")}
                for row in (record.value["frame"] if record else [])
            ]
            typer.echo(f"{label}, ratio {work.ratio:g}, {work.name}\n  {folder / unit.file}\n  {folder / work.base.file}")
            for line in lines:
                typer.echo(f"    {line}")
            typer.echo(f"  {again_line(plan['about']['command'], plan['value'], work.index, label, work.ratio) if record else 'MISSING'}\n")


def again_line(command: list[str], plan: dict[str, Any], index: int, label: str, ratio: float) -> str:
    """The command that makes one part of a run again, in a new folder."""
    if not command:
        return "made by Python: InjRun of the plan's settings"
    only = ["--methods", label] if command[0] == "inj" and label.isidentifier() and label != "true_rows" else []
    part = ["--ratio", str(ratio), "--shard", f"{index + 1}/{len(plan['parts'])}", "--out", "made-again"]
    return shlex.join(["tl-localize", *command, *only, *part])
