"""tl-localize del"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Integer
from torch import Tensor

from tl_localize.cli.collect import GENERAL, reference_search, searched, with_planted
from tl_localize.cli.options import (
    Device,
    Dtype,
    Model,
    Settings,
    SettingsFile,
    check_at_least,
    check_ratios,
    errors_explained,
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
from tl_localize.collect import check_draw, load_collection
from tl_localize.evals.del_benchmark import INTERVENTIONS, DelBenchmark, check_by_layer, check_selects
from tl_localize.evals.tuning import read_settings
from tl_localize.execution.store import Store, nearest, prepare_folder, write_text
from tl_localize.methods import METHODS, Localizer
from tl_localize.models import REFERENCE_MODELS, load_model
from tl_localize.neurons import LanguageModel
from tl_localize.readers import TOKEN_SUFFIXES, memorized_sequences, read_manual, read_tokens
from tl_localize.reference import N_DEV, held_out_tokens
from tl_localize.report.figures import del_figures, save_figure
from tl_localize.report.paper import paper_settings
from tl_localize.report.tables import DEL_CAPTIONS, del_tables, save_table, single_layer_table, to_markdown
from tl_localize.runs import CollectRun, DelRun, del_results, single_layer_frames
from tl_localize.scores import save_tensors
from tl_localize.sequences import MemorizedSequence

PAPER_RATIOS = (0.001, 0.005)
REFERENCE_RATIOS = (0.02, 0.1)  # of a small model's layers the paper's shares are too few neurons to make it forget anything
MULTIPLES = (1, 5)  # of the whole budget, for a single layer
FIRST_LAYER = 1  # layer 0 is spared, and learned masks leave it open
DEFAULT_TARGETS = 8  # of the default run
DEFAULT_SEQUENCES = 105  # of the default run, dev ones included: the others are what must not be forgotten
DEFAULT_GENERAL = 64  # rows of general text in the default run

DelData = Annotated[
    Path | None,
    typer.Option(help="Folder of tl-localize collect, the authors' JSONL, or tokens [sequence pos]. Default: a reference model's own."),
]
General = Annotated[Path | None, typer.Option(help="Tokens [sequence pos] for the perplexity. Default: those of the collection.")]
Prefix = Annotated[int, typer.Option(help="Prompt tokens of each row of a token file.")]


def del_benchmark(
    model: Model = "reference-gpt2",
    data: DelData = None,
    general: General = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names, or 'all'. Random is always among them.")] = "all",
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Share of each layer to silence, many times. Default: 0.001, 0.005; reference models 0.02, 0.1."),
    ] = None,
    targets: Annotated[int | None, typer.Option(help="Number of targets, drawn by the seed. Default: 8 without data, else all.")] = None,
    intervention: Annotated[str, typer.Option(help=f"What silenced neurons become: {', '.join(INTERVENTIONS)}.")] = "zero",
    single_layer_of: Annotated[
        str | None, typer.Option("--single-layer", help="Also silence the budget in one layer, for this method.")
    ] = None,
    n_dev: Annotated[int, typer.Option(help="Of files: the first sequences, left out because settings were chosen on them.")] = N_DEV,
    n_prefix: Prefix = 32,
    seed: Annotated[int, typer.Option(help="Of Random, the order of targets and resampling.")] = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    out: Annotated[Path | None, typer.Option(help="Results folder. Default: ./tl-localize-results/del-MODEL, with -INTERVENTION.")] = None,
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
    """DEL: silence the neurons that each method locates for a memorized sequence; is it forgotten, and only it?

    Prints the change of accuracy and distance of the sequence (Self) and the others (Neg) and of the perplexity, and writes a results
    folder with tables and figures. In a folder that is there it makes only what is missing. Without data a reference model's sequences are
    collected first (in all about 14 minutes on one core). Exit status 1: a unit failed; 130: interrupted.
    """
    with errors_explained():
        tuned = read_settings(settings_file) if settings_file else {}
        chosen = del_methods(methods, settings or [], model, tuned)  # mistakes are found before the model is loaded
        of_it = [text for text in settings or [] if text.startswith(f"{single_layer_of}.")]
        one_layer = del_methods(single_layer_of, of_it, model, tuned) if single_layer_of else []
        for method in one_layer:
            check_by_layer(method)
        check_data(model, data, general)
        check_ratios(ratio)
        check_at_least(1, targets=targets, n_prefix=n_prefix)
        check_at_least(0, seed=seed, n_dev=n_dev)
        if data is None:
            check_draw(n_dev, DEFAULT_SEQUENCES)
            if (targets or 0) > (n_test := DEFAULT_SEQUENCES - n_dev):
                raise ValueError(f"targets must be at most {n_test} without data, got {targets}. Run tl-localize collect for more.")
        if intervention not in INTERVENTIONS:
            raise ValueError(
                f"intervention must be one of {', '.join(INTERVENTIONS)}, got {intervention!r}.{nearest(intervention, INTERVENTIONS)}"
            )
        how = How(shard=shard, engine=engine, address=address, workers=workers, gpus=gpus, verbose=verbose, quiet=quiet)
        say_settings(model, "del", settings_file)
        other = "" if intervention == "zero" else f"-{intervention}"
        store = Store(prepare_folder(out or Path("tl-localize-results") / f"del-{Path(model).name}{other}"))
        load = partial(load_model, model, device, parse_dtype(dtype))
        loaded = load()
        ratios = tuple(ratio or default_ratios(model))
        default = data is None
        data = data or collect_default(loaded, load, store.folder / "collection", how, n_dev, ratios)
        sequences, n_dev, text = del_data(loaded, data, general, n_dev, n_prefix)
        if default:
            targets = targets or min(DEFAULT_TARGETS, len(sequences) - n_dev)
        benchmark = DelBenchmark(
            loaded,
            drawn_first(sequences, n_dev, seed),
            text,
            ratios=ratios,
            n_dev=n_dev,
            n_targets=targets,
            intervention=intervention,  # pyright: ignore[reportArgumentType] - checked there
            first_layer=FIRST_LAYER,
            seed=seed,
        )
        n_test = len(sequences) - n_dev
        say(f"{targets or n_test} of {n_test} sequences are targets ({n_dev} dev sequences are left out), model {model}")
        command = again(
            "del",
            model=model,
            data=data,
            general=general,
            targets=targets,
            intervention=intervention,
            n_dev=n_dev,
            n_prefix=n_prefix,
            seed=seed,
            device=device,
            dtype=dtype,
            set=settings,
            settings=settings_file,
        )
        runs = [DelRun(store, replace(benchmark, ratios=(r,)), chosen, command, retry_failed) for r in ratios]
        at = replace(benchmark, ratios=(single_layer_ratio(benchmark),))
        runs += [DelRun(store, at, [method], command, retry_failed, MULTIPLES) for method in one_layer]
        done = work(runs, load, how)
        publish_del(store, store.folder)
        finish(runs, done)


def publish_del(store: Store, folder: Path) -> None:
    """All tables and figures of DEL from the folder of a run, and the main table on the terminal."""
    results = del_results(store)
    if not len(results.frame):
        say("Nothing is measured yet.")
        return
    results.save(folder)
    model = store.plans()[0]["value"]["model"]
    tables = del_tables(results, model)
    for name, table in tables.items():
        save_table(table, folder, name, f"{DEL_CAPTIONS[name]} [{model}]")
    single = single_layer_frames(store)
    for name, frame in single.items():
        write_text(folder / f"single_layer_{name}.csv", frame.to_csv(index=False))
        save_table(single_layer_table(frame), folder, f"del_single_layer_{name}", f"{DEL_CAPTIONS['del_single_layer']} [{model}]")
    try:
        for name, figure in del_figures(results, list(single.values())).items():
            save_figure(figure, folder, name)
    except ImportError as error:
        say(str(error))
    typer.echo(f"\n{DEL_CAPTIONS['del']}\n\n{to_markdown(tables['del'])}")
    typer.echo(f"All tables, figures, the frame and the settings: {folder}")


def default_ratios(model: str) -> tuple[float, ...]:
    """The paper's two shares of a layer, larger ones for the reference models."""
    return REFERENCE_RATIOS if model in ("reference", *REFERENCE_MODELS) else PAPER_RATIOS


def single_layer_ratio(benchmark: DelBenchmark) -> float:
    """The largest ratio of which the largest multiple of the budget of all layers fits into one, else the smallest."""
    n_layers = benchmark.model.cfg.n_layers - benchmark.first_layer
    return max([r for r in benchmark.ratios if max(MULTIPLES) * r * n_layers <= 1], default=min(benchmark.ratios))


def del_methods(names: str, settings: Sequence[str], model: str, tuned: Mapping[str, Mapping[str, Any]]) -> list[Localizer]:
    """Methods by name; learned masks spare the first layer, and have the paper's settings for its models and then the tuned ones."""
    masks = {name: {"first_layer": FIRST_LAYER} for name, method in METHODS.items() if hasattr(method, "first_layer")}
    return make_methods(names, settings, paper_settings(model, "del"), tuned, masks)


def check_data(model: str, data: Path | None, general: Path | None) -> None:
    """Raise ValueError or FileNotFoundError unless there are sequences and general text for the model."""
    if data is None and model not in ("reference", *REFERENCE_MODELS):
        raise ValueError(f"data must be given for {model!r}, got none. Run tl-localize collect, or name the authors' file with --data.")
    for name, path in (("data", data), ("general", general)):
        if path is not None and not path.exists():
            raise FileNotFoundError(f"{name} must be an existing path, got {str(path)!r}. Check the spelling.")
    if data is not None and general is None and not (data / GENERAL).is_file():
        raise ValueError(
            f"general must be given where the data have no {GENERAL}, got none for {str(data)!r}. Name a token file with --general."
        )


def collect_default(
    model: LanguageModel, load: Callable[[], LanguageModel], folder: Path, how: How, n_dev: int, ratios: Sequence[float]
) -> Path:
    """What a reference model has memorized of its own training stream, and general text, in a folder as of tl-localize collect.

    Raises:
        ValueError: one of the ratios, for which it is collected, selects no neuron.
    """
    for ratio in ratios:
        check_selects(ratio, model.cfg.d_mlp)
    say("The reference model's memorized sequences are collected from its training stream.")
    run = CollectRun(Store(prepare_folder(folder)), reference_search(model), retry_failed=True)
    found = searched(run, load, how, "this goes on, in shards or at once", n_dev=n_dev, n_max=DEFAULT_SEQUENCES)
    with_planted(model, found).save(folder)
    save_tensors(folder / GENERAL, {"tokens": held_out_tokens()[:DEFAULT_GENERAL].int()}, {})
    return folder


def del_data(
    model: LanguageModel, data: Path, general: Path | None = None, n_dev: int = N_DEV, n_prefix: int = 32
) -> tuple[list[MemorizedSequence], int, Integer[Tensor, "sequence pos"]]:
    """Sequences, how many of the first are dev ones, and general text: of a collection or a file."""
    text = read_tokens(general or data / GENERAL)
    if data.is_dir():
        return *load_collection(data), text
    if data.suffix in TOKEN_SUFFIXES:
        return memorized_sequences(read_tokens(data), n_prefix), n_dev, text
    return read_manual(data, model), n_dev, text


def drawn_first(sequences: Sequence[MemorizedSequence], n_dev: int, seed: int) -> list[MemorizedSequence]:
    """The test sequences in random order, so that the first of them are a fair sample; the dev ones stay first."""
    order = np.random.default_rng(seed).permutation(np.arange(n_dev, len(sequences)))
    return [*sequences[:n_dev], *(sequences[i] for i in order)]
