"""tl-localize del"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tl_localize.cli import options
from tl_localize.cli.collect import searched
from tl_localize.cli.options import (
    General,
    MethodSettings,
    ModelOptions,
    Printed,
    RunOptions,
    SequenceOptions,
    SettingsFile,
    Units,
    say,
)
from tl_localize.cli.running import compute, finish
from tl_localize.collect.collection import check_draw
from tl_localize.collect.reference_texts import reference_search, with_planted
from tl_localize.evals import presets
from tl_localize.evals.ablation import ABLATIONS
from tl_localize.evals.del_benchmark import DelBenchmark
from tl_localize.evals.del_results import DelResults
from tl_localize.evals.single_layer import single_layers
from tl_localize.evals.tuning import read_settings
from tl_localize.execution import Store
from tl_localize.files import nearest, save_tensors, write_text
from tl_localize.neurons import LanguageModel, NeuronView, check_seed
from tl_localize.reference import N_DEV, held_out_tokens, lacking_texts
from tl_localize.report.figures import del_figures
from tl_localize.report.tables import del_tables
from tl_localize.scores import NeuronScores
from tl_localize.units import NEURONS
from tl_localize.units import Units as Kind

DelData = Annotated[
    Path | None,
    typer.Option(
        help="Folder of collect, tokens, JSON lines, a table. Default: a reference model's own."
    ),
]


def del_benchmark(
    *,
    on: ModelOptions,
    data: DelData = None,
    general: General = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated names, or 'all'. Random is always among them.")
    ] = "all",
    units: Units = "neurons",
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            help=(
                "Shares to ablate. Default: 0.001, 0.005; reference models 0.02, 0.1; heads 0.17, "
                "0.34."
            )
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Sequences, dev ones included, drawn. Default: 105 without data, else all."
        ),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(help="How many, such as 25,zero_out=6. Default: 8 without data, else all."),
    ] = None,
    ablation: Annotated[
        str, typer.Option(help=f"What ablated neurons become: {', '.join(ABLATIONS)}.")
    ] = "zero",
    single_layer: Annotated[
        str | None, typer.Option(help="Also spend the budget in one layer, for this method.")
    ] = None,
    n_dev: Annotated[
        int,
        typer.Option(
            help="Of files: the first sequences, left out because settings were chosen on them."
        ),
    ] = N_DEV,
    rows: SequenceOptions,
    seed: Annotated[int, typer.Option(help="Of Random, the order of targets and resampling.")] = 0,
    set: MethodSettings = None,
    settings: SettingsFile = None,
    run: RunOptions,
    printed: Printed,
) -> None:
    """DEL: ablate the neurons, or with --units the heads, that each method locates for a memorized
    sequence; is it forgotten, and only it?

    Prints the change of accuracy and distance of the sequence (Self) and the others (Neg) and of
    the perplexity, and writes a results folder with tables and figures. In a folder that is there
    it computes only what is missing. Without data a reference model's sequences are collected first
    (in all about 14 minutes on one core). Exit status 1: a task failed; 130: interrupted.
    """
    check_seed(seed, bits=32)
    tuned, kind = read_settings(settings) if settings else {}, presets.parse_units(units)
    # mistakes are found before the model is loaded
    chosen = presets.del_methods(methods, set or [], on.model, tuned, seed, kind)
    of_it = [text for text in set or [] if text.startswith(f"{single_layer}.")]
    alone = (
        presets.del_methods(single_layer, of_it, on.model, tuned, seed, kind)
        if single_layer
        else []
    )
    given = rows.data(data)
    presets.check_data(on.model, given, general)
    options.check_ratios(ratio)
    n_targets, fewer = presets.parse_targets(targets) if targets else (None, {})
    options.check_at_least(1, limit=limit)
    options.check_at_least(0, n_dev=n_dev)
    if given is None:
        limit = limit or presets.DEL_SEQUENCES
        check_draw(n_dev, limit)
        if (n_targets or 0) > limit - n_dev:
            raise ValueError(
                f"targets must be at most {limit - n_dev} without data, got {targets}. Raise "
                "--limit."
            )
    if ablation not in ABLATIONS:
        raise ValueError(
            f"ablation must be one of {', '.join(ABLATIONS)}, got "
            f"{ablation!r}.{nearest(ablation, ABLATIONS)}"
        )
    options.say_settings(on.model, "del", settings, kind)
    folder = run.folder(
        "del", on.short, "" if kind == NEURONS else units, "" if ablation == "zero" else ablation
    )
    model, ratios, default = (
        on.load(),
        tuple(ratio or presets.del_ratios(on.model, kind)),
        given is None,
    )
    if given is None:
        data = given = collected_default(model, on, run, folder, n_dev, ratios, kind)
    sequences, n_dev, text = presets.del_data(model, given, general, n_dev)
    sequences = presets.drawn_first(sequences, n_dev, seed)[:limit]
    n_test = len(sequences) - n_dev
    if default and n_targets is None:
        n_targets = min(presets.DEL_TARGETS, n_test)
        targets = ",".join([str(n_targets), *(f"{name}={n}" for name, n in fewer.items())])
    how: dict[str, Any] = {
        "ratios": ratios,
        "ablation": ablation,
        "seed": seed,
        "n_dev": n_dev,
        "n_targets": n_targets,
        "units": kind,
    }
    benchmark = DelBenchmark(model, sequences, text, **how)
    say(
        f"{n_targets or n_test} of {n_test} sequences are targets ({n_dev} dev sequences are left "
        f"out), model {on.model}"
    )
    store = Store(folder)
    runs = [
        *presets.del_runs(benchmark, chosen, fewer),
        *(presets.single_layer_run(benchmark, method) for method in alone),
    ]
    finish(store, compute(runs, store, run, on.load), partial(publish_del, printed=printed))


def publish_del(store: Store, folder: Path, printed: Printed) -> None:
    """All tables and figures of DEL from the folder of a run, and the main table on the terminal."""
    layers = single_layers(store)
    how = partial(del_tables, layers=layers), partial(del_figures, layers=layers)
    options.publish(DelResults.of(store), store, folder, *how, printed)
    for name, frame in layers.groupby("method") if len(layers) else ():
        largest = frame[frame["ratio"] == frame["ratio"].max()]
        write_text(folder / f"single_layer_{name}.csv", largest.to_csv(index=False))


def collected_default(
    model: LanguageModel,
    on: ModelOptions,
    run: RunOptions,
    folder: Path,
    n_dev: int,
    ratios: Sequence[float],
    units: Kind,
) -> Path:
    """The collection of a reference model's own training texts, in a folder, as of tl-localize
    collect, inside the run's.
    """
    view = NeuronView(model, units)
    for ratio in ratios:  # top_k raises where one selects no neuron
        NeuronScores(torch.zeros(view.n_layers, view.n_neurons)).top_k(ratio, rounding="floor")
    say("The reference model's memorized sequences are collected from its training texts.")
    if lacking := lacking_texts():
        say(lacking)
    search, store = reference_search(model), Store(folder / "collection")
    found = searched(search, store, run, on.load, "this goes on, in shards or at once")
    with_planted(model, search.collection(found, n_dev=n_dev)).save(store.folder)
    save_tensors(
        store.folder / presets.GENERAL,
        {"tokens": held_out_tokens()[: presets.DEL_GENERAL].int()},
        {},
    )
    return store.folder
