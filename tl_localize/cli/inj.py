"""tl-localize inj"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tl_localize.cli.options import (
    Data,
    Device,
    Distractors,
    Dtype,
    Model,
    Settings,
    SettingsFile,
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
from tl_localize.evals.inj_benchmark import InjBenchmark
from tl_localize.evals.tuning import read_settings
from tl_localize.execution.store import Store, prepare_folder
from tl_localize.models import REFERENCE_MODELS, load_model
from tl_localize.reference import N_DEV, inj_sequences
from tl_localize.report.figures import recall_curve, save_figure, target_against_distractors
from tl_localize.report.paper import paper_settings
from tl_localize.report.tables import inj_tables, save_table, to_markdown
from tl_localize.runs import InjRun, inj_results

DEFAULT_SENTENCES = 6  # of the default run: as many as all methods get through within 10 minutes on 2 cores


def inj(
    model: Model = "reference-gpt2",
    data: Data = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names, or 'all'.")] = "all",
    ratio: Annotated[list[float] | None, typer.Option(help="Share of the rows of W_out to inject into. May be given many times.")] = None,
    limit: Annotated[int | None, typer.Option(help="Number of sentences. Default: 6 on a reference model, else all.")] = None,
    seed: Annotated[int, typer.Option(help="Sentence i is written into rows drawn with seed + i.")] = 0,
    learning_rate: Annotated[float | None, typer.Option(help="Of the injection. Default: the paper's, by ratio.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Of the injection. Default: the paper's, by ratio.")] = None,
    distractors: Distractors = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    out: Annotated[Path | None, typer.Option(help="Results folder. Default: ./tl-localize-results/inj-MODEL.")] = None,
    settings: Settings = None,
    settings_file: SettingsFile = None,
    engine: Engine = "process",
    address: Address = None,
    workers: Workers = None,
    gpus: Gpus = None,
    shard: Shard = "1/1",
    retry_failed: RetryFailed = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """INJ: write new sentences into random rows of W_out, then ask each method which rows they are.

    Prints recall (the share of the true rows among the top 1x, 2x and 5x as many neurons of each layer) and writes a results folder. In
    a folder that is there it makes only what is missing. Exit status 1: a unit failed, or an injection did not converge; 130: interrupted.
    """
    with errors_explained():
        tuned = read_settings(settings_file) if settings_file else {}
        make_methods(methods, settings or [], tuned)  # mistakes are found before the model is loaded
        check_ratios(ratio)
        check_at_least(1, limit=limit, max_steps=max_steps)
        check_at_least(0, seed=seed, distractors=distractors)
        if learning_rate is not None and not learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {learning_rate}. Leave it out for the paper's.")
        how = How(shard=shard, engine=engine, address=address, workers=workers, gpus=gpus, verbose=verbose, quiet=quiet)
        say_settings(model, "inj", settings_file)
        store = Store(
            prepare_folder(
                out or Path("tl-localize-results") / f"inj-{Path(model).name}{f'-distractors-{distractors}' if distractors else ''}"
            )
        )
        load = partial(load_model, model, device, parse_dtype(dtype))
        loaded = load()
        reference = model in ("reference", *REFERENCE_MODELS)
        ratios = ratio or inj_ratios(model)
        sequences = inj_sequences(loaded, data)
        limit = limit or (DEFAULT_SENTENCES if reference and data is None else len(sequences))
        say(f"{min(limit, len(sequences))} of {len(sequences)} sentences ({N_DEV} dev sentences are left out), model {model}")
        runs: list[InjRun] = []
        for r in ratios:
            benchmark = InjBenchmark(
                model=loaded,
                sequences=sequences[:limit],
                ratio=r,
                seed=seed,
                learning_rate=learning_rate,
                max_steps=max_steps,
                distractors=distractors,
            )
            chosen = make_methods(methods, settings or [], paper_settings(model, "inj", r), tuned)
            command = again(
                "inj",
                model=model,
                data=data,
                limit=limit,
                seed=seed,
                learning_rate=learning_rate,
                max_steps=max_steps,
                distractors=distractors,
                device=device,
                dtype=dtype,
                set=settings,
                settings=settings_file,
            )
            runs.append(InjRun(store, benchmark, chosen, command, retry_failed))
        done = work(runs, load, how)
        publish_inj(store, store.folder)
        finish(runs, done)


def publish_inj(store: Store, folder: Path) -> None:
    """All tables and figures of INJ from the folder of a run, and the first table on the terminal."""
    results = inj_results(store)
    results.save(folder)
    if not len(results.frame):
        say("Nothing is measured yet.")
        return
    model = store.plans()[0]["value"]["model"]
    tables = inj_tables(results, model)
    for name, table in tables.items():
        save_table(table, folder, name, f"INJ on {model}: {name}, in percent, mean ± standard error.")
    try:
        save_figure(recall_curve(results), folder, "inj_recall_curve")
        if results.distractors:
            save_figure(target_against_distractors(results), folder, "inj_own_against_foreign")
    except ImportError as error:
        say(str(error))
    typer.echo("\nRecall in percent, mean ± standard error over sentences; 1x, 2x, 5x: top share of each layer over the injected share\n")
    typer.echo(to_markdown(tables["inj"]))
    typer.echo(f"All tables, the frame and the settings: {folder}")
