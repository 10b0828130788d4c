"""tl-localize tune"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

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
    say,
)
from tl_localize.cli.running import (
    Address,
    Engine,
    Gpus,
    Quiet,
    RetryFailed,
    Shard,
    Verbose,
    Workers,
    again,
    finish,
    work,
)
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.models import load_model
from tl_localize.paper import paper_grids
from tl_localize.runs import InjRun, inj_results
from tl_localize.store import Store, nearest, prepare_folder
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
    engine: Engine = "process",
    address: Address = None,
    workers: Workers = None,
    gpus: Gpus = None,
    shard: Shard = "1/1",
    retry_failed: RetryFailed = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Try every setting of a grid on the dev sentences of INJ and keep the one with the highest mean recall.

    Prints all settings, the best first, and writes settings.json for tl-localize inj --settings. In a folder that is there it makes only
    what is missing.
    """
    with errors_explained():
        grids = read_grids(grid) if grid else paper_grids()
        if method not in grids:
            raise ValueError(f"grid must hold the method {method!r}, got {sorted(grids)}.{nearest(method, grids)}")
        (fixed,) = make_methods(method, settings or [])
        candidates = [
            dataclasses.replace(fixed, **{axis: getattr(c, axis) for axis in grids[method]}) for c in expand(method, grids[method])
        ]
        store = Store(prepare_folder(out))
        load = partial(load_model, model, device, parse_dtype(dtype))
        loaded = load()
        benchmark = InjBenchmark(model=loaded, sequences=inj_sequences(loaded, data, dev=True), ratio=ratio, distractors=distractors)
        command = again(
            "tune",
            method=method,
            grid=grid,
            model=Path(model) if Path(model).is_dir() else model,
            data=data,
            distractors=distractors,
            device=device,
            dtype=dtype,
            set=settings,
        )
        runs = [InjRun(store, benchmark, candidates, command, retry_failed)]
        done = work(runs, load, shard=shard, engine=engine, address=address, workers=workers, gpus=gpus, verbose=verbose, quiet=quiet)
        results = inj_results(store)
        results.save(store.folder)
        if len(results.frame):
            ranking = rank_inj(results, candidates)
            rule = f"highest mean recall on the {N_DEV} dev sentences of {data or 'our own'}"
            varied = ranking.assign(settings=[", ".join(f"{axis}={s[axis]}" for axis in grids[method]) for s in ranking["settings"]])
            save_table(varied.set_index("settings"), store.folder, "ranking", f"{method} on the dev sentences, ratio {ratio:g}")
            typer.echo(to_markdown(varied.set_index("settings")))
            if len(results.missing):
                say(f"{len(results.missing)} measurements are MISSING: the ranking is of what is there, and settings.json is not written.")
            else:
                best = write_settings(ranking, store.folder / "settings.json", rule)
                use = f"tl-localize inj --model {model} --settings {store.folder / 'settings.json'}"
                typer.echo(f"\nBest: {best[method]}\nUse it: {use}")
        finish(runs, done)
