"""tl-localize tune"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from jaxtyping import Integer
from torch import Tensor

from tl_localize.cli.del_benchmark import (
    DEFAULT_SEQUENCES,
    FIRST_LAYER,
    General,
    Prefix,
    check_data,
    collect_default,
    default_ratios,
    del_data,
    del_methods,
)
from tl_localize.cli.options import (
    Device,
    Distractors,
    Dtype,
    Model,
    Settings,
    check_at_least,
    check_ratios,
    errors_explained,
    inj_ratios,
    make_methods,
    parse_dtype,
    say,
    say_settings,
)
from tl_localize.cli.running import (
    Address,
    Engine,
    Gpus,
    How,
    Quiet,
    RetryFailed,
    Shard,
    Verbose,
    Workers,
    again,
    finish,
    work,
)
from tl_localize.evals.del_benchmark import DelBenchmark
from tl_localize.evals.inj_benchmark import InjBenchmark, InjResults
from tl_localize.evals.tuning import expand, method_of, rank_del, rank_inj, read_grids, write_settings
from tl_localize.execution.store import Store, digest_of, nearest, prepare_folder, write_text
from tl_localize.models import load_model
from tl_localize.neurons import LanguageModel
from tl_localize.reference import N_DEV, inj_sequences
from tl_localize.report.paper import paper_grids, paper_settings
from tl_localize.report.tables import save_table, to_markdown
from tl_localize.runs import DelRun, InjRun, del_results, inj_results
from tl_localize.sequences import MemorizedSequence


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
    out: Annotated[Path | None, typer.Option(help="Results folder. Default: ./tl-localize-results/tune-BENCHMARK-MODEL.")] = None,
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

    What the grid leaves open is as in tl-localize inj or del, for the paper's models the paper's, and so is the ratio, the largest of
    theirs. INJ keeps the highest mean recall; DEL the largest loss of accuracy on the target minus that on the others (Self minus Neg).
    Prints all settings, the best first, and writes settings.json for --settings of tl-localize inj or del. In a folder that is there it
    makes only what is missing.
    """
    with errors_explained():
        if benchmark not in ("inj", "del"):
            raise ValueError(f"benchmark must be inj or del, got {benchmark!r}.")
        grids = read_grids(grid) if grid else paper_grids()
        if method not in grids:
            raise ValueError(f"grid must hold the method {method!r}, got {sorted(grids)}.{nearest(method, grids)}")
        if benchmark == "inj":
            ratio = max(inj_ratios(model)) if ratio is None else ratio
            (fixed,) = make_methods(method, settings or [], paper_settings(model, "inj", ratio))
            say_settings(model, "inj", "the grid")
        else:
            ratio = max(default_ratios(model)) if ratio is None else ratio
            (fixed,) = del_methods(method, settings or [], model, {})
            say_settings(model, "del", "the grid")
        candidates = [replace(fixed, **{axis: getattr(c, axis) for axis in grids[method]}) for c in expand(method, grids[method])]
        check_ratios([ratio])
        check_at_least(0, distractors=distractors)
        check_at_least(1, n_prefix=n_prefix)
        if benchmark == "del":
            check_data(model, data, general)
            if data is None:
                check_dev(n_dev, DEFAULT_SEQUENCES)
        how = How(shard=shard, engine=engine, address=address, workers=workers, gpus=gpus, verbose=verbose, quiet=quiet)
        store = Store(prepare_folder(out or Path("tl-localize-results") / f"tune-{benchmark}-{Path(model).name}"))
        load = partial(load_model, model, device, parse_dtype(dtype))
        loaded = load()
        if benchmark == "del":
            data = data or collect_default(loaded, load, store.folder / "collection", how, n_dev, [ratio])
        common = {
            "benchmark": benchmark,
            "method": method,
            "grid": grid,
            "model": model,
            "data": data,
            "device": device,
            "dtype": dtype,
            "set": settings,
        }
        if benchmark == "inj":
            setting = InjBenchmark(model=loaded, sequences=inj_sequences(loaded, data, dev=True), ratio=ratio, distractors=distractors)
            run = InjRun(store, setting, candidates, again("tune", **common, distractors=distractors), retry_failed)
        else:
            assert data is not None
            dev, text = dev_data(loaded, data, general, n_dev, n_prefix)
            command = again("tune", **common, general=general, n_dev=n_dev, n_prefix=n_prefix)
            run = DelRun(
                store, DelBenchmark(loaded, dev, text, ratios=(ratio,), n_dev=0, first_layer=FIRST_LAYER), candidates, command, retry_failed
            )
        done = work([run], load, how)
        publish_tune(store, store.folder, digest_of(run.plan))
        finish([run], done)


def publish_tune(store: Store, folder: Path, key: str | None = None) -> None:
    """The ranking of the settings from the folder of a search, and the best of each method where all is measured.

    Args:
        key: of the plan whose ratio it is for; by default the newest.
    """
    plans = store.plans()
    asked = next(one for one in reversed(plans) if key in (None, one["key"]))
    plan, command = asked["value"], asked["about"]["command"]
    benchmark, n_dev = plan["benchmark"], len(plan["parts"])
    inj = benchmark == "inj"
    results, kind, column = (inj_results(store), InjRun, "injection_ratio") if inj else (del_results(store), DelRun, "ratio")
    ratio = kind.ratio_of(plan)
    mine = [one for one in plans if kind.ratio_of(one["value"]) == ratio]
    names = {command_value(one["about"]["command"], "--method") for one in mine}
    labels = {label: text for one in mine for label, text in one["value"]["methods"].items()}
    candidates = [method for method in map(method_of, dict.fromkeys(labels.values())) if method.name in names]
    frame, missing = (part[part[column] == ratio] if len(part) else part for part in (results.frame, results.missing))
    if not len(frame) or not frame["method"].map(labels).isin(list(map(repr, candidates))).any():
        say("Nothing is measured yet.")
        return
    write_text(prepare_folder(folder) / "frame.csv", frame.to_csv(index=False))
    results = replace(results, frame=frame.assign(method=frame["method"].map(labels)))
    if isinstance(results, InjResults):
        n_dev = results.frame["sequence_id"].nunique()
        lost = results.frame.loc[~results.frame["converged"], "sequence_id"].nunique()
        if not results.frame["converged"].any():
            say(f"NONE of {lost} injections converged: there is nothing to rank.")
            return
        ranking = rank_inj(results, candidates)
        rule = f"highest mean recall on the {n_dev} dev sentences of {command_value(command, '--data') or 'our own'}"
        if lost:
            rule += f", of which {lost} are left out, for their injections did not converge"
            say(f"{lost} of {n_dev} injections did not converge and are left out of the ranking.")
    else:
        ranking = rank_del(results, candidates, ratio)
        rule = f"largest loss of accuracy on the target minus that on the others at {100 * ratio:g} %, {n_dev} dev sequences"
    settings = [varied(method, own, ranking) for method, own in zip(ranking["method"], ranking["settings"], strict=True)]
    shown = ranking.assign(settings=settings).set_index("settings")
    save_table(shown, folder, "ranking", f"The dev sequences of {benchmark}, ratio {ratio:g}")
    typer.echo(to_markdown(shown))
    if len(missing):
        say(f"{len(missing)} measurements are MISSING: the ranking is of what is there, and settings.json is not written.")
        return
    for name, best in write_settings(ranking, folder / "settings.json", rule).items():
        typer.echo(f"\nBest {name}: {best}")
    model = command_value(command, "--model")
    typer.echo(f"Use them: tl-localize {benchmark} --model {model} --settings {folder / 'settings.json'}")


def check_dev(n_dev: int, n_sequences: int) -> None:
    """Raise ValueError unless so many dev sequences can be compared, and leave others."""
    if not 2 <= n_dev < n_sequences:
        raise ValueError(
            f"n_dev must be at least 2, for a target and another, and below the {n_sequences} sequences, got {n_dev}. "
            "Collect with another --n-dev, or more text."
        )


def command_value(command: Sequence[str], option: str) -> str:
    """What a command gives to an option, or nothing."""
    return next((value for name, value in pairwise(command) if name == option), "")


def varied(method: str, settings: Mapping[str, Any], ranking: pd.DataFrame) -> str:
    """Those settings that are not the same in all rows of a method; all where there is one row."""
    others: list[Mapping[str, Any]] = list(ranking[ranking["method"] == method]["settings"])
    axes = {axis: value for axis, value in settings.items() if any(other[axis] != value for other in others)}
    return ", ".join(f"{axis}={value}" for axis, value in (axes or settings).items())


def dev_data(
    model: LanguageModel, data: Path, general: Path | None, n_dev: int, n_prefix: int
) -> tuple[list[MemorizedSequence], Integer[Tensor, "sequence pos"]]:
    """The dev sequences of DEL, each a target and the others' negative, and general text; the test sequences take no part."""
    sequences, n_dev, text = del_data(model, data, general, n_dev, n_prefix)
    check_dev(n_dev, len(sequences))
    return sequences[:n_dev], text
