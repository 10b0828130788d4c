"""tl-localize tune"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from jaxtyping import Integer
from torch import Tensor

from tl_localize.cli.del_benchmark import FIRST_LAYER, General, Prefix, check_data, default_ratios, del_data, del_methods
from tl_localize.cli.options import (
    N_DEV,
    REFERENCE_RATIO,
    Device,
    Distractors,
    Dtype,
    Model,
    Settings,
    bar,
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
from tl_localize.evals.del_benchmark import DelBenchmark, DelResults
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.methods import Localizer
from tl_localize.models import load_model
from tl_localize.neurons import LanguageModel
from tl_localize.paper import paper_grids
from tl_localize.runs import InjRun, inj_results
from tl_localize.sequences import MemorizedSequence
from tl_localize.store import Store, nearest, prepare_folder
from tl_localize.tables import save_table, to_markdown
from tl_localize.tune import expand, rank_del, rank_inj, read_grids, write_settings


def tune(
    benchmark: Annotated[str, typer.Option(help="inj or del.")] = "inj",
    method: Annotated[str, typer.Option(help="Method to tune: hard_concrete, slimming or another with settings.")] = "hard_concrete",
    grid: Annotated[Path | None, typer.Option(help="JSON file {METHOD: {SETTING: [values]}}. Default: the paper's grid.")] = None,
    model: Model = "reference-gpt2",
    data: Annotated[Path | None, typer.Option(help="As for tl-localize inj or del. Default: our own sentences or sequences.")] = None,
    general: General = None,
    ratio: Annotated[float | None, typer.Option(help="inj: share of the rows to inject into. del: share of each layer to silence.")] = None,
    distractors: Distractors = 0,
    n_dev: Annotated[int, typer.Option(help="del, of files: the first sequences, on which settings are chosen.")] = N_DEV,
    n_prefix: Prefix = 32,
    device: Device = None,
    dtype: Dtype = "float32",
    out: Annotated[Path | None, typer.Option(help="Folder for the ranking and settings.json. Default: ./tl-localize-results/tune.")] = None,
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
    """Try every setting of a grid on the dev sequences of a benchmark and keep the best one.

    INJ keeps the highest mean recall; DEL the largest loss of accuracy on the target minus that on the others (Self minus Neg), at the
    largest ratio of tl-localize del unless given. Prints all settings, the best first, and writes settings.json for --settings of
    tl-localize inj or del. INJ in a folder that is there makes only what is missing.
    """
    with errors_explained():
        if benchmark not in ("inj", "del"):
            raise ValueError(f"benchmark must be inj or del, got {benchmark!r}.")
        grids = read_grids(grid) if grid else paper_grids()
        if method not in grids:
            raise ValueError(f"grid must hold the method {method!r}, got {sorted(grids)}.{nearest(method, grids)}")
        (fixed,) = make_methods(method, settings or []) if benchmark == "inj" else del_methods(method, settings or [], "", {})
        candidates = [
            dataclasses.replace(fixed, **{axis: getattr(c, axis) for axis in grids[method]}) for c in expand(method, grids[method])
        ]
        if benchmark == "del":
            check_data(model, data, general)
        folder = prepare_folder(out or Path("tl-localize-results") / "tune")
        load = partial(load_model, model, device, parse_dtype(dtype))
        loaded = load()
        runs: list[InjRun] = []
        done = True
        if benchmark == "inj":
            ratio = ratio or REFERENCE_RATIO
            sentences = inj_sequences(loaded, data, dev=True)
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
            setting = InjBenchmark(model=loaded, sequences=sentences, ratio=ratio, distractors=distractors)
            runs = [InjRun(Store(folder), setting, candidates, command, retry_failed)]
            done = work(runs, load, shard=shard, engine=engine, address=address, workers=workers, gpus=gpus, verbose=verbose, quiet=quiet)
            results = inj_results(runs[0].store)
            ranking = rank_inj(results, candidates) if len(results.frame) else pd.DataFrame()
            rule = f"highest mean recall on the {N_DEV} dev sentences of {data or 'our own'}"
            n_missing = len(results.missing)
        else:
            ratio = ratio or max(default_ratios(model))
            results, ranking, rule = tune_del(del_data(loaded, data, general, n_dev, n_prefix), loaded, ratio, candidates)
            n_missing = 0
        results.save(folder)
        if len(ranking):
            varied = ranking.assign(settings=[", ".join(f"{axis}={s[axis]}" for axis in grids[method]) for s in ranking["settings"]])
            save_table(varied.set_index("settings"), folder, "ranking", f"{method} on the dev sequences of {benchmark}, ratio {ratio:g}")
            typer.echo(to_markdown(varied.set_index("settings")))
            if n_missing:
                say(f"{n_missing} measurements are MISSING: the ranking is of what is there, and settings.json is not written.")
            else:
                best = write_settings(ranking, folder / "settings.json", rule)
                use = f"tl-localize {benchmark} --model {model} --settings {folder / 'settings.json'}"
                typer.echo(f"\nBest: {best[method]}\nUse it: {use}")
        if runs:
            finish(runs, done)


def tune_del(
    collected: tuple[Sequence[MemorizedSequence], int, Integer[Tensor, "sequence pos"]],
    model: LanguageModel,
    ratio: float,
    candidates: Sequence[Localizer],
) -> tuple[DelResults, pd.DataFrame, str]:
    """Results of all settings on the dev sequences of DEL, each a target and the others' negative; the test sequences take no part."""
    sequences, n_dev, general = collected
    if not 2 <= n_dev < len(sequences):
        raise ValueError(
            f"n_dev must be at least 2, for a target and another, and below the {len(sequences)} sequences, got {n_dev}. "
            "Collect with another --n-dev, or more text."
        )
    benchmark = DelBenchmark(model, sequences[:n_dev], general, ratios=(ratio,), n_dev=0, first_layer=FIRST_LAYER)
    with bar() as show:
        results = benchmark.run(candidates, show)
    rule = f"largest loss of accuracy on the target minus that on the others at {100 * ratio:g} %, {n_dev} dev sequences"
    return results, rank_del(results, candidates, ratio), rule
