"""What the commands share: their options, the methods and data these name, progress and errors on the terminal."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from tqdm import tqdm

from tl_localize.execution.store import nearest
from tl_localize.methods import METHODS, Localizer
from tl_localize.models import REFERENCE_MODELS
from tl_localize.neurons import Real
from tl_localize.report.paper import settings_source
from tl_localize.scores import check_ratio

REFERENCE_RATIO = 0.03  # at which injections into the small reference models converge; the paper's 1 % and 0.1 % otherwise

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


def make_methods(names: str, settings: Sequence[str], *defaults: Mapping[str, Mapping[str, Any]]) -> list[Localizer]:
    """Methods by name, with settings such as ``hard_concrete.steps=200`` over the given defaults, of which the last ones count most."""
    wanted = list(METHODS) if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in METHODS:
            raise ValueError(f"methods must be among {', '.join(METHODS)}, got {name!r}.{nearest(name, METHODS)}")
    values: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    for name, source in product(wanted, defaults):
        values[name] |= source.get(name, {})
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


def say_settings(model: str, benchmark: Literal["inj", "del"], over: Path | str | None = None) -> None:
    """Say which settings the learned masks have where neither ``--set`` nor what is put over them has others."""
    beside = f", where {over} has no others" if over else ""
    say(f"Settings of learned masks: {settings_source(model, benchmark)}{beside}.")


def inj_ratios(model: str) -> list[float]:
    """The paper's two shares of the rows of W_out, another one for the reference models."""
    return [REFERENCE_RATIO] if model in ("reference", *REFERENCE_MODELS) else [0.01, 0.001]


def check_at_least(low: int, **options: Real | None) -> None:
    """Raise ValueError where an option is given and smaller."""
    for name, value in options.items():
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}. Leave it out for the default.")


def check_ratios(ratios: Sequence[float] | None) -> None:
    """Raise ValueError unless all ratios are fractions in (0, 1], and different."""
    for ratio in ratios or ():
        check_ratio("ratio", ratio)
    if len(set(ratios or ())) < len(ratios or ()):
        raise ValueError(f"ratio must be given once for each share, got {ratios}. Leave out the copies.")


def parse_value(setting: str, text: str, default: Any) -> Any:
    """Text as a value of the type of the default."""
    kind = type(default) if default is not None else int if text.isdecimal() else float
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
    """A progress bar with the time left, on a terminal; nothing elsewhere."""
    form = "{l_bar}{bar}| {elapsed} elapsed, {remaining} left {postfix}"
    with tqdm(total=100, unit="%", bar_format=form, mininterval=0.5, disable=None) as shown:

        def show(fraction: float, what: str) -> None:
            shown.set_postfix_str(what, refresh=False)
            shown.update(0 if math.isnan(fraction) else 100 * fraction - shown.n)  # nan: nobody knows how much there is

        yield show


@contextmanager
def errors_explained() -> Iterator[None]:
    """A mistake of the user's is one line on standard error and exit status 2, not a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"tl-localize: {error}", err=True)
        raise typer.Exit(2) from error
