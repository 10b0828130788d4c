"""tl-localize tune"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from tl_localize.cli.inj import run_shown
from tl_localize.cli.options import (
    N_DEV,
    REFERENCE_RATIO,
    Data,
    Device,
    Distractors,
    Dtype,
    Model,
    Settings,
    errors_explained,
    inj_sequences,
    make_methods,
    parse_dtype,
)
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.models import load_model
from tl_localize.paper import paper_grids
from tl_localize.store import nearest, prepare_folder
from tl_localize.tables import save_table, to_markdown
from tl_localize.tune import expand, rank_inj, read_grids, write_settings


def tune(
    method: Annotated[str, typer.Option(help="Method to tune: hard_concrete, slimming or another with settings.")] = "hard_concrete",
    grid: Annotated[Path | None, typer.Option(help="JSON file {METHOD: {SETTING: [values]}}. Default: the paper's grid.")] = None,
    model: Model = "reference-gpt2",
    data: Data = None,
    ratio: Annotated[float, typer.Option(help="Share of the rows of W_out to inject into.")] = REFERENCE_RATIO,
    distractors: Distractors = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    out: Annotated[Path, typer.Option(help="Folder for the ranking and settings.json.")] = Path("tl-localize-results/tune"),
    settings: Settings = None,
) -> None:
    """Try every setting of a grid on the dev sentences of INJ and keep the one with the highest mean recall.

    Prints all settings, the best first, and writes settings.json for tl-localize inj --settings.
    """
    with errors_explained():
        grids = read_grids(grid) if grid else paper_grids()
        if method not in grids:
            raise ValueError(f"grid must hold the method {method!r}, got {sorted(grids)}.{nearest(method, grids)}")
        (fixed,) = make_methods(method, settings or [])
        candidates = [
            dataclasses.replace(fixed, **{axis: getattr(c, axis) for axis in grids[method]}) for c in expand(method, grids[method])
        ]
        folder = prepare_folder(out)
        loaded = load_model(model, device, parse_dtype(dtype))
        benchmark = InjBenchmark(model=loaded, sequences=inj_sequences(loaded, data, dev=True), ratio=ratio, distractors=distractors)
        results = run_shown(benchmark, candidates)
        if not len(results.frame):
            raise typer.Exit(130)
        ranking = rank_inj(results, candidates)
        results.save(folder)
        best = write_settings(ranking, folder / "settings.json", f"highest mean recall on the {N_DEV} dev sentences of {data or 'our own'}")
        varied = ranking.assign(settings=[", ".join(f"{axis}={s[axis]}" for axis in grids[method]) for s in ranking["settings"]])
        save_table(varied.set_index("settings"), folder, "ranking", f"{method} on the dev sentences, ratio {ratio:g}")
        typer.echo(to_markdown(varied.set_index("settings")))
        typer.echo(f"\nBest: {best[method]}\nUse it: tl-localize inj --model {model} --settings {folder / 'settings.json'}")
