"""What the commands share: groups of options, each a dataclass; the record of a command; the answer
to a mistake.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import typer
from tqdm import tqdm

from tl_localize.evals.del_results import DelResults
from tl_localize.evals.inj_results import InjResults
from tl_localize.evals.presets import parse_dtype, settings_source
from tl_localize.execution.engine import parse_shard
from tl_localize.execution.store import Store
from tl_localize.models import load_model
from tl_localize.neurons import Real, check_ratio
from tl_localize.readers import Data
from tl_localize.report.figures import save_figure
from tl_localize.report.tables import CAPTIONS, flat, save_table, to_markdown
from tl_localize.report.terminal import console, ranked, reading
from tl_localize.units import NEURONS, UNITS
from tl_localize.units import Units as Kind

MethodSettings = Annotated[
    list[str] | None,
    typer.Option(help="A method's setting, such as hard_concrete.steps=200. Many times."),
]
SettingsFile = Annotated[
    Path | None, typer.Option(help="Settings file that tl-localize tune wrote.")
]
Distractors = Annotated[
    int, typer.Option(help="Other sentences in the same model; 0 is the paper's form.")
]
Units = Annotated[str, typer.Option(help=f"What is scored and ablated: {', '.join(UNITS)}.")]
General = Annotated[
    Path | None,
    typer.Option(
        help="Tokens [sequence pos] for the perplexity. Default: those of the collection."
    ),
]
# of the help, by parameter
PANELS = {"on": "The model", "rows": "The data", "run": "The run", "printed": "What is printed"}


@dataclass(frozen=True)
class ModelOptions:
    """The options of all commands that load a model."""

    model: Annotated[
        str,
        typer.Option(help="A reference model, a Hugging Face directory, or TransformerLens' name."),
    ] = "reference-gpt2"
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda. Default: CUDA when there is one.")
    ] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)

    @property
    def short(self) -> str:
        """The model's name in the name of a folder."""
        return Path(self.model).name

    def load(self) -> Any:
        return load_model(self.model, self.device, parse_dtype(self.dtype))


@dataclass(frozen=True)
class RowOptions:
    """The options of all commands that read data: where its rows are, and what their columns are
    called.
    """

    prefix: Annotated[
        Path | None,
        typer.Option(help="Instead of --data: a token file of prefixes, beside --suffix."),
    ] = None
    suffix: Annotated[
        Path | None, typer.Option(help="Token file of the suffixes, a row for each of --prefix.")
    ] = None
    key: Annotated[
        str | None,
        typer.Option(
            help="Column of the tokens or the text, where it has another name than the known ones."
        ),
    ] = None
    id: Annotated[str | None, typer.Option(help="Column of the sequences' ids.")] = None
    category: Annotated[str | None, typer.Option(help="Column of their categories.")] = None
    any_tokens: Annotated[
        bool,
        typer.Option("--any-tokens", help="Also tokens that no text makes, such as random ones."),
    ] = False

    def data(self, path: Path | None) -> Data | None:
        """The data of ``--data``, or of ``--prefix`` and ``--suffix``; None without them."""
        if self.prefix is not None and (path is not None or self.suffix is None):
            other = f"--data {path}" if path is not None else "no --suffix"
            raise ValueError(
                f"prefix must stand with suffix and without data, got --prefix {self.prefix} and "
                f"{other}."
            )
        if path is None and self.prefix is None:
            if self.suffix:
                raise ValueError(
                    "prefix must be given with suffix, got none. Name it with --prefix."
                )
            return None
        given = {
            name: value
            for name, value in vars(self).items()
            if value is not None and name != "prefix"
        }
        return Data(source=self.prefix or path, **given)


@dataclass(frozen=True)
class SequenceOptions(RowOptions):
    """The same where each row is a sequence."""

    n_prefix: Annotated[
        str | None,
        typer.Option(help="Prompt tokens of each row, or the column of their number. Default: 32."),
    ] = None
    n_suffix: Annotated[
        int | None, typer.Option(help="Tokens to recite, of longer rows. Default: all.")
    ] = None

    def __post_init__(self) -> None:
        # else a column's name
        number = (
            int(self.n_prefix) if self.n_prefix and self.n_prefix.lstrip("-").isdecimal() else None
        )
        check_at_least(1, n_suffix=self.n_suffix, n_prefix=number)
        object.__setattr__(self, "n_prefix", number or self.n_prefix)


@dataclass(frozen=True)
class RunOptions:
    """The options of all commands that work for long."""

    out: Annotated[
        Path | None,
        typer.Option(help="Results folder. Default: ./tl-localize-results/COMMAND-MODEL."),
    ] = None
    engine: Annotated[
        Literal["process", "ray"],
        typer.Option(help="Who computes: this process, or a Ray cluster."),
    ] = "process"
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster. Default: one is started on this machine.")
    ] = None
    workers: Annotated[
        int | None, typer.Option(help="Of Ray. Default: as many as there is room for.")
    ] = None
    gpus: Annotated[
        float | None,
        typer.Option(help="For each Ray worker, also a fraction. Default: 1 where there are GPUs."),
    ] = None
    shard: Annotated[
        str,
        typer.Option(help="i/n: do the i-th of n parts of the work, one for each job of an array."),
    ] = "1/1"
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what failed before.")
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for every task.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but errors.")] = False
    command: str = ""  # its name
    options: Mapping[str, Any] = field(default_factory=dict)  # all that it was given, by name

    def __post_init__(self) -> None:
        parse_shard(self.shard)
        check_at_least(1, workers=self.workers)
        check_at_least(0, gpus=self.gpus)

    def folder(self, *parts: str) -> Path:
        """The results folder, whose name has these parts unless ``--out`` is given; empty ones are
        left out.
        """
        return Store(self.out or Path("tl-localize-results") / "-".join(filter(None, parts))).folder


@dataclass(frozen=True)
class Printed:
    """The options of all commands that print a table of results: by default it is for reading."""

    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = (
        False
    )
    csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False

    def table(
        self, table: pd.DataFrame, caption: str, below: str, *, lowest_first: bool = False
    ) -> None:
        if self.csv or self.markdown:
            typer.echo(flat(table).to_csv(index=False) if self.csv else to_markdown(table))
        else:
            shown = (part for named in ranked(table, lowest_first=lowest_first) for part in named)
            console().print(f"\n{caption}.\n", *shown, below, sep="\n", markup=False)


def expanded(command: str, function: Callable[..., None]) -> Callable[..., None]:
    """A function as a command: its ``on``, ``rows`` and ``run`` become the options of these groups,
    a mistake of the user's one line.
    """
    own = inspect.signature(function, eval_str=True).parameters
    groups: dict[str, Callable[..., Any]] = {
        name: one.annotation for name, one in own.items() if name in PANELS
    }
    fields = {
        name: inspect.signature(kind, eval_str=True).parameters for name, kind in groups.items()
    }
    parts = [
        part
        for name, one in own.items()
        for part in (fields[name].values() if name in fields else [one])
    ]
    for name, kinds in fields.items():
        for option in (
            one for part in kinds.values() for one in getattr(part.annotation, "__metadata__", ())
        ):
            option.rich_help_panel = PANELS[name]
    parameters = [
        part.replace(kind=part.KEYWORD_ONLY)
        for part in parts
        if hasattr(part.annotation, "__metadata__")
    ]

    def call(**given: Any) -> None:
        record = {"command": command, "options": given}
        try:
            made = {
                name: kind(**{field: (given | record)[field] for field in fields[name]})
                for name, kind in groups.items()
            }
            function(**{name: (given | made)[name] for name in own})
        except (ValueError, OSError, ImportError) as error:
            typer.echo(f"tl-localize: {error}", err=True)
            raise typer.Exit(2) from error

    call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess] - what typer reads
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


def say(text: str) -> None:
    """A line for the person at the terminal; tables go to standard output, everything else to
    standard error.
    """
    tqdm.write(text, file=sys.stderr)


def say_settings(
    model: str, benchmark: Literal["inj", "del"], over: Path | str | None, units: Kind
) -> None:
    """Say which settings the learned masks have where neither ``--set`` nor what is put over them
    has others.
    """
    source = (
        settings_source(model, benchmark)
        if units == NEURONS
        else f"the defaults, which were chosen for neurons, not {units.name}"
    )
    say(f"Settings of learned masks: {source}{f', where {over} has no others' if over else ''}.")


def publish(
    results: InjResults | DelResults,
    store: Store,
    folder: Path,
    tables: Callable[..., Any],
    figures: Callable[..., Any],
    printed: Printed,
) -> None:
    """Write what was measured, its tables, and its figures where matplotlib is installed; print the
    main table.
    """
    if not len(results.frame):
        say("Nothing is measured yet.")
        return
    results.save(folder)
    plan = store.plans()[0].plan
    about = plan.settings["model"]
    if "units" in plan.settings:
        about += f", {plan.settings['units']['class']}"
    made = tables(results, plan.settings["model"])
    for name, table in made.items():
        save_table(table, folder, name, f"{CAPTIONS[name]} [{about}]")
    try:
        for name, figure in figures(results).items():
            save_figure(figure, folder, name)
    except ImportError as error:
        say(str(error))
    printed.table(
        made[plan.benchmark],
        CAPTIONS[plan.benchmark],
        reading(results),
        lowest_first=plan.benchmark == "del",
    )
    say(f"All tables, figures, the frame and the settings: {folder}")


def check_at_least(low: int, **options: Real | None) -> None:
    """Raise ValueError where an option is given and smaller."""
    for name, value in options.items():
        if value is not None and value < low:
            raise ValueError(
                f"{name} must be at least {low}, got {value}. Leave it out for the default."
            )


def check_ratios(ratios: Sequence[float] | None) -> None:
    """Raise ValueError unless all ratios are fractions in (0, 1], and different."""
    for ratio in ratios or ():
        check_ratio("ratio", ratio)
    if len(set(ratios or ())) < len(ratios or ()):
        raise ValueError(
            f"ratio must be given once for each share, got {ratios}. Leave out the copies."
        )
