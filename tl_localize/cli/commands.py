"""The commands, as a user types them.

The options of a command are one frozen dataclass, which goes to one function as it is. That
function is imported when the command runs, so that help comes at once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Group, Parameter

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
    RunOptions,
    Seed,
    UnitOptions,
)


def default_text(value: object) -> str | None:
    """A default as help shows it; what is off or left open is not shown."""
    is_open = value is None or value is False or value in ("", ())
    return None if is_open else str(value)


OPTIONS = Group("Options", sort_key=0)
FIRST_STEPS = Group("First steps", sort_key=1)
BENCHMARKS = Group("Benchmarks", sort_key=2)
A_FOLDER = Group("A results folder", sort_key=3)
WHAT_THERE_IS = Group("What there is", sort_key=4)

app = App(
    name="tl-localize",
    help="Which MLP neurons make a language model recite a text? Begin with tl-localize demo.",
    help_flags=["--help", "-h"],
    version_flags=["--version"],
    group_parameters=OPTIONS,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=(), allow_repeating=True, show_default=default_text),
)
for flag in ("--help", "--version"):
    app[flag].group = OPTIONS


Folder = Annotated[
    Path, Parameter(help="Results folder of tl-localize inj, del, rev, tune or collect.")
]


# First steps


@app.command(group=FIRST_STEPS, sort_key=1)
def demo(*, example: Example = "quotes-056") -> None:
    """A first look in half a minute: a text that the shipped model recites, and what ablating the
    named neurons does to it.
    """
    from tl_localize.cli.one_text import show_demo
    from tl_localize.report.terminal import console

    show_demo(console(), example)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LocalizeOptions:
    """Options of localize."""

    prefix: Annotated[str, Parameter(help="Text that prompts the model.")] = ""
    suffix: Annotated[
        str,
        Parameter(help="Text that the model recites after it; it usually begins with a space."),
    ] = ""
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
            help="Write the scores to this safetensors file, the token view beside it as .html."
        ),
    ] = None


@app.command(group=FIRST_STEPS, sort_key=2)
def localize(options: LocalizeOptions = LocalizeOptions()) -> None:
    """Score every neuron for one text, print the best ones, and ablate the top share of each layer
    to see what is forgotten.

    Layer 0 is left out, for it serves every text. With --units heads the same for attention heads.
    """
    from tl_localize.cli.one_text import localize_text

    localize_text(options)


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
        Path | None, Parameter(help="Write the known texts to this file (.jsonl), for del.")
    ] = None


@app.command(group=FIRST_STEPS, sort_key=3)
def known(options: KnownOptions = KnownOptions()) -> None:
    """Which of about 180 texts that everybody knows does a model recite?

    They are rules, lists, prose and code, and each is continued after its first 16 tokens, or the
    first third of a short one. A repeated random string is a control: it is continued by copying,
    not from memory.
    """
    from tl_localize.cli.lists import show_known

    show_known(options)


# Benchmarks


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
        float | None, Parameter(help="Of the injection. Default: the paper's, by ratio.")
    ] = None
    max_steps: Annotated[
        int | None, Parameter(help="Of the injection. Default: the paper's, by ratio.")
    ] = None
    distractors: Distractors = 0
    run: RunOptions = field(default_factory=RunOptions)


@app.command(group=BENCHMARKS, sort_key=1)
def inj(options: InjOptions = InjOptions()) -> None:
    """INJ: write new sentences into random rows of W_out, then ask each method which rows they are.

    With --units heads: into all rows of W_O of random heads, a sixth of all heads by default, and
    which heads they are. Prints recall (the share of the true rows among the top 1x, 2x and 5x as
    many neurons of each layer) and writes a results folder. In a folder that is there it computes
    only what is missing. Exit status 1: something failed or is missing, or an injection did not
    converge; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_inj

    run_inj(options)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DelOptions:
    """Options of del."""

    model: ModelOptions = field(default_factory=ModelOptions)
    texts: MemorizedOptions = field(default_factory=MemorizedOptions)
    methods: MethodOptions = field(default_factory=MethodOptions)
    ratio: Annotated[
        tuple[float, ...],
        Parameter(help="Shares to ablate. Default: the paper's, or by --max-others-lost."),
    ] = ()
    max_others_lost: Annotated[
        float | None,
        Parameter(
            help="Without --ratio ablate 1, 2, 4, ... of each layer until the others lose more "
            "than so many points (Neg). Default: 1 for models that the paper does not have."
        ),
    ] = None
    limit: Annotated[
        int | None,
        Parameter(
            validator=FROM_ONE, help="Dev ones included. Default: 105 without data, else all."
        ),
    ] = None
    targets: Annotated[
        int | None,
        Parameter(validator=FROM_ONE, help="How many. Default: 8 without data, else all."),
    ] = None
    ablation: Annotated[
        Literal["zero", "mean", "resample"], Parameter(help="What ablated neurons become.")
    ] = "zero"
    seed: Seed = 0
    run: RunOptions = field(default_factory=RunOptions)


@app.command(name="del", group=BENCHMARKS, sort_key=2)
def del_benchmark(options: DelOptions = DelOptions()) -> None:
    """DEL: ablate the neurons, or with --units the heads, that each method locates for a memorized
    sequence; is it forgotten, and only it?

    Prints the change of accuracy and distance of the sequence (Self) and the others (Neg) and of
    the perplexity, and writes a results folder with tables and figures. In a folder that is there
    it computes only what is missing. Without data a reference model's sequences are collected first
    (in all about 14 minutes on one core); of another model they are the texts of tl-localize known,
    one of each category. Exit status 1: something failed or is missing, or a shard has collected
    its part and others have not; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_del

    run_del(options)


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


@app.command(group=BENCHMARKS, sort_key=3)
def rev(options: RevOptions = RevOptions()) -> None:
    """REV: train sentences into all rows of W_out, then put back the rows that each method names;
    is its sentence forgotten, and only it?

    Prints own / others: the change of accuracy of the sentence and of the others in the model, in
    points, by share of each layer, and writes a results folder with tables and figures; there is
    also the other direction, the named rows given to the model before. In a folder that is there it
    computes only what is missing. Exit status 1: something failed or is missing, or a training did
    not converge; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_rev

    run_rev(options)


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


@app.command(group=BENCHMARKS, sort_key=4)
def tune(options: TuneOptions = TuneOptions()) -> None:
    """Try every setting of a grid on the dev sequences of a benchmark and keep the best one.

    What the grid leaves open is as in tl-localize inj or del, for the paper's models the paper's,
    and so is the ratio, the largest of theirs. INJ keeps the highest mean recall; DEL the largest
    loss of accuracy on the target minus that on the others (Self minus Neg). Prints all settings,
    the best first, and writes best_settings.json for --settings of tl-localize inj or del. In a
    folder that is there it computes only what is missing. Without data DEL of a model that is not
    shipped takes texts that it knows, the second best of each category; tl-localize del has the
    best. Exit status 1: something failed or is missing; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_tune

    run_tune(options)


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
        int, Parameter(help="Characters between the greedy continuation and the suffix.")
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


@app.command(group=BENCHMARKS, sort_key=5)
def collect(options: CollectOptions = CollectOptions()) -> None:
    """Find the sequences of a corpus that a model has memorized, for tl-localize del.

    Writes them with a report (how many each criterion removed, with examples) and general text for
    the perplexity. Without data a reference model's own training texts are searched. The corpus is
    searched in chunks, each of which is kept: a collection that was interrupted goes on with the
    same command, and the last step is made once all chunks are there. Exit status 1: a chunk
    failed or is missing; 130: interrupted.
    """
    from tl_localize.cli.collecting import run_collect

    run_collect(options)


# A results folder


@app.command(group=A_FOLDER, sort_key=1)
def status(folder: Folder, /) -> None:
    """What is done, missing and failed in a results folder."""
    from tl_localize.cli.publish import show_status

    show_status(folder)


@app.command(group=A_FOLDER, sort_key=2)
def table(folder: Folder, /) -> None:
    """All tables and figures from a results folder alone, into it; the model is not needed.

    Exit status 1: something failed, is missing or did not converge.
    """
    from tl_localize.cli.publish import conclude
    from tl_localize.execution import Store

    conclude(Store(folder, read_only=True))


# What there is


@app.command(group=WHAT_THERE_IS, sort_key=1)
def methods() -> None:
    """Which method answers which question, and all methods by the name that --methods takes."""
    from tl_localize.cli.lists import list_methods

    list_methods()
