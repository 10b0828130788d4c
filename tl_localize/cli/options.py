"""Options that several commands share, each written once.

A command's options are a frozen dataclass whose fields are options or groups of them, and a run
takes it as it is. What the groups need is imported when a command runs, so that help comes at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number
from cyclopts.validators import Path as PathRule

if TYPE_CHECKING:  # they import torch
    from tl_localize.model.neurons import LanguageModel
    from tl_localize.texts.readers import Data

THE_MODEL = Group("The model", sort_key=1)
THE_DATA = Group("The data", sort_key=2)
THE_RUN = Group("The run", sort_key=3)

EXISTS = PathRule(exists=True)
FROM_ONE = Number(gte=1)


# Options of several commands that belong to no group

Distractors = Annotated[
    int, Parameter(help="Other sentences in the same model; 0 is the paper's form.")
]
Prefix = Annotated[str, Parameter(allow_leading_hyphen=True, help="Text that prompts the model.")]
Suffix = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Text that the model recites after it; it usually begins with a space.",
    ),
]
Example = Annotated[str, Parameter(help="Id of a text that tl-localize known lists.")]
MinAccuracy = Annotated[float, Parameter(help="Of the suffix, teacher-forced.")]
Seed = Annotated[int, Parameter(help="Of all draws.")]


# The model


@Parameter(name="*", group=THE_MODEL)
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model a command loads, and how."""

    model: Annotated[
        str,
        Parameter(
            help="reference-gpt2, reference-pythia, a Hugging Face directory, a .gguf file, or a "
            "name of TransformerLens or the hub."
        ),
    ] = "reference-gpt2"
    device: Annotated[
        str | None, Parameter(help="Such as cpu or cuda. Default: CUDA when there is one.")
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Parameter(help="Of weights and activations.")
    ] = "float32"

    def load(self, name: str = "") -> "LanguageModel":
        """The model, or another one in the same way."""
        import torch

        from tl_localize.cli.messages import say
        from tl_localize.model.loading import is_gguf, load_model

        name = name or self.model
        if is_gguf(name):
            say(f"Converting {Path(name).name} to {self.dtype} weights, which takes a while.")
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        return load_model(name, self.device, dtypes[self.dtype])


# The data


@Parameter(name="*", group=THE_DATA)
@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Which columns of the data hold what."""

    key: Annotated[
        str,
        Parameter(help="Column of the tokens or the text, where it has none of the known names."),
    ] = ""
    id: Annotated[str, Parameter(help="Column of the sequences' ids. Default: id.")] = ""
    category: Annotated[str, Parameter(help="Column of their categories. Default: category.")] = ""

    def read(
        self, path: Path | None, n_prefix: int | str | None = None, n_suffix: int | None = None
    ) -> "Data | None":
        """The data of a path, if one is given; ValueError where options of it are given alone."""
        if path:
            return self.open(path, n_prefix, n_suffix)
        given = {"key": self.key, "id": self.id, "category": self.category}
        given |= {"n-prefix": n_prefix, "n-suffix": n_suffix}
        for option, value in given.items():
            if value not in ("", None):
                raise ValueError(
                    f"{option} must be given with --data, got {value!r} alone. Leave it out, or "
                    "name the data."
                )
        return None

    def open(
        self, path: Path, n_prefix: int | str | None = None, n_suffix: int | None = None
    ) -> "Data":
        """The data of a path; nothing is read yet."""
        from tl_localize.texts.readers import Data

        return Data(
            source=path,
            key=self.key,
            id=self.id,
            category=self.category,
            n_prefix=n_prefix,
            n_suffix=n_suffix,
        )


def parse_prefix(type_: object, tokens: Sequence[Token]) -> int | str:
    """A number of tokens, or the name of a column."""
    text = tokens[0].value
    return int(text) if text.removeprefix("-").isdecimal() else text


@Parameter(name="*", group=THE_DATA)
@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """Data of which each row has a prefix and a suffix."""

    data: Annotated[
        Path | None,
        Parameter(
            validator=EXISTS,
            help="Folder of collect, tokens, JSON lines, a table. A benchmark without it takes "
            "texts of this package.",
        ),
    ] = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    n_prefix: Annotated[
        int | str | None,
        Parameter(
            converter=parse_prefix,
            help="Prompt tokens, or the column of their number. Default: what rows say, or 32 (in "
            "erase the first third of a text of less than 48).",
        ),
    ] = None
    n_suffix: Annotated[
        int | None, Parameter(help="Tokens to recite, of longer rows. Default: all.")
    ] = None

    def read(self) -> "Data | None":
        """The user's data, where a path is given."""
        return self.columns.read(self.data, self.n_prefix, self.n_suffix)


General = Annotated[
    Path | None,
    Parameter(
        validator=EXISTS,
        group=THE_DATA,
        help="Tokens [sequence pos] for the perplexity. Default: those of a folder of collect, "
        "where --data is one, else Python's docstrings.",
    ),
]


@Parameter(name="*", group=THE_DATA)
@dataclass(frozen=True, kw_only=True)
class MemorizedOptions:
    """Sequences for DEL, those that settings are chosen on among them, and general text."""

    sequences: SequenceOptions = field(default_factory=SequenceOptions)
    general: General = None
    n_dev: Annotated[
        int | None,
        Parameter(
            help="The first sequences, on which settings are chosen. Default: 5, of a folder of "
            "collect its own; without --data of shipped models alone."
        ),
    ] = None
    min_accuracy: Annotated[
        float | None,
        Parameter(
            help="Of the suffix, teacher-forced. Without --data 0.9 by default; with it texts "
            "below are left out, by default none."
        ),
    ] = None


# The methods


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """What is scored, and with which settings of a method."""

    units: Annotated[Literal["neurons", "heads"], Parameter(help="What is scored and ablated.")] = (
        "neurons"
    )
    set: Annotated[
        tuple[str, ...],
        Parameter(help="A method's setting, such as hard_concrete.steps=200. Many times."),
    ] = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Which methods a benchmark compares."""

    methods: Annotated[
        str,
        Parameter(
            help="Comma-separated names; 'rivals' are those of other papers, 'all' is all but them "
            "and refined_attribution. Controls always run too."
        ),
    ] = "all"
    how: UnitOptions = field(default_factory=UnitOptions)
    settings: Annotated[
        Path | None, Parameter(help="Settings file that tl-localize tune wrote.")
    ] = None


# The run


class Shard(NamedTuple):
    """Which of how many parts of the work, counted from 1."""

    part: int
    parts: int


WHOLE = Shard(1, 1)


def parse_shard(type_: object, tokens: Sequence[Token]) -> Shard:
    """``"2/8"`` as the second of eight."""
    text = tokens[0].value
    index, _, count = text.partition("/")
    if index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return Shard(int(index), int(count))
    raise ValueError(
        f"shard must read i/n with i from 1 to n, got {text!r}. Write 1/4, 2/4, 3/4 and 4/4 for "
        "four jobs."
    )


@Parameter(name="*", group=THE_RUN)
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where results are kept, and who computes them."""

    out: Annotated[
        Path | None,
        Parameter(help="Results folder. Default: ./tl-localize-results/COMMAND-MODEL."),
    ] = None
    ray: Annotated[
        str | None,
        Parameter(help="Address of a Ray cluster that computes; local starts one here."),
    ] = None
    shard: Annotated[
        Shard,
        Parameter(
            converter=parse_shard,
            n_tokens=1,
            accepts_keys=False,
            show_default=False,
            help="i/n: do the i-th of n parts of the work, one for each job of an array.",
        ),
    ] = WHOLE
    verbose: Annotated[
        bool, Parameter(name=["--verbose", "-v"], help="A line for every result.")
    ] = False
