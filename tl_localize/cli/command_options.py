"""The options of each command: a frozen dataclass, of its own options and of the groups that
several commands share.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tl_localize.cli.options import (
    EXISTS,
    FROM_ONE,
    THE_DATA,
    THE_MODEL,
    ColumnOptions,
    Distractors,
    Example,
    General,
    MemorizedOptions,
    MethodOptions,
    MinAccuracy,
    ModelOptions,
    Prefix,
    RunOptions,
    Seed,
    SequenceOptions,
    Suffix,
    UnitOptions,
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LocalizeOptions:
    """Options of localize."""

    prefix: Prefix = ""
    suffix: Suffix = ""
    example: Example = ""
    model: ModelOptions = field(default_factory=ModelOptions)
    method: Annotated[str, Parameter(help="One of those that tl-localize methods lists.")] = (
        "iterative_attribution"
    )
    how: UnitOptions = field(default_factory=UnitOptions)
    ratio: Annotated[
        float | None,
        Parameter(help="Share of each layer that is ablated. Default: see --max-perplexity-rise."),
    ] = None
    max_perplexity_rise: Annotated[
        float,
        Parameter(
            help="Without --ratio 1, 2, 4, ... of each layer are ablated, while the perplexity of "
            "general text rises by at most so many percent."
        ),
    ] = 5.0
    force: Annotated[
        bool, Parameter(help="Also rank neurons for a text that the model does not recite.")
    ] = False
    out: Annotated[
        Path | None,
        Parameter(
            help="Write the scores to this safetensors file, and beside it as .html a page to send "
            "to others: the text token by token, and what other texts lose."
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class KnownOptions:
    """Options of known."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: Annotated[
        Path | None,
        Parameter(
            validator=EXISTS,
            group=THE_DATA,
            help="Texts of your own, beside those that everybody knows.",
        ),
    ] = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    min_accuracy: MinAccuracy = 0.7
    out: Annotated[
        Path | None,
        Parameter(
            help="Write the known texts to this file (.jsonl), for del, and beside it as .html a "
            "page to send to others: all texts, and how much of each is recited."
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EraseOptions:
    """Options of erase."""

    prefix: Prefix = ""
    suffix: Suffix = ""
    example: Example = ""
    model: ModelOptions = field(default_factory=ModelOptions)
    texts: SequenceOptions = field(default_factory=SequenceOptions)
    others: Annotated[
        Path | None,
        Parameter(
            validator=EXISTS,
            group=THE_DATA,
            help="Texts that are to stay, 2 at least. Default: 40 of those of tl-localize known.",
        ),
    ] = None
    general: General = None
    edit: Annotated[
        Literal["rows", "ablate"],
        Parameter(help="Train the rows of W_out that a method names, or set them to zero."),
    ] = "rows"
    method: Annotated[
        str,
        Parameter(
            help="Names the rows. Default: activation_contrast, or iterative_attribution to ablate."
        ),
    ] = ""
    set: Annotated[
        tuple[str, ...],
        Parameter(help="A setting of the method, such as hard_concrete.steps=200. Many times."),
    ] = ()
    share: Annotated[
        float, Parameter(help="Of the rows of each layer that are trained for each text.")
    ] = 0.02
    max_recited: Annotated[
        float, Parameter(help="Accuracy at which the texts count as erased, a fraction.")
    ] = 0.3
    max_others_lost: Annotated[
        float, Parameter(help="Points of accuracy that other known texts may lose.")
    ] = 1.0
    max_perplexity_rise: Annotated[
        float, Parameter(help="Percent by which the perplexity of general text may rise.")
    ] = 5.0
    learning_rate: Annotated[
        float | None,
        Parameter(
            help="Of the training, at its start. Default: by --share, and smaller where the price "
            "is passed in the first steps."
        ),
    ] = None
    max_steps: Annotated[int, Parameter(validator=FROM_ONE, help="Of the training.")] = 48
    seed: Annotated[
        int, Parameter(help="Of the texts that the model writes, and of the choice of others.")
    ] = 0
    force: Annotated[
        bool,
        Parameter(help="Also for texts that the model does not recite, and beyond the price."),
    ] = False
    out: Annotated[
        Path | None,
        Parameter(
            help="Write the edited model to this folder, new or empty, and in it erased.html, a "
            "page to send to others."
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class InjOptions:
    """Options of inj."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: Annotated[
        Path | None,
        Parameter(
            validator=EXISTS,
            group=THE_DATA,
            help="JSON lines of texts, or tokens, or a table. Default: our own sentences.",
        ),
    ] = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    methods: MethodOptions = field(default_factory=MethodOptions)
    ratio: Annotated[
        tuple[float, ...],
        Parameter(help="Share of the rows of W_out, or of heads, to write into. Many times."),
    ] = ()
    limit: Annotated[
        int | None,
        Parameter(
            validator=FROM_ONE,
            help="Number of sentences. Default: 5 on a reference model, else all.",
        ),
    ] = None
    seed: Seed = 0
    learning_rate: Annotated[
        float | None,
        Parameter(
            help="Of the injection. Default: the paper's up to a ratio of 0.02; ours for larger "
            "ones and with distractors."
        ),
    ] = None
    max_steps: Annotated[
        int | None,
        Parameter(
            help="Of the injection. Default: the paper's 200 up to a ratio of 0.02; 400 for larger "
            "ones, 1000 with distractors."
        ),
    ] = None
    distractors: Distractors = 0
    run: RunOptions = field(default_factory=RunOptions)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DelOptions:
    """Options of del."""

    model: ModelOptions = field(default_factory=ModelOptions)
    texts: MemorizedOptions = field(default_factory=MemorizedOptions)
    methods: MethodOptions = field(default_factory=MethodOptions)
    ratio: Annotated[
        tuple[float, ...],
        Parameter(
            help="Shares to ablate. Default: the paper's on its models, ours on shipped ones, else "
            "by --max-others-lost."
        ),
    ] = ()
    max_others_lost: Annotated[
        float | None,
        Parameter(
            help="Without --ratio ablate 1, 2, 4, ... of each layer until the others lose more "
            "than so many points (Neg). Default: 1 where --ratio has none."
        ),
    ] = None
    limit: Annotated[
        int | None,
        Parameter(
            validator=FROM_ONE,
            help="Number of texts read, dev ones included. Default: 105 of a shipped model's own, "
            "else all.",
        ),
    ] = None
    targets: Annotated[
        int | None,
        Parameter(validator=FROM_ONE, help="Number of targets. Default: 8 without data, else all."),
    ] = None
    ablation: Annotated[
        Literal["zero", "mean", "resample"], Parameter(help="What ablated neurons become.")
    ] = "zero"
    seed: Seed = 0
    run: RunOptions = field(default_factory=RunOptions)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RevOptions:
    """Options of rev."""

    model: ModelOptions = field(default_factory=ModelOptions)
    before: Annotated[
        str | None,
        Parameter(
            group=THE_MODEL, help="An earlier checkpoint of the model, in place of training."
        ),
    ] = None
    data: Annotated[
        Path | None,
        Parameter(
            validator=EXISTS,
            group=THE_DATA,
            help="Sentences to train, or with --before recited texts. Default: our own.",
        ),
    ] = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    general: General = None
    methods: MethodOptions = field(default_factory=MethodOptions)
    recipe: Annotated[
        Literal["adam", "sgd", "all", "mixed"],
        Parameter(
            help="adam, sgd: all rows of W_out. all: all weights. mixed: 31 rows of general text "
            "beside each sentence."
        ),
    ] = "adam"
    sentences: Annotated[
        int, Parameter(validator=FROM_ONE, help="Sentences in one trained model.")
    ] = 8
    groups: Annotated[
        int | None, Parameter(validator=FROM_ONE, help="Trained models. Default: at most 3.")
    ] = None
    ratio: Annotated[
        tuple[float, ...],
        Parameter(
            help="Shares of each layer to put back. Default: 0.05, 0.1, 0.2, 0.25, 0.3, 0.35, "
            "0.4; of heads 0.17, 0.34, 0.5, 0.67."
        ),
    ] = ()
    seed: Seed = 0
    run: RunOptions = field(default_factory=RunOptions)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of tune."""

    benchmark: Annotated[Literal["inj", "del"], Parameter(help="On which benchmark.")] = "inj"
    method: Annotated[
        str, Parameter(help="Method to tune: hard_concrete, slimming or another with settings.")
    ] = "hard_concrete"
    grid: Annotated[
        Path | None,
        Parameter(help="JSON file {METHOD: {SETTING: [values]}}. Default: the paper's grid."),
    ] = None
    model: ModelOptions = field(default_factory=ModelOptions)
    texts: MemorizedOptions = field(default_factory=MemorizedOptions)
    how: UnitOptions = field(default_factory=UnitOptions)
    ratio: Annotated[
        float | None,
        Parameter(
            help="inj: share of the rows to inject into. del: share of each layer to ablate."
        ),
    ] = None
    distractors: Distractors = 0
    run: RunOptions = field(default_factory=RunOptions)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CollectOptions:
    """Options of collect."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: Annotated[
        tuple[Path, ...],
        Parameter(
            validator=EXISTS,
            group=THE_DATA,
            help="Texts, JSON lines, tokens, or a table; many times.",
        ),
    ] = ()
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    windows: Annotated[
        int | None,
        Parameter(
            validator=FROM_ONE,
            help="One every so many tokens of a row. Default: its first tokens alone.",
        ),
    ] = None
    n_prefix: Annotated[int, Parameter(help="Tokens that prompt the model.")] = 32
    n_suffix: Annotated[int, Parameter(help="Tokens that it must recite.")] = 48
    min_accuracy: MinAccuracy = 0.9
    max_distance: Annotated[
        int,
        Parameter(
            help="Characters between the greedy continuation and the suffix (tokens, where the "
            "model has no tokenizer)."
        ),
    ] = 20
    min_distinct: Annotated[
        int, Parameter(help="Distinct tokens in the suffix, true and generated.")
    ] = 16
    max_jaccard: Annotated[
        float, Parameter(help="Near-duplicates share more n-grams than this.")
    ] = 0.05
    n_dev: Annotated[
        int, Parameter(help="Sequences drawn to choose hyperparameters; they come first.")
    ] = 5
    n_max: Annotated[
        int | None,
        Parameter(
            help="Draw at most so many of what is found, dev ones included (the paper: 505)."
        ),
    ] = None
    seed: Seed = 0
    run: RunOptions = field(default_factory=RunOptions)
