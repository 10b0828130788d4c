"""tl-localize status | table | trace: what a results folder says, without the model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_localize.cli.collect import publish_collect
from tl_localize.cli.del_benchmark import publish_del
from tl_localize.cli.inj import publish_inj
from tl_localize.cli.options import errors_explained
from tl_localize.cli.tune import publish_tune
from tl_localize.collect import Sifted, merged
from tl_localize.evals.inj_benchmark import TRUE_ROWS
from tl_localize.execution.store import Record, Store, Unit
from tl_localize.report.tables import to_markdown
from tl_localize.runs import collected, status
from tl_localize.runs.del_run import BY_LAYER
from tl_localize.runs.folder import planned, works

Folder = Annotated[Path, typer.Argument(help="Results folder of tl-localize inj, del, tune or collect.")]


def show_status(folder: Folder) -> None:
    """What is done, missing and failed in a results folder, and about how long the rest takes one process."""
    with errors_explained():
        store = Store(folder, read_only=True)
        if not store.plans() and (folder / "collection").is_dir():
            typer.echo("The sequences are collected first:\n")
            folder = folder / "collection"
            store = Store(folder, read_only=True)
        check_planned(store)
        state = status(store)
        seconds = float(state.frame["seconds_left"].sum())
        typer.echo(to_markdown(state.frame.assign(seconds_left=state.frame["seconds_left"].round(1)).rename_axis("method")))
        for unit, reason in state.reasons.items():
            typer.echo(f"FAILED {unit}: {reason}")
        typer.echo(f"\nTime left: about {seconds / 60:.1f} min for one process.")
        if is_collection(store):
            made = "The collection is made." if (folder / "sequences.jsonl").is_file() else "The last step is still to be made."
            typer.echo(f"In the chunks that are done: {collected(store)} (before near-duplicates are removed). {made}")


def check_planned(store: Store) -> None:
    """Raise ValueError unless the folder holds the plan of a run."""
    if not store.plans():
        raise ValueError(f"folder must hold the plan of a run, got none in {str(store.folder)!r}. Give the run's own command again.")


def is_collection(store: Store) -> bool:
    """Whether it is the folder of tl-localize collect, which has a report in place of methods."""
    return any(plan["value"]["benchmark"] == "collect" for plan in store.plans())


def table(
    folder: Folder, out: Annotated[Path | None, typer.Option(help="Where to write. Default: the results folder itself.")] = None
) -> None:
    """All tables and figures from a results folder alone; the model is not needed."""
    with errors_explained():
        store = Store(folder, read_only=True)
        check_planned(store)
        plan = store.plans()[0]
        publish = {"inj": publish_inj, "del": publish_del, "collect": publish_collect}[plan["value"]["benchmark"]]
        (publish_tune if plan["about"]["command"][:1] == ["tune"] else publish)(store, out or folder)


def trace(
    folder: Folder,
    method: Annotated[str | None, typer.Option(help="Only the numbers of this method, by its name in the frame.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Only the numbers of this ratio (inj: of the injection).")] = None,
    name: Annotated[str | None, typer.Option(help="Only this sentence, group or target, or all whose names begin so.")] = None,
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
        plan_of = {unit.key: plan for plan in reversed(plans) for work in works(plan["value"]) for unit in work.measures.values()}
        collection = is_collection(store)
        for label, work, unit in found:
            record = store.read(unit)
            plan = plan_of[unit.key]
            typer.echo(f"{label}, from {work.name} on" if collection else f"{label}, ratio {work.ratio:g}, {work.name}")
            for one in (unit, work.base):
                if one:
                    typer.echo(f"  {folder / one.file}")
            for line in numbers(unit, record) if record else []:
                typer.echo(f"    {line}")
            typer.echo(f"  {again_line(plan['about']['command'], plan['value'], work.index, label, work.ratio) if record else 'MISSING'}\n")
        if collection and (command := plans[-1]["about"]["command"]):
            typer.echo("Near-duplicates and what is drawn are found by the last step, from all chunks:")
            typer.echo(f"  {shlex.join(['tl-localize', *command, '--out', 'made-again'])}")


def numbers(unit: Unit, record: Record) -> list[dict[str, Any]]:
    """What a measurement says, a line for each number of the tables."""
    if unit.kind == "collect":
        counts, memorized = merged([Sifted.unpacked(record.value, record.tensors)])
        removed = {name: n for name, n in counts.removed.items() if n}
        return [{"came in": counts.n_in, **removed}, *({"id": m.id, "accuracy": m.accuracy, "distance": m.distance} for m in memorized)]
    shown = ("sequence_id", "ratio", "recall", "recall_across_layers", "layer", "multiple", "perplexity")
    effects = [
        {**effect, **share, **{f"self_{name}": effect[name][effect["target"]] for name in ("accuracy", "levenshtein")}}
        for effect, share in zip(record.value.get("effects", ()), unit.identity.get("shares", ()), strict=True)
    ]
    rows = record.value.get("frame", effects)
    return [{key: value for key, value in row.items() if key in shown or key.startswith("self_")} for row in rows]


def again_line(command: list[str], plan: dict[str, Any], index: int, label: str, ratio: float) -> str:
    """The command that makes one part of a run again, in a new folder."""
    if not command:
        return f"made by Python: {plan['benchmark'].capitalize()}Run of the plan's settings"
    if plan["benchmark"] == "collect":
        return shlex.join(["tl-localize", *command, "--shard", f"{index + 1}/{len(plan['chunks'])}", "--out", "made-again"])
    method = label.removesuffix(BY_LAYER)
    only: list[str] = []
    if command[0] != "tune" and method.isidentifier() and method != TRUE_ROWS:
        # --set of other methods is refused where they are not run
        pairs = zip(command, [*command[1:], ""], strict=True)
        others = [i for i, (name, value) in enumerate(pairs) if name == "--set" and not value.startswith(f"{method}.")]
        command = [word for i, word in enumerate(command) if i not in others and i - 1 not in others]
        only = ["--methods", method, *(["--single-layer", method] if method != label else [])]
    part = ["--ratio", str(ratio), "--shard", f"{index + 1}/{len(plan['parts'])}", "--out", "made-again"]
    return shlex.join(["tl-localize", *command, *only, *part])
