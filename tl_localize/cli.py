"""The command line: tl-localize inj | localize | tune."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from tqdm import tqdm

from tl_localize.evals.inj_benchmark import InjBenchmark, InjResults
from tl_localize.methods import METHODS, Localizer
from tl_localize.models import REFERENCE_MODELS, load_model
from tl_localize.paper import paper_grids, paper_settings
from tl_localize.readers import read_definitions
from tl_localize.sequences import MemorizedSequence, encode
from tl_localize.store import nearest, prepare_folder
from tl_localize.tables import inj_tables, save_table, to_markdown
from tl_localize.tune import expand, rank_inj, read_grids, read_settings, write_settings

N_DEV = 5  # the first sentences of a data set are for choosing hyperparameters and never reported
REFERENCE_RATIO = 0.03  # at which injections into the small reference models converge; the paper's 1 % and 0.1 % otherwise
READS = "Recall in percent, mean ± standard error over sentences"
DEFAULT_SENTENCES = 8  # of the default run: as many as all methods get through within 10 minutes on 2 cores

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Model = Annotated[str, typer.Option(help="A shipped reference model, a local Hugging Face directory, or a name TransformerLens knows.")]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda. Default: CUDA when there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A method's setting, such as hard_concrete.steps=200. May be given many times.")
]
SettingsFile = Annotated[Path | None, typer.Option("--settings", help="Settings file that tl-localize tune wrote.")]
Data = Annotated[Path | None, typer.Option(help="ECBD-style JSONL (key: definition). Default: our own sentences.")]
Ratios = Annotated[list[float] | None, typer.Option(help="Share of the rows of W_out to inject into. May be given many times.")]
Distractors = Annotated[int, typer.Option(help="Other sentences in the same model; 0 is the paper's form.")]


@app.callback()
def main() -> None:
    """Which MLP neurons make a language model recite a text?"""
    # What the libraries below announce is no business of someone who reads a table.
    warnings.filterwarnings("ignore", category=DeprecationWarning)


@app.command()
def inj(
    model: Model = "reference-gpt2",
    data: Data = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names, or 'all'.")] = "all",
    ratio: Annotated[list[float] | None, typer.Option(help="Share of the rows of W_out to inject into. May be given many times.")] = None,
    limit: Annotated[int | None, typer.Option(help="Number of sentences. Default: 8 on a reference model, else all.")] = None,
    seed: Annotated[int, typer.Option(help="Sentence i is written into rows drawn with seed + i.")] = 0,
    learning_rate: Annotated[float | None, typer.Option(help="Of the injection. Default: the paper's, by ratio.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Of the injection. Default: the paper's, by ratio.")] = None,
    distractors: Distractors = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    out: Annotated[Path | None, typer.Option(help="Results folder. Default: ./tl-localize-results/inj-MODEL.")] = None,
    settings: Settings = None,
    settings_file: SettingsFile = None,
) -> None:
    """INJ: write new sentences into random rows of W_out, then ask each method which rows they are.

    Prints recall (the share of the true rows among the top 1x, 2x and 5x as many neurons of each layer) and writes a results folder.
    """
    with errors_explained():
        tuned = read_settings(settings_file) if settings_file else {}
        make_methods(methods, settings or [], tuned)  # mistakes are found before the model is loaded
        folder = prepare_folder(
            out or Path("tl-localize-results") / f"inj-{Path(model).name}{f'-distractors-{distractors}' if distractors else ''}"
        )
        loaded = load_model(model, device, parse_dtype(dtype))
        reference = model in ("reference", *REFERENCE_MODELS)
        ratios = ratio or ([REFERENCE_RATIO] if reference else [0.01, 0.001])
        sequences = inj_sequences(loaded, data)
        limit = limit or (DEFAULT_SENTENCES if reference and data is None else len(sequences))
        say(f"{min(limit, len(sequences))} of {len(sequences)} sentences ({N_DEV} dev sentences are left out), model {model}")
        runs: list[InjResults] = []
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
            runs.append(run_shown(benchmark, make_methods(methods, settings or [], {**paper_settings(model, "inj", r), **tuned})))
        results = InjResults.join(runs)
        if not len(results.frame):
            raise typer.Exit(130)
        results.save(folder)
        tables = inj_tables(results, model)
        for name, table in tables.items():
            save_table(table, folder, name, f"INJ on {model}: {name}, in percent, mean ± standard error.")
        typer.echo(
            "\nRecall in percent, mean ± standard error over sentences; 1x, 2x, 5x: top share of each layer over the injected share\n"
        )
        typer.echo(to_markdown(tables["inj"]))
        typer.echo(f"All tables, the frame and the settings: {folder}")


@app.command()
def localize(
    prefix: Annotated[str, typer.Option(help="Text that prompts the model.")],
    suffix: Annotated[str, typer.Option(help="Text that the model recites after it; it usually begins with a space.")],
    model: Model = "reference-gpt2",
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "hard_concrete",
    top: Annotated[int, typer.Option(help="Number of neurons to print.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write all scores to this safetensors file.")] = None,
    device: Device = None,
    dtype: Dtype = "float32",
    settings: Settings = None,
) -> None:
    """Score every neuron for one text and print the best ones."""
    with errors_explained():
        (localizer,) = make_methods(method, settings or [])
        if out:
            prepare_folder(out.parent)
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}.")
        loaded = load_model(model, device, parse_dtype(dtype))
        sequence = MemorizedSequence.from_text(loaded, prefix, suffix)
        with bar() as show:
            (scores,) = localizer.map(loaded, [sequence], progress=lambda fraction: show(fraction, localizer.name))
        best = scores.values.flatten().argsort(descending=True, stable=True)[:top].tolist()
        n_neurons = scores.values.shape[1]
        typer.echo(f"{sequence}, {scores.settings}\n\n{'rank':>4} {'layer':>5} {'neuron':>6} {'score':>12}")
        for rank, flat in enumerate(best, 1):
            layer, neuron = divmod(flat, n_neurons)
            typer.echo(f"{rank:>4} {layer:>5} {neuron:>6} {float(scores.values[layer, neuron]):>12.6g}")
        if out:
            scores.save(out)
            typer.echo(f"\nAll scores: {out}")


@app.command()
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


def inj_sequences(model: Any, data: Path | None, dev: bool = False) -> list[MemorizedSequence]:
    """The sentences of an ECBD-style file without the dev sentences, or these alone."""
    sentences = read_definitions(data or Path(str(files("tl_localize") / "data" / "inj_sentences.jsonl")))
    if len(sentences) <= N_DEV:
        raise ValueError(f"data must hold more than {N_DEV} sentences, got {len(sentences)}. The first {N_DEV} are for development.")
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("model must have a tokenizer to read sentences, got none. Put the tokenizer's files into the model's directory.")
    sequences = [
        MemorizedSequence(torch.tensor(encode(tokenizer, sentence)), 1, id=f"{i:03d} {sentence[:24]}")
        for i, sentence in enumerate(sentences)
    ]
    return sequences[:N_DEV] if dev else sequences[N_DEV:]


def run_shown(benchmark: InjBenchmark, methods: Sequence[Localizer]) -> InjResults:
    """Run with a progress bar; Ctrl-C keeps the sentences that are done."""
    results = InjResults(pd.DataFrame(), benchmark.settings(methods))
    with bar() as show:
        try:
            for part in benchmark.stream(methods, show):
                results = results.joined(part)
        except KeyboardInterrupt:
            done = len(set(results.frame.get("sequence_id", [])))
            say(f"Interrupted: {done} of {len(benchmark.sequences)} sentences are done and kept.")
    return results


def make_methods(names: str, settings: Sequence[str], defaults: Mapping[str, Mapping[str, Any]] | None = None) -> list[Localizer]:
    """Methods by name, with settings such as ``hard_concrete.steps=200`` over the given defaults."""
    wanted = list(METHODS) if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in METHODS:
            raise ValueError(f"methods must be among {', '.join(METHODS)}, got {name!r}.{nearest(name, METHODS)}")
    values: dict[str, dict[str, Any]] = {name: dict((defaults or {}).get(name, {})) for name in wanted}
    for setting in settings:
        key, equals, text = setting.partition("=")
        name, dot, field = key.partition(".")
        if not equals or not dot:
            raise ValueError(f"--set must read METHOD.SETTING=VALUE, got {setting!r}. For example hard_concrete.steps=200.")
        if name not in values:
            raise ValueError(f"--set must name a chosen method ({', '.join(wanted)}), got {name!r}.{nearest(name, wanted)}")
        known = {f.name: f.default for f in dataclasses.fields(METHODS[name])}
        if field not in known:
            raise ValueError(f"--set must name a setting of {name} ({', '.join(known)}), got {field!r}.{nearest(field, known)}")
        values[name][field] = parse_value(setting, text, known[field])
    return [METHODS[name](**values[name]) for name in wanted]


def parse_value(setting: str, text: str, default: Any) -> Any:
    """Text as a value of the type of the default."""
    kind = int if default is None else type(default)
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"--set must give {kind.__name__} to {setting.partition('=')[0]}, got {text!r}.") from error


def parse_dtype(name: str) -> torch.dtype:
    """A floating point type by name."""
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in kinds:
        raise ValueError(f"dtype must be one of {', '.join(kinds)}, got {name!r}.{nearest(name, kinds)}")
    return kinds[name]


def say(text: str) -> None:
    """A line for the person at the terminal; tables go to standard output, everything else to standard error."""
    tqdm.write(text, file=sys.stderr)


@contextmanager
def bar() -> Iterator[Callable[[float, str], None]]:
    """A progress bar with the time left, on a terminal or in a log."""
    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed} elapsed, {remaining} left {postfix}", mininterval=0.5) as shown:

        def show(fraction: float, what: str) -> None:
            shown.set_postfix_str(what, refresh=False)
            shown.update(100 * fraction - shown.n)

        yield show


@contextmanager
def errors_explained() -> Iterator[None]:
    """A mistake of the user's is one line on standard error and exit status 2, not a traceback."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"tl-localize: {error}", err=True)
        raise typer.Exit(2) from error
